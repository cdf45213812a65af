"""Models of text and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.oracles.vllm_peer.model import Config, Model, model
from tests.oracles.vllm_peer.text import EXPERTS, FOUR, NARROW, NET, NET_EXPERTS

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


def pictured(
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
    inner = model(architecture, text, *parts).config
    whole = {"model_type": model_type, "tie_word_embeddings": False, **config}
    whole |= {"text_config": inner, "vision_config": vision}
    return Model(architecture, whole, kind=architecture, renamed=renamed or {}, transposed=transposed)


PICTURES = {
    "gemma3_whole": pictured(
        "Gemma3ForConditionalGeneration", "gemma3", "gemma3_text", vision=_SIGLIP, mm_tokens_per_image=4,
        renamed={"vision_tower.": "vision_tower.vision_model."},
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
