"""Copies: what a checkpoint stores twice, and the proof that both are equal.

Ties, replicas along a name axis and merged counters are one tensor stored in several places. Only one of them is
written to the target. So the others must prove equal, bit by bit, before anything is committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from transaxle.axes.layout.relayout import Check, unchanged, unlike
from transaxle.engine.copying.side_by_side import Compared, Pair
from transaxle.engine.copying.source import Source
from transaxle.errors import Refusal, TransaxleError, Where
from transaxle.formats.catalog import Container
from transaxle.formats.dtype import BITS, nbytes, numpy_dtype
from transaxle.move.endpoint import Readable
from transaxle.move.transfer import Transfer
from transaxle.move.workers import Limits, are_noted, grouped, largest_first, share
from transaxle.spans import stage

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
                tuple(Source(replace(container, entries={entry.name: entry})).transfers(unchanged(entry.name, entry)))
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
    work = grouped(largest_first(sizes), noted=are_noted(reader), fair=fair)
    share(work, limit.jobs, partial(Pair, reader, reader, limit), compare)
    return [found[number] for number in sorted(found)]


def _rounds_otherwise(pair: Pair, check: PlannedCheck) -> bool:
    """Tell whether one is the other in lower precision, and some of its values, rounded, are not that one's bits."""
    if check.rounded is None:
        return False
    import numpy as np

    from transaxle.encodings.arithmetic.casting import cast

    wide, narrow = check.rounded
    blocks = pair.blocks(check.first, check.second, check.nbytes, check.nbytes * BITS[narrow] // BITS[wide])
    return any(
        cast(np.frombuffer(one, numpy_dtype(wide)), narrow).tobytes() != other.tobytes() for one, other in blocks
    )
