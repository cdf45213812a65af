"""Several workers that write to a service, each its own files: the bytes of one process, nothing visible too early,
nothing left over."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import transaxle as tx
from tests import checkpoints
from tests.engine.distribute.arrays import all_of, do, in_child, planned
from tests.engine.distribute.test_executor import Backwards
from tests.engine.distribute.test_item_work import plain, refused
from tests.engine.killed import Calls, Death, contents
from tests.formats.s3_server import Bucket
from tests.formats.stores import download
from transaxle.cli import main
from transaxle.engine.distribute.driver import begin_work, commit_work
from transaxle.engine.distribute.item_work import close_plan
from transaxle.errors import UsageError, refuse
from transaxle.formats.store.multipart import S3Multipart
from transaxle.formats.store.service import Service
from transaxle.move import journal
from transaxle.move.journal import SPAN

SHARD = 1 << 30
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    yield
    close_plan()


def many(folder: Path, mebibytes: int = 36) -> Path:
    """A checkpoint of tensors of 3 MiB and of a few bytes, in two files."""
    rng = np.random.default_rng(0)
    held = {}
    for number in range(mebibytes // 3):
        held[f"w{number:02}"] = rng.standard_normal((768, 1024)).astype(np.float32)
        held[f"w{number:02}.bias"] = rng.standard_normal(7).astype(np.float32)
    return checkpoints.write(folder, held, shards=2)


def hidden(bucket: Bucket) -> list[str]:
    """What lies in the bucket that belongs to no checkpoint."""
    return [name for name in bucket.names() if "transaxle-partial" in name] + bucket.uploads()


def there(bucket: Bucket, folder: Path, under: str = "out") -> Any:
    """What the bucket holds under a name."""
    return contents(download(bucket, under, folder))


def look_at(bucket: Bucket) -> dict[str, bytes]:
    """What the bucket holds of the target, by the test's own client."""
    return {name.removeprefix("out/"): bucket.get(name) for name in bucket.names() if name.startswith("out/")}


@pytest.mark.oracle
@pytest.mark.parametrize(("items", "shard", "span"), [(9, 16 * MIB, SPAN), (7, 4 * MIB, MIB), (7, SHARD, MIB)])
def test_the_bytes_are_those_of_one_process(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, items: int, shard: int, span: int
) -> None:
    """In two processes and any order, begun twice; with fewer files than items, and several in one."""
    monkeypatch.setattr(journal, "SPAN", span)
    source = many(tmp_path / "source")
    wanted = tx.convert(source, tmp_path / "wanted", to="safetensors", shard_size=shard)
    plan = planned(source, f"{bucket.url}/out", "safetensors", items, shard_size=shard)
    files = len([name for name in contents(tmp_path / "wanted") if name.endswith(".safetensors")])
    assert begin_work(plan) == min(items, files)
    assert begin_work(plan) == min(items, files)
    numbers = random.Random(0).sample(range(items), items)
    assert in_child(lambda: do(plan, numbers[: items // 2])) == 0
    do(plan, numbers[items // 2 :])
    assert not [name for name in bucket.names() if name.startswith("out/")]
    assert begin_work(plan) == 0
    report = commit_work(plan)
    assert there(bucket, tmp_path / "found") == contents(tmp_path / "wanted")
    assert hidden(bucket) == []
    same = ("tensors", "bytes_read", "bytes_written", "checks", "kept", "ignored", "carried")
    assert {key: getattr(report, key) for key in same} == {key: getattr(wanted, key) for key in same}
    if shard == SHARD:
        (file,) = (name for name in bucket.names() if name.endswith(".safetensors"))
        assert bucket.parts(file) >= 4
    assert tx.verify(f"{bucket.url}/out").ok


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("make", "name", "to", "options"),
    [
        (plain, "out.safetensors", "automodel", {}),
        (many, "out", "torch", {}),
        (plain, "out", "dcp:torchtitan", {}),
        (plain, "out", "megatron_torch", {"ep": 2}),
    ],
)
def test_all_formats(
    bucket: Bucket, tmp_path: Path, make: Callable[[Path], Path], name: str, to: str, options: dict[str, Any]
) -> None:
    """Small files that every item has a piece of, digests before the tensors, files for each rank."""
    source = make(tmp_path / "source")
    wanted = tmp_path / "wanted" / name
    wanted.parent.mkdir()
    tx.convert(source, wanted, to=to, shard_size=SHARD, **options)
    plan = planned(source, f"{bucket.url}/dir/{name}", to, 5, shard_size=SHARD, **options)
    all_of(plan)
    assert {file: bucket.get(f"dir/{file}") for file in contents(wanted.parent)} == contents(wanted.parent)
    assert len(bucket.names()) == len(contents(wanted.parent))
    assert hidden(bucket) == []


def test_a_run_that_fails_leaves_nothing_or_what_resume_needs(bucket: Bucket, tmp_path: Path) -> None:
    source, url = many(tmp_path / "source", 18), f"{bucket.url}/out"
    how: dict[str, Any] = {"to": "safetensors", "items": 3, "shard_size": 7 * MIB}

    def failing(number: int) -> None:
        if number == 1:
            raise refuse("IO", "the cable")

    refused("IO", lambda: tx.convert(source, url, on=Backwards(failing), **how))
    assert (bucket.names(), bucket.uploads()) == ([], [])
    refused("IO", lambda: tx.convert(source, url, on=Backwards(failing), resume=True, **how))
    assert "--resume" in refused("EXISTS", lambda: tx.convert(source, url, on=Backwards(), **how)).hint
    following = Backwards()
    report = tx.convert(source, url, on=following, resume=True, **how)
    assert following.done == [1, 0]
    assert 0 < report.resumed < report.tensors
    assert tx.diff(source, url).equal
    assert hidden(bucket) == []


@pytest.mark.oracle
def test_nothing_is_committed_while_something_is_missing(bucket: Bucket, tmp_path: Path) -> None:
    source = many(tmp_path / "source", 18)
    plan = planned(source, f"{bucket.url}/out", "safetensors", 3, shard_size=7 * MIB)
    for call in (lambda: commit_work(plan), lambda: do(plan, [0])):
        assert "has not begun" in str(refused("INCOMPLETE", call))
    begin_work(plan)
    do(plan, [0, 2])
    assert "1 of 3 items have no result: 1\n" in str(refused("INCOMPLETE", lambda: commit_work(plan)))
    do(plan, [1])
    result = bucket.get(".out.transaxle-partial/items/2")
    bucket.put(".out.transaxle-partial/items/2", result[:-1] + b" ")
    assert "no result: 2\n" in str(refused("INCOMPLETE", lambda: commit_work(plan))), "a damaged one is none"
    do(plan, [2])
    client = bucket.client
    uploads = client.call_s3("list_multipart_uploads", Bucket=bucket.name)["Uploads"]
    upload = min(uploads, key=lambda each: each["Key"])
    parts = {"Bucket": bucket.name, "Key": upload["Key"], "UploadId": upload["UploadId"]}
    client.call_s3("upload_part", PartNumber=1, Body=b"x" * (6 << 20), **parts)
    assert "no result: 0\n" in str(refused("INCOMPLETE", lambda: commit_work(plan))), "others have sent this part"
    assert begin_work(plan) == 1
    do(plan)
    commit_work(plan)
    tx.convert(source, tmp_path / "wanted", to="safetensors", shard_size=7 * MIB)
    assert there(bucket, tmp_path / "found") == contents(tmp_path / "wanted")


@pytest.mark.oracle
def test_uploads_that_somebody_removes_are_missed(bucket: Bucket, tmp_path: Path) -> None:
    """Just before the commit: what was to be replaced, with the same names and sizes, is not taken for the new one."""
    old, new, url = many(tmp_path / "old", 6), many(tmp_path / "new", 6), f"{bucket.url}/out"
    (file,) = (path for path in sorted(new.glob("*.safetensors"))[:1])
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    tx.convert(old, url, to="safetensors")
    before = look_at(bucket)

    class Removing(Backwards):
        def run(self, *asked: Any) -> None:
            super().run(*asked)
            for each in bucket.client.call_s3("list_multipart_uploads", Bucket=bucket.name)["Uploads"]:
                which = {"Key": each["Key"], "UploadId": each["UploadId"]}
                bucket.client.call_s3("abort_multipart_upload", Bucket=bucket.name, **which)

    call = partial(tx.convert, new, url, to="safetensors", items=2, overwrite=True)
    refused("INCOMPLETE", lambda: call(on=Removing()))
    assert look_at(bucket) == before
    refused("INCOMPLETE", lambda: call(on=Removing(), resume=True))
    assert look_at(bucket) == before
    call(on=Backwards(), resume=True)
    assert {name: len(data) for name, data in look_at(bucket).items()} == {n: len(d) for n, d in before.items()}
    assert look_at(bucket) != before
    assert tx.diff(new, url).equal
    assert hidden(bucket) == []


@pytest.mark.oracle
def test_work_of_others_and_of_another_division(bucket: Bucket, tmp_path: Path) -> None:
    source = many(tmp_path / "source", 18)
    first = planned(source, f"{bucket.url}/out", "safetensors", 3)
    begin_work(first)
    do(first, [0])
    assert "another conversion" in str(refused("EXISTS", lambda: do(planned(source, f"{bucket.url}/out", "torch", 3))))
    second = planned(source, f"{bucket.url}/out", "safetensors", 2)
    assert "divided otherwise" in str(refused("INCOMPLETE", lambda: do(second, [0])))
    assert begin_work(second) == 2
    assert len(bucket.uploads()) == len(set(bucket.uploads())) > 1, "one for each file"
    refused("INCOMPLETE", lambda: do(first, [1]))
    do(second)
    upload = bucket.client.call_s3("list_multipart_uploads", Bucket=bucket.name)["Uploads"][0]
    which = {"Bucket": bucket.name, "Key": upload["Key"], "UploadId": upload["UploadId"]}
    bucket.client.call_s3("abort_multipart_upload", **which)
    refused("INCOMPLETE", lambda: commit_work(second))
    assert begin_work(second) == 1
    do(second)
    bucket.put("out/notes.txt", b"mine")
    assert "already exists" in str(refused("EXISTS", lambda: commit_work(second)))
    bucket.delete("out/notes.txt")
    commit_work(second)
    tx.convert(source, tmp_path / "wanted", to="safetensors", shard_size=8000)
    assert there(bucket, tmp_path / "found") == contents(tmp_path / "wanted")
    assert hidden(bucket) == []


def test_clean_removes_what_a_run_leaves(bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, url = many(tmp_path / "source", 18), f"{bucket.url}/models/out"
    bucket.put("models/outside", b"mine")
    plan = planned(source, url, "safetensors", 3, shard_size=SHARD)
    begin_work(plan)
    do(plan, [0, 2])
    client = bucket.client
    other = client.call_s3("create_multipart_upload", Bucket=bucket.name, Key="models/out/other")["UploadId"]
    client.call_s3("create_multipart_upload", Bucket=bucket.name, Key="models/outer/another")
    which = {"Bucket": bucket.name, "Key": "models/out/other", "UploadId": other}
    client.call_s3("upload_part", PartNumber=1, Body=b"x" * 1000, **which)
    work, upload = tx.clean(url, remove=False)
    assert (work.path, work.target) == (f"{bucket.url}/models/.out.transaxle-partial", url)
    assert work.what == "unfinished work: 2 work items are done, --resume continues it"
    assert work.nbytes > 6 * MIB
    assert upload.path == f"{url}/other?uploadId={other}"
    assert upload.nbytes == 1000
    assert len(tx.clean(bucket.url, remove=False)) == 3, "all uploads, and hidden folders that are directly there"
    assert len(tx.clean(f"{bucket.url}/models", remove=False)) == 3
    capsys.readouterr()
    assert main(["clean", url]) == 2, "it asks first"
    assert "other?uploadId" in capsys.readouterr().out
    assert len(bucket.uploads()) == 3
    assert main(["clean", url, "--yes"]) == 0
    assert capsys.readouterr().out.count("removed") == 2
    assert (bucket.names(), bucket.uploads()) == (["models/outside"], ["models/outer/another"])
    assert tx.clean(url) == ()
    refused("INCOMPLETE", lambda: do(plan, [1]))
    assert tx.clean(f"{bucket.url}/models/.gone.transaxle-partial") == ()


def test_clean_knows_targets_with_a_question_mark(bucket: Bucket, tmp_path: Path) -> None:
    """It is part of a name on S3, not the beginning of a query."""
    source, url = many(tmp_path / "source", 6), f"{bucket.url}/step?1"
    begin_work(planned(source, url, "safetensors", 2))
    bucket.client.call_s3("create_multipart_upload", Bucket=bucket.name, Key="step?1/other")
    work, upload = tx.clean(url)
    assert (work.target, work.outcome) == (url, "removed")
    assert (upload.target, upload.outcome) == (f"{url}/other", "removed")
    assert (bucket.names(), bucket.uploads()) == ([], [])


CHANGES: Calls = {S3Multipart: ("begin_upload", "send_part", "complete", "put", "abort"), Service: ("delete",)}
"""What changes something on the service."""


def look(bucket: Bucket, wanted: dict[str, bytes]) -> bool:
    """Demand that what is visible is no checkpoint, or all of it; tell which."""
    visible = {name.removeprefix("out/") for name in bucket.names() if name.startswith("out/")}
    if "transaxle.json" in visible or any(name.endswith(".index.json") for name in visible):
        assert {name for name in wanted if name.endswith(".safetensors")} <= visible
    for name in visible:
        assert bucket.get(f"out/{name}") == wanted[name]
    return "transaxle.json" in visible


def killed_at(points: list[int], bucket: Bucket, tmp_path: Path) -> int:
    """Kill a run at some points, each time look at what is there, and go on or clean; return how many died."""
    source, url = many(tmp_path / "source", 27), f"{bucket.url}/out"
    tx.convert(source, tmp_path / "wanted", to="safetensors", shard_size=10 * MIB)
    wanted, deaths = contents(tmp_path / "wanted"), 0
    plan = planned(source, url, "safetensors", 3, shard_size=10 * MIB)
    for number, at in enumerate(points):

        def dying(at: int = at) -> None:
            Death(at, CHANGES).prepare()
            all_of(plan)

        deaths += bool(in_child(dying))
        whole = look(bucket, wanted)
        if number % 2 and not whole:
            tx.clean(url)
            assert (bucket.names(), bucket.uploads()) == ([], [])
        if not whole:
            all_of(plan)
        elif hidden(bucket):
            with suppress(UsageError):  # it is done, and what tells so may be gone already
                all_of(plan)
        assert look(bucket, wanted)
        assert len([name for name in bucket.names() if name.startswith("out/")]) == len(wanted)
        tx.clean(url)
        assert hidden(bucket) == []
        for name in bucket.names():
            bucket.delete(name)
    return deaths


@pytest.mark.oracle
@pytest.mark.parametrize("first", range(10))
def test_killed_at_any_point(bucket: Bucket, tmp_path: Path, first: int) -> None:
    assert killed_at(list(range(first, 50, 10)), bucket, tmp_path) >= 4
