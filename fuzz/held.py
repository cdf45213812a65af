"""A one-file checkpoint in memory for fuzzing, which is faster than a disk; disk errors are tested elsewhere."""

from __future__ import annotations

from transaxle.errors import refuse
from transaxle.formats.storage.storage import Listing, Storage


class Held(Storage):
    """A storage of one file (see `formats.storage.Storage`).

    Args:
        name: its name.
        data: its bytes.
    """

    path = single = ""

    def __init__(self, name: str, data: bytes) -> None:
        self.path = self.single = name
        self._data = data

    def listing(self, folder: str = "") -> Listing:
        """Return the only file."""
        return Listing(() if folder else (self.path,), (), {})

    def names(self) -> tuple[str, ...]:
        """Return the only name."""
        return (self.path,)

    def size(self, name: str) -> int:
        """Return the bytes of the file; any other name is refused as missing."""
        if name != self.path:
            raise refuse("IO", "no such file", file=name)
        return len(self._data)

    def version(self, name: str) -> str:
        """Return a constant version, because the file never changes."""
        return name

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Read bytes into a view; missing bytes are refused as CORRUPT, as on a disk."""
        view.cast("B")[:] = self.read(name, offset, view.nbytes)

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Return a range of bytes; missing bytes are refused as CORRUPT."""
        assert offset >= 0, "a negative offset"
        assert size >= 0, "a negative size"
        if offset + size > self.size(name):
            raise refuse("CORRUPT", "the file is truncated", file=name)
        return self._data[offset : offset + size]

    def recheck(self) -> None:
        """Do nothing: the file does not change."""

    def close(self) -> None:
        """Do nothing: no file is open."""
