"""The checksums of files, held against what is read of them in any parts and any order."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import transaxle as tx
from tests.corpus.checksums import flip
from transaxle.axes.geometry import Loop
from transaxle.formats.catalog import Checksum
from transaxle.formats.checksums import Tally, Witness
from transaxle.formats.storage.copier import Steps
from transaxle.formats.storage.local import LocalStorage

DATA = os.urandom(4000)


def part(start: int, stop: int) -> tuple[int, int, int]:
    return start, stop, zlib.crc32(DATA[start:stop])


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 50)), max_size=12))
def test_parts_in_any_order_and_their_gaps(reads: list[tuple[int, int]]) -> None:
    tally, seen = Tally(), set[int]()
    for start, size in reads:
        stop = min(start + size, 100)
        for first, last in tally.gaps(start, stop):
            tally.add(part(first, last))
        seen.update(range(start, stop))
    assert all(found == part(*found[:2]) for found in tally.parts)
    assert {at for first, last, _ in tally.parts for at in range(first, last)} == seen
    assert {at for first, last in tally.gaps(0, 100) for at in range(first, last)} == set(range(100)) - seen
    assert all(one[1] < other[0] for one, other in zip(tally.parts, tally.parts[1:], strict=False))


class Counted(LocalStorage):
    """Counts the bytes that are read."""

    count = 0

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        self.count += view.nbytes
        super().read_into(name, offset, view)

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        self.count += view.nbytes
        super().add_read(steps, name, offset, view, width, loops)


def test_only_what_was_not_read_is_read_in_the_end(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(DATA)
    below = Counted(tmp_path)
    ranges = [
        Checksum("f", at, size, zlib.crc32(DATA[at : at + size]) ^ (at == 2000), f"at {at}")
        for at, size in ((0, 1000), (1000, 1000), (2000, 1000))
    ]
    witness = Witness(below, ranges, {})
    witness.read("f", 700, 500)
    witness.read("f", 1200, 800)
    assert [witness.is_right(each) for each in ranges] == [None, True, None]
    witness.recheck()  # the third is wrong, and nobody has read of it
    assert below.count == 1300 + 700
    witness.read("f", 2000, 10)
    with pytest.raises(tx.TransaxleError, match="at 2000: its bytes do not match the checksum"):
        witness.recheck()


def test_torch_files_without_checksums_are_not_refused(tmp_path: Path) -> None:
    """torch writes 0 for every record when it is told to take none."""
    file = tmp_path / "model.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(100.0)}, file)
    finally:
        torch.serialization.set_crc32_options(True)
    flip(file)
    tx.convert(file, tmp_path / "out", to="safetensors:identity")
    assert tx.verify(file).ok


def test_a_tensor_that_is_read_whole(tmp_path: Path) -> None:
    """And a box of it, which is not."""
    torch.save({"w": torch.arange(3000.0).reshape(30, 100)}, tmp_path / "model.pt")
    flip(tmp_path / "model.pt")
    with tx.open(tmp_path / "model.pt") as checkpoint:
        assert checkpoint["w"].read((slice(3), slice(2)))[2, 1] == 201
        with pytest.raises(tx.TransaxleError, match="record data/0") as caught:
            checkpoint["w"].read()
    assert (caught.value.code, caught.value.where.tensor) == ("CORRUPT", "w")


STOPPED = """
import os, sys
import transaxle as tx
done = 0
def progress(size):
    global done
    done += size
    if done > 3 << 20:
        os._exit(9)
tx.convert(sys.argv[1], sys.argv[2], to="safetensors:identity", jobs=1, resume=True, progress=progress)
"""


def test_what_an_earlier_run_has_read_is_checked_too(tmp_path: Path) -> None:
    file, out = tmp_path / "model.pt", tmp_path / "out"
    torch.save({str(number): torch.rand(1 << 18) for number in range(6)}, file)
    flip(file)
    assert subprocess.run([sys.executable, "-c", STOPPED, file, out], check=False).returncode == 9
    with pytest.raises(tx.TransaxleError, match="record data/0"):
        tx.convert(file, out, to="safetensors:identity", resume=True)
    assert not out.exists()


def test_what_several_have_read_is_put_together(tmp_path: Path) -> None:
    """What one of them has mostly read, it reads to the end; of the others, pieces are handed over."""
    (tmp_path / "data").write_bytes(DATA)
    checksum = Checksum("data", 0, 4000, zlib.crc32(DATA), "all")
    pieces = []
    for start, stop in ((0, 1500), (1500, 2500), (2500, 4000)):
        worker = Witness(Counted(tmp_path), [checksum], {})
        worker.read("data", start, stop - start)
        tallies = worker.take_tallies()
        assert worker.open() == []
        pieces.append(tallies[checksum].parts)
    together = Counted(tmp_path)
    witness = Witness(together, [checksum], {})
    witness.mark_read("data", 0, 4000)
    for parts in (pieces[0], pieces[2]):
        witness.count(checksum, parts)
    witness.recheck()
    assert (witness.is_right(checksum), together.count) == (True, 1000)
    mostly = Witness(Counted(tmp_path), [checksum], {})
    mostly.read("data", 0, 2100)
    assert (mostly.take_tallies(), mostly.is_right(checksum)) == ({}, True)
    wrong = Witness(LocalStorage(tmp_path), [Checksum("data", 0, 4000, 1, "all")], {})
    wrong.read("data", 0, 4000)
    with pytest.raises(tx.TransaxleError, match="do not match the checksum"):
        wrong.take_tallies()
