"""Census: what all ranks hold together, by name.

Each rank tells the others names, types, shapes and placements, once; from then on every rank computes for itself who
holds what. Nothing here looks at a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from transaxle.errors import Refusal, Where, gathered
from transaxle.live.transport.world import World
from transaxle.torch_tensors.placement import Held, Placement, placement_of
from transaxle.torch_tensors.torch_dtype import code_of
from transaxle.torch_tensors.tp_shard import whole_shape


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
_SHOWN = 8
"""Ranks that a message names."""
_EVERYWHERE = "Give the tensor on every rank of its mesh or on none; each rank has only its part."
_WIDER = "Call this on all ranks of the mesh, with a group that contains them (group=None: all ranks)."


def census(tensors: Mapping[str, torch.Tensor], world: World) -> Census:
    """Learn what all ranks hold; collective.

    Args:
        tensors: this rank's.
        world: the ranks.

    Raises:
        Refused: on every rank: SHAPE_MISMATCH, DTYPE_MISMATCH where ranks differ; UNSUPPORTED placements, and meshes
            with ranks that are not of this world; INCOMPLETE where a rank of a tensor's mesh has no such tensor.
    """

    def told() -> tuple[list[_Told], tuple[Placement, ...]]:
        placements: dict[Placement, int] = {}
        mine: list[_Told] = []
        for name, tensor in tensors.items():
            placement = placement_of(tensor, world.rank, name)
            number = placements.setdefault(placement, len(placements))
            mine.append((name, code_of(tensor.dtype), whole_shape(tensor), number))
        return mine, tuple(placements)

    tensors_heard: dict[str, _Heard] = {}
    shares: dict[tuple[Placement, tuple[int, ...]], Mapping[int, Held]] = {}
    problems = []
    for rank, (names, known) in zip(world.ranks, world.pool(told), strict=True):
        for name, dtype, shape, number in names:
            placement = known[number]
            held = shares.get((placement, shape))
            if held is None:
                held = shares[placement, shape] = placement.held(shape)
            first = tensors_heard.get(name)
            if first is None:
                tensors_heard[name] = _Heard(dtype, shape, held, [rank])
            elif first.shape != shape:
                message = f"its shape is {list(shape)} on rank {rank}, but {list(first.shape)} on another"
                problems.append(Refusal("SHAPE_MISMATCH", message, Where(None, name)))
            elif first.dtype != dtype:
                message = f"its dtype is {dtype} on rank {rank}, but {first.dtype} on another"
                problems.append(Refusal("DTYPE_MISMATCH", message, Where(None, name)))
            else:
                first.add(rank, held)
    problems = problems or [problem for name, heard in tensors_heard.items() for problem in heard.lost(name, world)]
    if problems:
        raise gathered(problems)
    return {name: heard.made(name) for name, heard in tensors_heard.items()}


class _Heard:
    """One tensor as the ranks have described it so far.

    Args:
        dtype: safetensors code.
        shape: of the whole tensor.
        held: what the first rank says that the ranks of its mesh hold.
        ranks: those that have it; the first one.
    """

    def __init__(self, dtype: str, shape: tuple[int, ...], held: Mapping[int, Held], ranks: list[int]) -> None:
        self.dtype = dtype
        self.shape = shape
        self._held = held
        self._ranks = ranks
        self._others: list[Mapping[int, Held]] = []

    def add(self, rank: int, positions: Mapping[int, Held]) -> None:
        """Add the description of one more rank."""
        if self._others or (self._held is not positions and self._held != positions):
            if not self._others:
                self._others = [self._held] * len(self._ranks)
            self._others.append(positions)
        self._ranks.append(rank)

    def lost(self, name: str, world: World) -> Iterator[Refusal]:
        """Yield a refusal for each mesh on which some rank lacks the tensor, or is outside of the process group."""
        meshes = {tuple(held): held for held in self._others or [self._held]}
        if len(meshes) == 1 and self._held.keys() == set(self._ranks):
            return
        ranks, everyone = set(self._ranks), set(world.ranks)
        for mesh in meshes:
            if outside := [rank for rank in mesh if rank not in everyone]:
                message = (
                    f"its mesh has ranks {_listed(mesh)}, of which {_listed(outside)} are not in the process group"
                )
                yield Refusal("UNSUPPORTED", message, Where(None, name), _WIDER)
            elif lost := [rank for rank in mesh if rank not in ranks]:
                message = f"its mesh has ranks {_listed(mesh)}, but rank {_listed(lost)} does not have the tensor"
                yield Refusal("INCOMPLETE", message, Where(None, name), _EVERYWHERE)

    def made(self, name: str) -> Global:
        """Return the tensor; where ranks see it on different meshes, each one's own word counts."""
        if not self._others:
            return Global(name, self.dtype, self.shape, self._held)
        pairs = zip(self._ranks, self._others, strict=True)
        return Global(name, self.dtype, self.shape, {r: held[r] for r, held in pairs if r in held}, loose=True)


def _listed(ranks: Iterable[int]) -> str:
    """Name ranks, the first few of many."""
    named = [str(rank) for rank in ranks]
    return ", ".join(named[:_SHOWN]) + (f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else "")


def own_census(tensors: Mapping[str, torch.Tensor], rank: int) -> Census:
    """Return what this rank knows of its own tensors without asking others: a DTensor tells what its mesh holds.

    Raises:
        Refused: UNSUPPORTED placements.
    """
    own_tensors = {}
    for name, tensor in tensors.items():
        shape = whole_shape(tensor)
        held = placement_of(tensor, rank, name).held(shape)
        own_tensors[name] = Global(name, code_of(tensor.dtype), shape, held)
    return own_tensors
