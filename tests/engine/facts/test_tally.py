"""Tallies: what is found is what plain Python says of the values in double precision, to the last bit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transaxle.engine.facts import tally
from transaxle.engine.facts.tally import Moments, tally_of
from transaxle.formats.dtype import ITEM_BITS, numpy_dtype

_SMALL = {numpy_dtype(code): code for code, bits in reversed(ITEM_BITS.items()) if bits in {8, 16}}
COUNTED = list(_SMALL.values())
EXACT = [*COUNTED, "F32"]
WIDE = ["F64", "I32", "U32", "I64", "U64"]
needs_compiled = pytest.mark.skipif(tally.load() is None, reason="the loops are not built here")


def doubles(codes: np.ndarray, code: str) -> np.ndarray:
    """The values of codes, as ml_dtypes and numpy read them."""
    with np.errstate(invalid="ignore"):
        values: np.ndarray = (codes != 0 if code == "BOOL" else codes.view(numpy_dtype(code))).astype(np.float64)
    return values


def expected(values: np.ndarray) -> Moments:
    """The same by Python's own exact sums, value by value."""
    finite = [float(value) for value in values if math.isfinite(value)]
    return Moments(
        min(finite, default=math.nan),
        max(finite, default=math.nan),
        math.fsum(finite),
        math.fsum(value * value for value in finite),
        len(values),
        sum(value == 0 for value in finite),
        sum(math.isnan(value) for value in values),
        sum(math.isinf(value) for value in values),
    )


def largest(values: np.ndarray, width: int) -> list[float]:
    found = [0.0] * width
    for number, value in enumerate(values if width else ()):
        if math.isfinite(value):
            found[number % width] = max(found[number % width], abs(float(value)))
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


def tallied(codes: np.ndarray, code: str, width: int, cuts: list[int], offset: int, *, compiled: bool) -> Any:
    found = tally_of(numpy_dtype(code), width, compiled=compiled)
    ends = sorted({0, *(min(cut, len(codes)) for cut in cuts), len(codes)})
    for start, stop in pairwise(ends):
        found.add(unaligned(codes[start:stop], offset))
    return found


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiled), False])
@pytest.mark.parametrize("code", EXACT)
@given(data=st.data())
def test_any_codes_in_any_blocks(code: str, compiled: bool, data: st.DataObject) -> None:
    """NaN of every payload, both zeros, blocks that end within rows, odd addresses."""
    bits = ITEM_BITS[code]
    seed, count = data.draw(st.integers(0, 1 << 30)), data.draw(st.integers(0, 300))
    codes = np.random.default_rng(seed).integers(0, 1 << bits, count).astype(f"u{bits // 8}")
    few = data.draw(st.sets(st.integers(0, (1 << bits) - 1), max_size=4))
    codes[: len(few)] = list(few)[: len(codes)]
    width, offset = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 7))
    cuts = data.draw(st.lists(st.integers(0, 300), max_size=4))
    found = tallied(codes, code, width, cuts, offset, compiled=compiled)
    values = doubles(codes, code)
    assert same(found.found(), expected(values))
    assert found.channels().tolist() == largest(values, width)


@pytest.mark.parametrize("code", COUNTED)
def test_every_code_once(code: str) -> None:
    bits = ITEM_BITS[code]
    codes = np.arange(1 << bits, dtype=f"u{bits // 8}")
    values = doubles(codes, code)
    for compiled in (True, False):
        found = tallied(codes, code, len(codes), [], 0, compiled=compiled)
        assert same(found.found(), expected(values))
        assert found.channels().tolist() == largest(values, len(codes))


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiled), False])
@pytest.mark.parametrize("value", [1.9999999, -3.4028235e38, 1e-45, -0.0])
def test_many_equal_values_are_added_without_loss(compiled: bool, value: float) -> None:
    """More than any part of a sum holds at once, if it were not gathered on the way."""
    count = (1 << 21) + 12345
    codes = np.full(count, value, np.float32).view(np.uint32)
    found = tallied(codes, "F32", 7, [1 << 20, 1 << 21], 1, compiled=compiled).found()
    exact = float(np.float32(value))
    assert found.total == math.fsum([exact] * count)
    assert found.squares == math.fsum([exact * exact] * count)
    assert (found.least, found.largest, found.zeros) == (exact, exact, count if exact == 0 else 0)


@needs_compiled
@pytest.mark.parametrize("code", ["BF16", "F16", "F32", "F8_E4M3", "I8"])
def test_what_is_compiled_finds_what_numpy_finds(code: str) -> None:
    """Of weights: half a million, some of them large, in blocks of odd sizes."""
    random = np.random.default_rng(7)
    values = random.standard_normal(500_003).astype(np.float32) * 3
    values[::1000] *= 20
    codes = values.astype(numpy_dtype(code)).view(f"u{ITEM_BITS[code] // 8}")
    one, other = (tallied(codes, code, 641, [99_999, 400_000], 3, compiled=each) for each in (True, False))
    assert one.found() == other.found() == expected(doubles(codes, code))
    assert np.array_equal(one.channels(), other.channels())


@pytest.mark.parametrize("code", WIDE)
def test_larger_types(code: str) -> None:
    random = np.random.default_rng(3)
    values = (random.standard_normal(1000) * 1000).astype(numpy_dtype(code))
    found = tallied(values, code, 8, [100, 321], 0, compiled=True)
    wide = values.astype(np.float64)
    moments, exact = found.found(), expected(wide)
    assert (moments.least, moments.largest, moments.zeros) == (exact.least, exact.largest, exact.zeros)
    assert moments.total == pytest.approx(exact.total, rel=1e-9)
    assert moments.squares == pytest.approx(exact.squares, rel=1e-9)
    assert found.channels().tolist() == largest(wide, 8)


@pytest.fixture
def reloaded() -> Iterator[None]:
    tally.load.cache_clear()
    yield
    tally.load.cache_clear()


@needs_compiled
def test_loops_of_another_source_are_not_used(reloaded: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changed = tmp_path / tally.SOURCE.name
    changed.write_bytes(tally.SOURCE.read_bytes() + b"\n")
    monkeypatch.setattr(tally, "SOURCE", changed)
    assert tally.load() is None
    codes = np.arange(100, dtype=np.uint16)
    assert tallied(codes, "U16", 10, [], 0, compiled=True).found().total == 4950
