"""What single ranks plan to read: together it is the whole plan, and alone it is their part of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import transaxle as tx
from tests import checkpoints
from transaxle.axes.geometry import Shard, whole
from transaxle.engine.checkpoint.checkpoint import StoredTensor
from transaxle.live.global_tensors import Census, GlobalTensor
from transaxle.live.load import PlannedReads, plan_reads
from transaxle.move.transfer import Scratch, produce
from transaxle.torch_tensors import Positions

RANKS = 5
REPLICATED = ("norm", "gate.weight")
"""What is in the names of tensors that all ranks hold whole."""


def _held(shape: tuple[int, ...], *, whole_everywhere: bool) -> dict[int, Positions]:
    """What the ranks hold of a tensor: all of it, or its rows, of which the last ranks may have none."""
    found: dict[int, Positions] = {}
    for rank in range(RANKS):
        held = [whole(size) for size in shape]
        if not whole_everywhere:
            held[0] = Shard()(held[0], RANKS, rank)
        found[rank] = tuple(map(tuple, held))
    return found


def _census(stored: Mapping[str, StoredTensor]) -> Census:
    shared: dict[tuple[tuple[int, ...], bool], dict[int, Positions]] = {}
    census = {}
    for name, tensor in stored.items():
        key = tensor.shape, any(word in name for word in REPLICATED)
        if key not in shared:
            shared[key] = _held(tensor.shape, whole_everywhere=key[1])
        census[name] = GlobalTensor(name, tensor.dtype, tensor.shape, shared[key])
    return census


def _rows(array: np.ndarray, held: Positions) -> np.ndarray:
    (start, stop), *others = held[0] or ((0, 0),)
    assert not others
    return array[start:stop]


@pytest.mark.parametrize("once", [True, False])
def test_the_union_of_the_parts_is_the_whole_plan(once: bool, tmp_path: Path) -> None:
    """Each rank's bytes are its rows of the tensors as numpy stacks them, and no rank plans another one's."""
    source = checkpoints.tiny(tmp_path / "source")
    with tx.open(source) as opened:
        seen = opened.as_dialect("transformers")
        stored = {name: seen[name] for name in seen}
        census = _census(stored)
        plans = [plan_reads(census, stored, rank, once=once) for rank in range(RANKS)]
        arrays = _stacked(checkpoints.tensors())
        assert arrays.keys() == stored.keys()
        taken: Counter[str] = Counter()
        for rank, plan in enumerate(plans):
            for item, name in zip(plan.items, plan.names, strict=True):
                if rank not in item.target_ranks:
                    continue
                wanted = _rows(arrays[name], census[name].positions[rank])
                out = np.empty(item.size, np.uint8)
                produce(seen.container.storage, list(item.transfers), 0, out, Scratch(1 << 20))
                assert out.tobytes() == wanted.tobytes(), (rank, name)
                taken[name] += len(wanted)
        for name, array in arrays.items():
            everywhere = any(word in name for word in REPLICATED)
            assert taken[name] == len(array) * (RANKS if everywhere else 1), name


@pytest.mark.parametrize("once", [True, False])
def test_what_is_left_out_is_counted(once: bool, tmp_path: Path) -> None:
    """What several ranks take part in is the same on all of them, in one order; the rest is another rank's own."""
    with tx.open(checkpoints.tiny(tmp_path / "source")) as opened:
        stored = {name: opened[name] for name in opened}
        plans = [plan_reads(_census(stored), stored, rank, once=once) for rank in range(RANKS)]
    shared = [
        [(n, i.size, i.target_ranks) for n, i in zip(p.names, p.items, strict=True) if len(i.target_ranks) > 1]
        for p in plans
    ]
    assert shared[1:] == shared[:1] * (RANKS - 1)
    assert bool(shared[0]) is once
    alone = {rank: _alone(plan, rank) for rank, plan in enumerate(plans)}
    for rank, plan in enumerate(plans):
        assert {each for item in plan.items for each in item.target_ranks if len(item.target_ranks) == 1} == {rank}
        assert dict(plan.elsewhere) == {other: size for other, size in alone.items() if other != rank}
        assert [item.key for item in plan.items] == list(range(len(plan.names)))


def _alone(plan: PlannedReads, rank: int) -> int:
    return sum(item.size for item in plan.items if item.target_ranks == (rank,))


def _stacked(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors as transformers holds them: experts stacked, gate above up."""
    found = {name: array for name, array in tensors.items() if ".experts." not in name}
    for layer in range(checkpoints.SIZES["num_hidden_layers"]):
        stem = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            [tensors[f"{stem}.{e}.{part}_proj.weight"] for e in range(checkpoints.SIZES["num_experts"])]
            for part in ("gate", "up", "down")
        )
        found[f"{stem}.gate_up_proj"] = np.stack([np.concatenate(pair) for pair in zip(gate, up, strict=True)])
        found[f"{stem}.down_proj"] = np.stack(down)
    return found
