"""Axis sizes: which axes a conversion has to know, and what the stored shapes imply of them.

- Unification: axes that no layout of a conversion separates are treated as one axis. Where `g r c` are adjacent, in
  that order, in every line that holds a tensor, they move together; their product is one axis, whose size the stored
  shape tells. So a conversion asks only for the sizes it really needs.
- `solve` finds sizes that no config gives from the shapes of all tensors of a line: each stored dim is one equation,
  linear in each axis. `fill` does the same for one stored tensor after unification, and checks its shape against the
  rule.
- Inseparable sums: logical tensors that a conversion never takes apart move as one, and need no sizes of their own.
  Where source and target keep `[(g [q:(r c) | k:c | v:c]) d]` alike, it makes no difference where q ends and k begins:
  the first tensor of such a sum can have all positions of the dim, and the others none, on both sides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from math import prod
from types import MappingProxyType

import msgspec

from transaxle.axes.notation.expression import PADDING, Axis, Expression, Merge, Node, Sum, size, walk
from transaxle.axes.notation.family import Line, LogicalTensor, Sizes
from transaxle.errors import TransaxleError, refuse

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


Shape = tuple[int, ...]
"""Elements along each dim."""

_NOT_ITS_TABLE = (
    "Correct --axis and --config, if you gave them. If the config is this model's own, the table does not fit it: "
    "correct its axes, and give it with --rules (rules=)."
)


def unknown(node: Node, sizes: Mapping[str, int]) -> list[str]:
    """Return the axes of a dim that have no size, each once."""
    return list(dict.fromkeys(p.name for p in walk(node) if isinstance(p, Axis) and p.name not in sizes))


def root(node: Node, axis: str, sizes: Mapping[str, int], length: int) -> int | None:
    """Solve `size(node) == length` for one axis, in which a dim's size is linear; None if no whole number solves it."""
    base = size(node, {**sizes, axis: 0})
    step = size(node, {**sizes, axis: 1}) - base
    if step == 0:
        return None
    value, remainder = divmod(length - base, step)
    return value if remainder == 0 and value >= 0 else None


def with_products(sizes: Mapping[str, int], expression: Expression) -> dict[str, int]:
    """Add the sizes of an expression's product axes whose factors are known."""
    known = dict(sizes)
    for axis in expression.axes - known.keys():
        if all(factor in known for factor in factors(axis)):
            known[axis] = prod(known[factor] for factor in factors(axis))
    return known


def fill(expression: Expression, shape: Shape, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return sizes for every axis of a stored tensor, solving the unknown ones from its shape.

    Raises:
        Refused: SHAPE_MISMATCH where rule and shape disagree.
        UsageError: UNKNOWN_AXIS where the shape does not tell an axis apart from another.
    """
    if len(shape) != len(expression.dims):
        raise mismatch(expression, f"{len(expression.dims)} dims", shape)
    known = with_products(sizes, expression)
    for node, length in zip(expression.dims, shape, strict=True):
        missing = unknown(node, known)
        if len(missing) > 1:
            raise unknown_axis(missing[0], expression.text, shape)
        if missing:
            value = root(node, missing[0], known, length)
            if value is None:
                raise mismatch(expression, f"a size of {missing[0]} that makes a dim of {length}", shape)
            known[missing[0]] = value
    expected = tuple(size(node, known) for node in expression.dims)
    if expected != shape:
        used = ", ".join(f"{axis}={known[axis]}" for axis in sorted(expression.axes) if axis in known)
        raise mismatch(expression, f"{list(expected)} ({used})", shape)
    return known


def mismatch(expression: Expression, expected: str, shape: Shape) -> TransaxleError:
    """Build the refusal of a shape that a rule does not explain."""
    return refuse("SHAPE_MISMATCH", f"{expression.text}\nexpected {expected}, got {list(shape)}", hint=_NOT_ITS_TABLE)


def unknown_axis(axis: str, rule: str, shape: Shape | None = None) -> TransaxleError:
    """Build the refusal of an axis that is needed and unknown."""
    axis = factors(axis)[0]
    shape_note = "" if shape is None else f", and the shape {list(shape)} does not determine it"
    return refuse(
        "UNKNOWN_AXIS",
        f"{rule}\nthe size of axis {axis} is needed{shape_note}",
        hint=f"Give it with --axis {axis}=N, or the model's config.json with --config FILE.",
    )


def solve(equations: Mapping[Expression, Mapping[Shape, Mapping[str, int]]], sizes: Sizes) -> Sizes:
    """Find axes that the config does not give from shapes, where all equations agree.

    Args:
        equations: expression -> each distinct shape stored under it -> the name index of one such tensor.
        sizes: what is known.

    An axis on which two tensors disagree (it varies with the layer) is left unknown here; `fill` finds it per tensor.
    """
    conflicting: set[str] = set()
    # Each round may make an axis known that leaves another dim with a single unknown.
    while True:
        solutions: dict[str, set[int]] = {}
        for expression, shapes in equations.items():
            for shape, index in shapes.items():
                if len(shape) != len(expression.dims):
                    continue
                known = sizes.at(index)
                for node, count in zip(expression.dims, shape, strict=True):
                    missing = unknown(node, known)
                    # One equation determines one unknown.
                    if len(missing) != 1 or missing[0] in conflicting:
                        continue
                    value = root(node, missing[0], known, count)
                    if value is not None:
                        solutions.setdefault(missing[0], set()).add(value)
        conflicting |= {axis for axis, values in solutions.items() if len(values) > 1}
        agreed = {axis: values.pop() for axis, values in solutions.items() if len(values) == 1}
        if not agreed:
            return sizes
        sizes = sizes.giving(agreed)


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
