"""Gradients of weights that are delayed, or accumulated in `main_grad`; delayed ones under FSDP2 and DDP too."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.live.ranks import run
from tests.nn.layers import EXPERTS, SPLITS, expected, grad_of, layer, of_output, rows
from tests.quant.kinds import KINDS
from transaxle.errors import TransaxleError
from transaxle.nn import GroupedLinear

BIASES: dict[str, dict[str, bool]] = {
    "no bias": {"bias": False},
    "bias per expert": {"single_grouped_bias": False},
    "one bias": {"single_grouped_bias": True},
}
MICROBATCHES = ([3, 0, 5, 2], [0, 12, 0, 0])
TWO = 2.0


def _weights(made: GroupedLinear) -> list[torch.nn.Parameter]:
    return [parameter for name, parameter in made.named_parameters() if name.startswith("weight")]


def _summed(single: bool, biases: dict[str, bool]) -> dict[str, torch.Tensor]:
    """Gradients of the microbatches together, by the loop."""
    made = layer(single_grouped_weight=single, **biases)
    total: dict[str, torch.Tensor] = {}
    for seed, splits in enumerate(MICROBATCHES):
        for name, one in expected(made, rows(made, seed), splits, of_output((12, 24), torch.float32, seed)).items():
            total[name] = total[name] + one if name in total else one
    return total


@pytest.mark.parametrize("way", ["grouped", "per_expert"])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("biases", BIASES)
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("main", ["grad", "accumulate", "overwrite"])
def test_every_combination_equals_eager(main: str, delay: bool, biases: str, single: bool, way: Any) -> None:
    fuse = main != "grad"
    made = layer(
        single_grouped_weight=single, delay_wgrad_compute=delay, fuse_wgrad_accumulation=fuse, **BIASES[biases]
    ).force_path(way)
    weights: list[Any] = _weights(made)
    for one in weights:
        one.main_grad = torch.full(one.shape, TWO)
    for seed, splits in enumerate(MICROBATCHES):
        for one in weights:
            one.overwrite_main_grad = main == "overwrite" and seed == 0
        found = made(rows(made, seed), splits)
        found.backward(of_output(found.shape, found.dtype, seed))
    if delay:
        assert made.need_backward_dw()
        assert all(one.grad is None for one in made.parameters())
        assert all((one.main_grad == TWO).all() for one in weights)
        for seed, _ in enumerate(MICROBATCHES):
            for one in weights:
                one.overwrite_main_grad = main == "overwrite" and seed == 0
            made.backward_dw()
    wanted = _summed(single, BIASES[biases])
    for name, one in made.named_parameters():
        if fuse and name.startswith("weight"):
            assert one.grad is None
            base = TWO if main == "accumulate" else 0
            torch.testing.assert_close(one.main_grad, wanted[name] + base, rtol=1e-6, atol=1e-5)  # type: ignore[attr-defined]
        else:
            torch.testing.assert_close(grad_of(one), wanted[name], rtol=1e-6, atol=1e-5)


def test_backward_dw_twice_or_too_early_is_refused() -> None:
    made = layer(delay_wgrad_compute=True)
    with pytest.raises(TransaxleError, match="without a backward before it") as caught:
        made.backward_dw()
    assert caught.value.code == "UNSUPPORTED"
    found = made(rows(made), [3, 0, 5, 2])
    with pytest.raises(TransaxleError, match="without a backward before it"):
        made.backward_dw()  # out of order: there was only a forward
    found.sum().backward()
    made.backward_dw()
    before = [grad_of(one).clone() for one in made.parameters()]
    with pytest.raises(TransaxleError, match="without a backward before it"):
        made.backward_dw()
    assert all(torch.equal(one, grad_of(two)) for one, two in zip(before, made.parameters(), strict=True))
    now = layer()
    now.backward_dw()  # nothing is delayed, so there is nothing to do
    assert not now.need_backward_dw()


@pytest.mark.parametrize("changed", ["input", "grad"])
def test_gradients_that_come_later_refuse_what_has_changed_since(changed: str) -> None:
    made = layer(out_features=16, delay_wgrad_compute=True)
    x, grad = rows(made).detach(), of_output((12, 16), torch.float32)
    made(x, [3, 0, 5, 2]).backward(grad)
    (x if changed == "input" else grad).zero_()
    with pytest.raises(TransaxleError, match="changed in place after backward"):
        made.backward_dw()


def test_gradients_that_come_later_are_added_where_gradients_are() -> None:
    made = layer(delay_wgrad_compute=True)
    held = list(made.parameters())
    buffer = torch.ones(sum(one.numel() for one in held))
    for one, part in zip(held, buffer.split([one.numel() for one in held]), strict=True):
        one.grad = part.view(one.shape)
    x = rows(made)
    made(x, [3, 0, 5, 2]).backward(of_output((12, 24), torch.float32))
    made.backward_dw()
    wanted = expected(layer(), x, [3, 0, 5, 2])
    torch.testing.assert_close(buffer, torch.cat([wanted[name].flatten() + 1 for name, _ in made.named_parameters()]))


def test_pending_gradients_come_in_the_order_of_their_backwards() -> None:
    made = layer(bias=False, delay_wgrad_compute=True)
    results = [made(rows(made, seed), splits) for seed, splits in enumerate(MICROBATCHES)]
    for seed in (1, 0):
        results[seed].backward(of_output((12, 24), torch.float32, seed))
    wanted = [
        expected(layer(bias=False), rows(made, seed), splits, of_output((12, 24), torch.float32, seed))
        for seed, splits in enumerate(MICROBATCHES)
    ]
    made.backward_dw()
    assert torch.equal(made.weight1.grad, wanted[1]["weight1"])
    made.backward_dw()
    torch.testing.assert_close(made.weight0.grad, wanted[0]["weight0"] + wanted[1]["weight0"])


def test_main_grad_may_be_of_another_type_and_must_be_there() -> None:
    made = layer(params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True, bias=False)
    x = rows(made, dtype=torch.bfloat16)
    made.weight0.main_grad = torch.zeros(24, 16)
    with pytest.raises(TransaxleError, match=r"needs a main_grad of \[24, 16\], but there is none") as caught:
        made(x, [3, 0, 5, 2]).sum().backward()
    assert [one.where.tensor for one in caught.value.refusals] == ["weight1", "weight2", "weight3"]
    assert not made.weight0.main_grad.any()
    for one in made.parameters():
        one.main_grad = torch.zeros(one.shape)  # type: ignore[attr-defined]
    for _ in range(2):
        made(x, [3, 0, 5, 2]).backward(of_output((12, 24), torch.bfloat16))
    wanted = expected(layer(params_dtype=torch.bfloat16, bias=False), x, [3, 0, 5, 2])
    for name, one in made.named_parameters():
        assert torch.equal(one.main_grad, 2 * wanted[name].float())  # type: ignore[attr-defined]


@pytest.mark.parametrize("single", [False, True])
def test_megatron_is_told_that_the_gradient_is_there(single: bool) -> None:
    """Where a weight has `grad_added_to_main_grad`, its hooks have to run, and find zeros in `.grad`."""
    made = layer(fuse_wgrad_accumulation=True, single_grouped_weight=single)
    ran: list[torch.Tensor] = []
    for one in _weights(made):
        one.main_grad = torch.zeros(one.shape)  # type: ignore[attr-defined]
        one.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        one.register_post_accumulate_grad_hook(ran.append)
    made(rows(made), [3, 0, 5, 2]).sum().backward()
    assert len(ran) == (1 if single else EXPERTS)
    for one in _weights(made):
        assert one.grad_added_to_main_grad  # type: ignore[attr-defined]
        assert one.grad is not None
        assert not one.grad.any()
        assert one.main_grad.any() or not single  # type: ignore[attr-defined]


def test_a_copy_has_none_of_the_steps_in_progress() -> None:
    made = layer(delay_wgrad_compute=True)
    made(rows(made), [3, 0, 5, 2]).sum().backward()
    other = copy.deepcopy(made)
    with pytest.raises(TransaxleError, match="without a backward"):
        other.backward_dw()
    made.backward_dw()
    assert other.weight0.grad is None
    assert made.weight0.grad is not None


# Delayed gradients of weights under FSDP2: those that FSDP2 itself gives, on real ranks.

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


def _grads(made: nn.Module) -> Iterator[tuple[str, DTensor]]:
    for name, one in made.named_parameters():
        grad = one.grad
        assert isinstance(one, DTensor)
        assert isinstance(grad, DTensor)
        assert (grad.placements, grad.device_mesh, grad.dtype) == (one.placements, one.device_mesh, one.dtype)
        yield name, grad


def _are_equal(by_delay: dict[bool, dict[str, torch.Tensor]]) -> None:
    assert by_delay[True].keys() == by_delay[False].keys()
    for name, grad in by_delay[True].items():
        assert grad.any()
        assert torch.equal(grad, by_delay[False][name]), name


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
    return {name: grad.full_tensor() for name, grad in _grads(made)}


def _both_ways(rank: int, world: int, form: str, kind: str | None, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    found = {}
    for delay in (False, True):
        made = _layer(form, kind, delay=delay)
        fully_shard(made, mesh=mesh)
        found[delay] = _steps(made, rank)
    _are_equal(found)


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
        found[delay] = {name: grad.to_local() for name, grad in _grads(made)}
    _are_equal(found)


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
