"""Reads a written target back, and compares it with the plan byte for byte, or with its manifest and its source.

If a run is interrupted after its last step, the rename to the final name, a resumed run finds a complete target. The
resumed run accepts that target if every byte is as planned; otherwise it refuses the target, like any existing target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transaxle.encodings.encoding import Error
from transaxle.engine.carry import items_of, manifest_of, measure_amaxes
from transaxle.engine.checkpoint.checkpoint import Checkpoint, open_checkpoint
from transaxle.engine.checkpoint.manifest import encode
from transaxle.engine.compare import Comparison, Difference, compare
from transaxle.engine.duplicates import compare_copies
from transaxle.engine.plan.conversion import Prepared
from transaxle.engine.plan.planned import PlannedTensor
from transaxle.engine.verification import Verification, verify
from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.catalog import Fragment
from transaxle.formats.registry import MANIFEST, is_one_file
from transaxle.formats.storage.copier import READING, Steps, same_bytes
from transaxle.formats.storage.storage import Storage, walk_files
from transaxle.formats.store.staging import storage_at, takes_parts
from transaxle.move.journal import WHOLE, HashingFiles
from transaxle.move.mover import Movement
from transaxle.move.workers import Limits, Progress, StoppedError, Worker, limits, no_progress

_MODEL_OPTIONS = ("config", "axes", "rules")
"""Options used to open the source that describe the model, and are therefore used to open the result too."""
ProgressContext = Callable[[int, str], AbstractContextManager[Progress]]
"""A function from the total bytes and the name of a task to a context that shows the task's progress."""


@contextmanager
def _no_progress(_total: int, _label: str) -> Iterator[Progress]:
    yield no_progress


def read_back(
    prepared: Prepared,
    target: str,
    reading: Mapping[str, Any],
    limit: Limits,
    watching: ProgressContext = _no_progress,
) -> Verification:
    """Check a written checkpoint against its manifest and against the source; encoded tensors are encoded again for
    this.

    Args:
        prepared: the plan that was executed.
        target: path of the written checkpoint.
        reading: options with which the source was opened.
        limit: number of worker threads, and memory of their buffers.
        watching: function that returns a context which shows the progress of a task.
    """
    with open_checkpoint(target, **_result(prepared, target, reading)) as written:
        with watching(written.container.nbytes, "verifying") as progress:
            verification = verify(written, limit, progress)
        with watching(written.container.nbytes, "comparing") as progress:
            if prepared.plan.band:
                return replace(verification, comparison=compare_with_plan(prepared, written, limit, progress))
            return replace(
                verification, comparison=compare(prepared.checkpoint, written, limit=limit, progress=progress)
            )


def _result(prepared: Prepared, target: str, reading: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with which the written checkpoint is opened, so that it is read as the plan describes it.

    A target folder has a manifest and a config. A target file has no manifest and no config, and its tensor names may
    fit several families.
    """
    shared_options = {name: reading[name] for name in _MODEL_OPTIONS if reading.get(name)}
    plan = prepared.plan
    if plan.family is None or not is_one_file(target) or Path(target).is_dir():
        return shared_options
    axes = {**plan.axes, **shared_options.get("axes", {})}
    config = prepared.checkpoint.config or None
    return {**shared_options, "family": plan.family, "dialect": plan.dialect, "config": config, "axes": axes}


def check_saved(target: str) -> Verification:
    """Check a saved checkpoint against the hashes that were computed from the tensors in memory when it was written.

    Raises:
        Refused: with code CORRUPT, and every problem that was found.
    """
    with open_checkpoint(target) as written:
        verification = verify(written, limits(), no_progress)
    refuse_unequal(verification, target)
    return verification


def refuse_unequal(verification: Verification, target: str) -> None:
    """Raise an error if a verification found problems or differences.

    Raises:
        Refused: with code CORRUPT, and every problem and every tensor that differs from the source.
    """
    hint = "The checkpoint was written, but is wrong. Check memory and disk, and convert again with overwrite=True."
    differing = (
        Refusal("CORRUPT", f"it is not what the source has: {each.detail or each.kind}", Where(target, each.name), hint)
        for each in verification.differences
    )
    if not verification.ok:
        raise gathered([*verification.problems, *differing])


def is_finished(prepared: Prepared, target: str, limit: Limits, progress: Progress, errors: dict[str, Error]) -> bool:
    """Return whether a target exists and has, byte for byte, the planned content.

    Args:
        prepared: the plan with its open source and the layout of its target files.
        target: path of the target, or URL of an existing target.
        limit: number of worker threads, and memory of their buffers.
        progress: function called with the number of bytes of each compared block.
        errors: dict into which the rounding error of each encoded tensor is written, by tensor name.

    Raises:
        TransaxleError: any error of reading the source or the target.
    """
    path = Path(target)
    if not takes_parts(target) and not path.is_dir() and not (path.is_file() and is_one_file(target)):
        return False
    storage = storage_at(target)
    try:
        if not _has_planned_files(prepared, storage) or compare_copies(prepared.plan.checks, _source(prepared), limit):
            return False
        return _same_bytes(prepared, storage, limit, progress, errors)
    finally:
        storage.close()


def _source(prepared: Prepared) -> Storage:
    return prepared.checkpoint.container.storage


def _has_planned_files(prepared: Prepared, storage: Storage) -> bool:
    """Return whether the names, sizes and headers of the target's files are as planned."""
    plan, single = prepared.plan, storage.single
    if single is None:
        if set(walk_files(storage)) != {*plan.files, MANIFEST}:
            return False
        sizes = plan.files
    else:
        if len(prepared.draft.files) != 1:
            return False
        sizes = dict(zip([single], prepared.draft.files.values(), strict=True))
    if any(storage.size(name) != size for name, size in sizes.items()):
        return False
    return all(_has_fragment(storage, fragment) for fragment in prepared.draft.early_fragments())


def _has_fragment(storage: Storage, fragment: Fragment) -> bool:
    file = storage.single or fragment.file
    return storage.read(file, fragment.offset, len(fragment.data)) == fragment.data


def _same_bytes(
    prepared: Prepared, storage: Storage, limit: Limits, progress: Progress, errors: dict[str, Error]
) -> bool:
    """Produce every tensor and copied file again and compare them with the target; then compare the target's manifest
    with the planned manifest.
    """
    plan, single = prepared.plan, storage.single
    tensors = _compare_tensors(prepared, plan.tensors, storage, limit, progress, errors)
    if tensors is None:
        return False
    if single:
        return all(_has_fragment(storage, fragment) for fragment in prepared.draft.late_fragments(tensors))
    carried = _compare_tensors(prepared, plan.carried_files, storage, limit, progress, errors, span_size=WHOLE)
    if carried is None:
        return False
    text = encode(manifest_of(prepared, tensors, carried))
    return storage.size(MANIFEST) == len(text) and storage.read(MANIFEST, 0, len(text)) == text


def _compare_tensors(
    prepared: Prepared,
    items: Sequence[PlannedTensor],
    storage: Storage,
    limit: Limits,
    progress: Progress,
    errors: dict[str, Error],
    differing: list[str] | None = None,
    span_size: int | None = None,
) -> dict[str, str] | None:
    """Produce planned tensors again from the source, and compare them with the stored tensors.

    Args:
        prepared: the plan with its open source and the layout of its target files.
        items: the planned tensors to compare.
        storage: the written files.
        limit: number of worker threads, and memory of their buffers.
        progress: function called with the number of bytes of each compared block.
        errors: dict into which the rounding error of each encoded tensor is written, by tensor name.
        differing: list to which the names of tensors that differ are added; None means to stop at the first difference.
        span_size: number of bytes that are hashed together; None means `SPAN`.

    Returns:
        Tensor name -> hash; None instead of the dict if a tensor differs.
    """
    workers = partial(Worker, _source(prepared), limit)
    errors_by_name: dict[str, Error] = {}
    sink = _ComparingSink(storage, items, progress, first_only=differing is None, span_size=span_size)
    work = items_of(items, measure_amaxes(items, limit, workers), errors_by_name)
    Movement(work, _source(prepared), sink, limit).move_local()
    for item in items:
        if item.codes_of is not None:
            errors[item.codes_of] = errors_by_name.get(item.name, Error())
    if differing is not None:
        differing.extend(sink.wrong)
    return None if sink.wrong else {items[key].name: digest for key, digest in sink.digests.items()}


class _ComparingSink(HashingFiles):
    """A sink (receiver of tensor bytes) that compares the bytes with existing files instead of writing them.

    Args:
        storage: the existing files.
        tensors: the tensors whose bytes the sink receives.
        progress: function called with the number of bytes of each compared block.
        first_only: whether to stop at the first difference.
        span_size: number of bytes that are hashed together; None means `SPAN`.
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
        # a comparison needs the bytes of each step immediately, not gathered with the bytes of later steps
        self.batches_steps = False
        self.wrong: dict[str, None] = {}
        """Names of tensors that differ."""
        self._storage = storage
        self._tensors = tensors
        self._first_only = first_only

    def add_take(self, steps: Steps, key: int, start: int, data: memoryview) -> None:
        """Queue a step that compares a block of a tensor with the stored bytes; see `Sink.add_take`."""
        steps.call(partial(self._look, key, start, data), READING)
        super().add_take(steps, key, start, data)

    def _look(self, key: int, start: int, data: memoryview) -> None:
        """Compare a block of a planned tensor with the stored bytes."""
        if self.wrong and self._first_only:
            raise StoppedError
        tensor, storage = self._tensors[key], self._storage
        if tensor.name in self.wrong:
            return
        for file, offset, part in self.locate(key, start, data):
            if not same_bytes(storage.read(storage.single or file, offset, len(part)), part):
                self.wrong[tensor.name] = None
                return


def compare_with_plan(prepared: Prepared, written: Checkpoint, limit: Limits, progress: Progress) -> Comparison:
    """Compare a written checkpoint with the tensors of the plan, which are produced (and encoded) again from the
    source.
    """
    plan, differing = prepared.plan, list[str]()
    _compare_tensors(
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
