"""Encodings: number formats that store a tensor as codes and scales.

An encoding is the one description that readers, the planner, the codecs and the training side share. The value of an
element is its code times the scale of its tile, times the global factor if there is one. Tiles cover the trailing
stored dims; every index along the dims before them has separate tiles.

**Error**: the summed difference between values and the values that they represent.

**Plain dtypes**: the floating-point dtypes of values without encoding, by safetensors code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

import msgspec

WHOLE = 0
"""Size of a tile that covers a whole dim, of any length."""


class Role(StrEnum):
    """Purpose of one buffer of an encoded tensor."""

    CODES = "codes"
    SCALE = "scale"
    """One factor per tile."""
    GLOBAL = "global"
    """One number per tensor; the convention defines how it enters the value."""
    INPUT_SCALE = "input_scale"
    """One number per tensor for the layer's activations: no part of the weight's value, but it moves with it."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a tensor's values are stored as codes and scales."""

    name: str
    """Name in tables and on the command line: a key of `ENCODINGS`."""
    code: str
    """Dtype of the codes: `F8_E4M3`, `F8_E5M2` or `F4` (E2M1, two per byte, the low nibble first)."""
    scale: str
    """Dtype of the scales, as a safetensors code."""
    tile: tuple[int, ...]
    """Elements along each trailing dim that share one scale; `WHOLE` for the whole dim."""
    has_global: bool = False
    """Whether there is a second, per-tensor scale."""
    power_of_two: bool = False
    """Whether scales are written as powers of two (E8M0 scales always are)."""
    scale_max: int = 448
    """Largest value that nvfp4 block scales are computed to reach; 256 in the `4 over 6` variant. No tensor mixes
    scales of both kinds.
    """

    @property
    def code_bits(self) -> int:
        """Bits per code."""
        return 4 if self.code == "F4" else 8

    @property
    def code_max(self) -> float:
        """Largest finite value of a code."""
        return {"F8_E4M3": 448.0, "F8_E5M2": 57344.0, "F4": 6.0}[self.code]

    def tiles(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tile of a tensor of this shape: the positive number of positions along each of its dims.

        Raises:
            ValueError: the tensor has fewer dims than the tile.
        """
        leading = len(shape) - len(self.tile)
        if leading < 0:
            raise ValueError(f"a tensor of {len(shape)} dims has no tiles of {len(self.tile)}")
        trailing = (
            max(size, 1) if step == WHOLE else step for size, step in zip(shape[leading:], self.tile, strict=True)
        )
        return (1,) * leading + tuple(trailing)

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of tiles along each dim of a tensor of this shape."""
        return tuple(-(-size // step) for size, step in zip(shape, self.tiles(shape), strict=True))


FLOAT8 = Encoding("float8", "F8_E4M3", "F32", (WHOLE, WHOLE))
FLOAT8_BLOCK = Encoding("float8_block", "F8_E4M3", "F32", (128, 128), power_of_two=True)
MXFP8 = Encoding("mxfp8", "F8_E4M3", "F8_E8M0", (1, 32), power_of_two=True)
MXFP4 = Encoding("mxfp4", "F4", "F8_E8M0", (1, 32), power_of_two=True)
NVFP4 = Encoding("nvfp4", "F4", "F8_E4M3", (1, 16), has_global=True)

ENCODINGS: Mapping[str, Encoding] = MappingProxyType({e.name: e for e in (FLOAT8, FLOAT8_BLOCK, MXFP8, MXFP4, NVFP4)})
"""The encodings by name, as they are written; files may have variants (E5M2 codes, other tiles)."""


class EncodedTensor(msgspec.Struct, frozen=True):
    """A tensor that a checkpoint stores in several buffers."""

    name: str
    """Name in tables, such as `model.layers.0.mlp.down_proj.weight`."""
    encoding: Encoding
    """How the tensor's codes and scales encode its values."""
    shape: tuple[int, ...]
    """Shape in elements; packed codes count one by one."""
    parts: Mapping[Role, str]
    """Role -> stored name of the buffer."""
    convention: str
    """Key of `CONVENTIONS`: names and shapes of the tensor's buffers, and the meaning of its global scale."""


class Error(msgspec.Struct, frozen=True):
    """Summed differences of two arrays of equal size. The errors of a tensor's parts add up to that of the whole
    tensor.

    Two NaN do not differ. A NaN differs from any number by infinity, and so does an infinity from anything else.
    """

    max: float = 0.0
    """Largest absolute difference."""
    square_sum: float = 0.0
    """Sum of the squared differences. The sum's last digits depend on the order of summation, and so on the
    implementation.
    """
    count: int = 0
    """Number of values."""
    unequal: int = 0
    """Number of values that differ."""

    @property
    def exact(self) -> bool:
        """Whether no value differs."""
        return self.unequal == 0

    @property
    def rms(self) -> float:
        """Root of the mean squared difference; 0 where there are no values."""
        return math.sqrt(self.square_sum / self.count) if self.count else 0.0

    def __add__(self, error: Error) -> Error:
        return Error(
            max(self.max, error.max),
            self.square_sum + error.square_sum,
            self.count + error.count,
            self.unequal + error.unequal,
        )


Wide = Literal["BF16", "F16", "F32"]
"""Safetensors code of a dtype that values are encoded from, or decoded or cast to."""
WIDE: tuple[str, ...] = ("BF16", "F16", "F32")
"""All wide dtypes."""
PLAIN = frozenset({"F64", *WIDE})
"""Dtypes whose values can be cast."""
CASTS: Mapping[str, Wide] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""Name of a dtype on the command line -> its safetensors code."""
