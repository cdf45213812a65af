"""Values that must be equal or zero, where nothing but a look at them tells.

What several ranks hold without a mesh that keeps it equal is compared before one of them is saved. A DTensor says of
its replicas that they are the same. Nobody says so of plain tensors (the norms next to tensor parallel weights, a model
under DDP, counters), nor of DTensors that lie on several meshes; and only one of them is written. Tensors for which
another dialect has no place must be zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
import xxhash

from transaxle.axes.layout.relayout import Check
from transaxle.engine.copying.duplicate_checks import PlannedCheck
from transaxle.errors import Refusal, Where, gathered
from transaxle.live.sharding.global_tensors import Census, Global
from transaxle.live.transport.world import World
from transaxle.torch_tensors.local_tensor import as_bytes, copied_to_cpu, local_of

_Peers = tuple[int, ...]
"""Ranks that hold the same part of a tensor."""
_NAMED = 8
"""Ranks that a message names."""
_HINT = (
    "Broadcast the tensor from one rank, or find out why the copies drifted apart (a gradient that is not summed over "
    "all ranks). Use check_copies=False to write one of them."
)


def compare_copies(everything: Census, tensors: Mapping[str, torch.Tensor], world: World) -> None:
    """Refuse copies that differ; collective. What travels is one hash for each set of ranks.

    Args:
        everything: what all ranks hold.
        tensors: what this rank holds, by the names of the parts (`local_parts`).
        world: the ranks.

    Raises:
        Refused: on every rank: UNEQUAL_COPIES for each tensor.
    """
    if not any(tensor.loose for tensor in everything.values()):
        return
    digests: dict[str, bytes] = {}

    def own() -> dict[_Peers, bytes]:
        sums: dict[_Peers, xxhash.xxh3_128] = {}
        for tensor in everything.values():
            for name, peers in _shared(tensor, world.rank):
                own_bytes = as_bytes(copied_to_cpu(local_of(tensors[name])))
                digests[name] = xxhash.xxh3_128_digest(own_bytes.data)
                sums.setdefault(peers, xxhash.xxh3_128()).update(digests[name])
        return {peers: each.digest() for peers, each in sums.items()}

    sums_of_ranks = world.pool(own)
    sums: dict[_Peers, set[bytes]] = {}
    for each in sums_of_ranks:
        for peers, digest in each.items():
            sums.setdefault(peers, set()).add(digest)
    if any(len(found) > 1 for found in sums.values()):
        every = dict(zip(world.ranks, world.gather(digests), strict=True))
        raise gathered([problem for tensor in everything.values() for problem in _unequal(tensor, every)])


def _shared(tensor: Global, rank: int) -> Iterator[tuple[str, _Peers]]:
    """Yield (name, ranks that have it too) of this rank's parts of a tensor that have to equal those of others."""
    if tensor.loose and rank in tensor.held:
        for held, peers in tensor.boxes.items():
            if rank in peers and len(peers) > 1:
                yield tensor.part_name(held), peers


def _unequal(tensor: Global, digests: Mapping[int, Mapping[str, bytes]]) -> list[Refusal]:
    """Return a refusal for each part of a tensor whose copies differ.

    Args:
        tensor: as all ranks hold it.
        digests: for each rank, the hashes of its copies by name.
    """
    problems = []
    for held, peers in tensor.boxes.items() if tensor.loose else ():
        name = tensor.part_name(held)
        ranks_by_digest: dict[bytes | None, list[int]] = {}
        for rank in peers:
            ranks_by_digest.setdefault(digests[rank].get(name), []).append(rank)
        if len(ranks_by_digest) > 1:
            message = f"the values differ between these ranks: {'; '.join(map(_said, ranks_by_digest.values()))}"
            problems.append(Refusal("UNEQUAL_COPIES", message, Where(None, name), _HINT))
    return problems


def _said(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return ", ".join(map(str, ranks[:_NAMED])) + more


def check_zero(checks: Iterable[Check | PlannedCheck], tensors: Mapping[str, torch.Tensor]) -> None:
    """Prove that this rank's parts of the tensors that must be zero are.

    Args:
        checks: all of a view; others are passed over.
        tensors: what this rank holds, by name.

    Raises:
        Refused: UNEXPECTED_TENSOR.
    """
    wanted = {check.refusal.where.tensor or "": check.refusal for check in checks if check.zero}
    problems = [wanted[name] for name in wanted.keys() & tensors.keys() if local_of(tensors[name]).count_nonzero()]
    if problems:
        raise gathered(sorted(problems, key=str))
