"""Two tensors side by side: read, or otherwise made, block by block, to be compared."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Generic, NamedTuple

from transaxle.formats.storage.compiled import new_batch, same_bytes
from transaxle.move.endpoint import Readable
from transaxle.move.runs import is_whole
from transaxle.move.transfer import Transfer
from transaxle.move.workers import BLOCK, Limits, Progress, Task, Worker, are_noted, block_ends, unwatched


class Compared(NamedTuple, Generic[Task]):
    """Two tensors of as many bytes that are compared."""

    key: Task
    """What they are called."""
    first: Sequence[Transfer]
    """What fills the first, sorted by where it lands."""
    second: Sequence[Transfer]
    """What fills the second."""
    size: int
    """Bytes of each."""


class Pair:
    """Two workers in one thread that produce two tensors side by side, in the memory of one.

    Args:
        first: the source files of the first.
        second: those of the second.
        limit: what one worker would have.
        stop: set when the work is no longer wanted.
    """

    def __init__(self, first: Readable, second: Readable, limit: Limits, stop: threading.Event) -> None:
        self._workers = Worker(first, limit.halved, stop), Worker(second, limit.halved, stop)
        self._batch = new_batch() if are_noted(first, second) else None

    def blocks(
        self, first: Sequence[Transfer], second: Sequence[Transfer], size: int, other: int | None = None
    ) -> Iterator[tuple[memoryview, memoryview]]:
        """Produce two tensors of as many elements in order, block by block.

        Args:
            first: what fills the first.
            second: what fills the second.
            size: bytes of the first.
            other: bytes of the second; None: the same.
        """
        one, two = self._workers
        sizes = size, size if other is None else other
        most = min(BLOCK, one.room)
        lengths = [most * each // max(*sizes, 1) or 1 for each in sizes]  # as many elements: items are powers of two
        yield from zip(
            one.blocks(first, sizes[0], length=lengths[0]), two.blocks(second, sizes[1], length=lengths[1]), strict=True
        )

    def differing(self, tensors: Iterable[Compared[Task]], progress: Progress = unwatched) -> set[Task]:
        """Compare tensors byte by byte, each up to where it is found to differ, or a little further.

        Args:
            tensors: what is compared.
            progress: told the bytes of each that were just compared.

        Returns:
            the keys of those that differ.
        """
        found: set[Task] = set()
        with self._batch or nullcontext():
            for tensor in tensors:
                self._compare(tensor, found, progress)
            if self._batch is not None:
                self._batch.run()
        return found

    def _compare(self, tensor: Compared[Task], found: set[Task], progress: Progress) -> None:
        """Compare two tensors, in a batch if there is one; the key is added to what is `found` where they differ."""
        key, first, second, size = tensor
        for one, other in self._noted(first, second, size):
            if self._batch is None:
                if not same_bytes(one, other):
                    found.add(key)
                progress(len(one))
            else:
                self._batch.compare(one, other, partial(found.add, key))
                self._batch.then(partial(progress, len(one)))
            if key in found:
                break

    def _noted(
        self, first: Sequence[Transfer], second: Sequence[Transfer], size: int
    ) -> Iterator[tuple[memoryview, memoryview]]:
        """Yield blocks with the bytes of two tensors, which are in them when the batch is carried out."""
        one, two = self._workers
        if self._batch is None:
            yield from self.blocks(first, second, size)
            return
        ends = block_ends(second if is_whole(first, size) else first, size, one.room)
        sides = (worker.noted(self._batch, made_of, ends) for worker, made_of in ((one, first), (two, second)))
        for (_, block), (_, other) in zip(*sides, strict=True):
            yield block, other
