"""Inseparable sums: logical tensors that a conversion never takes apart move as one, and need no sizes of their own.

Where source and target keep `[(g [q:(r c) | k:c | v:c]) d]` alike, it makes no difference where q ends and k begins:
the first tensor of such a sum can have all positions of the dim, and the others none, on both sides.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from transaxle.axes.layout.unify import Basis
from transaxle.axes.notation.expression import PADDING, Axis, Expression, Sum, walk
from transaxle.axes.notation.family import Line, LogicalTensor

NOTHING = "[]"
"""The axis without a position, of all tensors of such a sum but the first."""


def inseparable(
    lines: Iterable[Line], tensors: Mapping[str, LogicalTensor], tied: Container[str], basis: Basis
) -> dict[Expression, Expression]:
    """Find the sums that no line takes apart.

    Args:
        lines: all lines of the source and of the target that take part.
        tensors: the logical tensors of the family.
        tied: those that may be read from another one.
        basis: the axes that no line separates.

    Returns:
        Expression -> the same with the first tensor of its sum in place of the whole sum.

    Post-condition: between lines of one such expression, the other expression copies the same elements to the same
    places.
    """
    expressions: dict[Expression, None] = {}
    by_component: dict[str, list[Expression]] = {}
    for line in lines:
        expressions[line.expression] = None
        for name in line.expression.components:
            by_component.setdefault(name, []).append(line.expression)
    result = {}
    for expression in expressions:
        names = expression.components
        # Padding has a size that must be known; a tied tensor, and copies along an axis, are read apart from the rest.
        if len(names) < 2 or any(name == PADDING for name, _ in expression.segments):
            continue
        if any(name in tied or not set(expression.axes_of(name)) <= set(tensors[name].axes) for name in names):
            continue
        if all(other.dims == expression.dims for name in names for other in by_component[name]):
            result[expression] = _as_first(basis.rewrite(expression))
    return result


def _as_first(expression: Expression) -> Expression:
    first, *others = expression.components
    parts = ((first, Axis(f"[{' '.join(expression.components)}]")), *((name, Axis(NOTHING)) for name in others))
    dims = (Sum(parts) if any(isinstance(node, Sum) for node in walk(dim)) else dim for dim in expression.dims)
    return Expression(expression.text, None, tuple(dims))
