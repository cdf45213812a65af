"""Records of several lengths: the same steps, but numbers and references of one byte or four, and texts of any length.

A regular expression that is the pickle's own grammar of these steps reads one record after the other. Each step begins
with its code and says its length, so there is one way to read the bytes: that of the machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from transaxle.formats.pickled.columns import CONSTANT
from transaxle.formats.pickled.machine import Memo
from transaxle.formats.pickled.records.step_operands import (
    GETS,
    LONG,
    MEMOIZE,
    MOST_COLUMNS,
    NUMBER,
    NUMBERS,
    PLAIN,
    REFERENCE,
    TEXT,
    TEXTS,
    WIDEST,
    Operand,
    Records,
)

_SHORT_TEXT = 0x8C
_LONGS = b"|".join(b"\x8a" + bytes([width]) + b"." * (width - 1) + rb"[\x00-\x7f]" for width in range(1, WIDEST + 1))
_GROUPS = {
    NUMBER: rb"(K.|M..|J...[\x00-\x7f]|" + _LONGS + b")",
    REFERENCE: b"(h.|j....)",
    TEXT: rb"\x8c(.[\x00-\x7f]*)",
}
"""What stands for each kind of operand; a text ends at the step that remembers it, which is no ASCII."""


class _Numbers(dict[bytes, int]):
    """The numbers of operands, by the bytes of their steps."""

    def __missing__(self, step: bytes) -> int:
        self[step] = number = int.from_bytes(step[2 if step[0] == LONG else 1 :], "little")
        return number


class UnevenForm:
    """What is the same in all records of a run.

    Args:
        record: one of them.
        operands: what may differ.
        pattern: what matches a record.
    """

    def __init__(self, record: bytes, operands: Sequence[Operand], pattern: bytes) -> None:
        self.record = record
        self.operands = operands
        self._pattern = pattern

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from other forms."""
        return (self._pattern,)

    def read(self, data: bytes, here: int) -> Records:
        """Return the records from here on that have this form, but for one at the end that none follows."""
        match = _compiled(self._pattern).match
        are_texts = [column for column, operand in enumerate(self.operands) if operand.kind == TEXT]
        rows: list[tuple[bytes, ...]] = []
        ends: list[int] = []
        at = here
        while (found := match(data, at)) is not None:
            row = found.groups()
            if any(row[column][0] != len(row[column]) - 1 for column in are_texts):
                break
            at = found.end()
            rows.append(row)
            ends.append(at)
        if data[at : at + 1] != self.record[:1]:
            del rows[-1:], ends[-1:]
        columns = np.zeros((len(rows), len(self.operands)), np.int64)
        texts: dict[int, Any] = {}
        number_of = _Numbers().__getitem__
        for column, values in enumerate(zip(*rows, strict=True)):
            if column in are_texts:
                texts[column] = [value[1:].decode("ascii") for value in values]
            else:
                columns[:, column] = list(map(number_of, values))
        return Records(columns, texts, ends)


def uneven_form(record: bytes, data: bytes, here: int, memo: Memo, known: dict[int, Any]) -> UnevenForm | None:
    """Return the form of records of several lengths; None if a step might do something else in another record.

    Args:
        record: a record that was done step by step.
        data: the pickle.
        here: where the next record begins, which tells the texts and references that differ.
        memo: what has been built so far.
        known: receives what the record refers to otherwise, by reference.
    """
    found: list[Operand] = []
    pattern: list[bytes] = []
    at, end, next_at = 0, len(record), here
    while at < end:
        code = record[at]
        step, next_step = _step(record, at), _step(data, next_at)
        if step is None or next_step is None or step[0] != next_step[0] or (code == MEMOIZE and memo.is_numbered):
            return None
        kind, operand_at, stop = step
        reads = record[at:stop], data[next_at : next_step[2]]
        reference = int.from_bytes(record[operand_at:stop], "little") if kind == REFERENCE else -1
        value = memo.get(reference, memo) if kind == REFERENCE else None
        if kind is None or (kind == TEXT and reads[0] == reads[1]):
            if reads[0] != reads[1]:
                return None
            pattern.append(re.escape(reads[0]))
        elif kind == REFERENCE and reads[0] == reads[1] and type(value) in CONSTANT:
            known[reference] = value
            pattern.append(re.escape(reads[0]))
        elif kind == TEXT and not (
            code == _SHORT_TEXT and reads[0][2:].isascii() and record[stop : stop + 1] == b"\x94"
        ):
            return None
        else:
            found.append(Operand(at, operand_at, stop - operand_at, kind))
            pattern.append(_GROUPS[kind])
        at, next_at = stop, next_step[2]
    is_whole = at == end and 0 < len(found) <= MOST_COLUMNS
    return UnevenForm(record, found, b"".join(pattern)) if is_whole else None


def _step(data: bytes, at: int) -> tuple[str | None, int, int] | None:
    """Return the kind of a step's operand, where that begins, and where the step ends; None for other steps."""
    code = data[at] if at < len(data) else -1
    if code in PLAIN or code == MEMOIZE:
        return None, at + 1, at + 1
    for kind, widths in _WIDTHS.items():
        if code in widths:
            return kind, at + 1, at + 1 + widths[code]
    if code in TEXTS:
        begin = at + 1 + TEXTS[code]
        return TEXT, begin, begin + int.from_bytes(data[at + 1 : begin], "little")
    if code == LONG and at + 1 < len(data) and 0 < data[at + 1] <= WIDEST:
        return NUMBER, at + 2, at + 2 + data[at + 1]
    return None


_WIDTHS: Mapping[str, Mapping[int, int]] = {NUMBER: NUMBERS, REFERENCE: GETS}


@lru_cache(64)
def _compiled(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern, re.DOTALL)
