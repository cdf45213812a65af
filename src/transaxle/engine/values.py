"""Statistics of tensors' values: extremes, moments, zeros, outlier channels. Each tensor is read once, in blocks.

**Tallies** accumulate the statistics: counts of each code for a small dtype, exact sums for a larger dtype, and the
largest value of each channel.

Only integers are added: counts of codes, and for larger dtypes mantissas and their squares. So the sums are exact until
they are rounded once at the end, and they do not depend on the order of blocks, threads or additions.
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

_SUM_BLOCK = 1 << 16
"""Number of elements that are processed together, so that they fit into the cache and their sums of limbs are exact in
double precision.
"""
_COUNT_BLOCK = 1 << 18
_LIMB = 32
"""Number of bits in each limb (a part of an integer); mantissas and their squares are added limb by limb."""
_COUNTED_BYTES = 2
"""Largest size of an element, in bytes, for which the occurrences of every code are counted."""
_DIGITS = 16
"""Largest number of mantissa bits among the dtypes with at most 16 bits: that of 16-bit integers."""
_ABOVE_ALL, _BELOW_ALL = (1 << 63) - 1, -1 << 63
Doubles = npt.NDArray[np.float64]
Codes = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Moments:
    """Statistics of a tensor's values; extremes and sums include only finite values."""

    least: float
    """Smallest finite value; NaN if no value is finite."""
    largest: float
    """Largest finite value; NaN if no value is finite."""
    total: float
    """Sum of the finite values."""
    squares: float
    """Sum of the squares of the finite values."""
    elements: int
    """Number of elements, whether finite or not."""
    zeros: int
    """Number of elements that are 0 or -0."""
    nans: int
    """Number of elements that are NaN."""
    infinite: int
    """Number of infinite elements."""


class Tally(Protocol):
    """Accumulates the statistics of one tensor's values."""

    def add(self, block: memoryview) -> None:
        """Add the next block of the tensor's elements."""

    def moments(self) -> Moments:
        """Return the statistics of all elements that were added."""

    def channels(self) -> Doubles:
        """Return the largest finite absolute value of each channel; 0 for a channel without finite values."""


def tally_of(kind: np.dtype[Any], width: int = 0) -> Tally:
    """Return an empty tally (accumulator of statistics).

    Args:
        kind: dtype of the elements.
        width: number of channels (positions along the last dim); 0 means that channels are not tracked.
    """
    return _CountingTally(kind, width) if kind.itemsize <= _COUNTED_BYTES else _SummingTally(_WIDE[kind], width)


class _Channels:
    """Tracks the largest magnitude of each channel, from blocks that may begin or end within a row.

    Args:
        width: number of channels.
        kind: dtype of the magnitudes.
    """

    def __init__(self, width: int, kind: npt.DTypeLike) -> None:
        self.largest: npt.NDArray[Any] = np.zeros(width, kind)
        self._column = 0
        """Index of the channel to which the next element belongs."""

    def add(self, sizes: npt.NDArray[Any]) -> None:
        """Add the next elements, given as integers that are ordered like the elements' absolute values."""
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


def _round_once(parts: Mapping[int, int], grain: int) -> float:
    """Return a sum of products (integer times power of two), multiplied by 2**grain, with a single rounding."""
    total = sum(part << exponent for exponent, part in parts.items())
    try:
        return float(total << grain) if grain > 0 else total / (1 << -grain)
    except OverflowError:
        return math.inf if total > 0 else -math.inf


@dataclass(frozen=True, slots=True)
class _CodeTable:
    """The values of all codes (bit patterns) of a small dtype."""

    values: Doubles
    """Value of each code."""
    sizes: Doubles
    """Absolute value of each code; 0 for a value that is not finite."""
    mantissas: npt.NDArray[np.int64]
    """Mantissa of each code; the exact value is mantissa * 2**(exponent + lowest). The mantissa is 0 if the value is
    not finite.
    """
    exponents: npt.NDArray[np.int64]
    """Exponent of each code, counted from `lowest`; it is at least 0."""
    lowest: int
    """Exponent of the smallest step between two values of the dtype, which is a power of two."""
    mask: int
    """Mask that removes the sign from a code."""
    last: int | None
    """Largest finite code after removing the sign bit, if such codes are ordered as the magnitudes of their values are;
    otherwise None.
    """
    whole: bool
    """Whether the dtype is a signed integer."""


@cache
def _code_table(kind: np.dtype[Any]) -> _CodeTable:
    codes = np.arange(1 << 8 * kind.itemsize, dtype=f"u{kind.itemsize}")
    with np.errstate(invalid="ignore"):  # the values may include signaling NaNs
        values: Doubles = (codes != 0 if kind.kind == "b" else codes.view(kind)).astype(np.float64)
    sizes = np.where(np.isfinite(values), np.abs(values), 0.0)
    fractions, exponents = np.frexp(np.where(np.isfinite(values), values, 0.0))
    mantissas = (fractions * (1 << _DIGITS)).astype(np.int64)
    exponents = np.where(mantissas == 0, 0, exponents.astype(np.int64) - _DIGITS)
    lowest = min(int(exponents.min()), 0)
    last_code = None
    mask = len(codes) - 1
    for mask in (len(codes) - 1, len(codes) // 2 - 1):
        top = int(np.flatnonzero(np.isfinite(values[: mask + 1])).max())
        without_sign = codes & mask
        as_ordered = np.where(without_sign <= top, sizes[without_sign], 0.0)
        in_order = sizes[0] == 0 and bool((np.diff(sizes[: top + 1]) >= 0).all())
        if in_order and np.array_equal(as_ordered, sizes):
            last_code = top
            break
    return _CodeTable(values, sizes, mantissas, exponents - lowest, lowest, mask, last_code, kind.kind == "i")


class _CountingTally:
    """A tally for a small dtype: it counts how often each code occurs."""

    def __init__(self, kind: np.dtype[Any], width: int) -> None:
        self._type = _code_table(kind)
        self._codes = np.dtype(f"u{kind.itemsize}")
        self._counts = np.zeros(len(self._type.values), np.int64)
        self._by_code = self._type.last is not None or self._type.whole
        self._channels = _Channels(width, self._codes if self._by_code else np.float64)
        self._indices = np.empty(0, np.intp)

    def add(self, block: memoryview) -> None:
        """Count the codes of the next block; see `Tally.add`."""
        codes = np.frombuffer(block, self._codes)
        self._indices = _grow_buffer(self._indices, min(len(codes), _COUNT_BLOCK))
        for start in range(0, len(codes), _COUNT_BLOCK):
            part = codes[start : start + _COUNT_BLOCK]
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

    def moments(self) -> Moments:
        """Compute the statistics from the counts; see `Tally.moments`."""
        present = np.flatnonzero(self._counts)
        counts, values = self._counts[present], self._type.values[present]
        nans, infinite = int(counts[np.isnan(values)].sum()), int(counts[np.isinf(values)].sum())
        finite = values[np.isfinite(values)]
        mantissas, exponents = self._type.mantissas[present], self._type.exponents[present]
        grain, squares = self._type.lowest, mantissas**2
        return Moments(
            *((float(finite.min()) + 0.0, float(finite.max()) + 0.0) if len(finite) else (math.nan, math.nan)),
            total=_round_once(_by_exponent(exponents, counts, mantissas), grain),
            squares=_round_once(_squares(exponents, counts, squares), 2 * grain),
            elements=int(counts.sum()),
            zeros=int(counts[values == 0].sum()),
            nans=nans,
            infinite=infinite,
        )

    def channels(self) -> Doubles:
        """Return the largest absolute value of each channel; see `Tally.channels`."""
        largest = self._channels.largest
        if self._type.whole:
            return largest.astype(np.float64)
        return self._type.sizes[largest] if self._by_code else largest


def _by_exponent(exponents: Codes, counts: Codes, parts: Codes) -> dict[int, int]:
    """Return exponent -> sum of the 16-bit parts with this exponent. The sums are exact, because sums over one tensor
    fit into 53 bits.
    """
    sums = np.bincount(exponents, weights=counts.astype(np.float64) * parts)
    return {int(exponent): int(sums[exponent]) for exponent in np.flatnonzero(sums)}


def _squares(exponents: Codes, counts: Codes, squares: Codes) -> dict[int, int]:
    low = _by_exponent(exponents, counts, squares & 0xFFFF)
    high = _by_exponent(exponents, counts, squares >> 16)
    return {2 * each: low.get(each, 0) + (high.get(each, 0) << 16) for each in low.keys() | high.keys()}


@dataclass(frozen=True, slots=True)
class _WideType:
    """Bit format of the codes of a large dtype."""

    dtype: np.dtype[Any]
    """Numpy dtype of the values."""
    mantissa: int = 0
    """Number of stored mantissa bits; 0 for integers."""
    grain: int = 0
    """Exponent of the smallest positive value of the dtype, which is 2**grain."""
    signed: bool = True
    """Whether the dtype has negative values."""

    @property
    def bits(self) -> int:
        """Number of bits of one element."""
        return 8 * self.dtype.itemsize

    @property
    def size_mask(self) -> int:
        """Mask that removes the sign from a code."""
        return (1 << (self.bits - 1)) - 1

    @property
    def infinity(self) -> int:
        """Code of infinity."""
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


class _SummingTally:
    """A tally for a large dtype: it sums, for each exponent, the limbs of mantissas and of their squares."""

    def __init__(self, kind: _WideType, width: int) -> None:
        self._type = kind
        self._word = np.dtype(f"<u{kind.bits // 8}")
        self._elements = self._zeros = self._nans = self._infinite = 0
        self._least, self._most = _ABOVE_ALL, _BELOW_ALL
        self._channels = _Channels(width, self._word)
        self._sums, self._squares = Counter[int](), Counter[int]()
        """Exponent of two, counted from the dtype's `grain` -> sum of the limbs (parts of mantissas, or of their
        squares) with this exponent.
        """
        self._mantissas = self._products = np.empty(0, np.uint64)
        self._exponents, self._weights = np.empty(0, np.intp), np.empty(0)

    def add(self, block: memoryview) -> None:
        """Sum the mantissas of the next block; see `Tally.add`."""
        codes = np.frombuffer(block, self._word)
        self._elements += len(codes)
        for start in range(0, len(codes), _SUM_BLOCK):
            self._add(codes[start : start + _SUM_BLOCK])

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
        """Add the elements' mantissas, and the squares of the mantissas, to the sums for each exponent."""
        kind, count = self._type, len(sizes)
        self._exponents, self._mantissas = (_grow_buffer(a, count) for a in (self._exponents, self._mantissas))
        self._products, self._weights = _grow_buffer(self._products, count), _grow_buffer(self._weights, count)
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
        """Add limbs (parts of mantissas, or of their squares) to the sums by exponent; squares have twice the exponent,
        so `step` is 2 for them.
        """
        weights = self._weights[: len(parts)]
        weights[...] = parts
        if signs is not None:
            with np.errstate(invalid="ignore"):  # the values may include signaling NaNs
                np.copysign(weights, signs, out=weights)
        sums = np.bincount(self._exponents[: len(parts)], weights=weights)
        for exponent in np.flatnonzero(sums).tolist():
            # Subnormal numbers have the same grain as the smallest normal numbers.
            into[step * max(exponent - 1, 0) + shift] += int(sums[exponent])

    def _add_integers(self, sizes: npt.NDArray[np.uint64], negative: npt.NDArray[np.bool_]) -> None:
        """Add integers and their squares to the sums."""
        limbs = list(_limbs(sizes, self._type.bits))
        for at, limb in enumerate(limbs):
            signed = limb.astype(np.int64)
            self._sums[_LIMB * at] += int(np.where(negative, -signed, signed).sum())
            for other in range(at, len(limbs)):
                for half, part in enumerate(_limbs(limb * limbs[other], 2 * _LIMB)):
                    self._squares[_LIMB * (at + other + half) + (other != at)] += int(part.sum())

    def _sizes(self, codes: Codes) -> tuple[Codes, npt.NDArray[np.bool_]]:
        """Return the codes without their signs, and an array that marks the negative elements."""
        kind = self._type
        negative = codes > kind.size_mask if kind.signed else np.zeros(len(codes), bool)
        if kind.mantissa:
            return codes & self._word.type(kind.size_mask), negative
        return np.where(negative, ~codes + self._word.type(1), codes), negative

    def _places(self, codes: Codes, negative: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Return one integer for each code; these integers are ordered like the values of the codes."""
        kind = self._type
        if kind.mantissa:
            codes = np.where(negative, codes ^ self._word.type(kind.size_mask), codes)
        elif not kind.signed:
            return (codes.astype(np.uint64) ^ np.uint64(1 << 63 if kind.bits == 64 else 0)).view(np.int64)
        places: npt.NDArray[np.int64] = codes.view(f"<i{kind.bits // 8}")
        return places

    def _value(self, place: int) -> float:
        """Return the value that belongs to an integer that `_places` returned."""
        kind = self._type
        if not kind.mantissa:
            return float(place if kind.signed or kind.bits < 64 else place + (1 << 63))
        code = place if place >= 0 else (place & 2 * kind.size_mask + 1) ^ kind.size_mask
        return float(np.array([code], self._word).view(kind.dtype)[0]) + 0.0

    def moments(self) -> Moments:
        """Round the exact sums to statistics; see `Tally.moments`."""
        grain, has_finite = self._type.grain, self._least <= self._most
        extremes = (self._value(self._least), self._value(self._most)) if has_finite else (math.nan, math.nan)
        return Moments(
            *extremes,
            total=_round_once(self._sums, grain),
            squares=_round_once(self._squares, 2 * grain),
            elements=self._elements,
            zeros=self._zeros,
            nans=self._nans,
            infinite=self._infinite,
        )

    def channels(self) -> Doubles:
        """Return the largest absolute value of each channel; see `Tally.channels`."""
        largest = self._channels.largest
        values: Doubles = (largest.view(self._type.dtype) if self._type.mantissa else largest).astype(float)
        return values


def _limbs(numbers: Codes, bits: int) -> Iterator[Codes]:
    """Yield the limbs (groups of bits) of integers with the given number of bits, the lowest limb first."""
    for at in range(0, bits, _LIMB):
        low = numbers if at + _LIMB >= bits else numbers & numbers.dtype.type((1 << _LIMB) - 1)
        yield low >> numbers.dtype.type(at) if at else low


def _grow_buffer(buffer: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """Return a buffer of at least `count` elements; the given buffer is returned if it is large enough."""
    return buffer if len(buffer) >= count else np.empty(count, buffer.dtype)


_WIDEST = "fp32"
"""Dtype to which encoded tensors are decoded before their values are measured."""
_OUTSTANDING = 6.0
"""A channel is an outlier if its largest value exceeds the largest value of the median channel by more than this
factor.
"""


@dataclass(frozen=True, slots=True)
class TensorValues:
    """Statistics of one tensor's values; NaN and infinite values are counted, but otherwise ignored."""

    elements: int
    """Number of elements, whether finite or not."""
    least: float
    """Smallest finite value; NaN if no value is finite."""
    largest: float
    """Largest finite value; NaN if no value is finite."""
    mean: float
    """Mean of the finite values."""
    rms: float
    """Root mean square of the finite values."""
    zeros: int
    """Number of elements that are 0 or -0."""
    nans: int
    """Number of elements that are NaN."""
    infinite: int
    """Number of infinite elements."""
    channels: int
    """Number of channels (positions along the last dim); 0 means that channels were not tracked."""
    outliers: tuple[int, ...]
    """Indices of the outlier channels, whose largest value is more than six times that of the median channel; the most
    extreme channel first.
    """
    outlier_ratio: float
    """Largest value of the most extreme channel divided by that of the median channel; NaN if the median channel's is
    0.
    """

    @property
    def absmax(self) -> float:
        """Largest absolute value among the finite values."""
        return max(-self.least, self.largest)


@dataclass(frozen=True)
class CheckpointValues:
    """Statistics of the values of a checkpoint's tensors."""

    tensors: dict[str, TensorValues]
    """Tensor name -> statistics of its values, in the order of the checkpoint."""
    unmeasured: tuple[str, ...]
    """Names of tensors that were not measured, because their elements are not numbers of whole bytes."""
    view: Checkpoint
    """The view of the checkpoint that was measured, with quantized tensors decoded."""


def measure_values(checkpoint: Checkpoint, limit: Limits, progress: Progress = no_progress) -> CheckpointValues:
    """Read every tensor once and measure its values.

    Args:
        checkpoint: the checkpoint in its stored dialect; quantized tensors are decoded before they are measured.
        limit: number of worker threads, and memory of their buffers.
        progress: function called with the number of bytes of each block.

    Raises:
        TransaxleError: any error of reading the tensors.
    """
    view = checkpoint.decode(_WIDEST) if checkpoint.catalog.encoded else checkpoint
    names = [name for name, tensor in view.items() if _has_numbers(tensor)]
    values_by_name: dict[str, TensorValues] = {}
    lock = threading.Lock()

    def measure_tensor(worker: Worker, name: str) -> None:
        values = _measure_tensor(view[name], worker, progress)
        with lock:
            values_by_name[name] = values

    # The largest tensors are measured first, so that at the end no thread is still busy with a large tensor.
    largest_first = sorted(names, key=lambda name: -view[name].nbytes)
    run_workers(largest_first, limit.jobs, partial(Worker, view.container.storage, limit), measure_tensor)
    measured = {name: values_by_name[name] for name in names}
    return CheckpointValues(measured, tuple(name for name in view if name not in measured), view)


def _has_numbers(tensor: StoredTensor) -> bool:
    kind = numpy_dtype(tensor.dtype)
    # Complex numbers of half precision count as no numbers: their numpy dtype is a structure with named fields.
    return ITEM_BITS.get(tensor.dtype, 8) >= 8 and kind.kind in "fiuVb" and not kind.names


def _measure_tensor(tensor: StoredTensor, worker: Worker, progress: Progress) -> TensorValues:
    kind = numpy_dtype(tensor.dtype)
    width = tensor.shape[-1] if len(tensor.shape) > 1 else 0
    tally = tally_of(kind, width if width * kind.itemsize <= worker.capacity else 0)
    for block in worker.blocks(tensor.transfers(), tensor.nbytes):
        tally.add(block)
        progress(len(block))
    return _to_tensor_values(tally.moments(), tally.channels())


def _to_tensor_values(moments: Moments, channels: Doubles) -> TensorValues:
    finite = moments.elements - moments.nans - moments.infinite
    mean, rms = (moments.total / finite, math.sqrt(moments.squares / finite)) if finite else (math.nan, math.nan)
    special_counts = moments.zeros, moments.nans, moments.infinite
    outstanding, times = _outlier_channels(channels)
    return TensorValues(
        moments.elements, moments.least, moments.largest, mean, rms, *special_counts, len(channels), outstanding, times
    )


def _outlier_channels(largest: Doubles) -> tuple[tuple[int, ...], float]:
    """Return the indices of outlier channels, and the ratio of the largest channel's value to the median channel's."""
    if not len(largest):
        return (), math.nan
    order = np.argsort(-largest, kind="stable")
    ranked = largest[order]
    # The median is computed as `np.median` does it, but without the import of masked arrays in that function.
    median = float(ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2
    outliers = order[ranked > _OUTSTANDING * median] if median else order[:0]
    return tuple(outliers.tolist()), float(largest.max()) / median if median else math.nan
