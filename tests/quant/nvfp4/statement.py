"""NVFP4 training written out in numpy and Python's integers, with nothing of Transaxle's.

Formulas of TransformerEngine (`common/cast/nvfp4/core_nvfp4.cuh`, `pytorch/tensor/nvfp4_tensor.py`), and Philox4x32-10
as Salmon and others state it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]
LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
"""The magnitudes of E2M1, by code."""
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float64)
"""`get_wgrad_sign_vector`."""
_MASK = (1 << 32) - 1


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x32, in Python's integers."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ k, q & _MASK, (p >> 32) ^ d ^ m, p & _MASK
        k, m = (k + 0x9E3779B9) & _MASK, (m + 0xBB67AE85) & _MASK
    return a, b, c, d


def words(state: tuple[int, int], rows: range, columns: range, stream: int) -> NDArray[np.uint64]:
    """The random word of each element (r, c): word c % 4 of the counter (c // 4, r, calls, stream)."""
    key, calls = state[0] & ((1 << 64) - 1), state[1]
    return np.array(
        [[philox((c // 4, r, calls, stream), (key & _MASK, key >> 32))[c % 4] for c in columns] for r in rows],
        np.uint64,
    )


def hadamard() -> Reals:
    """The matrix of the transform, entry by entry: (-1) to the number of bits that both numbers have, over 4."""
    parity = [[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)]
    made: Reals = SIGNS[:, None] * np.array(parity) / 4
    return made


@dataclass(frozen=True)
class Quantized:
    """A matrix as codes with their scales, and its amax."""

    values: Reals
    """Signed magnitude of each code."""
    scales: Reals
    """Scale of each element's tile."""
    amax: float

    @property
    def units(self) -> Reals:
        """Code times scale."""
        return self.values * self.scales


def quantized(
    x: NDArray[Any],
    tile: tuple[int, int] = (1, 16),
    random: NDArray[np.uint64] | None = None,
    amax: float | None = None,
) -> Quantized:
    """Quantize a matrix whose sides are multiples of the tile's."""
    f = np.float32
    x = x.astype(f)
    most = f(np.abs(x).max())
    encode = f(1) if most == 0 else min(f(448 * 6) / most, np.finfo(f).max)
    values, scales = np.zeros(x.shape), np.zeros(x.shape)
    for i in range(0, x.shape[0], tile[0]):
        for j in range(0, x.shape[1], tile[1]):
            at = slice(i, i + tile[0]), slice(j, j + tile[1])
            scale = f((np.abs(x[at]).max() * (encode * (f(1) / f(6)))).astype(ml_dtypes.float8_e4m3fn))
            with np.errstate(divide="ignore"):
                multiplier = min(f(1) / (scale * (f(1) / encode)), np.finfo(f).max)
            scaled = (x[at] * multiplier).astype(np.float64)
            values[at] = np.sign(scaled) * _coded(np.minimum(np.abs(scaled), 6), None if random is None else random[at])
            scales[at] = scale
    return Quantized(values, scales, float(most))


def _coded(size: Reals, random: NDArray[np.uint64] | None) -> Reals:
    low = np.searchsorted(LEVELS, size, side="right") - 1
    high = np.minimum(low + 1, 7)
    gap = np.where(high > low, LEVELS[high] - LEVELS[low], 1)
    fraction = (size - LEVELS[low]) / gap
    if random is not None:
        up = random.astype(np.float64) < fraction * 2.0**32
    else:
        up = (fraction > 0.5) | ((fraction == 0.5) & (low % 2 == 1))
    return LEVELS[np.where(up, high, low)]


def product(left: Quantized, right: Quantized) -> NDArray[np.float32]:
    """Left times right transposed, in float64, rounded to float32."""
    return (left.units @ right.units.T * (left.amax * right.amax / (6 * 448) ** 2)).astype(np.float32)


def transformed(x: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """The transpose of a matrix with rows in multiples of 16, each 16 of them transformed, in a type."""
    turned = x.astype(np.float64).T
    parts = turned.reshape(turned.shape[0], -1, 16) @ hadamard()
    return parts.reshape(turned.shape).astype(np.float32).astype(dtype)
