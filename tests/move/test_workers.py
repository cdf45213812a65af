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


ROWS, COLUMNS = 416, 1024
TURNED = 4 * ROWS * COLUMNS
PAIRS = [transposed(ROWS, COLUMNS, at + half, 4 * ROWS) for at in (0, TURNED) for half in (0, 2 * ROWS)]
"""Transposed matrices in pairs: the rows of both lie between one another."""
WIDTH = 512
SHARES, APART = (
    [Transfer("f", 0, rank * WIDTH, WIDTH, ((4096, step, 4 * WIDTH),)) for rank in range(4)]
    for step in (WIDTH, 4 * WIDTH)
)
"""What four ranks hold of a matrix that is cut along its columns: runs that follow one another in the file or not."""


@pytest.mark.parametrize(
    ("transfers", "buffer", "ends"),
    [
        (matrices([852_000] * 4), 8 * MB, [852_000 * n for n in (1, 2, 3, 4)]),  # what fits is not cut
        (matrices([300_000] * 7), 8 * MB, [900_000, 1_800_000, 2_100_000]),
        (matrices([9, 3 * MB, 7]), 8 * MB, [9, 9 + MB, 9 + 2 * MB, 9 + 3 * MB, 16 + 3 * MB]),  # from its begin
        (PAIRS, 4 * MB, [TURNED, 2 * TURNED]),
        (PAIRS, MB, [MB, TURNED, TURNED + MB, 2 * TURNED]),
        (SHARES, 4 * MB, list(range(MB, 8 * MB + 1, MB))),
        (APART, 4 * MB, [4 * MB, 8 * MB]),
    ],
)
def test_where_blocks_end(transfers: list[Transfer], buffer: int, ends: list[int]) -> None:
    assert block_ends(transfers, ends[-1], buffer) == ends


@given(st.lists(st.integers(1, 5 * MB), max_size=12), st.integers(0, 3 * MB), st.sampled_from([1 << 16, MB, 4 * MB]))
def test_blocks_cover_a_tensor_in_order_and_fit(sizes: list[int], padding: int, buffer: int) -> None:
    transfers, size = matrices(sizes), sum(sizes) + padding
    ends = [0, *block_ends(transfers, size, buffer)]
    assert ends[-1] == size
    assert all(0 < stop - start <= buffer for start, stop in pairwise(ends))
    for transfer in transfers:
        inside = [end for end in ends if transfer.target < end < transfer.target_end]
        assert not inside or transfer.size > min(MB, buffer)
