"""Multipart uploads as calls: a file that several processes send, and that appears when one of them completes it.

The client's own streams belong to one process. Here the upload is a text that any process can go on with. The requests
are made by the same client (s3fs), with its credentials and endpoints. It tries again what failed on the way (errors of
the server, connections that broke, answers that were cut off), with growing pauses; each of our attempts ends after a
time that grows with the bytes, since the client waits for ever for a server that takes no more of them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

import msgspec

from transaxle.errors import TransaxleError, refuse
from transaxle.formats.remote.service import NO_CREDENTIALS, S3, Service

PATIENCE = 120.0
"""Seconds of one attempt at a request, beside those for its bytes."""
SLOWEST = 1 << 20
"""Bytes a second below which a connection counts as stalled."""
COMPLETION = 600.0
"""Seconds that a service may take to put a file together from its parts: S3 takes minutes for large ones."""
_TRIES = 3
_PAUSE = 1.0
_LONGEST_PAUSE = 15.0
_LOOKS = 6
"""How often an upload is looked for that is gone, until its file counts as missing."""
_CONFLICT, _SERVER_ERROR = 409, 500
_MD5 = re.compile(r"[0-9a-f]{32}")
_TYPE = "application/octet-stream"
_COMPLETING = "completing the upload"
_LATER = "Try again when it does; with --resume what was sent is kept."


class StoredPart(msgspec.Struct, frozen=True):
    """A part that the service has."""

    etag: str
    """Its tag, without quotation marks."""
    size: int
    """Its bytes."""

    def is_of(self, data: Buffer) -> bool:
        """Tell whether its tag says that it has these bytes; tags that are no MD5 sums say nothing."""
        return self.size == len(data) and self.etag == _md5(data)


class OpenUpload(msgspec.Struct, frozen=True):
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
    return f"{_md5(b''.join(map(bytes.fromhex, tags)))}-{len(tags)}"


def _md5(data: Buffer) -> str:
    import hashlib  # with OpenSSL, which only services need

    return hashlib.md5(data, usedforsecurity=False).hexdigest()


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
        """See `Multipart`; an answer that is lost, late or an error of the server says nothing.

        The service may have completed the upload, or be at it, and refuse while it is. So each time we look whether the
        file is there, as what its tag says, and ask again until `COMPLETION` is over, or the service does not even tell
        what is there.
        """
        parts = [{"PartNumber": number, "ETag": f'"{tag}"'} for number, tag in enumerate(tags, 1)]
        asked = {**self._of(path), "UploadId": upload, "MultipartUpload": {"Parts": parts}}
        before = "" if completed_tag(tags) else self._tag_of(path, file)
        end, pause, missed, is_lost = time.monotonic() + COMPLETION, _PAUSE, 0, False
        while True:
            try:
                self._ask("complete_multipart_upload", asked, PATIENCE)
            except Exception as error:  # noqa: BLE001 - what clients raise has no common base
                failure = error
            else:
                return
            try:
                if _is_made_of(tags, self._tag_of(path, file), before):
                    return
                missed += isinstance(failure, FileNotFoundError) or self.stored_parts(path, upload, file) is None
            except TransaxleError:  # after all attempts that the client makes itself
                is_lost = True
            if missed == _LOOKS:
                raise gone(file)
            if is_lost or not (isinstance(failure, FileNotFoundError) or _is_open(failure)):
                with self._service.working(_COMPLETING, file):
                    raise failure
            if time.monotonic() + pause > end:
                raise _incomplete(file)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _tag_of(self, path: str, file: str) -> str:
        """Return the tag of a file; empty where there is none."""
        return str((self._service.info(path, file) or {}).get("ETag", "")).strip('"')

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
        from fsspec.exceptions import FSTimeoutError

        limit = PATIENCE + size / SLOWEST
        with self._service.working(doing, file, missing=True):
            for number in range(1, _TRIES + 1):
                try:
                    return self._ask(method, options, limit)
                except FSTimeoutError:
                    if number == _TRIES:
                        raise _stalled(doing, file, limit) from None
                    time.sleep(_PAUSE * number)
        raise AssertionError  # pragma: no cover - the loop returns or raises

    def _ask(self, method: str, options: dict[str, Any], limit: float) -> Any:
        """Make one request of the client, which may take so many seconds; raises what the client does."""
        from fsspec.asyn import sync

        client: Any = self._service.client
        return sync(client.loop, client._call_s3, method, timeout=limit, **options)


def complete_stream(service: Service, stream: Any, file: str) -> bool:
    """Complete the upload of a client's own stream whose commit has failed, unless the service has completed it.

    Args:
        service: it.
        stream: of fsspec.
        file: its name, for errors.

    Returns:
        False where it is no such upload, or one of a single step.

    Raises:
        StorageError: IO.
    """
    upload, parts = getattr(stream, "mpu", None), getattr(stream, "parts", None)
    if service.scheme not in S3 or not upload or not parts:
        return False
    tags = [str(part["ETag"]).strip('"') for part in parts]
    S3Multipart(service).complete(str(stream.path), str(upload["UploadId"]), tags, file)
    return True


def begun_by(service: Service, stream: Any) -> OpenUpload | None:
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


def abort_empty(calls: Multipart, upload: OpenUpload, file: str) -> None:
    """Remove an upload, unless it has parts, or is gone.

    Raises:
        StorageError: IO.
    """
    if calls.stored_parts(upload.path, upload.upload, file) == {}:
        calls.abort(upload.path, upload.upload, file)


def _is_made_of(tags: Sequence[str], tag: str, before: str) -> bool:
    """Tell whether a file is that of an upload.

    Args:
        tags: of the upload's parts.
        tag: of the file; empty where there is none.
        before: what it was before the upload was to be completed, needed where no tag can be foretold.
    """
    expected = completed_tag(tags)
    return tag == expected if expected else tag != before and tag.endswith(f"-{len(tags)}")


def _is_open(error: Exception) -> bool:
    """Tell whether a request may have been carried out, or will be: there was no answer, or no final one."""
    answer = getattr(error.__cause__ or error, "response", None)
    if not isinstance(answer, dict):
        return not isinstance(error, PermissionError) and type(error).__name__ not in NO_CREDENTIALS
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", _SERVER_ERROR)
    return bool(status == _CONFLICT or status >= _SERVER_ERROR)


def _incomplete(file: str) -> TransaxleError:
    message = f"{_COMPLETING}: the service has not put the file together within {COMPLETION:.0f} seconds"
    return refuse("IO", message, file=file, hint=_LATER)


def _stalled(doing: str, file: str, limit: float) -> TransaxleError:
    message = f"{doing}: the service did not answer within {limit:.0f} seconds, {_TRIES} times"
    return refuse("IO", message, file=file, hint=_LATER)


def gone(file: str) -> TransaxleError:
    """Return the error for an upload that somebody has removed."""
    message = "the upload is gone: another run, transaxle clean or a rule of the bucket has removed it"
    return refuse("IO", message, file=file, hint="Begin again.")
