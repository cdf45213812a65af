"""Dividing: how a stored tensor was cut over the ranks of a mesh, where only the table can say.

A checkpoint without metadata has only the shards' shapes. They do not say along which dim the shards are joined (square
matrices), nor how a dim that holds several tensors was cut: q, k and v each, or all of them as one. The table does: its
`cut` statements name the axes that ranks may share out. Together with the whole shape, which the table and the config
give, the shards' shapes leave one reading or none; where two remain, nobody guesses.
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
"""The dim that ranks share out, and every rank's positions in it, in local order."""
_APART = "'"
"""Suffix that renames an axis in the components that a `cut` statement does not name."""


class Division(msgspec.Struct, frozen=True):
    """How a stored tensor is cut."""

    shape: Shape
    """Of the whole tensor."""
    dim: int | None
    """The dim that is cut; None: every rank holds all of it."""
    rule: ChunkRule
    """What each rank holds of that dim."""


class ListedPositions(msgspec.Struct, frozen=True):
    """A chunk rule that lists every rank's positions, for dims whose components are each cut by themselves."""

    positions: tuple[Intervals, ...]
    """Intervals of each rank, in local order."""

    def __call__(self, intervals: Intervals, _parts: int, rank: int, /) -> Intervals:
        """See `ChunkRule`."""
        return tuple(interval for start, stop in self.positions[rank] for interval in take(intervals, start, stop))


def divide(
    expression: Expression, cuts: Sequence[Cuttable], sizes: Mapping[str, int], shards: Sequence[Shape]
) -> Division:
    """Find how a stored tensor is cut.

    Args:
        expression: what it holds.
        cuts: the axes that the ranks may share out.
        sizes: axis -> size in the whole model.
        shards: the tensor's shape on every rank.

    Returns:
        The one division that the table allows and that gives shards of these shapes.

    Raises:
        Refused: SHAPE_MISMATCH where the table allows none; UNSUPPORTED where padding would be cut.
        UsageError: UNKNOWN_AXIS where the whole shape is not known; AMBIGUOUS where the table allows several.
    """
    usable = [cut for cut in cuts if cut.tensors is None or not cut.tensors.isdisjoint(expression.components)]
    shape = _whole(expression, usable, sizes, shards)
    # Keyed by the positions each rank gets: two statements that cut alike are one division, and not ambiguous.
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
    """Cut a stored tensor evenly over ranks: along the axis of the first statement that applies to it.

    Args:
        expression: what it holds.
        cuts: the axes that the ranks may share out.
        sizes: axis -> size in the whole model.
        ranks: their number.

    Returns:
        the dim that is cut, and every rank's positions in it; None where every rank holds all of it.

    Raises:
        Refused: UNSUPPORTED where the axis does not divide, or padding would be cut.
        UsageError: UNKNOWN_AXIS where a dim to cut has an axis without a size.
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
            known = {**sizes, **_marked(renamed, sizes)}
            last = cut.axes[-1]
            total = size(node, sizes) if _leads(renamed, cut.axes) else sizes[last]
            rest = {} if _leads(renamed, cut.axes) else {last: sizes[last] // ranks}
            rows = size(renamed, {**known, **rest}) // (1 if rest else ranks)
            positions = None if total % ranks else _along(renamed, cut.axes, known, [rows] * ranks)
            if positions is None:
                count = sizes[last] if total == sizes[last] else f"{sizes[last]} ({total} positions)"
                message = f"{expression.text}\n{cut.text}: {count} does not divide over {ranks} ranks"
                raise refuse("UNSUPPORTED", message, hint="Choose another degree of tensor parallelism.")
            return dim, positions
    return None


def rank_shares(
    expression: Expression, family: Family, dialect: str, sizes: Mapping[str, int], *, tp: int, ep: int = 1
) -> Shares | None:
    """Cut a stored tensor as an inference engine's ranks hold it: by the first statement that applies to it.

    A fused dim is cut in each of its components; a padded one as it is, padding and all, unless the padding has the
    axis too and is cut with the others. Ranks beyond the number of an axis share its indices where the family says what
    they share out within one (kv heads, `cut tp = r within g`).

    Args:
        expression: what it holds.
        family: has the `cut` statements.
        dialect: name of the dialect; what it says itself goes before what holds in every one.
        sizes: axis -> size in the whole model.
        tp: number of tensor-parallel ranks.
        ep: number of ranks that share out experts, the first of them having one more where they do not divide.

    Returns:
        None where every rank holds all of it.

    Raises:
        Refused: UNSUPPORTED where an axis does not divide.
        UsageError: UNKNOWN_AXIS where a dim to cut has an axis without a size.
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
                    for beside in applying[number + 1 :]:
                        _step_with(expression, beside, node, sizes, spans)
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
    """Return which indices of which axes each rank has of a dim; None where the dim is padded and cut as it is."""
    *outer, axis = cut.axes
    count, inner = sizes[axis], within.get(axis)
    whole, sharing = count % ranks == 0, ranks // count if count and ranks % count == 0 else 0
    if _padded(node, cut.axes):
        count = size(node, sizes)
        if count % ranks == 0:
            return None
    elif cut.mesh.partition("@")[0] == "ep":
        each, more = divmod(count, ranks)
        ends = [each * (rank + 1) + min(rank + 1, more) for rank in range(ranks)]
        return [{axis: span} for span in zip([0, *ends], ends, strict=False)]
    elif whole and not outer:
        return [{axis: span} for span in _even(count, ranks)]
    elif sharing and inner is not None and not outer and sizes[inner] % sharing == 0:
        parts = _even(sizes[inner], sharing)
        return [{axis: (rank // sharing, rank // sharing + 1), inner: parts[rank % sharing]} for rank in range(ranks)]
    message = f"{expression.text}\n{cut.text}: {count} does not divide over {ranks} ranks"
    raise refuse("UNSUPPORTED", message, hint="Choose another degree of parallelism.")


def _even(count: int, ranks: int) -> list[tuple[int, int]]:
    each = count // ranks
    return [(rank * each, (rank + 1) * each) for rank in range(ranks)]


def _step_with(
    expression: Expression,
    cut: Cuttable,
    node: Node,
    sizes: Mapping[str, int],
    spans: list[dict[str, tuple[int, int]]],
) -> None:
    """Let ranks share out another axis too, which is in other components of the same dim: groups of a state space
    beside its heads. Ranks beyond the number of its indices share these.
    """
    if len(cut.axes) != 1 or cut.tensors is not None or cut.axes[0] not in axes_in(node):
        return
    (axis,) = cut.axes
    taken = set(spans[0])
    if any(axis in axes and taken.intersection(axes) for axes in map(expression.axes_of, expression.components)):
        return
    ranks, count = len(spans), sizes[axis]
    if count % ranks and ranks % count:
        message = f"{expression.text}\n{cut.text}: {count} does not divide over {ranks} ranks"
        raise refuse("UNSUPPORTED", message, hint="Choose another degree of parallelism.")
    sharing = max(1, ranks // count)
    parts = _even(count, ranks // sharing)
    for rank, each in enumerate(spans):
        each[axis] = parts[rank // sharing]


def _of_spans(node: Node, cut: Cuttable, sizes: Mapping[str, int], spans: Sequence[Ranges]) -> tuple[Intervals, ...]:
    """Return every rank's positions in a dim, in the components that a statement is of."""
    renamed = _apart(node, cut)
    known = {**sizes, **_marked(renamed, sizes)}
    there = axes_in(renamed)
    return tuple(positions(renamed, known, {a: span for a, span in each.items() if a in there}) for each in spans)


def _padded(node: Node, axes: Sequence[str] = ()) -> bool:
    """Tell whether a dim has padding, other than padding with all of these axes, which is cut like a component."""
    segments = (segment for inner in walk(node) if isinstance(inner, Sum) for segment in inner.segments)
    return any(name == PADDING and not (axes and axes_in(part).issuperset(axes)) for name, part in segments)


def _refuse_padding(expression: Expression, node: Node) -> None:
    if _padded(node):
        raise refuse("UNSUPPORTED", f"{expression.text}\nits padding is split over the ranks too")


def _readings(
    expression: Expression, cuts: Sequence[Cuttable], sizes: Mapping[str, int], shape: Shape, shards: Sequence[Shape]
) -> Iterator[tuple[object, tuple[str, Division]]]:
    """Yield the divisions that give these shards, each with a key that identifies it and the text of its cut."""
    # Shards as large as the whole cannot be parts of it, so every rank holds all.
    if all(shard == shape for shard in shards):
        yield None, ("no axis", Division(shape, None, Replicated()))
        return
    for cut in cuts:
        for dim, node in enumerate(expression.dims):
            if not all(axis in axes_in(node) for axis in cut.axes) or not _alike(shape, shards, dim):
                continue
            _refuse_padding(expression, node)
            # Components that the statement does not name must stay whole on every rank; with an axis of another name
            # they do.
            renamed = _apart(node, cut)
            positions = _along(
                renamed, cut.axes, {**sizes, **_marked(renamed, sizes)}, [shard[dim] for shard in shards]
            )
            if positions is not None:
                yield (dim, positions), (cut.text, Division(shape, dim, ListedPositions(positions)))


def _whole(
    expression: Expression, cuts: Sequence[Cuttable], sizes: Mapping[str, int], shards: Sequence[Shape]
) -> Shape:
    """Return the shape of the whole tensor; a dim that is never cut has the size that every rank has."""
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
        # The size is unknown, but no cut touches this dim: every rank shows it whole.
        elif movable.isdisjoint(axes_in(node)) and len({shard[dim] for shard in shards}) == 1:
            shape.append(shards[0][dim])
        else:
            raise unknown_axis(unsized[0], expression.text, shards[0])
    return tuple(shape)


def _alike(shape: Shape, shards: Sequence[Shape], dim: int) -> bool:
    """Tell whether the shards have the whole size along every other dim."""
    return all((*shard[:dim], *shard[dim + 1 :]) == (*shape[:dim], *shape[dim + 1 :]) for shard in shards)


def _apart(node: Node, cut: Cuttable) -> Node:
    """Return a dim in which the components that a cut does not name have axes of their own, so that it leaves them
    whole.
    """
    if cut.tensors is None:
        return node
    match node:
        case Sum(segments):
            return Sum(tuple((name, p if name in cut.tensors else _renamed(p, cut.axes)) for name, p in segments))
        case Merge(parts):
            return Merge(tuple(_apart(inner, cut) for inner in parts))
        case Axis():
            return node


def _renamed(node: Node, axes: Sequence[str]) -> Node:
    match node:
        case Axis(name):
            return Axis(name + _APART) if name in axes else node
        case Merge(parts):
            return Merge(tuple(_renamed(inner, axes) for inner in parts))
        case Sum():
            return node  # there is no sum inside a sum


def _marked(node: Node, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of the renamed axes: those of the axes they stand for."""
    return {axis: sizes[axis.removesuffix(_APART)] for axis in axes_in(node) if axis.endswith(_APART)}


def _along(
    node: Node, axes: Sequence[str], sizes: Mapping[str, int], rows: Sequence[int]
) -> tuple[Intervals, ...] | None:
    """Return each rank's positions in a dim if the ranks share out an axis; None if that does not give these rows.

    Args:
        node: the dim.
        axes: the axis; or several that are cut as one flattened axis, outermost first, of which each rank has all but
            the last at full size.
        sizes: axis -> size.
        rows: length of the dim on every rank.
    """
    # Cut along its outermost axis, each rank has one run of rows, even where the rows do not divide into whole indices.
    if _leads(node, axes):
        if sum(rows) != size(node, sizes):
            return None
        ends = np.cumsum(rows).tolist()
        return tuple(((end - count, end),) if count else () for end, count in zip(ends, rows, strict=True))
    *outer, inner_axis = axes
    # Solve for the size of the axis that would give this many rows on each rank.
    counts = [root(node, inner_axis, sizes, count) for count in rows]
    shares = [count for count in counts if count is not None]
    if len(shares) < len(rows) or sum(shares) != sizes[inner_axis]:
        return None
    times = prod(sizes[axis] for axis in outer)
    starts = [times * sum(shares[:rank]) for rank in range(len(shares))]
    return tuple(_positions(node, axes, sizes, *share) for share in zip(starts, shares, strict=True))


def _leads(node: Node, axes: Sequence[str]) -> bool:
    """Tell whether an axis is the outermost of a dim: then every rank holds one run of rows, however fine the cut."""
    outermost = node.parts[0] if isinstance(node, Merge) and node.parts else node
    return len(axes) == 1 and outermost == Axis(axes[0])


def _positions(node: Node, axes: Sequence[str], sizes: Mapping[str, int], start: int, count: int) -> Intervals:
    """Return the positions of a dim that a rank holds, in the rank's order.

    The rank's dim is the same expression with a smaller last axis; its shared axes count from the rank's first.
    """
    shape = tuple(sizes[axis] for axis in axes)

    def moved(index: Mapping[str, Indices]) -> Mapping[str, Indices]:
        if not all(axis in index for axis in axes):
            return index
        # Indices of the rank count from zero within its share: flattened over the cut axes and shifted, they become
        # those of the whole.
        flat = start + np.ravel_multi_index([index[axis] for axis in axes], (*shape[:-1], count))
        return {**index, **dict(zip(axes, np.unravel_index(flat, shape), strict=True))}

    return positions_of(node, {**sizes, axes[-1]: count}, sizes, moved)
