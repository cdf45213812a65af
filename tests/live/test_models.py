"""Real models under FSDP2: loaded from hub files, trained, saved, resumed at another topology."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.live.ranks import run
from tests.oracles import hub
from transaxle.live.load import load
from transaxle.live.save import save

LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False,
}  # fmt: skip
MOE = {
    "model_type": "qwen3_moe", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False,
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1,
}  # fmt: skip
STEPS = 3


def sharded(config: dict[str, Any], world: int, *, meta: bool) -> torch.nn.Module:
    """A model of these sizes, its layers under `fully_shard`."""
    with torch.device("meta" if meta else "cpu"):
        model: torch.nn.Module = hub.model(config, torch.float32)
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        tokens = torch.arange(24).reshape(2, 12) * (step + 1) % 96
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _train_and_save(rank: int, world: int, config: dict[str, Any], source: str, target: str, to: str) -> Any:
    model = sharded(config, world, meta=True)
    load(model, source)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, STEPS)
    save(model, target, to=to, optimizer=optimizer)
    names = {name: full(p) for name, p in model.state_dict().items()}
    moments = {
        f"{name}/{key}": full(value)
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }
    return names, moments, train(model, optimizer, 2)


def _resume(rank: int, world: int, config: dict[str, Any], source: str) -> Any:
    model = sharded(config, world, meta=True)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    load(model, source, optimizer=optimizer)
    names = {name: full(p) for name, p in model.state_dict().items()}
    moments = {
        f"{name}/{key}": full(value)
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }
    return names, moments, train(model, optimizer, 2)


@pytest.mark.parametrize("config", [LLAMA, MOE], ids=["llama", "qwen3_moe"])
@pytest.mark.parametrize("to", ["dcp", "hf", "dcp:torchtitan"])
def test_training_goes_on_at_another_world(tmp_path: Path, config: dict[str, Any], to: str) -> None:
    settings, tensors = hub.make(config, 0)
    source = tmp_path / "hub"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(settings))
    save_file({name: tensor.float() for name, tensor in tensors.items()}, source / hub.WEIGHTS)
    (names, moments, losses), *_ = run(4, _train_and_save, config, str(source), str(tmp_path / "out"), to)
    for world in (4, 2):
        (again, state, after), *_ = run(world, _resume, config, str(tmp_path / "out"))
        assert again.keys() == names.keys()
        assert all(torch.equal(again[n], names[n]) for n in names)
        assert state.keys() == moments.keys()
        assert all(torch.equal(state[n], moments[n]) for n in moments)
        assert after == (losses if world == 4 else pytest.approx(losses, rel=1e-5))


def _tied(rank: int, world: int, config: dict[str, Any], source: str, target: str, meta: bool) -> Any:
    model = sharded(config, world, meta=meta)
    load(model, source)
    save(model, target, to="hf")
    return {name: full(p) for name, p in model.state_dict().items()}


@pytest.mark.parametrize("meta", [True, False])
def test_tied_models_load_what_is_stored_once(tmp_path: Path, meta: bool) -> None:
    """A hub file has no `lm_head.weight` then; the model's state dict does."""
    settings, tensors = hub.make({**LLAMA, "tie_word_embeddings": True}, 1)
    source = tmp_path / "hub"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(settings))
    save_file({name: tensor.float() for name, tensor in tensors.items()}, source / hub.WEIGHTS)
    held, _ = run(2, _tied, {**LLAMA, "tie_word_embeddings": True}, str(source), str(tmp_path / "out"), meta)
    embedding = tensors["model.embed_tokens.weight"].float()
    assert torch.equal(held["lm_head.weight"], embedding)
    assert all(torch.equal(held[name], tensor.float()) for name, tensor in tensors.items())
    again = load_file(tmp_path / "out" / hub.WEIGHTS)
    assert again.keys() == tensors.keys()


def test_a_tie_stays_a_tie(tmp_path: Path) -> None:
    settings, tensors = hub.make({**LLAMA, "tie_word_embeddings": True}, 1)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file(tensors, tmp_path / hub.WEIGHTS)
    with torch.device("meta"):
        model = hub.model({**LLAMA, "tie_word_embeddings": True})
    load(model, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, tensors["model.embed_tokens.weight"])
