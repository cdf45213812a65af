"""The codec against the walk, and its two paths against each other, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.encodings import walk
from transaxle.encodings.arithmetic import codec, kernel
from transaxle.encodings.arithmetic.codec import Path, amax, decode_box, decode_error, encode_error, encode_rows
from transaxle.encodings.arithmetic.minifloat import LARGEST, MINIFLOATS, wide_dtype
from transaxle.encodings.arithmetic.vectorised import tiling
from transaxle.encodings.encoding import FLOAT8, FLOAT8_BLOCK, MXFP4, MXFP8, NVFP4, WHOLE, Encoding, Error, Wide
from transaxle.errors import TransaxleError

PATHS: list[Path] = ["numpy", "compiled"] if kernel.load() else ["numpy"]
WIDES: list[Wide] = ["BF16", "F16", "F32"]
FORMS = {"F8_E4M3": walk.E4M3, "F8_E5M2": walk.E5M2, "F4": walk.E2M1}
CHANNEL = replace(FLOAT8, name="per channel", tile=(1, WHOLE))
BLOCK_1D = replace(FLOAT8_BLOCK, name="1x128", tile=(1, 128))
SMALL = replace(FLOAT8_BLOCK, name="3x4", tile=(3, 4), power_of_two=False)
E5M2 = replace(FLOAT8, name="e5m2", code="F8_E5M2")
ALL = [FLOAT8, CHANNEL, E5M2, FLOAT8_BLOCK, BLOCK_1D, SMALL, MXFP8, MXFP4, NVFP4]
each_path = pytest.mark.parametrize("path", PATHS)
each_wide = pytest.mark.parametrize("wide", WIDES)
each_encoding = pytest.mark.parametrize("encoding", ALL, ids=lambda e: e.name)

SPECIAL = [
    0.0, -0.0, 1.0, -1.0, 448.0, 449.0, 464.0, 480.0, -2688.0, 6.0, 5.0, 2.5, 0.25, 0.75, 2.0**-6, 2.0**-9, 2.0**-10,
    1.5 * 2.0**-10, 2.0**-14, 2.0**-24, 2.0**-126, 2.0**-133, 2.0**-149, 65504.0, 3.3895313892515355e38,
]  # fmt: skip
"""Codes, ties and ends of the code types and of the wide ones."""


def rule(encoding: Encoding, wide: Wide, tensor: float) -> walk.Rule:
    if encoding.scale == "F8_E8M0":
        return lambda a: walk.exponent_scale(a, encoding.code_max)
    if encoding.has_global:
        return lambda a: walk.two_level_scale(a, tensor, encoding.scale_max)
    widest = LARGEST[wide]
    return lambda a: walk.float_scale(a, encoding.code_max, widest, power_of_two=encoding.power_of_two)


def walked(
    encoding: Encoding, values: NDArray[Any], wide: Wide, over: tuple[int, int] | None = None
) -> tuple[list[list[int]], list[list[float]]]:
    rows = values.astype(np.float64).tolist()
    tensor = walk.largest([x for row in rows for x in row])
    tile = over or tuple(step or size for step, size in zip(encoding.tile, values.shape, strict=True))
    codes, stored = walk.encode(rows, (tile[0], tile[1]), FORMS[encoding.code], rule(encoding, wide, tensor))
    return (walk.packed(codes) if encoding.code == "F4" else codes), stored


def matrices(kind: str, shape: tuple[int, int], wide: Wide) -> NDArray[Any]:
    """Matrices of one kind of numbers, in a wide type."""
    rng = np.random.default_rng(len(kind) * 1000 + shape[0])
    normal = rng.standard_normal(shape)
    made: dict[str, Callable[[], NDArray[np.float64]]] = {
        "random": lambda: normal,
        "spread over all exponents": lambda: normal * 2.0 ** rng.integers(-140, 120, shape),
        "special": lambda: rng.choice(SPECIAL, shape),
        "one huge value": lambda: np.where(np.arange(normal.size).reshape(shape) == 5, 3e38, normal),
        "all equal": lambda: np.full(shape, -0.4375),
        "zeros": lambda: np.zeros(shape),
        "subnormal": lambda: normal * 1e-41,
        "infinities": lambda: np.where(rng.random(shape) < 0.01, math.inf * np.sign(normal), normal),
        "NaN": lambda: np.where(rng.random(shape) < 0.01, np.copysign(math.nan, normal), normal),
    }
    with np.errstate(all="ignore"):
        return made[kind]().astype(wide_dtype(wide))


KINDS = [
    "random", "spread over all exponents", "special", "one huge value", "all equal", "zeros", "subnormal", "infinities",
    "NaN",
]  # fmt: skip


@each_path
@each_wide
@pytest.mark.parametrize("kind", KINDS)
@each_encoding
def test_encode_follows_the_formulas(encoding: Encoding, kind: str, wide: Wide, path: Path) -> None:
    """Ragged in both dims: the last tiles are cut short."""
    values = matrices(kind, (7, 160), wide) if encoding.tile[0] != 128 else matrices(kind, (131, 140), wide)
    tensor = float(amax(values, path=path))
    codes, scale = encode_rows(encoding, values, amax=tensor if encoding.has_global else None, path=path)
    expected, stored = walked(encoding, values, wide)
    assert codes.tolist() == expected
    np.testing.assert_array_equal(scale.astype(np.float64), np.array(stored))


@each_path
def test_nvfp4_weights_share_scales_in_squares(path: Path) -> None:
    values = matrices("random", (40, 64), "BF16")
    codes, scale = encode_rows(NVFP4, values, amax=float(amax(values)), over=(16, 16), path=path)
    expected, stored = walked(NVFP4, values, "BF16", (16, 16))
    assert codes.tolist() == expected
    assert scale.tolist() == np.array(stored, np.uint8).repeat(16, axis=0)[:40].tolist()


@each_path
@each_wide
@each_encoding
def test_decode_is_code_times_scale(encoding: Encoding, wide: Wide, path: Path) -> None:
    """Every element of a box with a phase, on plain floats: the product rounded to float32, then to the type."""
    rng = np.random.default_rng(3)
    tile = tuple(step or 96 for step in encoding.tile)
    phase = (tile[0] // 3, tile[1] // 4 * 2 % tile[1])
    shape = (5, 90)
    grid = tuple(-(-(p + size) // step) for p, size, step in zip(phase, shape, tile, strict=True))
    if WHOLE in encoding.tile:
        phase = (0, 0)
        grid = tuple(1 if step == WHOLE else size for step, size in zip(encoding.tile, shape, strict=True))
    bits = MINIFLOATS[encoding.code].bits
    codes = rng.integers(0, 256, (shape[0], shape[1] * bits // 8), np.uint8)
    factor = 0.37 if encoding.has_global else 1.0
    scale: NDArray[Any] = rng.integers(90, 160, grid, np.uint8)
    if encoding.scale == "F32":
        scale = rng.standard_normal(grid).astype(np.float32)
    found = decode_box(encoding, codes, scale, phase=phase, factor=factor, dtype=wide, path=path)
    assert found.dtype == wide_dtype(wide)
    form = FORMS[encoding.code]
    real = {"F32": float, "F8_E8M0": lambda s: 2.0 ** (s - 127), "F8_E4M3": walk.E4M3.value}[encoding.scale]
    for i in range(shape[0]):
        for j in range(shape[1]):
            at = [(phase[0] + i) // tile[0], (phase[1] + j) // tile[1]]
            if WHOLE in encoding.tile:
                at = [0 if step == WHOLE else k for step, k in zip(encoding.tile, (i, j), strict=True)]
            stored = scale[at[0], at[1]].item()
            single = walk.f32(real(stored) * factor)
            code = codes[i, j].item() if bits == 8 else codes[i, j // 2].item() >> 4 * (j % 2) & 15
            product = walk.f32(form.value(code) * single)
            with np.errstate(over="ignore"):
                expected = float(np.array(product, np.float32).astype(wide_dtype(wide)))
            assert repr(float(found[i, j])) == repr(expected), (i, j)


@each_path
def test_every_code_times_every_e8m0_scale(path: Path) -> None:
    """All 256 x 256 products, in float32, where they are exact or round once."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1)).reshape(256 * 8, 32)
    scale = np.arange(256, dtype=np.uint8).repeat(8)[:, None]
    found = decode_box(MXFP8, codes, scale, dtype="F32", path=path).reshape(256, 256)
    for exponent in range(256):
        power = 2.0 ** (exponent - 127) if exponent < 255 else math.nan
        expected = [walk.f32(walk.E4M3.value(code) * power) for code in range(256)]
        np.testing.assert_array_equal(found[exponent], np.array(expected, np.float32))
        numbers = ~np.isnan(found[exponent])
        assert (np.signbit(found[exponent]) == np.signbit(np.array(expected)))[numbers].all()


@each_path
@each_wide
def test_nan_keeps_the_sign_of_its_code_and_has_no_payload(wide: Wide, path: Path) -> None:
    codes = np.array([[0x7F, 0xFF, 0x01, 0x81] * 8], np.uint8)
    quiet = {"BF16": 0x7FC0, "F16": 0x7E00, "F32": 0x7FC00000}[wide]
    word = np.uint32 if wide == "F32" else np.uint16
    sign = 1 << (8 * wide_dtype(wide).itemsize - 1)
    found = decode_box(MXFP8, codes, np.array([[255]], np.uint8), dtype=wide, path=path)
    assert found.view(word).tolist() == [[quiet, quiet | sign] * 16]
    infinite = decode_box(FLOAT8, codes & 0x80, np.array([[-math.inf]], np.float32), dtype=wide, path=path)
    assert infinite.view(word).tolist() == [[quiet, quiet | sign] * 16]


@pytest.mark.oracle
@each_path
@pytest.mark.parametrize("multiplier", [2.0**-127, 2.0**-126, 2.0**-9, 1.0, 448 / 3, 2.0**100, 2.0**127, walk.F32_MAX])
@pytest.mark.parametrize("code", FORMS)
def test_every_bfloat16_value_under_boundary_multipliers(code: str, multiplier: float, path: Path) -> None:
    """All 65,536 inputs through the cast itself, as one tile with a given multiplier."""
    values = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(64, 1024)
    kind, form = MINIFLOATS[code], FORMS[code]
    tiles = tiling(replace(FLOAT8, code=code), (64, 1024))
    out = np.empty((64, 1024 * kind.bits // 8), np.uint8)
    single = walk.f32(multiplier)
    codec._arithmetic(path).cast(values, tiles, np.full((1, 1), single, np.float32), kind, out)
    with np.errstate(invalid="ignore"):
        rows = values.astype(np.float64).tolist()
    expected = [[form.nearest(walk.times(x, single)) for x in row] for row in rows]
    assert out.tolist() == (walk.packed(expected) if kind.bits == 4 else expected)


def bits_of(array: NDArray[Any]) -> bytes:
    return array.tobytes()


shapes = st.tuples(st.integers(0, 9), st.integers(0, 70).map(lambda n: 2 * n))


@pytest.mark.skipif(len(PATHS) < 2, reason="the kernel is not built here")
@settings(max_examples=150)
@given(st.data())
def test_both_paths_give_the_same_bits(data: st.DataObject) -> None:
    """Any bits as values, any shape, any tile, any encoding: codes, scales, decoded values and errors."""
    encoding = data.draw(st.sampled_from(ALL))
    if WHOLE not in encoding.tile and encoding.scale == "F32":
        encoding = replace(encoding, tile=(data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))))
    wide = data.draw(st.sampled_from(WIDES))
    shape = data.draw(shapes)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    raw = rng.integers(0, 256, (*shape, wide_dtype(wide).itemsize), np.uint8)
    if data.draw(st.booleans()):
        raw[..., -1] = raw[..., -1] & 0x80 | 0x3E
    values = raw.view(wide_dtype(wide))[..., 0]
    tensor = {path: amax(values, path=path) for path in PATHS}
    assert bits_of(np.array(tensor["numpy"])) == bits_of(np.array(tensor["compiled"]))
    most = float(tensor["numpy"])
    given_amax = most if encoding.has_global else None
    over = None
    if WHOLE not in encoding.tile and data.draw(st.booleans()):
        over = (4 * encoding.tile[0], 2 * encoding.tile[1])
    made = {path: encode_rows(encoding, values, amax=given_amax, over=over, path=path) for path in PATHS}
    (codes, scale), (others, other_scale) = made["numpy"], made["compiled"]
    assert bits_of(codes) == bits_of(others)
    assert bits_of(scale) == bits_of(other_scale)

    factor = data.draw(st.sampled_from([1.0, most / 2688, 1e-30, 3.0]))
    out: Wide = data.draw(st.sampled_from(WIDES))
    errors = {
        path: (
            encode_error(encoding, values, codes, scale, factor=factor, path=path),
            decode_error(encoding, codes, scale, factor=factor, dtype=out, path=path),
        )
        for path in PATHS
    }
    for one, other in zip(errors["numpy"], errors["compiled"], strict=True):
        assert (one.max, one.count, one.unequal) == (other.max, other.count, other.unequal)
        assert other.square_sum == pytest.approx(one.square_sum, rel=1e-12)
    # a box of the codes, cut anywhere
    top, left = data.draw(st.integers(0, shape[0])), 2 * data.draw(st.integers(0, shape[1] // 2))
    bottom, right = data.draw(st.integers(top, shape[0])), 2 * data.draw(st.integers(left // 2, shape[1] // 2))
    per_byte = 8 // MINIFLOATS[encoding.code].bits
    box = codes[top:bottom, left // per_byte : right // per_byte]
    tile = tuple(step or max(size, 1) for step, size in zip(encoding.tile, shape, strict=True))
    phase = (top % tile[0], left % tile[1])
    grid = [
        slice(first // step, -(-last // step) if last > first else first // step)
        for first, last, step in zip((top, left), (bottom, right), tile, strict=True)
    ]
    if WHOLE in encoding.tile:
        phase = (0 if encoding.tile[0] == WHOLE else phase[0], 0 if encoding.tile[1] == WHOLE else phase[1])
    decoded = {
        path: decode_box(encoding, box, scale[grid[0], grid[1]], phase=phase, factor=factor, dtype=out, path=path)
        for path in PATHS
    }
    assert bits_of(decoded["numpy"]) == bits_of(decoded["compiled"])
    whole = decode_box(encoding, codes, scale, factor=factor, dtype=out, path="numpy")
    assert bits_of(whole[top:bottom, left:right].copy()) == bits_of(decoded["numpy"])


@each_path
@each_encoding
def test_bands_of_rows_give_what_the_whole_gives(encoding: Encoding, path: Path) -> None:
    values = matrices("random", (300, 256), "BF16")
    tensor = float(amax(values, path=path))
    said = None if encoding is CHANNEL or not (encoding.has_global or WHOLE in encoding.tile) else tensor
    whole = encode_rows(encoding, values, amax=tensor if encoding.has_global else None, path=path)
    step = 128 * 3 // 3 if encoding.tile[0] == 128 else 99
    bands = [encode_rows(encoding, values[r : r + step], amax=said, path=path) for r in range(0, 300, step)]
    assert bits_of(np.concatenate([codes for codes, _ in bands])) == bits_of(whole[0])
    scales = [scale for _, scale in bands]
    if encoding.tile[0] == WHOLE:
        assert all(bits_of(scale) == bits_of(whole[1]) for scale in scales)
    else:
        assert bits_of(np.concatenate(scales)) == bits_of(whole[1])


@each_path
@each_wide
def test_amax_of_rows_that_stand_apart(wide: Wide, path: Path) -> None:
    values = matrices("spread over all exponents", (50, 3000), wide)[3:40, 10:2900]
    finite = np.abs(values.astype(np.float64))
    assert float(amax(values, path=path)) == finite.max()
    assert math.isnan(amax(matrices("NaN", (50, 100), wide), path=path))
    assert math.isinf(amax(matrices("infinities", (50, 100), wide), path=path))
    assert amax(values[:0], path=path) == 0


@each_path
def test_strides_and_given_places(path: Path) -> None:
    """Rows that stand apart, columns that do (copied), and results written into part of a larger array."""
    values = matrices("random", (12, 96), "F32")
    expected = encode_rows(MXFP8, values, path=path)
    wider = np.zeros((24, 200), np.float32)
    wider[::2, 4:100] = values
    place = np.full((12, 100), 9, np.uint8)
    codes, scale = encode_rows(MXFP8, wider[::2, 4:100], codes_out=place[:, 2:98], path=path)
    assert np.shares_memory(codes, place)
    assert bits_of(codes.copy()) == bits_of(expected[0])
    assert (place[:, :2] == 9).all()
    assert (place[:, 98:] == 9).all()
    turned, _ = encode_rows(MXFP8, np.ascontiguousarray(values.T).T, path=path)
    assert bits_of(turned) == bits_of(expected[0])
    out = np.zeros((12, 100), np.float32)
    decode_box(MXFP8, codes, scale, dtype="F32", out=out[:, 3:99], path=path)
    assert bits_of(out[:, 3:99].copy()) == bits_of(decode_box(MXFP8, expected[0], scale, dtype="F32", path=path))
    assert not out[:, :3].any()
    assert not out[:, 99:].any()


@each_path
@each_wide
def test_errors_are_those_of_a_plain_sum(wide: Wide, path: Path) -> None:
    values = matrices("random", (9, 64), wide)
    codes, scale = encode_rows(MXFP8, values, path=path)
    found = encode_error(MXFP8, values, codes, scale, path=path)
    made = decode_box(MXFP8, codes, scale, dtype="F32", path=path).astype(np.float64).ravel().tolist()
    apart = [abs(a - b) for a, b in zip(made, values.astype(np.float64).ravel().tolist(), strict=True)]
    assert found.max == max(apart) > 0
    assert found.square_sum == pytest.approx(math.fsum(x * x for x in apart), rel=1e-13)
    assert (found.count, found.unequal) == (len(apart), sum(x > 0 for x in apart))
    assert found.rms == pytest.approx(math.sqrt(math.fsum(x * x for x in apart) / len(apart)), rel=1e-13)
    assert not found.exact
    assert decode_error(MXFP8, codes, scale, dtype=wide, path=path) == Error(0.0, 0.0, 576, 0)


@each_path
def test_errors_of_decoding_are_against_the_real_product(path: Path) -> None:
    """A float32 scale times a code needs up to 28 bits: rounded once to float32, then to bfloat16."""
    values = matrices("random", (9, 64), "BF16")
    codes, scale = encode_rows(FLOAT8, values, path=path)
    for wide in WIDES:
        found = decode_error(FLOAT8, codes, scale, dtype=wide, path=path)
        made = decode_box(FLOAT8, codes, scale, dtype=wide, path=path).astype(np.float64).ravel()
        real = [walk.E4M3.value(q) * float(scale[0, 0]) for q in codes.ravel().tolist()]
        apart = [abs(a - b) for a, b in zip(made.tolist(), real, strict=True)]
        assert found.max == max(apart) > 0
        assert found.square_sum == pytest.approx(math.fsum(x * x for x in apart), rel=1e-13)


@each_path
def test_errors_of_numbers_that_are_none(path: Path) -> None:
    values = np.array([[math.nan, 1.0, -math.inf, math.inf] + [0.0] * 28], np.float32)
    codes, scale = encode_rows(FLOAT8, values, path=path)
    found = encode_error(FLOAT8, values, codes, scale, path=path)
    assert found == Error(math.inf, math.inf, 32, 2)  # NaN stays NaN, infinities saturate to 448
    codes, scale = encode_rows(MXFP8, values, path=path)
    assert scale.tolist() == [[0xFF]], "of a block with a NaN, whose every value is one then"
    assert encode_error(MXFP8, values, codes, scale, path=path).unequal == 32 - 1
    assert Error(1.0, 2.0, 3, 4) + Error(0.5, 1.0, 2, 0) == Error(1.0, 3.0, 5, 4)
    assert Error().rms == 0
    assert Error().exact


def test_scales_come_typed_or_as_bits_and_floats_in_other_widths() -> None:
    codes, scale = encode_rows(MXFP8, matrices("random", (4, 64), "BF16"))
    for dtype in (ml_dtypes.float8_e8m0fnu, np.uint8):
        typed = decode_box(MXFP8, codes.view(ml_dtypes.float8_e4m3fn), scale.view(dtype))
        assert bits_of(typed) == bits_of(decode_box(MXFP8, codes, scale))
    encoding = replace(CHANNEL, scale="BF16")
    codes = np.arange(64, dtype=np.uint8).reshape(2, 32)
    scale = np.array([[0.5], [3.0]], ml_dtypes.bfloat16)
    wider = decode_box(CHANNEL, codes, scale.astype(np.float32))
    assert bits_of(decode_box(encoding, codes, scale)) == bits_of(wider)


def test_what_does_not_fit_is_refused() -> None:
    values, codes = matrices("random", (4, 66), "BF16"), np.zeros((2, 64), np.uint8)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: encode_rows(NVFP4, values[:, :65], amax=1.0), "SHAPE_MISMATCH"),
        (lambda: encode_rows(MXFP8, values.astype(np.float64)), "DTYPE_MISMATCH"),
        (lambda: decode_box(MXFP8, codes, np.zeros((2, 3), np.uint8)), "SHAPE_MISMATCH"),
        (lambda: decode_box(MXFP8, np.zeros((2, 64), np.int16), np.zeros((2, 2), np.uint8)), "DTYPE_MISMATCH"),
        (lambda: decode_box(MXFP8, codes, np.zeros((2, 2), np.float32)), "DTYPE_MISMATCH"),
        (lambda: decode_box(MXFP8, codes, np.zeros((2, 3), np.uint8), phase=(1, 0)), "UNSUPPORTED"),
        (lambda: encode_rows(replace(MXFP8, tile=(1, 1, 32)), values), "UNSUPPORTED"),
        (lambda: encode_rows(replace(MXFP8, code="F6_E2M3"), values), "UNSUPPORTED"),
    ]  # fmt: skip
    for case, code in cases:
        with pytest.raises(TransaxleError) as caught:
            case()
        assert caught.value.code == code


def test_misuse_is_an_error() -> None:
    values = matrices("random", (4, 64), "BF16")
    codes, scale = encode_rows(MXFP8, values)
    cases: list[Callable[[], Any]] = [
        lambda: encode_rows(MXFP8, values[0]),
        lambda: encode_rows(MXFP8, values, amax=1.0),
        lambda: encode_rows(NVFP4, values),
        lambda: encode_rows(NVFP4, values, amax=1.0, over=(16, 24)),
        lambda: encode_rows(MXFP8, values, codes_out=np.empty((4, 63), np.uint8)),
        lambda: decode_box(MXFP8, codes, scale, out=np.empty((4, 64), np.float32)),
        lambda: encode_error(MXFP8, values[:3], codes, scale),
    ]
    for case in cases:
        with pytest.raises(ValueError, match=r"dims|amax|out is|codes of"):
            case()
