"""Tallies of values: how often each code of a small type occurs, exact sums of others, and the largest of each channel.

All that is added are whole numbers: counts of codes, and the mantissas, and their squares, of larger types. So the sums
are exact until they are rounded once, at the end, and no order of blocks, threads or additions changes them. `tally.c`
says the same in C, where it was built, and gives the same numbers; bfloat16 and half precision it adds, numpy counts.
"""

from __future__ import annotations

import ctypes
import math
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from transaxle.engine.facts.exact_tally import (
    EXACT_TYPES,
    Channels,
    Codes,
    Doubles,
    ExactTally,
    Extremes,
    Moments,
    rounded_once,
)

SOURCE = Path(__file__).with_name("tally.c")
LIBRARY = Path(__file__).with_name("libtally.so")
_COUNTED = 2
"""Bytes of the types of which every code is counted."""
_DIGITS = 16
"""Bits of a value's mantissa in such types, at most: integers of two bytes have as many."""
_PENDING = (1 << 32) - 1
"""Codes that the compiled loops count before their counts are added to the others."""


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
    exact = EXACT_TYPES.get(kind)
    # numpy counts the codes of two bytes sooner than it adds their values; the compiled loops add sooner.
    if exact is None or (library is None and kind.itemsize <= _COUNTED):
        return _Counted(kind, width, library)
    return ExactTally(exact, width, library.loops[exact.code] if library is not None else None)


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

    def __init__(self, kind: np.dtype[Any], width: int, library: _Library | None) -> None:
        self._type = _type(kind)
        self._codes = np.dtype(f"u{kind.itemsize}")
        self._counts = np.zeros(len(self._type.values), np.int64)
        by_code = self._type.last is not None or self._type.whole
        self._channels = Channels(width, self._codes if by_code else np.float64)
        self._by_code = by_code
        self._library = library
        self._recent = np.zeros(1 << 16 if library is not None else 0, np.uint32)
        """Counts of the compiled loops; of small codes, those of pairs."""
        self._pending = 0

    def add(self, block: memoryview) -> None:
        """See `Tally`."""
        codes = np.frombuffer(block, self._codes)
        if self._library is None:
            self._counts += np.bincount(codes, minlength=len(self._counts))
        for start in range(0, len(codes) if self._library is not None else 0, _PENDING):
            self._add_compiled(codes[start : start + _PENDING])
        if self._channels.width and (self._library is None or not self._by_code):
            self._channels.add(self._sizes(codes))

    def _add_compiled(self, codes: Codes) -> None:
        assert self._library is not None
        if self._pending + len(codes) > _PENDING:
            self._settle()
        self._pending += len(codes)
        self._library.add_codes(codes, self._recent, self._channels if self._by_code else None, self._type)
        if self._codes.itemsize == 1 and len(codes) % 2:
            self._counts[codes[-1]] += 1

    def _settle(self) -> None:
        """Add what the compiled loops have counted."""
        if self._codes.itemsize == 1:
            pairs = self._recent.reshape(256, 256)
            self._counts += pairs.sum(0, dtype=np.int64) + pairs.sum(1, dtype=np.int64)
        else:
            self._counts += self._recent
        self._recent[...] = 0
        self._pending = 0

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
        if self._pending:
            self._settle()
        there = np.flatnonzero(self._counts)
        counts, values = self._counts[there], self._type.values[there]
        nans, infinite = int(counts[np.isnan(values)].sum()), int(counts[np.isinf(values)].sum())
        finite = values[np.isfinite(values)]
        mantissas, exponents = self._type.mantissas[there], self._type.exponents[there]
        grain, squares = self._type.lowest, mantissas**2
        return Moments(
            *((float(finite.min()) + 0.0, float(finite.max()) + 0.0) if len(finite) else (math.nan, math.nan)),
            total=rounded_once(_by_exponent(exponents, counts, mantissas), grain),
            squares=rounded_once(_squares(exponents, counts, squares), 2 * grain),
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


_LONG, _INT, _AT, _CODE = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32
_OF_CODES = (_AT, _LONG, _AT, _LONG, _LONG, _INT, _CODE, _CODE, _AT)
_OF_VALUES = (_AT, _LONG, ctypes.POINTER(Extremes), _AT, _AT, _LONG, _LONG, _AT)
_CODE_SIZES = ("codes_8", "codes_16")


class _Library:
    """The compiled loops. Calls release the interpreter's lock, so threads count side by side."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.loops: dict[str, Any] = {}
        for name in (*_CODE_SIZES, *(kind.code for kind in EXACT_TYPES.values())):
            function = library[f"transaxle_{name}"]
            function.argtypes, function.restype = _OF_CODES if name in _CODE_SIZES else _OF_VALUES, None
            self.loops[name] = function

    def add_codes(self, codes: Codes, counts: npt.NDArray[np.uint32], channels: Channels | None, kind: _Type) -> None:
        """Count codes, and take the largest of each channel."""
        function, whole = self.loops[_CODE_SIZES[codes.itemsize - 1]], int(kind.whole)
        given = codes.ctypes.data, len(codes), counts.ctypes.data
        if channels is None:
            function(*given, 0, 0, whole, 0, 0, None)
            return
        function(*given, channels.width, channels.column, whole, kind.mask, kind.last or 0, channels.address)
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
