"""Callbacks: what the trainers of others call to checkpoint through us; their packages are not imported here.

Both keep what the trainer saves besides weights (progress, schedule, random numbers) and write into its own folder for
a step, so that rotation and resuming work as they do without us.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from transaxle.arguments import PathLike, read_path, shows, wrong_type
from transaxle.live.background.asynchronous import SaveJob, async_save
from transaxle.live.load.load import load
from transaxle.live.save.save import save
from transaxle.live.save.save_request import UNSAID, Saving, check_options
from transaxle.torch_tensors.module_wrappers import unwrapped
from transaxle.torch_tensors.torch_arguments import Ranks, read_group

FOLDER = "transaxle"
"""The checkpoint's folder, inside that of the trainer."""
_EVENT = "on_"
_SCHEDULE = "lr_scheduler"
_STATE_FILE, _HISTORY = "trainer_state.json", "log_history"
"""File in which the Trainer keeps its progress, and what it has logged so far."""


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Let an event pass."""


class TrainerCheckpoints:
    """A callback for transformers' `Trainer` that saves a run's state in any layout in each `checkpoint-N`.

    `trainer.train(resume_from_checkpoint=…)` then loads weights, optimizer and schedule from there, at any world size
    and sharding, after the Trainer has loaded its own copies. The Trainer deletes old checkpoints (`save_total_limit`)
    before this callback writes, so let it keep two.

    Args:
        to: `FORMAT[:DIALECT]`, as for `save`.
        background: write while training goes on, as `async_save` does.
        resume: the folder `checkpoint-N` to resume from, if it is not in the Trainer's `output_dir`: the Trainer does
            not pass it to callbacks.
        group: the ranks that train, and save, together; None: all.
        **options: those of `save`, such as `family` and `shard_size`.

    Raises:
        TypeError: an argument that there is not, or of a type that it cannot have.
        TransaxleError: a format, family or dialect that there is not; a config that cannot be read.
    """

    @shows(Saving, **UNSAID)
    def __init__(
        self,
        *,
        to: str = "hf",
        background: bool = True,
        resume: PathLike | None = None,
        group: Ranks | None = None,
        **options: Unpack[Saving],
    ) -> None:
        check_options("TrainerCheckpoints", to, options)
        if not isinstance(background, bool):
            raise wrong_type("background", "a bool: True or False", background)
        self._to = to
        self._background = background
        self._resume = None if resume is None else read_path("resume", resume)
        self._group = read_group("group", group)
        self._options = options
        self._job: SaveJob | None = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith(_EVENT):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def on_train_begin(self, args: Any, state: Any, *_: Any, **given: Any) -> None:
        """Load the state if the Trainer resumes from a checkpoint that this callback has written.

        Warns about a checkpoint without such a state: then the Trainer's own copies of weights and state apply.
        """
        if not state.global_step:
            return
        places = [place for place in (self._resume, args.resume_from_checkpoint, _folder(args, state).parent) if place]
        source = next((Path(place, FOLDER) for place in places if _is_of(state, Path(place))), None)
        if source is not None and source.exists():
            load(given["model"], source, optimizer=given["optimizer"], extra=_schedule(given), group=self._group)
        else:
            looked = ", ".join(str(Path(place, FOLDER)) for place in places)
            message = f"no checkpoint of this callback for step {state.global_step}: looked for {looked}; give resume="
            warnings.warn(
                f"{message} with the folder checkpoint-N. The Trainer's own copies are loaded instead", stacklevel=2
            )

    def on_step_end(self, _args: Any, _state: Any, control: Any = None, **_: Any) -> None:
        """Wait for the last save where another is due: before that, the Trainer may delete the one being written.

        Raises:
            TransaxleError: what it failed with.
        """
        if control is not None and control.should_save:
            self._wait()

    on_epoch_end = on_step_end

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Wait for the last save, because a Trainer that keeps the best checkpoint saves right after evaluating.

        Raises:
            TransaxleError: what it failed with.
        """
        self._wait()

    def on_save(self, args: Any, state: Any, *_: Any, **given: Any) -> None:
        """Save weights, optimizer and schedule beside the Trainer's own files."""
        told = {"optimizer": given["optimizer"], "extra": _schedule(given), "overwrite": True, "group": self._group}
        if self._background:
            self._job = async_save(given["model"], _folder(args, state), to=self._to, **told, **self._options)
        else:
            save(given["model"], _folder(args, state), to=self._to, **told, **self._options)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Wait for the last save.

        Raises:
            TransaxleError: what it failed with.
        """
        self._wait()

    def _wait(self) -> None:
        if self._job is not None:
            self._job.result()


def _schedule(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schedule of the learning rate, where a Trainer gives one."""
    found = given.get(_SCHEDULE)
    return {} if found is None else {_SCHEDULE: found}


def _folder(args: Any, state: Any) -> Path:
    """Return where a step's checkpoint lies, beside what the Trainer itself stores of that step."""
    return Path(args.output_dir, f"checkpoint-{state.global_step}", FOLDER)


def _is_of(state: Any, checkpoint: Path) -> bool:
    """Tell whether a Trainer's state was loaded from this checkpoint: its history of logs is the one stored there."""
    try:
        stored = json.loads((checkpoint / _STATE_FILE).read_bytes())[_HISTORY]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return json.dumps(stored) == json.dumps(state.log_history)


class AccelerateHooks:
    """Make accelerate's `save_state` and `load_state` use Transaxle, so a model loads at any world size.

    `hooks.register(accelerator)` registers both hooks. Accelerate then omits its own copy of the weights; with its FSDP
    plugin it first writes and reads model and optimizer itself, and the values that Transaxle loads afterwards win.

    Args:
        model: the prepared model.
        optimizer: its optimizer, to include its state in the checkpoint; accelerate always writes its own copy of a
            prepared optimizer, and loads that copy afterwards unless it is sharded.
        to: `FORMAT[:DIALECT]`, as for `save`.
        extra: other objects to save, as for `save`.
        group: the ranks that train, and save, together; None: all.
        **options: those of `save`.

    Raises:
        TypeError: an argument that there is not, or of a type that it cannot have.
        TransaxleError: a format, family or dialect that there is not; a config that cannot be read.
    """

    @shows(Saving, **UNSAID)
    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        to: str = "hf",
        extra: Mapping[str, Any] | None = None,
        group: Ranks | None = None,
        **options: Unpack[Saving],
    ) -> None:
        check_options("AccelerateHooks", to, options)
        if not isinstance(model, nn.Module):
            raise wrong_type("model", "a torch.nn.Module, as `accelerator.prepare` returns it", model)
        if extra is not None and not isinstance(extra, Mapping):
            raise wrong_type("extra", "a mapping of names to objects or plain data", extra)
        self._model = model
        self._optimizer = optimizer
        self._to = to
        self._extra = extra
        self._group = read_group("group", group)
        self._options = options

    def register(self, accelerator: Any) -> None:
        """Register both hooks with an `Accelerator`."""
        accelerator.register_save_state_pre_hook(self.save)
        accelerator.register_load_state_pre_hook(self.load)

    def save(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        """Save the model, and remove its weights from the list that accelerate will write."""
        told = {"optimizer": self._optimizer, "extra": self._extra, "overwrite": True, "group": self._group}
        save(self._model, Path(output_dir, FOLDER), to=self._to, **told, **self._options)
        places = [place for place, model in enumerate(models) if self._is_ours(model)]
        for place in places if weights else ():
            del weights[place]

    def load(self, models: list[nn.Module], input_dir: str) -> None:
        """Load the model, and remove it from the list that accelerate will load."""
        load(self._model, Path(input_dir, FOLDER), optimizer=self._optimizer, group=self._group)
        models[:] = [model for model in models if not self._is_ours(model)]

    def _is_ours(self, model: nn.Module) -> bool:
        """Tell whether accelerate speaks of our model; of what DDP wraps, it knows the inside."""
        return unwrapped(model) is unwrapped(self._model)
