"""Filling a model: where loaded bytes go once it has memory, and what its modules and optimizers make of them.

Between the two, the bytes are read. Whatever changes the model by more than bytes happens after the last of them came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from transaxle.axes.layout.bind import join_slot
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.errors import gathered
from transaxle.live.derived.settle import settle, untaken
from transaxle.live.load.load_plan import LoadPlan, leaves_for, read_into
from transaxle.live.model.matching import left_out
from transaxle.live.model.meta import materialise
from transaxle.live.model.quantized_model import stand_in
from transaxle.live.model.state_tensors import Leaves, State
from transaxle.live.tensors.destination import Landing, overlapping
from transaxle.live.training.group_options import restore
from transaxle.live.training.optimizer_state import follow, install, rooms_for
from transaxle.quant.modules.entries import begin_anew, put_values
from transaxle.quant.modules.masters import MASTER, MasterWeights
from transaxle.torch_tensors.local_tensor import local_of
from transaxle.torch_tensors.placement import ShardGrid, local_parts


@dataclass(frozen=True)
class Destinations:
    """Where loaded bytes go on this rank."""

    own: Leaves
    """What the model holds, with memory."""
    landings: Mapping[str, Landing]
    """For each tensor that is read, or part of one (`local_parts`), where its bytes go."""
    names: Mapping[str, str]
    """For each of them, the tensor that it is a part of."""
    values: Mapping[str, torch.Tensor]
    """Values of quantized parameters that are quantized here, by the parameters' names."""
    parameters: Mapping[str, torch.Tensor]
    """The optimizers' parameters by name."""
    states: Mapping[str, torch.Tensor]
    """The optimizers' state by name."""


def destinations(plan: LoadPlan, state: State, checkpoint: Checkpoint, device: torch.device | None) -> Destinations:
    """Give a model memory, and return where the bytes go.

    Args:
        plan: the load.
        state: model or state dict.
        checkpoint: the source under its stored names.
        device: where plain meta tensors go; None: the current GPU, or the CPU where there is none.

    Raises:
        Refused: UNSUPPORTED, MISSING_TENSOR for modules that do not load what their state dict shows.
    """
    if isinstance(state, nn.Module):
        materialise(state, plan.stored.keys() | plan.filled_by_modules, device or _default_device())
    own = leaves_for(state, checkpoint)
    untried = [island for island in own.islands if island.path in plan.untried]
    if untried:
        problems, omitted = untaken(untried)
        if problems or omitted:
            raise gathered([*problems, *left_out(omitted)])
    values = {
        name: stand_in(own.weights[name], code, meta=False)
        for name, code in plan.quantized.anew.items()
        if name in own.weights
    }
    parameters: dict[str, torch.Tensor] = {}
    states: dict[str, torch.Tensor] = {}
    if plan.optimizers is not None:
        parameters = {name: own.parameters[name] for name in plan.parameters}
        follow(plan.optimizers, plan.parameters, parameters)
        states = rooms_for(plan.optimizers, parameters, plan.stored)
    filled = {**read_into(own, plan.quantized), **values, **states}
    wanted = {name: tensor for name, tensor in filled.items() if name in plan.wanted}
    shapes = {name: plan.stored[name].shape for name in wanted}
    parts = list(local_parts(wanted, shapes))
    shared = overlapping({part: tensor for _, part, tensor in parts})
    landings = {part: Landing(tensor, plan.stored[name].dtype, apart=part in shared) for name, part, tensor in parts}
    names = {part: name for name, part, _ in parts}
    return Destinations(own, landings, names, values, parameters, states)


def _default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def finish(plan: LoadPlan, filled: Destinations) -> int:
    """Make of loaded bytes what modules and optimizers need: codes, derived entries, settings, extra state.

    Args:
        plan: the load.
        filled: where the bytes went.

    Returns:
        bytes written into this rank's tensors.

    Raises:
        Refused: UNSUPPORTED where a module does not take the values that it was given.
    """
    own, landings = filled.own, filled.landings
    written = sum(landing.written for name, landing in landings.items() if name not in filled.values)
    written += sum(put_values(own.weights[name], local_of(values)) for name, values in filled.values.items())
    for name in plan.quantized.begins:
        if name in own.weights:
            begin_anew(own.weights[name])
    if own.islands:
        settle(own.islands, own.tensors)
    for name in plan.padded.keys() & own.tensors.keys():
        grid = own.tensors[name]
        assert isinstance(grid, ShardGrid)  # no other tensor may be longer than what fills it
        grid.clear_beyond(plan.stored[name].shape)
    for factory in own.factories:
        factory.finish()
    with torch.no_grad():
        for name in own.copies.keys() & landings.keys():
            for copy in own.copies[name]:
                copy.copy_(own.tensors[name])
    if plan.optimizers is not None:
        restore(plan.optimizers, plan.settings)
        install(plan.optimizers, filled.parameters, filled.states)
        for optimizer in plan.optimizers.members:
            if isinstance(optimizer, MasterWeights):
                _restart(optimizer, filled)
    plan.beside.install()
    return written


def _restart(masters: MasterWeights, filled: Destinations) -> None:
    """Begin master weights that the source lacks with the values that were loaded."""
    weights = filled.own.weights
    lacking = [name for name in weights if join_slot(name, MASTER) not in filled.states]
    values = {weights[name]: local_of(filled.values[name]) for name in lacking if name in filled.values}
    masters.restart({**{weights[name]: None for name in lacking}, **values})
