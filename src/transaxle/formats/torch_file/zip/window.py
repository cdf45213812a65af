"""A window of a file: usually all of it, sometimes the range of one torch archive among many."""

from __future__ import annotations

import msgspec

from transaxle.errors import TransaxleError, refuse
from transaxle.formats.storage.storage import Storage


class FileWindow(msgspec.Struct, frozen=True):
    """A range of a file."""

    storage: Storage
    file: str
    start: int
    """First byte of the range in the file."""
    size: int
    """Bytes of the range."""

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes of the range; what lies outside is CORRUPT."""
        if offset < 0 or size < 0 or offset + size > self.size:
            raise self.corrupt(f"bytes {offset} to {offset + size} lie outside its {self.size} bytes")
        return self.storage.read(self.file, self.start + offset, size)

    def corrupt(self, message: str) -> TransaxleError:
        """Build the error for a file that is damaged, or made to mislead."""
        return refuse("CORRUPT", message, file=self.file)

    def unsupported(self, message: str, hint: str = "") -> TransaxleError:
        """Build the error for a file of a kind that is not read."""
        return refuse("UNSUPPORTED", message, file=self.file, hint=hint)


def window(storage: Storage, file: str, start: int = 0, size: int | None = None) -> FileWindow:
    """Return the window of a whole file, or of a range of it.

    Raises:
        Refused: CORRUPT if the range does not lie in the file.
        StorageError: IO.
    """
    file_size = storage.size(file)
    size = file_size - start if size is None else size
    if start < 0 or size < 0 or start + size > file_size:
        raise refuse("CORRUPT", f"bytes {start} to {start + size} lie outside its {file_size} bytes", file=file)
    return FileWindow(storage, file, start, size)
