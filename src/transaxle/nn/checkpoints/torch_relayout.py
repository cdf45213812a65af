"""Carry out a translation of `transaxle.axes` on the torch tensors of a state dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.tensor import DTensor

from transaxle.axes.layout.bind import join_slot, split_slot
from transaxle.axes.layout.relayout import Check, Copier, Target
from transaxle.axes.translation.translate import Translation
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.torch_tensors.local_tensor import filled, flat, same_bytes


@dataclass(frozen=True, slots=True)
class _Whole:
    """The one chunk of a tensor."""

    start: tuple[int, ...]
    """First index along each dim."""
    shape: tuple[int, ...]
    """Elements along each dim."""
    strides: tuple[int, ...] | None = None
    """Row-major."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a state dict, as the tables see it."""

    dtype: str
    """Its type, as torch calls it: a translation only compares types."""
    shape: tuple[int, ...]
    """Elements along each dim."""

    @cached_property
    def extents(self) -> tuple[_Whole, ...]:
        """The tensor in one chunk."""
        return (_Whole((0,) * len(self.shape), self.shape),)


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, Entry]:
    """Return what the tables need to know of tensors."""
    return {name: Entry(str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}


def move(
    found: Translation, tensors: Mapping[str, torch.Tensor], targets: Mapping[str, Target] | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of a translation; none shares memory with those given, unless it is one of them.

    Args:
        found: the translation.
        tensors: what it is of, by name.
        targets: those of its tensors that are wanted; None: all.

    Raises:
        Refused: what stands against the translation; UNEQUAL_COPIES for numbers that had to be equal and are not;
            UNSUPPORTED for a rearrangement of DTensors that is more than putting together and taking apart.
    """
    if found.refusals:
        raise gathered(found.refusals)
    copier = Copier(described(tensors))
    unequal = [check for check in found.checks if not _agree(check, copier, tensors)]
    if unequal:
        told = [(check.why, check.second.parts[0].origins[0].name) for check in unequal]
        raise gathered(Refusal("UNEQUAL_COPIES", f"{why}\nbut they differ", Where(None, name)) for why, name in told)
    with torch.no_grad():
        return {
            name: _made(target, copier, tensors)
            for name, target in (found.targets if targets is None else targets).items()
        }


def _agree(check: Check, copier: Copier, tensors: Mapping[str, torch.Tensor]) -> bool:
    first, second = (_whole(_made(side, copier, tensors)) for side in (check.first, check.second))
    return same_bytes(first, second)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def _made(target: Target, copier: Copier, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    origins = [origin.name for part in target.parts for origin in part.origins]
    first = tensors[origins[0]]
    if len(origins) == 1 and tuple(first.shape) == target.shape and _is_whole(target, copier):
        return first
    if any(isinstance(tensors[name], DTensor) for name in origins):
        return _distributed(target, origins, tensors)
    sources = {name: flat(tensors[name]) for name in origins}
    boxes = [(copy.move, sources[copy.source]) for copy in copier.copies(target)]
    return filled(target.shape, first.dtype, first.device, boxes)


def _is_whole(target: Target, copier: Copier) -> bool:
    """Tell whether a target is its one source, element by element."""
    copies = list(copier.copies(target))
    loops = copies[0].move.loops if len(copies) == 1 else ()
    run = not loops or (len(loops) == 1 and loops[0][1:] == (1, 1))
    return len(copies) == 1 and run and not copies[0].move.source_offset and not copies[0].move.target_offset


def _distributed(target: Target, origins: list[str], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Stack DTensors, or take one out of a stack: torch keeps their placements right in both."""
    first = tensors[origins[0]]
    if len(target.parts) == 1 and len(origins) > 1 and target.shape == (len(origins), *first.shape):
        return torch.stack([tensors[name] for name in origins])
    if len(origins) == 1 and len(target.index) == 1 and tuple(first.shape[1:]) == target.shape:
        return first[next(iter(target.index.values()))].clone()
    raise refuse(
        "UNSUPPORTED",
        f"{target.rule}\nits sources are DTensors, which can only be stacked or taken out of a stack here",
        tensor=target.name,
        hint="Use transaxle.state_dict_as or transaxle.load, which work out the placements.",
    )


def under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with a prefix before their names; states of an optimizer have it before their parameters'."""
    found = {}
    for name, tensor in tensors.items():
        parameter, slot = split_slot(name)
        found[join_slot(f"{prefix}{parameter}", slot)] = tensor
    return found
