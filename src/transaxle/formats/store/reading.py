"""Remote storage: reads checkpoints from a service by requests for byte ranges, with the guarantees of local files if
possible.

A service has no open files: the next request for a name may reach a new object (remote file). Therefore each object is
identified by its tag (ETag, or the service's equivalent) from the first request on. The tag is compared after each
range is read, so that bytes of a replaced object are refused and never mixed with earlier bytes. Names of files in
listings are checked like names from any other source. If the version cannot change, such as a commit on a hub, no tags
are compared.

A request takes as long as the transfer of about a megabyte. Readers of formats request headers first, then adjacent
blocks of tensors. Therefore a request that continues an earlier request reads twice as much, up to a limit; a request
at a new place reads little more than was asked for. Data stays in the cache until its memory is needed for newer data.
"""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from datetime import datetime
from threading import Lock
from urllib.parse import quote, unquote

import msgspec

from transaxle.errors import Refusal, TransaxleError, refuse
from transaxle.formats.storage.storage import ByteCount, Listing, Storage, is_plain, split_name
from transaxle.formats.store.service import FILE, HUB, RANGES, WEB, Info, Readable, Service, scheme

MEMORY = 64 << 20
"""Default for the maximum number of bytes in the cache."""
LEAST = 128 << 10
"""Minimum number of bytes of a request, unless the file is smaller; also the largest gap that is read instead of
skipped."""
_SHARE = 8
"""Divisor: the largest request is the maximum of the cache divided by this number."""

Fetch = Callable[[str, int, int], bytes]
"""A function `fetch(file, start, stop)`, which returns exactly the bytes `[start, stop)` of a file, or raises
an error."""


class _Request(msgspec.Struct, eq=False):
    """A requested range of a file, and its data."""

    file: str
    """Name of the requested file."""
    start: int
    """Offset of the first requested byte."""
    stop: int
    """Offset after the last requested byte."""
    data: Future[bytes] = msgspec.field(default_factory=Future)
    """The bytes, once the response has arrived."""


class NearReads:
    """Answers many reads by few requests: it caches data, and reads ahead.

    Args:
        fetch: function that makes one request; it is called from several threads.
        memory: maximum number of bytes in the cache; the bytes of each thread's current request do not count.
    """

    def __init__(self, fetch: Fetch, memory: int = MEMORY) -> None:
        self._fetch = fetch
        self._memory = memory
        self._largest = max(memory // _SHARE, LEAST)
        self._lock = Lock()
        self._windows: dict[str, dict[int, _Request]] = {}
        self._recent: OrderedDict[_Request, None] = OrderedDict()
        self._cached_bytes = 0

    def read_into(self, file: str, size: int, offset: int, view: memoryview) -> None:
        """Fill a contiguous view with the bytes that start at `offset`; the file has `size` bytes, which is enough for
        the view.

        Raises:
            TransaxleError: if `fetch` raises a TransaxleError.
        """
        filled, size_wanted = 0, view.nbytes
        while filled < size_wanted:
            at = offset + filled
            window, new = self._window(file, size, at, size_wanted - filled)
            if new:
                self._fill(window)
            data = memoryview(window.data.result())[at - window.start :][: size_wanted - filled]
            view[filled : filled + len(data)] = data
            filled += len(data)

    def clear(self) -> None:
        """Delete all cached data."""
        with self._lock:
            for window in list(self._recent):
                self._drop(window)

    def _window(self, file: str, size: int, at: int, needed: int) -> tuple[_Request, bool]:
        """Return `(request, whether it is new)` for the request that covers a byte; the caller must make a new
        request.
        """
        with self._lock:
            requests_of_file = self._windows.setdefault(file, {})
            previous: _Request | None = None
            stop = size
            for window in requests_of_file.values():
                if window.start <= at < window.stop:
                    self._recent.move_to_end(window)
                    return window, False
                if window.start > at:
                    stop = min(stop, window.start)  # bytes that are cached already are not requested again
                elif at - window.stop <= LEAST and (previous is None or window.stop > previous.stop):
                    previous = window
            read_length = LEAST
            if previous is not None:
                read_length = 2 * (previous.stop - previous.start)
                # the earlier request is dropped first, because it was read to its end
                self._recent.move_to_end(previous, last=False)
            stop = min(stop, at + min(max(needed, read_length), self._largest))
            if not self._make_room(stop - at):
                stop = min(stop, at + needed)
            window = requests_of_file[at] = _Request(file, at, stop)
            self._recent[window] = None
            self._cached_bytes += stop - at
            return window, True

    def _fill(self, window: _Request) -> None:
        try:
            window.data.set_result(self._fetch(window.file, window.start, window.stop))
        except BaseException as error:
            with self._lock:
                self._drop(window)
            window.data.set_exception(error)  # even if this thread fails, other threads may wait for this data
            raise

    def _make_room(self, size: int) -> bool:
        """Delete the data that was not used for the longest time; return False if pending requests need all the
        memory.
        """
        for window in list(self._recent):
            if self._cached_bytes + size <= self._memory:
                break
            if window.data.done():
                self._drop(window)
        return self._cached_bytes + size <= self._memory

    def _drop(self, window: _Request) -> None:
        if window in self._recent:
            del self._recent[window], self._windows[window.file][window.start]
            self._cached_bytes -= window.stop - window.start


_TAGS = ("ETag", "etag", "generation", "blob_id", "oid", "sha256", "Content-MD5", "Digest")
"""Keys under which services report the tag (ETag, hash or generation) of an object's content; the first key present is
used."""
_TIMES = ("LastModified", "Last-Modified", "last_modified", "mtime", "updated", "created")
"""Keys under which services report when an object was last changed."""


class ObjectStamp(msgspec.Struct, frozen=True):
    """Identifies one version of an object, so that a replaced object is noticed."""

    size: int
    """Size of the object in bytes."""
    tag: str
    """Tag of the content, or time of the last change; empty if the service reports neither of them."""


class RemoteStorage(Storage):
    """The files under a URL, or a single remote file (see `Storage`).

    Listings are cached, so the names in a checkpoint stay those that existed when it was opened.

    Args:
        url: URL of a folder or file; a trailing `/` means a folder.
        memory: maximum number of bytes in the cache.
        service: client of the service behind the URL; None means the fsspec client for the URL's scheme.

    Raises:
        Refused: with the code UNSUPPORTED if no installed package supports the scheme of the URL.
        StorageError: with the code IO if the URL is missing or unreadable; the hint suggests a similar name.
    """

    def __init__(self, url: str, memory: int = MEMORY, service: Readable | None = None) -> None:
        self._service = service or Service(url)
        self._path = self._service.shown
        self._web = self._service.scheme in WEB
        self._root, self._query = self._service.path, ""
        self._single: str | None = None
        self._stamps: dict[str, ObjectStamp] = {}
        self._listings: dict[str, Listing] = {}
        self._ahead = NearReads(self._fetch, memory)
        self._bytes_read = ByteCount()
        self._closed = False
        info = None if url.endswith("/") else self._service.info(self._root, self._path)
        if info is not None and info.get("type") == FILE:
            self._become_single(info)
        elif info is None and not self._service.members(self._root, self._path):
            message = "no such file or folder"
            raise refuse("IO", message, file=self._path, hint=self._similar(), system=FileNotFoundError)

    @property
    def bytes_read(self) -> int:
        """Number of bytes read so far; see `Storage.bytes_read`."""
        return self._bytes_read.total

    @property
    def path(self) -> str:
        """The URL as the user typed it, without password and query string; the URL of a hub names the resolved
        commit.
        """
        return self._path

    @property
    def single(self) -> str | None:
        """Name of the file if the URL is that of a single file; None for a folder."""
        return self._single

    def listing(self, folder: str = "") -> Listing:
        """List the contents of one folder of the checkpoint; see `Storage.listing`.

        For a single file in a folder that the service refuses to list, the result contains only this file.
        """
        if folder not in self._listings:
            try:
                self._listings[folder] = self._list(folder)
            except TransaxleError:
                if not self._single or folder:
                    raise
                self._listings[folder] = Listing((self._single,), (), {})
        return self._listings[folder]

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; see `Storage.size`."""
        return self._stamp(name).size

    def version(self, name: str) -> str:
        """Return a string that changes when the file changes, made of tag and size; see `Storage.version`."""
        self._check(name)
        stamp = self._stamp(name)
        return f"{stamp.tag}-{stamp.size}"

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fill a writable contiguous view with the bytes that start at `offset`; see `Storage.read_into`."""
        size = self._stamp(name).size
        with view.cast("B") as octets:
            if offset + octets.nbytes > size:
                raise refuse(
                    "CORRUPT",
                    f"the file is truncated: it ends at {size}, and bytes {offset} to {offset + octets.nbytes} "
                    "were requested",
                    file=name,
                    hint="Upload the file again.",
                )
            self._bytes_read.add(octets.nbytes)
            self._ahead.read_into(name, size, offset, octets)

    def recheck(self) -> None:
        """Check that no file has changed since it was read; see `Storage.recheck`."""
        for name in tuple(self._stamps):
            self._check(name)

    def close(self) -> None:
        """Delete all cached data."""
        self._closed = True
        self._ahead.clear()

    def _become_single(self, info: Info) -> None:
        path, _, self._query = self._root.partition("?") if self._web else (self._root, "", "")
        self._root, _, last_segment = path.rpartition("/")
        self._single = unquote(last_segment) if self._web else last_segment
        self._stamps[self._single] = _stamp(info)

    def _place(self, name: str) -> str:
        """Return the client's path of a file or folder of the checkpoint."""
        parts = split_name(name)
        path = "/".join((self._root, *(map(quote, parts) if self._web else parts)))
        return f"{path}?{self._query}" if self._query and name == self._single else path

    def _list(self, folder: str) -> Listing:
        place = self._place(folder) if folder else self._root
        start = f"{place}/"
        names, folders = dict[str, ObjectStamp](), list[str]()
        special: dict[str, Refusal] = {}
        for member in self._service.members(place, folder or self._path):
            path = str(member["name"]).partition("?")[0] if self._web else str(member["name"])
            if path.rstrip("/") == place:
                continue  # some services list the folder itself as an object
            is_file = member.get("type") == FILE and not (self._web and path.endswith("/"))
            name = path.removeprefix(start).removesuffix("" if is_file else "/")
            name = unquote(name) if self._web else name
            if not path.startswith(start) or not is_plain(name) or not _is_text(name):
                name = name.encode("utf-8", "backslashreplace").decode()
                special[name] = refuse("PATH_ESCAPE", f"{name!r} is not the name of a file", file=name).refusals[0]
            elif not is_file:
                folders.append(name)
            elif member.get("size") is None:
                names[name] = self._look(f"{folder}/{name}" if folder else name)
            else:
                names[name] = _stamp(member)
        for name, stamp in names.items():
            self._stamps.setdefault(f"{folder}/{name}" if folder else name, stamp)
        return Listing(tuple(sorted(names)), tuple(sorted(set(folders) - names.keys())), special)

    def _stamp(self, name: str) -> ObjectStamp:
        if self._closed:
            raise ValueError(f"{name}: the checkpoint is closed; open it again to read from it")
        if name not in self._stamps:
            self._stamps.setdefault(name, self._look(name))
        return self._stamps[name]

    def _look(self, name: str) -> ObjectStamp:
        """Request the current version (size and tag) of the object under a name."""
        info = self._service.info(self._place(name), name)
        if info is None:
            raise refuse("IO", "no such file", file=name, system=FileNotFoundError)
        if info.get("type") != FILE:
            raise refuse("UNSUPPORTED", "this is a folder, not a file", file=name)
        return _stamp(info)

    def _check(self, name: str) -> None:
        """Refuse an object that is not the version which was first seen under the same name."""
        if not self._service.pinned and self._look(name) != self._stamp(name):
            raise refuse("CORRUPT", "the file was changed while the checkpoint was open", file=name)

    def _fetch(self, name: str, start: int, stop: int) -> bytes:
        """Make one request; the received bytes are used only if the object still has the same version afterwards."""
        try:
            data = self._service.fetch(self._place(name), start, stop, name)
        except TransaxleError:
            self._check(name)  # if the object has changed, this raises a clearer error
            raise
        self._check(name)
        if len(data) != stop - start:
            message = f"bytes {start} to {stop} were requested, but the service sent {len(data)}"
            raise refuse("IO", message, file=name, hint=RANGES)
        return data

    def _similar(self) -> str:
        """Return a hint with the existing name that is most similar to a missing name; empty if none is similar."""
        above, _, missing = self._root.rpartition("/")
        try:
            neighbours = [
                str(member["name"]).rstrip("/").rpartition("/")[2] for member in self._service.members(above, "")
            ]
        except TransaxleError:
            return ""
        close = difflib.get_close_matches(missing, neighbours, n=1)
        return f"Did you mean {self._path.rstrip('/').removesuffix(missing)}{close[0]}?" if close else ""


def _stamp(info: Info) -> ObjectStamp:
    size = info.get("size")
    if not isinstance(size, int):
        message = "the service does not tell the file's length"
        raise refuse("UNSUPPORTED", message, file=str(info.get("name", "")).partition("?")[0])
    tag = next((info[key] for key in (*_TAGS, *_TIMES) if info.get(key)), "")
    # Azure's client puts tags in quotation marks, but not in listings.
    return ObjectStamp(size, str(tag.timestamp() if isinstance(tag, datetime) else tag).strip('"'))


def _is_text(name: str) -> bool:
    return name == name.encode("utf-8", "replace").decode()


def read_if_exists(url: str, max_bytes: int) -> bytes | None:
    """Return the content of a small file; None if there is no such file, or it is larger than `max_bytes`.

    Raises:
        TransaxleError: the errors of `RemoteStorage` for a URL that exists.
    """
    service: Readable
    if scheme(url).lower() == HUB:
        from transaxle.formats.store.hub import HubService

        service = HubService(url)
    else:
        service = Service(url)
    info = service.info(service.path, service.shown)
    if info is None or info.get("type") != FILE:
        return None
    storage = RemoteStorage(url, service=service)
    try:
        name = storage.single or ""
        size = storage.size(name)
        return storage.read(name, 0, size) if size <= max_bytes else None
    finally:
        storage.close()
