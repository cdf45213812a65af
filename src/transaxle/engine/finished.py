"""What a plan's target holds when it is complete, and whether a place holds just that already.

An interrupted run may have died after the rename: whoever resumes it finds a target that is there. It is left alone if
every byte is what would be written, and refused like any other existing target if not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import xxhash

from transaxle.engine.copies import unequal
from transaxle.engine.manifest import FileRecord, Manifest, TensorRecord, digest, encode
from transaxle.engine.plan import PlannedTensor, Prepared
from transaxle.engine.produce import Limits, Pair, Progress, share
from transaxle.engine.transfer import Transfer
from transaxle.formats.catalog import Fragment
from transaxle.formats.company import MANIFEST, WHOLE
from transaxle.formats.local import LocalStorage
from transaxle.formats.storage import Storage


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
    files = {name: _record(plan.files[name], fragments) for name, fragments in known.items()}
    files |= {name: FileRecord(plan.files[name], plan.files[name], carried[name]) for name in plan.carried}
    return Manifest(
        format=plan.format,
        family=plan.family,
        dialect=plan.dialect,
        axes=plan.axes,
        aliases=plan.aliases,
        files=files,
        tensors={
            tensor.name: TensorRecord(tensor.dtype, tensor.shape, tensors[tensor.name]) for tensor in plan.tensors
        },
    )


def _record(size: int, fragments: Sequence[Fragment]) -> FileRecord:
    """Return the record of a file whose bytes outside of tensors are these."""
    known = b"".join(fragment.data for fragment in sorted(fragments, key=lambda fragment: fragment.offset))
    return FileRecord(size, len(known), digest(known))


def is_finished(prepared: Prepared, target: str, limit: Limits, progress: Progress) -> bool:
    """Tell whether a target exists and is, byte for byte, what a plan would write.

    Raises:
        TransaxleError: what reading the source or the target raises.
    """
    path = Path(target)
    if not path.is_dir() and not (path.is_file() and target.endswith(WHOLE)):
        return False
    storage = LocalStorage(target)
    try:
        if not _alike(prepared, storage) or unequal(prepared.plan.checks, _source(prepared), limit):
            return False
        return _same_bytes(prepared, storage, limit, progress)
    finally:
        storage.close()


def _source(prepared: Prepared) -> Storage:
    return prepared.checkpoint.container.storage


def _alike(prepared: Prepared, storage: LocalStorage) -> bool:
    """Compare the names, the sizes and the headers."""
    plan, single = prepared.plan, storage.single
    if single is None:
        if set(storage.names()) != {*plan.files, MANIFEST}:
            return False
        sizes = plan.files
    else:
        if len(prepared.draft.files) != 1:
            return False
        sizes = dict(zip([single], prepared.draft.files.values(), strict=True))
    if any(storage.size(name) != size for name, size in sizes.items()):
        return False
    return all(
        storage.read(single or fragment.file, fragment.offset, len(fragment.data)) == fragment.data
        for fragment in prepared.draft.fragments
    )


def _same_bytes(prepared: Prepared, storage: LocalStorage, limit: Limits, progress: Progress) -> bool:
    """Produce every tensor and every carried file once more, and compare; then the manifest."""
    plan, single = prepared.plan, storage.single
    pairs = partial(Pair, _source(prepared), storage, limit)
    differing: list[str] = []

    def compared(items: Sequence[PlannedTensor]) -> dict[str, str]:
        hashes: dict[str, str] = {}

        def compare(pair: Pair, item: PlannedTensor) -> None:
            hashed = xxhash.xxh3_128()
            there = [Transfer(single or run.file, run.source, run.target, run.width) for run in item.places]
            for mine, theirs in pair.blocks(item.transfers, there, item.nbytes, item.dtype, item.arithmetic):
                if differing or mine != theirs:
                    differing.append(item.name)
                    return
                hashed.update(mine)
                progress(len(mine))
            hashes[item.name] = hashed.hexdigest()

        share(items, limit.jobs, pairs, compare)
        return hashes

    tensors = compared(plan.tensors)
    carried = compared(() if single else plan.carried_files)
    if differing or single:
        return not differing
    text = encode(manifest_of(prepared, tensors, carried))
    return storage.size(MANIFEST) == len(text) and storage.read(MANIFEST, 0, len(text)) == text
