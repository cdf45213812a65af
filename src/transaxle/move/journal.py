"""What of a conversion is done: hashes of tensors while they are written, and the journal that keeps them.

The journal of a conversion: which tensors are already written, so that an interrupted run can be continued.

Where several workers carry one plan out, each item of their work has a result beside the journal, written when its
bytes are durable.

One line per finished tensor, each with its own checksum; a torn last line is simply not there. A journal belongs to
one plan over one state of the source: to anything else it is refused, and what is there stays. What it lists is read
back and hashed before it is believed, so a resumed run gives the same bytes as an uninterrupted one.

**Hash items**: while their bytes stream into files, or as they lie there.
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
from transaxle.formats.storage.local import failed
from transaxle.formats.store.place import ITEMS, JOURNAL
from transaxle.move.transfer import (
    NotingWritable,
    Readable,
    Scratch,
    Sink,
    Transfer,
    Writable,
    active,
    clip,
    note_parts,
)
from transaxle.move.workers import Progress, unwatched

_BLOCK = 1 << 20
"""Bytes hashed at once: so few that they come from the processor's own memory."""
_BATCH = 1 << 24
"""Bytes read in one call, about."""
SPAN = 1 << 28
"""An item of more bytes is hashed in spans of so many, so that several workers can share it."""

WHOLE = sys.maxsize
"""A span that is longer than any item: for files, which are hashed from end to end."""


def span_ends(size: int) -> list[int]:
    """Return where the spans end in which an item of so many bytes is hashed."""
    return [*range(SPAN, size, SPAN), size]


def joined(hashes: Sequence[str]) -> str:
    """Return the hash of an item from those of its spans: of a single one it is that, else the hash of their text."""
    return hashes[0] if len(hashes) == 1 else digest("".join(hashes).encode())


class ItemHash:
    """The hash of an item whose spans come in any order, and the bytes of each in theirs.

    Args:
        span_size: bytes of a span; None: `SPAN`.
    """

    def __init__(self, span_size: int | None = None) -> None:
        self._size = span_size or SPAN
        self._spans: dict[int, Running] = {}

    def update(self, start: int, data: memoryview) -> None:
        """Take the bytes from `start` on."""
        for running, part in self._parts(start, data):
            running.update(part)

    def note(self, steps: Steps, start: int, data: memoryview) -> None:
        """List that the bytes from `start` on are taken."""
        for running, part in self._parts(start, data):
            steps.hash(running, part)

    def hexdigest(self) -> str:
        """Return the hash of all bytes that came."""
        found = [self._spans[number].hexdigest() for number in sorted(self._spans)]
        return joined(found or [digest(b"")])

    def _parts(self, start: int, data: memoryview) -> Iterator[tuple[Running, memoryview]]:
        """Cut bytes where spans end."""
        while len(data):
            number, inside = divmod(start, self._size)
            part = data[: self._size - inside]
            running = self._spans.get(number)
            if running is None:
                running = self._spans[number] = new_hash()
            yield running, part
            start, data = start + len(part), data[len(part) :]


class HashingFiles(Sink):
    """Files that take items, each at its places, and hash them on the way.

    Args:
        files: where the bytes go; None: nowhere, they are only hashed.
        places: for each item, by key, where its bytes go, as the transfers that would read them back (see
            `PlannedTensor.everywhere`).
        hashed: keys of the items whose bytes all come here.
        progress: told the number of bytes that were just taken.
        finish: told the key and the hash of each item that came whole.
        span_size: bytes of the spans in which items are hashed; None: `SPAN`.
    """

    def __init__(
        self,
        files: Writable | None,
        places: Sequence[Sequence[Transfer]],
        hashed: Container[int],
        progress: Progress = unwatched,
        finish: Callable[[int, str], None] | None = None,
        span_size: int | None = None,
    ) -> None:
        self.digests: dict[int, str] = {}
        """Hashes of the items that came whole, by key; they are not kept where `finish` is told them."""
        self.span = span_size or SPAN
        self.takes_notes = files is None or hasattr(files, "note_write")
        self._finish = finish or self.digests.__setitem__
        self._files = files
        self._places = places
        self._hashed = hashed
        self._progress = progress
        self._open: dict[int, ItemHash] = {}
        self._found: dict[int, Places] = {}

    def take(self, key: int, start: int, data: memoryview) -> None:
        """See `Sink`."""
        with Steps() as steps:
            self.note(steps, key, start, data)
            steps.run()

    def note(self, steps: Steps, key: int, start: int, data: memoryview) -> None:
        """See `Sink`."""
        if key in self._hashed:
            self._hash_of(key).note(steps, start, data)
        if self._files is not None and steps.most and self._places_of(key).are_plain and self.takes_notes:
            for file, offset, part in self.laid(key, start, data):
                cast("NotingWritable", self._files).note_write(steps, file, offset, part)
        elif self._files is not None:
            steps.call(partial(self._write, key, start, data), WRITING, len(data))
        steps.then(partial(self._progress, len(data)))

    def _write(self, key: int, start: int, data: memoryview) -> None:
        """Write bytes of an item that lie apart in files, go to another machine, or are alone in their list."""
        for file, offset, part in self.laid(key, start, data):
            cast("Writable", self._files).pwrite(file, offset, part)

    def laid(self, key: int, start: int, data: memoryview) -> Iterator[tuple[str, int, memoryview]]:
        """Yield where bytes of an item lie: file, offset, and the bytes as they lie there."""
        return self._places_of(key).laid(start, data)

    def end(self, key: int) -> None:
        """See `Sink`."""
        self._found.pop(key, None)
        if key in self._hashed:
            hashed = self._hash_of(key)
            del self._open[key]
            self._finish(key, hashed.hexdigest())

    def _places_of(self, key: int) -> Places:
        places = self._found.get(key)
        if places is None:
            places = self._found[key] = Places(self._places[key])
        return places

    def _hash_of(self, key: int) -> ItemHash:
        hashed = self._open.get(key)
        return self._open.setdefault(key, ItemHash(self.span)) if hashed is None else hashed


class Places:
    """Where an item's bytes lie in files; a tensor of all experts has a place for each of them.

    Args:
        places: as transfers that would read the item, in any order.
    """

    def __init__(self, places: Sequence[Transfer]) -> None:
        self._places = sorted(places, key=lambda place: place.target)
        self._starts = [place.target for place in self._places]
        self.are_plain = not any(place.loops for place in places)
        """Whether each place is one range of a file."""
        # Running maxima, as places may overlap: what several ranks hold has several.
        self._ends = list(accumulate((place.target_end for place in self._places), max))

    def laid(self, start: int, data: memoryview) -> Iterator[tuple[str, int, memoryview]]:
        """Yield where the bytes from `start` on lie: file, offset, and the bytes as they lie there."""
        stop = start + len(data)
        for place in self._places[bisect_right(self._ends, start) : bisect_left(self._starts, stop)]:
            if not place.loops:
                low, high = max(start, place.target), min(stop, place.target_end)
                if low < high:
                    yield place.file, place.source + low - place.target, data[low - start : high - start]
            elif place.target < stop and start < place.target_end:
                for part in clip(place, start, stop):
                    yield from _gathered(part, start, data)


def _gathered(part: Transfer, start: int, data: memoryview) -> Iterator[tuple[str, int, memoryview]]:
    """Yield the bytes of a transfer whose runs are next to each other in the file as one; otherwise run by run."""
    if part.source_span == part.size:
        held: Bytes = np.frombuffer(data, np.uint8)[part.target - start : part.target_end - start]
        together: Bytes = np.empty(part.size, np.uint8)
        turned = tuple((count, target, source) for count, source, target in part.loops)
        scatter(held, together, 0, part.width, turned)
        yield part.file, part.source, together.data
        return
    (count, source, target), *inner = part.loops
    for number in range(count):
        one = Transfer(
            part.file, part.source + number * source, part.target + number * target, part.width, tuple(inner)
        )
        if one.loops:
            yield from _gathered(one, start, data)
        else:
            yield one.file, one.source, data[one.target - start :][: one.width]


def digest(data: bytes | memoryview) -> str:
    """Return the xxh3-128 of bytes, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_in(storage: Readable, places: Sequence[Transfer], span_size: int | None = None) -> str:
    """Return the hash of an item as it lies in files, of spans of so many bytes; None: `SPAN`."""
    hashed = ItemHash(span_size)
    block: Bytes = np.empty(_BLOCK, np.uint8)
    scratch = Scratch(2 * _BLOCK)
    size = sum(place.size for place in places)
    ends = [*range(_BLOCK, size, _BLOCK), size] if size else []
    with Steps(_BATCH) as steps:
        for start, stop, parts in active(places, ends):
            note_parts(steps, storage, parts, start, block[: stop - start], scratch)
            hashed.note(steps, start, block[: stop - start].data)
            steps.breathe()
        steps.run()
    return hashed.hexdigest()


_HEAD = b"transaxle journal 3 "
"""How a journal begins; what it belongs to follows."""
_NONE = "-"


class Done(msgspec.Struct, frozen=True, gc=False):
    """A tensor whose bytes are written."""

    hash: str
    """xxh3-128 of its bytes."""
    error: Error | None = None
    """How far the values are that it encodes, where it is encoded."""


class Task(msgspec.Struct, frozen=True):
    """What a journal belongs to."""

    to: str
    """Container format and dialect of the target."""
    source: str
    """Path of the source, as typed; only said, not compared."""
    state: str
    """Hash of the state of the source's files, and of those of an adapter that is merged into it."""
    plan: str
    """Hash of everything that the plan does."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What must be the same for a run to be continued."""
        return self.to, self.state, self.plan

    def differs(self, begun: Task) -> str:
        """Say how what was begun is another task than this one."""
        if begun.to != self.to:
            return f"it writes {begun.to}, but this conversion writes {self.to}"
        if begun.plan == self.plan:
            source = f"it reads {begun.source}, which is another source, or has changed since"
            return f"{source}; or it merges another adapter"
        options = "encode, decode, dtype, rules, config, axes, shard size …"
        return f"it was started with other options ({options}), or from another source"


class ItemResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker has done and found out when an item of a plan's work is done, and its bytes are durable."""

    task: Task
    """What the item belongs to."""
    number: int
    """Number of the item."""
    tensors: dict[str, tuple[str, str]]
    """Tensor -> its hash, and the error of the values that it encodes, as the journal writes it."""
    checks: tuple[int, ...] = ()
    """Numbers of the checks whose copies proved equal."""
    measured: dict[str, tuple[str, int]] = {}
    """Tensor that is decoded or cast -> the error of its values, and how many became infinite."""
    summed: tuple[tuple[str, int, tuple[SummedRange, ...]], ...] = ()
    """Ranges with a checksum that were read in part: file, first byte, and the summed pieces."""
    proved: tuple[str, ...] = ()
    """Tensors of the source that have the hashes which it keeps of them."""
    begun: str = ""
    """On a service: which beginning of the work it belongs to."""
    sent: dict[str, tuple[str, ...]] = {}
    """File -> the tags of its parts, in order, which the service has."""
    worker: str = ""
    """Machine and process."""
    nbytes: int = 0
    """Bytes written."""
    seconds: float = 0.0
    """Wall time."""

    @property
    def finished(self) -> dict[str, Done]:
        """The tensors, as the journal has them."""
        return {name: Done(tensor_hash, _error(error)) for name, (tensor_hash, error) in self.tensors.items()}

    @property
    def errors(self) -> dict[str, tuple[Error, int]]:
        """The tensors whose values were measured."""
        return {name: (_error(text) or Error(), infinite) for name, (text, infinite) in self.measured.items()}

    @property
    def text(self) -> bytes:
        """What its file holds: a checksum, then the rest; `result_of` reads it."""
        rest = msgspec.json.encode(self)
        return digest(rest).encode() + b" " + rest


def item_file(number: int) -> str:
    """Return the name of an item's result in the folder of the journal."""
    return f"{ITEMS}/{number}"


def result_of(text: bytes) -> ItemResult | None:
    """Read a result; None where it is damaged."""
    checksum, _, rest = text.partition(b" ")
    try:
        return msgspec.json.decode(rest, type=ItemResult) if digest(rest).encode() == checksum else None
    except msgspec.MsgspecError:
        return None


def results_in(folder: Path, numbers: Iterable[int] | None = None) -> dict[int, ItemResult]:
    """Return the results of work items by number, all of them or some, without those that are damaged.

    Raises:
        StorageError: IO.
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
            result = result_of(path.read_bytes()) if path.is_file() else None
            if result is not None:
                results[number] = result
    except OSError as error:
        raise failed(error, "reading the results of work items", os.fspath(folder)) from error
    return results


def task_in(folder: Path) -> Task | None:
    """Return what the work in a folder belongs to, whether anything of it is finished or not; None if nothing says so.

    Raises:
        StorageError: IO.
    """
    lines = _lines(folder / JOURNAL)
    return _task(lines[0]) if lines else None


def begun(folder: Path) -> Task | None:
    """Return what the finished work in a folder belongs to; None where nothing is finished.

    Raises:
        StorageError: IO.
    """
    lines = _lines(folder / JOURNAL)
    # Without a finished tensor there is nothing to lose, so the journal binds nobody.
    if len(lines) > 1 and any(map(_entry, lines[1:])):
        return _task(lines[0])
    return next((result.task for result in results_in(folder).values()), None)


def _lines(journal: Path) -> list[bytes]:
    try:
        return journal.read_bytes().split(b"\n") if journal.exists() else []
    except OSError as error:
        raise failed(error, "reading the journal", os.fspath(journal)) from error


def _task(line: bytes) -> Task | None:
    """Inverse of what the first line of a journal is written with."""
    if not line.startswith(_HEAD):
        return None
    try:
        return msgspec.json.decode(line.removeprefix(_HEAD), type=Task)
    except msgspec.MsgspecError:
        return None


def _entry(line: bytes) -> tuple[str, Done] | None:
    """Read a line of a finished tensor; None where it is damaged."""
    checksum, _, rest = line.partition(b" ")
    # A line torn by a crash or a full disk fails here, and its tensor is written again.
    if digest(rest).encode() != checksum:
        return None
    tensor_hash, error, name = rest.decode().split(" ", 2)
    return name, Done(tensor_hash, _error(error))


def refuse_other(folder: Path, task: Task, file: str) -> None:
    """Refuse to continue, and so to drop, what a run of another task has left.

    Args:
        folder: where its journal is.
        task: what is to be done now.
        file: the target, for the error.

    Raises:
        UsageError: EXISTS.
        StorageError: IO.
    """
    left = begun(folder)
    if left is None or left.key == task.key:
        return
    message = (
        f"{folder.parent} holds the unfinished work of another conversion, which cannot be continued: "
        f"{task.differs(left)}"
    )
    hint = (
        "Resume it with the original options (--resume, resume=True), or begin anew with --overwrite (overwrite=True) "
        "in its place: the unfinished work is then removed."
    )
    raise refuse("EXISTS", message, file=file, hint=hint)


def written_error(error: Error | None) -> str:
    """Return the text of an error of values in a journal."""
    if error is None:
        return _NONE
    return f"{error.max!r},{error.square_sum!r},{error.count},{error.unequal}"


def _error(text: str) -> Error | None:
    """Inverse of `written_error`."""
    if text == _NONE:
        return None
    most, squares, count, unequal = text.split(",")
    return Error(float(most), float(squares), int(count), int(unequal))


class Journal:
    """Finished tensors of one conversion.

    Args:
        folder: a folder that survives until the target is committed.
        task: what it belongs to; one of another is begun anew, see `refuse_other`.

    Raises:
        StorageError: IO, NO_SPACE.
    """

    def __init__(self, folder: Path, task: Task) -> None:
        self._path = folder / JOURNAL
        self._lock = Lock()
        self._task = task
        self._continued = False
        with self._named("reading"):
            self.finished = self._read()
            """What an earlier run of the same plan recorded, by tensor."""
        with self._named("beginning"):
            self._file: IO[bytes] = self._open()

    def _read(self) -> dict[str, Done]:
        found: dict[str, Done] = {}
        for result in results_in(self._path.parent).values():
            if result.task.key == self._task.key:
                found |= result.finished
        lines = _lines(self._path)
        task = _task(lines[0]) if lines else None
        if task is None or task.key != self._task.key:
            return found
        own = dict(entry for line in lines[1:] if (entry := _entry(line)) is not None)
        self._continued = bool(own)
        return found | own

    def _open(self) -> IO[bytes]:
        if self._continued:
            return self._path.open("ab", buffering=0)
        # Unbuffered: a line is with the operating system before the next tensor begins, so a killed process loses none.
        file = self._path.open("wb", buffering=0)
        try:
            file.write(_HEAD + msgspec.json.encode(self._task) + b"\n")
        except BaseException:
            file.close()
            raise
        return file

    @contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise failed(error, f"{doing} the journal", os.fspath(self._path)) from error

    def add(self, name: str, done: Done) -> None:
        """Record a tensor whose bytes are written; names with line breaks are not recorded, only done again.

        Raises:
            StorageError: IO, NO_SPACE.
        """
        if "\n" in name:
            return
        rest = f"{done.hash} {written_error(done.error)} {name}".encode()
        with self._lock, self._named("writing"):
            self._file.write(b"\n" + digest(rest).encode() + b" " + rest)  # first the break: a torn line stays alone

    def close(self) -> None:
        """Close the file."""
        self._file.close()
