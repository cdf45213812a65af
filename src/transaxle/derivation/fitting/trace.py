"""What a converter did with numbered tensors: the same numbers, before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

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
