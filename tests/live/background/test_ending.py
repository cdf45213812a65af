"""Programs that end while they save in the background: the save is finished, or the program fails; nothing is left.

Whoever ends here is a process of its own: a script, whose end Python's `atexit` sees, and ranks that are forked, whose
end it does not see.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

import transaxle as tx
from tests.forks import context
from tests.live import ended
from tests.live.ended import SLOW

PATIENCE = 600.0
"""Seconds after which what has not happened will not happen; nothing that works waits for them."""

SCRIPT = """
import os, signal, subprocess, sys
import torch
import transaxle as tx
from transaxle.live import asynchronous

asynchronous._JOIN = 0.2  # far less than the save takes
target, how = sys.argv[1:]
job = tx.async_save(torch.nn.Linear(3, 2), target, to="safetensors")
(saver, _), = asynchronous._SAVERS.values()
os.kill(saver._process.pid, signal.SIGSTOP)
subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {saver._process.pid}"])
if how == "raises":
    raise ValueError("as scripts do")
if how == "exits":
    sys.exit(3)
if how == "interrupted":
    os.kill(os.getpid(), signal.SIGINT)
if how == "terminated":
    os.kill(os.getpid(), signal.SIGTERM)
if how == "told":
    try:
        job.result()
    except tx.TransaxleError:
        sys.exit(4)
"""

more = pytest.mark.oracle


def _script(folder: Path, target: str, how: str) -> tuple[int, str]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, str(folder / "train.py"), target, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("ends", 0),
        pytest.param("raises", 1, marks=more),
        pytest.param("exits", 3, marks=more),
        pytest.param("interrupted", -signal.SIGINT, marks=more),
    ],
)
def test_a_script_that_ends_waits_for_its_save(tmp_path: Path, how: str, code: int) -> None:
    found, said = _script(tmp_path, str(tmp_path / "out"), how)
    assert found == code, said
    assert "the save of" in said
    assert "waiting for it" in said
    assert ("Traceback" in said) == (how in ("raises", "interrupted"))
    assert tx.verify(tmp_path / "out").ok


@more
@pytest.mark.parametrize(("how", "code"), [("ends", 120), ("raises", 120), ("exits", 120), ("told", 4)])
def test_a_script_whose_last_save_fails_says_so_and_fails(tmp_path: Path, how: str, code: int) -> None:
    found, said = _script(tmp_path, str(tmp_path / "no" / "folder"), how)
    assert found == code, said
    assert ("does not exist" in said) == (how != "told")


@more
def test_a_script_that_is_terminated_leaves_no_process_and_no_checkpoint(tmp_path: Path) -> None:
    found, said = _script(tmp_path, str(tmp_path / "out"), "terminated")
    assert (found, said) == (-signal.SIGTERM, "")
    assert not (tmp_path / "out").exists()


def _started(world: int, folder: Path, target: Path, how: str) -> Sequence[BaseProcess]:
    starter = context()
    arguments: list[tuple[Any, ...]] = [(rank, world, str(folder), str(target), how) for rank in range(world)]
    found = [starter.Process(target=ended.run, args=each) for each in arguments]
    for process in found:
        process.start()
    return found


def _codes(processes: Sequence[BaseProcess]) -> list[int | None]:
    for process in processes:
        process.join(3 * PATIENCE)
    return [process.exitcode for process in processes]


def _errors(folder: Path, world: int) -> list[str]:
    return [Path(folder, f"errors-{rank}").read_text() for rank in range(world)]


@pytest.mark.parametrize("how", ["raises on one", pytest.param("ends", marks=more)])
def test_ranks_that_end_wait_for_their_save(tmp_path: Path, how: str) -> None:
    codes = _codes(_started(2, tmp_path, tmp_path / "out", how))
    first, second = _errors(tmp_path, 2)
    assert codes == [0, 1 if how == "raises on one" else 0], (first, second)
    assert first.count("waiting for it") == 1
    assert len(first.splitlines()) == 1  # and nothing else: no broken pipe
    assert "waiting for it" not in second  # one of them says it
    assert ("as ranks do" in second) == (how == "raises on one")
    assert tx.verify(tmp_path / "out").ok


@more
def test_ranks_whose_last_save_fails_say_so_and_fail(tmp_path: Path) -> None:
    codes = _codes(_started(2, tmp_path, tmp_path / "no" / "folder", "ends"))
    said = _errors(tmp_path, 2)
    assert codes == [1, 1], said
    assert all("does not exist" in each for each in said)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def _until(happened: Any) -> bool:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if happened():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="it looks at processes in /proc")
@pytest.mark.parametrize(
    ("world", "when"),
    [(1, "at once"), *(pytest.param(w, at, marks=more) for w, at in [(2, "at once"), (2, "later")])],
)
def test_a_background_process_ends_with_its_rank(tmp_path: Path, world: int, when: str) -> None:
    processes = _started(world, tmp_path, tmp_path / "out", "stays")
    try:
        places = [tmp_path / f"begun-{rank}" for rank in range(world)]
        assert _until(lambda: all(place.exists() for place in places)), _errors(tmp_path, world)
        pids = [int(place.read_text()) for place in places]
        assert all(map(_lives, pids))
        for number, process in enumerate(processes):
            if when == "later" and number:  # the first rank's waits for one that never comes, or writes
                time.sleep(SLOW)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            assert _until(lambda number=number: not _lives(pids[number]))
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert "Traceback" not in "".join(_errors(tmp_path, world))
