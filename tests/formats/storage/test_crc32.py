"""The compiled CRC-32 is zlib's, whatever the bytes, where they begin, how many they are and what came before."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transaxle.formats import checksums as module
from transaxle.formats.checksums import crc32

DATA = np.random.default_rng(0).integers(0, 256, 1 << 17, np.uint8).tobytes()
COMPILED = module.load_crc32()
CHECK = 0xCBF43926
"""What every CRC-32 gives for the digits from 1 to 9."""


@given(
    st.integers(0, 70), st.one_of(st.integers(0, 200), st.integers(4000, 4400), st.integers(0, 120_000)),
    st.sampled_from([0, 1, 0xFFFFFFFF, 0x80000000]) | st.integers(0, 0xFFFFFFFF),
)  # fmt: skip
def test_it_is_zlibs(start: int, size: int, before: int) -> None:
    data = memoryview(DATA)[start : start + size]
    assert crc32(data, before) == zlib.crc32(data, before)


@pytest.mark.skipif(COMPILED is None, reason="it is not built here")
@pytest.mark.parametrize(
    "size", [0, 15, 16, 63, 64, 65, 79, 80, 127, 128, 143, 255, 256, 257, 271, 272, 511, 512, 528, 799, 4096]
)
@pytest.mark.parametrize("fill", [0, 0xFF, None])
def test_short_and_uniform_bytes_are_summed_by_the_compiled_loop_too(
    size: int, fill: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MIN_BYTES", 0)
    data = DATA[:size] if fill is None else bytes([fill]) * size
    assert crc32(memoryview(data)) == zlib.crc32(data)


def test_without_a_compiler_zlib_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    assert crc32(memoryview(b"123456789")) == CHECK
    monkeypatch.setattr(module, "load_crc32", lambda: None)
    assert crc32(memoryview(DATA), 7) == zlib.crc32(DATA, 7)
