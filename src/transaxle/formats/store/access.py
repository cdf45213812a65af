"""Access: who may read and change what replaces something; a private checkpoint stays private when it is replaced.

New files get the permissions that the process gives to new files, its umask and the defaults of their folder. What
takes the place of something keeps that one's instead: its mode, its lists of users and groups (POSIX ACLs) and, where
the system permits it, its owner and group. Until then only its owner can open it, so there is no moment in which more
people may read it than may read what it replaces.
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
"""Modes of what will replace something, until it gets that one's access."""
_LISTS = ("system.posix_acl_access", "system.posix_acl_default")
"""Attributes in which Linux keeps the lists of users and groups; the second one, of folders, is for new files in it."""
_NO_LIST = frozenset({ENODATA, ENOTSUP, ENOSYS})


class Access(msgspec.Struct, frozen=True):
    """Who may do what with one file or folder."""

    mode: int
    """Permissions; of a folder also setgid and the sticky bit."""
    owner: int
    """Its user."""
    group: int
    """Its group."""
    lists: tuple[bytes | None, ...]
    """Lists of users and groups, as `_LISTS` names them; None for one that it does not have."""


def access_of(path: Path) -> Access:
    """Return the access to a file or folder; of a link, that to what it leads to.

    Raises:
        OSError: there is none.
    """
    status = path.stat()
    mask = 0o7777 if stat.S_ISDIR(status.st_mode) else 0o777
    return Access(status.st_mode & mask, status.st_uid, status.st_gid, tuple(_list_of(path, name) for name in _LISTS))


def give(path: Path, access: Access) -> None:
    """Give a file or folder this access, or less where its group cannot be kept: then what others have, too.

    Raises:
        OSError: the system refuses it.
    """
    status = path.stat()
    mode, lists = access.mode, access.lists
    if (status.st_uid, status.st_gid) != (access.owner, access.group) and not _owned(path, access):
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
def opened_draft(draft: Path, replaced: Path) -> Iterator[BinaryIO]:
    """Create and open a file that will be renamed to another; written, it has that one's access if it is there.

    Args:
        draft: the file; one of this name that a killed run has left is removed.
        replaced: the other one.

    Raises:
        OSError: it cannot be written.
    """
    draft.unlink(missing_ok=True)
    access = access_of(replaced) if replaced.exists() else None
    mode = 0o666 if access is None else PRIVATE_FILE
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
        yield file
    if access is not None:
        give(draft, access)


def is_empty(replaced: Path) -> bool:
    """Tell whether what will be replaced is an empty folder."""
    try:
        return replaced.is_dir() and next(replaced.iterdir(), None) is None
    except OSError:
        return False


def give_alike(work: Path, replaced: Path) -> None:
    """Give finished work the access of what it replaces: each file and folder that of its namesake.

    A file without one gets what all files that are replaced have in common, so that no new name makes readable what
    was private; folders likewise. If no files are replaced, the new ones keep what they have.

    Args:
        work: the file or folder.
        replaced: what is in its place.

    Raises:
        OSError: something disappears meanwhile, or the system refuses it.
    """
    if work.is_dir() and replaced.is_dir():
        files, folders = _accesses(replaced)
        for path in _below(work):
            namesakes = folders if path.is_dir() else files
            name = str(path.relative_to(work))
            if namesakes:
                give(path, namesakes.get(name) or _common(namesakes.values()))
    give(work, access_of(replaced))


def _accesses(folder: Path) -> tuple[dict[str, Access], dict[str, Access]]:
    """Return the access to the files below a folder, and to all folders, by relative path."""
    files: dict[str, Access] = {}
    folders = {".": access_of(folder)}
    for path in _below(folder):
        with suppress(FileNotFoundError):  # a link that leads nowhere
            (folders if path.is_dir() else files)[str(path.relative_to(folder))] = access_of(path)
    return files, folders


def _common(accesses: Collection[Access]) -> Access:
    """Return the access that everybody has who has every one of these."""
    first = next(iter(accesses))
    if all(access == first for access in accesses):
        return first
    mode = reduce(and_, (access.mode for access in accesses))
    if any(access.group != first.group or any(access.lists) for access in accesses):
        mode &= ~0o070  # what these bits mean differs
    return Access(mode, first.owner, first.group, (None,) * len(_LISTS))


def _below(folder: Path) -> Iterator[Path]:
    """Yield all files and folders below a folder, the contents of each before itself."""
    for parent, folders, files in os.walk(folder, topdown=False, onerror=_raised):
        yield from (Path(parent, name) for name in (*files, *folders))


def _raised(error: OSError) -> None:
    raise error


def _owned(path: Path, access: Access) -> bool:
    """Give a file its owner and group, or the group alone; tell whether it has the group now."""
    for owner in (access.owner, -1):
        with suppress(OSError):
            os.chown(path, owner, access.group)
            return True
    return False


def _list_of(path: Path, name: str) -> bytes | None:
    try:
        return os.getxattr(path, name)
    except AttributeError:  # a system without such attributes
        return None
    except OSError as error:
        if error.errno in _NO_LIST:
            return None
        raise
