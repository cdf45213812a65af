"""Comparison of two checkpoints, bit by bit, across formats and dialects."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from transaxle.engine.checkpoint import Checkpoint, StoredTensor
from transaxle.engine.copies import plan_checks, unequal
from transaxle.engine.produce import Limits, Pair, Progress, limits, share, unwatched
from transaxle.errors import Refusal
from transaxle.formats.dtype import ITEM_BITS, numpy_dtype

Kind = Literal["only_first", "only_second", "shape", "dtype", "values", "copies"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that is not the same on both sides."""

    name: str
    """Name in the second checkpoint's dialect; of two unequal copies, the first one's own name of one of them."""
    component: str
    """Logical tensors in it; empty where no table reads it."""
    kind: Kind
    """How it differs."""
    detail: str
    """Both sides in words."""
    elements: int | None = None
    """Elements that differ; None where they were not counted."""
    max_abs: float | None = None
    """Largest absolute difference of values; None where it was not asked for, or the type has no numbers."""


@dataclass(frozen=True)
class Comparison:
    """What two checkpoints have in common and where they differ."""

    first: str
    """Path of the first, as typed."""
    second: str
    """Path of the second."""
    dialect: str | None
    """Dialect in which they were compared."""
    tensors: tuple[int, int]
    """Tensors as stored on either side."""
    compared: dict[str, int]
    """Logical tensor -> number of tensors that both sides hold of it."""
    parameters: int
    """Elements compared."""
    bytes_read: int
    """Bytes compared, both sides together."""
    differences: tuple[Difference, ...]
    """Everything that differs, by name."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def as_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        return {
            "equal": self.equal,
            "first": self.first,
            "second": self.second,
            "dialect": self.dialect,
            "tensors": list(self.tensors),
            "parameters": self.parameters,
            "bytes_read": self.bytes_read,
            "differences": [
                {
                    "name": d.name,
                    "component": d.component,
                    "kind": d.kind,
                    "detail": d.detail,
                    "elements": d.elements,
                    "max_abs": d.max_abs,
                }
                for d in self.differences
            ],
        }


def in_common(first: Checkpoint, second: Checkpoint) -> Checkpoint:
    """Return the first checkpoint under the second one's names: in its dialect where both are of one family.

    Raises:
        TransaxleError: what stands against that dialect.
    """
    if first.family is None or second.dialect is None or second.family != first.family:
        return first
    if first.dialect == second.dialect and first.recognised.prefix == second.recognised.prefix:
        return first
    return first.as_dialect(second.dialect)


def compare(
    first: Checkpoint,
    second: Checkpoint,
    *,
    numeric: bool = False,
    limit: Limits | None = None,
    progress: Progress = unwatched,
) -> Comparison:
    """Compare two checkpoints.

    Args:
        first: opened checkpoint; it is seen in the second one's dialect.
        second: opened checkpoint.
        numeric: also measure how far values are apart; otherwise a differing tensor is known by its first block.
        limit: workers and memory.
        progress: told the bytes of each block compared.

    Raises:
        TransaxleError: where the first cannot be expressed in the second one's dialect.
    """
    limit = limit or limits()
    view = in_common(first, second)
    found = [Difference(n, view[n].component, "only_first", f"only in {first.path}") for n in view if n not in second]
    found += [Difference(n, "", "only_second", f"only in {second.path}") for n in second if n not in view]
    both = [name for name in view if name in second]
    one, two = first.container.storage, second.container.storage

    def look(pair: Pair, name: str) -> None:
        difference = _difference(view[name], second[name], pair, numeric, progress)
        if difference is not None:
            found.append(difference)

    share(both, limit.jobs, partial(Pair, one, two, limit), look)
    for problem in _unequal_copies(view, limit):
        name = problem.where.tensor or ""
        found.append(Difference(name, "", "copies", f"{first.path} holds two copies that differ: {problem.message}"))
    counts: dict[str, int] = {}
    for name in both:
        component = view[name].component
        counts[component] = counts.get(component, 0) + 1
    return Comparison(
        first.path,
        second.path,
        view.dialect,
        (len(first), len(second)),
        counts,
        sum(view[name].parameters for name in both),
        2 * sum(view[name].nbytes for name in both),
        tuple(sorted(found, key=lambda difference: difference.name)),
    )


def _unequal_copies(view: Checkpoint, limit: Limits) -> list[Refusal]:
    """Return the copies within the first checkpoint that differ: only one of them was compared with the second."""
    problems: list[Refusal] = []
    checks = plan_checks(view.source, view.checks, problems)
    return problems + unequal(checks, view.container.storage, limit)


def _difference(
    one: StoredTensor, two: StoredTensor, pair: Pair, numeric: bool, progress: Progress
) -> Difference | None:
    component = one.component
    if one.shape != two.shape:
        return Difference(one.name, component, "shape", f"{list(one.shape)} and {list(two.shape)}")
    if one.dtype != two.dtype:
        return Difference(one.name, component, "dtype", f"{one.dtype} and {two.dtype}")
    elements, largest, differs = 0, 0.0, False
    measurable = numeric and ITEM_BITS.get(one.dtype, 8) >= 8
    for mine, theirs in pair.blocks(one.transfers(), two.transfers(), one.nbytes):
        progress(len(mine))
        if mine == theirs:
            continue
        differs = True
        if not measurable:
            break
        count, apart = _apart(mine, theirs, one.dtype)
        elements += count
        largest = max(largest, apart)
    if not differs:
        return None
    if not measurable:
        return Difference(one.name, component, "values", "the values differ")
    detail = f"{elements} of {one.parameters} elements differ, by at most {largest:.3g}"
    return Difference(one.name, component, "values", detail, elements, largest)


def _apart(mine: memoryview, theirs: memoryview, dtype: str) -> tuple[int, float]:
    """Return how many elements differ in their bits, and the largest distance of values (inf where only one is NaN)."""
    kind = numpy_dtype(dtype)
    a, b = np.frombuffer(mine, kind), np.frombuffer(theirs, kind)
    words = f"u{kind.itemsize}"
    bits = np.frombuffer(mine, words) != np.frombuffer(theirs, words) if kind.itemsize <= 8 else a != b
    wide = np.complex128 if kind.kind == "c" else np.float64
    x, y = a[bits].astype(wide), b[bits].astype(wide)
    with np.errstate(invalid="ignore"):
        distance = np.abs(x - y)
    one_nan = np.isnan(x) != np.isnan(y)
    distance[np.isnan(distance)] = 0.0
    distance[one_nan] = np.inf
    return int(bits.sum()), float(distance.max(initial=0.0))
