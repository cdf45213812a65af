"""Axis sizes that shapes imply.

`solve` finds sizes that no config gives from the shapes of all tensors of a line: each stored dim is one equation,
linear in each axis. `fill` does the same for one stored tensor after unification, and checks its shape against the
rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from transaxle.axes.layout.unify import factors
from transaxle.axes.notation.expression import Axis, Expression, Node, size, walk
from transaxle.axes.notation.family import Sizes
from transaxle.errors import TransaxleError, refuse

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
