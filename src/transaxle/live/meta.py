"""Meta models: parameters without storage get it shard by shard, just before their values come.

A buffer that no checkpoint holds (rotary frequencies) is computed by the module that owns it; what nobody can fill is
refused, so that nothing uninitialised is left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from transaxle.errors import Refusal, Where
from transaxle.live.leaves import State, leaves, own_name

_INIT = ("reset_parameters", "init_weights")
"""Methods by which modules fill what they own, in the order in which they are tried."""
_MODEL_INIT = "_init_weights"
"""Method of a transformers model that fills one module."""


def unloadable(model: State, loaded: Container[str]) -> list[Refusal]:
    """Return a refusal for every meta tensor that neither the source nor its own module fills.

    Args:
        model: the model; nothing can give storage to the tensors of a state dict.
        loaded: names that the source holds.
    """
    if not isinstance(model, nn.Module):
        message, hint = "it is on the meta device, where nothing can be written", "give the model itself"
        tensors = leaves(model).tensors.items()
        return [Refusal("UNSUPPORTED", message, Where(None, name), hint) for name, each in tensors if each.is_meta]
    problems = []
    for name, owner, tensor, parameter in _meta(model):
        if name in loaded or (not parameter and _initialiser(model, owner) is not None):
            continue
        what = "parameter" if parameter else "buffer"
        message = f"this {what} of shape {list(tensor.shape)} is on the meta device, and nothing gives it values"
        hint = "build the model on a real device, or give the module a method reset_parameters"
        problems.append(Refusal("MISSING_TENSOR", message, Where(None, name), hint))
    return problems


def materialise(model: nn.Module, loaded: Container[str], device: torch.device) -> None:
    """Give every meta tensor of a model storage on a device; those that the source lacks, their initial values.

    Args:
        model: the model; ties stay ties.
        loaded: names that the source holds: their values are left to come.
        device: where plain tensors go; a DTensor goes to the device of its mesh.
    """
    found = list(_meta(model))
    if not found:
        return
    made: dict[int, torch.Tensor] = {}

    def storage(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in made:
            where = torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else device
            made[id(tensor)] = torch.empty_like(tensor, device=where)
        return made[id(tensor)]

    with torch.no_grad():
        model._apply(storage)
        _tie([(owner, name, id(tensor)) for name, owner, tensor, parameter in found if parameter])
        for owner in dict.fromkeys(
            owner for name, owner, _, parameter in found if name not in loaded and not parameter
        ):
            fill = _initialiser(model, owner)
            if fill is not None:
                fill()


def _tie(parameters: Sequence[tuple[nn.Module, str, int]]) -> None:
    """Make parameters one again that were one: giving them storage made a new parameter for each of their names.

    Args:
        parameters: owner, name, and what identifies the parameter as it was.
    """
    first: dict[int, nn.Parameter | None] = {}
    for owner, name, identity in parameters:
        own = name.rpartition(".")[2]
        found = first.setdefault(identity, owner._parameters[own])
        if found is not owner._parameters[own] and not isinstance(found, DTensor):
            owner._parameters[own] = found


def _meta(model: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor, bool]]:
    """Yield (name, owner, tensor, whether it is a parameter) of everything on the meta device."""
    for path, module in model.named_modules():
        for kind, held in ((True, module._parameters), (False, module._buffers)):
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    yield own_name(f"{path}.{name}" if path else name), module, tensor, kind


def _initialiser(model: nn.Module, owner: nn.Module) -> Callable[[], object] | None:
    """Return what fills the tensors of a module; None where there is nothing."""
    for name in _INIT:
        if callable(getattr(owner, name, None)) and (owner is not model):
            found: Callable[[], object] = getattr(owner, name)
            return found
    whole = getattr(model, _MODEL_INIT, None)
    return None if whole is None else lambda: whole(owner)
