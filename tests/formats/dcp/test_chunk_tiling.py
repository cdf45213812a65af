"""Whether boxes tile: held to counting every index."""

from __future__ import annotations

import time
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from transaxle.errors import Faults
from transaxle.formats.catalog import Shape
from transaxle.formats.dcp.chunk_tiling import (
    MAX_CORNERS,
    ChunkBox,
    TooManyCornersError,
    boxes_containing,
    check_tiling,
    flaw,
    outside,
)


@st.composite
def boxes_in_a_shape(draw: st.DrawFn) -> tuple[Shape, list[ChunkBox]]:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    boxes = []
    for _ in range(draw(st.integers(0, 4))):
        starts = tuple(draw(st.integers(0, size)) for size in shape)
        boxes.append((starts, tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, starts, strict=True))))
    return shape, boxes


@st.composite
def a_tiling(draw: st.DrawFn) -> tuple[Shape, list[ChunkBox]]:
    """Boxes split in two again and again, at any place along any dim: not a grid."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    boxes: list[ChunkBox] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8))):
        starts, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        first = draw(st.integers(0, sizes[dim]))
        for start, size in ((0, first), (first, sizes[dim] - first)):
            boxes.append(
                ((*starts[:dim], starts[dim] + start, *starts[dim + 1 :]), (*sizes[:dim], size, *sizes[dim + 1 :]))
            )
    return shape, draw(st.permutations(boxes))


def counted(shape: Shape, boxes: list[ChunkBox]) -> tuple[Shape, int] | None:
    """The first index that is not in one box, found by counting."""
    held = np.zeros(shape, int)
    for starts, sizes in boxes:
        held[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))] += 1
    wrong = np.argwhere(held != 1)
    return None if not len(wrong) else (tuple(wrong[0].tolist()), int(held[tuple(wrong[0])]))


@given(boxes_in_a_shape())
def test_any_boxes(case: tuple[Shape, list[ChunkBox]]) -> None:
    shape, boxes = case
    found = flaw(shape, boxes)
    assert found == counted(shape, boxes)
    if found and found.copies:
        assert len(boxes_containing(found.at, boxes)) == found.copies


@given(a_tiling(), st.data())
def test_a_tiling_is_one_and_nothing_close_to_it(case: tuple[Shape, list[ChunkBox]], data: st.DataObject) -> None:
    shape, boxes = case
    assert flaw(shape, boxes) is None
    at = data.draw(st.integers(0, len(boxes) - 1))
    if 0 not in boxes[at][1]:
        missing = flaw(shape, boxes[:at] + boxes[at + 1 :])
        assert missing
        assert missing == (boxes[at][0], 0)
        assert flaw(shape, [*boxes, boxes[at]]) == (boxes[at][0], 2)


@pytest.mark.parametrize(
    ("box", "is_outside"),
    [
        (((0, 0), (2, 3)), False),
        (((2, 3), (0, 0)), False),
        (((0, 1), (2, 3)), True),
        (((-1, 0), (1, 1)), True),
        (((0, 0), (-1, 1)), True),
        (((0,), (1,)), True),
        (((0, 0), (1,)), True),
    ],
)
def test_outside(box: ChunkBox, is_outside: bool) -> None:
    assert outside((2, 3), box) == is_outside


def test_many_chunks_take_no_longer_than_they_must() -> None:
    side = 200
    boxes: list[ChunkBox] = [((row, 7 * column), (1, 7)) for row in range(side) for column in range(side)]
    begin = time.perf_counter()
    assert flaw((side, 7 * side), boxes) is None
    assert time.perf_counter() - begin < 5


def test_more_than_can_be_checked() -> None:
    dims = MAX_CORNERS.bit_length()
    shape = (2,) * dims
    boxes: list[ChunkBox] = [((0,) * dims, (1,) * dims)]
    with pytest.raises(TooManyCornersError, match="too many to check"):
        flaw(shape, boxes)
    faults = Faults()
    assert not check_tiling("a", shape, boxes, "f", faults)
    assert faults.error().code == "UNSUPPORTED"


@st.composite
def nearly_a_grid(draw: st.DrawFn) -> tuple[Shape, list[ChunkBox]]:
    """Boxes of one size at all of its multiples; one may be moved, doubled, left out or cut."""
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shape = tuple(size * draw(st.integers(1, 3)) for size in sizes)
    starts = list(product(*(range(0, length, size) for length, size in zip(shape, sizes, strict=True))))
    boxes: list[ChunkBox] = [(start, sizes) for start in draw(st.permutations(starts))]
    match draw(st.sampled_from(["whole", "moved", "doubled", "left out", "cut"])):
        case "moved":
            boxes[0] = (tuple(draw(st.integers(0, at + 1)) for at in boxes[0][0]), sizes)
        case "doubled":
            boxes[-1] = boxes[0]
        case "left out":
            boxes.pop()
        case "cut":
            boxes[0] = (boxes[0][0], tuple(draw(st.integers(0, size)) for size in sizes))
    return shape, boxes


@given(nearly_a_grid())
@example(((4,), [((0,), (2,)), ((2,), (1,))]))
@example(((4,), [((0,), (2,)), ((1,), (2,))]))
@example(((4,), [((0,), (2,)), ((0,), (2,))]))
def test_a_grid_is_a_tiling_and_nothing_else_is_taken_for_one(given_boxes: tuple[Shape, list[ChunkBox]]) -> None:
    shape, boxes = given_boxes
    inside = not any(outside(shape, box) for box in boxes)
    faults = Faults()
    assert check_tiling("x", shape, boxes, "f", faults) == (inside and flaw(shape, boxes) is None) == (not faults)
