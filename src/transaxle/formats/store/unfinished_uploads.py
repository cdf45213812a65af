"""What uploads have beside their target on a service while they go on, and what is left of those that died.

A service has no hidden folder that becomes the target. But every worker that may write the target can write beside it:
how the work was begun, and what is done, lies there in small objects, so that machines need no file system in common.
The name is that of a hidden folder on this machine.

A service does not tell whether the process still lives that has begun an upload. So whoever removes one is told since
when it is there, and a run whose uploads are removed fails with an error that says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import msgspec

from transaxle.errors import refuse
from transaxle.formats.storage.storage import NotJsonError, parse_json_as
from transaxle.formats.store.multipart import OpenUpload, S3Multipart, abort_empty, multipart
from transaxle.formats.store.service import Service, scheme

_ENDING = "transaxle-partial"
_BEGUN, _COMMIT, _ITEMS = "begun", "commit", "items"
_FORM = 2
_Kind = TypeVar("_Kind", bound=msgspec.Struct)


class BegunUpload(msgspec.Struct, frozen=True, kw_only=True):
    """Uploads that have begun, as data: any process can go on with them."""

    form: int = _FORM
    """Version of what follows."""
    token: str
    """Names this beginning; what belongs to another one does not count."""
    task: str
    """What the work belongs to."""
    division: str
    """Hash of which item sends which files."""
    uploads: dict[str, str]
    """File -> its upload."""
    places: dict[str, str]
    """File -> what the client calls it."""
    items: int = 0
    """How many items of work there are."""
    continued: bool = False
    """Somebody has gone on with it: parts may be there that no result tells of."""


class BegunCommit(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit that has begun lets appear."""

    token: str
    """Of the beginning that it ends."""
    tags: dict[str, str]
    """File -> the tag that it will have, in order of appearance; empty where the service makes up its own."""


class HiddenObjects:
    """Small objects beside a target.

    Args:
        service: its path is the target.
        calls: of the service.
    """

    def __init__(self, service: Service, calls: S3Multipart) -> None:
        self._service = service
        self._calls = calls
        self.path = hidden_path(service.path)
        """What the client calls the hidden folder."""

    def begun(self) -> BegunUpload | None:
        """Return how the work was begun; None where there is none.

        Raises:
            Refused: CORRUPT where it cannot be read.
        """
        return self._read(_BEGUN, BegunUpload)

    def begin(self, begun: BegunUpload, *, new: bool = False) -> None:
        """Say that the work has begun.

        Args:
            begun: how.
            new: only where no other work has.

        Raises:
            UsageError: EXISTS, where `new`.
        """
        self._put(_BEGUN, msgspec.json.encode(begun), new=new)

    def commit(self) -> BegunCommit | None:
        """Return what a commit has begun to let appear; None where none has begun."""
        return self._read(_COMMIT, BegunCommit)

    def begin_commit(self, commit: BegunCommit) -> None:
        """Say that the files appear now."""
        self._put(_COMMIT, msgspec.json.encode(commit))

    def result(self, number: int) -> bytes | None:
        """Return the result of an item of work."""
        return self._calls.get(f"{self.path}/{_ITEMS}/{number}", self._service.shown)

    def put_result(self, number: int, text: bytes) -> None:
        """Keep the result of an item of work."""
        self._put(f"{_ITEMS}/{number}", text)

    def names(self) -> list[str]:
        """Return the names of all of these objects."""
        return [path.removeprefix(f"{self.path}/") for path in self._service.below(self.path, self._service.shown)]

    def numbers(self) -> list[int]:
        """Return the numbers of the items that have a result."""
        parts = (name.split("/") for name in self.names())
        return sorted(int(part[1]) for part in parts if len(part) == 2 and part[0] == _ITEMS and part[1].isdigit())

    def delete(self, names: Sequence[str] | None = None, *, finished: bool = False) -> None:
        """Remove some objects, or all.

        Args:
            names: of them.
            finished: the target is complete: what says how it has begun goes first, so that nobody goes on. Otherwise
                it goes last, so that removing can be repeated.
        """
        found = self.names() if names is None else names
        last = (_BEGUN, _COMMIT) if finished else (_COMMIT, _BEGUN)
        order = {name: number + 1 for number, name in enumerate(last)}
        for name in sorted(found, key=lambda each: ((order.get(each, 3 if finished else 0)), each)):
            self._service.delete(f"{self.path}/{name}", self._service.shown)

    def delete_result(self, number: int) -> None:
        """Remove the result of an item."""
        self.delete([f"{_ITEMS}/{number}"])

    def _put(self, name: str, data: bytes, *, new: bool = False) -> None:
        self._calls.put(f"{self.path}/{name}", data, self._service.shown, new=new)

    def _read(self, name: str, kind: type[_Kind]) -> _Kind | None:
        text = self._calls.get(f"{self.path}/{name}", self._service.shown)
        try:
            return None if text is None else parse_json_as(text, kind)
        except NotJsonError:
            message = f"{name} beside the target is none of this program's, or damaged"
            hint = "Remove the unfinished work:  transaxle clean URL."
            raise refuse("CORRUPT", message, file=self._service.shown, hint=hint) from None


def hidden_path(path: str) -> str:
    """Return what the client calls the hidden folder beside a target.

    Args:
        path: what it calls the target.
    """
    above, _, name = path.rpartition("/")
    return f"{above}/.{name}.{_ENDING}"


_HIDDEN = re.compile(r"\.(.+)\.transaxle-partial", re.DOTALL)
_UPLOAD = "?uploadId="
_THREADS = 16


class Orphan(msgspec.Struct, frozen=True):
    """Something that a run has left on a service."""

    url: str
    """Its URL: a hidden folder, or a file with its upload as S3 spells it."""
    target: str
    """The target that it belongs to."""
    what: str
    """A description."""
    nbytes: int
    """Bytes of objects and parts."""


def orphans(url: str, *, uploads: bool = True) -> Iterator[Orphan]:
    """Yield what is left beside a URL, under it, and directly inside it.

    Args:
        url: a target, which need not exist, a folder of targets, a bucket, or a hidden folder.
        uploads: also those that nothing tells of; listing them may be forbidden.

    Raises:
        Refused: UNSUPPORTED for services where several workers cannot write.
        StorageError: IO.
    """
    service = Service(url)
    calls = multipart(service)
    shown = service.shown.partition("?")[0].rstrip("/")
    path = service.path
    unknown = {each.upload: each for each in calls.list_uploads(path, shown)} if uploads else {}
    for target in _targets(service, path):
        hidden = HiddenObjects(Service(_url(url, target)), calls)
        names = hidden.names()
        if not names:
            continue
        begun = hidden.begun() if _BEGUN in names else None
        own = {} if begun is None else begun.uploads
        done = len(hidden.numbers())
        for upload in own.values():
            unknown.pop(upload, None)
        open_uploads = [] if begun is None else [(begun.places[file], upload) for file, upload in own.items()]
        size = sum(int(service.client.info(f"{hidden.path}/{name}")["size"]) for name in names)
        what = f"unfinished work: {done:,} work items are done, --resume continues it"
        if begun is None:
            what = "what remains of unfinished work"
        yield Orphan(_url(url, hidden.path), _url(url, target), what, size + _sizes(calls, open_uploads))
    for each in unknown.values():
        since = f", begun {each.since}" if each.since else ""
        size = _sizes(calls, [(each.path, each.upload)])
        at = _url(url, each.path)
        yield Orphan(f"{at}{_UPLOAD}{each.upload}", at, f"an upload that was not completed{since}", size)


def _targets(service: Service, path: str) -> Iterator[str]:
    """Yield what may have something hidden beside it."""
    above, _, name = path.rpartition("/")
    if above and (match := _HIDDEN.fullmatch(name)):
        yield f"{above}/{match[1]}"
        return
    if above:
        yield path
    for member in service.members(path, service.shown):
        place = str(member["name"]).rstrip("/")
        if match := _HIDDEN.fullmatch(place.rpartition("/")[2]):
            yield f"{place.rpartition('/')[0]}/{match[1]}"


def target_url(url: str) -> str:
    """Return the URL of a target as an `Orphan` has it."""
    return _url(url, Service(url).path)


def _url(url: str, path: str) -> str:
    """Return the URL of what a client calls a file: a `?` is part of its name, not the beginning of a query."""
    return f"{scheme(url)}://{path}"


def _sizes(calls: S3Multipart, uploads: list[tuple[str, str]]) -> int:
    """Return the bytes of all parts of uploads."""

    def size(which: tuple[str, str]) -> int:
        parts = calls.stored_parts(*which, which[0]) or {}
        return sum(part.size for part in parts.values())

    with ThreadPoolExecutor(_THREADS) as pool:
        return sum(pool.map(size, uploads))


def remove(url: str) -> None:
    """Remove an orphan.

    What a commit has let appear before it died goes too, if nothing else is there: the last file, which makes it a
    checkpoint, is missing.

    Args:
        url: of an `Orphan`.

    Raises:
        StorageError: IO.
    """
    at, _, upload = url.partition(_UPLOAD)
    service = Service(at)
    calls = multipart(service)
    if upload:
        calls.abort(service.path, upload, at)
        return
    above, _, name = service.path.rpartition("/")
    match = _HIDDEN.fullmatch(name)
    if match is None or hidden_path(f"{above}/{match[1]}") != service.path:
        raise ValueError(f"{url} is no hidden folder")
    target = Service(_url(at, f"{above}/{match[1]}"))
    hidden = HiddenObjects(target, calls)
    names = hidden.names()
    begun = hidden.begun() if _BEGUN in names else None
    commit = hidden.commit() if _COMMIT in names else None
    if begun is not None:
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(partial(_abort, calls, begun), begun.uploads))
        if commit is not None and commit.token == begun.token:
            _remove_appeared(target, commit.tags)
    hidden.delete()


def remove_unanswered(service: Service, begun: Sequence[OpenUpload]) -> None:
    """Remove what the service began before our uploads of the same files, and did not tell us, so that we asked again.

    Such an upload has no parts. Another run's may have none yet; but it began later, or has work beside the target.

    Args:
        service: its path is the target.
        begun: our uploads, which are over.

    Raises:
        StorageError: IO.
    """
    calls = multipart(service)
    since = {each.path: each.since for each in begun}
    left = [
        each
        for each in calls.list_uploads(service.path, service.shown)
        if each.since and each.since <= since.get(each.path, "")
    ]
    if left and HiddenObjects(service, calls).begun() is None:
        for each in left:
            abort_empty(calls, each, service.shown)


def _abort(calls: S3Multipart, begun: BegunUpload, file: str) -> None:
    calls.abort(begun.places[file], begun.uploads[file], file)


def _remove_appeared(service: Service, tags: Mapping[str, str]) -> None:
    """Remove the files of a folder if all of them, but not the last one, were put there by a dead commit."""
    start = f"{service.path}/"
    there = {path.removeprefix(start): path for path in service.below(service.path, service.shown)}
    if not there or not tags or list(tags)[-1] in there:
        return
    for name, path in there.items():
        info = service.info(path, name)
        tag = "" if info is None else str(info.get("ETag", "")).strip('"')
        if not tag or tags.get(name) != tag:
            return
    for name in reversed(list(tags)):
        if name in there:
            service.delete(there[name], name)
