"""Multipart uploads as calls: a file that several processes send, and that appears when one of them completes it.

The client's own streams belong to one process. Here the upload is a text that any process can go on with. The requests
are made by the same client (s3fs), with its credentials and endpoints. It tries again what failed on the way (errors of
the server, connections that broke, answers that were cut off), with growing pauses; each of our attempts ends after a
time that grows with the bytes, since the client waits for ever for a server that takes no more of them.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transaxle.errors import TransaxleError, refuse
from transaxle.formats.remote.service import Service

PATIENCE = 120.0
"""Seconds of one attempt at a request, beside those for its bytes."""
SLOWEST = 1 << 20
"""Bytes a second below which a connection counts as stalled."""
_TRIES = 3
_PAUSE = 1.0
S3 = frozenset({"s3", "s3a"})
"""Schemes of services with uploads that several processes can send."""
_MD5 = re.compile(r"[0-9a-f]{32}")
_TYPE = "application/octet-stream"


@dataclass(frozen=True)
class StoredPart:
    """A part that the service has."""

    etag: str
    """Its tag, without quotation marks."""
    size: int
    """Its bytes."""

    def is_of(self, data: Buffer) -> bool:
        """Tell whether its tag says that it has these bytes; tags that are no MD5 sums say nothing."""
        return self.size == len(data) and self.etag == hashlib.md5(data, usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class OpenUpload:
    """An upload that was neither completed nor aborted."""

    path: str
    """What the client calls the file."""
    upload: str
    """The upload."""
    since: str
    """When it began, as the service says it."""


Buffer = bytes | bytearray
"""Bytes of a part."""


class Multipart(Protocol):
    """The calls of a service whose files can be sent in parts by several processes.

    All take the client's name for a file, and its name for errors. All raise StorageError: IO.
    """

    def begin_upload(self, path: str, file: str) -> str:
        """Begin an upload of a file; return what names it."""

    def send_part(self, path: str, upload: str, number: int, data: Buffer, file: str) -> str:
        """Send a part, which replaces an earlier one of its number; return its tag."""

    def stored_parts(self, path: str, upload: str, file: str) -> dict[int, StoredPart] | None:
        """Return the parts that are there, by number; None where there is no such upload any more."""

    def complete(self, path: str, upload: str, tags: Sequence[str], file: str) -> None:
        """Let the file appear, made of all parts; refused by the service where one has another tag."""

    def abort(self, path: str, upload: str, file: str) -> None:
        """Remove an upload and its parts; a missing one is no error."""

    def list_uploads(self, path: str, file: str) -> Iterator[OpenUpload]:
        """Yield the uploads of a file, or of the files of a folder."""

    def put(self, path: str, data: bytes, file: str) -> None:
        """Store a small file in one step."""

    def get(self, path: str, file: str) -> bytes | None:
        """Return a small file; None where it is missing."""


def multipart(service: Service) -> Multipart:
    """Return the calls of a service.

    Raises:
        Refused: UNSUPPORTED for one whose uploads belong to one process.
    """
    if service.scheme not in S3:
        message = f"several workers cannot write to a service like {service.scheme}://, only to s3://"
        hint = "Convert to a folder that all workers see, and upload that; or convert in one process, without --on."
        raise refuse("UNSUPPORTED", message, file=service.shown, hint=hint)
    return S3Multipart(service)


def completed_tag(tags: Sequence[str]) -> str | None:
    """Return the tag of a file made of parts with these tags; None where they are not MD5 sums, as with some keys."""
    if not all(_MD5.fullmatch(tag) for tag in tags):
        return None
    return f"{hashlib.md5(b''.join(map(bytes.fromhex, tags)), usedforsecurity=False).hexdigest()}-{len(tags)}"


class S3Multipart:
    """The calls of S3 and of what speaks like it.

    Args:
        service: it.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def begin_upload(self, path: str, file: str) -> str:
        """See `Multipart`."""
        doing = "beginning the upload"
        with self._service.working(doing, file):
            answer = self._call("create_multipart_upload", doing, file, {**self._of(path), "ContentType": _TYPE})
        return str(answer["UploadId"])

    def send_part(self, path: str, upload: str, number: int, data: Buffer, file: str) -> str:
        """See `Multipart`."""
        try:
            which = {**self._of(path), "UploadId": upload, "PartNumber": number}
            what = {"Body": bytes(data), "ContentLength": len(data)}
            answer = self._call("upload_part", f"sending part {number}", file, which | what, len(data))
        except FileNotFoundError:
            raise gone(file) from None
        return str(answer["ETag"]).strip('"')

    def stored_parts(self, path: str, upload: str, file: str) -> dict[int, StoredPart] | None:
        """See `Multipart`."""
        found: dict[int, StoredPart] = {}
        marker: dict[str, Any] = {}
        while True:
            try:
                asked = {**self._of(path), "UploadId": upload, **marker}
                answer = self._call("list_parts", "listing the parts", file, asked)
            except FileNotFoundError:
                return None
            for each in answer.get("Parts", ()):
                found[int(each["PartNumber"])] = StoredPart(str(each["ETag"]).strip('"'), int(each["Size"]))
            if not answer.get("IsTruncated"):
                return found
            marker = {"PartNumberMarker": answer["NextPartNumberMarker"]}

    def complete(self, path: str, upload: str, tags: Sequence[str], file: str) -> None:
        """See `Multipart`; where the answer was lost, the file that is there tells that it was completed."""
        parts = [{"PartNumber": number, "ETag": f'"{tag}"'} for number, tag in enumerate(tags, 1)]
        try:
            asked = {**self._of(path), "UploadId": upload, "MultipartUpload": {"Parts": parts}}
            self._call("complete_multipart_upload", "completing the upload", file, asked)
        except FileNotFoundError:
            info = self._service.info(path, file)
            if info is None or not (tag := completed_tag(tags)) or str(info.get("ETag", "")).strip('"') != tag:
                raise gone(file) from None

    def abort(self, path: str, upload: str, file: str) -> None:
        """See `Multipart`."""
        try:
            asked = {**self._of(path), "UploadId": upload}
            self._call("abort_multipart_upload", "abandoning the upload", file, asked)
        except FileNotFoundError:
            return

    def list_uploads(self, path: str, file: str) -> Iterator[OpenUpload]:
        """See `Multipart`."""
        bucket, _, key = path.partition("/")
        marker: dict[str, Any] = {}
        while True:
            asked = {"Bucket": bucket, "Prefix": key, **marker}
            try:
                answer = self._call("list_multipart_uploads", "listing the uploads", file, asked)
            except FileNotFoundError:
                return
            for each in answer.get("Uploads", ()):
                if not key or each["Key"] == key or each["Key"].startswith(f"{key}/"):
                    yield OpenUpload(f"{bucket}/{each['Key']}", each["UploadId"], str(each.get("Initiated", "")))
            if not answer.get("IsTruncated"):
                return
            marker = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def put(self, path: str, data: bytes, file: str) -> None:
        """See `Multipart`."""
        with self._service.working("writing it", file):
            what = {"Body": data, "ContentType": _TYPE}
            self._call("put_object", "writing it", file, self._of(path) | what, len(data))

    def get(self, path: str, file: str) -> bytes | None:
        """See `Multipart`."""
        try:
            with self._service.working("reading it", file, missing=True):
                return bytes(self._service.client.cat_file(path))
        except FileNotFoundError:
            return None

    def _of(self, path: str) -> dict[str, Any]:
        bucket, _, key = path.partition("/")
        return {"Bucket": bucket, "Key": key}

    def _call(self, method: str, doing: str, file: str, options: dict[str, Any], size: int = 0) -> Any:
        """Make one request; a missing upload is a FileNotFoundError, everything else that fails a StorageError."""
        from fsspec.asyn import sync
        from fsspec.exceptions import FSTimeoutError

        client: Any = self._service.client
        limit = PATIENCE + size / SLOWEST
        with self._service.working(doing, file, missing=True):
            for number in range(1, _TRIES + 1):
                try:
                    return sync(client.loop, client._call_s3, method, timeout=limit, **options)
                except FSTimeoutError:
                    if number == _TRIES:
                        raise _stalled(doing, file, limit) from None
                    time.sleep(_PAUSE * number)
        raise AssertionError  # pragma: no cover - the loop returns or raises


def _stalled(doing: str, file: str, limit: float) -> TransaxleError:
    message = f"{doing}: the service did not answer within {limit:.0f} seconds, {_TRIES} times"
    return refuse("IO", message, file=file, hint="Try again when it does; with --resume what was sent is kept.")


def gone(file: str) -> TransaxleError:
    """Return the error for an upload that somebody has removed."""
    message = "the upload is gone: another run, transaxle clean or a rule of the bucket has removed it"
    return refuse("IO", message, file=file, hint="Begin again.")
