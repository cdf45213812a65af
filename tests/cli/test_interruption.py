"""A conversion that ends too early: nothing that looks complete, and the same bytes when it is continued."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.checkpoints import tiny
from tests.cli.running import INTERRUPTED, Transaxle, command, tree

SLOWLY = """
import time
from transaxle.formats.staging import Staging
write = Staging.pwrite
def slowly(*arguments):
    time.sleep(0.02)
    write(*arguments)
Staging.pwrite = slowly
"""
ENOUGH = 5
"""Lines of the journal, about one a tensor, that must be there before the end comes."""
CONVERT = ("convert", "ck", "out", "--to", "torchtitan", "--jobs", "2")


def _journal(folder: Path) -> int:
    """Count the tensors that a run in progress has finished."""
    journals = list(folder.glob(".out.transaxle-partial/.transaxle/*"))
    return sum(len(journal.read_bytes().splitlines()) for journal in journals if journal.is_file())


@contextmanager
def _running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a slow conversion, and wait until it is in the midst of it."""
    line = command(*arguments, before=SLOWLY)
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        for _ in range(1000):
            if _journal(Path()) > ENOUGH:
                break
            assert running.poll() is None, running.communicate()
            time.sleep(0.01)
        yield running


def _hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_killed_and_continued_gives_the_same_bytes(ck: Path, transaxle: Transaxle) -> None:
    with _running(*CONVERT) as running:
        running.send_signal(signal.SIGKILL)
    assert not Path("out").exists()
    assert _hidden(Path()) == [".out.transaxle-partial"]
    assert transaxle("ls", "out").code == 4
    assert transaxle("ls", ".out.transaxle-partial").code != 0, "what is not finished must not open"
    report = transaxle(*CONVERT, "--resume", "--json").json
    assert 0 < report["resumed"] < report["tensors"]
    assert _hidden(Path()) == []
    assert transaxle("convert", "ck", "whole", "--to", "torchtitan").code == 0
    assert tree(Path("out")) == tree(Path("whole"))


def test_killed_and_begun_anew_gives_the_same_bytes(ck: Path, transaxle: Transaxle) -> None:
    with _running(*CONVERT) as running:
        running.send_signal(signal.SIGKILL)
    assert transaxle(*CONVERT, "--json").json["resumed"] == 0
    assert transaxle("verify", ck, "out").code == 0
    assert _hidden(Path()) == []


def test_killed_while_replacing_keeps_the_old_one(ck: Path, transaxle: Transaxle) -> None:
    assert transaxle("convert", ck, "out", "--to", "automodel").code == 0
    before = tree(Path("out"))
    with _running(*CONVERT, "--overwrite") as running:
        running.send_signal(signal.SIGKILL)
    assert tree(Path("out")) == before
    assert transaxle(*CONVERT, "--overwrite", "--resume").code == 0
    assert transaxle("verify", ck, "out").code == 0
    assert _hidden(Path()) == []


@pytest.mark.parametrize(
    ("options", "said", "left"),
    [
        ((), "interrupted, nothing was written\n", []),
        (("--resume",), "interrupted, run the same command again to continue\n", [".out.transaxle-partial"]),
    ],
)
def test_ctrl_c_is_one_line(options: tuple[str, ...], said: str, left: list[str], ck: Path) -> None:
    with _running(*CONVERT, *options) as running:
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (INTERRUPTED, "", said)
    assert not Path("out").exists()
    assert _hidden(Path()) == left


def test_another_source_is_not_continued(ck: Path, transaxle: Transaxle) -> None:
    with _running(*CONVERT) as running:
        running.send_signal(signal.SIGKILL)
    ck.rename("old")
    tiny(Path("ck"), shards=2)
    assert transaxle(*CONVERT, "--resume", "--json").json["resumed"] == 0
    assert transaxle("verify", "ck", "out").code == 0
