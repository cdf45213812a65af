"""Verification: a checkpoint held against its own manifest, byte by byte, or against another checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import xxhash

from transaxle.engine.checkpoint import Checkpoint, StoredTensor
from transaxle.engine.compare import Comparison, Difference, compare
from transaxle.engine.manifest import TensorRecord, load, stale
from transaxle.engine.produce import Limits, Progress, Worker, limits, share, unwatched
from transaxle.errors import Refusal, Where
from transaxle.formats.catalog import Checksum
from transaxle.formats.company import MANIFEST
from transaxle.formats.witness import witness_of


@dataclass(frozen=True)
class Verification:
    """What a checkpoint was held against, and what is wrong with it. It is true where all is well."""

    tensors: int
    """Tensors read."""
    parameters: int
    """Elements read."""
    bytes_read: int
    """Bytes read."""
    against: str
    """`manifest`; `structure`, where there is no manifest; `checkpoint`, where a second one was named."""
    problems: tuple[Refusal, ...] = ()
    """Everything that is wrong."""
    extra: tuple[str, ...] = ()
    """Files in the folder that the manifest does not list; nothing is known of them."""
    comparison: Comparison | None = None
    """What the two have in common and where they differ; None where no second checkpoint was named."""

    @property
    def ok(self) -> bool:
        """The verdict: nothing is wrong, and nothing differs."""
        return not self.problems and (self.comparison is None or self.comparison.equal)

    @property
    def equal(self) -> bool:
        """The verdict, under the name that reads well for two checkpoints."""
        return self.ok

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What differs between two checkpoints, by name; nothing where no second one was named."""
        return () if self.comparison is None else self.comparison.differences

    def __bool__(self) -> bool:
        """Return the verdict, so that `assert tx.verify(a, b)` is what it says."""
        return self.ok

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        return {
            "ok": self.ok,
            "tensors": self.tensors,
            "parameters": self.parameters,
            "bytes_read": self.bytes_read,
            "against": self.against,
            "problems": [problem.as_json() for problem in self.problems],
            "extra": list(self.extra),
            "comparison": None if self.comparison is None else self.comparison.as_json(),
        }


def verify_against(
    first: Checkpoint, second: Checkpoint, limit: Limits | None = None, progress: Progress = unwatched
) -> Verification:
    """Hold two checkpoints against each other, in whatever formats and dialects they are.

    Raises:
        TransaxleError: where the first cannot be expressed in the second one's dialect.
    """
    found = compare(first, second, limit=limit, progress=progress)
    return Verification(
        sum(found.compared.values()), found.parameters, found.bytes_read, "checkpoint", comparison=found
    )


def verify(checkpoint: Checkpoint, limit: Limits | None = None, progress: Progress = unwatched) -> Verification:
    """Hold a checkpoint against its manifest: every file, every tensor, every byte.

    Without a manifest the tensors are read once, which proves the catalog and that every byte can be read. Checksums
    that the format itself keeps are checked in any case.

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
    damaged: dict[str, Refusal] = {}

    def check(worker: Worker, name: str) -> None:
        tensor = stored[name]
        hashed = xxhash.xxh3_128()
        for block in worker.blocks(tensor.transfers(), tensor.nbytes):
            hashed.update(block)
            progress(len(block))
        problem = _held(name, tensor, hashed.hexdigest(), recorded.get(name))
        if problem is not None:
            damaged[name] = problem

    witness = witness_of(container.storage)

    def settle(_: object, checksum: Checksum) -> None:
        assert witness is not None
        witness.settle([checksum])

    limit = limit or limits()
    workers = partial(Worker, container.storage, limit)
    share(stored, limit.jobs, workers, check)
    if witness is not None:
        share(container.checksums, limit.jobs, lambda _: None, settle)
        problems.extend(witness.problem(each) for each in container.checksums if not witness.is_right(each))
    return Verification(
        len(stored),
        stored.parameters,
        sum(tensor.nbytes for tensor in stored.values()),
        "structure" if manifest is None else "manifest",
        (*problems, *(damaged[name] for name in stored if name in damaged)),
        extra,
    )


def _listed(recorded: Collection[str], present: Collection[str]) -> Iterator[Refusal]:
    """Yield the tensors that only the manifest or only the files know."""
    for name in recorded:
        if name not in present:
            yield Refusal("MISSING_TENSOR", "the manifest lists it", Where(None, name))
    for name in present:
        if name not in recorded:
            yield Refusal("UNEXPECTED_TENSOR", "the manifest does not list it", Where(None, name))


def _held(name: str, tensor: StoredTensor, digest: str, recorded: TensorRecord | None) -> Refusal | None:
    """Hold one tensor against its record."""
    if recorded is None:
        return None
    if (recorded.dtype, recorded.shape) != (tensor.dtype, tensor.shape):
        said, found = (f"{side.dtype} {list(side.shape)}" for side in (recorded, tensor))
        message = f"the manifest says {said}, the file {found}"
        return Refusal("SHAPE_MISMATCH", message, Where(None, name))
    if recorded.xxh3 != digest:
        return Refusal("CORRUPT", "its bytes were changed after it was written", Where(None, name))
    return None
