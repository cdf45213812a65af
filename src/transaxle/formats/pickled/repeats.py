"""Runs: objects that follow one another by the thousand, alike but for numbers and texts, read as columns of these.

Of records that are the same to the last byte, but for numbers, texts and references, the machine does the first ones
step by step. The others would take the same steps, so what they build is what the last one built, with other numbers
and texts; and so is what they put into the memo. Whatever is not certain to be so (a call that looks at its numbers, a
negative number, a reference to what has not been built) is left to the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from transaxle.formats.pickled.allowed_globals.builders import Caller, size
from transaxle.formats.pickled.columns import CONSTANT, Column, Remembered, Run, is_simple
from transaxle.formats.pickled.descriptors import Global, Key, Object
from transaxle.formats.pickled.fault import PickleFault
from transaxle.formats.pickled.machine import Machine, Memo
from transaxle.formats.pickled.steps import perform

_FEWEST = 8
"""Records that are worth it."""
_MOST_COLUMNS, _LONGEST = 200, 512
"""Caps on the numbers and the bytes of a record."""
_MOST_ALTERNATING = 2
"""Records of so many forms may take turns, as those of two halves do."""
_LONGEST_WAIT = 12
_BLOCK, _MOST_BYTES = 1 << 7, 1 << 16
"""Records that are compared at first, and bytes of them at most: what is compared should stay in the cache."""
_NEW = 0x81
_PLAIN = frozenset(b")(t\x85\x86\x87R\x81}]usaebN\x88\x89")
"""Steps without an operand."""
_MEMOIZE = 0x94
_NUMBERS = {ord("K"): 1, ord("M"): 2, ord("J"): 4}
"""Step -> bytes of its number."""
_GETS = {ord("h"): 1, ord("j"): 4}
_PUTS = {ord("q"): 1, ord("r"): 4}
_PUTTING = frozenset({_MEMOIZE, *_PUTS})
_COUNTED = -1
"""Stands for the next number of the memo."""
_EMPTY_TUPLE, _LONG_TEXT, _SHORT_TEXT = ord(")"), ord("X"), 0x8C
_COST = 600
"""Bytes, estimated as the steps do, that an item of a text and an object takes at most, without the text."""
_TEXTS = {ord("X"): 4, 0x8C: 1}
_BININT, _LONG = ord("J"), 0x8A
_WIDEST = 8
"""Bytes of the longest number."""
_NUMBER, _SIGNED, _TEXT, _REFERENCE = "number", "signed", "text", "reference"
_ANY, _ASCII = 0xFF, 0x7F
"""Bits of an octet that may differ."""
_PLACEHOLDER = 2**32 - 1
"""Number in the memo that stands for the first column of texts or references; others precede it."""


class _Place(NamedTuple):
    """The state of the machine when it began to build an object."""

    begin: int
    depth: int
    height: int
    left: int


class _Operand(NamedTuple):
    """What may differ from record to record: a number, a text, or a reference."""

    step: int
    """First byte of the step."""
    at: int
    """Its own first byte."""
    width: int
    """Its bytes."""
    kind: str
    """One of the four below; signed ones may not be negative."""


class _Built(NamedTuple):
    """What a record builds, as templates."""

    values: tuple[Any, ...]
    kept: tuple[Any, ...]
    """What it puts into the memo."""


class _History:
    """Where objects of one class began, and how long to wait before the next attempt."""

    def __init__(self) -> None:
        self.places: list[_Place] = []
        self.wait = self.waited = 0
        self.built: dict[tuple[Any, ...], _Built | None] = {}
        """What records of one form build."""

    def attempt(self, succeeded: bool) -> None:
        self.waited = 0
        self.wait = 0 if succeeded else min(2 * self.wait + 1, _LONGEST_WAIT)


def elements(function: Global, args: tuple[Any, ...], machine: Caller) -> Object:
    """Build an element of a list; a run of them before it becomes one element, a `Run`."""
    return _built(function, args, machine, _as_element, list)


def keys(function: Global, args: tuple[Any, ...], machine: Caller) -> Object:
    """Build a key of a dict; a run of items before it becomes one item, `Key(Run)` and the same `Run`."""
    return _built(function, args, machine, _as_item, dict)


def bare(function: Global, args: tuple[Any, ...], machine: Caller) -> Object:
    """Build an object without attributes, the value in a dict; in the items that follow, those like it are it too.

    A later step that changes one of them would change all: `machine.shared` tells afterwards whether one did.
    """
    assert isinstance(machine, Machine)
    is_new = machine.data[machine.begin] == _NEW
    made = Object(function, args, new=is_new)
    is_value = is_new and not args and machine.finds_runs and _is_part(machine, dict, of_value=True)
    if is_value and _take_alike(function, machine, made):
        machine.has_runs = True
        machine.shared.append(made)
    return made


def _take_alike(function: Global, machine: Machine, made: Object) -> bool:
    """Do the steps of the items that follow an object, as long as these are a text and an object like it.

    Returns:
        Whether there were any.
    """
    data, memo, stack = machine.data, machine.memo, machine.stack
    called = _call_before(data, machine.begin, memo, function)
    if called is None:
        return False
    tail, of_class = called
    width, last = len(tail), min(machine.limit, len(data) - _LONGEST)
    first = at = machine.at
    left = machine.left
    while at < last:
        if not memo.is_numbered and (counted := _counted_keys(data, at, last, tail, left)):  # the usual case
            keys, at, left = counted
            values = [each for key in keys for each in (made, key)]
            memo.update(enumerate(values, memo.end))
            stack[-1:] = (*values, function)
            machine.at, machine.begin, machine.left = at, at - 1, left
            continue
        of_object, after = _put_at(data, at) if data[at] in _PUTTING else (None, at)
        code = data[after]
        if code == _SHORT_TEXT:
            begin, length = after + 2, data[after + 1]
        elif code == _LONG_TEXT:
            begin, length = after + 5, int.from_bytes(data[after + 1 : after + 5], "little")
        else:
            break
        left -= _COST + length
        end = begin + length
        if end >= last or left < 0:
            break
        text = data[begin:end]
        of_text, end = _put_at(data, end)
        if data[end : end + width] != tail or not text.isascii():
            break
        key = text.decode("ascii")
        kept = ((made, of_object), (key, of_text)) if of_object is not None else ((key, of_text),)
        if not _remembered(memo, kept, of_class):
            break
        stack[-1] = made
        stack += (key, function)
        at = machine.at = end + width
        machine.begin, machine.left = at - 1, left
    return machine.at > first


def _counted_keys(data: bytes, at: int, last: int, tail: bytes, left: int) -> tuple[list[str], int, int] | None:
    """Return the short texts from here on that follow an object and are followed by one like it, all of which the memo
    counts; where they end, and what is left to spend then. None if there are none.
    """
    keys: list[str] = []
    begins, ends = bytes([_MEMOIZE, _SHORT_TEXT]), bytes([_MEMOIZE]) + tail
    start, width = len(begins) + 1, len(ends)
    while at < last and data.startswith(begins, at):
        begin = at + start
        end = begin + data[begin - 1]
        left_then = left - _COST - (end - begin)
        text = data[begin:end]
        if end >= last or left_then < 0 or not data.startswith(ends, end) or not text.isascii():
            break
        keys.append(text.decode("ascii"))
        at, left = end + width, left_then
    return (keys, at, left) if keys else None


def _remembered(memo: Memo, kept: Sequence[tuple[object, int | None]], of_class: int) -> bool:
    """Put values into the memo; or none of them, where a step would put something else there, or in place of the class.

    Args:
        memo: what has been built so far.
        kept: values with their numbers.
        of_class: number of the class.
    """
    for _, number in kept:
        if number is not None and (memo.is_numbered if number == _COUNTED else memo.absent or number == of_class):
            return False
    if len(kept) > 1 and len({number == _COUNTED for _, number in kept if number is not None}) > 1:
        return False
    for value, number in kept:
        if number is not None:
            memo[memo.end if number == _COUNTED else number] = value
            memo.is_numbered = number != _COUNTED
    return True


def _call_before(data: bytes, here: int, memo: Memo, function: Global) -> tuple[bytes, int] | None:
    """Return the steps that ended here, if they fetched a class from the memo and made an object of it; and its number
    there.
    """
    for get, width in _GETS.items():
        begin = here - width - 2
        if begin >= 0 and data[begin] == get and data[here - 1] == _EMPTY_TUPLE:
            number = int.from_bytes(data[begin + 1 : begin + 1 + width], "little")
            if memo.get(number) is function or memo.get(number) == function:
                return data[begin : here + 1], number
    return None


def _put_at(data: bytes, at: int) -> tuple[int | None, int]:
    """Return the number under which a step puts something into the memo, and where the next step is."""
    code = data[at]
    if code == _MEMOIZE:
        return _COUNTED, at + 1
    width = _PUTS.get(code)
    return (None, at) if width is None else (int.from_bytes(data[at + 1 : at + 1 + width], "little"), at + 1 + width)


def _as_element(machine: Machine, run: Run) -> None:
    machine.stack.insert(-1, run)


def _as_item(machine: Machine, run: Run) -> None:
    machine.stack[-1:-1] = [Key(run), run]


def _built(
    function: Global, args: tuple[Any, ...], machine: Caller, put: Callable[[Machine, Run], None], kind: type
) -> Object:
    assert isinstance(machine, Machine)
    is_new = machine.data[machine.begin] == _NEW
    if is_new and not args and machine.finds_runs and _is_part(machine, kind):
        history = machine.histories.get(function)
        if history is None:
            history = machine.histories[function] = _History()
        place = _Place(machine.begin, len(machine.outer), len(machine.stack), machine.left)
        run = _run_at(function, machine, history, place)
        if run is not None:
            machine.has_runs = True
            machine.loose_runs += 1
            put(machine, run)
            history.places.clear()
        else:
            history.places.append(place)
            del history.places[:-_MOST_ALTERNATING]
    return Object(function, args, new=is_new)


def _is_part(machine: Machine, kind: type, *, of_value: bool = False) -> bool:
    """Tell whether what is built now is the next element of a list, or the next key of a dict, or the value of one."""
    if not machine.outer or not machine.outer[-1] or type(machine.outer[-1][-1]) is not kind:
        return False
    return kind is list or len(machine.stack) % 2 == (0 if of_value else 1)


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
        operands = _operands(record, data[here : here + length], machine.memo, known)
        if not operands or not all(_is_harmless(value, machine) for value in known.values()):
            continue
        form = _Form(record, operands)
        columns = _columns(data, here, length, form.count(data, here), operands)
        count = _referable(columns, operands, machine.memo)
        built = _what_is_built(function, machine, history, form, known) if count >= _FEWEST else None
        if built is None or len(built.values) != place.height - before.height:
            continue
        run = _run(built, columns[:count], data, here, form, machine.memo)
        if built.kept:
            machine.memo.extend(Remembered(run, built.kept))
        machine.charge(count * (before.left - place.left))
        machine.begin = here + count * length
        machine.at = machine.begin + 1
        history.attempt(succeeded=True)
        return run
    if len(history.places) == _MOST_ALTERNATING:
        history.attempt(succeeded=False)
    return None


def _operands(record: bytes, next_record: bytes, memo: Memo, known: dict[int, Any]) -> list[_Operand]:
    """Return what may differ from record to record; nothing if a step might do something else in another record.

    Args:
        record: a record that was done step by step.
        next_record: the next one, which tells the texts and references that differ.
        memo: what has been built so far.
        known: receives what the record refers to otherwise, by reference.
    """
    found: list[_Operand] = []
    at, end = 0, len(record)
    while at < end:
        step, code = at, record[at]
        at += 1
        if code in _PLAIN:
            continue
        if code in _NUMBERS:
            width = _NUMBERS[code]
            found.append(_Operand(step, at, width, _SIGNED if code == _BININT else _NUMBER))
        elif code in _GETS:
            width = _GETS[code]
            reference = int.from_bytes(record[at : at + width], "little")
            value = memo.get(reference, memo)
            is_same = record[at : at + width] == next_record[at : at + width]
            if type(value) in CONSTANT and (is_same or type(value) is not str):
                known[reference] = value
            else:
                found.append(_Operand(step, at, width, _REFERENCE))
        elif code in _TEXTS:
            at, width = at + _TEXTS[code], int.from_bytes(record[at : at + _TEXTS[code]], "little")
            text = record[at : at + width]
            if text != next_record[at : at + width] and text.isascii():
                found.append(_Operand(step, at, width, _TEXT))
        elif code == _LONG and at < end and 0 < record[at] <= _WIDEST:
            at, width = at + 1, record[at]
            found.append(_Operand(step, at, width, _SIGNED))
        elif code == _MEMOIZE and not memo.is_numbered:
            width = 0
        else:
            return []
        at += width
    return found if at == end and len(found) <= _MOST_COLUMNS else []


def _is_harmless(value: object, machine: Machine) -> bool:
    """Tell whether a constant takes any number as an argument, if it is called."""
    return type(value) is not Global or machine.is_inert(value, (elements, keys, size))


class _Form:
    """What is the same in all records of a run.

    Args:
        record: one of them.
        operands: what may differ.
    """

    def __init__(self, record: bytes, operands: Sequence[_Operand]) -> None:
        self.record = record
        self.operands = operands
        free = np.zeros(len(record), np.uint8)
        for _, at, width, kind in operands:
            free[at : at + width] = _ASCII if kind == _TEXT else _ANY
            if kind == _SIGNED:
                free[at + width - 1] = _ASCII  # the highest bit is the sign
        self._fixed = ~free
        self._expected = np.frombuffer(record, np.uint8) & self._fixed
        for _, at, width, kind in operands:
            if kind == _SIGNED:
                self._expected[at + width - 1] = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from other forms."""
        return self._expected.tobytes(), *self.operands

    def count(self, data: bytes, here: int) -> int:
        """Return how many records from here on have this form, none of them with a negative number."""
        length = len(self.record)
        count, block = 0, _BLOCK
        while True:
            begin = here + count * length
            rows = min(block, (len(data) - begin) // length)
            found = np.frombuffer(data, np.uint8, rows * length, begin).reshape(rows, length)
            alike = (found & self._fixed) == self._expected
            same = rows if alike.all() else int(alike.all(axis=1).argmin())  # row by row takes five times as long
            count += same
            if same < block:
                # The last one ended as this one did, but is not followed by another.
                is_followed = data[here + count * length : here + count * length + 1] == self.record[:1]
                return count if is_followed else max(count - 1, 0)
            block = max(min(2 * block, _MOST_BYTES // length), _BLOCK)


def _columns(data: bytes, here: int, length: int, count: int, operands: Sequence[_Operand]) -> NDArray[np.int64]:
    rows = np.frombuffer(data, np.uint8, count * length, here).reshape(count, length)
    columns = np.zeros((count, len(operands)), "<i8")
    octets = columns.view(np.uint8).reshape(count, len(operands), 8)
    for column, (_, at, width, kind) in enumerate(operands):
        if kind != _TEXT:
            octets[:, column, :width] = rows[:, at : at + width]
    return columns


def _referable(columns: NDArray[np.int64], operands: Sequence[_Operand], memo: Memo) -> int:
    """Return how many records refer only to what there is: texts, where the pickle gives the numbers itself."""
    count = len(columns)
    for column, operand in enumerate(operands):
        if operand.kind != _REFERENCE:
            continue
        references = columns[:count, column]
        if memo.is_numbered:
            is_there = np.array([type(memo.get(each)) is str for each in references.tolist()], bool)
        else:
            is_there = references < memo.plain_end
            if not is_there.all():
                beyond = [each for each in np.unique(references[~is_there]).tolist() if each in memo]
                is_there |= np.isin(references, beyond)
        if not is_there.all():
            count = int(is_there.argmin())
    return count


def _what_is_built(
    function: Global, machine: Machine, history: _History, form: _Form, known: Mapping[int, Any]
) -> _Built | None:
    """Return what a record builds, with the numbers of columns in it; None if it is nothing simple.

    Args:
        function: what is called first.
        machine: what has been built so far.
        history: what was found before.
        form: of the record.
        known: what the record refers to that is the same in all of them.
    """
    key = form.key, *known.items()
    if key not in history.built:
        history.built[key] = _templates(function, machine, form, known)
    return history.built[key]


def _templates(function: Global, machine: Machine, form: _Form, known: Mapping[int, Any]) -> _Built | None:
    numbered: list[bytes] = []
    stands: dict[int, Any] = {}
    at = 0
    for column, operand in enumerate(form.operands):
        numbered.append(form.record[at : operand.step])
        if operand.kind in (_TEXT, _REFERENCE):
            stands[_PLACEHOLDER - column] = Column(column)
            numbered.append(b"j" + (_PLACEHOLDER - column).to_bytes(4, "little"))
        else:
            numbered.append(b"M" + column.to_bytes(2, "little"))
        at = operand.at + operand.width
    numbered.append(form.record[at:])
    inner = machine.within(b"".join((*numbered, b".")), {**known, **stands})
    inner.stack = [function, ()]
    try:
        perform(inner)
    except PickleFault:
        return None
    kept = tuple(inner.memo.values())[len(known) + len(stands) :]
    *values, called, args = inner.stack if len(inner.stack) > 1 else (None, None)
    if inner.outer or inner.unsafe or called != function or args != ():
        return None
    return _Built(tuple(values), kept) if all(map(is_simple, (*values, *kept))) else None


def _run(built: _Built, columns: NDArray[np.int64], data: bytes, here: int, form: _Form, memo: Memo) -> Run:
    """Return a run of records."""
    count, length = len(columns), len(form.record)
    rows = np.frombuffer(data, np.uint8, count * length, here).reshape(count, length)
    texts: dict[int, Any] = {}
    references = []
    for column, (_, at, width, kind) in enumerate(form.operands):
        if kind == _TEXT:
            texts[column] = rows[:, at : at + width]
        elif kind == _REFERENCE and memo.is_numbered:
            texts[column] = [memo[each] for each in columns[:, column].tolist()]
        elif kind == _REFERENCE:
            references.append(column)
    return Run(built.values, columns, texts, references, memo)


__all__ = ["Run", "bare", "elements", "keys"]
