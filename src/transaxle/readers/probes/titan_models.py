"""torchtitan's own models and state-dict adapters for the sizes of a config.json.

torchtitan has a list of models with fixed sizes and no way from a config.json to one. Here its own helpers build the
config of a model as its lists do.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

Config = Mapping[str, Any]
_LLAMA, _QWEN, _DEEPSEEK, _OSS = "llama", "qwen3", "deepseek_v3", "gpt_oss"
FAMILIES = {
    _LLAMA: _LLAMA, _QWEN: _QWEN, "qwen3_moe": _QWEN, _DEEPSEEK: _DEEPSEEK, "deepseek_v2": _DEEPSEEK, _OSS: _OSS,
}  # fmt: skip
"""Model type -> the family of torchtitan's models that it is built from."""


def build(config: Config) -> Any:
    """Return torchtitan's model of these sizes, on the meta device."""
    with torch.device("meta"):
        return _configuration(config).build()


def adapter_of(config: Config, folder: str | None = None) -> Any:
    """Return torchtitan's state-dict adapter of a model of these sizes.

    Args:
        config: the content of config.json.
        folder: the folder of the files, from whose index the adapter takes the number of files.
    """
    family = FAMILIES[config["model_type"]]
    names = {_LLAMA: "Llama3", _QWEN: "Qwen3", _DEEPSEEK: "DeepSeekV3", _OSS: "GptOss"}
    package = "llama3" if family == _LLAMA else family
    module = import_module(f"torchtitan.models.{package}.state_dict_adapter")
    return getattr(module, f"{names[family]}StateDictAdapter")(_configuration(config), folder)


def _configuration(config: Config) -> Any:
    """Return torchtitan's model config, built by its own helpers as its model registries do."""
    from torchtitan.models.common import Embedding, Linear, RMSNorm

    init = {"weight": nn.init.normal_}
    width, vocabulary = config["hidden_size"], config["vocab_size"]
    model, layers = _LAYERS[FAMILIES[config["model_type"]]](config)
    return model(
        dim=width, vocab_size=vocabulary, enable_weight_tying=bool(config.get("tie_word_embeddings")),
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=width, param_init=init),
        norm=RMSNorm.Config(normalized_shape=width, param_init=init),
        lm_head=Linear.Config(in_features=width, out_features=vocabulary, param_init=init), **layers,
    )  # fmt: skip


def _llama(config: Config) -> tuple[Any, dict[str, Any]]:
    from torchtitan.models.common import ComplexRoPE
    from torchtitan.models.llama3.model import Llama3Model

    rope = ComplexRoPE.Config(dim=_head(config), max_seq_len=64, theta=1e4)
    return Llama3Model.Config, {"layers": [_layer(config, layer, rope) for layer in range(_depth(config))]}


def _qwen(config: Config) -> tuple[Any, dict[str, Any]]:
    from torchtitan.models.common import CosSinRoPE
    from torchtitan.models.qwen3.model import Qwen3Model

    rope = CosSinRoPE.Config(dim=_head(config), max_seq_len=64, theta=1e4)
    return Qwen3Model.Config, {"layers": [_layer(config, layer, rope) for layer in range(_depth(config))]}


def _deepseek(config: Config) -> tuple[Any, dict[str, Any]]:
    from torchtitan.models import deepseek_v3
    from torchtitan.models.common import ComplexRoPE

    keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    init = {"weight": nn.init.normal_}
    layers = deepseek_v3.build_mla_moe_layers(
        **{key: config[key] for key in keys}, q_lora_rank=config.get("q_lora_rank") or 0, n_layers=_depth(config),
        n_dense_layers=config["first_k_dense_replace"], dim=config["hidden_size"],
        n_heads=config["num_attention_heads"], mscale=1.0, dense_hidden_dim=config["intermediate_size"],
        moe_hidden_dim=config["moe_intermediate_size"], num_experts=config["n_routed_experts"],
        num_shared_experts=config["n_shared_experts"], router_top_k=config["num_experts_per_tok"],
        router_score_func="sigmoid", attn_backend="flex", moe_comm_backend="standard",
        non_blocking_capacity_factor=None, linear_init=init, norm_init=init, depth_init=lambda _: init,
        depth_experts_init=lambda _: dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), nn.init.normal_),
        rope=ComplexRoPE.Config(dim=config["qk_rope_head_dim"], max_seq_len=64, theta=1e4),
    )  # fmt: skip
    ahead = deepseek_v3._build_mtp_layers(
        layers[-1], dim=config["hidden_size"], num_mtp_layers=config.get("num_nextn_predict_layers") or 0
    )
    return deepseek_v3.DeepSeekV3Model.Config, {"layers": layers, "mtp_layers": ahead}


def _oss(config: Config) -> tuple[Any, dict[str, Any]]:
    """The layers of torchtitan's smallest gpt-oss, in other sizes."""
    from torchtitan.models import gpt_oss
    from torchtitan.models.common import CosSinRoPE

    rope = CosSinRoPE.Config(dim=_head(config), max_seq_len=64, theta=1e4)
    heads = {
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "head_dim": _head(config),
    }
    layers = gpt_oss._build_gptoss_layers(
        dim=config["hidden_size"], n_layers=_depth(config), hidden_dim=config["intermediate_size"],
        num_experts=_experts(config), top_k=config["num_experts_per_tok"], load_balance_coeff=1e-3,
        attn_backend="flex", moe_comm_backend="standard", rope=rope,
    )  # fmt: skip
    for number, layer in enumerate(layers):
        layer.attention = gpt_oss._make_gptoss_attn_config(
            dim=config["hidden_size"], layer_id=number, attn_backend="flex", rope=rope, **heads
        )
    return gpt_oss.GptOssModel.Config, {"layers": layers}


_LAYERS = {_LLAMA: _llama, _QWEN: _qwen, _DEEPSEEK: _deepseek, _OSS: _oss}


def _depth(config: Config) -> int:
    return int(config["num_hidden_layers"])


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
        dim=width, n_heads=config["num_attention_heads"], n_kv_heads=config["num_key_value_heads"],
        head_dim=_head(config), wqkv_param_init=init, wo_param_init=init,
        inner_attention=get_attention_config("flex"), fuse_qkv=True, rope=rope,
        qk_norm=None if llama else norm(normalized_shape=_head(config)),
    )  # fmt: skip
    if _sparse(config, layer):
        mlp = {"moe": _moe(config)}
    else:
        ffn = make_ffn_config(
            dim=width, hidden_dim=config["intermediate_size"], w1_param_init=init, w2w3_param_init=init
        )
        mlp = {"feed_forward": ffn}
    block = Llama3TransformerBlock if llama else Qwen3TransformerBlock
    return block.Config(
        attention=attention, attention_norm=norm(normalized_shape=width), ffn_norm=norm(normalized_shape=width), **mlp
    )


def _moe(config: Config) -> Any:
    from torchtitan.models.common.config_utils import make_moe_config, make_routed_experts_config, make_router_config

    init = {"weight": nn.init.normal_}
    experts = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), nn.init.normal_)
    sizes = {"dim": config["hidden_size"], "num_experts": _experts(config), "top_k": config["num_experts_per_tok"]}
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
        and layer not in config.get("mlp_only_layers", ())
        and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    )


def _head(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
