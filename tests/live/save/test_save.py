"""Saving: the files hold the full tensors, whatever the mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import transaxle as tx
from tests import checkpoints
from tests.live.load.test_load import FULL, PLACEMENTS, WORLDS, _octets, on
from tests.live.ranks import run
from transaxle.live.save import save


def _save(rank: int, world: int, target: str, shape: tuple[int, ...]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape)
    state = {
        f"{name}.{number}": distribute_tensor(FULL[name], mesh, on(shape, placements), src_data_rank=None)
        for name, choices in PLACEMENTS.items()
        for number, placements in enumerate(choices)
    }
    report = save(state, target, to="safetensors")
    return {"own": report.bytes_own, "all": report.bytes_written}


@pytest.mark.oracle
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


def _unlike(rank: int, world: int, folder: str) -> list[str]:
    told = []
    for options in ({"rules": Path(folder, f"{rank}.rules")}, {"config": {"vocab_size": rank}}):
        with pytest.raises(tx.TransaxleError) as found:
            tx.save({"w": torch.ones(2)}, Path(folder, "out"), to="dcp", **options)
        told.append(f"{found.value.code} {found.value.refusals[0].message}")
    return told


def test_tables_and_configs_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    for rank, name in enumerate("vw"):
        (tmp_path / f"{rank}.rules").write_text(
            f"family own\n  axes d\n  {name} : d\ndialect mine\n  {name} = {name}[d]\n"
        )
    for rules, config in run(2, _unlike, str(tmp_path)):
        assert rules.startswith("AMBIGUOUS rules: rank 1 gave 'one with the hash ")
        assert config.startswith("AMBIGUOUS config: rank 1 gave 'one with the hash ")
    assert not (tmp_path / "out").exists()


def _of_a_wrong_type(rank: int, world: int, folder: str) -> list[str]:
    messages = []
    for function in (tx.save, tx.async_save):
        wrong: Any = {"shard_size": 2.5} if rank else {}
        with pytest.raises((TypeError, tx.TransaxleError)) as error:
            function({"w": torch.ones(2)}, folder, **wrong)
        messages.append(str(error.value))
    return messages


def test_an_argument_of_a_wrong_type_on_one_rank_is_told_to_the_others(tmp_path: Path) -> None:
    """Otherwise they would wait."""
    first, second = run(2, _of_a_wrong_type, str(tmp_path / "out"))
    assert all("rank 1 failed: TypeError" in message for message in first)
    assert all("shard_size must be a number of bytes" in message for message in second)
    assert not (tmp_path / "out").exists()


def test_a_hub_folder_without_a_config_is_told_of(tmp_path: Path) -> None:
    """As the command line does; with the model's config, there is nothing to tell."""
    state = {name: torch.from_numpy(array.astype(np.float32)) for name, array in checkpoints.tensors().items()}
    report = tx.save(state, tmp_path / "bare", to="hf", family="qwen3_moe", axes={"l": 2, "r": 2, "g": 2, "c": 8})
    assert [note.partition(",")[0] for note in report.notes] == ["no config.json goes along"]
    told = tx.save(state, tmp_path / "whole", to="hf", config=checkpoints.CONFIG)
    assert not [note for note in told.notes if "goes along" in note]
    assert (tmp_path / "whole" / "config.json").exists()


@pytest.mark.parametrize(("typed", "nearest"), [("safetensor", "safetensors"), ("pt", "torch"), ("dcp:hff", "hf")])
def test_a_slip_in_to_gets_the_nearest_name(typed: str, nearest: str, tmp_path: Path) -> None:
    """Also for a model that no table knows."""
    with pytest.raises(tx.TransaxleError, match=f"Did you mean {nearest}") as caught:
        tx.save(torch.nn.Linear(2, 2), tmp_path / "out", to=typed)
    assert caught.value.code == "AMBIGUOUS"
    with pytest.raises(tx.TransaxleError, match=r"convert_hf_to_gguf\.py"):
        tx.save(torch.nn.Linear(2, 2), tmp_path / "out", to="gguf")
