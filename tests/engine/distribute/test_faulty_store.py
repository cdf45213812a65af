"""A store that fails, for several workers and for one process: what passes is tried again until it is right, what does
not is a clear error in time."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from msgspec import structs

import transaxle as tx
from tests.engine.distribute.arrays import all_of, do, planned
from tests.engine.distribute.test_object_store import SHARD, hidden, look_at, many
from tests.engine.distribute.test_one_process import sent
from tests.engine.killed import contents
from tests.formats.faulty_proxy import Fault, FaultyProxy
from tests.formats.s3_server import Bucket
from transaxle.engine.distribute import driver
from transaxle.engine.distribute.driver import begin_work, commit_work
from transaxle.engine.distribute.work_plan import WorkPlan
from transaxle.errors import StorageError
from transaxle.formats.store import multipart
from transaxle.formats.store.multipart import OpenUpload, S3Multipart
from transaxle.formats.store.service import Service
from transaxle.formats.store.upload import Upload

Fails = Callable[[str, str], Fault | None]


def sometimes(fault: Fault, one_of: int) -> Fails:
    """Let every so manieth request fail."""
    count = itertools.count(1)
    return lambda _method, _path: None if next(count) % one_of else fault


def part_number(path: str) -> int | None:
    """Which part a request sends."""
    found = re.search(r"partNumber=(\d+)", path)
    return int(found.group(1)) if found else None


def all_but_the_first_part(fault: Fault) -> Fails:
    """Let every part fail but the one that comes first."""
    passed: list[int] = []

    def fails(method: str, path: str) -> Fault | None:
        number = part_number(path) if method == "PUT" else None
        if number is None or number in passed:
            return None
        passed.extend([] if passed else [number])
        return None if number in passed else fault

    return fails


def demand_whole(bucket: Bucket, source: Path, folder: Path) -> None:
    """Demand that the target is what a conversion writes that nothing disturbs, and that nothing is left over."""
    tx.convert(source, folder / "wanted", to="safetensors", shard_size=SHARD)
    assert look_at(bucket) == contents(folder / "wanted")
    assert hidden(bucket) == []


def by_workers(source: Path, url: str) -> None:
    """Convert with three workers."""
    plan = planned(source, url, "safetensors", 3, shard_size=SHARD)
    all_of(plan)


def in_one_process(source: Path, url: str) -> None:
    """Convert without workers, in items that are uploaded as theirs."""
    assert tx.convert(source, url, to="safetensors", shard_size=SHARD, jobs=2).workers == {}


@pytest.mark.oracle
@pytest.mark.parametrize("convert", [by_workers, in_one_process], ids=lambda convert: convert.__name__)
@pytest.mark.parametrize(("fault", "one_of"), [("slow down", 4), ("reset", 6), ("stall", 12)])
def test_what_passes_is_tried_again(
    convert: Callable[[Path, str], None],
    fault: Fault,
    one_of: int,
    bucket: Bucket,
    proxy: FaultyProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "ITEM", 6 << 20)
    source = many(tmp_path / "source", 18)
    proxy.fails = sometimes(fault, one_of)
    convert(source, f"{bucket.url}/out")
    assert proxy.failed > 1
    proxy.fails = lambda _method, _path: None
    demand_whole(bucket, source, tmp_path)


@pytest.mark.oracle
@pytest.mark.parametrize("fault", ["slow down", "stall"])
def test_what_does_not_pass_ends_one_process_in_time(
    fault: Fault, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stays, but where it was to be resumed: then the parts that the store has taken are not sent again."""
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "retries", 1)
    monkeypatch.setattr(multipart, "SLOWEST", 64 << 20)
    monkeypatch.setattr(driver, "ITEM", 6 << 20)
    source, url = many(tmp_path / "source", 18), f"{bucket.url}/out"
    convert = partial(tx.convert, source, url, to="safetensors", shard_size=SHARD, jobs=1)
    for resume in (False, True):
        proxy.fails = all_but_the_first_part(fault)
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
    demand_whole(bucket, source, tmp_path)


class Completions:
    """Lets the requests that complete an upload fail: the first one in some way, those that follow in another.

    Args:
        first: how the first one fails.
        following: how the others fail, until the first one is carried out.
    """

    def __init__(self, proxy: FaultyProxy, first: Fault, following: Fault | None) -> None:
        self._proxy = proxy
        self._first = first
        self._following = following
        self.asked = 0
        """How often it was asked to complete."""

    def __call__(self, method: str, path: str) -> Fault | None:
        if method != "POST" or "uploadId" not in path:
            return None
        self.asked += 1
        if self.asked == 1:
            return self._first
        return None if self._proxy.carried_out.is_set() else self._following


COMPLETED: list[tuple[Fault, Fault | None]] = [("truncate", None), ("late", "error")]
"""How the answer to the last call is lost, and what the service says until it has done it."""


def done_but_for_the_end(bucket: Bucket, source: Path) -> WorkPlan:
    """Do all items of a plan with one file, which has several parts."""
    plan = planned(source, f"{bucket.url}/out", "safetensors", 2, shard_size=SHARD)
    begin_work(plan)
    do(plan)
    return plan


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("first", "following", "foretold"), [*((*each, True) for each in COMPLETED), ("lost", None, False)]
)
def test_an_answer_to_the_last_call_that_is_lost_is_no_failure(
    first: Fault,
    following: Fault | None,
    foretold: bool,
    bucket: Bucket,
    proxy: FaultyProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S3 completes the upload, and nobody is told: asked again, it is still at it, or knows no such upload.

    The file is known by its tag; where tags are no sums of bytes, as with some keys, by having another one than before.
    """
    if not foretold:
        monkeypatch.setattr(multipart, "expected_tag", lambda _tags: None)
    source, proxy.delay = many(tmp_path / "source", 12), 1.5
    plan = done_but_for_the_end(bucket, source)
    proxy.fails = fails = Completions(proxy, first, following)
    commit_work(plan)
    assert fails.asked > 1 or first != "late"
    assert proxy.failed >= 1
    demand_whole(bucket, source, tmp_path)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("fault", "message"), [("error", "has not put the file together within 2 seconds"), ("forbidden", "access denied")]
)
def test_an_upload_that_is_never_completed_is_an_error_in_time(
    fault: Fault, message: str, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once where the service refuses for good; nothing is visible, and all that was sent is kept."""
    monkeypatch.setattr(multipart, "COMPLETION", 2.0)
    source = many(tmp_path / "source", 12)
    plan = done_but_for_the_end(bucket, source)
    there = bucket.uploads()
    proxy.fails = fails = Completions(proxy, fault, fault)
    begun = time.monotonic()
    with pytest.raises(StorageError, match=message):
        commit_work(plan)
    assert time.monotonic() - begun < 30
    assert (fails.asked == 1) is (fault == "forbidden")
    assert not [name for name in bucket.names() if name.startswith("out/")]
    assert bucket.uploads() == there
    proxy.fails = lambda _method, _path: None
    commit_work(plan)
    demand_whole(bucket, source, tmp_path)


def test_a_file_of_before_is_not_taken_for_the_one_that_was_sent(
    bucket: Bucket, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload is gone, and at its place is another one with as many parts, its tag foretold or not."""
    path, client = f"{bucket.name}/file", S3Multipart(Service(f"{bucket.url}/file"))
    assert proxy.failed == 0
    monkeypatch.setattr(multipart, "_MAX_CHECKS", 2)
    rng = np.random.default_rng(0)
    for foretold in (True, False):
        if not foretold:
            monkeypatch.setattr(multipart, "expected_tag", lambda _tags: None)
        first, second = client.begin_upload(path, "file"), client.begin_upload(path, "file")
        before = rng.bytes(1000)
        client.complete(path, first, [client.send_part(path, first, 1, before, "file")], "file")
        tags = [client.send_part(path, second, 1, rng.bytes(1000), "file")]
        client.abort(path, second, "file")
        with pytest.raises(StorageError, match="the upload is gone"):
            client.complete(path, second, tags, "file")
        assert bucket.get("file") == before


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


def lost_beginnings() -> Fails:
    """Let the service begin an upload of each file, and tell nobody of the first one."""
    asked: set[str] = set()

    def fails(method: str, path: str) -> Fault | None:
        if method != "POST" or "uploadId" in path or path in asked:
            return None
        asked.add(path)
        return "lost"

    return fails


def saved(source: Path, url: str) -> None:
    """Write by the client's own streams, as saves of models do."""
    with Upload(url) as upload:
        files = {path.name: path.read_bytes() for path in source.iterdir()}
        upload.prepare({name: len(data) for name, data in files.items()})
        for name, data in files.items():
            upload.pwrite(name, 0, memoryview(data))
        upload.commit()


@pytest.mark.oracle
@pytest.mark.parametrize("write", [by_workers, in_one_process, saved], ids=lambda write: write.__name__)
def test_uploads_that_the_service_began_and_told_nobody_of_are_removed(
    write: Callable[[Path, str], None], bucket: Bucket, proxy: FaultyProxy, tmp_path: Path
) -> None:
    """And no others: of other files, or with parts."""
    source, client = many(tmp_path / "source", 12), bucket.client
    others = {}
    for key in ("out/model.safetensors", "out/model-00001-of-00002.safetensors", "out/other", "out2/model.safetensors"):
        others[key] = client.call_s3("create_multipart_upload", Bucket=bucket.name, Key=key)["UploadId"]
        which = {"Bucket": bucket.name, "Key": key, "UploadId": others[key]}
        if "/model" in key and key.startswith("out/"):
            client.call_s3("upload_part", PartNumber=1, Body=b"x", **which)
    proxy.fails = lost_beginnings()
    write(source, f"{bucket.url}/out")
    assert proxy.failed >= 1
    assert sorted(bucket.uploads()) == sorted(others)
    assert tx.verify(f"{bucket.url}/out").ok or write is saved
    assert tx.diff(source, f"{bucket.url}/out").equal


@pytest.mark.oracle
@pytest.mark.parametrize("sign", ["later", "work beside the target"])
def test_an_upload_that_may_be_of_another_run_is_left_alone(
    sign: str, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no parts yet, but began after ours, or is of workers that have just begun."""
    source, listed = many(tmp_path / "source", 12), S3Multipart.list_uploads
    if sign == "later":

        def later(self: S3Multipart, path: str, file: str) -> Iterator[OpenUpload]:
            for each in listed(self, path, file):
                yield structs.replace(each, since="9999-01-01 00:00:00+00:00")

        monkeypatch.setattr(S3Multipart, "list_uploads", later)
    else:
        begin_work(planned(source, f"{bucket.url}/out", "safetensors", 1, shard_size=SHARD))
    before = bucket.uploads()
    proxy.fails = lost_beginnings()
    saved(source, f"{bucket.url}/out")
    assert proxy.failed == 3
    assert len(bucket.uploads()) == len(before) + 3


@pytest.mark.oracle
def test_listing_uploads_may_be_forbidden(bucket: Bucket, proxy: FaultyProxy, tmp_path: Path) -> None:
    """Whoever may not see uploads can still convert, replace, and resume: what is unfinished, and what is complete."""
    source, url = many(tmp_path / "source", 12), f"{bucket.url}/out"
    tx.convert(source, tmp_path / "wanted", to="safetensors", shard_size=SHARD)
    begin_work(planned(source, url, "safetensors", 1, shard_size=SHARD))
    proxy.fails = lambda method, path: "forbidden" if method == "GET" and "?uploads" in path else None
    ways: list[dict[str, Any]] = [{"resume": True}, {"overwrite": True}, {"resume": True}]
    for how in ways:
        tx.convert(source, url, to="safetensors", shard_size=SHARD, **how)
        assert look_at(bucket) == contents(tmp_path / "wanted")
    assert proxy.failed >= 2
    saved(source, f"{bucket.url}/saved")
    with pytest.raises(StorageError, match="listing the uploads: access denied"):
        tx.clean(url)


def test_bytes_of_another_range_are_refused(bucket: Bucket, proxy: FaultyProxy, tmp_path: Path) -> None:
    source = many(tmp_path / "source", 12)
    for path in source.iterdir():
        bucket.put(f"out/{path.name}", path.read_bytes())

    def shifted(method: str, path: str) -> Fault | None:
        return "shift" if method == "GET" and path.endswith(".safetensors") else None

    with tx.open(f"{bucket.url}/out") as there:
        proxy.fails = shifted
        with pytest.raises(StorageError, match="was requested, but the server sent bytes 0-"):
            tx.convert(there, tmp_path / "out", to="safetensors")
    assert not (tmp_path / "out").exists()
