"""How one parameter is spread over tensor-parallel ranks: which boxes of it each rank holds, and where in its shard.

This is what every form of metadata is lowered to, by way of the cutting rules of `axes`. It is compared, checked for
holes and turned into extents here, once, whatever it was read from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from transaxle.axes.geometry.chunk import ChunkRule, MeshCut, PerComponent, Replicated, Widths, count_positions, place
from transaxle.axes.geometry.piece import Piece
from transaxle.axes.geometry.strided import row_major
from transaxle.errors import refuse

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A box of the whole parameter that a rank holds as a box of its shard."""

    start: Shape
    """First index in the whole parameter."""
    at: Shape
    """First index in the shard."""
    shape: Shape
    scale: float = 1.0
    """The shard holds the values times this."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Spread:
    """One parameter over all tensor-parallel ranks."""

    shape: Shape
    """Of the whole parameter."""
    shards: tuple[Shape, ...]
    """Of each rank's shard."""
    blocks: tuple[tuple[Block, ...], ...]
    """What each rank holds; no empty ones."""

    @property
    def scaled(self) -> bool:
        """Whether a rank holds anything but the values themselves."""
        return any(block.scale != 1 for held in self.blocks for block in held)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return what a rank holds as pieces of `axes`, the axes being the dims `0`, `1`, …."""
        strides = row_major(self.shards[rank])
        names = [str(dim) for dim in range(len(self.shape))]
        return tuple(
            Piece(
                {name: (s, s + n) for name, s, n in zip(names, block.start, block.shape, strict=True)},
                sum(at * step for at, step in zip(block.at, strides, strict=True)),
                dict(zip(names, strides, strict=True)),
            )
            for block in self.blocks[rank]
        )


@dataclass(frozen=True, slots=True)
class Holding:
    """A box of the whole parameter where one rank holds it."""

    rank: int
    block: Block


@dataclass(frozen=True, slots=True)
class Owners:
    """Where a parameter is read from."""

    holdings: tuple[Holding, ...]
    """Disjoint boxes, each on the first rank that holds it."""
    copies: tuple[tuple[Holding, Holding], ...]
    """Boxes that are there more than once: the one that is read, and another."""
    missing: int
    """Elements that no rank holds."""


def cut(shape: Shape, dim: int | None, rule: ChunkRule, ranks: int) -> Spread:
    """Spread a parameter by a cutting rule along one dim; None: every rank holds all of it.

    Raises:
        Refused: SHAPE_MISMATCH where the rule does not fit the shape.
    """
    shards, blocks = [], []
    for rank in range(ranks):
        held = place(shape, [MeshCut(dim, ranks, rank, rule)])
        shards.append(tuple(count_positions(intervals) for intervals in held))
        found = []
        for intervals in product(*(_placed(one) for one in held)):
            block = Block(
                tuple(first for first, _, _ in intervals),
                tuple(at for _, _, at in intervals),
                tuple(last - first for first, last, _ in intervals),
            )
            if block.size:
                found.append(block)
        blocks.append(tuple(found))
    return Spread(shape, tuple(shards), tuple(blocks))


def by_widths(shape: Shape, dim: int, widths: Sequence[Sequence[int]]) -> Spread:
    """Spread a parameter whose parts lie one after the other along a dim, each cut by its own widths per rank.

    Raises:
        Refused: SHAPE_MISMATCH where the widths do not sum to the dim.
    """
    rules = tuple(Widths(tuple(each)) for each in widths)
    rule: ChunkRule = rules[0] if len(rules) == 1 else PerComponent(tuple(sum(each) for each in widths), rules)
    return cut(shape, dim, rule, len(widths[0]))


def whole(shape: Shape, ranks: int) -> Spread:
    """Return the spread of a parameter that every rank holds."""
    return cut(shape, None, Replicated(), ranks)


def _placed(intervals: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield each interval with its place in the shard."""
    at = 0
    for first, last in intervals:
        yield first, last, at
        at += last - first


def same(one: Spread, other: Spread) -> bool:
    """Tell whether two spreads put the same elements at the same places, however they are split into boxes."""
    if one.shape != other.shape or one.shards != other.shards:
        return False
    return all(_agree(mine, yours) for mine, yours in zip(one.blocks, other.blocks, strict=True))


def _agree(mine: Sequence[Block], yours: Sequence[Block]) -> bool:
    if sum(block.size for block in mine) != sum(block.size for block in yours):
        return False
    common = 0
    for a in mine:
        for b in yours:
            shared = _overlap(a, b.start, b.shape)
            if shared is None:
                continue
            twin = _overlap(b, a.start, a.shape)
            if twin is None or shared.at != twin.at or a.scale != b.scale:
                return False
            common += shared.size
    return common == sum(block.size for block in mine)


def _overlap(block: Block, start: Shape, shape: Shape) -> Block | None:
    """Return the part of a block inside a box of the whole parameter."""
    low = tuple(map(max, block.start, start))
    high = tuple(min(b + n, s + m) for b, n, s, m in zip(block.start, block.shape, start, shape, strict=True))
    if any(h <= lo for lo, h in zip(low, high, strict=True)):
        return None
    at = tuple(a + lo - s for a, lo, s in zip(block.at, low, block.start, strict=True))
    return Block(low, at, tuple(h - lo for lo, h in zip(low, high, strict=True)), block.scale)


@lru_cache(4096)
def owners(spread: Spread) -> Owners:
    """Choose a rank for every element, and find the copies on other ranks."""
    owned: list[Holding] = []
    copies: list[tuple[Holding, Holding]] = []
    for rank, held in enumerate(spread.blocks):
        for block in held:
            rest = [block]
            for first in tuple(owned):
                mine = _overlap(block, first.block.start, first.block.shape)
                theirs = _overlap(first.block, block.start, block.shape)
                if mine is not None and theirs is not None:
                    copies.append((Holding(first.rank, theirs), Holding(rank, mine)))
                    rest = [left for part in rest for left in _without(part, mine)]
            owned.extend(Holding(rank, part) for part in rest)
    missing = prod(spread.shape) - sum(each.block.size for each in owned)
    return Owners(tuple(owned), tuple(copies), missing)


def _without(block: Block, hole: Block) -> Iterator[Block]:
    """Yield the parts of a block outside of a box, as boxes: for each dim what lies before and after it."""
    low, shape = list(block.start), list(block.shape)
    if _overlap(block, hole.start, hole.shape) is None:
        yield block
        return
    for dim in range(len(shape)):
        first, last = max(hole.start[dim], low[dim]), min(hole.start[dim] + hole.shape[dim], low[dim] + shape[dim])
        for start, stop in ((low[dim], first), (last, low[dim] + shape[dim])):
            if start < stop:
                part = _overlap(
                    block, (*low[:dim], start, *low[dim + 1 :]), (*shape[:dim], stop - start, *shape[dim + 1 :])
                )
                if part is not None:
                    yield part
        low[dim], shape[dim] = first, last - first


def clipped(spread: Spread, rows: int) -> Spread:
    """Return the spread of the first rows of a parameter; the shards keep what lies behind them as padding."""
    shape = (rows, *spread.shape[1:])
    origin = (0,) * len(shape)
    blocks = tuple(
        tuple(part for part in (_overlap(block, origin, shape) for block in held) if part is not None)
        for held in spread.blocks
    )
    return Spread(shape, spread.shards, blocks)


def folded(spread: Spread, shards: Sequence[Shape]) -> Spread:
    """Return the spread with its leading dims merged into one, as the shards have them.

    Raises:
        Refused: SHAPE_MISMATCH where merging does not give the shards' shapes.
    """
    dims = len(shards[0]) if shards else 0
    extra = len(spread.shape) - dims + 1
    folds = extra > 1 and dims > 0
    merged = tuple((prod(shard[:extra]), *shard[extra:]) if folds else shard for shard in spread.shards)
    if tuple(shards) != merged:  # before anything is done for every row that the metadata speaks of
        want, got = (", ".join(str(list(shape)) for shape in some[:8]) for some in (merged, tuple(shards)))
        raise refuse("SHAPE_MISMATCH", f"the metadata describes shards of {want}; they have the shapes {got}")
    if not folds:
        return spread
    heads = [shard[:extra] for shard in spread.shards]
    blocks = tuple(
        tuple(part for block in held for part in _folded(block, spread.shape[:extra], head))
        for held, head in zip(spread.blocks, heads, strict=True)
    )
    return Spread((prod(spread.shape[:extra]), *spread.shape[extra:]), merged, blocks)


def _folded(block: Block, whole_head: Shape, shard_head: Shape) -> Iterator[Block]:
    """Yield a block as runs of the merged leading dims."""
    count = len(whole_head)
    source, dest = row_major(whole_head), row_major(shard_head)
    runs: list[tuple[int, int, int]] = []
    *outer, inner = block.shape[:count]
    for index in product(*map(range, outer)):
        start = sum((b + i) * step for b, i, step in zip(block.start, (*index, 0), source, strict=False))
        at = sum((b + i) * step for b, i, step in zip(block.at, (*index, 0), dest, strict=False))
        if runs and runs[-1][0] + runs[-1][2] == start and runs[-1][1] + runs[-1][2] == at:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + inner)
        else:
            runs.append((start, at, inner))
    for start, at, size in runs:
        yield Block((start, *block.start[count:]), (at, *block.at[count:]), (size, *block.shape[count:]), block.scale)
