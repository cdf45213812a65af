"""`tx.convert(on=…)`: pools, executors of one's own, and what they do when workers fail."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import transaxle as tx
from tests import checkpoints
from tests.engine import killed
from tests.engine.killed import contents
from tests.forks import context
from transaxle.engine.distribute.executors import Pool, Work
from transaxle.engine.distribute.work_plan import WorkItem
from transaxle.errors import refuse

SMALL = {**checkpoints.SIZES, "num_hidden_layers": 1, "num_experts": 2}
HOW: dict[str, Any] = {"to": killed.TO, "shard_size": killed.SHARD_SIZE, "items": 5}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path / "source", checkpoints.tensors(SMALL), config={**checkpoints.CONFIG, **SMALL})


@pytest.fixture
def wanted(source: Path, tmp_path: Path) -> dict[str, bytes]:
    killed.convert(source, tmp_path / "wanted")
    found = contents(tmp_path / "wanted")
    killed.remove(tmp_path / "wanted")
    return found


class Backwards:
    """An executor of one's own: the last item first, in this process, and each of them twice."""

    def __init__(self, before: Callable[[int], None] = lambda _: None) -> None:
        self.before = before
        self.done: list[int] = []

    def run(self, work: Work, items: Sequence[WorkItem], take: Callable[[bytes], None]) -> None:
        for item in sorted(items, key=lambda item: -item.number):
            self.before(item.number)
            for _ in range(2):
                take(work(item.number))
            self.done.append(item.number)


def alone(target: Path) -> bool:
    """Tell whether nothing is beside a target but its source."""
    return {path.name for path in target.parent.iterdir()} <= {target.name, "source"}


def test_threads_processes_and_an_executor_of_ones_own(source: Path, wanted: dict[str, bytes], tmp_path: Path) -> None:
    target, progressed = tmp_path / "out", list[int]()
    with ThreadPoolExecutor(2) as threads, ProcessPoolExecutor(2, context()) as processes:
        for on in (threads, processes, Backwards()):
            progressed.clear()
            report = tx.convert(source, target, on=on, progress=progressed.append, **HOW)
            assert contents(target) == wanted
            assert sum(progressed) == sum(report.workers.values())
            assert alone(target)
            killed.remove(target)


def test_a_replaced_checkpoint_is_there_until_the_end(source: Path, wanted: dict[str, bytes], tmp_path: Path) -> None:
    target = checkpoints.tiny(tmp_path / "out")
    before = contents(target)
    with pytest.raises(tx.TransaxleError, match="already exists"):
        tx.convert(source, target, on=Backwards(), **HOW)

    def look(_: int) -> None:
        assert contents(target) == before

    tx.convert(source, target, on=Backwards(look), overwrite=True, **HOW)
    assert contents(target) == wanted
    assert alone(target)


def test_a_run_that_fails_leaves_nothing_or_what_resume_needs(
    source: Path, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    target = tmp_path / "out"

    def fail(number: int) -> None:
        if number == 1:
            raise refuse("IO", "the cable")

    with pytest.raises(tx.TransaxleError, match="the cable"):
        tx.convert(source, target, on=Backwards(fail), **HOW)
    assert alone(target)
    with pytest.raises(tx.TransaxleError, match="the cable"):
        tx.convert(source, target, on=Backwards(fail), resume=True, **HOW)
    assert not target.exists()
    following = Backwards()
    report = tx.convert(source, target, on=following, resume=True, **HOW)
    assert following.done == [1, 0]
    assert 0 < report.resumed < report.tensors
    assert contents(target) == wanted
    assert alone(target)
    again = Backwards()
    assert tx.convert(source, target, on=again, resume=True, **HOW).resumed == report.tensors
    assert again.done == []


class Flaky:
    """A pool whose workers meet errors of the machine, so many times for each item."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.calls: dict[int, int] = {}

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        number = args[-1]
        self.calls[number] = self.calls.get(number, 0) + 1
        future: Future[Any] = Future()
        if self.calls[number] <= self.times:
            future.set_exception(refuse("IO", "the cable"))
        else:
            future.set_result(fn(*args))
        return future


def test_an_item_that_fails_is_tried_again(source: Path, wanted: dict[str, bytes], tmp_path: Path) -> None:
    tx.convert(source, tmp_path / "out", on=(pool := Flaky(2)), **HOW)
    assert pool.calls == dict.fromkeys(range(5), 3)
    assert contents(tmp_path / "out") == wanted
    with pytest.raises(tx.TransaxleError, match="the cable"):
        tx.convert(source, tmp_path / "other", on=Flaky(3), **HOW)
    assert not (tmp_path / "other").exists()


def test_the_workers_of_a_pool_are_done_when_it_fails() -> None:
    """Whoever comes afterwards must not meet a worker that still writes."""
    busy = list[int]()

    def work(number: int) -> bytes:
        if not number:
            raise refuse("CORRUPT", "stop")
        busy.append(number)
        time.sleep(0.2)
        busy.remove(number)
        return b""

    with ThreadPoolExecutor(2) as threads, pytest.raises(tx.TransaxleError, match="stop"):
        Pool(threads).run(work, [WorkItem(number=number, nbytes=1) for number in (1, 0, 2, 3)], lambda _: None)
    assert busy == []


def test_a_result_that_is_damaged_on_its_way_is_refused(source: Path, tmp_path: Path) -> None:
    class Damaging(Backwards):
        def run(self, work: Work, items: Sequence[WorkItem], take: Callable[[bytes], None]) -> None:
            super().run(work, items, lambda text: take(text[:-1]))

    with pytest.raises(tx.TransaxleError, match="damaged on its way"):
        tx.convert(source, tmp_path / "out", on=Damaging(), **HOW)
    assert alone(tmp_path / "out")


def _wrong(source: Path) -> Iterator[tuple[type[Exception], str, dict[str, Any]]]:
    yield TypeError, "on must be", {"on": 3}
    yield TypeError, "items needs on", {"on": None}
    yield TypeError, "items must be", {"on": Backwards(), "items": "many"}
    yield ValueError, "items must be", {"on": Backwards(), "items": 0}
    yield tx.TransaxleError, "cannot convert on 'slurm'", {"on": "slurm"}
    yield tx.TransaxleError, "torchrun has not started this process", {"on": "torchrun"}
    if importlib.util.find_spec("ray") is None:
        yield tx.TransaxleError, "Ray is not installed", {"on": "ray"}


def test_what_cannot_be(source: Path, tmp_path: Path) -> None:
    for kind, text, options in _wrong(source):
        with pytest.raises(kind, match=text):
            tx.convert(source, tmp_path / "out", **{**HOW, **options})
    with tx.open(source) as checkpoint, pytest.raises(TypeError, match="on needs the path of src"):
        tx.convert(checkpoint, tmp_path / "out", on=Backwards(), **HOW)
    with pytest.raises(tx.TransaxleError, match="several workers cannot write to a service"):
        tx.convert(source, "memory://bucket/out", on=Backwards(), **HOW)
    assert alone(tmp_path / "out")
