"""Numbers that a container keeps in its description, not among its bytes: they get bytes of their own, in memory.

A Python number in a pickle is a tensor of no dims like any other; only its bytes do not lie in a file as such. They are
put into a pseudo-file that is read like the real ones, under a name that no file can have.
"""

from __future__ import annotations

import struct

from transaxle.formats.catalog import Extent
from transaxle.formats.storage import Listing, Storage

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


class Inline:
    """A storage, and beside its files one that exists in memory only (see `formats.storage.Storage`).

    Args:
        storage: reads everything else.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._numbers = bytearray()

    def add(self, data: bytes) -> Extent:
        """Keep the bytes of one number and return where they are."""
        extent = Extent((), (), NUMBERS, len(self._numbers))
        self._numbers += data
        return extent

    @property
    def path(self) -> str:
        """The path as the user typed it."""
        return self._storage.path

    @property
    def single(self) -> str | None:
        """Name of the one file that the path denotes; None where it denotes a folder."""
        return self._storage.single

    def listing(self, folder: str = "") -> Listing:
        """List a folder; the pseudo-file is not in it."""
        return self._storage.listing(folder)

    def names(self) -> tuple[str, ...]:
        """Return the names of the regular files directly in the checkpoint's folder."""
        return self._storage.names()

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return len(self._numbers) if name == NUMBERS else self._storage.size(name)

    def version(self, name: str) -> str:
        """Return a text that changes when the file does; numbers change only with the file they were read from."""
        return "" if name == NUMBERS else self._storage.version(name)

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fill a writable contiguous view with the bytes that start at `offset`."""
        if name == NUMBERS:
            view.cast("B")[:] = self._numbers[offset : offset + view.nbytes]
        else:
            self._storage.read_into(name, offset, view)

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`."""
        if name == NUMBERS:
            return bytes(self._numbers[offset : offset + size])
        return self._storage.read(name, offset, size)

    def recheck(self) -> None:
        """Check that no file that was read has changed since."""
        self._storage.recheck()

    def close(self) -> None:
        """Release what is held open."""
        self._storage.close()
