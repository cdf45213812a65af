"""Mistral's own files: names of their makers' code, and rotary dims of q and k beside each other."""

from __future__ import annotations

import re

import torch

from tests.oracles.vllm_peer.model import Config

_TEXT, _EARS = r"language_model\.model\.layers\.(\d+)\.", r"audio_tower\.layers\.(\d+)\."
_HEARD = "mm_whisper_embeddings."
_LAYER = rf"{_HEARD}whisper_encoder.transformer.layers.\1."
_NAMES = (
    (r"language_model\.lm_head\.", "output."),
    (r"language_model\.model\.embed_tokens\.", f"{_HEARD}tok_embeddings."),
    (r"language_model\.model\.norm\.", "norm."),
    (rf"{_TEXT}input_layernorm\.", r"layers.\1.attention_norm."),
    (rf"{_TEXT}post_attention_layernorm\.", r"layers.\1.ffn_norm."),
    (rf"{_TEXT}self_attn\.([qkvo])_proj\.", r"layers.\1.attention.w\2."),
    (rf"{_TEXT}mlp\.gate_proj\.", r"layers.\1.feed_forward.w1."),
    (rf"{_TEXT}mlp\.down_proj\.", r"layers.\1.feed_forward.w2."),
    (rf"{_TEXT}mlp\.up_proj\.", r"layers.\1.feed_forward.w3."),
    (r"audio_tower\.conv1\.", f"{_HEARD}whisper_encoder.conv_layers.0."),
    (r"audio_tower\.conv2\.", f"{_HEARD}whisper_encoder.conv_layers.1."),
    (r"audio_tower\.layer_norm\.", f"{_HEARD}whisper_encoder.transformer.norm."),
    (rf"{_EARS}self_attn_layer_norm\.", rf"{_LAYER}attention_norm."),
    (rf"{_EARS}final_layer_norm\.", rf"{_LAYER}ffn_norm."),
    (rf"{_EARS}self_attn\.([qkv])_proj\.", rf"{_LAYER}attention.w\2."),
    (rf"{_EARS}self_attn\.out_proj\.", rf"{_LAYER}attention.wo."),
    (rf"{_EARS}fc([12])\.", rf"{_LAYER}feed_forward.w\2."),
    (r"multi_modal_projector\.linear_1\.", f"{_HEARD}audio_language_projection.0."),
    (r"multi_modal_projector\.linear_2\.", f"{_HEARD}audio_language_projection.2."),
)
_COMPUTED = "embed_positions."
"""Tensors that these files lack."""


def mistral_format(hub: dict[str, torch.Tensor], text: Config) -> dict[str, torch.Tensor]:
    """Return the tensors of Mistral's files of a model, of those of the hub's files and the config of its text."""
    stored = {}
    for name, value in hub.items():
        if _COMPUTED in name:
            continue
        renamed = [re.sub(f"^{pattern}", other, name) for pattern, other in _NAMES]
        (stored_name,) = {other for other in renamed if other != name}
        heads = {"wq": text["num_attention_heads"], "wk": text["num_key_value_heads"]}
        matrix = stored_name.removeprefix("layers.").split(".")[-2]
        if stored_name.startswith("layers.") and matrix in heads:  # rows of each head's two halves, one by one
            halves = value.view(heads[matrix], 2, -1, value.shape[1])
            value = halves.transpose(1, 2).reshape(value.shape).contiguous()
        stored[stored_name] = value
    return stored
