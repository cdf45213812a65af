"""Tallies of values: how often each code of a small type occurs, sums by exponent, and the largest of each channel.

All that is added are whole numbers: counts of codes, and in single precision the mantissas, and their squares, of each
exponent. So the sums are exact until they are rounded once, at the end, and no order of blocks, threads or additions
changes them. `tally.c` says the same in C, where it was built, and gives the same numbers.
"""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

SOURCE = Path(__file__).with_name("tally.c")
LIBRARY = Path(__file__).with_name("libtally.so")
_COUNTED = 2
"""Bytes of the types of which every code is counted."""
_DIGITS = 16
"""Bits of a value's mantissa in such types, at most: integers of two bytes have as many."""
_EXPONENTS = 256
_SUBNORMAL = 149
"""The smallest value in single precision is two to the power of minus this."""
_AT_ONCE = 1 << 20
"""Elements whose mantissas, and halves of whose squares, numpy adds in double precision without rounding."""
_ABOVE_ALL, _BELOW_ALL = 0x7FFFFFFF, -0x80000000
_SIZE, _INFINITE = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
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


def tally_of(kind: np.dtype[Any], width: int = 0, *, compiled: bool = True) -> Tally:
    """Return an empty tally.

    Args:
        kind: the type of the elements.
        width: channels, which are the positions along the last dim; 0 where they are not looked at.
        compiled: use the compiled loops where they are there; without, numpy finds the same.
    """
    library = load() if compiled else None
    if kind.itemsize <= _COUNTED:
        return _Counted(kind, width, library)
    return _Singles(width, library) if kind == np.dtype("<f4") else _Summed(kind, width)


class _Channels:
    """The largest of each channel, as rows pass by, whole or not."""

    def __init__(self, width: int, kind: npt.DTypeLike) -> None:
        self.width = width
        self.largest: npt.NDArray[Any] = np.zeros(width, kind)
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
    return _Type(values, sizes, mantissas, exponents - lowest, lowest, mask, ordered)


def _exact(parts: Mapping[int, int], grain: int) -> float:
    """Return a sum of whole numbers, each times two to an exponent, times two to the grain: rounded once."""
    total = sum(part << exponent for exponent, part in parts.items())
    return float(total << grain) if grain > 0 else total / (1 << -grain)


class _Counted:
    """A tally of a small type: it is counted how often there is each code."""

    def __init__(self, kind: np.dtype[Any], width: int, library: _Library | None) -> None:
        self._type = _type(kind)
        self._codes = np.dtype(f"u{kind.itemsize}")
        self._counts = np.zeros(len(self._type.values), np.int64)
        self._by_code = self._type.last is not None
        self._channels = _Channels(width, self._codes if self._by_code else np.float64)
        self._library = library

    def add(self, block: memoryview) -> None:
        """See `Tally`."""
        codes = np.frombuffer(block, self._codes)
        if self._library is not None:
            self._library.add_codes(codes, self._counts, self._channels, self._type)
            if self._by_code:
                return
        else:
            self._counts += np.bincount(codes, minlength=len(self._counts))
        if self._channels.width:
            self._channels.add(self._sizes(codes))

    def _sizes(self, codes: Codes) -> npt.NDArray[Any]:
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
            total=_exact(_by_exponent(exponents, counts, mantissas), grain),
            squares=_exact(_squares(exponents, counts, squares), 2 * grain),
            elements=int(counts.sum()),
            zeros=int(counts[values == 0].sum()),
            nans=nans,
            infinite=infinite,
        )

    def channels(self) -> Doubles:
        """See `Tally`."""
        largest = self._channels.largest
        return self._type.sizes[largest] if self._by_code else largest


def _by_exponent(exponents: Codes, counts: Codes, parts: Codes) -> dict[int, int]:
    """Return the sum of parts of each exponent; exact, because 16 bits times what a tensor has fit into 53."""
    sums = np.bincount(exponents, weights=counts.astype(np.float64) * parts)
    return {int(exponent): int(sums[exponent]) for exponent in np.flatnonzero(sums)}


def _squares(exponents: Codes, counts: Codes, squares: Codes) -> dict[int, int]:
    low = _by_exponent(exponents, counts, squares & 0xFFFF)
    high = _by_exponent(exponents, counts, squares >> 16)
    return {2 * each: low.get(each, 0) + (high.get(each, 0) << 16) for each in low.keys() | high.keys()}


class _Found(ctypes.Structure):
    """`singles` of tally.c."""

    _fields_ = (
        ("zeros", ctypes.c_int64),
        ("nans", ctypes.c_int64),
        ("infinite", ctypes.c_int64),
        ("least", ctypes.c_int32),
        ("most", ctypes.c_int32),
        ("sums", ctypes.c_int64 * _EXPONENTS),
        ("low", ctypes.c_uint64 * _EXPONENTS),
        ("high", ctypes.c_uint64 * _EXPONENTS),
    )
    zeros: int
    nans: int
    infinite: int
    least: int
    most: int
    sums: Any
    low: Any
    high: Any


class _Singles:
    """A tally of single precision: mantissas and their squares are added by exponent."""

    def __init__(self, width: int, library: _Library | None) -> None:
        self._elements = 0
        self._found = _Found(least=_ABOVE_ALL, most=_BELOW_ALL)
        self._channels = _Channels(width, np.uint32)
        self._library = library

    def add(self, block: memoryview) -> None:
        """See `Tally`."""
        codes = np.frombuffer(block, "<u4")
        self._elements += len(codes)
        if self._library is not None:
            self._library.add_singles(codes, self._found, self._channels)
            return
        for start in range(0, len(codes), _AT_ONCE):
            self._add(codes[start : start + _AT_ONCE])

    def _add(self, codes: Codes) -> None:
        found, sizes = self._found, codes & _SIZE
        finite = sizes < _INFINITE
        found.zeros += int(np.count_nonzero(sizes == 0))
        found.infinite += int(np.count_nonzero(sizes == _INFINITE))
        found.nans += int(np.count_nonzero(sizes > _INFINITE))
        negative = codes > _SIZE
        places = np.where(negative, codes ^ _SIZE, codes).view(np.int32)[finite]
        found.least = min(found.least, int(places.min(initial=_ABOVE_ALL)))
        found.most = max(found.most, int(places.max(initial=_BELOW_ALL)))
        exponents = (sizes >> 23).astype(np.int64)
        mantissas = ((sizes & 0x7FFFFF) | (exponents > 0).astype(np.uint32) << np.uint32(23)).astype(np.int64)
        squares = mantissas**2
        parts = np.where(negative, -mantissas, mantissas), squares & 0xFFFFFFFF, squares >> 32
        for into, part in zip((found.sums, found.low, found.high), parts, strict=True):
            sums = np.bincount(exponents, weights=part, minlength=_EXPONENTS)
            for exponent in np.flatnonzero(sums).tolist():
                into[exponent] += int(sums[exponent])
        if self._channels.width:
            self._channels.add(np.where(finite, sizes, np.uint32(0)))

    def found(self) -> Moments:
        """See `Tally`."""
        found = self._found
        grains = [max(exponent, 1) - 1 for exponent in range(_EXPONENTS - 1)]  # those of subnormal numbers are alike
        sums: dict[int, int] = {}
        squares: dict[int, int] = {}
        for exponent, grain in enumerate(grains):
            sums[grain] = sums.get(grain, 0) + found.sums[exponent]
            squares[2 * grain] = squares.get(2 * grain, 0) + found.low[exponent] + (found.high[exponent] << 32)
        return Moments(
            *self._extremes(),
            total=_exact(sums, -_SUBNORMAL),
            squares=_exact(squares, -2 * _SUBNORMAL),
            elements=self._elements,
            zeros=found.zeros,
            nans=found.nans,
            infinite=found.infinite,
        )

    def _extremes(self) -> tuple[float, float]:
        places = np.array([self._found.least, self._found.most], np.int32)
        if places[0] > places[1]:
            return math.nan, math.nan
        least, most = _singles(np.where(places < 0, places ^ np.int32(_ABOVE_ALL), places).view(np.uint32))
        return float(least) + 0.0, float(most) + 0.0

    def channels(self) -> Doubles:
        """See `Tally`."""
        return _singles(self._channels.largest)


def _singles(codes: Codes) -> Doubles:
    values: Doubles = codes.view(np.float32).astype(np.float64)
    return values


class _Summed:
    """A tally of a larger type, by numpy, in double precision."""

    def __init__(self, kind: np.dtype[Any], width: int) -> None:
        self._kind = kind
        self._elements = self._zeros = self._nans = self._infinite = 0
        self._sum = self._squares = 0.0
        self._least, self._largest = math.inf, -math.inf
        self._channels = _Channels(width, np.float64)

    def add(self, block: memoryview) -> None:
        """See `Tally`."""
        with np.errstate(invalid="ignore"):
            values = np.frombuffer(block, self._kind).astype(np.float64)
        finite = np.isfinite(values)
        if self._channels.width:
            self._channels.add(np.where(finite, np.abs(values), 0.0))
        self._elements += values.size
        if not finite.all():
            nans = int(np.isnan(values).sum())
            self._nans += nans
            self._infinite += values.size - int(finite.sum()) - nans
            values = values[finite]
        self._zeros += values.size - int(np.count_nonzero(values))
        with np.errstate(over="ignore"):
            self._sum += float(values.sum())
            self._squares += float(np.square(values).sum())
        self._least = min(self._least, float(values.min(initial=math.inf)))
        self._largest = max(self._largest, float(values.max(initial=-math.inf)))

    def found(self) -> Moments:
        """See `Tally`."""
        finite = self._elements - self._nans - self._infinite
        extremes = (self._least, self._largest) if finite else (math.nan, math.nan)
        odd = self._zeros, self._nans, self._infinite
        return Moments(*extremes, self._sum, self._squares, self._elements, *odd)

    def channels(self) -> Doubles:
        """See `Tally`."""
        return self._channels.largest


_LONG, _AT, _CODE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint32
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "codes_8": (_AT, _LONG, _AT, _LONG, _LONG, _CODE, _CODE, _AT),
    "codes_16": (_AT, _LONG, _AT, _LONG, _LONG, _CODE, _CODE, _AT),
    "singles": (_AT, _LONG, ctypes.POINTER(_Found), _LONG, _LONG, _AT),
}


class _Library:
    """The compiled loops. Calls release the interpreter's lock, so threads count side by side."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions: dict[str, Any] = {}
        for name, arguments in _ARGUMENTS.items():
            function = library[f"transaxle_{name}"]
            function.argtypes, function.restype = arguments, None
            self._functions[name] = function

    def add_codes(self, codes: Codes, counts: npt.NDArray[np.int64], channels: _Channels, kind: _Type) -> None:
        """Count codes, and take the largest of each channel if codes are in the order of sizes."""
        function = self._functions[f"codes_{8 * codes.itemsize}"]
        wanted = channels.width and kind.last is not None
        place = channels.width, channels.column, kind.mask, kind.last or 0
        function(
            codes.ctypes.data, len(codes), counts.ctypes.data, *place, channels.largest.ctypes.data if wanted else None
        )
        if wanted:
            channels.passed(len(codes))

    def add_singles(self, codes: Codes, found: _Found, channels: _Channels) -> None:
        """Add values in single precision, and take the largest of each channel."""
        largest = channels.largest.ctypes.data if channels.width else None
        place = channels.width, channels.column, largest
        self._functions["singles"](codes.ctypes.data, len(codes), ctypes.byref(found), *place)
        channels.passed(len(codes))


@cache
def load() -> _Library | None:
    """Return the compiled loops, or None where they were not built, cannot be loaded here, or are of another source."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        stamp = library.transaxle_stamp
        stamp.restype = ctypes.c_uint32
        return _Library(library) if stamp() == zlib.crc32(SOURCE.read_bytes()) else None
    except (OSError, AttributeError):
        return None
