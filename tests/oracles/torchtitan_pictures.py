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
from transaxle.readers.probes import titan_models

_ANY = {"weight": nn.init.normal_}
ADAPTERS = {
    "qwen3_5": ("qwen3_5", "Qwen35StateDictAdapter"),
    "qwen3_5_moe": ("qwen3_5", "Qwen35StateDictAdapter"),
    "kimi_k25": ("kimi_k2_7", "KimiK25StateDictAdapter"),
    "muse_glimmer": ("muse_glimmer", "MuseGlimmerStateDictAdapter"),
}
"""Model type -> torchtitan's package of it, and its adapter there."""
_KERNELS = (
    "fla", "fla.modules", "fla.modules.conv", "fla.modules.conv.triton", "fla.modules.conv.triton.ops", "fla.ops",
    "fla.ops.gated_delta_rule", "fla.ops.gated_delta_rule.chunk", "fla.ops.gated_delta_rule.fused_recurrent",
)  # fmt: skip
"""Modules of flash-linear-attention that torchtitan imports; they need a GPU."""


def from_hf(config: Config, files: Tensors) -> Tensors:
    """What the adapter makes of HF tensors: torchtitan's own model of this config has just these names and shapes."""
    with quiet():
        held: Tensors = _adapter(config).from_hf(dict(files))
        with torch.device("meta"):
            own = _configuration(config).build().state_dict()
    biases = {name for name in own if name.endswith(torchtitan_peer.BUFFER)} - held.keys()
    shapes = {name: tuple(value.shape) for name, value in own.items() if name not in biases}
    assert {name: tuple(value.shape) for name, value in held.items()} == shapes
    return held | {name: torch.zeros(own[name].shape) for name in biases}


def to_hf(config: Config, held: Tensors) -> Tensors:
    """What the adapter makes of torchtitan's tensors."""
    with quiet():
        files: Tensors = _adapter(config).to_hf(dict(held))
    return files


@cache
def _package(name: str) -> Any:
    absent = [kernels for kernels in _KERNELS if kernels not in sys.modules]
    sys.modules.update({kernels: MagicMock() for kernels in absent})
    try:
        return import_module(f"torchtitan.models.{name}")
    finally:
        for kernels in absent:
            del sys.modules[kernels]


def _adapter(config: Config) -> Any:
    package, name = ADAPTERS[config["model_type"]]
    return getattr(_package(package), name)(_configuration(config), None)


def _configuration(config: Config) -> Any:
    """torchtitan's model config, built by its own helpers as its model registries do."""
    package, _ = ADAPTERS[config["model_type"]]
    return {"qwen3_5": _qwen, "kimi_k2_7": _kimi, "muse_glimmer": _muse}[package](config)


def _ends(config: Config) -> dict[str, Any]:
    """The embedding and the head."""
    from torchtitan.models.common import Embedding, Linear

    width, vocabulary = config["text_config"]["hidden_size"], config["text_config"]["vocab_size"]
    return {
        "dim": width,
        "vocab_size": vocabulary,
        "enable_weight_tying": config["tie_word_embeddings"],
        "tok_embeddings": Embedding.Config(num_embeddings=vocabulary, embedding_dim=width, param_init=_ANY),
        "lm_head": Linear.Config(in_features=width, out_features=vocabulary, param_init=_ANY),
    }


def _qwen(config: Config) -> Any:
    qwen3_5 = _package("qwen3_5")
    vision = config["vision_config"]
    tower = {
        "dim": vision["hidden_size"],
        "ffn_dim": vision["intermediate_size"],
        "num_layers": vision["depth"],
        "out_hidden_size": vision["out_hidden_size"],
    }
    alike = ("num_heads", "patch_size", "temporal_patch_size", "spatial_merge_size", "num_position_embeddings")
    return qwen3_5.Qwen35Model.Config(
        **_ends(config),
        norm=qwen3_5._offset_norm(config["text_config"]["hidden_size"]),
        layers=_qwen_layers(config["text_config"]),
        vision_encoder=qwen3_5._qwen35_vision_encoder_config(**tower, **{key: vision[key] for key in alike}),
    )


def _qwen_layers(text: Config) -> Any:
    qwen3_5 = _package("qwen3_5")
    sizes = {
        "n_layers": text["num_hidden_layers"], "dim": text["hidden_size"], "n_heads": text["num_attention_heads"],
        "n_kv_heads": text["num_key_value_heads"], "head_dim": text["head_dim"], "rotary_dim": 4,
        "rope": qwen3_5.MRoPE.Config(dim=4, max_seq_len=64, theta=1e4, mrope_section=[1, 1, 0]),
        "n_key_heads": text["linear_num_key_heads"], "n_value_heads": text["linear_num_value_heads"],
        "key_head_dim": text["linear_key_head_dim"], "value_head_dim": text["linear_value_head_dim"],
        "full_attention_interval": text["layer_types"].index("full_attention") + 1, "attn_backend": "flex",
    }  # fmt: skip
    if "num_experts" not in text:
        return qwen3_5._build_qwen35_layers(hidden_dim=text["intermediate_size"], **sizes)
    return qwen3_5._build_qwen35_moe_layers(
        moe_hidden_dim=text["moe_intermediate_size"],
        shared_expert_hidden_dim=text["shared_expert_intermediate_size"],
        num_experts=text["num_experts"],
        top_k=text["num_experts_per_tok"],
        **sizes,
    )


def _kimi(config: Config) -> Any:
    from torchtitan.models.common import RMSNorm

    kimi, text, vision = _package("kimi_k2_7"), config["text_config"], config["vision_config"]
    _, layers = titan_models._deepseek(text)
    return kimi.KimiK25Model.Config(
        **_ends(config),
        norm=RMSNorm.Config(normalized_shape=text["hidden_size"], param_init=_ANY),
        layers=layers["layers"],
        vision_encoder=kimi._vision_encoder_config(
            dim=vision["hidden_size"], ffn_dim=vision["intermediate_size"], num_layers=vision["num_hidden_layers"],
            num_heads=vision["num_attention_heads"], init_pos_emb_height=vision["pos_emb_height"],
            init_pos_emb_width=vision["pos_emb_width"], text_hidden_size=text["hidden_size"],
            **{key: vision[key] for key in ("patch_size", "merge_kernel_size")},
        ),
    )  # fmt: skip


def _muse(config: Config) -> Any:
    muse, text, vision = _package("muse_glimmer"), config["text_config"], config["vision_config"]
    width = vision["hidden_size"]
    assert text["intermediate_size"] == 3 * text["hidden_size"]
    assert config["out_hidden_size"] == width * vision["merge_size"] ** 2
    tower = muse.muse_glimmer_vision_encoder_config(
        latent_dim=width, num_layers=vision["num_hidden_layers"], num_heads=vision["num_attention_heads"],
        mlp_ratio=vision["intermediate_size"] / width, downsample_factor=vision["merge_size"],
        pos_emb_grid_h=vision["pos_emb_height"], pos_emb_grid_w=vision["pos_emb_width"],
        **{key: vision[key] for key in ("patch_size", "patch_temporal")},
    )  # fmt: skip
    adapted = config["projector_hidden_size"]
    return muse._muse_glimmer_config(
        dim=text["hidden_size"], n_layers=text["num_hidden_layers"], n_heads=text["num_attention_heads"],
        n_kv_heads=text["num_key_value_heads"], head_dim=text["head_dim"], vocab_size=text["vocab_size"],
        max_seq_len=64, window_pattern=[4, 4, 4, 0], output_multiplier=1.0, attn_backend="flex",
        vision_adapter_dim=adapted, vision_encoder=tower,
        vision_adapter=muse.muse_glimmer_vision_adapter_config(input_dim=tower.output_dim, output_dim=adapted),
    )  # fmt: skip
