"""Every optimizer that torch and its relatives ship: saved after some steps, loaded into a new one, and stepped again.

Each class that a package defines is in a table, found by reading the package's source: a new one makes the sweep fail
until somebody says what is to become of it. State is compared entry by entry (type, kind, value), settings one by one,
and the next step has to give the same bits.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from transaxle.errors import TransaxleError
from transaxle.live.load import load
from transaxle.live.optimizers import apart
from transaxle.live.save import save

STEPS = 3
ROOTS = {Optimizer.__name__, *torch.optim.__all__}
"""Names of torch's own classes, from which others are derived."""


class Bag(nn.Module):
    """Parameters of several dims; the large ones are those that torchao quantizes the state of."""

    def __init__(self, dtype: torch.dtype, seed: int, dims: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        shapes = [(), (7,), (6, 4), (4, 6), (80, 64), (3, 2, 5)]
        for shape in shapes:
            if len(shape) in dims:
                values = torch.randn(shape).to(dtype)
                self.register_parameter("w" + "x".join(map(str, shape)), nn.Parameter(values))


@dataclass(frozen=True)
class Kind:
    """One way to make an optimizer."""

    make: Callable[[list[nn.Parameter]], Any]
    """Given a model's parameters."""
    dims: tuple[int, ...] = (0, 1, 2, 3)
    """Of the parameters that it takes."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.bfloat16)
    """That it takes."""
    sparse: bool = False
    """Whether it takes sparse gradients only."""
    closure: bool = False
    """Whether it asks for the loss anew."""
    refused: str = ""
    """Part of what a refused save says."""


def of(module: str, name: str, **said: Any) -> Callable[[list[nn.Parameter]], Any]:
    """An optimizer by the name of its class; its module is imported when it is made."""

    def make(parameters: list[nn.Parameter]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(importlib.import_module(module), name)(parameters, **said)

    return make


def torchs(name: str, **said: Any) -> Callable[[list[nn.Parameter]], Any]:
    return of("torch.optim", name, **{"lr": 0.01, **said})


TORCH: dict[str, Kind] = {
    "ASGD": Kind(torchs("ASGD", t0=1.0)),
    "Adadelta": Kind(torchs("Adadelta")),
    "Adafactor": Kind(torchs("Adafactor")),
    "Adagrad": Kind(torchs("Adagrad", lr_decay=0.1)),
    "Adam": Kind(torchs("Adam", amsgrad=True)),
    "AdamW": Kind(torchs("AdamW")),
    "AdamW capturable": Kind(torchs("AdamW", lr=torch.tensor(0.01), foreach=False)),
    "AdamW fused": Kind(torchs("AdamW", fused=True)),
    "Adamax": Kind(torchs("Adamax")),
    "LBFGS": Kind(torchs("LBFGS", max_iter=3), closure=True, refused="neither a tensor nor a number"),
    "Muon": Kind(torchs("Muon"), dims=(2,)),
    "NAdam": Kind(torchs("NAdam", decoupled_weight_decay=True)),
    "RAdam": Kind(torchs("RAdam")),
    "RMSprop": Kind(torchs("RMSprop", momentum=0.5, centered=True)),
    "Rprop": Kind(torchs("Rprop")),
    "SGD": Kind(torchs("SGD")),
    "SGD momentum": Kind(torchs("SGD", momentum=0.9, nesterov=True)),
    "SparseAdam": Kind(torchs("SparseAdam"), dims=(1, 2, 3), dtypes=(torch.float32, torch.float64), sparse=True),
}
"""torch's, by class; another way to make it stands behind the name."""


def gradients(model: nn.Module, seed: int, *, sparse: bool) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        values = torch.randn(parameter.shape).to(parameter.dtype)
        parameter.grad = values.to_sparse() if sparse else values


def step(kind: Kind, model: nn.Module, optimizer: Any, seed: int) -> None:
    def closure() -> Any:
        loss = sum((p.float() - 0.5).square().sum() for p in model.parameters())
        model.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        return loss

    if kind.closure:
        optimizer.step(closure)
    else:
        gradients(model, seed, sparse=kind.sparse)
        optimizer.step()


def told(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield everything an optimizer keeps."""
    names = {id(p): n for n, p in model.named_parameters()}
    for member, one in enumerate(apart(optimizer).members):
        for number, group in enumerate(one.param_groups):
            for key, value in group.items():
                if key not in ("params", "param_names"):
                    yield f"{member}/{number}/{key}", value
            for parameter in group["params"]:
                for key, value in one.state.get(parameter, {}).items():
                    yield f"{names[id(parameter)]}/{key}", value


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        one, other = (each.dequantize() if hasattr(each, "codes") else each for each in (one, other))
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    return bool(one == other)


def check(kind: Kind, dtype: torch.dtype, folder: Path, to: str) -> None:
    """Save, load into another model and optimizer, compare, and go on with both."""
    model = Bag(dtype, 1, kind.dims)
    optimizer = kind.make(list(model.parameters()))
    for number in range(STEPS):
        step(kind, model, optimizer, number)
    for one in apart(optimizer).members:
        for group in one.param_groups:
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                rate.mul_(0.5)
            elif rate is not None:
                group["lr"] = rate * 0.5
    if kind.refused:
        with pytest.raises(TransaxleError, match=kind.refused):
            save(model, folder, to=to, optimizer=optimizer)
        return
    save(model, folder, to=to, optimizer=optimizer)
    other = Bag(dtype, 2, kind.dims)
    fresh = kind.make(list(other.parameters()))
    load(other, folder, optimizer=fresh)
    wanted, found = dict(told(model, optimizer)), dict(told(other, fresh))
    assert wanted.keys() == found.keys()
    unlike = [f"{name}: {wanted[name]!r}, {found[name]!r}" for name in wanted if not same(wanted[name], found[name])]
    assert not unlike, "\n".join(unlike)
    for number in range(2):
        for each, its in ((model, optimizer), (other, fresh)):
            step(kind, each, its, 10 + number)
        for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b), name


CASES = [
    pytest.param(kind, dtype, id=f"{name} {str(dtype).rpartition('.')[2]}")
    for name, kind in TORCH.items()
    for dtype in kind.dtypes
]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_torchs_optimizers_go_on_as_if_nothing_had_been(tmp_path: Path, kind: Kind, dtype: torch.dtype) -> None:
    check(kind, dtype, tmp_path / "out", "dcp")


def test_torch_ships_no_optimizer_that_is_in_no_table() -> None:
    shipped = {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type)}
    shipped = {name for name in shipped if issubclass(getattr(torch.optim, name), Optimizer)} - {"Optimizer"}
    assert shipped == {name.partition(" ")[0] for name in TORCH}
