"""Web servers that lie about what they have: refused with a reason, in bounded memory and without waiting for ever."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import transaxle as tx
from tests.checkpoints import write
from tests.work import peak
from transaxle.errors import StorageError, TransaxleError

FILE = "model.safetensors"
BLOCK = b"\0" * (1 << 20)
MOST = 200
"""Blocks after which even the endless server gives up: a client that reads them all has failed the test."""


class _Liar(http.server.BaseHTTPRequestHandler):
    data = b""
    lie = ""
    sent = 0

    def do_HEAD(self) -> None:
        self._head(200, len(self.data) * (2 if self.lie == "longer" else 1) // (2 if self.lie == "shorter" else 1))

    def do_GET(self) -> None:
        if self.lie == "redirects":
            self._head(302, 0)
        elif self.lie in ("endless", "endless page"):
            self._head(206 if self.lie == "endless" else 200, None)
            self._endless()
        elif self.lie == "cut":
            self._head(206, 1 << 20)
            self.wfile.write(self.data[:10])
        else:
            first, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")
            if self.lie == "beginning":
                first, last = "0", str(int(last) - int(first))
            part = self.data if self.lie == "whole" else self.data[int(first) : int(last) + 1]
            self._head(206, len(part), "" if self.lie == "whole" else f"bytes {first}-{last}/{len(self.data)}")
            self.wfile.write(part)

    def _head(self, status: int, length: int | None, sent: str = "") -> None:
        self.send_response(302 if self.lie == "redirects" else status)
        if self.lie == "redirects":
            self.send_header("Location", f"{self.path}x")
        if length is not None:
            self.send_header("Content-Length", "many" if self.lie == "no number" else str(length))
        if sent:
            self.send_header("Content-Range", sent)
        self.send_header("Content-Type", "text/html" if self.lie == "endless page" else "application/octet-stream")
        self.end_headers()

    def _endless(self) -> None:
        try:
            for _ in range(MOST):
                self.wfile.write(BLOCK)
                type(self).sent += 1
        except OSError:
            return  # the client has hung up

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def liar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("aiohttp")
    local = write(tmp_path / "local", {f"w{at}": np.ones((64, 1024), np.float32) for at in range(8)})
    monkeypatch.setattr(_Liar, "data", (local / FILE).read_bytes())
    monkeypatch.setattr(_Liar, "sent", 0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Liar) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/{FILE}"
        server.shutdown()
        thread.join()


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("lie", "code", "said"),
    [
        ("longer", "CORRUPT", "bytes of the file belong to no tensor"),
        ("shorter", "CORRUPT", "truncated"),
        ("no number", "IO", "the service|no such file|opening it"),
        ("whole", "IO", "sent more than the"),
        ("endless", "IO", "sent more than the"),
        ("cut", "IO", "reading"),
        ("beginning", "IO", r"was requested, but the server sent bytes 0-"),
        ("redirects", "IO", "TooManyRedirects"),
    ],
)
def test_a_server_that_lies_is_refused(
    liar: str, lie: str, code: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Liar, "lie", lie)

    def read() -> None:
        with pytest.raises(TransaxleError, match=said) as caught, tx.open(liar) as there:
            there["w7"].read()
        assert caught.value.code == code
        if "sent more than the" in said or "the server sent" in said:
            assert "range" in caught.value.hint

    assert peak(read) < 32 << 20
    assert _Liar.sent < MOST // 2


def test_a_page_without_an_end_is_no_list_of_a_folder(liar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Liar, "lie", "endless page")

    def read() -> None:
        with pytest.raises(StorageError, match="sent more than the 16,777,216 bytes"):
            tx.open(liar.removesuffix(FILE))

    assert peak(read) < 96 << 20
    assert _Liar.sent < MOST // 2
