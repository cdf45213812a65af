"""megatron-core 0.16.1: GPTModel's stored tensors, written out in plain torch operations.

Read from (megatron-core 0.16.1 unless said otherwise):
- names under Transformer Engine: `models/gpt/gpt_layer_specs.py`,
  `get_gpt_layer_with_transformer_engine_spec` (the norm before a projection is part of it, except before
  experts), and megatron-bridge 0.3.1,
  `models/{llama/llama,qwen/qwen2,qwen/qwen3,qwen/qwen3_moe}_bridge.py`, `mapping_registry`;
- local names: the same file, `get_gpt_layer_local_spec`, and `transformer/moe/experts.py`, `SequentialMLP`;
- linear_qkv: `transformer/attention.py`, `SelfAttention.get_query_key_value_tensors`, and megatron-bridge's
  `models/conversion/param_mapping.py`, `merge_qkv_weights` and `merge_qkv_biases`;
- linear_fc1: `transformer/mlp.py`, `MLP.forward` (`torch.chunk(x, 2, dim=-1)`: gate, then up);
- `weight{e}`: `extensions/transformer_engine.py`, `TEGroupedLinear`; one grouped `weight`: Transformer Engine
  2.14, `GroupedLinear(single_grouped_weight=True)`, later megatron-core's `moe_single_grouped_weight`.

The tests load the local names into a real GPTModel on the CPU: names and shapes must be its own, and its
logits must be those of transformers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed as dist

from tests.oracles import hub
from tests.oracles.hub import Config, Tensors
from tests.oracles.quiet import quiet


class Spec(Enum):
    """Which modules the model is made of."""

    TE = "TEGroupedMLP: a tensor per expert"
    GROUPED = "TEGroupedMLP on a GroupedLinear with one weight"
    LOCAL = "local layers and SequentialMLP"


_TOP = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
_PLAIN = {
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "block_sparse_moe.gate.weight": "mlp.router.weight",
}
_QKV = tuple(f"self_attn.{letter}_proj" for letter in "qkv")
_LINEAR_QKV = "self_attention.linear_qkv"
_GATE_UP = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
_FC1 = "mlp.linear_fc1.weight"
_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
_PARTS = {"mixtral": ("block_sparse_moe.experts", "w1", "w3", "w2")}
_QWEN_PARTS = ("mlp.experts", "gate_proj", "up_proj", "down_proj")


def from_hf(config: Config, stored: Tensors, spec: Spec = Spec.TE) -> Tensors:
    """HF tensors in Megatron's names and layouts."""
    out = {_TOP[name]: value for name, value in stored.items() if name in _TOP}
    for layer, held in _layers(stored, "model.layers").items():
        for name, value in _layer_from_hf(config, held, spec).items():
            out[f"decoder.layers.{layer}.{name}"] = value
    return out


def to_hf(config: Config, native: Tensors, spec: Spec = Spec.TE) -> Tensors:
    """Megatron's tensors in HF names and layouts."""
    back = {native_name: name for name, native_name in _TOP.items()}
    out = {back[name]: value for name, value in native.items() if name in back}
    for layer, held in _layers(native, "decoder.layers").items():
        for name, value in _layer_to_hf(config, held, spec).items():
            out[f"model.layers.{layer}.{name}"] = value
    return out


def _layers(tensors: Tensors, stem: str) -> dict[int, Tensors]:
    layers: dict[int, Tensors] = defaultdict(dict)
    for name, value in tensors.items():
        if found := re.fullmatch(rf"{re.escape(stem)}\.(\d+)\.(.+)", name):
            layers[int(found[1])][found[2]] = value
    return layers


def _layer_from_hf(config: Config, held: Tensors, spec: Spec) -> Tensors:
    out = {_PLAIN[name]: value for name, value in held.items() if name in _PLAIN}
    sparse = _GATE_UP[0] not in held
    for name, native in zip(_NORMS, _norms(spec, sparse=sparse), strict=True):
        out[native] = held[name]
    for kind in (".weight", ".bias"):
        if _QKV[0] + kind in held:
            out[_LINEAR_QKV + kind] = _merge_qkv(config, *(held[name + kind] for name in _QKV))
    if not sparse:
        out[_FC1] = torch.cat([held[name] for name in _GATE_UP])
        return out
    stem, gate, up, down = _PARTS.get(config["model_type"], _QWEN_PARTS)
    count = sum(name.endswith(f".{down}.weight") for name in held)
    both = [torch.cat([held[f"{stem}.{e}.{part}.weight"] for part in (gate, up)]) for e in range(count)]
    last = [held[f"{stem}.{e}.{down}.weight"] for e in range(count)]
    for linear, experts in (("linear_fc1", both), ("linear_fc2", last)):
        if spec is Spec.GROUPED:
            out[_expert(spec, linear, 0)] = torch.stack(experts)
        else:
            out |= {_expert(spec, linear, e): value for e, value in enumerate(experts)}
    return out


def _layer_to_hf(config: Config, held: Tensors, spec: Spec) -> Tensors:
    mixtral = config["model_type"] in _PARTS
    back = {native: name for name, native in _PLAIN.items() if name.startswith("block_sparse_moe") <= mixtral}
    out = {back[name]: value for name, value in held.items() if name in back}
    sparse = _FC1 not in held
    for name, native in zip(_NORMS, _norms(spec, sparse=sparse), strict=True):
        out[name] = held[native]
    for kind in (".weight", ".bias"):
        if _LINEAR_QKV + kind in held:
            parts = _split_qkv(config, held[_LINEAR_QKV + kind])
            out |= {name + kind: value for name, value in zip(_QKV, parts, strict=True)}
    if not sparse:
        out |= dict(zip(_GATE_UP, held[_FC1].chunk(2), strict=True))
        return out
    stem, gate, up, down = _PARTS.get(config["model_type"], _QWEN_PARTS)
    for e in range(held["mlp.router.weight"].shape[0]):
        both, last = (held[_expert(spec, linear, e)] for linear in ("linear_fc1", "linear_fc2"))
        if spec is Spec.GROUPED:
            both, last = both[e], last[e]
        for part, value in zip((gate, up, down), (*both.chunk(2), last), strict=True):
            out[f"{stem}.{e}.{part}.weight"] = value
    return out


def _norms(spec: Spec, *, sparse: bool) -> tuple[str, str]:
    """Where the norms before attention and before the MLP are stored."""
    if spec is Spec.LOCAL:
        return "input_layernorm.weight", "pre_mlp_layernorm.weight"
    before_mlp = "pre_mlp_layernorm.weight" if sparse else "mlp.linear_fc1.layer_norm_weight"
    return f"{_LINEAR_QKV}.layer_norm_weight", before_mlp


def _expert(spec: Spec, linear: str, e: int) -> str:
    if spec is Spec.LOCAL:
        return f"mlp.experts.local_experts.{e}.{linear}.weight"
    return f"mlp.experts.{linear}.weight" + ("" if spec is Spec.GROUPED else str(e))


def _merge_qkv(config: Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[q of group 0, k 0, v 0, q of group 1, k 1, v 1, ...], a group being one key-value head."""
    groups = config["num_key_value_heads"]
    parts = zip(q.chunk(groups), k.chunk(groups), v.chunk(groups), strict=True)
    return torch.cat([part for group in parts for part in group])


def _split_qkv(config: Config, merged: torch.Tensor) -> Iterator[torch.Tensor]:
    groups, heads = config["num_key_value_heads"], config["num_attention_heads"]
    size = merged.shape[0] // (heads + 2 * groups)
    split = [group.split([heads // groups * size, size, size]) for group in merged.chunk(groups)]
    return (torch.cat(parts) for parts in zip(*split, strict=True))


@contextmanager
def local_model(config: Config) -> Iterator[Any]:
    """A real GPTModel of local layers, fp32 on the CPU, in a process group that ends with the block."""
    with quiet():
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.models.gpt.gpt_model import GPTModel

        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
        try:
            parallel_state.initialize_model_parallel()
            known = hub.configuration(config)
            settings = _transformer_config(known)
            yield GPTModel(
                settings,
                get_gpt_decoder_block_spec(settings, use_transformer_engine=False),
                vocab_size=known.vocab_size,
                max_sequence_length=64,
                share_embeddings_and_output_weights=known.tie_word_embeddings,
                position_embedding_type="rope",
                rotary_base=known.rope_parameters["rope_theta"],
            ).eval()
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """One forward pass of a GPTModel on the CPU, which needs a stand-in for three of its CUDA-only calls."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    length = tokens.shape[1]
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with (
        torch.no_grad(),
        patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        patch.object(CudaRNGStatesTracker, "fork", lambda *_: nullcontext()),
        patch.object(moe_utils, "te_general_gemm", None, create=True),
    ):
        out: torch.Tensor = model(tokens, torch.arange(length)[None], hidden)
    return out


def _transformer_config(known: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    moe: dict[str, Any] = {}
    if experts := getattr(known, "num_local_experts", None):
        layers = hub.model(known.to_dict()).model.layers
        moe = {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": getattr(known, "moe_intermediate_size", known.intermediate_size),
            "moe_layer_freq": [int(hasattr(layer.mlp, "experts")) for layer in layers],
            "moe_router_topk": known.num_experts_per_tok,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
        }
    return TransformerConfig(
        num_layers=known.num_hidden_layers,
        hidden_size=known.hidden_size,
        num_attention_heads=known.num_attention_heads,
        num_query_groups=known.num_key_value_heads,
        kv_channels=getattr(known, "head_dim", None) or known.hidden_size // known.num_attention_heads,
        ffn_hidden_size=known.intermediate_size,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=known.model_type == "qwen2",
        qk_layernorm=known.model_type.startswith("qwen3"),
        normalization="RMSNorm",
        layernorm_epsilon=known.rms_norm_eps,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        **moe,
    )
