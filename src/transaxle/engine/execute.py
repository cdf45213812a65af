"""Executing a plan in this process: all checks come before any writing, so that the target is either complete or
unchanged.

A valid plan may still be impossible to execute because of the source's files or the target's path. The commands `plan`
and `convert` make the same checks, so that `plan` reports every refusal of `convert`; the checks change nothing on
disk.

Source and target must be separate, by whatever path they are reached. If a conversion replaced its source, the result
would be the only copy, even if it is incomplete. If the target were inside the source, or contained it, the conversion
would change or delete the files that it reads.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from transaxle.arguments import Overwrite
from transaxle.encodings.encoding import Error
from transaxle.encodings.value_steps import MeasuredTensor
from transaxle.engine.carry import (
    Errors,
    PlanPart,
    Report,
    carry,
    check_finished,
    make_report,
    prove,
    recheck,
    seal,
    value_errors,
    whole_plan,
    write_fragments,
)
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint.settings import CONFIG
from transaxle.engine.checkpoint.source_hashes import containers_of, problems_of, watch_hashes
from transaxle.engine.plan.conversion import Prepared, require_ready
from transaxle.engine.plan.planned import Plan, PlannedTensor
from transaxle.errors import Refusal, TransaxleError, UsageError, Where, gathered
from transaxle.formats.catalog import Container
from transaxle.formats.checksums import Witness
from transaxle.formats.detect import open_container
from transaxle.formats.registry import ADAPTER_CONFIG, is_one_file
from transaxle.formats.storage.copier import Steps
from transaxle.formats.storage.local import LocalStorage
from transaxle.formats.storage.storage import Storage, close, is_url, layer
from transaxle.formats.store.leftovers import clean_target
from transaxle.formats.store.service import address, local_path
from transaxle.formats.store.staging import Staging, display_path, shared_staging_at, staging_at, takes_parts
from transaxle.move.journal import FinishedTensor, Journal, Task, digest, digest_in, join_hashes, refuse_other_task
from transaxle.move.transfer import StepWritable, Writable
from transaxle.move.workers import Limits, Progress, limits, no_progress
from transaxle.spans import span, stage

if TYPE_CHECKING:
    from transaxle.formats.store.staging import Stage


_HINT = "Choose another target; once the new checkpoint is verified, you can remove the old one."
_BESIDE = "Choose a target outside of the source, such as a folder beside it."
_WITHOUT = "Choose a target that does not contain the source, such as a new folder."


@contextmanager
def explain_swapped(source: object, target: object) -> Iterator[None]:
    """Extend the error for a missing or empty source if the target is a checkpoint, because the user may have swapped
    the two.

    Args:
        source: path of the source as the user typed it; an argument that is not a path is ignored.
        target: path of the target as the user typed it; an argument that is not a path is ignored.
    """
    try:
        yield
    except TransaxleError as error:
        paths = [os.fspath(path) for path in (source, target) if isinstance(path, str | os.PathLike)]
        if len(paths) < 2 or is_url(paths[0]) or not _is_empty(paths[0]) or not _has_checkpoint(paths[1]):
            raise
        first, *others = error.refusals
        order_hint = f"The source comes first, then the target; here the target, {paths[1]}, holds a checkpoint."
        raise gathered([replace(first, hint=f"{first.hint} {order_hint}".strip()), *others]) from error


def _is_empty(path: str) -> bool:
    """Return whether a path does not exist, or is an empty folder."""
    try:
        return next(Path(path).iterdir(), None) is None
    except FileNotFoundError:
        return True
    except (OSError, ValueError):  # a ValueError means that no file system accepts the path
        return False


def _has_checkpoint(path: str) -> bool:
    try:
        close(open_container(path).storage)
    except TransaxleError:
        return False
    return True


class CheckedPlan(Prepared, frozen=True, kw_only=True):
    """A plan that was checked for one target; its refusals are all refusals that a run would raise before it writes."""

    request: tuple[str, Overwrite, bool]
    """The request that was checked: (path of the target, whether the target may be replaced, whether to continue an
    interrupted run).
    """
    task: Task
    """Identity of the task (this conversion of this source), as the journal records it."""
    finished: bool = False
    """Whether the target already has exactly the planned content, so that nothing remains to be done."""
    errors: Mapping[str, Error] = msgspec.field(default_factory=dict)
    """Name of an encoded tensor -> its rounding error, if the target is finished."""


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
) -> CheckedPlan:
    """Check whether a plan can be executed for a given target.

    The content of an existing target is read only with `resume`, because an interrupted run may have finished the
    target.

    Args:
        prepared: the plan, as returned by `make_plan`.
        target: path of a folder or a single file, or a URL.
        overwrite: whether to replace an existing checkpoint, as for `execute`.
        resume: whether to continue an interrupted run, as for `execute`.
        running: whether the plan is about to be executed. If `running` is True, a checkpoint that a killed run was
            replacing is restored, as in every run. If `running` is False, the check changes nothing on disk.
        several: whether several workers will execute the plan.
        limit: number of worker threads, and memory of their buffers.
        progress: function called with the number of bytes of each compared block of an existing target.

    Returns:
        The plan; all refusals for this target are added to the plan's own refusals.
    """
    request = target, overwrite, resume
    if isinstance(prepared, CheckedPlan):
        if prepared.request == request:
            return prepared
        raise ValueError(f"this plan is cleared for {prepared.request}, not for {request}")
    limit = (limit or limits()).with_min_block(prepared.plan.band)
    task, problems = check_source(prepared, target, limit)

    def found(step: Callable[[], None]) -> bool:
        try:
            step()
        except TransaxleError as error:
            problems.extend(error.refusals)
            return True
        return False

    if running and not problems:
        watch_source(prepared)
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
        finished = _check_place(prepared, task, request, begin, is_done, running=running)

    if not target or not found(lambda: refuse_overlap(prepared.checkpoint, target)):
        found(look)
    plan = msgspec.structs.replace(prepared.plan, refusals=tuple(dict.fromkeys(problems)))
    return CheckedPlan(
        plan, prepared.checkpoint, prepared.draft, prepared.check_source,
        request=request, task=task, finished=finished, errors=errors,
    )  # fmt: skip


def check_source(prepared: Prepared, target: str, limit: Limits) -> tuple[Task, list[Refusal]]:
    """Return the identity of a conversion, and all refusals that do not depend on what is at the target.

    Args:
        prepared: the plan, as returned by `make_plan`.
        target: path or URL of the target; empty for a folder that is not written.
        limit: number of worker threads, and memory of their buffers.
    """
    band, problems = prepared.plan.band, list(prepared.plan.refusals)
    if limit.is_explicit and limit.min_memory(band) > limit.memory:
        message = f"encoding the largest tensor needs {limit.min_memory(band):,} bytes of buffers"
        hint = f"Allow more than the {limit.memory:,} bytes of --memory (memory=), or omit that option."
        problems.append(Refusal("UNSUPPORTED", message, Where(), hint))
    task = task_of(prepared, problems)
    problems += _damage(prepared, target) if prepared.check_source else ()
    return task, problems


def _check_place(
    prepared: Prepared,
    task: Task,
    request: tuple[str, Overwrite, bool],
    begin: Callable[..., Stage],
    is_done: Callable[[], bool],
    *,
    running: bool,
) -> bool:
    """Refuse a target path where a run could not write; return whether the target is already finished.

    Args:
        prepared: the plan with its open source and the layout of its target files.
        task: identity of the task, as the journal records it.
        request: path of the target, whether the target may be replaced, and whether to continue an interrupted run.
        begin: function that creates the stage (the unfinished files) for writing at the target path.
        is_done: function that reads the target, and returns whether it is complete.
        running: whether the plan is about to be executed, as for `preflight`.
    """
    target, overwrite, resume = request
    in_parts = takes_parts(target)
    if not in_parts and is_done():
        return True
    staging = begin(target, overwrite=overwrite, resume=resume)
    if running and not overwrite and isinstance(staging, Staging) and staging.moved_aside:
        with staging:  # entering the context restores the old checkpoint; the error is raised below
            pass
    try:
        staging.look(prepared.plan.files, prepared.draft.files)
    except UsageError:
        # `is_done` only reads: it recognises an interrupted commit by the ETags (versions) of the uploaded files
        if in_parts and is_done():
            return True
        raise
    if resume and isinstance(staging, Staging):
        refuse_other_task(staging.scratch, task, display_path(target))
    return False


def _damage(prepared: Prepared, target: str) -> Iterator[Refusal]:
    """Yield a refusal for each file, of the source or of `Recoding.additional`, that does not match its hash."""
    checkpoint = prepared.checkpoint
    storage = checkpoint.container.storage
    carries = not (target and is_one_file(target))
    yield from problems_of(storage, copies_about_use=carries, config_given=checkpoint.settings.config is not None)
    recoding = checkpoint.container.recoding
    for container in recoding.additional.values():
        copies = carries and bool(recoding.grafted_files)
        yield from problems_of(container.storage, copies_about_use=copies, config_given=True)


def watch_source(prepared: Prepared) -> None:
    """Start to check the bytes that are read from the source and from `Recoding.additional` against their hashes,
    unless `check_source` is False.

    Raises:
        TransaxleError: any error that `watch_hashes` raises.
    """
    if not prepared.check_source:
        return
    for container in containers_of(prepared.checkpoint.container):
        watch_hashes(container.storage)


def task_of(prepared: Prepared, problems: list[Refusal]) -> Task:
    """Return the identity of a conversion for its journal; for each source file that cannot be opened, add a refusal to
    `problems`.
    """
    plan, storage = prepared.plan, prepared.checkpoint.container.storage
    state = state_of(storage, source_files(prepared), problems)
    recoding = prepared.checkpoint.container.recoding
    for container in recoding.additional.values():
        names = [name for name in (ADAPTER_CONFIG, CONFIG, *recoding.grafted_files) if name in container.carried]
        state = digest((state + state_of(container.storage, (*container.files, *names), problems)).encode())
    # without paths: the user may type the same path differently, and notes contain paths
    paths: dict[str, Any] = {"source": "", "grafted": {}, "grafted_files": {}, "notes": ()}
    plan_text = msgspec.json.encode(msgspec.structs.replace(plan, refusals=(), **paths))
    return Task(f"{plan.format}:{plan.dialect}", plan.source, state, digest(plan_text))


def source_files(prepared: Prepared) -> tuple[str, ...]:
    """Return the names of the source's files that influence the result."""
    return (*prepared.checkpoint.container.files, *prepared.plan.sidecar_sources)


def state_of(storage: Storage, files: Iterable[str], problems: list[Refusal]) -> str:
    """Return a hash of the versions of the given files; for each file that cannot be opened, add a refusal to
    `problems`.
    """
    lines = []
    for name in files:
        try:
            lines.append(f"{name} {storage.version(name)}\n")
        except TransaxleError as error:
            problems.extend(error.refusals)
    return digest("".join(lines).encode())


def refuse_overlap(checkpoint: Checkpoint, target: str) -> None:
    """Refuse a target that overlaps with files that the conversion reads.

    A target overlaps if it is the source, a merged adapter or the base of a graft, if it is inside or contains one of
    them, or if it contains a config or rules file that the user named.

    Args:
        checkpoint: the source checkpoint.
        target: path or URL of the target, as the user typed it.

    Raises:
        UsageError: with code EXISTS, and every reason, if the target overlaps.
    """
    reasons = list(dict.fromkeys(_reasons(checkpoint, target)))
    if reasons:
        raise gathered(Refusal("EXISTS", reason, Where(target), hint) for reason, hint in reasons)


def _reasons(checkpoint: Checkpoint, target: str) -> Iterator[tuple[str, str]]:
    container = checkpoint.container
    yield from _overlap_reasons("source", checkpoint.path, container, target)
    for role, additional in container.recoding.additional.items():
        yield from _overlap_reasons(role, additional.path, additional, target)
    target_place = _local_place(target)
    if target_place is not None:
        target_path = Path(os.path.realpath(target_place))
        for name in checkpoint.settings.files:
            if target_path in (file_path := Path(os.path.realpath(name)), *file_path.parents):
                yield f"the target contains {name}, which would be deleted", _WITHOUT


def _overlap_reasons(role: str, path: str, container: Container, target: str) -> Iterator[tuple[str, str]]:
    """Yield the reasons why a target overlaps with a source, adapter or base, each with advice for the user.

    Args:
        role: `source`, `adapter` or `base`, the word to use in messages.
        path: path or URL of the checkpoint, as the user typed it.
        container: the files of the checkpoint.
        target: path or URL of the target, as the user typed it.
    """
    source_place, target_place = _local_place(path), _local_place(target)
    if source_place is None or target_place is None:
        if source_place is target_place:
            yield from _remote_overlap_reasons(role, path, target)
        return
    target_path, path_read = Path(os.path.realpath(target_place)), Path(os.path.realpath(source_place))
    if _is_same_place(path_read, target_path):
        yield f"the target is the {role} {path} itself, which is never changed", _HINT
    elif path_read.is_dir() and any(_is_same_place(path_read, above) for above in target_path.parents):
        yield f"the target lies inside the {role} {path}, which is never changed", _BESIDE
    elif any(_is_same_place(target_path, above) for above in path_read.parents):
        yield f"the target contains the {role} {path}, which would be deleted", _WITHOUT
    else:
        yield from _link_reasons(role, container, path_read, target_path)


def _link_reasons(role: str, container: Container, path: Path, target: Path) -> Iterator[tuple[str, str]]:
    """Yield a reason for the first source file that is a link to a file inside the target."""
    folder = path if path.is_dir() else path.parent
    for name in (*container.files, *container.carried):
        file = Path(os.path.realpath(folder / name))
        if _is_same_place(target, file) or target in file.parents:
            yield f"the {role}'s {name} is a link to {file}, which would be replaced", _WITHOUT
            return


def _remote_overlap_reasons(role: str, path: str, target: str) -> Iterator[tuple[str, str]]:
    source_address, target_address = address(path), address(target)
    if source_address == target_address:
        yield f"the target is the {role} {path} itself, which is never changed", _HINT
    elif target_address.startswith(f"{source_address}/"):
        yield f"the target lies inside the {role} {path}, which is never changed", _BESIDE
    elif source_address.startswith(f"{target_address}/"):
        yield f"the target contains the {role} {path}, which would be deleted", _WITHOUT


def _local_place(path: str) -> str | None:
    """Return a local path, or the path in a `file:` URL; return None for a remote URL."""
    return local_path(path) if is_url(path) else path


def _is_same_place(first: Path, second: Path) -> bool:
    """Return whether two paths refer to the same file or folder, even under different names."""
    try:
        return first == second or first.samefile(second)
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
    """Execute a plan and return the report of the conversion.

    Args:
        prepared: the plan, as returned by `make_plan`, or by `preflight` for this target.
        target: path of a folder, or of a single file (`.safetensors`, `.bin`, `.pt`, `.pth`); it must not exist unless
            `overwrite` is given.
        overwrite: whether to replace an existing checkpoint; the old checkpoint remains readable until the new one is
            complete. `everything` means to delete all other files in its folder too.
        resume: whether to continue an interrupted run of the same plan; a target that already has the planned content
            is not changed.
        sync: whether to sync everything to disk before the target gets its final name.
        limit: number of worker threads, and memory of their buffers.
        progress: function called with the number of bytes of each written block.
        times: object that records when the tensors of each file are written.

    Raises:
        TransaxleError: every refusal of the plan, before anything is written; with code UNEQUAL_COPIES, if copies
            differ; with code CORRUPT, if the source was changed meanwhile; with code EXISTS, if the target exists; with
            code IO or NO_SPACE, if a file cannot be read or written. After any error the target is unchanged.
    """
    begin = time.monotonic()
    cleared = preflight(
        prepared, target, overwrite=overwrite, resume=resume, running=True, limit=limit, progress=progress
    )
    plan, container = require_ready(cleared), prepared.checkpoint.container
    storage, recoding, is_checked = container.storage, container.recoding, prepared.check_source
    limit, part = (limit or limits()).with_min_block(plan.band), whole_plan(plan)
    if cleared.finished:
        part = PlanPart(measures=part.measures)
        measured = prove(part, storage, recoding, limit, allow_lossy=plan.allow_lossy, is_checked=is_checked)
        recheck(prepared)
        resumed, changed = len(plan.tensors), value_errors(prepared, cleared.errors, measured)
        single = is_one_file(target) if takes_parts(target) else not Path(target).is_dir()
        leftovers = clean_target(target)
    else:
        measured = prove(part, storage, recoding, limit, allow_lossy=plan.allow_lossy, is_checked=is_checked)
        with staging_at(target, overwrite=overwrite, resume=resume, sync=sync) as staging:
            single = staging.single is not None
            resumed, changed = _write(cleared, staging, limit, progress, measured, times)
            with span("commit"):
                staging.commit()
            leftovers = staging.found
    report = make_report(
        prepared, target, single=single, resumed=resumed, recoded=changed, leftovers=leftovers, synced=sync
    )
    return replace(report, seconds=time.monotonic() - begin)


def _write(
    prepared: CheckedPlan, staging: Stage, limit: Limits, progress: Progress, measured: Errors, times: FileTimes | None
) -> tuple[int, tuple[MeasuredTensor, ...]]:
    """Write all files before the commit; return how many tensors an earlier run had finished, and the errors of changed
    values.

    Args:
        prepared: the checked plan.
        staging: the staged (unfinished) files to write.
        limit: number of worker threads, and memory of their buffers.
        progress: function called with the number of bytes of each written block.
        measured: errors of decoded, cast and merged tensors.
        times: object that records when tensors are written.
    """
    plan, storage = prepared.plan, prepared.checkpoint.container.storage
    refuse_other_task(staging.scratch, prepared.task, display_path(prepared.request[0]))
    with span("create files"):
        reusable_files = staging.prepare(prepared.draft.files if staging.single is not None else plan.files)

    write_fragments(staging, prepared.draft.early_fragments())
    journal = Journal(staging.scratch, prepared.task)
    try:
        tensors = _intact_tensors(staging, plan, join_spans(plan, journal.finished), reusable_files)
        resumed, remaining = len(tensors), [tensor for tensor in plan.tensors if tensor.name not in tensors]
        if tensors and prepared.check_source:
            _check_reads_of(prepared, [tensor for tensor in plan.tensors if tensor.name in tensors], tensors)
        progress(sum(tensor.nbytes for tensor in plan.tensors) - sum(tensor.nbytes for tensor in remaining))
        foretold: dict[str, str] | None = None
        # The hashes precede the tensors, and a stream cannot be rewound: the tensors are first read only to hash them.
        if staging.ordered and prepared.draft.has_leading_digests:
            read_tensors = tensors | carry(remaining, storage, None, limit)
            foretold = {name: done.hash for name, done in read_tensors.items()}
            write_fragments(staging, prepared.draft.late_fragments(foretold))
        files = staging if times is None else times.wrap(staging)
        tensors |= carry(remaining, storage, files, limit, record=journal.add, progress=progress)
    finally:
        journal.close()
    return resumed, seal(prepared, staging, limit, tensors, measured, foretold)


def join_spans(plan: Plan, finished: Mapping[str, FinishedTensor]) -> dict[str, FinishedTensor]:
    """Return the finished tensors of a plan, including each tensor whose spans have all been finished, possibly by
    several workers.
    """
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


def _check_reads_of(prepared: Prepared, tensors: list[PlannedTensor], finished: Mapping[str, FinishedTensor]) -> None:
    """Tell the checks of the source which bytes an earlier run has already read, so that checksums and hashes of these
    bytes are checked too.
    """
    container = prepared.checkpoint.container
    check_finished(tensors, finished, container.storage)
    witness = layer(container.storage, Witness)
    if witness is None:
        return
    for transfer in (transfer for tensor in tensors for transfer in tensor.transfers):
        if transfer.file in container.files:
            witness.mark_read(transfer.file, transfer.source, transfer.source_span)
        else:  # a virtual file may have read any byte range of the stored files
            for checksum in container.checksums:
                witness.mark_read(checksum.file, checksum.offset, checksum.size)


def _intact_tensors(
    staging: Stage, plan: Plan, recorded: Mapping[str, FinishedTensor], reusable_files: frozenset[str]
) -> dict[str, FinishedTensor]:
    """Return the tensors in the journal whose bytes in the unfinished files still match the recorded hash."""
    if not recorded:
        return {}
    storage = LocalStorage(staging.path)
    try:
        return {
            tensor.name: recorded[tensor.name]
            for tensor in plan.tensors
            if tensor.name in recorded
            and not tensor.copies  # the copies of a tensor in other files may be incomplete
            and reusable_files.issuperset(place.file for place in tensor.places)
            and digest_in(storage, tensor.places) == recorded[tensor.name].hash
        }
    finally:
        storage.close()


class FileTime(msgspec.Struct, frozen=True):
    """The times at which one file was written, in seconds since the first byte of any file was written."""

    first: float
    """Time at which the first write to the file began, in seconds."""
    last: float
    """Time at which the last write to the file ended, in seconds."""
    bytes: int
    """Number of bytes written to the file."""


class FileTimes:
    """Records when several threads write the bytes of each file."""

    def __init__(self) -> None:
        self.files: dict[str, FileTime] = {}
        """File name -> when the file was written."""
        self._begin: float | None = None
        self._lock = threading.Lock()

    def wrap(self, files: Writable) -> Writable:
        """Return a wrapper around files, which records every write in this object."""
        return (_TimedFilesInBatches if hasattr(files, "note_write") else _TimedFiles)(files, self)

    def add(self, file: str, first: float, last: float, count: int) -> None:
        """Record that bytes of a file were written between two times."""
        with self._lock:
            begin = self._begin = first if self._begin is None else min(self._begin, first)
            earlier = self.files.get(file)
            first, last = max(first - begin, 0.0), last - begin
            if earlier is not None:
                first, last, count = min(earlier.first, first), max(earlier.last, last), earlier.bytes + count
            self.files[file] = FileTime(first, last, count)


class _TimedFiles:
    """A wrapper around files that records when each write happens."""

    def __init__(self, files: Writable, times: FileTimes) -> None:
        self._files = files
        self._times = times
        self.ordered = getattr(files, "ordered", False)

    def pwrite(self, file: str, offset: int, view: memoryview) -> None:
        """Write bytes and record the time; see `Writable.pwrite`."""
        begin = time.monotonic()
        self._files.pwrite(file, offset, view)
        self._times.add(file, begin, time.monotonic(), len(view))


class _TimedFilesInBatches(_TimedFiles):
    """A wrapper around files that also records writes that are queued in lists of steps."""

    def add_write(self, steps: Steps, file: str, offset: int, view: memoryview) -> None:
        """Queue a write and record its time; see `StepWritable.add_write`."""
        begin, size = time.monotonic(), len(view)
        cast("StepWritable", self._files).add_write(steps, file, offset, view)
        steps.then(lambda: self._times.add(file, begin, time.monotonic(), size))
