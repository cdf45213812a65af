"""The driver divides a plan into work items, hands the work items out to workers, and commits the result.

The driver creates the target's files, writes all bytes that are known in advance, and lets the workers write the rest.
When every work item has a result, the driver writes the files that depend on all tensors (digests, manifest, copied
files), and gives the checkpoint its final name.

A single process that converts to a cloud storage service works in the same way. The uploaded parts and the stored
results of work items remain if the process ends early, so that a later run can continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from transaxle.arguments import Overwrite, read_number_of_job, read_overwrite, wrong_type
from transaxle.encodings.value_steps import MEASURED_BY_READING
from transaxle.engine.carry import Report, make_report, seal, write_fragments
from transaxle.engine.checkpoint.source_hashes import HashWitness
from transaxle.engine.distribute.executors import Executor, InProcess, Pool, RayCluster, SubmitPool
from transaxle.engine.distribute.item_work import CombinedResults, OpenPlan, do_item, lend_source, write_parts
from transaxle.engine.distribute.work_place import division_of, refuse_existing, results_on, task_from, task_text
from transaxle.engine.distribute.work_plan import (
    ConversionOrder,
    WorkItem,
    WorkPlan,
    divide,
    order_items,
    part_of_item,
    program_version,
    ranges_of,
    work_plan,
)
from transaxle.engine.execute import CheckedPlan, execute, join_spans, preflight, watch_source
from transaxle.engine.plan.conversion import Prepared, require_ready
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.formats.checksums import Witness
from transaxle.formats.storage.local import storage_error
from transaxle.formats.storage.storage import is_url, layer
from transaxle.formats.store.place import ITEMS
from transaxle.formats.store.staging import Staging, display_path, shared_staging_at
from transaxle.move.journal import (
    FinishedTensor,
    ItemResult,
    Journal,
    item_file,
    parse_result,
    read_results,
    refuse_other_task,
)
from transaxle.move.workers import Limits, Progress, limits, no_progress

if TYPE_CHECKING:
    from pathlib import Path

    from transaxle.formats.store.shared_upload import SharedUpload
    from transaxle.formats.store.staging import SharedStage

RAY, TORCHRUN = "ray", "torchrun"
On: TypeAlias = str | Executor | SubmitPool
"""Executor of a conversion: `ray`, `ray://HOST:PORT` or `torchrun`; an `Executor` object; or a pool of workers with a
method `submit` (`concurrent.futures`, Dask, MPI).
"""
ITEM = 1 << 28
"""Bytes per work item in a single process, unless a file is larger. If a work item is interrupted, at most this many
bytes are read again.
"""
_MOST = 4096
_SPARE_NUMBERS = 1 << 32
"""First number for stored results that belong to no work item of the plan."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A progress event of a conversion by several workers."""

    event: str
    """`begun` at the start of the conversion, `item` when a work item is done."""
    items: int
    """Number of work items to do."""
    items_done: int = 0
    """Number of work items that are done."""
    total: int
    """Size of all tensors in bytes."""
    done: int
    """Size in bytes of the tensors that are already written."""
    rate: float = 0.0
    """Bytes per second that all workers together have written since the start."""
    left: float | None = None
    """Estimated seconds to the end of the conversion."""
    item: int | None = None
    """Number of the work item that was just done."""
    node: str = ""
    """Name of the machine that did this work item."""
    worker: str = ""
    """Machine and process that did this work item."""
    nbytes: int = 0
    """Number of bytes written for this work item."""
    seconds: float = 0.0
    """Seconds that this work item took."""


Watch = Callable[[Event], None]
"""A function that is called with each progress event, by one thread at a time."""


def ignore_event(_: Event) -> None:
    """Ignore a progress event."""


def node_of(worker: str) -> str:
    """Return the machine name of a worker; workers are named `machine:process`."""
    return worker.rpartition(":")[0] or worker


class Watcher:
    """Counts finished work items and reports progress events.

    Args:
        items: the work items to do.
        total: size of all tensors in bytes.
        done: bytes of tensors that an earlier run had finished; `progress` is called once with this number.
        progress: function called with the number of bytes of each finished work item.
        watch: function called with each progress event.
        each: whether to call `progress` for each work item; if not, it is called only with the bytes of an earlier run.
    """

    def __init__(
        self,
        items: Iterable[WorkItem],
        total: int,
        done: int,
        progress: Progress,
        watch: Watch = ignore_event,
        *,
        per_item: bool = True,
    ) -> None:
        self._items = sum(1 for _ in items)
        self._total = total
        self._before = self._done = done
        self._finished = 0
        self._progress = progress if per_item else no_progress
        self._watch = watch
        self._begun = time.monotonic()
        progress(done)
        watch(Event(event="begun", items=self._items, total=total, done=done))

    def item(self, result: ItemResult) -> None:
        """Count a finished work item, and report its progress event."""
        self._finished += 1
        self._done = min(self._total, self._done + result.nbytes)
        rate = (self._done - self._before) / max(time.monotonic() - self._begun, 1e-9)
        self._progress(result.nbytes)
        self._watch(
            Event(
                event="item",
                items=self._items,
                items_done=self._finished,
                total=self._total,
                done=self._done,
                rate=rate,
                left=(self._total - self._done) / rate if rate else None,
                item=result.number,
                node=node_of(result.worker),
                worker=result.worker,
                nbytes=result.nbytes,
                seconds=result.seconds,
            )
        )


def open_stage(plan: WorkPlan, *, resume: bool) -> SharedStage:
    """Return a context with the staged (unfinished) target of a plan.

    Raises:
        TransaxleError: any error that `shared_staging_at` raises.
    """
    overwrite = read_overwrite(plan.overwrite)
    return shared_staging_at(plan.order.target, overwrite=overwrite, resume=resume, sync=plan.sync)


def begin(plan: WorkPlan, prepared: Prepared, stage: SharedStage) -> dict[int, ItemResult]:
    """Create the target files with all bytes known in advance, and return work item number -> result of an earlier run,
    where usable.

    Args:
        plan: the plan to execute.
        prepared: the same plan with its open source.
        stage: the staged (unfinished) target, as an entered context.

    Raises:
        UsageError: with code EXISTS, if a different conversion has left unfinished work.
        StorageError: with code IO or NO_SPACE, if the files cannot be created.
    """
    if not isinstance(stage, Staging):
        return _begin_upload(plan, prepared, stage)
    refuse_other_task(stage.scratch, plan.task, display_path(plan.order.target))
    existing_files = stage.prepare(_files(prepared, stage))
    write_fragments(stage, prepared.draft.early_fragments())
    Journal(stage.scratch, plan.task).close()
    try:
        (stage.scratch / ITEMS).mkdir(exist_ok=True)
    except OSError as error:
        raise storage_error(error, "making the folder for results", str(stage.scratch)) from error
    write_parts(plan, prepared, stage.scratch)
    return _usable_results(plan, prepared, stage.scratch, existing_files)


def _begin_upload(plan: WorkPlan, prepared: Prepared, stage: SharedUpload) -> dict[int, ItemResult]:
    """Begin the uploads of a plan, or continue those of an earlier run; return the results whose files the service
    already has.
    """
    sizes = {file: prepared.draft.files[file] for item in plan.items for file in item.files}
    stage.begin_or_continue(sizes, task_text(plan.task), division_of(plan), len(plan.items))
    stage.prepare(_files(prepared, stage))
    write_fragments(stage, prepared.draft.early_fragments())
    results = {}
    for number, result in results_on(stage, stage.record.token).items():
        if _belongs_to_item(plan, prepared, number, result) and stage.holds(result.sent):
            results[number] = result
        else:
            stage.hidden.delete_result(number)
    return results


def _files(prepared: Prepared, stage: SharedStage) -> dict[str, int]:
    return dict(prepared.draft.files) if stage.single is not None else dict(prepared.plan.files)


def _usable_results(
    plan: WorkPlan, prepared: Prepared, scratch: Path, existing_files: frozenset[str]
) -> dict[int, ItemResult]:
    """Return the stored results of this plan whose files still exist, and remove all other stored results.

    A result from a run that divided the plan differently gets a number that no work item has, so that no work item
    overwrites it.
    """
    files = {unit.name: [place.file for place in unit.everywhere] for unit in prepared.plan.units}
    results, spare_number = {}, _SPARE_NUMBERS
    earlier_results = read_results(scratch)
    for number, result in earlier_results.items():
        path = scratch / item_file(number)
        is_ours = result.task.key == plan.task.key and files.keys() >= result.tensors.keys()
        try:
            if not is_ours or not all(existing_files.issuperset(files[name]) for name in result.tensors):
                path.unlink(missing_ok=True)
            elif number < _SPARE_NUMBERS and not _belongs_to_item(plan, prepared, number, result):
                while spare_number in earlier_results:
                    spare_number += 1
                path.rename(scratch / item_file(spare_number))
                results[spare_number] = result
                spare_number += 1
            else:
                results[number] = result
        except OSError as error:
            raise storage_error(error, "ordering the results of an earlier run", str(path)) from error
    return results


def _belongs_to_item(plan: WorkPlan, prepared: Prepared, number: int, result: ItemResult) -> bool:
    """Return whether a stored result belongs to the plan's work item with the same number."""
    if number >= len(plan.items):
        return False
    item = plan.items[number]
    part = part_of_item(prepared.plan, item)
    names = {tensor.name for tensor in part.tensors}
    return names == result.tensors.keys() and CombinedResults([result], plan.task).has(item, part)


def items_to_do(plan: WorkPlan, prepared: Prepared, results: dict[int, ItemResult]) -> list[WorkItem]:
    """Return the work items without complete results, in the order in which they should begin.

    On a cloud storage service, each work item has its own files, so its result must come from a single run of it.
    """
    if is_url(plan.order.target):
        return order_items(item for item in plan.items if item.number not in results and not item.is_empty)
    combined = CombinedResults(results.values(), plan.task)
    return order_items(item for item in plan.items if not combined.has(item, part_of_item(prepared.plan, item)))


def hand_out(
    plan: WorkPlan,
    prepared: Prepared,
    stage: SharedStage,
    executor: Executor,
    progress: Progress = no_progress,
    watch: Watch = ignore_event,
) -> tuple[dict[int, ItemResult], int]:
    """Begin the work, and let an executor do the remaining work items; no worker is still running when this function
    returns.

    Args:
        plan: the plan to execute.
        prepared: the same plan with its open source.
        stage: the staged (unfinished) target, as an entered context.
        executor: object that hands work items out to workers.
        progress: function called with the number of bytes of each finished work item, or of each block written in this
            process.
        watch: function called with each progress event.

    Returns:
        The results of all work items, and the number of tensors that an earlier run had finished.

    Raises:
        TransaxleError: any error that `begin` or a worker raises.
    """
    results = begin(plan, prepared, stage)
    items, resumed = items_to_do(plan, prepared, results), all_tensors_done(results.values())
    block_progress = progress if isinstance(executor, InProcess) else no_progress
    watcher = Watcher(items, *sizes_of(prepared, resumed), progress, watch, per_item=block_progress is no_progress)

    def take(text: bytes) -> None:
        result = parse_result(text)
        if result is None or result.task.key != plan.task.key:
            raise refuse("IO", "a worker's result was damaged on its way", file=plan.order.target)
        if result.number not in results:
            watcher.item(result)
        results[result.number] = result

    stage.share()
    with lend_source(plan, prepared, block_progress):
        executor.run(partial(do_item, plan.text), items, take)
    stage.take_back()
    return results, len(join_spans(prepared.plan, resumed))


def sizes_of(prepared: Prepared, finished: Collection[str]) -> tuple[int, int]:
    """Return the number of bytes of all tensors (and spans of tensors) of a plan, and of those that are finished."""
    units = prepared.plan.units
    return sum(each.nbytes for each in units), sum(each.nbytes for each in units if each.name in finished)


def commit(
    plan: WorkPlan, prepared: Prepared, stage: SharedStage, results: dict[int, ItemResult], resumed: int = 0
) -> Report:
    """Write the files that depend on all tensors, and give the checkpoint its final name.

    Args:
        plan: the executed plan.
        prepared: the same plan with its open source.
        stage: the staged (unfinished) target with its files, as an entered context.
        results: work item number -> result, for all work items.
        resumed: number of tensors that an earlier run had finished.

    Raises:
        Refused: with code INCOMPLETE, if work items have no result; with code CORRUPT, if the source was changed; with
            code LOSSY, if values became infinite.
        StorageError: with code IO or NO_SPACE, if files cannot be written.
    """
    if missing := items_to_do(plan, prepared, results):
        raise _refuse_missing(plan, missing)
    foretold: dict[str, str] | None = None
    if not isinstance(stage, Staging):
        _take_files(plan, stage, results)
        foretold = {}  # the digests are inside the files, which workers have uploaded completely
    write_fragments(stage, prepared.draft.early_fragments())
    if prepared.check_source:
        _check_sums(prepared, results.values())
        _check_hashes(prepared, results.values())
    tensors = join_spans(prepared.plan, all_tensors_done(results.values()))
    errors = {name: error for result in results.values() for name, error in result.errors.items()}
    measured = {step: errors[step.name] for step in prepared.plan.recoded if step.action in MEASURED_BY_READING}
    changed = seal(prepared, stage, limits(plan.jobs, plan.memory), tensors, measured, foretold)
    stage.commit()
    report = make_report(
        prepared,
        plan.order.target,
        single=stage.single is not None,
        resumed=resumed,
        recoded=changed,
        leftovers=stage.found,
        synced=plan.sync,
    )
    return replace(report, workers=_bytes_by_worker(results.values()))


def all_tensors_done(results: Iterable[ItemResult]) -> dict[str, FinishedTensor]:
    """Return name -> hash and error, for every tensor or span of a tensor that workers have written."""
    return {name: done for result in results for name, done in result.finished.items()}


def _take_files(plan: WorkPlan, stage: SharedUpload, results: dict[int, ItemResult]) -> None:
    """Add the files that workers have sent to the upload, after checking that the service has every file."""
    stage.look_again()
    lost = [number for number, result in results.items() if not stage.holds(result.sent)]
    if lost:
        raise _refuse_missing(plan, [plan.items[number] for number in sorted(lost)])
    for result in results.values():
        stage.take(result.sent)


def _refuse_missing(plan: WorkPlan, items: Sequence[WorkItem]) -> Exception:
    shown_numbers = spell_numbers([item.number for item in items])
    message = f"{len(items):,} of {len(plan.items):,} items have no result: {shown_numbers}"
    return refuse(
        "INCOMPLETE",
        message,
        file=plan.order.target,
        hint=f"Do the missing items:  transaxle work PLAN --items {shown_numbers}.",
    )


def spell_numbers(numbers: Sequence[int]) -> str:
    """Write item numbers in short form: `0-9,12`."""
    return ",".join(str(first) if stop == first + 1 else f"{first}-{stop - 1}" for first, stop in ranges_of(numbers))


def _check_sums(prepared: Prepared, results: Iterable[ItemResult]) -> None:
    """Combine the checksums that workers have computed; byte ranges that no worker read are checked by the storage's
    final recheck.
    """
    witness = layer(prepared.checkpoint.container.storage, Witness)
    if witness is None:
        return
    checksums = {(each.file, each.offset): each for each in prepared.checkpoint.container.checksums}
    for result in results:
        for file, offset, parts in result.summed:
            checksum = checksums[file, offset]
            witness.mark_read(file, offset, checksum.size)
            witness.count(checksum, parts)


def _check_hashes(prepared: Prepared, results: Iterable[ItemResult]) -> None:
    """Accept the tensors whose hashes workers have checked; other tensors are checked by the storage's final
    recheck.
    """
    watch_source(prepared)
    witness = layer(prepared.checkpoint.container.storage, HashWitness)
    if witness is not None:
        witness.accept({name for result in results for name in result.proved})
        for unit in prepared.plan.units:
            witness.expect(unit.transfers)


def _bytes_by_worker(results: Iterable[ItemResult]) -> dict[str, int]:
    shares: dict[str, int] = {}
    for result in results:
        shares[result.worker] = shares.get(result.worker, 0) + result.nbytes
    return dict(sorted(shares.items()))


def carry_out(
    plan: WorkPlan,
    prepared: Prepared,
    executor: Executor,
    *,
    resume: bool = False,
    progress: Progress = no_progress,
    watch: Watch = ignore_event,
) -> Report:
    """Execute a plan with several workers, from the creation of the target's files to the commit.

    Args:
        plan: the plan to execute.
        prepared: the same plan with its open source.
        executor: object that hands work items out to workers.
        resume: whether to continue an interrupted run, and to keep this run's finished work if it fails too.
        progress: function called with the number of bytes of each finished work item, or of each block written in this
            process.
        watch: function called with each progress event.

    Raises:
        TransaxleError: any error; the target is unchanged after an error.
    """
    start_time = time.monotonic()
    with open_stage(plan, resume=resume) as stage:
        results, resumed = hand_out(plan, prepared, stage, executor, progress, watch)
        report = commit(plan, prepared, stage, results, resumed)
    return replace(report, seconds=time.monotonic() - start_time)


def begin_work(plan: WorkPlan) -> int:
    """Begin the work on a plan whose workers start later; return the number of work items that remain to be done.

    Raises:
        TransaxleError: any error; with code EXISTS, if the target exists, or a worker is running.
    """
    refuse_existing(plan)
    with OpenPlan(plan) as open_plan:
        prepared = open_plan.prepared
        with open_stage(plan, resume=True) as stage:
            return len(items_to_do(plan, prepared, begin(plan, prepared, stage)))


def commit_work(plan: WorkPlan) -> Report:
    """Commit the results of a plan's workers.

    Raises:
        Refused: with code INCOMPLETE, if work items have no result, or the work has not begun.
        TransaxleError: any other error; with code EXISTS, if a worker is running. The target is unchanged after an
            error.
    """
    start_time = time.monotonic()
    with OpenPlan(plan) as open_plan:
        prepared = open_plan.prepared
        open_plan.place.refuse_not_begun()
        if missing := items_to_do(plan, prepared, open_plan.place.results()):
            raise _refuse_missing(plan, missing)
        with open_stage(plan, resume=True) as stage:
            report = commit(plan, prepared, stage, begin(plan, prepared, stage))
    return replace(report, seconds=time.monotonic() - start_time)


def refuse_beyond(plan: WorkPlan, numbers: Sequence[int]) -> None:
    """Refuse work item numbers that a plan does not have.

    Raises:
        Refused: with code AMBIGUOUS, if the plan has no work item of a given number.
    """
    beyond = [number for number in numbers if number >= len(plan.items)]
    if beyond:
        problem = Refusal(
            "AMBIGUOUS",
            f"the plan has the items 0-{len(plan.items) - 1}, and not {spell_numbers(beyond)}",
            Where(plan.order.target),
        )
        raise gathered([problem])


def convert_on(
    order: ConversionOrder,
    prepared: Prepared,
    on: On,
    *,
    jobs: int | None = None,
    resume: bool = False,
    progress: Progress = no_progress,
    watch: Watch = ignore_event,
    **how: Any,
) -> Report:
    """Execute a conversion with the workers of an executor.

    Args:
        order: the conversion as plain data.
        prepared: the conversion's plan, with its open source.
        on: executor or pool that hands out the work items.
        jobs: number of threads of each worker process.
        resume: whether to continue an interrupted run.
        progress: function called with the number of bytes of each finished work item.
        watch: function called with each progress event.
        **how: the arguments `items`, `overwrite`, `sync` and `memory` of `prepare_work`.

    Raises:
        TypeError: if `on` is no executor, pool or known name.
        TransaxleError: any error that `execute` raises; with code UNSUPPORTED, if a required package is not installed.
    """
    executor, threads = _executor(on, jobs)
    cleared, work = prepare_work(order, prepared, jobs=jobs or threads, resume=resume, **how)
    if isinstance(work, Report):
        return work
    return carry_out(work, cleared, executor, resume=resume, progress=progress, watch=watch)


def prepare_work(
    order: ConversionOrder,
    prepared: Prepared,
    *,
    items: int | None = None,
    overwrite: Overwrite = False,
    resume: bool = False,
    sync: bool = True,
    jobs: int | None = None,
    memory: int | None = None,
) -> tuple[CheckedPlan, WorkPlan | Report]:
    """Check a plan against its target, and divide the plan into work items; if an earlier run has finished all of it,
    return a report instead.

    Args:
        order: the conversion as plain data.
        prepared: the conversion's plan, with its open source.
        items: number of work items; None means one work item per GiB.
        overwrite: whether to replace an existing checkpoint at the target path.
        resume: whether to continue an interrupted run.
        sync: whether to sync everything to disk before the target gets its final name.
        jobs: number of threads of each worker process; None means the default of the worker.
        memory: number of bytes for the buffers of each worker process.

    Raises:
        TransaxleError: every refusal of the plan, as for `execute`.
    """
    limit, cleared = limits(jobs, memory), prepared
    if not isinstance(cleared, CheckedPlan):
        cleared = preflight(
            prepared, order.target, overwrite=overwrite, resume=resume, running=True, several=True, limit=limit
        )
    require_ready(cleared)
    if cleared.finished:
        target, overwrite, resume = cleared.request
        return cleared, execute(cleared, target, overwrite=overwrite, resume=resume, sync=sync, limit=limit)
    return cleared, work_plan(order, cleared, items, overwrite=overwrite, sync=sync, jobs=jobs, memory=memory)


def check_on(on: object) -> None:
    """Refuse an argument `on` that is no executor.

    Raises:
        TypeError: if the argument is neither a name nor an executor nor a pool.
        UsageError: with code AMBIGUOUS, if the name is unknown.
    """
    if isinstance(on, str):
        if on not in (RAY, TORCHRUN) and not on.startswith(f"{RAY}://"):
            hint = "Name one of: ray, ray://HOST:PORT, torchrun."
            raise refuse("AMBIGUOUS", f"cannot convert on {on!r}", hint=hint)
    elif isinstance(on, type) or not isinstance(on, Executor | SubmitPool):
        raise wrong_type("on", '"ray", "torchrun", an executor or a pool with submit()', on)


def _executor(on: On, jobs: int | None) -> tuple[Executor, int | None]:
    """Return the executor, and the default number of threads of its workers; the errors are those of `check_on`."""
    check_on(on)
    if isinstance(on, str):
        return RayCluster(None if on == RAY else on, cpus=jobs or 1), 1
    return (on, None) if isinstance(on, Executor) else (Pool(on), 1)


def is_lead() -> bool:
    """Return whether this process is rank 0 of its distributed job, or belongs to no distributed job."""
    return read_number_of_job("RANK", 0) == 0


def convert_in_parts(
    prepared: Prepared,
    target: str,
    *,
    overwrite: Overwrite = False,
    resume: bool = False,
    sync: bool = True,
    limit: Limits | None = None,
    progress: Progress = no_progress,
) -> Report:
    """Execute in this process a plan whose target is on a cloud storage service with multipart uploads; see `execute`.

    Args:
        prepared: the plan that `make_plan` returned, or `preflight` for this target.
        target: URL of the target folder or file.
        overwrite: whether to replace an existing checkpoint, as for `execute`.
        resume: whether to continue an interrupted run of the same plan, even one by several workers, and to keep this
            run's work if it fails too. Without `resume`, unfinished work is refused, because the run that left it may
            still be active.
        sync: has no effect, because uploads that a service has accepted are durable.
        limit: number of worker threads, and memory of their buffers.
        progress: function called with the number of bytes of each block.

    Raises:
        TransaxleError: any error that `execute` raises; with code EXISTS, also if unfinished work is beside the target.
    """
    start_time = time.monotonic()
    limit = limit or limits()
    options: dict[str, Any] = {"overwrite": overwrite, "resume": resume, "limit": limit, "progress": progress}
    cleared = preflight(prepared, target, running=True, **options)
    require_ready(cleared)
    if cleared.finished:
        return execute(cleared, target, sync=sync, **options)
    report = carry_out(_in_parts(cleared, limit, sync=sync), cleared, InProcess(), resume=resume, progress=progress)
    return replace(report, workers={}, seconds=time.monotonic() - start_time)


def _in_parts(cleared: CheckedPlan, limit: Limits, *, sync: bool) -> WorkPlan:
    """Divide a plan into work items for one process; if unfinished work is beside the target, use the same division as
    that work.

    If the files are small, these work items are smaller than those for several workers.
    """
    target, overwrite, resume = cleared.request
    count = max(1, min(_MOST, -(-sizes_of(cleared, ())[0] // ITEM)))
    stage = shared_staging_at(target, overwrite=overwrite, resume=resume, sync=sync)
    unfinished = stage.hidden.upload_record() if resume and not isinstance(stage, Staging) else None
    if unfinished is not None and unfinished.items and task_from(unfinished.task).key == cleared.task.key:
        count = unfinished.items
    source, to = cleared.checkpoint.path, f"{cleared.plan.format}:{cleared.plan.dialect}"
    return WorkPlan(
        program=program_version(),
        order=ConversionOrder(
            source=source, target=target, to=to, reading={}, shaping={"check_source": cleared.check_source}
        ),
        task=cleared.task,
        overwrite=overwrite,
        sync=sync,
        jobs=limit.jobs,
        memory=limit.memory,
        items=divide(cleared.plan, count, whole_files=True),
    )
