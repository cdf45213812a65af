"""torch's own distributed checkpoint through us: right where torch is, and where it is not."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import transaxle as tx
from tests.live.ranks import ranks, run
from tests.live.reexpress.test_state_dict_adapter import CONFIG, automodel, hub
from transaxle.errors import TransaxleError
from transaxle.live.global_tensors import Runs, as_runs
from transaxle.live.integrations.dcp_planners import LoadPlanner, SavePlanner

FULL = {
    "packed": torch.arange(24 * 3, dtype=torch.float32).reshape(24, 3),
    "both": torch.arange(16 * 8, dtype=torch.bfloat16).reshape(16, 8),
    "plain": torch.arange(20, dtype=torch.float32).reshape(10, 2),
    "same": torch.arange(5),
}
ONE: dict[str, list[Any]] = {
    "packed": [_StridedShard(0, split_factor=2)],
    "both": [_StridedShard(1, split_factor=2)],
    "plain": [Shard(0)],
    "same": [Replicate()],
}
TWO: dict[str, list[Any]] = {
    "packed": [Shard(1), _StridedShard(0, split_factor=2)],
    "both": [_StridedShard(0, split_factor=2), Shard(0)],
    "plain": [Replicate(), Shard(0)],
    "same": [Replicate(), Replicate()],
}

ROWS: dict[str, list[Any]] = {name: [Shard(0)] if t.dim() > 1 else [Replicate()] for name, t in FULL.items()}
"""What torch alone saves and loads right."""


def _state(world: int, placements: dict[str, list[Any]], *, fill: float | None = None) -> dict[str, DTensor]:
    sizes = {1: (world,), 2: (2, world // 2)}[len(placements["same"])]
    mesh = init_device_mesh("cpu", sizes)
    state = {
        name: distribute_tensor(FULL[name].clone(), mesh, placements[name], src_data_rank=None) for name in placements
    }
    if fill is not None:
        for value in state.values():
            value.to_local().fill_(fill)
    return state


def _check(world: int, found: dict[str, DTensor], placements: dict[str, list[Any]]) -> None:
    for name, truth in _state(world, placements).items():
        assert torch.equal(found[name].to_local(), truth.to_local()), name


def _async(state: dict[str, Any], target: str, kind: str, planner: SavePlanner | None = None) -> None:
    """Save in the background of torch's kinds, and spoil the state meanwhile: what is staged is saved."""
    job = async_save(state, checkpoint_id=target, planner=planner, async_checkpointer_type=AsyncCheckpointerType[kind])
    for value in state.values():
        local = value.to_local() if isinstance(value, DTensor) else value._local if isinstance(value, Runs) else None
        if local is not None:
            local.fill_(-9)
    assert isinstance(job, Future)
    job.result()


def _round(rank: int, world: int, target: str, kind: str, placements: dict[str, list[Any]]) -> None:
    state = _state(world, placements)
    if kind == "planner":
        save(dict(state), checkpoint_id=target, planner=SavePlanner())
    elif kind == "sync":
        save(as_runs(state), checkpoint_id=target)
    else:
        _async(as_runs(state), target, kind)
    again = _state(world, placements, fill=-1)
    if kind == "planner":
        load(dict(again), checkpoint_id=target, planner=LoadPlanner())
    else:
        load(as_runs(again), checkpoint_id=target)
    _check(world, again, placements)


def _elsewhere(rank: int, world: int, source: str, placements: dict[str, list[Any]], wrapped: bool) -> None:
    again = _state(world, placements, fill=-1)
    load(as_runs(again) if wrapped else dict(again), checkpoint_id=source)
    _check(world, again, placements)


@pytest.mark.parametrize("kind", ["sync", "THREAD", "PROCESS", "planner"])
def test_parts_of_several_runs_are_saved_and_loaded(tmp_path: Path, kind: str) -> None:
    target = str(tmp_path / "out")
    run(2, _round, target, kind, ONE)
    with tx.open(target) as checkpoint:
        for name, tensor in FULL.items():
            assert checkpoint[name].tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()
    run(4, _elsewhere, target, TWO, True)
    run(2, _elsewhere, target, ROWS, False)


def test_on_two_mesh_dims_too(tmp_path: Path) -> None:
    run(4, _round, str(tmp_path / "out"), "planner", TWO)
    run(2, _elsewhere, str(tmp_path / "out"), ONE, True)


def _torch_alone(rank: int, world: int, source: str) -> bool:
    again = _state(world, ONE, fill=-1)
    load(dict(again), checkpoint_id=source)
    return torch.equal(again["packed"].to_local(), _state(world, ONE)["packed"].to_local())


def _torch_saves(rank: int, world: int, target: str) -> None:
    save(dict(_state(world, ONE)), checkpoint_id=target)


def test_torch_alone_is_wrong(tmp_path: Path) -> None:
    """If this fails, torch has mended it, and the wrapper is not needed any more."""
    run(2, _round, str(tmp_path / "out"), "sync", ONE)
    assert run(2, _torch_alone, str(tmp_path / "out")) == [False, False]
    assert all(not fine for fine, _ in ranks(2).answers(_torch_saves, str(tmp_path / "no")))


def _experts(world: int, *, fill: float | None = None) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ep_shard", "ep"))
    state = {
        name: distribute_tensor(tensor, mesh, [Shard(1), Shard(0)], src_data_rank=None)
        for name, tensor in automodel().items()
    }
    if fill is not None:
        for value in state.values():
            value.to_local().fill_(fill)
    return state


def _dialects(rank: int, world: int, target: str, kind: str) -> None:
    state = _experts(world)
    moments = {
        "optimizer": {
            "state": {
                name: {"exp_avg": DTensor.from_local(t.to_local() + 9000, t.device_mesh, t.placements, run_check=False,
                                                     shape=t.shape, stride=t.stride())}
                for name, t in state.items()
            }
        }
    }  # fmt: skip
    said: dict[str, Any] = {"config": CONFIG, "source": "automodel"}
    planner = SavePlanner("hf", **said)
    everything: dict[str, Any] = {**state, **moments, "step": 3}
    if kind == "sync":
        save(everything, checkpoint_id=target, planner=planner)
    else:
        _async(everything, target, kind, planner)
        state = _experts(world)
    again = _experts(world, fill=-1)
    other = {
        "optimizer": {"state": {name: {"exp_avg": value} for name, value in _experts(world, fill=-2).items()}},
        "step": 0,
    }
    mine: dict[str, Any] = {**again, **other}
    load(mine, checkpoint_id=target, planner=LoadPlanner("hf", **said))
    for name, value in again.items():
        assert torch.equal(value.to_local(), state[name].to_local()), name
        moment = mine["optimizer"]["state"][name]["exp_avg"]
        assert torch.equal(moment.to_local(), state[name].to_local() + 9000), name
    assert mine["step"] == 3


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["sync", "THREAD"])
def test_a_model_of_one_dialect_and_a_checkpoint_of_another(tmp_path: Path, kind: str) -> None:
    target = str(tmp_path / "out")
    run(4, _dialects, target, kind)
    with tx.open(target) as checkpoint:
        for name, tensor in hub(automodel()).items():
            assert checkpoint[name].shape == tuple(tensor.shape)
            assert checkpoint[name].tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes(), name
            moment = checkpoint[f"optim/{name}/exp_avg"]
            assert moment.tobytes() == (tensor + 9000).contiguous().view(torch.uint8).numpy().tobytes(), name


def _unfit(rank: int, world: int, source: str) -> list[tuple[str, str | None]]:
    state = _state(world, ONE, fill=-1)
    mesh = state["plain"].device_mesh
    state["plain"] = distribute_tensor(torch.full((10, 2), 7.0).half(), mesh, [Shard(0)], src_data_rank=None)
    state["both"] = distribute_tensor(torch.full((4, 2), 7.0), mesh, [Shard(0)], src_data_rank=None)
    planner = LoadPlanner()
    planner.set_up_planner(dict(state, more=torch.ones(1)), FileSystemReader(source).read_metadata(), True)
    try:
        planner.create_local_plan()
    except TransaxleError as error:
        return [(refusal.code, refusal.where.tensor) for refusal in error.refusals]
    return []


def test_what_does_not_fit_is_listed_at_once(tmp_path: Path) -> None:
    run(2, _round, str(tmp_path / "out"), "sync", ONE)
    for found in run(2, _unfit, str(tmp_path / "out")):
        want = {("DTYPE_MISMATCH", "plain"), ("SHAPE_MISMATCH", "both"), ("MISSING_TENSOR", "more")}
        assert set(found) == want


class Evil:
    """An object that would run code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (print, ("run",))


def _evil(rank: int, world: int, target: str) -> bool:
    save({"w": torch.ones(2), "evil": Evil()}, checkpoint_id=target)
    try:
        load({"w": torch.zeros(2), "evil": None}, checkpoint_id=target, planner=LoadPlanner())
    except BaseException as error:  # noqa: BLE001 - torch wraps it
        return "UNSAFE_PICKLE" in str(error)
    return False


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    assert run(1, _evil, str(tmp_path / "out")) == [True]


def _plainly(rank: int, world: int, target: str) -> None:
    """What torch does right, we do to the byte."""
    mesh = init_device_mesh("cpu", (world,))
    state = {name: distribute_tensor(FULL[name], mesh, [Shard(0)], src_data_rank=None) for name in ("packed", "plain")}
    save(dict(state), checkpoint_id=f"{target}/torch")
    save(dict(state), checkpoint_id=f"{target}/ours", planner=SavePlanner())
    for name in ("torch", "ours"):
        again = {
            key: distribute_tensor(torch.zeros_like(FULL[key]), mesh, [Shard(1)], src_data_rank=None) for key in state
        }
        load(dict(again), checkpoint_id=f"{target}/{name}", planner=LoadPlanner() if name == "torch" else None)
        for key, value in again.items():
            cut = distribute_tensor(FULL[key], mesh, [Shard(1)], src_data_rank=None)
            assert torch.equal(value.to_local(), cut.to_local())


def test_where_torch_is_right_both_give_the_same(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    run(2, _plainly, str(tmp_path))
    ours, theirs = (FileSystemReader(str(tmp_path / name)).read_metadata() for name in ("ours", "torch"))
    assert ours.state_dict_metadata == theirs.state_dict_metadata


def _between(rank: int, world: int, folder: str) -> None:
    """What `tx.save` writes of packed parts, torch loads; what torch writes, `tx.load` puts into packed parts."""
    tx.save(_state(world, TWO), f"{folder}/ours", to="dcp")
    for placements, wrapped in ((ROWS, False), (ONE, True), (TWO, True)):
        again = _state(world, placements, fill=-1)
        load(as_runs(again) if wrapped else dict(again), checkpoint_id=f"{folder}/ours")
        _check(world, again, placements)
    save(dict(_state(world, ROWS)), checkpoint_id=f"{folder}/theirs")
    save(as_runs(_state(world, TWO)), checkpoint_id=f"{folder}/wrapped")
    for name in ("theirs", "wrapped"):
        for placements in (ONE, TWO):
            again = _state(world, placements, fill=-1)
            tx.load(again, f"{folder}/{name}")
            _check(world, again, placements)


def test_torch_loads_what_we_save_and_the_reverse(tmp_path: Path) -> None:
    run(4, _between, str(tmp_path))
