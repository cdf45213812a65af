"""Spreads: which boxes of one parameter each tensor-parallel rank holds, and where in its shard.

Every form of metadata is reduced to a spread, by way of the cutting rules of `axes`. Spreads are compared, checked for
holes and turned into extents here, whatever they were read from.
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
class ShardBlock:
    """A box of the whole parameter that is a box of a rank's shard."""

    start: Shape
    """First index in the whole parameter."""
    at: Shape
    """First index in the shard."""
    shape: Shape
    scale: float = 1.0
    """Factor of the stored values."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Spread:
    """One parameter over all tensor-parallel ranks."""

    shape: Shape
    """Shape of the whole parameter."""
    shards: tuple[Shape, ...]
    """Shape of each rank's shard."""
    blocks: tuple[tuple[ShardBlock, ...], ...]
    """The non-empty boxes of each rank."""

    @property
    def scaled(self) -> bool:
        """Whether a rank stores scaled values."""
        return any(block.scale != 1 for blocks in self.blocks for block in blocks)

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
class RankBlock:
    """A box of the whole parameter on one rank."""

    rank: int
    block: ShardBlock


@dataclass(frozen=True, slots=True)
class Owners:
    """The boxes from which a parameter is read."""

    holdings: tuple[RankBlock, ...]
    """Disjoint boxes, each on the first rank that holds it."""
    copies: tuple[tuple[RankBlock, RankBlock], ...]
    """Boxes that exist more than once: the one that is read, and another."""
    missing: int
    """Elements that no rank holds."""


def cut(shape: Shape, dim: int | None, rule: ChunkRule, ranks: int) -> Spread:
    """Spread a parameter by a cutting rule along one dim; None: every rank holds all of it.

    Raises:
        Refused: SHAPE_MISMATCH where the rule does not fit the shape.
    """
    shards, blocks = [], []
    for rank in range(ranks):
        positions = place(shape, [MeshCut(dim, ranks, rank, rule)])
        shards.append(tuple(count_positions(intervals) for intervals in positions))
        blocks_of_rank = []
        for intervals in product(*(_placed(intervals_of_dim) for intervals_of_dim in positions)):
            block = ShardBlock(
                tuple(first for first, _, _ in intervals),
                tuple(at for _, _, at in intervals),
                tuple(last - first for first, last, _ in intervals),
            )
            if block.size:
                blocks_of_rank.append(block)
        blocks.append(tuple(blocks_of_rank))
    return Spread(shape, tuple(shards), tuple(blocks))


def by_widths(shape: Shape, dim: int, widths: Sequence[Sequence[int]]) -> Spread:
    """Spread a parameter whose parts lie one after the other along a dim, each cut by its own widths per rank.

    Raises:
        Refused: SHAPE_MISMATCH where the widths do not sum to the dim.
    """
    rules = tuple(Widths(tuple(part_widths)) for part_widths in widths)
    rule: ChunkRule = (
        rules[0] if len(rules) == 1 else PerComponent(tuple(sum(part_widths) for part_widths in widths), rules)
    )
    return cut(shape, dim, rule, len(widths[0]))


def whole(shape: Shape, ranks: int) -> Spread:
    """Return the spread of a parameter that every rank holds."""
    return cut(shape, None, Replicated(), ranks)


def _placed(intervals: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield each interval with its place in the shard."""
    at = 0
    for start, stop in intervals:
        yield start, stop, at
        at += stop - start


def same(first: Spread, second: Spread) -> bool:
    """Tell whether two spreads put the same elements at the same places, however they are split into boxes."""
    if first.shape != second.shape or first.shards != second.shards:
        return False
    return all(
        _agree(first_blocks, second_blocks)
        for first_blocks, second_blocks in zip(first.blocks, second.blocks, strict=True)
    )


def _agree(first_blocks: Sequence[ShardBlock], second_blocks: Sequence[ShardBlock]) -> bool:
    if sum(block.size for block in first_blocks) != sum(block.size for block in second_blocks):
        return False
    common = 0
    for a in first_blocks:
        for b in second_blocks:
            shared = _overlap(a, b.start, b.shape)
            if shared is None:
                continue
            shared_in_b = _overlap(b, a.start, a.shape)
            if shared_in_b is None or shared.at != shared_in_b.at or a.scale != b.scale:
                return False
            # Both sides cover as many elements; if all of them are common, the two are the same.
            common += shared.size
    return common == sum(block.size for block in first_blocks)


def _overlap(block: ShardBlock, start: Shape, shape: Shape) -> ShardBlock | None:
    """Return the part of a block inside a box of the whole parameter."""
    low = tuple(map(max, block.start, start))
    high = tuple(min(b + n, s + m) for b, n, s, m in zip(block.start, block.shape, start, shape, strict=True))
    if any(h <= lo for lo, h in zip(low, high, strict=True)):
        return None
    at = tuple(a + lo - s for a, lo, s in zip(block.at, low, block.start, strict=True))
    return ShardBlock(low, at, tuple(h - lo for lo, h in zip(low, high, strict=True)), block.scale)


@lru_cache(4096)
def owners(spread: Spread) -> Owners:
    """Choose a rank for every element, and find the copies on other ranks."""
    owned: list[RankBlock] = []
    copies: list[tuple[RankBlock, RankBlock]] = []
    for rank, blocks in enumerate(spread.blocks):
        for block in blocks:
            remaining = [block]
            # Later ranks keep only what no earlier one holds; the rest are copies, to be compared with the owner's.
            for owner in tuple(owned):
                copy = _overlap(block, owner.block.start, owner.block.shape)
                original = _overlap(owner.block, block.start, block.shape)
                if copy is not None and original is not None:
                    copies.append((RankBlock(owner.rank, original), RankBlock(rank, copy)))
                    remaining = [remainder for piece in remaining for remainder in _without(piece, copy)]
            owned.extend(RankBlock(rank, piece) for piece in remaining)
    missing = prod(spread.shape) - sum(holding.block.size for holding in owned)
    return Owners(tuple(owned), tuple(copies), missing)


def _without(block: ShardBlock, hole: ShardBlock) -> Iterator[ShardBlock]:
    """Yield the parts of a block outside of a box, as boxes: for each dim what lies before and after it."""
    low, shape = list(block.start), list(block.shape)
    if _overlap(block, hole.start, hole.shape) is None:
        yield block
        return
    for dim in range(len(shape)):
        first, last = max(hole.start[dim], low[dim]), min(hole.start[dim] + hole.shape[dim], low[dim] + shape[dim])
        for start, stop in ((low[dim], first), (last, low[dim] + shape[dim])):
            if start < stop:
                piece = _overlap(
                    block, (*low[:dim], start, *low[dim + 1 :]), (*shape[:dim], stop - start, *shape[dim + 1 :])
                )
                if piece is not None:
                    yield piece
        # The next dim only considers what this one has in common with the hole, so the pieces are disjoint.
        low[dim], shape[dim] = first, last - first


def clipped(spread: Spread, rows: int) -> Spread:
    """Return the spread of the first rows of a parameter; the rest of the shards becomes padding."""
    shape = (rows, *spread.shape[1:])
    origin = (0,) * len(shape)
    blocks = tuple(
        tuple(
            clipped_block
            for clipped_block in (_overlap(block, origin, shape) for block in blocks_of_rank)
            if clipped_block is not None
        )
        for blocks_of_rank in spread.blocks
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
        want, got = (", ".join(str(list(shape)) for shape in shapes[:8]) for shapes in (merged, tuple(shards)))
        raise refuse("SHAPE_MISMATCH", f"by the metadata the shards have the shapes {want}, but they have {got}")
    if not folds:
        return spread
    heads = [shard[:extra] for shard in spread.shards]
    blocks = tuple(
        tuple(run for block in blocks_of_rank for run in _folded(block, spread.shape[:extra], head))
        for blocks_of_rank, head in zip(spread.blocks, heads, strict=True)
    )
    return Spread((prod(spread.shape[:extra]), *spread.shape[extra:]), merged, blocks)


def _folded(block: ShardBlock, whole_head: Shape, shard_head: Shape) -> Iterator[ShardBlock]:
    """Yield a block as runs of the merged leading dims."""
    count = len(whole_head)
    source, dest = row_major(whole_head), row_major(shard_head)
    runs: list[tuple[int, int, int]] = []
    *outer, inner = block.shape[:count]
    for index in product(*map(range, outer)):
        start = sum((b + i) * step for b, i, step in zip(block.start, (*index, 0), source, strict=False))
        at = sum((b + i) * step for b, i, step in zip(block.at, (*index, 0), dest, strict=False))
        # Adjacent on both sides: one longer run, so that folding whole dims gives a single box.
        if runs and runs[-1][0] + runs[-1][2] == start and runs[-1][1] + runs[-1][2] == at:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + inner)
        else:
            runs.append((start, at, inner))
    for start, at, size in runs:
        yield ShardBlock(
            (start, *block.start[count:]), (at, *block.at[count:]), (size, *block.shape[count:]), block.scale
        )
