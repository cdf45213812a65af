"""transformers 5.24: every model type that builds from a tiny config, with the names that it has in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.oracles.quiet import quiet

_SIZES = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "embed_dim": 32, "dim": 32, "width": 32, "model_dim": 32,
    "intermediate_size": 32, "ffn_dim": 32, "ffn_hidden_size": 32, "decoder_ffn_dim": 32, "encoder_ffn_dim": 32,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "dense_intermediate_size": 32,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "depth": 2, "encoder_layers": 2,
    "decoder_layers": 2, "num_encoder_layers": 2, "num_decoder_layers": 2, "num_attention_heads": 4, "n_head": 4,
    "num_heads": 4, "n_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "projection_dim": 32, "out_hidden_size": 32, "vision_feature_dim": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "image_size": 28, "patch_size": 14, "first_k_dense_replace": 1, "decoder_hidden_size": 32,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_num_heads": 4, "mamba_head_dim": 8,
    "num_kv_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 16,
}  # fmt: skip
_FILLED: dict[str, dict[str, Any]] = {
    "blip_2_qformer": {"encoder_hidden_size": 32},
    "molmo2_text": {"additional_vocab_size": 97},  # it is stored as half of an embedding
    "molmo2_vision": {"num_position_embeddings": 9},
    "molmo2_adapter": {"vision_feature_layer": [1, 0], "text_hidden_size": 32},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "hunyuan_v1_moe": {"head_dim": 8},
    "deepseek_v4": {"o_groups": 2, "o_lora_rank": 6, "index_n_heads": 3, "index_head_dim": 10},
    "granite_speech_encoder": {
        "hidden_dim": 32, "dim_head": 8, "input_dim": 20, "max_pos_emb": 12, "context_size": 8, "output_dim": 14,
    },
    "granite_speech_plus_encoder": {
        "hidden_dim": 32, "dim_head": 8, "input_dim": 20, "max_pos_emb": 12, "context_size": 8, "output_dim": 14,
    },
    "cosmos3_edge_text": {"head_dim": 128},
    "hunyuan_vl_vision": {"text_hidden_size": 32, "max_image_size": 56},
    "glm5_next_text": {
        "num_key_value_heads": 4, "qk_rope_head_dim": 0, "head_dim": 0, "index_n_heads": 3, "index_head_dim": 10,
        "index_topk": 8, "index_kpool": 4, "linear_head_dim": 5, "linear_num_heads": 6, "hc_mult": 3,
        "layer_types": ["linear_attention", "indexed_attention"], "mlp_layer_types": ["dense", "sparse"],
        "indexer_types": ["full", "full"],
    },
    "glm5_next_vision": {"projection_intermediate_size": 20},
    "qwen4_exp_text": {
        "indexer_n_heads": 3, "indexer_kv_heads": 1, "indexer_head_dim": 10, "indexer_budget": 8,
        "indexer_compress_ratio": 4, "hc_count": 3, "hc_lowrank": 6, "shared_expert_intermediate_size": 20,
        "layer_types": ["linear_attention", "indexed_attention"],
    },
    "hy_v4": {"index_n_heads": 3, "index_head_dim": 10, "n_shared_experts": 2, "hc_mult": 3},
    "hy_v4_vl_text": {
        "index_n_heads": 3, "index_head_dim": 10, "n_shared_experts": 2, "hc_mult": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]},
    },
    "hy_v4_vl_vision": {"max_image_size": 56},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 0},
    "kimi_k25": {"projection_hidden_size": 32},
    "minimax_m3_vl": {"projector_hidden_size": 20, "merged_hidden_size": 128},
    "minimax_m3_vl_text": {"shared_intermediate_size": 12, "index_head_dim": 10, "rotary_dim": 4},
    "nemotron_h_omni": {"projector_hidden_size": 20},
    "inkling_text": {
        "swa_num_attention_heads": 6, "swa_num_key_value_heads": 3, "swa_head_dim": 10, "sliding_window_size": 12,
        "d_rel": 5, "rel_extent": 14, "layer_types": ["hybrid_sliding", "hybrid"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "inkling_audio": {"n_mel_bins": 5, "mel_vocab_size": 7, "text_hidden_size": 32},
    "inkling_vision": {"n_layers": 4, "patch_size": 4, "text_hidden_size": 32},
    "radio": {"patch_size": 16, "image_size": 32, "max_img_size": 64},
    "muse_glimmer": {"out_hidden_size": 128, "projector_hidden_size": 24},
    "step3p5": {"share_expert_dim": 12},
    "step3p5_vision": {"mlp_ratio": 1.5, "intermediate_size": 48},
    "llama4_vision_model": {"projector_input_dim": 24, "projector_output_dim": 24, "vision_output_dim": 24},
    "nemotron": {"num_key_value_heads": 2},
    "gemma3n_text": {
        "num_kv_shared_layers": 0, "intermediate_size": [32, 32], "activation_sparsity_pattern": [0.5, 0.0],
        "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 89, "laurel_rank": 6,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 10, "n_groups": 2},
    "longcat_flash": {
        "expert_ffn_hidden_size": 24, "zero_expert_num": 3, "moe_topk": 2, "qk_head_dim": 12, "num_key_value_heads": 4,
    },
    "olmo_hybrid": {
        "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
}  # fmt: skip
"""Model types whose default config lacks what a tiny model needs, with values for it."""
_LISTS = frozenset(
    {
        "layer_types", "mlp_layer_types", "layers_block_type", "num_attention_heads_per_layer", "attention_layers",
        "layer_rope_theta",
    }
)  # fmt: skip
_VOCABULARY = 97
_MOST = 8_000_000
"""Parameters of a model that is still tiny."""
_GATED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "granitemoehybrid", "olmo_hybrid")
_MIXED: dict[str, dict[str, Any]] = {
    **{each: {"layer_types": ["linear_attention", "full_attention"]} for each in _GATED},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "deepseek_v4": {
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe"],
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
}
"""Layers of every kind, where a tiny config would not have them."""
AUTO = (
    "AutoModelForImageTextToText", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel",
    "AutoModelForPreTraining",
)  # fmt: skip


def types() -> list[str]:
    """All model types."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES)


def shrunk(config: Any) -> Any:
    from transformers import PreTrainedConfig

    filled = _FILLED.get(config.model_type, {})
    for key, value in filled.items():
        setattr(config, key, value)
    for key, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            shrunk(value)
        elif key in filled:
            continue
        elif key in _SIZES and (type(value) is int or (key == "head_dim" and value is None)):
            setattr(config, key, _SIZES[key])
        elif key in ("vocab_size", "vocabulary_size") and type(value) is int and value > 1000:
            setattr(config, key, _VOCABULARY)
        elif key == "unpadded_vocab_size" and type(value) is int:
            setattr(config, key, _VOCABULARY - 3)
        elif key.endswith("_token_id") and type(value) is int and value >= _VOCABULARY:
            setattr(config, key, 1)
        elif key in _LISTS and isinstance(value, list):
            setattr(config, key, value[:2])
        elif key == "attention_types" and isinstance(value, list):
            setattr(config, key, [[kinds, 1] for kinds, _ in value])
    if getattr(config, "stage_names", None) and getattr(config, "num_hidden_layers", 0) == 2:
        config.stage_names = ["stem", "stage1", "stage2"]
        config.set_output_features_output_indices(out_features=None, out_indices=None)
    return config


def build(model_type: str, **changes: Any) -> Any:
    """A tiny model of a type, its weights drawn; None where it does not build from a tiny config with these changes."""
    import transformers
    from transformers import AutoConfig

    with quiet():
        for factory in AUTO:
            try:
                config = shrunk(AutoConfig.for_model(model_type))
                if changes or model_type in _MIXED:
                    given = {**config.to_dict(), **_MIXED.get(model_type, {}), **changes}
                    config = AutoConfig.for_model(**given)
                make = getattr(transformers, factory)
                with torch.device("meta"):
                    count = sum(p.numel() for p in make.from_config(config).parameters())
                if count <= _MOST:
                    return make.from_config(config).eval()
            except Exception:  # noqa: BLE001 - some types have no class of this kind, some no tiny config
                continue
    return None


def saved(model: Any, folder: Path) -> Path | None:
    """What `save_pretrained` stores; None where it cannot."""
    with quiet():
        try:
            model.save_pretrained(folder)
        except Exception:  # noqa: BLE001 - transformers' own
            return None
    return folder
