"""Optimizer state of grouped parameters: moments follow their parameters from N names to one tensor and back.

It takes state dicts with parameter names, as `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` gives
them. `transaxle.load(..., optimizer=...)` and the DCP planners do this by themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import prod
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from transaxle.axes.layout.bind import WEIGHT, join_slot, split_slot
from transaxle.axes.layout.relayout import Check
from transaxle.axes.layout.solve import Shape
from transaxle.axes.notation.name import own_name
from transaxle.axes.translation.grouped import MEMBERS, Stem, regrouped, stack_name
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.formats.training_state import GROUPS, PARAMS, ParamGroup
from transaxle.formats.training_state import groups_of_equal_settings as groups_of
from transaxle.formats.training_state import renamed as renamed_groups
from transaxle.nn.expert_relayout import Entry, Layer, described, move, stems
from transaxle.nn.grouped_linear import GroupedLinear
from transaxle.torch_tensors import unwrapped

STATE = "state"
"""Key of the parameters' states in torch's optimizer state dicts."""
_FLAT_STATE, _FLAT_GROUPS = f"{STATE}.", f"{GROUPS}."
"""What names in flattened ones begin with: `state.<parameter>.<state>`, `param_groups.<parameter>.<setting>`."""


def optimizer_state_as(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return an optimizer's state dict in the form (one stack, or N) that a model's grouped layers have.

    Args:
        state: `{"state": {parameter: {"exp_avg": tensor, …}}, "param_groups": [{"params": [names], …}]}`; it is not
            changed. The flat form of `StateDictOptions(flatten_optimizer_state_dict=True)` works too.
        model: the model that will load it.

    Returns:
        A new dict, flat if `state` was. Numbers of N parameters (a step) must be equal to become one.

    Raises:
        Refused: UNEQUAL_COPIES for numbers that differ; INCOMPLETE, SHAPE_MISMATCH for another set of experts;
            UNSUPPORTED for experts trained with different settings, and for parameters without names.
    """
    if STATE not in state and any(name.startswith((_FLAT_STATE, _FLAT_GROUPS)) for name in state):
        return _flattened(optimizer_state_as(_nested(state), model))
    states = {name: dict(slots) for name, slots in state[STATE].items()}
    renamed: dict[str, list[str]] = {}
    trained = {name for group in state.get(GROUPS, []) for name in group[PARAMS]} | states.keys()
    if not all(isinstance(name, str) for name in trained):
        hint = "Use get_optimizer_state_dict of torch.distributed.checkpoint.state_dict, which has names."
        raise refuse(
            "UNSUPPORTED",
            "the state dict numbers its parameters; without their names they cannot be regrouped",
            hint=hint,
        )
    for path, module in unwrapped(model).named_modules():
        if isinstance(module, GroupedLinear):
            name, layer = own_name(path), module.layer()
            prefix = f"{name}." if name else ""
            shapes = _shapes(trained, states, prefix, layer)
            for stem in stems(shapes, prefix, layer):
                _move(states, stem, shapes, renamed, layer.own)
    return {**state, STATE: states, GROUPS: _groups(state.get(GROUPS, []), renamed)}


def _shapes(
    trained: Collection[str], states: Mapping[str, Mapping[str, Any]], prefix: str, layer: Layer
) -> dict[str, Shape]:
    """Return the shapes of a layer's parameters that a state dict of an optimizer is of, as their states tell them.

    Those that have their own names and no others are left out: experts that were not trained have no state.
    """
    shapes = {}
    for name in trained:
        stack = stack_name(name)
        stem, is_member = stack.removeprefix(prefix), stack != name
        if not name.startswith(prefix) or stem not in layer.shapes:
            continue
        if is_member and not layer.single[stem] and stack not in trained:
            continue
        parameter_shape = layer.shapes[stem] if is_member else (layer.count, *layer.shapes[stem])
        values = [value for value in states.get(name, {}).values() if isinstance(value, torch.Tensor) and value.dim()]
        shapes[name] = max((tuple(value.shape) for value in values), key=prod, default=parameter_shape)
    return shapes


def _move(
    states: dict[str, dict[str, Any]],
    stem: Stem,
    shapes: Mapping[str, Shape],
    renamed: dict[str, list[str]],
    own: range,
) -> None:
    """Bring the states of one stem's parameters, where they have any yet, into the other form; of experts here."""
    names = stem.sources
    new_names = [stem.member(place) for place in own] if stem.wanted == MEMBERS else stem.targets
    renamed.update(dict.fromkeys(names, new_names))
    old_states = {name: states.pop(name, {}) for name in names}
    lacking = [name for name, state in old_states.items() if not state]
    if len(lacking) == len(names):
        return
    if lacking and not stem.copies:
        raise refuse("INCOMPLETE", f"{', '.join(lacking)} have no state, but the other experts do", tensor=stem.single)
    values = {(name, slot): value for name, state in old_states.items() for slot, value in state.items()}
    number_slots = {slot for (_, slot), value in values.items() if not isinstance(value, torch.Tensor)}
    tensors = {join_slot(*key): torch.as_tensor(value) for key, value in values.items()}
    translation = regrouped([stem], described(tensors) | {name: Entry("", shapes[name]) for name in names})
    targets = {name: target for name, target in translation.targets.items() if split_slot(name)[1] != WEIGHT}
    checks = tuple(check for check in translation.checks if _of_states(check))
    for name, value in move(replace(translation, checks=checks), tensors, targets).items():
        parameter, slot = split_slot(name)
        if parameter in new_names:
            own_value = value if value.dim() else value.clone()  # a step is counted up in place: each has its own
            states.setdefault(parameter, {})[slot] = own_value.item() if slot in number_slots else own_value


def _of_states(check: Check) -> bool:
    """Tell whether a check is of states: of the parameters themselves nothing is known here."""
    return all(split_slot(part.origins[0].name)[1] != WEIGHT for part in check.second.parts)


def _groups(groups: Iterable[ParamGroup], renamed: Mapping[str, list[str]]) -> list[ParamGroup]:
    """Return parameter groups with other names; what becomes one parameter has to be of one group."""
    new_groups = renamed_groups(groups, renamed)
    group_of: dict[str, int] = {}
    problems = []
    for number, group in enumerate(new_groups):
        for name in group[PARAMS]:
            if group_of.setdefault(name, number) != number:
                both = f"{group_of[name]} and {number}"
                message = f"its parts are in the parameter groups {both}; one parameter can only be in one"
                problems.append(Refusal("UNSUPPORTED", message, Where(None, name)))
    if problems:
        raise gathered(problems)
    return new_groups


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flattened state dict as it was before; parameters of equal settings are a group."""
    states: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    rest = {}
    for key, value in flat.items():
        before, _, last = key.rpartition(".")
        if key.startswith(_FLAT_STATE):
            states.setdefault(before.removeprefix(_FLAT_STATE), {})[last] = value
        elif key.startswith(_FLAT_GROUPS):
            settings.setdefault(before.removeprefix(_FLAT_GROUPS), {})[last] = value
        else:
            rest[key] = value
    return {**rest, STATE: states, GROUPS: groups_of(settings)}


def _flattened(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `_nested`."""
    flat = {name: value for name, value in nested.items() if name not in (STATE, GROUPS)}
    for name, slots in nested[STATE].items():
        flat |= {f"{_FLAT_STATE}{name}.{slot}": value for slot, value in slots.items()}
    for group in nested[GROUPS]:
        for name in group[PARAMS]:
            flat |= {f"{_FLAT_GROUPS}{name}.{key}": value for key, value in group.items() if key != PARAMS}
    return flat
