"""How much memory a snapshot will take, before the first one is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from transaxle.live.background.save_process import room
from transaxle.live.model.state_tensors import State, leaves
from transaxle.live.training.optimizer_state import by_name, states_of
from transaxle.live.training.optimizer_twin import Twins
from transaxle.live.training.optimizers import AnyOptimizer, Optimizers
from transaxle.quant.modules.masters import MasterWeights
from transaxle.torch_tensors.local_tensor import local_of
from transaxle.torch_tensors.placement import local_parts


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What a rank's snapshot will take."""

    size: int
    """Bytes, about."""
    on_gpu: bool
    """Whether some of it comes from a GPU."""


def foresee(state: State, optimizer: AnyOptimizer | None) -> Foreseen:
    """Return what a snapshot will take; state that an optimizer has not made yet counts as what it will be.

    Raises:
        TransaxleError: as `leaves`, `by_name` and `states_of`.
    """
    held = leaves(state, sharded=True)
    tensors = dict(held.tensors)
    coming = list[int]()
    if optimizer is not None:
        optimizers, parameters = by_name(optimizer, held)
        tensors |= states_of(optimizers, parameters)
        coming = list(_coming(optimizers, list(parameters.values())))
    locals_ = [local_of(tensor) for _, _, tensor in local_parts(tensors)]
    sizes = [*coming, *(local.numel() * local.element_size() for local in locals_)]
    return Foreseen(sum(map(room, sizes)), any(local.is_cuda for local in locals_))


def _coming(optimizers: Optimizers, parameters: list[torch.Tensor]) -> Iterator[int]:
    """Yield the bytes of each piece of state that optimizers have not made yet."""
    owners, twins = optimizers.owners(), Twins()
    for parameter in parameters:
        owner = owners.get(id(parameter))
        if owner is None or (owner.states if isinstance(owner, MasterWeights) else owner.state).get(parameter):
            continue
        elements = local_of(parameter).numel()
        for value in twins.state(owner, parameter).values():
            if isinstance(value, torch.Tensor):
                yield (elements if value.dim() else 1) * value.element_size()
