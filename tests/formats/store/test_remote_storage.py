"""Checkpoints under URLs, read: the same as on this machine, in few requests, and never a mixture of two objects."""

from __future__ import annotations

import http.server
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.registry import _registry
from hypothesis import given
from hypothesis import strategies as st

import transaxle as tx
from tests.checkpoints import GATE, WHOLE, read, same, tiny, write
from tests.formats.refusals import refuses
from tests.formats.s3_server import Bucket
from tests.formats.stores import Memory, Store, upload
from tests.work import peak
from transaxle.engine.verification import Verification
from transaxle.errors import StorageError, TransaxleError, without_secrets
from transaxle.formats.storage.local import LocalStorage
from transaxle.formats.storage.storage import is_url
from transaxle.formats.store.reading import LEAST, NearReads, RemoteStorage
from transaxle.formats.store.service import Info, Service, harmless, local_path
from transaxle.formats.store.staging import display_path, storage_at

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


def test_a_tag_is_the_same_in_quotation_marks(memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_run_under_a_url(store: Store, tmp_path: Path) -> None:
    """Its only checkpoint is opened, with the config of the run; with another one it is refused."""
    local = tiny(tmp_path / "local")
    config = (local / "config.json").read_bytes()
    upload(write(tmp_path / "bare", read(local)), store, "run/checkpoints/checkpoint_7")
    store.put("run/config.json", config)
    url, inner = f"{store.url}/run", "checkpoints/checkpoint_7"
    for place, inside in (
        (url, inner),
        (f"{url}/", inner),
        (f"{url}/{inner}", ""),
        (f"{url}/checkpoints", "checkpoint_7"),
    ):
        with tx.open(place) as there:
            container = there.container
            assert (there.path, container.inside) == (f"{url}/{inner}", inside)
            assert container.config_path == ("" if place == f"{url}/{inner}" else f"{url}/config.json")
    report = tx.convert(url, tmp_path / "out", to="hf")
    assert report.source == f"{url}/{inner}"
    assert (tmp_path / "out" / "config.json").read_bytes() == config
    assert tx.verify(local, tmp_path / "out").ok
    upload(local, store, "run/checkpoints/checkpoint_12")
    with refuses("AMBIGUOUS", "checkpoints/checkpoint_12, checkpoints/checkpoint_7"):
        tx.open(url)


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
    with refuses("UNSUPPORTED", words, exit_code=3):
        tx.open(url)


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


BLOCK = b"\0" * (1 << 20)
MOST = 200
"""Blocks after which even the endless server gives up: a client that reads them all has failed the test."""


class _Web(http.server.BaseHTTPRequestHandler):
    """One file in ranges, behind a signature if there is one; `lie` says what else the server does."""

    data = b""
    lie = ""
    signature = ""
    sent = 0

    def do_HEAD(self) -> None:
        size = len(self.data) * (2 if self.lie == "longer" else 1) // (2 if self.lie == "shorter" else 1)
        self._head(200 if self._is_allowed() else 403, size)

    def do_GET(self) -> None:
        if not self._is_allowed():
            self._head(403, 0)
        elif self.lie == "redirects":
            self._head(302, 0)
        elif self.lie in ("endless", "endless page"):
            self._head(206 if self.lie == "endless" else 200, None)
            self._send_without_end()
        elif self.lie == "cut":
            self._head(206, 1 << 20)
            self.wfile.write(self.data[:10])
        else:
            first, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")
            if self.lie == "beginning":
                first, last = "0", str(int(last) - int(first))
            is_whole = self.lie in ("whole", "no ranges")
            part = self.data if is_whole else self.data[int(first) : int(last) + 1]
            content_range = "" if is_whole else f"bytes {first}-{last}/{len(self.data)}"
            self._head(200 if self.lie == "no ranges" else 206, len(part), content_range)
            self.wfile.write(part)

    def _is_allowed(self) -> bool:
        return not self.signature or self.path.endswith(f"/{WHOLE}{self.signature}")

    def _head(self, status: int, length: int | None, content_range: str = "") -> None:
        self.send_response(302 if self.lie == "redirects" else status)
        if self.lie == "redirects":
            self.send_header("Location", f"{self.path}x")
        if length is not None:
            self.send_header("Content-Length", "many" if self.lie == "no number" else str(length))
        if content_range:
            self.send_header("Content-Range", content_range)
        self.send_header("ETag", f'"{hash(self.data)}"')
        self.send_header("Content-Type", "text/html" if self.lie == "endless page" else "application/octet-stream")
        self.end_headers()

    def _send_without_end(self) -> None:
        try:
            for _ in range(MOST):
                self.wfile.write(BLOCK)
                type(self).sent += 1
        except OSError:
            return  # the client has hung up

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a web server on the loopback that has one checkpoint."""
    pytest.importorskip("aiohttp")
    local = write(tmp_path / "served", {f"w{at}": np.ones((64, 1024), np.float32) for at in range(8)})
    for name, value in {"data": (local / WHOLE).read_bytes(), "sent": 0}.items():
        monkeypatch.setattr(_Web, name, value)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Web) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/models/"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("url", "package"), [("s3://bucket/ck", "s3fs"), ("https://host/ck/", "fsspec[http]"), ("other://ck", "fsspec")]
)
def test_without_fsspec_the_refusal_says_what_to_install(
    url: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "fsspec.core")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    refusal = refused(lambda: tx.open(url)).refusals[0]
    assert (refusal.code, refusal.hint) == ("UNSUPPORTED", f"Install one:  pip install '{package}'")


def test_a_signed_url(web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = tiny(tmp_path / "local", config=None)
    monkeypatch.setattr(_Web, "data", (local / WHOLE).read_bytes())
    monkeypatch.setattr(_Web, "signature", f"?signature={SECRET}")
    url = f"{web}{WHOLE}?signature={SECRET}"
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
    assert f"{web}x{WHOLE}?…" in str(error)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("lie", "code", "said"),
    [
        ("longer", "CORRUPT", "bytes of the file belong to no tensor"),
        ("shorter", "CORRUPT", "truncated"),
        ("no number", "IO", "the service|no such file|opening it"),
        ("no ranges", "IO", ""),
        ("whole", "IO", "sent more than the"),
        ("endless", "IO", "sent more than the"),
        ("cut", "IO", "reading"),
        ("beginning", "IO", r"was requested, but the server sent bytes 0-"),
        ("redirects", "IO", "TooManyRedirects"),
    ],
)
def test_a_lying_server_is_refused(web: str, lie: str, code: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a reason, in bounded memory, and without waiting forever."""
    monkeypatch.setattr(_Web, "lie", lie)

    def read() -> None:
        with pytest.raises(TransaxleError, match=said or None) as caught, tx.open(f"{web}{WHOLE}") as there:
            there["w7"].read()
        assert caught.value.code == code
        if "sent more than the" in said or "the server sent" in said or not said:
            assert "range" in caught.value.hint

    assert peak(read) < 32 << 20
    assert _Web.sent < MOST // 2


def test_a_page_without_an_end_is_no_list_of_a_folder(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Web, "lie", "endless page")

    def read() -> None:
        with refuses("IO", "sent more than the 16,777,216 bytes"):
            tx.open(web)

    assert peak(read) < 96 << 20
    assert _Web.sent < MOST // 2


# Reading ahead.

LONG = random.Random(0).randbytes(3_000_000)


class CountedFetches:
    """A file of many bytes, and who asked for which."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []
        self.failing = False

    def fetch(self, file: str, start: int, stop: int) -> bytes:
        assert 0 <= start < stop <= len(LONG), file
        self.made.append((start, stop))
        if self.failing:
            raise OSError("down")
        return LONG[start:stop]

    @property
    def asked(self) -> int:
        return sum(stop - start for start, stop in self.made)


def read_near(ahead: NearReads, offset: int, size: int) -> bytes:
    buffer = bytearray(size)
    ahead.read_into("a", len(LONG), offset, memoryview(buffer))
    return bytes(buffer)


@given(st.lists(st.tuples(st.integers(0, len(LONG)), st.integers(0, 400_000)), max_size=30), st.integers(1, 2_000_000))
def test_any_reads_in_any_memory(reads: list[tuple[int, int]], memory: int) -> None:
    requests = CountedFetches()
    ahead, largest = NearReads(requests.fetch, memory), 0
    for offset, size in reads:
        size = min(size, len(LONG) - offset)
        largest = max(largest, size)
        assert read_near(ahead, offset, size) == LONG[offset : offset + size]
        assert ahead._cached_bytes <= max(memory, largest)


def test_a_file_read_in_order_is_asked_for_once() -> None:
    requests = CountedFetches()
    ahead = NearReads(requests.fetch, 32 << 20)
    for start in range(0, len(LONG), 10_000):
        assert read_near(ahead, start, 10_000) == LONG[start : start + 10_000]
    assert requests.asked == len(LONG)
    assert len(requests.made) <= 6


def test_scattered_reads_ask_for_little_more() -> None:
    requests = CountedFetches()
    ahead = NearReads(requests.fetch)
    for start in (2_500_000, 1_000_000, 0):
        read_near(ahead, start, 1000)
    assert requests.asked <= 3 * LEAST
    read_near(ahead, 2_500_000 + 100, 500)
    assert len(requests.made) == 3


def test_threads_that_want_the_same_ask_once() -> None:
    """And again where it failed."""
    requests, begin = CountedFetches(), threading.Barrier(8)
    ahead = NearReads(requests.fetch)
    requests.failing = True
    with pytest.raises(OSError, match="down"):
        read_near(ahead, 1000, 1000)
    requests.failing = False

    def one(_: int) -> bytes:
        begin.wait()
        return read_near(ahead, 1000, 1000)

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(one, range(8))) == {LONG[1000:2000]}
    assert len(requests.made) == 2


# URLs, and texts about them without secrets.


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        *((path, True) for path in ("s3://bucket/x", "memory://x", "file:///x", "a+b-c.d://x", "HTTP://x")),
        *((path, False) for path in ("", "a/b", "/a://b", "1://x", "C:\\x", "a:b", "simplecache::s3://x", "ä://x")),
    ],
)
def test_urls_are_told_from_paths(path: str, is_one: bool) -> None:
    assert is_url(path) is is_one
    assert is_one or display_path(path) == path


def test_paths_of_file_urls() -> None:
    assert local_path("file:///a%20b/c") == local_path("file://localhost/a b/c") == "/a b/c"
    assert local_path("file:///a?b#c") == "/a?b#c"
    assert local_path("file://elsewhere/c") is None
    assert local_path("s3://bucket/c") is None


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/a b/c", "s3://bucket/a b/c"),
        (f"https://host/x.bin?sig={SECRET}&b=c", "https://host/x.bin?…"),
        (f"ftp://me:{SECRET}@host/x", "ftp://me:…@host/x"),
        (f"https://{SECRET}@host/x", "https://…@host/x"),
        ("abfs://container@account.example/x", "abfs://container@account.example/x"),
    ],
)
def test_urls_are_shown_without_secrets(url: str, expected: str) -> None:
    assert display_path(url) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("", ""),
        ("plain\nand more", "plain"),
        (f"403, url='https://host/x?X-Amz-Signature={SECRET}'", "403, url='https://host/x?…'"),
        (f"aws_secret_access_key = {SECRET} is wrong", "aws_secret_access_key =… is wrong"),
        ("key AKIAIOSFODNN7EXAMPLE unknown", "key … unknown"),
        (f"cannot reach s3://id:{SECRET}@host", "cannot reach s3://id:…@host"),
        ("x" * 1000, "x" * 300 + "…"),
    ],
)
def test_error_texts_are_shown_without_secrets(said: str, expected: str) -> None:
    assert harmless(said) == expected


@pytest.mark.parametrize(
    "text",
    [
        f"http:///user:{SECRET}@host", f"http:////{SECRET}@host/x", f"http:\\/\\/user:{SECRET}@host\\/x",
        f"http:\\/\\/host\\/x?sig={SECRET}", f"s3:///AKIA:{SECRET}@bucket", f"a http://b:80/c,http://u:{SECRET}@d",
    ],
)  # fmt: skip
def test_slashes_of_any_kind_hide_nothing(text: str) -> None:
    """One too many, as people type, and with a backslash, as some write JSON."""
    assert SECRET not in without_secrets(text)
    assert SECRET not in harmless(text)
    assert without_secrets(text)[:5] == text[:5]


@pytest.mark.parametrize(
    "part", ["/", "\\/", "://", "://a", "://a:", "://a:b@", "http://", "http://x?", "https:/a#", "@:"]
)
def test_a_text_by_the_megabyte_takes_no_time(part: str) -> None:
    """Names of tensors are a stranger's: time must not grow with the square of their length."""
    begun = time.process_time()
    without_secrets("http:" + part * (1_000_000 // len(part)))
    without_secrets(part * (1_000_000 // len(part)))
    assert time.process_time() - begun < 5
