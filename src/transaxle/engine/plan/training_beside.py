"""Training state beside model and optimizer: not part of a hub's model, nor of the equality of two checkpoints."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.formats.builtin_formats import DCP, TORCH
from transaxle.formats.training_items import EXTRA_STATE, is_extra_state
from transaxle.formats.training_state.nesting import Nesting
from transaxle.formats.training_state.state import LEFT_BEHIND, OPTIMIZER, ROOT, TRAINING

_MODEL = "model"
"""Container of the model where the source is no state dict, which would show another, or none."""


def without_training(checkpoint: Checkpoint) -> Checkpoint:
    """Return the same checkpoint without its training state and what modules keep beside parameters, all listed."""
    items = checkpoint.container.training
    beside = set(checkpoint.container.beside)
    beside.update(name for name in checkpoint.container.entries if EXTRA_STATE in name and is_extra_state(name))
    if not items and not beside:
        return checkpoint
    metadata = dict(checkpoint.container.metadata)
    metadata[LEFT_BEHIND] = {
        **metadata.get(LEFT_BEHIND, {}),
        **dict.fromkeys(metadata.pop(TRAINING, ()), "training state"),
    }
    kept_container = checkpoint.container.without(beside)
    container = replace(kept_container, metadata=metadata, training=())
    return Checkpoint(container, checkpoint.settings, None, None, checkpoint.undecoded)


def beside(first: Checkpoint, second: Checkpoint) -> set[str]:
    """Return the tensors of training state that only the first checkpoint holds."""
    return {name for name in first.container.beside if name not in second}


def nesting_of(checkpoint: Checkpoint, names: Collection[str]) -> Nesting | None:
    """Return how the state dict of one file is nested: as the source's; None where there is nothing but a model.

    Args:
        checkpoint: the source.
        names: of all tensors that are written.
    """
    container = checkpoint.container
    if not container.training and not any(name.startswith(OPTIMIZER) for name in names):
        return None
    is_state_dict = container.format in (DCP.name, TORCH.name)
    root = container.metadata.get(ROOT, None if is_state_dict else _MODEL)
    return Nesting(root and root.rpartition(".")[2], container.paths)
