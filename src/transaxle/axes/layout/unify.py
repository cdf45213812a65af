"""Unification: axes that no layout of a conversion separates are treated as one axis.

Where `g r c` are adjacent, in that order, in every line that holds a tensor, they move together; their product is one
axis, whose size the stored shape tells. So a conversion asks only for the sizes it really needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import msgspec

from transaxle.axes.notation.expression import Axis, Expression, Merge, Node, Sum

JOIN = "*"
"""Separates axis names in the name of their product."""

_NONE: Mapping[str, str] = MappingProxyType({})


def factors(axis: str) -> list[str]:
    """Return the axes that a product axis joins."""
    return axis.split(JOIN)


def _runs(node: Node, owners: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield each run of neighbouring axes, with the components it belongs to."""
    match node:
        case Axis(name):
            yield owners, [name]
        case Merge(parts):
            run: list[str] = []
            for inner in parts:
                if isinstance(inner, Axis):
                    run.append(inner.name)
                    continue
                yield owners, run
                run = []
                yield from _runs(inner, owners)
            yield owners, run
        case Sum(segments):
            for name, inner in segments:
                yield from _runs(inner, (name,))


class Basis(msgspec.Struct, frozen=True):
    """The axes of a conversion after unification."""

    joined: frozenset[tuple[str, str, str]]
    """(logical tensor, axis, next axis): neighbours that are never separated."""
    tied: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Logical tensor -> the one it is stored as."""

    def rewrite(self, expression: Expression) -> Expression:
        """Return the expression with neighbours that are never separated replaced by their product."""

        def change(merge: Merge, owners: tuple[str, ...]) -> Merge:
            parts: list[Node] = []
            previous = ""
            for inner in merge.parts:
                name = inner.name if isinstance(inner, Axis) else ""
                together = all((self.tied.get(owner, owner), previous, name) in self.joined for owner in owners)
                if previous and name and together:
                    product = parts[-1]
                    assert isinstance(product, Axis)
                    parts[-1] = Axis(product.name + JOIN + name)
                else:
                    parts.append(inner)
                previous = name
            return Merge(tuple(parts))

        return expression.rewrite(change)


def unify(expressions: Iterable[Expression], tied: Mapping[str, str] = _NONE) -> Basis:
    """Find the axes that none of the expressions separates.

    Args:
        expressions: every line that takes part, of the source and of the target.
        tied: logical tensor -> the one it may be read from instead: their axes are unified as those of one tensor.

    Post-condition: for any sizes, rewriting every expression changes no offset and no stride of any element, and two
    expressions of one logical tensor still speak of the same axes.
    """
    uses: dict[str, int] = defaultdict(int)
    nexts: dict[tuple[str, str], list[str | None]] = defaultdict(list)
    shared: list[tuple[list[str], str, str]] = []
    for expression in expressions:
        for name in expression.components:
            uses[tied.get(name, name)] += 1
        for dim in expression.dims:
            for owners, run in _runs(dim, expression.components):
                names = [tied.get(owner, owner) for owner in owners]
                for axis, after in zip(run, [*run[1:], None], strict=False):
                    for name in names:
                        nexts[name, axis].append(after)
                    if after is not None:
                        shared.append((names, axis, after))
    joined = {
        (name, axis, followers[0])
        for (name, axis), followers in nexts.items()
        if followers[0] is not None and len(set(followers)) == 1 and len(followers) == uses[name]
    }
    # A run inside a sum belongs to several logical tensors: it stays joined only if it can be joined in all of them.
    while True:
        broken = {
            (name, axis, after)
            for names, axis, after in shared
            if any((name, axis, after) not in joined for name in names)
            for name in names
        } & joined
        if not broken:
            return Basis(frozenset(joined), tied)
        joined -= broken
