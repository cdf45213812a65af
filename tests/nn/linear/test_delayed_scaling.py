"""Delayed gradients of weights under FSDP2: those that FSDP2 itself gives, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.live.ranks import run
from tests.nn.layers import EXPERTS, SPLITS, layer, of_output, rows
from tests.quant.kinds import KINDS
from transaxle.errors import TransaxleError
from transaxle.nn import GroupedLinear

FORMS: dict[str, dict[str, Any]] = {
    "experts": {"out_features": 31},  # 16 and 15 rows on two ranks
    "packed": {"single_grouped_weight": True, "single_grouped_bias": True},
}
MESHES = {"shards": (2,), "replicas": (2, 1), "one replica": (1, 2)}


def _layer(form: str, kind: str | None, *, delay: bool) -> GroupedLinear:
    made = layer(
        in_features=32, params_dtype=torch.bfloat16 if kind else None, delay_wgrad_compute=delay, **FORMS[form]
    )
    return made.quantize_(KINDS[kind]) if kind else made


def _grads(made: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, one in made.named_parameters():
        grad = one.grad
        assert isinstance(one, DTensor)
        assert isinstance(grad, DTensor)
        assert (grad.placements, grad.device_mesh, grad.dtype) == (one.placements, one.device_mesh, one.dtype)
        found[name] = grad.full_tensor()
    return found


def _steps(made: GroupedLinear, rank: int) -> dict[str, torch.Tensor]:
    """Two microbatches of rows that only this rank has."""
    dtype = next(made.parameters()).dtype
    for step in range(2):
        x = rows(made, seed=10 * step + rank, dtype=dtype)
        made(x, SPLITS[4 * step]).backward(of_output((len(x), made.out_features), dtype, seed=rank))
        if made.delay_wgrad_compute and step == 0:
            assert all(one.grad is None for one in made.parameters())
            made.backward_dw()
    if made.delay_wgrad_compute:
        made.backward_dw()
    return _grads(made)


def _both_ways(rank: int, world: int, form: str, kind: str | None, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    found = {}
    for delay in (False, True):
        made = _layer(form, kind, delay=delay)
        fully_shard(made, mesh=mesh)
        found[delay] = _steps(made, rank)
    assert found[True].keys() == found[False].keys()
    for name, grad in found[True].items():
        assert grad.any()
        assert torch.equal(grad, found[False][name]), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [None, "mxfp8"])
@pytest.mark.parametrize("mesh", MESHES)
def test_they_are_those_of_fsdp2(form: str, kind: str | None, mesh: str) -> None:
    run(2, _both_ways, form, kind, MESHES[mesh])


def _with_experts(rank: int, world: int) -> None:
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    found: dict[bool, dict[str, torch.Tensor]] = {}
    for delay in (False, True):
        made = _layer("packed", None, delay=delay)
        for name, parameter in list(made.named_parameters()):
            setattr(made, name, nn.Parameter(distribute_tensor(parameter.detach(), root["ep"], [Shard(0)])))
        fully_shard(made, mesh=root["fsdp"])
        half = slice(2 * root["ep"].get_local_rank(), None)
        x = rows(made, seed=rank)
        made(x, SPLITS[4][half][: EXPERTS // 2]).backward(of_output((len(x), 24), torch.float32, seed=rank))
        made.backward_dw()
        found[delay] = {}
        for name, one in made.named_parameters():
            assert isinstance(one, DTensor)
            assert isinstance(one.grad, DTensor)
            assert one.grad.placements == one.placements
            found[delay][name] = one.grad.to_local()
    for name, grad in found[True].items():
        assert grad.any()
        assert torch.equal(grad, found[False][name]), name


def test_they_are_so_over_expert_parallelism() -> None:
    run(4, _with_experts)


def _with_ddp(rank: int, world: int) -> None:
    made = layer(delay_wgrad_compute=True)
    x = rows(made, seed=rank)
    with pytest.raises(TransaxleError, match="reduces gradients before backward_dw"):
        DistributedDataParallel(made)(x, SPLITS[0])
    model = nn.Sequential(nn.Linear(16, 16), made)
    ignored = [f"1.{name}" for name, _ in made.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    with DistributedDataParallel(model)._inside_ddp_forward():  # as its forward has it
        made(x, SPLITS[0]).sum().backward()
    made.backward_dw()
    assert made.weight0.grad.any()


def test_data_parallelism_that_would_miss_them_is_refused() -> None:
    run(2, _with_ddp)
