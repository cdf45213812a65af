"""A store that fails: what passes is tried again until it is right, what does not is a clear error in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import transaxle as tx
from tests.engine.distribute.arrays import do, planned
from tests.engine.distribute.test_object_store import SHARD, hidden, look_at, many
from tests.engine.killed import contents
from tests.formats.faulty_proxy import Fault, FaultyProxy, proxied
from tests.formats.s3_server import Bucket
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
