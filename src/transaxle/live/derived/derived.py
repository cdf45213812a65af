"""Derived entries: those of a model's state dict that are no memory of its own, and the modules that make them.

torchtitan's fused attention shows `wq`, `wk` and `wv` of one weight, hooks of state dicts rename and pack. Values that
are written into such an entry reach the model only through its own `load_state_dict` (`transaxle.live.derived.settle`).
Whether an entry is a parameter itself is proved by where both lie in memory (`Extent`): nothing else tells it from a
copy, and what is written into a copy is lost.

The parameters of FSDP1 are flat; its state dict shows whole ones, which are copies. What it shows depends on a setting
of the user's. Here it is always every tensor, whole, on every rank: the one kind whose names and values mean the same
whatever the wrapping, and that its `load_state_dict` takes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor

from transaxle.quant.entries import entries, is_quantized
from transaxle.torch_tensors.local_tensor import TO_LOCAL, stored_local

_SEPARATOR = "."
EXTRA_STATE = "_extra_state"
"""Last part of the name under which a module keeps what its `get_extra_state` gives."""


def is_fsdp1(model: nn.Module) -> bool:
    """Whether FSDP1 holds any of a model's parameters."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


@contextmanager
def whole_states(model: nn.Module) -> Iterator[None]:
    """Let state dicts of a model under FSDP1 be whole, on all ranks; of any other model nothing changes."""
    if not is_fsdp1(model):
        yield
        return
    config = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        yield


@dataclass(frozen=True, slots=True)
class Extent:
    """The memory of a plain tensor."""

    storage: int
    """Identifies the storage; that of a meta tensor too, which has no memory. It is valid while the tensor lives."""
    start: int
    """First byte in it."""
    layout: tuple[Any, ...]
    """Shape, strides, type, and whether values are read conjugated or negated."""
    size: int
    """Bytes from the first to the last one, where the tensor has all that are between; else 0."""


def pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that this rank's part of a tensor is made of."""
    if is_quantized(tensor):
        return [_local(entry) for entry in entries(tensor).values()]
    plain, open_ = [], [_local(tensor)]
    while open_:
        outer = open_.pop()
        flatten = getattr(outer, "__tensor_flatten__", None)
        if flatten is None or type(outer) in (torch.Tensor, torch.nn.Parameter):
            plain.append(outer)
        else:
            open_ += [inner for name in flatten()[0] if isinstance(inner := getattr(outer, name), torch.Tensor)]
    return plain


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds; a wrapper that says so itself is asked, and nothing is made that has no need."""
    to_local = None if isinstance(tensor, DTensor) else getattr(tensor, TO_LOCAL, None)
    return stored_local(tensor) if to_local is None else to_local()


def extent(piece: torch.Tensor) -> Extent:
    """Return where a plain tensor lies; of one without a storage of its own, what identifies it."""
    kind = (tuple(piece.shape), piece.dtype, piece.device.type)
    try:
        storage = int(piece.untyped_storage()._cdata)
        strides = piece.stride()
    except (NotImplementedError, RuntimeError):  # sparse, or of a library that says nothing of its memory
        return Extent(id(piece), 0, kind, 0)
    item = piece.element_size()
    reads = (piece.is_conj(), piece.is_neg())
    size = piece.numel() * item if _dense(piece.shape, strides) and not any(reads) else 0
    live = tuple(stride for stride, length in zip(strides, piece.shape, strict=True) if length > 1)
    return Extent(storage, int(piece.storage_offset()) * item, (*kind, live, *reads), size)


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements fill a range without holes, in whatever order."""
    expected = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True


def filled_by(whole: Extent, parts: Iterable[Extent]) -> list[Extent] | None:
    """Return those of the parts that together are the whole, each byte once; None where there are none such.

    Args:
        whole: of a parameter.
        parts: of entries, each without holes.
    """
    inside = sorted(
        {
            part
            for part in parts
            if part.storage == whole.storage
            and part.size
            and whole.start <= part.start
            and part.start + part.size <= whole.start + whole.size
        },
        key=lambda part: part.start,
    )
    at = whole.start
    for part in inside:
        if part.start != at:
            return None
        at += part.size
    return inside if inside and at == whole.start + whole.size else None


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
        return is_fsdp1(self.module)

    @property
    def is_meta(self) -> bool:
        """Whether any of its tensors has no memory yet."""
        return any(tensor.is_meta for _, tensor in persistent(self.module))

    def state(self) -> dict[str, Any]:
        """Return the module's state dict, with its parameters themselves where they are in it."""
        with whole_states(self.module):
            state: dict[str, Any] = self.module.state_dict(keep_vars=True)
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Let the module load a state dict.

        Raises:
            RuntimeError: what its `load_state_dict` raises.
        """
        with whole_states(self.module):
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
    if is_fsdp1(model):
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
