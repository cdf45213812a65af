"""Writing into the files of another process: under its claim, and into no other folder of that name."""

from __future__ import annotations

from pathlib import Path

import pytest

import transaxle as tx
from transaxle.formats.store import leftovers
from transaxle.formats.store.staging import Staging, Writer


def test_a_shared_claim_lets_writers_in_and_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_PATIENCE", 0.2)
    target = tmp_path / "out"
    with Staging(target, resume=True) as stage:
        stage.prepare({"a": 4})
        with pytest.raises(tx.TransaxleError, match="another run is writing this target"):
            Writer(stage.path, sync=True, shared=True)
        stage.share()
        writer, second = (Writer(stage.path, sync=True, shared=True) for _ in range(2))
        writer.pwrite("a", 0, memoryview(b"ab"))
        second.pwrite("a", 2, memoryview(b"cd"))
        with pytest.raises(tx.TransaxleError, match="another run is writing this target"), Staging(target, resume=True):
            pass
        second.finish()
        with pytest.raises(tx.TransaxleError, match="a worker of this run is still writing"):
            stage.take_back()
        writer.finish()
        stage.take_back()
        stage.commit()
    assert (target / "a").read_bytes() == b"abcd"


def test_workers_keep_the_work_of_a_driver_that_died(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with Staging(target, resume=True) as stage:
        stage.prepare({"a": 4})
        stage.share()
        writer = Writer(stage.path, sync=True, shared=True)
    assert [each.outcome for each in tx.clean(target)] == ["kept"], "a worker is at work"
    with pytest.raises(tx.TransaxleError, match="another run is writing this target"), Staging(target):
        pass
    writer.close()
    assert [each.outcome for each in tx.clean(target)] == ["removed"]


def test_nothing_is_written_into_a_folder_that_came_later(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with Staging(target) as stage:
        stage.prepare({"a": 4})
        writer = Writer(stage.path, sync=True)
    with Staging(target) as stage:
        stage.prepare({"a": 4})
        with pytest.raises(tx.TransaxleError, match="opening it"):
            writer.pwrite("a", 0, memoryview(b"abcd"))
        with pytest.raises(tx.TransaxleError, match="creating it"):
            writer.put("b", b"small")
        assert (stage.path / "a").read_bytes() == bytes(4)
    writer.close()
    with pytest.raises(tx.TransaxleError, match="opening the folder for the unfinished work"):
        Writer(stage.path, sync=True)


def test_a_small_file_is_put_at_once(tmp_path: Path) -> None:
    writer = Writer(tmp_path, sync=True)
    for data in (b"one", b"another"):
        writer.put("small", data)
        assert (tmp_path / "small").read_bytes() == data
    writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_a_writer_that_comes_late_does_not_take_a_later_folder_for_its_own(tmp_path: Path) -> None:
    """A rank that stood still while the others gave up, and began again."""
    target = tmp_path / "out"
    with Staging(target) as stage:
        stage.prepare({"a": 4})
        first = stage.mark()
        Writer(stage.path, sync=True, run=first).close()
    with Staging(target) as stage:
        stage.prepare({"a": 4})
        assert stage.mark() != first
        with pytest.raises(tx.TransaxleError, match="looking for the run that this belongs to"):
            Writer(stage.path, sync=True, run=first)
        stage.pwrite("a", 0, memoryview(b"abcd"))
        stage.commit()
    assert [path.name for path in target.iterdir()] == ["a"]
