"""Runs: items cut into contiguous parts, each with the ranks that make it and those that take it.

All ranks cut alike and so know, without a word, who sends what to whom. What a single rank can make alone is a run of
its own; where several ranks hold parts of a range (a model cut along columns), these come together at its takers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from transaxle.axes.geometry.strided import row_major
from transaxle.move.assignment import Load
from transaxle.move.transfer import Transfer, active, clip

if TYPE_CHECKING:
    from transaxle.move.workers import Worker

RUN = 8 << 20
"""Bytes of a run at most."""
_BATCH = 64 << 20
"""Bytes of the runs that one owner has open at once."""
_ROUND = 32 << 20
"""Bytes that a rank sends, and that it receives, for one batch at most; a larger run has a batch of its own."""
_LONG = 1 << 20
"""A contiguous copy of so many bytes begins and ends runs: it need not be sent."""
Owner = Callable[[str], int]
"""Tells the rank that holds a file."""


def is_long(transfer: Transfer) -> bool:
    """Tell whether a copy is one long range: then its rank writes it, and nothing is sent."""
    return transfer.width >= _LONG and not transfer.loops


def is_whole(parts: Sequence[Transfer], size: int) -> bool:
    """Tell whether so many bytes are one range of a file as it lies there."""
    return len(parts) == 1 and not parts[0].loops and parts[0].width == size


class Item(msgspec.Struct, frozen=True, eq=False, dict=True):
    """Bytes to be moved: a tensor of the target, or what one rank holds of it."""

    key: int
    """Number that the sink knows it by."""
    size: int
    """How many."""
    made_of: Sequence[Transfer] | Callable[[], Sequence[Transfer]]
    """Where they come from, sorted by where they land; or what finds that out, on a rank that needs to know."""
    takers: tuple[int, ...] = ()
    """Ranks that need them; none: any one rank may take a run of them, and the one that is chosen owns it."""
    makers: tuple[int, ...] = ()
    """Ranks that can read all of them; none: each transfer is read by the rank that owns its file."""
    queue: Hashable = None
    """Items of one queue come one after another; None: this one is alone in its queue."""
    blocks: Callable[[Worker], Iterator[memoryview]] | None = None
    """Makes all of them in order, where they are no plain copies."""
    grain: int | None = None
    """Bytes of a run of it at most; None: `RUN`."""

    @cached_property
    def transfers(self) -> Sequence[Transfer]:
        """Where they come from."""
        return self.made_of() if callable(self.made_of) else self.made_of

    @cached_property
    def cuts(self) -> list[int]:
        """Positions at which runs begin, and the end."""
        found = {0, self.size}
        # With `makers` one rank reads the whole run, wherever the transfers begin. Otherwise a long copy gets runs of
        # its own, so that its bytes never share a run with another rank's.
        for transfer in () if self.makers else self.transfers:
            if is_long(transfer):
                found |= {transfer.target, transfer.target_end}
        edges = sorted(found)
        # An edge less than a grain after the last one still begins a run: long copies must not be mixed with their
        # neighbours.
        return [at for a, b in pairwise(edges) for at in range(a, b, self.grain or RUN)] + [self.size]

    def parts(self, start: int, stop: int) -> list[Transfer]:
        """Return the transfers' parts that land in `[start, stop)`."""
        return [part for transfer in self.transfers for part in clip(transfer, start, stop)]

    def alone_at(self, owner: Owner) -> int | None:
        """Return the one rank that makes and takes all of it; None where there is none."""
        if len(self.takers) != 1:
            return None
        (taker,) = self.takers
        if self.makers:
            return taker if taker in self.makers else None
        return taker if all(owner(transfer.file) == taker for transfer in self.transfers) else None


def alone(items: Iterable[Item], owner: Owner) -> tuple[dict[int, list[list[Item]]], list[Item]]:
    """Divide items into those that one rank can move alone and those that take an exchange.

    Returns:
        rank -> its queues of items, and all other items. A queue is never divided.
    """
    queues: dict[Hashable, list[Item]] = {}
    for item in items:
        queues.setdefault(item if item.queue is None else item.queue, []).append(item)
    own: dict[int, list[list[Item]]] = {}
    others: list[Item] = []
    for queue in queues.values():
        # A queue is written in order by one writer. If any of its items needs an exchange, all go through it.
        ranks = {item.alone_at(owner) for item in queue}
        rank = ranks.pop() if len(ranks) == 1 else None
        if rank is None:
            others.extend(queue)
        else:
            own.setdefault(rank, []).append(queue)
    return own, others


class Run(msgspec.Struct, frozen=True, eq=False):
    """A contiguous part of an item."""

    item: Item
    """Of what."""
    start: int
    """First byte."""
    stop: int
    """One past the last byte."""
    makers: tuple[int, ...]
    """Ranks that have parts of it."""
    takers: tuple[int, ...]
    """Ranks at which the bytes come together: the ones that need them, or the run's owner."""
    owned: Mapping[int, list[Transfer]] | None
    """Maker -> its copies that land in the run; None: its one maker reads all of it."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start

    def parts(self, maker: int) -> list[Transfer]:
        """Return a maker's copies that land in the run."""
        return self.item.parts(self.start, self.stop) if self.owned is None else self.owned[maker]

    def sent(self, maker: int) -> int:
        """Return the bytes that a maker gives to each taker: the run as it is where it alone makes it."""
        return self.size if self.only_maker is not None else sum(part.size for part in self.parts(maker))

    @property
    def only_maker(self) -> int | None:
        """The one rank that makes all of it; None where several do, or none."""
        return self.makers[0] if len(self.makers) == 1 else None

    @property
    def padded(self) -> bool:
        """Whether there are bytes that no copy fills: zeros."""
        return sum(part.size for maker in self.makers for part in self.parts(maker)) != self.size


class _Lane:
    """Items that the same ranks take, run by run.

    Args:
        items: in order.
        busy: bytes that each rank makes, or takes, so far; kept up to date.
        owner: tells the rank that holds a file.
    """

    def __init__(self, items: Iterable[Item], busy: Load, owner: Owner) -> None:
        # A generator: a run is cut when it becomes the head, so `busy` then contains all earlier choices of every lane.
        self._runs = (run for item in items for run in _runs(item, busy, owner))
        self.head: Run | None = next(self._runs, None)

    def step(self) -> None:
        """Go on to the next run."""
        self.head = next(self._runs, None)


def _runs(item: Item, busy: Load, owner: Owner) -> Iterator[Run]:
    """Cut an item into runs, each with its makers and takers: where any of several will do, the least busy one."""
    if item.makers:
        for start, stop in pairwise(item.cuts):
            yield Run(item, start, stop, (busy.add(busy.least(item.makers), stop - start),), item.takers, None)
        return
    for start, stop, parts in active(item.transfers, item.cuts[1:]):
        owned: dict[int, list[Transfer]] = {}
        for part in parts:
            owned.setdefault(owner(part.file), []).append(part)
        # Without takers the run goes to a rank that already holds some of it; a run of padding alone has none, and any
        # rank takes it.
        takers = item.takers or (busy.add(busy.least(owned or busy), stop - start),)
        yield Run(item, start, stop, tuple(owned), takers, owned)


class _Bounds:
    """What a batch may hold: so that no rank has too much open, sends too much, or receives too much.

    Args:
        most: bytes that a rank sends, and that it receives.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[int, int] = {}
        self._moved: dict[tuple[int, bool], int] = {}

    def take(self, run: Run) -> bool:
        """Make a run part of the batch; False if there is no room, which the first one always finds."""
        opened = {taker: self._open.get(taker, 0) + run.size for taker in run.takers}
        moved: dict[tuple[int, bool], int] = {}
        for rank in run.makers:
            size = run.sent(rank)
            for taker in run.takers:
                # A maker that also takes the run keeps its part; only bytes that cross ranks count.
                if taker != rank:
                    for key in ((rank, True), (taker, False)):
                        moved[key] = moved.get(key, self._moved.get(key, 0)) + size
        # Limits hold for each rank separately, since memory and links are per rank.
        full = max(opened.values(), default=0) > _BATCH or max(moved.values(), default=0) > self._most
        # An empty batch accepts any run, however large; otherwise a run above the limits could never move.
        if full and self._open:
            return False
        self._open |= opened
        self._moved |= moved
        return True


def batches(
    items: Iterable[Item], busy: Mapping[int, int], owner: Owner, most: int | None = None
) -> Iterator[list[Run]]:
    """Put the runs of items together to batches in which all ranks have something to do.

    Args:
        items: what is moved.
        busy: bytes that each rank has to make, or to take, besides.
        owner: tells the rank that holds a file.
        most: bytes that a rank sends, and that it receives, for one batch; a larger run has a batch of its own. None:
            `_ROUND`.

    Post-condition: runs of items with the same takers come in order; so do the runs of any item.
    """
    groups: dict[tuple[int, ...], list[Item]] = {}
    for item in items:
        groups.setdefault(item.takers, []).append(item)
    counts = Load(busy)
    lanes = [_Lane(group, counts, owner) for group in groups.values()]
    while any(lane.head is not None for lane in lanes):
        # One run of each lane in turn, until none fits: so all takers have work in every batch, not one after the
        # other.
        bounds, batch = _Bounds(most or _ROUND), list[Run]()
        moving = True
        while moving:
            moving = False
            for lane in lanes:
                if lane.head is not None and bounds.take(lane.head):
                    batch.append(lane.head)
                    lane.step()
                    moving = True
        yield batch


def packed(parts: Iterable[Transfer]) -> Iterator[tuple[Transfer, Transfer]]:
    """Yield how copies are packed one after the other, and how they are spread again.

    Yields:
        `(from the source into the pack, from the pack to the target)` of each copy.
    """
    at = 0
    for part in parts:
        counts = [count for count, _, _ in part.loops]
        # The pack keeps the order of the loops with all gaps closed, so both sides can derive it from the transfer
        # alone.
        dense = [step * part.width for step in row_major(counts)]
        packing = zip(counts, (source for _, source, _ in part.loops), dense, strict=True)
        spreading = zip(counts, dense, (target for *_, target in part.loops), strict=True)
        yield (
            Transfer(part.file, part.source, at, part.width, tuple(packing)),
            Transfer(part.file, at, part.target, part.width, tuple(spreading)),
        )
        at += part.size
