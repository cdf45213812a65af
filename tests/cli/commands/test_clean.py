"""Leftovers of a killed run: the next run reports them; `transaxle clean` removes them, but nothing else or in use."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest

import transaxle as tx
from tests.cli.running import REFUSED, USAGE, Transaxle, tree
from tests.engine.killed import one_by_one
from transaxle.errors import refuse
from transaxle.formats.storage import copier
from transaxle.formats.store.staging import Staging

PARTIAL, OLD = Path(".out.transaxle-partial"), Path(".out.transaxle-old")
CONVERT = ("convert", "ck", "out", "--to", "torchtitan")


def killed(monkeypatch: pytest.MonkeyPatch, transaxle: Transaxle) -> None:
    """Leave what a killed run leaves, by a run with --resume that fails."""
    calls = iter(range(1000))
    pwrite = Staging.pwrite

    def failing(self: Staging, file: str, offset: int, view: memoryview) -> None:
        if next(calls) > 12:
            raise refuse("IO", "the cable", file=file)
        pwrite(self, file, offset, view)

    with monkeypatch.context() as patch:
        patch.setattr(copier, "load_steps", one_by_one)
        patch.setattr(Staging, "pwrite", failing)
        assert transaxle(*CONVERT, "--resume", "--jobs", "1").code == 4
    assert PARTIAL.is_dir()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock as a run does."""
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield
    os.close(fd)


def test_the_next_run_reports_leftovers(ck: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(monkeypatch, transaxle)
    before = {path: path.read_bytes() for path in Path(PARTIAL).rglob("*") if path.is_file()}
    transaxle(*CONVERT).expect(USAGE, err=("beside the target is unfinished work: ", "--resume"))
    assert {path: path.read_bytes() for path in Path(PARTIAL).rglob("*") if path.is_file()} == before
    transaxle(*CONVERT, "--overwrite").expect(
        0,
        err=(
            f"{PARTIAL}, left by a killed run (unfinished work: ",
            "tensors are written, --resume continues it), was removed",
        ),
    )
    shutil.rmtree("out")
    killed(monkeypatch, transaxle)
    assert "left by" not in transaxle(*CONVERT, "--resume").err, "it was continued"
    report = transaxle("convert", ck, "again", "--to", "torchtitan", "--json").json
    assert report["leftovers"] == []


def test_a_refusal_reports_leftovers_too(ck: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(monkeypatch, transaxle)
    Path("out").mkdir()
    transaxle(*CONVERT).expect(USAGE, err=f"{PARTIAL} was left by another run: transaxle clean removes it.")
    assert PARTIAL.is_dir()


def test_clean_lists_asks_and_removes(ck: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(monkeypatch, transaxle)
    before = tree(Path())
    outcome = transaxle("clean", "out")
    assert outcome.code == USAGE, "input is not a terminal"
    assert str(PARTIAL) in outcome.out
    assert "tensors are written, --resume continues it" in outcome.out
    assert "confirm with --yes" in outcome.err
    assert transaxle("clean", "out", "--json").code == USAGE

    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("\n"))
    assert transaxle("clean", "out").code == 1
    assert tree(Path()) == before
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    outcome = transaxle("clean", "out")
    assert (outcome.code, outcome.err) == (0, "Remove it? [y/N]\n")
    assert f"removed  {PARTIAL.resolve()}" in outcome.out
    assert not PARTIAL.exists()
    assert tree(ck) == {name.removeprefix("ck/"): data for name, data in before.items() if name.startswith("ck/")}
    assert transaxle("clean", "out").out == "found nothing left by killed runs here\n"


@pytest.mark.parametrize("path", [".", "out", ".out.transaxle-partial"])
def test_clean_takes_a_target_a_parent_folder_or_the_leftover_itself(
    ck: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    killed(monkeypatch, transaxle)
    found = transaxle("clean", path, "--yes", "--json").json["leftovers"]
    assert [(each["path"], each["outcome"]) for each in found] == [(str(PARTIAL.resolve()), "removed")]
    assert not PARTIAL.exists()


def test_leftovers_in_use_are_kept(ck: Path, transaxle: Transaxle, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(monkeypatch, transaxle)
    before = tree(PARTIAL)
    with locked(PARTIAL):
        transaxle("clean", "out", "--yes").expect(1, out="a live process is using it")
    assert tree(PARTIAL) == before
    with Staging("out", resume=True):
        assert [each.outcome for each in tx.clean("out")] == ["kept"]
    assert tree(PARTIAL) == before
    assert [each.outcome for each in tx.clean("out", remove=False)] == ["found"]
    assert [each.outcome for each in tx.clean("out")] == ["removed"]


def test_the_only_checkpoint_is_put_back(ck: Path, transaxle: Transaxle) -> None:
    """A run died between the two renames of a file system that cannot exchange names."""
    assert transaxle(*CONVERT).code == 0
    before = tree(Path("out"))
    Path("out").rename(OLD)
    found = tx.clean("out")
    assert [each.outcome for each in found] == ["put back"]
    assert tree(Path("out")) == before
    assert not OLD.exists()
    shutil.copytree("out", OLD)
    assert [each.outcome for each in tx.clean(".")] == ["removed"]
    assert tree(Path("out")) == before
    shutil.copytree("out", OLD)
    report = tx.convert("ck", "out", to="torchtitan", resume=True)
    assert "was removed" in report.leftovers[0]
    assert not OLD.exists()


def test_folders_that_may_not_be_ours_are_kept(ck: Path, transaxle: Transaxle) -> None:
    PARTIAL.mkdir()
    (PARTIAL / "thesis.tex").write_text("years of work")
    Path(".mine.transaxle-partial").symlink_to(ck)
    Path(".notes.transaxle-partial").write_text("a file")
    transaxle("clean", ".", "--yes").expect(1, out="thesis.tex belong to no checkpoint")
    assert (PARTIAL / "thesis.tex").read_text() == "years of work"
    assert Path(".mine.transaxle-partial").is_symlink()
    assert Path(".notes.transaxle-partial").is_file()


def test_clean_where_no_leftovers_can_be(here: Path, transaxle: Transaxle) -> None:
    assert transaxle("clean", "nowhere/out").code == 4
    assert transaxle("clean", "memory://store/out").code == REFUSED
    assert transaxle("clean", ".").code == 0
    long = "é" * 120
    with Staging(long, resume=True):
        pass
    assert [each.outcome for each in tx.clean(long)] == ["removed"]
