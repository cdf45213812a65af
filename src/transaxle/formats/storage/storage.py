"""Storage: the interface through which readers get the bytes of one checkpoint, from a local folder or a URL.

Readers know names, sizes and byte ranges, nothing else. So what holds for one storage (a name never leaves the
checkpoint, a short read is an error, nothing is memory-mapped) holds for every format read through it.

A storage may be laid over another one: files in memory (`VirtualFiles`), a sub-folder seen as the whole, or its
files seen in the folder above (`Renaming`). `NearReads` makes one read of many small ones that follow one another
closely, as those of headers between small tensors.

**Strict JSON**: text from strangers, in which no key may occur twice.

Decoders silently keep the last of two equal keys, so that two readers of one file may see different tensors. JSON of
strangers is read here. In headers and indexes, which may be long, each decoded key accounts for one colon in the text;
more colons than keys mean that a key was dropped.
"""

from __future__ import annotations

import json
import os
import re
import resource
from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from threading import Lock
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import msgspec
from msgspec.structs import replace

from transaxle.axes.geometry import Loop
from transaxle.errors import LONGEST_NAME, Code, Refusal, refuse
from transaxle.formats.storage.copier import READING, Steps, read_each

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PINNED = re.compile(r"(hf://(?:(?:datasets|spaces)/)?[^/@]+/[^/@]+)@[0-9a-f]{40}(?=/|$)")
_FEWEST = 4
_IDLE, _AT_ONCE = (128, 8), (64, 16)
"""Descriptors that stay open while idle, and that one thread uses at once: at most, and their share of all."""
_INSIDE = "Names of files in a checkpoint are relative to its folder and stay inside it."


class Listing(msgspec.Struct, frozen=True):
    """The direct contents of one folder of a checkpoint, sorted by name."""

    names: tuple[str, ...]
    """Regular files, including links to them that may be followed."""
    folders: tuple[str, ...]
    """Sub-folders."""
    special: Mapping[str, Refusal]
    """Everything else, with the reason why it is not read: FIFOs, devices, sockets, links that lead elsewhere."""

    def everything(self) -> tuple[str, ...]:
        """Return the names of all files, including those that will be refused when they are read."""
        return tuple(sorted((*self.names, *self.special)))


class Storage(Protocol):
    """Read access to the files of one checkpoint. Safe to share between threads."""

    @property
    def batches_steps(self) -> bool:
        """Whether many reads are worth one call: files of this machine, for which nobody waits."""
        return False

    @property
    def bytes_read(self) -> int:
        """Bytes that were read from the files so far, by all threads; numbers in descriptions do not count."""
        return 0

    @property
    def path(self) -> str:
        """The path as the user typed it."""

    @property
    def single(self) -> str | None:
        """Name of the one file that the path denotes; None where it denotes a folder."""

    def listing(self, folder: str = "") -> Listing:
        """List the checkpoint's folder or one of its sub-folders; names are bare, without the folder.

        Raises:
            Refused: PATH_ESCAPE.
            StorageError: IO.
        """

    def names(self) -> tuple[str, ...]:
        """Return the names of the regular files directly in the checkpoint's folder."""
        return self.listing().names

    def size(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            Refused: PATH_ESCAPE; UNSUPPORTED for anything that is not a regular file; CORRUPT if it was changed.
            StorageError: IO for a missing or unreadable file.
        """

    def version(self, name: str) -> str:
        """Return a text that changes when the file does: for a local one its place, size and time of change.

        Raises as `size`.
        """

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fill a writable contiguous view with the bytes that start at `offset`.

        Raises:
            Refused: as `size`; CORRUPT if the file ends before the view is full.
            StorageError: IO.
        """

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """List that a view is filled, or runs are read into their places in it.

        Args:
            steps: the list; what `read_into` raises is raised when it is carried out.
            name: the file.
            offset: byte in the file of the first run.
            view: writable and contiguous; it begins with the first run's place, and no run's place leaves it.
            width: bytes of a run, where there are loops.
            loops: `(count, step in the file, step in the view)` in bytes, the outermost first; none: the whole view.
        """
        read = partial(self.read_into, name)
        steps.call(partial(read_each, read, offset, view, width, loops), READING, view.nbytes)

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`; raises as `read_into`."""
        buffer = BytesIO(bytes(size))
        with buffer.getbuffer() as view:
            self.read_into(name, offset, view)
        return buffer.getvalue()  # the same memory: a large file is not there twice

    def recheck(self) -> None:
        """Check that no file that was read has changed since; call it before publishing what was made of them.

        Raises:
            Refused: CORRUPT.
            StorageError: IO.
        """

    def close(self) -> None:
        """Release what is held open. Reading afterwards is a ValueError."""


def files_in(storage: Storage, folder: str = "") -> Iterator[str]:
    """Yield the names of all files of a checkpoint, those in sub-folders included."""
    found = storage.listing(folder)
    begin = f"{folder}/" if folder else ""
    yield from (begin + name for name in found.everything())
    for inner in found.folders:
        yield from files_in(storage, begin + inner)


class Overlay(Storage):
    """A storage on top of another one, to which it passes every call that a subclass does not override.

    Args:
        below: the storage underneath.
    """

    def __init__(self, below: Storage) -> None:
        self.below = below

    @property
    def batches_steps(self) -> bool:
        """See `Storage`."""
        return self.below.batches_steps

    @property
    def bytes_read(self) -> int:
        """See `Storage`."""
        return self.below.bytes_read

    @property
    def path(self) -> str:
        """See `Storage`."""
        return self.below.path

    @property
    def single(self) -> str | None:
        """See `Storage`."""
        return self.below.single

    def listing(self, folder: str = "") -> Listing:
        """See `Storage`."""
        return self.below.listing(folder)

    def size(self, name: str) -> int:
        """See `Storage`."""
        return self.below.size(name)

    def version(self, name: str) -> str:
        """See `Storage`."""
        return self.below.version(name)

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """See `Storage`; the same as what is listed."""
        with Steps() as steps:
            self.add_read(steps, name, offset, view.cast("B"))
            steps.run()

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """See `Storage`."""
        self.below.add_read(steps, name, offset, view, width, loops)

    def recheck(self) -> None:
        """See `Storage`."""
        self.below.recheck()

    def close(self) -> None:
        """See `Storage`."""
        self.below.close()


class VirtualFile(Protocol):
    """A file that does not exist on disk: its bytes are computed when they are read."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill a writable contiguous view with the bytes that start at `offset`; safe from several threads."""


class InMemoryFile(msgspec.Struct, frozen=True):
    """A virtual file of given bytes."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """See `VirtualFile`."""
        return len(self.data)

    def read_into(self, offset: int, view: memoryview) -> None:
        """See `VirtualFile`."""
        view.cast("B")[:] = self.data[offset : offset + view.nbytes]


class VirtualFiles(Overlay):
    """A storage with further, virtual files.

    Args:
        below: the real files.
        files: the virtual ones, by names that no real file has.
        others: further storages that virtual files read from; they are checked and closed with the real files.
    """

    def __init__(self, below: Storage, files: Mapping[str, VirtualFile], others: Sequence[Storage] = ()) -> None:
        super().__init__(below)
        self._files = files
        self._others = others

    def recheck(self) -> None:
        """See `Storage`."""
        for storage in self._others:
            storage.recheck()
        super().recheck()

    def close(self) -> None:
        """See `Storage`."""
        for storage in self._others:
            storage.close()
        super().close()

    def size(self, name: str) -> int:
        """See `Storage`."""
        virtual = self._files.get(name)
        return super().size(name) if virtual is None else virtual.nbytes

    def version(self, name: str) -> str:
        """See `Storage`; virtual files change with the files that they are computed from."""
        return "" if name in self._files else super().version(name)

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """See `Storage`."""
        virtual = self._files.get(name)
        if virtual is None:
            self.below.add_read(steps, name, offset, view, width, loops)
        else:
            steps.call(partial(read_each, virtual.read_into, offset, view, width, loops), READING, view.nbytes)


Layer = TypeVar("Layer", bound=Overlay)


def layer(storage: Storage, kind: type[Layer]) -> Layer | None:
    """Return the uppermost overlay of a class in a storage; None if there is none."""
    while isinstance(storage, Overlay):
        if isinstance(storage, kind):
            return storage
        storage = storage.below
    return None


_CLOSED: WeakSet[Storage] = WeakSet()
"""Storages that were closed, without the overlays on them."""


def close(storage: Storage) -> None:
    """Close a storage, and remember that it is closed."""
    storage.close()
    _CLOSED.add(lowest(storage))


def is_closed(storage: Storage) -> bool:
    """Tell whether `close` has closed a storage, under whatever overlays."""
    return lowest(storage) in _CLOSED


def lowest(storage: Storage) -> Storage:
    """Return the storage under all overlays."""
    while isinstance(storage, Overlay):
        storage = storage.below
    return storage


def checked_parts(name: str) -> tuple[str, ...]:
    """Return the parts of `a/b/c`, a relative name that stays inside its folder.

    Raises:
        Refused: PATH_ESCAPE for an empty or absolute name, for `.`, `..` or empty parts (also between backslashes,
            which other systems read as separators), and for names that hold a NUL.
    """
    parts = tuple(name.split("/"))
    if "\0" in name or any(segment in ("", ".", "..") for segment in parts) or ".." in name.split("\\"):
        raise refuse("PATH_ESCAPE", f"{name!r} is not the name of a file inside the folder", file=name, hint=_INSIDE)
    return parts


def is_plain(name: str) -> bool:
    """Tell whether a name is a single path segment, with no separator of any operating system."""
    return name not in ("", ".", "..") and not any(character in name for character in "/\\\0")


def too_long(name: str) -> tuple[Code, str]:
    """Return the code and message for a tensor name beyond the cap on its length."""
    return "UNSUPPORTED", f"its name has {len(name):,} characters; names have at most {LONGEST_NAME:,}"


def unpinned(path: str) -> str:
    """Return the URL of a hub's repository at a commit without that commit; any other path or URL as it is."""
    match = _PINNED.match(path)
    return path if match is None else match[1] + path[match.end() :]


def as_text(path: str) -> str:
    """Return a path as text that every file can hold: bytes that are not UTF-8 are escaped."""
    return path.encode("utf-8", "backslashreplace").decode()


def is_url(path: str) -> bool:
    """Tell whether a path is a URL, `scheme://…`."""
    return _URL.match(path) is not None


class ByteCount:
    """A number of bytes to which several threads add."""

    __slots__ = ("_lock", "total")

    def __init__(self) -> None:
        self._lock = Lock()
        self.total = 0
        """Bytes so far."""

    def add(self, size: int) -> None:
        """Add bytes."""
        with self._lock:
            self.total += size


class _Handle(msgspec.Struct):
    """One open descriptor."""

    fd: int
    """The descriptor."""
    users: int = 0
    """Threads that are using it now."""
    dropped: bool = False
    """Whether to close it when the last user is done."""


class _Use:
    """A descriptor in use; a class, as every read and write takes one, and a generator costs more than the call."""

    __slots__ = ("_handle", "_handles", "_name")

    def __init__(self, handles: Handles, name: str) -> None:
        self._handles = handles
        self._name = name

    def __enter__(self) -> int:
        self._handle = self._handles.acquire(self._name)
        return self._handle.fd

    def __exit__(self, *_: object) -> None:
        self._handles.release(self._name, self._handle)


class Handles:
    """Open file descriptors by name: shared by threads, and closed when too many are idle.

    A checkpoint may have thousands of files, a process may open a thousand (on macOS 256), and a descriptor must not be
    closed while another thread reads through it. So each one counts its users, and only idle ones are closed, the least
    recently used first.
    """

    def __init__(
        self,
        opener: Callable[[str], int],
        closer: Callable[[str, int], None] | None = None,
        limit: int | None = None,
    ) -> None:
        self._opener = opener
        self._closer = closer or (lambda _name, fd: os.close(fd))
        self._limit = _allowed(*_IDLE) if limit is None else limit
        self.at_once = _allowed(*_AT_ONCE)
        """Files that a thread may use at the same time."""
        self._lock = Lock()
        self._open: OrderedDict[str, _Handle] = OrderedDict()
        self._closed = False

    def use(self, name: str) -> _Use:
        """Give the descriptor of a file, opened if need be; it stays open at least until the block ends."""
        return _Use(self, name)

    @contextmanager
    def use_all(self, names: Iterable[str]) -> Iterator[dict[str, int]]:
        """Give the descriptors of several files, by name; otherwise as `use`."""
        used: dict[str, _Handle] = {}
        try:
            for name in names:
                used[name] = self.acquire(name)
            yield {name: handle.fd for name, handle in used.items()}
        finally:
            for name, handle in used.items():
                self.release(name, handle)

    def drop(self, name: str) -> None:
        """Close a file's descriptor now, or as soon as its last user is done."""
        with self._lock:
            handle = self._open.pop(name, None)
            if handle is not None:
                self._retire(name, handle)

    def close(self) -> None:
        """Close all descriptors (those in use: as soon as they are released); nothing opens after this."""
        with self._lock:
            self._closed = True
            while self._open:
                self._retire(*self._open.popitem(last=False))

    def acquire(self, name: str) -> _Handle:
        """Return the descriptor of a file, which stays open until it is released."""
        with self._lock:
            if self._closed:
                raise ValueError(f"{name}: the checkpoint is closed; open it again to read from it")
            handle = self._open.get(name)
            if handle is None:
                handle = self._open[name] = _Handle(self._opener(name))
                handle.users += 1
                self._evict()
            else:
                self._open.move_to_end(name)
                handle.users += 1
            return handle

    def release(self, name: str, handle: _Handle) -> None:
        """Let a descriptor go."""
        with self._lock:
            handle.users -= 1
            if handle.users:
                return
            if handle.dropped:
                self._closer(name, handle.fd)
            elif len(self._open) > self._limit:
                self._evict()

    def _evict(self) -> None:
        excess = len(self._open) - self._limit
        if excess <= 0:
            return
        for name in [name for name, handle in self._open.items() if not handle.users][:excess]:
            self._retire(name, self._open.pop(name))

    def _retire(self, name: str, handle: _Handle) -> None:
        handle.dropped = True
        if not handle.users:
            self._closer(name, handle.fd)


def _allowed(most: int, share: int) -> int:
    """Return how many descriptors there may be for a purpose: at most so many, and its share of all."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if limit == resource.RLIM_INFINITY else max(_FEWEST, min(most, limit // share))


_NEAR = 1 << 14
"""Bytes between two reads that follow one another closely."""
_BLOCK = 1 << 16
_IN_A_ROW = 4
"""So many of them in a row, and the next ones are read at once. Between large tensors every other one is near."""
_MOST_FILES = 64


class _Block:
    """The latest bytes read of one file."""

    __slots__ = ("begin", "data", "near")

    def __init__(self) -> None:
        self.begin = 0
        self.data = b""
        self.near = 0
        """Reads in a row that were near."""


class NearReads:
    """Reads of a storage, in blocks where they are near each other.

    Args:
        storage: the files.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._blocks: dict[str, _Block] = {}

    def read(self, name: str, offset: int, count: int) -> bytes:
        """Return bytes of a file; raises as `Storage.read`."""
        block = self._blocks.get(name)
        if block is None:
            if len(self._blocks) >= _MOST_FILES:
                self._blocks.clear()
            block = self._blocks[name] = _Block()
        low = offset - block.begin
        if low >= 0 and low + count <= len(block.data):
            return block.data[low : low + count]
        is_near = count <= _NEAR and abs(low - len(block.data)) <= _NEAR
        block.near = block.near + 1 if is_near else 0
        wanted = count
        if block.near >= _IN_A_ROW:
            wanted = max(count, min(_BLOCK, self._storage.size(name) - offset))
        data = self._storage.read(name, offset, wanted)
        block.begin, block.data = (offset, data) if wanted <= _BLOCK else (offset + wanted, b"")
        return data if wanted == count else data[:count]


class Renaming(Overlay):
    """Files that have other names in the storage below."""

    @abstractmethod
    def named(self, name: str) -> str:
        """Return a file's name in the storage below."""

    def size(self, name: str) -> int:
        """See `Storage`."""
        return self.below.size(self.named(name))

    def version(self, name: str) -> str:
        """See `Storage`."""
        return self.below.version(self.named(name))

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """See `Storage`."""
        self.below.add_read(steps, self.named(name), offset, view, width, loops)


class SubFolder(Renaming):
    """The files of a sub-folder under their names in it.

    Args:
        below: the checkpoint's files.
        folder: path of the sub-folder in it, without a `/` at the end.
    """

    def __init__(self, below: Storage, folder: str) -> None:
        super().__init__(below)
        self._folder = folder

    def named(self, name: str) -> str:
        """See `Renaming`."""
        return f"{self._folder}/{name}"

    def listing(self, folder: str = "") -> Listing:
        """See `Storage`."""
        return self.below.listing(self.named(folder) if folder else self._folder)


class LiftedFiles(Renaming):
    """A checkpoint's files, of which some that are in sub-folders appear in its own folder, too.

    Args:
        below: the checkpoint's files.
        lifted: name in its own folder, where no file has it -> path in the storage below.
    """

    def __init__(self, below: Storage, lifted: Mapping[str, str]) -> None:
        super().__init__(below)
        self._lifted = lifted

    def named(self, name: str) -> str:
        """See `Renaming`."""
        return self._lifted.get(name, name)

    def listing(self, folder: str = "") -> Listing:
        """See `Storage`."""
        listing = self.below.listing(folder)
        return listing if folder else replace(listing, names=tuple(sorted((*listing.names, *self._lifted))))


MAX_PAIRS = 4_000_000
"""Cap on the key-value pairs of one text: a million tensors. More would take memory out of proportion to the file."""
_CHUNK = 1 << 16
"""Bytes of text that are split at a time: in objects they take some twenty times as much memory."""
_TOO_DEEP = "it is nested too deeply"

_Form = TypeVar("_Form")

_top: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])


class NotJsonError(ValueError):
    """The text is not JSON in UTF-8, or none of the expected form; the message says where it stops being that."""


def parsed(text: bytes | str) -> Any:
    """Return what JSON text says.

    Raises:
        NotJsonError: also for nesting that is too deep, and for an object that has a key twice.
    """
    try:
        plain = text if isinstance(text, str) else text.decode("utf-8-sig")
        return json.loads(plain, object_pairs_hook=_once)
    except RecursionError as error:
        raise NotJsonError(_TOO_DEEP) from error
    except ValueError as error:
        raise NotJsonError(str(error)) from error


def parsed_as(text: bytes | str, form: type[_Form]) -> _Form:
    """Return what JSON text says, as a type of msgspec.

    Raises:
        NotJsonError: see `parsed`; and where it has another form.
    """
    try:
        return msgspec.convert(parsed(text), form)
    except msgspec.MsgspecError as error:
        raise NotJsonError(str(error)) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members_of_it = dict(pairs)
    if len(members_of_it) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise NotJsonError(f"the key {twice[:100]!r} is there twice")
    return members_of_it


def members(text: bytes) -> dict[str, msgspec.Raw]:
    """Return the members of a JSON object, their values not yet decoded.

    Raises:
        NotJsonError: also for nesting that is too deep, and for text that is not UTF-8.
    """
    try:
        text.decode("utf-8")
        return _top.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NotJsonError(str(error)) from error
    except RecursionError as error:
        raise NotJsonError(_TOO_DEEP) from error


def pairs_in(text: bytes) -> int:
    """Count the key-value pairs of valid JSON text, at every level: the colons outside its strings."""
    # What follows a backslash is part of a string, a quote included: `\\` goes first, then `\"`.
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text
    pairs, within = 0, 0
    for start in range(0, len(plain), _CHUNK):
        pieces = plain[start : start + _CHUNK].split(b'"')  # every other one is inside a string
        pairs += b"".join(pieces[within::2]).count(b":")
        within = (within + len(pieces) - 1) % 2
    return pairs


def dropped(text: bytes, top: Mapping[str, msgspec.Raw]) -> bool:
    """Tell whether `members(text)`, which returned `top`, dropped a repeated key."""
    return pairs_in(text) != len(top) + sum(pairs_in(bytes(raw)) for raw in top.values())


def repeated(text: bytes) -> list[tuple[str, ...]]:
    """Return the path of every repeated key in valid JSON text; items of arrays count as keys `0`, `1`, ….

    Raises:
        NotJsonError: for nesting that is too deep.
    """
    try:
        top = json.loads(text, object_pairs_hook=_repeats, parse_int=str, parse_float=str)
    except RecursionError as error:
        raise NotJsonError(_TOO_DEEP) from error
    return list(_paths(top))


class _Repeats(msgspec.Struct, frozen=True):
    """A JSON object with repeated keys in or below it."""

    paths: tuple[tuple[str, ...], ...]
    """Keys from this object to each repeated key."""


def _repeats(pairs: list[tuple[str, object]]) -> _Repeats | None:
    times = Counter(key for key, _ in pairs) if len(dict(pairs)) < len(pairs) else {}
    repeated_here = [(key,) for key, count in times.items() if count > 1]
    below = [(key, *path) for key, value in pairs for path in _paths(value)]
    return _Repeats((*repeated_here, *below)) if repeated_here or below else None


def _paths(value: object) -> Iterator[tuple[str, ...]]:
    if isinstance(value, _Repeats):
        yield from value.paths
    elif isinstance(value, list):
        yield from ((str(at), *path) for at, item in enumerate(value) for path in _paths(item))
