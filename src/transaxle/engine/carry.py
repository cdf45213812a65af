"""Executing a plan: the steps for each part of the plan, and the last step, which completes the checkpoint after all
parts.

A part of a plan (`PlanPart`) is either the whole plan, executed by the threads of one process; or the work item of one
worker process; or the tensors in the memory of a group of ranks. First a part of the plan is checked for refusals, then
its tensors are moved from the source into files, memory or a comparison. When all parts of the plan are done, the
remaining files and the manifest are written, and the staged files are ready to be committed.

A queue is a list of tensors that one thread moves from the first to the last. If a target accepts bytes at any offset,
each tensor has its own queue, and several threads can write into one file. A cloud storage service accepts the bytes of
a file only in order, so there all tensors of a file are in one queue.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from transaxle.encodings.encoding import Error
from transaxle.encodings.value_steps import MEASURED_BY_READING, MeasuredTensor, RecodedTensor
from transaxle.engine.checkpoint.manifest import IN_SPANS, FileRecord, Grafted, Manifest, TensorRecord, encode
from transaxle.engine.checkpoint.source_hashes import UNCHECKED, HashWitness, damage_first, hash_evidence
from transaxle.engine.duplicates import PlannedCheck, compare_copies
from transaxle.engine.plan.conversion import Prepared
from transaxle.engine.plan.planned import Plan, PlannedTensor
from transaxle.engine.plan.recoding import measure, refuse_infinite
from transaxle.engine.views.encode import Step, buffer_blocks, matrix_amaxes
from transaxle.engine.wording import duration, plural, size
from transaxle.errors import Refusal, Refused, Where, gathered, refuse
from transaxle.formats.catalog import Fragment, Recoding
from transaxle.formats.registry import MANIFEST
from transaxle.formats.storage.storage import Storage, layer, recheck_versions, without_commit
from transaxle.formats.store.staging import display_path
from transaxle.move.journal import WHOLE, FinishedTensor, HashingFiles, digest, span_ends
from transaxle.move.mover import Movement
from transaxle.move.transfer import Exchange, NoExchange
from transaxle.move.workers import DisjointSets, Item, Limits, Progress, Worker, limits, no_progress, run_workers
from transaxle.spans import stage

if TYPE_CHECKING:
    from transaxle.engine.verification import Verification
    from transaxle.formats.store.staging import Stage
    from transaxle.move.transfer import Writable


Sizes = Mapping[str, tuple[float, ...]]
"""Name of an encoded tensor with global scales, as the conversion table spells it -> amax (largest absolute value) of
each of its matrices.
"""
Errors = Mapping[RecodedTensor, tuple[Error, int]]
"""Step that changes a tensor's values -> the error of the values, and the number of values that became infinite."""
_BETWEEN = "it changed between two reads: its digest precedes it in the file, and both are read"
_AGAIN = "Convert again while no program changes the file, or write a folder, whose digests come last."


class PlanPart(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors of a plan that are executed together: the whole plan, or a part of it."""

    versions: tuple[tuple[str, str], ...] = ()
    """Source files that this part of the plan reads, each with the file version for which the plan was made."""
    tensors: tuple[PlannedTensor, ...] = ()
    """Tensors that this part of the plan writes."""
    checks: tuple[PlannedCheck, ...] = ()
    """Pairs of copies of a tensor that are compared."""
    measures: tuple[RecodedTensor, ...] = ()
    """Steps that change values (such as casts) whose errors are measured."""

    @property
    def band(self) -> int:
        """The value of `Plan.band` for this part of the plan."""
        return max((tensor.step.band for tensor in self.tensors if tensor.step is not None), default=0)

    @property
    def text(self) -> bytes:
        """This part of the plan, encoded as msgpack bytes."""
        return msgspec.msgpack.encode(self)


def whole_plan(plan: Plan) -> PlanPart:
    """Return a `PlanPart` that contains the whole plan."""
    measures = tuple(step for step in plan.recoded if step.action in MEASURED_BY_READING)
    return PlanPart(tensors=plan.tensors, checks=plan.checks, measures=measures)


def prove(
    part: PlanPart, storage: Storage, recoding: Recoding, limit: Limits, *, allow_lossy: bool, is_checked: bool
) -> Errors:
    """Measure the errors of a part of a plan, and check that copies of a tensor are equal. Decoded and cast tensors are
    read once for this step.

    Args:
        part: the part of the plan to check.
        storage: storage of the source.
        recoding: the source's tensors with computed (decoded, cast or merged) values.
        limit: number of worker threads, and memory of their buffers.
        allow_lossy: whether values may become infinite; if False, infinite values are refused.
        is_checked: whether the source is checked against its hashes.

    Returns:
        The errors of the decoded, cast and merged tensors.

    Raises:
        Refused: with code LOSSY, if values become infinite; with code UNEQUAL_COPIES, if copies of a tensor differ;
            with code CORRUPT, if damage is the reason.
    """
    with damage_first(storage, recoding, is_checked=is_checked):
        errors = measure(recoding, part.measures, limit)
        if not allow_lossy:
            refuse_infinite(errors, recoding.dtype)
        if part.checks and (differing := compare_copies(part.checks, storage, limit)):
            raise gathered(differing)
    return errors


def require_finite(prepared: Prepared, steps: Iterable[RecodedTensor], limit: Limits) -> None:
    """Refuse finite values that steps (such as casts) make infinite, unless the plan allows them; the steps' tensors
    are read.

    Raises:
        Refused: with code LOSSY, and every tensor that has such values; with code CORRUPT, if damage is the reason.
    """
    if not prepared.plan.allow_lossy:
        container = prepared.checkpoint.container
        with damage_first(container.storage, container.recoding, is_checked=prepared.check_source):
            refuse_infinite(measure(container.recoding, steps, limit), container.recoding.dtype)


def carry(
    tensors: Sequence[PlannedTensor],
    storage: Storage,
    files: Writable | None,
    limit: Limits,
    *,
    record: Callable[[str, FinishedTensor], None] | None = None,
    progress: Progress = no_progress,
    span_size: int | None = None,
    ordered: bool | None = None,
    target_ranks: Sequence[tuple[int, ...]] | None = None,
    exchange: Exchange | None = None,
) -> dict[str, FinishedTensor]:
    """Move the tensors of a part of a plan from the source into files, or only hash them if there are no files.

    Args:
        tensors: the planned tensors to move.
        storage: storage of the source; with `exchange`, the memory of all ranks, which must all call this function.
        files: the files to write; None means that the tensors are only hashed.
        limit: number of worker threads, and memory of their buffers.
        record: function called with the name and hash of each finished tensor.
        progress: function called with the number of bytes of each block.
        span_size: number of bytes that are hashed together; None means `SPAN`.
        ordered: whether the bytes of a file must be written in order; None means that `files` decides.
        target_ranks: for each tensor, the ranks that write it; an empty tuple means that each rank writes its own
            shard. If `target_ranks` is None, this process writes all tensors.
        exchange: moves bytes between ranks; None means that this process works alone.

    Returns:
        Tensor name -> hash and error, for each tensor that this process wrote completely.

    Raises:
        TransaxleError: an error of reading, arithmetic or writing; it is raised only on the rank that met the error,
            after all exchanges.
    """
    sizes = measure_amaxes(tensors, limit, partial(Worker, storage, limit))
    errors: dict[str, Error] = {}
    finished: dict[str, FinishedTensor] = {}
    witness, source_numbers = layer(storage, HashWitness), _source_numbers(tensors, storage)

    def finish(key: int, xxh3: str) -> None:
        name = tensors[key].name
        if witness is not None and key in source_numbers:
            witness.settle(source_numbers[key], xxh3)
        finished[name] = FinishedTensor(xxh3, errors.get(name, Error()) if tensors[key].codes_of is not None else None)
        if record is not None:
            record(name, finished[name])

    if ordered is None:
        ordered = getattr(files, "ordered", False)
    items = items_of(tensors, sizes, errors, ordered=ordered, target_ranks=target_ranks)
    rank = (exchange or NoExchange()).rank
    hashed_keys = {item.key for item in items if rank in item.target_ranks}
    sink = HashingFiles(files, [tensor.everywhere for tensor in tensors], hashed_keys, progress, finish, span_size)
    Movement(items, storage, sink, limit, exchange).run()
    return finished


def check_finished(tensors: Sequence[PlannedTensor], finished: Mapping[str, FinishedTensor], storage: Storage) -> None:
    """Check tensors that an earlier run finished against the hashes that the source contains."""
    witness, source_numbers = layer(storage, HashWitness), _source_numbers(tensors, storage)
    if witness is None:
        return
    for key, tensor in enumerate(tensors):
        if key in source_numbers:
            witness.settle(source_numbers[key], finished[tensor.name].hash)
        else:
            witness.expect(tensor.transfers)


def _source_numbers(tensors: Sequence[PlannedTensor], storage: Storage) -> dict[int, int]:
    """Return index of a planned tensor -> number of the source tensor with equal bytes, so that both tensors share one
    hash.
    """
    witness = layer(storage, HashWitness)
    if witness is None:
        return {}
    plain = {
        key: witness.tensor_in(tensor.transfers, tensor.nbytes)
        for key, tensor in enumerate(tensors)
        if tensor.step is None and tensor.arithmetic is None
    }
    return {key: number for key, number in plain.items() if number is not None}


def items_of(
    tensors: Sequence[PlannedTensor],
    sizes: Sizes,
    errors: dict[str, Error],
    *,
    ordered: bool = False,
    target_ranks: Sequence[tuple[int, ...]] | None = None,
) -> list[Item]:
    """Return the planned tensors as items for worker threads; the key of an item is the tensor's index.

    Args:
        tensors: planned tensors, in the order of their files.
        sizes: amax (largest absolute value) of each matrix, as `measure_amaxes` returns them.
        errors: dict into which the rounding error of each encoded tensor is written, by tensor name.
        ordered: whether the bytes of a file must be written in order.
        target_ranks: for each tensor, the ranks that write it, as in the function `carry`.
    """
    queues: Sequence[Hashable] = [None] * len(tensors)
    if ordered:
        queues = file_queues(tensors) if target_ranks is None else target_ranks
    return [
        Item(
            key,
            tensor.nbytes,
            tensor.transfers,
            NoExchange.ranks if target_ranks is None else target_ranks[key],
            NoExchange.ranks if target_ranks is None else (),
            queue,
            None if tensor.step is None and tensor.arithmetic is None else partial(_blocks, tensor, sizes, errors),
        )
        for key, (tensor, queue) in enumerate(zip(tensors, queues, strict=True))
    ]


def file_queues(tensors: Sequence[PlannedTensor]) -> list[str | int]:
    """Return the queue for each tensor. Every file has one queue, and files that have a tensor in common share a
    queue.
    """
    together = DisjointSets[str]()
    for tensor in tensors:
        for place in tensor.everywhere[1:]:
            together.join(place.file, tensor.everywhere[0].file)
    return [
        together.first(tensor.everywhere[0].file) if tensor.everywhere else number
        for number, tensor in enumerate(tensors)
    ]


def _blocks(tensor: PlannedTensor, sizes: Sizes, errors: dict[str, Error], worker: Worker) -> Iterator[memoryview]:
    """Produce the bytes of a planned tensor in order, in blocks; each block is valid until the next block is
    produced.
    """
    step = tensor.step
    if step is None:
        try:
            yield from worker.blocks(tensor.transfers, tensor.nbytes, dtype=tensor.dtype, arithmetic=tensor.arithmetic)
        except Refused as error:
            if error.code != "LOSSY":
                raise
            raise refuse("LOSSY", f"{tensor.rule}\n{error.refusals[0].message}", tensor=tensor.name) from None
        return
    errors[tensor.name] = Error()

    def add(error: Error) -> None:
        errors[tensor.name] += error

    yield from buffer_blocks(
        step, _values(tensor, step, worker), sizes.get(step.tensor, ()), room=worker.capacity, report_error=add
    )


def _values(tensor: PlannedTensor, step: Step, worker: Worker) -> Callable[[Sequence[int]], Iterator[memoryview]]:
    return partial(worker.blocks_until, tensor.transfers, dtype=step.dtype, arithmetic=tensor.arithmetic)


def measure_amaxes(
    tensors: Iterable[PlannedTensor], limit: Limits, workers: Callable[..., Worker]
) -> dict[str, tuple[float, ...]]:
    """Read tensors with global scales once, and return tensor name -> amax (largest absolute value) of each matrix."""
    scaled_tensors = {t.step.tensor: (t, t.step) for t in tensors if t.step is not None and t.step.spec.has_global}
    sizes: dict[str, tuple[float, ...]] = {}

    def measure(worker: Worker, item: tuple[PlannedTensor, Step]) -> None:
        tensor, step = item
        sizes[step.tensor] = matrix_amaxes(step, _values(tensor, step, worker), room=worker.capacity)

    if scaled_tensors:
        run_workers(scaled_tensors.values(), limit.jobs, workers, measure)
    return sizes


def write_fragments(files: Writable, fragments: Iterable[Fragment]) -> None:
    """Write bytes that lie outside of tensors, such as headers, into the target files."""
    for fragment in fragments:
        files.pwrite(fragment.file, fragment.offset, memoryview(fragment.data))


def seal(
    prepared: Prepared,
    files: Stage,
    limit: Limits,
    tensors: Mapping[str, FinishedTensor],
    measured: Errors | None = None,
    foretold: Mapping[str, str] | None = None,
) -> tuple[MeasuredTensor, ...]:
    """Turn the written parts of a plan into a checkpoint: the last step of a conversion or save before the commit.

    The function refuses values that became infinite, and checks the source once more. At the end it writes the files
    that depend on all tensors: copied files, the rest of the tensor files, and the manifest of a folder.

    Args:
        prepared: the plan with its open source and the layout of its target files.
        files: the staged files of the target.
        limit: number of worker threads, and memory of their buffers.
        tensors: name of each written tensor -> its hash and error.
        measured: errors of the decoded, cast and merged tensors.
        foretold: tensor name -> hash, if the hashes were written before the tensors; None means that they are written
            now.

    Returns:
        The error of each tensor whose values changed.

    Raises:
        Refused: with code LOSSY, if values became infinite; with code CORRUPT, if the source was changed, or does not
            match its own hashes.
        StorageError: with code IO or NO_SPACE, if files cannot be read or written.
    """
    plan, container = prepared.plan, prepared.checkpoint.container
    storage, recoding = container.storage, container.recoding
    if measured and not plan.allow_lossy:
        with damage_first(storage, recoding, is_checked=prepared.check_source):
            refuse_infinite(measured, recoding.dtype)
    copied = carry(plan.carried_files, storage, files, limit, span_size=WHOLE) if files.single is None else {}
    recheck(prepared)
    hashes = {name: hashed.hash for name, hashed in tensors.items()}
    _write_final_files(prepared, files, hashes, {name: hashed.hash for name, hashed in copied.items()}, foretold)
    return value_errors(prepared, encoding_errors(plan, tensors), measured or {})


def recheck(prepared: Prepared) -> None:
    """Check that the source's files have not changed, and match their hashes and checksums unless `check_source` is
    False.

    Raises:
        Refused: with code CORRUPT, for each file that was changed or damaged.
        StorageError: with code IO, if a file cannot be read.
    """
    storage = prepared.checkpoint.container.storage
    if prepared.check_source:
        storage.recheck()
    else:
        recheck_versions(storage)


@stage("write index and manifest")
def _write_final_files(
    prepared: Prepared,
    files: Stage,
    tensors: Mapping[str, str],
    carried: Mapping[str, str],
    foretold: Mapping[str, str] | None,
) -> None:
    """Write the files that depend on the hashes of all tensors and copied files."""
    changed = [name for name, xxh3 in (foretold or {}).items() if tensors[name] != xxh3]
    if changed:
        raise gathered([Refusal("CORRUPT", _BETWEEN, Where(None, name), _AGAIN) for name in changed])
    if foretold is None:
        write_fragments(files, prepared.draft.late_fragments(tensors))
    if files.single is None:
        files.write(MANIFEST, encode(manifest_of(prepared, tensors, carried)))


def encoding_errors(plan: Plan, tensors: Mapping[str, FinishedTensor]) -> dict[str, Error]:
    """Return tensor name (as in the conversion table) -> rounding error, for the tensors that the plan encodes."""
    return {each.codes_of: tensors[each.name].error or Error() for each in plan.tensors if each.codes_of is not None}


def value_errors(prepared: Prepared, encoded: Mapping[str, Error], measured: Errors) -> tuple[MeasuredTensor, ...]:
    """Return the error of each tensor whose values changed.

    Args:
        prepared: the plan with its open source.
        encoded: tensor name (as in the conversion table) -> error of the encoded tensor.
        measured: errors of the decoded, cast and merged tensors; the errors of averaged tensors are in the plan.
    """
    steps = prepared.plan.recoded
    means = [step for step in steps if step.action == "averaged"]
    error_of = {**measured, **measure(prepared.checkpoint.container.recoding, means, limits(1))}
    return tuple(
        MeasuredTensor(step, encoded[step.name]) if step.action == "encoded" else MeasuredTensor(step, *error_of[step])
        for step in steps
    )


def manifest_of(prepared: Prepared, tensors: Mapping[str, str], carried: Mapping[str, str]) -> Manifest:
    """Return the manifest of a target checkpoint.

    Args:
        prepared: the plan with the layout of its target files.
        tensors: name of each target tensor -> its hash.
        carried: name of each copied file -> its hash.
    """
    plan = prepared.plan
    fragments_by_file: dict[str, list[Fragment]] = {}
    for fragment in prepared.draft.fragments:
        fragments_by_file.setdefault(fragment.file, []).append(fragment)
    # Files that contain only tensors are listed too, so that the manifest marks them as files of the checkpoint.
    for name in prepared.draft.files:
        fragments_by_file.setdefault(name, [])
    files = {name: _file_record(plan.files[name], fragments) for name, fragments in fragments_by_file.items()}
    files |= {name: FileRecord(plan.files[name], plan.files[name], carried[name]) for name in plan.carried}
    return Manifest(
        transaxle=IN_SPANS if any(len(span_ends(tensor.nbytes)) > 1 for tensor in plan.tensors) else 1,
        format=plan.format,
        family=plan.family,
        dialect=plan.dialect,
        axes=plan.axes,
        aliases=plan.aliases,
        files=files,
        tensors={
            tensor.name: TensorRecord(tensor.dtype, tensor.shape, tensors[tensor.name]) for tensor in plan.tensors
        },
        grafted=_graft_record(plan, prepared.checkpoint.container.recoding) if plan.grafted else msgspec.UNSET,
        source=msgspec.UNSET if without_commit(plan.source) == plan.source else plan.source,
    )


def _graft_record(plan: Plan, recoding: Recoding) -> Grafted:
    base = display_path(recoding.base)
    return Grafted(base, tuple(plan.grafted), tuple(plan.grafted_files), recoding.base_checksum)


def _file_record(file_size: int, fragments: Sequence[Fragment]) -> FileRecord:
    """Return the manifest's record of a file, made from the file's size and its bytes outside of tensors."""
    data = b"".join(fragment.data for fragment in sorted(fragments, key=lambda fragment: fragment.offset))
    return FileRecord(file_size, len(data), digest(data))


@dataclass(frozen=True, repr=False)
class Report:
    """The result of a conversion."""

    path: str
    """Path of the written checkpoint, as the user typed it."""
    format: str
    """Container format of the written checkpoint."""
    dialect: str
    """Dialect of the written checkpoint."""
    tensors: int
    """Number of tensors in the written checkpoint."""
    bytes_read: int
    """Number of bytes of source tensors that were read."""
    bytes_written: int
    """Size in bytes of all files of the written checkpoint."""
    seconds: float
    """Wall time of the conversion in seconds."""
    checks: int
    """Number of pairs of tensor copies in the source that were compared and proved equal."""
    resumed: int
    """Number of tensors that an earlier, interrupted run had finished."""
    synced: bool
    """Whether all files were synced to disk before the checkpoint got its final name."""
    kept: tuple[str, ...]
    """Names of tensors that the target dialect does not know; these tensors keep their names."""
    ignored: tuple[str, ...]
    """Source tensors and files that were not converted."""
    carried: tuple[str, ...]
    """Names of files without tensors: copied files, and a config that was adapted to the tensors or given by the
    user.
    """
    recoded: tuple[MeasuredTensor, ...] = ()
    """Tensors that were decoded, encoded or cast, with the errors of their values."""
    grafted: Mapping[str, str] = field(default_factory=dict)
    """Tensor whose values come, at least in part, from another checkpoint -> path of that checkpoint."""
    grafted_files: Mapping[str, str] = field(default_factory=dict)
    """File in `carried` that comes from another checkpoint -> path of that checkpoint."""
    stayed: tuple[str, ...] = ()
    """Plain source tensors that kept their dtype while other tensors were cast."""
    counted: Mapping[str, int] = field(default_factory=dict)
    """Axis whose size the config does not state -> size counted from the indices in tensor names."""
    leftovers: tuple[str, ...] = ()
    """Files that a killed run left beside the target, and what happened to these files."""
    notes: tuple[str, ...] = ()
    """Notes on the programs that will load the result: settings that they need, or defaults that they will assume."""
    workers: Mapping[str, int] = field(default_factory=dict)
    """Machine and process -> bytes of tensors that the process wrote; empty if one process executed the plan."""
    source: str = ""
    """Path of the source, as the user typed it; for a repository on a hub, with the commit."""
    source_against: str = "structure"
    """Evidence against which the source's bytes were checked: `manifest` for hashes in transaxle.json; `digests` for
    hashes stored in a single file; `structure` if the source has no hashes, so that only the checksums of its file
    format reveal damage; `unchecked` if `check_source` was False. It is the weakest of source, adapter and base.
    """
    check: Any = None
    """If the user asked for it, the verdict on a program that is to load the result, a `transaxle.Check`."""
    verification: Verification | None = None
    """If the user asked for it, the check of the result against its manifest, and its comparison with the source."""

    def __repr__(self) -> str:
        return f"<report {self}>"

    def __str__(self) -> str:
        """Return the line that `print(report)` shows."""
        special = {"under their own names": self.kept, "left behind": self.ignored, "with other numbers": self.recoded}
        counts = "".join(f", {len(names):,} {label}" for label, names in special.items() if names)
        return (
            f"{self.path} · {self.format} · {self.dialect} · {plural(self.tensors, 'tensor')}{counts} · "
            f"{size(self.bytes_written)}, {duration(self.seconds)}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain JSON data."""
        data = asdict(replace(self, recoded=(), verification=None, check=None))
        del data["verification"], data["check"]
        if self.check is not None:
            data["check"] = self.check.as_json()
        data["recoded"] = [each.as_json() for each in self.recoded]
        if self.verification is not None:
            data["verification"] = replace(self.verification, comparison=None).as_json()
            if self.verification.comparison is not None:
                data["comparison"] = self.verification.comparison.as_json()
        return {key: list(value) if isinstance(value, tuple) else value for key, value in data.items()}


def make_report(
    prepared: Prepared,
    target: str,
    *,
    single: bool,
    resumed: int,
    recoded: tuple[MeasuredTensor, ...],
    leftovers: tuple[str, ...],
    synced: bool,
) -> Report:
    """Return the report of a finished conversion.

    Args:
        prepared: the plan with its open source and the layout of its target files.
        target: path of the written checkpoint, as the user typed it.
        single: whether the written checkpoint is a single file.
        resumed: number of tensors that an earlier run had finished.
        recoded: tensors whose values changed, with their errors.
        leftovers: files that a killed run left, and what happened to these files.
        synced: whether all files were synced to disk.
    """
    plan = prepared.plan
    return Report(
        path=display_path(target),
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
        grafted=plan.grafted,
        grafted_files={} if single else plan.grafted_files,
        stayed=plan.stayed,
        notes=plan.notes,
        counted=plan.counted,
        leftovers=leftovers,
        source=plan.source,
        source_against=hash_evidence(prepared.checkpoint.container) if prepared.check_source else UNCHECKED,
    )
