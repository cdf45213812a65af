"""The items of a plan: everything once, about equally much, and nothing torn that belongs together."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import transaxle as tx
from tests.engine import synthetic
from tests.engine.distribute.test_item_work import plain
from transaxle.arguments import Degrees
from transaxle.engine.distribute.work_plan import WorkItem, divide, numbers, order_items, ranges_of
from transaxle.engine.plan.conversion import make_plan
from transaxle.engine.views.encode import Encode


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


@pytest.mark.parametrize("count", [None, 1, 3, 7, 200])
@pytest.mark.parametrize("encode", [None, Encode("nvfp4")])
def test_a_whole_file_is_in_one_item(count: int | None, encode: Encode | None) -> None:
    plan = make_plan(synthetic.model(4, 16), "hf", encode=encode, shard_size=100_000_000).plan
    items = divide(plan, count, whole_files=True)
    files = [file for item in items for file in item.files]
    assert len(files) > 20
    assert sorted(files) == sorted({place.file for unit in plan.units for place in unit.everywhere})
    for item in items:
        own = [plan.units[number] for number in numbers(item.tensors)]
        assert item.nbytes == sum(unit.nbytes for unit in own)
        assert own == [unit for unit in plan.units if any(place.file in item.files for place in unit.everywhere)]
    if count == 200:
        assert all(len(item.files) == 1 for item in items[: len(files)])
        assert all(item.is_empty for item in items[len(files) :])


def test_tensors_that_several_files_share(tmp_path: Path) -> None:
    """Expert-parallel ranks hold whole replicas, each made anew; tensor-parallel ranks have a part of everything."""
    with tx.open(plain(tmp_path / "source")) as source:
        by_experts = make_plan(source, "megatron_torch", degrees=Degrees(ep=2)).plan
        by_tensors = make_plan(source, "megatron_torch", degrees=Degrees(tp=2)).plan
    units = by_experts.units
    replicas = {number for number, unit in enumerate(units) if len({place.file for place in unit.everywhere}) > 1}
    items = divide(by_experts, 2, whole_files=True)
    first, second = (set(numbers(item.tensors)) for item in items)
    assert first & second == replicas != set()
    assert first | second == set(range(len(units)))
    assert not set(items[0].files) & set(items[1].files)
    whole, empty = divide(by_tensors, 2, whole_files=True)
    assert (len(whole.files), empty.is_empty) == (2, True)
    assert list(numbers(whole.tensors)) == list(range(len(by_tensors.units)))


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
    assert [item.number for item in order_items(items)] == [5, 4, 0, 2, 1, 3]
