"""When the bytes of each file were written, for those who ask."""

from __future__ import annotations

import threading
import time
from typing import cast

import msgspec

from transaxle.formats.storage.compiled import StepBatch
from transaxle.move.endpoint import NotingWritable, Writable


class FileTime(msgspec.Struct, frozen=True):
    """When one file was written, in seconds since the first byte of all."""

    first: float
    """When its first bytes were given to the system."""
    last: float
    """When its last bytes had been."""
    bytes: int
    """How many were written."""


class FileTimes:
    """Notes when the bytes of files are written, by several threads."""

    def __init__(self) -> None:
        self.files: dict[str, FileTime] = {}
        """File -> when it was written."""
        self._begin: float | None = None
        self._lock = threading.Lock()

    def watching(self, files: Writable) -> Writable:
        """Return the same files; what is written into them is noted here."""
        return (_WatchedInBatches if hasattr(files, "note_write") else _Watched)(files, self)

    def add(self, file: str, first: float, last: float, count: int) -> None:
        """Note that bytes of a file were written between two moments."""
        with self._lock:
            begin = self._begin = first if self._begin is None else min(self._begin, first)
            known = self.files.get(file)
            first, last = max(first - begin, 0.0), last - begin
            if known is not None:
                first, last, count = min(known.first, first), max(known.last, last), known.bytes + count
            self.files[file] = FileTime(first, last, count)


class _Watched:
    """Files that note when they are written."""

    def __init__(self, files: Writable, times: FileTimes) -> None:
        self._files = files
        self._times = times
        self.ordered = getattr(files, "ordered", False)

    def pwrite(self, file: str, offset: int, view: memoryview) -> None:
        """See `Writable`."""
        begin = time.monotonic()
        self._files.pwrite(file, offset, view)
        self._times.add(file, begin, time.monotonic(), len(view))


class _WatchedInBatches(_Watched):
    """Files that note when they are written, in batches too."""

    def note_write(self, batch: StepBatch, file: str, offset: int, view: memoryview) -> None:
        """See `NotingWritable`."""
        begin, size = time.monotonic(), len(view)
        cast("NotingWritable", self._files).note_write(batch, file, offset, view)
        batch.then(lambda: self._times.add(file, begin, time.monotonic(), size))
