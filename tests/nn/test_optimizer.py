"""Optimizer state of grouped layers, per expert or packed, through every door."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import transaxle as tx
from tests.nn.layers import EXPERTS, SPLITS, layer, rows
from transaxle.errors import TransaxleError
from transaxle.nn import GroupedLinear, optimizer_state_as

SINGLE = {"single_grouped_weight": True, "single_grouped_bias": True}
FORMS: dict[str, dict[str, bool]] = {"experts": {}, "packed": SINGLE}
MOMENTS = ("exp_avg", "exp_avg_sq")


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


@pairs
def test_optimizer_state(source: str, target: str) -> None:
    """TransformerEngine remaps weights, and leaves their moments behind."""
    model, optimizer = _trained(source, 1)
    state = get_optimizer_state_dict(model, optimizer)
    kept = copy.deepcopy(state)
    other, fresh = _trained(target, 5, steps=1)
    set_optimizer_state_dict(other, fresh, optimizer_state_as(state, other))
    other.load_state_dict(model.state_dict())
    _same(_moments(other, fresh), _moments(model, optimizer))
    assert fresh.param_groups[0]["lr"] == 0.01
    assert list(state["state"]) == list(kept["state"])
    for one, chosen in ((model, optimizer), (other, fresh)):  # and the next step is the same one
        one(one.rows(9), SPLITS[4]).square().mean().backward()
        chosen.step()
    _same(_moments(other, fresh), _moments(model, optimizer))


@pairs
def test_through_transaxle_load(source: str, target: str, tmp_path: Path) -> None:
    model, optimizer = _trained(source, 1)
    tx.save(model, tmp_path / "saved", to="safetensors:identity", optimizer=optimizer)
    other = Model(target, 7)
    fresh = torch.optim.AdamW([{"params": [*other.experts.parameters()]}, {"params": [*other.norm.parameters()]}])
    report = tx.load(other, tmp_path / "saved", optimizer=fresh)
    assert report.bytes_written == report.bytes_needed
    _same(_moments(other, fresh), _moments(model, optimizer))
    assert [group["lr"] for group in fresh.param_groups] == [0.01, 0.02]
    found = other(other.rows(3), SPLITS[4])
    assert torch.equal(found, model(model.rows(3), SPLITS[4]))


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


@pairs
def test_through_dcp(source: str, target: str, tmp_path: Path) -> None:
    model, optimizer = _trained(source, 1)
    other, fresh = _trained(target, 5, steps=1)
    given, state = _states(model, optimizer), _states(other, fresh)
    for group in (*given["optimizer"]["param_groups"], *state["optimizer"]["param_groups"]):
        del group["params"]  # lists of names, which differ on purpose
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        save(given, checkpoint_id=str(tmp_path / "saved"))
        load(state, checkpoint_id=str(tmp_path / "saved"), planner=tx.LoadPlanner())
    other.load_state_dict(state["model"])
    _same(_moments(other, fresh), _moments(model, optimizer))
    found = other(other.rows(3), SPLITS[4])
    assert torch.equal(found, model(model.rows(3), SPLITS[4]))


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
    with pytest.raises(TransaxleError, match="experts 1 of 4 lack"):
        optimizer_state_as(lacking, other)
    apart = changed()
    apart["param_groups"][0]["params"].remove("experts.0.bias1")
    apart["param_groups"][1]["params"].append("experts.0.bias1")
    with pytest.raises(TransaxleError, match="its parts are of groups 0 and 1"):
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
