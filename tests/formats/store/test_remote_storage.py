"""Checkpoints under URLs, read: the same as on this machine, in few requests, and never a mixture of two objects."""

from __future__ import annotations

import http.server
import re
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.registry import _registry

import transaxle as tx
from tests.checkpoints import GATE, WHOLE, read, same, tiny, write
from tests.formats.s3_server import Bucket
from tests.formats.stores import Memory, Store, upload
from transaxle.engine.verification import Verification
from transaxle.errors import StorageError, TransaxleError
from transaxle.formats.storage.local import LocalStorage
from transaxle.formats.store.reading import LEAST, RemoteStorage
from transaxle.formats.store.service import Info, Service
from transaxle.formats.store.staging import storage_at

FILE = "a.bin"
DATA = bytes(range(256)) * 64
SECRET = "sEcReT"


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every range that is asked for: file and number of bytes."""
    made: list[tuple[str, int]] = []
    fetch = Service.fetch

    def counted(self: Service, path: str, start: int, stop: int, file: str) -> bytes:
        made.append((file, stop - start))
        return fetch(self, path, start, stop, file)

    monkeypatch.setattr(Service, "fetch", counted)
    return made


def refused(read: Callable[[], object]) -> TransaxleError:
    with pytest.raises(TransaxleError) as caught:
        read()
    return caught.value


def test_a_tag_is_the_same_with_quotation_marks(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Azure's client gives tags in them, but not in listings."""
    local = tiny(tmp_path / "local", shards=3)
    url = upload(local, memory, "ck")
    members, info, tag = Service.members, Service.info, '"0x1"'

    def listed(self: Service, path: str, file: str) -> list[Info]:
        return [{**each, "etag": "0x1"} for each in members(self, path, file)]

    def known(self: Service, path: str, file: str) -> Info | None:
        found = info(self, path, file)
        return None if found is None else {**found, "etag": tag}

    monkeypatch.setattr(Service, "members", listed)
    monkeypatch.setattr(Service, "info", known)
    assert tx.diff(local, url).equal
    tag = '"0x2"'
    assert refused(lambda: tx.diff(local, url)).code == "CORRUPT"


@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_under_a_url(store: Store, tmp_path: Path, shards: int) -> None:
    local = tiny(tmp_path / "local", shards=shards)
    url = upload(local, store, "models/tiny")
    held = read(local)
    with tx.open(url) as there, tx.open(local) as here:
        assert (there.path, there.format, there.family, there.dialect) == (url, here.format, here.family, here.dialect)
        assert {name: (t.dtype, t.shape) for name, t in there.items()} == {
            name: (t.dtype, t.shape) for name, t in here.items()
        }
        assert all(there[name].tobytes() == held[name].tobytes() for name in held)
        assert there[GATE].read((slice(2, 5), slice(1, 9))).tobytes() == held[GATE][2:5, 1:9].tobytes()
    checked = tx.verify(url)
    assert isinstance(checked, Verification)
    assert (checked.ok, checked.tensors) == (True, len(held))
    assert tx.diff(local, url).equal
    tx.convert(url, tmp_path / "out", to="torchtitan")
    tx.convert(tmp_path / "out", tmp_path / "back", to="hf", shard_size=10_000)
    assert same(local, tmp_path / "back")


def test_byte_ranges(store: Store) -> None:
    store.put(f"ck/{FILE}", DATA)
    store.put("ck/sub/b.bin", b"b")
    store.put("ck/empty", b"")
    storage = RemoteStorage(f"{store.url}/ck/")
    assert (storage.single, storage.names(), storage.listing().folders) == (None, (FILE, "empty"), ("sub",))
    assert storage.listing("sub").names == ("b.bin",)
    assert [storage.size(name) for name in (FILE, "empty", "sub/b.bin")] == [len(DATA), 0, 1]
    assert storage.read(FILE, 17, 1000) == DATA[17:1017]
    assert storage.read(FILE, len(DATA), 0) == storage.read("empty", 0, 0) == b""
    assert storage.read("sub/b.bin", 0, 1) == b"b"
    buffer = bytearray(10)
    storage.read_into(FILE, 5, memoryview(buffer)[2:6])
    assert bytes(buffer) == b"\0\0" + DATA[5:9] + b"\0" * 4
    for offset, size in ((len(DATA) - 3, 4), (len(DATA) + 1, 1)):
        error = refused(partial(storage.read, FILE, offset, size))
        assert (error.code, error.where.file) == ("CORRUPT", FILE)
        assert str(len(DATA)) in str(error)
    storage.recheck()
    storage.close()
    with pytest.raises(ValueError, match="closed"):
        storage.read(FILE, 0, 1)


@pytest.mark.parametrize(
    "name", ["", "..", "../secret", "/etc/passwd", "a/../../secret", "a//b", "a/", "..\\secret", "a\0b"]
)
def test_names_that_are_paths(memory: Memory, name: str) -> None:
    memory.put("secret", b"x")
    memory.put("ck/a", b"x")
    storage = RemoteStorage(f"{memory.url}/ck")
    error = refused(lambda: storage.read(name, 0, 1))
    assert (error.code, error.where.file) == ("PATH_ESCAPE", name)


def test_listings_that_lead_out(memory: Memory, tmp_path: Path) -> None:
    url = upload(tiny(tmp_path / "local"), memory, "ck")
    for key in ("ck/../escaped.safetensors", "ck/..", "ck/a\\..\\b.json", "ck/.", "ck/."):
        memory.put(key, b"x")
    listing = RemoteStorage(url).listing()
    assert listing.names == ("config.json", WHOLE)
    assert listing.folders == ()
    assert {refusal.code for refusal in listing.special.values()} == {"PATH_ESCAPE"}
    with tx.open(url) as there:
        assert {"..", "a\\..\\b.json"} <= {*there.container.ignored}
        assert there.container.carried == ("config.json",)


@pytest.mark.parametrize("name", ["/etc/passwd", "other/model.safetensors", "{root}x/model.safetensors", "{root}/a/b"])
def test_listings_that_name_other_places(memory: Memory, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    memory.put(f"ck/{FILE}", DATA)
    root = f"{memory.root}/ck"
    members = Service.members

    def hostile(self: Service, path: str, file: str) -> list[dict[str, Any]]:
        return [*members(self, path, file), {"name": name.format(root=root), "size": 5, "type": "file"}]

    monkeypatch.setattr(Service, "members", hostile)
    listing = RemoteStorage(f"{memory.url}/ck").listing()
    assert listing.names == (FILE,)
    assert [refusal.code for refusal in listing.special.values()] == ["PATH_ESCAPE"]


def test_what_is_missing(store: Store, tmp_path: Path) -> None:
    url = upload(tiny(tmp_path / "local", shards=3), store, "tiny-model")
    for typed, hint in ((f"{store.url}/tiny-modle", f"{store.url}/tiny-model"), (f"{url}/config.jsn", "config.json")):
        error = refused(partial(tx.open, typed))
        assert isinstance(error, StorageError)
        assert isinstance(error, FileNotFoundError)
        assert (error.code, error.exit_code, error.where.file) == ("IO", 4, typed)
        assert hint in error.hint
    store.delete("tiny-model/model-00002-of-00003.safetensors")
    error = refused(partial(tx.open, url))
    assert (error.code, error.where.file) == ("INCOMPLETE", "model-00002-of-00003.safetensors")


def test_objects_that_change_while_they_are_read(store: Store, tmp_path: Path) -> None:
    local = tiny(tmp_path / "local")
    url = upload(local, store, "ck")
    whole = (local / WHOLE).read_bytes()
    with tx.open(url) as there:
        storage = there.container.storage
        storage.recheck()
        version = storage.version(WHOLE)
        assert version == storage.version(WHOLE)
        store.put(f"ck/{WHOLE}", whole[:-1] + bytes([whole[-1] ^ 1]))
        for touch in (storage.recheck, partial(storage.version, WHOLE)):
            error = refused(touch)
            assert (error.code, error.where.file) == ("CORRUPT", WHOLE)
            assert "changed" in str(error)
        error = refused(lambda: tx.convert(there, tmp_path / "out", to="torchtitan"))
        assert error.code == "CORRUPT"
        assert not (tmp_path / "out").exists()
    with tx.open(url) as there:
        store.delete(f"ck/{WHOLE}")
        assert refused(there.container.storage.recheck).code == "IO"


def test_bytes_of_another_object_are_never_given(store: Store, requests: list[tuple[str, int]]) -> None:
    store.put(f"ck/{FILE}", DATA * 100)
    storage = RemoteStorage(f"{store.url}/ck")
    assert storage.read(FILE, 0, 10) == DATA[:10]
    for other in (b"x" * len(DATA) * 100, b"shorter"):
        store.put(f"ck/{FILE}", other)
        error = refused(lambda: storage.read(FILE, 1_000_000, 10))
        assert (error.code, error.where.file) == ("CORRUPT", FILE)
    assert requests


def test_few_requests_and_few_bytes(store: Store, tmp_path: Path, requests: list[tuple[str, int]]) -> None:
    random = np.random.default_rng(0)
    held = {f"block.{i}.w": random.standard_normal((64, 1024), np.float32) for i in range(96)}
    url = upload(write(tmp_path / "local", held, shards=3), store, "ck")
    total = sum(array.nbytes for array in held.values())
    with tx.open(url) as there:
        # Three headers, the index: one request each, and no data.
        assert len(requests) <= 5
        assert sum(size for _, size in requests) <= 5 * LEAST
        requests.clear()
        there["block.40.w"].read((slice(10, 20), slice(0, 1024)))
        assert sum(size for _, size in requests) <= 10 * 4096 + LEAST
    requests.clear()
    assert tx.verify(url, jobs=1).ok
    assert sum(size for _, size in requests) <= total + 5 * LEAST
    assert len(requests) <= 3 * 12
    requests.clear()
    tx.convert(url, tmp_path / "out", to="safetensors", jobs=4)
    assert same(tmp_path / "local", tmp_path / "out")
    assert sum(size for _, size in requests) <= 1.5 * total
    assert len(requests) <= 60


@pytest.mark.parametrize("name", ["größe", "模型 1", "a%20b#c", "w[0]*?"])
def test_odd_names(memory: Memory, bucket: Bucket, tmp_path: Path, name: str) -> None:
    name = f"{name}.safetensors"
    local = tiny(tmp_path / "local", config=None)
    data = (local / WHOLE).read_bytes()
    for store in (memory, bucket):
        store.put(f"ünïcode ck/{name}", data)
        for url in (f"{store.url}/ünïcode ck", f"{store.url}/ünïcode ck/{name}"):
            with tx.open(url, family="qwen3_moe") as there:
                assert there[GATE].tobytes() == read(local)[GATE].tobytes()


def test_file_urls_are_local_paths(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "with a blank")
    storage = storage_at(folder.as_uri())
    assert isinstance(storage, LocalStorage)
    tx.convert(folder.as_uri(), (tmp_path / "out").as_uri(), to="torchtitan")
    assert tx.diff(folder, tmp_path / "out").equal
    assert refused(lambda: tx.open("file://elsewhere/ck")).code == "UNSUPPORTED"


@pytest.mark.parametrize(("url", "words"), [("gs://bucket/ck", "gcsfs"), ("nowhere://x/ck", "nowhere")])
def test_schemes_that_nothing_here_speaks(url: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(_registry, "gs", raising=False)  # a class that another test has used
    error = refused(lambda: tx.open(url))
    assert (error.code, error.exit_code) == ("UNSUPPORTED", 3)
    assert words in f"{error} {error.hint}"


class NoCredentialsError(Exception):
    """What botocore raises is no OSError."""


@pytest.mark.parametrize(
    "raised",
    [
        PermissionError(f"AccessDenied: AWSSecretAccessKey={SECRET} is wrong\n<html>"),
        NoCredentialsError(f"https://key:{SECRET}@host/x?X-Amz-Signature={SECRET} needs a login"),
        TimeoutError(),
        RuntimeError(f"token: {SECRET}"),
    ],
)
def test_what_services_raise(memory: Memory, monkeypatch: pytest.MonkeyPatch, raised: Exception) -> None:
    memory.put(f"ck/{FILE}", DATA)
    storage = RemoteStorage(f"{memory.url}/ck")

    def failing(*_: object, **__: object) -> bytes:
        raise raised

    monkeypatch.setattr(type(memory.client), "cat_file", failing)
    error = refused(lambda: storage.read(FILE, 0, 1))
    assert (error.code, error.exit_code, error.where.file) == ("IO", 4, FILE)
    assert "\n" not in error.refusals[0].message
    assert SECRET not in str(error)
    assert error.__suppress_context__
    assert bool(error.hint) == (type(raised).__name__ in {"PermissionError", "NoCredentialsError"})


class _Web(http.server.BaseHTTPRequestHandler):
    """One file, behind a signature, in ranges."""

    data = b""
    ranges = True

    def do_HEAD(self) -> None:
        self._answer(b"", 200)

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and self.ranges:
            self._answer(self.data[int(asked[1]) : int(asked[2]) + 1], 206)
        else:
            self._answer(self.data, 200)

    def _answer(self, body: bytes, status: int) -> None:
        if f"signature={SECRET}" not in self.path or f"/{WHOLE}?" not in self.path:
            self.send_error(403)
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if self.command == "GET" else len(self.data)))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{hash(self.data)}"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def web() -> Iterator[str]:
    """Address of a web server on the loopback."""
    pytest.importorskip("aiohttp")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Web) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_signed_url(web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = tiny(tmp_path / "local", config=None)
    monkeypatch.setattr(_Web, "data", (local / WHOLE).read_bytes())
    url = f"{web}/models/{WHOLE}?signature={SECRET}"
    with tx.open(url, family="qwen3_moe") as there:
        assert there[GATE].tobytes() == read(local)[GATE].tobytes()
        assert SECRET not in there.path
        monkeypatch.setattr(_Web, "data", b"x" * len(_Web.data))
        assert refused(there.container.storage.recheck).code == "CORRUPT"
    other = url.replace(WHOLE, f"x{WHOLE}")
    for target, code in ((url, "EXISTS"), (other, "UNSUPPORTED")):
        error = refused(partial(tx.convert, local, target, to="torchtitan"))
        assert (error.code, SECRET in str(error)) == (code, False)
    error = refused(lambda: tx.open(other))
    assert (error.code, SECRET in str(error)) == ("IO", False)
    assert f"{web}/models/x{WHOLE}?…" in str(error)


def test_a_server_without_ranges(web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = write(tmp_path / "local", {f"w{i}": np.ones((64, 1024), np.float32) for i in range(8)})
    monkeypatch.setattr(_Web, "data", (local / WHOLE).read_bytes())
    monkeypatch.setattr(_Web, "ranges", False)
    error = refused(lambda: tx.open(f"{web}/models/{WHOLE}?signature={SECRET}"))
    assert (error.code, error.where.file) == ("IO", WHOLE)
    assert "range" in error.hint
