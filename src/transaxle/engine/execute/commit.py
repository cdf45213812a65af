"""What a checkpoint holds beside its tensors: bytes known beforehand, those known when all tensors are, the manifest.

Conversions and saves write them here; the manifest comes last, and then the staging is committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import UNSET

from transaxle.engine.checkpoint.manifest import IN_SPANS, FileRecord, Manifest, TensorRecord, encode
from transaxle.engine.plan.conversion import Prepared
from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.catalog import Fragment
from transaxle.formats.registry import MANIFEST
from transaxle.formats.storage.storage import unpinned
from transaxle.move.hashing import digest, span_ends
from transaxle.spans import stage

if TYPE_CHECKING:
    from transaxle.formats.staging.location import Stage


_BETWEEN = "it changed between two reads: its digest precedes it in the file, and both are read"
_AGAIN = "Write it again while nothing changes it, or write a folder, whose digests come last."


def write_known(stage: Stage, fragments: Iterable[Fragment]) -> None:
    """Write bytes that are known."""
    for fragment in fragments:
        stage.pwrite(fragment.file, fragment.offset, memoryview(fragment.data))


def carry(prepared: Prepared, stage: Stage) -> dict[str, str]:
    """Write the carried files, small ones, each at once; return their hashes."""
    storage = prepared.checkpoint.container.storage
    found = {}
    for name in prepared.plan.carried:
        data = storage.read(name, 0, storage.size(name))
        stage.pwrite(name, 0, memoryview(data))
        found[name] = digest(data)
    return found


@stage("write index and manifest")
def write_rest(
    stage: Stage,
    prepared: Prepared,
    tensors: Mapping[str, str],
    carried: Mapping[str, str],
    *,
    foretold: Mapping[str, str] | None = None,
) -> None:
    """Write what is known when all tensors are: the rest of their files, and in a folder the manifest.

    Args:
        stage: where to.
        prepared: the plan.
        tensors: hash of every tensor.
        carried: hash of every carried file.
        foretold: hashes of the tensors that their files, which are complete, have of an earlier read.

    Raises:
        Refused: CORRUPT where those are not what was written.
    """
    changed = [name for name, xxh3 in (foretold or {}).items() if tensors[name] != xxh3]
    if changed:
        raise gathered([Refusal("CORRUPT", _BETWEEN, Where(None, name), _AGAIN) for name in changed])
    if foretold is None:
        write_known(stage, prepared.draft.late(tensors))
    if stage.single is None:
        stage.write(MANIFEST, encode(manifest_of(prepared, tensors, carried)))


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
        source=UNSET if unpinned(plan.source) == plan.source else plan.source,
    )


def _record(size: int, fragments: Sequence[Fragment]) -> FileRecord:
    """Return the record of a file whose bytes outside of tensors are these."""
    known = b"".join(fragment.data for fragment in sorted(fragments, key=lambda fragment: fragment.offset))
    return FileRecord(size, len(known), digest(known))
