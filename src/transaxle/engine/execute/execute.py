"""Execution: carries a plan out, and commits the result whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from transaxle.encodings.arithmetic.codec import Error
from transaxle.engine.checkpoint.manifest import encode
from transaxle.engine.copying.duplicate_checks import unequal
from transaxle.engine.copying.replica_mean import averages_of
from transaxle.engine.execute.journal import Done, Journal, refuse_other
from transaxle.engine.execute.preflight import Cleared, preflight
from transaxle.engine.execute.resume_check import manifest_of
from transaxle.engine.execute.tensor_stream import Sizes, Summed, decoding_errors, made, measured_sizes
from transaxle.engine.execute.work_items import in_turn, portions
from transaxle.engine.plan.conversion import Plan, PlannedTensor, Prepared, ready
from transaxle.engine.plan.output_tensors import Measured
from transaxle.engine.views.cast import casting_errors, casts_of, refuse_infinite
from transaxle.errors import gathered
from transaxle.formats.catalog.catalog import Fragment
from transaxle.formats.catalog.checksums import witness_of
from transaxle.formats.catalog.sidecar_files import MANIFEST
from transaxle.formats.remote.url import shown
from transaxle.formats.staging.belongings import Overwrite
from transaxle.formats.staging.leftovers import swept
from transaxle.formats.staging.location import Stage, staging_at
from transaxle.formats.storage.local import LocalStorage
from transaxle.move.transfer import landing
from transaxle.move.workers import Limits, Progress, Worker, limits, share, unwatched

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Report:
    """What a conversion did."""

    path: str
    """Where the checkpoint is, as typed."""
    format: str
    """Its container format."""
    dialect: str
    """Its dialect."""
    tensors: int
    """Tensors written."""
    bytes_read: int
    """Bytes of source tensors read for them."""
    bytes_written: int
    """Bytes of all files."""
    seconds: float
    """Wall time."""
    checks: int
    """Copies that proved equal."""
    resumed: int
    """Tensors that an earlier run had finished."""
    synced: bool
    """Whether everything was made durable before the rename."""
    kept: tuple[str, ...]
    """Tensors without a line in the target dialect: under their own names."""
    ignored: tuple[str, ...]
    """Source tensors and files left behind."""
    carried: tuple[str, ...]
    """Files copied beside the tensors."""
    recoded: tuple[Measured, ...] = ()
    """Tensors that were decoded or encoded, with how far their values moved."""
    stayed: tuple[str, ...] = ()
    """Plain source tensors that kept their type where others were cast."""
    counted: Mapping[str, int] = field(default_factory=dict)
    """Axes in names whose size nothing says -> how many the names showed."""
    leftovers: tuple[str, ...] = ()
    """What a killed run had left beside the target, and what became of it."""

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        data = asdict(replace(self, recoded=()))
        data["recoded"] = [each.as_json() for each in self.recoded]
        return {key: list(value) if isinstance(value, tuple) else value for key, value in data.items()}


def execute(
    prepared: Prepared,
    target: str,
    *,
    overwrite: Overwrite = False,
    resume: bool = False,
    sync: bool = True,
    limit: Limits | None = None,
    progress: Progress = unwatched,
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

    Raises:
        TransaxleError: every refusal of the plan, before anything is written; UNEQUAL_COPIES where copies differ;
            CORRUPT where the source was changed meanwhile; EXISTS, IO, NO_SPACE. Whatever is raised, the target is as
            it was.
    """
    begin = time.monotonic()
    cleared = preflight(
        prepared, target, overwrite=overwrite, resume=resume, running=True, limit=limit, progress=progress
    )
    plan = ready(cleared)
    limit = (limit or limits()).holding(plan.band)
    casts = _casts(prepared, limit)
    errors = dict(cleared.errors)
    if cleared.finished:
        resumed, single = len(plan.tensors), not Path(target).is_dir()
        found = swept(target)
        recoded = _measured(prepared, limit, errors, casts)
    else:
        with staging_at(target, overwrite=overwrite, resume=resume, sync=sync) as staging:
            single = staging.single is not None
            resumed = _write(cleared, staging, limit, progress, errors)
            recoded = _measured(prepared, limit, errors, casts)
            staging.commit()
            found = staging.found
    return Report(
        path=shown(target),
        format=plan.format,
        dialect=plan.dialect,
        tensors=len(plan.tensors),
        bytes_read=plan.bytes_read,
        bytes_written=sum((prepared.draft.files if single else plan.files).values()),
        seconds=time.monotonic() - begin,
        checks=len(plan.checks),
        resumed=resumed,
        synced=sync,
        kept=plan.kept,
        ignored=(*plan.ignored, *plan.carried) if single else plan.ignored,
        carried=() if single else plan.carried,
        recoded=recoded,
        stayed=plan.stayed,
        counted=plan.counted,
        leftovers=found,
    )


def _casts(prepared: Prepared, limit: Limits) -> dict[str, tuple[Error, int]]:
    """Return how far cast tensors are from what they were.

    Raises:
        Refused: LOSSY where values become infinite, unless that is allowed.
    """
    plan, storage = prepared.plan, prepared.checkpoint.container.storage
    found = casting_errors(storage, [each.name for each in plan.recoded if each.action == "cast"], limit)
    if not plan.allow_lossy:
        refuse_infinite(found, str(casts_of(storage).dtype))
    return found


def _measured(
    prepared: Prepared, limit: Limits, encoded: Mapping[str, Error], casts: Mapping[str, tuple[Error, int]]
) -> tuple[Measured, ...]:
    """Return how far each tensor is from what it was; those that are decoded are read once more for it."""
    recoded = prepared.plan.recoded
    names = [each.name for each in recoded if each.action == "decoded"]
    decoded = decoding_errors(prepared.checkpoint.container.storage, names, limit)
    averaged = averages_of(prepared.checkpoint.container.storage)
    cast = {name: error for name, (error, _) in casts.items()}
    found = {"decoded": decoded, "encoded": encoded, "averaged": averaged, "cast": cast}
    infinite = {name: many for name, (_, many) in casts.items()}
    return tuple(
        Measured(each, found[each.action][each.name], infinite.get(each.name, 0) if each.action == "cast" else 0)
        for each in recoded
    )


def _write(prepared: Cleared, staging: Stage, limit: Limits, progress: Progress, errors: dict[str, Error]) -> int:
    """Write everything but the commit; return how many tensors an earlier run had finished.

    Args:
        prepared: the plan.
        staging: where to.
        limit: workers and memory.
        progress: told the bytes of each block written.
        errors: gets how far each tensor is that is encoded, by table name.
    """
    plan, storage = prepared.plan, prepared.checkpoint.container.storage
    single = staging.single is not None
    refuse_other(staging.scratch, prepared.task, shown(prepared.asked[0]))
    kept = staging.prepare(prepared.draft.files if single else plan.files)

    put(staging, prepared.draft.early())
    differing = unequal(plan.checks, storage, limit)
    if differing:
        raise gathered(differing)
    tensors, carried = dict[str, Done](), dict[str, Done]()
    journal = Journal(staging.scratch, prepared.task)
    workers = partial(Worker, storage, limit)
    sizes: Sizes = {}

    def copy(worker: Worker, item: PlannedTensor, progress: Progress) -> Done:
        return _copied(made(worker, item, sizes, measured := Summed()), item, measured, staging, progress)

    def write(worker: Worker, tensor: PlannedTensor) -> None:
        tensors[tensor.name] = copy(worker, tensor, progress)
        journal.add(tensor.name, tensors[tensor.name])

    def foretell(worker: Worker, item: PlannedTensor) -> None:
        blocks = made(worker, item, sizes, measured := Summed())
        tensors[item.name] = _copied(blocks, item, measured, None, unwatched)

    def carry(worker: Worker, file: PlannedTensor) -> None:
        carried[file.name] = copy(worker, file, unwatched)

    try:
        tensors.update(_still_there(staging, plan, journal.finished, kept))
        todo = [tensor for tensor in plan.tensors if tensor.name not in tensors]
        resumed = len(plan.tensors) - len(todo)
        _expect(prepared, [tensor for tensor in plan.tensors if tensor.name in tensors])
        progress(sum(tensor.nbytes for tensor in plan.tensors) - sum(tensor.nbytes for tensor in todo))
        sizes = measured_sizes(todo, limit, workers)
        first = staging.ordered and prepared.draft.sealed_first
        if first:  # a stream cannot go back to them: everything is read twice
            share(todo, limit.jobs, workers, foretell)
            put(staging, _late(prepared, tensors))
        share(portions(todo, ordered=staging.ordered), limit.jobs, workers, in_turn(write))
        share(() if single else plan.carried_files, limit.jobs, workers, carry)
    finally:
        journal.close()
    for tensor in plan.tensors:
        error = tensors[tensor.name].error
        if tensor.codes_of is not None and error is not None:
            errors[tensor.codes_of] = error
    storage.recheck()
    put(staging, () if first else _late(prepared, tensors))
    if not single:
        hashes = ({name: done.hash for name, done in each.items()} for each in (tensors, carried))
        staging.write(MANIFEST, encode(manifest_of(prepared, *hashes)))
    return resumed


def put(staging: Stage, fragments: Iterable[Fragment]) -> None:
    """Write bytes that are known."""
    for fragment in fragments:
        staging.pwrite(fragment.file, fragment.offset, memoryview(fragment.data))


def _late(prepared: Prepared, tensors: Mapping[str, Done]) -> Iterator[Fragment]:
    """Return the bytes that are known when all tensors are."""
    return prepared.draft.late({name: done.hash for name, done in tensors.items()})


def _copied(
    blocks: Iterable[memoryview], item: PlannedTensor, measured: Summed, staging: Stage | None, progress: Progress
) -> Done:
    """Write what a tensor is made of, or only hash it where there is nowhere to write to."""
    hashed = xxhash.xxh3_128()
    for file, offset, part in landing(blocks, item.places):
        if staging is not None:
            staging.pwrite(file, offset, part)
        hashed.update(part)
        progress(len(part))
    return Done(hashed.hexdigest(), measured.error if item.codes_of is not None else None)


def _expect(prepared: Prepared, tensors: Iterable[PlannedTensor]) -> None:
    """Let the checksums of what an earlier run has read be checked too: what it found of them is lost."""
    container = prepared.checkpoint.container
    witness = witness_of(container.storage)
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
    found = {}
    storage = LocalStorage(staging.path)
    try:
        for tensor in plan.tensors:
            if tensor.name in recorded and kept.issuperset(place.file for place in tensor.places):
                hashed = xxhash.xxh3_128()
                for place in tensor.places:
                    for start in range(0, place.width, _BLOCK):
                        size = min(_BLOCK, place.width - start)
                        hashed.update(storage.read(place.file, place.source + start, size))
                if hashed.hexdigest() == recorded[tensor.name].hash:
                    found[tensor.name] = recorded[tensor.name]
    finally:
        storage.close()
    return found
