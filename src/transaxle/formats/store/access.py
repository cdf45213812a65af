"""File permissions of a new checkpoint: one that replaces a private checkpoint stays private.

New files get the usual permissions, by the process's umask and the defaults of their folder. A file or folder that
replaces another one gets the replaced one's access: its mode, its access control lists (POSIX ACLs) and, where the
system permits it, its owner and group. Until then only its owner can open it, so at no moment can more people read it
than could read the replaced one.
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
"""Modes of a folder and a file that will replace another one, until they get its access."""
_LISTS = ("system.posix_acl_access", "system.posix_acl_default")
"""Extended attributes with Linux's access control lists; the second one, of folders, is the default for new files."""
_NO_LIST = frozenset({ENODATA, ENOTSUP, ENOSYS})


class Access(msgspec.Struct, frozen=True):
    """Permissions, owner and access control lists of a file or folder."""

    mode: int
    """Permission bits; for a folder also setgid and the sticky bit."""
    owner: int
    """User id of the owner."""
    group: int
    """Group id."""
    lists: tuple[bytes | None, ...]
    """Access control lists, in the order of `_LISTS`; None for a missing one."""


def access_of(path: Path) -> Access:
    """Return the access to a file or folder; for a link, to its target.

    Raises:
        OSError: if it does not exist.
    """
    status = path.stat()
    mask = 0o7777 if stat.S_ISDIR(status.st_mode) else 0o777
    return Access(status.st_mode & mask, status.st_uid, status.st_gid, tuple(_list_of(path, name) for name in _LISTS))


def set_access(path: Path, access: Access) -> None:
    """Set the access to a file or folder; if its group cannot be set, the group gets only the rights of all users.

    Raises:
        OSError: if the system refuses it.
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
    """Create and open a draft that will be renamed to another file; at the end it gets the access of that file, if any.

    Args:
        draft: path of the draft; a leftover of a killed run is removed first.
        replaced: path of the file that the draft will replace.

    Raises:
        OSError: if it cannot be written.
    """
    draft.unlink(missing_ok=True)
    access = access_of(replaced) if replaced.exists() else None
    mode = 0o666 if access is None else PRIVATE_FILE
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        yield file
    if access is not None:
        set_access(draft, access)


def is_empty(replaced: Path) -> bool:
    """Tell whether the path to be replaced is an empty folder."""
    try:
        return replaced.is_dir() and next(replaced.iterdir(), None) is None
    except OSError:
        return False


def copy_access(work: Path, replaced: Path) -> None:
    """Give each file and folder of finished work the access of its namesake, the replaced one at the same relative
    path.

    A file without a namesake gets the access that all replaced files have in common, so that a new name never makes
    private data readable; folders likewise. If the replaced folder has no files, the new files keep the access that
    they were created with.

    Args:
        work: the finished file or folder.
        replaced: the file or folder that `work` replaces.

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
    """Return relative path -> access for the files below a folder, and likewise for the folders."""
    files: dict[str, Access] = {}
    folders = {".": access_of(folder)}
    for path in _below(folder):
        with suppress(FileNotFoundError):  # a dangling link
            (folders if path.is_dir() else files)[str(path.relative_to(folder))] = access_of(path)
    return files, folders


def _common(accesses: Collection[Access]) -> Access:
    """Return the access common to several ones: only rights that all of them grant."""
    first = next(iter(accesses))
    if all(access == first for access in accesses):
        return first
    mode = reduce(and_, (access.mode for access in accesses))
    if any(access.group != first.group or any(access.lists) for access in accesses):
        mode &= ~0o070  # the group bits mean different groups, or are the mask of a list
    return Access(mode, first.owner, first.group, (None,) * len(_LISTS))


def _below(folder: Path) -> Iterator[Path]:
    """Yield all files and folders below a folder, each folder after its contents."""
    for parent, folders, files in os.walk(folder, topdown=False, onerror=_raise):
        yield from (Path(parent, name) for name in (*files, *folders))


def _raise(error: OSError) -> None:
    raise error


def _set_owner(path: Path, access: Access) -> bool:
    """Set a file's owner and group, or only its group; tell whether that succeeded for the group."""
    for owner in (access.owner, -1):
        with suppress(OSError):
            os.chown(path, owner, access.group)
            return True
    return False


def _list_of(path: Path, name: str) -> bytes | None:
    try:
        return os.getxattr(path, name)
    except AttributeError:  # the system has no extended attributes
        return None
    except OSError as error:
        if error.errno in _NO_LIST:
            return None
        raise
