"""The bytes that `transaxle plan` predicts for a refit are those that real ranks receive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import transaxle as tx
from tests.live.ranks import run
from tests.live.topologies import LLAMA, MOE, shard
from tests.oracles import hub
from transaxle.axes.geometry import Intervals, whole
from transaxle.engine.plan.rank_parts import engine_parts
from transaxle.engine.traffic import read_mesh, traffic
from transaxle.families import builtin
from transaxle.torch_tensors import Part, mark

TRAINERS, VLLM = 2, "vllm"
SURE = {"attention_bias": False, "mlp_bias": False, "mlp_only_layers": []}


def _engine(folder: str, config: dict[str, Any], tp: int, place: int) -> dict[str, torch.Tensor]:
    """What a rank of vLLM holds, empty."""
    with tx.open(folder) as checkpoint:
        shapes = {name: tuple(each.shape) for name, each in checkpoint.as_dialect(VLLM).items()}
    parts = engine_parts(builtin()[config["model_type"]], VLLM, config, shapes, tp=tp)
    found = {}
    for name, shape in shapes.items():
        held: list[Intervals] = [whole(size) for size in shape]
        part = parts[name]
        if part is not None:
            dim, positions = part
            held[dim] = positions[place]
        local = [sum(stop - start for start, stop in intervals) for intervals in held]
        found[name] = mark(torch.zeros(local, dtype=torch.bfloat16), Part(shape, tuple(held)))
    return found


def _pushed(rank: int, world: int, folder: str, config: dict[str, Any], layout: str) -> tuple[int, int]:
    """Push from a trainer of two ranks into an engine: on other ranks, on the same ones, or two copies of both."""
    begin = TRAINERS if layout == "apart" else 0
    mesh = DeviceMesh("cpu", torch.arange(TRAINERS))
    if layout == "copies":
        mesh = init_device_mesh("cpu", (2, TRAINERS), mesh_dim_names=("replicate", "shard"))
    model: Any = {}
    if begin == 0 or rank < TRAINERS:
        torch.manual_seed(0)
        model = hub.model(config, torch.float32)
        shard(model, mesh)
    engine = _engine(folder, config, 2, (rank - begin) % 2) if rank >= begin else {}
    with tx.Refit(model, engine, dtype="bf16", dialect=VLLM, family=config["model_type"]) as refit:
        report = refit.push()
    return report.bytes_received, report.bytes_needed


def test_every_rank_uses_its_own_copy(tmp_path: Path) -> None:
    config = {**LLAMA, **SURE}
    said, tensors = hub.make(config, 0)
    tx.save(tensors, tmp_path / "hub", config=said | config)
    received = run(2 * TRAINERS, _pushed, str(tmp_path / "hub"), config, "copies")
    meshes = read_mesh("transformers", f"replicate=2,fsdp={TRAINERS}"), read_mesh(VLLM, "replicas=2,tp=2")
    planned = traffic(builtin()["llama"], config, meshes, axes={}, together=True)
    assert [one for one, _ in received] == planned.between_ranks.sum(axis=0).tolist()
    apart = traffic(builtin()["llama"], config, meshes, axes={})
    assert (planned.matrix.sum(axis=0) == apart.matrix.sum(axis=0)).all()
    assert (planned.matrix >= 0).all()


@pytest.mark.parametrize("config", [LLAMA, MOE], ids=["llama", "moe"])
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "together"])
def test_every_rank_receives_what_was_planned(tmp_path: Path, config: dict[str, Any], apart: bool) -> None:
    config = {**config, **SURE}
    said, tensors = hub.make(config, 0)
    tx.save(tensors, tmp_path / "hub", config=said | config)
    world = TRAINERS + 2 if apart else TRAINERS
    received = run(world, _pushed, str(tmp_path / "hub"), config, "apart" if apart else "together")
    meshes = read_mesh("transformers", f"fsdp={TRAINERS}"), read_mesh(VLLM, "tp=2")
    family = builtin()[config["model_type"]]
    planned = traffic(family, config, meshes, axes={}, together=not apart)
    expected = planned.between_ranks.sum(axis=0).tolist()
    assert [one for one, _ in received] == ([0] * TRAINERS if apart else []) + expected
    assert json.loads(json.dumps(planned.as_json()))["received"] == expected
