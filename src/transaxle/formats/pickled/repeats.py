"""Runs: objects that follow one another by the thousand, alike but for numbers and texts, read as columns of these.

Of records that are the same to the last byte, but for numbers and references to texts, the machine does the first ones
step by step. The others would take the same steps, so what they build is what the last one built, with other numbers
and texts. Whatever is not certain to be so (a step that remembers something, a call that looks at its numbers, a
negative number) is left to the machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from transaxle.formats.pickled.allowed_globals.builders import Caller, size
from transaxle.formats.pickled.descriptors import DType, Global, Key, Object
from transaxle.formats.pickled.fault import PickleFault
from transaxle.formats.pickled.machine import Machine
from transaxle.formats.pickled.steps import perform

_FEWEST = 8
"""Records that are worth it."""
_MOST_COLUMNS, _LONGEST = 200, 512
"""Caps on the numbers and the bytes of a record."""
_MOST_ALTERNATING = 2
"""Records of so many forms may take turns, as those of two halves do."""
_LONGEST_WAIT = 64
_BLOCK = 1 << 7
_NEW = 0x81
_PLAIN = frozenset(b")(t\x85\x86\x87R\x81}]usaebN\x88\x89")
"""Steps without an operand."""
_NUMBERS = {ord("K"): 1, ord("M"): 2, ord("J"): 4}
"""Step -> bytes of its number."""
_GETS = {ord("h"): 1, ord("j"): 4}
_TEXTS = {ord("X"): 4, 0x8C: 1}
_SIGNED, _LONG = ord("J"), 0x8A
_CONSTANT = frozenset({str, bool, type(None), Global, DType})


@dataclass(frozen=True, slots=True)
class Text:
    """In a template, the number of a column of texts."""

    column: int


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What several records built."""

    templates: tuple[Any, ...]
    """What each of them built, with the numbers of columns for its integers, and `Text` for texts that differ."""
    columns: NDArray[np.int64]
    """The integers, one row a record; none is negative."""
    texts: Mapping[int, Sequence[str]]
    """Column -> its texts."""

    def records(self) -> Iterator[tuple[Any, ...]]:
        """Yield what each record built."""
        for number, row in enumerate(self.columns.tolist()):
            for column, texts in self.texts.items():
                row[column] = texts[number]
            yield tuple(_filled(template, row) for template in self.templates)

    def rows(self, columns: Sequence[int]) -> list[tuple[int, ...]]:
        """Return some columns, row by row."""
        return list(map(tuple, self.columns[:, list(columns)].tolist()))


class _Place(NamedTuple):
    """The state of the machine when it began to build an object."""

    begin: int
    depth: int
    height: int
    left: int


class _History:
    """Where objects of one class began, and how long to wait before the next attempt."""

    def __init__(self) -> None:
        self.places: list[_Place] = []
        self.wait = self.waited = 0

    def attempt(self, succeeded: bool) -> None:
        self.waited = 0
        self.wait = 0 if succeeded else min(2 * self.wait + 1, _LONGEST_WAIT)


def elements(function: Global, args: tuple[Any, ...], machine: Caller) -> Object:
    """Build an element of a list; a run of them before it becomes one element, a `Run`."""
    return _built(function, args, machine, keys=False)


def keys(function: Global, args: tuple[Any, ...], machine: Caller) -> Object:
    """Build a key of a dict; a run of items before it becomes one item, `Key(Run)` and the same `Run`."""
    return _built(function, args, machine, keys=True)


def _built(function: Global, args: tuple[Any, ...], machine: Caller, *, keys: bool) -> Object:
    assert isinstance(machine, Machine)
    is_new = machine.data[machine.begin] == _NEW
    if is_new and not args:
        history = machine.histories.setdefault(function, _History())
        place = _Place(machine.begin, len(machine.outer), len(machine.stack), machine.left)
        run = _run_at(function, machine, history, place)
        if run is not None:
            machine.stack[-1:-1] = [Key(run), run] if keys else [run]
            history.places.clear()
        else:
            history.places.append(place)
            del history.places[:-_MOST_ALTERNATING]
    return Object(function, args, new=is_new)


def _run_at(function: Global, machine: Machine, history: _History, place: _Place) -> Run | None:
    """Return the run that begins here, and let the machine go on after it; None if there is none."""
    data, here = machine.data, place.begin
    for before in reversed(history.places):
        length = here - before.begin
        ahead = data[here + length : here + length + 3]
        if before.depth != place.depth or length > _LONGEST or ahead != data[here : here + 3]:
            continue
        if history.waited < history.wait:
            history.waited += 1
            return None
        record = data[before.begin : here]
        known: dict[int, Any] = {}
        operands = _operands(record, data[here : here + length], machine, known)
        count = _alike(data, here, record, operands) if operands else 0
        if count < _FEWEST:
            continue
        columns = _columns(data, here, length, count, operands)
        texts = _texts(machine, columns, operands)
        templates = _templates(function, machine.within(record, known), operands)
        if texts is None or templates is None or len(templates) != place.height - before.height:
            continue
        machine.charge(count * (before.left - place.left))
        machine.begin = here + count * length
        machine.at = machine.begin + 1
        history.attempt(succeeded=True)
        return Run(templates, columns, texts)
    if len(history.places) == _MOST_ALTERNATING:
        history.attempt(succeeded=False)
    return None


class _Operand(NamedTuple):
    """A number in a record, or a reference to a text."""

    at: int
    """Its first byte."""
    width: int
    """Its bytes."""
    is_signed: bool = False
    is_text: bool = False


def _operands(record: bytes, next_record: bytes, machine: Machine, known: dict[int, Any]) -> list[_Operand]:
    """Return what may differ from record to record; nothing if a step might do something else in another record.

    Args:
        record: a record that was done step by step.
        next_record: the next one, which tells the references that differ.
        machine: what has been built so far.
        known: receives what the record refers to otherwise, by reference.
    """
    found: list[_Operand] = []
    at = 0
    while at < len(record):
        code = record[at]
        at += 1
        if code in _NUMBERS:
            found.append(_Operand(at, _NUMBERS[code], is_signed=code == _SIGNED))
            at += _NUMBERS[code]
        elif code == _LONG and at < len(record) and 0 < record[at] <= 8:
            found.append(_Operand(at + 1, record[at], is_signed=True))
            at += 1 + record[at]
        elif code in _GETS:
            width = _GETS[code]
            reference = int.from_bytes(record[at : at + width], "little")
            value = machine.memo.get(reference, 0)
            if type(value) is str and record[at : at + width] != next_record[at : at + width]:
                found.append(_Operand(at, width, is_text=True))
            elif _is_constant(value, machine):
                known[reference] = value
            else:
                return []
            at += width
        elif code in _TEXTS:
            at += _TEXTS[code] + int.from_bytes(record[at : at + _TEXTS[code]], "little")
        elif code not in _PLAIN:
            return []
    return found if at == len(record) and len(found) <= _MOST_COLUMNS else []


def _is_constant(value: object, machine: Machine) -> bool:
    """Tell whether something that was built before is no number, and takes any number as an argument."""
    if type(value) is not Global:
        return type(value) in _CONSTANT
    return machine.is_inert(value, (elements, keys, size))


def _alike(data: bytes, here: int, record: bytes, operands: Sequence[_Operand]) -> int:
    """Return how many records from here on are this one with other numbers and texts, none of them negative."""
    length = len(record)
    expected = np.frombuffer(record, np.uint8)
    free = np.zeros(length, np.uint8)
    for at, width, is_signed, _ in operands:
        free[at : at + width] = 0xFF
        if is_signed:
            free[at + width - 1] = 0x7F
    fixed = ~free
    expected = expected & fixed
    for at, width, is_signed, _ in operands:
        if is_signed:
            expected[at + width - 1] = 0
    count, block = 0, _BLOCK
    while True:
        begin = here + count * length
        rows = min(block, (len(data) - begin) // length)
        found = np.frombuffer(data, np.uint8, rows * length, begin).reshape(rows, length)
        alike = ((found & fixed) == expected).all(axis=1)
        same = rows if alike.all() else int(alike.argmin())
        count += same
        if same < block:
            # The last one ended as this one did, but is not followed by another.
            return count if data[here + count * length : here + count * length + 1] == record[:1] else max(count - 1, 0)
        block *= 2


def _templates(function: Global, machine: Machine, operands: Sequence[_Operand]) -> tuple[Any, ...] | None:
    """Return what a record builds, with the numbers of columns in it; None if it is nothing simple.

    Args:
        function: what is called first.
        machine: for the record alone; its memo holds what the record refers to.
        operands: what becomes a column.
    """
    numbered = bytearray(machine.data)
    for column, (at, width, _, is_text) in enumerate(operands):
        number = 256**width - 1 - column if is_text else column
        numbered[at : at + width] = number.to_bytes(width, "little")
        if is_text and machine.memo.setdefault(number, Text(column)) != Text(column):
            return None
    machine.data = bytes(numbered) + b"."
    machine.stack = [function, ()]
    try:
        perform(machine)
    except PickleFault:
        return None
    *built, called, args = machine.stack if len(machine.stack) > 1 else (None, None)
    if machine.outer or machine.unsafe or called != function or args != () or not all(map(_is_simple, built)):
        return None
    return tuple(built)


def _texts(machine: Machine, columns: NDArray[np.int64], operands: Sequence[_Operand]) -> dict[int, list[str]] | None:
    """Return the texts that the columns of references refer to; None if some are no texts."""
    found: dict[int, list[str]] = {}
    for column, operand in enumerate(operands):
        if operand.is_text:
            values = [machine.memo.get(reference) for reference in columns[:, column].tolist()]
            found[column] = [value for value in values if type(value) is str]
            if len(found[column]) < len(values):
                return None
    return found


def _is_simple(value: object) -> bool:
    """Tell whether a value is filled in by `_filled`."""
    if type(value) is tuple:
        return all(map(_is_simple, value))
    if type(value) is dict:
        return all(type(key) is str for key in value) and all(map(_is_simple, value.values()))
    if type(value) is Object:
        return not (value.args or value.kwargs or value.items or value.pairs) and _is_simple(value.state)
    return type(value) in (int, Text) or type(value) in _CONSTANT


def _filled(template: Any, row: Sequence[Any]) -> Any:
    """Return a template with the numbers and texts of one record."""
    if type(template) is int:
        return row[template]
    if type(template) is Text:
        return row[template.column]
    if type(template) is tuple:
        return tuple([_filled(item, row) for item in template])
    if type(template) is dict:
        return {key: _filled(item, row) for key, item in template.items()}
    if type(template) is Object:
        return Object(template.cls, state=_filled(template.state, row), new=template.new)
    return template


def _columns(data: bytes, here: int, length: int, count: int, operands: Sequence[_Operand]) -> NDArray[np.int64]:
    rows = np.frombuffer(data, np.uint8, count * length, here).reshape(count, length)
    columns = np.zeros((count, len(operands)), "<i8")
    octets = columns.view(np.uint8).reshape(count, len(operands), 8)
    for column, (at, width, *_) in enumerate(operands):
        octets[:, column, :width] = rows[:, at : at + width]
    return columns
