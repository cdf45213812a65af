"""What a rank learns of all others grows with the tensors and with the ranks, not with their product: counted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from transaxle.axes.geometry import Shard
from transaxle.live import global_tensors
from transaxle.live.global_tensors import Census, census
from transaxle.live.transport.world import _PAGE, World
from transaxle.torch_tensors import Placement, plain_placement

TENSORS = 4000
FEW, MANY = 4, 16
SHAPES = ((256, 8), (512, 8), (1024,))
_COLLECTIVES = 12
"""At most, of which each costs a page for every rank."""

Placing = Callable[[int, int], Placement]
"""Rank and number of ranks -> how its tensors lie."""


class Threads:
    """Ranks that are threads of this process.

    Args:
        count: of them.
    """

    def __init__(self, count: int) -> None:
        self.worlds = [_Thread(rank, count, self) for rank in range(count)]
        self.barrier = Barrier(count)
        self.given: dict[int, torch.Tensor] = {}

    def run(self, work: Callable[[World], Census]) -> list[Census]:
        """Let all do something."""
        with ThreadPoolExecutor(len(self.worlds)) as pool:
            return list(pool.map(work, self.worlds))


class _Thread(World):
    device = torch.device("cpu")

    def __init__(self, rank: int, count: int, threads: Threads) -> None:
        super().__init__()
        self.rank, self.size, self.ranks = rank, count, tuple(range(count))
        self.received = 0
        """Bytes that this rank was sent."""
        self._threads = threads

    def _all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        threads = self._threads
        threads.given[self.rank] = mine
        threads.barrier.wait()
        found = [threads.given[rank].clone() for rank in self.ranks]
        threads.barrier.wait()
        self.received += sum(map(len, found))
        return found


def on_one_mesh(_rank: int, ranks: int) -> Placement:
    return Placement((ranks,), tuple(range(ranks)), ((0, Shard()),))


def on_meshes_of_two(rank: int, _ranks: int) -> Placement:
    first = rank - rank % 2
    return Placement((2,), (first, first + 1), ((0, Shard()),))


def on_each_rank(rank: int, _ranks: int) -> Placement:
    return plain_placement(rank)


def learned(ranks: int, placing: Placing, monkeypatch: pytest.MonkeyPatch) -> tuple[Census, int]:
    """Let ranks learn of each other; return what the last one knows, and the bytes that it was sent for that."""
    tensors = {f"layers.{at}.weight": torch.empty(SHAPES[at % 3], device="meta") for at in range(TENSORS)}
    monkeypatch.setattr(global_tensors, "placement_of", lambda _tensor, rank, *_: placing(rank, ranks))
    threads = Threads(ranks)
    found = threads.run(lambda world: census(tensors, world))
    assert all(each == found[0] for each in found)
    assert list(found[0]) == list(tensors)
    shapes: list[tuple[int, ...]] = [*SHAPES]
    held = {shape: {rank: placing(rank, ranks).positions(shape)[rank] for rank in range(ranks)} for shape in shapes}
    for name, tensor in found[0].items():
        shape = tuple(tensors[name].shape)
        assert (tensor.name, tensor.shape, tensor.dtype) == (name, shape, "F32")
        assert tensor.positions == held[shape]
    return found[-1], threads.worlds[-1].received


@pytest.mark.oracle
@pytest.mark.parametrize("placing", [on_one_mesh, on_meshes_of_two, on_each_rank])
def test_neither_what_is_sent_nor_what_is_kept_is_ranks_times_tensors(
    placing: Placing, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, few_bytes = learned(FEW, placing, monkeypatch)
    many, many_bytes = learned(MANY, placing, monkeypatch)
    assert few_bytes > 10 * TENSORS, "the names have been sent"
    assert many_bytes - few_bytes < _COLLECTIVES * _PAGE * (MANY - FEW)
    for known, ranks in ((few, FEW), (many, MANY)):
        mappings = {id(tensor.positions): len(tensor.positions) for tensor in known.values()}
        assert sum(mappings.values()) == len(SHAPES) * ranks


def test_ranks_with_tensors_of_their_own_are_heard_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks of a pipeline have them, and ranks of experts; one has none."""
    monkeypatch.setattr(global_tensors, "placement_of", lambda _tensor, rank, *_: plain_placement(rank))
    threads, shared = Threads(FEW), torch.empty(3, device="meta")
    own = {
        world.rank: {f"r{world.rank}.{at}": torch.empty(at, 2, device="meta") for at in range(200 * world.rank)}
        for world in threads.worlds
    }
    given = [{**({"shared": shared} if rank else {}), **own[rank]} for rank in range(FEW)]
    found = threads.run(lambda world: census(given[world.rank], world))
    assert all(each == found[0] for each in found)
    assert found[0].keys() == {name for each in given for name in each}
    assert set(found[0]["shared"].positions) == {1, 2, 3}
    for rank in range(FEW):
        assert all(set(found[0][name].positions) == {rank} for name in own[rank])
        assert all(found[0][name].shape == tuple(tensor.shape) for name, tensor in own[rank].items())


def test_equal_bytes_are_one_object() -> None:
    threads = Threads(FEW)
    said = [b"a" * 50_001, b"b", b"a" * 50_001, b""]
    with ThreadPoolExecutor(FEW) as pool:
        found = list(pool.map(lambda world: world.gather_once(said[world.rank]), threads.worlds))
    assert found == [said] * FEW
    assert all(each[0] is each[2] for each in found)
