"""The models of the option sweep, as numbers: which element of the hub's files each stored element is, in any dialect.

A peer's converter is called with tensors that hold the digits of element numbers. Whatever it makes of them says where
each element goes, so that weights, moments, codes and scales of any type can follow, moved by torch's own indexing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tests.oracles import cases, hub
from tests.oracles.cases import AUTOMODEL, HF, MEGATRON, TE, TORCHTITAN, TRANSFORMERS
from tests.oracles.hub import Tensors

VLLM, TORCH_DIST, BY_LAYER = "vllm", "torch_dist", "torch_dist by layer"
Places = Mapping[str, torch.Tensor]
"""Stored name -> for each element its number in the hub's files, one after the other; -1 for padding."""

_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 44, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_HEADLESS = {key: value for key, value in _SIZES.items() if key != "head_dim"}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 32, "n_group": 2,
    "num_experts_per_tok": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
_WIDE = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 128}
"""Sizes of which tiles of 128 x 128 make up every matrix."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "qwen2": {**_HEADLESS, "tie_word_embeddings": True},
    "qwen3": _SIZES,
    "qwen3_moe": {**_SIZES, **_EXPERTS},
    "mixtral": {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {**_SIZES, "pad_token_id": 0},
    "gemma3": {**_SIZES, "model_type": "gemma3_text", "pad_token_id": 0, "tie_word_embeddings": True},
    "deepseek_v3": {**_HEADLESS, **_LATENT},
}
WIDE = {
    name: {**MODELS[name], **{key: size for key, size in _WIDE.items() if key in MODELS[name]}}
    for name in ("llama", "qwen3_moe")
}
_DENSE = ("llama", "qwen2", "qwen3")
_MEGATRON = (*_DENSE, "qwen3_moe", "mixtral", "deepseek_v3")
FAMILIES: dict[str, tuple[str, ...]] = {
    HF: tuple(MODELS), TRANSFORMERS: tuple(MODELS), TORCHTITAN: ("llama", "qwen3", "qwen3_moe", "deepseek_v3"),
    AUTOMODEL: (*_DENSE, "qwen3_moe", "deepseek_v3"), MEGATRON: _MEGATRON, TE: _MEGATRON,
    VLLM: (*_DENSE, "qwen3_moe"), TORCH_DIST: _MEGATRON,
}  # fmt: skip
"""Dialect -> the families for which there is an oracle."""


@dataclass(frozen=True)
class Truth:
    """A model as the hub has it."""

    family: str
    config: dict[str, Any]
    """config.json."""
    tensors: Tensors
    """The hub's names -> values. They are shared: do not write into them."""

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: value.shape for name, value in self.tensors.items()}


@cache
def truth(family: str, wide: bool = False) -> Truth:
    """The model of this family; with `wide` in sizes of whole tiles."""
    options = {"model_type": family, **(WIDE if wide else MODELS)[family]}
    config, tensors = hub.make(options, 7 + list(MODELS).index(family), fp32_bias=True)
    return Truth(family, config, tensors)


@cache
def places(family: str, dialect: str, wide: bool = False) -> Places:
    """Where the elements of the hub's files are in another dialect."""
    model = truth(family, wide)
    numbers, count = {}, 0
    for name, value in model.tensors.items():
        numbers[name] = torch.arange(count, count + value.numel()).reshape(value.shape)
        count += value.numel()
    if dialect == HF:
        return numbers
    collected: dict[str, torch.Tensor] = {}
    for digit in range(3):  # 256 is the last integer that a number of eight bits of precision holds with all before it
        drawn = {
            name: (number + 1 >> 8 * digit & 255).to(model.tensors[name].dtype) for name, number in numbers.items()
        }
        for name, value in _converted(dialect, model, drawn).items():
            assert bool((value == value.round()).all()), name
            collected[name] = collected.get(name, 0) + (value.long() << 8 * digit)
    assert all(bool((number <= count).all()) for number in collected.values())
    return {name: number - 1 for name, number in collected.items()}


def _converted(dialect: str, model: Truth, tensors: Tensors) -> Tensors:
    if dialect == VLLM:
        return _vllm(tensors)
    if dialect in (TORCH_DIST, BY_LAYER):
        layers = dialect == TORCH_DIST and model.family != "deepseek_v3"
        return _stacked(cases.from_hf(MEGATRON, model.config, tensors), layers=layers)
    return cases.from_hf(dialect, model.config, tensors)


def _vllm(tensors: Tensors) -> Tensors:
    """vLLM 0.32: QKVParallelLinear, MergedColumnParallelLinear and FusedMoE join what the hub has one by one."""
    rest = dict(tensors)
    joined: Tensors = {}
    for first in [name for name in tensors if ".q_proj." in name]:
        parts = [rest.pop(first.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        joined[first.replace(".q_proj.", ".qkv_proj.")] = torch.cat(parts)
    stems: dict[str, list[torch.Tensor]] = {}
    for gate in [name for name in tensors if name.endswith(".gate_proj.weight")]:
        stem = gate.removesuffix("gate_proj.weight")
        both = torch.cat([rest.pop(gate), rest.pop(f"{stem}up_proj.weight")])
        expert = re.fullmatch(r"(.*\.experts\.)\d+\.", stem)
        if expert is None:
            joined[f"{stem}gate_up_proj.weight"] = both
        else:
            stems.setdefault(f"{expert[1]}routed_experts.w13_weight", []).append(both)
            stems.setdefault(f"{expert[1]}routed_experts.w2_weight", []).append(rest.pop(f"{stem}down_proj.weight"))
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & rest.keys():  # VocabParallelEmbedding
        rest[name] = torch.nn.functional.pad(rest[name], (0, 0, 0, -len(rest[name]) % 64))
    return {**rest, **joined, **{name: torch.stack(parts) for name, parts in stems.items()}}


def _stacked(native: Tensors, *, layers: bool) -> Tensors:
    """Megatron's distributed checkpoints: one tensor for all experts, and, where layers are alike, for all layers."""
    joined = {r"(.*\.experts\.)(linear_fc\d\.weight)(\d+)": r"\1experts.\2"}
    if layers:
        joined[r"(decoder\.layers\.)()(\d+)\.(.*)"] = r"\1\4"
    for pattern, name in joined.items():
        groups: dict[str, dict[int, torch.Tensor]] = {}
        for key in list(native):
            if match := re.fullmatch(pattern, key):
                groups.setdefault(match.expand(name), {})[int(match[3])] = native[key]
        native = {key: value for key, value in native.items() if not re.fullmatch(pattern, key)}
        native |= {key: torch.stack([parts[n] for n in range(len(parts))]) for key, parts in groups.items()}
    return native


def relaid(values: Tensors, where: Places, shapes: Mapping[str, torch.Size]) -> Tensors:
    """Move elements of the hub's tensors, of which some may be missing, to where another dialect has them.

    `shapes` are those of all, in the order in which elements are counted. What lacks elements is left out; a tensor of
    several types raises MixedTypesError.
    """
    sizes = [shape.numel() for shape in shapes.values()]
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    kinds = sorted({str(value.dtype) for value in values.values()})
    codes = torch.tensor([kinds.index(str(values[name].dtype)) if name in values else -1 for name in shapes])
    kind_of = torch.cat([codes[owner], torch.tensor([-2])])
    pools = {}
    for kind in kinds:
        dtype = getattr(torch, kind.removeprefix("torch."))
        mine = {name: value for name, value in values.items() if value.dtype == dtype}
        pool = [
            mine[name].reshape(-1) if name in mine else torch.zeros(shape.numel(), dtype=dtype)
            for name, shape in shapes.items()
        ]
        pools[kind] = torch.cat([*pool, torch.zeros(1, dtype=dtype)])
    collected: Tensors = {}
    for name, number in where.items():
        present = {code for code in kind_of[number].unique().tolist() if code != -2}
        if -1 in present:
            continue
        if len(present) > 1:
            raise MixedTypesError(name)
        collected[name] = pools[kinds[present.pop()]][number] if present else torch.zeros(number.shape)
    return collected


class MixedTypesError(Exception):
    """A tensor of the target would need values of several types: a conversion has to refuse that."""


def origins(where: torch.Tensor, shapes: Mapping[str, torch.Size]) -> set[str]:
    """The hub's tensors whose elements a stored tensor has."""
    ends = torch.tensor([shape.numel() for shape in shapes.values()]).cumsum(0)
    names = list(shapes)
    return {names[n] for n in torch.searchsorted(ends, where[where >= 0], right=True).unique().tolist()}


_LINEAR = re.compile(r"model\.layers\.\d+\..*\.(?:[a-z_]+_proj(?:_with_mqa)?|w[123])\.weight")


def is_linear(name: str) -> bool:
    """Whether a tensor of the hub's is the weight of a linear layer that is usually quantized."""
    return _LINEAR.fullmatch(name) is not None
