"""Conversion between torchao's quantized tensors and ours, with the same codes and scales; nothing is requantized.

torchao is imported only to make one of its tensors; a given tensor is recognised by the name of its class.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from transaxle.encodings.encoding import NVFP4 as NVFP4_ENCODING
from transaxle.errors import TransaxleError, refuse
from transaxle.quant import kernels
from transaxle.quant.joined_parts import alone
from transaxle.quant.quantized_tensor import QuantizedTensor, from_components
from transaxle.quant.quantizers import (
    AMAX,
    DATA,
    MXFP8,
    NVFP4,
    SCALE,
    DelayedScaling,
    Float8Block,
    Float8CurrentScaling,
    Quantizer,
)

_CODES: dict[torch.dtype, Any] = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
_TOTAL = NVFP4_ENCODING.code_max * NVFP4_ENCODING.scale_max
"""An amax is this many times a global scale."""
_WIDEST = 1 << 14
"""Elements of the longest row that has one scale."""
_MATRIX = 2


def from_torchao(tensor: torch.Tensor) -> QuantizedTensor:
    """Return a `Float8Tensor`, `MXTensor` or `NVFP4Tensor` of torchao as a tensor of ours, which shares its codes.

    Scales are shared too, unless they are in a kernel's swizzled order. A per-row `Float8Tensor` becomes blocks of one
    row.

    Raises:
        Refused: `UNSUPPORTED` for a tensor without an exact equivalent here, with the reason; `LOSSY` for a global
            scale of nvfp4 that no float32 amax gives.
    """
    kind = type(tensor).__name__
    make = _READERS.get(kind)
    if make is None:
        raise _unequal(kind, f"only {', '.join(_READERS)} can be read")
    source: Any = tensor
    if source.dtype not in kernels.VALUES:
        raise _unequal(kind, f"its values are {source.dtype}")
    if source.qdata.dim() > 1 and source.qdata.stride(-2) < source.qdata.stride(-1):
        raise _unequal(kind, "it is transposed", hint="Transpose it back.")
    quantizer, buffers = make(source)
    return from_components(quantizer, buffers, tuple(tensor.shape), source.dtype)


def to_torchao(tensor: QuantizedTensor) -> torch.Tensor:
    """Return a matrix, rows of one or a stack of them as torchao's class for its encoding, which shares its codes.

    Columnwise codes and the history of delayed scaling are not passed on.

    Raises:
        Refused: `UNSUPPORTED` for a tensor without an exact equivalent in torchao, with the reason;
            `BLOCK_MISALIGNED` for rows that are not whole tiles.
    """
    if tuple(tensor.shape) != (tensor.height, *tensor.frame.row):
        raise _unequal(str(tensor.quantizer), "it is a view of another shape")
    parts = tensor.components if tensor.frame.matrix is not None else alone(tensor)
    quantizer, tile = tensor.quantizer, tensor.quantizer.encoding.tile
    if isinstance(quantizer, (Float8CurrentScaling, DelayedScaling, Float8Block)):
        return _float8_of(tensor, parts)
    if tensor.shape[-1] % tile[1]:
        raise _cut_short(quantizer, tensor.shape[-1], tile[1])
    if isinstance(quantizer, MXFP8):
        from torchao.prototype.mx_formats.mx_tensor import MXTensor
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        whole = parts[DATA], parts[SCALE], parts[DATA].dtype, tile[1], tensor.dtype
        return cast(torch.Tensor, MXTensor(*whole, KernelPreference.EMULATED, None, False))
    return _nvfp4_of(tensor, parts)


def _float8_of(tensor: QuantizedTensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    from torchao.quantization import Float8Tensor

    block = [1] * (tensor.dim() - _MATRIX)
    for size, step in zip(tensor.shape[-2:], tensor.quantizer.encoding.tile, strict=True):
        if step and size > step and size % step:
            raise _cut_short(tensor.quantizer, size, step)
        block.append(min(step or size, size))
    scale = parts[SCALE].view([size // max(step, 1) for size, step in zip(tensor.shape, block, strict=True)])
    return cast(torch.Tensor, Float8Tensor(parts[DATA], scale, block_size=block, dtype=tensor.dtype))


def _nvfp4_of(tensor: QuantizedTensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    encoding = tensor.quantizer.encoding
    if encoding.scale_max != NVFP4_ENCODING.scale_max:
        raise _unequal(str(tensor.quantizer), f"torchao uses block scales up to {NVFP4_ENCODING.scale_max} only")
    total = (parts[AMAX].double() / _TOTAL).float()
    total = total.reshape(()) if tensor.dim() == _MATRIX else total.view(-1, 1, 1)
    return cast(torch.Tensor, NVFP4Tensor(parts[DATA], parts[SCALE], encoding.tile[1], tensor.dtype, total))


def _cut_short(quantizer: Quantizer, size: int, step: int) -> TransaxleError:
    return _unequal(str(quantizer), f"torchao needs whole tiles, but {size} is not a multiple of {step}")


def _float8(source: Any) -> tuple[Quantizer, dict[str, torch.Tensor]]:
    *leading, rows, columns = source.qdata.shape
    block, code = list(source.block_size), _CODES[source.qdata.dtype]
    if len(block) != len(leading) + _MATRIX or any(step != 1 for step in block[:-2]):
        raise _unequal(
            "Float8Tensor", f"one scale covers {block} of {list(source.qdata.shape)}, which is more than a matrix"
        )
    high, wide = block[-2:]
    scale = source.scale.view(*leading, -(-rows // high), -(-columns // wide))
    if scale.dtype != torch.float32:
        raise _unequal("Float8Tensor", f"its scales are {scale.dtype}, not float32")
    if (high, wide) == (rows, columns):
        return Float8CurrentScaling(code=code), {DATA: source.qdata, SCALE: scale.flatten(-2)}
    if high == 1 and wide == columns and columns <= _WIDEST:
        wide = 1 << (columns - 1).bit_length()
    if high & (high - 1) or wide & (wide - 1) or high * wide > _WIDEST:
        raise _unequal(
            "Float8Tensor", f"its blocks of {high} x {wide} must be powers of two, of at most {_WIDEST} elements"
        )
    return Float8Block(block=(high, wide), code=code, power_of_two=False), {DATA: source.qdata, SCALE: scale}


def _mx(source: Any) -> tuple[Quantizer, dict[str, torch.Tensor]]:
    code = _CODES.get(source.elem_dtype)
    quantizer = MXFP8(code="F8_E4M3" if code is None else code)
    if code is None or source.block_size != quantizer.encoding.tile[1]:
        raise _unequal(
            "MXTensor",
            f"it has elements of {source.elem_dtype}, {source.block_size} to a scale; only mxfp8 can be read",
        )
    return quantizer, {DATA: source.qdata, SCALE: _scales(source, source.block_size)}


def _nvfp4(source: Any) -> tuple[Quantizer, dict[str, torch.Tensor]]:
    if source.block_size != NVFP4_ENCODING.tile[1]:
        raise _unequal("NVFP4Tensor", f"it has {source.block_size} elements to a scale, not {NVFP4_ENCODING.tile[1]}")
    leading = source.qdata.shape[:-2]
    total = source.per_tensor_scale
    if total is None:  # as if it were one
        total = torch.ones((), device=source.qdata.device)
    if total.numel() not in (1, leading.numel()) or (leading.numel() > 1 and total.numel() == 1):
        raise _unequal("NVFP4Tensor", f"it has {total.numel()} global scales for a stack of {leading.numel()} matrices")
    total = total.float().reshape(*leading, 1)
    amax = (total.double() * _TOTAL).float()
    if not torch.equal((amax.double() / _TOTAL).float(), total):
        raise refuse(
            "LOSSY",
            f"no float32 amax gives the global scale {total.tolist()}",
            hint="Quantize the values that dequantize() gives.",
        )
    return NVFP4(), {DATA: source.qdata.view(torch.uint8), SCALE: _scales(source, source.block_size), AMAX: amax}


def _scales(source: Any, block: int) -> torch.Tensor:
    """Return the scales of each row in the order of its tiles; kernels have them in blocks of 128 x 4."""
    *leading, rows, columns = source.shape
    scale: torch.Tensor = source.scale
    across = columns // block
    if not source.is_swizzled_scales:
        return scale.view(*leading, rows, across)
    high, wide = -(-torch.Size((*leading, rows)).numel() // 128), -(-across // 4)
    raw = scale.contiguous().view(torch.uint8).reshape(high, wide, 32, 4, 4)
    compact = raw.permute(0, 3, 2, 1, 4).reshape(high * 128, wide * 4)
    return compact[: torch.Size((*leading, rows)).numel(), :across].reshape(*leading, rows, across).view(scale.dtype)


def _unequal(kind: str, why: str, *, hint: str = "Quantize the values that dequantize() gives.") -> TransaxleError:
    return refuse("UNSUPPORTED", f"{kind} has no exact equivalent: {why}", hint=hint)


_READERS = {"Float8Tensor": _float8, "MXTensor": _mx, "NVFP4Tensor": _nvfp4}
