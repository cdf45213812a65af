"""torchtitan 0.3.0: its models with pictures, and their state-dict adapters.

`Qwen35StateDictAdapter` takes the files of the whole Qwen3.5 only, with its experts stacked and turned round. Its
module imports GPU kernels of flash-linear-attention; nothing here computes with them.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import nn

from tests.oracles import torchtitan_peer
from tests.oracles.hub import Config, Tensors
from tests.oracles.quiet import quiet

_ANY = {"weight": nn.init.normal_}
_KERNELS = (
    "fla",
    "fla.modules",
    "fla.modules.conv",
    "fla.modules.conv.triton",
    "fla.modules.conv.triton.ops",
    "fla.ops",
    "fla.ops.gated_delta_rule",
    "fla.ops.gated_delta_rule.chunk",
    "fla.ops.gated_delta_rule.fused_recurrent",
)
"""Modules of flash-linear-attention that torchtitan imports; they need a GPU."""


def from_hf(config: Config, files: Tensors) -> Tensors:
    """What the adapter makes of HF tensors: torchtitan's own model of this config has just these names and shapes."""
    with quiet():
        held: Tensors = _adapter(config).from_hf(dict(files))
        with torch.device("meta"):
            own = _configuration(config).build().state_dict()
    shapes = {name: tuple(value.shape) for name, value in own.items() if not name.endswith(torchtitan_peer.BUFFER)}
    assert {name: tuple(value.shape) for name, value in held.items()} == shapes
    return held


def to_hf(config: Config, held: Tensors) -> Tensors:
    """What the adapter makes of torchtitan's tensors."""
    with quiet():
        files: Tensors = _adapter(config).to_hf(dict(held))
    return files


@cache
def _qwen() -> Any:
    """torchtitan's package of Qwen3.5."""
    absent = [name for name in _KERNELS if name not in sys.modules]
    sys.modules.update({name: MagicMock() for name in absent})
    try:
        return import_module("torchtitan.models.qwen3_5")
    finally:
        for name in absent:
            del sys.modules[name]


def _adapter(config: Config) -> Any:
    return _qwen().Qwen35StateDictAdapter(_configuration(config), None)


def _configuration(config: Config) -> Any:
    """torchtitan's model config, built by its own helpers as its model registries do."""
    from torchtitan.models.common import Embedding, Linear

    text, vision = config["text_config"], config["vision_config"]
    width, vocabulary = text["hidden_size"], text["vocab_size"]
    tower = {
        "dim": vision["hidden_size"],
        "ffn_dim": vision["intermediate_size"],
        "num_layers": vision["depth"],
        "out_hidden_size": vision["out_hidden_size"],
    }
    alike = ("num_heads", "patch_size", "temporal_patch_size", "spatial_merge_size", "num_position_embeddings")
    qwen3_5 = _qwen()
    return qwen3_5.Qwen35Model.Config(
        dim=width,
        vocab_size=vocabulary,
        enable_weight_tying=config["tie_word_embeddings"],
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=width, param_init=_ANY),
        norm=qwen3_5._offset_norm(width),
        lm_head=Linear.Config(in_features=width, out_features=vocabulary, param_init=_ANY),
        layers=_layers(text),
        vision_encoder=qwen3_5._qwen35_vision_encoder_config(**tower, **{key: vision[key] for key in alike}),
    )


def _layers(text: Config) -> Any:
    qwen3_5 = _qwen()
    sizes = {
        "n_layers": text["num_hidden_layers"],
        "dim": text["hidden_size"],
        "n_heads": text["num_attention_heads"],
        "n_kv_heads": text["num_key_value_heads"],
        "head_dim": text["head_dim"],
        "rotary_dim": 4,
        "rope": qwen3_5.MRoPE.Config(dim=4, max_seq_len=64, theta=1e4, mrope_section=[1, 1, 0]),
        "n_key_heads": text["linear_num_key_heads"],
        "n_value_heads": text["linear_num_value_heads"],
        "key_head_dim": text["linear_key_head_dim"],
        "value_head_dim": text["linear_value_head_dim"],
        "full_attention_interval": text["layer_types"].index("full_attention") + 1,
        "attn_backend": "flex",
    }
    if "num_experts" not in text:
        return qwen3_5._build_qwen35_layers(hidden_dim=text["intermediate_size"], **sizes)
    return qwen3_5._build_qwen35_moe_layers(
        moe_hidden_dim=text["moe_intermediate_size"],
        shared_expert_hidden_dim=text["shared_expert_intermediate_size"],
        num_experts=text["num_experts"],
        top_k=text["num_experts_per_tok"],
        **sizes,
    )
