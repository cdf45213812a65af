"""Callbacks: what the trainers of others call to checkpoint through us; their packages are not imported here.

Both keep what the trainer saves besides weights (progress, schedule, random numbers) and write into its own folder for
a step, so that rotation and resuming work as they do without us.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from transaxle.live.asynchronous import SaveJob, async_save
from transaxle.live.load import load
from transaxle.live.save import save

FOLDER = "transaxle"
"""The checkpoint's folder, inside that of the trainer."""
_EVENT = "on_"
_SCHEDULE = "lr_scheduler"


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Let an event pass."""


def _torch_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer that accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)  # type: ignore[no-any-return]


class TrainerCheckpoints:
    """A callback for transformers' `Trainer`: each `checkpoint-N` also holds a run's state in any layout.

    `trainer.train(resume_from_checkpoint=…)` then takes weights, optimizer and schedule from there, at any world size
    and sharding; the Trainer's own copies of these are not needed.

    Args:
        to: `FORMAT[:DIALECT]`, as for `save`.
        background: write while training goes on, as `async_save` does.
        **said: more arguments of `save`, such as `family` and `shard_size`.
    """

    def __init__(self, *, to: str = "hf", background: bool = True, **said: Any) -> None:
        self._to = to
        self._background = background
        self._said = said
        self._job: SaveJob | None = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith(_EVENT):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def on_train_begin(self, args: Any, state: Any, *_: Any, **given: Any) -> None:
        """Load what was saved, where the Trainer resumes from a checkpoint that this callback has written."""
        source = _folder(args, state)
        if state.global_step and source.exists():
            load(given["model"], source, optimizer=_torch_optimizer(given["optimizer"]), extra=_schedule(given))

    def on_save(self, args: Any, state: Any, *_: Any, **given: Any) -> None:
        """Save weights, optimizer and schedule beside what the Trainer has just saved."""
        said = {**self._said, "to": self._to, "overwrite": True, "extra": _schedule(given)}
        said["optimizer"] = _torch_optimizer(given["optimizer"])
        if self._background:
            self._job = async_save(given["model"], _folder(args, state), **said)
        else:
            save(given["model"], _folder(args, state), **said)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Wait for the last save.

        Raises:
            TransaxleError: what it failed with.
        """
        if self._job is not None:
            self._job.result()


def _schedule(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schedule of the learning rate, where a Trainer gives one."""
    found = given.get(_SCHEDULE)
    return {} if found is None else {_SCHEDULE: found}


def _folder(args: Any, state: Any) -> Path:
    """Return where a step's checkpoint lies, beside what the Trainer itself stores of that step."""
    return Path(args.output_dir, f"checkpoint-{state.global_step}", FOLDER)


class AccelerateHooks:
    """Hooks for accelerate: `save_state` writes a model through us, `load_state` reads it at any world size.

    `hooks.register(accelerator)` registers both. Weights that accelerate would write (without FSDP) are left out.

    Args:
        model: the prepared model.
        optimizer: its optimizer, whose state is to be in the checkpoint too; accelerate writes its own copy of what was
            prepared in any case, and loads that afterwards where it is not sharded.
        to: `FORMAT[:DIALECT]`, as for `save`.
        **said: more arguments of `save`.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None, *, to: str = "hf", **said: Any) -> None:
        self._model = model
        self._optimizer = None if optimizer is None else _torch_optimizer(optimizer)
        self._said = {**said, "to": to, "overwrite": True}

    def register(self, accelerator: Any) -> None:
        """Register both hooks with an `Accelerator`."""
        accelerator.register_save_state_pre_hook(self.save)
        accelerator.register_load_state_pre_hook(self.load)

    def save(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        """Save the model, and take its weights out of what accelerate is about to write."""
        save(self._model, Path(output_dir, FOLDER), optimizer=self._optimizer, **self._said)
        places = [place for place, model in enumerate(models) if model is self._model]
        for place in places if weights else ():
            del weights[place]

    def load(self, models: list[nn.Module], input_dir: str) -> None:
        """Load the model, and take it out of what accelerate is about to load."""
        load(self._model, Path(input_dir, FOLDER), optimizer=self._optimizer)
        models[:] = [model for model in models if model is not self._model]
