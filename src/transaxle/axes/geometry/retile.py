"""Which source tile each target tile lies in, as few boxes; numbers only.

Within a tile, positions grow with each index, so the first and the last position of a box tell which tiles it
touches: all questions are about intervals, dim by dim. No element is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations, product

import msgspec
import numpy as np
import numpy.typing as npt

from transaxle.axes.geometry.piece import Interval, cut
from transaxle.axes.notation.expression import Share

_Array = npt.NDArray[np.int64]


class Coordinate(msgspec.Struct, frozen=True):
    """A number that locates an element in the sources: its position in a stored dim, or an index in the name.

    It is a constant plus, for each axis, index times weight. Divided by `tile`, it numbers a tile.
    """

    weights: tuple[tuple[str, int], ...]
    """(axis, weight), for the axes it depends on."""
    constant: int
    """Its value where all indices are 0."""
    tile: int
    """Positions per tile; 1 for an index in the name."""

    def bounds(self, box: Mapping[str, Interval]) -> Interval:
        """Return the first tile that a box touches, and the last one."""
        spans = [(box[axis], weight) for axis, weight in self.weights]
        low = self.constant + sum(start * weight for (start, _), weight in spans)
        high = self.constant + sum((stop - 1) * weight for (_, stop), weight in spans)
        return low // self.tile, high // self.tile


TileLoop = tuple[int, tuple[int, ...]]
"""`(count, step)`: one step changes the place along one target dim and at most one coordinate."""


class TileBox(msgspec.Struct, frozen=True):
    """Target tiles and the source tiles they lie in, as nested loops over both."""

    start: tuple[int, ...]
    """First tile: its number along each target dim, then along each coordinate."""
    loops: tuple[TileLoop, ...] = ()
    """Outermost first."""


class Misaligned(Exception):
    """Raised where one target tile has elements of several source tiles; `tile` turns it into a refusal."""

    def __init__(self, tile: tuple[int, ...]) -> None:
        super().__init__(tile)
        self.tile = tile


class _Dim(msgspec.Struct, frozen=True):
    """The tiles of one target dim that hold something of a component.

    `low[i]` and `high[i]` bound what the elements in tile `touched[i]` add to each coordinate.
    """

    touched: _Array
    low: _Array
    high: _Array
    moves: tuple[bool, ...]
    """Coordinates that depend on this dim."""

    def at(self, rows: _Array) -> _Dim:
        return _Dim(self.touched[rows], self.low[rows], self.high[rows], self.moves)


@lru_cache(maxsize=4096)
def _dim(share: Share, size: int, tile: int, weights: tuple[tuple[int, ...], ...]) -> _Dim:
    """Look at one target dim; `weights` gives, per coordinate, one number for each axis of the share."""
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
    """One component of the target: the target tiles it touches in each dim, and where its elements come from."""

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

    def differing(self, over: Sequence[int], first: _Array, second: _Array) -> list[tuple[int, ...]]:
        """Return the first target tile, if any, at which two numbers over some dims are not the same."""
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
    """Find the source tile of each target tile.

    Args:
        shape: the target's shape.
        tile: the target's tile.
        views: per component of the target, its share of each dim.
        sources: per component, what tells where in its sources an element is.
        groups: per component, a number that those have in common which come from the same stored tensors.

    Returns:
        Boxes per component. Each target tile that holds an element is in one of them, with its only source tile.

    Raises:
        Misaligned: a target tile with several source tiles.
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
            misaligned += component.differing(over, *component.tiles(number, over))
    for first, second in combinations(range(len(parts)), 2):
        misaligned += _share(parts[first], parts[second], groups[first] == groups[second])
    if misaligned:
        raise Misaligned(min(misaligned))
    return tuple(tuple(_boxes(component)) for component in parts)


def _share(first: _ComponentTiles, second: _ComponentTiles, alike: bool) -> list[tuple[int, ...]]:
    """Check that two components agree on the source tile of each target tile they share, and leave that tile to the
    first.

    Returns:
        A target tile where they disagree, if there is one.
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
        return first_shared.differing((), np.array(0), np.array(1))
    misaligned = []
    for number in range(len(first.coordinates)):
        over = sorted({*first_shared.over(number), *second_shared.over(number)})
        misaligned += first_shared.differing(
            over, first_shared.tiles(number, over)[0], second_shared.tiles(number, over)[0]
        )
    partial_dims = [d for d, (tiles, _, _) in enumerate(shared) if len(tiles) < len(second.dims[d].touched)]
    if len(partial_dims) <= 1:  # a sum is along one dim; elsewhere its components touch the same tiles
        d = partial_dims[0] if partial_dims else 0
        second.dims[d] = second.dims[d].at(np.setdiff1d(np.arange(len(second.dims[d].touched)), shared[d][2]))
    return misaligned


def _boxes(component: _ComponentTiles) -> Iterator[TileBox]:
    """Describe one component's map from target tiles to source tiles by boxes.

    Dims that share a coordinate form a cluster; the boxes are the product of the clusters' boxes.
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
    """Write a sequence of rows (target tile, source tile) as nested loops.

    Post-condition: the boxes run through the rows in order, one after the other.
    """
    steps = np.diff(rows, axis=0)
    # Rows between two breaks lie at a constant step: one loop.
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
                yield from [inside] if _nested(inside.loops) else _written_out(box, (run, step))
            return
        yield TileBox(start, ((run, step),))
        begin += run


def _simple(step: Sequence[int], dims: int) -> bool:
    """Tell whether a step goes forward in one target dim and at most one coordinate: only such steps are one
    `TileLoop`.
    """
    return sum(map(bool, step[:dims])) == 1 and sum(map(bool, step[dims:])) <= 1 and min(step) >= 0


def _nested(loops: Sequence[TileLoop]) -> bool:
    """Tell whether the loops over each number are nested: each step goes beyond everything inside it."""
    for number in range(len(loops[0][1])):
        reach = 0
        for step, count in sorted((step[number], count) for count, step in loops if step[number]):
            if step <= reach:
                return False
            reach += step * (count - 1)
    return True


def _written_out(box: TileBox, inner: TileLoop) -> Iterator[TileBox]:
    """Unroll all loops of a box but an inner one."""
    for place in product(*(range(count) for count, _ in box.loops)):
        start = np.array(box.start, np.int64)
        for at, (_, step) in zip(place, box.loops, strict=True):
            start = start + at * np.array(step, np.int64)
        yield TileBox(tuple(start.tolist()), (inner,))
