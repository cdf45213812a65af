"""Census: what all ranks hold together, by name.

Each rank tells the others names, types, shapes and placements, once; from then on every rank computes for itself who
holds what. Nothing here looks at a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from transaxle.errors import Refusal, Where, gathered
from transaxle.live.dtype import code_of
from transaxle.live.part import whole_shape
from transaxle.live.placement import Held, Placement, placement_of
from transaxle.live.world import World


@dataclass(frozen=True, slots=True)
class Global:
    """One tensor as all ranks hold it."""

    name: str
    """Its name."""
    dtype: str
    """Safetensors code."""
    shape: tuple[int, ...]
    """Elements along each dim of the whole tensor."""
    held: Mapping[int, Held]
    """What each rank holds that has any of it; ranks without it are absent."""
    loose: bool = False
    """Whether it is on no one mesh: then nothing says that ranks which hold the same part hold the same values."""

    @property
    def boxes(self) -> dict[Held, tuple[int, ...]]:
        """The distinct shares, and the ranks that hold each."""
        found: dict[Held, tuple[int, ...]] = {}
        for rank, held in sorted(self.held.items()):
            found[held] = (*found.get(held, ()), rank)
        return found


Census = Mapping[str, Global]
"""Every tensor that any rank holds, by name, in the order in which the ranks name them."""
_Told = tuple[str, str, tuple[int, ...], int]


def census(tensors: Mapping[str, torch.Tensor], world: World) -> Census:
    """Learn what all ranks hold; collective.

    Args:
        tensors: this rank's.
        world: the ranks.

    Raises:
        Refused: on every rank: SHAPE_MISMATCH, DTYPE_MISMATCH where ranks differ; UNSUPPORTED placements.
    """

    def told() -> tuple[list[_Told], tuple[Placement, ...]]:
        placements: dict[Placement, int] = {}
        mine: list[_Told] = []
        for name, tensor in tensors.items():
            placement = placement_of(tensor, world.rank, name)
            number = placements.setdefault(placement, len(placements))
            mine.append((name, code_of(tensor.dtype), whole_shape(tensor), number))
        return mine, tuple(placements)

    found: dict[str, Global] = {}
    shares: dict[tuple[Placement, tuple[int, ...]], Mapping[int, Held]] = {}
    problems = []
    for rank, (names, known) in zip(world.ranks, world.pool(told), strict=True):
        for name, dtype, shape, number in names:
            placement = known[number]
            held = shares.get((placement, shape))
            if held is None:
                held = shares[placement, shape] = placement.held(shape)
            first = found.get(name)
            if first is None:
                found[name] = Global(name, dtype, shape, held)
            elif first.shape != shape:
                message = f"rank {rank} says {list(shape)}, another {list(first.shape)}"
                problems.append(Refusal("SHAPE_MISMATCH", message, Where(None, name)))
            elif first.dtype != dtype:
                message = f"rank {rank} says {dtype}, another {first.dtype}"
                problems.append(Refusal("DTYPE_MISMATCH", message, Where(None, name)))
            elif first.held is not held and first.held != held:
                found[name] = Global(name, dtype, shape, {**first.held, **held}, loose=True)
    if problems:
        raise gathered(problems)
    return found


def own_census(tensors: Mapping[str, torch.Tensor], rank: int) -> Census:
    """Return what this rank knows of its own tensors without asking others: a DTensor tells what its mesh holds.

    Raises:
        Refused: UNSUPPORTED placements.
    """
    found = {}
    for name, tensor in tensors.items():
        shape = whole_shape(tensor)
        held = placement_of(tensor, rank, name).held(shape)
        found[name] = Global(name, code_of(tensor.dtype), shape, held)
    return found
