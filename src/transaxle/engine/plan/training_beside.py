"""Training state beside model and optimizer: no part of what a hub holds, nor of what makes two checkpoints equal."""

from __future__ import annotations

from dataclasses import replace

from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.formats.training_state.state import LEFT_BEHIND, TRAINING


def without_training(checkpoint: Checkpoint) -> Checkpoint:
    """Return the same checkpoint without its training state, which is listed as left behind."""
    items = checkpoint.container.training
    if not items:
        return checkpoint
    said = dict(checkpoint.container.metadata)
    said[LEFT_BEHIND] = {**said.get(LEFT_BEHIND, {}), **dict.fromkeys(said.pop(TRAINING, ()), "training state")}
    left = checkpoint.container.without({item.name for item in items if item.name is not None})
    container = replace(left, metadata=said, training=())
    return Checkpoint(container, checkpoint.settings, None, None, checkpoint.undecoded)


def beside(one: Checkpoint, other: Checkpoint) -> set[str]:
    """Return the tensors of training state that only one side holds."""
    names = (item.name for item in one.container.training)
    return {name for name in names if name is not None and name not in other}
