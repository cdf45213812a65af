"""The types of codes: what each code means, and which code a number gets."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.encodings import walk
from transaxle.encodings.arithmetic.minifloat import E2M1, E4M3, E5M2, MINIFLOATS, Minifloat, power_of_two

WALKS = {"F8_E4M3": walk.E4M3, "F8_E5M2": walk.E5M2, "F4": walk.E2M1}
ML = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F4": ml_dtypes.float4_e2m1fn}
each = pytest.mark.parametrize("kind", MINIFLOATS.values(), ids=lambda kind: kind.code)


def same(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    """Equal with the signs of zeros; a NaN equals any."""
    return bool(np.array_equal(a, b, equal_nan=True) and (np.signbit(a) == np.signbit(b))[~np.isnan(a)].all())


@each
def test_every_code_means_what_the_formula_says(kind: Minifloat) -> None:
    form = WALKS[kind.code]
    assert same(kind.values, np.array([form.value(code) for code in range(1 << kind.bits)], np.float32))
    codes = np.arange(1 << kind.bits, dtype=np.uint8)
    assert same(kind.values, codes.view(ML[kind.code]).astype(np.float32))


def test_every_e8m0_code_means_a_power_of_two() -> None:
    found = power_of_two(np.arange(256, dtype=np.uint8))
    assert math.isnan(found[255])
    assert [float(x) for x in found[:255]] == [2.0 ** (code - 127) for code in range(255)]


@pytest.mark.parametrize(
    ("kind", "code", "value"),
    [
        (E4M3, 0b0_1111_110, 448), (E4M3, 0b0_0001_000, 2**-6), (E4M3, 0b0_0000_111, 0.875 * 2**-6),
        (E4M3, 0b0_0000_001, 2**-9), (E4M3, 0b1_0111_000, -1), (E5M2, 0b0_11110_11, 57344),
        (E5M2, 0b0_00001_00, 2**-14), (E5M2, 0b0_00000_11, 0.75 * 2**-14), (E5M2, 0b0_00000_01, 2**-16),
        (E5M2, 0b0_11111_00, math.inf), (E5M2, 0b1_11111_00, -math.inf), (E2M1, 0b0_11_1, 6), (E2M1, 0b0_01_0, 1),
        (E2M1, 0b0_00_1, 0.5), (E2M1, 0b1_10_1, -3),
    ],
)  # fmt: skip
def test_values_of_the_ocp_specifications(kind: Minifloat, code: int, value: float) -> None:
    """OCP 8-bit Floating Point 1.0, table 1; OCP Microscaling Formats 1.0, section 5.3.3."""
    assert kind.values[code] == value


def test_codes_of_the_ocp_specifications_that_are_no_numbers() -> None:
    assert [code for code in range(256) if math.isnan(E4M3.values[code])] == [0x7F, 0xFF]
    assert [code for code in range(256) if math.isnan(E5M2.values[code])] == [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]
    assert not np.isnan(E2M1.values).any()


@each
def test_all_bfloat16_inputs_go_to_the_nearest_code(kind: Minifloat) -> None:
    inputs = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    form = WALKS[kind.code]
    expected = [form.nearest(float(x)) for x in inputs.tolist()]
    assert kind.rounded(inputs).tolist() == expected


@each
def test_ties_go_to_the_even_code_and_their_neighbours_do_not(kind: Minifloat) -> None:
    values = np.array(WALKS[kind.code].values(), np.float32)
    middle = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    lower = np.arange(len(middle), dtype=np.uint8)
    for sign in (1, -1):
        bit = kind.sign if sign < 0 else 0
        assert (kind.rounded(sign * middle) == (lower + lower % 2 | bit)).all()
        assert (kind.rounded(sign * np.nextafter(middle, np.float32(-1))) == (lower | bit)).all()
        assert (kind.rounded(sign * np.nextafter(middle, np.float32(np.inf))) == (lower + 1 | bit)).all()
        assert (kind.rounded(sign * values) == (np.arange(len(values)) | bit)).all()


@each
@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_any_float_goes_to_the_nearest_code(kind: Minifloat, numbers: list[float]) -> None:
    form = WALKS[kind.code]
    assert kind.rounded(np.array(numbers, np.float32)).tolist() == [form.nearest(x) for x in numbers]


@pytest.mark.peers
@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=lambda kind: kind.code)
def test_torch_casts_alike_where_it_saturates_too(kind: Minifloat) -> None:
    """torch 2.13 makes infinities of what is too large for E5M2; everything else is the same."""
    import torch

    dtype = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}[kind.code]
    inputs = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    if kind is E5M2:
        inputs = inputs[~(np.abs(inputs) >= 61440)]
    cast = torch.from_numpy(inputs.copy()).to(dtype).view(torch.uint8).numpy()
    assert (kind.rounded(inputs) == cast).all()
