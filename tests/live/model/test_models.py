"""Tied models: what is stored once is loaded under every name, and stays one parameter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.live.ranks import run
from tests.live.topologies import FSDP, LLAMA, MOE, build, full, source
from tests.oracles import hub
from transaxle.live.load import load
from transaxle.live.save import save

TIED = {**LLAMA, "tie_word_embeddings": True}


def _tied(rank: int, world: int, given: str, target: str, meta: bool) -> Any:
    model = build(TIED, FSDP, meta=meta)
    load(model, given)
    save(model, target, to="hf")
    return {name: full(p) for name, p in model.state_dict().items()}


@pytest.mark.parametrize("meta", [True, False])
def test_tied_models_load_what_is_stored_once(tmp_path: Path, meta: bool) -> None:
    """A hub file has no `lm_head.weight` then; the model's state dict does."""
    given = source(tmp_path / "hub", TIED)
    tensors = load_file(tmp_path / "hub" / hub.WEIGHTS)
    held, _ = run(2, _tied, given, str(tmp_path / "out"), meta)
    assert torch.equal(held["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert all(torch.equal(held[name], tensor) for name, tensor in tensors.items())
    again = load_file(tmp_path / "out" / hub.WEIGHTS)
    assert again.keys() == tensors.keys()


def test_a_tie_stays_a_tie(tmp_path: Path) -> None:
    settings, tensors = hub.make(TIED, 1)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file(tensors, tmp_path / hub.WEIGHTS)
    with torch.device("meta"):
        model = hub.model(TIED)
    load(model, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, tensors["model.embed_tokens.weight"])


def _state_of_tied(rank: int, world: int, target: str) -> None:
    config = {**MOE, "tie_word_embeddings": True}
    model = build(config, FSDP, meta=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    save(model, target, to="hf", optimizer=optimizer)
    other = build(config, FSDP, meta=False)
    loaded = torch.optim.AdamW(other.parameters())
    load(other, target, optimizer=loaded)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert optimizer.state[mine].keys() == loaded.state[its].keys()
        for key, value in optimizer.state[mine].items():
            assert torch.equal(full(value), full(loaded.state[its][key]))


def test_the_state_of_a_tied_parameter_follows_it_into_another_dialect(tmp_path: Path) -> None:
    """The model's dialect has a line for each of its names; the optimizer knows it by one."""
    run(2, _state_of_tied, str(tmp_path / "out"))
