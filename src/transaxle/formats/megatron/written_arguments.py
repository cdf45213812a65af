"""Megatron's arguments for a checkpoint that is written: as far as the model's config and its tensors tell them.

Megatron compares a few with its own when it loads, and takes the model's sizes from them with `--use-checkpoint-args`.
What neither tells is left out: a missing argument is Megatron's default, a wrong one would be believed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from transaxle.formats.megatron.run_arguments import KEYS

_ROUTER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?mlp\.router\.weight")
_DEGREES = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "context_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
}
"""Distributed checkpoints have none: these are what a run on one device has."""
_SILU = frozenset({"silu", "swish"})


def arguments(config: Mapping[str, Any], names: Collection[str], padded_vocabulary: int | None) -> dict[str, Any]:
    """Return the arguments of the run that would have written a checkpoint.

    Args:
        config: the model's config.json; empty where it is not known.
        names: Megatron's names of its tensors.
        padded_vocabulary: rows of the embedding; None: Megatron pads them, as the ranks of its run need it.
    """
    known = _of_text(config)
    found = {argument: known[key] for key, argument in KEYS.items() if known.get(key) is not None}
    if not {"num_layers", "hidden_size", "num_attention_heads"} <= found.keys():
        return {}  # Megatron asks for these of any arguments; without arguments it asks nothing
    heads = found["num_attention_heads"]
    found["num_query_groups"] = found.get("num_query_groups", heads)
    found["group_query_attention"] = found["num_query_groups"] != heads
    found.setdefault("kv_channels", found["hidden_size"] // heads)
    found |= _DEGREES | _from_names(names, found) | _from_config(known)
    if not any(name.startswith("mtp.") for name in names):
        found.pop("mtp_num_layers", None)  # configs of models that are stored without these layers have it, too
    found["multi_latent_attention"] = "kv_lora_rank" in found
    if padded_vocabulary is not None:
        found["padded_vocab_size"] = padded_vocabulary
    return found


def _before_choice(known: Mapping[str, Any]) -> bool | None:
    """Tell whether experts are chosen after the softmax, so that their shares do not add up to one; None: not known."""
    normed = known.get("norm_topk_prob")
    return not normed if isinstance(normed, bool) and known.get("scoring_func", "softmax") == "softmax" else None


def _shared_width(known: Mapping[str, Any]) -> int | None:
    """Return the width of all shared experts together; None: there are none, or it is not known."""
    width, count = known.get("moe_intermediate_size"), known.get("n_shared_experts")
    together = width * count if isinstance(width, int) and isinstance(count, int) else None
    return known.get("shared_expert_intermediate_size", together) or None


def is_padded(config: Mapping[str, Any], rows: int | None) -> bool:
    """Tell whether an embedding has other rows than the model's vocabulary.

    Args:
        config: the model's config.json; empty where it is not known.
        rows: of the embedding.
    """
    return rows != _of_text(config).get("vocab_size", rows)


def _of_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config says of the model of text."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else dict(config)


def _from_names(names: Collection[str], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the presence of tensors tells."""
    ends = {name.rpartition("decoder.layers.")[2].lstrip("0123456789.") for name in names}
    told: dict[str, Any] = {
        "add_qkv_bias": "self_attention.linear_qkv.bias" in ends,
        "add_bias_linear": "self_attention.linear_proj.bias" in ends,
        "qk_layernorm": bool({"self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.weight"} & ends),
        "untie_embeddings_and_output_weights": "output_layer.weight" in names,
    }
    routers = [match[1] for name in names if (match := _ROUTER.fullmatch(name))]
    if routers and routers != [None]:
        sparse = {int(number) for number in routers}
        told["moe_layer_freq"] = [int(layer in sparse) for layer in range(found["num_layers"])]
    elif routers:
        told["moe_layer_freq"] = 1
    if routers:
        told["moe_grouped_gemm"] = True
    if "mlp.router.expert_bias" in ends:
        told["moe_router_enable_expert_bias"] = True
    return told


def _from_config(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return what only the config tells, under Megatron's names."""
    rope = known.get("rope_parameters")
    rope = rope if isinstance(rope, Mapping) else {}
    base = known.get("rope_theta", rope.get("rope_theta"))
    share = known.get("partial_rotary_factor", rope.get("partial_rotary_factor"))
    told = {
        "swiglu": True if known.get("hidden_act") in _SILU else None,
        "normalization": "RMSNorm" if known.get("rms_norm_eps") is not None else None,
        "norm_epsilon": known.get("rms_norm_eps", known.get("layer_norm_eps")),
        "max_position_embeddings": known.get("max_position_embeddings"),
        "position_embedding_type": None if base is None else "rope",
        "use_rotary_position_embeddings": None if base is None else True,
        "rotary_base": base if not isinstance(base, float) or not base.is_integer() else int(base),
        "rotary_percent": None if base is None else share or 1.0,
        "moe_router_topk": known.get("num_experts_per_tok"),
        "moe_router_pre_softmax": _before_choice(known),
        "moe_router_score_function": known.get("scoring_func"),
        "moe_router_topk_scaling_factor": known.get("routed_scaling_factor"),
        "moe_shared_expert_intermediate_size": _shared_width(known),
        "attention_dropout": known.get("attention_dropout"),
    }
    return {name: value for name, value in told.items() if value is not None}
