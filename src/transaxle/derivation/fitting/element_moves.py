"""Moves: which elements of a tensor went where, as digits.

A digit is a run of equal steps: `size` elements, `hub` positions apart on one side and `memory` positions apart on the
other. A transpose has two digits, a split of heads three. `factor` finds them from the positions alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from transaxle.derivation.fitting.trace import HUB, SIDES, Numbers, Shape, Trace, Underivable

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Digit:
    """Equal steps through both tensors."""

    size: int
    """Number of steps."""
    hub: int
    """Elements from one to the next in the first dialect's tensor."""
    memory: int
    """The same in the second dialect's tensor."""

    def stride(self, side: str) -> int:
        """Return the step on one side."""
        return self.hub if side == HUB else self.memory


@dataclass(frozen=True, slots=True)
class DimShare:
    """What a move has of one dim."""

    offset: int
    """First position."""
    digits: tuple[tuple[int, int], ...]
    """(index of the digit, stride in positions of the dim), outermost first."""


@dataclass(frozen=True)
class Move:
    """The elements that one stored tensor of each side have in common."""

    names: tuple[str, str]
    """Names in hub and memory."""
    sizes: tuple[int, ...]
    """Size of each digit."""
    shapes: tuple[Shape, Shape]
    """Shapes in hub and memory."""
    shares: tuple[tuple[DimShare, ...], tuple[DimShare, ...]]
    """For each side, the share of each dim."""


def strides(shape: Shape) -> tuple[int, ...]:
    """Return the strides of a row-major tensor, in elements."""
    return tuple(prod(shape[at + 1 :]) for at in range(len(shape)))


def factor(hub: Positions, memory: Positions) -> list[Digit]:
    """Return the digits of a map, innermost first.

    Args:
        hub: positions in one tensor, ascending.
        memory: positions of the same elements in the other.

    Raises:
        Underivable: the map has no digits: it is no sum of equal steps.
    """
    found = []
    while len(hub) > 1:
        step = int(hub[1] - hub[0]), int(memory[1] - memory[0])
        breaks = np.nonzero((np.diff(hub) != step[0]) | (np.diff(memory) != step[1]))[0]
        longest = int(breaks[0]) + 1 if len(breaks) else len(hub)
        size = next((n for n in range(longest, 1, -1) if len(hub) % n == 0 and _repeats(hub, memory, n)), 0)
        if not size:
            raise Underivable("its elements are not moved in equal steps")
        found.append(Digit(size, *step))
        hub, memory = hub[::size], memory[::size]
    return found


def _repeats(hub: Positions, memory: Positions, size: int) -> bool:
    """Tell whether every block of `size` elements is the first one, moved."""
    blocks = hub.reshape(-1, size), memory.reshape(-1, size)
    return all(bool(((b - b[:, :1]) == (b[0] - b[0, 0])).all()) for b in blocks)


def _divided(found: list[Digit], shape: Shape, side: str) -> list[Digit]:
    """Cut digits that run through several dims of a tensor where the dims end."""
    for stride in sorted(set(strides(shape))):
        cut: list[Digit] = []
        for digit in found:
            step = digit.stride(side)
            if not step < stride < step * digit.size:
                cut.append(digit)
                continue
            count, rest = divmod(stride, step)
            if rest or digit.size % count:
                raise Underivable("its elements are moved across the end of a dim")
            cut.append(Digit(count, digit.hub, digit.memory))
            cut.append(Digit(digit.size // count, digit.hub * count, digit.memory * count))
        found = cut
    return found


def _shares(found: list[Digit], shape: Shape, first: int, side: str) -> tuple[DimShare, ...]:
    """Give every digit its dim."""
    shares, placed = [], 0
    for dim, stride in zip(shape, strides(shape), strict=True):
        inside = [
            (at, digit.stride(side) // stride)
            for at, digit in enumerate(found)
            if stride <= digit.stride(side) < stride * dim
        ]
        inside.sort(key=lambda item: -item[1])
        placed += len(inside)
        shares.append(DimShare(first // stride % dim if dim else 0, tuple(inside)))
    if placed != len(found):
        raise Underivable("its elements are repeated or reversed")
    return tuple(shares)


def moves(trace: Trace) -> list[Move]:
    """Return every move of a trace.

    Raises:
        Underivable: naming the tensor whose elements no digits describe.
    """
    owners, positions, names = _places(trace)
    found: list[Move] = []
    seen = np.zeros(len(owners), bool)
    for name, numbers in trace.hub.items():
        flat = numbers.ravel()
        here = owners[flat]
        if len(flat) and seen[flat[0]]:
            raise Underivable(f"{name} holds values that another tensor beside it holds too")
        seen[flat] = True
        if len(flat) and here.min() < 0:
            raise Underivable(f"{name} has values that the other dialect does not have")
        for owner in np.unique(here):
            at = np.nonzero(here == owner)[0]
            try:
                found.append(_move((name, names[owner]), at, positions[flat[at]], trace))
            except Underivable as reason:
                raise Underivable(f"{name} -> {names[owner]}: {reason}") from None
    return found


def _move(names: tuple[str, str], hub: Positions, memory: Positions, trace: Trace) -> Move:
    shapes = trace.hub[names[0]].shape, trace.memory[names[1]].shape
    found = factor(hub, memory)
    for side, shape in zip(SIDES, shapes, strict=True):
        found = _divided(found, shape, side)
    firsts = int(hub[0]), int(memory[0])
    shares = tuple(_shares(found, s, f, side) for side, s, f in zip(SIDES, shapes, firsts, strict=True))
    return Move(names, tuple(digit.size for digit in found), shapes, (shares[0], shares[1]))


def _places(trace: Trace) -> tuple[Positions, Positions, list[str]]:
    """Return for every number the tensor of memory that has it first, and the position there."""
    names = sorted(trace.memory, key=lambda name: name not in trace.hub)  # of two names of a value, the stored one
    sides = (trace.hub, trace.memory)
    most = max((int(n.max()) for side in sides for n in side.values() if n.size), default=0)
    owners, positions = np.full(most + 1, -1, np.int64), np.zeros(most + 1, np.int64)
    for index, name in enumerate(names):
        flat: Numbers = trace.memory[name].ravel()
        if len(flat) and owners[flat[0]] < 0:
            owners[flat], positions[flat] = index, np.arange(len(flat))
    return owners, positions, names
