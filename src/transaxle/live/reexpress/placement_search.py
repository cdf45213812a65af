"""Placement search: how a tensor of another dialect lies on its mesh, so that each rank makes its part alone.

Placements are tried, and each trial is decided by the box copies that will fill the tensor: no rule per framework
could be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from transaxle.axes.layout.solve import Shape
from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor
from transaxle.engine.copying.source import Source
from transaxle.errors import Code, TransaxleError
from transaxle.live.sharding.global_tensors import Census
from transaxle.live.sharding.memory import own_entry, rank_of
from transaxle.move.transfer import Transfer
from transaxle.torch_tensors.placement import Held, Placement, cut_of

ABSENT: Code = "INCOMPLETE"
"""A rank lacks some of what a part is made of."""
Coordinate = tuple[int, ...]
"""A rank's place in a mesh."""
Choice = TorchPlacement | int
"""How one mesh dim places a tensor; a number: only ranks at this coordinate have it."""


def is_present(choices: tuple[Choice, ...], coordinate: Coordinate) -> bool:
    """Tell whether a rank has a part of a tensor."""
    return all(not isinstance(choice, int) or choice == at for choice, at in zip(choices, coordinate, strict=True))


class PlacementSearch:
    """Finds placements of the tensors of one view.

    Args:
        view: the state in the dialect that is wanted.
        global_tensors: what this rank knows that all ranks hold.
    """

    def __init__(self, view: Checkpoint, global_tensors: Census) -> None:
        self._view = view
        self._global_tensors = global_tensors
        self._sources: dict[int, Source] = {}
        self._worked: dict[tuple[object, ...], tuple[Choice, ...]] = {}
        """What worked for another tensor of the same rule, shape and placements: layers are alike."""

    def find(
        self,
        name: str,
        mesh: DeviceMesh,
        coordinates: Mapping[int, Coordinate],
        placements: tuple[tuple[TorchPlacement, ...], ...],
    ) -> tuple[Choice, ...] | None:
        """Return, per mesh dim, how a tensor is placed; None where every choice would need bytes to be sent.

        Args:
            name: the tensor.
            mesh: that of what it is made of.
            coordinates: each rank's place in the mesh.
            placements: of what it is made of.
        """
        stored = self._view[name]
        owners = [coordinates[rank_of(transfer.file)] for transfer in stored.transfers()]
        only = tuple(places.pop() if len(places := set(column)) == 1 else None for column in zip(*owners, strict=True))
        key = self._view.targets[name].rule, stored.shape, placements, mesh
        worked = self._worked.get(key)
        if worked is not None:
            moved = tuple(
                at if isinstance(choice, int) and at is not None else choice
                for choice, at in zip(worked, only, strict=True)
            )
            if self._works(name, mesh, coordinates, moved):
                return moved
        for choices in _candidates(len(stored.shape), mesh, only):
            if self._works(name, mesh, coordinates, choices):
                self._worked[key] = choices
                return choices
        return None

    def held(self, shape: Shape, mesh: DeviceMesh, choices: tuple[Choice, ...], name: str) -> Mapping[int, Held]:
        """Return what each rank of a mesh holds of a tensor that is placed so."""
        ranks = tuple(mesh.mesh.flatten().tolist())
        cuts = tuple(cut_of(Replicate() if isinstance(choice, int) else choice, name) for choice in choices)
        return Placement(tuple(mesh.mesh.shape), ranks, cuts).held(shape)

    def transfers(self, name: str, held: Held, rank: int) -> list[Transfer] | None:
        """Return what makes a part of a tensor out of one rank's memory; None where something is missing there."""
        source = self._sources.get(rank)
        if source is None:
            entries = {n: own_entry(t, rank) for n, t in self._global_tensors.items() if rank in t.held}
            source = self._sources[rank] = Source(self._view.container, entries)
        stored = self._view[name]
        part = StoredTensor(name, stored.dtype, stored.shape, self._view.targets[name], source)
        try:
            return part.transfers(held)
        except KeyError:
            return None
        except TransaxleError as error:
            if error.code != ABSENT:
                raise
            return None

    def _works(
        self, name: str, mesh: DeviceMesh, coordinates: Mapping[int, Coordinate], choices: tuple[Choice, ...]
    ) -> bool:
        """Tell whether every rank holds all that its part is made of."""
        held = self.held(self._view[name].shape, mesh, choices, name)
        return all(
            self.transfers(name, held[rank], rank) is not None
            for rank, coordinate in coordinates.items()
            if is_present(choices, coordinate)
        )


def _candidates(dims: int, mesh: DeviceMesh, only: tuple[int | None, ...]) -> Iterator[tuple[Choice, ...]]:
    """Yield the placements that a tensor may have, those that hold most first.

    Args:
        dims: of the tensor.
        mesh: its mesh.
        only: per mesh dim the one coordinate that has anything of the tensor; None: several have.
    """
    sizes = tuple(mesh.mesh.shape)
    factors = sorted({size for size in (*sizes, prod(sizes)) if size > 1})
    cuts: list[Choice] = [Shard(dim) for dim in range(dims)]
    cuts += [_StridedShard(dim, split_factor=factor) for dim in range(dims) for factor in factors]
    per_dim: list[list[Choice]] = []
    for size, coordinate in zip(sizes, only, strict=True):
        alone: list[Choice] = [coordinate] if coordinate is not None and size > 1 else []
        per_dim.append([Replicate(), *alone, *cuts] if size > 1 else [Replicate()])
    yield from product(*per_dim)
