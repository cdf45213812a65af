"""A conversion by all ranks of a torchrun job. Each rank does one work item of the plan after another until none
remains.

Every rank of the job runs the same command. The first rank makes the plan, creates the files and commits. A counter in
the job's key-value store assigns the work items, so that faster ranks do more work items. Finished work items are also
recorded in the store, from which the first rank reads them to report progress.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import torch.distributed as dist

from transaxle.arguments import read_number_of_job
from transaxle.engine.carry import Report
from transaxle.engine.distribute.driver import (
    Watch,
    Watcher,
    all_tensors_done,
    begin,
    commit,
    ignore_event,
    items_to_do,
    open_stage,
    prepare_work,
    sizes_of,
)
from transaxle.engine.distribute.item_work import close_plan, do_item, lend_source
from transaxle.engine.distribute.work_plan import ConversionOrder, WorkPlan
from transaxle.engine.plan.conversion import Prepared
from transaxle.errors import refuse
from transaxle.live.transport.world import World
from transaxle.move.journal import ItemResult, parse_result
from transaxle.move.workers import Progress, no_progress

if TYPE_CHECKING:
    from transaxle.formats.store.staging import SharedStage


_START = "Start the job like this:  torchrun --nproc-per-node 4 -m transaxle convert … --on torchrun."
_PATIENCE = timedelta(days=1)
"""Timeout of a rank that waits for other ranks; if a rank is lost, the wait ends immediately."""


@contextmanager
def _job() -> Iterator[World]:
    """Yield the `World` of this job's ranks; if the program has not initialised the process group, initialise it.

    Raises:
        UsageError: with code AMBIGUOUS, if torchrun has not started this process.
    """
    met = dist.is_initialized()
    if not met and not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        raise refuse("AMBIGUOUS", "torchrun has not started this process", hint=_START)
    if not met:
        _meet()
    try:
        yield World()
    finally:
        if not met:
            dist.destroy_process_group()


def _meet() -> None:
    """Initialise the process group of the torchrun job.

    Raises:
        UsageError: with code AMBIGUOUS, if the environment variables do not contain the rank or the number of ranks.
        StorageError: with code IO, if the ranks cannot connect to each other.
    """
    rank, world = (read_number_of_job(name) for name in ("RANK", "WORLD_SIZE"))
    read_number_of_job("MASTER_PORT")
    if rank >= world:
        raise refuse("AMBIGUOUS", f"RANK is {rank}, but there are {world} ranks (WORLD_SIZE)", hint=_START)
    try:
        dist.init_process_group("gloo", timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise refuse("IO", f"the ranks of the job do not meet: {reason}", hint=_START) from error


class _Lead:
    """The steps of a conversion that only the first rank does: it plans, creates the files and commits, while other
    ranks wait.

    Args:
        order: source, target and options of the conversion.
        look: function called with the plan before anything is written.
        resume: whether to continue an interrupted run.
        how: additional keyword arguments for `prepare_work`.
    """

    def __init__(
        self, order: ConversionOrder, look: Callable[[Prepared], None], how: Mapping[str, Any], *, resume: bool
    ) -> None:
        self._order = order
        self._look = look
        self._resume = resume
        self._how = how
        self._prepared: Prepared | None = None
        self._work: WorkPlan | None = None
        self._stage: SharedStage | None = None
        self._results: dict[int, ItemResult] = {}
        self._report: Report | None = None
        self._finished: _FinishedItems | None = None

    def begin(self, stack: ExitStack) -> tuple[bytes, list[int]]:
        """Plan the conversion and create the target's files; return the encoded work plan and the numbers of the
        unfinished work items.
        """
        prepared = stack.enter_context(self._order.prepare())
        self._look(prepared)
        cleared, work = prepare_work(self._order, prepared, resume=self._resume, **self._how)
        if isinstance(work, Report):
            self._report = work
            return b"", []
        self._work = work
        self._stage = stage = open_stage(work, resume=self._resume)
        stack.enter_context(stage)
        self._prepared = cleared
        self._results = begin(self._work, cleared, stage)
        stage.share()
        return self._work.text, [item.number for item in items_to_do(self._work, cleared, self._results)]

    def watch(self, finished: _FinishedItems, numbers: Sequence[int], progress: Progress, watch: Watch) -> None:
        """Call `progress` and `watch` for finished work items until all are done."""
        work, prepared = self._require_begun()
        sizes = sizes_of(prepared, all_tensors_done(self._results.values()))
        items = [work.items[index] for index in numbers]
        finished.watcher = Watcher(items, *sizes, progress, watch)
        self._finished = finished

    def lend_source(self) -> AbstractContextManager[None]:
        """Let this process do its work items with the source that is already open, instead of opening the source
        again.
        """
        return lend_source(*self._require_begun())

    def _require_begun(self) -> tuple[WorkPlan, Prepared]:
        if self._work is None or self._prepared is None:
            raise ValueError("nothing has begun")
        return self._work, self._prepared

    def end(self, texts: list[bytes]) -> Report:
        """Commit the conversion with the encoded results of all ranks."""
        if self._report is not None:
            return self._report
        work, prepared = self._require_begun()
        if self._stage is None:
            raise ValueError("nothing has begun")
        if self._finished is not None:
            self._finished.look()
        resumed = len(all_tensors_done(self._results.values()))
        for text in texts:
            result = parse_result(text)
            if result is not None:
                self._results[result.number] = result
        self._stage.take_back()
        return commit(work, prepared, self._stage, self._results, resumed)


def convert_together(
    order: ConversionOrder,
    *,
    resume: bool = False,
    progress: Progress = no_progress,
    watch: Watch = ignore_event,
    look: Callable[[Prepared], None] = lambda _: None,
    **how: Any,
) -> Report:
    """Convert a checkpoint with all ranks of a job; all ranks must call this function.

    Args:
        order: source, target and options of the conversion, equal on all ranks.
        resume: whether to continue an interrupted run.
        progress: function called on the first rank with the size in bytes of each finished work item.
        watch: function called on the first rank with the worker of each finished work item and the remaining work.
        look: function called on the first rank with the plan, before anything is written; if it raises an error, all
            ranks raise it.
        **how: the arguments `items`, `overwrite`, `sync`, `jobs` and `memory` of `prepare_work`.

    Raises:
        UsageError: with code AMBIGUOUS, if torchrun has not started this process.
        TransaxleError: raised on all ranks, if the conversion failed on any rank; the target is unchanged.
    """
    start = time.monotonic()
    with _job() as world, ExitStack() as stack:
        lead = _Lead(order, look, how, resume=resume) if world.rank == world.ranks[0] else None
        counter = f"transaxle/items/{secrets.token_hex(8)}"
        (text, numbers), counter = world.pool(lambda: (lead.begin(stack) if lead is not None else (b"", []), counter))[
            0
        ]
        results_by_rank: list[list[bytes]] = []
        if text:
            results_by_rank = world.pool(lambda: _do(text, numbers, counter, lead, progress, watch))
        results = [result for of_rank in results_by_rank for result in of_rank]
        reports = world.pool(lambda: lead.end(results) if lead is not None else None)
    (report,) = (each for each in reports if each is not None)
    return replace(report, seconds=time.monotonic() - start)


def _do(
    text: bytes, numbers: Sequence[int], counter: str, lead: _Lead | None, progress: Progress, watch: Watch
) -> list[bytes]:
    """Do work items until none remains, and return their encoded results."""
    store = dist.distributed_c10d._get_default_store()
    results: list[bytes] = []
    finished = _FinishedItems(f"{counter}/done")
    if lead is not None:
        lead.watch(finished, numbers, progress, watch)
    with nullcontext() if lead is None else lead.lend_source():
        try:
            while (at := store.add(counter, 1) - 1) < len(numbers):
                results.append(do_item(text, numbers[at]))
                finished.add(results[-1])
        except BaseException:
            store.add(counter, len(numbers))  # after this, no rank finds a further work item
            raise
        finally:
            close_plan()
    return results


class _FinishedItems:
    """The finished work items of all ranks, recorded in the job's key-value store.

    Args:
        key: prefix of the keys in the job's key-value store.
    """

    def __init__(self, key: str) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._key = key
        self.watcher: Watcher | None = None
        """Object that receives the result of each finished work item; None on all ranks except the first."""
        self._count_read = 0

    def add(self, text: bytes) -> None:
        """Record a work item that this rank has finished; the first rank also reads the records of other ranks."""
        result = parse_result(text)
        if result is None:
            return
        short = msgspec.structs.replace(result, tensors={}, checks=(), measured={}, summed=(), proved=())
        self._store.set(f"{self._key}/{self._store.add(self._key, 1)}", short.text.decode())
        self.look()

    def look(self) -> None:
        """On the first rank, pass all new results of work items to the watcher."""
        if self.watcher is None:
            return
        while self._store.check([f"{self._key}/{self._count_read + 1}"]):
            self._count_read += 1
            result = parse_result(self._store.get(f"{self._key}/{self._count_read}"))
            if result is not None:
                self.watcher.item(result)
