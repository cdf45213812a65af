"""Checksums of storages that several ranks read, each a part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import transaxle as tx
from tests.corpus.checksums import flip
from tests.live.ranks import run


def rows(rank: int, world: int, path: str, cut: int) -> int | list[str]:
    del rank
    mesh = init_device_mesh("cpu", (world,))
    state: dict[str, DTensor] = {"w": distribute_tensor(torch.zeros(64, 40), mesh, [Shard(cut)])}
    try:
        return tx.load(state, path).bytes_read
    except tx.TransaxleError as error:
        return [each.code for each in error.refusals]


@pytest.mark.parametrize("cut", [0, 1])
def test_ranks_that_read_a_storage_together(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "model.pt"
    torch.save({"w": torch.rand(64, 40)}, file)
    assert run(2, rows, str(file), cut) == [64 * 40 * 2, 64 * 40 * 2]  # each byte once
    flip(file)
    assert run(2, rows, str(file), cut) == [["CORRUPT"], ["CORRUPT"]]
