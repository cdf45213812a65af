"""A proxy before the S3 server that fails as stores do, or is as slow as they are: errors, resets, cuts, stalls."""

from __future__ import annotations

import asyncio
import http.client
import http.server
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import fsspec
import pytest

from tests.formats.s3_server import Bucket
from transaxle.engine.distribute.item_work import close_plan
from transaxle.formats.store import multipart

LIMITS = {"config_kwargs": {"read_timeout": 1, "connect_timeout": 1, "retries": {"max_attempts": 2}}}
"""Settings of the client: what it waits for, and how often it tries by itself."""
Fault = Literal["slow down", "error", "forbidden", "reset", "truncate", "stall", "lost", "late", "shift"]
"""`lost`: it is carried out, and there is no answer; `late`: so too, after `FaultyProxy.delay`; `shift`: as many
bytes as were asked for are sent from the beginning of the file."""
_ANSWERS: dict[Fault, tuple[int, bytes]] = {
    "slow down": (503, b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"),
    "error": (500, b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"),
    "forbidden": (403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"),
}
_PIECE = 64 << 10


@dataclass
class Exchange:
    """A request and its answer, to be changed on the way."""

    method: str
    path: str
    headers: dict[str, str]
    """Of the request, in small letters."""
    body: bytes
    status: int = 0
    answered: dict[str, str] = field(default_factory=dict)
    """Headers of the answer."""
    data: bytes = b""

    @property
    def completes(self) -> bool:
        """Whether it lets a file appear that was sent in parts."""
        return self.method == "POST" and "uploadId=" in self.path

    @property
    def appears(self) -> bool:
        """Whether it lets a file appear in one of the two ways, and not beside the target."""
        put = self.method == "PUT" and "partNumber" not in self.path and "partial/" not in self.path
        return self.completes or put

    def answer(self, status: int, code: str) -> None:
        """Answer with an error."""
        self.status, self.data = status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self.answered = {"Content-Type": "application/xml"}


class FaultyProxy(http.server.ThreadingHTTPServer):
    """Forwards requests.

    Args:
        upstream: address of the server.
        latency: seconds before each answer.
        rate: bytes a second of each connection and direction; 0: no limit.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: str, *, latency: float = 0.0, rate: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        if rate:  # what is sent does not wait here, where the client takes it for received
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * _PIECE)
        self.upstream = urlsplit(upstream).netloc
        self.latency = latency
        self.rate = rate
        self.fails: Callable[[str, str], Fault | None] = lambda _method, _path: None
        """Tells how a request fails."""
        self.asks: Callable[[Exchange], None] = lambda _exchange: None
        """Changes a request on its way; where it has an answer then, it is not carried out."""
        self.answers: Callable[[Exchange], None] = lambda _exchange: None
        """Changes an answer on its way."""
        self.failed = 0
        """Requests that did."""
        self.delay = 0.0
        """Seconds until what is late is carried out."""
        self.carried_out = threading.Event()
        """Something that was late is."""
        self.released = threading.Event()
        """Ends what stalls."""

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: Any) -> None:
        """Say nothing: connections that break are what it is for."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FaultyProxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _forward(self) -> None:
        fault = self.server.fails(self.command, self.path)
        if fault is not None:
            self.server.failed += 1
        if fault == "stall":
            self.server.released.wait(60)
            self.close_connection = True
            return
        body = self._body()
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        time.sleep(self.server.latency)
        if fault in _ANSWERS:
            status, text = _ANSWERS[fault]
            self._answer(status, [("Content-Type", "application/xml")], text)
            return
        if fault == "late":
            self.server.released.wait(self.server.delay)
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=60)
        try:
            headers = {name.lower(): value for name, value in self.headers.items() if name.lower() not in _HOP}
            if fault == "shift":
                first, last = map(int, headers["range"].removeprefix("bytes=").split("-"))
                headers["range"] = f"bytes=0-{last - first}"
            exchange = Exchange(self.command, self.path, headers, body)
            self.server.asks(exchange)
            length = "0"
            if not exchange.status:
                headers["content-length"] = str(len(exchange.body))
                upstream.request(self.command, self.path, exchange.body, headers)
                answer = upstream.getresponse()
                length = answer.getheader("Content-Length", "0")
                exchange.status, exchange.data = answer.status, answer.read()
                exchange.answered = {n: value for n, value in answer.getheaders() if n.lower() not in _HOP}
            self.server.answers(exchange)
            status, kept, data = exchange.status, list(exchange.answered.items()), exchange.data
        finally:
            upstream.close()
        if fault in ("lost", "late"):
            self.server.carried_out.set()
            self.close_connection = True
        elif self.command == "HEAD":
            kept.append(("Content-Length", length))
            self._answer(status, kept, b"", length=None)
        elif fault == "truncate":
            self._answer(status, kept, data[: len(data) // 2], length=len(data) or 10)
            self.close_connection = True
        else:
            self._answer(status, kept, data)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().partition(b";")[0], 16):
                parts.append(self._paced(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self._paced(int(self.headers.get("Content-Length") or 0))

    def _paced(self, size: int) -> bytes:
        """Read no faster than a connection is."""
        parts, left, begun = [], size, time.monotonic()
        while left:
            part = self.rfile.read(min(left, _PIECE))
            if not part:
                raise ConnectionError
            parts.append(part)
            left -= len(part)
            self._wait(begun, size - left)
        return b"".join(parts)

    def _wait(self, begun: float, done: int) -> None:
        if self.server.rate and (rest := begun + done / self.server.rate - time.monotonic()) > 0:
            time.sleep(rest)

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, length: int | None = -1) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(len(data) if length < 0 else length))
        self.end_headers()
        begun = time.monotonic()
        for start in range(0, len(data), _PIECE):
            self.wfile.write(data[start : start + _PIECE])
            self._wait(begun, min(len(data), start + _PIECE))

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward  # noqa: N815 - names of http.server

    def log_message(self, *_: object) -> None:
        """Say nothing."""


_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "expect", "te", "upgrade"})


@contextmanager
def proxied(upstream: str, *, latency: float = 0.0, rate: float = 0.0) -> Iterator[FaultyProxy]:
    """Run a proxy until the block ends."""
    with FaultyProxy(upstream, latency=latency, rate=rate) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.released.set()
            proxy.shutdown()
            thread.join()


@pytest.fixture
def proxy(bucket: Bucket, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy through which our own requests go, and not those of the test."""
    assert bucket.names() == []
    monkeypatch.setitem(fsspec.config.conf, "s3", LIMITS)
    monkeypatch.setattr(multipart, "PATIENCE", 4.0)
    monkeypatch.setattr(multipart, "_PAUSE", 0.05)
    pause = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: pause(seconds / 10))  # between the client's own attempts
    with proxied(s3_server) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        yield found
        close_plan()
        fsspec.get_filesystem_class("s3").clear_instance_cache()
