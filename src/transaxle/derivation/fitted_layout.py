"""Layouts: how the parts lie in the dims of one stored tensor, as the notation's expression with axes not yet named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from transaxle.derivation.moved_parts import DimShare, Instance, Part
from transaxle.derivation.patterns import Place
from transaxle.derivation.traces import SIDES, Shape, Underivable
from transaxle.move.workers import Unions


@dataclass(frozen=True)
class DigitAxis:
    """A digit of a part's moves."""

    part: int
    """Which part, by its number."""
    digit: int
    """Which digit."""


@dataclass(frozen=True)
class PaddingAxis:
    """Positions that belong to no part."""

    pattern: str
    """The stored tensor's pattern."""
    place: int
    """Which padding of it, counted from its start."""


AxisKey = DigitAxis | PaddingAxis | Place
"""An axis before it has a name; a place in names is the axis that it counts."""


@dataclass(frozen=True)
class Segment:
    """One segment of a sum."""

    part: int | None
    """Which part; None: padding."""
    axes: tuple[AxisKey, ...]
    """Its axes, outermost first."""


@dataclass(frozen=True)
class Dim:
    """One stored dim: some axes, and then perhaps a sum."""

    axes: tuple[AxisKey, ...]
    """Outermost first; none and no sum: a dim of size 1."""
    segments: tuple[Segment, ...] = ()
    """The segments of the sum that ends it."""


@dataclass(frozen=True)
class Layout:
    """The expression of a stored tensor."""

    parts: tuple[int, ...]
    """The parts in it."""
    dims: tuple[Dim, ...]
    """Its dims."""

    def with_axes(self, first: Callable[[AxisKey], AxisKey]) -> Layout:
        """Return the layout with every axis replaced."""
        dims = tuple(
            Dim(
                tuple(map(first, dim.axes)),
                tuple(Segment(segment.part, tuple(map(first, segment.axes))) for segment in dim.segments),
            )
            for dim in self.dims
        )
        return Layout(self.parts, dims)

    @property
    def axes(self) -> Iterator[AxisKey]:
        """Every axis, in order."""
        for dim in self.dims:
            yield from dim.axes
            for segment in dim.segments:
                yield from segment.axes


@dataclass
class Reading:
    """What the layouts of all tensors say of axes."""

    numbers: Mapping[Part, int]
    """Part -> its number."""
    joined: Unions[AxisKey]
    """Axes that are one."""
    sizes: dict[AxisKey, set[tuple[int, int]]]
    """Axis -> (trace, size), wherever it was seen."""

    def digit(self, part: Part, instance: Instance, digit: int) -> AxisKey:
        """Return a digit's axis, and note its size."""
        axis = DigitAxis(self.numbers[part], digit)
        self.sizes.setdefault(axis, set()).add((instance.trace, instance.move.sizes[digit]))
        return axis


@dataclass(frozen=True)
class _Piece:
    """What one part has of a dim."""

    part: Part
    instance: Instance
    share: DimShare

    @property
    def size(self) -> int:
        return prod(self.instance.move.sizes[digit] for digit, _ in self.share.digits)

    def inner(self) -> _Piece:
        return _Piece(self.part, self.instance, DimShare(self.share.offset, self.share.digits[1:]))


def layout(
    side: str, pattern: str, shape: Shape, contents: Sequence[tuple[Part, Instance]], reading: Reading
) -> Layout:
    """Return the layout of one stored tensor.

    Raises:
        Underivable: it is more than one sum.
    """
    which = SIDES.index(side)
    first: dict[Part, Instance] = {}
    for part, instance in contents:
        first.setdefault(part, instance)
    reader = _Reader(side, pattern, reading)
    dims = []
    for at, length in enumerate(shape):
        counted = [part.in_dim(side, at) for part in first]
        if any(place is not None for place in counted):
            place = counted[0]
            if place is None or any(other is None for other in counted):
                raise Underivable(f"{pattern}: dim {at} counts some of its parts only")
            for other in counted[1:]:
                assert other is not None
                reading.joined.join(other, place)
            dims.append(Dim((place,)))
        else:
            pieces = [_Piece(part, instance, instance.move.shares[which][at]) for part, instance in first.items()]
            dims.append(reader.dim(length, pieces))
    sums = sum(bool(dim.segments) for dim in dims)
    if sums > 1 or (len(first) > 1 and not sums):
        raise Underivable(f"{pattern}: its parts lie beside each other in {sums} dims")
    return Layout(tuple(reading.numbers[part] for part in first), tuple(dims))


class _Reader:
    """Reads the dims of one tensor."""

    def __init__(self, side: str, pattern: str, reading: Reading) -> None:
        self.side = side
        self.pattern = pattern
        self.reading = reading
        self.paddings = 0

    def dim(self, length: int, pieces: Sequence[_Piece]) -> Dim:
        """Return one dim: the axes that all parts share there, and the sum inside them."""
        shared: list[AxisKey] = []
        while True:
            if all(piece.size == length and piece.share.offset == 0 for piece in pieces):
                return Dim((*shared, *self._together(pieces)))
            if not self._outermost_is_shared(length, pieces):
                return Dim(tuple(shared), tuple(self._segments(length, pieces)))
            shared += self._joined([self._axes(piece)[0] for piece in pieces])
            length = pieces[0].share.digits[0][1]
            pieces = [piece.inner() for piece in pieces]

    @staticmethod
    def _outermost_is_shared(length: int, pieces: Sequence[_Piece]) -> bool:
        """Tell whether each part takes equal steps through the whole dim, one after the other within each step."""
        if not all(piece.share.digits for piece in pieces):
            return False
        steps = {(piece.instance.move.sizes[piece.share.digits[0][0]], piece.share.digits[0][1]) for piece in pieces}
        size, stride = next(iter(steps))
        return len(steps) == 1 and size * stride == length and all(p.share.offset < stride for p in pieces)

    def _axes(self, piece: _Piece) -> list[AxisKey]:
        return [self.reading.digit(piece.part, piece.instance, digit) for digit, _ in piece.share.digits]

    def _joined(self, axes: Sequence[AxisKey]) -> list[AxisKey]:
        for other in axes[1:]:
            self.reading.joined.join(other, axes[0])
        return [axes[0]]

    def _together(self, pieces: Sequence[_Piece]) -> list[AxisKey]:
        """Return the axes of a dim that every part fills."""
        rows = [self._axes(piece) for piece in pieces]
        sizes = {tuple(p.instance.move.sizes[digit] for digit, _ in p.share.digits) for p in pieces}
        if len(sizes) > 1:
            raise Underivable(f"{self.pattern}: its parts divide a dim in different ways")
        return [axis for column in zip(*rows, strict=True) for axis in self._joined(column)]

    def _segments(self, length: int, pieces: Sequence[_Piece]) -> Iterator[Segment]:
        """Yield the segments of a sum."""
        at = 0
        for piece in sorted(pieces, key=lambda piece: piece.share.offset):
            if piece.share.offset < at:
                raise Underivable(f"{self.pattern}: its parts overlap in a dim")
            if piece.share.offset > at:
                yield self._padding(piece.instance.trace, piece.share.offset - at)
            expected = piece.size
            for digit, stride in piece.share.digits:
                expected //= piece.instance.move.sizes[digit]
                if stride != expected:
                    raise Underivable(f"{self.pattern}: the steps of a part leave gaps")
            yield Segment(self.reading.numbers[piece.part], tuple(self._axes(piece)))
            at = piece.share.offset + piece.size
        if at > length:
            raise Underivable(f"{self.pattern}: its parts overlap in a dim")
        if at < length:
            yield self._padding(pieces[0].instance.trace, length - at)

    def _padding(self, trace: int, size: int) -> Segment:
        axis = PaddingAxis(self.pattern, self.paddings)
        self.paddings += 1
        self.reading.sizes.setdefault(axis, set()).add((trace, size))
        return Segment(None, (axis,))
