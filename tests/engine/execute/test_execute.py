"""Executing plans: complete or not at all, whatever happens meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import transaxle as tx
from tests import checkpoints
from tests.engine import demand_refusal, killed
from tests.engine.counting import Before, counted
from tests.engine.killed import contents
from transaxle.engine.carry import carry
from transaxle.engine.checkpoint.checkpoint import open_checkpoint
from transaxle.engine.execute import execute
from transaxle.engine.plan.conversion import make_plan
from transaxle.errors import Code, refuse
from transaxle.formats.storage import copier
from transaxle.move import workers
from transaxle.move.workers import MIN_MEMORY, Limits, StoppedError, limits, run_workers

ROOT = Path(__file__).parents[3]
SIZES = {**checkpoints.SIZES, "num_hidden_layers": 1, "num_experts": 2}
CONFIG = {**checkpoints.CONFIG, **SIZES}
TO = killed.TO
PARTIAL = ".out.transaxle-partial"
JOURNAL = ".transaxle/journal"


def small(folder: Path, **changed: np.ndarray) -> Path:
    """Write a checkpoint of twenty tensors."""
    return checkpoints.write(folder, {**checkpoints.tensors(SIZES), **changed}, config=CONFIG)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small(tmp_path / "source")


@pytest.fixture
def wanted(source: Path, tmp_path: Path) -> dict[str, bytes]:
    """What a conversion that nothing disturbs gives."""
    reference = tmp_path / "reference"
    killed.convert(source, reference)
    found = contents(reference)
    shutil.rmtree(reference)
    return found


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def run(source: Path, target: Path, before: Before, **options: Any) -> None:
    """Convert through a storage that calls `before` ahead of each read."""
    with open_checkpoint(source) as checkpoint:
        prepared = make_plan(counted(checkpoint, before)[0], TO, shard_size=killed.SHARD_SIZE)
        execute(prepared, str(target), limit=limits(1), **options)


class Trouble:
    """Does something at the n-th call."""

    def __init__(self, at: int, action: Callable[[], None]) -> None:
        self.at = at
        self.action = action
        self.calls = 0

    def __call__(self, *_: object) -> None:
        self.calls += 1
        if self.calls == self.at:
            self.action()


def failing(number: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail


def interrupted(source: Path, target: Path, at: int) -> None:
    """Leave a conversion half done, as a run with `resume` does that meets an error."""

    def stop() -> None:
        raise refuse("IO", "the cable")

    with demand_refusal("IO"):
        run(source, target, Trouble(at, stop), resume=True)


@pytest.mark.parametrize(
    ("ending", "to", "every", "how"),
    [
        ("", "automodel", 11, ()),
        (".pt", "torch:automodel", 23, ("two-renames",)),
        pytest.param("", "automodel", 1, (), marks=pytest.mark.oracle),
        pytest.param(".pt", "torch:automodel", 1, ("two-renames",), marks=pytest.mark.oracle),
        pytest.param(".safetensors", "automodel", 1, ("two-renames",), marks=pytest.mark.oracle),
        pytest.param("", "automodel", 1, ("two-renames",), marks=pytest.mark.oracle),
    ],
)
def test_killed_at_any_point(tmp_path: Path, ending: str, to: str, every: int, how: tuple[str, ...]) -> None:
    """Another run finishes the work to the same bytes, with `resume` and without, and nothing is left over.

    So it is with one-file targets, and with folders where two names cannot be exchanged.
    """
    source = small(tmp_path / "source")
    killed.convert(source, tmp_path / f"reference{ending}", to)
    killed.convert(checkpoints.tiny(tmp_path / "other"), tmp_path / f"old{ending}", to)
    (tmp_path / "work").mkdir()
    places = [str(tmp_path / name) for name in ("source", "work", f"reference{ending}", f"old{ending}")]
    command = [sys.executable, "-m", "tests.engine.killed", *places, to, str(every), *how]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert min(map(int, done.stdout.split())) > 70 // every, "points where a child died"


@pytest.mark.parametrize(
    ("call", "number", "code", "at"),
    [
        ("pwrite", errno.ENOSPC, "NO_SPACE", 1),
        ("pwrite", errno.EIO, "IO", 5),
        ("fsync", errno.EIO, "IO", 3),
        ("ftruncate", errno.EDQUOT, "NO_SPACE", 1),
    ],
)
def test_a_failing_disk_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, code: Code, at: int
) -> None:
    monkeypatch.setattr(copier, "load_steps", killed.one_by_one)
    real = getattr(os, call)
    trouble = Trouble(at, failing(number))

    def patched(*args: Any) -> Any:
        trouble()
        return real(*args)

    monkeypatch.setattr(os, call, patched)
    with demand_refusal(code) as caught:
        killed.convert(source, tmp_path / "out")
    assert caught.value.exit_code == 4
    assert caught.value.where.file
    assert names_in(tmp_path) == ["source"]
    assert trouble.calls >= at


def test_short_writes_and_short_reads(
    source: Path, wanted: Mapping[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "load_steps", killed.one_by_one)
    write, read = os.pwrite, os.preadv

    def short_write(fd: int, data: memoryview, offset: int) -> int:
        return write(fd, data[: max(1, len(data) // 3)], offset)

    def short_read(fd: int, buffers: list[memoryview], offset: int) -> int:
        return read(fd, [buffers[0][: max(1, len(buffers[0]) // 3)]], offset)

    monkeypatch.setattr(os, "pwrite", short_write)
    monkeypatch.setattr(os, "preadv", short_read)
    killed.convert(source, tmp_path / "out")
    assert contents(tmp_path / "out") == wanted


def error_of_the_machine(_: Path) -> None:
    raise refuse("IO", "the cable")


def cut_short(weights: Path) -> None:
    os.truncate(weights, 4000)


def changed(weights: Path) -> None:
    with weights.open("r+b") as file:
        file.seek(weights.stat().st_size - 3)
        file.write(b"new")


@pytest.mark.parametrize("at", [2, 10])
@pytest.mark.parametrize(
    ("meddle", "code"), [(error_of_the_machine, "IO"), (cut_short, "CORRUPT"), (changed, "CORRUPT")]
)
def test_a_source_that_fails_or_changes_meanwhile_leaves_nothing(
    source: Path, tmp_path: Path, meddle: Callable[[Path], None], code: Code, at: int
) -> None:
    with demand_refusal(code):
        run(source, tmp_path / "out", Trouble(at, lambda: meddle(source / checkpoints.WHOLE)))
    assert names_in(tmp_path) == ["source"]


@pytest.mark.parametrize("at", [2, 15])
def test_a_resumed_run_gives_the_same_bytes(source: Path, wanted: Mapping[str, bytes], tmp_path: Path, at: int) -> None:
    interrupted(source, tmp_path / "out", at)
    assert names_in(tmp_path) == [PARTIAL, "source"]
    seen: list[int] = []
    report = tx.convert(
        source, tmp_path / "out", to=TO, shard_size=killed.SHARD_SIZE, resume=True, progress=seen.append
    )
    assert contents(tmp_path / "out") == wanted
    assert names_in(tmp_path) == ["out", "source"]
    assert (report.resumed > 0) == (at > 2)
    tensors = tx.plan(source, tmp_path / "out", to=TO).tensors
    assert sum(seen) == sum(tensor.nbytes for tensor in tensors)


def test_a_source_that_changed_before_the_resume_is_refused(source: Path, tmp_path: Path) -> None:
    interrupted(source, tmp_path / "out", 12)
    with (source / checkpoints.WHOLE).open("r+b") as file:
        file.seek(3000)
        file.write(b"entirely other values")
    with demand_refusal("EXISTS", "another source, or has changed since"):
        tx.convert(source, tmp_path / "out", to=TO, shard_size=killed.SHARD_SIZE, resume=True)
    assert tx.convert(source, tmp_path / "out", to=TO, shard_size=killed.SHARD_SIZE, overwrite=True).resumed == 0
    tx.convert(source, tmp_path / "again", to=TO, shard_size=killed.SHARD_SIZE)
    assert contents(tmp_path / "out") == contents(tmp_path / "again")


def test_without_resume_what_was_left_is_not_used(source: Path, wanted: Mapping[str, bytes], tmp_path: Path) -> None:
    interrupted(source, tmp_path / "out", 12)
    left = contents(tmp_path / PARTIAL)
    with demand_refusal("EXISTS"):
        killed.convert(source, tmp_path / "out")
    assert contents(tmp_path / PARTIAL) == left
    killed.convert(source, tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == wanted


@pytest.mark.parametrize("seed", [0, 1, 2, 4, 7])
def test_what_was_left_is_checked(source: Path, wanted: Mapping[str, bytes], tmp_path: Path, seed: int) -> None:
    """Damage to the unfinished files, to the journal, to both, or files of wrong sizes."""
    interrupted(source, tmp_path / "out", 14)
    partial = tmp_path / PARTIAL
    random = np.random.default_rng(seed)
    journal = partial / JOURNAL
    victims = [path for path in partial.iterdir() if path.is_file()] if seed % 2 else [journal]
    for path in victims:
        data = bytearray(path.read_bytes())
        for at in random.integers(0, len(data), 5):
            data[at] ^= 1 << int(random.integers(0, 8))
        path.write_bytes(bytes(data[: len(data) - int(random.integers(0, 40)) * (seed > 5)]))
    if seed == 0:
        journal.write_bytes(b"")
    if seed == 2:
        journal.write_bytes(journal.read_bytes()[:-7])
    if seed == 4:
        journal.write_bytes(journal.read_bytes() + b"\n\xff\xfe garbage\n\n" + b"x" * 5000)
    tx.convert(source, tmp_path / "out", to=TO, shard_size=killed.SHARD_SIZE, resume=True)
    assert contents(tmp_path / "out") == wanted


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_resuming_what_is_complete_leaves_it_alone(source: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    first = tx.convert(source, target, to=TO)
    stamp = target.stat().st_mtime_ns, target.stat().st_ino
    report = tx.convert(source, target, to=TO, resume=True)
    assert report.resumed == report.tensors == first.tensors
    assert report.bytes_written == first.bytes_written
    assert (target.stat().st_mtime_ns, target.stat().st_ino) == stamp
    with demand_refusal("EXISTS"):
        tx.convert(source, target, to=TO)
    with demand_refusal("EXISTS"):
        tx.convert(source, target, to="megatron", resume=True)


@pytest.mark.parametrize("file", [checkpoints.WHOLE, "config.json", "transaxle.json"])
def test_resuming_over_something_else_is_refused(source: Path, tmp_path: Path, file: str) -> None:
    target = tmp_path / "out"
    tx.convert(source, target, to=TO)
    for at in (9, -2):
        data = bytearray((target / file).read_bytes())
        data[at] ^= 1
        (target / file).write_bytes(bytes(data))
        with demand_refusal("EXISTS"):
            tx.convert(source, target, to=TO, resume=True)
    (target / file).unlink()
    with demand_refusal("EXISTS"):
        tx.convert(source, target, to=TO, resume=True)


def test_resuming_what_is_complete_still_compares_copies(tmp_path: Path) -> None:
    """The target has the bytes it would get, but the source now holds two tensors where it held one twice."""
    held = checkpoints.tensors(SIZES)
    held["lm_head.weight"] = held["model.embed_tokens.weight"].copy()
    config = {**CONFIG, "tie_word_embeddings": True}
    source = checkpoints.write(tmp_path / "source", held, config=config)
    tx.convert(source, tmp_path / "out", to="hf")
    assert tx.convert(source, tmp_path / "out", to="hf", resume=True).resumed > 0
    held["lm_head.weight"][0, 0] += 1
    shutil.rmtree(source)
    checkpoints.write(source, held, config=config)
    with demand_refusal("EXISTS"):
        tx.convert(source, tmp_path / "out", to="hf", resume=True)


def test_the_old_one_is_there_until_the_new_one_is(source: Path, wanted: Mapping[str, bytes], tmp_path: Path) -> None:
    target = checkpoints.tiny(tmp_path / "out")
    before = contents(target)
    looks: list[bool] = []

    def look(_: int) -> None:
        looks.append(contents(target) == before and (tx.open(target).family == "qwen3_moe"))

    with demand_refusal("EXISTS"):
        killed.convert(source, target)
    killed.convert(source, target, overwrite=True, progress=look)
    assert looks
    assert all(looks)
    assert contents(target) == wanted


def test_unequal_ties_leave_nothing_and_are_all_named(tmp_path: Path) -> None:
    config = {**CONFIG, "tie_word_embeddings": True}
    held = checkpoints.tensors(SIZES)
    steps = {f"optim/model.layers.0.mlp.experts.{e}.up_proj.weight/step": np.array(3.0 + e, np.float32) for e in (0, 1)}
    gates = {f"optim/model.layers.0.mlp.experts.{e}.gate_proj.weight/step": np.array(3.0, np.float32) for e in (0, 1)}
    source = checkpoints.write(tmp_path / "source", {**held, **steps, **gates}, config=config)
    with demand_refusal("UNEQUAL_COPIES") as caught:
        tx.convert(source, tmp_path / "out", to="automodel")
    named = {refusal.where.tensor for refusal in caught.value.refusals}
    assert any("embed_tokens" in str(name) or "lm_head" in str(name) for name in named)
    assert any("step" in str(name) for name in named)
    assert names_in(tmp_path) == ["source"]
    held["lm_head.weight"] = held["model.embed_tokens.weight"].copy()
    equal = checkpoints.write(tmp_path / "equal", held, config=config)
    report = tx.convert(equal, tmp_path / "out", to="hf")
    assert report.checks == 1
    assert "lm_head.weight" not in checkpoints.read(tmp_path / "out")


@pytest.mark.parametrize("to", ["megatron", "te"])
def test_any_number_of_workers_and_any_memory_give_the_same_bytes(tmp_path: Path, to: str) -> None:
    sizes = {**SIZES, "hidden_size": 520, "moe_intermediate_size": 260, "vocab_size": 700}
    held = checkpoints.tensors(sizes)
    config = {**CONFIG, **sizes}
    source = checkpoints.write(tmp_path / "source", held, config=config)
    found = []
    for number, (jobs, memory) in enumerate([(1, None), (4, None), (4, 400_000), (3, 1 << 20), (16, 5_000_001)]):
        target = tmp_path / f"out{number}"
        tx.convert(source, target, to=to, jobs=jobs, memory=memory, sync=False, shard_size=500_000)
        found.append(contents(target))
    assert all(one == found[0] for one in found)


def test_buffers_stay_within_the_memory_given(tmp_path: Path) -> None:
    """A 24 MB stack is transposed in 2 MB of buffers, by two workers."""
    sizes = {**SIZES, "num_experts": 4, "hidden_size": 1024, "moe_intermediate_size": 1024}
    source = checkpoints.write(tmp_path / "source", checkpoints.tensors(sizes), config={**CONFIG, **sizes})
    prepared = make_plan(open_checkpoint(source), "automodel")
    limit = limits(2, 2 << 20)
    tracemalloc.start()
    try:
        execute(prepared, str(tmp_path / "out"), limit=limit, sync=False)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < limit.memory + (1 << 19)
    tx.convert(tmp_path / "out", tmp_path / "back", to="hf", sync=False)
    assert checkpoints.same(source, tmp_path / "back")


class Meeting:
    """Files whose first writer waits for a second one."""

    def __init__(self, *, ordered: bool | None) -> None:
        self.offsets: list[int] = []
        self.met = threading.Event()
        self._lock, self._inside, self._patience = threading.Lock(), 0, 5.0
        if ordered is not None:
            self.ordered = ordered

    def pwrite(self, _file: str, offset: int, _view: memoryview) -> None:
        with self._lock:
            self.offsets.append(offset)
            self._inside += 1
            if self._inside > 1:
                self.met.set()
            patience, self._patience = self._patience, 0.0
        self.met.wait(patience)
        with self._lock:
            self._inside -= 1


@pytest.mark.parametrize("ordered", [True, False, None])
def test_several_threads_write_into_one_file_unless_it_is_written_in_order(
    ordered: bool | None, tmp_path: Path
) -> None:
    """Files that say nothing, as those of a worker, can be written at any offset."""
    save_file({f"t{n}": np.zeros(1 << 20, np.float32) for n in range(8)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path / "model.safetensors") as checkpoint:
        plan = make_plan(checkpoint, "safetensors:identity").plan
        files = Meeting(ordered=ordered)
        carry(plan.tensors, checkpoint.container.storage, files, limits(2, 4 << 20))
    assert len(plan.files) == 1
    assert files.met.is_set() is not bool(ordered)
    assert files.offsets == sorted(files.offsets) or not ordered


def test_limits() -> None:
    for jobs, memory in [(1, MIN_MEMORY), (8, 64 << 20), (64, 1 << 20), (3, 10_000_001), (1, 1 << 40), (1000, 1 << 30)]:
        limit = limits(jobs, memory)
        assert 1 <= limit.jobs <= jobs
        assert limit.peak <= memory
        assert limit.half.peak * 2 <= memory
        assert limit.strided_block % 4096 == 0
    assert limits() == Limits(min(8, os.cpu_count() or 1), 64 << 20)
    for wrong in [(0, None), (-1, None), (None, 0), (None, -1), (None, 1000), (1, MIN_MEMORY - 1)]:
        with pytest.raises(ValueError, match=r"positive|too few"):
            limits(*wrong)


def test_the_source_is_not_touched(source: Path, tmp_path: Path) -> None:
    def state() -> dict[str, tuple[int, ...]]:
        paths = [source, *source.rglob("*")]
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_size, p.stat().st_mode, p.stat().st_ino) for p in paths}

    for path in source.iterdir():
        path.chmod(0o444)
    source.chmod(0o555)
    before = state()
    tx.convert(source, tmp_path / "out", to=TO)
    assert state() == before
    source.chmod(0o755)


NAMES = [
    "../../x",
    "/etc/x",
    "..",
    "a b",
    "nul\n",
    "ünï",
    "x" * 3000,
    "model.safetensors",
    "transaxle.json",
    ".transaxle",
    "optim//",
    "optim/#0/step",
    "%2e%2e",
    "a\\b",
    "\x7f",
    "😀",
]


def test_names_of_tensors_are_never_paths(tmp_path: Path) -> None:
    held = {name: np.full(3, number, np.int32) for number, name in enumerate(NAMES)}
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    source = checkpoints.write(inner / "source", held)
    tx.convert(source, inner / "out", to="safetensors", shard_size=1)
    assert checkpoints.read(inner / "out").keys() == held.keys()
    assert checkpoints.same(source, inner / "out")
    assert names_in(tmp_path) == ["a"]
    assert names_in(inner) == ["out", "source"]
    assert sum(path.is_file() for path in inner.joinpath("out").rglob("*")) == len(NAMES) + 3
    assert tx.verify(inner / "out").ok
    assert tx.diff(source, inner / "out").equal


def test_an_empty_checkpoint(tmp_path: Path) -> None:
    source = checkpoints.write(tmp_path / "source", {})
    report = tx.convert(source, tmp_path / "out", to="safetensors")
    assert report.tensors == 0
    assert tx.verify(tmp_path / "out").ok


def test_an_interrupt_stops_all_workers_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_BATCH", 1)  # each block is a batch
    sizes = {**SIZES, "vocab_size": 100_000, "hidden_size": 128}
    source = checkpoints.write(tmp_path / "source", checkpoints.tensors(sizes), config={**CONFIG, **sizes})
    main = threading.main_thread().ident
    assert main is not None
    trouble = Trouble(5, lambda: signal.pthread_kill(main, signal.SIGINT))

    def slowly(_: int) -> None:
        trouble()
        time.sleep(0.02)

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        tx.convert(source, tmp_path / "out", to=TO, jobs=3, progress=slowly)
    assert threading.active_count() == before
    assert trouble.calls < 20, "of more than fifty blocks"
    assert names_in(tmp_path) == ["source"]


def test_the_first_error_stops_the_others_and_is_the_one_raised() -> None:
    done: list[int] = []
    told: list[bool] = []
    together = threading.Barrier(3)

    def work(stop: threading.Event, item: int) -> None:
        if item >= 3:
            together.wait(30)
        if item == 3:
            raise ValueError("the first")
        if item > 3:
            told.append(stop.wait(10))
            raise KeyError("a later one") if item == 4 else StoppedError
        done.append(item)

    with pytest.raises(ValueError, match="the first"):
        run_workers(range(1000), 3, lambda stop: stop, work)
    assert sorted(done) == [0, 1, 2]
    assert told == [True, True]
