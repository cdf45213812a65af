"""What each rank of a trainer or an engine holds of a kind of tensors, as boxes of a logical tensor.

A trainer cuts as torch does: experts over `ep`, what the tables name over `tp`, and then FSDP divides dim 0 of what is
left, in `torch.chunk`'s chunks. Its other tensors FSDP divides over `fsdp` and `ep` together. An engine cuts as its own
loader does, which the tables say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from transaxle.axes.geometry.chunk import Intervals, Shard, take, torch_chunk, whole
from transaxle.axes.geometry.piece import Interval, pieces
from transaxle.axes.geometry.ranges import axes_in
from transaxle.axes.layout.divide import rank_shares
from transaxle.axes.layout.model_tensors import Kind
from transaxle.axes.notation.expression import Axis
from transaxle.axes.notation.family import Family
from transaxle.engine.capacity.rank_meshes import DP, EP, FSDP, PP, TP, RankMesh
from transaxle.errors import refuse

_CHUNK = Shard()


@dataclass(frozen=True)
class HeldBoxes:
    """Boxes of a logical tensor that some ranks hold, each of them all."""

    ranks: NDArray[np.int64]
    """The ranks."""
    boxes: NDArray[np.int64]
    """Box, axis, first index and the one after the last."""


@dataclass(frozen=True)
class Cutter:
    """Cuts the tensors of one side over its ranks."""

    family: Family
    """Of the model."""
    mesh: RankMesh
    """The side's ranks."""

    def stage(self, layer: int, layers: int) -> int:
        """Return the pipeline stage of a layer: stages are as long as each other, but that the first ones of a
        trainer, and the last ones before the last of an engine, have one more where they do not divide.
        """
        stages = self.mesh.degree(PP)
        each, more = divmod(layers, stages)
        longer = set(range(stages - 1 - more, stages - 1)) if self.mesh.serves else set(range(more))
        ends = np.cumsum([each + (stage in longer) for stage in range(stages)])
        return int(np.searchsorted(ends, layer, side="right"))

    def held(self, kind: Kind, component: str, axes: Sequence[str], layers: Sequence[Interval] = ()) -> list[HeldBoxes]:
        """Return what the ranks of every pipeline stage hold, alike ones together, those with nothing left out.

        Args:
            kind: the tensors.
            component: the logical tensor.
            axes: those of a box.
            layers: intervals of the axis that numbers layers, where it is one of a box.
        """
        found: dict[tuple[tuple[Interval, ...], ...], list[int]] = defaultdict(list)
        memory: dict[tuple[int, ...], tuple[tuple[Interval, ...], ...]] = {}
        for rank in range(self.mesh.ranks):
            key = self._key(rank)
            if key not in memory:
                memory[key] = self._boxes(kind, component, axes, layers, rank)
            if memory[key]:
                found[memory[key]].append(rank)
        return [
            HeldBoxes(np.array(ranks), np.array(boxes, np.int64).reshape(len(boxes), -1, 2))
            for boxes, ranks in found.items()
        ]

    def _key(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates on which it depends what a rank holds of a stage."""
        mesh = self.mesh
        names = (DP, TP) if mesh.serves else (FSDP, EP, TP)
        return tuple(mesh.at(rank, name) for name in names)

    def _boxes(
        self, kind: Kind, component: str, axes: Sequence[str], layers: Sequence[Interval], rank: int
    ) -> tuple[tuple[Interval, ...], ...]:
        named, dims = (self._served if self.mesh.serves else self._trained)(kind, rank)
        spans = {axis: list(intervals) for axis, intervals in named.items()}
        spans |= {axis: list(layers) for axis in kind.axes if axis in axes}
        outside = [axis for axis in axes if axis in spans]
        found: list[tuple[Interval, ...]] = []
        if prod(sum(stop - start for start, stop in intervals) for intervals in dims) == 0:
            return ()
        for piece in pieces(kind.layout, component, dims):
            for chosen in product(*(spans[axis] for axis in outside)):
                box = {**piece.box, **dict(zip(outside, chosen, strict=True))}
                found.append(tuple(box.get(axis, (0, 1)) for axis in axes))
        return tuple(sorted(box for box in found if all(start < stop for start, stop in box)))

    def _trained(self, kind: Kind, rank: int) -> tuple[dict[str, Intervals], list[Intervals]]:
        """Return what a rank of a trainer has of the axes in names, and of the dims."""
        mesh, expression = self.mesh, kind.line.expression
        named = {axis: whole(kind.sizes[axis]) for axis in kind.experts}
        dims = [whole(size) for size in kind.layout.shape]
        expert = self._axis_of_experts(kind)
        ep, fsdp, place = mesh.degree(EP), mesh.degree(FSDP), mesh.at(rank, FSDP)
        if expert is None:
            fsdp, place = fsdp * ep, mesh.at(rank, FSDP, EP)
        elif expert in named:
            named[expert] = (torch_chunk(kind.sizes[expert], ep, mesh.at(rank, EP)),)
        elif ep > 1:
            dim = next((n for n, node in enumerate(expression.dims) if node == Axis(expert)), None)
            if dim is None:
                message = f"{kind.line.whole}\nits experts are no dim of their own, which ep could share out"
                raise refuse("UNSUPPORTED", message, hint="Choose another dialect of the trainer.")
            dims[dim] = _CHUNK(dims[dim], ep, mesh.at(rank, EP))
        tp = mesh.degree(TP)
        shares = rank_shares(expression, self.family, self._name, kind.sizes, tp=tp) if tp > 1 else None
        if shares is not None:
            dim, positions = shares
            dims[dim] = positions[mesh.at(rank, TP)]
        if dims and fsdp > 1:
            dim = mesh.expert_dim if expert is not None else 0
            if dim >= len(dims):
                message = f"{kind.line.whole}\nhas no dim {dim}, which expert_dim names"
                raise refuse("UNSUPPORTED", message, hint="Leave expert_dim out, or give a smaller one.")
            dims[dim] = _CHUNK(dims[dim], fsdp, place)
        return named, dims

    def _served(self, kind: Kind, rank: int) -> tuple[dict[str, Intervals], list[Intervals]]:
        """Return what a rank of an engine has of the axes in names, and of the dims."""
        mesh, expression = self.mesh, kind.line.expression
        named = {axis: whole(kind.sizes[axis]) for axis in kind.experts}
        dims = [whole(size) for size in kind.layout.shape]
        expert = self._axis_of_experts(kind) if mesh.ep > 1 else None
        place, shares = mesh.at(rank, TP), None
        if expert is not None:
            place = mesh.at(rank, DP, TP)
            if expert in named:
                each, more = divmod(kind.sizes[expert], mesh.ep)
                start = each * place + min(place, more)
                named[expert] = take(named[expert], start, start + each + (place < more))
            else:
                shares = rank_shares(expression, self.family, self._name, kind.sizes, tp=1, ep=mesh.ep)
        elif mesh.degree(TP) > 1:
            shares = rank_shares(expression, self.family, self._name, kind.sizes, tp=mesh.degree(TP))
        if shares is not None:
            dim, positions = shares
            dims[dim] = positions[place]
        return named, dims

    @property
    def _name(self) -> str:
        return self.mesh.dialect.partition("@")[0]

    def _axis_of_experts(self, kind: Kind) -> str | None:
        """Return the axis that expert-parallel ranks share out of a tensor; None where it is of no experts."""
        expression = kind.line.expression
        for cut in self.family.cuts_of("ep", self._name):
            if cut.tensors is not None and cut.tensors.isdisjoint(expression.components):
                continue
            within = {*kind.experts}.union(*(axes_in(node) for node in expression.dims))
            return next((axis for axis in cut.axes if axis in within), None)
        return None
