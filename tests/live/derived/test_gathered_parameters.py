"""Parameters that FSDP2 has gathered are freed with what is written into them, so nothing is loaded into these."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import transaxle as tx
from tests.live.ranks import run
from tests.live.topologies import full


def _gathered(rank: int, world: int, folder: str) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (model[0], model):
        fully_shard(module, mesh=init_device_mesh("cpu", (world,)), reshard_after_forward=False)
    tx.save(model, f"{folder}/out", to="safetensors:identity")
    wanted = {name: full(parameter) for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model(torch.ones(2, 4))
    state = dict(model.named_parameters())
    room = {name: torch.zeros(tensor.shape) for name, tensor in state.items()}
    calls: list[Callable[[], object]] = [
        lambda: tx.load(state, f"{folder}/out"),
        lambda: tx.save(state, f"{folder}/other", to="safetensors:identity"),
        lambda: tx.reshard(room, state),
        lambda: tx.Refit(room, state),
    ]
    said = []
    for call in calls:
        with pytest.raises(tx.TransaxleError, match="Give the model itself, or its state_dict") as found:
            call()
        said += [f"{each.code} {each.where.tensor}" for each in found.value.refusals]
    tx.load(model.state_dict(), f"{folder}/out")
    tx.load(dict(model.named_parameters()), f"{folder}/out")
    model(torch.ones(2, 4))
    model.state_dict()  # shards them again
    assert all(torch.equal(full(parameter), wanted[name]) for name, parameter in model.named_parameters())
    return said


def test_gathered_parameters_are_refused(tmp_path: object) -> None:
    names = [f"{layer}.{name}" for layer in (0, 1) for name in ("weight", "bias")]
    assert run(2, _gathered, str(tmp_path)) == [[f"UNSUPPORTED {name}" for name in names] * 4] * 2
