"""What a comparison measures of every tensor, and where in the model each is: the numbers that are drawn of it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.facts.legend import axes_of
from transaxle.engine.fold import taken_apart

if TYPE_CHECKING:
    from transaxle.engine.compare.distance import Counts, Distance, Rounding

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
        from transaxle.engine.compare.distance import Distance

        first, second = self._sides
        found = _rounding(second, name)
        if found is not None:
            return Distance(counting=True, rounding=(found, False))
        found = _rounding(first, name)
        return Distance(counting=True, rounding=None if found is None else (found, True))

    def add(self, name: str, distance: Distance, differs: bool) -> None:
        """Add what was measured of a tensor."""
        import numpy as np

        from transaxle.engine.compare.distance import EXPONENTS

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
    from transaxle.engine.compare.distance import Rounding
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
