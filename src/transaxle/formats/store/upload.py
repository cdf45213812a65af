"""Uploads a checkpoint to a service: files are sent in parts, and no file is visible before all are complete.

Services have no rename, but they have multipart uploads: parts are sent, and the final call makes the file visible. So
all files are sent first. The commit then makes them visible: files that complete a checkpoint, such as an index, after
the files that they refer to, and the manifest last. A run that fails deletes everything; a killed run leaves parts that
are invisible, and that the service deletes if it is configured to.

Without `overwrite`, requests to S3 are conditional on a missing file: of two runs with one target, the second one
is refused. On other services each run checks the target before, and its own files afterwards.

A stream is written from beginning to end, by one thread at a time (`ordered`).

Each file is a stream of the service's client. On S3 a stream has a multipart upload, which is completed by
`S3Multipart`: its calls handle lost responses, and requests that must not replace a file.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from transaxle.arguments import Overwrite, read_overwrite
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.registry import MANIFEST, STATE_FOLDER, holds_tensors, is_one_file, opens_checkpoint
from transaxle.formats.storage.storage import split_name
from transaxle.formats.store.multipart import OpenUpload, S3Multipart, expected_tag
from transaxle.formats.store.place import (
    ELSEWHERE,
    RemoteFolder,
    irreplaceable,
    irreplaceable_file,
    remote_head_of,
    several_files,
    when_kept,
)
from transaxle.formats.store.service import FILE, S3, Info, Service, Stream
from transaxle.formats.store.unfinished_uploads import remove_unanswered_uploads

_MAX_BUFFERED = 64 << 20
"""Maximum bytes of a file that are buffered because they came too early."""


class SentFile(Protocol):
    """The interface of a file that is being uploaded."""

    size: int

    def write(self, offset: int, view: memoryview, /) -> None:
        """Take bytes."""

    def close(self) -> None:
        """Check that all bytes were written, and send the last part."""

    @property
    def future_tag(self) -> str:
        """Future ETag of the file, if it follows from its bytes; otherwise empty."""

    def commit(self, *, new: bool) -> str:
        """Make the file visible; the result is that of `S3Multipart.complete`."""

    def discard(self) -> None:
        """Abandon the file, unless it is visible."""


class StreamedFile:
    """A file that is uploaded through a stream of the service's client.

    Args:
        service: the service.
        stream: the client's stream.
        name: name of the file, for error messages.
        size: size of the file in bytes.
        part: size in bytes of all parts but the last.
    """

    def __init__(self, service: Service, stream: Stream, name: str, size: int, part: int) -> None:
        self.size = size
        self._service = service
        self._stream: Stream | None = stream
        self._name = name
        self._part = part
        self._sent_bytes = 0
        self._copied = 0
        self._buffered: dict[int, memoryview] = {}
        self.beginning: OpenUpload | None = None
        """The multipart upload of the file, once it is over; None before, or without one."""

    def write(self, offset: int, view: memoryview) -> None:
        """Send bytes in order; buffer bytes that come too early."""
        octets = view.cast("B")
        if offset < self._sent_bytes or offset + octets.nbytes > self.size:
            message = (
                f"{self._name}: bytes {offset} to {offset + octets.nbytes} of {self.size} are out of order; "
                f"{self._sent_bytes} were sent"
            )
            raise ValueError(message)
        if offset > self._sent_bytes:
            self._buffer(offset, octets)
            return
        self._send(octets)
        while self._sent_bytes in self._buffered:
            self._send(self._buffered.pop(self._sent_bytes))
        if self._sent_bytes == self.size:
            self.close()

    def _buffer(self, offset: int, octets: memoryview) -> None:
        if not octets.readonly:
            self._copied += octets.nbytes
            if self._copied > _MAX_BUFFERED:
                raise ValueError(f"{self._name}: bytes at {offset} come too early; {self._sent_bytes} were sent")
            octets = memoryview(bytes(octets))
        self._buffered[offset] = octets

    def _send(self, octets: memoryview) -> None:
        count_sent = 0
        while count_sent < octets.nbytes:
            # Never across the end of a part: some services require that all parts but the last have equal sizes.
            count = min(octets.nbytes - count_sent, self._part - self._sent_bytes % self._part)
            with self._service.as_storage_error(f"sending {count} bytes at offset {self._sent_bytes}", self._name):
                self._open.write(octets[count_sent : count_sent + count])
            count_sent += count
            self._sent_bytes += count

    @property
    def _open(self) -> Stream:
        if self._stream is None:
            raise ValueError(f"{self._name}: this file was abandoned, or is already complete")
        return self._stream

    def close(self) -> None:
        """Check that all bytes were written, and send the last part."""
        if self._sent_bytes != self.size:
            raise ValueError(f"{self._name}: only {self._sent_bytes} of {self.size} bytes were written")
        with self._service.as_storage_error("sending the last part", self._name):
            self._open.close()

    @property
    def future_tag(self) -> str:
        """See `SentFile`."""
        tags = _tags_of(self._stream)
        return expected_tag(tags) or "" if tags else ""

    def commit(self, *, new: bool) -> str:
        """Make the file visible; after a lost response, check whether it is."""
        tag = _complete(self._service, self._open, self._name, new=new)
        if tag is None:
            with self._service.as_storage_error("completing the upload", self._name):
                self._open.commit()
        self._end(self._open)
        return tag or ""

    def discard(self) -> None:
        """Abandon the file, unless it is visible; errors of the service are ignored."""
        if self._stream is None:
            return
        stream = self._stream
        self._end(stream)
        with suppress(TransaxleError), self._service.as_storage_error("abandoning the upload", self._name):
            try:
                stream.discard()
            finally:
                stream.closed = True  # otherwise garbage collection would send the bytes
        self._buffered.clear()

    def _end(self, stream: Stream) -> None:
        self.beginning, self._stream = _upload_of(self._service, stream), None


def _complete(service: Service, stream: Any, file: str, *, new: bool) -> str | None:
    """Complete the multipart upload of a client's stream on S3.

    Args:
        service: the service.
        stream: a stream of fsspec, all of whose bytes were sent.
        file: name of the file, for error messages.
        new: only if the file does not exist.

    Returns:
        As `S3Multipart.complete`; None if the stream must complete itself.

    Raises:
        UsageError: EXISTS, with `new`.
        StorageError: IO.
    """
    upload = getattr(stream, "mpu", None)
    if service.scheme not in S3 or not upload:
        return None
    calls, path = S3Multipart(service), str(stream.path)
    if tags := _tags_of(stream):
        return calls.complete(path, str(upload["UploadId"]), tags, file, new=new)
    calls.abort(path, str(upload["UploadId"]), file)  # an empty file has no parts, but an upload needs one
    return calls.put(path, b"", file, new=new)


def _tags_of(stream: Any) -> list[str]:
    """Return the ETags of the parts that a client's stream has sent."""
    return [str(part["ETag"]).strip('"') for part in getattr(stream, "parts", None) or ()]


def _upload_of(service: Service, stream: Any) -> OpenUpload | None:
    """Return the multipart upload of a client's stream; None if it has none.

    Args:
        service: the service.
        stream: the client's stream, neither committed nor discarded, or just committed.
    """
    upload = getattr(stream, "mpu", None)
    if service.scheme not in S3 or not upload:
        return None
    date = upload.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    return OpenUpload(str(stream.path), str(upload["UploadId"]), str(date and parsedate_to_datetime(date)))


PART = 8 << 20
"""Default size of a part in bytes; larger if the file would have too many parts."""
_MAX_PARTS = 10_000
_GRAIN = 1 << 20
_IN_MEMORY = "memory"
"""Scheme of fsspec's in-memory store."""
_PAUSES = (0.25, 0.5, 1.0, 2.0, 0.0)
"""Seconds between checks of a new file, since a service may show it late."""


class Upload:
    """A checkpoint that is being written under a URL; used like `Staging`.

    Args:
        target: URL of a folder, or of one file if it ends in `.safetensors`, `.bin`, `.pt` or `.pth`.
        overwrite: replace an existing checkpoint, which stays readable until everything is sent. `everything`: also
            delete all other files under the URL; otherwise these are refused.
        resume: refused: another run cannot continue an upload.
        part: size of a part in bytes; larger for files that would have more than 10,000 parts. S3 requires 5 MiB.

    Raises:
        UsageError: EXISTS if the target exists and may not be replaced.
        Refused: UNSUPPORTED for `resume`, and for services without multipart uploads.
        StorageError: IO.
    """

    ordered: Literal[True] = True
    """The bytes of a file must come in order, and from one thread at a time."""

    def __init__(self, target: str, *, overwrite: Overwrite = False, resume: bool = False, part: int = PART) -> None:
        self._service = Service(target, writing=True)
        self._shown = self._service.shown
        if resume:
            hint = "Run it without --resume, or convert to a local folder and upload that; with --on, work is resumed."
            raise refuse("UNSUPPORTED", "an upload cannot be resumed", file=self._shown, hint=hint)
        if not self._service.path.strip("/").partition("/")[2] and self._service.scheme != _IN_MEMORY:
            raise refuse("EXISTS", "this is the root of the store", file=self._shown, hint="Name a folder in it.")
        self.found: tuple[str, ...] = ()
        """Always empty, as parts of a killed run are not visible; see `Staging.found`."""
        self._overwrite = read_overwrite(overwrite)
        self._part = part
        self._single: str | None = None
        self._streams: dict[str, SentFile] = {}
        self._appeared: list[str] = []
        self._stamps: dict[str, str] = {}
        self._scratch: Path | None = None

    @property
    def path(self) -> Path:
        """A local temporary folder for files outside the checkpoint."""
        if self._scratch is None:
            raise ValueError("this upload has not begun, or has already ended")
        return self._scratch

    @property
    def scratch(self) -> Path:
        """The same folder as `path`, since an upload cannot be resumed."""
        return self.path

    @property
    def single(self) -> str | None:
        """Name of the target if it is a single file; exactly one file can then be written, under any name."""
        return self._single

    def look(self, folder: Mapping[str, int], file: Mapping[str, int]) -> None:  # noqa: ARG002 - as in `Staging`
        """Raise what entering the context and `prepare` would raise, as far as known without sending anything.

        Args:
            folder: name -> size of the files, if the target is a folder.
            file: name -> size of the single file, if the target is a file.

        Raises their errors.
        """
        self._begin_at()
        if self._single and len(file) > 1:
            raise several_files(self._shown)

    def _begin_at(self) -> None:
        """Determine whether the target is a single file, and check that it may be written."""
        info = self._service.info(self._service.path, self._shown)
        is_file = info is not None and info.get("type") == FILE
        if is_one_file(self._shown) and (info is None or is_file):
            self._single = self._service.path.rpartition("/")[2]
        self._check(info)

    def __enter__(self) -> Self:
        self._begin_at()
        self._scratch = Path(tempfile.mkdtemp(prefix="transaxle-"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._streams.values():
            file.discard()
        with suppress(TransaxleError):
            self._remove_unanswered()
        for name in reversed(self._appeared):  # the commit failed half-way: delete visible files
            with suppress(TransaxleError):
                if not self._is_of_another(name):
                    self._service.delete(self._place(name), name)
        self._finish()

    def prepare(self, files: Mapping[str, int]) -> frozenset[str]:
        """Open a stream for each file of known size.

        Args:
            files: name (`a` or `folder/a`) -> size in bytes.

        Returns:
            An empty set: no file was started by an earlier run.

        Raises:
            Refused: PATH_ESCAPE; UNSUPPORTED for several files if the target is a single file, or a read-only service.
            StorageError: IO.
        """
        for name, size in files.items():
            self._begin(name, size)
        return frozenset()

    def pwrite(self, file: str, offset: int, view: memoryview) -> None:
        """Write a contiguous view into a prepared file.

        Bytes that come too early are buffered; this is meant for headers and indexes, not for tensors. A
        read-only view is kept without a copy, so its bytes must not change.

        Raises:
            StorageError: IO.
        """
        if view.nbytes:
            self._streams[file].write(offset, view)

    def write(self, file: str, data: bytes) -> None:
        """Write a file with this content; for files whose size was not known to `prepare`.

        Raises:
            Refused: PATH_ESCAPE.
            StorageError: IO.
        """
        self._begin(file, len(data))
        self.pwrite(file, 0, memoryview(data))

    def flush(self, file: str) -> None:
        """Do nothing, as a file is closed after its last byte."""

    @property
    def shared(self) -> bool:
        """Whether other processes can see the files."""
        return self._service.scheme != _IN_MEMORY

    def commit(self) -> None:
        """Make all files visible. All threads must have finished writing.

        A replaced checkpoint is deleted first, starting with its manifest, so that no reader sees a mixture of both.

        Raises:
            UsageError: EXISTS if the target appeared in the meantime.
            StorageError: IO, also if the service does not have all bytes that were sent.
        """
        self.complete()
        self.make_way()
        self.appear()
        self.recheck(())
        self.keep()

    def complete(self) -> None:
        """First step of `commit`, for callers that upload together with other ranks: send the remaining bytes.

        Raises:
            StorageError: IO.
        """
        for file in self._streams.values():
            file.close()

    def make_way(self) -> None:
        """Second step, on one rank only: check the target again, and delete the replaced checkpoint.

        Raises:
            UsageError: EXISTS if the target appeared in the meantime.
            StorageError: IO.
        """
        info = self._service.info(self._service.path, self._shown)
        self._check(info)
        if self._overwrite and not self._single:
            self._delete_old()

    def appear(self) -> None:
        """Third step: make the files visible. The files are deleted again if the context fails before `keep`.

        Raises:
            UsageError: EXISTS if another run has written one of them since `make_way`, and nothing may be replaced.
            StorageError: IO, also if the service does not have all bytes that were sent.
        """
        for name in sorted(self._streams, key=turn):
            self._appear_one(name)

    def _appear_one(self, name: str) -> None:
        file = self._streams[name]
        self._appeared.append(name)  # even if the commit fails, the file may be visible
        self._stamps[name] = file.future_tag
        try:
            self._stamps[name] = file.commit(new=not self._overwrite)
        except TransaxleError as error:
            if error.code == "EXISTS":
                self._appeared.remove(name)
            raise
        self._compare(name)

    def recheck(self, other_files: Collection[str] | None = None) -> None:
        """Fourth step, when all files of the checkpoint are visible: check that they are still this run's.

        There is no lock, so another run may have written to the same place meanwhile. The run that writes its manifest
        last finds the other run's files here; they are not deleted.

        Args:
            other_files: names of the files of other ranks; any further file is then refused. None: these names are
                unknown.

        Raises:
            StorageError: IO.
        """
        names = list(self._appeared)
        foreign = [name for name, stamp in self._looks(names).items() if stamp != self._stamps.get(name)]
        if foreign:
            self._appeared = [name for name in names if name not in foreign]
            raise _replaced_error(foreign[0])
        if other_files is not None and not self._single:
            self._refuse_strays({*other_files, *self._streams})

    def _refuse_strays(self, whole: Collection[str]) -> None:
        """Refuse files in the folder that do not belong to the checkpoint."""
        start, strays = f"{self._service.path}/", list[str]()
        for pause in _PAUSES:
            paths = self._service.below(self._service.path, self._shown)
            names = (path.removeprefix(start) for path in paths if path.startswith(start))
            strays = [name for name in names if name not in whole]
            if not strays:
                return
            time.sleep(pause)
        message = "this file is none of this run's: another run wrote to the same place, or it was listed too late"
        hint = "What this run wrote is removed. Write again, with --overwrite (overwrite=True), or to another place."
        raise refuse("IO", message, file=strays[0], hint=hint)

    def _is_of_another(self, name: str) -> bool:
        """Tell whether another run has replaced one of this run's visible files."""
        own_stamp, current_stamp = self._stamps.get(name, ""), self._looks([name])[name]
        return bool(own_stamp and current_stamp and own_stamp != current_stamp)

    def _looks(self, names: Sequence[str]) -> dict[str, str]:
        """Return name -> current version stamp of the file."""
        return {name: _stamp(self._service.info(self._place(name), name)) for name in names}

    @property
    def is_whole(self) -> bool:
        """Whether the manifest, the last file, is visible; False if the service does not answer."""
        with suppress(TransaxleError):
            return self._service.info(self._place(MANIFEST), MANIFEST) is not None
        return False

    def keep(self) -> None:
        """Last step: keep the visible files."""
        with suppress(TransaxleError):  # the credentials may not permit listing uploads
            self._remove_unanswered()
        self._streams.clear()
        self._appeared.clear()
        self._finish()

    def _remove_unanswered(self) -> None:
        """Remove uploads whose begin requests got no response, so that the client began another one.

        Raises:
            StorageError: IO.
        """
        uploads = [
            file.beginning for file in self._streams.values() if isinstance(file, StreamedFile) and file.beginning
        ]
        if uploads:
            remove_unanswered_uploads(self._service, uploads)

    def _place(self, name: str) -> str:
        """Return the client's path of a file of the checkpoint."""
        parts = split_name(name)
        return self._service.path if self._single else "/".join((self._service.path, *parts))

    def _begin(self, name: str, size: int) -> None:
        place = self._place(name)
        if self._single and self._streams.keys() - {name}:
            raise several_files(self._shown)
        if name in self._streams:
            self._streams.pop(name).discard()
        part = part_size(size, self._part)
        self._streams[name] = StreamedFile(self._service, self._service.create(place, part, name), name, size, part)

    def _check(self, info: Info | None) -> None:
        """Check that a checkpoint may be put here; only an empty folder or a checkpoint is replaced.

        Args:
            info: the service's information on the target.
        """
        if info is None:
            return
        if not self._overwrite:
            reason, hint = when_kept(*self._irreplaceable(info, overwrite=True))
            raise refuse("EXISTS", f"the target already exists{reason}", file=self._shown, hint=hint)
        reason, hint = self._irreplaceable(info, self._overwrite)
        if reason:
            raise refuse("EXISTS", f"the target is not replaced: {reason}", file=self._shown, hint=hint)

    def _irreplaceable(self, info: Info, overwrite: Overwrite) -> tuple[str, str]:
        """Return `(reason, hint)` why an existing target must not be replaced; two empty strings if it may be."""
        if info.get("type") != FILE:
            return irreplaceable(RemoteFolder(self._service), overwrite)
        if self._single:
            head = remote_head_of(self._service, int(info.get("size") or 0))
            return irreplaceable_file(self._single, head, overwrite)
        return "the target is a file, but a folder is to be written", ELSEWHERE

    def _delete_old(self) -> None:
        start = f"{self._service.path}/"
        old = {path.removeprefix(start): path for path in self._service.below(self._service.path, self._shown)}
        for name in sorted(old, key=turn, reverse=True):
            if not self.is_visible(name):
                self._service.delete(old[name], name)

    def is_visible(self, file: str) -> bool:  # noqa: ARG002 - for uploads that several workers send
        """Return False: no interrupted commit has made a file visible, because an `Upload` cannot be resumed."""
        return False

    def _compare(self, name: str) -> None:
        """Check that the service has as many bytes as were sent, with the ETag that it returned."""
        size, tag, info = self._streams[name].size, self._stamps[name], None
        for pause in _PAUSES:
            info = self._service.info(self._place(name), name)
            if info is not None and info.get("size") == size and tag in ("", _stamp(info)):
                self._stamps[name] = _stamp(info)
                return
            time.sleep(pause)
        if info is not None and info.get("size") == size:
            raise _replaced_error(name)
        actual = "nothing" if info is None else f"{info.get('size')} bytes"
        raise refuse("IO", f"{size} bytes were sent, but the service holds {actual}", file=name)

    def _finish(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None


def _stamp(info: Info | None) -> str:
    """Return the ETag of a file, or its creation time without one; empty if there is no file."""
    return str((info or {}).get("ETag") or (info or {}).get("created") or "").removeprefix("W/").strip('"')


def _replaced_error(file: str) -> TransaxleError:
    message = "another run wrote to the same place at the same time, and this file is not ours any more"
    hint = "What this run wrote is removed. Write again when the other run is over, or to another place."
    return refuse("IO", message, file=file, hint=hint)


def part_size(size: int, part: int = PART) -> int:
    """Return the size of a part in bytes, so that the file has at most 10,000 parts, the limit of services.

    Args:
        size: size of the file in bytes.
        part: preferred size of a part.
    """
    least = -(-size // _MAX_PARTS)
    return max(part, -(-least // _GRAIN) * _GRAIN)


def opens(name: str) -> bool:
    """Tell whether a file completes a checkpoint, so that it must become visible after the other files."""
    return turn(name)[0] > 1


def turn(name: str) -> tuple[int, str]:
    """Return a sort key for the order in which files become visible: sidecars, tensors, indexes, the manifest.

    The optimizer's state comes before the model, which is a checkpoint without it.
    """
    if name == MANIFEST:
        return 3, name
    if name.startswith(f"{STATE_FOLDER}/"):
        return (1 if opens_checkpoint(name) else 0), name
    if opens_checkpoint(name):
        return 2, name
    return (1 if holds_tensors(name) else 0), name
