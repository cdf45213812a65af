"""Derived entries: those of a model's state dict that are no memory of its own, and the modules that make them.

torchtitan's fused attention shows `wq`, `wk` and `wv` of one weight, hooks of state dicts rename and pack. Values that
are written into such an entry reach the model only through its own `load_state_dict` (`transaxle.live.derived.settle`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
            found: dict[str, Any] = self.module.state_dict(keep_vars=True)
        return found

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
    found = _differences(model, state)
    return list(_within(model, "", *found)) if any(found) else []


def _within(
    module: nn.Module, path: str, derived: tuple[str, ...], apart: Mapping[str, torch.Tensor]
) -> Iterator[Island]:
    """Yield the smallest modules in a module that explain what is derived in it."""
    inner = []
    for name, child in module.named_children():
        found = _differences(child, child.state_dict(keep_vars=True))
        if any(found):
            inner.append((name, child, *found))
    names = {f"{name}{_SEPARATOR}{key}" for name, _, keys, _ in inner for key in keys}
    tensors = {id(tensor) for _, _, _, held in inner for tensor in held.values()}
    if names == set(derived) and tensors >= {id(tensor) for tensor in apart.values()}:
        for name, child, keys, held in inner:
            yield from _within(child, joined(path, name), keys, held)
    else:
        yield Island(path, module, derived, apart)


def _differences(module: nn.Module, state: Mapping[str, Any]) -> tuple[tuple[str, ...], Mapping[str, torch.Tensor]]:
    """Return the entries of a state dict that are copies, and the tensors of the module that no entry is."""
    own = dict(persistent(module))
    every = {id(tensor): tensor for tensor in (*own.values(), *module.buffers())}
    same = {id(value) for value in state.values() if id(value) in every}
    where = {key: _extents(tensor) for key, tensor in every.items() if key not in same}
    left = {name: _extents(value) for name, value in state.items() if _is_entry(name, value) and id(value) not in every}
    held = {one for key in same for one in _extents(every[key])} if left else set[Extent]()
    known = held | {one for found in where.values() for one in found}
    shown = {one for found in left.values() for one in found} & known
    parts = {one for found in left.values() for one in found}
    for wholes in where.values():
        for whole in wholes:
            if whole not in shown and whole.size:
                views = filled_by(whole, parts)
                if views is not None:
                    shown.update((whole, *views))
    derived = tuple(name for name, found in left.items() if not all(one in shown for one in found))
    hidden = {key for key, found in where.items() if not all(one in shown for one in found)}
    return derived, {name: tensor for name, tensor in own.items() if id(tensor) in hidden}


def _is_entry(name: str, value: Any) -> bool:
    """Whether an entry is a tensor that a load fills."""
    return isinstance(value, torch.Tensor) and not name.endswith(EXTRA_STATE)


def _extents(tensor: torch.Tensor) -> list[Extent]:
    return [extent(piece) for piece in pieces(tensor) if piece.numel()]
