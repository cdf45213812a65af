"""The mover: carries items from a source to a sink, whatever these are.

A conversion moves files to files, a load files to the memory of ranks, a save this memory to files, and a reshard
memory to memory. What a rank makes and takes alone, its threads move; all else goes through an exchange, in batches of
bounded memory: items are cut into runs, contiguous parts, each with the ranks that make it and those that take it. All
ranks cut alike and so know, without a word, who sends what to whom. What a single rank can make alone is a run of its
own; where several ranks hold parts of a range (a model cut along columns), these come together at its takers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from threading import Event, Lock

import msgspec
import numpy as np

from transaxle.axes.geometry import row_major
from transaxle.formats.storage.copier import Bytes, scatter
from transaxle.move.transfer import Alone, Deferred, Exchange, Parcel, Readable, Sink, Transfer, active, note_fill
from transaxle.move.workers import (
    RUN,
    Item,
    Limits,
    Load,
    Owner,
    Worker,
    are_noted,
    grouped,
    largest_first,
    new_steps,
    share,
)
from transaxle.spans import span

_OPEN = 64 << 20
"""Bytes of the runs that one owner has open at once."""
_ROUND = 32 << 20
"""Bytes that a rank sends, and that it receives, for one batch at most; a larger run has a batch of its own."""
_Work = tuple[Item, int, int]
"""Bytes of an item: `(item, start, stop)`."""


class Movement:
    """Items on their way.

    Args:
        items: what is moved; all ranks pass equal items, in one order. A rank may leave out what another one makes and
            takes alone.
        source: what they are made of. Items without `makers` need the memory of ranks.
        sink: where this rank's go.
        limit: workers and memory.
        exchange: moves bytes between the ranks; None: this process is alone.
        elsewhere: rank -> bytes of the items that were left out.
    """

    def __init__(
        self,
        items: Sequence[Item],
        source: Readable,
        sink: Sink,
        limit: Limits,
        exchange: Exchange | None = None,
        elsewhere: Mapping[int, int] | None = None,
    ) -> None:
        self._source = source
        self._sink = sink
        self._limit = limit
        self._exchange = exchange or Alone()
        rank = self._exchange.rank
        self._owner: Owner = getattr(source, "owner", None) or (lambda _: rank)
        self._own, self._others = alone(items, self._owner)
        self._elsewhere = elsewhere or {}
        self._notes = are_noted(source) and (sink.takes_notes or not sink.ordered)
        """Whether many steps are done in one call: from files of this machine."""
        self._lock = Lock()
        self._left: dict[int, int] = {}
        """Bytes of the items that several workers take which are not there yet, by key."""

    def run(self) -> int:
        """Move everything; collective over the ranks.

        Returns:
            bytes received from other ranks.

        Raises:
            Exception: what source or sink raised, on this rank alone, when all exchanges are over.
        """
        if not self._others:
            self.move_own()
            return 0
        # An error here must not end the collective calls, or the other ranks would wait forever: it is kept until all
        # exchanges are over.
        later = Deferred()
        later(self.move_own)()
        return self._meet(later)

    def move_own(self) -> None:
        """Move what this rank makes and takes alone, straight into the sink, by several threads."""
        with span("move"):
            share(self._work(), self._limit.jobs, self._worker, self._do)

    def _worker(self, stop: Event) -> Worker:
        return Worker(self._source, self._limit, stop, new_steps(together=self._notes))

    def move_others(self) -> int:
        """Move what ranks make for one another; collective. Otherwise as `run`."""
        return self._meet(Deferred()) if self._others else 0

    def _work(self) -> Iterator[list[_Work]]:
        """Yield what one worker does from beginning to end before it takes something else."""
        # An ordered sink (a file that is hashed while it is written) takes a queue from beginning to end, or its spans;
        # others take any run.
        queues = self._own.get(self._exchange.rank, ())
        if not self._sink.ordered:
            runs = (
                (item, start, min(start + RUN, item.size))
                for queue in queues
                for item in queue
                for start in range(0, item.size, RUN)
            )
            yield from self._grouped((run, run[2] - run[1]) for run in runs)
            return
        alone = [queue[0] for queue in queues if len(queue) == 1 and queue[0].queue is None]
        for queue in queues:
            if len(queue) > 1 or queue[0].queue is not None:
                yield [(item, 0, item.size) for item in queue]
        parts = self._parts(alone)
        sizes = [(part, part[2] - part[1]) for part in parts]
        yield from self._grouped(largest_first(sizes) if self._notes else sizes)

    def _grouped(self, sizes: Iterable[tuple[_Work, int]]) -> Iterator[list[_Work]]:
        """Yield work in groups for one worker each."""
        total = sum(item.size for queue in self._own.get(self._exchange.rank, ()) for item in queue)
        return grouped(sizes, noted=self._notes, fair=total // self._limit.jobs)

    def _parts(self, items: Sequence[Item]) -> Iterator[_Work]:
        """Yield the parts of items that any worker can take."""
        for item in items:
            span_size = self._sink.span or item.size
            if item.blocks is not None or item.size <= span_size or hasattr(self._source, "lend"):
                yield item, 0, item.size
            else:
                yield from ((item, at, min(at + span_size, item.size)) for at in range(0, item.size, span_size))

    def _do(self, worker: Worker, work: list[_Work]) -> None:
        with worker.steps as steps:
            for item, start, stop in work:
                self._move(worker, item, start, stop)
            steps.run()

    def _move(self, worker: Worker, item: Item, start: int, stop: int) -> None:
        # A sink with memory of its own is filled in place, which saves a copy.
        room = None if self._sink.ordered else self._sink.room(item.key, start, stop)
        if room is not None:
            worker.note_fill(item.parts(start, stop), start, room)
            worker.steps.then(partial(self._sink.filled, item.key, start, stop))
        elif item.blocks is None:
            for at, block in worker.note(item, start, stop):
                self._sink.note(worker.steps, item.key, at, block)
            worker.steps.then(partial(self._there, item, stop - start))
        else:
            worker.steps.run()  # what is listed may yet read the worker's block, which this fills at once
            at = start
            for block in item.blocks(worker):
                self._sink.take(item.key, at, block)
                at += len(block)
            self._there(item, stop - start)
        worker.steps.breathe()

    def _there(self, item: Item, size: int) -> None:
        """Note that bytes of an item are there; whoever brings the last ones ends it."""
        with self._lock:
            left = self._left[item.key] = self._left.get(item.key, item.size) - size
            if not left:
                del self._left[item.key]
        if not left:
            self._sink.end(item.key)

    def _meet(self, later: Deferred) -> int:
        # Ranks with much work of their own get fewer of the runs that any rank could take.
        sizes = {rank: sum(item.size for queue in queues for item in queue) for rank, queues in self._own.items()}
        busy = {rank: sizes.get(rank, 0) + self._elsewhere.get(rank, 0) for rank in self._exchange.ranks}
        meeting, received = _Meeting(self._source, self._sink, self._limit, self._exchange), 0
        for batch in batches(self._others, busy, self._owner):
            received += meeting.round(batch, later)
        self._exchange.close()
        later.check()
        return received


class _Meeting:
    """Where runs come together: what this rank makes is sent; what it takes is put together and handed over."""

    def __init__(self, source: Readable, sink: Sink, limit: Limits, exchange: Exchange) -> None:

        self._source = source
        self._sink = sink
        self._exchange = exchange
        self._worker = Worker(source, limit.holding_runs, Event())
        self._buffer: Bytes = np.empty(RUN, np.uint8)

    def round(self, batch: Sequence[Run], later: Deferred) -> int:
        """Exchange what the runs of a batch need, and hand them over; return the bytes received."""
        # All ranks compute the same list in the same order, so a parcel is identified by its number.
        sent = [(run, rank) for run in batch for rank in run.makers if set(run.takers) - {rank}]
        arrived: dict[tuple[Run, int], Bytes] = {}

        def make(number: int, buffer: Bytes) -> None:
            run, rank = sent[number]
            # With several makers each sends only its copies, packed without gaps; a single maker sends the finished
            # run.
            if run.only_maker is None:
                self._worker.fill([packing for packing, _ in packed(run.parts(rank))], 0, buffer)
            else:
                self._worker.fill(run.parts(rank), run.start, buffer)

        def keep(number: int, buffer: Bytes) -> None:
            arrived[sent[number]] = buffer

        received = self._exchange.round([_parcel(run, rank) for run, rank in sent], later(make), later(keep))
        for run in batch:
            if self._exchange.rank in run.takers:
                later(self._finish)(run, {rank: arrived.get((run, rank)) for rank in run.makers})
                if run.stop == run.item.size:
                    later(self._sink.end)(run.item.key)
        return received

    def _finish(self, run: Run, arrived: Mapping[int, Bytes | None]) -> None:
        """Hand a run over: as it came, or as this rank makes it, or put together from what its makers gave."""
        key, sink = run.item.key, self._sink
        # None if the run must be put together from several packs, or if this rank makes it for itself alone.
        whole = None if run.only_maker is None else arrived[run.only_maker]
        if whole is not None:
            sink.take(key, run.start, whole.data)
            return
        room = sink.room(key, run.start, run.stop)
        if room is None and run.only_maker is not None:
            sink.take(key, run.start, self._worker.block(run.parts(run.only_maker), run.start, run.stop).data)
            return
        out = self._buffer[: run.size] if room is None else room
        if run.padded:
            out[:] = 0
        for rank, pack in arrived.items():
            self._lay(run, rank, pack, out)
        if room is None:
            sink.take(key, run.start, out.data)
        else:
            sink.filled(key, run.start, run.stop)

    def _lay(self, run: Run, rank: int, pack: Bytes | None, out: Bytes) -> None:
        """Lay what a maker gave into a run, or what this rank has itself."""
        if pack is None:
            with self._worker.steps as steps:
                for part in run.parts(rank):
                    note_fill(steps, self._source, part, out, run.start, self._worker.scratch)
                steps.run()
            return
        for _, spreading in packed(run.parts(rank)):
            held, at = pack[spreading.source :][: spreading.size], spreading.target - run.start
            scatter(held, out, at, spreading.width, spreading.loops)


def _parcel(run: Run, maker: int) -> Parcel:
    """Return what a maker of a run sends: the run as it is where it alone makes it, else its parts packed."""
    # A finished run goes to every taker, the maker included; of a pack the maker needs none, as it fills in its own
    # copies.
    takers = run.takers if run.only_maker is not None else tuple(rank for rank in run.takers if rank != maker)
    return Parcel(maker, takers, run.sent(maker))


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
        full = max(opened.values(), default=0) > _OPEN or max(moved.values(), default=0) > self._most
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
