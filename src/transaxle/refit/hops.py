"""Hops: which rank sends which bytes to which ranks in a refit. The hops are computed once, bucket by bucket, and every
push (transfer of weights) uses them.

A parcel contains the bytes that one rank holds of a range of a tensor, packed without gaps, so receivers get only bytes
that they need. Bytes that the receiving rank itself holds are copied directly from its source to its target.

**Meeting** (`meet`): a process group that contains ranks of several jobs. The jobs share only an address and a secret.

Each job has its own default process group of torch; the common group belongs to none of them. A group that verl,
OpenRLHF or other code has made works too: `World` finds out which ranks are in the group.
"""

from __future__ import annotations

import os
import socket
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

_SMALLEST_RANGE = 1 << 16
"""Smallest size in bytes of a range that is sent as one message; larger ranges take the same time per byte."""
_RANGES_PER_ROUND = 4
"""Smallest number of ranges that fit into one round of sending."""


@dataclass(frozen=True)
class Hop:
    """One parcel (block of bytes) that one rank sends to others, with the copy operations that pack and unpack it."""

    key: int
    """Key of the item (shard of a target tensor) that receives the parcel."""
    name: str
    """Name of the target tensor."""
    parcel: Parcel
    """Sending rank, receiving ranks and size in bytes of the parcel."""
    steps: Sequence[tuple[Transfer, Transfer]]
    """Pairs (copy into the parcel, copy out of the parcel); empty on ranks that neither send nor receive the parcel."""


@dataclass(frozen=True)
class Schedule:
    """All transfers of one push (transfer of weights), on all ranks."""

    rounds: Sequence[Sequence[Hop]]
    """The parcels in the order in which they are sent, by round; the parcels of one round fit into the buckets of every
    rank.
    """
    local_copies: Sequence[tuple[str, int, Sequence[Transfer]]]
    """Copies within this rank: (target tensor name, item key, copies from the source into the item)."""
    parts: Sequence[tuple[str, int, int]]
    """Items that this rank receives: (target tensor name, item key, number of bytes of the item that only other ranks
    hold).
    """


@dataclass(frozen=True)
class Program:
    """The transfers of a schedule that a push of chosen tensors executes."""

    schedule: Schedule
    """The transfers of the chosen tensors."""
    route: Route
    """Places of the parcels in the exchange buckets (buffers)."""
    names: frozenset[str] | None
    """Names of the chosen target tensors; None means all target tensors."""

    @property
    def keys(self) -> list[int]:
        """Return the keys of the items (shards of target tensors) that this rank receives."""
        return [key for _, key, _ in self.schedule.parts]

    @property
    def tensors(self) -> int:
        """Number of target tensors that this rank receives, whole or as a shard."""
        return len({name for name, _, _ in self.schedule.parts})

    @property
    def remote_bytes(self) -> int:
        """Number of bytes that this rank needs from other ranks."""
        return sum(size for _, _, size in self.schedule.parts)

    def moves(self, name: str) -> bool:
        """Return whether a target tensor with the given name is among the chosen tensors."""
        return self.names is None or name in self.names


def schedule(items: Sequence[Item], names: Sequence[str], owner: Owner, world: World, bucket: int) -> Schedule:
    """Compute the transfers of a push; the results on different ranks differ only in `steps` and in the local copies.

    Args:
        items: the shards of target tensors to fill, each with the ranks that hold the shard.
        names: target tensor names; the key of an item is an index into this list.
        owner: function that returns the rank that holds a given shard of the source.
        world: the ranks that take part.
        bucket: size in bytes of an exchange bucket (buffer).
    """
    capacity, rank = bucket // SHARES, world.rank
    split_items = [replace(item, max_range=_grain(capacity, len(item.target_ranks))) for item in items if item.size]
    rounds: list[list[Hop]] = []
    local_copies: list[tuple[str, int, Sequence[Transfer]]] = []
    for batch in batches(split_items, dict.fromkeys(world.ranks, 0), owner, capacity):
        hops = []
        for run in batch:
            name = names[run.item.key]
            for sender in run.source_ranks:
                receivers = tuple(taker for taker in run.target_ranks if taker != sender)
                parts = [part for part in run.parts(sender) if part.size]
                if sender == rank and rank in run.target_ranks and parts:
                    local_copies.append((name, run.item.key, parts))
                if receivers and parts:
                    steps = list(pack_copies(parts)) if rank in (sender, *receivers) else []
                    parcel = Parcel(sender, receivers, sum(part.size for part in parts))
                    hops.append(Hop(run.item.key, name, parcel, steps))
        if hops:
            rounds.append(hops)
    received = [
        (names[item.key], item.key, _remote_bytes(item, owner, rank)) for item in items if rank in item.target_ranks
    ]
    return Schedule(rounds, local_copies, received)


def _remote_bytes(item: Item, owner: Owner, rank: int) -> int:
    """Return how many bytes of an item come from other ranks."""
    return sum(transfer.size for transfer in item.transfers if owner(transfer.file) != rank)


def _grain(capacity: int, target_ranks: int) -> int:
    """Return the size of item ranges in bytes: as large as possible, while `_RANGES_PER_ROUND` ranges for each of the
    receivers fit into `capacity` bytes.
    """
    return min(
        RANGE_BYTES,
        max(
            _SMALLEST_RANGE, capacity // (_RANGES_PER_ROUND * max(target_ranks, 1)) // _SMALLEST_RANGE * _SMALLEST_RANGE
        ),
    )


def program(full_schedule: Schedule, names: frozenset[str] | None, exchange: BucketExchange) -> Program:
    """Plan the transfer of the chosen tensors through buckets (buffers) of fixed size; all ranks must call this
    function together.

    Args:
        full_schedule: the schedule of all tensors.
        names: names of the chosen target tensors; None means all target tensors.
        exchange: object that sends the parcels through buckets.
    """
    part = full_schedule
    if names is not None:
        rounds = [[hop for hop in hops if hop.name in names] for hops in full_schedule.rounds]
        local_copies = [copies for copies in full_schedule.local_copies if copies[0] in names]
        part = Schedule(
            [hops for hops in rounds if hops], local_copies, [each for each in full_schedule.parts if each[0] in names]
        )
    return Program(part, exchange.route([[hop.parcel for hop in hops] for hops in part.rounds]), names)


_GLOO, _NCCL = "gloo", "nccl"
_BACKENDS = {_GLOO: ("cpu", "cuda"), _NCCL: ("cuda",)}
"""Backend of torch -> device types whose tensors the backend can send."""
_TIMEOUT = 300
SECRET = "TRANSAXLE_REFIT_SECRET"
"""Environment variable with the secret that all jobs of a common group share."""
_LEAST_LENGTH = 16
"""Smallest length of a secret in characters; an eavesdropper could guess a shorter secret."""
_SECRET_COMMAND = 'python -c "import secrets; print(secrets.token_hex(32))"'
_ALL_INTERFACES = frozenset({"0.0.0.0", "::"})
"""Addresses that mean all interfaces of a machine."""


def meet(
    address: str,
    number: int,
    size: int,
    *,
    secret: str | None = None,
    backend: str | None = None,
    timeout: float = _TIMEOUT,
) -> dist.ProcessGroup:
    """Form a process group that contains ranks of several jobs, and is separate from each job's default group; every
    rank of the group calls this function.

        group = tx.refit.meet("10.0.0.7:29600", number=rank, size=4 + 2)         # a trainer of 4 ranks
        group = tx.refit.meet("10.0.0.7:29600", number=4 + rank, size=4 + 2)     # an engine of 2

    Args:
        address: `HOST:PORT` on the machine of the group's rank 0, which listens at this address until all ranks have
            connected.
        number: this rank's number in the group, from 0 to `size - 1`, and different on every rank.
        size: number of ranks in the group.
        secret: a text of at least 16 characters that only the ranks of the group know. Each rank and rank 0 prove to
            each other that they know the secret, without sending it. If `secret` is None, the value of the environment
            variable TRANSAXLE_REFIT_SECRET is used.
        backend: `gloo` or `nccl`, the same on all ranks; None means `nccl` if torch finds a GPU, else `gloo`.
        timeout: seconds that a rank waits for other ranks, in this function and in each later exchange. With gloo,
            ranks that are communicating with a lost rank detect the loss immediately; all other ranks detect it after
            this time.

    Raises:
        TypeError, ValueError: if an argument is invalid, or there is no secret.
        StorageError: with code IO, if other ranks do not connect in time, or rank 0 cannot listen at the address.
        Refused: with code UNSUPPORTED, if the process that listens at the address has a different secret.
        UsageError: with code AMBIGUOUS, if ranks pass different sizes or backends, or two ranks pass the same number.
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
    secret_bytes, patience = read_secret(secret), timedelta(seconds=timeout)
    terms = f"{size} ranks over {backend}"
    with ExitStack() as cleanup:
        server = StoreServer(host, port, secret_bytes, size, terms) if number == 0 else None
        if server is not None:
            cleanup.callback(server.close)
        store = SharedStore((host, port), secret_bytes, number, terms, patience)
        cleanup.callback(store.close)
        try:
            group = _create_group(
                backend, store, (number, size), patience, host="" if host in _ALL_INTERFACES else store.own_host
            )
        except RuntimeError as error:
            strangers = f"; {server.refused} with another secret did" if server is not None and server.refused else ""
            raise refuse("IO", f"not all {size} ranks came to {address} in time: {error}{strangers}") from error
        check_connections(group, store, secret_bytes, number, size)
        cleanup.pop_all()
    return group


def disband(group: dist.ProcessGroup) -> None:
    """Make torch forget a group of `meet`; its connections are closed as soon as nothing else refers to the group."""
    distributed_c10d._world.pg_map.pop(group, None)


def free_address(host: str) -> str:
    """Return `HOST:PORT` with a port of this machine that no program uses now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        return f"[{host}]:{listener.getsockname()[1]}" if ":" in host else f"{host}:{listener.getsockname()[1]}"


def _read_address(address: object) -> tuple[str, int]:
    host, colon, port = read_text("address", address, "10.0.0.7:29600").rpartition(":")
    if not (host and colon and port.isdecimal()):
        raise ValueError(f"address must be HOST:PORT, such as 10.0.0.7:29600; got {address!r}")
    return host.strip("[]"), int(port)


def read_secret(secret_option: object) -> bytes:
    """Return the secret of a common group as bytes, from the argument or the environment; error messages never contain
    it.

    Raises:
        TypeError: if the secret is not a str.
        ValueError: if neither the argument nor the environment contains a secret, or the secret is too short.
    """
    if secret_option is not None and not isinstance(secret_option, str):
        raise TypeError(f"secret must be a text or None; got a {type(secret_option).__name__}")
    secret = os.environ.get(SECRET, "") if secret_option is None else secret_option
    if len(secret) < _LEAST_LENGTH:
        problem = f"has {len(secret)} characters" if secret else "there is none"
        raise ValueError(
            f"secret must be a text of {_LEAST_LENGTH} characters or more that all jobs know, but {problem}: give "
            f"secret= or {SECRET}. To make one:  {_SECRET_COMMAND}"
        )
    return secret.encode()


def _create_group(
    backend: str, store: SharedStore, place: tuple[int, int], patience: timedelta, *, host: str
) -> dist.ProcessGroup:
    """Create a process group as `init_process_group` does, but without registering it as the default group.

    Args:
        backend: `gloo` or `nccl`.
        store: the store through which the ranks exchange their addresses.
        place: (this rank's number in the group, number of ranks in the group).
        patience: the timeout of every exchange.
        host: address of this machine at which gloo listens; "" means that torch chooses the address.
    """
    group = dist.ProcessGroup(store, *place)
    backend_group: Any
    if backend == _NCCL:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = patience
        backend_group, backend_type = dist.ProcessGroupNCCL(store, *place, options), dist.ProcessGroup.BackendType.NCCL
    else:
        backend_group = _create_gloo(store, place, patience, host)
        backend_type = dist.ProcessGroup.BackendType.GLOO
    backend_group._set_sequence_number_for_group()
    group._set_default_backend(backend_type)
    for device in _BACKENDS[backend]:
        group._register_backend(torch.device(device), backend_type, backend_group)
    # If an operation of a group fails, torch looks up the group's backend, and hides the failure if it finds no
    # backend. In addition, the store must exist as long as the group.
    distributed_c10d._world.pg_map[group] = backend, store
    return group


def _create_gloo(store: SharedStore, place: tuple[int, int], patience: timedelta, host: str) -> Any:
    """Create the gloo backend of a group. The backend listens at `host`, unless the environment variable
    GLOO_SOCKET_IFNAME names networks.
    """
    if not host or os.environ.get("GLOO_SOCKET_IFNAME"):
        return dist.ProcessGroupGloo(store, *place, patience)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # exists, but undeclared
    options._timeout = patience
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, *place, options)
