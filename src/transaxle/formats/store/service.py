"""Remote services that store files under URLs: calls of their fsspec clients, whose exceptions become errors of
Transaxle.

The clients raise exceptions of their own libraries, with messages that contain addresses and keys. Errors that this
module raises are Transaxle's own errors, with messages of one line. fsspec and the client are imported when the first
URL is opened.

A URL may contain a password, or a signature in its query string that allows everybody to read. Other people read
errors, reports and logs, so passwords and signatures are removed from each URL and each message of a service before it
is shown.

Servers may send more than was requested: a whole file instead of a range, a wrong range, or endless bytes. fsspec's
HTTP client reads each response to its end, but the session that this module gives it stops after the requested bytes.
fsspec's S3 client accepts any bytes; `s3_range` also checks the response's `Content-Range`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from transaxle.errors import HIDDEN, TransaxleError, refuse, without_secrets

HUB = "hf"
"""URL scheme of repositories on a Hugging Face hub."""
_LOCAL = "file"
_LOCAL_HOSTS = ("", "localhost")
_SECRET = re.compile(r"(?i)\b([\w-]*(?:secret|token|signature|password|credential|access[_-]?key)[\w-]*\s*[=:])\s*\S+")
_KEY_ID = re.compile(r"\b(?:(?:AKIA|ASIA)[A-Z0-9]{8,}|hf_[A-Za-z0-9]{8,})\b")
_LONGEST = 300
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfss": "abfs", "az": "abfs"}
"""Alternative URL scheme -> usual scheme of the same service."""


def scheme(url: str) -> str:
    """Return the scheme of a URL, which is the text before `://`."""
    return url.partition("://")[0]


def local_path(url: str) -> str | None:
    """Return the local path of a `file://` URL; None for a URL with a different scheme or a host."""
    if scheme(url).lower() != _LOCAL:
        return None
    parts = urlsplit(url)
    after_scheme = url.partition("://")[2]
    return unquote(after_scheme.removeprefix(parts.netloc)) if parts.netloc in _LOCAL_HOSTS else None


def address(url: str) -> str:
    """Return the canonical form of a URL, by which URLs are compared: one scheme per service, no repeated slashes, no
    query.
    """
    kind, _, after_scheme = url.partition("?")[0].partition("://")
    parts = [segment for segment in after_scheme.split("/") if segment not in ("", ".")]
    return "/".join((f"{_ALIASES.get(kind.lower(), kind.lower())}:/", *parts))


def harmless(message: str) -> str:
    """Return the first line of a service's message, without passwords, keys and query strings."""
    line = next(iter(message.strip().splitlines()), "")
    line = without_secrets(line)
    line = _KEY_ID.sub(HIDDEN, _SECRET.sub(rf"\1{HIDDEN}", line))
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}{HIDDEN}"


WEB = frozenset({"http", "https"})
"""URL schemes of web servers."""
_LONGEST_PAGE = 16 << 20
"""Maximum number of bytes of a response to a request without a range, such as the listing of a folder."""
_RANGE = re.compile(r"bytes=([0-9]+)-([0-9]+)")
_SENT = re.compile(r"bytes ([0-9]{1,20})-([0-9]{1,20})/", re.IGNORECASE)
_SHOWN = 60


class TooMuchError(OSError):
    """Raised if a server sends more bytes than a request asked for."""


class OtherRangeError(OSError):
    """Raised if a server sends a range that differs from the requested range."""


def check_range(requested: str, received: str) -> None:
    """Check that a response contains the requested range; a response without `Content-Range` is accepted.

    Args:
        requested: `Range` header of the request; may be empty.
        received: `Content-Range` header of the response; may be empty.

    Raises:
        OtherRangeError: if the two ranges differ.
    """
    requested_range, received_range = _RANGE.fullmatch(requested), _SENT.match(received)
    if (
        requested_range
        and received
        and (
            received_range is None
            or received_range[1] != requested_range[1]
            or int(received_range[2]) > int(requested_range[2])
        )
    ):
        raise OtherRangeError(f"{requested_range[0]} was requested, but the server sent {received[:_SHOWN]}")


def _max_bytes(headers: Any) -> int:
    match = _RANGE.fullmatch(headers.get("Range", ""))
    return int(match[2]) - int(match[1]) + 1 if match else _LONGEST_PAGE


async def session(**options: Any) -> Any:
    """Return an aiohttp session that limits the size of responses; fsspec's client calls this function and passes
    `options`.
    """
    from aiohttp import ClientResponse, ClientSession

    class Response(ClientResponse):
        async def read(self) -> bytes:
            if self._body is None:
                check_range(self.request_info.headers.get("Range", ""), self.headers.get("Content-Range", ""))
                max_bytes, data = _max_bytes(self.request_info.headers), bytearray()
                async for part in self.content.iter_any():
                    data += part
                    if len(data) > max_bytes:
                        self.close()
                        raise TooMuchError(f"the server sent more than the {max_bytes:,} bytes that were requested")
                self._body = bytes(data)
            return self._body

    return ClientSession(response_class=Response, **options)


def s3_range(client: Any, path: str, start: int, stop: int) -> bytes:
    """Read a range of an S3 object, which the service may shorten; raises the client's exceptions.

    Args:
        client: the s3fs client of the service.
        path: path of the object, in the form that the client uses.
        start: offset of the first byte.
        stop: offset after the last byte.
    """
    from fsspec.asyn import sync
    from s3fs.core import _error_wrapper, version_id_kw

    bucket, key, version = client.split_path(path)
    options = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{stop - 1}", **version_id_kw(version)}

    async def read() -> bytes:
        answer = await client._call_s3("get_object", **options, **client.req_kw)
        try:
            check_range(options["Range"], answer.get("ContentRange", ""))
            return bytes(await answer["Body"].read())
        finally:
            answer["Body"].close()

    return bytes(sync(client.loop, _error_wrapper, read, retries=client.retries))


_CLIENTS = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "fsspec[http]",
    "https": "fsspec[http]", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs", "sftp": "fsspec[sftp]", "oci": "ocifs",
}  # fmt: skip
"""URL scheme -> what pip installs for the scheme; all of it brings fsspec."""
S3 = frozenset({"s3", "s3a"})
"""URL schemes of S3-compatible services; several processes can share an upload to such a service."""
NO_CREDENTIALS = frozenset({
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError",
    "UnauthorizedSSOTokenError", "ProfileNotFound", "DefaultCredentialsError", "RefreshError",
    "LocalTokenNotFoundError",
})  # fmt: skip
"""Names of the exceptions that clients raise if credentials are missing or invalid."""
_HOW_TO_LOG_IN = "Give the credentials in the way the service's client expects: environment, profile or login."

Info = dict[str, Any]
"""What a service reports about a file or folder: `name`, `size`, `type`, and further keys that differ between
services."""
RANGES = "The server must support range requests."
"""Hint for the user if a server ignores requests for a byte range."""
FILE = "file"
"""The value that the key `type` has for a file."""


class Stream(Protocol):
    """A remote file that is being written; it stays invisible until it is committed."""

    closed: bool

    def write(self, data: memoryview, /) -> int:
        """Append bytes to the file."""

    def close(self) -> None:
        """Send the remaining bytes; the file stays invisible."""

    def commit(self) -> None:
        """Make the complete file visible."""

    def discard(self) -> None:
        """Abandon the unfinished file."""


class Readable(Protocol):
    """The methods of a service that read; see `Service`."""

    @property
    def scheme(self) -> str:
        """URL scheme of the service, without `://`."""

    @property
    def shown(self) -> str:
        """The URL without passwords and signatures; if the version cannot change, the URL that names the version."""

    @property
    def path(self) -> str:
        """The path in the URL, in the form that the service's client uses."""

    @property
    def pinned(self) -> bool:
        """Whether the files can never change, so that no later checks are needed."""

    def info(self, path: str, file: str) -> Info | None:
        """Return what the service currently reports about a file or folder; None if the path does not exist."""

    def members(self, path: str, file: str) -> list[Info]:
        """Return the files and folders directly in a folder; empty if the folder does not exist."""

    def fetch(self, path: str, start: int, stop: int, file: str) -> bytes:
        """Return the requested byte range of a file, which the service may shorten."""


class Service:
    """The storage service behind one URL.

    Args:
        url: any URL that fsspec supports.
        writing: whether to open the service for writing; new files stay invisible until they are committed.

    Raises:
        Refused: with the code UNSUPPORTED for an unknown URL scheme, or if the package for the scheme is missing.
        StorageError: with the code IO if the service fails or refuses.
    """

    pinned = False
    """False, because files may change between requests."""

    def __init__(self, url: str, *, writing: bool = False) -> None:
        self.scheme = scheme(url)
        """URL scheme of the service, without `://`."""
        self.shown = without_secrets(url)
        """The URL without passwords and signatures."""
        with self._convert_errors("opening it", self.shown):
            try:
                from fsspec.core import url_to_fs

                # The transaction of this object must not affect other users of a cached client.
                options = {"get_client": session} if self.scheme in WEB else {}
                client_and_path = url_to_fs(url, **({"skip_instance_cache": True} if writing else {}), **options)
            except ImportError as error:
                missing = (error.name or "").partition(".")[0]
                package = _CLIENTS.get(self.scheme, "fsspec" if missing == "fsspec" else None)
                hint = f"Install one:  pip install '{package}'" if package else harmless(str(error))
                message = f"no installed package can open {self.scheme}:// URLs"
                raise refuse("UNSUPPORTED", message, file=self.shown, hint=hint) from None
            except ValueError as error:
                raise refuse("UNSUPPORTED", harmless(str(error)), file=self.shown) from None
            self.client: Any = client_and_path[0]
            """The fsspec file system for the URL scheme."""
            self.path = str(client_and_path[1]).rstrip("/")
            """The path in the URL in the form that the client uses, without a trailing `/`."""
            if writing:
                self.client.start_transaction()
            else:
                self.client.invalidate_cache()

    def info(self, path: str, file: str) -> Info | None:
        """Return what the service currently reports about a file or folder; None if the path does not exist.

        Args:
            path: path of the file or folder, in the form that the client uses.
            file: name of the file or folder for error messages.

        Raises:
            StorageError: with the code IO if the service fails or refuses.
        """
        with self._convert_errors("reading its status", file):
            self.client.invalidate_cache()
            try:
                return dict(self.client.info(path))
            except FileNotFoundError:
                return None

    def members(self, path: str, file: str) -> list[Info]:
        """Return the files and folders directly in a folder; empty if the folder does not exist.

        Raises:
            StorageError: with the code IO if the service fails or refuses.
        """
        with self._convert_errors("opening it" if self.scheme in WEB else "listing the folder", file):
            self.client.invalidate_cache()
            try:
                return [dict(member) for member in self.client.ls(path, detail=True)]
            except (FileNotFoundError, NotADirectoryError):
                return []

    def below(self, path: str, file: str) -> list[str]:
        """Return the paths of all files below a folder, in the form that the client uses.

        Raises:
            StorageError: with the code IO if the service fails or refuses.
        """
        with self._convert_errors("listing the folder", file):
            self.client.invalidate_cache()
            return sorted(self.client.find(path))

    def fetch(self, path: str, start: int, stop: int, file: str) -> bytes:
        """Return the requested byte range of a file, which the service may shorten.

        Raises:
            StorageError: with the code IO if the service fails or refuses.
        """
        with self._convert_errors(f"reading {stop - start} bytes at offset {start}", file):
            if self.scheme in S3 and start < stop:
                return s3_range(self.client, path, start, stop)
            return bytes(self.client.cat_file(path, start=start, end=stop))

    def create(self, path: str, part: int, file: str) -> Stream:
        """Begin to write a file, which is sent in parts of `part` bytes.

        Raises:
            Refused: with the code UNSUPPORTED if the service cannot write files, or would show them before they are
                complete.
            StorageError: with the code IO if the service fails or refuses.
        """
        from fsspec.spec import AbstractBufferedFile

        with self._convert_errors("creating it", file):
            try:
                stream: Any = self.client.open(path, "wb", block_size=part)
            except NotImplementedError:
                raise refuse("UNSUPPORTED", f"{self.scheme}:// is read-only", file=self.shown) from None
            unable = AbstractBufferedFile.commit
            if getattr(type(stream), "commit", unable) is unable:
                stream.closed = True
                message = (
                    f"the client for {self.scheme}:// shows files before they are complete, so nothing is written to it"
                )
                hint = "Convert to a local folder, and upload that with the service's own tool."
                raise refuse("UNSUPPORTED", message, file=self.shown, hint=hint)
            created: Stream = stream
            return created

    def delete(self, path: str, file: str) -> None:
        """Delete a file; a missing file is not an error.

        Raises:
            StorageError: with the code IO if the service fails or refuses.
        """
        with self._convert_errors("deleting it", file):
            self.client.invalidate_cache()
            try:
                self.client.rm_file(path)
            except FileNotFoundError:
                return

    @contextmanager
    def as_storage_error(self, doing: str, file: str, *, missing: bool = False) -> Iterator[None]:
        """Convert the client's exceptions to StorageError; if `missing` is true, a FileNotFoundError is raised
        unchanged.
        """
        with self._convert_errors(doing, file, missing=missing):
            yield

    @contextmanager
    def _convert_errors(self, doing: str, file: str, *, missing: bool = False) -> Iterator[None]:
        try:
            yield
        except (TransaxleError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - what clients raise has no common base
            if missing and isinstance(error, FileNotFoundError):
                raise FileNotFoundError(file) from None
            # The error is raised without the client's exception as its cause, because that exception's message may
            # contain a signed URL or a key.
            raise _storage_error(error, doing, file) from None


def _system(error: Exception) -> type[OSError] | None:
    """Return the OSError class that corresponds to a client's exception; None if there is no such class."""
    return next((kind for kind in (FileNotFoundError, PermissionError) if isinstance(error, kind)), None)


def _storage_error(error: Exception, doing: str, file: str) -> TransaxleError:
    """Return the StorageError for a client's exception."""
    kind = type(error).__name__
    reason = harmless(str(error))
    hint = ""
    if isinstance(error, FileNotFoundError):
        reason = "no such file"
    elif isinstance(error, PermissionError):
        reason, hint = f"access denied ({reason})" if reason else "access denied", _HOW_TO_LOG_IN
    elif kind in NO_CREDENTIALS:
        hint = _HOW_TO_LOG_IN
    elif isinstance(error, (TooMuchError, OtherRangeError)):
        hint = RANGES
    elif not isinstance(error, OSError) or not reason:
        reason = f"{kind}: {reason}" if reason else kind
    return refuse("IO", f"{doing}: {reason}", file=file, hint=hint, system=_system(error))
