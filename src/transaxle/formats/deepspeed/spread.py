"""How a parameter is spread over tensor-parallel ranks: boxes, the affine map of the metadata, and cuts that tables
state.

**Spreads**: which boxes of one parameter each tensor-parallel rank holds, and where in its shard.

Every form of metadata is reduced to a spread, by way of the cutting rules of `axes`. Spreads are compared, checked for
holes and turned into extents here, whatever they were read from.

The affine form of the metadata, `affine_map` version 1: each rank's shard as strided views of the whole parameter.

    {"version": 1, "params": {pattern: {"logical_shape": [...], "ranks": {rank: {"shard_shape": [...], "pieces": [
        {"shape": [...], "source": [offset, strides], "dest": [offset, strides], "locations": [...], "scale": 1.0}]}}}}}

`source` is in the whole parameter, `dest` in the shard, both row-major; `locations` are the ranks that hold the piece;
`scale` may be missing. Every piece must be a box of both.

How parameters are cut that no metadata describes: as the table of their model says, or the user's rules.

Tables are not known here. Whoever opens a checkpoint may hand in a `Cutter`, which is asked once for all names, and
then name by name with the shapes of the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

from transaxle.axes.geometry import (
    ChunkRule,
    MeshCut,
    PerComponent,
    Piece,
    Replicated,
    Widths,
    count_positions,
    place,
    row_major,
)
from transaxle.axes.layout.divide import Division
from transaxle.errors import refuse
from transaxle.formats.catalog import Shape
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.keys import CheckedValue
from transaxle.formats.storage.storage import Storage


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


MOST_PIECES = 1024
"""Pieces of one parameter on all ranks together; real ones have a few per rank."""


def maps_of(info: CheckedValue) -> dict[str, CheckedValue]:
    """Return pattern -> description from a model's metadata; empty where it has no affine form.

    Raises:
        Refused: UNSUPPORTED for another version; CORRUPT.
    """
    affine = info.get(keys.AFFINE)
    if affine is None:
        return {}
    version = affine.get(keys.AFFINE_VERSION)
    if version is None or version.natural() != keys.AFFINE_CURRENT:
        version_text = "no version" if version is None else f"version {version.value}"
        message = f"the {keys.AFFINE} has {version_text}; only version {keys.AFFINE_CURRENT} can be read"
        raise refuse("UNSUPPORTED", message, file=info.file)
    return dict(affine[keys.AFFINE_PARAMS].named())


def read_affine(node: CheckedValue, ranks: int) -> Spread:
    """Lower one parameter's description.

    Args:
        node: from `maps_of`.
        ranks: the tensor-parallel degree of the checkpoint.

    Raises:
        Refused: CORRUPT for pieces outside of what they speak of, or whose counts or places disagree; UNSUPPORTED for
            pieces that are no boxes; SHAPE_MISMATCH for another number of ranks.
    """
    shape = node[keys.LOGICAL_SHAPE].naturals()
    entries = node[keys.RANKS]
    by_rank = {_rank(entries, key): entry for key, entry in entries.items()}
    if sorted(by_rank) != list(range(ranks)):
        message = f"the metadata describes the ranks {sorted(by_rank)[:10]}, but the checkpoint has {ranks} ranks"
        raise refuse("SHAPE_MISMATCH", message, file=node.file, tensor=node.path[-1])
    shards = tuple(by_rank[rank][keys.SHARD_SHAPE].naturals() for rank in range(ranks))
    pieces = [by_rank[rank][keys.PIECES].list() for rank in range(ranks)]
    if sum(map(len, pieces)) > MOST_PIECES:
        raise refuse(
            "UNSUPPORTED",
            f"the metadata cuts it into more than {MOST_PIECES} pieces",
            file=node.file,
            tensor=node.path[-1],
        )
    blocks, holders, pieces_with_blocks = [], dict[tuple[Shape, Shape], set[int]](), []
    for rank, listed in enumerate(pieces):
        blocks_of_rank = []
        for piece in listed:
            block = _block(piece, shape, shards[rank])
            if not block.size:
                continue
            blocks_of_rank.append(block)
            holders.setdefault((block.start, block.shape), set()).add(rank)
            pieces_with_blocks.append((piece, block))
        _check_shard(entries, rank, blocks_of_rank, shards[rank])
        blocks.append(tuple(blocks_of_rank))
    for piece, block in pieces_with_blocks:
        if set(piece[keys.LOCATIONS].naturals()) != holders[block.start, block.shape]:
            holding_ranks = sorted(holders[block.start, block.shape])
            raise piece.fault(f"{keys.LOCATIONS} must list the ranks that hold this piece, {holding_ranks}")
    return Spread(shape, shards, tuple(blocks))


def write_affine(spread: Spread) -> dict[str, Any]:
    """Return a parameter's description, as DeepSpeed writes it.  Inverse: `read`, up to empty pieces."""
    holders: dict[tuple[Shape, Shape], list[int]] = {}
    for rank, blocks_of_rank in enumerate(spread.blocks):
        for block in blocks_of_rank:
            holders.setdefault((block.start, block.shape), []).append(rank)
    strides = row_major(spread.shape)
    return {
        keys.LOGICAL_SHAPE: list(spread.shape),
        keys.RANKS: {
            rank: {
                keys.SHARD_SHAPE: list(spread.shards[rank]),
                keys.PIECES: [
                    _piece(block, strides, row_major(spread.shards[rank]), holders[block.start, block.shape])
                    for block in blocks_of_rank
                ],
            }
            for rank, blocks_of_rank in enumerate(spread.blocks)
        },
    }


def _piece(block: ShardBlock, source: Shape, dest: Shape, ranks: Sequence[int]) -> dict[str, Any]:
    piece: dict[str, Any] = {
        keys.SHAPE: list(block.shape),
        keys.SOURCE: [_position(block.start, source), list(source)],
        keys.DEST: [_position(block.at, dest), list(dest)],
        keys.LOCATIONS: list(ranks),
    }
    return piece if block.scale == 1 else {**piece, keys.SCALE: block.scale}


def _position(index: Shape, strides: Shape) -> int:
    return sum(at * step for at, step in zip(index, strides, strict=True))


def _rank(entries: CheckedValue, key: object) -> int:
    text = str(key) if isinstance(key, int | str) and not isinstance(key, bool) else ""
    if not text.isascii() or not text.isdecimal() or len(text) > len(str(MOST_PIECES)):
        raise entries.fault("the keys must be numbers of ranks")
    return int(text)


def _block(piece: CheckedValue, shape: Shape, shard: Shape) -> ShardBlock:
    sizes = piece[keys.SHAPE].naturals()
    scale = piece.get(keys.SCALE)
    factor = 1.0 if scale is None else scale.real()
    if factor == 0:
        raise piece.fault("the scale is zero, so the values are lost")
    start, at = (
        _start(piece[side], sizes, full_shape) for side, full_shape in ((keys.SOURCE, shape), (keys.DEST, shard))
    )
    return ShardBlock(start, at, sizes, factor)


def _start(place: CheckedValue, sizes: Shape, full_shape: Shape) -> Shape:
    """Return the first index of a strided view that must be a box of a row-major array."""
    offset_and_strides = place.list()
    if len(offset_and_strides) != 2:
        raise place.fault(f"expected an offset and strides, not {len(offset_and_strides)} items")
    offset, strides = offset_and_strides[0].natural(), offset_and_strides[1].naturals()
    if len(sizes) != len(full_shape) or len(strides) != len(full_shape):
        raise place.fault(f"{len(sizes)} sizes and {len(strides)} strides do not fit {len(full_shape)} dims")
    if 0 in sizes:
        return (0,) * len(full_shape)
    dense = row_major(full_shape)
    # A dim of size 1 is never stepped along, so its stride is arbitrary.
    if any(size > 1 and step != want for size, step, want in zip(sizes, strides, dense, strict=True)):
        message = f"strides {list(strides)} do not select a box of {list(full_shape)}"
        raise refuse("UNSUPPORTED", message, file=place.file, tensor=" > ".join(place.path))
    start = []
    for step in dense:
        # Row-major strides make the offset a mixed-radix number whose digits are the first index.
        index, offset = divmod(offset, step) if step else (0, offset)
        start.append(index)
    if offset or any(first + size > most for first, size, most in zip(start, sizes, full_shape, strict=True)):
        raise place.fault(f"a box of {list(sizes)} at {start} lies outside the shape {list(full_shape)}")
    return tuple(start)


def _check_shard(entries: CheckedValue, rank: int, held: Sequence[ShardBlock], shard: Shape) -> None:
    """Check that the pieces of a rank fill its shard once."""
    filled = sum(block.size for block in held)
    # Equal counts could hide one overlap and one hole, so overlaps are looked for as well.
    twice = any(
        all(a < b + n and b < a + m for a, m, b, n in zip(one.at, one.shape, two.at, two.shape, strict=True))
        for number, one in enumerate(held)
        for two in held[:number]
    )
    if filled != prod(shard) or twice:
        problem = "overlap" if twice else f"have {filled} elements"
        raise entries.fault(f"the pieces of rank {rank} {problem}, but must fill its shard {list(shard)} exactly once")


Divider = Callable[[str, Sequence[Shape]], Division]
"""Name of a parameter and its shape on every rank -> how it is cut; raises a refusal where that is not known."""
Cutter = Callable[[Storage, Sequence[str], Mapping[str, Any]], Divider]
"""The checkpoint's files, the names of its parameters, and what the files say of sizes where there is no config.json ->
what cuts them; raises where no table reads the names."""

UNTOLD = "the checkpoint does not say how it was cut over the tensor-parallel ranks, so they cannot be joined"
HINT = (
    "The table of the model's family can say it: give --family NAME and --config FILE, or --rules FILE for a model "
    "without a table. The guide on DeepSpeed checkpoints has an example."
)


def untold(_storage: Storage, names: Sequence[str], _config: Mapping[str, Any]) -> Divider:
    """Refuse: the cutter where nothing is known of tables.

    Raises:
        Refused: UNSUPPORTED.
    """
    raise refuse("UNSUPPORTED", UNTOLD, tensor=names[0] if names else None, hint=HINT)


class TableCuts:
    """The tensor-parallel cuts that a table states, in place of a checkpoint's own metadata.

    Args:
        cutter: asks the tables.
        storage: the checkpoint's files.
        names: of all its parameters.
        config: what the files say of sizes, under the keys of a config.json.

    Raises:
        Refused, UsageError: where no table reads the names.
    """

    def __init__(
        self, cutter: Cutter, storage: Storage, names: Sequence[str], config: Mapping[str, Any] | None = None
    ) -> None:
        self._divide = cutter(storage, names, config or {})

    def spread(self, name: str, shards: Sequence[Shape]) -> Spread:
        """Return how a parameter is spread over the tensor-parallel ranks.

        Args:
            name: its name.
            shards: its shape on every rank.

        Raises:
            Refused: UNSUPPORTED where the table does not know it; SHAPE_MISMATCH where it knows no such cut.
            UsageError: UNKNOWN_AXIS, AMBIGUOUS where more must be said.
        """
        division = self._divide(name, shards)
        return cut(division.shape, division.dim, division.rule, len(shards))
