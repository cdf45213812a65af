"""Quantizes a rank's rows to exactly the codes that they have in the whole matrix: each amax is reduced over all ranks.

An *amax* is a largest absolute value, from which a scale is computed. If tiles span several ranks, the amaxes of all
tiles are reduced over these ranks as integers, which preserves NaN. If a tile spans several ranks, a rank has only some
rows of the tile. In place of the missing rows, the rank inserts one row that contains the tile's amax, quantizes, and
removes the row again. So only the kernels implement the rounding rule, and the codes equal those of the matrix
quantized as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from transaxle.encodings.encoding import WHOLE
from transaxle.errors import refuse
from transaxle.quant import kernels
from transaxle.quant.frame import Frame, blank, make_frame
from transaxle.quant.kernels.components import columnwise_of
from transaxle.quant.quantizers import AMAX, COLUMN_SCALE, HISTORY, SCALE, SCALED_FOR, Quantizer, buffers_of, is_cut
from transaxle.quant.tp_share import Share


@dataclass(frozen=True, slots=True)
class RowPlacement:
    """Position of this rank's rows in a matrix, and the ranks that have the remaining rows."""

    start: int
    """Index of this rank's first row in the matrix."""
    whole: int
    """Number of rows of the whole matrix."""
    group: dist.ProcessGroup | None = None
    """Ranks that have the rows of the matrix; None if this rank has all rows."""
    sharing_groups: tuple[dist.ProcessGroup, ...] = ()
    """Groups of ranks with the remaining shares or bands of the whole matrix; all these ranks have the same scale, amax
    and history.
    """


def locate(
    x: torch.Tensor,
    group: dist.ProcessGroup | None,
    start: int | None,
    whole: int | None,
    share: Share | None = None,
    *,
    banded: bool = False,
) -> RowPlacement:
    """Return the position of rows in the whole matrix; if `start` or `whole` is None, the row counts of the ranks are
    summed.

    Args:
        x: this rank's rows.
        group: ranks that have the remaining rows; with `banded`, ranks that have the remaining bands of these rows.
        start: index in the whole matrix of the first row.
        whole: number of rows of the whole matrix, over all ranks.
        share: the tensor-parallel share (part of the matrix) to which the rows belong; None without tensor parallelism.
        banded: whether each rank has only a band (a range of columns) of the rows.

    Raises:
        Refused: with the code SHAPE_MISMATCH if the rows are outside the matrix.
    """
    rows = x.shape[0]
    common = None if share is None else share.common
    other_groups = tuple(each for each in (common, group if banded else None) if each is not None)
    if banded:
        group = None
    if group is not None and (start is None or whole is None):
        counts = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=x.device)
        counts[dist.get_rank(group)] = rows
        dist.all_reduce(counts, group=group)
        rows_of_ranks = counts.tolist()
        start, whole = sum(rows_of_ranks[: dist.get_rank(group)]), sum(rows_of_ranks)
    first, total = start or 0, rows if whole is None else whole
    if first < 0 or first + rows > total:
        raise refuse("SHAPE_MISMATCH", f"rows {first} to {first + rows} lie outside a matrix of {total} rows")
    return RowPlacement(first, total, group, other_groups)


def quantize_to_frame(
    quantizer: Quantizer, x: torch.Tensor, at: RowPlacement, old: Frame | None = None, amax: torch.Tensor | None = None
) -> Frame:
    """Quantize rows of a matrix, or matrices of a stack, and return their buffers as a `Frame`.

    Args:
        quantizer: the quantizer whose encoding and scaling are used.
        x: the rows, [M, K], or the matrices, [E, M, K].
        at: position of the rows in the whole matrix.
        old: previous buffers of the matrix; with delayed scaling, their amax history determines the scale.
        amax: amax of the whole matrix; None means that the amax is computed and reduced over the ranks.
    """
    if x.device.type == "meta":
        empty = blank(quantizer, (at.whole, *x.shape[1:]), x.device)
        rows = empty.map_rows(at.start, x.shape[0], lambda buffer: buffer)
        return replace(rows, shared=empty.shared, blank=False)
    if x.dim() > 2:
        return _quantize_stack(quantizer, x, at)
    if quantizer.encoding.tile == (WHOLE, WHOLE):
        return _quantize_per_tensor(quantizer, x, at, old, amax)
    if quantizer.encoding.has_global and amax is None:
        amax = reduce_max(kernels.amax(x), (at.group, *at.sharing_groups))
    grain = quantizer.grain[0]
    if at.group is not None and (grain > 1 or quantizer.columnwise):
        return _quantize_shared_tiles(quantizer, x, at, amax)
    components = kernels.quantize(
        x, quantizer.encoding, amax=amax, over=quantizer.over, columnwise=quantizer.columnwise
    )
    return _frame_at(quantizer, x, at, components.present())


def _quantize_stack(quantizer: Quantizer, x: torch.Tensor, at: RowPlacement) -> Frame:
    """Quantize each matrix of a stack, in one kernel launch if tiles are the same as in the matrices joined
    along rows.
    """
    count, rows, columns = x.shape
    grain = _grain(quantizer)[0]
    separate = quantizer.encoding.has_global or bool(quantizer.state_sizes) or not grain or rows % grain
    if count and x.numel() and not separate:
        flat = quantize_to_frame(quantizer, x.reshape(count * rows, columns), RowPlacement(0, count * rows))
        layouts = buffers_of(quantizer, (count, rows, columns))
        buffers = {name: buffer.view(layouts[name][1]) for name, buffer in (flat.cut | flat.shared).items()}
    else:
        matrix_amaxes: Sequence[torch.Tensor | None] = [None] * count
        if count and at.sharing_groups and (quantizer.encoding.has_global or not grain):
            amaxes = torch.cat([kernels.amax(matrix) for matrix in x])
            matrix_amaxes = reduce_max(amaxes, at.sharing_groups).split(1)
        frames = [
            quantize_to_frame(quantizer, matrix, RowPlacement(0, rows), amax=amax)
            for matrix, amax in zip(x, matrix_amaxes, strict=True)
        ]
        parts = [frame.cut | frame.shared for frame in frames]
        empty = blank(quantizer, (0, rows, columns), x.device).cut
        names = parts[0] if parts else empty
        buffers = {
            name: stack_buffers([of_part[name] for of_part in parts]) if parts else empty[name] for name in names
        }
    return make_frame(quantizer, buffers, (count, rows, columns), start=at.start, whole=at.whole)


def stack_buffers(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack buffers of several matrices; eight-bit dtypes are stacked as bytes, because torch cannot stack every float8
    dtype.
    """
    kind = buffers[0].dtype
    if kind.itemsize > 1:
        return torch.stack(list(buffers))
    return torch.stack([buffer.view(torch.uint8) for buffer in buffers]).view(kind)


def _frame_at(quantizer: Quantizer, x: torch.Tensor, at: RowPlacement, buffers: dict[str, torch.Tensor]) -> Frame:
    return make_frame(quantizer, buffers, tuple(x.shape), start=at.start, whole=at.whole)


def _reduce_max(amax: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Reduce amaxes over ranks by element, as integers, whose order is that of the floats, with NaN as the largest."""
    if group is not None:
        dist.all_reduce(amax.view(torch.int32), op=dist.ReduceOp.MAX, group=group)
    return amax


def reduce_max(amax: torch.Tensor, groups: Sequence[dist.ProcessGroup | None]) -> torch.Tensor:
    """Return the largest amax over all ranks of several groups."""
    for group in groups:
        _reduce_max(amax, group)
    return amax


def _quantize_per_tensor(
    quantizer: Quantizer, x: torch.Tensor, at: RowPlacement, old: Frame | None, amax: torch.Tensor | None
) -> Frame:
    amax = reduce_max(kernels.amax(x), (at.group, *at.sharing_groups)) if amax is None else amax
    if not quantizer.state_sizes:
        return _frame_at(quantizer, x, at, kernels.quantize(x, quantizer.encoding, amax=amax).present())
    # Under FSDP2 a rank without rows keeps blank buffers, but its amax history is the same as on the other ranks.
    if old is None or (old.blank and len(x)) or HISTORY not in old.shared:
        history, scaled_for = torch.zeros(quantizer.state_sizes[HISTORY], device=x.device), amax.clone()
    else:
        history = old.shared[HISTORY]
        # The largest amax is 0 if all values so far were zero.
        scaled_for = torch.where(old.shared[SCALED_FOR] > 0, old.shared[SCALED_FOR], amax)
    buffers = kernels.quantize(x, quantizer.encoding, amax=scaled_for).present()
    history = torch.cat([amax, history[:-1]])
    peak = history.max().reshape(1)
    following = torch.where(torch.isfinite(peak) & (peak > 0), peak, scaled_for)
    return _frame_at(quantizer, x, at, buffers | {HISTORY: history, SCALED_FOR: following})


def _quantize_shared_tiles(quantizer: Quantizer, x: torch.Tensor, at: RowPlacement, amax: torch.Tensor | None) -> Frame:
    """Quantize this rank's rows if their tiles may include rows on other ranks."""
    encoding, columns = quantizer.encoding, x.shape[1]
    buffers: dict[str, torch.Tensor] = {} if amax is None else {AMAX: amax}
    grain = _grain(quantizer)
    tiles = _reduce_max(_tile_amax(x, grain, at), at.group)
    full, skip = _complete_tiles(x, grain, tiles, at)
    components = kernels.quantize(full, encoding, amax=amax, over=quantizer.over, columnwise=quantizer.columnwise)
    for name, buffer in components.present().items():
        if is_cut(encoding, name):
            buffers[name] = buffer[skip : skip + x.shape[0]].contiguous()
    for name in (SCALE, COLUMN_SCALE):
        if name in components.present() and name not in buffers:
            # Quantizing the matrix of amaxes, with tiles of one element, results in the scales of the tiles.
            if name == COLUMN_SCALE and grain[1] > 1:  # repeat each scale for the columns of its tile
                tiles = tiles.repeat_interleave(grain[1], 1)[:, :columns]
            scales = kernels.quantize(tiles.to(x.dtype), replace(encoding, tile=(1, 1)), amax=amax).scale_inv
            assert scales is not None
            buffers[name] = scales.reshape(tiles.shape)
    return _frame_at(quantizer, x, at, buffers)


def _grain(quantizer: Quantizer) -> tuple[int, int]:
    """Return the rows and columns that share an amax; for codes in both directions, the union of the two tiles."""
    turned = columnwise_of(quantizer.encoding) if quantizer.columnwise and quantizer.over is None else None
    return quantizer.grain if turned is None else (turned.tile[0], turned.tile[1])


def _tile_amax(x: torch.Tensor, grain: tuple[int, int], at: RowPlacement) -> torch.Tensor:
    """Return the amax of each tile of the whole matrix as [tiles down, tiles across]; 0 for tiles without rows on this
    rank.
    """
    (rows, columns), (high, wide) = x.shape, grain
    across, first = -(-columns // wide), at.start // high
    tile_rows = -(-(at.start + rows) // high) - first
    tiles = torch.zeros((-(-at.whole // high), across), dtype=torch.float32, device=x.device)
    if x.numel():
        size = x.new_zeros((tile_rows * high, across * wide))
        skip = at.start - first * high
        size[skip : skip + rows, :columns] = x.detach().abs()
        tiles[first : first + tile_rows] = size.view(tile_rows, high, across, wide).amax((1, 3)).float()
    return tiles


def _complete_tiles(
    x: torch.Tensor, grain: tuple[int, int], tiles: torch.Tensor, at: RowPlacement
) -> tuple[torch.Tensor, int]:
    """Insert rows that complete the tiles at both ends; return all rows, and the number of rows inserted at the top."""
    high, wide = grain
    rows, columns = x.shape
    end = at.start + rows
    before = at.start % high
    after = min(-(-end // high) * high, at.whole) - end
    if not rows or not (before or after):
        return x.detach(), 0
    padded = x.new_zeros((before + rows + after, columns))
    padded[before : before + rows] = x.detach()
    for missing, row, tile in ((before, 0, at.start // high), (after, before + rows, (end - 1) // high)):
        if missing:
            padded[row] = tiles[tile].repeat_interleave(wide)[:columns].to(x.dtype)
    return padded, before
