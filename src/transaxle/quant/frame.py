"""Frames: the memory behind quantized tensors, which views of them share.

A quantized matrix is codes and scales. FSDP2 cuts matrices anywhere between two rows, and some scales stand for
tiles of many rows, so there are two kinds of buffers. *Cut* buffers have a row for each row of the matrix and are cut
with it. *Shared* buffers stand for the whole matrix; every shard has all of them. A frame holds both, and says where
in the whole matrix its rows lie. It is mutable, because a copy into a view has to reach the scales of what was viewed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from transaxle.encodings.encoding import Encoding
from transaxle.quant.kernels.components import Components, columnwise_of, layout
from transaxle.quant.quantizers import Quantizer

DATA = "data"
SCALE = "scale_inv"
AMAX = "amax"
COLUMN_DATA = "columnwise_data"
COLUMN_SCALE = "columnwise_scale_inv"
HISTORY = "amax_history"
SCALED_FOR = "scaled_for"
ORIGIN = "high_precision_init"
"""Name of the values that the first codes were made of, where they are kept for master weights."""
COMPONENTS = (DATA, SCALE, AMAX, COLUMN_DATA, COLUMN_SCALE)
"""Names of buffers that make up values, in their order."""
STATE = (HISTORY, SCALED_FOR)
"""Names of buffers that say how the next values are scaled (delayed scaling)."""


def is_cut(encoding: Encoding, name: str) -> bool:
    """Whether a buffer has a row for each row of the matrix."""
    return name in (DATA, COLUMN_DATA) or (name == SCALE and encoding.tile[0] == 1)


def tall(encoding: Encoding, *, columnwise: bool) -> bool:
    """Whether there are scales of tiles that a cut between two rows can run through."""
    return encoding.tile[0] > 1 or columnwise


@dataclass(slots=True)
class Frame:
    """Buffers of adjacent rows of a quantized matrix."""

    quantizer: Quantizer
    """What made the codes."""
    columns: int
    """Elements in a row."""
    whole: int
    """Rows of the whole matrix, which shared buffers stand for."""
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
    def columnwise(self) -> bool:
        """Whether there are codes with tiles that run down columns."""
        return COLUMN_DATA in self.cut

    @property
    def tall(self) -> bool:
        """Whether it matters where in the whole the rows lie."""
        return tall(self.encoding, columnwise=self.columnwise)

    def buffers(self, skip: int, rows: int) -> dict[str, torch.Tensor]:
        """Return the buffers of some of the rows, by name: cut ones as views, shared ones whole."""
        held = {name: buffer[skip : skip + rows] for name, buffer in self.cut.items()} | self.shared
        return {name: held[name] for name in (*COMPONENTS, *STATE) if name in held}

    def taken(self, skip: int, rows: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Frame:
        """Return a frame of some of the rows whose buffers are what `change` makes of these."""
        return replace(
            self,
            cut={name: change(buffer[skip : skip + rows]) for name, buffer in self.cut.items()},
            shared={name: change(buffer) for name, buffer in self.shared.items()},
            start=self.start + skip,
            used=None,
        )

    def operands(self, skip: int, rows: int) -> tuple[Components, Encoding]:
        """Return what gives the values of some of the rows: their buffers, and the encoding to read them by.

        Rows that start inside a tile get a scale each.
        """
        encoding, scale = self.encoding, self.cut.get(SCALE)
        first, step = self.start + skip, encoding.tile[0]
        if scale is not None:
            scale = scale[skip : skip + rows]
        else:
            scale = self.shared[SCALE]
            if step > 1 and first % step:
                places = torch.arange(first, first + rows, device=scale.device) // step
                scale, encoding = scale[places], replace(encoding, tile=(1, encoding.tile[1]))
            elif step > 1:
                scale = scale[first // step : -(-(first + rows) // step)]
        return Components(self.cut[DATA][skip : skip + rows], scale, self.shared.get(AMAX)), encoding


def blank(
    quantizer: Quantizer, rows: int, columns: int, device: torch.device, *, columnwise: bool | None = None
) -> Frame:
    """Make a frame of zeros."""
    encoding = quantizer.encoding
    wanted = buffers_of(quantizer, (rows, columns), columnwise=columnwise)
    made = {
        name: torch.zeros(shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=device).view(dtype)
        for name, (dtype, shape) in wanted.items()
    }
    cut = {name: buffer for name, buffer in made.items() if is_cut(encoding, name)}
    shared = {name: buffer for name, buffer in made.items() if name not in cut}
    if SCALE in shared:
        shared[SCALE].fill_(1)
    return Frame(quantizer, columns, rows, cut, shared, blank=True)


def buffers_of(
    quantizer: Quantizer, shape: tuple[int, int], *, columnwise: bool | None = None
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each buffer of a matrix, those of the state included."""
    both = quantizer.columnwise if columnwise is None else columnwise
    wanted = layout(quantizer.encoding, shape, columnwise=both and columnwise_of(quantizer.encoding) is not None)
    return wanted | {name: (torch.float32, (size,)) for name, size in quantizer.state_sizes.items()}
