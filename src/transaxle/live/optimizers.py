"""Finds the torch optimizers that have state inside the argument `optimizer` of `load` and `save`.

Containers (torchtitan), wrappers (accelerate, ZeRO), lists and dicts have parameters like an optimizer, but only the
optimizers inside them have state. So this module searches such objects for torch optimizers. A wrapper that has its own
state is refused, because saves and loads would ignore this state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from transaxle.axes.layout.bind import split_slot
from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.training_state import GROUPS, PARAMS, ParamGroup, settings_of
from transaxle.quant.masters import MasterWeights

AnyOptimizer = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]
"""An optimizer, a wrapper or container of optimizers, or a list or dict of optimizers. No parameter may be in two
optimizers.
"""
_STATE, _DEFAULTS, _STEP = "state", "defaults", "step"
_GIVE = "Pass the torch optimizers inside the wrapper as a list, and the wrapper's other state in extra=."
CARRY = (
    'Use extra={"optimizer": optimizer} to save the optimizer\'s state_dict() unchanged, for the same ranks and shards.'
)
"""Hint for optimizer state that cannot be saved per parameter."""
_UNGROUPED = (
    "Its settings were saved under other names. strict=False loads the state, and keeps this optimizer's settings."
)
_DEEPEST = 4
"""Largest depth to which nested lists and dicts in an optimizer's attributes are searched for tensors."""
_TITAN = ("torchtitan.components.optimizer.optimizer", "OptimizersContainer")
"""Name of torchtitan's container of optimizers. The `state_dict` method of the container is never called, because it
takes an optimizer step to create missing state. The container has no state besides the state of its optimizers.
"""
_ZERO = ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")
_SCRATCH = frozenset({"_dummy_overflow_buf", "name2qmap", "grad_scale", "found_inf"})
"""Attributes of optimizers (of apex, DeepSpeed, bitsandbytes and torch) whose tensors are not optimizer state."""


@dataclass(frozen=True)
class Optimizers:
    """The torch optimizers found inside the argument `optimizer`, and the wrappers around them."""

    members: tuple[Optimizer, ...]
    """The torch optimizers with state; each parameter is in exactly one of them."""
    covers: tuple[Any, ...] = ()
    """Wrappers that have their own parameter groups for the parameters of `members`, outermost wrapper first."""

    def parameters(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield (number of the group, index in the group, parameter), including parameters that other ranks update."""
        visited: set[int] = set()
        for number, group in enumerate(self.every_group()):
            for place, parameter in enumerate(group[PARAMS]):
                if id(parameter) not in visited:
                    visited.add(id(parameter))
                    yield number, place, parameter

    def owners(self) -> dict[int, Optimizer]:
        """Return `id(parameter)` -> the optimizer that has the state of the parameter on this rank."""
        return {
            id(each): optimizer
            for optimizer in self.members
            for group in optimizer.param_groups
            for each in group[PARAMS]
        }

    def every_group(self) -> list[dict[str, Any]]:
        """Return the parameter groups of optimizers and of wrappers; a load restores settings into every group."""
        return [group for optimizer in (*self.members, *self.covers) for group in optimizer.param_groups]

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of this rank's parameters, with the settings that the next optimizer step will use.

        Raises:
            Refused: with code UNSUPPORTED, if a wrapper's settings differ from those of the wrapped optimizer.
        """
        outer_groups = {
            id(p): group
            for optimizer in reversed(self.covers)
            for group in optimizer.param_groups
            for p in group[PARAMS]
        }
        zero_wrappers = {id(optimizer.optim): optimizer for optimizer in self.covers if _is_of(optimizer, _ZERO)}
        groups, problems = [], []
        for optimizer in self.members:
            for number, group in enumerate(optimizer.param_groups):
                # ZeRO copies its own settings into this group at each optimizer step
                if id(optimizer) in zero_wrappers:
                    groups.append({**group, **settings_of(zero_wrappers[id(optimizer)].param_groups[number])})
                    continue
                groups.append(group)
                outer_settings = settings_of(
                    next((outer_groups[id(p)] for p in group[PARAMS] if id(p) in outer_groups), {})
                )
                differing = [
                    key for key in outer_settings if key in group and repr(group[key]) != repr(outer_settings[key])
                ]
                if differing:
                    differences = ", ".join(
                        f"{key} is {outer_settings[key]!r} outside and {group[key]!r} inside" for key in differing
                    )
                    kind = type(optimizer).__name__
                    message = f"the wrapper and the {kind} inside it have different settings: {differences}"
                    problems.append(Refusal("UNSUPPORTED", message, Where(None, f"optimizer group {number}"), _GIVE))
        if problems:
            raise gathered(problems)
        return groups


def unwrap_optimizers(optimizer: Any) -> Optimizers:
    """Find the torch optimizers inside the argument `optimizer`.

    Args:
        optimizer: any object that `AnyOptimizer` describes, including an object that is no torch optimizer but contains
            torch optimizers.

    Raises:
        Refused: with code UNSUPPORTED, if an object is no optimizer, or a wrapper has its own state; with code
            NAME_COLLISION, if a parameter is in two optimizers.
    """
    walk = _Walk()
    walk.into(optimizer)
    owners: dict[int, int] = {}
    for number, member in enumerate(walk.members):
        for group in member.param_groups:
            for parameter in group[PARAMS]:
                first = owners.setdefault(id(parameter), number)
                if first != number:
                    names = " and ".join(type(walk.members[index]).__name__ for index in (first, number))
                    message = f"optimizers {first} and {number} ({names}) share a parameter, of {list(parameter.shape)}"
                    hint = "Give each parameter to one optimizer."
                    walk.problems.append(Refusal("NAME_COLLISION", message, Where(None, "optimizer parameter"), hint))
    if walk.problems:
        raise gathered(walk.problems)
    return Optimizers(tuple(walk.members), tuple(walk.covers))


def inner_optimizers(optimizer: Any) -> tuple[Optimizer, ...]:
    """Return the torch optimizers inside an object, without checking whether wrappers have their own state."""
    walk = _Walk()
    walk.into(optimizer)
    return tuple(walk.members)


class _Walk:
    """Collects the torch optimizers inside nested objects."""

    def __init__(self) -> None:
        self.members: list[Optimizer] = []
        self.covers: list[Any] = []
        self.problems: list[Refusal] = []
        self._seen: set[int] = set()

    def into(self, candidate: Any) -> None:
        """Add the torch optimizers inside one object to the collection."""
        if not _is_optimizer(candidate):
            elements = candidate.values() if isinstance(candidate, Mapping) else candidate
            if isinstance(elements, Iterable) and not isinstance(elements, str | torch.Tensor | nn.Module):
                for element in elements:
                    self.into(element)
            else:
                self._refuse(
                    candidate, "this is not an optimizer", "Give a torch optimizer, or a list or dict of them."
                )
            return
        if id(candidate) in self._seen:
            return
        self._seen.add(id(candidate))
        inner = (
            []
            if isinstance(candidate, MasterWeights)
            else [element for element in _inside(candidate) if element is not candidate]
        )
        if inner:
            self._wrapper(candidate, inner)
        elif not isinstance(candidate, Optimizer):
            self._refuse(candidate, "this is not a torch optimizer, and does not contain one", CARRY)
        elif _is_of(candidate, _ZERO):
            hint = "Use overlap_with_ddp=False, which builds the optimizer immediately."
            self._refuse(candidate, "the optimizer inside does not exist yet, or is a functional one", hint)
        else:
            self.members.append(candidate)
            if not isinstance(candidate, MasterWeights):
                self._check(candidate, [candidate], CARRY)

    def _wrapper(self, wrapper: Any, inner: list[Any]) -> None:
        own_parameters = {id(parameter) for parameter in _parameters(wrapper)}
        before = len(self.members)
        if any(group is not other for group, other in _pairs(wrapper, inner)):
            self.covers.append(wrapper)
        for optimizer in inner:
            self.into(optimizer)
        members = self.members[before:]
        inner_parameters = {id(parameter) for optimizer in inner for parameter in _parameters(optimizer)}
        if not own_parameters or _is_of(wrapper, _ZERO):
            return
        if not own_parameters & inner_parameters or inner_parameters - own_parameters:
            message = "the optimizers inside train other tensors than its parameters: copies, or flat buffers"
            self._refuse(
                wrapper,
                message,
                ("Save the optimizer with its own framework; transaxle reads DeepSpeed's checkpoints."),
            )
        elif own_parameters - inner_parameters:
            count = len(own_parameters - inner_parameters)
            self._refuse(wrapper, f"no optimizer inside has {count} of its {len(own_parameters)} parameters", _GIVE)
        else:
            self._check(wrapper, members, _GIVE)

    def _check(self, candidate: Any, members: Sequence[Optimizer], hint: str) -> None:
        """Refuse an object if it, or an optimizer inside it, has values besides the state of `members`."""
        other_state = [*_stray(candidate, members), *_elsewhere(candidate), *_extra_entries(candidate, members)]
        if other_state:
            self._refuse(candidate, f"it keeps more than its parameters' state: {'; '.join(other_state)}", hint)

    def _refuse(self, candidate: Any, message: str, hint: str) -> None:
        self.problems.append(
            Refusal("UNSUPPORTED", message, Where(None, f"optimizer {type(candidate).__name__}"), hint)
        )


def _is_of(candidate: Any, kind: tuple[str, str]) -> bool:
    """Return whether one of an object's classes has a given module and name; this needs no import of the library."""
    return any((each.__module__, each.__name__) == kind for each in type(candidate).__mro__)


def _is_optimizer(candidate: Any) -> bool:
    """Return whether an object can be used as an optimizer, whatever its class."""
    if isinstance(candidate, Optimizer):
        return True
    if isinstance(candidate, type | nn.Module | Mapping | list | tuple):
        return False
    return callable(getattr(candidate, _STEP, None)) and (hasattr(candidate, GROUPS) or bool(list(_inside(candidate))))


def _attributes(owner: Any) -> dict[str, Any]:
    """Return an object's attributes, including those in `__slots__`."""
    slots = [name for kind in type(owner).__mro__ for name in _names(kind.__dict__.get("__slots__", ()))]
    slot_values = {name: getattr(owner, name) for name in slots if name != "__dict__" and hasattr(owner, name)}
    return slot_values | getattr(owner, "__dict__", {})


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _inside(owner: Any) -> Iterator[Any]:
    """Yield the optimizers in an object's attributes; each optimizer is yielded once."""
    visited: set[int] = set()
    for value in _attributes(owner).values():
        if isinstance(value, Mapping):
            elements: Iterable[Any] = value.values()
        else:
            elements = value if isinstance(value, list | tuple) else (value,)
        for element in elements:
            if (
                id(element) not in visited
                and element is not owner
                and (isinstance(element, Optimizer) or _acts(element))
            ):
                visited.add(id(element))
                yield element


def _acts(candidate: Any) -> bool:
    """Return whether an object inside a wrapper acts as an optimizer: unlike a learning rate scheduler, it has `step`
    and parameter groups.
    """
    if isinstance(candidate, type | nn.Module | torch.Tensor) or not callable(getattr(type(candidate), _STEP, None)):
        return False
    return hasattr(candidate, GROUPS)


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    groups = getattr(optimizer, GROUPS, None)
    if groups is None:
        return [parameter for each in _inside(optimizer) for parameter in _parameters(each)]
    return [parameter for group in groups for parameter in group[PARAMS]]


def _pairs(wrapper: Any, inner: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield, for each parameter of a wrapper, the group of the wrapper and the group of the inner optimizer."""
    of = {id(p): group for each in inner for group in getattr(each, GROUPS, ()) for p in group[PARAMS]}
    for group in getattr(wrapper, GROUPS, ()):
        yield from ((group, of.get(id(parameter))) for parameter in group[PARAMS])


def _stray(owner: Any, members: Sequence[Optimizer]) -> Iterator[str]:
    """Yield descriptions of state that belongs to no parameter, or to a parameter that is in no inner optimizer."""
    member_of = {id(parameter): each for each in members for parameter in _parameters(each)}
    states = _attributes(owner).get(_STATE)
    for key, state in states.items() if isinstance(states, Mapping) else ():
        if not state and isinstance(state, Mapping):
            continue
        if not isinstance(key, torch.Tensor):
            yield f"state under {key!r}"
        elif id(key) not in member_of:
            yield f"state of a tensor of {list(key.shape)} that is not among its parameters"
        elif member_of[id(key)].state.get(key) is not state:
            yield f"its own state for a parameter of {list(key.shape)}"


def _elsewhere(owner: Any) -> Iterator[str]:
    """Yield descriptions of attributes whose tensors look like optimizer state."""
    parameters = _parameters(owner)
    identities = {id(parameter) for parameter in parameters}
    shapes = {tuple(parameter.shape) for parameter in parameters} | {()}
    shapes.add((sum(parameter.numel() for parameter in parameters),))
    for name, value in _attributes(owner).items():
        if (
            name not in (_STATE, GROUPS, _DEFAULTS)
            and name not in _SCRATCH
            and _like(value, identities, shapes, _DEEPEST)
        ):
            yield f"attribute {name}"


def _like(value: Any, identities: set[int], shapes: set[tuple[int, ...]], depth: int) -> bool:
    """Return whether the value of an attribute contains tensors that may be optimizer state."""
    if isinstance(value, torch.Tensor):
        return id(value) not in identities and tuple(value.shape) in shapes
    if depth == 0 or isinstance(value, Optimizer):
        return False
    if isinstance(value, Mapping):
        of_parameters = any(isinstance(key, torch.Tensor) or key in identities for key in value)
        if of_parameters and any(isinstance(each, torch.Tensor) for each in value.values()):
            return any(id(each) not in identities for each in value.values())
        return any(_like(each, identities, shapes, depth - 1) for each in value.values())
    several = isinstance(value, list | tuple | set | frozenset)
    return several and any(_like(each, identities, shapes, depth - 1) for each in value)


def _extra_entries(owner: Any, members: Sequence[Optimizer]) -> Iterator[str]:
    """Yield descriptions of entries in `state_dict()` besides states and groups; torch's own optimizers have no such
    entries.
    """
    kind = type(owner)
    if _is_of(owner, _TITAN):
        return
    hooks = any(getattr(owner, f"_optimizer_state_dict_{when}_hooks", None) for when in ("pre", "post"))
    if not hooks and getattr(kind, "state_dict", Optimizer.state_dict) is Optimizer.state_dict:
        return
    try:
        shown_state = owner.state_dict()
    except Exception as error:  # noqa: BLE001 - any error leaves its state unknown
        yield f"its state_dict() failed ({error!r})"
        return
    if not isinstance(shown_state, Mapping):
        yield f"its state_dict() is a {type(shown_state).__name__}"
        return
    if _STATE in shown_state and GROUPS in shown_state:
        yield from (f"{key!r} in its state_dict()" for key in shown_state if key not in (_STATE, GROUPS))
        shown_state = shown_state[_STATE]
    settings = sum(_tensors(settings_of(group)) for each in members for group in each.param_groups)
    shown_tensors, state_tensors = (
        _tensors(shown_state),
        sum(_tensors(state) for each in members for state in each.state.values()),
    )
    if not state_tensors <= shown_tensors <= state_tensors + settings:
        yield f"its state_dict() has {shown_tensors} tensors, but the states have {state_tensors}"


def _tensors(value: Any) -> int:
    """Count the tensors in nested lists and dicts."""
    if isinstance(value, torch.Tensor):
        return 1
    if isinstance(value, Mapping):
        return sum(map(_tensors, value.values()))
    return sum(map(_tensors, value)) if isinstance(value, list | tuple) else 0


def find_ungrouped(
    optimizers: Optimizers, parameters: Mapping[str, torch.Tensor], groups: Sequence[ParamGroup], stored: Iterable[str]
) -> Iterator[Refusal]:
    """Yield a refusal for each parameter group whose state the source has, while its groups have none of the
    parameters: the settings, such as the learning rate, would silently stay as they are.

    Args:
        optimizers: the optimizers to load into.
        parameters: name -> parameter of the optimizers.
        groups: the source's parameter groups, with the model's names of parameters; none if it stores no settings.
        stored: the source's tensors, with the model's names.
    """
    grouped = {name for group in groups for name in group[PARAMS]}
    with_state = {parameter for parameter, slot in map(split_slot, stored) if slot}
    names = {id(parameter): name for name, parameter in reversed(list(parameters.items()))}
    for number, group in enumerate(optimizers.every_group() if groups else ()):
        own_names = [names[id(parameter)] for parameter in group[PARAMS]]
        if grouped.isdisjoint(own_names) and not with_state.isdisjoint(own_names):
            message = f"the source has state of {own_names[0]}, and none of its parameter groups has this parameter"
            yield Refusal("UNSUPPORTED", message, Where(None, f"optimizer group {number}"), _UNGROUPED)
