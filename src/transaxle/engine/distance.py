"""Differences between the values of two tensors, accumulated block by block.

A survey measures every tensor of a comparison and records its place in the model, for the charts of a report.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from transaxle.encodings.encoding import INTEGER_CODES, Encoding
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.moves import axes_of
from transaxle.engine.wording import split_name
from transaxle.formats.catalog import numpy_dtype

if TYPE_CHECKING:
    from transaxle.engine.views.decoded import Decoder


Counts = npt.NDArray[np.int64]
EXPONENTS = 2048
"""Number of classes into which differences are sorted by their biased exponent in double precision. Class 0 is for
numbers below 2**-1022, class `e` for numbers from 2**(e-1023) to twice that number, and class 2047 for infinities.
"""
_WORD = 8
"""Size in bytes of the largest integers that numpy compares."""
_STEPS = (0.0, 0.5, 1.0, 2.0)
"""Bounds of the classes into which differences are sorted by size. The unit is the step between neighbouring codes of a
number format.
"""
_TOLERANCE = 1 + 2**-10
"""Factor that absorbs the rounding of products; its distance from 1 is smaller than the precision of any code."""
_UNIFORM = 10
"""More than the binary exponent of any integer code."""
_CODES = {
    "F8_E4M3": (3, -6), "F8_E5M2": (2, -14), "F4": (1, 0), **dict.fromkeys(INTEGER_CODES, (_UNIFORM, _UNIFORM)),
    **dict.fromkeys(("NF4", "FP4"), (_UNIFORM + 3, _UNIFORM)),
}  # fmt: skip
"""Safetensors code of a low-precision dtype -> (number of mantissa bits, smallest normal exponent) of the dtype."""


class Rounding:
    """Accumulates how much a tensor differs from an encoded tensor, measured in steps between the codes of the encoded
    tensor.

    A step is the distance between a code and the next larger code, times the scale of the tile (region with one scale).
    Rounding to the nearest code differs by at most half a step.

    Args:
        decoder: decoder of the encoded tensor; it must return elements in the order in which they are compared.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.encoding: Encoding = decoder.tensor.encoding
        """Number format of the encoded tensor."""
        self.counts: Counts = np.zeros(len(_STEPS) + 1, np.int64)
        """Numbers of elements in each class of difference: none, at most half a step, at most one step, at most two
        steps, and more.
        """
        self.steps = 0.0
        """Largest difference, in steps between neighbouring codes."""
        self.scales = 0.0
        """Largest quotient of a difference divided by the scale of the element's tile (region with one scale)."""
        self._decoder = decoder

    def skip(self, elements: int) -> None:
        """Count the given number of elements as equal."""
        self.counts[0] += elements

    def add(self, first: int, values: np.ndarray, distance: np.ndarray) -> None:
        """Count the differences of a range of elements.

        Args:
            first: index of the range's first element.
            values: decoded values of the encoded tensor in the range.
            distance: absolute differences between the compared tensor and these values.
        """
        scale = self._decoder.scales(first, first + len(values))
        mantissa, least = _CODES[self.encoding.code]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            _, exponent = np.frexp(np.abs(values) / scale * _TOLERANCE)
            in_scales = np.where(distance == 0, 0.0, distance / scale)
            in_steps = np.ldexp(in_scales, mantissa - np.maximum(exponent - 1, least))
        in_steps[np.isnan(in_steps)] = np.inf
        tensor_places = np.searchsorted(np.array(_STEPS) * _TOLERANCE, in_steps)
        self.counts += np.bincount(tensor_places, minlength=len(self.counts))
        self.steps = max(self.steps, float(in_steps.max(initial=0.0)))
        self.scales = max(self.scales, float(np.nanmax(in_scales, initial=0.0)))


class Distance:
    """Accumulated differences between the values of two tensors.

    Args:
        counting: whether to count also how many differences have each magnitude.
        rounding: if one of the two tensors is encoded, the object that measures differences in steps between its codes,
            and whether the encoded tensor is the first of the two.
    """

    def __init__(self, *, counting: bool = False, rounding: tuple[Rounding, bool] | None = None) -> None:
        self.elements = 0
        """Number of elements that differ between the two tensors."""
        self.largest = 0.0
        """Largest absolute difference of two elements; inf if only one of two elements is NaN."""
        self.counts: Counts | None = np.zeros((2, EXPONENTS), np.int64) if counting else None
        """Numbers of differing elements: row 0 by the exponent of the difference, row 1 by the exponent of the relative
        difference (divided by the second value).
        """
        self.rounding = None if rounding is None else rounding[0]
        """Object that measures the differences in steps between codes; None if steps are not measured."""
        self.of_first = rounding is not None and rounding[1]
        """Whether `rounding` uses the codes of the first tensor; otherwise it uses those of the second."""
        self._count = 0
        self._squares = 0.0
        self._second_squares = 0.0

    @property
    def squares(self) -> tuple[float, float]:
        """The sum of the squared differences, and the sum of the second tensor's squared values."""
        return self._squares, self._second_squares

    @property
    def rms(self) -> float:
        """Root of the mean squared difference."""
        return math.sqrt(self._squares / self._count) if self._count else 0.0

    @property
    def relative(self) -> float:
        """Norm of the difference divided by the norm of the second tensor; inf if only the norm of the second tensor is
        0.
        """
        if not self._second_squares:
            return math.inf if self._squares else 0.0
        return math.sqrt(self._squares / self._second_squares) if math.isfinite(self._second_squares) else math.nan

    def skip(self, block: memoryview, dtype: str, *, measured: bool) -> None:
        """Count a block of elements that are equal in both tensors."""
        if measured:
            values = _wide(block, dtype)
            if self.rounding is not None:
                self.rounding.skip(values.size)
            self._sum(values)

    def add(
        self, first_block: memoryview, second_block: memoryview, first_dtype: str, second_dtype: str, *, by_value: bool
    ) -> None:
        """Measure the same block of elements of both tensors, given as bytes of the given dtypes."""
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
            self._second_squares += float(np.nansum(np.square(np.abs(values))))


def _wide(block: memoryview, dtype: str) -> np.ndarray:
    """Return the values of a block in double precision; complex values remain complex."""
    kind = numpy_dtype(dtype)
    values = np.frombuffer(block, kind)
    with np.errstate(invalid="ignore"):  # signaling NaNs are allowed
        if kind.names:  # numpy has no type for complex numbers of half precision
            parts = np.stack([values[name].astype(np.float64) for name in kind.names], axis=-1)
            return parts.view(np.complex128).reshape(-1)
        return values.astype(np.complex128 if kind.kind == "c" else np.float64)


_EXPERTS = "experts"
"""Description of the expert axis. The index of this axis is not a layer number even if it is the first number in a
tensor name.
"""


class Place(msgspec.Struct, frozen=True):
    """The place of a tensor in the model."""

    group: str
    """Logical tensors and optimizer slot of the tensor, if the family's table reads it; otherwise the tensor's name,
    with `*` instead of numbers.
    """
    layer: int | None
    """Layer number of the tensor; None if the tensor's name contains no layer number."""


class Measure(msgspec.Struct, frozen=True):
    """Measured differences of one tensor between two checkpoints."""

    place: Place
    """Place of the tensor in the model."""
    elements: int
    """Number of elements of the tensor."""
    differs: bool
    """Whether any bits differ; if the number formats of the two tensors differ, whether any values do."""
    changed: int
    """Number of differing elements; 0 if the elements were not measured."""
    largest: float
    """Largest absolute difference of two elements."""
    squares: tuple[float, float]
    """The sum of the squared differences, and the sum of the second tensor's squared values."""


class CodeErrors(msgspec.Struct):
    """How much tensors differ from those of a quantized checkpoint, measured in steps between its codes."""

    side: str
    """Path of the quantized checkpoint."""
    encoding: str
    """Number format of the quantized tensors."""
    tensors: int = 0
    """Number of quantized tensors that were compared."""
    counts: list[int] = msgspec.field(default_factory=lambda: [0] * 5)
    """Numbers of elements that are equal, differ by at most half a step, by at most one step, by at most two steps, and
    by more.
    """
    steps: float = 0.0
    """Largest difference, in steps between neighbouring codes."""
    scales: float = 0.0
    """Largest quotient of a difference divided by the scale of the element's tile (region with one scale)."""


class SurveyResult(msgspec.Struct, frozen=True):
    """All measured differences between two checkpoints, by tensor and by group of tensors."""

    measures: Mapping[str, Measure]
    """Tensor name in the second checkpoint's dialect -> measured differences of the tensor."""
    counts: Mapping[str, Counts]
    """Group of tensors -> numbers of differing elements: row 0 by the exponent of the difference, row 1 by that of the
    relative difference.
    """
    errors: Mapping[tuple[str, str, str], CodeErrors]
    """(group of tensors, path of the quantized checkpoint, number format) -> differences in steps between codes."""


class Survey:
    """Collects the measured differences while several threads compare tensors.

    Args:
        first: the first checkpoint, expressed in the second checkpoint's dialect.
        second: the second checkpoint.
    """

    def __init__(self, first: Checkpoint, second: Checkpoint) -> None:
        self._sides = first, second
        self._places = tensor_places(second)
        self._measures: dict[str, Measure] = {}
        self._counts: dict[str, Counts] = {}
        self._errors: dict[tuple[str, str, str], CodeErrors] = {}
        self._lock = threading.Lock()

    def distance(self, name: str) -> Distance:
        """Return a new object that accumulates the differences of one tensor."""
        first, second = self._sides
        rounding = _rounding_of(second, name)
        if rounding is not None:
            return Distance(counting=True, rounding=(rounding, False))
        rounding = _rounding_of(first, name)
        return Distance(counting=True, rounding=None if rounding is None else (rounding, True))

    def add(self, name: str, distance: Distance, differs: bool) -> None:
        """Add the measured differences of a tensor."""
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

    def _add_errors(self, group: str, rounding: Rounding, *, of_first: bool) -> None:
        side, encoding = self._sides[0 if of_first else 1].path, rounding.encoding.name
        errors = self._errors.setdefault((group, side, encoding), CodeErrors(side, encoding))
        errors.tensors += 1
        errors.counts = [a + b for a, b in zip(errors.counts, rounding.counts.tolist(), strict=True)]
        errors.steps, errors.scales = max(errors.steps, rounding.steps), max(errors.scales, rounding.scales)

    def result(self) -> SurveyResult:
        """Return all measured differences, in the tensor order of the second checkpoint."""
        measures = {name: self._measures[name] for name in self._sides[1] if name in self._measures}
        return SurveyResult(measures, self._counts, self._errors)


def _rounding_of(side: Checkpoint, name: str) -> Rounding | None:
    """Return an object that measures differences in steps between a tensor's codes; None if the tensor was not made by
    decoding one encoded tensor of the same shape.
    """
    from transaxle.engine.views.decoded import Decoder

    tensor = side[name]
    origins = tensor.origins or {name}
    if not side.decoded or len(origins) != 1:
        return None
    (origin,) = origins
    if origin not in side.decoded or side.decoded[origin].shape != tensor.shape:
        return None
    if side.family is not None and side.dialect != side.reading.dialect.label:
        return None  # translating into a different dialect may change the order of the elements
    decoder = side.container.recoding.computed.get(side.container.entries[origin].extents[0].file)
    return Rounding(decoder) if isinstance(decoder, Decoder) else None


def tensor_places(checkpoint: Checkpoint) -> dict[str, Place]:
    """Return tensor name -> place of the tensor in the model, for all tensors that the family's table reads.

    Args:
        checkpoint: a checkpoint in its stored dialect.
    """
    if checkpoint.family is None:
        return {}
    meanings = {axis.axis: axis.meaning for axis in axes_of(checkpoint.reading.family)}
    tensor_places = {}
    for (line, slot), names in checkpoint.bound.names.items():
        group = ", ".join(line.expression.components) + (f" · {slot}" if slot else "")
        layered = bool(line.name.axes) and meanings[line.name.axes[0]] != _EXPERTS
        for index, name in names.items():
            tensor_places[name] = Place(group, index[0] if layered else None)
    return tensor_places


def place_of(name: str) -> Place:
    """Return the place of a tensor that no family's table reads; the first number in the tensor's name is taken as its
    layer.
    """
    literals, position = split_name(name)
    return Place("*".join(literals), position[0] if position else None)
