"""The models that vLLM loads, as data: every axis its own size, as far as vLLM's own checks of sizes allow it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]
Degrees = tuple[int, int]
"""Tensor-parallel ranks, and how many of them share out the experts: 1, or all."""


@dataclass(frozen=True)
class Model:
    """One model."""

    architecture: str
    """What `config.json` says in `architectures`: it picks vLLM's class."""
    config: Config
    """Keys of transformers' config."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Keys of published configs that vLLM reads and transformers does not write."""
    kind: str = ""
    """The class in transformers, where it has another name."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of names that transformers stores -> those that vLLM reads, of the hub's own files."""
    transposed: str = ""
    """Ends the names of experts that vLLM reads with their last dims exchanged, as the hub's first files have them."""
    left: str = ""
    """Parameters that vLLM itself leaves as they were: a part of their names."""
    most: int = 4
    """The largest number of ranks: vLLM takes long to put experts into transformers' modules."""

    @property
    def degrees(self) -> tuple[Degrees, ...]:
        """The ranks that it is loaded on."""
        keys = self.config.keys() | self.config.get("text_config", {}).keys()
        experts = ((2, 2), (4, 4)) if keys & _COUNTS else ()
        return tuple(each for each in ((1, 1), (2, 1), (4, 1), *experts) if each[0] <= self.most)


_COUNTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
_DENSE: Config = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 90,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TIED = {"tie_word_embeddings": True}
_FOUR = {"num_key_value_heads": 4}
_NARROW = {"head_dim": None}
"""The size of a head is the hidden size divided by their number."""
_ALL_HEADS = {"head_dim": None, "num_key_value_heads": None}
_GPT = {**_ALL_HEADS, "n_embd": 128, "n_layer": 2, "n_head": 8, "n_positions": 64}
_EXPERTS = {"num_experts": 10, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
_WIDE = {"num_experts": 10, "num_experts_per_tok": 2}
_LOCAL = {"num_local_experts": 10, "num_experts_per_tok": 2}
_BALANCED = {
    "n_routed_experts": 10,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {
    **_BALANCED,
    "num_key_value_heads": 8,
    "q_lora_rank": 14,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
}
_BY_BIAS = {"topk_method": "noaux_tc"}
_NET = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
}
_NET_EXPERTS = {**_NET, **_EXPERTS, "shared_expert_intermediate_size": 40}
_SCAN = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_expand": 1,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
_SCANS = {
    "intermediate_size": None,
    "head_dim": 16,
    "num_heads": 16,
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 16,
}
_CONVOLVES = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, **_NARROW, **_TIED}
_SLIDES = {"layer_types": ["sliding_attention", "full_attention"]}
_ERNIE = {
    "moe_num_experts": 10,
    "moe_intermediate_size": 24,
    "moe_k": 2,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 1,
    "moe_layer_interval": 1,
}
_MIMO = {
    "hybrid_layer_pattern": [0, 1],
    "layernorm_epsilon": 1e-6,
    "moe_layer_freq": [0, 1],
    "swa_head_dim": 64,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "sliding_window_size": 32,
    "swa_v_head_dim": 48,
    "swa_rope_theta": 1e4,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
}
_JAMBA = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_dt_rank": 8,
}
_LFM = {"conv_dim": 128, "conv_dim_out": 128, "block_dim": 128, "block_ff_dim": 96, "conv_bias": False}
_HY = {"expert_hidden_dim": 24, "moe_router_enable_expert_bias": True, "route_norm": True, "qk_norm": True}


_TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "intermediate_size": 96,
    "out_hidden_size": 128,
}
_POSITIONS = {**_TOWER, "num_position_embeddings": 16}
_DEEP = {**_POSITIONS, "deepstack_visual_indexes": [0]}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "vision_use_head": False,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_THREE = {"rope_parameters": {**_ROPE, "mrope_section": [8, 12, 12], "mrope_interleaved": True}}
_PART = {
    "rope_parameters": {
        **_ROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 3, 3], "mrope_interleaved": True,
    }
}  # fmt: skip
_MIXED = {
    "hybrid_override_pattern": "M*E-",
    "layers_block_type": ["mamba", "attention", "moe", "mlp"],
    "num_hidden_layers": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 4,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "expand": 1,
    "chunk_size": 16,
    "n_routed_experts": 10,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
_INDEXED = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8}


def _model(
    architecture: str,
    model_type: str,
    *parts: Config,
    more: Config | None = None,
    kind: str = "",
    left: str = "",
    most: int = 4,
    **config: Any,
) -> Model:
    merged: Config = dict(_DENSE)
    for part in (*parts, config):
        merged |= part
    keys = {key: value for key, value in merged.items() if value is not None or key == "q_lora_rank"}
    return Model(
        architecture, {"model_type": model_type, **keys}, more or {}, kind or architecture, left=left, most=most
    )


def _pictured(
    architecture: str,
    model_type: str,
    text: str,
    *parts: Config,
    vision: Config,
    renamed: Mapping[str, str] | None = None,
    transposed: str = "",
    **config: Any,
) -> Model:
    """A model of text and pictures."""
    inner = _model(architecture, text, *parts).config
    whole = {"model_type": model_type, "tie_word_embeddings": False, **config}
    whole |= {"text_config": inner, "vision_config": vision}
    return Model(architecture, whole, kind=architecture, renamed=renamed or {}, transposed=transposed)


MODELS = {
    "llama": _model("LlamaForCausalLM", "llama"),
    "llama-tied": _model("LlamaForCausalLM", "llama", _TIED, attention_bias=True, mlp_bias=True),
    "qwen2": _model("Qwen2ForCausalLM", "qwen2", _NARROW),
    "qwen3": _model("Qwen3ForCausalLM", "qwen3"),
    "qwen3_moe": _model("Qwen3MoeForCausalLM", "qwen3_moe", _EXPERTS, mlp_only_layers=[0]),
    "mixtral": _model("MixtralForCausalLM", "mixtral", _LOCAL),
    "gemma3": _model("Gemma3ForCausalLM", "gemma3_text", _TIED),
    "phi3": _model("Phi3ForCausalLM", "phi3", hidden_size=512),
    "deepseek_v3": _model("DeepseekV3ForCausalLM", "deepseek_v3", _LATENT, more=_BY_BIAS),
    "deepseek_v3-q": _model("DeepseekV3ForCausalLM", "deepseek_v3", _LATENT, q_lora_rank=None, more=_BY_BIAS),
    "gpt_oss": _model("GptOssForCausalLM", "gpt_oss", _FOUR, _LOCAL, num_local_experts=8),
    "glm4_moe": _model("Glm4MoeForCausalLM", "glm4_moe", _BALANCED, use_qk_norm=True, attention_bias=True),
    "afmoe": _model(
        "AfmoeForCausalLM", "afmoe", _EXPERTS, _SLIDES, num_shared_experts=1, num_dense_layers=1,
        more={"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    ),
    "apertus": _model("ApertusForCausalLM", "apertus", _NARROW),
    "arcee": _model("ArceeForCausalLM", "arcee"),
    "bloom": _model("BloomForCausalLM", "bloom", _NARROW, _TIED, n_layer=2, n_head=8),
    "cohere": _model("CohereForCausalLM", "cohere", _NARROW, _TIED, _FOUR, use_qk_norm=True),
    "cohere2": _model("Cohere2ForCausalLM", "cohere2", _TIED),
    "cohere2_moe": _model(
        "Cohere2MoeForCausalLM", "cohere2_moe", _WIDE, _TIED, num_shared_experts=2, first_k_dense_replace=1,
        prefix_dense_intermediate_size=112, expert_selection_fn="softmax",
    ),
    "deepseek_v32": _model("DeepseekV32ForCausalLM", "deepseek_v32", _LATENT, _INDEXED, more=_BY_BIAS),
    "ernie4_5": _model("Ernie4_5ForCausalLM", "ernie4_5"),
    "ernie4_5_moe": _model("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", _ERNIE, _NARROW),
    "exaone4": _model("Exaone4ForCausalLM", "exaone4"),
    "exaone_moe": _model(
        "ExaoneMoeForCausalLM", "exaone_moe", _EXPERTS, _SLIDES, num_shared_experts=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, sliding_window_pattern="LG", mlp_layer_types=["dense", "sparse"],
    ),
    "falcon": _model("FalconForCausalLM", "falcon", _NARROW, new_decoder_architecture=True, num_kv_heads=2, bias=False),
    "falcon-7b": _model(
        "FalconForCausalLM", "falcon", _NARROW, new_decoder_architecture=False, multi_query=True, bias=False
    ),
    "falcon_h1": _model(
        "FalconH1ForCausalLM", "falcon_h1", _SCAN, mamba_d_ssm=128, mamba_norm_before_gate=False
    ),
    "gemma": _model("GemmaForCausalLM", "gemma", _TIED),
    "gemma2": _model("Gemma2ForCausalLM", "gemma2", _TIED),
    "glm4": _model("Glm4ForCausalLM", "glm4", attention_bias=True),
    "glm4_moe_lite": _model(
        "Glm4MoeLiteForCausalLM", "glm4_moe_lite", _LATENT, mlp_layer_types=["dense", "sparse"], more=_BY_BIAS
    ),
    "gpt2": _model("GPT2LMHeadModel", "gpt2", _GPT, _TIED),
    "gpt_bigcode": _model("GPTBigCodeForCausalLM", "gpt_bigcode", _GPT, _TIED),
    "gpt_neox": _model("GPTNeoXForCausalLM", "gpt_neox", _ALL_HEADS),
    "gptj": _model("GPTJForCausalLM", "gptj", _GPT, rotary_dim=8),
    "granite": _model("GraniteForCausalLM", "granite", _NARROW),
    "granitemoe": _model("GraniteMoeForCausalLM", "granitemoe", _LOCAL, _NARROW),
    "granitemoeshared": _model(
        "GraniteMoeSharedForCausalLM", "granitemoeshared", _LOCAL, _NARROW, shared_intermediate_size=40
    ),
    "granitemoehybrid": _model(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", _LOCAL, _NARROW, _SCAN, shared_intermediate_size=40,
        layer_types=["mamba", "attention"],
    ),
    "helium": _model("HeliumForCausalLM", "helium"),
    "hunyuan_v1_dense": _model("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    "hy_v3": _model(
        "HYV3ForCausalLM", "hy_v3", _EXPERTS, num_shared_experts=1, first_k_dense_replace=1, num_nextn_predict_layers=0,
        more=_HY,
    ),
    "jamba": _model("JambaForCausalLM", "jamba", _WIDE, _JAMBA, _NARROW),
    "laguna": _model(
        "LagunaForCausalLM", "laguna", _EXPERTS, shared_expert_intermediate_size=40, left="e_score_correction_bias"
    ),
    "lfm2": _model("Lfm2ForCausalLM", "lfm2", _CONVOLVES, more=_LFM),
    "lfm2_moe": _model(
        "Lfm2MoeForCausalLM", "lfm2_moe", _EXPERTS, _CONVOLVES, num_dense_layers=1, use_expert_bias=True
    ),
    "llama4": _model(
        "Llama4ForCausalLM", "llama4_text", _LOCAL, num_experts_per_tok=1, intermediate_size_mlp=112,
        interleave_moe_layer_step=2,
    ),
    "mamba": _model("MambaForCausalLM", "mamba", _NARROW, state_size=16, conv_kernel=4, expand=2, time_step_rank=8),
    "mamba2": _model("Mamba2ForCausalLM", "mamba2", _SCANS, n_groups=1),
    "mamba2-groups": _model("Mamba2ForCausalLM", "mamba2", _SCANS, n_groups=4),
    "mimo_v2_flash": _model(
        "MiMoV2FlashForCausalLM", "mimo_v2_flash", v_head_dim=48, n_routed_experts=10, moe_intermediate_size=24,
        num_experts_per_tok=2, n_group=1, topk_group=1, more=_MIMO,
    ),
    "minimax_m2": _model(
        "MiniMaxM2ForCausalLM", "minimax_m2", _LOCAL,
        more={"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    ),
    "ministral3": _model("Ministral3ForCausalLM", "ministral3"),
    "mistral": _model("MistralForCausalLM", "mistral"),
    "nemotron": _model("NemotronForCausalLM", "nemotron"),
    "nemotron_h": _model("NemotronHForCausalLM", "nemotron_h", _MIXED),
    "olmo": _model("OlmoForCausalLM", "olmo", _NARROW),
    "olmo2": _model("Olmo2ForCausalLM", "olmo2", _NARROW),
    "olmo3": _model("Olmo3ForCausalLM", "olmo3", _NARROW),
    "olmoe": _model("OlmoeForCausalLM", "olmoe", _WIDE, _NARROW),
    "opt": _model("OPTForCausalLM", "opt", _ALL_HEADS, _TIED, ffn_dim=96, word_embed_proj_dim=128),
    "phi": _model("PhiForCausalLM", "phi", _NARROW),
    "phimoe": _model(
        "PhiMoEForCausalLM", "phimoe", _LOCAL, _NARROW, attention_bias=True, lm_head_bias=True, kind="PhimoeForCausalLM"
    ),
    "qwen2_moe": _model(
        "Qwen2MoeForCausalLM", "qwen2_moe", _EXPERTS, _NARROW, shared_expert_intermediate_size=40, mlp_only_layers=[0]
    ),
    "qwen3_5": _model("Qwen3_5ForCausalLM", "qwen3_5_text", _NET, _FOUR),
    "qwen3_5_moe": _model("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _NET_EXPERTS),
    "qwen3_next": _model("Qwen3NextForCausalLM", "qwen3_next", _NET_EXPERTS),
    "seed_oss": _model("SeedOssForCausalLM", "seed_oss"),
    "smollm3": _model("SmolLM3ForCausalLM", "smollm3", _NARROW),
    "stablelm": _model("StableLmForCausalLM", "stablelm", _NARROW),
    "starcoder2": _model("Starcoder2ForCausalLM", "starcoder2", _NARROW),
    "vaultgemma": _model("VaultGemmaForCausalLM", "vaultgemma", _TIED),
    "gemma3_whole": _pictured(
        "Gemma3ForConditionalGeneration", "gemma3", "gemma3_text", vision=_SIGLIP, mm_tokens_per_image=4,
        renamed={"vision_tower.": "vision_tower.vision_model."},
    ),
    "qwen2_5_vl": _pictured(
        "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "qwen2_5_vl_text", _NARROW, _THREE, {"hidden_size": 512},
        vision={**_TOWER, "out_hidden_size": 512, "fullatt_block_indexes": [1], "window_size": 8},
    ),
    "qwen3_vl": _pictured("Qwen3VLForConditionalGeneration", "qwen3_vl", "qwen3_vl_text", _THREE, vision=_DEEP),
    "qwen3_vl_moe": _pictured(
        "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "qwen3_vl_moe_text", _EXPERTS, _THREE,
        {"norm_topk_prob": True}, vision=_DEEP, transposed="_proj",
    ),
    "qwen3_5_whole": _pictured(
        "Qwen3_5ForConditionalGeneration", "qwen3_5", "qwen3_5_text", _NET, _FOUR, _PART, vision=_POSITIONS
    ),
    "qwen3_5_moe_whole": _pictured(
        "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", "qwen3_5_moe_text", _NET_EXPERTS, _PART, vision=_POSITIONS
    ),
    "flex_olmo": _model("FlexOlmoForCausalLM", "flex_olmo", _WIDE, _NARROW, most=2),
    "hunyuan_v1_moe": _model("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", num_experts=10, moe_topk=2, most=2),
    "mellum": _model("MellumForCausalLM", "mellum", _EXPERTS, most=2),
}  # fmt: skip
