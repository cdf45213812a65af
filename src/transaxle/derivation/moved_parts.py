"""Finds the logical tensors and the layouts of stored tensors, from the positions of elements before and after a
converter.

**Parts**: a part is one logical tensor of the derived table. There is one part for each pair of name patterns, one of
the hub and one of the model in memory, whose tensors have common elements. The instances of a part differ only in
indices. An index is in the names of both dialects (a layer), or in the names of one dialect and along a dim in the
other dialect (a stacked expert). Indices with the same values in both dialects are one axis.

**Moves**: a move describes at which positions of one tensor the elements of another tensor are, by digits. A digit is a
loop of equal steps: `size` elements, `hub` positions apart in the hub's tensor and `memory` positions apart in the
tensor in memory. A transpose has two digits, a split of heads has three. `factor` computes digits from the positions
alone.

**Layouts**: a layout describes how parts form the dims of one stored tensor, like the expression in a mapping rule, but
with unnamed axes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from weakref import WeakKeyDictionary

import numpy as np

from transaxle.derivation.patterns import Numbering, Pattern, Patterns, Place
from transaxle.derivation.traces import HUB, SIDES, Numbers, Shape, Trace, Underivable, largest_number
from transaxle.move.workers import DisjointSets

Positions = Numbers
"""Positions of elements in a tensor."""


@dataclass(frozen=True, slots=True)
class Digit:
    """A loop of equal steps that runs through the same elements of two tensors."""

    size: int
    """Number of steps."""
    hub: int
    """Step of the loop in the hub's tensor, in elements."""
    memory: int
    """Step of the loop in the tensor in memory, in elements."""

    def stride(self, side: str) -> int:
        """Return the step in the tensor of one dialect (hub or memory), in elements."""
        return self.hub if side == HUB else self.memory


@dataclass(frozen=True, slots=True)
class DimShare:
    """The positions along one stored dim that a move covers."""

    offset: int
    """First position along the dim that the move covers."""
    digits: tuple[tuple[int, int], ...]
    """Digits in the dim, outermost first, each as `(index of the digit in the move, stride in positions along the
    dim)`.
    """


@dataclass(frozen=True)
class PartMove:
    """The elements that a stored tensor in the hub and a tensor in memory have in common."""

    names: tuple[str, str]
    """Name of the tensor in the hub, and name of the tensor in memory."""
    sizes: tuple[int, ...]
    """For each digit (loop of equal steps), its number of steps."""
    shapes: tuple[Shape, Shape]
    """Shape of the tensor in the hub, and shape of the tensor in memory."""
    shares: tuple[tuple[DimShare, ...], tuple[DimShare, ...]]
    """For each of the two tensors, the positions that the common elements occupy along each dim."""


def strides(shape: Shape) -> tuple[int, ...]:
    """Return the strides of a row-major tensor, in elements."""
    return tuple(prod(shape[at + 1 :]) for at in range(len(shape)))


def factor(hub: Positions, memory: Positions) -> list[Digit]:
    """Return the digits that describe a map from positions to positions, innermost digit first.

    Args:
        hub: positions of elements in the hub's tensor, ascending.
        memory: positions of the same elements in the tensor in memory.

    Raises:
        Underivable: if no loops of equal steps describe the map.
    """
    digits = []
    while len(hub) > 1:
        step = int(hub[1] - hub[0]), int(memory[1] - memory[0])
        breaks = np.nonzero((np.diff(hub) != step[0]) | (np.diff(memory) != step[1]))[0]
        longest = int(breaks[0]) + 1 if len(breaks) else len(hub)
        size = next((n for n in range(longest, 1, -1) if len(hub) % n == 0 and _repeats(hub, memory, n)), 0)
        if not size:
            raise Underivable("its elements are not moved in equal steps")
        digits.append(Digit(size, *step))
        hub, memory = hub[::size], memory[::size]
    return digits


def _repeats(hub: Positions, memory: Positions, size: int) -> bool:
    """Return whether every block of `size` positions is the first block plus an offset."""
    blocks = hub.reshape(-1, size), memory.reshape(-1, size)
    return all(bool(((b - b[:, :1]) == (b[0] - b[0, 0])).all()) for b in blocks)


def _split(digits: list[Digit], shape: Shape, side: str) -> list[Digit]:
    """Split each digit (loop of equal steps) that crosses a boundary between dims of a tensor."""
    for stride in sorted(set(strides(shape))):
        cut: list[Digit] = []
        for digit in digits:
            step = digit.stride(side)
            if not step < stride < step * digit.size:
                cut.append(digit)
                continue
            count, remainder = divmod(stride, step)
            if remainder or digit.size % count:
                raise Underivable("its elements are moved across the end of a dim")
            cut.append(Digit(count, digit.hub, digit.memory))
            cut.append(Digit(digit.size // count, digit.hub * count, digit.memory * count))
        digits = cut
    return digits


def _shares(digits: list[Digit], shape: Shape, first: int, side: str) -> tuple[DimShare, ...]:
    """Assign every digit (loop of equal steps) to a dim of the tensor."""
    shares, placed = [], 0
    for dim, stride in zip(shape, strides(shape), strict=True):
        inside = [
            (at, digit.stride(side) // stride)
            for at, digit in enumerate(digits)
            if stride <= digit.stride(side) < stride * dim
        ]
        inside.sort(key=lambda item: -item[1])
        placed += len(inside)
        shares.append(DimShare(first // stride % dim if dim else 0, tuple(inside)))
    if placed != len(digits):
        raise Underivable("its elements are repeated or reversed")
    return tuple(shares)


_MOVES: WeakKeyDictionary[Trace, tuple[PartMove, ...]] = WeakKeyDictionary()
"""The moves of traces that are still in use: a derivation may be tried several times with the same traces."""


def moves(trace: Trace) -> tuple[PartMove, ...]:
    """Return all moves in a trace: the common elements of each pair of tensors, one in the hub and one in memory.

    Raises:
        Underivable: if no loops of equal steps describe a tensor's elements; the message names the tensor.
    """
    if trace not in _MOVES:
        _MOVES[trace] = tuple(_find_moves(trace))
    return _MOVES[trace]


def _find_moves(trace: Trace) -> Iterator[PartMove]:
    owners, positions, names = _places(trace)
    covered = np.zeros(len(owners), bool)
    for name, numbers in trace.hub.items():
        flat = numbers.ravel()
        owner_numbers = owners[flat]
        if len(flat) and flat[0] and covered[flat[0]]:
            raise Underivable(f"{name} holds values that another tensor beside it holds too")
        covered[flat] = True
        lacking = owner_numbers < 0
        # Zeros around a tensor's elements are padding; a tensor of nothing but zeros has no source.
        if len(flat) and (lacking.all() or flat[lacking].any()):
            raise Underivable(f"{name} has values that the other dialect does not have")
        is_whole = len(flat) > 0 and bool((owner_numbers == owner_numbers[0]).all())
        for owner in owner_numbers[:1] if is_whole else np.unique(owner_numbers[~lacking]):
            at = np.arange(len(flat)) if is_whole else np.nonzero(owner_numbers == owner)[0]
            try:
                yield _move((name, names[owner]), at, positions[flat[at]], trace)
            except Underivable as reason:
                raise Underivable(f"{name} -> {names[owner]}: {reason}") from None


def _move(names: tuple[str, str], hub: Positions, memory: Positions, trace: Trace) -> PartMove:
    shapes = trace.hub[names[0]].shape, trace.memory[names[1]].shape
    digits = factor(hub, memory)
    for side, shape in zip(SIDES, shapes, strict=True):
        digits = _split(digits, shape, side)
    firsts = int(hub[0]), int(memory[0])
    shares = tuple(_shares(digits, s, f, side) for side, s, f in zip(SIDES, shapes, firsts, strict=True))
    return PartMove(names, tuple(digit.size for digit in digits), shapes, (shares[0], shares[1]))


def _places(trace: Trace) -> tuple[Positions, Positions, list[str]]:
    """Return for every element number the first tensor in memory that contains it, and the position in that tensor."""
    # If two tensors have the same values, the one whose name the hub has comes first.
    names = sorted(trace.memory, key=lambda name: name not in trace.hub)
    largest = largest_number(trace)
    owners, positions = np.full(largest + 1, -1, np.int32), np.zeros(largest + 1, np.min_scalar_type(-1 - largest))
    for index, name in enumerate(names):
        flat: Numbers = trace.memory[name].ravel()
        if len(flat) and owners[flat[0]] < 0:
            owners[flat], positions[flat] = index, np.arange(len(flat))
    return owners, positions, names


Coordinate = tuple[str, int | str, int]
"""Place of an index: `("name", dialect, index of the placeholder in the name pattern)` or `("dim", dialect, index of
the dim)`.
"""
IN_NAME, IN_DIM = "name", "dim"
_COUNTED = (
    "Numbers in names count layers or experts only if dots separate them, as in layers.0.weight; give the tensors such "
    "names on both sides, or write the table by hand (docs/how-to/add-a-family.md)."
)


@dataclass(frozen=True)
class Instance:
    """A logical tensor at certain indices, such as layer 3."""

    trace: int
    """Index of the trace in which the instance occurs."""
    move: PartMove
    """The elements that tensors of the hub and of memory have in common."""
    indices: tuple[tuple[int, ...], tuple[int, ...]]
    """Indices in the tensor names of both dialects, `(hub, memory)`."""

    def at(self, coordinate: Coordinate) -> int:
        """Return the value of the index at a coordinate."""
        kind, side, place = coordinate
        which = SIDES.index(str(side))
        return self.indices[which][place] if kind == IN_NAME else self.move.shares[which][place].offset


@dataclass(eq=False)
class Part:
    """A logical tensor of the derived table of mapping rules."""

    patterns: tuple[Pattern, Pattern]
    """Patterns of the tensor's names in both dialects, `(hub, memory)`."""
    instances: list[Instance] = field(default_factory=list)
    """The part's instances at all indices, in all traces."""
    axes: dict[Coordinate, Place] = field(default_factory=dict)
    """Place of an index (in a name or a dim) -> axis. An axis is identified by the first place in names where its index
    occurs.
    """

    def in_dim(self, side: str, dim: int) -> Place | None:
        """Return the axis whose index runs along a whole dim in one dialect; None if there is no such axis."""
        return self.axes.get((IN_DIM, side, dim))

    def digits(self) -> int:
        """Return the number of digits (loops of equal steps) in each of the part's moves."""
        return len(self.instances[0].move.sizes)


@dataclass(frozen=True)
class Parts:
    """All parts (logical tensors) that the traces show."""

    all: Sequence[Part]
    """The parts, in the order of the first dialect's tensors."""
    of: Sequence[Mapping[tuple[str, str], Sequence[tuple[Part, Instance]]]]
    """For each trace, `(dialect, stored name)` -> the parts (logical tensors) in this stored tensor, each with the
    indices at which it occurs.
    """
    axes: DisjointSets[Place]
    """Places of indices in names; places whose numbers count along the same axis are joined to one set."""
    patterns: Patterns
    """Patterns of all tensor names in the traces."""


class UnpairedIndex(Underivable):
    """Raised if an index in the names of one dialect has no counterpart in the other dialect.

    Args:
        why: the error message.
        numbering: a different interpretation of the numbers in names, with which derivation can be tried again.
        hint: advice for the user.
    """

    def __init__(self, why: str, numbering: Numbering, hint: str = _COUNTED) -> None:
        super().__init__(why, hint)
        self.numbering = numbering


def parts(traces: Sequence[Trace], numbering: Numbering) -> Parts:
    """Group the moves of all traces into parts (logical tensors).

    Raises:
        Underivable: if the moves do not form parts; the message names the tensors.
        UnpairedIndex: if an index has no counterpart, perhaps because numbers in names must be interpreted differently.
    """
    patterns = Patterns(traces, numbering)
    by_names: dict[tuple[Pattern, Pattern, int, int], Part] = {}
    contents: list[dict[tuple[str, str], list[tuple[Part, Instance]]]] = [defaultdict(list) for _ in traces]
    for at, trace in enumerate(traces):
        for move in moves(trace):
            hub, memory = (patterns.pattern(side, name) for side, name in zip(SIDES, move.names, strict=True))
            # Layers of a different kind may have a different tensor under this name.
            dims = len(move.shapes[0]), len(move.shapes[1])
            part = by_names.setdefault((hub[0], memory[0], *dims), Part((hub[0], memory[0])))
            instance = Instance(at, move, (hub[1], memory[1]))
            part.instances.append(instance)
            for side, name in zip(SIDES, move.names, strict=True):
                contents[at][side, name].append((part, instance))
    all_parts = list(by_names.values())
    axes = DisjointSets[Place]()
    for part in sorted(all_parts, key=lambda part: -len(part.instances)):
        _find_axes(part, axes)
    return Parts(all_parts, contents, axes, patterns)


def _find_axes(part: Part, axes: DisjointSets[Place]) -> None:
    """Pair the indices of the two dialects. Parts with the most instances are first; later parts reuse the axes that
    were found for the first parts.
    """
    columns: dict[tuple[int, ...], list[Coordinate]] = defaultdict(list)
    for coordinate in _coordinates(part):
        columns[tuple(instance.at(coordinate) for instance in part.instances)].append(coordinate)
    alone: list[Coordinate] = []
    for coordinates in columns.values():
        hub_coordinates, memory_coordinates = ([c for c in coordinates if c[1] == side] for side in SIDES)
        for coordinate_in_hub in hub_coordinates:
            partner = _partner(part, coordinate_in_hub, memory_coordinates, axes)
            if partner is None:
                alone.append(coordinate_in_hub)
                continue
            memory_coordinates.remove(partner)
            place = next(_place(part, c) for c in (coordinate_in_hub, partner) if c[0] == IN_NAME)
            assert place is not None
            for coordinate in (coordinate_in_hub, partner):
                axis_place = _place(part, coordinate)
                if axis_place is not None:
                    axes.join(axis_place, place)
                part.axes[coordinate] = place
        alone += memory_coordinates
    if alone:
        raise _explain_unpaired(part, alone)


def _explain_unpaired(part: Part, alone: Sequence[Coordinate]) -> UnpairedIndex:
    """Return the error with a possible interpretation of unpaired indices: one dialect counts from a different number,
    or the numbers are literals.
    """
    pattern = part.patterns[SIDES.index(str(alone[0][1]))]
    why = f"{pattern.text}: an index of it is in no name of the other dialect"
    hub_coordinates, memory_coordinates = ([c for c in alone if c[1] == side and c[0] == IN_NAME] for side in SIDES)
    for first in hub_coordinates:
        for second in memory_coordinates:
            steps = {instance.at(first) - instance.at(second) for instance in part.instances}
            if len(steps) == 1 and len({instance.at(first) for instance in part.instances}) > 1:
                place = part.patterns[0].numbering_place(int(first[2]))
                return UnpairedIndex(why, Numbering(ahead={place: next(iter(steps))}))
    literal = {
        part.patterns[SIDES.index(str(side))].number(at) for _, side, at in (*hub_coordinates, *memory_coordinates)
    }
    return UnpairedIndex(why, Numbering(frozenset(literal)))


def _coordinates(part: Part) -> list[Coordinate]:
    """Return every place (in names or along dims) at which the part may have an index."""
    coordinates: list[Coordinate] = [
        (IN_NAME, side, at)
        for side, pattern in zip(SIDES, part.patterns, strict=True)
        for at in range(len(pattern.places))
    ]
    for which, side in enumerate(SIDES):
        for dim, share in enumerate(part.instances[0].move.shares[which]):
            if not share.digits and len({i.move.shares[which][dim].offset for i in part.instances}) > 1:
                coordinates.append((IN_DIM, side, dim))
    return coordinates


def _place(part: Part, coordinate: Coordinate) -> Place | None:
    kind, side, at = coordinate
    return part.patterns[SIDES.index(str(side))].places[at] if kind == IN_NAME else None


def _partner(
    part: Part, coordinate: Coordinate, candidates: Sequence[Coordinate], axes: DisjointSets[Place]
) -> Coordinate | None:
    """Return the place, in the second dialect, of the index that always has the same value as the index at
    `coordinate`; None if there is no such place.
    """
    fitting = [candidate for candidate in candidates if IN_NAME in (coordinate[0], candidate[0])]
    if not fitting:
        return None
    place = _place(part, coordinate)
    for candidate in fitting:
        counted = _place(part, candidate)
        if place is not None and counted is not None and axes.first(place) == axes.first(counted):
            return candidate
    return fitting[0]


@dataclass(frozen=True)
class DigitAxis:
    """An axis of a part (logical tensor) that corresponds to one digit (loop of equal steps) by which the part's
    elements are moved.
    """

    part: int
    """Index of the part in the list of all parts."""
    digit: int
    """Index of the digit in the part's moves."""


@dataclass(frozen=True)
class PaddingAxis:
    """An axis over padding: positions that belong to no part."""

    pattern: str
    """Name pattern of the stored tensor with the padding."""
    place: int
    """Index of the padding among all paddings of the stored tensor, counted from the beginning."""


AxisKey = DigitAxis | PaddingAxis | Place
"""An axis that has no name yet; a `Place` means the axis of the index at this place in tensor names."""


@dataclass(frozen=True)
class Segment:
    """One segment of a direct sum, such as the q rows of a fused qkv weight."""

    part: int | None
    """Index of the part in the list of all parts; None for padding."""
    axes: tuple[AxisKey, ...]
    """Axes of the segment, outermost first."""


@dataclass(frozen=True)
class Dim:
    """One dim of a stored tensor: axes, optionally followed by a direct sum (segments one after the other)."""

    axes: tuple[AxisKey, ...]
    """Axes before the sum, outermost first; a dim without axes and sum has size 1."""
    segments: tuple[Segment, ...] = ()
    """Segments of the sum at the end of the dim."""


@dataclass(frozen=True)
class Layout:
    """How logical tensors form the dims of a stored tensor, as the expression of a mapping rule states it, but with
    axes that have no names yet.
    """

    parts: tuple[int, ...]
    """Indices of the parts (logical tensors) in the stored tensor."""
    dims: tuple[Dim, ...]
    """Dims of the stored tensor."""

    def with_axes(self, first: Callable[[AxisKey], AxisKey]) -> Layout:
        """Return the layout with every axis replaced by the result of the function `first` for this axis."""
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
        """All axes of the layout, dim by dim."""
        for dim in self.dims:
            yield from dim.axes
            for segment in dim.segments:
                yield from segment.axes


@dataclass
class AxisObservations:
    """Collects which axes are equal, and the sizes of axes, while layouts are computed."""

    numbers: Mapping[Part, int]
    """Part -> index of the part in the list of all parts."""
    joined: DisjointSets[AxisKey]
    """Sets of axes; axes that must be one axis are in one set."""
    sizes: dict[AxisKey, set[tuple[int, int]]]
    """Axis -> all observed pairs `(index of the trace, size)`."""

    def digit(self, part: Part, instance: Instance, digit: int) -> AxisKey:
        """Return the axis that corresponds to a digit of a part's move, and record the axis's size."""
        axis = DigitAxis(self.numbers[part], digit)
        self.sizes.setdefault(axis, set()).add((instance.trace, instance.move.sizes[digit]))
        return axis


@dataclass(frozen=True)
class _Piece:
    """The positions of one part (logical tensor) along a dim."""

    part: Part
    instance: Instance
    share: DimShare

    @property
    def size(self) -> int:
        return prod(self.instance.move.sizes[digit] for digit, _ in self.share.digits)

    def inner(self) -> _Piece:
        return _Piece(self.part, self.instance, DimShare(self.share.offset, self.share.digits[1:]))


def layout(
    side: str, pattern: str, shape: Shape, contents: Sequence[tuple[Part, Instance]], reading: AxisObservations
) -> Layout:
    """Compute the layout of one stored tensor.

    Raises:
        Underivable: if the parts do not form dims with at most one direct sum.
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
            if place is None or any(axis is None for axis in counted):
                raise Underivable(f"{pattern}: dim {at} counts some of its parts only")
            for axis in counted[1:]:
                assert axis is not None
                reading.joined.join(axis, place)
            dims.append(Dim((place,)))
        else:
            pieces = [_Piece(part, instance, instance.move.shares[which][at]) for part, instance in first.items()]
            dims.append(reader.dim(length, pieces))
    sums = sum(bool(dim.segments) for dim in dims)
    if sums > 1 or (len(first) > 1 and not sums):
        raise Underivable(f"{pattern}: its parts lie beside each other in {sums} dims")
    return Layout(tuple(reading.numbers[part] for part in first), tuple(dims))


class _Reader:
    """Computes the dims of one stored tensor."""

    def __init__(self, side: str, pattern: str, reading: AxisObservations) -> None:
        self.side = side
        self.pattern = pattern
        self.reading = reading
        self.paddings = 0

    def dim(self, length: int, pieces: Sequence[_Piece]) -> Dim:
        """Return one dim: the outer axes that all parts have, and the direct sum of the parts inside these axes."""
        shared: list[AxisKey] = []
        while True:
            if all(piece.size == length and piece.share.offset == 0 for piece in pieces):
                return Dim((*shared, *self._together(pieces)))
            if not self._outermost_is_shared(length, pieces):
                return Dim(tuple(shared), tuple(self._segments(length, pieces)))
            shared += self._unite([self._axes(piece)[0] for piece in pieces])
            length = pieces[0].share.digits[0][1]
            pieces = [piece.inner() for piece in pieces]

    @staticmethod
    def _outermost_is_shared(length: int, pieces: Sequence[_Piece]) -> bool:
        """Return whether all parts have the same outermost steps through the whole dim, and are side by side within
        each step.
        """
        if not all(piece.share.digits for piece in pieces):
            return False
        steps = {(piece.instance.move.sizes[piece.share.digits[0][0]], piece.share.digits[0][1]) for piece in pieces}
        size, stride = next(iter(steps))
        return len(steps) == 1 and size * stride == length and all(p.share.offset < stride for p in pieces)

    def _axes(self, piece: _Piece) -> list[AxisKey]:
        return [self.reading.digit(piece.part, piece.instance, digit) for digit, _ in piece.share.digits]

    def _unite(self, axes: Sequence[AxisKey]) -> list[AxisKey]:
        for next_axis in axes[1:]:
            self.reading.joined.join(next_axis, axes[0])
        return [axes[0]]

    def _together(self, pieces: Sequence[_Piece]) -> list[AxisKey]:
        """Return the axes of a dim that each part fills completely."""
        rows = [self._axes(piece) for piece in pieces]
        sizes = {tuple(p.instance.move.sizes[digit] for digit, _ in p.share.digits) for p in pieces}
        if len(sizes) > 1:
            raise Underivable(f"{self.pattern}: its parts divide a dim in different ways")
        return [axis for column in zip(*rows, strict=True) for axis in self._unite(column)]

    def _segments(self, length: int, pieces: Sequence[_Piece]) -> Iterator[Segment]:
        """Yield the segments of the direct sum in a dim."""
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
