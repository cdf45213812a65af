"""Executors: what hands the items of a plan to workers, and brings back their results.

A scheduler needs one method to be one. What has `submit`, as the pools of `concurrent.futures` have, of Dask, MPI or
loky, is made one here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from statistics import median
from typing import Any, Protocol, runtime_checkable

from transaxle.engine.distribute.work_items import WorkItem
from transaxle.errors import StorageError

Work = Callable[[int], bytes]
"""Does the item of a number, anywhere, and returns its result. It can be pickled, and called in any process that sees
the source and the target's folder; called twice for one item, also at once, it does no harm.
"""
_TRIES = 3
"""How often an item is tried whose worker meets an error of the machine."""
RETRIES = 10
"""How often a scheduler that we tell does an item again whose worker or machine is lost, or met an error of it."""
SLOW = 3.0
"""An item is a straggler that takes so many times as long as half of those of about its size did at most."""
UNKNOWN = 10.0
"""The same, where no other of its size is done, by bytes: larger tensors may go slower, a thread each."""
GRACE = 10.0
"""Seconds that no item needs to explain."""
TICK = 1.0
"""Seconds between two looks for stragglers."""


@runtime_checkable
class Executor(Protocol):
    """Hands items to workers."""

    def run(self, work: Work, items: Sequence[WorkItem], take: Callable[[bytes], None]) -> None:
        """Let workers do items; return when all are done and no worker is at work.

        Args:
            work: what a worker calls with an item's `number`.
            items: what is to be done, in the order in which it should begin; `nbytes` tells how much it is.
            take: to be called with each result, in any order, from one thread at a time; of an item done twice with
                one of both, or both.

        Raises:
            Exception: what `work` raised, when trying again makes no sense; no worker may be at work then.
        """


@runtime_checkable
class Submitting(Protocol):
    """What has the method of a `concurrent.futures.Executor`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Call a function somewhere."""


class Here:
    """Does all items in this process, one after the other."""

    def run(self, work: Work, items: Sequence[WorkItem], take: Callable[[bytes], None]) -> None:
        """See `Executor`."""
        for item in items:
            take(work(item.number))


class Pool:
    """Lets a pool of workers do items.

    Args:
        pool: processes or threads; `concurrent.futures.ProcessPoolExecutor`, or what is used like it.
    """

    def __init__(self, pool: Submitting) -> None:
        self._pool = pool

    def run(self, work: Work, items: Sequence[WorkItem], take: Callable[[bytes], None]) -> None:
        """See `Executor`; an item that fails for an error of the machine is tried again."""
        tries = {item.number: 1 for item in items}
        running = {self._pool.submit(work, item.number): item.number for item in items}
        try:
            while running:
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for each in finished:
                    number = running.pop(each)
                    try:
                        result = each.result()
                    except StorageError:
                        if tries[number] == _TRIES:
                            raise
                        tries[number] += 1
                        running[self._pool.submit(work, number)] = number
                    else:
                        take(result)
        finally:
            for each in running:
                each.cancel()
            wait([each for each in running if not each.cancelled()])


class Stragglers:
    """Tells which items to begin once more: those that take much longer than the others did, when nothing else waits.

    It knows nothing of who does them, or of clocks: whoever hands items out tells it what happens, and when.

    Args:
        items: what is to be done; a large one may take longer than small ones.
    """

    def __init__(self, items: Iterable[WorkItem]) -> None:
        self._items = {item.number: item for item in items}
        self._running: dict[int, list[float]] = {}
        """Item -> when each of its runs was handed out."""
        self._seconds: dict[int, float] = {}
        """How long the items took that are done."""
        self._last_begun: float | None = None
        """Since when no item waits for a place."""

    def begun(self, number: int, now: float) -> None:
        """Note that an item was handed out."""
        self._running.setdefault(number, []).append(now)

    def finished(self, number: int, seconds: float) -> None:
        """Note that an item is done for the first time.

        Args:
            number: of the item.
            seconds: how long its worker took.
        """
        self._running.pop(number, None)
        self._seconds[number] = seconds

    def has(self, number: int) -> bool:
        """Tell whether an item is done."""
        return number in self._seconds

    @property
    def done(self) -> int:
        """How many items are done."""
        return len(self._seconds)

    def again(self, now: float, places: int) -> list[int]:
        """Return the items to begin once more.

        Args:
            now: the time.
            places: how many items can be done at once. While there are as many that are not done, nobody is free.
        """
        if not self._seconds or len(self._running) >= places:
            return []
        if self._last_begun is None:
            self._last_begun = now
        limits = self._limits()
        return [
            number
            for number, begun in self._running.items()
            if len(begun) == 1 and now - max(begun[0], self._last_begun) > limits(self._items[number])
        ]

    def _limits(self) -> Callable[[WorkItem], float]:
        """Return how long an item may take: by the items of about its size, or, where none is done, by all bytes."""
        alike: dict[int, list[float]] = {}
        for number, seconds in self._seconds.items():
            alike.setdefault(self._items[number].magnitude, []).append(seconds)
        usual = {magnitude: median(found) for magnitude, found in alike.items()}
        a_byte = sum(self._seconds.values()) / max(1, sum(self._items[number].nbytes for number in self._seconds))

        def limit(item: WorkItem) -> float:
            if item.magnitude in usual:
                return max(GRACE, SLOW * usual[item.magnitude])
            return max(GRACE, UNKNOWN * a_byte * item.nbytes)

        return limit
