"""Uploads a checkpoint to a service: files are sent in parts, and no file becomes visible before all files are sent.

Services cannot rename files, but they have multipart uploads: the parts of a file are sent, and a final call makes the
file visible. Therefore all bytes of all files are sent first. The commit then makes the files visible: files that
complete a checkpoint, such as an index, come after the files to which they refer, and the manifest comes last. A run
that fails deletes everything that it sent; a killed run leaves invisible parts, which the service deletes if it is
configured to do so.

Without `overwrite`, requests to S3 are conditional on the file's absence, so that of two runs with the same target the
second run is refused. On any other service, each run checks the target before it writes, and its own files afterwards.

A file is written from beginning to end, by one thread at a time (the attribute `ordered` is True).

Each file is therefore a stream of the service's client. On S3 a stream has a multipart upload. `S3Multipart` completes
it, because its calls handle lost responses, and requests that must not replace a file.
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
"""Maximum number of bytes of a file that are buffered because they were written before the bytes that precede them."""


class SentFile(Protocol):
    """The methods of a file that is being uploaded."""

    size: int

    def write(self, offset: int, view: memoryview, /) -> None:
        """Add bytes to the file at an offset."""

    def close(self) -> None:
        """Check that all bytes of the file were written, and send the last part."""

    @property
    def future_tag(self) -> str:
        """Return the ETag that the file will have, if it can be computed from the bytes; otherwise an empty string."""

    def commit(self, *, new: bool) -> str:
        """Make the file visible; returns what `S3Multipart.complete` returns."""

    def discard(self) -> None:
        """Abandon the file, unless it is visible already."""


class StreamedFile:
    """A file that is uploaded through a stream of the service's client.

    Args:
        service: the service to which the file is uploaded.
        stream: the client's stream for the file.
        name: name of the file, for error messages.
        size: size of the file in bytes.
        part: size in bytes of each part except the last.
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
        """The multipart upload of the file after it has ended; None before its end, or if there was no upload."""

    def write(self, offset: int, view: memoryview) -> None:
        """Send bytes in order; bytes that are written too early are buffered."""
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
            # A write never crosses the end of a part, because some services require that all parts except the last have
            # equal sizes.
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
        """Check that all bytes of the file were written, and send the last part."""
        if self._sent_bytes != self.size:
            raise ValueError(f"{self._name}: only {self._sent_bytes} of {self.size} bytes were written")
        with self._service.as_storage_error("sending the last part", self._name):
            self._open.close()

    @property
    def future_tag(self) -> str:
        """Return the ETag that the file will have; see `SentFile`."""
        tags = _tags_of(self._stream)
        return expected_tag(tags) or "" if tags else ""

    def commit(self, *, new: bool) -> str:
        """Make the file visible; after a lost response, check whether the file is visible."""
        tag = _complete(self._service, self._open, self._name, new=new)
        if tag is None:
            with self._service.as_storage_error("completing the upload", self._name):
                self._open.commit()
        self._end(self._open)
        return tag or ""

    def discard(self) -> None:
        """Abandon the file, unless it is visible already; errors of the service are ignored."""
        if self._stream is None:
            return
        stream = self._stream
        self._end(stream)
        with suppress(TransaxleError), self._service.as_storage_error("abandoning the upload", self._name):
            try:
                stream.discard()
            finally:
                stream.closed = True  # a stream that is not closed would send its bytes when Python deletes it
        self._buffered.clear()

    def _end(self, stream: Stream) -> None:
        self.beginning, self._stream = _upload_of(self._service, stream), None


def _complete(service: Service, stream: Any, file: str, *, new: bool) -> str | None:
    """Complete the multipart upload of a client's stream on S3.

    Args:
        service: the service to which the stream belongs.
        stream: a stream of fsspec whose bytes have all been sent.
        file: name of the file, for error messages.
        new: whether to fail if the file exists.

    Returns:
        The result of `S3Multipart.complete`; None if the stream must complete the upload itself.

    Raises:
        UsageError: with the code EXISTS if `new` is set and the file exists.
        StorageError: with the code IO if the service fails or refuses.
    """
    upload = getattr(stream, "mpu", None)
    if service.scheme not in S3 or not upload:
        return None
    calls, path = S3Multipart(service), str(stream.path)
    if tags := _tags_of(stream):
        return calls.complete(path, str(upload["UploadId"]), tags, file, new=new)
    calls.abort(path, str(upload["UploadId"]), file)  # an empty file has no parts, but an upload needs one part
    return calls.put(path, b"", file, new=new)


def _tags_of(stream: Any) -> list[str]:
    """Return the ETags of the parts that a client's stream has sent."""
    return [str(part["ETag"]).strip('"') for part in getattr(stream, "parts", None) or ()]


def _upload_of(service: Service, stream: Any) -> OpenUpload | None:
    """Return the multipart upload of a client's stream; None if the stream has none.

    Args:
        service: the service to which the stream belongs.
        stream: stream of the client, which was neither committed nor discarded, or was just committed.
    """
    upload = getattr(stream, "mpu", None)
    if service.scheme not in S3 or not upload:
        return None
    date = upload.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    return OpenUpload(str(stream.path), str(upload["UploadId"]), str(date and parsedate_to_datetime(date)))


PART = 8 << 20
"""Default size of a part in bytes; a file that would have too many parts gets larger parts."""
_MAX_PARTS = 10_000
_GRAIN = 1 << 20
_IN_MEMORY = "memory"
"""URL scheme of fsspec's in-memory store."""
_PAUSES = (0.25, 0.5, 1.0, 2.0, 0.0)
"""Seconds between checks of a new file, since a service may show the file late."""


class Upload:
    """A checkpoint that is being written to a URL; it has the methods of `Staging`.

    Args:
        target: URL of a folder, or of one file if it ends in `.safetensors`, `.bin`, `.pt` or `.pth`.
        overwrite: whether to replace an existing checkpoint, which stays readable until the new checkpoint is sent.
            `everything` also deletes all other files under the URL; otherwise a folder with other files is refused.
        resume: always refused, because another run cannot continue an upload of this kind.
        part: size of a part in bytes; it is increased for files that would have more than 10,000 parts. S3 requires
            parts of at least 5 MiB.

    Raises:
        UsageError: with the code EXISTS if the target exists and may not be replaced.
        Refused: with the code UNSUPPORTED if `resume` is set, or the service has no multipart uploads.
        StorageError: with the code IO if the service fails or refuses.
    """

    ordered: Literal[True] = True
    """True, because the bytes of a file must come in order, and from one thread at a time."""

    def __init__(self, target: str, *, overwrite: Overwrite = False, resume: bool = False, part: int = PART) -> None:
        self._service = Service(target, writing=True)
        self._shown = self._service.shown
        if resume:
            hint = "Write without --resume, or convert to a local folder and upload that; with --on, work is resumed."
            raise refuse("UNSUPPORTED", "an upload cannot be resumed", file=self._shown, hint=hint)
        if not self._service.path.strip("/").partition("/")[2] and self._service.scheme != _IN_MEMORY:
            raise refuse("EXISTS", "this is the root of the store", file=self._shown, hint="Name a folder inside.")
        self.found: tuple[str, ...] = ()
        """Always empty, because a killed run leaves no visible parts; see `Staging.found`."""
        self._overwrite = read_overwrite(overwrite)
        self._part = part
        self._single: str | None = None
        self._streams: dict[str, SentFile] = {}
        self._appeared: list[str] = []
        self._stamps: dict[str, str] = {}
        self._scratch: Path | None = None

    @property
    def path(self) -> Path:
        """A local temporary folder for files that are not part of the checkpoint."""
        if self._scratch is None:
            raise ValueError("this upload has not begun, or has already ended")
        return self._scratch

    @property
    def scratch(self) -> Path:
        """The folder `path`: there is no separate folder for unfinished work, because an upload by one process cannot
        be resumed.
        """
        return self.path

    @property
    def single(self) -> str | None:
        """Name of the target if it is a single file; then exactly one file can be written, under any name."""
        return self._single

    def look(self, folder: Mapping[str, int], file: Mapping[str, int]) -> None:  # noqa: ARG002 - as in `Staging`
        """Raise the errors that entering the context and calling `prepare` would raise, as far as they are known
        without sending anything.

        Args:
            folder: maps file name to size, if the target is a folder.
            file: maps file name to size, if the target is a single file.

        Raises the errors of `__enter__` and of `prepare`.
        """
        self._begin_at()
        if self._single and len(file) > 1:
            raise several_files(self._shown)

    def _begin_at(self) -> None:
        """Determine whether the target is a single file, and check that a checkpoint may be written to it."""
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
        for name in reversed(self._appeared):  # the commit failed before its end, so the visible files are deleted
            with suppress(TransaxleError):
                if not self._is_of_another(name):
                    self._service.delete(self._place(name), name)
        self._finish()

    def prepare(self, files: Mapping[str, int]) -> frozenset[str]:
        """Open a stream for each file whose size is known.

        Args:
            files: maps each file name (`a` or `folder/a`) to the size of the file in bytes.

        Returns:
            An empty set, because no earlier run can have started a file.

        Raises:
            Refused: with the code PATH_ESCAPE for a name that leads out of the target; with the code UNSUPPORTED for
                several files with a single-file target, or for a read-only service.
            StorageError: with the code IO if the service fails or refuses.
        """
        for name, size in files.items():
            self._begin(name, size)
        return frozenset()

    def pwrite(self, file: str, offset: int, view: memoryview) -> None:
        """Write a contiguous view into a prepared file.

        Bytes that are written too early are buffered; the buffer is meant for headers and indexes, and too small for
        tensors. A read-only view is kept without a copy, so its bytes must not change.

        Raises:
            StorageError: with the code IO if the service fails or refuses.
        """
        if view.nbytes:
            self._streams[file].write(offset, view)

    def write(self, file: str, data: bytes) -> None:
        """Write a whole file with the given content; used for files whose size was not known when `prepare` was called.

        Raises:
            Refused: with the code PATH_ESCAPE for a file name that leads out of the target.
            StorageError: with the code IO if the service fails or refuses.
        """
        self._begin(file, len(data))
        self.pwrite(file, 0, memoryview(data))

    def flush(self, file: str) -> None:
        """Do nothing, because a file is flushed after its last byte."""

    @property
    def shared(self) -> bool:
        """Whether other processes can see the files that are being written."""
        return self._service.scheme != _IN_MEMORY

    def commit(self) -> None:
        """Make all files visible. All threads must have finished writing.

        A replaced checkpoint is deleted first, beginning with its manifest, so that no reader sees a mixture of old and
        new files.

        Raises:
            UsageError: with the code EXISTS if the target appeared in the meantime.
            StorageError: with the code IO if the service fails or does not have all bytes that were sent.
        """
        self.complete()
        self.make_way()
        self.appear()
        self.recheck(())
        self.keep()

    def complete(self) -> None:
        """First step of `commit`, for callers whose checkpoint several ranks upload: send the remaining bytes.

        Raises:
            StorageError: with the code IO if the service fails or refuses.
        """
        for file in self._streams.values():
            file.close()

    def make_way(self) -> None:
        """Second step of `commit`, on one rank only: check the target again, and delete the replaced checkpoint.

        Raises:
            UsageError: with the code EXISTS if the target appeared in the meantime.
            StorageError: with the code IO if the service fails or refuses.
        """
        info = self._service.info(self._service.path, self._shown)
        self._check(info)
        if self._overwrite and not self._single:
            self._delete_old()

    def appear(self) -> None:
        """Third step of `commit`: make the files visible. If the context fails before `keep`, the files are deleted
        again.

        Raises:
            UsageError: with the code EXISTS if a different run has written one of the files since `make_way`, and no
                file may be replaced.
            StorageError: with the code IO if the service fails or does not have all bytes that were sent.
        """
        for name in sorted(self._streams, key=turn):
            self._appear_one(name)

    def _appear_one(self, name: str) -> None:
        file = self._streams[name]
        self._appeared.append(name)  # the file may be visible even if the commit fails
        self._stamps[name] = file.future_tag
        try:
            self._stamps[name] = file.commit(new=not self._overwrite)
        except TransaxleError as error:
            if error.code == "EXISTS":
                self._appeared.remove(name)
            raise
        self._compare(name)

    def recheck(self, other_files: Collection[str] | None = None) -> None:
        """Fourth step of `commit`, when all files are visible: check that this run wrote each file.

        There is no lock, so a different run may have written to the same place meanwhile. Of two runs at one place, the
        run that writes its manifest last finds the files of the other run, and does not delete them.

        Args:
            other_files: names of the files that other ranks write; any unknown file is then refused. None means that
            the names of the files of other ranks are unknown.

        Raises:
            StorageError: with the code IO if the service fails or refuses.
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
        """Return whether a different run has replaced one of this run's visible files."""
        own_stamp, current_stamp = self._stamps.get(name, ""), self._looks([name])[name]
        return bool(own_stamp and current_stamp and own_stamp != current_stamp)

    def _looks(self, names: Sequence[str]) -> dict[str, str]:
        """Return file name -> current version of the file on the service, for each visible file."""
        return {name: _stamp(self._service.info(self._place(name), name)) for name in names}

    @property
    def is_whole(self) -> bool:
        """Whether the manifest, which becomes visible last, is visible; False if the service does not answer the
        request.
        """
        with suppress(TransaxleError):
            return self._service.info(self._place(MANIFEST), MANIFEST) is not None
        return False

    def keep(self) -> None:
        """Last step of `commit`: from this call on, the visible files stay even if the context fails."""
        with suppress(TransaxleError):  # the service may forbid these credentials to list uploads
            self._remove_unanswered()
        self._streams.clear()
        self._appeared.clear()
        self._finish()

    def _remove_unanswered(self) -> None:
        """Remove uploads for which the first request got no response, so that the client began a second upload.

        Raises:
            StorageError: with the code IO if the service fails or refuses.
        """
        uploads = [
            file.beginning for file in self._streams.values() if isinstance(file, StreamedFile) and file.beginning
        ]
        if uploads:
            remove_unanswered_uploads(self._service, uploads)

    def _place(self, name: str) -> str:
        """Return the path of a file of the checkpoint, in the form that the client uses."""
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
        """Check that a checkpoint may be written to the target; only an empty folder or a checkpoint is replaced.

        Args:
            info: what the service reports about the target.
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
        """Return `(reason, hint)` if an existing target must not be replaced; two empty strings if it may be
        replaced.
        """
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
        """Return False, because an `Upload` cannot be resumed, and so no interrupted commit has made a file visible."""
        return False

    def _compare(self, name: str) -> None:
        """Check that the service stores as many bytes as were sent, and reports the ETag that it returned before."""
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
    """Return the ETag of a file, or the time of its creation if it has no ETag; empty if there is no file."""
    return str((info or {}).get("ETag") or (info or {}).get("created") or "").removeprefix("W/").strip('"')


def _replaced_error(file: str) -> TransaxleError:
    message = "another run wrote to the same place at the same time, and this file is not ours any more"
    hint = "What this run wrote is removed. Write again when the other run is over, or to another place."
    return refuse("IO", message, file=file, hint=hint)


def part_size(size: int, part: int = PART) -> int:
    """Return the size in bytes of the parts of a file, such that the file has at most 10,000 parts, as services
    require.

    Args:
        size: size of the file in bytes.
        part: preferred size in bytes of a part.
    """
    least = -(-size // _MAX_PARTS)
    return max(part, -(-least // _GRAIN) * _GRAIN)


def opens(name: str) -> bool:
    """Return whether a file completes a checkpoint, so that it must become visible after all other files."""
    return turn(name)[0] > 1


def turn(name: str) -> tuple[int, str]:
    """Return a sort key for the order in which files become visible: first sidecars (files without tensors), then
    tensor files, indexes, and the manifest.

    The optimizer's state comes before the model, because a model without optimizer state would already be a whole
    checkpoint.
    """
    if name == MANIFEST:
        return 3, name
    if name.startswith(f"{STATE_FOLDER}/"):
        return (1 if opens_checkpoint(name) else 0), name
    if opens_checkpoint(name):
        return 2, name
    return (1 if holds_tensors(name) else 0), name
