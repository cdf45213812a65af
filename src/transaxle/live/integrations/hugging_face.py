"""A callback for transformers' Trainer and hooks for accelerate; neither package is imported by this module.

The callback does not change the Trainer's own files (progress, schedule, random states). The callback writes into the
Trainer's folder for a step, so that the Trainer can still rotate folders and resume. Or it writes under a URL, and
deletes old checkpoints at that URL itself.

The hooks for accelerate's `save_state` and `load_state` do not change accelerate's other files. The hooks write into
accelerate's folder. Or they write under a URL, and delete old checkpoints at that URL themselves.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from transaxle.arguments import Axes, Config, PathLike, Size, read_flag, read_path, suggests, wrong_type
from transaxle.engine.checkpoint.checkpoint import open_checkpoint
from transaxle.errors import refuse
from transaxle.formats.registry import MANIFEST
from transaxle.formats.storage.storage import is_url, parse_json
from transaxle.formats.store.staging import as_local_path
from transaxle.live.asynchronous import SaveJob, async_save
from transaxle.live.extra_state import FILE, Random, Stateful
from transaxle.live.integrations.step_checkpoints import (
    FOLDER,
    TICKET,
    StepCheckpoints,
    check_loadable,
    read_place,
    remove,
    states_beside,
    text_beside,
)
from transaxle.live.load import load
from transaxle.live.save import SAVING, check_options, check_savable, save
from transaxle.live.source_check import SourceCheck
from transaxle.live.transport.world import World
from transaxle.options import SHARD_SIZE, select
from transaxle.torch_tensors import Ranks, read_group, unwrap

_EVENT = "on_"
_SCHEDULE = "lr_scheduler"
_PREFIX = "checkpoint-"
"""Prefix of the folder name that the Trainer uses for a step's checkpoint."""
_STATE_FILE, _HISTORY = "trainer_state.json", "log_history"
"""Name of the Trainer's progress file, and key of the log history in that file."""
_PROGRESS = "trainer_state"
"""Key in a checkpoint's extra state under which the text of the Trainer's progress file is stored."""
_RANDOM, _SCALER = "random", "scaler"
"""Keys in a checkpoint's extra state for each rank's random state, and for the gradient scaler's state."""
_WEIGHTS = ".safetensors"
_BLOCK = 8 << 20


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, for Trainer events that this callback does not handle."""


class TrainerCheckpoints:
    """A callback for transformers' `Trainer` that saves a run's state, in any format and dialect, into each
    `checkpoint-N` folder.

    `trainer.train(resume_from_checkpoint=…)` then loads weights, optimizer, schedule and gradient scaler from that
    folder, with any number of ranks and any sharding. Random states are loaded only if the number of ranks is
    unchanged. The callback loads after the Trainer has loaded its own copies. The Trainer deletes old checkpoints
    (`save_total_limit`) before this callback writes, so the limit must be at least two.

    With `url`, each `checkpoint-N` is saved under that URL instead, together with the Trainer's progress. `fetch`
    copies the newest checkpoint to a machine that has none. The callback then deletes old checkpoints itself, after
    newer checkpoints are complete.

    Args:
        to: file format and dialect, `FORMAT[:DIALECT]`, as for `save`.
        background: whether to write the files while training continues, as `async_save` does.
        resume: path of the `checkpoint-N` to resume from, if it is neither in the Trainer's `output_dir` nor under
            `url`. (The Trainer does not pass such a path to callbacks.)
        group: the ranks that train and save together; None means all ranks.
        url: a folder or URL under which checkpoints are saved.
        keep: number of checkpoints to keep, in addition to the Trainer's best checkpoint; None means all.

    All other arguments are those of `save`.

    Raises:
        TypeError: if an argument has the wrong type.
        TransaxleError: if the format, family or dialect is unknown, or the config cannot be read.
    """

    @suggests
    def __init__(
        self,
        *,
        to: str = "hf",
        background: bool = True,
        resume: PathLike | None = None,
        group: Ranks | None = None,
        url: PathLike | None = None,
        keep: int | None = None,
        family: str | None = None,
        dialect: str | None = None,
        config: Config | None = None,
        axes: Axes | None = None,
        rules: PathLike | None = None,
        shard_size: Size = SHARD_SIZE,
        sync: bool = True,
        check_copies: bool = True,
        verify: bool = False,
    ) -> None:
        self._options = select(locals(), SAVING)
        check_options(to, self._options)
        place, count = read_place(url, keep)
        read_flag("background", background)
        self._to = to
        self._background = background
        self._resume = None if resume is None else as_local_path(read_path("resume", resume))
        self._group = read_group("group", group)
        self._steps = None if place is None else StepCheckpoints(place, count, self._group, background=background)
        self._job: SaveJob | None = None
        self._random: Any = None
        """The random state of this rank that was loaded, until it is applied to the random generators."""
        self._is_between = False
        """Whether the checkpoint from which the run resumes was saved between two epochs."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith(_EVENT):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def on_train_begin(self, args: Any, state: Any, *_: Any, **arguments: Any) -> None:
        """Check that the model can be saved. If the Trainer resumes from a checkpoint that this callback saved, load
        the state.

        If the Trainer resumes from another checkpoint, the callback warns, and the Trainer's own copies of weights and
        state are used.

        Raises:
            TransaxleError: if a save or a load of the model would be refused.
            StorageError: with code IO, if `url` cannot be reached.
        """
        name = _name(state.global_step)
        first = str(Path(args.output_dir, name, FOLDER)) if self._steps is None else self._steps.place(name)
        check_loadable(arguments["model"])
        check_savable(arguments["model"], first, to=self._to, group=self._group, **self._options)
        if not state.global_step:
            return
        places = [
            each for each in (self._resume, args.resume_from_checkpoint, str(Path(args.output_dir, name))) if each
        ]
        place_under_url = "" if self._steps is None else self._steps.place(name)
        places = [place_under_url, *places] if place_under_url else places

        def find_source() -> str:
            sources = (_source(state, each) for each in places)
            return next(
                (at for at in sources if at and (at != place_under_url or _is_of_one_save(state, at, places))), ""
            )

        sources = World(self._group).pool(find_source)
        if sources[0]:  # all ranks load the checkpoint that the first rank has found
            load(
                arguments["model"],
                sources[0],
                optimizer=arguments["optimizer"],
                extra=_schedule(arguments),
                group=self._group,
            )
            with (world := World(self._group)).together():
                extra_state = states_beside(sources[0], world)
            self._random, self._is_between = extra_state.get(_RANDOM), float(state.epoch or 0).is_integer()
            if extra_state.get(_SCALER) and (scaler := _scaler(arguments)):
                scaler[_SCALER].load_state_dict(extra_state[_SCALER])
        else:
            looked = ", ".join(each if is_url(each) else str(Path(each, FOLDER)) for each in places)
            message = f"no checkpoint of this callback for step {state.global_step}: looked for {looked}; give resume="
            warnings.warn(
                f"{message} with the folder checkpoint-N. The Trainer's own copies are loaded instead", stacklevel=2
            )

    def fetch(self, output_dir: PathLike) -> str | None:
        """Copy the newest complete checkpoint under `url` into a local folder, from which a Trainer can resume.

        Call this method before `train`, on one rank of each machine that has its own `output_dir`. The folder contains
        the weights and the progress. In `train`, each rank then loads its shards of the weights and all other state
        from `url`.

        Args:
            output_dir: the Trainer's `output_dir`, in which the folder `checkpoint-N` appears once it is complete.

        Returns:
            The path of the folder, for `trainer.train(resume_from_checkpoint=…)`; None if there is no checkpoint. An
            existing folder of the same step is left unchanged.

        Raises:
            TypeError: if `output_dir` is not a path.
            Refused: with code UNSUPPORTED, if there is no `url`, or if the checkpoint is not in safetensors format, the
                only format that the Trainer reads.
            StorageError: with code IO, if the checkpoint cannot be read, or the folder cannot be written.
        """
        folder = Path(read_path("output_dir", output_dir))
        if self._steps is None:
            raise refuse("UNSUPPORTED", "there is no url to fetch from", hint="Give TrainerCheckpoints(url=…).")
        steps = self._steps.steps(_PREFIX)
        if not steps:
            return None
        name = _name(max(steps))
        target = folder / name
        if not target.exists():
            progress = text_beside(self._steps.place(name), _PROGRESS)
            if progress is None:
                message = "this checkpoint was not saved by the callback: it has no progress of a Trainer"
                raise refuse(
                    "INCOMPLETE", message, file=self._steps.place(name), hint=("Load the checkpoint with tx.load.")
                )
            unfinished = folder / f".{name}-{os.getpid()}"
            unfinished.mkdir(parents=True)
            try:
                _copy_weights(self._steps.place(name), unfinished)
                (unfinished / _STATE_FILE).write_text(progress, "utf-8")
                unfinished.rename(target)
            except BaseException:
                shutil.rmtree(unfinished)
                raise
        return str(target)

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """If the checkpoint was saved between two epochs, restore its random state before the order of the data is
        drawn.
        """
        if self._is_between:
            self._set_random()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """If the checkpoint was saved within an epoch, restore its random state after the Trainer has skipped the
        earlier data.
        """
        self._set_random()

    def _set_random(self) -> None:
        state, self._random = self._random, None
        if state is not None:
            Random().load_state_dict(state)

    def on_step_end(self, _args: Any, _state: Any, control: Any = None, **_: Any) -> None:
        """If a new save is due, wait for the last save, because the Trainer may delete the checkpoint that is still
        being written.

        Raises:
            TransaxleError: if the last save has failed.
        """
        if control is not None and control.should_save:
            self._wait()

    on_epoch_end = on_step_end

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Wait for the last save, because a Trainer that keeps the best checkpoint saves again immediately after an
        evaluation.

        Raises:
            TransaxleError: if the last save has failed.
        """
        self._wait()

    def on_save(self, args: Any, state: Any, control: Any = None, **arguments: Any) -> None:
        """Save weights, optimizer and schedule beside the Trainer's own files, or under `url`."""
        extra = {**_schedule(arguments), **_scaler(arguments), _RANDOM: Random()}
        options = {"to": self._to, "optimizer": arguments["optimizer"], "extra": extra, **self._options}
        if self._steps is not None:
            own_progress = json.dumps(dataclasses.asdict(state), sort_keys=True), uuid.uuid4().hex
            progress, ticket = World(self._group).gather(own_progress)[0]
            extra |= {_PROGRESS: progress, TICKET: ticket}
            best = _name(state.best_global_step) if state.best_global_step else None
            with suppress(FileNotFoundError):
                Path(args.output_dir, _name(state.global_step), TICKET).write_text(ticket, "utf-8")
            self._steps.save(arguments["model"], _name(state.global_step), best, **options)
            return
        place = Path(args.output_dir, _name(state.global_step), FOLDER)
        self._wait()
        with (world := World(self._group)).together():
            if world.rank == world.ranks[0]:
                # an earlier run left this folder; the Trainer has just replaced the other files of that run
                remove(str(place))
        options |= {"overwrite": True, "group": self._group}
        if not self._background:
            save(arguments["model"], place, **options)
            return
        self._job = async_save(arguments["model"], place, **options)
        if control is not None and control.should_training_stop:
            # if it keeps one checkpoint, the Trainer deletes all except the best before it calls `on_train_end`
            self._wait()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Wait for the last save.

        Raises:
            TransaxleError: if the last save has failed.
        """
        self._wait()

    def _wait(self) -> None:
        if self._job is not None:
            self._job.result()
        if self._steps is not None:
            self._steps.wait()


def _schedule(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return name -> learning rate schedule; empty if the Trainer passes no schedule."""
    schedule = arguments.get(_SCHEDULE)
    return {} if schedule is None else {_SCHEDULE: schedule}


def _scaler(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return name -> gradient scaler, which accelerate's optimizer has for half precision; empty without a gradient
    scaler.
    """
    scaler = getattr(arguments["optimizer"], _SCALER, None)
    return {_SCALER: scaler} if isinstance(scaler, Stateful) else {}


def _name(step: int) -> str:
    """Return the folder name that the Trainer uses for a step's checkpoint."""
    return f"{_PREFIX}{step}"


def _source(state: Any, place: str) -> str:
    """Return `place` or its subfolder, whichever contains this callback's checkpoint for a Trainer's state; return ""
    if neither does.

    The checkpoint belongs to the Trainer's state if both have the same log history.

    Raises:
        StorageError: with code IO, if files cannot be read or written.
    """
    if not is_url(place):
        with suppress(OSError):
            if _has_history(state, Path(place, _STATE_FILE).read_bytes()) and Path(place, FOLDER).exists():
                return str(Path(place, FOLDER))
    return place if _has_history(state, (text_beside(place, _PROGRESS) or "").encode()) else ""


def _is_of_one_save(state: Any, place: str, folders: Sequence[str]) -> bool:
    """Return whether a checkpoint under a URL and a Trainer's folder were written by the same save; two runs may have
    equal log histories.

    A folder without a save ID, such as a folder that `fetch` wrote, is accepted.

    Raises:
        StorageError: with code IO, if files cannot be read or written.
    """
    tickets = set()
    for folder in folders:
        with suppress(OSError):
            if _has_history(state, Path(folder, _STATE_FILE).read_bytes()):
                tickets.add(Path(folder, TICKET).read_text("utf-8"))
    return not tickets or text_beside(place, TICKET) in tickets


def _has_history(state: Any, text: bytes) -> bool:
    """Return whether the text of a Trainer's progress file has the same log history as a Trainer's state."""
    try:
        return json.dumps(parse_json(text)[_HISTORY]) == json.dumps(state.log_history)
    except (ValueError, LookupError, TypeError):
        return False


def _copy_weights(place: str, folder: Path) -> None:
    """Copy the files of a checkpoint that contain the model's weights, but not the files of the optimizer.

    Raises:
        Refused: with code UNSUPPORTED, if the checkpoint has no safetensors files; with code CORRUPT, if it is damaged,
            or changes while it is copied.
        StorageError: with code IO, if files cannot be read or written.
    """
    with open_checkpoint(place) as checkpoint:
        storage = checkpoint.container.storage
        names = [name for name in storage.listing("").names if name not in (MANIFEST, FILE)]
        if not any(name.endswith(_WEIGHTS) for name in names):
            hint = f'Convert it:  tx.convert("{place}", "{folder.parent}/checkpoint-N", to="hf")'
            raise refuse("UNSUPPORTED", "a Trainer reads safetensors files, and there are none", file=place, hint=hint)
        check = SourceCheck(checkpoint, World.alone(), is_enabled=True)
        for name in names:
            size = storage.size(name)
            with (folder / name).open("wb") as file:
                for start in range(0, size, _BLOCK):
                    file.write(storage.read(name, start, min(_BLOCK, size - start)))
        check.finish()


_BEST = "transaxle_best"
"""Key in a checkpoint's extra state under which the name of the best checkpoint is stored."""


class AccelerateHooks:
    """Hooks that make accelerate's `save_state` and `load_state` use Transaxle, so that any number of ranks can load
    the model.

    `hooks.register(accelerator)` registers both hooks. Accelerate then omits its own copy of the weights. With FSDP,
    accelerate still writes and reads model and optimizer itself; but Transaxle loads afterwards, and its values replace
    those of accelerate.

    One `AccelerateHooks` object handles one model. If there are several models, the first registered object saves into
    `transaxle`, the next into `transaxle_1`, and so on, as accelerate numbers its own files. So register the objects in
    the same order when you load.

    With `url`, the checkpoint of `save_state("out/checkpoint_3")` is saved as `checkpoint_3` under that URL, and old
    checkpoints are deleted after newer ones are complete. The files that accelerate writes remain in its folder. The
    hooks of each model need a different URL.

    Args:
        model: the prepared model.
        optimizer: the model's optimizer, if its state is to be in the checkpoint. Accelerate always writes its own copy
            of a prepared optimizer, and loads that copy afterwards unless the optimizer is sharded.
        to: file format and dialect, `FORMAT[:DIALECT]`, as for `save`.
        extra: additional objects to save, as for `save`; `load_state` restores objects that have the method
            `load_state_dict`.
        background: with `url`, whether to write files while training continues, as `async_save` does. Call `wait` at
            the end.
        group: the ranks that train and save together; None means all ranks.
        url: a folder or URL under which checkpoints are saved.
        keep: number of checkpoints to keep, in addition to the checkpoint that `keep_best` protects; None means all.
            With `keep`, the folder names passed to `save_state` must end in the number of the step.

    All other arguments are those of `save`.

    Raises:
        TypeError: if an argument has the wrong type.
        TransaxleError: if the format, family or dialect is unknown, or the config cannot be read.
    """

    @suggests
    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        to: str = "hf",
        extra: Mapping[str, Any] | None = None,
        background: bool = False,
        group: Ranks | None = None,
        url: PathLike | None = None,
        keep: int | None = None,
        family: str | None = None,
        dialect: str | None = None,
        config: Config | None = None,
        axes: Axes | None = None,
        rules: PathLike | None = None,
        shard_size: Size = SHARD_SIZE,
        sync: bool = True,
        check_copies: bool = True,
        verify: bool = False,
    ) -> None:
        self._options = select(locals(), SAVING)
        check_options(to, self._options)
        place, count = read_place(url, keep)
        if not isinstance(model, nn.Module):
            raise wrong_type("model", "a torch.nn.Module, as `accelerator.prepare` returns it", model)
        if extra is not None and not isinstance(extra, Mapping):
            raise wrong_type("extra", "a mapping of names to objects or plain data", extra)
        read_flag("background", background)
        if background and url is None:
            hint = "Give url=, to save outside accelerate's folder."
            raise refuse("UNSUPPORTED", "accelerate expects its folder to be complete: no background there", hint=hint)
        self._model = model
        self._optimizer = optimizer
        self._to = to
        self._extra = extra
        self._before: list[AccelerateHooks] = []
        self._handles: list[Any] = []
        self._is_prepared = False
        self._group = read_group("group", group)
        self._steps = None if place is None else StepCheckpoints(place, count, self._group, background=background)

    def register(self, accelerator: Any) -> None:
        """Register both hooks with an `Accelerator`, and remove the hooks of models that the accelerator's
        `free_memory` has dropped.

        Raises:
            Refused: with code NAME_COLLISION, if hooks of a different model of this accelerator use the same `url`;
                with code UNSUPPORTED, if `load_state` could not load into the model, because the
                model's values are stored by DeepSpeed or are offloaded.
        """
        check_loadable(self._model)
        registered = _REGISTERED.setdefault(accelerator, [])
        if any(each._is_prepared and not each._is_among(accelerator._models) for each in registered):
            for handle in (handle for each in registered for handle in each._handles):
                handle.remove()
            registered.clear()
        if self._steps is not None and any(self._steps.shares(each._steps) for each in registered):
            hint = "Give the hooks of each model a url of their own."
            raise refuse("NAME_COLLISION", "other hooks of this accelerator save under this url", hint=hint)
        self._before = list(registered)
        self._is_prepared = self._is_among(accelerator._models)
        registered.append(self)
        self._handles = [
            accelerator.register_save_state_pre_hook(self.save),
            accelerator.register_load_state_pre_hook(self.load),
        ]

    def save(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        """Save the model, and remove its weights from the list of weights that accelerate will write.

        Raises:
            TransaxleError: any error that `save` raises; with code UNSUPPORTED, if another hook has already removed
                weights from the list.
        """
        remaining = [model for model in models if not any(each._is_ours(model) for each in self._before)]
        if weights and len(weights) != len(remaining):
            message = (
                f"accelerate has {len(remaining)} models here, but another hook has left the weights of {len(weights)}"
            )
            raise refuse("UNSUPPORTED", message, hint="Register AccelerateHooks before the other hook.")
        options = {"to": self._to, "optimizer": self._optimizer, "extra": self._extra, **self._options}
        if self._steps is not None:
            best, ticket = World(self._group).gather((self._steps.best, uuid.uuid4().hex))[0]
            options["extra"] = {**(self._extra or {}), TICKET: ticket, **({} if best is None else {_BEST: best})}
            with suppress(FileNotFoundError):
                Path(output_dir, self._folder(TICKET)).write_text(ticket, "utf-8")
            self._steps.save(self._model, Path(output_dir).name, **options)
        else:
            save(self._model, Path(output_dir, self._folder(FOLDER)), overwrite=True, group=self._group, **options)
        if weights:
            weights[:] = [
                model_weights
                for model, model_weights in zip(remaining, weights, strict=True)
                if not self._is_ours(model)
            ]

    def load(self, models: list[nn.Module], input_dir: str) -> None:
        """Load the model, and remove it from the list of models that accelerate will load.

        Raises:
            TransaxleError: any error that `load` raises; with code INCOMPLETE, if the checkpoint under `url` was
                written by an earlier save.
        """
        self.wait()
        steps = self._steps
        place = str(Path(input_dir, self._folder(FOLDER)) if steps is None else steps.place(Path(input_dir).name))
        stateful = {name: each for name, each in (self._extra or {}).items() if isinstance(each, Stateful)}
        world, best = World(self._group), None
        if steps is not None:
            best, ticket = world.pool(lambda: (text_beside(place, _BEST), text_beside(place, TICKET)))[0]
            with world.together():
                self._check_ticket(input_dir, place, ticket)
        load(self._model, place, optimizer=self._optimizer, extra=stateful, group=self._group)
        if steps is not None:
            steps.best = steps.best or best
        models[:] = [model for model in models if not self._is_ours(model)]

    def _folder(self, name: str) -> str:
        """Add the number of this model to a folder name, as accelerate numbers its own files."""
        return f"{name}_{len(self._before)}" if self._before else name

    def _check_ticket(self, input_dir: str, place: str, ticket: str | None) -> None:
        """Refuse a checkpoint under `url` if accelerate's folder was written by a later save that did not complete.

        Raises:
            Refused: with code INCOMPLETE, if checkpoint and folder were written by different saves.
        """
        try:
            own_ticket = Path(input_dir, self._folder(TICKET)).read_text("utf-8")
        except FileNotFoundError:
            return
        if ticket is not None and ticket != own_ticket:
            message = f"{input_dir} was saved again, but the checkpoint here is still that of the save before"
            hint = "Load the checkpoint of another step: this save was not completed."
            raise refuse("INCOMPLETE", message, file=place, hint=hint)

    def keep_best(self, output_dir: PathLike | None) -> None:
        """Protect the best checkpoint from being deleted for its age; the former best checkpoint is no longer
        protected.

        Later checkpoints store the name of the best checkpoint, and `load_state` of a later checkpoint protects it
        again.

        Args:
            output_dir: path of the best checkpoint, as passed to or returned by `save_state`; None means that no
                checkpoint is protected.

        Raises:
            TypeError: if `output_dir` is not a path.
            Refused: with code UNSUPPORTED, if there is no `url`: then accelerate deletes old checkpoints, and this
                class cannot protect any.
        """
        if self._steps is None:
            hint = "Give AccelerateHooks(url=…, keep=…), or copy it elsewhere."
            raise refuse("UNSUPPORTED", "accelerate deletes its checkpoints itself", hint=hint)
        self._steps.best = None if output_dir is None else Path(read_path("output_dir", output_dir)).name

    def wait(self) -> None:
        """Wait for the last background save, and delete the checkpoints that it replaces.

        Raises:
            TransaxleError: if the save has failed.
        """
        if self._steps is not None:
            self._steps.wait()

    def _is_ours(self, model: nn.Module) -> bool:
        """Return whether accelerate's model is the model of this object; for a model in DDP, accelerate may pass the
        inner model.
        """
        return unwrap(model) is unwrap(self._model)

    def _is_among(self, models: list[nn.Module]) -> bool:
        return any(self._is_ours(model) for model in models)


_REGISTERED: WeakKeyDictionary[Any, list[AccelerateHooks]] = WeakKeyDictionary()
"""`Accelerator` -> the hooks registered with it, in the order in which they run."""
