"""Memory that several processes of one machine map. It has no name in any folder: nothing is left of it."""

from __future__ import annotations

import mmap
import os
import re
import secrets
import tempfile
from dataclasses import dataclass
from typing import Self

import numpy as np

from transaxle.live.transport import wire
from transaxle.torch_tensors.local_tensor import Bytes

_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
_NAME = re.compile(r"/memfd:transaxle-[0-9a-f]{32} \(deleted\)")
"""What the system calls our regions."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where another process of the same user finds a region."""

    pid: int
    """Process that made it."""
    fd: int
    """Its descriptor there."""
    name: str
    """What the system calls it; nobody else's has this name, on this machine or another."""


wire.tellable(Address)


class Region:
    """Memory that can be mapped by others.

    Args:
        size: bytes.
        fd: an open region; it belongs to this object from now on. None: a new one is made.
    """

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.size = size
        self._name = f"transaxle-{secrets.token_hex(16)}"
        self.fd = self._made() if fd is None else fd
        try:
            if fd is None:
                os.ftruncate(self.fd, max(size, 1))
            mapped = mmap.mmap(self.fd, max(size, 1), flags=mmap.MAP_SHARED | _POPULATE)
        except BaseException:
            self.close()
            raise
        self.bytes: Bytes = np.frombuffer(mapped, np.uint8)[:size]
        """The memory; it stays for as long as somebody refers to it."""

    def _made(self) -> int:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create(self._name, os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        return fd

    @property
    def address(self) -> Address:
        """Where it is found."""
        return Address(os.getpid(), self.fd, f"/memfd:{self._name} (deleted)")

    def close(self) -> None:
        """Close the descriptor: who has mapped it keeps it, nobody else finds it any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def seen(address: Address) -> Bytes | None:
    """Map another process's region for reading; None where it cannot be seen from here.

    The name is compared before anything is opened: in another container the number may be another process's. It must be
    that of a region: whoever tells an address has no say in which other files are read.
    """
    if not _NAME.fullmatch(address.name):
        return None
    path = f"/proc/{address.pid}/fd/{address.fd}"
    try:
        if os.readlink(path) != address.name:  # noqa: PTH115 - a Path would normalise it
            return None
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return np.frombuffer(mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | _POPULATE, prot=mmap.PROT_READ), np.uint8)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
