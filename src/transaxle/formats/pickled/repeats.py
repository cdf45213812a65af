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
from transaxle.formats.pickled.columns import Column, Remembered, Run, is_simple
from transaxle.formats.pickled.descriptors import Global, Key, Object
from transaxle.formats.pickled.fault import PickleFault
from transaxle.formats.pickled.machine import Machine, Memo
from transaxle.formats.pickled.records.even import EvenForm
from transaxle.formats.pickled.records.step_operands import (
    GETS,
    MEMOIZE,
    REFERENCE,
    TEXT,
    Operand,
    Records,
    operands_of,
)
from transaxle.formats.pickled.records.uneven import UnevenForm, uneven_form
from transaxle.formats.pickled.steps import perform

_FEWEST = 8
"""Records that are worth it."""
_MANY = 64
"""So many records of one length are read as an array at once, faster than records of several lengths are."""
_LONGEST = 512
"""Cap on the bytes of a record."""
_MOST_ALTERNATING = 2
"""Records of so many forms may take turns, as those of two halves do."""
_LONGEST_WAIT = 12
_NEW = 0x81
_PUTS = {ord("q"): 1, ord("r"): 4}
_PUTTING = frozenset({MEMOIZE, *_PUTS})
_COUNTED = -1
"""Stands for the next number of the memo."""
_EMPTY_TUPLE, _LONG_TEXT, _SHORT_TEXT = ord(")"), ord("X"), 0x8C
_COST = 600
"""Bytes, estimated as the steps do, that an item of a text and an object takes at most, without the text."""
_PLACEHOLDER = 2**32 - 1
"""Number in the memo that stands for the first column of texts or references; others precede it."""


class _Place(NamedTuple):
    """The state of the machine when it began to build an object."""

    begin: int
    depth: int
    height: int
    left: int


class _Built(NamedTuple):
    """What a record builds, as templates."""

    values: tuple[Any, ...]
    kept: tuple[Any, ...]
    """What it puts into the memo."""


class _Patience:
    """How long to wait before the next attempt."""

    def __init__(self) -> None:
        self._wait = self._waited = 0

    def is_over(self) -> bool:
        """Tell whether an attempt is due; if not, one more object has been waited for."""
        if self._waited < self._wait:
            self._waited += 1
            return False
        return True

    def attempt(self, *, succeeded: bool) -> None:
        """Note how an attempt ended: the more have failed, the longer is the wait."""
        self._waited = 0
        self._wait = 0 if succeeded else min(2 * self._wait + 1, _LONGEST_WAIT)


class _History:
    """Where objects of one class began, and how long to wait before the next attempt."""

    def __init__(self, *, of_value: bool) -> None:
        self.of_value = of_value
        """They are values of texts: each record ends with the text of the next one."""
        self.places: list[_Place] = []
        self.even, self.uneven = _Patience(), _Patience()
        self.built: dict[tuple[Any, ...], _Built | None] = {}
        """What records of one form build."""


def elements(function: Global, args: tuple[Any, ...], machine: Caller) -> Object:
    """Build an element of a list; a run of them before it becomes one element, a `Run`."""
    return _built(function, args, machine, _as_element, list)


def keys(function: Global, args: tuple[Any, ...], machine: Caller) -> Object:
    """Build a key of a dict; a run of items before it becomes one item, `Key(Run)` and the same `Run`."""
    return _built(function, args, machine, _as_item, dict)


def described(function: Global, args: tuple[Any, ...], machine: Caller) -> Object:
    """Build the value of a text in a dict; a run of such items becomes one item, `Key(Run)` and the same `Run`."""
    return _built(function, args, machine, _as_described, dict, of_value=True)


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
    begins, ends = bytes([MEMOIZE, _SHORT_TEXT]), bytes([MEMOIZE]) + tail
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
    for get, width in GETS.items():
        begin = here - width - 2
        if begin >= 0 and data[begin] == get and data[here - 1] == _EMPTY_TUPLE:
            number = int.from_bytes(data[begin + 1 : begin + 1 + width], "little")
            if memo.get(number) is function or memo.get(number) == function:
                return data[begin : here + 1], number
    return None


def _put_at(data: bytes, at: int) -> tuple[int | None, int]:
    """Return the number under which a step puts something into the memo, and where the next step is."""
    code = data[at]
    if code == MEMOIZE:
        return _COUNTED, at + 1
    width = _PUTS.get(code)
    return (None, at) if width is None else (int.from_bytes(data[at + 1 : at + 1 + width], "little"), at + 1 + width)


def _as_element(machine: Machine, run: Run) -> None:
    machine.stack.insert(-1, run)


def _as_item(machine: Machine, run: Run) -> None:
    machine.stack[-1:-1] = [Key(run), run]


def _as_described(machine: Machine, run: Run) -> None:
    """Put a run of values, each with the text that follows it, as one of the texts with their values."""
    value, following = run.templates
    texts = [machine.stack[-2], *run.values(following.number)]
    own = run.columns.shape[1]
    columns = np.hstack([run.columns, np.zeros((len(run.columns), 1), np.int64)])
    items = Run((Column(own), value), columns, {**run.texts, own: texts[:-1]}, run.references, run.referred)
    machine.stack[-2:-1] = [Key(items), items, texts[-1]]


def _built(
    function: Global,
    args: tuple[Any, ...],
    machine: Caller,
    put: Callable[[Machine, Run], None],
    kind: type,
    *,
    of_value: bool = False,
) -> Object:
    assert isinstance(machine, Machine)
    is_new = machine.data[machine.begin] == _NEW
    if is_new and not args and machine.finds_runs and _is_part(machine, kind, of_value=of_value):
        history = machine.histories.get(function)
        if history is None:
            history = machine.histories[function] = _History(of_value=of_value)
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


class _Candidate(NamedTuple):
    """A form of which a run may begin."""

    before: _Place
    """Where a record of it began that was done step by step."""
    form: EvenForm | UnevenForm
    known: Mapping[int, Any]
    """What the record refers to that is the same in all of them."""
    least: int = _FEWEST
    """So many records are worth it."""


def _run_at(function: Global, machine: Machine, history: _History, place: _Place) -> Run | None:
    """Return the run that begins here, and let the machine go on after it; None if there is none."""
    even = _even_candidates(machine, history, place)
    for each in even:
        run = _run_of(function, machine, history, place, each._replace(least=_MANY))
        if run is not None:
            history.even.attempt(succeeded=True)
            return run
    for each in (*_uneven_candidates(machine, history, place), *even):
        run = _run_of(function, machine, history, place, each)
        if run is not None:
            (history.even if type(each.form) is EvenForm else history.uneven).attempt(succeeded=True)
            return run
    return None


def _even_candidates(machine: Machine, history: _History, place: _Place) -> list[_Candidate]:
    """Return the forms of records as long as those before; an attempt has failed until somebody says otherwise."""
    data, here = machine.data, place.begin
    found: list[_Candidate] = []
    for before in reversed(history.places):
        length = here - before.begin
        ahead = data[here + length : here + length + 3]
        if before.depth != place.depth or length > _LONGEST or ahead != data[here : here + 3]:
            continue
        if not found and not history.even.is_over():
            return []
        record, known = data[before.begin : here], dict[int, Any]()
        operands = operands_of(record, data[here : here + length], machine.memo, known)
        if operands and all(_is_harmless(value, machine) for value in known.values()):
            found.append(_Candidate(before, EvenForm(record, operands), known))
    if len(history.places) == _MOST_ALTERNATING:
        history.even.attempt(succeeded=False)
    return found


def _uneven_candidates(machine: Machine, history: _History, place: _Place) -> list[_Candidate]:
    """Return the form of the record before this one, if it allows for longer and shorter ones; otherwise as above."""
    before = history.places[-1] if history.places else place
    length = place.begin - before.begin
    if before.depth != place.depth or not 0 < length <= _LONGEST or not history.uneven.is_over():
        return []
    history.uneven.attempt(succeeded=False)
    known: dict[int, Any] = {}
    form = uneven_form(machine.data[before.begin : place.begin], machine.data, place.begin, machine.memo, known)
    is_one = form is not None and all(_is_harmless(value, machine) for value in known.values())
    return [_Candidate(before, form, known)] if is_one and form is not None else []


def _run_of(function: Global, machine: Machine, history: _History, place: _Place, candidate: _Candidate) -> Run | None:
    """Return the run of a form, and let the machine go on after it; None if there is none.

    Args:
        function: what is called first.
        machine: it is where the run would begin.
        history: what was found before.
        place: where the run would begin.
        candidate: the form.
    """
    before, form, known, least = candidate
    found = form.read(machine.data, place.begin)
    count = _referable(found.columns, form.operands, machine.memo)
    built = _what_is_built(function, machine, history, form, known) if count >= least else None
    if built is None or len(built.values) != place.height - before.height:
        return None
    if history.of_value and not (type(machine.stack[-2]) is str and _is_text(built.values[-1], form.operands)):
        return None
    run = _run(built, found, count, form.operands, machine.memo)
    if built.kept:
        machine.memo.extend(Remembered(run, built.kept))
    machine.charge(count * (before.left - place.left) + _longer_texts(run, form.operands))
    machine.begin = found.ends[count - 1]
    machine.at = machine.begin + 1
    return run


def _is_text(template: object, operands: Sequence[Operand]) -> bool:
    return type(template) is Column and operands[template.number].kind == TEXT


def _longer_texts(run: Run, operands: Sequence[Operand]) -> int:
    """Return how many more characters the texts of a run have than those of as many records like the first one."""
    count = len(run.columns)
    return sum(
        sum(map(len, run.texts[column])) - count * operand.width
        for column, operand in enumerate(operands)
        if operand.kind == TEXT
    )


def _is_harmless(value: object, machine: Machine) -> bool:
    """Tell whether a constant takes any number as an argument, if it is called."""
    return type(value) is not Global or machine.is_inert(value, (described, elements, keys, size))


def _referable(columns: NDArray[np.int64], operands: Sequence[Operand], memo: Memo) -> int:
    """Return how many records refer only to what there is: texts, where the pickle gives the numbers itself."""
    count = len(columns)
    for column, operand in enumerate(operands):
        if operand.kind != REFERENCE:
            continue
        references = columns[:count, column]
        if memo.is_numbered:
            is_there = np.array([type(memo.get(each)) is str for each in references.tolist()], bool)
        else:
            is_there = references < memo.plain_end
            if not is_there.all():
                beyond = np.unique(references[~is_there]).tolist()
                beyond = [each for each in beyond if each in memo or memo.gives_text(each)]
                is_there |= np.isin(references, beyond)
        if not is_there.all():
            count = int(is_there.argmin())
    return count


def _what_is_built(
    function: Global, machine: Machine, history: _History, form: EvenForm | UnevenForm, known: Mapping[int, Any]
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


def _templates(
    function: Global, machine: Machine, form: EvenForm | UnevenForm, known: Mapping[int, Any]
) -> _Built | None:
    numbered: list[bytes] = []
    stands: dict[int, Any] = {}
    at = 0
    for column, operand in enumerate(form.operands):
        numbered.append(form.record[at : operand.step])
        if operand.kind in (TEXT, REFERENCE):
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


def _run(built: _Built, found: Records, count: int, operands: Sequence[Operand], memo: Memo) -> Run:
    """Return a run of so many records of those that were found."""
    columns = found.columns[:count]
    texts = {column: values[:count] for column, values in found.texts.items()}
    references = []
    for column, operand in enumerate(operands):
        if operand.kind == REFERENCE and memo.is_numbered:
            texts[column] = [memo[each] for each in columns[:, column].tolist()]
        elif operand.kind == REFERENCE:
            references.append(column)
    return Run(built.values, columns, texts, references, memo)


__all__ = ["Run", "bare", "described", "elements", "keys"]
