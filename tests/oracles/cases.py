"""The models that the tests compare on: every family in a few shapes, in every layout that its peers know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from tests.oracles import automodel_peer, hub, megatron_peer, torchtitan_peer
from tests.oracles.hub import Config, Tensors
from tests.oracles.megatron_peer import Spec

HF, TRANSFORMERS, TORCHTITAN, AUTOMODEL = "hf", "transformers", "torchtitan", "automodel"
MEGATRON, TE, TITAN_HF = "megatron", "te", "torchtitan_hf"
TITAN_02, MEGATRON_LOCAL = "torchtitan@0.2", "megatron@local"

PINNED = {"transformers": "5.24.0", "torchtitan": "0.3.0", "nemo-automodel": "0.7.0", "megatron-core": "0.16.1"}


def _missing() -> tuple[str, ...]:
    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return tuple(f"{name}=={wanted}" for name, wanted in PINNED.items() if installed(name) != wanted)


MISSING = _missing()
"""Peers that are not installed in the version these oracles were read from and run with."""


@dataclass(frozen=True)
class Case:
    """One tiny model in every dialect its peers know. Its tensors are shared: do not write into them."""

    family: str
    variant: str
    config: dict[str, Any]
    """config.json as the hub stores it."""
    dialects: dict[str, Tensors]
    """Dialect name -> stored tensors."""
    sources: dict[str, str]
    """Dialect or version name -> where it comes from, in one line."""
    versions: dict[str, Tensors] = field(default_factory=dict)
    """Other versions of a dialect, `torchtitan@0.2` -> stored tensors."""


class Peer(NamedTuple):
    """One dialect's converters, both ways."""

    from_hf: Callable[[Config, Tensors], Tensors]
    to_hf: Callable[[Config, Tensors], Tensors]
    source: str


def _megatron(spec: Spec, what: str) -> Peer:
    return Peer(
        partial(megatron_peer.from_hf, spec=spec),
        partial(megatron_peer.to_hf, spec=spec),
        f"megatron-core 0.16.1 GPTModel, {what}, in torch operations",
    )


PEERS = {
    TRANSFORMERS: Peer(hub.from_hf, hub.to_hf, "transformers 5.24.0 from_pretrained, state_dict()"),
    TITAN_HF: Peer(
        lambda _, stored: torchtitan_peer.to_blocks(stored),
        lambda _, native: torchtitan_peer.from_blocks(native),
        "torch 2.13.0 QuantizedHuggingFaceStorageReader's side of torchtitan 0.3.0 GptOssStateDictAdapter",
    ),
    TORCHTITAN: Peer(torchtitan_peer.from_hf, torchtitan_peer.to_hf, "torchtitan 0.3.0 StateDictAdapter.from_hf"),
    AUTOMODEL: Peer(automodel_peer.from_hf, automodel_peer.to_hf, "nemo-automodel 0.7.0 StateDictAdapter.from_hf"),
    MEGATRON: _megatron(Spec.TE, "TE layer spec, TEGroupedMLP weight{e}"),
    TE: _megatron(Spec.GROUPED, "TE layer spec, GroupedLinear with one grouped weight"),
    MEGATRON_LOCAL: _megatron(Spec.LOCAL, "local layer spec, SequentialMLP"),
}


def from_hf(dialect: str, config: Config, tensors: Tensors) -> Tensors:
    """What the peer makes of HF tensors."""
    return PEERS[dialect].from_hf(config, tensors)


def to_hf(dialect: str, config: Config, tensors: Tensors) -> Tensors:
    """The HF tensors that the peer makes of its own."""
    return PEERS[dialect].to_hf(config, tensors)


_ALL = (TRANSFORMERS, TORCHTITAN, AUTOMODEL, MEGATRON, TE)
_DENSE = (TRANSFORMERS, TORCHTITAN, AUTOMODEL, MEGATRON)

_SIZES = {
    "hidden_size": 40, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 46, "max_position_embeddings": 64,
}  # fmt: skip
"""Every axis its own size: l=3 g=2 r=4 c=10 d=40 f=44 n=46; experts add e=6, f=24, a shared expert 28."""

_SQUARE = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 4, "vocab_size": 16, "max_position_embeddings": 64,
}  # fmt: skip
"""Every matrix square, every stack of experts a cube."""

_MLA = {
    "num_key_value_heads": 8, "q_lora_rank": 14, "kv_lora_rank": 18, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6,
    "v_head_dim": 12, "n_routed_experts": 6, "n_shared_experts": 2, "moe_intermediate_size": 24,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
"""Latent attention: a=14 k=18, a head's q and k 10 + 6 wide, its v 12; one dense layer."""

_SQUARE_MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 14, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2,
    "v_head_dim": 4, "n_routed_experts": 16, "n_shared_experts": 1, "moe_intermediate_size": 16,
}  # fmt: skip
"""kv_b is 24 by 14; the rest is square."""

_GLM = {
    "n_routed_experts": 6, "n_shared_experts": 2, "moe_intermediate_size": 24, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "use_qk_norm": True,
}  # fmt: skip

_SQUARE_GLM = {"n_routed_experts": 16, "n_shared_experts": 1, "moe_intermediate_size": 16, "use_qk_norm": False}

_OSS = {
    "intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "sliding_window": 32,
}  # fmt: skip

_TIED = {"tie_word_embeddings": True}
_UNTIED = {"tie_word_embeddings": False}
_PHI = {"pad_token_id": 0, **_UNTIED}
_GEMMA = {"model_type": "gemma3_text", "pad_token_id": 0}
_BIAS = {"attention_bias": True}
_EXPERTS = {"num_experts": 6, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "norm_topk_prob": True}
_SQUARE_EXPERTS = {**_EXPERTS, "num_experts": 16, "moe_intermediate_size": 16}
_STEP: dict[str, Any] = {
    "architectures": ["Step3p5ForCausalLM"],
    "moe_num_experts": 6,
    "moe_top_k": 2,
    "moe_intermediate_size": 24,
    "share_expert_dim": 28,
    "moe_layers_enum": "1,2",
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "use_moe": True,
    "use_moe_router_bias": True,
    "use_head_wise_attn_gate": True,
    "use_qk_norm": True,
    "need_fp32_gate": True,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "attention_other_setting": {
        "attention_type": "sliding_attention", "num_attention_heads": 10, "num_attention_groups": 2, "head_dim": 10,
    },
    "sliding_window": 16,
    "rope_theta": [5000000.0, 10000.0, 5000000.0],
    "partial_rotary_factors": [0.4, 1.0, 0.4],
    "swiglu_limits": [0.0, 0.0, 7.0],
    "swiglu_limits_shared": [0.0, 0.0, 16.0],
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
"""Step-3.5's own config.json has these keys; layer 0 is dense, layer 1 has r=5."""

_SQUARE_STEP: dict[str, Any] = {
    "moe_num_experts": 16,
    "moe_intermediate_size": 16,
    "share_expert_dim": 16,
    "moe_layers_enum": "1",
    "layer_types": _STEP["layer_types"][:2],
    "attention_other_setting": {
        "attention_type": "sliding_attention", "num_attention_heads": 4, "num_attention_groups": 4, "head_dim": 4,
    },
    "rope_theta": _STEP["rope_theta"][:2],
    "partial_rotary_factors": [0.5, 1.0],
    "swiglu_limits": [0.0, 7.0],
    "swiglu_limits_shared": [0.0, 16.0],
}  # fmt: skip


def _as_step(sizes: dict[str, int]) -> dict[str, int]:
    return {key.replace("num_key_value_heads", "num_attention_groups"): value for key, value in sizes.items()}


def _headless(sizes: dict[str, int], **changed: int) -> dict[str, int]:
    return {key: value for key, value in {**sizes, **changed}.items() if key != "head_dim"}


def _without(*names: str, of: tuple[str, ...] = _ALL) -> tuple[str, ...]:
    return tuple(name for name in of if name not in names)


class Plan(NamedTuple):
    """How one case is made: its model's options, the dialects its peers give, the keys its config shows."""

    options: dict[str, Any]
    dialects: tuple[str, ...]
    renamed: Mapping[str, str] = MappingProxyType({})
    """Keys of the config.json under other names, as older files on the hub have them; "" leaves one out."""
    raw: bool = False
    """The config.json is the options themselves, not what transformers writes."""
    fp32_bias: bool = False
    ahead: int = 0
    """Layers at the end that predict several tokens ahead."""


_NO_TITAN = _without(TORCHTITAN, of=_DENSE)
_MIXTRAL = (TRANSFORMERS, MEGATRON, TE)
_STEPS = (TRANSFORMERS, AUTOMODEL)
_OSSES = (TRANSFORMERS, TORCHTITAN, TITAN_HF, AUTOMODEL, MEGATRON)
_GLMS = _without(TORCHTITAN)
_MIXTRAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}

PLANS: dict[str, dict[str, Plan]] = {
    "llama": {
        "asymmetric": Plan(_SIZES, _DENSE),
        "square": Plan(_SQUARE, _DENSE),
        "tied": Plan({**_SIZES, **_TIED}, _DENSE),
        # Neither torchtitan nor Megatron-Bridge has a name for Llama's biases.
        "bias": Plan({**_SIZES, **_BIAS, "mlp_bias": True}, (TRANSFORMERS, AUTOMODEL)),
        "hub_config": Plan(_headless(_SIZES, hidden_size=80), _DENSE, {"head_dim": "", "rope_parameters": ""}),
    },
    "qwen2": {
        "asymmetric": Plan(_headless(_SIZES, hidden_size=80), _NO_TITAN),
        "square": Plan(_headless(_SQUARE), _NO_TITAN),
        "tied": Plan({**_headless(_SIZES, hidden_size=80), **_TIED}, _NO_TITAN),
    },
    "qwen3": {
        "asymmetric": Plan(_SIZES, _DENSE),
        "square": Plan(_SQUARE, _DENSE),
        "tied": Plan({**_SIZES, **_TIED}, _DENSE),
        "bias": Plan({**_SIZES, **_BIAS}, (TRANSFORMERS, AUTOMODEL)),
    },
    "mixtral": {
        "asymmetric": Plan({**_SIZES, **_MIXTRAL_EXPERTS}, _MIXTRAL),
        "square": Plan({**_SQUARE, **_MIXTRAL_EXPERTS, "num_local_experts": 16}, _MIXTRAL),
        "tied": Plan({**_SIZES, **_MIXTRAL_EXPERTS, **_TIED}, _MIXTRAL),
    },
    "qwen3_moe": {
        "asymmetric": Plan({**_SIZES, **_EXPERTS}, _ALL),
        "square": Plan({**_SQUARE, **_SQUARE_EXPERTS}, _ALL),
        # Automodel refuses to build this one tied.
        "tied": Plan({**_SIZES, **_EXPERTS, **_TIED}, _without(AUTOMODEL)),
        "bias": Plan({**_SIZES, **_EXPERTS, **_BIAS}, (TRANSFORMERS, AUTOMODEL)),
        # Layer 1 of 4 holds experts.
        "dense_layers": Plan(
            {**_SIZES, **_EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, _ALL
        ),
        "hub_config": Plan({**_SIZES, **_EXPERTS}, _ALL, {"num_local_experts": "num_experts"}),
    },
    "step3p5": {
        "asymmetric": Plan({**_as_step(_SIZES), **_STEP}, _STEPS, raw=True),
        "square": Plan({**_as_step(_SQUARE), **_STEP, **_SQUARE_STEP}, _STEPS, raw=True),
        # The keys that transformers writes for the same model.
        "resaved": Plan({**_as_step(_SIZES), **_STEP}, _STEPS),
        # As in its own files; transformers would round the bias to bf16.
        "fp32_bias": Plan({**_as_step(_SIZES), **_STEP}, (AUTOMODEL,), raw=True, fp32_bias=True),
    },
    "deepseek_v3": {
        "asymmetric": Plan({**_headless(_SIZES), **_MLA}, _ALL, fp32_bias=True),
        "square": Plan({**_headless(_SQUARE), **_MLA, **_SQUARE_MLA}, _ALL, fp32_bias=True),
        # Only transformers builds it tied.
        "tied": Plan({**_headless(_SIZES), **_MLA, **_TIED}, (TRANSFORMERS,), fp32_bias=True),
        "bias": Plan({**_headless(_SIZES), **_MLA, **_BIAS}, (TRANSFORMERS,), fp32_bias=True),
        # DeepSeek's own smaller models and Moonlight.
        "whole_q": Plan({**_headless(_SIZES), **_MLA, "q_lora_rank": None}, _ALL, fp32_bias=True),
        # A file whose bias was rounded; transformers would hold it in single precision again.
        "bf16_bias": Plan({**_headless(_SIZES), **_MLA}, _without(TRANSFORMERS)),
        # transformers leaves these layers out. The first three keys are those of DeepSeek's own config.json.
        "ahead": Plan(
            {
                **_headless(_SIZES),
                **_MLA,
                "topk_method": "noaux_tc",
                "moe_layer_freq": 1,
                "num_nextn_predict_layers": 2,
            },
            _without(TRANSFORMERS),
            fp32_bias=True,
            ahead=2,
        ),
        "v2": Plan(
            {**_headless(_SIZES), **_MLA, "model_type": "deepseek_v2", "topk_method": "greedy"},
            (TRANSFORMERS, TORCHTITAN),
        ),
    },
    "gpt_oss": {
        "asymmetric": Plan({**_SIZES, **_OSS}, _OSSES),
        "square": Plan({**_SQUARE, **_OSS, "intermediate_size": 16, "num_local_experts": 16}, _OSSES),
        "tied": Plan({**_SIZES, **_OSS, **_TIED}, (TRANSFORMERS, MEGATRON)),
    },
    # These two have no peer but transformers.
    "phi3": {
        "asymmetric": Plan({**_SIZES, **_PHI}, (TRANSFORMERS,)),
        "square": Plan({**_SQUARE, **_PHI}, (TRANSFORMERS,)),
        "tied": Plan({**_SIZES, **_PHI, **_TIED}, (TRANSFORMERS,)),
    },
    "gemma3": {
        "asymmetric": Plan({**_SIZES, **_GEMMA, **_UNTIED}, (TRANSFORMERS,)),
        "square": Plan({**_SQUARE, **_GEMMA, **_UNTIED}, (TRANSFORMERS,)),
        "tied": Plan({**_SIZES, **_GEMMA}, (TRANSFORMERS,)),
    },
    "glm4_moe": {
        "asymmetric": Plan({**_SIZES, **_GLM, **_BIAS}, _GLMS, fp32_bias=True),
        "square": Plan({**_SQUARE, **_GLM, **_SQUARE_GLM}, _GLMS, fp32_bias=True),
        "tied": Plan({**_SIZES, **_GLM, **_TIED}, (TRANSFORMERS,), fp32_bias=True),
        # transformers leaves this layer out.
        "ahead": Plan({**_SIZES, **_GLM, "num_nextn_predict_layers": 1}, _GLMS[1:], fp32_bias=True, ahead=1),
    },
}

DENSE = ("llama", "qwen2", "qwen3")
"""Families without experts."""

VARIANTS: dict[str, tuple[str, ...]] = {family: tuple(plans) for family, plans in PLANS.items()}


@cache
def case(family: str, variant: str) -> Case:
    """The model of this family and variant; built once per process."""
    plan = PLANS[family][variant]
    options = {"model_type": family, **plan.options}
    seed = 1000 * list(PLANS).index(family) + list(PLANS[family]).index(variant)
    written, stored = hub.make(options, seed, fp32_bias=plan.fp32_bias, ahead=plan.ahead)
    dialects = {HF: stored, **{name: from_hf(name, written, stored) for name in plan.dialects}}
    versions: dict[str, Tensors] = {}
    if TORCHTITAN in dialects:
        versions[TITAN_02] = torchtitan_peer.older(dialects[TORCHTITAN])
    if MEGATRON in dialects:
        versions[MEGATRON_LOCAL] = from_hf(MEGATRON_LOCAL, written, stored)
    sources = {HF: "transformers 5.24.0 save_pretrained", TITAN_02: "from_hf_map of torchtitan 0.2.0 to 0.2.2"}
    sources |= {name: peer.source for name, peer in PEERS.items()}
    if family in automodel_peer.PLAIN:
        sources[AUTOMODEL] = "nemo-automodel 0.7.0 ModelState: HF names, no adapter"
    given = dialects.keys() | versions.keys()
    return Case(
        family, variant, options if plan.raw else _shown(written, plan.renamed), dialects,
        {name: source for name, source in sources.items() if name in given}, versions,
    )  # fmt: skip


def ahead(case: Case) -> int:
    """How many of its layers predict several tokens ahead."""
    return PLANS[case.family][case.variant].ahead


def _shown(config: dict[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    keys = {key: renamed.get(key, key) for key in config}
    return {keys[key]: value for key, value in config.items() if keys[key]}


def parameters(tensors: Tensors) -> int:
    """How many elements these tensors hold together."""
    return sum(value.numel() for value in tensors.values())


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Dtype, shape and bytes of a tensor, for comparisons that let nothing through."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), raw.numpy().tobytes()
