"""Collectives between what all ranks compute alike and what each computes for itself; each has its transpose.

enter     identity             gradients are summed      before a column-parallel layer
leave     values are summed    identity                  after a row-parallel layer
gather    parts are joined     own part of the gradient  after what is alone in its cut: logits, hidden embeddings
scatter   own part             gradients are joined      before a row-parallel layer whose input is whole
summed    identity             gradients are summed,     parameters that several ranks hold and use for different
each at its place         heads
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from transaxle.axes.geometry.chunk import Intervals
from transaxle.torch_tensors.placement import along


def _sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _join(part: Tensor, widths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Join all ranks' parts along the last dim; gloo and NCCL want parts of one size, so they are padded."""
    most = max(widths)
    padded = torch.nn.functional.pad(part, (0, most - part.shape[-1])).contiguous()
    parts = [torch.empty_like(padded) for _ in widths]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([each[..., :width] for each, width in zip(parts, widths, strict=True)], -1)


def _own(whole: Tensor, widths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    rank = dist.get_rank(group)
    return whole.narrow(-1, sum(widths[:rank]), widths[rank]).contiguous()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0], ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(tensor, group)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, widths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.settings = widths, group
        return _join(part, widths, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _own(grads[0], *ctx.settings), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, widths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.settings = widths, group
        return _own(whole, widths, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _join(grads[0], *ctx.settings), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, positions: Intervals, length: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.settings = dim, positions, length, group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        dim, positions, length, group = ctx.settings
        grad = grads[0]
        shape = [*grad.shape]
        shape[dim] = length
        total, at = grad.new_zeros(shape), 0
        for start, stop in positions:
            total.narrow(dim, start, stop - start).copy_(grad.narrow(dim, at, stop - start))
            at += stop - start
        dist.all_reduce(total, group=group)
        return along(total, dim, positions), None, None, None, None


def enter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a tensor that is equal on all ranks; from here on each rank computes something of its own with it."""
    entered: Tensor = _Enter.apply(tensor, group)  # type: ignore[no-untyped-call]
    return entered


def leave(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over all ranks; from here on all compute the same with it."""
    total: Tensor = _Leave.apply(tensor, group)  # type: ignore[no-untyped-call]
    return total


def gather(part: Tensor, widths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return all ranks' parts joined along the last dim; from here on all compute the same with them.

    Args:
        part: this rank's.
        widths: length of the last dim on every rank.
        group: the ranks.
    """
    joined: Tensor = _Gather.apply(part, widths, group)  # type: ignore[no-untyped-call]
    return joined


def scatter(whole: Tensor, widths: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the last dim of a tensor that is equal on all ranks; see `gather`."""
    own_part: Tensor = _Scatter.apply(whole, widths, group)  # type: ignore[no-untyped-call]
    return own_part


def summed(tensor: Tensor, dim: int, positions: Intervals, length: int, group: dist.ProcessGroup) -> Tensor:
    """Return a parameter some of whose elements other ranks hold and use too: the gradients of these are summed.

    Args:
        tensor: this rank's part.
        dim: the dim in which ranks hold different positions.
        positions: the positions that this rank holds.
        length: of that dim in the whole parameter.
        group: the ranks.
    """
    with_summed_gradient: Tensor = _Summed.apply(tensor, dim, positions, length, group)  # type: ignore[no-untyped-call]
    return with_summed_gradient
