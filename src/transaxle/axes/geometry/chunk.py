"""Chunk rules: which positions of a stored dim a rank of the mesh holds.

Every rule maps a list of intervals and a rank to a list of intervals, so mesh dims compose left to right. A rule is
data; the oracle is what torch does with `arange`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from transaxle.axes.geometry.piece import Interval
from transaxle.errors import refuse

Intervals = tuple[Interval, ...]
"""Positions held, in local order; the local tensor is their concatenation."""


def whole(length: int) -> Intervals:
    """Return the intervals of an uncut dim."""
    return ((0, length),)


def count_positions(intervals: Sequence[Interval]) -> int:
    """Return the number of positions held."""
    return sum(stop - start for start, stop in intervals)


def take(intervals: Sequence[Interval], start: int, stop: int) -> Intervals:
    """Return the local positions `[start, stop)` of concatenated intervals, as intervals; adjacent ones are joined."""
    taken: list[Interval] = []
    base = 0
    for first, last in intervals:
        low, high = max(start - base, 0), min(stop - base, last - first)
        if low < high:
            if taken and taken[-1][1] == first + low:
                taken[-1] = (taken[-1][0], first + high)
            else:
                taken.append((first + low, first + high))
        base += last - first
    return tuple(taken)


class ChunkRule(Protocol):
    """How `parts` ranks divide the intervals of a dim among them."""

    def __call__(self, intervals: Intervals, parts: int, rank: int, /) -> Intervals:
        """Return the intervals that `rank` of `parts` gets of `intervals`."""


def torch_chunk(count: int, parts: int, rank: int) -> Interval:
    """Return the rows of `rank` under `torch.chunk`: ceil-sized chunks, the last ones short or empty."""
    step = -(-count // parts)
    return min(rank * step, count), min((rank + 1) * step, count)


class Shard(msgspec.Struct, frozen=True):
    """DTensor's `Shard`: `torch.chunk`."""

    def __call__(self, intervals: Intervals, parts: int, rank: int) -> Intervals:
        """See `ChunkRule`."""
        return take(intervals, *torch_chunk(count_positions(intervals), parts, rank))


class StridedShard(msgspec.Struct, frozen=True):
    """DTensor's `_StridedShard(split_factor)`: chunk into `split_factor`, then chunk each of those over the ranks."""

    split_factor: int
    """Number of outer chunks."""

    def __call__(self, intervals: Intervals, parts: int, rank: int) -> Intervals:
        """See `ChunkRule`."""
        taken: list[Interval] = []
        total = count_positions(intervals)
        for outer in range(self.split_factor):
            # Every rank gets a chunk of each outer chunk, so its local tensor joins `split_factor` pieces.
            start, stop = torch_chunk(total, self.split_factor, outer)
            low, high = torch_chunk(stop - start, parts, rank)
            taken.extend(take(intervals, start + low, start + high))
        return take(taken, 0, total)


class Widths(msgspec.Struct, frozen=True):
    """Explicit widths per rank (DeepSpeed's uneven cuts); zero widths are fine."""

    widths: tuple[int, ...]
    """Rows of each rank, in rank order."""

    def __call__(self, intervals: Intervals, parts: int, rank: int) -> Intervals:
        """See `ChunkRule`.

        Raises:
            Refused: SHAPE_MISMATCH where the widths do not sum to the length, or are not one per rank.
        """
        total = count_positions(intervals)
        if len(self.widths) != parts or sum(self.widths) != total:
            raise refuse("SHAPE_MISMATCH", f"widths {list(self.widths)} over {parts} ranks do not sum to {total} rows")
        start = sum(self.widths[:rank])
        return take(intervals, start, start + self.widths[rank])


class Replicated(msgspec.Struct, frozen=True):
    """Every rank holds all of it, such as kv heads where there are fewer than ranks."""

    def __call__(self, intervals: Intervals, _parts: int, _rank: int, /) -> Intervals:
        """See `ChunkRule`."""
        return intervals


class PerComponent(msgspec.Struct, frozen=True):
    """One rule per component of a direct sum; the local tensor is the sum of the local shares, in order."""

    lengths: tuple[int, ...]
    """Rows of each component, in stored order."""
    rules: tuple[ChunkRule, ...]
    """The rule of each component."""

    def __call__(self, intervals: Intervals, parts: int, rank: int) -> Intervals:
        """See `ChunkRule`.

        Raises:
            Refused: SHAPE_MISMATCH where the components do not sum to the length.
        """
        if sum(self.lengths) != count_positions(intervals):
            raise refuse(
                "SHAPE_MISMATCH", f"components {list(self.lengths)} do not sum to {count_positions(intervals)} rows"
            )
        taken: list[Interval] = []
        base = 0
        for rows, rule in zip(self.lengths, self.rules, strict=True):
            taken.extend(rule(take(intervals, base, base + rows), parts, rank))
            base += rows
        return tuple(taken)


class MeshCut(msgspec.Struct, frozen=True):
    """One mesh dim's effect on a stored tensor."""

    dim: int | None
    """Stored dim that is cut (negative counts from the end); None: replicated."""
    parts: int
    """Size of the mesh dim."""
    rank: int
    """This rank's coordinate in it."""
    rule: ChunkRule = Shard()
    """How the dim is divided."""


def place(
    shape: Sequence[int], cuts: Sequence[MeshCut], base: Sequence[Intervals] | None = None
) -> tuple[Intervals, ...]:
    """Return what one rank holds of a stored tensor, per dim; mesh dims compose left to right.

    Args:
        shape: of the stored tensor.
        cuts: one for each mesh dim.
        base: what is cut, per dim; None: all of it.

    Raises:
        Refused: what a rule refuses; SHAPE_MISMATCH for a dim the tensor does not have.
    """
    per_dim = [whole(size) for size in shape] if base is None else list(base)
    for cut in cuts:
        if cut.dim is None:
            continue
        if not -len(shape) <= cut.dim < len(shape):
            raise refuse("SHAPE_MISMATCH", f"dim {cut.dim} is split, but the shape is {list(shape)}")
        per_dim[cut.dim] = cut.rule(per_dim[cut.dim], cut.parts, cut.rank)
    return tuple(per_dim)
