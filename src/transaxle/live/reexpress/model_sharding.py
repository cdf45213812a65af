"""Who holds what of a live model, told by its ranks to each other, without looking at a value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transaxle.engine.facts.sharding_facts import HeldTensor, Sharding
from transaxle.live.model.state_tensors import leaves
from transaxle.live.sharding.global_tensors import census
from transaxle.live.transport.world import World
from transaxle.torch_tensors.torch_arguments import Ranks

if TYPE_CHECKING:
    import torch

    from transaxle.live.model.state_tensors import State


def sharding(state: State, *, group: Ranks | None = None) -> Sharding:
    """Tell who holds what of a live model; collective: all ranks call it, and all get the same.

    Only names, types, shapes and placements are exchanged. `tx.report(found, "sharding.html")` draws it, on one rank.

    Args:
        state: a module, or a state dict of tensors and DTensors; of any placements, also on the meta device.
        group: the ranks; None: all, or this process alone where there is no process group.

    Returns:
        The ranks with what each holds of every tensor; its `rank_bytes`, `imbalance` and `spare_bytes` sum up.

    Raises:
        Refused: on every rank: SHAPE_MISMATCH, DTYPE_MISMATCH where ranks differ; UNSUPPORTED for placements that are
            not known and for sharded state dicts; INCOMPLETE where a rank of a tensor's mesh has no such tensor.
    """
    world = World(group)
    with world.together():
        tensors = leaves(state).tensors
        names: dict[int, str] = {}
        own: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        for name, tensor in tensors.items():
            first = names.setdefault(id(tensor), name)
            if first == name:
                own[name] = tensor
            else:
                aliases[name] = first
    everything = census(own, world)
    told = world.pool(lambda: aliases)
    held = tuple(HeldTensor(each.name, each.dtype, each.shape, each.held) for each in everything.values())
    return Sharding(tuple(world.ranks), held, {name: to for each in told for name, to in each.items()})
