"""The affine form of the metadata, `affine_map` version 1: each rank's shard as strided views of the whole parameter.

    {"version": 1, "params": {pattern: {"logical_shape": [...], "ranks": {rank: {"shard_shape": [...], "pieces": [
        {"shape": [...], "source": [offset, strides], "dest": [offset, strides], "locations": [...], "scale": 1.0}]}}}}}

`source` is in the whole parameter, `dest` in the shard, both row-major; `locations` are the ranks that hold the piece;
`scale` may be missing. Every piece must be a box of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from transaxle.axes.geometry.strided import row_major
from transaxle.errors import refuse
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.checked_value import CheckedValue
from transaxle.formats.deepspeed.metadata.spread import Shape, ShardBlock, Spread

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


def read(node: CheckedValue, ranks: int) -> Spread:
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


def write(spread: Spread) -> dict[str, Any]:
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
