"""Whether a checkpoint is what it was: against its manifest, or against another one.

**Verification**: a checkpoint checked against its own manifest, byte by byte, or against another checkpoint.

Two checkpoints to be compared, opened together: what is said of both, and what of the first one only.
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
from transaxle.engine.checkpoint.checkpoint import Checkpoint, CheckpointLike, StoredTensor, opened, stateless
from transaxle.engine.checkpoint.manifest import (
    CHANGED,
    IN_SPANS,
    TensorRecord,
    against,
    check_rest,
    has_hashes,
    has_manifest,
    load,
    sealed,
    stale,
)
from transaxle.engine.compare import Comparison, Difference, compare
from transaxle.engine.duplicates import plan_twins, unequal
from transaxle.engine.source import Source
from transaxle.engine.views.encoded import nothing_encoded
from transaxle.engine.wording import notebook, plural, size
from transaxle.errors import Code, Refusal, TransaxleError, Where, gathered, refuse
from transaxle.formats.catalog import NUMBERS, Checksum, Container, Entry, Seal, nbytes, read_digest
from transaxle.formats.checksums import Witness
from transaxle.formats.detect import has_choices
from transaxle.formats.registry import MANIFEST
from transaxle.formats.storage.storage import files_in, layer
from transaxle.move.journal import WHOLE, HashingFiles, span_ends
from transaxle.move.mover import Movement
from transaxle.move.transfer import NoExchange
from transaxle.move.workers import Item, Limits, Progress, Worker, limits, no_progress, run_workers
from transaxle.options import OF_FIRST, OF_ONE
from transaxle.spans import stage

_SHOWN = 3
"""Problems that a printed verification shows."""
_NO_DAMAGE = frozenset({"UNSUPPORTED", "UNSAFE_PICKLE"})
"""Codes of optimizer state that is not read, whether or not it is intact."""
_WELL = {"manifest": "intact", "digests": "intact"}
_AGAIN = "Copy the file again from where it is intact, or write the checkpoint again."


@dataclass(frozen=True, repr=False)
class Verification:
    """The result of a verification. True if all is well."""

    tensors: int
    """Tensors read."""
    parameters: int
    """Elements of the model; of two checkpoints, elements compared."""
    bytes_read: int
    """Bytes read."""
    against: str
    """`manifest`; `digests`, which a single file contains; `structure` if there is neither, so that the data itself is
    unproved; `checkpoint` if a second one was given.
    """
    problems: tuple[Refusal, ...] = ()
    """Everything that is wrong."""
    unlisted: tuple[str, ...] = ()
    """Files in the folder that the manifest does not list; they are not checked."""
    comparison: Comparison | None = None
    """The comparison with the second checkpoint; None without one."""
    unproved: int = 0
    """Bytes of tensors of which nothing records what they were: neither a hash nor a checksum of the format."""

    @property
    def ok(self) -> bool:
        """The verdict: no problems and no differences."""
        return not self.problems and (self.comparison is None or self.comparison.equal)

    @property
    def equal(self) -> bool:
        """The same verdict, under a name that suits two checkpoints."""
        return self.ok

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Differences between two checkpoints, by name; empty without a second one."""
        return () if self.comparison is None else self.comparison.differences

    def __bool__(self) -> bool:
        """Return the verdict, so that `assert tx.verify(a, b)` is what it says."""
        return self.ok

    def __repr__(self) -> str:
        return f"<verification {self.verdict}>"

    def __str__(self) -> str:
        """Return what `print` shows: the verdict, and the first problems or differences."""
        if self.comparison is not None:
            return str(self.comparison)
        lines = [self.verdict, *(f"  {line}" for each in self.problems[:_SHOWN] for line in str(each).splitlines())]
        more = len(self.problems) - _SHOWN
        return "\n".join([*lines, *([f"  … and {more:,} more: .problems"] if more > 0 else [])])

    def _repr_html_(self) -> str:
        return notebook(str(self))

    @property
    def verdict(self) -> str:
        """What came out, in a few words."""
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
        """Return it as plain JSON data."""
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
        TransaxleError: where the first cannot be expressed in the second one's dialect.
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
    """Hold a checkpoint against its manifest: every file, every tensor, every copy, every byte.

    One file that is a checkpoint by itself is held against the digests in it, where it was written with them. Without
    either the tensors are read once, which proves the catalog and that every byte can be read. Checksums that the
    format itself keeps are checked in any case, and so is that copies are equal which must be.

    Raises:
        Refused: CORRUPT where the manifest itself is damaged.
    """
    stored = _everything((checkpoint.undecoded or checkpoint).stored)
    container, limit = stored.container, limit or limits()
    manifest = load(container)
    recorded: Mapping[str, TensorRecord] = {}
    problems = [refusal for refusal in container.unread if refusal.code not in _NO_DAMAGE]
    extra: tuple[str, ...] = ()
    if manifest is not None:
        recorded = manifest.tensors
        problems.extend(stale(manifest, container))
        plain = _plain_items(container) - recorded.keys()
        problems.extend(_listed(recorded, dict.fromkeys(name for name in stored if name not in plain)))
        there = () if container.storage.single else files_in(container.storage)
        extra = tuple(name for name in there if name not in manifest.files and name != MANIFEST)
    places: dict[str, tuple[Seal, int]] = {}
    for seal in container.seals:
        problems.extend(check_rest(seal, container))
        places.update((name, (seal, place)) for name, place in sealed(seal, container))
    damaged: dict[str, Refusal] = {}
    digests: dict[str, str] = {}

    names = list(stored)

    def check(key: int, digest: str) -> None:
        name, tensor = names[key], stored[names[key]]
        digests.setdefault(name, digest)
        problem = _check_record(Where(_file_of(container.entries.get(name)), name), tensor, digest, recorded.get(name))
        if problem is None and name in places and tensor.nbytes:
            seal, place = places[name]
            if read_digest(container.storage, seal, place) != digest:
                problem = Refusal("CORRUPT", CHANGED, Where(seal.file, name), _AGAIN)
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
    if large and (manifest is None or manifest.transaxle < IN_SPANS):  # an older program hashed them from end to end
        hashing = HashingFiles(None, (), range(len(items)), finish=check, span_size=WHOLE)
        Movement(large, container.storage, hashing, limit).move_local()
    unlike, copied = _check_copies(container, digests, limit)
    problems.extend(each for each in unlike if each.where.tensor not in damaged)
    problems.extend(_check_sums(container, limit))
    return Verification(
        len(stored),
        stored.parameters,
        sum(tensor.nbytes for tensor in stored.values()) + copied,
        against(container),
        (*problems, *(damaged[name] for name in stored if name in damaged)),
        extra,
        unproved=0 if has_hashes(container) else _without_checksum(container),
    )


def _everything(stored: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the tensors that were left out when it was opened: a verdict is on all bytes."""
    container = stored.container
    if not container.left:
        return stored
    container = replace(container, entries={**container.left, **container.entries}, left={})
    return Checkpoint(container, stored.settings, None, None)


def _check_copies(container: Container, digests: Mapping[str, str], limit: Limits) -> tuple[list[Refusal], int]:
    """Check that the copies of tensors are equal to them, wanted or not; return also the bytes that this has read.

    Args:
        container: the checkpoint.
        digests: hashes of its tensors.
        limit: workers and memory.
    """
    twins = (*container.twins, *container.uncompared)
    alike = [twin for twin in twins if (twin.first.dtype, twin.first.shape) == (twin.second.dtype, twin.second.shape)]
    sides = list(dict.fromkeys(side for twin in alike for side in (twin.first, twin.second)))
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
        for twin in alike
        if hashes[twin.first] != hashes[twin.second]
    ]
    others = replace(container, twins=tuple(twin for twin in twins if twin not in alike))
    checks = plan_twins(others, problems)
    problems.extend(unequal(checks, container.storage, limit))
    return problems, sum(side.nbytes for side in unread)


def _check_sums(container: Container, limit: Limits) -> list[Refusal]:
    """Check the checksums of all ranges that have one."""
    witness = layer(container.storage, Witness)
    if witness is None:
        return []

    def settle(_: object, checksum: Checksum) -> None:
        witness.settle([checksum])

    run_workers(container.checksums, limit.jobs, lambda _: None, settle)
    return [witness.problem(checksum) for checksum in container.checksums if not witness.is_right(checksum)]


def _without_checksum(container: Container) -> int:
    """Return the bytes of tensors that lie in no range with a checksum."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for checksum in container.checksums:
        ranges.setdefault(checksum.file, []).append((checksum.offset, checksum.end))
    for each in ranges.values():
        each.sort()
    total = 0
    for entry in container.entries.values():
        for extent in entry.extents:
            known = ranges.get(extent.file, [])
            at = bisect_right(known, (extent.offset, sys.maxsize)) - 1
            if at < 0 or known[at][1] <= extent.offset:
                total += nbytes(entry.dtype, extent.shape)
    return total


def _blocks(tensor: StoredTensor, worker: Worker) -> Iterator[memoryview]:
    """Read a tensor in order; of many tensors, what they are made of is found out one by one."""
    return worker.blocks(tensor.transfers(), tensor.nbytes)


def _listed(recorded: Collection[str], present: Collection[str]) -> Iterator[Refusal]:
    """Yield the tensors that only the manifest or only the files know."""
    for name in recorded:
        if name not in present:
            yield Refusal("MISSING_TENSOR", "the manifest lists this tensor; it is missing", Where(None, name))
    for name in present:
        if name not in recorded:
            yield Refusal("UNEXPECTED_TENSOR", "the manifest does not list this tensor", Where(None, name))


def _plain_items(container: Container) -> set[str]:
    """Return the numbers of training state that are items of their own: a manifest lists tensors alone."""
    entries = ((name, container.entries.get(name)) for name in container.beside)
    return {name for name, entry in entries if entry is not None and _file_of(entry) == NUMBERS}


def _file_of(entry: Entry | None) -> str | None:
    """Return the file that holds a tensor; None where it is one of several."""
    files = {extent.file for extent in entry.extents} if entry is not None else set()
    return files.pop() if len(files) == 1 else None


def _check_record(where: Where, tensor: StoredTensor, digest: str, recorded: TensorRecord | None) -> Refusal | None:
    """Check one tensor against its record."""
    if recorded is None:
        return None
    if (recorded.dtype, recorded.shape) != (tensor.dtype, tensor.shape):
        expected, actual = (f"{side.dtype} {list(side.shape)}" for side in (recorded, tensor))
        message = f"the manifest says {expected}, the file has {actual}"
        return Refusal("SHAPE_MISMATCH", message, where)
    if recorded.xxh3 != digest:
        return Refusal("CORRUPT", CHANGED, where, _AGAIN)
    return None


def of_second(reading: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that also hold for the second checkpoint of a comparison."""
    return {name: value for name, value in reading.items() if name not in OF_FIRST}


@contextmanager
def _named(opening: AbstractContextManager[Checkpoint], source: CheckpointLike) -> Iterator[Checkpoint]:
    """Give one of two checkpoints; what is wrong with its files is said with its path, which tells it from the other.

    Args:
        opening: opens it.
        source: its path, or the opened checkpoint.

    Raises:
        TransaxleError: what `opening` raises.
    """
    with ExitStack() as stack:
        try:
            checkpoint = stack.enter_context(opening)
        except TransaxleError as error:
            if isinstance(source, Checkpoint):
                raise
            raise gathered(_placed(refusal, Path(source)) for refusal in error.refusals) from error
        yield checkpoint


def _placed(refusal: Refusal, path: Path) -> Refusal:
    # Of a path that cannot be examined, the refusal says why: `Path.is_file` would raise.
    file = refusal.where.file
    inside = path if file == path.name and os.path.isfile(path) else path / (file or "")  # noqa: PTH113
    known = file is not None and os.path.isfile(inside)  # noqa: PTH113
    return dataclasses.replace(refusal, where=Where(str(inside), refusal.where.tensor)) if known else refusal


@contextmanager
def opened_pair(
    a: CheckpointLike, b: CheckpointLike, reading: Mapping[str, Any]
) -> Iterator[tuple[Checkpoint, Checkpoint]]:
    """Give two checkpoints; one of them may have nothing to decode, no weights to choose, and no optimizer state.

    Args:
        a: a path, or an opened checkpoint.
        b: likewise.
        reading: options of `open_checkpoint`; where only `b` is a path, they are said of that.

    Raises:
        TypeError: there are options, and `a` and `b` are both open already.
        Refused: UNSUPPORTED where neither stores weights twice, and some are chosen; MISSING_TENSOR where neither has
            the optimizer's state that is asked for.
        UsageError: AMBIGUOUS where tensors are to be decoded, and neither has anything encoded.
        TransaxleError: what `open_checkpoint` raises.
    """
    decode = reading.get("decode")
    first: Mapping[str, Any] = {} if isinstance(a, Checkpoint) and not isinstance(b, Checkpoint) else reading
    second: Mapping[str, Any] = {} if isinstance(b, Checkpoint) else of_second(reading)
    chosen = {name for name in OF_ONE if reading.get(name)}
    with_state = reading.get("optimizer") is True
    if chosen or with_state:
        first, second = ({**options, "lenient": True} if options else options for options in (first, second))
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(_named(opened(argument, source, options), source))
            for argument, source, options in (("a", a, first), ("b", b, second))
        )
        if chosen - {"decode"} and not any(
            has_choices(side.format) for side, options in ((one, first), (two, second)) if options
        ):
            message = f"both store their weights once: {', '.join(sorted(chosen - {'decode'}))} has nothing to choose"
            raise refuse("UNSUPPORTED", message, hint="Omit --weights and --average-replicas (weights=, average=).")
        if with_state and not (one.has_state or two.has_state):
            raise stateless(one)
        if decode is not None and not (one.decoded or two.decoded):
            raise nothing_encoded(decode)
        yield one, two
