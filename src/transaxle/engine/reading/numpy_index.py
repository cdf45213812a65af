"""Slices as numpy writes them, `[0:2, ..., -1]`: the smallest box that holds what they select, and the rest of the way.

A box is read from the files, so its bytes alone are; steps, reversals, dropped and new dims are then numpy's own.
"""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import SupportsIndex, TypeAlias

import msgspec

from transaxle.arguments import wrong_type

One: TypeAlias = SupportsIndex | slice | EllipsisType | None
Index: TypeAlias = One | tuple[One, ...]
"""What may stand between the brackets of a tensor."""


class BoxIndex(msgspec.Struct, frozen=True):
    """An index, taken apart."""

    box: tuple[slice, ...]
    """What is read: one slice of step 1 for each dim."""
    inside: tuple[int | slice | None, ...]
    """What numpy selects in it."""


def taken_apart(index: object, shape: tuple[int, ...]) -> BoxIndex:
    """Take an index apart.

    Raises:
        IndexError: it has too many dims, two `...`, or a number outside its dim, as numpy says it.
        TypeError: it is no slice, number, `...` or None.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    dims = sum(part is not None and part is not Ellipsis for part in parts)
    dots = [place for place, part in enumerate(parts) if part is Ellipsis]
    if dims > len(shape):
        raise IndexError(f"too many indices: the tensor has {len(shape)} dims, but {dims} were indexed")
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    place = dots[0] if dots else len(parts)
    parts[place : place + 1] = [slice(None)] * (len(shape) - dims)
    box: list[slice] = []
    inside: list[int | slice | None] = []
    for part in parts:
        if part is None:
            inside.append(None)
            continue
        span, rest = _of_dim(part, shape[len(box)], len(box))
        box.append(span)
        inside.append(rest)
    return BoxIndex(tuple(box), tuple(inside))


def _of_dim(part: object, size: int, dim: int) -> tuple[slice, int | slice]:
    """Return what is read of one dim, and what is selected in that."""
    if isinstance(part, slice):
        found = range(*part.indices(size))
        if not found:
            return slice(0, 0), slice(None)
        return slice(min(found), max(found) + 1), slice(None, None, found.step)
    if isinstance(part, bool) or getattr(part, "shape", None) or not isinstance(part, SupportsIndex):
        raise wrong_type(
            "an index of a tensor", "slices, numbers, ... and None (.numpy() gives an array, for more)", part
        )
    number = operator.index(part)
    if not -size <= number < size:
        raise IndexError(f"index {number} is out of bounds for dim {dim} with size {size}")
    return slice(number % size, number % size + 1), 0
