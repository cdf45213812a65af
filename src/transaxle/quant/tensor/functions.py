"""What torch functions, as opposed to the operations below them, do with quantized tensors.

These are the few that would look at a tensor's storage, which is empty here, or that are no operations at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from transaxle.errors import refuse
from transaxle.quant.tensor.linear import linear
from transaxle.quant.tensor.tensor import FUNCTIONS, QuantizedTensor


def _buffers(tensor: QuantizedTensor) -> list[torch.Tensor]:
    return [*tensor.frame.cut.values(), *tensor.frame.shared.values()]


def _share_memory(tensor: QuantizedTensor) -> QuantizedTensor:
    """Move all buffers to shared memory."""
    for buffer in _buffers(tensor):
        buffer.share_memory_()
    return tensor


def _is_shared(tensor: QuantizedTensor) -> bool:
    return all(buffer.is_shared() for buffer in _buffers(tensor))


def _set_item(tensor: torch.Tensor, index: Any, value: Any) -> None:
    """Copy into a view; what torch calls a view and is a copy here would swallow the values.

    Raises:
        Refused: `UNSUPPORTED` for elements, and rows of a matrix one at a time, whose values are copies.
    """
    if not isinstance(tensor, QuantizedTensor):
        with torch._C.DisableTorchFunctionSubclass():
            tensor[index] = value
        return
    target = tensor[index]
    if not isinstance(target, QuantizedTensor):
        raise refuse(
            "UNSUPPORTED",
            f"{tuple(target.shape)} of a quantized {tuple(tensor.shape)} cannot be assigned: this index gives a copy",
            hint="Assign to a slice of rows, or change the values that dequantize() gives and copy_() them back.",
        )
    given = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=tensor.dtype, device=tensor.device)
    target.copy_(given)


def _set_data(tensor: QuantizedTensor, other: torch.Tensor) -> None:
    """Take over what another tensor holds, as `Module.to` has parameters do.

    Values of another dtype, if they are those of the codes, leave these as they are; any others are quantized.

    Raises:
        Refused: `UNSUPPORTED` for other values of a part that tensor parallelism has cut: another rank may have none.
    """
    if not isinstance(other, QuantizedTensor):
        other = tensor.retyped(other)
    with torch._C.DisableTorchFunctionSubclass():
        tensor.data = other
    tensor.frame, tensor.skip, tensor.height = other.frame, other.skip, other.height


FUNCTIONS.update(
    {
        functional.linear: linear,
        torch.Tensor.share_memory_: _share_memory,
        torch.Tensor.is_shared: _is_shared,
        torch.Tensor.__setitem__: _set_item,
        torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    }
)
