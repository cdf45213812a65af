"""The tensors of a checkpoint on few rows, from which a figure knows each of them.

A row stands for every combination of its indices, as in folded names, and its tensors are alike: 70,000 of them are
some twenty rows, and the picture of their bytes is drawn from these, without a list of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from transaxle.axes.layout.bind import WEIGHT
from transaxle.axes.layout.solve import fill
from transaxle.encodings.encoding import Encoded, Role
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.engine.fold import Indices, Position, fold, products
from transaxle.errors import TransaxleError

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
