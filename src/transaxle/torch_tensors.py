"""A rank's shards of tensors (values, bytes, placements), and checks of arguments that are dtypes, devices or groups.

A DTensor has the shape of the whole tensor and stores one shard of it, the *local part*. The local part of a plain
tensor is the tensor itself.

**Copies.** A `BoxCopy` contains offsets and strides in elements. In torch, a `BoxCopy` becomes one `copy_` between two
strided views, which is a single kernel on a GPU. Strides for torch are computed only in this module.

**Placements**: which positions of a tensor each rank of a mesh has, as one list of intervals per dim. DTensor
placements are converted to the chunk rules of `transaxle.axes`, so one implementation handles `Shard`, `Shard(-1)`,
`_StridedShard` and every order of mesh dims. torch only provides the placements; this module computes the offsets.

**Parts.** Some tensor-parallel cuts cannot be described by a DTensor. A parameter with such a cut is an ordinary
tensor, or under FSDP2 a DTensor over the data-parallel ranks only, and its shape is smaller than that of the whole. The
module that contains the parameter marks it with a `Part`, and the parameter's optimizer state has the same mark. Loads
and saves treat a parameter with a `Part` as the whole tensor with a list of intervals per dim, like a DTensor with
placements.

**Shard grids.** A `ShardGrid` represents one tensor whose shards this rank stores as several separate tensors, such as
the layers of a stack. Megatron's parameters have this form: layer 3 is row 3 of a tensor of all layers, and of an MLP's
rows, half are the gate and half the up projection. Nothing in this module is specific to Megatron.

**Arguments**: reads dtypes, devices and process groups under the various names that users pass, and removes the
wrappers of trainers from models. Checkpoints name dtypes by safetensors codes.
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
"""Name of the method that returns the local part. DTensors have this method, and so do the tensors that
`torch.distributed.checkpoint` saves chunk by chunk (`transaxle.live.global_tensors`).
"""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, detached and in the storage of `tensor`."""
    to_local = getattr(tensor, TO_LOCAL, None)
    if to_local is None:
        return tensor.detach()
    with torch.no_grad():  # four times as fast as with a view for autograd
        local: torch.Tensor = to_local()
    return local.detach()


def local_with_grad(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor as a differentiable view, through which gradients flow back into the
    tensor.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def raw_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor object (possibly of a subclass) inside a DTensor, or the tensor itself if it is no
    DTensor.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def as_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[TorchPlacement],
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
) -> DTensor:
    """Wrap this rank's shard in a DTensor, without checking that the ranks' shards fit together.

    Args:
        local: this rank's shard; it is not copied.
        mesh: mesh of the ranks.
        placements: one placement for each dim of the mesh.
        shape: shape of the whole tensor.
        stride: strides of the whole tensor; None means row-major.
    """
    steps = torch.empty(tuple(shape), device="meta").stride() if stride is None else tuple(stride)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=steps)


def place_like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Wrap this rank's shard of new values as a tensor with the whole shape and the placements of `tensor`."""
    if not isinstance(tensor, DTensor):
        return local
    return as_dtensor(local, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())


Bytes = np.ndarray
"""One-dimensional array of uint8."""


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor on any device as a one-dimensional uint8 view."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a contiguous CPU tensor as a numpy view."""
    return byte_view(tensor).numpy()


def with_own_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory contains its actual values; a tensor with torch's lazy conjugate or negative flag is
    copied.
    """
    return tensor.resolve_conj().resolve_neg()


def copy_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy on the CPU. From a GPU, the copy is made in page-locked memory, which takes a tenth of
    the time.

    A tensor that is already contiguous on the CPU is returned itself.
    """
    local = with_own_bytes(tensor.detach()).contiguous()
    if not local.is_cuda:
        return local.cpu()
    return torch.empty(local.shape, dtype=local.dtype, pin_memory=True).copy_(local)


def copy_into(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy values into a contiguous CPU tensor of the same dtype and shape.

    If torch has one thread, numpy copies the bytes, because it bypasses the cache and needs two thirds of the time of
    torch's copy. From a GPU into a page-locked target, the copy is only started by this function; the caller must wait
    until it has finished.
    """
    source = with_own_bytes(source.detach())
    if source.device.type == "cpu" and source.is_contiguous() and torch.get_num_threads() == 1:
        np.copyto(as_bytes(target), as_bytes(source))
    else:
        target.copy_(source, non_blocking=True)


def with_plain_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of eight-bit elements as a view in uint8, or a tensor of wider elements unchanged.

    The view is needed because few kernels support float8, and gloo's collectives do not support it at all.
    """
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have equal dtypes, shapes and bytes; NaNs are equal if their bits are equal.

    The tensors may be on different devices and need not be contiguous. Meta tensors have no bytes: two meta tensors are
    equal if their dtypes and shapes are equal.
    """
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    if first.is_meta or second.is_meta:
        return True
    first_bytes, second_bytes = (byte_view(with_own_bytes(tensor.detach()).contiguous()) for tensor in (first, second))
    return torch.equal(first_bytes, second_bytes.to(first_bytes.device))


class _Shown:
    """A read-only array whose array interface declares it as writable, so that torch does not warn."""

    def __init__(self, array: Bytes) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}


def of_bytes(array: Bytes) -> torch.Tensor:
    """Return a tensor that shares the memory of a numpy array of bytes. If the array is read-only, do not write into
    the tensor.

    torch warns about read-only arrays, so such arrays are passed to torch as writable.
    """
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Shown(array)))


_ALIGNED = 64
"""Alignment in bytes that is sufficient for elements of every dtype."""


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, flattened to one dim; the result shares the storage if the part is
    contiguous.
    """
    return local_of(tensor).contiguous().view(-1)


def copy_box(move: BoxCopy, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy one box from the tensor `source` to the tensor `target`.

    Args:
        move: offsets and strides in source and target, in elements.
        source: flat tensor to read.
        target: flat tensor of the same dtype to write.
    """
    read, written = _views(move, source, target)
    written.copy_(read)


def copy_box_back(move: BoxCopy, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy one box in the opposite direction to `copy_box`: from `target` to `source`."""
    read, written = _views(move, source, target)
    read.copy_(written)


def _views(move: BoxCopy, source: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the view of the source and the view of the target between which a box copy copies."""
    shape = [count for count, _, _ in move.loops]
    source_steps, target_steps = ([loop[side] for loop in move.loops] for side in (1, 2))
    return (
        source.as_strided(shape, source_steps, source.storage_offset() + move.source_offset),
        target.as_strided(shape, target_steps, target.storage_offset() + move.target_offset),
    )


def assemble_boxes(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, boxes: Sequence[tuple[BoxCopy, torch.Tensor]]
) -> torch.Tensor:
    """Return a new tensor assembled from boxes of other tensors; elements that no box covers are zero.

    Args:
        shape: shape of the new tensor.
        dtype: dtype of the new tensor and of the sources.
        device: device of the new tensor; on the meta device nothing is copied.
        boxes: box copies into the new row-major tensor, each with the flat tensor from which it reads.
    """
    size = torch.Size(shape).numel()
    covered = sum(move.size for move, _ in boxes) == size
    tensor = (torch.empty if covered else torch.zeros)(tuple(shape), dtype=dtype, device=device)
    if not tensor.is_meta:
        for move, source in boxes:
            copy_box(move, source, tensor.view(-1))
    return tensor


def stack_view(first: torch.Tensor, count: int) -> torch.Tensor:
    """Return one stacked view of tensors of the same shape that adjoin in memory.

    Args:
        first: the first of the tensors, contiguous.
        count: number of tensors, including the first, that follow one another in the storage.
    """
    return first.as_strided((count, *first.shape), (first.numel(), *first.stride()))


def same_views(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return uninitialized tensors in one new buffer, which overlap in memory in the same way as the given tensors."""
    first = min(tensor.data_ptr() for tensor in tensors.values()) // _ALIGNED * _ALIGNED
    extent = {
        name: 1 + sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
        for name, tensor in tensors.items()
    }
    size = max(tensor.data_ptr() - first + extent[name] * tensor.element_size() for name, tensor in tensors.items())
    memory = torch.empty(size, dtype=torch.uint8, device=next(iter(tensors.values())).device)
    views = {}
    for name, tensor in tensors.items():
        start = tensor.data_ptr() - first
        region = memory[start : start + extent[name] * tensor.element_size()].view(tensor.dtype)
        views[name] = region.as_strided(tensor.shape, tensor.stride())
    return views


_PARTS = "_transaxle_parts"
_PART = "_transaxle_part"


@dataclass(frozen=True, slots=True)
class Part:
    """Describes which part of a whole tensor a rank's tensor is, for cuts that no DTensor can describe."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    positions: tuple[Intervals, ...]
    """For each dim, the positions of the whole tensor that this tensor-parallel rank has, in local order. If there is
    only one list of intervals although the whole tensor has several dims, the list is a range of row-major elements.
    """


def part_of(tensor: torch.Tensor) -> Part | None:
    """Return the `Part` with which a tensor was marked; None for a whole tensor, or for a DTensor whose placements
    describe its part.
    """
    part: Part | None = getattr(tensor, _PART, None)
    return part


def mark(tensor: torch.Tensor, part: Part | None) -> torch.Tensor:
    """Mark a tensor as the given part of a whole tensor, unless `part` is None; return the tensor itself."""
    if part is not None:
        setattr(tensor, _PART, part)
    return tensor


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor, if `tensor` is this rank's part."""
    part = part_of(tensor)
    return tuple(tensor.shape) if part is None else part.shape


def record_part(module: nn.Module, name: str, part: Part) -> None:
    """Record, in a module, that one of its parameters is only a part of a whole tensor.

    Args:
        module: module that contains the parameter.
        name: name of the parameter in the module.
        part: description of this rank's part.
    """
    module.__dict__.setdefault(_PARTS, {})[name] = part


def parts_in(module: nn.Module) -> Iterator[tuple[str, Part]]:
    """Yield (name, part) for the parameters directly in a module that were recorded as parts of whole tensors."""
    yield from module.__dict__.get(_PARTS, {}).items()


def mark_all(model: nn.Module) -> None:
    """Mark all recorded parts among a model's parameters again. Marking again is needed because sharding or
    materialising creates new parameters.
    """
    for module in model.modules():
        for name, part in parts_in(module):
            parameter = module._parameters.get(name)
            if parameter is not None:
                mark(parameter, part)


Cell = tuple[Intervals, ...]
"""For each dim, the single interval of positions that a shard of a `ShardGrid` has."""


class ShardGrid(torch.Tensor):
    """A tensor object with the shape and dtype of a whole tensor, which contains this rank's shards; it can only be
    loaded and saved.

    Attributes:
        positions: for each dim, the intervals that this rank has; every combination of one interval per dim is a shard.
        cells: tensors of the shards, each with as many dims as the whole tensor, in the order of `cells_of(positions)`.
        spare: whether a different rank has the same shards and saves them.
        padded: whether the first dim may be longer than in a checkpoint; the additional rows are padding.
    """

    positions: tuple[Intervals, ...]
    cells: tuple[torch.Tensor, ...]
    spare: bool
    padded: bool

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        positions: tuple[Intervals, ...],
        cells: Sequence[torch.Tensor],
        *,
        spare: bool = False,
        padded: bool = False,
    ) -> ShardGrid:
        """Create a grid; the attributes of the class document the arguments."""
        first = cells[0]
        grid: ShardGrid = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=first.dtype, device=first.device
        )
        grid.positions, grid.cells, grid.spare, grid.padded = positions, tuple(cells), spare, padded
        mark(grid, Part(tuple(shape), positions))
        return grid

    def iter_parts(self, name: str, shape: Sequence[int]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for the grid's shards, without padding rows that a tensor of the given shape lacks.

        Args:
            name: name of the grid.
            shape: shape of the tensor that is copied into the grid; if it equals the grid's shape, no rows are omitted.
        """
        for cell, part in zip(cells_of(self.positions), self.cells, strict=True):
            rows = count_inside(cell, shape) if self.padded else part.shape[0]
            if rows:
                yield cell_name(name, cell), part.narrow(0, 0, rows)

    def clear_beyond(self, shape: Sequence[int]) -> None:
        """Set the padding rows of the grid to zero: all rows that a tensor of this shape does not have."""
        with torch.no_grad():
            for cell, part in zip(cells_of(self.positions), self.cells, strict=True):
                part[count_inside(cell, shape) :].zero_()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub takes it for an ordinary method
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse every torch operation on a grid.

        Raises:
            Refused: with the code UNSUPPORTED, in every call.
        """
        message = f"this stands for a rank's shards of a tensor, and does not support {func}"
        raise refuse("UNSUPPORTED", message, hint="A sharded state dict can be given to tx.load and tx.save.")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # the values are not shown
        return f"ShardGrid({list(self.shape)}, {self.dtype}, {self.positions})"


def cells_of(positions: Sequence[Intervals]) -> Iterator[Cell]:
    """Yield every combination of one interval per dim; the interval of the last dim varies fastest."""
    return product(*([(interval,) for interval in intervals] for intervals in positions))


def cell_name(name: str, cell: Cell) -> str:
    """Return the name of the shard that begins at a cell's offsets, such as `weight[0, 128]`."""
    return f"{name}[{', '.join(str(start) for ((start, _),) in cell)}]"


def inside(cell: Cell, shape: Sequence[int]) -> Cell:
    """Limit a cell (one interval per dim) to the rows that a tensor of this shape has."""
    ((start, stop),) = cell[0]
    return (((min(start, shape[0]), min(stop, shape[0])),), *cell[1:])


def count_inside(cell: Cell, shape: Sequence[int]) -> int:
    """Return how many rows of a cell are inside a tensor of this shape."""
    ((start, stop),) = inside(cell, shape)[0]
    return stop - start


Positions = tuple[Intervals, ...]
"""For each dim, the intervals of a tensor's positions that a rank has, in the order of the rank's local tensor."""
_SHOWN = 8
"""Maximum number of ranks that a message lists."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How a tensor is divided over a device mesh; equal on all ranks of the mesh."""

    mesh: tuple[int, ...]
    """Number of ranks along each mesh dim."""
    ranks: tuple[int, ...]
    """Global ranks of the mesh, in row-major order."""
    cuts: tuple[tuple[int | None, ChunkRule], ...]
    """For each mesh dim: the index of the tensor's dim that is sharded along this mesh dim (None if the tensor is
    replicated), and the rule that divides the tensor's dim into chunks.
    """
    base: Positions | None = None
    """Positions of the tensor that the ranks of the mesh have together; None means the whole tensor."""
    apart: bool = False
    """Whether the rank stores a separate tensor for every combination of its intervals, as a `ShardGrid` does."""
    spare: bool = False
    """Whether a different rank has the same shard and saves it."""
    padded: bool = False
    """Whether the tensor may have more rows than a checkpoint; the additional rows are padding."""

    def positions(self, shape: tuple[int, ...]) -> Mapping[int, Positions]:
        """Return global rank -> positions that the rank has, for every rank of the mesh and a tensor of this shape."""
        positions: dict[int, Positions] = {}
        for number, rank in enumerate(self.ranks):
            remainder, coordinates = number, []
            for size in reversed(self.mesh):
                remainder, coordinate = divmod(remainder, size)
                coordinates.append(coordinate)
            dims = zip(self.cuts, self.mesh, reversed(coordinates), strict=True)
            mesh_cuts = [MeshCut(dim, size, coordinate, rule) for (dim, rule), size, coordinate in dims]
            positions[rank] = place(shape, mesh_cuts, self.base)
        return positions


def plain_placement(rank: int) -> Placement:
    """Return the placement of a plain tensor, which is completely on this rank."""
    return Placement((1,), (rank,), ((None, Replicated()),))


def placement_of(tensor: torch.Tensor, rank: int, name: str, numbers: Mapping[int, int] | None = None) -> Placement:
    """Return the placement of a tensor in a live model on the tensor's mesh.

    Args:
        tensor: a tensor or DTensor.
        rank: global rank of this process.
        name: name of the tensor, for error messages.
        numbers: global rank -> number that replaces it in the result; None means that global ranks are used.

    Raises:
        Refused: with the code UNSUPPORTED if a placement is `Partial`, or if a rank of the tensor's mesh is not in
            `numbers`.
    """
    part = part_of(tensor)
    base = None if part is None else part.positions
    if isinstance(tensor, ShardGrid):
        return replace(plain_placement(rank), base=base, apart=True, spare=tensor.spare, padded=tensor.padded)
    if not isinstance(tensor, DTensor):
        return replace(plain_placement(rank), base=base)
    mesh = tensor.device_mesh
    shape, ranks = _mesh_ranks(mesh)
    if numbers is not None:
        if outsiders := [str(rank) for rank in ranks if rank not in numbers]:
            message = f"ranks {', '.join(outsiders[:_SHOWN])} of its mesh are not in the process group"
            raise refuse("UNSUPPORTED", message, tensor=name, hint="Let all ranks of the mesh join the group.")
        ranks = tuple(numbers[rank] for rank in ranks)
    return Placement(shape, ranks, tuple(cut_of(p, name) for p in tensor.placements), base)


_MESH_RANKS: WeakKeyDictionary[DeviceMesh, tuple[tuple[int, ...], tuple[int, ...]]] = WeakKeyDictionary()
"""Mesh -> (its shape, its ranks). The values are cached because torch computes the ranks anew at each access, which
would double the time.
"""


def _mesh_ranks(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the number of ranks along each mesh dim, and all ranks in row-major order."""
    ranks_of_mesh = _MESH_RANKS.get(mesh)
    if ranks_of_mesh is None:
        ranks = mesh.mesh
        ranks_of_mesh = _MESH_RANKS[mesh] = tuple(ranks.shape), tuple(int(rank) for rank in ranks.flatten().tolist())
    return ranks_of_mesh


def local_parts(
    tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]] | None = None
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (tensor name, shard name, tensor) for this rank's shards, which are whole entries or the shards of shard
    grids.

    Args:
        tensors: name -> tensor or shard grid.
        shapes: name -> shape of the tensor that is copied into the tensor with this name; rows of a grid beyond that
            shape are omitted.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, ShardGrid):
            shape = tensor.shape if shapes is None else shapes[name]
            yield from ((name, part, local) for part, local in tensor.iter_parts(name, shape))
        else:
            yield name, name, tensor


def local_shape(positions: Positions) -> tuple[int, ...]:
    """Return the shape of a local tensor with these positions of a whole tensor."""
    return tuple(sum(stop - start for start, stop in intervals) for intervals in positions)


def elements(positions: Positions) -> int:
    """Return the number of elements of a local tensor with these positions."""
    return prod(local_shape(positions))


def cut_of(placement: TorchPlacement, name: str) -> tuple[int | None, ChunkRule]:
    """Return the index of the tensor dim that a torch placement shards (None if it replicates), and the chunk rule that
    divides the dim.

    Args:
        placement: placement on one mesh dim.
        name: name of the tensor, for error messages.

    Raises:
        Refused: with the code UNSUPPORTED if the placement is `Partial`.
    """
    if isinstance(placement, _StridedShard):
        return placement.dim, StridedShard(int(placement.split_factor))
    if placement.is_shard():
        return placement.dim, Shard()  # type: ignore[attr-defined]  # `is_shard` does not narrow
    if placement.is_replicate():
        return None, Replicated()
    message = f"its placement is {placement}: each rank holds a term of a sum, not a part of the tensor"
    raise refuse("UNSUPPORTED", message, tensor=name, hint="Redistribute it to Replicate() or Shard(dim) first.")


def positions_of(parameter: torch.Tensor) -> tuple[Intervals, ...]:
    """Return, for each dim of a whole parameter, the positions that this rank has, in local order."""
    if not isinstance(parameter, DTensor):
        return tuple(map(whole, parameter.shape))
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # only ranks of the mesh have a DTensor parameter
    rules = (cut_of(placement, "") for placement in parameter.placements)
    steps = zip(rules, mesh.shape, coordinate, strict=True)
    return place(tuple(parameter.shape), [MeshCut(dim, size, at, rule) for (dim, rule), size, at in steps])


def take(values: torch.Tensor, positions: Sequence[Intervals]) -> torch.Tensor:
    """Select positions of a whole tensor, dim by dim; if all positions are selected, the tensor itself is returned."""
    for dim, intervals in enumerate(positions):
        if intervals != whole(values.shape[dim]):
            values = along(values, dim, intervals)
    return values


def along(values: torch.Tensor, dim: int, intervals: Intervals) -> torch.Tensor:
    """Return a copy of the positions along one dim that are in the intervals, in the order of the intervals."""
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
    """Return the safetensors code of a torch dtype, or torch's name of the dtype in capitals if the dtype has no such
    code.
    """
    return _CODES.get(dtype) or str(dtype).removeprefix("torch.").upper()


def torch_dtype(code: str, *, tensor: str | None = None) -> torch.dtype:
    """Return the torch dtype with a safetensors code.

    Raises:
        Refused: with the code UNSUPPORTED if torch has no such dtype; the error names the tensor `tensor`.
    """
    if code not in _TORCH:
        raise refuse("UNSUPPORTED", f"torch has no dtype for {code}", tensor=tensor)
    dtype: torch.dtype = _TORCH[code]
    return dtype


Device: TypeAlias = torch.device | str | int
"""Type of an argument for a device: a `torch.device`, its name ("cuda:1"), or the index of an accelerator."""
Ranks: TypeAlias = dist.ProcessGroup | DeviceMesh
"""Type of an argument for ranks that work together: a process group or a device mesh. A mesh of several dims must
contain all ranks.
"""

_TORCH_NAMES = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64",
    "f8_e4m3": "float8_e4m3fn", "f8_e5m2": "float8_e5m2", "f8_e8m0": "float8_e8m0fnu",
}  # fmt: skip
"""Short name of a dtype -> torch's name."""


def read_dtype(argument: str, value: object) -> torch.dtype:
    """Return the dtype that was passed as an argument, as a `torch.dtype` or by name.

    Raises:
        TypeError: if the value is neither a `torch.dtype` nor a string.
        ValueError: if torch has no dtype with that name.
    """
    if isinstance(value, torch.dtype):
        return value
    name = str(read_float_type(argument, value)).lower() if value is not None else None
    if name is None:
        raise wrong_type(argument, 'an element type such as "bf16" or torch.bfloat16', value)
    dtype = getattr(torch, _TORCH_NAMES.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f'{argument} must be an element type such as "bf16" or torch.bfloat16; got {value!r}')
    return dtype


def read_optional_dtype(argument: str, value: DType | None) -> torch.dtype | None:
    """Return the dtype that was passed as an argument, or None if the value is None; raises the errors of
    `read_dtype`.
    """
    return None if value is None else read_dtype(argument, value)


def read_device(argument: str, value: Device | None) -> torch.device | None:
    """Return the device that was passed as an argument, or None if the value is None.

    Raises:
        TypeError: if the value is neither a `torch.device` nor the name or number of a device.
        ValueError: if torch has no device with that name.
    """
    if value is None or isinstance(value, torch.device):
        return value
    accepted = 'a device such as "cpu", "cuda:1" or torch.device("meta")'
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise wrong_type(argument, accepted, value)
    try:
        return torch.device(value)
    except RuntimeError:
        raise ValueError(f"{argument} must be {accepted}; got {value!r}") from None


def read_group(argument: str, value: Any) -> dist.ProcessGroup | None:
    """Return the process group that was passed as an argument; None means all ranks.

    Raises:
        TypeError: if the value is neither a process group nor a mesh.
        ValueError: if this rank is not in the group, or `value` is a mesh of several dims that lacks some ranks.
    """
    if value is None or isinstance(value, dist.ProcessGroup):
        return value
    if value is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{argument} is a process group that this rank does not belong to; only its members may call this"
        )
    if not isinstance(value, DeviceMesh):
        raise wrong_type(argument, "a ProcessGroup, a DeviceMesh of one dim, or None for all ranks", value)
    if value.ndim == 1:
        return value.get_group()
    if value.size() == dist.get_world_size():
        return None
    sizes = list(value.mesh.shape)
    raise ValueError(f'{argument} must be a mesh of one dim, such as mesh["dp"]; got one of {value.ndim} dims {sizes}')


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of DDP and `torch.compile`.

    An FSDP1 wrapper is kept, because it has flattened the parameters, and only the wrapper's state dict contains the
    model's parameters.
    """
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else model._modules.get(COMPILED)
        if inner is None:
            return model
        model = inner


def innermost(model: nn.Module) -> nn.Module:
    """Return the module that the user wrote, without any wrapper; use the result only to look at its class and
    attributes.
    """
    while True:
        model = unwrap(model)
        inner = [module for name in (FSDP1, CHECKPOINTED) if (module := model._modules.get(name)) is not None]
        if not inner:
            return model
        model = inner[0]
