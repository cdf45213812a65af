"""What a checkpoint stores several times: proof that copies are equal, their mean, and what differs by arithmetic.

**Copies**: what a checkpoint stores twice, and the proof that both are equal.

Ties, replicas along a name axis and merged counters are one tensor stored in several places. Only one of them is
written to the target. So the others must prove equal, bit by bit, before anything is committed: a `Pair` reads two
tensors, or makes them otherwise, block by block, and compares them.

**Arithmetic between dialects**: the few tensors that one framework stores shifted, scaled or as an exponential.

It rounds, so it never runs unless asked for. Where source and target shift alike there is nothing to do.

**Averages**: replicas that ranks hold differently, taken as their mean where the user asks for it.

Tensor-parallel ranks update a replicated parameter each for itself. Where their copies have drifted apart, a conversion
refuses them; on request they are one tensor, the mean of all copies: summed in float64 and rounded once.
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


class Compared(NamedTuple, Generic[Task]):
    """Two tensors of as many bytes that are compared."""

    key: Task
    """What they are called."""
    first: Sequence[Transfer]
    """What fills the first, sorted by where it lands."""
    second: Sequence[Transfer]
    """What fills the second."""
    size: int
    """Bytes of each."""


class Pair:
    """Two workers in one thread that produce two tensors side by side, in the memory of one.

    Args:
        first: the source files of the first.
        second: those of the second.
        limit: what one worker would have.
        stop: set when the work is no longer wanted.
    """

    def __init__(self, first: Readable, second: Readable, limit: Limits, stop: threading.Event) -> None:
        self._steps = new_steps(together=can_batch(first, second))
        self._workers = tuple(Worker(each, limit.half, stop, self._steps) for each in (first, second))

    def blocks(
        self, first: Sequence[Transfer], second: Sequence[Transfer], size: int, other: int | None = None
    ) -> Iterator[tuple[memoryview, memoryview]]:
        """Produce two tensors of as many elements in order, block by block.

        Args:
            first: what fills the first.
            second: what fills the second.
            size: bytes of the first.
            other: bytes of the second; None: the same.
        """
        one, two = self._workers
        sizes = size, size if other is None else other
        most = min(BLOCK, one.capacity)
        lengths = [most * each // max(*sizes, 1) or 1 for each in sizes]  # as many elements: items are powers of two
        yield from zip(
            one.blocks(first, sizes[0], length=lengths[0]), two.blocks(second, sizes[1], length=lengths[1]), strict=True
        )

    def differing(self, tensors: Iterable[Compared[Task]], progress: Progress = no_progress) -> set[Task]:
        """Compare tensors byte by byte, each up to where it is found to differ, or a little further.

        Args:
            tensors: what is compared.
            progress: told the bytes of each that were just compared.

        Returns:
            the keys of those that differ.
        """
        found: set[Task] = set()
        with self._steps as steps:
            for tensor in tensors:
                self._compare(tensor, found, progress)
            steps.run()
        return found

    def _compare(self, tensor: Compared[Task], found: set[Task], progress: Progress) -> None:
        """List that two tensors are compared; the key is added to what is `found` where they differ."""
        key, first, second, size = tensor
        for one, other in self._noted(first, second, size):
            self._steps.compare(one, other, partial(found.add, key))
            self._steps.then(partial(progress, len(one)))
            if key in found:
                break

    def _noted(
        self, first: Sequence[Transfer], second: Sequence[Transfer], size: int
    ) -> Iterator[tuple[memoryview, memoryview]]:
        """Yield blocks with the bytes of two tensors, which are in them when the steps are carried out."""
        one, two = self._workers
        ends = block_ends(second if is_whole(first, size) else first, size, one.capacity)
        sides = (worker.add_blocks(made_of, ends) for worker, made_of in ((one, first), (two, second)))
        for (_, block), (_, other) in zip(*sides, strict=True):
            yield block, other


_SIDES = ("first", "second")
_APART = (
    "Remove the copy that is out of date; or, if both were trained apart, give a config that says so, as "
    '"tie_word_embeddings": false does (--config FILE, config=).'
)
_DRIFTED = (
    "Ranks train their replicas apart: take the mean of those that differ with --average-replicas (average=True)."
)
_DAMAGED = "One of the files is damaged, or of another save: copy the checkpoint again."


class PlannedCheck(msgspec.Struct, frozen=True, gc=False):
    """Two stored copies of one tensor that must be equal before the target is committed."""

    name: str
    """Stored name of the first, or that of the target they become."""
    why: str
    """The rule that says they are one."""
    nbytes: int
    """Bytes of each."""
    first: tuple[Transfer, ...]
    """Reads the first."""
    second: tuple[Transfer, ...]
    """Reads the second, in the first's layout."""
    rounded: tuple[str, str] | None = None
    """Dtypes of both, where the second is the first in lower precision."""
    hint: str = ""
    """What to do where they differ."""
    zero: bool = False
    """The second is zeros, as many as the first has elements."""

    @property
    def refusal(self) -> Refusal:
        """Why nothing may be committed, where they differ."""
        return unlike(self.name, self.why, self.hint, zero=self.zero)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data, with a name for each number."""
        sides = {side: [each.as_json() for each in getattr(self, side)] for side in _SIDES}
        rounded = None if self.rounded is None else dict(zip(_SIDES, self.rounded, strict=True))
        return {"name": self.name, "why": self.why, "nbytes": self.nbytes, **sides, "rounded": rounded}


def plan_checks(source: Source, checks: Sequence[Check], problems: list[Refusal]) -> list[PlannedCheck]:
    """Plan the comparisons of stored copies; what stands against them is added to `problems`."""
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
    """Plan the comparisons that the container itself asks for."""
    planned = []
    for twin in container.twins:
        one, other = twin.first, twin.second
        if one.shape != other.shape or (one.dtype != other.dtype and not twin.rounded):
            found = f"one is {one.dtype} {list(one.shape)}, the other {other.dtype} {list(other.shape)}"
            problems.append(Refusal("UNEQUAL_COPIES", f"{twin.why}\nbut {found}", Where(None, one.name), _DAMAGED))
            continue
        try:
            first, second = (
                tuple(
                    Source(replace(container, entries={entry.name: entry})).transfers(
                        identity_target(entry.name, entry)
                    )
                )
                for entry in (one, other)
            )
        except TransaxleError as error:
            problems.extend(error.refusals)
            continue
        rounded = (one.dtype, other.dtype) if twin.rounded and one.dtype != other.dtype else None
        hint = _DRIFTED if twin.replica else _DAMAGED
        planned.append(PlannedCheck(one.name, twin.why, one.nbytes, first, second, rounded, hint))
    return planned


@stage("compare copies")
def unequal(checks: Sequence[PlannedCheck], reader: Readable, limit: Limits) -> list[Refusal]:
    """Compare stored copies, and return a refusal for each pair that differs."""
    if not checks:
        return []
    found: dict[int, Refusal] = {}

    def compare(pair: Pair, some: Sequence[int]) -> None:
        tensors = (
            Compared(number, checks[number].first, checks[number].second, checks[number].nbytes)
            for number in some
            if checks[number].rounded is None
        )
        for number in pair.differing(tensors) | {each for each in some if _rounds_otherwise(pair, checks[each])}:
            found[number] = checks[number].refusal

    sizes = [(number, check.nbytes) for number, check in enumerate(checks)]
    fair = sum(size for _, size in sizes) // limit.jobs
    work = group_tasks(largest_first(sizes), batched=can_batch(reader), fair=fair)
    run_workers(work, limit.jobs, partial(Pair, reader, reader, limit), compare)
    return [found[number] for number in sorted(found)]


def _rounds_otherwise(pair: Pair, check: PlannedCheck) -> bool:
    """Tell whether one is the other in lower precision, and some of its values, rounded, are not that one's bits."""
    if check.rounded is None:
        return False

    from transaxle.encodings.arithmetic.scaling import cast

    wide, narrow = check.rounded
    blocks = pair.blocks(check.first, check.second, check.nbytes, check.nbytes * BITS[narrow] // BITS[wide])
    return any(
        cast(np.frombuffer(one, numpy_dtype(wide)), narrow).tobytes() != other.tobytes() for one, other in blocks
    )


_REAL = frozenset({"F64", "F32", "F16", "BF16"})
"""Types whose values stand for themselves; those of the others are codes, or no fractions."""


def steps(target: Target, *, allowed: bool) -> AffineSteps | None:
    """Return what happens to the values of a target tensor on their way; None where nothing does.

    Raises:
        Refused: LOSSY where something does and is not allowed; UNSUPPORTED inside a fused tensor, for types whose
            values are codes or integers, and for the optimizer state of a tensor that is more than shifted.
    """
    changes: list[AffineSteps] = []
    for part in target.parts:
        before, after = (() if rule is None else rule.steps for rule in part.arithmetic)
        changes.append(() if before == after else simplify((*inverse(before), *after)))
    if split_slot(target.name)[1] != WEIGHT:
        # A shift leaves gradients, and so the moments of the optimizer, as they are; nothing else does.
        changes = [
            () if all(kind == AFFINE and scale == 1 for kind, scale, _ in change) else change for change in changes
        ]
        if any(changes):
            message = f"{target.rule}\n{rules(target)} would change the optimizer's state, and no rule says how"
            raise refuse("UNSUPPORTED", message, tensor=target.name)
    if not any(changes):
        return None
    if len(changes) > 1:
        raise refuse(
            "UNSUPPORTED", f"{target.rule}\n{rules(target)} inside a fused tensor is not supported", tensor=target.name
        )
    if target.dtype not in _REAL:
        raise refuse(
            "UNSUPPORTED",
            f"{target.rule}\n{rules(target)} on {target.dtype} values is not supported",
            tensor=target.name,
        )
    if not allowed:
        message = f"{target.rule}\nthe values are computed and rounded: {rules(target)}"
        raise refuse("LOSSY", message, tensor=target.name, hint="Allow it with --allow-lossy.")
    return changes[0]


def rules(target: Target) -> str:
    """Return the arithmetic of a target's lines, as written in the tables."""
    found = [rule.text for part in target.parts for rule in part.arithmetic if rule is not None]
    return " and ".join(dict.fromkeys(found))


_LARGEST = 256 << 20
"""Bytes of a replica at most: all copies of one are in memory at once."""
_FILE = "\0mean of "
"""What the name of a file that does not exist begins with."""


class Mean(msgspec.Struct, frozen=True):
    """The mean of the replicas of one tensor; see `Computed`."""

    entry: Entry
    """The tensor."""
    data: bytes
    """Its values."""
    error: Error
    """How far the replicas are from it, all of them together."""

    @property
    def step(self) -> RecodedTensor:
        """See `Computed`."""
        return RecodedTensor(self.entry.name, "averaged", "", "", self.entry.dtype, self.entry.shape)

    @property
    def nbytes(self) -> int:
        """See `Computed`."""
        return len(self.data)

    def read_into(self, offset: int, view: memoryview) -> None:
        """See `Computed`."""
        view.cast("B")[:] = self.data[offset : offset + view.nbytes]

    def measure(self) -> tuple[Error, int]:
        """See `Computed`; nothing is read for it."""
        return self.error, 0


def averaged(container: Container) -> Container:
    """Return a container in which replicas that differ are one tensor, their mean; those that are equal stay checked.

    Replicas of what is not read (the module's weights beside the optimizer's, or the other way round) drift apart with
    those that are, and are compared no more.

    Raises:
        Refused: UNSUPPORTED for replicas of more than 256 MiB, or of numbers that have no mean.
    """
    replicas = _replicas(container)
    read = [pair for pairs in replicas.values() for pair in pairs]
    entries, twins = dict(container.entries), [twin for twin in container.twins if not twin.replica or twin in read]
    means: dict[str, Mean] = {}
    for name, pairs in replicas.items():
        copies = {copy.extents: copy for pair in pairs for copy in (pair.first, pair.second)}
        held = [_read(container, copy) for copy in copies.values()]
        if all(one.tobytes() == held[0].tobytes() for one in held):
            continue
        entry = entries[name]
        if entry.dtype not in _REAL or entry.nbytes > _LARGEST:
            message = f"the replicas differ, and a mean of {entry.nbytes} bytes of {entry.dtype} cannot be computed"
            raise refuse("UNSUPPORTED", message, tensor=name)
        mean = np.mean([one.astype(np.float64) for one in held], axis=0).astype(held[0].dtype)
        file = _FILE + name
        means[file] = Mean(entry, mean.tobytes(), sum((_error(one, mean) for one in held), Error()))
        extent = Extent((0,) * len(entry.shape), entry.shape, file, 0)
        entries[name] = Entry(name, entry.dtype, entry.shape, (extent,))
        twins = [twin for twin in twins if twin not in pairs]
    if not means:
        return replace(container, twins=tuple(twins))
    return container.recoded(means, entries, twins=tuple(twins))


def _replicas(container: Container) -> dict[str, list[Twin]]:
    """Return each tensor that ranks hold whole and alike, with the pairs that must be equal for that.

    A pair is of a tensor if it begins where that lies: weights and moments of one parameter have one name there.
    """
    lies = {entry.extents: name for name, entry in container.entries.items()}
    found: dict[str, list[Twin]] = {}
    for twin in container.twins:
        name = lies.get(twin.first.extents)
        if twin.replica and name is not None:
            found.setdefault(name, []).append(twin)
    return found


def _read(container: Container, copy: Entry) -> npt.NDArray[np.generic]:
    octets = Source(container, {copy.name: copy}).read(copy.name)
    return octets.view(numpy_dtype(copy.dtype)).reshape(copy.shape)


def _error(copy: npt.NDArray[np.generic], mean: npt.NDArray[np.generic]) -> Error:

    apart = np.abs(copy.astype(np.float64) - mean.astype(np.float64))
    return Error(float(apart.max(initial=0.0)), float(np.square(apart).sum()), apart.size, int(np.count_nonzero(apart)))
