"""Minifloats: the floating-point types of at most eight bits for codes and scales.

Two of them have no infinity and one has no NaN, so the behaviour of a cast at the limits is a choice: here it rounds to
nearest, ties to even, and larger values become the largest finite value. NaN stays NaN; in E2M1, which has none, it
becomes the largest value, and the scale of its tile is NaN. Signs are kept, those of zero and NaN included.

Sources: OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2), OCP Microscaling Formats 1.0, section 5.3 (E2M1) and
5.4 (E8M0, which has only an exponent: 2**(code - 127), and 255 for NaN).

**Wide dtypes**: the floating-point dtypes of values before encoding and after decoding, and their conversions.
ml_dtypes converts too, but several times slower. Here a NaN keeps its sign, and loses its payload when it is narrowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from transaxle.encodings.encoding import WIDE
from transaxle.errors import refuse

F32_INFINITE = 0x7F800000
F32_NAN = 0x7FC00000
_F32_MANTISSA = 23
_F32_BIAS = 127


class Minifloat(msgspec.Struct, frozen=True, dict=True):
    """A floating-point type with one sign bit, a few exponent and mantissa bits, and subnormals."""

    code: str
    """Safetensors code of the dtype."""
    bits: int
    """Total number of bits; types with fewer than eight have one value per byte here, with zeros above."""
    mantissa: int
    """Number of mantissa bits."""
    bias: int
    """Exponent bias."""
    largest: int
    """Code of the largest finite value, without sign."""
    nan: int
    """Code for NaN, without sign."""
    infinite: int | None = None
    """Code of infinity, without sign; it is read and never written. None where there is none."""

    @cached_property
    def values(self) -> NDArray[np.float32]:
        """Value of each code; NaN has the sign of its code and no payload."""
        magnitude = np.arange(1 << (self.bits - 1), dtype=np.int64)
        exponent, fraction = magnitude >> self.mantissa, magnitude & ((1 << self.mantissa) - 1)
        significand = np.where(exponent == 0, fraction, fraction + (1 << self.mantissa))
        positive = np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - self.bias - self.mantissa)
        positive[self.largest + 1 :] = np.nan
        if self.infinite is not None:
            positive[self.infinite] = np.inf
        values = np.concatenate([positive, np.copysign(positive, -1.0)]).astype(np.float32)
        values.flags.writeable = False
        return values

    @property
    def sign(self) -> int:
        """The sign bit."""
        return 1 << (self.bits - 1)

    @property
    def max(self) -> float:
        """The largest finite value."""
        return float(self.values[self.largest])

    def rounded(self, values: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Return the code of the nearest value of each element, one per byte.

        The function works on the bits of the values. For a normal result, half of the weight of the dropped mantissa
        bits is added before they are dropped. For a subnormal one the processor rounds, when a power of two is added
        whose last bit has the weight of the smallest code.
        """
        raw = values.view(np.uint32)
        magnitude = raw & np.uint32(0x7FFFFFFF)
        shift = _F32_MANTISSA - self.mantissa
        half_less_one = np.uint32((1 << (shift - 1)) - 1)
        # Adding half of the dropped weight, less one for ties to an even mantissa, and shifting rounds to nearest.
        normal = ((magnitude + half_less_one + ((magnitude >> shift) & 1)) >> shift) - np.uint32(
            (_F32_BIAS - self.bias) << self.mantissa
        )
        # A float32 addition of `grain` makes the processor round at the last bit of a subnormal code.
        grain = np.uint32((_F32_BIAS + _F32_MANTISSA + 1 - self.bias - self.mantissa) << _F32_MANTISSA)
        with np.errstate(invalid="ignore"):
            small = (magnitude.view(np.float32) + grain.view(np.float32)).view(np.uint32) - grain
        code = np.where(magnitude < np.uint32((_F32_BIAS + 1 - self.bias) << _F32_MANTISSA), small, normal)
        code = np.where(magnitude > F32_INFINITE, np.uint32(self.nan), np.minimum(code, np.uint32(self.largest)))
        signed_codes: NDArray[np.uint8] = (code | (raw >> 31) * np.uint32(self.sign)).astype(np.uint8)
        return signed_codes


E4M3 = Minifloat("F8_E4M3", bits=8, mantissa=3, bias=7, largest=0x7E, nan=0x7F)
E5M2 = Minifloat("F8_E5M2", bits=8, mantissa=2, bias=15, largest=0x7B, nan=0x7F, infinite=0x7C)
E2M1 = Minifloat("F4", bits=4, mantissa=1, bias=1, largest=7, nan=7)

MINIFLOATS: Mapping[str, Minifloat] = MappingProxyType({kind.code: kind for kind in (E4M3, E5M2, E2M1)})
"""Types of codes, by safetensors code."""

E8M0_NAN = 0xFF
"""The E8M0 code for NaN."""


def power_of_two(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the values of E8M0 codes: 2**-127, a subnormal float32, for 0, and NaN for 255."""
    raw = codes.astype(np.uint32) << _F32_MANTISSA
    raw[codes == 0] = 1 << (_F32_MANTISSA - 1)
    raw[codes == E8M0_NAN] = F32_NAN
    return raw.view(np.float32)


LARGEST: Mapping[str, float] = MappingProxyType(
    {"BF16": (2 - 2.0**-7) * 2.0**127, "F16": (2 - 2.0**-10) * 2.0**15, "F32": (2 - 2.0**-23) * 2.0**127}
)
"""Largest finite value of each wide dtype."""


@cache
def wide_dtype(code: str) -> np.dtype[Any]:
    """Return the numpy dtype of a wide dtype; `ml_dtypes` is imported at the first use of BF16."""
    if code == "BF16":
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype({"F16": np.float16, "F32": np.float32}[code])


def wide_code(dtype: np.dtype[Any]) -> str:
    """Return the safetensors code of a numpy dtype.

    Raises:
        Refused: DTYPE_MISMATCH for a dtype that is not wide.
    """
    for code in WIDE:
        if dtype == wide_dtype(code):
            return code
    raise refuse("DTYPE_MISMATCH", f"values of {dtype} cannot be encoded; {', '.join(WIDE)} can")


def without_sign(values: NDArray[Any]) -> NDArray[np.uint16] | NDArray[np.uint32]:
    """Return the bits of absolute values; they have the same order as the values, with every NaN above infinity."""
    if values.dtype.itemsize == 2:
        return values.view(np.uint16) & np.uint16(0x7FFF)
    return values.view(np.uint32) & np.uint32(0x7FFFFFFF)


def widen(values: NDArray[Any]) -> NDArray[np.float32]:
    """Convert values to float32, exactly."""
    if values.dtype == wide_dtype("BF16"):
        return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return values.astype(np.float32, copy=False)


def narrow(values: NDArray[np.float32], code: str) -> NDArray[Any]:
    """Round float32 values to another dtype: to nearest, ties to even."""
    if code == "F32":
        return values
    raw = values.view(np.uint32)
    nan = np.isnan(values)
    if code == "F16":
        with np.errstate(all="ignore"):
            half = values.astype(np.float16).view(np.uint16)
        return np.where(nan, (raw >> 16 & 0x8000 | 0x7E00).astype(np.uint16), half).view(wide_dtype(code))
    # Round to nearest, ties to even: add half of the last kept bit, and one more if that bit is set.
    even = (raw + np.uint32(0x7FFF) + (raw >> 16 & 1)) >> 16
    return np.where(nan, raw >> 16 & 0x8000 | 0x7FC0, even).astype(np.uint16).view(wide_dtype(code))
