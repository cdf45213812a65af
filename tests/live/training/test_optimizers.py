"""What is given as `optimizer=`: wrappers, containers and lists are taken apart, and nothing of their state is lost."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from tests.live.ranks import run
from tests.oracles.tiny_models import drawn
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
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


class Slotted:
    """A wrapper that passes on whatever it is asked for."""

    __slots__ = ("_held",)

    def __init__(self, optimizer: Optimizer) -> None:
        self._held = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held, name)


class Posing(Optimizer):
    """A torch optimizer that has the parameters, and an optimizer inside that does the work."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {})
        self.inside = {"main": optimizer}

    def step(self, closure: Any = None) -> Any:
        self.inside["main"].step()


def _titan(net: nn.Module) -> Optimizer:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    groups = [
        ParamGroupConfig(pattern=r"bias$", optimizer_name="Adam", optimizer_kwargs={"lr": 0.03}),
        ParamGroupConfig(pattern=r"^0", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.02}),
        ParamGroupConfig(pattern=r".", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01, "amsgrad": True}),
    ]
    config = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    found: Optimizer = OptimizersContainer(config, model_parts=[net])
    return found


def _accelerated(net: nn.Module) -> Optimizer:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)
    found: Optimizer = AcceleratedOptimizer(AdamW(net.parameters(), lr=0.02))
    return found


def _named(net: nn.Module) -> Any:
    return distributed("_NamedOptimizer")(dict(net.named_parameters()), AdamW, lr=0.02)


def _several(net: nn.Module) -> list[Optimizer]:
    matrices = [p for p in net.parameters() if p.dim() == 2]
    rest = [p for p in net.parameters() if p.dim() != 2]
    groups: list[dict[str, Any]] = [{"params": rest[:1]}, {"params": rest[1:], "lr": 0.5}]
    return [Muon(matrices, lr=0.02), AdamW(groups, lr=0.02)]


def _inner(given: Any) -> list[Optimizer]:
    return list(unwrap_optimizers(given).members)


WRAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "torchtitan": _titan,
    "accelerate": _accelerated,
    "_NamedOptimizer": _named,
    "apex-like": lambda net: Delegating(AdamW(net.parameters(), lr=0.02)),
    "slots": lambda net: Slotted(AdamW(net.parameters(), lr=0.02)),
    "posing": lambda net: Posing(AdamW(net.parameters(), lr=0.02)),
    "twice": lambda net: Delegating(Posing(AdamW(net.parameters(), lr=0.02))),
    "list": _several,
    "tuple": lambda net: tuple(_several(net)),
    "dict": lambda net: dict(zip(("muon", "adamw"), _several(net), strict=True)),
    "nested": lambda net: {"all": [Delegating(each) for each in _several(net)]},
}


def _steps(given: Any) -> Any:
    """Something that steps all of them."""
    if hasattr(given, "step"):
        return given
    several = list(given.values()) if isinstance(given, dict) else list(given)
    return _Together([each for one in several for each in (one if isinstance(one, list) else [one])])


class _Together:
    def __init__(self, several: list[Any]) -> None:
        self._several = several

    def step(self) -> None:
        for each in self._several:
            each.step()


def _told(given: Any) -> list[Any]:
    """State and settings of everything inside, in order."""
    found: list[Any] = []
    for one in _inner(given):
        for group in one.param_groups:
            found.append({k: v for k, v in group.items() if k not in ("params", "param_names")})
            found += [one.state[p] for p in group["params"]]
    return found


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and bool(one == other)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("kind", "background"), [*((kind, False) for kind in WRAPPED), ("torchtitan", True), ("list", True)]
)
def test_training_2_wrapped_optimizers_keep_their_state(tmp_path: Path, kind: str, background: bool) -> None:
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
    assert _equal(_told(optimizer), _told(fresh))
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


@pytest.mark.parametrize("how", ["plain", "buckets"])
def test_training_2_zero_redundancy(tmp_path: Path, how: str) -> None:
    first = run(2, _zero, str(tmp_path / "out"), how, False)
    again = run(2, _zero, str(tmp_path / "out"), how, True)
    alone = run(1, _zero, str(tmp_path / "out"), how, True)
    for rates, tensors in (*first, *again, *alone):
        assert rates == [0.01, 0.25]
        assert all(torch.equal(tensors[name], value) for name, value in first[0][1].items())


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    net = model()
    with pytest.raises(TransaxleError) as found:
        unwrap_optimizers([AdamW(net.parameters()), SGD(net[0].parameters())])
    assert {one.code for one in found.value.refusals} == {"NAME_COLLISION"}
    assert "0 and 1 (AdamW and SGD)" in str(found.value)


def test_parameters_that_no_optimizer_has_are_reported(tmp_path: Path) -> None:
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


class Averager:
    """Averages nothing, and counts."""

    step = 4

    def average_parameters(self, params: Any) -> None:
        self.step += 1


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "attribute": (lambda net: Momentum(net.parameters()), "attribute momentum"),
    "state dict": (lambda net: Counting(net.parameters(), momentum=0.5), "'seen' in its state_dict()"),
    "of no parameter": (lambda net: GlobalTensor(net.parameters(), momentum=0.5), "state under 'global'"),
    "copies": (lambda net: Copying(net.parameters()), "train other tensors than its parameters"),
    "lookahead": (lambda net: Lookahead(AdamW(net.parameters())), "its own state for a parameter"),
    "averager": (
        lambda net: distributed("PostLocalSGDOptimizer")(AdamW(net.parameters()), Averager()),
        "'step' in its state_dict()",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_training_2_what_keeps_state_elsewhere_is_refused(tmp_path: Path, kind: str) -> None:
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


@pytest.mark.parametrize("given", [3, "adamw", [None], nn.Linear(2, 2), torch.optim.AdamW])
def test_what_is_no_optimizer_is_refused(given: Any) -> None:
    with pytest.raises(TransaxleError) as found:
        unwrap_optimizers(given)
    assert found.value.code == "UNSUPPORTED"


def test_a_wrapper_with_other_settings_than_inside_is_refused(tmp_path: Path) -> None:
    net = model()
    outer = Posing(AdamW(net.parameters(), lr=0.5))
    outer.param_groups[0]["lr"] = 0.25
    with pytest.raises(TransaxleError) as found:
        save(net, tmp_path / "out", to="dcp", optimizer=outer)
    assert "lr is 0.25 outside and 0.5 inside" in str(found.value)


def test_a_hint_that_carries_everything(tmp_path: Path) -> None:
    net = model()
    optimizer = Counting(net.parameters(), momentum=0.5)
    trained(net, optimizer)
    save(net, tmp_path / "out", to="dcp", extra={"optimizer": optimizer})
    other = model(5)
    fresh = Counting(other.parameters(), lr=7.0)
    load(other, tmp_path / "out", extra={"optimizer": fresh})
    assert all(
        _equal(optimizer.state[a], fresh.state[b]) for a, b in zip(net.parameters(), other.parameters(), strict=True)
    )
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


class Kinds(Optimizer):
    """Keeps tensors without dims of every type that Python's numbers are stored with, and numbers beside them."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
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


@pytest.mark.parametrize("to", ["safetensors", "dcp", "torch"])
def test_training_8_tensors_without_dims_stay_tensors(tmp_path: Path, to: str) -> None:
    net = model()
    optimizer = Kinds(net.parameters())
    with torch.no_grad():
        optimizer.step()
        optimizer.step()
    save(net, tmp_path / "out", to=to, optimizer=optimizer)
    other = model(5)
    fresh = Kinds(other.parameters(), lr=3.0)
    before = torch.get_rng_state()
    load(other, tmp_path / "out", optimizer=fresh)
    assert torch.equal(torch.get_rng_state(), before)
    assert fresh.seen == []  # its twin made the step
    assert _equal(_told(optimizer), _told(fresh))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_training_8_a_scalar_parameter_of_float64(tmp_path: Path, kind: Any) -> None:
    def made(value: float) -> Any:
        net = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(value, dtype=torch.float64))})
        more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        return net, kind(net.parameters(), lr=0.01, **more)

    def stepped(net: nn.Module, optimizer: Optimizer) -> None:
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 0.3)
        optimizer.step()

    net, optimizer = made(1.0)
    stepped(net, optimizer)
    save(net, tmp_path / "out", to="dcp", optimizer=optimizer)
    other, fresh = made(7.0)
    load(other, tmp_path / "out", optimizer=fresh)
    assert _equal(_told(optimizer), _told(fresh))
    for each, its in ((net, optimizer), (other, fresh)):
        stepped(each, its)
    assert torch.equal(net["scale"], other["scale"])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kinds", [("SGD", "AdamW"), ("AdamW", "SGD")])
def test_the_state_of_another_kind_of_optimizer_is_refused(tmp_path: Path, kinds: Any, strict: bool) -> None:
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


@pytest.mark.peers
def test_factored_states_keep_the_names_of_the_model(tmp_path: Path) -> None:
    """No table says which axes of a parameter its rows and columns are of."""

    def made() -> tuple[nn.Module, Optimizer]:
        net = drawn("llama")
        return net, torch.optim.Adafactor(net.parameters())

    net, optimizer = made()
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(TransaxleError, match="another shape than its parameter") as found:
        save(net, tmp_path / "out", to="hf", optimizer=optimizer)
    assert 'to="dcp"' in found.value.refusals[0].hint
    assert not (tmp_path / "out").exists()
    save(net, tmp_path / "out", to="dcp", optimizer=optimizer)
    other, fresh = made()
    load(other, tmp_path / "out", optimizer=fresh)
    assert _equal(_told(optimizer), _told(fresh))


def test_without_a_twin_numbers_are_known_by_their_types(tmp_path: Path) -> None:
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
