"""Real models from topology to topology: weights and optimizer state stay the same bits, whatever holds them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import transaxle as tx
from tests.live.ranks import run
from tests.live.test_adapt import CONFIG, automodel
from tests.live.test_adapt import hub as unstacked
from tests.live.test_models import LLAMA as SMALL
from tests.live.test_models import MOE, full, train
from tests.oracles import hub
from transaxle.live.load import load
from transaxle.live.reshard import reshard
from transaxle.live.save import save

LLAMA = {**SMALL, "num_key_value_heads": 4}
PLAN = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def source(folder: Path, config: dict[str, Any]) -> str:
    """Hub files of a model with random weights."""
    settings, tensors = hub.make(config, 0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    save_file({name: tensor.float() for name, tensor in tensors.items()}, folder / hub.WEIGHTS)
    return str(folder)


def build(how: str, world: int) -> nn.Module:
    """A meta model under one of the topologies."""
    with torch.device("meta"):
        model: Any = hub.model(LLAMA, torch.float32)
    mesh: DeviceMesh | None = None
    if "tp" in how:
        both = how == "fsdp-tp"
        grid = init_device_mesh("cpu", (2, world // 2) if both else (1, world), mesh_dim_names=("dp", "tp"))
        for layer in model.model.layers:
            parallelize_module(layer, grid["tp"], PLAN)
        mesh = grid["dp"] if both else None
    elif how == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    elif how == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
    if mesh is not None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    found: nn.Module = model
    return found


def adamw(model: nn.Module) -> torch.optim.AdamW:
    named = dict(model.named_parameters())
    cold = [p for name, p in named.items() if "norm" in name]
    rest = [p for name, p in named.items() if "norm" not in name]
    return torch.optim.AdamW(
        [{"params": rest, "weight_decay": 0.2}, {"params": cold, "lr": 3e-3}], lr=1e-2, foreach=False
    )


def gathered(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All weights and all state in full."""
    found = {name: full(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = full(value)
    return found


def same(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[n].dtype == second[n].dtype and torch.equal(first[n], second[n]) for n in first
    )


def _start(rank: int, world: int, how: str, given: str, target: str) -> Any:
    model = build(how, world)
    load(model, given)
    optimizer = adamw(model)
    train(model, optimizer, 2)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    save(model, target, to="dcp", optimizer=optimizer)
    return gathered(model, optimizer)


def _resume(rank: int, world: int, how: str, given: str, target: str, to: str) -> Any:
    model = build(how, world)
    optimizer = adamw(model)
    load(model, given, optimizer=optimizer)
    save(model, target, to=to, optimizer=optimizer)
    found = gathered(model, optimizer)
    swapped = None
    cut = next((p for p in model.parameters() if isinstance(p, DTensor) and p.to_local().numel() < p.numel()), None)
    if cut is not None:
        local = cut.to_local()
        parts = [torch.empty_like(local) for _ in range(world)]
        torch.distributed.all_gather(parts, local.detach().contiguous())
        with torch.no_grad():
            local.copy_(parts[rank ^ (2 if torch.equal(parts[0], parts[1]) else 1)])
        swapped = same(found, gathered(model, optimizer))
        with torch.no_grad():
            local.copy_(parts[rank])
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return found, swapped, settings, train(model, optimizer, 2)


def test_from_topology_to_topology(tmp_path: Path) -> None:
    given = source(tmp_path / "hub", LLAMA)
    truth, *others = run(4, _start, "fsdp", given, str(tmp_path / "0"))
    assert all(same(truth, other) for other in others)
    losses = []
    steps = [("fsdp-tp", 4, "hf"), ("tp", 4, "dcp"), ("hsdp", 4, "dcp:torchtitan"), ("none", 1, "hf")]
    for number, (how, world, to) in enumerate(steps):
        answers = run(world, _resume, how, str(tmp_path / str(number)), str(tmp_path / str(number + 1)), to)
        for found, swapped, settings, after in answers:
            assert same(truth, found), how
            assert swapped is (None if world == 1 else False)
            assert [(g["lr"], g["weight_decay"]) for g in settings] == [(5e-3, 0.2), (1.5e-3, 0.01)]
            losses.append(after)
    for after in losses:
        assert after == pytest.approx(losses[-1], rel=1e-5)
    last = load_file(tmp_path / "4" / "model.safetensors")
    weights = {name: tensor for name, tensor in truth.items() if "/" not in name}
    assert all(torch.equal(last[name], tensor) for name, tensor in weights.items())


def _tp_auto(rank: int, world: int, given: str, target: str) -> list[str]:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    said: Any = DistributedConfig(tp_plan="auto", tp_size=world)
    model = AutoModelForCausalLM.from_pretrained(given, distributed_config=said, dtype=torch.float32)
    save(model, target, to="hf")
    state = model.state_dict()
    before = {
        name: tensor.to_local().clone() if isinstance(tensor, DTensor) else tensor.clone()
        for name, tensor in state.items()
    }
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load(model, target)
    for name, tensor in model.state_dict().items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(local, before[name]), name
    return sorted({str(p) for t in state.values() if isinstance(t, DTensor) for p in t.placements})


@pytest.mark.parametrize("world", [2, 4])
def test_transformers_own_tensor_parallel(tmp_path: Path, world: int) -> None:
    config = {**MOE, "num_attention_heads": 4, "num_key_value_heads": 4, "num_experts": 8}
    given = source(tmp_path / "hub", config)
    placements, *_ = run(world, _tp_auto, given, str(tmp_path / "out"))
    assert placements
    truth, found = load_file(tmp_path / "hub" / hub.WEIGHTS), load_file(tmp_path / "out" / "model.safetensors")
    assert truth.keys() == found.keys()
    for name, tensor in truth.items():
        assert torch.equal(found[name], tensor), name


def _stage(rank: int, world: int, *, meta: bool) -> Any:
    """The part of a model that a pipeline stage has: half of the layers, and one end."""
    with torch.device("meta" if meta else "cpu"):
        model: Any = hub.model(LLAMA, torch.float32)
    half = len(model.model.layers) // world
    for number in range(len(model.model.layers)):
        if number // half != rank:
            model.model.layers[number] = nn.Identity()
    if rank:
        model.model.embed_tokens = nn.Identity()
    else:
        model.model.norm, model.lm_head = nn.Identity(), nn.Identity()
    return model


def _pipeline(rank: int, world: int, given: str, target: str) -> int:
    truth = load_file(Path(given, hub.WEIGHTS))
    model = _stage(rank, world, meta=True)
    report = load(model, given, strict=False)
    assert report.missing == ()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, truth[name]), name
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if rank else 2e-3)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    save(model, target, to="hf", optimizer=optimizer)
    again = _stage(rank, world, meta=True)
    other = torch.optim.AdamW(again.parameters())
    load(again, target, optimizer=other)
    assert same(gathered(model, optimizer), gathered(again, other))
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    return len(model.state_dict())


def test_pipeline_stages(tmp_path: Path) -> None:
    given = source(tmp_path / "hub", LLAMA)
    counts = run(2, _pipeline, given, str(tmp_path / "out"))
    truth = load_file(Path(given, hub.WEIGHTS))
    assert sum(counts) == len(truth)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name for name in found if not name.startswith("optim/")} == truth.keys()
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
