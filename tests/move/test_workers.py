"""What workers take at once: small items of this machine together, those of other machines one by one."""

from __future__ import annotations

import threading
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
from transaxle.move.workers import Item, Limits, can_batch, group_tasks, largest_first

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
