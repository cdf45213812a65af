"""Runs: targets cut into contiguous parts, each with the ranks that make it and those that take it.

All ranks cut alike and so know, without a word, who sends what to whom. What a single rank can make alone is a run of
its own; where several ranks hold parts of a range (a model cut along columns), these come together at its takers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from transaxle.axes.geometry.strided import row_major
from transaxle.move.transfer import Transfer, clip
from transaxle.move.transport import ROUND

RUN = 8 << 20
"""Bytes of a run at most."""
_BATCH = 64 << 20
"""Bytes of the runs that one owner has open at once."""
_LONG = 1 << 20
"""A contiguous copy of so many bytes begins and ends runs: it need not be sent."""


def is_long(transfer: Transfer) -> bool:
    """Tell whether a copy is one long range: then its rank writes it, and nothing is sent."""
    return transfer.width >= _LONG and not transfer.loops


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
            if is_long(transfer):
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
    def whole(self) -> Transfer | None:
        """The one byte range that the run is, where it is one."""
        parts = [part for parts in self.parts.values() for part in parts]
        alone = len(parts) == 1 and not parts[0].loops and parts[0].width == self.size
        return parts[0] if alone else None

    @property
    def padded(self) -> bool:
        """Whether there are bytes that no copy fills: zeros."""
        return sum(part.size for parts in self.parts.values() for part in parts) != self.size


class _Lane:
    """Items that the same ranks take, run by run.

    Args:
        items: in order.
        taken: bytes that each rank takes so far; kept up to date.
        owner: tells the rank that holds a file.
    """

    def __init__(self, items: Iterable[Item], taken: dict[int, int], owner: Callable[[str], int]) -> None:
        self._runs = _runs(items, taken, owner)
        self.head: Run | None = next(self._runs, None)

    def step(self) -> None:
        """Go on to the next run."""
        self.head = next(self._runs, None)


def _runs(items: Iterable[Item], taken: dict[int, int], owner: Callable[[str], int]) -> Iterator[Run]:
    """Cut items into runs and give each its takers; if any will do, the rank with bytes in it that took least."""
    for item in items:
        coming, running = 0, list[Transfer]()
        for start, stop in pairwise(item.cuts):
            running = [transfer for transfer in running if transfer.target_end > start]
            while coming < len(item.transfers) and item.transfers[coming].target < stop:
                running.append(item.transfers[coming])
                coming += 1
            parts: dict[int, list[Transfer]] = {}
            for transfer in running:
                parts.setdefault(owner(transfer.file), []).extend(clip(transfer, start, stop))
            parts = {rank: found for rank, found in parts.items() if found}
            takers = item.takers or (min(parts or taken, key=lambda rank: (taken[rank], rank)),)
            for taker in takers:
                taken[taker] += stop - start
            yield Run(item, start, stop, parts, takers)


class _Room:
    """What a batch may hold: so that no rank has too much open, sends too much, or receives too much."""

    def __init__(self) -> None:
        self._open: dict[int, int] = {}
        self._moved: dict[tuple[int, bool], int] = {}

    def take(self, run: Run) -> bool:
        """Make a run part of the batch; False if there is no room, which the first one always finds."""
        opened = {taker: self._open.get(taker, 0) + run.size for taker in run.takers}
        moved: dict[tuple[int, bool], int] = {}
        for rank, parts in run.parts.items():
            size = sum(part.size for part in parts)
            for taker in run.takers:
                if taker != rank:
                    for key in ((rank, True), (taker, False)):
                        moved[key] = moved.get(key, self._moved.get(key, 0)) + size
        full = max(opened.values(), default=0) > _BATCH or max(moved.values(), default=0) > ROUND
        if full and self._open:
            return False
        self._open |= opened
        self._moved |= moved
        return True


def batches(items: Iterable[Item], ranks: Sequence[int], owner: Callable[[str], int]) -> Iterator[list[Run]]:
    """Put the runs of items together to batches in which all ranks have something to do.

    Args:
        items: what is produced.
        ranks: those that make and take.
        owner: tells the rank that holds a file.

    Post-condition: runs of items with the same takers come in order; so do the runs of any item.
    """
    groups: dict[tuple[int, ...], list[Item]] = {}
    for item in items:
        groups.setdefault(item.takers, []).append(item)
    taken = dict.fromkeys(ranks, 0)
    lanes = [_Lane(found, taken, owner) for found in groups.values()]
    while any(lane.head is not None for lane in lanes):
        room, batch = _Room(), list[Run]()
        moving = True
        while moving:
            moving = False
            for lane in lanes:
                if lane.head is not None and room.take(lane.head):
                    batch.append(lane.head)
                    lane.step()
                    moving = True
        yield batch


def packed(parts: Iterable[Transfer]) -> Iterator[tuple[Transfer, int]]:
    """Yield copies with the place of each where they are packed one after the other."""
    at = 0
    for part in parts:
        yield part, at
        at += part.size


def dense_steps(part: Transfer) -> list[int]:
    """Return the byte steps of a copy's loops where its runs lie one after the other."""
    return [step * part.width for step in row_major([count for count, _, _ in part.loops])]


def with_steps(part: Transfer, source: int, target: int, sources: Sequence[int], targets: Sequence[int]) -> Transfer:
    """Return a copy with other places on both sides."""
    counts = [count for count, _, _ in part.loops]
    return Transfer(part.file, source, target, part.width, tuple(zip(counts, sources, targets, strict=True)))
