from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.axes import walking
from tests.axes.apply import Intervals, law, move, take
from transaxle.axes.geometry import BoxCopy, Piece, PieceOverlap, cut, pieces
from transaxle.axes.notation.expression import Expression, Share, parse

NO_INDEX: Mapping[str, int] = {}


def meet(
    source: Piece, target: Piece, source_index: Mapping[str, int] = NO_INDEX, target_index: Mapping[str, int] = NO_INDEX
) -> BoxCopy | None:
    """Return the copy from one piece into another."""
    meeting = PieceOverlap(source, target, source_index, target_index)
    move = meeting.at(source_index)
    assert move is None or meeting.size == move.size
    return move


@st.composite
def shares(draw: st.DrawFn) -> Share:
    """The share of one dim: nested axes with gaps, somewhere in the dim."""
    axes: list[tuple[str, int, int]] = []
    reach = 1
    for name in "abc"[: draw(st.integers(0, 3))]:
        size, stride = draw(st.integers(0, 4)), reach + draw(st.integers(0, 2))
        axes.insert(0, (name, size, stride))
        reach = max(size * stride, 1)
    return Share(draw(st.integers(0, 5)), tuple(axes))


def stored(share: Share) -> list[tuple[tuple[int, ...], int]]:
    """Every element of a share: its indices, and its position."""
    return [
        (index, share.offset + sum(i * stride for i, (_, _, stride) in zip(index, share.axes, strict=True)))
        for index in product(*(range(size) for _, size, _ in share.axes))
    ]


@law
@given(shares(), st.integers(-2, 60), st.integers(0, 60))
def test_a_cut_is_exactly_what_lies_in_the_interval(share: Share, start: int, length: int) -> None:
    stop = start + length
    found = []
    boxes = cut(share, start, stop)
    for box, first in boxes:
        inside = [index for index, _ in stored(share) if all(a <= i < b for i, (a, b) in zip(index, box, strict=True))]
        assert dict(stored(share))[tuple(a for a, _ in box)] == first
        found.extend(inside)
    assert found == [index for index, position in stored(share) if start <= position < stop]
    assert len(boxes) <= max(1, 2 * len(share.axes) - 1)


@st.composite
def holdings(draw: st.DrawFn, shape: tuple[int, ...]) -> Intervals:
    """Per dim, some positions in ascending order."""
    held = []
    for size in shape:
        points = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=6)))
        held.append([(a, b) for a, b in zip(points[::2], points[1::2], strict=False) if a < b])
    return held


def elements(piece: Piece) -> dict[walking.Index, int]:
    """Element of the logical tensor -> where the piece keeps it in its chunk."""
    axes = sorted(piece.box)
    return {
        tuple(zip(axes, index, strict=True)): piece.offset
        + sum((i - piece.box[axis][0]) * piece.strides[axis] for axis, i in zip(axes, index, strict=True))
        for index in product(*(range(*piece.box[axis]) for axis in axes))
    }


@law
@given(walking.expressions(), walking.sizes(least=0), st.data())
def test_pieces_of_a_chunk_are_disjoint_and_all_it_holds(
    expression: Expression, sizes: dict[str, int], data: st.DataObject
) -> None:
    layout = expression.layout(sizes)
    held = data.draw(st.none() | holdings(layout.shape))
    whole = np.arange(prod(layout.shape)).reshape(layout.shape)
    chunk = whole.reshape(-1) if held is None else take(whole, held).reshape(-1)
    for component in expression.components:
        found: dict[walking.Index, int] = {}
        for piece in pieces(layout, component, held):
            assert piece.size == len(elements(piece)) > 0
            for index, place in elements(piece).items():
                assert index not in found
                found[index] = int(chunk[place])
        wanted = walking.places(expression, sizes, component)
        assert found == {index: place for index, place in wanted.items() if place in set(chunk.tolist())}


@law
@given(walking.expressions(["x"]), walking.sizes(), st.permutations([0, 1, 2, 3, 4, 5]))
def test_pieces_of_a_chunk_with_strides_of_its_own(
    expression: Expression, sizes: dict[str, int], order: list[int]
) -> None:
    layout = expression.layout(sizes)
    dims = [dim for dim in order if dim < len(layout.shape)]
    memory = np.arange(prod(layout.shape) * 2)[::2].reshape([layout.shape[dim] for dim in dims])
    view = memory.transpose(np.argsort(dims))
    strides = tuple(step // view.itemsize for step in view.strides)
    (piece,) = pieces(layout, "x", strides=strides)
    wanted = walking.places(expression, sizes, "x")
    assert elements(piece) == {i: int(view.reshape(-1)[at]) for i, at in wanted.items()}


@law
@given(st.data(), walking.sizes())
def test_what_meets_is_copied_and_nothing_else(data: st.DataObject, sizes: dict[str, int]) -> None:
    """Any two layouts of one tensor, both cut anyhow: the moves are those of a walk, element by element."""
    source, target = (data.draw(walking.expressions(["x"])) for _ in range(2))
    here, there = source.layout(sizes), target.layout(sizes)
    mine, yours = (data.draw(st.none() | holdings(layout.shape)) for layout in (here, there))

    full = np.full(prod(here.shape), -1)
    for index, place in walking.places(source, sizes, "x").items():
        full[place] = walking.ravel(index, sizes)
    wanted = np.full(prod(there.shape), -1)
    for index, place in walking.places(target, sizes, "x").items():
        wanted[place] = walking.ravel(index, sizes)
    chunk = full if mine is None else take(full.reshape(here.shape), mine).reshape(-1)
    wanted = wanted if yours is None else take(wanted.reshape(there.shape), yours).reshape(-1)
    wanted = np.where(np.isin(wanted, chunk), wanted, -1)

    found = np.full(len(wanted), -1)
    moved = 0
    for piece in pieces(there, "x", yours):
        for other in pieces(here, "x", mine):
            step = meet(other, piece)
            if step is not None:
                move(chunk, found, step)
                moved += step.size
    np.testing.assert_array_equal(found, wanted)
    assert moved == np.count_nonzero(wanted >= 0)


STACKED, SINGLE = parse("x[e (d f)]").layout({"e": 3, "d": 2, "f": 4}), parse("x[f d]").layout({"d": 2, "f": 4})


def test_axes_in_names() -> None:
    (stack,) = pieces(STACKED, "x")
    (one,) = pieces(SINGLE, "x")
    for e in range(3):
        out = meet(stack, one, target_index={"e": e})
        back = meet(one, stack, source_index={"e": e})
        assert out is not None
        assert back is not None
        assert (out.source_offset, out.target_offset) == (8 * e, 0)
        assert (back.source_offset, back.target_offset) == (0, 8 * e)
        assert out.loops == ((4, 1, 2), (2, 4, 1))
        assert back.loops == ((2, 1, 4), (4, 2, 1))
    assert meet(stack, one, target_index={"e": 3}) is None
    assert meet(one, stack, source_index={"e": 3}) is None
    assert meet(one, one, {"e": 1}, {"e": 1}) is not None
    assert meet(one, one, {"e": 1}, {"e": 2}) is None


def test_one_meeting_serves_all_sources_that_are_alike() -> None:
    (one,) = pieces(SINGLE, "x")
    (stack,) = pieces(STACKED, "x", [[(1, 3)], [(0, 8)]])  # a chunk that holds two of three
    meeting = PieceOverlap(one, stack, {"e"}, {})
    moves = [meeting.at({"e": e}) for e in range(4)]
    assert moves == [None, BoxCopy(0, 0, ((2, 1, 4), (4, 2, 1))), BoxCopy(0, 8, ((2, 1, 4), (4, 2, 1))), None]


def test_an_axis_that_only_the_target_has_is_broadcast() -> None:
    (few,) = pieces(parse("k[(g c)]").layout({"g": 2, "c": 3}), "k")
    (many,) = pieces(parse("k[(g n c)]").layout({"g": 2, "n": 2, "c": 3}), "k")
    step = meet(few, many)
    assert step is not None
    out = np.full(12, -1)
    move(np.arange(6), out, step)
    assert out.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]
    (last,) = pieces(parse("k[g n c]").layout({"g": 2, "n": 3, "c": 3}), "k", [[(0, 2)], [(2, 3)], [(0, 3)]])
    step = meet(few, last)
    assert step is not None
    assert step.size == 6


@pytest.mark.parametrize("axes", [1, 2, 3, 4])
def test_the_bound_on_boxes_is_met(axes: int) -> None:
    """`2k - 1` is no loose bound: leaving out the first and the last element needs that many."""
    share = Share(0, tuple((f"a{i}", 4, 4 ** (axes - 1 - i)) for i in range(axes)))
    assert len(cut(share, 1, 4**axes - 1)) == 2 * axes - 1
