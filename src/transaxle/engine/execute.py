"""Execution in this process: what stands against carrying a plan out, and then the carrying out, whole or not at all.

What stands against it beyond the plan itself are the source's files and the place that is written to. Planning a
conversion and running it ask the same, so that a plan says what a run would; asking changes nothing on the disk.

Source and target stay apart, by whatever path they are reached: replacing a source by what is made of it would leave
the result as the only copy, whatever was lost on the way; and a target inside the source, or around it, changes or
deletes what is being read.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from transaxle.arguments import Overwrite
from transaxle.encodings.encoding import Error
from transaxle.encodings.value_steps import MeasuredTensor
from transaxle.engine.carry import (
    Errors,
    Report,
    Share,
    believe,
    carry,
    prove,
    recoded,
    reported,
    seal,
    whole,
    write_fragments,
)
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.manifest import hold, problems_of
from transaxle.engine.plan.conversion import Prepared, ready
from transaxle.engine.plan.planned import Plan, PlannedTensor
from transaxle.errors import Refusal, TransaxleError, UsageError, Where, gathered
from transaxle.formats.catalog import Container
from transaxle.formats.checksums import Witness
from transaxle.formats.detect import open_container
from transaxle.formats.registry import ADAPTER_CONFIG, is_one_file
from transaxle.formats.storage.copier import Steps
from transaxle.formats.storage.local import LocalStorage
from transaxle.formats.storage.storage import Storage, close, is_url, layer
from transaxle.formats.store.leftovers import sweep_beside
from transaxle.formats.store.service import address, local_path
from transaxle.formats.store.staging import Staging, shared_staging_at, shown, staging_at, takes_parts
from transaxle.move.journal import FinishedTensor, Journal, Task, digest, digest_in, join_hashes, refuse_other_task
from transaxle.move.transfer import StepWritable, Writable
from transaxle.move.workers import Limits, Progress, limits, no_progress
from transaxle.spans import span, stage

if TYPE_CHECKING:
    from transaxle.formats.store.staging import Stage


_HINT = "Choose another target; once the new checkpoint is verified, you can remove the old one."
_BESIDE = "Choose a target outside of the source, such as a folder beside it."
_WITHOUT = "Choose a target that does not contain it, such as a new folder."


@contextmanager
def in_order(source: object, target: object) -> Iterator[None]:
    """Let the error of a source that is not there, or is empty, say so where the target is a checkpoint.

    Args:
        source: path of the source, as typed; of anything else nothing is asked.
        target: the same of the target.
    """
    try:
        yield
    except TransaxleError as error:
        paths = [os.fspath(path) for path in (source, target) if isinstance(path, str | os.PathLike)]
        if len(paths) < 2 or is_url(paths[0]) or not _is_empty(paths[0]) or not _holds_checkpoint(paths[1]):
            raise
        first, *rest = error.refusals
        meant = f"The source comes first, then the target; here the target, {paths[1]}, holds a checkpoint."
        raise gathered([replace(first, hint=f"{first.hint} {meant}".strip()), *rest]) from error


def _is_empty(path: str) -> bool:
    """Tell whether nothing is at a path, or a folder without anything in it."""
    try:
        return next(Path(path).iterdir(), None) is None
    except FileNotFoundError:
        return True
    except (OSError, ValueError):  # ValueError: no system takes it as a path
        return False


def _holds_checkpoint(path: str) -> bool:
    try:
        close(open_container(path).storage)
    except TransaxleError:
        return False
    return True


class Cleared(Prepared, frozen=True):
    """A plan with one place to carry it out: its refusals are all of those that a run would meet before it writes."""

    asked: tuple[str, Overwrite, bool]
    """Target, whether it may be replaced, and whether an interrupted run is continued."""
    task: Task
    """What a journal of it belongs to."""
    finished: bool = False
    """Whether the target holds just what would be written: there is nothing left to do."""
    errors: Mapping[str, Error] = msgspec.field(default_factory=dict)
    """How far each tensor is that is encoded, by table name, where the target is finished."""


@stage("look before writing")
def preflight(
    prepared: Prepared,
    target: str,
    *,
    overwrite: Overwrite = False,
    resume: bool = False,
    running: bool = False,
    several: bool = False,
    limit: Limits | None = None,
    progress: Progress = no_progress,
) -> Cleared:
    """Find out whether a plan can be carried out at a place.

    Only a target that is there and is to be resumed is read: it may be what an interrupted run had finished.

    Args:
        prepared: from `make_plan`.
        target: folder, one file, or URL.
        overwrite: as for `execute`.
        resume: as for `execute`.
        running: it is about to be carried out, so a checkpoint that a run died over while replacing it is put back, as
            every run does. Otherwise nothing is changed.
        several: several workers carry it out.
        limit: workers and memory.
        progress: told the bytes of each block compared with such a target.

    Returns:
        The plan, with everything that stands against it there added to its refusals.
    """
    asked = target, overwrite, resume
    if isinstance(prepared, Cleared):
        if prepared.asked == asked:
            return prepared
        raise ValueError(f"this plan is cleared for {prepared.asked}, not for {asked}")
    limit = (limit or limits()).with_min_block(prepared.plan.band)
    problems = list(prepared.plan.refusals)

    def found(step: Callable[[], None]) -> bool:
        try:
            step()
        except TransaxleError as error:
            problems.extend(error.refusals)
            return True
        return False

    if limit.is_explicit and limit.min_memory(prepared.plan.band) > limit.memory:
        message = f"encoding the largest tensor needs {limit.min_memory(prepared.plan.band):,} bytes of buffers"
        hint = f"Allow more than the {limit.memory:,} bytes of --memory (memory=), or omit that option."
        problems.append(Refusal("UNSUPPORTED", message, Where(), hint))
    task = task_of(prepared, problems)
    problems += _damages(prepared, target)
    if running and not problems:
        hold_source(prepared)
    errors: dict[str, Error] = {}
    finished = False

    def is_done() -> bool:
        if not resume or overwrite or problems:
            return False
        from transaxle.engine.read_back import is_finished

        return is_finished(prepared, target, limit, progress, errors)

    def look() -> None:
        nonlocal finished
        begin = shared_staging_at if several or takes_parts(target) else staging_at
        finished = _looked(prepared, task, asked, begin, is_done, running=running)

    if not target or not found(lambda: refuse_together(prepared.checkpoint, target)):
        found(look)
    plan = msgspec.structs.replace(prepared.plan, refusals=tuple(dict.fromkeys(problems)))
    return Cleared(plan, prepared.checkpoint, prepared.draft, asked, task, finished, errors)


def _looked(
    prepared: Prepared,
    task: Task,
    asked: tuple[str, Overwrite, bool],
    begin: Callable[..., Stage],
    is_done: Callable[[], bool],
    *,
    running: bool,
) -> bool:
    """Refuse what a run would meet at a place before it writes there; tell whether there is nothing left to do.

    Args:
        prepared: the plan.
        task: what a journal of it belongs to.
        asked: target, whether it may be replaced, and whether an interrupted run is continued.
        begin: starts a checkpoint there.
        is_done: reads the target, and tells whether it is complete.
        running: as for `preflight`.
    """
    target, overwrite, resume = asked
    in_parts = takes_parts(target)
    if not in_parts and is_done():
        return True
    staging = begin(target, overwrite=overwrite, resume=resume)
    if running and not overwrite and isinstance(staging, Staging) and staging.moved_aside:
        with staging:  # puts back what was there, and is refused
            pass
    try:
        staging.look(prepared.plan.files, prepared.draft.files)
    except UsageError:
        if in_parts and is_done():  # it is not read before: what a dead commit has let appear is known by its tags
            return True
        raise
    if resume and isinstance(staging, Staging):
        refuse_other_task(staging.scratch, task, shown(target))
    return False


def _damages(prepared: Prepared, target: str) -> Iterator[Refusal]:
    """Yield what is wrong, by their own hashes, with the files of a source and of an adapter that is merged into it."""
    checkpoint = prepared.checkpoint
    storage = checkpoint.container.storage
    carries = not (target and is_one_file(target))
    yield from problems_of(storage, carries=carries, config_given=checkpoint.settings.config is not None)
    adapter = checkpoint.container.recoding.adapter
    if adapter is not None:
        yield from problems_of(adapter.storage, carries=False, config_given=True)


def hold_source(prepared: Prepared) -> None:
    """Begin to hold what is read of a source, and of an adapter that is merged into it, against their own hashes.

    Raises:
        TransaxleError: as `hold`.
    """
    storage = prepared.checkpoint.container.storage
    hold(storage)
    adapter = prepared.checkpoint.container.recoding.adapter
    if adapter is not None:
        hold(adapter.storage)


def task_of(prepared: Prepared, problems: list[Refusal]) -> Task:
    """Return what a journal would belong to; files of the source that cannot be opened are added to the problems."""
    plan, storage = prepared.plan, prepared.checkpoint.container.storage
    state = state_of(storage, source_files(prepared), problems)
    adapter = prepared.checkpoint.container.recoding.adapter
    if adapter is not None:
        state = digest((state + state_of(adapter.storage, (*adapter.files, ADAPTER_CONFIG), problems)).encode())
    what = msgspec.json.encode(msgspec.structs.replace(plan, refusals=(), source=""))
    return Task(f"{plan.format}:{plan.dialect}", plan.source, state, digest(what))


def source_files(prepared: Prepared) -> tuple[str, ...]:
    """Return the files of the source that what is made of it depends on."""
    return (*prepared.checkpoint.container.files, *prepared.plan.carried)


def state_of(storage: Storage, files: Iterable[str], problems: list[Refusal]) -> str:
    """Return the hash of the state of files; those that cannot be opened are added to the problems."""
    lines = []
    for name in files:
        try:
            lines.append(f"{name} {storage.version(name)}\n")
        except TransaxleError as error:
            problems.extend(error.refusals)
    return digest("".join(lines).encode())


def refuse_together(checkpoint: Checkpoint, target: str) -> None:
    """Refuse a target that is the source, or an adapter that is merged into it, lies in one of them or around it, or
    holds a file that was named beside them.

    Args:
        checkpoint: the source.
        target: path or URL, as typed.

    Raises:
        UsageError: EXISTS, with every reason.
    """
    found = list(dict.fromkeys(_reasons(checkpoint, target)))
    if found:
        raise gathered(Refusal("EXISTS", reason, Where(target), hint) for reason, hint in found)


def _reasons(checkpoint: Checkpoint, target: str) -> Iterator[tuple[str, str]]:
    container = checkpoint.container
    yield from _meeting("source", checkpoint.path, container, target)
    adapter = container.recoding.adapter
    if adapter is not None:
        yield from _meeting("adapter", adapter.path, adapter, target)
    there = _here(target)
    if there is not None:
        target_path = Path(os.path.realpath(there))
        for name in checkpoint.settings.files:
            if target_path in (named := Path(os.path.realpath(name)), *named.parents):
                yield f"the target contains {name}, which would be deleted", _WITHOUT


def _meeting(what: str, path: str, container: Container, target: str) -> Iterator[tuple[str, str]]:
    """Yield why a target is not apart from what is read, each with what to do.

    Args:
        what: what it is called, `source` or `adapter`.
        path: its path or URL, as typed.
        container: its files.
        target: path or URL, as typed.
    """
    here, there = _here(path), _here(target)
    if here is None or there is None:
        if here is there:
            yield from _remote(what, path, target)
        return
    target_path, path_read = Path(os.path.realpath(there)), Path(os.path.realpath(here))
    if _same(path_read, target_path):
        yield f"the target is the {what} {path} itself, which is never changed", _HINT
    elif path_read.is_dir() and any(_same(path_read, above) for above in target_path.parents):
        yield f"the target lies inside the {what} {path}, which is never changed", _BESIDE
    elif any(_same(target_path, above) for above in path_read.parents):
        yield f"the target contains the {what} {path}, which would be deleted", _WITHOUT
    else:
        yield from _files(what, container, path_read, target_path)


def _files(what: str, container: Container, path: Path, target: Path) -> Iterator[tuple[str, str]]:
    """Yield a reason for the first file of what is read that the target holds through a link."""
    folder = path if path.is_dir() else path.parent
    for name in (*container.files, *container.carried):
        file = Path(os.path.realpath(folder / name))
        if _same(target, file) or target in file.parents:
            yield f"the {what}'s {name} is a link to {file}, which would be replaced", _WITHOUT
            return


def _remote(what: str, path: str, target: str) -> Iterator[tuple[str, str]]:
    here, there = address(path), address(target)
    if here == there:
        yield f"the target is the {what} {path} itself, which is never changed", _HINT
    elif there.startswith(f"{here}/"):
        yield f"the target lies inside the {what} {path}, which is never changed", _BESIDE
    elif here.startswith(f"{there}/"):
        yield f"the target contains the {what} {path}, which would be deleted", _WITHOUT


def _here(path: str) -> str | None:
    """Return where a path leads on this machine; None for another one's."""
    return local_path(path) if is_url(path) else path


def _same(one: Path, other: Path) -> bool:
    """Tell whether two paths lead to one file or folder, also where their names do not show it."""
    try:
        return one == other or one.samefile(other)
    except OSError:
        return False


def execute(
    prepared: Prepared,
    target: str,
    *,
    overwrite: Overwrite = False,
    resume: bool = False,
    sync: bool = True,
    limit: Limits | None = None,
    progress: Progress = no_progress,
    times: FileTimes | None = None,
) -> Report:
    """Carry a plan out.

    Args:
        prepared: from `make_plan`, or from `preflight` for just this target.
        target: folder, or one file (`.safetensors`, `.bin`, `.pt`, `.pth`); it must not exist unless `overwrite`.
        overwrite: replace a checkpoint; the old one stays readable until the new one is complete. `everything`: with
            whatever else lies in its folder.
        resume: continue an interrupted run of the same plan; a target that is just what it would write is left alone.
        sync: make everything durable before the rename.
        limit: workers and memory.
        progress: told the bytes of each block written.
        times: notes when the tensors of each file are written.

    Raises:
        TransaxleError: every refusal of the plan, before anything is written; UNEQUAL_COPIES where copies differ;
            CORRUPT where the source was changed meanwhile; EXISTS, IO, NO_SPACE. Whatever is raised, the target is as
            it was.
    """
    begin = time.monotonic()
    cleared = preflight(
        prepared, target, overwrite=overwrite, resume=resume, running=True, limit=limit, progress=progress
    )
    plan, container = ready(cleared), prepared.checkpoint.container
    storage, recoding = container.storage, container.recoding
    limit, part = (limit or limits()).with_min_block(plan.band), whole(plan)
    if cleared.finished:
        measured = prove(Share(measures=part.measures), storage, recoding, limit, allow_lossy=plan.allow_lossy)
        storage.recheck()
        resumed, changed = len(plan.tensors), recoded(prepared, cleared.errors, measured)
        single = is_one_file(target) if takes_parts(target) else not Path(target).is_dir()
        left = sweep_beside(target)
    else:
        measured = prove(part, storage, recoding, limit, allow_lossy=plan.allow_lossy)
        with staging_at(target, overwrite=overwrite, resume=resume, sync=sync) as staging:
            single = staging.single is not None
            resumed, changed = _write(cleared, staging, limit, progress, measured, times)
            with span("commit"):
                staging.commit()
            left = staging.found
    report = reported(prepared, target, single=single, resumed=resumed, recoded=changed, leftovers=left, synced=sync)
    return replace(report, seconds=time.monotonic() - begin)


def _write(
    prepared: Cleared, staging: Stage, limit: Limits, progress: Progress, measured: Errors, times: FileTimes | None
) -> tuple[int, tuple[MeasuredTensor, ...]]:
    """Write everything but the commit; return how many tensors an earlier run had finished, and the changed ones.

    Args:
        prepared: the plan.
        staging: where to.
        limit: workers and memory.
        progress: called with the bytes of each block written.
        measured: the errors of decoded, cast and merged tensors.
        times: notes when tensors are written.
    """
    plan, storage = prepared.plan, prepared.checkpoint.container.storage
    refuse_other_task(staging.scratch, prepared.task, shown(prepared.asked[0]))
    with span("create files"):
        kept = staging.prepare(prepared.draft.files if staging.single is not None else plan.files)

    write_fragments(staging, prepared.draft.early())
    journal = Journal(staging.scratch, prepared.task)
    try:
        tensors = _still_there(staging, plan, united(plan, journal.finished), kept)
        resumed, todo = len(tensors), [tensor for tensor in plan.tensors if tensor.name not in tensors]
        if tensors:
            _expect(prepared, [tensor for tensor in plan.tensors if tensor.name in tensors], tensors)
        progress(sum(tensor.nbytes for tensor in plan.tensors) - sum(tensor.nbytes for tensor in todo))
        foretold: dict[str, str] | None = None
        if staging.ordered and prepared.draft.sealed_first:  # a stream cannot go back: everything is read twice
            read = tensors | carry(todo, storage, None, limit)
            foretold = {name: done.hash for name, done in read.items()}
            write_fragments(staging, prepared.draft.late(foretold))
        files = staging if times is None else times.watching(staging)
        tensors |= carry(todo, storage, files, limit, record=journal.add, progress=progress)
    finally:
        journal.close()
    return resumed, seal(prepared, staging, limit, tensors, measured, foretold)


def united(plan: Plan, finished: Mapping[str, FinishedTensor]) -> dict[str, FinishedTensor]:
    """Return the tensors of a plan that are finished, where workers may have finished spans of them."""
    if not finished:
        return {}
    tensors = {}
    for tensor in plan.tensors:
        if tensor.name in finished:
            tensors[tensor.name] = finished[tensor.name]
        elif all(each.name in finished for each in plan.spans.get(tensor.name, (tensor,))):
            tensors[tensor.name] = FinishedTensor(
                join_hashes([finished[each.name].hash for each in plan.spans[tensor.name]])
            )
    return tensors


def _expect(prepared: Prepared, tensors: list[PlannedTensor], finished: Mapping[str, FinishedTensor]) -> None:
    """Let the checksums and hashes of what an earlier run has read be checked too: what it summed of them is lost."""
    container = prepared.checkpoint.container
    believe(tensors, finished, container.storage)
    witness = layer(container.storage, Witness)
    if witness is None:
        return
    for transfer in (transfer for tensor in tensors for transfer in tensor.transfers):
        if transfer.file in container.files:
            witness.expect(transfer.file, transfer.source, transfer.source_span)
        else:  # made of others, which are not known here
            for each in container.checksums:
                witness.expect(each.file, each.offset, each.size)


def _still_there(
    staging: Stage, plan: Plan, recorded: Mapping[str, FinishedTensor], kept: frozenset[str]
) -> dict[str, FinishedTensor]:
    """Return the recorded tensors whose bytes in the unfinished files still have the recorded hash."""
    if not recorded:
        return {}
    storage = LocalStorage(staging.path)
    try:
        return {
            tensor.name: recorded[tensor.name]
            for tensor in plan.tensors
            if tensor.name in recorded
            and not tensor.copies  # nothing says that these are complete as well
            and kept.issuperset(place.file for place in tensor.places)
            and digest_in(storage, tensor.places) == recorded[tensor.name].hash
        }
    finally:
        storage.close()


class FileTime(msgspec.Struct, frozen=True):
    """When one file was written, in seconds since the first byte of all."""

    first: float
    """When its first bytes were given to the system."""
    last: float
    """When its last bytes had been."""
    bytes: int
    """How many were written."""


class FileTimes:
    """Notes when the bytes of files are written, by several threads."""

    def __init__(self) -> None:
        self.files: dict[str, FileTime] = {}
        """File -> when it was written."""
        self._begin: float | None = None
        self._lock = threading.Lock()

    def watching(self, files: Writable) -> Writable:
        """Return the same files; what is written into them is noted here."""
        return (_WatchedInBatches if hasattr(files, "add_write") else _Watched)(files, self)

    def add(self, file: str, first: float, last: float, count: int) -> None:
        """Note that bytes of a file were written between two moments."""
        with self._lock:
            begin = self._begin = first if self._begin is None else min(self._begin, first)
            known = self.files.get(file)
            first, last = max(first - begin, 0.0), last - begin
            if known is not None:
                first, last, count = min(known.first, first), max(known.last, last), known.bytes + count
            self.files[file] = FileTime(first, last, count)


class _Watched:
    """Files that note when they are written."""

    def __init__(self, files: Writable, times: FileTimes) -> None:
        self._files = files
        self._times = times
        self.ordered = getattr(files, "ordered", False)

    def pwrite(self, file: str, offset: int, view: memoryview) -> None:
        """See `Writable`."""
        begin = time.monotonic()
        self._files.pwrite(file, offset, view)
        self._times.add(file, begin, time.monotonic(), len(view))


class _WatchedInBatches(_Watched):
    """Files that note when they are written, in lists of steps too."""

    def add_write(self, steps: Steps, file: str, offset: int, view: memoryview) -> None:
        """See `StepWritable`."""
        begin, size = time.monotonic(), len(view)
        cast("StepWritable", self._files).add_write(steps, file, offset, view)
        steps.then(lambda: self._times.add(file, begin, time.monotonic(), size))
