"""The ranks that act together: each learns what every other one says, however long it is."""

from __future__ import annotations

import pickle

import pytest

from tests.live.ranks import run
from transaxle.errors import TransaxleError, refuse
from transaxle.live.transport.world import _PAGE, _SIZE, World

_ROOM = _PAGE - _SIZE - len(pickle.dumps(b"x" * 300)) + 300
"""The longest bytes that one collective gathers."""


def _item(rank: int, sizes: tuple[int, ...]) -> bytes:
    return bytes([65 + rank]) * sizes[rank]


def _gathered(rank: int, world: int, sizes: tuple[int, ...]) -> bool:
    return World().gather(_item(rank, sizes)) == [_item(each, sizes) for each in range(world)]


@pytest.mark.parametrize("sizes", [(0, 1, 2), (_ROOM, _ROOM, 7), (_ROOM + 1, 0, _ROOM), (5, 1_000_003, 40_000)])
def test_items_of_any_length_are_gathered_in_order(sizes: tuple[int, ...]) -> None:
    assert run(len(sizes), _gathered, sizes) == [True] * len(sizes)


def _agreed(rank: int, world: int, failing: tuple[int, ...]) -> tuple[str, ...]:
    """What each rank is told where some refuse, and that the world still works afterwards."""
    together = World()
    said: tuple[str, ...] = ()
    try:
        together.agree(refuse("IO", f"rank {rank} is tired") if rank in failing else None)
    except TransaxleError as error:
        said = tuple(refusal.message for refusal in error.refusals)
    assert together.gather(rank) == list(range(world))
    return said


@pytest.mark.parametrize("failing", [(), (2,), (0, 1)])
def test_all_ranks_are_told_what_any_of_them_refuses(failing: tuple[int, ...]) -> None:
    told = tuple(f"rank {rank} is tired" for rank in failing)
    assert run(3, _agreed, failing) == [told] * 3
