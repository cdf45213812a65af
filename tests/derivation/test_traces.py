"""Traces: the numbers of elements, and the moves that they show, against a plain walk over all elements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transaxle.derivation.moved_parts import PartMove, moves, strides
from transaxle.derivation.traces import (
    FLOOR,
    Places,
    Trace,
    Underivable,
    combine,
    digits,
    draw_numbers,
    passes,
    room,
    shuffle,
)


def _walked(move: PartMove) -> dict[int, int]:
    """Position in the hub -> position in memory, by counting through all digits."""
    walked = {}
    for index in np.ndindex(*move.sizes):
        places = []
        for shape, shares in zip(move.shapes, move.shares, strict=True):
            place = 0
            for share, stride in zip(shares, strides(shape), strict=True):
                inside = share.offset + sum(index[digit] * step for digit, step in share.digits)
                place += inside * stride
            places.append(place)
        walked[places[0]] = places[1]
    return walked


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_digits_describe_every_transpose_and_reshape(shape: list[int], random: object) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    memory = np.arange(1, int(np.prod(shape)) + 1).reshape(shape)
    hub = memory.transpose(order).reshape(-1, shape[order[-1]])
    (move,) = moves(Trace({"a": hub}, {"b": memory}))
    flat = {int(number): at for at, number in enumerate(memory.ravel())}
    assert _walked(move) == {at: flat[int(number)] for at, number in enumerate(hub.ravel())}


def test_a_shuffle_has_no_digits() -> None:
    memory = np.arange(1, 13)
    with pytest.raises(Underivable, match="a -> b"):
        moves(Trace({"a": memory[[3, 1, 4, 0, 5, 9, 2, 6, 8, 7, 11, 10]]}, {"b": memory}))


def test_values_from_nowhere_are_named() -> None:
    with pytest.raises(Underivable, match="extra has values"):
        moves(Trace({"extra": np.arange(7, 9)}, {"b": np.arange(1, 4)}))


def test_zeros_around_elements_are_padding_and_other_values_are_not() -> None:
    memory = np.arange(1, 13).reshape(6, 2)
    (move,) = moves(Trace({"a": np.pad(memory, ((1, 3), (0, 0)))}, {"b": memory}))
    assert (move.shapes, [share.offset for share in move.shares[0]]) == (((10, 2), (6, 2)), [1, 0])
    assert _walked(move) == {at + 2: at for at in range(12)}
    for stored in (np.zeros((6, 2), np.int64), np.vstack([memory, [[0, 13]]])):
        with pytest.raises(Underivable, match="a has values"):
            moves(Trace({"a": stored}, {"b": memory}))


@given(st.integers(1, 1 << 40), st.sampled_from([2, 256, 1 << 24]))
def test_passes_carry_every_number(number: int, base: int) -> None:
    numbers = np.array([0, 1, number])
    carried = [digits(numbers, base, position) for position in range(passes(number, base))]
    assert all(int(each.max()) < base for each in carried)
    assert combine(carried, base).tolist() == numbers.tolist()


# Numbers of elements: every one its own, found again, and none that a constant or a range has.


@given(st.integers(0, 3000), st.sampled_from([1 << 24, 1 << 52]))
def test_drawn_numbers_are_found_again_and_constants_are_not(count: int, most: int) -> None:
    numbers = draw_numbers(count, most)
    assert len(set(numbers.tolist())) == count
    assert all(FLOOR <= number < most for number in numbers.tolist())
    places = Places(numbers)
    assert places.of(numbers).tolist() == list(range(1, count + 1))
    constants = [*range(FLOOR), *(1 << power for power in range(53)), *((1 << power) - 1 for power in range(53)), 10**6]
    assert not places.of(np.array(constants)).any()


@given(st.integers(0, 300))
def test_no_element_has_one_number_twice(count: int) -> None:
    first, second = shuffle(count)
    assert (first != second).all()
    for numbers in (first, second):
        assert len(set(numbers.tolist())) == count
        assert all(1 <= number <= count + 1 for number in numbers.tolist())


def test_all_the_room_can_be_drawn() -> None:
    most = FLOOR + 4000
    assert len(set(draw_numbers(room(most), most).tolist())) == 1000
