"""Initial values of a part of the experts: the ones that the whole layer would get from the same seed.

A generator gives its numbers one after the other, so whoever starts with those of expert 3 has to have drawn those of
the three before. Every rank draws every expert and keeps what it has: afterwards all generators are where that of a
whole layer is, and what is drawn next agrees too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from transaxle.axes.geometry.chunk import Intervals
from transaxle.torch_tensors.placement import take


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for this rank's values of some experts."""

    values: torch.Tensor
    """[experts, rows, columns] of this rank."""
    held: tuple[Intervals, ...]
    """For each dim, their positions in the stack of all experts."""


def fill(rooms: Sequence[Room], count: int, draw: Callable[[], torch.Tensor]) -> None:
    """Give experts their initial values.

    Args:
        rooms: the memory of this rank.
        count: all experts, here and elsewhere.
        draw: makes the values [rows, columns] of the next expert.
    """
    places: dict[int, list[tuple[torch.Tensor, tuple[Intervals, ...]]]] = {}
    for room in rooms:
        experts, *rest = room.held
        numbers = (number for start, stop in experts for number in range(start, stop))
        for number, values in zip(numbers, room.values, strict=True):
            places.setdefault(number, []).append((values, tuple(rest)))
    for number in range(count):
        drawn = draw()
        for values, positions in places.get(number, ()):
            values.copy_(take(drawn, positions))
