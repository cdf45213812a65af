"""Infers from the shapes of shards how a stored tensor was cut over the ranks of a mesh.

A checkpoint without metadata has only the shapes of its shards. The shapes alone do not show along which dim to join
the shards, nor how a fused dim was cut: q, k and v separately, or the whole dim at once. The model family's table shows
how: the table's `cut` statements name the axes that may be divided among ranks. The shape of the whole tensor follows
from the table and the config. With that shape, usually only one way of cutting explains the shapes of the shards. If
two ways of cutting explain the shapes, the tensor is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import msgspec
import numpy as np

from transaxle.axes.geometry import (
    ChunkRule,
    Indices,
    Intervals,
    Ranges,
    Replicated,
    axes_in,
    positions,
    positions_of,
    take,
)
from transaxle.axes.layout.relayout import mismatch, root, unknown, unknown_axis
from transaxle.axes.notation.expression import PADDING, Axis, Expression, Merge, Node, Sum, size, walk
from transaxle.axes.notation.family import Cuttable, Family
from transaxle.errors import refuse

Shape = tuple[int, ...]
Shares = tuple[int, tuple[Intervals, ...]]
"""`(dim, positions)`: the index of the dim that is cut, and the positions along the dim that each rank has, in local
order.
"""
SharesByName = Mapping[str, Shares | None]
"""Tensor name -> how ranks share out the tensor; None means that every rank has the whole tensor."""
_APART = "'"
"""Suffix that marks the axes of logical tensors that a `cut` statement does not name, so that these axes are
not cut.
"""


class Division(msgspec.Struct, frozen=True):
    """How a stored tensor is cut over ranks."""

    shape: Shape
    """Shape of the whole tensor."""
    dim: int | None
    """Index of the dim that is cut; None means that every rank has the whole tensor."""
    rule: ChunkRule
    """Chunk rule that returns the positions along the cut dim that each rank has."""


class ListedPositions(msgspec.Struct, frozen=True):
    """A chunk rule that lists the positions of every rank, for fused dims whose components (q, k, v) are cut
    separately.
    """

    positions: tuple[Intervals, ...]
    """For each rank, its intervals of the dim, in the order of the rank's local tensor."""

    def __call__(self, intervals: Intervals, _parts: int, rank: int, /) -> Intervals:
        """Return the listed positions of `rank` (see `ChunkRule`)."""
        return tuple(interval for start, stop in self.positions[rank] for interval in take(intervals, start, stop))


def divide(
    expression: Expression, cuts: Sequence[Cuttable], sizes: Mapping[str, int], shards: Sequence[Shape]
) -> Division:
    """Infer from the shapes of its shards how a stored tensor is cut.

    Args:
        expression: layout expression of the stored tensor, from the family's table.
        cuts: the family's `cut` statements, which name the axes that may be divided among ranks.
        sizes: axis -> its size in the whole (uncut) model.
        shards: shape of the tensor's shard on each rank, in rank order.

    Returns:
        The only division that the table allows and whose shards have these shapes.

    Raises:
        Refused: with the code SHAPE_MISMATCH if no division that the table allows has shards of these shapes; with the
            code UNSUPPORTED if the division would cut padding.
        UsageError: with the code UNKNOWN_AXIS if the shape of the whole tensor is unknown; with the code AMBIGUOUS if
            several divisions fit.
    """
    usable = [cut for cut in cuts if cut.tensors is None or not cut.tensors.isdisjoint(expression.components)]
    shape = _whole(expression, usable, sizes, shards)
    # The key contains the positions of each rank, so two `cut` statements with equal results count as one division.
    divisions = dict(_readings(expression, usable, sizes, shape, shards))
    shard_shapes = ", ".join(str(list(shard)) for shard in shards[:8])
    if len(divisions) > 1:
        ways = " or ".join(text for text, _ in divisions.values())
        raise refuse(
            "AMBIGUOUS",
            f"{expression.text}\nshards of {shard_shapes} give {list(shape)} in several ways: split along {ways}",
            hint="In the rules file, restrict a cut to the tensors it is meant for:  cut tp = AXIS of TENSOR.",
        )
    for _, division in divisions.values():
        return division
    allowed = ", ".join(cut.text for cut in usable) or "none"
    message = (
        f"{expression.text}\nno split gives {list(shape)} from shards of {shard_shapes}; axes that may be split "
        f"here: {allowed}"
    )
    raise refuse(
        "SHAPE_MISMATCH", message, hint="A `cut` statement in a rules file says which axes are split:  --rules FILE."
    )


def share_out(expression: Expression, cuts: Sequence[Cuttable], sizes: Mapping[str, int], ranks: int) -> Shares | None:
    """Cut a stored tensor evenly over ranks, along the axis in the first `cut` statement that applies to the tensor.

    Args:
        expression: layout expression of the stored tensor, from the family's table.
        cuts: the family's `cut` statements, in order of preference.
        sizes: axis -> its size in the whole (uncut) model.
        ranks: number of ranks among which the tensor is divided.

    Returns:
        The index of the dim that is cut, and the positions along the dim for each rank; None means that every rank has
        the whole tensor.

    Raises:
        Refused: with the code UNSUPPORTED if the axis is not divisible by the number of ranks, or padding would be cut.
        UsageError: with the code UNKNOWN_AXIS if the size of an axis in the dim to cut is unknown.
    """
    for cut in cuts:
        if cut.tensors is not None and cut.tensors.isdisjoint(expression.components):
            continue
        for dim, node in enumerate(expression.dims):
            if not all(axis in axes_in(node) for axis in cut.axes):
                continue
            if unsized := unknown(node, sizes):
                raise unknown_axis(unsized[0], f"{expression.text}\n{cut.text}")
            _refuse_padding(expression, node)
            renamed = _apart(node, cut)
            all_sizes = {**sizes, **_sizes_of_renamed(renamed, sizes)}
            last = cut.axes[-1]
            total = size(node, sizes) if _leads(renamed, cut.axes) else sizes[last]
            local_size = {} if _leads(renamed, cut.axes) else {last: sizes[last] // ranks}
            rows = size(renamed, {**all_sizes, **local_size}) // (1 if local_size else ranks)
            positions = None if total % ranks else _along(renamed, cut.axes, all_sizes, [rows] * ranks)
            if positions is None:
                count = sizes[last] if total == sizes[last] else f"{sizes[last]} ({total} positions)"
                message = f"{expression.text}\n{cut.text}: {count} does not divide over {ranks} ranks"
                raise refuse("UNSUPPORTED", message, hint="Choose another degree of tensor parallelism.")
            return dim, positions
    return None


def rank_shares(
    expression: Expression, family: Family, dialect: str, sizes: Mapping[str, int], *, tp: int, ep: int = 1
) -> Shares | None:
    """Cut a stored tensor over ranks as an inference engine does, by the first `cut` statement that applies to the
    tensor.

    In a fused dim, each component (q, k, v) is cut separately. A padded dim is cut as a whole, padding included; but if
    the cut axis is also an axis of the padding, the padding is cut separately, like a component. If an axis has fewer
    indices than there are ranks (key-value heads), several ranks share one index, and divide among them the inner axis
    that the statement `cut tp = r within g` names.

    Args:
        expression: layout expression of the stored tensor, from the family's table.
        family: the family with the `cut` statements.
        dialect: name of the dialect; `cut` statements for this dialect alone have precedence over those for all
            dialects.
        sizes: axis -> its size in the whole (uncut) model.
        tp: number of tensor-parallel ranks.
        ep: number of expert-parallel ranks; if it does not divide the number of experts, the first ranks have one more
            expert.

    Returns:
        The index of the dim that is cut, and the positions along the dim for each rank; None means that every rank has
        the whole tensor.

    Raises:
        Refused: with the code UNSUPPORTED if an axis is not divisible by the number of ranks.
        UsageError: with the code UNKNOWN_AXIS if the size of an axis in the dim to cut is unknown.
    """
    for mesh, ranks in (("ep", ep), ("tp", tp)):
        applying = [
            cut
            for cut in (family.cuts_of(mesh, dialect) if ranks > 1 else ())
            if cut.tensors is None or not cut.tensors.isdisjoint(expression.components)
        ]
        for number, cut in enumerate(applying):
            if not cut.axes:
                return None
            for dim, node in enumerate(expression.dims):
                if axes_in(node).issuperset(cut.axes):
                    if unsized := unknown(node, sizes):
                        raise unknown_axis(unsized[0], f"{expression.text}\n{cut.text}")
                    spans = _spans(expression, cut, node, family.within, sizes, ranks)
                    if spans is None:
                        step = size(node, sizes) // ranks
                        return dim, tuple(((rank * step, (rank + 1) * step),) for rank in range(ranks))
                    for further_cut in applying[number + 1 :]:
                        _step_with(expression, further_cut, node, sizes, spans)
                    return dim, _of_spans(node, cut, sizes, spans)
    return None


def _spans(
    expression: Expression,
    cut: Cuttable,
    node: Node,
    within: Mapping[str, str],
    sizes: Mapping[str, int],
    ranks: int,
) -> list[dict[str, tuple[int, int]]] | None:
    """Return for each rank a mapping axis -> index range; None means that the dim is padded and must be cut as
    a whole.
    """
    *outer, axis = cut.axes
    count, inner = sizes[axis], within.get(axis)
    whole, sharing = count % ranks == 0, ranks // count if count and ranks % count == 0 else 0
    if _has_padding(node, cut.axes):
        count = size(node, sizes)
        if count % ranks == 0:
            return None
    elif cut.mesh.partition("@")[0] == "ep":
        experts_per_rank, remainder = divmod(count, ranks)
        ends = [experts_per_rank * (rank + 1) + min(rank + 1, remainder) for rank in range(ranks)]
        return [{axis: span} for span in zip([0, *ends], ends, strict=False)]
    elif whole and not outer:
        return [{axis: span} for span in _even(count, ranks)]
    elif sharing and inner is not None and not outer and sizes[inner] % sharing == 0:
        parts = _even(sizes[inner], sharing)
        return [{axis: (rank // sharing, rank // sharing + 1), inner: parts[rank % sharing]} for rank in range(ranks)]
    message = f"{expression.text}\n{cut.text}: {count} does not divide over {ranks} ranks"
    raise refuse("UNSUPPORTED", message, hint="Choose another degree of parallelism.")


def _even(count: int, ranks: int) -> list[tuple[int, int]]:
    share = count // ranks
    return [(rank * share, (rank + 1) * share) for rank in range(ranks)]


def _step_with(
    expression: Expression,
    cut: Cuttable,
    node: Node,
    sizes: Mapping[str, int],
    spans: list[dict[str, tuple[int, int]]],
) -> None:
    """Add to each rank's ranges a second axis, which belongs to other logical tensors in the same dim (such as the
    groups of a state space model beside its heads). If the second axis has fewer indices than there are ranks, several
    ranks share an index.
    """
    if len(cut.axes) != 1 or cut.tensors is not None or cut.axes[0] not in axes_in(node):
        return
    (axis,) = cut.axes
    cut_axes = set(spans[0])
    if any(axis in axes and cut_axes.intersection(axes) for axes in map(expression.axes_of, expression.components)):
        return
    ranks, count = len(spans), sizes[axis]
    if count % ranks and ranks % count:
        message = f"{expression.text}\n{cut.text}: {count} does not divide over {ranks} ranks"
        raise refuse("UNSUPPORTED", message, hint="Choose another degree of parallelism.")
    sharing = max(1, ranks // count)
    parts = _even(count, ranks // sharing)
    for rank, span in enumerate(spans):
        span[axis] = parts[rank // sharing]


def _of_spans(node: Node, cut: Cuttable, sizes: Mapping[str, int], spans: Sequence[Ranges]) -> tuple[Intervals, ...]:
    """Return the positions of each rank in a dim; components that the `cut` statement does not name stay whole."""
    renamed = _apart(node, cut)
    all_sizes = {**sizes, **_sizes_of_renamed(renamed, sizes)}
    axes = axes_in(renamed)
    return tuple(positions(renamed, all_sizes, {a: span for a, span in each.items() if a in axes}) for each in spans)


def _has_padding(node: Node, axes: Sequence[str] = ()) -> bool:
    """Return whether a dim has padding. Padding that has all of `axes` is not counted, because such padding is cut like
    a component.
    """
    segments = (segment for inner in walk(node) if isinstance(inner, Sum) for segment in inner.segments)
    return any(name == PADDING and not (axes and axes_in(part).issuperset(axes)) for name, part in segments)


def _refuse_padding(expression: Expression, node: Node) -> None:
    if _has_padding(node):
        raise refuse("UNSUPPORTED", f"{expression.text}\nits padding is split over the ranks too")


def _readings(
    expression: Expression, cuts: Sequence[Cuttable], sizes: Mapping[str, int], shape: Shape, shards: Sequence[Shape]
) -> Iterator[tuple[object, tuple[str, Division]]]:
    """Yield `(key, (text of the cut, division))` for each division that results in these shard shapes; equal divisions
    have equal keys.
    """
    # All shards have the shape of the whole tensor, so every rank has the whole tensor.
    if all(shard == shape for shard in shards):
        yield None, ("no axis", Division(shape, None, Replicated()))
        return
    for cut in cuts:
        for dim, node in enumerate(expression.dims):
            if not all(axis in axes_in(node) for axis in cut.axes) or not _alike(shape, shards, dim):
                continue
            _refuse_padding(expression, node)
            # Components that the `cut` statement does not name must stay whole on every rank, so the cut axis is
            # renamed in these components.
            renamed = _apart(node, cut)
            positions = _along(
                renamed, cut.axes, {**sizes, **_sizes_of_renamed(renamed, sizes)}, [shard[dim] for shard in shards]
            )
            if positions is not None:
                yield (dim, positions), (cut.text, Division(shape, dim, ListedPositions(positions)))


def _whole(
    expression: Expression, cuts: Sequence[Cuttable], sizes: Mapping[str, int], shards: Sequence[Shape]
) -> Shape:
    """Return the shape of the whole tensor. A dim that no `cut` statement affects is as long as in every shard."""
    dims = len(expression.dims)
    for shard in shards:
        if len(shard) != dims:
            raise mismatch(expression, f"{dims} dims", shard)
    movable = {axis for cut in cuts for axis in cut.axes}
    shape = []
    for dim, node in enumerate(expression.dims):
        unsized = unknown(node, sizes)
        if not unsized:
            shape.append(size(node, sizes))
        # The size of an axis in the dim is unknown. But if no `cut` statement affects a dim, every shard has the whole
        # dim.
        elif movable.isdisjoint(axes_in(node)) and len({shard[dim] for shard in shards}) == 1:
            shape.append(shards[0][dim])
        else:
            raise unknown_axis(unsized[0], expression.text, shards[0])
    return tuple(shape)


def _alike(shape: Shape, shards: Sequence[Shape], dim: int) -> bool:
    """Return whether the shards are as long as the whole tensor along all dims except `dim`."""
    return all((*shard[:dim], *shard[dim + 1 :]) == (*shape[:dim], *shape[dim + 1 :]) for shard in shards)


def _apart(node: Node, cut: Cuttable) -> Node:
    """Rename the cut axes in the logical tensors that the `cut` statement does not name, so that these tensors stay
    whole on every rank.
    """
    if cut.tensors is None:
        return node
    match node:
        case Sum(segments):
            return Sum(tuple((name, p if name in cut.tensors else _rename_axes(p, cut.axes)) for name, p in segments))
        case Merge(parts):
            return Merge(tuple(_apart(inner, cut) for inner in parts))
        case Axis():
            return node


def _rename_axes(node: Node, axes: Sequence[str]) -> Node:
    match node:
        case Axis(name):
            return Axis(name + _APART) if name in axes else node
        case Merge(parts):
            return Merge(tuple(_rename_axes(inner, axes) for inner in parts))
        case Sum():
            return node  # the parser allows no sum inside a sum


def _sizes_of_renamed(node: Node, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return renamed axis -> size, which is the size of the original axis."""
    return {axis: sizes[axis.removesuffix(_APART)] for axis in axes_in(node) if axis.endswith(_APART)}


def _along(
    node: Node, axes: Sequence[str], sizes: Mapping[str, int], rows: Sequence[int]
) -> tuple[Intervals, ...] | None:
    """Return each rank's positions if an axis is divided among the ranks; None if the division does not result in these
    lengths.

    Args:
        node: the stored dim, as a node of the parsed expression.
        axes: the axis to cut, or several axes, outermost first, which are cut as one flattened axis: each rank has all
            of these axes whole except the last.
        sizes: axis -> its size in the whole model.
        rows: length of the dim in the shard of each rank.
    """
    # Along the outermost axis each rank has consecutive rows, even if they end in the middle of an index.
    if _leads(node, axes):
        if sum(rows) != size(node, sizes):
            return None
        ends = np.cumsum(rows).tolist()
        return tuple(((end - count, end),) if count else () for end, count in zip(ends, rows, strict=True))
    *outer, inner_axis = axes
    # Compute the local axis size that would give each rank its number of rows.
    counts = [root(node, inner_axis, sizes, count) for count in rows]
    shares = [count for count in counts if count is not None]
    if len(shares) < len(rows) or sum(shares) != sizes[inner_axis]:
        return None
    times = prod(sizes[axis] for axis in outer)
    starts = [times * sum(shares[:rank]) for rank in range(len(shares))]
    return tuple(_positions(node, axes, sizes, *share) for share in zip(starts, shares, strict=True))


def _leads(node: Node, axes: Sequence[str]) -> bool:
    """Return whether an axis is the outermost axis of a dim, so that each rank has consecutive rows wherever the cuts
    are.
    """
    outermost = node.parts[0] if isinstance(node, Merge) and node.parts else node
    return len(axes) == 1 and outermost == Axis(axes[0])


def _positions(node: Node, axes: Sequence[str], sizes: Mapping[str, int], start: int, count: int) -> Intervals:
    """Return the positions of the whole dim that one rank has, in the rank's local order.

    The rank's local dim has the same axes as the whole dim, but the last of the cut axes is smaller. Local indices
    along the last axis count from the rank's first index.
    """
    shape = tuple(sizes[axis] for axis in axes)

    def to_global(index: Mapping[str, Indices]) -> Mapping[str, Indices]:
        if not all(axis in index for axis in axes):
            return index
        # Local indices count from zero. Flattened over the cut axes and shifted by the rank's start, local indices
        # become global indices.
        flat = start + np.ravel_multi_index([index[axis] for axis in axes], (*shape[:-1], count))
        return {**index, **dict(zip(axes, np.unravel_index(flat, shape), strict=True))}

    return positions_of(node, {**sizes, axes[-1]: count}, sizes, to_global)
