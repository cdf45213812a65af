"""Relayouts: one checkpoint seen through another dialect, as box copies; and the sizes of axes that this needs.

Every target tensor is lowered to pieces; each piece meets the source pieces of the same logical tensor. The sources'
names are computed from the indices, never searched. There is no pivot format: the dialects meet in the family's logical
tensors.

**Sizes**: which axes a conversion has to know, and what the stored shapes imply of them.

- Unification: axes that no layout of a conversion separates are treated as one axis. Where `g r c` are adjacent, in
  that order, in every line that holds a tensor, they move together; their product is one axis, whose size the stored
  shape tells. So a conversion asks only for the sizes it really needs.
- `solve` finds sizes that no config gives from the shapes of all tensors of a line: each stored dim is one equation,
  linear in each axis. `fill` does the same for one stored tensor after unification, and checks its shape against the
  rule.
- Inseparable sums: logical tensors that a conversion never takes apart move as one, and need no sizes of their own.
  Where source and target keep `[(g [q:(r c) | k:c | v:c]) d]` alike, it makes no difference where q ends and k begins:
  the first tensor of such a sum can have all positions of the dim, and the others none, on both sides.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, product
from math import prod
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec
from msgspec import structs

from transaxle.axes.geometry import BoxCopy, Interval, Piece, PieceOverlap, cut, pieces
from transaxle.axes.notation.expression import PADDING, Axis, Expression, Layout, Merge, Node, Share, Sum, walk
from transaxle.axes.notation.expression import size as size_of
from transaxle.axes.notation.family import PLAIN, Arithmetic, Line, LogicalTensor, NumberFormat, Sizes
from transaxle.errors import Refusal, TransaxleError, Where, refuse

JOIN = "*"
"""Separates axis names in the name of their product."""

_NONE: Mapping[str, str] = MappingProxyType({})


def factors(axis: str) -> list[str]:
    """Return the axes that a product axis joins."""
    return axis.split(JOIN)


def _runs(node: Node, owners: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield each run of neighbouring axes, with the components it belongs to."""
    match node:
        case Axis(name):
            yield owners, [name]
        case Merge(parts):
            run: list[str] = []
            for inner in parts:
                if isinstance(inner, Axis):
                    run.append(inner.name)
                    continue
                yield owners, run
                run = []
                yield from _runs(inner, owners)
            yield owners, run
        case Sum(segments):
            for name, inner in segments:
                yield from _runs(inner, (name,))


class Basis(msgspec.Struct, frozen=True):
    """The axes of a conversion after unification."""

    joined: frozenset[tuple[str, str, str]]
    """(logical tensor, axis, next axis): neighbours that are never separated."""
    tied: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Logical tensor -> the one it is stored as."""

    def rewrite(self, expression: Expression) -> Expression:
        """Return the expression with neighbours that are never separated replaced by their product."""

        def change(merge: Merge, owners: tuple[str, ...]) -> Merge:
            parts: list[Node] = []
            previous = ""
            for inner in merge.parts:
                name = inner.name if isinstance(inner, Axis) else ""
                together = all((self.tied.get(owner, owner), previous, name) in self.joined for owner in owners)
                if previous and name and together:
                    product = parts[-1]
                    assert isinstance(product, Axis)
                    parts[-1] = Axis(product.name + JOIN + name)
                else:
                    parts.append(inner)
                previous = name
            return Merge(tuple(parts))

        return expression.rewrite(change)


def unify(expressions: Iterable[Expression], tied: Mapping[str, str] = _NONE) -> Basis:
    """Find the axes that none of the expressions separates.

    Args:
        expressions: every line that takes part, of the source and of the target.
        tied: logical tensor -> the one it may be read from instead: their axes are unified as those of one tensor.

    Post-condition: for any sizes, rewriting every expression changes no offset and no stride of any element, and two
    expressions of one logical tensor still speak of the same axes.
    """
    uses: dict[str, int] = defaultdict(int)
    nexts: dict[tuple[str, str], list[str | None]] = defaultdict(list)
    shared: list[tuple[list[str], str, str]] = []
    for expression in expressions:
        for name in expression.components:
            uses[tied.get(name, name)] += 1
        for dim in expression.dims:
            for owners, run in _runs(dim, expression.components):
                names = [tied.get(owner, owner) for owner in owners]
                for axis, after in zip(run, [*run[1:], None], strict=False):
                    for name in names:
                        nexts[name, axis].append(after)
                    if after is not None:
                        shared.append((names, axis, after))
    joined = {
        (name, axis, followers[0])
        for (name, axis), followers in nexts.items()
        if followers[0] is not None and len(set(followers)) == 1 and len(followers) == uses[name]
    }
    # A run inside a sum belongs to several logical tensors: it stays joined only if it can be joined in all of them.
    while True:
        broken = {
            (name, axis, after)
            for names, axis, after in shared
            if any((name, axis, after) not in joined for name in names)
            for name in names
        } & joined
        if not broken:
            return Basis(frozenset(joined), tied)
        joined -= broken


Shape = tuple[int, ...]
"""Elements along each dim."""

_NOT_ITS_TABLE = (
    "Correct --axis and --config, if you gave them. If the config is this model's own, the table does not fit it: "
    "correct its axes, and give it with --rules (rules=)."
)


def unknown(node: Node, sizes: Mapping[str, int]) -> list[str]:
    """Return the axes of a dim that have no size, each once."""
    return list(dict.fromkeys(p.name for p in walk(node) if isinstance(p, Axis) and p.name not in sizes))


def root(node: Node, axis: str, sizes: Mapping[str, int], length: int) -> int | None:
    """Solve `size(node) == length` for one axis, in which a dim's size is linear; None if no whole number solves it."""
    base = size_of(node, {**sizes, axis: 0})
    step = size_of(node, {**sizes, axis: 1}) - base
    if step == 0:
        return None
    value, remainder = divmod(length - base, step)
    return value if remainder == 0 and value >= 0 else None


def with_products(sizes: Mapping[str, int], expression: Expression) -> dict[str, int]:
    """Add the sizes of an expression's product axes whose factors are known."""
    known = dict(sizes)
    for axis in expression.axes - known.keys():
        if all(factor in known for factor in factors(axis)):
            known[axis] = prod(known[factor] for factor in factors(axis))
    return known


def fill(expression: Expression, shape: Shape, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return sizes for every axis of a stored tensor, solving the unknown ones from its shape.

    Raises:
        Refused: SHAPE_MISMATCH where rule and shape disagree.
        UsageError: UNKNOWN_AXIS where the shape does not tell an axis apart from another.
    """
    if len(shape) != len(expression.dims):
        raise mismatch(expression, f"{len(expression.dims)} dims", shape)
    known = with_products(sizes, expression)
    for node, length in zip(expression.dims, shape, strict=True):
        missing = unknown(node, known)
        if len(missing) > 1:
            raise unknown_axis(missing[0], expression.text, shape)
        if missing:
            value = root(node, missing[0], known, length)
            if value is None:
                raise mismatch(expression, f"a size of {missing[0]} that makes a dim of {length}", shape)
            known[missing[0]] = value
    expected = tuple(size_of(node, known) for node in expression.dims)
    if expected != shape:
        used = ", ".join(f"{axis}={known[axis]}" for axis in sorted(expression.axes) if axis in known)
        raise mismatch(expression, f"{list(expected)} ({used})", shape)
    return known


def mismatch(expression: Expression, expected: str, shape: Shape) -> TransaxleError:
    """Build the refusal of a shape that a rule does not explain."""
    return refuse("SHAPE_MISMATCH", f"{expression.text}\nexpected {expected}, got {list(shape)}", hint=_NOT_ITS_TABLE)


def unknown_axis(axis: str, rule: str, shape: Shape | None = None) -> TransaxleError:
    """Build the refusal of an axis that is needed and unknown."""
    axis = factors(axis)[0]
    shape_note = "" if shape is None else f", and the shape {list(shape)} does not determine it"
    return refuse(
        "UNKNOWN_AXIS",
        f"{rule}\nthe size of axis {axis} is needed{shape_note}",
        hint=f"Give it with --axis {axis}=N, or the model's config.json with --config FILE.",
    )


def solve(equations: Mapping[Expression, Mapping[Shape, Mapping[str, int]]], sizes: Sizes) -> Sizes:
    """Find axes that the config does not give from shapes, where all equations agree.

    Args:
        equations: expression -> each distinct shape stored under it -> the name index of one such tensor.
        sizes: what is known.

    An axis on which two tensors disagree (it varies with the layer) is left unknown here; `fill` finds it per tensor.
    """
    conflicting: set[str] = set()
    # Each round may make an axis known that leaves another dim with a single unknown.
    while True:
        solutions: dict[str, set[int]] = {}
        for expression, shapes in equations.items():
            for shape, index in shapes.items():
                if len(shape) != len(expression.dims):
                    continue
                known = sizes.at(index)
                for node, count in zip(expression.dims, shape, strict=True):
                    missing = unknown(node, known)
                    # One equation determines one unknown.
                    if len(missing) != 1 or missing[0] in conflicting:
                        continue
                    value = root(node, missing[0], known, count)
                    if value is not None:
                        solutions.setdefault(missing[0], set()).add(value)
        conflicting |= {axis for axis, values in solutions.items() if len(values) > 1}
        agreed = {axis: values.pop() for axis, values in solutions.items() if len(values) == 1}
        if not agreed:
            return sizes
        sizes = sizes.giving(agreed)


NOTHING = "[]"
"""The axis without a position, of all tensors of such a sum but the first."""


def inseparable(
    lines: Iterable[Line], tensors: Mapping[str, LogicalTensor], tied: Container[str], basis: Basis
) -> dict[Expression, Expression]:
    """Find the sums that no line takes apart.

    Args:
        lines: all lines of the source and of the target that take part.
        tensors: the logical tensors of the family.
        tied: those that may be read from another one.
        basis: the axes that no line separates.

    Returns:
        Expression -> the same with the first tensor of its sum in place of the whole sum.

    Post-condition: between lines of one such expression, the other expression copies the same elements to the same
    places.
    """
    expressions: dict[Expression, None] = {}
    by_component: dict[str, list[Expression]] = {}
    for line in lines:
        expressions[line.expression] = None
        for name in line.expression.components:
            by_component.setdefault(name, []).append(line.expression)
    result = {}
    for expression in expressions:
        names = expression.components
        # Padding has a size that must be known; a tied tensor, and copies along an axis, are read apart from the rest.
        if len(names) < 2 or any(name == PADDING for name, _ in expression.segments):
            continue
        if any(name in tied or not set(expression.axes_of(name)) <= set(tensors[name].axes) for name in names):
            continue
        if all(other.dims == expression.dims for name in names for other in by_component[name]):
            result[expression] = _as_first(basis.rewrite(expression))
    return result


def _as_first(expression: Expression) -> Expression:
    first, *others = expression.components
    parts = ((first, Axis(f"[{' '.join(expression.components)}]")), *((name, Axis(NOTHING)) for name in others))
    dims = (Sum(parts) if any(isinstance(node, Sum) for node in walk(dim)) else dim for dim in expression.dims)
    return Expression(expression.text, None, tuple(dims))


EXACT = (None, None)
"""No arithmetic, of the source's line nor of the target's."""
IDENTITY = "#"
"""Component of a tensor that no table describes."""


class Chunk(Protocol):
    """A rectangular chunk of a stored tensor (`formats.Extent`)."""

    @property
    def start(self) -> Shape:
        """First index in each dim."""

    @property
    def shape(self) -> Shape:
        """Elements along each dim."""

    @property
    def strides(self) -> Shape | None:
        """Element strides; None: row-major."""


class Stored(Protocol):
    """A stored tensor (`formats.Entry`)."""

    @property
    def dtype(self) -> str:
        """Safetensors code."""

    @property
    def shape(self) -> Shape:
        """Logical elements along each dim."""

    @property
    def extents(self) -> Sequence[Chunk]:
        """Chunks that tile it."""


class Copy(NamedTuple):
    """One box copy from a chunk of a stored tensor into a chunk of a target tensor."""

    source: str
    """Stored tensor name."""
    chunk: int
    """Number of the source's extent."""
    move: BoxCopy
    """Offsets and strides in both chunks."""


class Origin(msgspec.Struct, frozen=True):
    """One stored tensor that holds part of a logical tensor."""

    name: str
    """Stored name."""
    component: str
    """Logical tensor, as the source's line calls it."""
    layout: Layout
    """How it lies in the stored tensor."""
    index: Mapping[str, int]
    """Axes of the logical tensor that live in the stored name, in the order of the name."""


class TargetPart(NamedTuple):
    """One logical tensor's part of a target tensor, and the stored tensors it is read from."""

    component: str
    """Logical tensor, as the target's line calls it."""
    origins: Sequence[Origin]
    """Disjoint sources, which together are complete, sorted by their indices."""
    arithmetic: tuple[Arithmetic | None, Arithmetic | None] = EXACT
    """Arithmetic of the source's and of the target's line."""


class Target(msgspec.Struct, frozen=True, eq=False):
    """A tensor of the target dialect."""

    name: str
    """Stored name in the target dialect."""
    dtype: str
    """Safetensors code: layout never changes it."""
    layout: Layout
    """How its logical tensors lie in it."""
    index: Mapping[str, int]
    """Name axes of the target tensor."""
    parts: tuple[TargetPart, ...]
    """Its logical tensors with their sources."""
    rule: str
    """The target dialect's line as written."""
    component: str = ""
    """The tensor's name in reports: its logical tensors, comma separated."""
    encoding: str = PLAIN
    """Encoding in which it is written, one of `family.WORDS`."""

    @property
    def shape(self) -> Shape:
        """Shape of the whole tensor."""
        return self.layout.shape

    def at(self, name: str, index: Mapping[str, int], parts: tuple[TargetPart, ...]) -> Target:
        """Return the same target under another name, with another index: of its sources another part, or others."""
        return structs.replace(self, name=name, index=index, parts=parts)

    @property
    def form(self) -> NumberFormat:
        """The form in which it is written."""
        return NumberFormat(self.dtype, self.encoding)

    @property
    def moved_whole(self) -> str | None:
        """Name of the stored tensor that it is, element by element; None for any other."""
        if len(self.parts) != 1 or len(self.layout.shares) != 1:  # with one part of several, the others stay out
            return None
        origins = self.parts[0].origins
        return origins[0].name if len(origins) == 1 and origins[0].layout is self.layout else None

    @property
    def undescribed(self) -> bool:
        """Whether no table describes it: it is a stored tensor as it is, under its own name."""
        return [part.component for part in self.parts] == [IDENTITY]

    @property
    def computed(self) -> bool:
        """Whether a line of its source or its own has arithmetic."""
        for part in self.parts:  # noqa: SIM110 - a generator for each of very many takes as long as all else
            if part.arithmetic is not EXACT and part.arithmetic != EXACT:
                return True
        return False


class Check(msgspec.Struct, frozen=True, eq=False):
    """Two stored copies of one logical tensor that must be equal, bit by bit, before anything is committed; or one that
    must be zero.
    """

    first: Target
    """A stored tensor read in its own layout."""
    second: Target
    """The other copy in the same layout; without parts, zeros."""
    why: str
    """The rule that says they are copies."""
    hint: str = ""
    """What to do where they differ; empty for copies of a tensor."""

    @property
    def zero(self) -> bool:
        """Whether the first must be zero."""
        return not self.second.parts

    @property
    def refusal(self) -> Refusal:
        """Why nothing may be committed, where they differ."""
        return unlike(self.first.name, self.why, self.hint, zero=self.zero)


def unlike(name: str, why: str, hint: str, *, zero: bool) -> Refusal:
    """Return the refusal of a tensor that differs from its copy, or from zeros."""
    if zero:
        return Refusal("UNEXPECTED_TENSOR", f"{why}\nbut it is not all zero", Where(None, name), hint)
    return Refusal("UNEQUAL_COPIES", f"{why}\nbut their bytes differ", Where(None, name), hint)


def indices(axes: Sequence[str]) -> Callable[[Sequence[int]], dict[str, int]]:
    """Return what gives a number to each of some axes: a dict is written out in a fifth of the time of `zip`."""
    if len(axes) == 1:
        (only,) = axes
        return lambda numbers: {only: numbers[0]}
    if len(axes) == 2:
        first, second = axes
        return lambda numbers: {first: numbers[0], second: numbers[1]}
    return lambda numbers: dict(zip(axes, numbers, strict=True))


@lru_cache(maxsize=1024)
def identity(shape: Shape) -> Layout:
    """Return the layout of a tensor that no table describes: each dim is an axis. Cached, as models have few shapes."""
    return Layout(shape, {IDENTITY: tuple(Share(0, ((f"#{dim}", size, 1),)) for dim, size in enumerate(shape))})


def unchanged(name: str, stored: Stored) -> Target:
    """Return the target that is a stored tensor under its own name."""
    layout = identity(stored.shape)
    origin = Origin(name, IDENTITY, layout, {})
    return Target(name, stored.dtype, layout, {}, (TargetPart(IDENTITY, (origin,)),), f"{name} = {name}", "")


def is_one_run(stored: Stored) -> bool:
    """Tell whether a stored tensor lies in one dense chunk, row by row."""
    return len(stored.extents) == 1 and stored.extents[0].strides is None and stored.extents[0].shape == stored.shape


_Positions = tuple[tuple[Interval, ...], ...]
"""Per stored dim, the positions that a chunk holds, in chunk order."""


class Copier:
    """Turns target tensors, or chunks of them, into box copies; caches the pieces of equal chunks."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self.stored = stored
        self._pieces: dict[tuple[int, str, _Positions | None, Shape | None], tuple[Piece, ...]] = {}
        self._cuts: dict[tuple[int, int, int], list[tuple[tuple[Interval, ...], int]]] = {}
        self._alive: list[Layout] = []
        self._tilings: dict[str, _Chunks] = {}

    def copies(
        self,
        target: Target,
        intervals: Sequence[Sequence[Interval]] | None = None,
        strides: Shape | None = None,
    ) -> Iterator[Copy]:
        """Yield the copies that fill a target tensor, or the chunk of it that holds `intervals`.

        Args:
            target: the tensor.
            intervals: per stored dim, the positions that the chunk holds, in chunk order; None: all.
            strides: element strides of the chunk; None: row-major.

        Raises:
            Refused: INCOMPLETE where the sources leave a hole; no copy of that part was wrong, but some are missing.
        """
        positions = None if intervals is None else tuple(map(tuple, intervals))
        for part in target.parts:
            # Sources and target are cut into pieces of the same logical tensor, so a copy is where two pieces meet; how
            # either side was packed no longer matters.
            for piece in self._lower(target.layout, part.component, positions, strides):
                copied = 0
                meetings: dict[tuple[object, ...], PieceOverlap] = {}  # sources that are alike share their pieces
                for origin in _within(part.origins, piece):
                    for number, source in self._source_pieces(origin, piece, target.index):
                        key = id(source), *origin.index
                        meeting = meetings.get(key)
                        if meeting is None:
                            meeting = meetings[key] = PieceOverlap(source, piece, origin.index, target.index)
                        move = meeting.at(origin.index)
                        if move is not None:
                            copied += meeting.size
                            yield Copy(origin.name, number, move)
                # Origins are disjoint, so the sizes of their moves add up to the piece exactly when there is no hole.
                if copied != piece.size:
                    raise refuse(
                        "INCOMPLETE",
                        f"{target.rule}\n{part.component} needs {piece.size} elements here, but the source has "
                        f"{copied}",
                        tensor=target.name,
                    )

    def _lower(
        self, layout: Layout, component: str, positions: _Positions | None, strides: Shape | None
    ) -> tuple[Piece, ...]:
        key = id(layout), component, positions, strides
        lowered = self._pieces.get(key)
        if lowered is None:
            self._alive.append(layout)  # an identity is a key only as long as its object lives
            lowered = self._pieces[key] = pieces(layout, component, positions, strides, self._cut)
        return lowered

    def _cut(self, share: Share, start: int, stop: int) -> list[tuple[tuple[Interval, ...], int]]:
        """Cut a share, once for all chunks that lie alike along its dim; the layout keeps it alive."""
        key = id(share), start, stop
        found = self._cuts.get(key)
        if found is None:
            found = self._cuts[key] = cut(share, start, stop)
        return found

    def _source_pieces(self, origin: Origin, piece: Piece, index: Mapping[str, int]) -> Iterator[tuple[int, Piece]]:
        """Yield the pieces of the source's chunks that can meet a target piece, with the chunks' numbers."""
        stored = self.stored[origin.name]
        extents = stored.extents
        # By far the most common case: one dense chunk, whose pieces depend on the layout alone and are shared by all
        # tensors alike.
        if is_one_run(stored):
            for source in self._lower(origin.layout, origin.component, None, None):
                yield 0, source
            return
        tiling = self._tilings.get(origin.name)
        if tiling is None:
            tiling = self._tilings[origin.name] = _Chunks(extents)
        for number in tiling.overlapping(_span(origin, piece, index)):
            chunk = extents[number]
            positions = tuple([((first, first + size),) for first, size in zip(chunk.start, chunk.shape, strict=True)])
            for source in self._lower(origin.layout, origin.component, positions, chunk.strides):
                yield number, source


def _within(origins: Sequence[Origin], piece: Piece) -> Sequence[Origin]:
    """Return the origins that can meet a piece: those in its box, where their name axes number all of them."""
    if len(origins) < 3:
        return origins
    first, last = origins[0].index, origins[-1].index
    # Sorted and without gaps, the place of an origin in the list follows from its index. Experts by the hundred, in
    # layers by the dozen, are found without a search.
    counts = [last[axis] - start + 1 for axis, start in first.items()]
    if min(counts, default=0) < 1 or prod(counts) != len(origins):
        return origins
    wanted: list[range] = []
    for (axis, low), count in zip(first.items(), counts, strict=True):
        start, stop = piece.box.get(axis, (low, low + count))
        if not wanted:
            start, stop = max(start, low), min(stop, low + count)
        elif start < low or stop > low + count:
            return origins  # with gaps, the last origin need not have the highest index of an inner axis
        wanted.append(range(start, stop))
    if prod(map(len, wanted)) == len(origins):
        return origins
    found = []
    for index in product(*wanted):
        place = 0
        for number, low, count in zip(index, first.values(), counts, strict=True):
            place = place * count + number - low
        origin = origins[place]
        if tuple(origin.index.values()) != index:
            return origins
        found.append(origin)
    return found


def _span(origin: Origin, piece: Piece, index: Mapping[str, int]) -> list[Interval]:
    """Return, per stored dim of the source, the positions between which a target piece's elements lie."""
    spans = []
    for share in origin.layout.shares[origin.component]:
        low = high = share.offset
        for axis, size, step in share.axes:
            start, stop = piece.box.get(axis, (0, size))
            # An axis in the target's name has one index for the whole target, which narrows the span in the source to
            # it.
            if axis in index:
                start, stop = index[axis], index[axis] + 1
            low += start * step
            # The span ends after the element with the last index of every axis.
            high += (stop - 1) * step
        spans.append((low, high + 1))
    return spans


class _Chunks:
    """The chunks of one stored tensor by where they begin, so that a search for those in a region finds few others."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = chunks
        starts, shapes = [chunk.start for chunk in chunks], [chunk.shape for chunk in chunks]
        self.by_start: dict[Shape, list[int]] = {start: [number] for number, start in enumerate(starts)}
        if len(self.by_start) < len(chunks):
            self.by_start = {}
            for number, start in enumerate(starts):
                self.by_start.setdefault(start, []).append(number)
        self.edges = list(map(_edges, zip(*starts, strict=True), zip(*shapes, strict=True)))

    def overlapping(self, spans: Sequence[Interval]) -> list[int]:
        """Return the numbers of the chunks that overlap a region, in order."""
        near = [
            starts[bisect_right(stops, low) : bisect_left(starts, high)]
            for (starts, stops), (low, high) in zip(self.edges, spans, strict=True)
        ]
        # Most tensors are cut into a grid, where every combination of starts is a chunk; those that are not may have
        # more combinations than chunks.
        if prod(map(len, near)) > len(self.chunks):
            candidates: Iterable[int] = range(len(self.chunks))
        else:
            candidates = (number for start in product(*near) for number in self.by_start.get(start, ()))
        return sorted([number for number in candidates if _overlaps(self.chunks[number], spans)])


def _edges(starts: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return where chunks begin along a dim, and the last position before which those up to each of these end.

    Args:
        starts: first position of each chunk.
        sizes: number of positions of each.
    """
    if sizes.count(sizes[0]) == len(sizes):  # the usual case
        ends = {start: start + sizes[0] for start in set(starts)}
    else:
        ends = {}
        for start, size in set(zip(starts, sizes, strict=True)):
            ends[start] = max(ends.get(start, 0), start + size)
    begins = sorted(ends)
    # Running maxima, not the ends themselves: they ascend even where chunks have different sizes, so that bisect may be
    # used. Chunks they let through needlessly are dropped afterwards.
    return begins, list(accumulate((ends[start] for start in begins), max))


def _overlaps(chunk: Chunk, spans: Sequence[Interval]) -> bool:
    for first, size, (start, stop) in zip(chunk.start, chunk.shape, spans, strict=True):
        if first >= stop or start >= first + size:
            return False
    return True


def chunk_cuts(
    targets: Mapping[str, Target], numbered: Mapping[str, Collection[str]]
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return where chunks begin along the first dims of tensors, without those that are one chunk.

    Args:
        targets: the tensors.
        numbered: logical tensor -> axes that other dialects have in its names: layers, experts.
    """
    by_layout: dict[int, tuple[tuple[int, ...], ...]] = {}
    found = {}
    for name, target in targets.items():
        key = id(target.layout)
        if key not in by_layout:
            by_layout[key] = _cuts(target.layout, numbered)
        if any(len(starts) > 1 for starts in by_layout[key]):
            found[name] = by_layout[key]
    return found


def _cuts(layout: Layout, numbered: Mapping[str, Collection[str]]) -> tuple[tuple[int, ...], ...]:
    cuts: list[tuple[int, ...]] = []
    # A router has a row for each expert, and yet is one tensor of its layer in every dialect.
    own = set[str].intersection(*(set(numbered.get(component, ())) for component in layout.shares))
    for dim, size in enumerate(layout.shape):
        shares = [share[dim] for share in layout.shares.values()]
        axes = {share.axes for share in shares}
        if len(axes) == 1 and all(len(share.axes) == 1 and share.axes[0][0] in own for share in shares):
            cuts.append(tuple(range(size)))
            continue
        # Parts that lie behind each other, such as gate and up, are chunks of their own.
        spans = sorted((share.offset, share.offset + _length(share.axes)) for share in shares)
        if all(end <= begin for (_, end), (begin, _) in pairwise(spans)):
            cuts.append((0, *(begin for begin, _ in spans[1:])))
        break
    return tuple(cuts)


def _length(axes: tuple[tuple[str, int, int], ...]) -> int:
    """Return how far a part reaches along a dim."""
    return axes[0][1] * axes[0][2] if axes else 1
