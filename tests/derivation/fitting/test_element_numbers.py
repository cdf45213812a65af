"""Numbers of elements: every one its own, found again, and none that a constant or a range has."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from transaxle.derivation.traces import FLOOR, Places, draw_numbers, room, shuffle


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
