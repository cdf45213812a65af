"""Shares: a rank's part of a quantized matrix that tensor parallelism has cut along rows or columns.

Cuts lie on borders of tiles, so each share can be quantized like a separate matrix. The exception are buffers of which
the whole matrix has only one: a scale, an amax, a history. They are computed over all ranks, and equal on each. All
other buffers are parts of the whole matrix's, and FSDP2 may cut a share once more, between any two rows.

**Bands**: what a cut along columns leaves of a matrix, or one along rows or columns of every matrix of a stack.

FSDP2 cuts so where it is told to (`Shard(1)`). Such a cut runs between tiles, so each band is quantized like a matrix
of its own, except for what the whole matrix has one of: a scale, an amax, a history. Every rank has a copy of those.
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
"""Dims of a matrix; any before them count matrices."""


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """A rank's part of a matrix, or of every matrix of a stack."""

    group: dist.ProcessGroup
    """The ranks that have the parts."""
    shape: tuple[int, ...]
    """Of the whole."""
    dim: int
    """The dim that is cut."""
    held: Intervals
    """Positions of it that are here, in local order."""

    @property
    def local(self) -> tuple[int, ...]:
        """Shape of what this rank has, before FSDP2 cuts it."""
        return tuple(count_positions(self.held) if dim == self.dim else size for dim, size in enumerate(self.shape))

    @property
    def common(self) -> dist.ProcessGroup | None:
        """The ranks that share a scale, an amax or a history; None where a stack is cut between its matrices."""
        return None if self.dim - len(self.shape) < -_MATRIX else self.group

    @property
    def member(self) -> Share | None:
        """The share of one matrix of the stack; None where matrices are whole."""
        return replace(self, shape=self.shape[1:], dim=self.dim - 1) if self.dim else None

    def place_in(self, mesh: DeviceMesh) -> int:
        """Return the dim of a mesh along which the ranks of the group lie."""
        ranks = dist.get_process_group_ranks(self.group)
        return next(n for n in range(mesh.ndim) if dist.get_process_group_ranks(mesh.get_group(n)) == ranks)

    def step(self, quantizer: Quantizer, name: str) -> int:
        """Return how many elements of the cut dim one position of a buffer stands for; 0 if it is not cut."""
        return step_of(quantizer, name, self.dim - len(self.shape))

    def whole_of(self, quantizer: Quantizer, name: str) -> tuple[int, ...]:
        """Return the shape of a whole buffer."""
        if name == ORIGIN:
            return self.shape
        return buffers_of(quantizer, self.shape, columnwise=name in (COLUMN_DATA, COLUMN_SCALE) or None)[name][1]

    def holds(self, quantizer: Quantizer, name: str) -> tuple[Intervals, ...]:
        """Return, for each dim of a whole buffer, the positions that this rank has."""
        step, shape = self.step(quantizer, name), self.whole_of(quantizer, name)
        return tuple(self._spans(step) if step and dim == self.dim else whole(n) for dim, n in enumerate(shape))

    def part(self, quantizer: Quantizer, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """Return what this rank has of a whole buffer, as a copy."""
        step = self.step(quantizer, name)
        if not step:
            return buffer.clone()
        return along(with_plain_bytes(buffer), self.dim, self._spans(step)).contiguous().view(buffer.dtype)

    def _spans(self, step: int) -> Intervals:
        return tuple((start // step, -(-stop // step)) for start, stop in self.held)


def _encoding(quantizer: Quantizer, name: str) -> Encoding:
    turned = columnwise_of(quantizer.encoding)
    if name in (COLUMN_DATA, COLUMN_SCALE) and turned is not None:
        return turned
    return quantizer.encoding


def step_of(quantizer: Quantizer, name: str, axis: int) -> int:
    """Return how many elements along an axis one position of a buffer stands for; 0 if it stands for all of them.

    Args:
        quantizer: of the matrix, or of the stack.
        name: of the buffer.
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
    """Return how many adjacent elements along a dim share a scale, so that no cut may separate them; at least 1.

    A scale of the whole matrix does not count: every rank keeps it.
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


def misplaced(
    quantizer: Quantizer, shape: Sequence[int], dim: int, held: Sequence[Intervals], *, columnwise: bool = False
) -> Refusal | None:
    """Return the refusal of the first cut that goes through a tile; None if all cuts lie between tiles.

    Args:
        quantizer: of the matrix.
        shape: of the whole.
        dim: that is cut.
        held: for each rank the positions that it has.
        columnwise: whether there are columnwise codes too, even if the quantizer makes none.
    """
    tile = tile_of(quantizer, shape, dim, columnwise=columnwise or quantizer.columnwise)
    for rank, intervals in enumerate(held):
        for place, (start, stop) in enumerate(intervals):
            last = place == len(intervals) - 1 and stop == shape[dim]
            if start % tile or (stop % tile and not last):
                at = start if start % tile else stop
                message = (
                    f"rank {rank} of {len(held)} would get [{start}, {stop}) of dim {dim} of {list(shape)}; {at} = "
                    f"{at // tile} x {tile} + {at % tile} lies inside a tile of {tile} ({quantizer.encoding.name})"
                )
                return Refusal("BLOCK_MISALIGNED", message, hint=_HINT)
    return None


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
