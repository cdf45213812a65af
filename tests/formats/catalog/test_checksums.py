"""The checksums of files, held against what is read of them in any parts and any order."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import transaxle as tx
from tests.corpus.checksums import flip
from transaxle.axes.geometry import Loop
from transaxle.formats.catalog import Checksum
from transaxle.formats.checksums import Tally, Witness, crc_shift
from transaxle.formats.storage.copier import Steps, load_steps
from transaxle.formats.storage.local import LocalStorage

DATA = os.urandom(4000)
needs_steps = pytest.mark.skipif(load_steps() is None, reason="the compiled steps are not built here")


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


# Checksums of ranges that several readers read in short runs.

ROWS, COLUMNS = 60, 128
MATRIX = os.urandom(ROWS * COLUMNS)
BEFORE = 100
"""Bytes of the file before the matrix."""
FILE_BYTES = bytes(BEFORE) + MATRIX
RANGE = Checksum("f", BEFORE, len(MATRIX), zlib.crc32(MATRIX), "the matrix")


class Twice(LocalStorage):
    """Fails where anything is read for a checksum alone."""

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        if not loops:
            raise AssertionError((name, offset, view.nbytes))
        super().add_read(steps, name, offset, view, width, loops)


def runs_of(loops: Sequence[Loop], side: int) -> list[int]:
    """Return where each run begins, in the file (1) or in the view (2)."""
    steps = [range(0, loop[0] * loop[side], loop[side]) for loop in loops]
    return [sum(place) for place in product(*steps)]


@st.composite
def nests(draw: st.DrawFn) -> tuple[int, list[Loop]]:
    """A width, and loops of runs that do not touch one another."""
    width = draw(st.integers(1, 40) | st.integers(60, 700))
    loops: list[Loop] = []
    file = view = width
    for _ in range(draw(st.integers(1, 3))):
        count, step, into = draw(st.integers(1, 4)), file + draw(st.integers(0, 50)), view + draw(st.integers(0, 9))
        loops.insert(0, (count, step, into))
        file, view = (count - 1) * step + file, (count - 1) * into + view
    return width, loops


@needs_steps
@given(nests(), st.integers(0, 300))
def test_the_share_of_runs_is_that_of_the_file_with_zeros_between_them(
    tmp_path_factory: pytest.TempPathFactory, nest: tuple[int, list[Loop]], offset: int
) -> None:
    width, loops = nest
    places, rooms = runs_of(loops, 1), runs_of(loops, 2)
    data = os.urandom(offset + max(places) + width)
    folder = tmp_path_factory.mktemp("runs")
    (folder / "f").write_bytes(data)
    steps, out = Steps(), bytearray(max(rooms) + width)
    LocalStorage(folder).add_read(steps, "f", offset, memoryview(out), width, loops)
    found = steps.add_crc_share(memoryview(out), [crc_shift(step) for _, step, _ in loops])
    steps.run()
    alone, expected = bytearray(len(data) - offset), bytearray(len(out))
    for place, room in zip(places, rooms, strict=True):
        run = data[offset + place : offset + place + width]
        alone[place : place + width] = expected[room : room + width] = run
    assert out == expected
    assert found is not None
    assert found[1] == 1
    assert int(found[0]) == zlib.crc32(alone) ^ zlib.crc32(bytes(len(alone)))


def read_columns(witness: Witness, first: int, last: int, rows: int = ROWS) -> Tally:
    """Read columns of the matrix in a batch, and return the progress of its range."""
    steps, out = Steps(), np.zeros((rows, last - first), np.uint8)
    loops = [(rows, COLUMNS, last - first)]
    witness.add_read(steps, "f", BEFORE + first, out.reshape(-1).data, last - first, loops)
    steps.run()
    expected = np.frombuffer(MATRIX, np.uint8).reshape(ROWS, COLUMNS)[:rows, first:last]
    assert (out != expected).sum() <= 1  # a test damages one byte
    return witness.tally(RANGE)


@needs_steps
def test_readers_of_columns_prove_the_whole_and_read_nothing_twice(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(FILE_BYTES)
    tallies = [read_columns(Witness(Twice(tmp_path), [RANGE], {}), at, at + 32) for at in range(0, COLUMNS, 32)]
    assert [tally.read for tally in tallies] == [ROWS * 32] * 4
    witness = Witness(Twice(tmp_path), [RANGE], {})
    witness.combine_tallies(RANGE, tallies[:3])
    assert witness.is_right(RANGE) is None
    witness.combine_tallies(RANGE, tallies)
    assert witness.is_right(RANGE)
    alone = Witness(Twice(tmp_path), [RANGE], {})
    for at in (64, 0, 32, 96):
        read_columns(alone, at, at + 32)
    assert (alone.is_right(RANGE), alone.open()) == (True, [])


@needs_steps
def test_a_damaged_column_is_found(tmp_path: Path) -> None:
    damaged = bytearray(FILE_BYTES)
    damaged[BEFORE + 40 * COLUMNS + 77] ^= 8
    (tmp_path / "f").write_bytes(damaged)
    witness = Witness(LocalStorage(tmp_path), [RANGE], {})
    for at in range(0, COLUMNS, 32):
        read_columns(witness, at, at + 32)
    assert witness.is_right(RANGE) is None
    with pytest.raises(tx.TransaxleError, match="the matrix: its bytes do not match"):
        witness.recheck()


@needs_steps
def test_as_many_bytes_that_are_not_the_same_ones_prove_nothing(tmp_path: Path) -> None:
    """Of columns that were read twice, while others were not, the range is read for its checksum."""
    (tmp_path / "f").write_bytes(FILE_BYTES)
    witness = Witness(LocalStorage(tmp_path), [RANGE], {})
    tally = [read_columns(witness, 0, 32) for _ in range(4)][-1]
    assert (tally.shared, tally.share, witness.is_right(RANGE)) == (len(MATRIX), 0, None)
    witness.recheck()
    assert witness.is_right(RANGE)


@needs_steps
def test_the_same_zeros_twice_are_not_all_zeros(tmp_path: Path) -> None:
    """Neither zeros nor what was read twice change a checksum, so damage in these columns would be hidden."""
    zeros = Checksum("f", 0, len(MATRIX), zlib.crc32(bytes(len(MATRIX))), "the zeros")
    (tmp_path / "f").write_bytes(bytes(77) + b"\1" + bytes(len(MATRIX) - 78))
    tallies, half = [], COLUMNS // 2
    for first in (half, half, 0, 0):
        witness = Witness(LocalStorage(tmp_path), [zeros], {})
        steps, out = Steps(), memoryview(bytearray(ROWS * half))
        witness.add_read(steps, "f", first, out, half, [(ROWS, COLUMNS, half)])
        steps.run()
        tallies.append(witness.tally(zeros))
    for some in ([0, 1], [0, 2], [2, 3]):
        witness = Witness(LocalStorage(tmp_path), [zeros], {})
        witness.combine_tallies(zeros, [tallies[number] for number in some])
        assert witness.is_right(zeros) is None


@needs_steps
def test_a_file_that_ends_before_the_last_run(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(FILE_BYTES[:-5])
    witness = Witness(LocalStorage(tmp_path), [RANGE], {})
    with pytest.raises(tx.TransaxleError, match="the file is truncated"):
        read_columns(witness, 96, 128)
    assert witness.tally(RANGE).shared == 0
