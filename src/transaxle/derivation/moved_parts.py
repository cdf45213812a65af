"""Where numbered elements went: logical parts, and the layout in which each is stored.

**Parts**: the logical tensors of a table, one for each pair of name patterns that have elements in common.

The instances of a part differ in indices. An index stands in names of both sides (a layer), or in names of one side and
in a dim of the other (an expert, stacked); what stands on both sides with the same values is one axis.

**Moves**: which elements of a tensor went where, as digits.

A digit is a run of equal steps: `size` elements, `hub` positions apart on one side and `memory` positions apart on
the other. A transpose has two digits, a split of heads three. `factor` finds them from the positions alone.

**Layouts**: how the parts lie in the dims of one stored tensor, as the notation's expression with axes not yet named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt

from transaxle.derivation.patterns import Numbering, Pattern, Patterns, Place
from transaxle.derivation.traces import HUB, SIDES, Numbers, Shape, Trace, Underivable
from transaxle.move.workers import DisjointSets

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
class PartMove:
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


def moves(trace: Trace) -> list[PartMove]:
    """Return every move of a trace.

    Raises:
        Underivable: naming the tensor whose elements no digits describe.
    """
    owners, positions, names = _places(trace)
    found: list[PartMove] = []
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


def _move(names: tuple[str, str], hub: Positions, memory: Positions, trace: Trace) -> PartMove:
    shapes = trace.hub[names[0]].shape, trace.memory[names[1]].shape
    found = factor(hub, memory)
    for side, shape in zip(SIDES, shapes, strict=True):
        found = _divided(found, shape, side)
    firsts = int(hub[0]), int(memory[0])
    shares = tuple(_shares(found, s, f, side) for side, s, f in zip(SIDES, shapes, firsts, strict=True))
    return PartMove(names, tuple(digit.size for digit in found), shapes, (shares[0], shares[1]))


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


Coordinate = tuple[str, int | str, int]
"""Where an index stands: ("name", side, which hole) or ("dim", side, which dim)."""
IN_NAME, IN_DIM = "name", "dim"
_COUNTED = (
    "Numbers in names count layers or experts only if dots separate them, as in layers.0.weight; give the tensors such "
    "names on both sides, or write the table by hand (docs/how-to/add-a-family.md)."
)


@dataclass(frozen=True)
class Instance:
    """A part in one place."""

    trace: int
    """Which trace."""
    move: PartMove
    """Its elements."""
    indices: tuple[tuple[int, ...], tuple[int, ...]]
    """Indices in the names of both sides."""

    def at(self, coordinate: Coordinate) -> int:
        """Return the value of an index."""
        kind, side, place = coordinate
        which = SIDES.index(str(side))
        return self.indices[which][place] if kind == IN_NAME else self.move.shares[which][place].offset


@dataclass(eq=False)
class Part:
    """A logical tensor."""

    patterns: tuple[Pattern, Pattern]
    """Its names on both sides."""
    instances: list[Instance] = field(default_factory=list)
    """Every place where it is."""
    axes: dict[Coordinate, Place] = field(default_factory=dict)
    """Where an index stands -> the axis: the first place in names that counts it."""

    def in_dim(self, side: str, dim: int) -> Place | None:
        """Return the axis that a whole dim of one side counts."""
        return self.axes.get((IN_DIM, side, dim))

    def digits(self) -> int:
        """Return how many digits its moves have."""
        return len(self.instances[0].move.sizes)


@dataclass(frozen=True)
class Parts:
    """All parts of the traces."""

    all: Sequence[Part]
    """In the order of the first dialect."""
    of: Sequence[Mapping[tuple[str, str], Sequence[tuple[Part, Instance]]]]
    """For each trace, (side, stored name) -> what is in it."""
    axes: DisjointSets[Place]
    """Places in names that count the same things."""
    patterns: Patterns
    """Patterns of all names."""


class Unpaired(Underivable):
    """An index of one dialect is nowhere in the other.

    Args:
        why: which.
        numbering: what numbers may mean instead.
        hint: what the user can do.
    """

    def __init__(self, why: str, numbering: Numbering, hint: str = _COUNTED) -> None:
        super().__init__(why, hint)
        self.numbering = numbering


def parts(traces: Sequence[Trace], numbering: Numbering) -> Parts:
    """Sort the moves of all traces into parts.

    Raises:
        Underivable: naming the tensors.
        Unpaired: the same, where numbers may mean something else.
    """
    patterns = Patterns(traces, numbering)
    by_names: dict[tuple[Pattern, Pattern, int, int], Part] = {}
    contents: list[dict[tuple[str, str], list[tuple[Part, Instance]]]] = [defaultdict(list) for _ in traces]
    for at, trace in enumerate(traces):
        for move in moves(trace):
            hub, memory = (patterns.pattern(side, name) for side, name in zip(SIDES, move.names, strict=True))
            dims = (len(move.shapes[0]), len(move.shapes[1]))  # layers of another kind may have another tensor there
            part = by_names.setdefault((hub[0], memory[0], *dims), Part((hub[0], memory[0])))
            instance = Instance(at, move, (hub[1], memory[1]))
            part.instances.append(instance)
            for side, name in zip(SIDES, move.names, strict=True):
                contents[at][side, name].append((part, instance))
    found = list(by_names.values())
    axes = DisjointSets[Place]()
    for part in sorted(found, key=lambda part: -len(part.instances)):
        _find_axes(part, axes)
    return Parts(found, contents, axes, patterns)


def _find_axes(part: Part, axes: DisjointSets[Place]) -> None:
    """Pair the indices of both sides; the parts that are in most places come first, and later ones learn from them."""
    columns: dict[tuple[int, ...], list[Coordinate]] = defaultdict(list)
    for coordinate in _coordinates(part):
        columns[tuple(instance.at(coordinate) for instance in part.instances)].append(coordinate)
    alone: list[Coordinate] = []
    for coordinates in columns.values():
        here, there = ([c for c in coordinates if c[1] == side] for side in SIDES)
        for one in here:
            other = _partner(part, one, there, axes)
            if other is None:
                alone.append(one)
                continue
            there.remove(other)
            place = next(_place(part, c) for c in (one, other) if c[0] == IN_NAME)
            assert place is not None
            for coordinate in (one, other):
                own = _place(part, coordinate)
                if own is not None:
                    axes.join(own, place)
                part.axes[coordinate] = place
        alone += there
    if alone:
        raise _unpaired(part, alone)


def _unpaired(part: Part, alone: Sequence[Coordinate]) -> Unpaired:
    """Return what may be meant by indices that have no partner: one counts from another number, or they are words."""
    pattern = part.patterns[SIDES.index(str(alone[0][1]))]
    why = f"{pattern.text}: an index of it is in no name of the other dialect"
    here, there = ([c for c in alone if c[1] == side and c[0] == IN_NAME] for side in SIDES)
    for one in here:
        for other in there:
            steps = {instance.at(one) - instance.at(other) for instance in part.instances}
            if len(steps) == 1 and len({instance.at(one) for instance in part.instances}) > 1:
                place = part.patterns[0].counted_from(int(one[2]))
                return Unpaired(why, Numbering(ahead={place: next(iter(steps))}))
    literal = {part.patterns[SIDES.index(str(side))].number(at) for _, side, at in (*here, *there)}
    return Unpaired(why, Numbering(frozenset(literal)))


def _coordinates(part: Part) -> list[Coordinate]:
    """Return every place where an index of the part may stand."""
    found: list[Coordinate] = [
        (IN_NAME, side, at)
        for side, pattern in zip(SIDES, part.patterns, strict=True)
        for at in range(len(pattern.places))
    ]
    for which, side in enumerate(SIDES):
        for dim, share in enumerate(part.instances[0].move.shares[which]):
            if not share.digits and len({i.move.shares[which][dim].offset for i in part.instances}) > 1:
                found.append((IN_DIM, side, dim))
    return found


def _place(part: Part, coordinate: Coordinate) -> Place | None:
    kind, side, at = coordinate
    return part.patterns[SIDES.index(str(side))].places[at] if kind == IN_NAME else None


def _partner(part: Part, one: Coordinate, others: Sequence[Coordinate], axes: DisjointSets[Place]) -> Coordinate | None:
    """Return the index of the other side that always has the same value; None if there is none."""
    fitting = [other for other in others if IN_NAME in (one[0], other[0])]
    if not fitting:
        return None
    place = _place(part, one)
    for other in fitting:
        counted = _place(part, other)
        if place is not None and counted is not None and axes.first(place) == axes.first(counted):
            return other
    return fitting[0]


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
    joined: DisjointSets[AxisKey]
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
