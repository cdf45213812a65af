"""What a line of a plan moves, in words: which axes go from a name to a shape, what is transposed, joined, split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from transaxle.axes.notation.expression import PADDING, Axis, Expression, parse, walk
from transaxle.axes.notation.name import Name
from transaxle.engine.plan.conversion import Route

RENAMED, UNCHANGED = "renamed", "unchanged"


@dataclass(frozen=True, slots=True)
class _Rule:
    """One rule, read again from its text."""

    name: Name
    expression: Expression

    @property
    def short(self) -> str:
        """The rule as plans show it: `name[axes]`, without the tensor that the row names anyway."""
        dims = self.expression.text
        return f"{self.name.text}{dims[dims.index('[') :]}"


def _rule(text: str) -> _Rule:
    name, _, expression = text.partition(" = ")
    return _Rule(Name(name), parse(expression))


def words(route: Route, sizes: Mapping[str, int]) -> str:
    """Say what a route moves: `name e -> shape, transposed, joined`; or `renamed`, `unchanged`.

    Args:
        route: one line of a plan.
        sizes: axis sizes, as far as they are known: padding of size 0 is none.
    """
    target = _rule(route.target)
    sources = [_rule(text) for text in route.source if text]
    if not sources:
        return f"from a tied tensor for {route.component}"
    said = [
        *_placed(sources, target),
        *_ordered(sources, target),
        *_packed(sources, target),
        *_padding(sources, target, sizes),
    ]
    if said:
        return ", ".join(dict.fromkeys(said))
    return UNCHANGED if [rule.name.text for rule in sources] == [target.name.text] else RENAMED


def rules(route: Route) -> tuple[tuple[str, ...], str]:
    """Return the rules of a route as plans show them: of the source, and of the target."""
    return tuple(_rule(text).short for text in route.source if text), _rule(route.target).short


def _placed(sources: Sequence[_Rule], target: _Rule) -> Iterator[str]:
    """Say which axes change between name and shape."""
    for rule in sources:
        inward = [axis for axis in rule.name.axes if axis in target.expression.axes]
        outward = [axis for axis in target.name.axes if axis in rule.expression.axes]
        if inward:
            yield f"name {' '.join(inward)} -> shape"
        if outward:
            yield f"shape {' '.join(outward)} -> name"


def _ordered(sources: Sequence[_Rule], target: _Rule) -> Iterator[str]:
    """Say whether axes that are in both shapes change their order: whole dims, or parts of one."""
    for rule in sources:
        for component in set(rule.expression.components) & set(target.expression.components):
            before, after = (_dims(side.expression, component) for side in (rule, target))
            common = set(chain(*before)) & set(chain(*after))
            first, second = ([axis for axis in chain(*dims) if axis in common] for dims in (before, after))
            if first == second:
                continue
            changed = {a for a, b in zip(first, second, strict=True) if a != b}
            if any(changed <= set(dim) for dim in before) and any(changed <= set(dim) for dim in after):
                old, new = (" ".join(axis for axis in side if axis in changed) for side in (first, second))
                yield f"order {old} -> {new}"
            else:
                yield "transposed"


def _packed(sources: Sequence[_Rule], target: _Rule) -> Iterator[str]:
    """Say whether several weights become one tensor, or one becomes several."""
    together = max(len(rule.expression.components) for rule in sources)
    if len(target.expression.components) > together:
        yield "joined"
    elif len(target.expression.components) < together:
        yield "split"
    elif together > 1 and [rule.expression.dims for rule in sources] != [target.expression.dims]:
        yield "packed differently"


def _padding(sources: Sequence[_Rule], target: _Rule, sizes: Mapping[str, int]) -> Iterator[str]:
    """Say whether padding is added or taken off."""
    before, after = any(_padded(rule.expression, sizes) for rule in sources), _padded(target.expression, sizes)
    if before != after:
        yield "padded" if after else "padding off"


def _padded(expression: Expression, sizes: Mapping[str, int]) -> bool:
    held = [node for name, node in expression.segments if name == PADDING]
    return any(sizes.get(part.name, 0) for node in held for part in walk(node) if isinstance(part, Axis))


def _dims(expression: Expression, component: str) -> list[list[str]]:
    """Return the axes of one component in stored order, dim by dim."""
    shares = expression.layout(dict.fromkeys(expression.axes, 2)).shares[component]
    return [[axis for axis, _, _ in share.axes] for share in shares]
