"""Arithmetic between dialects: the few tensors that one framework stores shifted or scaled.

It rounds, so it never runs unless asked for. Where source and target shift alike there is nothing to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transaxle.axes.layout.bind import WEIGHT, split_slot
from transaxle.axes.layout.relayout import Target
from transaxle.errors import refuse

if TYPE_CHECKING:
    from transaxle.move.workers import Affine

_UNCHANGED: Affine = (1.0, 0.0)
_REAL = frozenset({"F64", "F32", "F16", "BF16"})
"""Types whose values stand for themselves; those of the others are codes, or no fractions."""


def affine(target: Target, *, allowed: bool) -> Affine | None:
    """Return what happens to the values of a target tensor on their way; None where nothing does.

    Raises:
        Refused: LOSSY where something does and is not allowed; UNSUPPORTED inside a fused tensor, for types whose
            values are codes or integers, and for the optimizer state of a tensor that is scaled.
    """
    if all(rule is None for part in target.parts for rule in part.arithmetic):
        return None
    changes = []
    for part in target.parts:
        before, after = ((1.0, 0.0) if rule is None else (rule.scale, rule.shift) for rule in part.arithmetic)
        scale = after[0] / before[0]
        changes.append(_UNCHANGED if before == after else (scale, after[1] - before[1] * scale))
    if split_slot(target.name)[1] != WEIGHT:
        # A shift leaves gradients, and so the moments of the optimizer, as they are; a factor does not.
        changes = [_UNCHANGED if scale == 1 else (scale, shift) for scale, shift in changes]
        if any(change != _UNCHANGED for change in changes):
            message = f"{target.rule}\n{rules(target)} would change the optimizer's state, and no rule says how"
            raise refuse("UNSUPPORTED", message, tensor=target.name)
    if all(change == _UNCHANGED for change in changes):
        return None
    if len(changes) > 1:
        raise refuse(
            "UNSUPPORTED", f"{target.rule}\n{rules(target)} inside a fused tensor is not supported", tensor=target.name
        )
    if target.dtype not in _REAL:
        raise refuse(
            "UNSUPPORTED",
            f"{target.rule}\n{rules(target)} on {target.dtype} values is not supported",
            tensor=target.name,
        )
    if not allowed:
        message = f"{target.rule}\nthe values are computed and rounded: {rules(target)}"
        raise refuse("LOSSY", message, tensor=target.name, hint="allow it with --allow-lossy")
    return changes[0]


def rules(target: Target) -> str:
    """Return the arithmetic of a target's lines, as written in the tables."""
    found = [rule.text for part in target.parts for rule in part.arithmetic if rule is not None]
    return " and ".join(dict.fromkeys(found))
