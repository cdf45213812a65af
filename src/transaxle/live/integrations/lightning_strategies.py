"""Lightning's strategies: how each of them saves, and how every rank takes part in it.

A strategy asks a `CheckpointIO` on its first rank only, so the others would wait for one that has failed; those that
shard do not ask it at all, but still have it delete. When a run begins, the strategy at hand gets functions of ours.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, Protocol

from torch import nn

from transaxle.errors import refuse
from transaxle.live.transport.world import World

_CONFIGURE = "configure_callbacks"
"""Hook of a `LightningModule` that is called on every rank when a run begins, before anything is set up."""
_SAVE, _LOAD = "save_checkpoint", "load_checkpoint"
_PACKAGES = ("pytorch_lightning.strategies", "lightning.pytorch.strategies")
_BASE, _SHARDED = "Strategy", "ModelParallelStrategy"
_PARTS = "_save_distributed_checkpoint"
"""Attribute of the sharded strategy that tells whether ranks give their own parts, and not one of them everything."""
_INNER = "checkpoint_io"
_AVERAGING = "WeightAveraging"
_SPAWNING = "_MultiProcessingLauncher"
"""Class that starts the ranks of `ddp_spawn`, `ddp_fork` and `ddp_notebook`."""


class Checkpoints(Protocol):
    """A `CheckpointIO` of ours."""

    is_sharded: bool
    """Whether every rank saves its own parts; else the first one saves everything."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: object = None) -> None:
        """Save."""

    def load_checkpoint(self, path: Any) -> dict[str, Any]:
        """Load."""

    def remove_checkpoint(self, path: Any) -> None:
        """Delete."""

    def teardown(self) -> None:
        """Wait for the last save."""


def follow(module: nn.Module, kind: type[Checkpoints]) -> None:
    """Let every run of a `LightningModule` begin with `take_part`, if its trainer has a `CheckpointIO` of a kind."""
    configure = getattr(module, _CONFIGURE, None)
    if configure is not None and _CONFIGURE not in vars(module):
        setattr(module, _CONFIGURE, partial(_begin, module, configure, kind))


def _begin(module: Any, configure: Any, kind: type[Checkpoints]) -> Any:
    """Stand in for `configure_callbacks`."""
    checkpoints = module.trainer.strategy.checkpoint_io
    if isinstance(getattr(checkpoints, _INNER, None), kind):
        message = f"{type(checkpoints).__name__} saves in a thread, while training goes on and changes the weights"
        raise refuse("UNSUPPORTED", message, hint="Give LightningCheckpoints(…, background=True) alone.")
    if isinstance(checkpoints, kind):
        take_part(module.trainer, checkpoints)
    return configure()


def take_part(trainer: Any, checkpoints: Checkpoints) -> None:
    """Let every rank take part in what a trainer's strategy does with checkpoints, and raise what any rank met.

    Raises:
        Refused: UNSUPPORTED for a strategy that saves in a way of its own, or ranks that start in one of its own.
    """
    strategy = trainer.strategy
    checkpoints.is_sharded = _is_sharded(strategy)
    if checkpoints.is_sharded:
        _check_sharded(trainer)
    else:
        _check_whole(strategy)
    ranks = _Ranks(strategy, checkpoints)
    strategy.save_checkpoint, strategy.load_checkpoint = ranks.save, ranks.load
    strategy.remove_checkpoint, strategy.on_train_end = ranks.remove, ranks.end


class _Ranks:
    """Takes the place of a strategy's own functions."""

    def __init__(self, strategy: Any, checkpoints: Checkpoints) -> None:
        self._strategy = strategy
        self._checkpoints = checkpoints

    def save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: object = None) -> None:
        is_sharded = self._checkpoints.is_sharded
        path = self._strategy.broadcast(filepath) if is_sharded else filepath
        with World().together():
            if is_sharded or self._strategy.is_global_zero:
                self._checkpoints.save_checkpoint(checkpoint, path, storage_options)

    def load(self, checkpoint_path: Any, weights_only: object = None) -> dict[str, Any]:  # noqa: ARG002 - Lightning's
        return self._checkpoints.load_checkpoint(self._strategy.broadcast(checkpoint_path))

    def remove(self, filepath: Any) -> None:
        with World().together():
            if self._checkpoints.is_sharded:
                self._checkpoints.teardown()
            if self._strategy.is_global_zero:
                self._checkpoints.remove_checkpoint(filepath)

    def end(self) -> None:
        type(self._strategy).on_train_end(self._strategy)
        with World().together():
            self._checkpoints.teardown()


def _is_sharded(strategy: Any) -> bool:
    """Tell whether a strategy has the ranks shard the module themselves, by FSDP2 and tensor parallelism."""
    return any(isinstance(strategy, getattr(sys.modules[name], _SHARDED)) for name in _PACKAGES if name in sys.modules)


def _check_sharded(trainer: Any) -> None:
    """Refuse what cannot be saved where ranks shard.

    Raises:
        Refused: UNSUPPORTED.
    """
    if not getattr(trainer.strategy, _PARTS, True):
        hint = "Leave it out: the result is the same, and whole weights are never in one place."
        raise refuse("UNSUPPORTED", "save_distributed_checkpoint=False gathers everything on one rank", hint=hint)
    if any(kind.__name__ == _AVERAGING for callback in trainer.callbacks for kind in type(callback).__mro__):
        hint = f"Train without {_AVERAGING}, or under DDP."
        raise refuse("UNSUPPORTED", f"{_AVERAGING} keeps whole averages, beside sharded weights", hint=hint)


def _check_whole(strategy: Any) -> None:
    """Refuse a strategy that does not let its first rank save the whole model through a `CheckpointIO`.

    Raises:
        Refused: UNSUPPORTED.
    """
    own = [kind for kind in type(strategy).__mro__ if kind.__name__ != _BASE and vars(kind).keys() & {_SAVE, _LOAD}]
    if own:
        message = f"{own[0].__name__} saves or loads checkpoints in a way of its own, and asks no CheckpointIO"
        hint = f"Use DDP, or {_SHARDED} to shard; or leave out LightningCheckpoints."
        raise refuse("UNSUPPORTED", message, hint=hint)
    if type(strategy.launcher).__name__ == _SPAWNING:
        message = "ranks that are spawned or forked from one process hand back their weights through the CheckpointIO"
        hint = 'Start one process for each rank: strategy="ddp", or torchrun.'
        raise refuse("UNSUPPORTED", message, hint=hint)
