"""The `World`: the ranks that work together, exchange values, and all stop when one rank refuses.

Every phase of a load or a save ends in `agree`: if one rank has failed, no rank continues, and all ranks raise the same
error. If no process group is initialised, the `World` is this process alone.

A rank's number is its global rank in the job, which device meshes use too. A process group may contain ranks of several
jobs, each of which has its own default group. Then a rank's number is its rank in the common group, and `numbers` maps
the job's global ranks to numbers.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
import torch.distributed as dist
import xxhash

from transaxle.errors import Refusal, TransaxleError, Where, gathered, refuse
from transaxle.live.transport import wire
from transaxle.live.transport.background import wait_for_group
from transaxle.torch_tensors import Ranks, read_group

Item = TypeVar("Item")
_PAGE, _SIZE = 4096, 8
"""Bytes that each rank sends in the first gather, and number of bytes at their beginning that contain the item's
length.
"""
_LOST = "a rank died or did not answer in time"
"""Beginning of messages about a lost rank."""
_JOB = "transaxle/job"
"""Key under which the name of the job is stored in the job's store."""


@contextmanager
def collective() -> Iterator[None]:
    """Run a block that contains one collective operation of torch, and raise a refusal if a rank is lost.

    Raises:
        StorageError: with code IO, if a rank is lost or does not answer within the timeout of the group.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        # If a rank of a group of several jobs is lost, torch fails to look up its number, and raises a ValueError.
        lost = error.__context__ if isinstance(error, ValueError) else error
        if not isinstance(lost, RuntimeError):
            raise
        raise refuse("IO", f"{_LOST}: {lost}", hint="Look at the first error of the other ranks.") from error


class World:
    """The ranks of a process group, or this process alone.

    If `dcp.async_save` uses the process group in the background, the constructor waits until it has ended.

    Args:
        group: the ranks that act together, as a process group or a mesh with one dim; None means all ranks.

    Raises:
        TypeError: if `group` is neither a process group nor a mesh with one dim.
    """

    numbers: Mapping[int, int] | None = None
    """Global rank in this job -> rank in a group that contains ranks of several jobs; None for a group within one
    job.
    """

    def __init__(self, group: Ranks | None = None) -> None:
        self.group = group = read_group("group", group)
        in_job = dist.is_available() and dist.is_initialized()
        self.live = in_job or group is not None
        if self.live:
            wait_for_group(group)
        self.rank = dist.get_rank() if in_job else 0
        self.size = 1
        self.ranks: tuple[int, ...] = (self.rank,)
        if group is None:
            self.size = dist.get_world_size() if in_job else 1
            self.ranks = tuple(range(self.size))
            return
        self.size = group.size()
        global_ranks = _ranks_of(group)
        if global_ranks is None or global_ranks == tuple(range(self.size)):
            self._learn_numbers(group)
        else:
            self.ranks = global_ranks

    def _learn_numbers(self, group: dist.ProcessGroup) -> None:
        """Set `numbers` if the group contains ranks of several jobs; torch treats ranks in such a group as global
        ranks.
        """
        members = self.gather((_own_job(), self.rank))
        job, _ = members[group.rank()]
        if all(each == job for each, _ in members):
            self.ranks = tuple(rank for _, rank in members)
            return
        self.numbers = {rank: number for number, (each, rank) in enumerate(members) if each == job}
        self.rank, self.ranks = group.rank(), tuple(range(self.size))

    @classmethod
    def alone(cls) -> World:
        """Return the world of this process without the other ranks of its job."""
        world = cls.__new__(cls)
        world.group, world.live, world.size = None, False, 1
        world.rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        world.ranks = (world.rank,)
        return world

    @property
    def device(self) -> torch.device:
        """Device on which the group's backend (NCCL, gloo) needs the tensors of a collective operation."""
        if self.size > 1 and on_accelerator(self.group):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def gather(self, item: Item, otherwise: Callable[[object], object] | None = None) -> list[Item]:
        """Return the items of all ranks, in the order of `ranks`; a small item needs only one collective operation.

        Args:
            item: a value that `wire` can encode.
            otherwise: function that converts objects that `wire` cannot encode to plain data.

        Raises:
            TypeError: if the item contains an object that cannot be encoded.
            Refused: with code CORRUPT, if a rank sends bytes that cannot be decoded.
        """
        if self.size == 1:
            return [item]
        return [wire.decode(octets) for octets in self._gather(wire.encode(item, otherwise))]

    def _gather(self, item: bytes) -> list[memoryview]:
        """Return the bytes that each rank has passed, in the order of `ranks`."""
        # `frombuffer` needs writable memory, so the bytes are copied into a bytearray.
        octets = torch.frombuffer(bytearray(item), dtype=torch.uint8).to(self.device)
        # No rank knows the sizes of the other ranks yet, so each first sends a page of fixed size: the item's length
        # and its beginning.
        page = torch.zeros(_PAGE, dtype=torch.uint8, device=self.device)
        page[:_SIZE].view(torch.int64)[0] = len(octets)
        page[_SIZE : _SIZE + len(octets)] = octets[: _PAGE - _SIZE]
        pages = self._all_gather(page)
        sizes = [int(each[:_SIZE].view(torch.int64)) for each in pages]
        wholes = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        for whole, first in zip(wholes, pages, strict=True):
            whole[: _PAGE - _SIZE] = first[_SIZE : _SIZE + len(whole)].cpu()
        self._gather_rests(octets, wholes)
        return [whole.numpy().data for whole in wholes]

    def _gather_rests(self, octets: torch.Tensor, wholes: list[torch.Tensor]) -> None:
        """Gather the bytes beyond the first page in rounds, so that little memory is needed in addition to the items'
        own.
        """
        longest = max(map(len, wholes))
        # All ranks know the same sizes, so all ranks take part in the same number of collective operations.
        share = max(_PAGE, -(-sum(map(len, wholes)) // self.size))
        for start in range(_PAGE - _SIZE, longest, share):
            part = torch.zeros(min(share, longest - start), dtype=torch.uint8, device=self.device)
            own_part = octets[start : start + share]
            part[: len(own_part)] = own_part
            for whole, gathered_part in zip(wholes, self._all_gather(part), strict=True):
                target = whole[start : start + len(part)]
                target[:] = gathered_part[: len(target)].cpu()

    def gather_once(self, item: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in the order of `ranks`; ranks with equal bytes share one object.

        Ranks with equal bytes each send only a share of them, so equal bytes are sent and stored only once.
        """
        key = xxhash.xxh3_128_digest(item)
        keys = self.gather(key)
        alike: dict[bytes, list[int]] = {}
        for number, key_of_rank in enumerate(keys):
            alike.setdefault(key_of_rank, []).append(number)
        at, count = alike[key].index(self.ranks.index(self.rank)), len(alike[key])
        shares = self.gather(item[at * len(item) // count : (at + 1) * len(item) // count])
        joined = {key_of_rank: b"".join(shares[number] for number in numbers) for key_of_rank, numbers in alike.items()}
        return [joined[key_of_rank] for key_of_rank in keys]

    def _all_gather(self, own_tensor: torch.Tensor) -> list[torch.Tensor]:
        of_all_ranks = [torch.empty_like(own_tensor) for _ in range(self.size)]
        with collective():
            dist.all_gather(of_all_ranks, own_tensor, group=self.group)
        return of_all_ranks

    def wait(self) -> None:
        """Wait until every rank has called this method."""
        if self.size > 1:
            with collective():
                dist.barrier(self.group)

    def pool(self, make: Callable[[], Item]) -> list[Item]:
        """Call `make` on all ranks, and return the results of all ranks in the order of `ranks`; if one rank refuses,
        all ranks raise the refusal.

        Raises:
            TransaxleError: if the call failed on any rank; see `together`.
        """
        items: list[Item] = []
        refusal: TransaxleError | None = None
        try:
            items.append(make())
        except TransaxleError as error:
            if is_loss(error):
                raise  # if a rank is lost, the ranks cannot agree on an error
            refusal = error
        except BaseException as error:
            with suppress(Exception):  # this rank raises its own error below
                self._combine((items, refuse("IO", f"rank {self.rank} failed: {error!r}")))
            raise
        return self._combine((items, refusal))

    def _combine(self, own_result: tuple[list[Item], TransaxleError | None]) -> list[Item]:
        of_all_ranks = self.gather(own_result)
        _raise(refusal for _, refusal in of_all_ranks)
        return [item for items, _ in of_all_ranks for item in items]

    def require_alike(self, arguments: Mapping[str, object]) -> None:
        """Check that all ranks were given the same arguments; all ranks must call this method.

        Args:
            arguments: name -> argument, for this rank's arguments.

        Raises:
            UsageError: raised on every rank with code AMBIGUOUS, if the arguments of two ranks differ.
        """
        first, *other_ranks = self.gather(arguments, repr)
        for rank, other_arguments in zip(self.ranks[1:], other_ranks, strict=True):
            if other_arguments != first:
                name = next(name for name in first if other_arguments[name] != first[name])
                difference = (
                    f"rank {rank} gave {other_arguments[name]!r}, but rank {self.ranks[0]} gave {first[name]!r}"
                )
                raise refuse("AMBIGUOUS", f"{name}: {difference}", hint="Give the same arguments on all ranks.")

    def agree(self, error: TransaxleError | None) -> None:
        """Raise, on every rank, the refusals of all ranks.

        Raises:
            TransaxleError: if any rank passed an error; it contains the refusals of all ranks, each refusal once.
        """
        failures = torch.tensor(int(error is not None), dtype=torch.int32, device=self.device)
        if self.size > 1:
            with collective():
                # reducing a number is several times cheaper than gathering objects
                dist.all_reduce(failures, group=self.group)
        if failures.item():
            _raise(self.gather(error))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block on all ranks; if one rank refuses, all ranks raise its refusals.

        Raises:
            TransaxleError: the refusals of all ranks, as raised by `agree`. An error that is not a TransaxleError is
                raised on this rank only; the other ranks raise a StorageError that names this rank.
        """
        refusal: TransaxleError | None = None
        try:
            yield
        except TransaxleError as error:
            if is_loss(error):
                raise  # if a rank is lost, the ranks cannot agree on an error
            refusal = error
        except BaseException as error:
            with suppress(Exception):  # this rank raises its own error below
                self.agree(refuse("IO", f"rank {self.rank} failed: {error!r}"))
            raise
        self.agree(refusal)


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...] | None:
    """Return the global ranks of a process group; None for a group that torch does not know."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:
        return None


def _own_job() -> str:
    """Return a random name that only the ranks of this job have in common."""
    name = secrets.token_hex(16)
    if not dist.is_initialized():
        return name
    store = dist.distributed_c10d._get_default_store()
    return str(store.compare_set(_JOB, "", name).decode())


def on_accelerator(group: dist.ProcessGroup | None) -> bool:
    """Return whether all backends of a group can only send tensors in accelerator memory, as NCCL does."""
    if group is None or _ranks_of(group) is not None:
        return dist.get_backend(group) == dist.Backend.NCCL
    return all(device.type != "cpu" for device in group._device_types)


def is_loss(error: TransaxleError) -> bool:
    """Return whether an error reports a lost rank."""
    return any(refusal.message.startswith(_LOST) for refusal in error.refusals)


class Clock:
    """Name of a stage -> wall time, for the stages of a load or save."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}

    @property
    def total(self) -> float:
        """Sum of the times of all stages in seconds."""
        return sum(self.stages.values())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the wall time of the block to a stage."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + time.monotonic() - begin


def comparable(value: object) -> bytes:
    """Serialise a value so that it can be compared or hashed: equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, default=repr).encode()


def _raise(errors: Iterable[TransaxleError | None]) -> None:
    """Raise one error with the refusals of all ranks, each refusal once."""
    refusals: dict[tuple[str, str, Where], Refusal] = {}
    for error in errors:
        for refusal in () if error is None else error.refusals:
            refusals.setdefault((refusal.code, refusal.message, refusal.where), refusal)
    if refusals:
        raise gathered(tuple(refusals.values()))
