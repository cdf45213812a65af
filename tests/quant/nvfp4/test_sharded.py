"""NVFP4 training on two and four ranks has the bits of one rank: under FSDP2, tensor and expert parallelism."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from tests.live.ranks import run
from tests.quant.kinds import raw
from tests.quant.nvfp4.test_products import drawn
from tests.quant.training import bytes_of, equal
from tests.some import some
from transaxle.errors import TransaxleError
from transaxle.nn import GroupedLinear
from transaxle.quant import MasterWeights, NVFP4BlockScaling, batch_over, quantize_

worlds = pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.oracle)])
EXPERTS = 7
WIDTH, INNER = 32, 48


class Net(nn.Module):
    """A linear layer, experts in one parameter and in one each, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, INNER)
        self.stack = GroupedLinear(EXPERTS, INNER, WIDTH, single_grouped_weight=True)
        self.each = GroupedLinear(EXPERTS, WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, 16]."""
        splits = [len(x) - 20, 0, 7, 6, 0, 7, 0]
        made: torch.Tensor = self.last(self.each(functional.gelu(self.stack(self.first(x), splits)), splits))
        return made


def _trained(model: nn.Module, steps: int = 3) -> MasterWeights:
    """Train with two microbatches in a step."""
    optimizer = MasterWeights(model.parameters(), partial(torch.optim.AdamW, lr=1e-2))
    for step in range(steps):
        for part in range(2):
            x = drawn(40, WIDTH, seed=10 * step + part, dtype=torch.float32)
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _net(mesh: Any, recipe: NVFP4BlockScaling, **options: Any) -> nn.Module:
    model = Net()
    quantize_(model, recipe)
    if mesh is not None:
        fully_shard(model.stack, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
    return model


def _fsdp(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    two = NVFP4BlockScaling(seed=3), NVFP4BlockScaling(disable_2d_quantization=True)
    for recipe, options in zip(two, ({}, {"reshard_after_forward": False}), strict=True):
        alone = _net(None, recipe)
        wanted = _alone(alone, _trained(alone))
        model = _net(mesh, recipe, **options)
        optimizer = _trained(model)
        assert equal(bytes_of(model, optimizer), wanted)
        counted = [each for name, each in model.state_dict().items() if name.endswith("rounding_state")]
        assert len(counted) == 3 + EXPERTS
        for each in counted:
            local = each.to_local() if isinstance(each, DTensor) else each
            assert local.view(-1, 2)[:, 1].tolist() == [6] * (local.numel() // 2)


def _alone(model: nn.Module, optimizer: MasterWeights) -> dict[str, torch.Tensor]:
    """What a run on one rank holds, as `bytes_of` gives what ranks hold."""
    found = {name: raw(each).clone() for name, each in model.state_dict().items()}
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.states.items():
        found |= {f"{names[parameter]} {key}": raw(value) for key, value in state.items()}
    return found


@pytest.mark.oracle
@worlds
def test_fsdp_trains_as_one_rank(world: int) -> None:
    """Weights, masters, moments and states: ranks with the same rows, whose mean of equal gradients is exact."""
    run(world, _fsdp)


def _gradients(weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    given = x.clone().requires_grad_()
    output = functional.linear(given, weight)
    return (output.detach(), *torch.autograd.grad(output, [given, weight], grad))


def _all() -> dist.ProcessGroup:
    return some(dist.group.WORLD)


def _divided(rank: int, world: int, single: bool) -> None:
    def layer() -> GroupedLinear:
        torch.manual_seed(1)
        return GroupedLinear(EXPERTS, WIDTH, INNER, single_grouped_weight=single)

    splits, recipe = [9, 0, 18, 3, 8, 0, 2], NVFP4BlockScaling(seed=1)
    whole = layer().quantize_(recipe)
    own = layer().divide(init_device_mesh("cpu", (world,))).quantize_(recipe)
    ends = torch.tensor([0, *splits]).cumsum(0)
    rows = slice(int(ends[own.experts.start]), int(ends[own.experts.stop]))
    for call in range(2):
        x, grad = drawn(40, WIDTH, seed=call, dtype=torch.float32), drawn(40, INNER, seed=5 + call, dtype=torch.float32)
        given, mine = x.clone().requires_grad_(), x[rows].clone().requires_grad_()
        wanted, output = whole(given, splits), own(mine, splits[own.experts.start : own.experts.stop])
        wanted.backward(grad)
        output.backward(grad[rows])
        assert torch.equal(output, wanted[rows])
        assert torch.equal(some(mine.grad), some(given.grad)[rows])
    for name, parameter in own.named_parameters():
        if not name.startswith("weight"):
            continue
        other = some(whole.get_parameter(name).grad)
        if parameter.grad is None:
            assert not own.experts
            continue
        local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        assert torch.equal(local, other[own.experts.start : own.experts.stop] if single else other)


@pytest.mark.oracle
@worlds
@pytest.mark.parametrize("single", [False, True])
def test_divided_experts_are_those_of_the_whole(world: int, single: bool) -> None:
    """Of four ranks the last has fewer; random numbers are the experts'."""
    run(world, _divided, single)


def _batch(rank: int, world: int) -> None:
    recipe = NVFP4BlockScaling()
    layer = nn.Linear(WIDTH, INNER, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(drawn(INNER, WIDTH, seed=0))
    quantize_(layer, recipe)
    experts = GroupedLinear(2, WIDTH, INNER, params_dtype=torch.bfloat16, recipe=recipe, bias=False)
    rows = 32 * world
    x, grad = drawn(rows, WIDTH, seed=1), drawn(rows, INNER, seed=2)
    mine = slice(32 * rank, 32 * rank + 32)
    weight: Any = layer.weight
    state = weight.state["rounding_state"].clone()
    wanted = _gradients(layer.weight, x, grad)
    weight.state["rounding_state"].copy_(state)
    with batch_over(_all()):
        own = x[mine].clone().requires_grad_()
        output = layer(own)
    of_x, of_weight = torch.autograd.grad(output, [own, layer.weight], grad[mine])
    assert torch.equal(output, wanted[0][mine])
    assert torch.equal(of_x, wanted[1][mine])
    total = of_weight.double()
    dist.all_reduce(total)
    assert torch.allclose(total, wanted[2].double(), rtol=2**-6, atol=2**-6 * wanted[2].abs().max().item())
    lone = layer(x[mine].clone())
    assert not torch.equal(lone, output) or bool((x[mine].abs().max() == x.abs().max()).item())
    # Experts: each rank has the rows of both, here without any of the second on the first rank.
    counts = [[32, 0] if place == 0 else [16, 16] for place in range(world)]
    spans = [(32 * place, 32 * place + counts[place][0]) for place in range(world)]
    spans += [(32 * place + counts[place][0], 32 * place + 32) for place in range(world)]
    order = [row for start, stop in spans for row in range(start, stop)]
    given = x[order].clone().requires_grad_()
    whole = experts(given, [sum(count[expert] for count in counts) for expert in range(2)])
    (of_given,) = torch.autograd.grad(whole, given, grad[order])
    for expert in (experts.weight0, experts.weight1):
        held: Any = expert
        held.state["rounding_state"][1] = 0
    with batch_over(_all()):
        own = x[mine].clone().requires_grad_()
        output = experts(own, counts[rank])
    (of_own,) = torch.autograd.grad(output, own, grad[mine])
    places = torch.tensor([order.index(row) for row in range(mine.start, mine.stop)])
    assert torch.equal(output, whole[places])
    assert torch.equal(of_own, of_given[places])


@worlds
def test_rows_of_one_batch_are_quantized_together(world: int) -> None:
    """`batch_over`: outputs and gradients of inputs are those of one rank that has all rows."""
    run(world, _batch)


def test_a_batch_without_its_ranks_and_shards_are_refused() -> None:
    """Shards are some rows of a weight, as FSDP2 leaves them between steps."""
    with pytest.raises(TransaxleError, match="needs the ranks"), batch_over(None):  # type: ignore[arg-type]
        pass
    part = NVFP4BlockScaling().quantize(drawn(32, WIDTH, seed=0))[:16].clone()
    with pytest.raises(TransaxleError, match="cannot be multiplied"):
        functional.linear(drawn(4, WIDTH, seed=1), part)
