"""Wrong answers of a server at vLLM's address, and secrets in its URL that are never shown."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from inspect import signature
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import transaxle as tx
from transaxle.refit import hops, vllm_refit
from transaxle.refit.vllm_refit import _OPTIONS, VllmRefit, _Engines, _invitation, control

USER, PASSWORD = "trainer", "s3cr/et+pass"
ENCODED = "s3cr%2Fet+pass"
LOGIN = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
SECRETS = (PASSWORD, ENCODED, LOGIN)
FORMS = (PASSWORD, ENCODED, quote(PASSWORD, ""), quote(PASSWORD), LOGIN, f"http:\\/\\/{USER}:{ENCODED}@host")
"""As a server may repeat them."""
DEFAULTS: Mapping[str, Any] = {name: signature(VllmRefit.__init__).parameters[name].default for name in _OPTIONS}
"""How weights are moved into vLLM where nothing else is asked for."""


class Vllm(BaseHTTPRequestHandler):
    """A server that gives a set answer and records the requests."""

    asked: list[tuple[str, str, Any]]
    login = ""

    def _take(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.asked.append((self.command, self.path, json.loads(body or b"null")))
        type(self).login = self.headers.get("Authorization", "")
        if self.path == "/get_world_size":
            self._answer(200, b'{"world_size": 2}')
        elif self.path == "/update_weights":  # as FastAPI, which repeats what it was sent
            text = f"422 for {self.headers.get('Authorization')}\nfrom http://{USER}:{ENCODED}@host/?token=abc"
            self._answer(422, text.encode() + b"\n" + body)
        else:
            self._answer(200, b"")

    def do_GET(self) -> None:
        self._take()

    def do_POST(self) -> None:
        self._take()

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def serving(kind: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """Serve, at a port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture
def vllm() -> Iterator[tuple[type[Vllm], int]]:
    kind = type("Handler", (Vllm,), {"asked": []})
    with serving(kind) as port:
        yield kind, port


def test_a_login_is_sent_and_never_shown(vllm: tuple[type[Vllm], int]) -> None:
    kind, port = vllm
    one = control(f"http://{USER}:{ENCODED}@127.0.0.1:{port}/", None, 5)
    assert one.workers() == 2
    assert kind.login == f"Basic {LOGIN}"
    one.init({"secret": "of the meeting", "address": "127.0.0.1:1"})
    assert kind.asked[-1][2]["init_info"]["secret"] == "of the meeting"
    with pytest.raises(tx.TransaxleError) as found:
        one.update({"only": [], "secret": "of the meeting"})
    said = str(found.value)
    assert "update_weights answered 422" in said
    assert f"127.0.0.1:{port}" in said
    assert not [each for each in (*SECRETS, "of the meeting", "abc") if each in said]
    one.finish("7")
    assert kind.asked[-1] == ("POST", "/finish_weight_update", {"weight_version": "7"})
    one.pause()
    assert kind.asked.pop() == ("POST", "/pause?mode=wait&clear_cache=true", None)


def _raw(answer: bytes, *, stays: bool = False) -> tuple[int, threading.Thread, list[bytes]]:
    """Answer anything with some bytes; return the port, and what was asked."""
    listener = socket.create_server(("127.0.0.1", 0))
    asked: list[bytes] = []

    def serve() -> None:
        with listener, listener.accept()[0] as one, suppress(OSError):
            one.settimeout(20)
            data = b""
            while b"\r\n\r\n" not in data:
                data += one.recv(1 << 16)
            asked.append(data)
            one.sendall(answer)
            begun = time.monotonic()
            while stays and time.monotonic() - begun < 15:  # byte by byte, for ever
                one.sendall(b" ")
                time.sleep(0.1)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return listener.getsockname()[1], thread, asked


OK = b"HTTP/1.1 200 OK\r\n"
WRONG = {
    "nothing": (b"", "cannot be reached"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "cannot be reached"),
    "a bad status line": (b"HTTP/1.1 nonsense\r\n\r\n", "cannot be reached"),
    "a cut answer": (OK + b"Content-Length: 100\r\n\r\n{", "cannot be reached"),
    "bad chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", "cannot be reached"),
    "headers without end": (OK + b"X: y\r\n" * 200_000, "cannot be reached"),
    "no JSON": (OK + b"Content-Length: 12\r\n\r\n<html></html", "answered no JSON"),
    "deep JSON": (OK + b"Content-Length: 200000\r\n\r\n" + b"[" * 200_000, "answered no JSON"),
    "no UTF-8": (OK + b"Content-Length: 2\r\n\r\n\xff\xfe", "answered no JSON"),
    "a list": (OK + b"Content-Length: 2\r\n\r\n[]", "does not say how many workers"),
    "a text": (OK + b'Content-Length: 19\r\n\r\n{"world_size": "2"}', "does not say how many workers"),
    "none": (OK + b'Content-Length: 17\r\n\r\n{"world_size": 0}', "does not say how many workers"),
    "very many": (OK + b'Content-Length: 27\r\n\r\n{"world_size": 99999999999}', "does not say how many workers"),
    "without end": (OK + b"\r\n" + b" " * (3 << 20), "sent more than 1,048,576 bytes"),
    "a redirect": (
        b"HTTP/1.1 302 Found\r\nLocation: http://u:pw-of-another@127.0.0.1:9/x?sig=s\r\nContent-Length: 0\r\n\r\n",
        "redirects to http://u:…@127.0.0.1:9/x",
    ),
    "a redirect to a file": (
        b"HTTP/1.1 307 Go\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n", "nothing was sent there"
    ),
    "an error": (b"HTTP/1.1 500 No\r\nContent-Length: 4\r\n\r\nwhy?", "answered 500: why?"),
    "nothing at all": (b"HTTP/1.1 204 None\r\n\r\n", "does not say how many workers"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_an_io_error(name: str) -> None:
    answer, text = WRONG[name]
    port, thread, asked = _raw(answer)
    with pytest.raises(tx.TransaxleError) as found:
        control(f"http://{USER}:{ENCODED}@127.0.0.1:{port}", None, 3).workers()
    thread.join(20)
    assert found.value.code == "IO"
    assert text in str(found.value)
    assert "pw-of-another" not in str(found.value)
    assert not [each for each in SECRETS if each in str(found.value)]
    assert found.value.__cause__ is None  # whose text a traceback would show
    assert len(asked) == 1


@pytest.mark.parametrize("before", [0, 1990])
def test_passwords_are_never_shown(before: int) -> None:
    """Also where the shown part of an answer ends inside the password."""
    for form in FORMS:
        body = f"{'x' * before} {form} ".encode()
        for line in (b"HTTP/1.1 200 OK", b"HTTP/1.1 401 No"):
            port, thread, _ = _raw(line + f"\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            with pytest.raises(tx.TransaxleError) as found:
                control(f"http://{USER}:{ENCODED}@127.0.0.1:{port}", None, 3).workers()
            thread.join(20)
            said = str(found.value)
            assert not [each for each in (*FORMS, "s3c", LOGIN[:3]) if each in said], form


def test_a_machine_without_an_address_gets_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    with pytest.raises(tx.TransaxleError, match="has no address: Name or service not known") as found:
        control(_Talkative(), 1, 1).local_host()
    assert "Give address=" in found.value.hint


def test_an_endless_answer_times_out() -> None:
    port, _, _ = _raw(OK + b"\r\n", stays=True)
    begun = time.monotonic()
    with pytest.raises(tx.TransaxleError, match="did not end its answer in 1 s"):
        control(f"http://127.0.0.1:{port}", None, 1).workers()
    assert time.monotonic() - begun < 8


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", f"ftp://{USER}:{ENCODED}@host/x", f"http://{USER}:{ENCODED}@", "127.0.0.1:8000", "",
        f"http://{USER}:{ENCODED}@host:port", f"http://host/?token={ENCODED}", "http://[::1", f"unix://{ENCODED}",
        "http://" + "x" * 70_000,
    ],
)  # fmt: skip
def test_invalid_addresses_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="engine must be a URL such as") as found:
        control(url, None, 1)
    assert PASSWORD not in str(found.value)
    assert ENCODED not in str(found.value) or url.startswith("unix")


def test_messages_name_urls_without_secrets() -> None:
    with pytest.raises(TypeError) as found:
        control(f"http://{USER}:{ENCODED}@host".encode(), None, 1)
    assert ENCODED not in str(found.value)


def test_proxy_variables_are_ignored(
    vllm: tuple[type[Vllm], int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login other password another\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    assert control(f"http://127.0.0.1:{vllm[1]}", None, 5).workers() == 2
    assert vllm[0].login == ""


def test_without_httpx_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "httpx", None)
    with pytest.raises(tx.TransaxleError, match="no installed package speaks HTTP to vLLM") as found:
        control("http://127.0.0.1:1", None, 1)
    assert (found.value.code, "pip install" in found.value.hint) == ("UNSUPPORTED", True)


class _Talkative:
    """A client whose errors repeat what it was told."""

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.info = info
        if info["address"]:
            raise RuntimeError(f"cannot send {info}")

    def start_weight_update(self) -> None:
        raise AssertionError("nothing has begun")

    update_weights = finish_weight_update = start_weight_update


def test_each_meeting_has_its_own_secret_and_no_error_shows_it() -> None:
    clients = [_Talkative() for _ in range(2)]
    engines = [_Engines(each, {**DEFAULTS, "workers": 1}) for each in clients]
    meetings = [each.prepare("127.0.0.1:1", 1, _invitation(DEFAULTS)) for each in engines]
    assert meetings[0] is not None
    assert meetings[1] is not None
    assert len(meetings[0].secret) == 64
    assert meetings[0].secret != meetings[1].secret
    assert clients[0].info["secret"] == ""  # before anybody is to come
    assert meetings[0].secret not in repr(meetings[0])
    info = meetings[0].as_json()
    with pytest.raises(tx.TransaxleError, match="vLLM could not do it: cannot send") as found:
        engines[0].each(lambda one, _: one.init(info))
    assert info["secret"] not in str(found.value)
    assert info["secret"] in clients[0].info["secret"]
    assert found.value.__cause__ is None


def test_the_address_is_one_of_this_machine_as_the_engine_reaches_it(vllm: tuple[type[Vllm], int]) -> None:
    host = control(f"http://127.0.0.1:{vllm[1]}", None, 5).local_host()
    address, _, port = hops.free_address(host).rpartition(":")
    assert address == "127.0.0.1"
    socket.create_server((address, int(port))).close()
    assert vllm_refit._LONGEST_ANSWER == 1 << 20
