"""Settings of the optimizer's parameter groups: where a folder has them, and which parameters each is for.

Megatron does not store which parameters are in a group. It forms groups by what their settings say: experts that are
not on every rank, weight decay or none, which vectors and biases have, and another learning rate for embeddings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from transaxle.axes.layout.bind import split_slot
from transaxle.formats.catalog import Container
from transaxle.formats.megatron.arguments_of_run import RunState, plain_data
from transaxle.formats.megatron.flat_buckets.parameter_order import has_experts, has_layers
from transaxle.formats.megatron.flat_buckets.stored_buckets import Objects
from transaxle.formats.training_state.state import OPTIMIZER
from transaxle.formats.training_state.state_groups import GROUPS, PARAMS, ParamGroup

SETTINGS = "optimizer"
"""What groups of data-parallel ranks, and the state beside the tensors, call the settings."""
_LISTED = "param_groups"
_DECAY, _EXPERTS, _DECOUPLED = "wd_mult", "is_expert_parallel", "is_decoupled_lr"
_KINDS = ("lr_mult", "pre_lr_mult", "pre_wd_mult", _DECAY, _EXPERTS, _DECOUPLED)
_OWN = frozenset({*_KINDS, "default_config"})
"""Settings by which Megatron forms groups, which mean nothing to other programs."""
_BIAS = ".bias"
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_HEAD_NORMS = (".q_layernorm.", ".k_layernorm.")


def with_settings(state: RunState, objects: Objects) -> tuple[RunState, list[str]]:
    """Return the state of a run with the settings that groups of data-parallel ranks have each for itself.

    Args:
        state: beside the tensors.
        objects: what the groups have, see `flat_buckets.stored_buckets`.

    Returns:
        the state, and what contradicts each other.
    """
    found: dict[int, dict[str, Any]] = {}
    problems: list[str] = []
    for (chain, group, what), value in sorted(objects.items()):
        settings = plain_data(value)
        if what != SETTINGS or not isinstance(settings, dict) or not isinstance(settings.get(_LISTED), list):
            continue
        known = found.setdefault(chain, {**settings, _LISTED: []})[_LISTED]
        new = [each for each in settings[_LISTED] if each not in known]
        if any(_kind(each) == _kind(other) for each in new for other in known):
            problems.append(f"the optimizer of group {group} of ranks has other settings than those before it")
        known.extend(new)
    if not found:
        return state, problems
    chained = {str(chain): {SETTINGS: settings} for chain, settings in found.items()}
    optimizer = chained if len(chained) > 1 else next(iter(chained.values()))
    return replace(state, facts={**state.facts, SETTINGS: optimizer}), problems


def _kind(group: object) -> object:
    """Return by what Megatron tells a group from others."""
    return [group.get(key) for key in _KINDS] if isinstance(group, Mapping) else group


def with_groups(container: Container, state: RunState) -> Container:
    """Return a container whose metadata have the optimizer's settings by parameter, where these can be told."""
    groups = _named(container, state)
    return container if not groups else replace(container, metadata={**container.metadata, GROUPS: groups})


def _named(container: Container, state: RunState) -> list[ParamGroup]:
    """Return the groups with the names of their parameters; none where it is not known which is in which."""
    groups = list(settings_of_groups(state.facts.get(SETTINGS)))
    parameters = dict.fromkeys(
        parameter for name in container.entries if name.startswith(OPTIMIZER) for parameter in split_slot(name)[:1]
    )
    names: list[list[str]] = [[] for _ in groups]
    for name in parameters:
        entry = container.entries.get(name)
        if entry is None:
            return []
        dims = len(entry.shape) - has_layers(name) - has_experts(name)
        fitting = _fitting(name, dims, groups, state.args)
        if len(fitting) != 1:
            return []
        names[fitting[0]].append(name)
    return [
        {**{key: _torch_value(key, value) for key, value in group.items() if key not in _OWN}, PARAMS: listed}
        for group, listed in zip(groups, names, strict=True)
        if listed
    ]


def settings_of_groups(optimizer: object) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of all groups of an optimizer, which may be a chain of several."""
    if isinstance(optimizer, Mapping):
        listed = optimizer.get(_LISTED)
        inner: Iterable[Any] = listed if isinstance(listed, list) else ()
        yield from (group for group in inner if isinstance(group, Mapping))
        if not isinstance(listed, list):
            for value in optimizer.values():
                yield from settings_of_groups(value)


def _fitting(name: str, dims: int, groups: Sequence[Mapping[str, Any]], args: Mapping[str, Any]) -> list[int]:
    """Return the numbers of the groups that a parameter may be in."""
    of_experts = has_experts(name) and any(group.get(_EXPERTS) for group in groups)
    found = [number for number, group in enumerate(groups) if bool(group.get(_EXPERTS)) == of_experts]
    if any(groups[number].get(_DECOUPLED) for number in found):
        decoupled = name in _VOCABULARY
        found = [number for number in found if bool(groups[number].get(_DECOUPLED)) == decoupled]
    if len(found) < 2:
        return found
    bare = dims < 2 or name.endswith(_BIAS)
    if args.get("apply_wd_to_qk_layernorm") and any(norm in name for norm in _HEAD_NORMS):
        bare = False
    return [number for number in found if (groups[number].get(_DECAY) == 0) == bare]


def _torch_value(key: str, value: Any) -> Any:
    return tuple(value) if key == "betas" and isinstance(value, list) else value
