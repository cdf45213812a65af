"""What topologies need of their own: transformers' tensor parallel, stages, from trainer to inference, uneven cuts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as torch_loads
from torch.distributed.checkpoint.state_dict_saver import save as torch_saves
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import transaxle as tx
from tests.live.ranks import run
from tests.live.reexpress.test_state_dict_adapter import CONFIG, automodel
from tests.live.reexpress.test_state_dict_adapter import hub as unstacked
from tests.live.topologies import LLAMA, MOE, PP, build, gathered, same, source
from tests.oracles import hub
from transaxle.live.global_tensors import as_runs
from transaxle.live.load import load
from transaxle.live.reshard import reshard
from transaxle.live.save import save
from transaxle.torch_tensors import local_of


def _differing(state: dict[str, Any], truth: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in state.items() if not torch.equal(local_of(tensor), truth[name])}


def _emptied(state: dict[str, Any]) -> dict[str, Any]:
    for tensor in state.values():
        local_of(tensor).zero_()
    return state


def _tp_auto(rank: int, world: int, given: str, target: str) -> tuple[set[str], str]:
    """Save and reload a model that transformers cuts; then let torch's own checkpoint try."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    said: Any = DistributedConfig(tp_plan="auto", tp_size=world)
    model = AutoModelForCausalLM.from_pretrained(given, distributed_config=said, dtype=torch.float32)
    state = model.state_dict()
    truth = {name: local_of(tensor).clone() for name, tensor in state.items()}
    for to in ("hf", "dcp"):
        save(model, f"{target}/{to}", to=to)
        _emptied(state)
        load(model, f"{target}/{to}")
        assert not _differing(model.state_dict(), truth)
    with pytest.raises(CheckpointException) as found:
        torch_saves(state, checkpoint_id=f"{target}/torch")
    torch_loads(_emptied(state), checkpoint_id=f"{target}/dcp")
    wrong = _differing(state, truth)
    torch_loads(as_runs(_emptied(state)), checkpoint_id=f"{target}/dcp")
    assert not _differing(state, truth)
    packed = {n for n, t in state.items() if isinstance(t, DTensor) and isinstance(t.placements[0], _StridedShard)}
    assert wrong == packed
    return packed, str(found.value)


@pytest.mark.parametrize("world", [2, 4])
def test_transformers_own_tensor_parallel(tmp_path: Path, world: int) -> None:
    """torch refuses to save the packed experts, and loads wrong rows into them; if this fails, torch has mended it."""
    given = source(tmp_path / "hub", {**MOE, "num_experts": 8})
    for packed, said in run(world, _tp_auto, given, str(tmp_path)):
        assert packed == {f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(2)}
        assert "Failed to validate global plan" in said
    truth, found = load_file(tmp_path / "hub" / hub.WEIGHTS), load_file(tmp_path / "hf" / hub.WEIGHTS)
    assert same(truth, found)


def _pipeline(rank: int, world: int, given: str, target: str) -> int:
    truth = load_file(Path(given, hub.WEIGHTS))
    model = build(LLAMA, PP, meta=True)
    report = load(model, given)
    assert report.unexpected == ()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, truth[name]), name
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if rank else 2e-3)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    save(model, target, to="hf", optimizer=optimizer)
    again = build(LLAMA, PP, meta=True)
    other = torch.optim.AdamW(again.parameters())
    load(again, target, optimizer=other)
    assert same(gathered(model, optimizer), gathered(again, other))
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    return len(model.state_dict())


def test_stages_have_settings_of_their_own(tmp_path: Path) -> None:
    given = source(tmp_path / "hub", LLAMA)
    counts = run(2, _pipeline, given, str(tmp_path / "out"))
    truth = load_file(Path(given, hub.WEIGHTS))
    assert sum(counts) == len(truth)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == truth.keys()
    with tx.open(tmp_path / "out") as checkpoint:
        groups = checkpoint.metadata["param_groups"]
    assert sorted(group["lr"] for group in groups) == [1e-3, 2e-3]


def _to_inference(rank: int, world: int) -> int:
    trainer = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ep_shard", "ep"))
    engine = init_device_mesh("cpu", (world,))
    experts = automodel()
    placed = {n: distribute_tensor(t, trainer, [Shard(1), Shard(0)], src_data_rank=None) for n, t in experts.items()}
    truth = {
        name: distribute_tensor(tensor, engine, [Shard(1) if "down" in name else Shard(0)], src_data_rank=None)
        for name, tensor in unstacked(experts).items()
    }
    target = {
        name: distribute_tensor(torch.full(tensor.shape, -1.0), engine, tensor.placements, src_data_rank=None)
        for name, tensor in truth.items()
    }
    report = reshard(placed, target, config=CONFIG)
    for name, tensor in target.items():
        assert torch.equal(tensor.to_local(), truth[name].to_local()), name
    return report.bytes_received


def test_from_trainer_to_inference(tmp_path: Path) -> None:
    assert all(count > 0 for count in run(4, _to_inference))


def _uneven(rank: int, world: int, folder: str) -> None:
    """10 experts over 4 ranks, 7 columns over 3: some ranks hold less than others."""
    mesh = init_device_mesh("cpu", (world,))
    values = torch.arange(10 * 4 * 7.0).reshape(10, 4, 7)
    for dim in (0, 2, -1):
        state = {"w": distribute_tensor(values.clone(), mesh, [Shard(dim)], src_data_rank=None)}
        truth = state["w"].to_local().clone()
        save(state, f"{folder}/{world}.{dim}", to="safetensors")
        state["w"].to_local().zero_()
        load(state, f"{folder}/{world}.{dim}")
        assert torch.equal(state["w"].to_local(), truth)
        assert torch.equal(load_file(f"{folder}/{world}.{dim}/model.safetensors")["w"], values)


@pytest.mark.parametrize("world", [3, 4])
def test_uneven_cuts(tmp_path: Path, world: int) -> None:
    run(world, _uneven, str(tmp_path))
