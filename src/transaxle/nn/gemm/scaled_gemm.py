"""Products of float8 codes in groups: `torch.nn.functional.scaled_grouped_mm`.

Weights are multiplied as they are stored:

- E4M3 codes with one scale for each expert, which every row of them shares: the same codes serve both directions. Rows
  of inputs and of gradients are quantized here, each by its own amax (current scaling; torch multiplies no other).
- MXFP8 codes. Each 32 elements along what is summed up share a scale, so each direction has codes of its own: those by
  rows give the output, columnwise ones the gradient of the input. Inputs and gradients are quantized here likewise.

Sums are float32, the result is bfloat16. The kernels want no multiples of rows: where scales are padded to blocks for
them, that is by group, and on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from transaxle.encodings.encoding import FLOAT8, MXFP8
from transaxle.errors import refuse
from transaxle.quant import QuantizedTensor, Quantizer, kernels
from transaxle.quant.frame.buffers import COLUMN_DATA, COLUMN_SCALE, DATA, SCALE
from transaxle.quant.kernels.swizzle import swizzled


@dataclass(frozen=True, slots=True)
class Kind:
    """Codes that a device multiplies in groups."""

    what: str
    """The codes, and what shares a scale."""
    step: int
    """Features are multiples of this."""
    capabilities: tuple[tuple[int, int], ...]
    """Compute capabilities of the devices that torch has a kernel for."""
    builds: tuple[str, ...] = ()
    """Words of `torch.__config__.show()`, one of which says that the kernel was built; none: it always is."""
    chosen: bool = False
    """Whether codes are multiplied wherever they can be; else where the user says so."""


ROWS = Kind("E4M3 codes with one scale for each expert", 16, ((9, 0),))
BLOCKS = Kind("MXFP8 codes (E4M3)", MXFP8.tile[1], ((10, 0),), ("USE_MSLK", "USE_FBGEMM_GENAI"), chosen=True)


def kind_of(quantizer: Quantizer | None) -> Kind | None:
    """Return what kind of codes a quantizer makes; None for those that nothing multiplies in groups."""
    if quantizer is None:
        return None
    encoding = quantizer.encoding
    kinds = {(each.name, each.code, each.tile): kind for each, kind in ((FLOAT8, ROWS), (MXFP8, BLOCKS))}
    return kinds.get((encoding.name, encoding.code, encoding.tile))


def together(parameters: Sequence[torch.Tensor]) -> QuantizedTensor:
    """Return weights as one stack of codes, [experts, out, in]; one that is there is not copied.

    Raises:
        Refused: UNSUPPORTED for experts that are quantized in different ways, or some of them not.
    """
    first = parameters[0].detach()
    stack = first if first.dim() == 3 else torch.stack([parameter.detach() for parameter in parameters])
    if not isinstance(stack, QuantizedTensor):
        hint = "Call force_path(None) to multiply values."
        raise refuse(
            "UNSUPPORTED",
            "a scaled product is not possible: the experts are not all quantized in the same way",
            hint=hint,
        )
    return stack


def product(x: torch.Tensor, weight: QuantizedTensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return rows [rows, in] times their experts' weights, [rows, out]; rows past the last offset are not written."""
    buffers = weight.components
    return _multiplied(x, buffers[DATA], buffers[SCALE], kind_of(weight.quantizer), offsets)


def backwards(weight: QuantizedTensor) -> bool:
    """Tell whether there are codes for the gradient of the input."""
    return kind_of(weight.quantizer) is ROWS or weight.frame.columnwise


def back(grad: torch.Tensor, weight: QuantizedTensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return rows [rows, out] times the transposes, [rows, in]; rows past the last offset are not written."""
    buffers, kind = weight.components, kind_of(weight.quantizer)
    if kind is ROWS:
        return _multiplied(grad, kernels.transposed(buffers[DATA]), buffers[SCALE], kind, offsets)
    codes = kernels.transposed(buffers[COLUMN_DATA])
    return _multiplied(grad, codes, buffers[COLUMN_SCALE].transpose(1, 2), kind, offsets)


def _multiplied(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, kind: Kind | None, offsets: torch.Tensor
) -> torch.Tensor:
    """Return rows [rows, k] times the transposes of codes [experts, n, k]."""
    codes = codes.contiguous()  # along what is summed up: the kernels take it in no other way
    recipe, order = functional.ScalingType.RowWise, None
    rows: torch.Tensor | None
    of_rows: torch.Tensor | None
    if kind is ROWS:
        rows, of_rows = kernels.quantize_rows(x, offsets, FLOAT8)
        of_codes = scales.view(-1, 1).expand(codes.shape[:2]).contiguous()
    else:
        quantized = kernels.quantize_groups(x, offsets, MXFP8, swizzled=True)
        rows, of_rows, of_codes = quantized.data, quantized.scale_inv, swizzled(scales)
        recipe, order = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
    products: torch.Tensor = functional.scaled_grouped_mm(  # type: ignore[attr-defined]
        rows,
        codes.transpose(1, 2),
        of_rows,
        recipe,
        of_codes,
        recipe,
        order,
        order,
        offs=offsets,
        output_dtype=torch.bfloat16,
    )
    return products
