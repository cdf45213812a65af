"""Hops: what goes from one rank to another, bucket by bucket, worked out once for all pushes.

A parcel has the bytes that one rank holds of a run of one tensor, packed without gaps: nothing is sent that its
receivers do not need. What a rank holds itself it copies straight from its source into its target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from transaxle.live.transport.bucket_exchange import SHARES, BucketExchange, Route
from transaxle.live.transport.world import World
from transaxle.move.endpoint import Parcel
from transaxle.move.mover import batches, packed
from transaxle.move.transfer import Transfer
from transaxle.move.workers import RUN, Item, Owner

_LEAST = 1 << 16
"""Bytes of a run at least: so many are sent as fast as more are."""
_FACTOR = 4
"""Runs that a round has room for at least."""


@dataclass(frozen=True)
class Hop:
    """One parcel of one run, or what a rank copies by itself."""

    key: int
    """Number of the target's part that it goes into."""
    name: str
    """The target's tensor."""
    parcel: Parcel
    """Who sends it to whom."""
    steps: Sequence[tuple[Transfer, Transfer]]
    """On its sender and its receivers: how each copy is packed, and how it is spread again."""


@dataclass(frozen=True)
class Schedule:
    """Everything that is moved in one push, for all ranks."""

    rounds: Sequence[Sequence[Hop]]
    """What is sent, in order; each round fits into the buckets of all ranks."""
    own: Sequence[tuple[str, int, Sequence[Transfer]]]
    """What this rank copies by itself: name, number of the part, copies from the source into the part."""
    parts: Sequence[tuple[str, int, int]]
    """What this rank takes: name, number of the part, bytes of it that other ranks have."""


@dataclass(frozen=True)
class Program:
    """The part of a schedule that one push carries out."""

    schedule: Schedule
    """What is moved."""
    route: Route
    """Where the parcels lie on their way."""
    names: frozenset[str] | None
    """The target's names of what is moved; None: all."""

    @property
    def keys(self) -> list[int]:
        """Numbers of the parts that this rank takes."""
        return [key for _, key, _ in self.schedule.parts]

    @property
    def tensors(self) -> int:
        """Tensors that they are parts of."""
        return len({name for name, _, _ in self.schedule.parts})

    @property
    def needed(self) -> int:
        """Bytes of them that other ranks have."""
        return sum(size for _, _, size in self.schedule.parts)

    def moves(self, name: str) -> bool:
        """Tell whether a tensor of the target is moved."""
        return self.names is None or name in self.names


def schedule(items: Sequence[Item], names: Sequence[str], owner: Owner, world: World, bucket: int) -> Schedule:
    """Work out what goes where; the same on all ranks but for the steps.

    Args:
        items: what is moved, each with the ranks that need it.
        names: of the target's tensors, by the items' numbers.
        owner: tells the rank that holds a part of the source.
        world: the ranks.
        bucket: bytes of a bucket.
    """
    most, rank = bucket // SHARES, world.rank
    fine = [replace(item, grain=_grain(most, len(item.takers))) for item in items if item.size]
    rounds: list[list[Hop]] = []
    own: list[tuple[str, int, Sequence[Transfer]]] = []
    for batch in batches(fine, dict.fromkeys(world.ranks, 0), owner, most):
        hops = []
        for run in batch:
            name = names[run.item.key]
            for maker in run.makers:
                others = tuple(taker for taker in run.takers if taker != maker)
                parts = [part for part in run.parts(maker) if part.size]
                if maker == rank and rank in run.takers and parts:
                    own.append((name, run.item.key, parts))
                if others and parts:
                    steps = list(packed(parts)) if rank in (maker, *others) else []
                    parcel = Parcel(maker, others, sum(part.size for part in parts))
                    hops.append(Hop(run.item.key, name, parcel, steps))
        if hops:
            rounds.append(hops)
    taken = [(names[item.key], item.key, _of_others(item, owner, rank)) for item in items if rank in item.takers]
    return Schedule(rounds, own, taken)


def _of_others(item: Item, owner: Owner, rank: int) -> int:
    """Return the bytes of an item that other ranks have."""
    return sum(transfer.size for transfer in item.transfers if owner(transfer.file) != rank)


def _grain(most: int, takers: int) -> int:
    """Return the bytes of a run at most: so that several of them, once for each rank that takes them, fit."""
    return min(RUN, max(_LEAST, most // (_FACTOR * max(takers, 1)) // _LEAST * _LEAST))


def program(whole: Schedule, wanted: frozenset[str] | None, exchange: BucketExchange) -> Program:
    """Return how a part of a schedule is carried out; collective.

    Args:
        whole: everything.
        wanted: the target's names that are moved; None: all.
        exchange: carries the parcels.
    """
    part = whole
    if wanted is not None:
        rounds = [[hop for hop in hops if hop.name in wanted] for hops in whole.rounds]
        own = [copies for copies in whole.own if copies[0] in wanted]
        part = Schedule([hops for hops in rounds if hops], own, [each for each in whole.parts if each[0] in wanted])
    return Program(part, exchange.route([[hop.parcel for hop in hops] for hops in part.rounds]), wanted)
