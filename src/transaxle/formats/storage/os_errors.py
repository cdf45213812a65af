"""Operating-system errors as ours: every `OSError` of this room passes through here."""

from __future__ import annotations

import errno
import os

from transaxle.errors import TransaxleError, refuse

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
