"""Whatever comes from another process, machine or job: a pickle that somebody puts there runs no code."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import transaxle as tx
from tests.live.jobs import apart, free_port, joined
from tests.live.ranks import run
from transaxle.engine.distribute.work_plan import WorkItem, parse_part, parse_plan
from transaxle.live.save_process import Rendezvous
from transaxle.live.transport import wire
from transaxle.live.transport.shared_memory import Address, Region, map_region
from transaxle.live.transport.shared_store import SharedStore
from transaxle.live.transport.world import World
from transaxle.move.journal import digest, item_file, parse_result, read_results, read_task, unfinished_task


class _Canary:
    """An object whose pickle makes a folder where it is read."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def _moves(octets: bytes, _: Path) -> object:
    return parse_part(octets, WorkItem(number=0, nbytes=0, key=digest(octets)))  # it has even the hash that is planned


def _of_scratch(octets: bytes, folder: Path) -> object:
    for name in (item_file(0), "journal.json", "journal", "transaxle.journal", "moves"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(octets)
    return (read_results(folder, [0]) or None, read_task(folder), unfinished_task(folder)) == (None, None, None) or None


CHANNELS: dict[str, Callable[[bytes, Path], object]] = {
    "between ranks": lambda octets, _: wire.decode(octets),
    "a plan of work": lambda octets, _: parse_plan(octets, "plan.json"),
    "what an item does": _moves,
    "what a worker has done": lambda octets, _: parse_result(octets),
    "a folder of work": _of_scratch,
}


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_in_a_channel_runs_nothing(channel: str, protocol: int, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    octets = pickle.dumps(_Canary(str(canary)), protocol)
    (tmp_path / "scratch").mkdir()
    with suppress(tx.TransaxleError, ValueError):  # msgspec's errors are ValueErrors; some channels take it for absent
        assert CHANNELS[channel](octets, tmp_path / "scratch") in (None, True)
    assert not canary.exists()


def _pickling(rank: int, world: int, port: int, canary: str, made: str) -> list[str]:
    """Let the other job's rank send pickles in the place of what ranks tell each other; and then the truth."""
    if made == "joined":
        apart(rank, world, 1)
        group = joined(rank, world, port)
    else:
        group = dist.new_group()
    together, said = World(group), list[str]()
    for octets in (pickle.dumps(_Canary(canary), 0), pickle.dumps(_Canary(canary))):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(wire, "encode", lambda *_, octets=octets: octets)
            with pytest.raises(tx.TransaxleError) as found:
                together.gather({"a": rank})
        said.append(found.value.code)
    assert together.gather(rank) == [0, 1]
    return said


@pytest.mark.parametrize("made", ["joined", "new"])
def test_a_rank_that_sends_pickles_runs_nothing_on_the_others(made: str, tmp_path: Path) -> None:
    """Also in groups that verl and OpenRLHF make, which anybody may join who reaches their port."""
    canary = tmp_path / "canary"
    assert run(2, _pickling, free_port(), str(canary), made) == [["CORRUPT", "CORRUPT"]] * 2
    assert not canary.exists()


def _meeting(rank: int, world: int, folder: str) -> tuple[str, int]:
    """Ranks whose background processes are to meet, and a stranger."""
    rendezvous = Rendezvous(World(), timedelta(seconds=20))
    host, port = rendezvous.address.host, rendezvous.address.port
    assert "secret" not in repr(rendezvous.address)
    with pytest.raises(tx.TransaxleError, match="has another secret"):
        SharedStore((host, port), bytes(32), 3, "", timedelta(seconds=5))
    if rank == 0:
        with pytest.raises(OSError, match="refused"):
            _reach("127.0.0.2", port)
    threads = [threading.Thread(target=rendezvous.report_loss, args=(f"lost {rank}",))]
    for each in threads:
        each.start()
        each.join()
    dist.barrier()
    said = rendezvous.loss
    dist.barrier()
    return str(said), len(rendezvous.address.secret)


def _reach(host: str, port: int) -> None:
    socket.create_connection((host, port), 5).close()


def test_background_processes_meet_behind_a_secret(tmp_path: Path) -> None:
    first, second = run(2, _meeting, str(tmp_path))
    assert first == second
    assert first[0] in {"lost 0", "lost 1"}
    assert first[1] == 32


def test_an_address_of_memory_opens_no_other_file(tmp_path: Path) -> None:
    """Another rank says where its memory is: files that this process has open are not among it."""
    path = tmp_path / "private"
    path.write_bytes(b"x" * 8192)
    with path.open("rb") as file:
        assert map_region(Address(os.getpid(), file.fileno(), str(path))) is None
        assert map_region(Address(os.getpid(), file.fileno(), f"/memfd:{path} (deleted)")) is None
    with Region(8) as region:
        found = map_region(region.address)
        assert found is not None
        region.bytes[:] = 7
        assert found[:8].tolist() == [7] * 8
