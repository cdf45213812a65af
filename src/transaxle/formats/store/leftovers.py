"""The hidden folders next to a conversion's target: locks on unfinished work, and removal of what killed runs leave
behind.

A run locks its hidden folder by a `Claim`; the lock is released when the process ends.

A target can have two hidden folders next to it, `.<name>.transaxle-partial` and `.<name>.transaxle-old`. The folder
`-partial` contains unfinished work, or a checkpoint that was replaced. The folder `-old` is a checkpoint that was moved
aside; if the target is missing, this folder is the only copy and is moved back. A hidden folder is never removed while
a process has its lock, nor if it contains anything but a checkpoint; in the second case the user must remove it.
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

from transaxle.arguments import PathLike, read_flag, read_path
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
    foreign_files,
    make_durable,
    neighbour,
)
from transaxle.formats.store.service import S3, local_path, scheme

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BUSY = "another run is writing this target"
_PATIENCE = 30.0
"""Time in seconds to wait until the last workers of a run have released their shared lock."""
_PAUSE = 0.05


class Claim:
    """The exclusive right of this process to change a hidden folder; it is a lock on the folder.

    Args:
        path: path of the hidden folder.
        typed: path of the target as the user typed it, for error messages.
        mode: permission bits of the folder, if the claim creates it; the umask applies.
    """

    def __init__(self, path: Path, typed: str, mode: int = 0o777) -> None:
        self._path = path
        self._typed = typed
        self._mode = mode
        self._fd: int | None = None
        self._pid = os.getpid()

    @property
    def is_taken(self) -> bool:
        """Whether this process has the lock on the folder."""
        return self._fd is not None

    def take(self, *, unlocked: bool = False) -> bool:
        """Create the folder if necessary, and lock it; return whether the folder was created.

        Args:
            unlocked: whether to accept an existing folder even if the file system has no locks.

        Raises:
            UsageError: with the code EXISTS if another run has the lock, or may be using the folder without a lock.
            StorageError: with the code IO if the folder cannot be created or locked.
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
        """Raise the error that `take` would raise, without changing anything.

        Raises the errors that `take` raises, and OSError.
        """
        with suppress(FileNotFoundError), open_folder(self._path) as fd:
            self._is_mine(fd, created=False, unlocked=unlocked)

    def share(self) -> None:
        """Turn the exclusive lock into a shared lock, which worker processes of the run can take as well
        (`lock_shared`).
        """
        if self._fd is not None and lock_shared(self._fd) is False:
            raise busy(self._typed)

    def take_back(self) -> None:
        """Wait until all worker processes have released the shared lock, and make the lock exclusive again.

        Raises:
            UsageError: with the code EXISTS if a worker does not release the lock in time.
        """
        end = time.monotonic() + _PATIENCE
        while self._fd is not None and lock(self._fd) is False:
            if time.monotonic() > end:
                message = "a worker of this run is still writing"
                raise refuse("EXISTS", message, file=self._typed, hint="Wait for that worker, or end it.")
            time.sleep(_PAUSE)

    def release(self) -> None:
        """Release the lock on the folder."""
        if self._fd is not None:
            if self._pid == os.getpid():  # after a fork, parent and child share one lock
                with suppress(OSError):
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = None

    def _is_mine(self, fd: int, created: bool, *, unlocked: bool) -> bool:
        """Lock an open folder; return False if the folder's path now leads to a different folder."""
        locked = lock(fd)
        if locked is False:
            raise busy(self._typed)
        if locked is None and not created and not unlocked:
            # If the file system has no locks, only the run that created the folder, or a run that resumes it, may use
            # the folder.
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
    """Return the error for a target whose hidden folder is locked by another run."""
    return refuse("EXISTS", _BUSY, file=file, hint="Wait for that run, or end it.")


def lock(fd: int) -> bool | None:
    """Lock an open folder exclusively; return False if a process has the lock already, None if the file system has no
    locks.
    """
    return _try_lock(fd, fcntl.LOCK_EX)


def lock_shared(fd: int) -> bool | None:
    """Take a shared lock on an open folder; return False if a process has the exclusive lock, None if the file system
    has no locks.
    """
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
def open_folder(folder: Path) -> Iterator[int]:
    """Return a context manager whose value is the descriptor of a folder; a symbolic link is refused.

    Raises:
        OSError: if the folder is missing, a file or a symbolic link.
    """
    fd = os.open(folder, FOLDER)
    try:
        yield fd
    finally:
        os.close(fd)


def _mkdir(path: Path, mode: int) -> bool:
    """Create a folder; return False if the folder exists already."""
    try:
        path.mkdir(mode)
    except FileExistsError:
        return False
    return True


_HASHED = re.compile(r"[0-9a-f]{64}")
"""Pattern of the hash that replaces a target's name in the name of a hidden folder, if the target's name is too
long."""
_IN_USE = "a live process is using it. Wait for that process, or end it."
_SHOWN = 3

Outcome = Literal["found", "removed", "put back", "kept"]


class Leftover(msgspec.Struct, frozen=True):
    """A leftover of a killed run: a hidden folder with unfinished work or a replaced checkpoint, or an upload that is
    still open.
    """

    path: str
    """Path or URL of the leftover; for an open upload the URL ends in `?uploadId=…`."""
    target: str
    """Path or URL of the target to which the leftover belongs."""
    what: str
    """Description of the leftover for the user, which states whether its work can be resumed."""
    nbytes: int
    """Total size of the leftover's files in bytes."""
    outcome: Outcome = "found"
    """What was done with the leftover: `removed`, `put back` or `kept`; before cleaning it is `found`."""
    why: str = ""
    """Reason why the leftover was kept; empty if it was not kept."""

    def as_json(self) -> dict[str, Any]:
        """Return the leftover as plain JSON data."""
        return asdict(self)


def leftovers(path: str | os.PathLike[str]) -> tuple[Leftover, ...]:
    """Return the leftovers of killed runs next to a target and, if the path is a folder, directly inside it.

    Args:
        path: path of a target (which need not exist), of a folder of targets, or of a leftover; on S3 a URL, also that
            of a bucket.

    Raises:
        Refused: with the code UNSUPPORTED for a URL of a service other than S3, because no other service can have
            leftovers.
        StorageError: with the code IO if a folder or service cannot be read.
    """
    typed = os.fspath(path)
    if is_url(typed):
        local = local_path(typed)
        if local is None and scheme(typed) in S3:
            return _orphans_at(typed)
        if local is None:
            hint = "The service itself removes the parts of unfinished uploads, if its lifecycle rules say so."
            message = "a killed run leaves no folders on a remote service"
            raise refuse("UNSUPPORTED", message, file=without_secrets(typed), hint=hint)
        typed = local
    if not typed or "\0" in typed:
        raise refuse("IO", f"{typed!r} is not a path", file=typed)
    try:
        hidden_folders = [leftover_at(leftover, target) for leftover, target in _candidates(typed)]
        return tuple(
            replace(leftover, outcome="kept", why=_IN_USE) if _is_locked(Path(leftover.path)) else leftover
            for leftover in hidden_folders
        )
    except OSError as error:
        raise storage_error(error, "looking for leftovers", typed) from error


def _orphans_at(target: str, *, uploads: bool = True) -> tuple[Leftover, ...]:
    # this module is imported late, because local targets need no service
    from transaxle.formats.store.unfinished_uploads import orphans

    return tuple(Leftover(each.url, each.target, each.what, each.nbytes) for each in orphans(target, uploads=uploads))


def _candidates(typed: str) -> Iterator[tuple[Path, Path]]:
    """Yield `(hidden folder, target of the hidden folder)` for the hidden folders at a path, next to the path, and
    inside it.
    """
    place = Path(os.path.realpath(typed))
    own_match = OURS.fullmatch(place.name)
    if own_match and _is_folder(place):
        yield place, place.with_name(own_match[1])
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
    """Describe the leftover in a hidden folder.

    Args:
        path: path of the hidden folder.
        target: path of the target to which the hidden folder belongs.

    Raises:
        OSError: if the hidden folder cannot be read.
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
    elif finished := describe_progress(scratch):
        description = f"unfinished work: {finished}, --resume continues it"
    else:
        description = "unfinished work, hardly begun"
    return Leftover(str(path), str(target), description, _size(path))


def describe_progress(scratch: Path) -> str:
    """Describe how much of the unfinished work is done and can be resumed; empty if nothing is done.

    Raises:
        OSError: if the hidden folder cannot be read.
    """
    if tensor_count := _count_written(scratch / JOURNAL):
        return f"{tensor_count:,} tensors are written"
    item_count = _count_done(scratch / ITEMS)
    return f"{item_count:,} work items are done" if item_count else ""


def _count_written(journal: Path) -> int:
    """Return the number of tensors that are written according to a journal, the list of an unfinished conversion's
    finished tensors.
    """
    if not journal.is_file():
        return 0
    with journal.open("rb") as lines:
        # the first line of a journal describes the conversion
        return max(0, sum(bool(line.strip()) for line in lines) - 1)


def _count_done(items: Path) -> int:
    """Return the number of work items (parts of a conversion) that have a result."""
    return sum(path.name.isdigit() for path in items.iterdir()) if items.is_dir() else 0


def _size(path: Path) -> int:
    """Return the total size in bytes of the files in a folder, ignoring files that disappear meanwhile."""
    size = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                size += Path(folder, name).lstat().st_size
    return size


def clean(path: PathLike, *, remove: bool = True) -> tuple[Leftover, ...]:
    """Remove files that killed runs have left beside a target, or directly inside a folder of targets.

    If a run died while it replaced a checkpoint, the old checkpoint is restored. On S3, leftovers are incomplete
    uploads and unfinished work of several workers; a run that still uses them fails.

    Args:
        path: a target (which need not exist), a folder of targets, or a leftover; on S3, a URL, which may be that of a
            bucket.
        remove: whether to remove the leftovers; if False, they are only listed.

    Returns:
        All leftovers, each with an `outcome`: `removed`; `put back`; `found` if `remove` is False; or `kept`, with the
        reason in `why`: a process uses it, or it contains files that belong to no checkpoint.

    Raises:
        Refused: with the code UNSUPPORTED if the path is the URL of a service other than S3.
        StorageError: with the code IO if a file cannot be removed.
    """
    read_flag("remove", remove)
    all_leftovers = leftovers(read_path("path", path))
    if not remove:
        return all_leftovers
    return tuple(clean_leftover(each) if each.outcome == "found" else each for each in all_leftovers)


def clean_target(target: str) -> tuple[str, ...]:
    """Remove the leftovers next to a finished target; return one note on each leftover, which states what was done with
    it.

    Raises:
        StorageError: with the code IO if a leftover cannot be removed.
    """
    notes = []
    if is_url(target) and local_path(target) is None:
        from transaxle.formats.store.unfinished_uploads import target_url

        place, candidates = target_url(target), _orphans_at(target, uploads=False)
    else:
        place, candidates = os.path.realpath(local_path(target) or target), leftovers(target)
    for leftover in candidates:
        if leftover.target == place:
            cleaned = clean_leftover(leftover) if leftover.outcome == "found" else leftover
            why = f": {cleaned.why}" if cleaned.why else ""
            notes.append(f"{cleaned.path}, left by a killed run ({cleaned.what}), was {cleaned.outcome}{why}")
    return tuple(notes)


def clean_leftover(leftover: Leftover) -> Leftover:
    """Remove a leftover; if it is the only copy of a checkpoint, move it back to its target instead.

    Returns:
        The leftover, with what was done in `outcome`.

    Raises:
        StorageError: with the code IO if the leftover cannot be removed or moved.
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
        return _clean_locked(leftover, path, target)
    except OSError as error:
        raise storage_error(error, "removing it", leftover.path) from error
    finally:
        if created:
            shutil.rmtree(neighbour(target, PARTIAL), ignore_errors=True)
        claim.release()


def discard(target: Path) -> None:
    """Delete a checkpoint: the folder first disappears atomically, then the files are deleted.

    Files that a killed deletion leaves behind count as unfinished work.

    Args:
        target: path of the checkpoint's folder.

    Raises:
        UsageError: with the code EXISTS if a run is writing to the folder.
        StorageError: with the code IO if the checkpoint cannot be deleted.
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


def _clean_locked(leftover: Leftover, path: Path, target: Path) -> Leftover:
    """Remove a leftover or move it back, while this process has the lock of the leftover's target."""
    if path.name.endswith(OLD):
        if _HASHED.fullmatch(target.name):
            return replace(
                leftover, outcome="kept", why="its name does not tell which target it belongs to. Name the target."
            )
        if _is_locked(path):
            return replace(leftover, outcome="kept", why=_IN_USE)
        if not os.path.lexists(target):
            path.rename(target)
            make_durable(target.parent)
            return replace(leftover, outcome="put back")
    foreign = [] if (path / SCRATCH).is_dir() else foreign_files(LocalFolder(path))
    if is_one_file(target.name):
        foreign = [name for name in foreign if not is_one_file(name)]  # the files of a checkpoint may have any name
    if foreign:
        more = f" and {len(foreign) - _SHOWN:,} more" if len(foreign) > _SHOWN else ""
        why = (
            f"{', '.join(foreign[:_SHOWN])}{more} belong to no checkpoint. Move these files elsewhere, or remove them "
            "by hand."
        )
        return replace(leftover, outcome="kept", why=why)
    shutil.rmtree(path)
    return replace(leftover, outcome="removed")


def _is_locked(path: Path) -> bool:
    """Return whether a process has the lock of a folder."""
    with open_folder(path) as fd:
        # `lock` returns None if the file system has no locks; then only the lock of the target counts
        return lock(fd) is False
