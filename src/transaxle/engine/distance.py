"""How far the values of two tensors are apart, accumulated block by block.

What a comparison measures of every tensor, and where in the model each is: the numbers that are drawn of it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from transaxle.encodings.encoding import Encoding
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.moves import axes_of
from transaxle.engine.wording import taken_apart
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


_EXPERTS = "experts"
"""Meaning of the axis that is no layer, though it may be the first in a name."""


class Place(msgspec.Struct, frozen=True):
    """Where in the model a tensor is."""

    group: str
    """Its logical tensors, with the state of the optimizer that it is; its name, with `*` for numbers, in no table."""
    layer: int | None
    """Its layer; None where its name has none."""


class Measure(msgspec.Struct, frozen=True):
    """What was measured of one tensor."""

    place: Place
    """Where in the model it is."""
    elements: int
    """How many it has on either side."""
    differs: bool
    """Whether it differs; if not, all its bits are equal, or across number formats all its values."""
    changed: int
    """Elements that differ; 0 where that was not measured."""
    largest: float
    """The largest absolute difference."""
    squares: tuple[float, float]
    """Sums of the squares of the differences, and of the second's values."""


class CodeErrors(msgspec.Struct):
    """Differences from what one side has quantized, in steps between its codes."""

    side: str
    """Path of the side whose codes they are."""
    encoding: str
    """Its encoding."""
    tensors: int = 0
    """How many tensors."""
    counts: list[int] = msgspec.field(default_factory=lambda: [0] * 5)
    """Elements that are equal, at most half a step apart, at most one, at most two, and all others."""
    steps: float = 0.0
    """The largest difference in steps."""
    scales: float = 0.0
    """The largest difference over the scale of its tile."""


class Surveyed(msgspec.Struct, frozen=True):
    """What was measured, by tensor and by group."""

    measures: Mapping[str, Measure]
    """Name in the second checkpoint's dialect -> what was measured."""
    counts: Mapping[str, Counts]
    """Group -> elements that differ, by the exponent of the difference and of that over the second's value."""
    errors: Mapping[tuple[str, str, str], CodeErrors]
    """(group, side, encoding) -> differences in steps between codes, where a side is quantized."""


class Survey:
    """Gathers measures while tensors are compared, by several threads.

    Args:
        first: the first checkpoint, in the second one's dialect.
        second: the second one.
    """

    def __init__(self, first: Checkpoint, second: Checkpoint) -> None:
        self._sides = first, second
        self._places = places(second)
        self._measures: dict[str, Measure] = {}
        self._counts: dict[str, Counts] = {}
        self._errors: dict[tuple[str, str, str], CodeErrors] = {}
        self._lock = threading.Lock()

    def distance(self, name: str) -> Distance:
        """Return what measures a tensor."""
        first, second = self._sides
        found = _rounding(second, name)
        if found is not None:
            return Distance(counting=True, rounding=(found, False))
        found = _rounding(first, name)
        return Distance(counting=True, rounding=None if found is None else (found, True))

    def add(self, name: str, distance: Distance, differs: bool) -> None:
        """Add what was measured of a tensor."""
        place = self._places.get(name) or place_of(name)
        elements = self._sides[1][name].parameters
        measure = Measure(place, elements, differs, distance.elements, distance.largest, distance.squares)
        with self._lock:
            self._measures[name] = measure
            if distance.elements and distance.counts is not None:
                counts = self._counts.setdefault(place.group, np.zeros((2, EXPONENTS), np.int64))
                counts += distance.counts
            if distance.rounding is not None:
                self._add_errors(place.group, distance.rounding, of_first=distance.of_first)

    def _add_errors(self, group: str, found: Rounding, *, of_first: bool) -> None:
        side, encoding = self._sides[0 if of_first else 1].path, found.encoding.name
        errors = self._errors.setdefault((group, side, encoding), CodeErrors(side, encoding))
        errors.tensors += 1
        errors.counts = [a + b for a, b in zip(errors.counts, found.counts.tolist(), strict=True)]
        errors.steps, errors.scales = max(errors.steps, found.steps), max(errors.scales, found.scales)

    def surveyed(self) -> Surveyed:
        """Return all of it, in the order of the second checkpoint."""
        measures = {name: self._measures[name] for name in self._sides[1] if name in self._measures}
        return Surveyed(measures, self._counts, self._errors)


def _rounding(side: Checkpoint, name: str) -> Rounding | None:
    """Return what compares differences with the codes of a tensor, if that is decoded and not otherwise changed."""
    from transaxle.engine.views.decoded import Decoder

    tensor = side[name]
    origins = tensor.origins or {name}
    if not side.decoded or len(origins) != 1:
        return None
    (origin,) = origins
    if origin not in side.decoded or side.decoded[origin].shape != tensor.shape:
        return None
    if side.family is not None and side.dialect != side.recognised.dialect.label:
        return None  # its elements may come in another order
    decoder = side.container.recoding.computed.get(side.container.entries[origin].extents[0].file)
    return Rounding(decoder) if isinstance(decoder, Decoder) else None


def places(checkpoint: Checkpoint) -> dict[str, Place]:
    """Return where the tensors of a checkpoint are that a table reads.

    Args:
        checkpoint: in its own dialect.
    """
    if checkpoint.family is None:
        return {}
    meanings = {axis.axis: axis.meaning for axis in axes_of(checkpoint.recognised.family)}
    found = {}
    for (line, slot), names in checkpoint.bound.names.items():
        group = ", ".join(line.expression.components) + (f" · {slot}" if slot else "")
        layered = bool(line.name.axes) and meanings[line.name.axes[0]] != _EXPERTS
        for index, name in names.items():
            found[name] = Place(group, index[0] if layered else None)
    return found


def place_of(name: str) -> Place:
    """Return where a tensor is that no table reads: its first number is its layer."""
    literals, position = taken_apart(name)
    return Place("*".join(literals), position[0] if position else None)
