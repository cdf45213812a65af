"""What a worker does: it opens the source once, carries out one item after another, and leaves a result of each.

An item may be done by several workers at once, or again: all write the same bytes to the same places, and the result is
put beside the draft in one step, when the bytes are durable. The commit takes the plan up only where no worker is left.
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

from transaxle.engine.carry import Share, carry, prove
from transaxle.engine.checkpoint.manifest import HashWitness
from transaxle.engine.distribute.work_place import WorkPlace, work_place
from transaxle.engine.distribute.work_plan import WorkItem, WorkPlan, numbers, parse_plan, share_of
from transaxle.engine.execute import hold_source, state_of, task_of
from transaxle.engine.plan.conversion import Prepared, ready
from transaxle.errors import Refusal, gathered, refuse
from transaxle.formats.catalog import Recoding
from transaxle.formats.checksums import Witness
from transaxle.formats.storage.local import failed
from transaxle.formats.storage.storage import Storage, is_url, layer
from transaxle.formats.store.place import MOVES
from transaxle.formats.store.staging import storage_at
from transaxle.move.journal import ItemResult, Task, digest, error_text
from transaxle.move.transfer import Writable
from transaxle.move.workers import Limits, Progress, limits, no_progress


class OpenedPlan:
    """A plan in this process: a context that opens its source, and plans, when that is first needed.

    Args:
        plan: what was planned.
        prepared: the same, where its source is open in this process already; it stays open.
        progress: called with the bytes of each block written.

    Raises:
        TransaxleError: what opening the source raises; CORRUPT where it has changed since.
    """

    def __init__(self, plan: WorkPlan, prepared: Prepared | None = None, progress: Progress = no_progress) -> None:
        self.plan = plan
        self._progress = progress
        self._lock = RLock()
        self._stack = ExitStack()
        self._prepared: Prepared | None = None
        self._place: WorkPlace | None = None if is_url(plan.order.target) else work_place(plan)
        self._storage: Storage | None = None
        """The source, where the shares of the items are stored."""
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
            return  # a request for each file is too much: those that an item reads are looked at then
        problems = list[Refusal]()
        state = state_of(storage, self.plan.files, problems)
        if problems:
            raise gathered(problems)
        refuse_changed(self.plan.task, msgspec.structs.replace(self.plan.task, state=state))

    def _check(self, prepared: Prepared) -> None:
        """Take up a plan, if it is the same and can be carried out."""
        problems = list[Refusal]()
        task = task_of(prepared, problems)
        if problems:
            raise gathered(problems)
        refuse_changed(self.plan.task, task)
        ready(prepared)
        hold_source(prepared)
        self._prepared = prepared

    @property
    def prepared(self) -> Prepared:
        """What is carried out; the source is opened, and planned for, the first time.

        Raises:
            TransaxleError: what opening and planning raise; CORRUPT where the source has changed since; UNSUPPORTED
                where this program plans something else.
        """
        with self._lock:
            if self._prepared is None:
                with ExitStack() as stack:
                    self._check(stack.enter_context(self.plan.order.planned()))
                    self._stack.push(stack.pop_all())
            assert self._prepared is not None  # it was checked
            return self._prepared

    @property
    def place(self) -> WorkPlace:
        """Where the work happens; raises as `prepared`, which a service needs."""
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
        """Carry an item out, unless it is done already, and return its result.

        Raises:
            TransaxleError: what planning, reading and writing raise; UNEQUAL_COPIES; CORRUPT where the source was
                changed meanwhile; EXISTS where other work is going on, or nothing has begun.
        """
        item, place = self.plan.items[number], self.place
        with place.writing(item) as writer:
            part, storage, recoding = self._share(item)
            place.refuse_not_begun()
            earlier = place.results([number]).get(number)
            if earlier is not None and Known([earlier], self.plan.task).has(item, part):
                return earlier
            limit = limits(self.plan.jobs, self.plan.memory).with_min_block(part.band)
            return writer.keep(
                _carried_out(self.plan, item, part, storage, recoding, limit, writer.files, self._progress)
            )

    def _share(self, item: WorkItem) -> tuple[Share, Storage, Recoding]:
        """Return what an item does, as it is stored, or by planning where it is not; and the source."""
        part = None if self._storage is None else self.place.stored_share(item)
        if part is None or self._storage is None:
            container = self.prepared.checkpoint.container
            return share_of(self.prepared.plan, item), container.storage, container.recoding
        if any(self._storage.version(file) != version for file, version in part.versions):
            refuse_changed(self.plan.task, msgspec.structs.replace(self.plan.task, state=""))
        return part, self._storage, Recoding()


def write_shares(plan: WorkPlan, prepared: Prepared, scratch: Path) -> None:
    """Store what each item does, for workers that plan nothing.

    Raises:
        StorageError: IO, NO_SPACE.
    """
    if not any(item.key for item in plan.items):
        return
    storage, path = prepared.checkpoint.container.storage, scratch / MOVES
    making = path.with_name(f"{MOVES}.new")
    try:
        with making.open("wb") as file:
            for item in plan.items:
                file.write(share_of(prepared.plan, item, storage).text)
        making.replace(path)
    except OSError as error:
        raise failed(error, "storing what the items do", str(path)) from error


def _carried_out(
    plan: WorkPlan,
    item: WorkItem,
    part: Share,
    storage: Storage,
    recoding: Recoding,
    limit: Limits,
    files: Writable,
    progress: Progress,
) -> ItemResult:
    begin = time.monotonic()
    measured = prove(part, storage, recoding, limit, allow_lossy=True)
    done = carry(part.tensors, storage, files, limit, progress=progress)
    witness = layer(storage, Witness)
    tallies = {} if witness is None else witness.hand_over()
    hashes = layer(storage, HashWitness)
    proved = () if hashes is None else hashes.hand_over()
    storage.recheck()
    return ItemResult(
        task=plan.task,
        number=item.number,
        tensors={name: (each.hash, error_text(each.error)) for name, each in done.items()},
        checks=tuple(numbers(item.checks)),
        measured={step.name: (error_text(error), infinite) for step, (error, infinite) in measured.items()},
        summed=tuple((each.file, each.offset, tuple(tally.parts)) for each, tally in tallies.items()),
        proved=proved,
        worker=f"{socket.gethostname()}:{os.getpid()}",
        nbytes=sum(tensor.nbytes for tensor in part.tensors),
        seconds=time.monotonic() - begin,
    )


class Known:
    """What results of one task hold together.

    Args:
        results: of items.
        task: the task; results of others do not count.
    """

    def __init__(self, results: Iterable[ItemResult], task: Task) -> None:
        ours = [result for result in results if result.task.key == task.key]
        self._tensors = {name for result in ours for name in result.tensors}
        self._checks = {number for result in ours for number in result.checks}
        self._measured = {name for result in ours for name in result.measured}

    def has(self, item: WorkItem, part: Share) -> bool:
        """Tell whether all is known that an item, which does this share, should find out."""
        return (
            all(tensor.name in self._tensors for tensor in part.tensors)
            and self._checks.issuperset(numbers(item.checks))
            and all(each.name in self._measured for each in part.measures)
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


_lock = RLock()
_opened: dict[str, OpenedPlan] = {}
"""What does items of the plan that this process works on, by the hash of its text."""


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
def lent(plan: WorkPlan, prepared: Prepared, progress: Progress = no_progress) -> Iterator[None]:
    """Let `do_item` use the source that is open in this process, until the block ends.

    Args:
        plan: what is done.
        prepared: the same, with the source open.
        progress: called with the bytes of each block that this process writes.
    """
    with _lock:
        _close()
        _opened[digest(plan.text)] = OpenedPlan(plan, prepared, progress)
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
