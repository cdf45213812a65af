"""The report page of a comparison: where two checkpoints differ, by how much, and which tensor names only one of them
has.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from transaxle.axes.notation.name import natural
from transaxle.engine.compare import Comparison, Difference
from transaxle.engine.distance import EXPONENTS, Measure, SurveyResult
from transaxle.engine.wording import fold, plural
from transaxle.reports.html_page import Column, Figure, Page, Section, Table, limit_rows

MOST_GROUPS, MOST_LAYERS = 60, 256
"""Largest number of rows (tensor groups) and columns (layers) of the heat map; the table below the heat map has all of
them.
"""
_ONE_SIDED = frozenset({"only_first", "only_second"})
_RELATIVE = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
_CHANGED = (0.001, 0.01, 0.1, 0.5, 1)
"""Bounds between the six colours of the heat map, as fractions of changed elements."""
_NO_LAYER = "no layer"
_EXPONENT_BIAS = 1023
_LOWEST_EXPONENT, _HIGHEST_EXPONENT = -40, 12
"""Smallest and largest power of two, as exponents, that has a bar of its own in the histogram. All smaller differences
share one bar, and all larger differences share one bar.
"""


def difference_page(comparison: Comparison) -> Page:
    """Return the page of a comparison.

    Args:
        comparison: a comparison with measured values.
    """
    survey = comparison.survey
    assert survey is not None
    changed = sum(measure.changed for measure in survey.measures.values())
    differing = [each for each in comparison.differences if each.kind not in _ONE_SIDED]
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
            "Tensors of equal dtype are compared bit by bit, and then measured; tensors of different number formats "
            f"are compared by value. A is {comparison.first}, B is {comparison.second}."
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
    for difference in comparison.differences:
        kinds[difference.kind].append(difference)
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
        differences = kinds.get(kind, [])
        if differences:
            worst = max(differences, key=lambda difference: _sort_key(difference.relative))
            text = f"{plural(len(differences), 'tensor')}, such as {worst.name}"
            detail = "" if kind in _ONE_SIDED else f": {worst.detail}"
            relative = "" if worst.relative is None else f"; relative {worst.relative:.2g}"
            yield title, f"{text}{detail}{relative}."
    for formats, count in comparison.across.items():
        yield "Compared by value", f"{plural(count, 'tensor')}, stored as {formats}."


def _sort_key(value: float | None) -> float:
    """Return a key for sorting values: NaN is largest, and None (not measured) is smallest."""
    return -1.0 if value is None else math.inf if math.isnan(value) else value


def _sections(comparison: Comparison, survey: SurveyResult) -> Iterator[Section]:
    yield _map_section(comparison, survey)
    yield _worst_section(comparison, survey)
    if survey.counts:
        yield _histogram_section(survey)
    if survey.errors:
        yield _errors_section(survey)
    yield from _sections_without_measures(comparison)


class _Cell:
    """A cell of the heat map: sums of measured differences over the tensors of one group in one layer."""

    def __init__(self) -> None:
        self.tensors = self.differing = self.elements = self.changed = 0
        self.largest = self._squares = self._of = 0.0

    def add(self, measure: Measure) -> None:
        """Add the measured differences of a tensor to the sums."""
        self.tensors += 1
        self.differing += measure.differs
        self.elements += measure.elements
        self.changed += measure.changed
        self.largest = max(self.largest, measure.largest)
        self._squares += measure.squares[0]
        self._of += measure.squares[1]

    @property
    def relative(self) -> float:
        """Norm of the difference divided by the norm of the second checkpoint's values."""
        if not self._of:
            return math.inf if self._squares else 0.0
        return math.sqrt(self._squares / self._of) if math.isfinite(self._of) else math.nan


def _cells(survey: SurveyResult) -> dict[tuple[str, int | None], _Cell]:
    cells: defaultdict[tuple[str, int | None], _Cell] = defaultdict(_Cell)
    for measure in survey.measures.values():
        cells[measure.place.group, measure.place.layer].add(measure)
    return cells


def _map_section(comparison: Comparison, survey: SurveyResult) -> Section:
    """Return the section with the heat map, which has a row for each logical tensor, and a column for each layer."""
    cells = _cells(survey)
    layers = sorted({layer for _, layer in cells if layer is not None})
    columns: list[int | None] = [*([None] if any(layer is None for _, layer in cells) else []), *layers]
    groups = list(dict.fromkeys(group for group, _ in cells))
    if len(groups) > MOST_GROUPS:
        groups = _by_change(cells)
    shown = {group: row for row, group in enumerate(groups[:MOST_GROUPS])}
    drawn = {layer: column for column, layer in enumerate(columns[:MOST_LAYERS])}
    data = {
        "columns": [_NO_LAYER if layer is None else str(layer) for layer in drawn],
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
            group, _NO_LAYER if layer is None else layer, cell.tensors, cell.differing, cell.elements, cell.changed,
            cell.relative, cell.largest,
        )
        for (group, layer), cell in cells.items()
    ]  # fmt: skip
    heads = (
        Column("tensor"), Column("layer"), Column("tensors", "count"), Column("differ", "count"),
        Column("elements", "count"), Column("changed", "count"), Column("relative", "number"),
        Column("max |Δ|", "number"),
    )  # fmt: skip
    rows.sort(key=lambda row: (-_sort_key(row[6]), row[0]))
    text = (
        "The relative change of a tensor is the norm of A - B divided by the norm of B; for several tensors in one "
        "cell, such as experts, it is computed over all of them. Outlined cells are equal."
    )
    left_out = len(groups) > MOST_GROUPS or len(columns) > MOST_LAYERS
    text += " The figure shows the rows with the largest changes; the table has all." if left_out else ""
    label = f"Heat map of what changed, by tensor and layer, of {plural(comparison.tensors, 'tensor')}; a table has it."
    table = limit_rows("cells", "By tensor and layer", heads, rows)
    return Section("map", "Where they differ", text, Figure("heat", label, data), (table,))


def _by_change(cells: Mapping[tuple[str, int | None], _Cell]) -> list[str]:
    """Return the names of the tensor groups, sorted by the largest relative change in each group."""
    largest: dict[str, float] = {}
    for (group, _), cell in cells.items():
        largest[group] = max(largest.get(group, -1.0), _sort_key(cell.relative))
    return sorted(largest, key=lambda group: -largest[group])


def _worst_section(comparison: Comparison, survey: SurveyResult) -> Section:
    measured = [
        difference
        for difference in comparison.differences
        if difference.kind == "values" and difference.relative is not None
    ]
    measured.sort(key=lambda difference: (-_sort_key(difference.relative), natural(difference.name)))
    rows = [
        (
            difference.name, difference.component, difference.elements, survey.measures[difference.name].elements,
            difference.relative, difference.max_abs, difference.rms,
        )
        for difference in measured
    ]  # fmt: skip
    columns = (
        Column("name", "name"), Column("tensor"), Column("changed", "count"), Column("elements", "count"),
        Column("relative", "number"), Column("max |Δ|", "number"), Column("RMS of Δ", "number"),
    )  # fmt: skip
    text = "Sorted by relative change, largest first." if rows else "No measured value differs."
    return Section("worst", "Tensors that differ", text, None, (limit_rows("worst", "Tensors", columns, rows),))


def _histogram_section(survey: SurveyResult) -> Section:
    """Return the section with histograms of absolute differences and of differences relative to the second
    checkpoint.
    """
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
        "Elements that differ, by the size of the difference in powers of two. A difference of 0 means equal values "
        "with different bits (-0.0 and 0.0, or NaN); an infinite one means NaN in one checkpoint, or a value of 0 in B."
    )
    return Section("histogram", "How much they differ", text, Figure("bars", label, {"series": series}), tuple(tables))


def _bars(counts: np.ndarray) -> list[tuple[float, float, int]]:
    """Return histogram bars (lower bound, upper bound, number of elements) for 0, for each power of two, and for
    infinity.
    """
    counts_by_exponent = {
        exponent - _EXPONENT_BIAS: int(counts[exponent]) for exponent in range(1, EXPONENTS - 1) if counts[exponent]
    }
    bars: list[tuple[float, float, int]] = [(0.0, 0.0, int(counts[0]))] if counts[0] else []
    if counts_by_exponent:
        low, high = max(min(counts_by_exponent), _LOWEST_EXPONENT), min(max(counts_by_exponent), _HIGHEST_EXPONENT)
        low, high = min(low, high), max(low, high)
        below = sum(count for exponent, count in counts_by_exponent.items() if exponent < low)
        above = sum(count for exponent, count in counts_by_exponent.items() if exponent > high)
        bars += [(0.0, 2.0**low, below)] if below else []
        bars += [
            (2.0**exponent, 2.0 ** (exponent + 1), counts_by_exponent.get(exponent, 0))
            for exponent in range(low, high + 1)
        ]
        bars += [(2.0 ** (high + 1), math.inf, above)] if above else []
    return bars + ([(math.inf, math.inf, int(counts[-1]))] if counts[-1] else [])


def _errors_section(survey: SurveyResult) -> Section:
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
        "A step is the distance between neighbouring codes at a value: the precision of the code times the scale of "
        "its tile. Rounding to the nearest code causes at most half a step; larger differences come from the models "
        "or their scales. If both checkpoints are quantized, steps are those of B."
    )
    return Section(
        "steps", "Differences in steps of the codes", text, None, (limit_rows("steps", "Steps", columns, rows),)
    )


def _sections_without_measures(comparison: Comparison) -> Iterator[Section]:
    """Yield the sections about differences without measured values, and about tensor names in only one checkpoint."""
    unmeasured = [each for each in comparison.differences if each.kind not in _ONE_SIDED and each.relative is None]
    if unmeasured:
        keys = [(each.kind, each.detail) for each in unmeasured]
        rows = [(*_texts(row.key), row.name, row.count) for row in fold([each.name for each in unmeasured], keys)]
        heads = Column("kind"), Column("detail"), Column("name", "name"), Column("names", "count")
        table = limit_rows("unmeasured", "Not measured", heads, rows)
        yield Section("unmeasured", "Differences that were not measured", tables=(table,))
    one_sided: list[tuple[Any, ...]] = []
    for kind, side in (("only_first", "A"), ("only_second", "B")):
        names: Sequence[str] = [each.name for each in comparison.differences if each.kind == kind]
        one_sided += [(f"only in {side}", row.name, row.count) for row in fold(sorted(names, key=natural))]
    if one_sided:
        columns = Column("side"), Column("name", "name"), Column("names", "count")
        yield Section("alone", "On one side only", tables=(limit_rows("alone", "Names", columns, one_sided),))


def _texts(key: object) -> tuple[str, ...]:
    assert isinstance(key, tuple)
    return key
