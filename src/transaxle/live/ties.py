"""Tied tensors: one tensor with several names, such as an embedding whose weight is also the weight of the output head.

The source of a copy may tie two tensors that the target does not tie, or the reverse; tied tensors appear under one
name or both names. A tensor is omitted from a copy only if every rank proves that it is equal to a copied tensor.
Tensor names and configs are no proof.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from transaxle.engine.checkpoint.checkpoint import StoredTensor
from transaxle.errors import Refusal, Where
from transaxle.live.global_tensors import Census
from transaxle.live.model.destination import same_memory
from transaxle.live.model.state_tensors import find_ties
from transaxle.live.transport.world import World
from transaxle.torch_tensors import local_of, same_bytes

Pair = tuple[str, str]
"""Names of two tensors of a source that may be tied."""
_FEW = 4
"""If more tensors than this are unmatched, no values are compared, and only tensors in the same memory are treated as
tied.
"""
_UNTIED = "The model ties these tensors, but the source has two that differ: build the model with an untied head."


@dataclass(frozen=True)
class Sides:
    """Source and target of a copy between live states."""

    own_source: Mapping[str, torch.Tensor]
    """Name in the source -> tensor, for this rank's source tensors."""
    own_target: Mapping[str, torch.Tensor]
    """Name in the target -> tensor, for this rank's target tensors."""
    source: Census
    """The source tensors of all ranks, with the shard that each rank holds."""
    target: Census
    """The target tensors of all ranks, with the shard that each rank holds."""
    world: World
    """All ranks that hold source tensors, target tensors or both."""


def spare_names(
    sides: Sides, stored: Mapping[str, StoredTensor], unexpected: Sequence[str], *, once: bool = True
) -> set[str]:
    """Return source names that the target does not need, because another source name has the same values; all ranks
    must call this function.

    Args:
        sides: source and target of the copy.
        stored: target tensor name -> source tensor; equal on all ranks.
        unexpected: tensor names that only the source has.
        once: whether two tensors with equal present values are treated as tied; if False, two tensors are tied only if
            they are in the same memory.
    """
    pairs: dict[str, list[Pair]] = {}
    for name in unexpected:
        alike = (n for n in sides.target if n in stored and _alike(stored[name], stored[n], sides.source))
        pairs[name] = [(*stored[name].origins, *stored[partner].origins) for partner in alike]  # type: ignore[misc]
    few = once and len(unexpected) <= _FEW
    equal = _equal_pairs(sides, [pair for each in pairs.values() for pair in each], values=few)
    return {name for name, each in pairs.items() if not equal.isdisjoint(each)}


def names_filled_by_ties(sides: Sides, stored: Collection[str]) -> set[str]:
    """Return the target names that are tied, on every rank, to a tensor that the copy fills; all ranks must call this
    function.
    """
    tied_by_rank = dict(
        zip(sides.world.ranks, sides.world.gather(set(find_ties(sides.own_target, stored))), strict=True)
    )
    return {
        name for name, tensor in sides.target.items() if all(name in tied_by_rank[rank] for rank in tensor.positions)
    }


def find_unequal_ties(sides: Sides, stored: Mapping[str, StoredTensor], *, once: bool = True) -> list[Refusal]:
    """Refuse two different tensors of the source that are a single tensor in the target; all ranks must call this
    function.

    Args:
        sides: source and target of the copy.
        stored: target tensor name -> source tensor; equal on all ranks.
        once: whether two tensors with equal present values are treated as tied; if False, two tensors are tied only if
            they are in the same memory.
    """
    shared = sides.world.gather(list(same_memory(sides.own_target, stored)))
    tied_pairs = sorted({names for of_rank in shared for names in of_rank})
    pairs = {names: tuple(origin for n in names for origin in sorted(stored[n].origins)) for names in tied_pairs}
    alike = {names: _alike(stored[names[0]], stored[names[1]], sides.source) for names in tied_pairs}
    equal = _equal_pairs(sides, [pairs[names] for names in tied_pairs if alike[names]], values=once)  # type: ignore[misc]
    return [
        Refusal(
            "UNEQUAL_COPIES", f"{names[0]} has other {'values' if once else 'memory'}", Where(None, names[1]), _UNTIED
        )
        for names in tied_pairs
        if not alike[names] or pairs[names] not in equal
    ]


def _alike(first: StoredTensor, second: StoredTensor, source: Census) -> bool:
    """Return whether two stored tensors are each a single tensor of the source, with equal dtypes, shapes and
    shards.
    """
    if len(first.origins) != 1 or len(second.origins) != 1:
        return False
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    ((a,), (b,)) = first.origins, second.origins
    return source[a].shape == source[b].shape and source[a].positions == source[b].positions


def _equal_pairs(sides: Sides, pairs: Iterable[Pair], *, values: bool) -> set[Pair]:
    """Return the pairs of names that are a single tensor on every rank that has both names; all ranks must call this
    function.
    """
    own_tensors = sides.own_source
    equal_here = {
        (a, b): _same(own_tensors[a], own_tensors[b], values=values)
        for a, b in pairs
        if a in own_tensors and b in own_tensors
    }
    of_all_ranks = sides.world.gather(equal_here)
    unequal = {pair for of_rank in of_all_ranks for pair, equal in of_rank.items() if not equal}
    return {pair for of_rank in of_all_ranks for pair in of_rank} - unequal


def _same(first: torch.Tensor, second: torch.Tensor, *, values: bool) -> bool:
    """Return whether two tensors are in the same memory or, if `values` is true, have the same bits."""
    a, b = local_of(first), local_of(second)
    if a.is_meta or b.is_meta:
        return a is b
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape and a.device == b.device:
        return True
    return values and same_bytes(a, b)
