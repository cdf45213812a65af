"""A checkpoint folder in memory for fuzzing, which is faster than a disk; disk errors are tested elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from transaxle.errors import refuse
from transaxle.formats.storage.storage import Listing, Storage


class HeldFolder(Storage):
    """A storage in memory (see `formats.storage.Storage`).

    Args:
        files: name -> bytes; names may have folders in them.
    """

    path = "memory"
    single = None

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    def listing(self, folder: str = "") -> Listing:
        """Return the names directly inside a folder."""
        prefix = f"{folder}/" if folder else ""
        inside = [name.removeprefix(prefix) for name in sorted(self._files) if name.startswith(prefix)]
        folders = dict.fromkeys(name.partition("/")[0] for name in inside if "/" in name)
        return Listing(tuple(name for name in inside if "/" not in name), tuple(folders), {})

    def names(self) -> tuple[str, ...]:
        """Return the names of the files at the top level."""
        return self.listing().names

    def size(self, name: str) -> int:
        """Return the bytes of a file; a missing file is refused as in a real folder."""
        if name not in self._files:
            raise refuse("IO", "no such file", file=name)
        return len(self._files[name])

    def version(self, name: str) -> str:
        """Return a constant version, because files never change."""
        return name

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Read bytes into a view."""
        view.cast("B")[:] = self.read(name, offset, view.nbytes)

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Return a range of bytes, which must be complete."""
        assert offset >= 0, "a negative offset"
        self.size(name)
        data = self._files[name][offset : offset + size]
        assert len(data) == size, "the reader did not look at the size"
        return data

    def recheck(self) -> None:
        """Do nothing: files do not change."""

    def close(self) -> None:
        """Do nothing: no file is open."""
