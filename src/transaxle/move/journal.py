"""Hashes tensors while they are written, and records finished tensors in a journal, so that a conversion can resume.

A journal is a file beside an unfinished target. After each finished tensor, one line with a checksum is added to the
journal; an incomplete last line is ignored. A journal belongs to one plan and one state of the source; any other
conversion refuses the journal and leaves it in place. A resumed run reads the recorded tensors back and compares their
hashes, so that the result has the same bytes as an uninterrupted run.

If several workers share one plan, each work item (a part of the plan for one worker) has a result file beside the
journal. The file is written once the work item's bytes are durable.

In this module, an *item* is the byte array of one target tensor, or of one rank's shard of a target tensor.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import IO, cast

import msgspec
import numpy as np
import xxhash

from transaxle.encodings.encoding import Error
from transaxle.errors import refuse
from transaxle.formats.checksums import SummedRange
from transaxle.formats.storage.copier import WRITING, Bytes, Running, Steps, new_hash, scatter
from transaxle.formats.storage.local import storage_error
from transaxle.formats.store.place import ITEMS, JOURNAL
from transaxle.move.transfer import (
    Readable,
    Scratch,
    Sink,
    StepWritable,
    Transfer,
    Writable,
    add_transfers,
    clip,
    clip_blocks,
)
from transaxle.move.workers import Progress, no_progress

_BLOCK = 1 << 20
"""Number of bytes that are hashed at once; they fit into the processor's cache."""
_BATCH = 1 << 24
"""Approximate number of bytes that one call reads."""
SPAN = 1 << 28
"""Number of bytes of a span: a section of an item that is hashed separately. An item (byte array of a tensor) above
this size is hashed span by span, so that several workers can share it.
"""

WHOLE = sys.maxsize
"""Span size above the size of any item, which is used for hashes of whole files."""


def span_ends(size: int) -> list[int]:
    """Return the end offsets of the spans of an item of `size` bytes."""
    return [*range(SPAN, size, SPAN), size]


def join_hashes(hashes: Sequence[str]) -> str:
    """Return the hash of an item: the hash of its only span, or the hash of the joined hex hashes of its spans."""
    return hashes[0] if len(hashes) == 1 else digest("".join(hashes).encode())


class ItemHash:
    """Computes the hash of an item (byte array). The item's spans may be hashed in any order, but the bytes inside a
    span must be hashed in ascending order.

    Args:
        span_size: number of bytes of a span; None means `SPAN`.
    """

    def __init__(self, span_size: int | None = None) -> None:
        self._size = span_size or SPAN
        self._spans: dict[int, Running] = {}

    def update(self, start: int, data: memoryview) -> None:
        """Hash the bytes `data`, which begin at offset `start` of the item."""
        for running, part in self._parts(start, data):
            running.update(part)

    def add_update(self, steps: Steps, start: int, data: memoryview) -> None:
        """Add a step to `steps` that hashes the item's bytes from `start` on."""
        for running, part in self._parts(start, data):
            steps.hash(running, part)

    def hexdigest(self) -> str:
        """Return the hash, in hex, of all bytes that have been passed to this object."""
        hashes = [self._spans[number].hexdigest() for number in sorted(self._spans)]
        return join_hashes(hashes or [digest(b"")])

    def _parts(self, start: int, data: memoryview) -> Iterator[tuple[Running, memoryview]]:
        """Cut bytes at the boundaries of spans, and yield each piece of `data` with the running hash of its span."""
        while len(data):
            number, inside = divmod(start, self._size)
            part = data[: self._size - inside]
            running = self._spans.get(number)
            if running is None:
                running = self._spans[number] = new_hash()
            yield running, part
            start, data = start + len(part), data[len(part) :]


class HashingFiles(Sink):
    """A sink that writes items to their places in files, and hashes the items at the same time.

    Args:
        files: the files to write to; None means that items are only hashed.
        places: for each item, by key, its places in the files, as the transfers that would read the item back (see
            `PlannedTensor.everywhere`).
        hashed: keys of the items to hash; the sink must receive all bytes of each of these items.
        progress: function that is called with the number of bytes that were just written.
        finish: function that is called with the key and the hash of each complete item.
        span_size: number of bytes of a span; None means `SPAN`.
    """

    def __init__(
        self,
        files: Writable | None,
        places: Sequence[Sequence[Transfer]],
        hashed: Container[int],
        progress: Progress = no_progress,
        finish: Callable[[int, str], None] | None = None,
        span_size: int | None = None,
    ) -> None:
        self.digests: dict[int, str] = {}
        """Item key -> hash of the complete item; empty if `finish` receives the hashes."""
        self.span = span_size or SPAN
        self.batches_steps = files is None or hasattr(files, "add_write")
        self._finish = finish or self.digests.__setitem__
        self._files = files
        self._places = places
        self._hashed = hashed
        self._progress = progress
        self._open: dict[int, ItemHash] = {}
        self._places_by_key: dict[int, Places] = {}

    def take(self, key: int, start: int, data: memoryview) -> None:
        """Write and hash bytes of an item (see `Sink.take`)."""
        with Steps() as steps:
            self.add_take(steps, key, start, data)
            steps.run()

    def add_take(self, steps: Steps, key: int, start: int, data: memoryview) -> None:
        """Add steps that write and hash bytes of an item (see `Sink.add_take`)."""
        if key in self._hashed:
            self._hash_of(key).add_update(steps, start, data)
        if self._files is not None and steps.max_bytes and self._places_of(key).are_plain and self.batches_steps:
            for file, offset, part in self.locate(key, start, data):
                cast("StepWritable", self._files).add_write(steps, file, offset, part)
        elif self._files is not None:
            steps.call(partial(self._write, key, start, data), WRITING, len(data))
        steps.then(partial(self._progress, len(data)))

    def _write(self, key: int, start: int, data: memoryview) -> None:
        """Write bytes of an item directly and not by a list of steps, for scattered places and for remote files."""
        for file, offset, part in self.locate(key, start, data):
            cast("Writable", self._files).pwrite(file, offset, part)

    def locate(self, key: int, start: int, data: memoryview) -> Iterator[tuple[str, int, memoryview]]:
        """Yield `(file, offset, bytes in the file)` for each contiguous part of an item's bytes from `start` on."""
        return self._places_of(key).locate(start, data)

    def end(self, key: int) -> None:
        """Finish the hash of an item, and report it (see `Sink.end`)."""
        self._places_by_key.pop(key, None)
        if key in self._hashed:
            item_hash = self._hash_of(key)
            del self._open[key]
            self._finish(key, item_hash.hexdigest())

    def _places_of(self, key: int) -> Places:
        places = self._places_by_key.get(key)
        if places is None:
            places = self._places_by_key[key] = Places(self._places[key])
        return places

    def _hash_of(self, key: int) -> ItemHash:
        item_hash = self._open.get(key)
        return self._open.setdefault(key, ItemHash(self.span)) if item_hash is None else item_hash


class Places:
    """The places of an item's bytes in files; a tensor that stacks all experts may have one place for each expert.

    Args:
        places: the transfers that would read the item's bytes from the files; their order does not matter.
    """

    def __init__(self, places: Sequence[Transfer]) -> None:
        self._places = sorted(places, key=lambda place: place.target)
        self._starts = [place.target for place in self._places]
        self.are_plain = not any(place.loops for place in places)
        """Whether each place of the item is one contiguous range of a file."""
        # Running maxima of the places' ends are needed because places may overlap: replicated bytes have several
        # places.
        self._ends = list(accumulate((place.target_end for place in self._places), max))

    def locate(self, start: int, data: memoryview) -> Iterator[tuple[str, int, memoryview]]:
        """Yield `(file, offset, bytes in the file)` for each contiguous part of the item's bytes from `start` on."""
        stop = start + len(data)
        for place in self._places[bisect_right(self._ends, start) : bisect_left(self._starts, stop)]:
            if not place.loops:
                low, high = max(start, place.target), min(stop, place.target_end)
                if low < high:
                    yield place.file, place.source + low - place.target, data[low - start : high - start]
            elif place.target < stop and start < place.target_end:
                for part in clip(place, start, stop):
                    yield from _gather_runs(part, start, data)


def _gather_runs(part: Transfer, start: int, data: memoryview) -> Iterator[tuple[str, int, memoryview]]:
    """Yield `(file, offset, bytes)` for each run (contiguous range) of a transfer; runs that adjoin in the file count
    as one.
    """
    if part.source_span == part.size:
        item_bytes: Bytes = np.frombuffer(data, np.uint8)[part.target - start : part.target_end - start]
        file_bytes: Bytes = np.empty(part.size, np.uint8)
        inverse_loops = tuple((count, target, source) for count, source, target in part.loops)
        scatter(item_bytes, file_bytes, 0, part.width, inverse_loops)
        yield part.file, part.source, file_bytes.data
        return
    (count, source, target), *inner = part.loops
    for number in range(count):
        inner_part = Transfer(
            part.file, part.source + number * source, part.target + number * target, part.width, tuple(inner)
        )
        if inner_part.loops:
            yield from _gather_runs(inner_part, start, data)
        else:
            yield inner_part.file, inner_part.source, data[inner_part.target - start :][: inner_part.width]


def digest(data: bytes | memoryview) -> str:
    """Return the xxh3-128 hash of bytes, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_in(storage: Readable, places: Sequence[Transfer], span_size: int | None = None) -> str:
    """Read an item from its places in files, and return the hash; `span_size` is in bytes, and None means `SPAN`."""
    item_hash = ItemHash(span_size)
    block: Bytes = np.empty(_BLOCK, np.uint8)
    scratch = Scratch(2 * _BLOCK)
    size = sum(place.size for place in places)
    ends = [*range(_BLOCK, size, _BLOCK), size] if size else []
    with Steps(_BATCH) as steps:
        for start, stop, parts in clip_blocks(places, ends):
            add_transfers(steps, storage, parts, start, block[: stop - start], scratch)
            item_hash.add_update(steps, start, block[: stop - start].data)
            steps.run_if_full()
        steps.run()
    return item_hash.hexdigest()


_HEAD = b"transaxle journal 3 "
"""Beginning of a journal's first line; the JSON of the task follows it."""
_NONE = "-"


class FinishedTensor(msgspec.Struct, frozen=True, gc=False):
    """A line of the journal: the record of a tensor whose bytes have been written."""

    hash: str
    """xxh3-128 hash of the tensor's bytes, in hex."""
    error: Error | None = None
    """Error that the encoding caused in the tensor's values; None for a tensor that is not encoded."""


class Task(msgspec.Struct, frozen=True):
    """The conversion to which a journal belongs, as recorded in the first line of the journal."""

    to: str
    """Container format and dialect of the target, such as `safetensors:hf`."""
    source: str
    """Path of the source as the user typed it; it is used in messages only, and never compared."""
    state: str
    """Hash of the state (sizes, times …) of the source's files, and of the files of a merged adapter."""
    plan: str
    """Hash of the conversion's plan."""

    @property
    def key(self) -> tuple[str, str, str]:
        """The fields that must be equal in two tasks for one to resume the other."""
        return self.to, self.state, self.plan

    def describe_difference(self, earlier: Task) -> str:
        """Describe, for an error message, how the earlier task differs from this task."""
        if earlier.to != self.to:
            return f"it writes {earlier.to}, but this conversion writes {self.to}"
        if earlier.plan == self.plan:
            source = f"it reads {earlier.source}, which is another source, or has changed since"
            return f"{source}; or it merges another adapter"
        options = "encode, decode, dtype, rules, config, axes, shard size …"
        return f"it was started with other options ({options}), or from another source"


class ItemResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a finished work item; its worker writes the result once the item's bytes are durable."""

    task: Task
    """The conversion to which the work item belongs."""
    number: int
    """Index of the work item in the plan."""
    tensors: dict[str, tuple[str, str]]
    """Tensor name -> (hash, error of the encoded values in the journal's notation)."""
    checks: tuple[int, ...] = ()
    """Indices of the plan's checks (that duplicates are equal) in which this work item found no difference."""
    measured: dict[str, tuple[str, int]] = {}
    """Name of a decoded or cast tensor -> (error of its values, number of values that became infinite)."""
    summed: tuple[tuple[str, int, tuple[SummedRange, ...]], ...] = ()
    """Byte ranges with a checksum that the work item read only in part: `(file, first byte, CRC-32 of each part)`."""
    proved: tuple[str, ...] = ()
    """Names of source tensors whose hashes were computed and equal the recorded hashes."""
    begun: str = ""
    """On an object store, token of the upload to which the work item belongs; otherwise empty."""
    sent: dict[str, tuple[str, ...]] = {}
    """On an object store, file name -> ETags of its uploaded parts, in order; otherwise empty."""
    worker: str = ""
    """Host name and process id of the worker that wrote the result."""
    nbytes: int = 0
    """Number of bytes that the worker wrote."""
    seconds: float = 0.0
    """Wall time that the work took, in seconds."""

    @property
    def finished(self) -> dict[str, FinishedTensor]:
        """Tensor name -> journal record, for each tensor of the work item."""
        return {
            name: FinishedTensor(tensor_hash, _parse_error(error))
            for name, (tensor_hash, error) in self.tensors.items()
        }

    @property
    def errors(self) -> dict[str, tuple[Error, int]]:
        """Name of a decoded or cast tensor -> (error of its values, number of values that became infinite)."""
        return {name: (_parse_error(text) or Error(), infinite) for name, (text, infinite) in self.measured.items()}

    @property
    def text(self) -> bytes:
        """Content of the result file: a checksum, a space, and JSON; `parse_result` is the inverse."""
        payload = msgspec.json.encode(self)
        return digest(payload).encode() + b" " + payload


def item_file(number: int) -> str:
    """Return the path of the result file of a work item, relative to the journal's folder."""
    return f"{ITEMS}/{number}"


def parse_result(text: bytes) -> ItemResult | None:
    """Parse the content of a result file; the result is None if the content is damaged."""
    checksum, _, payload = text.partition(b" ")
    try:
        return msgspec.json.decode(payload, type=ItemResult) if digest(payload).encode() == checksum else None
    except msgspec.MsgspecError:
        return None


def read_results(folder: Path, numbers: Iterable[int] | None = None) -> dict[int, ItemResult]:
    """Return index of the work item -> result, for the work items `numbers` (None means all); damaged results are
    omitted.

    Raises:
        StorageError: with the code IO if a result file cannot be read.
    """
    results = {}
    try:
        if numbers is None:
            items = folder / ITEMS
            numbers = (
                sorted(int(path.name) for path in items.iterdir() if path.name.isdigit()) if items.is_dir() else ()
            )
        for number in numbers:
            path = folder / item_file(number)
            result = parse_result(path.read_bytes()) if path.is_file() else None
            if result is not None:
                results[number] = result
    except OSError as error:
        raise storage_error(error, "reading the results of work items", os.fspath(folder)) from error
    return results


def read_task(folder: Path) -> Task | None:
    """Return the task of the journal in a folder, even if no tensor is finished; None if the folder has no valid
    journal.

    Raises:
        StorageError: with the code IO if the journal cannot be read.
    """
    lines = _read_lines(folder / JOURNAL)
    return _task(lines[0]) if lines else None


def unfinished_task(folder: Path) -> Task | None:
    """Return the task of the unfinished work in a folder if at least one tensor is finished, otherwise None.

    Raises:
        StorageError: with the code IO if the journal cannot be read.
    """
    lines = _read_lines(folder / JOURNAL)
    # If no tensor is finished, nothing can be lost, so a different task may replace the journal.
    if len(lines) > 1 and any(map(_parse_line, lines[1:])):
        return _task(lines[0])
    return next((result.task for result in read_results(folder).values()), None)


def _read_lines(journal: Path) -> list[bytes]:
    try:
        return journal.read_bytes().split(b"\n") if journal.exists() else []
    except OSError as error:
        raise storage_error(error, "reading the journal", os.fspath(journal)) from error


def _task(line: bytes) -> Task | None:
    """Parse the first line of a journal; the result is None if the line is damaged."""
    if not line.startswith(_HEAD):
        return None
    try:
        return msgspec.json.decode(line.removeprefix(_HEAD), type=Task)
    except msgspec.MsgspecError:
        return None


def _parse_line(line: bytes) -> tuple[str, FinishedTensor] | None:
    """Parse the line of a finished tensor; the result is None if the line is damaged."""
    checksum, _, payload = line.partition(b" ")
    # If a crash or a full disk cut the line, its checksum is wrong, and the tensor is written again.
    if digest(payload).encode() != checksum:
        return None
    tensor_hash, error, name = payload.decode().split(" ", 2)
    return name, FinishedTensor(tensor_hash, _parse_error(error))


def refuse_other_task(folder: Path, task: Task, file: str) -> None:
    """Refuse to resume, or to discard, unfinished work of a different task.

    Args:
        folder: the folder that contains the journal.
        task: the task of this run.
        file: path of the target, for the error message.

    Raises:
        UsageError: with the code EXISTS if the journal belongs to a different task.
        StorageError: with the code IO if the journal cannot be read.
    """
    unfinished = unfinished_task(folder)
    if unfinished is None or unfinished.key == task.key:
        return
    message = (
        f"{folder.parent} holds the unfinished work of another conversion, which cannot be continued: "
        f"{task.describe_difference(unfinished)}"
    )
    hint = (
        "Resume it with --resume (resume=True) and the original options, or begin anew with --overwrite "
        "(overwrite=True) instead, which removes the unfinished work."
    )
    raise refuse("EXISTS", message, file=file, hint=hint)


def error_text(error: Error | None) -> str:
    """Return the error of an encoded tensor's values as text, in the journal's notation."""
    if error is None:
        return _NONE
    return f"{error.max!r},{error.square_sum!r},{error.count},{error.unequal}"


def _parse_error(text: str) -> Error | None:
    """Parse the text that `error_text` returned."""
    if text == _NONE:
        return None
    largest, squares, count, unequal = text.split(",")
    return Error(float(largest), float(squares), int(count), int(unequal))


class Journal:
    """The journal of one conversion: a file that records each finished tensor.

    Args:
        folder: folder of the journal, which is kept until the target is committed.
        task: the conversion; a journal of a different task is replaced (`refuse_other_task` refuses this case before).

    Raises:
        StorageError: with the code IO if the journal cannot be read or written; with the code NO_SPACE if the disk is
            full.
    """

    def __init__(self, folder: Path, task: Task) -> None:
        self._path = folder / JOURNAL
        self._lock = Lock()
        self._task = task
        self._continued = False
        with self._naming_errors("reading"):
            self.finished = self._read()
            """Name of each tensor that an earlier run of the same plan finished -> record of the tensor."""
        with self._naming_errors("beginning"):
            self._file: IO[bytes] = self._open()

    def _read(self) -> dict[str, FinishedTensor]:
        finished: dict[str, FinishedTensor] = {}
        for result in read_results(self._path.parent).values():
            if result.task.key == self._task.key:
                finished |= result.finished
        lines = _read_lines(self._path)
        task = _task(lines[0]) if lines else None
        if task is None or task.key != self._task.key:
            return finished
        recorded = dict(entry for line in lines[1:] if (entry := _parse_line(line)) is not None)
        self._continued = bool(recorded)
        return finished | recorded

    def _open(self) -> IO[bytes]:
        if self._continued:
            return self._path.open("ab", buffering=0)
        # The file is unbuffered: the operating system has each line before the next tensor begins, so a killed process
        # loses no line.
        file = self._path.open("wb", buffering=0)
        try:
            file.write(_HEAD + msgspec.json.encode(self._task) + b"\n")
        except BaseException:
            file.close()
            raise
        return file

    @contextmanager
    def _naming_errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise storage_error(error, f"{action} the journal", os.fspath(self._path)) from error

    def add(self, name: str, tensor: FinishedTensor) -> None:
        """Record a tensor whose bytes have been written. A tensor whose name contains a line break is not recorded, so
        a resumed run writes it again.

        Raises:
            StorageError: with the code IO if the journal cannot be written; with the code NO_SPACE if the disk is full.
        """
        if "\n" in name:
            return
        payload = f"{tensor.hash} {error_text(tensor.error)} {name}".encode()
        with self._lock, self._naming_errors("writing"):
            # The line break is written first, so that it ends an earlier line that is incomplete.
            self._file.write(b"\n" + digest(payload).encode() + b" " + payload)

    def close(self) -> None:
        """Close the journal's file."""
        self._file.close()
