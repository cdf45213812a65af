"""The part of a tensor that one rank saved with `torch.save`: a plain tensor, a DTensor, or FSDP1's ShardedTensor.

A pickled DTensor records the rank's local tensor, the whole tensor's shape and strides, a device mesh, and one
placement for each mesh dim. This module computes from the record which boxes of the whole tensor the local tensor
consists of. Each mesh dim cuts the tensor by a chunk rule of `axes.geometry`. A pickled ShardedTensor lists its boxes
itself.

torch has changed the pickled form of a device mesh. Up to release 2.9, a pickled mesh contains a tensor of ranks
(`mesh`), which may be a strided view. Since release 2.10, it contains a list of all ranks (`_rank_map`) and a layout
(sizes and strides of all mesh dims), which selects the ranks of the mesh from the list. Up to release 2.12 the layout
consists of two tuples (`shape`, `stride`), since release 2.13 of one pair for each mesh dim (`axes`).

A rank's pickle is untrusted: the number of ranks in its meshes, and the number of boxes of its tensors, are limited.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from transaxle.axes.geometry import ChunkRule, MeshCut, Replicated, Shard, StridedShard, count_positions, place, whole
from transaxle.errors import TransaxleError
from transaxle.formats.catalog import Entry, Shape, elements_shape
from transaxle.formats.deepspeed.spread import ShardBlock, blocks_at
from transaxle.formats.pickled.builders import MAX_DIMS
from transaxle.formats.pickled.descriptors import NOTHING, DType, Object, TensorRef
from transaxle.formats.ranks.names import ONE_SAVE
from transaxle.formats.torch_file.saved import ViewFault
from transaxle.formats.torch_file.saved import place as place_tensor

MAX_RANKS = 1 << 20
"""Largest number of ranks in a device mesh."""
_MAX_MESH_DIMS = 32
_MAX_RANKS_OF_MESHES = 1 << 22
"""Largest number of ranks in all device meshes of one file together."""
_MAX_BLOCKS, _MAX_BLOCKS_OF_FILE = 1 << 14, 1 << 20
"""Largest number of boxes of one tensor, and of all tensors of one file together, that `_StridedShard` may cut."""
_MAX_SIZE = 2**63 - 1
_MAX_LAYOUT_ITEMS, _MAX_LAYOUT_DEPTH = 32, 3
_REPLICATE, _STRIDED = "Replicate", "_StridedShard"
_PARTIALS = ("Partial", "_Partial")
_RESHAPED = "Save it with a Shard or Replicate placement for each mesh dim: redistribute() it first."
WHOLE, SHARDED = "whole", "sharded"
"""How ranks share a tensor that is no DTensor: each has all of it, or the boxes that a ShardedTensor lists."""
_MISNAMED = "Copy each rank's file under its own name."
_FLAT_NAMES = ("_flat_param", "flat_param")
"""Last segments of the names under which FSDP1 keeps flat parameters."""
_SHARDED = "Save with FSDP's StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT, or with torch.distributed.checkpoint."

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


class _Place(NamedTuple):
    """A device mesh, and the coordinates in it of the rank that wrote a file."""

    mesh: Mesh
    coordinate: tuple[int, ...]
    """Index of the rank along each mesh dim."""
    ranks: frozenset[int]
    """The ranks of the mesh; meshes with the same ranks share one set."""


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
    mesh_ranks: frozenset[int] | None = None
    """Ranks of a DTensor's mesh; None for a plain tensor and for a ShardedTensor. Meshes with the same ranks share one
    set.
    """
    is_whole: bool = False
    """Whether this is a plain tensor, of which the rank has every element."""
    spread: Hashable = SHARDED
    """How ranks share the tensor: the mesh and the cuts of a DTensor; `WHOLE` or `SHARDED` for other tensors."""


@dataclass(slots=True)
class RankTensorReader:
    """Reads the descriptions of tensors in the file of one rank.

    Args:
        file: name of the rank's file.
        rank: number of the rank.
        count: number of files, which is the number of ranks.
        read_ranks: function that reads the ranks of a device mesh from a pickled tensor.
        rank_sets: ranks of a mesh, in order -> set of these ranks; the readers of all files share these sets.
    """

    file: str
    rank: int
    count: int
    read_ranks: ReadRanks
    rank_sets: dict[tuple[int, ...], frozenset[int]]
    _spreads: dict[Hashable, Hashable] = field(default_factory=dict)
    _places: dict[int, _Place] = field(default_factory=dict)
    """`id` of a pickled mesh -> the parsed mesh. All tensors of a file share one pickled mesh."""
    _rank_maps: dict[int, Sequence[int]] = field(default_factory=dict)
    """`id` of a pickled tensor of ranks -> the ranks."""
    _ranks_left: int = _MAX_RANKS_OF_MESHES
    _blocks_left: int = _MAX_BLOCKS_OF_FILE

    def read(self, name: str, value: TensorRef | Object) -> RankTensor:
        """Return the rank's part of a tensor.

        Args:
            name: name of the tensor.
            value: description of the tensor in the rank's pickle.

        Raises:
            ViewFault: with the code CORRUPT if the description contradicts itself or the rank; with the code
                UNSUPPORTED for tensors of further kinds, and for DTensors with a `Partial` placement.
        """
        if name.rpartition(".")[2] in _FLAT_NAMES:
            message = "it is a flat parameter of FSDP1, and the file does not say which parameters it consists of"
            raise ViewFault("UNSUPPORTED", message, _SHARDED)
        kind = value.cls.name if isinstance(value, Object) else ""
        if kind == "DTensor":
            return self._read_dtensor(name, value)
        if kind == "ShardedTensor":
            self._check_group(value)
            return _read_sharded(name, value, self.file)
        entry = _local(name, value, self.file)
        return RankTensor(entry, entry.shape, blocks_at([*map(whole, entry.shape)]), is_whole=True, spread=WHOLE)

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
        mesh, coordinate, mesh_ranks = self._place(_object(spec.get("mesh"), "mesh"))
        cuts = _cuts(spec, mesh, len(shape))
        self._charge_blocks(cuts)
        applied = [MeshCut(cut.dim, mesh.shape[cut.mesh_dim], coordinate[cut.mesh_dim], cut.rule) for cut in cuts]
        try:
            positions = place(shape, applied)
        except TransaxleError as error:
            raise ViewFault("CORRUPT", error.refusals[0].message) from None
        local = tuple(map(count_positions, positions))
        if local != entry.shape:
            message = f"by its placements, rank {self.rank} has {list(local)} of {list(shape)}"
            raise ViewFault("CORRUPT", f"{message}; its file has {list(entry.shape)}")
        return RankTensor(entry, shape, blocks_at(positions), mesh_ranks, spread=self._spread(mesh, cuts))

    def _spread(self, mesh: Mesh, cuts: Sequence[Cut]) -> Hashable:
        """Return how a tensor is shared; tensors that are shared alike get one object."""
        return self._spreads.setdefault((id(mesh), tuple(cuts)), (mesh, tuple(cuts)))

    def _charge_blocks(self, cuts: Sequence[Cut]) -> None:
        """Refuse cuts that divide a tensor, or all tensors of the file together, into too many boxes."""
        count = prod(cut.rule.split_factor for cut in cuts if isinstance(cut.rule, StridedShard))
        self._blocks_left -= count - 1
        if count > _MAX_BLOCKS or self._blocks_left < 0:
            raise ViewFault("UNSUPPORTED", f"its placements divide it into {count} boxes on each rank", _RESHAPED)

    def _place(self, pickled: Object) -> _Place:
        """Return a mesh, and the coordinates in it of this file's rank."""
        mesh_place = self._places.get(id(pickled))
        if mesh_place is not None:
            return mesh_place
        state = attributes(pickled)
        saved_by = self._rank_of_save(state)  # first, since a mesh is read as one of this file's rank
        if saved_by not in (None, self.rank):
            raise self._name_fault(saved_by)
        mesh = self._read_mesh(state)
        coordinate = mesh.coordinate(self.rank)
        if coordinate is None:
            message = f"its device mesh has the ranks {_list_ranks(mesh.ranks)}, but not {self.rank}, this file's rank"
            raise ViewFault("CORRUPT", message, _MISNAMED)
        recorded = state.get("_coordinate_on_dim")
        if isinstance(recorded, list | tuple) and tuple(recorded) != coordinate:
            message = (
                f"the rank at {list(recorded)} of its device mesh saved it; rank {self.rank} is at {list(coordinate)}"
            )
            raise ViewFault("CORRUPT", message, _MISNAMED)
        ranks = self.rank_sets.setdefault(mesh.ranks, frozenset(mesh.ranks))
        mesh_place = self._places[id(pickled)] = _Place(mesh, coordinate, ranks)
        return mesh_place

    def _name_fault(self, saved_by: int | None) -> ViewFault:
        message = f"rank {saved_by} saved it, but the file has the name of rank {self.rank}"
        return ViewFault("CORRUPT", message, _MISNAMED)

    def _read_mesh(self, state: Mapping[str, Any]) -> Mesh:
        if "_rank_map" not in state:
            tensor = state.get("mesh")
            shape = tensor.shape if isinstance(tensor, TensorRef) else ()
            return _check_mesh(Mesh(tuple(self._rank_map(tensor)), tuple(shape)))
        ranks, axes = self._rank_map(state["_rank_map"]), _axes(state)
        self._charge_ranks(prod(size for sizes, _ in axes for size in sizes))
        indices = _indices(axes)
        # If a mesh was sliced out of a larger mesh, several meshes of the same layout exist side by side in the list of
        # all ranks. The rank belongs to one of these meshes. The layout describes the first of them; the offset of the
        # rank's mesh follows from the rank's coordinates.
        offset = _offset(ranks, axes, self.rank, state.get("_coordinate_on_dim"))
        if max(indices) + offset >= len(ranks):
            raise ViewFault("CORRUPT", "the layout of its device mesh names more ranks than there are")
        shape = tuple(prod(sizes) for sizes, _ in axes)
        return _check_mesh(Mesh(tuple(ranks[index + offset] for index in indices), shape))

    def _rank_of_save(self, state: Mapping[str, Any]) -> int | None:
        """Return the rank that saved a mesh; None if the file does not record the rank.

        torch 2.10 records only the rank's coordinate, in the mesh and in the mesh out of which it was sliced.
        """
        rank = state.get("_rank")
        if type(rank) is int or "_rank_map" not in state:
            return rank if type(rank) is int else None
        root = state.get("_root_mesh")
        state = attributes(root) if isinstance(root, Object) else state
        coordinate = state.get("_coordinate_on_dim")
        ranks, axes = self._rank_map(state.get("_rank_map")), _axes(state)
        if not _is_shape(coordinate) or len(coordinate) != len(axes):  # type: ignore[arg-type]
            return None
        index = _index(axes, coordinate)  # type: ignore[arg-type]
        return ranks[index] if index < len(ranks) else None

    def _rank_map(self, tensor: object) -> Sequence[int]:
        ranks = self._rank_maps.get(id(tensor))
        if ranks is None:
            ranks = self._rank_maps[id(tensor)] = self.read_ranks(tensor)
            self._charge_ranks(len(ranks))
        return ranks

    def _charge_ranks(self, count: int) -> None:
        """Refuse a mesh with too many ranks, and a file whose meshes together have too many ranks."""
        self._ranks_left -= count
        if count > MAX_RANKS or self._ranks_left < 0:
            raise ViewFault("CORRUPT", "its device mesh has more ranks than any job")

    def _check_group(self, value: Any) -> None:
        """Refuse a ShardedTensor that was saved by a different rank, or in a job with a different number of ranks."""
        fields = value.state
        group = fields[2] if isinstance(fields, tuple) and len(fields) > 2 else None
        state = attributes(group) if isinstance(group, Object) else {}
        rank, count = state.get("global_rank"), state.get("global_world_size")
        if type(rank) is int and rank != self.rank:
            raise self._name_fault(rank)
        if type(count) is int and count != self.count:
            raise ViewFault("CORRUPT", f"a job of {count} ranks saved it, and there are {self.count} files", ONE_SAVE)


def _local(name: str, value: object, file: str) -> Entry:
    if not isinstance(value, TensorRef | Object):
        raise ViewFault("CORRUPT", "its local tensor is missing")
    entry, repeated = place_tensor(name, value, file)
    if repeated:
        raise ViewFault("CORRUPT", "the strides of its local tensor use elements more than once")
    return entry


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
    order: list[tuple[int | None, int]] = []
    for item in shard_order if isinstance(shard_order, list | tuple) else ():
        entry = _object(item, "shard_order").args
        is_entry = len(entry) == 2 and type(entry[0]) is int and isinstance(entry[1], list | tuple)
        if not is_entry or len(entry[1]) > len(cuts):
            raise ViewFault("CORRUPT", "its shard order is malformed")
        order += [(entry[0], number) for number in entry[1] if type(number) is int]
        if len(order) > len(cuts):
            raise ViewFault("CORRUPT", "its shard order names a mesh dim twice")
    if not order:
        return list(cuts)
    cutting = sorted((cut.dim, cut.mesh_dim) for cut in cuts if cut.dim is not None)
    if len(order) != len(cutting) or set(order) != set(cutting):
        message = f"by its shard order, tensor dims are cut by mesh dims as {order}; by its placements, as {cutting}"
        raise ViewFault("CORRUPT", message)
    positions = {mesh_dim: number for number, (_, mesh_dim) in enumerate(order)}
    return sorted(cuts, key=lambda cut: positions.get(cut.mesh_dim, -1))


def _cut(mesh_dim: int, placement: Object, size: int, dims: int) -> Cut:
    kind, state = placement.cls.name, attributes(placement)
    if kind == _REPLICATE or (kind in _PARTIALS and size == 1):
        return Cut(mesh_dim, None, Replicated())
    if kind in _PARTIALS:
        raise ViewFault("UNSUPPORTED", f"mesh dim {mesh_dim} holds partial sums of it, not parts", _RESHAPED)
    dim, factor = state.get("dim", *placement.args[:1]), state.get("split_factor", 1)
    if kind not in (_STRIDED, "Shard"):
        raise ViewFault("UNSUPPORTED", f"mesh dim {mesh_dim} has the placement {placement.cls}", _RESHAPED)
    if type(dim) is not int or not -dims <= dim < dims or type(factor) is not int or not 0 < factor <= MAX_RANKS:
        raise ViewFault("CORRUPT", f"mesh dim {mesh_dim} cuts dim {dim!r} of a tensor of {dims} dims")
    return Cut(mesh_dim, dim % dims, StridedShard(factor) if kind == _STRIDED else Shard())


def _indices(axes: Sequence[tuple[Shape, Shape]]) -> list[int]:
    """Return the indices, in the list of all ranks, of the ranks of the first mesh with this layout, in row-major
    order.
    """
    indices = [0]
    for sizes, strides in axes:
        for size, stride in zip(sizes, strides, strict=True):
            indices = [index + position * stride for index in indices for position in range(size)]
    return indices


def _index(axes: Sequence[tuple[Shape, Shape]], coordinate: Sequence[int]) -> int:
    """Return the index, in the list of all ranks, of the rank at a coordinate of the first mesh with this layout."""
    index = 0
    for (sizes, strides), position in zip(axes, coordinate, strict=True):
        for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
            position, inner = divmod(position, size)
            index += inner * stride
    return index


def _offset(ranks: Sequence[int], axes: Sequence[tuple[Shape, Shape]], rank: int, coordinate: object) -> int:
    """Return the index, in the list of all ranks, of the first rank of the mesh that contains `rank`."""
    if rank not in ranks or not _is_shape(coordinate) or len(coordinate) != len(axes):  # type: ignore[arg-type]
        return 0
    return max(ranks.index(rank) - _index(axes, coordinate), 0)  # type: ignore[arg-type]


def _axes(mesh: Mapping[str, Any]) -> list[tuple[Shape, Shape]]:
    """Return the sizes and strides of each dim of a mesh. A mesh dim that joins several mesh dims has one size and one
    stride for each of them.
    """
    state = attributes(_object(mesh.get("_layout"), "_layout"))
    if "axes" in state:
        layouts = [attributes(_object(axis, "axes")) for axis in _sequence(state["axes"])]
        sizes: Sequence[object] = [axis.get("shape") for axis in layouts]
        strides: Sequence[object] = [axis.get("stride") for axis in layouts]
    else:
        sizes, strides = _items(state.get("shape")), _items(state.get("stride"))
    if len(sizes) != len(strides) or len(sizes) > _MAX_MESH_DIMS:
        raise ViewFault("CORRUPT", "the layout of its device mesh is malformed")
    axes = [(_numbers(size), _numbers(stride)) for size, stride in zip(sizes, strides, strict=True)]
    if any(len(size) != len(stride) or not all(size) or prod(size) > MAX_RANKS for size, stride in axes):
        raise ViewFault("CORRUPT", "the layout of its device mesh is malformed")
    return axes


def _items(value: object) -> Sequence[object]:
    """Return the sizes or strides of a layout, one for each mesh dim; a layout of one mesh dim may be a number."""
    return (value,) if type(value) is int else _sequence(value)


def _numbers(value: object, depth: int = _MAX_LAYOUT_DEPTH) -> tuple[int, ...]:
    """Return the numbers in nested tuples."""
    if type(value) is int and 0 <= value <= _MAX_SIZE:
        return (value,)
    if not depth or not isinstance(value, list | tuple) or len(value) > _MAX_LAYOUT_ITEMS:
        raise ViewFault("CORRUPT", "the layout of its device mesh is malformed")
    return tuple(number for item in value for number in _numbers(item, depth - 1))


def _check_mesh(mesh: Mesh) -> Mesh:
    if len(mesh.shape) > _MAX_MESH_DIMS:
        raise ViewFault("CORRUPT", f"its device mesh has {len(mesh.shape)} dims")
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
    is_box = _is_shape(start) and _is_shape(sizes) and len(start) == len(shape)  # type: ignore[arg-type]
    if not is_box or tuple(sizes) != entry.shape:  # type: ignore[arg-type]
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
    return (
        isinstance(value, list | tuple)
        and len(value) <= MAX_DIMS
        and all(type(size) is int and 0 <= size <= _MAX_SIZE for size in value)
    )


def _list_ranks(ranks: Sequence[int]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]}"
