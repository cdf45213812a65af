"""Meta models: parameters without storage get it shard by shard, just before their values come.

A buffer that no checkpoint holds (rotary frequencies) is computed by the module that owns it; what nobody can fill is
refused, so that nothing uninitialised is left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from transaxle.axes.notation.name import own_name
from transaxle.errors import Refusal, Where, gathered
from transaxle.live.model.state_tensors import State, leaves
from transaxle.torch_tensors.local_tensor import local_of

_INIT = ("reset_parameters", "init_weights", "_init_self_buffers")
"""Methods by which modules fill what they own, in the order in which they are tried."""
_MODEL_INIT, _MODEL = "_init_weights", "_initialize_weights"
"""Method of a transformers model that fills one module of it, and one that only such models have."""
_FILLED = "_is_hf_initialized"
"""Attribute of tensors that it leaves alone."""
_UNFILLED = 0xA5
"""Byte of buffers that nobody has filled yet."""
Init = Callable[[nn.Module], object]
"""Fills one module of a model."""


def unloadable(model: State, loaded: Container[str]) -> list[Refusal]:
    """Return a refusal for every meta tensor that neither the source nor its own module fills.

    Args:
        model: the model; nothing can give storage to the tensors of a state dict.
        loaded: names that the source holds.
    """
    if not isinstance(model, nn.Module):
        message, hint = (
            "it is on the meta device, which has no memory to write to",
            "Give the model itself, not its state dict.",
        )
        tensors = leaves(model, sharded=True).tensors.items()
        return [Refusal("UNSUPPORTED", message, Where(None, name), hint) for name, each in tensors if each.is_meta]
    problems = []
    known = any(_model_init(module) is not None for module in model.modules())
    for name, owner, tensor, parameter in _meta(model):
        if name in loaded or (not parameter and (known or _own_initialisers(model, owner))):
            continue
        what = "parameter" if parameter else "buffer"
        message = f"this {what} of shape {list(tensor.shape)} is on the meta device, and nothing gives it values"
        hint = "Build the model on a real device, or give the module a method reset_parameters."
        problems.append(Refusal("MISSING_TENSOR", message, Where(None, name), hint))
    return problems


def materialise(model: nn.Module, loaded: Container[str], device: torch.device) -> bool:
    """Give every meta tensor of a model storage on a device; those that the source lacks, their initial values.

    Args:
        model: the model; ties stay ties.
        loaded: names that the source holds: their values are left to come.
        device: where plain tensors go; a DTensor goes to the device of its mesh.

    Returns:
        whether there were any: tensors and parameters of the model are others now.

    Raises:
        Refused: MISSING_TENSOR for a buffer that its module was to fill, and did not.
    """
    on_meta = list(_meta(model))
    if not on_meta:
        return False
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
        _tie([(owner, name, id(tensor)) for name, owner, tensor, parameter in on_meta if parameter])
        buffers: dict[nn.Module, list[str]] = {}
        for name, owner, _, parameter in on_meta:
            if name not in loaded and not parameter:
                buffers.setdefault(owner, []).append(name)
        problems = list(_fill(model, buffers)) if buffers else []
    if problems:
        raise gathered(problems)
    return True


def _fill(model: nn.Module, buffers: Mapping[nn.Module, Sequence[str]]) -> Iterator[Refusal]:
    """Let modules fill their buffers, given by name; yield a refusal for each that is as it was before."""
    anew = [_buffer(owner, name) for owner, names in buffers.items() for name in names]
    for buffer in anew:
        local_of(buffer).reshape(-1).view(torch.uint8).fill_(_UNFILLED)
    with _protected(model, {id(buffer) for buffer in anew}):
        _initialise(model, None, buffers)
    for owner, names in buffers.items():
        left = [name for name in names if _is_unfilled(_buffer(owner, name))]
        for fill in _own_initialisers(model, owner):
            if left:
                fill()
                left = [name for name in left if _is_unfilled(_buffer(owner, name))]
        for name in left:
            message = "this buffer is on the meta device, and its module's own initialisation does not give it values"
            yield Refusal("MISSING_TENSOR", message, Where(None, name), "Build the model on a real device.")


@contextmanager
def _protected(model: nn.Module, anew: Container[int]) -> Iterator[None]:
    """Keep models of transformers from filling anything but some tensors, which are given by identity.

    Values of parameters come from the source; to fill those of one rank's part, ranks may have to wait for others that
    have none of it to fill.
    """
    tensors = chain(model.parameters(), model.buffers())
    kept = [each for each in tensors if id(each) not in anew and not hasattr(each, _FILLED)]
    for tensor in kept:
        setattr(tensor, _FILLED, True)
    try:
        yield
    finally:
        for tensor in kept:
            delattr(tensor, _FILLED)


def _initialise(module: nn.Module, init: Init | None, owners: Container[nn.Module]) -> bool:
    """Fill some modules and what they are in as transformers does: innermost first, by the model that each belongs to.

    Args:
        module: the model, or a part of it.
        init: what fills modules of the model that it belongs to.
        owners: the modules.

    Returns:
        whether any of them is in `module`.
    """
    init = _model_init(module) or init
    holds = module in owners
    for child in module.children():
        holds = _initialise(child, init, owners) or holds
    if holds and init is not None:
        init(module)
    return holds


def _model_init(module: nn.Module) -> Init | None:
    """Return what fills the modules of a model of transformers; None of any other module."""
    return getattr(module, _MODEL_INIT, None) if hasattr(module, _MODEL) else None


def _buffer(owner: nn.Module, name: str) -> torch.Tensor:
    """Return a module's buffer, given by its full name."""
    buffer = owner._buffers[name.rpartition(".")[2]]
    assert buffer is not None
    return buffer


def _is_unfilled(buffer: torch.Tensor) -> bool:
    return buffer.numel() > 0 and bool((local_of(buffer).reshape(-1).view(torch.uint8) == _UNFILLED).all())


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


def _own_initialisers(model: nn.Module, owner: nn.Module) -> list[Callable[[], object]]:
    """Return a module's own methods that may fill its buffers; one that knows only its base class may leave some out.

    Those of the whole model would fill its parameters, too.
    """
    own = [getattr(owner, name, None) for name in _INIT] if owner is not model else []
    return [each for each in own if callable(each)]
