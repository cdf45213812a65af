"""Parts: the logical tensors of a table, one for each pair of name patterns that have elements in common.

The instances of a part differ in indices. An index stands in names of both sides (a layer), or in names of one side and
in a dim of the other (an expert, stacked); what stands on both sides with the same values is one axis.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from transaxle.derivation.fitting.element_moves import Move, moves
from transaxle.derivation.fitting.patterns import Numbering, Pattern, Patterns, Place
from transaxle.derivation.fitting.trace import SIDES, Trace, Underivable
from transaxle.move.workers import Unions

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
    move: Move
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
    axes: Unions[Place]
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
    axes = Unions[Place]()
    for part in sorted(found, key=lambda part: -len(part.instances)):
        _find_axes(part, axes)
    return Parts(found, contents, axes, patterns)


def _find_axes(part: Part, axes: Unions[Place]) -> None:
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


def _partner(part: Part, one: Coordinate, others: Sequence[Coordinate], axes: Unions[Place]) -> Coordinate | None:
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
