"""Batches of steps: files end up as if each step had been done by itself, by whichever way it is done."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import transaxle as tx
from tests.checkpoints import write
from tests.engine.killed import one_by_one
from transaxle.engine.duplicates import Pair, TensorPair
from transaxle.errors import Refused
from transaxle.formats.catalog import Checksum
from transaxle.formats.checksums import Witness
from transaxle.formats.storage import copier
from transaxle.formats.storage.local import LocalStorage
from transaxle.formats.storage.storage import InMemoryFile, Storage, VirtualFiles
from transaxle.formats.store.staging import Writer
from transaxle.move import workers
from transaxle.move.journal import HashingFiles
from transaxle.move.mover import Movement
from transaxle.move.transfer import Transfer
from transaxle.move.workers import Item, Limits, Worker

SIZE = 60_000
DATA = {f"{number}.bin": np.random.default_rng(number).integers(1, 256, SIZE, np.uint8) for number in range(3)}
COMPILED = copier.load_steps()
SMALL = Limits(1, 6 << 16)


def halting(steps: int, stop: int, first: int) -> int:
    """The compiled function, which stops at every third step."""
    assert COMPILED is not None
    return COMPILED(steps, min(stop, first - first % 3 + 2), first)


WAYS: dict[str, Callable[..., int] | None] = {"none": None, "again": one_by_one()}
WAYS |= {} if COMPILED is None else {"compiled": COMPILED, "halting": halting}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way of carrying steps out in turn; `none`: there are no batches."""
    monkeypatch.setattr(copier, "load_steps", lambda: WAYS[request.param])
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("files")
    for name, data in DATA.items():
        (found / name).write_bytes(data.tobytes())
    return found


@pytest.fixture
def storage(folder: Path) -> Iterator[LocalStorage]:
    found = LocalStorage(folder)
    yield found
    found.close()


def moved(
    storage: Storage,
    target: Path,
    made: Sequence[tuple[int, Sequence[Transfer]]],
    limit: Limits = SMALL,
    span: int | None = None,
    at_once: Collection[int] = (),
) -> tuple[list[bytes], dict[int, str]]:
    """Move items, each into a file of its own, some of them block by block; return the files and the hashes."""
    target.mkdir(exist_ok=True)
    for key, (size, _) in enumerate(made):
        (target / str(key)).write_bytes(b"\x07" * size)
    writer = Writer(target, sync=False)
    places = [[Transfer(str(key), 0, 0, size)] for key, (size, _) in enumerate(made)]
    told: list[int] = []
    sink = HashingFiles(writer, places, range(len(made)), told.append, span_size=span)

    def blocks(key: int) -> Callable[[Worker], Iterator[memoryview]] | None:
        size, parts = made[key]
        return (lambda worker: worker.blocks(parts, size)) if key in at_once else None

    items = [Item(key, size, parts, (0,), (0,), None, blocks(key)) for key, (size, parts) in enumerate(made)]
    try:
        Movement(items, storage, sink, limit).move_local()
    finally:
        writer.close()
    assert sum(told) == sum(size for size, _ in made)
    return [(target / str(key)).read_bytes() for key in range(len(made))], sink.digests


def matrix(file: str, at: int, rows: int, columns: int, item: int, *, turned: bool) -> tuple[Transfer, np.ndarray]:
    """Return the copy of a matrix, transposed or with a gap behind each row, and what it gives."""
    held = DATA[file][at : at + rows * columns * item].reshape(rows, columns, item)
    if turned:
        turns = ((columns, item, rows * item), (rows, columns * item, item))
        return Transfer(file, at, 0, item, turns), held.transpose(1, 0, 2).reshape(-1)
    kept = max(1, columns // 2)
    return Transfer(file, at, 0, kept * item, ((rows, columns * item, kept * item),)), held[:, :kept].reshape(-1)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[int, list[Transfer], bytes]:
    """A tensor of parts one after another: ranges, rows out of a matrix, transposed matrices, and padding."""
    parts: list[Transfer] = []
    content: list[bytes] = []
    at = 0
    for kind in draw(st.lists(st.sampled_from(["range", "rows", "turned", "padding"]), max_size=5)):
        file = draw(st.sampled_from(sorted(DATA)))
        if kind == "padding":
            content.append(bytes(draw(st.integers(1, 100))))
        elif kind == "range":
            begin, size = draw(st.integers(0, SIZE - 1)), draw(st.integers(1, SIZE))
            part = Transfer(file, begin, at, min(size, SIZE - begin))
            parts.append(part)
            content.append(DATA[file][begin : begin + part.width].tobytes())
        else:
            item = draw(st.sampled_from([1, 2, 4, 8, 24]))
            rows, columns = draw(st.integers(2, 40)), draw(st.integers(2, 40))
            begin = draw(st.integers(0, SIZE - rows * columns * item))
            part, values = matrix(file, begin, rows, columns, item, turned=kind == "turned")
            parts.append(Transfer(file, part.source, at, part.width, part.loops))
            content.append(values.tobytes())
        at = sum(map(len, content))
    return at, parts, b"".join(content)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    made=st.lists(tensors(), min_size=1, max_size=4),
    batch=st.sampled_from([1, 50_000, 1 << 25]),
    at_once=st.sets(st.integers(0, 3)),
)
def test_what_is_noted_is_what_is_done(
    way: str,
    storage: LocalStorage,
    tmp_path: Path,
    made: list[tuple[int, list[Transfer], bytes]],
    batch: int,
    at_once: set[int],
) -> None:
    """Beside what is not noted, as is a tensor that is encoded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "_BATCH", batch)
        files, digests = moved(storage, tmp_path / way, [(size, parts) for size, parts, _ in made], at_once=at_once)
    assert files == [content for *_, content in made]
    assert digests == {key: xxhash.xxh3_128_hexdigest(content) for key, (*_, content) in enumerate(made)}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    made=st.lists(tensors(), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    flips=st.lists(st.floats(0, 1, exclude_max=True), max_size=4),
    batch=st.sampled_from([1, 50_000, 1 << 25]),
)
def test_tensors_differ_where_a_byte_does(
    way: str, storage: LocalStorage, made: list[tuple[int, list[Transfer], bytes]], seed: int, flips: list[float],
    batch: int,
) -> None:  # fmt: skip
    assert way in WAYS
    contents = [bytearray(content) for *_, content in made]
    for content, place in zip(contents, flips, strict=False):
        if content and seed % 3:
            content[int(place * len(content))] ^= 1 << seed % 8
    held = {str(number): InMemoryFile(bytes(content)) for number, content in enumerate(contents)}
    pairs = [
        TensorPair(number, parts, [Transfer(str(number), 0, 0, size)] if size else [], size)
        for number, (size, parts, _) in enumerate(made)
    ]
    told: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "_BATCH", batch)
        pair = Pair(storage, VirtualFiles(storage, held), SMALL, threading.Event())
        differing = pair.find_different(pairs, told.append)
    assert differing == {number for number, (*_, content) in enumerate(made) if content != contents[number]}
    assert differing or sum(told) == sum(size for size, *_ in made)


@pytest.mark.parametrize("flipped", [False, True])
def test_checksums_are_taken_on_the_way(way: str, tmp_path: Path, flipped: bool) -> None:
    data = DATA["1.bin"].copy()
    sums = [
        Checksum("f", at, 20_000, zlib.crc32(data[at : at + 20_000].tobytes()), f"record {at}")
        for at in (0, 20_000, 40_000)
    ]
    if flipped:
        data[31_000] ^= 1
    (tmp_path / "f").write_bytes(data.tobytes())
    below = LocalStorage(tmp_path)
    witness = Witness(below, sums, {})
    parts = [Transfer("f", 40_000, 0, 20_000), Transfer("f", 100, 20_000, 39_000)]
    files, _ = moved(witness, tmp_path / "out", [(59_000, parts)])
    assert files == [data[40_000:].tobytes() + data[100:39_100].tobytes()]
    assert witness.is_right(sums[2])
    assert witness.tally(sums[0]).parts == [(100, 20_000, zlib.crc32(data[100:20_000].tobytes()))], way
    if flipped:
        with pytest.raises(Refused, match="record 20000"):
            witness.recheck()
    else:
        witness.recheck()
        assert all(witness.is_right(each) for each in sums)
    below.close()


@pytest.mark.parametrize("flipped", [None, 0, 300_000, 700_000])
def test_long_ranges_are_summed_while_they_are_read(way: str, tmp_path: Path, flipped: int | None) -> None:
    """With plain bytes before and behind them, and with bytes before them that were summed already."""
    assert way in WAYS
    data = np.random.default_rng(7).integers(0, 256, 700_100, np.uint8)
    checksum = Checksum("f", 20, 700_001, zlib.crc32(data[20:700_021].tobytes()), "record")
    if flipped is not None:
        data[20 + flipped] ^= 0x80
    (tmp_path / "f").write_bytes(data.tobytes())
    below = LocalStorage(tmp_path)
    for begin in (20, 350_000):
        witness = Witness(below, [checksum], {})
        if begin > 20:
            witness.read("f", 0, begin)
        files, _ = moved(witness, tmp_path / f"out{begin}", [(700_100, [Transfer("f", 0, 0, 700_100)])])
        assert files == [data.tobytes()]
        assert witness.is_right(checksum) is (flipped is None)
    short = Checksum("f", 20, 800_000, 0, "a record that ends too late")
    with pytest.raises(Refused, match="it ends at 700100"):
        Witness(below, [short], {}).check_rest([short])
    below.close()


def test_a_step_that_fails_says_what_is_wrong_and_ends_no_item(way: str, storage: LocalStorage, tmp_path: Path) -> None:
    assert way in WAYS
    target = tmp_path / "out"
    target.mkdir()
    for key in range(2):
        (target / str(key)).write_bytes(bytes(100))
    writer = Writer(target, sync=False)
    ended: dict[int, str] = {}
    places = [[Transfer(str(key), 0, 0, 100)] for key in range(2)]
    sink = HashingFiles(writer, places, (0, 1), finish=ended.__setitem__)
    made = [Transfer("1.bin", 0, 0, 100), Transfer("0.bin", SIZE - 50, 0, 100)]
    items = [Item(key, 100, [each], (0,), (0,)) for key, each in enumerate(made)]
    with pytest.raises(Refused, match=f"it ends at {SIZE}") as caught:
        Movement(items, storage, sink, SMALL).run()
    assert caught.value.where.file == "0.bin"
    assert ended == {0: xxhash.xxh3_128_hexdigest(DATA["1.bin"][:100].tobytes())}, "what came before it is there"
    writer.close()


def opened_in(folder: Path) -> list[str]:
    """Names of the files below a folder that this process has open."""
    links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]  # noqa: PTH115
    return [link for link in links if link.startswith(str(folder))]


CALLS: dict[str, Callable[[Path], object]] = {
    "convert": lambda folder: tx.convert(folder / "a", folder / "b", to="dcp:identity", jobs=1),
    "diff": lambda folder: tx.diff(folder / "a", folder / "a", jobs=1),
}


@pytest.mark.parametrize("name", CALLS)
def test_interruptions_close_all_files(name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unfinished file that stays open keeps its room on the disk, although it is deleted."""
    write(tmp_path / "a", {f"w{number}": np.zeros(100_000, np.float32) for number in range(9)})
    calls = iter(range(100))
    going_on = workers.Worker.check_stop

    def check_stop(worker: workers.Worker) -> None:
        if next(calls) == 5:
            raise KeyboardInterrupt
        going_on(worker)

    monkeypatch.setattr(workers.Worker, "check_stop", check_stop)
    with pytest.raises(KeyboardInterrupt) as raised:
        CALLS[name](tmp_path)
    assert raised.tb is not None  # holds the frames, and all that is in them
    assert opened_in(tmp_path) == []
