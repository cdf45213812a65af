from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.axes.apply import law
from transaxle.axes.geometry import coalesce, lexicographic_boxes, rank, row_major

counts = st.lists(st.integers(0, 4), max_size=4)


@st.composite
def nested(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Nested loops, outermost first, with gaps."""
    loops: list[tuple[int, int]] = []
    reach = 1
    for size in draw(counts):
        stride = reach + draw(st.integers(0, 3))
        loops.insert(0, (size, stride))
        reach = max(size * stride, 1)
    return loops


def positions(loops: list[tuple[int, int]]) -> list[int]:
    return [sum(i * stride for i, (_, stride) in zip(index, loops, strict=True)) for index in walk(loops)]


def walk(loops: list[tuple[int, int]]) -> list[tuple[int, ...]]:
    return list(product(*(range(size) for size, _ in loops)))


@law
@given(nested(), st.integers(-3, 400))
def test_rank_counts_the_positions_before(loops: list[tuple[int, int]], position: int) -> None:
    assert rank(loops, position) == sum(q < position for q in positions(loops))


@law
@given(counts, st.data())
def test_boxes_are_the_range_in_order(shape: list[int], data: st.DataObject) -> None:
    total = prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(0, total))
    boxes = list(lexicographic_boxes(shape, start, stop))
    found = [index for box in boxes for index in product(*(range(*span) for span in box))]
    assert found == list(product(*map(range, shape)))[start:stop]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(a < b for box in boxes for a, b in box)


@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 5), (4, 0, 2), (1, 1)])
def test_row_major_is_what_numpy_says(shape: tuple[int, ...]) -> None:
    dense = np.empty(shape, np.int64)
    assert dense.size == 0 or tuple(step * dense.itemsize for step in row_major(shape)) == dense.strides


@law
@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0, 1, 2, 3, 6, 9]), st.integers(0, 2)), max_size=4))
def test_coalesce_keeps_the_pairs(drawn: list[tuple[int, int, int]]) -> None:
    loops = []
    reach = 1
    for size, source, gap in drawn:
        loops.append((size, source, reach + gap))
        reach = (reach + gap) * size

    def pairs(some: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
        sides = [[(size, loop[side]) for size, *loop in some] for side in (0, 1)]
        return list(zip(*map(positions, sides), strict=True))

    joined = coalesce(loops)
    assert sorted(pairs(joined)) == sorted(pairs(loops))
    assert [target for _, target in pairs(joined)] == sorted(target for _, target in pairs(loops))
    assert all(size > 1 for size, _, _ in joined)


def test_coalesce_joins_what_is_one_run_on_both_sides() -> None:
    assert coalesce([(2, 12, 12), (3, 4, 4), (4, 1, 1)]) == ((24, 1, 1),)
    assert coalesce([(2, 12, 12), (3, 1, 4), (4, 3, 1)]) == ((2, 12, 12), (3, 1, 4), (4, 3, 1))
    assert coalesce([(5, 0, 2), (2, 0, 1)]) == ((10, 0, 1),)
