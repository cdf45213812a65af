"""Tensors on their way between ranks: all at once, or in buckets of bounded memory.

Exchange between the ranks of a process group: through shared memory on one machine, over the network otherwise.

The split sizes are computed alike everywhere and no header travels. Over a network bytes go as uint8, which every
backend carries.

**Buckets**: rounds of parcels that are sent again and again. Where each parcel lies is found out once.

Every rank has two buckets: while one is read, or on its way, the next is packed. A third of each is shared memory,
in which other ranks of the machine read; a third is for what is sent over a network, and a third for what comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from transaxle.live.transport.shared_memory import ShmTransport, aligned
from transaxle.live.transport.world import World, collective
from transaxle.move.transfer import Fill, Parcel, Take
from transaxle.torch_tensors import of_bytes


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
                ends[parcel.sender] = places[-1] + aligned(parcel.size)
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


Work = Callable[[int, int, torch.Tensor], None]
"""`work(round, parcel, buffer)`: pack a parcel's bytes into the buffer, or take them out of it; it must not raise."""
SHARES = 3
"""Parts of a bucket: a round may send, and receive, as many bytes as one of them has."""
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
                ends[parcel.sender] = near_places[number] + aligned(parcel.size)
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


def _sent_near(parcels: Sequence[Parcel]) -> dict[int, int]:
    """Return the bytes of shared memory that each rank needs, if all ranks saw each other."""
    ends: dict[int, int] = {}
    for parcel in parcels:
        if any(rank != parcel.sender for rank in parcel.receivers):
            ends[parcel.sender] = ends.get(parcel.sender, 0) + aligned(parcel.size)
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
            at += aligned(parcels[number].size)
        sizes.append(at - begin)
    yield from places.items()
