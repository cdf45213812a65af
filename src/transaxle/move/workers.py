"""Producing tensors: items of bytes, made of transfers, block by block in fixed memory by a few threads.

An item is what is moved: a tensor of the target, or what a rank holds of it. Where any of several ranks or threads can
do it, the one that has least to do does.

Every worker owns one block and one scratch buffer for its whole life: memory that is touched for the first time costs
more than the copy itself. A tensor is produced in order by one worker, so its hash is taken on the way.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import pairwise
from mmap import MAP_PRIVATE, mmap
from typing import Generic, Self, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from transaxle.arguments import Size, read_count, read_size
from transaxle.axes.notation.computed import AffineSteps, applied
from transaxle.errors import refuse
from transaxle.formats.catalog import numpy_dtype
from transaxle.formats.storage.copier import Bytes, Steps, load_steps
from transaxle.move.transfer import Readable, Scratch, Transfer, active, clip, note_parts

BLOCK = 1 << 20
"""Bytes of a block of what is one range of a file."""
_STRIDED_BLOCK = 4 << 20
_SMALLEST = 1 << 16
_GRAIN = 1 << 12
"""Blocks are multiples of this, and so of every item size."""
_BATCH = 16 << 20
"""Bytes read and written by one batch, about."""
_SMALL_GROUP, _LARGE_GROUP = 1 << 20, 8 << 20
"""Bytes of tasks that a worker takes at once, from the least to the most."""
_GROUPS = 8
"""So often a worker takes some, where they are neither too small nor too large then."""
_PARTS = 3
"""A worker's buffers in blocks: the block itself, and a scratch of two."""
LEAST_MEMORY = 2 * _PARTS * _SMALLEST
"""Bytes of memory without which nothing is moved."""
_DEFAULT_JOBS = 8
_DEFAULT_MEMORY = 64 << 20

RUN = 8 << 20
"""Bytes of a run at most."""
_LONG = 1 << 20
"""A contiguous copy of so many bytes begins and ends runs: it need not be sent."""
Owner = Callable[[str], int]
"""Tells the rank that holds a file."""

Thing = TypeVar("Thing", bound=Hashable)
Task = TypeVar("Task")
Buffers = TypeVar("Buffers")
Progress = Callable[[int], None]
"""Told the number of bytes just done; called from several threads."""


def unwatched(_: int) -> None:
    """Progress that nobody watches."""


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


class Unions(Generic[Thing]):
    """Disjoint sets: things that turn out to be one, or to have one owner."""

    def __init__(self) -> None:
        self._above: dict[Thing, Thing] = {}

    def first(self, thing: Thing) -> Thing:
        """Return the one that stands for the set of a thing."""
        self._above.setdefault(thing, thing)
        while self._above[thing] != thing:
            self._above[thing] = self._above[self._above[thing]]
            thing = self._above[thing]
        return thing

    def join(self, one: Thing, other: Thing) -> None:
        """Make two sets one."""
        self._above[self.first(one)] = self.first(other)


class Load(dict[int, int]):
    """Rank -> bytes that it has to do so far.

    The least loaded rank takes what comes next. The rank number breaks ties, since all ranks must choose the same one
    without asking each other.
    """

    @classmethod
    def of(cls, ranks: Iterable[int]) -> Self:
        """Return the load of ranks that have nothing to do yet."""
        return cls(dict.fromkeys(ranks, 0))

    def least(self, ranks: Iterable[int] | None = None) -> int:
        """Return the least loaded rank, of all of them or some."""
        return min(self if ranks is None else ranks, key=lambda rank: (self.get(rank, 0), rank))

    def add(self, rank: int, size: int) -> int:
        """Give a rank so many bytes more, and return it."""
        self[rank] = self.get(rank, 0) + size
        return rank


class StoppedError(Exception):
    """Raised in a worker that need not go on, because another one failed; it never leaves `share`."""


class Limits(msgspec.Struct, frozen=True):
    """How many workers, and how much buffer they have together."""

    jobs: int
    """Worker threads."""
    memory: int
    """Bytes of all buffers together."""
    band: int = 0
    """Bytes that a worker must be able to hold at once, however little memory there is."""
    said: bool = False
    """Whether somebody said how much memory there is: then more is never taken."""
    waste: float = 4.0
    """Bytes that may be read for each byte wanted; see `Scratch`."""
    gap: int = 1 << 14
    """Bytes between two runs that may be read along however many they are in all."""
    few: int = 0
    """So many runs are read one by one."""

    @property
    def strided_block(self) -> int:
        """Bytes of the target that a worker produces at once where runs are short."""
        fair = self.memory // self.jobs // _PARTS
        return max(_SMALLEST, min(_STRIDED_BLOCK, fair)) // _GRAIN * _GRAIN

    @property
    def block(self) -> int:
        """Bytes of a worker's block."""
        return max(self.strided_block, -(-self.band // _GRAIN) * _GRAIN)

    @property
    def scratch(self) -> int:
        """Bytes of a worker's scratch buffer."""
        return (_PARTS - 1) * self.strided_block

    @property
    def peak(self) -> int:
        """Bytes of all buffers together, as used."""
        return self.jobs * (self.block + self.scratch)

    def holding(self, band: int) -> Limits:
        """Return the same memory for workers that must hold so many bytes at once: fewer of them, at least one."""
        jobs = min(self.jobs, max(1, self.memory // (_PARTS * band))) if band else self.jobs
        return replace(self, jobs=jobs, band=band)

    @property
    def holding_runs(self) -> Limits:
        """The same, for a worker that makes whole runs."""
        return replace(self, band=max(self.band, RUN))

    def least(self, band: int) -> int:
        """Return the bytes of memory that one worker needs which must hold so many bytes at once."""
        return max(LEAST_MEMORY, _PARTS * band)

    @property
    def halved(self) -> Limits:
        """What each of two workers has that run side by side in one thread."""
        return Limits(self.jobs, self.memory // 2)


def limits(jobs: int | None = None, memory: Size | None = None) -> Limits:
    """Choose the number of workers and their buffers.

    Args:
        jobs: worker threads; None: one per core, at most eight.
        memory: bytes of all buffers together; None: 64 MiB. Where it is too little for so many workers there are
            fewer; one worker alone needs 384 KiB.

    Raises:
        TypeError: for what is no number.
        ValueError: for less memory than that, or less than one worker.
    """
    workers = min(_DEFAULT_JOBS, os.cpu_count() or 1) if jobs is None else read_count("jobs", jobs)
    total = _DEFAULT_MEMORY if memory is None else read_size("memory", memory)
    if total < LEAST_MEMORY:
        raise ValueError(f"{total} bytes of memory are too few: one worker needs {LEAST_MEMORY:,} (384 KiB)")
    return Limits(min(workers, total // LEAST_MEMORY), total, said=memory is not None)


class Worker:
    """The buffers of one thread.

    Args:
        reader: the source files; safe to share.
        limit: how large the buffers are.
        stop: set when the work is no longer wanted.
        steps: the list of steps; None: one of its own, carried out block by block.
    """

    def __init__(
        self,
        reader: Readable,
        limit: Limits,
        stop: threading.Event,
        steps: Steps | None = None,
    ) -> None:
        self.steps = steps or Steps()
        self._reader = reader
        self._stop = stop
        # Pages that nobody has written to take no memory: few blocks are as large as the largest may be.
        self._memory = memoryview(mmap(-1, limit.block, MAP_PRIVATE))
        self._limit = limit
        self._lend: Callable[[str, int, int], Bytes] | None = getattr(reader, "lend", None)

    @cached_property
    def _block(self) -> Bytes:
        """The block as an array, which whole ranges of files need not be."""
        return np.frombuffer(self._memory, np.uint8)

    @cached_property
    def scratch(self) -> Scratch:
        """Room for strided reads; what memory lends needs none."""
        return Scratch(self._limit.scratch, self._limit.waste, self._limit.gap, self._limit.few)

    @property
    def room(self) -> int:
        """Bytes that are produced at once at most."""
        return len(self._memory)

    def go_on(self) -> None:
        """Raise StoppedError where the work is no longer wanted."""
        if self._stop.is_set():
            raise StoppedError

    def note_fill(self, parts: Collection[Transfer], start: int, out: Bytes) -> None:
        """List what makes bytes of a target where they belong; see `produce`."""
        self.go_on()
        note_parts(self.steps, self._reader, parts, start, out, self.scratch)
        self.steps.breathe()

    def fill(self, parts: Collection[Transfer], start: int, out: Bytes) -> None:
        """Make bytes of a target where they belong; see `produce`."""
        with self.steps as steps:
            self.note_fill(parts, start, out)
            steps.run()

    def block(self, parts: Sequence[Transfer], start: int, stop: int) -> Bytes:
        """Return the bytes `[start, stop)` of a target in the block."""
        out = self._block[: stop - start]
        self.fill(parts, start, out)
        return out

    def note(self, item: Item, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        """List how bytes of an item are made, in order.

        Memory that is lent is copied into the block, and read once: somebody may write to it meanwhile, and what is
        written to a file must be what is hashed.

        Yields:
            `(byte of the item, the block that its bytes will be in)`: what is listed next finds them there.
        """
        transfers = _between(item, start, stop)
        if self._lend is not None:  # whole ranges are cut where they begin, and into pieces that stay in the cache
            ends = [end for cut in pairwise(item.cuts) for end in _cut(*cut, BLOCK)]
        else:
            ends = block_ends(transfers, stop - start, self.room)
        for at, block in self.noted(transfers, ends):
            yield start + at, block

    def noted(self, transfers: Sequence[Transfer], ends: Iterable[int]) -> Iterator[tuple[int, memoryview]]:
        """List how a tensor is made in order, in blocks that end at these bytes; otherwise as `note`."""
        for low, high, parts in active(transfers, ends):
            self.go_on()
            out = self._memory[: high - low]
            if self._lend is not None or any(part.loops for part in parts):
                note_parts(self.steps, self._reader, parts, low, self._block[: high - low], self.scratch)
            else:  # without numpy, which plain ranges do not need
                if sum(part.width for part in parts) != high - low:
                    self.steps.call(partial(_clear, out))
                for part in parts:
                    room = out[part.target - low : part.target_end - low]
                    self._reader.note_read(self.steps, part.file, part.source, room)
            yield low, out
            self.steps.breathe()

    def blocks(
        self,
        transfers: Sequence[Transfer],
        size: int,
        *,
        length: int | None = None,
        dtype: str = "U8",
        arithmetic: AffineSteps | None = None,
    ) -> Iterator[memoryview]:
        """Produce a tensor in order; each block is valid until the next one is asked for.

        Args:
            transfers: sorted by where they land.
            size: bytes of the tensor.
            length: bytes per block at most; None: what suits the transfers.
            dtype: the tensor's type, where there is arithmetic.
            arithmetic: what is done to every value.
        """
        return self.cut(transfers, block_ends(transfers, size, self.room, length), dtype=dtype, arithmetic=arithmetic)

    def cut(
        self,
        transfers: Sequence[Transfer],
        ends: Iterable[int],
        *,
        dtype: str = "U8",
        arithmetic: AffineSteps | None = None,
    ) -> Iterator[memoryview]:
        """Produce a tensor in order, in blocks that end at these bytes; otherwise as `blocks`."""
        with self.steps as steps:
            for _, block in self.noted(transfers, ends):
                steps.run()
                if arithmetic is not None:
                    _apply(block, dtype, arithmetic)
                yield block


def _clear(block: memoryview) -> None:
    block[:] = bytes(len(block))


def _apply(block: memoryview, dtype: str, arithmetic: AffineSteps) -> None:
    """Change values in place: the block is a worker's own, and its old values are not needed again."""
    values = np.frombuffer(block, numpy_dtype(dtype))
    try:
        values[...] = applied(values, arithmetic)
    except ValueError as error:
        raise refuse("LOSSY", f"the arithmetic has no finite result for the value {error}") from None


def _between(item: Item, start: int, stop: int) -> Sequence[Transfer]:
    """Return what fills the bytes `[start, stop)` of an item, as if it were these alone."""
    if stop - start == item.size:
        return item.transfers
    return [replace(part, target=part.target - start) for part in item.parts(start, stop)]


def block_ends(transfers: Sequence[Transfer], size: int, room: int, length: int | None = None) -> list[int]:
    """Return where the blocks end in which a tensor is produced.

    Args:
        transfers: what fills it, sorted by where it lands.
        size: its bytes.
        room: bytes that a worker produces at once at most.
        length: bytes of every block but the last; None: what suits the transfers.
    """
    if length is not None:
        return _cut(0, size, min(length, room))
    # Long runs are read straight into the block, where a small one stays in the cache; so do short ones that follow one
    # another in the file. Others want the larger one, so that a strided read covers more of them.
    plain = all(transfer.width >= _SMALLEST or transfer.is_dense for transfer in transfers)
    fitting = min(BLOCK, room)
    most = fitting if plain else room
    ends: list[int] = []
    begin = last = 0
    # What is copied as a whole (an expert's matrix) is not cut where it fits: it then takes one read and one write, and
    # a transposed one is read once. As many as stay in the cache make a block.
    for end in _clean_cuts(transfers, size):
        if end - begin > fitting:
            if last > begin:
                ends.append(last)
                begin = last
            if end - begin > most:
                ends += _cut(begin, end, most)
                begin = end
        last = end
    return ends if begin == size else [*ends, size]


def _cut(begin: int, end: int, length: int) -> list[int]:
    return [*range(begin + length, end, length), end] if end > begin else []


def _clean_cuts(transfers: Sequence[Transfer], size: int) -> Iterator[int]:
    """Yield the places of a tensor that no transfer lies across, and its end."""
    reached = 0
    for transfer in transfers:
        if reached and transfer.target >= reached:
            yield reached
        reached = max(reached, transfer.target_end)
    if size:
        yield size


def largest_first(tasks: Iterable[tuple[Task, int]]) -> list[tuple[Task, int]]:
    """Return tasks, each with its bytes, in the order in which none is left with one worker at the end."""
    return sorted(tasks, key=lambda task: -task[1])


def are_noted(*readers: Readable) -> bool:
    """Tell whether reads of files are noted and done in batches."""
    return all(getattr(each, "takes_notes", False) for each in readers)


def new_steps(*, together: bool) -> Steps:
    """Return an empty list of steps; together: many are carried out in one call, if that is compiled."""
    return Steps(_BATCH if together and load_steps() is not None else 0)


def grouped(tasks: Iterable[tuple[Task, int]], *, noted: bool, fair: int) -> Iterator[list[Task]]:
    """Yield tasks in groups for one worker each.

    Args:
        tasks: each with its bytes.
        noted: their steps are: then a call for each of many small ones would cost more than they do. Otherwise each is
            a group: workers wait for other machines side by side.
        fair: bytes of all tasks for each worker, of which every one shall have some groups.
    """
    least = max(_SMALL_GROUP, min(_LARGE_GROUP, fair // _GROUPS)) if noted else 0
    together: list[Task] = []
    size = 0
    for task, task_size in tasks:
        together.append(task)
        size += task_size
        if size >= least:
            yield together
            together, size = [], 0
    if together:
        yield together


def share(
    items: Iterable[Task],
    jobs: int,
    make: Callable[[threading.Event], Buffers],
    work: Callable[[Buffers, Task], None],
) -> None:
    """Let workers take items in order until none is left; the first error stops all of them and is raised.

    Args:
        items: what is to be done.
        jobs: number of workers.
        make: makes a worker's buffers; the event tells them to stop.
        work: does one item with a worker's buffers.
    """
    queue = iter(items)
    lock = threading.Lock()
    stop = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            buffers = make(stop)
            while not stop.is_set():
                with lock:
                    # The iterator is shared and may be a generator, which must not be advanced by two threads at once.
                    item = next(queue, None)
                if item is None:
                    return
                work(buffers, item)
        except StoppedError:
            return
        except BaseException as error:  # noqa: BLE001 - it is raised again, by the thread that waits
            with lock:
                # Only the first error is raised; those after it are mostly its consequences.
                errors.append(error)
            stop.set()

    if jobs == 1:
        run()
    else:
        _in_threads(run, jobs, stop)
    if errors:
        raise errors[0]


def _in_threads(run: Callable[[], None], jobs: int, stop: threading.Event) -> None:
    over = threading.Semaphore(0)

    def counted() -> None:
        try:
            run()
        finally:
            over.release()

    threads = [threading.Thread(target=counted, name=f"transaxle_{number}") for number in range(jobs)]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            over.acquire()  # no `join`: one that Ctrl-C interrupts takes a running thread for ended (Python 3.11)
    finally:
        # The event is set on the way out, whatever happened (Ctrl-C too): the threads would finish all items first.
        stop.set()
        for thread in threads:
            if thread.is_alive():
                thread.join()
