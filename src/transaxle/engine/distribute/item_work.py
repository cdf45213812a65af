"""What a worker does: it opens the source once, carries out one item after another, and leaves a result of each.

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

import msgspec

from transaxle.encodings.error import Error
from transaxle.engine.checkpoint.manifest import HashWitness
from transaxle.engine.copying.duplicate_checks import unequal
from transaxle.engine.distribute.work_items import Moves, WorkItem, moves_of, numbers
from transaxle.engine.distribute.work_place import WorkPlace, work_place
from transaxle.engine.distribute.work_plan import WorkPlan, parse_plan
from transaxle.engine.execute.execute import Copying
from transaxle.engine.execute.preflight import hold_source, state_of, task_of
from transaxle.engine.execute.tensor_stream import decoding_errors
from transaxle.engine.plan.conversion import Prepared, ready
from transaxle.engine.views.cast import CASTING, casting_errors
from transaxle.errors import Refusal, gathered, refuse
from transaxle.formats.checksums import Witness
from transaxle.formats.staging.location import storage_at
from transaxle.formats.staging.place import MOVES
from transaxle.formats.storage.local import failed
from transaxle.formats.storage.storage import Storage, is_url, layer
from transaxle.move.endpoint import Writable
from transaxle.move.hashing import digest
from transaxle.move.journal import Done, ItemResult, Task, written_error
from transaxle.move.workers import Limits, Progress, limits, unwatched


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
            hold_source(self.prepared)
        except BaseException:
            self._stack.close()
            raise
        self.limit: Limits = limits(plan.jobs, plan.memory).holding(self.prepared.plan.band)
        self.place: WorkPlace = work_place(plan, self.prepared)
        """Where the work happens."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


class Hand:
    """What does items of a plan in this process, from their stored moves; it plans itself only where there are none.

    Args:
        plan: what was planned.
        prepared: the same, where its source is open in this process already; it stays open.
        progress: told the bytes of each block.

    Raises:
        TransaxleError: what opening the source raises; CORRUPT where it has changed since.
    """

    def __init__(self, plan: WorkPlan, prepared: Prepared | None = None, progress: Progress = unwatched) -> None:
        self.plan = plan
        self._progress = progress
        self._lock = Lock()
        self._stack = ExitStack()
        self._opened = None if prepared is None else self._stack.enter_context(OpenedPlan(plan, prepared))
        self._storage: Storage | None = None
        self._place: WorkPlace | None = None if is_url(plan.order.target) else work_place(plan)
        if prepared is None and self._place is not None and any(item.key for item in plan.items):
            self._storage = storage_at(plan.order.source)
            self._stack.callback(self._storage.close)
            try:
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
        item = self.plan.items[number]
        place = self._place or self._planned().place
        with place.writing(item) as writer:
            moves, storage, limit = self._ready(item, place)
            place.refuse_not_begun()
            earlier = place.results([number]).get(number)
            if earlier is not None and Known.of([earlier], self.plan.task).has(item, moves):
                return earlier
            writing = writer.files, self._progress
            return writer.keep(_carried_out(self.plan, item, moves, storage, limit, *writing))

    def _ready(self, item: WorkItem, place: WorkPlace) -> tuple[Moves, Storage, Limits]:
        """Return what an item does, of which source, and with how much memory."""
        moves = None if self._storage is None else place.moves(item)
        if moves is not None and self._storage is not None:
            if any(self._storage.version(file) != version for file, version in moves.versions):
                refuse_changed(self.plan.task, msgspec.structs.replace(self.plan.task, state=""))
            return moves, self._storage, limits(self.plan.jobs, self.plan.memory).holding(moves.band)
        opened = self._planned()
        prepared = opened.prepared
        return moves_of(prepared.plan, item), prepared.checkpoint.container.storage, opened.limit

    def _planned(self) -> OpenedPlan:
        """Open the source, and plan: what needs no more than the moves of an item does without."""
        with self._lock:
            if self._opened is None:
                self._opened = self._stack.enter_context(OpenedPlan(self.plan))
            return self._opened


def write_moves(plan: WorkPlan, prepared: Prepared, scratch: Path) -> None:
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
                file.write(moves_of(prepared.plan, item, storage).text)
        making.replace(path)
    except OSError as error:
        raise failed(error, "storing what the items do", str(path)) from error


def _carried_out(
    plan: WorkPlan,
    item: WorkItem,
    moves: Moves,
    storage: Storage,
    limit: Limits,
    writer: Writable,
    progress: Progress,
) -> ItemResult:
    begin = time.monotonic()
    if differing := unequal(moves.checks, storage, limit):
        raise gathered(differing)
    measured = _measured(moves, storage, limit)
    done = Copying.of(moves.tensors, storage, limit).copy(moves.tensors, writer, progress=progress)
    witness = layer(storage, Witness)
    tallies = {} if witness is None else witness.hand_over()
    hashes = layer(storage, HashWitness)
    proved = () if hashes is None else hashes.hand_over()
    storage.recheck()
    return ItemResult(
        task=plan.task,
        number=item.number,
        tensors={name: (each.hash, written_error(each.error)) for name, each in done.items()},
        checks=tuple(numbers(item.checks)),
        measured={name: (written_error(error), infinite) for name, (error, infinite) in measured.items()},
        summed=tuple((each.file, each.offset, tuple(tally.parts)) for each, tally in tallies.items()),
        proved=proved,
        worker=f"{socket.gethostname()}:{os.getpid()}",
        nbytes=sum(tensor.nbytes for tensor in moves.tensors),
        seconds=time.monotonic() - begin,
    )


def _measured(moves: Moves, storage: Storage, limit: Limits) -> dict[str, tuple[Error, int]]:
    """Return how far the decoded, cast and merged tensors of an item are from what they were."""
    cast = casting_errors(storage, [each.name for each in moves.measures if each.action in CASTING], limit)
    names = [each.name for each in moves.measures if each.action == "decoded"]
    decoded = decoding_errors(storage, names, limit)
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

    def has(self, item: WorkItem, moves: Moves) -> bool:
        """Tell whether all is known that an item should find out.

        Args:
            item: the item.
            moves: what it does.
        """
        return (
            all(tensor.name in self.tensors for tensor in moves.tensors)
            and self.checks.issuperset(numbers(item.checks))
            and all(each.name in self.measured for each in moves.measures)
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


_lock = Lock()
_opened: dict[str, Hand] = {}
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
        TransaxleError: as `Hand` and its `do`.
    """
    key = digest(text)
    with _lock:
        if key not in _opened:
            _close()
            _opened[key] = Hand(parse_plan(text, "the plan"))
        opened = _opened[key]
    return opened.do(number).text


@contextmanager
def lent(plan: WorkPlan, prepared: Prepared) -> Iterator[None]:
    """Let `do_item` use the source that is open in this process, until the block ends."""
    with _lock:
        _close()
        _opened[digest(plan.text)] = Hand(plan, prepared)
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
