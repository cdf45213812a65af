"""The sweep: modules and wrappers of the peers, each loaded from a checkpoint of other values, every tensor compared.

What is compared comes from `named_parameters` and `named_buffers`, never from the state dict through which it went.
The outcome is `EXACT`, or the code of a refusal that has left the module as it was; anything else is an error.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel

from transaxle.errors import TransaxleError
from transaxle.live.load import load
from transaxle.live.reshard import reshard
from transaxle.live.save import save
from transaxle.torch_tensors import local_of

EXACT = "exact"
Make = Callable[[], nn.Module]
"""Builds a module, small, of any values."""


def outcome(make: Make) -> str:
    """Load one module with the values of another; return `EXACT`, or the code of the refusal."""
    given, taken, other = (_scrambled(make(), seed) for seed in range(3))
    before, found = tensors(taken), ""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "saved")
        try:
            save(given, target, to="safetensors")
            load(taken, target)
            reshard(given, other)
        except TransaxleError as error:
            found = error.code
    if found:
        assert any(_same(tensors(taken), each) for each in (before, tensors(given))), "half loaded"
        return found
    for each, how in ((taken, "load"), (other, "reshard")):
        unlike = [name for name, tensor in tensors(each).items() if not _equal(tensor, tensors(given)[name])]
        assert not unlike, f"{how} says it is done, and these differ: {unlike}"
    return EXACT


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters and persistent buffers, and of the tensors that modules keep beside them."""
    return {name: tensor.detach().clone() for name, tensor in _all(module)}


def _all(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield name, local_of(parameter)
    for path, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                yield f"{path}.{name}", local_of(buffer)


def _scrambled(module: nn.Module, seed: int) -> nn.Module:
    """Give a module values of its own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, tensor in _all(module):
            if tensor.is_meta:
                continue
            made = torch.randint(1, 50, tuple(tensor.shape), generator=generator)
            noise = torch.rand(tuple(tensor.shape), generator=generator)
            tensor.copy_(made + noise if tensor.is_floating_point() or tensor.is_complex() else made)
    return module


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.is_meta or other.is_meta:
        return one.is_meta and other.is_meta
    return bool(torch.equal(one, other))


def _made(of: Callable[[nn.Module], object], layer: Make = lambda: nn.Linear(3, 3)) -> Make:
    """Return what builds a layer to which something is done in place."""

    def make() -> nn.Module:
        module = layer()
        of(module)
        return module

    return make


class Symmetric(nn.Module):
    """A parametrization: a symmetric matrix of its upper half."""

    def forward(self, half: torch.Tensor) -> torch.Tensor:
        return half.triu() + half.triu(1).t()

    def right_inverse(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.triu()


def _shared() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Linear(3, 3), layer)


_FIRST = torch.zeros(2, 4)
WRAPPED: dict[str, Make] = {
    "parametrizations.weight_norm": _made(parametrizations.weight_norm),
    "parametrizations.spectral_norm": _made(parametrizations.spectral_norm),
    "parametrizations.orthogonal": _made(parametrizations.orthogonal),
    "parametrize": _made(lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric())),
    "spectral_norm": _made(nn.utils.spectral_norm),
    "prune": _made(lambda layer: cast(Any, prune).random_unstructured(layer, "weight", 0.3)),
    "lazy, run once": _made(lambda layer: layer(_FIRST), lambda: nn.LazyLinear(3)),
    "lazy norm, run once": _made(lambda layer: layer(_FIRST), nn.LazyBatchNorm1d),
    "checkpoint_wrapper": lambda: nn.Sequential(checkpoint_wrapper(nn.Linear(2, 3))),
    "offload_wrapper": lambda: offload_wrapper(nn.Linear(2, 3)),
    "compile": lambda: cast(nn.Module, torch.compile(nn.Sequential(nn.Linear(2, 3)))),
    "compile inside": lambda: nn.Sequential(cast(nn.Module, torch.compile(nn.Linear(2, 3)))),
    "AveragedModel": lambda: AveragedModel(nn.BatchNorm1d(3), use_buffers=True),
    "fx": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3))),
    "DataParallel inside": lambda: nn.Sequential(nn.DataParallel(nn.Linear(2, 3))),
    "shared": _shared,
    "channels last": lambda: cast(Any, nn.Conv2d(2, 3, 3)).to(memory_format=torch.channels_last),
    "LSTM": lambda: nn.LSTM(2, 3, 2, proj_size=2),
    "MultiheadAttention": lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True),
    "ParameterDict": lambda: nn.ParameterDict({"one": torch.zeros(2), "other": nn.Parameter(torch.zeros(1))}),
    "ParameterList": lambda: nn.ParameterList([torch.zeros(2), torch.zeros(())]),
    "InstanceNorm": lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    "bfloat16": lambda: nn.Linear(3, 3).bfloat16(),
    "complex": lambda: nn.Linear(3, 3, dtype=torch.complex64),
}
"""Layers, wrappers and parametrizations that keep or show their values in some way of their own."""
