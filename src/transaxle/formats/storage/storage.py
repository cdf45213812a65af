"""A storage reads the files of one checkpoint, in a local folder or at a URL.

Readers of formats use only names, sizes and byte ranges of files. What storages guarantee therefore applies to all
formats: a name never leads out of the checkpoint, a short read is an error, and no file is mapped into memory.

An overlay is a storage on top of a lower storage: it adds virtual files (`VirtualFiles`), shows a sub-folder as the
whole checkpoint, or shows a sub-folder's files in the folder above (`Renaming`). `NearReads` combines many small reads
that are near each other, such as the reads of headers between small tensors.

**Strict JSON**: this module also parses JSON from untrusted files, in which no key may occur twice in an object.

JSON decoders silently keep the last of two equal keys, so that two readers of one file may see different tensors. For
headers and indexes, which may be long, colons are counted: each decoded key has one colon in the text, so more colons
than keys mean that a key was dropped.
"""

from __future__ import annotations

import json
import os
import re
import resource
from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from threading import Lock
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import msgspec
from msgspec.structs import replace

from transaxle.axes.geometry import Loop
from transaxle.errors import LONGEST_NAME, Code, Refusal, refuse
from transaxle.formats.storage.copier import READING, Steps, read_strided

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PINNED = re.compile(r"(hf://(?:(?:datasets|spaces)/)?[^/@]+/[^/@]+)@[0-9a-f]{40}(?=/|$)")
_MIN_DESCRIPTORS = 4
_IDLE, _AT_ONCE = (128, 8), (64, 16)
"""`(maximum, divisor of the process's limit)`, for idle open descriptors, and for descriptors that one thread uses at
the same time."""
_INSIDE = "Names of files in a checkpoint are relative to its folder and stay inside it."


class Listing(msgspec.Struct, frozen=True):
    """The names directly in one folder of a checkpoint, sorted."""

    names: tuple[str, ...]
    """Names of regular files, including symbolic links to files that may be followed."""
    folders: tuple[str, ...]
    """Names of the sub-folders."""
    special: Mapping[str, Refusal]
    """Name of each member of any other kind (FIFO, device, socket, link that leads outside) -> refusal of this
    member."""

    def everything(self) -> tuple[str, ...]:
        """Return the names of all files, including files that will be refused when they are read."""
        return tuple(sorted((*self.names, *self.special)))


def _with_names(listing: Listing, names: Iterable[str]) -> Listing:
    return replace(listing, names=tuple(sorted((*listing.names, *names))))


class Storage(Protocol):
    """Reads the files of one checkpoint. Several threads can use one storage at the same time."""

    @property
    def batches_steps(self) -> bool:
        """Return whether one call can carry out many reads; true for local files."""
        return False

    @property
    def bytes_read(self) -> int:
        """Return the number of bytes read from files so far, by all threads; numbers in memory do not count."""
        return 0

    @property
    def path(self) -> str:
        """The path of the checkpoint as the user typed it."""

    @property
    def single(self) -> str | None:
        """Name of the file if the user named a single file; None for a folder."""

    def listing(self, folder: str = "") -> Listing:
        """List the checkpoint's folder or one of its sub-folders; the listed names do not include the folder.

        Raises:
            Refused: with the code PATH_ESCAPE for a folder outside the checkpoint.
            StorageError: with the code IO if the folder cannot be read.
        """

    def names(self) -> tuple[str, ...]:
        """Return the names of the regular files directly in the checkpoint's folder."""
        return self.listing().names

    def size(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            Refused: with the code PATH_ESCAPE for a name that leads out of the checkpoint; with the code UNSUPPORTED
                for anything but a regular file; with the code CORRUPT for a changed file.
            StorageError: with the code IO for a missing or unreadable file.
        """

    def version(self, name: str) -> str:
        """Return a string that changes when the file changes; for a local file, it consists of inode, size and times of
        change.

        Raises the errors that `size` raises.
        """

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fill a writable contiguous view with the file's bytes that start at `offset`.

        Raises:
            Refused: with the codes of `size`; with the code CORRUPT if the file ends before the view is full.
            StorageError: with the code IO if the read fails.
        """

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """Add to the list `steps` a read of one range, or of strided runs, into a view.

        Args:
            steps: list of steps; when they run, they raise the errors of `read_into`.
            name: name of the file to read.
            offset: file offset of the first byte to read.
            view: writable and contiguous memory; the first run is read into the view's beginning, and all runs must
                fit.
            width: number of bytes of a run, if there are loops.
            loops: `(count, stride in the file, stride in the view)` in bytes, the outermost loop first; empty if one
                range fills the whole view.
        """
        read = partial(self.read_into, name)
        steps.call(partial(read_strided, read, offset, view, width, loops), READING, view.nbytes)

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Return `size` bytes of a file, beginning at `offset`; raises the errors of `read_into`."""
        buffer = BytesIO(bytes(size))
        with buffer.getbuffer() as view:
            self.read_into(name, offset, view)
        return buffer.getvalue()  # the result shares the buffer's memory, so that a large file is in memory only once

    def recheck(self) -> None:
        """Check that no file has changed since it was read; called before the results of a conversion are published.

        Raises:
            Refused: with the code CORRUPT for each file that has changed.
            StorageError: with the code IO if a file cannot be examined.
        """

    def close(self) -> None:
        """Close all open files. Reading after this call raises ValueError."""


def walk_files(storage: Storage, folder: str = "") -> Iterator[str]:
    """Yield the names of all files in a folder and its sub-folders."""
    listing = storage.listing(folder)
    prefix = f"{folder}/" if folder else ""
    yield from (prefix + name for name in listing.everything())
    for inner in listing.folders:
        yield from walk_files(storage, prefix + inner)


class Overlay(Storage):
    """A storage on top of a lower storage, to which it passes all calls that a subclass does not override.

    Args:
        below: the lower storage, whose files the overlay shows.
    """

    def __init__(self, below: Storage) -> None:
        self.below = below

    @property
    def batches_steps(self) -> bool:
        """Return whether one call can carry out many reads in the lower storage; see `Storage.batches_steps`."""
        return self.below.batches_steps

    @property
    def bytes_read(self) -> int:
        """Return the number of bytes read so far by the lower storage; see `Storage.bytes_read`."""
        return self.below.bytes_read

    @property
    def path(self) -> str:
        """Path of the checkpoint in the lower storage; see `Storage.path`."""
        return self.below.path

    @property
    def single(self) -> str | None:
        """Name of the single file in the lower storage; see `Storage.single`."""
        return self.below.single

    def listing(self, folder: str = "") -> Listing:
        """List a folder of the lower storage; see `Storage.listing`."""
        return self.below.listing(folder)

    def size(self, name: str) -> int:
        """Return the size of a file in the lower storage; see `Storage.size`."""
        return self.below.size(name)

    def version(self, name: str) -> str:
        """Return the version of a file in the lower storage; see `Storage.version`."""
        return self.below.version(name)

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Read bytes of a file at once, with `add_read`; see `Storage.read_into`."""
        with Steps() as steps:
            self.add_read(steps, name, offset, view.cast("B"))
            steps.run()

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """Add a read from the lower storage; see `Storage.add_read`."""
        self.below.add_read(steps, name, offset, view, width, loops)

    def recheck(self) -> None:
        """Check that no file of the lower storage has changed; see `Storage.recheck`."""
        self.below.recheck()

    def close(self) -> None:
        """Close the files of the lower storage; see `Storage.close`."""
        self.below.close()


class VirtualFile(Protocol):
    """A file that is not on disk; its bytes are computed when they are read."""

    @property
    def nbytes(self) -> int:
        """Return the size of the virtual file in bytes."""

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill a writable contiguous view with the file's bytes, beginning at `offset`; several threads may call this
        at the same time.
        """


class InMemoryFile(msgspec.Struct, frozen=True):
    """A virtual file whose bytes are in memory."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Return the size of the virtual file in bytes."""
        return len(self.data)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill a view with the bytes that start at `offset`; see `VirtualFile.read_into`."""
        view.cast("B")[:] = self.data[offset : offset + view.nbytes]


class VirtualFiles(Overlay):
    """An overlay (a storage on top of a lower storage) that adds virtual files.

    Args:
        below: storage of the real files.
        files: the virtual files by name; no real file may have the same name.
        others: further storages from which the virtual files are computed; they are rechecked and closed together with
            `below`.
        listed: names of the virtual files that listings of the top folder contain.
    """

    def __init__(
        self,
        below: Storage,
        files: Mapping[str, VirtualFile],
        others: Sequence[Storage] = (),
        *,
        listed: tuple[str, ...] = (),
    ) -> None:
        super().__init__(below)
        self._files = files
        self.others = others
        self._listed = listed

    def listing(self, folder: str = "") -> Listing:
        """List a folder; the top folder also lists some virtual files; see `Storage.listing`."""
        listing = super().listing(folder)
        return listing if folder or not self._listed else _with_names(listing, self._listed)

    @property
    def bytes_read(self) -> int:
        """Return the number of bytes read so far by `below` and by all of `others`; see `Storage.bytes_read`."""
        return super().bytes_read + sum(storage.bytes_read for storage in self.others)

    def recheck(self) -> None:
        """Check that no file that was read has changed, in `below` and in `others`; see `Storage.recheck`."""
        for storage in self.others:
            storage.recheck()
        super().recheck()

    def close(self) -> None:
        """Close `below` and all of `others`; see `Storage.close`."""
        for storage in self.others:
            storage.close()
        super().close()

    def size(self, name: str) -> int:
        """Return the size of a real or virtual file; see `Storage.size`."""
        virtual = self._files.get(name)
        return super().size(name) if virtual is None else virtual.nbytes

    def version(self, name: str) -> str:
        """Return a file's version (see `Storage.version`); virtual files have no version, because they are computed
        from real files.
        """
        return "" if name in self._files else super().version(name)

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """Add a read of a real or virtual file; see `Storage.add_read`."""
        virtual = self._files.get(name)
        if virtual is None:
            self.below.add_read(steps, name, offset, view, width, loops)
        else:
            steps.call(partial(read_strided, virtual.read_into, offset, view, width, loops), READING, view.nbytes)


Layer = TypeVar("Layer", bound=Overlay)


def layer(storage: Storage, kind: type[Layer]) -> Layer | None:
    """Return the topmost overlay of a class in a stack of storages; None if the stack has no such overlay."""
    while isinstance(storage, Overlay):
        if isinstance(storage, kind):
            return storage
        storage = storage.below
    return None


_CLOSED: WeakSet[Storage] = WeakSet()
"""The storages without a lower storage that were closed by the function `close`."""


def close(storage: Storage) -> None:
    """Close a storage, and record for `is_closed` that it was closed."""
    storage.close()
    _CLOSED.add(lowest(storage))


def is_closed(storage: Storage) -> bool:
    """Return whether a storage was closed by `close`, directly or through a different overlay."""
    return lowest(storage) in _CLOSED


def lowest(storage: Storage) -> Storage:
    """Return the storage under all overlays of a storage."""
    while isinstance(storage, Overlay):
        storage = storage.below
    return storage


def recheck_versions(stack: Storage) -> None:
    """Check, as `Storage.recheck`, that no file has changed since it was read, but compare no bytes with checksums and
    hashes.
    """
    while isinstance(stack, Overlay):
        for storage in stack.others if isinstance(stack, VirtualFiles) else ():
            recheck_versions(storage)
        stack = stack.below
    stack.recheck()


def split_name(name: str) -> tuple[str, ...]:
    """Split the relative name of a file, such as `a/b/c`, and check that it stays inside its folder.

    Raises:
        Refused: with the code PATH_ESCAPE for an empty or absolute name, for components that are empty, `.` or `..`
            (also between backslashes, which are separators on Windows), and for names that contain a NUL.
    """
    parts = tuple(name.split("/"))
    if "\0" in name or any(segment in ("", ".", "..") for segment in parts) or ".." in name.split("\\"):
        raise refuse("PATH_ESCAPE", f"{name!r} is not the name of a file inside the folder", file=name, hint=_INSIDE)
    return parts


def is_plain(name: str) -> bool:
    """Return whether a name is a single path component, without a separator of any operating system."""
    return name not in ("", ".", "..") and not any(character in name for character in "/\\\0")


def too_long(name: str) -> tuple[Code, str]:
    """Return the refusal code and message for a tensor name that is too long."""
    return "UNSUPPORTED", f"its name has {len(name):,} characters; names have at most {LONGEST_NAME:,}"


def without_commit(path: str) -> str:
    """Remove the commit from the URL of a hub's repository; return any other path or URL unchanged."""
    match = _PINNED.match(path)
    return path if match is None else match[1] + path[match.end() :]


def as_text(path: str) -> str:
    """Return a path as valid Unicode; bytes that are not UTF-8 are escaped."""
    return path.encode("utf-8", "backslashreplace").decode()


def is_url(path: str) -> bool:
    """Return whether a path is a URL, `scheme://…`."""
    return _URL.match(path) is not None


class ByteCount:
    """A byte counter that several threads may share."""

    __slots__ = ("_lock", "total")

    def __init__(self) -> None:
        self._lock = Lock()
        self.total = 0
        """Number of bytes counted so far."""

    def add(self, size: int) -> None:
        """Add a number of bytes to the counter."""
        with self._lock:
            self.total += size


class _Handle(msgspec.Struct):
    """An open file descriptor, with the number of threads that use it."""

    fd: int
    """The open file descriptor."""
    users: int = 0
    """Number of threads that are using the descriptor now."""
    dropped: bool = False
    """Whether to close the descriptor when its last user has released it."""


class _Use:
    """Context manager for the use of a descriptor; it is a class, because a generator would cost more than the read or
    write itself.
    """

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
    """A cache of open file descriptors by name, shared by threads; idle descriptors are closed when there are too many.

    A checkpoint may have thousands of files, while a process may open a thousand (on macOS 256); and a descriptor must
    not be closed while a thread reads through it. Therefore the users of each descriptor are counted, and only idle
    descriptors are closed, beginning with the one that was not used for the longest time.
    """

    def __init__(
        self,
        opener: Callable[[str], int],
        closer: Callable[[str, int], None] | None = None,
        limit: int | None = None,
    ) -> None:
        self._opener = opener
        self._closer = closer or (lambda _name, fd: os.close(fd))
        self._limit = _descriptor_limit(*_IDLE) if limit is None else limit
        self.at_once = _descriptor_limit(*_AT_ONCE)
        """Maximum number of files that one thread may use at the same time."""
        self._lock = Lock()
        self._open: OrderedDict[str, _Handle] = OrderedDict()
        self._closed = False

    def use(self, name: str) -> _Use:
        """Return a context manager whose value is a file's open descriptor; the file stays open at least until the
        block ends.
        """
        return _Use(self, name)

    def drop(self, name: str) -> None:
        """Close a file's descriptor now, or as soon as its last user has released it."""
        with self._lock:
            handle = self._open.pop(name, None)
            if handle is not None:
                self._retire(name, handle)

    def close(self) -> None:
        """Close all descriptors (descriptors in use, once they are released); afterwards no file can be opened."""
        with self._lock:
            self._closed = True
            while self._open:
                self._retire(*self._open.popitem(last=False))

    def acquire(self, name: str) -> _Handle:
        """Return the open descriptor of a file; the caller must release it."""
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
        """Mark a descriptor as no longer used by the caller."""
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


def _descriptor_limit(most: int, share: int) -> int:
    """Return a limit for descriptors: `most`, or the process's limit divided by `share` if this is smaller."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if limit == resource.RLIM_INFINITY else max(_MIN_DESCRIPTORS, min(most, limit // share))


_NEAR = 1 << 14
"""Maximum distance in bytes between two reads that count as near each other."""
_BLOCK = 1 << 16
_NEAR_READS = 4
"""Number of near reads in a row after which a whole block of the file is read. The number is more than one or two
because, between large tensors, every second read is near the previous read.
"""
_MAX_FILES = 64


class _Block:
    """The block of a file that was read last, for `NearReads`."""

    __slots__ = ("begin", "data", "near")

    def __init__(self) -> None:
        self.begin = 0
        self.data = b""
        self.near = 0
        """Number of consecutive reads that were near the previous read."""


class NearReads:
    """Reads small parts of files; reads that are near each other are answered from larger blocks.

    Args:
        storage: storage that reads the files.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._blocks: dict[str, _Block] = {}

    def read(self, name: str, offset: int, count: int) -> bytes:
        """Return bytes of a file; the errors are those of `Storage.read`."""
        block = self._blocks.get(name)
        if block is None:
            if len(self._blocks) >= _MAX_FILES:
                self._blocks.clear()
            block = self._blocks[name] = _Block()
        low = offset - block.begin
        if low >= 0 and low + count <= len(block.data):
            return block.data[low : low + count]
        is_near = count <= _NEAR and abs(low - len(block.data)) <= _NEAR
        block.near = block.near + 1 if is_near else 0
        read_size = count
        if block.near >= _NEAR_READS:
            read_size = max(count, min(_BLOCK, self._storage.size(name) - offset))
        data = self._storage.read(name, offset, read_size)
        block.begin, block.data = (offset, data) if read_size <= _BLOCK else (offset + read_size, b"")
        return data if read_size == count else data[:count]


class Renaming(Overlay):
    """An overlay (a storage on top of a lower storage) that shows files under different names."""

    @abstractmethod
    def name_below(self, name: str) -> str:
        """Return the name that a file has in the lower storage."""

    def size(self, name: str) -> int:
        """Return the size of a renamed file; see `Storage.size`."""
        return self.below.size(self.name_below(name))

    def version(self, name: str) -> str:
        """Return the version of a renamed file; see `Storage.version`."""
        return self.below.version(self.name_below(name))

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """Add a read of a renamed file; see `Storage.add_read`."""
        self.below.add_read(steps, self.name_below(name), offset, view, width, loops)


class SubFolder(Renaming):
    """An overlay (a storage on top of a lower storage) that shows a sub-folder as the whole checkpoint.

    Args:
        below: storage that reads the checkpoint with the sub-folder.
        folder: path of the sub-folder, without a trailing `/`.
    """

    def __init__(self, below: Storage, folder: str) -> None:
        super().__init__(below)
        self._folder = folder

    def name_below(self, name: str) -> str:
        """Return the name that a file has in the lower storage; see `Renaming`."""
        return f"{self._folder}/{name}"

    def listing(self, folder: str = "") -> Listing:
        """List a folder inside the sub-folder; see `Storage.listing`."""
        return self.below.listing(self.name_below(folder) if folder else self._folder)


class LiftedFiles(Renaming):
    """An overlay (a storage on top of a lower storage) in which some files of sub-folders also appear in the top
    folder.

    Args:
        below: storage that reads the checkpoint's files.
        lifted: maps the new name of a file in the top folder to the file's path in the lower storage.
    """

    def __init__(self, below: Storage, lifted: Mapping[str, str]) -> None:
        super().__init__(below)
        self._lifted = lifted

    def name_below(self, name: str) -> str:
        """Return the name that a file has in the lower storage; see `Renaming`."""
        return self._lifted.get(name, name)

    def listing(self, folder: str = "") -> Listing:
        """List a folder; the top folder also lists the lifted files; see `Storage.listing`."""
        listing = self.below.listing(folder)
        return listing if folder else _with_names(listing, self._lifted)


MAX_PAIRS = 4_000_000
"""Maximum number of key-value pairs in a JSON text; it suffices for a million tensors, and more pairs would take too
much memory."""
_CHUNK = 1 << 16
"""Number of bytes of JSON text that are split at a time; the resulting objects take about twenty times as much
memory."""
_TOO_DEEP = "it is nested too deeply"

_Form = TypeVar("_Form")

_top: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])


class NotJsonError(ValueError):
    """Raised for a text that is not JSON in UTF-8, or does not have the expected structure; the message states the
    position.
    """


def parse_json(text: bytes | str) -> Any:
    """Parse strict JSON, in which no key may occur twice in an object.

    Raises:
        NotJsonError: if the text is invalid JSON, is nested too deeply, or has a repeated key.
    """
    try:
        plain = text if isinstance(text, str) else text.decode("utf-8-sig")
        return json.loads(plain, object_pairs_hook=_unique_dict)
    except RecursionError as error:
        raise NotJsonError(_TOO_DEEP) from error
    except ValueError as error:
        raise NotJsonError(str(error)) from error


def parse_json_as(text: bytes | str, form: type[_Form]) -> _Form:
    """Parse strict JSON (see `parse_json`) into a msgspec type.

    Raises:
        NotJsonError: with the reasons of `parse_json`, and for a structure that does not fit the type.
    """
    try:
        return msgspec.convert(parse_json(text), form)
    except msgspec.MsgspecError as error:
        raise NotJsonError(str(error)) from error


def _unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise NotJsonError(f"the key {twice[:100]!r} is there twice")
    return unique


def members(text: bytes) -> dict[str, msgspec.Raw]:
    """Return key -> value of a JSON object; the values are not decoded.

    Raises:
        NotJsonError: if the text is invalid JSON, is nested too deeply, or is not UTF-8.
    """
    try:
        text.decode("utf-8")
        return _top.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NotJsonError(str(error)) from error
    except RecursionError as error:
        raise NotJsonError(_TOO_DEEP) from error


def pairs_in(text: bytes) -> int:
    """Count the key-value pairs of valid JSON text at all levels, which is the number of colons outside of strings."""
    # In a string, a backslash escapes the next character, so `\\` is removed first, then `\"`.
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text
    pairs, within = 0, 0
    for start in range(0, len(plain), _CHUNK):
        # after the split at quotation marks, every second piece is inside a string
        pieces = plain[start : start + _CHUNK].split(b'"')
        pairs += b"".join(pieces[within::2]).count(b":")
        within = (within + len(pieces) - 1) % 2
    return pairs


def has_dropped_keys(text: bytes, top: Mapping[str, msgspec.Raw]) -> bool:
    """Return whether `top`, the result of `members(text)`, lacks a key because the key was repeated in the text."""
    return pairs_in(text) != len(top) + sum(pairs_in(bytes(raw)) for raw in top.values())


def repeated_keys(text: bytes) -> list[tuple[str, ...]]:
    """Return the key paths of all repeated keys in valid JSON text; elements of arrays have the keys `0`, `1`, ….

    Raises:
        NotJsonError: if the text is nested too deeply.
    """
    try:
        top = json.loads(text, object_pairs_hook=_repeats, parse_int=str, parse_float=str)
    except RecursionError as error:
        raise NotJsonError(_TOO_DEEP) from error
    return list(_paths(top))


class _Repeats(msgspec.Struct, frozen=True):
    """A JSON object that contains repeated keys, at any depth."""

    paths: tuple[tuple[str, ...], ...]
    """Key paths from this object to each repeated key."""


def _repeats(pairs: list[tuple[str, object]]) -> _Repeats | None:
    times = Counter(key for key, _ in pairs) if len(dict(pairs)) < len(pairs) else {}
    own_repeats = [(key,) for key, count in times.items() if count > 1]
    inner_repeats = [(key, *path) for key, value in pairs for path in _paths(value)]
    return _Repeats((*own_repeats, *inner_repeats)) if own_repeats or inner_repeats else None


def _paths(value: object) -> Iterator[tuple[str, ...]]:
    if isinstance(value, _Repeats):
        yield from value.paths
    elif isinstance(value, list):
        yield from ((str(at), *path) for at, item in enumerate(value) for path in _paths(item))
