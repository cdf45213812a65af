"""Arithmetic between dialects: the few tensors that one framework stores shifted, scaled or as an exponential.

It rounds, so it never runs unless asked for. Where source and target shift alike there is nothing to do.
"""

from __future__ import annotations

from transaxle.axes.layout.bind import WEIGHT, split_slot
from transaxle.axes.layout.relayout import Target
from transaxle.axes.notation.computed import AFFINE, Steps, inverse, simplified
from transaxle.errors import refuse

_REAL = frozenset({"F64", "F32", "F16", "BF16"})
"""Types whose values stand for themselves; those of the others are codes, or no fractions."""


def steps(target: Target, *, allowed: bool) -> Steps | None:
    """Return what happens to the values of a target tensor on their way; None where nothing does.

    Raises:
        Refused: LOSSY where something does and is not allowed; UNSUPPORTED inside a fused tensor, for types whose
            values are codes or integers, and for the optimizer state of a tensor that is more than shifted.
    """
    changes: list[Steps] = []
    for part in target.parts:
        before, after = (() if rule is None else rule.steps for rule in part.arithmetic)
        changes.append(() if before == after else simplified((*inverse(before), *after)))
    if split_slot(target.name)[1] != WEIGHT:
        # A shift leaves gradients, and so the moments of the optimizer, as they are; nothing else does.
        changes = [
            () if all(kind == AFFINE and scale == 1 for kind, scale, _ in change) else change for change in changes
        ]
        if any(changes):
            message = f"{target.rule}\n{rules(target)} would change the optimizer's state, and no rule says how"
            raise refuse("UNSUPPORTED", message, tensor=target.name)
    if not any(changes):
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
        raise refuse("LOSSY", message, tensor=target.name, hint="Allow it with --allow-lossy.")
    return changes[0]


def rules(target: Target) -> str:
    """Return the arithmetic of a target's lines, as written in the tables."""
    found = [rule.text for part in target.parts for rule in part.arithmetic if rule is not None]
    return " and ".join(dict.fromkeys(found))
