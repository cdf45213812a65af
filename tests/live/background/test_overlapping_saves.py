"""Saves in the background that overlap another save, a load, or the training: none hangs, and every value is exact.

torch's own `dcp.async_save` lets two saves run at the same time, which fails in `_torch_alone`. The thread of each save
uses the default process group, so the ranks pair collectives of different saves; and threads that wait for the
background process read from one pipe.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import transaxle as tx
from tests.live.ranks import run
from transaxle.live.integrations import dcp_storage
from transaxle.live.transport.background import BackgroundSave

State = dict[str, Any]
OURS, THREAD, PROCESS = "ours", "THREAD", "PROCESS"
TO = "dcp:identity"
LAYERS, PATIENCE = 12, 120.0


def _whole(factor: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {f"layers.{number}.w": factor * torch.randn(24, 8, generator=generator) for number in range(LAYERS)}


def _state(factor: float) -> State:
    if not dist.is_initialized():
        return dict(_whole(factor))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) for name, tensor in _whole(factor).items()
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _has(folder: Path | str, factor: float) -> bool:
    with tx.open(folder) as checkpoint:
        stored = {name: checkpoint[name].tobytes() for name in checkpoint}
    return stored == {name: tensor.numpy().tobytes() for name, tensor in _whole(factor).items()}


def _begin(kind: str, factor: float, folder: Path | str, **options: Any) -> Any:
    """Begin a save of a state whose values change as soon as the call returns."""
    state = _state(factor)
    job: Any
    if kind == OURS:
        job = tx.async_save(state, folder, to=TO, overwrite=True)
    else:
        writer = tx.dcp.Writer(folder, to=TO, overwrite=True)
        job = async_save(state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType[kind], **options)
    for tensor in state.values():
        _local(tensor).fill_(-1)
    return job


def _train(steps: int) -> None:
    """Use the default process group as a training does, and check every result."""
    world = dist.get_world_size()
    for step in range(steps):
        values = torch.full((100,), float(step + dist.get_rank()))
        dist.all_reduce(values)
        assert values.tolist() == [step * world + sum(range(world))] * 100


def _overlapping(rank: int, world: int, root: str, kind: str) -> None:
    first = _begin(kind, 1, f"{root}/1")
    jobs = [first, *(_begin(kind, factor, f"{root}/{factor}") for factor in (2, 3, 4))]
    jobs += [_begin(kind, factor, f"{root}/same") for factor in (5, 6, 7)]
    _train(20)
    loaded, by_reader = _state(-2), _state(-2)
    jobs.append(_begin(kind, 8, f"{root}/8"))
    tx.load(loaded, f"{root}/1")
    jobs.append(_begin(kind, 9, f"{root}/9"))
    load(by_reader, storage_reader=tx.dcp.Reader(f"{root}/1"))
    jobs.append(_begin(kind, 10, f"{root}/10"))
    tx.save(_state(11), f"{root}/11", to=TO)
    jobs.append(_begin(kind, 12, f"{root}/12"))
    save(_state(13), storage_writer=tx.dcp.Writer(f"{root}/13", to=TO))
    for job in jobs:
        job.result()
    for state in (loaded, by_reader):
        for name, tensor in _whole(1).items():
            assert torch.equal(state[name].full_tensor(), tensor), name
    dist.barrier()


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.oracle)])
@pytest.mark.parametrize("kind", [OURS, THREAD, PROCESS])
def test_overlapping_saves_loads_and_training_are_exact(tmp_path: Path, kind: str, world: int) -> None:
    run(world, _overlapping, str(tmp_path), kind)
    assert _has(tmp_path / "same", 7)
    assert all(_has(tmp_path / str(factor), factor) for factor in (1, 2, 3, 4, *range(8, 14)))


@contextmanager
def _slow(event: threading.Event) -> Iterator[None]:
    """Let saves of `Writer` write nothing in this process before an event is set."""
    write = vars(dcp_storage)["write_checkpoint"]

    def write_later(*args: Any) -> Any:
        assert event.wait(PATIENCE)
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp_storage, "write_checkpoint", write_later)
        yield


def _with_own_group(rank: int, world: int, root: str) -> None:
    """A save with its own process group runs beside the training; the next one waits for it."""
    group, event = dist.new_group(backend="gloo"), threading.Event()
    with _slow(event):
        first = _begin(THREAD, 1, f"{root}/1", process_group=group)
        _train(20)
        tx.save(_state(2), f"{root}/2", to=TO)
        assert not first.done()
        threading.Timer(0.5, event.set).start()
        second = _begin(THREAD, 3, f"{root}/3", process_group=group)
        assert first.done()
        _train(20)
        second.result()
    dist.barrier()


def test_a_save_with_its_own_group_runs_beside_the_training(tmp_path: Path) -> None:
    run(2, _with_own_group, str(tmp_path))
    assert all(_has(tmp_path / str(factor), factor) for factor in (1, 2, 3))


def _with_the_group_of_the_training(rank: int, world: int, root: str) -> list[str]:
    event = threading.Event()
    with _slow(event), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threading.Timer(0.5, event.set).start()
        job = _begin(THREAD, 1, f"{root}/1")
        assert job.done()
        job.result()
    return [text for warning in caught if "dcp.async_save" in (text := str(warning.message))]


def test_a_save_with_the_group_of_the_training_says_that_it_waits(tmp_path: Path) -> None:
    said, nothing = run(2, _with_the_group_of_the_training, str(tmp_path))
    assert ["dcp.async_save(..., process_group=" in text for text in said] == [True]
    assert nothing == []
    assert _has(tmp_path / "1", 1)


class _FailingPlanner(DefaultSavePlanner):
    """A planner that fails on one rank before it has asked the writer for anything."""

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        raise ValueError("this planner fails")


def _failing(rank: int, world: int, root: str, kind: str, fault: str) -> list[str]:
    """Begin a save that fails on the last rank, and one that does not."""
    options: dict[str, Any] = {}
    entry = {}
    if rank == world - 1 and fault == "planner":
        options["planner"] = _FailingPlanner()
    if fault == "entry":
        entry = {"odd": Path() if rank == world - 1 else 3}
    writer = tx.dcp.Writer(f"{root}/failing", to=TO)
    first = async_save(
        {**_state(1), **entry}, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType[kind], **options
    )
    second = _begin(kind, 2, f"{root}/2")
    said = []
    try:
        assert isinstance(first, Future)
        first.result()
    except CheckpointException as error:
        said.append(str(error))
    second.result()
    _train(5)
    return said


@pytest.mark.parametrize("fault", ["planner", "entry"])
@pytest.mark.parametrize("kind", [THREAD, PROCESS])
def test_a_save_after_one_that_failed_on_one_rank_is_exact(tmp_path: Path, kind: str, fault: str) -> None:
    for said in run(2, _failing, str(tmp_path), kind, fault):
        assert ["this planner fails" in text or "UNSUPPORTED" in text for text in said] == [True]
    assert not (tmp_path / "failing").exists()
    assert _has(tmp_path / "2", 2)


def _with_another_stager(rank: int, world: int, root: str) -> None:
    """With a stager of the program, saves wait for each other in their threads."""
    stager, group = DefaultStager(StagingOptions(*[False] * 4)), dist.new_group(backend="gloo")
    jobs = [
        _begin(THREAD, factor, f"{root}/{factor}", process_group=group, async_stager=stager) for factor in range(1, 5)
    ]
    for job in jobs:
        job.result()
    stager.close()
    dist.barrier()


def test_saves_with_another_stager_wait_for_each_other(tmp_path: Path) -> None:
    run(2, _with_another_stager, str(tmp_path))
    assert all(_has(tmp_path / str(factor), factor) for factor in range(1, 5))


def test_threads_that_are_started_later_are_not_waited_for() -> None:
    """Also if the save has failed before it called its writer."""
    save, ended, done = BackgroundSave(), threading.Event(), threading.Event()
    own, later = threading.Thread(target=ended.wait), threading.Thread(target=done.wait)
    own.start()
    save.register()
    later.start()
    waiting = threading.Thread(target=save.wait, daemon=True)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    ended.set()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    assert later.is_alive()
    done.set()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_later_values_stay_without_a_process_group(tmp_path: Path) -> None:
    """The first save is committed last if nobody waits for it."""
    event = threading.Event()
    with _slow(event):
        first = _begin(THREAD, 1, tmp_path / "out")
        threading.Timer(0.5, event.set).start()
        tx.save(_state(2), tmp_path / "out", to=TO, overwrite=True)
        assert first.done()
    assert _has(tmp_path / "out", 2)
    jobs = [_begin(THREAD, factor, tmp_path / "out") for factor in (3, 4, 5)]
    assert [job.done() for job in jobs[:2]] == [True, True]
    jobs[2].result()
    assert _has(tmp_path / "out", 5)


def _torch_alone(rank: int, root: str, saves: int, steps: int) -> None:
    """Overlap a save of torch's own with others, or with the training; exit with 0 if all went well."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{root}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=20))
    jobs = [async_save(_state(factor), checkpoint_id=f"{root}/{factor}") for factor in range(saves)]
    _train(steps)
    for job in jobs:
        assert isinstance(job, Future)
        job.result()
    os._exit(0)


@pytest.mark.oracle
@pytest.mark.parametrize(("saves", "steps"), [(4, 0), (1, 500)])
def test_saves_of_torch_alone_fail_if_they_overlap(tmp_path: Path, saves: int, steps: int) -> None:
    """If this test fails, torch has mended it, and `Writer` need not wait any longer."""
    starter = get_context("spawn")
    processes = [starter.Process(target=_torch_alone, args=(rank, str(tmp_path), saves, steps)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
    codes = [process.exitcode for process in processes]  # None of a process that hangs
    for process in processes:
        process.kill()
    assert codes != [0, 0]
