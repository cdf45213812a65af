"""Frames: the buffers of codes and scales behind quantized tensors, which several views of one tensor share.

A quantized matrix consists of codes and scales. FSDP2 cuts matrices between any two rows, but some scales belong to
tiles of several rows, so there are two kinds of buffers. *Cut* buffers have one row for each row of the matrix, and are
cut like it. *Shared* buffers belong to the whole matrix, and every shard has all of them. A frame contains buffers of
both kinds, and the row of the whole matrix at which the frame starts. Frames are mutable, because a copy into a view
must update the scales of the tensor that is viewed.

A stack of matrices, [E, M, K], is a frame whose rows are the matrices. Each matrix has separate scales, so all buffers
are cut and none is shared.

**Stochastic rounding.** A weight has a rounding state: a key, and the number of times that gradients were rounded for
the weight. The state is a buffer of the weight, int64 [2] (in a stack [E, 2]). The rounding state is saved, cut and
loaded with the codes, so a run that resumes draws the same numbers as a run that was not interrupted. The key is a hash
of the recipe's seed, the weight's name and, for experts, the expert's global number. The key does not depend on how
experts are packed, nor on their ranks.

FSDP2 gathers a copy of a stack's states. The copy of the states refers to the buffers from which it was made
(`Frame.echoes`) and increments their counters too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import prod

import torch

from transaxle.encodings.encoding import Encoding
from transaxle.quant.kernels.components import Components, columnwise_of
from transaxle.quant.quantizers import (
    AMAX,
    COLUMN_DATA,
    COLUMN_SCALE,
    COMPONENTS,
    DATA,
    ORIGIN,
    ROUNDING,
    SCALE,
    STATE,
    Quantizer,
    buffers_of,
    is_cut,
    tall,
)
from transaxle.quant.tp_share import Band, Share


@dataclass(slots=True)
class Frame:
    """Codes and scales of adjacent rows of a quantized matrix, or of adjacent matrices of a stack."""

    quantizer: Quantizer
    """The quantizer that computed the codes."""
    columns: int
    """Number of elements in a row; in a stack, number of elements in a row of each matrix."""
    whole: int
    """Number of rows of the whole matrix, which may be more than this frame has; in a stack, number of matrices."""
    cut: dict[str, torch.Tensor]
    """Buffer name -> buffer, for the buffers with one row for each row of this frame."""
    shared: dict[str, torch.Tensor]
    """Buffer name -> buffer, for the buffers that belong to the whole matrix."""
    start: int = 0
    """Index of this frame's first row in the whole matrix."""
    blank: bool = field(default=False, kw_only=True)
    """Whether no values have been written into this frame yet. The first copy into a blank frame sets the frame's
    position in the whole matrix.
    """
    used: int | None = field(default=None, kw_only=True)
    """Number of rows that belong to the matrix; the rows after these are padding. None if there is no padding."""
    matrix: tuple[int, int] | None = field(default=None, kw_only=True)
    """Rows and columns of each matrix of a stack; None for a single matrix, whose rows are cut."""
    band: Band | None = field(default=None, kw_only=True)
    """The range of columns (in a stack, of rows or columns) that this frame has; None if the frame has all columns."""
    of: Frame | None = field(default=None, kw_only=True)
    """The stack's frame, if this frame is a view of one matrix of the stack."""
    share: Share | None = field(default=None, kw_only=True)
    """The tensor-parallel part of a matrix to which this frame belongs; None without tensor parallelism. With tensor
    parallelism, "whole matrix" means the tensor-parallel part in all other fields and methods.
    """
    identity: tuple[str, int] = field(default=("", 0), kw_only=True)
    """The weight's name and the number of its first expert, from which the keys of stochastic rounding are computed."""
    echoes: tuple[torch.Tensor, ...] = field(default=(), kw_only=True)
    """Random-number states from which this tensor's state was copied; each rounding increments their counters too."""

    @property
    def encoding(self) -> Encoding:
        """The encoding of the codes."""
        return self.quantizer.encoding

    @property
    def rows(self) -> int:
        """Number of rows in this frame, including padding."""
        return self.cut[DATA].shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the buffers."""
        return self.cut[DATA].device

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of one row; in a stack, of one matrix."""
        return (self.columns,) if self.matrix is None else self.matrix

    @property
    def columnwise(self) -> bool:
        """Whether the frame has columnwise codes, which have tiles along columns."""
        return COLUMN_DATA in self.cut

    @property
    def tall(self) -> bool:
        """Whether some scales belong to several rows, in which case the frame's position in the whole matrix
        matters.
        """
        return self.matrix is None and tall(self.encoding, columnwise=self.columnwise)

    def buffers(self, skip: int, rows: int) -> dict[str, torch.Tensor]:
        """Return name -> buffer for a range of rows: cut buffers as views of these rows, shared buffers as a whole."""
        by_name = {name: buffer[skip : skip + rows] for name, buffer in self.cut.items()} | self.shared
        return {name: by_name[name] for name in (*COMPONENTS, *STATE) if name in by_name}

    def map_rows(self, skip: int, rows: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Frame:
        """Return a new frame for a range of rows, with `change` (such as a copy) applied to each buffer."""
        return replace(
            self,
            cut={name: change(buffer[skip : skip + rows]) for name, buffer in self.cut.items()},
            shared={name: change(buffer) for name, buffer in self.shared.items()},
            start=self.start + skip,
            used=None,
            of=None,
            echoes=(),
        )

    def common(self, skip: int, rows: int, band: Band | None) -> dict[str, torch.Tensor]:
        """Return name -> buffer, for the buffers of a range of rows that other rows or bands share."""
        whole = () if band is None else [name for name in self.cut if not band.step(self.quantizer, name)]
        return {**self.shared, **{name: self.cut[name][skip : skip + rows] for name in whole}}

    def is_cut(self, name: str) -> bool:
        """Return whether the named buffer has one row for each row of this frame."""
        return is_cut(self.encoding, name, 1 + len(self.row))

    def member(self, index: int) -> Frame:
        """Return one matrix of a stack as a view; writing into the view changes the stack."""
        assert self.matrix is not None
        of_matrix = {name: buffer[index] for name, buffer in self.cut.items()}
        return Frame(
            self.quantizer,
            self.matrix[1],
            self.matrix[0],
            {name: buffer for name, buffer in of_matrix.items() if name == ORIGIN or is_cut(self.encoding, name)},
            {name: buffer for name, buffer in of_matrix.items() if name != ORIGIN and not is_cut(self.encoding, name)},
            blank=self.blank,
            of=self,
            share=None if self.share is None else self.share.member,
            band=None if self.band is None else self.band.member,
            identity=(self.identity[0], self.identity[1] + self.start + index),
        )

    def drop(self, name: str) -> None:
        """Remove an outdated buffer from this frame, and from the stack's frame if this frame is a view of a stack."""
        self.cut.pop(name, None)
        self.shared.pop(name, None)
        if self.of is not None:
            self.of.drop(name)

    def operands(self, skip: int, rows: int, *, columnwise: bool = False) -> tuple[Components, Encoding]:
        """Return the buffers of a range of rows, and the encoding with which to dequantize them.

        If the range starts inside a tile, or has padding after it, the result has one scale per row, and an encoding
        with tiles of one row.
        """
        codes, scale_name = (COLUMN_DATA, COLUMN_SCALE) if columnwise else (DATA, SCALE)
        encoding = columnwise_of(self.encoding) if columnwise else self.encoding
        assert encoding is not None
        first, step, scale = self.start + skip, encoding.tile[0], self.cut.get(scale_name)
        if scale is not None:
            scale = scale[skip : skip + rows]
        else:
            scale = self.shared[scale_name]
            if step > 1 and (first % step or first + rows > self.whole):
                tile_rows = (torch.arange(first, first + rows, device=scale.device) // step).clamp(max=len(scale) - 1)
                scale, encoding = scale[tile_rows], replace(encoding, tile=(1, encoding.tile[1]))
            elif step > 1:
                scale = scale[first // step : -(-(first + rows) // step)]
        return Components(self.cut[codes][skip : skip + rows], scale, self.shared.get(AMAX)), encoding


def blank(
    quantizer: Quantizer, shape: tuple[int, ...], device: torch.device, *, columnwise: bool | None = None
) -> Frame:
    """Create a frame of zeros for a matrix, or for a stack if the shape has three dims. Rows of 4-bit codes are rounded
    up to an even length.
    """
    *leading, columns = shape
    even = columns + columns % (8 // quantizer.encoding.code_bits)
    layouts = buffers_of(quantizer, (*leading, even), columnwise=columnwise)
    zeros = {
        name: torch.zeros(size, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=device).view(dtype)
        for name, (dtype, size) in layouts.items()
    }
    if not is_cut(quantizer.encoding, SCALE):
        zeros[SCALE].fill_(1)
    return make_frame(quantizer, zeros, shape, blank=True)


def make_frame(
    quantizer: Quantizer,
    buffers: Mapping[str, torch.Tensor],
    shape: tuple[int, ...],
    *,
    start: int = 0,
    whole: int | None = None,
    blank: bool = False,
) -> Frame:
    """Create a frame from existing buffers of a matrix [M, K] or stack [E, M, K], or of the rows from `start` on."""
    cut = {name: buffer for name, buffer in buffers.items() if is_cut(quantizer.encoding, name, len(shape))}
    return Frame(
        quantizer,
        prod(shape[1:]),
        shape[0] if whole is None else whole,
        cut,
        {name: buffer for name, buffer in buffers.items() if name not in cut},
        start,
        blank=blank,
        matrix=(shape[1], shape[2]) if len(shape) > 2 else None,
    )


_CALLS = 1
"""Index of the call counter in a rounding state; the key is at index 0."""
_KEY_BYTES = 8


def key_of(seed: int, name: str, number: int) -> int:
    """Return the key from which a weight's stochastic rounding draws, as a signed 64-bit integer.

    Args:
        seed: seed of the recipe.
        name: name of the weight; for an expert, the name without the expert's number.
        number: number of the expert; 0 for a weight that is no expert.
    """
    text = f"{seed}/{number}/{name}".encode()
    return int.from_bytes(blake2b(text, digest_size=_KEY_BYTES).digest(), "little", signed=True)


def state_of(frame: Frame) -> torch.Tensor | None:
    """Return the rounding state of a frame, int64 [2] or [E, 2]; None for recipes without stochastic rounding."""
    return frame.cut.get(ROUNDING, frame.shared.get(ROUNDING))


def begin_rounding(frame: Frame) -> None:
    """Create a new rounding state for a frame, with keys computed from the frame's identity, and counters at 0."""
    seed = frame.quantizer.rounding_seed
    if seed is None:
        return
    name, first = frame.identity
    numbers = range(first, first + 1)
    if frame.matrix is not None:
        numbers = range(first + frame.start, first + frame.start + frame.rows)
    keys = [[key_of(seed, name, number), 0] for number in numbers]
    states = torch.tensor(keys, dtype=torch.int64, device=frame.device).view(-1, 2)
    put_state(frame, states[0] if frame.matrix is None else states)


def put_state(frame: Frame, state: torch.Tensor) -> None:
    """Replace the rounding state of a frame."""
    (frame.shared if frame.matrix is None else frame.cut)[ROUNDING] = state


def fresh(state: torch.Tensor) -> torch.Tensor:
    """Return a copy of a rounding state with the same keys and counters at 0."""
    copy = state.clone()
    reset_calls(copy)
    return copy


def reset_calls(state: torch.Tensor) -> None:
    """Reset the counters of a rounding state to 0, in place."""
    if not state.is_meta:
        state[..., _CALLS] = 0


def count_rounding(frame: Frame) -> torch.Tensor:
    """Return a copy of the rounding state, then increment the counters in the frame and in the buffers from which its
    state was copied.
    """
    state = state_of(frame)
    assert state is not None
    snapshot = state.clone()
    storages = {state.untyped_storage().data_ptr()}
    state[..., _CALLS] += 1
    for echo in frame.echoes:
        if echo.untyped_storage().data_ptr() not in storages:
            storages.add(echo.untyped_storage().data_ptr())
            echo[..., _CALLS] += 1
    return snapshot
