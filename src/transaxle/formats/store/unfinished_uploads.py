"""Records of uploads in progress, which are stored next to the uploads' target on a service, and the leftovers of
killed uploads.

On a service there is no hidden folder that could be renamed to the target. A worker that may write to the target,
however, may also write next to it. Records of the upload and of finished work are therefore small objects next to the
target, and machines need no common file system. The folder of these objects has the name that the hidden folder would
have on a local disk.

A service does not know whether the process that began an upload is still alive. The command `clean` therefore shows the
age of an upload, and a run whose uploads were removed fails with an error that states this.
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


class UploadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of the uploads to one target, from which any process can continue them."""

    form: int = _FORM
    """Version of the fields of this record."""
    token: str
    """Random token of the upload; results of workers with a different token are ignored."""
    task: str
    """The conversion, described as text; see `journal.Task`."""
    division: str
    """Hash of how the target's files are divided into work items (parts of a conversion)."""
    uploads: dict[str, str]
    """File name -> id of the file's multipart upload."""
    places: dict[str, str]
    """File name -> path of the file, in the form that the client uses."""
    items: int = 0
    """Number of work items (parts of a conversion)."""
    continued: bool = False
    """Whether a run has resumed the upload; then parts may be stored although no worker has written a result."""


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a commit in progress, which lists the files that the commit makes visible."""

    token: str
    """Token of the upload that the commit completes."""
    tags: dict[str, str]
    """File name -> ETag that the file will have, in order of completion; the ETag is empty if it cannot be computed."""


class HiddenObjects:
    """The small objects next to a target in which an upload is recorded.

    Args:
        service: storage service, whose path is the target.
        calls: the service's calls for multipart uploads.
    """

    def __init__(self, service: Service, calls: S3Multipart) -> None:
        self._service = service
        self._calls = calls
        self.path = hidden_path(service.path)
        """Path of the hidden folder, in the form that the client uses."""

    def upload_record(self) -> UploadRecord | None:
        """Read the record of the upload; return None if there is no record.

        Raises:
            Refused: with the code CORRUPT if the record cannot be parsed.
        """
        return self._read(_BEGUN, UploadRecord)

    def begin(self, record: UploadRecord, *, new: bool = False) -> None:
        """Write the record of the upload.

        Args:
            record: the record to write.
            new: whether to fail if there is a record already.

        Raises:
            UsageError: with the code EXISTS if `new` is set and there is a record already.
        """
        self._put(_BEGUN, msgspec.json.encode(record), new=new)

    def commit_record(self) -> CommitRecord | None:
        """Read the record of the commit; return None if no commit has begun."""
        return self._read(_COMMIT, CommitRecord)

    def begin_commit(self, commit: CommitRecord) -> None:
        """Write the record of the commit."""
        self._put(_COMMIT, msgspec.json.encode(commit))

    def result(self, number: int) -> bytes | None:
        """Read the result of a work item (a part of a conversion); return None if the work item has no result."""
        return self._calls.get(f"{self.path}/{_ITEMS}/{number}", self._service.shown)

    def put_result(self, number: int, text: bytes) -> None:
        """Write the result of a work item (a part of a conversion)."""
        self._put(f"{_ITEMS}/{number}", text)

    def names(self) -> list[str]:
        """Return the names of all objects in the hidden folder."""
        return [path.removeprefix(f"{self.path}/") for path in self._service.below(self.path, self._service.shown)]

    def numbers(self) -> list[int]:
        """Return the numbers of the work items (parts of a conversion) that have a result."""
        parts = (name.split("/") for name in self.names())
        return sorted(int(part[1]) for part in parts if len(part) == 2 and part[0] == _ITEMS and part[1].isdigit())

    def delete(self, names: Sequence[str] | None = None, *, finished: bool = False) -> None:
        """Delete objects in the hidden folder.

        Args:
            names: names of the objects to delete; None means all objects.
            finished: whether the target of the upload is complete. If the target is complete, the record of the upload
                is deleted first, so that no run resumes the upload; otherwise it is deleted last, so that the deletion
                can be repeated.
        """
        all_names = self.names() if names is None else names
        last = (_BEGUN, _COMMIT) if finished else (_COMMIT, _BEGUN)
        order = {name: number + 1 for number, name in enumerate(last)}
        for name in sorted(all_names, key=lambda name: ((order.get(name, 3 if finished else 0)), name)):
            self._service.delete(f"{self.path}/{name}", self._service.shown)

    def delete_result(self, number: int) -> None:
        """Delete the result of a work item (a part of a conversion)."""
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
    """Return the path of the hidden folder next to a target, in the form that the client uses.

    Args:
        path: path of the target, in the form that the client uses.
    """
    above, _, name = path.rpartition("/")
    return f"{above}/.{name}.{_ENDING}"


_HIDDEN = re.compile(r"\.(.+)\.transaxle-partial", re.DOTALL)
_UPLOAD = "?uploadId="
_THREADS = 16


class Orphan(msgspec.Struct, frozen=True):
    """A leftover of a killed run on a service."""

    url: str
    """URL of the leftover: a hidden folder, or a file with `?uploadId=…`."""
    target: str
    """URL of the target to which the leftover belongs."""
    what: str
    """Description of the leftover for users."""
    nbytes: int
    """Total size in bytes of the leftover's objects and parts."""


def orphans(url: str, *, uploads: bool = True) -> Iterator[Orphan]:
    """Yield the leftovers of killed runs next to a URL, below it, and directly inside it.

    Args:
        url: URL of a target (which need not exist), of a folder of targets, of a bucket, or of a hidden folder.
        uploads: whether to list uploads without a record as well; the service may forbid listing uploads.

    Raises:
        Refused: with the code UNSUPPORTED for services other than S3.
        StorageError: with the code IO if the service fails or refuses.
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
        begun = hidden.upload_record() if _BEGUN in names else None
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
    for unlisted in unknown.values():
        since = f", begun {unlisted.since}" if unlisted.since else ""
        size = _sizes(calls, [(unlisted.path, unlisted.upload)])
        at = _url(url, unlisted.path)
        yield Orphan(f"{at}{_UPLOAD}{unlisted.upload}", at, f"an upload that was not completed{since}", size)


def _targets(service: Service, path: str) -> Iterator[str]:
    """Yield the paths of targets that may have a hidden folder, in the form that the client uses."""
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
    """Return the URL of a target in the form of `Orphan.target`."""
    return _url(url, Service(url).path)


def _url(url: str, path: str) -> str:
    """Return the URL for a path in the client's form; a `?` in the path belongs to the name and does not begin
    a query.
    """
    return f"{scheme(url)}://{path}"


def _sizes(calls: S3Multipart, uploads: list[tuple[str, str]]) -> int:
    """Return the total number of bytes in the stored parts of uploads, given as `(path, upload id)`."""

    def size(which: tuple[str, str]) -> int:
        parts = calls.list_parts(*which, which[0]) or {}
        return sum(part.size for part in parts.values())

    with ThreadPoolExecutor(_THREADS) as pool:
        return sum(pool.map(size, uploads))


def remove(url: str) -> None:
    """Remove a leftover of a killed run.


    If a killed commit made files visible and the target contains no other files, these files are deleted as well:
    without the last file they are not a checkpoint.

    Args:
        url: URL of the leftover.

    Raises:
        StorageError: with the code IO if the service fails or refuses.
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
    record = hidden.upload_record() if _BEGUN in names else None
    commit = hidden.commit_record() if _COMMIT in names else None
    if record is not None:
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(partial(_abort, calls, record), record.uploads))
        if commit is not None and commit.token == record.token:
            _remove_appeared(target, commit.tags)
    hidden.delete()


def remove_unanswered_uploads(service: Service, own_uploads: Sequence[OpenUpload]) -> None:
    """Remove uploads for which the first request got no response, so that this run began a second upload of the same
    file.

    An upload of this kind has no parts. An upload of a different run may have no parts yet either, but it began later,
    or has a record.

    Args:
        service: storage service, whose path is the target.
        own_uploads: the uploads of this run, all of which have ended.

    Raises:
        StorageError: with the code IO if the service fails or refuses.
    """
    calls = multipart(service)
    since = {each.path: each.since for each in own_uploads}
    unanswered = [
        each
        for each in calls.list_uploads(service.path, service.shown)
        if each.since and each.since <= since.get(each.path, "")
    ]
    if unanswered and HiddenObjects(service, calls).upload_record() is None:
        for upload in unanswered:
            abort_empty(calls, upload, service.shown)


def _abort(calls: S3Multipart, record: UploadRecord, file: str) -> None:
    calls.abort(record.places[file], record.uploads[file], file)


def _remove_appeared(service: Service, tags: Mapping[str, str]) -> None:
    """Delete the files of a folder if a killed commit made all of them visible, but had not made the last file
    visible.
    """
    start = f"{service.path}/"
    present = {path.removeprefix(start): path for path in service.below(service.path, service.shown)}
    if not present or not tags or list(tags)[-1] in present:
        return
    for name, path in present.items():
        info = service.info(path, name)
        tag = "" if info is None else str(info.get("ETag", "")).strip('"')
        if not tag or tags.get(name) != tag:
            return
    for name in reversed(list(tags)):
        if name in present:
            service.delete(present[name], name)
