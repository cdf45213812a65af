"""Tensors that must be zero, because another dialect has no place for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from transaxle.axes.layout.relayout import Check
from transaxle.engine.copying.duplicate_checks import PlannedCheck
from transaxle.errors import gathered
from transaxle.torch_tensors.local_tensor import local_of


def check_zero(checks: Iterable[Check | PlannedCheck], tensors: Mapping[str, torch.Tensor]) -> None:
    """Prove that this rank's parts of the tensors that must be zero are.

    Args:
        checks: all of a view; others are passed over.
        tensors: what this rank holds, by name.

    Raises:
        Refused: UNEXPECTED_TENSOR.
    """
    wanted = {check.refusal.where.tensor or "": check.refusal for check in checks if check.zero}
    problems = [wanted[name] for name in wanted.keys() & tensors.keys() if local_of(tensors[name]).count_nonzero()]
    if problems:
        raise gathered(sorted(problems, key=str))
