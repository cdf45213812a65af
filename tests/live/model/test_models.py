"""Tied models: what is stored once is loaded under every name, and stays one parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import transaxle as tx
from tests.live.ranks import run
from tests.live.topologies import FSDP, LLAMA, MOE, build, full, source
from tests.oracles import hub
from transaxle.live.load import load
from transaxle.live.save import save

TIED = {**LLAMA, "tie_word_embeddings": True}


def _tied(rank: int, world: int, given: str, target: str) -> Any:
    model = build(TIED, FSDP, meta=True)
    load(model, given)
    save(model, target, to="hf")
    return {name: full(p) for name, p in model.state_dict().items()}


def test_tied_models_load_weights_that_are_stored_once(tmp_path: Path) -> None:
    """A hub file has no `lm_head.weight` then; the model's state dict does."""
    given = source(tmp_path / "hub", TIED)
    tensors = load_file(tmp_path / "hub" / hub.WEIGHTS)
    held, _ = run(2, _tied, given, str(tmp_path / "out"))
    assert torch.equal(held["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert all(torch.equal(held[name], tensor) for name, tensor in tensors.items())
    again = load_file(tmp_path / "out" / hub.WEIGHTS)
    assert again.keys() == tensors.keys()


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


def test_optimizer_state_of_a_tied_parameter_is_translated_to_another_dialect(tmp_path: Path) -> None:
    run(2, _state_of_tied, str(tmp_path / "out"))


# numpy's arrays in a state dict are tensors: saved as such, and filled in place.

TYPES = (np.float16, ml_dtypes.bfloat16, np.bool_, np.complex64)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_numpy_arrays_are_saved_and_filled_in_place(tmp_path: Path, dtype: Any) -> None:
    held: dict[str, Any] = {"a": {"w": np.arange(12).reshape(3, 4).astype(dtype)}, "t": torch.ones(2)}
    report = tx.save({**held, "column": held["a"]["w"][:, 1]}, tmp_path / "out", to="safetensors")
    assert report.tensors == 3
    room = np.zeros((4, 3), dtype)
    filled: dict[str, Any] = {"a": {"w": room.T}, "t": torch.zeros(2), "column": np.zeros((3, 2), dtype)[:, 0]}
    tx.load(filled, tmp_path / "out")
    assert room.T.tobytes() == held["a"]["w"].tobytes()
    assert filled["column"].tobytes() == held["a"]["w"][:, 1].tobytes()
    with tx.open(tmp_path / "out") as checkpoint:
        assert checkpoint["a.w"].tobytes() == held["a"]["w"].tobytes()
    tx.async_save(held, tmp_path / "later", to="safetensors").result()
    with tx.open(tmp_path / "later") as checkpoint:
        assert checkpoint["a.w"].tobytes() == held["a"]["w"].tobytes()


def test_numpy_arrays_that_cannot_be_filled_are_refused(tmp_path: Path) -> None:
    frozen = np.arange(4.0)
    frozen.flags.writeable = False
    tx.save({"w": frozen}, tmp_path / "out", to="safetensors")
    with pytest.raises(tx.TransaxleError, match="the array is read-only"):
        tx.load({"w": frozen}, tmp_path / "out")
    assert frozen.tolist() == [0, 1, 2, 3]
    for wrong in (np.arange(4.0)[::-1], np.arange(4, dtype=">f4"), np.arange(4, dtype=np.longdouble)):
        with pytest.raises(tx.TransaxleError, match="torch"):
            tx.load({"w": wrong}, tmp_path / "out")
        with pytest.raises(tx.TransaxleError, match="torch"):
            tx.save({"w": wrong}, tmp_path / "other", to="safetensors")
    with pytest.raises(tx.TransaxleError):
        tx.load({"w": np.zeros(5)}, tmp_path / "out")
    assert not (tmp_path / "other").exists()
