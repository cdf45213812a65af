"""Transfers, and the endpoints between which they carry bytes.

**Transfers**: box copies in bytes, from a place in a file to a place in a tensor.

A transfer knows nothing of axes. `clip` cuts it by a byte range of the target, so a tensor of any size is produced in
order, block by block, in fixed memory; `endpoint.note_parts` says how clipped transfers are carried out.

**Endpoints**: what bytes are moved from, and to, and how they travel between ranks.

Files of a storage and the memory of ranks look alike here. Between ranks parcels of bytes travel in rounds of bounded
memory. Every rank knows every parcel (its sender, receivers and size), so no header travels; how the bytes of a round
travel is the matter of an `Exchange`.

How transfers fill a buffer is listed (`note_parts`), as reads and copies. Runs that lie near one another are read with
all between them into a scratch buffer, and spread from there; distant ones are read each into its place.
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
    """One box copy from a file into a tensor, in bytes."""

    file: str
    """Source file inside its container."""
    source: int
    """Byte offset in the file of the first element."""
    target: int
    """Byte offset in the target tensor (or chunk) of the first element."""
    width: int
    """Bytes of the smallest contiguous run; everything below moves runs of this width."""
    loops: tuple[Loop, ...] = ()
    """`(count, source stride, target stride)` in bytes, in target order, outermost first."""

    @property
    def size(self) -> int:
        """Bytes moved."""
        count = self.width
        for loop in self.loops:
            count *= loop[0]
        return count

    @property
    def target_end(self) -> int:
        """One past the last byte written."""
        end = self.target + self.width
        for count, _, step in self.loops:
            end += (count - 1) * step
        return end

    @property
    def source_span(self) -> int:
        """Bytes between the first and one past the last byte read."""
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
        """Return it as plain JSON data, with a name for each number."""
        loops = [dict(zip(("count", "source_stride", "target_stride"), loop, strict=True)) for loop in self.loops]
        return {**{name: getattr(self, name) for name in self.__struct_fields__}, "loops": loops}


def lower(file: str, base: int, itemsize: int, source: int, target: int, loops: Sequence[Loop]) -> Transfer:
    """Turn a copy in elements into a transfer in bytes.

    Args:
        file: the file that holds the source chunk.
        base: byte offset of the chunk's first element.
        itemsize: bytes per element.
        source: first element in the chunk.
        target: first element in the target.
        loops: coalesced loops in elements.
    """
    scaled = [(count, step * itemsize, into * itemsize) for count, step, into in loops]
    width = itemsize
    if scaled and scaled[-1][1] == width and scaled[-1][2] == width:
        width *= scaled.pop()[0]
    return Transfer(file, base + source * itemsize, target * itemsize, width, tuple(scaled))


def in_elements(transfer: Transfer, itemsize: int) -> BoxCopy:
    """Return a transfer between tensors of one type as a move of elements: the inverse of `lower`, for one transfer."""
    loops = [(count, source // itemsize, target // itemsize) for count, source, target in transfer.loops]
    run = (transfer.width // itemsize, 1, 1)
    return BoxCopy(transfer.source // itemsize, transfer.target // itemsize, (*loops, run))


def clip(transfer: Transfer, start: int, stop: int) -> Iterator[Transfer]:
    """Cut a transfer by the byte range `[start, stop)` of the target.

    Post-condition: the results are disjoint and move exactly the bytes that land in the range.
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
        kept = []
        for (begin, end), (_, step, into) in zip(outer, transfer.loops, strict=True):
            source += begin * step
            target += begin * into
            if end - begin > 1:
                kept.append((end - begin, step, into))
        yield Transfer(transfer.file, source, target, high - low, tuple(kept))


def active(transfers: Sequence[Transfer], ends: Iterable[int]) -> Iterator[tuple[int, int, list[Transfer]]]:
    """Walk a target block by block, in order.

    Args:
        transfers: sorted by their first target byte.
        ends: where the blocks end, in bytes of the target; the first one begins at 0.

    Yields:
        `(start, stop, the transfers' parts in that range)`.
    """
    running: list[Transfer] = []
    coming = start = 0
    for stop in ends:
        running = [transfer for transfer in running if transfer.target_end > start]
        while coming < len(transfers) and transfers[coming].target < stop:
            running.append(transfers[coming])
            coming += 1
        yield start, stop, [part for transfer in running for part in clip(transfer, start, stop)]
        start = stop


_TOGETHER = 1 << 20
"""Bytes that are read side by side into the scratch, of several transfers: no more than stays in the cache."""


class Readable(Protocol):
    """What transfers read from: the files of a storage (`formats.Storage`).

    One that also has `lend` (see `Memory`) is not read, but copied from.
    """

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes of a file from `offset`."""

    def note_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """List that a view is filled with the bytes of a file from `offset`, or runs are read into it."""


class Memory(Readable, Protocol):
    """The memory of several ranks, as one storage: each file is a tensor's part that one of them holds."""

    def lend(self, name: str, offset: int, size: int) -> Bytes:
        """Return bytes of this rank's own files without copying them, to be read once: they may change meanwhile."""

    def owner(self, name: str) -> int:
        """Return the rank that holds a file; the others cannot read it."""


class Writable(Protocol):
    """Files that take bytes at any offset."""

    def pwrite(self, file: str, offset: int, view: memoryview) -> None:
        """Write bytes into a file from `offset`."""


class NotingWritable(Writable, Protocol):
    """Files of this machine: what is written into them can be listed."""

    def note_write(self, steps: Steps, file: str, offset: int, view: memoryview) -> None:
        """List that bytes are written as `pwrite`."""


class Sink(ABC):
    """Where the bytes of items go: memory that they are made in (`room`), or whoever takes them (`take`)."""

    ordered = True
    """The bytes of an item, and of items with the same queue, must come in order, from one thread."""

    span: int | None = None
    """Spans of an item of so many bytes each may come in any order, from several threads."""

    takes_notes = False
    """Whether many steps are worth one call: nobody waits for another machine."""

    def room(self, _key: int, _start: int, _stop: int) -> Bytes | None:
        """Return the memory in which an item's bytes `[start, stop)` belong; None: they are given to `take`."""
        return None

    def filled(self, _key: int, _start: int, _stop: int) -> None:  # noqa: B027 - a sink may have nothing to note
        """Note that the room for these bytes has them."""

    @abstractmethod
    def take(self, key: int, start: int, data: memoryview) -> None:
        """Take an item's bytes from `start` on, which are neither written to nor kept."""

    def note(self, steps: Steps, key: int, start: int, data: memoryview) -> None:
        """List that an item's bytes are taken: what lies there then."""
        steps.call(partial(self.take, key, start, data), WRITING)

    def end(self, _key: int) -> None:  # noqa: B027 - as above
        """Note that these were the last bytes of an item; of an empty one, that it is there."""


Fill = Callable[[int, Bytes], None]
"""`fill(parcel, buffer)`: put the parcel's bytes into the buffer."""
Take = Callable[[int, Bytes], None]
"""`take(parcel, buffer)`: do with the parcel's bytes what they came for; they stay until the next round."""
Arguments = ParamSpec("Arguments")


class Parcel(msgspec.Struct, frozen=True):
    """Bytes that one rank has and others need."""

    sender: int
    """Global rank that has them."""
    receivers: tuple[int, ...]
    """Global ranks that need them, the sender perhaps among them."""
    size: int
    """Bytes."""


class Exchange(Protocol):
    """Moves parcels between ranks."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def ranks(self) -> Sequence[int]:
        """All of them, in one order everywhere."""

    def round(self, parcels: Sequence[Parcel], fill: Fill, take: Take) -> int:
        """Send parcels, all at once; collective over the ranks, which must pass equal parcels.

        Args:
            parcels: what moves; a rank that is sender and receiver gets its own without sending it.
            fill: called on the sender, once per parcel; it must not raise (see `Deferred`).
            take: called on each receiver, once per parcel; it must not raise.

        Returns:
            bytes that this rank received from others.
        """

    def close(self) -> None:
        """Free what the rounds needed."""


class Alone:
    """The exchange of a process that is alone: nothing is sent."""

    rank = 0
    ranks = (0,)

    def round(self, _parcels: Sequence[Parcel], _fill: Fill, _take: Take) -> int:
        """See `Exchange`."""
        return 0

    def close(self) -> None:
        """See `Exchange`."""


class Deferred:
    """Callbacks that never raise: the first error is kept, later calls do nothing, `check` raises it.

    Inside a collective no rank may leave early, or the others would wait for it forever.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __call__(self, work: Callable[Arguments, None]) -> Callable[Arguments, None]:
        """Return `work` with its errors kept back."""

        def quietly(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
            if self._error is not None:
                return
            try:
                work(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - it is raised again by `check`
                self._error = error

        return quietly

    def check(self) -> None:
        """Raise what was kept back."""
        if self._error is not None:
            raise self._error


class Scratch:
    """A reused buffer for strided reads; one per worker.

    Gaps between the runs of a transfer are read along where that is faster than leaving them out.

    Args:
        size: bytes.
        waste: bytes that may be read for each byte wanted.
        gap: bytes between two runs that may be read along however many they are in all.
        few: so many runs are read one by one, for which no gap is worth reading.
    """

    def __init__(self, size: int, waste: float = 4.0, gap: int = 1 << 14, few: int = 0) -> None:

        self.array: Bytes = np.empty(size, np.uint8)
        self.waste = waste
        self.gap = gap
        self.few = few

    def takes(self, transfer: Transfer) -> bool:
        """Tell whether to read everything between a transfer's first and last byte: it fits, and wastes little."""
        span = transfer.source_span
        if span > len(self.array):
            return False
        # A loop with source step 0 reads the same bytes again, so it adds nothing to the bytes wanted.
        runs = prod(count for count, step, _ in transfer.loops if step)
        wanted = transfer.width * runs
        if runs <= self.few and span > wanted:
            return False
        return span <= wanted * self.waste or _widest_gap(transfer) <= self.gap

    def apart(self, transfer: Transfer) -> bool:
        """Tell whether each run is best read alone, straight into place: it is wanted once, and not next to another."""
        # The innermost loop in the source decides: if even two neighbouring runs are too far apart to read together,
        # none are near.
        times, step, into = min(transfer.loops, key=lambda loop: loop[1])
        if not step:
            return False
        # As many neighbouring runs as the scratch can span.
        near = min(times, (len(self.array) - transfer.width) // step + 1)
        return near < 2 or not self.takes(Transfer(transfer.file, 0, 0, transfer.width, ((near, step, into),)))


def _widest_gap(transfer: Transfer) -> int:
    """Return the most bytes that lie unread between two runs of a transfer."""
    gap, span = 0, transfer.width
    # From the innermost loop outwards, `span` is the extent of all loops so far, and the next step beyond it is a gap.
    for count, step, _ in sorted(transfer.loops, key=lambda loop: loop[1]):
        gap = max(gap, step - span)
        span += (count - 1) * step
    return gap


def produce(reader: Readable, parts: Collection[Transfer], start: int, out: Bytes, scratch: Scratch) -> None:
    """Make the bytes of a target from `start` on: what no transfer fills is padding, and zero.

    Args:
        reader: the source files.
        parts: the transfers that land in the buffer, and nowhere else; no two in the same place.
        start: byte of the target at which `out` begins.
        out: the buffer.
        scratch: room for strided reads.

    Raises:
        TransaxleError: what the reader raises.
    """
    with Steps() as steps:
        note_parts(steps, reader, parts, start, out, scratch)
        steps.run()


def note_parts(
    steps: Steps, reader: Readable, parts: Collection[Transfer], start: int, out: Bytes, scratch: Scratch
) -> None:
    """List what makes the bytes of a target from `start` on; otherwise as `produce`."""
    # Parts never overlap, so their sizes show whether there is padding. Zeroing only then saves a pass over the buffer.
    if sum(part.size for part in parts) != len(out):
        steps.call(partial(out.fill, 0))
    # What needs one read is read together: straight into place, or side by side into the scratch.
    spread: list[tuple[Bytes, Transfer]] = []
    used = 0
    for part in parts:
        size = part.source_span
        if not part.loops or hasattr(reader, "lend"):
            note_fill(steps, reader, part, out, start, scratch)
            continue
        fits = scratch.takes(part)
        if used + size > min(_TOGETHER, len(scratch.array)) or not fits:
            _spread(steps, spread, out, start)
            used = 0
        if not fits:
            note_fill(steps, reader, part, out, start, scratch)
            continue
        held = scratch.array[used : used + size]
        used += size
        reader.note_read(steps, part.file, part.source, held.data)
        spread.append((held, part))
    _spread(steps, spread, out, start)


def _spread(steps: Steps, spread: list[tuple[Bytes, Transfer]], out: Bytes, start: int) -> None:
    """List that what is read side by side goes to its places in the target; the list is emptied."""
    for held, part in spread:
        steps.lay(held, out, part.target - start, part.width, part.loops)
    spread.clear()


def note_fill(steps: Steps, reader: Readable, transfer: Transfer, out: Bytes, start: int, scratch: Scratch) -> None:
    """List what carries a transfer out into a buffer that holds the target's bytes from `start` on.

    Args:
        steps: the list.
        reader: the source files.
        transfer: it must lie inside the buffer.
        out: the buffer.
        start: byte of the target at which `out` begins.
        scratch: room for strided reads; what does not fit at once is done in parts.
    """
    file, at, width, loops = transfer.file, transfer.target - start, transfer.width, transfer.loops
    # Memory needs no read: the runs are copied straight from where they lie.
    lend = getattr(reader, "lend", None)
    if lend is not None:
        steps.call(lambda: scatter(lend(file, transfer.source, transfer.source_span), out, at, width, loops), READING)
        return
    if not loops:
        reader.note_read(steps, file, transfer.source, out.data[at : at + width])
        return
    if scratch.takes(transfer):
        held = scratch.array[: transfer.source_span]
        reader.note_read(steps, file, transfer.source, held.data)
        steps.lay(held, out, at, width, loops)
        return
    if scratch.apart(transfer):
        end = transfer.target_end - start
        reader.note_read(steps, file, transfer.source, out.data[at:end], width, loops)
        return
    # The whole transfer does not fit the scratch. Take the loop with the widest source step apart, and read as many of
    # its rounds at once as fit.
    widest = max(range(len(loops)), key=lambda i: loops[i][1])
    count, step, into = loops[widest]
    before, after = loops[:widest], loops[widest + 1 :]

    def part(first: int, taken: int) -> Transfer:
        taken_loops = (*before, (taken, step, into), *after) if taken > 1 else before + after
        return Transfer(file, transfer.source + first * step, transfer.target + first * into, width, taken_loops)

    one, room = part(0, 1), len(scratch.array)
    span = one.source_span
    at_once = min(count, (room - span) // step + 1) if step else 1
    if at_once > 1 and scratch.takes(part(0, at_once)):
        for first in range(0, count, at_once):
            note_fill(steps, reader, part(first, min(at_once, count - first)), out, start, scratch)
    # Rounds cannot be read together, as they lie too far apart. Each is read alone, but several are laid side by side
    # in the scratch, so that one step puts them all into place.
    elif one.loops and scratch.takes(one):
        for first in range(0, count, room // span):
            taken = min(room // span, count - first)
            for slot in range(taken):
                view = scratch.array.data[slot * span : (slot + 1) * span]
                reader.note_read(steps, file, one.source + (first + slot) * step, view)
            side_by_side = (*before, (taken, span, into), *after)
            steps.lay(scratch.array[: taken * span], out, at + first * into, width, side_by_side)
    else:
        for first in range(count):
            note_fill(steps, reader, part(first, 1), out, start, scratch)
