"""The bytes of tensors, as torch and as numpy see them; nothing is copied."""

from __future__ import annotations

import numpy as np
import torch

Bytes = np.ndarray
"""One-dimensional, U8."""


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor on any device, in one dim, sharing its storage."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a contiguous CPU tensor, sharing its storage."""
    return byte_view(tensor).numpy()


def with_own_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory has its values: of a conjugate or negative that torch has put off, a copy."""
    return tensor.resolve_conj().resolve_neg()


def copied_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy on the CPU: from a GPU into page-locked memory, which takes a tenth of the time.

    A contiguous tensor of the CPU is returned as it is.
    """
    local = with_own_bytes(tensor.detach()).contiguous()
    if not local.is_cuda:
        return local.cpu()
    return torch.empty(local.shape, dtype=local.dtype, pin_memory=True).copy_(local)


def copy_into(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy values into a contiguous tensor of the CPU, of the same type and shape.

    One thread copies bytes in two thirds of the time in which torch copies elements, as it writes past the cache. From
    a GPU this only begins the copy, where the target is page-locked.
    """
    source = with_own_bytes(source.detach())
    if source.device.type == "cpu" and source.is_contiguous() and torch.get_num_threads() == 1:
        np.copyto(as_bytes(target), as_bytes(source))
    else:
        target.copy_(source, non_blocking=True)


def with_plain_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of eight-bit elements as uint8, any other as it is.

    Few kernels, and no collective of gloo, know eight-bit floats.
    """
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Tell whether two tensors have one type, one shape and equal bytes: every NaN is one pattern of bits.

    They may lie on two devices, and need not be contiguous. On the meta device there are no bytes, and none differ.
    """
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    if first.is_meta or second.is_meta:
        return True
    own, other = (byte_view(with_own_bytes(tensor.detach()).contiguous()) for tensor in (first, second))
    return torch.equal(own, other.to(own.device))


class _Shown:
    """An array under the flags of one that may be written to."""

    def __init__(self, array: Bytes) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}


def of_bytes(array: Bytes) -> torch.Tensor:
    """Return bytes of numpy as a tensor that shares their memory; nobody writes into one whose bytes are read-only.

    torch warns of those that are.
    """
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Shown(array)))
