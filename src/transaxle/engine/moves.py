"""Conversions in words: what moves where, and the axes and dialects of a family.

What a line of a plan moves, in words: which axes go from a name to a shape, what is transposed, joined or split.

What dialects and axes stand for, in words: tables have names and formulas only.
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
    """One rule, parsed again from its text."""

    name: Name
    expression: Expression

    @property
    def short(self) -> str:
        """The rule as plans show it: `name[axes]`, without the tensor, which the row names anyway."""
        dims = self.expression.text
        return f"{self.name.text}{dims[dims.index('[') :]}"


def _rule(text: str) -> _ParsedRule:
    name, _, expression = text.partition(" = ")
    return _ParsedRule(Name(name), parse(expression))


def words(route: Route, sizes: Mapping[str, int]) -> str:
    """Describe what a route moves: `name e -> shape, transposed, joined`; or `renamed`, `unchanged`.

    Args:
        route: one line of a plan.
        sizes: known axis sizes; padding of size 0 does not count.
    """
    target = _rule(route.target)
    sources = [_rule(text) for text in route.source if text]
    if not sources:
        return f"from a tied tensor for {route.component}"
    phrases = [
        *_placed(sources, target),
        *_ordered(sources, target),
        *_packed(sources, target),
        *_padding(sources, target, sizes),
    ]
    if phrases:
        return ", ".join(dict.fromkeys(phrases))
    return UNCHANGED if [rule.name.text for rule in sources] == [target.name.text] else RENAMED


def rules(route: Route) -> tuple[tuple[str, ...], str]:
    """Return the rules of a route in the short form of plans: those of the source, and that of the target."""
    return tuple(_rule(text).short for text in route.source if text), _rule(route.target).short


class Arrangement(msgspec.Struct, frozen=True):
    """Where a rule has axes, as a drawing shows it."""

    rule: str
    """In the short form of plans."""
    name: tuple[str, ...]
    """Axes whose every index is a tensor of its own."""
    dims: tuple[tuple[tuple[str, bool], ...], ...]
    """For each dim its words from left to right: `(axis, True)`, or `(text, False)` of what stands between."""


def arrangements(route: Route) -> tuple[tuple[Arrangement, ...], Arrangement]:
    """Return where the rules of a route have axes: those of the source, and that of the target."""
    return tuple(_arranged(_rule(text)) for text in route.source if text), _arranged(_rule(route.target))


def _arranged(rule: _ParsedRule) -> Arrangement:
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


def divided(route: Route, nbytes: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return rule of the source, in short -> its part of the bytes of the target's tensors, as elements are divided.

    Args:
        route: one line of a plan.
        nbytes: bytes of all its tensors.
        sizes: known axis sizes.

    Returns:
        Parts that add up to `nbytes`; one for all rules together where sizes are not known, or where there is padding.
    """
    target, sources = _rule(route.target), [_rule(text) for text in route.source if text]
    together = {" + ".join(rule.short for rule in sources) or "(tied)": nbytes}
    components = [set(rule.expression.components) & set(target.expression.components) for rule in sources]
    if len(sources) < 2 or not set(target.expression.axes) <= sizes.keys() or _padded(target.expression, sizes):
        return together
    elements = [
        sum(prod(sizes[axis] for axis in chain(*_dims(target.expression, component))) for component in mine)
        for mine in components
    ]
    if any(nbytes * each % sum(elements) for each in elements):
        return together
    return {rule.short: nbytes * each // sum(elements) for rule, each in zip(sources, elements, strict=True)}


def _placed(sources: Sequence[_ParsedRule], target: _ParsedRule) -> Iterator[str]:
    """Describe axes that change between name and shape."""
    for rule in sources:
        inward = [axis for axis in rule.name.axes if axis in target.expression.axes]
        outward = [axis for axis in target.name.axes if axis in rule.expression.axes]
        if inward:
            yield f"name {' '.join(inward)} -> shape"
        if outward:
            yield f"shape {' '.join(outward)} -> name"


def _ordered(sources: Sequence[_ParsedRule], target: _ParsedRule) -> Iterator[str]:
    """Describe axes in both shapes that change their order: whole dims, or parts of one."""
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


def _packed(sources: Sequence[_ParsedRule], target: _ParsedRule) -> Iterator[str]:
    """Describe whether several weights become one tensor, or one becomes several."""
    together = max(len(rule.expression.components) for rule in sources)
    if len(target.expression.components) > together:
        yield "joined"
    elif len(target.expression.components) < together:
        yield "split"
    elif together > 1 and [rule.expression.dims for rule in sources] != [target.expression.dims]:
        yield "packed differently"


def _padding(sources: Sequence[_ParsedRule], target: _ParsedRule, sizes: Mapping[str, int]) -> Iterator[str]:
    """Describe whether padding is added or removed."""
    before, after = any(_padded(rule.expression, sizes) for rule in sources), _padded(target.expression, sizes)
    if before != after:
        yield "padded" if after else "padding off"


def _padded(expression: Expression, sizes: Mapping[str, int]) -> bool:
    paddings = [node for name, node in expression.segments if name == PADDING]
    return any(sizes.get(inner.name, 0) for node in paddings for inner in walk(node) if isinstance(inner, Axis))


def _dims(expression: Expression, component: str) -> list[list[str]]:
    """Return the axes of one component in stored order, dim by dim."""
    shares = expression.layout(dict.fromkeys(expression.axes, 2)).shares[component]
    return [[axis for axis, _, _ in share.axes] for share in shares]


class AxisMove(msgspec.Struct, frozen=True):
    """Where one axis of a logical tensor is before and after."""

    component: str
    """The logical tensor."""
    axis: str
    """Its axis."""
    before: str
    """`name`, or the dim: `dim 0`, and with several axes in it `dim 0 (g r c)`."""
    after: str
    """The same in the target."""


def axis_moves(route: Route) -> list[AxisMove]:
    """Return where each axis of a route's logical tensors is before and after, outermost first in the target."""
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
    """Return where a rule has the axes of a component."""
    places = dict.fromkeys(rule.name.axes, "name")
    for number, axes in enumerate(_dims(rule.expression, component)):
        text = f"dim {number}" if len(axes) == 1 else f"dim {number} ({' '.join(axes)})"
        places |= dict.fromkeys(axes, text)
    return places


_TRANSFORMERS, _MEGATRON, _OURS = ("transformers", "5.23.0"), ("megatron-core", "0.16.1"), ("transaxle", "")


class Peer(msgspec.Struct, frozen=True):
    """Whose layout a dialect is."""

    framework: str
    """Name of its package; empty for a dialect of a user's table."""
    version: str
    """Version that the tables were compared with; empty where the layout is nobody's but ours."""
    what: str
    """Which of its layouts."""


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
    "stacked": Peer(*_OURS, "transaxle.nn.MoE in a model of transformers, one tensor for all experts"),
    "separate": Peer(*_OURS, "transaxle.nn.MoE in a model of transformers, a tensor for each expert"),
}
"""Label of each dialect that ships -> whose it is."""
_NOBODY = Peer("", "", "")
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
"""Formula of a size -> what there are so many of."""
_PADDING = "rows or columns of padding"


class NamedAxis(msgspec.Struct, frozen=True):
    """One line of the legend."""

    axis: str
    """Its letter, or word."""
    size: str
    """Keys of config.json, or the formula, that give its size; empty where the shapes of tensors do."""
    meaning: str
    """What it counts; empty where the formula must say enough."""


def peer_of(label: str) -> Peer:
    """Return whose layout a dialect is."""
    return PEERS.get(label, _NOBODY)


def axes_of(family: Family) -> tuple[NamedAxis, ...]:
    """Return the legend of a family's axes, in table order."""
    found = []
    padding = {axis for dialect in family.dialects for line in dialect.lines for axis in line.expression.padding}
    for axis, formula in family.axes.items():
        size = "" if formula is None else formula.text
        found.append(NamedAxis(axis, size, _WORDS.get(size, _PADDING if axis in padding else "")))
    return tuple(found)


def dialect_facts(labels: Iterable[str]) -> list[dict[str, Any]]:
    """Return dialects as JSON data."""
    return [{"dialect": label, **msgspec.structs.asdict(peer_of(label))} for label in labels]


def axis_facts(family: Family) -> list[dict[str, Any]]:
    """Return the legend of a family's axes as JSON data."""
    return [msgspec.structs.asdict(axis) for axis in axes_of(family)]


def dialect_rows(labels: Iterable[str]) -> list[list[str]]:
    """Return dialects as rows of a table."""
    peers = [(label, peer_of(label)) for label in labels]
    return [[label, f"{peer.framework} {peer.version}".strip(), peer.what] for label, peer in peers]


def axis_rows(family: Family) -> list[list[str]]:
    """Return the legend of a family's axes as rows of a table."""
    return [[axis.axis, axis.size or "(as the shapes say)", axis.meaning] for axis in axes_of(family)]
