"""Who holds what of a live model, told by its ranks to each other, without looking at a value."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
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
    told = world.pool(lambda: (aliases, _coordinates(own.values())))
    meshes = dict(zip(world.ranks, (places for _, places in told), strict=True))
    aliases = {name: to for each, _ in told for name, to in each.items()}
    held = tuple(HeldTensor(each.name, each.dtype, each.shape, each.held) for each in everything.values())
    return Sharding(tuple(world.ranks), held, aliases, _without_ambiguous(meshes))


def _coordinates(tensors: Iterable[torch.Tensor]) -> dict[str, set[int]]:
    """Return where this rank is along each named dim of the tensors' meshes; several places where meshes disagree."""
    found: dict[str, set[int]] = {}
    meshes = {id(mesh): mesh for tensor in tensors if (mesh := getattr(tensor, "device_mesh", None)) is not None}
    for mesh in meshes.values():
        names, places = mesh.mesh_dim_names, mesh.get_coordinate()
        for name, place in zip(names, places, strict=True) if names and places else ():
            found.setdefault(name, set()).add(place)
    return found


def _without_ambiguous(told: Mapping[int, Mapping[str, Collection[int]]]) -> dict[int, dict[str, int]]:
    """Leave out dims whose name means different places on different meshes, on all ranks."""
    ambiguous = {name for places in told.values() for name, each in places.items() if len(each) > 1}
    found = {
        rank: {name: place for name, (place, *_) in places.items() if name not in ambiguous}
        for rank, places in told.items()
    }
    return {rank: places for rank, places in found.items() if places}
