"""File permissions of a new checkpoint: a checkpoint that replaces a private one stays private.

New files get the permissions that the process's umask and the folder's defaults allow, as usual. A file or folder that
replaces an existing one gets the access rights of its predecessor: mode, access control lists (POSIX ACLs) and, if the
system permits it, owner and group. Until then only the owner can open the new file, so at no moment can more people
read the new file than could read its predecessor.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from errno import ENODATA, ENOSYS, ENOTSUP
from functools import reduce
from operator import and_
from pathlib import Path
from typing import BinaryIO

import msgspec

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
"""Modes of a folder and of a file that will replace existing ones. At the end, the new folder or file gets the access
rights of the replaced one.
"""
_LISTS = ("system.posix_acl_access", "system.posix_acl_default")
"""Extended attributes in which Linux stores access control lists; the second list of a folder is the default for new
files in the folder."""
_NO_LIST = frozenset({ENODATA, ENOTSUP, ENOSYS})


class Access(msgspec.Struct, frozen=True):
    """Permissions, owner and access control lists of a file or folder."""

    mode: int
    """Permission bits; for a folder also setgid and the sticky bit."""
    owner: int
    """User id of the owner."""
    group: int
    """Group id of the file or folder."""
    lists: tuple[bytes | None, ...]
    """POSIX access control lists, in the order of `_LISTS`; None for a list that the file does not have."""


def access_of(path: Path) -> Access:
    """Return the access rights of a file or folder; for a symbolic link, those of the link's target.

    Raises:
        OSError: if the path does not exist.
    """
    status = path.stat()
    mask = 0o7777 if stat.S_ISDIR(status.st_mode) else 0o777
    return Access(status.st_mode & mask, status.st_uid, status.st_gid, tuple(_list_of(path, name) for name in _LISTS))


def set_access(path: Path, access: Access) -> None:
    """Set the access rights of a file or folder; if its group cannot be set, members of the group get only the rights
    of all other users.

    Raises:
        OSError: if the system refuses the change.
    """
    status = path.stat()
    mode, lists = access.mode, access.lists
    if (status.st_uid, status.st_gid) != (access.owner, access.group) and not _set_owner(path, access):
        mode = mode & 0o1707 | (mode & 0o070 & (mode & 0o007) << 3)
        lists = (None,) * len(_LISTS)
    for name, entries in zip(_LISTS, lists, strict=True):
        if entries != _list_of(path, name):
            if entries is None:
                os.removexattr(path, name)
            else:
                os.setxattr(path, name, entries)
    if path.stat().st_mode & 0o7777 != mode:
        path.chmod(mode)


@contextmanager
def open_draft(draft: Path, replaced: Path) -> Iterator[BinaryIO]:
    """Create and open a temporary file that will be renamed to its final path; on exit it gets the access rights of the
    file that it replaces, if there is one.

    Args:
        draft: path of the temporary file; a file that a killed run left at this path is removed first.
        replaced: final path, at which the temporary file will replace an existing file.

    Raises:
        OSError: if the temporary file cannot be written.
    """
    draft.unlink(missing_ok=True)
    access = access_of(replaced) if replaced.exists() else None
    mode = 0o666 if access is None else PRIVATE_FILE
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        yield file
    if access is not None:
        set_access(draft, access)


def is_empty(replaced: Path) -> bool:
    """Return whether the path that will be replaced is an empty folder."""
    try:
        return replaced.is_dir() and next(replaced.iterdir(), None) is None
    except OSError:
        return False


def copy_access(work: Path, replaced: Path) -> None:
    """Set the access rights of each new file and folder to the rights of the replaced file or folder at the same
    relative path.

    A new file that replaces no file gets only the rights that all replaced files have in common, so that private data
    never becomes readable. A new folder that replaces no folder gets the rights that all replaced folders have in
    common. If the replaced folder contains no files, the new files keep the access rights with which they were created.

    Args:
        work: path of the new file or folder, to which nothing more is written.
        replaced: path of the file or folder that `work` replaces.

    Raises:
        OSError: if a file disappears meanwhile, or the system refuses the change.
    """
    if work.is_dir() and replaced.is_dir():
        files, folders = _accesses(replaced)
        for path in _below(work):
            namesakes = folders if path.is_dir() else files
            name = str(path.relative_to(work))
            if namesakes:
                set_access(path, namesakes.get(name) or _common(namesakes.values()))
    set_access(work, access_of(replaced))


def _accesses(folder: Path) -> tuple[dict[str, Access], dict[str, Access]]:
    """Return two dicts from relative path to access rights: one for the files below a folder, one for its
    sub-folders.
    """
    files: dict[str, Access] = {}
    folders = {".": access_of(folder)}
    for path in _below(folder):
        with suppress(FileNotFoundError):  # the path is a symbolic link without a target
            (folders if path.is_dir() else files)[str(path.relative_to(folder))] = access_of(path)
    return files, folders


def _common(accesses: Collection[Access]) -> Access:
    """Return the rights that all of the given access rights have in common."""
    first = next(iter(accesses))
    if all(access == first for access in accesses):
        return first
    mode = reduce(and_, (access.mode for access in accesses))
    if any(access.group != first.group or any(access.lists) for access in accesses):
        # the rights of the group cannot be combined: the groups differ, or these bits are the mask of an access control
        # list
        mode &= ~0o070
    return Access(mode, first.owner, first.group, (None,) * len(_LISTS))


def _below(folder: Path) -> Iterator[Path]:
    """Yield all files and folders below a folder, each folder after its contents."""
    for parent, folders, files in os.walk(folder, topdown=False, onerror=_raise):
        yield from (Path(parent, name) for name in (*files, *folders))


def _raise(error: OSError) -> None:
    raise error


def _set_owner(path: Path, access: Access) -> bool:
    """Set a file's owner and group, or only its group; return whether the group was set."""
    for owner in (access.owner, -1):
        with suppress(OSError):
            os.chown(path, owner, access.group)
            return True
    return False


def _list_of(path: Path, name: str) -> bytes | None:
    try:
        return os.getxattr(path, name)
    except AttributeError:  # this operating system has no extended attributes
        return None
    except OSError as error:
        if error.errno in _NO_LIST:
            return None
        raise
