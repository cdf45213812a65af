"""Twin: what state an optimizer makes of its own, found by a step of another one like it.

A new optimizer has no state, and a checkpoint does not say whether a value without dims was a Python number or a
tensor: formats have tensors only. The optimizer knows: its twin, with its settings, makes one step on small parameters
of zeros with gradients of zero. Nothing of the optimizer itself is touched.
"""

from __future__ import annotations

import types
import warnings
from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from transaxle.formats.pickled.descriptors import NOTHING
from transaxle.formats.training_state.state_groups import GROUPS, NAMES, PARAMS, plain
from transaxle.quant.modules.masters import MasterWeights

_STATE, _DEFAULTS, _STEP, _RATE = "state", "defaults", "step", "lr"
_HOOKS = "_optimizer_"
_OFF = ("foreach", "fused", "capturable")
"""Settings of which the kinds of state do not depend, and which need a GPU or a kernel."""
_SIZE = 2
"""Of each dim of a twin's parameter."""


class Twins:
    """Twins of the optimizers of one load; each makes its step once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, int, torch.dtype], Mapping[str, Any]] = {}
        self._numbers: dict[int, dict[int, int]] = {}
        """By identity: optimizer -> its parameters -> number of the group."""

    def state(
        self, optimizer: Optimizer, parameter: torch.Tensor, settings: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        """Return state of the kind that an optimizer makes for a parameter; empty where no twin can be made.

        Args:
            optimizer: the optimizer.
            parameter: one of its own.
            settings: those that its group will have, where they are other ones than now.
        """
        groups = optimizer.param_groups
        if id(optimizer) not in self._numbers:
            self._numbers[id(optimizer)] = {id(each): n for n, group in enumerate(groups) for each in group[PARAMS]}
        number = self._numbers[id(optimizer)][id(parameter)]
        key = id(optimizer), number, parameter.dim(), parameter.dtype
        if key not in self._made:
            inner = optimizer.optimizer if isinstance(optimizer, MasterWeights) else optimizer
            self._made[key] = _state(inner, {**groups[number], **(settings or {})}, parameter.dim(), parameter.dtype)
        return self._made[key]


def _state(optimizer: Optimizer, group: Mapping[str, Any], dims: int, dtype: torch.dtype) -> Mapping[str, Any]:
    kept = _attributes(optimizer)
    if kept is None:
        return {}
    step = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.no_grad():
        warnings.simplefilter("ignore")
        for sparse in (False, True):
            parameter = nn.Parameter(torch.zeros((_SIZE,) * dims, dtype=dtype))
            zeros = torch.zeros_like(parameter)
            try:
                parameter.grad = zeros.to_sparse() if sparse else zeros
                twin = _twin(optimizer, kept, _settings(group), parameter)
                step(twin)
                return dict(twin.state[parameter])
            except Exception:  # noqa: BLE001 - of an optimizer that cannot make this step nothing is learned
                continue
    return {}


def _twin(
    optimizer: Optimizer, kept: Mapping[str, Any], settings: dict[str, Any], parameter: nn.Parameter
) -> Optimizer:
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(deepcopy(dict(kept)))
    groups = [{**settings, PARAMS: [parameter]}]
    Optimizer.__setstate__(twin, {_DEFAULTS: dict(settings), _STATE: defaultdict(dict), GROUPS: groups})
    return twin


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of a group's settings, with which a step changes nothing and needs no device."""
    settings = {
        key: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key not in (PARAMS, NAMES)
    }
    rate = settings.get(_RATE)
    if rate is not None:
        settings[_RATE] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    return {key: False if key in _OFF else value for key, value in settings.items()}


def _attributes(optimizer: Optimizer) -> dict[str, Any] | None:
    """Return what a twin needs beside groups and state; None where it could reach into what is not its own."""
    if hasattr(type(optimizer), "__del__"):
        return None
    attributes = {}
    for name, value in vars(optimizer).items():
        if name in (_STATE, GROUPS, _DEFAULTS, _STEP) or name.startswith(_HOOKS):
            continue
        if plain(value) is NOTHING and not isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            return None
        attributes[name] = value
    return attributes
