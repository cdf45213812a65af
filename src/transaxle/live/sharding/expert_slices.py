"""Some of N tensors that a checkpoint has as one: experts of this rank, read as the part of the one that they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from transaxle.axes.layout.bind import join_slot, split_slot
from transaxle.axes.layout.solve import Shape
from transaxle.axes.translation.arrange import parameter_shapes
from transaxle.axes.translation.grouped import numbered
from transaxle.live.sharding.dcp_chunks import Runs
from transaxle.live.transport.world import World
from transaxle.torch_tensors.local_tensor import local_of
from transaxle.torch_tensors.placement import placement_of
from transaxle.torch_tensors.tp_shard import whole_shape


@dataclass(frozen=True, slots=True)
class _One:
    """A tensor of the checkpoint."""

    read: torch.Tensor
    """What stands for it: all of it, or of N the part that is here."""
    made: torch.Tensor
    """What then has the values: of each of `members` one, or one for all of them."""
    members: tuple[torch.Tensor, ...]
    """What gets them."""


class Some:
    """What is read into in the place of a rank's experts, and what then gives these their values.

    Only where ranks share out experts: a rank that wants all of them needs none of it.

    Args:
        tensors: this rank's, states of an optimizer included.
        stored: names and shapes of the checkpoint's.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], stored: Mapping[str, Shape]) -> None:
        found: dict[str, dict[int, str]] = {}
        for name in tensors:
            parameter, slot = split_slot(name)
            split = numbered(parameter)
            if split is not None and name not in stored:
                found.setdefault(join_slot(f"{split[0]}{split[2]}", slot), {})[split[1]] = name
        mine = parameter_shapes({name: whole_shape(tensor) for name, tensor in tensors.items()})
        theirs = parameter_shapes(stored)
        self._ones: dict[str, _One] = {}
        self.members: dict[str, torch.Tensor] = {}
        """The rank's experts for which that is so."""
        for whole, names in found.items():
            shape = theirs.get(split_slot(whole)[0], ())  # a step has no dims
            is_stack = len(shape) == len(mine[split_slot(names[min(names)])[0]]) + 1
            if is_stack and whole in stored and max(names) < shape[0] > len(names):
                self._ones[whole] = _one(whole, shape[0], [(n, tensors[names[n]]) for n in sorted(names)])
                self.members |= {name: tensors[name] for name in names.values()}
        self.wholes = frozenset(self._ones)
        """Names of what the checkpoint has in their place."""
        kept = {name: tensor for name, tensor in tensors.items() if name not in self.members}
        self.read: dict[str, torch.Tensor] = {**kept, **{whole: one.read for whole, one in self._ones.items()}}
        """All that is read into."""

    def finish(self) -> None:
        """Give the experts their values."""
        with torch.no_grad():
            for one in self._ones.values():
                for place, member in enumerate(one.members):
                    local_of(member).copy_(one.made[place] if one.made.dim() else one.made)


def _one(name: str, count: int, members: list[tuple[int, torch.Tensor]]) -> _One:
    tensors = tuple(tensor for _, tensor in members)
    first = tensors[0]
    if not first.dim():  # a step: N have one each, and the one tensor has one
        return _One(first, first, tensors)
    local, rank = local_of(first), World().rank
    held = placement_of(first, rank, name).held(whole_shape(first))[rank]
    made = torch.empty((len(members), *local.shape), dtype=local.dtype, device=local.device)
    own = tuple((number, number + 1) for number, _ in members)
    return _One(Runs(torch.Size((count, *whole_shape(first))), made, (own, *held)), made, tensors)
