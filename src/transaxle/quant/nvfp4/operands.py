"""Operands of NVFP4 products, and the product.

The device that this is made for multiplies codes, each scaled by the E4M3 scale of its tile, sums up in float32, and
scales the result by the two amaxes (TransformerEngine, `nvfp4_compute_per_tensor_scale`). Here codes times scales are
float64. They are multiples of 2**-10 below 2688, so that sums of 1024 products are exact, and in practice far longer
ones: the result does not depend on the order of the sum, nor on how rows or columns were cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.nn import functional

from transaxle.encodings.encoding import NVFP4
from transaxle.errors import refuse
from transaxle.quant import kernels
from transaxle.quant.frame.frame import Frame
from transaxle.quant.frame.global_scale import largest_of_all
from transaxle.quant.kernels.components import Components
from transaxle.quant.nvfp4 import hadamard, stochastic_rounding

_TILE = NVFP4.tile[1]
_UNIT = float(NVFP4.scale_max * NVFP4.code_max)
"""The amax with which codes and scales give their product."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One side of a product."""

    units: torch.Tensor
    """Codes times scales, float64 [rows, what is summed up]."""
    amax: torch.Tensor
    """Of the tensor, float32 [1]."""


def rounded(
    x: torch.Tensor, groups: Sequence[dist.ProcessGroup | None] = (), words: torch.Tensor | None = None
) -> Operand:
    """Quantize a matrix whose rows are summed up.

    Args:
        x: [M, K].
        groups: ranks that have other parts of the matrix, over which its amax is reduced.
        words: random numbers [M, K] to round by; None: to nearest.
    """
    size = x.shape[1]
    full = functional.pad(x.detach(), (0, -size % _TILE))
    amax = largest_of_all(kernels.amax(full), groups)
    if words is None:
        parts = kernels.quantize(full, NVFP4, amax=amax)
    else:
        parts = stochastic_rounding.quantize(full, functional.pad(words, (0, full.shape[1] - size)), amax)
    return Operand(_units(parts)[:, :size], amax)


def across(x: torch.Tensor, *, transform: bool) -> torch.Tensor:
    """Return the transpose [K, M] of a matrix, for sums over its rows, with zeros for rows up to a multiple of 16.

    Args:
        x: [M, K].
        transform: whether to apply the random Hadamard transform along the rows.
    """
    turned = functional.pad(x.detach(), (0, 0, 0, -x.shape[0] % hadamard.SIZE)).t().contiguous()
    return hadamard.transformed(turned) if transform else turned


def weight_operand(frame: Frame, *, columnwise: bool = False) -> Operand:
    """Return the codes of a whole weight [N, K]; with `columnwise` those for sums over N, if there are any, as [K, N].

    Raises:
        Refused: UNSUPPORTED for some rows of a weight: it is multiplied whole.
    """
    if frame.rows != frame.whole:
        raise refuse(
            "UNSUPPORTED",
            f"{frame.rows} of {frame.whole} rows of a weight cannot be multiplied: their scales are of the whole",
            hint="Call the module that fully_shard was applied to, which gathers them.",
        )
    parts, encoding = frame.operands(0, frame.rows, columnwise=columnwise and frame.columnwise)
    assert parts.amax is not None
    values = kernels.dequantize(replace(parts, amax=torch.full_like(parts.amax, _UNIT)), encoding, torch.float32)
    units = values[:, : frame.columns].double()
    return Operand(units.t() if columnwise else units, parts.amax)


def product(left: Operand, right: Operand, dtype: torch.dtype) -> torch.Tensor:
    """Return left [M, K] times right [N, K] transposed, rounded to float32 and then to a dtype."""
    scale = left.amax.double() * right.amax.double() / _UNIT**2
    return ((left.units @ right.units.t()) * scale).float().to(dtype)


def _units(parts: Components) -> torch.Tensor:
    assert parts.amax is not None
    unit = replace(parts, amax=torch.full_like(parts.amax, _UNIT))
    return kernels.dequantize(unit, NVFP4, torch.float32).double()
