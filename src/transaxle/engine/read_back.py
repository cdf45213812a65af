"""A target read back: whether it is what a plan writes, byte for byte, or what its manifest and its source say.

An interrupted run may have died after the rename: whoever resumes it finds a target that is there. It is left alone if
every byte is what would be written, and refused like any other existing target if not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transaxle.encodings.encoding import Error
from transaxle.engine.carry import items_of, manifest_of, measured_sizes
from transaxle.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from transaxle.engine.checkpoint.manifest import encode
from transaxle.engine.compare import Comparison, Difference, compare
from transaxle.engine.duplicates import unequal
from transaxle.engine.plan.conversion import Prepared
from transaxle.engine.plan.planned import PlannedTensor
from transaxle.engine.verification import Verification, verify
from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.catalog import Fragment
from transaxle.formats.registry import MANIFEST, is_one_file
from transaxle.formats.storage.copier import READING, Steps, same_bytes
from transaxle.formats.storage.storage import Storage, files_in
from transaxle.formats.store.staging import storage_at, takes_parts
from transaxle.move.journal import WHOLE, HashingFiles
from transaxle.move.mover import Movement
from transaxle.move.workers import Limits, Progress, StoppedError, Worker, limits, no_progress

_OF_RESULT = ("config", "axes", "rules")
"""Options of reading the source that say what the model is, and so hold for what was made of it."""
Watching = Callable[[int, str], AbstractContextManager[Progress]]
"""Gives what is told the bytes of a task, by their number and the task's name."""


@contextmanager
def _nobody(_total: int, _label: str) -> Iterator[Progress]:
    yield no_progress


def read_back(
    prepared: Prepared,
    target: str,
    reading: Mapping[str, Any],
    limit: Limits,
    watching: Watching = _nobody,
) -> Verification:
    """Check what was written against its manifest and the source; what was encoded is encoded again for comparison.

    Args:
        prepared: the plan that was carried out.
        target: where the checkpoint is.
        reading: how the source was opened.
        limit: workers and memory.
        watching: shows progress.
    """
    with open_checkpoint(target, **_result(prepared, target, reading)) as written:
        with watching(written.container.nbytes, "verifying") as progress:
            found = verify(written, limit, progress)
        with watching(written.container.nbytes, "comparing") as progress:
            if prepared.plan.band:
                return replace(found, comparison=reproduced(prepared, written, limit, progress))
            return replace(found, comparison=compare(prepared.checkpoint, written, limit=limit, progress=progress))


def _result(prepared: Prepared, target: str, reading: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that open what was written as what the plan says it is.

    A folder says so itself, by its manifest and its config. One file does not: its names alone may fit several tables.
    """
    said = {name: reading[name] for name in _OF_RESULT if reading.get(name)}
    plan = prepared.plan
    if plan.family is None or not is_one_file(target) or Path(target).is_dir():
        return said
    axes = {**plan.axes, **said.get("axes", {})}
    config = prepared.checkpoint.config or None
    return {**said, "family": plan.family, "dialect": plan.dialect, "config": config, "axes": axes}


def check_saved(target: str) -> Verification:
    """Check what was saved against the hashes that were taken of memory while it was written.

    Raises:
        Refused: CORRUPT with every problem.
    """
    with open_checkpoint(target) as written:
        found = verify(written, limits(), no_progress)
    refuse_unequal(found, target)
    return found


def refuse_unequal(found: Verification, target: str) -> None:
    """Raise what a verification has found.

    Raises:
        Refused: CORRUPT with every problem, and every tensor that is not what the source has.
    """
    hint = "The checkpoint is there, and is wrong. Check memory and disk, and convert again with overwrite=True."
    differing = (
        Refusal("CORRUPT", f"it is not what the source has: {each.detail or each.kind}", Where(target, each.name), hint)
        for each in found.differences
    )
    if not found.ok:
        raise gathered([*found.problems, *differing])


def is_finished(prepared: Prepared, target: str, limit: Limits, progress: Progress, errors: dict[str, Error]) -> bool:
    """Tell whether a target exists and is, byte for byte, what a plan would write.

    Args:
        prepared: the plan.
        target: where it may be; what a URL denotes must be there.
        limit: workers and memory.
        progress: told the bytes of each block compared.
        errors: gets how far each tensor is that is encoded, by table name.

    Raises:
        TransaxleError: what reading the source or the target raises.
    """
    path = Path(target)
    if not takes_parts(target) and not path.is_dir() and not (path.is_file() and is_one_file(target)):
        return False
    storage = storage_at(target)
    try:
        if not _alike(prepared, storage) or unequal(prepared.plan.checks, _source(prepared), limit):
            return False
        return _same_bytes(prepared, storage, limit, progress, errors)
    finally:
        storage.close()


def _source(prepared: Prepared) -> Storage:
    return prepared.checkpoint.container.storage


def _alike(prepared: Prepared, storage: Storage) -> bool:
    """Compare the names, the sizes and the headers."""
    plan, single = prepared.plan, storage.single
    if single is None:
        if set(files_in(storage)) != {*plan.files, MANIFEST}:
            return False
        sizes = plan.files
    else:
        if len(prepared.draft.files) != 1:
            return False
        sizes = dict(zip([single], prepared.draft.files.values(), strict=True))
    if any(storage.size(name) != size for name, size in sizes.items()):
        return False
    return all(_holds(storage, fragment) for fragment in prepared.draft.early())


def _holds(storage: Storage, fragment: Fragment) -> bool:
    file = storage.single or fragment.file
    return storage.read(file, fragment.offset, len(fragment.data)) == fragment.data


def _same_bytes(
    prepared: Prepared, storage: Storage, limit: Limits, progress: Progress, errors: dict[str, Error]
) -> bool:
    """Produce every tensor and every carried file once more, and compare; then the manifest."""
    plan, single = prepared.plan, storage.single
    tensors = _compared(prepared, plan.tensors, storage, limit, progress, errors)
    if tensors is None:
        return False
    if single:
        return all(_holds(storage, fragment) for fragment in prepared.draft.late(tensors))
    carried = _compared(prepared, plan.carried_files, storage, limit, progress, errors, span_size=WHOLE)
    if carried is None:
        return False
    text = encode(manifest_of(prepared, tensors, carried))
    return storage.size(MANIFEST) == len(text) and storage.read(MANIFEST, 0, len(text)) == text


def _compared(
    prepared: Prepared,
    items: Sequence[PlannedTensor],
    storage: Storage,
    limit: Limits,
    progress: Progress,
    errors: dict[str, Error],
    differing: list[str] | None = None,
    span_size: int | None = None,
) -> dict[str, str] | None:
    """Produce tensors once more, and compare them with what is stored.

    Args:
        prepared: the plan.
        items: tensors of it.
        storage: what was written.
        limit: workers and memory.
        progress: told the bytes of each block compared.
        errors: gets how far each tensor is that is encoded, by table name.
        differing: gets the names of those that differ; None: the first one ends it.
        span_size: bytes of the spans in which they are hashed; None: `SPAN`.

    Returns:
        The hash of each; None where one differs.
    """
    workers = partial(Worker, _source(prepared), limit)
    found: dict[str, Error] = {}
    sink = _Written(storage, items, progress, first_only=differing is None, span_size=span_size)
    moved = items_of(items, measured_sizes(items, limit, workers), found)
    Movement(moved, _source(prepared), sink, limit).move_local()
    for item in items:
        if item.codes_of is not None:
            errors[item.codes_of] = found.get(item.name, Error())
    if differing is not None:
        differing.extend(sink.wrong)
    return None if sink.wrong else {items[key].name: digest for key, digest in sink.digests.items()}


class _Written(HashingFiles):
    """Files that hold what is produced, or something else: nothing is written, all is compared.

    Args:
        storage: the files.
        tensors: what they should hold.
        progress: told the bytes of each block compared.
        first_only: let the first difference end it.
        span_size: bytes of the spans in which they are hashed; None: `SPAN`.
    """

    def __init__(
        self,
        storage: Storage,
        tensors: Sequence[PlannedTensor],
        progress: Progress,
        *,
        first_only: bool,
        span_size: int | None,
    ) -> None:
        places = [tensor.everywhere for tensor in tensors]
        super().__init__(None, places, range(len(tensors)), progress, span_size=span_size)
        self.batches_steps = False  # what is compared is looked at here
        self.wrong: dict[str, None] = {}
        """Names of tensors that differ."""
        self._storage = storage
        self._tensors = tensors
        self._first_only = first_only

    def add_take(self, steps: Steps, key: int, start: int, data: memoryview) -> None:
        """See `Sink`."""
        steps.call(partial(self._look, key, start, data), READING)
        super().add_take(steps, key, start, data)

    def _look(self, key: int, start: int, data: memoryview) -> None:
        """Compare bytes of an item with those that are there."""
        if self.wrong and self._first_only:
            raise StoppedError
        tensor, storage = self._tensors[key], self._storage
        if tensor.name in self.wrong:
            return
        for file, offset, part in self.locate(key, start, data):
            if not same_bytes(storage.read(storage.single or file, offset, len(part)), part):
                self.wrong[tensor.name] = None
                return


def reproduced(prepared: Prepared, written: Checkpoint, limit: Limits, progress: Progress) -> Comparison:
    """Compare what was written with what the plan gives when its tensors are produced, and encoded, once more."""
    plan, differing = prepared.plan, list[str]()
    _compared(
        prepared, plan.tensors, written.container.storage, limit.with_min_block(plan.band), progress, {}, differing
    )
    return Comparison(
        first=prepared.checkpoint.path,
        second=written.path,
        dialect=plan.dialect,
        stored=(len(plan.tensors), len(written)),
        compared={"": len(plan.tensors) - len(differing)},
        parameters=prepared.checkpoint.parameters,
        bytes_read=plan.bytes_read + sum(tensor.nbytes for tensor in plan.tensors),
        differences=tuple(
            Difference(name, "", "values", "the tensor is not what the source gives when it is encoded")
            for name in sorted(differing)
        ),
    )
