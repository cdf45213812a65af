"""Scaling: computes the scale of a tile from the tile's largest absolute value (*amax*).

Each scaling rule returns two arrays with one number per tile: the stored scales, and the multipliers that are applied
to values before rounding to codes. A multiplier is not always the exact inverse of the stored scale, because each rule
rounds in the same places as TransformerEngine (August 2026). All arithmetic is float32, one operation at a time. An
amax of NaN means that the tile contains a NaN.

**Casting**: converts unquantized values to another floating-point dtype, as torch's `.to` does. A cast rounds to
nearest, ties to even. Values that are too large become infinite, and NaN stays NaN. As in torch, float64 is first
converted to float32.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from transaxle.encodings.arithmetic.minifloat import E4M3, E8M0_NAN, F32_NAN, narrow, widen
from transaxle.encodings.encoding import Encoding, Error
from transaxle.errors import refuse

Reals = NDArray[np.float32]

_F32_MAX = np.float32(np.finfo(np.float32).max)
_ONE = np.float32(1)
_EXPONENT = np.uint32(0xFF800000)
_HALVED = 0x400000
"""The bits of 2**-127 as a subnormal float32: only the highest mantissa bit is set."""


class TileScales(msgspec.Struct, frozen=True):
    """Scales of all tiles of a matrix: arrays with one element per tile."""

    stored: NDArray[np.float32] | NDArray[np.uint8]
    """The scales to store: float32, or the 8 bits of an E8M0 or E4M3 number."""
    multiplier: Reals
    """Factors by which values are multiplied before they are rounded to codes."""


def scales(encoding: Encoding, amax: Reals, *, widest: float, tensor: float | None = None) -> TileScales:
    """Compute the scales of tiles from their largest absolute values.

    Args:
        encoding: the encoding to write; the dtype of its scales determines which scaling rule applies.
        amax: largest absolute value of each tile, as float32.
        widest: largest finite value of the dtype of the input values.
        tensor: largest absolute value of the whole tensor; required for encodings with a global scale.

    Raises:
        Refused: with the code UNSUPPORTED if the encoding's scales can only be read.
        ValueError: if the encoding has a global scale, and `tensor` is missing.
    """
    with np.errstate(all="ignore"):
        if encoding.scale == "F32" and not encoding.has_global:
            return _float(amax, encoding.code_max, np.float32(widest), clear_mantissa=encoding.power_of_two)
        if encoding.scale == "F8_E8M0" and not encoding.has_global:
            return _exponent(amax, encoding.code_max)
        if encoding.scale == E4M3.code and encoding.has_global:
            if tensor is None:
                raise ValueError(f"{encoding.name} needs the amax of the whole tensor")
            return _two_levels(amax, np.float32(tensor), encoding.code_max, encoding.scale_max)
    note = ", and one for the tensor" if encoding.has_global else ""
    raise refuse(
        "UNSUPPORTED",
        f"{encoding.name}: codes {encoding.code} with scales {encoding.scale}{note} can be read, but not written",
        hint="Encode to float8, float8_block, mxfp8, mxfp4 or nvfp4.",
    )


def _float(amax: Reals, code_max: float, widest: np.float32, *, clear_mantissa: bool) -> TileScales:
    """Compute float32 scales: the multiplier is `code_max / amax`, and the stored scale is its inverse.

    The rule is that of TransformerEngine's `common/recipe/recipe_common.cuh`. If the amax is 0, infinite or NaN, the
    multiplier is 1. If the quotient is too large for float32, the multiplier is the largest value of the input's dtype.
    With its mantissa bits cleared, the multiplier is a power of two, so its inverse is exact.
    """
    multiplier = np.float32(code_max) / amax
    multiplier = np.where(np.isinf(multiplier), widest, multiplier)
    multiplier = np.where((amax == 0) | ~np.isfinite(amax), _ONE, multiplier)
    if clear_mantissa:
        multiplier = (multiplier.view(np.uint32) & _EXPONENT).view(np.float32)
    return TileScales(_ONE / multiplier, multiplier)


def _exponent(amax: Reals, code_max: float) -> TileScales:
    """Compute E8M0 scales: `amax / code_max`, rounded up to a power of two, so that no value saturates.

    The rule is that of TransformerEngine's `common/util/ptx_arch_spec.cuh` (`float_to_e8m0`), which multiplies by the
    float32 nearest to 1 / code_max; torchao's RCEIL is the same. The multiplier is the inverse of the scale, with one
    exception. For the smallest scale code, 0, the multiplier is 1: the values of such a tile (below 2**-118 in e4m3)
    become zeros.
    """
    quotient = amax * np.float32(1 / code_max)
    raw = quotient.view(np.uint32)
    exponent, mantissa = raw >> 23, raw & np.uint32(0x7FFFFF)
    round_up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= _HALVED))
    exponent_code = exponent + round_up
    exponent_code = np.where(np.isinf(quotient), np.uint32(0xFE), exponent_code)
    exponent_code = np.where(np.isnan(quotient), np.uint32(E8M0_NAN), exponent_code)
    inverse = (np.uint32(0xFE) - np.minimum(exponent_code, np.uint32(0xFE))) << 23
    inverse = np.where(exponent_code == 0, _ONE.view(np.uint32), inverse)
    inverse = np.where(exponent_code == 0xFE, np.uint32(_HALVED), inverse)
    inverse = np.where(exponent_code == E8M0_NAN, np.uint32(F32_NAN), inverse)
    return TileScales(exponent_code.astype(np.uint8), inverse.astype(np.uint32).view(np.float32))


def _two_levels(amax: Reals, tensor: np.float32, code_max: float, scale_max: int) -> TileScales:
    """Compute E4M3 block scales and apply a global factor, by which the largest block scale becomes `scale_max`.

    The rule is that of TransformerEngine's `common/cast/nvfp4/core_nvfp4.cuh`. The global factor is `scale_max *
    code_max / tensor`, at most the largest float32, and 1 if the tensor's amax is 0 or infinite.
    """
    global_factor = np.fmin(np.float32(scale_max * code_max) / tensor, _F32_MAX)
    if tensor == 0 or global_factor == 0:
        global_factor = _ONE
    stored = E4M3.rounded(amax * (global_factor * np.float32(1 / code_max)))
    block = E4M3.values[stored]
    return TileScales(stored, np.fmin(_ONE / (block * (_ONE / global_factor)), _F32_MAX))


def cast(values: NDArray[Any], code: str) -> NDArray[Any]:
    """Convert floating-point values to another floating-point dtype.

    Args:
        values: a contiguous array, with a dtype in `PLAIN`.
        code: safetensors code of the new dtype, one of the values of `CASTS`.
    """
    if values.dtype == np.float64:
        with np.errstate(all="ignore"):
            values = values.astype(np.float32)
    return narrow(widen(values), code)


def cast_error(before: NDArray[Any], after: NDArray[Any]) -> tuple[Error, int]:
    """Return the error of cast values against the originals, and the number of finite values that became infinite."""
    with np.errstate(all="ignore"):
        before_exact, after_exact = (_exact(values) for values in (before, after))
        same = (before_exact == after_exact) | (np.isnan(before_exact) & np.isnan(after_exact))
        distance = np.where(same, 0.0, np.abs(before_exact - after_exact))
        distance = np.where(np.isnan(distance), np.inf, distance)
        error = Error(
            float(distance.max(initial=0.0)), float(np.square(distance).sum()), distance.size, int((~same).sum())
        )
    return error, int(np.count_nonzero(np.isfinite(before_exact) & np.isinf(after_exact)))


def _exact(values: NDArray[Any]) -> NDArray[np.float64]:
    return (values if values.dtype == np.float64 else widen(values)).astype(np.float64)
