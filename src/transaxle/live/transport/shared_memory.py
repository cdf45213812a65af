"""Shared memory that several processes of one machine map, without a file name, so nothing remains after they end.

Ranks of one machine exchange bytes through it; a network would need four more copies. Each rank has a region that the
other ranks read, with two halves: while one round is read, the next one is written. Ranks that cannot map each other's
regions (on other machines, in other containers) use the network.
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
"""Link text of a region's descriptor in `/proc`."""
_ALIGNED = 64
"""Tensors and parcels begin at multiples of this, so that strided copies move whole words."""


def align(size: int) -> int:
    """Round a size up to the offset at which the next tensor or parcel may begin."""
    return -(-size // _ALIGNED) * _ALIGNED


@dataclass(frozen=True, slots=True)
class Address:
    """Address by which another process of the same user can map a region."""

    pid: int
    """Process id of the region's creator."""
    fd: int
    """File descriptor in that process."""
    name: str
    """Link text of the descriptor, unique across machines."""


wire.tellable(Address)


class Region:
    """Memory that other processes can map.

    Args:
        size: size in bytes.
        fd: descriptor of an existing region, which this object will own; None: create a region.
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
        """The mapped memory; it stays mapped while any array refers to it."""

    def _create(self) -> int:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create(self._name, os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        return fd

    @property
    def address(self) -> Address:
        """Address for other processes."""
        return Address(os.getpid(), self.fd, f"/memfd:{self._name} (deleted)")

    def close(self) -> None:
        """Close the descriptor; existing mappings stay, but no other process can map the region any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def map_region(address: Address) -> Bytes | None:
    """Map another process's region for reading; None if it is not visible from this process.

    The name is compared before anything is opened, because in another container the process id may belong to another
    process. The name must be that of a region, so a false address cannot make this process read other files.
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
    """The ranks' regions of shared memory, as far as this rank can map them.

    Args:
        world: the ranks.
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
        """Provide `need` bytes per rank and round; collective over the world, with the same `need` on all ranks."""
        # All ranks ask for the same size, so either all of them skip the collective calls below or none does.
        if need <= self._half:
            return
        self._half = -(-max(need, _GRAIN) // _GRAIN) * _GRAIN
        self.close()
        try:
            # Failure is no error: the bytes of a rank without a region go over the network.
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
        # Every rank must know which ranks can map which regions: sender and receiver must choose the same transport.
        seen_by_rank = self._world.gather(frozenset(self._mapped))
        self._readers = {
            sender: frozenset(
                rank for rank, sees in zip(self._world.ranks, seen_by_rank, strict=True) if sender in sees
            )
            for sender in self._world.ranks
        }

    def reaches(self, sender: int, receiver: int) -> bool:
        """Tell whether a receiver can map a sender's region; equal on all ranks."""
        return receiver in self._readers.get(sender, ())

    @property
    def reaches_any(self) -> bool:
        """Whether any rank can map another rank's region; equal on all ranks."""
        return any(self._readers.values())

    def buffer(self, start: int, size: int) -> Bytes:
        """Return memory in this rank's region for the present round."""
        if self._region is None:
            raise ValueError("this rank has no shared memory")
        begin = self._turn * self._half + start
        return self._region.bytes[begin : begin + size]

    def bytes_from(self, sender: int, start: int, size: int) -> Bytes:
        """Return bytes that another rank has written; valid until the end of the next round."""
        begin = self._turn * self._half + start
        return self._mapped[sender][begin : begin + size]

    def flip(self) -> None:
        """End a round: the next one uses the other half."""
        # Other ranks may still be reading this half.
        self._turn = 1 - self._turn

    def close(self) -> None:
        """Release the regions; memory to which arrays still refer stays mapped."""
        if self._region is not None:
            self._region.close()
        self._region = None
        self._mapped = {}
        self._readers = {}
