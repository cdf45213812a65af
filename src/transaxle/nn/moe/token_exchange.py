"""Rows on their way to experts of other ranks, and back.

How many rows go where is known to the devices only, and the collective needs it on the host: this is the one place
where a mixture of experts waits for the device, and only where its experts are shared out over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional

from transaxle.nn.moe.token_order import order


class _AllToAll(torch.autograd.Function):
    """Rows to all ranks of a group, and rows from them; gradients go the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, _: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        """Return the rows that arrive, those of rank 0 first.

        Args:
            ctx: of autograd.
            rows: those for rank 0 first.
            _: wants a gradient, and gets none: so backward comes here on every rank, whatever it has parameters for.
            received: rows from each rank.
            sent: rows for each rank.
            group: the ranks.
        """
        ctx.swapped = sent, received, group
        return _swapped(rows, received, sent, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Send gradients to where their rows came from."""
        return _swapped(grads[0], *ctx.swapped), None, None, None, None


def _swapped(rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def across(
    experts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    counts: torch.Tensor,
    own: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Return what experts on all ranks make of this rank's rows; every rank of the group calls it.

    Args:
        experts: those of this rank: rows in their order, and how many each has, to as many rows.
        rows: [rows, features], in the order of all experts.
        counts: rows of each expert, int64 [experts]; ranks share them out as `torch.chunk` does.
        own: experts of this rank.
        group: the ranks.
    """
    ranks = dist.get_world_size(group)
    most = -(-len(counts) // ranks)
    mine = functional.pad(counts, (0, most * ranks - len(counts))).view(ranks, most)
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    sent, received = torch.stack([mine.sum(1), theirs.sum(1)]).tolist()
    trained = rows.new_empty(0).requires_grad_()
    arrived: torch.Tensor = _AllToAll.apply(rows, trained, received, sent, group)  # type: ignore[no-untyped-call]
    every = torch.arange(most, device=rows.device).repeat(ranks)
    sorted_rows = order(every.repeat_interleave(theirs.flatten(), output_size=sum(received)), most)
    outputs = experts(arrived[sorted_rows.places], sorted_rows.counts[:own])[sorted_rows.back]
    returned: torch.Tensor = _AllToAll.apply(outputs, trained, sent, received, group)  # type: ignore[no-untyped-call]
    return returned
