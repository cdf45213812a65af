"""Pieces: which box of a logical tensor one chunk of a stored tensor holds, and where.

`pieces` lowers a layout, whole or cut, to pieces; a `Meeting` intersects a source piece with a target piece into one
strided copy. Nothing else moves data: relayouts, resharding, box reads and rank-local plans are all such meetings.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from itertools import product
from math import prod

import msgspec

from transaxle.axes.geometry.strided import Loop, coalesce, lexicographic_boxes, rank, row_major
from transaxle.axes.notation.expression import Layout, Share

Interval = tuple[int, int]
"""`[start, stop)` positions of a stored dim."""


class Piece(msgspec.Struct, frozen=True):
    """A box of one logical tensor and the strided place where a chunk keeps it."""

    box: Mapping[str, Interval]
    """Axis -> `[start, stop)` indices."""
    offset: int
    """Elements from the beginning of the chunk to the box's first element."""
    strides: Mapping[str, int]
    """Axis -> elements between neighbours along it, in the chunk."""

    @property
    def size(self) -> int:
        """Number of elements."""
        count = 1
        for start, stop in self.box.values():
            count *= stop - start
        return count


class Move(msgspec.Struct, frozen=True):
    """One box copy between two chunks."""

    source_offset: int
    """First element in the source chunk."""
    target_offset: int
    """First element in the target chunk."""
    loops: tuple[Loop, ...]
    """`(size, source stride, target stride)`, in target order, coalesced."""

    @property
    def size(self) -> int:
        """Number of elements."""
        count = 1
        for loop in self.loops:
            count *= loop[0]
        return count


def cut(share: Share, start: int, stop: int) -> list[tuple[tuple[Interval, ...], int]]:
    """Cut a component's share of a dim by the interval `[start, stop)` of that dim.

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
"""`cut`, or what remembers its results."""


def pieces(
    layout: Layout,
    component: str,
    intervals: Sequence[Sequence[Interval]] | None = None,
    strides: Sequence[int] | None = None,
    cut: Cut = cut,
) -> tuple[Piece, ...]:
    """Lower a component's share of a chunk of a stored tensor to pieces.

    Args:
        layout: the stored tensor.
        component: the logical tensor.
        intervals: per stored dim, the positions that the chunk holds, in chunk order; None: the whole tensor.
        strides: element strides of the chunk; None: row-major.
        cut: cuts a share.

    Returns:
        Disjoint pieces whose union is what the chunk holds of the component.
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


class Meeting:
    """Where two pieces of one logical tensor meet, for all sources that differ in the indices in their names alone.

    Args:
        source: a piece of a logical tensor.
        target: another piece of the same.
        named: the axes that live in the source's name.
        target_index: the axes that live in the target's name, with its indices.

    An axis that only the target has is a copy axis: it is written for every index (broadcast). The source has no axis
    that the target lacks.
    """

    __slots__ = ("_loops", "_named", "_same", "_source_offset", "_target_offset", "size")

    def __init__(self, source: Piece, target: Piece, named: Container[str], target_index: Mapping[str, int]) -> None:
        self._named: list[tuple[str, int, int, int]] = []
        self._same: list[tuple[str, int]] = []
        source_offset, target_offset = source.offset, target.offset
        loops: list[Loop] = []
        for axis, (low, high) in target.box.items():
            step = target.strides[axis]
            # The source's name fixes this axis: one index of the target's box, or no overlap.
            if axis in named:
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
            elif axis in named:
                self._same.append((axis, index))
        self._source_offset, self._target_offset, self._loops = source_offset, target_offset, coalesce(loops)
        self.size = 0 if is_empty else prod(size for size, _, _ in self._loops)
        """Number of elements of each move."""

    def at(self, source_index: Mapping[str, int]) -> Move | None:
        """Return the copy from a source with these indices in its name; None where the pieces share nothing.

        Post-condition: for every index of the logical tensor that both pieces hold, and no other, the move holds the
        pair of its places.
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
        return Move(self._source_offset, target_offset, self._loops)
