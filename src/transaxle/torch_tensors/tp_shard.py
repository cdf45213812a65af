"""Parts: what this rank holds of a parameter that tensor parallelism has cut in a way no DTensor can say.

Such a parameter is an ordinary tensor, or under FSDP2 a DTensor over the data-parallel ranks alone: neither knows the
whole. The module that owns it does; `leaves` hangs that on the tensor, and optimizer state takes it over, so that
loading and saving see the whole tensor with an interval list per dim, as for any other placement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from transaxle.axes.geometry.chunk import Intervals

_PARTS = "_transaxle_parts"
_PART = "_transaxle_part"


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's share of a whole tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    held: tuple[Intervals, ...]
    """Per dim, the positions that this tensor-parallel rank holds, in local order. In one dim where the whole has
    several: a range of its elements, row-major.
    """


def part_of(tensor: torch.Tensor) -> Part | None:
    """Return what a tensor is a part of; None for a tensor that is whole, or says itself how it lies on its mesh."""
    part: Part | None = getattr(tensor, _PART, None)
    return part


def mark(tensor: torch.Tensor, part: Part | None) -> torch.Tensor:
    """Say what a tensor is a part of, and return it."""
    if part is not None:
        setattr(tensor, _PART, part)
    return tensor


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor, whatever this rank holds of it."""
    part = part_of(tensor)
    return tuple(tensor.shape) if part is None else part.shape


def own_part(module: nn.Module, name: str, part: Part) -> None:
    """Say of which whole a module's own parameter is a part.

    Args:
        module: the owner.
        name: of the parameter in it.
        part: what this rank holds.
    """
    module.__dict__.setdefault(_PARTS, {})[name] = part


def parts_in(module: nn.Module) -> Iterator[tuple[str, Part]]:
    """Yield (name, part) of a module's own parameters that are parts."""
    yield from module.__dict__.get(_PARTS, {}).items()


def mark_all(model: nn.Module) -> None:
    """Mark every parameter of a model that is a part; what shards or materialises a model makes new ones."""
    for module in model.modules():
        for name, part in parts_in(module):
            parameter = module._parameters.get(name)
            if parameter is not None:
                mark(parameter, part)
