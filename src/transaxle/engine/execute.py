"""Execution: carries a plan out, and commits the result whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from transaxle.engine.copies import unequal
from transaxle.engine.finished import is_finished, manifest_of
from transaxle.engine.journal import Journal
from transaxle.engine.manifest import digest, encode
from transaxle.engine.plan import Plan, PlannedTensor, Prepared, ready
from transaxle.engine.portions import in_turn, portions
from transaxle.engine.produce import Limits, Progress, Worker, limits, share, unwatched
from transaxle.engine.transfer import landing
from transaxle.errors import gathered, refuse
from transaxle.formats.company import MANIFEST
from transaxle.formats.local import LocalStorage
from transaxle.formats.location import Stage, staging_at
from transaxle.formats.url import is_url, shown

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

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        data = asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in data.items()}


def execute(
    prepared: Prepared,
    target: str,
    *,
    overwrite: bool = False,
    resume: bool = False,
    sync: bool = True,
    limit: Limits | None = None,
    progress: Progress = unwatched,
) -> Report:
    """Carry a plan out.

    Args:
        prepared: from `make_plan`.
        target: folder, or one file (`.safetensors`, `.bin`, `.pt`, `.pth`); it must not exist unless `overwrite`.
        overwrite: replace a checkpoint; the old one stays readable until the new one is complete.
        resume: continue an interrupted run of the same plan; a target that is just what it would write is left alone.
        sync: make everything durable before the rename.
        limit: workers and memory.
        progress: told the bytes of each block written.

    Raises:
        TransaxleError: every refusal of the plan, before anything is written; UNEQUAL_COPIES where copies differ;
            CORRUPT where the source was changed meanwhile; EXISTS, IO, NO_SPACE. Whatever is raised, the target is as
            it was.
    """
    plan = ready(prepared)
    limit = limit or limits()
    begin = time.monotonic()
    _refuse_around(prepared.checkpoint.path, target)
    if resume and not overwrite and is_finished(prepared, target, limit, progress):
        resumed, single = len(plan.tensors), not Path(target).is_dir()
    else:
        with staging_at(target, overwrite=overwrite, resume=resume, sync=sync) as staging:
            single = staging.single is not None
            resumed = _write(prepared, staging, limit, progress)
            staging.commit()
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
    )


def _refuse_around(source: str, target: str) -> None:
    """Refuse a local target that contains the source: replacing it would delete what is read, and what lies beside."""
    if is_url(source) or is_url(target):
        return
    if Path(target).resolve() in Path(source).resolve().parents:
        hint = "Choose another place."
        raise refuse("EXISTS", f"the source {source} lies inside of it and would be deleted", file=target, hint=hint)


def _write(prepared: Prepared, staging: Stage, limit: Limits, progress: Progress) -> int:
    """Write everything but the commit; return how many tensors an earlier run had finished."""
    plan, storage = prepared.plan, prepared.checkpoint.container.storage
    single = staging.single is not None
    state = _state(prepared)
    kept = staging.prepare(prepared.draft.files if single else plan.files)
    for fragment in prepared.draft.fragments:
        staging.pwrite(fragment.file, fragment.offset, memoryview(fragment.data))
    differing = unequal(plan.checks, storage, limit)
    if differing:
        raise gathered(differing)
    tensors, carried = dict[str, str](), dict[str, str]()
    journal = Journal(staging.scratch, _key(plan, state))

    def copy(worker: Worker, item: PlannedTensor, progress: Progress) -> str:
        hashed = xxhash.xxh3_128()
        blocks = worker.blocks(item.transfers, item.nbytes, dtype=item.dtype, arithmetic=item.arithmetic)
        for file, offset, part in landing(blocks, item.places):
            staging.pwrite(file, offset, part)
            hashed.update(part)
            progress(len(part))
        return hashed.hexdigest()

    def write(worker: Worker, tensor: PlannedTensor) -> None:
        tensors[tensor.name] = copy(worker, tensor, progress)
        journal.add(tensor.name, tensors[tensor.name])

    def carry(worker: Worker, file: PlannedTensor) -> None:
        carried[file.name] = copy(worker, file, unwatched)

    try:
        tensors.update(_still_there(staging, plan, journal.finished, kept))
        todo = [tensor for tensor in plan.tensors if tensor.name not in tensors]
        resumed = len(plan.tensors) - len(todo)
        progress(sum(tensor.nbytes for tensor in plan.tensors) - sum(tensor.nbytes for tensor in todo))
        workers = partial(Worker, storage, limit)
        share(portions(todo, ordered=staging.ordered), limit.jobs, workers, in_turn(write))
        share(() if single else plan.carried_files, limit.jobs, workers, carry)
    finally:
        journal.close()
    storage.recheck()
    if not single:
        staging.write(MANIFEST, encode(manifest_of(prepared, tensors, carried)))
    return resumed


def _state(prepared: Prepared) -> str:
    """Return a text that changes when a file of the source does."""
    storage = prepared.checkpoint.container.storage
    names = (*prepared.checkpoint.container.files, *prepared.plan.carried)
    return "".join(f"{name} {storage.version(name)}\n" for name in names)


def _key(plan: Plan, state: str) -> str:
    """Return a hash of what a plan does and of the files it reads: a journal of anything else is not continued."""
    what = msgspec.json.encode(msgspec.structs.replace(plan, refusals=(), source=""))
    return digest(what + state.encode())


def _still_there(staging: Stage, plan: Plan, recorded: Mapping[str, str], kept: frozenset[str]) -> dict[str, str]:
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
                if hashed.hexdigest() == recorded[tensor.name]:
                    found[tensor.name] = recorded[tensor.name]
    finally:
        storage.close()
    return found
