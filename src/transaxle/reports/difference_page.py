"""The page of a comparison: where in the model two checkpoints differ, by how much, and what only one of them has."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from transaxle.axes.notation.name import natural
from transaxle.engine.compare import Comparison, Difference
from transaxle.engine.distance import EXPONENTS, Measure, Surveyed
from transaxle.engine.wording import fold, plural
from transaxle.reports.html_page import Column, Figure, Page, Section, Table, capped

MOST_GROUPS, MOST_LAYERS = 60, 256
"""Rows and columns of the heat map; what is beyond is in its table."""
_ALONE = frozenset({"only_first", "only_second"})
_RELATIVE = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
_CHANGED = (0.001, 0.01, 0.1, 0.5, 1)
"""Bounds between the colours of the heat map; there are six colours."""
_NOTHING = "no layer"
_BIASED = 1023
_LEAST, _MOST = -40, 12
"""Powers of two outside of which all differences have one bar."""


def difference_page(comparison: Comparison) -> Page:
    """Return the page of a comparison.

    Args:
        comparison: of measured values.
    """
    survey = comparison.survey
    assert survey is not None
    changed = sum(measure.changed for measure in survey.measures.values())
    differing = [each for each in comparison.differences if each.kind not in _ALONE]
    return Page(
        kind="difference",
        title=f"{comparison.first} and {comparison.second}",
        headline=f"{comparison.verdict}" + (f" · in dialect {comparison.dialect}" if comparison.dialect else ""),
        tiles=(
            (f"{comparison.tensors:,}", "tensors on both sides"),
            (f"{len(differing):,}", "differ" if len(differing) != 1 else "differs"),
            (f"{changed:,}", f"of {comparison.parameters:,} elements"),
            (f"{len(comparison.differences) - len(differing):,}", "on one side only"),
        ),
        first="What differs",
        notices=tuple(_notices(comparison)),
        quiet=(
            "Tensors of one type are compared bit by bit, and then measured; tensors of different number formats by "
            f"their values. A is {comparison.first}, B is {comparison.second}."
        ),
        sections=tuple(_sections(comparison, survey)),
        facts={
            "equal": comparison.equal, "tensors": comparison.tensors, "parameters": comparison.parameters,
            "bytes_read": comparison.bytes_read, "dialect": comparison.dialect, "across": dict(comparison.across),
            "differences": len(comparison.differences),
        },
    )  # fmt: skip


def _notices(comparison: Comparison) -> Iterator[tuple[str, str]]:
    kinds: defaultdict[str, list[Difference]] = defaultdict(list)
    for each in comparison.differences:
        kinds[each.kind].append(each)
    titles = {
        "values": "Values differ",
        "shape": "Shapes differ",
        "dtype": "Types differ",
        "encoding": "Encodings differ",
        "copies": "Copies in one checkpoint differ",
        "only_first": "Only in A",
        "only_second": "Only in B",
    }
    for kind, title in titles.items():
        found = kinds.get(kind, [])
        if found:
            worst = max(found, key=lambda each: _order(each.relative))
            text = f"{plural(len(found), 'tensor')}, such as {worst.name}"
            detail = "" if kind in _ALONE else f": {worst.detail}"
            relative = "" if worst.relative is None else f"; relative {worst.relative:.2g}"
            yield title, f"{text}{detail}{relative}."
    for formats, count in comparison.across.items():
        yield "Compared by value", f"{plural(count, 'tensor')}, stored as {formats}."


def _order(value: float | None) -> float:
    """Return a number by which what is not a number comes first, and what was not measured last."""
    return -1.0 if value is None else math.inf if math.isnan(value) else value


def _sections(comparison: Comparison, survey: Surveyed) -> Iterator[Section]:
    yield _map(comparison, survey)
    yield _worst(comparison, survey)
    if survey.counts:
        yield _histogram(survey)
    if survey.errors:
        yield _errors(survey)
    yield from _uncompared(comparison)


class _Cell:
    """Tensors of one group and layer."""

    def __init__(self) -> None:
        self.tensors = self.differing = self.elements = self.changed = 0
        self.largest = self._squares = self._of = 0.0

    def add(self, measure: Measure) -> None:
        """Add a tensor."""
        self.tensors += 1
        self.differing += measure.differs
        self.elements += measure.elements
        self.changed += measure.changed
        self.largest = max(self.largest, measure.largest)
        self._squares += measure.squares[0]
        self._of += measure.squares[1]

    @property
    def relative(self) -> float:
        """Norm of the difference over the norm of the second side's values."""
        if not self._of:
            return math.inf if self._squares else 0.0
        return math.sqrt(self._squares / self._of) if math.isfinite(self._of) else math.nan


def _cells(survey: Surveyed) -> dict[tuple[str, int | None], _Cell]:
    cells: defaultdict[tuple[str, int | None], _Cell] = defaultdict(_Cell)
    for measure in survey.measures.values():
        cells[measure.place.group, measure.place.layer].add(measure)
    return cells


def _map(comparison: Comparison, survey: Surveyed) -> Section:
    """Return the heat map: a row for each logical tensor, a column for each layer."""
    cells = _cells(survey)
    layers = sorted({layer for _, layer in cells if layer is not None})
    columns: list[int | None] = [*([None] if any(layer is None for _, layer in cells) else []), *layers]
    groups = list(dict.fromkeys(group for group, _ in cells))
    if len(groups) > MOST_GROUPS:
        groups = _by_change(cells)
    shown = {group: row for row, group in enumerate(groups[:MOST_GROUPS])}
    drawn = {layer: column for column, layer in enumerate(columns[:MOST_LAYERS])}
    data = {
        "columns": [_NOTHING if layer is None else str(layer) for layer in drawn],
        "rows": list(shown),
        "across": "layer",
        "measures": [
            {"title": "Relative change", "bounds": _RELATIVE, "kind": "number"},
            {"title": "Changed elements", "bounds": _CHANGED, "kind": "share"},
        ],
        "states": {"equal": "equal" if comparison.across else "equal bit by bit"},
        "cells": [
            (
                drawn[layer],
                shown[group],
                "" if cell.differing else "equal",
                (cell.relative, cell.changed / cell.elements if cell.elements else 0.0),
                (
                    f"{cell.differing:,} of {plural(cell.tensors, 'tensor')} differ",
                    f"{cell.changed:,} of {cell.elements:,} elements, by at most {cell.largest:.3g}",
                ),
            )
            for (group, layer), cell in cells.items()
            if group in shown and layer in drawn
        ],
    }
    rows = [
        (
            group, _NOTHING if layer is None else layer, cell.tensors, cell.differing, cell.elements, cell.changed,
            cell.relative, cell.largest,
        )
        for (group, layer), cell in cells.items()
    ]  # fmt: skip
    heads = (
        Column("tensor"), Column("layer"), Column("tensors", "count"), Column("differ", "count"),
        Column("elements", "count"), Column("changed", "count"), Column("relative", "number"),
        Column("max |Δ|", "number"),
    )  # fmt: skip
    rows.sort(key=lambda row: (-_order(row[6]), row[0]))
    text = (
        "The relative change of a tensor is the norm of A - B over the norm of B; of several tensors in one cell "
        "(experts), of all of them together. Cells with an outline only are equal."
    )
    left_out = len(groups) > MOST_GROUPS or len(columns) > MOST_LAYERS
    text += " The figure has those that changed most; the table has all." if left_out else ""
    label = f"Heat map of what changed, by tensor and layer, of {plural(comparison.tensors, 'tensor')}; a table has it."
    table = capped("cells", "By tensor and layer", heads, rows)
    return Section("map", "Where they differ", text, Figure("heat", label, data), (table,))


def _by_change(cells: Mapping[tuple[str, int | None], _Cell]) -> list[str]:
    """Return the groups by their largest relative change, then in their own order."""
    largest: dict[str, float] = {}
    for (group, _), cell in cells.items():
        largest[group] = max(largest.get(group, -1.0), _order(cell.relative))
    return sorted(largest, key=lambda group: -largest[group])


def _worst(comparison: Comparison, survey: Surveyed) -> Section:
    measured = [each for each in comparison.differences if each.kind == "values" and each.relative is not None]
    measured.sort(key=lambda each: (-_order(each.relative), natural(each.name)))
    rows = [
        (
            each.name, each.component, each.elements, survey.measures[each.name].elements, each.relative, each.max_abs,
            each.rms,
        )
        for each in measured
    ]  # fmt: skip
    columns = (
        Column("name", "name"), Column("tensor"), Column("changed", "count"), Column("elements", "count"),
        Column("relative", "number"), Column("max |Δ|", "number"), Column("RMS of Δ", "number"),
    )  # fmt: skip
    text = "Those whose relative change is largest come first." if rows else "No measured value differs."
    return Section("worst", "Tensors that differ", text, None, (capped("worst", "Tensors", columns, rows),))


def _histogram(survey: Surveyed) -> Section:
    """Return how many elements differ by how much: absolutely, and relative to the second side's value."""
    total = sum(survey.counts.values(), np.zeros((2, EXPONENTS), np.int64))
    titles = ("|A - B|", "|A - B| / |B|")
    labels: list[str] = []
    tables: list[Table] = []
    series: list[dict[str, Any]] = []
    for title, counts in zip(titles, total, strict=True):
        bars = _bars(counts)
        series.append({"title": title, "of": "elements", "bars": bars})
        labels.append(title)
        columns = (Column("from", "number"), Column("below", "number"), Column("elements", "count"))
        rows = [(low, high, count) for low, high, count in bars]
        tables.append(Table(f"histogram-{len(tables)}", f"Elements by {title}", columns, rows))
    label = f"Bars: elements that differ, by {labels[0]} and by {labels[1]} in powers of two; tables have the numbers."
    text = (
        "Elements that differ, by the size of the difference in powers of two. Differences of 0 are other bits of an "
        "equal value (-0.0 and 0.0, or NaN); infinite ones have a NaN on one side, or a B of 0."
    )
    return Section("histogram", "How much they differ", text, Figure("bars", label, {"series": series}), tuple(tables))


def _bars(counts: np.ndarray) -> list[tuple[float, float, int]]:
    """Return (from, below, elements): 0, the powers of two, infinite; what is outside of the usual is together."""
    found = {exponent - _BIASED: int(counts[exponent]) for exponent in range(1, EXPONENTS - 1) if counts[exponent]}
    bars: list[tuple[float, float, int]] = [(0.0, 0.0, int(counts[0]))] if counts[0] else []
    if found:
        low, high = max(min(found), _LEAST), min(max(found), _MOST)
        low, high = min(low, high), max(low, high)
        below = sum(count for exponent, count in found.items() if exponent < low)
        above = sum(count for exponent, count in found.items() if exponent > high)
        bars += [(0.0, 2.0**low, below)] if below else []
        bars += [(2.0**exponent, 2.0 ** (exponent + 1), found.get(exponent, 0)) for exponent in range(low, high + 1)]
        bars += [(2.0 ** (high + 1), math.inf, above)] if above else []
    return bars + ([(math.inf, math.inf, int(counts[-1]))] if counts[-1] else [])


def _errors(survey: Surveyed) -> Section:
    columns = (
        Column("tensor"), Column("codes of"), Column("encoding"), Column("tensors", "count"), Column("equal", "count"),
        Column("to half a step", "count"), Column("to one", "count"), Column("to two", "count"),
        Column("more", "count"), Column("most steps", "number"), Column("most |Δ| / scale", "number"),
    )  # fmt: skip
    largest_first = sorted(survey.errors.items(), key=lambda item: -item[1].steps)
    rows = [
        (group, each.side, each.encoding, each.tensors, *each.counts, each.steps, each.scales)
        for (group, _, _), each in largest_first
    ]
    text = (
        "A step is the distance between neighbouring codes at that value: the code's own precision times the scale of "
        "its tile. What was rounded to the nearest code is at most half a step away; more is a difference of the "
        "models, or of their scales. Where both sides are quantized, these are steps of B."
    )
    return Section("steps", "Differences in steps of the codes", text, None, (capped("steps", "Steps", columns, rows),))


def _uncompared(comparison: Comparison) -> Iterator[Section]:
    """Yield what was not compared element by element."""
    others = [each for each in comparison.differences if each.kind not in _ALONE and each.relative is None]
    if others:
        keys = [(each.kind, each.detail) for each in others]
        rows = [(*_texts(row.key), row.name, row.count) for row in fold([each.name for each in others], keys)]
        heads = Column("what"), Column("detail"), Column("name", "name"), Column("names", "count")
        table = capped("unmeasured", "Not measured", heads, rows)
        yield Section("unmeasured", "Differ, and were not measured", tables=(table,))
    alone: list[tuple[Any, ...]] = []
    for kind, side in (("only_first", "A"), ("only_second", "B")):
        names: Sequence[str] = [each.name for each in comparison.differences if each.kind == kind]
        alone += [(f"only in {side}", row.name, row.count) for row in fold(sorted(names, key=natural))]
    if alone:
        columns = Column("where"), Column("name", "name"), Column("names", "count")
        yield Section("alone", "On one side only", tables=(capped("alone", "Names", columns, alone),))


def _texts(key: object) -> tuple[str, ...]:
    assert isinstance(key, tuple)
    return key
