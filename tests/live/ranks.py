"""Running a function on several ranks: processes over gloo on loopback, which report what they return or raise.

Starting processes that import torch costs seconds, so the ranks of a world size stay alive for other tests and take
functions in turn; each call has a process group of its own.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.forks import context, fork_what_is_spawned
from transaxle.errors import TransaxleError

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others: on a busy machine one may be minutes late, and one that died is heard of."""
_PATIENCE = 1200.0
"""Seconds after which ranks that have not answered are taken for hung; nothing that works waits for them."""
_GRACE = 180.0
"""Seconds after which the others have not heard of a rank that died."""
_TICK = 1.0
_MOST = 6
"""Processes that are kept for later, of one session: each needs some 120 MB."""
_ATTEMPTS = 3
_UNCONNECTED = "connectFullMesh failed"
"""What gloo says where the ranks of a group did not find each other: it cuts one in some thousands of connections."""
_STALLED = ("Timed out waiting", "/torch/distributed/fsdp/")
"""What a rank says, and where, that waits in vain in torch's own collectives while all ranks live: seen once."""
Task = Callable[..., Any]
"""A function of a module under `tests`, at its top."""
_TESTS = "tests"
DIED = "died"
"""What a rank is said to have raised that was killed."""


def _serve(rank: int, world: int, pipe: Any, timeout: timedelta) -> None:
    """Take tasks from a pipe until it closes."""
    warnings.simplefilter("ignore")
    faulthandler.enable()  # a rank that crashes says where
    fork_what_is_spawned()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        if isinstance(order, str):
            pipe.send(_met(rank, world, order, timeout))
            continue
        module, name, args = order
        task = getattr(import_module(module), name)
        try:
            answer = (True, task(rank, world, *args))
        except TransaxleError as error:
            answer = (False, error)
        except BaseException:  # noqa: BLE001 - it is told, and raised, in the test
            answer = (False, traceback.format_exc())
        finally:
            dist.destroy_process_group()
            _clear_sharding_prop_cache()  # it names groups that are no more
        pipe.send(answer)


def _met(rank: int, world: int, meeting: str, timeout: timedelta) -> bool:
    """Join the others in a new process group; tell whether that succeeded."""
    if dist.is_initialized():  # this one had succeeded where another one failed
        dist.destroy_process_group()
    try:
        dist.init_process_group("gloo", f"file://{meeting}", timeout=timeout, rank=rank, world_size=world)
    except RuntimeError:
        return False
    return True


def _module(task: Task) -> str:
    """The name under which another process can import a task's module: pytest leaves `tests` out."""
    own = task.__module__
    return own if own.startswith(f"{_TESTS}.") else f"{_TESTS}.{own}"


def _unconnected(found: dict[int, tuple[bool, Any]]) -> bool:
    return any(not fine and _UNCONNECTED in str(value) for fine, value in found.values())


def _stalled(found: dict[int, tuple[bool, Any]]) -> bool:
    failures = [str(value) for fine, value in found.values() if not fine]
    return DIED not in failures and any(all(part in each for part in _STALLED) for each in failures)


class Ranks:
    """Processes that act as the ranks of one world."""

    def __init__(self, world: int, timeout: timedelta = TIMEOUT) -> None:
        self.world = world
        self.timeout = timeout
        self._start()

    def _start(self) -> None:
        starter = context()
        self.pipes = []
        self.processes = []
        for rank in range(self.world):
            here, there = starter.Pipe()
            # Only a process that is no daemon may have processes of its own.
            process = starter.Process(target=_serve, args=(rank, self.world, there, self.timeout))
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def answers(self, task: Task, *args: Any) -> list[tuple[bool, Any]]:
        """Run `task(rank, world, *args)` on every rank; return (whether it returned, what it returned or raised).

        It is run again on new processes where gloo did not connect the ranks of a group that the task made, and once
        where a collective of torch's own training did not end.
        """
        for attempt in range(_ATTEMPTS):
            with tempfile.TemporaryDirectory() as folder:
                self.meet(folder)
                for pipe in self.pipes:
                    pipe.send((_module(task), task.__name__, args))
                found = self._collected(task.__name__)
            if not (_unconnected(found) or (_stalled(found) and attempt == 0)):
                return [found[rank] for rank in range(self.world)]
            self.stop()
            self._start()
        raise ConnectionError(f"{self.world} ranks did not meet in a group of {task.__name__}")

    def _collected(self, where: str) -> dict[int, tuple[bool, Any]]:
        """Return what the ranks say, by rank; only that of the first ones where a group did not connect."""
        found: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + _PATIENCE
        while len(found) < self.world and time.monotonic() < end:
            ready = connection.wait([pipe for rank, pipe in enumerate(self.pipes) if rank not in found], _TICK)
            for rank in [rank for rank, pipe in enumerate(self.pipes) if pipe in ready]:
                try:
                    found[rank] = self.pipes[rank].recv()
                except EOFError:
                    found[rank] = (False, DIED)
                    end = min(end, time.monotonic() + _GRACE)
            if _unconnected(found):
                return found
        if len(found) < self.world:
            self.stop()
            silent = sorted({*range(self.world)} - found.keys())
            raise TimeoutError(f"ranks {silent} of {self.world} hang in {where}; the others: {found}")
        return found

    def meet(self, folder: str) -> None:
        """Give the ranks a process group; again, if it fails: one in some thousands of gloo's connections is cut."""
        for attempt in range(_ATTEMPTS):
            for pipe in self.pipes:
                pipe.send(str(Path(folder, f"meeting-{attempt}")))
            met = [self._answer(rank, "a meeting") is True for rank in range(self.world)]
            if all(met):
                return
        raise ConnectionError(f"{self.world} ranks did not meet")

    def _answer(self, rank: int, where: str) -> Any:
        if not self.pipes[rank].poll(_PATIENCE):
            self.stop()
            raise TimeoutError(f"rank {rank} of {self.world} hangs in {where}")
        try:
            return self.pipes[rank].recv()
        except EOFError:
            return (False, DIED)

    def run(self, task: Task, *args: Any) -> list[Any]:
        """Run it everywhere and return what the ranks return.

        Raises:
            TransaxleError: what a rank raised; AssertionError with the tracebacks of all ranks for any other exception.
        """
        answers = self.answers(task, *args)
        failed = {rank: value for rank, (fine, value) in enumerate(answers) if not fine}
        if any(not isinstance(value, TransaxleError) for value in failed.values()):
            told = "\n".join(f"rank {rank} of {self.world}:\n{value}" for rank, value in failed.items())
            raise AssertionError(told)  # one that waited in vain says less than the one that it waited for
        for fine, value in answers:
            if not fine:
                raise value
        return [value for _, value in answers]

    def refusals(self, task: Task, *args: Any) -> list[TransaxleError]:
        """Run it everywhere, and return what each rank refuses."""
        answers = self.answers(task, *args)
        assert not any(fine for fine, _ in answers), answers
        assert all(isinstance(error, TransaxleError) for _, error in answers), answers
        return [error for _, error in answers]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()


_ALIVE: dict[int, Ranks] = {}
"""Those used last are the last."""
_USED: set[int] = set()
"""World sizes of which ranks were asked for since `stop_unused`."""


def ranks(world: int) -> Ranks:
    """Return the living ranks of a world size; those that were not used for longest make room for them."""
    found = _ALIVE.pop(world, None)
    if found is None or not all(process.is_alive() for process in found.processes):
        if found is not None:
            found.stop()
        while _ALIVE and sum(_ALIVE) + world > _MOST:
            _ALIVE.pop(next(iter(_ALIVE))).stop()
        found = Ranks(world)
    _ALIVE[world] = found
    _USED.add(world)
    return found


def run(world: int, task: Task, *args: Any) -> list[Any]:
    """Run `task(rank, world, *args)` on every rank of a world; see `Ranks.run`."""
    return ranks(world).run(task, *args)


def stop_unused() -> None:
    """Stop the ranks of world sizes that nobody has asked for since this was called last."""
    for world in _ALIVE.keys() - _USED:
        _ALIVE.pop(world).stop()
    _USED.clear()


def stop_all() -> None:
    for found in _ALIVE.values():
        found.stop()
    _ALIVE.clear()
