"""Adapters of a trainer: an engine gets the base with them merged into it, or the adapter alone.

What merging gives is asked of peft. The trained weights are afterwards what they were, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from transaxle.axes.notation.name import own_name
from transaxle.errors import Refusal, gathered, refuse
from transaxle.live.model.peft_model import adapted, base_names, is_active, seen_by, tuners
from transaxle.live.model.state_tensors import Leaves, State, leaves
from transaxle.torch_tensors import local_of, place_like, same_bytes

MERGED, ALONE = "merged", "alone"
_WAYS = (MERGED, ALONE)


def read_adapter(given: object) -> str | None:
    """Return what becomes of a trainer's adapter.

    Raises:
        ValueError: it is no such way.
    """
    if given is not None and given not in _WAYS:
        raise ValueError(f"adapter must be one of {', '.join(_WAYS)}, or None; got {given!r}")
    return None if given is None else str(given)


def source_leaves(state: State, adapter: str | None, *, values: bool) -> Leaves:
    """Return what is sent of a source.

    Args:
        state: model or state dict, the sharded one of a Megatron model too; a model under ZeRO-3, without an adapter.
        adapter: what becomes of the adapter of a model of peft.
        values: merge; otherwise the tensors have the right form, and are tied as they would be.

    Raises:
        Refused: see `leaves`; UNSUPPORTED, AMBIGUOUS where an adapter cannot be sent in that way.
    """
    found = leaves(state, sharded=True, ranges=adapter is None)
    model = adapted(state) if isinstance(state, nn.Module) else None
    if adapter is None or not found.tensors:
        return found
    if model is None:
        raise refuse("UNSUPPORTED", "adapter= is given, but the source is no model of peft", hint="Omit adapter=.")
    alone = seen_by(model, found, (), adapter=adapter == ALONE)
    if problems := [each for each in alone.kept if each not in found.kept]:
        raise gathered(problems)
    if adapter == ALONE:
        return alone
    trained = dict(_trained(model, alone))
    with torch.no_grad():
        merged = dict(_merged(model, _Names(model, found, alone), values=values))
    return replace(alone, tensors={**alone.tensors, **trained, **merged}, copies={})


def target_leaves(state: State, adapter: str | None) -> Leaves:
    """Return what is written of a target: of a model of peft that gets an adapter alone, its active one."""
    found = leaves(state)
    model = adapted(state) if adapter == ALONE and isinstance(state, nn.Module) else None
    return found if model is None else seen_by(model, found, (), adapter=True)


def _trained(model: Any, own: Leaves) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the modules that are trained as a whole: the copy that is active.

    Raises:
        Refused: AMBIGUOUS where several are.
    """
    for name, copies in own.copies.items():
        active = [copy for copy in copies if is_active(model, copy)]
        if len(active) != 1:
            raise gathered([Refusal("AMBIGUOUS", "several adapters have trained it", hint="Call set_adapter().")])
        yield name, active[0]


class _Names:
    """The names that a plain model has for what adapters change, and what of it is tied.

    Args:
        model: the model of peft.
        found: all that it holds.
        alone: its base, under a plain model's names.
    """

    def __init__(self, model: nn.Module, found: Leaves, alone: Leaves) -> None:
        self._tensors = alone.tensors
        self._plain = base_names(model, found.tensors)
        self._paths: dict[int, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self._paths.setdefault(id(module), []).append(path)
        self.tied: dict[int, set[str]] = {}
        """Names of what has several, by the tensor's id."""
        for name, tensor in self._tensors.items():
            self.tied.setdefault(id(tensor), set()).add(name)
        self.tied = {key: names for key, names in self.tied.items() if len(names) > 1}

    def of(self, base: nn.Module) -> dict[str, list[str]]:
        """Return, for the parameters of a module that adapters change, the names that a plain model has for each."""
        found = {}
        for each, parameter in base.named_parameters(recurse=False):
            paths = (own_name(f"{path}.{each}") for path in self._paths[id(base)])
            names = (self._plain.get(path) for path in paths)
            found[each] = [name for name in names if name is not None and self._tensors.get(name) is parameter]
        return found


def _merged(model: nn.Module, names: _Names, *, values: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the base's weights with the active adapter merged into them.

    Of tied weights each name has what its own adapters make of it; they stay one where all of them make the same.

    Args:
        model: the model of peft.
        names: what its weights are called.
        values: all; otherwise those of tied weights only, of which the values tell what stays tied.
    """
    by_base: dict[int, list[Any]] = {}
    for module in tuners(model):  # several may change one module, each another of its parameters
        by_base.setdefault(id(module.get_base_layer()), []).append(module)
    of_tied: dict[int, dict[str, torch.Tensor]] = {}
    for changing in by_base.values():
        parameters, plain = _parameters(changing[0]), names.of(changing[0].get_base_layer())
        tied = {each for each, parameter in parameters.items() if id(parameter) in names.tied}
        if not values and not tied:
            continue
        with _changed(changing):
            for each, now in _parameters(changing[0]).items():
                of_one, result = plain[each], place_like(now, local_of(now).clone())
                if each in tied:
                    of_tied.setdefault(id(parameters[each]), {}).update(dict.fromkeys(of_one, result))
                else:
                    yield from ((name, result) for name in of_one)
    for key, found in of_tied.items():
        first = next(iter(found.values()), None)
        one = found.keys() == names.tied[key] and all(_same(first, tensor) for tensor in found.values())
        yield from ((name, first if one and first is not None else tensor) for name, tensor in found.items())


@contextmanager
def _changed(changing: Sequence[Any]) -> Iterator[None]:
    """Merge adapters into their module for a while; its parameters are afterwards what they were, bit by bit."""
    before = {each: local_of(parameter).clone() for each, parameter in _parameters(changing[0]).items()}
    begun = list[Any]()
    try:
        for module in changing:
            begun.append(module)
            module.merge()
        yield
    finally:
        for module in reversed(begun):
            if module.merged:
                module.unmerge()
        for each, parameter in _parameters(changing[0]).items():
            local_of(parameter).copy_(before[each])


def _parameters(module: Any) -> dict[str, torch.Tensor]:
    """Return the parameters of what an adapter changes; merging may put others into their place."""
    return dict(module.get_base_layer().named_parameters(recurse=False))


def _same(first: torch.Tensor | None, second: torch.Tensor) -> bool:
    return first is second or (first is not None and same_bytes(local_of(first), local_of(second)))
