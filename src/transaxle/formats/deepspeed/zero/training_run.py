"""Facts about the training run: counters, versions, and the optimizer's settings by parameter name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.checked_value import CheckedValue
from transaxle.formats.deepspeed.zero.ranks import RankModel, RankState, plain
from transaxle.formats.pickled.descriptors import NOTHING, Object
from transaxle.formats.training_state.state_groups import plain as plain_setting

CLASS, FIELDS = "class", "fields"
CLIENT = "client_state"
DEGREES = "degrees"

_COUNTERS = (keys.GLOBAL_STEPS, keys.GLOBAL_SAMPLES, keys.SKIPPED_STEPS, keys.DP_WORLD, keys.MP_WORLD, keys.VERSION)
_GLOBALS = (keys.DYNAMIC_SCALE, keys.OVERFLOW, keys.CLIP)
_OWN = frozenset({
    *_COUNTERS, keys.MODULE, keys.BUFFER_NAMES, keys.OPTIMIZER, keys.PARAM_SHAPES, keys.FROZEN_SHAPES,
    keys.FROZEN_FRAGMENTS, keys.SHARED, keys.DIMENSIONS, keys.SCHEDULER, keys.NUM_EXPERTS, keys.INFO,
    *keys.EXPERT_LAYERS, "data_sampler", "random_ltd", keys.CONFIG,
})  # fmt: skip


def run_of(model: RankModel, settings: CheckedValue | None) -> dict[str, Any]:
    """Return the facts in the files of a run, as plain data.

    Args:
        model: the model file of the first rank.
        settings: the first optimizer state; None if there is none.
    """
    facts: dict[str, Any] = {}
    for key in (*_COUNTERS, keys.SCHEDULER):
        node = model.root.get(key)
        if node is not None:
            facts[key] = plain(node)
    client = {key: plain(node) for key, node in model.root.named() if key not in _OWN}
    if client:
        facts[CLIENT] = client
    if settings is not None:
        for key in _GLOBALS:
            node = settings.get(key)
            if node is not None:
                facts[key] = plain(node)
        scaler = settings.get(keys.LOSS_SCALER)
        if scaler is not None and isinstance(scaler.value, Object):
            state = scaler.value.state
            fields = plain(CheckedValue(state, scaler.file)) if isinstance(state, dict) else {}
            facts[keys.LOSS_SCALER] = {CLASS: str(scaler.value.cls), FIELDS: fields}
    return facts


def state_groups(states: Sequence[Sequence[RankState]], models: Sequence[RankModel]) -> list[dict[str, Any]]:
    """Return the optimizer's groups: settings, and the names of their parameters.

    Args:
        states: per model rank, its optimizer files.
        models: per model rank, its first model file.
    """
    groups = []
    for number, (indices, settings) in enumerate(states[0][0].settings):
        wanted = indices if states[0][0].stage == 3 else (number,)
        groups.append(_group(settings, wanted, models))
    return groups


def groups_of(settings: Sequence[CheckedValue], models: Sequence[RankModel]) -> list[dict[str, Any]]:
    """Return the groups of a universal checkpoint; empty ones that only fill the list are left out."""
    groups = [
        _group(group_settings, _indices(group_settings, number), models)
        for number, group_settings in enumerate(settings)
    ]
    return [group for group in groups if len(group) > 1 or group[keys.PARAMS]]


def _indices(settings: CheckedValue, number: int) -> tuple[int, ...]:
    """Return the numbers of a group's sub-groups; without ZeRO-3 it is one of its own."""
    listed = settings.get(keys.PARAMS)
    return (number,) if listed is None else listed.naturals()


def _group(settings: CheckedValue, indices: Sequence[int], models: Sequence[RankModel]) -> dict[str, Any]:
    names: dict[str, None] = {}
    for model in models:
        for index in indices:
            if index < len(model.shapes):
                names |= dict.fromkeys(model.shapes[index])
    settings_kept = {key: plain_setting(node.value) for key, node in settings.named() if key != keys.PARAMS}
    settings_kept = {key: value for key, value in settings_kept.items() if value is not NOTHING}
    return {**settings_kept, keys.PARAMS: list(names)}
