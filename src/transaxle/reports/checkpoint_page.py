"""The page of a checkpoint: where its bytes are, its layout in the notation, and what is unusual about it.

The tensors of a checkpoint on few rows, from which a figure knows each of them.

A row stands for every combination of its indices, as in folded names, and its tensors are alike: 70,000 of them are
some twenty rows, and the picture of their bytes is drawn from these, without a list of all.

What somebody who looks at a checkpoint should look at first.
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
from transaxle.encodings.encoding import Encoded, Role
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.checkpoint_facts import JsonFacts, checkpoint_facts
from transaxle.engine.distance import place_of, places
from transaxle.engine.moves import axes_of
from transaxle.engine.values import CheckpointValues, TensorValues
from transaxle.engine.wording import Indices, Position, fold, parameters, plural, products, ranges, size
from transaxle.errors import TransaxleError, shortened
from transaxle.formats.catalog import NUMBERS
from transaxle.reports.html_page import MOST_ROWS, Column, Figure, Page, Section, Table, capped, shades

Kind = Literal["table", "ignored", "unknown"]


@dataclass(frozen=True, slots=True)
class RowKey:
    """What the tensors of a row have in common."""

    kind: Kind
    """Whether a line of the table reads them, the table lists them as none of the model, or it does not know them."""
    rule: str
    """The line as the table writes it; for other names the name, with `*` for its indices."""
    component: str
    """Logical tensors; of other names the rule."""
    slot: str
    """Name of the optimizer's state; empty for weights."""
    role: str
    """Which buffer of an encoded tensor; empty for plain ones."""
    encoding: str
    """Its encoding; empty for plain tensors."""
    axes: tuple[str, ...]
    """Axes in the names; empty texts where no table names them."""
    dtype: str
    """Safetensors code."""
    shape: tuple[int, ...]
    """Logical elements along each dim."""


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """Tensors that differ in their indices only."""

    key: RowKey
    """What they have in common."""
    sets: Indices
    """The indices along each axis; the row has every combination."""
    count: int
    """How many they are."""
    bytes: int
    """Bytes of all of them."""
    example: str
    """Stored name of the first."""
    misfit: str = ""
    """Why their shape is not the one that the table says for the sizes of the config; empty if it is."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a table says that a stored tensor belongs."""

    number: int
    """Of the line, in table order."""
    rule: str
    component: str
    slot: str
    axes: tuple[str, ...]
    index: Position
    encoded: Encoded | None
    role: Role | None


def layout_rows(checkpoint: Checkpoint) -> list[LayoutRow]:
    """Return the stored tensors of a checkpoint: those of the table in its order, then all others.

    Args:
        checkpoint: as it is stored.
    """
    places = _places(checkpoint) if checkpoint.family is not None else {}
    groups: dict[tuple[int, RowKey], dict[Position, str]] = defaultdict(dict)
    others: list[str] = []
    for name, tensor in checkpoint.items():
        place = places.get(name)
        if place is None:
            others.append(name)
            continue
        encoding = "" if place.encoded is None else place.encoded.encoding.name
        role = "" if place.role is None else place.role.value
        common = place.rule, place.component, place.slot, role, encoding, place.axes
        groups[place.number, RowKey("table", *common, tensor.dtype, tensor.shape)][place.index] = name
    rows = [
        _row(checkpoint, key, sets, names_by_index[_first(sets)], _misfit(checkpoint, number, key, _first(sets)))
        for (number, key), names_by_index in sorted(groups.items(), key=lambda item: item[0][0])
        for sets in products(names_by_index)
    ]
    return [*rows, *_other_rows(checkpoint, others)]


def _first(sets: Indices) -> Position:
    return tuple(indices[0] for indices in sets)


def _misfit(checkpoint: Checkpoint, line: int, key: RowKey, index: Position) -> str:
    """Return what a conversion would refuse in the shape of plain weights, for the first one of a row."""
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
    """Return where the table puts each stored tensor that it reads."""
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


def _parts(group: Encoded | None) -> Iterator[tuple[Role, str]]:
    yield from () if group is None else group.parts.items()


def _other_rows(checkpoint: Checkpoint, names: list[str]) -> Iterator[LayoutRow]:
    """Yield rows of the tensors that no line reads; their indices are the numbers in their names."""
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


_LOOKED_FOR = (
    "Looked for: names outside the table, scales that do not fit, shapes that do not fit the config, files that "
    "changed since they were written, files more than twice as large as usual, tensors that differ in type or shape "
    "from the others of their rule, missing combinations of indices, and tensors without elements."
)
_NO_VALUES = "Values were not read; --values (values=True) looks for NaN and infinite ones."
_MOST = 30
"""Notices that are shown."""
_LARGER = 2
"""How many times as large as the median an unusual file is."""
_FEW = 3
"""Files of which none is unusual."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing to look at."""

    title: str
    """What it is, in a few words."""
    text: str
    """What was seen."""


def looked_for(values: CheckpointValues | None) -> str:
    """Return what would be unusual, and was looked for."""
    return f"{_LOOKED_FOR} {_NO_VALUES if values is None else 'And NaN and infinite values.'}"


def unusual(
    facts: JsonFacts,
    rows: Sequence[LayoutRow],
    tensor_bytes: Mapping[str, int],
    values: CheckpointValues | None = None,
) -> list[Notice]:
    """Return what is unusual about a checkpoint; values that are no numbers come first.

    Args:
        facts: of the checkpoint.
        rows: its tensors.
        tensor_bytes: file -> bytes of tensors in it.
        values: of its tensors, where they were measured.
    """
    of_values = [] if values is None else _of_values(values)
    notices = [
        *of_values,
        *_of_names(facts, rows),
        *_of_shapes(rows),
        *_of_files(facts, tensor_bytes),
        *_of_rules(rows),
    ]
    more = len(notices) - _MOST
    return [*notices[:_MOST], *([Notice("And more", f"{plural(more, 'notice')} like these.")] if more > 0 else [])]


def _of_values(values: CheckpointValues) -> Iterator[Notice]:
    for title, counts in (
        ("NaN values", {name: each.nans for name, each in values.tensors.items()}),
        ("Infinite values", {name: each.infinite for name, each in values.tensors.items()}),
    ):
        counts = {name: count for name, count in counts.items() if count}
        if counts:
            most = max(counts, key=counts.__getitem__)
            of_most = f"{counts[most]:,} of {values.tensors[most].elements:,}"
            text = f"{plural(sum(counts.values()), 'element')} of {plural(len(counts), 'tensor')}, the most"
            yield Notice(title, f"{text} in {most}: {of_most}.")


def _of_names(facts: JsonFacts, rows: Sequence[LayoutRow]) -> Iterator[Notice]:
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
        more = f" And {len(facts['misfits']) - 1:,} more." if len(facts["misfits"]) > 1 else ""
        place = first["tensor"] or first["file"] or ""
        yield Notice("Scales that do not fit", f"{place} {first['message']}{more}".strip())


def _of_shapes(rows: Sequence[LayoutRow]) -> Iterator[Notice]:
    misfits = [row for row in rows if row.misfit]
    if misfits:
        amount, first = plural(sum(row.count for row in misfits), "tensor"), misfits[0]
        text = f"{amount}, such as {first.example}, {first.misfit}. A conversion refuses them."
        yield Notice("Shapes that do not fit the config", text)


def _of_files(facts: JsonFacts, tensor_bytes: Mapping[str, int]) -> Iterator[Notice]:
    problems = facts["manifest"]["problems"]
    if problems:
        file = problems[0]["file"] or ""
        yield Notice("The manifest no longer matches", f"{file} {problems[0]['message']}".strip())
    usual = median(tensor_bytes.values()) if len(tensor_bytes) > _FEW else 0
    for file, count in tensor_bytes.items():
        if usual and count > _LARGER * usual:
            text = f"{file} has {size(count)} of tensors; half of the files have {size(int(usual))} or less."
            yield Notice("A file much larger than the others", text)


def _of_rules(rows: Sequence[LayoutRow]) -> Iterator[Notice]:
    by_rule: defaultdict[tuple[str, str, str], list[LayoutRow]] = defaultdict(list)
    for row in rows:
        if row.key.kind == "table":
            by_rule[row.key.rule, row.key.slot, row.key.role].append(row)
    for (rule, _, _), alike in by_rule.items():
        name = f"{alike[0].key.component} ({rule})"
        yield from _different("types", name, [(row.key.dtype, row) for row in alike])
        yield from _different("shapes", name, [(str(list(row.key.shape)), row) for row in alike])
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


def _different(what: str, name: str, valued: Sequence[tuple[str, LayoutRow]]) -> Iterator[Notice]:
    """Yield a notice if the rows of a rule have different values: the usual first, an example of the rarest."""
    count: Counter[str] = Counter()
    for value, row in valued:
        count[value] += row.count
    if len(count) > 1:
        listed = ", ".join(f"{number:,} of {value}" for value, number in count.most_common(_FEW))
        rarest = count.most_common()[-1][0]
        example = next(row.example for value, row in valued if value == rarest)
        yield Notice(f"Different {what} in one rule", f"{name}: {listed}; {example} is of {rarest}.")


_LONGEST_VALUE = 2000
"""Characters of a value of the config or of metadata."""
_FACTS = (
    "format", "family", "dialect", "prefix", "names", "read", "tensors", "parameters", "bytes", "dtypes", "encodings",
    "axes",
)  # fmt: skip
"""What programs find in the page under the keys of `transaxle info --json`."""
_MOST_GROUPS, _MOST_LAYERS, _SHOWN = 60, 256, 12
"""Rows and columns of the map of values, and channels that are named of a tensor."""
_ONE_OF = {"layers": "layer", "experts": "expert"}
"""What an axis counts -> what one of them is called; others go by their letter."""
_AMOUNTS = (Column("tensors", "count"), Column("bytes", "bytes"), Column("share", "share"))


def checkpoint_page(opened: Checkpoint, values: CheckpointValues | None = None) -> Page:
    """Return the page of a checkpoint; only headers are read.

    Args:
        opened: in any view; the page shows it as it is stored.
        values: what values it has, where they were measured.

    Raises:
        TransaxleError: the user named the family or the dialect, and the names are not of it.
    """
    checkpoint = opened.stored
    facts, rows = checkpoint_facts(checkpoint), layout_rows(checkpoint)
    in_files = _in_files(checkpoint)
    tensor_bytes = {file: count for file, (_, count) in in_files.items()}
    sections = (
        _bytes(checkpoint, facts, rows),
        *(() if values is None else _values(values)),
        _layout(checkpoint, facts, rows),
        _formats(facts),
        _files(facts, in_files),
        *_beside(checkpoint, facts),
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
        notices=tuple((each.title, each.text) for each in unusual(facts, rows, tensor_bytes, values)),
        quiet=looked_for(values),
        sections=sections,
        facts={key: facts[key] for key in _FACTS},
    )


def _bytes(checkpoint: Checkpoint, facts: JsonFacts, rows: Sequence[LayoutRow]) -> Section:
    """Return the treemap: each of its leaves is a tensor, and as large as that is."""
    words = {axis: _ONE_OF.get(meaning, axis) for axis, meaning in _meanings(checkpoint).items()}
    largest = sorted(rows, key=lambda row: -row.bytes)[:MOST_ROWS]
    shown = {id(row) for row in largest}
    kept, rest = [row for row in rows if id(row) in shown], [row for row in rows if id(row) not in shown]
    groups: list[dict[str, Any]] = [
        {
            "component": row.key.component, "rule": row.key.rule, "slot": row.key.slot, "role": row.key.role,
            "axes": [words.get(axis, axis) for axis in row.key.axes],
            "sets": [_runs(indices) for indices in row.sets],
            "dtype": row.key.dtype, "shape": row.key.shape, "each": row.bytes // row.count, "example": row.example,
        }
        for row in kept
    ]  # fmt: skip
    data = {
        "groups": groups,
        "rest": {"count": sum(row.count for row in rest), "bytes": sum(row.bytes for row in rest)},
        "bytes": facts["bytes"],
    }
    label = (
        f"Treemap of {size(facts['bytes'])} in {plural(facts['tensors'], 'tensor')}; the table below has its numbers."
    )
    text = "The larger an area, the more bytes. Choose one to look inside; the search also covers the tables below."
    return Section("bytes", "Where the bytes are", text, Figure("treemap", label, data))


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Return sorted indices as first and last of each run."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], index
        else:
            runs.append((index, index))
    return runs


def _layout(checkpoint: Checkpoint, facts: JsonFacts, rows: Sequence[LayoutRow]) -> Section:
    columns = (
        Column("tensor"), Column("rule", "name"), Column("indices"), Column("type"), Column("shape"), *_AMOUNTS,
        Column("example", "name"),
    )  # fmt: skip
    cells = [
        (
            _tensor(row), row.key.rule, _indices(row), row.key.dtype, " x ".join(map(str, row.key.shape)) or "1",
            row.count, row.bytes, row.bytes, row.example,
        )
        for row in rows
    ]  # fmt: skip
    text = "A rule says under which names a tensor is stored, and which axes its dims have, outermost first."
    if facts["family"] is None:
        text = "No table reads these names: a row is a name, with * for its numbers."
    return Section(
        "layout",
        "Layout",
        text,
        None,
        (capped("layout", "Tensors by rule", columns, cells, 6), *_axes(checkpoint, facts)),
    )


def _tensor(row: LayoutRow) -> str:
    key = row.key
    if key.kind != "table":
        return "outside the table" if key.kind == "unknown" else "none of the model"
    words = [f"({key.role}, {key.encoding})" if key.role else "", f"· {key.slot}" if key.slot else ""]
    return " ".join(filter(None, [key.component, *words]))


def _indices(row: LayoutRow) -> str:
    texts = [ranges(indices).strip("[]") for indices in row.sets]
    return "  ".join(f"{axis} {text}".strip() for axis, text in zip(row.key.axes, texts, strict=True))


def _meanings(checkpoint: Checkpoint) -> dict[str, str]:
    """Return what the axes of the family count."""
    if checkpoint.family is None:
        return {}
    return {each.axis: each.meaning for each in axes_of(checkpoint.recognised.family)}


def _axes(checkpoint: Checkpoint, facts: JsonFacts) -> Iterator[Table]:
    if facts["axes"]:
        meanings = _meanings(checkpoint)
        rows = [(axis, count, meanings.get(axis, "")) for axis, count in facts["axes"].items()]
        yield Table("axes", "Axes", (Column("axis", "name"), Column("size", "count"), Column("what it counts")), rows)


def _formats(facts: JsonFacts) -> Section:
    dtypes = [(code, each["tensors"], each["bytes"], each["bytes"]) for code, each in facts["dtypes"].items()]
    tables = [capped("dtypes", "Types", (Column("type"), *_AMOUNTS), dtypes, 2)]
    encodings = [(each["encoding"], each["convention"], each["tensors"]) for each in facts["encodings"]]
    if encodings:
        columns = Column("encoding"), Column("convention"), Column("tensors", "count")
        tables.append(Table("encodings", "Encodings", columns, encodings))
    return Section("formats", "Types and encodings", tables=tuple(tables))


def _in_files(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """Return file -> number of tensors in it, and their bytes; a tensor in several files counts in each."""
    count: Counter[str] = Counter()
    amount: Counter[str] = Counter()
    for entry in checkpoint.container.entries.values():
        elements = prod(entry.shape)
        extents = [extent for extent in entry.extents if extent.file != NUMBERS]  # those are in a pickle
        count.update({extent.file for extent in extents})
        for extent in extents:
            amount[extent.file] += entry.nbytes * prod(extent.shape) // elements if elements else 0
    return {file: (count[file], amount[file]) for file in sorted(count, key=natural)}


def _files(facts: JsonFacts, in_files: Mapping[str, tuple[int, int]]) -> Section:
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
    table = capped("files", "Files", (*columns, Column("share", "share")), rows, 3)
    return Section("files", "Files", manifest, None, (table,))


def _beside(checkpoint: Checkpoint, facts: JsonFacts) -> Iterator[Section]:
    """Yield the sections that not every checkpoint has."""
    ties = [tuple(tie.split(" = ", 1)) for tie in facts["tied"]]
    ties += [(alias, original) for alias, original in facts["aliases"].items()]
    if ties:
        columns = Column("tensor", "name"), Column("is the same as", "name")
        yield Section("ties", "Ties", tables=(Table("ties", "Tied tensors", columns, ties),))
    others = [
        (what, row.name, row.count)
        for what, names in (
            ("tensor outside the table", facts["unknown"]),
            ("not part of the model", facts["ignored"]),
            ("travels with the model", facts["carried"]),
        )
        for row in fold(sorted(names, key=natural))
    ]
    if others:
        kinds = Column("what it is"), Column("name", "name"), Column("names", "count")
        table = capped("others", "Other names", kinds, others)
        yield Section("others", "Other names and files", tables=(table,))
    for label, title, values in (
        ("config", "Config", checkpoint.config),
        ("metadata", "Metadata", checkpoint.container.metadata),
    ):
        if values:
            heads = Column("key", "name"), Column("value", "name")
            cells = [(str(key), _value(value)) for key, value in values.items()]
            yield Section(label, title, tables=(capped(label, title, heads, cells),))


def _values(found: CheckpointValues) -> Iterator[Section]:
    """Yield the values: a map of their sizes by tensor and layer, those of each tensor, and channels that stand out."""
    where = places(found.seen)
    cells: dict[tuple[str, int | None], list[TensorValues]] = {}
    for name, each in found.tensors.items():
        place = where.get(name) or place_of(name)
        cells.setdefault((place.group, place.layer), []).append(each)
    layers: list[int | None] = [*sorted({layer for _, layer in cells if layer is not None})]
    columns = [*([None] if any(layer is None for _, layer in cells) else []), *layers][:_MOST_LAYERS]
    groups = list(dict.fromkeys(group for group, _ in cells))[:_MOST_GROUPS]
    drawn: list[Any] = []
    for (group, layer), inside in cells.items():
        if group in groups and layer in columns:
            drawn.append((columns.index(layer), groups.index(group), *_value_cell(inside)))
    measured = [[each[3][at] for each in drawn if not each[2]] for at in (0, 1)]
    data = {
        "columns": ["no layer" if layer is None else str(layer) for layer in columns],
        "rows": groups,
        "across": "layer",
        "measures": [
            {"title": "Largest absolute value", "kind": "number", **shades(measured[0], "{:.3g}", 1)},
            {"title": "RMS", "kind": "number", **shades(measured[1], "{:.3g}", 1)},
        ],
        "states": {"none": "no finite value"},
        "cells": drawn,
    }
    text = (
        "NaN and infinite values are counted and left out of the other numbers; quantized tensors are decoded. A "
        "channel is a position along the last dim; it stands out where its largest value is more than six times that "
        "of the median channel."
    )
    if found.unmeasured:
        text += f" Not measured: {plural(len(found.unmeasured), 'tensor')} of types without numbers of whole bytes."
    label = f"Map of the largest values of {plural(len(found.tensors), 'tensor')} by layer; a table has their numbers."
    yield Section("values", "Values", text, Figure("heat", label, data), tuple(_value_tables(found.tensors)))


def _value_cell(inside: Sequence[TensorValues]) -> tuple[str, tuple[float, float], tuple[str, ...]]:
    """Return the state, the measures and the words of a cell."""
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
            len(each.outstanding),
        )
        for name, each in tensors.items()
    ]  # fmt: skip
    # Those with NaN, then with the largest values.
    rows.sort(key=lambda row: (-(row[7] + row[8]), -max(-row[1], row[2]) if row[1] == row[1] else 0.0))
    columns = (Column("name", "name"), *numbers, *counts, Column("channels that stand out", "count"))
    yield capped("tensor-values", "Values of each tensor", columns, rows)
    standing = [(name, each) for name, each in tensors.items() if each.outstanding]
    standing.sort(key=lambda item: -item[1].times)
    channels = [
        (
            name,
            each.channels,
            len(each.outstanding),
            each.times,
            ", ".join(map(str, each.outstanding[:_SHOWN])),
        )
        for name, each in standing
    ]
    heads = (
        Column("name", "name"), Column("channels", "count"), Column("stand out", "count"),
        Column("times the median", "number"), Column("which, the largest first"),
    )  # fmt: skip
    yield capped("channels", "Channels that stand out", heads, channels, 3)


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return shortened(text, _LONGEST_VALUE)
