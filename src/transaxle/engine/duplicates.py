"""Tensors that a checkpoint stores several times, and tensors whose values differ between dialects by some arithmetic.

**Copies**: tensors that are stored twice, and the proof that both copies are equal.

Ties, replicas along an axis in tensor names, and merged counters are one tensor stored at several places. Only one copy
is written to the target. So all other copies must prove equal to the written copy, bit by bit, before the target is
committed: a `Pair` reads or computes two tensors block by block, and compares them.

**Arithmetic between dialects**: a few tensors that one framework stores shifted, scaled or as an exponential.

The arithmetic between dialects rounds, so it is done only on request. If source and target use the same arithmetic,
nothing is computed.

**Averages**: replicas that differ between ranks can be replaced by their mean on request.

Each tensor-parallel rank updates its replica of a parameter by itself. If these replicas have become different, a
conversion refuses them. On request, the target gets the mean of all replicas, summed in float64 and rounded once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from transaxle.axes.layout.bind import WEIGHT, split_slot
from transaxle.axes.layout.relayout import Check, Target, identity_target, unlike
from transaxle.axes.notation.computed import AFFINE, AffineSteps, inverse, simplify
from transaxle.encodings.encoding import Error
from transaxle.encodings.value_steps import RecodedTensor
from transaxle.engine.source import Source
from transaxle.errors import Refusal, TransaxleError, Where, refuse
from transaxle.formats.catalog import BITS, Container, Entry, Extent, Twin, nbytes, numpy_dtype
from transaxle.move.transfer import Readable, Transfer
from transaxle.move.workers import (
    BLOCK,
    Limits,
    Progress,
    Task,
    Worker,
    block_ends,
    can_batch,
    group_tasks,
    is_whole,
    largest_first,
    new_steps,
    no_progress,
    run_workers,
)
from transaxle.spans import stage


class TensorPair(NamedTuple, Generic[Task]):
    """Two tensors of equal size that are to be compared with each other."""

    key: Task
    """Key of the pair, which identifies the pair in the result."""
    first: Sequence[Transfer]
    """Transfers of the first tensor, sorted by target offset."""
    second: Sequence[Transfer]
    """Transfers of the second tensor, sorted by target offset."""
    size: int
    """Size of each tensor in bytes."""


class Pair:
    """Two workers in one thread that produce two tensors side by side, with the memory limit of a single worker.

    Args:
        first: the source files of the first tensor.
        second: the source files of the second tensor.
        limit: the memory limit and number of threads of one worker.
        stop: event that is set when the work is cancelled.
    """

    def __init__(self, first: Readable, second: Readable, limit: Limits, stop: threading.Event) -> None:
        self._steps = new_steps(together=can_batch(first, second))
        self._workers = tuple(Worker(each, limit.half, stop, self._steps) for each in (first, second))

    def blocks(
        self, first: Sequence[Transfer], second: Sequence[Transfer], size: int, second_size: int | None = None
    ) -> Iterator[tuple[memoryview, memoryview]]:
        """Produce the bytes of two tensors with the same number of elements, in order, block by block.

        Args:
            first: transfers of the first tensor.
            second: transfers of the second tensor.
            size: size of the first tensor in bytes.
            second_size: size of the second tensor in bytes; None means the same as `size`.
        """
        first_worker, second_worker = self._workers
        sizes = size, size if second_size is None else second_size
        block_size = min(BLOCK, first_worker.capacity)
        # both blocks have the same number of elements, because element sizes are powers of 2
        lengths = [block_size * each // max(*sizes, 1) or 1 for each in sizes]
        yield from zip(
            first_worker.blocks(first, sizes[0], length=lengths[0]),
            second_worker.blocks(second, sizes[1], length=lengths[1]),
            strict=True,
        )

    def find_different(self, tensors: Iterable[TensorPair[Task]], progress: Progress = no_progress) -> set[Task]:
        """Compare pairs of tensors byte by byte, each pair at least up to its first differing block.

        Args:
            tensors: the pairs of tensors to compare.
            progress: function called with the number of bytes of each tensor that were just compared.

        Returns:
            The keys of the pairs whose tensors differ.
        """
        different: set[Task] = set()
        with self._steps as affine_steps:
            for tensor in tensors:
                self._compare(tensor, different, progress)
            affine_steps.run()
        return different

    def _compare(self, tensor: TensorPair[Task], different: set[Task], progress: Progress) -> None:
        """Queue the steps that compare two tensors; add the pair's key to `different` if the tensors differ."""
        key, first, second, size = tensor
        for first_block, second_block in self._note_blocks(first, second, size):
            self._steps.compare(first_block, second_block, partial(different.add, key))
            self._steps.then(partial(progress, len(first_block)))
            if key in different:
                break

    def _note_blocks(
        self, first: Sequence[Transfer], second: Sequence[Transfer], size: int
    ) -> Iterator[tuple[memoryview, memoryview]]:
        """Yield memory for blocks of two tensors; the workers' queued steps write the blocks into this memory when they
        run.
        """
        first_worker, second_worker = self._workers
        ends = block_ends(second if is_whole(first, size) else first, size, first_worker.capacity)
        sides = (
            worker.add_blocks(made_of, ends) for worker, made_of in ((first_worker, first), (second_worker, second))
        )
        for (_, first_block), (_, second_block) in zip(*sides, strict=True):
            yield first_block, second_block


_SIDES = ("first", "second")
_APART = (
    "Remove the outdated copy. If the two were trained separately, give a config in which they are not tied, "
    'with "tie_word_embeddings": false (--config FILE, config=).'
)
_DRIFTED = (
    "Ranks train their replicas independently: with --average-replicas (average=True), "
    "the mean of differing replicas is taken."
)
_DAMAGED = "One of the files is damaged, or belongs to a different save: copy the checkpoint again."


class PlannedCheck(msgspec.Struct, frozen=True, gc=False):
    """Two stored copies of one tensor that must be equal before the target is committed."""

    name: str
    """Stored name of the first copy, or name of the target tensor."""
    why: str
    """The table line, or another reason, why both tensors are copies of a single tensor."""
    nbytes: int
    """Size of each copy in bytes."""
    first: tuple[Transfer, ...]
    """Transfers that read the first copy."""
    second: tuple[Transfer, ...]
    """Transfers that read the second copy in the layout of the first copy."""
    rounded: tuple[str, str] | None = None
    """Dtypes of both copies, if the second copy is the first copy rounded to lower precision; otherwise None."""
    hint: str = ""
    """Advice for the user if the copies differ."""
    zero: bool = False
    """Whether the second copy stands for zeros only, so that the first copy must be zero everywhere."""

    @property
    def refusal(self) -> Refusal:
        """The refusal to report if the copies differ."""
        return unlike(self.name, self.why, self.hint, zero=self.zero)

    def as_json(self) -> dict[str, Any]:
        """Return the check as plain JSON data, in which every number is named by a key."""
        sides = {side: [each.as_json() for each in getattr(self, side)] for side in _SIDES}
        rounded = None if self.rounded is None else dict(zip(_SIDES, self.rounded, strict=True))
        return {"name": self.name, "why": self.why, "nbytes": self.nbytes, **sides, "rounded": rounded}


def plan_checks(source: Source, checks: Sequence[Check], problems: list[Refusal]) -> list[PlannedCheck]:
    """Plan the comparisons of stored copies; for each pair that cannot be compared, add a refusal to `problems`."""
    planned = []
    for check in checks:
        if check.first.dtype != check.second.dtype:
            message = f"{check.why}\nbut one is {check.first.dtype}, the other {check.second.dtype}"
            problems.append(Refusal("UNEQUAL_COPIES", message, Where(None, check.first.name), check.hint or _APART))
            continue
        try:
            first, second = (tuple(source.transfers(side)) for side in (check.first, check.second))
            size = nbytes(check.first.dtype, check.first.shape)
        except TransaxleError as error:
            problems.extend(error.refusals)
            continue
        hint = check.hint or _APART
        planned.append(PlannedCheck(check.first.name, check.why, size, first, second, None, hint, check.zero))
    return planned + plan_twins(source.container, problems)


def plan_twins(container: Container, problems: list[Refusal]) -> list[PlannedCheck]:
    """Plan the comparisons that the file format itself requires, such as of replicas on several ranks."""
    planned = []
    for twin in container.twins:
        first_entry, second_entry = twin.first, twin.second
        if first_entry.shape != second_entry.shape or (first_entry.dtype != second_entry.dtype and not twin.rounded):
            one, two = (f"{entry.dtype} {list(entry.shape)}" for entry in (first_entry, second_entry))
            difference = f"one is {one}, the other {two}"
            problems.append(
                Refusal("UNEQUAL_COPIES", f"{twin.why}\nbut {difference}", Where(None, first_entry.name), _DAMAGED)
            )
            continue
        try:
            first, second = (
                tuple(
                    Source(replace(container, entries={entry.name: entry})).transfers(
                        identity_target(entry.name, entry)
                    )
                )
                for entry in (first_entry, second_entry)
            )
        except TransaxleError as error:
            problems.extend(error.refusals)
            continue
        rounded = (
            (first_entry.dtype, second_entry.dtype)
            if twin.rounded and first_entry.dtype != second_entry.dtype
            else None
        )
        hint = _DRIFTED if twin.replica else _DAMAGED
        planned.append(PlannedCheck(first_entry.name, twin.why, first_entry.nbytes, first, second, rounded, hint))
    return planned


@stage("compare copies")
def compare_copies(checks: Sequence[PlannedCheck], reader: Readable, limit: Limits) -> list[Refusal]:
    """Compare stored copies, and return one refusal for each pair that differs."""
    if not checks:
        return []
    refusals: dict[int, Refusal] = {}

    def compare(pair: Pair, numbers: Sequence[int]) -> None:
        tensors = (
            TensorPair(number, checks[number].first, checks[number].second, checks[number].nbytes)
            for number in numbers
            if checks[number].rounded is None
        )
        for number in pair.find_different(tensors) | {
            each for each in numbers if _rounds_differently(pair, checks[each])
        }:
            refusals[number] = checks[number].refusal

    sizes = [(number, check.nbytes) for number, check in enumerate(checks)]
    fair = sum(size for _, size in sizes) // limit.jobs
    work = group_tasks(largest_first(sizes), batched=can_batch(reader), fair=fair)
    run_workers(work, limit.jobs, partial(Pair, reader, reader, limit), compare)
    return [refusals[number] for number in sorted(refusals)]


def _rounds_differently(pair: Pair, check: PlannedCheck) -> bool:
    """Return whether the second copy differs from the first copy rounded to lower precision, which it should equal."""
    if check.rounded is None:
        return False

    from transaxle.encodings.arithmetic.scaling import cast

    wide, narrow = check.rounded
    blocks = pair.blocks(check.first, check.second, check.nbytes, check.nbytes * BITS[narrow] // BITS[wide])
    return any(
        cast(np.frombuffer(wide_block, numpy_dtype(wide)), narrow).tobytes() != narrow_block.tobytes()
        for wide_block, narrow_block in blocks
    )


_REAL = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes that allow arithmetic between dialects; all other dtypes store codes or integers."""


def affine_steps(target: Target, *, allowed: bool) -> AffineSteps | None:
    """Return the arithmetic that turns source values into a target tensor's values; None if the values are the same.

    Raises:
        Refused: with code LOSSY, if arithmetic is needed but not allowed; with code UNSUPPORTED, if arithmetic is
            needed inside a fused tensor, for dtypes of codes or integers, or for optimizer state (where only a shift is
            possible).
    """
    changes: list[AffineSteps] = []
    for part in target.parts:
        before, after = (() if rule is None else rule.steps for rule in part.arithmetic)
        changes.append(() if before == after else simplify((*inverse(before), *after)))
    if split_slot(target.name)[1] != WEIGHT:
        # If a parameter is shifted, its gradients and moments do not change; a factor or an exponential would change
        # them.
        changes = [
            () if all(kind == AFFINE and scale == 1 for kind, scale, _ in change) else change for change in changes
        ]
        if any(changes):
            message = (
                f"{target.rule}\n{arithmetic_text(target)} would change the optimizer's state, and no rule says how"
            )
            raise refuse("UNSUPPORTED", message, tensor=target.name)
    if not any(changes):
        return None
    if len(changes) > 1:
        raise refuse(
            "UNSUPPORTED",
            f"{target.rule}\n{arithmetic_text(target)} inside a fused tensor is not supported",
            tensor=target.name,
        )
    if target.dtype not in _REAL:
        raise refuse(
            "UNSUPPORTED",
            f"{target.rule}\n{arithmetic_text(target)} on {target.dtype} values is not supported",
            tensor=target.name,
        )
    if not allowed:
        message = f"{target.rule}\nthe values are computed and rounded: {arithmetic_text(target)}"
        raise refuse("LOSSY", message, tensor=target.name, hint="Allow the rounding with --allow-lossy.")
    return changes[0]


def arithmetic_text(target: Target) -> str:
    """Return the arithmetic in a target tensor's table lines as text, as the tables write it."""
    texts = [rule.text for part in target.parts for rule in part.arithmetic if rule is not None]
    return " and ".join(dict.fromkeys(texts))


_LARGEST = 256 << 20
"""Size in bytes of the largest replica that can be averaged; it is limited because all replicas of a tensor are in
memory at once.
"""
_FILE = "\0mean of "
"""Prefix of the names of the virtual files that contain means."""


class Mean(msgspec.Struct, frozen=True):
    """The mean of the replicas of one tensor; a kind of `Computed` tensor."""

    entry: Entry
    """Catalog entry of the tensor whose replicas are averaged."""
    data: bytes
    """Bytes of the mean values."""
    error: Error
    """Error of all replicas together, compared with their mean."""

    @property
    def step(self) -> RecodedTensor:
        """The step that changes the tensor's values; see `Computed.step`."""
        return RecodedTensor(self.entry.name, "averaged", "", "", self.entry.dtype, self.entry.shape)

    @property
    def nbytes(self) -> int:
        """Size of the mean in bytes; see `Computed.nbytes`."""
        return len(self.data)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Copy bytes of the mean into `view`; see `Computed.read_into`."""
        view.cast("B")[:] = self.data[offset : offset + view.nbytes]

    def measure(self) -> tuple[Error, int]:
        """Return the error of the replicas, which is already known; see `Computed.measure`."""
        return self.error, 0


def average_replicas(container: Container) -> Container:
    """Return a container in which replicas that differ are replaced by their mean; equal replicas are compared as
    before.

    If replicas drifted apart, so did those that the conversion does not read (such as the module's weights, if it reads
    the optimizer's copies). These are therefore not compared any more.

    Raises:
        Refused: with code UNSUPPORTED, if replicas have more than 256 MiB, or a dtype that cannot be averaged.
    """
    replicas = _replicas(container)
    read = [pair for pairs in replicas.values() for pair in pairs]
    entries, twins = dict(container.entries), [twin for twin in container.twins if not twin.replica or twin in read]
    means: dict[str, Mean] = {}
    for name, pairs in replicas.items():
        copies = {copy.extents: copy for pair in pairs for copy in (pair.first, pair.second)}
        arrays = [_read(container, copy) for copy in copies.values()]
        if all(array.tobytes() == arrays[0].tobytes() for array in arrays):
            continue
        entry = entries[name]
        if entry.dtype not in _REAL or entry.nbytes > _LARGEST:
            message = f"the replicas differ, and a mean of {entry.nbytes} bytes of {entry.dtype} cannot be computed"
            raise refuse("UNSUPPORTED", message, tensor=name)
        mean = np.mean([array.astype(np.float64) for array in arrays], axis=0).astype(arrays[0].dtype)
        file = _FILE + name
        means[file] = Mean(entry, mean.tobytes(), sum((_error(array, mean) for array in arrays), Error()))
        extent = Extent((0,) * len(entry.shape), entry.shape, file, 0)
        entries[name] = Entry(name, entry.dtype, entry.shape, (extent,))
        twins = [twin for twin in twins if twin not in pairs]
    if not means:
        return replace(container, twins=tuple(twins))
    return container.with_computed(means, entries, twins=tuple(twins))


def _replicas(container: Container) -> dict[str, list[Twin]]:
    """Return tensor name -> pairs of its replicas, for each tensor that is whole on every rank.

    A pair belongs to a tensor if the pair's first copy and the tensor occupy the same byte ranges. The name alone does
    not decide this, because weights and moments of one parameter may have the same name in the pairs.
    """
    name_by_extents = {entry.extents: name for name, entry in container.entries.items()}
    replicas: dict[str, list[Twin]] = {}
    for twin in container.twins:
        name = name_by_extents.get(twin.first.extents)
        if twin.replica and name is not None:
            replicas.setdefault(name, []).append(twin)
    return replicas


def _read(container: Container, copy: Entry) -> npt.NDArray[np.generic]:
    octets = Source(container, {copy.name: copy}).read(copy.name)
    return octets.view(numpy_dtype(copy.dtype)).reshape(copy.shape)


def _error(copy: npt.NDArray[np.generic], mean: npt.NDArray[np.generic]) -> Error:

    apart = np.abs(copy.astype(np.float64) - mean.astype(np.float64))
    return Error(float(apart.max(initial=0.0)), float(np.square(apart).sum()), apart.size, int(np.count_nonzero(apart)))
