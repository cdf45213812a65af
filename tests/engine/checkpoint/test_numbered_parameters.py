"""Dealing a model's parameters to an optimizer's groups: in how many ways, counted also by trying all of them."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from transaxle.engine.checkpoint.unstated import assign_groups

SHAPES = st.sampled_from([(2,), (3,), (2, 3)])


@given(st.lists(SHAPES, max_size=7), st.data())
def test_it_counts_what_trying_finds(order: list[tuple[int, ...]], data: st.DataObject) -> None:
    number = data.draw(st.integers(1, 3))
    owners = data.draw(st.lists(st.integers(0, number - 1), min_size=len(order), max_size=len(order)))
    groups: list[list[tuple[int, ...] | None]] = [[] for _ in range(number)]
    for shape, owner in zip(order, owners, strict=True):
        groups[owner].append(data.draw(st.sampled_from([shape, shape, None])))
    if data.draw(st.booleans()):
        order = data.draw(st.permutations(order))
    fitting = [way for way in product(range(number), repeat=len(order)) if fits(order, way, groups)]
    found, ways = assign_groups(order, groups)
    assert ways == min(2, len(fitting))
    assert ways != 1 or tuple(found) == fitting[0]


def fits(order: list[tuple[int, ...]], way: tuple[int, ...], groups: list[list[tuple[int, ...] | None]]) -> bool:
    """Each group gets as many as it has, of the shapes that it has."""
    given_shapes = [
        [shape for shape, owner in zip(order, way, strict=True) if owner == at] for at in range(len(groups))
    ]
    return all(
        len(shapes) == len(group) and all(wanted in (None, shape) for shape, wanted in zip(shapes, group, strict=True))
        for shapes, group in zip(given_shapes, groups, strict=True)
    )


def test_long_models_are_dealt_quickly() -> None:
    order: list[tuple[int, ...]] = [(8, 8), (8,)] * 20_000
    found, ways = assign_groups(order, [[(8, 8)] * 20_000, [(8,)] * 20_000])
    assert (ways, found[:4]) == (1, [0, 1, 0, 1])
    many = [(8,)] * 4_000
    assert assign_groups(many, [many[:1000], many[:1000], many[:1000], many[:1000]])[1] == 2
