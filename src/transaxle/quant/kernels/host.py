"""Quantizes and dequantizes on a CPU with the codec of `transaxle.encodings`, in the tensors' own memory.

The functions have the same names and arguments as those in the module `device`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from transaxle.encodings.arithmetic import codec, kernel, vectorised
from transaxle.encodings.arithmetic.minifloat import MINIFLOATS
from transaxle.encodings.arithmetic.scaling import scales
from transaxle.encodings.arithmetic.vectorised import tiling
from transaxle.encodings.encoding import WHOLE, Encoding, Wide
from transaxle.errors import refuse
from transaxle.quant.kernels.components import Components, columnwise_of, first_tiles, swizzle_groups
from transaxle.torch_tensors import with_plain_bytes

WIDE: dict[torch.dtype, Wide] = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the tensor's memory as a numpy array; eight-bit codes and scales become bytes."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return with_plain_bytes(tensor).numpy()


def _read(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the tensor's memory as a read-only array, without `Tensor.numpy`, after which FSDP could not resize the
    storage.
    """
    return np.from_dlpack(with_plain_bytes(tensor.detach()))


def amax(x: torch.Tensor, out: torch.Tensor) -> None:
    """Write the largest magnitude of a matrix into `out`, float32 [1]."""
    out.fill_(float(codec.amax(_array(x))))


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
    is the number of rows and of columns that share an amax, if that is more than one tile.
    """
    values = _array(x)
    if encoding.tile == (WHOLE, WHOLE):
        assert out.data is not None
        assert out.scale_inv is not None
        widest = torch.finfo(x.dtype).max
        _cast(values, encoding, _array(out.data), _array(out.scale_inv), amax=amax, scale=scale, widest=widest)
        return
    sides = (
        (encoding, out.data, out.scale_inv),
        (columnwise_of(encoding), out.columnwise_data, out.columnwise_scale_inv),
    )
    tensor_amax = None if amax is None else amax.item()
    for side_encoding, codes, stored in sides:
        if side_encoding is not None and codes is not None and stored is not None:
            _array(stored)[...] = codec.encode_rows(
                side_encoding, values, amax=tensor_amax, over=over, codes_out=_array(codes)
            )[1]


def _cast(
    values: NDArray[Any],
    encoding: Encoding,
    codes: NDArray[np.uint8],
    stored: NDArray[np.float32],
    *,
    amax: torch.Tensor | None,
    scale: torch.Tensor | None,
    widest: float,
) -> None:
    """Write codes of values times one scale, which is passed or computed from the amax; also for an empty matrix."""
    if scale is None:
        assert amax is not None
        derived = scales(encoding, _array(amax), widest=widest)
        multiplier, stored[...] = derived.multiplier, derived.stored
    else:
        multiplier = _array(scale)
        stored[...] = np.float32(1) / multiplier
    adjacent = values if values.shape[1] < 2 or values.strides[1] == values.itemsize else np.ascontiguousarray(values)
    tiles = tiling(encoding, (values.shape[0], values.shape[1]))
    (kernel.load() or vectorised).cast(adjacent, tiles, multiplier.reshape(1, 1), MINIFLOATS[encoding.code], codes)


def _spans(offsets: torch.Tensor, rows: int) -> list[tuple[int, int]]:
    """Return (first row, row after the last) of each group.

    Raises:
        Refused: with the code SHAPE_MISMATCH if groups overlap, or end beyond the matrix.
    """
    ends = [0, *offsets.tolist()]
    if sorted(ends) != ends or ends[-1] > rows:
        raise refuse("SHAPE_MISMATCH", f"offsets must not decrease and must stay within {rows} rows; got {ends[1:]}")
    return list(itertools.pairwise(ends))


def amax_groups(x: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor) -> None:
    """Write the largest magnitude of each group of rows into `out`, float32 [groups]."""
    for group, (start, stop) in enumerate(_spans(offsets, x.shape[0])):
        amax(x[start:stop], out[group : group + 1])


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
    columnwise_encoding = columnwise_of(encoding)
    if swizzled:  # tiles have one row, so they do not depend on the groups
        assert out.data is not None
        assert out.scale_inv is not None
        of_tiles = torch.from_numpy(codec.encode_rows(encoding, _array(x), codes_out=_array(out.data))[1])
        out.scale_inv.view(torch.uint8).copy_(swizzle_groups(of_tiles, offsets))
        return
    sides = (
        (encoding, out.data, out.scale_inv, "data", "scale_inv"),
        (columnwise_encoding, out.columnwise_data, out.columnwise_scale_inv, "columnwise_data", "columnwise_scale_inv"),
    )
    for group, (start, stop) in enumerate(_spans(offsets, x.shape[0])):
        parts = {}
        for side_encoding, codes, stored, data, scale in sides:
            if side_encoding is not None and codes is not None and stored is not None:
                parts[data] = codes[start:stop]
                if side_encoding.tile == (WHOLE, WHOLE):
                    parts[scale] = stored[group : group + 1]
                else:
                    first = int(first_tiles(offsets, x.shape[0], side_encoding.tile[0])[group])
                    parts[scale] = stored[first : first + side_encoding.grid((stop - start, x.shape[1]))[0]]
        group_amax = None if amax is None else amax[group : group + 1]
        quantize(x[start:stop], encoding, Components(**parts), amax=group_amax, scale=None, over=over)


def quantize_rows(
    x: torch.Tensor, _: torch.Tensor, encoding: Encoding, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """Write the codes of a matrix in which each row is scaled by the row's amax, and write one scale per row into
    `scales`, [M].
    """
    rows = replace(encoding, tile=(1, WHOLE))
    scales.copy_(torch.from_numpy(codec.encode_rows(rows, _array(x), codes_out=_array(codes))[1]).view(-1))


def dequantize(
    codes: torch.Tensor, stored: torch.Tensor, total: torch.Tensor | None, encoding: Encoding, out: torch.Tensor
) -> None:
    """Write the values of codes into `out`, a matrix of bfloat16, float16 or float32."""
    factor = 1.0 if total is None else total.item() / (encoding.code_max * encoding.scale_max)
    if not out.numel():
        return
    tile_scales = _read(stored).reshape(encoding.grid((out.shape[0], out.shape[1])))
    codec.decode_box(encoding, _read(codes), tile_scales, factor=factor, dtype=WIDE[out.dtype], out=_array(out))


def transpose(codes: torch.Tensor, out: torch.Tensor) -> None:
    """Write the transposes of matrices [count, rows, columns] of eight-bit elements into `out`."""
    with_plain_bytes(out).copy_(with_plain_bytes(codes).transpose(1, 2))
