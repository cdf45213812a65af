"""A conversion by the ranks of a job that torchrun has started: each takes the next item until none is left.

Every rank runs the same command. The first one plans, begins and commits; the items are counted in the job's own store,
so a rank that is faster does more of them, and so is what is done, which the first rank tells whoever watches.
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
from transaxle.encodings.encoding import Error
from transaxle.encodings.value_steps import Measured, Recoded
from transaxle.engine.carry import Report
from transaxle.engine.distribute.driver import (
    Watch,
    Watcher,
    begin,
    commit,
    divided,
    finished_of,
    left_to_do,
    sizes_of,
    staged,
    unseen,
)
from transaxle.engine.distribute.item_work import do_item, lent, let_go
from transaxle.engine.distribute.work_plan import ConversionOrder, WorkPlan
from transaxle.engine.plan.conversion import Prepared
from transaxle.engine.verification import Verification
from transaxle.errors import refuse
from transaxle.live.transport import wire
from transaxle.live.transport.world import World
from transaxle.move.journal import ItemResult, parse_result
from transaxle.move.workers import Progress, no_progress

if TYPE_CHECKING:
    from transaxle.formats.store.staging import SharedStage


_START = "Start it so:  torchrun --nproc-per-node 4 -m transaxle convert … --on torchrun."
wire.tellable(Report, Measured, Recoded, Error, Verification)  # the first rank tells the others of its report
_PATIENCE = timedelta(days=1)
"""How long a rank without work waits for the others; one that dies is heard of at once."""


@contextmanager
def _job() -> Iterator[World]:
    """Give the ranks of this job, which meet here if they have not met before.

    Raises:
        UsageError: AMBIGUOUS where torchrun has not started this process.
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
    """Let the ranks of a job meet.

    Raises:
        UsageError: AMBIGUOUS where the environment does not say which rank of how many this is.
        StorageError: IO where they do not find each other.
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
    """What the first rank does, and the others wait for.

    Args:
        order: what is converted.
        look: called with the plan before anything is written.
        resume: continue an interrupted run.
        how: further options of `divided`.
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
        self._told: _Told | None = None

    def begin(self, stack: ExitStack) -> tuple[bytes, list[int]]:
        """Plan, and create the files; return the plan, and the numbers of the items that are left to do."""
        prepared = stack.enter_context(self._order.planned())
        self._look(prepared)
        cleared, work = divided(self._order, prepared, resume=self._resume, **self._how)
        if isinstance(work, Report):
            self._report = work
            return b"", []
        self._work = work
        self._stage = stage = staged(work, resume=self._resume)
        stack.enter_context(stage)
        self._prepared = cleared
        self._results = begin(self._work, cleared, stage)
        stage.share()
        return self._work.text, [item.number for item in left_to_do(self._work, cleared, self._results)]

    def watch(self, told: _Told, numbers: Sequence[int], progress: Progress, watch: Watch) -> None:
        """Tell whoever watches of the items that are done."""
        work, prepared = self._begun()
        sizes = sizes_of(prepared, finished_of(self._results.values()))
        items = [work.items[each] for each in numbers]
        told.watcher = Watcher(items, *sizes, progress, watch)
        self._told = told

    def lending(self) -> AbstractContextManager[None]:
        """Let this process do items with the source that is open here."""
        return lent(*self._begun())

    def _begun(self) -> tuple[WorkPlan, Prepared]:
        if self._work is None or self._prepared is None:
            raise ValueError("nothing has begun")
        return self._work, self._prepared

    def end(self, texts: list[bytes]) -> Report:
        """Commit what all ranks have done."""
        if self._report is not None:
            return self._report
        work, prepared = self._begun()
        if self._stage is None:
            raise ValueError("nothing has begun")
        if self._told is not None:
            self._told.look()
        resumed = len(finished_of(self._results.values()))
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
    watch: Watch = unseen,
    look: Callable[[Prepared], None] = lambda _: None,
    **how: Any,
) -> Report:
    """Carry a conversion out by all ranks of a job; collective.

    Args:
        order: what is converted, the same on all ranks.
        resume: continue an interrupted run.
        progress: called on the first rank with the bytes of each item that is done.
        watch: called there with who has done it, and how much is left.
        look: called there with the plan, before anything is written; what it raises, all ranks raise.
        **how: `items`, `overwrite`, `sync`, `jobs` and `memory` as for `divided`.

    Raises:
        UsageError: AMBIGUOUS where there is no job.
        TransaxleError: on every rank; the target is then as it was.
    """
    begun = time.monotonic()
    with _job() as world, ExitStack() as stack:
        lead = _Lead(order, look, how, resume=resume) if world.rank == world.ranks[0] else None
        counter = f"transaxle/items/{secrets.token_hex(8)}"
        (text, numbers), counter = world.pool(lambda: (lead.begin(stack) if lead is not None else (b"", []), counter))[
            0
        ]
        done: list[list[bytes]] = []
        if text:
            done = world.pool(lambda: _do(text, numbers, counter, lead, progress, watch))
        results = [result for of_rank in done for result in of_rank]
        reports = world.pool(lambda: lead.end(results) if lead is not None else None)
    (report,) = (each for each in reports if each is not None)
    return replace(report, seconds=time.monotonic() - begun)


def _do(
    text: bytes, numbers: Sequence[int], counter: str, lead: _Lead | None, progress: Progress, watch: Watch
) -> list[bytes]:
    """Take items until none is left, and return their results."""
    store = dist.distributed_c10d._get_default_store()
    results: list[bytes] = []
    told = _Told(f"{counter}/done")
    if lead is not None:
        lead.watch(told, numbers, progress, watch)
    with nullcontext() if lead is None else lead.lending():
        try:
            while (at := store.add(counter, 1) - 1) < len(numbers):
                results.append(do_item(text, numbers[at]))
                told.add(results[-1])
        except BaseException:
            store.add(counter, len(numbers))  # the others need not go on
            raise
        finally:
            let_go()
    return results


class _Told:
    """What all ranks have done, told by the first one.

    Args:
        key: where it is kept in the job's store.
    """

    def __init__(self, key: str) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._key = key
        self.watcher: Watcher | None = None
        """Told of each result; None on the other ranks."""
        self._seen = 0

    def add(self, text: bytes) -> None:
        """Tell of an item that is done here; the first rank looks what the others have told."""
        result = parse_result(text)
        if result is None:
            return
        short = msgspec.structs.replace(result, tensors={}, checks=(), measured={}, summed=(), proved=())
        self._store.set(f"{self._key}/{self._store.add(self._key, 1)}", short.text.decode())
        self.look()

    def look(self) -> None:
        """On the first rank, tell what all have done since."""
        if self.watcher is None:
            return
        while self._store.check([f"{self._key}/{self._seen + 1}"]):
            self._seen += 1
            result = parse_result(self._store.get(f"{self._key}/{self._seen}"))
            if result is not None:
                self.watcher.item(result)
