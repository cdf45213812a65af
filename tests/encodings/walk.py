"""The formulas of every encoding once more, an element at a time, on plain Python floats and fractions.

The oracle of these tests: written from the sources named in docs/reference/encodings.md, with none of the package's
code and no arrays. float32 arithmetic is double arithmetic rounded to float32 by `struct`: exact products of two
float32 fit a double, and for quotients and sums double rounding is harmless (53 bits are more than 2 x 24 + 1).
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

NAN, INF = math.nan, math.inf


def f32(x: float) -> float:
    """Round a double to float32."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return math.copysign(INF, x)


F32_MAX = f32(3.4028234663852886e38)


def quotient(a: float, b: float) -> float:
    """Divide as IEEE 754 does."""
    if b == 0:
        return NAN if a == 0 or math.isnan(a) else math.copysign(INF, a) * math.copysign(1, b)
    return f32(a / b)


@dataclass(frozen=True)
class Format:
    exponent_bits: int
    mantissa_bits: int
    bias: int
    finite: int
    """How many non-negative codes are finite, from zero on."""

    def values(self) -> list[float]:
        """Finite non-negative values, rising."""
        return _values(self)

    def value(self, code: int) -> float:
        """What a code means; above the finite ones E5M2 has infinity first, and everything else is NaN."""
        size = code & (2 ** (self.exponent_bits + self.mantissa_bits) - 1)
        sign = -1.0 if code != size else 1.0
        if size < self.finite:
            return math.copysign(self.values()[size], sign)
        return sign * INF if self is E5M2 and size == self.finite else NAN

    def nearest(self, x: float) -> int:
        """The code of the nearest finite value, on a tie the even one; the sign above."""
        bit: int = 1 << (self.exponent_bits + self.mantissa_bits)
        sign = bit if math.copysign(1, x) < 0 else 0
        values, size = self.values(), abs(x)
        if math.isnan(x):
            return sign | (bit - 1)
        above = min(bisect_left(values, size), self.finite - 1)
        if above == 0 or size >= values[-1]:
            return sign | above
        down, up = size - values[above - 1], values[above] - size  # exact: the operands are close, or one is 0
        return sign | (above - (down < up or (down == up and (above - 1) % 2 == 0)))


@cache
def _values(form: Format) -> list[float]:
    """OCP 8-bit Floating Point Specification, section 3.1."""
    found = []
    for code in range(form.finite):
        exponent, mantissa = divmod(code, 2**form.mantissa_bits)
        fraction = mantissa / 2**form.mantissa_bits
        normal = (1 + fraction) * 2.0 ** (exponent - form.bias)
        found.append(normal if exponent else fraction * 2.0 ** (1 - form.bias))
    return found


E4M3 = Format(4, 3, 7, 0x7F)
E5M2 = Format(5, 2, 15, 0x7C)
E2M1 = Format(2, 1, 1, 8)


def largest(values: Sequence[float]) -> float:
    """The amax, which is NaN if one value is."""
    return NAN if any(map(math.isnan, values)) else max((abs(x) for x in values), default=0.0)


def float_scale(amax: float, most: float, widest: float, *, power_of_two: bool) -> tuple[float, float]:
    """Stored scale and multiplier."""
    if amax == 0 or math.isinf(amax) or math.isnan(amax):
        multiplier = 1.0
    else:
        multiplier = quotient(most, amax)
        if math.isinf(multiplier):
            multiplier = widest
    if power_of_two:
        multiplier = 2.0 ** (math.frexp(multiplier)[1] - 1)
    return quotient(1.0, multiplier), multiplier


def exponent_scale(amax: float, most: float) -> tuple[int, float]:
    """E8M0 code and multiplier: the least power of two that is not below the float32 product."""
    product = f32(amax * f32(1 / most)) if not math.isinf(amax) else INF
    if math.isnan(product):
        return 0xFF, NAN
    if math.isinf(product):
        return 0xFE, 2.0**-127
    code = next(code for code in range(0xFF) if 2.0 ** (code - 127) >= product or code == 0xFE)
    if code == 0:
        return 0, 1.0
    return code, 2.0 ** (127 - code)


def two_level_scale(amax: float, tensor: float, scale_max: int = 448) -> tuple[int, float]:
    """E4M3 code of the block's scale and multiplier."""
    whole = quotient(float(scale_max * 6), tensor)
    whole = F32_MAX if math.isnan(whole) else min(whole, F32_MAX)
    if tensor == 0 or whole == 0:
        whole = 1.0
    code = E4M3.nearest(f32(amax * f32(whole * f32(1 / 6))))
    block = E4M3.value(code)
    inverse = quotient(1.0, f32(block * quotient(1.0, whole)))
    return code, F32_MAX if math.isnan(inverse) else min(inverse, F32_MAX)


Matrix = Sequence[Sequence[float]]
Rule = Callable[[float], tuple[float, float]]


def encode(rows: Matrix, tile: tuple[int, int], form: Format, rule: Rule) -> tuple[list[list[int]], list[list[float]]]:
    """Codes one by one, and the stored scale of each tile."""
    height, width = len(rows), len(rows[0])
    codes = [[0] * width for _ in range(height)]
    stored: list[list[float]] = []
    for top in range(0, height, tile[0]):
        stored.append([])
        for left in range(0, width, tile[1]):
            inside = [
                (i, j) for i in range(top, min(top + tile[0], height)) for j in range(left, min(left + tile[1], width))
            ]
            scale, multiplier = rule(largest([rows[i][j] for i, j in inside]))
            stored[-1].append(scale)
            for i, j in inside:
                codes[i][j] = form.nearest(times(rows[i][j], multiplier))
    return codes, stored


def times(x: float, multiplier: float) -> float:
    """A float32 product; a NaN keeps the sign of the value."""
    product = f32(x * multiplier)
    return math.copysign(NAN, x) if math.isnan(product) else product


def packed(codes: list[list[int]]) -> list[list[int]]:
    """Two codes to a byte, the first in the low half."""
    return [[row[j] + 16 * row[j + 1] for j in range(0, len(row), 2)] for row in codes]
