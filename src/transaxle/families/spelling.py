"""Families as data: what a table says once everything is spelled out, so that it need not be read again.

A table is checked and spelled out when the index of the families is made (`docs/generate.py`). What runs later builds
the same family from names, formulas and expressions as they stand in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from transaxle.axes.notation import computed
from transaxle.axes.notation.expression import parse
from transaxle.axes.notation.family import Arithmetic, Cuttable, Dialect, Family, Line, LogicalTensor, Tie
from transaxle.axes.notation.formula import Formula
from transaxle.axes.notation.name import Name


class _Line(msgspec.Struct, array_like=True, frozen=True):
    """A line: pattern of the names, expression, condition, arithmetic, whether it is only read, or of state."""

    name: str
    expression: str
    when: str | None
    lossy: str | None
    read_only: bool | Literal["state"]


class _Dialect(msgspec.Struct, frozen=True):
    version: str | None
    ignored: tuple[str, ...]
    lines: tuple[int, ...]
    """Positions among the lines of the family: dialects may share them."""
    name: str


_Cut = tuple[str, tuple[str, ...], tuple[str, ...] | None]
"""Mesh axis, axes, and the tensors it is of."""


class _Spelled(msgspec.Struct, frozen=True, omit_defaults=True):
    """A family; its fields are those of `Family`, formulas and names as text."""

    name: str
    model_types: tuple[str, ...]
    axes: dict[str, str | None]
    tensors: dict[str, tuple[tuple[str, ...], str | None]]
    lines: tuple[_Line, ...]
    dialects: tuple[_Dialect, ...]
    named: dict[str, str] = {}
    ties: tuple[tuple[str, str, str], ...] = ()
    cuts: tuple[_Cut, ...] = ()
    other_cuts: tuple[_Cut, ...] = ()
    within: dict[str, str] = {}
    precise: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    alike: str = ""
    added: dict[str, str] = {}
    else_zeros: tuple[int, ...] = ()
    """Positions of the lines that are zeros where the source has none."""


def encode(family: Family) -> bytes:
    """Return a family as JSON."""
    lines = list(dict.fromkeys(line for dialect in family.dialects for line in dialect.lines))
    position = {line: number for number, line in enumerate(lines)}
    spelled = _Spelled(
        name=family.name,
        model_types=family.model_types,
        axes={axis: _text(formula) for axis, formula in family.axes.items()},
        tensors={name: (each.axes, _text(each.when)) for name, each in family.tensors.items()},
        lines=tuple(map(_line, lines)),
        dialects=tuple(
            _Dialect(d.version, _texts(d.ignored), tuple(position[line] for line in d.lines), d.name)
            for d in family.dialects
        ),
        named={name: formula.text for name, formula in family.named.items()},
        ties=tuple((tie.alias, tie.original, tie.when.text) for tie in family.ties),
        cuts=tuple(map(_cut, family.cuts)),
        other_cuts=tuple(map(_cut, family.other_cuts)),
        within=dict(family.within),
        precise=tuple(sorted(family.precise)),
        wrappers=family.wrappers,
        alike=family.alike,
        added={name: when.text for name, when in family.added.items()},
        else_zeros=tuple(number for number, line in enumerate(lines) if line.else_zeros),
    )
    return msgspec.json.encode(spelled)


def _line(line: Line) -> _Line:
    lossy = None if line.lossy is None else line.lossy.text
    read_only: bool | Literal["state"] = "state" if line.of_state else line.read_only
    return _Line(line.name.text, line.expression.text, _text(line.when), lossy, read_only)


def _cut(cut: Cuttable) -> _Cut:
    return cut.mesh, cut.axes, None if cut.tensors is None else tuple(sorted(cut.tensors))


def _cuttable(cut: _Cut) -> Cuttable:
    mesh, axes, of = cut
    return Cuttable(mesh, axes, None if of is None else frozenset(of))


def _text(formula: Formula | None) -> str | None:
    return None if formula is None else formula.text


def _texts(names: Iterable[Name]) -> tuple[str, ...]:
    return tuple(name.text for name in names)


def decode(data: bytes) -> Family:
    """Build the family that `encode` wrote."""
    spelled = msgspec.json.decode(data, type=_Spelled)
    named: dict[str, Formula] = {}

    def formula(text: str) -> Formula:
        return Formula(text, named)

    def condition(text: str | None) -> Formula | None:
        return None if text is None else formula(text)

    def line(number: int, each: _Line) -> Line:
        expression = parse(each.expression, checked=True)
        steps = None if each.lossy is None else computed.parse(each.lossy)
        lossy = None if each.lossy is None or steps is None else Arithmetic(each.lossy, steps)
        of_state, zeros = each.read_only == "state", number in spelled.else_zeros
        return Line(Name(each.name), expression, condition(each.when), lossy, bool(each.read_only), of_state, zeros)

    named.update({name: formula(text) for name, text in spelled.named.items()})
    lines = [line(number, each) for number, each in enumerate(spelled.lines)]
    return Family(
        name=spelled.name,
        model_types=spelled.model_types,
        axes={axis: condition(text) for axis, text in spelled.axes.items()},
        tensors={name: LogicalTensor(name, axes, condition(when)) for name, (axes, when) in spelled.tensors.items()},
        ties=tuple(Tie(alias, original, formula(when)) for alias, original, when in spelled.ties),
        cuts=tuple(map(_cuttable, spelled.cuts)),
        other_cuts=tuple(map(_cuttable, spelled.other_cuts)),
        within=spelled.within,
        named=named,
        dialects=tuple(
            Dialect(d.name, d.version, tuple(lines[at] for at in d.lines), tuple(map(Name, d.ignored)))
            for d in spelled.dialects
        ),
        wrappers=spelled.wrappers,
        alike=spelled.alike,
        precise=frozenset(spelled.precise),
        added={name: formula(text) for name, text in spelled.added.items()},
    )
