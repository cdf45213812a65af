"""Bands: what a cut along columns leaves of a matrix, or one along rows or columns of every matrix of a stack.

FSDP2 cuts so where it is told to (`Shard(1)`). Such a cut runs between tiles, so each band is quantized like a matrix
of its own, except for what the whole matrix has one of: a scale, an amax, a history. Every rank has a copy of those.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from transaxle.quant.frame.quantizers import Quantizer
from transaxle.quant.frame.tp_share import step_of
from transaxle.torch_tensors.local_tensor import with_plain_bytes


@dataclass(frozen=True, slots=True)
class Band:
    """Where in a matrix, or in every matrix of a stack, a band of it lies."""

    dim: int
    """The dim that is cut."""
    dims: int
    """How many there are: 2, or 3 of a stack."""
    start: int
    """Position along the dim that is the first one here."""
    size: int
    """Positions that are here."""
    whole: int
    """Positions that there are."""

    @property
    def member(self) -> Band:
        """The band of one matrix of the stack."""
        return replace(self, dim=self.dim - 1, dims=self.dims - 1)

    def step(self, quantizer: Quantizer, name: str) -> int:
        """Return how many positions of the cut dim one of a buffer stands for; 0 if every band has all of it."""
        return step_of(quantizer, name, self.dim - self.dims)

    def part(self, quantizer: Quantizer, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """Return what the band has of a buffer of what it was cut from, as a view."""
        step = self.step(quantizer, name)
        if not step:
            return buffer
        first = self.start // step
        size = -(-(self.start + self.size) // step) - first
        return with_plain_bytes(buffer).narrow(self.dim, first, size).view(buffer.dtype)
