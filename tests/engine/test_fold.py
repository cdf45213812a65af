"""Folding is a way to write names, never to invent or to lose one."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transaxle.engine.wording import fold, index_products, index_ranges

_SETS = re.compile(r"\[([0-9,-]+)\]")


def _expand(text: str) -> list[str]:
    """Write a row out again: an independent reading of what it says."""
    parts = _SETS.split(text)
    choices = []
    for held in parts[1::2]:
        bounds = [[int(end) for end in run.split("-")] for run in held.split(",")]
        choices.append([str(index) for run in bounds for index in range(run[0], run[-1] + 1)])
    literals = parts[::2]
    return ["".join(map("".join, zip(literals, (*chosen, ""), strict=True))) for chosen in product(*choices)]


segments = st.one_of(st.integers(0, 12).map(str), st.sampled_from(["a", "w1", "w2", "007", "weight3", "x12", "bias0"]))
names = st.lists(segments, min_size=1, max_size=5).map(".".join)


@given(st.lists(names, unique=True))
def test_rows_stand_for_exactly_the_names(listed: list[str]) -> None:
    rows = fold(listed)
    assert sorted(name for row in rows for name in _expand(row.name)) == sorted(listed)
    assert all(sorted(_expand(row.name)) == sorted(row.names) for row in rows)


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))))
def test_products_are_disjoint_and_complete(positions: set[tuple[int, ...]]) -> None:
    found = [position for sets in index_products(positions) for position in product(*sets)]
    assert sorted(found) == sorted(positions)


@pytest.mark.parametrize(
    ("listed", "rows"),
    [
        (["l.0.w", "l.1.w", "l.2.w", "l.5.w"], ["l.[0-2,5].w"]),
        (["l.0.e.0", "l.0.e.1", "l.1.e.0"], ["l.0.e.[0-1]", "l.1.e.0"]),
        (["l.0.e.0", "l.0.e.1", "l.1.e.0", "l.1.e.1"], ["l.[0-1].e.[0-1]"]),
        (["m.w1", "m.w2", "m.w3"], ["m.w1", "m.w2", "m.w3"]),
        (["fc.weight0", "fc.weight1", "fc.bias0"], ["fc.weight[0-1]", "fc.bias0"]),
        (
            ["optim/l.0.w/step", "optim/l.1.w/step", "optim/#0/s", "optim/#1/s"],
            ["optim/l.[0-1].w/step", "optim/#[0-1]/s"],
        ),
        (["l.007.w", "l.7.w"], ["l.007.w", "l.7.w"]),
    ],
)
def test_what_is_an_index(listed: list[str], rows: list[str]) -> None:
    assert [row.name for row in fold(listed)] == rows


def test_unlike_tensors_stay_apart() -> None:
    assert [(row.name, row.key) for row in fold(["l.0.w", "l.1.w", "l.2.w"], ["a", "b", "a"])] == [
        ("l.[0,2].w", "a"),
        ("l.1.w", "b"),
    ]


def test_a_name_of_a_thousand_indices_is_no_trap() -> None:
    name = ".".join(["0"] * 5000)
    assert [row.name for row in fold([name])] == [name]


def test_ranges() -> None:
    assert index_ranges([3]) == "3"
    assert index_ranges([0, 1, 2, 5, 7, 8]) == "[0-2,5,7-8]"
