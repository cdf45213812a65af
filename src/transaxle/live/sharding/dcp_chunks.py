"""Tensors as torch's own distributed checkpoint sees them: one chunk for every contiguous run that a rank holds.

torch describes a rank's part by one offset and one shape. A part of several runs (`_StridedShard`, packed projections
under tensor parallel) is no such box: torch loads the wrong rows into it without a word, and refuses to save it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from transaxle.errors import refuse
from transaxle.live.transport.world import World
from transaxle.torch_tensors.local_tensor import local_of
from transaxle.torch_tensors.placement import Held, Part, mark, part_of, placement_of, whole_shape

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
    _held: Held

    @staticmethod
    def __new__(cls, shape: torch.Size, local: torch.Tensor, held: Held) -> Runs:
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
    held = placement_of(tensor, rank, name).held(shape)[rank]
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
