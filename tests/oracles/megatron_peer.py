"""megatron-core 0.16.1: GPTModel's stored tensors, written out in plain torch operations.

Read from (megatron-core 0.16.1 unless said otherwise):
- names under Transformer Engine: `models/gpt/gpt_layer_specs.py`,
  `get_gpt_layer_with_transformer_engine_spec` (the norm before a projection is part of it, except before
  experts), and megatron-bridge 0.3.1,
  `models/{llama/llama,qwen/qwen2,qwen/qwen3,qwen/qwen3_moe}_bridge.py`, `mapping_registry`;
- local names: the same file, `get_gpt_layer_local_spec`, and `transformer/moe/experts.py`, `SequentialMLP`;
- linear_qkv: `transformer/attention.py`, `SelfAttention.get_query_key_value_tensors`, and megatron-bridge's
  `models/conversion/param_mapping.py`, `merge_qkv_weights` and `merge_qkv_biases`;
- latent attention: `transformer/multi_latent_attention.py`, `MLASelfAttention`; a norm before an up projection is part
  of it under Transformer Engine; megatron-bridge 0.3.1, `models/deepseek/common.py`;
- layers that predict ahead: `transformer/multi_token_prediction.py`, `MultiTokenPredictionLayer`; the layer inside has
  the name of megatron-core 0.19.2, except locally;
- gpt-oss: megatron-bridge 0.3.1, `models/gpt_oss/gpt_oss_bridge.py`;
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
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed as dist

from tests.formats.megatron.plain_attention import PlainAttention
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
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.shared_experts.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
    "self_attn.o_proj.bias": "self_attention.linear_proj.bias",
    "self_attn.sinks": "self_attention.core_attention.softmax_offset",
}
_MLA = {
    "self_attn.q_proj.weight": "self_attention.linear_q_proj.weight",
    "self_attn.q_a_proj.weight": "self_attention.linear_q_down_proj.weight",
    "self_attn.q_b_proj.weight": "self_attention.linear_q_up_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "self_attention.linear_kv_down_proj.weight",
    "self_attn.kv_b_proj.weight": "self_attention.linear_kv_up_proj.weight",
}
_LATENT_NORMS = {
    "self_attn.q_a_layernorm.weight": ("linear_q_up_proj.layer_norm_weight", "q_layernorm.weight"),
    "self_attn.kv_a_layernorm.weight": ("linear_kv_up_proj.layer_norm_weight", "kv_layernorm.weight"),
}
"""With Transformer Engine, and local."""
_AHEAD = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "shared_head.norm.weight": "final_layernorm.weight",
}
_INNER, OLDER_INNER = "mtp_model_layer.", "transformer_layer."
"""The layer inside one that predicts ahead: in megatron-core 0.19, and in 0.16, whose local model is here."""
_QKV = tuple(f"self_attn.{letter}_proj" for letter in "qkv")
_LINEAR_QKV = "self_attention.linear_qkv"
_GATE_UP = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
_FC1 = "mlp.linear_fc1.weight"
_SHARED = ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight")
_SHARED_FC1 = "mlp.shared_experts.linear_fc1.weight"
_KINDS = (".weight", ".bias")
_STACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
_PARTS = {"mixtral": ("block_sparse_moe.experts", "w1", "w3", "w2")}
_ROUTER = "mlp.router.weight"
_OSS = "gpt_oss"
_GLM = "glm4_moe"
_QWEN_PARTS = ("mlp.experts", "gate_proj", "up_proj", "down_proj")


def from_hf(config: Config, stored: Tensors, spec: Spec = Spec.TE) -> Tensors:
    """HF tensors in Megatron's names and layouts."""
    out = {_TOP[name]: value for name, value in stored.items() if name in _TOP}
    depth = config["num_hidden_layers"]
    for layer, held in _layers(stored, "model.layers").items():
        native = _layer_from_hf(config, held, spec)
        if layer < depth:
            out |= {f"decoder.layers.{layer}.{name}": value for name, value in native.items()}
        else:
            stem = f"mtp.layers.{layer - depth}."
            inner = OLDER_INNER if spec is Spec.LOCAL else _INNER
            out |= {f"{stem}{inner}{name}": value for name, value in native.items()}
            out |= {stem + native_name: held[name] for name, native_name in _AHEAD.items()}
    return out


def to_hf(config: Config, native: Tensors, spec: Spec = Spec.TE) -> Tensors:
    """Megatron's tensors in HF names and layouts."""
    back = {native_name: name for name, native_name in _TOP.items()}
    out = {back[name]: value for name, value in native.items() if name in back}
    layers = _layers(native, "decoder.layers")
    for number, held in _layers(native, "mtp.layers").items():
        layer = config["num_hidden_layers"] + number
        inner = OLDER_INNER if spec is Spec.LOCAL else _INNER
        layers[layer] = {name.removeprefix(inner): value for name, value in held.items()}
        out |= {f"model.layers.{layer}.{name}": held[native_name] for name, native_name in _AHEAD.items()}
    for layer, held in layers.items():
        out |= {f"model.layers.{layer}.{name}": value for name, value in _layer_to_hf(config, held, spec).items()}
    return out


def _layers(tensors: Tensors, stem: str) -> dict[int, Tensors]:
    layers: dict[int, Tensors] = defaultdict(dict)
    for name, value in tensors.items():
        if found := re.fullmatch(rf"{re.escape(stem)}\.(\d+)\.(.+)", name):
            layers[int(found[1])][found[2]] = value
    return layers


def _layer_from_hf(config: Config, held: Tensors, spec: Spec) -> Tensors:
    held = _single_experts(held)
    latent = _latent(config, spec)
    plain = _PLAIN | latent
    out = {plain[name]: value for name, value in held.items() if name in plain}
    sparse = _GATE_UP[0] not in held
    for name, native in zip(_NORMS, _norms(spec, sparse=sparse, latent=bool(latent)), strict=True):
        out[native] = held[name]
    for kind in _KINDS:
        if _QKV[1] + kind in held:
            out[_LINEAR_QKV + kind] = _merge_qkv(config, *(held[name + kind] for name in _QKV))
    if not sparse:
        out[_FC1] = torch.cat([held[name] for name in _GATE_UP])
        return out
    if _SHARED[0] in held:
        out[_SHARED_FC1] = torch.cat([held[name] for name in _SHARED])
    stem, gate, up, down = _PARTS.get(config["model_type"], _QWEN_PARTS)
    for kind in _KINDS:
        count = sum(name.startswith(stem) and name.endswith(f".{down}{kind}") for name in held)
        both = [torch.cat([held[f"{stem}.{e}.{part}{kind}"] for part in (gate, up)]) for e in range(count)]
        last = [held[f"{stem}.{e}.{down}{kind}"] for e in range(count)]
        for linear, experts in (("linear_fc1", both), ("linear_fc2", last)):
            if spec is Spec.GROUPED and experts:
                out[_expert(spec, linear, 0, kind)] = torch.stack(experts)
            else:
                out |= {_expert(spec, linear, e, kind): value for e, value in enumerate(experts)}
    return out


def _layer_to_hf(config: Config, held: Tensors, spec: Spec) -> Tensors:
    mixtral = config["model_type"] in _PARTS
    latent = _latent(config, spec)
    router = "mlp.router" if config["model_type"] == _OSS else "block_sparse_moe.gate" if mixtral else "mlp.gate"
    plain = {name: native for name, native in _PLAIN.items() if native != _ROUTER} | {f"{router}.weight": _ROUTER}
    back = {native: name for name, native in (plain | latent).items()}
    out = {back[name]: value for name, value in held.items() if name in back}
    sparse = _FC1 not in held
    for name, native in zip(_NORMS, _norms(spec, sparse=sparse, latent=bool(latent)), strict=True):
        out[name] = held[native]
    for kind in _KINDS:
        if _LINEAR_QKV + kind in held:
            parts = _split_qkv(config, held[_LINEAR_QKV + kind])
            out |= {name + kind: value for name, value in zip(_QKV, parts, strict=True)}
    if not sparse:
        out |= dict(zip(_GATE_UP, held[_FC1].chunk(2), strict=True))
        return out
    if _SHARED_FC1 in held:
        out |= dict(zip(_SHARED, held[_SHARED_FC1].chunk(2), strict=True))
    stem, gate, up, down = _PARTS.get(config["model_type"], _QWEN_PARTS)
    for e, kind in product(range(held[_ROUTER].shape[0]), _KINDS):
        if _expert(spec, "linear_fc1", e, kind) not in held:
            continue
        both, last = (held[_expert(spec, linear, e, kind)] for linear in ("linear_fc1", "linear_fc2"))
        if spec is Spec.GROUPED:
            both, last = both[e], last[e]
        for part, value in zip((gate, up, down), (*both.chunk(2), last), strict=True):
            out[f"{stem}.{e}.{part}{kind}"] = value
    return _stacked_experts(out) if config["model_type"] == _OSS else out


def _single_experts(held: Tensors) -> Tensors:
    """gpt-oss's stacked and interleaved experts as those of Qwen: one [out, in] tensor each of gate, up and down."""
    if _STACKED[0] not in held:
        return held
    out = dict(held)
    for kind, end in zip(_KINDS, ("", "_bias"), strict=True):
        for name, parts in zip(_STACKED, (("gate_proj", "up_proj"), ("down_proj",)), strict=True):
            for e, value in enumerate(out.pop(name + end)):
                rows = value.T if value.ndim == 2 else value
                for number, part in enumerate(parts):
                    out[f"mlp.experts.{e}.{part}{kind}"] = rows[number :: len(parts)]
    return out


def _stacked_experts(held: Tensors) -> Tensors:
    """The other way."""
    out = {name: value for name, value in held.items() if not name.startswith("mlp.experts.")}
    count = held["mlp.router.weight"].shape[0]
    for kind, end in zip(_KINDS, ("", "_bias"), strict=True):
        experts = [[held[f"mlp.experts.{e}.{part}{kind}"] for part in _QWEN_PARTS[1:]] for e in range(count)]
        both = torch.stack([torch.stack([gate, up], 1).flatten(0, 1) for gate, up, _ in experts])
        last = torch.stack([down for _, _, down in experts])
        for name, value in zip(_STACKED, (both, last), strict=True):
            out[name + end] = value.mT.contiguous() if value.ndim == 3 else value
    return out


def _latent(config: Config, spec: Spec) -> dict[str, str]:
    """Names of latent attention; none where a model has another."""
    if "kv_lora_rank" not in config:
        return {}
    local = spec is Spec.LOCAL
    return _MLA | {name: f"self_attention.{natives[local]}" for name, natives in _LATENT_NORMS.items()}


def _norms(spec: Spec, *, sparse: bool, latent: bool) -> tuple[str, str]:
    """Where the norms before attention and before the MLP are stored."""
    if spec is Spec.LOCAL:
        return "input_layernorm.weight", "pre_mlp_layernorm.weight"
    before_mlp = "pre_mlp_layernorm.weight" if sparse else "mlp.linear_fc1.layer_norm_weight"
    return "input_layernorm.weight" if latent else f"{_LINEAR_QKV}.layer_norm_weight", before_mlp


def _expert(spec: Spec, linear: str, e: int, kind: str) -> str:
    if spec is Spec.LOCAL:
        return f"mlp.experts.local_experts.{e}.{linear}{kind}"
    return f"mlp.experts.{linear}{kind}" + ("" if spec is Spec.GROUPED else str(e))


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
    with quiet(), patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")):
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer import multi_latent_attention

        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
        try:
            parallel_state.initialize_model_parallel()
            known = hub.configuration(config)
            settings = transformer_config(known)
            layers = get_gpt_decoder_block_spec(settings, use_transformer_engine=False)
            if settings.multi_latent_attention:
                for layer in layers.layer_specs:
                    layer.submodules.self_attention.submodules.core_attention = PlainAttention
            with patch.object(multi_latent_attention, "HAVE_TE", new=False):
                built = GPTModel(
                    settings, layers,
                    mtp_block_spec=get_gpt_mtp_block_spec(settings, layers, use_transformer_engine=False),
                    vocab_size=known.vocab_size, max_sequence_length=64,
                    share_embeddings_and_output_weights=known.tie_word_embeddings, position_embedding_type="rope",
                    rotary_base=known.rope_parameters["rope_theta"],
                    rotary_percent=known.rope_parameters.get("partial_rotary_factor", 1.0),
                )  # fmt: skip
            yield built.eval()
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """One forward pass of a GPTModel on the CPU, which needs a stand-in for its CUDA-only calls.

    What Megatron compiles runs as it is written: compiling it takes half a minute, and it is called once.
    """
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    length = tokens.shape[1]
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with (
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        patch.object(CudaRNGStatesTracker, "fork", lambda *_: nullcontext()),
        patch.object(moe_utils, "te_general_gemm", None, create=True),
    ):
        out: torch.Tensor = model(tokens, torch.arange(length)[None], hidden)
    return out


def transformer_config(known: Any) -> Any:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind: Any = TransformerConfig
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
    if hasattr(known, "kv_lora_rank"):
        kind = MLATransformerConfig
        moe |= {
            "q_lora_rank": known.q_lora_rank, "kv_lora_rank": known.kv_lora_rank,
            "qk_head_dim": known.qk_nope_head_dim, "qk_pos_emb_head_dim": known.qk_rope_head_dim,
            "v_head_dim": known.v_head_dim, "rope_type": "rope", "rotary_base": known.rope_parameters["rope_theta"],
        }  # fmt: skip
    if hasattr(known, "n_shared_experts"):
        moe |= {
            "moe_shared_expert_intermediate_size": known.moe_intermediate_size * known.n_shared_experts,
            "moe_router_score_function": "sigmoid", "moe_router_num_groups": known.n_group,
            "moe_router_group_topk": known.topk_group, "moe_router_topk_scaling_factor": known.routed_scaling_factor,
            "moe_router_enable_expert_bias": True, "moe_router_pre_softmax": True,
            "mtp_num_layers": known.num_nextn_predict_layers or None,
        }  # fmt: skip
    oss = known.model_type == _OSS
    norms = known.model_type.startswith("qwen3") or kind is MLATransformerConfig
    if oss:
        moe |= {"softmax_type": "learnable", "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0}
    return kind(
        num_layers=known.num_hidden_layers, hidden_size=known.hidden_size,
        num_attention_heads=known.num_attention_heads, num_query_groups=known.num_key_value_heads,
        kv_channels=getattr(known, "head_dim", None) or known.hidden_size // known.num_attention_heads,
        ffn_hidden_size=known.intermediate_size, gated_linear_unit=True,
        activation_func=quick_gelu if oss else torch.nn.functional.silu, add_bias_linear=oss,
        add_qkv_bias=known.model_type == "qwen2" or (known.model_type == _GLM and known.attention_bias),
        qk_layernorm=getattr(known, "use_qk_norm", norms), normalization="RMSNorm",
        layernorm_epsilon=known.rms_norm_eps, use_cpu_initialization=True, perform_initialization=False,
        params_dtype=torch.float32, hidden_dropout=0.0, attention_dropout=0.0, gradient_accumulation_fusion=False,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        **moe,
    )  # fmt: skip
