"""Checkpoints that hold experts twice, stacked and one by one: each rank reads its own part of both forms, once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.live.ranks import run
from transaxle.live.integrations.dcp_planners import LoadPlanner

EXPERTS, HIGH, WIDE = 8, 8, 3
AT = "blocks.0.fc1."
STACKED = {f"{AT}weight": (EXPERTS, HIGH, WIDE), f"{AT}bias": (EXPERTS, HIGH)}
"""Names and shapes of a grouped layer's stacks."""
Reads = Counter[tuple[str, tuple[int, ...]]]
"""How often each element was read: by the name of its tensor, and its place there."""


def _full(name: str) -> torch.Tensor:
    shape = STACKED[name]
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + len(name)


def _written(form: str) -> dict[str, torch.Tensor]:
    """Both forms: stacks, or stacks whose experts lie below each other, and every expert by itself."""
    found = {"norm": torch.arange(5.0)}
    for name in STACKED:
        full = _full(name)
        found[name] = full.flatten(0, 1) if form == "below" else full
        found |= {f"{name}{place}": expert.clone() for place, expert in enumerate(full)}
    return found


class Counted(LoadPlanner):
    """Notes every element that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Reads = Counter()

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Note where the values come from, in the whole tensor."""
        index, within = read_item.storage_index, read_item.storage_offsets
        assert index.offset is not None
        first = [start + more for start, more in zip(index.offset, within, strict=True)]
        for place in torch.cartesian_prod(*(torch.arange(n) for n in read_item.lengths)).reshape(tensor.numel(), -1):
            at = tuple(int(start + more) for start, more in zip(first, place.tolist(), strict=True))
            self.reads[index.fqn, at] += 1
        super().commit_tensor(read_item, tensor)


def _asked(world: int, dim: int | None, by_name: bool) -> dict[str, Any]:
    """A layer that is cut along a dim; by name: each rank has its experts by themselves."""
    mesh = init_device_mesh("cpu", (world,))
    found: dict[str, Any] = {"norm": torch.zeros(5)}
    for name, shape in STACKED.items():
        if by_name:
            mine = range(mesh.get_local_rank(), EXPERTS, world)
            found |= {f"{name}{place}": torch.zeros(shape[1:]) for place in mine}
        else:
            placement = Replicate() if dim is None else Shard(dim)
            found[name] = distribute_tensor(torch.zeros(shape), mesh, [placement], src_data_rank=None)
    return found


def _load(rank: int, world: int, folder: str, dim: int | None, by_name: bool) -> tuple[Reads, dict[int, str]]:
    """Load; return what was read, and what which rank refused: it has changed nothing then."""
    asked, planner = _asked(world, dim, by_name), Counted()
    try:
        load(asked, checkpoint_id=folder, planner=planner)
    except CheckpointException as error:
        if rank in error.failures:
            assert not any(_local(tensor).any() for tensor in asked.values())
        return planner.reads, {rank: str(each[0]) for rank, each in error.failures.items()}
    assert torch.equal(asked["norm"], torch.arange(5.0))
    for name in STACKED:
        if by_name:
            members = {place: f"{name}{place}" for place in range(EXPERTS) if f"{name}{place}" in asked}
            assert members
            assert all(torch.equal(asked[member], _full(name)[place]) for place, member in members.items())
        else:
            mesh, placements = asked[name].device_mesh, asked[name].placements
            own = distribute_tensor(_full(name), mesh, placements, src_data_rank=None)
            assert torch.equal(asked[name].to_local(), own.to_local())
    return planner.reads, {}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _save(rank: int, world: int, folder: str, form: str, changed: str | None) -> None:
    state = _written(form)
    if changed is not None:
        state[changed].view(-1)[-1] += 1
    save(state, checkpoint_id=folder)


@pytest.mark.parametrize(
    ("form", "dim", "by_name"),
    [
        ("stacked", 0, False),
        ("stacked", 1, False),
        ("stacked", None, False),
        ("stacked", 0, True),
        ("below", 0, False),
        ("below", None, False),
    ],
)
def test_what_is_stored_twice_is_read_once(tmp_path: Path, form: str, dim: int | None, by_name: bool) -> None:
    """Of both forms: by one rank where the model is sharded, by each where each has all of it.

    A rank that asks for some of the experts by the names under which they are stored needs no stack.
    """
    folder = str(tmp_path / "both")
    run(1, _save, folder, form, None)
    held = {name: tensor.numel() for name, tensor in _written(form).items()}
    for world in (1, 4):
        of_all_ranks: Reads = Counter()
        for reads, refused in run(world, _load, folder, dim, by_name):
            assert refused == {}
            assert set(reads.values()) == {1}
            of_all_ranks += reads
        times = world if dim is None else 1
        assert {many for (name, _), many in of_all_ranks.items() if name != "norm"} == {times}
        found = Counter(name for name, _ in of_all_ranks)
        needless = STACKED if by_name and world > 1 else {}
        assert found == {name: many for name, many in held.items() if name not in needless}


@pytest.mark.parametrize(("dim", "who"), [(0, [1]), (1, [3]), (None, [0, 1, 2, 3])])
def test_forms_that_differ_are_told_on_every_rank(tmp_path: Path, dim: int | None, who: list[int]) -> None:
    """By those ranks that hold what differs: the last element of one expert."""
    folder = str(tmp_path / "unlike")
    run(1, _save, folder, "stacked", f"{AT}weight3")
    for _, refused in run(4, _load, folder, dim, False):
        assert sorted(refused) == who
        assert all(f"{AT}weight and {AT}weight3 both hold expert 3" in told for told in refused.values())
