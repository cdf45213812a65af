"""Box arithmetic: regions of tensors as boxes with offsets and strides, and the positions of a dim on each rank of a
mesh.

**Pieces**: a piece describes which box of a logical tensor a chunk of a stored tensor contains, with offset and
strides.

The function `pieces` turns the layout of a tensor or of a shard into pieces. `PieceOverlap` intersects a source piece
with a target piece; the result is one strided copy. All movement of data consists of such copies: changes of layout,
resharding, and partial reads.

**Nested strides**: nested loops describe where the elements of a box lie in linear memory, and which boxes an interval
of memory contains.

In a *nested* list of `(size, stride)` loops, outermost first, each stride is at least as large as the span of
everything inside it, so positions grow with the lexicographic order of the indices. All algorithms of this module use
three facts. An interval of positions contains a contiguous range of the lexicographic order (`rank`). A contiguous
range is the union of at most `2k-1` boxes (`lexicographic_boxes`). Two adjacent loops without a gap between them are
equivalent to one loop (`coalesce`).

**Chunk rules**: a chunk rule computes which positions of a stored dim each rank of a mesh has.

A chunk rule maps a list of intervals and a rank to a list of intervals, so several mesh dims can cut a tensor one after
the other. A chunk rule is a plain data object; the tests compare its result with torch's own chunking of an `arange`.

**Ranges**: the function `positions` computes which positions of a stored dim have axis indices in given ranges.

The module `divide` solves the inverse problem: it infers from the shapes of the shards how a dim was cut.
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
"""A rectangular region of a tensor: `(start, stop)` along each axis."""


def rank(loops: Sequence[tuple[int, int]], position: int) -> int:
    """Count the elements of nested loops that lie before `position` in memory.

    Post-condition: `rank(loops, p) == sum(q < p for q in positions(loops))`, for any integer `p`.
    """
    count = 0
    inner = prod(size for size, _ in loops)
    if inner == 0 or position <= 0:
        return 0
    for size, stride in loops:
        inner //= size
        passed = position // stride
        # The position is beyond this loop, so all elements of the loop lie before the position.
        if passed >= size:
            return count + size * inner
        count += passed * inner
        position -= passed * stride
    return count + (position > 0)


def lexicographic_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Split the elements from `start` to `stop - 1` of an array of `shape`, counted in row-major order, into boxes.

    Post-conditions: the boxes are in row-major order and disjoint, their union is the range of elements, and there are
    at most `2 * len(shape) - 1` boxes.
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
    # The whole range lies within a single index of the outermost axis.
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
"""One loop of a strided copy: `(size, source stride, target stride)`, in elements."""


def coalesce(loops: Sequence[Loop]) -> tuple[Loop, ...]:
    """Sort the loops of a copy by target stride, and merge loops that are contiguous in both source and target.

    Post-conditions: the new loops visit the same pairs of source and target positions, in target order; no loop has
    size 1.
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
"""The positions `start` to `stop - 1` of a stored dim."""


class Piece(msgspec.Struct, frozen=True):
    """A box of one logical tensor, with its offset and strides in one chunk of a stored tensor."""

    box: Mapping[str, Interval]
    """Axis of the logical tensor -> interval `(start, stop)` of indices along the axis."""
    offset: int
    """Number of elements from the beginning of the chunk to the first element of the box."""
    strides: Mapping[str, int]
    """Axis -> distance in the chunk, in elements, between two neighbouring elements along the axis."""

    @property
    def size(self) -> int:
        """Number of elements in the box."""
        count = 1
        for start, stop in self.box.values():
            count *= stop - start
        return count


class BoxCopy(msgspec.Struct, frozen=True):
    """A strided copy of one box from a source chunk into a target chunk."""

    source_offset: int
    """Offset of the box's first element in the source chunk, in elements."""
    target_offset: int
    """Offset of the box's first element in the target chunk, in elements."""
    loops: tuple[Loop, ...]
    """The loops of the copy, each `(size, source stride, target stride)`, merged where possible and sorted by target
    stride.
    """

    @property
    def size(self) -> int:
        """Number of elements that the copy moves."""
        count = 1
        for loop in self.loops:
            count *= loop[0]
        return count


def cut(share: Share, start: int, stop: int) -> list[tuple[tuple[Interval, ...], int]]:
    """Return the boxes of a logical tensor that lie in the interval `[start, stop)` of one stored dim.

    Returns:
        For each box, `(index interval per axis of the share, position of the box's first element)`, in stored order.
        There are at most `2k-1` boxes for k axes, and together they have exactly the logical tensor's elements in the
        interval.
    """
    loops = [(size, stride) for _, size, stride in share.axes]
    first_rank, last_rank = rank(loops, start - share.offset), rank(loops, stop - share.offset)
    boxes = lexicographic_boxes([size for size, _ in loops], first_rank, last_rank)
    strides = [stride for _, stride in loops]
    return [(box, share.offset + sum(b[0] * s for b, s in zip(box, strides, strict=True))) for box in boxes]


Cut = Callable[[Share, int, int], list[tuple[tuple[Interval, ...], int]]]
"""Type of the function `cut`, and of functions that call `cut` and cache its results."""


def pieces(
    layout: Layout,
    component: str,
    intervals: Sequence[Sequence[Interval]] | None = None,
    strides: Sequence[int] | None = None,
    cut: Cut = cut,
) -> tuple[Piece, ...]:
    """Describe which elements of one logical tensor a chunk of a stored tensor contains, as pieces.

    Args:
        layout: layout of the stored tensor.
        component: name of the logical tensor.
        intervals: for each stored dim, the intervals of positions that the chunk contains, in the chunk's order; None
            means that the chunk is the whole tensor.
        strides: the chunk's strides, in elements; None means that the chunk is row-major.
        cut: the function `cut` of this module, or a function that caches its results.

    Returns:
        Disjoint pieces, which together have all elements of the logical tensor in the chunk.
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
    """The overlap of a source piece and a target piece of the same logical tensor, computed once for many source
    tensors.

    Source tensors whose names differ only in numbers (of layers or experts) share one overlap; `at` returns the copy
    for one of these source tensors.

    Args:
        source: the piece of a logical tensor in a chunk of a source tensor.
        target: the piece of the same logical tensor in a chunk of the target tensor.
        name_axes: the axes whose index is a number in the source tensor's name.
        target_index: axis -> index, for the axes whose index is a number in the target tensor's name.

    An axis that only the target has is a copy axis: the same value is written for every index along it (broadcast).
    Every axis of the source is also an axis of the target.
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
            # The source tensor's name fixes the index of this axis. Either the target's box contains that index, or
            # nothing overlaps.
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
        # The target tensor's name fixes the index of this axis, so the copy reads only that index of the source.
        for axis, index in target_index.items():
            if axis in source.box:
                low, high = source.box[axis]
                is_empty = is_empty or not low <= index < high
                source_offset += (index - low) * source.strides[axis]
            elif axis in name_axes:
                self._same.append((axis, index))
        self._source_offset, self._target_offset, self._loops = source_offset, target_offset, coalesce(loops)
        self.size = 0 if is_empty else prod(size for size, _, _ in self._loops)
        """Number of elements in each copy; 0 if the source and target pieces do not overlap."""

    def at(self, source_index: Mapping[str, int]) -> BoxCopy | None:
        """Return the copy from the source tensor whose name has these indices, or None if source and target do not
        overlap.

        Post-condition: the copy moves every element of the logical tensor that is in both pieces, and no other element.
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
"""Intervals of a dim that one rank has; concatenated, these intervals are the rank's local dim."""


def whole(length: int) -> Intervals:
    """Return a single interval of the full length: the intervals of a dim that is not cut."""
    return ((0, length),)


def count_positions(intervals: Sequence[Interval]) -> int:
    """Return the number of positions in the intervals, which do not overlap."""
    return sum(stop - start for start, stop in intervals)


def take(intervals: Sequence[Interval], start: int, stop: int) -> Intervals:
    """Concatenate intervals, cut out the positions `[start, stop)`, and return these as intervals of the original dim.

    Adjacent intervals are joined.
    """
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
    """Rule by which the ranks along a mesh dim divide a tensor's dim among them."""

    def __call__(self, intervals: Intervals, parts: int, rank: int, /) -> Intervals:
        """Return the positions that one rank has after a dim, given as `intervals`, is divided among `parts` ranks."""


def torch_chunk(count: int, parts: int, rank: int) -> Interval:
    """Return the rows that rank number `rank` has after `torch.chunk`, which rounds chunk sizes up: the last chunks may
    be short or empty.
    """
    step = -(-count // parts)
    return min(rank * step, count), min((rank + 1) * step, count)


class Shard(msgspec.Struct, frozen=True):
    """DTensor's `Shard`: cuts a dim as `torch.chunk` does."""

    def __call__(self, intervals: Intervals, parts: int, rank: int) -> Intervals:
        """Return the positions that one rank has (see `ChunkRule`)."""
        return take(intervals, *torch_chunk(count_positions(intervals), parts, rank))


class StridedShard(msgspec.Struct, frozen=True):
    """DTensor's `_StridedShard(split_factor)`: cuts a dim into `split_factor` chunks, then divides each chunk among the
    ranks.
    """

    split_factor: int
    """Number of chunks into which the dim is cut first."""

    def __call__(self, intervals: Intervals, parts: int, rank: int) -> Intervals:
        """Return the positions that one rank has (see `ChunkRule`)."""
        local: list[Interval] = []
        total = count_positions(intervals)
        for outer in range(self.split_factor):
            # Every rank gets positions from each outer chunk, so its local tensor joins `split_factor` intervals.
            start, stop = torch_chunk(total, self.split_factor, outer)
            low, high = torch_chunk(stop - start, parts, rank)
            local.extend(take(intervals, start + low, start + high))
        return take(local, 0, total)


class Widths(msgspec.Struct, frozen=True):
    """Cuts a dim, as DeepSpeed may do, into parts of unequal size: one explicit number of rows per rank,
    possibly zero.
    """

    widths: tuple[int, ...]
    """Number of rows of each rank, in rank order."""

    def __call__(self, intervals: Intervals, parts: int, rank: int) -> Intervals:
        """Return the positions that one rank has (see `ChunkRule`).

        Raises:
            Refused: with the code SHAPE_MISMATCH if the widths do not sum to the dim's length, or their number is not
                the number of ranks.
        """
        total = count_positions(intervals)
        if len(self.widths) != parts or sum(self.widths) != total:
            raise refuse("SHAPE_MISMATCH", f"widths {list(self.widths)} over {parts} ranks do not sum to {total} rows")
        start = sum(self.widths[:rank])
        return take(intervals, start, start + self.widths[rank])


class Replicated(msgspec.Struct, frozen=True):
    """Gives every rank the whole dim, such as all key-value heads where a model has fewer key-value heads than
    ranks.
    """

    def __call__(self, intervals: Intervals, _parts: int, _rank: int, /) -> Intervals:
        """Return all positions (see `ChunkRule`)."""
        return intervals


class PerComponent(msgspec.Struct, frozen=True):
    """Cuts each component of a fused dim (such as q, k, v) by its own rule; a rank's local dim joins its share of each
    component.
    """

    lengths: tuple[int, ...]
    """Number of rows of each component of the fused dim, in stored order."""
    rules: tuple[ChunkRule, ...]
    """Chunk rule for each component, in the order of `lengths`."""

    def __call__(self, intervals: Intervals, parts: int, rank: int) -> Intervals:
        """Return the positions that one rank has (see `ChunkRule`).

        Raises:
            Refused: with the code SHAPE_MISMATCH if the sum of the components' lengths is not the length of the dim.
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
    """How one mesh dim cuts a stored tensor, as seen by one rank."""

    dim: int | None
    """Index of the stored dim that is cut (negative: counted from the end); None means that every rank has the whole
    tensor.
    """
    parts: int
    """Size of the mesh dim: the number of ranks among which the stored dim is divided."""
    rank: int
    """Coordinate of this rank along the mesh dim."""
    rule: ChunkRule = Shard()
    """Chunk rule by which the dim is divided among the ranks."""


def place(
    shape: Sequence[int], cuts: Sequence[MeshCut], base: Sequence[Intervals] | None = None
) -> tuple[Intervals, ...]:
    """Return which intervals of each stored dim one rank has after all mesh dims have cut the tensor.

    Args:
        shape: shape of the stored tensor.
        cuts: for each mesh dim, how it cuts the tensor; the cuts are applied from first to last.
        base: intervals of each stored dim before these cuts; None means that the cuts begin with the whole tensor.

    Raises:
        Refused: with the code SHAPE_MISMATCH if the tensor lacks the dim to cut, or a chunk rule does not fit the dim's
            length.
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
"""Axis -> range `[start, stop)` of indices along the axis; an axis that is not a key has its full range."""


def axes_in(node: Node) -> frozenset[str]:
    """Return the names of the axes that form a stored dim."""
    return frozenset(inner.name for inner in walk(node) if isinstance(inner, Axis))


def local_sizes(sizes: Mapping[str, int], ranges: Ranges) -> dict[str, int]:
    """Return a copy of the axis sizes in which each axis in `ranges` has the length of its range."""
    return {**sizes, **{axis: stop - start for axis, (start, stop) in ranges.items()}}


def positions(node: Node, sizes: Mapping[str, int], ranges: Ranges) -> Intervals:
    """Return the positions of a stored dim at which the index of every axis is in that axis's range.

    Args:
        node: the stored dim, as a node of the parsed expression.
        sizes: axis -> size in the whole tensor.
        ranges: axis -> range of indices to include.

    Returns:
        Intervals of positions, in the order of the dim. Concatenated, they are the dim of a smaller tensor that has
        only the indices in `ranges`.
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
    """Return the positions that a smaller dim, which has the same axes, occupies in the full dim.

    Args:
        node: the stored dim, as a node of the parsed expression.
        local: axis -> size in the smaller dim.
        sizes: axis -> size in the whole tensor.
        to_whole_index: for each axis, a function from indices in the smaller dim to indices in the whole tensor.

    Returns:
        Intervals of positions in the full dim, in the order of the smaller dim.
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
    """Return the lengths of the segments of a fused dim (such as q, k and v), or the dim's length if the dim has no
    segments.
    """
    return (
        tuple(size_of(segment, sizes) for _, segment in node.segments)
        if isinstance(node, Sum)
        else (size_of(node, sizes),)
    )


def _dim_layout(node: Node, sizes: Mapping[str, int]) -> Layout:
    """Return the layout of a one-dimensional tensor whose dim is `node`."""
    fused = any(isinstance(inner, Sum) for inner in walk(node))
    return Expression("", None if fused else "", (_name_padding(node),)).layout(sizes)


def _name_padding(node: Node) -> Node:
    """Give the padding segments of a dim distinct names, so that the layout contains their positions as it does for
    logical tensors.
    """
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
