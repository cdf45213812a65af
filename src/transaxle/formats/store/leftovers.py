"""Work in progress beside a target: claimed by one run, and what killed runs leave of it, removed once nobody uses it.

A run locks its hidden folder (`Claim`); the lock is released when the process ends.

A target can have two hidden neighbours, `.<name>.transaxle-partial` and `.<name>.transaxle-old`. The first is work in
progress, or the checkpoint that was replaced. The second is the checkpoint that was moved aside; if the target is
missing, it is the only one left, and is put back. A folder is never removed while a process holds its lock, nor if its
contents are not a checkpoint's: whoever put them there must remove them.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import asdict, replace

from transaxle.errors import TransaxleError, refuse, without_secrets
from transaxle.formats.registry import SCRATCH, is_one_file
from transaxle.formats.storage.local import storage_error
from transaxle.formats.storage.storage import is_url
from transaxle.formats.store.place import (
    ITEMS,
    JOURNAL,
    OLD,
    OURS,
    PARTIAL,
    LocalFolder,
    make_durable,
    neighbour,
    strangers,
)
from transaxle.formats.store.service import S3, local_path, scheme

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
            raise storage_error(error, "making the folder for the unfinished work", str(self._path)) from error

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
    return _try_lock(fd, fcntl.LOCK_EX)


def joined(fd: int) -> bool | None:
    """Lock an open folder together with others: False if a process has it alone, None if there are no locks."""
    return _try_lock(fd, fcntl.LOCK_SH)


def _try_lock(fd: int, kind: int) -> bool | None:
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


_HASHED = re.compile(r"[0-9a-f]{64}")
"""Replaces a name that is too long to take our suffix."""
_IN_USE = "a live process is using it. Wait for that process, or end it."
_SHOWN = 3

Outcome = Literal["found", "removed", "put back", "kept"]


class Leftover(msgspec.Struct, frozen=True):
    """What a killed run left: beside its target a hidden folder, with unfinished work or the checkpoint it replaced; on
    S3 also an upload that was not completed.
    """

    path: str
    """Its path, or URL; that of an upload ends in `?uploadId=…`."""
    target: str
    """The target beside it."""
    what: str
    """A description, and whether the work can be continued."""
    nbytes: int
    """Bytes of the files in it."""
    outcome: Outcome = "found"
    """`found` as long as nothing was done with it; then `removed`, `put back` or `kept`."""
    why: str = ""
    """Why it was kept; empty for any other outcome."""

    def as_json(self) -> dict[str, Any]:
        """Return the leftover as plain JSON data."""
        return asdict(self)


def leftovers(path: str | os.PathLike[str]) -> tuple[Leftover, ...]:
    """Return the leftovers of killed runs beside a target, and directly inside it if it is a folder.

    Args:
        path: a target, which need not exist, a folder of targets, or a leftover itself; on S3 a URL, also of a bucket.

    Raises:
        Refused: UNSUPPORTED for a URL that is not S3's: other services have nothing of the kind.
        StorageError: IO.
    """
    typed = os.fspath(path)
    if is_url(typed):
        local = local_path(typed)
        if local is None and scheme(typed) in S3:
            return _orphans_at(typed)
        if local is None:
            hint = "The service removes parts of unfinished uploads, if its rules say so."
            message = "a killed run leaves no folders on a remote service"
            raise refuse("UNSUPPORTED", message, file=without_secrets(typed), hint=hint)
        typed = local
    if not typed or "\0" in typed:
        raise refuse("IO", f"{typed!r} is not a path", file=typed)
    try:
        hidden_folders = [leftover_at(leftover, target) for leftover, target in _candidates(typed)]
        return tuple(
            replace(leftover, outcome="kept", why=_IN_USE) if _locked(Path(leftover.path)) else leftover
            for leftover in hidden_folders
        )
    except OSError as error:
        raise storage_error(error, "looking for leftovers", typed) from error


def _orphans_at(target: str, *, uploads: bool = True) -> tuple[Leftover, ...]:
    from transaxle.formats.store.unfinished_uploads import orphans  # whoever writes into a folder needs no services

    return tuple(Leftover(each.url, each.target, each.what, each.nbytes) for each in orphans(target, uploads=uploads))


def _candidates(typed: str) -> Iterator[tuple[Path, Path]]:
    """Yield hidden folders with their targets."""
    place = Path(os.path.realpath(typed))
    named = OURS.fullmatch(place.name)
    if named and _is_folder(place):
        yield place, place.with_name(named[1])
        return
    if not place.parent.is_dir():
        raise refuse("IO", "no such file or folder", file=typed, system=FileNotFoundError)
    for ending in (PARTIAL, OLD):
        if place.name and _is_folder(hidden := neighbour(place, ending)):
            yield hidden, place
    if place.is_dir():
        for entry in sorted(os.scandir(place), key=lambda entry: entry.name):
            match = OURS.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path), place / match[1]


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def leftover_at(path: Path, target: Path) -> Leftover:
    """Describe a hidden folder.

    Args:
        path: the folder.
        target: its target.

    Raises:
        OSError: it cannot be read.
    """
    target_exists = os.path.lexists(target)
    scratch = path / SCRATCH
    if path.name.endswith(OLD):
        description = (
            "the checkpoint that was replaced" if target_exists else f"the checkpoint that was at {target}, moved aside"
        )
    elif not scratch.is_dir():
        description = (
            "the previous checkpoint, or a finished one that was not yet moved into place"
            if any(path.iterdir())
            else "empty"
        )
    elif finished := finished_in(scratch):
        description = f"unfinished work: {finished}, --resume continues it"
    else:
        description = "unfinished work, hardly begun"
    return Leftover(str(path), str(target), description, _size(path))


def finished_in(scratch: Path) -> str:
    """Say how much of unfinished work is finished, and could be continued; empty where nothing is.

    Raises:
        OSError: it cannot be read.
    """
    if written := _count_written(scratch / JOURNAL):
        return f"{written:,} tensors are written"
    done = _count_done(scratch / ITEMS)
    return f"{done:,} work items are done" if done else ""


def _count_written(journal: Path) -> int:
    """Count the tensors that a journal lists."""
    if not journal.is_file():
        return 0
    with journal.open("rb") as lines:
        return max(0, sum(bool(line.strip()) for line in lines) - 1)  # the first line says what it belongs to


def _count_done(items: Path) -> int:
    """Count the work items that have a result."""
    return sum(path.name.isdigit() for path in items.iterdir()) if items.is_dir() else 0


def _size(path: Path) -> int:
    """Return the bytes of all files in a folder, ignoring those that disappear meanwhile."""
    size = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                size += Path(folder, name).lstat().st_size
    return size


def sweep_beside(target: str) -> tuple[str, ...]:
    """Clean up beside a complete target; return a note on each leftover and its outcome.

    Raises:
        StorageError: IO.
    """
    notes = []
    if is_url(target) and local_path(target) is None:
        from transaxle.formats.store.unfinished_uploads import target_url

        place, found = target_url(target), _orphans_at(target, uploads=False)
    else:
        place, found = os.path.realpath(local_path(target) or target), leftovers(target)
    for leftover in found:
        if leftover.target == place:
            cleaned = clean(leftover) if leftover.outcome == "found" else leftover
            why = f": {cleaned.why}" if cleaned.why else ""
            notes.append(f"{cleaned.path}, left by a killed run ({cleaned.what}), was {cleaned.outcome}{why}")
    return tuple(notes)


def clean(leftover: Leftover) -> Leftover:
    """Remove a leftover, or put it back if it is the only checkpoint left.

    Returns:
        The leftover with its outcome.

    Raises:
        StorageError: IO.
    """
    if is_url(leftover.path):
        from transaxle.formats.store.unfinished_uploads import remove

        remove(leftover.path)
        return replace(leftover, outcome="removed")
    path, target = Path(leftover.path), Path(leftover.target)
    claim = Claim(neighbour(target, PARTIAL), leftover.target)
    try:
        created = claim.take()
    except TransaxleError as error:
        return replace(leftover, outcome="kept", why=f"{error.refusals[0].message}. {error.hint}")
    try:
        return _cleaned(leftover, path, target)
    except OSError as error:
        raise storage_error(error, "removing it", leftover.path) from error
    finally:
        if created:
            shutil.rmtree(neighbour(target, PARTIAL), ignore_errors=True)
        claim.release()


def discard(target: Path) -> None:
    """Delete a checkpoint: it is gone in one step, whatever happens while its files are deleted.

    What is left where that is killed counts as unfinished work.

    Args:
        target: its folder.

    Raises:
        UsageError: EXISTS where a run is writing this target.
        StorageError: IO.
    """
    hidden = neighbour(target, PARTIAL)
    claim = Claim(hidden, str(target))
    claim.take()
    try:
        shutil.rmtree(hidden / SCRATCH, ignore_errors=True)
        target.rename(hidden / SCRATCH)
        shutil.rmtree(hidden)
    except OSError as error:
        raise storage_error(error, "removing it", str(target)) from error
    finally:
        claim.release()


def _cleaned(leftover: Leftover, path: Path, target: Path) -> Leftover:
    """Remove or put back one leftover, whose target is now locked."""
    if path.name.endswith(OLD):
        if _HASHED.fullmatch(target.name):
            return replace(
                leftover, outcome="kept", why="its name does not tell which target it belongs to. Name the target."
            )
        if _locked(path):
            return replace(leftover, outcome="kept", why=_IN_USE)
        if not os.path.lexists(target):
            path.rename(target)
            make_durable(target.parent)
            return replace(leftover, outcome="put back")
    foreign = [] if (path / SCRATCH).is_dir() else strangers(LocalFolder(path))
    if is_one_file(target.name):
        foreign = [name for name in foreign if not is_one_file(name)]  # one file, which may have any name
    if foreign:
        rest = f" and {len(foreign) - _SHOWN:,} more" if len(foreign) > _SHOWN else ""
        why = (
            f"{', '.join(foreign[:_SHOWN])}{rest} belong to no checkpoint. Move these files elsewhere, or remove them "
            "by hand."
        )
        return replace(leftover, outcome="kept", why=why)
    shutil.rmtree(path)
    return replace(leftover, outcome="removed")


def _locked(path: Path) -> bool:
    """Tell whether a process holds the lock of a folder."""
    with opened(path) as fd:
        return lock(fd) is False  # where there are no locks, the claim on the target's own folder has decided it
