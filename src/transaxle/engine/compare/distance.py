"""How far the values of two tensors are apart, accumulated block by block."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from transaxle.encodings.encoding import Encoding
from transaxle.formats.catalog import numpy_dtype

if TYPE_CHECKING:
    from transaxle.engine.views.decoded import Decoder

Counts = npt.NDArray[np.int64]
EXPONENTS = 2048
"""Exponents of double precision as they are stored: 0 is below 2**-1022, 2047 infinite, `e` is from 2**(e-1023) on."""
_WORD = 8
"""Bytes of the largest whole numbers."""
_STEPS = (0.0, 0.5, 1.0, 2.0)
"""Bounds by which differences are counted, in steps between neighbouring codes."""
_ROOM = 1 + 2**-10
"""Values are products that were rounded: a factor that leaves room for it, smaller than a code's own precision."""
_CODES = {"F8_E4M3": (3, -6), "F8_E5M2": (2, -14), "F4": (1, 0)}
"""Safetensors code -> bits of the mantissa, and the smallest exponent that is not subnormal."""


class Rounding:
    """Differences from the values of an encoded tensor, in steps between its codes.

    A step is the distance of the code from the next larger one, times the scale of its tile: what was rounded to the
    nearest code is half a step away at most.

    Args:
        decoder: the encoded tensor, whose elements come in the order of the compared ones.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.encoding: Encoding = decoder.tensor.encoding
        """Its encoding."""
        self.counts: Counts = np.zeros(len(_STEPS) + 1, np.int64)
        """Elements that are equal, at most half a step apart, one, two, and all others."""
        self.steps = 0.0
        """The largest difference in steps."""
        self.scales = 0.0
        """The largest difference over the scale of its tile."""
        self._decoder = decoder

    def skip(self, elements: int) -> None:
        """Add elements that are equal."""
        self.counts[0] += elements

    def add(self, first: int, values: np.ndarray, distance: np.ndarray) -> None:
        """Add differences.

        Args:
            first: number of the first element.
            values: of the encoded tensor.
            distance: absolute differences from them.
        """
        scale = self._decoder.scales(first, first + len(values))
        mantissa, least = _CODES[self.encoding.code]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            _, exponent = np.frexp(np.abs(values) / scale * _ROOM)
            in_scales = np.where(distance == 0, 0.0, distance / scale)
            in_steps = np.ldexp(in_scales, mantissa - np.maximum(exponent - 1, least))
        in_steps[np.isnan(in_steps)] = np.inf
        places = np.searchsorted(np.array(_STEPS) * _ROOM, in_steps)
        self.counts += np.bincount(places, minlength=len(self.counts))
        self.steps = max(self.steps, float(in_steps.max(initial=0.0)))
        self.scales = max(self.scales, float(np.nanmax(in_scales, initial=0.0)))


class Distance:
    """How far the values of two tensors are apart.

    Args:
        counting: also count differences by their size.
        rounding: also compare them with the codes of one side, and whether that is the first.
    """

    def __init__(self, *, counting: bool = False, rounding: tuple[Rounding, bool] | None = None) -> None:
        self.elements = 0
        """How many differ."""
        self.largest = 0.0
        """The largest absolute difference; inf where only one of two is NaN."""
        self.counts: Counts | None = np.zeros((2, EXPONENTS), np.int64) if counting else None
        """Elements that differ, by the exponent of the difference, and of the difference over the second's value."""
        self.rounding = None if rounding is None else rounding[0]
        """Their differences in steps between codes."""
        self.of_first = rounding is not None and rounding[1]
        """Whether the codes are those of the first."""
        self._count = 0
        self._squares = 0.0
        self._of = 0.0

    @property
    def squares(self) -> tuple[float, float]:
        """Sums of the squares of the differences, and of the second's values."""
        return self._squares, self._of

    @property
    def rms(self) -> float:
        """Root of the mean squared difference."""
        return math.sqrt(self._squares / self._count) if self._count else 0.0

    @property
    def relative(self) -> float:
        """Norm of the difference over the norm of the second; inf where that is 0 and the first is not."""
        if not self._of:
            return math.inf if self._squares else 0.0
        return math.sqrt(self._squares / self._of) if math.isfinite(self._of) else math.nan

    def skip(self, block: memoryview, dtype: str, *, measured: bool) -> None:
        """Add a block in which nothing differs."""
        if measured:
            values = _wide(block, dtype)
            if self.rounding is not None:
                self.rounding.skip(values.size)
            self._sum(values)

    def add(
        self, first_block: memoryview, second_block: memoryview, first_dtype: str, second_dtype: str, *, by_value: bool
    ) -> None:
        """Add a block of the two tensors, which are of these types."""
        x, y = _wide(first_block, first_dtype), _wide(second_block, second_dtype)
        self._sum(y)
        if by_value:
            unequal = (x != y) & ~(np.isnan(x) & np.isnan(y))
        else:
            size = numpy_dtype(first_dtype).itemsize
            word = min(size, _WORD)
            a, b = (np.frombuffer(block, f"u{word}") for block in (first_block, second_block))
            unequal = a != b if size == word else (a != b).reshape(-1, size // word).any(1)
        if self.rounding is not None:
            with np.errstate(invalid="ignore"):
                whole = np.where(unequal, np.abs(x - y), 0.0)
            self.rounding.add(self._count - y.size, x if self.of_first else y, whole)
        x, y = x[unequal], y[unequal]
        with np.errstate(invalid="ignore"):
            distance = np.abs(x - y)
        one_nan = np.isnan(x) != np.isnan(y)
        distance[np.isnan(distance)] = 0.0
        distance[one_nan] = np.inf
        self.elements += int(unequal.sum())
        self.largest = max(self.largest, float(distance.max(initial=0.0)))
        self._squares += float(np.square(distance).sum())
        if self.counts is not None and distance.size:
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                over = np.where(distance == 0, 0.0, distance / np.abs(y))
            over[np.isnan(over)] = np.inf
            for counts, values in zip(self.counts, (distance, over), strict=True):
                counts += np.bincount(np.ascontiguousarray(values).view(np.int64) >> 52, minlength=EXPONENTS)

    def _sum(self, values: np.ndarray) -> None:
        self._count += values.size
        with np.errstate(over="ignore"):
            self._of += float(np.nansum(np.square(np.abs(values))))


def _wide(block: memoryview, dtype: str) -> np.ndarray:
    """Return values in double precision; complex ones stay complex."""
    kind = numpy_dtype(dtype)
    values = np.frombuffer(block, kind)
    with np.errstate(invalid="ignore"):  # NaN of the kind that signals
        if kind.names:  # half precision, for which numpy has no complex type
            parts = np.stack([values[name].astype(np.float64) for name in kind.names], axis=-1)
            return parts.view(np.complex128).reshape(-1)
        return values.astype(np.complex128 if kind.kind == "c" else np.float64)
