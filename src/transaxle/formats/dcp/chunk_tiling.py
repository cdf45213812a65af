"""Checks that chunks cover every element of a tensor exactly once, without comparing pairs of chunks.

A chunk of a tensor is a box of indices. The indicator function of a box (1 inside, 0 outside) is the cumulative sum,
along every dim, of +1 and -1 at the box's corners. Cumulative sums are invertible: the boxes cover every index once if
and only if the signed corners of all boxes add up to the signed corners of the tensor. So a single pass over a tensor's
chunks decides for any arrangement of chunks whether they cover the tensor exactly once. Where the two sums differ, the
first differing corner in row-major order is the first wrong index, and the sign of the difference distinguishes a hole
from an overlap.
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
"""Maximum of the total corners of one tensor's chunks; a chunk has 2^n corners if n dims are cut."""

ChunkBox = tuple[Shape, Shape]
"""A chunk of a tensor, as (first index along each dim, size along each dim)."""


class Flaw(NamedTuple):
    """The first element of a tensor, in row-major order, that is covered by no chunk or by more than one chunk."""

    at: Shape
    """Index of the element, one number for each dim."""
    copies: int
    """Number of chunks that cover the element: 0 is a hole, 2 or more an overlap."""


class TooManyCornersError(ValueError):
    """The chunks have more than `MAX_CORNERS` corners: there are too many chunks, or too many dims are cut."""


def outside(shape: Shape, box: ChunkBox) -> bool:
    """Return whether a chunk reaches beyond a tensor of this shape, or has a different number of dims."""
    starts, sizes = box
    if not len(starts) == len(sizes) == len(shape):
        return True
    return any(
        start < 0 or size < 0 or start + size > dim_size
        for start, size, dim_size in zip(starts, sizes, shape, strict=True)
    )


def flaw(shape: Shape, boxes: Sequence[ChunkBox]) -> Flaw | None:
    """Return the first element of a tensor that its chunks do not cover exactly once; None if they cover every element
    exactly once.

    Args:
        shape: the tensor's shape.
        boxes: the chunks, all inside the tensor (see `outside`); empty chunks are ignored.

    Raises:
        TooManyCornersError: if the chunks have more than `MAX_CORNERS` corners.
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
    """Check that the chunks of a tensor cover it exactly once; if not, add a fault.

    Args:
        name: name of the tensor.
        shape: shape of the tensor.
        boxes: the chunks, each as (first index, shape).
        file: name of the file that describes the chunks, for error messages.
        faults: list of faults, to which the problem is added: CORRUPT (a chunk outside the tensor), INCOMPLETE (a
            hole), OVERLAP or UNSUPPORTED.

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
    """Return whether the chunks form a regular grid (all of one size, one chunk at each multiple of this size); this is
    a fast check.
    """
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
    """Return the list positions of the chunks that contain an index."""
    return [
        number
        for number, (starts, sizes) in enumerate(boxes)
        if all(start <= at < start + size for at, start, size in zip(index, starts, sizes, strict=True))
    ]


def _add(corners: defaultdict[Shape, int], spans: Sequence[tuple[int, int]], weight: int) -> None:
    """Add the signed corners of a box: +1 for corners with an even number of stop coordinates, -1 for corners with an
    odd number.

    Args:
        corners: corner -> sum of the signs of all boxes so far; changed in place.
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
