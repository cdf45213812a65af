"""Checkpoints that have experts twice, read by those who trust them: what is read of which form, item by item."""

from __future__ import annotations

import re
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.futures import Future

import transaxle as tx
from tests.live.ranks import run
from tests.nn.layers import EXPERTS, layer

SINGLE = {"single_grouped_weight": True, "single_grouped_bias": True}
FORMS: dict[str, dict[str, bool]] = {"experts": {}, "packed": SINGLE}
SLOTS = ("exp_avg", "exp_avg_sq")
Asked = dict[str, Any]


class Reader(FileSystemReader):
    """torch's reader, which notes what it is asked for."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.items: list[ReadItem] = []

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        load(asked, storage_reader=reader, planner=tx.LoadPlanner(**options))
    return reader.items


def _saved(state: Asked, folder: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=str(folder))
    return str(folder)


def _values(asked: Asked) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in _flat(asked).items()
    }


def _on_a_rank(rank: int, world: int, form: str, folder: str) -> tuple[list[ReadItem], dict[str, torch.Tensor]]:
    asked = _asked(form, True)
    return _read(asked, folder, trust_copies=True), _values(asked)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_of_trusted_copies_each_rank_reads_its_own_part_of_the_form_asked_for(
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
def test_where_the_form_asked_for_lacks_a_state_the_other_one_is_read(form: str, lacking: str, tmp_path: Path) -> None:
    """All moments of the parameter come from one form."""
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
def test_unless_told_so_two_forms_that_differ_are_refused_and_nothing_changes(form: str, tmp_path: Path) -> None:
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


def test_ranks_that_share_out_experts_read_their_own(tmp_path: Path) -> None:
    stack = torch.arange(8.0).reshape(4, 2)
    state = {"fc1.weight": stack, **{f"fc1.weight{at}": stack[at] + 1000 for at in range(4)}}
    (reads, first), (others, second) = run(2, _experts_of_a_rank, _saved(state, tmp_path / "twice"), True)
    assert (reads, others) == (first.keys(), second.keys())
    assert first | second == {f"fc1.weight{at}": (stack[at] + 1000).tolist() for at in range(4)}


def _refused_on_a_rank(rank: int, world: int, folder: str) -> str:
    with pytest.raises(CheckpointException, match="UNEQUAL_COPIES") as caught:
        _experts_of_a_rank(rank, world, folder, False)
    return str(caught.value)


def test_unless_told_so_ranks_that_share_out_experts_compare_all_of_them(tmp_path: Path) -> None:
    stack = torch.arange(8.0).reshape(4, 2)
    state = {"fc1.weight": stack, **{f"fc1.weight{at}": stack[at].clone() for at in range(4)}}
    (reads, first), (others, second) = run(2, _experts_of_a_rank, _saved(state, tmp_path / "twice"), False)
    assert reads == others == state.keys()
    assert first | second == {f"fc1.weight{at}": stack[at].tolist() for at in range(4)}
    state["fc1.weight3"] += 1
    for refusal in run(2, _refused_on_a_rank, _saved(state, tmp_path / "unlike")):
        assert "fc1.weight3" in refusal


def test_fewer_experts_than_the_checkpoint_has_in_both_forms_are_refused(tmp_path: Path) -> None:
    """Nobody asks for the others: it is another number of experts, not a part of them."""
    stack = torch.arange(8.0).reshape(4, 2)
    folder = _saved({"fc1.weight": stack, **{f"fc1.weight{at}": stack[at].clone() for at in range(4)}}, tmp_path / "x")
    mine = {f"fc1.weight{at}": torch.zeros(2) for at in range(2)}
    with pytest.raises(CheckpointException, match="the checkpoint has 4 experts, the layer 2"):
        _read(mine, folder)
    assert not any(value.any() for value in mine.values())
