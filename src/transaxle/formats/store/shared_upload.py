"""An upload whose files are sent by workers: begun and committed by a driver, who need not be the same process.

The driver begins a multipart upload of every file that workers write, and says so in an object beside the target. Each
file has one worker, who sends its parts and leaves a result there. The driver compares the results with what the
service has, and completes the uploads in the order of `Upload`. What it is about to let appear it writes down first:
whoever resumes after it died knows the files that have appeared by their tags, and goes on.

A worker's bytes may come in any order and from several threads. A part is sent when it is full, by threads of their
own, while the next one is filled. One that a dead worker has sent, and the service tags with the sum of just these
bytes, is not sent again.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import BoundedSemaphore, Lock
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from transaxle.arguments import Overwrite
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.catalog import Fragment
from transaxle.formats.store.multipart import S3Multipart, StoredPart, abort_empty, completed_tag, gone, multipart
from transaxle.formats.store.place import several_files
from transaxle.formats.store.service import FILE, Info
from transaxle.formats.store.unfinished_uploads import BegunCommit, BegunUpload, HiddenObjects
from transaxle.formats.store.upload import PART, Upload, part_size, turn

SENDERS = 4
"""Parts that a worker sends at once."""
_THREADS = 16
"""Requests that the driver makes at once, of those without many bytes."""
_CLEAN = "Continue it with --resume (resume=True), or remove it:  transaxle clean URL."
_Given = TypeVar("_Given")
_Found = TypeVar("_Found")


class SharedUpload(Upload):
    """A checkpoint that several workers write under a URL; used like `formats.store.Staging`.

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
        self.calls: S3Multipart = multipart(self._service)
        """Of the service."""
        self.hidden = HiddenObjects(self._service, self.calls)
        """What lies beside the target."""
        self._resume = resume
        self._begun: BegunUpload | None = None
        self._sizes: Mapping[str, int] = {}
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
        """Let workers send files: nothing keeps them from it."""

    def take_back(self) -> None:
        """Let no worker send anything any more: what they send again are the same parts."""

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

    def begin_or_continue(self, sizes: Mapping[str, int], task: str, division: str = "", items: int = 0) -> None:
        """Begin the uploads, or find those that an earlier run has begun.

        Args:
            sizes: of all files that workers write.
            task: what the work belongs to, as text.
            division: hash of which item of work sends which files.
            items: how many items there are.

        Raises:
            UsageError: EXISTS where other work has begun, or this one without `resume`.
            StorageError: IO.
        """
        self._sizes = sizes
        if self._single and len(sizes) > 1:
            raise several_files(self._shown)
        begun = self.hidden.begun()
        if begun is not None:
            if not self._resume:
                raise _unfinished(self._shown)
            if begun.task != task:
                message = "beside the target is the unfinished work of another conversion"
                hint = "Remove it:  transaxle clean URL. Or continue it with the original options."
                raise refuse("EXISTS", message, file=self._shown, hint=hint)
            if begun.division != division:
                self.found = ("the work of an earlier run, divided otherwise, was removed",)
                self._remove(begun)
                begun = None
        if begun is None:
            places = {file: self._place(file) for file in sizes}
            token = secrets.token_hex(8)
            begun = BegunUpload(token=token, task=task, division=division, uploads={}, places=places, items=items)
            self._claim(begun)  # before there are uploads, which nobody would know of if this run died
            self._stored = {file: {} for file in sizes}
            try:
                self._begun = self._with_uploads(begun, sizes)
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
        found = self._at_once(self._look_up, self._sizes)
        ended = [file for file, parts in found.items() if parts is None]
        self._over = frozenset(file for file in ended if self.has_appeared(file))
        self._stored = {file: parts or {} for file, parts in found.items()}
        return [file for file in ended if file not in self._over]

    def holds(self, sent: Mapping[str, Sequence[str]]) -> bool:
        """Tell whether the service had all that a worker has sent when it was asked.

        Args:
            sent: file -> the tags of its parts, in order.
        """
        for file, tags in sent.items():
            if self.has_gone(file):
                continue  # it is known by its tag
            parts = zip(tags, part_sizes(self._sizes[file]), strict=True)
            if not dict(enumerate((StoredPart(*part) for part in parts), 1)).items() <= self._stored[file].items():
                return False
        return True

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
        if name in self._sizes:
            file = self._shared.get(name) or _SharedFile(self, name, place, self._sizes[name])
            self._shared[name] = file
        else:
            file = self._own[name] = _OwnFile(self, name, place, size)
        self._streams[name] = file

    def take(self, sent: Mapping[str, Sequence[str]]) -> None:
        """Take note of what a worker has sent; see `holds`."""
        for file, tags in sent.items():
            self._shared[file].tags = tags

    def complete(self) -> None:
        """Check that all is there, and write down what will appear."""
        begun = self.hidden.begun()
        if begun is None or begun.token != self.begun.token:
            raise gone(self._shown)
        for file in self._streams.values():
            file.close()
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

    def _at_once(self, work: Callable[[_Given], _Found], given: Iterable[_Given]) -> dict[_Given, _Found]:
        """Do something for each of many, several at a time."""
        each = list(given)
        with ThreadPoolExecutor(_THREADS, "transaxle-upload") as pool:
            return dict(zip(each, pool.map(work, each), strict=True))


class _SharedFile:
    """A file that a worker sends; stands where `Upload` has a file that it sends itself.

    Args:
        upload: the upload of the checkpoint.
        name: of the file.
        place: what the client calls it.
        size: its bytes.
    """

    def __init__(self, upload: SharedUpload, name: str, place: str, size: int) -> None:
        self.size = size
        """Its bytes."""
        self.tags: Sequence[str] = ()
        """Tags of its parts, in order."""
        self.name = name
        """What it is called."""
        self._upload, self._place = upload, place

    @property
    def foretold(self) -> str:
        """The tag that the file will have; empty where the service makes up its own."""
        return completed_tag(self.tags) or ""

    def write(self, offset: int, view: memoryview) -> None:
        """Do nothing: the worker has sent all bytes of the file."""

    def close(self) -> None:
        """Check that a worker has sent it."""
        if not self.tags and not self._upload.has_gone(self.name):
            raise ValueError(f"{self.name}: no worker has sent it")

    def commit(self, *, new: bool) -> str:
        """Let the file appear, unless it has in a commit that is continued."""
        if self._upload.has_gone(self.name):
            return ""
        upload = self._upload.begun.uploads[self.name]
        return self._upload.calls.complete(self._place, upload, self.tags, self.name, new=new)

    def discard(self) -> None:
        """Do nothing: the upload of the checkpoint is abandoned, or kept, as a whole."""


def _unfinished(target: str) -> TransaxleError:
    return refuse("EXISTS", "beside the target is unfinished work", file=target, hint=_CLEAN)


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


def part_sizes(size: int) -> list[int]:
    """Return the bytes of each part of a file: all but the last have one length, which some services want."""
    usual = part_size(size)
    return [min(usual, size - start) for start in range(0, size, usual)]


class FileSender:
    """Takes what a worker writes into files of which it is the only writer.

    Args:
        calls: of the service.
        begun: the uploads.
        sizes: of the files; what is written into any other is somebody else's.
        known: bytes of the files that are known before any tensor is.
        stored: file -> parts that the service has already.
    """

    def __init__(
        self,
        calls: S3Multipart,
        begun: BegunUpload,
        sizes: Mapping[str, int],
        known: Iterable[Fragment],
        stored: Mapping[str, Mapping[int, StoredPart]],
    ) -> None:
        self._calls, self._begun, self._stored = calls, begun, stored
        self._parts = {file: part_sizes(size) for file, size in sizes.items()}
        self._known: dict[str, list[Fragment]] = {file: [] for file in sizes}
        for fragment in known:
            if fragment.file in sizes:
                self._known[fragment.file].append(fragment)
        self._lock = Lock()
        self._open: dict[tuple[str, int], _FilledPart] = {}
        self._sent: dict[tuple[str, int], Future[str]] = {}
        self._failed: Future[str] | None = None
        self._room = BoundedSemaphore(SENDERS)
        self._pool = ThreadPoolExecutor(SENDERS, "transaxle-parts")

    def pwrite(self, file: str, offset: int, view: memoryview) -> None:
        """Take bytes of a file; they are copied.

        Raises:
            StorageError: IO, also for what was sent before.
        """
        if file not in self._parts:
            return
        usual = self._parts[file][0]
        with view.cast("B") as octets:
            at, end = offset, offset + octets.nbytes
            while at < end:
                stop = min(end, (at // usual + 1) * usual)
                part = self._part(file, at // usual + 1)
                if part.put(at, octets[at - offset : stop - offset]):
                    self._send(part)
                at = stop

    def _part(self, file: str, number: int) -> _FilledPart:
        """Return a part that is being filled; a new one has the bytes that are known."""
        with self._lock:
            if (file, number) in self._sent:
                raise ValueError(f"{file}: part {number} was full already")
            if (file, number) not in self._open:
                start = (number - 1) * self._parts[file][0]
                part = _FilledPart(file, number, start, self._parts[file][number - 1])
                for fragment in self._known[file]:
                    low, high = max(start, fragment.offset), fragment.offset + len(fragment.data)
                    high = min(high, start + len(part.data))
                    if low < high:
                        part.put(low, memoryview(fragment.data)[low - fragment.offset : high - fragment.offset])
                self._open[file, number] = part
            return self._open[file, number]

    def _send(self, part: _FilledPart) -> None:
        if self._failed is not None:
            self._failed.result()
        self._room.acquire()
        try:
            sent = self._pool.submit(self._carry, part)
        except BaseException:
            self._room.release()
            raise
        with self._lock:
            del self._open[part.file, part.number]
            self._sent[part.file, part.number] = sent
        sent.add_done_callback(self._note_failure)

    def _note_failure(self, sent: Future[str]) -> None:
        if not sent.cancelled() and sent.exception() is not None:
            self._failed = sent

    def _carry(self, part: _FilledPart) -> str:
        """Send a part, unless the service has it; return its tag."""
        try:
            file, number, data = part.file, part.number, part.data
            upload = self._begun.uploads.get(file)
            if upload is None:
                raise gone(file)
            stored = self._stored.get(file, {}).get(number)
            if stored is not None and stored.is_of(data):
                return stored.etag
            return self._calls.send_part(self._begun.places[file], upload, number, data, file)
        finally:
            self._room.release()

    def flush(self) -> dict[str, tuple[str, ...]]:
        """Wait until everything is sent; return the tags of all parts of each file, in order.

        Raises:
            StorageError: IO.
            ValueError: the worker has not written all of a file.
        """
        tags = dict[str, tuple[str, ...]]()
        for file, sizes in self._parts.items():
            numbers = range(1, len(sizes) + 1)
            for number in numbers:
                if (file, number) in self._sent:
                    continue
                part = self._part(file, number)  # of a large header
                if part.left:
                    raise ValueError(f"{file}: {part.left} bytes of part {number} were not written")
                self._send(part)
            tags[file] = tuple(self._sent[file, number].result() for number in numbers)
        return tags

    def close(self) -> None:
        """Send nothing that is not on its way already, and wait for that."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._open.clear()


class _FilledPart:
    """A part that is being filled.

    Args:
        file: of the target.
        number: of the part.
        start: its first byte in the file.
        size: its bytes.
    """

    def __init__(self, file: str, number: int, start: int, size: int) -> None:
        self.file, self.number = file, number
        self.data = bytearray(size)
        """Its bytes."""
        self.left = size
        """Bytes that have not come."""
        self._start = start
        self._lock = Lock()

    def put(self, offset: int, octets: memoryview) -> bool:
        """Take bytes; tell whether they were the last ones."""
        at = offset - self._start
        self.data[at : at + octets.nbytes] = octets
        with self._lock:
            self.left -= octets.nbytes
            if self.left < 0:
                raise ValueError(f"{self.file}: bytes at {offset} came twice")
            return self.left == 0
