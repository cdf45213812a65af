"""S3Multipart uploads as calls: a file that several processes send, and that appears when one of them completes it.

The client's own streams belong to one process. Here the upload is a text that any process can go on with. The requests
are made by the same client (s3fs), with its credentials and endpoints. It tries again what failed on the way (errors of
the server, connections that broke, answers that were cut off), with growing pauses; each of our attempts ends after a
time that grows with the bytes, since the client waits for ever for a server that takes no more of them.

Where nothing may be replaced, the service is asked to let a file appear only where there is none (`If-None-Match`), so
that of two runs at one place the second is refused. A refusal may also be the second answer to a request whose first
one was lost. Then the file is our own if its upload is over, or if it has the mark of this request.
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
_CONFLICT, _TAKEN, _SERVER_ERROR, _UNKNOWN = 409, 412, 500, 501
_UNKNOWN_CODES = frozenset({"NotImplemented", "InvalidArgument", "InvalidRequest"})
"""What services answer that know no conditions, beside the status."""
_CONDITION = {"IfNoneMatch": "*"}
_MARK = "transaxle-mark"
"""Metadata of a file that was stored in one step, and only where there was none: tells it from equal ones of others."""
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


def multipart(service: Service) -> S3Multipart:
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
    """The calls of S3, and of what speaks like it, whose files can be sent in parts by several processes.

    All take the client's name for a file, and its name for errors. All raise StorageError: IO.

    Args:
        service: it.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._knows_conditions = True

    def begin_upload(self, path: str, file: str) -> str:
        """Begin an upload of a file; return what names it."""
        doing = "beginning the upload"
        with self._service.working(doing, file):
            answer = self._call("create_multipart_upload", doing, file, {**self._of(path), "ContentType": _TYPE})
        return str(answer["UploadId"])

    def send_part(self, path: str, upload: str, number: int, data: Buffer, file: str) -> str:
        """Send a part, which replaces an earlier one of its number; return its tag."""
        try:
            which = {**self._of(path), "UploadId": upload, "PartNumber": number}
            what = {"Body": bytes(data), "ContentLength": len(data)}
            answer = self._call("upload_part", f"sending part {number}", file, which | what, len(data))
        except FileNotFoundError:
            raise gone(file) from None
        return str(answer["ETag"]).strip('"')

    def stored_parts(self, path: str, upload: str, file: str) -> dict[int, StoredPart] | None:
        """Return the parts that are there, by number; None where there is no such upload any more."""
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

    def complete(self, path: str, upload: str, tags: Sequence[str], file: str, *, new: bool = False) -> str:
        """Let the file appear, made of all parts; refused by the service where one has another tag.

        An answer that is lost, late or an error of the server says nothing. The service may have completed the upload,
        or be at it, and refuse while it is. So each time we look whether the file is there, as what its tag says, and
        ask again until `COMPLETION` is over, or the service does not even tell what is there.

        Args:
            path: what the client calls the file.
            upload: of it.
            tags: of its parts, in order.
            file: its name, for errors.
            new: only where there is no file; a service that knows no conditions is asked before.

        Returns:
            The file's tag, if it is the one that follows from those of the parts; otherwise an empty text.

        Raises:
            UsageError: EXISTS, where `new`.
        """
        parts = [{"PartNumber": number, "ETag": f'"{tag}"'} for number, tag in enumerate(tags, 1)]
        asked = {**self._of(path), "UploadId": upload, "MultipartUpload": {"Parts": parts}}
        before = "" if new else _tag(self._head(path, file))
        ask = self._new(path, file) if new else self._ask
        end, pause, missed, is_lost = time.monotonic() + COMPLETION, _PAUSE, 0, False
        while True:
            try:
                return _foretold(completed_tag(tags), ask("complete_multipart_upload", asked, PATIENCE))
            except Exception as error:  # noqa: BLE001 - what clients raise has no common base
                failure = error
            try:
                there, is_over = self._head(path, file), not self.stored_parts(path, upload, file)
                if _is_made_of(tags, there, before) and (is_over or not new):
                    return _foretold(completed_tag(tags), there)
                missed += isinstance(failure, FileNotFoundError) or is_over
            except TransaxleError:  # after all attempts that the client makes itself
                is_lost = True
            if isinstance(failure, TransaxleError):
                raise failure
            if missed == _LOOKS:
                raise gone(file)
            if is_lost or not (isinstance(failure, FileNotFoundError) or _is_open(failure)):
                with self._service.working(_COMPLETING, file):
                    raise failure
            if time.monotonic() + pause > end:
                raise _incomplete(file)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _head(self, path: str, file: str) -> dict[str, Any]:
        """Return what the service says of a file; empty where there is none."""
        try:
            return dict(self._call("head_object", "reading its status", file, self._of(path)))
        except FileNotFoundError:
            return {}

    def _new(self, path: str, file: str) -> Callable[[str, dict[str, Any], float], Any]:
        """Return what makes a request that lets a file appear, only where there is none."""

        def ask(method: str, options: dict[str, Any], limit: float) -> Any:
            if self._knows_conditions:
                try:
                    return self._ask(method, options | _CONDITION, limit)
                except OSError as error:
                    status, code = _answer(error)
                    if status == _TAKEN or code == "PreconditionFailed":
                        raise _taken(file) from None
                    if status != _UNKNOWN and code not in _UNKNOWN_CODES:
                        raise
                    self._knows_conditions = False
            if self._head(path, file):
                raise _taken(file)
            return self._ask(method, options, limit)

        return ask

    def abort(self, path: str, upload: str, file: str) -> None:
        """Remove an upload and its parts; a missing one is no error."""
        try:
            asked = {**self._of(path), "UploadId": upload}
            self._call("abort_multipart_upload", "abandoning the upload", file, asked)
        except FileNotFoundError:
            return

    def list_uploads(self, path: str, file: str) -> Iterator[OpenUpload]:
        """Yield the uploads of a file, or of the files of a folder."""
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

    def put(self, path: str, data: bytes, file: str, *, new: bool = False) -> str:
        """Store a small file in one step; `new`, result and errors as for `complete`."""
        what = {**self._of(path), "Body": data, "ContentType": _TYPE}
        mark = {_MARK: os.urandom(8).hex()} if new else {}
        ask = self._new(path, file) if new else self._ask
        try:
            with self._service.working("writing it", file):
                answer = self._call("put_object", "writing it", file, what | {"Metadata": mark}, len(data), ask)
        except TransaxleError as error:
            if error.code != "EXISTS":
                raise
            answer = self._head(path, file)
            if not answer.get("Metadata", {}).items() >= mark.items():
                raise
        return _foretold(_md5(data), answer)

    def get(self, path: str, file: str) -> bytes | None:
        """Return a small file; None where it is missing."""
        try:
            with self._service.working("reading it", file, missing=True):
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
        """Make one request; a missing upload is a FileNotFoundError, everything else that fails a StorageError."""
        from fsspec.exceptions import FSTimeoutError

        limit = PATIENCE + size / SLOWEST
        with self._service.working(doing, file, missing=True):
            for number in range(1, _TRIES + 1):
                try:
                    return (ask or self._ask)(method, options, limit)
                except FSTimeoutError:
                    if number == _TRIES:
                        raise _stalled(doing, file, limit) from None
                except OSError as error:
                    if number == _TRIES or _answer(error)[0] != _CONFLICT:
                        raise
                time.sleep(_PAUSE * number)
        raise AssertionError  # pragma: no cover - the loop returns or raises

    def _ask(self, method: str, options: dict[str, Any], limit: float) -> Any:
        """Make one request of the client, which may take so many seconds; raises what the client does."""
        from fsspec.asyn import sync

        client: Any = self._service.client
        return sync(client.loop, client._call_s3, method, timeout=limit, **options)


def abort_empty(calls: S3Multipart, upload: OpenUpload, file: str) -> None:
    """Remove an upload, unless it has parts, or is gone.

    Raises:
        StorageError: IO.
    """
    if calls.stored_parts(upload.path, upload.upload, file) == {}:
        calls.abort(upload.path, upload.upload, file)


def _tag(answer: dict[str, Any]) -> str:
    """Return the tag in an answer about a file; empty where there is none."""
    return str(answer.get("ETag", "")).removeprefix("W/").strip('"')


def _foretold(tag: str | None, answer: dict[str, Any]) -> str:
    """Return the tag in an answer if it is the one that was foretold."""
    return tag if tag and tag == _tag(answer) else ""


def _is_made_of(tags: Sequence[str], there: dict[str, Any], before: str) -> bool:
    """Tell whether a file is that of an upload.

    Args:
        tags: of the upload's parts.
        there: what the service says of the file.
        before: its tag before the upload was to be completed, needed where no tag can be foretold.
    """
    is_own_key = there.get("SSECustomerAlgorithm") or str(there.get("ServerSideEncryption", "")).startswith("aws:kms")
    expected = None if is_own_key else completed_tag(tags)  # with keys of one's own, tags only look like MD5 sums
    tag = _tag(there)
    return tag == expected if expected else tag != before and tag.endswith(f"-{len(tags)}")


def _answer(error: BaseException) -> tuple[int, str]:
    """Return status and code of the service's answer that a client's error was made of; 0 where there was none."""
    answer = getattr(error.__cause__ or error, "response", None)
    if not isinstance(answer, dict):
        return 0, ""
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", _SERVER_ERROR)
    return int(status), str(answer.get("Error", {}).get("Code", ""))


def _is_open(error: Exception) -> bool:
    """Tell whether a request may have been carried out, or will be: there was no answer, or no final one."""
    status, _ = _answer(error)
    if not status:
        return not isinstance(error, PermissionError) and type(error).__name__ not in NO_CREDENTIALS
    return status == _CONFLICT or status >= _SERVER_ERROR


def _taken(file: str) -> TransaxleError:
    message = "another run has put this file here since this one looked; it is left as it is"
    hint = "Choose another place, or replace what is there:  --overwrite (overwrite=True)."
    return refuse("EXISTS", message, file=file, hint=hint)


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
