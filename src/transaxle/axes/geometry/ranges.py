"""Ranges: which positions of a stored dim belong to some indices of its axes.

`divide` reads off shards how a dim was cut; this is the other direction: the indices of the axes are given.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from transaxle.axes.geometry.chunk import Intervals
from transaxle.axes.notation.expression import Axis, Expression, Layout, Node, Sum, size, walk

Ranges = Mapping[str, tuple[int, int]]
"""Axis -> its first index and the one after its last; axes that are not named are whole."""


def axes_in(node: Node) -> frozenset[str]:
    """Return the axes that lie in a dim."""
    return frozenset(part.name for part in walk(node) if isinstance(part, Axis))


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
    mine, whole = (_layout(node, each) for each in (local_sizes(sizes, ranges), sizes))
    places = np.empty(mine.shape[0], np.int64)
    for component, (share,) in mine.shares.items():
        (there,) = whole.shares[component]
        steps = {axis: step for axis, _, step in there.axes}
        local, place = np.array(share.offset), np.array(there.offset)
        for axis, count, step in share.axes:
            index = np.arange(count)
            local = local[..., None] + index * step
            place = place[..., None] + (index + ranges.get(axis, (0, 0))[0]) * steps[axis]
        places[local] = place
    ends = np.flatnonzero(np.diff(places, append=-1) != 1)
    starts = [0, *(ends + 1).tolist()]
    return tuple((int(places[a]), int(places[b]) + 1) for a, b in zip(starts, ends.tolist(), strict=False))


def segment_sizes(node: Node, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the lengths of the parts that lie one after the other along a dim: several where it is a sum."""
    return tuple(size(part, sizes) for _, part in node.segments) if isinstance(node, Sum) else (size(node, sizes),)


def _layout(node: Node, sizes: Mapping[str, int]) -> Layout:
    """Return the layout of one dim by itself."""
    fused = any(isinstance(part, Sum) for part in walk(node))
    return Expression("", None if fused else "", (node,)).layout(sizes)
