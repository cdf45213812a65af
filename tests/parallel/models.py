"""Small models of every kind that is cut, of sizes that do not divide, with weights that are all different."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from tests.oracles import hub
from transaxle.parallel.cutting import cut_parameters
from transaxle.torch_tensors import local_of

SIZES = {
    "vocab_size": 97, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 6, "tie_word_embeddings": False, "pad_token_id": 5, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip
"""Query heads over 2, 3 and 4 ranks: 3 each; 2, 1 and 3; 2, 1, 2 and 1. Words over 3: 33, 33 and 31."""

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {**SIZES, "model_type": "qwen2", "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 48},
    "qwen3": {**SIZES, "model_type": "qwen3"},
    "phi3": {**SIZES, "model_type": "phi3"},
    "gemma3": {
        **SIZES, "model_type": "gemma3_text", "tie_word_embeddings": True, "query_pre_attn_scalar": 6,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4,
    },
    "mixtral": {
        **SIZES, "model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 56,
    },
}  # fmt: skip
EVEN: dict[str, Any] = {
    **SIZES, "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
"""Whatever is cut of it over 2 or 4 ranks is a DTensor."""
LENGTH = 10


def build(config: dict[str, Any], seed: int = 0) -> nn.Module:
    """The whole model, the same on every rank."""
    model: nn.Module = hub.model(config, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        scale = 0.2 if parameter.dim() > 1 else 0.5
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale + (parameter.dim() == 1))
    return model.train()


def tokens(config: dict[str, Any], step: int = 0) -> Tensor:
    """A batch, the same on every rank; the padding's row is among it."""
    generator = torch.Generator().manual_seed(900 + step)
    found = torch.randint(0, config["vocab_size"], (2, LENGTH), generator=generator)
    found[0, 3] = config["pad_token_id"]
    return found


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let FSDP2 share out each layer, and what is left."""
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def off(part: Tensor, whole: Tensor) -> float:
    """The largest difference, in units of the largest value."""
    return float((part - whole).abs().max()) / max(float(whole.abs().max()), 1e-12)


def gradients_off(cut: nn.Module, whole: nn.Module) -> dict[str, float]:
    """How far the gradients of what is cut are from parts of those of the whole model."""
    named, apart = dict(whole.named_parameters()), {}
    for name, parameter, kept in cut_parameters(cut):
        grad, of_whole = parameter.grad, named[name].grad
        assert grad is not None
        assert of_whole is not None
        apart[name] = off(local_of(grad), kept.take(of_whole))
    return apart


def beyond(apart: Mapping[str, float], limit: float) -> dict[str, float]:
    """Differences that are not below a limit, or no numbers."""
    return {name: value for name, value in apart.items() if not value < limit}


def train(model: nn.Module, optimizer: Optimizer, config: dict[str, Any], steps: range) -> list[float]:
    """Train on the batches of some steps; return their losses."""
    losses = []
    for step in steps:
        ids = tokens(config, step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
