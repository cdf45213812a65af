"""Every byte of an item is in one run, at its takers, made by those that hold it; batches keep to their bounds."""

from __future__ import annotations

from collections import Counter
from threading import Lock, get_ident
from time import sleep

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.move.filling import PlainFiles
from transaxle.engine.carry import file_queues, items_of
from transaxle.engine.plan.planned import PlannedTensor
from transaxle.formats.storage.copier import Bytes, scatter
from transaxle.move import mover as mover_module
from transaxle.move import workers as workers_module
from transaxle.move.mover import ItemRange, Movement, batches, divide_by_rank, pack_copies
from transaxle.move.transfer import NoExchange, Sink, Transfer
from transaxle.move.workers import Item, Limits

RANKS = (0, 1, 2)
WIDTH = 40


def _owner(file: str) -> int:
    return int(file)


def _items(sizes: list[int]) -> list[Item]:
    """Items made by one rank, by all in columns, or by any; some are padded at the end."""
    found = []
    for key, size in enumerate(sizes):
        rows, width = size // (3 * WIDTH), WIDTH
        columns = [Transfer(str(rank), 0, rank * width, width, ((rows, width, 3 * width),)) for rank in RANKS if rows]
        whole = [Transfer("1", 0, 0, size)] if size else []
        target_ranks = [(0,), RANKS, (), (1,), (1, 2)][key % 5]
        if key % 3 == 2 and target_ranks:
            found.append(Item(key, size, lambda whole=whole: whole, target_ranks, target_ranks))  # type: ignore[misc]
        else:
            found.append(Item(key, size, whole if key % 3 else columns, target_ranks))
    return found


SIZES = st.lists(st.integers(0, 5000), max_size=12)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"_OPEN": 2048, "_ROUND": 1024}.items():
        monkeypatch.setattr(mover_module, name, size)
    for name, size in {"RANGE_BYTES": 512, "_LONG_COPY": 256}.items():
        monkeypatch.setattr(workers_module, name, size)


def _batches(items: list[Item]) -> list[list[ItemRange]]:
    return list(batches(items, dict.fromkeys(RANKS, 0), _owner))


def test_every_byte_is_in_one_run_and_batches_keep_to_their_bounds() -> None:
    @given(SIZES)
    def holds(sizes: list[int]) -> None:
        items = _items(sizes)
        positions = {item.key: 0 for item in items}
        for batch in _batches(items):
            opened, sent, received = Counter[int](), Counter[int](), Counter[int]()
            for run in batch:
                assert run.start == positions[run.item.key] < run.stop
                positions[run.item.key] = run.stop
                assert run.target_ranks == run.item.target_ranks or (
                    not run.item.target_ranks and len(run.target_ranks) == 1
                )
                assert set(run.source_ranks) <= set(run.item.source_ranks or RANKS)
                opened.update(dict.fromkeys(run.target_ranks, run.size))
                for maker in run.source_ranks:
                    others = [rank for rank in run.target_ranks if rank != maker]
                    sent[maker] += run.sent_bytes(maker) * len(others)
                    received.update(dict.fromkeys(others, run.sent_bytes(maker)))
            assert len(batch) == 1 or max(opened.values()) <= 2048
            assert len(batch) == 1 or max([*sent.values(), *received.values(), 0]) <= 1024
        assert positions == {item.key: item.size for item in items}

    holds()


def test_work_goes_to_the_least_busy() -> None:
    items = [Item(0, 3000, list, RANKS, RANKS)]
    source_ranks = [run.source_ranks for batch in batches(items, {0: 0, 1: 5000, 2: 0}, _owner) for run in batch]
    assert source_ranks == [(0,), (2,), (0,), (2,), (0,), (2,)]


def test_a_queue_is_never_divided() -> None:
    mine, foreign = Transfer("0", 0, 0, 8), Transfer("1", 0, 0, 8)
    items = [
        Item(0, 8, [mine], (0,), queue="a"),
        Item(1, 8, [foreign], (0,), queue="a"),
        Item(2, 8, [foreign], (1,)),
        Item(3, 0, [], (2,)),
        Item(4, 8, [mine]),
    ]
    own, others = divide_by_rank(items, _owner)
    assert {rank: [[item.key for item in queue] for queue in queues] for rank, queues in own.items()} == {
        1: [[2]],
        2: [[3]],
    }
    assert [item.key for item in others] == [0, 1, 4]


def test_what_is_packed_is_spread_again() -> None:
    source = np.arange(200, dtype=np.uint8)
    parts = [Transfer("0", 10, 3, 2, ((3, 7, 4), (2, 30, 20))), Transfer("0", 0, 60, 5)]
    straight, spread, pack = (np.zeros(100, np.uint8) for _ in range(3))
    for part, (packing, spreading) in zip(parts, pack_copies(parts), strict=True):
        scatter(source[part.source :], straight, part.target, part.width, part.loops)
        scatter(source[packing.source :], pack, packing.target, packing.width, packing.loops)
        scatter(pack[spreading.source :], spread, spreading.target, spreading.width, spreading.loops)
    assert np.array_equal(spread, straight)
    assert straight.any()


class _Files(PlainFiles):
    def __init__(self, content: bytes) -> None:
        self._content = np.frombuffer(content, np.uint8)

    def read_into(self, _name: str, offset: int, view: memoryview) -> None:
        view[:] = self._content[offset : offset + len(view)].data


class _Lending(_Files):
    def lend(self, _name: str, offset: int, size: int) -> Bytes:
        return self._content[offset : offset + size]

    def owner(self, name: str) -> int:
        return int(name)


class _Taken(Sink):
    """Keeps what it is given, in memory of its own or not."""

    def __init__(self, sizes: list[int], *, rooms: bool) -> None:
        self.ordered = not rooms
        self._rooms = rooms
        self.out = [np.full(size, 77, np.uint8) for size in sizes]
        self.counts = [0] * len(sizes)
        self.ended: list[int] = []

    def buffer(self, key: int, start: int, stop: int) -> Bytes | None:
        return self.out[key][start:stop] if self._rooms else None

    def mark_filled(self, key: int, start: int, stop: int) -> None:
        self.counts[key] += stop - start

    def take(self, key: int, start: int, data: memoryview) -> None:
        assert self.counts[key] == start, "out of order"
        self.out[key][start : start + len(data)] = np.frombuffer(data, np.uint8)
        self.counts[key] += len(data)

    def end(self, key: int) -> None:
        self.ended.append(key)


@pytest.mark.parametrize("rooms", [False, True])
@pytest.mark.parametrize("lending", [False, True])
@pytest.mark.parametrize("jobs", [1, 3])
def test_items_are_moved_from_any_source_to_any_sink(rooms: bool, lending: bool, jobs: int) -> None:
    content = np.random.default_rng(3).integers(0, 256, 6000, np.uint8)
    source = _Lending(content.tobytes()) if lending else _Files(content.tobytes())
    strided = Transfer("0", 5, 2, 3, ((40, 11, 7),))
    made_of = [[Transfer("0", 100, 0, 5000)], [strided], [], [], [Transfer("0", 7, 10, 20)]]
    sizes = [5000, 300, 0, 9, 30]
    sink = _Taken(sizes, rooms=rooms)
    items = [Item(key, size, parts, (0,)) for key, (size, parts) in enumerate(zip(sizes, made_of, strict=True))]
    assert Movement(items, source, sink, Limits(jobs, 8 << 20)).run() == 0
    expected = [np.zeros(size, np.uint8) for size in sizes]
    expected[0][:] = content[100:5100]
    for row in range(40):
        expected[1][2 + 7 * row :][:3] = content[5 + 11 * row :][:3]
    expected[4][10:] = content[7:27]
    assert all(np.array_equal(out, truth) for out, truth in zip(sink.out, expected, strict=True))
    assert sink.counts == sizes
    assert rooms or sorted(sink.ended) == list(range(5))


class _InSpans(_Taken):
    """Takes spans of an item from several threads, each in order."""

    span = 1 << 20

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sizes, rooms=False)
        self.threads: set[int] = set()
        self._reached: dict[tuple[int, int], int] = {}
        self._lock = Lock()

    def take(self, key: int, start: int, data: memoryview) -> None:
        self.threads.add(get_ident())
        sleep(0.001 * ((start >> 20) % 3))
        number, inside = divmod(start, self.span)
        assert self._reached.get((key, number), 0) == inside, "out of order"
        assert inside + len(data) <= self.span, "beyond its span"
        self._reached[key, number] = inside + len(data)
        self.out[key][start : start + len(data)] = np.frombuffer(data, np.uint8)
        with self._lock:
            self.counts[key] += len(data)

    def end(self, key: int) -> None:
        assert self.counts[key] == len(self.out[key]), "not all of it is there"
        super().end(key)


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_the_spans_of_a_large_item_are_moved_by_several_workers(jobs: int) -> None:
    size = (35 << 20) + 5
    content = np.random.default_rng(3).integers(0, 256, size, np.uint8)
    sink = _InSpans([size - 1, 10])
    items = [Item(key, count, [Transfer("0", key, 0, count)], (0,)) for key, count in enumerate((size - 1, 10))]
    assert Movement(items, _Files(content.tobytes()), sink, Limits(jobs, 16 << 20)).run() == 0
    assert np.array_equal(sink.out[0], content[: size - 1])
    assert np.array_equal(sink.out[1], content[1:11])
    assert sorted(sink.ended) == [0, 1]
    assert len(sink.threads) == jobs


def test_an_error_in_one_span_ends_the_others() -> None:
    class Broken(_InSpans):
        def take(self, key: int, start: int, data: memoryview) -> None:
            if start == 3 << 20:
                raise OSError("broken")
            super().take(key, start, data)

    size = 40 << 20
    items = [Item(0, size, [Transfer("0", 0, 0, size)], (0,))]
    sink = Broken([size])
    with pytest.raises(OSError, match="broken"):
        Movement(items, _Files(bytes(size)), sink, Limits(4, 16 << 20)).run()
    assert sink.ended == []


# Queues: where files are written in order, each has one, and its tensors are in it in order.


def planned(name: str, *files: str) -> PlannedTensor:
    places = tuple(Transfer(file, 0, 0, 1) for file in files)
    return PlannedTensor(name, "U8", (len(files),), places, len(files), "", ())


def portions(tensors: list[PlannedTensor], *, ordered: bool) -> list[list[str]]:
    """What one worker does from beginning to end, by name."""
    own, others = divide_by_rank(items_of(tensors, {}, {}, ordered=ordered), lambda _: NoExchange.rank)
    assert not others
    return [[tensors[item.key].name for item in queue] for queue in own.get(NoExchange.rank, [])]


@given(st.lists(st.lists(st.sampled_from("abcdef"), max_size=3), max_size=12))
def test_every_file_has_one_queue(files: list[list[str]]) -> None:
    tensors = [planned(str(i), *names) for i, names in enumerate(files)]
    assert portions(tensors, ordered=False) == [[tensor.name] for tensor in tensors]
    queues = file_queues(tensors)
    for file in "abcdef":
        assert len({queue for queue, names in zip(queues, files, strict=True) if file in names}) <= 1
    found = portions(tensors, ordered=True)
    assert all(numbers == sorted(numbers, key=int) for numbers in found)
    assert sorted((name for numbers in found for name in numbers), key=int) == [tensor.name for tensor in tensors]


def test_files_that_share_nothing_stay_apart() -> None:
    tensors = [planned("0", "a"), planned("1", "b"), planned("2", "a"), planned("3", "b", "c"), planned("4", "c")]
    assert portions(tensors, ordered=True) == [["0", "2"], ["1", "3", "4"]]
