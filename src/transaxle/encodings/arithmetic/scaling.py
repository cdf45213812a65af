"""Scaling: the scale of a tile as a function of its largest absolute value, its *amax*.

Each rule gives two arrays with one number per tile: the scales as stored, and the multipliers of values before they are
rounded to codes. A multiplier is not always the inverse of the stored scale, because each rule rounds where
TransformerEngine (August 2026) rounds; everything is float32 arithmetic, one operation at a time. An amax of NaN means
that the tile has a NaN.

**Casting**: plain floating-point values in another floating-point dtype, as torch's `.to` converts them: to the nearest
value, ties to even; too large values become infinite; NaN stays NaN. float64 goes through float32, as in torch.
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
"""Mantissa bits of 2**-127 as a subnormal float32: only the highest is set."""


class TileScales(msgspec.Struct, frozen=True):
    """Scales of the tiles of a matrix, in the shape of the amaxes."""

    stored: NDArray[np.float32] | NDArray[np.uint8]
    """Scales as stored: float32, or the bits of E8M0 and E4M3."""
    multiplier: Reals
    """Multipliers of values before they are rounded to codes."""


def scales(encoding: Encoding, amax: Reals, *, widest: float, tensor: float | None = None) -> TileScales:
    """Return the scales of tiles with these amaxes.

    Args:
        encoding: the encoding to write; its `scale` decides the rule.
        amax: float32, largest absolute value of each tile.
        widest: largest finite value of the dtype of the input values.
        tensor: amax of the whole tensor, for encodings with a global scale.

    Raises:
        Refused: UNSUPPORTED for scales without a rule.
        ValueError: the tensor's amax is required and missing.
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
    """Float scales: the multiplier is `code_max / amax`, the stored scale its inverse.

    This is TransformerEngine's `common/recipe/recipe_common.cuh`. An amax of 0, infinity or NaN gives 1; a quotient too
    large for float32 gives the largest value of the input's dtype. With its mantissa cleared, the multiplier is a power
    of two, and therefore so is its inverse, exactly.
    """
    multiplier = np.float32(code_max) / amax
    multiplier = np.where(np.isinf(multiplier), widest, multiplier)
    multiplier = np.where((amax == 0) | ~np.isfinite(amax), _ONE, multiplier)
    if clear_mantissa:
        multiplier = (multiplier.view(np.uint32) & _EXPONENT).view(np.float32)
    return TileScales(_ONE / multiplier, multiplier)


def _exponent(amax: Reals, code_max: float) -> TileScales:
    """E8M0 scales: the exponent of `amax / code_max`, rounded up, so that nothing saturates.

    This is TransformerEngine's `common/util/ptx_arch_spec.cuh` (`float_to_e8m0`), where the quotient is a product with
    the float32 nearest to 1 / code_max; torchao's RCEIL is the same. The multiplier is the power of two that undoes the
    scale, but 1 where the code is 0: the values of such a tile, below 2**-118 in e4m3, become zeros.
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
    """E4M3 scales below a global one, which scales the largest of them to `scale_max`.

    This is TransformerEngine's `common/cast/nvfp4/core_nvfp4.cuh`. The global factor is `scale_max * code_max /
    tensor`, at most the largest float32, and 1 if the tensor's amax is 0 or infinite.
    """
    global_factor = np.fmin(np.float32(scale_max * code_max) / tensor, _F32_MAX)
    if tensor == 0 or global_factor == 0:
        global_factor = _ONE
    stored = E4M3.rounded(amax * (global_factor * np.float32(1 / code_max)))
    block = E4M3.values[stored]
    return TileScales(stored, np.fmin(_ONE / (block * (_ONE / global_factor)), _F32_MAX))


def cast(values: NDArray[Any], code: str) -> NDArray[Any]:
    """Convert values to another dtype.

    Args:
        values: of a dtype in `PLAIN`, contiguous.
        code: safetensors code of a dtype in `CASTS`.
    """
    if values.dtype == np.float64:
        with np.errstate(all="ignore"):
            values = values.astype(np.float32)
    return narrow(widen(values), code)


def cast_error(before: NDArray[Any], after: NDArray[Any]) -> tuple[Error, int]:
    """Return the difference between cast values and the originals, and how many finite values became infinite."""
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
