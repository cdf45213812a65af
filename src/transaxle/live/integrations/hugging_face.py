"""A callback for transformers' Trainer and hooks for accelerate, neither of which is imported here.

The callback leaves the Trainer's own files (progress, schedule, random states) unchanged. It writes into the Trainer's
folder for a step, so that rotation and resuming still work; or it writes under a URL, and deletes old checkpoints there
itself.

The hooks for accelerate's `save_state` and `load_state` leave accelerate's other files unchanged. They write into
accelerate's folder; or they write under a URL, and delete old checkpoints there themselves.
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
from transaxle.errors import refuse
from transaxle.formats.registry import MANIFEST
from transaxle.formats.storage.storage import is_url, parse_json
from transaxle.formats.store.staging import as_local_path, storage_at
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
from transaxle.live.transport.world import World
from transaxle.options import SHARD_SIZE, select
from transaxle.torch_tensors import Ranks, read_group, unwrap

_EVENT = "on_"
_SCHEDULE = "lr_scheduler"
_PREFIX = "checkpoint-"
"""Prefix of the name that the Trainer gives to a step's folder."""
_STATE_FILE, _HISTORY = "trainer_state.json", "log_history"
"""The Trainer's progress file, and the key of its log history in that file."""
_PROGRESS = "trainer_state"
"""Key, in a checkpoint's extra state, of the text of the Trainer's progress file."""
_RANDOM, _SCALER = "random", "scaler"
"""Keys, in a checkpoint's extra state, of each rank's random state and of the gradient scaler's state."""
_WEIGHTS = ".safetensors"
_BLOCK = 8 << 20


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, for Trainer events that this callback does not handle."""


class TrainerCheckpoints:
    """A callback for transformers' `Trainer` that saves a run's state, in any format and dialect, into each
    `checkpoint-N` folder.

    `trainer.train(resume_from_checkpoint=…)` then loads weights, optimizer, schedule and gradient scaler from that
    folder, at any world size and sharding, and random states if the world size is unchanged; all this after the Trainer
    has loaded its own copies. The Trainer deletes old checkpoints (`save_total_limit`) before this callback writes, so
    let the Trainer keep at least two.

    With `url`, each `checkpoint-N` is saved under that URL instead, together with the Trainer's progress: `fetch`
    copies the newest one back to a machine that has none. The callback then deletes old checkpoints itself, once newer
    ones are complete.

    Args:
        to: `FORMAT[:DIALECT]`, as for `save`.
        background: whether to write the files while training continues, as `async_save` does.
        resume: the `checkpoint-N` to resume from, if it is neither in the Trainer's `output_dir` nor under `url`: the
            Trainer does not pass such a path to callbacks.
        group: the ranks that train and save together; None: all ranks.
        url: a folder or URL for the checkpoints.
        keep: number of checkpoints to keep, in addition to the Trainer's best checkpoint; None: keep all.

    All other arguments are the same as for `save`.

    Raises:
        TypeError: an argument has a wrong type.
        TransaxleError: the format, family or dialect is unknown, or the config cannot be read.
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
        """This rank's loaded random state, until the random generators are set to it."""
        self._is_between = False
        """Whether the checkpoint that the run resumes from was saved between two epochs."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith(_EVENT):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def on_train_begin(self, args: Any, state: Any, *_: Any, **arguments: Any) -> None:
        """Check that the model can be saved; load the state if the Trainer resumes from a checkpoint that this callback
        saved.

        If the Trainer resumes but has no such checkpoint, it warns: then the Trainer's own copies of weights and state
        are used.

        Raises:
            TransaxleError: a save or a load of the model would be refused.
            StorageError: IO, if `url` cannot be reached.
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
        if sources[0]:  # all ranks load the checkpoint that the first rank found
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
        """Copy the newest complete checkpoint under `url` back into a local folder, from which a Trainer can resume.

        Call it on one rank of each machine that has an `output_dir` of its own, before `train`. The folder contains the
        weights and the progress; in `train`, each rank then loads its part of the weights and all other state from
        `url`.

        Args:
            output_dir: the Trainer's `output_dir`, in which the folder `checkpoint-N` appears once it is complete.

        Returns:
            The folder, for `trainer.train(resume_from_checkpoint=…)`; None if there is no checkpoint. An existing
            folder of the same step is left unchanged.

        Raises:
            TypeError: `output_dir` is no path.
            Refused: UNSUPPORTED, if there is no `url`, or if the checkpoint is not in safetensors, the only format that
                the Trainer reads.
            StorageError: IO, if the checkpoint cannot be read, or the folder cannot be written.
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
                raise refuse("INCOMPLETE", message, file=self._steps.place(name), hint="Load it with tx.load.")
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
        """If the checkpoint was saved between two epochs, set its random state before the order of the data is
        drawn.
        """
        if self._is_between:
            self._set_random()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """If the checkpoint was saved within an epoch, set its random state once the Trainer has skipped the earlier
        data.
        """
        self._set_random()

    def _set_random(self) -> None:
        state, self._random = self._random, None
        if state is not None:
            Random().load_state_dict(state)

    def on_step_end(self, _args: Any, _state: Any, control: Any = None, **_: Any) -> None:
        """Wait for the last save if a new save is due, since the Trainer may then delete the checkpoint that is being
        written.

        Raises:
            TransaxleError: the save has failed.
        """
        if control is not None and control.should_save:
            self._wait()

    on_epoch_end = on_step_end

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Wait for the last save, because a Trainer that keeps the best checkpoint saves again right after evaluating.

        Raises:
            TransaxleError: the save has failed.
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
                remove(str(place))  # an earlier run left it; the Trainer has just replaced that run's other files
        options |= {"overwrite": True, "group": self._group}
        if not self._background:
            save(arguments["model"], place, **options)
            return
        self._job = async_save(arguments["model"], place, **options)
        if control is not None and control.should_training_stop:
            self._wait()  # if it keeps one checkpoint, the Trainer deletes all but the best before `on_train_end`

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Wait for the last save.

        Raises:
            TransaxleError: the save has failed.
        """
        self._wait()

    def _wait(self) -> None:
        if self._job is not None:
            self._job.result()
        if self._steps is not None:
            self._steps.wait()


def _schedule(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the learning rate schedule by name; empty if the Trainer passes none."""
    schedule = arguments.get(_SCHEDULE)
    return {} if schedule is None else {_SCHEDULE: schedule}


def _scaler(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the gradient scaler by name, which accelerate's optimizer has for half precision; empty if there is
    none.
    """
    scaler = getattr(arguments["optimizer"], _SCALER, None)
    return {_SCALER: scaler} if isinstance(scaler, Stateful) else {}


def _name(step: int) -> str:
    """Return the name that the Trainer gives to a step's folder."""
    return f"{_PREFIX}{step}"


def _source(state: Any, place: str) -> str:
    """Return `place` or its subfolder, whichever has this callback's checkpoint for a Trainer's state; "" if neither
    has.

    The checkpoint belongs to the state if both have the same log history.

    Raises:
        StorageError: IO, if files cannot be read or written.
    """
    if not is_url(place):
        with suppress(OSError):
            if _has_history(state, Path(place, _STATE_FILE).read_bytes()) and Path(place, FOLDER).exists():
                return str(Path(place, FOLDER))
    return place if _has_history(state, (text_beside(place, _PROGRESS) or "").encode()) else ""


def _is_of_one_save(state: Any, place: str, folders: Sequence[str]) -> bool:
    """Tell whether a checkpoint under a URL and a Trainer's folder come from one save; two runs may have equal log
    histories.

    A folder without a save ID, such as a folder from `fetch`, is accepted.

    Raises:
        StorageError: IO, if files cannot be read or written.
    """
    tickets = set()
    for folder in folders:
        with suppress(OSError):
            if _has_history(state, Path(folder, _STATE_FILE).read_bytes()):
                tickets.add(Path(folder, TICKET).read_text("utf-8"))
    return not tickets or text_beside(place, TICKET) in tickets


def _has_history(state: Any, text: bytes) -> bool:
    """Tell whether the text of a Trainer's progress file has the same log history as a Trainer's state."""
    try:
        return json.dumps(parse_json(text)[_HISTORY]) == json.dumps(state.log_history)
    except (ValueError, LookupError, TypeError):
        return False


def _copy_weights(place: str, folder: Path) -> None:
    """Copy the files of a checkpoint that contain the model's weights, but not its optimizer files.

    Raises:
        Refused: UNSUPPORTED, if the checkpoint has no safetensors files; CORRUPT, if it changes while it is copied.
        StorageError: IO, if files cannot be read or written.
    """
    storage = storage_at(place)
    names = [name for name in storage.listing("").names if name not in (MANIFEST, FILE)]
    if not any(name.endswith(_WEIGHTS) for name in names):
        hint = f'Convert it:  tx.convert("{place}", "{folder.parent}/checkpoint-N", to="hf")'
        raise refuse("UNSUPPORTED", "a Trainer reads safetensors files, and there are none", file=place, hint=hint)
    for name in names:
        size = storage.size(name)
        with (folder / name).open("wb") as file:
            for start in range(0, size, _BLOCK):
                file.write(storage.read(name, start, min(_BLOCK, size - start)))


_BEST = "transaxle_best"
"""Key, in a checkpoint's extra state, of the best checkpoint's name."""


class AccelerateHooks:
    """Hooks that make accelerate's `save_state` and `load_state` use Transaxle, so that a model loads at any world
    size.

    `hooks.register(accelerator)` registers both hooks. Accelerate then omits its own copy of the weights; with its FSDP
    plugin, accelerate still writes and reads model and optimizer itself, but Transaxle loads afterwards, and its values
    replace accelerate's.

    One hooks object handles one model. If there are several, the first registered object saves into `transaxle`, the
    next one into `transaxle_1`, and so on, as accelerate numbers its own files: register them in the same order when
    you load.

    With `url`, the checkpoint of `save_state("out/checkpoint_3")` is saved as `checkpoint_3` under that URL, and old
    checkpoints are deleted once newer ones are complete; accelerate's own files stay in its folder. The hooks of each
    model need a URL of their own.

    Args:
        model: the prepared model.
        optimizer: the model's optimizer, to include its state in the checkpoint; accelerate always writes its own copy
            of a prepared optimizer, and unless the optimizer is sharded, loads that copy afterwards.
        to: `FORMAT[:DIALECT]`, as for `save`.
        extra: further objects to save, as for `save`; `load_state` restores objects that have `load_state_dict`.
        background: with `url`, whether to write files while training continues, as `async_save` does; call `wait` at
            the end.
        group: the ranks that train and save together; None: all ranks.
        url: a folder or URL for the checkpoints.
        keep: number of checkpoints to keep, in addition to the one that `keep_best` protects; None: keep all. With
            `keep`, the folder names passed to `save_state` must end in the step's number.

    All other arguments are the same as for `save`.

    Raises:
        TypeError: an argument has a wrong type.
        TransaxleError: the format, family or dialect is unknown, or the config cannot be read.
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
        """Register both hooks with an `Accelerator`, and remove hooks of models that its `free_memory` has dropped.

        Raises:
            Refused: NAME_COLLISION, if hooks of a different model of this accelerator use the same `url`; UNSUPPORTED,
                if `load_state` could not load into the model, because DeepSpeed keeps its values or they are offloaded.
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
        """Save the model, and remove its weights from the list that accelerate will write.

        Raises:
            TransaxleError: an error of `save`; UNSUPPORTED, if a different hook has already removed weights from the
                list.
        """
        remaining = [model for model in models if not any(each._is_ours(model) for each in self._before)]
        if weights and len(weights) != len(remaining):
            message = (
                f"accelerate has {len(remaining)} models here, but another hook has left the weights of {len(weights)}"
            )
            raise refuse("UNSUPPORTED", message, hint="Register AccelerateHooks before it.")
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
        """Load the model, and remove it from the list that accelerate will load.

        Raises:
            TransaxleError: an error of `load`; INCOMPLETE, if the checkpoint under `url` is from an earlier save.
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
        """Add this model's number to a folder name, as accelerate numbers its own files."""
        return f"{name}_{len(self._before)}" if self._before else name

    def _check_ticket(self, input_dir: str, place: str, ticket: str | None) -> None:
        """Refuse a checkpoint under `url` if accelerate's folder is from a later save that did not complete.

        Raises:
            Refused: INCOMPLETE, if the two are from different saves.
        """
        try:
            own_ticket = Path(input_dir, self._folder(TICKET)).read_text("utf-8")
        except FileNotFoundError:
            return
        if ticket is not None and ticket != own_ticket:
            message = f"{input_dir} was saved again, but the checkpoint here is still that of the save before"
            hint = "Load another step: that save was not completed."
            raise refuse("INCOMPLETE", message, file=place, hint=hint)

    def keep_best(self, output_dir: PathLike | None) -> None:
        """Protect the best checkpoint from deletion by age; the former best checkpoint is no longer protected.

        Later checkpoints store the best checkpoint's name, and `load_state` of a later checkpoint protects it again.

        Args:
            output_dir: path of the best checkpoint, as given to or returned by `save_state`; None: protect no
                checkpoint.

        Raises:
            TypeError: `output_dir` is no path.
            Refused: UNSUPPORTED, if there is no `url`: accelerate alone deletes its local folders.
        """
        if self._steps is None:
            hint = "Give AccelerateHooks(url=…, keep=…), or copy it elsewhere."
            raise refuse("UNSUPPORTED", "accelerate deletes its checkpoints itself", hint=hint)
        self._steps.best = None if output_dir is None else Path(read_path("output_dir", output_dir)).name

    def wait(self) -> None:
        """Wait for the last background save, and delete the checkpoints that it replaces.

        Raises:
            TransaxleError: the save has failed.
        """
        if self._steps is not None:
            self._steps.wait()

    def _is_ours(self, model: nn.Module) -> bool:
        """Tell whether a model from accelerate is this object's model; for a model in DDP, accelerate may pass the
        inner model.
        """
        return unwrap(model) is unwrap(self._model)

    def _is_among(self, models: list[nn.Module]) -> bool:
        return any(self._is_ours(model) for model in models)


_REGISTERED: WeakKeyDictionary[Any, list[AccelerateHooks]] = WeakKeyDictionary()
"""`Accelerator` -> its registered hooks, in the order in which they run."""
