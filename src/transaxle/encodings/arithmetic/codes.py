"""Code types that are no floating-point types: integers, and the lookup tables of bitsandbytes.

**Integer scales**: the scale of a group of values that are stored as integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from transaxle.encodings.arithmetic.minifloat import LARGEST, MINIFLOATS, Minifloat, narrow, wide_code, widen
from transaxle.encodings.encoding import HALF_BYTES, INTEGER_CODES

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Values of the 16 codes of NF4, from bitsandbytes 0.49 (`create_normal_map`, rounded to float32)."""
_FP4 = tuple(numerator / 12 for numerator in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
"""Values of the 8 codes of FP4 without sign, from bitsandbytes 0.50 (`get_4bit_type`); code 8 is +0."""


class CodeTable(msgspec.Struct, frozen=True, dict=True):
    """A type of codes that is defined by the value of every code."""

    code: str
    """Name of the type: the `code` of an `Encoding`."""

    @property
    def bits(self) -> int:
        """Number of bits of one code."""
        return 4 if self.code in HALF_BYTES else 8

    @cached_property
    def values(self) -> NDArray[np.float32]:
        """Code -> value."""
        if self.code == "NF4":
            return np.array(_NF4, np.float32)
        if self.code == "FP4":
            return np.array((*_FP4, *(0.0 - value for value in _FP4)), np.float32)
        codes = np.arange(1 << self.bits, dtype=np.uint8)
        if self.code == "I8":
            return codes.view(np.int8).astype(np.float32)
        return codes.astype(np.float32) - np.float32(INTEGER_CODES[self.code])


KINDS: Mapping[str, Minifloat | CodeTable] = MappingProxyType(
    {**MINIFLOATS, **{code: CodeTable(code) for code in (*INTEGER_CODES, "NF4", "FP4")}}
)
"""`code` of an encoding -> type of the codes. The kernel numbers the types in this order."""


def split_halves(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return packed 4-bit codes `[…, n]` one per byte, `[…, 2 n]`."""
    halves: NDArray[np.uint8] = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    return halves


_STEPS = 7.5
"""Divisor of a symmetric 4-bit scale in compressed-tensors: half of the distance from -8 to 7."""
_KEPT = (7.0, 8.0)
"""Largest absolute codes that a group which was int4 before can have."""
LEAST, MOST = -8.0, 7.0
"""Range of 4-bit integers."""


def int4_scales(values: NDArray[Any], amax: NDArray[np.float32], group: int) -> NDArray[Any]:
    """Return the scale of each group of values that become 4-bit integers, in the dtype of the values.

    The rule is that of compressed-tensors 0.20 (`calculate_qparams`, symmetric): `amax / 7.5`, rounded to the dtype, or
    the dtype's epsilon if that is 0. There is one exception: if some scale represents all values of the group exactly,
    that scale is used, so values that were decoded from 4-bit integers get their codes back. The scales that are tried
    are `amax / 7` and `amax / 8`, and the next smaller and larger number of each.

    Args:
        values: matrix `[R, C]` of BF16, F16 or F32.
        amax: largest absolute value of each group, `[R, ceil(C / group)]`.
        group: number of values in a row that share one scale.
    """
    dtype = wide_code(values.dtype)
    with np.errstate(all="ignore"):
        finite = np.where(np.isposinf(amax), np.float32(LARGEST[dtype]), amax)
        finite = np.where(np.isnan(amax), np.float32(np.nan), finite)
        chosen: NDArray[Any] = narrow(_quotient(finite, _STEPS), dtype)
        chosen = np.where(widen(chosen) == 0, narrow(np.full(1, _EPSILON[dtype], np.float32), dtype), chosen)
        rows, columns = values.shape
        if not values.size or columns % group:
            return chosen
        grouped = widen(values).reshape(rows, -1, group)
        undecided = np.isfinite(amax) & (amax > 0)
        for divisor in _KEPT:
            near = narrow(_quotient(finite, divisor), dtype)
            for step in (0, -1, 1):
                candidate = (near.view(f"i{near.itemsize}") + step).astype(f"i{near.itemsize}").view(near.dtype)
                keeps = _keeps(grouped, candidate, dtype, undecided)
                chosen = np.where(keeps, candidate, chosen)
                undecided = undecided & ~keeps
    return chosen


def _quotient(amax: NDArray[np.float32], divisor: float) -> NDArray[np.float32]:
    quotient: NDArray[np.float32] = (amax / np.float32(divisor)).astype(np.float32)
    return quotient


_EPSILON = {"BF16": 2.0**-7, "F16": 2.0**-10, "F32": 2.0**-23}
"""Distance from 1 to the next larger number of a dtype."""


def _keeps(
    grouped: NDArray[np.float32], candidate: NDArray[Any], dtype: str, among: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return for which groups a scale represents all values exactly; only the groups in `among` are tested."""
    scale = widen(candidate)
    result = among & np.isfinite(scale) & (scale > 0)
    for position in range(0, grouped.shape[2], _PROBE):
        groups = np.nonzero(result)
        if not len(groups[0]):
            break
        part, by = grouped[groups][:, position : position + _PROBE], scale[groups][:, None]
        integers = np.rint(part / by)
        same = (widen(narrow(integers * by, dtype)) == part) & (integers >= LEAST) & (integers <= MOST)
        result[groups] = same.all(axis=1)
    return result


_PROBE = 4
"""Number of values of each group that are tested at once; few groups of arbitrary values pass the first test."""


def int4_codes(values: NDArray[Any], scale: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return 4-bit codes, one per byte: `value / scale`, rounded to the dtype of the values and then to an integer.

    Args:
        values: matrix of BF16, F16 or F32.
        scale: scale of each value, with the shape of `values`.
    """
    with np.errstate(all="ignore"):
        quotient = widen(narrow(widen(values) / scale, wide_code(values.dtype)))
    integers = np.clip(np.rint(np.nan_to_num(quotient, nan=0.0)), LEAST, MOST)
    codes: NDArray[np.uint8] = (integers + INTEGER_CODES["I4"]).astype(np.uint8)
    return codes
