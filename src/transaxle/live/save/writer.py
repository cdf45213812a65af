"""Writes one rank's byte ranges into the files of a checkpoint, which rank 0 has created."""

from __future__ import annotations

import os
from pathlib import Path

from transaxle.formats.staging.staging import write_at
from transaxle.formats.storage.handles import Handles
from transaxle.formats.storage.os_errors import failed


class Writer:
    """Writes into the files of another process's staging folder, by path.

    Args:
        folder: the hidden folder.
        sync: make what was written durable in `finish`.
    """

    def __init__(self, folder: str, *, sync: bool) -> None:
        self._folder = Path(folder)
        self._sync = sync
        self._dirty: set[str] = set()
        self._handles = Handles(self._open, lambda _, fd: os.close(fd))

    def pwrite(self, file: str, offset: int, view: memoryview) -> None:
        """Write a contiguous view into a file that is there.

        Raises:
            StorageError: NO_SPACE, IO.
        """
        with view.cast("B") as octets, self._handles.use(file) as fd:
            self._dirty.add(file)
            write_at(fd, octets, offset, file)

    def finish(self) -> None:
        """Make everything durable that was written here, and close the files.

        Raises:
            StorageError: NO_SPACE, IO: what the system had held back.
        """
        for file in sorted(self._dirty) if self._sync else ():
            with self._handles.use(file) as fd:
                try:
                    os.fsync(fd)
                except OSError as error:
                    raise failed(error, "making it durable", file) from error
        self._handles.close()

    def _open(self, file: str) -> int:
        try:
            return os.open(self._folder / file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise failed(error, "opening it", file) from error
