"""Descriptions: the same bytes under another dtype and shape, as `view` does it for arrays.

A file keeps codes of four bits as bytes, in as many dims as its convention likes (`U8 [E, 2F, D/32, 16]`), and a scale
of a whole tensor as `[1]` or `[]`. The tables and the tiles count elements: `F4 [E, 2F, D]`, one scale per tile. Both
describe the same row-major bytes, so nothing is moved: only positions are translated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

import msgspec
from msgspec.structs import replace

from transaxle.axes.geometry.piece import Interval
from transaxle.errors import refuse
from transaxle.formats.catalog import Entry, Extent
from transaxle.formats.dtype import ITEM_BITS

Shape = tuple[int, ...]
Intervals = Sequence[Sequence[Interval]]
_Group = tuple[tuple[int, ...], int | None]
"""Dims of the one description that are one dim of the other; None where they are all of size 1 and have none there."""


@lru_cache(maxsize=4096)
def _unit(dtype: str, other: str) -> int:
    """Return how many elements of the second type one element of the first is."""
    return ITEM_BITS.get(dtype, 8) // ITEM_BITS.get(other, 8)


@lru_cache(maxsize=4096)
def _groups(stored: Shape, shape: Shape) -> tuple[_Group, ...] | None:
    """Pair the dims of a shape with those of another one that merges some of them; sizes of 1 come and go.

    Returns:
        Groups in order; None where the first shape would have to be split.
    """
    found: list[_Group] = []
    waiting = [dim for dim, size in enumerate(stored) if size != 1]
    for dim, size in enumerate(shape):
        if size == 1:
            continue
        taken: list[int] = []
        while waiting and (not taken or prod(stored[d] for d in taken) < size):
            taken.append(waiting.pop(0))
        if prod(stored[d] for d in taken) != size:
            return None
        found.append((tuple(taken), dim))
    alone = tuple(dim for dim, size in enumerate(stored) if size == 1)
    return None if waiting else (*found, (alone, None))


def _paired(name: str, stored: Shape, shape: Shape) -> tuple[_Group, ...]:
    found = _groups(stored, shape)
    if found is None:
        message = f"{list(stored)} elements cannot be viewed as {list(shape)} when only a part of them is read"
        raise refuse("UNSUPPORTED", message, tensor=name)
    return found


def _scaled(shape: Shape, unit: int) -> Shape:
    """Count the last dim in smaller elements."""
    return (*shape[:-1], shape[-1] * unit) if shape else shape


def redescribed(entry: Entry, name: str, dtype: str, shape: Shape) -> Entry:
    """Describe a stored tensor by another dtype and shape of the same bytes.

    Args:
        entry: as it is stored.
        name: what it is called now.
        dtype: safetensors code, of elements that are no larger.
        shape: elements along each dim.

    Raises:
        Refused: SHAPE_MISMATCH where the two are not the same number of bytes; UNSUPPORTED where it is stored in chunks
            or strides that this shape has no boxes for.
    """
    unit = _unit(entry.dtype, dtype)
    stored = _scaled(entry.shape, unit)
    if prod(stored) != prod(shape):
        message = f"{entry.dtype} {list(entry.shape)} and {dtype} {list(shape)} do not have the same number of bytes"
        raise refuse("SHAPE_MISMATCH", message, tensor=entry.name)
    if stored == shape and unit == 1:
        return replace(entry, name=name, dtype=dtype)
    whole = len(entry.extents) == 1 and entry.extents[0].shape == entry.shape and entry.extents[0].strides is None
    if whole or not prod(shape):
        extents = tuple(
            msgspec.structs.replace(e, start=(0,) * len(shape), shape=shape, strides=None) for e in entry.extents[:1]
        )
    else:
        groups = _paired(entry.name, stored, shape)
        extents = tuple(_extent(entry.name, extent, unit, stored, shape, groups) for extent in entry.extents)
    return Entry(name, dtype, shape, extents)


def _extent(name: str, extent: Extent, unit: int, stored: Shape, shape: Shape, groups: Sequence[_Group]) -> Extent:
    """Describe one chunk: it must be a box in both shapes, and its strides those of a box."""
    first, sizes = _scaled(extent.start, unit), _scaled(extent.shape, unit)
    steps = None
    if extent.strides is not None:
        steps = tuple(step * unit for step in extent.strides)
        if unit > 1 and (extent.strides[-1:] == (1,) or extent.shape[-1:] == (1,)):
            steps = (*steps[:-1], 1)
    start, held, strides = [0] * len(shape), [1] * len(shape), [1] * len(shape)
    for dims, dim in groups:
        if dim is None:
            if any(sizes[d] == 0 for d in dims):
                held = [0] * len(shape)
            continue
        at, count, step = 0, 1, None
        whole = True
        for d in reversed(dims):
            inner = prod(stored[e] for e in dims if e > d)
            fits = whole or sizes[d] == 1
            if steps is not None and sizes[d] > 1:
                fits = fits and (step is None or steps[d] == step * count)
                step = steps[d] if step is None else step
            if not fits or (unit > 1 and d == len(stored) - 1 and steps is not None and steps[d] != 1):
                message = f"its chunk of {list(extent.shape)} at {list(extent.start)} is not a box of {list(shape)}"
                raise refuse("UNSUPPORTED", message, tensor=name)
            at += first[d] * inner
            count *= sizes[d]
            whole = whole and sizes[d] == stored[d]
        start[dim], held[dim], strides[dim] = at, count, 1 if step is None else step
    return Extent(tuple(start), tuple(held), extent.file, extent.offset, None if steps is None else tuple(strides))


def positions(
    name: str, intervals: Intervals, dtype: str, stored: Shape, target: str, shape: Shape
) -> list[list[Interval]] | None:
    """Translate a box of a stored tensor into the positions of another description of it.

    Args:
        name: the tensor, for errors.
        intervals: per stored dim the positions wanted, in order.
        dtype: type of the stored elements.
        stored: elements along each stored dim.
        target: type of the other description's elements, no larger ones.
        shape: elements along each of its dims.

    Returns:
        Per dim of the other description, the same elements in the same order; None where there are none.

    Raises:
        Refused: UNSUPPORTED where the other description has no such positions.
    """
    if not all(any(start < stop for start, stop in held) for held in intervals):
        return None
    unit = _unit(dtype, target)
    scaled = [list(held) for held in intervals]
    if scaled:
        scaled[-1] = [(start * unit, stop * unit) for start, stop in scaled[-1]]
    sizes = _scaled(stored, unit)
    found: list[list[Interval]] = [[(0, 1)] for _ in shape]
    for dims, dim in _paired(name, sizes, shape):
        if dim is not None:
            found[dim] = list(_merged([scaled[d] for d in dims], [sizes[d] for d in dims]))
    return found


def _merged(intervals: Sequence[Sequence[Interval]], sizes: Sequence[int]) -> Iterator[Interval]:
    """Yield the positions of several dims counted as one."""
    *outer, held = intervals
    if not outer:
        yield from held
        return
    size = sizes[-1]
    for first, last in _merged(outer, sizes[:-1]):
        if list(held) == [(0, size)]:
            yield first * size, last * size
        else:
            yield from ((at * size + start, at * size + stop) for at in range(first, last) for start, stop in held)
