"""Nested strides: where the elements of a box lie in one dimension of memory, and how an interval cuts them.

A *nested* list of `(size, stride)` loops, outermost first, has each stride at least as large as everything inside it
spans, so positions grow with the lexicographic order of the indices. Three facts follow and carry the whole algebra:
an interval of positions holds a contiguous range of that order (`rank`), such a range is at most `2k-1` boxes
(`lexicographic_boxes`), and two adjacent loops that tile each other are one loop (`coalesce`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

Box = tuple[tuple[int, int], ...]
"""A rectangular region: `(start, stop)` along each axis."""


def rank(loops: Sequence[tuple[int, int]], position: int) -> int:
    """Count the elements of nested loops that lie before `position`.

    Post-condition: `rank(loops, p) == sum(q < p for q in positions(loops))`, for any integer `p`.
    """
    count = 0
    inner = prod(size for size, _ in loops)
    if inner == 0 or position <= 0:
        return 0
    for size, stride in loops:
        inner //= size
        passed = position // stride
        # The position is beyond this loop: all its elements lie before it.
        if passed >= size:
            return count + size * inner
        count += passed * inner
        position -= passed * stride
    return count + (position > 0)


def lexicographic_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Split the range `[start, stop)` of the row-major order of `shape` into boxes, in order.

    Post-conditions: the boxes are disjoint, their union is the range, and there are at most `2 * len(shape) - 1`.
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner_shape = shape[1:]
    inner = prod(inner_shape)
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    # The range lies inside one index of the outermost axis.
    if first == last:
        for box in lexicographic_boxes(inner_shape, head, tail):
            yield ((first, first + 1), *box)
        return
    if head:
        for box in lexicographic_boxes(inner_shape, head, inner):
            yield ((first, first + 1), *box)
        first += 1
    if first < last:
        yield ((first, last), *((0, size) for size in inner_shape))
    if tail:
        for box in lexicographic_boxes(inner_shape, 0, tail):
            yield ((last, last + 1), *box)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the element strides of a dense row-major array."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


Loop = tuple[int, int, int]
"""One loop of a copy: `(size, source stride, target stride)` in elements."""


def coalesce(loops: Sequence[Loop]) -> tuple[Loop, ...]:
    """Order the loops of a copy by target stride and join those that are one run on both sides.

    Post-conditions: the same set of `(source, target)` positions, in target order; loops of size 1 are gone.
    """
    joined: list[Loop] = []
    for size, source, target in sorted((loop for loop in loops if loop[0] != 1), key=lambda loop: -loop[2]):
        if joined:
            outer_size, outer_source, outer_target = joined[-1]
            if outer_source == size * source and outer_target == size * target:
                joined[-1] = (outer_size * size, source, target)
                continue
        joined.append((size, source, target))
    return tuple(joined)
