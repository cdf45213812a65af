"""What a rank learns of all others grows with the tensors and with the ranks, not with their product: counted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as torch_loads
from torch.distributed.checkpoint.state_dict_saver import save as torch_saves
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

import transaxle as tx
from tests.live.ranks import run
from tests.live.reexpress.test_reexpress import CONFIG, automodel
from tests.live.reexpress.test_reexpress import hub as unstacked
from tests.live.topologies import LLAMA, MOE, PP, build, gathered, same, source
from tests.oracles import hub
from transaxle.axes.geometry import Shard
from transaxle.live import global_tensors
from transaxle.live.global_tensors import Census, as_runs, census
from transaxle.live.load import load
from transaxle.live.reshard import reshard
from transaxle.live.save import save
from transaxle.live.transport.world import _PAGE, World
from transaxle.torch_tensors import Placement, local_of, plain_placement

TENSORS = 2000
FEW, MANY = 4, 12
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
def test_the_census_does_not_grow_with_ranks_times_tensors(placing: Placing, monkeypatch: pytest.MonkeyPatch) -> None:
    few, few_bytes = learned(FEW, placing, monkeypatch)
    many, many_bytes = learned(MANY, placing, monkeypatch)
    assert few_bytes > 10 * TENSORS, "the names have been sent"
    assert many_bytes - few_bytes < _COLLECTIVES * _PAGE * (MANY - FEW)
    for known, ranks in ((few, FEW), (many, MANY)):
        mappings = {id(tensor.positions): len(tensor.positions) for tensor in known.values()}
        assert sum(mappings.values()) == len(SHAPES) * ranks


def test_the_census_includes_tensors_of_single_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_equal_bytes_of_several_ranks_are_one_object() -> None:
    threads = Threads(FEW)
    said = [b"a" * 50_001, b"b", b"a" * 50_001, b""]
    with ThreadPoolExecutor(FEW) as pool:
        found = list(pool.map(lambda world: world.gather_once(said[world.rank]), threads.worlds))
    assert found == [said] * FEW
    assert all(each[0] is each[2] for each in found)


# What topologies need of their own: transformers' tensor parallel, stages, from trainer to inference, uneven cuts.


def _differing(state: dict[str, Any], truth: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in state.items() if not torch.equal(local_of(tensor), truth[name])}


def _emptied(state: dict[str, Any]) -> dict[str, Any]:
    for tensor in state.values():
        local_of(tensor).zero_()
    return state


def _tp_auto(rank: int, world: int, given: str, target: str) -> tuple[set[str], str]:
    """Save and reload a model that transformers cuts; then let torch's own checkpoint try."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    said: Any = DistributedConfig(tp_plan="auto", tp_size=world)
    model = AutoModelForCausalLM.from_pretrained(given, distributed_config=said, dtype=torch.float32)
    state = model.state_dict()
    truth = {name: local_of(tensor).clone() for name, tensor in state.items()}
    for to in ("hf", "dcp"):
        save(model, f"{target}/{to}", to=to)
        _emptied(state)
        load(model, f"{target}/{to}")
        assert not _differing(model.state_dict(), truth)
    with pytest.raises(CheckpointException) as found:
        torch_saves(state, checkpoint_id=f"{target}/torch")
    torch_loads(_emptied(state), checkpoint_id=f"{target}/dcp")
    wrong = _differing(state, truth)
    torch_loads(as_runs(_emptied(state)), checkpoint_id=f"{target}/dcp")
    assert not _differing(state, truth)
    packed = {n for n, t in state.items() if isinstance(t, DTensor) and isinstance(t.placements[0], _StridedShard)}
    assert wrong == packed
    return packed, str(found.value)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.oracle)])
def test_transformers_own_tensor_parallel(tmp_path: Path, world: int) -> None:
    """torch refuses to save the packed experts, and loads wrong rows into them; if this fails, torch has mended it."""
    given = source(tmp_path / "hub", {**MOE, "num_experts": 8})
    for packed, said in run(world, _tp_auto, given, str(tmp_path)):
        assert packed == {f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(2)}
        assert "Failed to validate global plan" in said
    truth, found = load_file(tmp_path / "hub" / hub.WEIGHTS), load_file(tmp_path / "hf" / hub.WEIGHTS)
    assert same(truth, found)


def _pipeline(rank: int, world: int, given: str, target: str) -> int:
    truth = load_file(Path(given, hub.WEIGHTS))
    model = build(LLAMA, PP, meta=True)
    report = load(model, given)
    assert report.unexpected == ()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, truth[name]), name
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if rank else 2e-3)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    save(model, target, to="hf", optimizer=optimizer)
    again = build(LLAMA, PP, meta=True)
    other = torch.optim.AdamW(again.parameters())
    load(again, target, optimizer=other)
    assert same(gathered(model, optimizer), gathered(again, other))
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    return len(model.state_dict())


def test_pipeline_stages_keep_their_own_settings(tmp_path: Path) -> None:
    given = source(tmp_path / "hub", LLAMA)
    counts = run(2, _pipeline, given, str(tmp_path / "out"))
    truth = load_file(Path(given, hub.WEIGHTS))
    assert sum(counts) == len(truth)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == truth.keys()
    with tx.open(tmp_path / "out") as checkpoint:
        groups = checkpoint.metadata["param_groups"]
    assert sorted(group["lr"] for group in groups) == [1e-3, 2e-3]


def _to_inference(rank: int, world: int) -> int:
    trainer = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ep_shard", "ep"))
    engine = init_device_mesh("cpu", (world,))
    experts = automodel()
    placed = {
        n: distribute_tensor(t, trainer, [TorchShard(1), TorchShard(0)], src_data_rank=None) for n, t in experts.items()
    }
    truth = {
        name: distribute_tensor(
            tensor, engine, [TorchShard(1) if "down" in name else TorchShard(0)], src_data_rank=None
        )
        for name, tensor in unstacked(experts).items()
    }
    target = {
        name: distribute_tensor(torch.full(tensor.shape, -1.0), engine, tensor.placements, src_data_rank=None)
        for name, tensor in truth.items()
    }
    report = reshard(placed, target, config=CONFIG)
    for name, tensor in target.items():
        assert torch.equal(tensor.to_local(), truth[name].to_local()), name
    return report.bytes_received


def test_reshard_from_trainer_to_inference(tmp_path: Path) -> None:
    assert all(count > 0 for count in run(4, _to_inference))
