"""Flattens nested state dicts of pickles into a list of leaves (values with key paths), and nests leaves again.

The function that walks through a state dict does not recurse, detects containers that contain themselves, and limits
the number of leaves: a few bytes of pickle can describe a billion leaves by sharing one list many times.

A whole checkpoint is one nested state dict with the model, the optimizer's state, and further values:

      {"model": {name: tensor}, "optimizer": {"state": {parameter: {state: tensor}}, "param_groups": [...]}, ...}

`training_state.arrange` names the leaves of a nested state dict.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from transaxle.errors import refuse
from transaxle.formats.catalog import number
from transaxle.formats.pickled.allowed import TENSORS
from transaxle.formats.pickled.descriptors import Global, Object, OrderedMap, Quantized, Scalar, TensorRef
from transaxle.formats.training_state import GROUPS, OPTIMIZER, PARAMS, KeyPath, Leaf, ParamGroup

_MAX_ITEMS = 2_000_000
"""Maximum number of leaves and containers (dicts, lists, tuples) in one state dict."""
_MAX_PATH_LENGTHS = 12_000_000
"""Maximum of the total number of keys in all key paths."""
_DEEPEST = 100
_LONGEST = 4096
_ALONE = "tensor"
"""Name of a tensor that was saved without a dict around it."""
_CONTAINERS = (dict, OrderedMap, list, tuple)


class Odd(str):
    """Stand-in, in a key path, for a dict key that is neither a string nor an integer."""

    __slots__ = ()


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor, including kinds of tensors that cannot be read."""
    if type(value) is TensorRef or type(value) is Quantized:
        return True
    if type(value) is not Object:
        return False
    return (value.cls.module, value.cls.name) in TENSORS or any(type(arg) is TensorRef for arg in value.args)


def flatten(value: object, file: str) -> list[Leaf]:
    """Return the leaves of an unpickled value, in the order of the value.

    The leaves inside dicts, lists and tuples are listed one by one. An empty dict counts as one leaf, and so does a
    list or tuple that contains neither tensors nor dicts, lists or tuples.

    Args:
        value: an unpickled value, made of plain values and tensor descriptors.
        file: name of the pickle file, for error messages.

    Raises:
        Refused: with the code CORRUPT for a container that contains itself, for too deep nesting, and for more leaves
            than any real file has.
    """
    if is_tensor(value):
        return [Leaf((_ALONE,), "tensor", value)]
    return list(_Walk(file).leaves(value))


class _Walk:
    """One walk through a nested value, with the limits that remain and the lists already examined."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._items_left = _MAX_ITEMS
        self._lengths_left = _MAX_PATH_LENGTHS
        self._plain: dict[int, bool] = {}

    def leaves(self, top: Any) -> Iterator[Leaf]:
        inside = {id(top)}
        walks: list[tuple[KeyPath, Any, Iterator[tuple[str | int, Any]]]] = [((), top, self._items(top))]
        while walks:
            path, container, items = walks[-1]
            item = next(items, None)
            if item is None:
                inside.discard(id(container))
                walks.pop()
                continue
            self._items_left -= 1
            self._lengths_left -= len(walks)
            if self._items_left < 0 or self._lengths_left < 0:
                raise refuse("CORRUPT", f"it has more than {_MAX_ITEMS} items", file=self._file)
            key, value = item
            item_path = (*path, key)
            if type(value) not in _CONTAINERS or self._is_leaf(value):
                yield _leaf(item_path, value)
                continue
            if id(value) in inside:
                raise refuse("CORRUPT", f"{_show_path(item_path)} contains itself", file=self._file)
            if len(item_path) > _DEEPEST:
                raise refuse("CORRUPT", f"it is nested more than {_DEEPEST} levels deep", file=self._file)
            if not value and isinstance(value, dict):
                yield Leaf(item_path, "empty", {}, "an empty dict")
                continue
            inside.add(id(value))
            walks.append((item_path, value, self._items(value)))

    def _items(self, container: Any) -> Iterator[tuple[str | int, Any]]:
        if isinstance(container, dict):
            return ((self._key(key), value) for key, value in container.items())
        return enumerate(container) if isinstance(container, list | tuple) else iter(())

    def _key(self, key: object) -> str | int:
        if type(key) is int:
            return key
        if type(key) is not str:
            return Odd(f"<{type(key).__name__}>")
        if len(key) > _LONGEST:
            raise refuse("CORRUPT", f"a key has {len(key)} characters", file=self._file)
        return key

    def _is_leaf(self, value: Any) -> bool:
        """Return whether a dict, list or tuple counts as one leaf; a list that occurs several times is examined only
        once.
        """
        if isinstance(value, dict):
            return False
        is_plain = self._plain.get(id(value))
        if is_plain is None:
            is_plain = not any(type(item) in _CONTAINERS or is_tensor(item) for item in value)
            self._plain[id(value)] = is_plain
        return is_plain


def _leaf(path: KeyPath, value: Any) -> Leaf:
    if is_tensor(value):
        return Leaf(path, "tensor", value)
    if type(value) is Scalar or (type(value) in (int, float, bool) and number(value) is not None):
        return Leaf(path, "number", value)
    return Leaf(path, "other", value, describe(value))


def describe(value: object) -> str:
    """Return a description, for messages, of a value that is neither a tensor nor a number."""
    if type(value) is Object:
        return str(value.cls)
    if type(value) is Quantized:
        return f"a {value.kind}"
    if type(value) is Global:
        return f"the name {value}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    return "None" if value is None else type(value).__name__


def _show_path(path: KeyPath) -> str:
    return repr(list(path))[:_LONGEST]


_OPTIMIZER, _STATE = "optimizer", "state"
_NUMBER = re.compile(r"#(\d+)")


class Nesting(msgspec.Struct, frozen=True):
    """Key paths of the tensors in a nested state dict, except those of an optimizer."""

    root: str | None = None
    """Key of the model's dict at the top level; None means that the model's tensors are themselves at the top level."""
    paths: Mapping[str, KeyPath] = msgspec.field(default_factory=dict)
    """Tensor name -> key path, for each tensor outside the model's dict."""

    def path(self, name: str) -> KeyPath:
        """Return the key path of a tensor in the nested dict."""
        optimizer = optimizer_path(name)
        if optimizer is not None:
            return optimizer
        return self.paths.get(name) or ((name,) if self.root is None else (self.root, name))


def optimizer_path(name: str) -> KeyPath | None:
    """Return the key path of a tensor named `optim/<parameter>/<state>`; None for a tensor with any other name."""
    parameter, _, state = name.removeprefix(OPTIMIZER).rpartition("/")
    if not name.startswith(OPTIMIZER) or not parameter or not state:
        return None
    return (_OPTIMIZER, _STATE, as_numbered(parameter), state)


def group_path(number: int, setting: str) -> KeyPath:
    """Return the key path of a setting of an optimizer's parameter group."""
    return (_OPTIMIZER, GROUPS, number, setting)


def as_numbered(parameter: str) -> str | int:
    """Return the number `n` for a parameter named `#n`; any other name is returned unchanged."""
    number = _NUMBER.fullmatch(parameter)
    return int(number[1]) if number else parameter


def list_groups(groups: Sequence[ParamGroup]) -> list[dict[str, Any]]:
    """Return parameter groups as torch lists them, in which unnamed parameters are listed by number; see
    `as_numbered`.
    """
    return [{**group, PARAMS: [as_numbered(parameter) for parameter in group[PARAMS]]} for group in groups]


def nest_state(
    values: Mapping[str, object], nesting: Nesting, groups: Sequence[Mapping[str, object]]
) -> dict[Any, Any]:
    """Nest tensors and optimizer settings in one state dict.

    Args:
        values: tensor name -> value.
        nesting: key paths of all tensors that are not optimizer state.
        groups: parameter groups of the optimizer.

    Raises:
        Refused: with the code NAME_COLLISION if two tensors have one key path, or one tensor's path begins with that of
            another tensor.
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
            raise refuse(
                "NAME_COLLISION",
                message,
                tensor=name,
                hint="Convert to a folder, in which each tensor has a flat name.",
            )
        inner[path[-1]] = value
    for path in sorted(containers, key=len, reverse=True):
        container = containers[path]
        if path and path[0] != _OPTIMIZER and list(container) == list(range(len(container))):
            containers[path[:-1]][path[-1]] = list(container.values())
    if groups:
        top.setdefault(_OPTIMIZER, {})[GROUPS] = list(groups)
    return top
