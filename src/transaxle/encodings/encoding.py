"""Encodings: number formats that store a tensor as codes and scales.

File readers, the conversion planner, the codecs and the training code all use the same `Encoding` objects. The value of
an element is its code times the scale of its tile, times the tensor's global factor if there is one. A *tile* is a
block of elements that share one scale. Tiles cover the last dims of the stored tensor; in a stack of matrices, each
matrix has its own tiles.

**Error**: the summed difference between the original values and the values that are read back after encoding or
rounding.

**Plain dtypes**: the safetensors codes of the floating-point dtypes of unquantized tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

import msgspec

WHOLE = 0
"""Tile size which means that one tile covers the whole dim, however long the dim is."""


HALF_BYTES = frozenset({"F4", "I4", "NF4", "FP4"})
"""Dtypes of 4-bit codes."""
INTEGER_CODES: Mapping[str, int] = MappingProxyType({"I4": 8, "I8": 0, "U8": 128})
"""Dtype of integer codes -> number that is added to an integer before it is stored; `I8` is in two's complement."""
_LARGEST = {
    "F8_E4M3": 448.0, "F8_E5M2": 57344.0, "F4": 6.0, "I4": 7.0, "I8": 127.0, "U8": 127.0, "NF4": 1.0, "FP4": 1.0,
}  # fmt: skip
"""Dtype of codes -> largest value that a code represents."""


class Role(StrEnum):
    """Purpose of one buffer of an encoded tensor."""

    CODES = "codes"
    SCALE = "scale"
    """One scale factor per tile of codes."""
    GLOBAL = "global"
    """One scale number per tensor, by which values are multiplied or divided, depending on the naming convention."""
    INPUT_SCALE = "input_scale"
    """One number per tensor for quantizing the layer's input activations. The input scale does not affect the weight,
    but is moved together with the weight.
    """
    ZERO = "zero_point"
    """One zero point per tile, a code that stands for the value 0: a value is `(code - zero point) x scale`."""
    SHAPE = "shape"
    """The tensor's shape, in elements, as a list of integers."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a tensor's values are stored as codes and scales."""

    name: str
    """Name in rules files and on the command line: a key of `ENCODINGS`."""
    code: str
    """Dtype of the codes: `F8_E4M3`, `F8_E5M2`, `F4` (E2M1), `I8`, `I4` (the integer plus 8), `U8` (the integer plus
    128), `NF4` or `FP4` (bitsandbytes' tables). 4-bit codes are two per byte, the low nibble first.
    """
    scale: str
    """Dtype of the stored scales, as a safetensors code."""
    tile: tuple[int, ...]
    """Number of elements that share one scale, along each of the last dims; `WHOLE` means the whole dim."""
    has_global: bool = False
    """Whether the tensor has a global scale in addition to the scales of its tiles."""
    power_of_two: bool = False
    """Whether scales are rounded to powers of two when they are written (E8M0 scales always are)."""
    scale_max: int = 448
    """Upper limit of the block scales of an nvfp4 tensor: 448, or 256 in the `4 over 6` variant of
    TransformerEngine.
    """
    zero_rows: int = 0
    """Number of rows whose zero points are packed in one stored number; 0 if there are no zero points."""

    @property
    def code_bits(self) -> int:
        """Number of bits of one code."""
        return 4 if self.code in HALF_BYTES else 8

    @property
    def code_max(self) -> float:
        """Largest finite value that a code represents."""
        return _LARGEST[self.code]

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers."""
        return self.code in INTEGER_CODES

    def tiles(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tile size along every dim of a tensor with this shape, with `WHOLE` replaced by the dim's length.

        Raises:
            ValueError: if the tensor has fewer dims than the tile.
        """
        return _tiles(self.tile, shape)

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of tiles along each dim of a tensor of this shape."""
        return _grid(self.tile, shape)

    def zero_tiles(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many elements along each dim share one stored number of zero points.

        Raises:
            ValueError: if the tensor has fewer dims than the tile.
        """
        *outer, rows, columns = self.tiles(shape)
        return (*outer, rows * self.zero_rows, columns)

    def zero_grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of stored numbers of zero points along each dim of a tensor of this shape."""
        return tuple(-(-size // step) for size, step in zip(shape, self.zero_tiles(shape), strict=True))


@lru_cache(maxsize=4096)
def _tiles(tile: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tile size along every dim of a shape; layers and experts have the same shapes."""
    leading = len(shape) - len(tile)
    if leading < 0:
        raise ValueError(f"a tensor of {len(shape)} dims has no tiles of {len(tile)}")
    trailing = (max(size, 1) if step == WHOLE else step for size, step in zip(shape[leading:], tile, strict=True))
    return (1,) * leading + tuple(trailing)


@lru_cache(maxsize=4096)
def _grid(tile: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of tiles along each dim of a shape."""
    return tuple(-(-size // step) for size, step in zip(shape, _tiles(tile, shape), strict=True))


FLOAT8 = Encoding("float8", "F8_E4M3", "F32", (WHOLE, WHOLE))
FLOAT8_BLOCK = Encoding("float8_block", "F8_E4M3", "F32", (128, 128), power_of_two=True)
MXFP8 = Encoding("mxfp8", "F8_E4M3", "F8_E8M0", (1, 32), power_of_two=True)
MXFP4 = Encoding("mxfp4", "F4", "F8_E8M0", (1, 32), power_of_two=True)
NVFP4 = Encoding("nvfp4", "F4", "F8_E4M3", (1, 16), has_global=True)
INT4 = Encoding("int4", "I4", "BF16", (1, 32))
INT8 = Encoding("int8", "I8", "BF16", (1, WHOLE))
NF4 = Encoding("nf4", "NF4", "F32", (1, 64))
FP4 = Encoding("fp4", "FP4", "F32", (1, 64))

_ALL = (FLOAT8, FLOAT8_BLOCK, MXFP8, MXFP4, NVFP4, INT4, INT8, NF4, FP4)
ENCODINGS: Mapping[str, Encoding] = MappingProxyType({encoding.name: encoding for encoding in _ALL})
"""Name -> encoding, in its usual variant; files may contain other variants (E5M2 codes, other tile sizes)."""


class EncodedTensor(msgspec.Struct, frozen=True):
    """A quantized tensor, which a checkpoint stores in several buffers."""

    name: str
    """Name of the tensor without buffer suffixes, such as `model.layers.0.mlp.down_proj.weight`."""
    encoding: Encoding
    """How the tensor's codes and scales encode its values."""
    shape: tuple[int, ...]
    """Shape of the tensor in elements; two 4-bit codes in one byte count as two."""
    parts: Mapping[Role, str]
    """Role of each buffer (codes, scale, …) -> stored name of that buffer."""
    convention: str
    """Key of `CONVENTIONS`, which defines the names and shapes of the buffers and the meaning of the global scale."""


class Error(msgspec.Struct, frozen=True):
    """Summed differences between two arrays of equal size. The errors of several parts of a tensor can be added.

    Two NaN values count as equal. A difference counts as infinite if only one of the values is NaN, or if one is
    infinite and the other is a different value.
    """

    max: float = 0.0
    """Largest absolute difference of two corresponding elements."""
    square_sum: float = 0.0
    """Sum of the squared differences. The last digits of the sum depend on the order of summation, which differs
    between the implementations.
    """
    count: int = 0
    """Number of compared elements."""
    unequal: int = 0
    """Number of compared elements that differ."""

    @property
    def exact(self) -> bool:
        """Whether all compared elements are equal."""
        return self.unequal == 0

    @property
    def rms(self) -> float:
        """Square root of the mean squared difference; 0 if no elements were compared."""
        return math.sqrt(self.square_sum / self.count) if self.count else 0.0

    def __add__(self, error: Error) -> Error:
        return Error(
            max(self.max, error.max),
            self.square_sum + error.square_sum,
            self.count + error.count,
            self.unequal + error.unequal,
        )


Wide = Literal["BF16", "F16", "F32"]
"""Safetensors code of a dtype that values may have before encoding, or after decoding or casting."""
WIDE: tuple[str, ...] = ("BF16", "F16", "F32")
"""All wide dtypes (see `Wide`), as safetensors codes."""
PLAIN = frozenset({"F64", *WIDE})
"""Floating-point dtypes whose values can be cast, as safetensors codes."""
CASTS: Mapping[str, Wide] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""Name of a dtype on the command line -> safetensors code of that dtype."""
