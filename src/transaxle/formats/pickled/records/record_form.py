"""Records that follow one another: the same steps, with numbers and references of any width, and with texts.

Between what is the same in all of them lie the operands. Many records are read together, as arrays: first all places
where one may begin, then piece by piece and operand by operand what lies there. So the bytes are read in one way, that
of the machine: each step begins with its code, which says how long it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from transaxle.formats.pickled.columns import CONSTANT
from transaxle.formats.pickled.machine import Memo

_PLAIN = frozenset(b")(t\x85\x86\x87R\x81}]usaebN\x88\x89")
"""Steps without an operand."""
MEMOIZE = 0x94
GETS = {ord("h"): 1, ord("j"): 4}
_NUMBERS = {ord("K"): 1, ord("M"): 2, ord("J"): 4}
"""Step -> bytes of its number."""
_TEXTS = {ord("X"): 4, 0x8C: 1}
"""Step -> bytes of the length of its text."""
_LONG = 0x8A
_WORD = 8
"""Bytes of the longest number."""
PUTS = {ord("q"): 1, ord("r"): 4}
NUMBER, TEXT, REFERENCE, PUT = "number", "text", "reference", "put"
_MOST_COLUMNS = 200
"""Cap on the operands of a record."""
_LONGEST_TEXT = 512
_FIRST_WINDOW, _WINDOW = 1 << 12, 1 << 19
"""Bytes that are read at first, to see whether there are records, and at a time."""


class Operand(NamedTuple):
    """What may differ from record to record: a number, a text, a reference, or where something is remembered."""

    step: int
    """First byte of the step."""
    at: int
    """Its own first byte."""
    width: int
    """Its bytes."""
    kind: str
    """One of the four above; numbers are not negative, texts are ASCII."""


class Records(NamedTuple):
    """Records that follow one another, as columns."""

    columns: NDArray[np.int64]
    """Numbers and references, one row a record and one column an operand; 0 for texts."""
    texts: dict[int, list[str]]
    """Column -> its texts."""
    ends: NDArray[np.int64]
    """Position after each record."""

    def first(self, count: int) -> Records:
        """Return the first of them."""
        texts = {column: of_column[:count] for column, of_column in self.texts.items()}
        return Records(self.columns[:count], texts, self.ends[:count])

    def and_then(self, more: Records) -> Records:
        """Return these and those that follow them."""
        texts = {column: [*of_column, *more.texts[column]] for column, of_column in self.texts.items()}
        return Records(np.concatenate((self.columns, more.columns)), texts, np.concatenate((self.ends, more.ends)))


class _Window(NamedTuple):
    """What was read of all places in some bytes where a record may begin."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    are_records: NDArray[np.bool_]
    """Whether one begins there, and has no other step between its own."""
    breaks: NDArray[np.int64]
    """Numbers of those that are no records or do not end where the next one begins; the last one is among them."""
    columns: NDArray[np.int64]
    texts: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]]
    """Column -> where its texts begin and end."""

    def holds(self, here: int) -> bool:
        """Tell whether what may begin here was read."""
        return len(self.starts) > 0 and bool(self.starts[0] <= here <= self.starts[-1])

    def records(self, data: bytes, here: int) -> Records:
        """Return those that follow one another from here on."""
        first = stop = int(self.starts.searchsorted(here))
        if first < len(self.starts) and self.starts[first] == here:
            stop = int(self.breaks[self.breaks.searchsorted(first)])
            stop += bool(self.are_records[stop])
        texts = {column: _texts(data, *(side[first:stop] for side in sides)) for column, sides in self.texts.items()}
        found = Records(self.columns[first:stop], texts, self.ends[first:stop])
        return found.first(min(map(len, texts.values()))) if texts else found


class RecordForm:
    """What is the same in all records of a run.

    Args:
        record: one of them.
        operands: what may differ.
        pieces: what precedes each operand, and what follows the last one.

    Attributes:
        key: what tells it from other forms.
    """

    def __init__(self, record: bytes, operands: Sequence[Operand], pieces: Sequence[bytes]) -> None:
        self.record = record
        self.operands = operands
        self.key: tuple[Any, ...] = *pieces, *(operand.kind for operand in operands)
        self._pieces = pieces
        texts = sum(operand.kind == TEXT for operand in operands)
        # A word is read from each of its positions.
        self._longest = sum(map(len, pieces)) + 2 * _WORD * (1 + len(operands)) + texts * _LONGEST_TEXT
        self._window: _Window | None = None

    def begins(self, data: bytes, here: int) -> bool:
        """Tell whether a record may begin here."""
        return data.startswith(self._pieces[0], here)

    def read(self, data: bytes, here: int) -> Records:
        """Return the records from here on that have this form, but for one at the end that none follows.

        What is read ahead is kept, so that reading goes on after a record with another step between its own.

        Args:
            data: the pickle; the same one in all calls.
            here: where the first record begins.
        """
        window = self._window
        if window is None or not window.holds(here):
            window = self._window = self._read(data, here, _FIRST_WINDOW if window is None else _WINDOW)
        found = window.records(data, here)
        while len(found.ends) and found.ends[-1] > window.starts[-1] and self.begins(data, int(found.ends[-1])):
            window = self._window = self._read(data, int(found.ends[-1]), _WINDOW)
            more = window.records(data, int(found.ends[-1]))
            if not len(more.ends):
                break
            found = found.and_then(more)
        at = int(found.ends[-1]) if len(found.ends) else here
        return found if data[at : at + 1] == self.record[:1] else found.first(max(len(found.ends) - 1, 0))

    def _read(self, data: bytes, here: int, size: int) -> _Window:
        """Read so many bytes from a place on where a record may begin; those near the end of the pickle are left."""
        stop = min(here + size, len(data) - self._longest)
        octets = np.frombuffer(data, np.uint8, max(stop - here, 0), here)
        starts = (octets == self.record[0]).nonzero()[0] + here
        words = np.ndarray(max(len(data) - _WORD + 1, 0), "<i8", data, 0, (1,))
        head = self._pieces[0][:_WORD]
        wanted = int.from_bytes(head.ljust(_WORD, b"\0"), "little", signed=True)
        starts = starts[words[starts] & _BITS[len(head)] == wanted]
        which, at = np.arange(len(starts)), starts
        columns = np.zeros((len(starts), len(self.operands)), np.int64, order="F")
        texts: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        for column, operand in enumerate(self.operands):
            which, at = _after(self._pieces[column], data, which, at)
            values, sizes, right = _operands(operand.kind, words, at)
            which, at, values = _only(right, which, at + sizes, values)
            rows = which if len(which) < len(starts) else slice(None)
            if operand.kind == TEXT:
                begins, stops = np.zeros(len(starts), np.int64), np.zeros(len(starts), np.int64)
                begins[rows], stops[rows] = at, at + values
                texts[column] = begins, stops
                at = at + values
            else:
                columns[rows, column] = values
        which, at = _after(self._pieces[-1], data, which, at)
        ends, are_records = np.zeros(len(starts), np.int64), np.zeros(len(starts), bool)
        ends[which], are_records[which] = at, True
        breaks = np.append((ends[:-1] != starts[1:]).nonzero()[0], len(starts) - 1)
        return _Window(starts, ends, are_records, breaks, columns, texts)


_Array = NDArray[Any]


class _Steps(NamedTuple):
    """What the steps of one kind of operand are, by code."""

    sizes: NDArray[np.int64]
    """Bytes of the step, without those of a text; 0 for any other step."""
    masks: NDArray[np.int64]
    """The bits of the number that follows the code."""
    highest: NDArray[np.int64]
    """The largest number that it may be."""


def _steps(widths: Mapping[int, int], highest: int) -> _Steps:
    sizes, masks, most = (np.zeros(256, np.int64) for _ in range(3))
    for code, width in widths.items():
        sizes[code], masks[code], most[code] = 1 + width, (1 << 8 * width) - 1, highest
    return _Steps(sizes, masks, most)


_STEPS = {
    NUMBER: _steps({**_NUMBERS, _LONG: 1}, 2**31 - 1),
    REFERENCE: _steps(GETS, 2**32 - 1),
    PUT: _steps(PUTS, 2**32 - 1),
    TEXT: _steps(_TEXTS, _LONGEST_TEXT),
}
_BITS = np.array([*((1 << 8 * width) - 1 for width in range(_WORD)), -1], np.int64)
"""Bits of a number of so many bytes."""


def _only(right: _Array, *columns: _Array) -> tuple[_Array, ...]:
    """Return the rows that are right."""
    return columns if right.all() else tuple([column[right] for column in columns])


def _after(piece: bytes, data: bytes, which: _Array, at: _Array) -> tuple[_Array, ...]:
    """Return the rows at whose place a piece is, and the places after it."""
    size = len(piece)
    if not size:
        return which, at
    there = np.ndarray(max(len(data) - size + 1, 0), f"V{size}", data, 0, (1,))[at]
    if there.tobytes() != piece * len(at):  # bytes are compared in a tenth of the time of arrays, and these as words
        padded = np.zeros((len(at), -(-size // _WORD) * _WORD), np.uint8)
        padded[:, :size] = there.view(np.uint8).reshape(len(at), size)
        wanted = np.frombuffer(piece.ljust(padded.shape[1], b"\0"), np.int64)
        right = np.ones(len(at), bool)
        for column, word in zip(padded.view(np.int64).T, wanted, strict=True):
            right &= column == word
        which, at = which[right], at[right]
    return which, at + size


def _operands(kind: str, words: _Array, at: _Array) -> tuple[_Array, _Array, _Array]:
    """Return the numbers of steps, the bytes of each step without those of a text, and whether they are of this kind.

    Args:
        kind: of the operands.
        words: the eight bytes from each position on.
        at: where the steps begin.
    """
    found = words[at]
    codes = found & 0xFF
    if len(codes) and (codes == codes[0]).all():  # the usual case
        codes = codes[0]
    steps = _STEPS[kind]
    sizes, values = steps.sizes[codes], (found >> 8) & steps.masks[codes]
    right = (values <= steps.highest[codes]) & (sizes > 0)
    are_long = codes == _LONG
    if kind == NUMBER and np.count_nonzero(are_long):
        are_long = np.broadcast_to(are_long, values.shape)
        sizes = np.broadcast_to(sizes, values.shape).copy()
        right &= ~are_long
        rows = (are_long & (values > 0) & (values <= _WORD)).nonzero()[0]
        widths = values[rows]
        numbers = words[at[rows] + 2] & _BITS[widths]
        right[rows] = numbers >> (8 * widths - 1) == 0
        values[rows], sizes[rows] = numbers, 2 + widths
    return values, sizes, right


def _texts(data: bytes, begins: _Array, stops: _Array) -> list[str]:
    """Return the texts between positions, as far as they are ASCII."""
    octets = [data[begin:stop] for begin, stop in zip(begins.tolist(), stops.tolist(), strict=True)]
    if not b"".join(octets).isascii():
        octets = octets[: next(number for number, text in enumerate(octets) if not text.isascii())]
    return [text.decode("ascii") for text in octets]


def form_of(record: bytes, data: bytes, here: int, memo: Memo, known: dict[int, Any]) -> RecordForm | None:
    """Return the form of records that follow one another; None if a step might do something else in another record.

    Args:
        record: a record that was done step by step.
        data: the pickle.
        here: where the next record begins, which tells the texts and references that differ.
        memo: what has been built so far.
        known: receives what the record refers to that is the same in all of them, by reference.
    """
    operands: list[Operand] = []
    pieces: list[bytes] = []
    at, end, next_at, begin = 0, len(record), here, 0
    while at < end:
        step, next_step = step_at(record, at), step_at(data, next_at)
        if step is None or next_step is None or step[0] != next_step[0]:
            return None
        kind, operand_at, stop = step
        is_same = record[at:stop] == data[next_at : next_step[2]]
        if kind is None:
            if not is_same or (record[at] == MEMOIZE and memo.is_numbered):
                return None
        elif not (is_same and kind == TEXT) and not (
            is_same and kind == REFERENCE and _is_known(int.from_bytes(record[operand_at:stop], "little"), memo, known)
        ):
            if kind == TEXT and not record[operand_at:stop].isascii():
                return None
            operands.append(Operand(at, operand_at, stop - operand_at, kind))
            pieces.append(record[begin:at])
            begin = stop
        at, next_at = stop, next_step[2]
    is_whole = at == end and 0 < len(operands) <= _MOST_COLUMNS
    return RecordForm(record, operands, (*pieces, record[begin:])) if is_whole else None


def _is_known(reference: int, memo: Memo, known: dict[int, Any]) -> bool:
    """Tell whether a reference is to a constant; then that is known."""
    value = memo.get(reference, memo)
    if type(value) not in CONSTANT:
        return False
    known[reference] = value
    return True


_WIDTHS: Mapping[str, Mapping[int, int]] = {NUMBER: _NUMBERS, REFERENCE: GETS}


def step_at(data: bytes, at: int) -> tuple[str | None, int, int] | None:
    """Return the kind of a step's operand, where that begins, and where the step ends; None for other steps."""
    code = data[at] if at < len(data) else -1
    if code in _PLAIN or code == MEMOIZE:
        return None, at + 1, at + 1
    for kind, widths in _WIDTHS.items():
        if code in widths:
            return kind, at + 1, at + 1 + widths[code]
    if code in _TEXTS:
        begin = at + 1 + _TEXTS[code]
        return TEXT, begin, begin + int.from_bytes(data[at + 1 : begin], "little")
    if code == _LONG and at + 1 < len(data) and 0 < data[at + 1] <= _WORD:
        return NUMBER, at + 2, at + 2 + data[at + 1]
    return None
