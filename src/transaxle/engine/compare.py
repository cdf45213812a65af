"""Comparison of two checkpoints across formats and dialects: bit by bit, or by values across number formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from transaxle.axes.layout.bind import WEIGHT, split_slot, with_kept
from transaxle.axes.layout.relayout import Check
from transaxle.axes.notation.family import Dialect
from transaxle.encodings.encoding import EncodedTensor
from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor
from transaxle.engine.checkpoint.recognise import IDENTITY
from transaxle.engine.distance import Survey, SurveyResult
from transaxle.engine.duplicates import Pair, TensorPair, compare_copies, plan_checks
from transaxle.engine.plan.training_beside import training_only_in
from transaxle.engine.wording import FoldedRow, fold, notebook, plural, size
from transaxle.errors import Refusal, TransaxleError
from transaxle.formats.catalog import ITEM_BITS
from transaxle.formats.storage.copier import same_bytes
from transaxle.formats.training_state import OPTIMIZER
from transaxle.move.workers import (
    Limits,
    Progress,
    can_batch,
    group_tasks,
    largest_first,
    limits,
    no_progress,
    run_workers,
)
from transaxle.spans import stage

if TYPE_CHECKING:
    from transaxle.engine.distance import Distance


_STEP = "/step"
"""End of the names of an optimizer's step counters, which some file formats store as tensors with one element."""
DifferenceKind = Literal["only_first", "only_second", "shape", "dtype", "encoding", "values", "copies"]
"""Kinds of difference between two checkpoints' tensors of the same name."""
_SHOWN = 12
"""Largest number of differences that a printed comparison shows."""
_REALS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
"""Dtypes of real numbers, whose values can be compared with each other."""
_WIDEST = "fp32"
"""Dtype to which encoded tensors are decoded before values are compared."""


@dataclass(frozen=True, slots=True, repr=False)
class Difference:
    """A tensor that differs between two compared checkpoints."""

    name: str
    """Name of the tensor in the second checkpoint's dialect; for two unequal copies within one checkpoint, the name in
    that checkpoint.
    """
    component: str
    """Names of the logical tensors that the tensor contains; empty if no family's table reads the tensor."""
    kind: DifferenceKind
    """Kind of the difference, such as a different shape."""
    detail: str
    """Description of the difference, with the state of the tensor in both checkpoints."""
    elements: int | None = None
    """Number of elements that differ; None if elements were not counted."""
    max_abs: float | None = None
    """Largest absolute difference of two elements; None if values were not measured, or if the dtype has no numbers."""
    rms: float | None = None
    """Root of the mean squared difference; None if values were not measured."""
    relative: float | None = None
    """Norm of the difference divided by the norm of the second tensor; None if values were not measured."""

    def __repr__(self) -> str:
        measured = "" if self.max_abs is None else f", max |Δ| {self.max_abs:.1e}"
        return f"<difference {self.name}: {self.detail or self.kind}{measured}>"


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of comparing two checkpoints; `bool(comparison)` is true if nothing differs."""

    first: str
    """Path of the first checkpoint, as the user typed it."""
    second: str
    """Path of the second checkpoint, as the user typed it."""
    dialect: str | None
    """Dialect in which the checkpoints were compared; None if no family's table reads the tensor names."""
    stored: tuple[int, int]
    """Number of stored tensors in the first checkpoint, and in the second checkpoint."""
    compared: dict[str, int]
    """Name of a logical tensor -> number of tensors of this kind that both checkpoints have."""
    parameters: int
    """Number of tensor elements that were compared."""
    bytes_read: int
    """Number of bytes that were compared, from both checkpoints together."""
    differences: tuple[Difference, ...]
    """All differences, sorted by tensor name."""
    across: Mapping[str, int] = field(default_factory=dict)
    """Two number formats, as one text -> number of tensors whose values were compared between these formats."""
    survey: SurveyResult | None = None
    """Measured differences of every tensor, including equal tensors; None if values were not measured."""

    @property
    def tensors(self) -> int:
        """Number of tensors that were compared."""
        return sum(self.compared.values())

    @property
    def equal(self) -> bool:
        """Whether the checkpoints do not differ at all."""
        return not self.differences

    def __bool__(self) -> bool:
        """Return whether the checkpoints do not differ at all."""
        return self.equal

    @property
    def optimizer_only(self) -> bool:
        """Whether the only differences are optimizer state that one of the checkpoints lacks."""
        return all(d.kind in {"only_first", "only_second"} and d.name.startswith(OPTIMIZER) for d in self.differences)

    def __repr__(self) -> str:
        return f"<comparison {self.first} and {self.second}: {self.verdict}>"

    def __str__(self) -> str:
        """Return the text that `print(comparison)` shows: the verdict, and the first differences, without repeating
        layers and experts.
        """
        keys = [each.kind if each.kind == "values" else each.detail for each in self.differences]
        by_key = {(each.name, key): each for each, key in zip(self.differences, keys, strict=True)}
        rows = fold([each.name for each in self.differences], keys)
        lines = [f"{self.first} and {self.second}: {self.verdict}"]
        for row in rows[:_SHOWN]:
            group = [by_key[name, str(row.key)] for name in row.names]
            lines.append(f"  {repr(group[0])[1:-1] if len(group) == 1 else _describe_group(row, group)}")
        remaining = sum(row.count for row in rows[_SHOWN:])
        return "\n".join([*lines, *([f"  … and {remaining:,} more: .differences"] if remaining > 0 else [])])

    def _repr_html_(self) -> str:
        return notebook(str(self))

    @property
    def verdict(self) -> str:
        """The result of the comparison in a few words."""
        amount = f"{plural(self.tensors, 'tensor')}, {size(self.bytes_read)} compared"
        return f"equal, {amount}" if self.equal else f"{plural(len(self.differences), 'difference')}, {amount}"

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain JSON data."""
        return {
            "equal": self.equal,
            "first": self.first,
            "second": self.second,
            "dialect": self.dialect,
            "tensors": self.tensors,
            "stored": dict(zip(("first", "second"), self.stored, strict=True)),
            "parameters": self.parameters,
            "bytes_read": self.bytes_read,
            "across": dict(self.across),
            "differences": [asdict(difference) for difference in self.differences],
        }


def _describe_group(row: FoldedRow, group: Sequence[Difference]) -> str:
    """Describe in one line several tensors with the same kind of difference."""
    detail = "the values differ" if row.key == "values" else group[0].detail
    measured = [each.max_abs for each in group if each.max_abs is not None]
    largest = f", max |Δ| {max(measured):.1e}" if measured else ""
    return f"differences {row.name} {row.times}: {detail}{largest}"


def to_common_dialect(first: Checkpoint, second: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """If two checkpoints are of one family, return both in the second checkpoint's dialect; otherwise return both
    unchanged.

    Padding in a tensor contains no values of the model. So if the checkpoints have different padding, both are
    expressed in a dialect without padding, preferably the first checkpoint's.

    Raises:
        TransaxleError: if the first checkpoint cannot be expressed in the second checkpoint's dialect.
    """
    if first.family is None or second.dialect is None or second.family != first.family:
        return first, second
    has_wrappers = bool(first.bound.own or second.bound.own)
    mixed = _names_of_other_dialects(first) ^ _names_of_other_dialects(second)
    alike = first.dialect == second.dialect and first.reading.prefix == second.reading.prefix and not has_wrappers
    # The same tensor may have different names in the two checkpoints: names that a dialect only reads, and optimizer
    # state under names of a different dialect.
    alike = alike and not mixed and _alternative_names(first) == _alternative_names(second)
    first_view = (
        first
        if alike and not first.decoded
        else first.with_state_of(_parameters_with_state(second)).view_as(second.dialect)
    )
    if second.bound.own or (not alike and (second.reading.prefix or mixed or _alternative_names(second))):
        second = second.view_as(second.dialect)
    if not _differ_in_padding(first_view, second):
        return first_view, second
    dialects = [each.label for each in first.reading.family.dialects if not _has_padding(each)]
    for label in sorted(dialects, key=lambda label: label != first.dialect):
        try:
            return first if label == first.dialect else first.view_as(label), second.view_as(label)
        except TransaxleError:
            continue
    # no dialect without padding fits both checkpoints, so the comparison reports different lengths
    return first_view, second


def _parameters_with_state(checkpoint: Checkpoint) -> frozenset[str] | None:
    """Return the names of parameters with optimizer state, in the checkpoint's dialect; None if it has no optimizer
    state.
    """
    states = (parameter for parameter, slot in map(split_slot, checkpoint) if slot != WEIGHT)
    return frozenset(name.removeprefix(checkpoint.reading.prefix) for name in states) or None


def _names_of_other_dialects(checkpoint: Checkpoint) -> set[str]:
    """Return the stored names that only another dialect of the family reads, such as a stack among single experts."""
    bound = checkpoint.bound
    if not bound.unknown:
        return set()
    rebound = with_kept(bound, checkpoint.reading.dialect, checkpoint.sizes, checkpoint.catalog.entries)
    return {*bound.unknown} - {*rebound.unknown}


def _alternative_names(checkpoint: Checkpoint) -> set[str]:
    bound = checkpoint.bound
    of_state = set() if bound.state_dialect is None else {bound.state_dialect.label}
    return of_state | {line.text for line, _ in bound.names if line.read_only}


def _has_padding(dialect: Dialect) -> bool:
    return any(line.expression.padding for line in dialect.lines)


def _differ_in_padding(first: Checkpoint, second: Checkpoint) -> bool:
    """Return whether two checkpoints, both in the second checkpoint's dialect, pad at least one tensor differently."""
    named = [names for (line, _), names in second.bound.names.items() if line.expression.padding]
    tensors = [name for names in named for name in names.values() if name in first and name in second]
    return any(first[name].shape != second[name].shape for name in tensors)


@stage("compare")
def compare(
    first: Checkpoint,
    second: Checkpoint,
    *,
    numeric: bool = False,
    limit: Limits | None = None,
    progress: Progress = no_progress,
) -> Comparison:
    """Compare two checkpoints.

    Args:
        first: the first open checkpoint; `to_common_dialect` decides in which dialect the two are compared.
        second: the second open checkpoint.
        numeric: whether to measure differences of values; encoded tensors are then decoded, and values in different
            number formats are compared. If `numeric` is False, tensors are compared byte by byte up to their first
            difference, and their number formats must be equal.
        limit: number of worker threads, and memory of their buffers.
        progress: function called with the number of bytes of each compared block.

    Raises:
        TransaxleError: if the first checkpoint cannot be expressed in the second checkpoint's dialect.
    """
    limit = limit or limits()
    counts = len(first), len(second)
    if numeric:
        first, second = (side.decode(_WIDEST) if side.catalog.encoded else side for side in (first, second))
    if second.decoded and second.dialect is not None and second.family is not None:
        second = second.view_as(second.dialect)
    view, second = to_common_dialect(first, second)
    encoding_differences = list(_encoding_differences(view, second))
    differences = [difference for difference, _ in encoding_differences]
    without_copies = [
        _without_ties(first_side, second_side) for first_side, second_side in ((view, second), (second, view))
    ]
    explained = {name for _, names in encoding_differences for name in names}.union(
        *(ties for ties, _ in without_copies)
    )
    explained |= training_only_in(view, second) | training_only_in(second, view)
    # tensors of zeros that the view adds correspond to no tensor of the second checkpoint
    explained |= {name for name in view if name not in second and not view[name].origins}
    differences += _only_in_one(view, second, explained)
    common = [name for name in view if name in second and name not in explained]
    across: dict[str, int] = {}
    survey = Survey(view, second) if numeric else None
    if survey is None:
        differences += _compare_bytes(view, second, common, limit, progress)
    else:
        differences += _compare_values(view, second, common, limit, progress, survey, across)
    for _, deduplicated in without_copies:
        differences += _unequal_copy_differences(deduplicated, limit)
    differences += _nonzero_leftovers(view, limit)
    return Comparison(
        first.path,
        second.path,
        view.dialect,
        counts,
        dict(Counter(view[name].component for name in common)),
        sum(view[name].parameters for name in common),
        sum(view[name].nbytes + second[name].nbytes for name in common),
        tuple(sorted(_with_components(differences, view, second), key=lambda difference: difference.name)),
        dict(sorted(across.items())),
        None if survey is None else survey.result(),
    )


def _with_components(differences: Sequence[Difference], first: Checkpoint, second: Checkpoint) -> list[Difference]:
    """Return the differences with the field `component` filled in, which a comparison within one dialect leaves
    empty.
    """
    if all(difference.component for difference in differences):
        return list(differences)
    component_of = components_by_name(first) | components_by_name(second)
    return [
        each if each.component else replace(each, component=component_of.get(each.name, "")) for each in differences
    ]


def _only_in_one(first: Checkpoint, second: Checkpoint, explained: Collection[str]) -> Iterator[Difference]:
    """Yield a difference for each tensor that only one checkpoint has, unless an earlier difference explains it."""
    for name, tensor in first.items():
        if name not in second and name not in explained:
            yield Difference(name, tensor.component, "only_first", f"only in {first.path}")
    for name in second:
        if name not in first and name not in explained:
            yield Difference(name, "", "only_second", f"only in {second.path}")


def _unequal_copy_differences(checkpoint: Checkpoint, limit: Limits) -> Iterator[Difference]:
    """Yield a difference for each tensor that a checkpoint stores in two unequal copies."""
    for problem in _refuse_unequal(checkpoint, [check for check in checkpoint.checks if not check.zero], limit):
        detail = f"{checkpoint.path} holds two copies of it that differ: {problem.message}"
        yield Difference(problem.where.tensor or "", "", "copies", detail)


def _nonzero_leftovers(view: Checkpoint, limit: Limits) -> Iterator[Difference]:
    """Yield a difference for each nonzero tensor that the dialect cannot express, because only one checkpoint has its
    values.
    """
    checks = [check for check in view.checks if check.zero]
    for problem in _refuse_unequal(view, checks, limit) if checks else ():
        yield Difference(problem.where.tensor or "", "", "only_first", f"only in {view.path}: {problem.message}")


def _without_ties(checkpoint: Checkpoint, counterpart: Checkpoint) -> tuple[Collection[str], Checkpoint]:
    """Return the names of a checkpoint's copies of tied tensors, and a view of the checkpoint without these copies.

    If the second checkpoint's dialect omits copies of tied tensors, this is no difference, provided that the copies are
    equal.
    """
    spare = {name for name in checkpoint if name not in counterpart}
    if not spare or checkpoint.family is None or checkpoint.dialect in (None, IDENTITY):
        return (), checkpoint
    try:
        deduplicated = checkpoint.view_as(str(checkpoint.dialect))
    except TransaxleError:
        return (), checkpoint  # the checkpoint has no view without copies, so the missing tensors are reported
    ties = (
        spare.difference(deduplicated, deduplicated.view.ignored)
        if all(name in checkpoint for name in deduplicated)
        else ()
    )
    return (ties, deduplicated) if ties else ((), checkpoint)


def _encoding_differences(first: Checkpoint, second: Checkpoint) -> Iterator[tuple[Difference, Collection[str]]]:
    """Yield tensors that two checkpoints store in different number formats, each with the stored names that this
    difference explains.
    """
    for name in dict.fromkeys([*first.encoded, *second.encoded]):
        sides = [(side.encoded.get(name), side) for side in (first, second)]
        words = [_storage_format(encoded_tensor, side, name) for encoded_tensor, side in sides]
        if words[0] == words[1] or "" in words:
            continue
        parts = {
            stored
            for encoded_tensor, _ in sides
            if encoded_tensor is not None
            for stored in encoded_tensor.parts.values()
        }
        component = first[name].component if name in first else ""
        yield Difference(name, component, "encoding", f"stored as {' and '.join(words)}"), {name, *parts}


def components_by_name(checkpoint: Checkpoint) -> dict[str, str]:
    """Return stored tensor name -> names of its logical tensors, for each name that the family's table reads."""
    if checkpoint.family is None:
        return {}
    bound_names = checkpoint.bound.names.items()
    return {name: ", ".join(line.expression.components) for (line, _), names in bound_names for name in names.values()}


def _storage_format(encoded_tensor: EncodedTensor | None, checkpoint: Checkpoint, name: str) -> str:
    """Return the encoding or dtype in which a checkpoint stores a tensor; return "" if it has no such tensor."""
    if encoded_tensor is not None:
        return (
            f"{encoded_tensor.encoding.name} ({encoded_tensor.convention}: {', '.join(sorted(encoded_tensor.parts))})"
        )
    return checkpoint[name].dtype if name in checkpoint else ""


def _formats(checkpoint: Checkpoint, tensor: StoredTensor) -> str:
    """Return the number formats in which a tensor is stored, even if the view decodes the tensor."""
    decoded = {
        origin: encoded_tensor.encoding.name
        for origin in tensor.origins
        if (encoded_tensor := checkpoint.decoded.get(origin))
    }
    return " and ".join(dict.fromkeys(decoded.values())) or tensor.dtype


def _refuse_unequal(view: Checkpoint, checks: Sequence[Check], limit: Limits) -> list[Refusal]:
    """Return refusals of unequal copies within one checkpoint, because only one of the copies is compared."""
    problems: list[Refusal] = []
    planned = plan_checks(view.source, checks, problems)
    return problems + compare_copies(planned, view.container.storage, limit)


def _compare_bytes(
    first: Checkpoint, second: Checkpoint, names: Sequence[str], limit: Limits, progress: Progress
) -> list[Difference]:
    """Compare the named tensors of two checkpoints byte by byte."""
    differences: list[Difference] = []

    def compare_tensors(pair: Pair, chunk: Sequence[str]) -> None:
        tensors = []
        for name in chunk:
            first_tensor, second_tensor = first[name], second[name]
            mismatch = _mismatch(first_tensor, second_tensor)
            if mismatch is None:
                tensors.append(
                    TensorPair(name, first_tensor.transfers(), second_tensor.transfers(), first_tensor.nbytes)
                )
            else:
                differences.append(mismatch)
        differing = pair.find_different(tensors, progress)
        differences.extend(Difference(name, first[name].component, "values", "the values differ") for name in differing)

    storages = first.container.storage, second.container.storage
    sizes = largest_first((name, first[name].nbytes) for name in names)
    work = group_tasks(sizes, batched=can_batch(*storages), fair=sum(size for _, size in sizes) // limit.jobs)
    run_workers(work, limit.jobs, partial(Pair, *storages, limit), compare_tensors)
    return differences


def _compare_values(
    first: Checkpoint,
    second: Checkpoint,
    names: Sequence[str],
    limit: Limits,
    progress: Progress,
    survey: Survey,
    across: dict[str, int],
) -> list[Difference]:
    """Compare tensors by their values, measure the differences, and count in `across` the comparisons of different
    number formats.
    """
    differences: list[Difference] = []

    def compare_tensor(pair: Pair, name: str) -> None:
        first_tensor, second_tensor = first[name], second[name]
        formats = _formats(first, first_tensor), _formats(second, second_tensor)
        by_value = (
            formats[0] != first_tensor.dtype
            or formats[1] != second_tensor.dtype
            or first_tensor.dtype != second_tensor.dtype
        )
        distance = survey.distance(name)
        difference = _difference(first_tensor, second_tensor, pair, distance, by_value=by_value, progress=progress)
        survey.add(name, distance, difference is not None)
        if by_value:
            both_formats = " and ".join(dict.fromkeys(formats))
            across[both_formats] = across.get(both_formats, 0) + 1
        if difference is not None:
            differences.append(difference)

    run_workers(
        names, limit.jobs, partial(Pair, first.container.storage, second.container.storage, limit), compare_tensor
    )
    return differences


def _mismatch(first: StoredTensor, second: StoredTensor, *, by_value: bool = False) -> Difference | None:
    """Return a difference in shape or dtype, or None if there is none; for `by_value`, see `_difference`."""
    if first.shape != second.shape and not (first.name.endswith(_STEP) and first.parameters == second.parameters == 1):
        return Difference(first.name, first.component, "shape", f"{list(first.shape)} and {list(second.shape)}")
    if first.dtype != second.dtype and not (by_value and {first.dtype, second.dtype} <= _REALS):
        return Difference(first.name, first.component, "dtype", f"{first.dtype} and {second.dtype}")
    return None


def _difference(
    first: StoredTensor, second: StoredTensor, pair: Pair, distance: Distance, *, by_value: bool, progress: Progress
) -> Difference | None:
    """Compare the values of one tensor in two checkpoints.

    Args:
        first: the tensor of the first checkpoint.
        second: the tensor of the second checkpoint.
        pair: object that reads both tensors block by block.
        distance: object that accumulates the measured differences.
        by_value: whether equal numbers count as equal even if their bits differ.
        progress: function called with the number of bytes of each block.
    """
    mismatch = _mismatch(first, second, by_value=by_value)
    if mismatch is not None:
        return mismatch
    differs = False
    measurable = ITEM_BITS.get(first.dtype, 8) >= 8
    for first_block, second_block in pair.blocks(first.transfers(), second.transfers(), first.nbytes, second.nbytes):
        progress(len(first_block))
        same = first.dtype == second.dtype and same_bytes(first_block, second_block)
        if same and not (differs or by_value):
            distance.skip(second_block, second.dtype, measured=measurable)
            continue
        differs = differs or not same
        if not measurable:
            break
        distance.add(first_block, second_block, first.dtype, second.dtype, by_value=by_value)
    if not differs or (measurable and not distance.elements):
        return None
    if not measurable:
        return Difference(first.name, first.component, "values", "the values differ")
    apart = (
        f", by at most {distance.largest:.3g}" if distance.largest else " in their bits, but not in double precision"
    )
    detail = f"{distance.elements:,} of {first.parameters:,} elements differ{apart}"
    measured = distance.elements, distance.largest, distance.rms, distance.relative
    return Difference(first.name, first.component, "values", detail, *measured)
