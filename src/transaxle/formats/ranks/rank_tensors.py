"""The part of a tensor that one rank saved with `torch.save`: a plain tensor, a DTensor, or FSDP1's ShardedTensor.

A pickled DTensor records the rank's local tensor, the whole tensor's shape and strides, a device mesh, and one
placement for each mesh dim. This module computes from the record which boxes of the whole tensor the local tensor
consists of. Each mesh dim cuts the tensor by a chunk rule of `axes.geometry`. A pickled ShardedTensor lists its boxes
itself.

torch has changed the pickled form of a device mesh. Up to release 2.9, a pickled mesh contains a tensor of ranks
(`mesh`). Since then, it contains a list of all ranks (`_rank_map`) and a layout (sizes and strides for each mesh dim),
which selects the ranks of the mesh from the list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, NamedTuple

from transaxle.axes.geometry import ChunkRule, Interval, MeshCut, Replicated, Shard, StridedShard, place
from transaxle.errors import TransaxleError
from transaxle.formats.catalog import Entry, Shape, elements_shape
from transaxle.formats.deepspeed.spread import ShardBlock
from transaxle.formats.pickled.descriptors import NOTHING, DType, Object, TensorRef
from transaxle.formats.torch_file.saved import ViewFault
from transaxle.formats.torch_file.saved import place as place_tensor

_MAX_RANKS = 1 << 20
"""Largest number of ranks in a device mesh."""
_REPLICATE, _PARTIAL, _STRIDED = "Replicate", "Partial", "_StridedShard"
_RESHAPED = "Save it with a Shard or Replicate placement for each mesh dim: redistribute() it first."

_MISNAMED = "Copy each rank's file under its own name."

ReadRanks = Callable[[object], Sequence[int]]
"""`read(tensor)` returns the integers in a pickled tensor: the ranks of a device mesh."""


class Mesh(NamedTuple):
    """A device mesh: an array of ranks."""

    ranks: tuple[int, ...]
    """All ranks of the mesh, in row-major order."""
    shape: Shape
    """Number of ranks along each mesh dim."""

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the index of a rank along each mesh dim; None for a rank outside the mesh."""
        if rank not in self.ranks:
            return None
        index, coordinate = self.ranks.index(rank), []
        for size in reversed(self.shape):
            index, position = divmod(index, size)
            coordinate.append(position)
        return tuple(reversed(coordinate))


class Cut(NamedTuple):
    """How one mesh dim cuts a tensor: the placement of that mesh dim."""

    mesh_dim: int
    dim: int | None
    """Number of the tensor's dim that is cut; None if the tensor is replicated over this mesh dim."""
    rule: ChunkRule


@dataclass(frozen=True, slots=True)
class RankTensor:
    """The part of one tensor that one rank has saved."""

    entry: Entry
    """The local tensor, with the place of its bytes in the rank's file."""
    shape: Shape
    """Shape of the whole tensor, in elements."""
    blocks: tuple[ShardBlock, ...]
    """The non-empty boxes of the whole tensor that are in the local tensor."""
    mesh: Mesh | None = None
    """Mesh of a DTensor; None for a plain tensor and for a ShardedTensor."""
    cuts: tuple[Cut, ...] = ()
    """Cuts of a DTensor, in the order in which they are applied."""
    is_whole: bool = False
    """Whether this is a plain tensor, of which the rank has every element."""


@dataclass(frozen=True, slots=True)
class RankTensorReader:
    """Reads the descriptions of tensors in the file of one rank.

    Args:
        file: name of the rank's file.
        rank: number of the rank.
        read_ranks: function that reads the ranks of a device mesh from a pickled tensor.
    """

    file: str
    rank: int
    read_ranks: ReadRanks
    _meshes: dict[int, Mesh] = field(default_factory=dict)
    """`id` of a pickled mesh -> the parsed mesh. All tensors of a file share one pickled mesh."""

    def read(self, name: str, value: TensorRef | Object) -> RankTensor:
        """Return the rank's part of a tensor.

        Args:
            name: name of the tensor.
            value: description of the tensor in the rank's pickle.

        Raises:
            ViewFault: with the code CORRUPT if the description contradicts itself or the rank; with the code
                UNSUPPORTED for tensors of further kinds, and for DTensors with a `Partial` placement.
        """
        kind = value.cls.name if isinstance(value, Object) else ""
        if kind == "DTensor":
            return self._read_dtensor(name, value)
        if kind == "ShardedTensor":
            return _read_sharded(name, value, self.file)
        entry = _local(name, value, self.file)
        whole = ShardBlock((0,) * len(entry.shape), (0,) * len(entry.shape), entry.shape)
        return RankTensor(entry, entry.shape, (whole,) if whole.size else (), is_whole=True)

    def _read_dtensor(self, name: str, value: Any) -> RankTensor:
        state = attributes(value)
        entry = _local(name, state.get("_local_tensor"), self.file)
        spec = attributes(_object(state.get("_spec"), "_spec"))
        meta = _object(spec.get("tensor_meta"), "tensor_meta").args
        if len(meta) != 3 or not isinstance(meta[2], DType) or not _is_shape(meta[0]):
            raise ViewFault("CORRUPT", "its shape and dtype are missing")
        shape = elements_shape(tuple(meta[0]), meta[2].code)
        if meta[2].code != entry.dtype:
            raise ViewFault("CORRUPT", f"it is {meta[2].name}, and the rank's part is {entry.dtype}")
        pickled_mesh = _object(spec.get("mesh") or spec.get("device_mesh"), "mesh")
        mesh = self._meshes.get(id(pickled_mesh))
        if mesh is None:
            mesh = self._meshes[id(pickled_mesh)] = _mesh(pickled_mesh, self.read_ranks)
        coordinate = self._coordinate(mesh, attributes(pickled_mesh).get("_coordinate_on_dim"))
        cuts = _cuts(spec, mesh, len(shape))
        applied = [MeshCut(cut.dim, mesh.shape[cut.mesh_dim], coordinate[cut.mesh_dim], cut.rule) for cut in cuts]
        try:
            positions = place(shape, applied)
        except TransaxleError as error:
            raise ViewFault("CORRUPT", error.refusals[0].message) from None
        local = tuple(sum(stop - start for start, stop in intervals) for intervals in positions)
        if local != entry.shape:
            message = f"by its placements, rank {self.rank} has {list(local)} of {list(shape)}"
            raise ViewFault("CORRUPT", f"{message}; its file has {list(entry.shape)}")
        return RankTensor(entry, shape, tuple(_blocks(positions)), mesh, cuts)

    def _coordinate(self, mesh: Mesh, recorded: object) -> tuple[int, ...]:
        """Return the coordinates of this file's rank in a mesh.

        Args:
            mesh: the device mesh of a DTensor.
            recorded: coordinates of the rank that saved the file, as the file records them; None if the file does not
                record them.
        """
        coordinate = mesh.coordinate(self.rank)
        if coordinate is None:
            message = f"its device mesh has the ranks {_list_ranks(mesh.ranks)}, but not {self.rank}, this file's rank"
            raise ViewFault("CORRUPT", message, _MISNAMED)
        if isinstance(recorded, list | tuple) and tuple(recorded) != coordinate:
            message = (
                f"the rank at {list(recorded)} of its device mesh saved it; rank {self.rank} is at {list(coordinate)}"
            )
            raise ViewFault("CORRUPT", message, _MISNAMED)
        return coordinate


def _local(name: str, value: object, file: str) -> Entry:
    if not isinstance(value, TensorRef | Object):
        raise ViewFault("CORRUPT", "its local tensor is missing")
    entry, repeated = place_tensor(name, value, file)
    if repeated:
        raise ViewFault("CORRUPT", "the strides of its local tensor use elements more than once")
    return entry


def _blocks(positions: Sequence[Sequence[Interval]]) -> list[ShardBlock]:
    """Return the boxes that a local tensor consists of, given the intervals of the whole tensor that it has along each
    dim.
    """
    offsets = []
    for intervals in positions:
        starts = [sum(stop - start for start, stop in intervals[:number]) for number in range(len(intervals))]
        offsets.append([(*interval, at) for interval, at in zip(intervals, starts, strict=True)])
    blocks = (
        ShardBlock(
            tuple(start for start, _, _ in box),
            tuple(at for _, _, at in box),
            tuple(stop - start for start, stop, _ in box),
        )
        for box in product(*offsets)
    )
    return [block for block in blocks if block.size]


def _cuts(spec: Mapping[str, Any], mesh: Mesh, dims: int) -> tuple[Cut, ...]:
    """Return the cuts of a DTensor, in the order in which they are applied."""
    placements = spec.get("placements")
    if not isinstance(placements, list | tuple) or len(placements) != len(mesh.shape):
        raise ViewFault("CORRUPT", f"it needs a placement for each of the {len(mesh.shape)} dims of its device mesh")
    cuts = [
        _cut(number, _object(each, "placements"), mesh.shape[number], dims) for number, each in enumerate(placements)
    ]
    strided = any(isinstance(cut.rule, StridedShard) for cut in cuts)
    return tuple(cuts) if strided else tuple(_in_order(cuts, spec.get("shard_order")))


def _in_order(cuts: Sequence[Cut], shard_order: object) -> list[Cut]:
    """Return cuts in the order that the pickle records; if the pickle records none, the first mesh dim cuts first."""
    order: list[int] = []
    for item in shard_order if isinstance(shard_order, list | tuple) else ():
        entry = _object(item, "shard_order").args
        if len(entry) != 2 or not isinstance(entry[1], list | tuple):
            raise ViewFault("CORRUPT", "its shard order is malformed")
        order += [number for number in entry[1] if type(number) is int]
    cutting = sorted(cut.mesh_dim for cut in cuts if cut.dim is not None)
    if order and sorted(order) != cutting:
        raise ViewFault("CORRUPT", f"its shard order names the mesh dims {order}; by its placements, {cutting} cut it")
    return (
        sorted(cuts, key=lambda cut: order.index(cut.mesh_dim) if cut.mesh_dim in order else -1)
        if order
        else list(cuts)
    )


def _cut(mesh_dim: int, placement: Object, size: int, dims: int) -> Cut:
    kind, state = placement.cls.name, attributes(placement)
    if kind == _REPLICATE or (kind == _PARTIAL and size == 1):
        return Cut(mesh_dim, None, Replicated())
    if kind == _PARTIAL:
        raise ViewFault("UNSUPPORTED", f"mesh dim {mesh_dim} holds partial sums of it, not parts", _RESHAPED)
    dim, factor = state.get("dim", *placement.args[:1]), state.get("split_factor", 1)
    if kind not in (_STRIDED, "Shard"):
        raise ViewFault("UNSUPPORTED", f"mesh dim {mesh_dim} has the placement {placement.cls}", _RESHAPED)
    if type(dim) is not int or not -dims <= dim < dims or type(factor) is not int or not 0 < factor <= _MAX_RANKS:
        raise ViewFault("CORRUPT", f"mesh dim {mesh_dim} cuts dim {dim!r} of a tensor of {dims} dims")
    return Cut(mesh_dim, dim % dims, StridedShard(factor) if kind == _STRIDED else Shard())


def _mesh(mesh: Object, read_ranks: ReadRanks) -> Mesh:
    state = attributes(mesh)
    if "_rank_map" not in state:
        tensor = state.get("mesh")
        shape = tensor.shape if isinstance(tensor, TensorRef) else ()
        return _check_mesh(Mesh(tuple(read_ranks(tensor)), tuple(shape)))
    ranks = read_ranks(state["_rank_map"])
    axes = _axes(_object(state.get("_layout"), "_layout"))
    if prod(size for sizes, _ in axes for size in sizes) > _MAX_RANKS:
        raise ViewFault("CORRUPT", "its device mesh has more ranks than any job")
    indices = [0]
    for sizes, strides in axes:
        for size, stride in zip(sizes, strides, strict=True):
            indices = [index + position * stride for index in indices for position in range(size)]
    # If a mesh was sliced out of a larger mesh, several meshes of the same layout exist side by side in the list of all
    # ranks. The rank belongs to one of these meshes. The layout describes the first of them; the offset of the rank's
    # mesh follows from the rank's coordinates.
    if not indices or max(indices) >= len(ranks):
        raise ViewFault("CORRUPT", "the layout of its device mesh names more ranks than there are")
    shape = tuple(prod(sizes) for sizes, _ in axes)
    rank, coordinate = state.get("_rank"), state.get("_coordinate_on_dim")
    offset = _offset(ranks, axes, rank, coordinate) if type(rank) is int else 0
    if max(indices) + offset >= len(ranks):
        raise ViewFault("CORRUPT", "its device mesh names more ranks than there are")
    return _check_mesh(Mesh(tuple(ranks[index + offset] for index in indices), shape))


def _offset(ranks: Sequence[int], axes: Sequence[tuple[Shape, Shape]], rank: int, coordinate: object) -> int:
    """Return the position, in the list of all ranks, of the first rank of the mesh; the mesh is the one that contains
    `rank`.
    """
    if rank not in ranks or not _is_shape(coordinate) or len(coordinate) != len(axes):  # type: ignore[arg-type]
        return 0
    at = ranks.index(rank)
    for (sizes, strides), position in zip(axes, coordinate, strict=True):  # type: ignore[call-overload]
        for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
            position, inner = divmod(position, size)
            at -= inner * stride
    return max(at, 0)


def _axes(layout: Object) -> list[tuple[Shape, Shape]]:
    """Return the sizes and the strides of each mesh dim in a pickled layout."""
    state = attributes(layout)
    if "axes" in state:
        axes = [attributes(_object(axis, "axes")) for axis in _sequence(state["axes"])]
        pairs = [(axis.get("shape"), axis.get("stride")) for axis in axes]
    else:
        pairs = list(zip(_sequence(state.get("shape")), _sequence(state.get("stride")), strict=False))
    flat = [tuple((part,) if type(part) is int else part for part in pair) for pair in pairs]
    if any(not _is_shape(part) for pair in flat for part in pair) or any(len(a) != len(b) for a, b in flat):  # type: ignore[arg-type]
        raise ViewFault("CORRUPT", "the layout of its device mesh is malformed")
    return [(tuple(sizes), tuple(strides)) for sizes, strides in flat]  # type: ignore[arg-type]


def _check_mesh(mesh: Mesh) -> Mesh:
    if len(mesh.ranks) != prod(mesh.shape) or len(set(mesh.ranks)) != len(mesh.ranks):
        raise ViewFault(
            "CORRUPT", f"its device mesh of shape {list(mesh.shape)} has the ranks {_list_ranks(mesh.ranks)}"
        )
    return mesh


def _read_sharded(name: str, value: Any, file: str) -> RankTensor:
    """Read FSDP1's ShardedTensor, which lists the boxes that this rank has (possibly none), each with a tensor."""
    fields = value.state
    if not isinstance(fields, tuple) or len(fields) < 2:
        raise ViewFault("CORRUPT", "its list of shards is missing")
    shards = _sequence(fields[0])
    metadata = attributes(_object(fields[1], "metadata"))
    size = metadata.get("size")
    properties = _object(metadata.get("tensor_properties"), "tensor_properties").state
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not _is_shape(size) or not isinstance(dtype, DType):
        raise ViewFault("CORRUPT", "its shape and dtype are missing")
    if len(shards) > 1:
        raise ViewFault("UNSUPPORTED", f"this rank has {len(shards)} shards of it", "Save it with torch's DCP.")
    shape = elements_shape(tuple(size), dtype.code)  # type: ignore[arg-type]
    if not shards:
        return RankTensor(Entry(name, dtype.code, (0,) * len(shape), ()), shape, ())
    shard = attributes(_object(shards[0], "shards"))
    entry = _local(name, shard.get("tensor"), file)
    box = attributes(_object(shard.get("metadata"), "metadata"))
    start, sizes = box.get("shard_offsets"), box.get("shard_sizes")
    if not _is_shape(start) or len(start) != len(shape) or tuple(sizes or ()) != entry.shape:  # type: ignore[arg-type]
        raise ViewFault("CORRUPT", f"its shard is described as {sizes!r}; the rank's part is {list(entry.shape)}")
    if entry.dtype != dtype.code:
        raise ViewFault("CORRUPT", f"it is {dtype.name}, and the rank's part is {entry.dtype}")
    block = ShardBlock(tuple(start), (0,) * len(shape), entry.shape)  # type: ignore[arg-type]
    return RankTensor(entry, shape, (block,) if block.size else ())


def attributes(value: Object) -> Mapping[str, Any]:
    """Return the attributes of a pickled object: its dict, and its slots."""
    state = value.state
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    merged: dict[str, Any] = {}
    for part in parts:
        if isinstance(part, dict):
            merged.update(part)
        elif part is not None and part is not NOTHING:
            raise ViewFault("CORRUPT", f"the state of a {value.cls} is malformed")
    return merged


def _object(value: object, field_name: str) -> Object:
    if not isinstance(value, Object):
        raise ViewFault("CORRUPT", f"its {field_name} is malformed")
    return value


def _sequence(value: object) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ViewFault("CORRUPT", "a list of its parts is malformed")
    return value


def _is_shape(value: object) -> bool:
    return isinstance(value, list | tuple) and all(type(size) is int and size >= 0 for size in value)


def _list_ranks(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]}"
