"""Writes byte ranges into the files of a checkpoint in the making, which another process has created."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from functools import partial
from pathlib import Path

from transaxle.formats.registry import SCRATCH
from transaxle.formats.staging.claim import FOLDER, busy, joined
from transaxle.formats.staging.staging import write_at
from transaxle.formats.storage.compiled import StepBatch
from transaxle.formats.storage.os_errors import failed
from transaxle.formats.storage.storage import Handles

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Writer:
    """Writes into the files of another process's staging folder.

    The folder is held open, and every file must lie in it: where it was removed and made anew, nothing is written.

    Args:
        folder: the hidden folder.
        sync: make what was written durable in `finish`.
        shared: join the claim of the run that has shared it (`Staging.share`): until this writer is closed, nobody
            commits, continues or removes the work, where the file system has locks.
        run: what `Staging.mark` has returned: a folder of another run, which has the same name, is refused. Empty: not
            looked at.

    Raises:
        UsageError: EXISTS if another run has claimed the folder.
        StorageError: IO if there is none.
    """

    def __init__(self, folder: str | Path, *, sync: bool, shared: bool = False, run: str = "") -> None:
        self._path = Path(folder)
        self._sync = sync
        self._dirty: set[str] = set()
        try:
            self._folder = os.open(self._path, FOLDER)
        except OSError as error:
            raise failed(error, "opening the folder for the unfinished work", str(self._path)) from error
        if shared and joined(self._folder) is False:
            os.close(self._folder)
            raise busy(str(self._path))
        try:
            if run:
                os.stat(f"{SCRATCH}/{run}", dir_fd=self._folder)
        except OSError as error:
            os.close(self._folder)
            raise failed(error, "looking for the run that this belongs to", str(self._path)) from error
        self._handles = Handles(self._open, lambda _, fd: os.close(fd))

    def pwrite(self, file: str, offset: int, view: memoryview) -> None:
        """Write a contiguous view into a file that is there.

        Raises:
            StorageError: NO_SPACE, IO.
        """
        with view.cast("B") as octets, self._handles.use(file) as fd:
            self._dirty.add(file)
            write_at(fd, octets, offset, file)

    def note_write(self, batch: StepBatch, file: str, offset: int, view: memoryview) -> None:
        """Write a contiguous view, in a batch; otherwise as `pwrite`."""
        if view.nbytes:
            self._dirty.add(file)
            batch.write(batch.opened(file, self._handles), offset, view, partial(self.pwrite, file, offset, view))

    def flush(self) -> None:
        """Make everything durable that was written here so far.

        Raises:
            StorageError: NO_SPACE, IO: what the system had held back.
        """
        for file in sorted(self._dirty) if self._sync else ():
            with self._handles.use(file) as fd:
                try:
                    os.fsync(fd)
                except OSError as error:
                    raise failed(error, "making it durable", file) from error
        self._dirty.clear()

    def put(self, file: str, data: bytes) -> None:
        """Create a small file, or replace it: whoever opens it finds all of this content, or the earlier one.

        Raises:
            StorageError: NO_SPACE, IO; also where its folder is not there.
        """
        making = f"{file}.{secrets.token_hex(8)}"
        try:
            fd = os.open(making, _CREATE, 0o666, dir_fd=self._folder)
            try:
                with memoryview(data) as octets:
                    write_at(fd, octets, 0, file)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(making, file, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError as error:
            raise failed(error, "creating it", file) from error

    def finish(self) -> None:
        """Make everything durable that was written here, and close the files; raises as `flush`."""
        try:
            self.flush()
        finally:
            self.close()

    def close(self) -> None:
        """Close the files, and leave the claim."""
        self._handles.close()
        with suppress(OSError):  # it is closed already
            os.close(self._folder)
        self._folder = -1

    def _open(self, file: str) -> int:
        try:
            return os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        except OSError as error:
            raise failed(error, "opening it", file) from error
