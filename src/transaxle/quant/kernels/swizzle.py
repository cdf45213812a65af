"""Scales in the order in which tensor cores of compute capability 10 read them: torch's `SWIZZLE_32_4_4`.

Scales [rows, columns] are padded with zeros to blocks of 128 x 4, and a block is 512 bytes: the four scales of row 0,
those of rows 32, 64 and 96, those of row 1, and so on. Where rows are in groups, each group is padded by itself.
Source: cuBLAS, "1D Block Scaling Factors Layout". What is in files is never in this order.
"""

from __future__ import annotations

import torch
from torch.nn import functional

HIGH, WIDE = 128, 4
"""Rows and columns of a block."""
_PART = 32
"""Rows whose scales lie 16 bytes apart."""


def room(rows: int, columns: int, groups: int) -> tuple[int, int]:
    """Return rows and columns that are enough for scales of any groups of rows, each padded by itself."""
    return (rows + groups * (HIGH - 1)) // HIGH * HIGH, -(-columns // WIDE) * WIDE


def swizzled(scales: torch.Tensor) -> torch.Tensor:
    """Return matrices of scales [..., rows, columns], eight bits each, in that order: [..., bytes]."""
    raw = scales.view(torch.uint8)
    raw = functional.pad(raw, (0, -raw.shape[-1] % WIDE, 0, -raw.shape[-2] % HIGH))
    *many, rows, columns = raw.shape
    blocks = raw.reshape(-1, rows // HIGH, HIGH // _PART, _PART, columns // WIDE, WIDE)
    return blocks.permute(0, 1, 4, 3, 2, 5).reshape(*many, rows * columns).view(scales.dtype)


def swizzled_groups(scales: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the scales of groups of rows in that order, each group padded by itself: [room rows, room columns].

    Nothing is read back: the size is that of any groups, and what is past the last one's is zeros.

    Args:
        scales: [rows, columns], eight bits each.
        offsets: row at which each group ends, int32 [groups], none before the one before it.
    """
    rows, columns = scales.shape
    high, wide = room(rows, columns, offsets.shape[0])
    if not rows or not offsets.shape[0]:
        return torch.zeros((high, wide), dtype=torch.uint8, device=scales.device).view(scales.dtype)
    before = functional.pad(offsets[:-1], (1, 0))
    padded = (offsets - before + HIGH - 1) // HIGH * HIGH
    ends = padded.cumsum(0)
    places = torch.arange(high, device=scales.device)
    group = torch.searchsorted(ends, places, right=True).clamp(max=offsets.shape[0] - 1)
    source = places - (ends - padded)[group] + before[group]
    chosen = scales.view(torch.uint8)[source.clamp(0, rows - 1)]
    padded_scales = chosen.masked_fill((source >= offsets[group]).unsqueeze(1), 0)
    return swizzled(padded_scales).view(high, wide).view(scales.dtype)
