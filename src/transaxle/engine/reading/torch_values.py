"""Arrays and torch tensors of a stored tensor's bytes; torch is imported by the first who asks for a tensor of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transaxle.errors import refuse
from transaxle.formats.dtype import ITEM_BITS, numpy_dtype

if TYPE_CHECKING:
    import numpy as np
    import torch

_NAMES = {"COMPLEX32": "complex32", "F4": "float4_e2m1fn_x2"}
"""Codes of types that numpy calls otherwise, or has none of -> torch's name."""
_RAW = "read() and tobytes() give the bytes as they are stored."


def check_elements(name: str, dtype: str) -> None:
    """Prove that numpy has one element for each of a type.

    Raises:
        Refused: UNSUPPORTED for packed and quantized types.
    """
    whole = ITEM_BITS.get(dtype, 0) >= 8 and (numpy_dtype(dtype) != numpy_dtype("U8") or dtype == "U8")
    if not whole or dtype.startswith(("QINT", "BITS", "COMPLEX32")):
        raise refuse("UNSUPPORTED", f"numpy has no type for elements of {dtype}", tensor=name, hint=_RAW)


def as_torch(name: str, dtype: str, values: np.ndarray) -> torch.Tensor:
    """Return values as a torch tensor that shares their memory.

    Args:
        name: of the tensor, for errors.
        dtype: its safetensors code.
        values: as `StoredTensor.read` gives them.

    Raises:
        Refused: UNSUPPORTED for a type that torch has not.
        ImportError: torch is not installed.
    """
    import numpy as np

    try:
        import torch
    except ModuleNotFoundError as error:
        from transaxle.extras import install

        message = f"torch() needs torch, which is not installed: {install('torch')}"
        raise ImportError(message, name=error.name) from None
    if dtype not in _NAMES:
        check_elements(name, dtype)
    found = getattr(torch, _NAMES.get(dtype, numpy_dtype(dtype).name), None)
    if found is None:
        raise refuse("UNSUPPORTED", f"torch {torch.__version__} has no dtype for {dtype}", tensor=name, hint=_RAW)
    if not values.size:
        return torch.empty(values.shape, dtype=found)
    flat = torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
    tensor: torch.Tensor = flat.view(found).reshape(values.shape)
    return tensor
