"""Checks that chunks cover every element of a tensor exactly once, without comparing chunks with one another.

The indicator function of a box is the running sum, along every dim, of plus and minus ones at its corners. Running sums
are invertible, so the boxes cover every index once if and only if the signed corners of all boxes add up to the corners
of the tensor. So one pass over the chunks decides exactly whether they cover the tensor once, for any arrangement. If
corners remain, the first of them in row-major order is the first wrong index; its sign tells a hole from an overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from transaxle.errors import Faults
from transaxle.formats.catalog import Shape

MAX_CORNERS = 1 << 22
"""Cap on the corners of one tensor's chunks, two along each dim that is cut: a million chunks that cut two dims."""

ChunkBox = tuple[Shape, Shape]
"""A chunk as (first index along each dim, number of elements along each dim)."""


class Flaw(NamedTuple):
    """The first index of a tensor, in row-major order, that zero or several boxes contain."""

    at: Shape
    """Index of the first element that is covered wrongly."""
    copies: int
    """Number of boxes that contain this index: 0 for a hole, 2 or more for an overlap."""


class TooManyCornersError(ValueError):
    """The boxes have more than `MAX_CORNERS` corners: too many boxes, or too many dims that are cut."""


def outside(shape: Shape, box: ChunkBox) -> bool:
    """Tell whether a box has other dims than a tensor of this shape, or reaches beyond it."""
    starts, sizes = box
    if not len(starts) == len(sizes) == len(shape):
        return True
    return any(
        start < 0 or size < 0 or start + size > dim_size
        for start, size, dim_size in zip(starts, sizes, shape, strict=True)
    )


def flaw(shape: Shape, boxes: Sequence[ChunkBox]) -> Flaw | None:
    """Return the first index of a tensor that its boxes do not cover exactly once; None if they tile it.

    Args:
        shape: the tensor's shape.
        boxes: the chunks, all inside the tensor (see `outside`); empty ones are ignored.

    Raises:
        TooManyCornersError: the boxes have more corners than `MAX_CORNERS`.
    """
    if 0 in shape:
        return None
    non_empty = [box for box in boxes if 0 not in box[1]]
    cut = [dim for dim, size in enumerate(shape) if any(sizes[dim] != size for _, sizes in non_empty)]
    if len(non_empty) << len(cut) > MAX_CORNERS:
        raise TooManyCornersError(f"{len(non_empty)} chunks along {len(cut)} dims are too many to check")
    corner_sums: defaultdict[Shape, int] = defaultdict(int)
    _add(corner_sums, [(0, shape[dim]) for dim in cut], -1)
    for starts, sizes in non_empty:
        _add(corner_sums, [(starts[dim], starts[dim] + sizes[dim]) for dim in cut], 1)
    first_wrong = min((corner for corner, count in corner_sums.items() if count), default=None)
    if first_wrong is None:
        return None
    index = [0] * len(shape)
    for dim, position in zip(cut, first_wrong, strict=True):
        index[dim] = position
    return Flaw(tuple(index), 1 + corner_sums[first_wrong])


def check_tiling(name: str, shape: Shape, boxes: Sequence[ChunkBox], file: str, faults: Faults) -> bool:
    """Check that the chunks of a tensor cover it exactly once, and add a fault if they do not.

    Args:
        name: name of the tensor.
        shape: shape of the tensor.
        boxes: the chunks, each as first index and shape.
        file: the file that describes the chunks.
        faults: receives CORRUPT, INCOMPLETE, OVERLAP or UNSUPPORTED.

    Returns:
        whether the chunks cover the tensor exactly once.
    """
    if _is_grid(shape, boxes):
        return True
    for start, sizes in boxes:
        if outside(shape, (start, sizes)):
            message = f"a chunk of {list(sizes)} at {list(start)} does not lie inside the shape {list(shape)}"
            faults.add("CORRUPT", message, file, name)
            return False
    try:
        first_flaw = flaw(shape, boxes)
    except TooManyCornersError as error:
        faults.add("UNSUPPORTED", str(error), file, name)
        return False
    if first_flaw is None:
        return True
    at, copies = first_flaw
    if copies:
        first, second, *_ = (list(boxes[number][0]) for number in boxes_containing(at, boxes))
        faults.add("OVERLAP", f"the chunks at {first} and {second} both contain the index {list(at)}", file, name)
    else:
        faults.add("INCOMPLETE", f"none of its {len(boxes)} chunks contains the index {list(at)}", file, name)
    return False


def _is_grid(shape: Shape, boxes: Sequence[ChunkBox]) -> bool:
    """Tell quickly whether boxes form a regular grid: all of one size, one at each multiple of it."""
    sizes = boxes[0][1] if boxes else ()
    if len(sizes) != len(shape) or 0 in sizes or any(size % step for size, step in zip(shape, sizes, strict=True)):
        return False
    counts = (size // step for size, step in zip(shape, sizes, strict=True))
    if prod(counts) != len(boxes):
        return False
    starts, shapes = zip(*boxes, strict=True)
    multiples = tuple(product(*(range(0, size, step) for size, step in zip(shape, sizes, strict=True))))
    return shapes.count(sizes) == len(boxes) and (starts == multiples or set(starts) == set(multiples))


def boxes_containing(index: Shape, boxes: Iterable[ChunkBox]) -> list[int]:
    """Return the positions in `boxes` of those that contain an index."""
    return [
        number
        for number, (starts, sizes) in enumerate(boxes)
        if all(start <= at < start + size for at, start, size in zip(index, starts, sizes, strict=True))
    ]


def _add(corners: defaultdict[Shape, int], spans: Sequence[tuple[int, int]], weight: int) -> None:
    """Add the signed corners of a box: positive where an even number of its coordinates are interval ends.

    Args:
        corners: signed sum by corner, so far; changed in place.
        spans: the box's interval (start, stop) along each dim.
        weight: 1 to add the box, -1 to subtract it.
    """
    if not spans:
        corners[()] += weight
        return
    if len(spans) == 1:
        corners[spans[0][:1]] += weight
        corners[spans[0][1:]] -= weight
        return
    for ends in product((0, 1), repeat=len(spans)):
        sign = -weight if sum(ends) % 2 else weight
        corners[tuple(span[end] for span, end in zip(spans, ends, strict=True))] += sign
