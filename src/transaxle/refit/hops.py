"""Hops: what goes from one rank to another, bucket by bucket, worked out once for all pushes.

A parcel has the bytes that one rank holds of a run of one tensor, packed without gaps: nothing is sent that its
receivers do not need. What a rank holds itself it copies straight from its source into its target.

**Meeting**: a process group of the ranks of several jobs that know nothing of each other but an address and a secret.

Each job keeps its own torch world, which the group does not become a part of. Other ways to make such a group, such as
those of verl and OpenRLHF, will do as well: `World` finds out which ranks belong together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from operator import index
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed import distributed_c10d

from transaxle.arguments import read_count, read_text, wrong_type
from transaxle.errors import refuse
from transaxle.live.transport.shared_store import SharedStore, StoreServer, check_connections
from transaxle.live.transport.tensor_exchange import SHARES, BucketExchange, Route
from transaxle.live.transport.world import World
from transaxle.move.mover import batches, pack_copies
from transaxle.move.transfer import Parcel, Transfer
from transaxle.move.workers import RANGE_BYTES, Item, Owner

_LEAST = 1 << 16
"""Bytes of a run at least: so many are sent as fast as more are."""
_FACTOR = 4
"""Runs that a round has room for at least."""


@dataclass(frozen=True)
class Hop:
    """One parcel of one run, or what a rank copies by itself."""

    key: int
    """Number of the target's part that it goes into."""
    name: str
    """The target's tensor."""
    parcel: Parcel
    """Who sends it to whom."""
    steps: Sequence[tuple[Transfer, Transfer]]
    """On its sender and its receivers: how each copy is packed, and how it is spread again."""


@dataclass(frozen=True)
class Schedule:
    """Everything that is moved in one push, for all ranks."""

    rounds: Sequence[Sequence[Hop]]
    """What is sent, in order; each round fits into the buckets of all ranks."""
    own: Sequence[tuple[str, int, Sequence[Transfer]]]
    """What this rank copies by itself: name, number of the part, copies from the source into the part."""
    parts: Sequence[tuple[str, int, int]]
    """What this rank takes: name, number of the part, bytes of it that other ranks have."""


@dataclass(frozen=True)
class Program:
    """The part of a schedule that one push carries out."""

    schedule: Schedule
    """What is moved."""
    route: Route
    """Where the parcels lie on their way."""
    names: frozenset[str] | None
    """The target's names of what is moved; None: all."""

    @property
    def keys(self) -> list[int]:
        """Numbers of the parts that this rank takes."""
        return [key for _, key, _ in self.schedule.parts]

    @property
    def tensors(self) -> int:
        """Tensors that they are parts of."""
        return len({name for name, _, _ in self.schedule.parts})

    @property
    def needed(self) -> int:
        """Bytes of them that other ranks have."""
        return sum(size for _, _, size in self.schedule.parts)

    def moves(self, name: str) -> bool:
        """Tell whether a tensor of the target is moved."""
        return self.names is None or name in self.names


def schedule(items: Sequence[Item], names: Sequence[str], owner: Owner, world: World, bucket: int) -> Schedule:
    """Work out what goes where; the same on all ranks but for the steps.

    Args:
        items: what is moved, each with the ranks that need it.
        names: of the target's tensors, by the items' numbers.
        owner: tells the rank that holds a part of the source.
        world: the ranks.
        bucket: bytes of a bucket.
    """
    most, rank = bucket // SHARES, world.rank
    fine = [replace(item, max_range=_grain(most, len(item.target_ranks))) for item in items if item.size]
    rounds: list[list[Hop]] = []
    own: list[tuple[str, int, Sequence[Transfer]]] = []
    for batch in batches(fine, dict.fromkeys(world.ranks, 0), owner, most):
        hops = []
        for run in batch:
            name = names[run.item.key]
            for maker in run.source_ranks:
                others = tuple(taker for taker in run.target_ranks if taker != maker)
                parts = [part for part in run.parts(maker) if part.size]
                if maker == rank and rank in run.target_ranks and parts:
                    own.append((name, run.item.key, parts))
                if others and parts:
                    steps = list(pack_copies(parts)) if rank in (maker, *others) else []
                    parcel = Parcel(maker, others, sum(part.size for part in parts))
                    hops.append(Hop(run.item.key, name, parcel, steps))
        if hops:
            rounds.append(hops)
    taken = [(names[item.key], item.key, _of_others(item, owner, rank)) for item in items if rank in item.target_ranks]
    return Schedule(rounds, own, taken)


def _of_others(item: Item, owner: Owner, rank: int) -> int:
    """Return the bytes of an item that other ranks have."""
    return sum(transfer.size for transfer in item.transfers if owner(transfer.file) != rank)


def _grain(most: int, target_ranks: int) -> int:
    """Return the bytes of a run at most: so that several of them, once for each rank that takes them, fit."""
    return min(RANGE_BYTES, max(_LEAST, most // (_FACTOR * max(target_ranks, 1)) // _LEAST * _LEAST))


def program(whole: Schedule, wanted: frozenset[str] | None, exchange: BucketExchange) -> Program:
    """Return how a part of a schedule is carried out; collective.

    Args:
        whole: everything.
        wanted: the target's names that are moved; None: all.
        exchange: carries the parcels.
    """
    part = whole
    if wanted is not None:
        rounds = [[hop for hop in hops if hop.name in wanted] for hops in whole.rounds]
        own = [copies for copies in whole.own if copies[0] in wanted]
        part = Schedule([hops for hops in rounds if hops], own, [each for each in whole.parts if each[0] in wanted])
    return Program(part, exchange.route([[hop.parcel for hop in hops] for hops in part.rounds]), wanted)


_GLOO, _NCCL = "gloo", "nccl"
_BACKENDS = {_GLOO: ("cpu", "cuda"), _NCCL: ("cuda",)}
"""What each backend moves."""
_PATIENCE = 300
SECRET = "TRANSAXLE_REFIT_SECRET"
"""Variable of the environment that has the secret of all jobs that meet."""
_SHORTEST = 16
"""Characters of a secret: who listens in may try shorter ones."""
_MADE = 'python -c "import secrets; print(secrets.token_hex(32))"'
_ALL = frozenset({"0.0.0.0", "::"})
"""Addresses that stand for all of a machine."""


def meet(
    address: str,
    number: int,
    size: int,
    *,
    secret: str | None = None,
    backend: str | None = None,
    timeout: float = _PATIENCE,
) -> dist.ProcessGroup:
    """Meet ranks of other jobs, in a process group that no job's torch world knows of; all of them call this.

        group = tx.refit.meet("10.0.0.7:29600", number=rank, size=4 + 2)         # a trainer of 4 ranks
        group = tx.refit.meet("10.0.0.7:29600", number=4 + rank, size=4 + 2)     # an engine of 2

    Args:
        address: `HOST:PORT` where number 0 listens until all have come: an address of its own machine.
        number: this rank's, from 0 to `size - 1`; every rank has another one.
        size: how many meet.
        secret: a text of 16 characters or more that all of them know, and nobody else: each proves to number 0 that it
            does, and number 0 to each, without sending it. None: the environment's TRANSAXLE_REFIT_SECRET.
        backend: `gloo` or `nccl`, the same for all; None: `nccl` where torch has a GPU, else `gloo`.
        timeout: seconds that any of them waits for the others, now and in each exchange. gloo tells of a lost rank
            those that are just talking to it at once, the others when this time is over.

    Raises:
        TypeError, ValueError: an argument that it cannot have, or no secret.
        StorageError: IO where the others do not come in time, or number 0 cannot listen at the address.
        Refused: UNSUPPORTED where who listens there has another secret.
        UsageError: AMBIGUOUS where they give another size or backend, or the number of another one.
    """
    host, port = _read_address(address)
    size = read_count("size", size)
    if isinstance(number, bool) or not isinstance(number, SupportsIndex):
        raise wrong_type("number", "an int", number)
    if not 0 <= (number := index(number)) < size:
        raise ValueError(f"number must be from 0 to {size - 1}; got {number!r}")
    if backend is None:
        backend = _NCCL if torch.cuda.is_available() and dist.is_nccl_available() else _GLOO
    if backend not in _BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(_BACKENDS)}; got {backend!r}")
    key, patience = read_secret(secret), timedelta(seconds=timeout)
    said = f"{size} ranks over {backend}"
    with ExitStack() as failing:
        server = StoreServer(host, port, key, size, said) if number == 0 else None
        if server is not None:
            failing.callback(server.close)
        store = SharedStore((host, port), key, number, said, patience)
        failing.callback(store.close)
        try:
            group = _group(backend, store, (number, size), patience, named="" if host in _ALL else store.own_host)
        except RuntimeError as error:
            strangers = f"; {server.refused} with another secret did" if server is not None and server.refused else ""
            raise refuse("IO", f"not all {size} ranks came to {address} in time: {error}{strangers}") from error
        check_connections(group, store, key, number, size)
        failing.pop_all()
    return group


def _read_address(given: object) -> tuple[str, int]:
    host, colon, port = read_text("address", given, "10.0.0.7:29600").rpartition(":")
    if not (host and colon and port.isdecimal()):
        raise ValueError(f"address must be HOST:PORT, such as 10.0.0.7:29600; got {given!r}")
    return host.strip("[]"), int(port)


def read_secret(given: object) -> bytes:
    """Return the secret of a meeting; errors do not show it.

    Raises:
        TypeError: it is no text.
        ValueError: there is none, or it is too short.
    """
    if given is not None and not isinstance(given, str):
        raise TypeError(f"secret must be a text or None; got a {type(given).__name__}")
    secret = os.environ.get(SECRET, "") if given is None else given
    if len(secret) < _SHORTEST:
        said = f"has {len(secret)} characters" if secret else "there is none"
        raise ValueError(
            f"secret must be a text of {_SHORTEST} characters or more that all jobs know, but {said}: give secret= or "
            f"{SECRET}. To make one:  {_MADE}"
        )
    return secret.encode()


def _group(
    backend: str, store: SharedStore, place: tuple[int, int], patience: timedelta, *, named: str
) -> dist.ProcessGroup:
    """Make the group; as `init_process_group` does, but without making it the default or any other known one.

    Args:
        backend: `gloo` or `nccl`.
        store: where the ranks tell each other how they are reached.
        place: this rank's number, and how many there are.
        patience: of every exchange.
        named: the address of this machine at which gloo listens; "" for what torch finds.
    """
    group = dist.ProcessGroup(store, *place)
    made: Any
    if backend == _NCCL:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = patience
        made, kind = dist.ProcessGroupNCCL(store, *place, options), dist.ProcessGroup.BackendType.NCCL
    else:
        made = _gloo(store, place, patience, named)
        kind = dist.ProcessGroup.BackendType.GLOO
    made._set_sequence_number_for_group()
    group._set_default_backend(kind)
    for device in _BACKENDS[backend]:
        group._register_backend(torch.device(device), kind, made)
    # torch asks for the backend of a group whose operation failed, and hides the failure if it does not find one. And
    # the store must live as long as the group.
    distributed_c10d._world.pg_map[group] = backend, store
    return group


def _gloo(store: SharedStore, place: tuple[int, int], patience: timedelta, named: str) -> Any:
    """Return gloo's part of a group; it listens at one address, unless the user names networks."""
    if not named or os.environ.get("GLOO_SOCKET_IFNAME"):
        return dist.ProcessGroupGloo(store, *place, patience)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # it is there
    options._timeout = patience
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=named)]
    return dist.ProcessGroupGloo(store, *place, options)
