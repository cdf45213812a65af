"""Interrupted conversions: nothing looks complete, and a continued one writes the same bytes."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.cli.running import HUNG_UP, INTERRUPTED, TERMINATED, USAGE, Transaxle, command, tree

SLOWLY = """
import time
from transaxle.formats.store.staging import Staging
from transaxle.formats.storage import copier
copier.load_steps = lambda: None
write = Staging.pwrite
def slowly(*arguments):
    time.sleep(0.05)
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
def _running(*arguments: str, before: str = SLOWLY, screen: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """Start a slow conversion and wait until it has written some tensors.

    Args:
        arguments: of the program.
        before: Python that makes it slow.
        screen: a terminal for what is not the result.
    """
    line, environment = command(*arguments, before=before), os.environ | {"TERM": "xterm"}
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=screen, text=True, env=environment) as running:
        while _journal(Path()) <= ENOUGH:
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
def test_ctrl_c_prints_one_line(options: tuple[str, ...], said: str, left: list[str], ck: Path) -> None:
    with _running(*CONVERT, *options) as running:
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=600)
    assert (running.returncode, out, err) == (INTERRUPTED, "", said)
    assert not Path("out").exists()
    assert _hidden(Path()) == left


@pytest.mark.parametrize(
    ("number", "code", "resume"), [(signal.SIGTERM, TERMINATED, False), (signal.SIGHUP, HUNG_UP, True)]
)
def test_a_signal_cleans_up_as_ctrl_c_does(ck: Path, number: signal.Signals, code: int, resume: bool) -> None:
    with _running(*CONVERT, *["--resume"] * resume) as running:
        running.send_signal(number)
        running.send_signal(number)  # what comes while it is putting things in order does not disturb that
        out, err = running.communicate(timeout=600)
    left = "run the same command again to continue" if resume else "nothing was written"
    assert (running.returncode, out) == (code, "")
    assert err == f"stopped by {number.name}, {left}\n"
    assert not Path("out").exists()
    assert _hidden(Path()) == [".out.transaxle-partial"] * resume


def test_nohup_is_respected(ck: Path, transaxle: Transaxle) -> None:
    ignoring = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{SLOWLY}"
    with _running(*CONVERT, before=ignoring) as running:
        running.send_signal(signal.SIGHUP)
        assert running.wait(600) == 0
    assert transaxle("verify", ck, "out").code == 0


def test_the_cursor_comes_back(ck: Path) -> None:
    outer, inner = pty.openpty()
    with _running(*CONVERT, screen=inner) as running:
        running.send_signal(signal.SIGTERM)
        assert running.wait(600) == TERMINATED
    os.close(inner)
    shown = b""
    with suppress(OSError):  # the other end is closed
        while part := os.read(outer, 1 << 16):
            shown += part
    os.close(outer)
    assert b"\x1b[?25l" in shown, "the bar hides the cursor"
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    assert _hidden(Path()) == []


def test_a_terminal_that_is_gone(ck: Path) -> None:
    """The window was closed: nothing can be printed, but files are still cleaned up."""
    outer, inner = pty.openpty()
    with _running(*CONVERT, screen=inner) as running:
        os.close(inner)
        os.close(outer)
        running.send_signal(signal.SIGHUP)
        assert running.wait(600) == HUNG_UP
    assert not Path("out").exists()
    assert _hidden(Path()) == []


def test_unfinished_work_is_kept_when_another_task_is_given(ck: Path, transaxle: Transaxle) -> None:
    """`--resume` continues the same conversion or refuses; unfinished work stays until `--overwrite` or `clean`."""
    with _running(*CONVERT, "--resume") as running:
        running.send_signal(signal.SIGKILL)
    left = tree(Path(".out.transaxle-partial"))
    said = {
        ("--to", "automodel"): "it writes safetensors:torchtitan@0.3, but this conversion writes safetensors:automodel",
        ("--to", "dcp:torchtitan"): "but this conversion writes dcp:torchtitan@0.3",
        ("--to", "torch:torchtitan"): "but this conversion writes torch:torchtitan@0.3",
        ("--to", "torchtitan", "--shard-size", "10kB"): "with other options",
        ("--to", "torchtitan", "--encode", "float8_block", "--only", "*.w1_EFD"): "with other options",
    }
    for options, reason in said.items():
        for name in ("plan", "convert"):
            outcome = transaxle(name, "ck", "out", *options, "--resume", "--json")
            assert (outcome.code, outcome.codes) == (USAGE, ["EXISTS"]), outcome
            (refusal,) = outcome.json["error"]["refusals"]
            assert reason in refusal["message"]
            assert "begin anew with --overwrite" in refusal["hint"]
            assert tree(Path(".out.transaxle-partial")) == left
    shutil.copytree(ck, "other")
    assert "which is another source" in transaxle("convert", "other", *CONVERT[2:], "--resume").err
    assert tree(Path(".out.transaxle-partial")) == left
    assert transaxle("plan", *CONVERT[1:], "--resume").code == 0
    assert transaxle(*CONVERT, "--resume", "--json").json["resumed"] > 0
    assert transaxle("verify", ck, "out").code == 0


IMPORTED = """
import sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "click":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder)
"""


def test_ctrl_c_while_the_program_is_imported_is_an_interruption(here: Path) -> None:
    line = command("ls", "ck", before=IMPORTED)
    ended = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (INTERRUPTED, "", "interrupted\n")


_WHILE_A_CLASS_IS_MADE = """
from transaxle.engine.checkpoint import checkpoint
class Interrupted:
    def __set_name__(self, owner, name):
        raise KeyboardInterrupt
def make_a_class(*_, **__):
    type("Made", (), {"member": Interrupted()})
checkpoint.open_container = make_a_class
"""


def test_an_interruption_while_a_class_is_made_is_no_bug(ck: Path) -> None:
    """Python 3.11 makes a RuntimeError of it."""
    line = command("ls", str(ck), before=_WHILE_A_CLASS_IS_MADE)
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (INTERRUPTED, "interrupted\n")
