"""Shared memory that several processes of one machine map. The shared memory has no file name, so nothing remains when
the processes have ended.

Ranks on one machine exchange bytes through shared memory; over the network, the bytes would be copied four more times.
Each rank has a region of memory with two halves. While other ranks read one half, the rank writes the bytes of the next
round into the other half. Ranks that cannot map each other's regions (because they are on different machines, or in
different containers) use the network.
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
"""Text of the link in `/proc/PID/fd` that represents a region's file descriptor."""
_ALIGNED = 64
"""Alignment in bytes: tensors and parcels (blocks of bytes) begin at multiples of 64, so that strided copies move whole
words.
"""


def align(size: int) -> int:
    """Round a size in bytes up to a multiple of the alignment, which is where the next tensor or parcel may begin."""
    return -(-size // _ALIGNED) * _ALIGNED


@dataclass(frozen=True, slots=True)
class Address:
    """Address by which another process of the same user can map a region."""

    pid: int
    """Process id of the process that created the region."""
    fd: int
    """The region's file descriptor in that process."""
    name: str
    """Text of the descriptor's link in `/proc`, which is unique across machines."""


wire.tellable(Address)


class Region:
    """A region of memory that other processes can map.

    Args:
        size: size of the region in bytes.
        fd: file descriptor of an existing region, which this object then owns; None means that a region is created.
    """

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.size = size
        self._name = f"transaxle-{secrets.token_hex(16)}"
        self.fd = self._create() if fd is None else fd
        try:
            if fd is None:
                os.ftruncate(self.fd, max(size, 1))
            mapped = mmap.mmap(self.fd, max(size, 1), flags=mmap.MAP_SHARED | _POPULATE)
        except BaseException:
            self.close()
            raise
        self.bytes: Bytes = np.frombuffer(mapped, np.uint8)[:size]
        """The bytes of the region; its memory remains mapped while any array refers to it."""

    def _create(self) -> int:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create(self._name, os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        return fd

    @property
    def address(self) -> Address:
        """Address by which other processes can map this region."""
        return Address(os.getpid(), self.fd, f"/memfd:{self._name} (deleted)")

    def close(self) -> None:
        """Close the file descriptor. Existing mappings remain, but no other process can map the region any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def map_region(address: Address) -> Bytes | None:
    """Map a region of another process for reading; return None if this process has no access to the region.

    The name is compared before anything is opened, because in a different container the process id may belong to an
    unrelated process. An address whose name is not the name of a region is refused, so that a false address cannot make
    this process read other files.
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
    """The shared memory regions of this rank, and of the ranks whose regions it can map.

    Args:
        world: all ranks that take part.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._half = 0
        self._turn = 0
        self._region: Region | None = None
        self._mapped: dict[int, Bytes] = {}
        self._readers: dict[int, frozenset[int]] = {}

    @property
    def size(self) -> int:
        """Size of this rank's region in bytes."""
        return 0 if self._region is None else self._region.size

    def prepare(self, need: int) -> None:
        """Make room for `need` bytes per rank and round. All ranks must call this method, with the same `need`."""
        # All ranks pass the same sizes, so either all ranks skip the collective calls below, or all ranks make them.
        if need <= self._half:
            return
        self._half = -(-max(need, _GRAIN) // _GRAIN) * _GRAIN
        self.close()
        try:
            # A failure of these steps is not raised: the bytes of a rank without a region are sent over the network.
            self._region = Region(2 * self._half)
        except (OSError, ValueError):
            self._region = None
        own_address: Address | None = None if self._region is None else self._region.address
        addresses = dict(zip(self._world.ranks, self._world.gather(own_address), strict=True))
        addresses_of_others = {rank: address for rank, address in addresses.items() if rank != self._world.rank}
        mapped = {
            rank: None if address is None else map_region(address) for rank, address in addresses_of_others.items()
        }
        self._mapped = {rank: region for rank, region in mapped.items() if region is not None}
        # Every rank must know which ranks can map which regions, because sender and receiver must choose the same
        # transport.
        seen_by_rank = self._world.gather(frozenset(self._mapped))
        self._readers = {
            sender: frozenset(
                rank for rank, sees in zip(self._world.ranks, seen_by_rank, strict=True) if sender in sees
            )
            for sender in self._world.ranks
        }

    def reaches(self, sender: int, receiver: int) -> bool:
        """Return whether a receiver can map a sender's region; the answer is equal on all ranks."""
        return receiver in self._readers.get(sender, ())

    @property
    def reaches_any(self) -> bool:
        """Return whether any rank can map a region besides its own; the answer is equal on all ranks."""
        return any(self._readers.values())

    def buffer(self, start: int, size: int) -> Bytes:
        """Return `size` writable bytes of this rank's region, in the half that belongs to the present round."""
        if self._region is None:
            raise ValueError("this rank has no shared memory")
        begin = self._turn * self._half + start
        return self._region.bytes[begin : begin + size]

    def bytes_from(self, sender: int, start: int, size: int) -> Bytes:
        """Return bytes that the sender has written in this round; they are valid until the next round ends."""
        begin = self._turn * self._half + start
        return self._mapped[sender][begin : begin + size]

    def flip(self) -> None:
        """End a round; the next round uses the other half of each region."""
        # Other ranks may still be reading the half of this round.
        self._turn = 1 - self._turn

    def close(self) -> None:
        """Release the regions; memory to which arrays still refer remains mapped."""
        if self._region is not None:
            self._region.close()
        self._region = None
        self._mapped = {}
        self._readers = {}
