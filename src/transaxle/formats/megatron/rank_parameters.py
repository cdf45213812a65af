"""Which parameters each rank of a model had, and which boxes of the stored tensors they are.

A stored tensor may hold all layers and all experts; its chunks are what ranks saved of one layer and one expert. So the
chunks tell how a parameter was cut: not at all, into as many pieces as there are ranks, or, where it is gate and up
in one, into twice as many, of which each rank has one of either half.

The order in which Megatron's modules register their parameters; flat buckets hold them in reverse.

It is the order in which constructors create submodules, a module's own parameters before those of its submodules; it
was read from the models of megatron-core 0.12.3, 0.14.0, 0.15.3, 0.16.1 and 0.19.2, which agree. Names in a checkpoint
leave two things open: Transformer Engine has the norm before a projection inside of it, where local layers have a
module, stored under the same name; and experts are a loop over experts, or over the two linears of all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import msgspec

from transaxle.formats.catalog import Entry, Shape

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


_GATED = "linear_fc1"
_EMBEDDING, _OUTPUT, _FINAL, _AHEAD = "embedding", "output_layer", "final_layernorm", "mtp"
_WORDS = "embedding.word_embeddings.weight"
_OUTPUT_WEIGHT = "output_layer.weight"
_KINDS = (_EMBEDDING, "layers", _FINAL, _AHEAD, _OUTPUT)
"""Kinds of parts, in the order in which stages have them."""
_LAYERS_AT, _AHEAD_AT, _OUTPUT_AT = 1, 3, 4


class Box(NamedTuple):
    """A box of a stored tensor."""

    start: Shape
    shape: Shape


@dataclass(frozen=True)
class StoredParameter:
    """A stored tensor of the model: one parameter, or that of all layers and experts."""

    entry: Entry
    stacked: int
    """Number of first axes that are layers and experts."""
    boxes: tuple[Box, ...]
    """What ranks saved of one layer and expert, along the axes that remain."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.entry.name

    @cached_property
    def is_expert(self) -> bool:
        """Whether it belongs to experts."""
        return has_experts(self.name)

    def held(self, rank: int, ranks: int) -> tuple[Box, ...]:
        """Return what one of the ranks among which it is cut holds, in the order of its own tensor.

        Raises:
            UnknownOrderError: it is cut for another number of ranks.
        """
        if len(self.boxes) == 1:
            return self.boxes
        halves = self.halves(ranks)
        return tuple(self.boxes[half * ranks + rank] for half in range(halves))

    def halves(self, ranks: int) -> int:
        """Return how many parts lie one after the other, each of them cut: two where it is gate and up.

        Raises:
            UnknownOrderError: it is cut for another number of ranks.
        """
        count = len(self.boxes)
        gated = self.name.split(".")[-2:-1] == [_GATED]
        if count in (1, ranks) or (gated and count == 2 * ranks):
            return max(count // ranks, 1)
        raise UnknownOrderError(f"{self.name} is cut into {count} pieces, which {ranks} ranks do not share out")

    def size(self, ranks: int) -> int:
        """Return the number of elements that each rank holds of it, of one layer and expert."""
        return sum(prod(box.shape) for box in self.held(0, ranks))


class LocalParameter(NamedTuple):
    """A parameter as a rank has it."""

    key: Key
    """Where it is in the order."""
    stored: StoredParameter
    slot: Shape
    """Its layer and expert in the stored tensor."""
    size: int
    """Number of elements on the rank."""
    shared: bool
    """Whether it may be an embedding that another stage has too, which begins a bucket."""


class Item(NamedTuple):
    """A part of the model that pipeline stages do not divide: the embedding, a layer, the last norm, the output."""

    kind: str
    parameters: tuple[tuple[StoredParameter, int | None], ...]
    """Its tensors, each with the index on its axis of layers."""

    @property
    def may_copy(self) -> bool:
        """Whether a stage with it may have a copy of the embedding."""
        return self.kind in (_AHEAD, _OUTPUT)


@dataclass(frozen=True)
class Model:
    """The parameters of a model, in the parts that pipeline stages have."""

    items: tuple[Item, ...]
    """The parts, in the order in which stages have them."""
    ranks: Mapping[bool, int]
    """Among how many ranks parameters are cut: those of experts, and all others."""
    experts: int
    """Number of experts; 0 where there are none."""

    def local(
        self, run: range, order: Order, experts: range | None = None, *, among: bool | None = None
    ) -> list[LocalParameter]:
        """Return the parameters of a rank that has some consecutive parts of the model, in order.

        Args:
            run: numbers of the parts.
            order: see there.
            experts: those that the rank has; None: all.
            among: only those of experts, or only all others; None: both.

        Raises:
            UnknownOrderError: see `parameter_order.key`.
        """
        found: list[LocalParameter] = []
        for item in self._of_stage(run):
            for stored, layer in item.parameters:
                if among is not None and stored.is_expert != among:
                    continue
                name = _OUTPUT_WEIGHT if item.kind == _OUTPUT else stored.name
                shared = name in (_WORDS, _OUTPUT_WEIGHT)
                size = stored.size(self.ranks[stored.is_expert])
                slot = () if layer is None else (layer,)
                if not stored.is_expert:
                    found.append(LocalParameter(key(name, layer, None, order), stored, slot, size, shared))
                    continue
                for expert in experts or range(self.experts):
                    at = key(name, layer, expert, order)
                    found.append(LocalParameter(at, stored, (*slot, expert), size, shared))
        return sorted(found, key=lambda parameter: parameter.key)

    def _of_stage(self, run: range) -> list[Item]:
        """Return parts of the model with the copies of the embedding that a stage has which is not the first."""
        found = [self.items[at] for at in run]
        first = self.items[0]
        kinds = {item.kind for item in found}
        if first.kind != _EMBEDDING or _EMBEDDING in kinds:
            return found
        if _AHEAD in kinds:
            return [first, *found]
        words = tuple(each for each in first.parameters if each[0].name == _WORDS)
        return [item if item.parameters or item.kind != _OUTPUT else Item(_OUTPUT, words) for item in found]


def model_of(entries: Iterable[Entry]) -> Model:
    """Return the parameters among the tensors of a model.

    Raises:
        UnknownOrderError: chunks are not those that ranks save; or a tensor belongs to no part.
    """
    parameters = [_stored(entry) for entry in entries if is_trained(entry.name)]
    found: dict[tuple[int, int], list[tuple[StoredParameter, int | None]]] = {}
    for parameter in parameters:
        for at, layer in _places(parameter):
            found.setdefault(at, []).append((parameter, layer))
    found.setdefault((_OUTPUT_AT, 0), [])  # tied to the embedding
    experts = {each.entry.shape[each.stacked - 1] for each in parameters if each.is_expert}
    if len(experts) > 1:
        raise UnknownOrderError(f"the layers have different numbers of experts: {sorted(experts)}")
    return Model(
        tuple(Item(_KINDS[at[0]], tuple(listed)) for at, listed in sorted(found.items())),
        {
            are_experts: _ranks([each for each in parameters if each.is_expert == are_experts])
            for are_experts in (False, True)
        },
        max(experts, default=0),
    )


def _ranks(parameters: Sequence[StoredParameter]) -> int:
    """Return among how many ranks parameters are cut."""
    return max((len(each.boxes) for each in parameters if f".{_GATED}." not in each.name), default=1)


def _stored(entry: Entry) -> StoredParameter:
    stacked = has_layers(entry.name) + has_experts(entry.name)
    slots = prod(entry.shape[:stacked])
    boxes = Counter(Box(extent.start[stacked:], extent.shape[stacked:]) for extent in entry.extents)
    one_each = all(size == 1 for extent in entry.extents for size in extent.shape[:stacked])
    if stacked > len(entry.shape) or not one_each or any(count != slots for count in boxes.values()):
        raise UnknownOrderError(f"the chunks of {entry.name} are not one for each layer, expert and rank")
    found = sorted(boxes)
    cut = [dim for dim in range(len(entry.shape) - stacked) if len({box.start[dim] for box in found}) > 1]
    if len(cut) > 1 or len({box.shape for box in found}) > 1:
        raise UnknownOrderError(f"the chunks of {entry.name} are not equal parts along one of its dims")
    return StoredParameter(entry, stacked, tuple(found))


def _places(parameter: StoredParameter) -> list[tuple[tuple[int, int], int | None]]:
    """Return the parts that a stored tensor has something of, each with the index on its axis of layers."""
    segments = parameter.name.split(".")
    if segments[:2] == ["decoder", "layers"]:
        if has_layers(parameter.name):
            return [((_LAYERS_AT, layer), layer) for layer in range(parameter.entry.shape[0])]
        return [((_LAYERS_AT, int(segments[2])), None)]
    if segments[:2] == [_AHEAD, "layers"] and segments[2:3] and segments[2].isdecimal():
        return [((_AHEAD_AT, int(segments[2])), None)]
    for kind, stem in ((_EMBEDDING, [_EMBEDDING]), (_FINAL, ["decoder", _FINAL]), (_OUTPUT, [_OUTPUT])):
        if segments[: len(stem)] == stem:
            return [((_KINDS.index(kind), 0), None)]
    raise UnknownOrderError(f"in which pipeline stage {parameter.name} was is not known")
