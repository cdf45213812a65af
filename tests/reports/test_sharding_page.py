"""The page of a live model's sharding: its numbers are those of the ranks' memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import transaxle as tx
from tests.live.ranks import run
from tests.reports.embedded import data, table
from transaxle.torch_tensors import local_of

Held = dict[str, list[Any]]


def _told(state: Any, tensors: dict[str, torch.Tensor]) -> tuple[Any, Held]:
    """What the ranks say, and the values that this rank holds."""
    return tx.sharding(state), {
        name: local_of(tensor).detach().reshape(-1).tolist() for name, tensor in tensors.items()
    }


def _placed(rank: int, world: int) -> tuple[Any, Held]:
    """Tensors of distinct elements: two dims of a mesh, uneven cuts, replicas, plain ones, one on two ranks only."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "ep"))
    flat = init_device_mesh("cpu", (world,))

    def numbered(*shape: int) -> torch.Tensor:
        return torch.arange(float(torch.Size(shape).numel())).reshape(shape)

    state: dict[str, torch.Tensor] = {
        "experts.0.down": distribute_tensor(numbered(6, 5, 4), mesh, [Shard(1), Shard(0)], src_data_rank=None),
        "experts.1.down": distribute_tensor(numbered(6, 5, 4), mesh, [Shard(1), Shard(0)], src_data_rank=None),
        "hybrid": distribute_tensor(numbered(10, 3), mesh, [Replicate(), Shard(0)], src_data_rank=None),
        "uneven": distribute_tensor(numbered(5, 7), flat, [Shard(0)], src_data_rank=None),
        "columns": distribute_tensor(numbered(2, 7), flat, [Shard(1)], src_data_rank=None),
        "norm": distribute_tensor(numbered(9), flat, [Replicate()], src_data_rank=None),
        "plain": numbered(3).to(torch.bfloat16),
    }
    if rank < 2:
        state["stage"] = numbered(11)
    return _told(state, state)


def _module(rank: int, world: int) -> tuple[Any, Held]:
    """A model under FSDP2, in which two modules share a weight."""
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 10), nn.Linear(6, 6, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(float(parameter.numel())).reshape(parameter.shape))
    model[2].weight = model[0].weight
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return _told(model, dict(model.named_parameters()))


SIZES = {"plain": 2}
"""Bytes of an element, where these are not 4."""


@pytest.mark.parametrize("task", [_placed, _module])
def test_numbers_are_those_of_memory(task: Any, tmp_path: Path) -> None:
    """Bytes of each rank, and how many ranks hold the very same elements, counted from the values themselves."""
    answers = run(4, task)
    found = answers[0][0]
    assert all(each.as_json() == found.as_json() for each, _ in answers)
    values = [held for _, held in answers]
    names = {name for held in values for name in held}
    assert {tensor.name for tensor in found.tensors} == names
    for tensor in found.tensors:
        mine = [held.get(tensor.name, []) for held in values]
        size = SIZES.get(tensor.name, 4)
        assert tensor.rank_bytes == {rank: len(part) * size for rank, part in enumerate(mine) if part}
        assert tensor.copies == {rank: mine.count(part) for rank, part in enumerate(mine) if part}
        assert tensor.nbytes == size * len({value for part in mine for value in part})
    each_rank = {
        rank: sum(len(part) * SIZES.get(name, 4) for name, part in held.items()) for rank, held in enumerate(values)
    }
    assert found.rank_bytes == each_rank
    assert found.imbalance == pytest.approx(max(each_rank.values()) / (sum(each_rank.values()) / 4) - 1)
    assert found.spare_bytes == sum(each_rank.values()) - found.nbytes
    page = data(tx.report(found, tmp_path / "page.html"))
    assert {row["rank"]: row["bytes"] for row in table(page, "ranks")} == each_rank
    assert page["facts"]["rank_bytes"] == {str(rank): count for rank, count in each_rank.items()}
    held_rows = table(page, "held")
    assert sum(row["bytes"] for row in held_rows) == sum(each_rank.values())
    drawn = page["figures"]["map"]["data"]
    by_place = {(row["tensors"], str(row["rank"])): row for row in held_rows}
    for column, row, state, (share, copies), _ in drawn["cells"]:
        told = by_place.get((drawn["rows"][row], drawn["columns"][column]))
        assert (state == "none") == (told is None)
        if told is not None:
            assert (share, copies) == (told["share"], told["copies"])
    bars = page["figures"]["ranks"]["data"]["series"][0]["bars"]
    assert bars == [[str(rank), count] for rank, count in each_rank.items()]


def test_the_summary(tmp_path: Path) -> None:
    found = run(4, _placed)[0][0]
    path = tx.report(found, tmp_path / "page.html")
    text, page = path.read_text("utf-8"), data(path)
    assert "Whole on every rank.</strong> <bdi>2 tensors of 42 B together, the largest of which is norm." in text
    assert "Uneven.</strong> <bdi>Rank 0 holds" in text
    rows = {row["tensors"]: row for row in table(page, "tensors")}
    assert (rows["experts.*.down"]["cut"], rows["experts.*.down"]["copies"]) == ("dim 0 in 2, dim 1 in 2", "1")
    assert rows["experts.*.down"]["count"] == 2
    assert (rows["hybrid"]["cut"], rows["hybrid"]["copies"]) == ("dim 0 in 2", "2")
    assert (rows["norm"]["cut"], rows["norm"]["copies"]) == ("whole", "4")
    assert (rows["uneven"]["ranks"], rows["stage"]["ranks"]) == ("0-2", "0-1")
    assert str(found).startswith("8 tensors, ")
    json.dumps(found.as_json())


def test_where_ranks_are_on_the_mesh(tmp_path: Path) -> None:
    found = run(4, _placed)[0][0]
    expected = {rank: {"dp": rank // 2, "ep": rank % 2} for rank in range(4)}
    assert found.coordinates == expected
    path = tx.report(found, tmp_path / "page.html")
    said = {rank: f"dp {places['dp']}, ep {places['ep']}" for rank, places in expected.items()}
    for of in ("ranks", "held"):
        assert {row["rank"]: row["mesh"] for row in table(data(path), of)} == said
    told = json.loads(json.dumps(found.as_json()))["coordinates"]
    assert told == {str(rank): places for rank, places in expected.items()}
    figures = data(path)["figures"]
    notes = figures["map"]["data"]["notes"], figures["ranks"]["data"]["series"][0]["notes"]
    assert notes == ([said[rank] for rank in range(4)],) * 2


def _ambiguous(rank: int, world: int) -> Any:
    """A name that two meshes give to different dims."""
    one = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    full = torch.zeros(4, 4)
    first = distribute_tensor(full, one, [Replicate(), Shard(0)], src_data_rank=None)
    return tx.sharding({"one": first, "other": distribute_tensor(full, other, [Shard(0)], src_data_rank=None)})


def test_an_ambiguous_place_is_not_shown(tmp_path: Path) -> None:
    found = run(4, _ambiguous)[0]
    assert found.coordinates == {rank: {"dp": rank // 2} for rank in range(4)}
    unknown = run(4, _module)[0][0]
    assert unknown.coordinates == unknown.as_json()["coordinates"] == {}
    page = data(tx.report(unknown, tmp_path / "page.html"))
    assert all("mesh" not in row for row in table(page, "ranks"))
    assert page["figures"]["map"]["data"]["notes"] == [""] * 4


def test_tied_weights_count_once(tmp_path: Path) -> None:
    found = run(4, _module)[0][0]
    assert found.aliases == {"2.weight": "0.weight"}
    assert found.nbytes == 4 * (36 + 60 + 10)
    page = data(tx.report(found, tmp_path / "page.html"))
    assert table(page, "aliases") == [{"name": "2.weight", "is the same tensor as": "0.weight"}]


def test_one_process_holds_everything(tmp_path: Path) -> None:
    found = tx.sharding(nn.Linear(3, 2))
    assert (found.ranks, found.rank_bytes, found.imbalance, found.spare_bytes) == ((0,), {0: 32}, 0.0, 0)
    tx.report(found, tmp_path / "page.html")
    empty = tx.sharding({})
    assert (empty.nbytes, empty.imbalance) == (0, 0.0)
    tx.report(empty, tmp_path / "empty.html")
    with pytest.raises(TypeError, match="not read from files"):
        tx.report(found, tmp_path / "other.html", family="llama")
