"""Memory that several processes of one machine map. It has no name in any folder: nothing is left of it.

Ranks of one machine hand bytes over in shared memory: a network would copy them four times more.

Each rank has a region that the others read. It has two halves: while one round is being read, the next is written.
Ranks that do not see each other (on other machines, in other containers) are told so, and take the network.
"""

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
from transaxle.live.transport.world import World
from transaxle.torch_tensors import Bytes

_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
_NAME = re.compile(r"/memfd:transaxle-[0-9a-f]{32} \(deleted\)")
"""What the system calls our regions."""
_ALIGNED = 64
"""Tensors and parcels begin at multiples of this, so that strided copies move whole words."""


def aligned(size: int) -> int:
    """Return the bytes that so many take, up to where the next tensor or parcel may begin."""
    return -(-size // _ALIGNED) * _ALIGNED


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


_GRAIN = 1 << 20


class ShmTransport:
    """The regions of shared memory of all ranks, as far as this one sees them.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._half = 0
        self._turn = 0
        self._own: Region | None = None
        self._seen: dict[int, Bytes] = {}
        self._readers: dict[int, frozenset[int]] = {}

    @property
    def size(self) -> int:
        """Bytes of this rank's region."""
        return 0 if self._own is None else self._own.size

    def prepare(self, need: int) -> None:
        """Make room for so many bytes of every rank; collective over the world, which must ask for equally many."""
        # All ranks ask for the same size, so all skip the collective calls below, or none does.
        if need <= self._half:
            return
        self._half = -(-max(need, _GRAIN) // _GRAIN) * _GRAIN
        self.close()
        try:
            # Failure is not an error: a rank without a region is unreachable, and its bytes take the network.
            self._own = Region(2 * self._half)
        except (OSError, ValueError):
            self._own = None
        own_address: Address | None = None if self._own is None else self._own.address
        addresses = dict(zip(self._world.ranks, self._world.gather(own_address), strict=True))
        others = {rank: address for rank, address in addresses.items() if rank != self._world.rank}
        mapped = {rank: None if address is None else seen(address) for rank, address in others.items()}
        self._seen = {rank: region for rank, region in mapped.items() if region is not None}
        # Every rank must know who sees whom: sender and receiver have to choose the same way without another message.
        seen_by_rank = self._world.gather(frozenset(self._seen))
        self._readers = {
            sender: frozenset(
                rank for rank, sees in zip(self._world.ranks, seen_by_rank, strict=True) if sender in sees
            )
            for sender in self._world.ranks
        }

    def reaches(self, sender: int, receiver: int) -> bool:
        """Tell whether one rank sees what another one has written; all ranks answer alike."""
        return receiver in self._readers.get(sender, ())

    @property
    def reaches_any(self) -> bool:
        """Tell whether any rank sees another one; all ranks answer alike."""
        return any(self._readers.values())

    def room(self, start: int, size: int) -> Bytes:
        """Return room in this rank's region, for the round that comes."""
        if self._own is None:
            raise ValueError("this rank has no shared memory")
        begin = self._turn * self._half + start
        return self._own.bytes[begin : begin + size]

    def received(self, sender: int, start: int, size: int) -> Bytes:
        """Return what another rank has written, until the end of the next round."""
        begin = self._turn * self._half + start
        return self._seen[sender][begin : begin + size]

    def flip(self) -> None:
        """End a round: what is written next goes to the other half."""
        # Readers may still be reading the half just exchanged, so the next round writes to the other one.
        self._turn = 1 - self._turn

    def close(self) -> None:
        """Let the regions go; what somebody still refers to stays."""
        if self._own is not None:
            self._own.close()
        self._own = None
        self._seen = {}
        self._readers = {}
