"""Refit between GPUs: over NCCL where each rank has a GPU of its own, over gloo also where two share one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from tests import checkpoints
from tests.live.jobs import SECRET, apart, free_port
from tests.live.ranks import run
from tests.live.test_gpu import DIALECT, empty

pytestmark = pytest.mark.gpu


def _pushed(rank: int, world: int, folder: str, port: int, backend: str) -> int:
    """Push three steps from one job into another, which holds what comes against a save of the same step."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    job, _ = apart(rank, world, 1)
    group = tx.refit.meet(f"127.0.0.1:{port}", number=rank, size=world, backend=backend, secret=SECRET)
    state: Any = empty(folder, "hf" if job == 0 else DIALECT)
    truth = empty(folder)
    received = 0
    if job == 0:
        tx.load(state, folder)
    sides = (state, {}) if job == 0 else ({}, state)
    refit = tx.Refit(*sides, group, config=checkpoints.CONFIG, bucket="1MiB")
    for step in range(3):
        if job == 0:
            for tensor in state.values():
                tensor.mul_(step - 1.5)
            tx.save(state, f"{folder}-{step}", config=checkpoints.CONFIG)
            refit.push()
        else:
            received += refit.pull().bytes_received
            tx.load(truth, f"{folder}-{step}", dialect=DIALECT)
            assert all(tensor.is_cuda and torch.equal(tensor, truth[name]) for name, tensor in state.items())
    refit.close()
    return received


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_received_tensors_equal_a_save_of_the_same_step(backend: str, tmp_path: Path) -> None:
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each rank")
    source = checkpoints.tiny(tmp_path / "source")
    trainer, engine = run(2, _pushed, str(source), free_port(), backend)
    assert trainer == 0
    assert engine > 0
