"""Tiles: the scales of blocks follow their codes wherever a relayout keeps every tile whole.

A tile is a region of a stored tensor whose elements share one scale: 128 x 128, 1 x 32, or the whole tensor. Tiles
belong to stored dims, not to axes, so whether a relayout keeps them whole is a question of numbers. Every tile of the
target must be part of one tile of the source, in any order of elements, and gets the scale of that tile. Otherwise the
codes would need other scales than those they were made with, and the relayout is refused.

The result is again a relayout, of the grids of scales: box copies for the same executor.

The core computes, from numbers alone, the source tile of each target tile, as few boxes. Within a tile, positions grow
with each index, so the first and the last position of a box show which tiles it touches: every question is about
intervals, dim by dim, and no element is visited.
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
    """A number that locates an element in the sources: its position in a stored dim, or an index in the name.

    The coordinate's value is a constant plus, for each axis, index times weight. Divided by `tile`, it gives the number
    of a tile.
    """

    weights: tuple[tuple[str, int], ...]
    """`(axis, weight)` for each axis that the coordinate depends on."""
    constant: int
    """Value where all indices are 0."""
    tile: int
    """Positions per tile; 1 for an index in the name."""

    def bounds(self, box: Mapping[str, Interval]) -> Interval:
        """Return the numbers of the first and the last tile that a box touches."""
        spans = [(box[axis], weight) for axis, weight in self.weights]
        low = self.constant + sum(start * weight for (start, _), weight in spans)
        high = self.constant + sum((stop - 1) * weight for (_, stop), weight in spans)
        return low // self.tile, high // self.tile


TileLoop = tuple[int, tuple[int, ...]]
"""`(count, step)`: each step changes the position along one target dim and along at most one coordinate."""


class TileBox(msgspec.Struct, frozen=True):
    """Target tiles and their source tiles, as nested loops over both."""

    start: tuple[int, ...]
    """First tile: its number along each target dim, then along each coordinate."""
    loops: tuple[TileLoop, ...] = ()
    """Loops over the tiles, outermost first."""


class Misaligned(Exception):
    """Raised where one target tile has elements of several source tiles; `scales` turns it into a refusal."""

    def __init__(self, tile: tuple[int, ...]) -> None:
        super().__init__(tile)
        self.tile = tile


class _Dim(msgspec.Struct, frozen=True):
    """The tiles of one target dim that contain elements of a component.

    `low[i]` and `high[i]` bound the contribution of the elements in tile `touched[i]` to each coordinate.
    """

    touched: _Array
    low: _Array
    high: _Array
    moves: tuple[bool, ...]
    """Per coordinate, whether it depends on this dim."""

    def at(self, rows: _Array) -> _Dim:
        return _Dim(self.touched[rows], self.low[rows], self.high[rows], self.moves)


@lru_cache(maxsize=4096)
def _dim(share: Share, size: int, tile: int, weights: tuple[tuple[int, ...], ...]) -> _Dim:
    """Compute the tiles of one target dim; `weights` has, per coordinate, one number for each axis of the share."""
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
    """The target tiles that one component touches in each dim, and the coordinates of its elements in the sources."""

    dims: list[_Dim]
    coordinates: tuple[Coordinate, ...]

    def over(self, number: int) -> list[int]:
        """Return the target dims that a coordinate depends on."""
        return [d for d, dim in enumerate(self.dims) if dim.moves[number]]

    def tiles(self, number: int, over: Sequence[int]) -> tuple[_Array, _Array]:
        """Return the first and the last source tile along a coordinate, for every target tile over some dims."""
        low = high = np.full((1,) * len(over), self.coordinates[number].constant, np.int64)
        for place, d in enumerate(over):
            shape = tuple(-1 if p == place else 1 for p in range(len(over)))
            low = low + self.dims[d].low[:, number].reshape(shape)
            high = high + self.dims[d].high[:, number].reshape(shape)
        tile = self.coordinates[number].tile
        return low // tile, high // tile

    def first_difference(self, over: Sequence[int], first: _Array, second: _Array) -> list[tuple[int, ...]]:
        """Return the first target tile at which two arrays over some dims differ, in a list; empty where they agree."""
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
        shape: shape of the target.
        tile: tile of the target.
        views: per component of the target, its share of each dim.
        sources: per component, the coordinates that locate its elements in the sources.
        groups: per component, a number that is equal for components from the same stored tensors.

    Returns:
        Boxes per component. Each target tile with an element is in one of them, with its only source tile.

    Raises:
        Misaligned: a target tile has several source tiles.
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
    """Check that two components have the same source tile in each target tile that they share; remove the shared tiles
    from the second.

    Returns:
        the first target tile where they disagree, in a list; empty where they agree.
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
    if len(partial_dims) <= 1:  # a sum is along one dim; along the others its components touch the same tiles
        d = partial_dims[0] if partial_dims else 0
        second.dims[d] = second.dims[d].at(np.setdiff1d(np.arange(len(second.dims[d].touched)), shared[d][2]))
    return misaligned


def _boxes(component: _ComponentTiles) -> Iterator[TileBox]:
    """Describe the map from one component's target tiles to source tiles as boxes.

    Dims that share a coordinate form a cluster; the boxes are the product of the boxes of the clusters.
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
    """Turn a sequence of rows (target tile, source tile) into nested loops.

    Post-condition: the boxes yield the rows in order, one after the other.
    """
    steps = np.diff(rows, axis=0)
    # Rows between two breaks have a constant step, so they are one loop.
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
    """Tell whether a step goes forward in one target dim and at most one coordinate, as a `TileLoop` must."""
    return sum(map(bool, step[:dims])) == 1 and sum(map(bool, step[dims:])) <= 1 and min(step) >= 0


def _are_nested(loops: Sequence[TileLoop]) -> bool:
    """Tell whether the loops over each number are nested: each step goes beyond everything inside it."""
    for number in range(len(loops[0][1])):
        reach = 0
        for step, count in sorted((step[number], count) for count, step in loops if step[number]):
            if step <= reach:
                return False
            reach += step * (count - 1)
    return True


def _unroll(box: TileBox, inner: TileLoop) -> Iterator[TileBox]:
    """Unroll all loops of a box except its innermost one."""
    for place in product(*(range(count) for count, _ in box.loops)):
        start = np.array(box.start, np.int64)
        for at, (_, step) in zip(place, box.loops, strict=True):
            start = start + at * np.array(step, np.int64)
        yield TileBox(tuple(start.tolist()), (inner,))


Tile = tuple[int, ...]
"""Number of positions of a tile along each stored dim."""

_SCALE = "scale"
_LISTED = 4
"""Cap on the number of sources that the refusal of a misaligned tile lists."""
DRAWN = 1024
"""Cap on the number of positions along a tile that are examined one by one, to draw the tile."""


def grid(shape: Shape, tile: Tile) -> Shape:
    """Return the shape of the grid of scales: the number of tiles along each dim, the last of which may be partial."""
    return tuple(-(-size // step) for size, step in zip(shape, tile, strict=True))


class ScaleRelayout(msgspec.Struct, frozen=True):
    """The relayout that fills the scales of a target tensor from the scales of its sources."""

    target: Target
    """The target's grid of scales, to be filled from the sources' grids. Tiles of mere padding have no source."""
    checks: tuple[Check, ...]
    """Scales that must be bitwise equal, because one scale stands for all of them in the target."""


class SplitTile(msgspec.Struct, frozen=True):
    """A target tile with elements of several source tiles, described along the dim that crosses the most of them."""

    rule: str
    """The target's rule, as the user wrote it."""
    number: Tile
    """Number of the tile along each dim of the target."""
    dim: int
    """The dim along which it is described, at the tile's first position of all other dims."""
    runs: tuple[tuple[int, int, str, Tile], ...]
    """Per run: first target position, end position, stored tensor and its tile; the name is empty for padding."""


def scales(
    target: Target, tile: Tile, tiles: Mapping[str, Tile], *, scale_name: Callable[[str], str], dtype: str
) -> ScaleRelayout:
    """Compute the relayout of the scales that belong to a target tensor's codes.

    Args:
        target: the codes, as a target of a translation.
        tile: tile of the target.
        tiles: stored name of codes -> their tile, for every source of the target.
        scale_name: returns the name of the scales for the name of the codes.
        dtype: safetensors code of the scales.

    Post-condition: executing the result gives each target tile the scale of the source tile of all its elements.

    Raises:
        Refused: BLOCK_MISALIGNED where a target tile has elements of several source tiles; it names them.
    """
    shape = grid(target.layout.shape, tile)
    grids = {o.name: grid(o.layout.shape, tiles[o.name]) for part in target.parts for o in part.origins}
    # One scale per tensor stays valid wherever the elements go, so only equality of the scales matters.
    if prod(shape) == 1 and all(prod(stored) == 1 for stored in grids.values()):
        return _one_scale(target, shape, grids, scale_name, dtype)
    views = tuple(target.layout.shares[part.component] for part in target.parts)
    sources = tuple(_coordinates(part, target.index, tiles) for part in target.parts)
    stored = [[(origin.name, dict(origin.index)) for origin in part.origins] for part in target.parts]
    # Parts from the same stored tensors get the number of the first such part: only these may share a source tile.
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
            # The columns of a box are the target's dims, the source's dims, then the axes in the sources' names.
            dims = [_share(box, column) for column in range(len(box.start))]
            # The remaining columns count in the sources' names.
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
    """Compute the relayout of per-tensor scales: those of all sources must be equal, which the checks verify."""
    candidates = []
    for name, stored in grids.items():
        target_layout, source_layout = (Layout(s, {_SCALE: tuple(Share(0, ()) for _ in s)}) for s in (shape, stored))
        part = TargetPart(_SCALE, (Origin(scale_name(name), _SCALE, source_layout, {}),))
        candidates.append(Target(scale_name(target.name), dtype, target_layout, {}, (part,), target.rule))
    why = f"{target.rule}\none scale would have to stand for all of them"
    return ScaleRelayout(candidates[0], tuple(Check(candidates[0], candidate, why) for candidate in candidates[1:]))


def _coordinates(part: TargetPart, index: Mapping[str, int], tiles: Mapping[str, Tile]) -> tuple[Coordinate, ...]:
    """Return the coordinates that locate an element in the sources: one per stored dim, then one per axis in their
    names.

    An axis that is also in the target's name has a fixed index there, and needs no coordinate.
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
    """Return index -> name of the source, along the axes that only the sources' names have."""
    return {tuple(i for axis, i in origin.index.items() if axis not in index): origin.name for origin in part.origins}


def _share(box: TileBox, column: int) -> Share:
    """Return the share of one dim in a box: the loops that step along it, with the largest step first."""
    axes = [(f"#{place}", count, step[column]) for place, (count, step) in enumerate(box.loops) if step[column]]
    return Share(box.start[column], tuple(sorted(axes, key=lambda axis: -axis[2])))


def _indices(names: Sequence[Share]) -> Iterator[tuple[tuple[int, ...], dict[str, int]]]:
    """Yield the index in each source name that the loops reach, with the values of the loop variables."""
    loops = sorted((axis, count) for share in names for axis, count, _ in share.axes)
    for steps in product(*(range(count) for _, count in loops)):
        index = {axis: at for (axis, _), at in zip(loops, steps, strict=True)}
        yield tuple(share.offset + sum(index[axis] * step for axis, _, step in share.axes) for share in names), index


def _refusal_of_misaligned(
    target: Target, tile: Tile, number: tuple[int, ...], sources: Sequence[tuple[Coordinate, ...]]
) -> TransaxleError:
    """Build the refusal of a misaligned tile: the target tile, its source tiles, and where in them its parts begin."""
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
            # Only a beginning inside a source tile is worth showing: it is where the cut goes wrong.
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
    """Describe a tile position by position; None where it is too long for that."""
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
    """Return the stored tensor and its tile for one element of the target; an empty name for padding."""
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
