"""Chunk rules: which positions of a stored dim a rank of the mesh holds.

Every rule maps a list of intervals and a rank to a list of intervals, so mesh dims compose left to right. A rule is
data; the oracle is what torch does with `arange`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from transaxle.axes.geometry.piece import Interval
from transaxle.axes.geometry.strided import row_major
from transaxle.axes.notation.expression import AxisSizes, Layout, Node, Share, Sum, size
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


@dataclass(frozen=True, slots=True)
class Shard:
    """DTensor's `Shard`: `torch.chunk`."""

    def __call__(self, intervals: Intervals, parts: int, rank: int) -> Intervals:
        """See `ChunkRule`."""
        return take(intervals, *torch_chunk(count_positions(intervals), parts, rank))


@dataclass(frozen=True, slots=True)
class StridedShard:
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


@dataclass(frozen=True, slots=True)
class Even:
    """Equal shares or a refusal (Megatron)."""

    def __call__(self, intervals: Intervals, parts: int, rank: int) -> Intervals:
        """See `ChunkRule`.

        Raises:
            Refused: SHAPE_MISMATCH where the length does not divide.
        """
        total = count_positions(intervals)
        if total % parts:
            raise refuse("SHAPE_MISMATCH", f"{total} rows do not divide evenly over {parts} ranks")
        step = total // parts
        return take(intervals, rank * step, (rank + 1) * step)


@dataclass(frozen=True, slots=True)
class Widths:
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


@dataclass(frozen=True, slots=True)
class InUnits:
    """Another rule applied to whole units of rows: heads, not rows."""

    rule: ChunkRule
    """The rule that divides the units."""
    rows: int
    """Rows per unit."""

    def __call__(self, intervals: Intervals, parts: int, rank: int) -> Intervals:
        """See `ChunkRule`.

        Raises:
            Refused: SHAPE_MISMATCH where the rows are not whole units.
        """
        total = count_positions(intervals)
        if total % self.rows:
            raise refuse("SHAPE_MISMATCH", f"{total} rows are not a multiple of the unit of {self.rows}")
        units = self.rule(whole(total // self.rows), parts, rank)
        return tuple(interval for a, b in units for interval in take(intervals, a * self.rows, b * self.rows))


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every rank holds all of it, such as kv heads where there are fewer than ranks."""

    def __call__(self, intervals: Intervals, _parts: int, _rank: int, /) -> Intervals:
        """See `ChunkRule`."""
        return intervals


@dataclass(frozen=True, slots=True)
class PerComponent:
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


def per_component(dim: Node, sizes: AxisSizes, rules: Mapping[str, ChunkRule]) -> PerComponent:
    """Build the rule that cuts each component of a blocked sum by its own rule.

    Args:
        dim: the stored dim's node; it must be a sum (its components lie one after the other).
        sizes: axis -> size.
        rules: component -> rule; a component without one is held by every rank.

    Raises:
        Refused: UNSUPPORTED where the dim is no sum.
    """
    if not isinstance(dim, Sum):
        raise refuse("UNSUPPORTED", "only a dim that is a direct sum [a:… | b:…] can be split per component")
    return PerComponent(
        tuple(size(part, sizes) for _, part in dim.segments),
        tuple(rules.get(name, Replicated()) for name, _ in dim.segments),
    )


@dataclass(frozen=True, slots=True)
class MeshCut:
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


def flatten(layout: Layout) -> Layout:
    """Return the layout of the same tensor seen as one flat dim, so that flat cuts are ordinary cuts."""
    return bucket({"": layout}, "{component}")


def bucket(layouts: Mapping[str, Layout], key: str = "{tensor}/{component}") -> Layout:
    """Return the layout of several tensors flattened one after the other (a ZeRO or FSDP1 flat buffer).

    Args:
        layouts: tensor -> its layout, in stored order; a layout without components is alignment.
        key: how a component of the bucket is named.
    """
    shares: dict[str, tuple[Share, ...]] = {}
    start = 0
    for tensor, layout in layouts.items():
        strides = row_major(layout.shape)
        for name, dims in layout.shares.items():
            axes = tuple(
                (axis, count, step * stride)
                for share, stride in zip(dims, strides, strict=True)
                for axis, count, step in share.axes
            )
            offset = sum(share.offset * stride for share, stride in zip(dims, strides, strict=True))
            shares[key.format(tensor=tensor, component=name)] = (Share(start + offset, axes),)
        start += prod(layout.shape)
    return Layout((start,), shares)
