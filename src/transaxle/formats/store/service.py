"""A service that stores files under URLs: the few calls we make to its fsspec client, with its errors as ours.

Clients raise whatever their libraries raise, with addresses and keys in the text. Every error that leaves this module
is one of ours, one line long. fsspec, and the client, are imported when the first URL is opened.

A URL may hold a password, or in its query string a signature that opens the file to whoever reads it. Errors, reports
and logs are read by others, so every URL and every message of a service passes through here before it is shown.

Servers may send more than was asked for, a whole file instead of a part, another part, or bytes without end. fsspec's
client of the web reads every answer to its end; the session that it gets here stops one byte after the requested ones.
Its client of S3 takes whatever bytes come; `s3_range` is the same, but reads the answer's `Content-Range`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from transaxle.errors import HIDDEN, TransaxleError, refuse, without_secrets

HUB = "hf"
"""Scheme of the repositories of a Hugging Face hub."""
_LOCAL = "file"
_LOCAL_HOSTS = ("", "localhost")
_SECRET = re.compile(r"(?i)\b([\w-]*(?:secret|token|signature|password|credential|access[_-]?key)[\w-]*\s*[=:])\s*\S+")
_KEY_ID = re.compile(r"\b(?:(?:AKIA|ASIA)[A-Z0-9]{8,}|hf_[A-Za-z0-9]{8,})\b")
_LONGEST = 300
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfss": "abfs", "az": "abfs"}
"""Scheme -> another scheme for the same service."""


def scheme(url: str) -> str:
    """Return the part before the `://`."""
    return url.partition("://")[0]


def local_path(url: str) -> str | None:
    """Return the path on this machine that a `file://` URL denotes; None for any other URL, or another host's."""
    if scheme(url).lower() != _LOCAL:
        return None
    parts = urlsplit(url)
    after_scheme = url.partition("://")[2]
    return unquote(after_scheme.removeprefix(parts.netloc)) if parts.netloc in _LOCAL_HOSTS else None


def address(url: str) -> str:
    """Return a URL in one canonical spelling, for comparison: one scheme per service, no repeated slashes, no query."""
    kind, _, after_scheme = url.partition("?")[0].partition("://")
    parts = [segment for segment in after_scheme.split("/") if segment not in ("", ".")]
    return "/".join((f"{_ALIASES.get(kind.lower(), kind.lower())}:/", *parts))


def harmless(message: str) -> str:
    """Return the first line of what a service said, without passwords, keys and query strings."""
    line = next(iter(message.strip().splitlines()), "")
    line = without_secrets(line)
    line = _KEY_ID.sub(HIDDEN, _SECRET.sub(rf"\1{HIDDEN}", line))
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}{HIDDEN}"


WEB = frozenset({"http", "https"})
"""Schemes of URLs that a web server answers."""
_LONGEST_PAGE = 16 << 20
"""Cap on the bytes of an answer to a request without a range: a page that lists a folder."""
_RANGE = re.compile(r"bytes=([0-9]+)-([0-9]+)")
_SENT = re.compile(r"bytes ([0-9]{1,20})-([0-9]{1,20})/", re.IGNORECASE)
_SHOWN = 60


class TooMuchError(OSError):
    """The server sends more than was requested."""


class OtherRangeError(OSError):
    """The server sends other bytes than those that were requested."""


def check_range(requested: str, sent: str) -> None:
    """Check what a server says of the bytes that it sends; one that says nothing is believed.

    Args:
        requested: the `Range` of the request, empty without one.
        sent: the `Content-Range` of the answer, empty without one.

    Raises:
        OtherRangeError: these are other bytes.
    """
    wanted, found = _RANGE.fullmatch(requested), _SENT.match(sent)
    if wanted and sent and (found is None or found[1] != wanted[1] or int(found[2]) > int(wanted[2])):
        raise OtherRangeError(f"{wanted[0]} was requested, but the server sent {sent[:_SHOWN]}")


def _asked(headers: Any) -> int:
    match = _RANGE.fullmatch(headers.get("Range", ""))
    return int(match[2]) - int(match[1]) + 1 if match else _LONGEST_PAGE


async def session(**options: Any) -> Any:
    """Return an aiohttp session for fsspec's client that bounds every answer; `options` are the client's own."""
    from aiohttp import ClientResponse, ClientSession

    class Response(ClientResponse):
        async def read(self) -> bytes:
            if self._body is None:
                check_range(self.request_info.headers.get("Range", ""), self.headers.get("Content-Range", ""))
                most, data = _asked(self.request_info.headers), bytearray()
                async for part in self.content.iter_any():
                    data += part
                    if len(data) > most:
                        self.close()
                        raise TooMuchError(f"the server sent more than the {most:,} bytes that were requested")
                self._body = bytes(data)
            return self._body

    return ClientSession(response_class=Response, **options)


def s3_range(client: Any, path: str, start: int, stop: int) -> bytes:
    """Return a range of an object's bytes, as many of them as the service gives; raises what the client does.

    Args:
        client: s3fs.
        path: what it calls the object.
        start: first byte.
        stop: one past the last.
    """
    from fsspec.asyn import sync
    from s3fs.core import _error_wrapper, version_id_kw

    bucket, key, version = client.split_path(path)
    asked = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{stop - 1}", **version_id_kw(version)}

    async def read() -> bytes:
        answer = await client._call_s3("get_object", **asked, **client.req_kw)
        try:
            check_range(asked["Range"], answer.get("ContentRange", ""))
            return bytes(await answer["Body"].read())
        finally:
            answer["Body"].close()

    return bytes(sync(client.loop, _error_wrapper, read, retries=client.retries))


_CLIENTS = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp",
    "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs", "sftp": "paramiko", "oci": "ocifs",
}  # fmt: skip
"""Scheme -> package that fsspec needs for it."""
S3 = frozenset({"s3", "s3a"})
"""Schemes of services that speak as S3 does, with uploads that several processes can send."""
NO_CREDENTIALS = frozenset({
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError",
    "UnauthorizedSSOTokenError", "ProfileNotFound", "DefaultCredentialsError", "RefreshError",
    "LocalTokenNotFoundError",
})  # fmt: skip
"""Names of what clients raise where they have no valid credentials."""
_HOW_TO_LOG_IN = "Give the credentials in the way the service's client expects: environment, profile or login."

Info = dict[str, Any]
"""A service's information on a file or folder: `name`, `size`, `type`, and tags of its own."""
RANGES = "The server must support range requests."
"""Hint for a server that ignores ranges."""
FILE = "file"
"""The `type` of a file."""


class Stream(Protocol):
    """A file that is being written and stays invisible until it is committed."""

    closed: bool

    def write(self, data: memoryview, /) -> int:
        """Append bytes."""

    def close(self) -> None:
        """Send the rest; the file is then complete, but still invisible."""

    def commit(self) -> None:
        """Make the file appear."""

    def discard(self) -> None:
        """Abandon the file."""


class Readable(Protocol):
    """What is asked of a service to read from it; see `Service`."""

    @property
    def scheme(self) -> str:
        """What stands before the `://`."""

    @property
    def shown(self) -> str:
        """The URL without secrets; of what is pinned the URL that leads to just this version."""

    @property
    def path(self) -> str:
        """What the service calls the place that the URL denotes."""

    @property
    def pinned(self) -> bool:
        """Whether nothing can change there, so that no second look at a file is needed."""

    def info(self, path: str, file: str) -> Info | None:
        """Return the current information on a file or folder; None if it does not exist."""

    def members(self, path: str, file: str) -> list[Info]:
        """Return the direct contents of a folder; empty if it does not exist."""

    def fetch(self, path: str, start: int, stop: int, file: str) -> bytes:
        """Return a range of a file's bytes, as many of them as the service gives."""


class Service:
    """The service behind one URL.

    Args:
        url: any URL that fsspec knows.
        writing: files created here stay invisible until they are committed.

    Raises:
        Refused: UNSUPPORTED where the scheme is unknown, or its package is missing.
        StorageError: IO.
    """

    pinned = False
    """A file may be another one at the next look."""

    def __init__(self, url: str, *, writing: bool = False) -> None:
        self.scheme = scheme(url)
        """What stands before the `://`."""
        self.shown = without_secrets(url)
        """The URL without secrets."""
        with self._named("opening it", self.shown):
            from fsspec.core import url_to_fs

            try:
                # The transaction below is this run's own: an instance that others share must not have it.
                options = {"get_client": session} if self.scheme in WEB else {}
                client_and_path = url_to_fs(url, **({"skip_instance_cache": True} if writing else {}), **options)
            except ImportError as error:
                package = _CLIENTS.get(self.scheme)
                hint = f"Install one:  pip install '{package}'" if package else harmless(str(error))
                message = f"no installed package can open {self.scheme}:// URLs"
                raise refuse("UNSUPPORTED", message, file=self.shown, hint=hint) from None
            except ValueError as error:
                raise refuse("UNSUPPORTED", harmless(str(error)), file=self.shown) from None
            self.client: Any = client_and_path[0]
            """What fsspec has for the scheme."""
            self.path = str(client_and_path[1]).rstrip("/")
            """What the client calls the place that the URL denotes."""
            if writing:
                self.client.start_transaction()
            else:
                self.client.invalidate_cache()

    def info(self, path: str, file: str) -> Info | None:
        """Return the current information on a file or folder; None if it does not exist.

        Args:
            path: the client's name for it.
            file: its name for errors.

        Raises:
            StorageError: IO.
        """
        with self._named("reading its status", file):
            self.client.invalidate_cache()
            try:
                return dict(self.client.info(path))
            except FileNotFoundError:
                return None

    def members(self, path: str, file: str) -> list[Info]:
        """Return the direct contents of a folder; empty if it does not exist.

        Raises:
            StorageError: IO.
        """
        with self._named("opening it" if self.scheme in WEB else "listing the folder", file):
            self.client.invalidate_cache()
            try:
                return [dict(member) for member in self.client.ls(path, detail=True)]
            except (FileNotFoundError, NotADirectoryError):
                return []

    def below(self, path: str, file: str) -> list[str]:
        """Return the client's names for all files in a folder and below it.

        Raises:
            StorageError: IO.
        """
        with self._named("listing the folder", file):
            self.client.invalidate_cache()
            return sorted(self.client.find(path))

    def fetch(self, path: str, start: int, stop: int, file: str) -> bytes:
        """Return a range of a file's bytes, as many of them as the service gives.

        Raises:
            StorageError: IO.
        """
        with self._named(f"reading {stop - start} bytes at offset {start}", file):
            if self.scheme in S3 and start < stop:
                return s3_range(self.client, path, start, stop)
            return bytes(self.client.cat_file(path, start=start, end=stop))

    def create(self, path: str, part: int, file: str) -> Stream:
        """Start a file that is sent in parts of `part` bytes.

        Raises:
            Refused: UNSUPPORTED where files cannot be written, or would be visible before they are complete.
            StorageError: IO.
        """
        from fsspec.spec import AbstractBufferedFile

        with self._named("creating it", file):
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
        """Delete a file; a missing one is no error.

        Raises:
            StorageError: IO.
        """
        with self._named("deleting it", file):
            self.client.invalidate_cache()
            try:
                self.client.rm_file(path)
            except FileNotFoundError:
                return

    @contextmanager
    def working(self, doing: str, file: str, *, missing: bool = False) -> Iterator[None]:
        """Turn what the client raises into our error; where `missing`, all but what says that something is missing."""
        with self._named(doing, file, missing=missing):
            yield

    @contextmanager
    def _named(self, doing: str, file: str, *, missing: bool = False) -> Iterator[None]:
        try:
            yield
        except (TransaxleError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - what clients raise has no common base
            if missing and isinstance(error, FileNotFoundError):
                raise FileNotFoundError(file) from None
            # Without its cause: the client's own message may hold a signed URL or a key.
            raise _failed(error, doing, file) from None


def _system(error: Exception) -> type[OSError] | None:
    """Return the error of the system that a client's stands for."""
    return next((kind for kind in (FileNotFoundError, PermissionError) if isinstance(error, kind)), None)


def _failed(error: Exception, doing: str, file: str) -> TransaxleError:
    """Build the StorageError for what a client raised."""
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
