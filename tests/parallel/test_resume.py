"""What a cut model saves, it resumes at any degree, to the bit; and so does one that is cut in another way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW

import transaxle as tx
from tests.live.ranks import run
from tests.parallel.models import CONFIGS, EVEN, build, shard, train
from transaxle.parallel.cutting import cut_parameters
from transaxle.torch_tensors import local_of

STEPS, MORE = 2, 3
WORLD = 4
"""Tensor-parallel ranks of the run that is resumed."""
STATES = ("exp_avg", "exp_avg_sq")
LR = 1e-2
HF, STATE, MODEL = "hf", "state", "model"


def _model(config: dict[str, Any], tp: int, dp: int, *, seed: int = 0, dtensor: bool = True) -> tuple[nn.Module, AdamW]:
    model = build(config, seed)
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        tx.parallel.tensor_parallel(model, mesh["tp"], dtensor=dtensor)
    if dp > 1:
        shard(model, mesh["dp"])
    return model, AdamW(model.parameters(), lr=LR)


def _put(model: nn.Module, optimizer: AdamW, whole: Mapping[str, Tensor]) -> None:
    """Start a cut model from whole tensors, by hand: nothing of ours loads them."""
    named = {name: (parameter, kept) for name, parameter, kept in cut_parameters(model)}
    for name, parameter in model.named_parameters():
        take = named[name][1].take if name in named else Tensor.clone
        local_of(parameter).copy_(take(whole[name]))
        for state in STATES:
            optimizer.state[parameter][state] = torch.zeros_like(parameter)
            local_of(optimizer.state[parameter][state]).copy_(take(whole[f"optim/{name}/{state}"]))
        optimizer.state[parameter]["step"] = torch.tensor(float(STEPS))


def _begin(rank: int, world: int, config: dict[str, Any], out: str, dtensor: bool) -> Any:
    model, optimizer = _model(config, world, 1, dtensor=dtensor)
    train(model, optimizer, config, range(STEPS))
    tx.save(model, f"{out}/{STATE}", to="safetensors", optimizer=optimizer)
    tx.save(model, f"{out}/dcp", to="dcp", optimizer=optimizer)
    tx.save(model, f"{out}/{HF}", to=HF)
    if dtensor:
        dcp_save(model.state_dict(), checkpoint_id=f"{out}/{MODEL}")
    mine = {name: local_of(parameter).clone() for name, parameter in model.named_parameters()}
    held = {name: kept.positions_by_rank for name, _, kept in cut_parameters(model)}
    dims = {name: kept.dim for name, _, kept in cut_parameters(model)}
    moments = {
        f"optim/{n}/{s}": local_of(optimizer.state[p][s]).clone() for n, p in model.named_parameters() for s in STATES
    }
    return mine | moments, held, dims, train(model, optimizer, config, range(STEPS, STEPS + MORE))


def _saved(folder: str | Path) -> dict[str, torch.Tensor]:
    """Read the model's file and the optimizer's."""
    return {name: t for file in Path(folder).rglob("*.safetensors") for name, t in load_file(file).items()}


def _check_state_dict(model: nn.Module, out: str) -> None:
    """What torch's own checkpoint saved of a state dict at another degree, it loads into that of this model."""
    state = model.state_dict()
    dcp_load(state, checkpoint_id=f"{out}/{MODEL}")
    model.load_state_dict(state)
    wanted = _saved(f"{out}/{STATE}")
    for name, parameter, kept in cut_parameters(model):
        assert torch.equal(local_of(parameter), kept.take(wanted[name])), name


def _resume(rank: int, world: int, config: dict[str, Any], out: str, tp: int, dtensor: bool) -> Any:
    """Load, save again, and go on; the same from tensors put there by hand."""
    model, optimizer = _model(config, tp, world // tp, seed=7, dtensor=dtensor)
    tx.load(model, f"{out}/dcp", optimizer=optimizer)
    again = f"{out}/again-{world}-{tp}"
    tx.save(model, again, to="safetensors", optimizer=optimizer)
    losses = train(model, optimizer, config, range(STEPS, STEPS + MORE))
    beside: list[float] = []
    if tp == world != WORLD:
        model, optimizer = _model(config, tp, 1, seed=8, dtensor=dtensor)
        with torch.no_grad():
            _put(model, optimizer, _saved(f"{out}/{STATE}"))
        beside = train(model, optimizer, config, range(STEPS, STEPS + MORE))
        if dtensor:
            _check_state_dict(_model(config, tp, 1, seed=9)[0], out)
    return again, losses, beside


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("kind", "dtensor"), [("even", True), ("llama", True), ("phi3", True), ("gemma3", False), ("mixtral", True)]
)
def test_training_goes_on_at_any_degree(kind: str, dtensor: bool, tmp_path: Path) -> None:
    config = EVEN if kind == "even" else CONFIGS[kind]
    answers = run(WORLD, _begin, config, str(tmp_path), dtensor)
    losses = answers[0][3]
    saved = _saved(tmp_path / STATE)
    for rank, (mine, held, dims, own) in enumerate(answers):
        assert own == losses
        for name, value in mine.items():  # what is in the file, taken apart by slices, is what the ranks had
            parameter = name.removeprefix("optim/").rpartition("/")[0] if name.startswith("optim/") else name
            spans = held[parameter][rank]
            parts = [saved[name].narrow(dims[parameter], start, stop - start) for start, stop in spans]
            assert torch.equal(torch.cat(parts, dims[parameter]), value), name
    told = {name for mine, *_ in answers for name in mine}
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set[str]()
    assert told | tied == {name for name in saved if not name.endswith("/step")}
    for world, tp in ((4, 4), (2, 2), (1, 1), (4, 2), (3, 3)) if kind == "llama" else ((4, 4), (2, 2), (4, 2)):
        again, after, beside = run(world, _resume, config, str(tmp_path), tp, dtensor)[0]
        loaded = _saved(again)
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        assert after == (losses if tp == WORLD else pytest.approx(losses, rel=1e-5))
        assert not beside or after == beside
    whole = build(config, 5)
    tx.load(whole, tmp_path / HF)
    assert all(torch.equal(value, saved[name]) for name, value in whole.named_parameters())
