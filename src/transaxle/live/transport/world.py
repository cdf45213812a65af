"""The ranks that act together: what one of them knows, all learn; what one of them cannot do, none begins.

Every phase of a load or a save ends in `agree`: no rank goes on while another has failed, and every rank raises the
same error. Without an initialised process group the world is this process alone.

A rank is known by its number in its job, which meshes and users mean. A process group may join ranks of several jobs,
each with a world of its own; then the numbers are those in the group, and `numbers` tells them from the job's own.
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
from transaxle.torch_tensors import Ranks, read_group

Item = TypeVar("Item")
_PAGE, _SIZE = 4096, 8
"""Bytes that are gathered at once, and those at the beginning that say how long the item is."""
_LOST = "a rank died or did not answer in time"
"""Begin of what is said of a lost rank."""
_JOB = "transaxle/job"
"""Key under which a job's store has the job's name."""


@contextmanager
def collective() -> Iterator[None]:
    """Run one collective operation of torch.

    Raises:
        StorageError: IO where a rank is lost, or does not answer within the group's timeout.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        # torch notes the rank of who failed, and has none for a group of several jobs.
        lost = error.__context__ if isinstance(error, ValueError) else error
        if not isinstance(lost, RuntimeError):
            raise
        raise refuse("IO", f"{_LOST}: {lost}", hint="Look at the first error of the other ranks.") from error


class World:
    """A process group, or this process alone.

    Args:
        group: the ranks that act together, a process group or a mesh of one dim; None: all of them.

    Raises:
        TypeError: `group` is none of these.
    """

    numbers: Mapping[int, int] | None = None
    """Where a group joins several jobs: rank in this job -> number in the group; None: a rank has one number only."""

    def __init__(self, group: Ranks | None = None) -> None:
        self.group = group = read_group("group", group)
        in_job = dist.is_available() and dist.is_initialized()
        self.live = in_job or group is not None
        self.rank = dist.get_rank() if in_job else 0
        self.size = 1
        self.ranks: tuple[int, ...] = (self.rank,)
        if group is None:
            self.size = dist.get_world_size() if in_job else 1
            self.ranks = tuple(range(self.size))
            return
        self.size = group.size()
        known = _ranks_of(group)
        if known is None or known == tuple(range(self.size)):
            self._learn_numbers(group)
        else:
            self.ranks = known

    def _learn_numbers(self, group: dist.ProcessGroup) -> None:
        """Find out whether a group joins several jobs: torch does not know, and takes its numbers for global ranks."""
        members = self.gather((_own_job(), self.rank))
        job, _ = members[group.rank()]
        if all(each == job for each, _ in members):
            self.ranks = tuple(rank for _, rank in members)
            return
        self.numbers = {rank: number for number, (each, rank) in enumerate(members) if each == job}
        self.rank, self.ranks = group.rank(), tuple(range(self.size))

    @property
    def device(self) -> torch.device:
        """Where the group's backend wants its buffers."""
        if self.size > 1 and on_accelerator(self.group):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def gather(self, item: Item, otherwise: Callable[[object], object] | None = None) -> list[Item]:
        """Return every rank's item, in the order of `ranks`; a small one costs one collective.

        Args:
            item: what `wire` can tell.
            otherwise: gives plain data for anything else in it.

        Raises:
            TypeError: something in it cannot be told.
            Refused: CORRUPT where a rank sends what cannot be read.
        """
        if self.size == 1:
            return [item]
        return [wire.decode(octets) for octets in self._gather(wire.encode(item, otherwise))]

    def _gather(self, item: bytes) -> list[memoryview]:
        """Return every rank's bytes."""
        # `frombuffer` needs writable memory, hence the bytearray.
        octets = torch.frombuffer(bytearray(item), dtype=torch.uint8).to(self.device)
        # Sizes are not known yet: a first page of fixed size carries each item's length and its beginning.
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
        """Fill up what is longer than the first page, in rounds: no more is held at once than all items together."""
        longest = max(map(len, wholes))
        # All ranks see the same sizes, so all join as many collectives.
        share = max(_PAGE, -(-sum(map(len, wholes)) // self.size))
        for start in range(_PAGE - _SIZE, longest, share):
            part = torch.zeros(min(share, longest - start), dtype=torch.uint8, device=self.device)
            mine = octets[start : start + share]
            part[: len(mine)] = mine
            for whole, found in zip(wholes, self._all_gather(part), strict=True):
                rest = whole[start : start + len(part)]
                rest[:] = found[: len(rest)].cpu()

    def gather_once(self, item: bytes) -> list[bytes]:
        """Return every rank's bytes, in the order of `ranks`; ranks with the same ones have the same object.

        Each of them sends its share of these bytes, so that equal ones travel, and are held, once.
        """
        key = xxhash.xxh3_128_digest(item)
        keys = self.gather(key)
        alike: dict[bytes, list[int]] = {}
        for number, each in enumerate(keys):
            alike.setdefault(each, []).append(number)
        at, count = alike[key].index(self.ranks.index(self.rank)), len(alike[key])
        shares = self.gather(item[at * len(item) // count : (at + 1) * len(item) // count])
        joined = {each: b"".join(shares[number] for number in numbers) for each, numbers in alike.items()}
        return [joined[each] for each in keys]

    def _all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        of_all_ranks = [torch.empty_like(mine) for _ in range(self.size)]
        with collective():
            dist.all_gather(of_all_ranks, mine, group=self.group)
        return of_all_ranks

    def wait(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            with collective():
                dist.barrier(self.group)

    def pool(self, make: Callable[[], Item]) -> list[Item]:
        """Call a function on all ranks and return every result, in the order of `ranks`; where one refuses, all do.

        Raises:
            TransaxleError: as `together`.
        """
        items: list[Item] = []
        refusal: TransaxleError | None = None
        try:
            items.append(make())
        except TransaxleError as error:
            if is_loss(error):
                raise  # there is nobody to agree with
            refusal = error
        except BaseException as error:
            with suppress(Exception):  # the error of this rank is raised below
                self._pooled((items, refuse("IO", f"rank {self.rank} failed: {error!r}")))
            raise
        return self._pooled((items, refusal))

    def _pooled(self, own: tuple[list[Item], TransaxleError | None]) -> list[Item]:
        of_all_ranks = self.gather(own)
        _raise(refusal for _, refusal in of_all_ranks)
        return [item for items, _ in of_all_ranks for item in items]

    def require_alike(self, given: Mapping[str, object]) -> None:
        """Prove that all ranks give the same arguments; collective.

        Args:
            given: what this rank gives, by the arguments' names.

        Raises:
            UsageError: AMBIGUOUS, on every rank.
        """
        first, *others = self.gather(given, repr)
        for rank, other in zip(self.ranks[1:], others, strict=True):
            if other != first:
                name = next(name for name in first if other[name] != first[name])
                said = f"rank {rank} gave {other[name]!r}, but rank {self.ranks[0]} gave {first[name]!r}"
                raise refuse("AMBIGUOUS", f"{name}: {said}", hint="Give the same arguments on all ranks.")

    def agree(self, error: TransaxleError | None) -> None:
        """Raise on every rank the refusals of any rank.

        Raises:
            TransaxleError: the refusals of all ranks, each once.
        """
        failures = torch.tensor(int(error is not None), dtype=torch.int32, device=self.device)
        if self.size > 1:
            with collective():
                dist.all_reduce(failures, group=self.group)  # a number: several times cheaper than gathering objects
        if failures.item():
            _raise(self.gather(error))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a block on all ranks; where one refuses, all do.

        Raises:
            TransaxleError: as `agree`. An error of another kind stays this rank's own: the others learn that it failed.
        """
        refusal: TransaxleError | None = None
        try:
            yield
        except TransaxleError as error:
            if is_loss(error):
                raise  # there is nobody to agree with
            refusal = error
        except BaseException as error:
            with suppress(Exception):  # the error of this rank is raised below
                self.agree(refuse("IO", f"rank {self.rank} failed: {error!r}"))
            raise
        self.agree(refusal)


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...] | None:
    """Return the global ranks of a group as torch knows them; None for a group that it does not know."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:
        return None


def _own_job() -> str:
    """Return a name that the ranks of one torch world have in common, and no others."""
    name = secrets.token_hex(16)
    if not dist.is_initialized():
        return name
    store = dist.distributed_c10d._get_default_store()
    return str(store.compare_set(_JOB, "", name).decode())


def on_accelerator(group: dist.ProcessGroup | None) -> bool:
    """Tell whether a group moves nothing but the memory of accelerators."""
    if group is None or _ranks_of(group) is not None:
        return dist.get_backend(group) == dist.Backend.NCCL
    return all(device.type != "cpu" for device in group._device_types)


def is_loss(error: TransaxleError) -> bool:
    """Tell whether an error says that a rank is lost."""
    return any(refusal.message.startswith(_LOST) for refusal in error.refusals)


class Clock:
    """Wall time of the stages that ranks go through, by name."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}

    @property
    def total(self) -> float:
        """Seconds of all stages."""
        return sum(self.stages.values())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time that a block takes to a stage."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + time.monotonic() - begin


def comparable(value: object) -> bytes:
    """Return a text that is the same for equal values: what ranks compare of a config, or send a hash of."""
    return json.dumps(value, sort_keys=True, default=repr).encode()


def _raise(errors: Iterable[TransaxleError | None]) -> None:
    """Raise the refusals of all ranks, each once."""
    refusals: dict[tuple[str, str, Where], Refusal] = {}
    for error in errors:
        for refusal in () if error is None else error.refusals:
            refusals.setdefault((refusal.code, refusal.message, refusal.where), refusal)
    if refusals:
        raise gathered(tuple(refusals.values()))
