"""Strided reads: every run is the slice of the file that it is said to be, by whichever way it is read."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.move.filling import read_runs
from transaxle.axes.geometry import Loop
from transaxle.errors import Refused, StorageError
from transaxle.formats.catalog import NUMBERS, NumbersInMemory
from transaxle.formats.storage import copier
from transaxle.formats.storage.copier import Bytes, scatter
from transaxle.formats.storage.local import LocalStorage
from transaxle.formats.storage.storage import VirtualFiles

FILE, MADE = "a.bin", "made"
DATA = np.random.default_rng(0).integers(1, 256, 1 << 16, np.uint8).tobytes()
"""No byte is 0: what no run writes stays 0."""
COMPILED = copier.load_steps()
compilers = [path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))]
needs_loop = pytest.mark.skipif(COMPILED is None, reason="the loop is not built here")


def again(*said: int) -> int:
    """The loop as it is where nothing can be read whole."""
    return said[-1]


WAYS: dict[str, Callable[..., int] | None] = {"plain": None, "again": again}
WAYS |= {} if COMPILED is None else {"compiled": COMPILED}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way of reading in turn."""
    monkeypatch.setattr(copier, "load_steps", lambda: WAYS[request.param])


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[LocalStorage]:
    tmp_path.joinpath(FILE).write_bytes(DATA)
    found = LocalStorage(tmp_path)
    yield found
    found.close()


def places(loops: Sequence[Loop]) -> list[tuple[int, int]]:
    """Where each run begins on both sides, by walking over the indices."""
    found = []
    for index in product(*(range(count) for count, _, _ in loops)):
        pairs = list(zip(index, loops, strict=True))
        found.append((sum(i * step for i, (_, step, _) in pairs), sum(i * into for i, (_, _, into) in pairs)))
    return found


def expected(data: bytes, offset: int, size: int, width: int, loops: Sequence[Loop]) -> bytes:
    out = bytearray(size)
    for source, target in places(loops):
        out[target : target + width] = data[offset + source : offset + source + width]
    return bytes(out)


@st.composite
def copies(draw: st.DrawFn) -> tuple[int, int, list[Loop]]:
    """Offset, width and loops of runs in any order in the file, side by side or apart in memory."""
    width = draw(st.sampled_from([0, 1, 2, 3, 7, 64, 129]))
    counts = draw(st.lists(st.integers(0, 6), max_size=3))
    span, loops = max(width, 1), []
    for count in reversed(counts):
        into = span + draw(st.integers(0, 5))
        loops.append((count, draw(st.integers(0, 900)), into))
        span = max(count - 1, 0) * into + span
    return draw(st.integers(0, 333)), width, loops[::-1]


@given(copies())
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_run_is_its_slice(way: None, storage: LocalStorage, copy: tuple[int, int, list[Loop]]) -> None:
    offset, width, loops = copy
    size = max((target + width for _, target in places(loops)), default=0) + 3
    out = bytearray(size)
    read_runs(storage, FILE, offset, memoryview(out), width, loops)
    assert bytes(out) == expected(DATA, offset, size, width, loops)


def test_beyond_two_gigabytes(way: None, tmp_path: Path) -> None:
    """The file is sparse."""
    base, step = (2 << 30) - 3, 1 << 30
    with tmp_path.joinpath("long").open("wb") as file:
        for row in range(3):
            file.seek(base + row * step)
            file.write(DATA[row * 10 : row * 10 + 10])
    out = bytearray(18)
    read_runs(LocalStorage(tmp_path), "long", base + 2, memoryview(out), 6, [(3, step, 6)])
    assert bytes(out) == b"".join(DATA[row * 10 + 2 : row * 10 + 8] for row in range(3))


def test_a_file_that_ends_inside_a_run_is_named(way: None, storage: LocalStorage) -> None:
    """The runs before the end are in place, and the message says which bytes are lacking."""
    out = bytearray(4 * 16)
    with pytest.raises(Refused, match="truncated") as caught:
        read_runs(storage, FILE, len(DATA) - 150, memoryview(out), 16, [(4, 47, 16)])
    assert (caught.value.code, caught.value.where.file) == ("CORRUPT", FILE)
    assert f"bytes {len(DATA) - 9} to {len(DATA) + 7}" in str(caught.value)
    assert f"ends at {len(DATA)}" in str(caught.value)
    assert out[:48] == expected(DATA, len(DATA) - 150, 48, 16, [(3, 47, 16)])


def test_a_failing_disk_is_named(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled loop only says which run it did not read; the ordinary way says why."""

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(copier, "load_steps", lambda: again)
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StorageError) as caught:
        read_runs(storage, FILE, 10, memoryview(bytearray(8)), 4, [(2, 100, 4)])
    assert (caught.value.code, caught.value.where.file) == ("IO", FILE)
    assert "offset 10" in str(caught.value)


@pytest.mark.parametrize(("size", "loops"), [(63, [(4, 100, 16)]), (64, [(4, 100, 17)]), (99, [(2, 9, -16)])])
def test_no_run_leaves_the_view(way: None, storage: LocalStorage, size: int, loops: list[Loop]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        read_runs(storage, FILE, 0, memoryview(bytearray(size)), 16, loops)


class Made:
    """A file that counts upwards."""

    nbytes = 1000

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def read_into(self, offset: int, view: memoryview) -> None:
        self.asked.append((offset, view.nbytes))
        view[:] = bytes((offset + i) % 251 for i in range(view.nbytes))


def test_what_stands_beside_files_is_asked_for_each_run(storage: LocalStorage) -> None:
    made = Made()
    both = NumbersInMemory(VirtualFiles(storage, {MADE: made}))
    numbers = both.add(b"0123456789")
    assert numbers.offset == 0
    out = bytearray(12)
    for name, data in ((MADE, bytes(i % 251 for i in range(1000))), (FILE, DATA), (NUMBERS, b"0123456789")):
        offset = 0 if name == NUMBERS else 40
        read_runs(both, name, offset, memoryview(out), 3, [(2, 5, 6), (2, 1, 3)])
        assert bytes(out) == expected(data, offset, 12, 3, [(2, 5, 6), (2, 1, 3)])
    assert made.asked == [(40, 3), (41, 3), (45, 3), (46, 3)]


@needs_loop
def test_files_beside_made_ones_are_read_in_one_call(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run goes through `preadv` of Python."""
    monkeypatch.delattr(os, "preadv")
    loops = [(3, 2000, 700), (7, 200, 100)]
    out = bytearray(2100)
    read_runs(NumbersInMemory(VirtualFiles(storage, {MADE: Made()})), FILE, 1, memoryview(out), 100, loops)
    assert bytes(out) == expected(DATA, 1, prod(count for count, _, _ in loops) * 100, 100, loops)


@needs_loop
def test_a_loop_of_another_source_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changed = tmp_path / copier.SOURCE.name
    changed.write_bytes(copier.SOURCE.read_bytes() + b"\n")
    false = tmp_path / copier.LIBRARY.name
    false.write_bytes(b"\x7fELF")
    load = copier.load_steps.__wrapped__
    assert load() is not None
    with monkeypatch.context() as patch:
        patch.setattr(copier, "SOURCE", changed)
        assert load() is None
    monkeypatch.setattr(copier, "LIBRARY", false)
    assert load() is None


@pytest.mark.skipif(not compilers, reason="no C compiler")
def test_the_loop_compiles_without_a_warning() -> None:
    strict = ["-std=c11", "-Wall", "-Wextra", "-Wconversion", "-Wno-sign-conversion", "-pedantic", "-Werror"]
    command = [compilers[0], *strict, "-fsyntax-only", "-DSTAMP=1u", str(copier.SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


needs_transpose = pytest.mark.skipif(COMPILED is None, reason="the transpose is not built here")
SIDES = [(8, 8), (31, 33), (32, 32), (32, 64), (64, 40), (65, 70)]


def copied_by_index(held: Bytes, size: int, at: int, width: int, loops: Sequence[Loop]) -> Bytes:
    """Copy every byte from its own index to its own."""
    sources, targets = np.zeros((), np.intp), np.full((), at, np.intp)
    for count, step, into in (*loops, (width, 1, 1)):
        sources = sources[..., None] + np.arange(count) * step
        targets = targets[..., None] + np.arange(count) * into
    out = np.zeros(size, np.uint8)
    out[targets] = held[sources]
    return out


@needs_transpose
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize(("rows", "columns"), SIDES)
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("around", [(), (2, 3)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_transpose_moves_every_element(
    width: int, rows: int, columns: int, gap: int, around: tuple[int, ...], turned: bool
) -> None:
    step, into = (columns + gap) * width, (rows + 2 * gap) * width
    loops = [(columns, width, into), (rows, step, width)]
    source_end, target_end = rows * step, columns * into
    for count in around:
        loops.insert(0, (count, source_end, target_end + gap))
        source_end, target_end = source_end * count, (target_end + gap) * count
    if turned:
        loops.reverse()
    held = np.random.default_rng(rows).integers(1, 256, source_end, np.uint8)
    out = np.zeros(target_end + 5, np.uint8)
    assert copier._encode_scatter(held, out, 5, width, loops)[0] == copier._TRANSPOSE
    scatter(held, out, 5, width, loops)
    assert np.array_equal(out, copied_by_index(held, len(out), 5, width, loops))


def test_without_the_transpose_numpy_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    held = np.random.default_rng(1).integers(1, 256, 4 * 40 * 50, np.uint8)
    loops = ((50, 4, 4 * 40), (40, 4 * 50, 4))
    built, plain = np.zeros(len(held), np.uint8), np.zeros(len(held), np.uint8)
    scatter(held, built, 0, 4, loops)
    monkeypatch.setattr(copier, "load_steps", lambda: None)
    scatter(held, plain, 0, 4, loops)
    expected = np.ascontiguousarray(held.view(np.uint32).reshape(40, 50).T)
    assert built.tobytes() == plain.tobytes() == expected.tobytes()
