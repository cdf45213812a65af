"""A plan carried out by this process: in one share, with a journal, committed whole or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from transaxle.arguments import Overwrite
from transaxle.encodings.value_steps import Measured
from transaxle.engine.execute.carry import (
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
from transaxle.engine.execute.preflight import Cleared, preflight
from transaxle.engine.plan.conversion import Prepared, ready
from transaxle.engine.plan.planned import Plan, PlannedTensor
from transaxle.formats.checksums import Witness
from transaxle.formats.registry import is_one_file
from transaxle.formats.staging.leftovers import sweep_beside
from transaxle.formats.staging.location import shown, staging_at, takes_parts
from transaxle.formats.storage.compiled import StepBatch
from transaxle.formats.storage.local import LocalStorage
from transaxle.formats.storage.storage import layer
from transaxle.move.endpoint import NotingWritable, Writable
from transaxle.move.hashing import digest_in, joined
from transaxle.move.journal import Done, Journal, refuse_other
from transaxle.move.workers import Limits, Progress, limits, unwatched
from transaxle.spans import span

if TYPE_CHECKING:
    from transaxle.formats.staging.location import Stage


def execute(
    prepared: Prepared,
    target: str,
    *,
    overwrite: Overwrite = False,
    resume: bool = False,
    sync: bool = True,
    limit: Limits | None = None,
    progress: Progress = unwatched,
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
    limit, part = (limit or limits()).holding(plan.band), whole(plan)
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
) -> tuple[int, tuple[Measured, ...]]:
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
    refuse_other(staging.scratch, prepared.task, shown(prepared.asked[0]))
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


def united(plan: Plan, finished: Mapping[str, Done]) -> dict[str, Done]:
    """Return the tensors of a plan that are finished, where workers may have finished spans of them."""
    if not finished:
        return {}
    tensors = {}
    for tensor in plan.tensors:
        if tensor.name in finished:
            tensors[tensor.name] = finished[tensor.name]
        elif all(each.name in finished for each in plan.spans.get(tensor.name, (tensor,))):
            tensors[tensor.name] = Done(joined([finished[each.name].hash for each in plan.spans[tensor.name]]))
    return tensors


def _expect(prepared: Prepared, tensors: list[PlannedTensor], finished: Mapping[str, Done]) -> None:
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


def _still_there(staging: Stage, plan: Plan, recorded: Mapping[str, Done], kept: frozenset[str]) -> dict[str, Done]:
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
        return (_WatchedInBatches if hasattr(files, "note_write") else _Watched)(files, self)

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
    """Files that note when they are written, in batches too."""

    def note_write(self, batch: StepBatch, file: str, offset: int, view: memoryview) -> None:
        """See `NotingWritable`."""
        begin, size = time.monotonic(), len(view)
        cast("NotingWritable", self._files).note_write(batch, file, offset, view)
        batch.then(lambda: self._times.add(file, begin, time.monotonic(), size))
