"""Tallies that add values up, exactly: of floating point, and of whole numbers whose codes are too many to be counted.

Every sum is kept as whole numbers, each times a power of two, so it is exact until it is rounded once, at the end.
The compiled loops add the same whole numbers in another way: see `tally.c`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from transaxle.formats.catalog import numpy_dtype

_ABOVE_ALL, _BELOW_ALL = (1 << 63) - 1, -1 << 63
_LIMB = 18
"""Bits of the parts in which numpy adds mantissas: 2**16 products of two parts are exact in double precision."""
_AT_ONCE = 1 << 16
"""Elements that numpy adds at once."""
_TABLES = 4
"""Tables of the compiled loops of double precision: see `tally.c`."""
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


class Channels:
    """The largest of each channel, as rows pass by, whole or not.

    Args:
        width: channels.
        kind: type of the sizes that are compared.
    """

    def __init__(self, width: int, kind: npt.DTypeLike) -> None:
        self.width = width
        self.largest: npt.NDArray[Any] = np.zeros(width, kind)
        self.address = self.largest.ctypes.data if width else None
        """Where the compiled loops put the largest; None where channels are not looked at."""
        self.column = 0
        """The channel of the next element."""

    def passed(self, count: int) -> None:
        """Go on by so many elements."""
        self.column = (self.column + count) % self.width if self.width else 0

    def add(self, sizes: npt.NDArray[Any]) -> None:
        """Add the next elements, as sizes that order as their absolute values do."""
        if not self.width:
            return
        first = min(-self.column % self.width, len(sizes))
        rows = (len(sizes) - first) // self.width
        self._merge(self.column, sizes[:first])
        if rows:
            self._merge(0, sizes[first : first + rows * self.width].reshape(rows, self.width).max(0))
        self._merge(0, sizes[first + rows * self.width :])
        self.passed(len(sizes))

    def _merge(self, at: int, sizes: npt.NDArray[Any]) -> None:
        into = self.largest[at : at + len(sizes)]
        np.maximum(into, sizes, out=into)


def rounded_once(parts: Mapping[int, int], grain: int) -> float:
    """Return a sum of whole numbers, each times two to an exponent, times two to the grain: rounded once."""
    total = sum(part << exponent for exponent, part in parts.items())
    try:
        return float(total << grain) if grain > 0 else total / (1 << -grain)
    except OverflowError:
        return math.inf if total > 0 else -math.inf


class Extremes(ctypes.Structure):
    """`extremes` of tally.c."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("zeros", "nans", "infinite", "least", "most"))
    zeros: int
    nans: int
    infinite: int
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class ExactType:
    """How the codes of a type are read."""

    code: str
    """Name of its compiled loops; in capitals, that of safetensors."""
    bits: int
    """Of an element."""
    mantissa: int
    """Bits of a mantissa that are stored; 0: whole numbers."""
    grain: int
    """Power of two that the smallest value is."""
    bins: int
    """Sums of the compiled loops."""
    tables: int
    """How often they have each of them."""
    capacity: int
    """Elements that these hold."""
    signed: bool = True
    """Whether there are negative ones."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of values."""
        return numpy_dtype(self.code.upper())

    @property
    def size_mask(self) -> int:
        """A code without its sign."""
        return (1 << (self.bits - 1)) - 1

    @property
    def read(self) -> int:
        """Bins that are read: the last one of floating point has what is not finite."""
        return self.bins - 1 if self.mantissa else self.bins

    @property
    def infinity(self) -> int:
        """The code of the infinite value."""
        return self.size_mask >> self.mantissa << self.mantissa

    def grains(self, number: int) -> tuple[int, int]:
        """Return which power of two, counted from `grain` on, the bin of sums counts, and that of squares."""
        if self.mantissa:
            at = max(number, 1) - 1  # those of subnormal numbers are those of the smallest normal ones
            return at, 2 * at
        return 64 * number, 64 * number


EXACT_TYPES = {
    kind.dtype: kind
    for kind in (
        ExactType("bf16", 16, 7, -133, 256, 1, 1 << 36),
        ExactType("f16", 16, 10, -24, 32, 1, 1 << 36),
        ExactType("f32", 32, 23, -149, 256, 1, 1 << 36),
        ExactType("f64", 64, 52, -1074, 2048, _TABLES, 1 << 20),
        ExactType("i32", 32, 0, 0, 2, 1, 1 << 36),
        ExactType("u32", 32, 0, 0, 2, 1, 1 << 36, signed=False),
        ExactType("i64", 64, 0, 0, 2, 1, 1 << 36),
        ExactType("u64", 64, 0, 0, 2, 1, 1 << 36, signed=False),
    )
}
Loops = Callable[..., None]


class ExactTally:
    """A tally of one of these types.

    Args:
        kind: the type.
        width: channels; 0 where they are not looked at.
        loops: the compiled ones; None: numpy.
    """

    def __init__(self, kind: ExactType, width: int, loops: Loops | None) -> None:
        self._type = kind
        self._word = np.dtype(f"<u{kind.bits // 8}")
        self._elements = self._held = 0
        self._found = Extremes(least=_ABOVE_ALL, most=_BELOW_ALL)
        self._channels = Channels(width, self._word)
        self._loops = loops
        self._bins = np.zeros((2, kind.tables, kind.bins, 2), np.uint64)
        sums, squares = self._bins
        self._addresses = ctypes.byref(self._found), sums.ctypes.data, squares.ctypes.data
        self._sums: dict[int, int] = {}
        self._squares: dict[int, int] = {}

    def add(self, block: memoryview) -> None:
        """See `Tally`."""
        codes = np.frombuffer(block, self._word)
        self._elements += len(codes)
        most = _AT_ONCE if self._loops is None else self._type.capacity
        for start in range(0, len(codes), most):
            part = codes[start : start + most]
            if self._loops is None:
                self._add(part)
            else:
                self._add_compiled(part, self._loops)

    def _add_compiled(self, codes: Codes, loops: Loops) -> None:
        if self._held + len(codes) > self._type.capacity:
            self._drain()
        self._held += len(codes)
        width, column = self._channels.width, self._channels.column
        loops(codes.ctypes.data, len(codes), *self._addresses, width, column, self._channels.address)
        self._channels.passed(len(codes))

    def _drain(self) -> None:
        """Take the sums out of the bins, which are then empty."""
        for which, (into, bins) in enumerate(zip((self._sums, self._squares), self._bins, strict=True)):
            for table in bins:
                for number in np.flatnonzero(table[: self._type.read].any(1)).tolist():
                    low, high = (int(half) for half in table[number])
                    _count(into, self._type.grains(number)[which], low + _signed(high))
        self._bins[...] = 0
        self._held = 0

    def _add(self, codes: Codes) -> None:
        """The same by numpy: parts of mantissas are added by exponent."""
        kind, found = self._type, self._found
        sizes, negative, finite = self._sizes(codes)
        places = self._places(codes, negative)[finite]
        found.zeros += int(np.count_nonzero(sizes == 0))
        if kind.mantissa:
            found.infinite += int(np.count_nonzero(sizes == kind.infinity))
            found.nans += int(np.count_nonzero(sizes > kind.infinity))
        found.least = min(found.least, int(places.min(initial=_ABOVE_ALL)))
        found.most = max(found.most, int(places.max(initial=_BELOW_ALL)))
        sizes = np.where(finite, sizes, self._word.type(0))
        exponents, mantissas = np.zeros(len(codes), np.int64), sizes.astype(np.uint64)
        if kind.mantissa:
            exponents = (sizes >> kind.mantissa).astype(np.int64)
            mantissas &= np.uint64((1 << kind.mantissa) - 1)
            mantissas |= (exponents > 0).astype(np.uint64) << np.uint64(kind.mantissa)
        parts = [
            ((mantissas >> np.uint64(at)) & np.uint64((1 << _LIMB) - 1)).astype(np.float64)
            for at in range(0, kind.mantissa + 1 if kind.mantissa else kind.bits, _LIMB)
        ]
        sign = np.where(negative, -1.0, 1.0)
        for at, part in enumerate(parts):
            self._gather(self._sums, 0, exponents, sign * part, at)
            for other in range(at, len(parts)):
                twice = 1.0 if other == at else 2.0
                self._gather(self._squares, 1, exponents, twice * part * parts[other], at + other)
        self._channels.add(sizes)

    def _gather(self, into: dict[int, int], which: int, exponents: Codes, weights: Doubles, limb: int) -> None:
        sums = np.bincount(exponents, weights=weights)
        for exponent in np.flatnonzero(sums).tolist():
            _count(into, self._type.grains(exponent)[which] + _LIMB * limb, int(sums[exponent]))

    def _sizes(self, codes: Codes) -> tuple[Codes, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return sizes as codes, which are negative, and which are finite."""
        kind = self._type
        negative = codes > kind.size_mask if kind.signed else np.zeros(len(codes), bool)
        if kind.mantissa:
            sizes = codes & self._word.type(kind.size_mask)
            return sizes, negative, sizes < kind.infinity
        return np.where(negative, ~codes + self._word.type(1), codes), negative, np.ones(len(codes), bool)

    def _places(self, codes: Codes, negative: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Return whole numbers in the order of values."""
        kind = self._type
        if kind.mantissa:
            codes = np.where(negative, codes ^ self._word.type(kind.size_mask), codes)
        elif not kind.signed:
            return (codes.astype(np.uint64) ^ np.uint64(1 << 63 if kind.bits == 64 else 0)).view(np.int64)
        places: npt.NDArray[np.int64] = codes.view(f"<i{kind.bits // 8}").astype(np.int64)
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
        self._drain()
        found, grain = self._found, self._type.grain
        some = found.least <= found.most
        extremes = (self._value(found.least), self._value(found.most)) if some else (math.nan, math.nan)
        return Moments(
            *extremes,
            total=rounded_once(self._sums, grain),
            squares=rounded_once(self._squares, 2 * grain),
            elements=self._elements,
            zeros=found.zeros,
            nans=found.nans,
            infinite=found.infinite,
        )

    def channels(self) -> Doubles:
        """See `Tally`."""
        largest = self._channels.largest
        values: Doubles = (largest.view(self._type.dtype) if self._type.mantissa else largest).astype(float)
        return values


def _count(into: dict[int, int], at: int, amount: int) -> None:
    into[at] = into.get(at, 0) + amount


def _signed(high: int) -> int:
    """Return what the high half of a whole number of 128 bits means."""
    return (high - (high >> 63 << 64)) << 64
