"""Shards: one tensor-parallel rank's share of a tensor, and the whole assembled from them along its spread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transaxle.axes.geometry.strided import row_major
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.catalog import BITS, Entry, Extent, Twin
from transaxle.formats.deepspeed.metadata.spread import Owners, RankBlock, Shape, ShardBlock, Spread, owners, whole


@dataclass(frozen=True, slots=True)
class RankShard:
    """One rank's share of a tensor, whole over its data-parallel group."""

    dtype: str
    shape: Shape
    extents: tuple[Extent, ...]
    """Chunks that tile it."""
    file: str
    """A file that describes it, for errors."""


def merge_shards(name: str, shards: Sequence[RankShard], spread: Spread) -> tuple[Entry, list[Twin]]:
    """Put shards together.

    Args:
        name: of the whole tensor.
        shards: what each rank holds, in rank order.
        spread: how the whole is spread over them.

    Returns:
        the whole tensor, and every copy that must be equal to what was taken.

    Raises:
        Refused: DTYPE_MIXED; INCOMPLETE where no rank holds an element; LOSSY for scaled moments (see `reader`).
    """
    # A rank without elements has an empty tensor, whose dtype does not matter.
    holders = [shard for shard, blocks in zip(shards, spread.blocks, strict=True) if blocks]
    if len({shard.dtype for shard in holders}) > 1:
        kinds = ", ".join(dict.fromkeys(shard.dtype for shard in holders))
        raise refuse("DTYPE_MIXED", f"its shards have different dtypes: {kinds}", file=shards[0].file, tensor=name)
    dtype = (holders or list(shards))[0].dtype
    owned: Owners = owners(spread)
    if owned.missing:
        message = f"no rank holds {owned.missing} of its elements"
        raise refuse("INCOMPLETE", message, file=shards[0].file, tensor=name)
    chunks = tuple(extent for holding in owned.holdings for extent in _taken(shards, holding, holding.block.start))
    twins = [
        Twin(
            _copy(name, dtype, shards, first),
            _copy(name, dtype, shards, second),
            f"tensor-parallel ranks {first.rank} and {second.rank} hold the same part of it",
            replica=True,
        )
        for first, second in owned.copies
    ]
    return Entry(name, dtype, spread.shape, chunks), twins


def unspread(shards: Sequence[RankShard]) -> Spread:
    """Return the spread of a tensor that every rank holds."""
    return whole(shards[0].shape, len(shards))


def _copy(name: str, dtype: str, shards: Sequence[RankShard], holding: RankBlock) -> Entry:
    origin = (0,) * len(holding.block.shape)
    return Entry(name, dtype, holding.block.shape, tuple(_taken(shards, holding, origin)))


def _taken(shards: Sequence[RankShard], holding: RankBlock, start: Shape) -> Iterator[Extent]:
    """Yield the chunks of a rank's block as chunks of a tensor in which the block begins at `start`."""
    shard, block = shards[holding.rank], holding.block
    for extent in shard.extents:
        low = tuple(map(max, extent.start, block.at))
        high = tuple(
            min(e + n, b + m) for e, n, b, m in zip(extent.start, extent.shape, block.at, block.shape, strict=True)
        )
        if any(stop_index <= start_index for start_index, stop_index in zip(low, high, strict=True)):
            continue
        sizes = tuple(stop_index - start_index for start_index, stop_index in zip(low, high, strict=True))
        strides = extent.strides or row_major(extent.shape)
        # Elements of the extent before the part that is taken.
        skipped = sum((a - b) * step for a, b, step in zip(low, extent.start, strides, strict=True))
        yield Extent(
            tuple(s + a - b for s, a, b in zip(start, low, block.at, strict=True)),
            sizes,
            extent.file,
            extent.offset + skipped * BITS[shard.dtype] // 8,
            None if _dense(sizes, strides) else strides,
        )


def _dense(shape: Shape, strides: Shape) -> bool:
    return all(size == 1 or step == want for size, step, want in zip(shape, strides, row_major(shape), strict=True))


def scaled(spread: Spread) -> ShardBlock | None:
    """Return a block with scaled values; None if there is none."""
    return next((block for blocks in spread.blocks for block in blocks if block.scale != 1), None)


def scaled_moment(name: str, block: ShardBlock, file: str) -> TransaxleError:
    """Build the refusal of optimizer state that belongs to a scaled parameter."""
    message = (
        f"its parameter is stored multiplied by {block.scale}: the moments could be divided too, but the optimizer's "
        "settings could not, so training would continue differently"
    )
    return refuse("UNSUPPORTED", message, file=file, tensor=name)
