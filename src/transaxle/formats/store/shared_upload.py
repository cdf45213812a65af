"""An upload of files that several workers send. A driver process begins the upload, and the same or a later driver
process commits it.

The driver begins a multipart upload for each file that workers write, and records the uploads in an object next to the
target. Each file has one worker, which sends the file's parts, and writes its result into an object next to the target.
The driver compares the workers' results with the parts that the service has, and completes the uploads in the same
order as `Upload` does. Before it completes the uploads it records the commit. A run that resumes after a crash can thus
recognise, by their ETags, the files that are already visible, and continue.

The bytes that a worker writes may come in any order and from several threads. A full part is sent by a separate thread
while the next part is filled. A part that a killed worker has already sent is not sent again if its ETag is the MD5 sum
of the bytes.
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
from transaxle.formats.store.multipart import (
    S3Multipart,
    StoredPart,
    abort_empty,
    expected_tag,
    missing_upload,
    multipart,
)
from transaxle.formats.store.place import several_files
from transaxle.formats.store.service import FILE, Info
from transaxle.formats.store.unfinished_uploads import CommitRecord, HiddenObjects, UploadRecord
from transaxle.formats.store.upload import PART, Upload, part_size, turn

SENDERS = 4
"""Number of parts that a worker sends at the same time."""
_THREADS = 16
"""Number of small requests that the driver makes at the same time."""
_CLEAN = "Continue the work with its own options and --resume (resume=True), or remove it:  transaxle clean URL."
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class SharedUpload(Upload):
    """A checkpoint that several workers write to a URL; it has the methods of `Staging`.

    Args:
        target: URL of the folder or file to write.
        overwrite: whether to replace an existing checkpoint; see `Upload`.
        resume: whether to continue the upload of an earlier run, and to keep this run's work if it also fails. Without
            `resume`, an earlier upload is refused, because the run that began it may still be active.
        part: usual size in bytes of a part; the last part may be smaller.

    Raises:
        UsageError, Refused, StorageError: with the codes of `Upload`; with the code UNSUPPORTED for a service on which
        an upload belongs to one process.
    """

    def __init__(self, target: str, *, overwrite: Overwrite = False, resume: bool = False, part: int = PART) -> None:
        super().__init__(target, overwrite=overwrite, part=part)
        self.calls: S3Multipart = multipart(self._service)
        """The service's calls for multipart uploads."""
        self.hidden = HiddenObjects(self._service, self.calls)
        """The objects next to the target in which the upload is recorded."""
        self._resume = resume
        self._record: UploadRecord | None = None
        self._sizes: Mapping[str, int] = {}
        self._stored: dict[str, dict[int, StoredPart]] = {}
        self._over: frozenset[str] = frozenset()
        self._shared: dict[str, _SharedFile] = {}
        self._own: dict[str, _OwnFile] = {}
        self._interrupted_record: CommitRecord | None = None

    @property
    def record(self) -> UploadRecord:
        """Record of the upload; reading it before `begin_or_continue` raises ValueError."""
        if self._record is None:
            raise ValueError("nothing has begun")
        return self._record

    def share(self) -> None:
        """Do nothing, because a service needs no lock; see `Staging.share`."""

    def take_back(self) -> None:
        """Do nothing, because workers that are late send equal parts; see `Staging.take_back`."""

    def _check(self, info: Info | None) -> None:
        """Accept files that an interrupted commit of the same conversion made visible; check all other files as
        `Upload` does.
        """
        if info is not None and self._resume and not self._overwrite and self._is_ours(info):
            return
        super()._check(info)

    def _is_ours(self, info: Info) -> bool:
        """Return whether all files at the target were made visible by the interrupted commit."""
        self._interrupted_record = self._interrupted_record or self._interrupted_commit()
        if self._interrupted_record is None:
            return False
        if info.get("type") == FILE:
            return self._single is not None and self.was_committed(self._single)
        start = f"{self._service.path}/"
        return all(
            path.startswith(start) and self.was_committed(path.removeprefix(start))
            for path in self._service.below(self._service.path, self._shown)
        )

    def _interrupted_commit(self) -> CommitRecord | None:
        begun, commit = self.hidden.upload_record(), self.hidden.commit_record()
        return commit if begun is not None and commit is not None and commit.token == begun.token else None

    def was_committed(self, name: str) -> bool:
        """Return whether the interrupted commit has made a file visible; the file's ETag shows it."""
        tags = {} if self._interrupted_record is None else self._interrupted_record.tags
        tag = tags.get(name) or (next(iter(tags.values()), "") if self._single else "")
        return bool(tag) and self._tag_of(name) == tag

    def _tag_of(self, name: str) -> str:
        info = self._service.info(self._place(name), name)
        return "" if info is None else str(info.get("ETag", "")).strip('"')

    def begin_or_continue(self, sizes: Mapping[str, int], task: str, division: str = "", items: int = 0) -> None:
        """Begin the uploads of all files, or continue the uploads of an earlier run.

        Args:
            sizes: maps each file that workers write to its size in bytes.
            task: the conversion, described as text.
            division: hash of how the files are divided into work items (parts of a conversion).
            items: number of work items (parts of a conversion).

        Raises:
            UsageError: with the code EXISTS if there is an upload of a different conversion, or any upload without
                `resume`.
            StorageError: with the code IO if the service fails or refuses.
        """
        self._sizes = sizes
        if self._single and len(sizes) > 1:
            raise several_files(self._shown)
        record = self.hidden.upload_record()
        if record is not None:
            if not self._resume:
                raise _refuse_unfinished(self._shown)
            if record.task != task:
                message = "beside the target is the unfinished work of another conversion"
                hint = "Remove the unfinished work:  transaxle clean URL. Or continue it with the original options."
                raise refuse("EXISTS", message, file=self._shown, hint=hint)
            if record.division != division:
                self.found = ("the work of an earlier run, divided otherwise, was removed",)
                self._remove(record)
                record = None
        if record is None:
            places = {file: self._place(file) for file in sizes}
            token = secrets.token_hex(8)
            record = UploadRecord(token=token, task=task, division=division, uploads={}, places=places, items=items)
            # the record is written before the uploads begin, because a killed run must not leave uploads that no record
            # lists
            self._claim(record)
            self._stored = {file: {} for file in sizes}
            try:
                self._record = self._with_uploads(record, sizes)
            except BaseException:
                with suppress(TransaxleError):
                    self._remove_unnamed(record)
                with suppress(TransaxleError):
                    self.hidden.delete()
                raise
        else:
            self._record = record
            self._interrupted_record = self._interrupted_commit()
            with suppress(TransaxleError):  # the service may forbid these credentials to list uploads
                self._remove_unnamed(record)
            self._record = self._with_uploads(msgspec.structs.replace(record, continued=True), self.look_again())

    def _claim(self, record: UploadRecord) -> None:
        """Write the record of the upload, unless a different run has written one meanwhile."""
        try:
            self.hidden.begin(record, new=True)
        except TransaxleError as error:
            raise _refuse_unfinished(self._shown) if error.code == "EXISTS" else error from None

    def _with_uploads(self, record: UploadRecord, files: Iterable[str]) -> UploadRecord:
        """Begin uploads of files, and add these uploads to the record."""
        uploads = self._uploads(files)
        record = msgspec.structs.replace(record, uploads={**record.uploads, **uploads})
        try:
            self.hidden.begin(record)
        except BaseException:
            self._abandon(record.places, uploads)
            raise
        return record

    def _remove_unnamed(self, record: UploadRecord) -> None:
        """Remove uploads of the record's files that are not in the record, because their run was killed or did not get
        the response.

        No run knows the ids of uploads without a record, so these uploads have no parts. An upload that already has
        parts belongs to a different run, so it is kept.
        """
        places, recorded = frozenset(record.places.values()), frozenset(record.uploads.values())
        for upload in list(self.calls.list_uploads(self._service.path, self._shown)):
            if upload.path in places and upload.upload not in recorded:
                abort_empty(self.calls, upload, self._shown)

    def _remove_unanswered(self) -> None:
        """Remove this run's uploads for which the first request got no response; see `Upload`."""
        if self._record is not None:
            self._remove_unnamed(self._record)

    def _uploads(self, files: Iterable[str]) -> dict[str, str]:
        """Begin uploads of files, either of all files or of none; return file name -> upload id."""
        upload_ids: dict[str, str] = {}

        def begin(file: str) -> None:
            upload_ids[file] = self.calls.begin_upload(self._place(file), file)

        try:
            self._at_once(begin, files)
        except BaseException:
            self._abandon({file: self._place(file) for file in upload_ids}, upload_ids)
            raise
        return upload_ids

    def _abandon(self, places: Mapping[str, str], uploads: Mapping[str, str]) -> None:
        """Abort uploads, as far as the service permits this."""

        def abort(file: str) -> None:
            with suppress(TransaxleError):
                self.calls.abort(places[file], uploads[file], file)

        self._at_once(abort, uploads)

    def _look_up(self, file: str) -> dict[int, StoredPart] | None:
        upload = self.record.uploads.get(file)
        return None if upload is None else self.calls.list_parts(self._place(file), upload, file)

    def look_again(self) -> list[str]:
        """List the stored parts; return the names of files that are not visible and whose uploads no longer exist."""
        parts_by_file = self._at_once(self._look_up, self._sizes)
        ended = [file for file, parts in parts_by_file.items() if parts is None]
        self._over = frozenset(file for file in ended if self.was_committed(file))
        self._stored = {file: parts or {} for file, parts in parts_by_file.items()}
        return [file for file in ended if file not in self._over]

    def holds(self, part_tags: Mapping[str, Sequence[str]]) -> bool:
        """Return whether the last listing includes all parts that a worker has sent.

        Args:
            part_tags: maps the name of each file to the ETags of its parts, in order.
        """
        for file, tags in part_tags.items():
            if self.is_visible(file):
                continue  # the file is visible, so its upload is complete
            parts = zip(tags, part_sizes(self._sizes[file]), strict=True)
            if not dict(enumerate((StoredPart(*part) for part in parts), 1)).items() <= self._stored[file].items():
                return False
        return True

    def prepare(self, files: Mapping[str, int]) -> frozenset[str]:
        """Register the names and sizes of all files; see `Upload`."""
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

    def take(self, part_tags: Mapping[str, Sequence[str]]) -> None:
        """Register the parts that a worker has sent, with the parts' ETags; see `holds`."""
        for file, tags in part_tags.items():
            self._shared[file].tags = tags

    def complete(self) -> None:
        """Check that all files are sent, and record the commit."""
        record = self.hidden.upload_record()
        if record is None or record.token != self.record.token:
            raise missing_upload(self._shown)
        for file in self._streams.values():
            file.close()
        names = sorted(self._streams, key=turn)
        self.hidden.begin_commit(CommitRecord(token=record.token, tags={name: self._final_tag(name) for name in names}))

    def appear(self) -> None:
        """Make the files visible, several at the same time if their order does not matter; see `Upload`.

        The first file is completed before all others, so that of two runs with the same target one run fails at this
        file.
        """
        names = sorted(self._streams, key=turn)
        for _, group in itertools.groupby(names, key=lambda name: (name == names[0], turn(name)[0])):
            self._at_once(self._appear_one, group)

    def _looks(self, names: Sequence[str]) -> dict[str, str]:
        """Return file name -> version of the file on the service, for the visible files; see `Upload`."""
        return self._at_once(lambda name: super(SharedUpload, self)._looks([name])[name], names)

    def _final_tag(self, name: str) -> str:
        if self.is_visible(name) and self._interrupted_record is not None:
            return self._interrupted_record.tags.get(name, "")
        return self._streams[name].future_tag

    def is_visible(self, file: str) -> bool:
        """Return whether an interrupted commit has already made a file visible."""
        return file in self._over

    def keep(self) -> None:
        """Keep the visible files even if the context fails later, and delete the records next to the target."""
        super().keep()
        self.hidden.delete(finished=True)
        self._record = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        appeared = list(self._appeared)
        super().__exit__(kind, error, trace)
        if self._record is None:
            return
        if self._resume:
            if appeared:  # the commit failed, and the files that it made visible were deleted again
                self._interrupted_record = None
            return
        with suppress(TransaxleError):
            self._remove(self._record)
        self._record = None

    def _remove(self, record: UploadRecord) -> None:
        """Abort uploads, and delete the records next to the target, unless these records belong to a later run."""
        self._abandon(record.places, record.uploads)
        current = self.hidden.upload_record()
        if current is None or current.token == record.token:
            self.hidden.delete()

    def _at_once(self, work: Callable[[_Item], _Result], items: Iterable[_Item]) -> dict[_Item, _Result]:
        """Call `work` for each item, several at the same time; return item -> result."""
        all_items = list(items)
        with ThreadPoolExecutor(_THREADS, "transaxle-upload") as pool:
            return dict(zip(all_items, pool.map(work, all_items), strict=True))


class _SharedFile:
    """A file that a worker sends; it is used in place of the `StreamedFile` of `Upload`.

    Args:
        upload: the upload of the checkpoint.
        name: name of the file.
        place: path of the file, in the form that the client uses.
        size: size of the file in bytes.
    """

    def __init__(self, upload: SharedUpload, name: str, place: str, size: int) -> None:
        self.size = size
        """Size of the file in bytes."""
        self.tags: Sequence[str] = ()
        """ETags of the file's parts, in order."""
        self.name = name
        """Name of the file in the checkpoint."""
        self._upload, self._place = upload, place

    @property
    def future_tag(self) -> str:
        """Return the ETag that the file will have; empty if it cannot be computed."""
        return expected_tag(self.tags) or ""

    def write(self, offset: int, view: memoryview) -> None:
        """Do nothing, because the worker sends all bytes of this file."""

    def close(self) -> None:
        """Check that a worker has sent all bytes of the file."""
        if not self.tags and not self._upload.is_visible(self.name):
            raise ValueError(f"{self.name}: no worker has sent it")

    def commit(self, *, new: bool) -> str:
        """Make the file visible, unless an interrupted commit has already done so."""
        if self._upload.is_visible(self.name):
            return ""
        upload = self._upload.record.uploads[self.name]
        return self._upload.calls.complete(self._place, upload, self.tags, self.name, new=new)

    def discard(self) -> None:
        """Do nothing, because the uploads of all files are kept or aborted together."""


def _refuse_unfinished(target: str) -> TransaxleError:
    return refuse("EXISTS", "beside the target is unfinished work", file=target, hint=_CLEAN)


class _OwnFile:
    """A small file that the driver itself writes and sends by one request.

    Args:
        upload: the upload of the checkpoint.
        name: name of the file.
        place: path of the file, in the form that the client uses.
        size: size of the file in bytes.
    """

    def __init__(self, upload: SharedUpload, name: str, place: str, size: int) -> None:
        self.size = size
        """Size of the file in bytes."""
        self._upload, self._name, self._place = upload, name, place
        self._data = bytearray(size)
        self._written: dict[int, int] = {}

    @property
    def future_tag(self) -> str:
        """Return the ETag that the file will have; empty if the service computes ETags in an unknown way."""
        return hashlib.md5(self._data, usedforsecurity=False).hexdigest()

    def write(self, offset: int, view: memoryview) -> None:
        """Store bytes of the file in memory until the commit."""
        octets = view.cast("B")
        self._data[offset : offset + octets.nbytes] = octets
        self._written[offset] = octets.nbytes
        if len(self._data) != self.size:
            raise ValueError(f"{self._name}: more than its {self.size} bytes were written")

    def close(self) -> None:
        """Check that all bytes of the file were written."""
        if sum(self._written.values()) != self.size:
            raise ValueError(f"{self._name}: only {sum(self._written.values())} of {self.size} bytes were written")

    def commit(self, *, new: bool) -> str:
        """Make the file visible; it may replace a file of an interrupted commit."""
        new = new and not self._upload.was_committed(self._name)
        return self._upload.calls.put(self._place, bytes(self._data), self._name, new=new)

    def discard(self) -> None:
        """Do nothing, because no bytes have been sent yet."""


def part_sizes(size: int) -> list[int]:
    """Return the sizes of a file's parts; all sizes except the last are equal, as some services require."""
    usual = part_size(size)
    return [min(usual, size - start) for start in range(0, size, usual)]


class FileSender:
    """Sends the files of a work item (a part of a conversion) while a worker writes them.

    Args:
        calls: the service's calls for multipart uploads.
        record: the record of the upload.
        sizes: maps the name of each file of the work item to its size in bytes; writes to any other file are ignored.
        fragments: the bytes of the files that belong to no tensor.
        stored: maps file name to number to the part that the service already has.
    """

    def __init__(
        self,
        calls: S3Multipart,
        record: UploadRecord,
        sizes: Mapping[str, int],
        fragments: Iterable[Fragment],
        stored: Mapping[str, Mapping[int, StoredPart]],
    ) -> None:
        self._calls, self._record, self._stored = calls, record, stored
        self._parts = {file: part_sizes(size) for file, size in sizes.items()}
        self._fragments: dict[str, list[Fragment]] = {file: [] for file in sizes}
        for fragment in fragments:
            if fragment.file in sizes:
                self._fragments[fragment.file].append(fragment)
        self._lock = Lock()
        self._open: dict[tuple[str, int], _FilledPart] = {}
        self._sent_parts: dict[tuple[str, int], Future[str]] = {}
        self._failed: Future[str] | None = None
        self._room = BoundedSemaphore(SENDERS)
        self._pool = ThreadPoolExecutor(SENDERS, "transaxle-parts")

    def pwrite(self, file: str, offset: int, view: memoryview) -> None:
        """Copy bytes into the parts of a file, and send full parts.

        Raises:
            StorageError: with the code IO if this part or an earlier one could not be sent.
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
        """Return a part that is being filled; if the part is new, create it with the fragments inside it."""
        with self._lock:
            if (file, number) in self._sent_parts:
                raise ValueError(f"{file}: part {number} was full already")
            if (file, number) not in self._open:
                start = (number - 1) * self._parts[file][0]
                part = _FilledPart(file, number, start, self._parts[file][number - 1])
                for fragment in self._fragments[file]:
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
            pending = self._pool.submit(self._carry, part)
        except BaseException:
            self._room.release()
            raise
        with self._lock:
            del self._open[part.file, part.number]
            self._sent_parts[part.file, part.number] = pending
        pending.add_done_callback(self._note_failure)

    def _note_failure(self, pending: Future[str]) -> None:
        if not pending.cancelled() and pending.exception() is not None:
            self._failed = pending

    def _carry(self, part: _FilledPart) -> str:
        """Send a part unless the service already has it, and return the part's ETag."""
        try:
            file, number, data = part.file, part.number, part.data
            upload = self._record.uploads.get(file)
            if upload is None:
                raise missing_upload(file)
            stored = self._stored.get(file, {}).get(number)
            if stored is not None and stored.is_of(data):
                return stored.etag
            return self._calls.send_part(self._record.places[file], upload, number, data, file)
        finally:
            self._room.release()

    def flush(self) -> dict[str, tuple[str, ...]]:
        """Wait until all parts are sent; return file name -> ETags of the file's parts, in order.

        Raises:
            StorageError: with the code IO if a part could not be sent.
            ValueError: if the worker has not written all bytes of a file.
        """
        tags = dict[str, tuple[str, ...]]()
        for file, sizes in self._parts.items():
            numbers = range(1, len(sizes) + 1)
            for number in numbers:
                if (file, number) in self._sent_parts:
                    continue
                # this creates a part that contains no bytes of tensors, as in a large header
                part = self._part(file, number)
                if part.missing:
                    raise ValueError(f"{file}: {part.missing} bytes of part {number} were not written")
                self._send(part)
            tags[file] = tuple(self._sent_parts[file, number].result() for number in numbers)
        return tags

    def close(self) -> None:
        """Wait for the parts that are being sent; there are never more of them than senders."""
        self._pool.shutdown()
        self._open.clear()


class _FilledPart:
    """A part of a file that is being filled.

    Args:
        file: name of the file.
        number: number of the part, counted from 1.
        start: offset in the file at which the part begins.
        size: size of the part in bytes.
    """

    def __init__(self, file: str, number: int, start: int, size: int) -> None:
        self.file, self.number = file, number
        self.data = bytearray(size)
        """The bytes of the part."""
        self.missing = size
        """Number of bytes of the part that are still missing."""
        self._start = start
        self._lock = Lock()

    def put(self, offset: int, octets: memoryview) -> bool:
        """Copy bytes into the part; return whether the part is now full."""
        at = offset - self._start
        self.data[at : at + octets.nbytes] = octets
        with self._lock:
            self.missing -= octets.nbytes
            if self.missing < 0:
                raise ValueError(f"{self.file}: bytes at {offset} came twice")
            return self.missing == 0
