"""Adapters: a PEFT model wraps a base model, and inserts name segments such as `base_layer` into the names of the
base's tensors.

A checkpoint of the base model is loaded into the base weights, and the adapters are not changed. The files of an
adapter are loaded into the active adapter; PEFT's own functions return the names of an adapter's tensors in files. A
checkpoint of the whole PEFT model is loaded under the PEFT model's own names, as for a model without adapters.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from transaxle.axes.notation.name import own_name
from transaxle.errors import Refusal, Where
from transaxle.live.derived import persistent
from transaxle.live.model.state_tensors import Leaves
from transaxle.torch_tensors import unwrap

_PEFT, _MODEL, _TUNER, _WRAPPER = "peft", "PeftModel", "BaseTunerLayer", "AuxiliaryTrainingWrapper"
_BASE, _COPIES = "base_layer", "modules_to_save"
_INSIDE, _WHOLE = "base_model.model.", "base_model."
"""Prefixes of the base model's tensor names: in a model with a tuner (such as LoRA), and in a model for prompt
learning, which has no tuner.
"""
_UNMERGE = "Call unmerge_adapter() first."


def peft_model_of(state: object) -> Any:
    """Return the PEFT model that the user passed as the argument `state`; None if that is no PEFT model."""
    model = unwrap(state) if isinstance(state, nn.Module) else state
    return model if _is(model, _MODEL) else None


def tuners(model: nn.Module) -> list[Any]:
    """Return the modules that an adapter has put in place of modules of the base model, or around them."""
    return [module for module in model.modules() if _is(module, _TUNER)]


def is_active(model: nn.Module, copy: torch.Tensor) -> bool:
    """Return whether a trained copy of a base weight belongs to the active adapter."""
    wrappers: list[Any] = [module for module in model.modules() if _is(module, _WRAPPER)]
    copies = [getattr(wrapper, _COPIES, {}) for wrapper in wrappers]
    active = (
        each[name]
        for each, wrapper in zip(copies, wrappers, strict=True)
        for name in wrapper.active_adapters
        if name in each
    )
    return any(copy is parameter for module in active for parameter in module.parameters())


def leaves_of_checkpoint(model: nn.Module, state_leaves: Leaves, names: Collection[str], *, adapter: bool) -> Leaves:
    """Return the tensors of a PEFT model that a checkpoint fills (base or adapter), under the checkpoint's tensor
    names.

    Args:
        model: the PEFT model; see `peft_model_of`.
        state_leaves: all tensors of the model.
        names: names of the checkpoint's tensors.
        adapter: whether the checkpoint consists of the files of an adapter.
    """
    below = _base_places(model, state_leaves.tensors)
    adapter_names = state_leaves.tensors.keys() - {
        name for name, base_name in below.items() if base_name == (name, False)
    }
    if adapter and below.keys() >= adapter_names.intersection(names):  # peft stores some weights of the base model too
        adapter_names = set()
    if adapter_names.intersection(names):
        return state_leaves
    if adapter:
        in_files, problems = _in_files(model, names)
        return _restrict(state_leaves, in_files, {}, problems)
    tensors: dict[str, torch.Tensor] = {}
    copies: dict[str, tuple[torch.Tensor, ...]] = {}
    for name, (base, copy) in below.items():
        tensor = state_leaves.tensors[name]
        if not copy and tensors.setdefault(base, tensor) is tensor:
            continue
        copies[base] = (*copies.get(base, ()), tensor)
    return _restrict(state_leaves, tensors, copies, list(_find_merged(model)))


def _restrict(
    state_leaves: Leaves,
    tensors: Mapping[str, torch.Tensor],
    copies: Mapping[str, tuple[torch.Tensor, ...]],
    problems: list[Refusal],
) -> Leaves:
    included = {id(tensor) for tensor in (*tensors.values(), *(copy for some in copies.values() for copy in some))}
    weight_names = {id(weight): name for name, weight in state_leaves.weights.items()}
    message = "a PEFT model with this tensor can only be loaded from a checkpoint of the whole model"
    unsupported = [
        *(custom_module.path for custom_module in state_leaves.custom_modules),
        *state_leaves.non_tensors,
        *weight_names.values(),
    ]
    problems = [*problems, *(Refusal("UNSUPPORTED", message, Where(None, name)) for name in unsupported)]
    untouched = tuple(name for name, tensor in state_leaves.tensors.items() if id(tensor) not in included)
    return replace(
        state_leaves, tensors=tensors, copies=copies, untouched=untouched, refusals=(*state_leaves.refusals, *problems)
    )


def base_names(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Return name in the PEFT model -> name in the plain base model, without trained copies of base weights.

    Args:
        model: the PEFT model; see `peft_model_of`.
        names: tensor names in the PEFT model.
    """
    return {name: base for name, (base, copy) in _base_places(model, names).items() if not copy}


def _base_places(model: nn.Module, names: Collection[str]) -> dict[str, tuple[str, bool]]:
    """Return name of a base weight in the PEFT model -> its name in the plain base model, and whether it is a trained
    copy.
    """
    kinds = {own_name(path): kind for path, kind in _kinds(model)}
    prefix = _WHOLE if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False) else _INSIDE
    base_names = {}
    for name in names:
        base_name = _place(name, kinds) if name.startswith(prefix) else None
        if base_name is not None:
            base_names[name] = (base_name[0].removeprefix(prefix), base_name[1])
    return base_names


def _kinds(model: nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in model.named_modules():
        for kind in (_TUNER, _WRAPPER):
            if _is(module, kind):
                yield path, kind


def _place(name: str, kinds: Mapping[str, str]) -> tuple[str, bool] | None:
    """Return a name without adapter segments, and whether it is a trained copy; None for a tensor of the adapter
    itself.
    """
    parts, base_parts, copy, position = name.split("."), list[str](), False, 0
    while position < len(parts):
        kind, part = kinds.get(".".join(parts[:position])), parts[position]
        if kind == _TUNER and part != _BASE:
            return None
        if kind == _WRAPPER and part == _COPIES:
            copy, position = True, position + 2
        elif kind is not None:
            position += 1
        else:
            base_parts.append(part)
            position += 1
    return ".".join(base_parts), copy


def _in_files(model: Any, names: Collection[str]) -> tuple[dict[str, torch.Tensor], list[Refusal]]:
    """Return name in PEFT's files -> tensor, for the tensors of the active adapter.

    The files of an adapter may also contain base weights (changed embeddings and heads, or a resized vocabulary), which
    PEFT loads in place of the model's weights. The result includes these base weights.
    """
    active = model.active_adapter
    problems: list[Refusal] = []
    if not isinstance(active, str):
        return {}, [
            Refusal(
                "AMBIGUOUS",
                f"several adapters are active: {active}",
                Where(),
                ("Call set_adapter() with the name of one adapter."),
            )
        ]
    state = model.state_dict(keep_vars=True)
    get_adapter_tensors = sys.modules[_PEFT].get_peft_model_state_dict
    tensors = get_adapter_tensors(model, state_dict=state, adapter_name=active, save_embedding_layers=False)
    model_tensors = {id(tensor) for _, tensor in persistent(model)}
    created = [name for name, tensor in tensors.items() if id(tensor) not in model_tensors]
    message = "peft creates it only in its files; the model has no such tensor"
    problems += (Refusal("UNSUPPORTED", message, Where(None, name), "Use peft's load_adapter.") for name in created)
    in_files = {own_name(name): tensor for name, tensor in tensors.items()}
    whole = {own_name(name): tensor for name, tensor in state.items()}
    for name in sorted(set(names) - in_files.keys()):
        # PEFT's files also contain the trained copy under the name of the module that was copied.
        trained = name.replace(f".{_COPIES}.", ".")
        tensor = whole.get(name) if trained == name else in_files.get(trained)
        if tensor is not None:
            in_files[name] = tensor
    return in_files, problems


def _find_merged(model: nn.Module) -> Iterator[Refusal]:
    for path, module in model.named_modules():
        if _is(module, _TUNER) and getattr(module, "merged", False) is True:
            message = "its adapter is merged, and unmerging it later would change the loaded weights"
            yield Refusal("UNSUPPORTED", message, Where(None, own_name(path)), _UNMERGE)


def _is(candidate: object, name: str) -> bool:
    return any(kind.__name__ == name and kind.__module__.startswith(f"{_PEFT}.") for kind in type(candidate).__mro__)
