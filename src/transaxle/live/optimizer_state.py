"""Optimizer state by parameter name: `optim/<parameter>/<state>` in every checkpoint format.

Optimizer state is never matched by position. A new optimizer would create its state in its first step. A load creates
it earlier, with the shape and placement of the parameter.

A checkpoint stores only tensors, so it does not show whether a 0-d value was a Python number or a tensor. To find out,
a twin (a second optimizer with the same settings) makes one step on a small zero parameter with a zero gradient. The
optimizer itself is not changed by this.

Settings of parameter groups are matched by parameter names too.

Settings that only select an implementation (`foreach`, `fused`, `capturable`, `differentiable`) are not restored.
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
from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor, refuse_stateless
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.formats.catalog import numpy_dtype
from transaxle.formats.pickled.descriptors import NOTHING
from transaxle.formats.registry import STATE_FOLDER
from transaxle.formats.training_state import GROUPS, NAMES, PARAMS, ParamGroup, plain, settings_of
from transaxle.live.derived import find_unnamed
from transaxle.live.model.destination import NamePair
from transaxle.live.model.state_tensors import Leaves
from transaxle.live.optimizers import (
    CARRY,
    AnyOptimizer,
    Optimizers,
    find_ungrouped,
    inner_optimizers,
    unwrap_optimizers,
)
from transaxle.live.transport.world import World
from transaxle.quant.masters import MASTER, MasterWeights
from transaxle.torch_tensors import code_of, local_of, mark, part_of, torch_dtype, whole_shape

_OWN = frozenset({"foreach", "fused", "capturable", "differentiable"})
_HINT = "Build the optimizer with the groups that the source has."
_IN_ORDER = "Build the optimizer with its groups in the order that they had at the save."
_FIRST_RATE, _BASE_RATES, _SCHEDULES = "initial_lr", "base_lrs", "_schedulers"
"""Key of a group's initial learning rate; keys of the initial rates and of inner schedules in a schedule's state."""
_UNTIE = "Build the model without the tie."


def groups_of(optimizers: Optimizers, parameters: Mapping[str, torch.Tensor]) -> list[ParamGroup]:
    """Return this rank's parameter groups, of all optimizers in order, with names instead of parameters.

    Args:
        optimizers: the optimizers to read.
        parameters: name -> parameter of the optimizers.

    Raises:
        Refused: with code UNSUPPORTED, if a setting is not plain data, or a wrapper's settings differ from those of the
            wrapped optimizer.
    """
    names = {id(parameter): name for name, parameter in reversed(list(parameters.items()))}
    groups: list[ParamGroup] = []
    problems = []
    for number, group in enumerate(optimizers.groups()):
        settings = {}
        for key, value in group.items():
            if key in (PARAMS, NAMES):
                continue
            settings[key] = plain(_scalar(value))
            if settings[key] is NOTHING:
                message = f"its setting {key} is a {type(value).__name__}, which a checkpoint cannot store"
                problems.append(Refusal("UNSUPPORTED", message, Where(None, f"optimizer group {number}")))
        groups.append({**settings, PARAMS: [names[id(parameter)] for parameter in group[PARAMS]]})
    if problems:
        raise gathered(problems)
    return groups


def all_groups(own_groups: Sequence[ParamGroup], world: World) -> list[ParamGroup]:
    """Merge the groups of all ranks, whose parameters may differ (pipeline stages); all ranks must call this.

    Raises:
        Refused: with code UNEQUAL_COPIES, if two ranks train the same parameter with different settings.
    """
    merged: dict[tuple[int, str], ParamGroup] = {}
    settings_by_name: dict[str, str] = {}
    problems = []
    for rank, groups in zip(world.ranks, world.gather(own_groups), strict=True):
        for number, group in enumerate(groups):
            settings = settings_of(group)
            key = number, repr(sorted(settings.items()))
            first = merged.setdefault(key, {**settings, PARAMS: []})
            for name in group[PARAMS]:
                if settings_by_name.setdefault(name, key[1]) != key[1]:
                    message = f"rank {rank} trains it with {key[1]}, but another rank with {settings_by_name[name]}"
                    problems.append(Refusal("UNEQUAL_COPIES", message, Where(None, name)))
                elif name not in first[PARAMS]:
                    first[PARAMS].append(name)
    if problems:
        raise gathered(problems)
    return list(merged.values())


def find_unlike_tied(other_names: Mapping[str, str], stored: Iterable[ParamGroup]) -> list[Refusal]:
    """Return a refusal for each tied parameter whose names have different settings in the source.

    Args:
        other_names: additional name of a tied parameter -> the name that the optimizers use.
        stored: the source's parameter groups, with the model's names of parameters.
    """
    of = {name: settings_of(group) for group in stored for name in group[PARAMS]}
    pairs = [
        ((first, of[first]), (name, of[name])) for name, first in other_names.items() if name in of and first in of
    ]
    return [
        Refusal(
            "UNSUPPORTED",
            f"{_describe_difference(one, two)}, but here they are one tensor",
            Where(None, two[0]),
            _UNTIE,
        )
        for one, two in pairs
        if repr(sorted(one[1].items())) != repr(sorted(two[1].items()))
    ]


def settings_for(
    optimizers: Optimizers, parameters: Mapping[str, torch.Tensor], stored: Iterable[ParamGroup]
) -> tuple[list[Mapping[str, Any]], list[Refusal]]:
    """Find the source's settings for each parameter group of the optimizers.

    Args:
        optimizers: the optimizers to load into.
        parameters: name -> parameter of the optimizers.
        stored: the source's parameter groups, with the model's names of parameters.

    Returns:
        The settings to restore for each group (`Optimizers.every_group`), empty if the source has none; and a refusal
        for each group whose parameters had different settings in the source.
    """
    of = {name: settings_of(group) for group in stored for name in group[PARAMS]}
    names = {id(parameter): name for name, parameter in reversed(list(parameters.items()))}
    restored: list[Mapping[str, Any]] = []
    problems = []
    inner_groups = sum(len(member.param_groups) for member in optimizers.members)
    for number, group in enumerate(optimizers.every_group()):
        names_in_source = [names[id(parameter)] for parameter in group[PARAMS] if names[id(parameter)] in of]
        settings_by_name = {
            name: of[name] if number < inner_groups else _both(of[name], group) for name in names_in_source
        }
        restored.append(settings_by_name[names_in_source[0]] if names_in_source else {})
        conflicting = next(
            (name for name in names_in_source if repr(settings_by_name[name]) != repr(restored[-1])), None
        )
        if conflicting is not None:
            difference = _describe_difference(
                (names_in_source[0], restored[-1]), (conflicting, settings_by_name[conflicting])
            )
            where = Where(None, f"optimizer group {number}")
            problems.append(Refusal("UNSUPPORTED", f"{difference}, but here they are one group", where, _HINT))
    return restored, problems


def _describe_difference(first: tuple[str, ParamGroup], second: tuple[str, ParamGroup]) -> str:
    """Describe how the settings of two parameters differ; each is given as (name, settings in the source)."""
    (name, first_settings), (second_name, second_settings) = first, second
    differing_keys = [
        key
        for key in {**first_settings, **second_settings}
        if repr(first_settings.get(key)) != repr(second_settings.get(key))
    ]
    differences = "; ".join(
        f"{key}: {first_settings.get(key)!r} and {second_settings.get(key)!r}" for key in differing_keys
    )
    return f"the source trains {name} and {second_name} with different settings ({differences})"


def find_misordered(
    optimizers: Optimizers, settings: Sequence[Mapping[str, Any]], schedules: Mapping[str, tuple[object, Any]]
) -> list[Refusal]:
    """Return a refusal for each learning rate schedule that would assign its rates to wrong parameter groups.

    A schedule stores rates in the order of the groups, but settings of groups are matched by parameter names.

    Args:
        optimizers: the optimizers to load into.
        settings: the settings to restore for each group; see `settings_for`.
        schedules: name -> (object, state to restore); objects other than schedules are ignored.
    """
    rates, problems, begin = [_number(group_settings.get(_FIRST_RATE)) for group_settings in settings], [], 0
    for optimizer in optimizers.members:
        own_rates, begin = (
            rates[begin : begin + len(optimizer.param_groups)],
            begin + len(optimizer.param_groups),
        )
        for name, (schedule, state) in schedules.items():
            if optimizer not in _optimizers_of(schedule) or not all(
                isinstance(each, int | float) for each in own_rates
            ):
                continue
            stored_rates = next(
                (each for each in _base_rates(state) if each != own_rates and sorted(each) == sorted(own_rates)),
                None,
            )
            if stored_rates is not None:
                message = (
                    f"the groups have the initial learning rates {own_rates}, but their schedule has {stored_rates}"
                )
                problems.append(Refusal("UNSUPPORTED", message, Where(None, name), _IN_ORDER))
    return problems


def _optimizers_of(schedule: object) -> tuple[Optimizer, ...]:
    """Return the torch optimizers whose learning rates a schedule sets, without wrappers such as accelerate's."""
    inner = getattr(schedule, "scheduler", schedule)
    optimizer = getattr(inner, "optimizer", None)
    return () if optimizer is None else inner_optimizers(optimizer)


def _base_rates(state: Any) -> Iterator[list[float]]:
    """Yield the lists of initial learning rates in the state of a schedule and of its nested schedules."""
    if isinstance(state, Mapping):
        rates, inner = state.get(_BASE_RATES), state.get(_SCHEDULES)
        if isinstance(rates, list) and all(isinstance(rate, int | float | torch.Tensor) for rate in rates):
            yield [float(rate) for rate in rates]
        for schedule in inner if isinstance(inner, list) else ():
            yield from _base_rates(schedule)


def restore(optimizers: Optimizers, settings_by_group: Sequence[Mapping[str, Any]]) -> None:
    """Restore settings into the optimizers' parameter groups.

    A setting that is a tensor remains the same object. Only a tensor that several groups share, such as an initial
    learning rate, is cloned if the groups get different values.
    """
    groups = list(zip(optimizers.every_group(), settings_by_group, strict=True))
    values = [
        (group, key, tensor, _number(settings.get(key, tensor.item())))
        for group, settings in groups
        for key, tensor in group.items()
        if isinstance(tensor, torch.Tensor) and not tensor.dim()
    ]
    values_by_tensor: dict[int, set[Any]] = {}
    for _, _, tensor, value in values:
        values_by_tensor.setdefault(id(tensor), set()).add(value)
    clones: dict[tuple[int, Any], torch.Tensor] = {}
    for group, key, tensor, value in values:
        if len(values_by_tensor[id(tensor)]) > 1:
            group[key] = clones.setdefault((id(tensor), value), tensor.detach().clone())
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
    """Convert a numpy scalar to a Python number; return any other value unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def _both(settings: ParamGroup, shown: ParamGroup) -> dict[str, Any]:
    """Return the settings that a wrapper's group `shown` has too; it has only settings that its optimizers share."""
    return {key: value for key, value in settings.items() if key in shown}


def _scalar(value: Any) -> Any:
    """Convert a 0-d tensor to a numpy scalar of the same dtype."""
    if not isinstance(value, torch.Tensor) or value.dim():
        return value
    octets = value.detach().cpu().reshape(1).view(torch.uint8).numpy()
    return octets.view(numpy_dtype(code_of(value.dtype)))[0]


_OTHER_KIND = "Build the kind of optimizer that the source was trained with, or omit optimizer= to begin anew."
_ON_DEVICE = ("capturable", "fused")
"""Settings of a group that place its step counters on the device of the parameters."""
_TOO_EARLY = (
    "Build the optimizer from this model's parameters, after fully_shard or parallelize_module has replaced them"
)
_NUMBERS: Mapping[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""Python number type -> dtype of the 0-d tensor that stores such a number."""
_STATE, _DEFAULTS, _STEP, _RATE = "state", "defaults", "step", "lr"
_HOOKS = "_optimizer_"
_OFF = ("foreach", "fused", "capturable")
"""Settings that are turned off in a twin (a copy of an optimizer that makes one step on a small parameter, which shows
what state a step creates), because they need a GPU or a special kernel. These settings do not affect which state
exists.
"""
_TWIN_SIZE = 2
"""Size of each dim of the small parameter on which a twin makes a step."""


class OptimizerLoad:
    """The part of a load that fills optimizers; without an optimizer it does nothing.

    Args:
        optimizer: the model's optimizer, or several; None means that no optimizer is loaded.
        leaves: this rank's tensors of the model.
        stored: the model's tensor name -> tensor of the source.

    Attributes:
        parameters: name -> parameter of the optimizers.
        states: name -> tensor to fill, for all optimizer state that the source has.
        stale_states: names of optimizer state that the optimizers have but the source lacks.
        second_copies: pairs of names for the same state of a tied parameter: the name that is loaded, and a second name
            in the source.
        names_without_optimizer: names of parameters that require gradients but are in no optimizer.

    Raises:
        TransaxleError: any error that `by_name`, `buffers_for` or `states_of` raises.
    """

    def __init__(self, optimizer: AnyOptimizer | None, leaves: Leaves, stored: Mapping[str, StoredTensor]) -> None:
        self._optimizers: Optimizers | None = None
        self.parameters: dict[str, torch.Tensor] = {}
        self.states: dict[str, torch.Tensor] = {}
        self.stale_states: tuple[str, ...] = ()
        self.second_copies: tuple[NamePair, ...] = ()
        self.names_without_optimizer: tuple[str, ...] = ()
        self._other_names: dict[str, str] = {}
        self._settings: list[Mapping[str, Any]] = []
        """For each parameter group, its settings in the source."""
        if optimizer is None:
            return
        self._optimizers, self.parameters = by_name(optimizer, leaves)
        self.states = buffers_for(self._optimizers, self.parameters, stored)
        self.stale_states = stale_states(self._optimizers, self.parameters, stored)
        self._other_names = other_names(self.parameters, leaves.parameters)
        self.second_copies = tuple(second_copies(self._other_names, stored)) if self._other_names else ()
        self.names_without_optimizer = names_without_optimizer(self.parameters, leaves.parameters)

    def __bool__(self) -> bool:
        return self._optimizers is not None

    def match_groups(
        self,
        groups: Sequence[ParamGroup],
        stored: Mapping[str, StoredTensor],
        schedules: Mapping[str, tuple[object, Any]],
    ) -> list[Refusal]:
        """Find the source's settings for each parameter group; return a refusal for each setting that prevents
        continuing.

        Args:
            groups: the source's parameter groups, with the model's names of parameters.
            stored: the model's tensor name -> tensor of the source.
            schedules: name -> (object, state to restore), for learning rate schedules; see `find_misordered`.
        """
        if self._optimizers is None:
            return []
        self._settings, problems = settings_for(self._optimizers, self.parameters, groups)
        problems += find_unlike_tied(self._other_names, groups)
        problems += find_other_kind(self._optimizers, self.parameters, self._settings, stored)
        return [*problems, *find_misordered(self._optimizers, self._settings, schedules)]

    def find_ungrouped(self, groups: Sequence[ParamGroup], stored: Iterable[str]) -> list[Refusal]:
        """Return the refusals of `find_ungrouped`."""
        return [] if self._optimizers is None else [*find_ungrouped(self._optimizers, self.parameters, groups, stored)]

    def follow(self, leaves: Leaves, stored: Mapping[str, StoredTensor]) -> None:
        """Use the new parameters of a model that has left the meta device, and create their optimizer state again.

        Args:
            leaves: this rank's present tensors of the model.
            stored: the model's tensor name -> tensor of the source.
        """
        if self._optimizers is None:
            return
        parameters = {name: leaves.parameters[name] for name in self.parameters}
        follow(self._optimizers, self.parameters, parameters)
        self.parameters, self.states = parameters, buffers_for(self._optimizers, parameters, stored)

    def install(self, weights: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
        """Restore the loaded settings and state into the optimizers.

        Args:
            weights: name -> quantized parameter.
            values: name -> loaded values, for parameters that were quantized during the load.
        """
        if self._optimizers is None:
            return
        restore(self._optimizers, self._settings)
        install(self._optimizers, self.parameters, self.states)
        lacking = [name for name in weights if join_slot(name, MASTER) not in self.states]
        for optimizer in self._optimizers.members:
            # master weights that the source lacks are set to the loaded values
            if isinstance(optimizer, MasterWeights):
                begin: dict[torch.Tensor, torch.Tensor | None] = {weights[name]: None for name in lacking}
                begin |= {weights[name]: local_of(values[name]) for name in lacking if name in values}
                optimizer.restart(begin)


def by_name(optimizer: AnyOptimizer, leaves: Leaves) -> tuple[Optimizers, dict[str, torch.Tensor]]:
    """Unwrap optimizers, and return them with the model's name -> parameter.

    Args:
        optimizer: the model's optimizer, or several.
        leaves: this rank's tensors of the model.

    Raises:
        Refused: with code UNSUPPORTED, if the model's state dict omits a parameter, or is a Megatron sharded state
            dict; also any refusal of `names_of`.
    """
    if leaves.sharded:
        message = "the shards of a Megatron model are no parameters of an optimizer, so its state cannot be matched"
        raise refuse(
            "UNSUPPORTED", message, hint=("Omit optimizer=, and let Megatron save and load the optimizer's state.")
        )
    optimizers = unwrap_optimizers(optimizer)
    if nameless := find_unnamed(
        (parameter for _, _, parameter in optimizers.parameters()), leaves.custom_modules, leaves.tensors
    ):
        raise gathered(nameless)
    return optimizers, names_of(optimizers, leaves.parameters)


def names_of(optimizers: Optimizers, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the model's name -> parameter, for the parameters of the optimizers.

    Args:
        optimizers: the optimizers to read.
        tensors: name -> tensor of the model.

    Raises:
        Refused: with code UNEXPECTED_TENSOR, if an optimizer has a parameter that the model does not have.
    """
    by_identity = {id(tensor): name for name, tensor in reversed(list(tensors.items()))}
    parameters: dict[str, torch.Tensor] = {}
    problems = []
    for group, number, parameter in optimizers.parameters():
        name = by_identity.get(id(parameter))
        if name is None:
            message = f"parameter {number} of its group {group}, of shape {list(parameter.shape)}, is not in the model"
            problems.append(Refusal("UNEXPECTED_TENSOR", message, Where(None, f"optimizer group {group}"), _TOO_EARLY))
        else:
            parameters[name] = parameter
    if problems:
        raise gathered(problems)
    return parameters


def names_without_optimizer(
    optimized: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> tuple[str, ...]:
    """Return the names of parameters that require gradients but belong to no optimizer."""
    identities = {id(parameter) for parameter in optimized.values()}
    return tuple(name for name, each in parameters.items() if each.requires_grad and id(each) not in identities)


def states_of(optimizers: Optimizers, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return name -> tensor of the optimizers' state; Python numbers become 0-d tensors, None values are omitted.

    Args:
        optimizers: the optimizers to read.
        parameters: name -> parameter; see `names_of`. For parameters of other ranks, no state is returned.

    Raises:
        Refused: with code UNSUPPORTED, if a value in the state is neither a tensor nor a number.
    """
    tensors, problems = {}, []
    owners = optimizers.owners()
    states = {
        id(each): state
        for optimizer in optimizers.members
        for each, state in (optimizer.states if isinstance(optimizer, MasterWeights) else optimizer.state).items()
    }
    for name, parameter in parameters.items():
        for key, value in states.get(id(parameter), {}).items() if id(parameter) in owners else ():
            full = join_slot(name, key)
            state = value if isinstance(value, torch.Tensor) else as_tensor(value)
            if isinstance(value, torch.Tensor) and _is_encoded(value):
                problems.append(_refuse_encoded(full, value))
            elif (
                state is not None and state.dim() and part_of(parameter) is not None and state.shape != parameter.shape
            ):
                message = (
                    f"it has the shape {list(state.shape)}, but its parameter, {list(parameter.shape)} here, is sharded"
                )
                problems.append(Refusal("UNSUPPORTED", message, Where(None, full)))
            elif state is not None:
                tensors[full] = mark(state, part_of(parameter)) if state.dim() else state
            elif value is not None:
                message = f"it is a {type(value).__name__}, neither a tensor nor a number"
                problems.append(Refusal("UNSUPPORTED", message, Where(None, full), CARRY))
    if problems:
        raise gathered(problems)
    return tensors


def stale_states(
    optimizers: Optimizers, parameters: Mapping[str, torch.Tensor], stored: Container[str]
) -> tuple[str, ...]:
    """Return the names of optimizer state that the source lacks, so that a load would leave it outdated."""
    return tuple(n for n in states_of(optimizers, parameters) if n not in stored and split_slot(n)[1] != MASTER)


def find_other_kind(
    optimizers: Optimizers,
    parameters: Mapping[str, torch.Tensor],
    settings: Sequence[Mapping[str, Any]],
    stored: Collection[str],
) -> list[Refusal]:
    """Refuse optimizer state that a different kind of optimizer wrote, so that this optimizer could not continue.

    Args:
        optimizers: the optimizers to load into.
        parameters: name -> parameter of the optimizers.
        settings: the settings to restore for each group; see `settings_for`.
        stored: the model's tensor name -> tensor of the source.
    """
    stored_keys: dict[str, set[str]] = {}
    for full in stored:
        name, key = split_slot(full)
        if key and name in parameters:
            stored_keys.setdefault(name, set()).add(key)
    names = {id(parameter): name for name, parameter in parameters.items()}
    twins, problems = Twins(), list[Refusal]()
    groups = [(one, group) for one in optimizers.members for group in one.param_groups]
    for number, ((owner, group), restored) in enumerate(zip(groups, settings, strict=False)):
        for parameter in () if isinstance(owner, MasterWeights) else group[PARAMS]:
            keys = stored_keys.get(names[id(parameter)], set())
            if not keys or owner.state.get(parameter):
                continue
            twin_state = twins.state(owner, parameter, restored)
            lacking = [key for key, value in twin_state.items() if value is not None and key not in keys]
            if lacking:
                name, kind = names[id(parameter)], type(owner).__name__
                message = f"{kind} needs {', '.join(lacking)} for {name}, but the source has {', '.join(sorted(keys))}"
                problems.append(Refusal("UNSUPPORTED", message, Where(None, f"optimizer group {number}"), _OTHER_KIND))
                break
    return problems


def find_missing_state(checkpoint: Checkpoint) -> list[Refusal]:
    """Refuse a source that has no optimizer state, or whose files with optimizer state are missing."""
    if checkpoint.has_state:
        return list(checkpoint.container.unread)
    manifest = checkpoint.manifest
    message = "the checkpoint lists this file, but it is missing"
    hint = "Copy the missing file. To load only the model, use strict=False or omit optimizer=."
    files = [file for file in (manifest.files if manifest else ()) if file.startswith(f"{STATE_FOLDER}/")]
    missing = [Refusal("INCOMPLETE", message, Where(file), hint) for file in files]
    return missing or list(refuse_stateless(checkpoint).refusals)


def other_names(optimized: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return additional name of a tied parameter -> the name that the optimizers use.

    Args:
        optimized: name -> parameter of the optimizers.
        parameters: name -> parameter of the model; a tied parameter has several names.
    """
    first = {id(parameter): name for name, parameter in optimized.items()}
    return {name: first[id(p)] for name, p in parameters.items() if name not in optimized and id(p) in first}


def second_copies(other_names: Mapping[str, str], stored: Collection[str]) -> Iterator[NamePair]:
    """Yield (name, second name) for each state that the source stores under two names of a tied parameter.

    Args:
        other_names: the mapping that the function `other_names` returns.
        stored: the model's tensor name -> tensor of the source.
    """
    for full in stored:
        name, key = split_slot(full)
        if key and name in other_names and (first := join_slot(other_names[name], key)) in stored:
            yield first, full


def as_tensor(value: object) -> torch.Tensor | None:
    """Convert a Python number to a 0-d tensor; return None for other values and for integers beyond 64 bits."""
    kind = _NUMBERS.get(type(value))
    if kind is None or (isinstance(value, int) and not -(1 << 63) <= value < 1 << 63):
        return None
    return torch.tensor(value, dtype=kind)


def buffers_for(
    optimizers: Optimizers, parameters: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]
) -> dict[str, torch.Tensor]:
    """Return name -> tensor to fill with the source's state: the optimizers' own tensor, or a new one if it has none.

    Args:
        optimizers: the optimizers to load into.
        parameters: name -> parameter of the optimizers; parameters that other ranks update are ignored.
        stored: the model's tensor name -> tensor of the source.

    Raises:
        Refused: with code UNSUPPORTED, if a value in the state is not a plain tensor.
    """
    on_device = {
        id(parameter)
        for group in optimizers.every_group()
        for parameter in group[PARAMS]
        if any(group.get(setting) for setting in _ON_DEVICE)
    }
    buffers, problems, owners = {}, list[Refusal](), optimizers.owners()
    for full, source in stored.items():
        name, key = split_slot(full)
        parameter = parameters.get(name)
        if not key or parameter is None or id(parameter) not in owners:
            continue
        present = owners[id(parameter)].state.get(parameter, {}).get(key)
        if isinstance(present, torch.Tensor) and _is_encoded(present):
            problems.append(_refuse_encoded(full, present))
            continue
        if isinstance(present, torch.Tensor) and not present.is_meta:
            buffers[full] = mark(present, part_of(parameter)) if present.dim() else present
        elif source.shape == whole_shape(parameter) and source.shape:
            new_buffer = torch.zeros_like(parameter, dtype=torch_dtype(source.dtype, tensor=full), requires_grad=False)
            buffers[full] = mark(new_buffer, part_of(parameter))
        else:
            device = parameter.device if id(parameter) in on_device else torch.device("cpu")
            buffers[full] = torch.zeros(source.shape, dtype=torch_dtype(source.dtype, tensor=full), device=device)
    if problems:
        raise gathered(problems)
    return buffers


def _is_encoded(state: torch.Tensor) -> bool:
    """Return whether state consists of several buffers, as in torchao's quantized optimizers."""
    return is_traceable_wrapper_subclass(local_of(state))


def _refuse_encoded(name: str, state: torch.Tensor) -> Refusal:
    message = f"it is a {type(local_of(state)).__name__}, whose values are codes with scales"
    hint = "Store such state with torch's own dcp.save of get_optimizer_state_dict, and omit optimizer= here."
    return Refusal("UNSUPPORTED", message, Where(None, name), hint)


def follow(optimizers: Optimizers, former: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace parameters in the optimizers' groups by those that `materialise` has created for a meta model.

    Args:
        optimizers: the optimizers to change.
        former: name -> former parameter of the optimizers.
        tensors: name -> new tensor of the model.
    """
    replaced = {id(old): tensors[name] for name, old in former.items() if tensors[name] is not old}
    for group in optimizers.every_group():
        group[PARAMS][:] = [replaced.get(id(parameter), parameter) for parameter in group[PARAMS]]


def install(optimizers: Optimizers, parameters: Mapping[str, torch.Tensor], states: Mapping[str, torch.Tensor]) -> None:
    """Store loaded state in the optimizers, as Python numbers where an optimizer uses Python numbers.

    Whether a 0-d value becomes a tensor or a number depends on the optimizer's present state, or on the state that a
    twin creates (`Twins`). If no twin works, the stored dtype decides: a value becomes a number if optimizers store
    only Python numbers in this dtype, except that floats of 0-d parameters remain tensors. At the end, the optimizer's
    `__setstate__` may convert the state. Call this function after the settings were restored.
    """
    owners, twins = optimizers.owners(), Twins()
    for full, value in states.items():
        name, key = split_slot(full)
        parameter = parameters[name]
        owner = owners[id(parameter)]
        state: dict[str, Any] = owner.state[parameter]
        if value.dim():
            state[key] = value
            continue
        old = state.get(key)
        if old is None:
            old = twins.state(owner, parameter).get(key)
        state[key] = _to_kind(value, old, parameter)
    for optimizer in optimizers.members:
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def _to_kind(value: torch.Tensor, reference: object, parameter: torch.Tensor) -> torch.Tensor | bool | int | float:
    """Convert a stored 0-d value to the type that the optimizer uses: a tensor or a Python number.

    Args:
        value: the stored value.
        reference: the same value in the optimizer's present state, or in its twin's; None means unknown.
        parameter: the parameter that the value belongs to.
    """
    unsure = value.dtype in _NUMBERS.values() and value.dtype != torch.get_default_dtype()
    counts = parameter.dim() > 0 or not value.is_floating_point()
    if reference is None:
        return value.item() if unsure and counts else value
    if isinstance(reference, bool | int | float):
        number: bool | int | float = value.item()
        of_kind = type(reference)(number)
        return of_kind if of_kind == number else number
    if isinstance(reference, torch.Tensor) and unsure and not reference.dim() and counts:
        cast = value.to(reference.dtype)  # the saved optimizer used a number, this one a tensor
        return cast if bool(cast.to(value.dtype) == value) else value
    return value


class Twins:
    """Twins (small copies) of the optimizers of a load; a twin makes one step to show which state a parameter gets."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, int, torch.dtype], Mapping[str, Any]] = {}
        self._numbers: dict[int, dict[int, int]] = {}
        """`id(optimizer)` -> `id(parameter)` -> number of the parameter group."""

    def state(
        self, optimizer: Optimizer, parameter: torch.Tensor, settings: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        """Return state of the kind that an optimizer creates for a parameter; empty if no twin works.

        Args:
            optimizer: the optimizer whose twin is used.
            parameter: a parameter of this optimizer.
            settings: settings that the parameter's group will have; None means the group's present settings.
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
    attributes = _attributes(optimizer)
    if attributes is None:
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
                twin = _twin(optimizer, attributes, _twin_settings(group), parameter)
                step(twin)
                return dict(twin.state[parameter])
            except Exception:  # noqa: BLE001 - an optimizer that cannot make this step tells nothing
                continue
    return {}


def _twin(
    optimizer: Optimizer, attributes: Mapping[str, Any], settings: dict[str, Any], parameter: nn.Parameter
) -> Optimizer:
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(deepcopy(dict(attributes)))
    groups = [{**settings, PARAMS: [parameter]}]
    Optimizer.__setstate__(twin, {_DEFAULTS: dict(settings), _STATE: defaultdict(dict), GROUPS: groups})
    return twin


def _twin_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a group's settings for a twin, with learning rate 0, and on the CPU, so that a step needs no GPU."""
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
    """Return the attributes to copy into a twin (a copy of the optimizer for a test step); None if a twin could change
    other objects through them.
    """
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
