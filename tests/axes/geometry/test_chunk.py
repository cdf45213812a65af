from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.axes.apply import arange, law, take
from transaxle.axes.geometry import (
    Intervals,
    MeshCut,
    PerComponent,
    Replicated,
    Shard,
    StridedShard,
    Widths,
    count_positions,
    place,
    whole,
)
from transaxle.axes.geometry import take as taken
from transaxle.errors import Refused


def rows(held: Intervals) -> list[int]:
    return [i for start, stop in held for i in range(start, stop)]


@st.composite
def held(draw: st.DrawFn) -> Intervals:
    """Some positions, as the ranks before may have left them: ascending, with gaps."""
    points = sorted(draw(st.lists(st.integers(0, 30), max_size=8, unique=True)))
    return tuple(zip(points[::2], points[1::2], strict=False))


@law
@given(held(), st.integers(0, 40), st.integers(0, 40))
def test_take_is_a_slice_of_the_local_tensor(some: Intervals, start: int, stop: int) -> None:
    found = taken(some, start, stop)
    assert rows(found) == rows(some)[start:stop]
    assert all(a < b for a, b in found)
    assert count_positions(found) == len(rows(found))


@law
@given(held(), st.integers(1, 9))
def test_shard_is_torch_chunk(some: Intervals, parts: int) -> None:
    chunks = torch.tensor(rows(some), dtype=torch.int64).chunk(parts)
    for rank in range(parts):
        wanted = chunks[rank].tolist() if rank < len(chunks) else []
        assert rows(Shard()(some, parts, rank)) == wanted


@law
@given(held(), st.integers(1, 4), st.integers(1, 4))
def test_strided_shard_is_what_torch_splits(some: Intervals, split: int, parts: int) -> None:
    local = torch.tensor(rows(some), dtype=torch.int64)
    wanted, _ = _StridedShard(0, split_factor=split)._split_tensor(local, parts, with_padding=False)
    for rank in range(parts):
        found = StridedShard(split)(some, parts, rank)
        assert rows(found) == wanted[rank].tolist()
        assert all(a < b for a, b in found)


@contextmanager
def mesh(shape: Sequence[int], rank: int) -> Iterator[DeviceMesh]:
    """The mesh as one of its ranks sees it; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=prod(shape))
    try:
        yield init_device_mesh("cpu", tuple(shape))
    finally:
        dist.destroy_process_group()


def cuts(placements: Sequence[Placement], shape: Sequence[int], coordinate: Sequence[int]) -> list[MeshCut]:
    """The same placements in our words."""
    found = []
    for placement, parts, rank in zip(placements, shape, coordinate, strict=True):
        if isinstance(placement, _StridedShard):
            found.append(MeshCut(placement.dim, parts, rank, StridedShard(int(placement.split_factor))))
        elif isinstance(placement, TorchShard):
            found.append(MeshCut(placement.dim, parts, rank))
        else:
            assert isinstance(placement, Replicate)
            found.append(MeshCut(None, parts, rank))
    return found


S, R = TorchShard, Replicate()


def strided(dim: int, split: int) -> Placement:
    return _StridedShard(dim, split_factor=split)


MESHES: list[tuple[tuple[int, ...], list[tuple[Placement, ...]]]] = [
    ((3,), [(S(0),), (S(1),), (S(-1),), (S(-2),), (R,), (strided(0, 2),), (strided(1, 3),)]),
    (
        (2, 3),
        [
            (S(0), S(1)),
            (S(1), S(0)),
            (S(0), S(0)),
            (S(-1), S(1)),
            (R, S(0)),
            (S(1), R),
            (strided(0, 3), S(0)),
            (strided(1, 3), S(1)),
            (strided(1, 2), S(0)),
            (S(0), strided(1, 2)),
            (strided(0, 2), strided(1, 2)),
        ],
    ),
    (
        (2, 2, 2),
        [(S(0), S(1), S(0)), (strided(0, 2), S(1), S(0)), (strided(0, 4), strided(0, 2), S(0)), (R, S(1), S(1))],
    ),
]
SHAPES = [(12, 12), (7, 10), (10, 7), (5, 3), (1, 9), (2, 0)]


@pytest.mark.parametrize(("shape", "placements"), MESHES, ids=["1d", "2d", "3d"])
def test_place_is_what_distribute_tensor_does(shape: tuple[int, ...], placements: list[tuple[Placement, ...]]) -> None:
    """Even and uneven, every rank, every placement: torch decides."""
    for rank, coordinate in enumerate(product(*map(range, shape))):
        with mesh(shape, rank) as devices:
            assert tuple(devices.get_coordinate() or ()) == coordinate
            for size, placement in product(SHAPES, placements):
                tensor = arange(*size)
                local = distribute_tensor(tensor, devices, placement, src_data_rank=None).to_local()
                found = take(tensor, place(size, cuts(placement, shape, coordinate)))
                assert found.tolist() == local.tolist(), (size, placement, coordinate)


def test_place_refuses_a_dim_that_is_not_there() -> None:
    for dim in (2, -3):
        with pytest.raises(Refused, match=rf"dim {dim} is split, but the shape is \[4, 5\]") as caught:
            place((4, 5), [MeshCut(dim, 2, 0)])
        assert caught.value.code == "SHAPE_MISMATCH"


def test_widths_are_taken_as_given() -> None:
    rule = Widths((126, 0, 125))
    assert [rule(whole(251), 3, rank) for rank in range(3)] == [((0, 126),), (), ((126, 251),)]
    assert rows(Widths((1, 3))(((2, 4), (8, 10)), 2, 1)) == [3, 8, 9]
    for parts, total in ((3, 250), (2, 251)):
        with pytest.raises(Refused, match=rf"\[126, 0, 125\] over {parts} ranks do not sum to {total} rows") as caught:
            rule(whole(total), parts, 0)
        assert caught.value.code == "SHAPE_MISMATCH"


def test_replicated_rows_are_everywhere() -> None:
    some = ((2, 5), (9, 12))
    assert all(Replicated()(some, 3, rank) == some for rank in range(3))


def shards(tensor: torch.Tensor, parts: int, widths: Sequence[int] | None = None) -> list[torch.Tensor]:
    """The shards of one component, empty ones included."""
    pieces = list(tensor.split(list(widths)) if widths else tensor.chunk(parts))
    return pieces + [tensor[:0]] * (parts - len(pieces))


def test_each_component_of_gate_and_up_is_cut_by_itself() -> None:
    """A fused matrix cut in two holds half of each, not all of the gate."""
    gate, up = arange(6, 4), arange(6, 4, start=100)
    fused = torch.cat([gate, up])
    rule = PerComponent((6, 6), (Shard(), Shard()))
    for rank in range(4):
        wanted = torch.cat([shards(gate, 4)[rank], shards(up, 4)[rank]])
        assert take(fused, place((12, 4), [MeshCut(0, 4, rank, rule)])).tolist() == wanted.tolist()


def test_components_are_cut_again_by_the_next_mesh_dim() -> None:
    gate, up = arange(6), arange(6, start=100)
    rule = PerComponent((6, 6), (Shard(), Shard()))
    for first, second in product(range(2), range(3)):
        local = torch.cat([gate.chunk(2)[first], up.chunk(2)[first]]).chunk(3)[second]
        held = place((12,), [MeshCut(0, 2, first, rule), MeshCut(0, 3, second)])
        assert rows(held[0]) == [i % 100 + (6 if i >= 100 else 0) for i in local.tolist()]


def test_components_must_fill_the_dim() -> None:
    with pytest.raises(Refused, match=r"components \[6, 6\] do not sum to 11 rows") as caught:
        PerComponent((6, 6), (Shard(), Shard()))(whole(11), 2, 0)
    assert caught.value.code == "SHAPE_MISMATCH"
