"""The order in which Megatron's modules register their parameters; flat buckets hold them in reverse.

It is the order in which constructors create submodules, a module's own parameters before those of its submodules; it
was read from the models of megatron-core 0.12.3, 0.14.0, 0.15.3, 0.16.1 and 0.19.2, which agree. Names in a checkpoint
leave two things open: Transformer Engine has the norm before a projection inside of it, where local layers have a
module, stored under the same name; and experts are a loop over experts, or over the two linears of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

import msgspec

_REGISTERED = (
    # A model.
    "embedding", "decoder", "mtp", "output_layer",
    "word_embeddings", "position_embeddings", "tokentype_embeddings",
    "enorm", "hnorm", "eh_proj", "transformer_layer", "layers", "final_layernorm",
    # A layer.
    "input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp",
    "core_attention", "softmax_offset", "linear_proj", "linear_qkv",
    "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj",
    "q_layernorm", "kv_layernorm", "k_layernorm",
    "router", "fc1_latent_proj", "fc2_latent_proj", "experts", "shared_experts",
    "gate_weight", "linear_fc1", "linear_fc2",
    # A module without submodules.
    "layer_norm_weight", "layer_norm_bias", "weight", "bias",
)  # fmt: skip
"""Segments of parameters' paths; those of one module are in the order of its constructor."""
_RANKS = {segment: rank for rank, segment in enumerate(_REGISTERED)}
_BUFFERS = frozenset({"expert_bias", "local_tokens_per_expert"})
"""Last segments of stored tensors that the optimizer does not train."""
_FUSED = {("self_attention", "linear_qkv"): "input_layernorm", ("mlp", "linear_fc1"): "pre_mlp_layernorm"}
"""Module with a norm inside -> what the norm before it is called as a module of its own."""
_NORM = "layer_norm_"
_EXPERTS = ("experts", "experts")
_LAYER, _EXPERT = "{layer}", "{expert}"
"""Marks for numbers in a path."""

Key = tuple[int, ...]
"""Where a parameter is in the order: keys compare as the parameters come."""


class UnknownOrderError(Exception):
    """Says why the order of a model's parameters is not known."""


class Order(msgspec.Struct, frozen=True):
    """What the names leave open."""

    norms_apart: bool
    """Whether norms before projections are modules of their own."""
    grouped: bool
    """Whether the first linears of all experts come before their second linears."""


def orders(arguments: Mapping[str, Any]) -> Iterator[Order]:
    """Yield the possible orders; that of which a run's arguments speak comes first."""
    apart = arguments.get("transformer_impl") == "local"
    grouped = arguments.get("moe_grouped_gemm") is not False
    for norms in (apart, not apart):
        for experts in (grouped, not grouped):
            yield Order(norms, experts)


def is_trained(name: str) -> bool:
    """Tell whether a stored tensor of the model is a parameter."""
    return name.rpartition(".")[2] not in _BUFFERS


def has_layers(name: str) -> bool:
    """Tell whether a stored tensor has all layers as its first axis."""
    segments = name.split(".")
    return segments[1:2] == ["layers"] and len(segments) > 2 and not segments[2].isdecimal()


def has_experts(name: str) -> bool:
    """Tell whether a stored tensor has all experts as an axis, after that of the layers."""
    return _experts_at(name.split(".")) is not None


def key(name: str, layer: int | None, expert: int | None, order: Order) -> Key:
    """Return where a parameter is in the order.

    Args:
        name: of the stored tensor.
        layer: index on its axis of layers.
        expert: index on its axis of experts.
        order: see there.

    Raises:
        UnknownOrderError: a segment of the name is not among those that are known.
    """
    template = _template(name, layer is not None, expert is not None, order)
    return tuple(layer if rank is _LAYER else expert if rank is _EXPERT else rank for rank in template)  # type: ignore[misc]


@lru_cache(maxsize=1 << 14)
def _template(name: str, layer: bool, expert: bool, order: Order) -> tuple[int | str, ...]:
    """Return where all parameters of a stored tensor are in the order, with marks for the layer and the expert."""
    path = name.split(".")
    if expert:
        at = _experts_at(path)
        assert at is not None
        del path[at]
        path.insert(at + 2 if order.grouped else at + 1, _EXPERT)
    if layer:
        path.insert(2, _LAYER)
    norm = _FUSED.get((path[-3], path[-2])) if len(path) > 3 else None
    if order.norms_apart and norm is not None and path[-1].startswith(_NORM):
        path[-3:] = [norm, path[-1].removeprefix(_NORM)]
    return tuple(_rank(segment, name) for segment in path)


def _experts_at(segments: list[str]) -> int | None:
    """Return where `experts.experts` begins."""
    return next((at for at, pair in enumerate(pairwise(segments)) if pair == _EXPERTS), None)


def _rank(segment: str, name: str) -> int | str:
    if segment in (_LAYER, _EXPERT):
        return segment
    if segment.isdecimal() and len(segment) < 10:
        return int(segment)
    if segment not in _RANKS:
        raise UnknownOrderError(f"the order of the parameters of a module with {segment!r} ({name}) is not known")
    return _RANKS[segment]
