"""A store that fails, for several workers and for one process: what passes is tried again until it is right, what does
not is a clear error in time."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import fsspec
import pytest

import transaxle as tx
from tests.engine.distribute.arrays import do, planned
from tests.engine.distribute.test_object_store import SHARD, hidden, look_at, many
from tests.engine.distribute.test_one_process import sent
from tests.engine.killed import contents
from tests.formats.faulty_proxy import Fault, FaultyProxy, proxied
from tests.formats.s3_server import Bucket
from transaxle.engine.distribute import one_process
from transaxle.engine.distribute.driver import begin_work, commit_work
from transaxle.engine.distribute.item_work import let_go
from transaxle.errors import StorageError
from transaxle.formats.remote import multipart

LIMITS = {"config_kwargs": {"read_timeout": 1, "connect_timeout": 1, "retries": {"max_attempts": 2}}}
"""Settings of the client: what it waits for, and how often it tries by itself."""


@pytest.fixture
def proxy(bucket: Bucket, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy through which our own requests go, and not those of the test."""
    assert bucket.names() == []
    monkeypatch.setitem(fsspec.config.conf, "s3", LIMITS)
    monkeypatch.setattr(multipart, "PATIENCE", 4.0)
    monkeypatch.setattr(multipart, "_PAUSE", 0.05)
    with proxied(s3_server) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        yield found
        let_go()
        fsspec.get_filesystem_class("s3").clear_instance_cache()


class Sometimes:
    """Lets every so manieth request fail."""

    def __init__(self, fault: Fault, one_of: int) -> None:
        self._fault = fault
        self._one_of = one_of
        self._count = 0
        self._lock = threading.Lock()

    def __call__(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self._count += 1
            return None if self._count % self._one_of else self._fault


def part_number(path: str) -> int | None:
    """Which part a request sends."""
    found = re.search(r"partNumber=(\d+)", path)
    return int(found.group(1)) if found else None


class AllButTheFirstPart:
    """Lets every part fail but the one that comes first."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._first: int | None = None
        self._lock = threading.Lock()

    def __call__(self, method: str, path: str) -> Fault | None:
        number = part_number(path) if method == "PUT" else None
        with self._lock:
            if self._first is None:
                self._first = number
            return None if number in (None, self._first) else self._fault


@pytest.mark.parametrize(("fault", "one_of"), [("slow down", 4), ("reset", 6), ("truncate", 8), ("stall", 12)])
def test_what_passes_is_tried_again(
    fault: Fault, one_of: int, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path
) -> None:
    source = many(tmp_path / "source", 18)
    tx.convert(source, tmp_path / "wanted", to="safetensors", shard_size=SHARD)
    proxy.fails = Sometimes(fault, one_of)
    plan = planned(source, f"{bucket.url}/out", "safetensors", 3, shard_size=SHARD)
    begin_work(plan)
    do(plan)
    commit_work(plan)
    assert proxy.failed > 1
    proxy.fails = lambda _method, _path: None
    assert look_at(bucket) == contents(tmp_path / "wanted")
    assert hidden(bucket) == []


@pytest.mark.parametrize(("fault", "one_of"), [("slow down", 4), ("reset", 6), ("truncate", 8), ("stall", 12)])
def test_one_process_tries_again(
    fault: Fault, one_of: int, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_process, "ITEM", 6 << 20)
    source = many(tmp_path / "source", 18)
    tx.convert(source, tmp_path / "wanted", to="safetensors", shard_size=SHARD)
    proxy.fails = Sometimes(fault, one_of)
    report = tx.convert(source, f"{bucket.url}/out", to="safetensors", shard_size=SHARD, jobs=2)
    assert proxy.failed > 1
    proxy.fails = lambda _method, _path: None
    assert report.workers == {}
    assert look_at(bucket) == contents(tmp_path / "wanted")
    assert hidden(bucket) == []


@pytest.mark.parametrize("fault", ["slow down", "reset", "stall"])
def test_what_does_not_pass_ends_one_process_in_time(
    fault: Fault, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stays, but where it was to be resumed: then the parts that the store has taken are not sent again."""
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "retries", 2)
    monkeypatch.setattr(multipart, "SLOWEST", 64 << 20)
    monkeypatch.setattr(one_process, "ITEM", 6 << 20)
    source, url = many(tmp_path / "source", 18), f"{bucket.url}/out"
    convert = partial(tx.convert, source, url, to="safetensors", shard_size=SHARD, jobs=1)
    for resume in (False, True):
        proxy.fails = AllButTheFirstPart(fault)
        begun = time.monotonic()
        with pytest.raises(StorageError, match=r"sending part \d") as caught:
            convert(resume=resume)
        assert time.monotonic() - begun < 60
        assert "testing" not in str(caught.value)
        assert not [name for name in bucket.names() if name.startswith("out/")]
        proxy.fails = lambda _method, _path: None
        assert bool(hidden(bucket)) is resume
    there = sent(bucket)
    assert there
    seen: list[str] = []
    proxy.fails = lambda method, path: seen.append(path) if method == "PUT" else None
    convert(resume=True)
    numbers = {number for path in seen if (number := part_number(path)) is not None}
    assert numbers
    assert numbers.isdisjoint(number for _, number in there)
    proxy.fails = lambda _method, _path: None
    tx.convert(source, tmp_path / "wanted", to="safetensors", shard_size=SHARD)
    assert look_at(bucket) == contents(tmp_path / "wanted")
    assert hidden(bucket) == []


@pytest.mark.parametrize("fault", ["slow down", "reset", "stall"])
def test_what_does_not_pass_is_an_error_in_time(
    fault: Fault, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "retries", 2)
    monkeypatch.setattr(multipart, "PATIENCE", 1.5)
    monkeypatch.setattr(multipart, "SLOWEST", 64 << 20)
    source = many(tmp_path / "source", 12)
    plan = planned(source, f"{bucket.url}/out", "safetensors", 2, shard_size=SHARD)
    begin_work(plan)
    proxy.fails = lambda method, path: fault if method == "PUT" and "partNumber" in path else None
    begun = time.monotonic()
    with pytest.raises(StorageError, match=r"sending part \d") as caught:
        do(plan)
    assert time.monotonic() - begun < 30
    assert "testing" not in str(caught.value)
    assert not [name for name in bucket.names() if name.startswith("out/")]
    proxy.fails = lambda _method, _path: None
    do(plan)
    commit_work(plan)
    tx.convert(source, tmp_path / "wanted", to="safetensors", shard_size=SHARD)
    assert look_at(bucket) == contents(tmp_path / "wanted")


def test_a_lost_answer_to_the_last_call_is_no_failure(bucket: Bucket, proxy: FaultyProxy, tmp_path: Path) -> None:
    """S3 has completed the upload, and the answer is cut off: asked again, it knows no such upload."""
    source, lost = many(tmp_path / "source", 12), [True]
    plan = planned(source, f"{bucket.url}/out", "safetensors", 2, shard_size=SHARD)
    begin_work(plan)
    do(plan)

    def once(method: str, path: str) -> Fault | None:
        return "truncate" if method == "POST" and "uploadId" in path and lost and lost.pop() else None

    proxy.fails = once
    commit_work(plan)
    assert (proxy.failed, lost) == (1, [])
    tx.convert(source, tmp_path / "wanted", to="safetensors", shard_size=SHARD)
    assert look_at(bucket) == contents(tmp_path / "wanted")
    assert hidden(bucket) == []


def test_a_beginning_that_fails_leaves_no_uploads(
    bucket: Bucket, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "retries", 1)
    source = many(tmp_path / "source", 12)
    plan = planned(source, f"{bucket.url}/out", "safetensors", 2, shard_size=3 << 20)
    begun: list[str] = []

    def third(method: str, path: str) -> Fault | None:
        begun.extend([path] * (method == "POST"))
        return "reset" if method == "POST" and len(begun) > 2 else None

    for fails in (third, lambda _method, path: "reset" if "begun" in path else None):
        proxy.fails = fails
        with pytest.raises(StorageError):
            begin_work(plan)
        assert (bucket.names(), bucket.uploads()) == ([], [])
