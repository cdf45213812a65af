"""A DTensor that a rank of its mesh omits, a group smaller than the mesh: refused everywhere, nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import transaxle as tx
from tests.live.ranks import ranks, run
from transaxle.errors import TransaxleError
from transaxle.live.global_tensors import census
from transaxle.live.transport.world import World

SOURCE = {"a": torch.arange(64.0).reshape(8, 8), "b": torch.arange(24.0).reshape(8, 3), "c": torch.ones(4)}
KEPT = 5.0


def _state(mesh: DeviceMesh, value: float) -> dict[str, Any]:
    fulls = {name: torch.full_like(tensor, value) for name, tensor in SOURCE.items()}
    state: dict[str, Any] = {
        name: distribute_tensor(fulls[name], mesh, [Shard(0)], src_data_rank=None) for name in ("a", "b")
    }
    return {**state, "c": fulls["c"]}


def _omitted(rank: int, world: int, folder: str, call: str, who: int, placement: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    placed = Shard(0) if placement == "shard" else Replicate()
    source, target = _state(mesh, KEPT), _state(mesh, KEPT)
    target["b"] = distribute_tensor(torch.full_like(SOURCE["b"], KEPT), mesh, [placed], src_data_rank=None)
    source["b"] = distribute_tensor(torch.full_like(SOURCE["b"], KEPT), mesh, [placed], src_data_rank=None)
    lacking = source if call == "reshard from" else target
    if rank == who:
        del lacking["b"]
    try:
        if call.startswith("reshard"):
            tx.reshard(source, target)
        elif call == "load":
            tx.load(target, f"{folder}/source", strict=False)
        elif call == "save":
            tx.save(target, f"{folder}/target", to="safetensors")
        else:
            tx.async_save(target, f"{folder}/target", to="safetensors").result()
    finally:
        for value in target.values():
            assert bool(((value.to_local() if isinstance(value, DTensor) else value) == KEPT).all())


@pytest.mark.parametrize("placement", ["shard", "replicate"])
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("call", ["load", "save", "async_save", "reshard to", "reshard from"])
def test_a_tensor_that_one_rank_omits_is_refused_before(tmp_path: Path, call: str, who: int, placement: str) -> None:
    (tmp_path / "source").mkdir()
    save_file(SOURCE, tmp_path / "source" / "model.safetensors")
    answers = ranks(2).answers(_omitted, str(tmp_path), call, who, placement)
    assert [fine for fine, _ in answers] == [False, False]
    for _, error in answers:
        assert isinstance(error, TransaxleError), error
        assert [(one.code, one.where.tensor) for one in error.refusals] == [("INCOMPLETE", "b")]
        assert f"its mesh has ranks 0, 1, but rank {who} does not have the tensor" in str(error)
        assert error.hint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def _narrow(rank: int, world: int, folder: str, call: str) -> str:
    """Call it on ranks 0 and 1 alone; the tensors lie on all three."""
    mesh = init_device_mesh("cpu", (world,))
    pair = dist.new_group([0, 1], backend="gloo")
    if rank == 2:
        return "not asked"
    source, target = _state(mesh, KEPT), _state(mesh, KEPT)
    try:
        if call == "reshard":
            tx.reshard(source, target, pair)
        elif call == "load":
            tx.load(target, f"{folder}/source", group=pair)
        elif call == "save":
            tx.save(target, f"{folder}/target", to="safetensors", group=pair)
        else:
            tx.async_save(target, f"{folder}/target", to="safetensors", group=pair).result()
    except TransaxleError as error:
        for value in target.values():
            assert bool(((value.to_local() if isinstance(value, DTensor) else value) == KEPT).all())
        return "\n".join(f"{one.code} {one.where.tensor} {one.message} {bool(one.hint)}" for one in error.refusals)
    return "taken"


@pytest.mark.parametrize("call", ["load", "save", "async_save", "reshard"])
def test_a_group_smaller_than_the_mesh_is_refused_before(tmp_path: Path, call: str) -> None:
    (tmp_path / "source").mkdir()
    save_file(SOURCE, tmp_path / "source" / "model.safetensors")
    said = "its mesh has ranks 0, 1, 2, of which 2 are not in the process group True"
    want = f"UNSUPPORTED a {said}\nUNSUPPORTED b {said}"
    assert run(3, _narrow, str(tmp_path), call) == [want, want, "not asked"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def _seen(rank: int, world: int) -> dict[str, Any]:
    """One name is a plain tensor on rank 0, and a DTensor on the mesh of ranks 0 and 1 as rank 1 sees it."""
    mesh = init_device_mesh("cpu", (world,))
    full = torch.ones(4, 2)
    mixed = full if rank == 0 else distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
    found = census({"mixed": mixed}, World())["mixed"]
    return {"held": {who: tuple(map(list, held)) for who, held in found.positions.items()}, "loose": found.loose}


def test_each_rank_is_asked_what_it_holds_itself() -> None:
    held = {0: ([(0, 4)], [(0, 2)]), 1: ([(2, 4)], [(0, 2)])}
    assert run(2, _seen) == [{"held": held, "loose": True}] * 2


def _outside(rank: int, world: int) -> tuple[list[str], list[str]]:
    """A DTensor on a mesh of rank 0 alone, which rank 1 sees too."""
    mesh = DeviceMesh("cpu", torch.tensor([0]))
    state = {"model.norm.weight": DTensor.from_local(torch.ones(4), mesh, [Shard(0)], run_check=False)}
    made = tx.state_dict_as(state, "identity")
    return sorted(made), [type(one).__name__ for one in made.values()]


def test_a_state_dict_as_leaves_out_what_a_rank_is_no_part_of() -> None:
    assert run(2, _outside) == [(["model.norm.weight"], ["DTensor"]), ([], [])]
