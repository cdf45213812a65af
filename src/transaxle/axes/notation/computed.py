"""Computed values: the arithmetic between what a tensor means and what one framework stores.

    norm - 1           stored is the value less one
    2 * norm + 0.5
    -exp(A_log)        the functions: exp, and log, its inverse

The text is Python's, over one name; each step has an inverse, and so has the whole. Values are computed in float64 and
rounded once.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

Step = tuple[str, float, float]
"""What is done to a value: `("affine", a, b)` makes it a * value + b, `("exp", 0, 0)` and `("log", 0, 0)` that
function of it.
"""
AffineSteps = tuple[Step, ...]
AFFINE, EXP, LOG = "affine", "exp", "log"
_INVERSES = {EXP: LOG, LOG: EXP}
_UNCHANGED: Step = (AFFINE, 1.0, 0.0)


def parse(text: str) -> AffineSteps | None:
    """Return the steps of an arithmetic from the logical value to the stored one; None where the text is none."""
    try:
        steps = _steps(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return None
    if isinstance(steps, float) or any(kind == AFFINE and not (scale and isfinite(scale) and isfinite(shift))
                                       for kind, scale, shift in steps):  # fmt: skip
        return None  # a factor of zero has no way back
    return steps


def _steps(node: ast.expr) -> AffineSteps | float:
    """Return the steps of an expression over the one name, or its value where it has none.

    Raises:
        ValueError: it is something else.
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


def _binary(left: AffineSteps | float, op: ast.operator, right: AffineSteps | float) -> AffineSteps | float:
    if isinstance(right, float):
        match op:
            case ast.Add():
                return _affine(left, 1.0, right)
            case ast.Sub():
                return _affine(left, 1.0, -right)
            case ast.Mult():
                return _affine(left, right, 0.0)
            case ast.Div() if right:
                return _affine(left, 1.0 / right, 0.0)
    elif isinstance(left, float):
        match op:
            case ast.Add():
                return _affine(right, 1.0, left)
            case ast.Sub():
                return _affine(right, -1.0, left)
            case ast.Mult():
                return _affine(right, left, 0.0)
    raise ValueError


def _affine(steps: AffineSteps | float, scale: float, shift: float) -> AffineSteps | float:
    return steps * scale + shift if isinstance(steps, float) else simplified((*steps, (AFFINE, scale, shift)))


def inverse(steps: AffineSteps) -> AffineSteps:
    """Return the steps back."""
    return tuple(
        (AFFINE, 1.0 / scale, -shift / scale) if kind == AFFINE else (_INVERSES[kind], 0.0, 0.0)
        for kind, scale, shift in reversed(steps)
    )


def simplified(steps: Iterable[Step]) -> AffineSteps:
    """Return the same steps, as few as possible."""
    result: list[Step] = []
    for step in steps:
        before = result[-1] if result else _UNCHANGED
        if step[0] == AFFINE and result and before[0] == AFFINE:
            result[-1] = (AFFINE, before[1] * step[1], before[2] * step[1] + step[2])
        elif result and _INVERSES.get(step[0]) == before[0]:
            result.pop()
        else:
            result.append(step)
        if result and result[-1] == _UNCHANGED:
            result.pop()
    return tuple(result)


def applied(values: NDArray[Any], steps: AffineSteps) -> NDArray[Any]:
    """Return values of a floating-point type after the steps, in the same type.

    Raises:
        ValueError: a finite value has no finite result.
    """
    functions = {EXP: np.exp, LOG: np.log}
    before = values.astype(np.float64)
    after = before
    with np.errstate(all="ignore"):
        for kind, scale, shift in steps:
            after = after * scale + shift if kind == AFFINE else functions[kind](after)
        result = rounded(after, values.dtype)
        lost = np.isfinite(before) & ~np.isfinite(result.astype(np.float64))
    if lost.any():
        raise ValueError(float(before[lost][0]))
    return result


def rounded(values: NDArray[np.float64], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Round float64 values once to another floating-point type: to the nearest, ties to even."""
    if dtype.kind == "f":  # numpy's own types
        return values.astype(dtype)
    # bfloat16 is rounded from float32. An inexact step to that must not make a tie: its last bit is odd then.
    with np.errstate(all="ignore"):
        near = values.astype(np.float32)
    bits = near.view(np.uint32)
    inexact = ~np.isnan(near) & (near.astype(np.float64) != values)
    bits -= (inexact & (np.abs(near.astype(np.float64)) > np.abs(values))).astype(np.uint32)
    bits |= inexact.astype(np.uint32)
    return near.astype(dtype)
