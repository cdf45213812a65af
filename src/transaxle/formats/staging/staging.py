"""Writing a checkpoint beside its place and moving it there whole: until then the place holds what it held before.

Everything goes to a hidden folder next to the target. Committing makes it durable (files, folders, and the rename
itself) and renames it in one step. A process that dies at any point leaves the target as it was; what it leaves of the
hidden folder is continued by a run that resumes, and removed by one that does not. The hidden name is always the same,
so nothing piles up, and a lock on it keeps two runs apart.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Literal, Self

from transaxle.errors import refuse
from transaxle.formats.staging.belongings import Overwrite, several_files
from transaxle.formats.staging.claim import Claim, lock, opened
from transaxle.formats.staging.leftovers import described
from transaxle.formats.staging.place import SCRATCH, Place, make_durable
from transaxle.formats.staging.syscalls import reserve
from transaxle.formats.storage.handles import Handles
from transaxle.formats.storage.names import checked_parts
from transaxle.formats.storage.os_errors import failed

_MAKING = "making the folder for the work in progress"
_CREATE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_REOPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class Staging:
    """A checkpoint in the making: a context that ends with `commit`, or leaves nothing behind.

    Writing is safe from several threads. After `commit` the place holds the new checkpoint and nothing of the old one.

    Args:
        target: a folder, or one file if it ends in `.safetensors`, `.bin`, `.pt` or `.pth`.
        overwrite: replace a checkpoint that is there. It stays readable until the new one is complete. `everything`:
            whatever else is in its folder goes too; else such a folder is refused.
        resume: continue what an earlier run left, and leave what is there if this one fails too.
        sync: make everything durable before the rename. Without it a power cut may leave damaged files.

    Raises:
        UsageError: EXISTS if the target is there and may not be replaced, or another run is writing it.
        StorageError: IO if the folder around it is missing or cannot be written.
    """

    ordered: Literal[False] = False
    """The bytes of a file may come in any order, and from several threads."""

    def __init__(
        self, target: str | os.PathLike[str], *, overwrite: Overwrite = False, resume: bool = False, sync: bool = True
    ) -> None:
        self._place = Place(target, overwrite=overwrite)
        self._resume = resume
        self._sync = sync
        self._sizes: dict[str, int] = {}
        self._unsynced: set[str] = set()
        self._unsynced_lock = Lock()
        self._handles = Handles(self._reopen, self._close)
        self._claim = Claim(self._place.partial, self._place.typed)
        self.found: tuple[str, ...] = ()
        """What a killed run had left beside the target, and what became of it."""
        self._given_up = False

    @property
    def path(self) -> Path:
        """The hidden folder that holds the files until they are committed."""
        return self._place.partial

    @property
    def scratch(self) -> Path:
        """A folder for what must survive until a resumed run and is not part of the checkpoint: the journal."""
        return self.path / SCRATCH

    @property
    def single(self) -> str | None:
        """Name of the target if it is a file: just one file can be written then, under any name."""
        return self._place.single

    @property
    def moved_aside(self) -> bool:
        """Whether a run died while it replaced the target: beginning puts back what was there."""
        return self._place.moved_aside

    def look(self, folder: Mapping[str, int], file: Mapping[str, int]) -> None:
        """Refuse what beginning and preparing would refuse, and change nothing: nothing is made, and nothing removed.

        Args:
            folder: names and sizes of the files, where the target is a folder.
            file: those of the one, where the target is a file.

        Raises as entering the context and `prepare` do.
        """
        files = folder if self.single is None else file
        if self.single and len(files) > 1:
            raise several_files(self._place.typed)
        self._place.foresee()
        with _named(_MAKING, str(self.path)):
            self._claim.look(unlocked=self._resume)
            self._place.check_writable()
        with _named("looking for free space", str(self.path)):
            freed = sum(path.lstat().st_blocks * 512 for path in self.path.rglob("*"))
            self._check_space(sum(files.values()), shutil.disk_usage(self.path.parent).free + freed)

    def __enter__(self) -> Self:
        made = False
        try:
            with _named(_MAKING, str(self.path)):
                made = self._claim.take(unlocked=self._resume)
                self.found = self._left(made=made)
                self._place.recover()
                self._place.check("" if made else f" {self.path} is left of another run: transaxle clean removes it.")
                if not self._resume or not self.scratch.is_dir():
                    _empty(self.path)
                self.scratch.mkdir(exist_ok=True)
        except BaseException:
            if made:
                self._place.sweep()
            self._claim.release()
            raise
        return self

    def _left(self, *, made: bool) -> tuple[str, ...]:
        """Say what is there of an earlier run, before it is put right, continued or removed."""
        place, found = self._place, []
        if os.path.lexists(place.old):
            left = described(place.old, place.target)
            fate = "removed" if os.path.lexists(place.target) else "put back"
            found.append(f"{left.path}, left by a killed run ({left.what}), was {fate}")
        if not made and not (self._resume and self.scratch.is_dir()):
            left = described(place.partial, place.target)
            found.append(f"{left.path}, left by a killed run ({left.what}), was removed")
        return tuple(found)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._claim.held:
            return
        self._given_up = True
        self._handles.close()
        if not self._resume or not self.scratch.is_dir():
            self._place.sweep()
        self._claim.release()

    def prepare(self, files: Mapping[str, int]) -> frozenset[str]:
        """Create all files of known size, with their disk space where the file system can reserve it.

        Args:
            files: name (`a` or `folder/a`) to size in bytes.

        Returns:
            The files that an earlier run had created with just this size; the bytes it wrote are still in them.

        Raises:
            Refused: PATH_ESCAPE; UNSUPPORTED if the target is one file and these are not one.
            StorageError: NO_SPACE, IO.
        """
        paths = {name: self._path(name) for name in files}
        self._remove_others(frozenset(paths.values()))
        with _named("looking for free space", str(self.path)):
            there = sum(path.stat().st_blocks * 512 for path in paths.values() if path.is_file())
            self._check_space(sum(files.values()), shutil.disk_usage(self.path).free + there)
        kept = {name for name, size in files.items() if self._create(name, paths[name], size)}
        return frozenset(kept)

    def _check_space(self, wanted: int, free: int) -> None:
        """Refuse what cannot fit before a byte is reserved: on some file systems reserving takes the memory itself."""
        if wanted > free:
            raise refuse(
                "NO_SPACE",
                f"{wanted:,} bytes are to be written, {free:,} are free",
                file=self._place.typed,
                hint="Free space there, or choose another place.",
            )

    def pwrite(self, file: str, offset: int, view: memoryview) -> None:
        """Write a contiguous view into a prepared file.

        Raises:
            StorageError: NO_SPACE, IO.
        """
        if not view.nbytes:
            return
        if offset < 0 or offset + view.nbytes > self._sizes[file]:
            raise ValueError(f"{file}: bytes {offset} to {offset + view.nbytes} lie outside of its {self._sizes[file]}")
        with view.cast("B") as octets, self._handles.use(file) as fd:
            done = 0
            while done < octets.nbytes:
                with _named(f"writing {octets.nbytes - done} bytes at offset {offset + done}", file):
                    done += os.pwrite(fd, octets[done:], offset + done) or _nothing_written()
            with self._unsynced_lock:
                self._unsynced.add(file)

    def write(self, file: str, data: bytes) -> None:
        """Create a file with this content: one whose size was not known before. It may be prepared already.

        Raises:
            Refused: PATH_ESCAPE.
            StorageError: NO_SPACE, IO.
        """
        self._create(file, self._path(file), len(data))
        self.pwrite(file, 0, memoryview(data))

    def flush(self, file: str) -> None:
        """Make a file durable and close it; worth calling when it is complete, so that `commit` need not wait.

        Raises:
            StorageError: NO_SPACE, IO.
        """
        with self._unsynced_lock:
            dirty = file in self._unsynced
            self._unsynced.discard(file)
        if dirty and self._sync:
            with self._handles.use(file) as fd, _named("making it durable", file):
                os.fsync(fd)
        self._handles.drop(file)

    def commit(self) -> None:
        """Make everything durable and move it to its place. All threads must be done writing.

        Raises:
            UsageError: EXISTS if the target appeared in the meantime.
            StorageError: NO_SPACE; IO, also if a file was taken away or changed its size in the meantime.
        """
        self._place.check()
        for file in sorted(self._sizes):
            self.flush(file)
        self._handles.close()
        folders = {self.path}
        for file, size in self._sizes.items():
            path = self._path(file)
            folders |= {folder for folder in path.parents if self.path in folder.parents}
            with _named("looking at it before the end", file):
                if path.lstat().st_size != size:
                    raise refuse("IO", f"it should have {size} bytes; something else has changed it", file=file)
        with _named("removing the journal", str(self.scratch)):
            shutil.rmtree(self.scratch)
        if self._sync:
            for folder in sorted(folders, reverse=True):
                make_durable(folder)
        with _locked_if_there(self._place.target):
            self._place.publish(self._path(next(iter(self._sizes))) if self.single else self.path)
            if self._sync:
                make_durable(self.path.parent)
            self._place.sweep()
        self._claim.release()

    def _path(self, name: str) -> Path:
        parts = checked_parts(name)
        if parts[0] == SCRATCH:
            raise refuse("PATH_ESCAPE", f"the name {SCRATCH} is taken", file=name)
        return self.path.joinpath(*parts)

    def _create(self, name: str, path: Path, size: int) -> bool:
        """Create a file, or take over one of the same size (True)."""
        if self.single and self._sizes.keys() - {name}:
            raise several_files(self._place.typed)
        with _named(f"creating it with {size} bytes", name):
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = path.is_file() and path.lstat().st_size == size and name not in self._sizes
            fd = os.open(path, _CREATE | (0 if kept else os.O_TRUNC), 0o666)
            try:
                if size:
                    reserve(fd, size)
                os.ftruncate(fd, size)
            finally:
                os.close(fd)
        self._sizes[name] = size
        with self._unsynced_lock:
            self._unsynced.add(name)
        return kept

    def _reopen(self, name: str) -> int:
        with _named("opening it", name):
            return os.open(self._path(name), _REOPEN)

    def _close(self, name: str, fd: int) -> None:
        """Close a descriptor; an error of writing that the system still holds back must be heard before."""
        try:
            with self._unsynced_lock:
                dirty = name in self._unsynced and not self._given_up
            if dirty and self._sync:
                with _named("making it durable", name):
                    os.fsync(fd)
        finally:
            os.close(fd)

    def _remove_others(self, wanted: frozenset[Path]) -> None:
        """Remove what an earlier run left and this one does not write."""
        with _named("removing what an earlier run left", str(self.path)):
            for path in sorted(self.path.rglob("*"), reverse=True):
                if path == self.scratch or self.scratch in path.parents or path in wanted:
                    continue
                if path.is_dir() and not path.is_symlink():
                    with suppress(OSError):  # it still holds something that is wanted
                        path.rmdir()
                else:
                    path.unlink()


@contextmanager
def _named(doing: str, file: str) -> Iterator[None]:
    """Turn what the system says into our error, with the action and the file."""
    try:
        yield
    except OSError as error:
        raise failed(error, doing, file) from error


@contextmanager
def _locked_if_there(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder that is about to become the hidden one, so that no other run takes it for its own."""
    with ExitStack() as stack:
        with suppress(OSError):  # nothing is replaced, or a file
            lock(stack.enter_context(opened(folder)))
        yield


def _nothing_written() -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _empty(folder: Path) -> None:
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            Path(entry.path).unlink()
