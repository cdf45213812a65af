"""What values tensors have: extremes, moments, zeros, channels that stand out; they are read once, in blocks.

**Tallies of values**: how often each code of a small type occurs, exact sums of others, and the largest of each
channel.

All that is added are whole numbers: counts of codes, and the mantissas, and their squares, of larger types. So the
sums are exact until they are rounded once, at the end, and no order of blocks, threads or additions changes them.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from transaxle.engine.checkpoint.checkpoint import Checkpoint, StoredTensor
from transaxle.formats.catalog import ITEM_BITS, numpy_dtype
from transaxle.move.workers import Limits, Progress, Worker, no_progress, run_workers

_AT_ONCE = 1 << 16
"""Elements that are looked at together: they stay in the cache, and sums of as many limbs are exact in doubles."""
_COUNTED_AT_ONCE = 1 << 18
_LIMB = 32
"""Bits of the parts in which mantissas and their squares are added."""
_COUNTED = 2
"""Bytes of the types of which every code is counted."""
_DIGITS = 16
"""Bits of a value's mantissa in such types, at most: integers of two bytes have as many."""
_ABOVE_ALL, _BELOW_ALL = (1 << 63) - 1, -1 << 63
Doubles = npt.NDArray[np.float64]
Codes = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Moments:
    """What was found of values; only finite ones enter into the first four."""

    least: float
    """The smallest; NaN where there is none."""
    largest: float
    """The largest."""
    total: float
    """Their sum."""
    squares: float
    """The sum of their squares."""
    elements: int
    """How many there are, whatever they are."""
    zeros: int
    """Those that are 0 or -0."""
    nans: int
    """Those that are NaN."""
    infinite: int
    """Those that are infinite."""


class Tally(Protocol):
    """What is known of a tensor's values so far."""

    def add(self, block: memoryview) -> None:
        """Add the next elements."""

    def found(self) -> Moments:
        """Return what was found."""

    def channels(self) -> Doubles:
        """Return the largest absolute value of each channel, of finite ones; 0 where there is none."""


def tally_of(kind: np.dtype[Any], width: int = 0) -> Tally:
    """Return an empty tally.

    Args:
        kind: the type of the elements.
        width: channels, which are the positions along the last dim; 0 where they are not looked at.
    """
    return _Counted(kind, width) if kind.itemsize <= _COUNTED else _Summed(_WIDE[kind], width)


class _Channels:
    """The largest of each channel, as rows pass by, whole or not.

    Args:
        width: channels.
        kind: type of the sizes that are compared.
    """

    def __init__(self, width: int, kind: npt.DTypeLike) -> None:
        self.largest: npt.NDArray[Any] = np.zeros(width, kind)
        self._column = 0
        """The channel of the next element."""

    def add(self, sizes: npt.NDArray[Any]) -> None:
        """Add the next elements, as sizes that order as their absolute values do."""
        width = len(self.largest)
        if not width:
            return
        first = min(-self._column % width, len(sizes))
        rows = (len(sizes) - first) // width
        self._merge(self._column, sizes[:first])
        if rows:
            self._merge(0, sizes[first : first + rows * width].reshape(rows, width).max(0))
        self._merge(0, sizes[first + rows * width :])
        self._column = (self._column + len(sizes)) % width

    def _merge(self, at: int, sizes: npt.NDArray[Any]) -> None:
        into = self.largest[at : at + len(sizes)]
        np.maximum(into, sizes, out=into)


def _rounded_once(parts: Mapping[int, int], grain: int) -> float:
    """Return a sum of whole numbers, each times two to an exponent, times two to the grain: rounded once."""
    total = sum(part << exponent for exponent, part in parts.items())
    try:
        return float(total << grain) if grain > 0 else total / (1 << -grain)
    except OverflowError:
        return math.inf if total > 0 else -math.inf


@dataclass(frozen=True, slots=True)
class _Type:
    """Every code of a small type."""

    values: Doubles
    """What each means."""
    sizes: Doubles
    """Its absolute value, and 0 for what is not finite."""
    mantissas: npt.NDArray[np.int64]
    """With `exponents`, the exact value: mantissa times two to the exponent; 0 for what is not finite."""
    exponents: npt.NDArray[np.int64]
    """See there; at least 0, counted from `lowest` on."""
    lowest: int
    """The exponent of the grain of all values."""
    mask: int
    """A code without its sign."""
    last: int | None
    """The largest such code that is finite, where they are in the order of sizes, from 0 on; else None."""
    whole: bool
    """Whether codes are whole numbers with a sign."""


@cache
def _type(kind: np.dtype[Any]) -> _Type:
    codes = np.arange(1 << 8 * kind.itemsize, dtype=f"u{kind.itemsize}")
    with np.errstate(invalid="ignore"):  # NaN of the kind that signals
        values: Doubles = (codes != 0 if kind.kind == "b" else codes.view(kind)).astype(np.float64)
    sizes = np.where(np.isfinite(values), np.abs(values), 0.0)
    fractions, exponents = np.frexp(np.where(np.isfinite(values), values, 0.0))
    mantissas = (fractions * (1 << _DIGITS)).astype(np.int64)
    exponents = np.where(mantissas == 0, 0, exponents.astype(np.int64) - _DIGITS)
    lowest = min(int(exponents.min()), 0)
    ordered = None
    mask = len(codes) - 1
    for mask in (len(codes) - 1, len(codes) // 2 - 1):
        top = int(np.flatnonzero(np.isfinite(values[: mask + 1])).max())
        without_sign = codes & mask
        as_ordered = np.where(without_sign <= top, sizes[without_sign], 0.0)
        in_order = sizes[0] == 0 and bool((np.diff(sizes[: top + 1]) >= 0).all())
        if in_order and np.array_equal(as_ordered, sizes):
            ordered = top
            break
    return _Type(values, sizes, mantissas, exponents - lowest, lowest, mask, ordered, kind.kind == "i")


class _Counted:
    """A tally of a small type: it is counted how often there is each code."""

    def __init__(self, kind: np.dtype[Any], width: int) -> None:
        self._type = _type(kind)
        self._codes = np.dtype(f"u{kind.itemsize}")
        self._counts = np.zeros(len(self._type.values), np.int64)
        self._by_code = self._type.last is not None or self._type.whole
        self._channels = _Channels(width, self._codes if self._by_code else np.float64)
        self._indices = np.empty(0, np.intp)

    def add(self, block: memoryview) -> None:
        """See `Tally`."""
        codes = np.frombuffer(block, self._codes)
        self._indices = _grown(self._indices, min(len(codes), _COUNTED_AT_ONCE))
        for start in range(0, len(codes), _COUNTED_AT_ONCE):
            part = codes[start : start + _COUNTED_AT_ONCE]
            indices = self._indices[: len(part)]
            indices[...] = part
            self._counts += np.bincount(indices, minlength=len(self._counts))
            if len(self._channels.largest):
                self._channels.add(self._sizes(part))

    def _sizes(self, codes: Codes) -> npt.NDArray[Any]:
        if self._type.whole:
            return np.where(codes >> (8 * self._codes.itemsize - 1), ~codes + self._codes.type(1), codes)
        if self._type.last is None:
            return self._type.sizes[codes]
        without_sign: npt.NDArray[Any] = codes & self._codes.type(self._type.mask)
        without_sign[without_sign > self._type.last] = 0
        return without_sign

    def found(self) -> Moments:
        """See `Tally`."""
        there = np.flatnonzero(self._counts)
        counts, values = self._counts[there], self._type.values[there]
        nans, infinite = int(counts[np.isnan(values)].sum()), int(counts[np.isinf(values)].sum())
        finite = values[np.isfinite(values)]
        mantissas, exponents = self._type.mantissas[there], self._type.exponents[there]
        grain, squares = self._type.lowest, mantissas**2
        return Moments(
            *((float(finite.min()) + 0.0, float(finite.max()) + 0.0) if len(finite) else (math.nan, math.nan)),
            total=_rounded_once(_by_exponent(exponents, counts, mantissas), grain),
            squares=_rounded_once(_squares(exponents, counts, squares), 2 * grain),
            elements=int(counts.sum()),
            zeros=int(counts[values == 0].sum()),
            nans=nans,
            infinite=infinite,
        )

    def channels(self) -> Doubles:
        """See `Tally`."""
        largest = self._channels.largest
        if self._type.whole:
            return largest.astype(np.float64)
        return self._type.sizes[largest] if self._by_code else largest


def _by_exponent(exponents: Codes, counts: Codes, parts: Codes) -> dict[int, int]:
    """Return the sum of parts of each exponent; exact, because 16 bits times what a tensor has fit into 53."""
    sums = np.bincount(exponents, weights=counts.astype(np.float64) * parts)
    return {int(exponent): int(sums[exponent]) for exponent in np.flatnonzero(sums)}


def _squares(exponents: Codes, counts: Codes, squares: Codes) -> dict[int, int]:
    low = _by_exponent(exponents, counts, squares & 0xFFFF)
    high = _by_exponent(exponents, counts, squares >> 16)
    return {2 * each: low.get(each, 0) + (high.get(each, 0) << 16) for each in low.keys() | high.keys()}


@dataclass(frozen=True, slots=True)
class _WideType:
    """How the codes of a type are read."""

    dtype: np.dtype[Any]
    """The type of values."""
    mantissa: int = 0
    """Bits of a mantissa that are stored; 0: whole numbers."""
    grain: int = 0
    """Power of two that the smallest value is."""
    signed: bool = True
    """Whether there are negative ones."""

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 8 * self.dtype.itemsize

    @property
    def size_mask(self) -> int:
        """A code without its sign."""
        return (1 << (self.bits - 1)) - 1

    @property
    def infinity(self) -> int:
        """The code of the infinite value."""
        return self.size_mask >> self.mantissa << self.mantissa


_WIDE = {
    kind.dtype: kind
    for kind in (
        _WideType(numpy_dtype("F32"), 23, -149),
        _WideType(numpy_dtype("F64"), 52, -1074),
        _WideType(numpy_dtype("I32")),
        _WideType(numpy_dtype("U32"), signed=False),
        _WideType(numpy_dtype("I64")),
        _WideType(numpy_dtype("U64"), signed=False),
    )
}


class _Summed:
    """A tally of a large type: parts of mantissas and of their squares are added, by exponent."""

    def __init__(self, kind: _WideType, width: int) -> None:
        self._type = kind
        self._word = np.dtype(f"<u{kind.bits // 8}")
        self._elements = self._zeros = self._nans = self._infinite = 0
        self._least, self._most = _ABOVE_ALL, _BELOW_ALL
        self._channels = _Channels(width, self._word)
        self._sums, self._squares = Counter[int](), Counter[int]()
        """Power of two, counted from the grain on -> how often."""
        self._mantissas = self._products = np.empty(0, np.uint64)
        self._exponents, self._weights = np.empty(0, np.intp), np.empty(0)

    def add(self, block: memoryview) -> None:
        """See `Tally`."""
        codes = np.frombuffer(block, self._word)
        self._elements += len(codes)
        for start in range(0, len(codes), _AT_ONCE):
            self._add(codes[start : start + _AT_ONCE])

    def _add(self, codes: Codes) -> None:
        kind = self._type
        sizes, negative = self._sizes(codes)
        places = self._places(codes, negative)
        if kind.mantissa and not (finite := sizes < kind.infinity).all():
            infinite = int(np.count_nonzero(sizes == kind.infinity))
            self._infinite += infinite
            self._nans += int(np.count_nonzero(~finite)) - infinite
            sizes, places = np.where(finite, sizes, self._word.type(0)), places[finite]
            self._zeros -= len(codes) - len(places)
        self._zeros += len(codes) - int(np.count_nonzero(sizes))
        if len(places):
            self._least, self._most = min(self._least, int(places.min())), max(self._most, int(places.max()))
        self._channels.add(sizes)
        if kind.mantissa:
            self._add_floats(sizes, codes.view(kind.dtype))
        else:
            self._add_integers(sizes.astype(np.uint64), negative)

    def _add_floats(self, sizes: Codes, signs: npt.NDArray[Any]) -> None:
        """Add mantissas and their squares, of each exponent those that have it."""
        kind, count = self._type, len(sizes)
        self._exponents, self._mantissas = (_grown(a, count) for a in (self._exponents, self._mantissas))
        self._products, self._weights = _grown(self._products, count), _grown(self._weights, count)
        exponents, mantissas = self._exponents[:count], self._mantissas[:count]
        np.right_shift(sizes, kind.mantissa, out=exponents, casting="unsafe")
        np.minimum(exponents, 1, out=mantissas, casting="unsafe")
        mantissas <<= kind.mantissa
        np.bitwise_and(sizes, (1 << kind.mantissa) - 1, out=self._products[:count], casting="unsafe")
        mantissas |= self._products[:count]
        limbs = list(_limbs(mantissas, kind.mantissa + 1))
        for at, limb in enumerate(limbs):
            self._gather(self._sums, 1, limb, _LIMB * at, signs)
            for other in range(at, len(limbs)):
                product = np.multiply(limb, limbs[other], out=self._products[:count])
                for half, part in enumerate(_limbs(product, 2 * _LIMB)):
                    self._gather(self._squares, 2, part, _LIMB * (at + other + half) + (other != at))

    def _gather(
        self, into: Counter[int], step: int, parts: Codes, shift: int, signs: npt.NDArray[Any] | None = None
    ) -> None:
        """Add parts of the numbers of each exponent; one more of it is `step` in the sum."""
        weights = self._weights[: len(parts)]
        weights[...] = parts
        if signs is not None:
            with np.errstate(invalid="ignore"):  # NaN of the kind that signals
                np.copysign(weights, signs, out=weights)
        sums = np.bincount(self._exponents[: len(parts)], weights=weights)
        for exponent in np.flatnonzero(sums).tolist():
            # Subnormal numbers have the grain of the smallest normal ones.
            into[step * max(exponent - 1, 0) + shift] += int(sums[exponent])

    def _add_integers(self, sizes: npt.NDArray[np.uint64], negative: npt.NDArray[np.bool_]) -> None:
        """Add whole numbers and their squares."""
        limbs = list(_limbs(sizes, self._type.bits))
        for at, limb in enumerate(limbs):
            signed = limb.astype(np.int64)
            self._sums[_LIMB * at] += int(np.where(negative, -signed, signed).sum())
            for other in range(at, len(limbs)):
                for half, part in enumerate(_limbs(limb * limbs[other], 2 * _LIMB)):
                    self._squares[_LIMB * (at + other + half) + (other != at)] += int(part.sum())

    def _sizes(self, codes: Codes) -> tuple[Codes, npt.NDArray[np.bool_]]:
        """Return sizes as codes, and which are negative."""
        kind = self._type
        negative = codes > kind.size_mask if kind.signed else np.zeros(len(codes), bool)
        if kind.mantissa:
            return codes & self._word.type(kind.size_mask), negative
        return np.where(negative, ~codes + self._word.type(1), codes), negative

    def _places(self, codes: Codes, negative: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Return whole numbers in the order of values."""
        kind = self._type
        if kind.mantissa:
            codes = np.where(negative, codes ^ self._word.type(kind.size_mask), codes)
        elif not kind.signed:
            return (codes.astype(np.uint64) ^ np.uint64(1 << 63 if kind.bits == 64 else 0)).view(np.int64)
        places: npt.NDArray[np.int64] = codes.view(f"<i{kind.bits // 8}")
        return places

    def _value(self, place: int) -> float:
        """Return the value at a place."""
        kind = self._type
        if not kind.mantissa:
            return float(place if kind.signed or kind.bits < 64 else place + (1 << 63))
        code = place if place >= 0 else (place & 2 * kind.size_mask + 1) ^ kind.size_mask
        return float(np.array([code], self._word).view(kind.dtype)[0]) + 0.0

    def found(self) -> Moments:
        """See `Tally`."""
        grain, some = self._type.grain, self._least <= self._most
        extremes = (self._value(self._least), self._value(self._most)) if some else (math.nan, math.nan)
        return Moments(
            *extremes,
            total=_rounded_once(self._sums, grain),
            squares=_rounded_once(self._squares, 2 * grain),
            elements=self._elements,
            zeros=self._zeros,
            nans=self._nans,
            infinite=self._infinite,
        )

    def channels(self) -> Doubles:
        """See `Tally`."""
        largest = self._channels.largest
        values: Doubles = (largest.view(self._type.dtype) if self._type.mantissa else largest).astype(float)
        return values


def _limbs(numbers: Codes, bits: int) -> Iterator[Codes]:
    """Yield the parts of whole numbers of so many bits, the lowest first."""
    for at in range(0, bits, _LIMB):
        low = numbers if at + _LIMB >= bits else numbers & numbers.dtype.type((1 << _LIMB) - 1)
        yield low >> numbers.dtype.type(at) if at else low


def _grown(buffer: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """Return a buffer of at least so many elements: the same one if it has them."""
    return buffer if len(buffer) >= count else np.empty(count, buffer.dtype)


_WIDEST = "fp32"
"""What encoded tensors are decoded to."""
_OUTSTANDING = 6.0
"""How many times as large as the median's a channel's largest value must be to stand out."""


@dataclass(frozen=True, slots=True)
class TensorValues:
    """The values of one tensor. NaN and infinite values do not enter into its numbers."""

    elements: int
    """How many it has."""
    least: float
    """The smallest finite value; NaN where there is none."""
    largest: float
    """The largest finite value."""
    mean: float
    """Their mean."""
    rms: float
    """Root of the mean of their squares."""
    zeros: int
    """Elements that are 0 or -0."""
    nans: int
    """Elements that are NaN."""
    infinite: int
    """Elements that are infinite."""
    channels: int
    """Channels, which are the positions along the last dim; 0 where they were not looked at."""
    outstanding: tuple[int, ...]
    """Channels whose largest value is more than six times that of the median channel, the largest first."""
    times: float
    """How many times as large it is in the first of them, or in the largest; NaN where the median is 0."""

    @property
    def absmax(self) -> float:
        """The largest absolute value of a finite element."""
        return max(-self.least, self.largest)


@dataclass(frozen=True)
class CheckpointValues:
    """The values of a checkpoint's tensors."""

    tensors: dict[str, TensorValues]
    """Name -> its values, in the order of the checkpoint."""
    unmeasured: tuple[str, ...]
    """Tensors of types that have no numbers of whole bytes."""
    seen: Checkpoint
    """The view whose tensors they are: quantized ones are decoded."""


def measure_values(checkpoint: Checkpoint, limit: Limits, progress: Progress = no_progress) -> CheckpointValues:
    """Read every tensor once and measure its values.

    Args:
        checkpoint: as it is stored; quantized tensors are decoded.
        limit: workers and memory.
        progress: told the bytes of each block.

    Raises:
        TransaxleError: what reading raises.
    """
    seen = checkpoint.decode(_WIDEST) if checkpoint.catalog.encoded else checkpoint
    names = [name for name, tensor in seen.items() if _has_numbers(tensor)]
    found: dict[str, TensorValues] = {}
    lock = threading.Lock()

    def look(worker: Worker, name: str) -> None:
        values = _measured(seen[name], worker, progress)
        with lock:
            found[name] = values

    # The largest first, so that no worker is left alone with it at the end.
    largest_first = sorted(names, key=lambda name: -seen[name].nbytes)
    run_workers(largest_first, limit.jobs, partial(Worker, seen.container.storage, limit), look)
    kept = {name: found[name] for name in names}
    return CheckpointValues(kept, tuple(name for name in seen if name not in kept), seen)


def _has_numbers(tensor: StoredTensor) -> bool:
    kind = numpy_dtype(tensor.dtype)
    return ITEM_BITS.get(tensor.dtype, 8) >= 8 and kind.kind in "fiuVb" and not kind.names  # complex halves have names


def _measured(tensor: StoredTensor, worker: Worker, progress: Progress) -> TensorValues:
    kind = numpy_dtype(tensor.dtype)
    width = tensor.shape[-1] if len(tensor.shape) > 1 else 0
    tally = tally_of(kind, width if width * kind.itemsize <= worker.capacity else 0)
    for block in worker.blocks(tensor.transfers(), tensor.nbytes):
        tally.add(block)
        progress(len(block))
    return _of(tally.found(), tally.channels())


def _of(found: Moments, channels: Doubles) -> TensorValues:
    finite = found.elements - found.nans - found.infinite
    mean, rms = (found.total / finite, math.sqrt(found.squares / finite)) if finite else (math.nan, math.nan)
    odd = found.zeros, found.nans, found.infinite
    outstanding, times = _outstanding(channels)
    return TensorValues(found.elements, found.least, found.largest, mean, rms, *odd, len(channels), outstanding, times)


def _outstanding(largest: Doubles) -> tuple[tuple[int, ...], float]:
    """Return the channels that stand out, and how far the largest does."""
    if not len(largest):
        return (), math.nan
    order = np.argsort(-largest, kind="stable")
    ranked = largest[order]
    # As `np.median`, which imports numpy's masked arrays for it.
    median = float(ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2
    found = order[ranked > _OUTSTANDING * median] if median else order[:0]
    return tuple(found.tolist()), float(largest.max()) / median if median else math.nan
