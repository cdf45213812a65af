"""From tensor parallel a to b, directly and through files: what every rank gets is its part of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW

import transaxle as tx
from tests.live.ranks import run
from tests.parallel.models import CONFIGS, build
from transaxle.formats.deepspeed.keys import UNIVERSAL
from transaxle.live.model.state_tensors import leaves
from transaxle.live.optimizer_state import names_of, states_of
from transaxle.live.optimizers import unwrap_optimizers
from transaxle.parallel.cutting import cut_parameters
from transaxle.parallel.tensor_parallel import tensor_parallel
from transaxle.torch_tensors import local_of

DEGREES = (1, 3, 4)
FORMATS = {1: UNIVERSAL, 3: "safetensors", 4: "dcp"}
"""Degree -> what is saved there."""
OTHER = 5
"""Seed of the weights that are overwritten."""
STATES = ("exp_avg", "exp_avg_sq")
Tensors = dict[str, Tensor]


def _part(config: dict[str, Any], mesh: DeviceMesh, seed: int) -> nn.Module:
    """A model cut over the ranks of a mesh; one rank has it whole."""
    model = build(config, seed)
    return model if mesh.size() == 1 else tensor_parallel(model, mesh)


def _everything(config: dict[str, Any]) -> tuple[Tensors, Tensors]:
    """All weights, and all of AdamW's state: every moment another, and another step for each parameter."""
    weights = {name: value.detach() for name, value in build(config).named_parameters()}
    generator, states = torch.Generator().manual_seed(7), Tensors()
    for number, (name, value) in enumerate(weights.items()):
        states |= {f"optim/{name}/{key}": torch.rand(value.shape, generator=generator) for key in STATES}
        states[f"optim/{name}/step"] = torch.tensor(3.0 + number)
    return weights, states


def _of_one_step(states: Tensors) -> Tensors:
    """The same moments after as many steps everywhere, as DeepSpeed has them in a group."""
    return {name: torch.tensor(5.0) if name.endswith("/step") else value for name, value in states.items()}


def _cut(model: nn.Module, whole: Tensors) -> Tensors:
    """This rank's parts of whole tensors, by slices."""
    kept = {name: each for name, _, each in cut_parameters(model)}
    found = {}
    for name, value in whole.items():
        parameter = name.removeprefix("optim/").rpartition("/")[0] if name.startswith("optim/") else name
        found[name] = kept[parameter].take(value) if parameter in kept else value
    return found


def _held(model: nn.Module, optimizer: AdamW) -> Tensors:
    """What a rank has, for `tx.reshard`."""
    tensors = dict(leaves(model).tensors)
    optimizers = unwrap_optimizers(optimizer)
    return tensors | states_of(optimizers, names_of(optimizers, tensors))


def _put(model: nn.Module, optimizer: AdamW, states: Tensors) -> None:
    """Give an optimizer state, by hand."""
    mine = _cut(model, states)
    for name, parameter in model.named_parameters():
        for key in STATES:
            optimizer.state[parameter][key] = torch.zeros_like(parameter)
            local_of(optimizer.state[parameter][key]).copy_(mine[f"optim/{name}/{key}"])
        optimizer.state[parameter]["step"] = mine[f"optim/{name}/step"].clone()


def _wrong(model: nn.Module, held: Mapping[str, Tensor], whole: Tensors) -> list[str]:
    """Names of what a rank has that is not its part of the whole."""
    wanted = _cut(model, whole)
    assert wanted.keys() <= held.keys()
    return [name for name, value in wanted.items() if not torch.equal(local_of(held[name]), value)]


def _all_pairs(rank: int, world: int, config: dict[str, Any], out: str) -> dict[str, list[str]]:
    """Return what is wrong in the target of every pair, on this rank."""
    meshes = {degree: DeviceMesh("cpu", list(range(degree))) for degree in DEGREES}
    weights, everywhere = _everything(config)
    nothing = {name: torch.zeros_like(value) for name, value in everywhere.items()}
    found: dict[str, list[str]] = {}
    for a in DEGREES:
        states = _of_one_step(everywhere) if FORMATS[a] == UNIVERSAL else everywhere
        source: Tensors = {}
        if rank < a:
            model = _part(config, meshes[a], 0)
            optimizer = AdamW(model.parameters())
            _put(model, optimizer, states)
            tx.save(model, f"{out}/{a}", to=FORMATS[a], optimizer=optimizer, group=meshes[a].get_group())
            source = _held(model, optimizer)
        dist.barrier()
        for b in DEGREES:
            target: Tensors = {}
            taker = _part(config, meshes[b], OTHER) if rank < b else None
            if taker is not None:
                loaded = _part(config, meshes[b], OTHER)
                optimizer = AdamW(loaded.parameters())
                tx.load(loaded, f"{out}/{a}", optimizer=optimizer, group=meshes[b].get_group())
                found[f"{a} to {b}, saved"] = _wrong(loaded, _held(loaded, optimizer), weights | states)
                optimizer = AdamW(taker.parameters())
                _put(taker, optimizer, nothing)
                target = _held(taker, optimizer)
            tx.reshard(source, target, config=config)
            if taker is not None:
                found[f"{a} to {b}"] = _wrong(taker, target, weights | states)
    return found


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_every_degree_to_every_degree(kind: str, tmp_path: Path) -> None:
    config = CONFIGS[kind] | {"num_hidden_layers": 1}
    answers = run(4, _all_pairs, config, str(tmp_path))
    assert [len(each) for each in answers] == [18, 12, 12, 6]
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
    there, here = (_wrong(model, dict(model.named_parameters()), whole) for model in (source, target))
    return there, here if rank == 0 else [name]


def test_swapped_parts_are_seen() -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    assert run(2, _swapped, CONFIGS["llama"], name) == [([name], [name])] * 2
