"""Files that hash what they take: every byte at its place, and the hash of just these bytes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from transaxle.move.hashing import HashingFiles, digest, digest_in, within
from transaxle.move.transfer import Transfer


class _Disk:
    """Files in memory."""

    def __init__(self) -> None:
        self.files = {name: bytearray(300) for name in "ab"}

    def pwrite(self, file: str, offset: int, view: memoryview) -> None:
        self.files[file][offset : offset + len(view)] = view

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        view[:] = self.files[name][offset : offset + len(view)]


PLACES = (Transfer("a", 50, 0, 100), Transfer("b", 7, 100, 1), Transfer("a", 0, 101, 49))


@given(st.lists(st.integers(0, 150), max_size=6))
def test_an_item_lies_at_its_places_and_is_hashed(cuts: list[int]) -> None:
    data = np.random.default_rng(1).integers(0, 256, 150, np.uint8).tobytes()
    disk, taken = _Disk(), list[int]()
    files = HashingFiles(disk, [PLACES, ()], [0, 1], taken.append)
    edges = sorted({0, 150, *cuts})
    for start, stop in pairwise(edges):
        files.take(0, start, memoryview(data)[start:stop])
    files.end(0)
    files.end(1)
    assert files.digests == {0: xxhash.xxh3_128_hexdigest(data), 1: xxhash.xxh3_128_hexdigest(b"")}
    assert digest_in(disk, PLACES) == digest(data)
    assert sum(taken) == 150
    assert disk.files["a"][:150] == data[101:] + bytes(1) + data[:100]
    assert disk.files["b"][7] == data[100]


def test_what_no_rank_sees_whole_is_not_hashed() -> None:
    told: dict[int, str] = {}
    files = HashingFiles(None, [PLACES, PLACES], [1], finish=told.__setitem__)
    for key in (0, 1):
        files.take(key, 0, memoryview(b"abc"))
        files.end(key)
    assert told == {1: digest(b"abc")}
    assert files.digests == {}


def test_parts_of_places() -> None:
    assert list(within(PLACES, 99, 103)) == [
        Transfer("a", 149, 99, 1),
        Transfer("b", 7, 100, 1),
        Transfer("a", 0, 101, 2),
    ]
    assert list(within(PLACES, 150, 160)) == []
