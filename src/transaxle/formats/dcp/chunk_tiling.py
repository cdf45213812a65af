"""Tiling: whether chunks cover every element of a tensor exactly once, decided without comparing chunks.

A box is the running sum, along every dim, of plus and minus ones at its corners. Running sums are invertible. So the
boxes cover every index once if and only if their corners, added up, are the corners of the tensor: one pass over the
chunks, exact for any arrangement, however the boxes interlock. Otherwise the first corner that remains (in row-major
order) is the first wrong index, and its sign says how.
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
"""Cap on the corners of one tensor's chunks, two along each dim that is cut: a million chunks, if two dims are cut."""

ChunkBox = tuple[Shape, Shape]
"""First index along each dim, and elements along each dim."""


class Flaw(NamedTuple):
    """The first index, in row-major order, that is not in exactly one box."""

    at: Shape
    """The index."""
    copies: int
    """Number of boxes that hold it: 0 for a hole, 2 or more for an overlap."""


class TooManyCornersError(ValueError):
    """The boxes are too many, or cut too many dims at once."""


def outside(shape: Shape, box: ChunkBox) -> bool:
    """Tell whether a box reaches outside a tensor of this shape."""
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
        shape: of the tensor.
        boxes: all inside of it, see `outside`; those without elements hold nothing.

    Raises:
        TooManyCornersError: for boxes that have more corners than `MAX_CORNERS`.
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


def tiled(name: str, shape: Shape, boxes: Sequence[ChunkBox], file: str, faults: Faults) -> bool:
    """Check that the chunks of a tensor cover it exactly once; what is wrong becomes a fault.

    Args:
        name: what the tensor is called.
        shape: its shape.
        boxes: first index and size of each chunk.
        file: the file that says so.
        faults: receives CORRUPT, INCOMPLETE, OVERLAP or UNSUPPORTED.
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
        first, second, *_ = (list(boxes[number][0]) for number in holding(at, boxes))
        faults.add("OVERLAP", f"the chunks at {first} and {second} both contain the index {list(at)}", file, name)
    else:
        faults.add("INCOMPLETE", f"none of its {len(boxes)} chunks contains the index {list(at)}", file, name)
    return False


def _is_grid(shape: Shape, boxes: Sequence[ChunkBox]) -> bool:
    """Tell whether boxes of one size begin at all of its multiples, as they nearly always do: these tile a tensor."""
    sizes = boxes[0][1] if boxes else ()
    if len(sizes) != len(shape) or 0 in sizes or any(size % step for size, step in zip(shape, sizes, strict=True)):
        return False
    counts = (size // step for size, step in zip(shape, sizes, strict=True))
    if prod(counts) != len(boxes):
        return False
    starts, shapes = zip(*boxes, strict=True)
    multiples = tuple(product(*(range(0, size, step) for size, step in zip(shape, sizes, strict=True))))
    return shapes.count(sizes) == len(boxes) and (starts == multiples or set(starts) == set(multiples))


def holding(index: Shape, boxes: Iterable[ChunkBox]) -> list[int]:
    """Return the numbers of the boxes that hold an index."""
    return [
        number
        for number, (starts, sizes) in enumerate(boxes)
        if all(start <= at < start + size for at, start, size in zip(index, starts, sizes, strict=True))
    ]


def _add(corners: defaultdict[Shape, int], spans: Sequence[tuple[int, int]], weight: int) -> None:
    """Add the corners of a box, given by its intervals; a corner's sign is that of its number of upper ends."""
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
