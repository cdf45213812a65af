"""Integer codes and tables: both implementations against sums that are written out here."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest

from transaxle.encodings.arithmetic import kernel
from transaxle.encodings.arithmetic.codec import Path, decode_box, decode_error, encode_error, encode_rows
from transaxle.encodings.arithmetic.minifloat import wide_dtype
from transaxle.encodings.encoding import FP4, INT4, INT8, NF4, Encoding, Wide
from transaxle.errors import TransaxleError

PATHS: list[Path] = ["numpy", "compiled"] if kernel.load() else ["numpy"]
WIDES: list[Wide] = ["BF16", "F16", "F32"]
U8 = replace(INT8, code="U8", tile=(1, 32))
NORMAL = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
SMALL = tuple(value / 12 for value in (0, 0.0625, 8, 12, 4, 6, 2, 3))
MEANINGS = {
    "I4": lambda q: q - 8, "I8": lambda q: struct.unpack("b", bytes([q]))[0], "U8": lambda q: q - 128,
    "NF4": lambda q: NORMAL[q], "FP4": lambda q: -SMALL[q - 8] if q > 7 else SMALL[q],
}  # fmt: skip
each_encoding = pytest.mark.parametrize("encoding", [INT4, INT8, U8, NF4, FP4], ids=lambda e: e.code)


def box(encoding: Encoding, rows: int = 5, columns: int = 192) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random codes (packed), scales of every magnitude, and zero points, in tiles of 32 columns."""
    rng = np.random.default_rng(ord(encoding.code[0]))
    packed = rng.integers(0, 256, (rows, columns * encoding.code_bits // 8), np.uint8)
    scale = (rng.standard_normal((rows, columns // 32)) * 2.0 ** rng.integers(-20, 12, (rows, columns // 32))).astype(
        np.float32
    )
    scale[0, :3] = 0, np.inf, np.nan
    return packed, scale, np.array(rng.integers(-8, 8, scale.shape), np.float32)


@each_encoding
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wide", WIDES)
@pytest.mark.parametrize("with_zeros", [False, True])
def test_a_value_is_code_minus_zero_times_scale(encoding: Encoding, path: Path, wide: Wide, with_zeros: bool) -> None:
    if with_zeros and not encoding.is_integer:
        pytest.skip("tables have no zero points")
    encoding = replace(encoding, tile=(1, 32))
    packed, scale, zero = box(encoding)
    codes = packed if encoding.code_bits == 8 else np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    meant = np.vectorize(MEANINGS[encoding.code], otypes=[np.float32])(codes)
    tile = np.arange(codes.shape[1]) // 32
    with np.errstate(all="ignore"):
        exact = (meant - zero[:, tile] if with_zeros else meant).astype(np.float64) * scale[:, tile].astype(np.float64)
        expected = exact.astype(np.float32).astype(wide_dtype(wide))
    zeros = zero if with_zeros else None
    found = decode_box(encoding, packed, scale, dtype=wide, zero=zeros, path=path)
    assert np.array_equal(found.astype(np.float32), expected.astype(np.float32), equal_nan=True)
    finite = np.isfinite(exact) & np.isfinite(found.astype(np.float64))
    error = decode_error(encoding, packed, scale, dtype=wide, zero=zeros, path=path)
    differ = ~((found.astype(np.float64) == exact) | (np.isnan(exact) & np.isnan(found.astype(np.float64))))
    assert error.unequal == np.count_nonzero(differ)
    assert error.count == codes.size
    if not np.any(~finite & differ):
        assert error.max == np.abs(found.astype(np.float64)[finite] - exact[finite]).max()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wide", WIDES)
def test_a_part_of_a_matrix_is_decoded_as_in_the_whole(path: Path, wide: Wide) -> None:
    packed, scale, zero = box(INT4, 4, 1100 // 32 * 32 * 2)
    whole = decode_box(INT4, packed, scale, dtype=wide, zero=zero, path=path)
    for first, last in ((0, 2), (30, 34), (62, 1026), (1000, 1200)):
        tiles = slice(first // 32, -(-last // 32))
        part = decode_box(
            INT4, packed[1:3, first // 2 : last // 2], scale[1:3, tiles], phase=(0, first % 32), dtype=wide,
            zero=zero[1:3, tiles], path=path,
        )  # fmt: skip
        assert np.array_equal(part.view(np.uint8), np.ascontiguousarray(whole[1:3, first:last]).view(np.uint8))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wide", WIDES)
def test_values_that_an_integer_and_a_scale_give_keep_them(path: Path, wide: Wide) -> None:
    """Any group of codes whose largest is 7, or -8, and any scale: what was decoded has its codes again."""
    rng = np.random.default_rng(7)
    codes = rng.integers(-7, 8, (64, 128))
    codes[:, ::32] = np.where(rng.random((64, 4)) < 0.5, 7, -7)
    codes[32:, 1::32] = -8
    scale = (rng.random((64, 4)) * 2.0 ** rng.integers(-12, 3, (64, 4)) + 1e-4).astype(wide_dtype(wide))
    packed = (codes[:, 0::2] + 8 | codes[:, 1::2] + 8 << 4).astype(np.uint8)
    values = decode_box(INT4, packed, scale, dtype=wide, path=path)
    again, stored = encode_rows(replace(INT4, scale=wide), values, path=path)
    assert np.array_equal(again, packed)
    error = encode_error(INT4, values, again, stored, path=path)
    assert error.max <= float(np.abs(values.astype(np.float64)).max()) * 2**-8
    assert np.array_equal(decode_box(INT4, again, stored, dtype=wide, path=path).view(np.uint8), values.view(np.uint8))


def test_what_is_not_written_is_refused() -> None:
    for encoding in (INT8, replace(INT4, zero_rows=8), replace(INT4, tile=(2, 32))):
        with pytest.raises(TransaxleError, match="cannot be written"):
            encode_rows(encoding, np.ones((2, 64), np.float32))
    with pytest.raises(TransaxleError, match="can be read, but not written"):
        encode_rows(NF4, np.ones((2, 64), np.float32))


@pytest.mark.skipif(len(PATHS) < 2, reason="no compiler")
@pytest.mark.parametrize("wide", WIDES)
@pytest.mark.parametrize("group", [16, 32, 48])
def test_both_implementations_encode_the_same_bits(wide: Wide, group: int) -> None:
    """Numbers of all magnitudes, groups that were int4 before, zeros, infinities, NaN; and cut groups."""
    rng = np.random.default_rng(group)
    with np.errstate(all="ignore"):
        values = rng.standard_normal((64, 240)) * 2.0 ** rng.integers(-150, 120, (64, 1))
        values[:8] = rng.standard_normal((8, 240))
        values[8:24] = rng.integers(-8, 8, (16, 240)) * rng.random((16, 1))
        values[24, :100], values[25, 3], values[26, 5], values[27] = 0, np.inf, np.nan, -np.inf
        matrix = values.astype(np.float32).astype(wide_dtype(wide))
    encoding = replace(INT4, tile=(1, group), scale=wide)
    for columns in (240, 200):
        part = np.ascontiguousarray(matrix[:, :columns])
        (codes, scale), (others, other_scale) = (
            encode_rows(encoding, part, path=path) for path in ("compiled", "numpy")
        )
        assert np.array_equal(scale.view(np.uint8), other_scale.view(np.uint8))
        assert np.array_equal(codes, others)
