"""Claims: the lock of one run on the hidden folder of a target, released when the process ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from transaxle.errors import TransaxleError, refuse
from transaxle.formats.storage.os_errors import failed

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BUSY = "another run is writing this target"
_PATIENCE = 30.0
"""Seconds in which the last workers of a run that shared its claim let go of it."""
_PAUSE = 0.05


class Claim:
    """The exclusive right of this process to change a folder.

    Args:
        path: the hidden folder.
        typed: the target as the user typed it, for errors.
        mode: of the folder where it is created, less what the umask takes away.
    """

    def __init__(self, path: Path, typed: str, mode: int = 0o777) -> None:
        self._path = path
        self._typed = typed
        self._mode = mode
        self._fd: int | None = None
        self._pid = os.getpid()

    @property
    def taken(self) -> bool:
        """Whether this process has the lock."""
        return self._fd is not None

    def take(self, *, unlocked: bool = False) -> bool:
        """Create the folder (True) or find it, and lock it; if it is removed meanwhile, it is created again.

        Args:
            unlocked: accept an existing folder even where the file system has no locks.

        Raises:
            UsageError: EXISTS if another run has it, or may have it.
            StorageError: IO.
        """
        try:
            while True:
                created = _mkdir(self._path, self._mode)
                try:
                    fd = os.open(self._path, FOLDER)
                except FileNotFoundError:
                    continue
                try:
                    if self._is_mine(fd, created, unlocked=unlocked):
                        self._fd = fd
                        return created
                except BaseException:
                    os.close(fd)
                    raise
                os.close(fd)
        except OSError as error:
            raise failed(error, "making the folder for the unfinished work", str(self._path)) from error

    def look(self, *, unlocked: bool = False) -> None:
        """Refuse what `take` would refuse, without changing anything.

        Raises as `take`, and OSError.
        """
        with suppress(FileNotFoundError), opened(self._path) as fd:
            self._is_mine(fd, created=False, unlocked=unlocked)

    def share(self) -> None:
        """Let other processes join the claim (`joined`); whoever does not belong to this run stays locked out."""
        if self._fd is not None and joined(self._fd) is False:
            raise busy(self._typed)

    def take_back(self) -> None:
        """Wait until those that joined have left, and have the claim alone again.

        Raises:
            UsageError: EXISTS if somebody stays.
        """
        end = time.monotonic() + _PATIENCE
        while self._fd is not None and lock(self._fd) is False:
            if time.monotonic() > end:
                message = "a worker of this run is still writing"
                raise refuse("EXISTS", message, file=self._typed, hint="Wait for that worker, or end it.")
            time.sleep(_PAUSE)

    def release(self) -> None:
        """Release the lock."""
        if self._fd is not None:
            if self._pid == os.getpid():  # processes forked from this one have the lock too, as long as it has
                with suppress(OSError):
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = None

    def _is_mine(self, fd: int, created: bool, *, unlocked: bool) -> bool:
        """Lock an open folder; False if its name now leads to another folder."""
        locked = lock(fd)
        if locked is False:
            raise busy(self._typed)
        if locked is None and not created and not unlocked:
            # No locks on this file system: only the one who made the folder, or says that it resumes, may have it.
            hint = f"If no run is writing this target, remove {self._path} or use --resume."
            raise refuse("EXISTS", f"{_BUSY}, or has died while doing so", file=self._typed, hint=hint)
        opened_folder = os.fstat(fd)
        if not created and opened_folder.st_uid != os.geteuid():
            raise refuse("IO", "the hidden folder belongs to another user", file=str(self._path))
        try:
            folder_by_name = os.lstat(self._path)
        except FileNotFoundError:
            return False
        return (folder_by_name.st_dev, folder_by_name.st_ino) == (opened_folder.st_dev, opened_folder.st_ino)


def busy(file: str) -> TransaxleError:
    """Return what is raised where another run has the claim."""
    return refuse("EXISTS", _BUSY, file=file, hint="Wait for that run, or end it.")


def lock(fd: int) -> bool | None:
    """Lock an open folder until it is closed: False if another process has the lock, None if there are no locks."""
    return _locked(fd, fcntl.LOCK_EX)


def joined(fd: int) -> bool | None:
    """Lock an open folder together with others: False if a process has it alone, None if there are no locks."""
    return _locked(fd, fcntl.LOCK_SH)


def _locked(fd: int, kind: int) -> bool | None:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """Open a folder that must not be a link, to lock it.

    Raises:
        OSError: it is missing, a file or a link.
    """
    fd = os.open(folder, FOLDER)
    try:
        yield fd
    finally:
        os.close(fd)


def _mkdir(path: Path, mode: int) -> bool:
    """Make a folder; False if it is there already."""
    try:
        path.mkdir(mode)
    except FileExistsError:
        return False
    return True
