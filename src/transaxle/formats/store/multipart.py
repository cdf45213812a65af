"""Multipart uploads to S3: several processes can send parts of one file, and one process completes the file.

An upload stream of the client library (s3fs) belongs to one process; in this module an upload is an id that any process
can use. The requests go through the client library's client, with its credentials and endpoints. The client retries
temporary failures (errors of the server, broken connections, truncated responses) with growing pauses. Each attempt
that this module makes has a time limit that grows with the number of bytes, because the client would wait forever for a
server that accepts no more bytes. If no existing file may be replaced, requests are conditional on the file's absence
(`If-None-Match`), so that of two runs with the same target the second run is refused. A conditional request may also be
refused when it is repeated because the response to the first attempt was lost. If a repeated request is refused, the
file counts as written by this run if this run's upload is over, or if the file has the request's random mark.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from transaxle.errors import TransaxleError, refuse
from transaxle.formats.store.service import NO_CREDENTIALS, S3, Service

PATIENCE = 120.0
"""Time limit in seconds for one attempt at a request, not counting the transfer of bytes."""
SLOWEST = 1 << 20
"""Transfer rate in bytes per second below which a connection counts as stalled."""
COMPLETION = 600.0
"""Time limit in seconds for a service to assemble a file from its parts; S3 needs minutes for large files."""
_TRIES = 3
_PAUSE = 1.0
_LONGEST_PAUSE = 15.0
_MAX_CHECKS = 6
"""Number of times to look for the file of an upload that the service no longer knows, before the file is reported
missing."""
_CONFLICT, _TAKEN, _SERVER_ERROR, _UNKNOWN = 409, 412, 500, 501
_UNKNOWN_CODES = frozenset({"NotImplemented", "InvalidArgument", "InvalidRequest"})
"""Error codes of services that do not support conditional requests (`If-None-Match`)."""
_CONDITION = {"IfNoneMatch": "*"}
_MARK = "transaxle-mark"
"""Metadata key of the random mark of a file that was stored by a conditional request; the mark distinguishes the file
from files of other runs."""
_MD5 = re.compile(r"[0-9a-f]{32}")
_TYPE = "application/octet-stream"
_COMPLETING = "completing the upload"
_LATER = "Try again later; with --resume, the bytes that were sent are kept."


class StoredPart(msgspec.Struct, frozen=True):
    """A part of an upload that the service has already stored."""

    etag: str
    """ETag of the part, without quotation marks."""
    size: int
    """Size of the part in bytes."""

    def is_of(self, data: Buffer) -> bool:
        """Return whether the stored part certainly consists of the given bytes; False if the part's ETag is not their
        MD5 sum.
        """
        return self.size == len(data) and self.etag == _md5(data)


class OpenUpload(msgspec.Struct, frozen=True):
    """A multipart upload that was neither completed nor aborted."""

    path: str
    """Path of the uploaded file, in the form that the client uses."""
    upload: str
    """Id of the upload."""
    since: str
    """Time at which the upload began, as the service reports it; may be empty."""


Buffer = bytes | bytearray
"""Type of the bytes of a part."""


def multipart(service: Service) -> S3Multipart:
    """Return an object with a service's calls for multipart uploads.

    Raises:
        Refused: with the code UNSUPPORTED for a service on which an upload belongs to one process.
    """
    if service.scheme not in S3:
        message = f"several workers cannot write to a service like {service.scheme}://, only to s3://"
        hint = "Convert to a folder that all workers see, and upload that; or convert in one process, without --on."
        raise refuse("UNSUPPORTED", message, file=service.shown, hint=hint)
    return S3Multipart(service)


def expected_tag(tags: Sequence[str]) -> str | None:
    """Compute a file's ETag from the ETags of its parts; None if the parts' ETags are not MD5 sums, as with some
    encryption keys.
    """
    if not all(_MD5.fullmatch(tag) for tag in tags):
        return None
    return f"{_md5(b''.join(map(bytes.fromhex, tags)))}-{len(tags)}"


def _md5(data: Buffer) -> str:
    import hashlib  # hashlib is imported late, because it loads OpenSSL, which only remote services need

    return hashlib.md5(data, usedforsecurity=False).hexdigest()


class S3Multipart:
    """Calls for multipart uploads to S3 and compatible services.

    Each call takes a file's path in the form that the client uses, and the file's name for error messages. Each call
    raises StorageError with the code IO if the service fails or refuses.

    Args:
        service: the storage service to which requests are sent.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._knows_conditions = True

    def begin_upload(self, path: str, file: str) -> str:
        """Begin the upload of a file, and return the id of the upload."""
        doing = "beginning the upload"
        with self._service.as_storage_error(doing, file):
            answer = self._call("create_multipart_upload", doing, file, {**self._of(path), "ContentType": _TYPE})
        return str(answer["UploadId"])

    def send_part(self, path: str, upload: str, number: int, data: Buffer, file: str) -> str:
        """Send a part of an upload, which replaces an earlier part of the same number; return the part's ETag."""
        try:
            part = {**self._of(path), "UploadId": upload, "PartNumber": number}
            body = {"Body": bytes(data), "ContentLength": len(data)}
            answer = self._call("upload_part", f"sending part {number}", file, part | body, len(data))
        except FileNotFoundError:
            raise missing_upload(file) from None
        return str(answer["ETag"]).strip('"')

    def list_parts(self, path: str, upload: str, file: str) -> dict[int, StoredPart] | None:
        """Return number -> stored part, for the parts of an upload; None if the upload no longer exists."""
        parts: dict[int, StoredPart] = {}
        marker: dict[str, Any] = {}
        while True:
            try:
                options = {**self._of(path), "UploadId": upload, **marker}
                answer = self._call("list_parts", "listing the parts", file, options)
            except FileNotFoundError:
                return None
            for part in answer.get("Parts", ()):
                parts[int(part["PartNumber"])] = StoredPart(str(part["ETag"]).strip('"'), int(part["Size"]))
            if not answer.get("IsTruncated"):
                return parts
            marker = {"PartNumberMarker": answer["NextPartNumberMarker"]}

    def complete(self, path: str, upload: str, tags: Sequence[str], file: str, *, new: bool = False) -> str:
        """Complete an upload, so that its file appears; the service refuses parts whose ETags differ.

        After a lost or late response, or an error of the server, it is unknown whether the request succeeded: the
        service may have completed the upload, or may still be completing it and refuse requests meanwhile. After each
        attempt this function therefore checks the file's ETag, and retries until the time limit `COMPLETION`, or until
        the service does not even answer the check.

        Args:
            path: path of the file, in the form that the client uses.
            upload: id of the upload to complete.
            tags: ETags of the parts, in the order of the parts.
            file: name of the file, for error messages.
            new: whether to fail if the file exists; on services without conditional requests, the absence of the file
                is checked beforehand.

        Returns:
            The file's ETag, if it can be computed from the ETags of the parts; otherwise an empty string.

        Raises:
            UsageError: with the code EXISTS if `new` is set and the file exists.
        """
        parts = [{"PartNumber": number, "ETag": f'"{tag}"'} for number, tag in enumerate(tags, 1)]
        options = {**self._of(path), "UploadId": upload, "MultipartUpload": {"Parts": parts}}
        before = "" if new else _tag(self._head(path, file))
        ask = self._new(path, file) if new else self._ask
        end, pause, missed, is_lost = time.monotonic() + COMPLETION, _PAUSE, 0, False
        while True:
            try:
                return _confirm_tag(expected_tag(tags), ask("complete_multipart_upload", options, PATIENCE))
            except Exception as error:  # noqa: BLE001 - what clients raise has no common base
                failure = error
            try:
                current, is_over = self._head(path, file), not self.list_parts(path, upload, file)
                if _is_made_of(tags, current, before) and (is_over or not new):
                    return _confirm_tag(expected_tag(tags), current)
                missed += isinstance(failure, FileNotFoundError) or is_over
            except TransaxleError:  # the client raises this exception only after all of its own attempts
                is_lost = True
            if isinstance(failure, TransaxleError):
                raise failure
            if missed == _MAX_CHECKS:
                raise missing_upload(file)
            if is_lost or not (isinstance(failure, FileNotFoundError) or _is_open(failure)):
                with self._service.as_storage_error(_COMPLETING, file):
                    raise failure
            if time.monotonic() + pause > end:
                raise _incomplete(file)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _head(self, path: str, file: str) -> dict[str, Any]:
        """Return the service's metadata of a file; an empty dict if the file does not exist."""
        try:
            return dict(self._call("head_object", "reading its status", file, self._of(path)))
        except FileNotFoundError:
            return {}

    def _new(self, path: str, file: str) -> Callable[[str, dict[str, Any], float], Any]:
        """Return a variant of `_ask` for a request that creates a file and must fail if the file exists."""

        def ask(method: str, options: dict[str, Any], limit: float) -> Any:
            if self._knows_conditions:
                try:
                    return self._ask(method, options | _CONDITION, limit)
                except OSError as error:
                    status, code = _answer(error)
                    if status == _TAKEN or code == "PreconditionFailed":
                        raise _exists_error(file) from None
                    if status != _UNKNOWN and code not in _UNKNOWN_CODES:
                        raise
                    self._knows_conditions = False
            if self._head(path, file):
                raise _exists_error(file)
            return self._ask(method, options, limit)

        return ask

    def abort(self, path: str, upload: str, file: str) -> None:
        """Abort an upload and delete its parts; a missing upload is not an error."""
        try:
            options = {**self._of(path), "UploadId": upload}
            self._call("abort_multipart_upload", "abandoning the upload", file, options)
        except FileNotFoundError:
            return

    def list_uploads(self, path: str, file: str) -> Iterator[OpenUpload]:
        """Yield the open uploads of one file, or of the files in one folder."""
        bucket, _, key = path.partition("/")
        marker: dict[str, Any] = {}
        while True:
            options = {"Bucket": bucket, "Prefix": key, **marker}
            try:
                answer = self._call("list_multipart_uploads", "listing the uploads", file, options)
            except FileNotFoundError:
                return
            for upload in answer.get("Uploads", ()):
                if not key or upload["Key"] == key or upload["Key"].startswith(f"{key}/"):
                    yield OpenUpload(f"{bucket}/{upload['Key']}", upload["UploadId"], str(upload.get("Initiated", "")))
            if not answer.get("IsTruncated"):
                return
            marker = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def put(self, path: str, data: bytes, file: str, *, new: bool = False) -> str:
        """Store a small file by one request; `new`, the result and the errors are those of `complete`."""
        options = {**self._of(path), "Body": data, "ContentType": _TYPE}
        mark = {_MARK: os.urandom(8).hex()} if new else {}
        ask = self._new(path, file) if new else self._ask
        try:
            with self._service.as_storage_error("writing it", file):
                answer = self._call("put_object", "writing it", file, options | {"Metadata": mark}, len(data), ask)
        except TransaxleError as error:
            if error.code != "EXISTS":
                raise
            answer = self._head(path, file)
            if not answer.get("Metadata", {}).items() >= mark.items():
                raise
        return _confirm_tag(_md5(data), answer)

    def get(self, path: str, file: str) -> bytes | None:
        """Return the content of a small file; None if the file does not exist."""
        try:
            with self._service.as_storage_error("reading it", file, missing=True):
                return bytes(self._service.client.cat_file(path))
        except FileNotFoundError:
            return None

    def _of(self, path: str) -> dict[str, Any]:
        bucket, _, key = path.partition("/")
        return {"Bucket": bucket, "Key": key}

    def _call(
        self,
        method: str,
        doing: str,
        file: str,
        options: dict[str, Any],
        size: int = 0,
        ask: Callable[[str, dict[str, Any], float], Any] | None = None,
    ) -> Any:
        """Make one request with retries; raise FileNotFoundError for a missing upload, and StorageError for any other
        failure.
        """
        from fsspec.exceptions import FSTimeoutError

        limit = PATIENCE + size / SLOWEST
        with self._service.as_storage_error(doing, file, missing=True):
            for number in range(1, _TRIES + 1):
                try:
                    return (ask or self._ask)(method, options, limit)
                except FSTimeoutError:
                    if number == _TRIES:
                        raise _timeout_error(doing, file, limit) from None
                except OSError as error:
                    if number == _TRIES or _answer(error)[0] != _CONFLICT:
                        raise
                time.sleep(_PAUSE * number)
        raise AssertionError  # pragma: no cover - the loop returns or raises

    def _ask(self, method: str, options: dict[str, Any], limit: float) -> Any:
        """Make one request with a time limit in seconds; raise the client's exceptions."""
        from fsspec.asyn import sync

        client: Any = self._service.client
        return sync(client.loop, client._call_s3, method, timeout=limit, **options)


def abort_empty(calls: S3Multipart, upload: OpenUpload, file: str) -> None:
    """Abort an upload, unless the upload has stored parts or no longer exists.

    Raises:
        StorageError: with the code IO if the service fails or refuses.
    """
    if calls.list_parts(upload.path, upload.upload, file) == {}:
        calls.abort(upload.path, upload.upload, file)


def _tag(answer: dict[str, Any]) -> str:
    """Return the ETag in a response; empty if the response contains none."""
    return str(answer.get("ETag", "")).removeprefix("W/").strip('"')


def _confirm_tag(tag: str | None, answer: dict[str, Any]) -> str:
    """Return the expected ETag if the response contains it; otherwise an empty string."""
    return tag if tag and tag == _tag(answer) else ""


def _is_made_of(tags: Sequence[str], current: dict[str, Any], before: str) -> bool:
    """Return whether a file is the result of a given upload.

    Args:
        tags: ETags of the upload's parts.
        current: the file's current metadata on the service.
        before: ETag of the file before the upload was completed, which is needed if the file's new ETag cannot be
            computed.
    """
    is_own_key = current.get("SSECustomerAlgorithm") or str(current.get("ServerSideEncryption", "")).startswith(
        "aws:kms"
    )
    # the ETags of parts encrypted with one's own key only look like MD5 sums
    expected = None if is_own_key else expected_tag(tags)
    tag = _tag(current)
    return tag == expected if expected else tag != before and tag.endswith(f"-{len(tags)}")


def _answer(error: BaseException) -> tuple[int, str]:
    """Return the response status and the error code that a client's exception contains; the status is 0 if there was no
    response.
    """
    answer = getattr(error.__cause__ or error, "response", None)
    if not isinstance(answer, dict):
        return 0, ""
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", _SERVER_ERROR)
    return int(status), str(answer.get("Error", {}).get("Code", ""))


def _is_open(error: Exception) -> bool:
    """Return whether a failed request may still have an effect, because it had no response or only a
    provisional one.
    """
    status, _ = _answer(error)
    if not status:
        return not isinstance(error, PermissionError) and type(error).__name__ not in NO_CREDENTIALS
    return status == _CONFLICT or status >= _SERVER_ERROR


def _exists_error(file: str) -> TransaxleError:
    message = "another run has put this file here since this one looked; it is left as it is"
    hint = "Choose another place, or replace what is there:  --overwrite (overwrite=True)."
    return refuse("EXISTS", message, file=file, hint=hint)


def _incomplete(file: str) -> TransaxleError:
    message = f"{_COMPLETING}: the service has not put the file together within {COMPLETION:.0f} seconds"
    return refuse("IO", message, file=file, hint=_LATER)


def _timeout_error(doing: str, file: str, limit: float) -> TransaxleError:
    message = f"{doing}: the service did not answer within {limit:.0f} seconds, {_TRIES} times"
    return refuse("IO", message, file=file, hint=_LATER)


def missing_upload(file: str) -> TransaxleError:
    """Return the error for an upload that no longer exists."""
    message = "the upload is gone: another run, transaxle clean or a rule of the bucket has removed it"
    return refuse("IO", message, file=file, hint="Begin again.")
