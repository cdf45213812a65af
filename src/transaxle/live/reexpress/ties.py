"""Ties: tensors that stand for one another, such as an embedding and the head that shares its weight.

A side that ties them has one name or both, and the other side may have it otherwise. What is left out for a tie is
proved to be nothing else than what is copied, on every rank; nothing is concluded from names or configs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch

from transaxle.engine.checkpoint.checkpoint import StoredTensor
from transaxle.errors import Refusal, Where
from transaxle.live.model.state_tensors import tied
from transaxle.live.sharding.global_tensors import Census
from transaxle.live.transport.world import World
from transaxle.torch_tensors.local_tensor import local_of
from transaxle.torch_tensors.tensor_bytes import as_bytes

Pair = tuple[str, str]
"""Names of two tensors of a source."""
_FEW = 4
"""Tensors left over of which values are compared; of more only whether they lie in the same memory."""
_UNTIED = "here they are one tensor, and the source has two that differ: build the model with an untied head"


def spare(
    unexpected: Sequence[str],
    target: Collection[str],
    stored: Mapping[str, StoredTensor],
    source: Census,
    mine: Mapping[str, torch.Tensor],
    world: World,
) -> set[str]:
    """Return those names of a source that the target lacks and needs not: their values are those of another name.

    Args:
        unexpected: names that only the source has.
        target: the target's names.
        stored: the source's tensors by the target's names; collective over the world, and the same on all ranks.
        source: what all ranks hold of the source, by its own names.
        mine: what this rank holds of it.
        world: the ranks.
    """
    pairs: dict[str, list[Pair]] = {}
    for name in unexpected:
        alike = (other for other in target if other in stored and _alike(stored[name], stored[other], source))
        pairs[name] = [(*stored[name].origins, *stored[other].origins) for other in alike]  # type: ignore[misc]
    one = _proved([pair for each in pairs.values() for pair in each], mine, world, values=len(unexpected) <= _FEW)
    return {name for name, each in pairs.items() if not one.isdisjoint(each)}


def filled(theirs: Mapping[str, torch.Tensor], stored: Collection[str], target: Census, world: World) -> set[str]:
    """Return the target's names that need nothing: on every rank they are tied to one that is filled; collective."""
    told = dict(zip(world.ranks, world.gather(set(tied(theirs, stored))), strict=True))
    return {name for name, tensor in target.items() if all(name in told[rank] for rank in tensor.held)}


def torn(
    theirs: Mapping[str, torch.Tensor],
    stored: Mapping[str, StoredTensor],
    source: Census,
    mine: Mapping[str, torch.Tensor],
    world: World,
) -> list[Refusal]:
    """Refuse two tensors of a source that differ, where the target has one for both names; collective."""
    both = sorted({names for each in world.gather(list(_shared(theirs, stored))) for names in each})
    pairs = {names: tuple(origin for n in names for origin in sorted(stored[n].origins)) for names in both}
    fit = {names: _alike(stored[names[0]], stored[names[1]], source) for names in both}
    same = _proved([pairs[names] for names in both if fit[names]], mine, world, values=True)  # type: ignore[misc]
    wrong = [names for names in both if not fit[names] or pairs[names] not in same]
    return [
        Refusal("UNEQUAL_COPIES", f"{names[0]} has other values", Where(None, names[1]), _UNTIED) for names in wrong
    ]


def _shared(theirs: Mapping[str, torch.Tensor], stored: Collection[str]) -> Iterator[Pair]:
    first: dict[int, str] = {}
    for name, tensor in theirs.items():
        if name in stored and first.setdefault(id(tensor), name) != name:
            yield first[id(tensor)], name


def _alike(one: StoredTensor, other: StoredTensor, source: Census) -> bool:
    """Tell whether two are each one tensor of the source, of the same type and shape, cut alike."""
    if len(one.origins) != 1 or len(other.origins) != 1 or one.shape != other.shape or one.dtype != other.dtype:
        return False
    ((a,), (b,)) = one.origins, other.origins
    return source[a].shape == source[b].shape and source[a].held == source[b].held


def _proved(pairs: Iterable[Pair], mine: Mapping[str, torch.Tensor], world: World, *, values: bool) -> set[Pair]:
    """Return the pairs that are the same on every rank that holds them; collective."""
    said = {(a, b): _same(mine[a], mine[b], values) for a, b in pairs if a in mine and b in mine}
    told = world.gather(said)
    return {pair for each in told for pair in each} - {pair for each in told for pair, same in each.items() if not same}


def _same(one: torch.Tensor, other: torch.Tensor, values: bool) -> bool:
    """Tell whether two tensors lie in the same memory or, if that counts, have the same bits."""
    a, b = local_of(one), local_of(other)
    if a.is_meta or b.is_meta:
        return a is b
    if a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape and a.device == b.device:
        return True
    return values and bool((as_bytes(a.contiguous().cpu()) == as_bytes(b.contiguous().cpu())).all())
