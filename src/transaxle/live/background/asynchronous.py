"""Saving in the background: a snapshot first, then a process of its own writes it while training goes on.

The snapshot is a copy in shared CPU memory, whose buffers are used again by the next one; what happens to the model
after `async_save` has returned never reaches the files. Each rank has one background process; together these form a
world of their own, so no collective of the training is disturbed.

A program that ends waits for its save: what `async_save` has taken is written, unless the program is killed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import inf, prod
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Unpack

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from transaxle.arguments import PathLike, check_keywords
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.staging.belongings import Overwrite
from transaxle.formats.training_state.state_groups import Group
from transaxle.live.background.ending import at_end, fail, say
from transaxle.live.background.spawned import Parent, apart
from transaxle.live.model.report import SaveReport
from transaxle.live.model.state_tensors import State
from transaxle.live.save.save import Holding, Request, Saving, Wish, fulfil, held
from transaxle.live.sharding.global_tensors import Census
from transaxle.live.tensors.clock import Clock
from transaxle.live.training.optimizers import AnyOptimizer
from transaxle.live.transport.rendezvous import Meeting, Place
from transaxle.live.transport.shared_memory import Region
from transaxle.live.transport.world import World
from transaxle.torch_tensors.local_tensor import local_of
from transaxle.torch_tensors.torch_arguments import Ranks

_TIMEOUT = timedelta(minutes=30)
_JOIN = 10.0
_LOOK = 0.5
"""Seconds after which one that waits looks for lost processes."""
_ALIGNED = 64
"""Tensors begin at multiples of this in the shared memory."""
Answer = SaveReport | TransaxleError


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor's snapshot lies in the shared memory."""

    start: int
    """First byte."""
    shape: tuple[int, ...]
    """Elements along each dim."""
    dtype: torch.dtype
    """Their type."""

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def tensor(self, region: Region) -> torch.Tensor:
        """Return the tensor in the shared memory."""
        octets = torch.from_numpy(region.bytes[self.start : self.start + self.size])
        return octets.view(self.dtype).view(self.shape) if self.size else torch.empty(self.shape, dtype=self.dtype)


_Layout = Mapping[str, _Place]


@dataclass(frozen=True, slots=True)
class _Held:
    """What seldom changes between two saves."""

    everything: Census
    """The tensors of all ranks."""
    layout: _Layout
    """Where this rank's lie."""
    size: int
    """Bytes of the shared memory."""


@dataclass(frozen=True, slots=True)
class _Order:
    """What a background process is told to write."""

    wish: Wish
    """What and how."""
    groups: Sequence[Group]
    """The optimizer's groups."""
    files: Mapping[str, bytes]
    """Files that travel along."""
    held: _Held | None
    """The tensors; None: those of the last order."""
    region: bool
    """Whether new shared memory follows."""


def _serve(
    parent: Parent, rank: int, ranks: tuple[int, ...], meeting: Place | None, pipe: Connection, timeout: timedelta
) -> None:
    """Write what comes through a pipe, until it closes."""
    parent.follow()
    torch.set_num_threads(1)
    world = _World(rank, ranks)
    if meeting is not None:
        meeting.join(ranks.index(rank), len(ranks), timeout)
        world.live, world.size = True, len(ranks)
    desk = _Desk(pipe)
    while True:
        try:
            wish, tensors, holding = desk.next()
        except EOFError:
            break
        answer: Answer
        try:
            answer = fulfil(wish, tensors, holding, world, Clock())
        except TransaxleError as error:
            answer = error
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told to the one who waits
            answer = refuse("IO", f"the background process of rank {rank} failed: {error!r}", file=wish.dst)
        try:
            pipe.send(answer)
        except OSError:  # nobody waits for it any more
            break
    if dist.is_initialized():
        dist.destroy_process_group()


class _Desk:
    """Where a background process takes its orders.

    Args:
        pipe: they come through it.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._region: Region | None = None
        self._held = _Held({}, {}, 0)
        self._tensors: dict[str, torch.Tensor] = {}

    def next(self) -> tuple[Wish, Mapping[str, torch.Tensor], Holding]:
        """Wait for the next order.

        Raises:
            EOFError: there will be none.
        """
        order: _Order = self._pipe.recv()
        held = self._held = order.held or self._held
        if order.region:
            self._region = Region(held.size, recv_handle(self._pipe))
        if order.held is not None and self._region is not None:
            self._tensors = {name: place.tensor(self._region) for name, place in held.layout.items()}
        return order.wish, self._tensors, Holding(held.everything, order.groups, order.files)


class _World(World):
    """The background processes, by the ranks that they serve.

    Args:
        rank: the rank that this one serves.
        ranks: all of them.
    """

    def __init__(self, rank: int, ranks: tuple[int, ...]) -> None:
        self.group = None
        self.live = False
        self.rank = rank
        self.ranks = ranks
        self.size = 1


class Saver:
    """The background process of this rank, and the buffers it reads from.

    Args:
        world: the ranks that save together.
    """

    def __init__(self, world: World, timeout: timedelta = _TIMEOUT) -> None:
        context = mp.get_context("spawn")
        here, there = context.Pipe()
        self._rank = world.rank
        self._meeting = Meeting(world, timeout) if world.size > 1 else None
        place = None if self._meeting is None else self._meeting.place
        self._pipe = here
        self._region: Region | None = None
        self._new = False
        self._layout: _Layout = {}
        self._size = 0
        self._buffers: dict[str, torch.Tensor] = {}
        self._held: _Held | None = None
        self._process = context.Process(
            target=_serve,
            args=(Parent(), world.rank, world.ranks, place, there, timeout),
            daemon=True,
            name="transaxle-save",
        )
        self._there = there

    def snapshot(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy what this rank holds into shared memory, where the last snapshot was if it has the same form."""
        found = {name: local_of(tensor) for name, tensor in tensors.items()}
        layout: dict[str, _Place] = {}
        end = 0
        for name, local in found.items():
            layout[name] = _Place(end, tuple(local.shape), local.dtype)
            end += -(-layout[name].size // _ALIGNED) * _ALIGNED
        if layout != self._layout:
            if self._region is None or end > self._region.size:
                self._buffers, self._region = {}, None  # the old memory goes before the new one comes
                self._region, self._new = Region(end), True
            self._layout, self._size = layout, end
            self._buffers = {name: place.tensor(self._region) for name, place in layout.items()}
        with torch.no_grad():
            for name, local in found.items():
                self._buffers[name].copy_(local, non_blocking=True)
        if any(local.is_cuda for local in found.values()):
            torch.cuda.synchronize()

    def order(self, wish: Wish, holding: Holding) -> None:
        """Begin to write the snapshot, in a process that is started here if it is the first; nothing is waited for."""
        if self._process.pid is None:
            try:
                with apart():
                    self._process.start()
            except BaseException as error:
                if self._meeting is not None:
                    self._meeting.tell(f"the background process of rank {self._rank} did not start: {error!r}")
                raise
            self._there.close()
        held = _Held(holding.everything, self._layout, self._size)
        same = held == self._held
        self._held = held
        order = _Order(wish, holding.groups, holding.files, None if same else held, self._new)
        threading.Thread(target=self._send, args=(order,), daemon=True).start()  # a process that starts does not read

    def _send(self, order: _Order) -> None:
        """Hand an order over; where the process is gone, or gets no order, `answer` will tell."""
        try:
            with suppress(OSError):
                self._pipe.send(order)
                if order.region and self._region is not None and self._process.pid is not None:
                    send_handle(self._pipe, self._region.fd, self._process.pid)
                    self._region.close()
                    self._new = False
        except BaseException:
            self._process.kill()
            raise

    def answered(self, timeout: float | None) -> bool:
        """Wait for the answer, or the loss of a process; False if there is neither after `timeout` seconds."""
        end = time.monotonic() + (inf if timeout is None else timeout)
        while True:
            left = max(0.0, end - time.monotonic())
            if self._pipe.poll(min(left, _LOOK)) or self._lost is not None:
                return True
            if left <= _LOOK:
                return False

    def answer(self) -> Answer:
        """Return what came of it."""
        if not self._pipe.poll() and self._lost is not None:
            self._process.kill()  # it waits for the lost one
            return refuse("IO", self._lost)
        try:
            found: Answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_JOIN)
            message = f"the background process of rank {self._rank} ended (exit code {self._process.exitcode})"
            if self._meeting is not None:
                self._meeting.tell(message)
            found = refuse("IO", message)
        return found

    @property
    def _lost(self) -> str | None:
        """What another rank said of its process, if that is lost."""
        return None if self._meeting is None else self._meeting.lost

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.pid is not None and self._process.is_alive()

    def close(self, patience: float = _JOIN) -> None:
        """End the process; what it has not committed is not there.

        Args:
            patience: seconds to wait for it to end by itself, which it does at once unless it writes.
        """
        self._pipe.close()
        if self._process.pid is None:
            return
        self._process.join(patience)
        if self._process.is_alive():
            self._process.kill()


class SaveJob:
    """A save that goes on in the background."""

    def __init__(self, saver: Saver, dst: str, stall: float, *, first: bool) -> None:
        self._saver = saver
        self._dst = dst
        self._first = first
        self._answer: Answer | None = None
        self._lock = threading.Lock()
        self._told = False
        self.stall = stall
        """Seconds for which training stood still."""

    def done(self) -> bool:
        """Tell whether it is over, well or not, without waiting."""
        return self._wait(0.0)

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait for it.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Raises:
            TransaxleError: what any rank met; the target is then as it was.
            TimeoutError: it is not over yet.
        """
        if not self._wait(timeout):
            raise TimeoutError(f"not saved after {timeout} s")
        if not isinstance(self._answer, SaveReport):
            self._told = True
            raise self._answer if self._answer is not None else TimeoutError
        return self._answer

    def over(self) -> None:
        """Wait for it, and raise its error if nobody has been told."""
        if not self._told:
            self.result()

    def end(self) -> None:
        """Wait for it because the program ends; an error that nobody has been told is shown, and is the program's."""
        try:
            if not self.done() and self._first:
                say(f"the save of {self._dst} goes on; waiting for it (Ctrl-C gives it up)")
            self._wait(None)
        except KeyboardInterrupt:
            self._answer = refuse("IO", "it was given up", hint="the target is as it was")
            self._saver.close(0.0)
        if not isinstance(self._answer, SaveReport) and not self._told:
            say(f"the save of {self._dst} has failed, and nobody has asked for its result:\n{self._answer}")
            fail()

    def _wait(self, timeout: float | None) -> bool:
        with self._lock:
            if self._answer is None and self._saver.answered(timeout):
                self._answer = self._saver.answer()
            return self._answer is not None


_Key = tuple[int, tuple[int, ...]]
_SAVERS: dict[_Key, tuple[Saver, SaveJob | None]] = {}
"""For each set of ranks, its background process and its last job; a forked process has none of these."""


def _finish(key: _Key) -> None:
    """Let the last job be done, and end its process."""
    saver, job = _SAVERS[key]
    try:
        if job is not None:
            job.end()
    finally:
        saver.close()


def async_save(
    state: State,
    dst: PathLike,
    *,
    to: str = "hf",
    optimizer: AnyOptimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    overwrite: Overwrite = False,
    group: Ranks | None = None,
    **options: Unpack[Saving],
) -> SaveJob:
    """Take a snapshot, and save it in the background; collective over the group. The arguments are those of `save`.

    One save is in flight at a time: another one waits for it, and raises what it failed with if nobody has been told.
    A program that ends waits for its last save, with a message on stderr; where that fails and nobody has asked for its
    result, the error is shown there, and the program exits with 120.

    Returns:
        The job: `.done()`, `.result()`. A job whose result nobody asks for has its error raised by the next save.

    Raises:
        TransaxleError: on every rank, before the snapshot; or what the save before this one failed with.
    """
    check_keywords("async_save", options, Saving.__annotations__)
    request = Request(state, dst, to, optimizer, extra, overwrite=overwrite, **options)
    world = World(group)
    key = os.getpid(), world.ranks
    begin = time.monotonic()
    saver, last = _SAVERS.get(key, (None, None))

    def ready() -> bool:
        if last is not None and saver is not None:
            _SAVERS[key] = saver, None
            last.over()
        return saver is not None and saver.alive

    whole = all(world.pool(ready))
    tensors, holding, wish = held(request, world)
    if saver is not None and not whole:
        saver.close()  # where one is lost, the others can no longer write together
    if saver is None or not whole:
        saver = Saver(world)
    with world.together():
        saver.snapshot(tensors)
    saver.order(wish, holding)  # nobody begins to write, and takes the processor, before all have their snapshots
    if key not in _SAVERS:
        at_end(partial(_finish, key))
    job = SaveJob(saver, wish.dst, time.monotonic() - begin, first=world.rank == world.ranks[0])
    _SAVERS[key] = saver, job
    return job
