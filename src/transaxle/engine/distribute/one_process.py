"""A conversion to a service by one process: in items of work, so that another run can go on where this one was killed.

The parts that a service has of an upload survive the process that sent them, and so do the results of items beside the
target. So one process does what several would: it begins, does one item after the other, and commits. Its items are
smaller, since what is lost with it is at most the reading of one; and its parts have one length, as some services want.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transaxle.arguments import Overwrite
from transaxle.engine.distribute.conversion_order import ConversionOrder
from transaxle.engine.distribute.driver import begin, commit, left_to_do, sizes_of
from transaxle.engine.distribute.item_work import Hand, finished_of
from transaxle.engine.distribute.work_items import divide
from transaxle.engine.distribute.work_place import task_from
from transaxle.engine.distribute.work_plan import WorkPlan, program_version
from transaxle.engine.execute.execute import Report, execute, whole
from transaxle.engine.execute.preflight import Cleared, preflight
from transaxle.engine.plan.conversion import Prepared, ready
from transaxle.formats.parts.shared_location import shared_staging_at
from transaxle.formats.staging.staging import Staging
from transaxle.move.workers import Limits, Progress, limits, unwatched

if TYPE_CHECKING:
    from transaxle.formats.parts.shared_location import SharedStage

ITEM = 1 << 28
"""Bytes of an item."""
_MOST = 4096


def convert_in_parts(
    prepared: Prepared,
    target: str,
    *,
    overwrite: Overwrite = False,
    resume: bool = False,
    sync: bool = True,
    limit: Limits | None = None,
    progress: Progress = unwatched,
) -> Report:
    """Carry a plan out whose target is on a service that takes parts; see `execute`.

    Args:
        prepared: from `make_plan`, or from `preflight` for just this target.
        target: URL of a folder or a file.
        overwrite: as for `execute`.
        resume: continue an interrupted run of the same plan, also one by several workers, and keep this run's work if
            it fails too. Without it unfinished work is refused, since nothing tells whether that run is still at work.
        sync: as for `execute`; what a service has accepted is durable.
        limit: workers and memory.
        progress: told the bytes of each block.

    Raises:
        TransaxleError: as `execute`; EXISTS also where unfinished work is beside the target.
    """
    begun = time.monotonic()
    limit = limit or limits()
    how: dict[str, Any] = {"overwrite": overwrite, "resume": resume, "limit": limit, "progress": progress}
    cleared = preflight(prepared, target, running=True, **how)
    ready(cleared)
    if cleared.finished:
        return execute(cleared, target, sync=sync, **how)
    with shared_staging_at(target, overwrite=overwrite, resume=resume, sync=sync) as stage:
        plan = _divided(cleared, stage, limit, sync=sync)
        results = begin(plan, cleared, stage)
        finished = finished_of(list(results.values()))
        progress(sizes_of(cleared, finished)[1])
        with Hand(plan, cleared, progress) as hand:
            for item in left_to_do(plan, cleared, results):
                results[item.number] = hand.do(item.number)
        report = commit(plan, cleared, stage, results, len(whole(cleared.plan, finished)))
    return replace(report, workers={}, seconds=time.monotonic() - begun)


def _divided(cleared: Cleared, stage: SharedStage, limit: Limits, *, sync: bool) -> WorkPlan:
    """Return the items of work: as those were divided that lie beside the target already."""
    target, overwrite, resume = cleared.asked
    total = sum(unit.nbytes for unit in cleared.plan.units)
    count, even = max(1, min(_MOST, -(-total // ITEM))), True
    begun = stage.hidden.begun() if resume and not isinstance(stage, Staging) else None
    if begun is not None and begun.items and task_from(begun.task).key == cleared.task.key:
        count, even = begun.items, begun.even
    source, to = cleared.checkpoint.path, f"{cleared.plan.format}:{cleared.plan.dialect}"
    return WorkPlan(
        program=program_version(),
        order=ConversionOrder(source=source, target=target, to=to, reading={}),
        task=cleared.task,
        overwrite=overwrite,
        sync=sync,
        jobs=limit.jobs,
        memory=limit.memory,
        items=divide(cleared.plan, count),
        even=even,
    )
