"""Files that are being sent to a service, and one that is sent as a client's stream.

A stream takes its bytes from beginning to end. On S3 it has an upload in parts, which is completed by the calls of
`Multipart`: they know what to do where an answer is lost, or where nothing may be replaced.
"""

from __future__ import annotations

from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

from transaxle.errors import TransaxleError
from transaxle.formats.remote.multipart import OpenUpload, S3Multipart, completed_tag
from transaxle.formats.remote.service import S3, Service, Stream

_MOST_EARLY = 64 << 20
"""Cap on the bytes of a file that are kept until their turn."""


class SentFile(Protocol):
    """A file that is being sent, by whatever means."""

    size: int

    def write(self, offset: int, view: memoryview, /) -> None:
        """Take bytes."""

    def close(self) -> None:
        """Send the rest."""

    @property
    def foretold(self) -> str:
        """The tag that the file will have where it is the sum of its bytes; empty where that is not known."""

    def commit(self, *, new: bool) -> str:
        """Let the file appear; see `Multipart.complete` for what is returned."""

    def discard(self) -> None:
        """Abandon the file, unless it has appeared."""


class StreamedFile:
    """One file that is being sent.

    Args:
        service: the service.
        stream: takes its bytes.
        name: for errors.
        size: total bytes.
        part: bytes of every part but the last.
    """

    def __init__(self, service: Service, stream: Stream, name: str, size: int, part: int) -> None:
        self.size = size
        self._service = service
        self._stream: Stream | None = stream
        self._name = name
        self._part = part
        self._sent = 0
        self._copied = 0
        self._early: dict[int, memoryview] = {}
        self.beginning: OpenUpload | None = None
        """The upload that is over, if it was one in parts."""

    def write(self, offset: int, view: memoryview) -> None:
        """Send bytes if it is their turn, else keep them until it is."""
        octets = view.cast("B")
        if offset < self._sent or offset + octets.nbytes > self.size:
            message = (
                f"{self._name}: bytes {offset} to {offset + octets.nbytes} of {self.size} are out of order; "
                f"{self._sent} were sent"
            )
            raise ValueError(message)
        if offset > self._sent:
            self._keep(offset, octets)
            return
        self._send(octets)
        while self._sent in self._early:
            self._send(self._early.pop(self._sent))
        if self._sent == self.size:
            self.close()

    def _keep(self, offset: int, octets: memoryview) -> None:
        if not octets.readonly:
            self._copied += octets.nbytes
            if self._copied > _MOST_EARLY:
                raise ValueError(f"{self._name}: bytes at {offset} come too early; {self._sent} were sent")
            octets = memoryview(bytes(octets))
        self._early[offset] = octets

    def _send(self, octets: memoryview) -> None:
        sent = 0
        while sent < octets.nbytes:
            # Up to the end of a part and no further: some services want all parts but the last to be of one length.
            count = min(octets.nbytes - sent, self._part - self._sent % self._part)
            with self._service.working(f"sending {count} bytes at offset {self._sent}", self._name):
                self._open.write(octets[sent : sent + count])
            sent += count
            self._sent += count

    @property
    def _open(self) -> Stream:
        if self._stream is None:
            raise ValueError(f"{self._name}: this file was abandoned, or is already complete")
        return self._stream

    def close(self) -> None:
        """Send the rest; does nothing if all was sent."""
        if self._sent != self.size:
            raise ValueError(f"{self._name}: only {self._sent} of {self.size} bytes were written")
        with self._service.working("sending the last part", self._name):
            self._open.close()

    @property
    def foretold(self) -> str:
        """See `SentFile`."""
        tags = _tags_of(self._stream)
        return completed_tag(tags) or "" if tags else ""

    def commit(self, *, new: bool) -> str:
        """Let the file appear; where the answer is lost, what is there tells whether it has."""
        tag = _complete(self._service, self._open, self._name, new=new)
        if tag is None:
            with self._service.working("completing the upload", self._name):
                self._open.commit()
        self._over(self._open)
        return tag or ""

    def discard(self) -> None:
        """Abandon the file, unless it has appeared; errors of the service no longer matter."""
        if self._stream is None:
            return
        stream = self._stream
        self._over(stream)
        with suppress(TransaxleError), self._service.working("abandoning the upload", self._name):
            try:
                stream.discard()
            finally:
                stream.closed = True  # else it would be sent when it is collected as garbage
        self._early.clear()

    def _over(self, stream: Stream) -> None:
        self.beginning, self._stream = _begun_by(self._service, stream), None


def _complete(service: Service, stream: Any, file: str, *, new: bool) -> str | None:
    """Let the file of a client's own stream appear.

    Args:
        service: it.
        stream: of fsspec, all of whose bytes were sent.
        file: its name, for errors.
        new: only where there is no file.

    Returns:
        As `Multipart.complete`; None where the stream must do it.

    Raises:
        UsageError: EXISTS, where `new`.
        StorageError: IO.
    """
    upload = getattr(stream, "mpu", None)
    if service.scheme not in S3 or not upload:
        return None
    calls, path = S3Multipart(service), str(stream.path)
    if tags := _tags_of(stream):
        return calls.complete(path, str(upload["UploadId"]), tags, file, new=new)
    calls.abort(path, str(upload["UploadId"]), file)  # an upload has at least one part
    return calls.put(path, b"", file, new=new)


def _tags_of(stream: Any) -> list[str]:
    """Return the tags of the parts that a client's own stream has sent."""
    return [str(part["ETag"]).strip('"') for part in getattr(stream, "parts", None) or ()]


def _begun_by(service: Service, stream: Any) -> OpenUpload | None:
    """Return the upload that a client's own stream has begun; None where it is no such upload.

    Args:
        service: it.
        stream: of fsspec, neither committed nor discarded, or just committed.
    """
    upload = getattr(stream, "mpu", None)
    if service.scheme not in S3 or not upload:
        return None
    date = upload.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    return OpenUpload(str(stream.path), str(upload["UploadId"]), str(date and parsedate_to_datetime(date)))
