"""The driver: begins the work on a plan, hands its items out, and commits what the workers have done.

It creates the files with all bytes that are known, and shares its claim on them with the workers. When every item has a
result, it writes what is known only then (digests, the manifest, carried files), and moves the checkpoint to its place.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from transaxle.arguments import read_overwrite
from transaxle.encodings.error import Error
from transaxle.engine.checkpoint.manifest import HashWitness
from transaxle.engine.copying.replica_mean import averages_of
from transaxle.engine.distribute.executors.executor import Executor
from transaxle.engine.distribute.item_work import (
    Known,
    OpenedPlan,
    do_item,
    finished_of,
    lent,
    measured_of,
    write_moves,
)
from transaxle.engine.distribute.watching import Watch, Watcher, unseen
from transaxle.engine.distribute.work_items import WorkItem, in_order, moves_of, ranges_of
from transaxle.engine.distribute.work_place import layout_of, refuse_there, results_on, task_text
from transaxle.engine.distribute.work_plan import WorkPlan
from transaxle.engine.execute.commit import carry, write_known, write_rest
from transaxle.engine.execute.execute import Report, reported, whole
from transaxle.engine.execute.preflight import hold_source
from transaxle.engine.plan.conversion import Prepared
from transaxle.engine.plan.planned import Measured
from transaxle.engine.views.cast import CASTING, casts_of, refuse_infinite, refuse_overflow
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.formats.checksums import Witness
from transaxle.formats.parts.shared_location import shared_staging_at
from transaxle.formats.staging.location import shown
from transaxle.formats.staging.place import ITEMS
from transaxle.formats.staging.staging import Staging
from transaxle.formats.storage.local import failed
from transaxle.formats.storage.storage import layer
from transaxle.move.journal import ItemResult, Journal, item_file, refuse_other, result_of, results_in
from transaxle.move.workers import Progress, unwatched

if TYPE_CHECKING:
    from pathlib import Path

    from transaxle.formats.parts.shared_location import SharedStage
    from transaxle.formats.parts.shared_upload import SharedUpload

_ASIDE = 1 << 32
"""First number of results that are no item's of this plan."""


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
    refuse_other(stage.scratch, plan.task, shown(plan.order.target))
    kept = stage.prepare(_files(prepared, stage))
    write_known(stage, prepared.draft.early())
    Journal(stage.scratch, plan.task).close()
    try:
        (stage.scratch / ITEMS).mkdir(exist_ok=True)
    except OSError as error:
        raise failed(error, "making the folder for results", str(stage.scratch)) from error
    write_moves(plan, prepared, stage.scratch)
    return _believed(plan, prepared, stage.scratch, kept)


def _begin_upload(plan: WorkPlan, prepared: Prepared, stage: SharedUpload) -> dict[int, ItemResult]:
    """Begin uploads, or find those of an earlier run; return the results whose parts the service has."""
    stage.begin_or_continue(layout_of(plan, prepared), task_text(plan.task), len(plan.items), even=plan.even)
    stage.prepare(_files(prepared, stage))
    write_known(stage, prepared.draft.early())
    names = frozenset(stage.hidden.names())
    results = {}
    for number, result in results_on(stage, stage.begun.token).items():
        if _is_of(plan, prepared, number, result) and stage.holds(result.sent, result.shares, names):
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
    found = results_in(scratch)
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
    moves = moves_of(prepared.plan, item)
    names = {tensor.name for tensor in moves.tensors}
    return names == result.tensors.keys() and Known.of([result], plan.task).has(item, moves)


def left_to_do(plan: WorkPlan, prepared: Prepared, results: dict[int, ItemResult]) -> list[WorkItem]:
    """Return the items of which something is in none of the results, in the order in which they should begin."""
    known = Known.of(results.values(), plan.task)
    return in_order(item for item in plan.items if not known.has(item, moves_of(prepared.plan, item)))


def hand_out(
    plan: WorkPlan,
    prepared: Prepared,
    stage: SharedStage,
    executor: Executor,
    progress: Progress = unwatched,
    watch: Watch = unseen,
) -> tuple[dict[int, ItemResult], int]:
    """Begin, and let an executor do what is left to do; afterwards no worker is at work.

    Args:
        plan: what is to be done.
        prepared: the same, with the source open.
        stage: entered.
        executor: hands items to workers.
        progress: told the bytes of each item that is done.
        watch: told who has done it, and how much is left.

    Returns:
        All results, and how many tensors an earlier run had finished.

    Raises:
        TransaxleError: what `begin` and the workers raise.
    """
    results = begin(plan, prepared, stage)
    items = left_to_do(plan, prepared, results)
    resumed = finished_of(list(results.values()))
    watcher = Watcher(items, *sizes_of(prepared, resumed), progress, watch)

    def take(text: bytes) -> None:
        result = result_of(text)
        if result is None or result.task.key != plan.task.key:
            raise refuse("IO", "a worker's result was damaged on its way", file=plan.order.target)
        if result.number not in results:
            watcher.item(result)
        results[result.number] = result

    stage.share()
    with lent(plan, prepared):
        executor.run(partial(do_item, plan.text), items, take)
    stage.take_back()
    return results, len(whole(prepared.plan, resumed))


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
    storage, found = prepared.checkpoint.container.storage, list(results.values())
    tensors, measured = whole(prepared.plan, finished_of(found)), measured_of(found)
    if not prepared.plan.allow_lossy:
        cast = {each.name for each in prepared.plan.recoded if each.action in CASTING}
        infinite = {name: error for name, error in measured.items() if name in cast}
        refuse_infinite(infinite, casts_of(storage).dtype)
        decoded = {each.name for each in prepared.plan.recoded if each.action == "decoded"}
        refuse_overflow({name: error for name, (error, _) in measured.items() if name in decoded})
    if not isinstance(stage, Staging):
        _take_parts(plan, stage, results)
    write_known(stage, prepared.draft.early())
    carried = {} if stage.single is not None else carry(prepared, stage)
    _check_sums(prepared, found)
    _check_hashes(prepared, found)
    storage.recheck()
    write_rest(stage, prepared, {name: done.hash for name, done in tensors.items()}, carried)
    recoded = _recoded(prepared, results)
    stage.commit()
    report = reported(
        prepared,
        plan.order.target,
        single=stage.single is not None,
        resumed=resumed,
        recoded=recoded,
        leftovers=stage.found,
        synced=plan.sync,
    )
    return replace(report, workers=_shares(found))


def _take_parts(plan: WorkPlan, stage: SharedUpload, results: dict[int, ItemResult]) -> None:
    """Give an upload the parts that workers have sent, if the service has just these."""
    stage.look_again()
    lost = [number for number, result in results.items() if not stage.holds(result.sent, result.shares)]
    if lost:
        raise _missing(plan, [plan.items[number] for number in sorted(lost)])
    for result in results.values():
        stage.take(result.sent, result.shares)


def _missing(plan: WorkPlan, items: Sequence[WorkItem]) -> Exception:
    shown_numbers = spelled([item.number for item in items])
    message = f"{len(items):,} of {len(plan.items):,} items have no result: {shown_numbers}"
    return refuse(
        "INCOMPLETE", message, file=plan.order.target, hint=f"Do them:  transaxle work PLAN --items {shown_numbers}."
    )


def spelled(numbers: Sequence[int]) -> str:
    """Return numbers as people write them: `0-9,12`."""
    return ",".join(str(first) if stop == first + 1 else f"{first}-{stop - 1}" for first, stop in ranges_of(numbers))


def _check_sums(prepared: Prepared, results: Sequence[ItemResult]) -> None:
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


def _check_hashes(prepared: Prepared, results: Sequence[ItemResult]) -> None:
    """Leave to the storage's recheck what no worker has found to have the hash that the source keeps of it."""
    hold_source(prepared)
    witness = layer(prepared.checkpoint.container.storage, HashWitness)
    if witness is not None:
        witness.believe({name for result in results for name in result.proved})
        for unit in prepared.plan.units:
            witness.expect(unit.transfers)


def _recoded(prepared: Prepared, results: dict[int, ItemResult]) -> tuple[Measured, ...]:
    """Return how far each tensor is from what it was."""
    found = list(results.values())
    tensors, measured = finished_of(found), measured_of(found)
    averaged = averages_of(prepared.checkpoint.container.storage)
    encoded = {
        tensor.codes_of: tensors[tensor.name].error or Error()
        for tensor in prepared.plan.tensors
        if tensor.codes_of is not None
    }
    recoded = []
    for each in prepared.plan.recoded:
        if each.action == "decoded" or each.action in CASTING:
            error, infinite = measured[each.name]
        else:
            error, infinite = (averaged if each.action == "averaged" else encoded)[each.name], 0
        recoded.append(Measured(each, error, infinite))
    return tuple(recoded)


def _shares(results: Sequence[ItemResult]) -> dict[str, int]:
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
    progress: Progress = unwatched,
    watch: Watch = unseen,
) -> Report:
    """Carry a plan out by several workers, from its beginning to its commit.

    Args:
        plan: what is to be done.
        prepared: the same, with the source open.
        executor: hands items to workers.
        resume: continue an interrupted run, and keep this run's work if it fails too.
        progress: told the bytes of each item that is done.
        watch: told who has done it, and how much is left.

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
    with OpenedPlan(plan) as opened, staged(plan, resume=True) as stage:
        return len(left_to_do(plan, opened.prepared, begin(plan, opened.prepared, stage)))


def commit_work(plan: WorkPlan) -> Report:
    """Commit what workers have done of a plan.

    Raises:
        Refused: INCOMPLETE, where items have no result, or the work has not begun.
        TransaxleError: whatever else prevents it; EXISTS where a worker is at work. The target is then as it was.
    """
    begun = time.monotonic()
    with OpenedPlan(plan) as opened:
        opened.place.refuse_not_begun()
        prepared = opened.prepared
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
