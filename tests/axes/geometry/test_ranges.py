"""Positions of some indices of a dim's axes, against numpy's own slicing of numbered elements."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from transaxle.axes.geometry import Intervals, axes_in, local_sizes, positions, segment_sizes
from transaxle.axes.notation.expression import parse

SIZES = {"g": 3, "r": 4, "c": 5, "f": 7, "d": 2}
Q = np.arange(60).reshape(3, 4, 5)
K = np.arange(60, 75).reshape(3, 5)
V = np.arange(75, 90).reshape(3, 5)


def _flat(*parts: np.ndarray) -> list[int]:
    return np.concatenate([part.reshape(-1) for part in parts]).tolist()  # type: ignore[no-any-return]


def _listed(intervals: Intervals) -> list[int]:
    return [position for start, stop in intervals for position in range(start, stop)]


GROUPED = np.arange(90).reshape(3, 30)
"""`(g [q:(r c) | k:c | v:c])`: 20 of q, 5 of k, 5 of v in each group."""


@pytest.mark.parametrize(
    ("text", "ranges", "wanted"),
    [
        ("q[(g r c) d]", {"g": (1, 3)}, _flat(Q[1:])),
        ("q[(g r c) d]", {"g": (2, 3), "r": (1, 3)}, _flat(Q[2, 1:3])),
        ("q[(g r c) d]", {"r": (1, 3)}, _flat(Q[:, 1:3])),
        ("q[(g r c) d]", {}, _flat(Q)),
        ("[[q:(g r c) | k:(g c) | v:(g c)] d]", {"g": (1, 2)}, _flat(Q[1], K[1], V[1])),
        ("[[q:(g r c) | k:(g c) | v:(g c)] d]", {"g": (1, 2), "r": (0, 3)}, _flat(Q[1, :3], K[1], V[1])),
        ("[(g [q:(r c) | k:c | v:c]) d]", {"g": (1, 3)}, _flat(GROUPED[1:])),
        ("[(g [q:(r c) | k:c | v:c]) d]", {"g": (2, 3), "r": (3, 4)}, _flat(GROUPED[2, 15:20], GROUPED[2, 20:])),
        ("[(f [gate: | up:]) d]", {"f": (2, 5)}, list(range(4, 10))),
        ("[[gate:f | up:f] d]", {"f": (2, 5)}, [2, 3, 4, 9, 10, 11]),
    ],
)
def test_they_are_those_that_slicing_gives(text: str, ranges: dict[str, tuple[int, int]], wanted: list[int]) -> None:
    node = parse(text).dims[0]
    found = positions(node, SIZES, ranges)
    assert _listed(found) == wanted
    assert all(stop < start for (_, stop), (start, _) in pairwise(found))  # merged, in order


def test_what_a_dim_consists_of() -> None:
    node = parse("[[q:(g r c) | k:(g c) | v:(g c)] d]").dims[0]
    assert axes_in(node) == {"g", "r", "c"}
    assert segment_sizes(node, SIZES) == (60, 15, 15)
    assert segment_sizes(node, local_sizes(SIZES, {"g": (0, 1), "r": (1, 3)})) == (10, 5, 5)
    assert segment_sizes(parse("gate[f d]").dims[0], SIZES) == (7,)
