"""Initial values of some of the experts, equal to those of the whole layer with the same seed.

A generator gives its numbers in order, so the values of expert 3 come after those of the three experts before it.
Every rank therefore draws every expert and keeps only its own. Afterwards all generators are in the state that a whole
layer would leave, so that later draws agree too.
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
