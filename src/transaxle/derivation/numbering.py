"""Numbered checkpoints: a copy of a user's whose elements are numbers of their own, to send through a converter."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from transaxle.engine.checkpoint.checkpoint import open_checkpoint
from transaxle.errors import refuse

_EXACT = 1 << 24
"""Numbers that a 32-bit float holds exactly."""


def number_elements(src: str, dst: str) -> int:
    """Write a checkpoint of the same names and shapes whose elements are the numbers from 1 on.

    They are 32-bit floats, or 64-bit ones where there are more than 2**24 of them: a converter that casts to a smaller
    type would make different numbers equal, and deriving a table from its result is then refused.

    Args:
        src: the checkpoint.
        dst: a new folder.

    Returns:
        The number of elements.

    Raises:
        UsageError: EXISTS where `dst` is there.
    """
    target = Path(dst)
    if target.exists():
        raise refuse("EXISTS", f"{dst} exists", hint="Name a folder that does not exist.")
    with open_checkpoint(src) as checkpoint:
        shapes = {name: checkpoint[name].shape for name in checkpoint}
        carried = [member for member in checkpoint.container.carried if member.endswith(".json")]
    total = sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values())
    dtype = np.float32 if total < _EXACT else np.float64
    tensors, start = {}, 1
    for name, shape in shapes.items():
        count = int(np.prod(shape, dtype=np.int64))
        tensors[name] = np.arange(start, start + count).astype(dtype).reshape(shape)
        start += count
    target.mkdir(parents=True)
    save_file(tensors, target / "model.safetensors")
    for member in carried:
        shutil.copyfile(Path(src, member), target / member)
    return total
