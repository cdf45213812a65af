"""A hub on the loopback: its API, redirects to another host for large files, signed addresses, ranges, refusals.

Headers and bodies are those of huggingface.co, as its client `huggingface_hub` 1.33 reads them.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from transaxle.formats.store.hub import CLIENTS

HOST = "127.0.0.1"
SIGNATURE = "sIgNaTuRe"
TOKEN = "hf_SeCrEtToKeNoFtHeTeSt"
LARGE = 1 << 10
"""From so many bytes on a file is kept at the other host."""
_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/(revision|tree)/([^/]+)(?:/(.*))?")
_FILE = re.compile(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_CACHE = "/api/resolve-cache"

Files = dict[str, bytes]


@dataclass
class Repository:
    """What somebody has put there."""

    commits: dict[str, Files] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files: Files, revision: str = "main") -> str:
        """Add a commit, and let a branch lead to it."""
        text = f"{len(self.commits)} {sorted((name, hash(data)) for name, data in files.items())}"
        name = hashlib.sha1(text.encode()).hexdigest()
        self.commits[name] = dict(files)
        self.revisions[revision] = name
        return name


@dataclass
class Seen:
    """A request."""

    host: str
    """`hub` or `large`."""
    method: str
    path: str
    headers: dict[str, str]
    """By lower-case names."""
    sent: int = 0
    """Bytes of the answer's body."""


class Handler(http.server.BaseHTTPRequestHandler):
    """One request to one of the two hosts."""

    protocol_version = "HTTP/1.1"
    hub: Hub
    host = ""
    seen: Seen

    def _take(self) -> None:
        headers = {name.lower(): text for name, text in self.headers.items()}
        self.seen = Seen(self.host, self.command, self.path, headers)
        self.hub.seen.append(self.seen)
        if self.hub.meddle is not None and self.hub.meddle(self):
            return
        if self.host == "hub":
            self.answer_of_hub()
        else:
            self._answer_of_large()

    do_GET = do_HEAD = _take  # noqa: N815 - names of http.server

    def answer(self, status: int, body: bytes = b"", **headers: str) -> bool:
        """Send an answer, and say so; names of headers have `_` for `-`."""
        self.send_response(status)
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        for name, text in ({"Content-Length": str(len(body))} | named).items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.seen.sent += len(body)
            self.wfile.write(body)
        return True

    def part(self, data: bytes) -> None:
        """Send a file, or the range of it that was requested."""
        match = re.fullmatch(r"bytes=([0-9]+)-([0-9]+)", self.headers.get("Range", ""))
        if match is None:
            self.answer(200, data, Accept_Ranges="bytes")
            return
        first, last = int(match[1]), int(match[2])
        if first >= len(data):
            self.answer(416, Content_Range=f"bytes */{len(data)}")
            return
        body = data[first : last + 1]
        self.answer(206, body, Content_Range=f"bytes {first}-{first + len(body) - 1}/{len(data)}")

    def refuse(self, status: int, code: str = "", message: str = "") -> bool:
        """Refuse as the hub does, and say so."""
        body = json.dumps({"error": message}).encode()
        named = {"X_Error_Code": code, "X_Error_Message": message}
        return self.answer(status, body, **{name: text for name, text in named.items() if text})

    def answer_of_hub(self) -> None:
        """Answer as the hub does."""
        path = urlsplit(self.path).path
        cached = path.removeprefix(_CACHE)
        match, file = _API.fullmatch(path), _FILE.fullmatch(cached)
        if match:
            kind, name, revision = match[1], match[2], match[4]
        elif file:
            kind, name, revision = file[1] or "models", file[2], file[3]
        else:
            self.refuse(404, "", "Not Found")
            return
        said = self.headers.get("Authorization")
        if said is not None and said != f"Bearer {TOKEN}":
            self.refuse(401, "", "Invalid credentials in Authorization header")
            return
        repository = self.hub.repositories.get(f"{kind}/{name}")
        if repository is None or (repository.private and said is None):
            self.refuse(401 if said is None else 404, "RepoNotFound", "Repository not found")
            return
        commit = repository.revisions.get(unquote(revision), unquote(revision))
        files = repository.commits.get(commit)
        if files is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif match and match[3] == "revision":
            self.answer(200, json.dumps({"id": name, "sha": commit, "private": repository.private}).encode())
        elif match:
            self._list(files, unquote(match[5] or ""))
        elif repository.gated and said is None:
            self.refuse(401, "GatedRepo", f"Access to model {name} is restricted.")
        elif file:
            self._file(files, unquote(file[4]), commit, is_cached=cached != path)

    def _list(self, files: Files, folder: str) -> None:
        under = f"{folder}/" if folder else ""
        inside = {name.removeprefix(under): data for name, data in files.items() if name.startswith(under)}
        if folder and not inside:
            self.refuse(404, "EntryNotFound", f"{folder} does not exist")
            return
        folders = sorted({name.partition("/")[0] for name in inside if "/" in name})
        entries: list[dict[str, Any]] = [
            {"type": "directory", "oid": "0" * 40, "size": 0, "path": under + name} for name in folders
        ]
        entries += [_entry(under + name, data) for name, data in sorted(inside.items()) if "/" not in name]
        at = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
        more = {}
        if at + self.hub.page < len(entries):
            place = f"{self.hub.url}{urlsplit(self.path).path}?cursor={at + self.hub.page}"
            more["Link"] = f'<{place}>; rel="next"'
        self.answer(200, json.dumps(entries[at : at + self.hub.page]).encode(), **more)

    def _file(self, files: Files, name: str, commit: str, *, is_cached: bool) -> None:
        data = files.get(name)
        if data is None:
            self.refuse(404, "EntryNotFound", "Entry not found")
        elif is_cached:
            self.part(data)
        else:
            entry = _entry(name, data)
            if "lfs" in entry:
                tag = entry["lfs"]["oid"]
                where = f"{self.hub.large}/{tag}?Expires=1&Signature={SIGNATURE}{self.hub.generation}"
            else:
                tag = entry["oid"]
                where = f"{_CACHE}{urlsplit(self.path).path}?etag={tag}"
            named = {"X_Repo_Commit": commit, "X_Linked_Size": str(len(data)), "X_Linked_ETag": f'"{tag}"'}
            self.answer(302, b"Found", Location=where, **named)

    def _answer_of_large(self) -> None:
        address = urlsplit(self.path)
        held = {
            _sha256(data): data
            for repository in self.hub.repositories.values()
            for files in repository.commits.values()
            for data in files.values()
        }
        data = held.get(address.path.removeprefix("/"))
        if parse_qs(address.query).get("Signature") != [f"{SIGNATURE}{self.hub.generation}"] or data is None:
            self.answer(403, b"<Error>AccessDenied</Error>")
            return
        self.part(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@lru_cache(maxsize=64)
def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _entry(path: str, data: bytes) -> dict[str, Any]:
    """One line of a list."""
    if len(data) < LARGE:
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return {"type": "file", "oid": blob, "size": len(data), "path": path}
    large = {"oid": _sha256(data), "size": len(data), "pointerSize": 134}
    return {"type": "file", "oid": "1" * 40, "size": len(data), "lfs": large, "xetHash": "2" * 64, "path": path}


@dataclass
class Hub:
    """Both hosts, and what was requested of them."""

    url: str = ""
    large: str = ""
    """Address of the host of large files."""
    repositories: dict[str, Repository] = field(default_factory=dict)
    """By kind and name."""
    seen: list[Seen] = field(default_factory=list)
    meddle: Callable[[Handler], bool] | None = None
    """Called first; true if it has answered."""
    page: int = 1000
    """Files of a page."""
    generation: int = 0
    """Signatures of another one are no longer taken."""

    def put(self, name: str, files: Files, revision: str = "main", kind: str = "models") -> str:
        """Add a commit to a repository, which need not exist; return its hash."""
        return self.repositories.setdefault(f"{kind}/{name}", Repository()).commit(files, revision)

    def asked(self, host: str | None = None, method: str | None = None) -> list[Seen]:
        """Return requests to one of the hosts, by one method."""
        return [each for each in self.seen if host in (None, each.host) and method in (None, each.method)]

    @property
    def sent(self) -> int:
        """Bytes of all answers' bodies."""
        return sum(each.sent for each in self.seen)


def files_of(folder: Path) -> Files:
    """Return the files of a folder and below it, by their names."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """An empty hub, which the client takes for the one on the web; nobody is logged in."""
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants

    found = Hub()
    servers = []
    for host in ("hub", "large"):
        kind = type("Answering", (Handler,), {"hub": found, "host": host})
        server = http.server.ThreadingHTTPServer((HOST, 0), kind)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
    found.url, found.large = (f"http://{HOST}:{server.server_port}" for server in servers)
    monkeypatch.setattr(constants, "ENDPOINT", found.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "*")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    yield found
    for client in CLIENTS.values():
        client.close()
    CLIENTS.clear()
    for server in servers:
        server.shutdown()
        server.server_close()
