"""The report page of a checkpoint: where its bytes are, how its tensors are laid out, and anything unusual about it.

`layout_rows` groups the tensors into a few rows. A row represents tensors whose names differ only in indices, such as
layer and expert, with every combination of these indices. 70,000 tensors make about twenty rows. The treemap is drawn
from these rows. `find_unusual` lists what a reader of the page should look at first.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import Any, Literal

from transaxle.axes.layout.bind import WEIGHT
from transaxle.axes.layout.relayout import fill
from transaxle.axes.notation.name import natural
from transaxle.encodings.encoding import EncodedTensor, Role
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint_facts import JsonFacts, checkpoint_facts
from transaxle.engine.distance import place_of, tensor_places
from transaxle.engine.moves import axes_of
from transaxle.engine.values import CheckpointValues, TensorValues
from transaxle.engine.wording import Indices, Position, fold, index_products, index_ranges, parameters, plural, size
from transaxle.errors import TransaxleError, shortened
from transaxle.formats.catalog import NUMBERS
from transaxle.reports.html_page import MOST_ROWS, Column, Figure, Page, Section, Table, limit_rows, shades

Kind = Literal["table", "ignored", "unknown"]


@dataclass(frozen=True, slots=True)
class RowKey:
    """The properties that all tensors of a row have in common."""

    kind: Kind
    """`table` if a table line describes the tensors; `ignored` if the table lists them as tensors that are no weights;
    `unknown` otherwise.
    """
    rule: str
    """Table line of the tensors; for tensors outside the table, their name with `*` instead of indices."""
    component: str
    """Names of the logical tensors in each tensor; for tensors outside the table, the same text as `rule`."""
    slot: str
    """Name of the optimizer state, such as `exp_avg`; empty for weights."""
    role: str
    """Role (codes, scales, …) of the buffer in its encoded tensor; empty for a plain tensor."""
    encoding: str
    """Name of the encoding; empty for a plain tensor."""
    axes: tuple[str, ...]
    """For each index in the names, its axis; for tensors outside the table, an empty text."""
    dtype: str
    """Safetensors code of the tensors' dtype."""
    shape: tuple[int, ...]
    """Shape of each tensor, counted in logical (unpacked) elements."""


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """Tensors whose names differ only in indices, and that are alike in all other properties."""

    key: RowKey
    """Properties that all tensors of the row share."""
    sets: Indices
    """For each axis, the indices that occur; the row has a tensor for every combination of indices."""
    count: int
    """Number of tensors in the row."""
    bytes: int
    """Total bytes of all tensors in the row."""
    example: str
    """Stored name of the first tensor in the row."""
    misfit: str = ""
    """How the shape of the tensors differs from the shape that follows from table and config; empty if the shapes
    agree.
    """


@dataclass(frozen=True, slots=True)
class _Place:
    """The table line, logical tensors and indices of one stored tensor."""

    line: int
    """Index of the table line, in the order of the table."""
    rule: str
    component: str
    slot: str
    axes: tuple[str, ...]
    index: Position
    encoded: EncodedTensor | None
    role: Role | None


def layout_rows(checkpoint: Checkpoint) -> list[LayoutRow]:
    """Return rows for all stored tensors: first the tensors in the table, in the order of the table, then all other
    tensors.

    Args:
        checkpoint: the checkpoint in its stored dialect.
    """
    places = _places(checkpoint) if checkpoint.family is not None else {}
    groups: dict[tuple[int, RowKey], dict[Position, str]] = defaultdict(dict)
    outside_names: list[str] = []
    for name, tensor in checkpoint.items():
        place = places.get(name)
        if place is None:
            outside_names.append(name)
            continue
        encoding = "" if place.encoded is None else place.encoded.encoding.name
        role = "" if place.role is None else place.role.value
        common = place.rule, place.component, place.slot, role, encoding, place.axes
        groups[place.line, RowKey("table", *common, tensor.dtype, tensor.shape)][place.index] = name
    rows = [
        _row(checkpoint, key, sets, names_by_index[_first(sets)], _misfit(checkpoint, number, key, _first(sets)))
        for (number, key), names_by_index in sorted(groups.items(), key=lambda item: item[0][0])
        for sets in index_products(names_by_index)
    ]
    return [*rows, *_other_rows(checkpoint, outside_names)]


def _first(sets: Indices) -> Position:
    return tuple(indices[0] for indices in sets)


def _misfit(checkpoint: Checkpoint, line: int, key: RowKey, index: Position) -> str:
    """Return the reason why a conversion would refuse the shape of a row's first tensor; return "" if the shape is
    accepted.
    """
    if key.slot != WEIGHT or key.encoding:
        return ""
    expression = checkpoint.bound.dialect.lines[line].expression
    try:
        fill(expression, key.shape, checkpoint.sizes.at(dict(zip(key.axes, index, strict=True))))
    except TransaxleError as error:
        return error.refusals[0].message.replace("\n", ": ") if error.code == "SHAPE_MISMATCH" else ""
    return ""


def _row(checkpoint: Checkpoint, key: RowKey, sets: Indices, example: str, misfit: str = "") -> LayoutRow:
    count = 1
    for indices in sets:
        count *= len(indices)
    return LayoutRow(key, sets, count, count * checkpoint[example].nbytes, example, misfit)


def _places(checkpoint: Checkpoint) -> dict[str, _Place]:
    """Return stored tensor name -> place in the table, for all tensors that the table describes."""
    bound, encoded = checkpoint.bound, checkpoint.encoded
    numbers = {line: number for number, line in enumerate(bound.dialect.lines)}
    places: dict[str, _Place] = {}
    for (line, slot), names in bound.names.items():
        component = ", ".join(line.expression.components)
        rule = f"{bound.prefix}{line.name.text} = {line.expression.text}"
        common = numbers[line], rule, component, slot, line.name.axes
        for index, name in names.items():
            group = encoded.get(name)
            if group is None:
                places[name] = _Place(*common, index, None, None)
            for role, stored in _parts(group):
                places[stored] = _Place(*common, index, group, role)
    return places


def _parts(group: EncodedTensor | None) -> Iterator[tuple[Role, str]]:
    yield from () if group is None else group.parts.items()


def _other_rows(checkpoint: Checkpoint, names: list[str]) -> Iterator[LayoutRow]:
    """Yield rows of tensors that no table line describes; the numbers in their names are their indices."""
    ignored = frozenset(checkpoint.bound.ignored) if checkpoint.family is not None else frozenset()
    kinds: Mapping[bool, Kind] = {True: "ignored", False: "unknown"}
    keys = [(kinds[name in ignored], checkpoint[name].dtype, checkpoint[name].shape) for name in names]
    for folded in fold(names, keys):
        kind, dtype, shape = _other_key(folded.key)
        text, axes = "*".join(folded.literals), ("",) * len(folded.sets)
        key = RowKey(kind, text, text, "", "", "", axes, dtype, shape)
        yield _row(checkpoint, key, folded.sets, folded.names[0])


def _other_key(key: object) -> tuple[Kind, str, tuple[int, ...]]:
    assert isinstance(key, tuple)
    kind, dtype, shape = key
    return kind, dtype, shape


_SEARCHED = (
    "Looked for: names outside the table, scales that do not fit, shapes that do not fit the config, files that "
    "changed since they were written, files more than twice as large as usual, tensors that differ in type or shape "
    "from the others of their rule, missing combinations of indices, and tensors without elements."
)
_NO_VALUES = "The values were not read; with --values (values=True), NaN and infinite values are searched for too."
_MOST_NOTICES = 30
"""Largest number of notices that the page shows."""
_LARGE_FACTOR = 2
"""A file is unusual if it is larger than the median file by at least this factor."""
_FEW = 3
"""Number of values of a property that are listed; also the largest number of files for which no file is unusual."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One unusual finding about a checkpoint."""

    title: str
    """The finding in a few words."""
    text: str
    """Details of the finding."""


def search_text(values: CheckpointValues | None) -> str:
    """Return the sentence of the page that lists which unusual things were searched for."""
    return f"{_SEARCHED} {_NO_VALUES if values is None else 'NaN and infinite values were searched for too.'}"


def find_unusual(
    facts: JsonFacts,
    rows: Sequence[LayoutRow],
    tensor_bytes: Mapping[str, int],
    values: CheckpointValues | None = None,
) -> list[Notice]:
    """Return notices about unusual things in a checkpoint; notices of NaN and infinite values come first.

    Args:
        facts: facts about the checkpoint; see `checkpoint_facts`.
        rows: the checkpoint's tensors as rows of the layout.
        tensor_bytes: file -> bytes of the tensors in the file.
        values: statistics of the values, if they were measured.
    """
    of_values = [] if values is None else _value_notices(values)
    notices = [
        *of_values,
        *_name_notices(facts, rows),
        *_shape_notices(rows),
        *_file_notices(facts, tensor_bytes),
        *_rule_notices(rows),
    ]
    hidden_count = len(notices) - _MOST_NOTICES
    return [
        *notices[:_MOST_NOTICES],
        *([Notice("And more", f"{plural(hidden_count, 'notice')} like these.")] if hidden_count > 0 else []),
    ]


def _value_notices(values: CheckpointValues) -> Iterator[Notice]:
    for title, counts in (
        ("NaN values", {name: each.nans for name, each in values.tensors.items()}),
        ("Infinite values", {name: each.infinite for name, each in values.tensors.items()}),
    ):
        counts = {name: count for name, count in counts.items() if count}
        if counts:
            worst = max(counts, key=counts.__getitem__)
            share_of_worst = f"{counts[worst]:,} of {values.tensors[worst].elements:,}"
            text = f"{plural(sum(counts.values()), 'element')} of {plural(len(counts), 'tensor')}, the most"
            yield Notice(title, f"{text} in {worst}: {share_of_worst}.")


def _name_notices(facts: JsonFacts, rows: Sequence[LayoutRow]) -> Iterator[Notice]:
    reason = facts["reason"]
    if reason is not None:
        yield Notice("No table reads these names", f"{reason['message']}. {reason['hint']}".strip())
    else:
        outside = [row for row in rows if row.key.kind == "unknown"]
        count = sum(row.count for row in outside)
        if count:
            amount = size(sum(row.bytes for row in outside))
            have = "has" if count == 1 else "have"
            text = f"{plural(count, 'tensor')} ({amount}) {have} no line in dialect {facts['dialect']}"
            yield Notice("Tensors outside the table", f"{text}, such as {outside[0].example}.")
    if facts["misfits"]:
        first = facts["misfits"][0]
        more_misfits = f" And {len(facts['misfits']) - 1:,} more." if len(facts["misfits"]) > 1 else ""
        place = first["tensor"] or first["file"] or ""
        yield Notice("Scales that do not fit", f"{place} {first['message']}{more_misfits}".strip())
    yield from (Notice("Missing", lack["text"]) for lack in facts["missing"])


def _shape_notices(rows: Sequence[LayoutRow]) -> Iterator[Notice]:
    misfits = [row for row in rows if row.misfit]
    if misfits:
        amount, first = plural(sum(row.count for row in misfits), "tensor"), misfits[0]
        text = f"{amount}, such as {first.example}, {first.misfit}. A conversion refuses them."
        yield Notice("Shapes that do not fit the config", text)


def _file_notices(facts: JsonFacts, tensor_bytes: Mapping[str, int]) -> Iterator[Notice]:
    problems = facts["manifest"]["problems"]
    if problems:
        file = problems[0]["file"] or ""
        yield Notice("The manifest no longer matches", f"{file} {problems[0]['message']}".strip())
    usual = median(tensor_bytes.values()) if len(tensor_bytes) > _FEW else 0
    for file, count in tensor_bytes.items():
        if usual and count > _LARGE_FACTOR * usual:
            text = f"{file} has {size(count)} of tensors; half of the files have {size(int(usual))} or less."
            yield Notice("A file much larger than the others", text)


def _rule_notices(rows: Sequence[LayoutRow]) -> Iterator[Notice]:
    by_rule: defaultdict[tuple[str, str, str], list[LayoutRow]] = defaultdict(list)
    for row in rows:
        if row.key.kind == "table":
            by_rule[row.key.rule, row.key.slot, row.key.role].append(row)
    for (rule, _, _), alike in by_rule.items():
        name = f"{alike[0].key.component} ({rule})"
        yield from _difference_notice("types", name, [(row.key.dtype, row) for row in alike])
        yield from _difference_notice("shapes", name, [(str(list(row.key.shape)), row) for row in alike])
        combinations = prod(len(set().union(*places)) for places in zip(*(row.sets for row in alike), strict=True))
        count_all = sum(row.count for row in alike)
        if count_all != combinations:
            axes = " x ".join(alike[0].key.axes)
            yield Notice(
                "Missing combinations of indices",
                f"{name}: {count_all:,} tensors, but {combinations:,} combinations of {axes}.",
            )
    empty = [row for row in rows if row.bytes == 0]
    if empty:
        count_empty = sum(row.count for row in empty)
        yield Notice("Tensors without elements", f"{plural(count_empty, 'tensor')}, such as {empty[0].example}.")


def _difference_notice(properties: str, name: str, valued: Sequence[tuple[str, LayoutRow]]) -> Iterator[Notice]:
    """Yield a notice if rows of one table line differ in a property; it contains the number of tensors per value, and
    an example.
    """
    count: Counter[str] = Counter()
    for value, row in valued:
        count[value] += row.count
    if len(count) > 1:
        listed = ", ".join(f"{number:,} of {value}" for value, number in count.most_common(_FEW))
        rarest = count.most_common()[-1][0]
        example = next(row.example for value, row in valued if value == rarest)
        yield Notice(f"Different {properties} in one rule", f"{name}: {listed}; {example} is of {rarest}.")


_LONGEST_VALUE = 2000
"""Largest length, in characters, of a shown value of the config or metadata."""
_FACTS = (
    "format", "family", "dialect", "prefix", "names", "read", "tensors", "parameters", "bytes", "dtypes", "encodings",
    "axes",
)  # fmt: skip
"""Keys of the output of `transaxle info --json` that are also embedded in the page, for programs that read the page."""
_MOST_GROUPS, _MOST_LAYERS, _SHOWN = 60, 256, 12
"""Largest number of rows and of columns in the map of values, and of channels listed for each tensor."""
_INDEX_NOUNS = {"layers": "layer", "experts": "expert"}
"""Meaning of an axis -> noun for one index along this axis; other axes are named by their letter."""
_AMOUNTS = (Column("tensors", "count"), Column("bytes", "bytes"), Column("share", "share"))


def checkpoint_page(opened: Checkpoint, values: CheckpointValues | None = None) -> Page:
    """Return the page of a checkpoint; only the headers of its files are read.

    Args:
        opened: the open checkpoint; the page shows its stored tensor names.
        values: statistics of the values, if they were measured.

    Raises:
        TransaxleError: if the user named a family or dialect that does not fit the tensor names.
    """
    checkpoint = opened.stored
    facts, rows = checkpoint_facts(checkpoint), layout_rows(checkpoint)
    in_files = _tensors_by_file(checkpoint)
    tensor_bytes = {file: count for file, (_, count) in in_files.items()}
    sections = (
        _bytes_section(checkpoint, facts, rows),
        *(() if values is None else _values_section(values)),
        _layout_section(checkpoint, facts, rows),
        _formats_section(facts),
        _files_section(facts, in_files),
        *_optional_sections(checkpoint, facts),
    )
    return Page(
        kind="checkpoint",
        title=facts["path"],
        headline=" · ".join(
            text for text in (facts["format"], facts["family"] or "unknown family", facts["dialect"]) if text
        ),
        tiles=(
            (parameters(facts["parameters"]).removesuffix(" parameters"), "parameters"),
            (size(facts["bytes"]), "of tensors"),
            (f"{facts['tensors']:,}", "tensors"),
            (f"{len(tensor_bytes):,}", "files" if len(tensor_bytes) != 1 else "file"),
        ),
        first="What is unusual",
        notices=tuple((each.title, each.text) for each in find_unusual(facts, rows, tensor_bytes, values)),
        quiet=search_text(values),
        sections=sections,
        facts={key: facts[key] for key in _FACTS},
    )


def _bytes_section(checkpoint: Checkpoint, facts: JsonFacts, rows: Sequence[LayoutRow]) -> Section:
    """Return the section with the treemap, which has one area per tensor, in proportion to the tensor's bytes."""
    words = {axis: _INDEX_NOUNS.get(meaning, axis) for axis, meaning in _meanings(checkpoint).items()}
    largest = sorted(rows, key=lambda row: -row.bytes)[:MOST_ROWS]
    shown = {id(row) for row in largest}
    shown_rows, other_rows = [row for row in rows if id(row) in shown], [row for row in rows if id(row) not in shown]
    groups: list[dict[str, Any]] = [
        {
            "component": row.key.component, "rule": row.key.rule, "slot": row.key.slot, "role": row.key.role,
            "axes": [words.get(axis, axis) for axis in row.key.axes],
            "sets": [_runs(indices) for indices in row.sets],
            "dtype": row.key.dtype, "shape": row.key.shape, "each": row.bytes // row.count, "example": row.example,
        }
        for row in shown_rows
    ]  # fmt: skip
    data = {
        "groups": groups,
        "rest": {"count": sum(row.count for row in other_rows), "bytes": sum(row.bytes for row in other_rows)},
        "bytes": facts["bytes"],
    }
    label = (
        f"Treemap of {size(facts['bytes'])} in {plural(facts['tensors'], 'tensor')}; the table below has its numbers."
    )
    text = "The larger an area, the more bytes. Click one to look inside; the search also covers the tables below."
    return Section("bytes", "Where the bytes are", text, Figure("treemap", label, data))


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, last) of each range of consecutive indices; the indices must be sorted."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], index
        else:
            runs.append((index, index))
    return runs


def _layout_section(checkpoint: Checkpoint, facts: JsonFacts, rows: Sequence[LayoutRow]) -> Section:
    columns = (
        Column("tensor"), Column("rule", "name"), Column("indices"), Column("type"), Column("shape"), *_AMOUNTS,
        Column("example", "name"),
    )  # fmt: skip
    cells = [
        (
            _tensor_label(row), row.key.rule, _indices_text(row), row.key.dtype,
            " x ".join(map(str, row.key.shape)) or "1", row.count, row.bytes, row.bytes, row.example,
        )
        for row in rows
    ]  # fmt: skip
    text = "A rule shows the names under which a tensor is stored, and the axes of its dims, outermost first."
    if facts["family"] is None:
        text = "No table contains these names: each row is a name, with * in place of its numbers."
    return Section(
        "layout",
        "Layout",
        text,
        None,
        (limit_rows("layout", "Tensors by rule", columns, cells, 6), *_axes(checkpoint, facts)),
    )


def _tensor_label(row: LayoutRow) -> str:
    key = row.key
    if key.kind != "table":
        return "outside the table" if key.kind == "unknown" else "not part of the model"
    words = [f"({key.role}, {key.encoding})" if key.role else "", f"· {key.slot}" if key.slot else ""]
    return " ".join(filter(None, [key.component, *words]))


def _indices_text(row: LayoutRow) -> str:
    texts = [index_ranges(indices).strip("[]") for indices in row.sets]
    return "  ".join(f"{axis} {text}".strip() for axis, text in zip(row.key.axes, texts, strict=True))


def _meanings(checkpoint: Checkpoint) -> dict[str, str]:
    """Return axis -> what the axis counts, for the axes of the family."""
    if checkpoint.family is None:
        return {}
    return {each.axis: each.meaning for each in axes_of(checkpoint.reading.family)}


def _axes(checkpoint: Checkpoint, facts: JsonFacts) -> Iterator[Table]:
    if facts["axes"]:
        meanings = _meanings(checkpoint)
        rows = [(axis, count, meanings.get(axis, "")) for axis, count in facts["axes"].items()]
        yield Table("axes", "Axes", (Column("axis", "name"), Column("size", "count"), Column("meaning")), rows)


def _formats_section(facts: JsonFacts) -> Section:
    dtypes = [(code, each["tensors"], each["bytes"], each["bytes"]) for code, each in facts["dtypes"].items()]
    tables = [limit_rows("dtypes", "Types", (Column("type"), *_AMOUNTS), dtypes, 2)]
    encodings = [(each["encoding"], each["convention"], each["tensors"]) for each in facts["encodings"]]
    if encodings:
        columns = Column("encoding"), Column("convention"), Column("tensors", "count")
        tables.append(Table("encodings", "Encodings", columns, encodings))
    return Section("formats", "Types and encodings", tables=tuple(tables))


def _tensors_by_file(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """Return file -> (number of tensors, bytes of tensors); a tensor in several files is counted in each of them."""
    count: Counter[str] = Counter()
    amount: Counter[str] = Counter()
    for entry in checkpoint.container.entries.values():
        elements = prod(entry.shape)
        # Scalar entries are stored inside a pickle, so they occupy no bytes of tensor data.
        extents = [extent for extent in entry.extents if extent.file != NUMBERS]
        count.update({extent.file for extent in extents})
        for extent in extents:
            amount[extent.file] += entry.nbytes * prod(extent.shape) // elements if elements else 0
    return {file: (count[file], amount[file]) for file in sorted(count, key=natural)}


def _files_section(facts: JsonFacts, in_files: Mapping[str, tuple[int, int]]) -> Section:
    names = dict.fromkeys([*in_files, *facts["files"]])
    rows = [
        (name, *in_files.get(name, (0, 0)), facts["files"].get(name, 0), facts["files"].get(name, 0)) for name in names
    ]
    columns = Column("file", "name"), Column("tensors", "count"), Column("of tensors", "bytes"), Column("size", "bytes")
    manifest = {
        "none": "There is no manifest: transaxle did not write this checkpoint.",
        "matches": "The manifest matches: all files still have the recorded sizes and headers.",
        "stale": "The manifest no longer matches the files.",
    }[facts["manifest"]["state"]]
    table = limit_rows("files", "Files", (*columns, Column("share", "share")), rows, 3)
    return Section("files", "Files", manifest, None, (table,))


def _optional_sections(checkpoint: Checkpoint, facts: JsonFacts) -> Iterator[Section]:
    """Yield the sections that only some checkpoints need: ties, other names, config and metadata."""
    ties = [tuple(tie.split(" = ", 1)) for tie in facts["tied"]]
    ties += [(alias, original) for alias, original in facts["aliases"].items()]
    if ties:
        columns = Column("tensor", "name"), Column("is the same as", "name")
        yield Section("ties", "Ties", tables=(Table("ties", "Tied tensors", columns, ties),))
    other_names = [
        (kind, row.name, row.count)
        for kind, names in (
            ("tensor outside the table", facts["unknown"]),
            ("not part of the model", facts["ignored"]),
            ("copied by conversions", facts["carried"]),
        )
        for row in fold(sorted(names, key=natural))
    ]
    if other_names:
        kinds = Column("what it is"), Column("name", "name"), Column("names", "count")
        table = limit_rows("others", "Other names", kinds, other_names)
        yield Section("others", "Other names and files", tables=(table,))
    for label, title, values in (
        ("config", "Config", checkpoint.config),
        ("metadata", "Metadata", checkpoint.container.metadata),
    ):
        if values:
            heads = Column("key", "name"), Column("value", "name")
            cells = [(str(key), _value(value)) for key, value in values.items()]
            yield Section(label, title, tables=(limit_rows(label, title, heads, cells),))


def _values_section(values: CheckpointValues) -> Iterator[Section]:
    """Yield the section with value statistics: a map by tensor and layer, and tables of tensors and outlier
    channels.
    """
    places_by_name = tensor_places(values.view)
    cells: dict[tuple[str, int | None], list[TensorValues]] = {}
    for name, tensor_values in values.tensors.items():
        place = places_by_name.get(name) or place_of(name)
        cells.setdefault((place.group, place.layer), []).append(tensor_values)
    layers: list[int | None] = [*sorted({layer for _, layer in cells if layer is not None})]
    columns = [*([None] if any(layer is None for _, layer in cells) else []), *layers][:_MOST_LAYERS]
    groups = list(dict.fromkeys(group for group, _ in cells))[:_MOST_GROUPS]
    map_cells: list[Any] = []
    for (group, layer), inside in cells.items():
        if group in groups and layer in columns:
            map_cells.append((columns.index(layer), groups.index(group), *_value_cell(inside)))
    measured = [[cell[3][at] for cell in map_cells if not cell[2]] for at in (0, 1)]
    data = {
        "columns": ["no layer" if layer is None else str(layer) for layer in columns],
        "rows": groups,
        "across": "layer",
        "measures": [
            {"title": "Largest absolute value", "kind": "number", **shades(measured[0], "{:.3g}", 1)},
            {"title": "RMS", "kind": "number", **shades(measured[1], "{:.3g}", 1)},
        ],
        "states": {"none": "no finite value"},
        "cells": map_cells,
    }
    text = (
        "NaN and infinite values are counted and left out of the other numbers; quantized tensors are decoded. A "
        "channel is a position along the last dim; it stands out where its largest value is more than six times that "
        "of the median channel."
    )
    if values.unmeasured:
        text += f" Not measured: {plural(len(values.unmeasured), 'tensor')} of types without numbers of whole bytes."
    label = f"Map of the largest values of {plural(len(values.tensors), 'tensor')} by layer; a table has their numbers."
    yield Section("values", "Values", text, Figure("heat", label, data), tuple(_value_tables(values.tensors)))


def _value_cell(inside: Sequence[TensorValues]) -> tuple[str, tuple[float, float], tuple[str, ...]]:
    """Return (state, (largest absolute value, RMS), lines of text) for a cell of the map of values."""
    finite = [(each, each.elements - each.nans - each.infinite) for each in inside]
    count = sum(number for _, number in finite)
    odd = sum(each.nans + each.infinite for each in inside)
    words = [plural(len(inside), "tensor"), *([f"{odd:,} NaN or infinite"] if odd else [])]
    if not count:
        return "none", (0.0, 0.0), tuple(words)
    squares = sum(each.rms**2 * number for each, number in finite if number)
    return "", (max(each.absmax for each, number in finite if number), math.sqrt(squares / count)), tuple(words)


def _value_tables(tensors: Mapping[str, TensorValues]) -> Iterator[Table]:
    numbers = tuple(Column(title, "number") for title in ("min", "max", "mean", "RMS"))
    counts = tuple(Column(title, "count") for title in ("elements", "zeros", "NaN", "infinite"))
    rows = [
        (
            name, each.least, each.largest, each.mean, each.rms, each.elements, each.zeros, each.nans, each.infinite,
            len(each.outliers),
        )
        for name, each in tensors.items()
    ]  # fmt: skip
    # tensors with NaN or infinite values first, then the tensors with the largest values
    rows.sort(key=lambda row: (-(row[7] + row[8]), -max(-row[1], row[2]) if row[1] == row[1] else 0.0))
    columns = (Column("name", "name"), *numbers, *counts, Column("channels that stand out", "count"))
    yield limit_rows("tensor-values", "Values of each tensor", columns, rows)
    standing = [(name, each) for name, each in tensors.items() if each.outliers]
    standing.sort(key=lambda item: -item[1].outlier_ratio)
    channels = [
        (
            name,
            each.channels,
            len(each.outliers),
            each.outlier_ratio,
            ", ".join(map(str, each.outliers[:_SHOWN])),
        )
        for name, each in standing
    ]
    heads = (
        Column("name", "name"), Column("channels", "count"), Column("stand out", "count"),
        Column("times the median", "number"), Column("which, the largest first"),
    )  # fmt: skip
    yield limit_rows("channels", "Channels that stand out", heads, channels, 3)


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return shortened(text, _LONGEST_VALUE)
