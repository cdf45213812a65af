"""Executors: what hands the items of a plan to workers, and brings back their results.

A scheduler needs one method to be one. What has `submit`, as the pools of `concurrent.futures` have, of Dask, MPI or
loky, is made one here, and so is a Ray cluster: Ray places items, tries them again and moves them off a lost machine.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from transaxle.engine.distribute.work_plan import WorkItem
from transaxle.errors import StorageError, TransaxleError, refuse
from transaxle.extras import install
from transaxle.move.journal import parse_result

Work = Callable[[int], bytes]
"""Does the item of a number, anywhere, and returns its result. It can be pickled, and called in any process that sees
the source and the target's folder; called twice for one item, also at once, it does no harm.
"""
_TRIES = 3
"""How often an item is tried whose worker meets an error of the machine."""
RETRIES = 10
"""How often a scheduler that we tell does an item again whose worker or machine is lost, or met an error of it."""
_PATIENCE = 20.0
"""Seconds in which workers that are told to stop do so."""


@runtime_checkable
class Executor(Protocol):
    """Hands items to workers."""

    def run(self, work: Work, items: Sequence[WorkItem], take: Callable[[bytes], None]) -> None:
        """Let workers do items; return when all are done and no worker is at work.

        Args:
            work: what a worker calls with an item's `number`.
            items: what is to be done, in the order in which it should begin; `nbytes` tells how much it is.
            take: to be called with each result, in any order, from one thread at a time; of an item done twice with
                one of both, or both.

        Raises:
            Exception: what `work` raised, when trying again makes no sense; no worker may be at work then.
        """


@runtime_checkable
class Submitting(Protocol):
    """What has the method of a `concurrent.futures.Executor`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Call a function somewhere."""


class Here:
    """Does all items in this process, one after the other."""

    def run(self, work: Work, items: Sequence[WorkItem], take: Callable[[bytes], None]) -> None:
        """See `Executor`."""
        for item in items:
            take(work(item.number))


class Pool:
    """Lets a pool of workers do items.

    Args:
        pool: processes or threads; `concurrent.futures.ProcessPoolExecutor`, or what is used like it.
    """

    def __init__(self, pool: Submitting) -> None:
        self._pool = pool

    def run(self, work: Work, items: Sequence[WorkItem], take: Callable[[bytes], None]) -> None:
        """See `Executor`; an item that fails for an error of the machine is tried again."""
        tries = {item.number: 1 for item in items}
        running = {self._pool.submit(work, item.number): item.number for item in items}
        try:
            while running:
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for each in finished:
                    number = running.pop(each)
                    try:
                        result = each.result()
                    except StorageError:
                        if tries[number] == _TRIES:
                            raise
                        tries[number] += 1
                        running[self._pool.submit(work, number)] = number
                    else:
                        take(result)
        finally:
            for each in running:
                each.cancel()
            wait([each for each in running if not each.cancelled()])


def _do(work: Work, number: int) -> bytes:
    """Do an item in a worker of the cluster; what is written goes to its log, which Ray keeps."""
    sys.stderr.write(f"transaxle item {number}: begun\n")
    try:
        text = work(number)
    except BaseException as error:
        sys.stderr.write(f"transaxle item {number}: {error}\n")
        raise
    result = parse_result(text)
    if result is not None:
        sys.stderr.write(f"transaxle item {number}: {result.nbytes:,} bytes in {result.seconds:.1f} s\n")
    return text


class RayCluster:
    """Hands items to a Ray cluster.

    Args:
        address: `ray://HOST:PORT` of a cluster; None: the one that runs here or that `RAY_ADDRESS` names, or a local
            one that is started, and stopped afterwards.
        cpus: how many Ray keeps free for an item.
    """

    def __init__(self, address: str | None = None, *, cpus: int = 1) -> None:
        self._address = address
        self._cpus = cpus

    def run(self, work: Work, items: Sequence[WorkItem], take: Callable[[bytes], None]) -> None:
        """See `Executor`."""
        if not items:
            return
        with self._connected() as ray:
            self._refuse_too_many(ray)
            shared = ray.put(work)
            task = ray.remote(
                num_cpus=self._cpus, max_retries=RETRIES, retry_exceptions=[StorageError], scheduling_strategy="SPREAD"
            )(_do)
            running = {
                task.options(name=f"transaxle item {item.number}").remote(shared, item.number): item for item in items
            }
            try:
                while running:
                    (finished,), _ = ray.wait(list(running), num_returns=1)
                    take(_result(ray, finished, running.pop(finished)))
            finally:  # workers that do not end are heard of when the claim is taken back
                for each in running:
                    ray.cancel(each, force=True)
                if running:
                    ray.wait(list(running), num_returns=len(running), timeout=_PATIENCE)

    def _refuse_too_many(self, ray: Any) -> None:
        """Refuse to wait for a node with more CPUs than any has; a cluster may still get its first ones.

        Raises:
            Refused: UNSUPPORTED.
        """
        most = max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
        if 0 < most < self._cpus:
            message = f"an item takes {self._cpus} CPUs of a node, and the largest node of the cluster has {most:g}"
            raise refuse("UNSUPPORTED", message, hint=f"Give fewer threads:  --jobs {int(most)} (jobs={int(most)}).")

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        """Give the module `ray`, connected to a cluster.

        Raises:
            Refused: UNSUPPORTED where it is not installed.
            StorageError: IO where there is no cluster at the address.
        """
        try:
            import ray
        except ImportError as error:
            hint = f"Install it:  {install('ray')}"
            raise refuse("UNSUPPORTED", f"Ray is not installed: {error}", hint=hint) from None
        if ray.is_initialized():
            yield ray
            return
        try:
            ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            message = f"connecting to Ray failed: {error}"
            raise refuse("IO", message, hint="Start a cluster, or name its address: --on ray://HOST:10001.") from error
        try:
            yield ray
        finally:
            ray.shutdown()


def _result(ray: Any, reference: Any, item: WorkItem) -> bytes:
    """Return the result of the task of an item.

    Raises:
        TransaxleError: what the item raised; IO where Ray gave up.
    """
    from ray.exceptions import RayError, RayTaskError

    try:
        result: bytes = ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, TransaxleError):
            raise error.cause from None
        raise refuse("IO", f"item {item.number} failed in a worker of the Ray cluster: {error.cause!r}") from error
    except RayError as error:
        raise refuse("IO", f"the worker of item {item.number} in the Ray cluster was lost: {error}") from error
    return result
