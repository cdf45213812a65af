"""Shares and bands: the part of a quantized matrix that a rank has after tensor parallelism or FSDP2 has cut the
matrix.

A **share** is a part that tensor parallelism has cut along rows or columns. Cuts are between tiles, so each share can
be quantized like a separate matrix. Exceptions are the buffers that exist once for the whole matrix: a scale, an amax,
a history. Buffers of the whole matrix are computed over all ranks and are equal on each rank. The remaining buffers of
a share are parts of the whole matrix's buffers. FSDP2 may cut a share again, between any two rows.

A **band** is a range of columns of a matrix, or of rows or columns of every matrix of a stack. FSDP2 creates bands if
the user lets it cut a dim other than the first (`Shard(1)`). Cuts are between tiles, so each band is quantized like a
separate matrix, except for the scale, amax or history of the whole matrix, which every rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from transaxle.axes.geometry import Intervals, count_positions, whole
from transaxle.encodings.encoding import WHOLE, Encoding
from transaxle.errors import Refusal
from transaxle.quant.kernels.components import columnwise_of
from transaxle.quant.quantizers import AMAX, COLUMN_DATA, COLUMN_SCALE, DATA, ORIGIN, STATE, Quantizer, buffers_of
from transaxle.torch_tensors import along, with_plain_bytes

_HINT = (
    "Cut it over fewer ranks, give the rows of each rank in the plan, or do not quantize it (filter=, or decode= when "
    "loading)."
)
_MATRIX = 2
"""Number of dims of a matrix; a tensor with a further first dim is a stack of matrices."""


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """A rank's tensor-parallel part of a matrix, or of every matrix of a stack."""

    group: dist.ProcessGroup
    """The ranks that have the parts of the whole matrix or stack."""
    shape: tuple[int, ...]
    """Shape of the whole matrix or stack."""
    dim: int
    """Index of the dim that tensor parallelism cuts."""
    positions: Intervals
    """The indices along `dim` that this rank has, in the order in which the rank stores them."""

    @property
    def local(self) -> tuple[int, ...]:
        """Shape of this rank's part, before FSDP2 cuts it."""
        return tuple(
            count_positions(self.positions) if dim == self.dim else size for dim, size in enumerate(self.shape)
        )

    @property
    def common(self) -> dist.ProcessGroup | None:
        """The ranks that share a scale, an amax or a history; None if a stack is cut between matrices."""
        return None if self.dim - len(self.shape) < -_MATRIX else self.group

    @property
    def member(self) -> Share | None:
        """The share of one matrix of the stack; None if the matrices of the stack are not cut."""
        return replace(self, shape=self.shape[1:], dim=self.dim - 1) if self.dim else None

    def place_in(self, mesh: DeviceMesh) -> int:
        """Return the index of the mesh dim along which the ranks are those of `group`."""
        ranks = dist.get_process_group_ranks(self.group)
        return next(n for n in range(mesh.ndim) if dist.get_process_group_ranks(mesh.get_group(n)) == ranks)

    def step(self, quantizer: Quantizer, name: str) -> int:
        """Return the number of elements along the cut dim to which one entry of a buffer belongs; 0 if the buffer is
        not cut.
        """
        return step_of(quantizer, name, self.dim - len(self.shape))

    def whole_of(self, quantizer: Quantizer, name: str) -> tuple[int, ...]:
        """Return the shape that a buffer has in the whole, uncut matrix."""
        if name == ORIGIN:
            return self.shape
        return buffers_of(quantizer, self.shape, columnwise=name in (COLUMN_DATA, COLUMN_SCALE) or None)[name][1]

    def holds(self, quantizer: Quantizer, name: str) -> tuple[Intervals, ...]:
        """Return, for each dim of a buffer of the whole matrix, the indices that this rank has."""
        step, shape = self.step(quantizer, name), self.whole_of(quantizer, name)
        return tuple(self._spans(step) if step and dim == self.dim else whole(n) for dim, n in enumerate(shape))

    def part(self, quantizer: Quantizer, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """Copy this rank's share out of a buffer of the whole matrix."""
        step = self.step(quantizer, name)
        if not step:
            return buffer.clone()
        return along(with_plain_bytes(buffer), self.dim, self._spans(step)).contiguous().view(buffer.dtype)

    def _spans(self, step: int) -> Intervals:
        return tuple((start // step, -(-stop // step)) for start, stop in self.positions)


def _encoding(quantizer: Quantizer, name: str) -> Encoding:
    turned = columnwise_of(quantizer.encoding)
    if name in (COLUMN_DATA, COLUMN_SCALE) and turned is not None:
        return turned
    return quantizer.encoding


def step_of(quantizer: Quantizer, name: str, axis: int) -> int:
    """Return the number of elements along an axis to which one entry of a buffer belongs; 0 if it belongs to the whole
    axis.

    Args:
        quantizer: quantizer of the matrix, or of the stack.
        name: name of the buffer.
        axis: -1 for columns, -2 for rows, -3 for the matrices of a stack.
    """
    if axis < -_MATRIX or name == ORIGIN:
        return 1
    if name in (AMAX, *STATE):
        return WHOLE
    encoding = _encoding(quantizer, name)
    if name in (DATA, COLUMN_DATA):
        return 1 if axis == -_MATRIX else 8 // encoding.code_bits
    return encoding.tile[axis]


def tile_of(quantizer: Quantizer, shape: Sequence[int], dim: int, *, columnwise: bool) -> int:
    """Return the number of adjacent elements along a dim that must stay together because they share a scale; at least
    1.

    A scale of the whole matrix is ignored, because every rank has a copy of it.
    """
    axis = dim - len(shape)
    if axis < -_MATRIX:
        return 1
    encoding = quantizer.encoding
    steps = [encoding.tile[axis], quantizer.grain[axis]]
    turned = columnwise_of(encoding)
    if columnwise and turned is not None:
        steps.append(turned.tile[axis])
    if axis == -1:
        steps.append(8 // encoding.code_bits)
    return lcm(*(step for step in steps if step != WHOLE))


def tile_refusal(
    quantizer: Quantizer, shape: Sequence[int], dim: int, positions: Sequence[Intervals], *, columnwise: bool = False
) -> Refusal | None:
    """Return the error for the first cut that divides a tile; None if all cuts are between tiles.

    Args:
        quantizer: quantizer of the matrix.
        shape: shape of the whole matrix or stack.
        dim: the dim along which the matrix is cut.
        positions: for each rank, the indices along `dim` that the rank has.
        columnwise: whether to consider tiles of columnwise codes too, even if the quantizer computes no such codes.
    """
    tile = tile_of(quantizer, shape, dim, columnwise=columnwise or quantizer.columnwise)
    for rank, intervals in enumerate(positions):
        for number, (start, stop) in enumerate(intervals):
            last = number == len(intervals) - 1 and stop == shape[dim]
            if start % tile or (stop % tile and not last):
                cut = start if start % tile else stop
                message = (
                    f"rank {rank} of {len(positions)} would get [{start}, {stop}) of dim {dim} of {list(shape)}; "
                    f"{cut} = {cut // tile} x {tile} + {cut % tile} lies inside a tile of {tile} "
                    f"({quantizer.encoding.name})"
                )
                return Refusal("BLOCK_MISALIGNED", message, hint=_HINT)
    return None


@dataclass(frozen=True, slots=True)
class Band:
    """Position of a band (range of columns or rows) in a matrix, or in every matrix of a stack."""

    dim: int
    """Index of the dim that FSDP2 cuts."""
    dims: int
    """Number of dims: 2 for a matrix, 3 for a stack."""
    start: int
    """Index along the cut dim at which the band begins."""
    size: int
    """Number of the band's indices along the cut dim."""
    whole: int
    """Size of the cut dim in the whole matrix or stack."""

    @property
    def member(self) -> Band:
        """The band of one matrix of the stack."""
        return replace(self, dim=self.dim - 1, dims=self.dims - 1)

    def step(self, quantizer: Quantizer, name: str) -> int:
        """Return the number of indices along the cut dim to which a buffer entry belongs; 0 if every band has the whole
        buffer.
        """
        return step_of(quantizer, name, self.dim - self.dims)

    def part(self, quantizer: Quantizer, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """Return a view of the band's section of a buffer that belongs to the frame from which the band was cut."""
        step = self.step(quantizer, name)
        if not step:
            return buffer
        first = self.start // step
        size = -(-(self.start + self.size) // step) - first
        return with_plain_bytes(buffer).narrow(self.dim, first, size).view(buffer.dtype)
