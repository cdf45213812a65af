"""The ranks that act together: each learns what every other one says, however long it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import transaxle as tx
from tests.live.jobs import apart, free_port, joined
from tests.live.ranks import run
from transaxle.errors import TransaxleError, refuse
from transaxle.live.save import save
from transaxle.live.transport import shared_memory as near
from transaxle.live.transport import wire
from transaxle.live.transport.shared_memory import Address, Region, map_region
from transaxle.live.transport.tensor_exchange import RankExchange
from transaxle.live.transport.world import _PAGE, _SIZE, World
from transaxle.move.transfer import Fill, Parcel, Take

_ROOM = _PAGE - _SIZE - len(wire.encode(b"x" * 300)) + 300
"""The longest bytes that one collective gathers."""


def _item(rank: int, sizes: tuple[int, ...]) -> bytes:
    return bytes([65 + rank]) * sizes[rank]


def _gathered(rank: int, world: int, sizes: tuple[int, ...]) -> bool:
    return World().gather(_item(rank, sizes)) == [_item(each, sizes) for each in range(world)]


@pytest.mark.parametrize("sizes", [(0, 1, _ROOM), (_ROOM + 1, 0, _ROOM), (5, 1_000_003, 40_000)])
def test_items_of_any_length_are_gathered_in_order(sizes: tuple[int, ...]) -> None:
    assert run(len(sizes), _gathered, sizes) == [True] * len(sizes)


def _agreed(rank: int, world: int, failing: tuple[int, ...]) -> tuple[str, ...]:
    """What each rank is told where some refuse, and that the world still works afterwards."""
    together = World()
    said: tuple[str, ...] = ()
    try:
        together.agree(refuse("IO", f"rank {rank} is tired") if rank in failing else None)
    except TransaxleError as error:
        said = tuple(refusal.message for refusal in error.refusals)
    assert together.gather(rank) == list(range(world))
    return said


@pytest.mark.parametrize("failing", [(), (2,), (0, 1)])
def test_all_ranks_raise_the_refusals_of_any_rank(failing: tuple[int, ...]) -> None:
    told = tuple(f"rank {rank} is tired" for rank in failing)
    assert run(3, _agreed, failing) == [told] * 3


def _groups_of_meshes(rank: int, world: int, folder: Path) -> tuple[tuple[int, ...], ...]:
    """Save and load with a dim of a mesh as the group; return the ranks of that dim, and those of the whole mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    own = folder / f"tp{mesh.get_local_rank('tp')}"
    tx.save({"w": torch.full((4,), float(mesh.get_local_rank("tp")))}, own, to="safetensors", group=mesh["dp"])
    state = {"w": torch.zeros(4)}
    tx.load(state, own, group=mesh["dp"])
    assert state["w"].tolist() == [mesh.get_local_rank("tp")] * 4
    return World(mesh["dp"]).ranks, World(mesh).ranks


def test_a_mesh_may_be_the_group(tmp_path: Path) -> None:
    """A mesh of one dim stands for its ranks, one of several dims for all ranks where it has them all."""
    everybody = (0, 1, 2, 3)
    of_dp = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    assert run(4, _groups_of_meshes, tmp_path) == [(of_dp[rank], everybody) for rank in everybody]


def _part_of_a_mesh(rank: int, world: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "tp", "ep"))
    with pytest.raises(ValueError, match="group must be a mesh of one dim") as found:
        World(mesh["tp", "ep"])
    return str(found.value)


def test_a_mesh_of_several_dims_is_no_group(tmp_path: Path) -> None:
    text = 'group must be a mesh of one dim, such as mesh["dp"]; got one of 2 dims [2, 1]'
    assert run(4, _part_of_a_mesh) == [text] * 4


def _numbered(rank: int, world: int, port: int) -> tuple[int, tuple[int, ...], dict[int, int] | None]:
    apart(rank, world, 2)
    found = World(joined(rank, world, port))
    assert World().numbers is None
    assert found.gather(rank) == list(range(world))
    return found.rank, found.ranks, None if found.numbers is None else dict(found.numbers)


def test_a_group_may_join_two_jobs() -> None:
    """Each job counts its ranks from 0, and so do meshes; the group has numbers of its own."""
    of_first, of_second = {0: 0, 1: 1}, {0: 2}
    expected = [(0, (0, 1, 2), of_first), (1, (0, 1, 2), of_first), (2, (0, 1, 2), of_second)]
    assert run(3, _numbered, free_port()) == expected


def _into_another_job(rank: int, world: int, port: int) -> int:
    job, own = apart(rank, world, 2)
    group, values = joined(rank, world, port), torch.arange(64.0).reshape(8, 8)
    mesh = init_device_mesh("cpu", (2,))
    held = values.clone() if job == 0 else torch.zeros_like(values)
    tensor = distribute_tensor(held, mesh, [Shard(job)], src_data_rank=None)
    report = tx.reshard({"w": tensor} if job == 0 else {}, {"w": tensor} if job == 1 else {}, group)
    assert torch.equal(tensor.to_local(), values.chunk(2, job)[own])
    return report.bytes_received


def test_shards_are_copied_into_another_job() -> None:
    """Rank 0 of the one is not rank 0 of the other, whatever the two meshes say."""
    assert run(4, _into_another_job, free_port()) == [0, 0, 128, 128]


def _mesh_outside(rank: int, world: int, port: int) -> str:
    job, _ = apart(rank, world, 2)
    mesh = init_device_mesh("cpu", (2 if job == 0 else 1,))
    if rank == 1:
        return ""
    group = joined(min(rank, 1), 2, port)
    state = {"w": distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None)}
    with pytest.raises(TransaxleError) as found:
        tx.reshard(state if job == 0 else {}, state if job == 1 else {}, group)
    return str(found.value)


def test_a_mesh_with_ranks_outside_of_the_group_is_refused() -> None:
    first, _, second = run(3, _mesh_outside, free_port())
    assert first == second
    assert "ranks 1 of its mesh are not in the process group" in first


# Exchange: every parcel arrives as it was sent, in shared memory and over the process group.

SIZES = [0, 1, 7, 4096, 100_003, 1 << 20, 3]
MATRIX = torch.arange(768 * 1024, dtype=torch.int32).reshape(768, 1024)


def _parcels(world: int) -> list[Parcel]:
    """Every sender, with one receiver or all of them, itself among them or not."""
    found = []
    for number in range(6 * world):
        sender = number % world
        others = tuple(rank for rank in range(world) if rank != sender or number % 2)
        receivers = (others, ((number // world + sender) % world,))[number % 3 == 0]
        found.append(Parcel(sender, receivers, SIZES[number % len(SIZES)]))
    return found


def _content(number: int, size: int) -> np.ndarray:
    return (np.arange(size) * (2 * number + 3) % 251).astype(np.uint8)


@contextmanager
def _blindfold(*, blind: bool) -> Iterator[None]:
    """Let a rank see nothing of the others' memory, as on another machine."""
    with pytest.MonkeyPatch.context() as patch:
        if blind:
            patch.setattr(near, "map_region", lambda _: None)
        yield


def _in_rounds(parcels: list[Parcel], many: int, fill: Fill, take: Take) -> int:
    """Send so many parcels in a round."""
    exchange, received = RankExchange(World()), 0
    for first in range(0, len(parcels), many):
        received += exchange.round(
            parcels[first : first + many],
            lambda number, buffer, first=first: fill(first + number, buffer),  # type: ignore[misc]
            lambda number, buffer, first=first: take(first + number, buffer),  # type: ignore[misc]
        )
    exchange.close()
    return received


def _exchanged(rank: int, world: int, blind: tuple[int, ...], many: int) -> int:
    parcels = _parcels(world)
    arrived: dict[int, np.ndarray] = {}

    def fill(number: int, buffer: np.ndarray) -> None:
        buffer[:] = _content(number, len(buffer))

    def take(number: int, buffer: np.ndarray) -> None:
        assert number not in arrived
        arrived[number] = buffer.copy()

    with _blindfold(blind=rank in blind):
        received = _in_rounds(parcels, many, fill, take)
    assert arrived.keys() == {number for number, parcel in enumerate(parcels) if rank in parcel.receivers}
    for number, data in arrived.items():
        assert np.array_equal(data, _content(number, parcels[number].size)), number
    assert received == sum(p.size for p in parcels if rank in p.receivers and rank != p.sender)
    return received


@pytest.mark.oracle
@pytest.mark.parametrize("many", [1, 4, 100])
@pytest.mark.parametrize(("world", "blind"), [(1, ()), (2, ()), (2, (1,)), (3, ()), (3, (0, 1, 2)), (3, (2,))])
def test_every_parcel_is_received(world: int, blind: tuple[int, ...], many: int) -> None:
    assert sum(run(world, _exchanged, blind, many)) > 0 or world == 1


def _saved(rank: int, world: int, target: str, blind: tuple[int, ...]) -> int:
    mesh = init_device_mesh("cpu", (world,))
    state = {f"w{n}": distribute_tensor(MATRIX + n, mesh, [Shard(1)], src_data_rank=None) for n in range(5)}
    with _blindfold(blind=rank in blind):
        return save(state, target, to="safetensors").bytes_received


@pytest.mark.parametrize("blind", [(), (0,)])
def test_column_shards_are_saved_over_memory_or_network(tmp_path: Path, blind: tuple[int, ...]) -> None:
    received = run(3, _saved, str(tmp_path / "out"), blind)
    assert abs(sum(received) - 5 * MATRIX.nbytes * 2 // 3) < 5 * 768 * 4 * 2  # the columns do not divide
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(held[f"w{n}"], MATRIX + n) for n in range(5))
    assert tx.verify(tmp_path / "out").ok


def test_a_region_is_mapped_only_by_its_exact_address() -> None:
    with Region(1000) as region:
        region.bytes[:] = np.arange(1000) % 256
        found = map_region(region.address)
        assert found is not None
        assert np.array_equal(found[:1000], np.arange(1000) % 256)
        assert not found.flags.writeable
        own = region.address
        assert map_region(Address(own.pid, own.fd, own.name.replace("transaxle-", "transaxle+"))) is None
        assert map_region(Address(own.pid, 1 << 20, own.name)) is None
    assert map_region(own) is None
    assert found[999] == 999 % 256  # what is mapped stays
    assert f"/proc/{os.getpid()}" not in own.name
