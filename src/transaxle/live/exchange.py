"""Exchange: parcels of bytes between ranks, in rounds of bounded memory.

Every rank knows every parcel (its sender, receivers and size), so the rounds and the split sizes are computed alike
everywhere and no header travels. Bytes go as uint8, which every backend carries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from transaxle.live.world import World, collective

ROUND = 32 << 20
"""Bytes that a rank sends, and that it receives, in one round at most; a larger parcel has a round of its own."""
Fill = Callable[[int, np.ndarray], None]
"""`fill(parcel, buffer)`: put the parcel's bytes into the buffer."""
Take = Callable[[int, np.ndarray], None]
"""`take(parcel, buffer)`: do with the parcel's bytes what they came for; the buffer is not kept."""


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
    places = {rank: place for place, rank in enumerate(world.ranks)}
    device = _device(world)
    total = 0
    for chosen in rounds(parcels, limit):
        outgoing: list[list[np.ndarray]] = [[] for _ in range(world.size)]
        incoming: list[list[int]] = [[] for _ in range(world.size)]
        for number in chosen:
            parcel = parcels[number]
            if parcel.sender == world.rank:
                held = np.empty(parcel.size, np.uint8)
                fill(number, held)
                for rank in parcel.receivers:
                    if rank == world.rank:
                        take(number, held)
                    else:
                        outgoing[places[rank]].append(held)
            elif world.rank in parcel.receivers:
                incoming[places[parcel.sender]].append(number)
        if world.size == 1 or all(not set(parcels[n].receivers) - {parcels[n].sender} for n in chosen):
            continue
        send_sizes = [sum(map(len, part)) for part in outgoing]
        receive_sizes = [sum(parcels[n].size for n in part) for part in incoming]
        flat = np.concatenate([piece for part in outgoing for piece in part] or [np.empty(0, np.uint8)])
        sent = torch.from_numpy(flat).to(device)
        received = torch.empty(sum(receive_sizes), dtype=torch.uint8, device=device)
        with collective():
            dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=world.group)
        arrived = received.cpu().numpy()
        start = 0
        for number in (n for part in incoming for n in part):
            size = parcels[number].size
            take(number, arrived[start : start + size])
            start += size
        total += start
    return total


def _device(world: World) -> torch.device:
    """Return where the group's backend wants its buffers."""
    if world.size > 1 and dist.get_backend(world.group) == dist.Backend.NCCL:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
