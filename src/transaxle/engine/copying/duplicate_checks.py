"""Copies: what a checkpoint stores twice, and the proof that both are equal.

Ties, replicas along a name axis and merged counters are one tensor stored in several places. Only one of them is
written to the target. So the others must prove equal, bit by bit, before anything is committed: a `Pair` reads two
tensors, or makes them otherwise, block by block, and compares them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple

import msgspec
from msgspec.structs import replace

from transaxle.axes.layout.relayout import Check, unchanged, unlike
from transaxle.engine.copying.source import Source
from transaxle.errors import Refusal, TransaxleError, Where
from transaxle.formats.catalog import BITS, Container, nbytes, numpy_dtype
from transaxle.move.endpoint import Readable
from transaxle.move.transfer import Transfer
from transaxle.move.workers import (
    BLOCK,
    Limits,
    Progress,
    Task,
    Worker,
    are_noted,
    block_ends,
    grouped,
    is_whole,
    largest_first,
    new_steps,
    share,
    unwatched,
)
from transaxle.spans import stage


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
        self._steps = new_steps(together=are_noted(first, second))
        self._workers = tuple(Worker(each, limit.halved, stop, self._steps) for each in (first, second))

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
        with self._steps as steps:
            for tensor in tensors:
                self._compare(tensor, found, progress)
            steps.run()
        return found

    def _compare(self, tensor: Compared[Task], found: set[Task], progress: Progress) -> None:
        """List that two tensors are compared; the key is added to what is `found` where they differ."""
        key, first, second, size = tensor
        for one, other in self._noted(first, second, size):
            self._steps.compare(one, other, partial(found.add, key))
            self._steps.then(partial(progress, len(one)))
            if key in found:
                break

    def _noted(
        self, first: Sequence[Transfer], second: Sequence[Transfer], size: int
    ) -> Iterator[tuple[memoryview, memoryview]]:
        """Yield blocks with the bytes of two tensors, which are in them when the steps are carried out."""
        one, two = self._workers
        ends = block_ends(second if is_whole(first, size) else first, size, one.room)
        sides = (worker.noted(made_of, ends) for worker, made_of in ((one, first), (two, second)))
        for (_, block), (_, other) in zip(*sides, strict=True):
            yield block, other


_SIDES = ("first", "second")
_APART = (
    "Remove the copy that is out of date; or, if both were trained apart, give a config that says so, as "
    '"tie_word_embeddings": false does (--config FILE, config=).'
)
_DRIFTED = (
    "Ranks train their replicas apart: take the mean of those that differ with --average-replicas (average=True)."
)
_DAMAGED = "One of the files is damaged, or of another save: copy the checkpoint again."


class PlannedCheck(msgspec.Struct, frozen=True, gc=False):
    """Two stored copies of one tensor that must be equal before the target is committed."""

    name: str
    """Stored name of the first, or that of the target they become."""
    why: str
    """The rule that says they are one."""
    nbytes: int
    """Bytes of each."""
    first: tuple[Transfer, ...]
    """Reads the first."""
    second: tuple[Transfer, ...]
    """Reads the second, in the first's layout."""
    rounded: tuple[str, str] | None = None
    """Dtypes of both, where the second is the first in lower precision."""
    hint: str = ""
    """What to do where they differ."""
    zero: bool = False
    """The second is zeros, as many as the first has elements."""

    @property
    def refusal(self) -> Refusal:
        """Why nothing may be committed, where they differ."""
        return unlike(self.name, self.why, self.hint, zero=self.zero)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data, with a name for each number."""
        sides = {side: [each.as_json() for each in getattr(self, side)] for side in _SIDES}
        rounded = None if self.rounded is None else dict(zip(_SIDES, self.rounded, strict=True))
        return {"name": self.name, "why": self.why, "nbytes": self.nbytes, **sides, "rounded": rounded}


def plan_checks(source: Source, checks: Sequence[Check], problems: list[Refusal]) -> list[PlannedCheck]:
    """Plan the comparisons of stored copies; what stands against them is added to `problems`."""
    planned = []
    for check in checks:
        if check.first.dtype != check.second.dtype:
            message = f"{check.why}\nbut one is {check.first.dtype}, the other {check.second.dtype}"
            problems.append(Refusal("UNEQUAL_COPIES", message, Where(None, check.first.name), check.hint or _APART))
            continue
        try:
            first, second = (tuple(source.transfers(side)) for side in (check.first, check.second))
            size = nbytes(check.first.dtype, check.first.shape)
        except TransaxleError as error:
            problems.extend(error.refusals)
            continue
        hint = check.hint or _APART
        planned.append(PlannedCheck(check.first.name, check.why, size, first, second, None, hint, check.zero))
    return planned + plan_twins(source.container, problems)


def plan_twins(container: Container, problems: list[Refusal]) -> list[PlannedCheck]:
    """Plan the comparisons that the container itself asks for."""
    planned = []
    for twin in container.twins:
        one, other = twin.first, twin.second
        if one.shape != other.shape or (one.dtype != other.dtype and not twin.rounded):
            found = f"one is {one.dtype} {list(one.shape)}, the other {other.dtype} {list(other.shape)}"
            problems.append(Refusal("UNEQUAL_COPIES", f"{twin.why}\nbut {found}", Where(None, one.name), _DAMAGED))
            continue
        try:
            first, second = (
                tuple(Source(replace(container, entries={entry.name: entry})).transfers(unchanged(entry.name, entry)))
                for entry in (one, other)
            )
        except TransaxleError as error:
            problems.extend(error.refusals)
            continue
        rounded = (one.dtype, other.dtype) if twin.rounded and one.dtype != other.dtype else None
        hint = _DRIFTED if twin.replica else _DAMAGED
        planned.append(PlannedCheck(one.name, twin.why, one.nbytes, first, second, rounded, hint))
    return planned


@stage("compare copies")
def unequal(checks: Sequence[PlannedCheck], reader: Readable, limit: Limits) -> list[Refusal]:
    """Compare stored copies, and return a refusal for each pair that differs."""
    if not checks:
        return []
    found: dict[int, Refusal] = {}

    def compare(pair: Pair, some: Sequence[int]) -> None:
        tensors = (
            Compared(number, checks[number].first, checks[number].second, checks[number].nbytes)
            for number in some
            if checks[number].rounded is None
        )
        for number in pair.differing(tensors) | {each for each in some if _rounds_otherwise(pair, checks[each])}:
            found[number] = checks[number].refusal

    sizes = [(number, check.nbytes) for number, check in enumerate(checks)]
    fair = sum(size for _, size in sizes) // limit.jobs
    work = grouped(largest_first(sizes), noted=are_noted(reader), fair=fair)
    share(work, limit.jobs, partial(Pair, reader, reader, limit), compare)
    return [found[number] for number in sorted(found)]


def _rounds_otherwise(pair: Pair, check: PlannedCheck) -> bool:
    """Tell whether one is the other in lower precision, and some of its values, rounded, are not that one's bits."""
    if check.rounded is None:
        return False
    import numpy as np

    from transaxle.encodings.arithmetic.casting import cast

    wide, narrow = check.rounded
    blocks = pair.blocks(check.first, check.second, check.nbytes, check.nbytes * BITS[narrow] // BITS[wide])
    return any(
        cast(np.frombuffer(one, numpy_dtype(wide)), narrow).tobytes() != other.tobytes() for one, other in blocks
    )
