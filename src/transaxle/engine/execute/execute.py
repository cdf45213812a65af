"""Execution: carries a plan out, and commits the result whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from transaxle.arguments import Overwrite
from transaxle.encodings.error import Error
from transaxle.engine.checkpoint.manifest import HashWitness, against
from transaxle.engine.copying.duplicate_checks import unequal
from transaxle.engine.copying.replica_mean import averages_of
from transaxle.engine.execute.commit import write_known, write_rest
from transaxle.engine.execute.file_times import FileTimes
from transaxle.engine.execute.preflight import Cleared, preflight
from transaxle.engine.execute.tensor_stream import Sizes, decoding_errors, items_of, measured_sizes
from transaxle.engine.number_text import duration, plural, size
from transaxle.engine.plan.conversion import Prepared, ready
from transaxle.engine.plan.planned import Measured, Plan, PlannedTensor
from transaxle.engine.views.cast import CASTING, casting_errors, casts_of, refuse_infinite, refuse_overflow
from transaxle.errors import gathered
from transaxle.formats.checksums import Witness
from transaxle.formats.registry import is_one_file
from transaxle.formats.staging.leftovers import sweep_beside
from transaxle.formats.staging.location import shown, staging_at, takes_parts
from transaxle.formats.storage.local import LocalStorage
from transaxle.formats.storage.storage import Storage, layer
from transaxle.move.endpoint import Writable
from transaxle.move.hashing import WHOLE, HashingFiles, digest_in, joined
from transaxle.move.journal import Done, Journal, refuse_other
from transaxle.move.mover import Movement
from transaxle.move.workers import Limits, Progress, Worker, limits, unwatched
from transaxle.spans import span

if TYPE_CHECKING:
    from transaxle.engine.compare.verification import Verification
    from transaxle.formats.staging.location import Stage


@dataclass(frozen=True, repr=False)
class Report:
    """The result of a conversion."""

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
    """Whether everything was synced to disk before the rename."""
    kept: tuple[str, ...]
    """Tensors without a line in the target dialect: under their own names."""
    ignored: tuple[str, ...]
    """Source tensors and files left behind."""
    carried: tuple[str, ...]
    """Files beside the tensors: copied, or a config that was changed to agree with them, or given."""
    recoded: tuple[Measured, ...] = ()
    """Tensors that were decoded, encoded or cast, with the errors of their values."""
    stayed: tuple[str, ...] = ()
    """Plain source tensors that kept their type where others were cast."""
    counted: Mapping[str, int] = field(default_factory=dict)
    """Axes in names that no config sizes -> the number of indices in the names."""
    leftovers: tuple[str, ...] = ()
    """Leftovers of a killed run beside the target, and what happened to them."""
    notes: tuple[str, ...] = ()
    """What programs that go on with it must be told, or will take for what the source does not say."""
    workers: Mapping[str, int] = field(default_factory=dict)
    """Where several processes carried the plan out: machine and process -> bytes of tensors that it wrote."""
    source: str = ""
    """What was read, as typed; of a hub at the commit."""
    source_against: str = "structure"
    """What the source's bytes were held against: `manifest`; `digests`, which a single file contains; `structure` if it
    has neither: then only checksums of its format tell of damaged data.
    """
    verification: Verification | None = None
    """Where it was asked for: the result against its manifest, with a comparison with the source."""

    def __repr__(self) -> str:
        return f"<report {self}>"

    def __str__(self) -> str:
        """Return what `print` shows: one line."""
        special = {"under their own names": self.kept, "left behind": self.ignored, "with other numbers": self.recoded}
        rest = "".join(f", {len(names):,} {what}" for what, names in special.items() if names)
        return (
            f"{self.path} · {self.format} · {self.dialect} · {plural(self.tensors, 'tensor')}{rest} · "
            f"{size(self.bytes_written)}, {duration(self.seconds)}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        data = asdict(replace(self, recoded=(), verification=None))
        del data["verification"]
        data["recoded"] = [each.as_json() for each in self.recoded]
        if self.verification is not None:
            data["verification"] = replace(self.verification, comparison=None).as_json()
            if self.verification.comparison is not None:
                data["comparison"] = self.verification.comparison.as_json()
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
    plan = ready(cleared)
    limit = (limit or limits()).holding(plan.band)
    casts = _casts(prepared, limit)
    decoded = _decoded(prepared, limit)
    errors = dict(cleared.errors)
    if cleared.finished:
        prepared.checkpoint.container.storage.recheck()
        resumed = len(plan.tensors)
        single = is_one_file(target) if takes_parts(target) else not Path(target).is_dir()
        found = sweep_beside(target)
        recoded = _measured(prepared, errors, decoded, casts)
    else:
        with staging_at(target, overwrite=overwrite, resume=resume, sync=sync) as staging:
            single = staging.single is not None
            resumed = _write(cleared, staging, limit, progress, errors, times)
            recoded = _measured(prepared, errors, decoded, casts)
            with span("commit"):
                staging.commit()
            found = staging.found
    report = reported(prepared, target, single=single, resumed=resumed, recoded=recoded, leftovers=found, synced=sync)
    return replace(report, seconds=time.monotonic() - begin)


def reported(
    prepared: Prepared,
    target: str,
    *,
    single: bool,
    resumed: int,
    recoded: tuple[Measured, ...],
    leftovers: tuple[str, ...],
    synced: bool,
) -> Report:
    """Return what is said of a conversion that is done.

    Args:
        prepared: the plan.
        target: where the checkpoint is, as typed.
        single: it is one file.
        resumed: tensors that an earlier run had finished.
        recoded: tensors whose values changed.
        leftovers: what a killed run had left, and what became of it.
        synced: it was made durable.
    """
    plan = prepared.plan
    return Report(
        path=shown(target),
        format=plan.format,
        dialect=plan.dialect,
        tensors=len(plan.tensors),
        bytes_read=plan.bytes_read,
        bytes_written=sum((prepared.draft.files if single else plan.files).values()),
        seconds=0.0,
        checks=plan.compared,
        resumed=resumed,
        synced=synced,
        kept=plan.kept,
        ignored=(*plan.ignored, *plan.carried) if single else plan.ignored,
        carried=() if single else plan.beside,
        recoded=recoded,
        stayed=plan.stayed,
        notes=plan.notes,
        counted=plan.counted,
        leftovers=leftovers,
        source=plan.source,
        source_against=against(prepared.checkpoint.container),
    )


def _casts(prepared: Prepared, limit: Limits) -> dict[str, tuple[Error, int]]:
    """Return how far cast tensors are from what they were.

    Raises:
        Refused: LOSSY where values become infinite, unless that is allowed.
    """
    plan, storage = prepared.plan, prepared.checkpoint.container.storage
    names = [each.name for each in plan.recoded if each.action in CASTING]
    if not names:
        return {}
    found = casting_errors(storage, names, limit)
    if not plan.allow_lossy:
        refuse_infinite(found, casts_of(storage).dtype)
    return found


def _decoded(prepared: Prepared, limit: Limits) -> dict[str, Error]:
    """Return how far decoded tensors are from the exact products of codes and scales; they are read once for it.

    Raises:
        Refused: LOSSY where values become infinite, unless that is allowed.
    """
    plan = prepared.plan
    names = [each.name for each in plan.recoded if each.action == "decoded"]
    found = decoding_errors(prepared.checkpoint.container.storage, names, limit) if names else {}
    if found and not plan.allow_lossy:
        refuse_overflow(found)
    return found


def _measured(
    prepared: Prepared,
    encoded: Mapping[str, Error],
    decoded: Mapping[str, Error],
    casts: Mapping[str, tuple[Error, int]],
) -> tuple[Measured, ...]:
    """Return how far each tensor is from what it was."""
    recoded = prepared.plan.recoded
    if not recoded:
        return ()
    averaged = averages_of(prepared.checkpoint.container.storage)
    cast = {name: error for name, (error, _) in casts.items()}
    found = {"decoded": decoded, "encoded": encoded, "averaged": averaged, "cast": cast, "merged": cast}
    infinite = {name: many for name, (_, many) in casts.items()}
    return tuple(
        Measured(each, found[each.action][each.name], infinite.get(each.name, 0) if each.action in CASTING else 0)
        for each in recoded
    )


def _write(
    prepared: Cleared,
    staging: Stage,
    limit: Limits,
    progress: Progress,
    errors: dict[str, Error],
    times: FileTimes | None,
) -> int:
    """Write everything but the commit; return how many tensors an earlier run had finished.

    Args:
        prepared: the plan.
        staging: where to.
        limit: workers and memory.
        progress: told the bytes of each block written.
        errors: gets how far each tensor is that is encoded, by table name.
        times: notes when tensors are written.
    """
    plan, storage = prepared.plan, prepared.checkpoint.container.storage
    single = staging.single is not None
    refuse_other(staging.scratch, prepared.task, shown(prepared.asked[0]))
    with span("create files"):
        kept = staging.prepare(prepared.draft.files if single else plan.files)

    write_known(staging, prepared.draft.early())
    if plan.checks and (differing := unequal(plan.checks, storage, limit)):
        raise gathered(differing)
    journal = Journal(staging.scratch, prepared.task)
    try:
        tensors = _still_there(staging, plan, whole(plan, journal.finished), kept)
        todo = [tensor for tensor in plan.tensors if tensor.name not in tensors]
        resumed = len(tensors)
        if tensors:
            _expect(prepared, [tensor for tensor in plan.tensors if tensor.name in tensors], tensors)
        progress(sum(tensor.nbytes for tensor in plan.tensors) - sum(tensor.nbytes for tensor in todo))
        copying = Copying.of(todo, storage, limit)
        foretold: dict[str, str] | None = None
        if staging.ordered and prepared.draft.sealed_first:  # a stream cannot go back: everything is read twice
            foretold = _hashes(tensors | copying.copy(todo, None))
            write_known(staging, prepared.draft.late(foretold))
        files = staging if times is None else times.watching(staging)
        tensors |= copying.copy(todo, files, record=journal.add, progress=progress)
        carried = {} if single else copying.copy(plan.carried_files, staging, span_size=WHOLE)
    finally:
        journal.close()
    for tensor in plan.tensors:
        error = tensors[tensor.name].error
        if tensor.codes_of is not None and error is not None:
            errors[tensor.codes_of] = error
    storage.recheck()
    write_rest(staging, prepared, _hashes(tensors), _hashes(carried), foretold=foretold)
    return resumed


def whole(plan: Plan, finished: Mapping[str, Done]) -> dict[str, Done]:
    """Return the tensors of a plan that are finished, where workers may have finished spans of them."""
    if not finished:
        return {}
    found = {}
    for tensor in plan.tensors:
        if tensor.name in finished:
            found[tensor.name] = finished[tensor.name]
        elif all(each.name in finished for each in plan.spans.get(tensor.name, (tensor,))):
            found[tensor.name] = Done(joined([finished[each.name].hash for each in plan.spans[tensor.name]]))
    return found


def _hashes(tensors: Mapping[str, Done]) -> dict[str, str]:
    return {name: done.hash for name, done in tensors.items()}


class Copying(msgspec.Struct, frozen=True):
    """Carries tensors of a plan out."""

    storage: Storage
    """The source."""
    limit: Limits
    """Workers and memory."""
    sizes: Sizes
    """See `measured_sizes`."""

    @classmethod
    def of(cls, tensors: Sequence[PlannedTensor], storage: Storage, limit: Limits) -> Copying:
        """Return what carries some tensors out, which are measured where that must be done first."""
        return cls(storage, limit, measured_sizes(tensors, limit, partial(Worker, storage, limit)))

    def copy(
        self,
        tensors: Sequence[PlannedTensor],
        files: Writable | None,
        record: Callable[[str, Done], None] | None = None,
        progress: Progress = unwatched,
        span_size: int | None = None,
    ) -> dict[str, Done]:
        """Write tensors, or only hash them where there is nowhere to write to.

        Args:
            tensors: of the plan.
            files: where to; one that is `ordered` gets the bytes of a file in order.
            record: told each tensor when it is written.
            progress: told the bytes of each block.
            span_size: bytes of the spans in which tensors are hashed; None: `SPAN`.
        """
        errors: dict[str, Error] = {}
        done: dict[str, Done] = {}
        witness, alike = layer(self.storage, HashWitness), _alike(tensors, self.storage)

        def finish(key: int, digest: str) -> None:
            name = tensors[key].name
            if witness is not None and key in alike:
                witness.settle(alike[key], digest)
            done[name] = Done(digest, errors.get(name, Error()) if tensors[key].codes_of is not None else None)
            if record is not None:
                record(name, done[name])

        ordered = getattr(files, "ordered", False)
        sink = HashingFiles(
            files, [tensor.everywhere for tensor in tensors], range(len(tensors)), progress, finish, span_size
        )
        Movement(items_of(tensors, self.sizes, errors, ordered=ordered), self.storage, sink, self.limit).move_own()
        return done


def _alike(tensors: Sequence[PlannedTensor], storage: Storage) -> dict[int, int]:
    """Return the tensors, by key, that are one of the source byte by byte, with its number: they share their hash."""
    witness = layer(storage, HashWitness)
    if witness is None:
        return {}
    plain = {
        key: witness.alike(tensor.transfers, tensor.nbytes)
        for key, tensor in enumerate(tensors)
        if tensor.step is None and tensor.arithmetic is None
    }
    return {key: number for key, number in plain.items() if number is not None}


def _expect(prepared: Prepared, tensors: Sequence[PlannedTensor], finished: Mapping[str, Done]) -> None:
    """Let the checksums and hashes of what an earlier run has read be checked too: what it found of them is lost."""
    container = prepared.checkpoint.container
    hashes = layer(container.storage, HashWitness)
    if hashes is not None:
        alike = _alike(tensors, container.storage)
        for key, tensor in enumerate(tensors):
            if key in alike:
                hashes.settle(alike[key], finished[tensor.name].hash)
            else:
                hashes.expect(tensor.transfers)
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
