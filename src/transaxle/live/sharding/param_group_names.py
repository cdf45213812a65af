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

from transaxle.axes.translation.grouped import numbered
from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.training_state.state_groups import GROUPS, PARAMS

_LISTED = re.compile(rf"(?:.*\.)?{GROUPS}")
"""Flat name of all groups."""
_NAMES = re.compile(rf"((?:.*\.)?{GROUPS})\.[0-9]+\.{PARAMS}")
"""Flat name of the parameters of one group, where some setting is a tensor; what stands before its number."""
_ONE = re.compile(rf"((?:.*\.)?{GROUPS}\.)(.+)(\.[^.]+)")
"""Flat name of one setting of one parameter."""
_HINT = "build the optimizer with the groups that the source has"


class Renamed:
    """What is read of the settings in a state dict, and what is then made of it.

    Args:
        given: values of a state dict that are no tensors, by flat name.
        stored: flat names of the checkpoint.
    """

    def __init__(self, given: Mapping[str, Any], stored: Collection[str]) -> None:
        self._given = given
        self._sources = _sources([name for name in given if name not in stored], stored)
        asked = {source: given[name] for name, sources in self._sources.items() for source in sources}
        self.asked: dict[str, Any] = {n: value for n, value in given.items() if n not in self._sources} | asked
        """What is to be read."""

    def made(self, read: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was read by the names of the state dict.

        Args:
            read: values by the names of `asked`.

        Raises:
            Refused: UNSUPPORTED for experts that are one parameter here, and were trained with different settings.
        """
        problems: list[Refusal] = []
        made = {name: value for name, value in read.items() if name in self._given}
        for name, sources in self._sources.items():
            made[name] = read[sources[0]]
            other = next((source for source in sources if repr(read[source]) != repr(made[name])), None)
            if other is not None:
                message = f"{sources[0]} is {made[name]!r} and {other} is {read[other]!r}; here they are one"
                problems.append(Refusal("UNSUPPORTED", message, Where(None, name), _HINT))
        apart: dict[str, list[str]] = defaultdict(list)
        for name, value in made.items():
            split = _NAMES.fullmatch(name)
            if split is not None:
                apart[split[1]].append(name)
            elif _LISTED.fullmatch(name) and _are_groups(value) and _are_groups(self._given[name]):
                own = [group[PARAMS] for group in self._given[name]]
                names = _renamed(own, [group[PARAMS] for group in value], problems)
                made[name] = [{**group, PARAMS: each} for group, each in zip(value, names, strict=True)]
        for lists in apart.values():
            own, names = [self._given[name] for name in lists], [made[name] for name in lists]
            if all(map(_are_names, (*own, *names))):
                made |= zip(lists, _renamed(own, names, problems), strict=True)
        if problems:
            raise gathered(problems)
        return made


def _sources(lacking: Iterable[str], stored: Iterable[str]) -> dict[str, list[str]]:
    """Return for settings of parameters that the checkpoint has not those of the same experts in the other form."""
    theirs: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)
    for name in stored:
        split = _ONE.fullmatch(name)
        if split is not None:
            theirs[split[1], _whole(split[2]), split[3]][split[2]] = name
    found = {}
    for name in lacking:
        split = _ONE.fullmatch(name)
        there = theirs.get((split[1], _whole(split[2]), split[3])) if split is not None else None
        if there:
            found[name] = list(there.values())
    return found


def _are_groups(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) and _are_names(one.get(PARAMS)) for one in value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _whole(parameter: str) -> str:
    """Return what the one parameter is called of which this is an expert; its own name where it is none."""
    split = numbered(parameter)
    return parameter if split is None or split[2] else split[0]


def _renamed(own: Sequence[Sequence[str]], stored: Sequence[Sequence[str]], problems: list[Refusal]) -> list[list[str]]:
    """Return the names of parameters of stored groups, where experts are called what an optimizer calls them.

    Args:
        own: names of the optimizer's groups.
        stored: names of the checkpoint's.
        problems: receives UNSUPPORTED for a parameter that is of several groups.
    """
    numbers = {name: number for number, names in enumerate(stored) for name in names}
    parts: dict[str, dict[int, str]] = defaultdict(dict)
    for name, number in numbers.items():
        parts[_whole(name)].setdefault(number, name)
    mine = dict.fromkeys(name for names in own for name in names)
    taken = {_whole(name) for name in mine if name not in numbers}
    found = [[name for name in names if name in mine or _whole(name) not in taken] for names in stored]
    for name in mine:
        groups = parts.get(_whole(name), {}) if name not in numbers else {}
        if len(groups) > 1:
            message = f"{' and '.join(groups.values())} were trained with different settings; here they are one"
            problems.append(Refusal("UNSUPPORTED", message, Where(None, name), _HINT))
        for number in list(groups)[:1]:
            found[number].append(name)
    return found
