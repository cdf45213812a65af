"""Every optimizer that torch and its relatives ship: saved after some steps, loaded into a new one, and stepped again.

Each class that a package defines is in a table, found by reading the package's source: a new one makes the sweep fail
until somebody says what is to become of it. State is compared entry by entry (type, kind, value), settings one by one,
and the next step has to give the same bits.
"""

from __future__ import annotations

import ast
import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from transaxle.errors import TransaxleError
from transaxle.live.load import load
from transaxle.live.optimizers import unwrap_optimizers
from transaxle.live.save import save

STEPS = 3


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

    make: Callable[[nn.Module], Any]
    """Given the model."""
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


def imported(module: str, name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(module), name)


def of(module: str, name: str, **said: Any) -> Callable[[nn.Module], Any]:
    """An optimizer by the name of its class; its module is imported when it is made."""
    return lambda model: imported(module, name)(list(model.parameters()), **said)


def torchs(name: str, **said: Any) -> Callable[[nn.Module], Any]:
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


F32 = (torch.float32,)
TITAN = "torchtitan.components.optimizer.optimizer"
AO, ADAFACTOR = "torchao.optim.adam", "transformers.optimization"
MUON = "deepspeed.runtime.zero.muon.original_muon"


def titan(model: nn.Module) -> Any:
    groups = [
        imported(TITAN, "ParamGroupConfig")(pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": rate})
        for pattern, name, rate in (("w6", "Adam", 0.02), (".", "AdamW", 0.01))
    ]
    container = imported(TITAN, "OptimizersContainer")
    return container(container.Config(param_groups=groups, implementation="for-loop"), model_parts=[model])


def with_aux_adam(model: nn.Module) -> Any:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    muon = {"use_muon": True, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "ns_method": "standard"}
    adam = {"use_muon": False, "lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.1}
    return imported(MUON, "SingleDeviceMuonWithAuxAdam")([{"params": matrices, **muon}, {"params": rest, **adam}])


def accelerated(model: nn.Module) -> Any:
    imported("accelerate", "Accelerator")(cpu=True)
    return imported("accelerate.optimizer", "AcceleratedOptimizer")(torch.optim.AdamW(model.parameters(), lr=0.01))


def layer_wise(model: nn.Module) -> Any:
    each = {parameter: torch.optim.AdamW([parameter]) for parameter in model.parameters()}
    return imported("transformers.trainer_pt_utils", "LayerWiseDummyOptimizer")(optimizer_dict=each)


def sharded(model: nn.Module) -> Any:
    shards = imported("torch.distributed._shard.sharded_optim.api", "ShardedOptimizer")
    return shards(dict(model.named_parameters()), torch.optim.AdamW, lr=0.01)


def named(model: nn.Module) -> Any:
    named = imported("torch.distributed.optim.named_optimizer", "_NamedOptimizer")
    return named(dict(model.named_parameters()), torch.optim.AdamW, lr=0.01)


PEERS: dict[str, Kind] = {
    "transformers Adafactor": Kind(of(ADAFACTOR, "Adafactor", lr=0.01, relative_step=False, beta1=0.9)),
    "transformers Adafactor relative": Kind(of(ADAFACTOR, "Adafactor")),
    "transformers LayerWiseDummyOptimizer": Kind(layer_wise, refused="train other tensors than its parameters"),
    **{
        f"torchao {name}": Kind(of(AO, name), dtypes=F32, refused="codes with scales")
        for name in ("Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8")
    },
    "torchao _AdamW": Kind(of(AO, "_AdamW"), dtypes=F32),
    "deepspeed SingleDeviceMuon": Kind(of(MUON, "SingleDeviceMuon", ns_method="standard"), dims=(2,), dtypes=F32),
    "deepspeed SingleDeviceMuonWithAuxAdam": Kind(with_aux_adam, dtypes=F32),
    "accelerate AcceleratedOptimizer": Kind(accelerated),
    "torchtitan OptimizersContainer": Kind(titan),
    "torch ShardedOptimizer": Kind(sharded, refused="NotImplementedError"),
    "torch _NamedOptimizer": Kind(named),
}
"""Those of other packages, and torch's distributed ones."""
_CUDA = "its kernel is for CUDA devices"
_ENGINE = "made by deepspeed.initialize, of flat buffers; see `test_optimizers_with_state_in_other_places_are_refused`"
_ZENFLOW = "part of an engine that offloads from a CUDA device"
_BUILT = "its kernel is compiled when it is made"
ELSEWHERE: dict[str, str] = {
    "torch ZeroRedundancyOptimizer": "see `test_zero_redundancy_optimizer_resumes_at_another_world_size`",
    "torch PostLocalSGDOptimizer": "keeps an averager beside the optimizer: refused",
    "torchtitan DistMuon": "takes parameters on CUDA devices alone",
    "torchtitan TorchFTOptimizersContainer": "torchft is not installed; it is an OptimizersContainer",
    "torchao _AdamBase": "a base",
    "torchao CPUOffloadOptimizer": "asks for an accelerator when it is made",
    "torchao QuantOptimizer": "a prototype around another optimizer: refused for 'qat_state' in its state_dict()",
    "torchao PruneOptimizer": "a prototype around another optimizer",
    "accelerate DeepSpeedOptimizerWrapper": _ENGINE,
    "accelerate MegatronLMOptimizerWrapper": "made by Megatron-LM, which is not installed",
    "deepspeed Muon": "gathers over CUDA devices; its state is that of SingleDeviceMuon",
    "deepspeed MuonWithAuxAdam": "gathers over CUDA devices; its state is that of SingleDeviceMuonWithAuxAdam",
    "deepspeed FusedAdam": _CUDA,
    "deepspeed FusedLamb": _CUDA,
    "deepspeed FusedLion": _CUDA,
    "deepspeed ZenFlowSelectiveAdamW": _ZENFLOW,
    "deepspeed ZenFlowSelectiveAdamW_stage3": _ZENFLOW,
    "deepspeed ZenFlowCPUAdam": _ZENFLOW,
    **{f"deepspeed {name}": _BUILT for name in ("DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion")},
    **{
        f"deepspeed {name}": _ENGINE
        for name in (
            "ZeROOptimizer", "BF16_Optimizer", "FP16_Optimizer", "FP16_UnfusedOptimizer", "DeepSpeedZeroOptimizer",
            "DeepSpeedZeroOptimizer_Stage3", "SuperOffloadOptimizer_Stage3", "ZenFlowZeroOptimizer",
            "ZenFlowZeroOptimizerSequential", "ZenFlowZeroOptimizerParallel",
        )
    },
}  # fmt: skip
"""Those that are not swept here, and why."""


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
    names = {id(p): n for n, p in model.named_parameters()}
    for member, one in enumerate(unwrap_optimizers(optimizer).members):
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
    optimizer = kind.make(model)
    for number in range(STEPS):
        step(kind, model, optimizer, number)
    if kind.refused:
        with pytest.raises(TransaxleError, match=kind.refused):
            save(model, folder, to=to, optimizer=optimizer)
        return
    for one in unwrap_optimizers(optimizer).members:
        for group in one.param_groups:
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                rate.mul_(0.5)
            elif rate is not None:
                group["lr"] = rate * 0.5
    save(model, folder, to=to, optimizer=optimizer)
    other = Bag(dtype, 2, kind.dims)
    fresh = kind.make(other)
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


def test_every_optimizer_of_torch_is_in_the_table() -> None:
    shipped = {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name), type)}
    shipped = {name for name in shipped if issubclass(getattr(torch.optim, name), Optimizer)} - {"Optimizer"}
    assert shipped == {name.partition(" ")[0] for name in TORCH}


BASES = {"Optimizer", "ZeROOptimizer", "DeepSpeedOptimizer", *(name.partition(" ")[0] for name in TORCH)}
"""Names of classes from which optimizers are derived."""


def shipped(package: str) -> set[str]:
    """Names of the classes in a package's source that are derived from optimizers, tests left out."""
    found_at = find_spec(package)
    assert found_at is not None
    assert found_at.submodule_search_locations
    derived: dict[str, set[str]] = {}
    for folder in found_at.submodule_search_locations:
        for path in Path(folder).rglob("*.py"):
            text = path.read_text(errors="replace")
            if "testing" in path.parts or not any(base in text for base in BASES):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
                    names = {getattr(each, "attr", getattr(each, "id", "")) for each in bases}
                    derived.setdefault(node.name, set()).update(names)
    found: set[str] = set()
    while more := {name for name, bases in derived.items() if bases & (BASES | found)} - found:
        found |= more
    return {f"{package} {name}" for name in found}


@pytest.mark.oracle
@pytest.mark.parametrize("package", ["torch", "torchtitan", "transformers", "deepspeed", "torchao", "accelerate"])
def test_every_optimizer_of_other_packages_is_in_a_table(package: str) -> None:
    mine = {f"torch {name}" for name in TORCH} | {*PEERS, *ELSEWHERE}
    known = {" ".join(name.split(" ")[:2]) for name in mine if name.startswith(f"{package} ")}
    assert shipped(package) == known


@pytest.mark.oracle
@pytest.mark.parametrize("to", ["dcp", "safetensors", "torch"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, id=f"{name} {dtype}")
        for name, kind in {**TORCH, **PEERS}.items()
        for dtype in kind.dtypes
    ],
)
def test_every_optimizer_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, dtype: torch.dtype, to: str
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # torchao's steps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(kind, dtype, tmp_path / "out", to)
