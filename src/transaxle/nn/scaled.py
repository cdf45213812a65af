"""Products of float8 codes in groups: `torch.nn.functional.scaled_grouped_mm`, with one scale for each row.

A weight has one scale for each expert, which every row of its codes shares, so its codes are multiplied as they are, in
both directions. Rows of inputs and of gradients are quantized here, each by its own amax (current scaling, E4M3: torch
multiplies no other). Sums are float32, the result is bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from transaxle.encodings.encoding import FLOAT8, WHOLE
from transaxle.errors import refuse
from transaxle.quant import QuantizedTensor, Quantizer
from transaxle.quant.frame import DATA, SCALE

STEP = 16
"""Features are multiples of this."""
_CODES = torch.float8_e4m3fn
_LARGEST = torch.finfo(_CODES).max


def multiplies(quantizer: Quantizer | None) -> bool:
    """Tell whether codes of this kind can be multiplied: E4M3 with one scale for each matrix."""
    if quantizer is None:
        return False
    encoding = quantizer.encoding
    return encoding.tile == (WHOLE, WHOLE) and encoding.code == FLOAT8.code and encoding.name == FLOAT8.name


def together(parameters: Sequence[torch.Tensor]) -> QuantizedTensor:
    """Return weights as one stack of codes, [experts, out, in]; one that is there is not copied.

    Raises:
        Refused: UNSUPPORTED for experts that are quantized in different ways, or some of them not.
    """
    first = parameters[0].detach()
    made = first if first.dim() == 3 else torch.stack([one.detach() for one in parameters])
    if not isinstance(made, QuantizedTensor):
        hint = "force_path(None) multiplies values"
        raise refuse("UNSUPPORTED", "no scaled product: experts are not all quantized in one way", hint=hint)
    return made


def rowwise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [rows, columns] and scales float32 [rows] of rows, each scaled by its largest magnitude.

    These are the codes of each row quantized alone. Rows whose largest magnitude is 0, infinite or NaN are not scaled.
    """
    amax = x.abs().amax(-1, keepdim=True).float()
    quotient = torch.full_like(amax, _LARGEST) / amax  # a Python number over a tensor would be rounded twice
    scale = torch.where(amax.isfinite() & (amax > 0), quotient, 1.0)
    scale = torch.where(scale.isinf(), torch.finfo(x.dtype).max, scale)
    codes = (x.float() * scale).clamp(-_LARGEST, _LARGEST).to(_CODES)
    return codes, scale.reciprocal().flatten()


def product(x: torch.Tensor, weight: QuantizedTensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return rows [rows, in] times their experts' weights, [rows, out]; rows past the last offset are not written."""
    return _multiplied(x, weight.components[DATA], weight, offsets)


def back(grad: torch.Tensor, weight: QuantizedTensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return rows [rows, out] times the transposes, [rows, in]; rows past the last offset are not written."""
    return _multiplied(grad, weight.components[DATA].transpose(1, 2), weight, offsets)


def _multiplied(x: torch.Tensor, codes: torch.Tensor, weight: QuantizedTensor, offsets: torch.Tensor) -> torch.Tensor:
    rows, of_rows = rowwise(x)
    codes = codes.contiguous()  # along what is summed up: the kernel takes it in no other way
    scales = weight.components[SCALE].view(-1, 1).expand(codes.shape[:2]).contiguous()
    kind = functional.ScalingType.RowWise
    made: torch.Tensor = functional.scaled_grouped_mm(  # type: ignore[attr-defined]
        rows, codes.transpose(1, 2), of_rows, kind, scales, kind, offs=offsets, output_dtype=x.dtype
    )
    return made
