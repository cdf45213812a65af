"""Writes a local checkpoint into a hidden folder and moves it into place; also opens and creates checkpoints by path or
URL.

**Staging**: a checkpoint is written next to its target and moved to the target as a whole; until then the target is
unchanged.

All files are written to a hidden folder next to the target. A commit makes this folder durable (files, folders, and the
rename itself), and renames it atomically to the target. A process that is killed leaves the target unchanged. A run
that resumes continues with the hidden folder; any other run is refused if the hidden folder contains finished work,
unless the run overwrites. The name of the hidden folder is always the same, so leftovers do not accumulate, and a lock
on the folder excludes a second run.

A `Writer` writes byte ranges into files that the `Staging` of another process has created.

**Locations**: only this module decides whether a path or URL is local or on a service.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

from transaxle.arguments import Overwrite
from transaxle.errors import refuse, without_secrets
from transaxle.formats.registry import SCRATCH
from transaxle.formats.storage.copier import Steps
from transaxle.formats.storage.local import LocalStorage, storage_error
from transaxle.formats.storage.storage import Handles, Storage, is_url, split_name
from transaxle.formats.store.access import PRIVATE_FILE, PRIVATE_FOLDER, copy_access, is_empty
from transaxle.formats.store.leftovers import (
    FOLDER,
    Claim,
    busy,
    describe_progress,
    leftover_at,
    lock,
    lock_shared,
    open_folder,
)
from transaxle.formats.store.place import TargetPlace, make_durable, reserve, several_files
from transaxle.formats.store.service import HUB, S3, local_path, scheme

if TYPE_CHECKING:
    from transaxle.formats.store.shared_upload import SharedUpload
    from transaxle.formats.store.upload import Upload


_MAKING = "making the folder for the unfinished work"
_CREATE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_REOPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class Staging:
    """A local checkpoint that is being written; if the context ends without `commit`, nothing is left behind.

    Several threads may write to one `Staging` at the same time. After `commit` the target contains the new checkpoint
    and no file of the replaced checkpoint.

    Args:
        target: path of a folder, or of one file if the path ends in `.safetensors`, `.bin`, `.pt` or `.pth`.
        overwrite: whether to replace an existing checkpoint, which stays readable until the new checkpoint is complete.
            `everything` also deletes all other files in the checkpoint's folder; otherwise a folder with other files is
            refused.
        resume: whether to continue the work of an earlier run, and to keep this run's work if it also fails.
        sync: whether to make all files durable before the rename. Without syncing, a power failure may leave damaged
            files.

    Raises:
        UsageError: with the code EXISTS if the target exists and may not be replaced, or another run is writing to it.
        StorageError: with the code IO if the parent folder is missing or not writable.
    """

    ordered: Literal[False] = False
    """False, because the bytes of a file may come in any order, and from several threads."""

    def __init__(
        self, target: str | os.PathLike[str], *, overwrite: Overwrite = False, resume: bool = False, sync: bool = True
    ) -> None:
        self._place = TargetPlace(target, overwrite=overwrite)
        self._resume = resume
        self._overwrite = overwrite
        self._sync = sync
        self._sizes: dict[str, int] = {}
        self._unsynced: set[str] = set()
        self._unsynced_lock = Lock()
        self._handles = Handles(self._reopen, self._close)
        replaced = self._place.replaced
        self._folder_mode = 0o777 if replaced is None else PRIVATE_FOLDER
        self._file_mode = 0o666 if replaced is None or is_empty(replaced) else PRIVATE_FILE
        self._claim = Claim(self._place.partial, self._place.typed, self._folder_mode)
        self.found: tuple[str, ...] = ()
        """Notes about the leftovers of killed runs, which state what was done with the leftovers."""
        self._given_up = False

    @property
    def path(self) -> Path:
        """The hidden folder that contains the files until the commit."""
        return self._place.partial

    @property
    def scratch(self) -> Path:
        """Folder for files that only a resumed run needs, such as the journal (the list of finished tensors)."""
        return self.path / SCRATCH

    @property
    def single(self) -> str | None:
        """Name of the target if it is a single file; then exactly one file can be written, under any name."""
        return self._place.single

    @property
    def moved_aside(self) -> bool:
        """Whether a run was killed while it replaced the target; entering the context moves the replaced checkpoint
        back.
        """
        return self._place.moved_aside

    def look(self, folder: Mapping[str, int], file: Mapping[str, int]) -> None:
        """Raise the errors that entering the context and calling `prepare` would raise, without creating or removing
        anything.

        Args:
            folder: maps file name to size, if the target is a folder.
            file: maps file name to size, if the target is a single file.

        Raises the errors of `__enter__` and of `prepare`.
        """
        files = folder if self.single is None else file
        if self.single and len(files) > 1:
            raise several_files(self._place.typed)
        self._place.foresee()
        with _as_storage_error(_MAKING, str(self.path)):
            self._claim.look(unlocked=self._resume)
            self._refuse_unfinished()
            self._place.check_writable()
        with _as_storage_error("looking up the free space", str(self.path)):
            freed = sum(path.lstat().st_blocks * 512 for path in self.path.rglob("*"))
            self._check_space(sum(files.values()), self.path.parent, freed)

    def __enter__(self) -> Self:
        created = False
        try:
            with _as_storage_error(_MAKING, str(self.path)):
                created = self._claim.take(unlocked=self._resume)
                if not created and self._folder_mode == PRIVATE_FOLDER:
                    self.path.chmod(PRIVATE_FOLDER)
                self.found = self._describe_leftovers(created=created)
                self._refuse_unfinished()
                self._place.recover()
                self._place.check(
                    "" if created else f" {self.path} was left by another run: transaxle clean removes it."
                )
                if not self._resume or not self.scratch.is_dir():
                    _empty(self.path)
                self.scratch.mkdir(exist_ok=True)
        except BaseException:
            if created:
                self._place.sweep()
            self._claim.release()
            raise
        return self

    def _refuse_unfinished(self) -> None:
        """Refuse to discard finished work of a different run, unless the user chose to overwrite or to resume."""
        finished = "" if self._resume or self._overwrite else describe_progress(self.scratch)
        if finished:
            clean = f"transaxle clean {shlex.quote(self._place.typed)}"
            hint = f"Continue the work with its own options and --resume (resume=True), or remove it:  {clean}"
            message = f"beside the target is unfinished work: {finished}"
            raise refuse("EXISTS", message, file=self._place.typed, hint=hint)

    def _describe_leftovers(self, *, created: bool) -> tuple[str, ...]:
        """Return notes about the leftovers of an earlier run; called before anything is done with these leftovers."""
        place, notes = self._place, []
        if os.path.lexists(place.old):
            leftover = leftover_at(place.old, place.target)
            fate = "removed" if os.path.lexists(place.target) else "put back"
            notes.append(f"{leftover.path}, left by a killed run ({leftover.what}), was {fate}")
        if not created and not (self._resume and self.scratch.is_dir()):
            leftover = leftover_at(place.partial, place.target)
            notes.append(f"{leftover.path}, left by a killed run ({leftover.what}), was removed")
        return tuple(notes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._claim.is_taken:
            return
        self._given_up = True
        self._handles.close()
        if not self._resume or not self.scratch.is_dir():
            self._place.sweep()
        self._claim.release()

    def mark(self) -> str:
        """Create a marker file that identifies this run's folder for a `Writer`, and return its name.

        Raises:
            StorageError: with the code NO_SPACE on a full disk; with the code IO for other failures.
        """
        run = f"run-{os.urandom(8).hex()}"
        with _as_storage_error(_MAKING, str(self.path)):
            (self.scratch / run).touch()
        return run

    def share(self) -> None:
        """Let other processes write into the prepared files, each with a `Writer`, which shares this run's lock.

        Raises:
            UsageError: with the code EXISTS if a different run took the lock meanwhile.
        """
        self._claim.share()

    def take_back(self) -> None:
        """Wait until the processes that share the lock have closed their writers, then exclude all writers.

        Raises:
            UsageError: with the code EXISTS if a process does not close its writer in time, or a different run took the
                lock meanwhile.
        """
        self._claim.take_back()

    def prepare(self, files: Mapping[str, int]) -> frozenset[str]:
        """Create all files whose sizes are known, and reserve disk space for them if the file system can.

        Args:
            files: maps each file name (`a` or `folder/a`) to the size of the file in bytes.

        Returns:
            The names of the files that an earlier run created with exactly this size; they still contain the bytes that
            this run wrote.

        Raises:
            Refused: with the code PATH_ESCAPE for a name that leads out of the target; with the code UNSUPPORTED for
                several files with a single-file target.
            StorageError: with the code NO_SPACE on a full disk; with the code IO for other failures.
        """
        paths = {name: self._path(name) for name in files}
        self._remove_others(frozenset(paths.values()))
        with _as_storage_error("looking up the free space", str(self.path)):
            allocated = sum(path.stat().st_blocks * 512 for path in paths.values() if path.is_file())
            self._check_space(sum(files.values()), self.path, allocated)
        reused = {name for name, size in files.items() if self._create(name, paths[name], size)}
        return frozenset(reused)

    def _check_space(self, needed: int, folder: Path, freed: int) -> None:
        """Refuse files for which there is not enough space, before any space is reserved, because on some file systems
        reserving takes memory.

        Some FUSE file systems report a total size of 0 bytes; on them the check is skipped.
        """
        space = shutil.disk_usage(folder)
        free = space.free + freed
        if space.total and needed > free:
            raise refuse(
                "NO_SPACE",
                f"{needed:,} bytes are needed, {free:,} are free",
                file=self._place.typed,
                hint="Free some space, or choose another place.",
            )

    def pwrite(self, file: str, offset: int, view: memoryview) -> None:
        """Write a contiguous view into a prepared file.

        Raises:
            StorageError: with the code NO_SPACE on a full disk; with the code IO for other failures.
        """
        if not view.nbytes:
            return
        self._mark(file, offset, view)
        with view.cast("B") as octets, self._handles.use(file) as fd:
            write_at(fd, octets, offset, file)

    def add_write(self, steps: Steps, file: str, offset: int, view: memoryview) -> None:
        """Add a write of a contiguous view to the list `steps`; the errors and arguments are those of `pwrite`."""
        if view.nbytes:
            self._mark(file, offset, view)
            steps.write(steps.open_file(file, self._handles), offset, view, partial(self.pwrite, file, offset, view))

    def _mark(self, file: str, offset: int, view: memoryview) -> None:
        """Mark a file as not durable, after checking that the written bytes are inside the file."""
        if offset < 0 or offset + view.nbytes > self._sizes[file]:
            raise ValueError(
                f"{file}: bytes {offset} to {offset + view.nbytes} lie outside its {self._sizes[file]} bytes"
            )
        with self._unsynced_lock:
            self._unsynced.add(file)

    def write(self, file: str, data: bytes) -> None:
        """Create a whole file with the given content; used for files whose size was not known when `prepare` was
        called.

        Raises:
            Refused: with the code PATH_ESCAPE for a file name that leads out of the target.
            StorageError: with the code NO_SPACE on a full disk; with the code IO for other failures.
        """
        self._create(file, self._path(file), len(data))
        self.pwrite(file, 0, memoryview(data))

    def flush(self, file: str) -> None:
        """Make a file durable and close it; called when the file is complete, so that `commit` need not wait for it.

        Raises:
            StorageError: with the code NO_SPACE on a full disk; with the code IO for other failures.
        """
        with self._unsynced_lock:
            dirty = file in self._unsynced
            self._unsynced.discard(file)
        if dirty and self._sync:
            with self._handles.use(file) as fd, _as_storage_error("making it durable", file):
                os.fsync(fd)
        self._handles.drop(file)

    def commit(self) -> None:
        """Make all files durable and move the checkpoint to its target. All threads must have finished writing.

        Raises:
            UsageError: with the code EXISTS if the target appeared in the meantime.
            StorageError: with the code NO_SPACE on a full disk; with the code IO for other failures, also if a file was
                removed or changed its size meanwhile.
        """
        self._place.check()
        for file in sorted(self._sizes):
            self.flush(file)
        self._handles.close()
        folders = {self.path}
        for file, size in self._sizes.items():
            path = self._path(file)
            folders |= {folder for folder in path.parents if self.path in folder.parents}
            with _as_storage_error("reading its status before the end", file):
                if path.lstat().st_size != size:
                    raise refuse("IO", f"the file should have {size} bytes; another program has changed it", file=file)
        with _as_storage_error("removing the journal", str(self.scratch)):
            shutil.rmtree(self.scratch)
        finished = self._path(next(iter(self._sizes))) if self.single else self.path
        if os.path.lexists(self._place.target):
            with _as_storage_error("giving it the access of what it replaces", self._place.typed):
                copy_access(finished, self._place.target)
        if self._sync:
            for folder in sorted(folders, reverse=True):
                make_durable(folder)
        # The exchange renames the replaced checkpoint to the hidden folder's name; the lock protects it until it is
        # removed.
        with _lock_if_exists(self._place.target):
            self._place.publish(finished)
            if self._sync:
                make_durable(self.path.parent)
            self._place.sweep()
        self._claim.release()

    def _path(self, name: str) -> Path:
        parts = split_name(name)
        if parts[0] == SCRATCH:
            raise refuse("PATH_ESCAPE", f"the name {SCRATCH} is reserved", file=name)
        return self.path.joinpath(*parts)

    def _create(self, name: str, path: Path, size: int) -> bool:
        """Create a file, or reuse an existing file of the same size; return whether the file was reused."""
        if self.single and self._sizes.keys() - {name}:
            raise several_files(self._place.typed)
        with _as_storage_error(f"creating it with {size} bytes", name):
            path.parent.mkdir(parents=True, exist_ok=True)
            reused = path.is_file() and path.lstat().st_size == size and name not in self._sizes
            fd = os.open(path, _CREATE | (0 if reused else os.O_TRUNC), self._file_mode)
            try:
                if size:
                    reserve(fd, size)
                os.ftruncate(fd, size)
            finally:
                os.close(fd)
        self._sizes[name] = size
        with self._unsynced_lock:
            self._unsynced.add(name)
        return reused

    def _reopen(self, name: str) -> int:
        with _as_storage_error("opening it", name):
            return os.open(self._path(name), _REOPEN)

    def _close(self, name: str, fd: int) -> None:
        """Close a file descriptor, after a sync that reports delayed write errors."""
        try:
            with self._unsynced_lock:
                dirty = name in self._unsynced and not self._given_up
            if dirty and self._sync:
                with _as_storage_error("making it durable", name):
                    os.fsync(fd)
        finally:
            os.close(fd)

    def _remove_others(self, needed: frozenset[Path]) -> None:
        """Remove files of an earlier run that this run does not write."""
        with _as_storage_error("removing what an earlier run left", str(self.path)):
            for path in sorted(self.path.rglob("*"), reverse=True):
                if path == self.scratch or self.scratch in path.parents or path in needed:
                    continue
                if path.is_dir() and not path.is_symlink():
                    with suppress(OSError):  # a folder that still contains a needed file is kept
                        path.rmdir()
                else:
                    path.unlink()


@contextmanager
def _as_storage_error(doing: str, file: str) -> Iterator[None]:
    """Convert an OSError to a StorageError that names the action and the file."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, doing, file) from error


@contextmanager
def _lock_if_exists(folder: Path) -> Iterator[None]:
    """Lock a folder that will get the hidden folder's name, so that no other run claims it."""
    with ExitStack() as stack:
        with suppress(OSError):  # there is nothing to lock, because the run replaces no folder
            lock(stack.enter_context(open_folder(folder)))
        yield


def write_at(fd: int, octets: memoryview, offset: int, file: str) -> None:
    """Write all bytes of a view to an open file, with several calls if necessary.

    Args:
        fd: descriptor of the file.
        octets: the bytes to write.
        offset: offset in the file at which to write.
        file: name of the file, for error messages.

    Raises:
        StorageError: with the code NO_SPACE on a full disk; with the code IO for other failures, also if the system
            silently writes no bytes.
    """
    written = 0
    while written < octets.nbytes:
        try:
            written += os.pwrite(fd, octets[written:], offset + written) or _nothing_written()
        except OSError as error:
            doing = f"writing {octets.nbytes - written} bytes at offset {offset + written}"
            raise storage_error(error, doing, file) from error


def _nothing_written() -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _empty(folder: Path) -> None:
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            Path(entry.path).unlink()


_CREATE_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Writer:
    """Writes into the files of the hidden folder that the `Staging` of another process created.

    The hidden folder is kept open, and each file must be inside the opened folder: if the folder is removed and created
    anew, nothing is written.

    Args:
        folder: path of the hidden folder.
        sync: whether `finish` makes all written bytes durable.
        shared: whether to share the lock that `Staging.share` offers. If the file system has locks, no run commits,
            continues or removes the work until this writer is closed.
        run: name of the marker file that `Staging.mark` returned; the folder of a different run is refused. An empty
            name means that any folder is accepted.

    Raises:
        UsageError: with the code EXISTS if a different run has locked the folder.
        StorageError: with the code IO if the folder does not exist.
    """

    def __init__(self, folder: str | Path, *, sync: bool, shared: bool = False, run: str = "") -> None:
        self._path = Path(folder)
        self._sync = sync
        self._dirty: set[str] = set()
        try:
            self._folder = os.open(self._path, FOLDER)
        except OSError as error:
            raise storage_error(error, "opening the folder for the unfinished work", str(self._path)) from error
        if shared and lock_shared(self._folder) is False:
            os.close(self._folder)
            raise busy(str(self._path))
        try:
            if run:
                os.stat(f"{SCRATCH}/{run}", dir_fd=self._folder)
        except OSError as error:
            os.close(self._folder)
            raise storage_error(error, "looking for the run that this belongs to", str(self._path)) from error
        self._handles = Handles(self._open, lambda _, fd: os.close(fd))

    def pwrite(self, file: str, offset: int, view: memoryview) -> None:
        """Write a contiguous view into an existing file.

        Raises:
            StorageError: with the code NO_SPACE on a full disk; with the code IO for other failures.
        """
        with view.cast("B") as octets, self._handles.use(file) as fd:
            self._dirty.add(file)
            write_at(fd, octets, offset, file)

    def add_write(self, steps: Steps, file: str, offset: int, view: memoryview) -> None:
        """Add a write of a contiguous view to the list `steps`; the errors and arguments are those of `pwrite`."""
        if view.nbytes:
            self._dirty.add(file)
            steps.write(steps.open_file(file, self._handles), offset, view, partial(self.pwrite, file, offset, view))

    def flush(self) -> None:
        """Make all bytes durable that this writer has written.

        Raises:
            StorageError: with the code NO_SPACE on a full disk; with the code IO for other failures, including delayed
                write errors.
        """
        for file in sorted(self._dirty) if self._sync else ():
            with self._handles.use(file) as fd:
                try:
                    os.fsync(fd)
                except OSError as error:
                    raise storage_error(error, "making it durable", file) from error
        self._dirty.clear()

    def put(self, file: str, data: bytes) -> None:
        """Create or replace a small file atomically.

        Raises:
            StorageError: with the code NO_SPACE on a full disk; with the code IO for other failures, also if the file's
                folder does not exist.
        """
        import secrets  # `secrets` is imported late, because only workers need it

        draft = f"{file}.{secrets.token_hex(8)}"
        try:
            fd = os.open(draft, _CREATE_NEW, 0o666, dir_fd=self._folder)
            try:
                with memoryview(data) as octets:
                    write_at(fd, octets, 0, file)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(draft, file, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError as error:
            raise storage_error(error, "creating it", file) from error

    def finish(self) -> None:
        """Call `flush` and `close`; raises the errors of `flush`."""
        try:
            self.flush()
        finally:
            self.close()

    def close(self) -> None:
        """Close the files, and release the shared lock."""
        self._handles.close()
        with suppress(OSError):  # the folder's descriptor is closed already
            os.close(self._folder)
        self._folder = -1

    def _open(self, file: str) -> int:
        try:
            return os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        except OSError as error:
            raise storage_error(error, "opening it", file) from error


Stage: TypeAlias = "Staging | Upload"
"""A checkpoint that is being written, locally or on a service."""
SharedStage: TypeAlias = "Staging | SharedUpload"
"""A checkpoint that several workers write, locally or on a service."""
_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)(?:/tree/([^/?#]+))?/?")
"""Pattern for the web page of a hub's repository; its groups are `OWNER/NAME` and the revision."""


def storage_at(path: str | os.PathLike[str]) -> Storage:
    """Open a path or URL for reading; raises the errors of `LocalStorage`, `RemoteStorage` and `HubService`.

    Raises:
        Refused: with the code UNSUPPORTED for the web page of a repository, because a page has no checkpoint files.
    """
    path = as_local_path(os.fspath(path))
    if not is_url(path):
        return LocalStorage(path)
    if page := _PAGE.fullmatch(path):
        hint = f"Write {HUB}://{page[1]}{f'@{page[2]}' if page[2] else ''}"
        raise refuse("UNSUPPORTED", "this is the page of a repository, for browsers", file=path, hint=hint)
    from transaxle.formats.store.reading import RemoteStorage

    if scheme(path).lower() == HUB:
        from transaxle.formats.store.hub import HubService

        return RemoteStorage(path, service=HubService(path))
    return RemoteStorage(path)


def staging_at(
    target: str | os.PathLike[str], *, overwrite: Overwrite = False, resume: bool = False, sync: bool = True
) -> Stage:
    """Return an object that writes a checkpoint to a path or URL; raises the errors of `Staging` and `Upload`.

    The argument `sync` matters only for local targets, because bytes that a service has accepted are durable.
    """
    target = as_local_path(os.fspath(target))
    if is_url(target):
        if scheme(target).lower() == HUB:
            hint = "Convert to a local folder, then upload it:  hf upload OWNER/NAME FOLDER"
            raise refuse("UNSUPPORTED", "nothing is written to a hub", file=target, hint=hint)
        from transaxle.formats.store.upload import Upload

        return Upload(target, overwrite=overwrite, resume=resume)

    return Staging(target, overwrite=overwrite, resume=resume, sync=sync)


def shared_staging_at(
    target: str | os.PathLike[str], *, overwrite: Overwrite = False, resume: bool = False, sync: bool = True
) -> SharedStage:
    """Return an object with which several workers write a checkpoint; raises the errors of `Staging` and
    `SharedUpload`.
    """
    target = as_local_path(os.fspath(target))
    if is_url(target):
        from transaxle.formats.store.shared_upload import SharedUpload

        return SharedUpload(target, overwrite=overwrite, resume=resume)

    return Staging(target, overwrite=overwrite, resume=resume, sync=sync)


def takes_parts(target: str) -> bool:
    """Return whether several processes can send parts of one file to the service of a target."""
    if not is_url(target):
        return False
    return scheme(target).lower() in S3


def as_local_path(path: str) -> str:
    """Return the local path of a `file://` URL; return any other path or URL unchanged."""
    if not is_url(path) or scheme(path).lower() != "file":
        return path
    local = local_path(path)
    if local is None:
        raise refuse("UNSUPPORTED", "the URL names a file on another machine", file=path)
    return local


def display_path(path: str) -> str:
    """Return a path or URL as reports and errors show it: a URL without passwords and signatures, any other path
    unchanged.
    """
    return without_secrets(path) if is_url(path) else path
