"""Parameter groups of a live optimizer: their settings are kept by the names of the parameters, never by position.

What a run computes with (`foreach`, `fused`, `capturable`, `differentiable`) is its own affair and stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.catalog import numpy_dtype
from transaxle.formats.pickled.descriptors import NOTHING
from transaxle.formats.training_state.state_groups import NAMES, PARAMS, ParamGroup, plain, settings_of
from transaxle.live.training.optimizers import Optimizers, inside
from transaxle.live.transport.world import World
from transaxle.torch_tensors.torch_arguments import code_of

_OWN = frozenset({"foreach", "fused", "capturable", "differentiable"})
_HINT = "Build the optimizer with the groups that the source has."
_IN_ORDER = "Build the optimizer with its groups in the order that they had at the save."
_FIRST_RATE, _BASE_RATES, _SCHEDULES = "initial_lr", "base_lrs", "_schedulers"
"""Setting of a group that a schedule of torch begins with; where its state has them, and other schedules."""
_UNTIE = "Build the model without the tie."


def groups_of(optimizers: Optimizers, named: Mapping[str, torch.Tensor]) -> list[ParamGroup]:
    """Return this rank's groups, as containers keep them; those of several optimizers one after the other.

    Args:
        optimizers: as taken apart.
        named: their parameters by name.

    Raises:
        Refused: UNSUPPORTED for settings that are no plain data, and where a wrapper has others than what it wraps.
    """
    names = {id(parameter): name for name, parameter in reversed(list(named.items()))}
    found: list[ParamGroup] = []
    problems = []
    for number, group in enumerate(optimizers.groups()):
        said = {}
        for key, value in group.items():
            if key in (PARAMS, NAMES):
                continue
            said[key] = plain(_scalar(value))
            if said[key] is NOTHING:
                message = f"its setting {key} is a {type(value).__name__}, which a checkpoint cannot store"
                problems.append(Refusal("UNSUPPORTED", message, Where(None, f"optimizer group {number}")))
        found.append({**said, PARAMS: [names[id(parameter)] for parameter in group[PARAMS]]})
    if problems:
        raise gathered(problems)
    return found


def all_groups(mine: Sequence[ParamGroup], world: World) -> list[ParamGroup]:
    """Return the groups of all ranks together: of pipeline stages, each has some of the parameters; collective.

    Raises:
        Refused: UNEQUAL_COPIES where ranks train one parameter with different settings.
    """
    found: dict[tuple[int, str], ParamGroup] = {}
    held: dict[str, str] = {}
    problems = []
    for rank, groups in zip(world.ranks, world.gather(mine), strict=True):
        for number, group in enumerate(groups):
            said = settings_of(group)
            key = number, repr(sorted(said.items()))
            first = found.setdefault(key, {**said, PARAMS: []})
            for name in group[PARAMS]:
                if held.setdefault(name, key[1]) != key[1]:
                    message = f"rank {rank} trains it with {key[1]}, but another rank with {held[name]}"
                    problems.append(Refusal("UNEQUAL_COPIES", message, Where(None, name)))
                elif name not in first[PARAMS]:
                    first[PARAMS].append(name)
    if problems:
        raise gathered(problems)
    return list(found.values())


def unlike_tied(others: Mapping[str, str], stored: Iterable[ParamGroup]) -> list[Refusal]:
    """Return UNSUPPORTED for each tied parameter whose names a source trains with different settings.

    Args:
        others: further names of parameters, with those that the optimizers have.
        stored: the source's groups by the model's names.
    """
    of = {name: settings_of(group) for group in stored for name in group[PARAMS]}
    pairs = [((first, of[first]), (name, of[name])) for name, first in others.items() if name in of and first in of]
    return [
        Refusal("UNSUPPORTED", f"{_told_apart(one, two)}, but here they are one tensor", Where(None, two[0]), _UNTIE)
        for one, two in pairs
        if repr(sorted(one[1].items())) != repr(sorted(two[1].items()))
    ]


def settings_for(
    optimizers: Optimizers, named: Mapping[str, torch.Tensor], stored: Iterable[ParamGroup]
) -> tuple[list[Mapping[str, Any]], list[Refusal]]:
    """Find the settings of the optimizers' groups in those of a source.

    Args:
        optimizers: as taken apart.
        named: their parameters by name.
        stored: the source's groups by the model's names.

    Returns:
        For each group (`Optimizers.held`) what is restored, empty where the source says nothing; and UNSUPPORTED for
        each group whose parameters were trained with different settings.
    """
    of = {name: settings_of(group) for group in stored for name in group[PARAMS]}
    names = {id(parameter): name for name, parameter in reversed(list(named.items()))}
    found: list[Mapping[str, Any]] = []
    problems = []
    inside = sum(len(one.param_groups) for one in optimizers.members)
    for number, group in enumerate(optimizers.held()):
        mine = [names[id(parameter)] for parameter in group[PARAMS] if names[id(parameter)] in of]
        taken = {name: of[name] if number < inside else _both(of[name], group) for name in mine}
        found.append(taken[mine[0]] if mine else {})
        other = next((name for name in mine if repr(taken[name]) != repr(found[-1])), None)
        if other is not None:
            said = _told_apart((mine[0], found[-1]), (other, taken[other]))
            where = Where(None, f"optimizer group {number}")
            problems.append(Refusal("UNSUPPORTED", f"{said}, but here they are one group", where, _HINT))
    return found, problems


def _told_apart(first: tuple[str, ParamGroup], second: tuple[str, ParamGroup]) -> str:
    """Return in words what a source trains two parameters with; each is given by name and settings."""
    (name, one), (other, two) = first, second
    unlike = [key for key in {**one, **two} if repr(one.get(key)) != repr(two.get(key))]
    said = "; ".join(f"{key}: {one.get(key)!r} and {two.get(key)!r}" for key in unlike)
    return f"the source trains {name} and {other} with different settings ({said})"


def misordered(
    optimizers: Optimizers, settings: Sequence[Mapping[str, Any]], schedules: Mapping[str, tuple[object, Any]]
) -> list[Refusal]:
    """Return UNSUPPORTED for each schedule whose learning rates would go to other groups than they belong to.

    A schedule keeps them in the order of the groups; the groups' own settings follow the names of the parameters.

    Args:
        optimizers: as taken apart.
        settings: what their groups are given, see `settings_for`.
        schedules: name -> (schedule, the state that it is given); what else there is passes.
    """
    rates, problems, begin = [_number(said.get(_FIRST_RATE)) for said in settings], [], 0
    for one in optimizers.members:
        mine, begin = rates[begin : begin + len(one.param_groups)], begin + len(one.param_groups)
        for name, (schedule, state) in schedules.items():
            if one not in _scheduled(schedule) or not all(isinstance(each, int | float) for each in mine):
                continue
            other = next((each for each in _base_rates(state) if each != mine and sorted(each) == sorted(mine)), None)
            if other is not None:
                message = f"the groups have the initial learning rates {mine}, but their schedule has {other}"
                problems.append(Refusal("UNSUPPORTED", message, Where(None, name), _IN_ORDER))
    return problems


def _scheduled(schedule: object) -> tuple[Optimizer, ...]:
    """Return the torch optimizers whose rates a schedule sets, through whatever is around it and them (accelerate)."""
    inner = getattr(schedule, "scheduler", schedule)
    optimizer = getattr(inner, "optimizer", None)
    return () if optimizer is None else inside(optimizer)


def _base_rates(state: Any) -> Iterator[list[float]]:
    """Yield the initial learning rates of a schedule's state, and of the schedules in it."""
    if isinstance(state, Mapping):
        rates, inner = state.get(_BASE_RATES), state.get(_SCHEDULES)
        if isinstance(rates, list) and all(isinstance(rate, int | float | torch.Tensor) for rate in rates):
            yield [float(rate) for rate in rates]
        for each in inner if isinstance(inner, list) else ():
            yield from _base_rates(each)


def restore(optimizers: Optimizers, found: Sequence[Mapping[str, Any]]) -> None:
    """Give the optimizers' groups the settings that were found for them.

    A tensor setting stays the same tensor; but one that several groups share (the learning rate that an optimizer was
    made with) becomes several where they are to have different values.
    """
    groups = list(zip(optimizers.held(), found, strict=True))
    values = [
        (group, key, held, _number(settings.get(key, held.item())))
        for group, settings in groups
        for key, held in group.items()
        if isinstance(held, torch.Tensor) and not held.dim()
    ]
    wanted: dict[int, set[Any]] = {}
    for _, _, held, value in values:
        wanted.setdefault(id(held), set()).add(value)
    own: dict[tuple[int, Any], torch.Tensor] = {}
    for group, key, held, value in values:
        if len(wanted[id(held)]) > 1:
            group[key] = own.setdefault((id(held), value), held.detach().clone())
    for group, settings in groups:
        for key, value in settings.items():
            if key in _OWN and key in group:
                continue
            current = group.get(key)
            if isinstance(current, torch.Tensor) and isinstance(value, int | float | np.generic):
                with torch.no_grad():
                    current.fill_(_number(value))
            else:
                group[key] = _number(value)


def _number(value: Any) -> Any:
    """Return a scalar of numpy as a Python number, and anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def _both(settings: ParamGroup, shown: ParamGroup) -> dict[str, Any]:
    """Return the settings that a wrapper shows too: a container of many kinds has few in common, or none."""
    return {key: value for key, value in settings.items() if key in shown}


def _scalar(value: Any) -> Any:
    """Return a tensor without dims as a numpy scalar, so that it keeps its type."""
    if not isinstance(value, torch.Tensor) or value.dim():
        return value
    octets = value.detach().cpu().reshape(1).view(torch.uint8).numpy()
    return octets.view(numpy_dtype(code_of(value.dtype)))[0]
