"""Local storage: reads regular files inside one folder with `preadv`, and refuses files of any other kind.

The contents of a checkpoint's folder are untrusted. A name in the folder can be a symbolic link to your keys, a FIFO
that never answers, or a device without an end. Therefore a name is resolved first and must stay inside the folder
(except for a link of the Hugging Face cache to its `blobs`), and the type of the file is checked before it is opened,
and again on the open descriptor. Files are not mapped into memory: if a mapped file is truncated while in use, the
process is killed, whereas a failed read raises an error.

The folder may be replaced by a new checkpoint while it is read. Therefore the folder is kept open, and each file must
be in the opened folder. As all files are in one opened folder, all data comes from one checkpoint.

The function `storage_error` converts each `OSError` to a `StorageError`.
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
from transaxle.formats.storage.copier import Steps, read_strided, runs_in
from transaxle.formats.storage.storage import ByteCount, Handles, Listing, Storage, split_name

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags for opening files; they include O_NONBLOCK, so that opening a FIFO or a device returns at once, and the file
can be refused."""
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
"""Pattern for the name of a repository on a hub, `OWNER/NAME`."""
_FOLDER_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_REPLACED = "the checkpoint was replaced while it was open"
_CHANGED = "the file was changed while the checkpoint was open"
_AGAIN = "Open the checkpoint again to read its new state."

FileStamp = tuple[int, int, int, int, int]
"""`(device, inode, size, mtime, ctime)` of a file; if the file changes, at least one of these numbers changes. The
system sets the ctime (time of the last change), and no program can set it back.
"""


class LocalStorage(Storage):
    """The files of a local folder, or a single local file (see `Storage`).

    A symbolic link in the path that the user typed is followed. A link inside the folder is followed only to a
    place inside the folder, or in a Hugging Face cache from `snapshots/<revision>/` to `blobs/<hash>`.

    Raises:
        Refused: with the code UNSUPPORTED if the path is a FIFO, a socket or a device.
        StorageError: with the code IO if the path is missing or unreadable; the hint suggests a similar path.
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
            self._folder = os.open(self._root, _FOLDER_FLAGS)
        except OSError as error:
            raise storage_error(error, "opening it", self._path) from error
        self._close_folder = weakref.finalize(self, os.close, self._folder)
        self._stamps: dict[str, FileStamp] = {}
        self._handles = Handles(self._open)
        self._bytes_read = ByteCount()

    @property
    def batches_steps(self) -> bool:
        """Return True, because one call can carry out many reads of local files; see `Storage.batches_steps`."""
        return True

    @property
    def bytes_read(self) -> int:
        """Number of bytes read so far; see `Storage.bytes_read`."""
        return self._bytes_read.total

    @property
    def path(self) -> str:
        """The path of the checkpoint as the user typed it."""
        return self._path

    @property
    def single(self) -> str | None:
        """Name of the file if the user named a single file; None for a folder."""
        return self._single

    def listing(self, folder: str = "") -> Listing:
        """List the contents of one folder of the checkpoint; see `Storage.listing`."""
        names: list[str] = []
        folders: list[str] = []
        special: dict[str, Refusal] = {}
        try:
            with os.scandir(self._resolve(folder) if folder else self._root) as entries:
                files_here = sorted((entry.name, entry.is_file(follow_symlinks=False)) for entry in entries)
        except OSError as error:
            raise self._replaced_error(folder) or storage_error(
                error, "listing the folder", folder or self._path
            ) from error
        if gone := self._replaced_error(folder):
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
                special[name] = storage_error(error, "reading its status", full_name).refusals[0]
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
        """Return a string that changes whenever the file changes; see `Storage.version`."""
        with self._handles.use(name):
            # the version does not include the device number, which differs between machines
            return "-".join(map(str, self._stamps[name][1:]))

    def read_into(self, name: str, offset: int, view: memoryview) -> None:
        """Fill a writable contiguous view with the bytes that start at `offset`; see `Storage.read_into`."""
        self._bytes_read.add(view.nbytes)
        self._fill(name, offset, view)

    def add_read(
        self, steps: Steps, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()
    ) -> None:
        """Add a read of a file to the list `steps`; see `Storage.add_read`."""
        size = width * runs_in(view, width, loops) if loops else view.nbytes
        if size:
            self._bytes_read.add(size)
            fd = steps.open_file(name, self._handles)
            steps.read(fd, offset, view, partial(self._fill, name, offset, view, width, loops), width, loops)

    def _fill(self, name: str, offset: int, view: memoryview, width: int = 0, loops: Sequence[Loop] = ()) -> None:
        """Read with Python's own system calls, without adding to the count of bytes."""
        with view.cast("B") as octets, self._handles.use(name) as fd:
            read_strided(partial(_read, fd, name), offset, octets, width, loops)

    def recheck(self) -> None:
        """Check that no file has changed since it was read; see `Storage.recheck`."""
        for name in tuple(self._stamps):
            self._handles.drop(name)
            with self._handles.use(name):
                pass

    def refuse_rewritten(self) -> None:
        """Refuse files that were written to since they were first opened, but accept replaced files, because the old
        file stays readable.

        Raises:
            Refused: with the code CORRUPT for each file that was written to.
            StorageError: with the code IO if a file's status cannot be read.
        """
        for name, (_, _, *expected, _) in tuple(self._stamps.items()):
            with self._handles.use(name) as fd:
                status = os.fstat(fd)
            if [status.st_size, status.st_mtime_ns] != expected:
                raise refuse("CORRUPT", _CHANGED, file=name, hint=_AGAIN)

    def close(self) -> None:
        """Close all open files."""
        self._handles.close()
        self._close_folder()

    def _replaced_error(self, name: str) -> TransaxleError | None:
        """Return the error for a folder that was replaced since it was opened; None if the path still leads to the
        opened folder.
        """
        if not self._close_folder.alive:
            return None
        opened = os.fstat(self._folder)
        with suppress(OSError):
            current = os.stat(self._root)  # noqa: PTH116
            if (current.st_dev, current.st_ino) == (opened.st_dev, opened.st_ino):
                return None
        return refuse("CORRUPT", _REPLACED, file=name or self._path, hint=_AGAIN)

    def _resolve(self, name: str) -> str:
        """Return the real path of a file name, after checking that the path is inside the checkpoint."""
        target = os.path.join(self._root, *split_name(name))  # noqa: PTH118
        try:
            real = os.path.realpath(target, strict=True)
        except OSError as error:
            raise storage_error(error, "opening it", name) from error
        inside = real.startswith(os.path.join(self._root, "")) or name == self._single  # noqa: PTH118
        if not inside and os.path.dirname(real) != self._blobs:  # noqa: PTH120
            raise refuse(
                "PATH_ESCAPE",
                f"the link leads outside the checkpoint, to {real}",
                file=name,
                hint="If you trust the link, copy its file into the checkpoint.",
            )
        return real

    def _open(self, name: str) -> int:
        try:
            fd, status = _open_regular(self._resolve(name), name)
        except StorageError as error:
            raise self._replaced_error(name) or error from error
        try:
            self._check(name, status)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check(self, name: str, current: os.stat_result) -> None:
        """Refuse a file that is not in the opened folder, or is not the file that was first opened under the
        same name.
        """
        try:
            expected = os.stat(name, dir_fd=self._folder)
        except OSError:
            expected = None
        if expected is None or (expected.st_dev, expected.st_ino) != (current.st_dev, current.st_ino):
            raise self._replaced_error(name) or refuse("CORRUPT", _CHANGED, file=name)
        stamp = (current.st_dev, current.st_ino, current.st_size, current.st_mtime_ns, current.st_ctime_ns)
        if self._stamps.setdefault(name, stamp) != stamp:
            raise refuse("CORRUPT", _CHANGED, file=name)


def read_file(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Read a small file that the user named, such as mapping rules or a config; a symbolic link is followed.

    Args:
        path: path of the file.
        max_bytes: maximum size of the file in bytes.

    Raises:
        Refused: with the code UNSUPPORTED if the path is a folder, a FIFO, a socket or a device; with the code CORRUPT
            if the file is too large.
        StorageError: with the code IO if the file is missing or unreadable.
    """
    shown = os.fspath(path)
    kind = _kind_of(shown)
    if kind != stat.S_IFREG:
        raise _not_regular(shown, kind, "Give a regular file; save the data to a file first.")
    fd, _ = _open_regular(os.path.realpath(shown), shown)
    with os.fdopen(fd, "rb", buffering=0) as file:
        data = bytearray()
        while len(data) <= max_bytes:  # the size is not used, because it is 0 for files in /proc
            try:
                chunk = file.read(min(_BLOCK, max_bytes + 1 - len(data)))
            except OSError as error:
                raise storage_error(error, "reading it", shown) from error
            if not chunk:
                return bytes(data)
            data += chunk
    raise refuse("CORRUPT", f"the file is longer than the {max_bytes:,} bytes that it may have", file=shown)


def _open_regular(real: str, name: str) -> tuple[int, os.stat_result]:
    """Open a regular file; the type of the file is checked before and after opening, because the file may be replaced
    in between.

    Args:
        real: path of the file, without symbolic links.
        name: name of the file, for error messages.

    Returns:
        The descriptor of the file, which the caller closes, and the status of the file.
    """
    try:
        kind = stat.S_IFMT(os.lstat(real).st_mode)
        if kind != stat.S_IFREG:
            raise _not_regular(name, kind)
        fd = os.open(real, _FLAGS)
    except OSError as error:
        raise storage_error(error, "opening it", name) from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise _not_regular(name, stat.S_IFMT(status.st_mode))
    return fd, status


def _read(fd: int, name: str, offset: int, octets: memoryview) -> None:
    """Fill a view of bytes from an open file; see `Storage.read_into`."""
    bytes_read, size = 0, octets.nbytes
    while bytes_read < size:
        try:
            count = os.preadv(fd, [octets[bytes_read:]], offset + bytes_read)
        except OSError as error:
            raise storage_error(
                error, f"reading {size - bytes_read} bytes at offset {offset + bytes_read}", name
            ) from error
        if not count:
            raise refuse(
                "CORRUPT",
                f"the file is truncated: it ends at {offset + bytes_read}, and bytes {offset} to {offset + size} were "
                "requested",
                file=name,
                hint="Copy or download the file again.",
            )
        bytes_read += count


def _kind_of(path: str) -> int:
    """Return the file type at a path that the user typed; for a missing path, raise a StorageError (code IO) that
    suggests a similar path.
    """
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
        raise storage_error(error, "opening it", path) from error


def _similar(path: str) -> str:
    """Return a hint for a missing path: a URL with the missing slash, a similar name in the same folder, or a
    repository of a hub.
    """
    if at_home := home_hint(path):
        return at_home
    if slip := _ALMOST_URL.fullmatch(path):
        return f"Did you mean {slip[1]}://{slip[2]}?"
    missing = Path(path)
    if missing.is_symlink():
        return f"It is a link to {missing.readlink()}, which is not there."
    try:
        neighbours = [entry.name for entry in missing.parent.iterdir()]
    except OSError:
        if _REPOSITORY.fullmatch(path):
            return f"If it is a repository of a hub, write hf://{path}."
        return f"{missing.parent} does not exist either." if missing.parent.name else ""
    close = difflib.get_close_matches(missing.name, neighbours, n=1)
    return f"Did you mean {missing.parent / close[0]}?" if close else ""


def home_hint(path: str) -> str:
    """Return a hint for a path that begins with `~`; empty for any other path."""
    expanded = os.path.expanduser(path)  # noqa: PTH111 - of a text that stays one
    return "" if expanded == path else f"Only shells expand ~, and only outside quotes: write {expanded}."


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


def storage_error(error: OSError, doing: str, file: str) -> TransaxleError:
    """Return the StorageError for a failed system call; the code is NO_SPACE for a full disk or quota, otherwise IO.

    Args:
        error: the exception of the system call.
        doing: the action that failed, in words, such as `writing 4096 bytes at offset 0`.
        file: path of the file for which the system call failed.
    """
    if isinstance(error, TransaxleError):  # the exception is already an error of Transaxle
        return error
    number = error.errno or 0
    reason = os.strerror(number) if number else str(error)
    if number in _NO_SPACE:
        return refuse("NO_SPACE", f"{doing}: {reason}", file=file, hint="Free some space, or choose another place.")
    return refuse("IO", f"{doing}: {reason}", file=file, hint=_HINTS.get(number, ""), system=type(error))
