"""Parameter groups and optimizer state, by name: settings follow the parameters, and keep their types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from transaxle.errors import TransaxleError
from transaxle.live.load import load
from transaxle.live.save import save


class Counted(torch.optim.Optimizer):
    """An optimizer that keeps Python numbers, and a setting of every plain type."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.25, "rates": (0.5, 0.75), "mode": None, "flag": True, "name": "x"})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["seen"] = state.get("seen", 0) + 3
                state["norm"] = state.get("norm", 0.0) + 0.1
                state["hot"] = True


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))


def adamw(net: nn.Module, **more: Any) -> torch.optim.AdamW:
    named = dict(net.named_parameters())
    weights = [p for n, p in named.items() if n.endswith("weight")]
    biases = [p for n, p in named.items() if n.endswith("bias")]
    return torch.optim.AdamW([{"params": weights, "weight_decay": 0.3}, {"params": biases, "lr": 0.07}], lr=0.5, **more)


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.arange(8.0).reshape(2, 4)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("to", ["safetensors", "dcp", "torch"])
def test_settings_go_to_the_parameters_that_had_them(tmp_path: Path, to: str) -> None:
    net = model()
    optimizer = adamw(net, betas=(0.8, 0.95))
    step(net, optimizer)
    save(net, tmp_path / "out", to=to, optimizer=optimizer)
    other = model()
    named = dict(other.named_parameters())
    # Another order and other groups: those with the same settings in the source may be cut further.
    fresh = torch.optim.AdamW(
        [
            {"params": [named["2.bias"]]},
            {"params": [named["1.weight"], named["0.weight"], named["2.weight"]]},
            {"params": [named["1.bias"], named["0.bias"]]},
        ]
    )
    load(other, tmp_path / "out", optimizer=fresh)
    got = {n: g for g in fresh.param_groups for n, p in named.items() if any(p is q for q in g["params"])}
    for name, group in got.items():
        weight = name.endswith("weight")
        assert group["weight_decay"] == (0.3 if weight else 0.01)
        assert group["lr"] == (0.5 if weight else 0.07)
        assert group["betas"] == (0.8, 0.95)
        assert type(group["betas"]) is tuple
    for name, parameter in net.named_parameters():
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(fresh.state[named[name]][key], value)


def test_groups_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    net = model()
    optimizer = adamw(net)
    step(net, optimizer)
    save(net, tmp_path / "out", to="safetensors", optimizer=optimizer)
    other = model()
    before = {n: p.detach().clone() for n, p in other.named_parameters()}
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    with pytest.raises(TransaxleError) as found:
        load(other, tmp_path / "out", optimizer=torch.optim.AdamW(other.parameters()))
    assert found.value.code == "UNSUPPORTED"
    assert "weight_decay: 0.3 and 0.01" in str(found.value)
    assert all(torch.equal(p, before[n] + 1) for n, p in other.named_parameters())


@pytest.mark.parametrize("started", [False, True])
def test_numbers_stay_numbers(tmp_path: Path, started: bool) -> None:
    net = model()
    optimizer = Counted(net.parameters())
    optimizer.step()
    optimizer.step()
    save(net, tmp_path / "out", to="safetensors", optimizer=optimizer)
    other = model()
    fresh = Counted(other.parameters())
    if started:
        fresh.step()
    fresh.param_groups[0].update(lr=9.0, rates=(1, 2), mode=4, flag=False, name="y")
    load(other, tmp_path / "out", optimizer=fresh)
    for parameter in other.parameters():
        assert fresh.state[parameter] == {"seen": 6, "norm": 0.2, "hot": True}
        assert [type(v) for v in fresh.state[parameter].values()] == [int, float, bool]
    settings = {k: v for k, v in fresh.param_groups[0].items() if k != "params"}
    assert settings == {"lr": 0.25, "rates": (0.5, 0.75), "mode": None, "flag": True, "name": "x"}


def test_a_tensor_setting_stays_the_same_tensor(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.125), foreach=False, capturable=True)
    optimizer.param_groups[0]["capturable"] = False
    save(net, tmp_path / "out", to="safetensors", optimizer=optimizer)
    rate = torch.tensor(3.0)
    fresh = torch.optim.AdamW(net.parameters(), lr=rate, foreach=False)
    load(net, tmp_path / "out", optimizer=fresh)
    assert fresh.param_groups[0]["lr"] is rate
    assert float(rate) == 0.125
    plain = torch.optim.AdamW(net.parameters(), lr=3.0)
    load(net, tmp_path / "out", optimizer=plain)
    assert type(plain.param_groups[0]["lr"]) is float
    assert plain.param_groups[0]["lr"] == 0.125


def test_groups_that_share_a_tensor_get_settings_of_their_own(tmp_path: Path) -> None:
    """An optimizer that is made with a tensor as its learning rate has this one tensor in all its groups."""
    net = model()
    first, *others = net.parameters()
    groups = [{"params": [first], "lr": torch.tensor(0.25)}, {"params": others, "lr": torch.tensor(0.125)}]
    save(net, tmp_path / "out", to="safetensors", optimizer=torch.optim.AdamW(groups, foreach=False))
    rate = torch.tensor(3.0)
    fresh = torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=rate, foreach=False)
    load(net, tmp_path / "out", optimizer=fresh)
    assert [group["lr"] for group in fresh.param_groups] == [torch.tensor(0.25), torch.tensor(0.125)]


@pytest.mark.parametrize("kind", ["one", "several"])
def test_a_schedule_of_groups_in_another_order_is_refused(tmp_path: Path, kind: str) -> None:
    """It keeps its learning rates by the groups' numbers, so each would have that of another from the next step on."""
    schedules = torch.optim.lr_scheduler

    def made(net: nn.Module, *, turned: bool) -> tuple[torch.optim.Optimizer, Any]:
        first, *others = net.parameters()
        groups = [{"params": [first], "lr": 0.25}, {"params": others, "lr": 0.125}]
        optimizer = torch.optim.SGD(groups[::-1] if turned else groups)
        schedule: Any = schedules.LambdaLR(optimizer, lambda step: 0.5**step)
        if kind == "several":
            schedule = schedules.SequentialLR(optimizer, [schedule, schedules.ExponentialLR(optimizer, 0.5)], [4])
        return optimizer, schedule

    net = model()
    optimizer, schedule = made(net, turned=False)
    step(net, optimizer)
    schedule.step()
    save(net, tmp_path / "out", to="safetensors", optimizer=optimizer, extra={"schedule": schedule, "epoch": 1})
    other, other_schedule = made(net, turned=True)
    with pytest.raises(TransaxleError, match=r"initial learning rates \[0.125, 0.25\], but .* \[0.25, 0.125\]"):
        load(net, tmp_path / "out", optimizer=other, extra={"schedule": other_schedule})
    load(net, tmp_path / "out", optimizer=other)
    assert [group["lr"] for group in other.param_groups] == [0.0625, 0.125]
    same, same_schedule = made(net, turned=False)
    load(net, tmp_path / "out", optimizer=same, extra={"schedule": same_schedule, "epoch": None})
    same.step()
    same_schedule.step()
    assert [group["lr"] for group in same.param_groups] == [0.0625, 0.03125]


@pytest.mark.parametrize("inner", ["torch", "accelerate"])
def test_a_schedule_that_accelerate_has_wrapped_is_held_against_the_groups_too(tmp_path: Path, inner: str) -> None:
    from accelerate import Accelerator
    from accelerate.scheduler import AcceleratedScheduler

    def made(net: nn.Module, *, turned: bool) -> tuple[Any, Any]:
        first, *others = net.parameters()
        groups = [{"params": [first], "lr": 0.25}, {"params": others, "lr": 0.125}]
        optimizer: Any = torch.optim.SGD(groups[::-1] if turned else groups)
        outer = Accelerator(cpu=True).prepare_optimizer(optimizer)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            outer if inner == "accelerate" else optimizer, lambda step: 0.5**step
        )
        return outer, AcceleratedScheduler(schedule, outer)

    net = model()
    optimizer, schedule = made(net, turned=False)
    save(net, tmp_path / "out", to="safetensors", optimizer=optimizer, extra={"schedule": schedule})
    other, other_schedule = made(net, turned=True)
    with pytest.raises(TransaxleError, match=r"initial learning rates \[0.125, 0.25\], but .* \[0.25, 0.125\]"):
        load(net, tmp_path / "out", optimizer=other, extra={"schedule": other_schedule})
    same, same_schedule = made(net, turned=False)
    load(net, tmp_path / "out", optimizer=same, extra={"schedule": same_schedule})


def test_a_setting_that_is_no_plain_data_is_refused(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    optimizer.param_groups[0]["hook"] = print
    optimizer.state[next(net.parameters())]["history"] = [torch.ones(2)]
    with pytest.raises(TransaxleError) as found:
        save(net, tmp_path / "out", to="safetensors", optimizer=optimizer)
    assert found.value.code == "UNSUPPORTED"
    assert not (tmp_path / "out").exists()
