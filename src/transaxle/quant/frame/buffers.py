"""The buffers of a quantized matrix: their names, types and shapes, and which of them are cut with rows."""

from __future__ import annotations

import torch

from transaxle.encodings.conventions.convention import ASIDE
from transaxle.encodings.encoding import Encoding
from transaxle.quant.frame.quantizers import Quantizer
from transaxle.quant.kernels.components import columnwise_of, layout

DATA = "data"
SCALE = "scale_inv"
AMAX = "amax"
COLUMN_DATA, COLUMN_SCALE, HISTORY, SCALED_FOR, ROUNDING = ASIDE
ORIGIN = "high_precision_init"
"""Name of the values that the first codes were made of, where they are kept for master weights."""
COMPONENTS = (DATA, SCALE, AMAX, COLUMN_DATA, COLUMN_SCALE)
"""Names of buffers that make up values, in their order."""
STATE = (HISTORY, SCALED_FOR, ROUNDING)
"""Names of buffers that say how the next values are scaled (delayed scaling), or rounded (NVFP4 training)."""


def is_cut(encoding: Encoding, name: str, dims: int = 2) -> bool:
    """Whether a buffer has one row for each row of the matrix. In a stack (3 dims) every buffer has one per matrix."""
    return dims > 2 or name in (DATA, COLUMN_DATA) or (name == SCALE and encoding.tile[0] == 1)


def tall(encoding: Encoding, *, columnwise: bool) -> bool:
    """Whether there are scales of tiles that a cut between two rows can run through."""
    return encoding.tile[0] > 1 or columnwise


def buffers_of(
    quantizer: Quantizer, shape: tuple[int, ...], *, columnwise: bool | None = None
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each buffer of a matrix or a stack, those of the state included."""
    both = quantizer.columnwise if columnwise is None else columnwise
    rows, columns = shape[-2:]
    wanted = layout(
        quantizer.encoding, (rows, columns), columnwise=both and columnwise_of(quantizer.encoding) is not None
    )
    wanted |= {name: (torch.float32, (size,)) for name, size in quantizer.state_sizes.items()}
    if quantizer.rounding_seed is not None:
        wanted[ROUNDING] = torch.int64, (2,)
    return {name: (dtype, (*shape[:-2], *size)) for name, (dtype, size) in wanted.items()}
