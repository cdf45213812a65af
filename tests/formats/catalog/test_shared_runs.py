"""Checksums of what several read in short runs: each sums up its own, and together they are the whole."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import transaxle as tx
from transaxle.axes.geometry import Loop
from transaxle.formats.catalog import Checksum
from transaxle.formats.checksums import Tally, Witness, crc_shift
from transaxle.formats.storage.copier import Steps, load_steps
from transaxle.formats.storage.local import LocalStorage

pytestmark = pytest.mark.skipif(load_steps() is None, reason="the compiled steps are not built here")

ROWS, COLUMNS = 60, 128
DATA = os.urandom(ROWS * COLUMNS)
BEFORE = 100
"""Bytes of the file before the matrix."""
FILE = bytes(BEFORE) + DATA
RANGE = Checksum("f", BEFORE, len(DATA), zlib.crc32(DATA), "the matrix")


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
    expected = np.frombuffer(DATA, np.uint8).reshape(ROWS, COLUMNS)[:rows, first:last]
    assert (out != expected).sum() <= 1  # a test damages one byte
    return witness.tally(RANGE)


def test_readers_of_columns_prove_the_whole_and_read_nothing_twice(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(FILE)
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


def test_a_damaged_column_is_found(tmp_path: Path) -> None:
    damaged = bytearray(FILE)
    damaged[BEFORE + 40 * COLUMNS + 77] ^= 8
    (tmp_path / "f").write_bytes(damaged)
    witness = Witness(LocalStorage(tmp_path), [RANGE], {})
    for at in range(0, COLUMNS, 32):
        read_columns(witness, at, at + 32)
    assert witness.is_right(RANGE) is None
    with pytest.raises(tx.TransaxleError, match="the matrix: its bytes do not match"):
        witness.recheck()


def test_as_many_bytes_that_are_not_the_same_ones_prove_nothing(tmp_path: Path) -> None:
    """Of columns that were read twice, while others were not, the range is read for its checksum."""
    (tmp_path / "f").write_bytes(FILE)
    witness = Witness(LocalStorage(tmp_path), [RANGE], {})
    tally = [read_columns(witness, 0, 32) for _ in range(4)][-1]
    assert (tally.shared, tally.share, witness.is_right(RANGE)) == (len(DATA), 0, None)
    witness.recheck()
    assert witness.is_right(RANGE)


def test_the_same_zeros_twice_are_not_all_zeros(tmp_path: Path) -> None:
    """Neither zeros nor what was read twice change a checksum, so damage in these columns would be hidden."""
    zeros = Checksum("f", 0, len(DATA), zlib.crc32(bytes(len(DATA))), "the zeros")
    (tmp_path / "f").write_bytes(bytes(77) + b"\1" + bytes(len(DATA) - 78))
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


def test_a_file_that_ends_before_the_last_run(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(FILE[:-5])
    witness = Witness(LocalStorage(tmp_path), [RANGE], {})
    with pytest.raises(tx.TransaxleError, match="the file is truncated"):
        read_columns(witness, 96, 128)
    assert witness.tally(RANGE).shared == 0
