"""Placements: what each rank of a mesh holds of a live tensor, as interval lists.

DTensor's placements become the chunk rules of `axes`, so what a rank holds is computed once, in one way, for `Shard`,
`Shard(-1)`, `_StridedShard` and every order of mesh dims; torch is asked for placements, never for offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch.distributed.tensor import DTensor

from transaxle.axes.geometry.chunk import ChunkRule, Intervals, MeshCut, Replicated, place
from transaxle.live.tensors.tp_shard import part_of
from transaxle.quant.modules.placed import cut_of

Held = tuple[Intervals, ...]
"""Per dim, the positions that a rank holds, in local order."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How a tensor lies on a mesh; equal on all ranks of the mesh."""

    mesh: tuple[int, ...]
    """Ranks along each mesh dim."""
    ranks: tuple[int, ...]
    """Global ranks of the mesh, row-major."""
    cuts: tuple[tuple[int | None, ChunkRule], ...]
    """For each mesh dim, the tensor's dim that it cuts (None: it does not) and how."""
    base: Held | None = None
    """What the ranks of the mesh hold together; None: all of the tensor."""

    def held(self, shape: tuple[int, ...]) -> Mapping[int, Held]:
        """Return what each rank of the mesh holds of a tensor of this shape."""
        found: dict[int, Held] = {}
        for number, rank in enumerate(self.ranks):
            rest, coordinates = number, []
            for size in reversed(self.mesh):
                rest, coordinate = divmod(rest, size)
                coordinates.append(coordinate)
            steps = zip(self.cuts, self.mesh, reversed(coordinates), strict=True)
            done = [MeshCut(dim, size, coordinate, rule) for (dim, rule), size, coordinate in steps]
            found[rank] = place(shape, done, self.base)
        return found


def alone(rank: int) -> Placement:
    """Return the placement of a plain tensor: this rank has all of it."""
    return Placement((1,), (rank,), ((None, Replicated()),))


def placement_of(tensor: torch.Tensor, rank: int, name: str) -> Placement:
    """Return how a live tensor lies on its mesh.

    Args:
        tensor: a tensor or DTensor.
        rank: this process's global rank.
        name: its name, for refusals.

    Raises:
        Refused: UNSUPPORTED for `Partial` placements.
    """
    part = part_of(tensor)
    base = None if part is None else part.held
    if not isinstance(tensor, DTensor):
        return replace(alone(rank), base=base)
    mesh = tensor.device_mesh
    ranks = tuple(int(r) for r in mesh.mesh.flatten().tolist())
    return Placement(tuple(mesh.mesh.shape), ranks, tuple(cut_of(p, name) for p in tensor.placements), base)


def local_shape(held: Held) -> tuple[int, ...]:
    """Return the shape of the local tensor that holds these positions."""
    return tuple(sum(stop - start for start, stop in intervals) for intervals in held)


def elements(held: Held) -> int:
    """Return the number of elements in it."""
    return prod(local_shape(held))
