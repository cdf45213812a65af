"""Buckets: rounds of parcels that are sent again and again. Where each parcel lies is found out once.

Every rank has two buckets: while one is read, or on its way, the next is packed. A third of each is shared memory, in
which other ranks of the machine read; a third is for what is sent over a network, and a third for what comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from transaxle.live.transport.shm_transport import ShmTransport
from transaxle.live.transport.tensor_exchange import begin_all_to_all
from transaxle.live.transport.world import World
from transaxle.move.endpoint import Parcel
from transaxle.torch_tensors.local_tensor import of_bytes

Work = Callable[[int, int, torch.Tensor], None]
"""`work(round, parcel, buffer)`: pack a parcel's bytes into the buffer, or take them out of it; it must not raise."""
SHARES = 3
"""Parts of a bucket: a round may send, and receive, as many bytes as one of them has."""
_ALIGNED = 64
"""Parcels begin at multiples of this, so that a buffer can be seen as values of any type."""


@dataclass
class _Round:
    """One round, as one rank sees it; places are bytes from the beginning of a bucket."""

    packs: list[tuple[int, int, int | None, list[int]]] = field(default_factory=list)
    """Of each own parcel: number, size, place in shared memory, places in what is sent over the network."""
    near: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Of each parcel that is read in shared memory: number, size, sender, place."""
    far: list[tuple[int, int, int]] = field(default_factory=list)
    """Of each parcel that comes over the network: number, size, place."""
    send_sizes: list[int] = field(default_factory=list)
    """Bytes for each rank."""
    receive_sizes: list[int] = field(default_factory=list)
    """Bytes from each rank."""
    meets: bool = False
    """Whether any rank reads shared memory of another one."""
    sends: bool = False
    """Whether any rank sends anything over the network."""


@dataclass(frozen=True)
class Route:
    """Rounds with a place for everything."""

    rounds: Sequence[_Round]
    """The rounds."""
    received: int
    """Bytes that this rank receives in all of them."""


class BucketExchange:
    """Sends parcels of bytes on routes.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._device = world.device
        self._shm = ShmTransport(world)
        self._sent, self._arrived = _Halves(self._device), _Halves(self._device)

    @property
    def held(self) -> int:
        """Bytes of this rank's buckets."""
        return self._shm.size + self._sent.size + self._arrived.size

    def route(self, rounds: Sequence[Sequence[Parcel]]) -> Route:
        """Give everything its place; collective over the world, which must pass equal parcels on every rank."""
        if self._device.type == "cpu":
            need = max((max(_sent_near(parcels).values(), default=0) for parcels in rounds), default=0)
            if need:
                self._shm.prepare(need)
                if not self._shm.reaches_any:
                    self._shm.close()
        found = [self._placed(parcels) for parcels in rounds]
        received = sum(size for each in found for _, size, *_ in (*each.near, *each.far))
        return Route(found, received)

    def run(self, route: Route, pack: Work, take: Work) -> None:
        """Send the parcels of a route; collective over the world, whose routes must be those of the same parcels.

        Raises:
            StorageError: IO where a rank is lost.
        """
        waiting: tuple[int, _Round, Callable[[], None], torch.Tensor] | None = None
        for number, each in enumerate(route.rounds):
            sent = self._sent.half(number, sum(each.send_sizes))
            self._pack(number, each, sent, pack)
            if each.meets:
                self._world.wait()
                for parcel, size, sender, place in each.near:
                    take(number, parcel, of_bytes(self._shm.received(sender, place, size)))
                self._shm.flip()
            if waiting is not None:
                waiting[2]()
            begun = None
            if each.sends:
                arrived = self._arrived.half(number, sum(each.receive_sizes))
                wait = begin_all_to_all(self._world, arrived, sent, each.receive_sizes, each.send_sizes)
                begun = number, each, wait, arrived
            # What came is taken out while the next bucket is on its way.
            if waiting is not None:
                _take_out(waiting[0], waiting[1], waiting[3], take)
            waiting = begun
        if waiting is not None:
            waiting[2]()
            _take_out(waiting[0], waiting[1], waiting[3], take)

    def close(self) -> None:
        """Let the buckets go."""
        self._shm.close()
        self._sent, self._arrived = _Halves(self._device), _Halves(self._device)

    def _pack(self, number: int, each: _Round, sent: torch.Tensor, pack: Work) -> None:
        for parcel, size, near, far in each.packs:
            buffers = [] if near is None else [of_bytes(self._shm.room(near, size))]
            buffers += [sent[place : place + size] for place in far]
            pack(number, parcel, buffers[0])
            for other in buffers[1:]:
                other.copy_(buffers[0])

    def _placed(self, parcels: Sequence[Parcel]) -> _Round:
        """Find the places of one round."""
        world, found = self._world, _Round()
        position = {rank: number for number, rank in enumerate(world.ranks)}
        outgoing: list[list[int]] = [[] for _ in range(world.size)]
        incoming: list[list[int]] = [[] for _ in range(world.size)]
        near_places: dict[int, int] = {}
        ends: dict[int, int] = {}
        for number, parcel in enumerate(parcels):
            others = [rank for rank in parcel.receivers if rank != parcel.sender]
            far = [rank for rank in others if not self._shm.reaches(parcel.sender, rank)]
            near = [rank for rank in others if self._shm.reaches(parcel.sender, rank)]
            found.meets, found.sends = found.meets or bool(near), found.sends or bool(far)
            if near:
                near_places[number] = ends.get(parcel.sender, 0)
                ends[parcel.sender] = near_places[number] + _aligned(parcel.size)
                if world.rank in near:
                    found.near.append((number, parcel.size, parcel.sender, near_places[number]))
            if parcel.sender == world.rank:
                for rank in far:
                    outgoing[position[rank]].append(number)
            elif world.rank in far:
                incoming[position[parcel.sender]].append(number)
        far_places = dict(_laid(outgoing, parcels, found.send_sizes))
        found.far += (
            (number, parcels[number].size, places[0])
            for number, places in _laid(incoming, parcels, found.receive_sizes)
        )
        for number in sorted({*near_places, *far_places}):
            if parcels[number].sender == world.rank:
                found.packs.append((number, parcels[number].size, near_places.get(number), far_places.get(number, [])))
        return found


class _Halves:
    """Two buffers in turn, which grow where that is needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._halves = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]

    @property
    def size(self) -> int:
        """Bytes of both."""
        return sum(map(len, self._halves))

    def half(self, number: int, size: int) -> torch.Tensor:
        """Return so many bytes of one of them."""
        turn = number % 2
        if len(self._halves[turn]) < size:
            self._halves[turn] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._halves[turn][:size]


def _take_out(number: int, each: _Round, arrived: torch.Tensor, take: Work) -> None:
    for parcel, size, place in each.far:
        take(number, parcel, arrived[place : place + size])


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _sent_near(parcels: Sequence[Parcel]) -> dict[int, int]:
    """Return the bytes of shared memory that each rank needs, if all ranks saw each other."""
    ends: dict[int, int] = {}
    for parcel in parcels:
        if any(rank != parcel.sender for rank in parcel.receivers):
            ends[parcel.sender] = ends.get(parcel.sender, 0) + _aligned(parcel.size)
    return ends


def _laid(
    by_rank: Sequence[Sequence[int]], parcels: Sequence[Parcel], sizes: list[int]
) -> Iterator[tuple[int, list[int]]]:
    """Lay the parcels for each rank one after the other; yield (number, its places), and add up the sizes."""
    places: dict[int, list[int]] = {}
    at = 0
    for numbers in by_rank:
        begin = at
        for number in numbers:
            places.setdefault(number, []).append(at)
            at += _aligned(parcels[number].size)
        sizes.append(at - begin)
    yield from places.items()
