"""Parameter groups: an optimizer's settings, with the names of the parameters that they apply to.

Every format keeps them in its own way; here they are plain data, under one key of a container's metadata:

      ck.metadata["param_groups"] == [{"lr": 0.001, "betas": (0.9, 0.95), "params": ["model.norm.weight", ...]}, ...]
  |A setting keeps its type: numbers, texts, None, and tuples, lists and dicts of them stay as they are; a number with a
      dtype of its own (a tensor without dims, a numpy number) is a numpy scalar. Parameters have the names of their
      state, `optim/<parameter>/<state>`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

from transaxle.formats.catalog import BITS, Entry, code_of, is_scalar, scalar
from transaxle.formats.pickled.descriptors import NOTHING, Scalar
from transaxle.formats.storage.storage import Storage
from transaxle.formats.strict_json import parsed

ParamGroup = Mapping[str, Any]
"""Settings of one group, and its parameters' names under `PARAMS`."""

GROUPS = "param_groups"
"""Key of a container's metadata, and of the list of groups in torch's own states."""
PARAMS, NAMES = "params", "param_names"
KEPT = "optim/param_groups"
"""Key for groups in formats that have no place for them: beside the tensors, or in a header."""
_DEEPEST, _MOST = 8, 1_000_000
"""Caps on the depth of a setting, and on its values."""
_TUPLE, _DICT, _FLOAT, _TYPED = "tuple", "dict", "float", "dtype"
_VALUE = "hex"


def plain(value: object) -> object:
    """Return a setting as plain data; `NOTHING` if a group cannot hold it, or it exceeds the caps."""
    return _plain(value, _DEEPEST, [_MOST])


def _plain(value: object, depth: int, budget: list[int]) -> object:
    budget[0] -= 1
    if depth < 0 or budget[0] < 0:
        return NOTHING
    if value is None or type(value) in (bool, int, float, str) or is_scalar(value):
        return value
    if type(value) is Scalar:
        return scalar(value.data, value.code)
    if type(value) in (list, tuple):
        items = []
        for item in value:  # type: ignore[attr-defined]
            items.append(_plain(item, depth - 1, budget))
            if items[-1] is NOTHING:
                break  # a list that is shared again and again has no end
        return NOTHING if any(item is NOTHING for item in items) else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, dict):
        pairs = {key: _plain(item, depth - 1, budget) for key, item in value.items() if budget[0] >= 0}
        odd = any(type(key) is not str or item is NOTHING for key, item in pairs.items())
        return NOTHING if odd or len(pairs) < len(value) else pairs
    return NOTHING


def single(storage: Storage, entry: Entry) -> object:
    """Return a stored tensor without dims as a numpy scalar; `NOTHING` for any other tensor."""
    if entry.shape or entry.dtype not in BITS or len(entry.extents) != 1:
        return NOTHING
    (extent,) = entry.extents
    return scalar(storage.read(extent.file, extent.offset, entry.nbytes), entry.dtype)


def groups_of_equal_settings(settings: Mapping[str, Mapping[str, Any]]) -> list[ParamGroup]:
    """Return groups from settings given by parameter: parameters with equal settings form a group.

    Args:
        settings: parameter -> its settings.

    Post-condition: groups and parameters are in the order in which they first appear.
    """
    by_settings: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for parameter, parameter_settings in settings.items():
        by_settings.setdefault(repr(sorted(parameter_settings.items())), (parameter_settings, []))[1].append(parameter)
    return [{**parameter_settings, PARAMS: parameters} for parameter_settings, parameters in by_settings.values()]


def settings_of(group: ParamGroup) -> dict[str, Any]:
    """Return a group's settings without its parameters."""
    return {key: value for key, value in group.items() if key not in (PARAMS, NAMES)}


def group_numbers(groups: Iterable[ParamGroup]) -> dict[str, int]:
    """Return the number of the group that each parameter is in: parameters of one group have the same settings."""
    return {name: number for number, group in enumerate(groups) for name in group[PARAMS]}


def renamed(groups: Iterable[ParamGroup], names: Mapping[str, Sequence[str]]) -> list[ParamGroup]:
    """Return groups with renamed parameters; duplicates are dropped, and a name without a new one stays."""
    return [
        {**group, PARAMS: list(dict.fromkeys(new for old in group[PARAMS] for new in names.get(old, (old,))))}
        for group in groups
    ]


def encode(groups: Iterable[ParamGroup]) -> str:
    """Return groups as JSON; values that JSON cannot express are tagged.  Inverse: `decode`."""
    return json.dumps([{key: _tagged(value) for key, value in group.items()} for group in groups], allow_nan=False)


def decode(text: str) -> list[ParamGroup] | None:
    """Read what `encode` returned; None for any other text."""
    try:
        listed = parsed(text)
        groups = [{key: _untagged(value) for key, value in group.items()} for group in listed]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError):
        return None
    return list[ParamGroup](groups) if all(_is_group(group) for group in groups) else None


def _is_group(group: ParamGroup) -> bool:
    names = group.get(PARAMS)
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _tagged(value: Any) -> Any:
    if is_scalar(value):
        return {_TYPED: code_of(value.dtype), _VALUE: value.tobytes().hex()}
    if isinstance(value, tuple):
        return {_TUPLE: [_tagged(item) for item in value]}
    if isinstance(value, dict):
        return {_DICT: {key: _tagged(item) for key, item in value.items()}}
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    return {_FLOAT: repr(value)} if isinstance(value, float) and not isfinite(value) else value


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(_untagged(item) for item in value[_TUPLE])
    if _DICT in value:
        return {key: _untagged(item) for key, item in value[_DICT].items()}
    if _FLOAT in value:
        return float(value[_FLOAT])
    return scalar(bytes.fromhex(value[_VALUE]), value[_TYPED])
