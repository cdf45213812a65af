"""What a line of a plan moves, in words: which axes go from a name to a shape, what is transposed, joined or split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod

import msgspec

from transaxle.axes.notation.expression import PADDING, Axis, Expression, Merge, Node, Sum, parse, walk
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
