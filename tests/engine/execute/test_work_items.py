"""Portions: every tensor once and in order; where files have owners, one each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transaxle.engine.execute.work_items import in_turn, portions
from transaxle.engine.plan.conversion import PlannedTensor
from transaxle.move.transfer import Transfer


def planned(name: str, *files: str) -> PlannedTensor:
    places = tuple(Transfer(file, 0, 0, 1) for file in files)
    return PlannedTensor(name, "U8", (len(files),), places, len(files), "", ())


@given(st.lists(st.lists(st.sampled_from("abcdef"), max_size=3), max_size=12))
def test_every_file_has_one_owner(files: list[list[str]]) -> None:
    tensors = [planned(str(i), *names) for i, names in enumerate(files)]
    assert portions(tensors, ordered=False) == [[tensor] for tensor in tensors]
    found = portions(tensors, ordered=True)
    assert sorted((t.name for portion in found for t in portion), key=int) == [t.name for t in tensors]
    for file in "abcdef":
        owners = [portion for portion in found if any(place.file == file for t in portion for place in t.places)]
        assert len(owners) <= 1
        if owners:
            numbers = [int(t.name) for t in owners[0] if any(place.file == file for place in t.places)]
            assert numbers == sorted(numbers)


def test_files_that_share_nothing_stay_apart() -> None:
    tensors = [planned("0", "a"), planned("1", "b"), planned("2", "a"), planned("3", "b", "c"), planned("4", "c")]
    assert [[t.name for t in portion] for portion in portions(tensors, ordered=True)] == [["0", "2"], ["1", "3", "4"]]


def test_in_turn() -> None:
    done: list[int] = []

    def work(buffers: int, item: int) -> None:
        done.append(buffers + item)

    in_turn(work)(10, [1, 2, 3])
    assert done == [11, 12, 13]
