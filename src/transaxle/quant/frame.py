"""Frames: the memory behind quantized tensors, which views of them share.

A quantized matrix is codes and scales. FSDP2 cuts matrices anywhere between two rows, and some scales stand for
tiles of many rows, so there are two kinds of buffers. *Cut* buffers have a row for each row of the matrix and are cut
with it. *Shared* buffers stand for the whole matrix; every shard has all of them. A frame holds both, and says where
in the whole matrix its rows lie. It is mutable, because a copy into a view has to reach the scales of what was viewed.

A stack of matrices, [E, M, K], is a frame whose rows are the matrices. Each has scales of its own, so that all buffers
are cut with them, and nothing is shared.

The state of random rounding that a weight has: a key, and how often gradients were rounded for it.

The state is a buffer of the weight, int64 [2] (of a stack [E, 2]), so that it is saved, cut and loaded with the codes:
a run that resumes draws the numbers that it would have drawn. The key is a hash of the recipe's seed, the weight's name
and, for experts, the number among all of them; so it does not depend on how the experts are packed, or on which rank
they are.

FSDP2 gathers a copy of a stack's states. A copy knows the buffers that it was made of (`Frame.echoes`) and counts there
too.
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
    """Buffers of adjacent rows of a quantized matrix, or of adjacent matrices of a stack."""

    quantizer: Quantizer
    """What made the codes."""
    columns: int
    """Elements in a row; of a stack, in a matrix."""
    whole: int
    """Rows of the whole matrix, which shared buffers stand for; of a stack, matrices."""
    cut: dict[str, torch.Tensor]
    """Buffers with as many rows as are held here."""
    shared: dict[str, torch.Tensor]
    """Buffers of the whole matrix."""
    start: int = 0
    """Row of the whole matrix that is the first one here."""
    blank: bool = field(default=False, kw_only=True)
    """Whether nothing was written yet: such a frame takes its place in the whole from what is copied into it."""
    used: int | None = field(default=None, kw_only=True)
    """Rows that belong to the matrix; those after them are padding. All of them if None."""
    matrix: tuple[int, int] | None = field(default=None, kw_only=True)
    """Rows and columns of each matrix of a stack; None for one matrix, whose rows are cut."""
    band: Band | None = field(default=None, kw_only=True)
    """Which columns these are, where they are some of the whole matrix's; of a stack, which rows or columns."""
    of: Frame | None = field(default=None, kw_only=True)
    """The stack that this is one matrix of, as a view."""
    share: Share | None = field(default=None, kw_only=True)
    """What the matrix, or stack, is a part of, where tensor parallelism has cut a whole one; then that part counts as
    the whole everywhere else here."""
    identity: tuple[str, int] = field(default=("", 0), kw_only=True)
    """Name of the weight, and number of the first expert: what random rounding is keyed by (`rounding_state`)."""
    echoes: tuple[torch.Tensor, ...] = field(default=(), kw_only=True)
    """Buffers that the state of random rounding here was copied from, and that count with it."""

    @property
    def encoding(self) -> Encoding:
        """What the codes are."""
        return self.quantizer.encoding

    @property
    def rows(self) -> int:
        """Rows held here, padding included."""
        return self.cut[DATA].shape[0]

    @property
    def device(self) -> torch.device:
        """Where the buffers lie."""
        return self.cut[DATA].device

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of a row; of a stack, of a matrix."""
        return (self.columns,) if self.matrix is None else self.matrix

    @property
    def columnwise(self) -> bool:
        """Whether there are codes with tiles that run down columns."""
        return COLUMN_DATA in self.cut

    @property
    def tall(self) -> bool:
        """Whether scales cover several rows, so that it matters where in the whole matrix these rows lie."""
        return self.matrix is None and tall(self.encoding, columnwise=self.columnwise)

    def buffers(self, skip: int, rows: int) -> dict[str, torch.Tensor]:
        """Return the buffers of some of the rows, by name: cut ones as views, shared ones whole."""
        by_name = {name: buffer[skip : skip + rows] for name, buffer in self.cut.items()} | self.shared
        return {name: by_name[name] for name in (*COMPONENTS, *STATE) if name in by_name}

    def taken(self, skip: int, rows: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Frame:
        """Return a frame of some of the rows, with `change` applied to each buffer (a copy, a move)."""
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
        """Return the buffers of some of the rows that other rows, or other bands, have values under too."""
        whole = () if band is None else [name for name in self.cut if not band.step(self.quantizer, name)]
        return {**self.shared, **{name: self.cut[name][skip : skip + rows] for name in whole}}

    def is_cut(self, name: str) -> bool:
        """Whether a buffer has a row for each row held here."""
        return is_cut(self.encoding, name, 1 + len(self.row))

    def member(self, place: int) -> Frame:
        """Return one matrix of a stack as a view; writing into it changes the stack."""
        assert self.matrix is not None
        of_matrix = {name: buffer[place] for name, buffer in self.cut.items()}
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
            identity=(self.identity[0], self.identity[1] + self.start + place),
        )

    def drop(self, name: str) -> None:
        """Remove a buffer that would be stale, here and in the stack that this is a part of."""
        self.cut.pop(name, None)
        self.shared.pop(name, None)
        if self.of is not None:
            self.of.drop(name)

    def operands(self, skip: int, rows: int, *, columnwise: bool = False) -> tuple[Components, Encoding]:
        """Return the buffers of some of the rows, and the encoding by which to dequantize them.

        Rows that begin inside a tile or have padding after them get one scale per row, and an encoding that says so.
        """
        codes, stored = (COLUMN_DATA, COLUMN_SCALE) if columnwise else (DATA, SCALE)
        encoding = columnwise_of(self.encoding) if columnwise else self.encoding
        assert encoding is not None
        first, step, scale = self.start + skip, encoding.tile[0], self.cut.get(stored)
        if scale is not None:
            scale = scale[skip : skip + rows]
        else:
            scale = self.shared[stored]
            if step > 1 and (first % step or first + rows > self.whole):
                places = (torch.arange(first, first + rows, device=scale.device) // step).clamp(max=len(scale) - 1)
                scale, encoding = scale[places], replace(encoding, tile=(1, encoding.tile[1]))
            elif step > 1:
                scale = scale[first // step : -(-(first + rows) // step)]
        return Components(self.cut[codes][skip : skip + rows], scale, self.shared.get(AMAX)), encoding


def blank(
    quantizer: Quantizer, shape: tuple[int, ...], device: torch.device, *, columnwise: bool | None = None
) -> Frame:
    """Make a frame of zeros: of a matrix, or with three dims of a stack. An odd row of 4-bit codes has one too many."""
    *leading, columns = shape
    even = columns + columns % (8 // quantizer.encoding.code_bits)
    wanted = buffers_of(quantizer, (*leading, even), columnwise=columnwise)
    zeros = {
        name: torch.zeros(size, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=device).view(dtype)
        for name, (dtype, size) in wanted.items()
    }
    if not is_cut(quantizer.encoding, SCALE):
        zeros[SCALE].fill_(1)
    return framed(quantizer, zeros, shape, blank=True)


def framed(
    quantizer: Quantizer,
    buffers: Mapping[str, torch.Tensor],
    shape: tuple[int, ...],
    *,
    start: int = 0,
    whole: int | None = None,
    blank: bool = False,
) -> Frame:
    """Put a frame around the buffers of a matrix [M, K] or of a stack [E, M, K], or of its rows from `start` on."""
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
"""Position of the number of calls in a state; the key stands before it."""
_KEY_BYTES = 8


def key_of(seed: int, name: str, number: int) -> int:
    """Return the key of a weight as a signed integer of 64 bits.

    Args:
        seed: of the recipe.
        name: of the weight; of an expert, what all experts have in common.
        number: of the expert; 0 for any other weight.
    """
    text = f"{seed}/{number}/{name}".encode()
    return int.from_bytes(blake2b(text, digest_size=_KEY_BYTES).digest(), "little", signed=True)


def state_of(frame: Frame) -> torch.Tensor | None:
    """Return the buffer, int64 [2] or [E, 2]; None for recipes that do not round at random."""
    return frame.cut.get(ROUNDING, frame.shared.get(ROUNDING))


def begin(frame: Frame) -> None:
    """Give a frame a state that has not rounded anything, with the key, or the keys, that its identity says."""
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
    """Give a frame a state."""
    (frame.shared if frame.matrix is None else frame.cut)[ROUNDING] = state


def fresh(state: torch.Tensor) -> torch.Tensor:
    """Return a copy of a state with the same keys and no calls."""
    copy = state.clone()
    forget(copy)
    return copy


def forget(state: torch.Tensor) -> None:
    """Set the number of calls to 0, in place."""
    if not state.is_meta:
        state[..., _CALLS] = 0


def taken(frame: Frame) -> torch.Tensor:
    """Return a copy of the state, and count a call: in the frame, and in what it was copied from."""
    state = state_of(frame)
    assert state is not None
    now = state.clone()
    counted = {state.untyped_storage().data_ptr()}
    state[..., _CALLS] += 1
    for echo in frame.echoes:
        if echo.untyped_storage().data_ptr() not in counted:
            counted.add(echo.untyped_storage().data_ptr())
            echo[..., _CALLS] += 1
    return now
