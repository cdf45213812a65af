"""Exchange: every parcel arrives as it was sent, in shared memory and over the process group."""

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
from tests.live.ranks import run
from transaxle.live.save import save
from transaxle.live.transport import shared_memory as near
from transaxle.live.transport.shared_memory import Address, Region, map_region
from transaxle.live.transport.tensor_exchange import RankExchange
from transaxle.live.transport.world import World
from transaxle.move.transfer import Fill, Parcel, Take

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
def test_every_parcel_arrives(world: int, blind: tuple[int, ...], many: int) -> None:
    assert sum(run(world, _exchanged, blind, many)) > 0 or world == 1


def _saved(rank: int, world: int, target: str, blind: tuple[int, ...]) -> int:
    mesh = init_device_mesh("cpu", (world,))
    state = {f"w{n}": distribute_tensor(MATRIX + n, mesh, [Shard(1)], src_data_rank=None) for n in range(5)}
    with _blindfold(blind=rank in blind):
        return save(state, target, to="safetensors").bytes_received


@pytest.mark.parametrize("blind", [(), (0,), (0, 1, 2)])
def test_columns_are_saved_over_either_way(tmp_path: Path, blind: tuple[int, ...]) -> None:
    received = run(3, _saved, str(tmp_path / "out"), blind)
    assert abs(sum(received) - 5 * MATRIX.nbytes * 2 // 3) < 5 * 768 * 4 * 2  # the columns do not divide
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(held[f"w{n}"], MATRIX + n) for n in range(5))
    assert tx.verify(tmp_path / "out").ok


def test_a_region_is_seen_by_its_name_only() -> None:
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


def test_a_region_that_cannot_be_mapped_leaves_nothing_open() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="Cannot allocate memory"):
        Region(1 << 60)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
