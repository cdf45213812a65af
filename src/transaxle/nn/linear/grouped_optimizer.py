"""Optimizer state of grouped parameters: moments follow their parameters from N names to one tensor and back.

Works on state dicts by parameter names, as `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` gives
them. `transaxle.load(..., optimizer=...)` and the DCP planners need none of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from transaxle.axes.layout.bind import WEIGHT, join_slot, split_slot
from transaxle.axes.layout.relayout import Check
from transaxle.axes.layout.solve import Shape
from transaxle.axes.notation.name import own_name
from transaxle.axes.translation.grouped import MEMBERS, Stem, numbered, regrouped
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.nn.checkpoints.packed_layer import Layer
from transaxle.nn.checkpoints.remap import stems
from transaxle.nn.checkpoints.torch_relayout import Entry, described, move
from transaxle.nn.linear.grouped_linear import GroupedLinear
from transaxle.torch_tensors.module_wrappers import unwrapped

STATE, GROUPS, PARAMS = "state", "param_groups", "params"
"""Keys of torch's optimizer state dicts."""
_FLAT_STATE, _FLAT_GROUPS = f"{STATE}.", f"{GROUPS}."
"""What names in flattened ones begin with: `state.<parameter>.<state>`, `param_groups.<parameter>.<setting>`."""


def optimizer_state_as(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return an optimizer's state dict under the names of a model whose grouped layers may be of the other form.

    Args:
        state: `{"state": {parameter: {"exp_avg": tensor, …}}, "param_groups": [{"params": [names], …}]}`; it is left
            as it is. Flattened, as `StateDictOptions(flatten_optimizer_state_dict=True)` makes it, too.
        model: the model that it is for.

    Returns:
        A new dict, flat where that was. Numbers that N parameters have (a step) must be equal to become one.

    Raises:
        Refused: UNEQUAL_COPIES for numbers that differ; INCOMPLETE, SHAPE_MISMATCH for another set of experts;
            UNSUPPORTED for experts that are trained with different settings, and for a state dict by positions.
    """
    if STATE not in state and any(name.startswith((_FLAT_STATE, _FLAT_GROUPS)) for name in state):
        return _flattened(optimizer_state_as(_nested(state), model))
    states = {name: dict(held) for name, held in state[STATE].items()}
    renamed: dict[str, list[str]] = {}
    trained = {name for group in state.get(GROUPS, []) for name in group[PARAMS]} | states.keys()
    if not all(isinstance(name, str) for name in trained):
        hint = "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer) has names"
        raise refuse("UNSUPPORTED", "states by positions, which do not tell their parameters", hint=hint)
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
    found = {}
    for name in trained:
        split = numbered(name)
        before, many = (split[0], not split[2]) if split is not None else (name, False)
        stem = before.removeprefix(prefix)
        if not name.startswith(prefix) or stem not in layer.shapes or (split is not None and not many):
            continue
        if many and not layer.single[stem] and before not in trained:
            continue
        own = layer.shapes[stem] if many else (layer.count, *layer.shapes[stem])
        held = [
            tuple(one.shape) for one in states.get(name, {}).values() if isinstance(one, torch.Tensor) and one.dim()
        ]
        found[name] = max(held, key=prod, default=own)
    return found


def _move(
    states: dict[str, dict[str, Any]],
    stem: Stem,
    shapes: Mapping[str, Shape],
    renamed: dict[str, list[str]],
    own: range,
) -> None:
    """Bring the states of one stem's parameters, where they have any yet, into the other form; of experts here."""
    names = stem.sources
    others = [stem.member(place) for place in own] if stem.wanted == MEMBERS else stem.targets
    renamed.update(dict.fromkeys(names, others))
    lacking = [name for name in names if not states.get(name)]
    if len(lacking) == len(names):
        for name in names:
            states.pop(name, None)
        return
    if lacking and not stem.copies:
        raise refuse("INCOMPLETE", f"{', '.join(lacking)} have no state, the others have", tensor=stem.single)
    taken = {
        join_slot(name, slot): value if isinstance(value, torch.Tensor) else torch.tensor(value)
        for name in names
        for slot, value in states.get(name, {}).items()
    }
    entries = described(taken) | {name: Entry("", shapes[name]) for name in names}
    found = regrouped([stem], entries)
    targets = {name: one for name, one in found.targets.items() if split_slot(name)[1] != WEIGHT}
    made = move(replace(found, checks=tuple(check for check in found.checks if _of_states(check))), taken, targets)
    numbers = {slot for n in names for slot, value in states.get(n, {}).items() if not isinstance(value, torch.Tensor)}
    for name in names:
        states.pop(name, None)
    for name, value in made.items():
        parameter, slot = split_slot(name)
        if parameter not in others:
            continue
        kept = value if value.dim() else value.clone()  # optimizers count up in place: each parameter has its own step
        states.setdefault(parameter, {})[slot] = kept.item() if slot in numbers else kept


def _of_states(check: Check) -> bool:
    """Tell whether a check is of states: of the parameters themselves nothing is known here."""
    return all(split_slot(part.origins[0].name)[1] != WEIGHT for part in check.second.parts)


def _groups(groups: list[Mapping[str, Any]], renamed: Mapping[str, list[str]]) -> list[dict[str, Any]]:
    """Return parameter groups with other names; what becomes one parameter has to be of one group."""
    found = []
    owner: dict[str, int] = {}
    problems = []
    for number, group in enumerate(groups):
        names: dict[str, None] = {}
        for name in group[PARAMS]:
            names.update(dict.fromkeys(renamed.get(name, [name])))
        for name in names:
            if owner.setdefault(name, number) != number:
                message = f"its parts are of groups {owner[name]} and {number}: no optimizer trains parts differently"
                problems.append(Refusal("UNSUPPORTED", message, Where(None, name)))
        found.append({**group, PARAMS: list(names)})
    if problems:
        raise gathered(problems)
    return found


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
    groups: dict[str, dict[str, Any]] = {}
    for name, said in settings.items():
        groups.setdefault(repr(sorted(said.items())), {**said, PARAMS: []})[PARAMS].append(name)
    return {**rest, STATE: states, GROUPS: list(groups.values())}


def _flattened(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Inverse of `_nested`."""
    made = {name: value for name, value in nested.items() if name not in (STATE, GROUPS)}
    for name, held in nested[STATE].items():
        made |= {f"{_FLAT_STATE}{name}.{slot}": value for slot, value in held.items()}
    for group in nested[GROUPS]:
        for name in group[PARAMS]:
            made |= {f"{_FLAT_GROUPS}{name}.{key}": value for key, value in group.items() if key != PARAMS}
    return made
