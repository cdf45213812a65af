"""Casts: plain floating-point tensors seen in another dtype, cast when they are read.

Encoded tensors are not touched (`decode` does that), nor are integers. Optimizer state, scales of the cache of a
quantized model, and tensors that a family's table marks as `precise`, keep their dtype unless patterns name them; the
plan lists what stays.
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
from transaxle.engine.views.encode import chosen
from transaxle.engine.views.encoded import Catalog
from transaxle.errors import Refusal, Where, gathered, refuse
from transaxle.formats.catalog import Container, Entry, Extent, nbytes, numpy_dtype
from transaxle.formats.training_state import OPTIMIZER
from transaxle.move.transfer import Readable

_FILE = "\0cast "
"""Prefix of the names of virtual files."""
BAND = 1 << 18
"""Elements that are cast at a time."""


class Caster:
    """One plain tensor as the row-major bytes of its values in another dtype.

    Args:
        entry: the tensor.
        source: turns it into transfers.
        reader: reads the files.
        dtype: safetensors code of the wanted dtype.
    """

    action: ClassVar[Action] = "cast"
    """What it does to the values, as reports call it."""

    def __init__(self, entry: Entry, source: Source, reader: Readable, dtype: Wide) -> None:
        self.entry = entry
        self.dtype = dtype
        self._source, self._reader = source, reader
        self._count = prod(entry.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return nbytes(self.dtype, self.entry.shape)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill a view with the bytes of the values from `offset` on.

        Raises:
            TransaxleError: what the reader raises.
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
        """See `Computed`."""
        return RecodedTensor(self.entry.name, self.action, self.entry.dtype, "", self.dtype, self.entry.shape)

    def measure(self) -> tuple[Error, int]:
        """Return how far the cast values are from the originals, and how many finite ones became infinite."""
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


def precise(bound: BoundNames | None) -> frozenset[str]:
    """Return the stored names that keep their dtype unless a pattern names them; see `precise` in tables."""
    if bound is None:
        return frozenset()
    precise_tensors = bound.family.precise
    lines = [
        names for (line, _), names in bound.names.items() if precise_tensors.intersection(line.expression.components)
    ]
    return frozenset((*bound.ignored, *(name for names in lines for name in names.values())))


def cast_to(catalog: Catalog, to: str, only: Sequence[str], skip: Sequence[str], keep: frozenset[str]) -> Container:
    """Return a container with plain tensors in another dtype.

    Args:
        catalog: the tensors of a container.
        to: `bf16`, `fp16` or `fp32`.
        only: patterns of the names to cast; none: all weights but those of `keep`.
        skip: patterns of names that keep their dtype.
        keep: names that are cast only where a pattern of `only` names them.

    Raises:
        Refused: what the catalog refuses: codes that are not known could be cast, or their scales alone; UNSUPPORTED
            for numbers beside other codes.
        UsageError: AMBIGUOUS for an unknown type, where no tensor is plain, and for a pattern that none of them has.
    """
    if to not in CASTS:
        raise refuse("AMBIGUOUS", f"cannot cast to {to!r}", hint=f"Choose one of: {', '.join(CASTS)}.")
    if catalog.refusals:
        raise gathered(catalog.refusals)
    container, dtype = catalog.container, CASTS[to]
    beside = set(training_only(catalog.entries, catalog.entries))
    plain = [
        name
        for name in container.entries
        if name in catalog.entries and name not in catalog.encoded and container.entries[name].dtype in PLAIN
    ]
    plain = [name for name in plain if name not in beside]
    if not plain:
        message = "no plain floating-point tensor to cast; integers, codes and scales are not cast"
        raise refuse("AMBIGUOUS", message, hint='To decode encoded tensors, use --decode (decode="bf16").')
    usual = [
        name
        for name in plain
        if split_slot(name)[1] == WEIGHT
        and name not in keep
        and not (is_of_cache(name) and (catalog.encoded or catalog.quantization))
    ]
    wanted = frozenset(chosen(plain, only, skip, "plain floating-point tensor", usual))
    changing = (
        name for name in plain if name in wanted and name not in only and container.entries[name].dtype != dtype
    )
    if scales := list(scales_alone(changing, catalog)):
        raise gathered(scales)
    source = Source(container, None)
    casters: dict[str, Caster] = {}
    entries: dict[str, Entry] = {}
    for name, entry in container.entries.items():
        entries[name] = entry
        if name in wanted and entry.dtype != dtype:
            casters[_FILE + name] = Caster(entry, source, container.storage, dtype)
            extent = Extent((0,) * len(entry.shape), entry.shape, _FILE + name, 0)
            entries[name] = Entry(name, dtype, entry.shape, (extent,))
    stayed = [name for name in plain if name not in wanted and container.entries[name].dtype != dtype]
    return container.recoded(casters, entries, dtype=dtype, stayed=tuple(stayed))


def scales_alone(names: Iterable[str], catalog: Catalog) -> Iterator[Refusal]:
    """Yield why some tensors are not cast: they are scales of codes, or lie beside codes that nobody describes.

    Args:
        names: stored names, or those of an encoded tensor's buffers.
        catalog: the tensors of a container.
    """
    buffers = catalog.container.entries
    codes_in: dict[str, list[Entry]] = defaultdict(list)
    for name, entry in buffers.items():
        if may_be_codes(name, entry):
            codes_in[_holder(name)].append(entry)
    hint = "Leave it out with --skip NAME; if it is no scale, give its whole name with --only."
    for name in names:
        stored, _, role = name.partition("\0")
        codes = next((e for e in _around(stored, codes_in) if role or _may_scale(buffers[stored], e)), None)
        if codes is not None:
            message = f"it lies beside {codes.dtype} {list(codes.shape)} ({codes.name}), and may be a scale"
            where = Where(None, stored)
            yield Refusal("UNSUPPORTED", f"{message}: cast alone, scales change what codes stand for", where, hint)


def _around(name: str, codes_in: Mapping[str, Sequence[Entry]]) -> Iterator[Entry]:
    """Yield the codes in the module of a tensor, then in those around it."""
    holder = _holder(name)
    while holder:
        yield from codes_in.get(holder, ())
        holder = "" if holder.startswith(OPTIMIZER) else _holder(holder)


def _may_scale(entry: Entry, codes: Entry) -> bool:
    return may_scale(entry.name, entry, codes, deeper=_holder(entry.name) != _holder(codes.name))


def _holder(name: str) -> str:
    """Return the module of a tensor, or the parameter whose optimizer state it is."""
    return name.rpartition("/" if name.startswith(OPTIMIZER) else ".")[0]
