"""Exchange between the ranks of a process group: through shared memory on one machine, over the network otherwise.

The split sizes are computed alike everywhere and no header travels. Over a network bytes go as uint8, which every
backend carries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from transaxle.live.transport.shm_transport import ShmTransport
from transaxle.live.transport.world import World, collective
from transaxle.move.endpoint import Fill, Parcel, Take

_ALIGNED = 64
"""Parcels begin at multiples of this in shared memory, so that strided copies move whole words."""


def begin_all_to_all(
    world: World, received: torch.Tensor, sent: torch.Tensor, receive_sizes: list[int], send_sizes: list[int]
) -> Callable[[], None]:
    """Begin to send bytes of every rank to every other one, and return what waits until they are there; collective.

    Args:
        world: the ranks.
        received: where they go, those of the first rank first.
        sent: what this rank sends, that for the first rank first.
        receive_sizes: bytes from each rank.
        send_sizes: bytes for each rank.

    Raises:
        StorageError: IO where a rank is lost; so does what is returned.
    """
    with collective():
        work = dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=world.group, async_op=True)

    def wait() -> None:
        with collective():
            work.wait()

    return wait


class RankExchange:
    """Moves parcels round by round: between ranks of one machine in shared memory, else over the process group.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._opened: ShmTransport | None = None
        self._device = world.device
        self.rank = world.rank
        self.ranks = world.ranks
        self.received = 0
        """Bytes that this rank has received from others."""

    def round(self, parcels: Sequence[Parcel], fill: Fill, take: Take) -> int:
        """Send parcels, all at once; collective over the world, which must pass equal parcels on every rank.

        Args:
            parcels: what moves; a rank that is sender and receiver gets its own without sending it.
            fill: called on the sender, once per parcel.
            take: called on each receiver, once per parcel; the bytes stay until the next round begins.

        Returns:
            bytes that this rank received from others.
        """
        rank = self._world.rank
        places = self._placed(parcels)
        far = [
            number
            for number, parcel in enumerate(parcels)
            if any(r != parcel.sender and not self._shm.reaches(parcel.sender, r) for r in parcel.receivers)
        ]
        packed: dict[int, np.ndarray] = {}
        for number, parcel in enumerate(parcels):
            if parcel.sender == rank:
                reached = any(self._shm.reaches(rank, other) for other in parcel.receivers)
                buffer = self._shm.room(places[number], parcel.size) if reached else np.empty(parcel.size, np.uint8)
                fill(number, buffer)
                packed[number] = buffer
                if rank in parcel.receivers:
                    take(number, buffer)
        received = self._take_near(parcels, places, take)
        if far:
            received += self._take_far(parcels, far, packed, take)
        self.received += received
        return received

    def close(self) -> None:
        """Let go what the rounds needed."""
        if self._opened is not None:
            self._opened.close()

    @property
    def _shm(self) -> ShmTransport:
        """Shared memory; it is opened for the first round."""
        if self._opened is None:
            self._opened = ShmTransport(self._world)
        return self._opened

    def _placed(self, parcels: Sequence[Parcel]) -> list[int]:
        """Return where each parcel lies in its sender's region, and make room for them."""
        ends: dict[int, int] = {}
        places = []
        for parcel in parcels:
            places.append(ends.get(parcel.sender, 0))
            if any(rank != parcel.sender for rank in parcel.receivers):
                ends[parcel.sender] = places[-1] + -(-parcel.size // _ALIGNED) * _ALIGNED
        if ends:
            self._shm.prepare(max(ends.values()))
        return places

    def _take_near(self, parcels: Sequence[Parcel], places: Sequence[int], take: Take) -> int:
        """Wait until everybody has written, and read what is for this rank."""
        shm = self._shm
        if not any(shm.reaches(parcel.sender, rank) for parcel in parcels for rank in parcel.receivers):
            return 0
        self._world.wait()
        received = 0
        for number, (parcel, place) in enumerate(zip(parcels, places, strict=True)):
            if self._world.rank in parcel.receivers and shm.reaches(parcel.sender, self._world.rank):
                take(number, shm.received(parcel.sender, place, parcel.size))
                received += parcel.size
        shm.flip()
        return received

    def _take_far(
        self, parcels: Sequence[Parcel], numbers: Sequence[int], packed: Mapping[int, np.ndarray], take: Take
    ) -> int:
        """Send over the process group what no shared memory carries."""
        world = self._world
        places = {rank: place for place, rank in enumerate(world.ranks)}
        outgoing: list[list[np.ndarray]] = [[] for _ in range(world.size)]
        incoming: list[list[int]] = [[] for _ in range(world.size)]
        for number in numbers:
            sender = parcels[number].sender
            distant = [r for r in parcels[number].receivers if r != sender and not self._shm.reaches(sender, r)]
            if sender == world.rank:
                for rank in distant:
                    outgoing[places[rank]].append(packed[number])
            elif world.rank in distant:
                incoming[places[sender]].append(number)
        send_sizes = [sum(map(len, part)) for part in outgoing]
        receive_sizes = [sum(parcels[n].size for n in part) for part in incoming]
        flat = np.concatenate([piece for part in outgoing for piece in part] or [np.empty(0, np.uint8)])
        sent = torch.from_numpy(flat).to(self._device)
        received = torch.empty(sum(receive_sizes), dtype=torch.uint8, device=self._device)
        begin_all_to_all(world, received, sent, receive_sizes, send_sizes)()
        arrived = received.cpu().numpy()
        start = 0
        for number in (n for part in incoming for n in part):
            size = parcels[number].size
            take(number, arrived[start : start + size])
            start += size
        return start
