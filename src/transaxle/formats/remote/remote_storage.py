"""Remote storage: range requests to a service, with the guarantees of a local folder as far as possible.

A service has no open files: the object under a name may be another one at the next request. So each is known by its tag
(its ETag, or whatever the service has) from the first look at it, and after every range that was read the tag is
compared again: bytes of any other object are refused, never mixed in. Names from a listing are checked like any others.
Where a service gives one version for ever, as a hub gives a commit, there is nothing to compare.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import quote, unquote

from transaxle.errors import Refusal, TransaxleError, refuse
from transaxle.formats.remote.read_ahead import MEMORY, NearReads
from transaxle.formats.remote.service import FILE, RANGES, Info, Readable, Service
from transaxle.formats.remote.web import WEB
from transaxle.formats.storage.storage import ByteCount, Listing, Storage, checked_parts, is_plain

_TAGS = ("ETag", "etag", "generation", "blob_id", "oid", "sha256", "Content-MD5", "Digest")
"""Names under which services state the tag of an object's content; the first that exists counts."""
_TIMES = ("LastModified", "Last-Modified", "last_modified", "mtime", "updated", "created")
"""Names under which they state its time of change."""


@dataclass(frozen=True, slots=True)
class ObjectStamp:
    """Identifies one version of an object."""

    size: int
    """Bytes."""
    tag: str
    """Tag of the content, or time of change; empty if the service states neither."""


class RemoteStorage(Storage):
    """The files under one URL, or one file and the folder around it (see `formats.storage.Storage`).

    Listings are cached: a checkpoint is what it was when it was opened.

    Args:
        url: a folder or a file; a trailing `/` says that it is a folder.
        memory: cap on the cached bytes that were read ahead.
        service: what the URL leads to; None: what fsspec knows.

    Raises:
        Refused: UNSUPPORTED if no installed package knows the scheme.
        StorageError: IO if it is missing or unreadable; the hint names the most similar place beside it.
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
        """Bytes that were asked for so far; see `Storage.bytes_read`."""
        return self._bytes_read.total

    @property
    def path(self) -> str:
        """The URL as the user typed it, without password and query string; of a hub, at the commit that is read."""
        return self._path

    @property
    def single(self) -> str | None:
        """Name of the one file that the URL denotes; None where it denotes a folder."""
        return self._single

    def listing(self, folder: str = "") -> Listing:
        """List a folder of the checkpoint; see `Storage.listing`.

        Around a single file, whose folder the service may not list, there is at least the file itself.
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
        """Return a text that changes when the file does: its tag and size; see `Storage.version`."""
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
        """Check that no file that was read has changed since; see `Storage.recheck`."""
        for name in tuple(self._stamps):
            self._check(name)

    def close(self) -> None:
        """Forget what was read ahead."""
        self._closed = True
        self._ahead.clear()

    def _become_single(self, info: Info) -> None:
        path, _, self._query = self._root.partition("?") if self._web else (self._root, "", "")
        self._root, _, last_segment = path.rpartition("/")
        self._single = unquote(last_segment) if self._web else last_segment
        self._stamps[self._single] = _stamp(info)

    def _place(self, name: str) -> str:
        """Return the client's name for a file or folder of the checkpoint."""
        parts = checked_parts(name)
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
                continue  # an object that stands for the folder itself
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
        """Ask the service for the current version of the object under a name."""
        info = self._service.info(self._place(name), name)
        if info is None:
            raise refuse("IO", "no such file", file=name, system=FileNotFoundError)
        if info.get("type") != FILE:
            raise refuse("UNSUPPORTED", "this is a folder, not a file", file=name)
        return _stamp(info)

    def _check(self, name: str) -> None:
        """Refuse an object that is no longer the version first seen under its name."""
        if not self._service.pinned and self._look(name) != self._stamp(name):
            raise refuse("CORRUPT", "the file was changed while the checkpoint was open", file=name)

    def _fetch(self, name: str, start: int, stop: int) -> bytes:
        """Make one request; its bytes count only if the object has the same version afterwards."""
        try:
            data = self._service.fetch(self._place(name), start, stop, name)
        except TransaxleError:
            self._check(name)  # a better reason for the failure, if there is one
            raise
        self._check(name)
        if len(data) != stop - start:
            message = f"bytes {start} to {stop} were requested, but the service sent {len(data)}"
            raise refuse("IO", message, file=name, hint=RANGES)
        return data

    def _similar(self) -> str:
        """Suggest the place beside a missing one whose name is closest; empty if none is close."""
        above, _, missing = self._root.rpartition("/")
        try:
            beside = [str(member["name"]).rstrip("/").rpartition("/")[2] for member in self._service.members(above, "")]
        except TransaxleError:
            return ""
        close = difflib.get_close_matches(missing, beside, n=1)
        return f"Did you mean {self._path.rstrip('/').removesuffix(missing)}{close[0]}?" if close else ""


def _stamp(info: Info) -> ObjectStamp:
    size = info.get("size")
    if not isinstance(size, int):
        message = "the service does not tell the file's length"
        raise refuse("UNSUPPORTED", message, file=str(info.get("name", "")).partition("?")[0])
    tag = next((info[key] for key in (*_TAGS, *_TIMES) if info.get(key)), "")
    # Azure's client gives tags in quotation marks, but not in listings.
    return ObjectStamp(size, str(tag.timestamp() if isinstance(tag, datetime) else tag).strip('"'))


def _is_text(name: str) -> bool:
    return name == name.encode("utf-8", "replace").decode()
