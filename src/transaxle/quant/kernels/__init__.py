"""Quantizes and dequantizes matrices in torch: by Triton programs on a GPU, by `transaxle.encodings` on a CPU.

The results on CPU and GPU are bitwise equal. The GPU programs read the input once for rowwise and columnwise codes
together, never wait for the device, and can be captured in a CUDA graph. Triton is imported when the first CUDA tensor
is passed.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch

from transaxle.encodings.encoding import WHOLE, Encoding
from transaxle.errors import TransaxleError, refuse
from transaxle.quant.kernels.components import (
    DTYPES,
    Components,
    allocate,
    columnwise_of,
    first_tiles,
    group_layout,
    layout,
    select_buffers,
)

VALUES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of values that can be quantized, and to which codes can be dequantized."""
_PER_TENSOR = (WHOLE, WHOLE)
_PER_ROW = (1, WHOLE)
_SCALES = {("F32", False), ("F8_E8M0", False), ("F8_E4M3", True)}
"""Supported pairs `(dtype of tile scales, whether the whole tensor has a scale too)`."""
_LARGEST_TILE = 128 * 128


def quantize(
    x: torch.Tensor,
    encoding: Encoding,
    *,
    amax: torch.Tensor | float | None = None,
    scale: torch.Tensor | float | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    over: tuple[int, int] | None = None,
    out: Components | None = None,
) -> Components:
    """Quantize a matrix by the rules of `transaxle.encodings`, with bitwise equal results.

    Args:
        x: the matrix, [M, K] of bfloat16, float16 or float32, with any strides. Tiles at the edges may be smaller.
        encoding: the encoding of the result.
        amax: for float8 and nvfp4, the largest magnitude from which the scale is computed, as float32 [1] on the device
            of `x`, or as a number; shards of one tensor need that of the whole tensor. None means the amax of `x`.
        scale: for float8, the factor by which `x` is multiplied, instead of an amax; float32 [1] or a number.
        rowwise: whether to compute codes whose tiles run along rows.
        columnwise: whether to compute codes whose tiles run down columns (mxfp8, nvfp4), in the same pass.
        over: rows and columns that share an amax, a multiple of the encoding's tile: `(16, 16)` for weights in nvfp4,
            in which sixteen rows have equal scales. None means the size of one tile.
        out: buffers to write; None means that new buffers are allocated.

    Returns:
        The requested buffers.

    Raises:
        Refused: with the code UNSUPPORTED, SHAPE_MISMATCH, DTYPE_MISMATCH or MISSING_TENSOR if the arguments do not fit
            together.
    """
    _check_values(x)
    _check_encoding(encoding)
    _check_options(encoding, amax=amax, scale=scale, rowwise=rowwise, columnwise=columnwise)
    _check_over(encoding, over, columnwise=columnwise)
    x = x.detach()
    layouts = layout(encoding, (x.shape[0], x.shape[1]), rowwise=rowwise, columnwise=columnwise)
    parts = allocate(layouts, x.device) if out is None else select_buffers(out, layouts, x.device)
    tensor_amax = None if amax is None else _number(amax, x.device)
    if encoding.has_global and parts.amax is not None:
        tensor_amax = parts.amax.copy_(tensor_amax) if tensor_amax is not None else _amax(x, parts.amax)
    elif encoding.tile == _PER_TENSOR and scale is None and tensor_amax is None:
        tensor_amax = _amax(x, torch.empty(1, dtype=torch.float32, device=x.device))
    tensor_scale = None if scale is None else _number(scale, x.device)
    _side(x.device).quantize(x, encoding, parts, amax=tensor_amax, scale=tensor_scale, over=over)
    return parts


def quantize_groups(
    x: torch.Tensor,
    offsets: torch.Tensor,
    encoding: Encoding,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    over: tuple[int, int] | None = None,
    swizzled: bool = False,
    out: Components | None = None,
) -> Components:
    """Quantize groups of rows of a matrix; each group gets exactly the codes that `quantize` would return for the group
    alone.

    On a GPU, one launch quantizes all groups; the launch is the same for all offsets, which stay on the device. For
    float8 and nvfp4, a second launch computes the groups' amaxes.

    Args:
        x: the matrix, [M, K], as for `quantize`.
        offsets: for each group, the row after its last row, int32 [groups] on the device of `x`. Wrong offsets are
            refused on a CPU; on a GPU they never cause access outside the buffers.
        encoding: the encoding of the result.
        rowwise: whether to compute codes whose tiles run along rows.
        columnwise: whether to compute codes whose tiles run down columns, as for `quantize`, in the same pass.
        over: rows and columns that share an amax, as for `quantize`.
        swizzled: whether to write the scales of tiles in the order that `transaxle.quant.kernels.components` describes,
            with each group padded separately. Swizzled scales are possible only for rowwise codes of mxfp8 and mxfp4.
            Codes of rows that belong to no group may be written too, and offsets are not checked.
        out: buffers to write; None means that new buffers are allocated.

    Returns:
        The requested buffers; `amax`, and `scale_inv` of float8, have one number for each group. If tiles have several
        rows, the scales of a group start at the row of scales that `first_tiles` returns. There are as many rows of
        scales as the matrix has whole tiles, plus one for each group. Entries that belong to no group are not written.

    Raises:
        Refused: with the errors of `quantize`.
    """
    _check_values(x)
    _check_encoding(encoding)
    _check_options(encoding, amax=None, scale=None, rowwise=rowwise, columnwise=columnwise)
    _check_over(encoding, over, columnwise=columnwise)
    _check_offsets(offsets, x)
    rowwise_only = rowwise and not columnwise and over is None and encoding.tile[0] == 1
    if swizzled and not (rowwise_only and encoding.scale == "F8_E8M0"):
        raise refuse("UNSUPPORTED", f"{encoding.name}: only E8M0 scales of rowwise codes can be swizzled")
    x, groups = x.detach(), offsets.shape[0]
    layouts = group_layout(
        encoding, (x.shape[0], x.shape[1]), groups, rowwise=rowwise, columnwise=columnwise, swizzled=swizzled
    )
    parts = allocate(layouts, x.device) if out is None else select_buffers(out, layouts, x.device)
    if swizzled and parts.scale_inv is not None and not parts.scale_inv.is_contiguous():
        raise refuse("UNSUPPORTED", "the buffer for swizzled scales must be contiguous", tensor="scale_inv")
    amaxes = parts.amax
    if encoding.tile == _PER_TENSOR:
        amaxes = torch.empty(groups, dtype=torch.float32, device=x.device)
    if amaxes is not None:
        _side(x.device).amax_groups(x, offsets, amaxes)
    _side(x.device).quantize_groups(x, offsets, encoding, parts, amax=amaxes, over=over, swizzled=swizzled)
    return parts


def quantize_rows(x: torch.Tensor, offsets: torch.Tensor, encoding: Encoding) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows; each row gets exactly the codes that `quantize` would return for the row alone. On a GPU, one
    launch quantizes all rows.

    Args:
        x: the matrix, [M, K], as for `quantize`.
        offsets: as for `quantize_groups`; only the last offset matters, because rows do not depend on their groups.
        encoding: a float8 encoding with one scale per tensor; each row counts as a separate tensor.

    Returns:
        The codes, [M, K], and the scales, float32 [M]. The codes and scales of rows that belong to no group may be left
        uninitialized.

    Raises:
        Refused: with the errors of `quantize`.
    """
    _check_values(x)
    _check_encoding(encoding)
    _check_offsets(offsets, x)
    if encoding.tile != _PER_TENSOR:
        raise refuse(
            "UNSUPPORTED",
            f"{encoding.name} has a scale for each tile; quantize_rows is for encodings with one for the tensor",
        )
    codes = torch.empty(tuple(x.shape), dtype=DTYPES[encoding.code], device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    _side(x.device).quantize_rows(x.detach(), offsets, encoding, codes, scales)
    return codes, scales


def dequantize(
    components: Components, encoding: Encoding, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the values of a quantized matrix: code times scale in float32, rounded once to the dtype.

    If there are both rowwise and columnwise codes, the rowwise codes are used.

    Args:
        components: codes, scales and, for nvfp4, the amax.
        encoding: the encoding of the codes; float8 may have a scale for each row, with tiles of `(1, WHOLE)`.
        dtype: bfloat16, float16 or float32.
        out: matrix [M, K] to write; None means that a new matrix is allocated.

    Raises:
        Refused: with the code UNSUPPORTED, SHAPE_MISMATCH, DTYPE_MISMATCH or MISSING_TENSOR if the arguments do not fit
            together.
    """
    _check_encoding(encoding if encoding.tile != _PER_ROW else replace(encoding, tile=_PER_TENSOR))
    rowwise = components.data is not None
    codes = components.data if rowwise else components.columnwise_data
    if codes is None:
        raise refuse("MISSING_TENSOR", "components has neither rowwise nor columnwise codes")
    if codes.dim() != 2:
        raise refuse("SHAPE_MISMATCH", f"the codes must be a matrix, not of shape {list(codes.shape)}")
    shape = codes.shape[0], codes.shape[1] * (8 // encoding.code_bits)
    parts = select_buffers(components, layout(encoding, shape, rowwise=rowwise, columnwise=not rowwise), codes.device)
    if dtype not in VALUES:
        raise _not_a_value(dtype)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=codes.device)
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != codes.device:
        raise refuse(
            "SHAPE_MISMATCH",
            f"out must be {dtype} {list(shape)} on {codes.device}, not {out.dtype} {list(out.shape)} on {out.device}",
        )
    if out.shape[1] > 1 and out.stride(1) != 1:
        raise refuse("UNSUPPORTED", "the rows of out must be contiguous")
    codes_encoding = encoding if rowwise else columnwise_of(encoding)
    scales = parts.scale_inv if rowwise else parts.columnwise_scale_inv
    assert codes_encoding is not None
    assert scales is not None
    _side(codes.device).dequantize(codes, scales, parts.amax, codes_encoding, out)
    return out


def transposed(codes: torch.Tensor) -> torch.Tensor:
    """Return the transpose of a matrix of eight-bit elements, or of each matrix of a stack, as a contiguous copy.

    On a GPU, the transpose has the bandwidth of a copy; torch's copy of a transposed view takes about ten times as
    long.

    Args:
        codes: the matrix, [M, K], or the stack, [E, M, K], of any eight-bit dtype.

    Returns:
        The transpose, [K, M] or [E, K, M], contiguous.
    """
    result = torch.empty(tuple(codes.mT.shape), dtype=codes.dtype, device=codes.device)
    stacks = [each if each.dim() == 3 else each.unsqueeze(0) for each in (codes.detach().contiguous(), result)]
    _side(codes.device).transpose(*stacks)
    return result


def amax(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of a matrix, float32 [1] on the matrix's device; NaN if the matrix has a NaN, 0 if
    it is empty.

    Raises:
        Refused: with the code DTYPE_MISMATCH or SHAPE_MISMATCH if `x` is not a matrix of a supported dtype.
    """
    _check_values(x)
    return _amax(x.detach(), torch.empty(1, dtype=torch.float32, device=x.device))


def _side(device: torch.device) -> Any:
    """Return the module with the kernels for a device, `device` or `host`, which have the same functions."""
    if device.type == "cuda":
        from transaxle.quant.kernels import device as cuda

        return cuda
    if device.type != "cpu":
        raise refuse(
            "UNSUPPORTED", f"there are no kernels for {device}", hint="Move the tensor to a CPU or a CUDA device."
        )
    from transaxle.quant.kernels import host

    return host


def _amax(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    _side(x.device).amax(x, out)
    return out


def _number(value: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """Return a number as a tensor, float32 [1], on the device."""
    if not isinstance(value, torch.Tensor):
        return torch.full((1,), value, dtype=torch.float32, device=device)
    if value.dtype != torch.float32 or value.numel() != 1 or value.device != device:
        raise refuse(
            "SHAPE_MISMATCH",
            f"amax and scale must be one float32 on {device}, not {value.dtype} {list(value.shape)} on {value.device}",
        )
    return value.reshape(1)


def _not_a_value(dtype: torch.dtype) -> TransaxleError:
    return refuse("DTYPE_MISMATCH", f"the dtype must be one of {', '.join(map(str, VALUES))}, not {dtype}")


def _check_values(x: torch.Tensor) -> None:
    if x.dtype not in VALUES:
        raise _not_a_value(x.dtype)
    if x.dim() != 2:
        raise refuse("SHAPE_MISMATCH", f"expected a matrix, not a tensor of shape {list(x.shape)}")


def _check_offsets(offsets: torch.Tensor, x: torch.Tensor) -> None:
    if offsets.dtype != torch.int32 or offsets.dim() != 1 or offsets.device != x.device or not offsets.is_contiguous():
        actual = f"{offsets.dtype} {list(offsets.shape)} on {offsets.device}"
        raise refuse("SHAPE_MISMATCH", f"offsets must be contiguous int32 [groups] on {x.device}, not {actual}")


def _check_encoding(encoding: Encoding) -> None:
    """Refuse encodings for which the kernels have no scaling rule or no tiles."""
    if (encoding.scale, encoding.has_global) not in _SCALES or encoding.code not in DTYPES:
        also_global = " and one for the tensor" if encoding.has_global else ""
        raise refuse(
            "UNSUPPORTED",
            f"{encoding.name}: no kernels for codes {encoding.code} with scales {encoding.scale}{also_global}",
        )
    if encoding.tile != _PER_TENSOR and not _regular(encoding.tile):
        raise refuse("UNSUPPORTED", f"{encoding.name}: no kernels for tiles {encoding.tile}")


def _regular(tile: tuple[int, ...]) -> bool:
    """Return whether a program can process the tile: each side must be a power of two, and the number of elements is
    limited.
    """
    return len(tile) == 2 and all(side > 0 and not side & (side - 1) for side in tile) and prod(tile) <= _LARGEST_TILE


def _check_options(encoding: Encoding, *, amax: Any, scale: Any, rowwise: bool, columnwise: bool) -> None:
    per_tensor = encoding.tile == _PER_TENSOR
    if amax is not None and not (per_tensor or encoding.has_global):
        raise refuse("UNSUPPORTED", f"{encoding.name} finds an amax for each tile, so amax= cannot be given")
    if scale is not None and (amax is not None or not per_tensor):
        raise refuse(
            "UNSUPPORTED",
            f"{encoding.name}: scale= is only for float8 with one scale for the tensor, and not together with amax=",
        )
    if not (rowwise or columnwise):
        raise refuse("UNSUPPORTED", "rowwise and columnwise are both False, so there is nothing to make")


def _check_over(encoding: Encoding, over: tuple[int, int] | None, *, columnwise: bool) -> None:
    """Refuse an argument `over` that does not consist of whole tiles."""
    if over is None:
        return
    tiles = [encoding.tile, encoding.tile[::-1]] if columnwise else [encoding.tile]
    whole = all(step and not size % step for tile in tiles for size, step in zip(over, tile, strict=True))
    if not whole or not _regular(over) or (columnwise and over[0] != over[1]):
        raise refuse(
            "UNSUPPORTED",
            f"{encoding.name}: over={over} does not consist of whole tiles of {encoding.tile}, or is too large",
        )


__all__ = [
    "Components", "amax", "dequantize", "first_tiles", "quantize", "quantize_groups", "quantize_rows", "transposed",
]  # fmt: skip
