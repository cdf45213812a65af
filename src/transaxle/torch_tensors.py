"""What a rank has of a tensor: its part, its bytes, and the placement that says which part it is.

The part of a tensor that this rank holds, its bytes as torch and as numpy see them, and copies between parts.

A DTensor shows the whole tensor and keeps a part of it; other tensors are their own part.

Copies and views work on any device: this is the one place that computes strides for torch. A move says in elements
what goes where; here it becomes one `copy_` between two views, which is one kernel on a GPU.

**Placements**: which positions of a tensor each rank of a mesh holds, as interval lists.

DTensor's placements become the chunk rules of `axes`, so what a rank holds is computed once, in one way, for `Shard`,
`Shard(-1)`, `_StridedShard` and every order of mesh dims; torch is asked for placements, never for offsets.

A parameter that tensor parallelism has cut in a way no DTensor can say is an ordinary tensor, or under FSDP2 a DTensor
over the data-parallel ranks alone: neither knows the whole. The module that owns it does; it marks the tensor with a
`Part`, and optimizer state takes it over, so that loading and saving see the whole tensor with an interval list per
dim, as for any other placement.

A `ShardGrid` is one tensor of which this rank holds several parts, each a tensor of its own, such as the layers of a
stack. Megatron describes its parameters so: layer 3 is row 3 of a tensor that has all layers, half of the MLP's rows
are the gate and half are the up projection. Nothing here knows Megatron; a grid is the rest of such a description.

Arguments of torch's own types: element types, devices, groups of ranks, models, by any of the names that people
use.

Checkpoints name element types with safetensors codes; a model may come in the wrappers of a trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from transaxle.arguments import DType, read_float_type, wrong_type
from transaxle.axes.geometry import (
    BoxCopy,
    ChunkRule,
    Intervals,
    MeshCut,
    Replicated,
    Shard,
    StridedShard,
    place,
    whole,
)
from transaxle.axes.notation.name import CHECKPOINTED, COMPILED, FSDP1
from transaxle.errors import refuse

TO_LOCAL = "to_local"
"""Method that returns the part; DTensors have it, and so has a tensor that `torch.distributed.checkpoint` saves chunk
by chunk (`transaxle.live.global_tensors`)."""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: detached, sharing its storage."""
    to_local = getattr(tensor, TO_LOCAL, None)
    if to_local is None:
        return tensor.detach()
    with torch.no_grad():  # a DTensor then gives what it keeps, and no view of it: four times as fast
        local: torch.Tensor = to_local()
    return local.detach()


def local_with_grad(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, through which gradients flow back into it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def stored_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the very object that a DTensor keeps for this rank, of whatever tensor class; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def as_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[TorchPlacement],
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
) -> DTensor:
    """Return the DTensor of which this rank holds `local`; no rank is asked whether that is so.

    Args:
        local: what this rank holds; it is not copied.
        mesh: the ranks.
        placements: one for each dim of the mesh.
        shape: of the whole tensor.
        stride: of the whole tensor; None: row-major.
    """
    steps = torch.empty(tuple(shape), device="meta").stride() if stride is None else tuple(stride)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=steps)


def placed_like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of other values as a tensor that has the shape and the placements of `tensor`."""
    if not isinstance(tensor, DTensor):
        return local
    return as_dtensor(local, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())


Bytes = np.ndarray
"""One-dimensional, U8."""


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor on any device, in one dim, sharing its storage."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a contiguous CPU tensor, sharing its storage."""
    return byte_view(tensor).numpy()


def with_own_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory has its values: of a conjugate or negative that torch has put off, a copy."""
    return tensor.resolve_conj().resolve_neg()


def copied_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy on the CPU: from a GPU into page-locked memory, which takes a tenth of the time.

    A contiguous tensor of the CPU is returned as it is.
    """
    local = with_own_bytes(tensor.detach()).contiguous()
    if not local.is_cuda:
        return local.cpu()
    return torch.empty(local.shape, dtype=local.dtype, pin_memory=True).copy_(local)


def copy_into(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy values into a contiguous tensor of the CPU, of the same type and shape.

    One thread copies bytes in two thirds of the time in which torch copies elements, as it writes past the cache. From
    a GPU this only begins the copy, where the target is page-locked.
    """
    source = with_own_bytes(source.detach())
    if source.device.type == "cpu" and source.is_contiguous() and torch.get_num_threads() == 1:
        np.copyto(as_bytes(target), as_bytes(source))
    else:
        target.copy_(source, non_blocking=True)


def with_plain_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of eight-bit elements as uint8, any other as it is.

    Few kernels, and no collective of gloo, know eight-bit floats.
    """
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Tell whether two tensors have one type, one shape and equal bytes: every NaN is one pattern of bits.

    They may lie on two devices, and need not be contiguous. On the meta device there are no bytes, and none differ.
    """
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    if first.is_meta or second.is_meta:
        return True
    own, other = (byte_view(with_own_bytes(tensor.detach()).contiguous()) for tensor in (first, second))
    return torch.equal(own, other.to(own.device))


class _Shown:
    """An array under the flags of one that may be written to."""

    def __init__(self, array: Bytes) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}


def of_bytes(array: Bytes) -> torch.Tensor:
    """Return bytes of numpy as a tensor that shares their memory; nobody writes into one whose bytes are read-only.

    torch warns of those that are.
    """
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Shown(array)))


_ALIGNED = 64
"""Bytes that every element's size divides."""


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor as one dim; it shares storage where the part is contiguous."""
    return local_of(tensor).contiguous().view(-1)


def copy_box(move: BoxCopy, source: torch.Tensor, target: torch.Tensor) -> None:
    """Carry a move out.

    Args:
        move: what goes where, in elements.
        source: flat tensor that is read.
        target: flat tensor of the same type that is written.
    """
    read, written = _views(move, source, target)
    written.copy_(read)


def copy_box_back(move: BoxCopy, source: torch.Tensor, target: torch.Tensor) -> None:
    """Carry a move out the other way: its source gets what its target has."""
    read, written = _views(move, source, target)
    read.copy_(written)


def _views(move: BoxCopy, source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements of both sides that a move joins."""
    shape = [count for count, _, _ in move.loops]
    source_steps, target_steps = ([loop[side] for loop in move.loops] for side in (1, 2))
    return (
        source.as_strided(shape, source_steps, source.storage_offset() + move.source_offset),
        target.as_strided(shape, target_steps, target.storage_offset() + move.target_offset),
    )


def filled(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, boxes: Sequence[tuple[BoxCopy, torch.Tensor]]
) -> torch.Tensor:
    """Return a new tensor that is made of boxes of others; what no box fills is zero.

    Args:
        shape: of the tensor.
        dtype: of the tensor and of the others.
        device: where it goes; on the meta device nothing is copied.
        boxes: moves into it, row-major, each with the flat tensor that it reads.
    """
    size = torch.Size(shape).numel()
    covered = sum(move.size for move, _ in boxes) == size
    tensor = (torch.empty if covered else torch.zeros)(tuple(shape), dtype=dtype, device=device)
    if not tensor.is_meta:
        for move, source in boxes:
            copy_box(move, source, tensor.view(-1))
    return tensor


def stacked_view(first: torch.Tensor, count: int) -> torch.Tensor:
    """Return tensors of one shape as one tensor, without a copy.

    Args:
        first: the first one, contiguous.
        count: how many lie one after the other in its storage.
    """
    return first.as_strided((count, *first.shape), (first.numel(), *first.stride()))


def same_views(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors that lie to one another as these do, in memory of their own without values."""
    first = min(tensor.data_ptr() for tensor in tensors.values()) // _ALIGNED * _ALIGNED
    reach = {
        name: 1 + sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
        for name, tensor in tensors.items()
    }
    size = max(tensor.data_ptr() - first + reach[name] * tensor.element_size() for name, tensor in tensors.items())
    memory = torch.empty(size, dtype=torch.uint8, device=next(iter(tensors.values())).device)
    views = {}
    for name, tensor in tensors.items():
        begin = tensor.data_ptr() - first
        own = memory[begin : begin + reach[name] * tensor.element_size()].view(tensor.dtype)
        views[name] = own.as_strided(tensor.shape, tensor.stride())
    return views


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


_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
    "COMPLEX32": "complex32", "COMPLEX128": "complex128",
}  # fmt: skip
_TORCH = {code: getattr(torch, name) for code, name in _NAMES.items() if hasattr(torch, name)}
_CODES = {dtype: code for code, dtype in _TORCH.items()}


def code_of(dtype: torch.dtype) -> str:
    """Return the safetensors code of a torch type; one without a code is named as torch names it, in capitals."""
    return _CODES.get(dtype) or str(dtype).removeprefix("torch.").upper()


def torch_dtype(code: str, *, tensor: str | None = None) -> torch.dtype:
    """Return the torch type of a code.

    Raises:
        Refused: UNSUPPORTED where torch has no such type; `tensor` is named.
    """
    if code not in _TORCH:
        raise refuse("UNSUPPORTED", f"torch has no dtype for {code}", tensor=tensor)
    dtype: torch.dtype = _TORCH[code]
    return dtype


Device: TypeAlias = torch.device | str | int
"""A device: torch's own, its name ("cuda:1"), or the number of an accelerator."""
Ranks: TypeAlias = dist.ProcessGroup | DeviceMesh
"""Ranks that act together: a process group, or a mesh of one dim; a mesh of several must hold all ranks."""

_TORCH_NAMES = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64",
    "f8_e4m3": "float8_e4m3fn", "f8_e5m2": "float8_e5m2", "f8_e8m0": "float8_e8m0fnu",
}  # fmt: skip
"""Types whose other names are not torch's."""


def read_dtype(argument: str, given: object) -> torch.dtype:
    """Return an element type.

    Raises:
        TypeError: it is neither a `torch.dtype` nor a text.
        ValueError: torch has no element type of that name.
    """
    if isinstance(given, torch.dtype):
        return given
    name = str(read_float_type(argument, given)).lower() if given is not None else None
    if name is None:
        raise wrong_type(argument, 'an element type such as "bf16" or torch.bfloat16', given)
    dtype = getattr(torch, _TORCH_NAMES.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f'{argument} must be an element type such as "bf16" or torch.bfloat16; got {given!r}')
    return dtype


def read_optional_dtype(argument: str, given: DType | None) -> torch.dtype | None:
    """Return an element type, or None where nothing is given; raises as `read_dtype`."""
    return None if given is None else read_dtype(argument, given)


def read_device(argument: str, given: Device | None) -> torch.device | None:
    """Return a device, or None where nothing is given.

    Raises:
        TypeError: it is neither a `torch.device` nor a name or a number of one.
        ValueError: torch knows no device of that name.
    """
    if given is None or isinstance(given, torch.device):
        return given
    accepted = 'a device such as "cpu", "cuda:1" or torch.device("meta")'
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise wrong_type(argument, accepted, given)
    try:
        return torch.device(given)
    except RuntimeError:
        raise ValueError(f"{argument} must be {accepted}; got {given!r}") from None


def read_group(argument: str, given: Any) -> dist.ProcessGroup | None:
    """Return the group of the ranks that act together; None stands for all.

    Raises:
        TypeError: it is neither a process group nor a mesh.
        ValueError: this rank is not in it, or it is a mesh of several dims that some ranks are not in.
    """
    if given is None or isinstance(given, dist.ProcessGroup):
        return given
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{argument} is a process group that this rank does not belong to; only its members may call this"
        )
    if not isinstance(given, DeviceMesh):
        raise wrong_type(argument, "a ProcessGroup, a DeviceMesh of one dim, or None for all ranks", given)
    if given.ndim == 1:
        return given.get_group()
    if given.size() == dist.get_world_size():
        return None
    sizes = list(given.mesh.shape)
    raise ValueError(f'{argument} must be a mesh of one dim, such as mesh["dp"]; got one of {given.ndim} dims {sizes}')


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without DDP and `torch.compile` around it.

    FSDP1 stays: its parameters are flat, and only its own state dict shows those of the model.
    """
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else model._modules.get(COMPILED)
        if inner is None:
            return model
        model = inner


def innermost(model: nn.Module) -> nn.Module:
    """Return the module that the user wrote, without any wrapper: for its class and its attributes."""
    while True:
        model = unwrapped(model)
        inner = [module for name in (FSDP1, CHECKPOINTED) if (module := model._modules.get(name)) is not None]
        if not inner:
            return model
        model = inner[0]
