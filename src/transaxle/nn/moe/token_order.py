"""Rows in the order of their groups, and back again: all of it where the rows are, nothing is read by the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Order:
    """Rows group by group; within a group they stay as they were."""

    places: torch.Tensor
    """Which row comes at each place, int64 [rows]: `x[places]` is in order."""
    back: torch.Tensor
    """At which place each row is, int64 [rows]: `y[back]` is as it was."""
    counts: torch.Tensor
    """Rows of each group, int64 [groups]."""


def order(groups: torch.Tensor, count: int) -> Order:
    """Sort rows by their groups.

    Args:
        groups: number of each row's group, int64 [rows].
        count: how many groups there are.
    """
    sorted_groups, places = torch.sort(groups, stable=True)
    every = torch.arange(count, device=groups.device)
    ends = torch.searchsorted(sorted_groups, every, right=True)
    rows = torch.arange(len(groups), device=groups.device)
    back = torch.empty_like(places).scatter_(0, places, rows)
    return Order(places, back, torch.diff(ends, prepend=ends.new_zeros(1)))
