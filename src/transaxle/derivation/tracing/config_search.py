"""Searching for a tiny config: where small sizes do not fit each other, as many of them as the model takes.

It starts with the config that the model has, which fits, and takes over changes: all of them, or else half of them and
then the other half, down to single keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from transaxle.derivation.tracing.tiny_configs import kind

Path = tuple[str, ...]
Change = tuple[Path, object]
Builds = Callable[[Mapping[str, Any]], bool]
_GONE = object()
"""The value of a key that is taken away."""


def nearest(base: Mapping[str, Any], goals: Sequence[Mapping[str, Any]], builds: Builds) -> dict[str, Any] | None:
    """Return a config that builds, as near to the goals as can be found; None where the one to start with does not.

    Args:
        base: the config to start with.
        goals: configs, the most wanted first; where one is not taken over, the next one counts.
        builds: tells whether a model has such a config.
    """
    config = dict(base)
    if not builds(config):
        return None
    for goal in goals:
        units: dict[str, list[Change]] = {}
        for path, value in _changes(config, base, goal):
            units.setdefault(kind(path[-1], value), []).append((path, value))
        config = _taken(config, sorted(units.values(), key=_is_late), builds)
    return config


def _is_late(unit: Sequence[Change]) -> bool:
    """Sort numbers of layers first: with few of them, models are built in a moment."""
    path, value = unit[0]
    return kind(path[-1], value) != "layers"


def _changes(config: Mapping[str, Any], base: Mapping[str, Any], goal: Mapping[str, Any]) -> Iterator[Change]:
    """Yield what is different in a goal, of the keys that are still as they were."""
    for key in (*config, *(key for key in goal if key not in config)):
        now, before, then = config.get(key, _GONE), base.get(key, _GONE), goal.get(key, _GONE)
        if isinstance(now, Mapping) and isinstance(before, Mapping) and isinstance(then, Mapping):
            yield from (((key, *path), value) for path, value in _changes(now, before, then))
        elif now is before and now != then:
            yield (key,), then


def _taken(config: dict[str, Any], units: Sequence[Sequence[Change]], builds: Builds) -> dict[str, Any]:
    """Return a config with as many units of changes as it can have."""
    if not units:
        return config
    changed = _changed(config, [change for unit in units for change in unit])
    if builds(changed):
        return changed
    if len(units) == 1:
        if len(units[0]) == 1:
            return config
        units = [[change] for change in units[0]]
    half = len(units) // 2
    return _taken(_taken(config, units[:half], builds), units[half:], builds)


def _changed(config: Mapping[str, Any], changes: Sequence[Change]) -> dict[str, Any]:
    made = dict(config)
    for path, value in changes:
        inside = made
        for key in path[:-1]:
            inside[key] = inside = dict(inside[key])
        if value is _GONE:
            inside.pop(path[-1], None)
        else:
            inside[path[-1]] = value
    return made
