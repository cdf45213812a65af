"""Local storage: `preadv` on regular files inside one folder, and nothing else.

The folder may come from anyone. A name in it can be a link to your keys, a FIFO that never answers or a device that
never ends. So a name is resolved first and must stay inside the folder (a link of the Hugging Face cache to its `blobs`
excepted), and its kind is checked before it is opened and again on the open descriptor. Data is not mapped: a mapped
file that is truncated while in use kills the process, whereas a failing read is an error that can be named.

The folder may be replaced while it is read. It is held open, and every file must belong to it: all that is read comes
from one checkpoint, or is an error.

`failed` makes every `OSError` of this room an error of ours.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import stat
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from transaxle.axes.geometry import Loop
from transaxle.errors import Refusal, StorageError, TransaxleError, refuse
from transaxle.formats.storage.copier import Steps, read_each, runs_in
from transaxle.formats.storage.storage import ByteCount, Handles, Listing, Storage, checked_parts

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
"""Without blocking, so that a FIFO or device that has replaced the file since its check opens at once, and is refused.
"""
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"
_BLOCK = 1 << 20

_ALMOST_URL = re.compile(r"(hf|s3|gs|gcs|az|abfs):/?([^/].*)")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""A name as hubs have them, `OWNER/NAME`."""
_HOLD = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_REPLACED = "the checkpoint was replaced while it was open"
_CHANGED = "the file was changed while the checkpoint was open"
_AGAIN = "Open it again to read the new one."

FileStamp = tuple[int, int, int, int, int]
"""Device, inode, size, and the times of change of content and inode: a changed file differs in one of them. The last
one is the system's own and cannot be set back.
"""


class LocalStorage(Storage):
    """The files of one folder, or one file and the folder around it (see `formats.storage.Storage`).

    A link that the user typed is followed: it is the user's own. A link found inside the folder is followed only to a
    place inside the folder, or from a Hugging Face cache `snapshots/<revision>/` to `blobs/<hash>` beside it.

    Raises:
        Refused: UNSUPPORTED if the path is a FIFO, a socket or a device.
        StorageError: IO if it is missing or unreadable; the hint names the most similar path beside it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        kind = _kind_of(self._path)
        if kind == stat.S_IFDIR:
            self._root, self._single = os.path.realpath(self._path), None
        elif kind == stat.S_IFREG:
            folder, self._single = os.path.split(self._path)
            self._root = os.path.realpath(folder)
        else:
            raise _not_regular(self._path, kind)
        self._blobs = _blobs_beside(self._root)
        try:
            self._folder = os.open(self._root, _HOLD)
        except OSError as error:
            raise failed(error, "opening it", self._path) from error
        self._let_go = weakref.finalize(self, os.close, self._folder)
        self._stamps: dict[str, FileStamp] = {}
        self._handles = Handles(self._open)
        self._bytes_read = ByteCount()

    @property
    def batches_steps(self) -> bool:
        """Whether files are read in batches; see `Storage.batches_steps`."""
        return True

    @property
    def bytes_read(self) -> int:
        """Bytes that were read so far; see `Storage.bytes_read`."""
        return self._bytes_read.total

    @property
    def path(self) -> str:
        """The path as the user typed it."""
        return self._path

    @property
    def single(self) -> str | None:
        """Name of the one file that the path denotes; None where it denotes a folder."""
        return self._single

    def listing(self, folder: str = "") -> Listing:
        """List a folder of the checkpoint; see `Storage.listing`."""
        names: list[str] = []
        folders: list[str] = []
        special: dict[str, Refusal] = {}
        try:
            with os.scandir(self._resolve(folder) if folder else self._root) as entries:
                files_here = sorted((entry.name, entry.is_file(follow_symlinks=False)) for entry in entries)
        except OSError as error:
            raise self._gone(folder) or failed(error, "listing the folder", folder or self._path) from error
        if gone := self._gone(folder):
            raise gone
        for name, regular in files_here:
            shown = name.encode("utf-8", "backslashreplace").decode()
            if shown != name:
                special[shown] = _unreadable_name(shown)
                continue
            full_name = f"{folder}/{name}" if folder else name
            try:
                kind = stat.S_IFREG if regular else stat.S_IFMT(os.lstat(self._resolve(full_name)).st_mode)
            except TransaxleError as error:
                special[name] = error.refusals[0]
            except OSError as error:
                special[name] = failed(error, "reading its status", full_name).refusals[0]
            else:
                if kind == stat.S_IFREG:
                    names.append(name)
                elif kind == stat.S_IFDIR:
                    folders.append(name)
                else:
                    special[name] = _not_regular(full_name, kind).refusals[0]
        return Listing(tuple(names), tuple(folders), special)

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; see `Storage.size`."""
        with self._handles.use(name):
            return self._stamps[name][2]

    def version(self, name: str) -> str:
        """Return a text that changes when the file does; see `Storage.version`."""
        with self._handles.use(name):
            return "-".join(map(str, self._stamps[name][1:]))  # machines number the device of a shared folder each anew

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fill a writable contiguous view with the bytes that start at `offset`; see `Storage.read_into`."""
        self._bytes_read.add(view.nbytes)
        self._fill(name, offset, view)

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """List that a view is filled, or runs are read into their places in it; see `Storage.add_read`."""
        size = width * runs_in(view, width, loops) if loops else view.nbytes
        if size:
            self._bytes_read.add(size)
            fd = steps.opened(name, self._handles)
            steps.read(fd, offset, view, partial(self._fill, name, offset, view, width, loops), width, loops)

    def _fill(self, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()) -> None:
        """Read in the ordinary way, without counting."""
        with view.cast("B") as octets, self._handles.use(name) as fd:
            read_each(partial(_read, fd, name), offset, octets, width, loops)

    def recheck(self) -> None:
        """Check that no file that was read has changed since; see `Storage.recheck`."""
        for name in tuple(self._stamps):
            self._handles.drop(name)
            with self._handles.use(name):
                pass

    def refuse_rewritten(self) -> None:
        """Refuse files that were written to since they were first opened; of a replaced one, the old one was read.

        Raises:
            Refused: CORRUPT.
            StorageError: IO.
        """
        for name, (_, _, *expected, _) in tuple(self._stamps.items()):
            with self._handles.use(name) as fd:
                status = os.fstat(fd)
            if [status.st_size, status.st_mtime_ns] != expected:
                raise refuse("CORRUPT", _CHANGED, file=name, hint=_AGAIN)

    def close(self) -> None:
        """Close all files."""
        self._handles.close()
        self._let_go()

    def _gone(self, name: str) -> TransaxleError | None:
        """Return the error for a folder that was replaced since it was opened; None if it was not."""
        if not self._let_go.alive:
            return None
        opened = os.fstat(self._folder)
        with suppress(OSError):
            current = os.stat(self._root)  # noqa: PTH116
            if (current.st_dev, current.st_ino) == (opened.st_dev, opened.st_ino):
                return None
        return refuse("CORRUPT", _REPLACED, file=name or self._path, hint=_AGAIN)

    def _resolve(self, name: str) -> str:
        """Return the real path of a name, which must lie inside the checkpoint."""
        target = os.path.join(self._root, *checked_parts(name))  # noqa: PTH118
        try:
            real = os.path.realpath(target, strict=True)
        except OSError as error:
            raise failed(error, "opening it", name) from error
        inside = real.startswith(os.path.join(self._root, "")) or name == self._single  # noqa: PTH118
        if not inside and os.path.dirname(real) != self._blobs:  # noqa: PTH120
            raise refuse(
                "PATH_ESCAPE",
                f"the link leads outside the checkpoint, to {real}",
                file=name,
                hint="If you trust it, copy the file into the checkpoint.",
            )
        return real

    def _open(self, name: str) -> int:
        try:
            fd, status = _opened(self._resolve(name), name)
        except StorageError as error:
            raise self._gone(name) or error from error
        try:
            self._check(name, status)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check(self, name: str, current: os.stat_result) -> None:
        """Refuse a file that is not in the opened folder, or differs from the one first opened under this name."""
        try:
            expected = os.stat(name, dir_fd=self._folder)
        except OSError:
            expected = None
        if expected is None or (expected.st_dev, expected.st_ino) != (current.st_dev, current.st_ino):
            raise self._gone(name) or refuse("CORRUPT", _CHANGED, file=name)
        stamp = (current.st_dev, current.st_ino, current.st_size, current.st_mtime_ns, current.st_ctime_ns)
        if self._stamps.setdefault(name, stamp) != stamp:
            raise refuse("CORRUPT", _CHANGED, file=name)


def read_file(path: str | os.PathLike[str], most: int) -> bytes:
    """Read a small file that the user named, such as a table or a config; a link to it is followed.

    Args:
        path: where it is.
        most: bytes that such a file may have.

    Raises:
        Refused: UNSUPPORTED if it is a folder, a FIFO, a socket or a device; CORRUPT if it is longer.
        StorageError: IO if it is missing or unreadable.
    """
    shown = os.fspath(path)
    kind = _kind_of(shown)
    if kind != stat.S_IFREG:
        raise _not_regular(shown, kind, "Give a regular file; save the data to one first.")
    fd, _ = _opened(os.path.realpath(shown), shown)
    with os.fdopen(fd, "rb", buffering=0) as file:
        data = bytearray()
        while len(data) <= most:  # not by its size: what /proc has says 0
            try:
                more = file.read(min(_BLOCK, most + 1 - len(data)))
            except OSError as error:
                raise failed(error, "reading it", shown) from error
            if not more:
                return bytes(data)
            data += more
    raise refuse("CORRUPT", f"the file is longer than the {most:,} bytes that it may have", file=shown)


def _opened(real: str, name: str) -> tuple[int, os.stat_result]:
    """Open a regular file; its kind is checked before and after opening, in case somebody replaces it meanwhile.

    Args:
        real: its path, without links.
        name: its name in errors.

    Returns:
        The descriptor, which the caller closes, and its status.
    """
    try:
        kind = stat.S_IFMT(os.lstat(real).st_mode)
        if kind != stat.S_IFREG:
            raise _not_regular(name, kind)
        fd = os.open(real, _FLAGS)
    except OSError as error:
        raise failed(error, "opening it", name) from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise _not_regular(name, stat.S_IFMT(status.st_mode))
    return fd, status


def _read(fd: int, name: str, offset: int, octets: memoryview) -> None:
    """Fill a view of bytes from an open file; see `Storage.read_into`."""
    done, wanted = 0, octets.nbytes
    while done < wanted:
        try:
            count = os.preadv(fd, [octets[done:]], offset + done)
        except OSError as error:
            raise failed(error, f"reading {wanted - done} bytes at offset {offset + done}", name) from error
        if not count:
            raise refuse(
                "CORRUPT",
                f"the file is truncated: it ends at {offset + done}, and bytes {offset} to {offset + wanted} were "
                "requested",
                file=name,
                hint="Copy or download the file again.",
            )
        done += count


def _kind_of(path: str) -> int:
    """Return the kind of what a typed path leads to; a missing one is an IO error with a suggestion."""
    if not path:
        raise refuse("IO", "'' is not a path", file=path)
    try:
        return stat.S_IFMT(os.stat(path).st_mode)  # noqa: PTH116
    except ValueError as error:
        raise refuse("IO", f"{path!r} is not a path: {error}", file=path) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        message = "no such file or folder"
        raise refuse("IO", message, file=path, hint=_similar(path), system=FileNotFoundError) from error
    except OSError as error:
        raise failed(error, "opening it", path) from error


def _similar(path: str) -> str:
    """Suggest what a missing path may mean: a URL with a slash too few, the closest name beside it, a repository."""
    if at_home := unexpanded(path):
        return at_home
    if slip := _ALMOST_URL.fullmatch(path):
        return f"Did you mean {slip[1]}://{slip[2]}?"
    missing = Path(path)
    if missing.is_symlink():
        return f"It is a link to {missing.readlink()}, which is not there."
    try:
        beside = [entry.name for entry in missing.parent.iterdir()]
    except OSError:
        if _REPOSITORY.fullmatch(path):
            return f"If it is a repository of a hub, write hf://{path}."
        return f"{missing.parent} does not exist either." if missing.parent.name else ""
    close = difflib.get_close_matches(missing.name, beside, n=1)
    return f"Did you mean {missing.parent / close[0]}?" if close else ""


def unexpanded(path: str) -> str:
    """Suggest what a path that begins with `~` may mean; empty for others."""
    meant = os.path.expanduser(path)  # noqa: PTH111 - of a text that stays one
    return "" if meant == path else f"Only shells expand ~, and only outside quotes: write {meant}."


def _blobs_beside(root: str) -> str | None:
    """Return `<repo>/blobs` for a folder in a Hugging Face cache, `<repo>/snapshots/<revision>[/...]`."""
    folder = Path(root)
    for inner in (folder, *folder.parents):
        if inner.parent.name == _SNAPSHOTS:
            return str(inner.parent.parent / _BLOBS)
    return None


def _not_regular(name: str, kind: int, hint: str = "") -> TransaxleError:
    kind_name = _KINDS.get(kind, "something special")
    return refuse("UNSUPPORTED", f"this is {kind_name}, not a regular file, so it is not read", file=name, hint=hint)


def _unreadable_name(shown: str) -> Refusal:
    return refuse("UNSUPPORTED", "the name is not UTF-8", file=shown, hint="Rename the file.").refusals[0]


_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


_HINTS = {
    errno.EFBIG: "The file system or a limit of this process (ulimit -f) does not allow files of this size.",
    errno.EMFILE: "Too many open files for this process (ulimit -n).",
    errno.EROFS: "The file system is mounted read-only.",
    errno.EACCES: "Check the permissions of the file and of the folders above it.",
    errno.EPERM: "Check the permissions of the file and of the folders above it.",
}


def failed(error: OSError, doing: str, file: str) -> TransaxleError:
    """Build the StorageError for a failed system call: NO_SPACE for a full disk or quota, else IO.

    Args:
        error: the exception.
        doing: the action in words, e.g. `writing 4096 bytes at offset 0`.
        file: the file that it concerned.
    """
    if isinstance(error, TransaxleError):  # one of ours, which says what failed
        return error
    number = error.errno or 0
    reason = os.strerror(number) if number else str(error)
    if number in _NO_SPACE:
        return refuse("NO_SPACE", f"{doing}: {reason}", file=file, hint="Free some space, or choose another place.")
    return refuse("IO", f"{doing}: {reason}", file=file, hint=_HINTS.get(number, ""), system=type(error))
