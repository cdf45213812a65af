"""torch's own distributed checkpoint through us: right where torch is, and where it is not."""

from __future__ import annotations

import re
from concurrent.futures import Future
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner import LoadPlanner as TorchPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.futures import Future as TorchFuture

import transaxle as tx
from tests.live.ranks import run
from tests.live.reexpress.test_reexpress import CONFIG, automodel, hub
from tests.live.topologies import full
from tests.nn.layers import EXPERTS, layer
from tests.oracles.quiet import quiet
from transaxle.errors import TransaxleError
from transaxle.live.global_tensors import Runs, as_runs
from transaxle.live.integrations.dcp_planners import LoadPlanner, SavePlanner

FULL = {
    "packed": torch.arange(24 * 3, dtype=torch.float32).reshape(24, 3),
    "both": torch.arange(16 * 8, dtype=torch.bfloat16).reshape(16, 8),
    "plain": torch.arange(20, dtype=torch.float32).reshape(10, 2),
    "few": torch.arange(2 * 4, dtype=torch.float32).reshape(2, 4),
    "same": torch.arange(5),
}
"""Of `few`, only one rank has rows."""
ONE: dict[str, list[Any]] = {
    "packed": [_StridedShard(0, split_factor=2)],
    "both": [_StridedShard(1, split_factor=2)],
    "plain": [Shard(0)],
    "few": [_StridedShard(0, split_factor=2)],
    "same": [Replicate()],
}
TWO: dict[str, list[Any]] = {
    "packed": [Shard(1), _StridedShard(0, split_factor=2)],
    "both": [_StridedShard(0, split_factor=2), Shard(0)],
    "plain": [Replicate(), Shard(0)],
    "few": [Shard(1), _StridedShard(0, split_factor=2)],
    "same": [Replicate(), Replicate()],
}

ROWS: dict[str, list[Any]] = {name: [Shard(0)] if t.dim() > 1 else [Replicate()] for name, t in FULL.items()}
"""What torch alone saves and loads right."""


def _state(world: int, placements: dict[str, list[Any]], *, fill: float | None = None) -> dict[str, DTensor]:
    sizes = {1: (world,), 2: (2, world // 2)}[len(placements["same"])]
    mesh = init_device_mesh("cpu", sizes)
    state = {
        name: distribute_tensor(FULL[name].clone(), mesh, placements[name], src_data_rank=None) for name in placements
    }
    if fill is not None:
        for value in state.values():
            value.to_local().fill_(fill)
    return state


def _check(world: int, found: dict[str, DTensor], placements: dict[str, list[Any]]) -> None:
    for name, truth in _state(world, placements).items():
        assert torch.equal(found[name].to_local(), truth.to_local()), name


def _async(state: dict[str, Any], target: str, kind: str, planner: SavePlanner | None = None) -> None:
    """Save in the background of torch's kinds, and spoil the state meanwhile: what is staged is saved."""
    job = async_save(state, checkpoint_id=target, planner=planner, async_checkpointer_type=AsyncCheckpointerType[kind])
    for value in state.values():
        local = value.to_local() if isinstance(value, DTensor) else value._local if isinstance(value, Runs) else None
        if local is not None:
            local.fill_(-9)
    assert isinstance(job, Future)
    job.result()


def _round(rank: int, world: int, target: str, kind: str, placements: dict[str, list[Any]]) -> None:
    state = _state(world, placements)
    if kind == "planner":
        save(dict(state), checkpoint_id=target, planner=SavePlanner())
    elif kind == "sync":
        save(as_runs(state), checkpoint_id=target)
    else:
        _async(as_runs(state), target, kind)
    again = _state(world, placements, fill=-1)
    if kind == "planner":
        load(dict(again), checkpoint_id=target, planner=LoadPlanner())
    else:
        load(as_runs(again), checkpoint_id=target)
    _check(world, again, placements)


def _elsewhere(rank: int, world: int, source: str, placements: dict[str, list[Any]], wrapped: bool) -> None:
    again = _state(world, placements, fill=-1)
    load(as_runs(again) if wrapped else dict(again), checkpoint_id=source)
    _check(world, again, placements)


@pytest.mark.parametrize("kind", ["sync", pytest.param("THREAD", marks=pytest.mark.oracle), "PROCESS", "planner"])
def test_strided_shards_are_saved_and_loaded(tmp_path: Path, kind: str) -> None:
    target = str(tmp_path / "out")
    run(2, _round, target, kind, ONE)
    with tx.open(target) as checkpoint:
        for name, tensor in FULL.items():
            assert checkpoint[name].tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()
    run(4, _elsewhere, target, TWO, True)
    run(2, _elsewhere, target, ROWS, False)


def _experts(world: int, *, fill: float | None = None) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ep_shard", "ep"))
    state = {
        name: distribute_tensor(tensor, mesh, [Shard(1), Shard(0)], src_data_rank=None)
        for name, tensor in automodel().items()
    }
    if fill is not None:
        for value in state.values():
            value.to_local().fill_(fill)
    return state


def _dialects(rank: int, world: int, target: str, kind: str) -> None:
    state = _experts(world)
    moments = {"optimizer": {"state": {name: {"exp_avg": tensor + 9000} for name, tensor in state.items()}}}
    said: dict[str, Any] = {"config": CONFIG, "source": "automodel"}
    planner = SavePlanner("hf", **said)
    everything: dict[str, Any] = {**state, **moments, "step": 3}
    if kind == "sync":
        save(everything, checkpoint_id=target, planner=planner)
    else:
        _async(everything, target, kind, planner)
        state = _experts(world)
    again = _experts(world, fill=-1)
    empty = {name: {"exp_avg": value} for name, value in _experts(world, fill=-2).items()}
    mine: dict[str, Any] = {**again, "optimizer": {"state": empty}, "step": 0}
    load(mine, checkpoint_id=target, planner=LoadPlanner("hf", **said))
    for name, value in again.items():
        assert torch.equal(value.to_local(), state[name].to_local()), name
        moment = mine["optimizer"]["state"][name]["exp_avg"]
        assert torch.equal(moment.to_local(), state[name].to_local() + 9000), name
    assert mine["step"] == 3


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["sync", "THREAD"])
def test_a_model_of_one_dialect_and_a_checkpoint_of_another(tmp_path: Path, kind: str) -> None:
    target = str(tmp_path / "out")
    run(4, _dialects, target, kind)
    with tx.open(target) as checkpoint:
        for name, tensor in hub(automodel()).items():
            assert checkpoint[name].shape == tuple(tensor.shape)
            assert checkpoint[name].tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes(), name
            moment = checkpoint[f"optim/{name}/exp_avg"]
            assert moment.tobytes() == (tensor + 9000).contiguous().view(torch.uint8).numpy().tobytes(), name


def _unfit(rank: int, world: int, source: str) -> list[tuple[str, str | None]]:
    state = _state(world, ONE, fill=-1)
    mesh = state["plain"].device_mesh
    state["plain"] = distribute_tensor(torch.full((10, 2), 7.0).half(), mesh, [Shard(0)], src_data_rank=None)
    state["both"] = distribute_tensor(torch.full((4, 2), 7.0), mesh, [Shard(0)], src_data_rank=None)
    planner = LoadPlanner()
    planner.set_up_planner(dict(state, more=torch.ones(1)), FileSystemReader(source).read_metadata(), True)
    try:
        planner.create_local_plan()
    except TransaxleError as error:
        return [(refusal.code, refusal.where.tensor) for refusal in error.refusals]
    return []


def test_tensors_that_do_not_fit_are_listed_at_once(tmp_path: Path) -> None:
    run(2, _round, str(tmp_path / "out"), "sync", ONE)
    for found in run(2, _unfit, str(tmp_path / "out")):
        want = {("DTYPE_MISMATCH", "plain"), ("SHAPE_MISMATCH", "both"), ("MISSING_TENSOR", "more")}
        assert set(found) == want


class Evil:
    """An object that would run code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (print, ("run",))


def _evil(rank: int, world: int, target: str) -> bool:
    save({"w": torch.ones(2), "evil": Evil()}, checkpoint_id=target)
    try:
        load({"w": torch.zeros(2), "evil": None}, checkpoint_id=target, planner=LoadPlanner())
    except BaseException as error:  # noqa: BLE001 - torch wraps it
        return "UNSAFE_PICKLE" in str(error)
    return False


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    assert run(1, _evil, str(tmp_path / "out")) == [True]


def _between(rank: int, world: int, folder: str) -> None:
    """What `tx.save` writes of packed parts, torch loads; what torch writes, `tx.load` puts into packed parts."""
    tx.save(_state(world, TWO), f"{folder}/ours", to="dcp")
    for placements, wrapped in ((ROWS, False), (ONE, True), (TWO, True)):
        again = _state(world, placements, fill=-1)
        load(as_runs(again) if wrapped else dict(again), checkpoint_id=f"{folder}/ours")
        _check(world, again, placements)
    save(dict(_state(world, ROWS)), checkpoint_id=f"{folder}/theirs")
    save(as_runs(_state(world, TWO)), checkpoint_id=f"{folder}/wrapped")
    for name in ("theirs", "wrapped"):
        for placements in (ONE, TWO):
            again = _state(world, placements, fill=-1)
            tx.load(again, f"{folder}/{name}")
            _check(world, again, placements)


def test_torch_loads_our_checkpoints_and_we_load_torchs(tmp_path: Path) -> None:
    run(4, _between, str(tmp_path))


# Checkpoints that have experts twice, read by those who trust them: what is read of which form, item by item.

SINGLE = {"single_grouped_weight": True, "single_grouped_bias": True}
FORMS: dict[str, dict[str, bool]] = {"experts": {}, "packed": SINGLE}
SLOTS = ("exp_avg", "exp_avg_sq")
Asked = dict[str, Any]


class Reader(FileSystemReader):
    """torch's reader, which notes what it is asked for."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.items: list[ReadItem] = []

    def read_data(self, plan: LoadPlan, planner: TorchPlanner) -> TorchFuture[None]:
        self.items += [item for item in plan.items if item.type == LoadItemType.TENSOR]
        return super().read_data(plan, planner)


def _elements(items: list[ReadItem]) -> set[tuple[str, tuple[int, ...]]]:
    """Every element that is read, by the tensor and its place there; none comes twice."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for item in items:
        start = [a + b for a, b in zip(item.storage_index.offset or (), item.storage_offsets, strict=True)]
        box = product(*(range(s, s + n) for s, n in zip(start, item.lengths, strict=True)))
        found += [(item.storage_index.fqn, place) for place in box]
    assert len(set(found)) == len(found)
    return set(found)


def _asked(form: str, sharded: bool) -> Asked:
    """A model of grouped layers, and its optimizer after a step, as torch's checkpoints have them."""
    model = nn.ModuleDict({"fc1": layer(7, in_features=4, out_features=6, **FORMS[form]), "norm": nn.LayerNorm(4)})
    if sharded:
        for module in model.values():
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = get_optimizer_state_dict(model, optimizer)["state"]
    return {"model": dict(model.state_dict()), "optimizer": {"state": states}}


def _flat(asked: Asked) -> dict[str, torch.Tensor]:
    states = asked["optimizer"]["state"]
    moments = {f"{name}.{slot}": value for name, slots in states.items() for slot, value in slots.items()}
    return {**asked["model"], **moments}


def _twice(unlike: float = 0, lacking: str = "") -> Asked:
    """What is stored: numbers of their own in stacks, the same and `unlike` more in the members."""
    both: Asked = {"model": {}, "optimizer": {"state": {}}}
    packed = _asked("packed", False)
    start = 0.0
    for name, value in packed["model"].items():
        held = {"": value, **packed["optimizer"]["state"][name]}
        for slot, tensor in held.items():
            numbers = torch.arange(start, start + tensor.numel()).reshape(tensor.shape)
            start += tensor.numel()
            members = {f"{name}{at}": numbers[at] + unlike if numbers.dim() else numbers for at in range(EXPERTS)}
            for one, stored in {name: numbers, **(members if name.startswith("fc1") else {})}.items():
                if slot and f"{one}.{slot}" != lacking:
                    both["optimizer"]["state"].setdefault(one, {})[slot] = stored.clone()
                elif not slot:
                    both["model"][one] = stored.clone()
    return both


def _read(asked: Asked, folder: str, **options: Any) -> list[ReadItem]:
    reader = Reader(folder)
    with quiet():  # torch says that this is one process
        load(asked, storage_reader=reader, planner=tx.LoadPlanner(**options))
    return reader.items


def _saved(state: Asked, folder: Path) -> str:
    with quiet():
        save(state, checkpoint_id=str(folder))
    return str(folder)


def _values(asked: Asked) -> dict[str, torch.Tensor]:
    return {name: full(value) for name, value in _flat(asked).items()}


def _on_a_rank(rank: int, world: int, form: str, folder: str) -> tuple[list[ReadItem], dict[str, torch.Tensor]]:
    asked = _asked(form, True)
    return _read(asked, folder, trust_copies=True), _values(asked)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_with_trust_copies_each_rank_reads_its_part_of_the_requested_form(
    form: str, sharded: bool, tmp_path: Path
) -> None:
    stored = _twice(unlike=1000)
    folder = _saved(stored, tmp_path / "twice")
    asked = _asked(form, False)
    before = {name: value.data_ptr() for name, value in _flat(asked).items()}
    if sharded:
        answers = run(2, _on_a_rank, form, folder)
    else:
        answers = [(_read(asked, folder, trust_copies=True), _values(asked))]
        assert {name: value.data_ptr() for name, value in _flat(asked).items()} == before
    truth = {name: value for name, value in _flat(stored).items() if name in before}
    for _, values in answers:
        assert values.keys() == truth.keys()
        assert all(torch.equal(values[name], truth[name]) for name in truth)
    wanted = {(name, place) for name, value in truth.items() for place in _places(value)}
    steps = {(name, ()) for name in truth if name.endswith(".step")}
    parts = [{(_own(fqn), place) for fqn, place in _elements(items)} for items, _ in answers]
    assert set.union(*parts) == wanted
    if sharded:
        assert parts[0] & parts[1] == steps  # the numbers that every rank has


def _own(fqn: str) -> str:
    return fqn.removeprefix("model.").removeprefix("optimizer.state.")


def _places(value: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(place) for place in torch.ones(value.shape).nonzero().tolist()] if value.dim() else [()]


@pytest.mark.parametrize(("form", "lacking"), [("experts", "fc1.weight2.exp_avg"), ("packed", "fc1.weight.exp_avg")])
def test_if_the_requested_form_lacks_a_state_the_other_form_is_read(form: str, lacking: str, tmp_path: Path) -> None:
    folder = _saved(_twice(unlike=1000, lacking=lacking), tmp_path / "lacks")
    asked = _asked(form, False)
    items = _read(asked, folder, trust_copies=True)
    _elements(items)
    found, equal = _values(asked), _flat(_twice())
    for name, value in found.items():
        is_moment = name.startswith("fc1.weight") and name.endswith(SLOTS)
        from_members = name.startswith("fc1") and is_moment != (form == "experts") and value.dim()
        assert torch.equal(value, equal[name] + (1000 if from_members else 0)), name
    moments = [item.storage_index.fqn for item in items if "state.fc1.weight" in item.storage_index.fqn]
    assert {re.search(r"weight\d", name) is not None for name in moments} == {form == "packed"}


@pytest.mark.parametrize("form", FORMS)
def test_without_trust_copies_two_forms_that_differ_are_refused(form: str, tmp_path: Path) -> None:
    folder = _saved(_twice(unlike=1000), tmp_path / "unlike")
    asked = _asked(form, False)
    before = _values(asked)
    for options in ({}, {"trust_copies": False}):
        with pytest.raises(CheckpointException, match="UNEQUAL_COPIES"):
            _read(asked, folder, **options)
        assert all(torch.equal(value, before[name]) for name, value in _values(asked).items())
    equal = _saved(_twice(), tmp_path / "equal")
    items = _read(asked, equal)
    assert {_own(item.storage_index.fqn) for item in items} >= {"fc1.weight", "fc1.weight0", "fc1.weight.exp_avg"}
    found, stored = _values(asked), _flat(_twice())
    assert all(torch.equal(found[name], stored[name]) for name in found)


def _experts_of_a_rank(rank: int, world: int, folder: str, trusting: bool) -> tuple[set[str], dict[str, list[float]]]:
    """Ranks that share out experts, the first two and the others: what each reads, and the values of its own."""
    mine = {f"fc1.weight{at}": torch.zeros(2) for at in ((0, 1), (2, 3))[rank]}
    items = _read(mine, folder, trust_copies=trusting)
    return {item.storage_index.fqn for item in items}, {name: value.tolist() for name, value in mine.items()}


def test_with_trust_copies_ranks_read_only_their_own_experts(tmp_path: Path) -> None:
    stack = torch.arange(8.0).reshape(4, 2)
    state = {"fc1.weight": stack, **{f"fc1.weight{at}": stack[at] + 1000 for at in range(4)}}
    (reads, first), (others, second) = run(2, _experts_of_a_rank, _saved(state, tmp_path / "twice"), True)
    assert (reads, others) == (first.keys(), second.keys())
    assert first | second == {f"fc1.weight{at}": (stack[at] + 1000).tolist() for at in range(4)}


def _refused_on_a_rank(rank: int, world: int, folder: str) -> str:
    with pytest.raises(CheckpointException, match="UNEQUAL_COPIES") as caught:
        _experts_of_a_rank(rank, world, folder, False)
    return str(caught.value)


def test_without_trust_copies_ranks_compare_all_experts(tmp_path: Path) -> None:
    stack = torch.arange(8.0).reshape(4, 2)
    state = {"fc1.weight": stack, **{f"fc1.weight{at}": stack[at].clone() for at in range(4)}}
    (reads, first), (others, second) = run(2, _experts_of_a_rank, _saved(state, tmp_path / "twice"), False)
    assert reads == others == state.keys()
    assert first | second == {f"fc1.weight{at}": stack[at].tolist() for at in range(4)}
    state["fc1.weight3"] += 1
    for refusal in run(2, _refused_on_a_rank, _saved(state, tmp_path / "unlike")):
        assert "fc1.weight3" in refusal
