"""Moves items (byte arrays of tensors) from a source to a sink: between files, between ranks, or between files and
ranks.

A conversion moves files to files, a load moves files into the memory of ranks, a save moves the memory of ranks into
files, and a reshard moves memory to memory. If one rank can both read and consume an item's bytes, this rank's own
threads move the item. Items for which no such rank exists are cut into item ranges, and the ranges are sent between
ranks in batches of bounded memory (an exchange). Each range has source ranks, which read parts of the range, and target
ranks, which receive the range. All ranks compute the same ranges, so the ranks agree on senders and receivers without
communication. If several ranks have parts of one range (a weight sharded by columns), the target ranks assemble the
range.
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
from transaxle.move.transfer import (
    DeferredErrors,
    Exchange,
    NoExchange,
    Parcel,
    Readable,
    Sink,
    Transfer,
    add_transfer,
    clip_blocks,
)
from transaxle.move.workers import (
    RANGE_BYTES,
    Item,
    Limits,
    Load,
    Owner,
    Worker,
    can_batch,
    group_tasks,
    largest_first,
    new_steps,
    run_workers,
)
from transaxle.spans import span

_OPEN = 64 << 20
"""Maximum number of bytes of the item ranges that a target rank assembles at once."""
_ROUND = 32 << 20
"""Maximum number of bytes that a rank sends, and that it receives, in one batch; a larger item range has its
own batch.
"""
_Slice = tuple[Item, int, int]
"""A byte range of an item: `(item, start, stop)`."""


class Movement:
    """Moves items (byte arrays) from a source to a sink; each movement runs once.

    Args:
        items: the items to move. All ranks pass the same items in the same order, but a rank may omit an item that one
            different rank both reads and consumes.
        source: the files or memory to read from. For items without `source_ranks`, the source must be the memory of
            ranks.
        sink: object that receives the items' bytes that this rank needs.
        limit: the number of workers and the size of their buffers.
        exchange: object that moves bytes between the ranks; None for a single process.
        omitted_bytes: rank -> number of bytes of its own items that this rank omitted from `items`.
    """

    def __init__(
        self,
        items: Sequence[Item],
        source: Readable,
        sink: Sink,
        limit: Limits,
        exchange: Exchange | None = None,
        omitted_bytes: Mapping[int, int] | None = None,
    ) -> None:
        self._source = source
        self._sink = sink
        self._limit = limit
        self._exchange = exchange or NoExchange()
        rank = self._exchange.rank
        self._owner: Owner = getattr(source, "owner", None) or (lambda _: rank)
        self._local_queues, self._exchanged = divide_by_rank(items, self._owner)
        self._omitted_bytes = omitted_bytes or {}
        self._batches_steps = can_batch(source) and (sink.batches_steps or not sink.ordered)
        """Whether one call carries out many steps, which is faster for local files."""
        self._lock = Lock()
        self._missing_bytes: dict[int, int] = {}
        """Item key -> number of bytes that have not been delivered, for items that several workers share."""

    def run(self) -> int:
        """Move all items. `run` is a collective operation: all ranks must call it.

        Returns:
            Number of bytes that this rank received from other ranks.

        Raises:
            Exception: the first error of this rank's source or sink, raised only after all exchanges.
        """
        if not self._exchanged:
            self.move_local()
            return 0
        # After an error, this rank must still take part in the collective calls, or the other ranks would wait forever.
        deferred = DeferredErrors()
        deferred(self.move_local)()
        return self._exchange_ranges(deferred)

    def move_local(self) -> None:
        """Move the items that this rank can both read and consume, with several threads."""
        with span("move"):
            run_workers(self._group_slices(), self._limit.jobs, self._worker, self._do)

    def _worker(self, stop: Event) -> Worker:
        return Worker(self._source, self._limit, stop, new_steps(together=self._batches_steps))

    def move_exchanged(self) -> int:
        """Move the items that need an exchange between ranks. All ranks must call `move_exchanged`; result and errors
        are those of `run`.
        """
        return self._exchange_ranges(DeferredErrors()) if self._exchanged else 0

    def _group_slices(self) -> Iterator[list[_Slice]]:
        """Yield groups of item slices; each group is moved by one worker."""
        # If a sink is ordered (a file that is hashed while it is written), whole queues, or spans of an item, are moved
        # from beginning to end. To any other sink, ranges are moved in any order.
        queues = self._local_queues.get(self._exchange.rank, ())
        if not self._sink.ordered:
            slices = (
                (item, start, min(start + RANGE_BYTES, item.size))
                for queue in queues
                for item in queue
                for start in range(0, item.size, RANGE_BYTES)
            )
            yield from self._group((item_slice, item_slice[2] - item_slice[1]) for item_slice in slices)
            return
        unqueued = [queue[0] for queue in queues if len(queue) == 1 and queue[0].queue is None]
        for queue in queues:
            if len(queue) > 1 or queue[0].queue is not None:
                yield [(item, 0, item.size) for item in queue]
        parts = self._parts(unqueued)
        sizes = [(part, part[2] - part[1]) for part in parts]
        yield from self._group(largest_first(sizes) if self._batches_steps else sizes)

    def _group(self, sizes: Iterable[tuple[_Slice, int]]) -> Iterator[list[_Slice]]:
        """Divide slices, given with their sizes in bytes, into groups for one worker each."""
        total = sum(item.size for queue in self._local_queues.get(self._exchange.rank, ()) for item in queue)
        return group_tasks(sizes, batched=self._batches_steps, fair=total // self._limit.jobs)

    def _parts(self, items: Sequence[Item]) -> Iterator[_Slice]:
        """Cut items into slices that any worker can move independently."""
        for item in items:
            span_size = self._sink.span or item.size
            if item.blocks is not None or item.size <= span_size or hasattr(self._source, "lend"):
                yield item, 0, item.size
            else:
                yield from ((item, at, min(at + span_size, item.size)) for at in range(0, item.size, span_size))

    def _do(self, worker: Worker, work: list[_Slice]) -> None:
        with worker.steps as steps:
            for item, start, stop in work:
                self._move(worker, item, start, stop)
            steps.run()

    def _move(self, worker: Worker, item: Item, start: int, stop: int) -> None:
        # If the sink exposes memory, that memory is filled in place, which saves a copy.
        buffer = None if self._sink.ordered else self._sink.buffer(item.key, start, stop)
        if buffer is not None:
            worker.add_transfer(item.parts(start, stop), start, buffer)
            worker.steps.then(partial(self._sink.mark_filled, item.key, start, stop))
        elif item.blocks is None:
            for at, block in worker.add_item(item, start, stop):
                self._sink.add_take(worker.steps, item.key, at, block)
            worker.steps.then(partial(self._count_delivered, item, stop - start))
        else:
            worker.steps.run()  # the pending steps may read the block that is filled next, so they run first
            at = start
            for block in item.blocks(worker):
                self._sink.take(item.key, at, block)
                at += len(block)
            self._count_delivered(item, stop - start)
        worker.steps.run_if_full()

    def _count_delivered(self, item: Item, size: int) -> None:
        """Count delivered bytes of an item, and tell the sink that the item is complete after its last byte."""
        with self._lock:
            missing = self._missing_bytes[item.key] = self._missing_bytes.get(item.key, item.size) - size
            if not missing:
                del self._missing_bytes[item.key]
        if not missing:
            self._sink.end(item.key)

    def _exchange_ranges(self, deferred: DeferredErrors) -> int:
        # A rank that has much local work gets fewer of the ranges that any rank could read.
        sizes = {
            rank: sum(item.size for queue in queues for item in queue) for rank, queues in self._local_queues.items()
        }
        busy = {rank: sizes.get(rank, 0) + self._omitted_bytes.get(rank, 0) for rank in self._exchange.ranks}
        ranges, received = _RangeExchange(self._source, self._sink, self._limit, self._exchange), 0
        for batch in batches(self._exchanged, busy, self._owner):
            received += ranges.round(batch, deferred)
        self._exchange.close()
        deferred.check()
        return received


class _RangeExchange:
    """Exchanges item ranges between ranks: sends what this rank reads, and assembles the ranges that its sink needs."""

    def __init__(self, source: Readable, sink: Sink, limit: Limits, exchange: Exchange) -> None:

        self._source = source
        self._sink = sink
        self._exchange = exchange
        self._worker = Worker(source, limit.for_item_ranges, Event())
        self._buffer: Bytes = np.empty(RANGE_BYTES, np.uint8)

    def round(self, batch: Sequence[ItemRange], deferred: DeferredErrors) -> int:
        """Exchange the ranges of one batch, pass them to the sink, and return the number of bytes received."""
        # All ranks compute the same list of parcels in the same order, so the index of a parcel identifies it.
        parcels = [
            (item_range, rank)
            for item_range in batch
            for rank in item_range.source_ranks
            if set(item_range.target_ranks) - {rank}
        ]
        packs: dict[tuple[ItemRange, int], Bytes] = {}

        def fill_parcel(number: int, buffer: Bytes) -> None:
            item_range, rank = parcels[number]
            # If a range has several source ranks, each sends only the bytes that it has, packed without gaps. A single
            # source rank sends the finished range.
            if item_range.only_source is None:
                self._worker.fill([packing for packing, _ in pack_copies(item_range.parts(rank))], 0, buffer)
            else:
                self._worker.fill(item_range.parts(rank), item_range.start, buffer)

        def keep_parcel(number: int, buffer: Bytes) -> None:
            packs[parcels[number]] = buffer

        received = self._exchange.round(
            [_parcel(item_range, rank) for item_range, rank in parcels], deferred(fill_parcel), deferred(keep_parcel)
        )
        for item_range in batch:
            if self._exchange.rank in item_range.target_ranks:
                deferred(self._deliver)(
                    item_range, {rank: packs.get((item_range, rank)) for rank in item_range.source_ranks}
                )
                if item_range.stop == item_range.item.size:
                    deferred(self._sink.end)(item_range.item.key)
        return received

    def _deliver(self, item_range: ItemRange, packs: Mapping[int, Bytes | None]) -> None:
        """Pass an item range to the sink. If several ranks have sent packed bytes of the range, or this rank has read
        it, the bytes are first assembled.
        """
        key, sink = item_range.item.key, self._sink
        # None if the range must be assembled from the packed bytes of several ranks, or if this rank reads the range
        # for itself alone.
        whole = None if item_range.only_source is None else packs[item_range.only_source]
        if whole is not None:
            sink.take(key, item_range.start, whole.data)
            return
        buffer = sink.buffer(key, item_range.start, item_range.stop)
        if buffer is None and item_range.only_source is not None:
            sink.take(
                key,
                item_range.start,
                self._worker.block(item_range.parts(item_range.only_source), item_range.start, item_range.stop).data,
            )
            return
        out = self._buffer[: item_range.size] if buffer is None else buffer
        if item_range.has_padding:
            out[:] = 0
        for rank, pack in packs.items():
            self._place_copies(item_range, rank, pack, out)
        if buffer is None:
            sink.take(key, item_range.start, out.data)
        else:
            sink.mark_filled(key, item_range.start, item_range.stop)

    def _place_copies(self, item_range: ItemRange, rank: int, pack: Bytes | None, out: Bytes) -> None:
        """Copy a source rank's packed bytes to their places in `out`; if `pack` is None, copy from this rank's own
        source.
        """
        if pack is None:
            with self._worker.steps as steps:
                for part in item_range.parts(rank):
                    add_transfer(steps, self._source, part, out, item_range.start, self._worker.scratch)
                steps.run()
            return
        for _, spreading in pack_copies(item_range.parts(rank)):
            packed_bytes, at = pack[spreading.source :][: spreading.size], spreading.target - item_range.start
            scatter(packed_bytes, out, at, spreading.width, spreading.loops)


def _parcel(item_range: ItemRange, source_rank: int) -> Parcel:
    """Return a source rank's parcel: the finished range if the rank has all of it, otherwise the packed bytes that it
    has.
    """
    # A finished range is sent to every target rank, including the sender itself. Packed bytes are not sent to their
    # sender, which copies them from its own source directly.
    target_ranks = (
        item_range.target_ranks
        if item_range.only_source is not None
        else tuple(rank for rank in item_range.target_ranks if rank != source_rank)
    )
    return Parcel(source_rank, target_ranks, item_range.sent_bytes(source_rank))


def divide_by_rank(items: Iterable[Item], owner: Owner) -> tuple[dict[int, list[list[Item]]], list[Item]]:
    """Divide items into those that one rank can move alone, and those that need an exchange between ranks.

    Returns:
        A mapping from rank to its queues of items, and the list of items for the exchange. All items of a queue are
        either in the mapping or in the list.
    """
    queues: dict[Hashable, list[Item]] = {}
    for item in items:
        queues.setdefault(item if item.queue is None else item.queue, []).append(item)
    local_queues: dict[int, list[list[Item]]] = {}
    exchanged: list[Item] = []
    for queue in queues.values():
        # A single writer writes a queue in order. So if any item of a queue needs an exchange, the exchange is used for
        # the whole queue.
        ranks = {item.only_rank(owner) for item in queue}
        rank = ranks.pop() if len(ranks) == 1 else None
        if rank is None:
            exchanged.extend(queue)
        else:
            local_queues.setdefault(rank, []).append(queue)
    return local_queues, exchanged


class ItemRange(msgspec.Struct, frozen=True, eq=False):
    """A contiguous byte range of an item, with the ranks that read the range and the ranks that receive it."""

    item: Item
    """The item (byte array) to which the range belongs."""
    start: int
    """Offset of the range's first byte in the item."""
    stop: int
    """Offset after the range's last byte in the item."""
    source_ranks: tuple[int, ...]
    """Ranks that read parts of the range from the source."""
    target_ranks: tuple[int, ...]
    """Ranks that receive the range for their sinks."""
    copies: Mapping[int, list[Transfer]] | None
    """Source rank -> its transfers into the range; None means that a single source rank reads the whole range."""

    @property
    def size(self) -> int:
        """Length of the range in bytes."""
        return self.stop - self.start

    def parts(self, source_rank: int) -> list[Transfer]:
        """Return the transfers by which a source rank fills the bytes of the range that it has."""
        return self.item.parts(self.start, self.stop) if self.copies is None else self.copies[source_rank]

    def sent_bytes(self, source_rank: int) -> int:
        """Return the number of bytes that a source rank sends to each target rank for this range."""
        return self.size if self.only_source is not None else sum(part.size for part in self.parts(source_rank))

    @property
    def only_source(self) -> int | None:
        """The single source rank of the range; None if the range has several source ranks or none."""
        return self.source_ranks[0] if len(self.source_ranks) == 1 else None

    @property
    def has_padding(self) -> bool:
        """Whether the range has padding: zero bytes that no transfer writes."""
        return sum(part.size for rank in self.source_ranks for part in self.parts(rank)) != self.size


class _Lane:
    """The item ranges of all items with the same target ranks; the lane produces these ranges one by one.

    Args:
        items: the items of the lane, in order.
        busy: number of bytes assigned to each rank so far; the lane adds the bytes that it assigns.
        owner: function that returns the rank whose memory contains a file.
    """

    def __init__(self, items: Iterable[Item], busy: Load, owner: Owner) -> None:
        # A generator is used because a range must be cut only when it is next in the lane: then `busy` includes all
        # earlier choices of every lane.
        self._cut_item = (item_range for item in items for item_range in _cut_item(item, busy, owner))
        self.head: ItemRange | None = next(self._cut_item, None)

    def step(self) -> None:
        """Advance to the next range of the lane."""
        self.head = next(self._cut_item, None)


def _cut_item(item: Item, busy: Load, owner: Owner) -> Iterator[ItemRange]:
    """Cut an item into ranges, and choose source and target ranks for each range: the least busy ranks, if there is a
    choice.
    """
    if item.source_ranks:
        for start, stop in pairwise(item.cuts):
            yield ItemRange(
                item, start, stop, (busy.add(busy.least(item.source_ranks), stop - start),), item.target_ranks, None
            )
        return
    for start, stop, parts in clip_blocks(item.transfers, item.cuts[1:]):
        copies: dict[int, list[Transfer]] = {}
        for part in parts:
            copies.setdefault(owner(part.file), []).append(part)
        # If the item has no target ranks, the range is sent to a rank that already has a part of the range, or to any
        # rank if the range contains only padding.
        target_ranks = item.target_ranks or (busy.add(busy.least(copies or busy), stop - start),)
        yield ItemRange(item, start, stop, tuple(copies), target_ranks, copies)


class _BatchLimits:
    """The limits of one batch: how many bytes a rank may assemble, send and receive.

    Args:
        max_bytes: maximum number of bytes that a rank sends, and that it receives, in one batch.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._open: dict[int, int] = {}
        self._moved: dict[tuple[int, bool], int] = {}

    def take(self, item_range: ItemRange) -> bool:
        """Add a range to the batch and return True, or return False if it would exceed a limit; the first range always
        fits.
        """
        open_bytes = {
            target_rank: self._open.get(target_rank, 0) + item_range.size for target_rank in item_range.target_ranks
        }
        moved_bytes: dict[tuple[int, bool], int] = {}
        for rank in item_range.source_ranks:
            size = item_range.sent_bytes(rank)
            for target_rank in item_range.target_ranks:
                # A source rank that is also a target keeps the bytes that it has, so only bytes sent to other ranks are
                # counted.
                if target_rank != rank:
                    for key in ((rank, True), (target_rank, False)):
                        moved_bytes[key] = moved_bytes.get(key, self._moved.get(key, 0)) + size
        # The limits apply to each rank separately, because each rank has its own memory and network link.
        full = max(open_bytes.values(), default=0) > _OPEN or max(moved_bytes.values(), default=0) > self._max_bytes
        # An empty batch accepts a range of any size, because a range above the limits could otherwise never be moved.
        if full and self._open:
            return False
        self._open |= open_bytes
        self._moved |= moved_bytes
        return True


def batches(
    items: Iterable[Item], busy: Mapping[int, int], owner: Owner, max_bytes: int | None = None
) -> Iterator[list[ItemRange]]:
    """Cut items into ranges, and collect the ranges in batches that keep all ranks busy.

    Args:
        items: the items to exchange.
        busy: rank -> number of bytes that it moves in addition to these items.
        owner: function that returns the rank whose memory contains a file.
        max_bytes: number of bytes that a rank sends, and that it receives, in one batch; `_ROUND` by default. A larger
            range has its own batch.

    Post-condition: the ranges of one item are in order, and so are all ranges with the same target ranks.
    """
    groups: dict[tuple[int, ...], list[Item]] = {}
    for item in items:
        groups.setdefault(item.target_ranks, []).append(item)
    counts = Load(busy)
    lanes = [_Lane(group, counts, owner) for group in groups.values()]
    while any(lane.head is not None for lane in lanes):
        # One range of each lane is added in turn until no range fits, so that all target ranks have work in every
        # batch.
        bounds, batch = _BatchLimits(max_bytes or _ROUND), list[ItemRange]()
        moving = True
        while moving:
            moving = False
            for lane in lanes:
                if lane.head is not None and bounds.take(lane.head):
                    batch.append(lane.head)
                    lane.step()
                    moving = True
        yield batch


def pack_copies(parts: Iterable[Transfer]) -> Iterator[tuple[Transfer, Transfer]]:
    """Split each transfer into two: one fills a buffer without gaps (a pack), and one copies from this buffer to the
    target.

    Yields:
        `(transfer from the source into the pack, transfer from the pack to the target)`.
    """
    at = 0
    for part in parts:
        counts = [count for count, _, _ in part.loops]
        # The pack keeps the order of the loops without any gaps, so sender and receiver can both compute it from the
        # transfer alone.
        dense = [step * part.width for step in row_major(counts)]
        packing = zip(counts, (source for _, source, _ in part.loops), dense, strict=True)
        spreading = zip(counts, dense, (target for *_, target in part.loops), strict=True)
        yield (
            Transfer(part.file, part.source, at, part.width, tuple(packing)),
            Transfer(part.file, at, part.target, part.width, tuple(spreading)),
        )
        at += part.size
