"""Assembling: the bytes of target tensors, produced by the ranks that hold them, at the ranks that take them.

A target is cut into runs. What a single rank can make alone, it makes; where several ranks hold parts of a run (a model
cut along columns), or several need it, they send them first, so that whoever consumes the runs sees contiguous ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from transaxle.axes.strided import row_major
from transaxle.engine.transfer import Reader, Scratch, Transfer, clip, fill
from transaxle.live.deferred import Deferred
from transaxle.live.exchange import Parcel, exchange
from transaxle.live.landing import Bytes
from transaxle.live.memory import rank_of
from transaxle.live.world import World

RUN = 8 << 20
"""Bytes of a run at most."""
_BATCH = 64 << 20
"""Bytes of the runs that one owner has open at once."""
_LONG = 1 << 20
"""A contiguous copy of so many bytes begins and ends runs: it need not be sent."""


@dataclass(frozen=True, eq=False)
class Item:
    """Bytes to be produced."""

    key: int
    """Number that the consumer knows it by."""
    size: int
    """How many."""
    transfers: Sequence[Transfer]
    """Where they come from, sorted by where they land."""
    takers: tuple[int, ...] = ()
    """Ranks that need them; none: any one rank may take a run of them, and the one that is chosen owns it."""

    @cached_property
    def cuts(self) -> list[int]:
        """Positions at which runs begin, and the end."""
        found = {0, self.size}
        for transfer in self.transfers:
            if transfer.width >= _LONG and not transfer.loops:
                found |= {transfer.target, transfer.target_end}
        edges = sorted(found)
        return [at for a, b in pairwise(edges) for at in range(a, b, RUN)] + [self.size]


@dataclass(frozen=True, eq=False)
class Run:
    """A contiguous part of an item."""

    item: Item
    """Of what."""
    start: int
    """First byte."""
    stop: int
    """One past the last byte."""
    parts: dict[int, list[Transfer]]
    """Rank -> its copies that land in the run."""
    takers: tuple[int, ...]
    """Ranks at which the bytes come together: the ones that need them, or the run's owner."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start

    @property
    def padded(self) -> bool:
        """Whether there are bytes that no copy fills: zeros."""
        return sum(part.size for parts in self.parts.values() for part in parts) != self.size


Consume = Callable[[Run, Bytes], None]
"""Called at each taker with a run's bytes, which are not kept."""


def runs(items: Iterable[Item], world: World) -> Iterator[Run]:
    """Cut items into runs and give each its takers; if any will do, the rank with bytes in it that took least."""
    taken = dict.fromkeys(world.ranks, 0)
    for item in items:
        coming, running = 0, list[Transfer]()
        for start, stop in pairwise(item.cuts):
            running = [transfer for transfer in running if transfer.target_end > start]
            while coming < len(item.transfers) and item.transfers[coming].target < stop:
                running.append(item.transfers[coming])
                coming += 1
            parts: dict[int, list[Transfer]] = {}
            for transfer in running:
                parts.setdefault(rank_of(transfer.file), []).extend(clip(transfer, start, stop))
            parts = {rank: found for rank, found in parts.items() if found}
            takers = item.takers or (min(parts or world.ranks, key=lambda rank: (taken[rank], rank)),)
            for taker in takers:
                taken[taker] += stop - start
            yield Run(item, start, stop, parts, takers)


def assemble(items: Sequence[Item], reader: Reader, world: World, consume: Consume) -> int:
    """Produce items; collective over the world, which must pass equal items on every rank.

    Args:
        items: what to produce.
        reader: reads the tensors of this rank.
        world: the ranks.
        consume: takes the runs that this rank takes; runs of an item come in order.

    Returns:
        bytes received from other ranks.

    Raises:
        Exception: what `reader` or `consume` raised, on this rank alone, when all exchanges are over.
    """
    workshop = _Workshop(reader, world, consume)
    batch: list[Run] = []
    begun = dict.fromkeys(world.ranks, 0)
    for run in runs(items, world):
        if any(begun[taker] + run.size > _BATCH for taker in run.takers):
            workshop.produce(batch)
            batch, begun = [], dict.fromkeys(world.ranks, 0)
        batch.append(run)
        for taker in run.takers:
            begun[taker] += run.size
    workshop.produce(batch)
    workshop.later.check()
    return workshop.received


class _Workshop:
    """Produces runs, batch by batch."""

    def __init__(self, reader: Reader, world: World, consume: Consume) -> None:
        self.later = Deferred()
        self.received = 0
        self._reader = reader
        self._world = world
        self._consume = consume
        self._scratch = Scratch(_BATCH // 8)

    def produce(self, batch: Sequence[Run]) -> None:
        """Exchange what the runs of a batch need, and hand them over."""
        sent = [(run, rank) for run in batch for rank in run.parts if set(run.takers) - {rank}]
        arrived: dict[tuple[Run, int], Bytes] = {}

        def pack(number: int, buffer: Bytes) -> None:
            run, rank = sent[number]
            for part, at in _packed(run.parts[rank]):
                dense = _with_steps(part, part.source, at, [source for _, source, _ in part.loops], _dense(part))
                fill(self._reader, dense, buffer, 0, self._scratch)

        def take(number: int, buffer: Bytes) -> None:
            arrived[sent[number]] = buffer.copy()

        parcels = [
            Parcel(rank, tuple(t for t in run.takers if t != rank), sum(part.size for part in run.parts[rank]))
            for run, rank in sent
        ]
        self.received += exchange(self._world, parcels, self.later(pack), self.later(take))
        for run in batch:
            if self._world.rank in run.takers:
                self.later(self._finish)(run, {rank: arrived.pop((run, rank), None) for rank in run.parts})

    def _finish(self, run: Run, arrived: Mapping[int, Bytes | None]) -> None:
        """Put a run together and hand it over."""
        out = np.zeros(run.size, np.uint8) if run.padded else np.empty(run.size, np.uint8)
        for rank, parts in run.parts.items():
            sent = arrived[rank]
            if sent is None:
                for part in parts:
                    fill(self._reader, part, out, run.start, self._scratch)
                continue
            for part, at in _packed(parts):
                spread = _with_steps(part, at, part.target, _dense(part), [target for *_, target in part.loops])
                fill(_Buffer(sent), spread, out, run.start, self._scratch)
        self._consume(run, out)


class _Buffer:
    """Reads from memory."""

    def __init__(self, held: Bytes) -> None:
        self._held = held

    def read_into(self, _: str, offset: int, view: memoryview) -> None:
        """See `Reader`."""
        view[:] = self._held[offset : offset + len(view)].data


def _packed(parts: Iterable[Transfer]) -> Iterator[tuple[Transfer, int]]:
    """Yield copies with the place of each where they are packed one after the other."""
    at = 0
    for part in parts:
        yield part, at
        at += part.size


def _dense(part: Transfer) -> list[int]:
    """Return the byte steps of a copy's loops where its runs lie one after the other."""
    return [step * part.width for step in row_major([count for count, _, _ in part.loops])]


def _with_steps(part: Transfer, source: int, target: int, sources: Sequence[int], targets: Sequence[int]) -> Transfer:
    """Return a copy with other places on both sides."""
    counts = [count for count, _, _ in part.loops]
    return Transfer(part.file, source, target, part.width, tuple(zip(counts, sources, targets, strict=True)))
