"""The mover: carries items from a source to a sink, whatever these are.

A conversion moves files to files, a load files to the memory of ranks, a save this memory to files, and a reshard
memory to memory. What a rank makes and takes alone, its threads move; all else goes through an exchange, in batches of
bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from threading import Event, Lock

from transaxle.formats.storage.compiled import new_batch
from transaxle.move.endpoint import Bytes, Readable, Sink
from transaxle.move.runs import RUN, Item, Owner, Run, alone, batches, packed
from transaxle.move.strided_fill import fill, scatter
from transaxle.move.transport import Alone, Deferred, Exchange, Parcel
from transaxle.move.workers import Limits, Worker, are_noted, grouped, largest_first, share
from transaxle.spans import span

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
        """Whether steps are noted and done in batches: from files of this machine."""
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
        return Worker(self._source, self._limit, stop, new_batch() if self._notes else None)

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
        with worker.batch or nullcontext():
            self._move(worker, work)

    def _move(self, worker: Worker, work: list[_Work]) -> None:
        batch = worker.batch
        for item, start, stop in work:
            # A sink with memory of its own is filled in place, which saves a copy.
            room = None if self._sink.ordered else self._sink.room(item.key, start, stop)
            if room is not None and batch is not None:
                worker.note_fill(batch, item.parts(start, stop), start, room)
                batch.then(partial(self._sink.filled, item.key, start, stop))
            elif room is not None:
                worker.fill(item.parts(start, stop), start, room)
                self._sink.filled(item.key, start, stop)
            elif batch is not None and item.blocks is None:
                for at, block in worker.note(batch, item, start, stop):
                    self._sink.note(batch, item.key, at, block)
                batch.then(partial(self._there, item, stop - start))
            else:
                if batch is not None:
                    batch.run()  # what is noted may yet read the worker's block, which this fills at once
                at = start
                for block in worker.stream(item, start, stop):
                    self._sink.take(item.key, at, block)
                    at += len(block)
                self._there(item, stop - start)
        if batch is not None:
            batch.run()

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
        import numpy as np

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
            for part in run.parts(rank):
                fill(self._source, part, out, run.start, self._worker.scratch)
            return
        for _, spreading in packed(run.parts(rank)):
            scatter(pack[spreading.source :][: spreading.size], spreading, out, spreading.target - run.start)


def _parcel(run: Run, maker: int) -> Parcel:
    """Return what a maker of a run sends: the run as it is where it alone makes it, else its parts packed."""
    # A finished run goes to every taker, the maker included; of a pack the maker needs none, as it fills in its own
    # copies.
    takers = run.takers if run.only_maker is not None else tuple(rank for rank in run.takers if rank != maker)
    return Parcel(maker, takers, run.sent(maker))
