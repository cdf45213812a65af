"""What the hub of `tx.serve` answers, request by request, and whom it refuses."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import transaxle as tx
from tests.checkpoints import INDEX, WHOLE, tiny
from tests.cli.running import USAGE
from tests.formats.hub_server import files_of
from transaxle import serving
from transaxle.errors import TransaxleError
from transaxle.formats.registry import MANIFEST
from transaxle.serving import HubServer, is_loopback, parse_range, repository_name

NAME = "my-org/tiny"
TOKEN = "a token of sixteen".replace(" ", "-")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub's folder with a file in a sub-folder of its tokenizer."""
    return tiny(tmp_path_factory.mktemp("served") / "hub", shards=2)


@pytest.fixture(scope="module")
def written(source: Path) -> dict[str, bytes]:
    """What `convert` writes, without the manifest."""
    tx.convert(source, source.parent / "out", to="safetensors:torchtitan", shard_size="10KB", sync=False)
    written = files_of(source.parent / "out")
    del written[MANIFEST]
    return written


@pytest.fixture(scope="module")
def hub(source: Path) -> Iterator[HubServer]:
    with tx.serve(source, "safetensors:torchtitan", name=NAME, shard_size="10KB") as hub:
        yield hub


class Reply:
    """The response to one request, on a connection of its own."""

    def __init__(
        self,
        hub: HubServer,
        path: str,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", urlsplit(hub.url).port or 0, timeout=30)
        with closing(connection):
            connection.request(method, path, body, headers or {})
            with closing(connection.getresponse()) as response:
                self.status, self.headers, self.body = response.status, response.headers, response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str | None:
        return self.headers["X-Error-Code"]


def follow(hub: HubServer, file: str, **headers: str) -> Reply:
    """Request a file, and follow the redirect if there is one; in names of headers, _ stands for -."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    reply = Reply(hub, f"/{NAME}/resolve/main/{quote(file)}", headers=names)
    return Reply(hub, reply.headers["Location"], headers=names) if reply.status == 302 else reply


def test_files_and_their_headers(hub: HubServer, written: dict[str, bytes]) -> None:
    assert {*written} == {*hub.files}
    for name, data in written.items():
        head = Reply(hub, f"/{NAME}/resolve/main/{name}", "HEAD")
        assert head.status == (302 if name.endswith(".safetensors") else 200)
        assert head.headers["X-Linked-Size"] == str(len(data))
        assert head.headers["X-Linked-ETag"] == head.headers["ETag"]
        assert head.headers["X-Repo-Commit"] == hub.commit
        assert head.headers["Location"] is None or head.headers["Location"].startswith("/"), "on the same host"
        reply = follow(hub, name)
        assert (reply.status, reply.body) == (200, data)
        assert reply.headers["ETag"] == head.headers["ETag"]
        assert Reply(hub, f"/{NAME}/resolve/{hub.commit}/{name}").status == head.status


def test_ranges(hub: HubServer, written: dict[str, bytes]) -> None:
    shard = max(written, key=lambda name: len(written[name]))
    data, size = written[shard], len(written[shard])
    tag = follow(hub, shard).headers["ETag"]
    for header, start, stop in (
        ("bytes=0-0", 0, 1), ("bytes=10-", 10, size), ("bytes=5-99999999", 5, size), ("bytes=-7", size - 7, size),
        (f"bytes=-{size + 1}", 0, size), (f"bytes={size - 1}-", size - 1, size),
    ):  # fmt: skip
        reply = follow(hub, shard, Range=header)
        assert (reply.status, reply.body) == (206, data[start:stop])
        assert reply.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{size}"
    for header in (f"bytes={size}-", "bytes=-0"):
        reply = follow(hub, shard, Range=header)
        assert (reply.status, reply.headers["Content-Range"]) == (416, f"bytes */{size}")
    for header in ("bytes=", "bytes=-", "bytes=9-1", "bytes=0-1,3-4", "rows=0-1", "bytes=a-b", "bytes=" + "9" * 30):
        assert follow(hub, shard, Range=header).body == data
    assert follow(hub, shard, Range="bytes=1-2", If_Range=tag).body == data[1:3]
    assert follow(hub, shard, Range="bytes=1-2", If_Range='"another"').body == data
    assert follow(hub, shard, If_None_Match=f'"x", W/{tag}').status == 304
    assert follow(hub, shard, If_None_Match="*").status == 304
    address = Reply(hub, f"/{NAME}/resolve/main/{shard}").headers["Location"]
    head = Reply(hub, address, "HEAD", {"Range": "bytes=0-3"})
    assert (head.status, head.headers["Content-Length"]) == (200, str(size)), "only GET has ranges"
    assert follow(hub, shard, If_Match='"another"').status == 412
    assert follow(hub, shard, If_Match=tag).body == data


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_a_parse_range_is_in_the_file(first: int, last: int, size: int) -> None:
    span = parse_range(f"bytes={first}-{last}", size)
    assert span == (
        (first, min(last + 1, size)) if first <= last and first < size else (None if last < first else (0, 0))
    )
    assert parse_range(f"bytes=-{last}", size) == (max(size - last, 0), size)


def test_the_api(hub: HubServer, written: dict[str, bytes]) -> None:
    info = Reply(hub, f"/api/models/{NAME}").json
    assert (info["id"], info["sha"]) == (NAME, hub.commit)
    assert [each["rfilename"] for each in info["siblings"]] == sorted(written)
    assert Reply(hub, f"/api/models/{NAME}/revision/main").json == info
    blobs = Reply(hub, f"/api/models/{NAME}/revision/{hub.commit}?blobs=true").json["siblings"]
    assert {each["rfilename"]: each["size"] for each in blobs} == {name: len(data) for name, data in written.items()}
    tree = Reply(hub, f"/api/models/{NAME}/tree/main?recursive=true&expand=false").json
    assert [(each["path"], each["size"]) for each in tree] == [(name, len(written[name])) for name in sorted(written)]
    assert {f'"{each["oid"]}"' for each in tree} == {follow(hub, name).headers["ETag"] for name in written}
    for body in (b"paths=config.json&paths=nothing", b'{"paths":["config.json", "nothing", 7]}'):
        reply = Reply(hub, f"/api/models/{NAME}/paths-info/main", "POST", body=body)
        assert [each["path"] for each in reply.json] == ["config.json"]
    assert Reply(hub, f"/api/models/{NAME}/paths-info/main", "POST", body=b'{"paths":7}').status == 400
    assert Reply(hub, f"/api/models/{NAME}/refs").json["branches"][0]["targetCommit"] == hub.commit


def test_folders(source: Path) -> None:
    """A format with a file in a folder."""
    with tx.serve(source, "deepspeed-universal", name=NAME) as hub:
        top = {each["path"]: each["type"] for each in Reply(hub, f"/api/models/{NAME}/tree/main").json}
        folder = next(path for path, kind in top.items() if kind == "directory")
        inside = Reply(hub, f"/api/models/{NAME}/tree/main/{quote(folder)}?recursive=true").json
        assert inside
        assert all(each["path"].startswith(f"{folder}/") for each in inside)
        everything = Reply(hub, f"/api/models/{NAME}/tree/main?recursive=true").json
        assert {each["path"] for each in everything if each["type"] == "file"} == {*hub.files}
        assert Reply(hub, f"/api/models/{NAME}/tree/main/nowhere").code == "EntryNotFound"


def test_what_is_not_there(hub: HubServer) -> None:
    for path, code in {
        f"/{NAME}/resolve/main/nothing.json": "EntryNotFound",
        f"/{NAME}/resolve/dev/config.json": "RevisionNotFound",
        f"/{NAME}/resolve/{'0' * 40}/config.json": "RevisionNotFound",
        f"/api/models/{NAME}/revision/refs%2Fpr%2F1": "RevisionNotFound",
        f"/api/models/{NAME}/tree/main/nothing": "EntryNotFound",
        "/other/tiny/resolve/main/config.json": "RepoNotFound",
        "/api/models/other": "RepoNotFound",
        "/api/datasets/my-org/tiny": "RepoNotFound",
    }.items():
        reply = Reply(hub, path)
        assert (reply.status, reply.code) == (404, code), path
    assert Reply(hub, f"/api/models/{NAME}/commits/main").status == 404
    assert Reply(hub, "/").body.startswith(f"transaxle serves {NAME}".encode())


def test_it_is_read_only(hub: HubServer) -> None:
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        assert Reply(hub, f"/{NAME}/resolve/main/config.json", method).status == 501
    assert Reply(hub, f"/{NAME}/resolve/main/config.json", "POST", body=b"x").status == 405
    assert Reply(hub, f"/api/models/{NAME}/paths-info/main", "POST", {"Content-Length": "2000000"}).status == 413
    assert Reply(hub, f"/api/models/{NAME}", headers={"Content-Length": "-1"}).status == 413
    assert Reply(hub, f"/api/models/{NAME}", headers={"Transfer-Encoding": "chunked"}).status == 413


ESCAPES = (
    "../config.json",
    "..%2f..%2fetc%2fpasswd",
    "%2e%2e/%2e%2e/etc/passwd",
    "/etc/passwd",
    "..\\x",
    "a\0b",
    "~root",
)


@given(st.one_of(st.sampled_from(ESCAPES), st.text(max_size=60)), st.sampled_from(["", "resolve/main/", "tree/main/"]))
@example("%", "").via("a broken escape")
@settings(max_examples=80, deadline=None)
def test_no_path_leads_out(hub: HubServer, path: str, inside: str) -> None:
    """Names are looked up in the list of files only; a strange path is never an error of the server."""
    typed = quote(path, safe="/%.~")
    for before in (f"/{NAME}/{inside}", f"/api/models/{NAME}/{inside}", f"/objects/{hub.commit}/"):
        reply = Reply(hub, before + typed)
        assert reply.status in {200, 302, 404}
        if reply.status == 200:
            assert path.strip("/") in {"", *hub.files} or reply.headers["Content-Type"].startswith("application/json")


def _status_line(hub: HubServer, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", urlsplit(hub.url).port or 0), timeout=30) as connection:
        connection.sendall(request)
        return connection.recv(1 << 16).partition(b"\r\n")[0]


def test_requests_that_are_none(hub: HubServer) -> None:
    assert b"400" in _status_line(hub, b"GET / HTTP/x\r\n\r\n")
    assert b"414" in _status_line(hub, b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n")
    assert b"431" in _status_line(
        hub, b"GET / HTTP/1.1\r\n" + b"".join(b"A%d: b\r\n" % n for n in range(200)) + b"\r\n"
    )
    assert Reply(hub, "/").status == 200


def test_a_web_page_cannot_read_under_a_name_of_its_own(hub: HubServer) -> None:
    port = urlsplit(hub.url).port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "0.0.0.0", "[::2]"):
        reply = Reply(hub, f"/{NAME}/resolve/main/config.json", headers={"Host": host})
        assert (reply.status, b"hidden_size" in reply.body) == (403, False), host
    for host in (f"localhost:{port}", "127.0.0.1", f"127.0.0.1:{port}", f"[::1]:{port}", "LOCALHOST"):
        assert Reply(hub, f"/{NAME}/resolve/main/config.json", headers={"Host": host}).status == 200, host


def test_a_stranger_on_the_network_gets_nothing(source: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    lines: list[str] = []
    with tx.serve(source, name=NAME, host="0.0.0.0", token_file=tmp_path / "token", log=lines.append) as hub:
        assert (hub.token, hub.environment["HF_TOKEN"]) == (TOKEN, TOKEN)
        paths = [
            "/",
            f"/api/models/{NAME}",
            f"/{NAME}/resolve/main/config.json",
            f"/objects/{hub.commit}/{WHOLE}",
            "/x",
        ]
        for path in paths:
            for headers in ({}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": f"Basic {TOKEN}"},
                            {"Authorization": "Bearer "}, {"Authorization": "Bearer \xe9"}):  # fmt: skip
                for method in ("GET", "HEAD", "POST"):
                    reply = Reply(hub, path, method, headers)
                    assert reply.status == 401
                    assert NAME.encode() not in reply.body
                    assert hub.commit.encode() not in reply.body + str(reply.headers).encode()
        allowed = {"Authorization": f"Bearer {TOKEN}"}
        redirect = Reply(hub, f"/{NAME}/resolve/main/{WHOLE}", headers=allowed)
        assert redirect.status == 302
        assert Reply(hub, redirect.headers["Location"]).status == 401
        assert Reply(hub, redirect.headers["Location"], headers={**allowed, "Host": "another.name"}).status == 200
    assert not any(TOKEN in line for line in lines)
    with tx.serve(source, host="0.0.0.0") as hub:  # a token of its own
        assert len(hub.token) > 40
        assert Reply(hub, "/").status == 401
        assert Reply(hub, "/", headers={"Authorization": f"bearer {hub.token}"}).status == 200
    with tx.serve(source, token_file=tmp_path / "token") as hub:  # the loopback, with one
        assert Reply(hub, "/").status == 401


def test_addresses_of_the_loopback() -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert is_loopback(host)
    for host in ("0.0.0.0", "::", "10.0.0.1", "::ffff:127.0.0.1", "localhost.evil.example", "example.com", "", "1"):
        assert not is_loopback(host)


def test_a_changed_source_is_never_served(tmp_path: Path) -> None:
    source = tiny(tmp_path / "ck", shards=2)
    lines: list[str] = []
    with tx.serve(source, name=NAME, log=lines.append) as hub:
        assert follow(hub, WHOLE).status == 200
        os.utime(source / "model-00002-of-00002.safetensors", (1, 1))
        with suppress(http.client.IncompleteRead):  # or it is noticed at once
            assert follow(hub, WHOLE).status == 409
        assert "changed" in follow(hub, WHOLE).headers["X-Error-Message"]
        for path in (f"/api/models/{NAME}", f"/{NAME}/resolve/main/config.json", f"/objects/{hub.commit}/{WHOLE}"):
            assert Reply(hub, path).status == 409
        assert Reply(hub, f"/{NAME}/resolve/main/config.json", "HEAD").headers["ETag"] is None


def test_an_error_in_the_middle_is_no_short_file(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transaxle.engine.planned_files import PlannedFiles

    read, lines = PlannedFiles.read, list[str]()

    def broken(files: PlannedFiles, name: str, start: int, stop: int) -> Iterator[memoryview]:
        yield next(read(files, name, start, stop))[:1000]
        raise tx.TransaxleError([tx.Refusal("IO", "the disk has gone")])

    with tx.serve(source, name=NAME, log=lines.append) as hub:
        monkeypatch.setattr(PlannedFiles, "read", broken)
        with pytest.raises(http.client.IncompleteRead) as caught:
            follow(hub, WHOLE)
        assert len(caught.value.partial) == 1000
        assert any("the disk has gone" in line for line in lines)
        monkeypatch.setattr(PlannedFiles, "read", read)
        assert follow(hub, WHOLE).status == 200


def test_names(tmp_path: Path) -> None:
    assert repository_name(None, str(tmp_path / "Qwen3-8B/")) == "Qwen3-8B"
    assert repository_name(None, "hf://org/model@0123456789012345678901234567890123456789") == "model"
    assert repository_name("a/b.c_d-e", "") == "a/b.c_d-e"
    for name in ("a/b/c", "a--b", "a..b", "../a", "/a", "a/", "-a", "a b", "", "a.git", "é", "x" * 97, "a/-b", ".a"):
        with pytest.raises(TransaxleError, match="--name") as caught:
            repository_name(name, "")
        assert caught.value.exit_code == USAGE


def test_what_serve_refuses(source: Path, tmp_path: Path) -> None:
    for text in ("short", "with a space in it ok", "", "x" * 5000):
        (tmp_path / "token").write_text(text)
        with pytest.raises(TransaxleError, match="token"):
            tx.serve(source, token_file=tmp_path / "token")
    with tx.serve(source) as hub, pytest.raises(TransaxleError, match="in use"):
        tx.serve(source, port=urlsplit(hub.url).port)
    with pytest.raises(TransaxleError, match="listening"):
        tx.serve(source, host="no.such.host.invalid")
    with pytest.raises(TransaxleError, match="nonsense"):
        tx.serve(source, "safetensors:nonsense")


def test_closing_ends_connections_and_frees_the_port(source: Path) -> None:
    hub = tx.serve(source)
    port = urlsplit(hub.url).port
    with socket.create_connection(("127.0.0.1", port or 0), timeout=10) as idle:
        time.sleep(0.2)
        hub.close()
        assert idle.recv(1) == b""
    with tx.serve(source, port=port) as again:
        assert Reply(again, "/").status == 200
        assert re.fullmatch(r"<hub hub at http://127.0.0.1:\d+, commit [0-9a-f]{8}>", repr(again))
    with tx.open(source) as checkpoint:
        with tx.serve(checkpoint) as hub:
            assert Reply(hub, "/").status == 200
        assert checkpoint["model.norm.weight"].tobytes(), "it stays open"


def test_index_of_shards_is_small(hub: HubServer) -> None:
    """It is not behind the redirect of large files."""
    assert Reply(hub, f"/{NAME}/resolve/main/{INDEX}").status == 200


def _connect(hub: HubServer) -> http.client.HTTPConnection:
    """A connection that stays open after a request."""
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(hub.url).port or 0, timeout=30)
    connection.request("GET", f"/{NAME}/resolve/main/config.json")
    connection.getresponse().read()
    return connection


def test_many_clients_are_served_at_once(hub: HubServer, written: dict[str, bytes]) -> None:
    """Twelve runs of `hf download` have a hundred connections; a third of them failed."""
    connections = [_connect(hub) for _ in range(150)]
    for connection in connections:
        with closing(connection):
            connection.request("GET", f"/{NAME}/resolve/main/config.json")
            assert connection.getresponse().read() == written["config.json"]


def _wait_for(hub: HubServer, status: int) -> None:
    """Wait until requests get a status; 0 means that their connections are closed without a response."""
    statuses = []
    for _ in range(200):
        statuses.append(0)
        with suppress(ConnectionError):
            statuses[-1] = Reply(hub, "/").status
        if statuses[-1] == status:
            return
        time.sleep(0.05)
    pytest.fail(f"no status {status}, but {set(statuses)}")


def test_too_many_clients_are_told_to_try_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_MOST_CONNECTIONS", 2)
    monkeypatch.setattr(serving, "_MOST_REFUSED", 1)
    with tx.serve(source, "hf", name=NAME) as hub, ExitStack() as stack:
        served = [stack.enter_context(closing(_connect(hub))) for _ in range(2)]
        reply = Reply(hub, f"/{NAME}/resolve/main/config.json")
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
        waiting = []
        for _ in range(5):  # the last request's connection may not be closed yet
            time.sleep(0.05)
            address = ("127.0.0.1", urlsplit(hub.url).port or 0)
            waiting.append(stack.enter_context(socket.create_connection(address, 30)))
        _wait_for(hub, 0)
        for connection in waiting:
            connection.close()
        _wait_for(hub, 503)
        served[0].close()
        _wait_for(hub, 200)
