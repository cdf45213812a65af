"""What is saved: tensors of a model and its optimizers, by name, and everything else that a run must remember."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from transaxle.engine.checkpoint.settings import model_config
from transaxle.engine.plan.conversion import for_hub
from transaxle.errors import gathered
from transaxle.formats.training_state.state_groups import ParamGroup
from transaxle.live.model.live_config import shared_config
from transaxle.live.model.published_codes import published
from transaxle.live.model.state_tensors import Leaves, State, leaves, unsavable
from transaxle.live.save.save_request import SaveRequest, SaveSettings, check_alike, contents, wait_for
from transaxle.live.sharding.global_tensors import Census, census
from transaxle.live.training.extra_state import EXTRA, FILE, MODEL, STATE, state_of, written
from transaxle.live.training.group_options import all_groups, groups_of
from transaxle.live.training.optimizer_state import as_tensor, by_name, states_of, untrained
from transaxle.live.training.optimizers import AnyOptimizer
from transaxle.live.transport.world import World
from transaxle.torch_tensors.placement import local_parts


@dataclass(frozen=True)
class CollectedState:
    """What is saved, as all ranks hold it together."""

    own: Mapping[str, torch.Tensor]
    """This rank's tensors, by the names of the parts (`local_parts`); their local parts will do."""
    global_tensors: Census
    """The tensors of all ranks."""
    groups: Sequence[ParamGroup]
    """The optimizers' groups, by the names of the parameters."""
    files: Mapping[str, bytes]
    """Files that travel along."""


@dataclass(frozen=True)
class _Training:
    """What this rank's optimizers hold."""

    states: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Their state by name."""
    groups: Sequence[ParamGroup] = ()
    """Their groups, by the names of the parameters."""
    untrained: tuple[str, ...] = ()
    """Parameters that have gradients and belong to none of them."""


def collect(asked: Callable[[], SaveRequest], world: World) -> tuple[SaveSettings, CollectedState]:
    """Find out what all ranks hold, and what is to be done with it; collective.

    Args:
        asked: returns what this rank is asked for; where it raises, the other ranks do not wait for this one.
        world: the ranks.

    Raises:
        TypeError: an argument that there is not, or of a type that it cannot have.
        TransaxleError: on every rank.
    """
    with world.together():
        request = asked()
        settings, given_config = request.settings(None), model_config(request.config)
        read = contents(settings, given_config)
        wait_for(settings.dst)
        leaves_of_state = leaves(request.state, sharded=True)
        if problems := unsavable(leaves_of_state.tensors):
            raise gathered(problems)
        training = _training(request.optimizer, leaves_of_state)
        numbers, others = _numbers(request.state, leaves_of_state.others)
        own = {**leaves_of_state.tensors, **training.states, **numbers}
        owner = MODEL if isinstance(request.state, nn.Module) else STATE
        extra_states = {f"{owner}/{name}": value for name, value in others.items()}
        extra_states |= {f"{EXTRA}/{name}": state_of(each) for name, each in (request.extra or {}).items()}
    check_alike(settings, read, world)
    extra_file = written(extra_states, world)
    global_tensors, config = census(own, world), shared_config(request.state, given_config, world)
    settings = replace(request.settings(config), untrained=training.untrained, left=leaves_of_state.untouched)
    if for_hub(request.to):
        of_hub = published(own, global_tensors, leaves_of_state.weights, config, world)
        own, global_tensors = dict(of_hub.tensors), of_hub.everything
        settings = replace(settings, config=of_hub.config, left=(*of_hub.left, *settings.left))
    files = {} if extra_file is None else {FILE: extra_file}
    groups = all_groups(training.groups, world) if settings.optimizer else []
    parts = {part: tensor for _, part, tensor in local_parts(own)}
    return settings, CollectedState(parts, global_tensors, groups, files)


def _training(optimizer: AnyOptimizer | None, own: Leaves) -> _Training:
    """Return what this rank's optimizers hold; nothing where none is given."""
    if optimizer is None:
        return _Training()
    optimizers, parameters = by_name(optimizer, own)
    groups = groups_of(optimizers, parameters)
    return _Training(states_of(optimizers, parameters), groups, untrained(parameters, own.parameters))


def _numbers(state: State, others: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Divide entries that are no tensors into numbers, which are saved as tensors without dims, and the rest."""
    if isinstance(state, nn.Module):
        return {}, dict(others)
    tensors = {name: as_tensor(value) for name, value in others.items()}
    numbers = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return numbers, {name: value for name, value in others.items() if name not in numbers}
