"""Shares: what a rank has of a quantized matrix that tensor parallelism has cut, along rows or columns.

Such cuts lie on borders of tiles, so a share is quantized like a matrix of its own. What it has in common with the
others is what the whole matrix has one of: a scale, an amax, a history. Those are of all ranks together, and equal on
each. Everything else is a part of the whole matrix's buffers, and FSDP2 may cut it once more, between any two rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from transaxle.axes.chunk import Intervals, length, whole
from transaxle.encodings.encoding import WHOLE, Encoding
from transaxle.errors import Refusal, refuse
from transaxle.quant.frame import (
    AMAX,
    COLUMN_DATA,
    COLUMN_SCALE,
    COMPONENTS,
    DATA,
    ORIGIN,
    STATE,
    Frame,
    buffers_of,
    framed,
)
from transaxle.quant.kernels.components import columnwise_of
from transaxle.quant.quantizers import Quantizer
from transaxle.quant.tensor import QuantizedTensor, same_bytes

_HINT = "cut it over fewer ranks; say in the plan how many rows each rank has; or leave it plain (filter=, decode=)"
_MATRIX = 2
"""Dims of a matrix; any before them count matrices."""


def along(values: torch.Tensor, dim: int, intervals: Intervals) -> torch.Tensor:
    """Return the positions of one dim that some intervals hold, in their order, as a copy."""
    return torch.cat([values.narrow(dim, start, stop - start) for start, stop in intervals or ((0, 0),)], dim)


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
        return tuple(length(self.held) if dim == self.dim else size for dim, size in enumerate(self.shape))

    @property
    def member(self) -> Share | None:
        """The share of one matrix of the stack; None where matrices are whole."""
        return replace(self, shape=self.shape[1:], dim=self.dim - 1) if self.dim else None

    def place_in(self, mesh: DeviceMesh) -> int:
        """Return the dim of a mesh along which the ranks of the group lie."""
        ranks = dist.get_process_group_ranks(self.group)
        return next(n for n in range(mesh.ndim) if dist.get_process_group_ranks(mesh.get_group(n)) == ranks)

    def step(self, quantizer: Quantizer, name: str) -> int:
        """Return how many elements along the dim there are for one position of a buffer; 0 if it is not cut."""
        axis = self.dim - len(self.shape)
        if axis < -_MATRIX or name == ORIGIN:
            return 1
        if name in (AMAX, *STATE):
            return WHOLE
        encoding = _encoding(quantizer, name)
        if name in (DATA, COLUMN_DATA):
            return 1 if axis == -_MATRIX else 8 // encoding.code_bits
        return encoding.tile[axis]

    def whole_of(self, quantizer: Quantizer, name: str) -> tuple[int, ...]:
        """Return the shape of a whole buffer."""
        if name == ORIGIN:
            return self.shape
        return buffers_of(quantizer, self.shape, columnwise=name in (COLUMN_DATA, COLUMN_SCALE) or None)[name][1]

    def holds(self, quantizer: Quantizer, name: str) -> tuple[Intervals, ...]:
        """Return which positions of a whole buffer this rank has, by dim."""
        step, shape = self.step(quantizer, name), self.whole_of(quantizer, name)
        return tuple(self._spans(step) if step and dim == self.dim else whole(n) for dim, n in enumerate(shape))

    def part(self, quantizer: Quantizer, name: str, buffer: torch.Tensor) -> torch.Tensor:
        """Return what this rank has of a whole buffer, as a copy."""
        step = self.step(quantizer, name)
        if not step:
            return buffer.clone()
        raw = buffer.view(torch.uint8) if buffer.dtype.itemsize == 1 else buffer
        return along(raw, self.dim, self._spans(step)).contiguous().view(buffer.dtype)

    def of(self, tensor: QuantizedTensor) -> QuantizedTensor:
        """Return this rank's part of a whole tensor, raw, as a copy."""
        frame = tensor.frame
        buffers = {n: self.part(frame.quantizer, n, buffer) for n, buffer in (frame.cut | frame.shared).items()}
        origin = buffers.pop(ORIGIN, None)
        made = framed(frame.quantizer, buffers, self.local, blank=frame.blank)
        if origin is not None:
            made.cut[ORIGIN] = origin
        made.share = self
        return QuantizedTensor(made, 0, self.local[0], tensor.dtype)

    def has(self, frame: Frame) -> bool:
        """Whether a frame is of the same part, or of the whole that this is a part of."""
        other = frame.share
        if other is None:
            return (frame.whole, frame.width or frame.columns) == self.shape
        return (other.shape, other.dim, other.held) == (self.shape, self.dim, self.held)

    def _spans(self, step: int) -> Intervals:
        return tuple((start // step, -(-stop // step)) for start, stop in self.held)


def check_common(target: QuantizedTensor, source: QuantizedTensor) -> None:
    """Refuse a copy into a part of a matrix that would give it a scale, an amax or a history of its own.

    Raises:
        Refused: `UNEQUAL_COPIES`: the other ranks' codes would be left under theirs.
    """
    frame, share = target.frame, target.frame.share
    if target.is_meta or source.is_meta:
        return
    if share is None:
        rows = frame.rows if frame.used is None else frame.used
        known = frame.blank or rows >= frame.whole or source.frame.whole == frame.whole
        common = [name for name in frame.shared if not known]
    else:
        known = share.has(source.frame)
        common = [name for name in (*COMPONENTS, *STATE) if not known and not share.step(target.quantizer, name)]
    mine, given = ({**one.components, **one.state} for one in (target, source))
    names = [name for name in common if name in mine and name in given]
    if not same_bytes({name: mine[name] for name in names}, {name: given[name] for name in names}):
        raise refuse(
            "UNEQUAL_COPIES",
            f"{list(source.shape)} have {', '.join(names)} of their own, and become a part of a larger matrix",
            hint="copy_() values on every rank that has a part, or load_state_dict()",
        )


def _encoding(quantizer: Quantizer, name: str) -> Encoding:
    turned = columnwise_of(quantizer.encoding)
    if name in (COLUMN_DATA, COLUMN_SCALE) and turned is not None:
        return turned
    return quantizer.encoding


def tile_of(quantizer: Quantizer, shape: Sequence[int], dim: int, *, columnwise: bool) -> int:
    """Return the elements along a dim that no cut may separate, since they have scales in common; 1: there are none.

    What a whole matrix has one of stops no cut.
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
    """Return what is wrong with cuts of a matrix: the first that goes through a tile; None if there is none.

    Args:
        quantizer: of the matrix.
        shape: of the whole.
        dim: that is cut.
        held: for each rank the positions that it has.
        columnwise: there are codes for both directions, whatever the quantizer makes.
    """
    tile = tile_of(quantizer, shape, dim, columnwise=columnwise or quantizer.columnwise)
    for rank, intervals in enumerate(held):
        for place, (start, stop) in enumerate(intervals):
            last = place == len(intervals) - 1 and stop == shape[dim]
            if start % tile or (stop % tile and not last):
                at = start if start % tile else stop
                message = (
                    f"rank {rank} of {len(held)} has [{start}, {stop}) of dim {dim} of {list(shape)}; {at} = "
                    f"{at // tile} x {tile} + {at % tile} is inside a tile of {tile} in {quantizer.encoding.name}"
                )
                return Refusal("BLOCK_MISALIGNED", message, hint=_HINT)
    return None
