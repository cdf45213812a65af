"""Verification: a checkpoint checked against its own manifest, byte by byte, or against another checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor
from transaxle.engine.checkpoint.manifest import IN_SPANS, TensorRecord, has_manifest, load, stale
from transaxle.engine.compare.compare import Comparison, Difference, compare
from transaxle.engine.number_text import notebook, plural, size
from transaxle.errors import Refusal, Where
from transaxle.formats.catalog.catalog import Checksum, Container
from transaxle.formats.catalog.checksums import Witness
from transaxle.formats.catalog.seal import Seal, read_digest, rest_of
from transaxle.formats.catalog.sidecar_files import MANIFEST
from transaxle.formats.storage.storage import layer
from transaxle.move.hashing import WHOLE, HashingFiles, span_ends
from transaxle.move.mover import Movement
from transaxle.move.runs import Item
from transaxle.move.transport import Alone
from transaxle.move.workers import Limits, Progress, Worker, limits, share, unwatched
from transaxle.spans import stage

_SHOWN = 3
"""Problems that a printed verification shows."""
_WELL = {"manifest": "intact", "digests": "intact", "structure": "sound, the data is unchecked"}
_CHANGED = "the bytes were changed after they were written"
_AGAIN = "Copy the file again from where it is intact, or write the checkpoint again."


@dataclass(frozen=True, repr=False)
class Verification:
    """The result of a verification. True if all is well."""

    tensors: int
    """Tensors read."""
    parameters: int
    """Elements read."""
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
        return f"against the {self.against}: {_WELL[self.against]}, {amount}"

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
            "comparison": None if self.comparison is None else self.comparison.as_json(),
        }


def verify_against(
    first: Checkpoint, second: Checkpoint, limit: Limits | None = None, progress: Progress = unwatched
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
def verify(checkpoint: Checkpoint, limit: Limits | None = None, progress: Progress = unwatched) -> Verification:
    """Hold a checkpoint against its manifest: every file, every tensor, every byte.

    One file that is a checkpoint by itself is held against the digests in it, where it was written with them. Without
    either the tensors are read once, which proves the catalog and that every byte can be read. Checksums that the
    format itself keeps are checked in any case.

    Raises:
        Refused: CORRUPT where the manifest itself is damaged.
    """
    stored = (checkpoint.undecoded or checkpoint).stored
    container = stored.container
    manifest = load(container)
    recorded: Mapping[str, TensorRecord] = {}
    problems: list[Refusal] = []
    extra: tuple[str, ...] = ()
    if manifest is not None:
        recorded = manifest.tensors
        problems.extend(stale(manifest, container))
        problems.extend(_listed(recorded.keys() - container.left.keys(), stored.keys()))
        extra = tuple(name for name in container.storage.names() if name not in manifest.files and name != MANIFEST)
    sealed: dict[str, tuple[Seal, int]] = {}
    for seal in container.seals:
        problems.extend(_check_rest(seal, container))
        sealed.update(_sealed(seal, container))
    damaged: dict[str, Refusal] = {}

    names = list(stored)

    def check(key: int, digest: str) -> None:
        name, tensor = names[key], stored[names[key]]
        problem = _check_record(Where(_file_of(name, container), name), tensor, digest, recorded.get(name))
        if problem is None and name in sealed and tensor.nbytes:
            seal, place = sealed[name]
            if read_digest(container.storage, seal, place) != digest:
                problem = Refusal("CORRUPT", _CHANGED, Where(seal.file, name), _AGAIN)
        damaged.pop(name, None)
        if problem is not None:
            damaged[name] = problem

    witness = layer(container.storage, Witness)

    def settle(_: object, checksum: Checksum) -> None:
        assert witness is not None
        witness.settle([checksum])

    limit = limit or limits()
    items = [
        Item(key, tensor.nbytes, (), Alone.ranks, Alone.ranks, blocks=partial(_blocks, tensor))
        for key, tensor in enumerate(stored.values())
    ]
    hashing = HashingFiles(None, (), range(len(items)), progress, check)
    Movement(items, container.storage, hashing, limit).move_own()
    large = [items[key] for key, name in enumerate(names) if name in damaged and len(span_ends(items[key].size)) > 1]
    if large and (manifest is None or manifest.transaxle < IN_SPANS):  # an older program hashed them from end to end
        hashing = HashingFiles(None, (), range(len(items)), finish=check, span_size=WHOLE)
        Movement(large, container.storage, hashing, limit).move_own()
    if witness is not None:
        share(container.checksums, limit.jobs, lambda _: None, settle)
        problems.extend(witness.problem(checksum) for checksum in container.checksums if not witness.is_right(checksum))
    return Verification(
        len(stored),
        stored.parameters,
        sum(tensor.nbytes for tensor in stored.values()),
        _against(container),
        (*problems, *(damaged[name] for name in stored if name in damaged)),
        extra,
    )


def has_hashes(container: Container) -> bool:
    """Tell whether something beside the tensors says what their bytes were: a manifest, or digests in their file."""
    return _against(container) != "structure"


def _blocks(tensor: StoredTensor, worker: Worker) -> Iterator[memoryview]:
    """Read a tensor in order; of many tensors, what they are made of is found out one by one."""
    return worker.blocks(tensor.transfers(), tensor.nbytes)


def _against(container: Container) -> str:
    """Return what all of the tensors' bytes were checked against."""
    if has_manifest(container):
        return "manifest"
    files = {extent.file for entry in container.entries.values() for extent in entry.extents}
    return "digests" if container.seals and files <= {seal.file for seal in container.seals} else "structure"


def _ranges(file: str, container: Container) -> Iterator[tuple[str, int, int]]:
    """Yield the tensors of a sealed file that have bytes: name, first byte, and the one after the last."""
    for name, entry in (*container.entries.items(), *container.left.items()):
        if entry.nbytes and entry.extents[0].file == file:
            begin = entry.extents[0].offset
            yield name, begin, begin + entry.nbytes


def _sealed(seal: Seal, container: Container) -> Iterator[tuple[str, tuple[Seal, int]]]:
    """Yield the tensors of a file that keeps digests, each with the place of its digest."""
    for name, begin, _ in _ranges(seal.file, container):
        if begin in seal.places:
            yield name, (seal, seal.places[begin])


def _check_rest(seal: Seal, container: Container) -> Iterator[Refusal]:
    """Check the bytes outside the tensors of a file against their digest, and that every tensor has a digest."""
    ranges = list(_ranges(seal.file, container))
    if {begin for _, begin, _ in ranges} != seal.places.keys():
        yield Refusal("CORRUPT", "the number of digests is not the number of tensors", Where(seal.file))
    digest = rest_of(container.storage, seal, ((begin, end) for _, begin, end in ranges))
    if digest != read_digest(container.storage, seal, seal.head):
        yield Refusal("CORRUPT", "the header, or other bytes around the tensors, were changed", Where(seal.file))


def _listed(recorded: Collection[str], present: Collection[str]) -> Iterator[Refusal]:
    """Yield the tensors that only the manifest or only the files know."""
    for name in recorded:
        if name not in present:
            yield Refusal("MISSING_TENSOR", "the manifest lists this tensor; it is missing", Where(None, name))
    for name in present:
        if name not in recorded:
            yield Refusal("UNEXPECTED_TENSOR", "the manifest does not list this tensor", Where(None, name))


def _file_of(name: str, container: Container) -> str | None:
    """Return the file that holds a tensor; None where it is one of several."""
    entry = container.entries.get(name)
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
        return Refusal("CORRUPT", _CHANGED, where, _AGAIN)
    return None
