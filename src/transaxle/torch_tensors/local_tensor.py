"""The part of a tensor that this rank holds, its bytes as torch and as numpy see them, and copies between parts.

A DTensor shows the whole tensor and keeps a part of it; other tensors are their own part.

Copies and views work on any device: this is the one place that computes strides for torch. A move says in elements what
goes where; here it becomes one `copy_` between two views, which is one kernel on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from transaxle.axes.geometry.piece import Move

TO_LOCAL = "to_local"
"""Method that returns the part; DTensors have it, and so has a tensor that `torch.distributed.checkpoint` saves chunk
by chunk (`transaxle.live.global_tensors`)."""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: detached, sharing its storage."""
    to_local = getattr(tensor, TO_LOCAL, None)
    if to_local is None:
        return tensor.detach()
    with torch.no_grad():  # a DTensor then gives what it keeps, and no view of it: four times as fast
        local: torch.Tensor = to_local()
    return local.detach()


def local_with_grad(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, through which gradients flow back into it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def stored_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the very object that a DTensor keeps for this rank, of whatever tensor class; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def as_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
) -> DTensor:
    """Return the DTensor of which this rank holds `local`; no rank is asked whether that is so.

    Args:
        local: what this rank holds; it is not copied.
        mesh: the ranks.
        placements: one for each dim of the mesh.
        shape: of the whole tensor.
        stride: of the whole tensor; None: row-major.
    """
    steps = torch.empty(tuple(shape), device="meta").stride() if stride is None else tuple(stride)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=steps)


def placed_like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of other values as a tensor that has the shape and the placements of `tensor`."""
    if not isinstance(tensor, DTensor):
        return local
    return as_dtensor(local, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())


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


_ALIGNED = 64
"""Bytes that every element's size divides."""


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor as one dim; it shares storage where the part is contiguous."""
    return local_of(tensor).contiguous().view(-1)


def copy_box(move: Move, source: torch.Tensor, target: torch.Tensor) -> None:
    """Carry a move out.

    Args:
        move: what goes where, in elements.
        source: flat tensor that is read.
        target: flat tensor of the same type that is written.
    """
    read, written = _views(move, source, target)
    written.copy_(read)


def copy_box_back(move: Move, source: torch.Tensor, target: torch.Tensor) -> None:
    """Carry a move out the other way: its source gets what its target has."""
    read, written = _views(move, source, target)
    read.copy_(written)


def _views(move: Move, source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements of both sides that a move joins."""
    shape = [count for count, _, _ in move.loops]
    source_steps, target_steps = ([loop[side] for loop in move.loops] for side in (1, 2))
    return (
        source.as_strided(shape, source_steps, source.storage_offset() + move.source_offset),
        target.as_strided(shape, target_steps, target.storage_offset() + move.target_offset),
    )


def filled(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, boxes: Sequence[tuple[Move, torch.Tensor]]
) -> torch.Tensor:
    """Return a new tensor that is made of boxes of others; what no box fills is zero.

    Args:
        shape: of the tensor.
        dtype: of the tensor and of the others.
        device: where it goes; on the meta device nothing is copied.
        boxes: moves into it, row-major, each with the flat tensor that it reads.
    """
    size = torch.Size(shape).numel()
    covered = sum(move.size for move, _ in boxes) == size
    tensor = (torch.empty if covered else torch.zeros)(tuple(shape), dtype=dtype, device=device)
    if not tensor.is_meta:
        for move, source in boxes:
            copy_box(move, source, tensor.view(-1))
    return tensor


def stacked_view(first: torch.Tensor, count: int) -> torch.Tensor:
    """Return tensors of one shape as one tensor, without a copy.

    Args:
        first: the first one, contiguous.
        count: how many lie one after the other in its storage.
    """
    return first.as_strided((count, *first.shape), (first.numel(), *first.stride()))


def same_views(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors that lie to one another as these do, in memory of their own without values."""
    first = min(tensor.data_ptr() for tensor in tensors.values()) // _ALIGNED * _ALIGNED
    reach = {
        name: 1 + sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
        for name, tensor in tensors.items()
    }
    size = max(tensor.data_ptr() - first + reach[name] * tensor.element_size() for name, tensor in tensors.items())
    memory = torch.empty(size, dtype=torch.uint8, device=next(iter(tensors.values())).device)
    views = {}
    for name, tensor in tensors.items():
        begin = tensor.data_ptr() - first
        own = memory[begin : begin + reach[name] * tensor.element_size()].view(tensor.dtype)
        views[name] = own.as_strided(tensor.shape, tensor.stride())
    return views
