"""Views that cast plain floating-point tensors: the values are cast to a different dtype when they are read.

Encoded tensors (see the module `decoded`) and integers are not cast. Optimizer state, scales of a quantized model's
cache, and tensors that a family's table marks as `precise` are cast only if a pattern of the user matches them. The
plan lists the tensors that keep their dtype.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import ClassVar

import numpy as np

from transaxle.axes.layout.bind import WEIGHT, BoundNames, split_slot
from transaxle.axes.layout.relayout import identity_target
from transaxle.encodings.conventions.buffer_group import is_of_cache, may_be_codes, may_scale
from transaxle.encodings.conventions.convention import training_only
from transaxle.encodings.encoding import CASTS, PLAIN, Error, Wide
from transaxle.encodings.value_steps import Action, RecodedTensor
from transaxle.engine.source import Source
from transaxle.engine.views.decoded import RowMajorBytes
from transaxle.engine.views.encode import select_names
from transaxle.engine.views.encoded import Catalog
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.formats.catalog import Container, Entry, Extent, nbytes, numpy_dtype
from transaxle.formats.training_state import OPTIMIZER
from transaxle.move.transfer import Readable

_FILE = "\0cast "
"""Prefix of the names of the virtual files that contain cast values."""
BAND = 1 << 18
"""Number of tensor elements that are cast at once."""


class Caster:
    """A virtual file with the values of one plain tensor in a different dtype, in row-major order.

    Args:
        entry: the tensor to cast.
        source: object that turns the entry into transfers (reads of byte ranges).
        reader: object that reads the files in which the tensor is stored.
        dtype: safetensors code of the target dtype.
    """

    action: ClassVar[Action] = "cast"
    """Name of this operation in reports."""

    def __init__(self, entry: Entry, source: Source, reader: Readable, dtype: Wide) -> None:
        self.entry = entry
        self.dtype = dtype
        self._source, self._reader = source, reader
        self._count = prod(entry.shape)

    @property
    def nbytes(self) -> int:
        """Size of the cast values in bytes."""
        return nbytes(self.dtype, self.entry.shape)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill a memory view with bytes of the cast values, beginning at byte `offset` of the values.

        Raises:
            TransaxleError: any error of reading the stored tensor.
        """
        from transaxle.encodings.arithmetic.scaling import cast

        out = np.frombuffer(view, np.uint8)
        item = numpy_dtype(self.dtype).itemsize
        first_element, last_element = offset // item, -(-(offset + len(out)) // item)
        for start in range(first_element, last_element, BAND):
            stop = min(last_element, start + BAND)
            cast_bytes = cast(self._values(start, stop), self.dtype).view(np.uint8)
            low, high = max(offset, start * item), min(offset + len(out), stop * item)
            out[low - offset : high - offset] = cast_bytes[low - start * item : high - start * item]

    @property
    def step(self) -> RecodedTensor:
        """The step of the plan that describes this cast; see `Computed.step`."""
        return RecodedTensor(self.entry.name, self.action, self.entry.dtype, "", self.dtype, self.entry.shape)

    def measure(self) -> tuple[Error, int]:
        """Return the rounding error of the cast values, and the number of finite values that became infinite."""
        from transaxle.encodings.arithmetic.scaling import cast, cast_error

        total, infinite = Error(), 0
        for start in range(0, self._count, BAND):
            values = self._values(start, min(self._count, start + BAND))
            error, newly_infinite = cast_error(values, cast(values, self.dtype))
            total, infinite = total + error, infinite + newly_infinite
        return total, infinite

    def _values(self, start: int, stop: int) -> np.ndarray:
        dtype = numpy_dtype(self.entry.dtype)
        return self._rows.read(start * dtype.itemsize, stop * dtype.itemsize).view(dtype)

    @cached_property
    def _rows(self) -> RowMajorBytes:
        return RowMajorBytes(self._reader, self._source.transfers(identity_target(self.entry.name, self.entry)))


def precise_names(bound: BoundNames | None) -> frozenset[str]:
    """Return the stored names of tensors that a family's table marks as `precise`. These are cast only if a pattern of
    the user selects them.
    """
    if bound is None:
        return frozenset()
    precise_tensors = bound.family.precise
    lines = [
        names for (line, _), names in bound.names.items() if precise_tensors.intersection(line.expression.components)
    ]
    return frozenset((*bound.ignored, *(name for names in lines for name in names.values())))


def cast_to(catalog: Catalog, to: str, only: Sequence[str], skip: Sequence[str], keep: frozenset[str]) -> Container:
    """Return a container whose plain floating-point tensors are shown in a different dtype.

    Args:
        catalog: the stored tensors of a container.
        to: the dtype to cast to: `bf16`, `fp16` or `fp32`.
        only: patterns of tensor names to cast; if empty, all weights except those in `keep`.
        skip: patterns of tensor names that keep their dtype.
        keep: tensor names that are cast only if a pattern of `only` matches them.

    Raises:
        Refused: all refusals of the catalog, because a cast of unknown codes or scales would be wrong; with code
            UNSUPPORTED, for tensors that may be scales of codes.
        UsageError: with code AMBIGUOUS, if the dtype is unknown, if no tensor is plain, or if a pattern matches no
            plain tensor.
    """
    if to not in CASTS:
        raise refuse("AMBIGUOUS", f"cannot cast to {to!r}", hint=f"Choose one of: {', '.join(CASTS)}.")
    foreign = catalog.refuse_in_other_form(", and other tensors beside them cannot be cast", instead=True)
    if refusals := (*catalog.refusals, *foreign):
        raise gathered(refusals)
    container, dtype = catalog.container, CASTS[to]
    training_tensors = set(training_only(catalog.entries, catalog.entries))
    plain = [
        name
        for name in container.entries
        if name in catalog.entries and name not in catalog.encoded and container.entries[name].dtype in PLAIN
    ]
    plain = [name for name in plain if name not in training_tensors]
    if not plain:
        message = "no plain floating-point tensor to cast; integers, codes and scales are not cast"
        raise refuse("AMBIGUOUS", message, hint="To decode encoded tensors, use --decode bf16 instead.")
    usual = [
        name
        for name in plain
        if split_slot(name)[1] == WEIGHT
        and name not in keep
        and not (is_of_cache(name) and (catalog.encoded or catalog.quantization))
    ]
    selected = frozenset(select_names(plain, only, skip, "plain floating-point tensor", usual))
    changing = (
        name for name in plain if name in selected and name not in only and container.entries[name].dtype != dtype
    )
    if scales := list(refuse_scales_alone(changing, catalog)):
        raise gathered(scales)
    source = Source(container, None)
    casters: dict[str, Caster] = {}
    entries: dict[str, Entry] = {}
    for name, entry in container.entries.items():
        entries[name] = entry
        if name in selected and entry.dtype != dtype:
            casters[_FILE + name] = Caster(entry, source, container.storage, dtype)
            extent = Extent((0,) * len(entry.shape), entry.shape, _FILE + name, 0)
            entries[name] = Entry(name, dtype, entry.shape, (extent,))
    stayed = [name for name in plain if name not in selected and container.entries[name].dtype != dtype]
    return container.with_computed(casters, entries, dtype=dtype, stayed=tuple(stayed))


def refuse_scales_alone(names: Iterable[str], catalog: Catalog) -> Iterator[Refusal]:
    """Yield refusals of tensors that must not be cast alone, because they are (or may be) scales of quantized codes.

    Args:
        names: stored tensor names, or internal names of an encoded tensor's buffers.
        catalog: the stored tensors of a container.
    """
    buffers = catalog.container.entries
    codes_in: dict[str, list[Entry]] = defaultdict(list)
    for name, entry in buffers.items():
        if may_be_codes(name, entry):
            codes_in[_module_name(name)].append(entry)
    hint = "Omit the tensor with --skip NAME; if it is not a scale, give its whole name with --only."
    for name in names:
        stored, _, role = name.partition("\0")
        codes = next((e for e in _codes_around(stored, codes_in) if role or _may_scale(buffers[stored], e)), None)
        if codes is not None:
            message = f"it lies beside {codes.dtype} {list(codes.shape)} ({codes.name}), and may be a scale"
            where = Where(None, stored)
            yield Refusal("UNSUPPORTED", f"{message}: cast alone, scales change what codes stand for", where, hint)


def _codes_around(name: str, codes_in: Mapping[str, Sequence[Entry]]) -> Iterator[Entry]:
    """Yield the quantized codes in the module of a tensor, then the codes in each enclosing module."""
    holder = _module_name(name)
    while holder:
        yield from codes_in.get(holder, ())
        holder = "" if holder.startswith(OPTIMIZER) else _module_name(holder)


def _may_scale(entry: Entry, codes: Entry) -> bool:
    return may_scale(entry.name, entry, codes, deeper=_module_name(entry.name) != _module_name(codes.name))


def _module_name(name: str) -> str:
    """Return the name of the module that contains a tensor; for optimizer state, return the name of its parameter."""
    return name.rpartition("/" if name.startswith(OPTIMIZER) else ".")[0]
