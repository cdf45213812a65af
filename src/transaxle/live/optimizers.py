"""Optimizers: what a caller gives as `optimizer=`, taken apart to the torch optimizers that hold state.

Containers (torchtitan), wrappers (accelerate, ZeRO), lists and dicts have parameters like any optimizer, and no state
of their own: read as they are, they would have nothing to save, and what is loaded would go nowhere. So whatever has
other optimizers inside is asked for these; and what keeps values where nobody looks is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.training_state import GROUPS, PARAMS, settings_of
from transaxle.quant.masters import MasterWeights

AnyOptimizer = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]
"""An optimizer, a wrapper or container of some, or several of them; each parameter is in one."""
_STATE, _DEFAULTS, _STEP = "state", "defaults", "step"
_GIVE = "Give the torch optimizers inside it as a list, and put its other state into extra=."
CARRY = 'Use extra={"optimizer": optimizer} to keep its state_dict() as it is, for the same ranks and shards.'
"""What can be done with state that has no place beside its parameter."""
_DEEPEST = 4
"""Levels of lists and dicts in an attribute that are looked through."""
_TITAN = ("torchtitan.components.optimizer.optimizer", "OptimizersContainer")
"""Class whose `state_dict` makes state that is not there yet, by a step: it is not called. It keeps nothing else."""
_ZERO = ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")
_SCRATCH = frozenset({"_dummy_overflow_buf", "name2qmap", "grad_scale", "found_inf"})
"""Attributes of optimizers (apex, DeepSpeed, bitsandbytes, torch) that hold tensors and are no state."""


@dataclass(frozen=True)
class Optimizers:
    """What was given, taken apart."""

    members: tuple[Optimizer, ...]
    """Torch optimizers; each parameter is in one, on one rank at least."""
    covers: tuple[Any, ...] = ()
    """What was around them and has groups of its own for the same parameters, the outermost first."""

    def parameters(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield (group, number in it, parameter), with what other ranks update."""
        seen: set[int] = set()
        for number, group in enumerate(self.held()):
            for place, parameter in enumerate(group[PARAMS]):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield number, place, parameter

    def owners(self) -> dict[int, Optimizer]:
        """Return, by a parameter's identity, the optimizer that has its state on this rank."""
        return {id(each): one for one in self.members for group in one.param_groups for each in group[PARAMS]}

    def held(self) -> list[dict[str, Any]]:
        """Return all groups there are: what is restored goes into each of them."""
        return [group for one in (*self.members, *self.covers) for group in one.param_groups]

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of this rank's parameters, with the settings that the next step takes.

        Raises:
            Refused: UNSUPPORTED where a wrapper says otherwise than what it wraps.
        """
        shown = {id(p): group for one in reversed(self.covers) for group in one.param_groups for p in group[PARAMS]}
        zeros = {id(one.optim): one for one in self.covers if _is_of(one, _ZERO)}
        found, problems = [], []
        for one in self.members:
            for number, group in enumerate(one.param_groups):
                if id(one) in zeros:  # which hands its own down with each step
                    found.append({**group, **settings_of(zeros[id(one)].param_groups[number])})
                    continue
                found.append(group)
                outer = settings_of(next((shown[id(p)] for p in group[PARAMS] if id(p) in shown), {}))
                unlike = [key for key in outer if key in group and repr(group[key]) != repr(outer[key])]
                if unlike:
                    told = ", ".join(f"{key} is {outer[key]!r} outside and {group[key]!r} inside" for key in unlike)
                    message = f"the wrapper and the {type(one).__name__} inside it have different settings: {told}"
                    problems.append(Refusal("UNSUPPORTED", message, Where(None, f"optimizer group {number}"), _GIVE))
        if problems:
            raise gathered(problems)
        return found


def apart(given: Any) -> Optimizers:
    """Take what was given apart.

    Args:
        given: see `AnyOptimizer`; also what has no torch class of its own, and optimizers inside.

    Raises:
        Refused: UNSUPPORTED for what is none, and for what keeps state elsewhere; NAME_COLLISION for a parameter that
            two of them have.
    """
    walk = _Walk()
    walk.into(given)
    owners: dict[int, int] = {}
    for number, one in enumerate(walk.members):
        for group in one.param_groups:
            for parameter in group[PARAMS]:
                first = owners.setdefault(id(parameter), number)
                if first != number:
                    names = " and ".join(type(walk.members[each]).__name__ for each in (first, number))
                    message = f"optimizers {first} and {number} ({names}) share a parameter, of {list(parameter.shape)}"
                    hint = "Give each parameter to one optimizer."
                    walk.problems.append(Refusal("NAME_COLLISION", message, Where(None, "optimizer parameter"), hint))
    if walk.problems:
        raise gathered(walk.problems)
    return Optimizers(tuple(walk.members), tuple(walk.covers))


def inside(given: Any) -> tuple[Optimizer, ...]:
    """Return the torch optimizers in what was given, whether or not their state can be told."""
    walk = _Walk()
    walk.into(given)
    return tuple(walk.members)


class _Walk:
    """Goes through what was given."""

    def __init__(self) -> None:
        self.members: list[Optimizer] = []
        self.covers: list[Any] = []
        self.problems: list[Refusal] = []
        self._seen: set[int] = set()

    def into(self, given: Any) -> None:
        """Take one thing apart, or several."""
        if not _is_optimizer(given):
            several = given.values() if isinstance(given, Mapping) else given
            if isinstance(several, Iterable) and not isinstance(several, str | torch.Tensor | nn.Module):
                for each in several:
                    self.into(each)
            else:
                self._refuse(given, "this is not an optimizer", "Give a torch optimizer, or a list or dict of them.")
            return
        if id(given) in self._seen:
            return
        self._seen.add(id(given))
        inner = [] if isinstance(given, MasterWeights) else [each for each in _inside(given) if each is not given]
        if inner:
            self._wrapper(given, inner)
        elif not isinstance(given, Optimizer):
            self._refuse(given, "this is not a torch optimizer, and does not contain one", CARRY)
        elif _is_of(given, _ZERO):
            hint = "Use overlap_with_ddp=False, which builds it at once."
            self._refuse(given, "the optimizer inside does not exist yet, or is a functional one", hint)
        else:
            self.members.append(given)
            if not isinstance(given, MasterWeights):
                self._check(given, [given], CARRY)

    def _wrapper(self, given: Any, inner: list[Any]) -> None:
        mine = {id(parameter) for parameter in _parameters(given)}
        before = len(self.members)
        if any(group is not other for group, other in _pairs(given, inner)):
            self.covers.append(given)
        for each in inner:
            self.into(each)
        members = self.members[before:]
        theirs = {id(parameter) for each in inner for parameter in _parameters(each)}
        if not mine or _is_of(given, _ZERO):
            return
        if not mine & theirs or theirs - mine:
            message = "the optimizers inside train other tensors than its parameters: copies, or flat buffers"
            self._refuse(given, message, "Save it with its own framework; transaxle reads DeepSpeed's checkpoints.")
        elif mine - theirs:
            count = len(mine - theirs)
            self._refuse(given, f"no optimizer inside has {count} of its {len(mine)} parameters", _GIVE)
        else:
            self._check(given, members, _GIVE)

    def _check(self, one: Any, members: Sequence[Optimizer], hint: str) -> None:
        """Refuse what keeps values beside the states of the members, which are itself or inside it."""
        kept = [*_stray(one, members), *_elsewhere(one), *_told(one, members)]
        if kept:
            self._refuse(one, f"it keeps more than its parameters' state: {'; '.join(kept)}", hint)

    def _refuse(self, one: Any, message: str, hint: str) -> None:
        self.problems.append(Refusal("UNSUPPORTED", message, Where(None, f"optimizer {type(one).__name__}"), hint))


def _is_of(given: Any, kind: tuple[str, str]) -> bool:
    """Tell whether something is of a class, by module and name: nothing is imported that the caller does not use."""
    return any((each.__module__, each.__name__) == kind for each in type(given).__mro__)


def _is_optimizer(given: Any) -> bool:
    """Tell whether something acts as an optimizer, whatever its class."""
    if isinstance(given, Optimizer):
        return True
    if isinstance(given, type | nn.Module | Mapping | list | tuple):
        return False
    return callable(getattr(given, _STEP, None)) and (hasattr(given, GROUPS) or bool(list(_inside(given))))


def _attributes(given: Any) -> dict[str, Any]:
    """Return what an object holds, in slots too."""
    slots = [name for kind in type(given).__mro__ for name in _names(kind.__dict__.get("__slots__", ()))]
    held = {name: getattr(given, name) for name in slots if name != "__dict__" and hasattr(given, name)}
    return held | getattr(given, "__dict__", {})


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _inside(given: Any) -> Iterator[Any]:
    """Yield the optimizers that something holds, each once."""
    seen: set[int] = set()
    for value in _attributes(given).values():
        if isinstance(value, Mapping):
            several: Iterable[Any] = value.values()
        else:
            several = value if isinstance(value, list | tuple) else (value,)
        for each in several:
            if id(each) not in seen and each is not given and (isinstance(each, Optimizer) or _acts(each)):
                seen.add(id(each))
                yield each


def _acts(given: Any) -> bool:
    """Tell whether something inside a wrapper is one that has parameters: no schedule, and no module."""
    if isinstance(given, type | nn.Module | torch.Tensor) or not callable(getattr(type(given), _STEP, None)):
        return False
    return hasattr(given, GROUPS)


def _parameters(given: Any) -> list[torch.Tensor]:
    groups = getattr(given, GROUPS, None)
    if groups is None:
        return [parameter for each in _inside(given) for parameter in _parameters(each)]
    return [parameter for group in groups for parameter in group[PARAMS]]


def _pairs(given: Any, inner: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each group that a wrapper shows, and that of the same parameters inside."""
    of = {id(p): group for each in inner for group in getattr(each, GROUPS, ()) for p in group[PARAMS]}
    for group in getattr(given, GROUPS, ()):
        yield from ((group, of.get(id(parameter))) for parameter in group[PARAMS])


def _stray(one: Any, members: Sequence[Optimizer]) -> Iterator[str]:
    """Yield in words the state that belongs to no parameter, or to none of those inside."""
    held = {id(parameter): each for each in members for parameter in _parameters(each)}
    own = _attributes(one).get(_STATE)
    for key, state in own.items() if isinstance(own, Mapping) else ():
        if not state and isinstance(state, Mapping):
            continue
        if not isinstance(key, torch.Tensor):
            yield f"state under {key!r}"
        elif id(key) not in held:
            yield f"state of a tensor of {list(key.shape)} that is not among its parameters"
        elif held[id(key)].state.get(key) is not state:
            yield f"its own state for a parameter of {list(key.shape)}"


def _elsewhere(one: Any) -> Iterator[str]:
    """Yield in words the attributes that hold tensors like its parameters."""
    parameters = _parameters(one)
    own = {id(parameter) for parameter in parameters}
    shapes = {tuple(parameter.shape) for parameter in parameters} | {()}
    shapes.add((sum(parameter.numel() for parameter in parameters),))
    for name, value in _attributes(one).items():
        if name not in (_STATE, GROUPS, _DEFAULTS) and name not in _SCRATCH and _like(value, own, shapes, _DEEPEST):
            yield f"attribute {name}"


def _like(value: Any, own: set[int], shapes: set[tuple[int, ...]], depth: int) -> bool:
    """Tell whether a value holds tensors that may be somebody's state."""
    if isinstance(value, torch.Tensor):
        return id(value) not in own and tuple(value.shape) in shapes
    if depth == 0 or isinstance(value, Optimizer):
        return False
    if isinstance(value, Mapping):
        of_parameters = any(isinstance(key, torch.Tensor) or key in own for key in value)
        if of_parameters and any(isinstance(each, torch.Tensor) for each in value.values()):
            return any(id(each) not in own for each in value.values())
        return any(_like(each, own, shapes, depth - 1) for each in value.values())
    several = isinstance(value, list | tuple | set | frozenset)
    return several and any(_like(each, own, shapes, depth - 1) for each in value)


def _told(one: Any, members: Sequence[Optimizer]) -> Iterator[str]:
    """Yield in words what its own `state_dict` says beyond the states; torch's says no more than these."""
    kind = type(one)
    if _is_of(one, _TITAN):
        return
    hooks = any(getattr(one, f"_optimizer_state_dict_{when}_hooks", None) for when in ("pre", "post"))
    if not hooks and getattr(kind, "state_dict", Optimizer.state_dict) is Optimizer.state_dict:
        return
    try:
        said = one.state_dict()
    except Exception as error:  # noqa: BLE001 - whatever it is, what it keeps is not known
        yield f"its state_dict() failed ({error!r})"
        return
    if not isinstance(said, Mapping):
        yield f"its state_dict() is a {type(said).__name__}"
        return
    if _STATE in said and GROUPS in said:
        yield from (f"{key!r} in its state_dict()" for key in said if key not in (_STATE, GROUPS))
        said = said[_STATE]
    settings = sum(_tensors(settings_of(group)) for each in members for group in each.param_groups)
    there, known = _tensors(said), sum(_tensors(state) for each in members for state in each.state.values())
    if not known <= there <= known + settings:
        yield f"its state_dict() has {there} tensors, but the states have {known}"


def _tensors(value: Any) -> int:
    """Count the tensors in nested data."""
    if isinstance(value, torch.Tensor):
        return 1
    if isinstance(value, Mapping):
        return sum(map(_tensors, value.values()))
    return sum(map(_tensors, value)) if isinstance(value, list | tuple) else 0
