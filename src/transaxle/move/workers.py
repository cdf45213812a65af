"""Produces tensors by transfers (strided byte copies): defines items, worker threads, and limits on their memory.

An item is the byte array of one target tensor, or of one rank's shard of a target tensor. If several ranks or threads
could move an item, the least busy of these moves it.

Each worker uses one block and one scratch buffer again and again, because touching new memory for the first time costs
more than the copy itself. One worker produces a tensor from its first byte to its last, so the worker can hash the
tensor at the same time.
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
from transaxle.axes.notation.computed import AffineSteps, apply_steps
from transaxle.errors import refuse
from transaxle.formats.catalog import numpy_dtype
from transaxle.formats.storage.copier import Bytes, Steps, load_steps
from transaxle.move.transfer import Readable, Scratch, Transfer, add_transfers, clip, clip_blocks

BLOCK = 1 << 20
"""Size in bytes of a worker's block, if the source of the tensor is one contiguous range of a file."""
_STRIDED_BLOCK = 4 << 20
_SMALLEST = 1 << 16
_GRAIN = 1 << 12
"""The size of a block is a multiple of this number of bytes, and so it is a multiple of every dtype's size."""
_BATCH = 16 << 20
"""Approximate number of bytes that one batch of steps reads and writes."""
_SMALL_GROUP, _LARGE_GROUP = 1 << 20, 8 << 20
"""Minimum and maximum size in bytes of a group of tasks; a worker processes a whole group."""
_GROUPS_PER_WORKER = 8
"""Number of groups per worker, unless groups would become too small or too large."""
_BLOCKS_PER_WORKER = 3
"""Size of a worker's buffers, counted in blocks: the block itself, and a scratch buffer as large as two blocks."""
MIN_MEMORY = 2 * _BLOCKS_PER_WORKER * _SMALLEST
"""Minimum number of bytes of buffer memory with which one worker can run."""
_DEFAULT_JOBS = 8
_DEFAULT_MEMORY = 64 << 20

RANGE_BYTES = 8 << 20
"""Default maximum size in bytes of an item range (a byte range that is sent between ranks at once)."""
_LONG_COPY = 1 << 20
"""Contiguous copies of at least this many bytes have item ranges of their own, so that these ranges need not be
sent.
"""
Owner = Callable[[str], int]
"""`owner(file)` returns the rank whose memory contains a file."""

Member = TypeVar("Member", bound=Hashable)
Task = TypeVar("Task")
Buffers = TypeVar("Buffers")
Progress = Callable[[int], None]
"""`progress(bytes)` is called, from several threads, with the number of bytes that were just moved."""


def no_progress(_: int) -> None:
    """Ignore the number of bytes moved; this function is the default value of `Progress`."""


def is_long(transfer: Transfer) -> bool:
    """Return whether a transfer is one long contiguous range; such a range is written by the rank that reads it."""
    return transfer.width >= _LONG_COPY and not transfer.loops


def is_whole(parts: Sequence[Transfer], size: int) -> bool:
    """Return whether a tensor of `size` bytes is one contiguous range of a file."""
    return len(parts) == 1 and not parts[0].loops and parts[0].width == size


class Item(msgspec.Struct, frozen=True, eq=False, dict=True):
    """The byte array of one target tensor, or of one rank's shard of it, with its transfers and ranks."""

    key: int
    """Key of the item, by which the sink identifies it."""
    size: int
    """Size of the item in bytes."""
    lazy_transfers: Sequence[Transfer] | Callable[[], Sequence[Transfer]]
    """Transfers that produce the item, sorted by target offset, or a function that computes these transfers when they
    are needed.
    """
    target_ranks: tuple[int, ...] = ()
    """Ranks that need the item; if empty, each range of the item is received by any one rank."""
    source_ranks: tuple[int, ...] = ()
    """Ranks that can read the whole source; if empty, each transfer is read by the rank whose memory contains
    its file.
    """
    queue: Hashable = None
    """Key of the item's queue; the items of a queue are moved one after another. None means that the item is in a queue
    of its own.
    """
    blocks: Callable[[Worker], Iterator[memoryview]] | None = None
    """For computed values, a function that yields the item's bytes in order, block by block; None means that the bytes
    are copied.
    """
    max_range: int | None = None
    """Maximum number of bytes of an item range; None means `RANGE_BYTES`."""

    @cached_property
    def transfers(self) -> Sequence[Transfer]:
        """Transfers that produce the item, sorted by target offset."""
        return self.lazy_transfers() if callable(self.lazy_transfers) else self.lazy_transfers

    @cached_property
    def cuts(self) -> list[int]:
        """Byte offsets at which item ranges begin, and the end of the item."""
        offsets = {0, self.size}
        # If the item has `source_ranks`, one rank reads the whole range, wherever transfers begin. If an item has no
        # `source_ranks`, long copies have ranges of their own, so that their bytes never share a range with bytes of a
        # different rank.
        for transfer in () if self.source_ranks else self.transfers:
            if is_long(transfer):
                offsets |= {transfer.target, transfer.target_end}
        edges = sorted(offsets)
        # An edge of a long copy always begins a range, even directly after an earlier edge, because long copies must
        # not share a range with their neighbours.
        return [at for a, b in pairwise(edges) for at in range(a, b, self.max_range or RANGE_BYTES)] + [self.size]

    def parts(self, start: int, stop: int) -> list[Transfer]:
        """Return the sections of the transfers that write the item's bytes `[start, stop)`."""
        return [part for transfer in self.transfers for part in clip(transfer, start, stop)]

    def only_rank(self, owner: Owner) -> int | None:
        """Return the rank that can both read and consume the whole item; None if the item needs an exchange."""
        if len(self.target_ranks) != 1:
            return None
        (target_rank,) = self.target_ranks
        if self.source_ranks:
            return target_rank if target_rank in self.source_ranks else None
        return target_rank if all(owner(transfer.file) == target_rank for transfer in self.transfers) else None


class DisjointSets(Generic[Member]):
    """Disjoint sets of hashable members, with the operations union and find."""

    def __init__(self) -> None:
        self._above: dict[Member, Member] = {}

    def first(self, member: Member) -> Member:
        """Return the member that represents the set of `member`; an unknown member becomes a new set."""
        self._above.setdefault(member, member)
        while self._above[member] != member:
            self._above[member] = self._above[self._above[member]]
            member = self._above[member]
        return member

    def join(self, member: Member, other_member: Member) -> None:
        """Merge the sets that contain two members into one set."""
        self._above[self.first(member)] = self.first(other_member)


class Load(dict[int, int]):
    """Rank -> number of bytes assigned to the rank so far.

    The next item is assigned to the least loaded rank. If several ranks are equally loaded, the lowest of them is
    chosen, so that all ranks make the same choice without communication.
    """

    @classmethod
    def of(cls, ranks: Iterable[int]) -> Self:
        """Return a mapping from each rank to zero bytes."""
        return cls(dict.fromkeys(ranks, 0))

    def least(self, ranks: Iterable[int] | None = None) -> int:
        """Return the least loaded of `ranks`; None means all ranks."""
        return min(self if ranks is None else ranks, key=lambda rank: (self.get(rank, 0), rank))

    def add(self, rank: int, size: int) -> int:
        """Assign `size` more bytes to a rank, and return that rank."""
        self[rank] = self.get(rank, 0) + size
        return rank


class StoppedError(Exception):
    """Raised in a worker to stop it after a different worker has failed; `run_workers` catches it."""


class Limits(msgspec.Struct, frozen=True):
    """The limits of a movement of bytes: the number of workers, and the size of their buffers."""

    jobs: int
    """Number of worker threads."""
    memory: int
    """Total size in bytes of the buffers of all workers."""
    min_block: int = 0
    """Minimum size in bytes of the blocks with which a worker can run, even if it exceeds `memory`."""
    is_explicit: bool = False
    """Whether the user set `memory`; a limit that the user set is never exceeded."""
    waste: float = 4.0
    """Maximum ratio of bytes read (with gaps) to bytes needed, for strided reads; see `Scratch`."""
    gap: int = 1 << 14
    """Size in bytes of the largest gap that strided reads include whatever the ratio."""
    few: int = 0
    """Maximum number of runs that are read one by one."""

    @property
    def strided_block(self) -> int:
        """Size in bytes of a block that is filled by strided reads of short runs."""
        fair = self.memory // self.jobs // _BLOCKS_PER_WORKER
        return max(_SMALLEST, min(_STRIDED_BLOCK, fair)) // _GRAIN * _GRAIN

    @property
    def block(self) -> int:
        """Size in bytes of a worker's block."""
        return max(self.strided_block, -(-self.min_block // _GRAIN) * _GRAIN)

    @property
    def scratch(self) -> int:
        """Size in bytes of a worker's scratch buffer, into which strided reads are made."""
        return (_BLOCKS_PER_WORKER - 1) * self.strided_block

    @property
    def peak(self) -> int:
        """Total number of bytes of the buffers of all workers."""
        return self.jobs * (self.block + self.scratch)

    def with_min_block(self, min_block: int) -> Limits:
        """Return limits with the same memory and blocks of at least `min_block` bytes, for fewer workers if
        necessary.
        """
        jobs = min(self.jobs, max(1, self.memory // (_BLOCKS_PER_WORKER * min_block))) if min_block else self.jobs
        return replace(self, jobs=jobs, min_block=min_block)

    @property
    def for_item_ranges(self) -> Limits:
        """These limits with blocks as large as whole item ranges."""
        return replace(self, min_block=max(self.min_block, RANGE_BYTES))

    def min_memory(self, min_block: int) -> int:
        """Return the number of bytes of memory that one worker with blocks of `min_block` bytes needs."""
        return max(MIN_MEMORY, _BLOCKS_PER_WORKER * min_block)

    @property
    def half(self) -> Limits:
        """These limits with half of the memory, for threads that each run two workers."""
        return Limits(self.jobs, self.memory // 2)


def limits(jobs: int | None = None, memory: Size | None = None) -> Limits:
    """Choose the number of workers and the size of their buffers.

    Args:
        jobs: number of worker threads; None means one per core, at most eight.
        memory: total size in bytes of all buffers; None means 64 MiB. If the memory is too small for `jobs` workers,
            fewer are started; one worker needs 384 KiB.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if `memory` is less than 384 KiB, or `jobs` is less than one.
    """
    workers = min(_DEFAULT_JOBS, os.cpu_count() or 1) if jobs is None else read_count("jobs", jobs)
    total = _DEFAULT_MEMORY if memory is None else read_size("memory", memory)
    if total < MIN_MEMORY:
        raise ValueError(f"{total} bytes of memory are too few: one worker needs {MIN_MEMORY:,} (384 KiB)")
    return Limits(min(workers, total // MIN_MEMORY), total, is_explicit=memory is not None)


class Worker:
    """The buffers and the list of steps of one worker thread.

    Args:
        reader: the source of the transfers, which several threads may share.
        limit: the limits that determine the size of the buffers.
        stop: event that is set to stop all workers.
        steps: the list of steps; None means a new list that runs after each block.
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
        # Memory pages that are never touched cost nothing, and few blocks reach the maximum size.
        self._memory = memoryview(mmap(-1, limit.block, MAP_PRIVATE))
        self._limit = limit
        self._lend: Callable[[str, int, int], Bytes] | None = getattr(reader, "lend", None)

    @cached_property
    def _block(self) -> Bytes:
        """The block as a numpy array; contiguous ranges of files are copied without numpy."""
        return np.frombuffer(self._memory, np.uint8)

    @cached_property
    def scratch(self) -> Scratch:
        """Buffer for strided reads, created when it is first used; memory that a source lends needs no such buffer."""
        return Scratch(self._limit.scratch, self._limit.waste, self._limit.gap, self._limit.few)

    @property
    def capacity(self) -> int:
        """Size of the worker's block in bytes."""
        return len(self._memory)

    def check_stop(self) -> None:
        """Raise StoppedError if another worker has failed."""
        if self._stop.is_set():
            raise StoppedError

    def add_transfer(self, parts: Collection[Transfer], start: int, out: Bytes) -> None:
        """Add the steps that fill `out` with a byte range of a target; see `produce` for the arguments."""
        self.check_stop()
        add_transfers(self.steps, self._reader, parts, start, out, self.scratch)
        self.steps.run_if_full()

    def fill(self, parts: Collection[Transfer], start: int, out: Bytes) -> None:
        """Fill `out` with a byte range of a target; see `produce` for the arguments."""
        with self.steps as steps:
            self.add_transfer(parts, start, out)
            steps.run()

    def block(self, parts: Sequence[Transfer], start: int, stop: int) -> Bytes:
        """Produce the bytes `[start, stop)` of a target in the worker's block, and return this part of the block."""
        out = self._block[: stop - start]
        self.fill(parts, start, out)
        return out

    def add_item(self, item: Item, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        """Add the steps that produce a byte range of an item, block by block.

        Memory that the source lends is copied into the block, and is read only once. Other threads may write to memory
        that a source lends, and the bytes that are hashed must be the bytes that are written to a file.

        Yields:
            `(offset in the item, the block)`; steps that the caller then adds can read the bytes from the block.
        """
        transfers = _transfers_between(item, start, stop)
        if self._lend is not None:  # each block is a section of an item range, and fits in the cache
            ends = [end for cut in pairwise(item.cuts) for end in _chunk_ends(*cut, BLOCK)]
        else:
            ends = block_ends(transfers, stop - start, self.capacity)
        for at, block in self.add_blocks(transfers, ends):
            yield start + at, block

    def add_blocks(self, transfers: Sequence[Transfer], ends: Iterable[int]) -> Iterator[tuple[int, memoryview]]:
        """Add the steps that produce a tensor in blocks with the given end offsets; yield `(offset, block)` for each
        block.
        """
        for low, high, parts in clip_blocks(transfers, ends):
            self.check_stop()
            out = self._memory[: high - low]
            if self._lend is not None or any(part.loops for part in parts):
                add_transfers(self.steps, self._reader, parts, low, self._block[: high - low], self.scratch)
            else:  # contiguous ranges are copied without numpy
                if sum(part.width for part in parts) != high - low:
                    self.steps.call(partial(_clear, out))
                for part in parts:
                    capacity = out[part.target - low : part.target_end - low]
                    self._reader.add_read(self.steps, part.file, part.source, capacity)
            yield low, out
            self.steps.run_if_full()

    def blocks(
        self,
        transfers: Sequence[Transfer],
        size: int,
        *,
        length: int | None = None,
        dtype: str = "U8",
        arithmetic: AffineSteps | None = None,
    ) -> Iterator[memoryview]:
        """Produce a tensor block by block, in order; each block is valid until the next iteration.

        Args:
            transfers: transfers that produce the tensor, sorted by target offset.
            size: size of the tensor in bytes.
            length: maximum number of bytes of a block; None means that the transfers determine it.
            dtype: dtype of the tensor, needed for `arithmetic`.
            arithmetic: operations to apply to every value; None means that values are copied unchanged.
        """
        return self.blocks_until(
            transfers, block_ends(transfers, size, self.capacity, length), dtype=dtype, arithmetic=arithmetic
        )

    def blocks_until(
        self,
        transfers: Sequence[Transfer],
        ends: Iterable[int],
        *,
        dtype: str = "U8",
        arithmetic: AffineSteps | None = None,
    ) -> Iterator[memoryview]:
        """Produce a tensor in blocks with the given end offsets; the other arguments are those of `blocks`."""
        with self.steps as steps:
            for _, block in self.add_blocks(transfers, ends):
                steps.run()
                if arithmetic is not None:
                    _apply(block, dtype, arithmetic)
                yield block


def _clear(block: memoryview) -> None:
    block[:] = bytes(len(block))


def _apply(block: memoryview, dtype: str, arithmetic: AffineSteps) -> None:
    """Apply arithmetic to a block in place."""
    values = np.frombuffer(block, numpy_dtype(dtype))
    try:
        values[...] = apply_steps(values, arithmetic)
    except ValueError as error:
        raise refuse("LOSSY", f"the arithmetic has no finite result for the value {error}") from None


def _transfers_between(item: Item, start: int, stop: int) -> Sequence[Transfer]:
    """Return the transfers of an item's bytes `[start, stop)`, with target offsets relative to `start`."""
    if stop - start == item.size:
        return item.transfers
    return [replace(part, target=part.target - start) for part in item.parts(start, stop)]


def block_ends(transfers: Sequence[Transfer], size: int, capacity: int, length: int | None = None) -> list[int]:
    """Return the end offsets of the blocks in which a tensor is produced.

    Args:
        transfers: transfers that produce the tensor, sorted by target offset.
        size: size of the tensor in bytes.
        capacity: size of a worker's block in bytes.
        length: number of bytes of every block except the last; None means that the transfers determine it.
    """
    if length is not None:
        return _chunk_ends(0, size, min(length, capacity))
    # Long runs (contiguous ranges), and short runs that adjoin in the file, are read directly into the block; a small
    # block fits in the cache. Short runs that do not adjoin need a larger block, so that one strided read covers more
    # runs.
    plain = all(transfer.width >= _SMALLEST or transfer.is_dense for transfer in transfers)
    cached_bytes = min(BLOCK, capacity)
    max_bytes = cached_bytes if plain else capacity
    ends: list[int] = []
    block_start = clean_end = 0
    # A transfer that fits in the cache (an expert's matrix) is not cut, so that it needs one read and one write, even
    # if it is transposed. A block contains as many such transfers as fit in the cache.
    for end in _clean_cuts(transfers, size):
        if end - block_start > cached_bytes:
            if clean_end > block_start:
                ends.append(clean_end)
                block_start = clean_end
            if end - block_start > max_bytes:
                ends += _chunk_ends(block_start, end, max_bytes)
                block_start = end
        clean_end = end
    return ends if block_start == size else [*ends, size]


def _chunk_ends(begin: int, end: int, length: int) -> list[int]:
    return [*range(begin + length, end, length), end] if end > begin else []


def _clean_cuts(transfers: Sequence[Transfer], size: int) -> Iterator[int]:
    """Yield the offsets in a tensor at which a cut splits no transfer, and the end of the tensor."""
    reached = 0
    for transfer in transfers:
        if reached and transfer.target >= reached:
            yield reached
        reached = max(reached, transfer.target_end)
    if size:
        yield size


def largest_first(tasks: Iterable[tuple[Task, int]]) -> list[tuple[Task, int]]:
    """Sort tasks, given as `(task, bytes)`, by size, largest first, so that the workers finish at about the
    same time.
    """
    return sorted(tasks, key=lambda task: -task[1])


def can_batch(*readers: Readable) -> bool:
    """Return whether every reader can add its reads to a list of steps that one call runs."""
    return all(getattr(each, "batches_steps", False) for each in readers)


def new_steps(*, together: bool) -> Steps:
    """Return an empty list of steps. If `together` is true and the C copier is available, one call runs many steps."""
    return Steps(_BATCH if together and load_steps() is not None else 0)


def group_tasks(tasks: Iterable[tuple[Task, int]], *, batched: bool, fair: int) -> Iterator[list[Task]]:
    """Divide tasks into groups for one worker each.

    Args:
        tasks: the tasks with their sizes, `(task, bytes)`.
        batched: whether one call runs the steps of several tasks, which saves a call for each small task. If `batched`
            is False, each task is a separate group, so that many workers wait for remote machines at the same time.
        fair: number of bytes that each worker moves if the tasks are divided evenly; groups are so small that each
            worker processes several.
    """
    least = max(_SMALL_GROUP, min(_LARGE_GROUP, fair // _GROUPS_PER_WORKER)) if batched else 0
    group: list[Task] = []
    size = 0
    for task, task_size in tasks:
        group.append(task)
        size += task_size
        if size >= least:
            yield group
            group, size = [], 0
    if group:
        yield group


def run_workers(
    items: Iterable[Task],
    jobs: int,
    make: Callable[[threading.Event], Buffers],
    work: Callable[[Buffers, Task], None],
) -> None:
    """Process tasks in several worker threads, in order; the first error stops all workers, and is then raised.

    Args:
        items: the tasks to process.
        jobs: number of worker threads.
        make: function that creates a worker's buffers; its argument is the event that stops the workers.
        work: function that processes one task with a worker's buffers.
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
                    # The threads share the iterator. The iterator may be a generator, which two threads must not
                    # advance at the same time.
                    item = next(queue, None)
                if item is None:
                    return
                work(buffers, item)
        except StoppedError:
            return
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises the error again
            with lock:
                # Only the first error is raised, because most later errors are consequences of the first.
                errors.append(error)
            stop.set()

    if jobs == 1:
        run()
    else:
        _run_threads(run, jobs, stop)
    if errors:
        raise errors[0]


def _run_threads(run: Callable[[], None], jobs: int, stop: threading.Event) -> None:
    finished = threading.Semaphore(0)

    def run_and_release() -> None:
        try:
            run()
        finally:
            finished.release()

    threads = [threading.Thread(target=run_and_release, name=f"transaxle_{number}") for number in range(jobs)]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            finished.acquire()  # no `join`: after a Ctrl-C in it, Python 3.11 treats a running thread as ended
    finally:
        # The event is set in any case (also after Ctrl-C), because otherwise the threads would first finish all tasks.
        stop.set()
        for thread in threads:
            if thread.is_alive():
                thread.join()
