"""The order of parameters: that of megatron-core's own models, and what Transformer Engine's modules register."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.oracles import megatron_peer
from transaxle.formats.megatron.rank_parameters import (
    Order,
    UnknownOrderError,
    has_experts,
    has_layers,
    is_trained,
    order_key,
)

_SIZES = {
    "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 48,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_DEEPSEEK = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "model_type": "llama", "head_dim": 12},
    "qwen2": {**_SIZES, "model_type": "qwen2"},
    "qwen3_moe": {**_SIZES, **_EXPERTS, "model_type": "qwen3_moe", "num_experts": 4, "head_dim": 12},
    "deepseek_v3": {**_SIZES, **_EXPERTS, **_LATENT, **_DEEPSEEK, "model_type": "deepseek_v3", "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1},
}  # fmt: skip

TRANSFORMER_ENGINE = (
    "embedding.word_embeddings.weight", "embedding.position_embeddings.weight",
    "decoder.layers.0.input_layernorm.weight", "decoder.layers.0.self_attention.core_attention.softmax_offset",
    "decoder.layers.0.self_attention.linear_proj.weight", "decoder.layers.0.self_attention.linear_proj.bias",
    "decoder.layers.0.self_attention.linear_q_down_proj.weight",
    "decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight",
    "decoder.layers.0.self_attention.linear_q_up_proj.weight",
    "decoder.layers.0.self_attention.linear_kv_down_proj.weight",
    "decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight",
    "decoder.layers.0.self_attention.linear_kv_up_proj.weight", "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.weight",
    "decoder.layers.1.self_attention.linear_proj.weight",
    "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
    "decoder.layers.1.self_attention.linear_qkv.layer_norm_bias", "decoder.layers.1.self_attention.linear_qkv.weight",
    "decoder.layers.1.self_attention.linear_qkv.bias", "decoder.layers.1.self_attention.q_layernorm.weight",
    "decoder.layers.1.self_attention.k_layernorm.weight", "decoder.layers.1.pre_mlp_layernorm.weight",
    "decoder.layers.1.mlp.router.weight", "decoder.layers.1.mlp.router.bias",
    "decoder.layers.1.mlp.experts.linear_fc1.weight0", "decoder.layers.1.mlp.experts.linear_fc1.bias0",
    "decoder.layers.1.mlp.experts.linear_fc1.weight1", "decoder.layers.1.mlp.experts.linear_fc1.bias1",
    "decoder.layers.1.mlp.experts.linear_fc2.weight0", "decoder.layers.1.mlp.experts.linear_fc2.bias0",
    "decoder.layers.1.mlp.experts.linear_fc2.weight1", "decoder.layers.1.mlp.experts.linear_fc2.bias1",
    "decoder.layers.1.mlp.shared_experts.gate_weight", "decoder.layers.1.mlp.shared_experts.linear_fc1.weight",
    "decoder.layers.1.mlp.shared_experts.linear_fc2.weight", "decoder.final_layernorm.weight",
    "mtp.layers.0.enorm.weight", "mtp.layers.0.hnorm.weight", "mtp.layers.0.eh_proj.weight",
    "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight",
    "mtp.layers.0.transformer_layer.self_attention.linear_qkv.layer_norm_weight",
    "mtp.layers.0.transformer_layer.mlp.experts.linear_fc1.weight0",
    "mtp.layers.0.transformer_layer.mlp.experts.linear_fc2.weight0", "mtp.layers.0.final_layernorm.weight",
    "output_layer.weight",
)  # fmt: skip
"""Parameters of models of megatron-core 0.19.2 with Transformer Engine's modules, as `named_parameters` has them."""


def _stored(name: str, *, stacked: bool) -> tuple[str, int | None, int | None]:
    """Stored name, layer and expert of one of Transformer Engine's parameters."""
    expert = re.fullmatch(r"(.*\.experts)(\.linear_fc[12]\.(?:weight|bias))(\d+)", name)
    number = None
    if expert:
        name, number = f"{expert[1]}.experts{expert[2]}", int(expert[3])
    layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    if layer and stacked:
        return f"decoder.layers.{layer[2]}", int(layer[1]), number
    return name, None, number


@pytest.mark.parametrize("stacked", [True, False], ids=["layers an axis", "layers in names"])
def test_modules_of_transformer_engine(*, stacked: bool) -> None:
    order = Order(norms_apart=False, grouped=True)
    keys = [order_key(*_stored(name, stacked=stacked), order) for name in TRANSFORMER_ENGINE]
    assert keys == sorted(set(keys))


@pytest.mark.peers
@pytest.mark.parametrize("name", MODELS)
def test_models_of_local_layers(name: str) -> None:
    order = Order(norms_apart=True, grouped=False)
    with megatron_peer.local_model(MODELS[name]) as model:
        stored = {id(sharded.data): sharded.key for sharded in model.sharded_state_dict().values()}
        keys = []
        for path, parameter in model.named_parameters():
            at = stored[id(parameter)]
            layer, expert = re.search(r"decoder\.layers\.(\d+)", path), re.search(r"local_experts\.(\d+)", path)
            assert is_trained(at)
            assert (layer is not None) == (has_layers(at) or "decoder.layers." in at)
            assert (expert is not None) == has_experts(at)
            of_layer = int(layer[1]) if layer and has_layers(at) else None
            keys.append(order_key(at, of_layer, int(expert[1]) if expert else None, order))
    assert keys == sorted(set(keys))


@pytest.mark.parametrize("name", ["decoder.layers.mixer.in_proj.weight", "vision.weight", "decoder.layers.-1.weight"])
def test_a_module_of_which_nothing_is_known(name: str) -> None:
    with pytest.raises(UnknownOrderError, match="is not known"):
        order_key(name, None, None, Order(norms_apart=False, grouped=True))
