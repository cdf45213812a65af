"""Optimizer state by parameter name: `optim/<parameter>/<state>`, the names that every container uses.

Nothing is paired by position. State that an optimizer has not made yet (it makes it in its first step) is made here,
in the shape and placement of its parameter.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from transaxle.axes.bind import join_slot, split_slot
from transaxle.engine.checkpoint import Checkpoint, StoredTensor
from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.company import STATE_FOLDER
from transaxle.live.dtype import torch_dtype
from transaxle.live.part import mark, part_of, whole_shape
from transaxle.quant.masters import MASTER, MasterWeights

_PARAMS = "params"
_ON_DEVICE = ("capturable", "fused")
"""Settings of a group under which its counters live on the parameters' device."""
_TOO_EARLY = "make the optimizer of this model's parameters, after fully_shard or parallelize_module has replaced them"
_NUMBERS: Mapping[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""Python's numbers, and the types of the tensors that stand for them."""


def names_of(optimizer: Optimizer, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the optimizer's parameters by name.

    Args:
        optimizer: any torch optimizer.
        tensors: the model's tensors by name.

    Raises:
        Refused: UNEXPECTED_TENSOR for a parameter that the model does not have.
    """
    by_identity = {id(tensor): name for name, tensor in reversed(list(tensors.items()))}
    found: dict[str, torch.Tensor] = {}
    problems = []
    for group, number, parameter in _parameters(optimizer):
        name = by_identity.get(id(parameter))
        if name is None:
            message = f"parameter {number} of its group {group}, of shape {list(parameter.shape)}, is none of the model"
            problems.append(Refusal("UNEXPECTED_TENSOR", message, Where(None, f"optimizer group {group}"), _TOO_EARLY))
        else:
            found[name] = parameter
    if problems:
        raise gathered(problems)
    return found


def _parameters(optimizer: Optimizer) -> Iterator[tuple[int, int, torch.Tensor]]:
    for group, settings in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(settings[_PARAMS]):
            yield group, number, parameter


def states_of(optimizer: Optimizer, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the optimizer's state as tensors by name; a Python number becomes a tensor of no dims, None nothing.

    Args:
        optimizer: any torch optimizer.
        named: its parameters by name, see `names_of`.

    Raises:
        Refused: UNSUPPORTED for state that is neither tensor nor number.
    """
    found, problems = {}, []
    states = optimizer.states if isinstance(optimizer, MasterWeights) else optimizer.state
    for name, parameter in named.items():
        for key, value in states.get(parameter, {}).items():
            full = join_slot(name, key)
            held = value if isinstance(value, torch.Tensor) else as_tensor(value)
            if held is not None and held.dim() and part_of(parameter) is not None and held.shape != parameter.shape:
                message = (
                    f"it has the shape {list(held.shape)}, and its parameter, {list(parameter.shape)} here, is cut"
                )
                problems.append(Refusal("UNSUPPORTED", message, Where(None, full)))
            elif held is not None:
                found[full] = mark(held, part_of(parameter)) if held.dim() else held
            elif value is not None:
                message = f"it is a {type(value).__name__}, neither a tensor nor a number"
                problems.append(Refusal("UNSUPPORTED", message, Where(None, full)))
    if problems:
        raise gathered(problems)
    return found


def unrestored(optimizer: Optimizer, named: Mapping[str, torch.Tensor], stored: Container[str]) -> tuple[str, ...]:
    """Return the names of state that an optimizer has made and a source lacks: after a load it would be stale."""
    return tuple(n for n in states_of(optimizer, named) if n not in stored and split_slot(n)[1] != MASTER)


def taken_away(checkpoint: Checkpoint) -> list[Refusal]:
    """Refuse a source that was written with an optimizer's state whose files are missing now.

    One that never had any is a model, from which a new optimizer starts.
    """
    container, manifest = checkpoint.container, checkpoint.manifest
    if manifest is None or any(split_slot(name)[1] for name in (*container.entries, *container.left)):
        return []
    message = "the checkpoint was written with it, and it is missing"
    hint = "copy it; strict=False, or no optimizer=, loads the model alone"
    files = [file for file in manifest.files if file.startswith(f"{STATE_FOLDER}/")]
    return [Refusal("INCOMPLETE", message, Where(file), hint) for file in files]


def doubled(
    named: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]
) -> set[str]:
    """Return names of state that a source has under another name of a tied parameter beside the optimizer's.

    Args:
        named: the optimizer's parameters by name.
        parameters: the model's; a tied one has several names.
        stored: the source's tensors by the model's names.
    """
    first = {id(parameter): name for name, parameter in named.items()}
    others = {name: first[id(p)] for name, p in parameters.items() if name not in named and id(p) in first}
    slots = ((full, *split_slot(full)) for full in stored)
    return {full for full, name, key in slots if key and name in others and join_slot(others[name], key) in stored}


def as_tensor(value: object) -> torch.Tensor | None:
    """Return a Python number as a tensor of no dims; None for anything else, and for what 64 bits do not hold."""
    kind = _NUMBERS.get(type(value))
    if kind is None or (isinstance(value, int) and not -(1 << 63) <= value < 1 << 63):
        return None
    return torch.tensor(value, dtype=kind)


def rooms_for(
    optimizer: Optimizer, named: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]
) -> dict[str, torch.Tensor]:
    """Return tensors for the state that a source holds: those the optimizer has, new ones where it has none.

    Args:
        optimizer: any torch optimizer.
        named: its parameters by name.
        stored: the source's tensors by the model's names.
    """
    on_device = {
        id(parameter)
        for group in optimizer.param_groups
        for parameter in group[_PARAMS]
        if any(group.get(setting) for setting in _ON_DEVICE)
    }
    found = {}
    for full, source in stored.items():
        name, key = split_slot(full)
        parameter = named.get(name)
        if not key or parameter is None:
            continue
        present = optimizer.state.get(parameter, {}).get(key)
        if isinstance(present, torch.Tensor) and not present.is_meta:
            found[full] = mark(present, part_of(parameter)) if present.dim() else present
        elif source.shape == whole_shape(parameter) and source.shape:
            made = torch.zeros_like(parameter, dtype=torch_dtype(source.dtype, tensor=full), requires_grad=False)
            found[full] = mark(made, part_of(parameter))
        else:
            where = parameter.device if id(parameter) in on_device else torch.device("cpu")
            found[full] = torch.zeros(source.shape, dtype=torch_dtype(source.dtype, tensor=full), device=where)
    return found


def follow(optimizer: Optimizer, named: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Let an optimizer follow parameters that were replaced: materialising a meta model makes new ones.

    Args:
        optimizer: any torch optimizer.
        named: its parameters by name, as they were.
        tensors: the model's tensors by name, as they are.
    """
    replaced = {id(old): tensors[name] for name, old in named.items() if tensors[name] is not old}
    for group in optimizer.param_groups:
        group[_PARAMS] = [replaced.get(id(parameter), parameter) for parameter in group[_PARAMS]]


def install(optimizer: Optimizer, named: Mapping[str, torch.Tensor], states: Mapping[str, torch.Tensor]) -> None:
    """Put loaded state into the optimizer; where it keeps a Python number, a number.

    What has no dims and a type that only Python's numbers are stored with becomes one, where the optimizer has no state
    yet; it is asked in the end to make of it what it needs.
    """
    numbers = {kind for kind in _NUMBERS.values() if kind != torch.get_default_dtype()}
    for full, value in states.items():
        name, key = split_slot(full)
        state: dict[str, Any] = optimizer.state[named[name]]
        old = state.get(key)
        is_number = type(old) in _NUMBERS if key in state and old is not None else value.dtype in numbers
        state[key] = value.item() if is_number and not value.dim() else value
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
