"""Casting: plain floating-point values in another floating-point type, as torch's `.to` makes them.

The nearest value, ties to even; what is too large becomes infinite; a NaN stays one. float64 goes through float32, as
it does in torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from transaxle.encodings.arithmetic.wide import narrowed, widened
from transaxle.encodings.error import Error


def cast(values: NDArray[Any], code: str) -> NDArray[Any]:
    """Return values in another type.

    Args:
        values: of a type of `PLAIN`, contiguous.
        code: safetensors code of a type of `CASTS`.
    """
    if values.dtype == np.float64:
        with np.errstate(all="ignore"):
            values = values.astype(np.float32)
    return narrowed(widened(values), code)


def cast_error(before: NDArray[Any], after: NDArray[Any]) -> tuple[Error, int]:
    """Return how far cast values are from the original ones, and how many finite ones became infinite."""
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
    return (values if values.dtype == np.float64 else widened(values)).astype(np.float64)
