"""Reads ahead give the same bytes as the storage, and fewer of them are calls."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from transaxle.errors import Refused
from transaxle.formats.storage.local import LocalStorage
from transaxle.formats.storage.storage import NearReads

SIZE = 1 << 18


class _Counted(LocalStorage):
    """Counts the bytes that are asked of it."""

    asked = 0
    calls = 0

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        self.asked += view.nbytes
        self.calls += 1
        super().read_into(name, offset, view)


@pytest.fixture
def storage(tmp_path: Path) -> _Counted:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(random.Random(name).randbytes(SIZE))
    return _Counted(tmp_path)


@pytest.mark.parametrize("seed", range(4))
def test_any_reads_give_the_bytes_of_the_file(storage: _Counted, seed: int) -> None:
    choice = random.Random(seed)
    ahead, at = NearReads(storage), 0
    for _ in range(300):
        name = choice.choice("aab")
        count = choice.choice((0, 1, 7, 900, 20_000, 70_000))
        at = choice.choice((at, at + 64, at + 3_000, at - 500, choice.randrange(SIZE)))
        at = max(0, min(at, SIZE - count))
        assert ahead.read(name, at, count) == storage.read(name, at, count)
        at += count


def test_near_reads_are_few_calls(storage: _Counted) -> None:
    ahead = NearReads(storage)
    for at in range(0, SIZE, 1024):
        ahead.read("a", at, 200)
    assert storage.calls < 15
    assert storage.asked <= SIZE + 10 * 200


def test_nothing_is_read_between_what_lies_apart(storage: _Counted) -> None:
    ahead = NearReads(storage)
    for at in range(40_000, SIZE, 40_000):  # the end of one archive, and the head of the next
        ahead.read("a", at - 500, 500)
        ahead.read("a", at, 1000)
    assert storage.asked == 1500 * storage.calls // 2


def test_the_end_of_a_file_is_no_more_than_that(storage: _Counted) -> None:
    ahead = NearReads(storage)
    for at in range(SIZE - 8 * 100, SIZE, 100):
        assert len(ahead.read("a", at, 100)) == 100
    with pytest.raises(Refused, match="truncated"):
        ahead.read("a", SIZE - 10, 100)
