"""One nested state dict of a whole checkpoint: the model, the optimizer's state, and what is saved beside them.

      {"model": {name: tensor}, "optimizer": {"state": {parameter: {state: tensor}}, "param_groups": [...]}, ...}

`state.arrange` reads the same names from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from transaxle.errors import refuse
from transaxle.formats.training_state.state import OPTIMIZER, KeyPath
from transaxle.formats.training_state.state_groups import GROUPS, PARAMS, ParamGroup

_OPTIMIZER, _STATE = "optimizer", "state"
_NUMBER = re.compile(r"#(\d+)")


class Nesting(msgspec.Struct, frozen=True):
    """Where a nested state dict has the tensors that are not an optimizer's."""

    root: str | None = None
    """Container of the model; None: its tensors are at the top."""
    paths: Mapping[str, KeyPath] = msgspec.field(default_factory=dict)
    """Name -> path of every tensor that is nested elsewhere."""

    def path(self, name: str) -> KeyPath:
        """Return the path of a tensor."""
        optimizer = optimizer_path(name)
        if optimizer is not None:
            return optimizer
        return self.paths.get(name) or ((name,) if self.root is None else (self.root, name))


def optimizer_path(name: str) -> KeyPath | None:
    """Return the path of `optim/<parameter>/<state>`; None for any other name."""
    parameter, _, state = name.removeprefix(OPTIMIZER).rpartition("/")
    if not name.startswith(OPTIMIZER) or not parameter or not state:
        return None
    return (_OPTIMIZER, _STATE, as_numbered(parameter), state)


def group_path(number: int, setting: str) -> KeyPath:
    """Return the path of a group's setting."""
    return (_OPTIMIZER, GROUPS, number, setting)


def as_numbered(parameter: str) -> str | int:
    """Return a parameter as torch lists it: by its name, or by its number if it has none."""
    number = _NUMBER.fullmatch(parameter)
    return int(number[1]) if number else parameter


def listed(groups: Sequence[ParamGroup]) -> list[dict[str, Any]]:
    """Return groups as torch lists them, see `as_numbered`."""
    return [{**group, PARAMS: [as_numbered(parameter) for parameter in group[PARAMS]]} for group in groups]


def nested(values: Mapping[str, object], nesting: Nesting, groups: Sequence[Mapping[str, object]]) -> dict[Any, Any]:
    """Return one nested state dict.

    Args:
        values: by name.
        nesting: where those are that are not the optimizer's.
        groups: settings of the optimizer.

    Raises:
        Refused: NAME_COLLISION where one of them would be inside another, or in its place.
    """
    top: dict[Any, Any] = {}
    containers: dict[KeyPath, dict[Any, Any]] = {(): top}
    for name, value in values.items():
        path = nesting.path(name)
        for depth in range(1, len(path)):
            if path[:depth] not in containers and path[depth - 1] not in containers[path[: depth - 1]]:
                containers[path[: depth - 1]][path[depth - 1]] = containers[path[:depth]] = {}
        inner = containers.get(path[:-1])
        if inner is None or path[-1] in inner:
            message = f"its place in a nested state dict is {list(path)}, and another tensor is in the way"
            raise refuse("NAME_COLLISION", message, tensor=name, hint="Write a folder: it has a file for each.")
        inner[path[-1]] = value
    for path in sorted(containers, key=len, reverse=True):
        container = containers[path]
        if path and path[0] != _OPTIMIZER and list(container) == list(range(len(container))):
            containers[path[:-1]][path[-1]] = list(container.values())
    if groups:
        top.setdefault(_OPTIMIZER, {})[GROUPS] = list(groups)
    return top
