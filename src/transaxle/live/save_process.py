"""The background process of one rank, which writes one snapshot after another from shared memory into a checkpoint.

The background processes of all ranks have their own process group, so that their collectives do not interfere with
those of the training.

In a spawned process, multiprocessing would run the program's main script up to `if __name__ == "__main__"`. A script
without that line would train a second time. So the main script is hidden from multiprocessing while the process starts.
The process ends when its parent ends, for whatever reason, and it ignores signals. Ctrl-C and launchers send signals to
the whole process group, but a program that reacts with a clean shutdown still needs its save.

**Rendezvous**: a key-value store through which the background processes of all ranks find each other, and report lost
processes.

The first rank's training process serves this store, which is protected by a secret that only the ranks know. The store
exists before any background process is started. If a background process waits for a lost process of another rank, its
rank learns of the loss from the store.
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
    """Address of the rendezvous store, with the secret that is needed to connect to the store."""

    host: str
    """Host name or IP address of the first rank's machine."""
    port: int
    """TCP port of the store."""
    secret: bytes = field(repr=False)
    """Secret that every client of the store must prove that it knows."""

    def connect(self, number: int, timeout: timedelta) -> SharedStore:
        """Connect to the store as the client with this number."""
        return SharedStore((self.host, self.port), self.secret, number, "", timeout)

    def join(self, number: int, size: int, timeout: timedelta) -> SharedStore:
        """Form the background processes' own process group, as rank `number` of `size` ranks; return its store, which
        must exist as long as the group.
        """
        # the first `size` client numbers belong to the training processes of the ranks
        store = self.connect(size + number, timeout)
        prefixed = PrefixStore(_GROUP, store)
        dist.init_process_group("gloo", store=prefixed, timeout=timeout, rank=number, world_size=size)
        check_connections(dist.distributed_c10d._get_default_group(), store, self.secret, number, size)
        return store


class Rendezvous:
    """The rendezvous store as the training process of a rank uses it; all ranks must create this object together.

    Args:
        world: all ranks that take part.
        timeout: the longest wait for the process of another rank.
    """

    def __init__(self, world: World, timeout: timedelta) -> None:
        hosts = world.gather(socket.gethostname())
        is_one_host = len(set(hosts)) == 1
        number, secret = world.ranks.index(world.rank), secrets.token_bytes()
        with world.together():
            if number == 0:
                self._server = StoreServer(_HERE if is_one_host else "", 0, secret, 2 * world.size)
        port, secret = world.gather((self._server.port if number == 0 else 0, secret))[0]
        self.address = StoreAddress(_HERE if is_one_host else hosts[0], port, secret)
        with world.together():
            self._store = self.address.connect(number, timeout)

    def report_loss(self, message: str) -> str:
        """Report a lost process to all ranks; return the first report of this kind, which all ranks will raise."""
        with suppress(RuntimeError):  # the store has ended together with the first rank
            return str(self._store.compare_set(_LOST, "", message).decode())
        return message

    @property
    def loss(self) -> str | None:
        """Message about a lost process; None if no process has been reported as lost."""
        with suppress(RuntimeError):
            if self._store.check([_LOST]):
                return str(self._store.get(_LOST).decode())
        return None


Answer = SaveReport | TransaxleError
"""Answer of the background process to an order: the report of the save, or its error."""
READY = "ready"
"""Answer of the background process to an empty order."""
_SCRIPT = ("__spec__", "__file__")
"""Attributes of the module `__main__` from which multiprocessing finds the main script."""
_PROGRAM_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals that are meant for the training program; the background process ignores them."""
_SET_PDEATHSIG = 1
_LOOK = 1.0
"""Seconds between two checks whether the parent process still exists."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Position of a tensor's snapshot in shared memory, with its shape and dtype."""

    start: int
    """Offset of the snapshot's first byte in the shared memory."""
    shape: tuple[int, ...]
    """Shape of the local tensor."""
    dtype: torch.dtype
    """Dtype of the local tensor."""

    @property
    def size(self) -> int:
        """Size of the tensor's snapshot in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def tensor(self, region: Region) -> torch.Tensor:
        """Return the tensor's snapshot as a view of the shared memory."""
        octets = torch.from_numpy(region.bytes[self.start : self.start + self.size])
        return octets.view(self.dtype).view(self.shape) if self.size else torch.empty(self.shape, dtype=self.dtype)


Layout = Mapping[str, TensorSlot]
"""Tensor name -> position of its snapshot in shared memory."""


@dataclass(frozen=True, slots=True)
class SnapshotForm:
    """Description of the tensors in a snapshot. The description is often equal for two successive saves, and then it is
    sent only once.
    """

    global_tensors: Census
    """The tensors of all ranks, with the shard that each rank holds."""
    layout: Layout
    """Position of each of this rank's tensors in the shared memory."""
    size: int
    """Size of the shared memory in bytes."""


@dataclass(frozen=True, slots=True)
class Order:
    """A message that orders the background process to save a snapshot."""

    settings: SaveSettings
    """The validated arguments of `save`."""
    state: CollectedState
    """The collected state without its tensors, which are in shared memory."""
    form: SnapshotForm | None
    """Description of the snapshot's tensors; None means the same as in the last order."""
    new_region: bool
    """Whether a file descriptor of new shared memory follows in the pipe."""
    environment: Mapping[str, str]
    """The present environment variables of the training process, in which storage clients find credentials."""


def serve(
    parent: Parent,
    rank: int,
    ranks: tuple[int, ...],
    rendezvous: StoreAddress | None,
    pipe: Connection,
    timeout: timedelta,
) -> None:
    """Execute the orders that arrive through a pipe until the pipe is closed.

    Args:
        parent: the training process.
        rank: the rank that this process serves.
        ranks: all ranks that save together.
        rendezvous: address of the rendezvous store; None if there is only one rank.
        pipe: connection from which orders are received, and to which answers are sent.
        timeout: the longest wait for the process of another rank.
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
        except Exception as error:  # noqa: BLE001 - any error is sent to the process that waits
            answer = refuse("IO", f"the background process of rank {rank} failed: {error!r}", file=settings.dst)
        try:
            pipe.send(answer)
        except OSError:  # the training process has ended
            break
    if dist.is_initialized():
        dist.destroy_process_group()


class _Inbox:
    """Receives the orders of a background process.

    Args:
        pipe: connection from which orders are received.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._region: Region | None = None
        self._form = SnapshotForm({}, {}, 0)
        self._tensors: dict[str, torch.Tensor] = {}
        self._environment: Mapping[str, str] = {}

    def next(self) -> tuple[SaveSettings, CollectedState]:
        """Wait for the next order, and return the settings and the state of the save.

        Raises:
            EOFError: if the training process has closed the pipe.
        """
        order: Order | None = self._pipe.recv()
        while order is None:
            self._pipe.send(READY)
            order = self._pipe.recv()
        _apply_environment(order.environment, self._environment)
        self._environment = order.environment
        form = self._form = order.form or self._form
        if order.new_region:
            self._region = Region(form.size, recv_handle(self._pipe))
        if order.form is not None and self._region is not None:
            self._tensors = {name: slot.tensor(self._region) for name, slot in form.layout.items()}
        return order.settings, replace(order.state, local_tensors=self._tensors, global_tensors=form.global_tensors)


def _apply_environment(environment: Mapping[str, str], former: Mapping[str, str]) -> None:
    """Apply changed environment variables, and discard storage clients that were created with the former values."""
    changed = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    gone = former.keys() - environment.keys()
    os.environ.update(changed)
    for name in gone:
        os.environ.pop(name, None)
    if (changed or gone) and "fsspec" in sys.modules:
        for kind in sys.modules["fsspec"].registry.values():
            kind.clear_instance_cache()


class _ServedWorld(World):
    """The `World` of the background processes, which have the same numbers as the ranks that they serve.

    Args:
        rank: the rank that this process serves.
        ranks: all ranks that have a background process.
    """

    def __init__(self, rank: int, ranks: tuple[int, ...]) -> None:
        self.group = None
        self.store: SharedStore | None = None  # the process group's store, which must outlive the group
        self.live = False
        self.rank = rank
        self.ranks = ranks
        self.size = 1


@contextmanager
def without_main_script() -> Iterator[None]:
    """Within the block, start processes that do not run the main script; each process must then call `Parent.follow`.

    Within the block multiprocessing cannot find the main script, and signals are blocked.
    """
    main = vars(sys.modules["__main__"])
    script_attributes = {name: main[name] for name in _SCRIPT if name in main}
    with _block_signals():
        try:
            for name in script_attributes:
                main[name] = None
            yield
        finally:
            main.update(script_attributes)


@contextmanager
def _block_signals() -> Iterator[None]:
    """Block signals within the block; processes that start within the block inherit the signal mask."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # a resource tracker that is first started inside the block would unblock the signals
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PROGRAM_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True, slots=True)
class Parent:
    """Describes the parent of a background process; this object is created in the parent and passed to the child
    process.
    """

    pid: int = field(default_factory=os.getpid)
    """Process id of the parent process."""
    by_main: bool = field(default_factory=lambda: threading.current_thread() is threading.main_thread())
    """Whether the parent's main thread starts the child process; Linux treats the end of the starting thread as the end
    of the parent.
    """

    def follow(self) -> None:
        """Make this process end when its parent ends, and ignore signals that are meant for the training program."""
        for number in _PROGRAM_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _PROGRAM_SIGNALS)
        if self.by_main and sys.platform == "linux":
            # If the main thread started this process, the kernel kills it as soon as that thread ends.
            CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """End this process when the parent has ended. The parent is also polled, because a forked process may keep the
        sentinel pipe open.
        """
        above = parent_process()
        while above is not None and self._is_alive():
            if wait([above.sentinel], _LOOK):
                break
        os._exit(1)

    def _is_alive(self) -> bool:
        """Return whether the parent process still exists, as far as the operating system shows."""
        return sys.platform == "win32" or os.getppid() == self.pid
