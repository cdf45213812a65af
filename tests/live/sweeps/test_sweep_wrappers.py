"""Wrappers that need a process group: each is loaded exactly, or refused; part of the sweep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.live.ranks import run
from tests.live.sweeps.sweep import EXACT, Make, outcome
from tests.oracles.quiet import quiet


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def _sharded() -> nn.Module:
    model = _net()
    mesh = init_device_mesh("cpu", (1,))
    for module in (model[0], model):  # type: ignore[index]
        fully_shard(module, mesh=mesh)
    return model


def _accelerated() -> nn.Module:
    from accelerate import Accelerator

    model: nn.Module = Accelerator(cpu=True).prepare(_net())
    return model


def _experts() -> nn.Module:
    from deepspeed.moe.layer import MoE

    model: nn.Module = MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=1)
    return model


WRAPPERS: dict[str, Make] = {
    "DDP": lambda: DistributedDataParallel(_net()),
    "DDP inside": lambda: nn.ModuleDict({"one": DistributedDataParallel(_net())}),
    "compile of DDP": lambda: torch.compile(DistributedDataParallel(_net())),  # type: ignore[dict-item,return-value]
    "DDP of compile": lambda: DistributedDataParallel(torch.compile(_net())),
    "fully_shard": _sharded,
    "accelerate": _accelerated,
    "deepspeed MoE": _experts,
}


def _outcome(rank: int, world: int, name: str) -> Any:
    with quiet():
        return outcome(WRAPPERS[name])


@pytest.mark.oracle
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_of_a_process_group(name: str) -> None:
    assert run(1, _outcome, name) == [EXACT]


@pytest.mark.parametrize("name", ["DDP inside", "fully_shard"])
def test_some_wrappers_of_a_process_group(name: str) -> None:
    assert run(1, _outcome, name) == [EXACT]
