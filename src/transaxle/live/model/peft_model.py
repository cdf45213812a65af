"""Adapters: a model of peft has the weights of its base below modules of its own, under other names.

A checkpoint of the base reaches these weights, and the adapters stay as they are. The files of an adapter reach the
adapter that is active; what its tensors are called in files is asked of peft itself. A state dict of the whole is
loaded under its own names, as that of any model.
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
"""Where the base is: below a tuner, or, for adapters that are prompts, in the place of one."""
_UNMERGE = "Call unmerge_adapter() first."


def adapted(state: object) -> Any:
    """Return the model of peft that a state is; None for any other."""
    model = unwrap(state) if isinstance(state, nn.Module) else state
    return model if _is(model, _MODEL) else None


def tuners(model: nn.Module) -> list[Any]:
    """Return the modules of a model of peft that an adapter changes."""
    return [module for module in model.modules() if _is(module, _TUNER)]


def is_active(model: nn.Module, copy: torch.Tensor) -> bool:
    """Tell whether a copy of a base's weight is that of the active adapter."""
    wrappers: list[Any] = [module for module in model.modules() if _is(module, _WRAPPER)]
    copies = [getattr(wrapper, _COPIES, {}) for wrapper in wrappers]
    active = (
        each[name]
        for each, wrapper in zip(copies, wrappers, strict=True)
        for name in wrapper.active_adapters
        if name in each
    )
    return any(copy is parameter for module in active for parameter in module.parameters())


def seen_by(model: nn.Module, found: Leaves, names: Collection[str], *, adapter: bool) -> Leaves:
    """Return the part of a model of peft that a checkpoint is for, under the checkpoint's names.

    Args:
        model: the model, see `adapted`.
        found: all that it holds.
        names: of the checkpoint's tensors.
        adapter: whether it is the files of an adapter.
    """
    below = _below(model, found.tensors)
    own = found.tensors.keys() - {name for name, place in below.items() if place == (name, False)}
    if adapter and below.keys() >= own.intersection(names):  # peft stores some weights of the base too
        own = set()
    if own.intersection(names):
        return found
    if adapter:
        in_files, problems = _in_files(model, names)
        return _narrowed(found, in_files, {}, problems)
    tensors: dict[str, torch.Tensor] = {}
    copies: dict[str, tuple[torch.Tensor, ...]] = {}
    for name, (base, copy) in below.items():
        tensor = found.tensors[name]
        if not copy and tensors.setdefault(base, tensor) is tensor:
            continue
        copies[base] = (*copies.get(base, ()), tensor)
    return _narrowed(found, tensors, copies, list(_merged(model)))


def _narrowed(
    found: Leaves,
    tensors: Mapping[str, torch.Tensor],
    copies: Mapping[str, tuple[torch.Tensor, ...]],
    problems: list[Refusal],
) -> Leaves:
    taken = {id(tensor) for tensor in (*tensors.values(), *(each for some in copies.values() for each in some))}
    held = {id(weight): name for name, weight in found.weights.items()}
    message = "a PEFT model with this tensor can only be loaded from a checkpoint of the whole model"
    odd = [*(island.path for island in found.islands), *found.others, *held.values()]
    problems = [*problems, *(Refusal("UNSUPPORTED", message, Where(None, name)) for name in odd)]
    untouched = tuple(name for name, tensor in found.tensors.items() if id(tensor) not in taken)
    return replace(found, tensors=tensors, copies=copies, untouched=untouched, kept=(*found.kept, *problems))


def base_names(model: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Return what a plain model calls the weights of the base; copies that are trained have no such name.

    Args:
        model: the model, see `adapted`.
        names: of what it holds.
    """
    return {name: base for name, (base, copy) in _below(model, names).items() if not copy}


def _below(model: nn.Module, names: Collection[str]) -> dict[str, tuple[str, bool]]:
    """Return, for the names of what belongs to the base, the base's own, and whether it is a copy that is trained."""
    kinds = {own_name(path): kind for path, kind in _kinds(model)}
    prefix = _WHOLE if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False) else _INSIDE
    found = {}
    for name in names:
        place = _place(name, kinds) if name.startswith(prefix) else None
        if place is not None:
            found[name] = (place[0].removeprefix(prefix), place[1])
    return found


def _kinds(model: nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in model.named_modules():
        for kind in (_TUNER, _WRAPPER):
            if _is(module, kind):
                yield path, kind


def _place(name: str, kinds: Mapping[str, str]) -> tuple[str, bool] | None:
    """Return a name without what adapters put into it, and whether it is a copy; None for what is an adapter's."""
    parts, kept, copy, at = name.split("."), list[str](), False, 0
    while at < len(parts):
        kind, part = kinds.get(".".join(parts[:at])), parts[at]
        if kind == _TUNER and part != _BASE:
            return None
        if kind == _WRAPPER and part == _COPIES:
            copy, at = True, at + 2
        elif kind is not None:
            at += 1
        else:
            kept.append(part)
            at += 1
    return ".".join(kept), copy


def _in_files(model: Any, names: Collection[str]) -> tuple[dict[str, torch.Tensor], list[Refusal]]:
    """Return the tensors of the active adapter by the names that peft's own files have.

    With them go weights of the base that files have too (of embeddings and heads that are changed, or of a vocabulary
    that was resized): peft loads them over those of the model.
    """
    active = model.active_adapter
    problems: list[Refusal] = []
    if not isinstance(active, str):
        return {}, [
            Refusal(
                "AMBIGUOUS", f"several adapters are active: {active}", Where(), "Call set_adapter() with one of them."
            )
        ]
    state = model.state_dict(keep_vars=True)
    written = sys.modules[_PEFT].get_peft_model_state_dict
    tensors = written(model, state_dict=state, adapter_name=active, save_embedding_layers=False)
    own = {id(tensor) for _, tensor in persistent(model)}
    made = [name for name, tensor in tensors.items() if id(tensor) not in own]
    message = "peft creates it only in its files; the model has no such tensor"
    problems += (Refusal("UNSUPPORTED", message, Where(None, name), "Use peft's load_adapter.") for name in made)
    in_files = {own_name(name): tensor for name, tensor in tensors.items()}
    whole = {own_name(name): tensor for name, tensor in state.items()}
    for name in sorted(set(names) - in_files.keys()):
        trained = name.replace(f".{_COPIES}.", ".")  # a second copy, beside one under the name of the module
        tensor = whole.get(name) if trained == name else in_files.get(trained)
        if tensor is not None:
            in_files[name] = tensor
    return in_files, problems


def _merged(model: nn.Module) -> Iterator[Refusal]:
    for path, module in model.named_modules():
        if _is(module, _TUNER) and getattr(module, "merged", False) is True:
            message = "its adapter is merged, and unmerging it later would change the loaded weights"
            yield Refusal("UNSUPPORTED", message, Where(None, own_name(path)), _UNMERGE)


def _is(thing: object, name: str) -> bool:
    return any(kind.__name__ == name and kind.__module__.startswith(f"{_PEFT}.") for kind in type(thing).__mro__)
