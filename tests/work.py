"""Counts of work instead of times, so that slow machines give the same numbers."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

_EVENTS = frozenset({"call", "c_call"})
"""A function begins, a generator goes on, a built-in function is called."""


def calls(work: Callable[[], Any]) -> int:
    """Count the calls that a function leads to, generators that go on included."""
    count, before = 0, sys.getprofile()

    def seen(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal count
        count += event in _EVENTS

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def peak(work: Callable[[], Any]) -> int:
    """Return the most bytes of Python objects that a function had at one time, beyond those that were there."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def assert_linear(amounts: Sequence[int], slack: float = 1.3) -> None:
    """Check what n, 2n and 4n things take: twice as many take at most twice as much, and a little.

    What grows by less than a fiftieth does not grow.
    """
    once, twice, four_times = amounts
    assert four_times - twice <= 2 * slack * max(twice - once, once // 50), amounts
