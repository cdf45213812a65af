"""Compares experts that a checkpoint stores twice, under their own names and stacked, before anything is loaded.

torch tells planners of a tensor only once it has been read. So where anything is stored twice, everything is read into
memory of its own, and the caller's tensors get their values when all copies are known to be equal. Each rank reads and
compares its own part of both forms: of a sharded model no byte of the checkpoint is read by two ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from transaxle.axes.geometry.chunk import Intervals
from transaxle.axes.translation.grouped import COLUMN, ROWS, MemberCopy, Stem, member_copies
from transaxle.errors import Refusal, TransaxleError, Where, gathered
from transaxle.live.sharding.dcp_chunks import Runs, runs
from transaxle.live.transport.world import World
from transaxle.torch_tensors.local_tensor import local_of
from transaxle.torch_tensors.placement import Held, local_shape, placement_of
from transaxle.torch_tensors.tensor_bytes import same_bytes
from transaxle.torch_tensors.tp_shard import mark, part_of, whole_shape


@dataclass(frozen=True, slots=True)
class _Twice:
    """What this rank holds of an expert in both forms."""

    copy: MemberCopy
    """The expert."""
    rows: tuple[tuple[int, int], ...]
    """Where its values lie along the first dim of the stack's local part; empty: the stack has no dims."""
    member: Runs
    """The same part of the tensor under the expert's own name."""


class DualFormCheck:
    """A load that compares what this rank reads of experts that are stored twice before it changes anything.

    Args:
        stems: the sets of experts that are stored in both forms.
        stored: what the checkpoint has, by our names.
        asked: the tensors that are to be filled, by our names, in the checkpoint's form.

    Raises:
        Refused: UNEQUAL_COPIES for copies of different types or shapes.
    """

    def __init__(
        self,
        stems: Iterable[Stem],
        stored: Mapping[str, TensorStorageMetadata],
        asked: Mapping[str, torch.Tensor],
    ) -> None:
        self._asked = asked
        self._own = {name: _like(tensor) for name, tensor in asked.items()}
        copies = [copy for copy in member_copies(stems, stored) if copy.stack in asked]
        unlike = [copy for copy in copies if not _is_alike(copy, stored)]
        if unlike:
            raise _differ(unlike)
        self._twice = [each for copy in copies for each in _twice(copy, asked[copy.stack], stored[copy.name])]
        # What is asked for under both names is read under both; it is compared where this rank holds the same of both.
        self._twice = [each for each in self._twice if each.copy.name not in asked or self._has_same(each)]
        self.read = {**{each.copy.name: each.member for each in self._twice}, **self._own}
        """What torch is to fill, by our names."""

    def finish(self) -> None:
        """Copy what was read into the tensors asked for.

        Raises:
            Refused: UNEQUAL_COPIES, and nothing of this rank is changed.
        """
        unequal = [each.copy for each in self._twice if not self._is_equal(each)]
        if unequal:
            raise _differ(unequal)
        with torch.no_grad():
            for name, tensor in self._asked.items():
                local_of(tensor).copy_(local_of(self._own[name]))

    def _has_same(self, twice: _Twice) -> bool:
        return runs(self._asked[twice.copy.name])._held == twice.member._held

    def _is_equal(self, twice: _Twice) -> bool:
        stack = local_of(self._own[twice.copy.stack])
        member = local_of(self._own.get(twice.copy.name, twice.member))
        if not stack.dim():  # a step: one for all
            return same_bytes(stack, member)
        rows = torch.cat([stack[start:stop] for start, stop in twice.rows])
        return rows.numel() == member.numel() and same_bytes(rows.reshape(member.shape), member)


def _differ(copies: Iterable[MemberCopy]) -> TransaxleError:
    return gathered(
        Refusal("UNEQUAL_COPIES", f"{copy.why}\nbut they differ", Where(None, copy.name)) for copy in copies
    )


def _is_alike(copy: MemberCopy, stored: Mapping[str, TensorStorageMetadata]) -> bool:
    """Tell whether a tensor of an expert has the type and the shape of its share of the stack."""
    stack, member = stored[copy.stack], stored[copy.name]
    shape = tuple(stack.size)
    if shape and copy.stem.stored == ROWS and len(member.size):
        share = (shape[0] // copy.stem.count, *shape[1:])
    else:
        share = shape[2 if copy.stem.stored == COLUMN else 1 :]
    return share == tuple(member.size) and stack.properties.dtype == member.properties.dtype


def _twice(copy: MemberCopy, stack: torch.Tensor, stored: TensorStorageMetadata) -> Iterator[_Twice]:
    """Yield what this rank holds of an expert; nothing where it holds none of it."""
    shape, rank = tuple(stored.size), World().rank
    held = placement_of(stack, rank, copy.stack).held(whole_shape(stack))[rank]
    if 0 in local_shape(held):
        return
    if not held:
        yield _of(copy, (), stored, tuple(((0, length),) for length in shape))
        return
    rows_each = shape[0] if copy.stem.stored == ROWS and shape else 1
    rows, positions = _rows_of(held[0], copy.place * rows_each, rows_each)
    if not rows:
        return
    if copy.stem.stored == ROWS:
        yield _of(copy, rows, stored, ((positions, *held[1:]) if shape else ()))
    else:
        yield _of(copy, rows, stored, held[2 if copy.stem.stored == COLUMN else 1 :])


def _rows_of(held: Intervals, first: int, count: int) -> tuple[tuple[tuple[int, int], ...], Intervals]:
    """Return where rows lie that a rank holds among `count` rows of an expert: locally, and in the expert."""
    at, local, own = 0, [], []
    for start, stop in held:
        low, high = max(start, first), min(stop, first + count)
        if low < high:
            local.append((at + low - start, at + high - start))
            own.append((low - first, high - first))
        at += stop - start
    return tuple(local), tuple(own)


def _of(copy: MemberCopy, rows: tuple[tuple[int, int], ...], stored: TensorStorageMetadata, held: Held) -> _Twice:
    values = torch.empty(local_shape(held), dtype=stored.properties.dtype)
    return _Twice(copy, rows, Runs(torch.Size(stored.size), values, held))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return mark(torch.empty_like(tensor, requires_grad=False), part_of(tensor))
