"""Optimizer state of grouped layers, per expert or packed, through every door."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import transaxle as tx
from tests.nn.layers import EXPERTS, FORMS, SPLITS, layer, rows
from transaxle.errors import TransaxleError
from transaxle.nn import GroupedLinear, optimizer_state_as

MOMENTS = ("exp_avg", "exp_avg_sq")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Model(nn.Module):
    """Two grouped layers among other modules."""

    def __init__(self, form: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(16)
        said: dict[str, Any] = FORMS[form]
        self.experts = nn.ModuleList([layer(seed, **said), layer(seed + 1, in_features=24, out_features=16, **said)])

    def forward(self, x: torch.Tensor, splits: list[int]) -> torch.Tensor:
        """Both layers, one after the other."""
        for one in self.experts:
            x = one(x, splits)
        made: torch.Tensor = self.norm(x)
        return made

    def rows(self, seed: int) -> torch.Tensor:
        """An input."""
        first = self.experts[0]
        assert isinstance(first, GroupedLinear)
        return rows(first, seed)


def _trained(form: str, seed: int, steps: int = 2) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(form, seed)
    groups: list[dict[str, Any]] = [{"params": [*model.experts.parameters()], "lr": 0.01 * seed}]
    optimizer = torch.optim.AdamW([*groups, {"params": [*model.norm.parameters()]}], lr=0.02)
    for step in range(steps):
        model(model.rows(step), SPLITS[4]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _moments(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every state by the names of the packed form."""
    found: dict[str, torch.Tensor] = {}
    for path, one in [*model.experts.named_children()]:
        for stem in ("weight", "bias"):
            held = [getattr(one, stem)] if hasattr(one, stem) else [getattr(one, f"{stem}{n}") for n in range(EXPERTS)]
            for slot in (*MOMENTS, "step"):
                states = [optimizer.state[parameter][slot] for parameter in held]
                whole = states[0] if len(held) == 1 else torch.stack(states)
                found[f"{path}.{stem}.{slot}"] = whole if slot != "step" else whole.max()
    return found


def _same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    assert all(torch.equal(value, two[name]) for name, value in one.items())


pairs = pytest.mark.parametrize(
    ("source", "target"), [("experts", "packed"), ("packed", "experts"), ("packed", "packed")]
)


def test_wrapped_models() -> None:
    """torch's state dicts by names know of no wrappers: neither does the remap."""
    model, optimizer = _trained("experts", 1)
    state = get_optimizer_state_dict(model, optimizer)
    wanted = optimizer_state_as(state, Model("packed", 2))
    other = Model("packed", 2)
    names = {name for name, _ in other.named_parameters()}
    other.experts[0] = checkpoint_wrapper(other.experts[0])
    found = optimizer_state_as(state, other)
    assert found["state"].keys() == wanted["state"].keys() == names
    assert found["param_groups"] == wanted["param_groups"]


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The same as torchtitan has it, below the keys of torch's own example."""
    states = get_optimizer_state_dict(model, optimizer, options=FLAT)
    return {"app": {"model": get_model_state_dict(model), "optim": states}}


def _planned(given: dict[str, Any], asked: dict[str, Any], path: Path) -> dict[str, Any]:
    """What a planner reads into a state dict: the model's and the optimizer's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        save(given, checkpoint_id=str(path))
        load(asked, checkpoint_id=str(path), planner=tx.LoadPlanner())
    return dict(zip(("model", "optimizer"), asked.get("app", asked).values(), strict=True))


@pairs
@pytest.mark.parametrize("way", ["function", "transaxle", "planner", "planner, flat"])
def test_states_follow_their_parameters(source: str, target: str, way: str, tmp_path: Path) -> None:
    """Moments, steps and settings, so that the next step is the same one; TransformerEngine leaves them behind."""
    model, optimizer = _trained(source, 1)
    other, fresh = _trained(target, 5, steps=1)
    if way == "function":
        state = get_optimizer_state_dict(model, optimizer)
        kept = copy.deepcopy(state)
        set_optimizer_state_dict(other, fresh, optimizer_state_as(state, other))
        other.load_state_dict(model.state_dict())
        assert list(state["state"]) == list(kept["state"])
    elif way == "transaxle":
        tx.save(model, tmp_path / "saved", to="safetensors:identity", optimizer=optimizer)
        report = tx.load(other, tmp_path / "saved", optimizer=fresh)
        assert report.bytes_written == report.bytes_needed
    else:
        states = _flat if "flat" in way else _states
        found = _planned(states(model, optimizer), states(other, fresh), tmp_path)
        other.load_state_dict(found["model"])
        set_optimizer_state_dict(other, fresh, found["optimizer"], options=FLAT if "flat" in way else None)
    _same(_moments(other, fresh), _moments(model, optimizer))
    assert [group["lr"] for group in fresh.param_groups] == [0.01, 0.02]
    for one, chosen in ((model, optimizer), (other, fresh)):
        one(one.rows(9), SPLITS[4]).square().mean().backward()
        chosen.step()
    _same(_moments(other, fresh), _moments(model, optimizer))


def test_dcp_refuses_what_cannot_become_one(tmp_path: Path) -> None:
    model, optimizer = _trained("experts", 1)
    asked = _trained("packed", 2)
    unlike = copy.deepcopy(_states(model, optimizer))
    unlike["optimizer"]["state"]["experts.0.weight2"]["step"] = torch.tensor(7.0)
    with pytest.raises(CheckpointException, match=r"UNEQUAL_COPIES  optim/experts\.0\.weight\d/step"):
        _planned(unlike, _states(*asked), tmp_path / "steps")
    apart = _states(model, optimizer)
    apart["optimizer"]["param_groups"][0]["params"].remove("experts.0.bias1")
    apart["optimizer"]["param_groups"][1]["params"].append("experts.0.bias1")
    with pytest.raises(CheckpointException, match=r"bias0 and experts\.0\.bias1 were trained with different settings"):
        _planned(apart, _states(*asked), tmp_path / "groups")
    flat = _flat(model, optimizer)
    flat["app"]["optim"]["param_groups.experts.1.bias3.lr"] = 0.5
    with pytest.raises(CheckpointException, match=r"bias3\.lr is 0\.5, but here they are one"):
        _planned(flat, _flat(*asked), tmp_path / "flat")


@pytest.mark.parametrize("target", ["experts", "packed"])
def test_groups_of_one_rank_are_those_of_its_experts(target: str, tmp_path: Path) -> None:
    """Where ranks share out experts, each with names of its own, torch's checkpoints keep one rank's groups."""
    model, optimizer = _trained("experts", 1)
    given = _states(model, optimizer)
    given["optimizer"]["param_groups"][0]["params"] = [f"experts.{n}.{s}3" for n in "01" for s in ("weight", "bias")]
    other, fresh = _trained(target, 5, steps=1)
    found = _planned(given, _states(other, fresh), tmp_path)
    set_optimizer_state_dict(other, fresh, found["optimizer"])
    assert [group["lr"] for group in fresh.param_groups] == [0.01, 0.02]
    other, fresh = _trained(target, 5, steps=1)
    tx.load(other, tmp_path, optimizer=fresh)
    assert [group["lr"] for group in fresh.param_groups] == [0.01, 0.02]
    _same(_moments(other, fresh), _moments(model, optimizer))


def test_states_that_cannot_become_one_are_refused() -> None:
    model, optimizer = _trained("experts", 1)
    other = Model("packed", 2)

    def changed(**said: Any) -> dict[str, Any]:
        state: dict[str, Any] = copy.deepcopy(_states(model, optimizer)["optimizer"])
        state["state"]["experts.0.weight2"].update(said)
        return state

    with pytest.raises(TransaxleError, match="UNEQUAL_COPIES"):
        optimizer_state_as(changed(step=torch.tensor(7.0)), other)
    with pytest.raises(TransaxleError, match="SHAPE_MISMATCH"):
        optimizer_state_as(changed(exp_avg=torch.zeros(3, 3)), other)
    lacking = changed()
    del lacking["state"]["experts.0.weight1"]
    with pytest.raises(TransaxleError, match=r"experts\.0\.weight1 have no state"):
        optimizer_state_as(lacking, other)
    lacking["param_groups"][0]["params"].remove("experts.0.weight1")
    with pytest.raises(TransaxleError, match="experts 1 of 4 are missing"):
        optimizer_state_as(lacking, other)
    apart = changed()
    apart["param_groups"][0]["params"].remove("experts.0.bias1")
    apart["param_groups"][1]["params"].append("experts.0.bias1")
    with pytest.raises(TransaxleError, match="its parts are in the parameter groups 0 and 1"):
        optimizer_state_as(apart, other)


@pairs
def test_settings_of_an_optimizer_without_state(source: str, target: str) -> None:
    """Plain gradient descent has none, and still knows which parameters are of which group."""
    model, other = Model(source, 1), Model(target, 5)
    optimizer, fresh = (torch.optim.SGD(one.parameters(), lr=lr) for one, lr in ((model, 0.25), (other, 0.5)))
    state = optimizer_state_as(get_optimizer_state_dict(model, optimizer), other)
    assert sorted(state["param_groups"][0]["params"]) == sorted(name for name, _ in other.named_parameters())
    set_optimizer_state_dict(other, fresh, state)
    assert fresh.param_groups[0]["lr"] == 0.25
    flat = get_optimizer_state_dict(model, optimizer, options=FLAT)
    assert optimizer_state_as(flat, other)["param_groups.norm.weight.lr"] == 0.25
    names = {name.removeprefix("param_groups.").rpartition(".")[0] for name in optimizer_state_as(flat, other)}
    assert names <= dict(other.named_parameters()).keys()
    with pytest.raises(TransaxleError, match="numbers its parameters"):
        optimizer_state_as(optimizer.state_dict(), other)


def _below(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The states of a packed model with experts below each other, and biases as columns, moments alike."""
    given = _states(model, optimizer)

    def changed(name: str, value: torch.Tensor) -> torch.Tensor:
        if value.dim() < 2:
            return value
        return value.flatten(0, 1).clone() if name.endswith("weight") else value[:, None].clone()

    given["model"] = {name: changed(name, value) for name, value in given["model"].items()}
    states = given["optimizer"]["state"].items()
    given["optimizer"]["state"] = {n: {s: changed(n, v) for s, v in state.items()} for n, state in states}
    return given


def _twice(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The states of a packed model, and those of each of its experts beside them."""
    given = _states(model, optimizer)
    for held in (given["model"], *given["optimizer"]["state"].values()):
        assert held
    for name in [name for name in given["model"] if name.startswith("experts")]:
        states = given["optimizer"]["state"][name]
        for place in range(EXPERTS):
            given["model"][f"{name}{place}"] = given["model"][name][place].clone()
            own = {slot: value[place].clone() if value.dim() else value.clone() for slot, value in states.items()}
            given["optimizer"]["state"][f"{name}{place}"] = own
    return given


def _through(door: str, given: dict[str, Any], other: Model, fresh: torch.optim.Optimizer, path: Path) -> None:
    """Bring states into a model and its optimizer."""
    if door == "function":
        other.load_state_dict(given["model"])
        set_optimizer_state_dict(other, fresh, optimizer_state_as(given["optimizer"], other))
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        if not path.exists():
            saved = {"model": given["model"], "optimizer": {"state": given["optimizer"]["state"]}}
            save(saved, checkpoint_id=str(path))
        if door == "transaxle":
            tx.load(other, path, optimizer=fresh)
            return
        state = _states(other, fresh)
        asked = {"model": state["model"], "optimizer": {"state": state["optimizer"]["state"]}}
        try:
            load(asked, checkpoint_id=str(path), planner=tx.LoadPlanner())
        except CheckpointException as error:
            raise error.failures[0][0] from error


@pytest.mark.parametrize("door", ["function", "transaxle", "planner"])
@pytest.mark.parametrize("target", FORMS)
def test_moments_packed_otherwise_or_twice(door: str, target: str, tmp_path: Path) -> None:
    model, optimizer = _trained("packed", 1)
    other, fresh = _trained(target, 5, steps=1)
    for number, form in enumerate((_below, _twice)):
        given = form(model, optimizer)
        if door == "function":
            for group in given["optimizer"]["param_groups"]:
                names = [name for name in given["optimizer"]["state"] if name.rstrip("0123") in group["params"]]
                group["params"] = [*names, *(name for name in group["params"] if name not in names)]
        kept = copy.deepcopy(given)
        for _ in range(2):
            _through(door, given, other, fresh, tmp_path / f"{number}")
            _same(_moments(other, fresh), _moments(model, optimizer))
            assert torch.equal(other(other.rows(3), SPLITS[4]), model(model.rows(3), SPLITS[4]))
        assert list(given["optimizer"]["state"]) == list(kept["optimizer"]["state"])
    unlike = _twice(model, optimizer)
    unlike["optimizer"]["state"]["experts.1.weight2"]["exp_avg"][-1, -1] += 1
    before = {name: value.clone() for name, value in _moments(other, fresh).items()}
    if door == "function":
        for group in unlike["optimizer"]["param_groups"]:
            group["params"] = []
    with pytest.raises(TransaxleError, match=r"experts\.1\.weight") as caught:
        _through(door, unlike, other, fresh, tmp_path / "unlike")
    assert caught.value.code == "UNEQUAL_COPIES"
    _same(_moments(other, fresh), before)
