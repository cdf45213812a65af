"""Hubs that refuse, fail for a moment, or lie: a reason that says what to do, in bounded time, without secrets."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import transaxle as tx
from tests.checkpoints import GATE, WHOLE, read, tiny
from tests.formats.hub_server import SIGNATURE, TOKEN, Handler, Hub, files_of
from tests.work import peak
from transaxle.errors import TransaxleError
from transaxle.formats.store import hub as hub_requests
from transaxle.formats.store.hub import ATTEMPTS, LONGEST_WAIT, HubService, redirect_target

NAME = "owner/tiny-qwen3"
BLOCK = b"\0" * (1 << 20)


def refused(read: Callable[[], object]) -> TransaxleError:
    with pytest.raises(TransaxleError) as caught:
        read()
    error = caught.value
    assert TOKEN not in str(error)
    assert SIGNATURE not in str(error)
    assert error.__cause__ is None
    assert error.__context__ is None or error.__suppress_context__
    return error


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that would have been waited."""
    made: list[float] = []
    monkeypatch.setattr("time.sleep", made.append)
    return made


@pytest.fixture
def local(hub: Hub, tmp_path: Path) -> Path:
    """A checkpoint, which is in the hub too."""
    folder = tiny(tmp_path / "local")
    hub.put(NAME, files_of(folder))
    return folder


def opened_and_read() -> bytes:
    with tx.open(f"hf://{NAME}") as there:
        return there[GATE].tobytes()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("https://hub/a", "http://hub/a"),
        ("https://hub/a", "http://cdn.example/x"),
        ("https://hub/a", "HTTP://cdn.example/x"),
        ("https://hub/a", "file:///etc/passwd"),
        ("http://hub/a", "file:///etc/passwd"),
        ("http://hub/a", "ftp://other/a"),
        ("http://hub/a", "data:text/plain,x"),
        ("http://hub/a", "s3://bucket/a"),
        ("http://hub/a", "gopher://hub:70/1"),
        ("http://hub/a", "http://[::1"),
        ("http://hub/a", "http://hub:port/"),
    ],
)
def test_redirects_that_are_refused(before: str, after: str) -> None:
    error = refused(lambda: redirect_target(before, after))
    assert (error.code, bool(error.hint)) == ("IO", True)


@pytest.mark.parametrize("what", ["/revision/", "/tree/", "/resolve/", "/api/resolve-cache/"])
def test_other_hosts_do_not_get_the_token(hub: Hub, local: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    def meddle(handler: Handler) -> bool:
        if handler.host == "large" and "/thief" in handler.path:
            handler.answer(404)
            return True
        if handler.host == "hub" and what in handler.path:
            handler.answer(302, Location=f"{hub.large}/thief")
            return True
        return False

    hub.meddle = meddle
    assert refused(opened_and_read).code == "IO"
    stolen = [each for each in hub.asked("large") if "/thief" in each.path]
    assert stolen
    assert not any("authorization" in each.headers or TOKEN in str(each.headers) for each in stolen)
    assert all(each.headers["authorization"] == f"Bearer {TOKEN}" for each in hub.asked("hub"))


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_redirects_without_end(hub: Hub, local: Path, method: str) -> None:
    def meddle(handler: Handler) -> bool:
        if handler.command != method or "/api/models" in handler.path:
            return False
        handler.answer(302, Location=f"{handler.path}x")
        return True

    hub.meddle = meddle
    assert "redirects without end" in str(refused(opened_and_read))
    assert len(hub.seen) < 40


@pytest.mark.parametrize(
    ("case", "message", "hint"),
    [
        ("missing", "has no repository owner/other", "hf auth login"),
        ("private", "has no repository owner/tiny-qwen3 that everybody may see", "If it is private"),
        ("revision", "owner/tiny-qwen3 has no revision 'v9'", "/tree/main"),
        ("gated", "is gated", "Ask for access"),
        ("token", "does not accept the token", "log in again"),
        ("forbidden", "access to owner/tiny-qwen3 is denied (not for you)", "permissions"),
        ("disabled", "has disabled", "/owner/tiny-qwen3"),
        ("teapot", "answers 418", "later"),
    ],
)
def test_refusals_say_what_to_do(
    hub: Hub, local: Path, monkeypatch: pytest.MonkeyPatch, case: str, message: str, hint: str
) -> None:
    repository = hub.repositories[f"models/{NAME}"]
    repository.private, repository.gated = case == "private", case == "gated"
    answers = {
        "forbidden": (403, "", "not for you"),
        "disabled": (403, "", "Access to this resource is disabled."),
        "teapot": (418, "", ""),
        "token": (401, "", f"Invalid credentials in Authorization header: Bearer {TOKEN}x"),
    }
    if case in answers:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        hub.meddle = lambda handler: handler.refuse(*answers[case])
    url = {"missing": "hf://owner/other", "revision": f"hf://{NAME}@v9"}.get(case, f"hf://{NAME}")
    error = refused(lambda: tx.open(url))
    assert (error.code, error.exit_code) == ("IO", 4)
    assert message in str(error)
    assert hint in error.hint
    assert "\n" not in error.refusals[0].message


def test_a_token_that_no_header_can_hold(hub: Hub, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}\u00e4")
    assert "log in again" in refused(opened_and_read).hint
    assert hub.seen == []


@pytest.mark.parametrize("endpoint", ["ftp://hub", "hub.example", "file:///etc", "http://", "http://[::1"])
def test_a_hub_without_an_address(hub: Hub, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    error = refused(opened_and_read)
    assert (error.code, "HF_ENDPOINT" in error.hint) == ("UNSUPPORTED", True)


def test_an_address_where_nobody_answers(hub: Hub, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    from huggingface_hub import constants

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        error = refused(opened_and_read)
    assert ("cannot be read" in str(error), "HF_ENDPOINT" in error.hint) == (True, True)
    assert len(waits) == ATTEMPTS - 1


def _reset(handler: Handler) -> None:
    linger = struct.pack("ii", 1, 0)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    handler.close_connection = True
    handler.connection.close()


def _cut(handler: Handler) -> None:
    handler.send_response(206)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    handler.wfile.write(b"begun")
    handler.close_connection = True


def answers(status: int, body: bytes = b"", **headers: str) -> Callable[[Handler], bool]:
    return lambda handler: handler.answer(status, body, **headers)


FAILURES: dict[str, Callable[[Handler], object]] = {
    "unavailable": answers(503),
    "internal": answers(500),
    "busy": answers(429, Retry_After="7"),
    "rate": answers(429, RateLimit='"resolvers";r=0;t=55'),
    "reset": _reset,
    "cut": _cut,
}


@pytest.mark.oracle
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("host", ["hub", "large"])
def test_what_fails_a_moment_is_asked_again(hub: Hub, local: Path, waits: list[float], host: str, failure: str) -> None:
    failed: dict[tuple[str, str], int] = {}

    def meddle(handler: Handler) -> bool:
        request = handler.command, handler.path
        if handler.host != host or failed.get(request, 0) == 2 or (failure == "cut" and handler.command == "HEAD"):
            return False
        failed[request] = failed.get(request, 0) + 1
        FAILURES[failure](handler)
        return True

    hub.meddle = meddle
    assert opened_and_read() == read(local)[GATE].tobytes()
    assert waits
    least = {"busy": 7, "rate": 55}.get(failure, 0.5)
    assert all(least <= wait <= max(least, 20) for wait in waits)


@pytest.mark.oracle
@pytest.mark.parametrize("failure", FAILURES)
def test_what_fails_for_ever_ends(hub: Hub, local: Path, waits: list[float], failure: str) -> None:
    def meddle(handler: Handler) -> bool:
        if handler.host == "hub":
            return False
        FAILURES[failure](handler)
        return True

    hub.meddle = meddle
    error = refused(opened_and_read)
    assert (error.code, error.where.file, bool(error.hint)) == ("IO", WHOLE, True)
    assert len(hub.asked("large")) == ATTEMPTS


def test_nobody_waits_for_hours(hub: Hub, local: Path, waits: list[float]) -> None:
    hub.meddle = lambda handler: handler.answer(429, Retry_After=str(int(LONGEST_WAIT) + 1))
    assert "come back in 301 seconds" in str(refused(opened_and_read))
    assert waits == []


def test_a_server_that_stalls(hub: Hub, local: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sends a little again and again has a time too."""
    monkeypatch.setattr(hub_requests, "_MAX_SECONDS", -1.0)
    assert "has not sent" in str(refused(opened_and_read))


def _endless(handler: Handler) -> None:
    handler.send_response(206 if handler.host == "large" else 200)
    handler.end_headers()
    handler.close_connection = True
    try:
        for _ in range(200):
            handler.wfile.write(BLOCK)
            handler.seen.sent += len(BLOCK)
    except OSError:
        return


def _ranged(handler: Handler, text: str, body: bytes | None = None) -> None:
    first, last = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
    named = {"Content_Range": text.format(first=first, last=last, next=first + 1)} if text else {}
    handler.answer(206, b"\0" * (last + 1 - first) if body is None else body, **named)


LIES: dict[str, tuple[str, Callable[[Handler], object], str, str]] = {
    "whole file": ("large", answers(200, BLOCK), "IO", "sent more than the"),
    "less": ("large", answers(200, b"x" * 10), "IO", "but the server sent 10"),
    "no range": ("large", partial(_ranged, text=""), "IO", "sent others"),
    "other range": ("large", partial(_ranged, text="bytes {next}-{last}/*"), "IO", "sent others"),
    "other size": ("large", partial(_ranged, text="bytes {first}-{last}/123"), "CORRUPT", "the server has 123"),
    "endless number": ("large", partial(_ranged, text="bytes {first}-{last}/" + "9" * 5000), "IO", "sent others"),
    "short": ("large", partial(_ranged, text="bytes {first}-{last}/*", body=b"x"), "IO", "but the server sent 1"),
    "no such range": ("large", answers(416), "CORRUPT", "ends before"),
    "endless": ("large", _endless, "IO", "sent more than the"),
    "compressed": ("large", answers(206, b"x", Content_Encoding="gzip"), "IO", "compresses"),
    "denied": ("large", answers(403, b"<Error/>"), "IO", "answers 403"),
    "commit": ("hub", answers(302, Location="/x", X_Repo_Commit="0" * 40), "CORRUPT", "commit"),
    "size": ("hub", answers(302, Location="/x", X_Linked_Size="5"), "CORRUPT", "its bytes"),
    "hash": (
        "hub", answers(302, Location="/x", X_Linked_Size="", X_Linked_ETag='"0"'), "CORRUPT", "its hash|redirects"),
    "no list": ("tree", answers(200, b"<html>"), "IO", "none of a hub"),
    "other list": ("tree", answers(200, b'[{"type": "file", "path": 3}]'), "IO", "none of a"),
    "negative": (
        "tree", answers(200, json.dumps([{"type": "file", "path": "x", "size": -1}]).encode()), "IO", "none of a hub"),
    "endless list": ("tree", _endless, "IO", "sent more than the"),
    "list elsewhere": ("tree", answers(200, b"[]", Link='<http://127.0.0.1:9/x>; rel="next"'), "IO", "at another host"),
    "list in a circle": ("tree",
        lambda handler: handler.answer(200, b"[]", Link=f'<{handler.hub.url}{handler.path}>; rel="next"'),
        "UNSUPPORTED", "more than 100 pages"),
    "no commit": ("revision", answers(200, b'{"sha": "main"}'), "IO", "commit"),
    "no revision": ("revision", answers(200, b"[]"), "IO", "none of a hub"),
}  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("lie", LIES)
def test_a_hub_that_lies_is_refused(hub: Hub, local: Path, monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    host, answer, code, said = LIES[lie]

    def meddle(handler: Handler) -> bool:
        place = handler.host if host in ("hub", "large") else next(iter(handler.path.split("/")[5:6]), "")
        if place != host or (host == "hub" and "/resolve/" not in handler.path):
            return False
        answer(handler)
        return True

    hub.meddle = meddle
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    def read() -> None:
        with pytest.raises(TransaxleError, match=said) as caught:
            opened_and_read()
        assert caught.value.code == code

    assert peak(read) < 64 << 20
    assert hub.sent < 100 << 20


def test_small_files_may_come_whole(hub: Hub, local: Path) -> None:
    """Those that the hub keeps itself, where it does not know ranges."""
    text = (local / "config.json").read_bytes()

    def meddle(handler: Handler) -> bool:
        return "/resolve-cache/" in handler.path and handler.answer(200, text)

    hub.meddle = meddle
    service = HubService(f"hf://{NAME}")
    assert service.fetch("/config.json", 3, 10, "config.json") == text[3:10]
    assert service.fetch("/config.json", 3, 3, "config.json") == b""
    hub.meddle = lambda handler: "/resolve-cache/" in handler.path and handler.answer(200, text + b"x")
    assert refused(lambda: service.fetch("/config.json", 3, 10, "config.json")).code == "IO"
    assert refused(lambda: service.fetch("/absent.json", 3, 10, "absent.json")).code == "IO"


def test_a_repository_that_has_another_name_now(hub: Hub, local: Path) -> None:
    def meddle(handler: Handler) -> bool:
        return NAME in handler.path and handler.answer(308, Location=handler.path.replace(NAME, "owner/other"))

    hub.repositories["models/owner/other"] = hub.repositories[f"models/{NAME}"]
    hub.meddle = meddle
    assert opened_and_read() == read(local)[GATE].tobytes()


def test_a_mirror_that_redirects_to_a_hub(hub: Hub, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is for the mirror, whose address was given, and which file it is says the hub."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    lies = False

    def meddle(handler: Handler) -> bool:
        if handler.host == "hub":
            return handler.answer(308, Location=f"{hub.large}{handler.path}")
        if lies and "/resolve/" in handler.path:
            return handler.answer(302, Location="/x", X_Linked_Size="5")
        if f"/{NAME}/" in handler.path:
            handler.answer_of_hub()
            return True
        return False

    hub.meddle = meddle
    assert opened_and_read() == read(local)[GATE].tobytes()
    assert hub.asked("hub")
    assert not any("authorization" in each.headers for each in hub.asked("large"))
    lies = True
    assert refused(opened_and_read).code == "CORRUPT"


def test_no_log_holds_the_token(
    hub: Hub, local: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    caplog.set_level("DEBUG")
    opened_and_read()
    assert caplog.records
    assert TOKEN not in caplog.text


def test_a_commit_that_the_hub_exchanges(hub: Hub, local: Path) -> None:
    asked = "a" * 40
    hub.meddle = lambda handler: handler.answer(200, json.dumps({"sha": "b" * 40}).encode())
    error = refused(lambda: tx.open(f"hf://{NAME}@{asked}"))
    assert (error.code, asked in str(error)) == ("CORRUPT", True)


@pytest.mark.parametrize("name", ["../escaped.json", "/etc/passwd", "a\\..\\b.json", "..", "config.json/../x.json"])
def test_lists_that_lead_out(hub: Hub, local: Path, name: str) -> None:
    hub.repositories[f"models/{NAME}"].commits[hub.repositories[f"models/{NAME}"].revisions["main"]][name] = b"{}"
    with tx.open(f"hf://{NAME}") as there:
        assert there.container.carried == ("config.json",)
        tx.convert(there, local.parent / "out", to="hf")
    assert not (local.parent / "escaped.json").exists()
