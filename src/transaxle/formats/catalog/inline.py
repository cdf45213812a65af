"""Numbers that a container keeps in its description: they get bytes of their own, in memory.

A Python number in a pickle is a tensor without dims like any other, but its bytes are not in a file. They are put into
a pseudo-file that is read like real ones, under a name that no file can have.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from transaxle.axes.geometry.strided import Loop
from transaxle.formats.catalog.catalog import Extent
from transaxle.formats.storage.compiled import StepBatch
from transaxle.formats.storage.storage import Overlay, Storage
from transaxle.formats.storage.strided_reads import FileRange, read_each, read_one_by_one, read_ranges, read_strided

NUMBERS = "//numbers"
"""Name of the pseudo-file; as a path it would have an empty part."""
Number = int | float | bool
_I64, _U64 = range(-(2**63), 2**63), range(2**64)


def number(value: Number) -> tuple[str, bytes] | None:
    """Return the safetensors code and the bytes of a Python number: BOOL, I64 (U64 above its range) or F64.

    Returns:
        None for an integer that is too large for either.
    """
    if isinstance(value, bool):
        return "BOOL", bytes([value])
    if isinstance(value, float):
        return "F64", struct.pack("<d", value)
    if value in _I64:
        return "I64", struct.pack("<q", value)
    return ("U64", struct.pack("<Q", value)) if value in _U64 else None


class NumbersInMemory(Overlay):
    """A storage with one further file, which exists in memory only.

    Args:
        below: the real files.
    """

    def __init__(self, below: Storage) -> None:
        super().__init__(below)
        self._numbers = bytearray()

    def over(self, below: Storage) -> NumbersInMemory:
        """Return the same numbers on top of other files."""
        moved = NumbersInMemory(below)
        moved._numbers = self._numbers
        return moved

    def add(self, data: bytes) -> Extent:
        """Keep the bytes of one number and return where they are."""
        extent = Extent((), (), NUMBERS, len(self._numbers))
        self._numbers += data
        return extent

    def add_all(self, other: NumbersInMemory) -> int:
        """Keep the numbers of another storage, too, and return where the first of them is."""
        start = len(self._numbers)
        self._numbers += other._numbers
        return start

    def size(self, name: str) -> int:
        """See `Storage`."""
        return len(self._numbers) if name == NUMBERS else super().size(name)

    def version(self, name: str) -> str:
        """See `Storage`; numbers change only with the file they were read from."""
        return "" if name == NUMBERS else super().version(name)

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """See `Storage`."""
        if name == NUMBERS:
            view.cast("B")[:] = self._numbers[offset : offset + view.nbytes]
        else:
            super().read_into(name, offset, view)

    def note_read(self, batch: StepBatch, name: str, offset: int, view: memoryview) -> None:
        """See `Storage`."""
        if name == NUMBERS:
            super().note_read(batch, name, offset, view)
        else:
            self.below.note_read(batch, name, offset, view)

    def note_strided(
        self, batch: StepBatch, name: str, offset: int, view: memoryview, width: int, loops: Sequence[Loop]
    ) -> None:
        """See `Storage`."""
        if name == NUMBERS:
            super().note_strided(batch, name, offset, view, width, loops)
        else:
            self.below.note_strided(batch, name, offset, view, width, loops)

    def read_strided(self, name: str, offset: int, view: memoryview, width: int, loops: Sequence[Loop]) -> None:
        """See `formats.storage.strided_reads.read_strided`."""
        if name == NUMBERS:
            read_each(self, name, offset, view, width, loops)
        else:
            read_strided(self.below, name, offset, view, width, loops)

    def read_ranges(self, ranges: Sequence[FileRange]) -> None:
        """See `formats.storage.strided_reads.read_ranges`."""
        if any(name == NUMBERS for name, _, _ in ranges):
            read_one_by_one(self, ranges)
        else:
            read_ranges(self.below, ranges)
