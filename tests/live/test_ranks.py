"""The ranks that tests run on: a task whose group gloo did not connect is run again, anything else is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.live.ranks import run


def _cut_once(rank: int, world: int, folder: str) -> int:
    mark = Path(folder, "cut")
    if rank == 0 and not mark.exists():
        mark.touch()
        raise RuntimeError("Gloo connectFullMesh failed with a connection that was closed")
    dist.barrier()
    return rank


def _stalls(rank: int, world: int, folder: str, times: int) -> int:
    """Fail as torch's own training does where a message of gloo's is lost."""
    mark = Path(folder, f"stalled-{rank}")
    said = mark.read_text("utf-8") if mark.exists() else ""
    if rank == 0 and len(said) < times:
        mark.write_text(f"{said}.", "utf-8")
        exec(compile("raise RuntimeError('Timed out waiting 600000ms')", "/torch/distributed/fsdp/made.py", "exec"))  # noqa: S102 - so that the traceback has a file of torch's
    return rank


def _fails(rank: int, world: int) -> None:
    raise RuntimeError(f"rank {rank} of {world} fails")


def test_a_group_that_did_not_connect_is_made_again(tmp_path: Path) -> None:
    assert run(2, _cut_once, str(tmp_path)) == [0, 1]


def test_training_that_stalls_twice_fails(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Timed out waiting"):
        run(2, _stalls, str(tmp_path), 2)


def test_any_other_failure_is_reported_for_each_rank() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0 of 2 fails.*rank 1 of 2 fails"):
        run(2, _fails)
