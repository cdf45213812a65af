"""Ranges: which positions of a stored dim belong to given indices of its axes.

`divide` solves the opposite problem: it reads off the shards how a dim was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from transaxle.axes.geometry.chunk import Intervals
from transaxle.axes.notation.expression import PADDING, Axis, Expression, Layout, Merge, Node, Sum, size, walk

Indices: TypeAlias = "NDArray[np.int64]"
Ranges = Mapping[str, tuple[int, int]]
"""Axis -> first index and the one after the last; an axis that is absent is whole."""


def axes_in(node: Node) -> frozenset[str]:
    """Return the axes that lie in a dim."""
    return frozenset(inner.name for inner in walk(node) if isinstance(inner, Axis))


def local_sizes(sizes: Mapping[str, int], ranges: Ranges) -> dict[str, int]:
    """Return the sizes of all axes when those named have these indices only."""
    return {**sizes, **{axis: stop - start for axis, (start, stop) in ranges.items()}}


def positions(node: Node, sizes: Mapping[str, int], ranges: Ranges) -> Intervals:
    """Return the positions of a dim at which the axes have indices in their ranges.

    Args:
        node: the dim.
        sizes: axis -> size in the whole tensor.
        ranges: the indices.

    Returns:
        Intervals in the order of the dim; the dim of these indices alone is their concatenation.
    """

    def moved(index: Mapping[str, Indices]) -> Mapping[str, Indices]:
        return {axis: at + ranges.get(axis, (0, 0))[0] for axis, at in index.items()}

    return positions_of(node, local_sizes(sizes, ranges), sizes, moved)


def positions_of(
    node: Node,
    local: Mapping[str, int],
    sizes: Mapping[str, int],
    moved: Callable[[Mapping[str, Indices]], Mapping[str, Indices]],
) -> Intervals:
    """Return the positions of a dim that a smaller dim of the same axes consists of.

    Args:
        node: the dim.
        local: axis -> size in the smaller one.
        sizes: axis -> size in the whole tensor.
        moved: gives the index of each axis in the whole tensor from that of each axis in the smaller one.

    Returns:
        Intervals in the order of the smaller dim.
    """
    local_layout, full_layout = (_layout(node, axis_sizes) for axis_sizes in (local, sizes))
    full_positions = np.empty(local_layout.shape[0], np.int64)
    for component, (share,) in local_layout.shares.items():
        (full_share,) = full_layout.shares[component]
        grid = np.indices([count for _, count, _ in share.axes])
        index: Mapping[str, Indices] = dict(zip((axis for axis, _, _ in share.axes), grid, strict=True))
        local_positions = share.offset + sum(index[axis] * step for axis, _, step in share.axes)
        index = moved(index)
        full_positions[local_positions] = full_share.offset + sum(
            index[axis] * step for axis, _, step in full_share.axes
        )
    ends = np.flatnonzero(np.diff(full_positions, append=-1) != 1)
    starts = [0, *(ends + 1).tolist()]
    return tuple(
        (int(full_positions[a]), int(full_positions[b]) + 1) for a, b in zip(starts, ends.tolist(), strict=False)
    )


def segment_sizes(node: Node, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the lengths of a dim's segments: several where it is a sum, else one."""
    return (
        tuple(size(segment, sizes) for _, segment in node.segments) if isinstance(node, Sum) else (size(node, sizes),)
    )


def _layout(node: Node, sizes: Mapping[str, int]) -> Layout:
    """Return the layout of one dim by itself."""
    fused = any(isinstance(inner, Sum) for inner in walk(node))
    return Expression("", None if fused else "", (_padding_named(node),)).layout(sizes)


def _padding_named(node: Node) -> Node:
    """Return a dim whose padding has positions like every component: each under a name of its own."""
    match node:
        case Merge(parts):
            return Merge(tuple(map(_padding_named, parts)))
        case Sum(segments):
            named = (
                (f"{name}.{number}" if name == PADDING else name, part) for number, (name, part) in enumerate(segments)
            )
            return Sum(tuple(named))
        case Axis():
            return node
