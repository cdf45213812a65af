"""Ranks that fail in the middle of a save: the others learn it in time, and the checkpoint that was there stays."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import transaxle as tx
from tests.live.ranks import DIED, Ranks
from tests.live.refusals import refused
from transaxle.errors import TransaxleError
from transaxle.formats.store.staging import Writer
from transaxle.live import asynchronous
from transaxle.live.asynchronous import SaveJob, async_save
from transaxle.live.save import save

WORLD = 2
SHORT = timedelta(seconds=20)
"""How long ranks wait for one that was killed: nothing else tells them of it."""
HUNG = 600.0
"""Seconds after which a test gives up; nothing that works waits for them."""
OLD, NEW = 0.0, 100.0


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Ranks of this test alone: some will be killed, and those that wait for them must not wait long."""
    with Ranks(WORLD, SHORT) as found:
        yield found


def _state(add: float) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(64 * 1024.0).reshape(256, 256) + add
    return {f"w{n}": distribute_tensor(full + n, mesh, [Shard(n % 2)], src_data_rank=None) for n in range(4)}


def _holds(target: Path, add: float) -> bool:
    full = torch.arange(64 * 1024.0).reshape(256, 256) + add
    held = load_file(target / "model.safetensors")
    return tx.verify(target).ok and all(torch.equal(held[f"w{n}"], full + n) for n in range(4))


def _first(rank: int, world: int, target: str) -> None:
    save(_state(OLD), target, to="safetensors")


def _full_disk(self: Writer, file: str, offset: int, view: memoryview) -> None:
    """Write as on a disk that has no more room: files may not grow beyond what was written already."""
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (offset, kept[1]))
    try:
        WRITE(self, file, offset, view)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)


def _killed(self: Writer, file: str, offset: int, view: memoryview) -> None:
    WRITE(self, file, offset, view[: len(view) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


WRITE = Writer.pwrite
FAULTS = {"killed": _killed, "full": _full_disk}


def test_a_file_system_that_writes_no_bytes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems answer 0 and no error; trying again would go on for ever."""
    (tmp_path / "file").write_bytes(bytes(8))
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    writer = Writer(str(tmp_path), sync=False)
    with pytest.raises(TransaxleError) as caught:
        writer.pwrite("file", 0, memoryview(bytes(8)))
    writer.finish()
    assert (caught.value.code, caught.value.where.file) == ("IO", "file")


def _again(rank: int, world: int, target: str, who: int, fault: str) -> None:
    state = _state(NEW)
    if rank == who:
        Writer.pwrite = FAULTS[fault]  # type: ignore[method-assign]
    try:
        save(state, target, to="safetensors", overwrite=True)
    finally:
        Writer.pwrite = WRITE  # type: ignore[method-assign]


@pytest.mark.oracle
@pytest.mark.parametrize("who", range(WORLD))
@pytest.mark.parametrize("fault", ["killed", "full"])
def test_a_failed_save_leaves_the_former_checkpoint(tmp_path: Path, ranks: Ranks, fault: str, who: int) -> None:
    target = tmp_path / "run"
    ranks.run(_first, str(target))
    assert _holds(target, OLD)
    answers = ranks.answers(_again, str(target), who, fault)
    for rank, (fine, error) in enumerate(answers):
        assert not fine
        if rank == who and fault == "killed":
            assert error == DIED
        else:
            assert isinstance(error, TransaxleError), error
            assert error.code in ("IO", "NO_SPACE")
    assert _holds(target, OLD)
    if fault == "full":  # nothing is left beside it, and the next save is well
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        with_room = ranks.answers(_again, str(target), -1, fault)
        assert [fine for fine, _ in with_room] == [True, True]
        assert _holds(target, NEW)
        return
    with Ranks(WORLD) as others:
        others.run(_again, str(target), -1, fault)
    assert _holds(target, NEW)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def _process(world: int) -> Any:
    saver, _ = asynchronous._SAVERS[os.getpid(), tuple(range(world))]
    return saver._process


def _job(state: dict[str, DTensor], target: str) -> SaveJob:
    return async_save(state, target, to="safetensors", overwrite=True)


def _background(rank: int, world: int, target: str, who: int, fault: str) -> list[str]:
    _job(_state(OLD), target).result()
    process = _process(world)
    said: list[str] = []
    if fault == "killed":
        os.kill(process.pid, signal.SIGSTOP)  # it is killed with its order taken, before it has written
    if fault == "full" and rank == who:  # none of its files may grow beyond this
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    job = _job(_state(NEW), f"{target}/no/such/folder" if fault == "missing" else target)
    if fault == "killed":
        os.kill(process.pid, signal.SIGKILL if rank == who else signal.SIGCONT)
    try:
        if fault != "missing":
            job.result(HUNG)
    except TransaxleError as error:
        said.append(error.code)
    if fault == "full" and rank == who:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    try:
        _job(_state(NEW + 1), f"{target}-next")
    except TransaxleError as error:  # of the save before, if nobody has asked for its result
        said.append(error.code)
    assert job.done()
    _job(_state(NEW + 1), f"{target}-next").result()
    return said


@pytest.mark.oracle
@pytest.mark.parametrize(("fault", "who"), [("killed", 0), ("killed", 1), ("missing", 0), ("full", 1)])
def test_a_failed_background_save_is_an_error_on_every_rank(tmp_path: Path, ranks: Ranks, fault: str, who: int) -> None:
    target = tmp_path / "run"
    for said in ranks.run(_background, str(target), who, fault):
        assert len(said) == 1
        assert set(said) <= {"IO", "NO_SPACE"}
    assert _holds(target, OLD)
    assert _holds(tmp_path / "run-next", NEW + 1)


def _stillborn(rank: int, world: int, target: str) -> str:
    job = _job(_state(OLD), target)
    if rank == world - 1:
        os.kill(_process(world).pid, signal.SIGKILL)  # before it has met the others
    with pytest.raises(TransaxleError) as error:
        job.result(HUNG)
    _job(_state(NEW), f"{target}-next").result()  # what was told is not told again
    return str(error.value)


def test_a_background_process_that_dies_before_connecting_is_an_error(tmp_path: Path, ranks: Ranks) -> None:
    target = tmp_path / "run"
    for said in ranks.run(_stillborn, str(target)):
        assert "the background process of rank 1 ended (exit code -9)" in said
    assert not target.exists()
    assert _holds(tmp_path / "run-next", NEW)


def _unseen(rank: int, world: int, target: str) -> None:
    """Save into a folder that one rank does not see, as on a machine without the others' disk."""
    kept = Writer.__init__

    def moved(self: Writer, folder: str, **told: Any) -> None:
        kept(self, f"{folder}-elsewhere", **told)

    if rank == world - 1:
        Writer.__init__ = moved  # type: ignore[assignment,method-assign]
    try:
        save(_state(NEW), target, to="safetensors")
    finally:
        Writer.__init__ = kept  # type: ignore[method-assign]


def test_a_folder_that_one_rank_does_not_see_is_an_error_on_every_rank(tmp_path: Path, ranks: Ranks) -> None:
    for error in ranks.refusals(_unseen, str(tmp_path / "run")):
        assert "opening the folder for the unfinished work" in str(error)
    assert list(tmp_path.iterdir()) == []


def _mutated(rank: int, world: int, target: str) -> None:
    state = _state(OLD)
    _job(state, f"{target}-0").result()
    process = _process(world)
    os.kill(process.pid, signal.SIGSTOP)
    first = _job(state, f"{target}-1")
    before = {name: buffer.data_ptr() for name, buffer in _buffers(world).items()}
    with torch.no_grad():
        for tensor in state.values():
            tensor.to_local().add_(NEW)
    assert not first.done()
    with pytest.raises(TimeoutError):
        first.result(0.2)
    os.kill(process.pid, signal.SIGCONT)
    second = _job(state, f"{target}-2")  # waits for the first
    assert first.done()
    assert Path(f"{target}-1", "model.safetensors").exists()
    with torch.no_grad():
        for tensor in state.values():
            tensor.to_local().fill_(-1)
    second.result()
    assert {name: buffer.data_ptr() for name, buffer in _buffers(world).items()} == before
    assert _process(world) is process


def _buffers(world: int) -> dict[str, torch.Tensor]:
    saver, _ = asynchronous._SAVERS[os.getpid(), tuple(range(world))]
    return saver._buffers


def test_changes_after_the_snapshot_are_not_saved(tmp_path: Path, ranks: Ranks) -> None:
    target = tmp_path / "run"
    ranks.run(_mutated, str(target))
    assert _holds(tmp_path / "run-0", OLD)
    assert _holds(tmp_path / "run-1", OLD)
    assert _holds(tmp_path / "run-2", NEW)


def test_sharded_tensors_without_a_mesh_are_refused(tmp_path: Path) -> None:
    """Sharded state dicts of FSDP1 without a mesh: torch's own type, of which no operation is defined."""
    held = torch.Tensor._make_wrapper_subclass(ShardedTensor, (4, 2))
    for state in ({"a": held}, {"a": {"b": [held]}, "c": torch.ones(2)}):
        for call in (tx.save, async_save):
            with refused("UNSUPPORTED", hint="device_mesh"):
                call(state, tmp_path / "out", to="safetensors:identity")
    assert not list(tmp_path.iterdir())
