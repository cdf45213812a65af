"""Exchange: parcels of bytes between ranks, in rounds of bounded memory.

Every rank knows every parcel (its sender, receivers and size), so the rounds and the split sizes are computed alike
everywhere and no header travels. Over a network bytes go as uint8, which every backend carries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from transaxle.live.transport.shm_transport import Near
from transaxle.live.transport.world import World, collective

ROUND = 32 << 20
"""Bytes that a rank sends, and that it receives, in one round at most; a larger parcel has a round of its own."""
_ALIGNED = 64
"""Parcels begin at multiples of this in shared memory, so that strided copies move whole words."""
Fill = Callable[[int, np.ndarray], None]
"""`fill(parcel, buffer)`: put the parcel's bytes into the buffer."""
Take = Callable[[int, np.ndarray], None]
"""`take(parcel, buffer)`: do with the parcel's bytes what they came for; they stay until the next round."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Bytes that one rank has and others need."""

    sender: int
    """Global rank that has them."""
    receivers: tuple[int, ...]
    """Global ranks that need them, the sender perhaps among them."""
    size: int
    """Bytes."""


def rounds(parcels: Sequence[Parcel], limit: int = ROUND) -> Iterator[list[int]]:
    """Divide parcels into rounds in which no rank sends or receives more than `limit` bytes.

    Yields:
        the parcels' numbers, ascending.

    Post-condition: every parcel is in one round; one that is larger than the limit shares its round with none of the
    same sender or receivers.
    """
    waiting: dict[int, deque[int]] = {}
    for number, parcel in enumerate(parcels):
        waiting.setdefault(parcel.sender, deque()).append(number)
    while waiting:
        sent: dict[int, int] = {}
        received: dict[int, int] = {}
        chosen = []
        for sender, queue in list(waiting.items()):
            while queue:
                parcel = parcels[queue[0]]
                others = [rank for rank in parcel.receivers if rank != sender]
                out = sent.get(sender, 0) + parcel.size * len(others)
                most = max((received.get(rank, 0) + parcel.size for rank in others), default=0)
                busy = sent.get(sender, 0) or any(received.get(rank, 0) for rank in others)
                if max(out, most) > limit and busy:
                    break
                sent[sender] = out
                received.update({rank: received.get(rank, 0) + parcel.size for rank in others})
                chosen.append(queue.popleft())
            if not queue:
                del waiting[sender]
        yield sorted(chosen)


class Exchange:
    """Moves parcels round by round: between ranks of one machine in shared memory, else over the process group.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._near = Near(world)
        self._device = world.device

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
            if any(r != parcel.sender and not self._near.reaches(parcel.sender, r) for r in parcel.receivers)
        ]
        packed: dict[int, np.ndarray] = {}
        for number, parcel in enumerate(parcels):
            if parcel.sender == rank:
                near = any(self._near.reaches(rank, other) for other in parcel.receivers)
                held = self._near.room(places[number], parcel.size) if near else np.empty(parcel.size, np.uint8)
                fill(number, held)
                packed[number] = held
                if rank in parcel.receivers:
                    take(number, held)
        received = self._take_near(parcels, places, take)
        if far:
            received += self._take_far(parcels, far, packed, take)
        return received

    def close(self) -> None:
        """Let go what the rounds needed."""
        self._near.close()

    def _placed(self, parcels: Sequence[Parcel]) -> list[int]:
        """Return where each parcel lies in its sender's region, and make room for them."""
        ends: dict[int, int] = {}
        places = []
        for parcel in parcels:
            places.append(ends.get(parcel.sender, 0))
            if any(rank != parcel.sender for rank in parcel.receivers):
                ends[parcel.sender] = places[-1] + -(-parcel.size // _ALIGNED) * _ALIGNED
        if ends:
            self._near.prepare(max(ends.values()))
        return places

    def _take_near(self, parcels: Sequence[Parcel], places: Sequence[int], take: Take) -> int:
        """Wait until everybody has written, and read what is for this rank."""
        near = self._near
        if not any(near.reaches(parcel.sender, rank) for parcel in parcels for rank in parcel.receivers):
            return 0
        self._world.wait()
        received = 0
        for number, (parcel, place) in enumerate(zip(parcels, places, strict=True)):
            if self._world.rank in parcel.receivers and near.reaches(parcel.sender, self._world.rank):
                take(number, near.held(parcel.sender, place, parcel.size))
                received += parcel.size
        near.flip()
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
            distant = [r for r in parcels[number].receivers if r != sender and not self._near.reaches(sender, r)]
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
        with collective():
            dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=world.group)
        arrived = received.cpu().numpy()
        start = 0
        for number in (n for part in incoming for n in part):
            size = parcels[number].size
            take(number, arrived[start : start + size])
            start += size
        return start


def exchange(world: World, parcels: Sequence[Parcel], fill: Fill, take: Take, limit: int = ROUND) -> int:
    """Send parcels; collective over the world, which must pass equal parcels on every rank.

    Args:
        world: the ranks.
        parcels: what moves; a rank that is sender and receiver gets its own without the network.
        fill: called on the sender, once per parcel.
        take: called on each receiver, once per parcel.
        limit: bytes per rank and round.

    Returns:
        bytes that this rank received from others.
    """
    way = Exchange(world)
    total = 0
    for chosen in rounds(parcels, limit):

        def filled(number: int, buffer: np.ndarray, chosen: list[int] = chosen) -> None:
            fill(chosen[number], buffer)

        def taken(number: int, buffer: np.ndarray, chosen: list[int] = chosen) -> None:
            take(chosen[number], buffer)

        total += way.round([parcels[number] for number in chosen], filled, taken)
    way.close()
    return total
