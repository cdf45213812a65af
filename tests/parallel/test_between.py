"""From tensor parallel a to b, directly and through files: what every rank gets is its part of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import transaxle as tx
from tests.live.ranks import run
from tests.parallel.models import CONFIGS, build
from transaxle.live.landing import local_of
from transaxle.parallel.cutting import everything
from transaxle.parallel.tensor_parallel import tensor_parallel

DEGREES = (1, 2, 3, 4)
OTHER = 5
"""Seed of the weights that are overwritten."""


def _part(config: dict[str, Any], mesh: DeviceMesh, seed: int) -> nn.Module:
    """A model cut over the ranks of a mesh; one rank has it whole."""
    model = build(config, seed)
    return model if mesh.size() == 1 else tensor_parallel(model, mesh)


def _wrong(model: nn.Module, whole: dict[str, Tensor]) -> list[str]:
    """Names of the parameters that are not this rank's part of the whole ones."""
    kept = {name: each for name, _, each in everything(model)}
    return [
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(local_of(parameter), kept[name].take(whole[name]) if name in kept else whole[name])
    ]


def _all_pairs(rank: int, world: int, config: dict[str, Any], out: str) -> dict[str, list[str]]:
    """Return what is wrong in the target of every pair, on this rank."""
    meshes = {degree: DeviceMesh("cpu", list(range(degree))) for degree in DEGREES}
    whole = {name: value.detach() for name, value in build(config).named_parameters()}
    found: dict[str, list[str]] = {}
    for a in DEGREES:
        source: nn.Module | dict[str, Tensor] = _part(config, meshes[a], 0) if rank < a else {}
        if rank < a:
            tx.save(source, f"{out}/{a}", to="hf", group=meshes[a].get_group())
        dist.barrier()
        for b in DEGREES:
            target: nn.Module | dict[str, Tensor] = _part(config, meshes[b], OTHER) if rank < b else {}
            tx.reshard(source, target)
            if isinstance(target, nn.Module):
                found[f"{a} to {b}"] = _wrong(target, whole)
                loaded = _part(config, meshes[b], OTHER)
                tx.load(loaded, f"{out}/{a}", group=meshes[b].get_group())
                found[f"{a} to {b}, saved"] = _wrong(loaded, whole)
    return found


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_every_degree_to_every_degree(kind: str, tmp_path: Path) -> None:
    answers = run(4, _all_pairs, CONFIGS[kind], str(tmp_path))
    assert [len(each) for each in answers] == [32, 24, 16, 8]
    assert all(wrong == [] for each in answers for wrong in each.values()), answers


def _swapped(rank: int, world: int, config: dict[str, Any], name: str) -> tuple[list[str], list[str]]:
    """Two ranks that have each other's part of a parameter: what they pass on is wrong, and that alone."""
    mesh = DeviceMesh("cpu", list(range(world)))
    whole = {name: value.detach() for name, value in build(config).named_parameters()}
    source, target = tensor_parallel(build(config), mesh), build(config, OTHER)
    own = local_of(source.get_parameter(name)).detach()
    theirs = torch.empty_like(own)
    requests = [dist.isend(own, 1 - rank), dist.irecv(theirs, 1 - rank)]
    for request in requests:
        assert request is not None
        request.wait()
    own.copy_(theirs)
    tx.reshard(source, target if rank == 0 else {})
    return _wrong(source, whole), _wrong(target, whole) if rank == 0 else [name]


def test_swapped_parts_are_seen() -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    assert run(2, _swapped, CONFIGS["llama"], name) == [([name], [name])] * 2
