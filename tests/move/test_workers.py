"""Workers batch small items of local files, and take remote ones one by one; blocks cover a tensor in order."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.move.filling import PlainFiles
from transaxle.formats.storage.copier import Bytes
from transaxle.formats.storage.local import LocalStorage
from transaxle.move.mover import Movement
from transaxle.move.transfer import Sink, Transfer
from transaxle.move.workers import Item, Limits, block_ends, can_batch, group_tasks, largest_first

WORKERS, SMALL = 3, 50
"""As many reads must be under way together, each of so many bytes."""
PATIENCE = 60.0
"""Seconds after which what has not happened will not happen."""


class FarFiles(PlainFiles):
    """Files of another machine: a read ends when as many are under way as there are workers."""

    def __init__(self) -> None:
        self._together = threading.Barrier(WORKERS)

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        self._together.wait(PATIENCE)
        view[:] = bytes([int(name) + offset]) * len(view)


class Memory(Sink):
    """Takes items in place."""

    ordered = False

    def __init__(self, count: int) -> None:
        self.held: Bytes = np.zeros((count, SMALL), np.uint8)

    def buffer(self, key: int, start: int, stop: int) -> Bytes:
        found: Bytes = self.held[key][start:stop]
        return found

    def take(self, key: int, start: int, data: memoryview) -> None:
        raise AssertionError((key, start, len(data)))


def items(count: int) -> list[Item]:
    return [Item(key, SMALL, [Transfer(str(key), 1, 0, SMALL)], (0,), (0,)) for key in range(count)]


def test_small_items_of_other_machines_are_read_side_by_side() -> None:
    memory = Memory(2 * WORKERS)
    Movement(items(2 * WORKERS), FarFiles(), memory, Limits(WORKERS, 1 << 22)).move_local()
    assert memory.held.tolist() == [[key + 1] * SMALL for key in range(2 * WORKERS)]


@pytest.mark.parametrize("noted", [False, True])
@given(sizes=st.lists(st.integers(0, 60 << 20)), fair=st.integers(0, 100 << 20))
def test_groups_have_every_task_once(noted: bool, sizes: list[int], fair: int) -> None:
    groups = list(group_tasks(largest_first(enumerate(sizes)), batched=noted, fair=fair))
    order = [task for group in groups for task in group]
    assert sorted(order) == list(range(len(sizes)))
    assert [sizes[task] for task in order] == sorted(sizes, reverse=True)
    assert all(group for group in groups)
    if not noted:
        assert all(len(group) == 1 for group in groups)
    else:
        least = max(1 << 20, min(8 << 20, fair // 8))
        assert all(sum(sizes[task] for task in group) >= least for group in groups[:-1])
        assert all(sum(sizes[task] for task in group[:-1]) < least for group in groups)


def test_files_of_this_machine_are_noted(tmp_path: Path) -> None:
    near = LocalStorage(tmp_path)
    assert can_batch(near, near)
    assert not can_batch(near, FarFiles())
    near.close()


# Blocks of a tensor.

MB = 1 << 20


def matrices(sizes: list[int]) -> list[Transfer]:
    """Return plain copies of so many bytes, one after the other."""
    return [Transfer("f", 0, sum(sizes[:number]), size) for number, size in enumerate(sizes)]


def transposed(rows: int, columns: int, target: int, into: int) -> Transfer:
    """Return the copy of a transposed matrix of 16 bits, whose rows are `into` bytes apart."""
    return Transfer("f", 0, target, 2, ((columns, 2, into), (rows, 2 * columns, 2)))


def test_a_matrix_that_fits_is_not_cut() -> None:
    size = 852_000
    assert block_ends(matrices([size] * 4), 4 * size, 8 * MB) == [size, 2 * size, 3 * size, 4 * size]
    small = 300_000
    assert block_ends(matrices([small] * 7), 7 * small, 8 * MB) == [3 * small, 6 * small, 7 * small]


def test_a_long_one_is_cut_from_its_begin() -> None:
    sizes = [100_000, 3 * MB, 100_000]
    ends = [100_000, 100_000 + MB, 100_000 + 2 * MB, 100_000 + 3 * MB, 200_000 + 3 * MB]
    assert block_ends(matrices(sizes), sum(sizes), 8 * MB) == ends


def test_what_lies_in_turns_is_one_block() -> None:
    rows, columns = 416, 1024  # the rows of both, turned, lie between one another
    size = 4 * rows * columns
    pairs = [transposed(rows, columns, at + half, 4 * rows) for at in (0, size) for half in (0, 2 * rows)]
    assert block_ends(pairs, 2 * size, 4 * MB) == [size, 2 * size]
    assert block_ends(pairs, 2 * size, MB) == [MB, size, size + MB, 2 * size]


def test_short_runs_that_follow_one_another_in_the_file_need_no_large_block() -> None:
    rows, width = 4096, 512  # what four ranks hold of a matrix that is cut along its columns
    shares = [Transfer("f", 0, rank * width, width, ((rows, width, 4 * width),)) for rank in range(4)]
    size = rows * 4 * width
    assert block_ends(shares, size, 4 * MB) == list(range(MB, size + 1, MB))
    apart = [Transfer("f", 0, rank * width, width, ((rows, 4 * width, 4 * width),)) for rank in range(4)]
    assert block_ends(apart, size, 4 * MB) == [4 * MB, size]


@given(st.lists(st.integers(1, 5 * MB), max_size=12), st.integers(0, 3 * MB), st.sampled_from([1 << 16, MB, 4 * MB]))
def test_blocks_cover_a_tensor_in_order_and_fit(sizes: list[int], padding: int, buffer: int) -> None:
    transfers, size = matrices(sizes), sum(sizes) + padding
    ends = [0, *block_ends(transfers, size, buffer)]
    assert ends[-1] == size
    assert all(0 < stop - start <= buffer for start, stop in pairwise(ends))
    for transfer in transfers:
        inside = [end for end in ends if transfer.target < end < transfer.target_end]
        assert not inside or transfer.size > min(MB, buffer)
