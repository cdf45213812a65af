"""Models of text alone: every axis its own size, as far as vLLM's own checks of sizes allow it."""

from __future__ import annotations

from dataclasses import replace

from tests.oracles.vllm_peer.model import model

_TIED = {"tie_word_embeddings": True}
FOUR = {"num_key_value_heads": 4}
NARROW = {"head_dim": None}
"""The size of a head is the hidden size divided by their number."""
ALL_HEADS = {"head_dim": None, "num_key_value_heads": None}
_GPT = {**ALL_HEADS, "n_embd": 128, "n_layer": 2, "n_head": 8, "n_positions": 64}
EXPERTS = {"num_experts": 10, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
_WIDE = {"num_experts": 10, "num_experts_per_tok": 2}
LOCAL = {"num_local_experts": 10, "num_experts_per_tok": 2}
BALANCED = {
    "n_routed_experts": 10, "n_shared_experts": 2, "moe_intermediate_size": 24, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT_HEADS = {
    "num_key_value_heads": 8, "q_lora_rank": 14, "kv_lora_rank": 18, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6,
    "v_head_dim": 12,
}  # fmt: skip
LATENT = {**BALANCED, **LATENT_HEADS}
_BY_BIAS = {"topk_method": "noaux_tc"}
NET = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2,
}  # fmt: skip
NET_EXPERTS = {**NET, **EXPERTS, "shared_expert_intermediate_size": 40}
_SCAN = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 1, "mamba_n_groups": 1, "mamba_d_state": 16,
    "mamba_d_conv": 4, "mamba_chunk_size": 16,
}  # fmt: skip
_SCANS = {
    "intermediate_size": None, "head_dim": 16, "num_heads": 16, "state_size": 16, "conv_kernel": 4, "expand": 2,
    "chunk_size": 16,
}  # fmt: skip
_CONVOLVES = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, **NARROW, **_TIED}
_SLIDES = {"layer_types": ["sliding_attention", "full_attention"]}
_ERNIE = {
    "moe_num_experts": 10, "moe_intermediate_size": 24, "moe_k": 2, "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1, "moe_layer_end_index": 1, "moe_layer_interval": 1,
}  # fmt: skip
_MIMO = {
    "hybrid_layer_pattern": [0, 1], "layernorm_epsilon": 1e-6, "moe_layer_freq": [0, 1], "swa_head_dim": 64,
    "swa_num_attention_heads": 8, "swa_num_key_value_heads": 4, "sliding_window_size": 32, "swa_v_head_dim": 48,
    "swa_rope_theta": 1e4, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
}  # fmt: skip
_JAMBA = {
    "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    "mamba_dt_rank": 8,
}  # fmt: skip
_LFM = {"conv_dim": 128, "conv_dim_out": 128, "block_dim": 128, "block_ff_dim": 96, "conv_bias": False}
_HY = {"expert_hidden_dim": 24, "moe_router_enable_expert_bias": True, "route_norm": True, "qk_norm": True}

MIXED = {
    "hybrid_override_pattern": "M*E-", "layers_block_type": ["mamba", "attention", "moe", "mlp"],
    "num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 4, "ssm_state_size": 16,
    "conv_kernel": 4, "expand": 1, "chunk_size": 16, "n_routed_experts": 10, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
_INDEXED = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8}

TEXT = {
    "llama": model("LlamaForCausalLM", "llama"),
    "llama-tied": model("LlamaForCausalLM", "llama", _TIED, attention_bias=True, mlp_bias=True),
    "qwen2": model("Qwen2ForCausalLM", "qwen2", NARROW),
    "qwen3": model("Qwen3ForCausalLM", "qwen3"),
    "qwen3_moe": model("Qwen3MoeForCausalLM", "qwen3_moe", EXPERTS, mlp_only_layers=[0]),
    "mixtral": model("MixtralForCausalLM", "mixtral", LOCAL),
    "gemma3": model("Gemma3ForCausalLM", "gemma3_text", _TIED),
    "phi3": model("Phi3ForCausalLM", "phi3", hidden_size=512),
    "deepseek_v3": model("DeepseekV3ForCausalLM", "deepseek_v3", LATENT, more=_BY_BIAS),
    "deepseek_v3-q": model("DeepseekV3ForCausalLM", "deepseek_v3", LATENT, q_lora_rank=None, more=_BY_BIAS),
    "gpt_oss": model("GptOssForCausalLM", "gpt_oss", FOUR, LOCAL, num_local_experts=8),
    "glm4_moe": model("Glm4MoeForCausalLM", "glm4_moe", BALANCED, use_qk_norm=True, attention_bias=True),
    "afmoe": model(
        "AfmoeForCausalLM", "afmoe", EXPERTS, _SLIDES, num_shared_experts=1, num_dense_layers=1,
        more={"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    ),
    "apertus": model("ApertusForCausalLM", "apertus", NARROW),
    "arcee": model("ArceeForCausalLM", "arcee"),
    "bloom": model("BloomForCausalLM", "bloom", NARROW, _TIED, n_layer=2, n_head=8),
    "cohere": model("CohereForCausalLM", "cohere", NARROW, _TIED, FOUR, use_qk_norm=True),
    "cohere2": model("Cohere2ForCausalLM", "cohere2", _TIED),
    "cohere2_moe": model(
        "Cohere2MoeForCausalLM", "cohere2_moe", _WIDE, _TIED, num_shared_experts=2, first_k_dense_replace=1,
        prefix_dense_intermediate_size=112, expert_selection_fn="softmax",
    ),
    "deepseek_v32": model("DeepseekV32ForCausalLM", "deepseek_v32", LATENT, _INDEXED, more=_BY_BIAS),
    "ernie4_5": model("Ernie4_5ForCausalLM", "ernie4_5"),
    "ernie4_5_moe": model("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", _ERNIE, NARROW),
    "exaone4": model("Exaone4ForCausalLM", "exaone4"),
    "exaone_moe": model(
        "ExaoneMoeForCausalLM", "exaone_moe", EXPERTS, _SLIDES, num_shared_experts=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, sliding_window_pattern="LG", mlp_layer_types=["dense", "sparse"],
    ),
    "falcon": model("FalconForCausalLM", "falcon", NARROW, new_decoder_architecture=True, num_kv_heads=2, bias=False),
    "falcon-7b": model(
        "FalconForCausalLM", "falcon", NARROW, new_decoder_architecture=False, multi_query=True, bias=False
    ),
    "falcon_h1": model(
        "FalconH1ForCausalLM", "falcon_h1", _SCAN, mamba_d_ssm=128, mamba_norm_before_gate=False
    ),
    "gemma": model("GemmaForCausalLM", "gemma", _TIED),
    "gemma2": model("Gemma2ForCausalLM", "gemma2", _TIED),
    "glm4": model("Glm4ForCausalLM", "glm4", attention_bias=True),
    "glm4_moe_lite": model(
        "Glm4MoeLiteForCausalLM", "glm4_moe_lite", LATENT, mlp_layer_types=["dense", "sparse"], more=_BY_BIAS
    ),
    "gpt2": model("GPT2LMHeadModel", "gpt2", _GPT, _TIED),
    "gpt_bigcode": model("GPTBigCodeForCausalLM", "gpt_bigcode", _GPT, _TIED),
    "gpt_neox": model("GPTNeoXForCausalLM", "gpt_neox", ALL_HEADS),
    "gptj": model("GPTJForCausalLM", "gptj", _GPT, rotary_dim=8),
    "granite": model("GraniteForCausalLM", "granite", NARROW),
    "granitemoe": model("GraniteMoeForCausalLM", "granitemoe", LOCAL, NARROW),
    "granitemoeshared": model(
        "GraniteMoeSharedForCausalLM", "granitemoeshared", LOCAL, NARROW, shared_intermediate_size=40
    ),
    "granitemoehybrid": model(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", LOCAL, NARROW, _SCAN, shared_intermediate_size=40,
        layer_types=["mamba", "attention"],
    ),
    "helium": model("HeliumForCausalLM", "helium"),
    "hunyuan_v1_dense": model("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    "hy_v3": model(
        "HYV3ForCausalLM", "hy_v3", EXPERTS, num_shared_experts=1, first_k_dense_replace=1, num_nextn_predict_layers=0,
        more=_HY,
    ),
    "jamba": model("JambaForCausalLM", "jamba", _WIDE, _JAMBA, NARROW),
    "laguna": model(
        "LagunaForCausalLM", "laguna", EXPERTS, shared_expert_intermediate_size=40, left="e_score_correction_bias"
    ),
    "lfm2": model("Lfm2ForCausalLM", "lfm2", _CONVOLVES, more=_LFM),
    "lfm2_moe": model(
        "Lfm2MoeForCausalLM", "lfm2_moe", EXPERTS, _CONVOLVES, num_dense_layers=1, use_expert_bias=True
    ),
    "llama4": model(
        "Llama4ForCausalLM", "llama4_text", LOCAL, num_experts_per_tok=1, intermediate_size_mlp=112,
        interleave_moe_layer_step=2,
    ),
    "mamba": model("MambaForCausalLM", "mamba", NARROW, state_size=16, conv_kernel=4, expand=2, time_step_rank=8),
    "mamba2": model("Mamba2ForCausalLM", "mamba2", _SCANS, n_groups=1),
    "mamba2-groups": model("Mamba2ForCausalLM", "mamba2", _SCANS, n_groups=4),
    "mimo_v2_flash": model(
        "MiMoV2FlashForCausalLM", "mimo_v2_flash", v_head_dim=48, n_routed_experts=10, moe_intermediate_size=24,
        num_experts_per_tok=2, n_group=1, topk_group=1, more=_MIMO,
    ),
    "minimax_m2": model(
        "MiniMaxM2ForCausalLM", "minimax_m2", LOCAL,
        more={"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    ),
    "ministral3": model("Ministral3ForCausalLM", "ministral3"),
    "mistral": model("MistralForCausalLM", "mistral"),
    "nemotron": model("NemotronForCausalLM", "nemotron"),
    "nemotron_h": model("NemotronHForCausalLM", "nemotron_h", MIXED),
    "olmo": model("OlmoForCausalLM", "olmo", NARROW),
    "olmo2": model("Olmo2ForCausalLM", "olmo2", NARROW),
    "olmo3": model("Olmo3ForCausalLM", "olmo3", NARROW),
    "olmoe": model("OlmoeForCausalLM", "olmoe", _WIDE, NARROW),
    "opt": model("OPTForCausalLM", "opt", ALL_HEADS, _TIED, ffn_dim=96, word_embed_proj_dim=128),
    "phi": model("PhiForCausalLM", "phi", NARROW),
    "phimoe": model(
        "PhiMoEForCausalLM", "phimoe", LOCAL, NARROW, attention_bias=True, lm_head_bias=True, kind="PhimoeForCausalLM"
    ),
    "qwen2_moe": model(
        "Qwen2MoeForCausalLM", "qwen2_moe", EXPERTS, NARROW, shared_expert_intermediate_size=40, mlp_only_layers=[0]
    ),
    "qwen3_5": model("Qwen3_5ForCausalLM", "qwen3_5_text", NET, FOUR),
    "qwen3_5_moe": model("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", NET_EXPERTS),
    "qwen3_next": model("Qwen3NextForCausalLM", "qwen3_next", NET_EXPERTS),
    "seed_oss": model("SeedOssForCausalLM", "seed_oss"),
    "smollm3": model("SmolLM3ForCausalLM", "smollm3", NARROW),
    "stablelm": model("StableLmForCausalLM", "stablelm", NARROW),
    "starcoder2": model("Starcoder2ForCausalLM", "starcoder2", NARROW),
    "vaultgemma": model("VaultGemmaForCausalLM", "vaultgemma", _TIED),
    "glm": model("GlmForCausalLM", "glm", attention_bias=True),
    "axk1": model(
        "AXK1ForCausalLM", "axk1", LATENT, mlp_layer_types=["dense", "sparse"], more=_BY_BIAS,
        stored={"model.layers.0.post_mlp_layernorm.weight": (128,)},
    ),
    "internlm3": model(
        "InternLM3ForCausalLM", "llama", more={"model_type": "internlm3"}, kind="LlamaForCausalLM"
    ),
    "hrm_text": model("HrmTextForCausalLM", "hrm_text", ALL_HEADS, num_layers_per_stack=2),
    "minicpm3": model("MiniCPM3ForCausalLM", "minicpm3", LATENT_HEADS, NARROW),
    "kimi_linear": model(
        "KimiLinearForCausalLM", "kimi_linear", EXPERTS, LATENT_HEADS, NARROW, q_lora_rank=None,
        moe_intermediate_size=64, n_shared_experts=2, first_k_dense_replace=1,
        linear_head_dim=16, linear_num_heads=8, linear_conv_kernel_dim=4,
        layer_types=["linear_attention", "full_attention"], mlp_layer_types=["dense", "sparse"],
        mended={"model.layers.0.block_sparse_moe.": "model.layers.0.mlp."},
        more={
            "num_shared_experts": 2, "num_expert_group": 1, "mla_use_nope": True,
            "linear_attn_config": {
                "kda_layers": [1], "full_attn_layers": [2], "head_dim": 16, "num_heads": 8, "short_conv_kernel_size": 4
            },
        },
    ),
    "deepseek_v4": model(
        "DeepseekV4ForCausalLM", "deepseek_v4", EXPERTS, num_key_value_heads=1, n_routed_experts=12, num_experts=None,
        n_shared_experts=1, q_lora_rank=14, head_dim=512, qk_rope_head_dim=64, o_groups=4, o_lora_rank=10,
        index_n_heads=4, index_head_dim=128, index_topk=8, hc_mult=4, num_hidden_layers=4,
        layer_types=[*["sliding_attention"] * 2, "compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        mended={
            "model.embed_tokens.": "embed.", "model.hc_head.hc_": "hc_head_", "model.": "",
            **{f"layers.{layer}.attn.norm.": f"layers.{layer}.attn.kv_norm." for layer in range(4)},
        },
        more={
            **_BY_BIAS, "num_hash_layers": 1, "compress_ratios": [0, 0, 4, 128], "mlp_layer_types": None,
            "layer_types": None,
        },
    ),
    "flex_olmo": model("FlexOlmoForCausalLM", "flex_olmo", _WIDE, NARROW, most=2),
    "hunyuan_v1_moe": model("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", num_experts=10, moe_topk=2, most=2),
    "mellum": model("MellumForCausalLM", "mellum", EXPERTS, most=2),
    "olmo_hybrid": replace(
        model(
            "OlmoHybridForCausalLM", "olmo_hybrid", NARROW, linear_num_key_heads=4, linear_num_value_heads=8,
            linear_key_head_dim=16, linear_value_head_dim=8, linear_conv_kernel_dim=4,
            layer_types=["linear_attention", "full_attention"],
        ),
        renamed={
            "model.layers.0.attention_layer_norm.": "model.layers.0.input_layernorm.",
            **{
                f"model.layers.{layer}.feedforward_layer_norm.": f"model.layers.{layer}.post_attention_layernorm."
                for layer in (0, 1)
            },
        },
    ),
    "gemma3n": model(
        "Gemma3nForCausalLM", "gemma3n_text", _TIED, num_hidden_layers=4, num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2, intermediate_size=[96, 80, 96, 80],
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0], hidden_size_per_layer_input=12, laurel_rank=20,
        vocab_size_per_layer_input=70,
    ),
    "hy_v4": model(
        "HYV4ForCausalLM", "hy_v4", LATENT, _INDEXED, n_group=1, num_hidden_layers=3, first_k_dense_replace=None,
        mlp_layer_types=["dense", "sparse", "sparse"], indexer_types=["full", "full", "shared"], hc_mult=4,
        mended={
            "model.hc_pre.hc_head.": "model.hc_head.",
            **{
                f"model.layers.{layer}.{old}.": f"model.layers.{layer}.{new}."
                for layer in range(3)
                for old, new in (
                    ("mlp.linear_gate", "mlp.gate_proj"),
                    ("mlp.shared_experts.linear_gate", "mlp.shared_experts.gate_proj"),
                    ("hc_pre.hc_attn_layer", "hc_attn_layer.hc_pre"), ("hc_pre.hc_mlp_layer", "hc_mlp_layer.hc_pre"),
                )
            },
        },
        more={"layer_types": ["deepseek_sparse_attention"] * 3},
    ),
    "qwen4_exp_text": replace(
        model(
            "Qwen4ExpForCausalLM", "qwen4_exp_text", NET_EXPERTS, shared_expert_intermediate_size=24,
            layer_types=["linear_attention", "indexed_attention"], full_attention_interval=None, hc_count=4,
            hc_lowrank=10, indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=128, indexer_budget=64,
            indexer_compress_ratio=4, output_gate_type="silu",
        ),
        dtype="bfloat16",
    ),
}  # fmt: skip
