"""Derives Megatron's training arguments, which a new checkpoint stores, from the model's config and tensor names.

When Megatron loads a checkpoint, it compares a few of the stored arguments with its own arguments. With
`--use-checkpoint-args`, Megatron takes the model's sizes from the stored arguments. An argument that cannot be derived
is left out, because Megatron has a default for a missing argument, but would trust a wrong value.
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
"""Parallel degrees to store; they are those of a run on one device, because a distributed checkpoint can be loaded with
any degrees."""
_SILU = frozenset({"silu", "swish"})


def arguments(config: Mapping[str, Any], names: Collection[str], padded_vocabulary: int | None) -> dict[str, Any]:
    """Return the arguments that Megatron would store in a checkpoint of this model.

    Args:
        config: the model's config.json; empty if it is unknown.
        names: tensor names as Megatron uses them.
        padded_vocabulary: number of rows of the embedding, including padding; None lets Megatron choose the padding.

    Returns:
        argument name -> value; empty if the config lacks the number of layers, the number of heads, or the hidden size.
    """
    text_config = _text_config(config)
    args = {argument: text_config[key] for key, argument in KEYS.items() if text_config.get(key) is not None}
    if not {"num_layers", "hidden_size", "num_attention_heads"} <= args.keys():
        # Megatron accepts a checkpoint without any arguments, but refuses arguments without layers, heads or hidden
        # size
        return {}
    heads = args["num_attention_heads"]
    args["num_query_groups"] = args.get("num_query_groups", heads)
    args["group_query_attention"] = args["num_query_groups"] != heads
    args.setdefault("kv_channels", args["hidden_size"] // heads)
    args |= _DEGREES | _from_names(names, args) | _from_config(text_config)
    if not any(name.startswith("mtp.") for name in names):
        args.pop("mtp_num_layers", None)  # a config may count MTP layers that the checkpoint lacks
    args["multi_latent_attention"] = "kv_lora_rank" in args
    if padded_vocabulary is not None:
        args["padded_vocab_size"] = padded_vocabulary
    return args


def _is_pre_softmax(config: Mapping[str, Any]) -> bool | None:
    """Return whether the router applies softmax before top-k, so that the top-k weights do not sum to one; None if the
    config does not state this.
    """
    normalized = config.get("norm_topk_prob")
    return (
        not normalized if isinstance(normalized, bool) and config.get("scoring_func", "softmax") == "softmax" else None
    )


def _width_of_shared_experts(config: Mapping[str, Any]) -> int | None:
    """Return the width of all shared experts together; None if the model has no shared experts, or the config does not
    state the width.
    """
    width, count = config.get("moe_intermediate_size"), config.get("n_shared_experts")
    total_width = width * count if isinstance(width, int) and isinstance(count, int) else None
    return config.get("shared_expert_intermediate_size", total_width) or None


def is_padded(config: Mapping[str, Any], rows: int | None) -> bool:
    """Return whether an embedding is padded, which means that its number of rows differs from the model's vocabulary
    size.

    Args:
        config: the model's config.json; empty if it is unknown.
        rows: number of rows of the embedding; None if the model has no embedding.
    """
    return rows != _text_config(config).get("vocab_size", rows)


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the text model: the outer config, in which the keys of its `text_config` have precedence."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else dict(config)


def _from_names(names: Collection[str], args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that follow from which tensors exist, such as `qk_layernorm`."""
    ends = {name.rpartition("decoder.layers.")[2].lstrip("0123456789.") for name in names}
    implied: dict[str, Any] = {
        "add_qkv_bias": "self_attention.linear_qkv.bias" in ends,
        "add_bias_linear": "self_attention.linear_proj.bias" in ends,
        "qk_layernorm": bool({"self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.weight"} & ends),
        "untie_embeddings_and_output_weights": "output_layer.weight" in names,
    }
    routers = [match[1] for name in names if (match := _ROUTER.fullmatch(name))]
    if routers and routers != [None]:
        sparse = {int(number) for number in routers}
        implied["moe_layer_freq"] = [int(layer in sparse) for layer in range(args["num_layers"])]
    elif routers:
        implied["moe_layer_freq"] = 1
    if routers:
        implied["moe_grouped_gemm"] = True
    if "mlp.router.expert_bias" in ends:
        implied["moe_router_enable_expert_bias"] = True
    return implied


def _from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that follow only from the config, such as the base of RoPE."""
    rope = config.get("rope_parameters")
    rope = rope if isinstance(rope, Mapping) else {}
    base = config.get("rope_theta", rope.get("rope_theta"))
    share = config.get("partial_rotary_factor", rope.get("partial_rotary_factor"))
    args = {
        "swiglu": True if config.get("hidden_act") in _SILU else None,
        "normalization": "RMSNorm" if config.get("rms_norm_eps") is not None else None,
        "norm_epsilon": config.get("rms_norm_eps", config.get("layer_norm_eps")),
        "max_position_embeddings": config.get("max_position_embeddings"),
        "position_embedding_type": None if base is None else "rope",
        "use_rotary_position_embeddings": None if base is None else True,
        "rotary_base": base if not isinstance(base, float) or not base.is_integer() else int(base),
        "rotary_percent": None if base is None else share or 1.0,
        "moe_router_topk": config.get("num_experts_per_tok"),
        "moe_router_pre_softmax": _is_pre_softmax(config),
        "moe_router_score_function": config.get("scoring_func"),
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor"),
        "moe_shared_expert_intermediate_size": _width_of_shared_experts(config),
        "attention_dropout": config.get("attention_dropout"),
    }
    return {name: value for name, value in args.items() if value is not None}
