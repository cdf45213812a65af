"""One process that writes to a service and is killed: the next one goes on with what the service has of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import transaxle as tx
from tests.engine.distribute.arrays import do, in_child, planned
from tests.engine.distribute.test_item_work import refused
from tests.engine.distribute.test_object_store import CHANGES, MIB, hidden, look, look_at, many
from tests.engine.killed import Death, contents
from tests.formats.s3_server import Bucket
from transaxle.cli import main
from transaxle.engine.distribute import driver
from transaxle.engine.distribute.driver import begin_work
from transaxle.engine.distribute.item_work import close_plan
from transaxle.errors import refuse
from transaxle.formats.store.multipart import S3Multipart

HOW: dict[str, Any] = {"to": "safetensors", "shard_size": 10 * MIB, "jobs": 2}
Part = tuple[str, int]


@pytest.fixture(autouse=True)
def _small_items(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three items: three files, of two parts each."""
    monkeypatch.setattr(driver, "ITEM", 9 * MIB)
    yield
    close_plan()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return many(tmp_path / "source", 27)


@pytest.fixture
def wanted(source: Path, tmp_path: Path) -> dict[str, bytes]:
    tx.convert(source, tmp_path / "wanted", **HOW)
    found: dict[str, bytes] = contents(tmp_path / "wanted")
    return found


def sent(bucket: Bucket) -> dict[Part, str]:
    """The parts of all uploads that the service has, by the test's own client."""
    found = {}
    for each in bucket.client.call_s3("list_multipart_uploads", Bucket=bucket.name).get("Uploads", []):
        which = {"Bucket": bucket.name, "Key": each["Key"], "UploadId": each["UploadId"]}
        for part in bucket.client.call_s3("list_parts", **which).get("Parts", []):
            found[each["Key"].removeprefix("out/"), part["PartNumber"]] = part["ETag"]
    return found


@pytest.fixture
def sending(monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    """The parts that this process sends, as they are sent."""
    parts: list[Part] = []
    send = S3Multipart.send_part

    def noted(self: S3Multipart, path: str, upload: str, number: int, data: bytes, file: str) -> str:
        parts.append((file, number))
        return send(self, path, upload, number, data, file)

    monkeypatch.setattr(S3Multipart, "send_part", noted)
    return parts


def killed_at(
    points: list[int], source: Path, wanted: dict[str, bytes], bucket: Bucket, sending: list[Part]
) -> tuple[int, int]:
    """Kill a run at some points, and go on each time; return how many died, and how many parts were not sent again."""
    url, deaths, kept = f"{bucket.url}/out", 0, 0
    for number, at in enumerate(points):

        def dying(at: int = at, **options: Any) -> None:
            Death(at, CHANGES).prepare()
            tx.convert(source, url, **HOW, **options)

        deaths += bool(in_child(dying))
        if not look(bucket, wanted) and number % 3 == 1:
            in_child(partial(dying, resume=True))  # whoever goes on may die too
        whole, there = look(bucket, wanted), sent(bucket)
        if not whole and bucket.names():
            refused("EXISTS", lambda: tx.convert(source, url, **HOW))
            assert sent(bucket) == there
        sending.clear()
        report = tx.convert(source, url, resume=True, **HOW)
        assert not set(sending) & there.keys(), f"point {at}: sent again"
        assert len(set(sending)) == len(sending)
        assert report.workers == {}
        kept += len(there)
        assert look_at(bucket) == wanted, f"point {at}"
        assert hidden(bucket) == [], f"point {at}: orphans"
        for name in bucket.names():
            bucket.delete(name)
    return deaths, kept


@pytest.mark.oracle
@pytest.mark.parametrize("first", range(6))
def test_killed_at_any_point(
    source: Path, wanted: dict[str, bytes], bucket: Bucket, sending: list[Part], first: int
) -> None:
    """Many points are in the beginning and the clean-up: the six parts are there from the 26th to the 31st at most."""
    deaths, kept = killed_at(list(range(first, 40, 6)), source, wanted, bucket, sending)
    assert deaths >= 4
    assert kept >= 2


def test_what_a_run_that_fails_leaves(
    source: Path, wanted: dict[str, bytes], bucket: Bucket, sending: list[Part], capsys: pytest.CaptureFixture[str]
) -> None:
    url, done = f"{bucket.url}/out", 0

    def stop(count: int) -> None:
        nonlocal done
        done += count
        if done > 15 * MIB:
            raise refuse("IO", "the cable")

    def failing(**options: Any) -> Callable[[], object]:
        return lambda: tx.convert(source, url, progress=stop, **HOW, **options)

    refused("IO", failing())
    assert (bucket.names(), bucket.uploads()) == ([], [])
    done = 0
    refused("IO", failing(resume=True))
    there = sent(bucket)
    assert there
    assert "unfinished work" in str(refused("EXISTS", lambda: tx.convert(source, url, **HOW)))
    assert "another conversion" in str(refused("EXISTS", lambda: tx.convert(source, url, to="torch", resume=True)))
    progressed: list[int] = []
    sending.clear()
    report = tx.convert(source, url, resume=True, progress=progressed.append, **HOW)
    assert not set(sending) & there.keys()
    assert 0 < report.resumed < report.tensors
    assert sum(progressed) == sum(tensor.nbytes for tensor in tx.open(source).values())
    assert look_at(bucket) == wanted
    assert hidden(bucket) == []
    command = ["convert", str(source), url, "--to", "safetensors", "--shard-size", str(10 * MIB), "--resume"]
    assert main(command) == 0, "it is there already"
    assert "18 tensors had been written" in capsys.readouterr().out
    assert main(["plan", *command[1:]]) == 0
    name = next(name for name in sorted(wanted) if name.endswith(".safetensors"))
    damaged = bytearray(wanted[name])
    damaged[-1] ^= 1
    bucket.put(f"out/{name}", bytes(damaged))
    refused("EXISTS", lambda: tx.convert(source, url, resume=True, **HOW))
    assert main(["plan", *command[1:]]) == 2
    assert bucket.get(f"out/{name}") == bytes(damaged)


@pytest.mark.oracle
def test_a_run_that_died_while_it_cleaned_up(source: Path, wanted: dict[str, bytes], bucket: Bucket) -> None:
    """What tells that the work has begun is gone, and the rest is not: the checkpoint is there, and is left alone."""
    url = f"{bucket.url}/out"
    tx.convert(source, url, **HOW)
    bucket.put(".out.transaxle-partial/items/0", b"left")
    report = tx.convert(source, url, resume=True, **HOW)
    assert report.resumed == report.tensors
    assert report.bytes_written == tx.convert(source, url, overwrite=True, **HOW).bytes_written
    assert any("transaxle-partial" in note for note in report.leftovers)
    assert look_at(bucket) == wanted
    assert hidden(bucket) == []


@pytest.mark.oracle
def test_one_process_goes_on_where_several_were(
    source: Path, wanted: dict[str, bytes], bucket: Bucket, sending: list[Part]
) -> None:
    """In their items, and their parts."""
    url = f"{bucket.url}/out"
    plan = planned(source, url, "safetensors", 4, shard_size=10 * MIB)
    begin_work(plan)
    do(plan, [0, 3])
    there = sent(bucket)
    sending.clear()
    report = tx.convert(source, url, resume=True, **HOW)
    assert 0 < report.resumed < report.tensors
    assert not set(sending) & there.keys()
    assert look_at(bucket) == wanted
    assert hidden(bucket) == []
