"""Ties: tensors that stand for one another, such as an embedding and the head that shares its weight.

A side that ties them has one name or both, and the other side may have it otherwise. What is left out for a tie is
proved to be nothing else than what is copied, on every rank; nothing is concluded from names or configs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from transaxle.engine.checkpoint.checkpoint import StoredTensor
from transaxle.errors import Refusal, Where
from transaxle.live.global_tensors import Census
from transaxle.live.model.destination import same_memory
from transaxle.live.model.state_tensors import tied
from transaxle.live.transport.world import World
from transaxle.torch_tensors import local_of, same_bytes

Pair = tuple[str, str]
"""Names of two tensors of a source."""
_FEW = 4
"""Tensors left over of which values are compared; of more only whether they lie in the same memory."""
_UNTIED = "The model ties these tensors, but the source has two that differ: build the model with an untied head."


@dataclass(frozen=True)
class Sides:
    """What is copied from and to; `stored` in this module is the source's tensors by the target's names."""

    own_source: Mapping[str, torch.Tensor]
    """This rank's tensors of the source, by its own names."""
    own_target: Mapping[str, torch.Tensor]
    """This rank's tensors of the target."""
    source: Census
    """What all ranks hold of the source."""
    target: Census
    """What all ranks hold of the target."""
    world: World
    """The ranks of both sides."""


def spare(
    sides: Sides, stored: Mapping[str, StoredTensor], unexpected: Sequence[str], *, once: bool = True
) -> set[str]:
    """Return the names of a source that the target does without: their values are those of another name; collective.

    Args:
        sides: source and target.
        stored: the source's tensors by the target's names; the same on all ranks.
        unexpected: names that only the source has.
        once: values that are equal now count, too; otherwise only the same memory.
    """
    pairs: dict[str, list[Pair]] = {}
    for name in unexpected:
        alike = (n for n in sides.target if n in stored and _alike(stored[name], stored[n], sides.source))
        pairs[name] = [(*stored[name].origins, *stored[other].origins) for other in alike]  # type: ignore[misc]
    few = once and len(unexpected) <= _FEW
    equal = _equal_pairs(sides, [pair for each in pairs.values() for pair in each], values=few)
    return {name for name, each in pairs.items() if not equal.isdisjoint(each)}


def filled_by_ties(sides: Sides, stored: Collection[str]) -> set[str]:
    """Return the target's names that need nothing: on every rank they are tied to one that is filled; collective."""
    tied_by_rank = dict(zip(sides.world.ranks, sides.world.gather(set(tied(sides.own_target, stored))), strict=True))
    return {name for name, tensor in sides.target.items() if all(name in tied_by_rank[rank] for rank in tensor.held)}


def torn(sides: Sides, stored: Mapping[str, StoredTensor], *, once: bool = True) -> list[Refusal]:
    """Refuse two tensors of a source that differ, where the target has one for both names; collective.

    Args:
        sides: source and target.
        stored: the source's tensors by the target's names; the same on all ranks.
        once: values that are equal now count, too; otherwise only the same memory.
    """
    shared = sides.world.gather(list(same_memory(sides.own_target, stored)))
    both = sorted({names for of_rank in shared for names in of_rank})
    pairs = {names: tuple(origin for n in names for origin in sorted(stored[n].origins)) for names in both}
    alike = {names: _alike(stored[names[0]], stored[names[1]], sides.source) for names in both}
    equal = _equal_pairs(sides, [pairs[names] for names in both if alike[names]], values=once)  # type: ignore[misc]
    return [
        Refusal(
            "UNEQUAL_COPIES", f"{names[0]} has other {'values' if once else 'memory'}", Where(None, names[1]), _UNTIED
        )
        for names in both
        if not alike[names] or pairs[names] not in equal
    ]


def _alike(first: StoredTensor, second: StoredTensor, source: Census) -> bool:
    """Tell whether two are each one tensor of the source, of the same type and shape, cut alike."""
    if len(first.origins) != 1 or len(second.origins) != 1:
        return False
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    ((a,), (b,)) = first.origins, second.origins
    return source[a].shape == source[b].shape and source[a].held == source[b].held


def _equal_pairs(sides: Sides, pairs: Iterable[Pair], *, values: bool) -> set[Pair]:
    """Return the pairs that are the same on every rank that holds them; collective."""
    own = sides.own_source
    equal_here = {(a, b): _same(own[a], own[b], values=values) for a, b in pairs if a in own and b in own}
    of_all_ranks = sides.world.gather(equal_here)
    unequal = {pair for of_rank in of_all_ranks for pair, equal in of_rank.items() if not equal}
    return {pair for of_rank in of_all_ranks for pair in of_rank} - unequal


def _same(first: torch.Tensor, second: torch.Tensor, *, values: bool) -> bool:
    """Tell whether two tensors lie in the same memory or, if that counts, have the same bits."""
    a, b = local_of(first), local_of(second)
    if a.is_meta or b.is_meta:
        return a is b
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape and a.device == b.device:
        return True
    return values and same_bytes(a, b)
