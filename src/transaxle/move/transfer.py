"""Transfers (strided copies in bytes), and the interfaces of the sources, sinks and exchanges that they use.

A transfer copies bytes from a file to a tensor, and has no information on axes. `clip` cuts a transfer to a byte range
of the target, so that a tensor of any size is produced block by block in fixed memory. `add_transfers` appends to a
list of steps the reads and copies that fill a buffer. Runs (contiguous ranges) near one another in a file are read
together into a scratch buffer, and copied from it to their places. Distant runs are read directly to their places.

One interface (`Readable`) reads both the files of a storage and the memory of ranks. Between ranks, an `Exchange` moves
parcels (blocks of bytes), in rounds of bounded memory. All ranks compute each parcel's sender, receivers and size, so
parcels have no headers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any, ParamSpec, Protocol

import msgspec
import numpy as np

from transaxle.axes.geometry import BoxCopy, Loop, lexicographic_boxes, rank
from transaxle.formats.storage.copier import READING, WRITING, Bytes, Steps, scatter


class Transfer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A strided copy from a file into a tensor, in bytes."""

    file: str
    """Name of the source file, in its container."""
    source: int
    """Byte offset of the first element to copy in the file."""
    target: int
    """Byte offset of the first element to copy in the target tensor or chunk."""
    width: int
    """Number of bytes of one run (contiguous range); `loops` repeat the run."""
    loops: tuple[Loop, ...] = ()
    """Loops over runs, each `(count, source stride, target stride)` in bytes; outermost first, in target order."""

    @property
    def size(self) -> int:
        """Number of bytes that the transfer copies."""
        count = self.width
        for loop in self.loops:
            count *= loop[0]
        return count

    @property
    def target_end(self) -> int:
        """Offset after the last byte of the target that the transfer writes."""
        end = self.target + self.width
        for count, _, step in self.loops:
            end += (count - 1) * step
        return end

    @property
    def source_span(self) -> int:
        """Number of bytes from the first to the last byte that the transfer reads, gaps included."""
        span = self.width
        for count, step, _ in self.loops:
            span += (count - 1) * step
        return span

    @property
    def is_dense(self) -> bool:
        """Whether the runs follow one another in the file without gaps, in the order of the target."""
        span = self.width
        for count, step, _ in reversed(self.loops):
            if step != span:
                return False
            span *= count
        return True

    def as_json(self) -> dict[str, Any]:
        """Return the transfer as JSON data, in which each number has a name."""
        loops = [dict(zip(("count", "source_stride", "target_stride"), loop, strict=True)) for loop in self.loops]
        return {**{name: getattr(self, name) for name in self.__struct_fields__}, "loops": loops}


def lower(file: str, base: int, itemsize: int, source: int, target: int, loops: Sequence[Loop]) -> Transfer:
    """Convert a box copy, counted in elements, to a transfer, counted in bytes.

    Args:
        file: name of the file that contains the source chunk.
        base: byte offset in the file at which the chunk begins.
        itemsize: bytes per element.
        source: index in the chunk of the first element to copy.
        target: index in the target tensor of the first element to copy.
        loops: merged loops, each `(count, source stride, target stride)` in elements.
    """
    scaled = [(count, step * itemsize, into * itemsize) for count, step, into in loops]
    width = itemsize
    if scaled and scaled[-1][1] == width and scaled[-1][2] == width:
        width *= scaled.pop()[0]
    return Transfer(file, base + source * itemsize, target * itemsize, width, tuple(scaled))


def as_box_copy(transfer: Transfer, itemsize: int) -> BoxCopy:
    """Return a transfer between tensors of one dtype as a box copy in elements, which is the inverse of `lower`."""
    loops = [(count, source // itemsize, target // itemsize) for count, source, target in transfer.loops]
    run = (transfer.width // itemsize, 1, 1)
    return BoxCopy(transfer.source // itemsize, transfer.target // itemsize, (*loops, run))


def clip(transfer: Transfer, start: int, stop: int) -> Iterator[Transfer]:
    """Yield the sections of a transfer whose target bytes are in `[start, stop)`, as transfers.

    Post-condition: the yielded transfers are disjoint, and copy exactly the bytes whose target offset is in the range.
    """
    if start <= transfer.target and transfer.target_end <= stop:
        yield transfer
        return
    if not transfer.loops:
        low, high = max(start, transfer.target), min(stop, transfer.target_end)
        if low < high:
            source = transfer.source + low - transfer.target
            yield Transfer(transfer.file, source, low, high - low)
        return
    loops = [(count, step) for count, _, step in transfer.loops]
    first = rank([*loops, (transfer.width, 1)], start - transfer.target)
    last = rank([*loops, (transfer.width, 1)], stop - transfer.target)
    for box in lexicographic_boxes([*(count for count, _ in loops), transfer.width], first, last):
        *outer, (low, high) = box
        source, target = transfer.source + low, transfer.target + low
        clipped_loops = []
        for (begin, end), (_, step, into) in zip(outer, transfer.loops, strict=True):
            source += begin * step
            target += begin * into
            if end - begin > 1:
                clipped_loops.append((end - begin, step, into))
        yield Transfer(transfer.file, source, target, high - low, tuple(clipped_loops))


def clip_blocks(transfers: Sequence[Transfer], ends: Iterable[int]) -> Iterator[tuple[int, int, list[Transfer]]]:
    """Clip transfers to consecutive blocks of the target.

    Args:
        transfers: the transfers, sorted by their first target byte.
        ends: end offset of each block in the target, in bytes; the first block starts at 0.

    Yields:
        `(start, stop, transfers clipped to that range)`, one for each block.
    """
    running: list[Transfer] = []
    next_transfer = start = 0
    for stop in ends:
        running = [transfer for transfer in running if transfer.target_end > start]
        while next_transfer < len(transfers) and transfers[next_transfer].target < stop:
            running.append(transfers[next_transfer])
            next_transfer += 1
        yield start, stop, [part for transfer in running for part in clip(transfer, start, stop)]
        start = stop


_SIDE_BY_SIDE = 1 << 20
"""Maximum size, in bytes, of the scratch memory for several transfers together; it fits into the processor's cache."""


class Readable(Protocol):
    """A source from which transfers read, such as the files of a storage (`formats.Storage`).

    If a source has also a method `lend` (see `Memory`), transfers copy from its memory and do not read.
    """

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes of a file from `offset` on."""

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """Add a read into `view` to `steps`: the bytes of a file from `offset` on, or strided runs of its bytes."""


class Memory(Readable, Protocol):
    """The memory of several ranks as one storage; each of its files is one rank's shard of a tensor."""

    def lend(self, name: str, offset: int, size: int) -> Bytes:
        """Return bytes of this rank's memory without a copy. Lent bytes may change at any time, so callers must read
        them only once.
        """

    def owner(self, name: str) -> int:
        """Return the rank whose memory contains a file; other ranks cannot read the file."""


class Writable(Protocol):
    """Files that can be written at any offset."""

    def pwrite(self, file: str, offset: int, view: memoryview) -> None:
        """Write the bytes of `view` to a file at `offset`."""


class StepWritable(Writable, Protocol):
    """Local files, for which writes can be added to a list of steps."""

    def add_write(self, steps: Steps, file: str, offset: int, view: memoryview) -> None:
        """Add a write to `steps`, which writes `view` to a file at `offset`, as `pwrite` does."""


class Sink(ABC):
    """Receives the bytes of items (byte arrays): it either exposes memory to fill (`buffer`), or accepts bytes
    (`take`).
    """

    ordered = True
    """Whether the bytes of an item, and the items of one queue, must be delivered in order by one thread."""

    span: int | None = None
    """Size in bytes of an item's spans, which several threads may deliver in any order; None means one span per
    item.
    """

    batches_steps = False
    """Whether one call can carry out many steps, which is true for sinks on this machine."""

    def buffer(self, _key: int, _start: int, _stop: int) -> Bytes | None:
        """Return the memory for an item's bytes `[start, stop)`; None means that the bytes must be passed to `take`."""
        return None

    def mark_filled(self, _key: int, _start: int, _stop: int) -> None:  # noqa: B027 - a sink may have nothing to note
        """Note that the memory for an item's bytes `[start, stop)` has been filled."""

    @abstractmethod
    def take(self, key: int, start: int, data: memoryview) -> None:
        """Consume an item's bytes from `start` on; the sink must not modify `data` or keep a reference to it."""

    def add_take(self, steps: Steps, key: int, start: int, data: memoryview) -> None:
        """Add a call of `take` to `steps`; when the step runs, `data` must contain the bytes to consume."""
        steps.call(partial(self.take, key, start, data), WRITING)

    def end(self, _key: int) -> None:  # noqa: B027 - as above
        """Note that an item is complete; called once per item, also for an empty item."""


Fill = Callable[[int, Bytes], None]
"""`fill(index of the parcel, buffer)` writes the parcel's bytes into the buffer."""
Take = Callable[[int, Bytes], None]
"""`take(index of the parcel, buffer)` consumes the parcel's bytes; the buffer stays valid until the next round."""
Arguments = ParamSpec("Arguments")


class Parcel(msgspec.Struct, frozen=True):
    """A block of bytes that one rank sends to one or more ranks."""

    sender: int
    """Global rank of the sending process."""
    receivers: tuple[int, ...]
    """Global ranks of the receiving processes; they may include the sender."""
    size: int
    """Size of the parcel in bytes."""


class Exchange(Protocol):
    """Moves parcels between ranks."""

    @property
    def rank(self) -> int:
        """Global rank of this process."""

    @property
    def ranks(self) -> Sequence[int]:
        """Global ranks of all processes, in an order that is the same on each rank."""

    def round(self, parcels: Sequence[Parcel], fill: Fill, take: Take) -> int:
        """Send parcels, all at once. `round` is a collective operation: all ranks must call it with equal parcels.

        Args:
            parcels: the parcels of this round; a parcel that a rank sends to itself is not sent through the network.
            fill: called on the sender, once per parcel; it must not raise (see `DeferredErrors`).
            take: called on each receiver, once per parcel; it must not raise.

        Returns:
            Number of bytes that this rank received from other ranks.
        """

    def close(self) -> None:
        """Free the buffers that the rounds used."""


class NoExchange:
    """The exchange of a single process: it sends nothing."""

    rank = 0
    ranks = (0,)

    def round(self, _parcels: Sequence[Parcel], _fill: Fill, _take: Take) -> int:
        """Send nothing (see `Exchange.round`), because a single process has no other ranks."""
        return 0

    def close(self) -> None:
        """Free no buffers (see `Exchange.close`), because a single process has none."""


class DeferredErrors:
    """Wraps callbacks so that they never raise: the first error is stored, later calls are skipped, and `check` raises
    the stored error.

    If a rank left a collective operation early because of an error, the other ranks would wait for it forever.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __call__(self, work: Callable[Arguments, None]) -> Callable[Arguments, None]:
        """Return a function that calls `work` and stores the error instead of raising it."""

        def quietly(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
            if self._error is not None:
                return
            try:
                work(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - it is raised again by `check`
                self._error = error

        return quietly

    def check(self) -> None:
        """Raise the stored error, if there is one."""
        if self._error is not None:
            raise self._error


class Scratch:
    """A buffer for strided reads, which is used again and again; each worker has one.

    Gaps between the runs (contiguous ranges) of a transfer are read too, if one large read is faster than many small
    reads.

    Args:
        size: size of the buffer in bytes.
        waste: maximum ratio of bytes read (with gaps) to bytes needed.
        gap: size in bytes of the largest gap that is read whatever the ratio.
        few: maximum number of runs that are read one by one.
    """

    def __init__(self, size: int, waste: float = 4.0, gap: int = 1 << 14, few: int = 0) -> None:

        self.array: Bytes = np.empty(size, np.uint8)
        self.waste = waste
        self.gap = gap
        self.few = few

    def reads_span(self, transfer: Transfer) -> bool:
        """Return whether to read a transfer's whole span at once: the span must fit into the buffer, with
        little waste.
        """
        span = transfer.source_span
        if span > len(self.array):
            return False
        # A loop with source stride 0 reads the same bytes again, so it adds no bytes to those needed.
        runs = prod(count for count, step, _ in transfer.loops if step)
        needed = transfer.width * runs
        if runs <= self.few and span > needed:
            return False
        return span <= needed * self.waste or _widest_gap(transfer) <= self.gap

    def reads_runs(self, transfer: Transfer) -> bool:
        """Return whether to read each run directly to its place: runs must be far apart, and none may be read twice."""
        # Only the loop with the smallest source stride is examined: if two neighbouring runs are too far apart to be
        # read together, so are any two runs.
        times, step, into = min(transfer.loops, key=lambda loop: loop[1])
        if not step:
            return False
        # Number of neighbouring runs that fit together into the scratch buffer, gaps included.
        near = min(times, (len(self.array) - transfer.width) // step + 1)
        return near < 2 or not self.reads_span(Transfer(transfer.file, 0, 0, transfer.width, ((near, step, into),)))


def _widest_gap(transfer: Transfer) -> int:
    """Return the size in bytes of the widest gap between two runs of a transfer."""
    gap, span = 0, transfer.width
    # From the innermost loop outwards, `span` is the extent of all loops so far; a stride larger than `span` leaves a
    # gap.
    for count, step, _ in sorted(transfer.loops, key=lambda loop: loop[1]):
        gap = max(gap, step - span)
        span += (count - 1) * step
    return gap


def produce(reader: Readable, parts: Collection[Transfer], start: int, out: Bytes, scratch: Scratch) -> None:
    """Fill a buffer with a byte range of a target; bytes that no transfer writes are padding, and become zero.

    Args:
        reader: the source of the transfers.
        parts: the transfers that write into this byte range; they are inside the range, and disjoint.
        start: offset in the target at which `out` begins.
        out: the buffer to fill.
        scratch: buffer for strided reads.

    Raises:
        TransaxleError: if a read fails.
    """
    with Steps() as steps:
        add_transfers(steps, reader, parts, start, out, scratch)
        steps.run()


def add_transfers(
    steps: Steps, reader: Readable, parts: Collection[Transfer], start: int, out: Bytes, scratch: Scratch
) -> None:
    """Add the steps that fill a buffer with a byte range of a target; the arguments are those of `produce`."""
    # Transfers never overlap, so the sum of their sizes shows whether there is padding. Zeros are written only if there
    # is padding; otherwise a pass over the buffer is saved.
    if sum(part.size for part in parts) != len(out):
        steps.call(partial(out.fill, 0))
    # Transfers that need a single read each are read together, either directly to their places or side by side into the
    # scratch buffer.
    spans: list[tuple[Bytes, Transfer]] = []
    used = 0
    for part in parts:
        size = part.source_span
        if not part.loops or hasattr(reader, "lend"):
            add_transfer(steps, reader, part, out, start, scratch)
            continue
        fits = scratch.reads_span(part)
        if used + size > min(_SIDE_BY_SIDE, len(scratch.array)) or not fits:
            _scatter_spans(steps, spans, out, start)
            used = 0
        if not fits:
            add_transfer(steps, reader, part, out, start, scratch)
            continue
        span_bytes = scratch.array[used : used + size]
        used += size
        reader.add_read(steps, part.file, part.source, span_bytes.data)
        spans.append((span_bytes, part))
    _scatter_spans(steps, spans, out, start)


def _scatter_spans(steps: Steps, spans: list[tuple[Bytes, Transfer]], out: Bytes, start: int) -> None:
    """Add steps that copy spans from the scratch buffer to their places in the target, and clear the list of spans."""
    for span_bytes, part in spans:
        steps.scatter(span_bytes, out, part.target - start, part.width, part.loops)
    spans.clear()


def add_transfer(steps: Steps, reader: Readable, transfer: Transfer, out: Bytes, start: int, scratch: Scratch) -> None:
    """Add the steps of one transfer, which fills a section of a buffer.

    Args:
        steps: the list to which the steps are added.
        reader: the source of the transfer.
        transfer: the transfer; its target must be inside the buffer.
        out: the buffer to fill.
        start: offset in the target at which `out` begins.
        scratch: buffer for strided reads; a transfer that does not fit into it is split.
    """
    file, at, width, loops = transfer.file, transfer.target - start, transfer.width, transfer.loops
    # Lent memory needs no read: the runs are copied directly from that memory.
    lend = getattr(reader, "lend", None)
    if lend is not None:
        steps.call(lambda: scatter(lend(file, transfer.source, transfer.source_span), out, at, width, loops), READING)
        return
    if not loops:
        reader.add_read(steps, file, transfer.source, out.data[at : at + width])
        return
    if scratch.reads_span(transfer):
        span_bytes = scratch.array[: transfer.source_span]
        reader.add_read(steps, file, transfer.source, span_bytes.data)
        steps.scatter(span_bytes, out, at, width, loops)
        return
    if scratch.reads_runs(transfer):
        end = transfer.target_end - start
        reader.add_read(steps, file, transfer.source, out.data[at:end], width, loops)
        return
    # The whole transfer does not fit into the scratch buffer. The loop with the widest source step is split, and as
    # many rounds of the loop as fit are read at once.
    widest = max(range(len(loops)), key=lambda i: loops[i][1])
    count, step, into = loops[widest]
    before, after = loops[:widest], loops[widest + 1 :]

    def rounds(first: int, count_taken: int) -> Transfer:
        round_loops = (*before, (count_taken, step, into), *after) if count_taken > 1 else before + after
        return Transfer(file, transfer.source + first * step, transfer.target + first * into, width, round_loops)

    first_round, buffer = rounds(0, 1), len(scratch.array)
    span = first_round.source_span
    at_once = min(count, (buffer - span) // step + 1) if step else 1
    if at_once > 1 and scratch.reads_span(rounds(0, at_once)):
        for first in range(0, count, at_once):
            add_transfer(steps, reader, rounds(first, min(at_once, count - first)), out, start, scratch)
    # The rounds of the loop are too far apart to be read together. Each round is read separately, but several rounds
    # are put side by side in the scratch buffer, so that one step copies them to their places.
    elif first_round.loops and scratch.reads_span(first_round):
        for first in range(0, count, buffer // span):
            count_taken = min(buffer // span, count - first)
            for slot in range(count_taken):
                view = scratch.array.data[slot * span : (slot + 1) * span]
                reader.add_read(steps, file, first_round.source + (first + slot) * step, view)
            side_by_side = (*before, (count_taken, span, into), *after)
            steps.scatter(scratch.array[: count_taken * span], out, at + first * into, width, side_by_side)
    else:
        for first in range(count):
            add_transfer(steps, reader, rounds(first, 1), out, start, scratch)
