"""Reads of runs and ranges return the right slices of files, in every way of reading; CRC-32 is that of zlib."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.formats.refusals import refuses
from tests.move.filling import read_runs
from transaxle.axes.geometry import Loop
from transaxle.formats import checksums
from transaxle.formats.catalog import NumbersInMemory
from transaxle.formats.checksums import crc32
from transaxle.formats.storage import copier
from transaxle.formats.storage.copier import Bytes, Steps, scatter
from transaxle.formats.storage.local import LocalStorage
from transaxle.formats.storage.storage import InMemoryFile, NearReads, Storage, SubFolder, VirtualFiles

FILE = "a.bin"
DATA = np.random.default_rng(0).integers(1, 256, 1 << 16, np.uint8).tobytes()
"""No byte is 0: what no run writes stays 0."""
COMPILED = copier.load_steps()
compilers = [path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))]
needs_loop = pytest.mark.skipif(COMPILED is None, reason="the loop is not built here")


def again(*said: int) -> int:
    """The loop as it is where nothing can be read whole."""
    return said[-1]


def halting(steps: int, stop: int, first: int) -> int:
    """The compiled loop, which stops at every third step."""
    assert COMPILED is not None
    return COMPILED(steps, min(stop, first - first % 3 + 2), first)


WAYS: dict[str, Callable[..., int] | None] = {"plain": None, "again": again}
WAYS |= {} if COMPILED is None else {"compiled": COMPILED, "halting": halting}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with refuses(
        "CORRUPT", "truncated", f"bytes {len(DATA) - 9} to {len(DATA) + 7}", f"ends at {len(DATA)}", file=FILE
    ):
        read_runs(storage, FILE, len(DATA) - 150, memoryview(out), 16, [(4, 47, 16)])
    assert out[:48] == expected(DATA, len(DATA) - 150, 48, 16, [(3, 47, 16)])


@pytest.mark.parametrize(("size", "loops"), [(63, [(4, 100, 16)]), (64, [(4, 100, 17)]), (99, [(2, 9, -16)])])
def test_no_run_leaves_the_view(way: None, storage: LocalStorage, size: int, loops: list[Loop]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        read_runs(storage, FILE, 0, memoryview(bytearray(size)), 16, loops)


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


# Ranges of several files, read together.

FILES = {f"{number}.bin": os.urandom(5000) for number in range(3)}


@pytest.fixture
def three_files(tmp_path: Path) -> Iterator[LocalStorage]:
    (tmp_path / "sub").mkdir()
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
        (tmp_path / "sub" / name).write_bytes(data[::-1])
    found = LocalStorage(tmp_path)
    yield found
    found.close()


def read_together(three_files: Storage, places: list[tuple[str, int, int]]) -> list[bytes]:
    """Read ranges next to each other into one buffer of 7s, and check that nothing else was written."""
    room = np.full(sum(size for *_, size in places) + 2, 7, np.uint8)
    at, ranges = 1, list[tuple[str, int, memoryview]]()
    for name, offset, size in places:
        ranges.append((name, offset, room.data[at : at + size]))
        at += size
    with Steps() as steps:
        for name, offset, view in ranges:
            three_files.add_read(steps, name, offset, view)
        steps.run()
    assert room[0] == room[-1] == 7
    return [bytes(view) for *_, view in ranges]


@pytest.mark.usefixtures("way")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([*FILES]), st.integers(0, 4000), st.integers(0, 1000)), max_size=12),
    st.sampled_from([1, 12]),
)
def test_every_range_is_a_slice(three_files: LocalStorage, places: list[tuple[str, int, int]], times: int) -> None:
    places = places * times  # more than are read in one call
    expected = [FILES[name][at : at + size] for name, at, size in places]
    assert read_together(three_files, places) == expected
    of_folder = SubFolder(three_files, "sub")
    assert read_together(of_folder, places) == [FILES[name][::-1][at : at + size] for name, at, size in places]
    more = VirtualFiles(NumbersInMemory(three_files), {"made": InMemoryFile(b"12345678")})
    assert read_together(more, places) == expected
    assert read_together(more, [*places, ("made", 2, 3)]) == [*expected, b"345"]


@pytest.mark.usefixtures("way")
def test_a_truncated_file_is_an_error_that_names_it(three_files: LocalStorage) -> None:
    with refuses("CORRUPT", "truncated", file="1.bin"):
        read_together(three_files, [("0.bin", 0, 10), ("1.bin", 4990, 11), ("2.bin", 0, 10)])


# Reading ahead: the same bytes in fewer calls.

SIZE = 1 << 18


class _Counted(LocalStorage):
    asked = 0
    calls = 0

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        self.asked += view.nbytes
        self.calls += 1
        super().read_into(name, offset, view)


@pytest.fixture
def counted(tmp_path: Path) -> _Counted:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(random.Random(name).randbytes(SIZE))
    return _Counted(tmp_path)


@pytest.mark.parametrize("seed", range(4))
def test_any_reads_give_the_bytes_of_the_file(counted: _Counted, seed: int) -> None:
    choice = random.Random(seed)
    ahead, at = NearReads(counted), 0
    for _ in range(300):
        name = choice.choice("aab")
        count = choice.choice((0, 1, 7, 900, 20_000, 70_000))
        at = choice.choice((at, at + 64, at + 3_000, at - 500, choice.randrange(SIZE)))
        at = max(0, min(at, SIZE - count))
        assert ahead.read(name, at, count) == counted.read(name, at, count)
        at += count


def test_near_reads_are_few_calls(counted: _Counted) -> None:
    ahead = NearReads(counted)
    for at in range(0, SIZE, 1024):
        ahead.read("a", at, 200)
    assert counted.calls < 15
    assert counted.asked <= SIZE + 10 * 200


def test_nothing_is_read_between_what_lies_apart(counted: _Counted) -> None:
    ahead = NearReads(counted)
    for at in range(40_000, SIZE, 40_000):  # the end of one archive, and the head of the next
        ahead.read("a", at - 500, 500)
        ahead.read("a", at, 1000)
    assert counted.asked == 1500 * counted.calls // 2


# CRC-32.

NOISE = np.random.default_rng(0).integers(0, 256, 1 << 17, np.uint8).tobytes()
COMPILED_CRC = checksums.load_crc32()
CHECK = 0xCBF43926
"""What every CRC-32 gives for the digits from 1 to 9."""


@given(
    st.integers(0, 70), st.one_of(st.integers(0, 200), st.integers(4000, 4400), st.integers(0, 120_000)),
    st.sampled_from([0, 1, 0xFFFFFFFF, 0x80000000]) | st.integers(0, 0xFFFFFFFF),
)  # fmt: skip
def test_the_crc_is_that_of_zlib(start: int, size: int, before: int) -> None:
    data = memoryview(NOISE)[start : start + size]
    assert crc32(data, before) == zlib.crc32(data, before)


@pytest.mark.skipif(COMPILED_CRC is None, reason="it is not built here")
@pytest.mark.parametrize(
    "size", [0, 15, 16, 63, 64, 65, 79, 80, 127, 128, 143, 255, 256, 257, 271, 272, 511, 512, 528, 799, 4096]
)
@pytest.mark.parametrize("fill", [0, 0xFF, None])
def test_short_and_uniform_bytes_are_summed_by_the_compiled_loop_too(
    size: int, fill: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "_MIN_BYTES", 0)
    data = NOISE[:size] if fill is None else bytes([fill]) * size
    assert crc32(memoryview(data)) == zlib.crc32(data)


def test_without_a_compiler_zlib_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    assert crc32(memoryview(b"123456789")) == CHECK
    monkeypatch.setattr(checksums, "load_crc32", lambda: None)
    assert crc32(memoryview(NOISE), 7) == zlib.crc32(NOISE, 7)
