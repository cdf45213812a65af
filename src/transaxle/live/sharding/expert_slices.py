"""Loads this rank's experts as a slice of the checkpoint's stacked tensor, where ranks share the experts out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from transaxle.axes.layout.bind import split_slot
from transaxle.axes.layout.solve import Shape
from transaxle.axes.translation.grouped import members_by_stack, parameter_shapes
from transaxle.live.sharding.dcp_chunks import Runs
from transaxle.live.transport.world import World
from transaxle.torch_tensors.local_tensor import local_of
from transaxle.torch_tensors.placement import placement_of
from transaxle.torch_tensors.tp_shard import whole_shape


@dataclass(frozen=True, slots=True)
class _Slice:
    """This rank's experts in one stacked tensor of the checkpoint."""

    read: torch.Tensor
    """The stacked tensor as torch reads it; this rank has its own experts of it."""
    values: torch.Tensor
    """The memory that is read into: the local parts of `members` stacked, or one number for all of them."""
    members: tuple[torch.Tensor, ...]
    """The experts' tensors, which get the values."""


class ExpertSlices:
    """Stand-ins for a rank's experts, which are read as slices and then copied into the experts.

    A rank that has all experts needs none.

    Args:
        tensors: this rank's, states of an optimizer included.
        stored: names and shapes of the checkpoint's.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], stored: Mapping[str, Shape]) -> None:
        wanted_shapes = parameter_shapes({name: whole_shape(tensor) for name, tensor in tensors.items()})
        stored_shapes = parameter_shapes(stored)
        self._slices: dict[str, _Slice] = {}
        self.members: dict[str, torch.Tensor] = {}
        """The experts' tensors that have a stand-in."""
        for stack, names in members_by_stack(name for name in tensors if name not in stored).items():
            shape = stored_shapes.get(split_slot(stack)[0], ())  # a step has no dims
            is_stack = len(shape) == len(wanted_shapes[split_slot(names[min(names)])[0]]) + 1
            if is_stack and stack in stored and max(names) < shape[0] > len(names):
                numbers = sorted(names)
                self._slices[stack] = _slice(stack, shape[0], numbers, [tensors[names[number]] for number in numbers])
                self.members |= {name: tensors[name] for name in names.values()}
        self.stacks = frozenset(self._slices)
        """Names of the checkpoint's tensors that are read in the experts' place."""
        others = {name: tensor for name, tensor in tensors.items() if name not in self.members}
        self.read: dict[str, torch.Tensor] = {**others, **{name: each.read for name, each in self._slices.items()}}
        """All that is read into."""

    def finish(self) -> None:
        """Copy the values that were read into the experts."""
        with torch.no_grad():
            for each in self._slices.values():
                for place, member in enumerate(each.members):
                    local_of(member).copy_(each.values[place] if each.values.dim() else each.values)


def _slice(name: str, count: int, numbers: list[int], members: list[torch.Tensor]) -> _Slice:
    first = members[0]
    if not first.dim():  # a step: every expert has one, the stack has one for all
        return _Slice(first, first, tuple(members))
    local, rank = local_of(first), World().rank
    held = placement_of(first, rank, name).held(whole_shape(first))[rank]
    values = torch.empty((len(members), *local.shape), dtype=local.dtype, device=local.device)
    expert_intervals = tuple((number, number + 1) for number in numbers)
    read = Runs(torch.Size((count, *whole_shape(first))), values, (expert_intervals, *held))
    return _Slice(read, values, tuple(members))
