"""Adapters merged into the weights that they change.

**Merging**: a model's weights seen with an adapter's changes added, whatever names and layouts either has.

The changes are tensors of the dialect in which the adapter was trained, zero where it has none. The model's own tables
take them to the layout in which the weights are stored, so that fused and stacked weights get each its own part.

**Merged adapters**: weights seen with the low-rank changes of an adapter added, computed when they are read.

Everything is summed in float64 and then rounded to the weight's type, through float32 as torch's `.to` does. The terms
are added in the order of the ranks, so a value has the same bits in whatever pieces a tensor is read.
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


def wide(entry: Entry, values: NDArray[Any]) -> Wide:
    """Return the stored numbers of a plain tensor in float64: every type of an adapter is exact there."""
    typed = values.view(numpy_dtype(entry.dtype))
    return typed if typed.dtype == np.float64 else widen(typed).astype(np.float64)


def added(values: Wide, change: Wide) -> Wide:
    """Return values with a change added; a zero that stays keeps its sign."""
    with np.errstate(all="ignore"):
        return np.where(change == 0, values, values + change)


@dataclass(frozen=True, slots=True)
class Factors:
    """The change of a weight: for each matrix of a stack, scaling times `left @ right`."""

    left: Wide
    """`[matrices, rows, rank]`."""
    right: Wide
    """`[matrices, rank, columns]`."""
    scaling: float
    """What every sum of products is multiplied with."""

    def same_as(self, other: Factors) -> bool:
        """Tell whether another change has the same factors, and so the same values."""
        pairs = (self.left, other.left), (self.right, other.right)
        return self.scaling == other.scaling and all(np.array_equal(*pair) for pair in pairs)

    def rows(self, matrix: int, first: int, last: int) -> Wide:
        """Return rows of the change of one matrix."""
        left, right = self.left[matrix, first:last], self.right[matrix]
        total = np.zeros((last - first, right.shape[1]))
        for rank in range(len(right)):
            total += left[:, rank, None] * right[rank]
        return total * self.scaling


@dataclass(frozen=True, slots=True)
class Change:
    """A file of the float64 values by which a weight changes.

    Attributes:
        shape: of the weight; the kernels of a convolution are rows.
        factors: reads the factors.
    """

    shape: tuple[int, ...]
    factors: Callable[[], Factors]

    @property
    def nbytes(self) -> int:
        """See `VirtualFile`."""
        return prod(self.shape) * _ITEM

    def read_into(self, offset: int, view: memoryview) -> None:
        """See `VirtualFile`."""
        out, (rows, columns) = view.cast("B"), self.shape[-2:]
        width, factors = columns * _ITEM, self.factors()
        while out:
            row, inside = divmod(offset, width)
            matrix, first = divmod(row, rows)
            last = min(rows, first + max(1, BAND // columns), first + -(-(inside + len(out)) // width))
            values = factors.rows(matrix, first, last).reshape(-1).view(np.uint8).data[inside:]
            taken = min(len(values), len(out))
            out[:taken] = values[:taken]
            out, offset = out[taken:], offset + taken


@dataclass(frozen=True, slots=True)
class Replacement:
    """A file of the float64 values of a tensor that an adapter has instead of the model's.

    Attributes:
        entry: the tensor.
        rows: its bytes.
    """

    entry: Entry
    rows: RowMajorBytes

    @property
    def nbytes(self) -> int:
        """See `VirtualFile`."""
        return prod(self.entry.shape) * _ITEM

    def read_into(self, offset: int, view: memoryview) -> None:
        """See `VirtualFile`."""
        item, out = numpy_dtype(self.entry.dtype).itemsize, view.cast("B")
        while out:
            first = offset // _ITEM
            last = min(first + BAND, -(-(offset + len(out)) // _ITEM))
            values = wide(self.entry, self.rows.read(first * item, last * item)).view(np.uint8).data
            taken = values[offset - first * _ITEM :][: len(out)]
            out[: len(taken)] = taken
            out, offset = out[len(taken) :], offset + len(taken)


@dataclass(frozen=True, slots=True)
class Rebased:
    """A file of the float64 sums of a change and of the weight that the adapter has for it.

    Attributes:
        base: the weight.
        change: what is added to it.
    """

    base: Replacement
    change: Change

    @property
    def nbytes(self) -> int:
        """See `VirtualFile`."""
        return self.base.nbytes

    def read_into(self, offset: int, view: memoryview) -> None:
        """See `VirtualFile`."""
        out, first = view.cast("B"), offset // _ITEM
        last = -(-(offset + len(out)) // _ITEM)
        while first < last:
            stop = min(last, first + BAND)
            base, change = np.empty(stop - first), np.empty(stop - first)
            self.base.read_into(first * _ITEM, base.data)
            self.change.read_into(first * _ITEM, change.data)
            start, end = max(offset, first * _ITEM), min(offset + len(out), stop * _ITEM)
            total = added(base, change).view(np.uint8)[start - first * _ITEM : end - first * _ITEM]
            out[start - offset : end - offset] = total.data
            first = stop


@dataclass(frozen=True, slots=True)
class Zeros:
    """A file of the values by which a tensor without an adapter changes."""

    nbytes: int
    """See `VirtualFile`."""

    def read_into(self, offset: int, view: memoryview) -> None:  # noqa: ARG002 - they are all the same
        """See `VirtualFile`."""
        np.frombuffer(view, np.uint8)[:] = 0


class Merger(Caster):
    """One weight with its adapter merged, as the row-major bytes of its values.

    Args:
        entry: the weight.
        source: turns it into transfers.
        reader: reads the files.
        change: where its change lies, or its new values, in float64.
        replaced: whether these are new values.
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
        return added(wide(self.entry, super()._values(start, stop)), change)


_CHANGE, _MERGED = "\0change of ", "\0merged "
"""What the names of files that do not exist begin with."""
_PLAIN = frozenset({"F32", "F16", "BF16"})
_MEMORY = "transformers"
_FIRST = (_MEMORY, "hf")
"""Dialects in which adapters are trained most often."""
_KEPT = 16
"""Pairs of factors that are cached, so that reading a weight piece by piece reads them once."""
_UNCHANGED = "adapter_config.json may name {} modules for which the adapter has nothing; they stay as they are"
_DECODE = "Decode it first (convert with --decode bf16), and merge into the result."


class Model(Protocol):
    """The checkpoint of a model."""

    container: Container
    settings: Any

    @property
    def config(self) -> Mapping[str, Any]:
        """Its config.json."""

    @property
    def catalog(self) -> Catalog:
        """Its tensors as tables see them."""

    @property
    def family(self) -> str | None:
        """Its family; None if no table reads it."""

    @property
    def recognised(self) -> Any:
        """Its family and dialect."""

    @property
    def bound(self) -> BoundNames:
        """Its names read through its dialect."""

    @property
    def sizes(self) -> Sizes:
        """The sizes of its axes."""

    def translation(self, dialect: str) -> View:
        """Return its tensors in another dialect."""

    def source_of(self, dialect: str) -> Source:
        """Return the reader of the tensors in another dialect."""


Express = Callable[[Container, str, None, Mapping[str, int]], Model]
"""Makes a checkpoint of other tensors of a model: files, label of their dialect, no other config, sizes of axes."""


def merged(model: Model, adapter: Container, config: Mapping[str, Any], express: Express) -> Container:
    """Return the files of a model with an adapter merged into the weights; where that fails, the adapter is closed.

    Args:
        model: the checkpoint, under its stored names.
        adapter: the files of the adapter.
        config: its adapter_config.json.
        express: makes a checkpoint of the same model; see `Express`.

    Raises:
        Refused: UNSUPPORTED for another adapter than LoRA, and for weights that are not plain; MISSING_TENSOR,
            SHAPE_MISMATCH where it is not an adapter of this model; AMBIGUOUS; CORRUPT.
    """
    try:
        return _merged(model, adapter, config, express)
    except BaseException:
        close(adapter.storage)
        raise


def _merged(model: Model, adapter: Container, config: Mapping[str, Any], express: Express) -> Container:
    lora = Lora(adapter.entries, config, model.config)
    dialect, shapes = _trained_in(model, lora.targets())
    changes = lora.changes(shapes, _in_memory(model))
    unequal = list(_unequal(adapter, changes))
    if unequal:
        raise gathered(unequal)
    changed = _changed(model.container, adapter, changes, shapes if dialect else changes.names, shapes)
    tied = _ties(model, dialect)
    alike = _alike(adapter, changes, tied)
    if dialect is None:
        prefix, source = "", Source(changed)
        targets: Mapping[str, Target] = {name: identity_target(name, entry) for name, entry in changed.entries.items()}
    else:
        label, prefix = model.recognised.dialect.label, model.recognised.prefix
        other = express(changed, dialect, None, {**_padding(model), **model.settings.axes})
        view, source = other.translation(label), other.source_of(label)
        if view.refusals:
            raise gathered(view.refusals)
        targets = view.targets
    wanted = {prefix + name: target for name, target in targets.items() if origins(target) & changes.names}
    problems = [*_lost(changes, wanted, tied, alike), *_misfits(model.container, changes, wanted)]
    problems.extend(_tied(model, wanted, alike))
    if problems:
        raise gathered(problems)
    mergers, entries = {}, dict(model.container.entries)
    stored = Source(model.container)
    for name, target in wanted.items():
        entry = entries[name]
        replaced = origins(target) <= changes.replaced.keys()
        mergers[_MERGED + name] = Merger(entry, stored, model.container.storage, (target, source), replaced=replaced)
        extent = Extent((0,) * len(entry.shape), entry.shape, _MERGED + name, 0)
        entries[name] = replace(entry, extents=(extent,))
    return model.container.recoded(mergers, entries, adapter=adapter, notes=tuple(_notes(changes)))


def _trained_in(model: Model, wanted: set[str]) -> tuple[str | None, Mapping[str, tuple[int, ...]]]:
    """Return the dialect that has the adapter's names, and the shapes of its tensors; None: that which is stored."""
    stored = {name: entry.shape for name, entry in model.catalog.entries.items()}
    known = set(stored)
    if wanted <= known:
        return None, stored
    labels = model.recognised.family.labels if model.family is not None else ()
    for label in sorted(labels, key=lambda label: label not in _FIRST):
        try:
            targets = model.translation(label).targets
        except TransaxleError:
            continue
        if wanted <= targets.keys():
            return label, {name: target.shape for name, target in targets.items()}
        known |= targets.keys()
    raise gathered(missing(name, known) for name in sorted(wanted - known) or sorted(wanted - stored.keys()))


def _padding(model: Model) -> dict[str, int]:
    """Return how much the stored weights are padded, which no other dialect shows."""
    found: dict[str, int] = {}
    for (line, _), names in model.bound.names.items():
        for position, name in names.items() if line.expression.padding else ():
            shape = model.container.entries[name].shape
            if len(shape) == len(line.expression.dims):  # a step has no dims
                known = fill(line.expression, shape, model.sizes.at(dict(zip(line.name.axes, position, strict=True))))
                found |= {axis: known[axis] for axis in sorted(line.expression.padding)}
    return found


def missing(name: str, known: Collection[str]) -> Refusal:
    """Return the refusal of what an adapter changes and the model does not have."""
    close = get_close_matches(name, known, 1)
    hint = f"Closest: {close[0]}. " if close else ""
    hint += "Give the model that the adapter was trained on, with its config.json."
    return Refusal(
        "MISSING_TENSOR", "the adapter changes it, but the model has no such tensor", Where(None, name), hint
    )


def _changed(
    model: Container,
    adapter: Container,
    changes: Changes,
    names: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
) -> Container:
    """Return a container of the float64 values by which tensors change."""
    source = Source(adapter)
    cached = lru_cache(_KEPT)(lambda name: _factors(source, changes.added[name]))
    files: dict[str, VirtualFile] = {}
    entries: dict[str, Entry] = {}
    for name in names:
        shape = shapes[name]
        entries[name] = Entry(name, "F64", shape, (Extent((0,) * len(shape), shape, _CHANGE + name, 0),))
        change = new = None
        if name in changes.added:
            change = Change(changes.added[name].grid(shape), partial(cached, name))
        if name in changes.replaced:
            new = Replacement(changes.replaced[name], _rows(source, changes.replaced[name]))
        both = None if new is None or change is None else Rebased(new, change)
        files[_CHANGE + name] = both or new or change or Zeros(prod(shape) * 8)
    storage = VirtualFiles(model.storage, files)
    return replace(model, storage=storage, entries=entries, metadata={}, twins=(), left={}, training=(), unread=())


def _factors(source: Source, change: LowRank) -> Factors:
    """Read the factors of a weight, matrix by matrix."""
    first, second = (
        wide(entry, source.read(entry.name)).reshape(entry.shape) for entry in (change.first, change.second)
    )
    inner = first.reshape(change.matrices, len(first) // change.matrices, -1)
    outer = second.reshape(len(second), -1, change.matrices).transpose(2, 0, 1)
    if change.swapped:
        inner, outer = outer.transpose(0, 2, 1), inner.transpose(0, 2, 1)
    return Factors(outer, inner, change.scaling)


def _rows(source: Source, entry: Entry) -> RowMajorBytes:
    return RowMajorBytes(source.container.storage, source.transfers(identity_target(entry.name, entry)))


def _equal(source: Source, first: Entry, second: Entry) -> bool:
    """Tell whether two tensors of an adapter are equal, bit by bit."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    rows, others, size = _rows(source, first), _rows(source, second), nbytes(first.dtype, first.shape)
    pieces = ((start, min(size, start + BAND)) for start in range(0, size, BAND))
    return all(rows.read(*piece).tobytes() == others.read(*piece).tobytes() for piece in pieces)


def _unequal(adapter: Container, changes: Changes) -> Iterator[Refusal]:
    """Yield tensors that an adapter has twice, with different values."""
    for name, copy in changes.copies.items():
        if not _equal(Source(adapter), changes.replaced[name], copy):
            message = f"the adapter has other values for it as {copy.name}, and both are what takes its place"
            yield Refusal("UNEQUAL_COPIES", message, Where(None, name), "Save the adapter again with peft.")


def _ties(model: Model, dialect: str | None) -> Mapping[str, str]:
    """Return the tensors that are tied to others, by the names of the adapter's dialect."""
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


def _alike(adapter: Container, changes: Changes, ties: Mapping[str, str]) -> set[str]:
    """Return the tensors that are changed with all that they are tied to, all by the same values.

    So peft writes them where it trained both as one (`ensure_weight_tying`).
    """
    source = Source(adapter)

    def is_same(name: str, other: str) -> bool:
        if (name in changes.added, name in changes.replaced) != (other in changes.added, other in changes.replaced):
            return False
        if name in changes.replaced and not _equal(source, changes.replaced[name], changes.replaced[other]):
            return False
        if name not in changes.added:
            return name in changes.replaced
        return _factors(source, changes.added[name]).same_as(_factors(source, changes.added[other]))

    alike = set[str]()
    for original in sorted(set(ties.values())):
        group = [name for name, tied_to in ties.items() if tied_to == original]
        if all(is_same(name, original) for name in group):
            alike.update((original, *group))
    return alike


def _notes(changes: Changes) -> Iterator[str]:
    """Yield what a plan says of an adapter that has two sources for a weight, or none."""
    if changes.rebased:
        yield (
            "the adapter has its own copy of these weights of the base, and its change is added to that copy, as peft "
            f"adds it, not to the weight of the model: {', '.join(changes.rebased)}"
        )
    if changes.unchanged:
        listed = ", ".join(changes.unchanged)
        yield f"{_UNCHANGED.format(len(changes.unchanged))}: {listed[:300]}"


def _in_memory(model: Model) -> Collection[str] | None:
    """Return what the class of a model calls its tensors; None where no table says so."""
    try:
        return model.translation(_MEMORY).targets.keys() if model.family is not None else None
    except TransaxleError:  # the family has no such dialect, or it needs sizes that nothing says
        return None


def origins(target: Target) -> set[str]:
    """Return the stored tensors that a target is made of."""
    return {origin.name for part in target.parts for origin in part.origins}


def _lost(
    changes: Changes, wanted: Mapping[str, Target], tied: Mapping[str, str], alike: Collection[str]
) -> Iterator[Refusal]:
    """Yield changes that would reach no stored weight; of tied ones one is stored for all."""
    reached = {name for target in wanted.values() for name in origins(target)}
    for name in sorted(changes.names - reached.union(alike)):
        if name in tied:
            message = f"the adapter changes it alone, and in the model it is tied to {tied[name]}"
            yield Refusal("UNSUPPORTED", message, Where(None, name), _UNTIE)
        else:
            yield Refusal("UNSUPPORTED", "no stored tensor is made of this one", Where(None, name), _WAY)


def _misfits(model: Container, changes: Changes, wanted: Mapping[str, Target]) -> Iterator[Refusal]:
    """Yield weights into which nothing can be merged."""
    for name, target in wanted.items():
        entry, parts = model.entries.get(name), origins(target)
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


def _tied(model: Model, wanted: Mapping[str, Target], alike: set[str]) -> Iterator[Refusal]:
    """Yield weights that are tied to others: peft trains one alone, and the merged model would have both changed."""
    if model.family is None:
        return
    groups = [{alias, *chain} for alias, chain in model.sizes.originals.items()]
    for (line, _), names in model.bound.names.items():
        others = set[str]().union(*(group for group in groups if not group.isdisjoint(line.expression.components)))
        for name in names.values() if others else ():
            if name in wanted and not origins(wanted[name]) <= alike:
                tied = ", ".join(sorted(others.difference(line.expression.components)))
                message = f"the adapter changes it alone, and the model has {tied} tied to it, which would change too"
                yield Refusal("UNSUPPORTED", message, Where(None, name), _UNTIE)


_UNTIE = "Untie the model first: give it a tensor for each of them, and tie_word_embeddings false in its config.json."
_WAY = "Convert the model into the names of the adapter first, and merge there."
