"""The buffers of a quantized matrix as torch tensors: which buffers an encoding has, with dtypes and shapes.

**Swizzled scales** have the order in which tensor cores of compute capability 10 read them: torch's `SWIZZLE_32_4_4`.
Scales [rows, columns] are padded with zeros to blocks of 128 x 4. A block is 512 bytes: the four scales of row 0, those
of rows 32, 64 and 96, those of row 1, and so on. If rows are in groups, each group is padded separately. Source:
cuBLAS, "1D Block Scaling Factors Layout". In files, scales are never swizzled.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch.nn import functional

from transaxle.encodings.encoding import Encoding
from transaxle.errors import Refusal, Where, gathered, refuse

HIGH, WIDE = 128, 4
"""Number of rows and of columns of a block of swizzled scales."""
_PART = 32
"""Number of adjacent rows whose scales are 16 bytes apart in swizzled order."""


def padded_shape(rows: int, columns: int, groups: int) -> tuple[int, int]:
    """Return numbers of rows and columns that suffice for the scales of any division into groups, each padded
    separately.
    """
    return (rows + groups * (HIGH - 1)) // HIGH * HIGH, -(-columns // WIDE) * WIDE


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Return matrices of eight-bit scales [..., rows, columns] in swizzled order, as [..., bytes]."""
    raw = scales.view(torch.uint8)
    raw = functional.pad(raw, (0, -raw.shape[-1] % WIDE, 0, -raw.shape[-2] % HIGH))
    *leading, rows, columns = raw.shape
    blocks = raw.reshape(-1, rows // HIGH, HIGH // _PART, _PART, columns // WIDE, WIDE)
    return blocks.permute(0, 1, 4, 3, 2, 5).reshape(*leading, rows * columns).view(scales.dtype)


def swizzle_groups(scales: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the scales of groups of rows in swizzled order, each group padded separately, in the shape of
    `padded_shape`.

    Nothing is copied from the device to the host: the size suffices for any groups, and rows after the last group are
    zeros.

    Args:
        scales: scales of the rows, [rows, columns], eight bits each.
        offsets: for each group, the row after its last row, int32 [groups], not decreasing.
    """
    rows, columns = scales.shape
    high, wide = padded_shape(rows, columns, offsets.shape[0])
    if not rows or not offsets.shape[0]:
        return torch.zeros((high, wide), dtype=torch.uint8, device=scales.device).view(scales.dtype)
    starts = functional.pad(offsets[:-1], (1, 0))
    padded = (offsets - starts + HIGH - 1) // HIGH * HIGH
    ends = padded.cumsum(0)
    target_rows = torch.arange(high, device=scales.device)
    group = torch.searchsorted(ends, target_rows, right=True).clamp(max=offsets.shape[0] - 1)
    source = target_rows - (ends - padded)[group] + starts[group]
    source_scales = scales.view(torch.uint8)[source.clamp(0, rows - 1)]
    padded_scales = source_scales.masked_fill((source >= offsets[group]).unsqueeze(1), 0)
    return swizzle(padded_scales).view(high, wide).view(scales.dtype)


DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.uint8,
    "F32": torch.float32,
}
"""Safetensors code -> torch dtype of a buffer; 4-bit codes are stored two to a byte, the low nibble first."""


@dataclass(frozen=True, slots=True)
class Components:
    """The buffers of a quantized matrix [M, K] as plain tensors: without padding, and not swizzled unless requested."""

    data: torch.Tensor | None = None
    """Codes, [M, K]; for 4-bit codes, [M, K / 2]. None if only columnwise codes were requested."""
    scale_inv: torch.Tensor | None = None
    """Factors of the codes: one for each tile, [tiles down, tiles across], or one for the whole tensor, [1]."""
    amax: torch.Tensor | None = None
    """For nvfp4 only: the largest magnitude of the whole tensor, float32 [1]."""
    columnwise_data: torch.Tensor | None = None
    """Codes whose tiles run down the columns, in the same element order: [M, K], for 4-bit codes [M, K / 2]."""
    columnwise_scale_inv: torch.Tensor | None = None
    """Factors of the columnwise codes: [tiles down, tiles across]."""

    def present(self) -> dict[str, torch.Tensor]:
        """Return name -> buffer for the buffers that are not None, in the order of the fields."""
        all_buffers = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: buffer for name, buffer in all_buffers.items() if buffer is not None}


def columnwise_of(encoding: Encoding) -> Encoding | None:
    """Return the encoding of the columnwise buffers; None for an encoding without columnwise buffers.

    mxfp8 and nvfp4 have columnwise buffers, with transposed tiles. For other encodings, quantize the transpose
    (`x.t()`).
    """
    rows, columns = encoding.tile
    if (encoding.scale, encoding.code_bits) not in (("F8_E8M0", 8), ("F8_E4M3", 4)):
        return None
    return replace(encoding, tile=(columns, rows))


def layout(
    encoding: Encoding, shape: tuple[int, int], *, rowwise: bool = True, columnwise: bool = False
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return name of a field of `Components` -> (dtype, shape), for each buffer of a matrix.

    Raises:
        Refused: with the code UNSUPPORTED if columnwise buffers are requested for an encoding without them; with the
            code SHAPE_MISMATCH if 4-bit codes are in rows of odd length.
    """
    columnwise_encoding = columnwise_of(encoding)
    if columnwise and columnwise_encoding is None:
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
    for requested, side_encoding, stem in ((rowwise, encoding, ""), (columnwise, columnwise_encoding, "columnwise_")):
        if requested and side_encoding is not None:
            whole = side_encoding.tile == (0, 0)
            buffers[f"{stem}data"] = (DTYPES[side_encoding.code], (shape[0], shape[1] * side_encoding.code_bits // 8))
            buffers[f"{stem}scale_inv"] = (DTYPES[side_encoding.scale], (1,) if whole else side_encoding.grid(shape))
    if encoding.has_global:
        buffers["amax"] = (torch.float32, (1,))
    return buffers


def group_layout(
    encoding: Encoding, shape: tuple[int, int], groups: int, *, rowwise: bool, columnwise: bool, swizzled: bool = False
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return buffer name -> (dtype, shape), for each buffer of a matrix whose rows are quantized in groups.

    Each group has a separate amax and scale. If tiles have several rows, each group starts a new tile, so there is one
    more row of tiles for each group than in the matrix alone. Swizzled scales are padded group by group.

    Raises:
        Refused: with the errors of `layout`.
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
        buffers["scale_inv"] = dtype, padded_shape(grid[0], grid[1], groups)
    if encoding.has_global:
        buffers["amax"] = (torch.float32, (groups,))
    return buffers


def first_tiles(offsets: torch.Tensor, rows: int, high: int) -> torch.Tensor:
    """Return, for each group, the row of tiles at which it starts: int64 [groups], on the device of the offsets.

    Args:
        offsets: for each group, the row after its last row.
        rows: number of rows of the matrix.
        high: number of rows of a tile.
    """
    ends = offsets.to(torch.int64).clamp(0, rows)
    tiles = (torch.diff(ends, prepend=ends.new_zeros(1)).clamp(min=0) + high - 1) // high
    return tiles.cumsum(0) - tiles


def allocate(layouts: dict[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device) -> Components:
    """Allocate uninitialized buffers with the given dtypes and shapes."""
    return Components(
        **{name: torch.empty(shape, dtype=dtype, device=device) for name, (dtype, shape) in layouts.items()}
    )


def select_buffers(
    components: Components, layouts: dict[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device
) -> Components:
    """Return the named buffers, after checking that each has the right dtype, shape, device and unit column stride.

    Raises:
        Refused: with the code MISSING_TENSOR, DTYPE_MISMATCH, SHAPE_MISMATCH or UNSUPPORTED if a buffer does not fit;
            the error lists every problem.
    """
    present, problems = components.present(), []
    for name, (dtype, shape) in layouts.items():
        buffer = present.get(name)
        where = Where(tensor=name)
        if buffer is None:
            problems.append(Refusal("MISSING_TENSOR", f"the buffer {name!r} is missing", where))
        elif buffer.dtype != dtype:
            problems.append(Refusal("DTYPE_MISMATCH", f"expected {dtype}, got {buffer.dtype}", where))
        elif tuple(buffer.shape) != shape:
            problems.append(Refusal("SHAPE_MISMATCH", f"expected {list(shape)}, got {list(buffer.shape)}", where))
        elif buffer.device != device:
            problems.append(Refusal("UNSUPPORTED", f"it is on {buffer.device}, but the matrix is on {device}", where))
        elif buffer.shape[-1] > 1 and buffer.stride(-1) != 1:
            problems.append(Refusal("UNSUPPORTED", "its rows must be contiguous", where))
    if problems:
        raise gathered(problems)
    return Components(**{name: present[name] for name in layouts})
