"""The background process of one rank, and where those of all ranks meet.

The background process of one rank: it writes snapshots out of shared memory, one after the other.

Those of all ranks form a world of their own, so no collective of the training is disturbed.

A spawned process runs the program's main script again, up to `if __name__ == "__main__"`; a training script without
that line would begin to train once more. Ours needs nothing of the script. It ends with the process that has started
it, however that ends, and with nothing else: Ctrl-C and the signals of launchers go to all processes of a group, and a
program that takes them as a wish to end well must still have its save.

**Rendezvous**: where the background processes of all ranks find each other, and where the loss of one is reported.

The first rank's own process serves a store, for those who know a secret that it has told the other ranks. The store
exists before the background processes do, on whatever machines these run; and a rank whose process waits for a lost one
learns of it there.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from ctypes import CDLL
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import prod
from multiprocessing import parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, if not marked so

from transaxle.errors import TransaxleError, refuse
from transaxle.live.global_tensors import Census
from transaxle.live.model.destination import SaveReport
from transaxle.live.save import CollectedState, SaveSettings, write_checkpoint
from transaxle.live.transport.shared_memory import Region
from transaxle.live.transport.shared_store import SharedStore, StoreServer, check_connections
from transaxle.live.transport.world import Clock, World

_LOST, _GROUP = "lost", "group"
_HERE = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where the store is."""

    host: str
    """Machine."""
    port: int
    """TCP port."""
    secret: bytes = field(repr=False)
    """What all know who come there."""

    def opened(self, number: int, timeout: timedelta) -> SharedStore:
        """Return the store, as one of those who come has it."""
        return SharedStore((self.host, self.port), self.secret, number, "", timeout)

    def join(self, number: int, size: int, timeout: timedelta) -> SharedStore:
        """Form the processes' own group, as number `number` of `size`; return its store, which must live as long."""
        store = self.opened(size + number, timeout)  # the first numbers are those of the ranks themselves
        prefixed = PrefixStore(_GROUP, store)
        dist.init_process_group("gloo", store=prefixed, timeout=timeout, rank=number, world_size=size)
        check_connections(dist.distributed_c10d._get_default_group(), store, self.secret, number, size)
        return store


class Rendezvous:
    """The store, as the ranks see it; several ranks make it together.

    Args:
        world: the ranks.
        timeout: how long anybody waits for it.
    """

    def __init__(self, world: World, timeout: timedelta) -> None:
        hosts = world.gather(socket.gethostname())
        here = len(set(hosts)) == 1
        number, secret = world.ranks.index(world.rank), secrets.token_bytes()
        with world.together():
            if number == 0:
                self._server = StoreServer(_HERE if here else "", 0, secret, 2 * world.size)
        port, secret = world.gather((self._server.port if number == 0 else 0, secret))[0]
        self.address = StoreAddress(_HERE if here else hosts[0], port, secret)
        with world.together():
            self._store = self.address.opened(number, timeout)

    def report_loss(self, message: str) -> str:
        """Tell all ranks that a process is lost; return what was reported first, which is what all ranks say."""
        with suppress(RuntimeError):  # the first rank is gone: nobody is left to hear it
            return str(self._store.compare_set(_LOST, "", message).decode())
        return message

    @property
    def lost(self) -> str | None:
        """What was reported of a lost process; None where none was."""
        with suppress(RuntimeError):
            if self._store.check([_LOST]):
                return str(self._store.get(_LOST).decode())
        return None


Answer = SaveReport | TransaxleError
"""What comes back from the process."""
READY = "ready"
"""What comes back when nothing is ordered."""
_SCRIPT = ("__spec__", "__file__")
"""What multiprocessing looks at to tell a new process where the main script is."""
_PROGRAM_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals that are meant for the program."""
_SET_PDEATHSIG = 1
_LOOK = 1.0
"""Seconds after which a process looks whether its parent is there."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
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


Layout = Mapping[str, TensorSlot]
"""Where the tensors of a snapshot lie, by name."""


@dataclass(frozen=True, slots=True)
class SnapshotForm:
    """What seldom changes between two saves."""

    global_tensors: Census
    """The tensors of all ranks."""
    layout: Layout
    """Where this rank's lie."""
    size: int
    """Bytes of the shared memory."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a background process is told to write."""

    settings: SaveSettings
    """What and how."""
    state: CollectedState
    """What is saved beside the tensors; those are in the shared memory."""
    form: SnapshotForm | None
    """The tensors; None: those of the last order."""
    new_region: bool
    """Whether new shared memory follows."""
    environment: Mapping[str, str]
    """The rank's variables as they are now: clients of stores find their credentials there."""


def serve(
    parent: Parent,
    rank: int,
    ranks: tuple[int, ...],
    rendezvous: StoreAddress | None,
    pipe: Connection,
    timeout: timedelta,
) -> None:
    """Write what comes through a pipe, until it closes.

    Args:
        parent: the rank's own process.
        rank: the rank that this process serves.
        ranks: all that save together.
        rendezvous: where their processes find each other; None for one alone.
        pipe: brings orders and takes answers.
        timeout: how long the processes wait for each other.
    """
    parent.follow()
    torch.set_num_threads(1)
    world = _ServedWorld(rank, ranks)
    if rendezvous is not None:
        world.store = rendezvous.join(ranks.index(rank), len(ranks), timeout)
        world.live, world.size = True, len(ranks)
    inbox = _Inbox(pipe)
    while True:
        try:
            settings, state = inbox.next()
        except EOFError:
            break
        answer: Answer
        try:
            answer = write_checkpoint(settings, state, world, Clock())
        except TransaxleError as error:
            answer = error
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told to the one who waits
            answer = refuse("IO", f"the background process of rank {rank} failed: {error!r}", file=settings.dst)
        try:
            pipe.send(answer)
        except OSError:  # nobody waits for it any more
            break
    if dist.is_initialized():
        dist.destroy_process_group()


class _Inbox:
    """Where a background process takes its orders.

    Args:
        pipe: they come through it.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._region: Region | None = None
        self._form = SnapshotForm({}, {}, 0)
        self._tensors: dict[str, torch.Tensor] = {}
        self._environment: Mapping[str, str] = {}

    def next(self) -> tuple[SaveSettings, CollectedState]:
        """Wait for the next order.

        Raises:
            EOFError: there will be none.
        """
        order: Order | None = self._pipe.recv()
        while order is None:
            self._pipe.send(READY)
            order = self._pipe.recv()
        _take(order.environment, self._environment)
        self._environment = order.environment
        form = self._form = order.form or self._form
        if order.new_region:
            self._region = Region(form.size, recv_handle(self._pipe))
        if order.form is not None and self._region is not None:
            self._tensors = {name: slot.tensor(self._region) for name, slot in form.layout.items()}
        return order.settings, replace(order.state, own=self._tensors, global_tensors=form.global_tensors)


def _take(environment: Mapping[str, str], former: Mapping[str, str]) -> None:
    """Set the variables that have changed, and forget the clients of stores that were made with the former ones."""
    changed = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    gone = former.keys() - environment.keys()
    os.environ.update(changed)
    for name in gone:
        os.environ.pop(name, None)
    if (changed or gone) and "fsspec" in sys.modules:
        for kind in sys.modules["fsspec"].registry.values():
            kind.clear_instance_cache()


class _ServedWorld(World):
    """The background processes, by the ranks that they serve.

    Args:
        rank: the rank that this one serves.
        ranks: all of them.
    """

    def __init__(self, rank: int, ranks: tuple[int, ...]) -> None:
        self.group = None
        self.store: SharedStore | None = None  # the group's, which must live as long
        self.live = False
        self.rank = rank
        self.ranks = ranks
        self.size = 1


@contextmanager
def without_main_script() -> Iterator[None]:
    """Start processes in this block that do not run the main script, and that call `Parent.follow`.

    Meanwhile the main script cannot be found, and signals wait.
    """
    main = vars(sys.modules["__main__"])
    kept = {name: main[name] for name in _SCRIPT if name in main}
    with _undisturbed():
        try:
            for name in kept:
                main[name] = None
            yield
        finally:
            main.update(kept)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let signals wait; processes that are started meanwhile begin so."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # or it would be started with the first process, and let signals in
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PROGRAM_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True, slots=True)
class Parent:
    """The process that starts another one; made in it, and given to the other."""

    pid: int = field(default_factory=os.getpid)
    """Number of the process."""
    by_main: bool = field(default_factory=lambda: threading.current_thread() is threading.main_thread())
    """Whether its main thread starts the other: the system takes the end of the thread for the end of the process."""

    def follow(self) -> None:
        """Let this process end when the parent does, and no signal for the parent end it."""
        for number in _PROGRAM_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _PROGRAM_SIGNALS)
        if self.by_main and sys.platform == "linux":
            CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)  # at once, whatever this process does
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """End this process after the parent; a pipe tells, unless a process that was forked meanwhile has it too."""
        above = parent_process()
        while above is not None and self._is_alive():
            if wait([above.sentinel], _LOOK):
                break
        os._exit(1)

    def _is_alive(self) -> bool:
        """Tell whether the parent was still there when this was asked, as far as the system tells."""
        return sys.platform == "win32" or os.getppid() == self.pid
