"""Models of text and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.oracles.vllm_peer.model import Config, Model, model
from tests.oracles.vllm_peer.text import (
    ALL_HEADS,
    BALANCED,
    EXPERTS,
    FOUR,
    LATENT,
    LATENT_HEADS,
    LOCAL,
    MIXED,
    NARROW,
    NET,
    NET_EXPERTS,
)

_TOWER = {
    "depth": 2, "hidden_size": 64, "num_heads": 4, "in_channels": 3, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "intermediate_size": 96, "out_hidden_size": 128,
}  # fmt: skip
_POSITIONS = {**_TOWER, "num_position_embeddings": 16}
_DEEP = {**_POSITIONS, "deepstack_visual_indexes": [0]}
_SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "image_size": 16, "patch_size": 4, "vision_use_head": False,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_THREE = {"rope_parameters": {**_ROPE, "mrope_section": [8, 12, 12], "mrope_interleaved": True}}
_PART = {
    "rope_parameters": {
        **_ROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 3, 3], "mrope_interleaved": True,
    }
}  # fmt: skip


def pictured(
    architecture: str,
    model_type: str,
    text: str,
    *parts: Config,
    vision: Config,
    renamed: Mapping[str, str] | None = None,
    transposed: str = "",
    unread: tuple[str, ...] = (),
    **config: Any,
) -> Model:
    """A model of text and pictures."""
    inner = model(architecture, text, *parts).config
    whole = {"model_type": model_type, "tie_word_embeddings": False, **config}
    whole |= {"text_config": inner, "vision_config": vision}
    return Model(architecture, whole, kind=architecture, renamed=renamed or {}, transposed=transposed, unread=unread)


def _nemotron_omni() -> Model:
    """Nemotron 3 Omni; what its makers' config has besides, stands in it and in its parts."""
    kind = "NemotronH_Omni_Reasoning_V3"
    tower = {
        "model_type": "radio", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4,
        "image_size": 16, "max_img_size": 32, "num_cls_tokens": 1, "num_registers": 9, "video_temporal_patch_size": 2,
        "mlp_ratio": 4.0,
    }  # fmt: skip
    text = {**model("NemotronHForCausalLM", "nemotron_h", MIXED).config, "dtype": "float32"}
    config = {
        "model_type": "nemotron_h_omni", "text_config": text, "vision_config": tower, "vision_hidden_size": 64,
        "projector_hidden_size": 40, "video_temporal_patch_size": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    args = {"model": "vit_tiny", "cpe_max_size": 32, "register_multiple": 10}
    more = {
        "text_config": {**text, "architectures": ["NemotronHForCausalLM"]}, "vit_hidden_size": 64,
        "vision_config": {**tower, "args": args, "preferred_resolution": [16, 16]}, "force_image_size": 16,
        "patch_size": 4, "template": "", "ps_version": "v2", "image_tag_type": "internal", "norm_mean": [0.5] * 3,
        "norm_std": [0.5] * 3,
    }  # fmt: skip
    unread = ("summary_idxs",)
    return Model(kind, config, more, kind=kind, unread=unread, left=".ls", described=True)


def _inkling() -> Model:
    """Inkling; in the published config, which vLLM reads, `intermediate_size` is the width of the experts."""
    text = {
        "model_type": "inkling_text", "hidden_size": 128, "num_hidden_layers": 3, "vocab_size": 90,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 8, "swa_head_dim": 24, "d_rel": 6, "rel_extent": 20, "sliding_window_size": 12,
        "local_layer_ids": [0, 2], "sconv_kernel_size": 4, "intermediate_size": 96, "moe_intermediate_size": 40,
        "dense_mlp_idx": 1, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2,
        "shared_expert_sink": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    vision = {"model_type": "inkling_vision", "patch_size": 4, "temporal_patch_size": 2, "n_layers": 3}
    audio = {"model_type": "inkling_audio", "n_mel_bins": 5, "mel_vocab_size": 7}
    config = {"model_type": "inkling_mm_model", "text_config": text, "vision_config": vision, "audio_config": audio}
    flags = ("use_embed_norm", "use_sconv", "use_gate_bias", "use_global_scale")
    seen = {"vision_encoder_type": "hmlp", "decoder_dmodel": 128, "n_channels": 3, "use_vision_norm": True}
    heard = {
        "decoder_dmodel": 128, "dmel_min_value": -7.0, "dmel_max_value": 2.0, "use_audio_norm": True,
        "audio_mode": "dmel",
    }  # fmt: skip
    widths = {"dense_intermediate_size": 96, "intermediate_size": 40, "moe_intermediate_size": None}
    more = {
        "text_config": {**text, **widths, **dict.fromkeys(flags, True)}, "vision_config": {**vision, **seen},
        "audio_config": {**audio, **heard},
    }  # fmt: skip
    kind = "InklingForConditionalGeneration"
    return Model(kind, config, more, kind=kind, dtype="bfloat16")


PICTURES = {
    "inkling": _inkling(),
    "nemotron_h_omni": _nemotron_omni(),
    "gemma3_whole": pictured(
        "Gemma3ForConditionalGeneration", "gemma3", "gemma3_text", vision=_SIGLIP, mm_tokens_per_image=4,
        renamed={"vision_tower.": "vision_tower.vision_model."},
    ),
    "qwen2_vl": pictured(
        "Qwen2VLForConditionalGeneration", "qwen2_vl", "qwen2_vl_text", NARROW, _THREE, {"hidden_size": 512},
        vision={**_TOWER, "embed_dim": 64, "mlp_ratio": 2, "hidden_size": 512},
    ),
    "qwen2_5_vl": pictured(
        "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "qwen2_5_vl_text", NARROW, _THREE, {"hidden_size": 512},
        vision={**_TOWER, "out_hidden_size": 512, "fullatt_block_indexes": [1], "window_size": 8},
    ),
    "qwen3_vl": pictured("Qwen3VLForConditionalGeneration", "qwen3_vl", "qwen3_vl_text", _THREE, vision=_DEEP),
    "qwen3_vl_moe": pictured(
        "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "qwen3_vl_moe_text", EXPERTS, _THREE,
        {"norm_topk_prob": True}, vision=_DEEP, transposed="_proj",
    ),
    "qwen3_5_whole": pictured(
        "Qwen3_5ForConditionalGeneration", "qwen3_5", "qwen3_5_text", NET, FOUR, _PART, vision=_POSITIONS
    ),
    "qwen3_5_moe_whole": pictured(
        "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", "qwen3_5_moe_text", NET_EXPERTS, _PART, vision=_POSITIONS
    ),
}  # fmt: skip

_CLIP = {**_SIGLIP, "model_type": "clip_vision_model", "projection_dim": 64}
_PLAIN = {key: value for key, value in _SIGLIP.items() if key not in ("vision_use_head", "model_type")}
_BRANCHES = {"use_qk_norm": True, "attention_bias": True, "image_size": [16, 16], "patch_size": [4, 4]}
_ASKS = {
    "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "encoder_hidden_size": 64, "vocab_size": 30, "max_position_embeddings": 16,
}  # fmt: skip
_FIRST = {"vision_tower.": "vision_tower.vision_model."}
_UNSEEN = ("encoder.layers.1.", "post_layernorm")
"""Of a tower whose last layer but one the text sees."""
_ARIA = {"moe_num_experts": 10, "moe_topk": 2, "moe_num_shared_experts": 2}

PICTURES |= {
    "llava": pictured(
        "LlavaForConditionalGeneration", "llava", "llama", NARROW, vision=_CLIP, renamed=_FIRST, unread=_UNSEEN
    ),
    "llava_next": pictured(
        "LlavaNextForConditionalGeneration", "llava_next", "llama", NARROW, vision=_CLIP, renamed=_FIRST,
        unread=_UNSEEN,
    ),
    "llava_next_video": pictured(
        "LlavaNextVideoForConditionalGeneration", "llava_next_video", "llama", NARROW, vision=_CLIP, renamed=_FIRST,
        unread=(*_UNSEEN, "image_newline"),
    ),
    "llava_onevision": pictured(
        "LlavaOnevisionForConditionalGeneration", "llava_onevision", "qwen2", NARROW, vision=_SIGLIP, renamed=_FIRST,
        unread=("post_layernorm",),
    ),
    "mistral3": pictured(
        "Mistral3ForConditionalGeneration", "mistral3", "mistral", vision={**_PLAIN, "model_type": "pixtral"},
        vision_feature_layer=-2, unread=("transformer.layers.1.",),
    ),
    "internvl": pictured(
        "InternVLForConditionalGeneration", "internvl", "qwen2", NARROW,
        vision={**_PLAIN, **_BRANCHES, "model_type": "internvl_vision"},
    ),
    "idefics3": pictured(
        "Idefics3ForConditionalGeneration", "idefics3", "llama", NARROW,
        vision={**_PLAIN, "model_type": "idefics3_vision"},
    ),
    "smolvlm": pictured(
        "SmolVLMForConditionalGeneration", "smolvlm", "llama", NARROW,
        vision={**_PLAIN, "model_type": "smolvlm_vision"},
    ),
    "paligemma": pictured(
        "PaliGemmaForConditionalGeneration", "paligemma", "gemma",
        vision={**_SIGLIP, "projection_dim": 128, "vision_use_head": True}, projection_dim=128, renamed=_FIRST,
        unread=("vision_tower.head.",),
    ),
    "aria": pictured(
        "AriaForConditionalGeneration", "aria", "aria_text", _ARIA, NARROW,
        vision={**_PLAIN, "model_type": "idefics3_vision"}, unread=("post_layernorm",),
    ),
    "blip_2": pictured(
        "Blip2ForConditionalGeneration", "blip-2", "opt", ALL_HEADS, {"ffn_dim": 96, "word_embed_proj_dim": 128},
        vision={**_PLAIN, "model_type": "blip_2_vision_model", "qkv_bias": True}, qformer_config=_ASKS,
        num_query_tokens=6,
    ),
}  # fmt: skip

_GLM_THREE = {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [4, 6, 6]}}
_GLM_NARROW = {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}}
_OCR_THREE = {"rope_parameters": {**_ROPE, "mrope_section": [8, 12, 12]}}
_GLM = {**_TOWER, "image_size": 16, "out_hidden_size": 128, "intermediate_size": 80}
_OCR = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16}

_COSMOS = {**{key: value for key, value in _OCR.items() if key != "image_size"}, "patch_size": 4, "num_patches": 16}
_MERGES = {"input_hidden_size": 64, "merger_intermediate_size": 112, "out_hidden_size": 128, "spatial_merge_size": 2}
_SIGLIP2 = {
    f"model.visual.encoder.layers.{layer}.{old}.": f"model.visual.encoder.layers.{layer}.{new}."
    for layer in (0, 1)
    for old, new in (
        ("mlp.up_proj", "mlp.fc1"), ("mlp.down_proj", "mlp.fc2"), ("self_attn.to_q", "self_attn.q_proj"),
        ("self_attn.to_k", "self_attn.k_proj"), ("self_attn.to_v", "self_attn.v_proj"),
    )
}  # fmt: skip
_KIMI = {
    "language_model.model.blocks.": "language_model.model.layers.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    "model.mm_projector.": "mm_projector.",
}

_CHOSEN = {"index_n_heads": 2, "index_head_dim": 64, "mlp_layer_types": ["dense", "sparse"]}
_M3 = pictured(
    "MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl", "minimax_m3_vl_text", LOCAL, _CHOSEN,
    {
        "dense_intermediate_size": 112, "shared_intermediate_size": 24, "intermediate_size": 24, "rotary_dim": 32,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
    },
    vision={**_OCR, "patch_size": 4}, projector_hidden_size=56,
)  # fmt: skip
_M3_TEXT = {
    **{key: value for key, value in _M3.config["text_config"].items() if key not in {*_CHOSEN, "layer_types"}},
    "model_type": "minimax_m3_text",
    "moe_layer_freq": [0, 1],
    "sparse_attention_config": {
        "sparse_index_dim": 64, "sparse_num_index_heads": 2, "sparse_topk_blocks": 16, "sparse_block_size": 128,
        "sparse_attention_freq": [0, 1], "sparse_disable_index_value": [0, 1], "sparse_score_type": "max",
        "sparse_init_block": 0, "sparse_local_block": 1,
    },
}  # fmt: skip
_M3_TOWER = {
    **_OCR, "model_type": "clip_vision_model", "patch_size": 4, "num_channels": 3, "hidden_act": "gelu",
    "layer_norm_eps": 1e-5, "rope_theta": 1e4,
    "img_token_compression_config": {"temporal_patch_size": 2, "spatial_merge_size": 2},
}  # fmt: skip
_NEXT = pictured(
    "Glm5NextForConditionalGeneration", "glm5_next", "glm5_next_text", BALANCED, LATENT_HEADS,
    {
        "qk_rope_head_dim": 0, "head_dim": None, "n_group": 1, "layer_types": ["linear_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse"], "indexer_types": ["full", "full"], "linear_head_dim": 16,
        "linear_num_heads": 8, "linear_conv_kernel_dim": 4, "index_n_heads": 4, "index_head_dim": 128,
        "index_topk": 8, "index_kpool": 4,
    },
    vision={**_GLM, "projection_intermediate_size": 112},
)  # fmt: skip
_NEXT_TEXT = {
    **_NEXT.config["text_config"], "topk_method": "noaux_tc", "scoring_func": "sigmoid", "mhc": True,
    "mla_use_nope": True, "indexer_rope_interleave": True,
}  # fmt: skip

PICTURES |= {
    "glm4v": pictured(
        "Glm4vForConditionalGeneration", "glm4v", "glm4v_text", NARROW, _GLM_NARROW, {"attention_bias": True},
        vision=_GLM,
    ),
    "glm4v_moe": pictured(
        "Glm4vMoeForConditionalGeneration", "glm4v_moe", "glm4v_moe_text", BALANCED, _GLM_THREE,
        {"attention_bias": True, "use_qk_norm": False},
        vision=_GLM,
    ),
    "paddleocr_vl": pictured(
        "PaddleOCRVLForConditionalGeneration", "paddleocr_vl", "paddleocr_vl_text", _OCR_THREE,
        vision={**_OCR, "patch_size": 4},
    ),
    "kimi_k25": replace(
        pictured(
            "KimiK25ForConditionalGeneration", "kimi_k25", "deepseek_v3", LATENT, {"topk_method": "noaux_tc"},
            vision={**_OCR, "pos_emb_height": 4, "pos_emb_width": 6, "patch_size": 4}, projection_hidden_size=64,
        ),
        kind="Kimi_K25ForConditionalGeneration", mended=_KIMI,
    ),
    "qianfan_ocr": replace(
        pictured(
            "QianfanOCRForConditionalGeneration", "qianfan_ocr", "qwen3", vision={**_OCR, "patch_size": 4},
            downsample_ratio=0.5,
        ),
        mended={"language_model.model.encoder.layers.": "language_model.model.layers."},
        more={
            "force_image_size": 16,
            "vision_config": {**_OCR, "patch_size": 4, "model_type": "qianfan_ocr_vision", "qkv_bias": True},
        },
    ),
    "cosmos3_edge": replace(
        pictured(
            "Cosmos3EdgeForConditionalGeneration", "cosmos3_edge", "cosmos3_edge_text", _THREE, vision=_COSMOS,
            projector_hidden_size=112,
        ),
        mended=_SIGLIP2,
        inside="transformer",
        more={"projector_config": _MERGES},
    ),
    "llama4_whole": pictured(
        "Llama4ForConditionalGeneration", "llama4", "llama4_text", LOCAL,
        {"num_experts_per_tok": 1, "intermediate_size_mlp": 112, "interleave_moe_layer_step": 2},
        vision={
            "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 16, "patch_size": 4, "vision_output_dim": 48, "projector_input_dim": 48,
            "projector_output_dim": 48, "pixel_shuffle_ratio": 0.5,
        },
    ),
    "muse_glimmer": pictured(
        "MuseGlimmerForConditionalGeneration", "muse_glimmer", "muse_glimmer_text",
        vision={
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "patch_size": 4, "patch_temporal": 2, "pos_emb_height": 4, "pos_emb_width": 4,
            "merge_kernel_size": 2, "merge_size": 2, "output_dim": 256, "adapter_dim": 40,
            "layer_types": ["full_attention", "full_attention"],
        },
        out_hidden_size=256, projector_hidden_size=40,
    ),
    "hunyuan_vl": pictured(
        "HunYuanVLForConditionalGeneration", "hunyuan_vl", "hunyuan_vl_text",
        vision={**_OCR, "patch_size": 4, "max_image_size": 16, "text_hidden_size": 128},
    ),
    "minimax_m3_vl": replace(
        _M3,
        mended={
            f"{root}.block_sparse_moe.": f"{root}.mlp."
            for root in (
                "language_model.model.layers.0",
                *(f"vision_tower.vision_model.encoder.layers.{layer}" for layer in (0, 1)),
            )
        },
        more={"text_config": _M3_TEXT, "vision_config": _M3_TOWER},
    ),
    "glm5_next": replace(_NEXT, more={"text_config": _NEXT_TEXT}),
}  # fmt: skip
