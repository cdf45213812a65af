"""Serves a checkpoint as a hub: the files of a planned conversion over HTTP, for programs with `HF_ENDPOINT` set.

The server answers what clients of huggingface.co ask when they download a model: what the repository is, which files it
has, and the files, whole or by ranges, large ones through a redirect on the same host. The repository has one branch,
`main`, at one commit. Commit and ETags come from the identities in `engine.planned_files`: they change whenever bytes
may change, so that no client continues a download with other bytes. SHA-256 hashes of large files are not listed,
because they are known only after all tensors have been computed.

The server writes nothing, and looks up names only in the plan's list of files, never on disk. On the loopback, the
header `Host` must name the loopback, so that a web page cannot read from it under a domain of its own (DNS rebinding).
On any other address, each request needs the token. An error in the middle of a file closes the connection before the
announced number of bytes was sent.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from email.message import Message
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from operator import itemgetter
from pathlib import PurePath
from typing import Any, Self, TypeAlias
from urllib.parse import parse_qs, quote, unquote, urlsplit

import msgspec

from transaxle.engine.plan.planned import Plan
from transaxle.engine.planned_files import PlannedFile, PlannedFiles
from transaxle.engine.wording import duration, size
from transaxle.errors import Refused, TransaxleError, refuse
from transaxle.formats.storage.local import read_file, storage_error
from transaxle.formats.storage.storage import NotJsonError, parse_json, without_commit

LOOPBACK = "127.0.0.1"
"""Address on which the server listens unless another is given."""
MAIN = "main"
"""Name of the repository's only branch."""
_MOST_CONNECTIONS = 512
"""Number of connections that are served at the same time; `hf download` opens eight or more."""
_MOST_REFUSED = 128
"""Number of further connections whose requests get the status 503, upon which clients of the hub try again; others are
closed at once.
"""
_SECONDS = 60
"""Seconds after which a connection is closed on which nothing arrives, or nothing is taken."""
_LARGEST_BODY = 1 << 20
"""Maximum size in bytes of the body of a request."""
_LONGEST_SHOWN = 200
"""Maximum number of characters of a path that the log shows."""
_SHORTEST_TOKEN = 16
_LARGEST_TOKEN = 1 << 12
_TOKEN = re.compile(r"[\x21-\x7e]+")
_REPOSITORY = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*/)?[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
"""Names that clients of the hub accept; see also `_FORBIDDEN`."""
_FORBIDDEN = re.compile(r"--|\.\.|[.-](?:/|$)|\.git$")
_RANGE = re.compile(r"bytes=([0-9]{0,19})-([0-9]{0,19})")
_NO_HEADER = re.compile(r"[^\x20-\x7e]+")
_COMMIT, _LINKED_SIZE, _LINKED_TAG = "X-Repo-Commit", "X-Linked-Size", "X-Linked-ETag"
_OBJECTS = "objects"
"""First segment of the paths of files with tensors, to which `resolve` redirects."""


Headers: TypeAlias = "Mapping[str, str] | Message[str, str]"
"""Headers of a request; a message of the standard library finds names in any case."""


class Response(msgspec.Struct, frozen=True):
    """What the server answers to one request."""

    status: int
    """Status code of HTTP."""
    body: bytes = b""
    """The body, unless it is a part of a file."""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Headers besides those that describe the body's length and type."""
    file: str = ""
    """Name of the file of which the body is a part; empty without a file."""
    span: tuple[int, int] = (0, 0)
    """The part of the file: offset of its first byte, and the offset after its last byte."""

    @property
    def length(self) -> int:
        """Number of bytes of the body."""
        return self.span[1] - self.span[0] if self.file else len(self.body)


def _json(data: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    kind = {"Content-Type": "application/json; charset=utf-8"}
    return Response(status, json.dumps(data).encode(), {**kind, **(headers or {})})


def _problem(status: int, message: str, code: str = "", headers: Mapping[str, str] | None = None) -> Response:
    """Return an error response with the headers by which clients of the hub tell errors apart."""
    shown = {"X-Error-Message": _NO_HEADER.sub(" ", message)[:1000], **({"X-Error-Code": code} if code else {})}
    return _json({"error": message}, status, {**shown, **(headers or {})})


def _no_such_request() -> Response:
    return _problem(404, "this request is not among those that the server answers")


class Repository:
    """The one repository that a server has: answers requests from the files of a plan.

    Args:
        name: name of the repository, `NAME` or `OWNER/NAME`.
        files: the files.
    """

    def __init__(self, name: str, files: PlannedFiles) -> None:
        self.name, self._files = name, files
        self._folders: dict[str, list[dict[str, Any]]] = {"": []}
        """Folder -> its entries as the hub's API lists them, files and folders."""
        for file in files.files.values():
            self._list(file.name, {"type": "file", "path": file.name, "size": file.size, "oid": file.identity})

    def _list(self, path: str, entry: dict[str, Any]) -> None:
        above = path.rpartition("/")[0]
        if above not in self._folders:
            self._folders[above] = []
            identity = hashlib.sha256(f"{self._files.identity} {above}/".encode()).hexdigest()[:40]
            self._list(above, {"type": "directory", "path": above, "size": 0, "oid": identity})
        self._folders[above].append(entry)

    @property
    def commit(self) -> str:
        """The commit of the branch `main`: 40 hex digits."""
        return self._files.identity

    def answer(self, method: str, target: str, headers: Headers, body: bytes = b"") -> Response:
        """Return the response to a request.

        Args:
            method: `GET`, `HEAD` or `POST`.
            target: path of the request, with its query.
            headers: headers of the request.
            body: body of the request.
        """
        try:
            self._files.require_unchanged()
            path, _, query = target.partition("?")
            segments = [unquote(segment) for segment in path.strip("/").split("/")]
            return self._route(method, segments, parse_qs(query), headers, body)
        except TransaxleError as error:
            return refusal_response(error)

    def _route(
        self,
        method: str,
        segments: Sequence[str],
        query: Mapping[str, list[str]],
        headers: Headers,
        body: bytes,
    ) -> Response:
        name = self.name.split("/")
        count = len(name)
        asks_for_paths = segments[:2] == ["api", "models"] and segments[count + 2 : count + 3] == ["paths-info"]
        if method == "POST" and not asks_for_paths:
            return _problem(405, "the server is read-only", headers={"Allow": "GET, HEAD"})
        if segments == [""]:
            return Response(200, f"transaxle serves {self.name} at {self.commit}\n".encode(), _PLAIN)
        if segments[:2] == ["api", "models"]:
            if segments[2 : 2 + count] != name:
                return self._no_repository()
            return self._api(segments[2 + count :], query, body)
        if segments[0] == _OBJECTS and segments[1:2] == [self.commit]:
            return self._file(method, "/".join(segments[2:]), headers)
        if segments[:count] != name:
            return self._no_repository()
        if segments[count : count + 1] == ["resolve"] and len(segments) > count + 2:
            return self._resolve(method, segments[count + 1], "/".join(segments[count + 2 :]), headers)
        return _no_such_request()

    def _no_repository(self) -> Response:
        return _problem(404, f"the only repository here is the model {self.name}", "RepoNotFound")

    def _no_revision(self, revision: str) -> Response:
        return _problem(404, f"no revision {revision}: there is {MAIN}, at {self.commit}", "RevisionNotFound")

    def _no_file(self, path: str) -> Response:
        return _problem(404, f"{self.name} has no {path}", "EntryNotFound", {_COMMIT: self.commit})

    def _api(self, segments: Sequence[str], query: Mapping[str, list[str]], body: bytes) -> Response:
        """Answer a request under `/api/models/NAME/`."""
        kind, revision, *folder = [*segments, "", ""][: max(len(segments), 2)]
        if not kind:
            return self._describe(query)
        if kind == "refs" and not revision:
            branch = {"name": MAIN, "ref": f"refs/heads/{MAIN}", "targetCommit": self.commit}
            return _json({"branches": [branch], "converts": [], "tags": [], "pullRequests": []})
        if kind not in {"revision", "tree", "paths-info"} or (folder and kind != "tree"):
            return _no_such_request()
        if revision not in {MAIN, self.commit}:
            return self._no_revision(revision)
        if kind == "revision":
            return self._describe(query)
        return self._paths_info(body) if kind == "paths-info" else self._tree("/".join(folder), query)

    def _describe(self, query: Mapping[str, list[str]]) -> Response:
        """Answer what the repository is."""
        siblings: list[dict[str, Any]] = [{"rfilename": name} for name in self._files.files]
        if "blobs" in query:
            for sibling, file in zip(siblings, self._files.files.values(), strict=True):
                sibling |= {"size": file.size, "blobId": file.identity}
        facts: dict[str, Any] = {
            "id": self.name,
            "modelId": self.name,
            "sha": self.commit,
            "private": False,
            "gated": False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "library_name": "transformers",
            "siblings": siblings,
        }
        return _json(facts, headers={_COMMIT: self.commit})

    def _tree(self, folder: str, query: Mapping[str, list[str]]) -> Response:
        """Answer which files and folders a folder has."""
        if folder not in self._folders:
            return self._no_file(folder)
        entries = self._folders[folder]
        if query.get("recursive", [""])[0].lower() in {"true", "1"}:
            inside = f"{folder}/" if folder else ""
            below = [name for name in self._folders if name == folder or name.startswith(inside)]
            entries = sorted((entry for name in below for entry in self._folders[name]), key=itemgetter("path"))
        return _json(entries, headers={_COMMIT: self.commit})

    def _paths_info(self, body: bytes) -> Response:
        """Answer which of the paths in a request's body exist."""
        try:
            text = body.decode()
            paths = parse_json(text)["paths"] if text.lstrip().startswith("{") else parse_qs(text).get("paths", [])
        except (NotJsonError, UnicodeDecodeError, KeyError, ValueError):
            paths = None
        if not isinstance(paths, list):
            return _problem(400, "the body must list paths")
        entries = {entry["path"]: entry for listed in self._folders.values() for entry in listed}
        return _json([entries[path] for path in paths if isinstance(path, str) and path in entries])

    def _resolve(self, method: str, revision: str, path: str, headers: Headers) -> Response:
        """Answer a request for a file; files with tensors are behind a redirect, as large files of the hub are."""
        if revision not in {MAIN, self.commit}:
            return self._no_revision(revision)
        file = self._files.files.get(path)
        if file is None:
            return self._no_file(path)
        if not file.has_tensors:
            return self._file(method, path, headers)
        address = quote(f"/{_OBJECTS}/{self.commit}/{path}")
        return Response(302, b"", {**self._headers_of(file), "Location": address})

    def _headers_of(self, file: PlannedFile) -> dict[str, str]:
        tag = f'"{file.identity}"'
        return {
            "ETag": tag,
            "Accept-Ranges": "bytes",
            _COMMIT: self.commit,
            _LINKED_TAG: tag,
            _LINKED_SIZE: str(file.size),
        }

    def _file(self, method: str, path: str, request: Headers) -> Response:
        """Answer with a file, or with the range of it that is requested; only GET has ranges."""
        file = self._files.files.get(path)
        if file is None:
            return self._no_file(path)
        headers = self._headers_of(file)
        name = quote(path.rpartition("/")[2])
        headers |= {**_BINARY, "Content-Disposition": f"inline; filename*=UTF-8''{name}"}
        if not {headers["ETag"], "*"}.isdisjoint(_tags(request.get("If-None-Match", ""))):
            return Response(304, b"", headers)
        if request.get("If-Match", "*") != "*" and headers["ETag"] not in _tags(request["If-Match"]):
            return _problem(412, f"{path} has the ETag {headers['ETag']}", headers={"ETag": headers["ETag"]})
        span: tuple[int, int] | None = None
        if method == "GET" and request.get("If-Range", headers["ETag"]) == headers["ETag"]:
            span = parse_range(request.get("Range", ""), file.size)
        if span is None:
            return Response(200, b"", headers, path, (0, file.size))
        if span[0] >= span[1]:
            return _problem(416, f"{path} has {file.size} bytes", headers={"Content-Range": f"bytes */{file.size}"})
        headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{file.size}"
        return Response(206, b"", headers, path, span)

    def read(self, response: Response) -> Iterator[memoryview]:
        """Yield the bytes of a response's body."""
        if response.file:
            yield from self._files.read(response.file, *response.span)
        elif response.body:
            yield memoryview(response.body)


_PLAIN = {"Content-Type": "text/plain; charset=utf-8"}
_BINARY = {"Content-Type": "application/octet-stream"}


def _first_line(error: TransaxleError) -> str:
    refusal = error.refusals[0].shown()
    place = " · ".join(text for text in (refusal.where.file, refusal.where.tensor) if text)
    return f"{place}: {refusal.message}" if place else refusal.message


def refusal_response(error: TransaxleError) -> Response:
    """Return the response for an error of the checkpoint; 409 if no later request can succeed, else 500."""
    if isinstance(error, Refused):
        return _problem(409, f"the checkpoint can no longer be served: {_first_line(error)}")
    return _problem(500, _first_line(error))


def _tags(header: str) -> list[str]:
    """Return the ETags in a header, without the marks of weak ones."""
    return [tag.strip().removeprefix("W/") for tag in header.split(",")]


def parse_range(header: str, file_size: int) -> tuple[int, int] | None:
    """Return the byte range that a header `Range` requests, `(first byte, offset after the last byte)`.

    Returns:
        The result is None if the whole file is to be sent: without a header, or for one that this server does not
        support, such as several ranges. An empty range means that the file has no such bytes.
    """
    match = _RANGE.fullmatch(header.strip())
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        return max(file_size - int(match[2]), 0), file_size
    first, last = int(match[1]), int(match[2]) if match[2] else file_size - 1
    if match[2] and last < first:
        return None
    return (first, min(last + 1, file_size)) if first < file_size else (0, 0)


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = _SECONDS

    def version_string(self) -> str:
        """Return the value of the header `Server`."""
        return "transaxle"

    def log_message(self, *_: object) -> None:
        """Print nothing; `_Server.log` gets one line for each answered request."""

    def do_GET(self) -> None:
        """Answer a request."""
        began = time.monotonic()
        response = self._response()
        blocks: Iterator[memoryview] = iter(())
        if self.command != "HEAD":
            try:
                # An error of the first block is still answered with a status of its own.
                blocks = self.server.repository.read(response)
                blocks = chain([next(blocks, memoryview(b""))], blocks)
            except TransaxleError as error:
                response = refusal_response(error)
                blocks = iter([memoryview(response.body)])
        count = self._send(response, blocks)
        seconds = time.monotonic() - began
        length = f" of {size(response.length)}" if count < response.length and self.command != "HEAD" else ""
        amount = f"  {size(count)}{length}  {duration(seconds)}" if count else ""
        self.server.log(f"{response.status}  {self.command} {self._short_path}{amount}")

    def do_HEAD(self) -> None:
        """Answer a request without a body."""
        self.do_GET()

    def do_POST(self) -> None:
        """Answer a request with a body."""
        self.do_GET()

    def _send(self, response: Response, blocks: Iterator[memoryview]) -> int:
        """Send a response, and return how many bytes of its body were sent; fewer than announced close the
        connection.
        """
        count = 0
        try:
            self._send_head(response)
            for block in blocks:
                self.connection.sendall(block)
                count += len(block)
        except TransaxleError as error:
            # The announced length tells the client that bytes are missing.
            self.close_connection = True
            self.server.log(f"error  {self._short_path}: {_first_line(error)}")
        except OSError:
            self.close_connection = True  # the client has gone
        return count

    @property
    def _short_path(self) -> str:
        """The requested path as the log shows it: short."""
        commit = self.server.repository.commit
        return unquote(urlsplit(self.path).path)[:_LONGEST_SHOWN].replace(commit, commit[:8])

    def _response(self) -> Response:
        refusal = self.server.refusal(self.headers, self.connection)
        try:
            length = int(self.headers.get("Content-Length", "0"))
        except ValueError:
            length = -1
        if refusal is not None or not 0 <= length <= _LARGEST_BODY or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # the body is not read
            return refusal or _problem(413, "the body of the request is too long, or its length is not given")
        body = self.rfile.read(length) if length else b""
        return self.server.repository.answer(self.command, self.path, self.headers, body)

    def _send_head(self, response: Response) -> None:
        self.send_response_only(response.status)
        for name, value in {**_SAFE, **response.headers}.items():
            self.send_header(name, value)
        self.send_header("Date", formatdate(usegmt=True))
        if response.status != 304:
            self.send_header("Content-Length", str(response.length))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()


_SAFE = {"Server": "transaxle", "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
"""Headers of every response."""


class _Server(ThreadingHTTPServer):
    """The sockets of a server, and who may use it.

    Args:
        address: host and port.
        repository: what is served.
        token: the token that requests need; empty on the loopback, if none is needed.
        log: function that gets a line of text for each request.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = _MOST_CONNECTIONS
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], repository: Repository, token: str, log: Callable[[str], None]):
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.repository, self.log = repository, log
        self._token, self._on_loopback = token, is_loopback(address[0])
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._excess = set[socket.socket]()
        """Connections beyond those that are served at the same time."""
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def refusal(self, headers: Headers, connection: socket.socket) -> Response | None:
        """Return the response to a request that may not read anything; None if it may."""
        if connection in self._excess:
            return _problem(503, f"{_MOST_CONNECTIONS} connections are open; try again", headers={"Retry-After": "1"})
        if self._on_loopback and not _names_loopback(headers.get("Host", "")):
            return _problem(403, "the header Host must be the address of the loopback")
        if not self._token:
            return None
        scheme, _, given_token = headers.get("Authorization", "").partition(" ")
        matches = hmac.compare_digest(given_token.strip().encode("utf-8", "replace"), self._token.encode())
        if matches and scheme.lower() == "bearer":
            return None
        message = "Invalid credentials in Authorization header" if given_token else "a token is needed: set HF_TOKEN"
        return _problem(401, message, headers={"WWW-Authenticate": "Bearer"})

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, or close it if there are far too many."""
        thread = threading.Thread(target=self._run, args=(request, client_address), daemon=True)
        with self._lock:
            count = len(self._connections)
            accepted = count < _MOST_CONNECTIONS + _MOST_REFUSED
            if accepted:
                self._connections[request] = thread
            if accepted and count - len(self._excess) >= _MOST_CONNECTIONS:
                self._excess.add(request)
        if accepted:
            thread.start()
        else:
            self.shutdown_request(request)

    def _run(self, request: socket.socket, client_address: Any) -> None:
        try:
            self.process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._connections.pop(request, None)
                self._excess.discard(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Report an error that no response could be made of; a client that has gone is none."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.log(f"internal error: {type(error).__name__}: {error}")

    def server_close(self) -> None:
        """Close the server's socket and all connections, and wait for their threads."""
        super().server_close()
        with self._lock:
            connections = dict(self._connections)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in connections.values():
            thread.join(_SECONDS)


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only; a host name other than `localhost` counts as
    reachable from elsewhere.
    """
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def _names_loopback(header: str) -> bool:
    """Return whether the header `Host` of a request has an address of the loopback, as URLs of local servers do."""
    host = header.rpartition("]")[0].removeprefix("[") if header.startswith("[") else header.partition(":")[0]
    return is_loopback(host.lower())


class HubServer:
    """A checkpoint that is being served, until `close`; a context manager.

    Attributes:
        plan: the plan whose files are served.
        files: the files.
        name: name of the repository.
        commit: commit of its branch `main`, 40 hex digits.
        host: address on which the server listens.
        url: address of the server, for `HF_ENDPOINT`.
        token: the token that requests need; empty if they need none.
    """

    def __init__(
        self,
        files: PlannedFiles,
        plan: Plan,
        name: str,
        address: tuple[str, int],
        token: str,
        log: Callable[[str], None],
        resources: ExitStack,
    ) -> None:
        host, port = address
        repository = Repository(name, files)
        try:
            self._server = _Server((host, port), repository, token, log)
        except (OSError, UnicodeError) as error:
            resources.close()
            cause = error if isinstance(error, OSError) else OSError(str(error))
            raise storage_error(cause, "listening", f"{host}:{port}") from error
        self._resources, self.host = resources, host
        self.plan, self.files, self.name, self.commit, self.token = plan, files.files, name, repository.commit, token
        shown = socket.gethostname() if host in {"0.0.0.0", "::", ""} else host
        self.url = f"http://{f'[{shown}]' if ':' in shown else shown}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which clients of the hub use this server."""
        return {"HF_ENDPOINT": self.url, **({"HF_TOKEN": self.token} if self.token else {})}

    def wait(self) -> None:
        """Return when the server has been closed by another thread."""
        while self._thread.is_alive():
            self._thread.join(1.0)

    def close(self) -> None:
        """Stop serving: close all connections, and the checkpoint if `serve` opened it."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<hub {self.name} at {self.url}, commit {self.commit[:8]}>"


def repository_name(name: str | None, path: str) -> str:
    """Return the name of the repository: the given name, or else the last part of the checkpoint's path.

    Raises:
        UsageError: with code AMBIGUOUS, if clients of the hub would not accept the name.
    """
    chosen = name
    if chosen is None:
        location = without_commit(path).rstrip("/")
        chosen = PurePath(location if "://" in location else os.path.realpath(location)).name
    if _REPOSITORY.fullmatch(chosen) and not _FORBIDDEN.search(chosen):
        return chosen
    message = f"{chosen!r} is not a name that clients of a hub accept: letters, digits, - _ . and one / at most"
    raise refuse("AMBIGUOUS", message, hint="Choose one with --name ORG/MODEL.")


def read_token(path: str | None, host: str) -> str:
    """Return the token that requests need: that of a file, or a new one if the host is not the loopback; else empty.

    Raises:
        UsageError: with code AMBIGUOUS, if the file does not hold a token of at least 16 characters.
        StorageError: with code IO, if the file cannot be read.
    """
    if path is None:
        return "" if is_loopback(host) else secrets.token_urlsafe(32)
    token = read_file(path, _LARGEST_TOKEN).decode("latin-1").strip()
    if len(token) < _SHORTEST_TOKEN or not _TOKEN.fullmatch(token):
        message = f"the file must hold a token: at least {_SHORTEST_TOKEN} characters of ASCII, without spaces"
        hint = 'Make one: python -c "import secrets; print(secrets.token_urlsafe())".'
        raise refuse("AMBIGUOUS", message, file=path, hint=hint)
    return token
