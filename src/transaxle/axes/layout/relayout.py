"""Describes a checkpoint in a new layout as box copies, and finds the axis sizes that these copies need.

A *box copy* moves a rectangular region of a logical tensor from a source tensor to a target tensor. Every target tensor
is split into pieces (boxes of logical tensors), and each piece overlaps source pieces of the same logical tensor. The
names of source tensors are computed from indices, never searched. There is no intermediate format: the model family's
logical tensors connect the two dialects (frameworks' names and layouts).

**Sizes**: this module finds which axis sizes a conversion needs, and which sizes the stored shapes imply.

- Unification: axes that no layout of a conversion separates are treated as one axis. If `g r c` are adjacent, in this
  order, in every mapping rule with a certain tensor, the three axes move together. The product of such adjacent axes is
  one axis, whose size the stored shape shows. So a conversion needs only the sizes of axes that it separates.
- `solve` computes sizes that are not in the config from the shapes of all tensors of a mapping rule: each stored dim is
  one equation, linear in each axis. `fill` computes the sizes for one stored tensor after unification, and checks the
  tensor's shape against its mapping rule.
- Inseparable sums: logical tensors that a conversion never separates move together, and their single sizes are not
  needed. If source and target have the same `[(g [q:(r c) | k:c | v:c]) d]`, it does not matter where q ends and k
  begins. In the layouts of source and target, the first tensor of the sum is treated as if it had all positions of the
  dim.
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
"""Separator between axis names in the name of a product axis (`g*r`)."""

_NONE: Mapping[str, str] = MappingProxyType({})


def factors(axis: str) -> list[str]:
    """Return the names of the axes that a product axis joins: `g*r` -> `g`, `r`."""
    return axis.split(JOIN)


def _runs(node: Node, owners: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield each run of adjacent axes in a dim, with the names of the logical tensors that have these axes."""
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
    """The axes of a conversion, after adjacent axes that are never separated have been joined to one axis."""

    joined: frozenset[tuple[str, str, str]]
    """Pairs of adjacent axes that no expression separates, as `(logical tensor, axis, next axis)`."""
    tied: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Logical tensor -> the tied logical tensor that may be read instead."""

    def rewrite(self, expression: Expression) -> Expression:
        """Return the expression, with each group of adjacent axes that are never separated replaced by a
        product axis.
        """

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
    """Find the adjacent axes that no expression separates, so that they can be treated as one axis.

    Args:
        expressions: the layout expressions of all mapping rules in the conversion, of source and target.
        tied: logical tensor -> the tied logical tensor that may be read instead; both tensors must keep the same axes.

    Post-condition: for any sizes, rewriting an expression changes no offset and no stride of any element, and two
    expressions of one logical tensor still have the same axes.
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
    # Adjacent axes outside of a sum, as `g` in `(g [q:r | k:])`, belong to all its logical tensors. Such axes stay
    # joined only if they are joined in all of these tensors.
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
"""Number of elements along each dim."""

_NOT_ITS_TABLE = (
    "Correct --axis and --config, if you gave them. If the config is this model's own, the table does not fit it: "
    "correct its axes, and give it with --rules (rules=)."
)


def unknown(node: Node, sizes: Mapping[str, int]) -> list[str]:
    """Return the axes of a dim whose sizes are unknown, each axis once."""
    return list(dict.fromkeys(p.name for p in walk(node) if isinstance(p, Axis) and p.name not in sizes))


def root(node: Node, axis: str, sizes: Mapping[str, int], length: int) -> int | None:
    """Compute the size of one axis from the length of its dim, so that `size(node) == length`; None if no whole number
    is a solution.
    """
    base = size_of(node, {**sizes, axis: 0})
    step = size_of(node, {**sizes, axis: 1}) - base
    if step == 0:
        return None
    value, remainder = divmod(length - base, step)
    return value if remainder == 0 and value >= 0 else None


def with_products(sizes: Mapping[str, int], expression: Expression) -> dict[str, int]:
    """Add the sizes of the product axes in an expression, where the sizes of all factors are known."""
    extended = dict(sizes)
    for axis in expression.axes - extended.keys():
        if all(factor in extended for factor in factors(axis)):
            extended[axis] = prod(extended[factor] for factor in factors(axis))
    return extended


def fill(expression: Expression, shape: Shape, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of all axes of a stored tensor; unknown sizes are computed from the tensor's shape.

    Raises:
        Refused: with the code SHAPE_MISMATCH if the tensor's shape does not fit its mapping rule.
        UsageError: with the code UNKNOWN_AXIS if a single dim has several axes of unknown size.
    """
    if len(shape) != len(expression.dims):
        raise mismatch(expression, f"{len(expression.dims)} dims", shape)
    all_sizes = with_products(sizes, expression)
    for node, length in zip(expression.dims, shape, strict=True):
        missing = unknown(node, all_sizes)
        if len(missing) > 1:
            raise unknown_axis(missing[0], expression.text, shape)
        if missing:
            value = root(node, missing[0], all_sizes, length)
            if value is None:
                raise mismatch(expression, f"a size of {missing[0]} that makes a dim of {length}", shape)
            all_sizes[missing[0]] = value
    expected = tuple(size_of(node, all_sizes) for node in expression.dims)
    if expected != shape:
        used = ", ".join(f"{axis}={all_sizes[axis]}" for axis in sorted(expression.axes) if axis in all_sizes)
        raise mismatch(expression, f"{list(expected)} ({used})", shape)
    return all_sizes


def mismatch(expression: Expression, expected: str, shape: Shape) -> TransaxleError:
    """Build the error for a tensor whose shape does not fit its mapping rule."""
    return refuse("SHAPE_MISMATCH", f"{expression.text}\nexpected {expected}, got {list(shape)}", hint=_NOT_ITS_TABLE)


def unknown_axis(axis: str, rule: str, shape: Shape | None = None) -> TransaxleError:
    """Build the error for an axis whose size is needed but unknown."""
    axis = factors(axis)[0]
    shape_note = "" if shape is None else f", and the shape {list(shape)} does not determine it"
    return refuse(
        "UNKNOWN_AXIS",
        f"{rule}\nthe size of axis {axis} is needed{shape_note}",
        hint=f"Give it with --axis {axis}=N, or the model's config.json with --config FILE.",
    )


def solve(equations: Mapping[Expression, Mapping[Shape, Mapping[str, int]]], sizes: Sizes) -> Sizes:
    """Compute axis sizes that the config lacks from the shapes of stored tensors, where all shapes imply the same size.

    Args:
        equations: expression -> each distinct shape of its stored tensors -> index of one tensor with that shape.
        sizes: the axis sizes that are known so far.

    An axis for which two tensors imply different sizes (in different layers) stays unknown; `fill` computes its size
    per tensor.
    """
    conflicting: set[str] = set()
    # A round may determine the size of an axis, so that only one axis of unknown size remains in some other dim.
    while True:
        solutions: dict[str, set[int]] = {}
        for expression, shapes in equations.items():
            for shape, index in shapes.items():
                if len(shape) != len(expression.dims):
                    continue
                known_sizes = sizes.at(index)
                for node, count in zip(expression.dims, shape, strict=True):
                    missing = unknown(node, known_sizes)
                    # The length of a dim determines the size of an axis only if the sizes of all other axes in the dim
                    # are known.
                    if len(missing) != 1 or missing[0] in conflicting:
                        continue
                    value = root(node, missing[0], known_sizes, count)
                    if value is not None:
                        solutions.setdefault(missing[0], set()).add(value)
        conflicting |= {axis for axis, values in solutions.items() if len(values) > 1}
        agreed = {axis: values.pop() for axis, values in solutions.items() if len(values) == 1}
        if not agreed:
            return sizes
        sizes = sizes.with_solved(agreed)


NOTHING = "[]"
"""Axis of size 0. In a fused dim that a conversion never separates, all logical tensors but the first get the axis of
size 0.
"""


def inseparable(
    lines: Iterable[Line], tensors: Mapping[str, LogicalTensor], tied: Container[str], basis: Basis
) -> dict[Expression, Expression]:
    """Find the fused dims whose logical tensors (such as q, k, v) no mapping rule of the conversion separates.

    Args:
        lines: all mapping rules of source and target in the conversion.
        tensors: the logical tensors of the family, by name.
        tied: logical tensors that may be read from a tied logical tensor instead.
        basis: the axes of the conversion, after axes that no mapping rule separates have been joined.

    Returns:
        Expression -> the expression after the first logical tensor has replaced the whole fused dim.

    Post-condition: a conversion makes the same copies with the replaced expressions as with the original expressions.
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
        # Dims with padding are skipped, because the size of padding must be known. Tied tensors, and copies along an
        # axis, are skipped because they are read separately from the rest of the dim.
        if len(names) < 2 or any(name == PADDING for name, _ in expression.segments):
            continue
        if any(name in tied or not set(expression.axes_of(name)) <= set(tensors[name].axes) for name in names):
            continue
        if all(other.dims == expression.dims for name in names for other in by_component[name]):
            result[expression] = _as_first(basis.rewrite(expression))
    return result


def _as_first(expression: Expression) -> Expression:
    first, *further = expression.components
    parts = ((first, Axis(f"[{' '.join(expression.components)}]")), *((name, Axis(NOTHING)) for name in further))
    dims = (Sum(parts) if any(isinstance(node, Sum) for node in walk(dim)) else dim for dim in expression.dims)
    return Expression(expression.text, None, tuple(dims))


EXACT = (None, None)
"""Arithmetic of a copy that changes no values: neither the source's nor the target's mapping rule computes anything."""
IDENTITY = "#"
"""Name used as the logical tensor of a stored tensor that no table describes."""


class Chunk(Protocol):
    """A rectangular chunk of a stored tensor (a protocol, which `formats.Extent` implements)."""

    @property
    def start(self) -> Shape:
        """Index of the chunk's first element along each dim."""

    @property
    def shape(self) -> Shape:
        """Number of the chunk's elements along each dim."""

    @property
    def strides(self) -> Shape | None:
        """Strides of the chunk in elements; None means that the chunk is row-major."""


class Stored(Protocol):
    """A stored tensor (a protocol, which `formats.Entry` implements)."""

    @property
    def dtype(self) -> str:
        """Dtype, as a safetensors code."""

    @property
    def shape(self) -> Shape:
        """Number of logical elements along each dim."""

    @property
    def extents(self) -> Sequence[Chunk]:
        """Chunks that together cover the tensor."""


class ChunkCopy(NamedTuple):
    """One box copy from a chunk of a stored tensor into a chunk of a target tensor."""

    source: str
    """Name of the stored tensor."""
    chunk: int
    """Index of the source chunk in the list `extents` of the source tensor."""
    move: BoxCopy
    """The strided copy, with offsets and strides in the source chunk and in the target chunk."""


class Origin(msgspec.Struct, frozen=True):
    """One stored tensor that contains part of a logical tensor."""

    name: str
    """Name of the stored tensor."""
    component: str
    """Name of the logical tensor in the source's mapping rule."""
    layout: Layout
    """Layout of the stored tensor."""
    index: Mapping[str, int]
    """Axis -> index, for the axes of the logical tensor that are numbered in the stored name, in the order of
    the name.
    """


class TargetPart(NamedTuple):
    """The elements of a target tensor that belong to one logical tensor, with the stored tensors from which they are
    read.
    """

    component: str
    """Name of the logical tensor in the target's mapping rule."""
    origins: Sequence[Origin]
    """Stored tensors that together contain all these elements, without overlap, sorted by index."""
    arithmetic: tuple[Arithmetic | None, Arithmetic | None] = EXACT
    """Arithmetic that changes values: that of the source's mapping rule, and that of the target's mapping rule."""


class Target(msgspec.Struct, frozen=True, eq=False):
    """A tensor to write in the target dialect, with the stored tensors from which it is read."""

    name: str
    """Name of the tensor in the target dialect."""
    dtype: str
    """Safetensors code of the dtype, which is the dtype of the source tensors."""
    layout: Layout
    """Layout of the target tensor: where its logical tensors are."""
    index: Mapping[str, int]
    """Axis -> index, for the axes that are numbered in the target's name."""
    parts: tuple[TargetPart, ...]
    """For each logical tensor in the target, the stored tensors from which it is read."""
    rule: str
    """Text of the target dialect's mapping rule for this tensor."""
    component: str = ""
    """The tensor's name in reports: the names of its logical tensors, separated by commas."""
    encoding: str = PLAIN
    """Name of the encoding in which the tensor is written: one of `family.WORDS`, or `PLAIN`."""

    @property
    def shape(self) -> Shape:
        """Shape of the whole tensor."""
        return self.layout.shape

    def at(self, name: str, index: Mapping[str, int], parts: tuple[TargetPart, ...]) -> Target:
        """Return a copy of this target with a different name, index and sources."""
        return structs.replace(self, name=name, index=index, parts=parts)

    @property
    def form(self) -> NumberFormat:
        """The dtype and encoding with which the tensor is written."""
        return NumberFormat(self.dtype, self.encoding)

    @property
    def whole_source(self) -> str | None:
        """Name of the stored tensor that has the same elements at the same positions as the target; None if there is
        none.
        """
        # a target with several parts or logical tensors has elements of more than one source tensor
        if len(self.parts) != 1 or len(self.layout.shares) != 1:
            return None
        origins = self.parts[0].origins
        return origins[0].name if len(origins) == 1 and origins[0].layout is self.layout else None

    @property
    def is_identity(self) -> bool:
        """Whether the target is the unchanged copy of a stored tensor that no table describes."""
        return [part.component for part in self.parts] == [IDENTITY]

    @property
    def computed(self) -> bool:
        """Whether values change, because the mapping rule of a source or of the target has arithmetic."""
        for part in self.parts:  # noqa: SIM110 - for very many targets, creating a generator doubles the time
            if part.arithmetic is not EXACT and part.arithmetic != EXACT:
                return True
        return False


class Check(msgspec.Struct, frozen=True, eq=False):
    """A check that must succeed before output is committed: two duplicates are bitwise equal, or a tensor is
    all zero.
    """

    first: Target
    """One stored tensor, in its own layout."""
    second: Target
    """The duplicate to compare, in the layout of `first`; a target without parts means that `first` must be all
    zero.
    """
    why: str
    """First line of the error if the two differ: the mapping rule that requires them to be equal."""
    hint: str = ""
    """What a user can do if the two differ: the hint of the error; empty if `first` and `second` are ordinary
    duplicates.
    """

    @property
    def zero(self) -> bool:
        """Whether `first` must be all zero."""
        return not self.second.parts

    @property
    def refusal(self) -> Refusal:
        """The error that is reported if the check fails."""
        return unlike(self.first.name, self.why, self.hint, zero=self.zero)


def unlike(name: str, why: str, hint: str, *, zero: bool) -> Refusal:
    """Build the error for a tensor that differs from its duplicate, or that is not zero although it should be."""
    if zero:
        return Refusal("UNEXPECTED_TENSOR", f"{why}\nbut it is not all zero", Where(None, name), hint)
    return Refusal("UNEQUAL_COPIES", f"{why}\nbut their bytes differ", Where(None, name), hint)


def indices(axes: Sequence[str]) -> Callable[[Sequence[int]], dict[str, int]]:
    """Return a function that maps a list of numbers to `{axis: number}`; dict literals are five times as fast
    as `zip`.
    """
    if len(axes) == 1:
        (only,) = axes
        return lambda numbers: {only: numbers[0]}
    if len(axes) == 2:
        first, second = axes
        return lambda numbers: {first: numbers[0], second: numbers[1]}
    return lambda numbers: dict(zip(axes, numbers, strict=True))


@lru_cache(maxsize=1024)
def identity(shape: Shape) -> Layout:
    """Return the layout of a tensor that no table describes, in which each dim is an axis; results are cached
    by shape.
    """
    return Layout(shape, {IDENTITY: tuple(Share(0, ((f"#{dim}", size, 1),)) for dim, size in enumerate(shape))})


def identity_target(name: str, stored: Stored) -> Target:
    """Return the target for a stored tensor that keeps its name and shape."""
    layout = identity(stored.shape)
    origin = Origin(name, IDENTITY, layout, {})
    return Target(name, stored.dtype, layout, {}, (TargetPart(IDENTITY, (origin,)),), f"{name} = {name}", "")


def is_one_run(stored: Stored) -> bool:
    """Tell whether a stored tensor consists of a single dense, row-major chunk."""
    return len(stored.extents) == 1 and stored.extents[0].strides is None and stored.extents[0].shape == stored.shape


_Positions = tuple[tuple[Interval, ...], ...]
"""For each stored dim, the intervals of positions that a chunk contains, in the chunk's order."""


class Copier:
    """Computes the box copies that fill target tensors, or single chunks of target tensors; equal chunks share their
    pieces.
    """

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
    ) -> Iterator[ChunkCopy]:
        """Yield the copies that fill a target tensor, or one chunk of the target tensor.

        Args:
            target: the tensor to fill.
            intervals: for each stored dim, the intervals of positions that the chunk contains, in the chunk's order;
                None means the whole tensor.
            strides: element strides of the chunk; None means row-major.

        Raises:
            Refused: with the code INCOMPLETE if no source has some elements of the target; copies that were yielded
                before the error are correct.
        """
        positions = None if intervals is None else tuple(map(tuple, intervals))
        for part in target.parts:
            # Source and target are both described as pieces of the same logical tensor, so a copy is the overlap of two
            # pieces. No further property of the two layouts is needed.
            for piece in self._lower(target.layout, part.component, positions, strides):
                copied = 0
                overlaps: dict[tuple[object, ...], PieceOverlap] = {}  # similar sources share their pieces
                for origin in _within(part.origins, piece):
                    for number, source in self._source_pieces(origin, piece, target.index):
                        key = id(source), *origin.index
                        overlap = overlaps.get(key)
                        if overlap is None:
                            overlap = overlaps[key] = PieceOverlap(source, piece, origin.index, target.index)
                        move = overlap.at(origin.index)
                        if move is not None:
                            copied += overlap.size
                            yield ChunkCopy(origin.name, number, move)
                # Source tensors are disjoint, so the sizes of their copies add up to the size of the piece exactly if
                # no element is missing.
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
            # the key contains the layout's `id`, which is unique only while the layout exists
            self._alive.append(layout)
            lowered = self._pieces[key] = pieces(layout, component, positions, strides, self._cut)
        return lowered

    def _cut(self, share: Share, start: int, stop: int) -> list[tuple[tuple[Interval, ...], int]]:
        """Call `cut` for a share of a layout; results are cached by share and interval. `_alive` keeps the share's
        layout alive.
        """
        key = id(share), start, stop
        boxes = self._cuts.get(key)
        if boxes is None:
            boxes = self._cuts[key] = cut(share, start, stop)
        return boxes

    def _source_pieces(self, origin: Origin, piece: Piece, index: Mapping[str, int]) -> Iterator[tuple[int, Piece]]:
        """Yield the pieces in a source's chunks that may overlap a target piece, each with the index of its chunk."""
        stored = self.stored[origin.name]
        extents = stored.extents
        # By far the most common case: the tensor has one dense chunk. The chunk's pieces depend on the layout alone, so
        # all tensors of that layout share these pieces.
        if is_one_run(stored):
            for source in self._lower(origin.layout, origin.component, None, None):
                yield 0, source
            return
        tiling = self._tilings.get(origin.name)
        if tiling is None:
            tiling = self._tilings[origin.name] = _Chunks(extents)
        for number in tiling.find_overlapping(_span(origin, piece, index)):
            chunk = extents[number]
            positions = tuple([((first, first + size),) for first, size in zip(chunk.start, chunk.shape, strict=True)])
            for source in self._lower(origin.layout, origin.component, positions, chunk.strides):
                yield number, source


def _within(origins: Sequence[Origin], piece: Piece) -> Sequence[Origin]:
    """Return the source tensors that may overlap a target piece: those in the piece's box if the sources form a grid of
    indices, else all.
    """
    if len(origins) < 3:
        return origins
    first, last = origins[0].index, origins[-1].index
    # The sources are sorted and without gaps, so the place of a source in the list follows from its index. No search
    # through hundreds of experts in dozens of layers is needed.
    counts = [last[axis] - start + 1 for axis, start in first.items()]
    if min(counts, default=0) < 1 or prod(counts) != len(origins):
        return origins
    ranges: list[range] = []
    for (axis, low), count in zip(first.items(), counts, strict=True):
        start, stop = piece.box.get(axis, (low, low + count))
        if not ranges:
            start, stop = max(start, low), min(stop, low + count)
        elif start < low or stop > low + count:
            return origins  # the grid has gaps: the last source may not have the highest index of an inner axis
        ranges.append(range(start, stop))
    if prod(map(len, ranges)) == len(origins):
        return origins
    overlapping_origins = []
    for index in product(*ranges):
        place = 0
        for number, low, count in zip(index, first.values(), counts, strict=True):
            place = place * count + number - low
        origin = origins[place]
        if tuple(origin.index.values()) != index:
            return origins
        overlapping_origins.append(origin)
    return overlapping_origins


def _span(origin: Origin, piece: Piece, index: Mapping[str, int]) -> list[Interval]:
    """Return, for each stored dim of the source, the interval of positions that contains the elements of a target
    piece.
    """
    spans = []
    for share in origin.layout.shares[origin.component]:
        low = high = share.offset
        for axis, size, step in share.axes:
            start, stop = piece.box.get(axis, (0, size))
            # If the target's name has a number for this axis, the whole target has a single index, to which the span is
            # narrowed.
            if axis in index:
                start, stop = index[axis], index[axis] + 1
            low += start * step
            # The span ends after the element that has the last index along every axis.
            high += (stop - 1) * step
        spans.append((low, high + 1))
    return spans


class _Chunks:
    """The chunks of one stored tensor, sorted by their starts, so that the chunks in a region are found quickly."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = chunks
        starts, shapes = [chunk.start for chunk in chunks], [chunk.shape for chunk in chunks]
        self.by_start: dict[Shape, list[int]] = {start: [number] for number, start in enumerate(starts)}
        if len(self.by_start) < len(chunks):
            self.by_start = {}
            for number, start in enumerate(starts):
                self.by_start.setdefault(start, []).append(number)
        self.edges = list(map(_edges, zip(*starts, strict=True), zip(*shapes, strict=True)))

    def find_overlapping(self, spans: Sequence[Interval]) -> list[int]:
        """Return the indices of the chunks that overlap a rectangular region, in ascending order."""
        near = [
            starts[bisect_right(stops, low) : bisect_left(starts, high)]
            for (starts, stops), (low, high) in zip(self.edges, spans, strict=True)
        ]
        # Most tensors are cut into a grid, in which every combination of starts is a chunk. If a tensor has more
        # combinations than chunks, each chunk is compared with the region instead.
        if prod(map(len, near)) > len(self.chunks):
            candidates: Iterable[int] = range(len(self.chunks))
        else:
            candidates = (number for start in product(*near) for number in self.by_start.get(start, ()))
        return sorted([number for number in candidates if _overlaps(self.chunks[number], spans)])


def _edges(starts: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the sorted starts of chunks along a dim, and for each start the highest end among all chunks that start
    there or before.

    Args:
        starts: first position of each chunk.
        sizes: number of positions of each chunk.
    """
    if sizes.count(sizes[0]) == len(sizes):  # usually all chunks have the same size
        ends = {start: start + sizes[0] for start in set(starts)}
    else:
        ends = {}
        for start, size in set(zip(starts, sizes, strict=True)):
            ends[start] = max(ends.get(start, 0), start + size)
    begins = sorted(ends)
    # `bisect` requires ascending numbers. Running maxima of the ends ascend even if chunks have different sizes. Chunks
    # that do not overlap the region are dropped afterwards.
    return begins, list(accumulate((ends[start] for start in begins), max))


def _overlaps(chunk: Chunk, spans: Sequence[Interval]) -> bool:
    for first, size, (start, stop) in zip(chunk.start, chunk.shape, spans, strict=True):
        if first >= stop or start >= first + size:
            return False
    return True


def chunk_cuts(
    targets: Mapping[str, Target], numbered: Mapping[str, Collection[str]]
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the positions along the first dims of each target tensor at which new chunks begin; tensors of one chunk
    are absent.

    Args:
        targets: target tensors by name.
        numbered: logical tensor -> the axes of this tensor that other dialects number in names, such as layers and
            experts.
    """
    by_layout: dict[int, tuple[tuple[int, ...], ...]] = {}
    cuts = {}
    for name, target in targets.items():
        key = id(target.layout)
        if key not in by_layout:
            by_layout[key] = _cuts(target.layout, numbered)
        if any(len(starts) > 1 for starts in by_layout[key]):
            cuts[name] = by_layout[key]
    return cuts


def _cuts(layout: Layout, numbered: Mapping[str, Collection[str]]) -> tuple[tuple[int, ...], ...]:
    cuts: list[tuple[int, ...]] = []
    # An axis that only counts experts is not enough: a router has a row per expert, and yet is one tensor per layer in
    # every dialect.
    name_axes = set[str].intersection(*(set(numbered.get(component, ())) for component in layout.shares))
    for dim, size in enumerate(layout.shape):
        shares = [share[dim] for share in layout.shares.values()]
        axes = {share.axes for share in shares}
        if len(axes) == 1 and all(len(share.axes) == 1 and share.axes[0][0] in name_axes for share in shares):
            cuts.append(tuple(range(size)))
            continue
        # Logical tensors that follow one another, such as gate and up, are separate chunks.
        spans = sorted((share.offset, share.offset + _length(share.axes)) for share in shares)
        if all(end <= begin for (_, end), (begin, _) in pairwise(spans)):
            cuts.append((0, *(begin for begin, _ in spans[1:])))
        break
    return tuple(cuts)


def _length(axes: tuple[tuple[str, int, int], ...]) -> int:
    """Return the length of a logical tensor's share of a target's dim."""
    return axes[0][1] * axes[0][2] if axes else 1
