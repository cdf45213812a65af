"""Box arithmetic: pieces of logical tensors, nested strides, the chunks of a mesh, and ranges of axis indices.

**Pieces**: which box of a logical tensor one chunk of a stored tensor contains, and at which offset and strides.

`pieces` lowers a layout, whole or cut, to pieces. A `PieceOverlap` intersects a source piece with a target piece into
one strided copy. Nothing else moves data: relayouts, resharding, box reads and rank-local plans all consist of such
copies.

**Nested strides**: the positions of a box's elements in one dimension of memory, and how an interval cuts them.

In a *nested* list of `(size, stride)` loops, outermost first, each stride is at least as large as the span of
everything inside it, so positions grow with the lexicographic order of the indices. The whole algebra rests on three
facts: an interval of positions contains a contiguous range of that order (`rank`), such a range is at most `2k-1` boxes
(`lexicographic_boxes`), and two adjacent loops that tile each other are one loop (`coalesce`).

**Chunk rules**: which positions of a stored dim each rank of a mesh gets.

Every rule maps a list of intervals and a rank to a list of intervals, so mesh dims compose left to right. A rule is
data; the tests compare it with torch's own chunking of an `arange`.

**Ranges**: which positions of a stored dim belong to a range of indices of its axes.

`divide` solves the inverse problem: it infers from the shapes of the shards how a dim was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from transaxle.axes.notation.expression import PADDING, Axis, Expression, Layout, Merge, Node, Share, Sum, walk
from transaxle.axes.notation.expression import size as size_of
from transaxle.errors import refuse

Box = tuple[tuple[int, int], ...]
"""A rectangular region: `(start, stop)` along each axis."""


def rank(loops: Sequence[tuple[int, int]], position: int) -> int:
    """Count the elements of nested loops at positions before `position`.

    Post-condition: `rank(loops, p) == sum(q < p for q in positions(loops))`, for any integer `p`.
    """
    count = 0
    inner = prod(size for size, _ in loops)
    if inner == 0 or position <= 0:
        return 0
    for size, stride in loops:
        inner //= size
        passed = position // stride
        # The position is beyond this loop: all its elements lie before it.
        if passed >= size:
            return count + size * inner
        count += passed * inner
        position -= passed * stride
    return count + (position > 0)


def lexicographic_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Split the range `[start, stop)` of the row-major order of `shape` into boxes, in order.

    Post-conditions: the boxes are disjoint, their union is the range, and there are at most `2 * len(shape) - 1`.
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner_shape = shape[1:]
    inner = prod(inner_shape)
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    # The whole range is inside one index of the outermost axis.
    if first == last:
        for box in lexicographic_boxes(inner_shape, head, tail):
            yield ((first, first + 1), *box)
        return
    if head:
        for box in lexicographic_boxes(inner_shape, head, inner):
            yield ((first, first + 1), *box)
        first += 1
    if first < last:
        yield ((first, last), *((0, size) for size in inner_shape))
    if tail:
        for box in lexicographic_boxes(inner_shape, 0, tail):
            yield ((last, last + 1), *box)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the element strides of a dense row-major array."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


Loop = tuple[int, int, int]
"""One loop of a copy: `(size, source stride, target stride)` in elements."""


def coalesce(loops: Sequence[Loop]) -> tuple[Loop, ...]:
    """Sort the loops of a copy by target stride, and merge loops that are contiguous in both source and target.

    Post-conditions: the same set of `(source, target)` positions, in target order; no loop of size 1 remains.
    """
    joined: list[Loop] = []
    for size, source, target in sorted((loop for loop in loops if loop[0] != 1), key=lambda loop: -loop[2]):
        if joined:
            outer_size, outer_source, outer_target = joined[-1]
            if outer_source == size * source and outer_target == size * target:
                joined[-1] = (outer_size * size, source, target)
                continue
        joined.append((size, source, target))
    return tuple(joined)


Interval = tuple[int, int]
"""Positions `[start, stop)` of a stored dim."""


class Piece(msgspec.Struct, frozen=True):
    """A box of one logical tensor, with its offset and strides in one chunk of a stored tensor."""

    box: Mapping[str, Interval]
    """Axis -> interval of its indices."""
    offset: int
    """Elements from the beginning of the chunk to the first element of the box."""
    strides: Mapping[str, int]
    """Axis -> elements of the chunk between two neighbours along the axis."""

    @property
    def size(self) -> int:
        """Number of elements in the box."""
        count = 1
        for start, stop in self.box.values():
            count *= stop - start
        return count


class BoxCopy(msgspec.Struct, frozen=True):
    """One strided copy of a box from a source chunk into a target chunk."""

    source_offset: int
    """Offset of the first element in the source chunk, in elements."""
    target_offset: int
    """Offset of the first element in the target chunk, in elements."""
    loops: tuple[Loop, ...]
    """`(size, source stride, target stride)` of each loop, coalesced and in target order."""

    @property
    def size(self) -> int:
        """Number of elements that the copy moves."""
        count = 1
        for loop in self.loops:
            count *= loop[0]
        return count


def cut(share: Share, start: int, stop: int) -> list[tuple[tuple[Interval, ...], int]]:
    """Cut a logical tensor's share of a stored dim by the interval `[start, stop)` of that dim.

    Returns:
        `(index interval per axis of the share, position of its first element)`, in stored order: at most `2k-1`
        boxes for k axes. Together they are exactly the component's elements at positions in the interval.
    """
    loops = [(size, stride) for _, size, stride in share.axes]
    first_rank, last_rank = rank(loops, start - share.offset), rank(loops, stop - share.offset)
    boxes = lexicographic_boxes([size for size, _ in loops], first_rank, last_rank)
    strides = [stride for _, stride in loops]
    return [(box, share.offset + sum(b[0] * s for b, s in zip(box, strides, strict=True))) for box in boxes]


Cut = Callable[[Share, int, int], list[tuple[tuple[Interval, ...], int]]]
"""Signature of `cut`, also of versions that cache its results."""


def pieces(
    layout: Layout,
    component: str,
    intervals: Sequence[Sequence[Interval]] | None = None,
    strides: Sequence[int] | None = None,
    cut: Cut = cut,
) -> tuple[Piece, ...]:
    """Lower one logical tensor's part of a chunk of a stored tensor to pieces.

    Args:
        layout: layout of the stored tensor.
        component: name of the logical tensor.
        intervals: per stored dim, the intervals that the chunk contains, in chunk order; None: the whole tensor.
        strides: element strides of the chunk; None: row-major.
        cut: function that cuts a share; `cut`, or a cached version of it.

    Returns:
        Disjoint pieces, whose union is everything in the chunk that belongs to the logical tensor.
    """
    shares = layout.shares[component]
    if intervals is None:
        intervals = [((0, size),) for size in layout.shape]
    if strides is None:
        strides = row_major([sum([stop - start for start, stop in spans]) for spans in intervals])
    axis_strides: dict[str, int] = {}
    per_dim: list[list[tuple[Share, tuple[Interval, ...], int]]] = []
    for share, dim_intervals, step in zip(shares, intervals, strides, strict=True):
        for axis, _, stride in share.axes:
            axis_strides[axis] = step * stride
        dim_boxes = []
        base = 0
        for start, stop in dim_intervals:
            for spans, position in cut(share, start, stop):
                dim_boxes.append((share, spans, (base + position - start) * step))
            base += stop - start
        per_dim.append(dim_boxes)
    result = []
    for parts in product(*per_dim):
        box: dict[str, Interval] = {}
        offset = 0
        for share, spans, begin in parts:
            offset += begin
            for (axis, _, _), span in zip(share.axes, spans, strict=True):
                box[axis] = span
        result.append(Piece(box, offset, axis_strides))
    return tuple(result)


class PieceOverlap:
    """The overlap of a source piece and a target piece of one logical tensor, for every source with such a piece.

    Sources that differ only in the indices in their names share one overlap; `at` gives the copy for each of them.

    Args:
        source: a piece of a logical tensor in the source.
        target: a piece of the same logical tensor in the target.
        name_axes: the axes whose index is in the source's name.
        target_index: axis -> index, for the axes whose index is in the target's name.

    An axis that only the target has is a copy axis: the value is written for every index (broadcast). The source has no
    axis that the target lacks.
    """

    __slots__ = ("_loops", "_named", "_same", "_source_offset", "_target_offset", "size")

    def __init__(
        self, source: Piece, target: Piece, name_axes: Container[str], target_index: Mapping[str, int]
    ) -> None:
        self._named: list[tuple[str, int, int, int]] = []
        self._same: list[tuple[str, int]] = []
        source_offset, target_offset = source.offset, target.offset
        loops: list[Loop] = []
        for axis, (low, high) in target.box.items():
            step = target.strides[axis]
            # The source's name fixes this axis: one index of the target's box, or no overlap.
            if axis in name_axes:
                self._named.append((axis, low, high, step))
                continue
            # An axis that the source lacks is a copy axis: source stride 0 repeats one value.
            span = source.box.get(axis)
            if span is None:
                loops.append((high - low, 0, step))
                continue
            first, last = max(low, span[0]), min(high, span[1])
            stride = source.strides[axis]
            source_offset += (first - span[0]) * stride
            target_offset += (first - low) * step
            loops.append((max(last - first, 0), stride, step))
        is_empty = any(size == 0 for size, _, _ in loops)
        # Axes in the target's name select one index of the source.
        for axis, index in target_index.items():
            if axis in source.box:
                low, high = source.box[axis]
                is_empty = is_empty or not low <= index < high
                source_offset += (index - low) * source.strides[axis]
            elif axis in name_axes:
                self._same.append((axis, index))
        self._source_offset, self._target_offset, self._loops = source_offset, target_offset, coalesce(loops)
        self.size = 0 if is_empty else prod(size for size, _, _ in self._loops)
        """Number of elements in each copy; 0 where the pieces do not overlap."""

    def at(self, source_index: Mapping[str, int]) -> BoxCopy | None:
        """Return the copy from the source whose name has these indices; None where the two pieces do not overlap.

        Post-condition: the copy moves every element of the logical tensor that is in both pieces, and no other.
        """
        if not self.size:
            return None
        for axis, same in self._same:
            if source_index[axis] != same:
                return None
        target_offset = self._target_offset
        for axis, low, high, step in self._named:
            index = source_index[axis]
            if not low <= index < high:
                return None
            target_offset += (index - low) * step
        return BoxCopy(self._source_offset, target_offset, self._loops)


Intervals = tuple[Interval, ...]
"""Intervals of a dim that one rank has, in local order; its local dim is their concatenation."""


def whole(length: int) -> Intervals:
    """Return the intervals of an uncut dim: one, of its full length."""
    return ((0, length),)


def count_positions(intervals: Sequence[Interval]) -> int:
    """Return the total length of some intervals."""
    return sum(stop - start for start, stop in intervals)


def take(intervals: Sequence[Interval], start: int, stop: int) -> Intervals:
    """Return the local positions `[start, stop)` of concatenated intervals as intervals, joining adjacent ones."""
    intervals_taken: list[Interval] = []
    base = 0
    for first, last in intervals:
        low, high = max(start - base, 0), min(stop - base, last - first)
        if low < high:
            if intervals_taken and intervals_taken[-1][1] == first + low:
                intervals_taken[-1] = (intervals_taken[-1][0], first + high)
            else:
                intervals_taken.append((first + low, first + high))
        base += last - first
    return tuple(intervals_taken)


class ChunkRule(Protocol):
    """Rule by which `parts` ranks divide the intervals of a dim among them."""

    def __call__(self, intervals: Intervals, parts: int, rank: int, /) -> Intervals:
        """Return the part of `intervals` that belongs to `rank`, one of `parts` ranks."""


def torch_chunk(count: int, parts: int, rank: int) -> Interval:
    """Return the rows of `rank` under `torch.chunk`: chunks of the rounded-up size, the last ones short or empty."""
    step = -(-count // parts)
    return min(rank * step, count), min((rank + 1) * step, count)


class Shard(msgspec.Struct, frozen=True):
    """DTensor's `Shard`: cuts a dim as `torch.chunk` does."""

    def __call__(self, intervals: Intervals, parts: int, rank: int) -> Intervals:
        """See `ChunkRule`."""
        return take(intervals, *torch_chunk(count_positions(intervals), parts, rank))


class StridedShard(msgspec.Struct, frozen=True):
    """DTensor's `_StridedShard(split_factor)`: cuts into `split_factor` chunks, then each of them over the ranks."""

    split_factor: int
    """Number of outer chunks."""

    def __call__(self, intervals: Intervals, parts: int, rank: int) -> Intervals:
        """See `ChunkRule`."""
        local: list[Interval] = []
        total = count_positions(intervals)
        for outer in range(self.split_factor):
            # Every rank gets a chunk of each outer chunk, so its local tensor joins `split_factor` pieces.
            start, stop = torch_chunk(total, self.split_factor, outer)
            low, high = torch_chunk(stop - start, parts, rank)
            local.extend(take(intervals, start + low, start + high))
        return take(local, 0, total)


class Widths(msgspec.Struct, frozen=True):
    """One explicit width per rank (DeepSpeed's uneven cuts); a width may be zero."""

    widths: tuple[int, ...]
    """Number of rows of each rank, in rank order."""

    def __call__(self, intervals: Intervals, parts: int, rank: int) -> Intervals:
        """See `ChunkRule`.

        Raises:
            Refused: SHAPE_MISMATCH where the widths do not sum to the length, or their number is not the number of
                ranks.
        """
        total = count_positions(intervals)
        if len(self.widths) != parts or sum(self.widths) != total:
            raise refuse("SHAPE_MISMATCH", f"widths {list(self.widths)} over {parts} ranks do not sum to {total} rows")
        start = sum(self.widths[:rank])
        return take(intervals, start, start + self.widths[rank])


class Replicated(msgspec.Struct, frozen=True):
    """Every rank gets the whole dim, as with kv heads where there are fewer heads than ranks."""

    def __call__(self, intervals: Intervals, _parts: int, _rank: int, /) -> Intervals:
        """See `ChunkRule`."""
        return intervals


class PerComponent(msgspec.Struct, frozen=True):
    """One rule per component of a direct sum; a rank's local dim concatenates its parts of all components, in order."""

    lengths: tuple[int, ...]
    """Number of rows of each component, in stored order."""
    rules: tuple[ChunkRule, ...]
    """Chunk rule of each component."""

    def __call__(self, intervals: Intervals, parts: int, rank: int) -> Intervals:
        """See `ChunkRule`.

        Raises:
            Refused: SHAPE_MISMATCH where the lengths of the components do not sum to the length of the dim.
        """
        if sum(self.lengths) != count_positions(intervals):
            raise refuse(
                "SHAPE_MISMATCH", f"components {list(self.lengths)} do not sum to {count_positions(intervals)} rows"
            )
        local: list[Interval] = []
        base = 0
        for rows, rule in zip(self.lengths, self.rules, strict=True):
            local.extend(rule(take(intervals, base, base + rows), parts, rank))
            base += rows
        return tuple(local)


class MeshCut(msgspec.Struct, frozen=True):
    """How one mesh dim cuts a stored tensor, for one rank."""

    dim: int | None
    """Stored dim that is cut (negative: counted from the end); None: replicated."""
    parts: int
    """Size of the mesh dim."""
    rank: int
    """Coordinate of this rank along the mesh dim."""
    rule: ChunkRule = Shard()
    """How the dim is divided."""


def place(
    shape: Sequence[int], cuts: Sequence[MeshCut], base: Sequence[Intervals] | None = None
) -> tuple[Intervals, ...]:
    """Return the intervals of each stored dim that one rank has; mesh dims compose left to right.

    Args:
        shape: shape of the stored tensor.
        cuts: one cut for each mesh dim.
        base: intervals of each dim before the cuts; None: the whole tensor.

    Raises:
        Refused: errors of a chunk rule; SHAPE_MISMATCH for a dim that the tensor does not have.
    """
    per_dim = [whole(size) for size in shape] if base is None else list(base)
    for cut in cuts:
        if cut.dim is None:
            continue
        if not -len(shape) <= cut.dim < len(shape):
            raise refuse("SHAPE_MISMATCH", f"dim {cut.dim} is split, but the shape is {list(shape)}")
        per_dim[cut.dim] = cut.rule(per_dim[cut.dim], cut.parts, cut.rank)
    return tuple(per_dim)


Indices: TypeAlias = "NDArray[np.int64]"
Ranges = Mapping[str, tuple[int, int]]
"""Axis -> `[start, stop)` indices; an axis that is absent has its full range."""


def axes_in(node: Node) -> frozenset[str]:
    """Return the names of the axes in a dim."""
    return frozenset(inner.name for inner in walk(node) if isinstance(inner, Axis))


def local_sizes(sizes: Mapping[str, int], ranges: Ranges) -> dict[str, int]:
    """Return axis sizes, where each axis in `ranges` has the length of its range."""
    return {**sizes, **{axis: stop - start for axis, (start, stop) in ranges.items()}}


def positions(node: Node, sizes: Mapping[str, int], ranges: Ranges) -> Intervals:
    """Return the positions of a dim at which the index of every axis is in its range.

    Args:
        node: the dim, as an expression node.
        sizes: axis -> size in the whole tensor.
        ranges: ranges of indices, by axis.

    Returns:
        Intervals in the order of the dim. The dim of a tensor with only these indices is their concatenation.
    """

    def to_whole_index(index: Mapping[str, Indices]) -> Mapping[str, Indices]:
        return {axis: at + ranges.get(axis, (0, 0))[0] for axis, at in index.items()}

    return positions_of(node, local_sizes(sizes, ranges), sizes, to_whole_index)


def positions_of(
    node: Node,
    local: Mapping[str, int],
    sizes: Mapping[str, int],
    to_whole_index: Callable[[Mapping[str, Indices]], Mapping[str, Indices]],
) -> Intervals:
    """Return the positions, in a full dim, of the elements of a smaller dim with the same axes.

    Args:
        node: the dim, as an expression node.
        local: axis -> size in the smaller dim.
        sizes: axis -> size in the whole tensor.
        to_whole_index: maps each axis's indices in the smaller dim to its indices in the whole tensor.

    Returns:
        Intervals in the order of the smaller dim.
    """
    local_layout, full_layout = (_dim_layout(node, axis_sizes) for axis_sizes in (local, sizes))
    full_positions = np.empty(local_layout.shape[0], np.int64)
    for component, (share,) in local_layout.shares.items():
        (full_share,) = full_layout.shares[component]
        grid = np.indices([count for _, count, _ in share.axes])
        index: Mapping[str, Indices] = dict(zip((axis for axis, _, _ in share.axes), grid, strict=True))
        local_positions = share.offset + sum(index[axis] * step for axis, _, step in share.axes)
        index = to_whole_index(index)
        full_positions[local_positions] = full_share.offset + sum(
            index[axis] * step for axis, _, step in full_share.axes
        )
    ends = np.flatnonzero(np.diff(full_positions, append=-1) != 1)
    starts = [0, *(ends + 1).tolist()]
    return tuple(
        (int(full_positions[a]), int(full_positions[b]) + 1) for a, b in zip(starts, ends.tolist(), strict=False)
    )


def segment_sizes(node: Node, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the lengths of the segments of a dim; one length where the dim is no sum."""
    return (
        tuple(size_of(segment, sizes) for _, segment in node.segments)
        if isinstance(node, Sum)
        else (size_of(node, sizes),)
    )


def _dim_layout(node: Node, sizes: Mapping[str, int]) -> Layout:
    """Return the layout of a single dim."""
    fused = any(isinstance(inner, Sum) for inner in walk(node))
    return Expression("", None if fused else "", (_name_padding(node),)).layout(sizes)


def _name_padding(node: Node) -> Node:
    """Rename the padding segments of a dim to distinct names, so that they get positions as components do."""
    match node:
        case Merge(parts):
            return Merge(tuple(map(_name_padding, parts)))
        case Sum(segments):
            renamed_segments = (
                (f"{name}.{number}" if name == PADDING else name, part) for number, (name, part) in enumerate(segments)
            )
            return Sum(tuple(renamed_segments))
        case Axis():
            return node
