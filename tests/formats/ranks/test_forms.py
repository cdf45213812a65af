"""The pickled forms of torch 2.4 to 2.13: meshes as tensors and as layouts, whole and sliced out of a larger one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import transaxle as tx
from tests.formats.ranks import made
from tests.formats.refusals import refuses

AXES = {"ddp": 2, "fsdp": 2, "tp": 2}
CASES = {
    "one dim": ({"fsdp": 3}, (), ("S0",)),
    "rows and columns": ({"fsdp": 2, "tp": 3}, (), ("S0", "S1")),
    "rows twice": ({"fsdp": 2, "tp": 2}, (), ("S0", "S0")),
    "replicated": ({"ddp": 2, "fsdp": 2}, (), ("R", "S0")),
    "first of two dims": ({"fsdp": 2, "tp": 2}, ("fsdp",), ("S0",)),
    "second of two dims": ({"fsdp": 2, "tp": 2}, ("tp",), ("S1",)),
    "first and last of three": (AXES, ("ddp", "tp"), ("R", "S1")),
    "middle of three": (AXES, ("fsdp",), ("S0",)),
    "a dim of size one": ({"ddp": 1, "fsdp": 3}, (), ("R", "S0")),
    "only that of size one": ({"fsdp": 1, "tp": 2}, ("fsdp",), ("S0",)),
}


def states(whole: torch.Tensor, case: str, form: str) -> list[dict[str, object]]:
    """The state dicts of all ranks."""
    axes, names, placements = CASES[case]
    world = int(torch.tensor(list(axes.values())).prod())
    meshes = [made.mesh(rank, axes, names, form) for rank in range(world)]
    return [{"w": made.dtensor(whole, each, placements, form=form), "b": torch.arange(3.0)} for each in meshes]


@pytest.mark.parametrize("form", made.FORMS)
@pytest.mark.parametrize("case", CASES)
def test_each_form_is_read(tmp_path: Path, case: str, form: str) -> None:
    """Whatever release saved it, the tensor is whole."""
    whole = torch.arange(70.0).view(10, 7)
    made.write_all(tmp_path / "step", states(whole, case, form))
    with tx.open(tmp_path / "step") as checkpoint:
        assert torch.equal(checkpoint["w"].torch(), whole)
        assert torch.equal(checkpoint["b"].torch(), torch.arange(3.0))
    tx.convert(tmp_path / "step", tmp_path / "out", to="safetensors", sync=False)
    with tx.open(tmp_path / "out") as converted:
        assert torch.equal(converted["w"].torch(), whole)


@pytest.mark.parametrize("form", made.FORMS)
@pytest.mark.parametrize("case", ["first of two dims", "second of two dims", "middle of three", "rows and columns"])
def test_files_of_two_ranks_in_each_other_s_place(tmp_path: Path, case: str, form: str) -> None:
    """The parts would come together in the wrong order, or in the right one by chance."""
    saved = states(torch.arange(70.0).view(10, 7), case, form)
    made.write_all(tmp_path / "step", [saved[1], saved[0], *saved[2:]])
    with refuses("CORRUPT", hint="Copy each rank's file under its own name.", tensor="w"):
        tx.open(tmp_path / "step")


def test_a_mesh_of_joined_dims(tmp_path: Path) -> None:
    """A mesh dim that joins two, which cannot be one stride, has a pair of sizes."""
    axes = {"ddp": 2, "cp": 2, "fsdp": 2}
    whole = torch.arange(24.0).view(8, 3)
    order = [0, 1, 4, 5]  # ddp and fsdp joined, at cp 0

    def state(rank: int) -> dict[str, object]:
        pattern = made.MeshLayout(shape=((2, 2),), stride=((4, 1),))
        at = order.index(rank & 5)
        joined = made.mesh(rank, axes, ("ddp", "fsdp"), "2.12", _layout=pattern, _coordinate_on_dim=[at])
        return {"w": made.dtensor(whole, joined, ["S0"], whole.chunk(4)[at], form="2.12")}

    made.write_all(tmp_path / "step", [state(rank) for rank in range(8)])
    with tx.open(tmp_path / "step") as checkpoint:
        assert torch.equal(checkpoint["w"].torch(), whole)


@pytest.mark.parametrize("split", [2, 3])
def test_strided_shards(tmp_path: Path, split: int) -> None:
    """`_StridedShard` cuts what is cut already: each rank has rows of every part of the tensor."""
    axes = {"fsdp": 2, "tp": split}
    whole = torch.arange(24.0).view(12, 2)

    def state(rank: int) -> dict[str, object]:
        fsdp, tp = divmod(rank, split)
        local = whole.chunk(split)[tp].chunk(2)[fsdp]
        return {"w": made.dtensor(whole, made.mesh(rank, axes), [f"_0x{split}", "S0"], local)}

    made.write_all(tmp_path / "step", [state(rank) for rank in range(2 * split)])
    with tx.open(tmp_path / "step") as checkpoint:
        assert torch.equal(checkpoint["w"].torch(), whole)


def test_mesh_dims_cut_in_another_order(tmp_path: Path) -> None:
    """`shard_order` says which of two mesh dims cuts first."""
    axes = {"a": 2, "b": 2}
    whole = torch.arange(16.0).view(8, 2)
    order = (made.ShardOrderEntry(0, (1, 0)),)

    def state(rank: int) -> dict[str, object]:
        local = whole.chunk(2)[rank % 2].chunk(2)[rank // 2]
        return {"w": made.dtensor(whole, made.mesh(rank, axes), ["S0", "S0"], local, shard_order=order)}

    made.write_all(tmp_path / "step", [state(rank) for rank in range(4)])
    with tx.open(tmp_path / "step") as checkpoint:
        assert torch.equal(checkpoint["w"].torch(), whole)
