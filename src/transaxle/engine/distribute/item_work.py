"""A worker process opens the source once, does one work item of a plan after another, and stores a result for each work
item.

Several workers may do the same work item, or one worker may do it twice. Each time the same bytes are written at the
same places, and the result is stored in one step when the bytes are durable. A commit begins only when no worker is
running any more.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import Self

import msgspec

from transaxle.engine.carry import PlanPart, carry, prove
from transaxle.engine.checkpoint.source_hashes import HashWitness
from transaxle.engine.distribute.work_place import WorkPlace, work_place
from transaxle.engine.distribute.work_plan import WorkItem, WorkPlan, numbers, parse_plan, part_of_item
from transaxle.engine.execute import state_of, task_of, watch_source
from transaxle.engine.plan.conversion import Prepared, require_ready
from transaxle.errors import Refusal, gathered, refuse
from transaxle.formats.catalog import Recoding
from transaxle.formats.checksums import Witness
from transaxle.formats.storage.local import storage_error
from transaxle.formats.storage.storage import Storage, is_url, layer, recheck_versions
from transaxle.formats.store.place import MOVES
from transaxle.formats.store.staging import storage_at
from transaxle.move.journal import ItemResult, Task, digest, error_text
from transaxle.move.transfer import Writable
from transaxle.move.workers import Limits, Progress, limits, no_progress


class OpenPlan:
    """A plan in a worker process: a context that opens the plan's source. The worker makes the plan a second time only
    if it must.

    Args:
        plan: the plan to execute.
        prepared: the same plan, if its source is already open in this process; the source remains open afterwards.
        progress: function called with the number of bytes of each block written.

    Raises:
        TransaxleError: any error of opening the source; with code CORRUPT, if the source has changed since planning.
    """

    def __init__(self, plan: WorkPlan, prepared: Prepared | None = None, progress: Progress = no_progress) -> None:
        self.plan = plan
        self._progress = progress
        self._lock = RLock()
        self._stack = ExitStack()
        self._prepared: Prepared | None = None
        self._place: WorkPlace | None = None if is_url(plan.order.target) else work_place(plan)
        self._storage: Storage | None = None
        """The files of the source, if the parts of the plan for the work items are stored. If `_storage` is None, the
        worker must make the plan again.
        """
        try:
            if prepared is not None:
                self._check(prepared)
            elif self._place is not None and any(item.key for item in plan.items):
                self._storage = storage_at(plan.order.source)
                self._stack.callback(self._storage.close)
                self._refuse_changed(self._storage)
        except BaseException:
            self._stack.close()
            raise

    def _refuse_changed(self, storage: Storage) -> None:
        if is_url(self.plan.order.source):
            return  # of a source on a network, only the files that a work item reads are checked for changes
        problems = list[Refusal]()
        state = state_of(storage, self.plan.files, problems)
        if problems:
            raise gathered(problems)
        refuse_changed(self.plan.task, msgspec.structs.replace(self.plan.task, state=state))

    def _check(self, prepared: Prepared) -> None:
        """Check that a plan made in this process equals the given plan and has no refusals; store it for later work
        items.
        """
        problems = list[Refusal]()
        task = task_of(prepared, problems)
        if problems:
            raise gathered(problems)
        refuse_changed(self.plan.task, task)
        require_ready(prepared)
        watch_source(prepared)
        self._prepared = prepared

    @property
    def prepared(self) -> Prepared:
        """The plan with its open source. The first access opens the source and makes the plan again.

        Raises:
            TransaxleError: any error of opening and planning; with code CORRUPT, if the source has changed since
                planning; with code UNSUPPORTED, if this installation makes a different plan.
        """
        with self._lock:
            if self._prepared is None:
                with ExitStack() as stack:
                    self._check(stack.enter_context(self.plan.order.prepare()))
                    self._stack.push(stack.pop_all())
            assert self._prepared is not None  # `_check` has set `self._prepared`
            return self._prepared

    @property
    def place(self) -> WorkPlace:
        """The place where workers write the target. If that place is a cloud storage service, the errors are those of
        the property `prepared`.
        """
        with self._lock:
            if self._place is None:
                self._place = work_place(self.plan, self.prepared)
            return self._place

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def do(self, number: int) -> ItemResult:
        """Do a work item, unless it is already done, and return its result.

        Raises:
            TransaxleError: any error of planning, reading and writing; with code UNEQUAL_COPIES, if copies that should
                be equal are not; with code CORRUPT, if the source was changed meanwhile; with code EXISTS, if work on a
                different conversion has begun at the target; with code INCOMPLETE, if no work has begun at the target.
        """
        item, place = self.plan.items[number], self.place
        with place.open_writer(item) as writer:
            part, storage, recoding = self._part_of(item)
            place.refuse_not_begun()
            earlier = place.results([number]).get(number)
            if earlier is not None and CombinedResults([earlier], self.plan.task).has(item, part):
                return earlier
            limit = limits(self.plan.jobs, self.plan.memory).with_min_block(part.band)
            return writer.store(_do_part(self.plan, item, part, storage, recoding, limit, writer.files, self._progress))

    def _part_of(self, item: WorkItem) -> tuple[PlanPart, Storage, Recoding]:
        """Return a work item's part of the plan (stored, or planned again), the files of the source, and its computed
        tensors.
        """
        part = None if self._storage is None else self.place.read_part(item)
        if part is None or self._storage is None:
            container = self.prepared.checkpoint.container
            return part_of_item(self.prepared.plan, item), container.storage, container.recoding
        if any(self._storage.version(file) != version for file, version in part.versions):
            refuse_changed(self.plan.task, msgspec.structs.replace(self.plan.task, state=""))
        return part, self._storage, Recoding()


def write_parts(plan: WorkPlan, prepared: Prepared, scratch: Path) -> None:
    """Store each work item's part of the plan in a file, so that workers need not make the plan again.

    Raises:
        StorageError: with code IO, if the file cannot be written; with code NO_SPACE, if the disk is full.
    """
    if not any(item.key for item in plan.items):
        return
    storage, path = prepared.checkpoint.container.storage, scratch / MOVES
    making = path.with_name(f"{MOVES}.new")
    try:
        with making.open("wb") as file:
            for item in plan.items:
                file.write(part_of_item(prepared.plan, item, storage).text)
        making.replace(path)
    except OSError as error:
        raise storage_error(error, "storing what the items do", str(path)) from error


def _do_part(
    plan: WorkPlan,
    item: WorkItem,
    part: PlanPart,
    storage: Storage,
    recoding: Recoding,
    limit: Limits,
    files: Writable,
    progress: Progress,
) -> ItemResult:
    start_time = time.monotonic()
    is_checked = plan.order.check_source
    measured = prove(part, storage, recoding, limit, allow_lossy=True, is_checked=is_checked)
    finished = carry(part.tensors, storage, files, limit, progress=progress)
    sums, hashes = layer(storage, Witness), layer(storage, HashWitness)
    tallies = sums.take_tallies() if sums is not None and is_checked else {}
    proved = hashes.take_proved() if hashes is not None and is_checked else ()
    if is_checked:
        storage.recheck()
    else:
        recheck_versions(storage)
    return ItemResult(
        task=plan.task,
        number=item.number,
        tensors={name: (each.hash, error_text(each.error)) for name, each in finished.items()},
        checks=tuple(numbers(item.checks)),
        measured={step.name: (error_text(error), infinite) for step, (error, infinite) in measured.items()},
        summed=tuple((each.file, each.offset, tuple(tally.parts)) for each, tally in tallies.items()),
        proved=proved,
        worker=f"{socket.gethostname()}:{os.getpid()}",
        nbytes=sum(tensor.nbytes for tensor in part.tensors),
        seconds=time.monotonic() - start_time,
    )


class CombinedResults:
    """The combined results of several work items of one task (a conversion of one source).

    Args:
        results: results of work items.
        task: the task whose results are combined; results of different tasks are ignored.
    """

    def __init__(self, results: Iterable[ItemResult], task: Task) -> None:
        own_results = [result for result in results if result.task.key == task.key]
        self._tensors = {name for result in own_results for name in result.tensors}
        self._checks = {number for result in own_results for number in result.checks}
        self._measured = {name for result in own_results for name in result.measured}

    def has(self, item: WorkItem, part: PlanPart) -> bool:
        """Return whether the results cover a work item completely, given the work item's part of the plan."""
        return (
            all(tensor.name in self._tensors for tensor in part.tensors)
            and self._checks.issuperset(numbers(item.checks))
            and all(each.name in self._measured for each in part.measures)
        )


def refuse_changed(planned: Task, actual: Task) -> None:
    """Refuse a source that differs from the planned source, or an installation that makes a different plan.

    Raises:
        Refused: with code CORRUPT, if the files of the source changed; with code UNSUPPORTED, if the plan differs.
    """
    if planned.state != actual.state:
        message = "the source's files are not those of the plan: they were changed or replaced since"
        raise refuse("CORRUPT", message, file=planned.source, hint="Make the plan again, and begin the work again.")
    if planned.key != actual.key:
        message = "this program makes another plan of the same source: it is another version, or has other plugins"
        raise refuse(
            "UNSUPPORTED",
            message,
            file=planned.source,
            hint=("Use the same installation in all processes, or make the plan again."),
        )


_lock = RLock()
_opened: dict[str, OpenPlan] = {}
"""Hash of a plan's text -> the open plan; it contains only the plan that this process works on."""


def do_item(text: bytes, number: int) -> bytes:
    """Do a work item of a plan in this process; executors call this function in their worker processes.

    The plan remains open for later work items; `close_plan` closes it.

    Args:
        text: the plan as text, as `WorkPlan.text` returns it.
        number: number of the work item.

    Returns:
        The work item's result as text, as `ItemResult.text` returns it.

    Raises:
        TransaxleError: any error that `OpenPlan` or its method `do` raises.
    """
    key = digest(text)
    with _lock:
        if key not in _opened:
            _close()
            _opened[key] = OpenPlan(parse_plan(text, "the plan"))
        open_plan = _opened[key]
    return open_plan.do(number).text


@contextmanager
def lend_source(plan: WorkPlan, prepared: Prepared, progress: Progress = no_progress) -> Iterator[None]:
    """Return a context in which `do_item` uses a source that is already open in this process.

    Args:
        plan: the plan to execute.
        prepared: the same plan with its open source.
        progress: function called with the number of bytes of each block that this process writes.
    """
    with _lock:
        _close()
        _opened[digest(plan.text)] = OpenPlan(plan, prepared, progress)
    try:
        yield
    finally:
        close_plan()


def close_plan() -> None:
    """Close the plan that `do_item` opened in this process."""
    with _lock:
        _close()


def _close() -> None:
    for open_plan in _opened.values():
        open_plan.__exit__(None, None, None)
    _opened.clear()
