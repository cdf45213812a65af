"""Traces: a converter's input and output tensors, whose elements are numbers that show where each element was moved.

A converter may also create tensors: zeros, ones, or positions 0, 1, 2 …. If the elements of the input were numbered 1,
2, 3 …, these created values would look like copies of input elements. To avoid this, each element is a large, odd
random number during the conversion. In the trace, the random number is replaced by the element's position: 1 for the
first element, 2 for the next element.

**Numbered checkpoint**: a copy of a user's checkpoint with a distinct number in every element, which the user gives to
a converter.
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

Numbers = npt.NDArray[np.int64] | npt.NDArray[np.int32]
"""A tensor whose values are element numbers, from 1 on. If an element was copied, several tensors contain its number. A
trace stores 32-bit integers if the largest number fits, because it has a number for every element of a model.
"""
Shape = tuple[int, ...]
HUB, MEMORY = "hub", "memory"
"""The two sides of a trace: `hub` means the converter's output (the first dialect), `memory` its input (the second
dialect).
"""
SIDES = (HUB, MEMORY)
EXACT = {
    "float64": 1 << 52, "float32": 1 << 24, "float16": 1 << 11, "bfloat16": 1 << 8,
    "int64": 1 << 62, "int32": 1 << 30, "int16": 1 << 14, "int8": 1 << 7, "uint8": 1 << 8,
}  # fmt: skip
"""Dtype -> number of consecutive integers from 0 that the dtype represents exactly; dtypes not listed cannot carry
element numbers.
"""


class Underivable(Exception):
    """Raised if no table of mapping rules can describe what the converter does.

    Args:
        why: the operation of the converter that no table can describe.
        hint: advice for the user; empty for the usual advice, which is to write the table by hand.
    """

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.hint = hint


@dataclass(frozen=True, eq=False)
class Trace:
    """The tensors before and after one run of a converter, whose values are element numbers.

    Traces are compared by identity: several derivations from one trace share what they compute of it.
    """

    hub: Mapping[str, Numbers]
    """Tensor name -> tensor, for the converter's output, in the first dialect."""
    memory: Mapping[str, Numbers]
    """Tensor name -> tensor, for the converter's input, in the second dialect."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Contents of the model's config.json."""
    unnumbered: Mapping[str, Shape] = field(default_factory=dict)
    """Name -> shape, for tensors that cannot carry element numbers (flags); they have equal names and values in input
    and output.
    """

    def side(self, side: str) -> Mapping[str, Numbers]:
        """Return tensor name -> tensor, for one side of the trace (`hub` or `memory`)."""
        return self.hub if side == HUB else self.memory


def dtype_of(tensor: Any) -> str:
    """Return the name of the dtype of a numpy array or torch tensor, spelled as in the keys of `EXACT`."""
    return str(tensor.dtype).removeprefix("torch.")


def digits(numbers: Numbers, base: int, position: int) -> Numbers:
    """Return one digit of every element number, in the given base; one run of the converter transports one digit."""
    digit: Numbers = numbers // base**position % base
    return digit


def passes(largest: int, base: int) -> int:
    """Return the number of runs of the converter that transport all digits of element numbers up to `largest`."""
    count = 1
    while base**count <= largest:
        count += 1
    return count


def combine(carried: list[Numbers], base: int) -> Numbers:
    """Combine the digits from all runs of the converter into element numbers; `digits` is the inverse."""
    total = np.zeros_like(carried[0])
    for position, part in enumerate(carried):
        total += part * base**position
    return total


def split_trace(trace: Trace) -> tuple[Trace, tuple[str, ...]]:
    """Return the part of a trace that mapping rules can describe, and notes on tensors that the converter drops or
    creates.
    """
    largest = largest_number(trace)
    in_hub, in_memory = (_present(tensors, largest) for tensors in (trace.hub, trace.memory))
    dropped = [name for name, numbers in trace.hub.items() if not in_memory[numbers].any()]
    invented = [name for name, numbers in trace.memory.items() if not in_hub[numbers].any()]
    notes = (*(f"{name} is dropped" for name in dropped), *(f"{name} is made of nothing" for name in invented))
    hub = {name: numbers for name, numbers in trace.hub.items() if name not in dropped}
    memory = {name: numbers for name, numbers in trace.memory.items() if name not in invented}
    return Trace(hub, memory, trace.config, trace.unnumbered), notes


def largest_number(trace: Trace) -> int:
    """Return the largest element number in a trace; 0 if the trace has none."""
    tensors = (*trace.hub.values(), *trace.memory.values())
    return max((int(numbers.max()) for numbers in tensors if numbers.size), default=0)


def _present(tensors: Mapping[str, Numbers], largest: int) -> npt.NDArray[np.bool_]:
    """Return a boolean array: for each element number up to `largest`, whether some tensor contains it; False for 0."""
    present = np.zeros(largest + 1, np.bool_)
    for numbers in tensors.values():
        present[numbers.ravel()] = True
    present[0] = False
    return present


FLOOR = 1 << 16
"""Lower bound of random element numbers; constants and ranges that converters create are below it."""
_STEP = 4
"""Random numbers are a multiple of `_STEP` plus 1: neither round, nor a power of two, nor a power of two minus 1."""


def room(limit: int) -> int:
    """Return how many distinct element numbers there are from `FLOOR` up to `limit`, exclusive."""
    return max(0, (limit - FLOOR) // _STEP)


def draw_numbers(count: int, limit: int) -> Numbers:
    """Return random element numbers.

    Args:
        count: number of elements, at most `room(limit)`.
        limit: exclusive upper bound of the numbers.

    Returns:
        An array of shape (count,) with distinct numbers from `FLOOR` on, in random order; equal arguments have equal
        results.
    """
    generator = np.random.default_rng(count)
    among = min(room(limit), max(64 * count, 1 << 20))
    numbers: Numbers = FLOOR + 1 + _STEP * generator.choice(among, count, replace=False).astype(np.int64)
    return numbers


def shuffle(count: int) -> tuple[Numbers, Numbers]:
    """Return two ways to number `count` elements, each an array of shape (count,) with numbers from 1 to `count` + 1.

    No element has the same number in both arrays. So a value that is equal in the converter's outputs for both arrays
    is a constant.
    """
    numbers: Numbers = 1 + np.random.default_rng(count).permutation(count + 1).astype(np.int64)
    return numbers[:-1], numbers[1:]


def distribute(numbers: Numbers, shapes: Mapping[str, Shape]) -> dict[str, Numbers]:
    """Distribute element numbers over tensors.

    Args:
        numbers: one number for each element of all tensors; the tensors are filled in the order of their names.
        shapes: tensor name -> shape.
    """
    tensors, start = {}, 0
    for name, shape in shapes.items():
        count = int(np.prod(shape, dtype=np.int64))
        tensors[name] = numbers[start : start + count].reshape(shape)
        start += count
    return tensors


class Places:
    """Finds the position of the element that has a given number.

    Args:
        numbers: the elements' numbers, in the order of elements; if several elements have the same number, the first is
            found.
    """

    def __init__(self, numbers: Numbers) -> None:
        self._sorted, self._first = np.unique(numbers, return_index=True)

    def of(self, values: npt.NDArray[Any]) -> Numbers:
        """Return for each value the position, from 1, of the element whose number is the value; 0 if no element has
        that number.
        """
        if not len(self._sorted):
            return np.zeros(values.shape, np.int64)
        at = np.minimum(np.searchsorted(self._sorted, values), len(self._sorted) - 1)
        places: Numbers = np.where(self._sorted[at] == values, self._first[at] + 1, 0)
        return places


_DTYPES = ("float32", "float64")
"""Dtypes that numbered checkpoints may have, in order of preference."""


def number_elements(src: str, dst: str) -> int:
    """Write a copy of a checkpoint in which every element is a distinct number.

    The elements are 32-bit floats, or 64-bit floats if there are more than four million elements. A converter that
    casts to a smaller dtype makes different numbers equal; deriving a table from such output is refused.

    Args:
        src: path of the checkpoint to copy.
        dst: path of the new folder.

    Returns:
        The number of elements.

    Raises:
        UsageError: with the code EXISTS if `dst` exists.
        StorageError: with the code IO if the parent folder of `dst` is missing; with the code NO_SPACE if the disk is
            full.
        TransaxleError: if `src` cannot be opened; see `open_checkpoint`.
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
    """Return the element numbers in a numbered checkpoint, and the element numbers in the converter's output for it.

    A tensor that the converter created has only zeros instead of element numbers.

    Raises:
        Underivable: if the input is not a numbered checkpoint, or the converter changed values.
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
    """Return the number of the input element from which each value of an output tensor came; 0 for zeros, and for all
    values of a tensor that the converter created.
    """
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
