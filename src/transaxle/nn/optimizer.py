"""Optimizer state of grouped parameters: moments follow their parameters from N names to one tensor and back.

Works on state dicts by parameter names, as `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` gives
them. `transaxle.load(..., optimizer=...)` and the DCP planners need none of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from transaxle.axes.bind import WEIGHT, join_slot, split_slot
from transaxle.axes.grouped import Stem, regrouped
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.nn.grouped_linear import GroupedLinear
from transaxle.nn.mover import Entry, described, move
from transaxle.nn.remap import remapped_stems

STATE, GROUPS, PARAMS = "state", "param_groups", "params"
"""Keys of torch's optimizer state dicts."""


def optimizer_state_as(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return an optimizer's state dict under the names of a model whose grouped layers may be of the other form.

    Args:
        state: `{"state": {parameter: {"exp_avg": tensor, …}}, "param_groups": [{"params": [names], …}]}`; it is left
            as it is.
        model: the model that it is for.

    Returns:
        A new dict. Numbers that N parameters have (a step) must be equal to become one.

    Raises:
        Refused: UNEQUAL_COPIES for numbers that differ; INCOMPLETE, SHAPE_MISMATCH for another set of experts;
            UNSUPPORTED for experts that are trained with different settings.
    """
    states = {name: dict(held) for name, held in state[STATE].items()}
    renamed: dict[str, list[str]] = {}
    trained = {name for group in state.get(GROUPS, []) for name in group[PARAMS]} | states.keys()
    for path, module in model.named_modules():
        if isinstance(module, GroupedLinear):
            layer, prefix = module.layer(), f"{path}." if path else ""
            for stem in remapped_stems(trained, prefix, layer):
                _move(states, stem, layer.shapes[stem.name.removeprefix(prefix)], renamed)
    return {**state, STATE: states, GROUPS: _groups(state.get(GROUPS, []), renamed)}


def _move(states: dict[str, dict[str, Any]], stem: Stem, shape: tuple[int, ...], renamed: dict[str, list[str]]) -> None:
    """Bring the states of one stem's parameters, where they have any yet, into the other form."""
    names, others = [stem.single], [stem.member(place) for place in range(stem.count)]
    names, others = (names, others) if stem.stored else (others, names)
    renamed.update(dict.fromkeys(names, others))
    lacking = [name for name in names if not states.get(name)]
    if len(lacking) == len(names):
        for name in names:
            states.pop(name, None)
        return
    if lacking:
        raise refuse("INCOMPLETE", f"{', '.join(lacking)} have no state, the others have", tensor=stem.single)
    taken = {
        join_slot(name, slot): value if isinstance(value, torch.Tensor) else torch.tensor(value)
        for name in names
        for slot, value in states[name].items()
    }
    own = (stem.count, *shape) if stem.stored else shape
    entries = described(taken) | {name: Entry("", own) for name in names}
    found = regrouped([stem], entries)
    targets = {name: one for name, one in found.targets.items() if split_slot(name)[1] != WEIGHT}
    made = move(found, taken, targets)
    numbers = {slot for name in names for slot, value in states[name].items() if not isinstance(value, torch.Tensor)}
    for name in names:
        del states[name]
    for name, value in made.items():
        parameter, slot = split_slot(name)
        kept = value if value.dim() else value.clone()  # optimizers count up in place: each parameter has its own step
        states.setdefault(parameter, {})[slot] = kept.item() if slot in numbers else kept


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
