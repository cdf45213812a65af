"""Master weights as optimizer state; quantized runs that are saved in every way and resumed at every degree."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torch.distributed.device_mesh import init_device_mesh

import transaxle as tx
from tests.live.ranks import run
from tests.quant.training import SIX, built, bytes_of, equal, inverted, mesh_of, quantized_of, started, train, trainer
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
    states: list[Any] = _states(optimizer)
    assert all(tuple(value.device_mesh.shape) == shape for value in states if value.dim())
    return _unsharded(model)


def _unsharded(model: Any) -> dict[str, torch.Tensor]:
    return {name: entry.full_tensor().cpu() for name, entry in model.state_dict().items()}


def _one(rank: int, world: int, kind: str, folder: Path) -> dict[str, torch.Tensor]:
    model = built(kind, mesh_of(world), seed=2)
    tx.load(model, folder, dialect="identity", optimizer=trainer(model))
    return _unsharded(model)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["float8 delayed", "nvfp4"])
def test_replicas_with_shard_groups_of_one(kind: str, tmp_path: Path) -> None:
    kept = run(2, _hybrid, kind, tmp_path / "saved", (2, 1))
    found = run(1, _one, kind, tmp_path / "saved")[0]
    for name, entry in kept[0].items():
        octets = [one[name].contiguous().view(torch.uint8) for one in (kept[0], kept[1], found)]
        assert torch.equal(octets[0], octets[1])
        assert torch.equal(octets[0], octets[2])
        assert entry.numel()


# Quantized runs that stop and go on: saved in every way, loaded at every degree, with the same bytes and losses.

encodings = pytest.mark.parametrize("kind", [kind for kind in SIX if kind != "float8"])
"""One for each encoding, and that which has a state beside: current scaling is delayed scaling without it."""
TRAINERS = 4
"""Ranks that trained before they saved."""
TRAINED, AFTER = range(3), range(3, 5)
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def _load_by_torch(model: Any, optimizer: Any, folder: Path) -> None:
    state = _state(model, optimizer)
    load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])


def _train_and_save(rank: int, world: int, kind: str, folder: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Save in every way; while what is asynchronous is on its way, everything is written over."""
    model = built(kind, mesh_of(world))
    optimizer = trainer(model)
    losses = train(model, optimizer, TRAINED)
    assert all(torch.isfinite(torch.tensor(losses)))
    kept = bytes_of(model, optimizer)
    tx.save(model, folder / "tx", to="identity", optimizer=optimizer)
    save(_state(model, optimizer), checkpoint_id=folder / "dcp")
    whole = get_model_state_dict(model, options=FULL)
    training = get_optimizer_state_dict(model, optimizer, options=FULL)
    if rank == 0:
        torch.save(whole, folder / "whole.pt")
        torch.save(training, folder / "training.pt")
    job = tx.async_save(model, folder / "tx async", to="identity", optimizer=optimizer)
    inverted(model)
    job.result()
    inverted(model)
    own = dist.new_group(backend="gloo")
    sent = async_save(_state(model, optimizer), checkpoint_id=folder / "dcp async", process_group=own)
    inverted(model)
    sent.result()  # type: ignore[union-attr]
    inverted(model)
    assert equal(bytes_of(model, optimizer), kept)
    return kept, train(model, optimizer, AFTER)


def _load(rank: int, world: int, kind: str, folder: Path, way: str) -> tuple[Any, Any]:
    """Return a run that was loaded in one of the ways."""
    model = built(kind, mesh_of(world), seed=1 + world)
    optimizer = trainer(model)
    if way.startswith("tx"):
        report = tx.load(model, folder / way, dialect="identity", optimizer=optimizer)
        entries: list[Any] = [*model.state_dict().values(), *_states(optimizer)]
        assert report.converted == ()
        assert report.bytes_written == sum(getattr(entry, "_local_tensor", entry).nbytes for entry in entries)
    elif way.startswith("dcp"):
        _load_by_torch(model, optimizer, folder / way)
    else:
        whole = torch.load(folder / way, weights_only=True)
        if kind == "nvfp4":  # of the others torch scatters the codes, and gloo scatters no float8
            set_model_state_dict(model, whole, options=FULL)
            inverted(model)
        tx.nn.load_state_dict(model, whole)
        training = torch.load(folder / "training.pt", weights_only=True)
        set_optimizer_state_dict(model, optimizer, training, options=FULL)
    return model, optimizer


def _states(optimizer: Any) -> list[torch.Tensor]:
    return [value for state in optimizer.states.values() for value in state.values()]


def _go_on(
    rank: int, world: int, kind: str, folder: Path, ways: list[str], kept: dict[str, torch.Tensor]
) -> tuple[list[float], list[float]]:
    """Load in several ways, which give the same bytes; return the losses that follow, and those of the same bytes."""
    losses = []
    for way in ways:
        model, optimizer = _load(rank, world, kind, folder, way)
        assert equal(bytes_of(model, optimizer), kept), way
        losses.append(train(model, optimizer, AFTER))
    assert all(one == losses[0] for one in losses)
    return losses[0], train(*started(kind, world, kept), AFTER) if world < TRAINERS else []


@pytest.mark.oracle
@encodings
def test_runs_go_on_at_any_degree(kind: str, tmp_path: Path) -> None:
    saved = run(TRAINERS, _train_and_save, kind, tmp_path)
    kept = saved[0][0]
    found = run(TRAINERS, _go_on, kind, tmp_path, ["tx", "dcp async"], kept)
    assert [losses for losses, _ in found] == [losses for _, losses in saved]
    for world, ways in ((2, ["tx async", "dcp"]), (3, ["whole.pt"])):
        for losses, of_the_same_bytes in run(world, _go_on, kind, tmp_path, ways, kept):
            assert losses == of_the_same_bytes
    # From degree to degree, each time through files.
    source = "tx"
    for number, world in enumerate((1, TRAINERS)):
        hop = f"tx hop {number}"
        run(world, _hop, kind, tmp_path, source, hop, kept)
        source = hop


def _hop(
    rank: int, world: int, kind: str, folder: Path, source: str, target: str, kept: dict[str, torch.Tensor]
) -> None:
    model, optimizer = _load(rank, world, kind, folder, source)
    assert equal(bytes_of(model, optimizer), kept)
    tx.save(model, folder / target, to="identity", optimizer=optimizer)


BY_PROCESS = ("float8 delayed", "nvfp4 training")


def _by_process(rank: int, world: int, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for kind in BY_PROCESS:
        model = built(kind, mesh_of(world))
        optimizer = trainer(model)
        train(model, optimizer, range(2))
        found[kind] = bytes_of(model, optimizer)
        sent = async_save(
            _state(model, optimizer), checkpoint_id=folder / kind, async_checkpointer_type=AsyncCheckpointerType.PROCESS
        )
        inverted(model)
        sent.result()  # type: ignore[union-attr]
    return found


def _after_process(rank: int, world: int, folder: Path, kept: dict[str, dict[str, torch.Tensor]]) -> None:
    for kind in BY_PROCESS:
        model = built(kind, mesh_of(world), seed=5)
        optimizer = trainer(model)
        _load_by_torch(model, optimizer, folder / kind)
        assert equal(bytes_of(model, optimizer), kept[kind])


def test_a_process_of_its_own_saves_what_was_there(tmp_path: Path) -> None:
    kept = run(2, _by_process, tmp_path)[0]
    run(3, _after_process, tmp_path, kept)
