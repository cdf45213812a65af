"""The buffers of a quantized matrix as torch tensors: which there are, of what dtype and shape.

Scales in the order in which tensor cores of compute capability 10 read them: torch's `SWIZZLE_32_4_4`.

Scales [rows, columns] are padded with zeros to blocks of 128 x 4, and a block is 512 bytes: the four scales of row 0,
those of rows 32, 64 and 96, those of row 1, and so on. Where rows are in groups, each group is padded by itself.
Source: cuBLAS, "1D Block Scaling Factors Layout". What is in files is never in this order.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch.nn import functional

from transaxle.encodings.encoding import Encoding
from transaxle.errors import Refusal, Where, gathered, refuse

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


DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.uint8,
    "F32": torch.float32,
}
"""Torch dtype of a buffer by its safetensors code; codes of 4 bits lie two to a byte, the low nibble first."""


@dataclass(frozen=True, slots=True)
class Components:
    """A quantized matrix [M, K]: plain tensors, compact (no padding, and not swizzled unless that was asked for)."""

    data: torch.Tensor | None = None
    """Codes, [M, K]; of 4 bits [M, K / 2]. None where only the columnwise ones were asked for."""
    scale_inv: torch.Tensor | None = None
    """What codes are multiplied by, one for each tile: [tiles down, tiles across]; of a whole tensor [1]."""
    amax: torch.Tensor | None = None
    """nvfp4 only: the largest magnitude of the whole tensor, float32 [1]."""
    columnwise_data: torch.Tensor | None = None
    """Codes with tiles that run down the columns, in the places of the others: [M, K], of 4 bits [M, K / 2]."""
    columnwise_scale_inv: torch.Tensor | None = None
    """Their scales: [tiles down, tiles across]."""

    def present(self) -> dict[str, torch.Tensor]:
        """Return the buffers that there are, by name, in the order of the fields."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: buffer for name, buffer in named.items() if buffer is not None}


def columnwise_of(encoding: Encoding) -> Encoding | None:
    """Return the encoding of the columnwise buffers; None for a format that has none.

    mxfp8 and nvfp4 have them, with the two sides of a tile swapped. For other formats quantize the transpose (`x.t()`).
    """
    rows, columns = encoding.tile
    if (encoding.scale, encoding.code_bits) not in (("F8_E8M0", 8), ("F8_E4M3", 4)):
        return None
    return replace(encoding, tile=(columns, rows))


def layout(
    encoding: Encoding, shape: tuple[int, int], *, rowwise: bool = True, columnwise: bool = False
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each buffer of a matrix, by the names of `Components`.

    Raises:
        Refused: `UNSUPPORTED` for columnwise buffers of a format that has none; `SHAPE_MISMATCH` for codes of 4 bits
            in rows of odd length.
    """
    turned = columnwise_of(encoding)
    if columnwise and turned is None:
        raise refuse(
            "UNSUPPORTED",
            f"{encoding.name} has no separate columnwise codes",
            hint="Quantize the transposed matrix instead: quantize(x.t(), ...).",
        )
    if encoding.code_bits == 4 and shape[1] % 2:
        raise refuse(
            "SHAPE_MISMATCH",
            f"rows of {shape[1]} 4-bit codes do not fill whole bytes; the number of columns must be even",
        )
    buffers: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for wanted, of, stem in ((rowwise, encoding, ""), (columnwise, turned, "columnwise_")):
        if wanted and of is not None:
            whole = of.tile == (0, 0)
            buffers[f"{stem}data"] = (DTYPES[of.code], (shape[0], shape[1] * of.code_bits // 8))
            buffers[f"{stem}scale_inv"] = (DTYPES[of.scale], (1,) if whole else of.grid(shape))
    if encoding.has_global:
        buffers["amax"] = (torch.float32, (1,))
    return buffers


def group_layout(
    encoding: Encoding, shape: tuple[int, int], groups: int, *, rowwise: bool, columnwise: bool, swizzled: bool = False
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each buffer of a matrix whose rows are quantized group by group.

    Each group has its own amax and scale for the tensor. Tiles of several rows start anew in each group, so there is
    one row of tiles more for each group than the matrix alone would have. Swizzled scales are padded group by group.

    Raises:
        Refused: see `layout`.
    """
    buffers = layout(encoding, shape, rowwise=rowwise, columnwise=columnwise)
    turned = columnwise_of(encoding)
    for name, high in (("scale_inv", encoding.tile[0]), ("columnwise_scale_inv", turned.tile[0] if turned else 1)):
        if name in buffers and high == 0:
            buffers[name] = buffers[name][0], (groups,)
        elif name in buffers and high > 1:
            dtype, grid = buffers[name]
            buffers[name] = dtype, (shape[0] // high + groups, grid[1])
    if swizzled:
        dtype, grid = buffers["scale_inv"]
        buffers["scale_inv"] = dtype, room(grid[0], grid[1], groups)
    if encoding.has_global:
        buffers["amax"] = (torch.float32, (groups,))
    return buffers


def first_tiles(offsets: torch.Tensor, rows: int, high: int) -> torch.Tensor:
    """Return the row of tiles at which each group begins: int64 [groups], on the device of the offsets.

    Args:
        offsets: row at which each group ends.
        rows: of the matrix.
        high: rows of a tile.
    """
    ends = offsets.to(torch.int64).clamp(0, rows)
    tiles = (torch.diff(ends, prepend=ends.new_zeros(1)).clamp(min=0) + high - 1) // high
    return tiles.cumsum(0) - tiles


def allocated(wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device) -> Components:
    """Make the buffers, uninitialized."""
    return Components(
        **{name: torch.empty(shape, dtype=dtype, device=device) for name, (dtype, shape) in wanted.items()}
    )


def fitting(
    components: Components, wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device
) -> Components:
    """Return the wanted buffers, after checking that each has the right dtype, shape, device and unit column stride.

    Raises:
        Refused: `MISSING_TENSOR`, `DTYPE_MISMATCH`, `SHAPE_MISMATCH` or `UNSUPPORTED`: all that is wrong, at once.
    """
    present, wrong = components.present(), []
    for name, (dtype, shape) in wanted.items():
        buffer = present.get(name)
        where = Where(tensor=name)
        if buffer is None:
            wrong.append(Refusal("MISSING_TENSOR", f"the buffer {name!r} is missing", where))
        elif buffer.dtype != dtype:
            wrong.append(Refusal("DTYPE_MISMATCH", f"expected {dtype}, got {buffer.dtype}", where))
        elif tuple(buffer.shape) != shape:
            wrong.append(Refusal("SHAPE_MISMATCH", f"expected {list(shape)}, got {list(buffer.shape)}", where))
        elif buffer.device != device:
            wrong.append(Refusal("UNSUPPORTED", f"it is on {buffer.device}, but the matrix is on {device}", where))
        elif buffer.shape[-1] > 1 and buffer.stride(-1) != 1:
            wrong.append(Refusal("UNSUPPORTED", "its rows must be contiguous", where))
    if wrong:
        raise gathered(wrong)
    return Components(**{name: present[name] for name in wanted})
