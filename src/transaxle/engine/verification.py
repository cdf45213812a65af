"""Verification of a checkpoint against its own manifest, byte by byte, or against a second checkpoint.

This module also opens the two checkpoints of a comparison: some options apply to both checkpoints, and some only to the
first.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from transaxle.axes.layout.relayout import identity_target
from transaxle.engine.checkpoint.checkpoint import (
    Checkpoint,
    CheckpointLike,
    StoredTensor,
    open_source,
    refuse_stateless,
)
from transaxle.engine.checkpoint.manifest import IN_SPANS, TensorRecord, describe_change, has_manifest, load, stale
from transaxle.engine.checkpoint.source_hashes import (
    as_written,
    check_rest,
    digest_positions,
    has_hashes,
    hash_evidence,
)
from transaxle.engine.compare import Comparison, Difference, compare
from transaxle.engine.duplicates import compare_copies, plan_twins
from transaxle.engine.source import Source
from transaxle.engine.views.encoded import refuse_plain
from transaxle.engine.wording import notebook, plural, size
from transaxle.errors import Code, Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.catalog import NUMBERS, Checksum, Container, Entry, Seal, nbytes, read_digest
from transaxle.formats.checksums import Witness
from transaxle.formats.detect import has_choices
from transaxle.formats.registry import MANIFEST
from transaxle.formats.storage.storage import LiftedFiles, layer, walk_files
from transaxle.move.journal import WHOLE, HashingFiles, span_ends
from transaxle.move.mover import Movement
from transaxle.move.transfer import NoExchange
from transaxle.move.workers import Item, Limits, Progress, Worker, limits, no_progress, run_workers
from transaxle.options import OF_FIRST, OF_ONE
from transaxle.spans import stage

_SHOWN = 3
"""Largest number of problems that a printed verification shows."""
_NO_DAMAGE = frozenset({"UNSUPPORTED", "UNSAFE_PICKLE"})
"""Refusal codes that mean that optimizer state is not read; they do not indicate damage."""
_WELL = {"manifest": "intact", "digests": "intact"}
_AGAIN = "Copy the file again from an intact checkpoint, or write the checkpoint again."


@dataclass(frozen=True, repr=False)
class Verification:
    """The result of a verification; `bool(verification)` is true if there are no problems and no differences."""

    tensors: int
    """Number of tensors that the verification read."""
    parameters: int
    """Number of elements in the model's tensors; if two checkpoints were compared, the number of compared elements."""
    bytes_read: int
    """Number of bytes of files that the verification read."""
    against: str
    """What the checkpoint was checked against: `manifest`; `digests` that are stored in a single file; `checkpoint`, if
    a second checkpoint was given; or `structure`, if there is no manifest and no digest, so that the data itself is not
    proved.
    """
    problems: tuple[Refusal, ...] = ()
    """All problems that were found in the checkpoint."""
    unlisted: tuple[str, ...] = ()
    """Files in the checkpoint's folder that the manifest does not list; these files are not checked."""
    comparison: Comparison | None = None
    """The comparison with a second checkpoint; None if only one checkpoint was given."""
    unproved: int = 0
    """Number of tensor bytes for which the checkpoint contains neither a hash nor a checksum."""

    @property
    def ok(self) -> bool:
        """Whether the verification found no problems and no differences."""
        return not self.problems and (self.comparison is None or self.comparison.equal)

    @property
    def equal(self) -> bool:
        """The value of `ok`, under a name that suits a comparison of two checkpoints."""
        return self.ok

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Differences between two checkpoints, sorted by tensor name; empty if only one checkpoint was given."""
        return () if self.comparison is None else self.comparison.differences

    def __bool__(self) -> bool:
        """Return whether the verification found no problems and no differences."""
        return self.ok

    def __repr__(self) -> str:
        return f"<verification {self.verdict}>"

    def __str__(self) -> str:
        """Return the text that `print(verification)` shows: the verdict, and the first problems or differences."""
        if self.comparison is not None:
            return str(self.comparison)
        lines = [self.verdict, *(f"  {line}" for each in self.problems[:_SHOWN] for line in str(each).splitlines())]
        remaining = len(self.problems) - _SHOWN
        return "\n".join([*lines, *([f"  … and {remaining:,} more: .problems"] if remaining > 0 else [])])

    def _repr_html_(self) -> str:
        return notebook(str(self))

    @property
    def verdict(self) -> str:
        """The result of the verification in a few words."""
        if self.comparison is not None:
            return f"against a checkpoint: {self.comparison.verdict}"
        amount = f"{plural(self.tensors, 'tensor')}, {size(self.bytes_read)} read"
        if self.problems:
            return f"against the {self.against}: {plural(len(self.problems), 'problem')}, {amount}"
        return f"against the {self.against}: {_WELL.get(self.against) or self._sound}, {amount}"

    @property
    def _sound(self) -> str:
        if not self.unproved:
            return "sound, checksums of the format cover all tensors and nothing else"
        return f"sound, the data is unchecked{'' if self.unproved == self.bytes_read else f' ({size(self.unproved)})'}"

    def as_json(self) -> dict[str, Any]:
        """Return the verification as plain JSON data."""
        return {
            "ok": self.ok,
            "tensors": self.tensors,
            "parameters": self.parameters,
            "bytes_read": self.bytes_read,
            "against": self.against,
            "problems": [problem.as_json() for problem in self.problems],
            "unlisted": list(self.unlisted),
            "unproved": self.unproved,
            "comparison": None if self.comparison is None else self.comparison.as_json(),
        }


def verify_against(
    first: Checkpoint, second: Checkpoint, limit: Limits | None = None, progress: Progress = no_progress
) -> Verification:
    """Compare two checkpoints, whatever their formats and dialects.

    Raises:
        TransaxleError: if the first checkpoint cannot be expressed in the second checkpoint's dialect.
    """
    comparison = compare(first, second, limit=limit, progress=progress)
    return Verification(
        comparison.tensors,
        comparison.parameters,
        comparison.bytes_read,
        "checkpoint",
        comparison=comparison,
    )


@stage("verify")
def verify(checkpoint: Checkpoint, limit: Limits | None = None, progress: Progress = no_progress) -> Verification:
    """Check a checkpoint against its manifest: every file, every tensor, every copy of a tensor, and every byte.

    A checkpoint that is a single file is checked against the digests in the file, if it was written with digests.
    Without manifest and digests, every tensor is read once, which proves that the catalog is right and every byte is
    readable. Checksums of the file format and the equality of copies are always checked.

    Raises:
        Refused: with code CORRUPT, if the manifest itself is damaged.
    """
    stored = _with_left_out((checkpoint.undecoded or checkpoint).stored)
    container, limit = stored.container, limit or limits()
    manifest = load(container)
    recorded: Mapping[str, TensorRecord] = {}
    problems = [refusal for refusal in container.unread if refusal.code not in _NO_DAMAGE]
    extra: tuple[str, ...] = ()
    if manifest is not None:
        recorded = manifest.tensors
        problems.extend(stale(manifest, container))
        plain = _plain_numbers(container) - recorded.keys()
        problems.extend(_refuse_unlisted(recorded, dict.fromkeys(name for name in stored if name not in plain)))
        folder_files = () if container.storage.single else walk_files(container.storage)
        lifted = layer(container.storage, LiftedFiles)
        paths = {name: name if lifted is None else lifted.name_below(name) for name in folder_files}
        extra = tuple(name for name, path in paths.items() if path not in manifest.files and name != MANIFEST)
    places: dict[str, tuple[Seal, int]] = {}
    for seal in container.seals:
        problems.extend(check_rest(seal, container))
        places.update((name, (seal, place)) for name, place in digest_positions(seal, container))
    damaged: dict[str, Refusal] = {}
    digests: dict[str, str] = {}

    names = list(stored)

    def check(key: int, digest: str) -> None:
        name, tensor = names[key], stored[names[key]]
        digests.setdefault(name, digest)
        problem = _check_record(Where(_file_of(container.entries.get(name)), name), tensor, digest, recorded.get(name))
        if problem is None and name in places and tensor.nbytes:
            seal, place = places[name]
            if (expected := read_digest(container.storage, seal, place)) != digest:
                problem = Refusal("CORRUPT", describe_change(expected, digest), Where(seal.file, name), _AGAIN)
        damaged.pop(name, None)
        if problem is not None:
            damaged[name] = problem

    items = [
        Item(key, tensor.nbytes, (), NoExchange.ranks, NoExchange.ranks, blocks=partial(_blocks, tensor))
        for key, tensor in enumerate(stored.values())
    ]
    hashing = HashingFiles(None, (), range(len(items)), progress, check)
    Movement(items, container.storage, hashing, limit).move_local()
    large = [items[key] for key, name in enumerate(names) if name in damaged and len(span_ends(items[key].size)) > 1]
    # an older version of Transaxle hashed each tensor in one span
    if large and (manifest is None or manifest.transaxle < IN_SPANS):
        hashing = HashingFiles(None, (), range(len(items)), finish=check, span_size=WHOLE)
        Movement(large, container.storage, hashing, limit).move_local()
    unlike, copied = _check_copies(container, digests, limit)
    problems.extend(each for each in unlike if each.where.tensor not in damaged)
    problems.extend(_check_sums(container, limit))
    return Verification(
        len(stored),
        stored.parameters,
        sum(tensor.nbytes for tensor in stored.values()) + copied,
        hash_evidence(container),
        (*problems, *(damaged[name] for name in stored if name in damaged)),
        extra,
        unproved=0 if has_hashes(container) else _bytes_without_proof(container),
    )


def _with_left_out(stored: Checkpoint) -> Checkpoint:
    """Return a checkpoint with all tensors, including those omitted when it was opened, because a verification covers
    all bytes.
    """
    container = as_written(stored.container)
    if container is stored.container and not container.left:
        return stored
    container = replace(container, entries={**container.left, **container.entries}, left={})
    return Checkpoint(container, stored.settings, None, None)


def _check_copies(container: Container, digests: Mapping[str, str], limit: Limits) -> tuple[list[Refusal], int]:
    """Check that all copies of tensors are equal; return the refusals, and the number of bytes that the check has read.

    Args:
        container: the files of the checkpoint.
        digests: tensor name -> hash, for the tensors of the checkpoint.
        limit: number of worker threads, and memory of their buffers.
    """
    twins = (*container.twins, *container.uncompared)
    comparable = [
        twin for twin in twins if (twin.first.dtype, twin.first.shape) == (twin.second.dtype, twin.second.shape)
    ]
    sides = list(dict.fromkeys(side for twin in comparable for side in (twin.first, twin.second)))
    unread = [side for side in sides if container.entries.get(side.name) != side]
    items = []
    for key, side in enumerate(unread):
        transfers = Source(replace(container, entries={side.name: side})).transfers(identity_target(side.name, side))
        items.append(Item(key, side.nbytes, transfers, NoExchange.ranks, NoExchange.ranks))
    hashing = HashingFiles(None, (), range(len(items)))
    Movement(items, container.storage, hashing, limit).move_local()
    hashes = {side: digests[side.name] for side in sides if side.name in digests}
    hashes |= {unread[key]: digest for key, digest in hashing.digests.items()}
    code: Code = "CORRUPT" if has_manifest(container) else "UNEQUAL_COPIES"
    hint = _AGAIN if has_manifest(container) else ""
    problems = [
        Refusal(code, f"{twin.why}\nbut their bytes differ", Where(_file_of(twin.second), twin.first.name), hint)
        for twin in comparable
        if hashes[twin.first] != hashes[twin.second]
    ]
    rest_of_twins = replace(container, twins=tuple(twin for twin in twins if twin not in comparable))
    checks = plan_twins(rest_of_twins, problems)
    problems.extend(compare_copies(checks, container.storage, limit))
    return problems, sum(side.nbytes for side in unread)


def _check_sums(container: Container, limit: Limits) -> list[Refusal]:
    """Check all checksums that the file format stores for byte ranges of its files."""
    witness = layer(container.storage, Witness)
    if witness is None:
        return []

    def settle(_: object, checksum: Checksum) -> None:
        witness.check_rest([checksum])

    run_workers(container.checksums, limit.jobs, lambda _: None, settle)
    return [witness.problem(checksum) for checksum in container.checksums if not witness.is_right(checksum)]


def _bytes_without_proof(container: Container) -> int:
    """Return the number of tensor bytes outside of all byte ranges that have a checksum."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for checksum in container.checksums:
        ranges.setdefault(checksum.file, []).append((checksum.offset, checksum.end))
    for file_ranges in ranges.values():
        file_ranges.sort()
    total = 0
    for entry in container.entries.values():
        for extent in entry.extents:
            covered = ranges.get(extent.file, [])
            index = bisect_right(covered, (extent.offset, sys.maxsize)) - 1
            if index < 0 or covered[index][1] <= extent.offset:
                total += nbytes(entry.dtype, extent.shape)
    return total


def _blocks(tensor: StoredTensor, worker: Worker) -> Iterator[memoryview]:
    """Read a tensor's bytes in order; to save memory, its transfers are computed only when it is read."""
    return worker.blocks(tensor.transfers(), tensor.nbytes)


def _refuse_unlisted(recorded: Collection[str], present: Collection[str]) -> Iterator[Refusal]:
    """Yield refusals of tensors that only the manifest lists, and of tensors that only the files contain."""
    for name in recorded:
        if name not in present:
            yield Refusal("MISSING_TENSOR", "the manifest lists this tensor; it is missing", Where(None, name))
    for name in present:
        if name not in recorded:
            yield Refusal("UNEXPECTED_TENSOR", "the manifest does not list this tensor", Where(None, name))


def _plain_numbers(container: Container) -> set[str]:
    """Return the names of training state that consists of plain numbers, which a manifest does not list."""
    entries = ((name, container.entries.get(name)) for name in container.beside)
    return {name for name, entry in entries if entry is not None and _file_of(entry) == NUMBERS}


def _file_of(entry: Entry | None) -> str | None:
    """Return the name of the file that contains a tensor; None if several files contain it."""
    files = {extent.file for extent in entry.extents} if entry is not None else set()
    return files.pop() if len(files) == 1 else None


def _check_record(where: Where, tensor: StoredTensor, digest: str, recorded: TensorRecord | None) -> Refusal | None:
    """Check one tensor against its record in the manifest."""
    if recorded is None:
        return None
    if (recorded.dtype, recorded.shape) != (tensor.dtype, tensor.shape):
        expected, actual = (f"{side.dtype} {list(side.shape)}" for side in (recorded, tensor))
        message = f"the manifest says {expected}, the file has {actual}"
        return Refusal("SHAPE_MISMATCH", message, where)
    if recorded.xxh3 != digest:
        return Refusal("CORRUPT", describe_change(recorded.xxh3, digest), where, _AGAIN)
    return None


def second_options(reading: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the user's options that also apply to the second checkpoint of a comparison."""
    return {name: value for name, value in reading.items() if name not in OF_FIRST}


@contextmanager
def _open_named(opening: AbstractContextManager[Checkpoint], source: CheckpointLike) -> Iterator[Checkpoint]:
    """Open one of two checkpoints, and report problems of its files with its path, so that users can tell the two
    apart.

    Args:
        opening: context that opens the checkpoint.
        source: the path of the checkpoint, or an open checkpoint, as given by the caller.

    Raises:
        TransaxleError: any error of `opening`.
    """
    with ExitStack() as stack:
        try:
            checkpoint = stack.enter_context(opening)
        except TransaxleError as error:
            if isinstance(source, Checkpoint):
                raise
            raise gathered(_with_path(refusal, Path(source)) for refusal in error.refusals) from error
        yield checkpoint


def _with_path(refusal: Refusal, path: Path) -> Refusal:
    # `Path.is_file` would raise an error for a path that cannot be examined; the refusal explains the problem better.
    file = refusal.where.file
    inside = path if file == path.name and os.path.isfile(path) else path / (file or "")  # noqa: PTH113
    is_known = file is not None and os.path.isfile(inside)  # noqa: PTH113
    return dataclasses.replace(refusal, where=Where(str(inside), refusal.where.tensor)) if is_known else refusal


@contextmanager
def open_pair(
    a: CheckpointLike, b: CheckpointLike, reading: Mapping[str, Any]
) -> Iterator[tuple[Checkpoint, Checkpoint]]:
    """Open two checkpoints. One of them may lack encoded tensors, a choice of weights, or optimizer state.

    Args:
        a: the path of the first checkpoint, or an open checkpoint.
        b: the path of the second checkpoint, or an open checkpoint.
        reading: options of `open_checkpoint`; if only `b` is a path, the options apply to `b`.

    Raises:
        TypeError: if options are given, but both checkpoints are already open.
        Refused: with code UNSUPPORTED, if weights are chosen, but neither checkpoint stores several kinds of weights;
            with code MISSING_TENSOR, if optimizer state is asked for, but neither checkpoint has it.
        UsageError: with code AMBIGUOUS, if tensors are to be decoded, but neither checkpoint has encoded tensors.
        TransaxleError: any error of `open_checkpoint`.
    """
    decode = reading.get("decode")
    first: Mapping[str, Any] = {} if isinstance(a, Checkpoint) and not isinstance(b, Checkpoint) else reading
    second: Mapping[str, Any] = {} if isinstance(b, Checkpoint) else second_options(reading)
    chosen = {name for name in OF_ONE if reading.get(name)}
    with_state = reading.get("optimizer") is True
    if chosen or with_state:
        first, second = ({**options, "lenient": True} if options else options for options in (first, second))
    with ExitStack() as stack:
        first_checkpoint, second_checkpoint = (
            stack.enter_context(_open_named(open_source(argument, source, options), source))
            for argument, source, options in (("a", a, first), ("b", b, second))
        )
        if chosen - {"decode"} and not any(
            has_choices(side.format)
            for side, options in ((first_checkpoint, first), (second_checkpoint, second))
            if options
        ):
            message = f"both store their weights once: {', '.join(sorted(chosen - {'decode'}))} has nothing to choose"
            raise refuse("UNSUPPORTED", message, hint="Omit --weights and --average-replicas (weights=, average=).")
        if with_state and not (first_checkpoint.has_state or second_checkpoint.has_state):
            raise refuse_stateless(first_checkpoint)
        if decode is not None and not (first_checkpoint.decoded or second_checkpoint.decoded):
            raise refuse_plain(decode)
        yield first_checkpoint, second_checkpoint
