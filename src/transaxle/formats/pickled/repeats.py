"""Runs: objects that follow one another by the thousand, alike but for numbers and texts, read as columns of these.

Of records that are the same to the last byte, but for numbers, texts and references, the machine does the first ones
step by step. The others would take the same steps, so what they build is what the last one built, with other numbers
and texts; and so is what they put into the memo. Whatever is not certain to be so (a call that looks at its numbers, a
negative number, a reference to what has not been built) is left to the machine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from transaxle.formats.pickled.allowed_globals.builders import Caller, size
from transaxle.formats.pickled.columns import Column, Remembered, Run, is_simple
from transaxle.formats.pickled.descriptors import Global, Key, Object
from transaxle.formats.pickled.fault import PickleFault
from transaxle.formats.pickled.machine import Machine, Memo
from transaxle.formats.pickled.records.record_form import (
    GETS,
    MEMOIZE,
    PUT,
    PUTS,
    REFERENCE,
    TEXT,
    Operand,
    RecordForm,
    Records,
    form_of,
    step_at,
)
from transaxle.formats.pickled.steps import perform

_FEWEST = 8
"""Records that are worth it."""
_LONGEST = 512
"""Cap on the bytes of a record."""
_MOST_ALTERNATING = 2
"""Records of so many forms may take turns, as those of two halves do."""
_LONGEST_WAIT = 12
_NEW = 0x81
_COUNTED, _OBJECT = "counted", "object"
_EMPTY_TUPLE = ord(")")
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
        self.patience = _Patience()
        self.last: _Candidate | None = None
        """The form of the run before, if there was one."""
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
    memo = machine.memo
    called = _call_before(machine.data, machine.begin, memo, function)
    items = None if called is None else _items_at(function, machine, called[0])
    if called is None or items is None or (memo.absent if items.numbers else items.is_counted and memo.is_numbered):
        return False
    found = items.form.read(machine.data, machine.begin)
    keys = found.texts[items.text][: int(found.ends.searchsorted(machine.limit, "right"))]
    costs = list(accumulate(_COST + len(key) for key in keys))
    numbers = found.columns[:, items.numbers]
    are_apart = (numbers != called[1]).all(axis=1)  # none is remembered in place of the class
    count = min(bisect_right(costs, machine.left), len(keys) if are_apart.all() else int(are_apart.argmin()))
    if not count:
        return False
    machine.stack[-1:] = (*chain.from_iterable(zip(repeat(made, count), keys, strict=False)), function)
    sides = (keys[:count] if kind == TEXT else repeat(made, count) for kind in items.kept)
    kept = chain.from_iterable(zip(*sides, strict=True))
    if items.numbers:
        memo.update(zip(numbers[:count].ravel().tolist(), kept, strict=True))
        memo.is_numbered = True
    else:
        memo.update(enumerate(kept, memo.end))
    machine.left -= costs[count - 1]
    machine.begin = int(found.ends[count - 1])
    machine.at = machine.begin + 1
    return True


class _Items(NamedTuple):
    """Items that are a text and an object, read from one object to the next."""

    form: RecordForm
    text: int
    """Column of the texts."""
    numbers: list[int]
    """Columns of the numbers under which the pickle remembers something."""
    kept: tuple[str, ...]
    """What is remembered, in order: a text (`TEXT`), or an object (`_OBJECT`)."""

    @property
    def is_counted(self) -> bool:
        """Whether the memo counts what is remembered."""
        return len(self.kept) > 0 and not self.numbers


def _items_at(function: Global, machine: Machine, called: bytes) -> _Items | None:
    """Return the items of which the first object begins here; None where they are others, or remembered in two ways.

    Args:
        function: the object's class.
        machine: it builds the object.
        called: the steps that fetch the class and call it.
    """
    data, begin = machine.data, machine.begin
    put_of_object, at = _put_at(data, begin + 1)
    text = step_at(data, at)
    if text is None or text[0] != TEXT:
        return None
    put_of_text, end = _put_at(data, text[2])
    puts = {_OBJECT: put_of_object, TEXT: put_of_text}
    if {PUT, _COUNTED} <= {*puts.values()}:
        return None
    forms: dict[Any, _Items] = machine.histories.setdefault(function, {})
    key = called, put_of_object, put_of_text
    if key not in forms:
        columns = [*([PUT] if put_of_object == PUT else []), TEXT, *([PUT] if put_of_text == PUT else [])]
        counted = [bytes([MEMOIZE]) if put == _COUNTED else b"" for put in puts.values()]
        pieces = called[-1:] + counted[0], *([b""] * (len(columns) - 1)), counted[1] + called[:-1]
        form = RecordForm(data[begin:end] + called[:-1], [Operand(0, 0, 0, kind) for kind in columns], pieces)
        numbers = [column for column, kind in enumerate(columns) if kind == PUT]
        forms[key] = _Items(form, columns.index(TEXT), numbers, tuple(kind for kind, put in puts.items() if put))
    return forms[key]


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


def _put_at(data: bytes, at: int) -> tuple[str, int]:
    """Return how a step puts something into the memo, as `PUT` or `_COUNTED`, empty for others, and where it ends."""
    code = data[at] if at < len(data) else -1
    if code == MEMOIZE:
        return _COUNTED, at + 1
    return (PUT, at + 1 + PUTS[code]) if code in PUTS else ("", at)


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

    form: RecordForm
    known: Mapping[int, Any]
    """What the record refers to that is the same in all of them."""
    height: int
    """Values that a record puts on the stack."""
    cost: int
    """Bytes, estimated, that a record takes."""


def _run_at(function: Global, machine: Machine, history: _History, place: _Place) -> Run | None:
    """Return the run that begins here, and let the machine go on after it; None if there is none."""
    last, history.last = history.last, None
    if last is not None and _is_still_known(last, machine):  # a step of its own may have come between the records
        run = _run_of(function, machine, history, last)
        if run is not None:
            return run
    for candidate in _candidates(machine, history, place):
        run = _run_of(function, machine, history, candidate)
        if run is not None:
            history.patience.attempt(succeeded=True)
            return run
    return None


def _is_still_known(candidate: _Candidate, machine: Machine) -> bool:
    """Tell whether a record of this form may begin here, and what it refers to is still the same."""
    known, memo = candidate.known, machine.memo
    return candidate.form.begins(machine.data, machine.begin) and all(
        memo.get(reference, memo) is value for reference, value in known.items()
    )


def _candidates(machine: Machine, history: _History, place: _Place) -> Iterator[_Candidate]:
    """Yield the forms of records like those before; an attempt has failed until somebody says otherwise."""
    data, here = machine.data, place.begin
    places = [before for before in reversed(history.places) if before.depth == place.depth]
    if not places or not history.patience.is_over():
        return
    history.patience.attempt(succeeded=False)
    for before in places:
        known: dict[int, Any] = {}
        record = data[before.begin : here]
        form = form_of(record, data, here, machine.memo, known) if len(record) <= _LONGEST else None
        if form is not None and all(_is_harmless(value, machine) for value in known.values()):
            yield _Candidate(form, known, place.height - before.height, before.left - place.left)


def _run_of(function: Global, machine: Machine, history: _History, candidate: _Candidate) -> Run | None:
    """Return the run of a form, and let the machine go on after it; None if there is none.

    Args:
        function: what is called first.
        machine: it is where the run would begin.
        history: what was found before.
        candidate: the form.
    """
    form, known, height, cost = candidate
    found = form.read(machine.data, machine.begin)
    count = _referable(found.columns, form.operands, machine.memo)
    built = _what_is_built(function, machine, history, form, known) if count >= _FEWEST else None
    if built is None or len(built.values) != height:
        return None
    if history.of_value and not (type(machine.stack[-2]) is str and _is_text(built.values[-1], form.operands)):
        return None
    run = _run(built, found, count, form.operands, machine.memo)
    if built.kept:
        machine.memo.extend(Remembered(run, built.kept))
    machine.charge(count * cost + _longer_texts(run, form.operands))
    machine.begin = int(found.ends[count - 1])
    machine.at = machine.begin + 1
    history.last = candidate
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
    function: Global, machine: Machine, history: _History, form: RecordForm, known: Mapping[int, Any]
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


def _templates(function: Global, machine: Machine, form: RecordForm, known: Mapping[int, Any]) -> _Built | None:
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
