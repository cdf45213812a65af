"""Traces: tensors with numbered elements, before and after a converter.

Element numbers must not be mistaken for constants or ranges. A converter may create tensors of its own: zeros, ones,
positions 0, 1, 2 …. If elements were numbered 1, 2, 3 …, such values would look like copies of elements. So each
element has a large, odd random number while it is converted; in a trace it is replaced by the element's position: 1 for
the first element, 2 for the next.

**Numbered checkpoints**: a copy of a user's checkpoint with a distinct number in every element, to send through a
converter.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from transaxle.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from transaxle.errors import refuse
from transaxle.formats.storage.local import storage_error

Numbers = npt.NDArray[np.int64]
"""A tensor of element numbers, from 1 on; tensors that share values share numbers."""
Shape = tuple[int, ...]
HUB, MEMORY = "hub", "memory"
"""The two sides of a trace: output of the converter (the first dialect), and its input (the second)."""
SIDES = (HUB, MEMORY)
EXACT = {
    "float64": 1 << 52, "float32": 1 << 24, "float16": 1 << 11, "bfloat16": 1 << 8,
    "int64": 1 << 62, "int32": 1 << 30, "int16": 1 << 14, "int8": 1 << 7, "uint8": 1 << 8,
}  # fmt: skip
"""Dtype -> how many whole numbers, from 0 on, it represents exactly; other dtypes cannot carry element numbers."""


class Underivable(Exception):
    """Raised where no table in the notation describes the converter.

    Args:
        why: which operation no table can describe.
        hint: what a user can do; empty: write the table by hand.
    """

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.hint = hint


@dataclass(frozen=True)
class Trace:
    """One run of a converter, as element numbers."""

    hub: Mapping[str, Numbers]
    """Tensors of the first dialect."""
    memory: Mapping[str, Numbers]
    """Tensors of the second dialect."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The model's config, as in config.json."""
    unnumbered: Mapping[str, Shape] = field(default_factory=dict)
    """Shapes of tensors whose dtype cannot carry numbers (flags), with equal names and values on both sides."""

    def side(self, side: str) -> Mapping[str, Numbers]:
        """Return the tensors of one side."""
        return self.hub if side == HUB else self.memory


def dtype_of(tensor: Any) -> str:
    """Return the dtype of a numpy array or torch tensor, as a key of `EXACT`."""
    return str(tensor.dtype).removeprefix("torch.")


def digits(numbers: Numbers, base: int, position: int) -> Numbers:
    """Return one digit of every number: the part that one pass through a dtype with `base` exact integers can carry."""
    digit: Numbers = numbers // base**position % base
    return digit


def passes(largest: int, base: int) -> int:
    """Return the number of passes that numbers up to `largest` need."""
    count = 1
    while base**count <= largest:
        count += 1
    return count


def combine(carried: list[Numbers], base: int) -> Numbers:
    """Combine the digits of all passes into numbers.  Inverse: `digits` at every position."""
    total = np.zeros_like(carried[0])
    for position, part in enumerate(carried):
        total += part * base**position
    return total


def split_trace(trace: Trace) -> tuple[Trace, tuple[str, ...]]:
    """Split a trace: the part that a table can describe, and notes on tensors that the converter drops or invents."""
    stored = _all_numbers(trace.hub)
    numbers_left = _all_numbers(trace.memory)
    dropped = [name for name, numbers in trace.hub.items() if not np.isin(numbers, numbers_left).any()]
    invented = [name for name, numbers in trace.memory.items() if not np.isin(numbers, stored).any()]
    notes = (*(f"{name} is dropped" for name in dropped), *(f"{name} is made of nothing" for name in invented))
    hub = {name: numbers for name, numbers in trace.hub.items() if name not in dropped}
    memory = {name: numbers for name, numbers in trace.memory.items() if name not in invented}
    return Trace(hub, memory, trace.config, trace.unnumbered), notes


def _all_numbers(tensors: Mapping[str, Numbers]) -> Numbers:
    if not tensors:
        return np.zeros(0, np.int64)
    together = np.concatenate([numbers.ravel() for numbers in tensors.values()])
    return together[together > 0]


FLOOR = 1 << 16
"""Lower bound of random element numbers; constants and ranges are below it."""
_STEP = 4
"""Random numbers are 1 above a multiple of this: not round, no power of two, and not one less than a power."""


def room(limit: int) -> int:
    """Return how many elements can have numbers from `FLOOR` up to `limit`, exclusive."""
    return max(0, (limit - FLOOR) // _STEP)


def draw_numbers(count: int, limit: int) -> Numbers:
    """Return random element numbers.

    Args:
        count: number of elements, at most `room(limit)`.
        limit: exclusive upper bound of the numbers.

    Returns:
        Shape (count,): distinct numbers from `FLOOR` on, in random order; equal for equal arguments.
    """
    generator = np.random.default_rng(count)
    among = min(room(limit), max(64 * count, 1 << 20))
    numbers: Numbers = FLOOR + 1 + _STEP * generator.choice(among, count, replace=False).astype(np.int64)
    return numbers


def shuffle(count: int) -> tuple[Numbers, Numbers]:
    """Return two numberings of `count` elements, each of shape (count,), with numbers from 1 to `count` + 1.

    No element has the same number in both. So a value that is the same in both runs is a constant, and constants need
    no numbers of their own.
    """
    numbers: Numbers = 1 + np.random.default_rng(count).permutation(count + 1).astype(np.int64)
    return numbers[:-1], numbers[1:]


def distribute(numbers: Numbers, shapes: Mapping[str, Shape]) -> dict[str, Numbers]:
    """Distribute numbers over tensors.

    Args:
        numbers: one number per element of all tensors, in the order of their names.
        shapes: name -> shape.
    """
    tensors, start = {}, 0
    for name, shape in shapes.items():
        count = int(np.prod(shape, dtype=np.int64))
        tensors[name] = numbers[start : start + count].reshape(shape)
        start += count
    return tensors


class Places:
    """Lookup of elements by number.

    Args:
        numbers: number of the first element, of the second one, and so on; of equal numbers the first counts.
    """

    def __init__(self, numbers: Numbers) -> None:
        self._sorted, self._first = np.unique(numbers, return_index=True)

    def of(self, values: npt.NDArray[Any]) -> Numbers:
        """Return for each value the element with this number, counted from 1; 0 where there is none."""
        if not len(self._sorted):
            return np.zeros(values.shape, np.int64)
        at = np.minimum(np.searchsorted(self._sorted, values), len(self._sorted) - 1)
        places: Numbers = np.where(self._sorted[at] == values, self._first[at] + 1, 0)
        return places


_DTYPES = ("float32", "float64")
"""Dtypes of numbered checkpoints, preferred first."""


def number_elements(src: str, dst: str) -> int:
    """Write a copy of a checkpoint in which every element is a distinct number.

    The elements are 32-bit floats, or 64-bit floats where there are more than four million. A converter that casts to a
    smaller dtype makes different numbers equal, and deriving a table from its result is then refused.

    Args:
        src: the checkpoint.
        dst: a new folder.

    Returns:
        The number of elements.

    Raises:
        UsageError: EXISTS where `dst` exists.
        StorageError: IO where its parent folder is missing; NO_SPACE.
        TransaxleError: errors of `open_checkpoint`.
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
        other_files = {member: storage.read(member, 0, storage.size(member)) for member in members}
    total = sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes.values())
    dtype = next(each for each in _DTYPES if total <= room(EXACT[each]))
    numbers = distribute(draw_numbers(total, EXACT[dtype]).astype(dtype), shapes)
    try:
        target.mkdir()
    except OSError as error:
        raise storage_error(error, "creating the folder", dst) from error
    try:
        save_file(numbers, target / "model.safetensors")
        for member, content in other_files.items():
            (target / member).write_bytes(content)
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError):
            raise storage_error(error, "writing the numbered copy", dst) from error
        raise
    return total


def read_numbered(before: Checkpoint, after: Checkpoint) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    """Return the element numbers of a numbered checkpoint, and of the result of a converter.

    A tensor that the converter created is all zero.

    Raises:
        Underivable: the first checkpoint is not numbered, or values in the second one are changed.
    """
    arrays = {name: np.asarray(before[name].read()) for name in before}
    for name, values in arrays.items():
        if not bool((values >= FLOOR).all() and (values == np.floor(values)).all()):
            raise Underivable(
                f"{name}: its values are no numbers that `transaxle derive --number` gives",
                f"Number it first:  transaxle derive --number {before.path} NUMBERED,  send NUMBERED through the "
                "converter, and give both.",
            )
    flat = [values.ravel().astype(np.int64) for values in arrays.values()]
    places = Places(np.concatenate([np.zeros(0, np.int64), *flat]))
    hub = {name: places.of(values.astype(np.int64)) for name, values in arrays.items()}
    return hub, {name: _came_from(name, np.asarray(after[name].read()), places) for name in after}


def _came_from(name: str, values: npt.NDArray[Any], places: Places) -> Numbers:
    """Return the source element of each value in a tensor; 0 for zeros, and for a tensor that the converter created."""
    with np.errstate(invalid="ignore"):
        whole = values.astype(np.int64)
        exact = whole == values
    elements = np.where(exact, places.of(whole), 0)
    if bool(((elements > 0) | (values == 0)).all()) or bool((exact & (whole >= 0) & (whole < FLOOR)).all()):
        return elements
    if values.dtype.itemsize < np.dtype(np.float32).itemsize and not bool((np.abs(values) < FLOOR).all()):
        raise Underivable(
            f"{name}: the converter casts it to {values.dtype}, which does not hold the numbers",
            "Leave the cast out here; the table is the same, and `convert --dtype` casts.",
        )
    if bool(elements.any()):
        raise Underivable(f"{name}: some of its values come from elements, others from nowhere")
    raise Underivable(f"{name}: its values are changed, not only moved, or made of nothing")
