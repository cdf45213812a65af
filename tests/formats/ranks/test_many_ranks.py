"""Folders of a hundred ranks: what opening and converting take grows with the number of parts, and no faster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import run

import pytest
import torch

import transaxle as tx
from tests.formats.ranks import made
from tests.work import assert_linear, calls, peak

MANY = 100
MOST_BYTES = 64_000_000
DIVISIONS = {"cut": ("S0",), "replicated": ("R",), "plain": (), "cut and replicated": ("R", "S0")}


def folder_of(path: Path, world: int, tensors: int, placements: Sequence[str] = ("S0",)) -> dict[str, torch.Tensor]:
    """Write the files of many ranks, and return the whole tensors."""
    torch.manual_seed(0)
    whole = {f"layers.{number}.w": torch.randn(2 * MANY + 3, 4) for number in range(tensors)}
    axes = {"ddp": 2, "fsdp": world // 2} if len(placements) == 2 else {"fsdp": world}
    states = []
    for rank in range(world):
        mesh = made.mesh(rank, axes)
        parts = (
            {name: made.dtensor(tensor, mesh, placements) for name, tensor in whole.items()} if placements else whole
        )
        states.append({**parts, "b": torch.ones(3)})
    made.write_all(path, states)
    return whole


def test_a_hundred_ranks(tmp_path: Path) -> None:
    """Every tensor is whole, and neither opening nor converting takes more than a little memory."""
    whole = folder_of(tmp_path / "step", MANY, 30)
    assert peak(lambda: tx.open(tmp_path / "step")) < MOST_BYTES // 4
    assert peak(lambda: tx.convert(tmp_path / "step", tmp_path / "out", to="safetensors", sync=False)) < MOST_BYTES
    with tx.open(tmp_path / "out") as converted:
        assert all(torch.equal(converted[name].torch(), tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("division", DIVISIONS)
def test_work_grows_with_the_number_of_ranks(tmp_path: Path, division: str) -> None:
    amounts = []
    for world in (8, 16, 32):
        path = tmp_path / str(world)
        folder_of(path, world, 8, DIVISIONS[division])
        tx.open(path).close()
        amounts.append(calls(lambda path=path: tx.open(path).close()))  # type: ignore[misc]
    assert_linear(amounts)


@pytest.mark.slow
def test_a_process_has_little_memory(tmp_path: Path) -> None:
    """Converting ten thousand parts takes at most 64 MB beside the modules."""
    folder_of(tmp_path / "step", MANY, 100)
    program = """
import resource, sys
import transaxle as tx, transaxle.engine.execute, transaxle.formats.ranks.reader, transaxle.verbs
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tx.convert(sys.argv[1], sys.argv[2], to="safetensors", sync=False)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "step"), str(tmp_path / "out")]
    done = run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < MOST_BYTES, done.stdout
