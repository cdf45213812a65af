"""Layouts: from any mesh to any other, on the same ranks, on others, and on several at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import transaxle as tx
from tests.live.ranks import run
from transaxle.live.transport import shared_memory
from transaxle.torch_tensors import local_of

Tensors = dict[str, torch.Tensor]
VALUES: Tensors = {
    "square": torch.arange(64.0).reshape(8, 8),
    "uneven": torch.arange(7 * 9.0).reshape(7, 9),
    "experts": torch.arange(10 * 6 * 4.0).reshape(10, 6, 4),
    "row": torch.arange(5.0),
    "none": torch.zeros(0, 3),
}


def _mesh(ranks: list[int], *shape: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks).reshape(shape or (len(ranks),)))


def _cut(values: Tensors, mesh: DeviceMesh, rank: int, placements: Callable[[torch.Tensor], list[Any]]) -> Tensors:
    """Return a rank's part of every tensor; nothing where it is not on the mesh."""
    if mesh.get_coordinate() is None:
        return {}
    return {
        name: distribute_tensor(tensor.clone(), mesh, placements(tensor), src_data_rank=None)
        for name, tensor in values.items()
    }


LAYOUTS: dict[str, tuple[list[int], tuple[int, ...], Callable[[torch.Tensor], list[Any]]]] = {
    "rows": ([0, 1, 2, 3], (), lambda _: [Shard(0)]),
    "columns": ([0, 1, 2, 3], (), lambda tensor: [Shard(tensor.dim() - 1)]),
    "last two": ([2, 3], (), lambda tensor: [Shard(tensor.dim() - 1)]),
    "first two": ([0, 1], (), lambda _: [Shard(0)]),
    "middle": ([1, 2], (), lambda tensor: [Shard(tensor.dim() - 1)]),
    "three dims": ([0, 1, 2, 3], (2, 2, 1), lambda tensor: [Shard(0), Shard(tensor.dim() - 1), Replicate()]),
    "copies": ([0, 1, 2, 3], (2, 2), lambda _: [Replicate(), Shard(0)]),
    "everywhere": ([0, 1, 2, 3], (), lambda _: [Replicate()]),
    "strided": ([3, 1, 2, 0], (2, 2), lambda _: [_StridedShard(0, split_factor=2), Shard(0)]),
}


def _lacking(own: Tensors, wanted: Tensors) -> int:
    """Count the bytes of elements that a rank needs and does not hold; no two elements of a tensor are alike."""
    held = {name: set(local_of(tensor).flatten().tolist()) for name, tensor in own.items()}
    return sum(
        tensor.itemsize * len(set(local_of(tensor).flatten().tolist()) - held.get(name, set()))
        for name, tensor in wanted.items()
    )


def _between(rank: int, world: int, source: str, target: str, blind: bool, in_place: bool) -> tuple[int, int, int]:
    with pytest.MonkeyPatch.context() as patch:
        if blind:
            patch.setattr(shared_memory, "map_region", lambda _: None)
        meshes = {name: _mesh(LAYOUTS[name][0], *LAYOUTS[name][1]) for name in dict.fromkeys((source, target))}
        given = _cut(VALUES, meshes[source], rank, LAYOUTS[source][2])
        truth = _cut(VALUES, meshes[target], rank, LAYOUTS[target][2])
        empty = {name: torch.full_like(tensor, -1) for name, tensor in VALUES.items()}
        taken = _cut(empty, meshes[target], rank, LAYOUTS[target][2])
        lacking = _lacking(given, truth)
        at_once = _cut(empty, meshes[target], rank, LAYOUTS[target][2])
        assert tx.reshard(given, at_once).bytes_received == lacking
        assert all(torch.equal(local_of(tensor), local_of(truth[name])) for name, tensor in at_once.items())
        refit = tx.Refit(given, taken, in_place=in_place, bucket="1MiB")
        reports = []
        for _ in range(2):
            reports.append(refit.push())
            for name, tensor in taken.items():
                assert torch.equal(local_of(tensor), local_of(truth[name])), name
            for tensor in (*given.values(), *truth.values()):
                local_of(tensor).add_(0.5)
        refit.close()
    return reports[-1].bytes_received, reports[-1].bytes_needed, lacking


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("rows", "columns"), ("first two", "last two"), ("rows", "middle"), ("first two", "middle"),
        ("three dims", "last two"), ("strided", "columns"), ("columns", "strided"), ("copies", "three dims"),
        ("copies", "copies"), ("copies", "rows"), ("three dims", "middle"), ("everywhere", "three dims"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("blind", [False, True], ids=["memory", "network"])
def test_any_mesh_into_any_other(source: str, target: str, blind: bool) -> None:
    """Square matrices, uneven cuts, ten experts over four ranks; over the network as in shared memory."""
    for received, needed, lacking in run(4, _between, source, target, blind, source == "strided"):
        assert received == needed == lacking


def _two_engines(rank: int, world: int) -> int:
    """Ranks 0 and 1 train; 2 is an engine, and 3 another one that has everything once more."""
    mesh = _mesh([0, 1])
    given = _cut(VALUES, mesh, rank, lambda _: [Shard(0)])
    taken = {} if rank < 2 else {name: torch.full_like(tensor, -1) for name, tensor in VALUES.items()}
    received = 0
    with tx.Refit(given, taken) as refit:
        for step in range(2):
            received = refit.push().bytes_received
            for name, tensor in taken.items():
                assert torch.equal(tensor, VALUES[name] + step), name
            for tensor in given.values():
                local_of(tensor).add_(1)
    return received


def test_two_engines_at_once() -> None:
    size = sum(tensor.nbytes for tensor in VALUES.values())
    assert run(4, _two_engines) == [0, 0, size, size]


def _large(rank: int, world: int, blind: bool) -> tuple[int, int, int, int]:
    with pytest.MonkeyPatch.context() as patch:
        if blind:
            patch.setattr(shared_memory, "map_region", lambda _: None)
        values = {f"layers.{n}.weight": torch.arange(1_024_000.0).reshape(1024, 1000) + n for n in range(8)}
        given = _cut(values, _mesh([0, 1, 2]), rank, lambda _: [Shard(0)])
        taken = _cut({n: torch.zeros_like(t) for n, t in values.items()}, _mesh([2, 3]), rank, lambda _: [Shard(1)])
        with tx.Refit(given, taken, bucket="2MiB") as refit:
            report = refit.push()
            some = refit.push(only="layers.3.*")
        truth = _cut(values, _mesh([2, 3]), rank, lambda _: [Shard(1)])
        assert all(torch.equal(local_of(taken[name]), local_of(truth[name])) for name in taken)
        assert some.bytes_received == report.bytes_received // 8
        assert some.tensors == len(taken) // 8
        return report.bytes_received, report.bytes_needed, report.buffers, report.bytes_written


@pytest.mark.parametrize("blind", [False, True], ids=["memory", "network"])
def test_every_rank_receives_its_own_bytes_in_two_buckets(blind: bool) -> None:
    """32 MB through buckets of 2 MiB: 16 MB for each rank of the target, of which rank 2 has a third itself."""
    half = 8 * 1024 * 500 * 4
    found = run(4, _large, blind)
    assert [received for received, *_ in found] == [0, 0, half - 8 * 340 * 500 * 4, half]
    assert all(received == needed for received, needed, *_ in found)
    assert all(buffers <= 2 * (2 << 20) for _, _, buffers, _ in found)
    assert [written for *_, written in found] == [0, 0, half, half]
