"""LoRA adapters that are merged into the weights that they change.

**Merging**: a view of a model's weights to which an adapter's changes are added; model and adapter may have different
names and layouts.

The changes are tensors in the dialect in which the adapter was trained; a weight that the adapter does not change has a
change of zeros. The model's own conversion tables move the changes to the layout of the stored weights, so that each
segment of a fused or stacked weight gets its own change.

**Arithmetic**: the changes are computed while the weights are read.

Values are summed in float64, then rounded to the weight's dtype through float32, as torch's `.to` does. Terms of a
product are added in the order of the rank indices, so a value has the same bits whichever regions of a tensor are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache, partial
from math import prod
from typing import Any, Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from transaxle.axes.layout.bind import BoundNames
from transaxle.axes.layout.relayout import Target, fill, identity_target
from transaxle.axes.notation.family import Sizes
from transaxle.encodings.arithmetic.minifloat import widen
from transaxle.engine.lora import Changes, Lora, LowRank
from transaxle.engine.source import Source
from transaxle.engine.views.cast import BAND, Caster
from transaxle.engine.views.decoded import RowMajorBytes
from transaxle.engine.views.encoded import Catalog, View
from transaxle.errors import Refusal, TransaxleError, Where, gathered
from transaxle.formats.catalog import Container, Entry, Extent, nbytes, numpy_dtype
from transaxle.formats.storage.storage import VirtualFile, VirtualFiles, close
from transaxle.move.transfer import Readable

Wide = NDArray[np.float64]
_ITEM = np.dtype(np.float64).itemsize


def to_float64(entry: Entry, values: NDArray[Any]) -> Wide:
    """Return the values of a plain tensor in float64, which represents the values of every adapter dtype exactly."""
    typed = values.view(numpy_dtype(entry.dtype))
    return typed if typed.dtype == np.float64 else widen(typed).astype(np.float64)


def add_change(values: Wide, change: Wide) -> Wide:
    """Return values plus a change; a value with a change of zero keeps its bits, even if the value is -0."""
    with np.errstate(all="ignore"):
        return np.where(change == 0, values, values + change)


@dataclass(frozen=True, slots=True)
class Factors:
    """The low-rank change of a weight: for each matrix of a stack, `scaling * left @ right`."""

    left: Wide
    """The left factor, with shape `[matrices, rows, rank]`."""
    right: Wide
    """The right factor, with shape `[matrices, rank, columns]`."""
    scaling: float
    """Factor by which every product is multiplied."""

    def same_as(self, factors: Factors) -> bool:
        """Return whether the given change has the same factors as this change, and therefore the same values."""
        pairs = (self.left, factors.left), (self.right, factors.right)
        return self.scaling == factors.scaling and all(np.array_equal(*pair) for pair in pairs)

    def rows(self, matrix: int, first: int, last: int) -> Wide:
        """Return the rows from `first` up to `last` of one matrix's change."""
        left, right = self.left[matrix, first:last], self.right[matrix]
        total = np.zeros((last - first, right.shape[1]))
        for rank in range(len(right)):
            total += left[:, rank, None] * right[rank]
        return total * self.scaling


@dataclass(frozen=True, slots=True)
class Change:
    """A virtual file with the change of a weight in float64.

    Attributes:
        shape: shape of the weight; for a convolution, each kernel is a row.
        factors: returns the factors of the change.
    """

    shape: tuple[int, ...]
    factors: Callable[[], Factors]

    @property
    def nbytes(self) -> int:
        """Size of the virtual file in bytes; see `VirtualFile`."""
        return prod(self.shape) * _ITEM

    def read_into(self, offset: int, view: memoryview) -> None:
        """Copy bytes of the change into `view`; see `VirtualFile`."""
        out, (rows, columns) = view.cast("B"), self.shape[-2:]
        width, factors = columns * _ITEM, self.factors()
        while out:
            row, inside = divmod(offset, width)
            matrix, first = divmod(row, rows)
            last = min(rows, first + max(1, BAND // columns), first + -(-(inside + len(out)) // width))
            values = factors.rows(matrix, first, last).reshape(-1).view(np.uint8).data[inside:]
            size = min(len(values), len(out))
            out[:size] = values[:size]
            out, offset = out[size:], offset + size


@dataclass(frozen=True, slots=True)
class Replacement:
    """A virtual file with the values, in float64, of a tensor that replaces a tensor of the model.

    Attributes:
        entry: the adapter's tensor.
        rows: bytes of that tensor, in row-major order.
    """

    entry: Entry
    rows: RowMajorBytes

    @property
    def nbytes(self) -> int:
        """Size of the virtual file in bytes; see `VirtualFile`."""
        return prod(self.entry.shape) * _ITEM

    def read_into(self, offset: int, view: memoryview) -> None:
        """Copy bytes of the replacement's values into `view`; see `VirtualFile`."""
        item, out = numpy_dtype(self.entry.dtype).itemsize, view.cast("B")
        while out:
            first = offset // _ITEM
            last = min(first + BAND, -(-(offset + len(out)) // _ITEM))
            values = to_float64(self.entry, self.rows.read(first * item, last * item)).view(np.uint8).data
            data = values[offset - first * _ITEM :][: len(out)]
            out[: len(data)] = data
            out, offset = out[len(data) :], offset + len(data)


@dataclass(frozen=True, slots=True)
class RebasedChange:
    """A virtual file with the sum, in float64, of the adapter's own copy of a weight and the change of the weight.

    Attributes:
        base: the adapter's copy of the weight.
        change: the change to add.
    """

    base: Replacement
    change: Change

    @property
    def nbytes(self) -> int:
        """Size of the virtual file in bytes; see `VirtualFile`."""
        return self.base.nbytes

    def read_into(self, offset: int, view: memoryview) -> None:
        """Copy bytes of the sum into `view`; see `VirtualFile`."""
        out, first = view.cast("B"), offset // _ITEM
        last = -(-(offset + len(out)) // _ITEM)
        while first < last:
            stop = min(last, first + BAND)
            base, change = np.empty(stop - first), np.empty(stop - first)
            self.base.read_into(first * _ITEM, base.data)
            self.change.read_into(first * _ITEM, change.data)
            start, end = max(offset, first * _ITEM), min(offset + len(out), stop * _ITEM)
            total = add_change(base, change).view(np.uint8)[start - first * _ITEM : end - first * _ITEM]
            out[start - offset : end - offset] = total.data
            first = stop


@dataclass(frozen=True, slots=True)
class Zeros:
    """A virtual file of zeros, for a tensor that the adapter does not change."""

    nbytes: int
    """Size of the virtual file in bytes; see `VirtualFile`."""

    def read_into(self, offset: int, view: memoryview) -> None:  # noqa: ARG002 - all bytes are zero
        """Fill `view` with zeros; see `VirtualFile`."""
        np.frombuffer(view, np.uint8)[:] = 0


class Merger(Caster):
    """A virtual file with the values of one weight after merging, in row-major order.

    Args:
        entry: the stored weight.
        source: object that turns the stored weight into transfers (reads of byte ranges).
        reader: object that reads the files in which the weight is stored.
        change: a float64 tensor with the weight's change or the weight's new values, and the object that turns this
            tensor into transfers.
        replaced: whether `change` contains new values instead of a change to add.
    """

    action = "merged"

    def __init__(
        self, entry: Entry, source: Source, reader: Readable, change: tuple[Target, Source], *, replaced: bool
    ) -> None:
        super().__init__(entry, source, reader, entry.dtype)  # type: ignore[arg-type]  # plain, as merging requires
        target, changes = change
        self._change = RowMajorBytes(changes.container.storage, changes.transfers(target))
        self._replaced = replaced

    def _values(self, start: int, stop: int) -> NDArray[Any]:
        change = self._change.read(start * _ITEM, stop * _ITEM).view(np.float64)
        if self._replaced:
            return change
        return add_change(to_float64(self.entry, super()._values(start, stop)), change)


_CHANGE, _MERGED = "\0change of ", "\0merged "
"""Prefixes of the names of virtual files: for changes, and for merged weights."""
_PLAIN = frozenset({"F32", "F16", "BF16"})
_MEMORY = "transformers"
_USUAL_DIALECTS = (_MEMORY, "hf")
"""Dialects whose tensor names occur in most adapters."""
_CACHED = 16
"""Number of cached pairs of factors A and B; a weight that is read in several blocks then reads its pair only once."""
_UNCHANGED = "adapter_config.json may name {} modules for which the adapter has nothing; they stay as they are"
_DECODE = (
    "Decode the model first:  transaxle convert SRC PLAIN --to hf --decode bf16, and then  transaxle convert PLAIN OUT "
    "--to hf --merge ADAPTER."
)


class Model(Protocol):
    """The attributes of a model's open checkpoint that merging needs."""

    container: Container
    settings: Any

    @property
    def config(self) -> Mapping[str, Any]:
        """Content of the model's config.json."""

    @property
    def catalog(self) -> Catalog:
        """The model's tensors as entries for the families' tables; an encoded tensor and its scales are one entry."""

    @property
    def family(self) -> str | None:
        """Name of the model's family; None if no family's table reads the tensor names."""

    @property
    def reading(self) -> Any:
        """Family and dialect of the model's tensor names."""

    @property
    def bound(self) -> BoundNames:
        """The stored tensor names, each matched with a table line of its dialect."""

    @property
    def sizes(self) -> Sizes:
        """The sizes of the model's axes."""

    def translation(self, dialect: str) -> View:
        """Return the model's tensors translated into a given dialect."""

    def source_of(self, dialect: str) -> Source:
        """Return the object that turns the tensors of a given dialect into transfers (reads of byte ranges)."""


Express = Callable[[Container, str, None, Mapping[str, int]], Model]
"""`express(container, dialect of its names, config, axis sizes)` opens a container of computed tensors as a checkpoint
of the model; None as config means the model's own config.
"""


def merge_adapter(model: Model, adapter: Container, config: Mapping[str, Any], express: Express) -> Container:
    """Return a model's container with an adapter merged into the weights; if an error is raised, the adapter is closed
    first.

    Args:
        model: the checkpoint of the model under its stored names.
        adapter: the files of the adapter.
        config: content of the adapter's adapter_config.json.
        express: function that opens a container of computed tensors as a checkpoint of the model; see `Express`.

    Raises:
        Refused: with code UNSUPPORTED, if the adapter is not LoRA, or a changed weight is not plain; with code
            MISSING_TENSOR or SHAPE_MISMATCH, if the adapter belongs to a different model; with code AMBIGUOUS, if a
            change fits several parameters; with code CORRUPT, if the adapter's files contradict each other.
    """
    try:
        return _merge(model, adapter, config, express)
    except BaseException:
        close(adapter.storage)
        raise


def _merge(model: Model, adapter: Container, config: Mapping[str, Any], express: Express) -> Container:
    lora = Lora(adapter.entries, config, model.config)
    dialect, shapes = _find_dialect(model, lora.targets())
    changes = lora.changes(shapes, _in_memory(model))
    unequal = list(_refuse_unequal(adapter, changes))
    if unequal:
        raise gathered(unequal)
    changed = _changes_container(model.container, adapter, changes, shapes if dialect else changes.names, shapes)
    ties = _ties(model, dialect)
    alike = _equally_changed(adapter, changes, ties)
    if dialect is None:
        prefix, source = "", Source(changed)
        targets: Mapping[str, Target] = {name: identity_target(name, entry) for name, entry in changed.entries.items()}
    else:
        label, prefix = model.reading.dialect.label, model.reading.prefix
        expressed = express(changed, dialect, None, {**_padding(model), **model.settings.axes})
        view, source = expressed.translation(label), expressed.source_of(label)
        if view.refusals:
            raise gathered(view.refusals)
        targets = view.targets
    changed_targets = {
        prefix + name: target for name, target in targets.items() if origin_names(target) & changes.names
    }
    problems = [
        *_refuse_lost(changes, changed_targets, ties, alike),
        *_refuse_misfits(model.container, changes, changed_targets),
    ]
    problems.extend(_refuse_tied(model, changed_targets, alike))
    if problems:
        raise gathered(problems)
    mergers, entries = {}, dict(model.container.entries)
    stored = Source(model.container)
    for name, target in changed_targets.items():
        entry = entries[name]
        replaced = origin_names(target) <= changes.replaced.keys()
        mergers[_MERGED + name] = Merger(entry, stored, model.container.storage, (target, source), replaced=replaced)
        extent = Extent((0,) * len(entry.shape), entry.shape, _MERGED + name, 0)
        entries[name] = replace(entry, extents=(extent,))
    notes = (*model.container.recoding.notes, *_notes(changes))
    return model.container.with_computed(mergers, entries, additional={"adapter": adapter}, notes=notes)


def _find_dialect(model: Model, adapter_names: set[str]) -> tuple[str | None, Mapping[str, tuple[int, ...]]]:
    """Return the dialect that contains the adapter's tensor names, with the shapes of its tensors; None means the
    stored names.
    """
    stored = {name: entry.shape for name, entry in model.catalog.entries.items()}
    known_names = set(stored)
    if adapter_names <= known_names:
        return None, stored
    labels = model.reading.family.labels if model.family is not None else ()
    for label in sorted(labels, key=lambda label: label not in _USUAL_DIALECTS):
        try:
            targets = model.translation(label).targets
        except TransaxleError:
            continue
        if adapter_names <= targets.keys():
            return label, {name: target.shape for name, target in targets.items()}
        known_names |= targets.keys()
    raise gathered(
        refuse_missing(name, known_names)
        for name in sorted(adapter_names - known_names) or sorted(adapter_names - stored.keys())
    )


def _padding(model: Model) -> dict[str, int]:
    """Return axis -> padding of the stored weights, which is absent in a dialect without padding."""
    padding: dict[str, int] = {}
    for (line, _), names in model.bound.names.items():
        for position, name in names.items() if line.expression.padding else ():
            shape = model.container.entries[name].shape
            if len(shape) == len(line.expression.dims):  # this excludes an optimizer's step, which has no dims
                sizes = fill(line.expression, shape, model.sizes.at(line.name.index_at(position)))
                padding |= {axis: sizes[axis] for axis in sorted(line.expression.padding)}
    return padding


def refuse_missing(name: str, names: Collection[str]) -> Refusal:
    """Return the refusal of a tensor that an adapter changes but that the model lacks."""
    similar = get_close_matches(name, names, 1)
    hint = f"Closest: {similar[0]}. " if similar else ""
    hint += "Give the model that the adapter was trained on, with its config.json."
    return Refusal(
        "MISSING_TENSOR", "the adapter changes it, but the model has no such tensor", Where(None, name), hint
    )


def _changes_container(
    model: Container,
    adapter: Container,
    changes: Changes,
    names: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
) -> Container:
    """Return a container with the changes of tensors in float64, in the dialect of the adapter."""
    source = Source(adapter)
    read_factors = lru_cache(_CACHED)(lambda name: _factors(source, changes.added[name]))
    files: dict[str, VirtualFile] = {}
    entries: dict[str, Entry] = {}
    for name in names:
        shape = shapes[name]
        entries[name] = Entry(name, "F64", shape, (Extent((0,) * len(shape), shape, _CHANGE + name, 0),))
        change = new = None
        if name in changes.added:
            change = Change(changes.added[name].grid(shape), partial(read_factors, name))
        if name in changes.replaced:
            new = Replacement(changes.replaced[name], _rows(source, changes.replaced[name]))
        rebased = None if new is None or change is None else RebasedChange(new, change)
        files[_CHANGE + name] = rebased or new or change or Zeros(prod(shape) * 8)
    storage = VirtualFiles(model.storage, files)
    return replace(model, storage=storage, entries=entries, metadata={}, twins=(), left={}, training=(), unread=())


def _factors(source: Source, change: LowRank) -> Factors:
    """Read the factors A and B of a weight's change, as stacks of matrices."""
    first, second = (
        to_float64(entry, source.read(entry.name)).reshape(entry.shape) for entry in (change.first, change.second)
    )
    inner = first.reshape(change.matrices, len(first) // change.matrices, -1)
    outer = second.reshape(len(second), -1, change.matrices).transpose(2, 0, 1)
    if change.swapped:
        inner, outer = outer.transpose(0, 2, 1), inner.transpose(0, 2, 1)
    return Factors(outer, inner, change.scaling)


def _rows(source: Source, entry: Entry) -> RowMajorBytes:
    return RowMajorBytes(source.container.storage, source.transfers(identity_target(entry.name, entry)))


def _equal(source: Source, first: Entry, second: Entry) -> bool:
    """Return whether two tensors of an adapter are equal, bit by bit."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    rows, second_rows, size = _rows(source, first), _rows(source, second), nbytes(first.dtype, first.shape)
    pieces = ((start, min(size, start + BAND)) for start in range(0, size, BAND))
    return all(rows.read(*piece).tobytes() == second_rows.read(*piece).tobytes() for piece in pieces)


def _refuse_unequal(adapter: Container, changes: Changes) -> Iterator[Refusal]:
    """Yield refusals of tensors that an adapter stores twice with different values."""
    for name, copy in changes.copies.items():
        if not _equal(Source(adapter), changes.replaced[name], copy):
            message = f"the adapter has other values for it as {copy.name}, and both are what takes its place"
            yield Refusal("UNEQUAL_COPIES", message, Where(None, name), "Save the adapter again with peft.")


def _ties(model: Model, dialect: str | None) -> Mapping[str, str]:
    """Return name of a tied tensor -> name of the tensor that it is tied to, both in the adapter's dialect."""
    if dialect is not None:
        return model.translation(dialect).aliases
    if model.family is None:
        return {}
    names: dict[str, list[str]] = defaultdict(list)
    for (line, _), stored in model.bound.names.items():
        for component in line.expression.components:
            names[component].extend(stored.values())
    pairs = ((names[alias], names[chain[-1]]) for alias, chain in model.sizes.originals.items())
    return {name: original for aliases, tied_to in pairs for name, original in zip(aliases, tied_to, strict=False)}


def _equally_changed(adapter: Container, changes: Changes, ties: Mapping[str, str]) -> set[str]:
    """Return the names of tied tensors that change by the same values as the tensors that they are tied to.

    peft writes such equal changes if it trains tied tensors together (setting `ensure_weight_tying`).
    """
    source = Source(adapter)

    def is_same(name: str, first_name: str) -> bool:
        if (name in changes.added, name in changes.replaced) != (
            first_name in changes.added,
            first_name in changes.replaced,
        ):
            return False
        if name in changes.replaced and not _equal(source, changes.replaced[name], changes.replaced[first_name]):
            return False
        if name not in changes.added:
            return name in changes.replaced
        return _factors(source, changes.added[name]).same_as(_factors(source, changes.added[first_name]))

    changed = set[str]()
    for original in sorted(set(ties.values())):
        group = [name for name, tied_to in ties.items() if tied_to == original]
        if all(is_same(name, original) for name in group):
            changed.update((original, *group))
    return changed


def _notes(changes: Changes) -> Iterator[str]:
    """Yield notes for the plan about weights for which the adapter has two sources, or no source."""
    if changes.own_bases:
        yield (
            "the adapter has its own copy of these weights of the base, and its change is added to that copy, as peft "
            f"adds it, not to the weight of the model: {', '.join(changes.own_bases)}"
        )
    if changes.unchanged:
        listed = ", ".join(changes.unchanged)
        yield f"{_UNCHANGED.format(len(changes.unchanged))}: {listed[:300]}"


def _in_memory(model: Model) -> Collection[str] | None:
    """Return the tensor names of the model's class in memory; None if no table lists them."""
    try:
        return model.translation(_MEMORY).targets.keys() if model.family is not None else None
    except TransaxleError:  # the family has no such dialect, or an axis size that the translation needs is unknown
        return None


def origin_names(target: Target) -> set[str]:
    """Return the names of the stored tensors from which a target tensor is composed."""
    return {origin.name for part in target.parts for origin in part.origins}


def _refuse_lost(
    changes: Changes, changed_targets: Mapping[str, Target], ties: Mapping[str, str], tied_changes: Collection[str]
) -> Iterator[Refusal]:
    """Yield refusals of changes that no stored weight contains; one stored weight may represent several tied
    weights.
    """
    reached_names = {name for target in changed_targets.values() for name in origin_names(target)}
    for name in sorted(changes.names - reached_names.union(tied_changes)):
        if name in ties:
            message = f"the adapter changes it alone, and in the model it is tied to {ties[name]}"
            yield Refusal("UNSUPPORTED", message, Where(None, name), _UNTIE)
        else:
            yield Refusal("UNSUPPORTED", "no stored tensor is made of this one", Where(None, name), _WAY)


def _refuse_misfits(model: Container, changes: Changes, changed_targets: Mapping[str, Target]) -> Iterator[Refusal]:
    """Yield refusals of weights into which a change cannot be merged."""
    for name, target in changed_targets.items():
        entry, parts = model.entries.get(name), origin_names(target)
        where, replaced = Where(None, name), parts & changes.replaced.keys()
        if entry is None:
            yield Refusal("MISSING_TENSOR", "the adapter changes it, but it is stored under another name", where, _WAY)
        elif entry.dtype not in _PLAIN:
            yield Refusal(
                "UNSUPPORTED", f"an adapter is merged into plain weights, and this is {entry.dtype}", where, _DECODE
            )
        elif entry.shape != target.shape or target.computed:
            yield Refusal(
                "SHAPE_MISMATCH", f"{list(entry.shape)} is stored, its change is {list(target.shape)}", where, _WAY
            )
        elif replaced and replaced != parts:
            message = f"the adapter has some of its parts anew ({', '.join(sorted(replaced))}), and others not"
            yield Refusal("UNSUPPORTED", message, where, _WAY)


def _refuse_tied(model: Model, changed_targets: Mapping[str, Target], tied_changes: set[str]) -> Iterator[Refusal]:
    """Yield refusals of tied weights of which the adapter changes only one, because merging would change both."""
    if model.family is None:
        return
    groups = [{alias, *chain} for alias, chain in model.sizes.originals.items()]
    for (line, _), names in model.bound.names.items():
        tied_components = set[str]().union(
            *(group for group in groups if not group.isdisjoint(line.expression.components))
        )
        for name in names.values() if tied_components else ():
            if name in changed_targets and not origin_names(changed_targets[name]) <= tied_changes:
                listed = ", ".join(sorted(tied_components.difference(line.expression.components)))
                message = f"the adapter changes it alone, and the model has {listed} tied to it, which would change too"
                yield Refusal("UNSUPPORTED", message, Where(None, name), _UNTIE)


_UNTIE = (
    "Untie the model first: store a separate tensor under each of these names, and set tie_word_embeddings to false in "
    "its config.json."
)
_WAY = "Convert the model to the adapter's tensor names first, and merge the adapter into the result."
