"""A spread describes which boxes of a parameter each tensor-parallel rank has, and where these boxes are in the rank's
shard.

Every form of DeepSpeed's metadata about cuts is converted into a spread, by the functions for cutting dims in `axes`.
Spreads can be compared, checked for holes and turned into extents, whatever form of metadata they were made from.

One form of the metadata, the affine form (`affine_map`, version 1), describes each rank's shard as strided views of the
parameter.

    {"version": 1, "params": {pattern: {"logical_shape": [...], "ranks": {rank: {"shard_shape": [...], "pieces": [
        {"shape": [...], "source": [offset, strides], "dest": [offset, strides], "locations": [...], "scale": 1.0}]}}}}}

In it, `source` is a strided view of the whole parameter, and `dest` a strided view of the shard; parameter and shard
are row-major. `locations` lists the ranks that have the box; `scale` (a factor by which the values are multiplied) may
be missing. Every entry of `pieces` must be a box in the parameter, and also a box in the shard.

If no metadata describes the cut of a parameter, the family's table of tensor names or the user's mapping rules describe
it. This module does not read tables of tensor names: the caller passes a function (`Cutter`). The `Cutter` is called
once with all parameter names and returns a second function (`Divider`), which is called for each name with the shapes
of the shards.
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
    Intervals,
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
    """A box of a parameter that is stored as a box of one rank's shard of this parameter."""

    start: Shape
    """First index of the box in the whole parameter, one number for each dim."""
    at: Shape
    """First index of the box in the shard, one number for each dim."""
    shape: Shape
    scale: float = 1.0
    """Factor by which the stored values are multiplied; divide by the factor to get the parameter's values."""

    @property
    def size(self) -> int:
        """Return the number of elements in the box."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of one parameter over all tensor-parallel ranks, as explicit boxes."""

    shape: Shape
    """Shape of the whole parameter."""
    shards: tuple[Shape, ...]
    """Shape of each rank's shard."""
    blocks: tuple[tuple[ShardBlock, ...], ...]
    """For each rank, the boxes of the parameter that the rank has; none of the boxes is empty."""

    @property
    def is_scaled(self) -> bool:
        """Whether any rank stores its values multiplied by a factor other than 1."""
        return any(block.scale != 1 for blocks in self.blocks for block in blocks)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return a rank's boxes as `Piece` records of `axes` (boxes with strides); the axes are named `0`, `1`, … after
        the dims.
        """
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
    """A box of a parameter, and the rank that has this box."""

    rank: int
    block: ShardBlock


@dataclass(frozen=True, slots=True)
class Owners:
    """From which rank each box of a parameter is read, and which ranks have further copies of the box."""

    blocks_to_read: tuple[RankBlock, ...]
    """Disjoint boxes, each with the first rank that has the box."""
    copies: tuple[tuple[RankBlock, RankBlock], ...]
    """Pairs of the same box on two ranks: first the box that is read, then its copy."""
    missing: int
    """Number of the parameter's elements that no rank has."""


def cut(shape: Shape, dim: int | None, rule: ChunkRule, ranks: int) -> Spread:
    """Return the spread of a parameter that is cut along `dim` as `rule` describes; if `dim` is None, every rank has
    the whole parameter.

    Raises:
        Refused: with the code SHAPE_MISMATCH if the rule for cutting does not fit the shape.
    """
    shards, blocks = [], []
    for rank in range(ranks):
        positions = place(shape, [MeshCut(dim, ranks, rank, rule)])
        shards.append(tuple(map(count_positions, positions)))
        blocks.append(blocks_at(positions))
    return Spread(shape, tuple(shards), tuple(blocks))


def blocks_at(positions: Sequence[Intervals]) -> tuple[ShardBlock, ...]:
    """Return the non-empty boxes of a shard that has these intervals of each dim of a parameter."""
    blocks = (
        ShardBlock(
            tuple(first for first, _, _ in intervals),
            tuple(at for _, _, at in intervals),
            tuple(last - first for first, last, _ in intervals),
        )
        for intervals in product(*map(_shard_offsets, positions))
    )
    return tuple(block for block in blocks if block.size)


def by_widths(shape: Shape, dim: int, widths: Sequence[Sequence[int]]) -> Spread:
    """Return the spread of a parameter that is a concatenation of blocks along a dim; each block has a width per rank.

    Raises:
        Refused: with the code SHAPE_MISMATCH if the widths do not add up to the size of the dim.
    """
    rules = tuple(Widths(tuple(part_widths)) for part_widths in widths)
    rule: ChunkRule = (
        rules[0] if len(rules) == 1 else PerComponent(tuple(sum(part_widths) for part_widths in widths), rules)
    )
    return cut(shape, dim, rule, len(widths[0]))


def whole(shape: Shape, ranks: int) -> Spread:
    """Return the spread of a parameter that is whole on every rank."""
    return cut(shape, None, Replicated(), ranks)


def _shard_offsets(intervals: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield start and end of each interval of a dim, and the interval's offset in the shard."""
    at = 0
    for start, stop in intervals:
        yield start, stop, at
        at += stop - start


def same(first: Spread, second: Spread) -> bool:
    """Return whether two spreads put every element at the same place, even if they split the parameter into different
    boxes.
    """
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
            # The blocks of both spreads have the same number of elements, so the spreads agree if all elements are
            # common.
            common += shared.size
    return common == sum(block.size for block in first_blocks)


def _overlap(block: ShardBlock, start: Shape, shape: Shape) -> ShardBlock | None:
    """Return the part of a block that is inside a box of the whole parameter; None if block and box are disjoint."""
    low = tuple(map(max, block.start, start))
    high = tuple(min(b + n, s + m) for b, n, s, m in zip(block.start, block.shape, start, shape, strict=True))
    if any(h <= lo for lo, h in zip(low, high, strict=True)):
        return None
    at = tuple(a + lo - s for a, lo, s in zip(block.at, low, block.start, strict=True))
    return ShardBlock(low, at, tuple(h - lo for lo, h in zip(low, high, strict=True)), block.scale)


@lru_cache(4096)
def owners(spread: Spread) -> Owners:
    """Choose the rank from which each box is read, and list the copies of boxes on further ranks."""
    owned: list[RankBlock] = []
    copies: list[tuple[RankBlock, RankBlock]] = []
    for rank, blocks in enumerate(spread.blocks):
        for block in blocks:
            remaining = [block]
            # A later rank owns only those boxes that no earlier rank has; the boxes that an earlier rank has are copies
            # to be compared.
            for owner in tuple(owned):
                copy = _overlap(block, owner.block.start, owner.block.shape)
                original = _overlap(owner.block, block.start, block.shape)
                if copy is not None and original is not None:
                    copies.append((RankBlock(owner.rank, original), RankBlock(rank, copy)))
                    remaining = [remainder for piece in remaining for remainder in _without(piece, copy)]
            owned.extend(RankBlock(rank, piece) for piece in remaining)
    missing = prod(spread.shape) - sum(owned_block.block.size for owned_block in owned)
    return Owners(tuple(owned), tuple(copies), missing)


def _without(block: ShardBlock, hole: ShardBlock) -> Iterator[ShardBlock]:
    """Yield disjoint boxes that together cover the part of a block outside the box `hole`."""
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
        # Only the part that overlaps the hole in this dim is split along the next dim, so the boxes are disjoint.
        low[dim], shape[dim] = first, last - first


def clip_rows(spread: Spread, rows: int) -> Spread:
    """Return the spread of only the first `rows` rows of a parameter; all further rows in the shards become padding."""
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


def fold_dims(spread: Spread, shards: Sequence[Shape]) -> Spread:
    """Return the spread of a parameter whose leading dims are merged, so that the parameter has as many dims as the
    shards.

    Raises:
        Refused: with the code SHAPE_MISMATCH if merging dims does not result in the shards' shapes.
    """
    dims = len(shards[0]) if shards else 0
    extra = len(spread.shape) - dims + 1
    folds = extra > 1 and dims > 0
    merged = tuple((prod(shard[:extra]), *shard[extra:]) if folds else shard for shard in spread.shards)
    if tuple(shards) != merged:  # shapes are checked before folding, since untrusted metadata may claim very many rows
        expected_text, shard_text = (
            ", ".join(str(list(shape)) for shape in shapes[:8]) for shapes in (merged, tuple(shards))
        )
        raise refuse(
            "SHAPE_MISMATCH", f"by the metadata the shards have the shapes {expected_text}, but they have {shard_text}"
        )
    if not folds:
        return spread
    heads = [shard[:extra] for shard in spread.shards]
    blocks = tuple(
        tuple(run for block in blocks_of_rank for run in _fold_block(block, spread.shape[:extra], head))
        for blocks_of_rank, head in zip(spread.blocks, heads, strict=True)
    )
    return Spread((prod(spread.shape[:extra]), *spread.shape[extra:]), merged, blocks)


def _fold_block(block: ShardBlock, whole_head: Shape, shard_head: Shape) -> Iterator[ShardBlock]:
    """Yield the boxes into which a block splits when its leading dims are merged."""
    count = len(whole_head)
    source, dest = row_major(whole_head), row_major(shard_head)
    runs: list[tuple[int, int, int]] = []
    *outer, inner = block.shape[:count]
    for index in product(*map(range, outer)):
        start = sum((b + i) * step for b, i, step in zip(block.start, (*index, 0), source, strict=False))
        at = sum((b + i) * step for b, i, step in zip(block.at, (*index, 0), dest, strict=False))
        # Runs of rows that are adjacent in parameter and shard become one longer run, so that folding whole dims
        # results in a single box.
        if runs and runs[-1][0] + runs[-1][2] == start and runs[-1][1] + runs[-1][2] == at:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + inner)
        else:
            runs.append((start, at, inner))
    for start, at, size in runs:
        yield ShardBlock(
            (start, *block.start[count:]), (at, *block.at[count:]), (size, *block.shape[count:]), block.scale
        )


MAX_PIECES = 1024
"""Maximum number of one parameter's boxes on all ranks together; a real parameter has a few boxes per rank."""


def maps_of(info: CheckedValue) -> dict[str, CheckedValue]:
    """Return name pattern -> affine description, from a model's metadata; the dict is empty if the metadata has no
    affine descriptions.

    Raises:
        Refused: with the code UNSUPPORTED for an unknown version of the affine form; with the code CORRUPT if the
            metadata is malformed.
    """
    affine = info.get(keys.AFFINE)
    if affine is None:
        return {}
    version = affine.get(keys.AFFINE_VERSION)
    if version is None or version.natural() != keys.AFFINE_CURRENT:
        version_text = "no version" if version is None else f"version {version.value}"
        message = f"the {keys.AFFINE} has {version_text}; only version {keys.AFFINE_CURRENT} can be read"
        raise refuse("UNSUPPORTED", message, file=info.file)
    return dict(affine[keys.AFFINE_PARAMS].string_items())


def read_affine(node: CheckedValue, ranks: int) -> Spread:
    """Read the affine description of one parameter.

    Args:
        node: the description, a value of the dict that `maps_of` returns.
        ranks: the tensor-parallel degree of the checkpoint.

    Raises:
        Refused: with the code CORRUPT if a box is outside the parameter or shard, or the boxes do not fill the shards
            exactly once; with the code UNSUPPORTED if a strided view is not a box; with the code SHAPE_MISMATCH if the
            description has a different number of ranks.
    """
    shape = node[keys.LOGICAL_SHAPE].naturals()
    entries = node[keys.RANKS]
    by_rank = {_rank(entries, key): entry for key, entry in entries.items()}
    if sorted(by_rank) != list(range(ranks)):
        message = f"the metadata describes the ranks {sorted(by_rank)[:10]}, but the checkpoint has {ranks} ranks"
        raise refuse("SHAPE_MISMATCH", message, file=node.file, tensor=node.path[-1])
    shards = tuple(by_rank[rank][keys.SHARD_SHAPE].naturals() for rank in range(ranks))
    pieces = [by_rank[rank][keys.PIECES].list() for rank in range(ranks)]
    if sum(map(len, pieces)) > MAX_PIECES:
        raise refuse(
            "UNSUPPORTED",
            f"the metadata cuts it into more than {MAX_PIECES} pieces",
            file=node.file,
            tensor=node.path[-1],
        )
    blocks, ranks_by_box, pieces_with_blocks = [], dict[tuple[Shape, Shape], set[int]](), []
    for rank, rank_pieces in enumerate(pieces):
        blocks_of_rank = []
        for piece in rank_pieces:
            block = _block(piece, shape, shards[rank])
            if not block.size:
                continue
            blocks_of_rank.append(block)
            ranks_by_box.setdefault((block.start, block.shape), set()).add(rank)
            pieces_with_blocks.append((piece, block))
        _check_shard(entries, rank, blocks_of_rank, shards[rank])
        blocks.append(tuple(blocks_of_rank))
    for piece, block in pieces_with_blocks:
        if set(piece[keys.LOCATIONS].naturals()) != ranks_by_box[block.start, block.shape]:
            box_ranks = sorted(ranks_by_box[block.start, block.shape])
            raise piece.fault(f"{keys.LOCATIONS} must list the ranks that hold this piece, {box_ranks}")
    return Spread(shape, shards, tuple(blocks))


def write_affine(spread: Spread) -> dict[str, Any]:
    """Return the affine description of a parameter, as DeepSpeed writes it; `read_affine` is the inverse function."""
    ranks_by_box: dict[tuple[Shape, Shape], list[int]] = {}
    for rank, blocks_of_rank in enumerate(spread.blocks):
        for block in blocks_of_rank:
            ranks_by_box.setdefault((block.start, block.shape), []).append(rank)
    strides = row_major(spread.shape)
    return {
        keys.LOGICAL_SHAPE: list(spread.shape),
        keys.RANKS: {
            rank: {
                keys.SHARD_SHAPE: list(spread.shards[rank]),
                keys.PIECES: [
                    _piece(block, strides, row_major(spread.shards[rank]), ranks_by_box[block.start, block.shape])
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
    if not text.isascii() or not text.isdecimal() or len(text) > len(str(MAX_PIECES)):
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
    """Return the first index of a strided view, which must be a box of a row-major array of shape `full_shape`."""
    offset_and_strides = place.list()
    if len(offset_and_strides) != 2:
        raise place.fault(f"expected an offset and strides, not {len(offset_and_strides)} items")
    offset, strides = offset_and_strides[0].natural(), offset_and_strides[1].naturals()
    if len(sizes) != len(full_shape) or len(strides) != len(full_shape):
        raise place.fault(f"{len(sizes)} sizes and {len(strides)} strides do not fit {len(full_shape)} dims")
    if 0 in sizes:
        return (0,) * len(full_shape)
    dense = row_major(full_shape)
    # The stride of a dim of size 1 is never used, so any stride is accepted for such a dim.
    if any(size > 1 and step != dense_step for size, step, dense_step in zip(sizes, strides, dense, strict=True)):
        message = f"strides {list(strides)} do not select a box of {list(full_shape)}"
        raise refuse("UNSUPPORTED", message, file=place.file, tensor=" > ".join(place.path))
    start = []
    for step in dense:
        # With row-major strides, the offset is a mixed-radix number whose digits are the first index.
        index, offset = divmod(offset, step) if step else (0, offset)
        start.append(index)
    if offset or any(first + size > dim_size for first, size, dim_size in zip(start, sizes, full_shape, strict=True)):
        raise place.fault(f"a box of {list(sizes)} at {start} lies outside the shape {list(full_shape)}")
    return tuple(start)


def _check_shard(entries: CheckedValue, rank: int, blocks: Sequence[ShardBlock], shard: Shape) -> None:
    """Check that the boxes on a rank fill the rank's shard exactly once."""
    filled = sum(block.size for block in blocks)
    # An overlap and a hole of equal size would leave the number of elements right, so overlaps are looked for as well.
    twice = any(
        all(
            a < b + n and b < a + m
            for a, m, b, n in zip(first_block.at, first_block.shape, second_block.at, second_block.shape, strict=True)
        )
        for number, first_block in enumerate(blocks)
        for second_block in blocks[:number]
    )
    if filled != prod(shard) or twice:
        problem = "overlap" if twice else f"have {filled} elements"
        raise entries.fault(f"the pieces of rank {rank} {problem}, but must fill its shard {list(shard)} exactly once")


Divider = Callable[[str, Sequence[Shape]], Division]
"""Function that returns the cut of a parameter, given the parameter's name and its shape on every rank; raises
`Refused` if the cut is unknown."""
Cutter = Callable[[Storage, Sequence[str], Mapping[str, Any]], Divider]
"""Function that returns a `Divider` for a checkpoint, given the checkpoint's files, its parameter names, and model
sizes under the keys of a config.json.

The function raises `Refused` if no table of tensor names contains these names. The sizes come from the checkpoint's own
files, and are needed if the checkpoint has no config.json.
"""

UNKNOWN_CUTS = "the checkpoint does not say how it was cut over the tensor-parallel ranks, so they cannot be joined"
HINT = (
    "A table of tensor names can describe the cuts: give --family NAME and --config FILE, or --rules FILE for a model "
    "without a table. The guide on DeepSpeed checkpoints has an example."
)


def refuse_unknown_cuts(_storage: Storage, names: Sequence[str], _config: Mapping[str, Any]) -> Divider:
    """Refuse every checkpoint; this function is the `Cutter` if the caller passes none.

    Raises:
        Refused: always, with the code UNSUPPORTED.
    """
    raise refuse("UNSUPPORTED", UNKNOWN_CUTS, tensor=names[0] if names else None, hint=HINT)


class TableCuts:
    """The tensor-parallel cuts of a checkpoint according to a table of tensor names, for files without metadata about
    the cuts.

    Args:
        cutter: function that looks up parameter names in the tables of tensor names.
        storage: storage that reads the checkpoint's files.
        names: names of all parameters.
        config: sizes from the checkpoint's files, under the keys of a config.json.

    Raises:
        Refused, UsageError: if no table contains the names.
    """

    def __init__(
        self, cutter: Cutter, storage: Storage, names: Sequence[str], config: Mapping[str, Any] | None = None
    ) -> None:
        self._divide = cutter(storage, names, config or {})

    def spread(self, name: str, shards: Sequence[Shape]) -> Spread:
        """Return how a parameter is distributed over the tensor-parallel ranks.

        Args:
            name: name of the parameter.
            shards: shape of the parameter's shard on each rank.

        Raises:
            Refused: with the code UNSUPPORTED if the table of tensor names lacks the name; with the code SHAPE_MISMATCH
                if the table does not fit the shards' shapes.
            UsageError: with the code UNKNOWN_AXIS or AMBIGUOUS if the table of tensor names needs more information
                about the model.
        """
        division = self._divide(name, shards)
        return cut(division.shape, division.dim, division.rule, len(shards))
