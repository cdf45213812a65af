"""Tiny models of every type that transformers has a config for, as far as sizes of their own can be made small."""

from __future__ import annotations

from typing import Any

from torch import nn

_SIZES: dict[str, Any] = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32, "embedding_size": 32,
    "projection_dim": 32, "word_embed_proj_dim": 32, "hidden_dim": 32, "rotary_dim": 8, "d_kv": 8, "head_dim": 8,
    "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_encoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4,
    "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "n_inner": 48, "d_ff": 48, "ffn_dim": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "n_routed_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 64, "max_position_embeddings": 64,
    "n_positions": 64, "image_size": 32, "patch_size": 16, "kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "state_size": 4, "depth": 2, "out_hidden_size": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MOST = 6_000_000
"""Parameters of what still counts as tiny."""


def types() -> list[str]:
    """Return the model types that transformers can make a model of."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def build(model_type: str) -> nn.Module | None:
    """Return a tiny model, on meta; None where these sizes do not make one."""
    import torch
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[model_type]()
        _shrink(config)
        with torch.device("meta"):
            model: nn.Module = AutoModel.from_config(config)
    except Exception:  # noqa: BLE001 - whatever sizes that do not fit together raise
        return None
    count = sum(parameter.numel() for parameter in model.parameters())
    return model if count <= MOST else None


def _shrink(config: Any) -> None:
    for name, size in _SIZES.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, size)
    layers = getattr(config, "num_hidden_layers", None)
    kinds = getattr(config, "layer_types", None)
    if layers and isinstance(kinds, list):
        config.layer_types = kinds[:layers]
    for name in getattr(config, "sub_configs", {}) or {}:
        inner = getattr(config, name, None)
        if inner is not None:
            _shrink(inner)
