"""Carrying a plan out: what is done of any share of it, and the one end that makes a checkpoint of all shares.

A share is the whole plan, which the threads of one process do; a worker's item; or what the ranks of a group hold. What
may refuse a share is proved first, then its tensors are carried from the source into a sink. When every share is done,
the rest of the files and the manifest are written, and the stage is ready to be committed.

What one thread does from beginning to end before it takes something else is a queue. Where a target takes bytes at any
offset, each tensor has its own, and threads share even a single file. A service takes the bytes of a file in order
only: there all tensors of a file are in one queue.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from transaxle.encodings.encoding import Error
from transaxle.encodings.value_steps import MEASURED_BY_READING, MeasuredTensor, RecodedTensor
from transaxle.engine.checkpoint.manifest import (
    IN_SPANS,
    FileRecord,
    HashWitness,
    Manifest,
    TensorRecord,
    against,
    encode,
)
from transaxle.engine.duplicates import PlannedCheck, unequal
from transaxle.engine.plan.conversion import Prepared
from transaxle.engine.plan.planned import Plan, PlannedTensor
from transaxle.engine.plan.recoding import measure, refuse_infinite
from transaxle.engine.views.encode import Step, buffer_blocks, largest
from transaxle.engine.wording import duration, plural, size
from transaxle.errors import Refusal, Refused, Where, gathered, refuse
from transaxle.formats.catalog import Fragment, Recoding
from transaxle.formats.registry import MANIFEST
from transaxle.formats.storage.storage import Storage, layer, unpinned
from transaxle.formats.store.staging import shown
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
"""Table name -> amax of each matrix, of tensors that are encoded with a scale for the whole of it."""
Errors = Mapping[RecodedTensor, tuple[Error, int]]
"""What is done to a stored tensor -> the error of its values, and how many became infinite."""
_BETWEEN = "it changed between two reads: its digest precedes it in the file, and both are read"
_AGAIN = "Write it again while nothing changes it, or write a folder, whose digests come last."


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a plan that is carried out together, or all of it."""

    versions: tuple[tuple[str, str], ...] = ()
    """The source files that it reads, and the version of each that was planned for, where it is stored."""
    tensors: tuple[PlannedTensor, ...] = ()
    """What is written."""
    checks: tuple[PlannedCheck, ...] = ()
    """What is compared."""
    measures: tuple[RecodedTensor, ...] = ()
    """Of what the error is measured."""

    @property
    def band(self) -> int:
        """See `Plan.band`."""
        return max((tensor.step.band for tensor in self.tensors if tensor.step is not None), default=0)

    @property
    def text(self) -> bytes:
        """The share as bytes: msgpack."""
        return msgspec.msgpack.encode(self)


def whole(plan: Plan) -> Share:
    """Return all of a plan as one share."""
    measures = tuple(step for step in plan.recoded if step.action in MEASURED_BY_READING)
    return Share(tensors=plan.tensors, checks=plan.checks, measures=measures)


def prove(part: Share, storage: Storage, recoding: Recoding, limit: Limits, *, allow_lossy: bool) -> Errors:
    """Measure the errors of a share, and prove its copies equal; what is decoded or cast is read once more for it.

    Args:
        part: the share.
        storage: the source.
        recoding: what is computed of it.
        limit: workers and memory.
        allow_lossy: values may become infinite, or `seal` refuses those of all shares together.

    Returns:
        The errors of the decoded, cast and merged tensors.

    Raises:
        Refused: LOSSY where values become infinite; UNEQUAL_COPIES.
    """
    errors = measure(recoding, part.measures, limit)
    if not allow_lossy:
        refuse_infinite(errors, recoding.dtype)
    if part.checks and (differing := unequal(part.checks, storage, limit)):
        raise gathered(differing)
    return errors


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
    """Carry the tensors of a share from the source into files, or only hash them where there is nowhere to write to.

    Args:
        tensors: of a plan.
        storage: the source; the memory of ranks where there is an exchange, which makes this collective.
        files: where to.
        limit: workers and memory.
        record: called with each tensor when it is written.
        progress: called with the bytes of each block.
        span_size: bytes of the spans in which tensors are hashed; None: `SPAN`.
        ordered: the bytes of a file must be written in order; None: if the files say so.
        target_ranks: for each tensor the rank that writes it; nobody: each rank what it holds of it. None: this process
            does.
        exchange: moves bytes between ranks; None: this process is alone.

    Returns:
        The tensors that were written whole here.

    Raises:
        TransaxleError: what reading, arithmetic and writing raise; on this rank alone, when all exchanges are over.
    """
    sizes = measured_sizes(tensors, limit, partial(Worker, storage, limit))
    errors: dict[str, Error] = {}
    done: dict[str, FinishedTensor] = {}
    witness, alike = layer(storage, HashWitness), _alike(tensors, storage)

    def finish(key: int, xxh3: str) -> None:
        name = tensors[key].name
        if witness is not None and key in alike:
            witness.settle(alike[key], xxh3)
        done[name] = FinishedTensor(xxh3, errors.get(name, Error()) if tensors[key].codes_of is not None else None)
        if record is not None:
            record(name, done[name])

    if ordered is None:
        ordered = getattr(files, "ordered", False)
    items = items_of(tensors, sizes, errors, ordered=ordered, target_ranks=target_ranks)
    rank = (exchange or NoExchange()).rank
    hashed = {item.key for item in items if rank in item.target_ranks}
    sink = HashingFiles(files, [tensor.everywhere for tensor in tensors], hashed, progress, finish, span_size)
    Movement(items, storage, sink, limit, exchange).run()
    return done


def believe(tensors: Sequence[PlannedTensor], finished: Mapping[str, FinishedTensor], storage: Storage) -> None:
    """Let the hashes that the source keeps be checked against tensors that an earlier run has carried."""
    witness, alike = layer(storage, HashWitness), _alike(tensors, storage)
    if witness is None:
        return
    for key, tensor in enumerate(tensors):
        if key in alike:
            witness.settle(alike[key], finished[tensor.name].hash)
        else:
            witness.expect(tensor.transfers)


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


def items_of(
    tensors: Sequence[PlannedTensor],
    sizes: Sizes,
    errors: dict[str, Error],
    *,
    ordered: bool = False,
    target_ranks: Sequence[tuple[int, ...]] | None = None,
) -> list[Item]:
    """Return planned tensors as items, which have their places in the sequence as keys.

    Args:
        tensors: what is planned, in the order in which they lie in their files.
        sizes: from `measured_sizes`.
        errors: gets the error of each tensor that is encoded, by its name.
        ordered: the bytes of a file must be written in order.
        target_ranks: as for `carry`.
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
    """Name the queue of each tensor: one for a file, and for all files that a tensor lies in."""
    together = DisjointSets[str]()
    for tensor in tensors:
        for place in tensor.everywhere[1:]:
            together.join(place.file, tensor.everywhere[0].file)
    return [
        together.first(tensor.everywhere[0].file) if tensor.everywhere else number
        for number, tensor in enumerate(tensors)
    ]


def _blocks(tensor: PlannedTensor, sizes: Sizes, errors: dict[str, Error], worker: Worker) -> Iterator[memoryview]:
    """Make a planned tensor in order; each block is valid until the next one is asked for."""
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
        step, _values(tensor, step, worker), sizes.get(step.tensor, ()), room=worker.capacity, measured=add
    )


def _values(tensor: PlannedTensor, step: Step, worker: Worker) -> Callable[[Sequence[int]], Iterator[memoryview]]:
    return partial(worker.blocks_until, tensor.transfers, dtype=step.dtype, arithmetic=tensor.arithmetic)


def measured_sizes(
    tensors: Iterable[PlannedTensor], limit: Limits, workers: Callable[..., Worker]
) -> dict[str, tuple[float, ...]]:
    """Read the tensors that need it once, and return the amax of each of their matrices."""
    wanted = {t.step.tensor: (t, t.step) for t in tensors if t.step is not None and t.step.spec.has_global}
    sizes: dict[str, tuple[float, ...]] = {}

    def measure(worker: Worker, item: tuple[PlannedTensor, Step]) -> None:
        tensor, step = item
        sizes[step.tensor] = largest(step, _values(tensor, step, worker), room=worker.capacity)

    if wanted:
        run_workers(wanted.values(), limit.jobs, workers, measure)
    return sizes


def write_fragments(files: Writable, fragments: Iterable[Fragment]) -> None:
    """Write bytes outside of tensors."""
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
    """Make a checkpoint of all shares: the end of every conversion and save, but for the commit.

    Values that became infinite are refused, the source is checked once more, and what is known only now is written:
    carried files, the rest of the tensors' files and, in a folder, the manifest.

    Args:
        prepared: the plan.
        files: where the tensors are.
        limit: workers and memory.
        tensors: hash and error of every tensor.
        measured: what `prove` has returned of all shares.
        foretold: hashes of the tensors that their files, which are complete, have of an earlier read.

    Returns:
        The error of each tensor whose values changed.

    Raises:
        Refused: LOSSY; CORRUPT where the source was changed, or does not have its own hashes.
        StorageError: IO, NO_SPACE.
    """
    plan, storage = prepared.plan, prepared.checkpoint.container.storage
    if measured and not plan.allow_lossy:
        refuse_infinite(measured, prepared.checkpoint.container.recoding.dtype)
    beside = carry(plan.carried_files, storage, files, limit, span_size=WHOLE) if files.single is None else {}
    storage.recheck()
    hashes = {name: done.hash for name, done in tensors.items()}
    _write_rest(prepared, files, hashes, {name: done.hash for name, done in beside.items()}, foretold)
    return recoded(prepared, encoding_errors(plan, tensors), measured or {})


@stage("write index and manifest")
def _write_rest(
    prepared: Prepared,
    files: Stage,
    tensors: Mapping[str, str],
    carried: Mapping[str, str],
    foretold: Mapping[str, str] | None,
) -> None:
    """Write what is known when all tensors are, from the hashes of tensors and carried files."""
    changed = [name for name, xxh3 in (foretold or {}).items() if tensors[name] != xxh3]
    if changed:
        raise gathered([Refusal("CORRUPT", _BETWEEN, Where(None, name), _AGAIN) for name in changed])
    if foretold is None:
        write_fragments(files, prepared.draft.late(tensors))
    if files.single is None:
        files.write(MANIFEST, encode(manifest_of(prepared, tensors, carried)))


def encoding_errors(plan: Plan, tensors: Mapping[str, FinishedTensor]) -> dict[str, Error]:
    """Return the errors of encoded tensors, by table name."""
    return {each.codes_of: tensors[each.name].error or Error() for each in plan.tensors if each.codes_of is not None}


def recoded(prepared: Prepared, encoded: Mapping[str, Error], measured: Errors) -> tuple[MeasuredTensor, ...]:
    """Return the error of each tensor whose values changed.

    Args:
        prepared: the plan.
        encoded: the errors of encoded tensors, by table name.
        measured: those of decoded, cast and merged ones; what means differ from is known.
    """
    steps = prepared.plan.recoded
    means = [step for step in steps if step.action == "averaged"]
    known = {**measured, **measure(prepared.checkpoint.container.recoding, means, limits(1))}
    return tuple(
        MeasuredTensor(step, encoded[step.name]) if step.action == "encoded" else MeasuredTensor(step, *known[step])
        for step in steps
    )


def manifest_of(prepared: Prepared, tensors: Mapping[str, str], carried: Mapping[str, str]) -> Manifest:
    """Return the manifest of a target.

    Args:
        prepared: the plan.
        tensors: hash of every tensor.
        carried: hash of every carried file.
    """
    plan = prepared.plan
    known: dict[str, list[Fragment]] = {}
    for fragment in prepared.draft.fragments:
        known.setdefault(fragment.file, []).append(fragment)
    # Files that are all tensor are listed too: by the manifest they are known as the checkpoint's own.
    for name in prepared.draft.files:
        known.setdefault(name, [])
    files = {name: _record(plan.files[name], fragments) for name, fragments in known.items()}
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
        source=msgspec.UNSET if unpinned(plan.source) == plan.source else plan.source,
    )


def _record(octets: int, fragments: Sequence[Fragment]) -> FileRecord:
    """Return the record of a file of so many bytes, of which these are outside of tensors."""
    known = b"".join(fragment.data for fragment in sorted(fragments, key=lambda fragment: fragment.offset))
    return FileRecord(octets, len(known), digest(known))


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
    recoded: tuple[MeasuredTensor, ...] = ()
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


def reported(
    prepared: Prepared,
    target: str,
    *,
    single: bool,
    resumed: int,
    recoded: tuple[MeasuredTensor, ...],
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
