"""Saving: the files hold the full tensors, whatever the mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import transaxle as tx
from tests.live.load.test_load import FULL, PLACEMENTS, WORLDS, _octets, on
from tests.live.ranks import run
from transaxle.live.save.save import save


def _save(rank: int, world: int, target: str, shape: tuple[int, ...]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape)
    state = {
        f"{name}.{number}": distribute_tensor(FULL[name], mesh, on(shape, placements), src_data_rank=None)
        for name, choices in PLACEMENTS.items()
        for number, placements in enumerate(choices)
    }
    report = save(state, target, to="safetensors")
    return {"own": report.bytes_own, "all": report.bytes_written}


@pytest.mark.parametrize(("world", "shape"), WORLDS)
def test_the_files_hold_the_full_tensors(tmp_path: Path, world: int, shape: tuple[int, ...]) -> None:
    target = str(tmp_path / "out")
    found = run(world, _save, target, shape)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for key, value in stored.items():
        assert torch.equal(_octets(value), _octets(FULL[key.rpartition(".")[0]])), key
    assert len(stored) == sum(map(len, PLACEMENTS.values()))
    assert sum(each["own"] for each in found) == sum(v.nbytes for v in stored.values())
    assert tx.verify(target).ok


def _misspelt(rank: int, world: int, folder: str) -> list[str]:
    told = []
    for function in (tx.save, tx.async_save):
        misspelt: Any = {"overwite": True} if rank else {}
        with pytest.raises((TypeError, tx.TransaxleError)) as found:
            function({"w": torch.ones(2)}, folder, **misspelt)
        told.append(str(found.value))
    return told


def test_a_keyword_that_does_not_exist_is_told_to_the_other_ranks(tmp_path: Path) -> None:
    """Given on one rank alone, it would let them wait."""
    first, second = run(2, _misspelt, str(tmp_path / "out"))
    assert all("rank 1 failed: TypeError" in each for each in first)
    assert all("unexpected keyword argument 'overwite'" in each for each in second)
    assert not (tmp_path / "out").exists()
