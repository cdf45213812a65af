"""Placements: which positions of a tensor each rank of a mesh holds, as interval lists.

DTensor's placements become the chunk rules of `axes`, so what a rank holds is computed once, in one way, for `Shard`,
`Shard(-1)`, `_StridedShard` and every order of mesh dims; torch is asked for placements, never for offsets.

A parameter that tensor parallelism has cut in a way no DTensor can say is an ordinary tensor, or under FSDP2 a DTensor
over the data-parallel ranks alone: neither knows the whole. The module that owns it does; it marks the tensor with a
`Part`, and optimizer state takes it over, so that loading and saving see the whole tensor with an interval list per
dim, as for any other placement.

A `ShardGrid` is one tensor of which this rank holds several parts, each a tensor of its own, such as the layers of a
stack. Megatron describes its parameters so: layer 3 is row 3 of a tensor that has all layers, half of the MLP's rows
are the gate and half are the up projection. Nothing here knows Megatron; a grid is the rest of such a description.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from transaxle.axes.geometry.chunk import ChunkRule, Intervals, MeshCut, Replicated, Shard, StridedShard, place, whole
from transaxle.errors import refuse

_PARTS = "_transaxle_parts"
_PART = "_transaxle_part"


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's share of a whole tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    held: tuple[Intervals, ...]
    """Per dim, the positions that this tensor-parallel rank holds, in local order. In one dim where the whole has
    several: a range of its elements, row-major.
    """


def part_of(tensor: torch.Tensor) -> Part | None:
    """Return what a tensor is a part of; None for a tensor that is whole, or says itself how it lies on its mesh."""
    part: Part | None = getattr(tensor, _PART, None)
    return part


def mark(tensor: torch.Tensor, part: Part | None) -> torch.Tensor:
    """Say what a tensor is a part of, and return it."""
    if part is not None:
        setattr(tensor, _PART, part)
    return tensor


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor, whatever this rank holds of it."""
    part = part_of(tensor)
    return tuple(tensor.shape) if part is None else part.shape


def own_part(module: nn.Module, name: str, part: Part) -> None:
    """Say of which whole a module's own parameter is a part.

    Args:
        module: the owner.
        name: of the parameter in it.
        part: what this rank holds.
    """
    module.__dict__.setdefault(_PARTS, {})[name] = part


def parts_in(module: nn.Module) -> Iterator[tuple[str, Part]]:
    """Yield (name, part) of a module's own parameters that are parts."""
    yield from module.__dict__.get(_PARTS, {}).items()


def mark_all(model: nn.Module) -> None:
    """Mark every parameter of a model that is a part; what shards or materialises a model makes new ones."""
    for module in model.modules():
        for name, part in parts_in(module):
            parameter = module._parameters.get(name)
            if parameter is not None:
                mark(parameter, part)


Cell = tuple[Intervals, ...]
"""Per dim, the one interval that a part holds."""


class ShardGrid(torch.Tensor):
    """The whole tensor's shape, type and device, and this rank's parts of it; it can be loaded and saved only.

    Attributes:
        held: per dim, the intervals that this rank holds; every combination of them is a part.
        cells: the parts, each with as many dims as the whole, in the order of `cells_of(held)`.
        spare: another rank holds the same, and that one is to be saved.
        padded: the first dim may be longer than in a checkpoint; the rows beyond mean nothing.
    """

    held: tuple[Intervals, ...]
    cells: tuple[torch.Tensor, ...]
    spare: bool
    padded: bool

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        held: tuple[Intervals, ...],
        cells: Sequence[torch.Tensor],
        *,
        spare: bool = False,
        padded: bool = False,
    ) -> ShardGrid:
        """Make one; see the attributes."""
        first = cells[0]
        grid: ShardGrid = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=first.dtype, device=first.device
        )
        grid.held, grid.cells, grid.spare, grid.padded = held, tuple(cells), spare, padded
        mark(grid, Part(tuple(shape), held))
        return grid

    def named_parts(self, name: str, shape: Sequence[int]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of the parts, without the rows that a tensor of another shape lacks.

        Args:
            name: the grid's.
            shape: of what fills it; its own: all rows.
        """
        for cell, part in zip(cells_of(self.held), self.cells, strict=True):
            rows = count_inside(cell, shape) if self.padded else part.shape[0]
            if rows:
                yield cell_name(name, cell), part.narrow(0, 0, rows)

    def clear_beyond(self, shape: Sequence[int]) -> None:
        """Set the rows to zero that a tensor of another shape lacks."""
        with torch.no_grad():
            for cell, part in zip(cells_of(self.held), self.cells, strict=True):
                part[count_inside(cell, shape) :].zero_()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub takes it for an ordinary method
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse every operation.

        Raises:
            Refused: UNSUPPORTED.
        """
        message = f"this stands for a rank's shards of a tensor, and does not support {func}"
        raise refuse("UNSUPPORTED", message, hint="A sharded state dict can be given to tx.load and tx.save.")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # the values are not shown
        return f"ShardGrid({list(self.shape)}, {self.dtype}, {self.held})"


def cells_of(held: Sequence[Intervals]) -> Iterator[Cell]:
    """Yield the combinations of intervals, the last dim fastest."""
    return product(*([(interval,) for interval in intervals] for intervals in held))


def cell_name(name: str, cell: Cell) -> str:
    """Return what the part of a tensor is called that begins at a cell's offsets."""
    return f"{name}[{', '.join(str(start) for ((start, _),) in cell)}]"


def inside(cell: Cell, shape: Sequence[int]) -> Cell:
    """Return the positions of a cell that a tensor with fewer rows has as well."""
    ((start, stop),) = cell[0]
    return (((min(start, shape[0]), min(stop, shape[0])),), *cell[1:])


def count_inside(cell: Cell, shape: Sequence[int]) -> int:
    """Return the number of a cell's rows that a tensor of this shape has as well."""
    ((start, stop),) = inside(cell, shape)[0]
    return stop - start


Held = tuple[Intervals, ...]
"""Per dim, the positions that a rank holds, in local order."""
_SHOWN = 8
"""Ranks that a message names."""


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
    apart: bool = False
    """Every combination of the intervals held is a tensor of its own (`ShardGrid`)."""
    spare: bool = False
    """Another rank holds the same, and that one is to be saved."""
    padded: bool = False
    """The tensor may have more rows than a checkpoint, which mean nothing."""

    def held(self, shape: tuple[int, ...]) -> Mapping[int, Held]:
        """Return what each rank of the mesh holds of a tensor of this shape."""
        positions: dict[int, Held] = {}
        for number, rank in enumerate(self.ranks):
            rest, coordinates = number, []
            for size in reversed(self.mesh):
                rest, coordinate = divmod(rest, size)
                coordinates.append(coordinate)
            steps = zip(self.cuts, self.mesh, reversed(coordinates), strict=True)
            done = [MeshCut(dim, size, coordinate, rule) for (dim, rule), size, coordinate in steps]
            positions[rank] = place(shape, done, self.base)
        return positions


def alone(rank: int) -> Placement:
    """Return the placement of a plain tensor: this rank has all of it."""
    return Placement((1,), (rank,), ((None, Replicated()),))


def placement_of(tensor: torch.Tensor, rank: int, name: str, numbers: Mapping[int, int] | None = None) -> Placement:
    """Return how a live tensor lies on its mesh.

    Args:
        tensor: a tensor or DTensor.
        rank: this process's rank.
        name: its name, for refusals.
        numbers: what the ranks of its mesh are called; None: as the mesh calls them.

    Raises:
        Refused: UNSUPPORTED for `Partial` placements, and for a mesh with ranks that have no number.
    """
    part = part_of(tensor)
    base = None if part is None else part.held
    if isinstance(tensor, ShardGrid):
        return replace(alone(rank), base=base, apart=True, spare=tensor.spare, padded=tensor.padded)
    if not isinstance(tensor, DTensor):
        return replace(alone(rank), base=base)
    mesh = tensor.device_mesh
    shape, ranks = _described(mesh)
    if numbers is not None:
        if outside := [str(rank) for rank in ranks if rank not in numbers]:
            message = f"ranks {', '.join(outside[:_SHOWN])} of its mesh are not in the process group"
            raise refuse("UNSUPPORTED", message, tensor=name, hint="Let all ranks of the mesh join the group.")
        ranks = tuple(numbers[rank] for rank in ranks)
    return Placement(shape, ranks, tuple(cut_of(p, name) for p in tensor.placements), base)


_DESCRIBED: WeakKeyDictionary[DeviceMesh, tuple[tuple[int, ...], tuple[int, ...]]] = WeakKeyDictionary()
"""What was asked of a mesh: torch computes its ranks anew each time, which takes as long as all else here."""


def _described(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks along each dim of a mesh, and all of them, row-major."""
    found = _DESCRIBED.get(mesh)
    if found is None:
        ranks = mesh.mesh
        found = _DESCRIBED[mesh] = tuple(ranks.shape), tuple(int(rank) for rank in ranks.flatten().tolist())
    return found


def local_parts(
    tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]] | None = None
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (name, its part's name, tensor) of what this rank holds: tensors themselves, or the parts of grids.

    Args:
        tensors: by name.
        shapes: those of the tensors that fill them, by name; rows of grids that these lack are left out.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, ShardGrid):
            shape = tensor.shape if shapes is None else shapes[name]
            yield from ((name, part, local) for part, local in tensor.named_parts(name, shape))
        else:
            yield name, name, tensor


def local_shape(held: Held) -> tuple[int, ...]:
    """Return the shape of the local tensor that holds these positions."""
    return tuple(sum(stop - start for start, stop in intervals) for intervals in held)


def elements(held: Held) -> int:
    """Return the number of elements in it."""
    return prod(local_shape(held))


def cut_of(placement: TorchPlacement, name: str) -> tuple[int | None, ChunkRule]:
    """Return the dim that a torch placement cuts, None for none, and how.

    Args:
        placement: of one mesh dim.
        name: the tensor's name, for refusals.

    Raises:
        Refused: UNSUPPORTED for `Partial`.
    """
    if isinstance(placement, _StridedShard):
        return placement.dim, StridedShard(int(placement.split_factor))
    if placement.is_shard():
        return placement.dim, Shard()  # type: ignore[attr-defined]  # `is_shard` does not narrow
    if placement.is_replicate():
        return None, Replicated()
    message = f"its placement is {placement}: each rank holds a term of a sum, not a part of the tensor"
    raise refuse("UNSUPPORTED", message, tensor=name, hint="Redistribute it to Replicate() or Shard(dim) first.")


def held_by(parameter: torch.Tensor) -> tuple[Intervals, ...]:
    """Return for each dim of a whole parameter which positions this rank has, in local order."""
    if not isinstance(parameter, DTensor):
        return tuple(map(whole, parameter.shape))
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # of a rank outside of the mesh there are no parameters
    rules = (cut_of(placement, "") for placement in parameter.placements)
    steps = zip(rules, mesh.shape, coordinate, strict=True)
    return place(tuple(parameter.shape), [MeshCut(dim, size, at, rule) for (dim, rule), size, at in steps])


def take(values: torch.Tensor, held: Sequence[Intervals]) -> torch.Tensor:
    """Return of a whole tensor the positions held, dim by dim; itself, if these are all."""
    for dim, intervals in enumerate(held):
        if intervals != whole(values.shape[dim]):
            values = along(values, dim, intervals)
    return values


def along(values: torch.Tensor, dim: int, intervals: Intervals) -> torch.Tensor:
    """Return the positions of one dim that some intervals hold, in their order, as a copy."""
    return torch.cat([values.narrow(dim, start, stop - start) for start, stop in intervals or ((0, 0),)], dim)
