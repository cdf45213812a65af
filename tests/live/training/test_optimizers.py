"""What is given as `optimizer=`: wrappers, containers and lists are taken apart, and nothing of their state is lost."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from tests.live.ranks import run
from tests.live.refusals import refused
from tests.live.training.test_training_state import equal
from tests.oracles.quiet import quiet
from transaxle.errors import TransaxleError
from transaxle.live.asynchronous import async_save
from transaxle.live.load import load
from transaxle.live.optimizers import unwrap_optimizers
from transaxle.live.save import save


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))


def trained(net: nn.Module, optimizer: Any, steps: int = 3) -> None:
    torch.manual_seed(9)
    for _ in range(steps):
        net.zero_grad()
        net(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()


def distributed(name: str) -> Any:
    """One of torch's distributed optimizers: to import any compiles others with TorchScript, which torch warns of."""
    with quiet():
        return getattr(importlib.import_module("torch.distributed.optim"), name)


class Delegating:
    """A wrapper of no torch class, as apex and DeepSpeed have them."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


class Posing(Optimizer):
    """A torch optimizer that has the parameters, and an optimizer inside that does the work."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {})
        self.inside = {"main": optimizer}

    def step(self, closure: Any = None) -> Any:
        self.inside["main"].step()


def _several(net: nn.Module) -> list[Optimizer]:
    matrices = [p for p in net.parameters() if p.dim() == 2]
    rest = [p for p in net.parameters() if p.dim() != 2]
    groups: list[dict[str, Any]] = [{"params": rest[:1]}, {"params": rest[1:], "lr": 0.5}]
    return [Muon(matrices, lr=0.02), AdamW(groups, lr=0.02)]


def _inner(given: Any) -> list[Optimizer]:
    return list(unwrap_optimizers(given).members)


WRAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "twice": lambda net: Delegating(Posing(AdamW(net.parameters(), lr=0.02))),
    "list": _several,
    "nested": lambda net: {"all": [Delegating(each) for each in _several(net)]},
}


def _steps(given: Any) -> Any:
    return SimpleNamespace(step=lambda: [each.step() for each in _inner(given)])


def _told(given: Any) -> list[Any]:
    """State and settings of everything inside, in order."""
    found: list[Any] = []
    for one in _inner(given):
        for group in one.param_groups:
            found.append({k: v for k, v in group.items() if k not in ("params", "param_names")})
            found += [dict(sorted(one.state[p].items())) for p in group["params"]]
    return found


@pytest.mark.oracle
@pytest.mark.parametrize(("kind", "background"), [*((kind, False) for kind in WRAPPED), ("list", True)])
def test_state_of_wrapped_optimizers_is_saved_and_loaded(tmp_path: Path, kind: str, background: bool) -> None:
    net = model()
    optimizer = WRAPPED[kind](net)
    trained(net, _steps(optimizer))
    for one in _inner(optimizer):
        for number, group in enumerate(one.param_groups):
            group["lr"] = 0.125 / (number + 1)
    if background:
        async_save(net, tmp_path / "out", to="dcp", optimizer=optimizer).result()
    else:
        assert save(net, tmp_path / "out", to="dcp", optimizer=optimizer).untrained == ()
    other = model(5)
    fresh = WRAPPED[kind](other)
    report = load(other, tmp_path / "out", optimizer=fresh)
    states = sum(len(state) for one in _inner(optimizer) for state in one.state.values())
    assert report.states == states >= 10
    assert report.untrained == ()
    assert equal(_told(optimizer), _told(fresh))
    trained(net, _steps(optimizer))
    trained(other, _steps(fresh))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def _zero(rank: int, world: int, folder: str, how: str, resume: bool) -> Any:
    net = model()
    weights = [p for n, p in net.named_parameters() if n.endswith("weight")]
    biases = [p for n, p in net.named_parameters() if n.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.25}, {"params": biases, "lr": 0.5}]
    zero = distributed("ZeroRedundancyOptimizer")(groups, AdamW, parameters_as_bucket_view=how == "buckets", lr=0.02)
    if resume:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(3)
        zero.param_groups[0]["lr"] = 9.0
        report = load(net, folder, optimizer=zero)
        assert report.states == sum(map(len, zero.optim.state.values()))
    else:
        trained(net, zero)
        schedule = torch.optim.lr_scheduler.StepLR(zero, 1, 0.5)  # it speaks to the outside only
        schedule.last_epoch = 0
        for group in zero.param_groups:
            group["lr"] *= 0.5
        save(net, folder, to="dcp", optimizer=zero)
    rates = [group["lr"] for group in zero.param_groups]
    assert not resume or rates == [group["lr"] for group in zero.optim.param_groups]
    trained(net, zero)
    return rates, {n: p.detach().clone() for n, p in net.named_parameters()}


@pytest.mark.parametrize("how", ["plain", pytest.param("buckets", marks=pytest.mark.oracle)])
def test_zero_redundancy_optimizer_resumes_at_another_world_size(tmp_path: Path, how: str) -> None:
    first = run(2, _zero, str(tmp_path / "out"), how, False)
    again = run(2, _zero, str(tmp_path / "out"), how, True)
    alone = run(1, _zero, str(tmp_path / "out"), how, True)
    for rates, tensors in (*first, *again, *alone):
        assert rates == [0.01, 0.25]
        assert all(torch.equal(tensors[name], value) for name, value in first[0][1].items())


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    net = model()
    with refused("NAME_COLLISION", "0 and 1 (AdamW and SGD)"):
        unwrap_optimizers([AdamW(net.parameters()), SGD(net[0].parameters())])


def test_parameters_without_an_optimizer_are_reported(tmp_path: Path) -> None:
    net = model()
    net[2].bias.requires_grad_(False)
    optimizer = AdamW(net[0].parameters())
    trained(net, optimizer)
    wanted = ("1.weight", "1.bias", "2.weight")
    assert save(net, tmp_path / "out", to="dcp", optimizer=[optimizer]).untrained == wanted
    assert async_save(net, tmp_path / "later", to="dcp", optimizer=[optimizer]).result().untrained == wanted
    assert load(net, tmp_path / "out", optimizer={"main": optimizer}).untrained == wanted
    assert load(net, tmp_path / "out").untrained == ()


class Momentum(Optimizer):
    """Keeps its state where torch does not look."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.momentum: dict[Any, Any] = {}

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.momentum[parameter] = torch.ones_like(parameter)


class Counting(SGD):
    """Keeps a number, and says so in its state dict."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": 3}


class GlobalTensor(SGD):
    """Keeps state of no parameter."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        self.state["global"] = {"seen": torch.ones(2)}  # type: ignore[index]


class Copying(Optimizer):
    """Updates copies of its parameters, and writes them back."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.copies = [p.detach().clone().requires_grad_() for p in self.param_groups[0]["params"]]
        self.inside = AdamW(self.copies)

    def step(self, closure: Any = None) -> Any:
        for parameter, copy in zip(self.param_groups[0]["params"], self.copies, strict=True):
            copy.grad = parameter.grad
        self.inside.step()


class Lookahead(Optimizer):
    """Has slow weights of its own beside the optimizer inside."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {})
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        self.optimizer.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["slow"] = parameter.detach().clone()


def _wider(net: nn.Module) -> Optimizer:
    """One whose optimizer inside trains a parameter more than it has itself."""
    outer = Posing(AdamW(net.parameters()))
    outer.inside["main"].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    return outer


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "attribute": (lambda net: Momentum(net.parameters()), "attribute momentum"),
    "state dict": (lambda net: Counting(net.parameters(), momentum=0.5), "'seen' in its state_dict()"),
    "of no parameter": (lambda net: GlobalTensor(net.parameters(), momentum=0.5), "state under 'global'"),
    "copies": (lambda net: Copying(net.parameters()), "train other tensors than its parameters"),
    "wider": (_wider, "train other tensors than its parameters"),
    "lookahead": (lambda net: Lookahead(AdamW(net.parameters())), "its own state for a parameter"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_optimizers_with_state_in_other_places_are_refused(tmp_path: Path, kind: str) -> None:
    make, wanted = REFUSED[kind]
    net = model()
    optimizer = make(net)
    trained(net, optimizer, 2)
    with pytest.raises(TransaxleError) as found:
        save(net, tmp_path / "out", to="dcp", optimizer=optimizer)
    assert found.value.code == "UNSUPPORTED"
    assert wanted in str(found.value)
    assert found.value.hint
    assert not (tmp_path / "out").exists()


def test_a_wrapper_whose_settings_differ_from_the_inner_optimizer_is_refused(tmp_path: Path) -> None:
    net = model()
    outer = Posing(AdamW(net.parameters(), lr=0.5))
    outer.param_groups[0]["lr"] = 0.25
    with pytest.raises(TransaxleError) as found:
        save(net, tmp_path / "out", to="dcp", optimizer=outer)
    assert "lr is 0.25 outside and 0.5 inside" in str(found.value)


class Kinds(Optimizer):
    """Keeps tensors without dims of every type that Python's numbers are stored with, and numbers beside them."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "rates": (0.5, 0.75), "mode": None, "flag": True, "name": "x"})
        self.seen: list[int] = []

    def step(self, closure: Any = None) -> Any:
        self.seen.append(1)
        torch.rand(3)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {"count": torch.tensor(0), "hot": torch.tensor(False), "sum": torch.tensor(0.0).double()}
                    state |= {"steps": 0, "mean": 0.0, "on": False, "wide": torch.tensor(0, dtype=torch.int32)}
                state["count"] += 1
                state["steps"] += 1
                state["hot"].fill_(True)
                state["sum"] += 0.1
                state["mean"] += 0.5
                state["on"] = True
                parameter.sub_(group["lr"] * state["sum"].float())


class Fragile(Kinds):
    """Frees something when it goes: it has no twin."""

    def __del__(self) -> None:
        self.seen.clear()


@pytest.mark.parametrize("started", [False, True])
def test_numbers_tensors_and_settings_keep_their_types(tmp_path: Path, started: bool) -> None:
    net = model()
    optimizer = Kinds(net.parameters())
    with torch.no_grad():
        optimizer.step()
        optimizer.step()
    save(net, tmp_path / "out", to="safetensors", optimizer=optimizer)
    other = model(5)
    fresh = Kinds(other.parameters())
    if started:
        with torch.no_grad():
            fresh.step()
    fresh.param_groups[0].update(lr=9.0, rates=(1, 2), mode=4, flag=False, name="y")
    before = torch.get_rng_state()
    load(other, tmp_path / "out", optimizer=fresh)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(fresh.seen) == started  # its twin made the step
    assert equal(_told(optimizer), _told(fresh))


@pytest.mark.parametrize(("kinds", "strict"), [(("SGD", "AdamW"), True), (("AdamW", "SGD"), False)])
def test_state_of_another_optimizer_class_is_refused(tmp_path: Path, kinds: Any, strict: bool) -> None:
    """A new optimizer has nothing to compare it with, but makes other state in its first step."""

    def made(kind: str, net: nn.Module) -> Any:
        more: Any = {"momentum": 0.9} if kind == "SGD" else {}
        return getattr(torch.optim, kind)(net.parameters(), lr=0.01, **more)

    net, other = model(), model(5)
    optimizer, fresh = made(kinds[0], net), made(kinds[1], other)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save(net, tmp_path / "out", to="safetensors", optimizer=optimizer)
    with pytest.raises(TransaxleError, match=f"{kinds[1]} needs .* but the source has ") as found:
        load(other, tmp_path / "out", optimizer=fresh, strict=strict)
    assert found.value.code == "UNSUPPORTED"
    assert not fresh.state
    assert all(torch.equal(value, model(5).state_dict()[name]) for name, value in other.state_dict().items())


def test_without_a_twin_dtypes_decide_which_values_are_numbers(tmp_path: Path) -> None:
    net = model()
    optimizer = Fragile(net.parameters())
    with torch.no_grad():
        optimizer.step()
    save(net, tmp_path / "out", to="dcp", optimizer=optimizer)
    fresh = Fragile(net.parameters())
    load(net, tmp_path / "out", optimizer=fresh)
    state = fresh.state[next(net.parameters())]
    assert (state["steps"], state["mean"], state["on"]) == (1, 0.5, True)
    assert (state["count"], state["wide"].dtype) == (1, torch.int32)


# Parameter groups and optimizer state, by name: settings follow the parameters, and keep their types.


def adamw(net: nn.Module, **more: Any) -> torch.optim.AdamW:
    named = dict(net.named_parameters())
    weights = [p for n, p in named.items() if n.endswith("weight")]
    biases = [p for n, p in named.items() if n.endswith("bias")]
    return torch.optim.AdamW([{"params": weights, "weight_decay": 0.3}, {"params": biases, "lr": 0.07}], lr=0.5, **more)


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_settings_follow_their_parameters_into_other_groups(tmp_path: Path, to: str) -> None:
    net = model()
    optimizer = adamw(net, betas=(0.8, 0.95))
    trained(net, optimizer, 1)
    save(net, tmp_path / "out", to=to, optimizer=optimizer)
    other = model()
    named = dict(other.named_parameters())
    # Another order and other groups: those with the same settings in the source may be cut further.
    groups = (("2.bias",), ("1.weight", "0.weight", "2.weight"), ("1.bias", "0.bias"))
    fresh = torch.optim.AdamW([{"params": [named[name] for name in group]} for group in groups])
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


def test_a_group_whose_parameters_had_different_settings_is_refused(tmp_path: Path) -> None:
    net = model()
    optimizer = adamw(net)
    trained(net, optimizer, 1)
    save(net, tmp_path / "out", to="safetensors", optimizer=optimizer)
    other = model()
    before = {n: p.detach().clone() for n, p in other.named_parameters()}
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    with refused("UNSUPPORTED", "weight_decay: 0.3 and 0.01"):
        load(other, tmp_path / "out", optimizer=torch.optim.AdamW(other.parameters()))
    assert all(torch.equal(p, before[n] + 1) for n, p in other.named_parameters())


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


def test_groups_that_share_a_tensor_setting_get_separate_values(tmp_path: Path) -> None:
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
def test_a_schedule_is_refused_if_the_groups_changed_their_order(tmp_path: Path, kind: str) -> None:
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
    trained(net, optimizer, 1)
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


def test_a_setting_that_is_not_plain_data_is_refused(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    optimizer.param_groups[0]["hook"] = print
    optimizer.state[next(net.parameters())]["history"] = [torch.ones(2)]
    with refused("UNSUPPORTED"):
        save(net, tmp_path / "out", to="safetensors", optimizer=optimizer)
    assert not (tmp_path / "out").exists()
