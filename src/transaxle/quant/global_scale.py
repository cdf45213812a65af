"""Quantize a rank's rows exactly as if the whole matrix were here: amaxes are reduced over all ranks.

Where a tile lies on several ranks, the amaxes of all tiles are reduced over them, as integers, which keeps NaN. A rank
may then hold only some rows of a tile. In place of the others it puts one row that contains the tile's amax, quantizes,
and drops that row. So only the kernels know the rule for codes, and the bits are those of the matrix in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from transaxle.encodings.encoding import WHOLE
from transaxle.errors import refuse
from transaxle.quant import kernels
from transaxle.quant.frame import Frame, blank, framed
from transaxle.quant.kernels.components import columnwise_of
from transaxle.quant.quantizers import AMAX, COLUMN_SCALE, HISTORY, SCALE, SCALED_FOR, Quantizer, buffers_of, is_cut
from transaxle.quant.tp_share import Share


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a matrix some rows lie."""

    start: int
    """The first of them."""
    whole: int
    """Rows of the matrix."""
    group: dist.ProcessGroup | None = None
    """Ranks that have its rows; None where all of them are here."""
    others: tuple[dist.ProcessGroup, ...] = ()
    """Ranks that have other tiles of what this matrix is a share or a band of, and one scale, amax and history with it.
    """


def place(
    x: torch.Tensor,
    group: dist.ProcessGroup | None,
    start: int | None,
    whole: int | None,
    share: Share | None = None,
    *,
    banded: bool = False,
) -> Place:
    """Return where rows lie in the whole matrix; what is not given follows from the row counts of all ranks.

    Args:
        x: the rows.
        group: ranks that have the others; if these rows are banded, those that have the other bands of them.
        start: the first of them.
        whole: how many the matrix has.
        share: what the matrix is a part of.
        banded: whether these are bands of rows.

    Raises:
        Refused: `SHAPE_MISMATCH` for rows that are not inside.
    """
    rows = x.shape[0]
    common = None if share is None else share.common
    others = tuple(each for each in (common, group if banded else None) if each is not None)
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
    return Place(first, total, group, others)


def frame_of(
    quantizer: Quantizer, x: torch.Tensor, at: Place, old: Frame | None = None, most: torch.Tensor | None = None
) -> Frame:
    """Quantize rows of a matrix, or matrices of a stack.

    Args:
        quantizer: how.
        x: [M, K] or [E, M, K].
        at: where they lie.
        old: what a matrix replaces; its history decides the scale in delayed scaling.
        most: the amax of the whole matrix; None: it is computed and reduced here.
    """
    if x.device.type == "meta":
        empty = blank(quantizer, (at.whole, *x.shape[1:]), x.device)
        rows = empty.taken(at.start, x.shape[0], lambda buffer: buffer)
        return replace(rows, shared=empty.shared, blank=False)
    if x.dim() > 2:
        return _stack(quantizer, x, at)
    if quantizer.encoding.tile == (WHOLE, WHOLE):
        return _per_tensor(quantizer, x, at, old, most)
    if quantizer.encoding.has_global and most is None:
        most = largest_of_all(kernels.amax(x), (at.group, *at.others))
    grain = quantizer.grain[0]
    if at.group is not None and (grain > 1 or quantizer.columnwise):
        return _shared(quantizer, x, at, most)
    components = kernels.quantize(
        x, quantizer.encoding, amax=most, over=quantizer.over, columnwise=quantizer.columnwise
    )
    return _frame(quantizer, x, at, components.present())


def _stack(quantizer: Quantizer, x: torch.Tensor, at: Place) -> Frame:
    """Quantize each matrix for itself; in one go where matrices below each other have the same tiles."""
    count, rows, columns = x.shape
    grain = _grain(quantizer)[0]
    alone = quantizer.encoding.has_global or bool(quantizer.state_sizes) or not grain or rows % grain
    if count and x.numel() and not alone:
        flat = frame_of(quantizer, x.reshape(count * rows, columns), Place(0, count * rows))
        wanted = buffers_of(quantizer, (count, rows, columns))
        buffers = {name: buffer.view(wanted[name][1]) for name, buffer in (flat.cut | flat.shared).items()}
    else:
        most: Sequence[torch.Tensor | None] = [None] * count
        if count and at.others and (quantizer.encoding.has_global or not grain):
            amaxes = torch.cat([kernels.amax(matrix) for matrix in x])
            most = largest_of_all(amaxes, at.others).split(1)
        each = [frame_of(quantizer, matrix, Place(0, rows), most=amax) for matrix, amax in zip(x, most, strict=True)]
        parts = [frame.cut | frame.shared for frame in each]
        empty = blank(quantizer, (0, rows, columns), x.device).cut
        names = parts[0] if parts else empty
        buffers = {name: stacked([of_part[name] for of_part in parts]) if parts else empty[name] for name in names}
    return framed(quantizer, buffers, (count, rows, columns), start=at.start, whole=at.whole)


def stacked(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack the buffers of several matrices; those of 8 bits as bytes, since torch cannot stack every float8 type."""
    kind = buffers[0].dtype
    if kind.itemsize > 1:
        return torch.stack(list(buffers))
    return torch.stack([buffer.view(torch.uint8) for buffer in buffers]).view(kind)


def _frame(quantizer: Quantizer, x: torch.Tensor, at: Place, buffers: dict[str, torch.Tensor]) -> Frame:
    return framed(quantizer, buffers, tuple(x.shape), start=at.start, whole=at.whole)


def _largest(amax: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The largest of the ranks' amaxes, element by element: as integers their order is the same, and NaN is above."""
    if group is not None:
        dist.all_reduce(amax.view(torch.int32), op=dist.ReduceOp.MAX, group=group)
    return amax


def largest_of_all(amax: torch.Tensor, groups: Sequence[dist.ProcessGroup | None]) -> torch.Tensor:
    """The largest of all ranks of several groups."""
    for group in groups:
        _largest(amax, group)
    return amax


def _per_tensor(
    quantizer: Quantizer, x: torch.Tensor, at: Place, old: Frame | None, most: torch.Tensor | None
) -> Frame:
    most = largest_of_all(kernels.amax(x), (at.group, *at.others)) if most is None else most
    if not quantizer.state_sizes:
        return _frame(quantizer, x, at, kernels.quantize(x, quantizer.encoding, amax=most).present())
    # A rank that FSDP2 gave no rows never has any copied into its frame, but knows the history like the others.
    if old is None or (old.blank and len(x)) or HISTORY not in old.shared:
        history, scaled_for = torch.zeros(quantizer.state_sizes[HISTORY], device=x.device), most.clone()
    else:
        history = old.shared[HISTORY]
        scaled_for = torch.where(old.shared[SCALED_FOR] > 0, old.shared[SCALED_FOR], most)  # 0: only zeros until now
    buffers = kernels.quantize(x, quantizer.encoding, amax=scaled_for).present()
    history = torch.cat([most, history[:-1]])
    peak = history.max().reshape(1)
    following = torch.where(torch.isfinite(peak) & (peak > 0), peak, scaled_for)
    return _frame(quantizer, x, at, buffers | {HISTORY: history, SCALED_FOR: following})


def _shared(quantizer: Quantizer, x: torch.Tensor, at: Place, most: torch.Tensor | None) -> Frame:
    """Quantize rows some of whose tiles may lie on several ranks."""
    encoding, columns = quantizer.encoding, x.shape[1]
    buffers: dict[str, torch.Tensor] = {} if most is None else {AMAX: most}
    grain = _grain(quantizer)
    tiles = _largest(_tile_amax(x, grain, at), at.group)
    full, skip = _stand_in(x, grain, tiles, at)
    components = kernels.quantize(full, encoding, amax=most, over=quantizer.over, columnwise=quantizer.columnwise)
    for name, buffer in components.present().items():
        if is_cut(encoding, name):
            buffers[name] = buffer[skip : skip + x.shape[0]].contiguous()
    for name in (SCALE, COLUMN_SCALE):
        if name in components.present() and name not in buffers:
            # A matrix of the amaxes with tiles of one element has the scales of the tiles they are of.
            if name == COLUMN_SCALE and grain[1] > 1:  # each of several columns has the scale
                tiles = tiles.repeat_interleave(grain[1], 1)[:, :columns]
            scales = kernels.quantize(tiles.to(x.dtype), replace(encoding, tile=(1, 1)), amax=most).scale_inv
            assert scales is not None
            buffers[name] = scales.reshape(tiles.shape)
    return _frame(quantizer, x, at, buffers)


def _grain(quantizer: Quantizer) -> tuple[int, int]:
    """Elements along rows and columns that share an amax, of both directions together if there are both."""
    turned = columnwise_of(quantizer.encoding) if quantizer.columnwise and quantizer.over is None else None
    return quantizer.grain if turned is None else (turned.tile[0], turned.tile[1])


def _tile_amax(x: torch.Tensor, grain: tuple[int, int], at: Place) -> torch.Tensor:
    """Largest magnitude in each tile of the whole matrix, 0 where none of it is here: [tiles down, tiles across]."""
    (rows, columns), (high, wide) = x.shape, grain
    across, first = -(-columns // wide), at.start // high
    here = -(-(at.start + rows) // high) - first
    tiles = torch.zeros((-(-at.whole // high), across), dtype=torch.float32, device=x.device)
    if x.numel():
        size = x.new_zeros((here * high, across * wide))
        skip = at.start - first * high
        size[skip : skip + rows, :columns] = x.detach().abs()
        tiles[first : first + here] = size.view(here, high, across, wide).amax((1, 3)).float()
    return tiles


def _stand_in(x: torch.Tensor, grain: tuple[int, int], tiles: torch.Tensor, at: Place) -> tuple[torch.Tensor, int]:
    """Return the rows completed to whole tiles, and how many were put before them."""
    high, wide = grain
    rows, columns = x.shape
    end = at.start + rows
    before = at.start % high
    after = min(-(-end // high) * high, at.whole) - end
    if not rows or not (before or after):
        return x.detach(), 0
    full = x.new_zeros((before + rows + after, columns))
    full[before : before + rows] = x.detach()
    for missing, row, tile in ((before, 0, at.start // high), (after, before + rows, (end - 1) // high)):
        if missing:
            full[row] = tiles[tile].repeat_interleave(wide)[:columns].to(x.dtype)
    return full, before
