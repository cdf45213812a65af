"""torchtitan 0.3.0: its own state-dict adapters and models, for the families it has.

Adapters: `Llama3StateDictAdapter` (RoPE-permuted q and k) and `Qwen3StateDictAdapter` (dense and MoE layers).
It has none for Qwen2, Mixtral and Step-3.5, and no name for any bias.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.oracles.hub import Config, Tensors
from tests.oracles.quiet import quiet

BUFFER = ".moe.expert_bias_E"
"""Load-balancing state, in torchtitan's own checkpoints and in no adapter."""

_LLAMA = "llama"
_OLDER = {
    ".attention.qkv_linear.": ".attention.",
    ".moe.routed_experts.inner_experts.w1_EFD": ".moe.experts.w1",
    ".moe.routed_experts.inner_experts.w2_EDF": ".moe.experts.w2",
    ".moe.routed_experts.inner_experts.w3_EFD": ".moe.experts.w3",
}
"""Names that differ in `from_hf_map` of the adapters of 0.2.0, 0.2.1 and 0.2.2; their layouts do not."""


def from_hf(config: Config, stored: Tensors) -> Tensors:
    """What the adapter makes of HF tensors."""
    with quiet():
        converted: Tensors = _adapter(config).from_hf(dict(stored))
    return converted


def to_hf(config: Config, native: Tensors) -> Tensors:
    """What the adapter makes of torchtitan's tensors."""
    with quiet():
        converted: Tensors = _adapter(config).to_hf(dict(native))
    return converted


def older(native: Tensors) -> Tensors:
    """The same tensors under the names of torchtitan 0.2."""
    renamed = {}
    for name, value in native.items():
        for new, old in _OLDER.items():
            name = name.replace(new, old)
        renamed["output.weight" if name == "lm_head.weight" else name] = value
    return renamed


def module(config: Config) -> Any:
    """torchtitan's own model of these sizes, on the meta device."""
    with quiet(), torch.device("meta"):
        return _configuration(config).build()


def _adapter(config: Config) -> Any:
    if config["model_type"] == _LLAMA:
        from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter as Adapter
    else:
        from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter as Adapter
    return Adapter(_configuration(config), None)


def _configuration(config: Config) -> Any:
    """torchtitan's model config, built by its own helpers as its model registries do."""
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.llama3.model import Llama3Model
    from torchtitan.models.qwen3.model import Qwen3Model

    init = {"weight": nn.init.normal_}
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    llama = config["model_type"] == _LLAMA
    rope = (ComplexRoPE if llama else CosSinRoPE).Config(dim=_head(config), max_seq_len=64, theta=1e4)
    return (Llama3Model if llama else Qwen3Model).Config(
        dim=width,
        vocab_size=vocabulary,
        enable_weight_tying=config["tie_word_embeddings"],
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=width, param_init=init),
        norm=RMSNorm.Config(normalized_shape=width, param_init=init),
        lm_head=Linear.Config(in_features=width, out_features=vocabulary, param_init=init),
        layers=[_layer(config, layer, rope) for layer in range(config["num_hidden_layers"])],
    )


def _layer(config: Config, layer: int, rope: Any) -> Any:
    from torchtitan.models.common import RMSNorm
    from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
    from torchtitan.models.llama3.model import Llama3TransformerBlock
    from torchtitan.models.qwen3.model import Qwen3TransformerBlock

    init = {"weight": nn.init.normal_}
    llama = config["model_type"] == _LLAMA
    norm = partial(RMSNorm.Config, param_init=init)
    width = config["hidden_size"]
    attention = make_gqa_config(
        dim=width,
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        head_dim=_head(config),
        wqkv_param_init=init,
        wo_param_init=init,
        inner_attention=get_attention_config("flex"),
        fuse_qkv=True,
        rope=rope,
        qk_norm=None if llama else norm(normalized_shape=_head(config)),
    )
    if _sparse(config, layer):
        mlp = {"moe": _moe(config)}
    else:
        ffn = make_ffn_config(
            dim=width, hidden_dim=config["intermediate_size"], w1_param_init=init, w2w3_param_init=init
        )
        mlp = {"feed_forward": ffn}
    block = Llama3TransformerBlock if llama else Qwen3TransformerBlock
    return block.Config(
        attention=attention,
        attention_norm=norm(normalized_shape=width),
        ffn_norm=norm(normalized_shape=width),
        **mlp,
    )


def _moe(config: Config) -> Any:
    from torchtitan.models.common.config_utils import (
        make_moe_config,
        make_routed_experts_config,
        make_router_config,
    )

    init = {"weight": nn.init.normal_}
    experts = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), nn.init.normal_)
    sizes = {
        "dim": config["hidden_size"],
        "num_experts": _experts(config),
        "top_k": config["num_experts_per_tok"],
    }
    return make_moe_config(
        num_experts=sizes["num_experts"],
        router=make_router_config(gate_param_init=init, score_func="softmax", route_norm=True, **sizes),
        routed_experts=make_routed_experts_config(
            hidden_dim=config["moe_intermediate_size"], param_init=experts, comm_backend="standard", **sizes
        ),
    )


def _experts(config: Config) -> int:
    return int(config.get("num_local_experts") or config.get("num_experts") or 0)


def _sparse(config: Config, layer: int) -> bool:
    """`Qwen3MoeDecoderLayer.__init__` of transformers: which layers hold experts."""
    return (
        _experts(config) > 0
        and layer not in config["mlp_only_layers"]
        and (layer + 1) % config["decoder_sparse_step"] == 0
    )


def _head(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
