"""Adapters of a trainer: an engine gets the base with them merged into it, or the adapter alone.

What merging gives is asked of peft. The trained weights are afterwards what they were, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from transaxle.errors import Refusal, gathered, refuse
from transaxle.live.model.peft_model import adapted, is_active, seen_by, tuners
from transaxle.live.model.state_tensors import Leaves, State, leaves
from transaxle.torch_tensors.local_tensor import local_of, placed_like

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
        values: merge; otherwise the tensors have the right form only.

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
    names = {id(tensor): name for name, tensor in alone.tensors.items()}
    with torch.no_grad():
        merged = dict(_merged(model, names)) if values else {}
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


def _merged(model: Any, names: Mapping[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the base's weights with the active adapter merged into them."""
    for module in tuners(model):
        own = {each: names[id(p)] for each, p in _parameters(module) if id(p) in names}
        before = {each: local_of(p).clone() for each, p in _parameters(module)}
        module.merge()
        try:
            for each, parameter in _parameters(module):
                if each in own:
                    yield own[each], placed_like(parameter, local_of(parameter).clone())
        finally:
            module.unmerge()
            for each, parameter in _parameters(module):
                local_of(parameter).copy_(before[each])


def _parameters(module: Any) -> list[tuple[str, torch.Tensor]]:
    return list(module.get_base_layer().named_parameters(recurse=False))
