"""What may differ from record to record: numbers, texts and references, the operands of the steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from transaxle.formats.pickled.columns import CONSTANT
from transaxle.formats.pickled.machine import Memo

PLAIN = frozenset(b")(t\x85\x86\x87R\x81}]usaebN\x88\x89")
"""Steps without an operand."""
MEMOIZE = 0x94
NUMBERS = {ord("K"): 1, ord("M"): 2, ord("J"): 4}
"""Step -> bytes of its number."""
GETS = {ord("h"): 1, ord("j"): 4}
TEXTS = {ord("X"): 4, 0x8C: 1}
"""Step -> bytes of the length of its text."""
BININT, LONG = ord("J"), 0x8A
WIDEST = 8
"""Bytes of the longest number."""
NUMBER, SIGNED, TEXT, REFERENCE = "number", "signed", "text", "reference"
MOST_COLUMNS = 200
"""Cap on the operands of a record."""


class Operand(NamedTuple):
    """What may differ from record to record: a number, a text, or a reference."""

    step: int
    """First byte of the step."""
    at: int
    """Its own first byte."""
    width: int
    """Its bytes."""
    kind: str
    """One of the four above; signed ones may not be negative."""


class Records(NamedTuple):
    """Records that follow one another, as columns."""

    columns: NDArray[np.int64]
    """Numbers and references, one row a record and one column an operand; 0 for texts."""
    texts: dict[int, Any]
    """Column -> its texts; or their ASCII, one row a record."""
    ends: range | list[int]
    """Position after each record."""


def operands_of(record: bytes, next_record: bytes, memo: Memo, known: dict[int, Any]) -> list[Operand]:
    """Return what may differ from record to record; nothing if a step might do something else in another record.

    Args:
        record: a record that was done step by step.
        next_record: the next one, which tells the texts and references that differ.
        memo: what has been built so far.
        known: receives what the record refers to otherwise, by reference.
    """
    found: list[Operand] = []
    at, end = 0, len(record)
    while at < end:
        step, code = at, record[at]
        at += 1
        if code in PLAIN:
            continue
        if code in NUMBERS:
            width = NUMBERS[code]
            found.append(Operand(step, at, width, SIGNED if code == BININT else NUMBER))
        elif code in GETS:
            width = GETS[code]
            reference = int.from_bytes(record[at : at + width], "little")
            value = memo.get(reference, memo)
            is_same = record[at : at + width] == next_record[at : at + width]
            if type(value) in CONSTANT and (is_same or type(value) is not str):
                known[reference] = value
            else:
                found.append(Operand(step, at, width, REFERENCE))
        elif code in TEXTS:
            at, width = at + TEXTS[code], int.from_bytes(record[at : at + TEXTS[code]], "little")
            text = record[at : at + width]
            if text != next_record[at : at + width] and text.isascii():
                found.append(Operand(step, at, width, TEXT))
        elif code == LONG and at < end and 0 < record[at] <= WIDEST:
            at, width = at + 1, record[at]
            found.append(Operand(step, at, width, SIGNED))
        elif code == MEMOIZE and not memo.is_numbered:
            width = 0
        else:
            return []
        at += width
    return found if at == end and len(found) <= MOST_COLUMNS else []
