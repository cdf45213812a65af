"""An upload that several workers send: begun and committed by a driver, who need not be the same process.

The driver begins a multipart upload of every file that workers write, and says so in an object beside the target.
Workers send parts and leave results there. The driver compares what they say with what the service has, joins the parts
that nobody has whole, and completes the uploads in the order of `Upload`. What it is about to let appear it writes down
first: whoever resumes after it died knows the files that have appeared by their tags, and goes on.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import xxhash

from transaxle.arguments import Overwrite
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.parts.part_layout import FileParts, KeptShare, SentPart, layout_digest
from transaxle.formats.parts.part_sender import SENDERS
from transaxle.formats.remote.hidden_objects import BegunCommit, BegunUpload, HiddenObjects
from transaxle.formats.remote.multipart import Multipart, StoredPart, abort_empty, completed_tag, gone, multipart
from transaxle.formats.remote.service import FILE, Info
from transaxle.formats.staging.place import several_files
from transaxle.formats.staging.upload import PART, Upload, turn

_THREADS = 16
"""Requests that the driver makes at once, of those without many bytes."""
_CLEAN = "Continue it with --resume (resume=True), or remove it:  transaxle clean URL."
_Given = TypeVar("_Given")
_Found = TypeVar("_Found")


class SharedUpload(Upload):
    """A checkpoint that several workers write under a URL; used like `formats.staging.Staging`.

    Args:
        target: URL of a folder or a file.
        overwrite: as for `Upload`.
        resume: go on with what an earlier run has begun, and keep this run's work if it fails too. Without it such
            work is refused, since nothing tells whether that run is still at work.
        part: bytes of a usual part.

    Raises:
        UsageError, Refused, StorageError: as `Upload`; UNSUPPORTED where uploads belong to one process.
    """

    def __init__(self, target: str, *, overwrite: Overwrite = False, resume: bool = False, part: int = PART) -> None:
        super().__init__(target, overwrite=overwrite, part=part)
        self.calls: Multipart = multipart(self._service)
        """Of the service."""
        self.hidden = HiddenObjects(self._service, self.calls)
        """What lies beside the target."""
        self._resume = resume
        self._begun: BegunUpload | None = None
        self._layout: Mapping[str, FileParts] = {}
        self._stored: dict[str, dict[int, StoredPart]] = {}
        self._over: frozenset[str] = frozenset()
        self._shared: dict[str, _SharedFile] = {}
        self._own: dict[str, _OwnFile] = {}
        self._remains: BegunCommit | None = None

    @property
    def begun(self) -> BegunUpload:
        """How the work has begun."""
        if self._begun is None:
            raise ValueError("nothing has begun")
        return self._begun

    def share(self) -> None:
        """Let workers send parts: nothing keeps them from it."""

    def take_back(self) -> None:
        """Let no worker send parts any more: what they send again are the same parts."""

    def _check(self, info: Info | None) -> None:
        """Accept what a commit of this work has let appear before it died; otherwise as `Upload`."""
        if info is not None and self._resume and not self._overwrite and self._is_ours(info):
            return
        super()._check(info)

    def _is_ours(self, info: Info) -> bool:
        """Tell whether all that is at the target was put there by the commit that is to be continued."""
        self._remains = self._remains or self._interrupted()
        if self._remains is None:
            return False
        if info.get("type") == FILE:
            return self._single is not None and self.has_appeared(self._single)
        start = f"{self._service.path}/"
        return all(
            path.startswith(start) and self.has_appeared(path.removeprefix(start))
            for path in self._service.below(self._service.path, self._shown)
        )

    def _interrupted(self) -> BegunCommit | None:
        begun, commit = self.hidden.begun(), self.hidden.commit()
        return commit if begun is not None and commit is not None and commit.token == begun.token else None

    def has_appeared(self, name: str) -> bool:
        """Tell whether a file is what the interrupted commit has let appear."""
        tags = {} if self._remains is None else self._remains.tags
        tag = tags.get(name) or (next(iter(tags.values()), "") if self._single else "")
        return bool(tag) and self._tag_of(name) == tag

    def _tag_of(self, name: str) -> str:
        info = self._service.info(self._place(name), name)
        return "" if info is None else str(info.get("ETag", "")).strip('"')

    def begin_or_continue(
        self, layout: Mapping[str, FileParts], task: str, items: int = 0, *, even: bool = False
    ) -> None:
        """Begin the uploads, or find those that an earlier run has begun.

        Args:
            layout: file -> its parts, of all files that workers write.
            task: what the work belongs to, as text.
            items: how many items of work there are.
            even: all parts of a file but the last have one length.

        Raises:
            UsageError: EXISTS where other work has begun, or this one without `resume`.
            StorageError: IO.
        """
        self._layout = layout
        if self._single and len(layout) > 1:
            raise several_files(self._shown)
        digest = layout_digest(layout)
        begun = self.hidden.begun()
        if begun is not None:
            if not self._resume:
                raise _unfinished(self._shown)
            if begun.task != task:
                message = "beside the target is the unfinished work of another conversion"
                hint = "Remove it:  transaxle clean URL. Or continue it with the original options."
                raise refuse("EXISTS", message, file=self._shown, hint=hint)
            if begun.layout != digest:
                self.found = ("the work of an earlier run, divided otherwise, was removed",)
                self._remove(begun)
                begun = None
        if begun is None:
            places = {file: self._place(file) for file in layout}
            token = secrets.token_hex(8)
            begun = BegunUpload(
                token=token, task=task, layout=digest, uploads={}, places=places, items=items, even=even
            )
            self._claim(begun)  # before there are uploads, which nobody would know of if this run died
            self._stored = {file: {} for file in layout}
            try:
                self._begun = self._with_uploads(begun, layout)
            except BaseException:
                with suppress(TransaxleError):
                    self._remove_unnamed(begun)
                with suppress(TransaxleError):
                    self.hidden.delete()
                raise
        else:
            self._begun = begun
            self._remains = self._interrupted()
            with suppress(TransaxleError):  # it may be forbidden to list uploads
                self._remove_unnamed(begun)
            self._begun = self._with_uploads(msgspec.structs.replace(begun, continued=True), self.look_again())

    def _claim(self, begun: BegunUpload) -> None:
        """Say that the work begins here, unless other work has since we looked."""
        try:
            self.hidden.begin(begun, new=True)
        except TransaxleError as error:
            raise _unfinished(self._shown) if error.code == "EXISTS" else error from None

    def _with_uploads(self, begun: BegunUpload, files: Iterable[str]) -> BegunUpload:
        """Begin uploads of files, and say so beside the target."""
        uploads = self._uploads(files)
        begun = msgspec.structs.replace(begun, uploads={**begun.uploads, **uploads})
        try:
            self.hidden.begin(begun)
        except BaseException:
            self._abandon(begun.places, uploads)
            raise
        return begun

    def _remove_unnamed(self, begun: BegunUpload) -> None:
        """Remove uploads of the files that a run began, and did not live to say so, or was not told of.

        Nobody knows their names, so they have no parts. One that has some is of somebody else.
        """
        places, named = frozenset(begun.places.values()), frozenset(begun.uploads.values())
        for each in list(self.calls.list_uploads(self._service.path, self._shown)):
            if each.path in places and each.upload not in named:
                abort_empty(self.calls, each, self._shown)

    def _remove_unanswered(self) -> None:
        """See `Upload`."""
        if self._begun is not None:
            self._remove_unnamed(self._begun)

    def _uploads(self, files: Iterable[str]) -> dict[str, str]:
        """Begin uploads, all or none."""
        begun: dict[str, str] = {}

        def begin(file: str) -> None:
            begun[file] = self.calls.begin_upload(self._place(file), file)

        try:
            self._at_once(begin, files)
        except BaseException:
            self._abandon({file: self._place(file) for file in begun}, begun)
            raise
        return begun

    def _abandon(self, places: Mapping[str, str], uploads: Mapping[str, str]) -> None:
        """Remove uploads, as far as the service lets us."""

        def abort(file: str) -> None:
            with suppress(TransaxleError):
                self.calls.abort(places[file], uploads[file], file)

        self._at_once(abort, uploads)

    def _look_up(self, file: str) -> dict[int, StoredPart] | None:
        upload = self.begun.uploads.get(file)
        return None if upload is None else self.calls.stored_parts(self._place(file), upload, file)

    def look_again(self) -> list[str]:
        """Ask the service which parts it has; return the files whose uploads are gone, and that have not appeared."""
        found = self._at_once(self._look_up, self._layout)
        ended = [file for file, parts in found.items() if parts is None]
        self._over = frozenset(file for file in ended if self.has_appeared(file))
        self._stored = {file: parts or {} for file, parts in found.items()}
        return [file for file in ended if file not in self._over]

    def stored(self, file: str, number: int) -> StoredPart | None:
        """Return a part that the service had when it was asked."""
        return self._stored.get(file, {}).get(number)

    def holds(self, sent: Iterable[SentPart], shares: Iterable[KeptShare], names: frozenset[str] | None = None) -> bool:
        """Tell whether the service has what a worker has sent.

        Args:
            sent: parts.
            shares: of parts that are joined at the commit.
            names: all objects beside the target; None: that was found out before.
        """
        for each in sent:
            if self.has_gone(each.file):
                continue  # it is known by its tag
            if self.stored(each.file, each.number) != StoredPart(each.etag, each.size):
                return False
        return names is None or all(f"shares/{each.name}" in names for each in shares)

    def prepare(self, files: Mapping[str, int]) -> frozenset[str]:
        """Take note of all files; see `Upload`."""
        if self._single and len(files) > 1:
            raise several_files(self._shown)
        for name, size in files.items():
            self._begin(name, size)
        return frozenset()

    def _begin(self, name: str, size: int) -> None:
        place = self._place(name)
        file: Any
        if name in self._layout:
            file = self._shared.get(name) or _SharedFile(self, name, place, self._layout[name])
            self._shared[name] = file
        else:
            file = self._own[name] = _OwnFile(self, name, place, size)
        self._streams[name] = file

    def take(self, sent: Iterable[SentPart], shares: Iterable[KeptShare]) -> None:
        """Take note of what an item's worker has sent."""
        for part in sent:
            self._shared[part.file].tags[part.number] = part.etag
        for share in shares:
            self._shared[share.file].shares.setdefault(share.number, []).append(share)

    def complete(self) -> None:
        """Join the parts that nobody has whole, and write down what will appear."""
        begun = self.hidden.begun()
        if begun is None or begun.token != self.begun.token:
            raise gone(self._shown)
        joins = [
            (file, number) for file in self._shared.values() if not self.has_gone(file.name) for number in file.joined
        ]
        self._at_once(_join, joins, SENDERS)
        for own in self._own.values():
            own.close()
        names = sorted(self._streams, key=turn)
        self.hidden.begin_commit(BegunCommit(token=begun.token, tags={name: self._final_tag(name) for name in names}))

    def appear(self) -> None:
        """Make the files appear, many at once of those whose order does not matter; see `Upload`.

        The first one comes alone: of two runs at one place, one fails there, and the other goes on.
        """
        names = sorted(self._streams, key=turn)
        for _, group in itertools.groupby(names, key=lambda name: (name == names[0], turn(name)[0])):
            self._at_once(self._appear_one, group)

    def _looks(self, names: Sequence[str]) -> dict[str, str]:
        """See `Upload`."""
        return self._at_once(lambda name: super(SharedUpload, self)._looks([name])[name], names)

    def _final_tag(self, name: str) -> str:
        if self.has_gone(name) and self._remains is not None:
            return self._remains.tags.get(name, "")
        return self._streams[name].foretold

    def has_gone(self, file: str) -> bool:
        """Tell whether an upload is over since the file has appeared, in a commit that is continued."""
        return file in self._over

    def keep(self) -> None:
        """Keep the files, and remove what lies beside the target."""
        super().keep()
        self.hidden.delete(finished=True)
        self._begun = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        appeared = list(self._appeared)
        super().__exit__(kind, error, trace)
        if self._begun is None:
            return
        if self._resume:
            if appeared:  # they were deleted again
                self._remains = None
            return
        with suppress(TransaxleError):
            self._remove(self._begun)
        self._begun = None

    def _remove(self, begun: BegunUpload) -> None:
        """Abandon uploads, and remove what lies beside the target, unless that is of a later run."""
        self._abandon(begun.places, begun.uploads)
        there = self.hidden.begun()
        if there is None or there.token == begun.token:
            self.hidden.delete()

    def _at_once(
        self, work: Callable[[_Given], _Found], given: Iterable[_Given], threads: int = _THREADS
    ) -> dict[_Given, _Found]:
        """Do something for each of many, several at a time."""
        each = list(given)
        with ThreadPoolExecutor(threads, "transaxle-upload") as pool:
            return dict(zip(each, pool.map(work, each), strict=True))


class _SharedFile:
    """A file that workers send; stands where `Upload` has a file that it sends itself.

    Args:
        upload: the upload of the checkpoint.
        name: of the file.
        place: what the client calls it.
        parts: of the file.
    """

    def __init__(self, upload: SharedUpload, name: str, place: str, parts: FileParts) -> None:
        self.name = name
        self.size = parts.parts[-1].stop
        """Its bytes."""
        self.tags: dict[int, str] = {}
        """Tags of the parts that are there."""
        self.shares: dict[int, list[KeptShare]] = {}
        """What items have of the others."""
        self._upload = upload
        self._place = place
        self._parts = parts
        self._own: dict[int, bytes] = {}

    @property
    def joined(self) -> list[int]:
        """Numbers of the parts that the driver sends."""
        return [number for number, _ in self._parts.joined]

    @property
    def foretold(self) -> str:
        """The tag that the file will have; empty where the service makes up its own."""
        return completed_tag(self._in_order()) or ""

    def write(self, offset: int, view: memoryview) -> None:
        """Keep bytes that no item writes until their part is joined; workers have sent all others of them."""
        self._own[offset] = bytes(view)

    def join(self, number: int) -> None:
        """Send a part that nobody has whole.

        Raises:
            StorageError: IO, also where a share is not what its worker has left.
        """
        part = self._parts.parts[number - 1]
        data, left = bytearray(part.stop - part.start), part.stop - part.start
        for offset, octets in self._own.items():
            start, stop = max(part.start, offset), min(part.stop, offset + len(octets))
            if start < stop:
                data[start - part.start : stop - part.start] = octets[start - offset : stop - offset]
                left -= stop - start
        given = {int(share.name.partition("-")[0]): share for share in self.shares.get(number, ())}
        held = {item: memoryview(self._share(share)) for item, share in given.items()}
        for start, stop, item in self._parts.shares(part):
            if item not in held or len(held[item]) < stop - start:
                raise refuse("IO", f"bytes {start} to {stop} are not beside the target", file=self.name)
            data[start - part.start : stop - part.start] = held[item][: stop - start]
            held[item] = held[item][stop - start :]
            left -= stop - start
        if left:
            raise ValueError(f"{self.name}: {left} bytes of part {number} were not written")
        stored = self._upload.stored(self.name, number)
        if stored is not None and stored.is_of(data):  # a commit that died had joined it
            self.tags[number] = stored.etag
            return
        upload = self._upload.begun.uploads[self.name]
        self.tags[number] = self._upload.calls.send_part(self._place, upload, number, data, self.name)

    def _share(self, share: KeptShare) -> bytes:
        data = self._upload.hidden.share(share.name)
        if data is None or xxhash.xxh3_128_hexdigest(data) != share.hash:
            raise refuse("IO", f"{share.name} beside the target is missing or damaged", file=self.name)
        return data

    def commit(self, *, new: bool) -> str:
        """Let the file appear, unless it has in a commit that is continued."""
        if self._upload.has_gone(self.name):
            return ""
        upload = self._upload.begun.uploads[self.name]
        return self._upload.calls.complete(self._place, upload, self._in_order(), self.name, new=new)

    def _in_order(self) -> list[str]:
        numbers = range(1, len(self._parts.parts) + 1)
        missing = [number for number in numbers if number not in self.tags]
        if missing and not self._upload.has_gone(self.name):
            raise ValueError(f"{self.name}: part {missing[0]} was not sent")
        return [self.tags.get(number, "") for number in numbers]

    def close(self) -> None:
        """Do nothing: `SharedUpload.complete` joins the parts."""

    def discard(self) -> None:
        """Do nothing: the upload of the checkpoint is abandoned, or kept, as a whole."""


def _unfinished(target: str) -> TransaxleError:
    return refuse("EXISTS", "beside the target is unfinished work", file=target, hint=_CLEAN)


def _join(which: tuple[_SharedFile, int]) -> None:
    file, number = which
    file.join(number)


class _OwnFile:
    """A file that only the driver writes: it is sent in one step.

    Args:
        upload: the upload of the checkpoint.
        name: of the file.
        place: what the client calls it.
        size: its bytes.
    """

    def __init__(self, upload: SharedUpload, name: str, place: str, size: int) -> None:
        self.size = size
        """Its bytes."""
        self._upload, self._name, self._place = upload, name, place
        self._data = bytearray(size)
        self._written: dict[int, int] = {}

    @property
    def foretold(self) -> str:
        """The tag that it will have where the service does not make up its own."""
        return hashlib.md5(self._data, usedforsecurity=False).hexdigest()

    def write(self, offset: int, view: memoryview) -> None:
        """Take bytes."""
        octets = view.cast("B")
        self._data[offset : offset + octets.nbytes] = octets
        self._written[offset] = octets.nbytes
        if len(self._data) != self.size:
            raise ValueError(f"{self._name}: more than its {self.size} bytes were written")

    def close(self) -> None:
        """Check that all was written."""
        if sum(self._written.values()) != self.size:
            raise ValueError(f"{self._name}: only {sum(self._written.values())} of {self.size} bytes were written")

    def commit(self, *, new: bool) -> str:
        """Let the file appear; what a commit that is continued has put there is replaced."""
        new = new and not self._upload.has_appeared(self._name)
        return self._upload.calls.put(self._place, bytes(self._data), self._name, new=new)

    def discard(self) -> None:
        """Do nothing: it is nowhere yet."""
