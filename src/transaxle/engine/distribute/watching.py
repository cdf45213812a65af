"""Watching work that several workers do: an event when it begins, and one for each item that is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from transaxle.engine.distribute.work_items import WorkItem
from transaxle.move.journal import ItemResult
from transaxle.move.workers import Progress


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Where the work is."""

    event: str
    """`begun`, or `item` where one is done."""
    items: int
    """Items that there are to do."""
    items_done: int = 0
    """Those that are done."""
    total: int
    """Bytes of all tensors."""
    done: int
    """Bytes of those that are written."""
    rate: float = 0.0
    """Bytes a second that all workers have written since it began."""
    left: float | None = None
    """Estimate of the seconds to the end."""
    item: int | None = None
    """Number of the item that is done."""
    node: str = ""
    """Machine that did it."""
    worker: str = ""
    """Machine and process."""
    nbytes: int = 0
    """Bytes that it wrote."""
    seconds: float = 0.0
    """How long it took."""


Watch = Callable[[Event], None]
"""Told each event; called from one thread at a time."""


def unseen(_: Event) -> None:
    """Events that nobody watches."""


def node_of(worker: str) -> str:
    """Return the machine of a worker, `machine:process`."""
    return worker.rpartition(":")[0] or worker


class Watcher:
    """Counts what is done, and tells it.

    Args:
        items: what is to be done.
        total: bytes of all tensors.
        done: bytes of tensors that an earlier run had finished.
        progress: told the bytes of each item.
        watch: told each event.
    """

    def __init__(
        self, items: Iterable[WorkItem], total: int, done: int, progress: Progress, watch: Watch = unseen
    ) -> None:
        self._items = sum(1 for _ in items)
        self._total = total
        self._before = self._done = done
        self._finished = 0
        self._progress = progress
        self._watch = watch
        self._begun = time.monotonic()
        progress(done)
        watch(Event(event="begun", items=self._items, total=total, done=done))

    def item(self, result: ItemResult) -> None:
        """Count an item that is done."""
        self._finished += 1
        self._done = min(self._total, self._done + result.nbytes)
        rate = (self._done - self._before) / max(time.monotonic() - self._begun, 1e-9)
        self._progress(result.nbytes)
        self._watch(
            Event(
                event="item",
                items=self._items,
                items_done=self._finished,
                total=self._total,
                done=self._done,
                rate=rate,
                left=(self._total - self._done) / rate if rate else None,
                item=result.number,
                node=node_of(result.worker),
                worker=result.worker,
                nbytes=result.nbytes,
                seconds=result.seconds,
            )
        )
