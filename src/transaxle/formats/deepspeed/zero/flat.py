"""Flat cuts: where a parameter is in the flat buffers of the ranks, and which boxes that makes.

ZeRO writes the parameters of a group one after the other into one vector and gives every rank a run of it (stages 1 and
2), or gives every rank an equal run of each parameter (stage 3). Either way a rank holds an interval of a parameter's
row-major elements, which is a few boxes. Paddings belong to no parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from transaxle.axes.geometry.strided import lexicographic_boxes
from transaxle.formats.catalog import BITS, Extent

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
class FlatRun:
    """An interval of a parameter's elements, with its place in a rank's flat buffer."""

    start: int
    """First element of the parameter."""
    stop: int
    part: int
    """Number of the buffer."""
    at: int
    """First element in the buffer."""


@dataclass(frozen=True, slots=True)
class Position:
    """The place of a parameter in its group's vector."""

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
    placed = []
    at = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        placed.append(Position(name, shape, at))
        at += prod(shape) + padding
    return placed, at


def runs(position: Position, width: int, parts: int) -> Iterator[FlatRun]:
    """Yield the intervals of a parameter in a vector that is cut into equal parts.

    Args:
        position: where it lies in the vector.
        width: elements of each part.
        parts: number of parts.
    """
    stop = position.start + position.size
    if not width or position.start >= stop:
        return
    # Only the parts that the parameter touches, and none beyond the last rank's.
    for dp_rank in range(position.start // width, min((stop - 1) // width + 1, parts)):
        low, high = max(position.start, dp_rank * width), min(stop, (dp_rank + 1) * width)
        yield FlatRun(low - position.start, high - position.start, dp_rank, low - dp_rank * width)


def shard_width(size: int, parts: int) -> int:
    """Return the elements that every rank keeps of a parameter under ZeRO-3; the last ones may be padding."""
    # Rounded up: the last ranks may have fewer real elements than this, or none.
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


def extents(shape: Shape, intervals: Sequence[FlatRun], vectors: Sequence[Vector]) -> tuple[Extent, ...]:
    """Return the boxes of a parameter in the ranks' buffers.

    Args:
        shape: of the parameter.
        intervals: its intervals.
        vectors: each rank's buffer.
    """
    return tuple(
        Extent(first_index, sizes, vectors[run.part].file, vectors[run.part].at(run.at + at))
        for run in intervals
        for first_index, sizes, at in chunks(shape, run.start, run.stop)
    )
