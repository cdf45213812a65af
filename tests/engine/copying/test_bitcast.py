"""Descriptions of the same bytes: what numpy's `view` and `reshape` give, chunk by chunk and box by box."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transaxle.axes.geometry import Interval
from transaxle.engine.source import redescribe, translate_box
from transaxle.errors import Refused
from transaxle.formats.catalog import Entry, Extent

STORED = [
    ("U8", (2, 6, 3, 16), "F4", (2, 6, 96)), ("U8", (5, 8), "F4", (5, 16)), ("F32", (), "F32", (1, 1)),
    ("F32", (1,), "F32", (1, 1, 1)), ("F32", (4,), "F32", (4, 1)), ("F32", (3, 1, 4), "F32", (3, 4)),
    ("F32", (3,), "F32", (3, 1, 1)), ("U8", (3, 4, 2), "F8_E8M0", (3, 4, 2)),
]  # fmt: skip


def elements(dtype: str, shape: tuple[int, ...], other: str) -> np.ndarray:
    """Numbers of the smaller elements that each stored element is made of, in one more dim."""
    unit = 2 if (dtype, other) == ("U8", "F4") else 1
    return np.arange(prod(shape) * unit).reshape(*shape, unit)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[list[Interval]]:
    """Per dim, one interval or two in any order."""
    found = []
    for size in shape:
        cuts = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=4)))
        spans = [(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
        found.append(draw(st.permutations(spans)))
    return found


@given(data=st.data())
@pytest.mark.parametrize(("dtype", "stored", "other", "shape"), STORED)
def test_a_box_of_the_one_is_the_same_elements_of_the_other(
    dtype: str, stored: tuple[int, ...], other: str, shape: tuple[int, ...], data: st.DataObject
) -> None:
    held = data.draw(boxes(stored))
    wanted = elements(dtype, stored, other)
    for dim, spans in enumerate(held):
        wanted = np.concatenate([wanted.take(range(a, b), dim) for a, b in spans] or [wanted.take([], dim)], dim)
    found = translate_box("x", held, dtype, stored, other, shape)
    if found is None:
        assert not wanted.size
        return
    numbers = np.arange(prod(shape)).reshape(shape)
    for dim, spans in enumerate(found):
        numbers = np.concatenate([numbers.take(range(a, b), dim) for a, b in spans], dim)
    assert numbers.reshape(-1).tolist() == wanted.reshape(-1).tolist()


@given(data=st.data())
@pytest.mark.parametrize(("dtype", "stored", "other", "shape"), STORED)
def test_chunks_are_boxes_of_both_or_refused(
    dtype: str, stored: tuple[int, ...], other: str, shape: tuple[int, ...], data: st.DataObject
) -> None:
    """Cut along any dims: each chunk holds, in its order, the elements that its place in the other shape has."""
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=1))}) for size in stored]
    spans = list(product(*(list(pairwise(at)) for at in cuts)))
    extents = tuple(
        Extent(tuple(a for a, _ in box), tuple(b - a for a, b in box), f"{number}", 0)
        for number, box in enumerate(spans)
    )
    entry = Entry("x", dtype, stored, extents)
    if len(stored) == 4 and any(b[3] < 16 and b[2] > 1 for b in (extent.shape for extent in extents)):
        with pytest.raises(Refused, match="UNSUPPORTED"):  # a part of several blocks is no box of their elements
            redescribe(entry, "y", other, shape)
        return
    found = redescribe(entry, "y", other, shape)
    assert (found.name, found.dtype, found.shape) == ("y", other, shape)
    numbers = np.arange(prod(shape)).reshape(shape)
    for box, extent in zip(spans, found.extents, strict=True):
        mine = elements(dtype, stored, other)[tuple(slice(a, b) for a, b in box)].reshape(-1)
        place = tuple(slice(a, a + n) for a, n in zip(extent.start, extent.shape, strict=True))
        assert numbers[place].reshape(-1).tolist() == mine.tolist()


def test_strides_are_counted_in_the_smaller_elements() -> None:
    """A slice of a wider tensor, as a pickle may hold it: rows of 16 bytes, 40 bytes apart."""
    entry = Entry("x", "U8", (3, 16), (Extent((0, 0), (3, 16), "f", 7, (40, 1)),))
    (extent,) = redescribe(entry, "x", "F4", (3, 32)).extents
    assert (extent.shape, extent.strides, extent.offset) == ((3, 32), (80, 1), 7)
    turned = Entry("x", "U8", (3, 16), (Extent((0, 0), (3, 16), "f", 0, (1, 3)),))
    with pytest.raises(Refused, match="UNSUPPORTED"):
        redescribe(turned, "x", "F4", (3, 32))
    blocks = Entry("x", "U8", (3, 2, 16), (Extent((0, 0, 0), (3, 2, 16), "f", 0, (40, 16, 1)),))
    (extent,) = redescribe(blocks, "x", "F4", (3, 64)).extents
    assert extent.strides == (80, 1)


@pytest.mark.parametrize("shape", [(3, 31), (4, 32), (32,)])
def test_other_amounts_of_bytes_are_refused(shape: tuple[int, ...]) -> None:
    entry = Entry("x", "U8", (3, 16), (Extent((0, 0), (3, 16), "f", 0),))
    with pytest.raises(Refused, match="SHAPE_MISMATCH"):
        redescribe(entry, "x", "F4", shape)


def test_empty_tensors_have_no_box() -> None:
    entry = Entry("x", "U8", (0, 2, 16), (Extent((0, 0, 0), (0, 2, 16), "f", 3),))
    assert redescribe(entry, "x", "F4", (0, 64)).extents[0].shape == (0, 64)
    assert translate_box("x", [[], [(0, 2)], [(0, 16)]], "U8", (0, 2, 16), "F4", (0, 64)) is None
