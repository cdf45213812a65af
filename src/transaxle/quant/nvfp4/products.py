"""The three products of a linear layer whose operands are all quantized to nvfp4.

As TransformerEngine's `NVFP4BlockScaling` has them:

| product | left | right |
|---|---|---|
| output | input by rows | weight by rows |
| gradient of the input | gradient of the output by rows, rounded at random | weight by columns |
| gradient of the weight | gradient of the output by columns, transformed, rounded at random | input, transformed |
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from transaxle.axes.geometry.chunk import Intervals
from transaxle.quant.frame.frame import Frame
from transaxle.quant.frame.quantizers import NVFP4BlockScaling
from transaxle.quant.frame.tp_share import Share
from transaxle.quant.nvfp4.batch import Batch
from transaxle.quant.nvfp4.operands import across, product, rounded, weight_operand
from transaxle.quant.nvfp4.philox import words

_BY_ROWS, _BY_COLUMNS = 0, 1
"""Streams of random numbers."""
_OUT, _IN = -2, -1
"""Dims of a weight."""


@dataclass(frozen=True, slots=True)
class Products:
    """Products with one weight [N, K], of some rows of a batch."""

    recipe: NVFP4BlockScaling
    """What is transformed, and rounded at random."""
    share: Share | None = None
    """What the weight is a part of, where tensor parallelism has cut it."""
    batch: Batch = field(default_factory=Batch)
    """The ranks that have the other rows."""
    first: int = 0
    """Number of the first row in the batch."""

    def output(self, x: torch.Tensor, weight: Frame, dtype: torch.dtype) -> torch.Tensor:
        """Return the output [M, N] of an input [M, K]."""
        return product(rounded(x, self._groups(_IN)), weight_operand(weight), dtype)

    def of_input(
        self, grad: torch.Tensor, weight: Frame, state: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the gradient of the input [M, K], from that of the output [M, N]."""
        random = None if state is None else words(state, self._rows(grad), self._columns(grad), _BY_ROWS)
        left = rounded(grad, self._groups(_OUT), random)
        if self.batch.counted is not None:
            units = torch.zeros_like(left.units)
            for start, stop in self.batch.counted:
                units[:, start:stop] = left.units[:, start:stop]
            left = replace(left, units=units)
        return product(left, weight_operand(weight, columnwise=True), dtype)

    def of_weight(
        self, grad: torch.Tensor, x: torch.Tensor, state: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the gradient of the weight [N, K], from that of the output [M, N] and the input [M, K]."""
        turned = across(grad, transform=not self.recipe.disable_rht)
        random = None if state is None else words(state, self._rows(turned.t()), self._columns(grad), _BY_COLUMNS).t()
        left = rounded(turned, self._groups(_OUT), random)
        right = rounded(across(x, transform=not self.recipe.disable_rht), self._groups(_IN))
        return product(left, right, dtype)

    def _groups(self, dim: int) -> tuple[dist.ProcessGroup | None, ...]:
        """Return the ranks that have other parts of a matrix with the rows of the batch and a dim of the weight."""
        cut = self.share is not None and self.share.dim - len(self.share.shape) == dim
        return (self.batch.group, self.share.common if cut and self.share is not None else None)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(self.first, self.first + x.shape[0], device=x.device)

    def _columns(self, grad: torch.Tensor) -> torch.Tensor:
        """Return which of all outputs the columns of a gradient are."""
        share = self.share
        if share is None or share.dim - len(share.shape) != _OUT:
            return torch.arange(grad.shape[1], device=grad.device)
        held: Intervals = share.held
        return torch.cat([torch.arange(start, stop, device=grad.device) for start, stop in held])
