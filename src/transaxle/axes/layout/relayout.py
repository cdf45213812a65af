"""Relayout: one checkpoint seen through another dialect, as box copies.

Every target tensor is lowered to pieces; each piece meets the source pieces of the same logical tensor. The sources'
names are computed from the indices, never searched. There is no pivot format: the dialects meet in the family's logical
tensors.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, product
from math import prod
from typing import NamedTuple, Protocol

import msgspec
from msgspec import structs

from transaxle.axes.geometry import Interval, Meeting, Move, Piece, cut, pieces
from transaxle.axes.layout.solve import Shape
from transaxle.axes.notation.expression import Layout, Share
from transaxle.axes.notation.family import PLAIN, Arithmetic, NumberFormat
from transaxle.errors import Refusal, Where, refuse

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
    move: Move
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
                meetings: dict[tuple[object, ...], Meeting] = {}  # sources that are alike share their pieces
                for origin in _within(part.origins, piece):
                    for number, source in self._source_pieces(origin, piece, target.index):
                        key = id(source), *origin.index
                        meeting = meetings.get(key)
                        if meeting is None:
                            meeting = meetings[key] = Meeting(source, piece, origin.index, target.index)
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
