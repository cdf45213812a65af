"""Queues: where files are written in order, each has one, and its tensors are in it in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transaxle.engine.carry import file_queues, items_of
from transaxle.engine.plan.planned import PlannedTensor
from transaxle.move.mover import divide_by_rank
from transaxle.move.transfer import NoExchange, Transfer


def planned(name: str, *files: str) -> PlannedTensor:
    places = tuple(Transfer(file, 0, 0, 1) for file in files)
    return PlannedTensor(name, "U8", (len(files),), places, len(files), "", ())


def portions(tensors: list[PlannedTensor], *, ordered: bool) -> list[list[str]]:
    """What one worker does from beginning to end, by name."""
    own, others = divide_by_rank(items_of(tensors, {}, {}, ordered=ordered), lambda _: NoExchange.rank)
    assert not others
    return [[tensors[item.key].name for item in queue] for queue in own.get(NoExchange.rank, [])]


@given(st.lists(st.lists(st.sampled_from("abcdef"), max_size=3), max_size=12))
def test_every_file_has_one_queue(files: list[list[str]]) -> None:
    tensors = [planned(str(i), *names) for i, names in enumerate(files)]
    assert portions(tensors, ordered=False) == [[tensor.name] for tensor in tensors]
    queues = file_queues(tensors)
    for file in "abcdef":
        assert len({queue for queue, names in zip(queues, files, strict=True) if file in names}) <= 1
    found = portions(tensors, ordered=True)
    assert all(numbers == sorted(numbers, key=int) for numbers in found)
    assert sorted((name for numbers in found for name in numbers), key=int) == [tensor.name for tensor in tensors]


def test_files_that_share_nothing_stay_apart() -> None:
    tensors = [planned("0", "a"), planned("1", "b"), planned("2", "a"), planned("3", "b", "c"), planned("4", "c")]
    assert portions(tensors, ordered=True) == [["0", "2"], ["1", "3", "4"]]
