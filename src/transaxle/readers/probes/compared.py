"""Compares two models that a reader built from small checkpoints whose values should be the same.

The first checkpoint is plain, with the names that the reader is made for; the second has the names, number formats and
config of the user's checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TOLERANCE = 2e-2
"""Largest difference of two outputs, relative to the largest output, that counts as equal: what rounding activations to
bfloat16 makes of equal weights in a few layers.
"""
_TOKENS = 7


def compare(plain: Any, stored: Any) -> dict[str, Any]:
    """Compare the parameters and the outputs of two models.

    Args:
        plain: the model of the plain checkpoint.
        stored: the model of the checkpoint with the user's names and number formats.

    Returns:
        A dict: `compared`, the number of parameters compared; `different`, the names of parameters with other values;
        `outputs`, which is `equal`, or the relative difference as a float, or the error of a model that cannot be run.
    """
    values = compare_values(plain.state_dict(), stored.state_dict())  # before a run, which may decode parameters
    try:
        outputs: str | float = difference(plain, stored)
    except Exception as error:  # noqa: BLE001 - models with other inputs than tokens cannot be run here
        outputs = f"{type(error).__name__}: {str(error)[:300]}"
    return {**values, "outputs": outputs}


def compare_values(plain: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the tensors of two mappings that have the same name, dtype and shape.

    Returns:
        A dict: `compared`, the number of tensors compared; `different`, the names of those with other values.
    """
    different: list[str] = []
    compared = 0
    for name, value in plain.items():
        other = stored.get(name)
        if other is None or other.dtype != value.dtype or other.shape != value.shape:
            continue
        compared += 1
        slack = _TOLERANCE / 4 * value.abs().max() if value.is_floating_point() and value.numel() else 0
        if not bool(((other.float() - value.float()).abs() <= slack).all()):
            different.append(name)
    return {"compared": compared, "different": different}


def difference(plain: Any, stored: Any) -> str | float:
    """Return `equal`, or the largest difference of two models' outputs relative to the largest output.

    Raises:
        Exception: any error of a model that does not take tokens alone.
    """
    import torch

    vocabulary = plain.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(0, vocabulary, (2, _TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, actual = (model.eval()(input_ids=tokens)[0].float() for model in (plain, stored))
    scale = expected.abs().max().item()
    if not bool(torch.isfinite(expected).all()):
        return "its outputs are not finite"
    error: float = (expected - actual).abs().max().item() / scale if scale else 0.0
    return "equal" if error <= _TOLERANCE else error
