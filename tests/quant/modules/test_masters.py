"""Masters as an optimizer's state: found by torch, by Transaxle and by schedulers under the parameters' names."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import transaxle as tx
from tests.live.ranks import run
from tests.quant.training import SIX, built, bytes_of, equal, mesh_of, quantized_of, train, trainer
from transaxle.errors import TransaxleError
from transaxle.quant import MXFP8, DelayedScaling, Float8Block, MasterWeights, Quantizer, quantize_

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "AdamW fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "AdamW foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "SGD": partial(torch.optim.SGD, lr=1e-2),
    "SGD with momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, dampening=0.1),
}
kinds = pytest.mark.parametrize("kind", SIX)
makers = pytest.mark.parametrize("maker", OPTIMIZERS)


@makers
def test_masters_move_as_plain_parameters_do(maker: str) -> None:
    """Each step is that of the same optimizer on tensors of float32, given the same gradients."""
    model = built("mxfp8", None)
    optimizer = MasterWeights(model.parameters(), OPTIMIZERS[maker])
    twins = [master.detach().clone().requires_grad_() for master in optimizer.masters]
    other = OPTIMIZERS[maker](twins)
    weights = [parameter for name, parameter in model.named_parameters() if name in quantized_of(model)]
    for _ in range(3):
        for place, (weight, twin) in enumerate(zip(weights, twins, strict=True)):
            weight.grad = torch.full(weight.shape, 0.5 + place).bfloat16()
            twin.grad = weight.grad.float()
        optimizer.step()
        other.step()
    assert all(torch.equal(master, twin) for master, twin in zip(optimizer.masters, twins, strict=True))


@pytest.mark.parametrize(
    ("maker", "way"), [*((maker, "transaxle") for maker in OPTIMIZERS), ("AdamW", "torch"), ("SGD", "torch, full")]
)
def test_state_goes_to_a_fresh_optimizer(maker: str, way: str, tmp_path: Path) -> None:
    model, other = built("float8_block", None), built("float8_block", None, seed=1)
    optimizer = MasterWeights(model.parameters(), OPTIMIZERS[maker])
    fresh = MasterWeights(other.parameters(), OPTIMIZERS[maker])
    train(model, optimizer, range(3))
    x = torch.arange(8)[None]
    if way == "transaxle":
        tx.save(model, tmp_path / "saved", to="identity", optimizer=optimizer)
        tx.load(other, tmp_path / "saved", dialect="identity", optimizer=fresh)
    else:
        options = StateDictOptions(full_state_dict=way != "torch", cpu_offload=way != "torch")
        told: Any = get_optimizer_state_dict(model, optimizer, options=options)
        assert {name for name, state in told["state"].items() if "master" in state} == quantized_of(model).keys()
        set_model_state_dict(other, get_model_state_dict(model, options=options), options=options)
        set_optimizer_state_dict(other, fresh, copy.deepcopy(told), options=options)
    assert equal(bytes_of(model, optimizer), bytes_of(other, fresh))
    assert torch.equal(model(x), other(x))
    assert train(model, optimizer, range(3, 6)) == train(other, fresh, range(3, 6))
    assert equal(bytes_of(model, optimizer), bytes_of(other, fresh))


@kinds
def test_making_state_leaves_codes_and_masters_as_they_are(kind: str) -> None:
    """Torch makes state by a step at rate 0: after new codes were loaded it must not bring the old ones back."""
    model, other = built(kind, None), built(kind, None, seed=1)
    optimizer = trainer(model)
    model.load_state_dict(other.state_dict())
    before = bytes_of(model)
    state: Any = get_optimizer_state_dict(model, optimizer)
    assert equal(bytes_of(model), before)
    assert {"exp_avg", "exp_avg_sq", "step", "master"} == state["state"]["head.weight"].keys()


@pytest.mark.parametrize("recipe", [MXFP8(columnwise=True), Float8Block((1, 32)), DelayedScaling(length=4)], ids=repr)
def test_codes_of_what_is_frozen_stay_as_they_are(recipe: Quantizer) -> None:
    """Their own values, quantized again, have other codes, and another history."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    quantize_(model, recipe)
    model[0].requires_grad_(False)
    before = bytes_of(model)
    optimizer = MasterWeights(model.parameters(), OPTIMIZERS["AdamW"])
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    changed = {name for name, value in bytes_of(model).items() if not torch.equal(value, before[name])}
    assert {name.split(".")[0] for name in changed} == {"1"}


def test_groups_schedulers_and_closures() -> None:
    model = built("nvfp4", None)
    optimizer = trainer(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(model, optimizer, range(1))
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [5e-3, 5e-3]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    before = optimizer.masters[0].clone()

    def closure() -> float:
        loss = model(torch.arange(6)[None]).float().square().mean()
        loss.backward()
        return float(loss.item())

    optimizer.zero_grad()
    assert isinstance(optimizer.step(closure), float)
    moved = (optimizer.masters[0] - before * (1 - 5e-3 * 0.1)).abs().max().item()
    assert 0 < moved <= 5e-3 * 1.5  # AdamW goes about as far as the rate, which is the scheduler's
    added = torch.nn.Linear(48, 16).bfloat16()
    tx.quant.quantize_(added, SIX["nvfp4"])
    optimizer.add_param_group({"params": list(added.parameters()), "lr": 0.1})
    assert len(optimizer.masters) == 7
    assert optimizer.optimizer.param_groups[2]["lr"] == 0.1


def test_copies_and_pickles_have_masters_of_their_own() -> None:
    model = built("float8", None)
    optimizer = trainer(model)
    train(model, optimizer, range(2))
    other, copied = copy.deepcopy((model, optimizer))
    assert equal(bytes_of(model, optimizer), bytes_of(other, copied))
    kept = bytes_of(other, copied)
    train(model, optimizer, range(2, 3))
    assert equal(bytes_of(other, copied), kept)
    again, read = pickle.loads(pickle.dumps((other, copied)))  # noqa: S301 - our own
    assert train(other, copied, range(2, 4)) == train(again, read, range(2, 4))


def test_state_without_masters_and_of_other_parameters_is_refused() -> None:
    model = built("mxfp8", None)
    optimizer = trainer(model)
    train(model, optimizer, range(1))
    state = optimizer.state_dict()
    lacking = copy.deepcopy(state)
    del lacking["state"][1]["master"]
    cut = copy.deepcopy(state)
    cut["state"][1]["master"] = cut["state"][1]["master"][:5]
    strange = copy.deepcopy(state)
    strange["state"][0]["master"] = torch.zeros(3)  # of the embedding, which is not quantized
    kept = bytes_of(model, optimizer)
    for wrong, code in ((lacking, "MISSING_TENSOR"), (cut, "SHAPE_MISMATCH"), (strange, "UNEXPECTED_TENSOR")):
        with pytest.raises(TransaxleError) as refused:
            optimizer.load_state_dict(wrong)
        assert refused.value.code == code
    assert equal(bytes_of(model, optimizer), kept)


def _hybrid(rank: int, world: int, kind: str, folder: Path, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    model = built(kind, mesh)
    optimizer = trainer(model)
    train(model, optimizer, range(2))
    tx.save(model, folder, to="identity", optimizer=optimizer)
    states = [value for state in optimizer.states.values() for value in state.values()]
    assert all(tuple(value.device_mesh.shape) == shape for value in states if value.dim())
    return _unsharded(model)


def _unsharded(model: Any) -> dict[str, torch.Tensor]:
    return {name: entry.full_tensor().cpu() for name, entry in model.state_dict().items()}


def _one(rank: int, world: int, kind: str, folder: Path) -> dict[str, torch.Tensor]:
    model = built(kind, mesh_of(world), seed=2)
    tx.load(model, folder, dialect="identity", optimizer=trainer(model))
    return _unsharded(model)


@pytest.mark.parametrize("kind", ["float8 delayed", "nvfp4"])
def test_replicas_with_shard_groups_of_one(kind: str, tmp_path: Path) -> None:
    kept = run(2, _hybrid, kind, tmp_path / "saved", (2, 1))
    found = run(1, _one, kind, tmp_path / "saved")[0]
    for name, entry in kept[0].items():
        octets = [one[name].contiguous().view(torch.uint8) for one in (kept[0], kept[1], found)]
        assert torch.equal(octets[0], octets[1])
        assert torch.equal(octets[0], octets[2])
        assert entry.numel()
