"""Derived entries: those of a model's state dict that are no memory of its own, and the modules that make them.

torchtitan's fused attention shows `wq`, `wk` and `wv` of one weight, hooks of state dicts rename and pack. Values that
are written into such an entry reach the model only through its own `load_state_dict` (`transaxle.live.derived.settle`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from transaxle.live.derived import fsdp1
from transaxle.live.derived.extent import Extent, extent, filled_by, pieces

_SEPARATOR = "."
EXTRA_STATE = "_extra_state"
"""Last part of the name under which a module keeps what its `get_extra_state` gives."""


@dataclass(frozen=True, eq=False)
class Island:
    """A module whose state dict is not its memory; the smallest one that holds all that belongs together."""

    path: str
    """Its name in the model, with the segments of wrappers."""
    module: nn.Module
    """The module."""
    derived: tuple[str, ...]
    """Entries that are copies, by their names in the module's state dict."""
    apart: Mapping[str, torch.Tensor]
    """Parameters and persistent buffers that no entry is, by their names in the module."""

    @property
    def is_flat(self) -> bool:
        """Whether FSDP1 holds it: then its entries are made by gathering, and it is not tried beforehand."""
        return fsdp1.is_flat(self.module)

    @property
    def is_meta(self) -> bool:
        """Whether any of its tensors has no memory yet."""
        return any(tensor.is_meta for _, tensor in persistent(self.module))

    def state(self) -> dict[str, Any]:
        """Return the module's state dict, with its parameters themselves where they are in it."""
        with fsdp1.whole(self.module):
            state: dict[str, Any] = self.module.state_dict(keep_vars=True)
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Let the module load a state dict.

        Raises:
            RuntimeError: what its `load_state_dict` raises.
        """
        with fsdp1.whole(self.module):
            self.module.load_state_dict(dict(state), strict=False)

    def full(self, name: str) -> str:
        """Return the name in the whole model of something in the module."""
        return joined(self.path, name)


def joined(path: str, name: str) -> str:
    """Return a name under a path, which may be empty."""
    return f"{path}{_SEPARATOR}{name}" if path else name


def persistent(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers by name; a tied one under each."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None and name not in owner._non_persistent_buffers_set:
                yield joined(path, name), tensor


def islands(model: nn.Module, state: Mapping[str, Any]) -> list[Island]:
    """Return the modules whose state dicts are not their memory.

    Args:
        model: the model.
        state: its state dict, made with `keep_vars`.
    """
    if fsdp1.is_flat(model):
        tensors = tuple(name for name, value in state.items() if _is_entry(name, value))
        return [Island("", model, tensors, dict(persistent(model)))]
    derived, apart = _differences(model, state)
    return list(_within(model, "", derived, apart)) if derived or apart else []


def _within(
    module: nn.Module, path: str, derived: tuple[str, ...], apart: Mapping[str, torch.Tensor]
) -> Iterator[Island]:
    """Yield the smallest modules in a module that explain what is derived in it."""
    children = []
    for name, child in module.named_children():
        of_child = _differences(child, child.state_dict(keep_vars=True))
        if any(of_child):
            children.append((name, child, *of_child))
    names = {f"{name}{_SEPARATOR}{key}" for name, _, keys, _ in children for key in keys}
    tensors = {id(tensor) for _, _, _, child_apart in children for tensor in child_apart.values()}
    if names == set(derived) and tensors >= {id(tensor) for tensor in apart.values()}:
        for name, child, keys, child_apart in children:
            yield from _within(child, joined(path, name), keys, child_apart)
    else:
        yield Island(path, module, derived, apart)


def _differences(module: nn.Module, state: Mapping[str, Any]) -> tuple[tuple[str, ...], Mapping[str, torch.Tensor]]:
    """Return the entries of a state dict that are copies, and the tensors of the module that no entry is."""
    own = dict(persistent(module))
    tensors = {id(tensor): tensor for tensor in (*own.values(), *module.buffers())}
    entries = {id(value) for value in state.values() if id(value) in tensors}
    of_tensors = {key: _extents(tensor) for key, tensor in tensors.items() if key not in entries}
    of_entries = {
        name: _extents(value) for name, value in state.items() if _is_entry(name, value) and id(value) not in tensors
    }
    # Another object may still be the same memory (`detach()`), and several the parts of one tensor.
    parts = set(chain.from_iterable(of_entries.values()))
    memory = set(chain.from_iterable(of_tensors.values()))
    if of_entries:
        memory.update(*(_extents(tensors[key]) for key in entries))
    shown = parts & memory
    for whole in chain.from_iterable(of_tensors.values()):
        if whole not in shown and whole.size:
            views = filled_by(whole, parts)
            if views is not None:
                shown.update((whole, *views))
    derived = tuple(name for name, extents in of_entries.items() if not shown.issuperset(extents))
    hidden = {key for key, extents in of_tensors.items() if not shown.issuperset(extents)}
    return derived, {name: tensor for name, tensor in own.items() if id(tensor) in hidden}


def _is_entry(name: str, value: Any) -> bool:
    """Whether an entry is a tensor that a load fills."""
    return isinstance(value, torch.Tensor) and not name.endswith(EXTRA_STATE)


def _extents(tensor: torch.Tensor) -> list[Extent]:
    return [extent(piece) for piece in pieces(tensor) if piece.numel()]
