"""Models that transformers has no class for: the hub's files are written from the shapes of their makers' code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.oracles.vllm_peer.model import DENSE, Model
from tests.oracles.vllm_peer.text import EXPERTS

_Shapes = Mapping[str, tuple[int, ...]]


def _in_layers(layers: Iterable[int], shapes: _Shapes) -> _Shapes:
    """Tensors that each of these layers has."""
    return {f"model.layers.{layer}.{name}": shape for layer in layers for name, shape in shapes.items()}


def _gated(name: str, width: int) -> _Shapes:
    """The three matrices of an MLP with a gate."""
    return {
        f"{name}.gate_proj.weight": (width, 128),
        f"{name}.up_proj.weight": (width, 128),
        f"{name}.down_proj.weight": (128, width),
    }


def _step_attention(heads: int) -> _Shapes:
    """Attention of Step-3.5, and the norms of its layer."""
    return {
        "input_layernorm.weight": (128,), "self_attn.q_proj.weight": (heads * 64, 128),
        "self_attn.k_proj.weight": (2 * 64, 128), "self_attn.v_proj.weight": (2 * 64, 128),
        "self_attn.o_proj.weight": (128, heads * 64), "self_attn.q_norm.weight": (64,),
        "self_attn.k_norm.weight": (64,), "self_attn.g_proj.weight": (heads, 128),
        "post_attention_layernorm.weight": (128,),
    }  # fmt: skip


_LING = {
    **DENSE, **EXPERTS, "model_type": "bailing_moe_v2", "num_shared_experts": 1, "first_k_dense_replace": 1,
    "use_qk_norm": True, "use_rmsnorm": True, "use_bias": False, "use_qkv_bias": False,
    "moe_router_enable_expert_bias": True, "score_function": "sigmoid", "n_group": 2, "topk_group": 1,
    "norm_topk_prob": True, "hidden_act": "silu", "embedding_dropout": 0.0, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
_LING_STORED = {
    "model.word_embeddings.weight": (90, 128),
    "model.norm.weight": (128,),
    "lm_head.weight": (90, 128),
    **_in_layers(
        range(2),
        {
            "input_layernorm.weight": (128,), "attention.query_key_value.weight": (12 * 64, 128),
            "attention.dense.weight": (128, 8 * 64), "attention.query_layernorm.weight": (64,),
            "attention.key_layernorm.weight": (64,), "post_attention_layernorm.weight": (128,),
        },
    ),
    **_in_layers([0], _gated("mlp", 96)),
    **_in_layers([1], {"mlp.gate.weight": (10, 128), "mlp.gate.expert_bias": (10,)}),
    **_in_layers([1], _gated("mlp.shared_experts", 24)),
    **_in_layers([1], {k: v for e in range(10) for k, v in _gated(f"mlp.experts.{e}", 24).items()}),
}  # fmt: skip
STEP = {
    **DENSE,
    "model_type": "step3p5",
    "num_attention_groups": 2,
    "moe_num_experts": 10,
    "moe_top_k": 2,
    "moe_intermediate_size": 24,
    "share_expert_dim": 40,
    "moe_layers_enum": "1",
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 32,
    "use_head_wise_attn_gate": True,
    "moe_router_activation": "sigmoid",
    "attention_other_setting": {
        "attention_type": "sliding_attention", "num_attention_heads": 12, "num_attention_groups": 2, "head_dim": 64,
    },
    "num_nextn_predict_layers": 0,
}  # fmt: skip
STEP_STORED = {
    "model.embed_tokens.weight": (90, 128), "model.norm.weight": (128,), "lm_head.weight": (90, 128),
    **_in_layers([0], _step_attention(8)), **_in_layers([1], _step_attention(12)),
    **_in_layers([0], _gated("mlp", 96)), **_in_layers([1], {"moe.gate.weight": (10, 128), "moe.router_bias": (10,)}),
    **_in_layers([1], {"moe.gate_proj.weight": (10, 24, 128), "moe.up_proj.weight": (10, 24, 128)}),
    **_in_layers([1], {"moe.down_proj.weight": (10, 128, 24)}), **_in_layers([1], _gated("share_expert", 40)),
}  # fmt: skip

REMOTE_CODE = {
    "bailing_moe_v2": Model("BailingMoeV2ForCausalLM", _LING, stored=_LING_STORED),
    "step3p5": Model("Step3p5ForCausalLM", STEP, stored=STEP_STORED),
}
"""Models of their makers' code."""
