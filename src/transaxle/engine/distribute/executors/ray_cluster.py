"""Items of work on a Ray cluster: Ray places them, tries them again and moves them off a machine that is lost.

What is ours is only what a scheduler cannot know: that an item done twice does no harm. So when nothing is left to
begin and an item takes much longer than the others did, it is begun once more, and the first result counts.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transaxle.engine.distribute.executors.executor import RETRIES, TICK, Stragglers, Work
from transaxle.engine.distribute.work_items import WorkItem
from transaxle.errors import StorageError, TransaxleError, refuse
from transaxle.extras import install
from transaxle.move.journal import result_of

_PATIENCE = 20.0
"""Seconds in which workers that are told to stop do so."""


def _do(work: Work, number: int) -> bytes:
    """Do an item in a worker of the cluster; what is written goes to its log, which Ray keeps."""
    sys.stderr.write(f"transaxle item {number}: begun\n")
    try:
        text = work(number)
    except BaseException as error:
        sys.stderr.write(f"transaxle item {number}: {error}\n")
        raise
    result = result_of(text)
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
            running = _Running(ray, work, self._cpus)
            try:
                running.all(items, take)
            finally:
                running.stop()

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


class _Running:
    """Items on their way.

    Args:
        ray: the module, connected.
        work: see `Executor`.
        cpus: how many an item needs.
    """

    def __init__(self, ray: Any, work: Work, cpus: int) -> None:
        self._ray = ray
        self._work = ray.put(work)
        self._task = ray.remote(
            num_cpus=cpus, max_retries=RETRIES, retry_exceptions=[StorageError], scheduling_strategy="SPREAD"
        )(_do)
        self._cpus = cpus
        self._begun: dict[Any, WorkItem] = {}
        """Reference of a task -> its item."""
        self._stragglers = Stragglers(())

    def all(self, items: Sequence[WorkItem], take: Callable[[bytes], None]) -> None:
        """Let all items be done."""
        known = {item.number: item for item in items}
        self._stragglers = Stragglers(items)
        for item in items:
            self._begin(item)
        while self._stragglers.done < len(items):
            finished, _ = self._ray.wait(list(self._begun), num_returns=1, timeout=TICK)
            for each in finished:
                item = self._begun.pop(each)
                if self._stragglers.has(item.number):
                    continue  # the other one was faster
                text = self._result(each, item)
                result = result_of(text)
                self._stragglers.finished(item.number, 0.0 if result is None else result.seconds)
                take(text)
            for number in self._stragglers.again(time.monotonic(), self._places()):
                self._begin(known[number])

    def stop(self) -> None:
        """End the tasks that nobody needs any more; those that do not end are heard of when the claim is taken back."""
        left = list(self._begun)
        for each in left:
            self._ray.cancel(each, force=True)
        if left:
            self._ray.wait(left, num_returns=len(left), timeout=_PATIENCE)
        self._begun.clear()

    def _begin(self, item: WorkItem) -> None:
        task = self._task.options(name=f"transaxle item {item.number}")
        self._begun[task.remote(self._work, item.number)] = item
        self._stragglers.begun(item.number, time.monotonic())

    def _result(self, reference: Any, item: WorkItem) -> bytes:
        """Return the result of the task of an item.

        Raises:
            TransaxleError: what the item raised; IO where Ray gave up.
        """
        from ray.exceptions import RayError, RayTaskError

        try:
            result: bytes = self._ray.get(reference)
        except RayTaskError as error:
            if isinstance(error.cause, TransaxleError):
                raise error.cause from None
            raise refuse("IO", f"item {item.number} failed in a worker of the Ray cluster: {error.cause!r}") from error
        except RayError as error:
            raise refuse("IO", f"the worker of item {item.number} in the Ray cluster was lost: {error}") from error
        return result

    def _places(self) -> int:
        """Return how many items the cluster does at once."""
        return int(self._ray.cluster_resources().get("CPU", 1)) // self._cpus
