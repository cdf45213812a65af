"""The driver: divides a plan, begins the work on it, hands its items out, and commits what the workers have done.

It creates the files with all bytes that are known, and shares its claim on them with the workers. When every item has a
result, it writes what is known only then (digests, the manifest, carried files), and moves the checkpoint to its place.

One process that converts to a service does so too, for itself: the parts that a service has of an upload survive the
process that sent them, and so do the results of items beside the target, so that another run can go on.
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
from transaxle.engine.carry import Report, reported, seal, write_fragments
from transaxle.engine.checkpoint.manifest import HashWitness
from transaxle.engine.distribute.executors import Executor, Here, Pool, RayCluster, Submitting
from transaxle.engine.distribute.item_work import Known, OpenedPlan, do_item, lent, write_shares
from transaxle.engine.distribute.work_place import division_of, refuse_there, results_on, task_from, task_text
from transaxle.engine.distribute.work_plan import (
    ConversionOrder,
    WorkItem,
    WorkPlan,
    divide,
    in_order,
    program_version,
    ranges_of,
    share_of,
    work_plan,
)
from transaxle.engine.execute import Cleared, execute, hold_source, preflight, united
from transaxle.engine.plan.conversion import Prepared, ready
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.formats.checksums import Witness
from transaxle.formats.storage.local import failed
from transaxle.formats.storage.storage import is_url, layer
from transaxle.formats.store.place import ITEMS
from transaxle.formats.store.staging import Staging, shared_staging_at, shown
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
On: TypeAlias = str | Executor | Submitting
"""Who carries a conversion out: `ray`, `ray://HOST:PORT` or `torchrun`; an executor; or a pool of workers with `submit`
(`concurrent.futures`, Dask, MPI).
"""
ITEM = 1 << 28
"""Bytes of an item of one process, if files are not larger: what is lost with it is at most the reading of one."""
_MOST = 4096
_ASIDE = 1 << 32
"""First number of results that are no item's of this plan."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Where the work is."""

    event: str
    """`begun`, or `item` where one is done."""
    items: int
    """Items that there are to do."""
    items_done: int = 0
    """Those that are done."""
    total: int
    """Bytes of all tensors."""
    done: int
    """Bytes of those that are written."""
    rate: float = 0.0
    """Bytes a second that all workers have written since it began."""
    left: float | None = None
    """Estimate of the seconds to the end."""
    item: int | None = None
    """Number of the item that is done."""
    node: str = ""
    """Machine that did it."""
    worker: str = ""
    """Machine and process."""
    nbytes: int = 0
    """Bytes that it wrote."""
    seconds: float = 0.0
    """How long it took."""


Watch = Callable[[Event], None]
"""Told each event; called from one thread at a time."""


def unseen(_: Event) -> None:
    """Events that nobody watches."""


def node_of(worker: str) -> str:
    """Return the machine of a worker, `machine:process`."""
    return worker.rpartition(":")[0] or worker


class Watcher:
    """Counts what is done, and tells it.

    Args:
        items: what is to be done.
        total: bytes of all tensors.
        done: bytes of tensors that an earlier run had finished; `progress` is called with them.
        progress: called with the bytes of each item.
        watch: called with each event.
        each: tell `progress` of each item, and not only of those that were done.
    """

    def __init__(
        self,
        items: Iterable[WorkItem],
        total: int,
        done: int,
        progress: Progress,
        watch: Watch = unseen,
        *,
        each: bool = True,
    ) -> None:
        self._items = sum(1 for _ in items)
        self._total = total
        self._before = self._done = done
        self._finished = 0
        self._progress = progress if each else no_progress
        self._watch = watch
        self._begun = time.monotonic()
        progress(done)
        watch(Event(event="begun", items=self._items, total=total, done=done))

    def item(self, result: ItemResult) -> None:
        """Count an item that is done."""
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


def staged(plan: WorkPlan, *, resume: bool) -> SharedStage:
    """Return the place of a plan's target, to be entered.

    Raises:
        TransaxleError: as `shared_staging_at`.
    """
    overwrite = read_overwrite(plan.overwrite)
    return shared_staging_at(plan.order.target, overwrite=overwrite, resume=resume, sync=plan.sync)


def begin(plan: WorkPlan, prepared: Prepared, stage: SharedStage) -> dict[int, ItemResult]:
    """Create the files with all bytes that are known, and return the results that an earlier run has left.

    Args:
        plan: what is to be done.
        prepared: the same, with the source open.
        stage: entered.

    Raises:
        UsageError: EXISTS where another conversion has left unfinished work.
        StorageError: IO, NO_SPACE.
    """
    if not isinstance(stage, Staging):
        return _begin_upload(plan, prepared, stage)
    refuse_other_task(stage.scratch, plan.task, shown(plan.order.target))
    kept = stage.prepare(_files(prepared, stage))
    write_fragments(stage, prepared.draft.early())
    Journal(stage.scratch, plan.task).close()
    try:
        (stage.scratch / ITEMS).mkdir(exist_ok=True)
    except OSError as error:
        raise failed(error, "making the folder for results", str(stage.scratch)) from error
    write_shares(plan, prepared, stage.scratch)
    return _believed(plan, prepared, stage.scratch, kept)


def _begin_upload(plan: WorkPlan, prepared: Prepared, stage: SharedUpload) -> dict[int, ItemResult]:
    """Begin uploads, or find those of an earlier run; return the results whose files the service has."""
    sizes = {file: prepared.draft.files[file] for item in plan.items for file in item.files}
    stage.begin_or_continue(sizes, task_text(plan.task), division_of(plan), len(plan.items))
    stage.prepare(_files(prepared, stage))
    write_fragments(stage, prepared.draft.early())
    results = {}
    for number, result in results_on(stage, stage.begun.token).items():
        if _is_of(plan, prepared, number, result) and stage.holds(result.sent):
            results[number] = result
        else:
            stage.hidden.delete_result(number)
    return results


def _files(prepared: Prepared, stage: SharedStage) -> dict[str, int]:
    return dict(prepared.draft.files) if stage.single is not None else dict(prepared.plan.files)


def _believed(plan: WorkPlan, prepared: Prepared, scratch: Path, kept: frozenset[str]) -> dict[int, ItemResult]:
    """Return results of this plan whose files are still the ones that they were written into; remove the others.

    One of another division of the plan gets a number that no item has, so that none takes its place.
    """
    files = {unit.name: [place.file for place in unit.everywhere] for unit in prepared.plan.units}
    results, beyond = {}, _ASIDE
    found = read_results(scratch)
    for number, result in found.items():
        path = scratch / item_file(number)
        ours = result.task.key == plan.task.key and files.keys() >= result.tensors.keys()
        try:
            if not ours or not all(kept.issuperset(files[name]) for name in result.tensors):
                path.unlink(missing_ok=True)
            elif number < _ASIDE and not _is_of(plan, prepared, number, result):
                while beyond in found:
                    beyond += 1
                path.rename(scratch / item_file(beyond))
                results[beyond] = result
                beyond += 1
            else:
                results[number] = result
        except OSError as error:
            raise failed(error, "ordering the results of an earlier run", str(path)) from error
    return results


def _is_of(plan: WorkPlan, prepared: Prepared, number: int, result: ItemResult) -> bool:
    """Tell whether a result is that of the item with its number."""
    if number >= len(plan.items):
        return False
    item = plan.items[number]
    part = share_of(prepared.plan, item)
    names = {tensor.name for tensor in part.tensors}
    return names == result.tensors.keys() and Known([result], plan.task).has(item, part)


def left_to_do(plan: WorkPlan, prepared: Prepared, results: dict[int, ItemResult]) -> list[WorkItem]:
    """Return the items of which something is in none of the results, in the order in which they should begin.

    On a service each item has files of its own, so another's result does not stand for its own, whatever it has made.
    """
    if is_url(plan.order.target):
        return in_order(item for item in plan.items if item.number not in results and not item.is_empty)
    known = Known(results.values(), plan.task)
    return in_order(item for item in plan.items if not known.has(item, share_of(prepared.plan, item)))


def hand_out(
    plan: WorkPlan,
    prepared: Prepared,
    stage: SharedStage,
    executor: Executor,
    progress: Progress = no_progress,
    watch: Watch = unseen,
) -> tuple[dict[int, ItemResult], int]:
    """Begin, and let an executor do what is left to do; afterwards no worker is at work.

    Args:
        plan: what is to be done.
        prepared: the same, with the source open.
        stage: entered.
        executor: hands items to workers.
        progress: called with the bytes of each item that is done, or of each block written here.
        watch: called with who has done it, and how much is left.

    Returns:
        All results, and how many tensors an earlier run had finished.

    Raises:
        TransaxleError: what `begin` and the workers raise.
    """
    results = begin(plan, prepared, stage)
    items, resumed = left_to_do(plan, prepared, results), finished_of(results.values())
    here = progress if isinstance(executor, Here) else no_progress
    watcher = Watcher(items, *sizes_of(prepared, resumed), progress, watch, each=here is no_progress)

    def take(text: bytes) -> None:
        result = parse_result(text)
        if result is None or result.task.key != plan.task.key:
            raise refuse("IO", "a worker's result was damaged on its way", file=plan.order.target)
        if result.number not in results:
            watcher.item(result)
        results[result.number] = result

    stage.share()
    with lent(plan, prepared, here):
        executor.run(partial(do_item, plan.text), items, take)
    stage.take_back()
    return results, len(united(prepared.plan, resumed))


def sizes_of(prepared: Prepared, finished: Collection[str]) -> tuple[int, int]:
    """Return the bytes of all units, and of those that are finished."""
    units = prepared.plan.units
    return sum(each.nbytes for each in units), sum(each.nbytes for each in units if each.name in finished)


def commit(
    plan: WorkPlan, prepared: Prepared, stage: SharedStage, results: dict[int, ItemResult], resumed: int = 0
) -> Report:
    """Write what is known when all items are done, and move the checkpoint to its place.

    Args:
        plan: what was to be done.
        prepared: the same, with the source open.
        stage: entered, with its files prepared.
        results: of the items.
        resumed: tensors that an earlier run had finished.

    Raises:
        Refused: INCOMPLETE, where items have no result; CORRUPT where the source was changed; LOSSY.
        StorageError: IO, NO_SPACE.
    """
    if missing := left_to_do(plan, prepared, results):
        raise _missing(plan, missing)
    foretold: dict[str, str] | None = None
    if not isinstance(stage, Staging):
        _take_files(plan, stage, results)
        foretold = {}  # the digests of a file are in it: its worker has sent all of it
    write_fragments(stage, prepared.draft.early())
    _check_sums(prepared, results.values())
    _check_hashes(prepared, results.values())
    tensors = united(prepared.plan, finished_of(results.values()))
    errors = {name: error for result in results.values() for name, error in result.errors.items()}
    measured = {step: errors[step.name] for step in prepared.plan.recoded if step.action in MEASURED_BY_READING}
    changed = seal(prepared, stage, limits(plan.jobs, plan.memory), tensors, measured, foretold)
    stage.commit()
    report = reported(
        prepared,
        plan.order.target,
        single=stage.single is not None,
        resumed=resumed,
        recoded=changed,
        leftovers=stage.found,
        synced=plan.sync,
    )
    return replace(report, workers=_shares(results.values()))


def finished_of(results: Iterable[ItemResult]) -> dict[str, FinishedTensor]:
    """Return all tensors, and spans of tensors, that are written."""
    return {name: done for result in results for name, done in result.finished.items()}


def _take_files(plan: WorkPlan, stage: SharedUpload, results: dict[int, ItemResult]) -> None:
    """Give an upload the files that workers have sent, if the service has just these."""
    stage.look_again()
    lost = [number for number, result in results.items() if not stage.holds(result.sent)]
    if lost:
        raise _missing(plan, [plan.items[number] for number in sorted(lost)])
    for result in results.values():
        stage.take(result.sent)


def _missing(plan: WorkPlan, items: Sequence[WorkItem]) -> Exception:
    shown_numbers = spelled([item.number for item in items])
    message = f"{len(items):,} of {len(plan.items):,} items have no result: {shown_numbers}"
    return refuse(
        "INCOMPLETE", message, file=plan.order.target, hint=f"Do them:  transaxle work PLAN --items {shown_numbers}."
    )


def spelled(numbers: Sequence[int]) -> str:
    """Return numbers as people write them: `0-9,12`."""
    return ",".join(str(first) if stop == first + 1 else f"{first}-{stop - 1}" for first, stop in ranges_of(numbers))


def _check_sums(prepared: Prepared, results: Iterable[ItemResult]) -> None:
    """Put together what workers have summed of ranges with a checksum; the storage's recheck reads the rest."""
    witness = layer(prepared.checkpoint.container.storage, Witness)
    if witness is None:
        return
    known = {(each.file, each.offset): each for each in prepared.checkpoint.container.checksums}
    for result in results:
        for file, offset, parts in result.summed:
            checksum = known[file, offset]
            witness.expect(file, offset, checksum.size)
            witness.count(checksum, parts)


def _check_hashes(prepared: Prepared, results: Iterable[ItemResult]) -> None:
    """Leave to the storage's recheck what no worker has found to have the hash that the source keeps of it."""
    hold_source(prepared)
    witness = layer(prepared.checkpoint.container.storage, HashWitness)
    if witness is not None:
        witness.believe({name for result in results for name in result.proved})
        for unit in prepared.plan.units:
            witness.expect(unit.transfers)


def _shares(results: Iterable[ItemResult]) -> dict[str, int]:
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
    watch: Watch = unseen,
) -> Report:
    """Carry a plan out by several workers, from its beginning to its commit.

    Args:
        plan: what is to be done.
        prepared: the same, with the source open.
        executor: hands items to workers.
        resume: continue an interrupted run, and keep this run's work if it fails too.
        progress: called with the bytes of each item that is done, or of each block written here.
        watch: called with who has done it, and how much is left.

    Raises:
        TransaxleError: whatever prevents it; the target is then as it was.
    """
    begun = time.monotonic()
    with staged(plan, resume=resume) as stage:
        results, resumed = hand_out(plan, prepared, stage, executor, progress, watch)
        report = commit(plan, prepared, stage, results, resumed)
    return replace(report, seconds=time.monotonic() - begun)


def begin_work(plan: WorkPlan) -> int:
    """Begin the work on a plan, for workers that come later; return how many of its items are left to do.

    Raises:
        TransaxleError: whatever prevents it; EXISTS where the target is there, or a worker is at work.
    """
    refuse_there(plan)
    with OpenedPlan(plan) as opened:
        prepared = opened.prepared
        with staged(plan, resume=True) as stage:
            return len(left_to_do(plan, prepared, begin(plan, prepared, stage)))


def commit_work(plan: WorkPlan) -> Report:
    """Commit what workers have done of a plan.

    Raises:
        Refused: INCOMPLETE, where items have no result, or the work has not begun.
        TransaxleError: whatever else prevents it; EXISTS where a worker is at work. The target is then as it was.
    """
    begun = time.monotonic()
    with OpenedPlan(plan) as opened:
        prepared = opened.prepared
        opened.place.refuse_not_begun()
        if missing := left_to_do(plan, prepared, opened.place.results()):
            raise _missing(plan, missing)
        with staged(plan, resume=True) as stage:
            report = commit(plan, prepared, stage, begin(plan, prepared, stage))
    return replace(report, seconds=time.monotonic() - begun)


def refuse_beyond(plan: WorkPlan, numbers: Sequence[int]) -> None:
    """Refuse numbers of items that a plan does not have.

    Raises:
        Refused: AMBIGUOUS.
    """
    beyond = [number for number in numbers if number >= len(plan.items)]
    if beyond:
        problem = Refusal(
            "AMBIGUOUS",
            f"the plan has the items 0-{len(plan.items) - 1}, and not {spelled(beyond)}",
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
    watch: Watch = unseen,
    **how: Any,
) -> Report:
    """Carry a conversion out by the workers of an executor.

    Args:
        order: what is converted.
        prepared: the plan that was made of it.
        on: who hands the items out.
        jobs: threads of each worker.
        resume: continue an interrupted run.
        progress: called with the bytes of each item that is done.
        watch: called with who has done it, and how much is left.
        **how: `items`, `overwrite`, `sync` and `memory` as for `divided`.

    Raises:
        TypeError: nobody knows how to hand items to what it names.
        TransaxleError: as `execute`; UNSUPPORTED where what it needs is not installed.
    """
    executor, threads = _executor(on, jobs)
    cleared, work = divided(order, prepared, jobs=jobs or threads, resume=resume, **how)
    if isinstance(work, Report):
        return work
    return carry_out(work, cleared, executor, resume=resume, progress=progress, watch=watch)


def divided(
    order: ConversionOrder,
    prepared: Prepared,
    *,
    items: int | None = None,
    overwrite: Overwrite = False,
    resume: bool = False,
    sync: bool = True,
    jobs: int | None = None,
    memory: int | None = None,
) -> tuple[Cleared, WorkPlan | Report]:
    """Clear a plan for its target, and divide it; a target that an earlier run has finished has its report already.

    Args:
        order: what is converted.
        prepared: the plan that was made of it.
        items: how many there are; None: one for each GiB.
        overwrite: replace a checkpoint.
        resume: continue an interrupted run.
        sync: make everything durable before the target appears.
        jobs: threads of each worker; None: each chooses for itself.
        memory: bytes of the buffers of each worker.

    Raises:
        TransaxleError: every refusal of the plan, as `execute`.
    """
    limit, cleared = limits(jobs, memory), prepared
    if not isinstance(cleared, Cleared):
        cleared = preflight(
            prepared, order.target, overwrite=overwrite, resume=resume, running=True, several=True, limit=limit
        )
    ready(cleared)
    if cleared.finished:
        target, overwrite, resume = cleared.asked
        return cleared, execute(cleared, target, overwrite=overwrite, resume=resume, sync=sync, limit=limit)
    return cleared, work_plan(order, cleared, items, overwrite=overwrite, sync=sync, jobs=jobs, memory=memory)


def check_on(on: object) -> None:
    """Refuse what nobody knows how to hand items to.

    Raises:
        TypeError: it is neither a name nor an executor nor a pool.
        UsageError: AMBIGUOUS for another name.
    """
    if isinstance(on, str):
        if on not in (RAY, TORCHRUN) and not on.startswith(f"{RAY}://"):
            hint = "Name one of: ray, ray://HOST:PORT, torchrun."
            raise refuse("AMBIGUOUS", f"cannot convert on {on!r}", hint=hint)
    elif isinstance(on, type) or not isinstance(on, Executor | Submitting):
        raise wrong_type("on", '"ray", "torchrun", an executor or a pool with submit()', on)


def _executor(on: On, jobs: int | None) -> tuple[Executor, int | None]:
    """Return what hands items out, and the threads of each of its workers by default; raises as `check_on`."""
    check_on(on)
    if isinstance(on, str):
        return RayCluster(None if on == RAY else on, cpus=jobs or 1), 1
    return (on, None) if isinstance(on, Executor) else (Pool(on), 1)


def is_lead() -> bool:
    """Tell whether this process is the rank of a job that speaks for all, or in no job."""
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
    """Carry a plan out in this process whose target is on a service that takes parts; see `execute`.

    Args:
        prepared: from `make_plan`, or from `preflight` for just this target.
        target: URL of a folder or a file.
        overwrite: as for `execute`.
        resume: continue an interrupted run of the same plan, also one by several workers, and keep this run's work if
            it fails too. Without it unfinished work is refused, since nothing tells whether that run is still at work.
        sync: as for `execute`; what a service has accepted is durable.
        limit: workers and memory.
        progress: called with the bytes of each block.

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
    report = carry_out(_in_parts(cleared, limit, sync=sync), cleared, Here(), resume=resume, progress=progress)
    return replace(report, workers={}, seconds=time.monotonic() - begun)


def _in_parts(cleared: Cleared, limit: Limits, *, sync: bool) -> WorkPlan:
    """Divide a plan for one process: as the work was divided that lies beside the target already.

    Its items are smaller than those of several workers, where files are small.
    """
    target, overwrite, resume = cleared.asked
    count = max(1, min(_MOST, -(-sizes_of(cleared, ())[0] // ITEM)))
    stage = shared_staging_at(target, overwrite=overwrite, resume=resume, sync=sync)
    begun = stage.hidden.begun() if resume and not isinstance(stage, Staging) else None
    if begun is not None and begun.items and task_from(begun.task).key == cleared.task.key:
        count = begun.items
    source, to = cleared.checkpoint.path, f"{cleared.plan.format}:{cleared.plan.dialect}"
    return WorkPlan(
        program=program_version(),
        order=ConversionOrder(source=source, target=target, to=to, reading={}),
        task=cleared.task,
        overwrite=overwrite,
        sync=sync,
        jobs=limit.jobs,
        memory=limit.memory,
        items=divide(cleared.plan, count, whole_files=True),
    )
