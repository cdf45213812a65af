"""Moves: digits of a map, against a plain walk over all elements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transaxle.derivation.moved_parts import PartMove, moves, strides
from transaxle.derivation.traces import Trace, Underivable, combine, digits, passes


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


@given(st.integers(1, 1 << 40), st.sampled_from([2, 256, 1 << 24]))
def test_passes_carry_every_number(number: int, base: int) -> None:
    numbers = np.array([0, 1, number])
    carried = [digits(numbers, base, position) for position in range(passes(number, base))]
    assert all(int(each.max()) < base for each in carried)
    assert combine(carried, base).tolist() == numbers.tolist()
