"""Element numbers that cannot be mistaken for constants or ranges: large, odd, and in no order.

A converter may create tensors of its own: zeros, ones, positions 0, 1, 2 …. If elements were numbered 1, 2, 3 …, such
values would look like copies of elements. So each element carries a number that is drawn at random; a trace then has
its place instead: 1 for the first element, 2 for the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from transaxle.derivation.fitting.trace import Numbers, Shape

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
