"""A conversion by the ranks of a job: the bytes of one process, one error for all, and each item by one rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import transaxle as tx
from tests import checkpoints
from tests.engine import killed
from tests.engine.killed import contents
from tests.formats.s3_server import Bucket
from tests.formats.stores import download
from tests.live.ranks import run


def _convert(_rank: int, _world: int, source: str, target: str, options: dict[str, Any]) -> dict[str, Any]:
    report = tx.convert(source, target, on="torchrun", **options)
    return {"workers": dict(report.workers), "tensors": report.tensors, "resumed": report.resumed}


def _fails(rank: int, _world: int, source: str, target: str) -> str:
    from transaxle.engine.distribute import item_work
    from transaxle.errors import refuse

    real = item_work._do_part

    def failing(plan: Any, item: Any, *rest: Any) -> Any:
        if item.number == 2:
            raise refuse("IO", "the cable")
        return real(plan, item, *rest)

    item_work._do_part = failing  # type: ignore[assignment]
    try:
        tx.convert(source, target, to="torchtitan", items=6, on="torchrun", resume=True)
    except tx.TransaxleError as error:
        return str(error)
    finally:
        item_work._do_part = real
    return f"rank {rank} met no error"


@pytest.mark.parametrize(
    ("world", "to"), [(2, "dcp:torchtitan"), pytest.param(4, "megatron", marks=pytest.mark.oracle)]
)
def test_ranks_convert_to_the_same_bytes_as_one_process(world: int, to: str, tmp_path: Path) -> None:
    source, target = checkpoints.tiny(tmp_path / "source"), tmp_path / "out"
    tx.convert(source, tmp_path / "wanted", to=to, shard_size=8000)
    options = {"to": to, "shard_size": 8000, "items": 9}
    found = run(world, _convert, str(source), str(target), options)
    assert contents(target) == contents(tmp_path / "wanted")
    assert all(each == found[0] for each in found)
    assert sum(found[0]["workers"].values()) == sum(tensor.nbytes for tensor in tx.open(target).values())
    again = run(world, _convert, str(source), str(target), {**options, "resume": True})
    assert all(each["resumed"] == each["tensors"] for each in again)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source", "wanted"]


def _convert_there(rank: int, world: int, environment: dict[str, str], *asked: Any) -> dict[str, Any]:
    os.environ.update(environment)
    return _convert(rank, world, *asked)


def test_ranks_write_to_a_service(bucket: Bucket, tmp_path: Path) -> None:
    source = checkpoints.tiny(tmp_path / "source")
    tx.convert(source, tmp_path / "wanted", to="torchtitan")
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    run(2, _convert_there, environment, str(source), f"{bucket.url}/out", {"to": "torchtitan", "items": 5})
    assert contents(download(bucket, "out", tmp_path / "out")) == contents(tmp_path / "wanted")
    assert len(bucket.names()) == len(contents(tmp_path / "wanted"))
    assert bucket.uploads() == []


def test_one_rank_that_fails_fails_all_and_resume_goes_on(tmp_path: Path) -> None:
    source, target = checkpoints.tiny(tmp_path / "source"), tmp_path / "out"
    errors = run(2, _fails, str(source), str(target))
    assert all("the cable" in error for error in errors), errors
    assert not target.exists()
    found = run(2, _convert, str(source), str(target), {"to": "torchtitan", "items": 6, "resume": True})
    assert found[0]["resumed"] < found[0]["tensors"]
    tx.convert(source, tmp_path / "wanted", to="torchtitan")
    assert contents(target) == contents(tmp_path / "wanted")
    with pytest.raises(tx.TransaxleError, match="already exists"):
        run(2, _convert, str(source), str(target), {"to": "torchtitan"})


@pytest.mark.oracle
def test_the_command_line_prints_on_one_rank(tmp_path: Path) -> None:
    source = checkpoints.tiny(tmp_path / "source")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "transaxle")
    command = [sys.executable, *launcher, "convert", str(source), "out", "--to", "torchtitan"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}

    def ran(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, "--on", "torchrun", *more],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    done = ran("--items", "4", "--verify", "--all")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("hashed while written") == 1
    assert done.stdout.count("intact") == 1
    tx.convert(source, tmp_path / "wanted", to="torchtitan")
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")
    events = ran("--items", "4", "--overwrite", "--json")
    assert json.loads(events.stdout)["tensors"] == len(tx.open(tmp_path / "wanted"))
    told = [json.loads(line) for line in events.stderr.splitlines() if line.startswith('{"event"')]
    assert [each["event"] for each in told] == ["begun", *["item"] * 4]
    assert sorted(each["item"] for each in told[1:]) == [0, 1, 2, 3]
    assert told[-1]["done"] == told[-1]["total"] == sum(each["nbytes"] for each in told)
    refused = ran()
    assert refused.returncode != 0
    assert refused.stderr.count("the target already exists") == 1


def _asks_for_a_page(_rank: int, _world: int, source: str, target: str, page: str) -> str:
    try:
        tx.convert(source, target, to="torchtitan", on="torchrun", report=page)
    except tx.TransaxleError as error:
        return error.code
    return "done"


def test_a_report_page_that_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """The first rank writes it, and the others do not wait for one that has given up."""
    source, page = checkpoints.tiny(tmp_path / "source"), tmp_path / "page.html"
    assert run(2, _asks_for_a_page, str(source), str(tmp_path / "out"), str(page)) == ["done", "done"]
    assert page.exists()
    other = str(tmp_path / "other")
    assert run(2, _asks_for_a_page, str(source), other, str(page)) == ["EXISTS", "EXISTS"]


# A job of torchrun of which one rank is killed: nothing incomplete is visible, and `--resume` goes on.

ROOT = Path(__file__).parents[3]
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
CONVERT = ("convert", "source", "out", "--to", killed.TO, "--shard-size", str(killed.SHARD_SIZE), "--jobs", "1")
PROGRAM = ("-m", "transaxle")
DYING = ("-m", "tests.live.conversion.dying_rank")
ITEMS = 6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a source, and what one process makes of it."""
    checkpoints.tiny(tmp_path / "source")
    killed.convert(tmp_path / "source", tmp_path / "wanted")
    return tmp_path


def job(folder: Path, *program: str, more: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
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
@pytest.mark.parametrize(
    ("rank", "point"), [*((0, point) for point in range(0, 185, 23)), *((1, p) for p in (1, 12, 47))]
)
def test_a_rank_is_killed_and_resume_goes_on(rank: int, point: int, folder: Path) -> None:
    """The first rank plans, creates the files and commits; the other one only does items."""
    assert killed_at(rank, point, folder) or point >= 47
