"""Tallies: what is found is what plain Python says of the values in double precision, to the last bit."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transaxle.engine.values import Moments, tally_of
from transaxle.formats.catalog import ITEM_BITS, numpy_dtype

_SMALL = {numpy_dtype(code): code for code, bits in reversed(ITEM_BITS.items()) if bits in {8, 16}}
COUNTED = list(_SMALL.values())
WIDE = ["F32", "F64", "I32", "U32", "I64", "U64"]
EXACT = [*COUNTED, *WIDE]
LONG = 9001
"""Elements of blocks that end anywhere."""


def numbers(codes: np.ndarray, code: str) -> list[float | int]:
    """The values of codes, as ml_dtypes and numpy read them, without rounding."""
    with np.errstate(invalid="ignore"):
        values: np.ndarray = codes != 0 if code == "BOOL" else codes.view(numpy_dtype(code))
        if code[0] == "F" or code == "BF16":
            values = values.astype(np.float64)
    read: list[float | int] = values.tolist()
    return read


def rounded(exact: Fraction) -> float:
    """The nearest double; infinite above all."""
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def expected(values: list[float | int]) -> Moments:
    """The same by Python's fractions, value by value."""
    finite = [value for value in values if math.isfinite(value)]
    exact = [Fraction(value) for value in finite]
    return Moments(
        float(min(finite, default=math.nan)),
        float(max(finite, default=math.nan)),
        rounded(sum(exact, Fraction())),
        rounded(sum((value * value for value in exact), Fraction())),
        len(values),
        sum(value == 0 for value in finite),
        sum(math.isnan(value) for value in values),
        sum(math.isinf(value) for value in values),
    )


def largest(values: list[float | int], width: int) -> list[float]:
    found = [0.0] * width
    for number, value in enumerate(values if width else ()):
        if math.isfinite(value):
            found[number % width] = max(found[number % width], float(abs(value)))
    return found


def same(one: Moments, other: Moments) -> bool:
    pairs = zip(*(tuple(getattr(each, name) for name in Moments.__slots__) for each in (one, other)), strict=True)
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


def unaligned(codes: np.ndarray, offset: int) -> memoryview:
    """The bytes of codes at an address that no processor likes."""
    room = np.zeros(codes.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64 + offset
    room[start : start + codes.nbytes] = codes.view(np.uint8)
    return room[start : start + codes.nbytes].data


def tallied(codes: np.ndarray, code: str, width: int, cuts: list[int], offset: int) -> Any:
    found = tally_of(numpy_dtype(code), width)
    ends = sorted({0, *(min(cut, len(codes)) for cut in cuts), len(codes)})
    for start, stop in pairwise(ends):
        found.add(unaligned(codes[start:stop], offset))
    return found


@pytest.mark.oracle
@pytest.mark.parametrize("code", EXACT)
@given(data=st.data())
def test_any_codes_in_any_blocks(code: str, data: st.DataObject) -> None:
    """NaN of every payload, both zeros, blocks that end within rows, odd addresses."""
    bits = ITEM_BITS[code]
    seed, count = data.draw(st.integers(0, 1 << 30)), data.draw(st.integers(0, 300))
    codes = np.random.default_rng(seed).integers(0, 1 << bits, count, f"u{bits // 8}")
    few = data.draw(st.sets(st.integers(0, (1 << bits) - 1), max_size=4))
    codes[: len(few)] = list(few)[: len(codes)]
    width, offset = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 7))
    cuts = data.draw(st.lists(st.integers(0, 300), max_size=4))
    found = tallied(codes, code, width, cuts, offset)
    values = numbers(codes, code)
    assert same(found.moments(), expected(values))
    assert found.channels().tolist() == largest(values, width)


@pytest.mark.parametrize("code", COUNTED)
def test_every_code_once(code: str) -> None:
    bits = ITEM_BITS[code]
    codes = np.arange(1 << bits, dtype=f"u{bits // 8}")
    values = numbers(codes, code)
    found = tallied(codes, code, len(codes), [], 0)
    assert same(found.moments(), expected(values))
    assert found.channels().tolist() == largest(values, len(codes))


@pytest.mark.parametrize("value", [1.9999999, -3.4028235e38, 1e-45, -0.0])
def test_many_equal_values_are_added_without_loss(value: float) -> None:
    """More than any part of a sum holds at once, if it were not gathered on the way."""
    count = (1 << 21) + 12345
    codes = np.full(count, value, np.float32).view(np.uint32)
    found = tallied(codes, "F32", 7, [1 << 20, 1 << 21], 1).moments()
    exact = float(np.float32(value))
    assert found.total == math.fsum([exact] * count)
    assert found.squares == math.fsum([exact * exact] * count)
    assert (found.least, found.largest, found.zeros) == (exact, exact, count if exact == 0 else 0)


@pytest.mark.oracle
@pytest.mark.parametrize("code", ["BF16", "F32", "F64"])
@pytest.mark.parametrize("span", [3, 22, 270])
def test_sums_are_exact_however_far_apart_values_are(code: str, span: int) -> None:
    """Values over so many powers of two, with NaN, infinite ones, zeros and subnormal ones among them, and without."""
    random = np.random.default_rng(span)
    single = np.exp2(random.uniform(-min(span, 149), max(0, span - 149), LONG)) * random.choice([-1.0, 1.0], LONG)
    for odd in ((), (0.0, -0.0), (1e-45, -1e-40), (math.nan, math.inf, -math.inf, 0.0)):
        values = single.astype(numpy_dtype(code))
        values[: 2 * len(odd)] = odd * 2
        values[-len(odd) or LONG :] = odd
        codes = values.view(f"u{values.itemsize}")
        for offset in (0, 1):
            found = tallied(codes, code, 77, [5000], offset)
            assert same(found.moments(), expected(numbers(codes, code)))
            assert found.channels().tolist() == largest(numbers(codes, code), 77)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_all_values_of_a_sign_and_the_largest_there_are(sign: float) -> None:
    """No sum holds the squares of the largest values; where none is negative, or none positive, extremes are right."""
    for code in ("F32", "F64"):
        kind = numpy_dtype(code)
        values = np.full(LONG, sign * np.finfo(kind).max, kind)
        values[3] /= 2
        codes = values.view(f"u{kind.itemsize}")
        found = tallied(codes, code, 0, [], 0).moments()
        assert same(found, expected(numbers(codes, code)))
