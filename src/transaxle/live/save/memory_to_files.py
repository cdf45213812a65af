"""From the memory of ranks into files: the tensors of a plan, each written and hashed by the rank that takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transaxle.engine.plan.conversion import Prepared
from transaxle.live.sharding.memory import memory_of
from transaxle.live.transport import wire
from transaxle.live.transport.tensor_exchange import RankExchange
from transaxle.live.transport.world import World
from transaxle.move.endpoint import Writable
from transaxle.move.hashing import HashingFiles
from transaxle.move.mover import Movement
from transaxle.move.runs import Item
from transaxle.move.workers import limits


@dataclass(frozen=True)
class Moved:
    """What one rank has done."""

    received: int
    """Bytes received from other ranks."""
    taken: int
    """Bytes written here."""
    digests: Mapping[str, str]
    """Hashes of the tensors that this rank has written whole."""


wire.tellable(Moved)


def move(
    prepared: Prepared,
    takers: Sequence[tuple[int, ...]],
    files: Writable | None,
    world: World,
    *,
    ordered: bool = False,
) -> Moved:
    """Move the tensors of a plan; collective.

    Args:
        prepared: the plan, the same on all ranks.
        takers: for each tensor the rank that writes it; nobody: each rank what it holds of it.
        files: where this rank's go; None: nowhere, they are only hashed.
        world: the ranks.
        ordered: the bytes of a file must be written in order; all tensors of a file have the same taker.

    Raises:
        Exception: on this rank alone, when all exchanges are over.
    """
    tensors = prepared.plan.tensors
    items = [
        Item(key, tensor.nbytes, tensor.transfers, ranks, queue=ranks if ordered else None)
        for key, (tensor, ranks) in enumerate(zip(tensors, takers, strict=True))
    ]
    taken = 0

    def count(size: int) -> None:
        nonlocal taken
        taken += size

    whole = {item.key for item in items if world.rank in item.takers}
    sink = HashingFiles(files, [(*tensor.places, *tensor.copies) for tensor in tensors], whole, count)
    source = memory_of(prepared.checkpoint.container)
    received = Movement(items, source, sink, limits(jobs=1).holding_runs, RankExchange(world)).run()
    return Moved(received, taken, {tensors[key].name: digest for key, digest in sink.digests.items()})
