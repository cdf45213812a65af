"""A proxy before the S3 server that fails as stores do, or is as slow as they are: errors, resets, cuts, stalls."""

from __future__ import annotations

import http.client
import http.server
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal
from urllib.parse import urlsplit

Fault = Literal["slow down", "error", "forbidden", "reset", "truncate", "stall", "lost", "late", "shift"]
"""`lost`: it is carried out, and there is no answer; `late`: so too, after `FaultyProxy.delay`; `shift`: as many
bytes as were asked for are sent from the beginning of the file."""
_ANSWERS: dict[Fault, tuple[int, bytes]] = {
    "slow down": (503, b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"),
    "error": (500, b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"),
    "forbidden": (403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"),
}
_PIECE = 64 << 10


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
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            headers["Content-Length"] = str(len(body))
            if fault == "shift":
                first, last = map(int, headers["Range"].removeprefix("bytes=").split("-"))
                headers["Range"] = f"bytes=0-{last - first}"
            upstream.request(self.command, self.path, body, headers)
            answer = upstream.getresponse()
            data = answer.read()
            kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP]
        finally:
            upstream.close()
        if fault in ("lost", "late"):
            self.server.carried_out.set()
            self.close_connection = True
        elif self.command == "HEAD":
            kept.append(("Content-Length", answer.getheader("Content-Length", "0")))
            self._answer(answer.status, kept, b"", length=None)
        elif fault == "truncate":
            self._answer(answer.status, kept, data[: len(data) // 2], length=len(data) or 10)
            self.close_connection = True
        else:
            self._answer(answer.status, kept, data)

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

    def do_GET(self) -> None:
        self._forward()

    def do_PUT(self) -> None:
        self._forward()

    def do_POST(self) -> None:
        self._forward()

    def do_DELETE(self) -> None:
        self._forward()

    def do_HEAD(self) -> None:
        self._forward()

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
