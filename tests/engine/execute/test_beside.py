"""A reader beside an overwrite: it gets the old checkpoint whole, the new one whole, or a refusal; never a mixture."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

import transaxle as tx
from tests.checkpoints import write
from tests.engine import demand_refusal
from tests.engine.killed import one_by_one
from tests.formats.files import open_files
from transaxle.errors import TransaxleError
from transaxle.formats.storage import copier, local
from transaxle.formats.storage.storage import Handles
from transaxle.formats.store import place
from transaxle.formats.store.staging import Staging

NAMES = tuple(f"model.layers.{i}.weight" for i in range(12))
FORMS = ("safetensors", "torch", "dcp")


def of(folder: Path, value: int) -> Path:
    """A checkpoint whose values are all alike, so that a mixture shows."""
    return write(folder, {name: np.full((40, 5), value, np.float32) for name in NAMES}, config={"a": value})


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    return [of(tmp_path / f"of-{value}", value) for value in range(4)]


def convert(source: Path, target: Path, form: str) -> None:
    tx.convert(source, target, to=f"{form}:identity", shard_size=1000, overwrite=True)


def values(checkpoint: tx.Checkpoint) -> set[float]:
    return {float(value) for name in NAMES for value in np.unique(checkpoint[name].read())}


def of_path(folder: Path) -> set[float]:
    with tx.open(folder) as opened:
        return values(opened)


@pytest.mark.oracle
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("limit", [1, 100])
def test_what_is_open_is_what_it_was_or_an_error(
    tmp_path: Path, sources: list[Path], monkeypatch: pytest.MonkeyPatch, form: str, limit: int
) -> None:
    """Replaced after its catalog, and one tensor, were read; files are opened once more where few may be open."""
    monkeypatch.setattr(local, "Handles", partial(Handles, limit=limit))
    out = tmp_path / "out"
    convert(sources[0], out, form)
    said: list[str] = []
    with tx.open(out) as opened:
        assert float(opened[NAMES[0]].read()[0, 0]) == 0
        for source in sources[1:]:
            convert(source, out, form)
            try:
                assert values(opened) == {0}
            except TransaxleError as error:
                said.append(str(error))
    assert all("CORRUPT" in each and "was replaced while it was open" in each for each in said)
    assert said or limit > 1
    assert of_path(out) == {3}
    assert tx.verify(out)


def test_a_file_of_the_new_one_is_not_read_as_one_of_the_old(tmp_path: Path, sources: list[Path]) -> None:
    """Not even one that had not been opened before, and not where the new folder has the number of the old one."""
    out = tmp_path / "out"
    convert(sources[0], out, "safetensors")
    storage, read = local.LocalStorage(out), local.LocalStorage(out)
    assert b'"a": 0' in read.read("config.json", 0, read.size("config.json"))
    for source in sources[1:]:
        convert(source, out, "safetensors")
        for act in (
            lambda: storage.read("config.json", 0, 8),
            lambda: storage.size("transaxle.json"),
            storage.listing,
            read.recheck,
        ):
            with demand_refusal("CORRUPT", "was replaced while it was open"):
                act()
    storage.close()
    read.close()


@pytest.mark.oracle
@pytest.mark.parametrize("form", ["safetensors", "dcp"])
@pytest.mark.parametrize("read", [of_path, tx.verify], ids=["read", "verify"])
@pytest.mark.parametrize("atomic", [True, False])
def test_a_reader_among_overwrites(
    tmp_path: Path,
    sources: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    read: Callable[[Path], set[float] | tx.Verification],
    atomic: bool,
) -> None:
    if not atomic:
        monkeypatch.setattr(place, "exchange", lambda *_: False)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    out, done = tmp_path / "out", Event()
    convert(sources[0], out, form)

    def overwrite() -> None:
        for turn in range(12):
            convert(sources[turn % 4], out, form)
        done.set()

    writer = Thread(target=overwrite)
    writer.start()
    outcomes: list[str] = []
    while not done.is_set():
        try:
            found = read(out)
        except TransaxleError as error:
            outcomes.append(error.code)
        else:
            assert found if isinstance(found, tx.Verification) else len(found) == 1, found
            outcomes.append("whole")
    writer.join()
    assert "whole" in outcomes
    assert set(outcomes) <= {"whole", "CORRUPT", "IO", "INCOMPLETE", "UNSUPPORTED"}


def test_a_source_whose_content_changes_is_refused_whatever_its_times_say(tmp_path: Path, sources: list[Path]) -> None:
    """Size and time of change are put back; the inode's own time is the system's."""
    file = sources[0] / "model.safetensors"
    was = file.stat()
    pwrite, calls = Staging.pwrite, iter(range(10**6))

    def meddling(self: Staging, name: str, offset: int, view: memoryview) -> None:
        if next(calls) == 5:
            with file.open("r+b") as data:
                data.seek(-4, os.SEEK_END)
                data.write(b"\x01\x02\x03\x04")
            os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
            now = file.stat()
            assert (now.st_ino, now.st_size, now.st_mtime_ns) == (was.st_ino, was.st_size, was.st_mtime_ns)
        pwrite(self, name, offset, view)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copier, "load_steps", one_by_one)
        patch.setattr(Staging, "pwrite", meddling)
        with pytest.raises(TransaxleError, match="was changed while") as caught:
            tx.convert(sources[0], tmp_path / "out", to="safetensors:identity", jobs=1)
    assert caught.value.code == "CORRUPT"
    assert not (tmp_path / "out").exists()


def test_nothing_is_held_open_for_good(sources: list[Path]) -> None:
    before = open_files()
    for _ in range(20):
        with tx.open(sources[0]) as opened:
            values(opened)
    assert open_files() == before
