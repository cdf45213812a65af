"""numpy arrays of a state dict as torch tensors in the same memory: saved like any tensor, and filled in place."""

from __future__ import annotations

import numpy as np
import torch

from transaxle.errors import Refusal, Where, refuse

_KINDS = "biufc"
"""What `torch.from_numpy` takes by itself."""


def is_array(value: object) -> bool:
    """Tell whether an entry is an array of numbers; texts and objects are none."""
    return isinstance(value, np.ndarray) and not value.dtype.hasobject and value.dtype.kind not in "USMm"


def as_tensor(name: str, array: np.ndarray) -> torch.Tensor:
    """Return an array as a tensor in the same memory; of one that is read-only, a copy.

    Raises:
        Refused: UNSUPPORTED for a type or strides that torch has not.
    """
    if not array.dtype.isnative or any(step < 0 for step in array.strides):
        message = f"an array of {array.dtype} with strides {array.strides} is no memory that torch can share"
        raise refuse("UNSUPPORTED", message, tensor=name, hint="Give numpy.ascontiguousarray(array) of a native type.")
    dtype = getattr(torch, array.dtype.name, None)
    if not isinstance(dtype, torch.dtype) or array.dtype.names is not None:
        raise refuse("UNSUPPORTED", f"torch has no dtype for arrays of {array.dtype}", tensor=name)
    bits = array if array.dtype.kind in _KINDS else array.view(f"u{array.dtype.itemsize}")
    shared = torch.from_numpy(bits if bits.flags.writeable else bits.copy())  # torch warns of memory that is read-only
    return shared.view(dtype)


def read_only(name: str, array: np.ndarray) -> list[Refusal]:
    """Return why values that are written into an array would be lost."""
    if array.flags.writeable:
        return []
    hint = "Give an array that can be written, such as array.copy()."
    return [Refusal("UNSUPPORTED", "the array is read-only", Where(None, name), hint)]
