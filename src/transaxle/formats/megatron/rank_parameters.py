"""Determines the parameters that each rank has, the boxes of these parameters in the stored tensors, and the order of
parameters in a module.

A stored tensor may stack the parameters of all layers and experts; each chunk is what one rank saved of one layer and
expert. The chunks therefore show how a parameter was cut: not at all, into one chunk per rank, or, for a fused gate and
up projection, into two chunks per rank, one from the gate and one from the up projection.

Flat buckets contain the parameters in the reverse of the order in which Megatron's modules register them. Constructors
create submodules in this order, and register a module's own parameters before those of its submodules. The order was
read from the models of megatron-core 0.12.3, 0.14.0, 0.15.3, 0.16.1 and 0.19.2, which have the same order. Two choices
that the model makes cannot be seen from the names in a checkpoint. First, the norm before a projection is part of the
projection in Transformer Engine, but a separate module in Megatron's own layers; its stored name is the same. Second, a
module registers either expert by expert, or the first linear layers of all experts before the second linear layers of
all experts.
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

_SEGMENTS = (
    # Submodules of a model.
    "embedding", "decoder", "mtp", "output_layer",
    "word_embeddings", "position_embeddings", "tokentype_embeddings",
    "enorm", "hnorm", "eh_proj", "transformer_layer", "layers", "final_layernorm",
    # Submodules of a layer.
    "input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp",
    "core_attention", "softmax_offset", "linear_proj", "linear_qkv",
    "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj",
    "q_layernorm", "kv_layernorm", "k_layernorm",
    "router", "fc1_latent_proj", "fc2_latent_proj", "experts", "shared_experts",
    "gate_weight", "linear_fc1", "linear_fc2",
    # Parameters of a module without submodules.
    "layer_norm_weight", "layer_norm_bias", "weight", "bias",
)  # fmt: skip
"""Segments of parameter names; the segments inside one module are in the order in which its constructor creates
them."""
_RANKS = {segment: rank for rank, segment in enumerate(_SEGMENTS)}
_BUFFERS = frozenset({"expert_bias", "local_tokens_per_expert"})
"""Last name segments of buffers, which the optimizer does not train."""
_NORM_MODULES = {("self_attention", "linear_qkv"): "input_layernorm", ("mlp", "linear_fc1"): "pre_mlp_layernorm"}
"""Projection that may contain a norm -> name of this norm as a separate module."""
_NORM = "layer_norm_"
_EXPERTS = ("experts", "experts")
_LAYER, _EXPERT = "{layer}", "{expert}"
"""Placeholders for the layer number and the expert number in a sort key."""

OrderKey = tuple[int, ...]
"""Sort key that puts parameters into the order in which modules register them."""


class UnknownOrderError(Exception):
    """The order in which a model registers its parameters is unknown; the error message states the reason."""


class Order(msgspec.Struct, frozen=True):
    """The two choices in a module's parameter order that tensor names do not show."""

    norms_apart: bool
    """Whether the norms before projections are separate modules."""
    grouped: bool
    """Whether the first linear layers of all experts come before the second linear layers of all experts."""


def orders(arguments: Mapping[str, Any]) -> Iterator[Order]:
    """Yield all possible orders of parameters, first the order that the run's arguments suggest."""
    apart = arguments.get("transformer_impl") == "local"
    grouped = arguments.get("moe_grouped_gemm") is not False
    for norms in (apart, not apart):
        for experts in (grouped, not grouped):
            yield Order(norms, experts)


def is_trained(name: str) -> bool:
    """Return whether a stored tensor is a trained parameter rather than a buffer."""
    return name.rpartition(".")[2] not in _BUFFERS


def has_layers(name: str) -> bool:
    """Return whether a stored tensor stacks all layers along its first dim."""
    segments = name.split(".")
    return segments[1:2] == ["layers"] and len(segments) > 2 and not segments[2].isdecimal()


def has_experts(name: str) -> bool:
    """Return whether a stored tensor stacks all experts along a dim; this dim follows the dim of layers if there is
    one.
    """
    return _experts_at(name.split(".")) is not None


def order_key(name: str, layer: int | None, expert: int | None, order: Order) -> OrderKey:
    """Return the sort key of a parameter in the module's order.

    Args:
        name: name of the stored tensor.
        layer: index along the tensor's layer dim; None if the tensor does not stack layers.
        expert: index along the tensor's expert dim; None if the tensor does not stack experts.
        order: the choices in a module's parameter order that tensor names do not show; see `Order`.

    Raises:
        UnknownOrderError: if a segment of the name is unknown.
    """
    template = _template(name, layer is not None, expert is not None, order)
    return tuple(layer if rank is _LAYER else expert if rank is _EXPERT else rank for rank in template)  # type: ignore[misc]


@lru_cache(maxsize=1 << 14)
def _template(name: str, layer: bool, expert: bool, order: Order) -> tuple[int | str, ...]:
    """Return the sort key of a stored tensor's parameters, with placeholders for the layer and expert numbers."""
    path = name.split(".")
    if expert:
        at = _experts_at(path)
        assert at is not None
        del path[at]
        path.insert(at + 2 if order.grouped else at + 1, _EXPERT)
    if layer:
        path.insert(2, _LAYER)
    norm = _NORM_MODULES.get((path[-3], path[-2])) if len(path) > 3 else None
    if order.norms_apart and norm is not None and path[-1].startswith(_NORM):
        path[-3:] = [norm, path[-1].removeprefix(_NORM)]
    return tuple(_rank(segment, name) for segment in path)


def _experts_at(segments: list[str]) -> int | None:
    """Return the position of the segments `experts.experts` in a name; None if the name does not contain them."""
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
"""Kinds of model parts, in the order in which the parts follow along the pipeline."""
_LAYERS_AT, _AHEAD_AT, _OUTPUT_AT = 1, 3, 4


class Box(NamedTuple):
    """A box of a stored tensor, as (first index, shape)."""

    start: Shape
    shape: Shape


@dataclass(frozen=True)
class StoredParameter:
    """A stored tensor of the model: one parameter, or the stacked parameters of all layers and experts."""

    entry: Entry
    stacked: int
    """Number of leading dims along which layers and experts are stacked."""
    boxes: tuple[Box, ...]
    """Boxes of one layer and expert that the ranks saved, without the stacked dims."""

    @property
    def name(self) -> str:
        """Name of the stored tensor."""
        return self.entry.name

    @cached_property
    def is_expert(self) -> bool:
        """Whether the parameter belongs to routed experts."""
        return has_experts(self.name)

    def rank_boxes(self, rank: int, ranks: int) -> tuple[Box, ...]:
        """Return the boxes of this parameter that one rank has, in the order in which the rank's tensor concatenates
        them.

        Args:
            rank: number of the rank.
            ranks: number of ranks over which parameters of this kind are cut.

        Raises:
            UnknownOrderError: if the parameter's boxes do not fit this number of ranks.
        """
        if len(self.boxes) == 1:
            return self.boxes
        halves = self.halves(ranks)
        return tuple(self.boxes[half * ranks + rank] for half in range(halves))

    def halves(self, ranks: int) -> int:
        """Return how many blocks of the parameter are cut separately: 2 for a fused gate and up projection, otherwise
        1.

        Raises:
            UnknownOrderError: if the parameter's boxes do not fit this number of ranks.
        """
        count = len(self.boxes)
        gated = self.name.split(".")[-2:-1] == [_GATED]
        if count in (1, ranks) or (gated and count == 2 * ranks):
            return max(count // ranks, 1)
        raise UnknownOrderError(f"{self.name} is cut into {count} pieces, which {ranks} ranks do not share out")

    def size(self, ranks: int) -> int:
        """Return the number of elements of one layer and expert that each rank has."""
        return sum(prod(box.shape) for box in self.rank_boxes(0, ranks))


class LocalParameter(NamedTuple):
    """The parameter of one layer and expert on one rank."""

    key: OrderKey
    """Sort key of the parameter in the module's order."""
    stored: StoredParameter
    slot: Shape
    """Index of the parameter along the stacked dims (layer, expert) of the stored tensor."""
    size: int
    """Number of the parameter's elements on the rank."""
    shared: bool
    """Whether the parameter may be an embedding that two pipeline stages have; such an embedding begins a new bucket.
    """


class ModelPart(NamedTuple):
    """A part of the model that is always on one pipeline stage: the embedding, a layer, the final norm, or the
    output.
    """

    kind: str
    parameters: tuple[tuple[StoredParameter, int | None], ...]
    """Stored tensors of the model part, each with the index along the tensor's layer dim (None if the tensor does not
    stack layers)."""

    @property
    def may_copy(self) -> bool:
        """Whether a pipeline stage with this model part may have a copy of the embedding."""
        return self.kind in (_AHEAD, _OUTPUT)


@dataclass(frozen=True)
class Model:
    """The parameters of a model, divided into parts that are each on one pipeline stage."""

    items: tuple[ModelPart, ...]
    """All model parts, in pipeline order."""
    ranks: Mapping[bool, int]
    """Number of ranks over which parameters are cut; the key is True for parameters of experts, False for all
    others."""
    experts: int
    """Number of experts in each layer; 0 for a model without experts."""

    def local(
        self, part_range: range, order: Order, experts: range | None = None, *, experts_only: bool | None = None
    ) -> list[LocalParameter]:
        """Return the parameters on a rank that has a range of the model parts, in the module's order.

        Args:
            part_range: indices of the model parts that the rank has.
            order: the choices in a module's parameter order that tensor names do not show; see `Order`.
            experts: numbers of the experts that the rank has; None for all experts.
            experts_only: True to return only the parameters of experts; False to leave these out; None to return all
                parameters.

        Raises:
            UnknownOrderError: if a segment of a name is unknown.
        """
        parameters: list[LocalParameter] = []
        for item in self._parts_of_stage(part_range):
            for stored, layer in item.parameters:
                if experts_only is not None and stored.is_expert != experts_only:
                    continue
                name = _OUTPUT_WEIGHT if item.kind == _OUTPUT else stored.name
                shared = name in (_WORDS, _OUTPUT_WEIGHT)
                size = stored.size(self.ranks[stored.is_expert])
                slot = () if layer is None else (layer,)
                if not stored.is_expert:
                    parameters.append(LocalParameter(order_key(name, layer, None, order), stored, slot, size, shared))
                    continue
                for expert in experts or range(self.experts):
                    at = order_key(name, layer, expert, order)
                    parameters.append(LocalParameter(at, stored, (*slot, expert), size, shared))
        return sorted(parameters, key=lambda parameter: parameter.key)

    def _parts_of_stage(self, part_range: range) -> list[ModelPart]:
        """Return the model parts of one pipeline stage; a stage after the first may also have a copy of the
        embedding.
        """
        parts = [self.items[at] for at in part_range]
        first = self.items[0]
        kinds = {item.kind for item in parts}
        if first.kind != _EMBEDDING or _EMBEDDING in kinds:
            return parts
        if _AHEAD in kinds:
            return [first, *parts]
        words = tuple(each for each in first.parameters if each[0].name == _WORDS)
        return [item if item.parameters or item.kind != _OUTPUT else ModelPart(_OUTPUT, words) for item in parts]


def model_of(entries: Iterable[Entry]) -> Model:
    """Return the `Model` that consists of the given stored tensors.

    Raises:
        UnknownOrderError: if a tensor does not have one chunk per layer, expert and rank, or belongs to no part of a
            model.
    """
    parameters = [_parameter_of(entry) for entry in entries if is_trained(entry.name)]
    parameters_by_part: dict[tuple[int, int], list[tuple[StoredParameter, int | None]]] = {}
    for parameter in parameters:
        for at, layer in _parts_of(parameter):
            parameters_by_part.setdefault(at, []).append((parameter, layer))
    # an output layer that is tied to the embedding stores no parameters
    parameters_by_part.setdefault((_OUTPUT_AT, 0), [])
    experts = {each.entry.shape[each.stacked - 1] for each in parameters if each.is_expert}
    if len(experts) > 1:
        raise UnknownOrderError(f"the layers have different numbers of experts: {sorted(experts)}")
    return Model(
        tuple(
            ModelPart(_KINDS[at[0]], tuple(part_parameters))
            for at, part_parameters in sorted(parameters_by_part.items())
        ),
        {
            are_experts: _ranks([each for each in parameters if each.is_expert == are_experts])
            for are_experts in (False, True)
        },
        max(experts, default=0),
    )


def _ranks(parameters: Sequence[StoredParameter]) -> int:
    """Return the number of ranks over which parameters are cut, as the parameters' boxes show it."""
    return max((len(each.boxes) for each in parameters if f".{_GATED}." not in each.name), default=1)


def _parameter_of(entry: Entry) -> StoredParameter:
    stacked = has_layers(entry.name) + has_experts(entry.name)
    slots = prod(entry.shape[:stacked])
    boxes = Counter(Box(extent.start[stacked:], extent.shape[stacked:]) for extent in entry.extents)
    one_each = all(size == 1 for extent in entry.extents for size in extent.shape[:stacked])
    if stacked > len(entry.shape) or not one_each or any(count != slots for count in boxes.values()):
        raise UnknownOrderError(f"the chunks of {entry.name} are not one for each layer, expert and rank")
    sorted_boxes = sorted(boxes)
    cut = [dim for dim in range(len(entry.shape) - stacked) if len({box.start[dim] for box in sorted_boxes}) > 1]
    if len(cut) > 1 or len({box.shape for box in sorted_boxes}) > 1:
        raise UnknownOrderError(f"the chunks of {entry.name} are not equal parts along one of its dims")
    return StoredParameter(entry, stacked, tuple(sorted_boxes))


def _parts_of(parameter: StoredParameter) -> list[tuple[tuple[int, int], int | None]]:
    """Return the model parts to which a stored tensor belongs, each with the index along the tensor's layer dim."""
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
