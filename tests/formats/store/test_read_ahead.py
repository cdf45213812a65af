"""Reading ahead: the right bytes, each asked for about once, in bounded memory, whatever the threads do."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transaxle.formats.store.reading import LEAST, NearReads

DATA = random.Random(0).randbytes(3_000_000)


class Requests:
    """A file of many bytes, and who asked for which."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []
        self.failing = False

    def fetch(self, file: str, start: int, stop: int) -> bytes:
        assert 0 <= start < stop <= len(DATA), file
        self.made.append((start, stop))
        if self.failing:
            raise OSError("down")
        return DATA[start:stop]

    @property
    def asked(self) -> int:
        return sum(stop - start for start, stop in self.made)


def read(ahead: NearReads, offset: int, size: int) -> bytes:
    buffer = bytearray(size)
    ahead.read_into("a", len(DATA), offset, memoryview(buffer))
    return bytes(buffer)


@given(st.lists(st.tuples(st.integers(0, len(DATA)), st.integers(0, 400_000)), max_size=30), st.integers(1, 2_000_000))
def test_any_reads_in_any_memory(reads: list[tuple[int, int]], memory: int) -> None:
    requests = Requests()
    ahead, largest = NearReads(requests.fetch, memory), 0
    for offset, size in reads:
        size = min(size, len(DATA) - offset)
        largest = max(largest, size)
        assert read(ahead, offset, size) == DATA[offset : offset + size]
        assert ahead._cached_bytes <= max(memory, largest)


def test_a_file_read_in_order_is_asked_for_once() -> None:
    requests = Requests()
    ahead = NearReads(requests.fetch, 32 << 20)
    for start in range(0, len(DATA), 10_000):
        assert read(ahead, start, 10_000) == DATA[start : start + 10_000]
    assert requests.asked == len(DATA)
    assert len(requests.made) <= 6


def test_scattered_reads_ask_for_little_more() -> None:
    requests = Requests()
    ahead = NearReads(requests.fetch)
    for start in (2_500_000, 1_000_000, 0):
        read(ahead, start, 1000)
    assert requests.asked <= 3 * LEAST
    read(ahead, 2_500_000 + 100, 500)
    assert len(requests.made) == 3


def test_threads_that_want_the_same_ask_once() -> None:
    requests, begin = Requests(), threading.Barrier(8)
    ahead = NearReads(requests.fetch)

    def one(_: int) -> bytes:
        begin.wait()
        return read(ahead, 1000, 1000)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(one, range(8))) == {DATA[1000:2000]}
    assert len(requests.made) == 1


def test_a_failure_is_not_kept() -> None:
    requests = Requests()
    ahead = NearReads(requests.fetch)
    requests.failing = True
    with pytest.raises(OSError, match="down"):
        read(ahead, 0, 10)
    requests.failing = False
    assert read(ahead, 0, 10) == DATA[:10]
