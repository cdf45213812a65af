"""Strided copies and views of torch tensors, on any device: the one place that computes strides for torch.

A move says in elements what goes where; here it becomes one `copy_` between two views, which is one kernel on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from transaxle.axes.geometry.piece import Move
from transaxle.torch_tensors.local_tensor import local_of

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
