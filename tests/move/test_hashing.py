"""Files that hash what they take: every byte at its place, and the hash of just these bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.move.filling import PlainFiles
from transaxle.formats.storage import copier
from transaxle.move.journal import SPAN, HashingFiles, ItemHash, Places, digest, digest_in, join_hashes
from transaxle.move.transfer import Transfer


class _Disk(PlainFiles):
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


@given(st.integers(0, 40), st.lists(st.integers(0, 40), max_size=6), st.integers(1, 41))
def test_a_large_item_has_the_hash_of_its_spans(size: int, cuts: list[int], span: int) -> None:
    data = bytes(range(size))
    hashed = ItemHash(span)
    for start, stop in pairwise(sorted({0, size, *(cut for cut in cuts if cut < size)})):
        hashed.update(start, memoryview(data)[start:stop])
    spans = [digest(data[at : at + span]) for at in range(0, max(size, 1), span)]
    assert hashed.hexdigest() == join_hashes(spans)
    assert hashed.hexdigest() == (digest(data) if size <= span else digest("".join(spans).encode()))
    assert SPAN == 256 << 20, "manifests say so"


def test_what_no_rank_sees_whole_is_not_hashed() -> None:
    told: dict[int, str] = {}
    files = HashingFiles(None, [PLACES, PLACES], [1], finish=told.__setitem__)
    for key in (0, 1):
        files.take(key, 0, memoryview(b"abc"))
        files.end(key)
    assert told == {1: digest(b"abc")}
    assert files.digests == {}


COLUMNS = tuple(Transfer("ab"[n], 20, 3 * n, 3, ((10, 3, 6),)) for n in range(2))
"""Ten rows of six bytes, three columns of each in either file."""
APART = (Transfer("a", 20, 0, 2, ((5, 20, 12), (3, 4, 4))), Transfer("b", 0, 2, 2, ((5, 6, 12), (3, 2, 4))))
"""Runs of two bytes: with gaps between them in the first file, without in the second."""


@given(st.lists(st.integers(0, 60), max_size=6), st.sampled_from([COLUMNS, APART]))
def test_runs_of_a_stride_lie_at_their_places(cuts: list[int], places: tuple[Transfer, ...]) -> None:
    data = np.random.default_rng(2).integers(1, 256, 60, np.uint8).tobytes()
    disk = _Disk()
    files = HashingFiles(disk, [places], [0])
    for start, stop in pairwise(sorted({0, 60, *cuts})):
        files.take(0, start, memoryview(data)[start:stop])
    files.end(0)
    rows = np.frombuffer(data, np.uint8).reshape(10, 6)
    wanted = {name: np.zeros(300, np.uint8) for name in "ab"}
    if places is COLUMNS:
        wanted["a"][20:50], wanted["b"][20:50] = rows[:, :3].ravel(), rows[:, 3:].ravel()
    else:
        pairs = rows.reshape(5, 3, 2, 2)
        for at in range(5):
            for run in range(3):
                begin = 20 + 20 * at + 4 * run
                wanted["a"][begin : begin + 2] = pairs[at, run, 0]
        wanted["b"][:30] = pairs[:, :, 1].ravel()
    assert {name: bytes(file) for name, file in disk.files.items()} == {n: w.tobytes() for n, w in wanted.items()}
    assert digest_in(disk, places) == files.digests[0] == digest(data)


def test_a_place_is_found_among_many() -> None:
    places = [Transfer("a", 1000 - 10 * number, 10 * number, 10) for number in range(100)]
    copies = [Transfer("b", number, number, 1) for number in range(0, 1000, 3)]
    data = np.random.default_rng(4).integers(0, 256, 1000, np.uint8).tobytes()
    found = Places([*copies, *places])
    for start, stop in ((0, 1000), (5, 6), (38, 38), (95, 214), (999, 1000)):
        written = {"a": bytearray(1010), "b": bytearray(1000)}
        for file, at, part in found.locate(start, memoryview(data)[start:stop]):
            written[file][at : at + len(part)] = part
        for number, byte in enumerate(data):
            inside = start <= number < stop
            assert written["a"][1000 - number // 10 * 10 + number % 10] == (byte if inside else 0)
            assert written["b"][number] == (byte if inside and number % 3 == 0 else 0)


@pytest.mark.parametrize("way", [copier.new_hash, xxhash.xxh3_128], ids=["copier", "xxhash"])
@given(
    size=st.integers(0, 600)
    | st.sampled_from([1023, 1024, 1025, 1087, 1088, 1089, 2048, 2049])
    | st.integers(0, 20_000),
    seed=st.integers(0, 9),
    cuts=st.lists(st.integers(0, 20_000), max_size=5),
)
def test_bytes_that_come_in_pieces_have_the_hash_of_all(
    way: Callable[[], copier.Running], size: int, seed: int, cuts: list[int]
) -> None:
    data = np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()
    running = way()
    for start, stop in pairwise(sorted({0, size, *(cut for cut in cuts if cut < size)})):
        running.update(memoryview(data)[start:stop])
        assert running.hexdigest() == xxhash.xxh3_128_hexdigest(data[:stop])
    assert running.hexdigest() == xxhash.xxh3_128_hexdigest(data)
