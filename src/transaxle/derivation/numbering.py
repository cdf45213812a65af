"""Numbered checkpoints: a copy of a user's whose elements are numbers of their own, to send through a converter."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from transaxle.derivation.fitting.element_numbers import FLOOR, Places, drawn, laid_out, room
from transaxle.derivation.fitting.trace import EXACT, Numbers, Underivable
from transaxle.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from transaxle.errors import refuse
from transaxle.formats.storage.local import failed

_DTYPES = ("float32", "float64")
"""dtypes of numbered checkpoints, the preferred one first."""


def number_elements(src: str, dst: str) -> int:
    """Write a checkpoint of the same names and shapes in which every element is a number of its own.

    They are 32-bit floats, or 64-bit ones where there are more than four million of them: a converter that casts to a
    smaller type would make different numbers equal, and deriving a table from its result is then refused.

    Args:
        src: the checkpoint.
        dst: a new folder.

    Returns:
        The number of elements.

    Raises:
        UsageError: EXISTS where `dst` is there.
        StorageError: IO where the folder around it is missing; NO_SPACE.
        TransaxleError: what `open_checkpoint` raises.
    """
    target = Path(dst)
    if os.path.lexists(target):
        raise refuse("EXISTS", "the target already exists", file=dst, hint="Name a folder that does not exist.")
    if not target.parent.is_dir():
        raise refuse("IO", f"the folder {target.parent} does not exist", file=dst, hint="Create it first.")
    with open_checkpoint(src) as checkpoint:
        shapes = {name: checkpoint[name].shape for name in checkpoint}
        storage = checkpoint.container.storage
        members = [member for member in checkpoint.container.carried if member.endswith(".json")]
        beside = {member: storage.read(member, 0, storage.size(member)) for member in members}
    total = sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values())
    dtype = next(each for each in _DTYPES if total <= room(EXACT[each]))
    numbers = laid_out(drawn(total, EXACT[dtype]).astype(dtype), shapes)
    try:
        target.mkdir()
    except OSError as error:
        raise failed(error, "creating the folder", dst) from error
    try:
        save_file(numbers, target / "model.safetensors")
        for member, content in beside.items():
            (target / member).write_bytes(content)
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError):
            raise failed(error, "writing the numbered copy", dst) from error
        raise
    return total


def numbered(before: Checkpoint, after: Checkpoint) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    """Return the elements of a numbered checkpoint, and where a converter put them.

    Of a tensor that the converter made of nothing, all are zero.

    Raises:
        Underivable: the first one is not numbered, or values of the second one are changed.
    """
    given = {name: np.asarray(before[name].read()) for name in before}
    for name, values in given.items():
        if not bool((values >= FLOOR).all() and (values == np.floor(values)).all()):
            raise Underivable(
                f"{name}: its values are no numbers that `transaxle derive --number` gives",
                f"Number it first:  transaxle derive --number {before.path} NUMBERED,  send NUMBERED through the "
                "converter, and give both.",
            )
    flat = [values.ravel().astype(np.int64) for values in given.values()]
    places = Places(np.concatenate([np.zeros(0, np.int64), *flat]))
    hub = {name: places.of(values.astype(np.int64)) for name, values in given.items()}
    return hub, {name: _came_from(name, np.asarray(after[name].read()), places) for name in after}


def _came_from(name: str, values: npt.NDArray[Any], places: Places) -> Numbers:
    """Return the element that each value of a tensor came from; 0 for zeros, and for all of one made of nothing."""
    with np.errstate(invalid="ignore"):
        whole = values.astype(np.int64)
        exact = whole == values
    found = np.where(exact, places.of(whole), 0)
    if bool(((found > 0) | (values == 0)).all()) or bool((exact & (whole >= 0) & (whole < FLOOR)).all()):
        return found
    if values.dtype.itemsize < np.dtype(np.float32).itemsize and not bool((np.abs(values) < FLOOR).all()):
        raise Underivable(
            f"{name}: the converter casts it to {values.dtype}, which does not hold the numbers",
            "Leave the cast out here; the table is the same, and `convert --dtype` casts.",
        )
    if bool(found.any()):
        raise Underivable(f"{name}: some of its values come from elements, others from nowhere")
    raise Underivable(f"{name}: its values are changed, not only moved, or made of nothing")
