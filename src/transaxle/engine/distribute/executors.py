"""Executors hand the work items of a plan out to workers, and collect the workers' results.

A scheduler is an executor if it has the single method `run`. This module wraps pools with a method `submit` (of
`concurrent.futures`, Dask, MPI or loky), and Ray clusters. Ray chooses the machine for a work item, retries it, and
moves it to another machine if its machine is lost.
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
"""A function that does the work item with a given number, and returns the result of the work item as bytes. The
function can be pickled, and called in any process that can reach the source and the target's folder. Doing a work item
twice does no harm, even at the same time.
"""
_TRIES = 3
"""How often a work item is tried if its worker meets a machine error, such as a failed read."""
RETRIES = 10
"""Number of times that Ray retries a work item whose worker or machine was lost, or whose worker had an I/O error."""
_PATIENCE = 20.0
"""Seconds that the executor waits for cancelled workers to stop."""


@runtime_checkable
class Executor(Protocol):
    """Hands the work items of a plan to workers, and collects their results."""

    def run(self, work: Work, items: Sequence[WorkItem], take: Callable[[bytes], None]) -> None:
        """Let workers do work items; return when all work items are done and no worker is running.

        Args:
            work: the function that a worker calls with the `number` of a work item.
            items: the work items to do, in the order in which they should begin; `nbytes` is the size of a work item.
            take: function to call with the result of each work item, in any order, by one thread at a time. If a work
                item was done twice, `run` may pass one of its results or both.

        Raises:
            Exception: an error of `work` that a retry cannot fix; no worker may be running when it is raised.
        """


@runtime_checkable
class SubmitPool(Protocol):
    """A pool with the method `submit` of `concurrent.futures.Executor`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Call a function in one of the pool's workers, and return a future for its result."""


class InProcess:
    """Executor that does all work items in this process, one after another."""

    def run(self, work: Work, items: Sequence[WorkItem], take: Callable[[bytes], None]) -> None:
        """Do all work items in this process; see `Executor.run`."""
        for item in items:
            take(work(item.number))


class Pool:
    """Executor that lets a pool of processes or threads do the work items.

    Args:
        pool: a `concurrent.futures.ProcessPoolExecutor`, or an object with the same method `submit`.
    """

    def __init__(self, pool: SubmitPool) -> None:
        self._pool = pool

    def run(self, work: Work, items: Sequence[WorkItem], take: Callable[[bytes], None]) -> None:
        """Let the pool do the work items; see `Executor.run`. A work item that fails with a machine error (such as a
        failed read) is retried.
        """
        tries = {item.number: 1 for item in items}
        running = {self._pool.submit(work, item.number): item.number for item in items}
        try:
            while running:
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    number = running.pop(future)
                    try:
                        result = future.result()
                    except StorageError:
                        if tries[number] == _TRIES:
                            raise
                        tries[number] += 1
                        running[self._pool.submit(work, number)] = number
                    else:
                        take(result)
        finally:
            for future in running:
                future.cancel()
            wait([future for future in running if not future.cancelled()])


def _do_and_log(work: Work, number: int) -> bytes:
    """Do a work item in a worker of the Ray cluster; Ray stores the worker's output in a log."""
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
    """Executor that hands the work items to a Ray cluster.

    Args:
        address: `ray://HOST:PORT` of a cluster. If `address` is None, Ray uses the cluster that runs on this machine or
            is named by `RAY_ADDRESS`, or else starts a local cluster for the run and stops it afterwards.
        cpus: number of CPUs that Ray reserves for each work item.
    """

    def __init__(self, address: str | None = None, *, cpus: int = 1) -> None:
        self._address = address
        self._cpus = cpus

    def run(self, work: Work, items: Sequence[WorkItem], take: Callable[[bytes], None]) -> None:
        """Let the Ray cluster do the work items; see `Executor.run`."""
        if not items:
            return
        with self._connect() as ray:
            self._refuse_too_many(ray)
            shared = ray.put(work)
            task = ray.remote(
                num_cpus=self._cpus, max_retries=RETRIES, retry_exceptions=[StorageError], scheduling_strategy="SPREAD"
            )(_do_and_log)
            running = {
                task.options(name=f"transaxle item {item.number}").remote(shared, item.number): item for item in items
            }
            try:
                while running:
                    (finished,), _ = ray.wait(list(running), num_returns=1)
                    take(_task_result(ray, finished, running.pop(finished)))
            finally:  # a worker that does not stop is detected later, when this process locks the staged files again
                for task_reference in running:
                    ray.cancel(task_reference, force=True)
                if running:
                    ray.wait(list(running), num_returns=len(running), timeout=_PATIENCE)

    def _refuse_too_many(self, ray: Any) -> None:
        """Refuse work items that need more CPUs than any node of the cluster has, because Ray would wait forever.

        Raises:
            Refused: with code UNSUPPORTED, if no node has `cpus` CPUs.
        """
        largest_node = max((node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
        if 0 < largest_node < self._cpus:
            message = (
                f"an item takes {self._cpus} CPUs of a node, and the largest node of the cluster has {largest_node:g}"
            )
            raise refuse(
                "UNSUPPORTED",
                message,
                hint=f"Give fewer threads:  --jobs {int(largest_node)} (jobs={int(largest_node)}).",
            )

    @contextmanager
    def _connect(self) -> Iterator[Any]:
        """Yield the imported module `ray`, connected to a cluster.

        Raises:
            Refused: with code UNSUPPORTED, if Ray is not installed.
            StorageError: with code IO, if there is no cluster at the address.
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


def _task_result(ray: Any, reference: Any, item: WorkItem) -> bytes:
    """Return the result of the Ray task that does a work item.

    Raises:
        TransaxleError: the error with which the work item failed; with code IO, if Ray gave up the task.
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
