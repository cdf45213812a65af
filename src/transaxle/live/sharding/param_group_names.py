"""Settings of an optimizer in torch's checkpoints, which call its parameters by name: experts in the model's own form.

    {"param_groups": [{"lr": 0.1, "params": ["fc1.weight0", "fc1.weight1"]}]}       one value for all groups
    {"param_groups.fc1.weight0.lr": 0.1, "param_groups.fc1.weight1.lr": 0.1}        one for each parameter, flattened

torch gives a group the settings of the one that has a parameter of the same name, and none where there is none.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from transaxle.axes.translation.grouped import stack_name
from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.training_state.state_groups import GROUPS, PARAMS, ParamGroup, group_numbers, renamed

_LISTED = re.compile(rf"(?:.*\.)?{GROUPS}")
"""Flat name of all groups."""
_NAMES = re.compile(rf"((?:.*\.)?{GROUPS})\.[0-9]+\.{PARAMS}")
"""Flat name of the parameters of one group, where some setting is a tensor; what stands before its number."""
_ONE = re.compile(rf"((?:.*\.)?{GROUPS}\.)(.+)(\.[^.]+)")
"""Flat name of one setting of one parameter."""
_HINT = "Build the optimizer with the groups that the source has."


class ParamGroupNames:
    """Which settings of a checkpoint are read, and what they become under the names of a state dict.

    Args:
        given: values of a state dict that are no tensors, by flat name.
        stored: flat names of the checkpoint.
    """

    def __init__(self, given: Mapping[str, Any], stored: Collection[str]) -> None:
        self._given = given
        self._sources = _sources([name for name in given if name not in stored], stored)
        read_instead = {source: given[name] for name, sources in self._sources.items() for source in sources}
        self.asked: dict[str, Any] = {n: value for n, value in given.items() if n not in self._sources} | read_instead
        """What is to be read."""

    def restored(self, read: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was read by the names of the state dict.

        Args:
            read: values by the names of `asked`.

        Raises:
            Refused: UNSUPPORTED for experts that are one parameter here, and were trained with different settings.
        """
        problems: list[Refusal] = []
        values = {name: value for name, value in read.items() if name in self._given}
        for name, sources in self._sources.items():
            values[name] = read[sources[0]]
            other = next((source for source in sources if repr(read[source]) != repr(values[name])), None)
            if other is not None:
                message = (
                    f"{sources[0]} is {values[name]!r} and {other} is {read[other]!r}, but here they are one parameter"
                )
                problems.append(Refusal("UNSUPPORTED", message, Where(None, name), _HINT))
        lists: dict[str, list[str]] = defaultdict(list)
        for name, value in values.items():
            split = _NAMES.fullmatch(name)
            if split is not None:
                lists[split[1]].append(name)
            elif _LISTED.fullmatch(name) and _are_groups(value) and _are_groups(self._given[name]):
                values[name] = _renamed(self._given[name], value, problems)
        for names in lists.values():
            own, stored = ([{PARAMS: side[name]} for name in names] for side in (self._given, values))
            if _are_groups(own) and _are_groups(stored):
                groups = _renamed(own, stored, problems)
                values |= {name: group[PARAMS] for name, group in zip(names, groups, strict=True)}
        if problems:
            raise gathered(problems)
        return values


def _sources(lacking: Iterable[str], stored: Iterable[str]) -> dict[str, list[str]]:
    """Return for settings of parameters that the checkpoint lacks those of the same experts in the other form."""
    by_stack: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name in stored:
        if (setting := _of_stack(name)) is not None:
            by_stack[setting].append(name)
    settings = {name: setting for name in lacking if (setting := _of_stack(name)) is not None}
    return {name: by_stack[setting] for name, setting in settings.items() if setting in by_stack}


def _of_stack(name: str) -> tuple[str, str, str] | None:
    """Return the flat name of one parameter's setting in three parts, an expert's under the name of the stack."""
    split = _ONE.fullmatch(name)
    return None if split is None else (split[1], stack_name(split[2]), split[3])


def _are_groups(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(group, dict) and _are_names(group.get(PARAMS)) for group in value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _renamed(own: Iterable[ParamGroup], stored: Sequence[ParamGroup], problems: list[Refusal]) -> list[ParamGroup]:
    """Return the stored groups, with experts under the names that the optimizer has for them.

    Args:
        own: groups of the optimizer.
        stored: groups of the checkpoint.
        problems: receives UNSUPPORTED for a parameter that would be of several groups.
    """
    group_of = group_numbers(stored)
    by_stack: dict[str, list[str]] = defaultdict(list)
    for name in group_of:
        by_stack[stack_name(name)].append(name)
    own_names = dict.fromkeys(name for group in own for name in group[PARAMS])
    new_names: dict[str, list[str]] = {}
    for name in own_names:
        sources = by_stack.get(stack_name(name), []) if name not in group_of else []
        first_of = {group_of[source]: source for source in reversed(sources)}
        if len(first_of) > 1:
            shown = " and ".join(first_of[number] for number in dict.fromkeys(map(group_of.__getitem__, sources)))
            message = f"{shown} were trained with different settings, but here they are one parameter"
            problems.append(Refusal("UNSUPPORTED", message, Where(None, name), _HINT))
        for source in sources:
            new_names.setdefault(source, [source] if source in own_names else []).append(name)
    return renamed(stored, new_names)
