"""What a state dict has to hold for a grouped layer: how many experts, of what shapes, under one name or under N."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

WEIGHT = "weight"
BIAS = "bias"


@dataclass(frozen=True, slots=True)
class Layer:
    """A grouped layer as its state dict sees it."""

    count: int
    """Experts."""
    shapes: Mapping[str, tuple[int, ...]]
    """Stem (`weight`, `bias`) -> shape of one expert's."""
    single: Mapping[str, bool]
    """Stem -> whether all experts are one tensor."""
    beside: Mapping[str, Mapping[str, tuple[int, ...]]]
    """Stem -> what follows it in the names of the other buffers of a quantized parameter -> shape of one expert's."""
    own: range
    """Experts whose parameters are here, where each has its own: not those of other ranks."""
