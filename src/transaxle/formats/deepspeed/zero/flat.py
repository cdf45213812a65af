"""Flat cuts: where a parameter lies in the flat buffers of the ranks, and which boxes of it that makes.

ZeRO writes the parameters of a group one after the other into one vector and gives every rank a run of it (stages 1
and 2), or gives every rank an equal run of each parameter (stage 3). Either way a rank holds an interval of a
parameter's row-major elements, which is a few boxes. Paddings belong to no parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from transaxle.axes.geometry.strided import lexicographic_boxes
from transaxle.formats.catalog.catalog import Extent
from transaxle.formats.dtype import BITS

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Vector:
    """A contiguous vector in a file: one rank's flat buffer."""

    dtype: str
    length: int
    file: str
    offset: int
    """Byte of its first element."""

    def at(self, element: int) -> int:
        """Return the byte of an element."""
        return self.offset + element * BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class Run:
    """An interval of a parameter's elements, and where it lies in a rank's flat buffers."""

    start: int
    """First element of the parameter."""
    stop: int
    part: int
    """Which rank's buffer."""
    at: int
    """First element in the buffer."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a parameter lies in its group's vector."""

    name: str
    shape: Shape
    start: int
    """First element."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def positions(shapes: Mapping[str, Shape], paddings: Sequence[int]) -> tuple[list[Position], int]:
    """Lay parameters out one after the other, each followed by its padding.

    Returns:
        the positions, and the length of it all.
    """
    found = []
    at = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        found.append(Position(name, shape, at))
        at += prod(shape) + padding
    return found, at


def runs(position: Position, width: int, parts: int) -> Iterator[Run]:
    """Yield the intervals of a parameter in a vector that is cut into equal parts.

    Args:
        position: where it lies in the vector.
        width: elements of each part.
        parts: number of parts.
    """
    stop = position.start + position.size
    if not width or position.start >= stop:
        return
    for part in range(position.start // width, min((stop - 1) // width + 1, parts)):
        low, high = max(position.start, part * width), min(stop, (part + 1) * width)
        yield Run(low - position.start, high - position.start, part, low - part * width)


def shard_width(size: int, parts: int) -> int:
    """Return the elements that every rank keeps for a parameter under ZeRO-3; the last ones may be padding."""
    return -(-size // parts)


def chunks(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape, int]]:
    """Split an interval of a row-major array into boxes, each of which lies in it without gaps.

    Yields:
        first index, shape, and the box's first element counted from the beginning of the interval.
    """
    at = 0
    for box in lexicographic_boxes(shape, start, stop):
        first, sizes = tuple(low for low, _ in box), tuple(high - low for low, high in box)
        yield first, sizes, at
        at += prod(sizes)


def extents(shape: Shape, held: Sequence[Run], vectors: Sequence[Vector]) -> tuple[Extent, ...]:
    """Return the boxes of a parameter in the ranks' buffers.

    Args:
        shape: of the parameter.
        held: its intervals.
        vectors: each rank's buffer.
    """
    return tuple(
        Extent(first, sizes, vectors[run.part].file, vectors[run.part].at(run.at + at))
        for run in held
        for first, sizes, at in chunks(shape, run.start, run.stop)
    )
