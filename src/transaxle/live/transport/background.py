"""Saves by `dcp.async_save` that run in the background of this process, and the process groups that they use.

Two threads must not use one process group at the same time. The collectives of several ranks are paired by the order in
which each rank calls them, and with two threads this order differs between ranks: then ranks wait for each other until
the timeout, or receive each other's values. So every use of a process group by Transaxle first waits until no
background save uses that group.

A save runs in a thread of torch's, which writes itself, or waits for torch's background process. torch names neither
the thread nor the process group to a storage writer. So the writer calls `begin` in that thread, and the groups are
those that have carried out collectives between `begin_plan` and `end_plan`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import takewhile
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

_LOOK = 0.2
"""Seconds between two checks whether the thread of a save has ended before it has called `begin`."""
_EXECUTOR = "AsyncCheckpointExecutor"
"""Beginning of the names that torch gives to the threads of `dcp.async_save`."""
_CPU = "cpu"
_RUNNING: list[BackgroundSave] = []
"""The saves of this process that may still run."""
_LOCK = threading.Lock()
"""Guards `_RUNNING`."""


class BackgroundSave:
    """A save by `dcp.async_save` that has been or will be started in this process."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._earlier_threads = {*threading.enumerate()}
        self._new_threads: AbstractSet[threading.Thread] = frozenset()
        self._thread: threading.Thread | None = None
        self._has_begun = threading.Event()
        self._is_planned = threading.Event()
        self._counts: Mapping[dist.ProcessGroup, int | None] = {}
        self._groups: AbstractSet[dist.ProcessGroup] = frozenset()

    @classmethod
    def of_this_thread(cls) -> BackgroundSave:
        """Return a new save, already registered, that the current thread runs."""
        save = cls()
        save._thread = threading.current_thread()
        save.register()
        return save

    def register(self) -> None:
        """Make later users of process groups wait for this save, which has been started.

        Its thread, if it has not ended, is one of the threads that are new now; threads started later are not waited
        for, whether the save calls `begin` or fails before.
        """
        if self._thread is None:
            self._new_threads = {*threading.enumerate()} - self._earlier_threads
        with _LOCK:
            _RUNNING.append(self)

    def begin(self) -> None:
        """Declare that this thread runs the save; other threads may call this, and change nothing."""
        thread = threading.current_thread()
        if self._thread is None and thread not in self._earlier_threads:
            self._thread, self._earlier_threads, self._new_threads = thread, set(), set()
            self._has_begun.set()

    @property
    def is_own_thread(self) -> bool:
        """Whether the current thread runs this save."""
        return self._thread is threading.current_thread()

    def begin_plan(self) -> None:
        """Declare that torch now plans the save, with collectives of the save's process group."""
        self._counts = _count_collectives()

    def end_plan(self) -> None:
        """Declare that the plan is complete; torch has no more collectives before the data are written."""
        counts = _count_collectives()
        self._groups = {
            group for group, count in counts.items() if count is None or count != self._counts.get(group, 0)
        }
        self._is_planned.set()

    def leave_process(self) -> None:
        """Declare that another process runs the save, which uses no process group of this process."""
        self._is_planned.set()

    def find_groups(self) -> AbstractSet[dist.ProcessGroup]:
        """Wait until the save is planned, and return the process groups that it uses in this process."""
        while self._is_running() and not self._is_planned.wait(_LOOK):
            pass
        return self._groups

    def wait(self) -> bool:
        """Wait until the save has ended, successfully or not; return False immediately in the thread that runs it."""
        while self._is_running():
            if self._thread is not None:
                self._thread.join()
            else:
                self._has_begun.wait(_LOOK)
        return not self.is_own_thread

    def _is_running(self) -> bool:
        """Return whether the save still runs, in another thread than this one."""
        if self._process != os.getpid():
            return False  # a fork has copied this object, but not the thread
        if self._thread is not None:
            return self._thread.is_alive() and not self.is_own_thread
        return any(thread.is_alive() for thread in self._new_threads)


def wait_for_saves() -> None:
    """Wait until no save runs in the background, except one that runs in this thread."""
    for save in _others():
        save.wait()


def wait_for_group(group: dist.ProcessGroup | None) -> None:
    """Wait until no background save uses a process group; None means the default group."""
    for save in _others():
        if (group if group is not None else dist.group.WORLD) in save.find_groups():
            save.wait()


def _others() -> list[BackgroundSave]:
    """Return the running saves; in a thread that runs one itself, only those that were registered before it."""
    with _LOCK:
        _RUNNING[:] = [save for save in _RUNNING if save.is_own_thread or save._is_running()]
        return [*takewhile(lambda save: not save.is_own_thread, _RUNNING)]


def in_saving_thread() -> bool:
    """Return whether torch has started the current thread for `dcp.async_save`."""
    return threading.current_thread().name.startswith(_EXECUTOR)


def training_groups(state: Mapping[str, Any]) -> AbstractSet[dist.ProcessGroup]:
    """Return process groups with which a model may be trained on CPUs, and in which a save must not interfere.

    These are the groups of meshes of CPUs, and the default group, unless it has another backend for accelerators.

    Args:
        state: the state dict of the model.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return frozenset()
    meshes = {tensor.device_mesh for tensor in tree_leaves(dict(state)) if isinstance(tensor, DTensor)}
    groups = {group for mesh in meshes if mesh.device_type == _CPU for group in mesh.get_all_groups()}
    world = dist.group.WORLD
    assert world is not None
    backends = dict(_backends(world))
    return groups | ({world} if _CPU in backends and len({*backends.values()}) == 1 else set())


def _backends(group: dist.ProcessGroup) -> Iterator[tuple[str, str]]:
    """Yield (type of device, name of the backend for it) of a process group."""
    for pair in dist.get_backend_config(group).split(","):
        device, _, backend = pair.partition(":")
        yield device, backend


def _count_collectives() -> dict[dist.ProcessGroup, int | None]:
    """Return the number of collectives that each process group of this process has begun; None if it is not known."""
    counts = dict[dist.ProcessGroup, int | None]()
    for group in [*dist.distributed_c10d._world.pg_map] if dist.is_initialized() else ():
        try:
            counts[group] = group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # not in torch's stubs
        except RuntimeError:
            counts[group] = None
    return counts
