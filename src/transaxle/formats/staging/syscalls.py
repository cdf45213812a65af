"""Linux calls that Python lacks, with fallbacks for systems and file systems without them.

- reserving space for a file before it is written, so that a full disk is noticed before the work and not during it
  (`os.posix_fallocate` does not help: where the file system cannot reserve, it writes to every block instead);
- renaming only if the target does not exist;
- exchanging two names in one step, so that there is no moment without the old or the new.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import cast

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
_IN_MEMORY = frozenset({0x01021994, 0x858458F6})
"""File systems in memory, tmpfs and ramfs, as `statfs` numbers them."""
_STATFS = 256
"""Bytes that hold its result on every Linux; the first word is the type."""
_NOT_HERE = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY})


def reserve(fd: int, size: int) -> bool:
    """Reserve disk space for the first `size` bytes of an open file; False where that is impossible, or makes no sense.

    In memory, to reserve is to allocate every page, by one processor, before the workers begin.

    Raises:
        OSError: ENOSPC, EFBIG, EIO, ….
    """
    if _is_in_memory(fd):
        return False
    call = _linux("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return call is not None and _succeeded(lambda: call(fd, 0, 0, size))


def _is_in_memory(fd: int) -> bool:
    call = _linux("fstatfs", ctypes.c_int, ctypes.c_void_p)
    status = ctypes.create_string_buffer(_STATFS)
    return call is not None and call(fd, status) == 0 and ctypes.c_ulong.from_buffer(status).value in _IN_MEMORY


def rename_new(old: str, new: str) -> None:
    """Rename to a name that does not exist yet.

    Where the file system cannot check and rename in one step, another process that creates the name in between loses
    a file or an empty folder.

    Raises:
        FileExistsError: the new name is taken.
        OSError: anything else that stands against it.
    """
    if _renameat2(old, new, _NOREPLACE):
        return
    if os.path.lexists(new):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
    os.rename(old, new)  # noqa: PTH104


def exchange(first: str, second: str) -> bool:
    """Exchange two existing names in one step; False if the file system cannot.

    Raises:
        OSError: any other failure.
    """
    return _renameat2(first, second, _EXCHANGE)


def _renameat2(old: str, new: str, flags: int) -> bool:
    text = ctypes.c_char_p
    call = _linux("renameat2", ctypes.c_int, text, ctypes.c_int, text, ctypes.c_uint)
    if call is None:
        return False
    return _succeeded(lambda: call(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags))


@cache
def _linux(name: str, *types: type) -> Callable[..., int] | None:
    """Return a function of the C library, None where there is none."""
    if sys.platform != "linux":
        return None
    try:
        call = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError):
        return None
    call.argtypes, call.restype = types, ctypes.c_int
    return cast("Callable[..., int]", call)


def _succeeded(call: Callable[[], int]) -> bool:
    """Tell whether a call worked (True) or is not supported (False); raise OSError for any other failure."""
    while call() != 0:
        number = ctypes.get_errno()
        if number in _NOT_HERE:
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return True
