"""A conversion by the ranks of a job that torchrun has started: each takes the next item until none is left.

Every rank runs the same command. The first one begins and commits; the items are counted in the job's own store, so a
rank that is faster does more of them.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from transaxle.engine.distribute.conversion_order import ConversionOrder
from transaxle.engine.distribute.driver import begin, commit, left_to_do, staged
from transaxle.engine.distribute.item_work import do_item, finished_of, lent
from transaxle.engine.distribute.launch import Launch
from transaxle.engine.distribute.work_plan import WorkPlan, parse_plan
from transaxle.engine.execute.execute import Report
from transaxle.engine.plan.conversion import Prepared
from transaxle.errors import refuse
from transaxle.formats.staging.staging import Staging
from transaxle.live.transport.world import World
from transaxle.move.journal import ItemResult, result_of

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
        hint = "Start it so:  torchrun --nproc-per-node 4 -m transaxle convert … --on torchrun."
        raise refuse("AMBIGUOUS", "torchrun has not started this process", hint=hint)
    if not met:
        dist.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield World()
    finally:
        if not met:
            dist.destroy_process_group()


class _Lead:
    """What the first rank does, and the others wait for.

    Args:
        order: what is converted.
        prepared: the plan.
        launch: how.
    """

    def __init__(self, order: ConversionOrder, prepared: Prepared, launch: Launch) -> None:
        self._order = order
        self._prepared = prepared
        self._launch = launch
        self._work: WorkPlan | None = None
        self._stage: Staging | None = None
        self._results: dict[int, ItemResult] = {}
        self._report: Report | None = None

    def begin(self, stack: ExitStack) -> tuple[bytes, list[int]]:
        """Create the files; return the plan, and the numbers of the items that are left to do."""
        cleared = self._launch.cleared(self._order, self._prepared)
        if cleared.finished:
            self._report = self._launch.finished(cleared)
            return b"", []
        self._work = self._launch.divided(self._order, cleared)
        self._stage = stack.enter_context(staged(self._work, resume=self._launch.resume))
        self._results = begin(self._work, self._prepared, self._stage)
        self._stage.share()
        return self._work.text, [item.number for item in left_to_do(self._work, self._prepared, self._results)]

    def end(self, texts: list[bytes]) -> Report:
        """Commit what all ranks have done."""
        if self._report is not None or self._work is None or self._stage is None:
            return self._finished()
        resumed = len(finished_of(list(self._results.values())))
        for text in texts:
            result = result_of(text)
            if result is not None:
                self._results[result.number] = result
        self._stage.take_back()
        return commit(self._work, self._prepared, self._stage, self._results, resumed)

    def _finished(self) -> Report:
        if self._report is None:
            raise ValueError("nothing has begun")
        return self._report


def convert_together(order: ConversionOrder, prepared: Prepared, launch: Launch) -> Report:
    """Carry a conversion out by all ranks of a job; collective.

    Args:
        order: what is converted, the same on all ranks.
        prepared: the plan that was made of it.
        launch: how.

    Raises:
        UsageError: AMBIGUOUS where there is no job.
        TransaxleError: on every rank; the target is then as it was.
    """
    begun = time.monotonic()
    with _job() as world, ExitStack() as stack:
        lead = _Lead(order, prepared, launch) if world.rank == world.ranks[0] else None
        counter = f"transaxle/items/{secrets.token_hex(8)}"
        (text, numbers), counter = world.pool(lambda: (lead.begin(stack) if lead is not None else (b"", []), counter))[
            0
        ]
        done: list[list[bytes]] = []
        if text:
            done = world.pool(lambda: _do(parse_plan(text, "the plan"), prepared, numbers, counter, launch))
        results = [result for of_rank in done for result in of_rank]
        reports = world.pool(lambda: lead.end(results) if lead is not None else None)
    (report,) = (each for each in reports if each is not None)
    return replace(report, seconds=time.monotonic() - begun)


def _do(work: WorkPlan, prepared: Prepared, numbers: list[int], counter: str, launch: Launch) -> list[bytes]:
    """Take items until none is left, and return their results."""
    store = dist.distributed_c10d._get_default_store()
    results: list[bytes] = []
    text = work.text
    with lent(work, prepared):
        try:
            while (at := store.add(counter, 1) - 1) < len(numbers):
                results.append(do_item(text, numbers[at]))
                launch.progress(work.items[numbers[at]].nbytes)
        except BaseException:
            store.add(counter, len(numbers))  # the others need not go on
            raise
    return results
