"""Which source tile each target tile lies in, as few boxes; numbers only.

Within a tile, positions grow with each index, so the first and the last position of a box tell which tiles it
touches: all questions are about intervals, dim by dim. No element is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product

import numpy as np
import numpy.typing as npt

from transaxle.axes.geometry.piece import Interval, cut
from transaxle.axes.notation.expression import Share

_Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A number that tells where in the sources an element is: its position in a stored dim, or an index in the name.

    It is the sum of a constant and, for each axis, index times weight. Divided by `tile` it numbers a tile.
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


Loop = tuple[int, tuple[int, ...]]
"""`(count, step)`: a step changes the place along one target dim and at most one coordinate."""


@dataclass(frozen=True, slots=True)
class Box:
    """Target tiles and the source tiles they lie in, as nested loops over both."""

    start: tuple[int, ...]
    """First tile: its number along each target dim, then along each coordinate."""
    loops: tuple[Loop, ...] = ()
    """Outermost first."""


class Misaligned(Exception):
    """A target tile lies in several source tiles; `tile` explains it to the user."""

    def __init__(self, tile: tuple[int, ...]) -> None:
        super().__init__(tile)
        self.tile = tile


@dataclass(frozen=True, slots=True)
class _Dim:
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
    found = np.array(rows, np.int64).reshape(len(rows), 1 + 2 * len(weights))
    middle = 1 + len(weights)
    moves = tuple(any(w and count > 1 for w, (_, count, _) in zip(row, share.axes, strict=True)) for row in weights)
    return _Dim(found[:, 0], found[:, 1:middle], found[:, middle:], moves)


@dataclass
class _Part:
    """A component of the target: its view of the target's dims, and where its elements come from."""

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

    def differing(self, over: Sequence[int], one: _Array, other: _Array) -> list[tuple[int, ...]]:
        """Return the first target tile, if any, at which two numbers over some dims are not the same."""
        found = (dict(zip(over, rows, strict=True)) for rows in np.argwhere(one != other)[:1].tolist())
        return [tuple(int(dim.touched[at.get(d, 0)]) for d, dim in enumerate(self.dims)) for at in found]


@lru_cache(maxsize=1024)
def retile(
    shape: tuple[int, ...],
    tile: tuple[int, ...],
    views: tuple[tuple[Share, ...], ...],
    sources: tuple[tuple[Coordinate, ...], ...],
    groups: tuple[int, ...],
) -> tuple[tuple[Box, ...], ...]:
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
        parts.append(_Part(dims, coordinates))
    wrong = []
    for part in parts:
        for number in range(len(part.coordinates)):
            over = part.over(number)
            wrong += part.differing(over, *part.tiles(number, over))
    for one, other in combinations(range(len(parts)), 2):
        wrong += _share(parts[one], parts[other], groups[one] == groups[other])
    if wrong:
        raise Misaligned(min(wrong))
    return tuple(tuple(_boxes(part)) for part in parts)


def _share(one: _Part, other: _Part, alike: bool) -> list[tuple[int, ...]]:
    """Where two components share target tiles they must share source tiles; these are then left to the first.

    Returns:
        A target tile where they do not, if there is any.
    """
    pairs = list(zip(one.dims, other.dims, strict=True))
    shared = [np.intersect1d(a.touched, b.touched, True, True) for a, b in pairs]
    if not all(len(tiles) for tiles, _, _ in shared):
        return []
    mine = _Part([a.at(rows) for (a, _), (_, rows, _) in zip(pairs, shared, strict=True)], one.coordinates)
    yours = _Part([b.at(rows) for (_, b), (_, _, rows) in zip(pairs, shared, strict=True)], other.coordinates)
    if not alike:
        return mine.differing((), np.array(0), np.array(1))
    wrong = []
    for number in range(len(one.coordinates)):
        over = sorted({*mine.over(number), *yours.over(number)})
        wrong += mine.differing(over, mine.tiles(number, over)[0], yours.tiles(number, over)[0])
    rest = [d for d, (tiles, _, _) in enumerate(shared) if len(tiles) < len(other.dims[d].touched)]
    if len(rest) <= 1:  # a sum is along one dim; elsewhere its components touch the same tiles
        d = rest[0] if rest else 0
        other.dims[d] = other.dims[d].at(np.setdiff1d(np.arange(len(other.dims[d].touched)), shared[d][2]))
    return wrong


def _boxes(part: _Part) -> Iterator[Box]:
    """Describe one component's map by boxes: products of those of the groups of dims that share no coordinate."""
    dims, numbers = part.dims, range(len(part.coordinates))
    clusters: list[set[int]] = [{d} for d in range(len(dims))]
    for number in numbers:
        met = [cluster for cluster in clusters if cluster.intersection(part.over(number))]
        clusters = [cluster for cluster in clusters if cluster not in met] + ([set().union(*met)] if met else [])
    width = len(dims) + len(numbers)
    found: list[list[Box]] = []
    for over in [*map(sorted, clusters), []]:
        columns = np.zeros((*(len(dims[d].touched) for d in over), width), np.int64)
        for place, d in enumerate(over):
            columns[..., d] = dims[d].touched.reshape([-1 if p == place else 1 for p in range(len(over))])
        for number in numbers:
            moving = part.over(number)
            if set(moving) <= set(over) and bool(moving) == bool(over):
                columns[..., len(dims) + number] = part.tiles(number, over)[0]
        found.append(list(_nest(columns.reshape(-1, width), len(dims))))
    for boxes in product(*found):
        start = tuple(map(sum, zip(*(box.start for box in boxes), strict=True)))
        yield Box(start, tuple(loop for box in boxes for loop in box.loops))


def _nest(rows: _Array, dims: int) -> Iterator[Box]:
    """Write a sequence of places as nested loops.

    Post-condition: the boxes run through the rows in order, one after the other.
    """
    steps = np.diff(rows, axis=0)
    breaks = np.flatnonzero((steps[1:] != steps[:-1]).any(1)) + 1
    begin = 0
    while begin < len(rows):
        left = len(rows) - begin
        start = tuple(rows[begin].tolist())
        step = tuple(steps[begin].tolist()) if left > 1 else ()
        if not _simple(step, dims):
            yield Box(start)
            begin += 1
            continue
        after = int(np.searchsorted(breaks, begin, "right"))
        run = (int(breaks[after]) if after < len(breaks) else len(steps)) - begin + 1
        blocks = rows[begin:].reshape(-1, run, rows.shape[1]) if left % run == 0 else rows[:0]
        if len(blocks) > 1 and (np.diff(blocks, axis=1) == steps[begin]).all():
            for box in _nest(blocks[:, 0], dims):
                inside = Box(box.start, (*box.loops, (run, step)))
                yield from [inside] if _nested(inside.loops) else _written_out(box, (run, step))
            return
        yield Box(start, ((run, step),))
        begin += run


def _simple(step: Sequence[int], dims: int) -> bool:
    """Tell whether a step changes one target dim and at most one coordinate, and goes forward."""
    return sum(map(bool, step[:dims])) == 1 and sum(map(bool, step[dims:])) <= 1 and min(step) >= 0


def _nested(loops: Sequence[Loop]) -> bool:
    """Tell whether the loops over each number are nested: each step goes beyond everything inside it."""
    for number in range(len(loops[0][1])):
        reach = 0
        for step, count in sorted((step[number], count) for count, step in loops if step[number]):
            if step <= reach:
                return False
            reach += step * (count - 1)
    return True


def _written_out(box: Box, inner: Loop) -> Iterator[Box]:
    """Write the loops of a box out, so that only an inner one is left."""
    for place in product(*(range(count) for count, _ in box.loops)):
        start = np.array(box.start, np.int64)
        for at, (_, step) in zip(place, box.loops, strict=True):
            start = start + at * np.array(step, np.int64)
        yield Box(tuple(start.tolist()), (inner,))
