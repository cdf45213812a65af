"""Comparison of two checkpoints across formats and dialects: bit by bit, or by values across number formats too."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from transaxle.encodings.encoding import Encoded
from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor
from transaxle.engine.checkpoint.recognise import IDENTITY
from transaxle.engine.copying.duplicate_checks import plan_checks, unequal
from transaxle.engine.plan.training_beside import beside
from transaxle.errors import Refusal, TransaxleError
from transaxle.formats.dtype import ITEM_BITS, numpy_dtype
from transaxle.formats.training_state.state import OPTIMIZER
from transaxle.move.workers import Limits, Pair, Progress, limits, share, unwatched

_STEP = "/step"
"""How the names of an optimizer's counters end: a number, which some formats keep as a tensor of one element."""
Kind = Literal["only_first", "only_second", "shape", "dtype", "encoding", "values", "copies"]
_REALS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
"""Types whose values can be compared with those of each other."""
_WIDEST = "fp32"
"""What encoded tensors are decoded to where values are compared."""


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
    rms: float | None = None
    """Root of the mean squared difference."""
    relative: float | None = None
    """Norm of the difference over the norm of the second."""


@dataclass(frozen=True)
class Comparison:
    """What two checkpoints have in common and where they differ. It is true where nothing does."""

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
    across: Mapping[str, int] = field(default_factory=dict)
    """Two number formats -> number of tensors whose values were compared although they are stored so."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def __bool__(self) -> bool:
        """Return whether nothing differs."""
        return self.equal

    @property
    def optimizer_only(self) -> bool:
        """Whether all that differs is optimizer state that one of the two does not hold."""
        return all(d.kind in {"only_first", "only_second"} and d.name.startswith(OPTIMIZER) for d in self.differences)

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
            "across": dict(self.across),
            "differences": [asdict(difference) for difference in self.differences],
        }


def in_common(first: Checkpoint, second: Checkpoint) -> Checkpoint:
    """Return the first checkpoint under the second one's names: in its dialect where both are of one family.

    Raises:
        TransaxleError: what stands against that dialect.
    """
    if first.family is None or second.dialect is None or second.family != first.family:
        return first
    alike = first.dialect == second.dialect and first.recognised.prefix == second.recognised.prefix
    return first if alike and not first.decoded else first.seen_as(second.dialect)


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
        numeric: measure how far values are apart; what is encoded is decoded for it, and values are compared across
            number formats. Otherwise a differing tensor is known by its first block, and by its encoding.
        limit: workers and memory.
        progress: told the bytes of each block compared.

    Raises:
        TransaxleError: where the first cannot be expressed in the second one's dialect.
    """
    limit = limit or limits()
    counts = len(first), len(second)
    if numeric:
        first, second = (each.decode(_WIDEST) if each.catalog.encoded else each for each in (first, second))
    if second.decoded and second.dialect is not None and second.family is not None:
        second = second.seen_as(second.dialect)
    view = in_common(first, second)
    differing = list(_encodings(view, second))
    found = [difference for difference, _ in differing]
    twice = [_without_ties(one, other) for one, other in ((view, second), (second, view))]
    told = {name for _, names in differing for name in names}.union(*(ties for ties, _ in twice))
    told |= beside(view, second) | beside(second, view)
    found += [
        Difference(n, view[n].component, "only_first", f"only in {first.path}")
        for n in view
        if n not in second and n not in told
    ]
    found += [
        Difference(n, "", "only_second", f"only in {second.path}") for n in second if n not in view and n not in told
    ]
    both = [name for name in view if name in second and name not in told]
    across: dict[str, int] = {}

    def look(pair: Pair, name: str) -> None:
        one, two = view[name], second[name]
        formats = _formats(view, one), _formats(second, two)
        by_value = numeric and (formats[0] != one.dtype or formats[1] != two.dtype or one.dtype != two.dtype)
        difference = _difference(one, two, pair, numeric=numeric, by_value=by_value, progress=progress)
        if by_value:
            both_formats = " and ".join(dict.fromkeys(formats))
            across[both_formats] = across.get(both_formats, 0) + 1
        if difference is not None:
            found.append(difference)

    share(both, limit.jobs, partial(Pair, first.container.storage, second.container.storage, limit), look)
    for _, once in twice:
        for problem in _unequal_copies(once, limit):
            name = problem.where.tensor or ""
            found.append(Difference(name, "", "copies", f"{once.path} holds two copies that differ: {problem.message}"))
    compared: dict[str, int] = {}
    for name in both:
        component = view[name].component
        compared[component] = compared.get(component, 0) + 1
    return Comparison(
        first.path,
        second.path,
        view.dialect,
        counts,
        compared,
        sum(view[name].parameters for name in both),
        sum(view[name].nbytes + second[name].nbytes for name in both),
        tuple(sorted(found, key=lambda difference: difference.name)),
        dict(sorted(across.items())),
    )


def _without_ties(one: Checkpoint, other: Checkpoint) -> tuple[Collection[str], Checkpoint]:
    """Return the names that only one side stores because it stores tied tensors twice, and it without the copies.

    That a dialect leaves copies out is no difference, as long as they are equal to what they are tied to.
    """
    spare = {name for name in one if name not in other}
    if not spare or one.family is None or one.dialect in (None, IDENTITY):
        return (), one
    try:
        once = one.seen_as(str(one.dialect))
    except TransaxleError:
        return (), one  # it cannot be read so: what is missing is told as it is
    ties = spare.difference(once, once.view.ignored) if all(name in one for name in once) else ()
    return (ties, once) if ties else ((), one)


def _encodings(one: Checkpoint, two: Checkpoint) -> Iterator[tuple[Difference, Collection[str]]]:
    """Yield the tensors that are stored in two encodings, or only once in one, and the names that this explains."""
    for name in dict.fromkeys([*one.encoded, *two.encoded]):
        sides = [(each.encoded.get(name), each) for each in (one, two)]
        words = [_stored_as(held, each, name) for held, each in sides]
        if words[0] == words[1] or "" in words:
            continue
        parts = {stored for held, _ in sides if held is not None for stored in held.parts.values()}
        component = one[name].component if name in one else ""
        yield Difference(name, component, "encoding", f"stored as {' and '.join(words)}"), {name, *parts}


def _stored_as(held: Encoded | None, checkpoint: Checkpoint, name: str) -> str:
    """Return in which encoding a checkpoint stores a tensor, or its type; nothing where it has none of that name."""
    if held is not None:
        return f"{held.encoding.name} ({held.convention}: {', '.join(sorted(held.parts))})"
    return checkpoint[name].dtype if name in checkpoint else ""


def _formats(checkpoint: Checkpoint, tensor: StoredTensor) -> str:
    """Return the number formats in which a tensor is stored, decoded though it is seen."""
    decoded = {origin: one.encoding.name for origin in tensor.origins if (one := checkpoint.decoded.get(origin))}
    return " and ".join(dict.fromkeys(decoded.values())) or tensor.dtype


def _unequal_copies(view: Checkpoint, limit: Limits) -> list[Refusal]:
    """Return the copies within the first checkpoint that differ: only one of them was compared with the second."""
    problems: list[Refusal] = []
    checks = plan_checks(view.source, view.checks, problems)
    return problems + unequal(checks, view.container.storage, limit)


def _difference(
    one: StoredTensor, two: StoredTensor, pair: Pair, *, numeric: bool, by_value: bool, progress: Progress
) -> Difference | None:
    """Compare two tensors.

    Args:
        one: a tensor.
        two: its counterpart.
        pair: does the reading.
        numeric: measure how far they are apart.
        by_value: numbers are equal where they are the same number, whatever their bits.
        progress: told the bytes of each block.
    """
    component = one.component
    if one.shape != two.shape and not (one.name.endswith(_STEP) and one.parameters == two.parameters == 1):
        return Difference(one.name, component, "shape", f"{list(one.shape)} and {list(two.shape)}")
    if one.dtype != two.dtype and not (by_value and {one.dtype, two.dtype} <= _REALS):
        return Difference(one.name, component, "dtype", f"{one.dtype} and {two.dtype}")
    apart, differs = Apart(), False
    measurable = numeric and ITEM_BITS.get(one.dtype, 8) >= 8
    for mine, theirs in pair.blocks(one.transfers(), two.transfers(), one.nbytes, two.nbytes):
        progress(len(mine))
        same = one.dtype == two.dtype and mine == theirs
        if same and not (differs or by_value):
            apart.skip(theirs, two.dtype, measured=measurable)
            continue
        differs = differs or not same
        if not measurable:
            break
        apart.add(mine, theirs, one.dtype, two.dtype, by_value=by_value)
    if not differs or (measurable and not apart.elements):
        return None
    if not measurable:
        return Difference(one.name, component, "values", "the values differ")
    detail = f"{apart.elements} of {one.parameters} elements differ, by at most {apart.largest:.3g}"
    return Difference(one.name, component, "values", detail, apart.elements, apart.largest, apart.rms, apart.relative)


class Apart:
    """How far the values of two tensors are apart, summed up block by block."""

    def __init__(self) -> None:
        self.elements = 0
        """How many differ."""
        self.largest = 0.0
        """The largest absolute difference; inf where only one of two is NaN."""
        self._count = 0
        self._squares = 0.0
        self._of = 0.0

    @property
    def rms(self) -> float:
        """Root of the mean squared difference."""
        return math.sqrt(self._squares / self._count) if self._count else 0.0

    @property
    def relative(self) -> float:
        """Norm of the difference over the norm of the second; inf where that is 0 and the first is not."""
        if not self._of:
            return math.inf if self._squares else 0.0
        return math.sqrt(self._squares / self._of) if math.isfinite(self._of) else math.nan

    def skip(self, theirs: memoryview, dtype: str, *, measured: bool) -> None:
        """Add a block in which nothing differs."""
        if measured:
            self._sum(_wide(theirs, dtype))

    def add(self, mine: memoryview, theirs: memoryview, first: str, second: str, *, by_value: bool) -> None:
        """Add a block of the two tensors, which are of these types."""
        x, y = _wide(mine, first), _wide(theirs, second)
        self._sum(y)
        if by_value:
            unequal = (x != y) & ~(np.isnan(x) & np.isnan(y))
        else:
            kind = numpy_dtype(first)
            words = f"u{kind.itemsize}"
            bits = kind.itemsize <= 8
            a, b = (np.frombuffer(block, words if bits else kind) for block in (mine, theirs))
            unequal = a != b
        x, y = x[unequal], y[unequal]
        with np.errstate(invalid="ignore"):
            distance = np.abs(x - y)
        one_nan = np.isnan(x) != np.isnan(y)
        distance[np.isnan(distance)] = 0.0
        distance[one_nan] = np.inf
        self.elements += int(unequal.sum())
        self.largest = max(self.largest, float(distance.max(initial=0.0)))
        self._squares += float(np.square(distance).sum())

    def _sum(self, values: np.ndarray) -> None:
        self._count += values.size
        with np.errstate(over="ignore"):
            self._of += float(np.nansum(np.square(np.abs(values))))


def _wide(block: memoryview, dtype: str) -> np.ndarray:
    """Return values in double precision, complex ones as such."""
    kind = numpy_dtype(dtype)
    return np.frombuffer(block, kind).astype(np.complex128 if kind.kind == "c" else np.float64)
