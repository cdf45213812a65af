"""Census: what all ranks hold together, by name.

Each rank tells the others names, types, shapes and placements, once; from then on every rank computes for itself who
holds what. Nothing here looks at a value.

Tensors as torch's own distributed checkpoint sees them: one chunk for every contiguous run that a rank holds.

torch describes a rank's part by one offset and one shape. A part of several runs (`_StridedShard`, packed projections
under tensor parallel) is no such box: torch loads the wrong rows into it without a word, and refuses to save it.
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

from transaxle.axes.geometry import PerComponent, Replicated, Shard, StridedShard, Widths
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
class Global:
    """One tensor as all ranks hold it."""

    name: str
    """Its name."""
    dtype: str
    """Safetensors code."""
    shape: tuple[int, ...]
    """Elements along each dim of the whole tensor."""
    held: Mapping[int, Positions]
    """What each rank holds that has any of it; ranks without it are absent."""
    loose: bool = False
    """Whether it is on no one mesh: then nothing says that ranks which hold the same part hold the same values."""
    apart: bool = False
    """Whether ranks have a tensor of its own for every combination of the intervals that they hold."""
    padded: bool = False
    """Whether it may have more rows than a checkpoint, which mean nothing."""
    spare: frozenset[int] = frozenset()
    """Ranks whose parts are copies, as they say themselves."""

    @property
    def boxes(self) -> dict[Positions, tuple[int, ...]]:
        """The distinct parts, and the ranks that hold each."""
        found: dict[Positions, tuple[int, ...]] = {}
        for rank, held in sorted(self.held.items()):
            found[held] = (*found.get(held, ()), rank)
        if not self.apart:
            return found
        cells: dict[Positions, tuple[int, ...]] = {}
        for held, ranks in found.items():
            for cell in cells_of(held):
                others = cells.get(cell)
                cells[cell] = ranks if others is None else tuple(sorted((*others, *ranks)))
        return cells

    def part_name(self, held: Positions) -> str:
        """Return what the tensor of one of `boxes` is called, see `local_parts`."""
        return cell_name(self.name, held) if self.apart else self.name

    def within(self, held: Positions, shape: tuple[int, ...]) -> Positions:
        """Return the positions of one of `boxes` that a tensor of the same name and this shape has."""
        return inside(held, shape) if self.padded else held

    def takes(self, shape: tuple[int, ...], rows: object = None) -> bool:
        """Tell whether values of a shape fill it.

        Args:
            shape: of the values.
            rows: how many of their rows mean something; None: nothing says so.
        """
        if shape == self.shape:
            return True
        if not self.padded or shape[1:] != self.shape[1:] or len(shape) != len(self.shape):
            return False
        return shape[0] <= self.shape[0] or (type(rows) is int and rows <= self.shape[0])


wire.tellable(Placement, PerComponent, Replicated, Shard, StridedShard, Widths)
Census = Mapping[str, Global]
"""Every tensor that any rank holds, by name, in the order in which the ranks name them."""
_Told = tuple[str, str, tuple[int, ...], int]
_NONE: frozenset[int] = frozenset()
_SHOWN = 8
"""Ranks that a message names."""
_EVERYWHERE = "Give the tensor on every rank of its mesh or on none; each rank has only its part."
_ALIKE = "Give sharded state dicts on all ranks, or on none."
_WIDER = "Call this on all ranks of the mesh, with a group that contains them (group=None: all ranks)."


def census(tensors: Mapping[str, torch.Tensor], world: World) -> Census:
    """Learn what all ranks hold; collective.

    Args:
        tensors: this rank's.
        world: the ranks.

    Raises:
        Refused: on every rank: SHAPE_MISMATCH, DTYPE_MISMATCH where ranks differ; UNSUPPORTED placements, and meshes
            with ranks that are not of this world; INCOMPLETE where a rank of a tensor's mesh has no such tensor.
    """

    def told() -> tuple[bytes, tuple[Placement, ...]]:
        placements: dict[Placement, int] = {}
        mine: list[_Told] = []
        for name, tensor in tensors.items():
            placement = placement_of(tensor, world.rank, name, world.numbers)
            number = placements.setdefault(placement, len(placements))
            mine.append((name, code_of(tensor.dtype), whole_shape(tensor), number))
        return msgspec.msgpack.encode(mine), tuple(placements)

    tensors_heard: dict[str, _Heard] = {}
    shares: dict[tuple[Placement, tuple[int, ...]], Mapping[int, Positions]] = {}
    histories = _Histories()
    problems = []
    for rank, names, known in _pooled(told, world):
        for name, dtype, shape, number in names:
            placement = known[number]
            held = shares.get((placement, shape))
            if held is None:
                held = shares[placement, shape] = placement.positions(shape)
            first = tensors_heard.get(name)
            if first is None:
                tensors_heard[name] = _Heard(dtype, shape, held, rank, placement, histories)
            elif first.shape != shape:
                message = f"its shape is {list(shape)} on rank {rank}, but {list(first.shape)} on another"
                problems.append(Refusal("SHAPE_MISMATCH", message, Where(None, name)))
            elif first.dtype != dtype:
                message = f"its dtype is {dtype} on rank {rank}, but {first.dtype} on another"
                problems.append(Refusal("DTYPE_MISMATCH", message, Where(None, name)))
            elif first.placement.apart != placement.apart:
                message = f"rank {rank} describes it in another way than another rank: only one has it in shards"
                problems.append(Refusal("UNSUPPORTED", message, Where(None, name), _ALIKE))
            else:
                first.add(rank, held, placement)
    problems = problems or [problem for name, heard in tensors_heard.items() for problem in heard.lost(name, world)]
    if problems:
        raise gathered(problems)
    return {name: heard.made(name) for name, heard in tensors_heard.items()}


def _pooled(
    told: Callable[[], tuple[bytes, tuple[Placement, ...]]], world: World
) -> Iterator[tuple[int, list[_Told], tuple[Placement, ...]]]:
    """Yield each rank with its tensors and placements; most ranks tell the same tensors, which are held once then."""
    own: list[bytes] = []

    def placements() -> tuple[Placement, ...]:
        listed, found = told()
        own.append(listed)
        return found

    known = world.pool(placements)
    decoded: dict[int, list[_Told]] = {}
    for rank, listed, found in zip(world.ranks, world.gather_once(own[0]), known, strict=True):
        if id(listed) not in decoded:
            decoded[id(listed)] = msgspec.msgpack.decode(listed, type=list[_Told])
        yield rank, decoded[id(listed)], found


@dataclass(frozen=True, slots=True, eq=False)
class _History:
    """What ranks have told of a tensor, one after the other; tensors of which the same was told share it."""

    before: _History | None
    """What was told before."""
    rank: int
    """The last rank."""
    positions: Mapping[int, Positions]
    """What this one says that the ranks of its mesh hold."""
    differs: bool
    """Whether some rank says another thing than the first."""

    def told(self) -> list[tuple[int, Mapping[int, Positions]]]:
        """Return what each rank has told."""
        found = []
        at: _History | None = self
        while at is not None:
            found.append((at.rank, at.positions))
            at = at.before
        return found[::-1]


class _Histories:
    """Makes histories, each once: so there are as many as tensors are told of differently, not as tensors."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], _History] = {}
        self._loose: dict[int, dict[int, Positions]] = {}
        self._whole: dict[int, bool] = {}

    def after(self, before: _History | None, rank: int, positions: Mapping[int, Positions]) -> _History:
        """Return a history with one rank more."""
        key = id(before), rank, id(positions)
        if key not in self._known:
            differs = before is not None and (
                before.differs or (before.positions is not positions and before.positions != positions)
            )
            self._known[key] = _History(before, rank, positions, differs)
        return self._known[key]

    def is_whole(self, history: _History) -> bool:
        """Tell whether all ranks of one mesh have told, and no others."""
        if id(history) not in self._whole:
            told = history.told()
            meshes = {tuple(held) for _, held in told}
            self._whole[id(history)] = len(meshes) == 1 and set(*meshes) == {rank for rank, _ in told}
        return self._whole[id(history)]

    def loose(self, history: _History) -> Mapping[int, Positions]:
        """Return what ranks hold of which each knows itself alone."""
        if id(history) not in self._loose:
            self._loose[id(history)] = {rank: held[rank] for rank, held in history.told() if rank in held}
        return self._loose[id(history)]


class _Heard:
    """One tensor as the ranks have described it so far.

    Args:
        dtype: safetensors code.
        shape: of the whole tensor.
        held: what the first rank says that the ranks of its mesh hold.
        rank: the first one that has it.
        placement: how that one has it.
        histories: of all tensors.
    """

    def __init__(
        self,
        dtype: str,
        shape: tuple[int, ...],
        held: Mapping[int, Positions],
        rank: int,
        placement: Placement,
        histories: _Histories,
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.placement = placement
        self._histories = histories
        self._history = histories.after(None, rank, held)
        self._spare = frozenset({rank}) if placement.spare else _NONE
        self._padded = placement.padded

    def add(self, rank: int, positions: Mapping[int, Positions], placement: Placement) -> None:
        """Add the description of one more rank."""
        self._padded = self._padded and placement.padded
        if placement.spare:
            self._spare |= {rank}
        self._history = self._histories.after(self._history, rank, positions)

    def lost(self, name: str, world: World) -> Iterator[Refusal]:
        """Yield a refusal for each mesh on which some rank lacks the tensor, or is outside of the process group."""
        if self._histories.is_whole(self._history):
            return
        told = self._history.told()
        ranks, everyone = {rank for rank, _ in told}, set(world.ranks)
        for mesh in dict.fromkeys(tuple(held) for _, held in told):
            if outside := [rank for rank in mesh if rank not in everyone]:
                message = (
                    f"its mesh has ranks {_listed(mesh)}, of which {_listed(outside)} are not in the process group"
                )
                yield Refusal("UNSUPPORTED", message, Where(None, name), _WIDER)
            elif lost := [rank for rank in mesh if rank not in ranks]:
                message = f"its mesh has ranks {_listed(mesh)}, but rank {_listed(lost)} does not have the tensor"
                yield Refusal("INCOMPLETE", message, Where(None, name), _EVERYWHERE)

    def made(self, name: str) -> Global:
        """Return the tensor; where ranks see it on different meshes, each one's own word counts."""
        loose = self._history.differs
        positions = self._histories.loose(self._history) if loose else self._history.positions
        return Global(name, self.dtype, self.shape, positions, loose, self.placement.apart, self._padded, self._spare)


def _listed(ranks: Iterable[int]) -> str:
    """Name ranks, the first few of many."""
    named = [str(rank) for rank in ranks]
    return ", ".join(named[:_SHOWN]) + (f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else "")


def own_census(tensors: Mapping[str, torch.Tensor], rank: int) -> Census:
    """Return what this rank knows of its own tensors without asking others: a DTensor tells what its mesh holds.

    Raises:
        Refused: UNSUPPORTED placements.
    """
    own_tensors = {}
    for name, tensor in tensors.items():
        shape = whole_shape(tensor)
        held = placement_of(tensor, rank, name).positions(shape)
        own_tensors[name] = Global(name, code_of(tensor.dtype), shape, held)
    return own_tensors


_ops: Any = torch.ops.aten
_NEW = frozenset({_ops.new_empty.default})
"""What copies a tensor by making an empty one and replacing its attributes asks for this."""
_ON_LOCAL = frozenset({
    _ops.detach.default, _ops.alias.default, _ops.clone.default, _ops._to_copy.default, _ops.copy_.default,
    _ops.zeros_like.default, _ops.empty_like.default,
})  # fmt: skip
"""What is done to a rank's part as it is done to the whole."""


class Runs(torch.Tensor):
    """A DTensor for `torch.distributed.checkpoint`: saved, staged and loaded run by run; for nothing else.

    It shares the storage of what it was made of: loading into it fills that.
    """

    _local: torch.Tensor
    _held: Positions

    @staticmethod
    def __new__(cls, shape: torch.Size, local: torch.Tensor, held: Positions) -> Runs:
        """Make one; `held` says which positions of each dim the local tensor has, in its order."""
        wrapper: Runs = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        wrapper._local = local
        wrapper._held = held
        mark(wrapper, Part(tuple(shape), held))
        return wrapper

    def to_local(self) -> torch.Tensor:
        """Return what this rank holds, sharing storage."""
        return self._local

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub takes it for an ordinary method
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operations that a checkpoint needs; refuse all others.

        Raises:
            Refused: UNSUPPORTED.
        """
        options = dict(kwargs or {})
        first = args[0]
        if func in _NEW:
            empty = first._local.new_empty(0, **options)
            return Runs(torch.Size(args[1]), empty, tuple(((0, 0),) for _ in args[1]))
        if func not in _ON_LOCAL:
            raise refuse("UNSUPPORTED", f"this tensor can only be saved and loaded; it does not support {func}")
        local = func(*(arg._local if isinstance(arg, Runs) else arg for arg in args), **options)
        return first if func is _ops.copy_.default else Runs(first.shape, local, first._held)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:  # noqa: A002 - torch names it
        """Return what torch writes: every run."""
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
        """Return the runs."""
        return [chunk for chunk, _ in self._runs()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the run that begins at an index, sharing storage.

        Raises:
            ValueError: this rank has none there.
        """
        for chunk, place in self._runs():
            if chunk.offsets == index.offset:
                return self._local[place]
        raise ValueError(f"{index.fqn}: this rank has no chunk that begins at {index.offset}")

    def _runs(self) -> list[tuple[ChunkStorageMetadata, tuple[slice, ...]]]:
        per_dim: list[list[tuple[int, int, int]]] = []
        for intervals in self._held:
            base, of_dim = 0, []
            for first, last in intervals:
                if last > first:
                    of_dim.append((first, last - first, base))
                base += last - first
            per_dim.append(of_dim)
        return [
            (
                ChunkStorageMetadata(torch.Size(p[0] for p in parts), torch.Size(p[1] for p in parts)),
                tuple(slice(base, base + size) for _, size, base in parts),
            )
            for parts in product(*per_dim)
        ]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # the values are not shown
        return f"Runs({list(self.shape)}, {self.dtype}, {self._held})"


def runs(tensor: torch.Tensor, name: str = "") -> Runs:
    """Return a DTensor, or a part of a tensor, in the form that torch's checkpoint saves run by run.

    Args:
        tensor: of any placements but `Partial`.
        name: for refusals.

    Raises:
        Refused: UNSUPPORTED for `Partial`.
    """
    rank = World().rank
    shape = whole_shape(tensor)
    held = placement_of(tensor, rank, name).positions(shape)[rank]
    return Runs(torch.Size(shape), local_of(tensor), held)


def as_runs(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict that `dcp.save`, `dcp.async_save` and `dcp.load` handle correctly; it shares all storage.

    Args:
        state: the state dict for torch, nested or flat.

    Returns:
        The same state dict, with a replacement for every DTensor with a `_StridedShard` placement and for every part of
        a tensor; a rank outside of a mesh has no entry for them.
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
