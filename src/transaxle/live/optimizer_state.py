"""Optimizer state by parameter name: `optim/<parameter>/<state>`, the names that every container uses.

Nothing is paired by position. State that an optimizer has not made yet (it makes it in its first step) is made here,
in the shape and placement of its parameter.

A new optimizer has no state, and a checkpoint does not say whether a value without dims was a Python number or a
tensor: formats have tensors only. The optimizer knows: a twin of it, with its settings, makes one step on small
parameters of zeros with gradients of zero. Nothing of the optimizer itself is touched.

Parameter groups of a live optimizer: their settings are kept by the names of the parameters, never by position.

What a run computes with (`foreach`, `fused`, `capturable`, `differentiable`) is its own affair and stays as it is.
"""

from __future__ import annotations

import types
import warnings
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from transaxle.axes.layout.bind import join_slot, split_slot
from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor, stateless
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.formats.catalog import numpy_dtype
from transaxle.formats.pickled.descriptors import NOTHING
from transaxle.formats.registry import STATE_FOLDER
from transaxle.formats.training_state import GROUPS, NAMES, PARAMS, ParamGroup, plain, settings_of
from transaxle.live.derived import unnamed
from transaxle.live.model.destination import NamePair
from transaxle.live.model.state_tensors import Leaves
from transaxle.live.optimizers import CARRY, AnyOptimizer, Optimizers, apart, inside
from transaxle.live.transport.world import World
from transaxle.quant.masters import MASTER, MasterWeights
from transaxle.torch_tensors import code_of, local_of, mark, part_of, torch_dtype, whole_shape

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


_OTHER_KIND = "Build the kind of optimizer that the source was trained with, or omit optimizer= to begin anew."
_ON_DEVICE = ("capturable", "fused")
"""Settings of a group under which its counters live on the parameters' device."""
_TOO_EARLY = (
    "Build the optimizer from this model's parameters, after fully_shard or parallelize_module has replaced them"
)
_NUMBERS: Mapping[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""Python's numbers, and the types of the tensors that stand for them."""
_STATE, _DEFAULTS, _STEP, _RATE = "state", "defaults", "step", "lr"
_HOOKS = "_optimizer_"
_OFF = ("foreach", "fused", "capturable")
"""Settings of which the kinds of state do not depend, and which need a GPU or a kernel."""
_TWIN_SIZE = 2
"""Length of each dim of a twin's parameter."""


class OptimizerLoad:
    """What a load does to optimizers; nothing where none is given.

    Args:
        optimizer: the model's optimizer, or several; None: none.
        own: what the model holds.
        stored: the source's tensors by the model's names.

    Attributes:
        parameters: the optimizers' parameters by name.
        states: tensors for the state that the source has, by name.
        unrestored: names of state that the optimizers have made and the source lacks.
        doubled: names of state that is loaded, each with the name under which the source has it once more, for another
            name of a tied parameter.
        untrained: names of parameters that have gradients and belong to no optimizer.

    Raises:
        TransaxleError: what `by_name`, `rooms_for` and `states_of` raise.
    """

    def __init__(self, optimizer: AnyOptimizer | None, own: Leaves, stored: Mapping[str, StoredTensor]) -> None:
        self._optimizers: Optimizers | None = None
        self.parameters: dict[str, torch.Tensor] = {}
        self.states: dict[str, torch.Tensor] = {}
        self.unrestored: tuple[str, ...] = ()
        self.doubled: tuple[NamePair, ...] = ()
        self.untrained: tuple[str, ...] = ()
        self._other_names: dict[str, str] = {}
        self._settings: list[Mapping[str, Any]] = []
        """What the source has for each parameter group."""
        if optimizer is None:
            return
        self._optimizers, self.parameters = by_name(optimizer, own)
        self.states = rooms_for(self._optimizers, self.parameters, stored)
        self.unrestored = unrestored(self._optimizers, self.parameters, stored)
        self._other_names = other_names(self.parameters, own.parameters)
        self.doubled = tuple(doubled(self._other_names, stored)) if self._other_names else ()
        self.untrained = untrained(self.parameters, own.parameters)

    def __bool__(self) -> bool:
        return self._optimizers is not None

    def match_groups(
        self,
        groups: Sequence[ParamGroup],
        stored: Mapping[str, StoredTensor],
        schedules: Mapping[str, tuple[object, Any]],
    ) -> list[Refusal]:
        """Find the settings that a source has for each parameter group; return why optimizers cannot go on with them.

        Args:
            groups: the source's, by the model's names.
            stored: the source's tensors by the model's names.
            schedules: see `misordered`.
        """
        if self._optimizers is None:
            return []
        self._settings, problems = settings_for(self._optimizers, self.parameters, groups)
        problems += unlike_tied(self._other_names, groups)
        problems += of_another_kind(self._optimizers, self.parameters, self._settings, stored)
        return [*problems, *misordered(self._optimizers, self._settings, schedules)]

    def follow(self, own: Leaves, stored: Mapping[str, StoredTensor]) -> None:
        """Take the parameters of a model that was given memory in place of the former ones, and make their state anew.

        Args:
            own: what the model holds now.
            stored: the source's tensors by the model's names.
        """
        if self._optimizers is None:
            return
        parameters = {name: own.parameters[name] for name in self.parameters}
        follow(self._optimizers, self.parameters, parameters)
        self.parameters, self.states = parameters, rooms_for(self._optimizers, parameters, stored)

    def install(self, weights: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
        """Give the optimizers the settings and the state that were loaded.

        Args:
            weights: quantized parameters by name.
            values: of these, what was quantized here, with the values.
        """
        if self._optimizers is None:
            return
        restore(self._optimizers, self._settings)
        install(self._optimizers, self.parameters, self.states)
        lacking = [name for name in weights if join_slot(name, MASTER) not in self.states]
        for optimizer in self._optimizers.members:
            if isinstance(optimizer, MasterWeights):  # those that the source lacks begin with the loaded values
                begin: dict[torch.Tensor, torch.Tensor | None] = {weights[name]: None for name in lacking}
                begin |= {weights[name]: local_of(values[name]) for name in lacking if name in values}
                optimizer.restart(begin)


def by_name(optimizer: AnyOptimizer, own: Leaves) -> tuple[Optimizers, dict[str, torch.Tensor]]:
    """Take optimizers apart, and return their parameters by the model's names.

    Args:
        optimizer: the model's optimizer, or several.
        own: what the model holds.

    Raises:
        Refused: UNSUPPORTED for parameters that the model's state dict does not show, and for those of a sharded state
            dict; see `names_of`.
    """
    if own.sharded:
        message = "the shards of a Megatron model are no parameters of an optimizer, so its state cannot be matched"
        raise refuse("UNSUPPORTED", message, hint="Leave optimizer= out, and let Megatron save and load its state.")
    optimizers = apart(optimizer)
    if nameless := unnamed((parameter for _, _, parameter in optimizers.parameters()), own.islands, own.tensors):
        raise gathered(nameless)
    return optimizers, names_of(optimizers, own.parameters)


def names_of(optimizers: Optimizers, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the optimizers' parameters by name.

    Args:
        optimizers: as taken apart.
        tensors: the model's tensors by name.

    Raises:
        Refused: UNEXPECTED_TENSOR for a parameter that the model does not have.
    """
    by_identity = {id(tensor): name for name, tensor in reversed(list(tensors.items()))}
    found: dict[str, torch.Tensor] = {}
    problems = []
    for group, number, parameter in optimizers.parameters():
        name = by_identity.get(id(parameter))
        if name is None:
            message = f"parameter {number} of its group {group}, of shape {list(parameter.shape)}, is not in the model"
            problems.append(Refusal("UNEXPECTED_TENSOR", message, Where(None, f"optimizer group {group}"), _TOO_EARLY))
        else:
            found[name] = parameter
    if problems:
        raise gathered(problems)
    return found


def untrained(named: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Return the names of parameters that have gradients, and no optimizer."""
    known = {id(parameter) for parameter in named.values()}
    return tuple(name for name, each in parameters.items() if each.requires_grad and id(each) not in known)


def states_of(optimizers: Optimizers, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the optimizers' state as tensors by name; a Python number becomes a tensor of no dims, None nothing.

    Args:
        optimizers: as taken apart.
        named: their parameters by name, see `names_of`; those that other ranks update have no state here.

    Raises:
        Refused: UNSUPPORTED for state that is neither tensor nor number.
    """
    found, problems = {}, []
    owners = optimizers.owners()
    states = {
        id(each): held
        for one in optimizers.members
        for each, held in (one.states if isinstance(one, MasterWeights) else one.state).items()
    }
    for name, parameter in named.items():
        for key, value in states.get(id(parameter), {}).items() if id(parameter) in owners else ():
            full = join_slot(name, key)
            held = value if isinstance(value, torch.Tensor) else as_tensor(value)
            if isinstance(value, torch.Tensor) and _is_encoded(value):
                problems.append(_encoded(full, value))
            elif held is not None and held.dim() and part_of(parameter) is not None and held.shape != parameter.shape:
                message = (
                    f"it has the shape {list(held.shape)}, but its parameter, {list(parameter.shape)} here, is sharded"
                )
                problems.append(Refusal("UNSUPPORTED", message, Where(None, full)))
            elif held is not None:
                found[full] = mark(held, part_of(parameter)) if held.dim() else held
            elif value is not None:
                message = f"it is a {type(value).__name__}, neither a tensor nor a number"
                problems.append(Refusal("UNSUPPORTED", message, Where(None, full), CARRY))
    if problems:
        raise gathered(problems)
    return found


def unrestored(optimizers: Optimizers, named: Mapping[str, torch.Tensor], stored: Container[str]) -> tuple[str, ...]:
    """Return the names of state that optimizers have made and a source lacks: after a load it would be stale."""
    return tuple(n for n in states_of(optimizers, named) if n not in stored and split_slot(n)[1] != MASTER)


def of_another_kind(
    optimizers: Optimizers,
    named: Mapping[str, torch.Tensor],
    settings: Sequence[Mapping[str, Any]],
    stored: Collection[str],
) -> list[Refusal]:
    """Refuse state that a new optimizer could not go on with: a source has the state of another kind of optimizer.

    Args:
        optimizers: as taken apart.
        named: their parameters by name.
        settings: those that the groups will have, see `settings_for`.
        stored: the source's tensors by the model's names.
    """
    held: dict[str, set[str]] = {}
    for full in stored:
        name, key = split_slot(full)
        if key and name in named:
            held.setdefault(name, set()).add(key)
    names = {id(parameter): name for name, parameter in named.items()}
    twins, problems = Twins(), list[Refusal]()
    groups = [(one, group) for one in optimizers.members for group in one.param_groups]
    for number, ((owner, group), restored) in enumerate(zip(groups, settings, strict=False)):
        for parameter in () if isinstance(owner, MasterWeights) else group[PARAMS]:
            keys = held.get(names[id(parameter)], set())
            if not keys or owner.state.get(parameter):
                continue
            made = twins.state(owner, parameter, restored)
            lacking = [key for key, value in made.items() if value is not None and key not in keys]
            if lacking:
                name, kind = names[id(parameter)], type(owner).__name__
                message = f"{kind} needs {', '.join(lacking)} for {name}, but the source has {', '.join(sorted(keys))}"
                problems.append(Refusal("UNSUPPORTED", message, Where(None, f"optimizer group {number}"), _OTHER_KIND))
                break
    return problems


def lacking_state(checkpoint: Checkpoint) -> list[Refusal]:
    """Refuse a source that has nothing of an optimizer, or was written with its state in files that are missing now."""
    if checkpoint.has_state:
        return list(checkpoint.container.unread)
    manifest = checkpoint.manifest
    message = "the checkpoint lists this file, but it is missing"
    hint = "Copy the file. To load only the model, use strict=False or omit optimizer=."
    files = [file for file in (manifest.files if manifest else ()) if file.startswith(f"{STATE_FOLDER}/")]
    missing = [Refusal("INCOMPLETE", message, Where(file), hint) for file in files]
    return missing or list(stateless(checkpoint).refusals)


def other_names(named: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return further names of the optimizer's parameters, with those that it goes by.

    Args:
        named: the optimizer's parameters by name.
        parameters: the model's; a tied one has several names.
    """
    first = {id(parameter): name for name, parameter in named.items()}
    return {name: first[id(p)] for name, p in parameters.items() if name not in named and id(p) in first}


def doubled(others: Mapping[str, str], stored: Collection[str]) -> Iterator[NamePair]:
    """Yield (name, other name) of state that a source has under another name of a tied parameter, too.

    Args:
        others: see `other_names`.
        stored: the source's tensors by the model's names.
    """
    for full in stored:
        name, key = split_slot(full)
        if key and name in others and (first := join_slot(others[name], key)) in stored:
            yield first, full


def as_tensor(value: object) -> torch.Tensor | None:
    """Return a Python number as a tensor of no dims; None for anything else, and for what 64 bits do not hold."""
    kind = _NUMBERS.get(type(value))
    if kind is None or (isinstance(value, int) and not -(1 << 63) <= value < 1 << 63):
        return None
    return torch.tensor(value, dtype=kind)


def rooms_for(
    optimizers: Optimizers, named: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]
) -> dict[str, torch.Tensor]:
    """Return tensors for the state that a source holds: those the optimizers have, new ones where they have none.

    Args:
        optimizers: as taken apart.
        named: their parameters by name; those that other ranks update get none.
        stored: the source's tensors by the model's names.

    Raises:
        Refused: UNSUPPORTED for state that is no plain tensor.
    """
    on_device = {
        id(parameter)
        for group in optimizers.held()
        for parameter in group[PARAMS]
        if any(group.get(setting) for setting in _ON_DEVICE)
    }
    found, problems, owners = {}, list[Refusal](), optimizers.owners()
    for full, source in stored.items():
        name, key = split_slot(full)
        parameter = named.get(name)
        if not key or parameter is None or id(parameter) not in owners:
            continue
        present = owners[id(parameter)].state.get(parameter, {}).get(key)
        if isinstance(present, torch.Tensor) and _is_encoded(present):
            problems.append(_encoded(full, present))
            continue
        if isinstance(present, torch.Tensor) and not present.is_meta:
            found[full] = mark(present, part_of(parameter)) if present.dim() else present
        elif source.shape == whole_shape(parameter) and source.shape:
            made = torch.zeros_like(parameter, dtype=torch_dtype(source.dtype, tensor=full), requires_grad=False)
            found[full] = mark(made, part_of(parameter))
        else:
            where = parameter.device if id(parameter) in on_device else torch.device("cpu")
            found[full] = torch.zeros(source.shape, dtype=torch_dtype(source.dtype, tensor=full), device=where)
    if problems:
        raise gathered(problems)
    return found


def _is_encoded(state: torch.Tensor) -> bool:
    """Tell whether state is a tensor of several buffers, as torchao's quantized optimizers have it."""
    return is_traceable_wrapper_subclass(local_of(state))


def _encoded(name: str, state: torch.Tensor) -> Refusal:
    message = f"it is a {type(local_of(state)).__name__}, whose values are codes with scales"
    hint = "Store such state with torch's own dcp.save of get_optimizer_state_dict, and omit optimizer= here."
    return Refusal("UNSUPPORTED", message, Where(None, name), hint)


def follow(optimizers: Optimizers, named: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Let optimizers follow parameters that were replaced: materialising a meta model makes new ones.

    Args:
        optimizers: as taken apart.
        named: their parameters by name, as they were.
        tensors: the model's tensors by name, as they are.
    """
    replaced = {id(old): tensors[name] for name, old in named.items() if tensors[name] is not old}
    for group in optimizers.held():
        group[PARAMS][:] = [replaced.get(id(parameter), parameter) for parameter in group[PARAMS]]


def install(optimizers: Optimizers, named: Mapping[str, torch.Tensor], states: Mapping[str, torch.Tensor]) -> None:
    """Put loaded state into the optimizers; where one keeps a Python number, a number.

    A value without dims is what the optimizer has there, or what it would make there itself (`Twins`). Where it
    cannot be tried, values of types that only Python's numbers are stored with are numbers, but not fractions of
    parameters without dims. The optimizer is asked in the end to make of them what it needs. Settings are to be
    restored before.
    """
    owners, twins = optimizers.owners(), Twins()
    for full, value in states.items():
        name, key = split_slot(full)
        parameter = named[name]
        owner = owners[id(parameter)]
        state: dict[str, Any] = owner.state[parameter]
        if value.dim():
            state[key] = value
            continue
        old = state.get(key)
        if old is None:
            old = twins.state(owner, parameter).get(key)
        state[key] = _as_kept(value, old, parameter)
    for one in optimizers.members:
        one.__setstate__({"state": one.state, "param_groups": one.param_groups})


def _as_kept(value: torch.Tensor, kept: object, parameter: torch.Tensor) -> torch.Tensor | bool | int | float:
    """Return a value without dims as an optimizer keeps it.

    Args:
        value: as it was stored.
        kept: one that the optimizer has, or makes; None: not known.
        parameter: the one that it belongs to.
    """
    unsure = value.dtype in _NUMBERS.values() and value.dtype != torch.get_default_dtype()
    counts = parameter.dim() > 0 or not value.is_floating_point()
    if kept is None:
        return value.item() if unsure and counts else value
    if isinstance(kept, bool | int | float):
        number: bool | int | float = value.item()
        of_kind = type(kept)(number)
        return of_kind if of_kind == number else number
    if isinstance(kept, torch.Tensor) and unsure and not kept.dim() and counts:
        cast = value.to(kept.dtype)  # a number, of an optimizer that keeps numbers where this one has tensors
        return cast if bool(cast.to(value.dtype) == value) else value
    return value


class Twins:
    """Twins of the optimizers of one load, see above; each makes its step once."""

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
            self._made[key] = _state_of_twin(
                inner, {**groups[number], **(settings or {})}, parameter.dim(), parameter.dtype
            )
        return self._made[key]


def _state_of_twin(optimizer: Optimizer, group: Mapping[str, Any], dims: int, dtype: torch.dtype) -> Mapping[str, Any]:
    kept = _attributes(optimizer)
    if kept is None:
        return {}
    step = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.no_grad():
        warnings.simplefilter("ignore")
        for sparse in (False, True):
            parameter = nn.Parameter(torch.zeros((_TWIN_SIZE,) * dims, dtype=dtype))
            zeros = torch.zeros_like(parameter)
            try:
                parameter.grad = zeros.to_sparse() if sparse else zeros
                twin = _twin(optimizer, kept, _twin_settings(group), parameter)
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


def _twin_settings(group: Mapping[str, Any]) -> dict[str, Any]:
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
