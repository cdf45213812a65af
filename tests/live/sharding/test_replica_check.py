"""Copies that differ between ranks are refused, by name and rank: one checkpoint has room for one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.live.ranks import ranks, run
from transaxle.errors import TransaxleError
from transaxle.live.asynchronous import async_save
from transaxle.live.save import save

CODE = "UNEQUAL_COPIES"


def _state(rank: int, world: int, odd: str) -> dict[str, Any]:
    """Tensors of four ranks, 2 x 2; of the one that is named, rank 3 has other values."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    state: dict[str, Any] = {
        "plain": torch.tensor([1.0, float("nan"), -0.0]),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "sharded": distribute_tensor(torch.arange(8.0), mesh["dp"], [Shard(0)], src_data_rank=None),
        "cut": distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Shard(0)], src_data_rank=None),
        "number": 7,
    }
    if odd and rank == 3:
        other = state[odd]
        state[odd] = 8 if isinstance(other, int) else other + 0.5
    return state


def _refused(rank: int, world: int, target: str, odd: str, background: bool) -> None:
    state = _state(rank, world, odd)
    if background:
        async_save(state, target, to="safetensors").result()
    else:
        save(state, target, to="safetensors")


@pytest.mark.parametrize("odd", ["plain", "turned", "sharded", "number"])
def test_copies_that_differ_are_refused_on_every_rank(tmp_path: Path, odd: str) -> None:
    for fine, error in ranks(4).answers(_refused, str(tmp_path / "out"), odd, False):
        assert not fine
        assert isinstance(error, TransaxleError), error
        assert [(each.code, each.where.tensor) for each in error.refusals] == [(CODE, odd)]
        assert ("2; 3" if odd == "sharded" else "0, 1, 2; 3") in str(error)
        assert "check_copies=False" in str(error)
    assert not list(tmp_path.iterdir())


def test_in_the_background_too(tmp_path: Path) -> None:
    with pytest.raises(TransaxleError) as found:
        run(4, _refused, str(tmp_path / "out"), "plain", True)
    assert found.value.code == CODE
    assert not (tmp_path / "out").exists()


def _allowed(rank: int, world: int, folder: str) -> None:
    save(_state(rank, world, ""), f"{folder}/equal", to="safetensors")
    save(_state(rank, world, "turned"), f"{folder}/any", to="safetensors", check_copies=False)


def test_equal_ones_are_saved_and_others_where_that_is_said(tmp_path: Path) -> None:
    run(4, _allowed, str(tmp_path))
    equal = load_file(tmp_path / "equal" / "model.safetensors")
    turned = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(equal["plain"].view(torch.int32), torch.tensor([1.0, float("nan"), -0.0]).view(torch.int32))
    assert torch.equal(equal["turned"], turned)
    assert torch.equal(equal["sharded"], torch.arange(8.0))
    found = load_file(tmp_path / "any" / "model.safetensors")["turned"]
    assert torch.equal(found, turned) or torch.equal(found, turned + 0.5)


def _drifted(rank: int, world: int, target: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.full((1, 3), rank + 1.0)).square().sum().backward()  # nothing sums the gradients
    optimizer.step()
    save(model, target, to="dcp", optimizer=optimizer)


def test_every_tensor_of_a_model_that_drifted_apart_is_named(tmp_path: Path) -> None:
    for _, error in ranks(2).answers(_drifted, str(tmp_path / "out")):
        assert isinstance(error, TransaxleError), error
        named = {each.where.tensor for each in error.refusals}
        assert {"0.weight", "optim/0.weight/exp_avg"} <= named
        assert "optim/0.weight/step" not in named
