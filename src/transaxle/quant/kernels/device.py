"""Quantizes and dequantizes on a CUDA device, by launching the Triton programs.

No function waits for the device or reads from it, so every function can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from transaxle.encodings.encoding import WHOLE, Encoding
from transaxle.quant.kernels import programs
from transaxle.quant.kernels.components import Components

MANTISSA = {"F8_E4M3": 3, "F8_E5M2": 2, "F4": 1}
"""Dtype of codes -> number of mantissa bits."""
HOPPER = (9, 0)
"""First compute capability with the instructions that round float32 to float8 in one step."""
WORKERS = 1056
"""Number of programs that together search for the largest magnitude: eight per multiprocessor of an H100."""


@dataclass(frozen=True, slots=True)
class Block:
    """Size of the block of a matrix that one program processes, and the number of warps of the program."""

    rows: int
    columns: int
    warps: int


SMALL = 8192
"""Maximum number of elements of a small block."""
DEQUANTIZE = Block(8, 512, 4)
"""Block that one run of the dequantizing program processes."""
ROWS = Block(4, 512, 4)
"""Block of the program that quantizes rows with one scale per row; the program moves along the rows in steps."""
TRANSPOSE = Block(128, 256, 8)
"""Block that one run of the transposing program processes."""


def _block(tile: tuple[int, int], *, columnwise: bool) -> Block:
    """Return the size of a block of whole tiles: rows long enough for memory bandwidth, but few enough elements for the
    registers.

    Columnwise tiles run down the block too; the program is faster if fewer warps share a tile.
    """
    if columnwise:
        rows, columns = max(32, *tile), max(128, *tile)
        return Block(rows, columns, 2 if rows * columns <= SMALL else 8)
    rows, columns = max(16, tile[0]), max(256 if tile[0] < 32 else 128, tile[1])
    return Block(rows, columns, 4 if rows * columns <= SMALL else 8)


def _raw(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the tensor in the dtype that the programs expect: bfloat16 as 16-bit integers, float8 as 8-bit
    integers.
    """
    if tensor is None or tensor.dtype in (torch.float32, torch.float16, torch.uint8):
        return tensor
    return tensor.view(torch.uint16 if tensor.dtype == torch.bfloat16 else torch.uint8)


def _stride(tensor: torch.Tensor | None) -> int:
    """Return the distance between a tensor's rows, in elements; 0 if the tensor is a single number."""
    return tensor.stride(0) if tensor is not None and tensor.dim() > 1 else 0


def _native(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER


def _scheme(encoding: Encoding) -> Any:
    if encoding.tile == (WHOLE, WHOLE):
        return programs.TENSOR
    return {"F32": programs.BLOCK, "F8_E8M0": programs.E8M0, "F8_E4M3": programs.E4M3}[encoding.scale]


def _tile(encoding: Encoding) -> tuple[int, int]:
    """Return the rows and columns of a tile; 1 for a dim that a tile covers completely."""
    rows, columns = encoding.tile
    return max(rows, 1), max(columns, 1)


def _launch(program: Any, blocks: int, device: torch.device, *arguments: Any, warps: int = 4, **constants: Any) -> None:
    if not blocks:
        return
    options = {"num_warps": warps, "enable_fp_fusion": False}
    if device.type == "cuda":
        with torch.cuda.device(device):
            program[(blocks,)](*arguments, **constants, **options)
    else:
        program[(blocks,)](*arguments, **constants, **options)


def amax(x: torch.Tensor, out: torch.Tensor) -> None:
    """Write the largest magnitude of a matrix into `out`, float32 [1]."""
    out.zero_()
    block = Block(16, 256, 4)
    blocks = triton.cdiv(x.shape[0], block.rows) * triton.cdiv(x.shape[1], block.columns)
    _launch(
        programs.amax_program, min(blocks, WORKERS), x.device,
        _raw(x), out.view(torch.int32), *x.shape, *x.stride(),
        block_rows=block.rows, block_columns=block.columns, warps=block.warps,
    )  # fmt: skip


def quantize(
    x: torch.Tensor,
    encoding: Encoding,
    out: Components,
    *,
    amax: torch.Tensor | None,
    scale: torch.Tensor | None,
    over: tuple[int, int] | None,
) -> None:
    """Write codes and scales into the buffers of `out`.

    For float8 and nvfp4, `amax` [1] is the amax of the whole tensor; for float8, `scale` may be passed instead. `over`
    is the rows and columns that share an amax, if they are more than one tile.
    """
    tile = _tile(encoding)
    block = _block(over or tile, columnwise=out.columnwise_data is not None)
    blocks = triton.cdiv(x.shape[0], block.rows) * triton.cdiv(x.shape[1], block.columns)
    if encoding.tile == (WHOLE, WHOLE):
        blocks = max(blocks, 1)  # one block writes the scale of an empty matrix
    _launch(
        programs.quantize_program, blocks, x.device,
        _raw(x), _raw(out.data), _raw(out.scale_inv), _raw(out.columnwise_data), _raw(out.columnwise_scale_inv),
        amax if scale is None else scale,
        *x.shape, *x.stride(),
        _stride(out.data), _stride(out.scale_inv), _stride(out.columnwise_data), _stride(out.columnwise_scale_inv),
        scheme=_scheme(encoding) if scale is None else programs.GIVEN,
        **_constants(x, encoding, block, over or tile), warps=block.warps,
    )  # fmt: skip


def _constants(x: torch.Tensor, encoding: Encoding, block: Block, shared: tuple[int, int]) -> dict[str, Any]:
    """Return the compile-time constants of a quantizing program, except the scaling scheme."""
    tile = _tile(encoding)
    return {
        "block_rows": block.rows,
        "block_columns": block.columns,
        "rows": shared[0],
        "columns": shared[1],
        "repeat_rows": shared[0] // tile[0],
        "repeat_columns": shared[1] // tile[1],
        "mantissa": MANTISSA[encoding.code],
        "scale_max": encoding.scale_max,
        "largest": torch.finfo(x.dtype).max,
        "even": encoding.power_of_two,
        "native": _native(x.device),
    }


def _group_blocks(x: torch.Tensor, groups: int, block: Block) -> int:
    """Return a number of blocks that suffices for any groups: each group starts with a separate block, even if the
    group is empty.
    """
    return (x.shape[0] // block.rows + groups) * max(triton.cdiv(x.shape[1], block.columns), 1) if groups else 0


def amax_groups(x: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
    """Write the largest magnitude of each group of rows into `out`, float32 [groups]."""
    out.zero_()
    block, groups = Block(16, 256, 4), offsets.shape[0]
    _launch(
        programs.amax_groups_program, _group_blocks(x, groups, block), x.device,
        _raw(x), offsets, out.view(torch.int32), groups, *x.shape, *x.stride(), size=triton.next_power_of_2(groups),
        block_rows=block.rows, block_columns=block.columns, warps=block.warps,
    )  # fmt: skip


def quantize_groups(
    x: torch.Tensor,
    offsets: torch.Tensor,
    encoding: Encoding,
    out: Components,
    *,
    amax: torch.Tensor | None,
    over: tuple[int, int] | None,
    swizzled: bool,
) -> None:
    """Write codes and scales of groups of rows; `offsets` has the row after each group, and `amax` one number per
    group.
    """
    tile, groups = _tile(encoding), offsets.shape[0]
    block = _block(over or tile, columnwise=out.columnwise_data is not None)
    scales = (out.scale_inv, out.columnwise_scale_inv)
    if swizzled and out.scale_inv is not None:
        # Products multiply zero codes by the scales in the padding, which must not be NaN.
        out.scale_inv.view(torch.uint8).zero_()
    _launch(
        programs.quantize_groups_program, _group_blocks(x, groups, block), x.device,
        _raw(x), offsets, _raw(out.data), _raw(scales[0]), _raw(out.columnwise_data), _raw(scales[1]), amax,
        groups, *x.shape, *(0 if each is None else each.shape[0] for each in scales), *x.stride(),
        _stride(out.data), _stride(scales[0]), _stride(out.columnwise_data), _stride(scales[1]),
        size=triton.next_power_of_2(groups), scheme=_scheme(encoding), swizzled=swizzled,
        **_constants(x, encoding, block, over or tile), warps=block.warps,
    )  # fmt: skip


def quantize_rows(
    x: torch.Tensor, offsets: torch.Tensor, encoding: Encoding, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """Write the codes and the scales [M] of the rows before the last offset; each row is scaled by its own amax."""
    block, groups = ROWS, offsets.shape[0]
    _launch(
        programs.quantize_rows_program, triton.cdiv(x.shape[0], block.rows) if groups else 0, x.device,
        _raw(x), offsets, _raw(codes), scales, groups, *x.shape, *x.stride(), _stride(codes),
        block_rows=block.rows, block_columns=block.columns, mantissa=MANTISSA[encoding.code],
        largest=torch.finfo(x.dtype).max, even=encoding.power_of_two, native=_native(x.device), warps=block.warps,
    )  # fmt: skip


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, total: torch.Tensor | None, encoding: Encoding, out: torch.Tensor
) -> None:
    """Write the values of codes into `out`, a matrix of bfloat16, float16 or float32."""
    tile, block = _tile(encoding), DEQUANTIZE
    if encoding.tile == (1, WHOLE):
        tile = 1, triton.next_power_of_2(max(out.shape[1], 1))  # a tile covers at least one row
    _launch(
        programs.dequantize_program,
        triton.cdiv(out.shape[0], block.rows) * triton.cdiv(out.shape[1], block.columns),
        out.device,
        _raw(codes), _raw(scales), total, _raw(out), *out.shape, _stride(codes), _stride(scales), _stride(out),
        divisor=encoding.scale_max * encoding.code_max, block_rows=block.rows, block_columns=block.columns,
        rows=tile[0], columns=tile[1], scheme=_scheme(encoding), mantissa=MANTISSA[encoding.code],
        native=_native(out.device), warps=block.warps,
    )  # fmt: skip


def transpose(codes: torch.Tensor, out: torch.Tensor) -> None:
    """Write the transposes of matrices [count, rows, columns] of eight-bit elements into `out`; both must be
    contiguous.
    """
    count, height, width = codes.shape
    block = TRANSPOSE
    _launch(
        programs.transpose_program, count * triton.cdiv(height, block.rows) * triton.cdiv(width, block.columns),
        codes.device, _raw(codes), _raw(out), height, width,
        block_rows=block.rows, block_columns=block.columns, warps=block.warps,
    )  # fmt: skip
