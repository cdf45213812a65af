"""Wide types: the floating-point types that values come in and are decoded to, and their conversions.

ml_dtypes converts too, but several times slower. Here a NaN keeps its sign, and loses its payload when it is narrowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transaxle.encodings.plain_types import WIDE
from transaxle.errors import refuse

LARGEST: Mapping[str, float] = MappingProxyType(
    {"BF16": (2 - 2.0**-7) * 2.0**127, "F16": (2 - 2.0**-10) * 2.0**15, "F32": (2 - 2.0**-23) * 2.0**127}
)
"""The largest finite value of each wide type."""


@cache
def wide_dtype(code: str) -> np.dtype[Any]:
    """Return the numpy type of a wide type; `ml_dtypes` is imported by the first who asks for BF16."""
    if code == "BF16":
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype({"F16": np.float16, "F32": np.float32}[code])


def wide_code(dtype: np.dtype[Any]) -> str:
    """Return the safetensors code of a numpy type.

    Raises:
        Refused: DTYPE_MISMATCH for a type that is not wide.
    """
    for code in WIDE:
        if dtype == wide_dtype(code):
            return code
    raise refuse("DTYPE_MISMATCH", f"values of {dtype} cannot be encoded; {', '.join(WIDE)} can")


def without_sign(values: NDArray[Any]) -> NDArray[np.uint16] | NDArray[np.uint32]:
    """Return the bits of absolute values: they are ordered as those are, with every NaN above infinity."""
    if values.dtype.itemsize == 2:
        return values.view(np.uint16) & np.uint16(0x7FFF)
    return values.view(np.uint32) & np.uint32(0x7FFFFFFF)


def widened(values: NDArray[Any]) -> NDArray[np.float32]:
    """Return values as float32, exactly."""
    if values.dtype == wide_dtype("BF16"):
        return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return values.astype(np.float32, copy=False)


def narrowed(values: NDArray[np.float32], code: str) -> NDArray[Any]:
    """Return float32 values as another type: the nearest, ties to even."""
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
