"""A job of torchrun of which one rank is killed: nothing incomplete is visible, and `--resume` goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import checkpoints
from tests.engine import killed
from tests.engine.killed import contents

ROOT = Path(__file__).parents[3]
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
CONVERT = ("convert", "source", "out", "--to", killed.TO, "--shard-size", str(killed.SHARD_SIZE), "--jobs", "1")
PROGRAM = ("-m", "transaxle")
DYING = ("-m", "tests.live.conversion.dying_rank")
ITEMS = 6
EVERY = 23


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a source, and what one process makes of it."""
    checkpoints.tiny(tmp_path / "source")
    killed.convert(tmp_path / "source", tmp_path / "wanted")
    return tmp_path


def job(folder: Path, *program: str, more: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run a program by two ranks."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *LAUNCHER, *program, *CONVERT, "--items", str(ITEMS), "--on", "torchrun", *more]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def killed_at(rank: int, point: int, folder: Path) -> bool:
    """Kill a rank at a point, look at what is there, and go on; tell whether it had been killed."""
    done = job(folder, *DYING, str(rank), str(point))
    was_killed = "Signal 9 (SIGKILL)" in done.stderr
    assert was_killed or done.returncode == 0, done.stderr
    wanted = contents(folder / "wanted")
    if (folder / "out").exists():  # it comes as a whole
        assert contents(folder / "out") == wanted
    resumed = job(folder, *PROGRAM, more=("--resume",))
    assert resumed.returncode == 0, resumed.stderr
    assert contents(folder / "out") == wanted, (rank, point)
    assert sorted(path.name for path in folder.iterdir()) == ["out", "source", "wanted"], (rank, point)
    return was_killed


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.parametrize(("rank", "point"), [(0, 120), (1, 12)])
def test_a_rank_is_killed_and_resume_goes_on(rank: int, point: int, folder: Path) -> None:
    """The first one plans, begins and commits; the other one does items alone."""
    assert killed_at(rank, point, folder)


@pytest.mark.oracle
@pytest.mark.parametrize(("rank", "deaths"), [(0, 8), (1, 2)])
def test_a_rank_is_killed_at_many_points(rank: int, deaths: int, folder: Path) -> None:
    """One more point each time, until the rank has come to its end."""
    point = rank
    while killed_at(rank, point, folder):
        shutil.rmtree(folder / "out")
        point += EVERY
    assert point >= rank + deaths * EVERY
