"""Records of one length, whose operands are at the same bytes in all of them: compared and read as one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transaxle.formats.pickled.records.step_operands import SIGNED, TEXT, Operand, Records

_BLOCK, _MOST_BYTES = 1 << 7, 1 << 16
"""Records that are compared at first, and bytes of them at most: what is compared should stay in the cache."""
_ANY, _ASCII = 0xFF, 0x7F
"""Bits of an octet that may differ."""


class EvenForm:
    """What is the same in all records of a run.

    Args:
        record: one of them.
        operands: what may differ.
    """

    def __init__(self, record: bytes, operands: Sequence[Operand]) -> None:
        self.record = record
        self.operands = operands
        free = np.zeros(len(record), np.uint8)
        for _, at, width, kind in operands:
            free[at : at + width] = _ASCII if kind == TEXT else _ANY
            if kind == SIGNED:
                free[at + width - 1] = _ASCII  # the highest bit is the sign
        self._fixed = ~free
        self._expected = np.frombuffer(record, np.uint8) & self._fixed
        for _, at, width, kind in operands:
            if kind == SIGNED:
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

    def read(self, data: bytes, here: int) -> Records:
        """Return the records from here on that have this form, but for one at the end that none follows."""
        count, length = self.count(data, here), len(self.record)
        rows = np.frombuffer(data, np.uint8, count * length, here).reshape(count, length)
        columns = np.zeros((count, len(self.operands)), "<i8")
        octets = columns.view(np.uint8).reshape(count, len(self.operands), 8)
        texts: dict[int, Any] = {}
        for column, (_, at, width, kind) in enumerate(self.operands):
            if kind == TEXT:
                texts[column] = rows[:, at : at + width]
            else:
                octets[:, column, :width] = rows[:, at : at + width]
        return Records(columns, texts, range(here + length, here + (count + 1) * length, length))
