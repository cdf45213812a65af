"""Describes conversions in words: how axes move between tensor names and shapes, and what a family's axes and dialects
mean.

For each line of a printed plan, this module describes which axes move from names to shapes or back, and which tensors
are transposed, joined or split.

The families' tables contain only names and formulas; this module contains the meanings of dialects and axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any

import msgspec

from transaxle.axes.notation.expression import PADDING, Axis, Expression, Merge, Node, Sum, parse, walk
from transaxle.axes.notation.family import Family
from transaxle.axes.notation.name import Name
from transaxle.engine.plan.planned import Route

RENAMED, UNCHANGED = "renamed", "unchanged"


class _ParsedRule(msgspec.Struct, frozen=True):
    """A table line (`name = layout`) of a dialect, parsed again from its text."""

    name: Name
    expression: Expression

    @property
    def short(self) -> str:
        """The table line as plans show it, `name[axes]`, without the logical tensor, because the plan's row already
        names it.
        """
        dims = self.expression.text
        return f"{self.name.text}{dims[dims.index('[') :]}"


def _rule(text: str) -> _ParsedRule:
    name, _, expression = text.partition(" = ")
    return _ParsedRule(Name(name), parse(expression))


def words(route: Route, sizes: Mapping[str, int]) -> str:
    """Describe how a line of a printed plan moves axes, as in `name e -> shape, transposed, joined`, or `renamed`, or
    `unchanged`.

    Args:
        route: one line of a printed plan.
        sizes: axis -> size, for known sizes; padding of size 0 is not mentioned.
    """
    target = _rule(route.target)
    sources = [_rule(text) for text in route.source if text]
    if not sources:
        return f"from a tied tensor for {route.component}"
    phrases = [
        *_describe_places(sources, target),
        *_describe_order(sources, target),
        *_describe_packing(sources, target),
        *_describe_padding(sources, target, sizes),
    ]
    if phrases:
        return ", ".join(dict.fromkeys(phrases))
    return UNCHANGED if [rule.name.text for rule in sources] == [target.name.text] else RENAMED


def rules(route: Route) -> tuple[tuple[str, ...], str]:
    """Return the source's table lines and the target's table line for a line of a plan, in the short form in which
    plans show them.
    """
    return tuple(_rule(text).short for text in route.source if text), _rule(route.target).short


class Arrangement(msgspec.Struct, frozen=True):
    """The axes of one table line, in the tensor name and in each dim, for drawings."""

    rule: str
    """The table line in the short form in which plans show it."""
    name: tuple[str, ...]
    """Axes in the tensor name; every index along them is a separate tensor."""
    dims: tuple[tuple[tuple[str, bool], ...], ...]
    """For each dim, its axes and texts from left to right: `(axis, True)` for an axis, `(text, False)` for a text
    between axes.
    """


def arrangements(route: Route) -> tuple[tuple[Arrangement, ...], Arrangement]:
    """Return the arrangements of axes for the source's table lines and for the target's table line in a line of a
    plan.
    """
    return tuple(_arrangement(_rule(text)) for text in route.source if text), _arrangement(_rule(route.target))


def _arrangement(rule: _ParsedRule) -> Arrangement:
    return Arrangement(rule.short, rule.name.axes, tuple(tuple(_words_of(dim)) for dim in rule.expression.dims))


def _words_of(node: Node) -> Iterator[tuple[str, bool]]:
    match node:
        case Axis(name):
            yield name, True
        case Merge(parts):
            yield from chain.from_iterable(map(_words_of, parts))
        case Sum(segments):
            for number, (name, part) in enumerate(segments):
                yield f"{'| ' if number else ''}{'padding' if name == PADDING else name}", False
                yield from _words_of(part)


def divide_bytes(route: Route, nbytes: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return how many bytes of the target tensors of a plan's line come from each table line of the source.

    Args:
        route: one line of a printed plan.
        nbytes: size in bytes of all target tensors of the plan's line.
        sizes: axis -> size, for known sizes.

    Returns:
        The source's table line in short form -> bytes; the sum is `nbytes`. The mapping has a single entry for all
        table lines if an axis size is unknown, or if there is padding.
    """
    target, sources = _rule(route.target), [_rule(text) for text in route.source if text]
    together = {" + ".join(rule.short for rule in sources) or "(tied)": nbytes}
    components = [set(rule.expression.components) & set(target.expression.components) for rule in sources]
    if len(sources) < 2 or not set(target.expression.axes) <= sizes.keys() or _has_padding(target.expression, sizes):
        return together
    elements = [
        sum(prod(sizes[axis] for axis in chain(*_dims(target.expression, component))) for component in shared)
        for shared in components
    ]
    if any(nbytes * each % sum(elements) for each in elements):
        return together
    return {rule.short: nbytes * each // sum(elements) for rule, each in zip(sources, elements, strict=True)}


def _describe_places(sources: Sequence[_ParsedRule], target: _ParsedRule) -> Iterator[str]:
    """Describe which axes move from the tensor name to the shape, or back."""
    for rule in sources:
        inward = [axis for axis in rule.name.axes if axis in target.expression.axes]
        outward = [axis for axis in target.name.axes if axis in rule.expression.axes]
        if inward:
            yield f"name {' '.join(inward)} -> shape"
        if outward:
            yield f"shape {' '.join(outward)} -> name"


def _describe_order(sources: Sequence[_ParsedRule], target: _ParsedRule) -> Iterator[str]:
    """Describe which axes change their order within the shape: whole dims, or axes merged in one dim."""
    for rule in sources:
        for component in [each for each in rule.expression.components if each in target.expression.components]:
            before, after = (_dims(side.expression, component) for side in (rule, target))
            common = set(chain(*before)) & set(chain(*after))
            first, second = ([axis for axis in chain(*dims) if axis in common] for dims in (before, after))
            if first == second:
                continue
            changed = {a for a, b in zip(first, second, strict=True) if a != b}
            if any(changed <= set(dim) for dim in before) and any(changed <= set(dim) for dim in after):
                old_order, new_order = (" ".join(axis for axis in side if axis in changed) for side in (first, second))
                yield f"order {old_order} -> {new_order}"
            else:
                yield "transposed"


def _describe_packing(sources: Sequence[_ParsedRule], target: _ParsedRule) -> Iterator[str]:
    """Describe whether several weights are joined into one tensor, or one tensor is split into several weights."""
    together = max(len(rule.expression.components) for rule in sources)
    if len(target.expression.components) > together:
        yield "joined"
    elif len(target.expression.components) < together:
        yield "split"
    elif together > 1 and [rule.expression.dims for rule in sources] != [target.expression.dims]:
        yield "packed differently"


def _describe_padding(sources: Sequence[_ParsedRule], target: _ParsedRule, sizes: Mapping[str, int]) -> Iterator[str]:
    """Describe whether padding rows are added or removed."""
    before, after = (
        any(_has_padding(rule.expression, sizes) for rule in sources),
        _has_padding(target.expression, sizes),
    )
    if before != after:
        yield "padded" if after else "padding off"


def _has_padding(expression: Expression, sizes: Mapping[str, int]) -> bool:
    paddings = [node for name, node in expression.segments if name == PADDING]
    return any(sizes.get(inner.name, 0) for node in paddings for inner in walk(node) if isinstance(inner, Axis))


def _dims(expression: Expression, component: str) -> list[list[str]]:
    """Return the axes of one component (logical tensor) in stored order: one list for each dim."""
    shares = expression.layout(dict.fromkeys(expression.axes, 2)).shares[component]
    return [[axis for axis, _, _ in share.axes] for share in shares]


class AxisMove(msgspec.Struct, frozen=True):
    """Where one axis of a logical tensor is stored in source and target: in the tensor name, or in a dim."""

    component: str
    """Name of the logical tensor."""
    axis: str
    """Name of the axis."""
    before: str
    """Where the axis is in the source: `name` for the tensor name, `dim 0`, or `dim 0 (g r c)` for a dim that merges
    several axes.
    """
    after: str
    """Where the axis is in the target, written in the same way as the field `before`."""


def axis_moves(route: Route) -> list[AxisMove]:
    """Return where each axis of the logical tensors in a plan's line is stored, in the target's order, outermost axis
    first.
    """
    target = _rule(route.target)
    moves = []
    for component in target.expression.components:
        after = _axis_places(target, component)
        for source in (_rule(text) for text in route.source if text):
            if component in source.expression.components:
                before = _axis_places(source, component)
                moves += [AxisMove(component, axis, before[axis], after[axis]) for axis in after if axis in before]
    return moves


def _axis_places(rule: _ParsedRule, component: str) -> dict[str, str]:
    """Return axis -> its place (name or dim) in a table line, for the axes of one component (logical tensor)."""
    places = dict.fromkeys(rule.name.axes, "name")
    for number, axes in enumerate(_dims(rule.expression, component)):
        text = f"dim {number}" if len(axes) == 1 else f"dim {number} ({' '.join(axes)})"
        places |= dict.fromkeys(axes, text)
    return places


_TRANSFORMERS, _MEGATRON, _TRANSAXLE = ("transformers", "5.24.0"), ("megatron-core", "0.16.1"), ("transaxle", "")


class Peer(msgspec.Struct, frozen=True):
    """The framework whose checkpoint layout a dialect describes."""

    framework: str
    """Name of the framework's package; empty for a dialect from a user's table."""
    version: str
    """Version of the framework with which the tables were compared; empty for layouts that Transaxle itself defines."""
    what: str
    """Description of the framework's layout to which the dialect corresponds."""


PEERS: Mapping[str, Peer] = {
    "hf": Peer(*_TRANSFORMERS, "names and shapes of published checkpoints"),
    "transformers": Peer(*_TRANSFORMERS, "the modules of a model in memory"),
    "torchtitan@0.3": Peer("torchtitan", "0.3.0", "the modules of its models"),
    "torchtitan@0.2": Peer("torchtitan", "0.2.0 to 0.2.2", "the modules of its models"),
    "torchtitan_hf": Peer("torchtitan", "0.3.0", "names of the hub, decoded as its reader does"),
    "automodel": Peer("nemo-automodel", "0.7.0", "the modules of its models"),
    "megatron": Peer(*_MEGATRON, "GPTModel with the layer spec of Transformer Engine, a weight for each expert"),
    "te": Peer(*_MEGATRON, "the same, with one grouped weight for all experts"),
    "megatron_dist": Peer(*_MEGATRON, "folders of dist_checkpointing, layers stacked"),
    "megatron_layers": Peer(*_MEGATRON, "folders of dist_checkpointing, each layer by itself"),
    "vllm": Peer("vllm", "0.32.0", "the modules of its models"),
    "stacked": Peer(*_TRANSAXLE, "transaxle.nn.MoE in a model of transformers, one tensor for all experts"),
    "separate": Peer(*_TRANSAXLE, "transaxle.nn.MoE in a model of transformers, a tensor for each expert"),
}
"""Label of each built-in dialect -> the framework whose layout it describes."""
_NO_PEER = Peer("", "", "")
_GROUPS = "num_key_value_heads|num_attention_heads"
_WORDS = {
    "num_hidden_layers": "layers",
    "vocab_size": "words of the vocabulary",
    "hidden_size": "hidden size",
    "max_position_embeddings": "positions",
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "groups of attention heads: one for each head of keys and values",
    _GROUPS: "groups of attention heads: one for each head of keys and values",
    "num_attention_heads/num_key_value_heads": "query heads in a group",
    f"num_attention_heads/({_GROUPS})": "query heads in a group",
    "head_dim": "dims of a head",
    "head_dim|hidden_size/num_attention_heads": "dims of a head",
    "hidden_size/num_attention_heads": "dims of a head",
    "intermediate_size": "width of the MLP",
    "moe_intermediate_size": "width of an expert",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "n_routed_experts": "experts",
    "num_experts|num_local_experts": "experts",
    "n_routed_experts|num_experts|num_local_experts": "experts",
    "q_lora_rank": "rank of the queries' projection",
    "kv_lora_rank": "rank of the projection of keys and values",
    "qk_nope_head_dim": "dims of a head without position",
    "v_head_dim": "dims of a head of values",
    "-n % 64": "rows of padding, so that the vocabulary is a multiple of 64",
}
"""Formula of an axis's size (a key of the config) -> what an axis of that size counts."""
_PADDING = "rows or columns of padding"


class NamedAxis(msgspec.Struct, frozen=True):
    """One row of the legend that explains a family's axes."""

    axis: str
    """Letter or word that names the axis."""
    size: str
    """Formula of the axis's size, made of config keys; empty if the size follows from tensor shapes."""
    meaning: str
    """What the axis counts; empty if only the formula of its size shows it."""


def peer_of(label: str) -> Peer:
    """Return the framework whose layout the dialect with a given label describes."""
    return PEERS.get(label, _NO_PEER)


def axes_of(family: Family) -> tuple[NamedAxis, ...]:
    """Return the legend of a family's axes, in the order of the family's table."""
    named_axes = []
    padding = {axis for dialect in family.dialects for line in dialect.lines for axis in line.expression.padding}
    for axis, formula in family.axes.items():
        size = "" if formula is None else formula.text
        named_axes.append(NamedAxis(axis, size, _WORDS.get(size, _PADDING if axis in padding else "")))
    return tuple(named_axes)


def dialect_facts(labels: Iterable[str]) -> list[dict[str, Any]]:
    """Return which framework's layout each dialect describes, as JSON data."""
    return [{"dialect": label, **msgspec.structs.asdict(peer_of(label))} for label in labels]


def axis_facts(family: Family) -> list[dict[str, Any]]:
    """Return the legend of a family's axes as JSON data."""
    return [msgspec.structs.asdict(axis) for axis in axes_of(family)]


def dialect_rows(labels: Iterable[str]) -> list[list[str]]:
    """Return which framework's layout each dialect describes, as rows of a printed table."""
    peers = [(label, peer_of(label)) for label in labels]
    return [[label, f"{peer.framework} {peer.version}".strip(), peer.what] for label, peer in peers]


def axis_rows(family: Family) -> list[list[str]]:
    """Return the legend of a family's axes as rows of a printed table."""
    return [[axis.axis, axis.size or "(as the shapes say)", axis.meaning] for axis in axes_of(family)]
