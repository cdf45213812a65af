"""What a worker does: it opens the plan once, carries out one item after another, and leaves a result of each.

An item may be done by several workers at once, or again: all write the same bytes to the same places, and the result is
put beside the draft in one step, when the bytes are durable. The commit takes the plan up only where no worker is left.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

from transaxle.encodings.arithmetic.codec import Error
from transaxle.engine.copying.duplicate_checks import unequal
from transaxle.engine.distribute.work_items import WorkItem, numbers
from transaxle.engine.distribute.work_plan import WorkPlan, parse_plan
from transaxle.engine.execute.execute import Copying
from transaxle.engine.execute.preflight import task_of
from transaxle.engine.execute.tensor_stream import decoding_errors
from transaxle.engine.plan.conversion import Prepared, ready
from transaxle.engine.plan.planned import Plan
from transaxle.engine.views.cast import casting_errors
from transaxle.errors import Refusal, gathered, refuse
from transaxle.formats.catalog.checksums import Witness
from transaxle.formats.staging.place import SCRATCH, TargetPlace
from transaxle.formats.staging.writer import Writer
from transaxle.formats.storage.storage import layer
from transaxle.move.hashing import digest
from transaxle.move.journal import Done, ItemResult, Task, item_file, results_in, task_in, written_error
from transaxle.move.workers import Limits, limits

_BEGIN = "Begin it:  transaxle work PLAN --begin."


class OpenedPlan:
    """A plan whose source is open here, and makes the same plan: a context.

    Args:
        plan: what was planned.
        prepared: the same, where its source is open in this process already; it stays open.

    Raises:
        TransaxleError: what opening and planning raise; CORRUPT where the source has changed since; UNSUPPORTED where
            this program plans something else.
    """

    def __init__(self, plan: WorkPlan, prepared: Prepared | None = None) -> None:
        self.plan = plan
        self._stack = ExitStack()
        try:
            self.prepared = prepared or self._stack.enter_context(plan.order.planned())
            """What is carried out."""
            problems = list[Refusal]()
            task = task_of(self.prepared, problems)
            if problems:
                raise gathered(problems)
            refuse_changed(plan.task, task)
            ready(self.prepared)
        except BaseException:
            self._stack.close()
            raise
        self.limit: Limits = limits(plan.jobs, plan.memory).holding(self.prepared.plan.band)
        self._place = TargetPlace(plan.order.target, overwrite=False)

    @property
    def scratch(self) -> Path:
        """The folder with the journal and the results."""
        return self._place.partial / SCRATCH

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def do(self, number: int) -> ItemResult:
        """Carry an item out, unless it is done already, and return its result.

        Raises:
            TransaxleError: what reading and writing raise; UNEQUAL_COPIES; CORRUPT where the source was changed
                meanwhile; EXISTS where other work is going on, or nothing has begun.
        """
        item = self.plan.items[number]
        if not self._place.partial.is_dir():
            raise refuse("INCOMPLETE", "the work on this plan has not begun", file=self.plan.order.target, hint=_BEGIN)
        writer = Writer(self._place.partial, sync=True, shared=True)
        try:
            refuse_not_begun(self.plan, self.scratch)
            earlier = results_in(self.scratch, [number]).get(number)
            if earlier is not None and Known.of([earlier], self.plan.task).has(item, self.prepared.plan):
                return earlier
            result = self._carried_out(item, writer)
            writer.flush()
            writer.put(f"{SCRATCH}/{item_file(number)}", result.text)
        finally:
            writer.close()
        return result

    def _carried_out(self, item: WorkItem, writer: Writer) -> ItemResult:
        begin = time.monotonic()
        plan, storage = self.prepared.plan, self.prepared.checkpoint.container.storage
        checks = [plan.checks[number] for number in numbers(item.checks)]
        if differing := unequal(checks, storage, self.limit):
            raise gathered(differing)
        measured = self._measured(item)
        tensors = [plan.tensors[number] for number in numbers(item.tensors)]
        done = Copying.of(tensors, storage, self.limit).copy(tensors, writer)
        witness = layer(storage, Witness)
        tallies = {} if witness is None else witness.hand_over()
        storage.recheck()
        return ItemResult(
            task=self.plan.task,
            number=item.number,
            tensors={name: (each.hash, written_error(each.error)) for name, each in done.items()},
            checks=tuple(numbers(item.checks)),
            measured={name: (written_error(error), infinite) for name, (error, infinite) in measured.items()},
            summed=tuple((each.file, each.offset, tuple(tally.parts)) for each, tally in tallies.items()),
            worker=f"{socket.gethostname()}:{os.getpid()}",
            nbytes=sum(tensor.nbytes for tensor in tensors),
            seconds=time.monotonic() - begin,
        )

    def _measured(self, item: WorkItem) -> dict[str, tuple[Error, int]]:
        """Return how far the decoded and cast tensors of an item are from what they were."""
        storage = self.prepared.checkpoint.container.storage
        wanted = [self.prepared.plan.recoded[number] for number in numbers(item.measures)]
        cast = casting_errors(storage, [each.name for each in wanted if each.action == "cast"], self.limit)
        names = [each.name for each in wanted if each.action == "decoded"]
        decoded = decoding_errors(storage, names, self.limit)
        return cast | {name: (error, 0) for name, error in decoded.items()}


@dataclass(frozen=True)
class Known:
    """What results hold together."""

    tensors: frozenset[str]
    """Tensors that are written."""
    checks: frozenset[int]
    """Numbers of the checks whose copies proved equal."""
    measured: frozenset[str]
    """Tensors whose errors are known."""

    @classmethod
    def of(cls, results: Iterable[ItemResult], task: Task) -> Known:
        """Return what results of a task hold."""
        found = [result for result in results if result.task.key == task.key]
        return cls(
            frozenset(name for result in found for name in result.tensors),
            frozenset(number for result in found for number in result.checks),
            frozenset(name for result in found for name in result.measured),
        )

    def has(self, item: WorkItem, plan: Plan) -> bool:
        """Tell whether all is known that an item should find out."""
        return (
            all(plan.tensors[number].name in self.tensors for number in numbers(item.tensors))
            and self.checks.issuperset(numbers(item.checks))
            and all(plan.recoded[number].name in self.measured for number in numbers(item.measures))
        )


def refuse_changed(planned: Task, found: Task) -> None:
    """Refuse a source that is not the one that was planned for, or a program that plans otherwise.

    Raises:
        Refused: CORRUPT, UNSUPPORTED.
    """
    if planned.state != found.state:
        message = "the source's files are not those of the plan: they were changed or replaced since"
        raise refuse("CORRUPT", message, file=planned.source, hint="Plan again, and begin anew.")
    if planned.key != found.key:
        message = "this program makes another plan of the same source: it is another version, or has other plugins"
        raise refuse(
            "UNSUPPORTED", message, file=planned.source, hint="Use one installation everywhere, or plan again."
        )


def refuse_not_begun(plan: WorkPlan, scratch: Path) -> None:
    """Refuse to write where no work on this plan has begun.

    Raises:
        UsageError: EXISTS where it is the work of another conversion.
        Refused: INCOMPLETE where there is none.
    """
    begun = task_in(scratch)
    target = plan.order.target
    if begun is None:
        raise refuse("INCOMPLETE", "the work on this plan has not begun", file=target, hint=_BEGIN)
    if begun.key != plan.task.key:
        message = "beside the target is the unfinished work of another conversion"
        raise refuse("EXISTS", message, file=target, hint=f"Remove it with transaxle clean. {_BEGIN}")


_lock = Lock()
_opened: dict[str, OpenedPlan] = {}
"""The plan that this process works on, by the hash of its text."""


def do_item(text: bytes, number: int) -> bytes:
    """Carry an item of a plan out in this process; what executors call in their workers.

    The plan stays open for the items that follow; `let_go` closes it.

    Args:
        text: `WorkPlan.text`.
        number: of the item.

    Returns:
        `ItemResult.text`.

    Raises:
        TransaxleError: as `OpenedPlan` and its `do`.
    """
    key = digest(text)
    with _lock:
        if key not in _opened:
            _close()
            _opened[key] = OpenedPlan(parse_plan(text, "the plan"))
        opened = _opened[key]
    return opened.do(number).text


@contextmanager
def lent(plan: WorkPlan, prepared: Prepared) -> Iterator[None]:
    """Let `do_item` use the source that is open in this process, until the block ends."""
    with _lock:
        _close()
        _opened[digest(plan.text)] = OpenedPlan(plan, prepared)
    try:
        yield
    finally:
        let_go()


def let_go() -> None:
    """Close the plan that `do_item` has opened in this process."""
    with _lock:
        _close()


def _close() -> None:
    for each in _opened.values():
        each.__exit__(None, None, None)
    _opened.clear()


def measured_of(results: Sequence[ItemResult]) -> dict[str, tuple[Error, int]]:
    """Return all errors of values that were measured, by tensor."""
    return {name: error for result in results for name, error in result.errors.items()}


def finished_of(results: Sequence[ItemResult]) -> dict[str, Done]:
    """Return all tensors that are written."""
    return {name: done for result in results for name, done in result.finished.items()}
