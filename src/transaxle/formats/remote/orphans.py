"""Orphans on a service: uploads that nobody completes, and what lies beside targets; found, and removed.

A service does not tell whether the process still lives that has begun an upload. So whoever removes one is told since
when it is there, and a run whose uploads are removed fails with an error that says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from transaxle.formats.remote.hidden_objects import BegunUpload, HiddenObjects, hidden_path
from transaxle.formats.remote.multipart import Multipart, OpenUpload, abort_empty, multipart
from transaxle.formats.remote.service import Service
from transaxle.formats.remote.url import scheme

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
        begun = hidden.begun() if "begun" in names else None
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


def _sizes(calls: Multipart, uploads: list[tuple[str, str]]) -> int:
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
    begun = hidden.begun() if "begun" in names else None
    commit = hidden.commit() if "commit" in names else None
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


def _abort(calls: Multipart, begun: BegunUpload, file: str) -> None:
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
