"""Exchange of the bytes of tensors between ranks: through shared memory within a machine, and otherwise over the
process group.

All ranks compute the sizes of all parcels (blocks of bytes from one rank to one or more ranks), so no headers are sent.
Bytes are sent as uint8, a dtype that every backend supports.

**Buckets**: the same rounds of parcels are sent many times, in a limited amount of memory, so the offsets of the
parcels are computed once. Every rank has two buckets (buffers). While one bucket is read or sent, the other bucket is
packed. A third of a bucket is shared memory for other ranks of the machine, a third is for bytes to send over the
network, and a third is for received bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from transaxle.live.transport.shared_memory import ShmTransport, align
from transaxle.live.transport.world import World, collective
from transaxle.move.transfer import Fill, Parcel, Take
from transaxle.torch_tensors import of_bytes


def begin_all_to_all(
    world: World, received: torch.Tensor, outgoing: torch.Tensor, receive_sizes: list[int], send_sizes: list[int]
) -> Callable[[], None]:
    """Start an all-to-all exchange of bytes, and return a function that waits for its end. All ranks must call this
    function and the returned function.

    Args:
        world: all ranks that take part.
        received: buffer for the received bytes, ordered by sending rank.
        outgoing: the bytes to send, ordered by receiving rank.
        receive_sizes: number of bytes from each rank.
        send_sizes: number of bytes for each rank.

    Raises:
        StorageError: with code IO, if a rank is lost; the returned function may raise it too.
    """
    with collective():
        work = dist.all_to_all_single(received, outgoing, receive_sizes, send_sizes, group=world.group, async_op=True)

    def wait() -> None:
        with collective():
            work.wait()

    return wait


class RankExchange:
    """Exchanges parcels (blocks of bytes) in rounds: through shared memory within a machine, and otherwise over the
    process group.

    Args:
        world: all ranks that take part.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._opened: ShmTransport | None = None
        self._device = world.device
        self.rank = world.rank
        self.ranks = world.ranks
        self.received = 0
        """Number of bytes that this rank has received from other ranks."""

    def round(self, parcels: Sequence[Parcel], fill: Fill, take: Take) -> int:
        """Exchange parcels in one round. All ranks must call this method, with the same list of parcels.

        Args:
            parcels: the parcels of all ranks; the bytes of a parcel from a rank to itself are only copied locally.
            fill: function that writes a parcel's bytes into a buffer; it is called on the sender, once per parcel.
            take: function that receives a parcel's bytes; it is called on each receiver, once per parcel. The bytes are
                valid until the next round begins.

        Returns:
            the number of bytes that this rank received from other ranks.
        """
        rank = self._world.rank
        places = self._place_parcels(parcels)
        far_numbers = [
            number
            for number, parcel in enumerate(parcels)
            if any(r != parcel.sender and not self._shm.reaches(parcel.sender, r) for r in parcel.receivers)
        ]
        packed: dict[int, np.ndarray] = {}
        for number, parcel in enumerate(parcels):
            if parcel.sender == rank:
                reached = any(self._shm.reaches(rank, other) for other in parcel.receivers)
                buffer = self._shm.buffer(places[number], parcel.size) if reached else np.empty(parcel.size, np.uint8)
                fill(number, buffer)
                packed[number] = buffer
                if rank in parcel.receivers:
                    take(number, buffer)
        received = self._take_near(parcels, places, take)
        if far_numbers:
            received += self._take_far(parcels, far_numbers, packed, take)
        self.received += received
        return received

    def close(self) -> None:
        """Release the shared memory."""
        if self._opened is not None:
            self._opened.close()

    @property
    def _shm(self) -> ShmTransport:
        """The shared memory of the ranks, which is created in the first round."""
        if self._opened is None:
            self._opened = ShmTransport(self._world)
        return self._opened

    def _place_parcels(self, parcels: Sequence[Parcel]) -> list[int]:
        """Return the offset of each parcel in the sender's shared memory, after making room for all parcels."""
        ends: dict[int, int] = {}
        places = []
        for parcel in parcels:
            places.append(ends.get(parcel.sender, 0))
            if any(rank != parcel.sender for rank in parcel.receivers):
                ends[parcel.sender] = places[-1] + align(parcel.size)
        if ends:
            self._shm.prepare(max(ends.values()))
        return places

    def _take_near(self, parcels: Sequence[Parcel], places: Sequence[int], take: Take) -> int:
        """Wait until all ranks have written their parcels, and read the parcels for this rank from shared memory."""
        shm = self._shm
        if not any(shm.reaches(parcel.sender, rank) for parcel in parcels for rank in parcel.receivers):
            return 0
        self._world.wait()
        received = 0
        for number, (parcel, place) in enumerate(zip(parcels, places, strict=True)):
            if self._world.rank in parcel.receivers and shm.reaches(parcel.sender, self._world.rank):
                take(number, shm.bytes_from(parcel.sender, place, parcel.size))
                received += parcel.size
        shm.flip()
        return received

    def _take_far(
        self, parcels: Sequence[Parcel], numbers: Sequence[int], packed: Mapping[int, np.ndarray], take: Take
    ) -> int:
        """Exchange, over the process group, the parcels whose receivers cannot read the sender's shared memory."""
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
        send_buffer = torch.from_numpy(flat).to(self._device)
        received = torch.empty(sum(receive_sizes), dtype=torch.uint8, device=self._device)
        begin_all_to_all(world, received, send_buffer, receive_sizes, send_sizes)()
        arrived = received.cpu().numpy()
        start = 0
        for number in (n for part in incoming for n in part):
            size = parcels[number].size
            take(number, arrived[start : start + size])
            start += size
        return start


Work = Callable[[int, int, torch.Tensor], None]
"""A function called as `work(round, parcel, buffer)`, which packs a parcel's bytes into the buffer, or reads them from
it. The function must not raise an error.
"""
SHARES = 3
"""Number of equal parts into which a bucket is divided. In one round, a rank may send, and may receive, at most the
size of one part.
"""


@dataclass
class _Round:
    """What one rank sends and receives in one round; all places are byte offsets in a bucket."""

    packs: list[tuple[int, int, int | None, list[int]]] = field(default_factory=list)
    """For each parcel that this rank sends: number of the parcel, size, place in shared memory, places in the network
    buffer.
    """
    near: list[tuple[int, int, int, int]] = field(default_factory=list)
    """For each parcel that this rank reads from shared memory: number of the parcel, size, sending rank, offset in the
    memory of the sending rank.
    """
    far: list[tuple[int, int, int]] = field(default_factory=list)
    """For each parcel that this rank receives over the network: number of the parcel, size, place."""
    send_sizes: list[int] = field(default_factory=list)
    """Number of bytes to send to each rank over the network."""
    receive_sizes: list[int] = field(default_factory=list)
    """Number of bytes to receive from each rank over the network."""
    meets: bool = False
    """Whether any rank reads another rank's shared memory in this round."""
    sends: bool = False
    """Whether any rank sends bytes over the network in this round."""


@dataclass(frozen=True)
class Route:
    """Rounds of parcels (blocks of bytes), with the place of every parcel in a bucket (buffer)."""

    rounds: Sequence[_Round]
    """The rounds, in the order in which they are exchanged."""
    received: int
    """Number of bytes that this rank receives in all rounds of the route."""


class BucketExchange:
    """Exchanges parcels (blocks of bytes) in the rounds of a `Route`, which is computed once and used many times.

    Args:
        world: all ranks that take part.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._device = world.device
        self._shm = ShmTransport(world)
        self._sent, self._arrived = _Halves(self._device), _Halves(self._device)

    @property
    def bucket_bytes(self) -> int:
        """Size of this rank's buckets in bytes."""
        return self._shm.size + self._sent.size + self._arrived.size

    def route(self, rounds: Sequence[Sequence[Parcel]]) -> Route:
        """Compute the places of all parcels. All ranks must call this method, with the same list of parcels."""
        if self._device.type == "cpu":
            need = max((max(_region_sizes(parcels).values(), default=0) for parcels in rounds), default=0)
            if need:
                self._shm.prepare(need)
                if not self._shm.reaches_any:
                    self._shm.close()
        placed_rounds = [self._place_parcels(parcels) for parcels in rounds]
        received = sum(size for each in placed_rounds for _, size, *_ in (*each.near, *each.far))
        return Route(placed_rounds, received)

    def run(self, route: Route, pack: Work, take: Work) -> None:
        """Exchange the parcels of a route; all ranks must call this method, each with its route for the same parcels.

        Raises:
            StorageError: with code IO, if a rank is lost.
        """
        waiting: tuple[int, _Round, Callable[[], None], torch.Tensor] | None = None
        for number, route_round in enumerate(route.rounds):
            send_buffer = self._sent.half(number, sum(route_round.send_sizes))
            self._pack(number, route_round, send_buffer, pack)
            if route_round.meets:
                self._world.wait()
                for parcel, size, sender, place in route_round.near:
                    take(number, parcel, of_bytes(self._shm.bytes_from(sender, place, size)))
                self._shm.flip()
            if waiting is not None:
                waiting[2]()
            pending = None
            if route_round.sends:
                arrived = self._arrived.half(number, sum(route_round.receive_sizes))
                wait = begin_all_to_all(
                    self._world, arrived, send_buffer, route_round.receive_sizes, route_round.send_sizes
                )
                pending = number, route_round, wait, arrived
            # The bytes of the previous round are read while the next bucket is sent.
            if waiting is not None:
                _take_out(waiting[0], waiting[1], waiting[3], take)
            waiting = pending
        if waiting is not None:
            waiting[2]()
            _take_out(waiting[0], waiting[1], waiting[3], take)

    def close(self) -> None:
        """Release the memory of the buckets."""
        self._shm.close()
        self._sent, self._arrived = _Halves(self._device), _Halves(self._device)

    def _pack(self, number: int, route_round: _Round, send_buffer: torch.Tensor, pack: Work) -> None:
        for parcel, size, near, far in route_round.packs:
            buffers = [] if near is None else [of_bytes(self._shm.buffer(near, size))]
            buffers += [send_buffer[place : place + size] for place in far]
            pack(number, parcel, buffers[0])
            for copy in buffers[1:]:
                copy.copy_(buffers[0])

    def _place_parcels(self, parcels: Sequence[Parcel]) -> _Round:
        """Compute the places of the parcels of one round."""
        world, placed = self._world, _Round()
        position = {rank: number for number, rank in enumerate(world.ranks)}
        outgoing: list[list[int]] = [[] for _ in range(world.size)]
        incoming: list[list[int]] = [[] for _ in range(world.size)]
        near_places: dict[int, int] = {}
        ends: dict[int, int] = {}
        for number, parcel in enumerate(parcels):
            receivers = [rank for rank in parcel.receivers if rank != parcel.sender]
            far = [rank for rank in receivers if not self._shm.reaches(parcel.sender, rank)]
            near = [rank for rank in receivers if self._shm.reaches(parcel.sender, rank)]
            placed.meets, placed.sends = placed.meets or bool(near), placed.sends or bool(far)
            if near:
                near_places[number] = ends.get(parcel.sender, 0)
                ends[parcel.sender] = near_places[number] + align(parcel.size)
                if world.rank in near:
                    placed.near.append((number, parcel.size, parcel.sender, near_places[number]))
            if parcel.sender == world.rank:
                for rank in far:
                    outgoing[position[rank]].append(number)
            elif world.rank in far:
                incoming[position[parcel.sender]].append(number)
        far_places = dict(_lay_out(outgoing, parcels, placed.send_sizes))
        placed.far += (
            (number, parcels[number].size, places[0])
            for number, places in _lay_out(incoming, parcels, placed.receive_sizes)
        )
        for number in sorted({*near_places, *far_places}):
            if parcels[number].sender == world.rank:
                placed.packs.append((number, parcels[number].size, near_places.get(number), far_places.get(number, [])))
        return placed


class _Halves:
    """Two buffers that successive rounds use in turn; they grow as needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._halves = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]

    @property
    def size(self) -> int:
        """Total size of both buffers in bytes."""
        return sum(map(len, self._halves))

    def half(self, number: int, size: int) -> torch.Tensor:
        """Return the first `size` bytes of the buffer that the round with this number uses."""
        turn = number % 2
        if len(self._halves[turn]) < size:
            self._halves[turn] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._halves[turn][:size]


def _take_out(number: int, route_round: _Round, arrived: torch.Tensor, take: Work) -> None:
    for parcel, size, place in route_round.far:
        take(number, parcel, arrived[place : place + size])


def _region_sizes(parcels: Sequence[Parcel]) -> dict[int, int]:
    """Return rank -> bytes of shared memory that the rank needs, if all ranks can map each other's regions."""
    ends: dict[int, int] = {}
    for parcel in parcels:
        if any(rank != parcel.sender for rank in parcel.receivers):
            ends[parcel.sender] = ends.get(parcel.sender, 0) + align(parcel.size)
    return ends


def _lay_out(
    by_rank: Sequence[Sequence[int]], parcels: Sequence[Parcel], sizes: list[int]
) -> Iterator[tuple[int, list[int]]]:
    """Place parcels one after the other, ordered by receiving rank. Yield (number of the parcel, places), and append
    each rank's size to `sizes`.
    """
    places: dict[int, list[int]] = {}
    at = 0
    for numbers in by_rank:
        begin = at
        for number in numbers:
            places.setdefault(number, []).append(at)
            at += align(parcels[number].size)
        sizes.append(at - begin)
    yield from places.items()
