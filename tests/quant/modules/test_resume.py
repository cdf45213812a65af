"""Quantized runs that stop and go on: saved in every way, loaded at every degree, with the same bytes and losses."""

from __future__ import annotations

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

import transaxle as tx
from tests.live.ranks import run
from tests.quant.training import SIX, built, bytes_of, equal, inverted, mesh_of, started, train, trainer

kinds = pytest.mark.parametrize("kind", [kind for kind in SIX if kind != "float8"])
"""One for each encoding, and that which has a state beside: current scaling is delayed scaling without it."""
TRAINERS = 4
"""Ranks that trained before they saved."""
TRAINED, AFTER = range(5), range(5, 7)
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def _train_and_save(rank: int, world: int, kind: str, folder: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Save in every way; while what is asynchronous is on its way, everything is written over."""
    model = built(kind, mesh_of(world))
    optimizer = trainer(model)
    losses = train(model, optimizer, TRAINED)
    assert all(torch.isfinite(torch.tensor(losses)))
    kept = bytes_of(model, optimizer)
    tx.save(model, folder / "tx", to="identity", optimizer=optimizer)
    save(_state(model, optimizer), checkpoint_id=folder / "dcp")
    whole, training = (
        get_model_state_dict(model, options=FULL),
        get_optimizer_state_dict(model, optimizer, options=FULL),
    )
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
        held = [*model.state_dict().values()]
        assert report.converted == ()
        assert report.bytes_written == sum(_local_bytes(one) for one in [*held, *_states(optimizer)])
    elif way.startswith("dcp"):
        state = _state(model, optimizer)
        load(state, checkpoint_id=folder / way)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])
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


def _local_bytes(tensor: Any) -> int:
    return int(getattr(tensor, "_local_tensor", tensor).nbytes)


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
@kinds
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
            _state(model, optimizer),
            checkpoint_id=folder / kind,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        inverted(model)
        sent.result()  # type: ignore[union-attr]
    return found


def _after_process(rank: int, world: int, folder: Path, kept: dict[str, dict[str, torch.Tensor]]) -> None:
    for kind in BY_PROCESS:
        model = built(kind, mesh_of(world), seed=5)
        optimizer = trainer(model)
        state = _state(model, optimizer)
        load(state, checkpoint_id=folder / kind)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])
        assert equal(bytes_of(model, optimizer), kept[kind])


def test_a_process_of_its_own_saves_what_was_there(tmp_path: Path) -> None:
    kept = run(2, _by_process, tmp_path)[0]
    run(3, _after_process, tmp_path, kept)
