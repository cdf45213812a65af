"""The models that go through Megatron-Bridge, as data: every axis its own size, two or more of each family."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]

SILENT = "silent"
"""A fault without an error."""


@dataclass(frozen=True)
class Model:
    """One model."""

    config: Config
    """What its config.json says."""
    provider: Mapping[str, Any] = field(default_factory=dict)
    """What Megatron is told otherwise: kernels that a CPU has not."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Names that transformers 5.12 stores -> those on the hub."""
    fault: str = ""
    """What Megatron-Bridge does wrong with it: a part of its error, or `SILENT`."""


_DENSE: Config = {
    "hidden_size": 40, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 46, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_TIED = {"tie_word_embeddings": True}
_FOUR = {"num_key_value_heads": 4}
_EXPERTS = {"num_experts": 6, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24}
_FEWER = {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 20}
_WITHOUT_HEAD_DIM = {key: value for key, value in _DENSE.items() if key != "head_dim"}
_BALANCED = {
    "n_routed_experts": 6, "n_shared_experts": 1, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
_LATENT = {
    **_WITHOUT_HEAD_DIM, **_BALANCED, "n_shared_experts": 2, "num_key_value_heads": 8, "q_lora_rank": 14,
    "kv_lora_rank": 18, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12,
}  # fmt: skip
_REMOTE = {"rope_theta": 1e4, "rms_norm_eps": 1e-6, "hidden_act": "silu", "initializer_range": 0.02}
"""Keys with a default in configs that transformers does not know."""
_NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "full_attention_interval": 3,
}  # fmt: skip
_OTHER_NET = {**_FOUR, "linear_num_key_heads": 3}
_NET_EXPERTS = {**_NET, **_EXPERTS, "shared_expert_intermediate_size": 28}
_ONE_AHEAD = {"mtp_num_hidden_layers": 1, "num_nextn_predict_layers": 1}
_FALCON = {
    "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 12,
    "mamba_d_conv": 4, "mamba_chunk_size": 16, "mamba_norm_before_gate": False,
}  # fmt: skip
_HYBRID = {
    "hybrid_override_pattern": "M*E-", "layers_block_type": ["mamba", "attention", "moe", "mlp"],
    "num_hidden_layers": 4, "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 12,
    "conv_kernel": 4, "n_routed_experts": 6, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 28,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "expand": 1, "chunk_size": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_HY = {"first_k_dense_replace": 1, "moe_router_enable_expert_bias": True}
_ERNIE = {
    "moe_num_experts": 6, "moe_intermediate_size": 24, "moe_k": 2, "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_layer_interval": 1,
}  # fmt: skip
_MIMO = {
    **_REMOTE, **_BALANCED, "n_shared_experts": None, "v_head_dim": 6, "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4, "swa_head_dim": 10, "swa_v_head_dim": 6, "swa_rope_theta": 1e4,
    "sliding_window_size": 16, "layernorm_epsilon": 1e-6, "attention_value_scale": 1.0, "scoring_func": "sigmoid",
    "hybrid_layer_pattern": [0, 1, 0], "moe_layer_freq": [0, 1, 1],
}  # fmt: skip
_LING = {
    **_REMOTE, **_BALANCED, **_EXPERTS, "num_shared_experts": 1, "use_qk_norm": True,
    "moe_router_enable_expert_bias": True, "rotary_dim": 4,
}  # fmt: skip
_INDEXED = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 4, "indexer_rope_interleave": True}
_NO_GPU_DISPATCH = {"moe_token_dispatcher_type": "alltoall"}
_STEP: Config = {
    **{key: value for key, value in _DENSE.items() if key != "num_key_value_heads"},
    "num_attention_groups": 2,
    "moe_num_experts": 6,
    "moe_top_k": 2,
    "moe_intermediate_size": 24,
    "share_expert_dim": 28,
    "moe_layers_enum": "1,2",
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "use_moe": True,
    "use_moe_router_bias": True,
    "use_head_wise_attn_gate": True,
    "use_qk_norm": True,
    "need_fp32_gate": True,
    "attention_other_setting": {
        "attention_type": "sliding_attention", "num_attention_heads": 10, "num_attention_groups": 2, "head_dim": 10,
    },
    "sliding_window": 16,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "rope_theta": [5e6, 1e4, 5e6],
    "partial_rotary_factors": [0.4, 1.0, 0.4],
    "swiglu_limits": [0.0, 0.0, 7.0],
    "swiglu_limits_shared": [0.0, 0.0, 16.0],
    "rms_norm_eps": 1e-5,
    "num_nextn_predict_layers": 0,
    "zero_centered": True,
}  # fmt: skip
_STEP_AHEAD = {
    "num_nextn_predict_layers": 1, "layer_types": [*_STEP["layer_types"], "sliding_attention"],
    "rope_theta": [*_STEP["rope_theta"], 1e4], "partial_rotary_factors": [*_STEP["partial_rotary_factors"], 1.0],
    "swiglu_limits": [*_STEP["swiglu_limits"], 0.0], "swiglu_limits_shared": [*_STEP["swiglu_limits_shared"], 0.0],
}  # fmt: skip
_TOWER = {"hidden_size": 32, "intermediate_size": 36}
_QWEN_TOWER = {
    **_TOWER, "depth": 2, "num_heads": 4, "out_hidden_size": 40, "in_channels": 3, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16,
}  # fmt: skip
_EARLY = {**_QWEN_TOWER, "deepstack_visual_indexes": [0, 1]}
_WINDOWS = {**_QWEN_TOWER, "out_hidden_size": 80, "window_size": 16, "fullatt_block_indexes": [1]}
_LAYERS_OF_TOWER = {**_TOWER, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
_SIGLIP = {**_LAYERS_OF_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
_PIXTRAL = {**_LAYERS_OF_TOWER, "model_type": "pixtral", "head_dim": 8}
_ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 1], "rope_theta": 1e4}}
_PARTIAL_ROPE = {
    "rope_parameters": {**_ROPE["rope_parameters"], "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.4}
}


def _pictures(text_type: str, text: Config, tower: Config, *, tied: bool = False, **more: Any) -> Config:
    text_config = {**_DENSE, **text, "model_type": text_type, "tie_word_embeddings": tied}
    return {"text_config": text_config, "vision_config": tower, "tie_word_embeddings": tied, **more}


def _gemma(text: Config) -> Config:
    return _pictures("gemma3_text", text, _SIGLIP, tied=True, mm_tokens_per_image=4)


def _mistral(text_type: str, text: Config, *, tied: bool = False) -> Config:
    return _pictures(text_type, text, _PIXTRAL, tied=tied, spatial_merge_size=2, multimodal_projector_bias=False)


_MOONSHOT = {
    "vt_hidden_size": 32, "vt_intermediate_size": 36, "vt_num_hidden_layers": 2, "vt_num_attention_heads": 4,
    "mm_hidden_size": 32, "text_hidden_size": 40, "patch_size": 4, "init_pos_emb_height": 5, "init_pos_emb_width": 6,
    "merge_kernel_size": [2, 2],
}  # fmt: skip


def _kimi(text: Config) -> Config:
    routing = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return _pictures("kimi_k2", {**_LATENT, **_REMOTE, **routing, **text}, _MOONSHOT)


_QWEN_80 = {"hidden_size": 80, **_ROPE}
_FOUR_LAYERS = {"num_hidden_layers": 4}

# model type, architecture -> the configs
_CONFIGS: dict[tuple[str, str], list[Config]] = {
    ("llama", "LlamaForCausalLM"): [_DENSE, {**_DENSE, **_TIED, "num_key_value_heads": 8}],
    ("mistral", "MistralForCausalLM"): [_DENSE, {**_DENSE, **_TIED, **_FOUR}],
    ("qwen2", "Qwen2ForCausalLM"): [
        {**_WITHOUT_HEAD_DIM, "hidden_size": 80},
        {**_WITHOUT_HEAD_DIM, **_TIED, **_FOUR, "hidden_size": 80},
    ],
    ("qwen3", "Qwen3ForCausalLM"): [_DENSE, {**_DENSE, **_TIED, **_FOUR}],
    ("gemma", "GemmaForCausalLM"): [{**_DENSE, **_TIED}, {**_DENSE, **_TIED, "num_key_value_heads": 1}],
    ("gemma2", "Gemma2ForCausalLM"): [{**_DENSE, **_TIED}, {**_DENSE, **_TIED, **_FOUR}],
    ("gemma3_text", "Gemma3ForCausalLM"): [{**_DENSE, **_TIED}, {**_DENSE, **_TIED, **_FOUR}],
    ("exaone4", "Exaone4ForCausalLM"): [{**_DENSE, **_TIED}, {**_DENSE, **_TIED, **_FOUR, **_FOUR_LAYERS}],
    ("nemotron", "NemotronForCausalLM"): [_DENSE, {**_DENSE, **_TIED, **_FOUR}],
    ("qwen3_moe", "Qwen3MoeForCausalLM"): [{**_DENSE, **_EXPERTS}, {**_DENSE, **_EXPERTS, **_TIED, **_FOUR}],
    ("olmoe", "OlmoeForCausalLM"): [
        {**_WITHOUT_HEAD_DIM, **_EXPERTS, "num_key_value_heads": 8},
        {**_WITHOUT_HEAD_DIM, **_EXPERTS, **_FOUR, "num_experts": 3, "num_attention_heads": 4},
    ],
    ("gpt_oss", "GptOssForCausalLM"): [{**_DENSE, **_LOCAL}, {**_DENSE, **_FEWER, **_FOUR, "intermediate_size": 40}],
    ("minimax_m2", "MiniMaxM2ForCausalLM"): [{**_DENSE, **_LOCAL}, {**_DENSE, **_FEWER, **_FOUR}],
    ("deepseek_v2", "DeepseekV2ForCausalLM"): [_LATENT, {**_LATENT, "first_k_dense_replace": 0}],
    ("deepseek_v3", "DeepseekV3ForCausalLM"): [
        _LATENT,
        {**_LATENT, "num_nextn_predict_layers": 2, "first_k_dense_replace": 2},
    ],
    ("kimi_k2", "KimiK2ForCausalLM"): [
        {**_LATENT, **_REMOTE, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        {**_LATENT, **_REMOTE, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_shared_experts": 1},
    ],
    ("kimi_k25", "KimiK25ForConditionalGeneration"): [
        _kimi({}),
        _kimi({"n_shared_experts": 1, "first_k_dense_replace": 0}),
    ],
    ("glm4_moe", "Glm4MoeForCausalLM"): [
        {**_DENSE, **_BALANCED, "use_qk_norm": True, "attention_bias": True},
        {**_DENSE, **_BALANCED, **_FOUR, "first_k_dense_replace": 2},
        {**_DENSE, **_BALANCED, "num_nextn_predict_layers": 1},
    ],
    ("glm4_moe_lite", "Glm4MoeLiteForCausalLM"): [
        _LATENT,
        {
            **_LATENT, "num_nextn_predict_layers": 1, "first_k_dense_replace": 2,
            "mlp_layer_types": ["dense", "dense", "sparse"],
        },
    ],
    ("glm_moe_dsa", "GlmMoeDsaForCausalLM"): [
        {**_LATENT, **_INDEXED, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        {
            **_LATENT, **_INDEXED, "index_n_heads": 2, "n_shared_experts": 1,
            "mlp_layer_types": ["dense"] + ["sparse"] * 2,
        },
    ],
    ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"): [
        {**_DENSE, **_ERNIE},
        {**_DENSE, **_ERNIE, **_TIED, **_FOUR, "moe_num_shared_experts": 1, "moe_layer_start_index": 0},
    ],
    ("exaone_moe", "ExaoneMoeForCausalLM"): [
        {**_DENSE, **_BALANCED, **_EXPERTS, "num_shared_experts": 1, "is_moe_layer": [False, True, True]},
        {
            **_DENSE, **_BALANCED, **_EXPERTS, **_FOUR, "num_shared_experts": 1, "is_moe_layer": [False, True, True],
            "num_nextn_predict_layers": 1,
        },
    ],
    ("hy_v3", "HYV3ForCausalLM"): [
        {**_DENSE, **_EXPERTS, **_HY, "num_shared_experts": 1},
        {**_DENSE, **_EXPERTS, **_FOUR, **_HY, "num_shared_experts": 2, "num_nextn_predict_layers": 1},
    ],
    ("mimo_v2_flash", "MiMoV2FlashForCausalLM"): [
        {**_DENSE, **_MIMO},
        {**_DENSE, **_MIMO, "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 0, 1], "v_head_dim": 4},
    ],
    ("bailing_moe_v2", "BailingMoeV2ForCausalLM"): [
        {**_DENSE, **_LING},
        {**_DENSE, **_LING, **_FOUR, "first_k_dense_replace": 2, "num_nextn_predict_layers": 1},
    ],
    ("step3p5", "Step3p5ForCausalLM"): [_STEP, {**_STEP, **_STEP_AHEAD}],
    ("falcon_h1", "FalconH1ForCausalLM"): [
        {**_DENSE, **_FALCON},
        {**_DENSE, **_FALCON, **_TIED, **_FOUR, "mamba_rms_norm": True, "mamba_n_groups": 1},
    ],
    ("nemotron_h", "NemotronHForCausalLM"): [
        {**_DENSE, **_HYBRID},
        {**_DENSE, **_HYBRID, **_FOUR, "n_groups": 1, "moe_latent_size": 16},
    ],
    ("qwen3_next", "Qwen3NextForCausalLM"): [
        {**_DENSE, **_NET_EXPERTS, **_ONE_AHEAD},
        {**_DENSE, **_NET_EXPERTS, **_TIED, **_OTHER_NET},
    ],
    ("qwen3_5_text", "Qwen3_5ForCausalLM"): [
        {**_DENSE, **_NET, **_ONE_AHEAD},
        {**_DENSE, **_NET, **_TIED, **_OTHER_NET},
    ],
    ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"): [
        {**_DENSE, **_NET_EXPERTS, **_ONE_AHEAD},
        {**_DENSE, **_NET_EXPERTS, **_TIED, **_OTHER_NET},
    ],
    ("qwen3_5", "Qwen3_5ForConditionalGeneration"): [
        _pictures("qwen3_5_text", {**_NET, **_PARTIAL_ROPE}, _QWEN_TOWER),
        _pictures("qwen3_5_text", {**_NET, **_OTHER_NET, **_ONE_AHEAD, **_PARTIAL_ROPE}, _QWEN_TOWER, tied=True),
    ],
    ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"): [
        _pictures("qwen3_5_moe_text", {**_NET_EXPERTS, **_PARTIAL_ROPE}, _QWEN_TOWER),
        _pictures("qwen3_5_moe_text", {**_NET_EXPERTS, **_OTHER_NET, **_ONE_AHEAD, **_PARTIAL_ROPE}, _QWEN_TOWER),
    ],
    ("qwen3_vl", "Qwen3VLForConditionalGeneration"): [
        _pictures("qwen3_vl_text", _ROPE, _EARLY),
        _pictures("qwen3_vl_text", {**_ROPE, **_FOUR}, {**_EARLY, "deepstack_visual_indexes": [1]}, tied=True),
    ],
    ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"): [
        _pictures("qwen3_vl_moe_text", {**_ROPE, **_EXPERTS}, _EARLY),
        _pictures("qwen3_vl_moe_text", {**_ROPE, **_EXPERTS, **_FOUR, "num_experts": 3}, _EARLY),
    ],
    ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"): [
        _pictures("qwen2_5_vl_text", _QWEN_80, _WINDOWS),
        _pictures("qwen2_5_vl_text", {**_QWEN_80, **_FOUR}, _WINDOWS, tied=True),
    ],
    ("gemma3", "Gemma3ForConditionalGeneration"): [_gemma({}), _gemma(_FOUR)],
    ("mistral3", "Mistral3ForConditionalGeneration"): [
        _mistral("ministral3", {}),
        _mistral("ministral3", _FOUR, tied=True),
    ],
}  # fmt: skip
_MORE: dict[str, Model] = {
    "glm_moe_dsa": Model({}, _NO_GPU_DISPATCH),
    "kimi_k25": Model({}, {**_NO_GPU_DISPATCH, "hf_model_path": json.dumps(_MOONSHOT), "trust_remote_code": True}),
    "nemotron_h": Model({}, renamed={"backbone.embedding.weight": "backbone.embeddings.weight"}),
}
"""What all models of a type have besides their config."""
_UNMAPPED = "'NoneType' object has no attribute"
_FAULTS: dict[str, tuple[tuple[str, str], Config, str]] = {
    "biases": (("llama", "LlamaForCausalLM"), {**_DENSE, "attention_bias": True, "mlp_bias": True}, _UNMAPPED),
    "whole_q": (("deepseek_v3", "DeepseekV3ForCausalLM"), {**_LATENT, "q_lora_rank": None}, _UNMAPPED),
    "untied": (("exaone4", "Exaone4ForCausalLM"), _DENSE, _UNMAPPED),
    "text_of_2025": (
        ("mistral3", "Mistral3ForConditionalGeneration"),
        _mistral("mistral", _FOUR),
        "llama_4_scaling_beta",
    ),
    "two_shared": (
        ("glm4_moe", "Glm4MoeForCausalLM"),
        {**_DENSE, **_BALANCED, "n_shared_experts": 2},
        "Shape mismatch for megatron param decoder.layers.1.mlp.shared_experts.linear_fc1.weight",
    ),
    "half_as_wide": (("gpt_oss", "GptOssForCausalLM"), {**_DENSE, **_LOCAL, "intermediate_size": 20}, SILENT),
    "dense_between": (("qwen3_moe", "Qwen3MoeForCausalLM"), {**_DENSE, **_EXPERTS, "mlp_only_layers": [0]}, SILENT),
}
"""What Megatron-Bridge does wrong: a name for the fault, the model, and its error."""


def _models() -> Iterator[tuple[str, Model]]:
    for (model_type, architecture), configs in _CONFIGS.items():
        more = _MORE.get(model_type, Model({}))
        for number, config in enumerate(configs):
            said = {"model_type": model_type, "architectures": [architecture], **config}
            yield f"{model_type}-{number}", Model(said, more.provider, more.renamed)
    for fault, ((model_type, architecture), config, error) in _FAULTS.items():
        said = {"model_type": model_type, "architectures": [architecture], **config}
        yield f"{model_type}-{fault}", Model(said, fault=error)


MODELS: dict[str, Model] = dict(_models())
"""Name -> model."""
