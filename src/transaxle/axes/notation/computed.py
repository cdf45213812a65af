"""Arithmetic that turns a model's logical values into the values that a framework stores, and back.

    norm - 1           the stored value is the logical value minus one
    2 * norm + 0.5
    -exp(A_log)        the functions are exp, and log, its inverse

The text in the table of mapping rules is a Python expression with one variable. Every step of such an expression has an
inverse, so the whole expression has an inverse. Each expression is computed in float64, and only its final result is
rounded to the stored dtype.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

Step = tuple[str, float, float]
"""One step of arithmetic on a value `x`. `("affine", a, b)` computes `a * x + b`; `("exp", 0, 0)` and `("log", 0, 0)`
compute exp(x) and log(x).
"""
AffineSteps = tuple[Step, ...]
AFFINE, EXP, LOG = "affine", "exp", "log"
_INVERSES = {EXP: LOG, LOG: EXP}
_UNCHANGED: Step = (AFFINE, 1.0, 0.0)


def parse(text: str) -> AffineSteps | None:
    """Return the steps from the logical value to the stored value; None if the text is not supported."""
    try:
        steps = _steps(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return None
    if isinstance(steps, float) or any(kind == AFFINE and not (scale and isfinite(scale) and isfinite(shift))
                                       for kind, scale, shift in steps):  # fmt: skip
        return None  # a step that multiplies by zero has no inverse, so it is not supported
    return steps


def _steps(node: ast.expr) -> AffineSteps | float:
    """Return the steps of an expression that contains a variable, or the value of an expression without a variable.

    Raises:
        ValueError: if the expression is not supported.
    """
    match node:
        case ast.Constant(int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.Name():
            return ()
        case ast.UnaryOp(op=ast.USub(), operand=of):
            return _affine(_steps(of), -1.0, 0.0)
        case ast.Call(func=ast.Name(id=name), args=[of], keywords=[]) if name in _INVERSES:
            inner = _steps(of)
            if not isinstance(inner, float):
                return (*inner, (name, 0.0, 0.0))
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(_steps(left), op, _steps(right))
    raise ValueError


def _binary(left_operand: AffineSteps | float, op: ast.operator, right: AffineSteps | float) -> AffineSteps | float:
    if isinstance(right, float):
        match op:
            case ast.Add():
                return _affine(left_operand, 1.0, right)
            case ast.Sub():
                return _affine(left_operand, 1.0, -right)
            case ast.Mult():
                return _affine(left_operand, right, 0.0)
            case ast.Div() if right:
                return _affine(left_operand, 1.0 / right, 0.0)
    elif isinstance(left_operand, float):
        match op:
            case ast.Add():
                return _affine(right, 1.0, left_operand)
            case ast.Sub():
                return _affine(right, -1.0, left_operand)
            case ast.Mult():
                return _affine(right, left_operand, 0.0)
    raise ValueError


def _affine(steps: AffineSteps | float, scale: float, shift: float) -> AffineSteps | float:
    return steps * scale + shift if isinstance(steps, float) else simplify((*steps, (AFFINE, scale, shift)))


def inverse(steps: AffineSteps) -> AffineSteps:
    """Return the steps in the opposite direction, from the stored value to the logical value."""
    return tuple(
        (AFFINE, 1.0 / scale, -shift / scale) if kind == AFFINE else (_INVERSES[kind], 0.0, 0.0)
        for kind, scale, shift in reversed(steps)
    )


def simplify(steps: Iterable[Step]) -> AffineSteps:
    """Merge consecutive affine steps into one step, and remove pairs of exp and log."""
    result: list[Step] = []
    for step in steps:
        kind, scale, shift = step
        before_kind, before_scale, before_shift = result[-1] if result else ("", 1.0, 0.0)
        if kind == before_kind == AFFINE:
            result[-1] = (AFFINE, before_scale * scale, before_shift * scale + shift)
        elif _INVERSES.get(kind) == before_kind:
            result.pop()
        else:
            result.append(step)
        if result[-1:] == [_UNCHANGED]:
            result.pop()
    return tuple(result)


def apply_steps(values: NDArray[Any], steps: AffineSteps) -> NDArray[Any]:
    """Apply steps to floating-point values, and return the result in the dtype of the values.

    Raises:
        ValueError: if the result for a finite value is infinite or NaN; the error contains the finite value.
    """
    functions = {EXP: np.exp, LOG: np.log}
    before = values.astype(np.float64)
    after = before
    with np.errstate(all="ignore"):
        for kind, scale, shift in steps:
            after = after * scale + shift if kind == AFFINE else functions[kind](after)
        result = round_to(after, values.dtype)
        lost = np.isfinite(before) & ~np.isfinite(result.astype(np.float64))
    if lost.any():
        raise ValueError(float(before[lost][0]))
    return result


def round_to(values: NDArray[np.float64], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Round float64 values once to a floating-point dtype of lower precision: to nearest, ties to even."""
    if dtype.kind == "f":  # one of numpy's own floating-point dtypes; bfloat16 is not
        return values.astype(dtype)
    # For bfloat16, values are rounded twice: to float32, then to bfloat16. If the rounding to float32 is inexact, it
    # sets the last bit (rounding to odd). Without the last bit set, the rounding to float32 could create a tie that the
    # rounding to bfloat16 resolves wrongly.
    with np.errstate(all="ignore"):
        near = values.astype(np.float32)
    bits = near.view(np.uint32)
    inexact = ~np.isnan(near) & (near.astype(np.float64) != values)
    bits -= (inexact & (np.abs(near.astype(np.float64)) > np.abs(values))).astype(np.uint32)
    bits |= inexact.astype(np.uint32)
    return near.astype(dtype)
