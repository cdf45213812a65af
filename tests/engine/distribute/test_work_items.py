"""The items of a plan: everything once, about equally much, and nothing torn that belongs together."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine import synthetic
from transaxle.engine.distribute.work_plan import WorkItem, divide, in_order, numbers, ranges_of
from transaxle.engine.plan.conversion import make_plan
from transaxle.engine.views.encode import Encode
from transaxle.formats.parts.part_layout import LEAST


@given(st.lists(st.integers(0, 50), unique=True))
def test_ranges_hold_their_numbers(found: list[int]) -> None:
    ranges = ranges_of(found)
    assert list(numbers(ranges)) == sorted(found)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(ranges))


@pytest.mark.parametrize("count", [1, 7, 64, 5000])
@pytest.mark.parametrize("encode", [None, Encode("nvfp4")])
def test_everything_is_in_one_item(count: int, encode: Encode | None) -> None:
    plan = make_plan(synthetic.model(4, 16), "hf", encode=encode).plan
    items = divide(plan, count)
    assert [item.number for item in items] == list(range(count))
    assert sorted(number for item in items for number in numbers(item.tensors)) == list(range(len(plan.units)))
    largest = max(tensor.nbytes for tensor in plan.units)
    total = sum(tensor.nbytes for tensor in plan.tensors)
    assert sum(item.nbytes for item in items) == total
    assert all(item.nbytes <= total / count + 2 * largest for item in items)
    for item in items:
        steps = {plan.units[number].step for number in numbers(item.tensors)}
        own = {step.tensor for step in steps if step is not None}
        others = {
            tensor.step.tensor
            for number, tensor in enumerate(plan.units)
            if tensor.step is not None and number not in set(numbers(item.tensors))
        }
        assert not own & others
        files = {plan.units[number].places[0].file for number in numbers(item.tensors)}
        assert files == set(item.files)


def test_an_item_has_no_few_bytes_at_the_edge_of_a_file() -> None:
    """Of which its neighbour has the rest: a service would not take them as a part."""
    plan = make_plan(synthetic.model(4, 16), "hf", shard_size=100_000_000).plan
    for count in range(2, 99):
        owners = {number: item.number for item in divide(plan, count) for number in numbers(item.tensors)}
        places = [(unit.places[0].file, owners[number], unit.nbytes) for number, unit in enumerate(plan.units)]
        runs = [
            (file, owner, sum(size for _, _, size in group))
            for (file, owner), group in itertools.groupby(places, key=lambda place: place[:2])
        ]
        for before, (file, owner, size), after in zip(runs, runs[1:], runs[2:], strict=False):
            if size < LEAST:
                assert not before[1] == owner != after[1] or after[0] != file
                assert not before[1] != owner == after[1] or before[0] != file


def test_without_a_number_there_is_an_item_for_each_gib() -> None:
    plan = make_plan(synthetic.model(4, 16), "hf").plan
    total = sum(tensor.nbytes for tensor in plan.tensors)
    assert len(divide(plan)) == max(1, -(-total >> 30))
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="items must be"):
            divide(plan, wrong)


def test_large_items_begin_first_and_before_them_what_may_refuse() -> None:
    sizes = [1000, 5, 1020, 0, 9_000_000]
    items = [WorkItem(number=number, nbytes=size) for number, size in enumerate(sizes)]
    items.append(WorkItem(number=5, nbytes=1, checks=((0, 1),)))
    assert [item.number for item in in_order(items)] == [5, 4, 0, 2, 1, 3]
