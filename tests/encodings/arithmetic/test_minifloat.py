"""The types of codes: what each code means, and which code a number gets."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.encodings import walk
from transaxle.encodings.arithmetic.minifloat import E2M1, E4M3, E5M2, LARGEST, MINIFLOATS, Minifloat, power_of_two
from transaxle.encodings.arithmetic.scaling import TileScales, scales
from transaxle.encodings.encoding import FLOAT8, FLOAT8_BLOCK, MXFP4, MXFP8, NVFP4, Encoding
from transaxle.errors import TransaxleError

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


# What scale a tile gets: each rule against its formula in plain floats, above all at its boundaries.

F32_MAX = float(np.finfo(np.float32).max)
TINY = 2.0**-149
BF16 = (np.arange(1 << 15, dtype=np.uint32) << 16).view(np.float32)
"""Every amax that bfloat16 values can have, infinity and NaN among them."""
sizes = st.floats(min_value=0, width=32) | st.just(math.inf) | st.just(math.nan)


def around(numbers: NDArray[np.float64]) -> NDArray[np.float32]:
    """The float32 numbers nearest to each, and their neighbours on both sides."""
    with np.errstate(over="ignore"):
        middle = numbers.astype(np.float32)
    near = [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))]
    return np.concatenate(near)


SPECIAL = np.array([0, TINY, 2 * TINY, 2.0**-127, 2.0**-126, 1, 448, F32_MAX, math.inf, math.nan], dtype=np.float32)
POWERS = np.ldexp(1.0, np.arange(-149, 128))


def agree(found: TileScales, expected: list[tuple[float, float]]) -> None:
    stored = np.array([a for a, _ in expected], np.float64)
    multiplier = np.array([b for _, b in expected], np.float64)
    np.testing.assert_array_equal(found.stored.astype(np.float64), stored)
    np.testing.assert_array_equal(found.multiplier.astype(np.float64), multiplier)


@pytest.mark.parametrize("wide", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("encoding", [FLOAT8, FLOAT8_BLOCK, replace(FLOAT8, code="F8_E5M2")], ids=str)
def test_float_scales(encoding: Encoding, wide: str) -> None:
    widest = LARGEST[wide]
    amax = np.concatenate([SPECIAL, around(POWERS), around(encoding.code_max * POWERS[22:270])])
    expected = [walk.float_scale(float(x), encoding.code_max, widest, power_of_two=encoding.power_of_two) for x in amax]
    agree(scales(encoding, amax, widest=widest), expected)


@pytest.mark.parametrize(("encoding", "most"), [(MXFP8, 448), (MXFP4, 6), (replace(MXFP8, code="F8_E5M2"), 57344)])
def test_e8m0_scales_at_every_boundary(encoding: Encoding, most: int) -> None:
    """Each code's largest amax, its neighbours, and every amax that bfloat16 has."""
    amax = np.concatenate([SPECIAL, around(most * POWERS[: 278 - most.bit_length()]), around(POWERS), BF16[::7]])
    found = scales(encoding, amax, widest=F32_MAX)
    agree(found, [walk.exponent_scale(float(x), most) for x in amax])
    reached = set(found.stored.tolist())
    assert reached >= set(range(0xFE - most.bit_length())) | {0xFE, 0xFF}


def test_e8m0_scales_of_every_bfloat16_amax_do_not_saturate() -> None:
    """The scale is the least power of two under which nothing is too large: the property that the rule is for."""
    amax = BF16[1:0x7F80].astype(np.float64)
    code = scales(MXFP8, BF16[1:0x7F80], widest=F32_MAX).stored.astype(np.int64)
    assert (np.ldexp(amax, 127 - code) <= 448).all()
    tight = code > 0
    assert (np.ldexp(amax[tight], 128 - code[tight]) > 448).all()


@pytest.mark.parametrize("scale_max", [448, 256])
@pytest.mark.parametrize("tensor", [0.0, TINY, 1e-38, 7.9e-36, 0.02, 1.0, 3.75, 2688.0, 1e30, F32_MAX, math.inf])
def test_two_level_scales(tensor: float, scale_max: int) -> None:
    tensor = walk.f32(tensor)
    parts = np.array([k / 97 for k in range(98)]) * (tensor if math.isfinite(tensor) else 1.0)
    amax = np.concatenate([SPECIAL, parts.astype(np.float32)])
    found = scales(replace(NVFP4, scale_max=scale_max), amax, widest=F32_MAX, tensor=tensor)
    expected = [walk.two_level_scale(float(x), tensor, scale_max) for x in amax]
    assert found.stored.tolist() == [a for a, _ in expected]
    np.testing.assert_array_equal(found.multiplier, np.array([b for _, b in expected], np.float32))


@given(st.lists(sizes, min_size=1, max_size=8), sizes)
def test_any_amax(numbers: list[float], tensor: float) -> None:
    amax = np.array(numbers, np.float32)
    agree(scales(MXFP8, amax, widest=F32_MAX), [walk.exponent_scale(x, 448) for x in numbers])
    for encoding, exact in ((FLOAT8_BLOCK, True), (FLOAT8, False)):
        expected = [walk.float_scale(x, 448, F32_MAX, power_of_two=exact) for x in numbers]
        agree(scales(encoding, amax, widest=F32_MAX), expected)
    agree(scales(NVFP4, amax, widest=F32_MAX, tensor=tensor), [walk.two_level_scale(x, tensor) for x in numbers])


def test_scales_of_a_whole_tensor() -> None:
    """Those of nvfp4 see a NaN anywhere in it, and need its amax; every encoding of ours has some."""
    found = scales(NVFP4, np.array([1, math.nan], np.float32), widest=F32_MAX, tensor=math.nan)
    assert found.stored.tolist() == [0x7E, 0x7F]
    with pytest.raises(ValueError, match="amax of the whole tensor"):
        scales(NVFP4, np.ones(1, np.float32), widest=F32_MAX)
    for encoding in (FLOAT8, FLOAT8_BLOCK, MXFP8, MXFP4, NVFP4):
        made = scales(encoding, np.ones((2, 3), np.float32), widest=F32_MAX, tensor=1.0)
        assert made.stored.shape == made.multiplier.shape == (2, 3)


@pytest.mark.parametrize(
    "encoding",
    [replace(FLOAT8, scale="BF16"), replace(NVFP4, has_global=False), replace(MXFP8, has_global=True)],
    ids=lambda e: f"{e.scale} {e.has_global}",
)
def test_scales_without_a_rule_are_refused(encoding: Encoding) -> None:
    with pytest.raises(TransaxleError, match="can be read, but not written") as caught:
        scales(encoding, np.ones(1, np.float32), widest=F32_MAX, tensor=1.0)
    assert caught.value.code == "UNSUPPORTED"
