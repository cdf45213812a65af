"""The census of a live model: a list of every tensor that any rank holds, and of the shard of it that each rank holds.

The ranks exchange names, dtypes, shapes and placements once. Afterwards each rank computes alone which rank holds which
shard. No tensor value is read for the census.

`Runs` presents a rank's shard of a tensor to `torch.distributed.checkpoint` as one chunk for every contiguous run.

`torch.distributed.checkpoint` describes a rank's shard by one offset and one shape. A shard of several runs
(`_StridedShard`, packed projections under tensor parallelism) is not a single box. Torch silently loads wrong rows into
such a shard, and refuses to save it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from transaxle.arguments import Degrees
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.live.transport import wire
from transaxle.live.transport.world import World
from transaxle.torch_tensors import (
    Part,
    Placement,
    Positions,
    cell_name,
    cells_of,
    code_of,
    inside,
    local_of,
    mark,
    part_of,
    placement_of,
    whole_shape,
)


@dataclass(frozen=True, slots=True)
class GlobalTensor:
    """One tensor of the model, and the shard of it that each rank holds."""

    name: str
    """Name of the tensor in the state dict."""
    dtype: str
    """Safetensors code of the tensor's dtype, such as `BF16`."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    positions: Mapping[int, Positions]
    """Rank -> for each dim, the intervals of indices that the rank holds; a rank that holds no shard of the tensor is
    absent.
    """
    loose: bool = False
    """Whether the tensor is not on a single mesh, so that nothing guarantees equal values on ranks with the same
    shard.
    """
    apart: bool = False
    """Whether a rank with several intervals stores its shard as several tensors, one for each combination of
    intervals.
    """
    padded: bool = False
    """Whether the last rows of the tensor may be padding that a checkpoint lacks."""
    spare: frozenset[int] = frozenset()
    """Ranks that declare that their shard is a copy of another rank's shard."""

    @property
    def boxes(self) -> dict[Positions, tuple[int, ...]]:
        """Distinct shard of the tensor -> ranks that hold this shard."""
        ranks_by_part: dict[Positions, tuple[int, ...]] = {}
        for rank, intervals in sorted(self.positions.items()):
            ranks_by_part[intervals] = (*ranks_by_part.get(intervals, ()), rank)
        if not self.apart:
            return ranks_by_part
        cells: dict[Positions, tuple[int, ...]] = {}
        for intervals, ranks in ranks_by_part.items():
            for cell in cells_of(intervals):
                ranks_so_far = cells.get(cell)
                cells[cell] = ranks if ranks_so_far is None else tuple(sorted((*ranks_so_far, *ranks)))
        return cells

    def part_name(self, intervals: Positions) -> str:
        """Return the name of the local tensor for a shard that `boxes` returns; see `local_parts`."""
        return cell_name(self.name, intervals) if self.apart else self.name

    def within(self, intervals: Positions, shape: tuple[int, ...]) -> Positions:
        """Clip a shard that `boxes` returns to the given shape, such as the shape of a source tensor with fewer
        rows.
        """
        return inside(intervals, shape) if self.padded else intervals

    def accepts(self, shape: tuple[int, ...], rows: object = None) -> bool:
        """Return whether values of the given shape can fill the tensor.

        Args:
            shape: shape of the values.
            rows: number of rows that are not padding; None means that it is unknown.
        """
        if shape == self.shape:
            return True
        if not self.padded or shape[1:] != self.shape[1:] or len(shape) != len(self.shape):
            return False
        return shape[0] <= self.shape[0] or (type(rows) is int and rows <= self.shape[0])


class FsdpRanks(msgspec.Struct, frozen=True):
    """The ranks of a model under FSDP2, as files of ranks describe them."""

    degrees: Degrees
    """The number of ranks, and their mesh."""
    whole: frozenset[str] | None
    """Names of the tensors that are no DTensors; None if no tensor is one."""


def fsdp_ranks(tensors: Mapping[str, torch.Tensor], world: World) -> FsdpRanks:
    """Return how a model is divided among ranks with files of their own; all ranks must call this function.

    Args:
        tensors: name -> tensor, for this rank's tensors.
        world: all ranks that take part.

    Raises:
        Refused: raised on every rank with code UNSUPPORTED, if the model's mesh is not one dim of these ranks.
    """

    def describe_mesh() -> FsdpRanks:
        meshes = {tensor.device_mesh for tensor in tensors.values() if isinstance(tensor, DTensor)}
        for mesh in meshes:
            if mesh.mesh.tolist() != list(range(world.size)):
                message = f"the model is on the ranks {mesh.mesh.tolist()} of a mesh, and ranks have files of their own"
                raise refuse("UNSUPPORTED", f"{message} only on one dim of all {world.size} ranks", hint=_TO_FILES)
        if len({(mesh.device_type, mesh.mesh_dim_names) for mesh in meshes}) > 1:
            raise refuse("UNSUPPORTED", "the model's tensors are on meshes with different names", hint=_TO_FILES)
        for mesh in meshes:
            plain = frozenset(name for name, tensor in tensors.items() if not isinstance(tensor, DTensor))
            mesh_dim = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else None
            return FsdpRanks(Degrees(dp=world.size, device=mesh.device_type, mesh_dim=mesh_dim), plain)
        device = next((tensor.device.type for tensor in tensors.values()), "cpu")
        return FsdpRanks(Degrees(dp=world.size, device=device), None)

    of_ranks = world.pool(describe_mesh)
    if any(ranks != of_ranks[0] for ranks in of_ranks):
        message = "the ranks have their tensors on different meshes, or different tensors"
        raise refuse("UNSUPPORTED", message, hint=_TO_FILES)
    return of_ranks[0]


wire.tellable(FsdpRanks)
Census = Mapping[str, GlobalTensor]
"""Tensor name -> tensor, for every tensor that any rank holds, in the order in which the ranks list them."""
_Description = tuple[str, str, tuple[int, ...], int]
_NONE: frozenset[int] = frozenset()
_SHOWN = 8
"""Largest number of ranks that a message lists."""
_EVERYWHERE = "Pass the tensor on every rank of its mesh or on none; each rank holds only its own shard."
_ALIKE = "Give sharded state dicts on all ranks, or on none."
_TO_FILES = 'Save to="dcp", and convert that into files of ranks.'
_WIDER = "Call this on all ranks of the mesh, with a group that contains them (group=None: all ranks)."


def census(tensors: Mapping[str, torch.Tensor], world: World) -> Census:
    """Build the census by exchanging descriptions of all ranks' tensors; all ranks must call this function.

    Args:
        tensors: name -> tensor, for this rank's tensors.
        world: all ranks that take part.

    Raises:
        Refused: raised on every rank. The code is SHAPE_MISMATCH or DTYPE_MISMATCH, if ranks differ in a tensor's shape
            or dtype; UNSUPPORTED, for unknown placements and for meshes with ranks outside of `world`; INCOMPLETE, if a
            rank of a tensor's mesh lacks the tensor.
    """

    def describe_own() -> tuple[bytes, tuple[Placement, ...]]:
        placements: dict[Placement, int] = {}
        descriptions: list[_Description] = []
        for name, tensor in tensors.items():
            placement = placement_of(tensor, world.rank, name, world.numbers)
            number = placements.setdefault(placement, len(placements))
            descriptions.append((name, code_of(tensor.dtype), whole_shape(tensor), number))
        return msgspec.msgpack.encode(descriptions), tuple(placements)

    described: dict[str, _DescribedTensor] = {}
    shares: dict[tuple[Placement, tuple[int, ...]], Mapping[int, Positions]] = {}
    histories = _Histories()
    problems = []
    for rank, names, rank_placements in _gather_descriptions(describe_own, world):
        for name, dtype, shape, number in names:
            placement = rank_placements[number]
            positions = shares.get((placement, shape))
            if positions is None:
                positions = shares[placement, shape] = placement.positions(shape)
            first_seen = described.get(name)
            if first_seen is None:
                described[name] = _DescribedTensor(dtype, shape, positions, rank, placement, histories)
            elif first_seen.shape != shape:
                message = f"its shape is {list(shape)} on rank {rank}, but {list(first_seen.shape)} on another"
                problems.append(Refusal("SHAPE_MISMATCH", message, Where(None, name)))
            elif first_seen.dtype != dtype:
                message = f"its dtype is {dtype} on rank {rank}, but {first_seen.dtype} on another"
                problems.append(Refusal("DTYPE_MISMATCH", message, Where(None, name)))
            elif first_seen.placement.apart != placement.apart:
                message = f"rank {rank} describes it in another way than another rank: only one has it in shards"
                problems.append(Refusal("UNSUPPORTED", message, Where(None, name), _ALIKE))
            else:
                first_seen.add(rank, positions, placement)
    problems = problems or [
        problem for name, description in described.items() for problem in description.find_gaps(name, world)
    ]
    if problems:
        raise gathered(problems)
    return {name: description.as_global(name) for name, description in described.items()}


def _gather_descriptions(
    describe_own: Callable[[], tuple[bytes, tuple[Placement, ...]]], world: World
) -> Iterator[tuple[int, list[_Description], tuple[Placement, ...]]]:
    """Yield each rank with its list of tensors and its placements; ranks with equal lists share one decoded list."""
    encoded_lists: list[bytes] = []

    def placements() -> tuple[Placement, ...]:
        octets, of_rank = describe_own()
        encoded_lists.append(octets)
        return of_rank

    placements_by_rank = world.pool(placements)
    decoded: dict[int, list[_Description]] = {}
    for rank, octets, of_rank in zip(world.ranks, world.gather_once(encoded_lists[0]), placements_by_rank, strict=True):
        if id(octets) not in decoded:
            decoded[id(octets)] = msgspec.msgpack.decode(octets, type=list[_Description])
        yield rank, decoded[id(octets)], of_rank


@dataclass(frozen=True, slots=True, eq=False)
class _History:
    """The descriptions of one tensor by several ranks, as a linked list; tensors with equal descriptions share one
    list.
    """

    previous: _History | None
    """The list without its last description; None if the list has a single description."""
    rank: int
    """The rank whose description of the tensor was added last."""
    positions: Mapping[int, Positions]
    """Rank -> intervals, for all ranks of the mesh in `rank`'s description."""
    differs: bool
    """Whether at least one rank's description differs from the first rank's description."""

    def descriptions(self) -> list[tuple[int, Mapping[int, Positions]]]:
        """Return (rank, positions) for each description, from the first to the last."""
        descriptions = []
        history: _History | None = self
        while history is not None:
            descriptions.append((history.rank, history.positions))
            history = history.previous
        return descriptions[::-1]


class _Histories:
    """Creates each distinct history (list of descriptions) once, so that all tensors with the same history share one
    object.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], _History] = {}
        self._loose: dict[int, dict[int, Positions]] = {}
        self._whole: dict[int, bool] = {}

    def extend(self, previous: _History | None, rank: int, positions: Mapping[int, Positions]) -> _History:
        """Return a history that is extended by the description of one more rank."""
        key = id(previous), rank, id(positions)
        if key not in self._known:
            differs = previous is not None and (
                previous.differs or (previous.positions is not positions and previous.positions != positions)
            )
            self._known[key] = _History(previous, rank, positions, differs)
        return self._known[key]

    def is_whole(self, history: _History) -> bool:
        """Return whether the ranks that have described the tensor are exactly the ranks of one mesh."""
        if id(history) not in self._whole:
            descriptions = history.descriptions()
            meshes = {tuple(positions) for _, positions in descriptions}
            self._whole[id(history)] = len(meshes) == 1 and set(*meshes) == {rank for rank, _ in descriptions}
        return self._whole[id(history)]

    def own_positions(self, history: _History) -> Mapping[int, Positions]:
        """Return rank -> the intervals that this rank itself described, for a tensor that ranks describe on different
        meshes.
        """
        if id(history) not in self._loose:
            self._loose[id(history)] = {
                rank: positions[rank] for rank, positions in history.descriptions() if rank in positions
            }
        return self._loose[id(history)]


class _DescribedTensor:
    """One tensor as the ranks have described it up to now.

    Args:
        dtype: safetensors code of the tensor's dtype.
        shape: shape of the whole tensor.
        positions: rank -> intervals, for all ranks of the mesh in the first rank's description.
        rank: the first rank that has the tensor.
        placement: the tensor's placement in the first rank's description.
        histories: object that creates and shares the histories (lists of descriptions) of all tensors.
    """

    def __init__(
        self,
        dtype: str,
        shape: tuple[int, ...],
        positions: Mapping[int, Positions],
        rank: int,
        placement: Placement,
        histories: _Histories,
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.placement = placement
        self._histories = histories
        self._history = histories.extend(None, rank, positions)
        self._spare = frozenset({rank}) if placement.spare else _NONE
        self._padded = placement.padded

    def add(self, rank: int, positions: Mapping[int, Positions], placement: Placement) -> None:
        """Add the description of the tensor by one more rank."""
        self._padded = self._padded and placement.padded
        if placement.spare:
            self._spare |= {rank}
        self._history = self._histories.extend(self._history, rank, positions)

    def find_gaps(self, name: str, world: World) -> Iterator[Refusal]:
        """Yield a refusal for each mesh of the tensor with a rank that lacks the tensor or is outside the process
        group.
        """
        if self._histories.is_whole(self._history):
            return
        descriptions = self._history.descriptions()
        ranks, all_ranks = {rank for rank, _ in descriptions}, set(world.ranks)
        for mesh in dict.fromkeys(tuple(positions) for _, positions in descriptions):
            if outside := [rank for rank in mesh if rank not in all_ranks]:
                outsiders = _name_ranks(outside)
                message = f"its mesh has ranks {_name_ranks(mesh)}, of which {outsiders} are not in the process group"
                yield Refusal("UNSUPPORTED", message, Where(None, name), _WIDER)
            elif lacking := [rank for rank in mesh if rank not in ranks]:
                message = (
                    f"its mesh has ranks {_name_ranks(mesh)}, but rank {_name_ranks(lacking)} does not have the tensor"
                )
                yield Refusal("INCOMPLETE", message, Where(None, name), _EVERYWHERE)

    def as_global(self, name: str) -> GlobalTensor:
        """Return the described tensor; if ranks describe different meshes, each rank's intervals are those that it
        described itself.
        """
        loose = self._history.differs
        positions = self._histories.own_positions(self._history) if loose else self._history.positions
        return GlobalTensor(
            name, self.dtype, self.shape, positions, loose, self.placement.apart, self._padded, self._spare
        )


def _name_ranks(ranks: Iterable[int]) -> str:
    """Return rank numbers as text, which is shortened if there are more than `_SHOWN` numbers."""
    numbers = [str(rank) for rank in ranks]
    return ", ".join(numbers[:_SHOWN]) + (f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else "")


def own_census(tensors: Mapping[str, torch.Tensor], rank: int) -> Census:
    """Build a census of this rank's tensors without messages; mesh and placements of a DTensor determine the shards of
    other ranks.

    Raises:
        Refused: with code UNSUPPORTED, if a tensor has an unknown placement.
    """
    global_tensors = {}
    for name, tensor in tensors.items():
        shape = whole_shape(tensor)
        positions = placement_of(tensor, rank, name).positions(shape)
        global_tensors[name] = GlobalTensor(name, code_of(tensor.dtype), shape, positions)
    return global_tensors


_ops: Any = torch.ops.aten
_NEW = frozenset({_ops.new_empty.default})
"""Torch operations by which code that copies a tensor first creates an empty tensor, whose attributes it then replaces.
"""
_ON_LOCAL = frozenset({
    _ops.detach.default, _ops.alias.default, _ops.clone.default, _ops._to_copy.default, _ops.copy_.default,
    _ops.zeros_like.default, _ops.empty_like.default,
})  # fmt: skip
"""Operations that may be applied to a rank's shard alone, because they are elementwise."""


class Runs(torch.Tensor):
    """Replaces a DTensor in a state dict for `torch.distributed.checkpoint`, which then saves, stages and loads it run
    by run.

    The wrapper shares the storage of the original tensor, so a load into the wrapper fills the original tensor. All
    operations other than saving, staging and loading are refused.
    """

    _local: torch.Tensor
    _intervals: Positions

    @staticmethod
    def __new__(cls, shape: torch.Size, local: torch.Tensor, intervals: Positions) -> Runs:
        """Wrap a local tensor; `intervals` lists, for each dim, the intervals of the whole tensor that it contains, in
        the local order.
        """
        wrapper: Runs = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        wrapper._local = local
        wrapper._intervals = intervals
        mark(wrapper, Part(tuple(shape), intervals))
        return wrapper

    def to_local(self) -> torch.Tensor:
        """Return this rank's shard as a plain tensor that shares the storage."""
        return self._local

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub takes it for an ordinary method
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a torch operation that saves and loads need; refuse all other operations.

        Raises:
            Refused: with code UNSUPPORTED, for an operation that saves and loads do not need.
        """
        options = dict(kwargs or {})
        first = args[0]
        if func in _NEW:
            empty = first._local.new_empty(0, **options)
            return Runs(torch.Size(args[1]), empty, tuple(((0, 0),) for _ in args[1]))
        if func not in _ON_LOCAL:
            raise refuse("UNSUPPORTED", f"this tensor can only be saved and loaded; it does not support {func}")
        local = func(*(arg._local if isinstance(arg, Runs) else arg for arg in args), **options)
        return first if func is _ops.copy_.default else Runs(first.shape, local, first._intervals)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:  # noqa: A002 - torch names it
        """Return one write item for each run, for torch's save planner."""
        properties = TensorProperties.create_from_tensor(self._local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return one chunk for each run, for torch's load planner."""
        return [chunk for chunk, _ in self._runs()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the run that begins at the given index, as a view of the local tensor.

        Raises:
            ValueError: if no run of this rank begins at the index.
        """
        for chunk, place in self._runs():
            if chunk.offsets == index.offset:
                return self._local[place]
        raise ValueError(f"{index.fqn}: this rank has no chunk that begins at {index.offset}")

    def _runs(self) -> list[tuple[ChunkStorageMetadata, tuple[slice, ...]]]:
        per_dim: list[list[tuple[int, int, int]]] = []
        for intervals in self._intervals:
            base, runs_of_dim = 0, []
            for first, last in intervals:
                if last > first:
                    runs_of_dim.append((first, last - first, base))
                base += last - first
            per_dim.append(runs_of_dim)
        return [
            (
                ChunkStorageMetadata(torch.Size(p[0] for p in parts), torch.Size(p[1] for p in parts)),
                tuple(slice(base, base + size) for _, size, base in parts),
            )
            for parts in product(*per_dim)
        ]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # the values are not shown
        return f"Runs({list(self.shape)}, {self.dtype}, {self._intervals})"


def runs(tensor: torch.Tensor, name: str = "") -> Runs:
    """Wrap a DTensor, or a tensor that is marked as a part of a whole, so that torch's checkpoint saves it run by run.

    Args:
        tensor: the tensor to wrap, with any placements except `Partial`.
        name: name of the tensor, for refusals.

    Raises:
        Refused: with code UNSUPPORTED, if a placement is `Partial`.
    """
    rank = World().rank
    shape = whole_shape(tensor)
    intervals = placement_of(tensor, rank, name).positions(shape)[rank]
    return Runs(torch.Size(shape), local_of(tensor), intervals)


def as_runs(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a state dict that `dcp.save`, `dcp.async_save` and `dcp.load` handle correctly; the copy's
    tensors use the storage of the original tensors.

    Args:
        state: the state dict, nested or flat, that torch is to save or load.

    Returns:
        A copy of the state dict, in which every DTensor with a `_StridedShard` placement and every tensor marked as a
        part of a whole is replaced. On a rank outside of such a tensor's mesh, the copy has no entry for it.
    """
    return {str(key): _as_runs(value, str(key)) for key, value in state.items()}


def _as_runs(value: Any, name: str) -> Any:
    if isinstance(value, torch.Tensor) and part_of(value) is not None and not isinstance(value, Runs):
        return runs(value, name)
    if isinstance(value, DTensor):
        strided = any(isinstance(placement, _StridedShard) for placement in value.placements)
        return runs(value, name) if strided and value.device_mesh.get_coordinate() is not None else value
    if isinstance(value, dict):
        return {key: _as_runs(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_as_runs(item, f"{name}.{number}") for number, item in enumerate(value)]
    return value
