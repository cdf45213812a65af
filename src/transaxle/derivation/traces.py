"""Traces: numbered elements before and after a converter.

What a converter did with numbered tensors: the same numbers, before and after.

Element numbers that cannot be mistaken for constants or ranges: large, odd, and in no order.

A converter may create tensors of its own: zeros, ones, positions 0, 1, 2 …. If elements were numbered 1, 2, 3 …,
such values would look like copies of elements. So each element carries a number that is drawn at random; a trace then
has its place instead: 1 for the first element, 2 for the next.

**Numbered checkpoints**: a copy of a user's whose elements are numbers of their own, to send through a converter.
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
from transaxle.formats.storage.local import failed

Numbers = npt.NDArray[np.int64]
"""A tensor whose elements have numbers of their own, from 1 on; tensors that share values share numbers."""
Shape = tuple[int, ...]
HUB, MEMORY = "hub", "memory"
"""The two sides of a trace: what the converter wrote (the first dialect), and what it was given (the second)."""
SIDES = (HUB, MEMORY)
EXACT = {
    "float64": 1 << 52, "float32": 1 << 24, "float16": 1 << 11, "bfloat16": 1 << 8,
    "int64": 1 << 62, "int32": 1 << 30, "int16": 1 << 14, "int8": 1 << 7, "uint8": 1 << 8,
}  # fmt: skip
"""dtype -> how many whole numbers, from 0 on, it holds exactly; other dtypes carry no numbers."""


class Underivable(Exception):
    """No table in the notation says what the converter did.

    Args:
        why: what no table says.
        hint: what the user can do; nothing: write the table by hand.
    """

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.hint = hint


@dataclass(frozen=True)
class Trace:
    """One run of a converter."""

    hub: Mapping[str, Numbers]
    """Tensors of the first dialect."""
    memory: Mapping[str, Numbers]
    """Tensors of the second dialect."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The model's config, as config.json has it."""
    unnumbered: Mapping[str, Shape] = field(default_factory=dict)
    """Tensors of both dialects whose dtype holds no numbers (flags), with names and values that did not change."""

    def side(self, side: str) -> Mapping[str, Numbers]:
        """Return the tensors of one side."""
        return self.hub if side == HUB else self.memory


def dtype_of(tensor: Any) -> str:
    """Return the dtype of a numpy array or a torch tensor, as `EXACT` calls it."""
    return str(tensor.dtype).removeprefix("torch.")


def digits(numbers: Numbers, base: int, position: int) -> Numbers:
    """Return one digit of every number: what one pass through a dtype with `base` exact integers can carry."""
    digit: Numbers = numbers // base**position % base
    return digit


def passes(most: int, base: int) -> int:
    """Return how many passes carry all numbers up to `most`."""
    count = 1
    while base**count <= most:
        count += 1
    return count


def combined(carried: list[Numbers], base: int) -> Numbers:
    """Return the numbers whose digits the passes carried.  Inverse: `digits` at every position."""
    total = np.zeros_like(carried[0])
    for position, part in enumerate(carried):
        total += part * base**position
    return total


def told(trace: Trace) -> tuple[Trace, tuple[str, ...]]:
    """Return what of a trace a table can say, and what it cannot: tensors that the converter drops or invents."""
    stored = _all_numbers(trace.hub)
    kept = _all_numbers(trace.memory)
    dropped = [name for name, numbers in trace.hub.items() if not np.isin(numbers, kept).any()]
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
"""Constants and ranges are below; numbers of elements that are drawn are not."""
_STEP = 4
"""Numbers that are drawn are 1 above a multiple of it: not round, no power of two, and not one less than a power."""


def room(most: int) -> int:
    """Return how many elements can have numbers below `most`, from `FLOOR` on."""
    return max(0, (most - FLOOR) // _STEP)


def drawn(count: int, most: int) -> Numbers:
    """Draw a number for each of some elements.

    Args:
        count: number of elements, at most `room(most)`.
        most: all numbers are below it.

    Returns:
        Shape (count,): different numbers from `FLOOR` on, in no order; the same for the same arguments.
    """
    generator = np.random.default_rng(count)
    among = min(room(most), max(64 * count, 1 << 20))
    numbers: Numbers = FLOOR + 1 + _STEP * generator.choice(among, count, replace=False).astype(np.int64)
    return numbers


def shuffled(count: int) -> tuple[Numbers, Numbers]:
    """Return two numberings of `count` elements, each of shape (count,), with numbers from 1 to `count` + 1.

    No element has the same number in both. So a value that is the same in both runs is a constant, and constants need
    no numbers of their own.
    """
    numbers: Numbers = 1 + np.random.default_rng(count).permutation(count + 1).astype(np.int64)
    return numbers[:-1], numbers[1:]


def laid_out(numbers: Numbers, shapes: Mapping[str, Shape]) -> dict[str, Numbers]:
    """Return numbers as tensors.

    Args:
        numbers: one for each element of all tensors, in the order of their names.
        shapes: name -> shape.
    """
    tensors, start = {}, 0
    for name, shape in shapes.items():
        count = int(np.prod(shape, dtype=np.int64))
        tensors[name] = numbers[start : start + count].reshape(shape)
        start += count
    return tensors


class Places:
    """Which element has a number.

    Args:
        numbers: the number of the first element, of the next one, and so on; of equal ones the first counts.
    """

    def __init__(self, numbers: Numbers) -> None:
        self._sorted, self._first = np.unique(numbers, return_index=True)

    def of(self, values: npt.NDArray[Any]) -> Numbers:
        """Return for each value the place, from 1 on, of the element that has this number; 0 where none has."""
        if not len(self._sorted):
            return np.zeros(values.shape, np.int64)
        at = np.minimum(np.searchsorted(self._sorted, values), len(self._sorted) - 1)
        places: Numbers = np.where(self._sorted[at] == values, self._first[at] + 1, 0)
        return places


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
