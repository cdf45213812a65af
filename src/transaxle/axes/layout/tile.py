"""Moves the scales of quantized blocks together with their codes, if a change of layout splits no block.

A *tile* is a region of a stored tensor whose elements share one scale, such as 128 x 128 elements, 1 x 32 elements, or
the whole tensor. Tiles cover stored dims, not axes, so the sizes decide whether a change of layout keeps tiles whole.
Every target tile must lie within one source tile, in any order of elements, and gets the scale of that source tile. If
a target tile contained codes of several source tiles, these codes would need different scales, so the conversion is
refused.

The result describes how the scales are moved: as box copies, which are executed like the box copies of the codes.

The core algorithm computes the source tile of each target tile from sizes alone, and describes this mapping as few
boxes of tiles. Positions grow with each index, so the first and the last position of a box determine which tiles have
elements in the box. The algorithm compares intervals, dim by dim, and visits no element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import combinations, product
from math import prod

import msgspec
import numpy as np
import numpy.typing as npt

from transaxle.axes.geometry import Interval, cut
from transaxle.axes.layout.relayout import Check, Origin, Shape, Target, TargetPart
from transaxle.axes.notation.expression import Layout, Share
from transaxle.errors import TransaxleError, gathered, refuse

_Array = npt.NDArray[np.int64]


class Coordinate(msgspec.Struct, frozen=True):
    """A number that locates an element in the source tensors: a position along a stored dim, or an index in the
    tensor's name.

    The coordinate's value is a constant plus, for each axis, the index along the axis times a weight. The value divided
    by `tile` is the index of a tile.
    """

    weights: tuple[tuple[str, int], ...]
    """`(axis, weight)` for each axis on which the coordinate depends."""
    constant: int
    """Value of the coordinate if all indices are 0."""
    tile: int
    """Number of positions per tile; 1 if the coordinate is an index in the name."""

    def bounds(self, box: Mapping[str, Interval]) -> Interval:
        """Return the indices of the first and the last tile that have elements in a box."""
        spans = [(box[axis], weight) for axis, weight in self.weights]
        low = self.constant + sum(start * weight for (start, _), weight in spans)
        high = self.constant + sum((stop - 1) * weight for (_, stop), weight in spans)
        return low // self.tile, high // self.tile


TileLoop = tuple[int, tuple[int, ...]]
"""A loop over tiles, `(count, step)`: each step moves along one target dim, and changes at most one source
coordinate.
"""


class TileBox(msgspec.Struct, frozen=True):
    """A set of target tiles together with the source tile of each, described by nested loops over target and source
    tiles.
    """

    start: tuple[int, ...]
    """Indices of the first target tile along each target dim, followed by indices of its source tile along each
    coordinate.
    """
    loops: tuple[TileLoop, ...] = ()
    """Loops that step through the target tiles and their source tiles, outermost loop first."""


class Misaligned(Exception):
    """Raised if a target tile has elements of several source tiles; the function `scales` raises the error for users
    instead.
    """

    def __init__(self, tile: tuple[int, ...]) -> None:
        super().__init__(tile)
        self.tile = tile


class _Dim(msgspec.Struct, frozen=True):
    """The tiles along one target dim that contain elements of a certain logical tensor.

    `low[i]` and `high[i]` are the least and the greatest value that an element in tile `touched[i]` adds to each
    coordinate.
    """

    touched: _Array
    low: _Array
    high: _Array
    moves: tuple[bool, ...]
    """For each source coordinate, whether it depends on this target dim."""

    def at(self, rows: _Array) -> _Dim:
        return _Dim(self.touched[rows], self.low[rows], self.high[rows], self.moves)


@lru_cache(maxsize=4096)
def _dim(share: Share, size: int, tile: int, weights: tuple[tuple[int, ...], ...]) -> _Dim:
    """Compute the tiles along one target dim; `weights` has, for each coordinate, one weight per axis of the share."""
    rows = []
    for number in range(-(-size // tile)):
        boxes = [spans for spans, _ in cut(share, number * tile, min((number + 1) * tile, size))]
        if boxes:
            low = [min(sum(b[0] * w for b, w in zip(box, row, strict=True)) for box in boxes) for row in weights]
            high = [max(sum((b[1] - 1) * w for b, w in zip(box, row, strict=True)) for box in boxes) for row in weights]
            rows.append((number, *low, *high))
    table = np.array(rows, np.int64).reshape(len(rows), 1 + 2 * len(weights))
    middle = 1 + len(weights)
    moves = tuple(any(w and count > 1 for w, (_, count, _) in zip(row, share.axes, strict=True)) for row in weights)
    return _Dim(table[:, 0], table[:, 1:middle], table[:, middle:], moves)


class _ComponentTiles(msgspec.Struct):
    """The target tiles that have elements of one logical tensor, dim by dim, and these elements' coordinates in the
    sources.
    """

    dims: list[_Dim]
    coordinates: tuple[Coordinate, ...]

    def over(self, number: int) -> list[int]:
        """Return the target dims on which a source coordinate depends."""
        return [d for d, dim in enumerate(self.dims) if dim.moves[number]]

    def tiles(self, number: int, over: Sequence[int]) -> tuple[_Array, _Array]:
        """Return, for every target tile along the dims `over`, the first and the last source tile along a
        coordinate.
        """
        low = high = np.full((1,) * len(over), self.coordinates[number].constant, np.int64)
        for place, d in enumerate(over):
            shape = tuple(-1 if p == place else 1 for p in range(len(over)))
            low = low + self.dims[d].low[:, number].reshape(shape)
            high = high + self.dims[d].high[:, number].reshape(shape)
        tile = self.coordinates[number].tile
        return low // tile, high // tile

    def first_difference(self, over: Sequence[int], first: _Array, second: _Array) -> list[tuple[int, ...]]:
        """Return a list with the first target tile for which two arrays differ, or an empty list if the arrays are
        equal.
        """
        mismatches = (dict(zip(over, rows, strict=True)) for rows in np.argwhere(first != second)[:1].tolist())
        return [tuple(int(dim.touched[at.get(d, 0)]) for d, dim in enumerate(self.dims)) for at in mismatches]


@lru_cache(maxsize=1024)
def retile(
    shape: tuple[int, ...],
    tile: tuple[int, ...],
    views: tuple[tuple[Share, ...], ...],
    sources: tuple[tuple[Coordinate, ...], ...],
    groups: tuple[int, ...],
) -> tuple[tuple[TileBox, ...], ...]:
    """Compute the source tile of each target tile.

    Args:
        shape: shape of the target tensor.
        tile: size of the target's tiles along each dim.
        views: for each logical tensor in the target, the positions that it has in each stored dim.
        sources: for each logical tensor, the coordinates that locate its elements in the source tensors.
        groups: for each logical tensor, a number that is equal for logical tensors read from the same stored tensors.

    Returns:
        For each logical tensor, a list of boxes. Each target tile that has elements is in exactly one box, with its
        source tile.

    Raises:
        Misaligned: if a target tile has elements of several source tiles.
    """
    parts = []
    for view, coordinates in zip(views, sources, strict=True):
        weighed = [dict(coordinate.weights) for coordinate in coordinates]
        dims = [
            _dim(share, size, step, tuple(tuple(w.get(axis, 0) for axis, _, _ in share.axes) for w in weighed))
            for share, size, step in zip(view, shape, tile, strict=True)
        ]
        parts.append(_ComponentTiles(dims, coordinates))
    misaligned = []
    for component in parts:
        for number in range(len(component.coordinates)):
            over = component.over(number)
            misaligned += component.first_difference(over, *component.tiles(number, over))
    for first, second in combinations(range(len(parts)), 2):
        misaligned += _shares_of_tiles(parts[first], parts[second], groups[first] == groups[second])
    if misaligned:
        raise Misaligned(min(misaligned))
    return tuple(tuple(_boxes(component)) for component in parts)


def _shares_of_tiles(first: _ComponentTiles, second: _ComponentTiles, alike: bool) -> list[tuple[int, ...]]:
    """Check that two logical tensors have the same source tile in each target tile that contains elements of both, and
    remove these tiles from `second`.

    Returns:
        A list with the first target tile for which the source tiles differ; an empty list if there is none.
    """
    pairs = list(zip(first.dims, second.dims, strict=True))
    shared = [np.intersect1d(a.touched, b.touched, True, True) for a, b in pairs]
    if not all(len(tiles) for tiles, _, _ in shared):
        return []
    first_shared = _ComponentTiles(
        [a.at(rows) for (a, _), (_, rows, _) in zip(pairs, shared, strict=True)], first.coordinates
    )
    second_shared = _ComponentTiles(
        [b.at(rows) for (_, b), (_, _, rows) in zip(pairs, shared, strict=True)], second.coordinates
    )
    if not alike:
        return first_shared.first_difference((), np.array(0), np.array(1))
    misaligned = []
    for number in range(len(first.coordinates)):
        over = sorted({*first_shared.over(number), *second_shared.over(number)})
        misaligned += first_shared.first_difference(
            over, first_shared.tiles(number, over)[0], second_shared.tiles(number, over)[0]
        )
    partial_dims = [d for d, (tiles, _, _) in enumerate(shared) if len(tiles) < len(second.dims[d].touched)]
    # Logical tensors lie one after the other along one dim. Along the remaining dims, logical tensors have the same
    # tiles.
    if len(partial_dims) <= 1:
        d = partial_dims[0] if partial_dims else 0
        second.dims[d] = second.dims[d].at(np.setdiff1d(np.arange(len(second.dims[d].touched)), shared[d][2]))
    return misaligned


def _boxes(component: _ComponentTiles) -> Iterator[TileBox]:
    """Describe the mapping from one logical tensor's target tiles to source tiles as boxes.

    Target dims that affect the same coordinate form a cluster; the result is the product of the clusters' boxes.
    """
    dims, numbers = component.dims, range(len(component.coordinates))
    clusters: list[set[int]] = [{d} for d in range(len(dims))]
    for number in numbers:
        met = [cluster for cluster in clusters if cluster.intersection(component.over(number))]
        clusters = [cluster for cluster in clusters if cluster not in met] + ([set().union(*met)] if met else [])
    width = len(dims) + len(numbers)
    boxes_per_cluster: list[list[TileBox]] = []
    for over in [*map(sorted, clusters), []]:
        columns = np.zeros((*(len(dims[d].touched) for d in over), width), np.int64)
        for place, d in enumerate(over):
            columns[..., d] = dims[d].touched.reshape([-1 if p == place else 1 for p in range(len(over))])
        for number in numbers:
            moving = component.over(number)
            if set(moving) <= set(over) and bool(moving) == bool(over):
                columns[..., len(dims) + number] = component.tiles(number, over)[0]
        boxes_per_cluster.append(list(_nest(columns.reshape(-1, width), len(dims))))
    for boxes in product(*boxes_per_cluster):
        start = tuple(map(sum, zip(*(box.start for box in boxes), strict=True)))
        yield TileBox(start, tuple(loop for box in boxes for loop in box.loops))


def _nest(rows: _Array, dims: int) -> Iterator[TileBox]:
    """Describe a sequence of rows (target tile, source tile) as nested loops.

    Post-condition: going through the boxes in order yields the rows in their original order.
    """
    steps = np.diff(rows, axis=0)
    # A break is where the step from row to row changes; all rows up to the next break form one loop.
    breaks = np.flatnonzero((steps[1:] != steps[:-1]).any(1)) + 1
    begin = 0
    while begin < len(rows):
        remaining = len(rows) - begin
        start = tuple(rows[begin].tolist())
        step = tuple(steps[begin].tolist()) if remaining > 1 else ()
        if not _simple(step, dims):
            yield TileBox(start)
            begin += 1
            continue
        after = int(np.searchsorted(breaks, begin, "right"))
        run = (int(breaks[after]) if after < len(breaks) else len(steps)) - begin + 1
        blocks = rows[begin:].reshape(-1, run, rows.shape[1]) if remaining % run == 0 else rows[:0]
        if len(blocks) > 1 and (np.diff(blocks, axis=1) == steps[begin]).all():
            for box in _nest(blocks[:, 0], dims):
                inside = TileBox(box.start, (*box.loops, (run, step)))
                yield from [inside] if _are_nested(inside.loops) else _unroll(box, (run, step))
            return
        yield TileBox(start, ((run, step),))
        begin += run


def _simple(step: Sequence[int], dims: int) -> bool:
    """Return whether a step goes forward along one target dim and at most one coordinate, as a `TileLoop` requires."""
    return sum(map(bool, step[:dims])) == 1 and sum(map(bool, step[dims:])) <= 1 and min(step) >= 0


def _are_nested(loops: Sequence[TileLoop]) -> bool:
    """Return whether the loops are nested: each step is larger than the extent of all loops inside it."""
    for number in range(len(loops[0][1])):
        reach = 0
        for step, count in sorted((step[number], count) for count, step in loops if step[number]):
            if step <= reach:
                return False
            reach += step * (count - 1)
    return True


def _unroll(box: TileBox, inner: TileLoop) -> Iterator[TileBox]:
    """Replace a box by several boxes with a single loop each: the innermost loop of the original box."""
    for place in product(*(range(count) for count, _ in box.loops)):
        start = np.array(box.start, np.int64)
        for at, (_, step) in zip(place, box.loops, strict=True):
            start = start + at * np.array(step, np.int64)
        yield TileBox(tuple(start.tolist()), (inner,))


Tile = tuple[int, ...]
"""Size of a tile: number of elements along each stored dim."""

_SCALE = "scale"
_LISTED = 4
"""Maximum number of source tensors that the error for a split tile lists."""
DRAWN = 1024
"""Maximum number of positions along a tile that are examined one by one in order to describe the tile in the error."""


def grid(shape: Shape, tile: Tile) -> Shape:
    """Return the number of tiles along each dim, which is the shape of the scales; the last tile along a dim may be
    partial.
    """
    return tuple(-(-size // step) for size, step in zip(shape, tile, strict=True))


class ScaleRelayout(msgspec.Struct, frozen=True):
    """How the scales of a target tensor are filled from the scales of its source tensors."""

    target: Target
    """The target's scales, as a tensor to be filled from the sources' scales; tiles that have only padding have no
    source.
    """
    checks: tuple[Check, ...]
    """Checks that source scales are bitwise equal, for scales that become a single scale in the target."""


class SplitTile(msgspec.Struct, frozen=True):
    """A target tile that has elements of several source tiles, described along the dim with the most source tiles."""

    rule: str
    """The mapping rule of the target tensor, as the user wrote it."""
    number: Tile
    """Index of the target tile along each dim of the target."""
    dim: int
    """The dim along which the tile is described; along all other dims only the tile's first position is examined."""
    runs: tuple[tuple[int, int, str, Tile], ...]
    """Runs of positions, each as `(first position, end, name of the source tensor, tile in the source)`; the name is
    empty for padding.
    """


def scales(
    target: Target, tile: Tile, tiles: Mapping[str, Tile], *, scale_name: Callable[[str], str], dtype: str
) -> ScaleRelayout:
    """Compute how the scales of a target tensor's codes are filled from the sources' scales.

    Args:
        target: the target tensor that contains the codes.
        tile: size of the target's tiles.
        tiles: stored name of codes -> size of their tiles, for every source of the target.
        scale_name: function from the name of codes to the name of their scales.
        dtype: dtype of the scales, as a safetensors code.

    Post-condition: executing the result writes to each target tile the scale of the source tile that contains its
    elements.

    Raises:
        Refused: with the code BLOCK_MISALIGNED if a target tile has elements of several source tiles; the message lists
            them.
    """
    shape = grid(target.layout.shape, tile)
    grids = {o.name: grid(o.layout.shape, tiles[o.name]) for part in target.parts for o in part.origins}
    # A per-tensor scale is valid wherever its elements are moved, so the scales only have to be equal.
    if prod(shape) == 1 and all(prod(stored) == 1 for stored in grids.values()):
        return _one_scale(target, shape, grids, scale_name, dtype)
    views = tuple(target.layout.shares[part.component] for part in target.parts)
    sources = tuple(_coordinates(part, target.index, tiles) for part in target.parts)
    stored = [[(origin.name, dict(origin.index)) for origin in part.origins] for part in target.parts]
    # Logical tensors that are read from the same stored tensors get the same number, because only such logical tensors
    # may share a source tile.
    groups = tuple(map(stored.index, stored))
    try:
        boxes_per_part = retile(target.layout.shape, tile, views, sources, groups)
    except Misaligned as fault:
        raise _refusal_of_misaligned(target, tile, fault.tile, sources) from None
    shares: dict[str, tuple[Share, ...]] = {}
    parts = []
    for part, boxes in zip(target.parts, boxes_per_part, strict=True):
        by_index = _by_index(part, target.index)
        for number, box in enumerate(boxes):
            component = f"{part.component}#{number}"
            # The columns of a box are: the target's dims, then the source's dims, then the axes in the sources' names.
            dims = [_share(box, column) for column in range(len(box.start))]
            # The columns after the source's dims are indices in the sources' names.
            coordinate_end = len(shape) + len(grids[part.origins[0].name])
            shares[component] = tuple(dims[: len(shape)])
            layout = Layout(grids[part.origins[0].name], {component: tuple(dims[len(shape) : coordinate_end])})
            origins = [
                Origin(scale_name(by_index[key]), component, layout, index)
                for key, index in _indices(dims[coordinate_end:])
                if key in by_index
            ]
            parts.append(TargetPart(component, tuple(origins)))
    return ScaleRelayout(
        Target(scale_name(target.name), dtype, Layout(shape, shares), {}, tuple(parts), target.rule), ()
    )


def _one_scale(
    target: Target, shape: Shape, grids: Mapping[str, Shape], scale_name: Callable[[str], str], dtype: str
) -> ScaleRelayout:
    """Compute the target for per-tensor scales; the result contains checks that the scales of all sources are equal."""
    candidates = []
    for name, stored in grids.items():
        target_layout, source_layout = (Layout(s, {_SCALE: tuple(Share(0, ()) for _ in s)}) for s in (shape, stored))
        part = TargetPart(_SCALE, (Origin(scale_name(name), _SCALE, source_layout, {}),))
        candidates.append(Target(scale_name(target.name), dtype, target_layout, {}, (part,), target.rule))
    why = f"{target.rule}\none scale would have to stand for all of them"
    return ScaleRelayout(candidates[0], tuple(Check(candidates[0], candidate, why) for candidate in candidates[1:]))


def _coordinates(part: TargetPart, index: Mapping[str, int], tiles: Mapping[str, Tile]) -> tuple[Coordinate, ...]:
    """Return the coordinates that locate an element in the sources: one per stored dim, and one per axis in the
    sources' names.

    An axis that also numbers the target's name has a fixed index, and needs no coordinate.
    """
    model = part.origins[0]
    tile = tiles[model.name]
    for origin in part.origins[1:]:
        if tiles[origin.name] != tile or (origin.layout is not model.layout and origin.layout != model.layout):
            message = f"{model.name} and {origin.name} differ in their tiles or their layout"
            raise refuse("UNSUPPORTED", message, tensor=model.name)
    coordinates = []
    for share, step in zip(model.layout.shares[model.component], tile, strict=True):
        fixed = sum(index[axis] * stride for axis, _, stride in share.axes if axis in index)
        weights = tuple((axis, stride) for axis, _, stride in share.axes if axis not in index)
        coordinates.append(Coordinate(weights, share.offset + fixed, step))
    return (*coordinates, *(Coordinate(((axis, 1),), 0, 1) for axis in model.index if axis not in index))


def _by_index(part: TargetPart, index: Mapping[str, int]) -> dict[tuple[int, ...], str]:
    """Return index -> source name, for the axes that are numbered in the sources' names but not in the target's
    name.
    """
    return {tuple(i for axis, i in origin.index.items() if axis not in index): origin.name for origin in part.origins}


def _share(box: TileBox, column: int) -> Share:
    """Return the loops of a box that step along one dim, as a `Share` of that dim with the largest step first."""
    axes = [(f"#{place}", count, step[column]) for place, (count, step) in enumerate(box.loops) if step[column]]
    return Share(box.start[column], tuple(sorted(axes, key=lambda axis: -axis[2])))


def _indices(names: Sequence[Share]) -> Iterator[tuple[tuple[int, ...], dict[str, int]]]:
    """Yield, for each source tensor that the loops reach, the index in its name and the values of the loop
    variables.
    """
    loops = sorted((axis, count) for share in names for axis, count, _ in share.axes)
    for steps in product(*(range(count) for _, count in loops)):
        index = {axis: at for (axis, _), at in zip(loops, steps, strict=True)}
        yield tuple(share.offset + sum(index[axis] * step for axis, _, step in share.axes) for share in names), index


def _refusal_of_misaligned(
    target: Target, tile: Tile, number: tuple[int, ...], sources: Sequence[tuple[Coordinate, ...]]
) -> TransaxleError:
    """Build the error for a target tile with elements of several source tiles, which the error lists with the positions
    of these elements.
    """
    limits = zip(number, tile, target.layout.shape, strict=True)
    spans = [(at * step, min((at + 1) * step, size)) for at, step, size in limits]
    sources_drawn: dict[str, str] = {}
    for part, coordinates in zip(target.parts, sources, strict=True):
        by_index = _by_index(part, target.index)
        dims = len(part.origins[0].layout.shape)
        shares = target.layout.shares[part.component]
        for chosen in product(*(cut(share, *span) for share, span in zip(shares, spans, strict=True))):
            axes = [axis for share in shares for axis, _, _ in share.axes]
            box = dict(zip(axes, (span for spans_in_dim, _ in chosen for span in spans_in_dim), strict=True))
            bounds = [coordinate.bounds(box) for coordinate in coordinates]
            tiles = ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in bounds[:dims])
            # The message names a position only if it lies inside a source tile, because only such a position splits the
            # source tile.
            inside = [(begin, step) for (_, begin), step in zip(chosen, tile, strict=True) if begin % step]
            begins = " and ".join(f"{at} = {at // step} x {step} + {at % step}" for at, step in inside)
            for key in product(*map(dict.fromkeys, bounds[dims:])):
                sources_drawn.setdefault(
                    f"{by_index.get(key, '?')}, tile ({tiles})", f", from position {begins} on" if begins else ""
                )
    lines = [f"  {source}{begins}" for source, begins in sources_drawn.items()]
    omitted = [f"  … and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    region = " x ".join(f"[{start}, {stop})" for start, stop in spans)
    head = f"its tile {number} of {' x '.join(map(str, tile))}, positions {region}, has one scale, but comes from"
    error = refuse(
        "BLOCK_MISALIGNED",
        "\n".join([target.rule, head, *lines[:_LISTED], *omitted]),
        tensor=target.name,
        hint="Choose a dialect that keeps these tiles whole, or decode the tensor:  --decode bf16.",
    )
    detail = partial(_split, target, number, spans, sources)
    return gathered(replace(refusal, detail=detail) for refusal in error.refusals)


def _split(
    target: Target,
    number: Tile,
    spans: Sequence[tuple[int, int]],
    sources: Sequence[tuple[Coordinate, ...]],
) -> SplitTile | None:
    """Describe a tile position by position; the result is None if the tile is too long for such a description."""
    if any(stop - start > DRAWN for start, stop in spans):
        return None
    by_dim = [_runs(target, dim, spans, sources) for dim in range(len(spans))]
    dim = max(range(len(by_dim)), key=lambda dim_number: len({run[2:] for run in by_dim[dim_number]}))
    return SplitTile(target.rule, number, dim, tuple(by_dim[dim]))


def _runs(
    target: Target, dim: int, spans: Sequence[tuple[int, int]], sources: Sequence[tuple[Coordinate, ...]]
) -> list[tuple[int, int, str, Tile]]:
    runs: list[tuple[int, int, str, Tile]] = []
    for at in range(*spans[dim]):
        place = [at if other == dim else start for other, (start, _) in enumerate(spans)]
        source = _source_of(target, place, sources)
        if runs and runs[-1][2:] == source:
            runs[-1] = runs[-1][0], at + 1, *source
        else:
            runs.append((at, at + 1, *source))
    return runs


def _source_of(target: Target, place: Sequence[int], sources: Sequence[tuple[Coordinate, ...]]) -> tuple[str, Tile]:
    """Return the source tensor, and the tile in it, of one element of the target; the name is empty if the element is
    padding.
    """
    for part, coordinates in zip(target.parts, sources, strict=True):
        shares = target.layout.shares[part.component]
        boxes = [cut(share, at, at + 1) for share, at in zip(shares, place, strict=True)]
        if not all(boxes):
            continue
        axes = [axis for share in shares for axis, _, _ in share.axes]
        box = dict(zip(axes, (span for ((spans, _), *_) in boxes for span in spans), strict=True))
        coordinate_tiles = tuple(coordinate.bounds(box)[0] for coordinate in coordinates)
        dims = len(part.origins[0].layout.shape)
        return _by_index(part, target.index).get(coordinate_tiles[dims:], "?"), coordinate_tiles[:dims]
    return "", ()
