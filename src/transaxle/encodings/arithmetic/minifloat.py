"""Minifloats: the floating-point types of at most eight bits that codes and scales are stored in.

Casts to these types round to nearest, ties to even. Values that are too large become the largest finite value, because
E4M3 and E2M1 have no infinity. NaN stays NaN, except in E2M1, which has no NaN: there, NaN becomes the largest value,
and the scale of its tile becomes NaN. Signs are kept, including the signs of zero and NaN.

Sources: OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2), OCP Microscaling Formats 1.0, section 5.3 (E2M1) and
5.4 (E8M0, which has only an exponent: 2**(code - 127), and 255 for NaN).

**Wide dtypes**: BF16, F16 and F32, the dtypes of values before encoding and after decoding. The conversions in this
module are several times as fast as those of ml_dtypes. A NaN keeps its sign, and loses its payload bits when it is
converted to fewer bits.
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
    """Total number of bits; in this module a type of fewer than eight bits has one value per byte, upper bits zero."""
    mantissa: int
    """Number of mantissa bits."""
    bias: int
    """Exponent bias: the exponent field minus the bias is the power of two."""
    largest: int
    """Code of the largest finite value, without sign."""
    nan: int
    """Code for NaN, without sign."""
    infinite: int | None = None
    """Code of infinity, without sign; infinity is read but never written. None for a type without infinity."""

    @cached_property
    def values(self) -> NDArray[np.float32]:
        """Code -> value; a NaN has the sign of its code and no payload bits."""
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
        """The code in which only the sign bit is set."""
        return 1 << (self.bits - 1)

    @property
    def max(self) -> float:
        """The largest finite value."""
        return float(self.values[self.largest])

    def rounded(self, values: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Return, for each element, the code of the nearest value of this type, one code per byte.

        The function works on the bits of the values. For a normal result, half of the last kept mantissa bit is added,
        and then the lower bits are dropped. For a subnormal result, a power of two is added that is so large that the
        processor's float32 addition does the rounding.
        """
        raw = values.view(np.uint32)
        magnitude = raw & np.uint32(0x7FFFFFFF)
        shift = _F32_MANTISSA - self.mantissa
        half_less_one = np.uint32((1 << (shift - 1)) - 1)
        # Rounds to nearest by adding just under half of the last kept bit before the shift (ties to an even mantissa).
        normal = ((magnitude + half_less_one + ((magnitude >> shift) & 1)) >> shift) - np.uint32(
            (_F32_BIAS - self.bias) << self.mantissa
        )
        # Adding `grain` in float32 makes the processor round at the last bit of a subnormal code.
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
"""Safetensors code of the dtype -> minifloat type, for the types that codes may have."""

E8M0_NAN = 0xFF
"""The E8M0 code for NaN."""


def power_of_two(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the float32 values of E8M0 codes, powers of two: 2**-127 (a subnormal) for code 0, NaN for code 255."""
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
        Refused: with the code DTYPE_MISMATCH if the dtype is none of BF16, F16 and F32.
    """
    for code in WIDE:
        if dtype == wide_dtype(code):
            return code
    raise refuse("DTYPE_MISMATCH", f"values of {dtype} cannot be encoded; {', '.join(WIDE)} can")


def without_sign(values: NDArray[Any]) -> NDArray[np.uint16] | NDArray[np.uint32]:
    """Return the bits of absolute values as integers. The integers sort like the absolute values, and every NaN is
    above infinity.
    """
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
    """Round float32 values to a wide dtype (BF16, F16 or F32): to nearest, ties to even."""
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
