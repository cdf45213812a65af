"""Divide a cut axis: which of its indices each tensor-parallel rank has.

An index is never split: one of `g` is a group of query heads with the key and value head that they share. Where there
are more ranks than groups, several ranks share a group: each has some of its query heads, and all of them its key and
value head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transaxle.axes.geometry.chunk import torch_chunk
from transaxle.axes.geometry.ranges import Ranges
from transaxle.errors import refuse


@dataclass(frozen=True, slots=True)
class Shares:
    """How an axis is shared out."""

    axis: str
    """The axis."""
    ranges: tuple[Ranges, ...]
    """For each rank, its indices of the axis, and those of the axis within it where ranks share an index."""


def share_out(
    axis: str, sizes: Mapping[str, int], ranks: int, inner: str | None, widths: Sequence[int] | None = None
) -> Shares:
    """Share out an axis.

    Args:
        axis: the axis.
        sizes: axis -> size.
        ranks: tensor-parallel degree.
        inner: the axis within it that several ranks may share out; None: there is none.
        widths: how many indices each rank gets, where the user says so.

    Returns:
        What `torch.chunk` gives; where that leaves a rank nothing, shares that differ by one at most.

    Raises:
        Refused: SHAPE_MISMATCH where a rank would have nothing, or the widths do not sum to the axis.
    """
    count = sizes[axis]
    if widths is not None:
        return Shares(axis, tuple({axis: span} for span in _explicit(axis, count, ranks, widths)))
    if count >= ranks:
        return Shares(axis, tuple({axis: span} for span in _spans(count, ranks)))
    if inner is None or count * sizes[inner] < ranks:
        most = count if inner is None else count * sizes[inner]
        what = f"{axis}={count}" if inner is None else f"({axis} {inner})={count}x{sizes[inner]}={most}"
        raise refuse("SHAPE_MISMATCH", f"{what} cannot be divided over {ranks} ranks without cutting through one")
    ranges: list[Ranges] = []
    for index, (first, last) in enumerate(_spans(ranks, count)):
        if sizes[inner] < last - first:
            message = f"{last - first} ranks would share one of {axis}={count}, which has only {inner}={sizes[inner]}"
            raise refuse("SHAPE_MISMATCH", f"{message} to divide")
        ranges += [{axis: (index, index + 1), inner: span} for span in _spans(sizes[inner], last - first)]
    return Shares(axis, tuple(ranges))


def _spans(count: int, parts: int) -> list[tuple[int, int]]:
    spans = [torch_chunk(count, parts, part) for part in range(parts)]
    if spans[-1][0] < spans[-1][1]:
        return spans
    step, more = divmod(count, parts)
    ends = [step * (part + 1) + min(part + 1, more) for part in range(parts)]
    return list(zip([0, *ends], ends, strict=False))


def _explicit(axis: str, count: int, ranks: int, widths: Sequence[int]) -> list[tuple[int, int]]:
    if len(widths) != ranks or sum(widths) != count or min(widths, default=0) < 1:
        message = f"widths {list(widths)} do not divide {axis}={count} over {ranks} ranks, with at least one for each"
        raise refuse("SHAPE_MISMATCH", message)
    ends = [sum(widths[: rank + 1]) for rank in range(ranks)]
    return list(zip([0, *ends], ends, strict=False))
