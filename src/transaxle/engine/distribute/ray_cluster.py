"""Items of work on a Ray cluster: Ray places them, tries them again and moves them off a machine that is lost.

What is ours is only what a scheduler cannot know: that an item done twice does no harm. So when nothing is left to
begin and an item takes much longer than the others did, it is begun once more, and the first result counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from transaxle.engine.distribute.executor import Work
from transaxle.engine.distribute.work_items import WorkItem
from transaxle.errors import StorageError, TransaxleError, refuse
from transaxle.move.journal import result_of

_RETRIES = 10
"""How often Ray does an item again whose worker or machine is lost, or met an error of the machine."""
_SLOW = 3.0
"""An item is a straggler that takes so many times as long as half of the others did at most."""
_GRACE = 10.0
"""Seconds that no item needs to explain."""
_TICK = 1.0
_PATIENCE = 20.0
"""Seconds in which workers that are told to stop do so."""


def _do(work: Work, number: int) -> bytes:
    """Do an item in a worker of the cluster."""
    return work(number)


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
            hint = "Install it:  pip install 'transaxle[ray]'."
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
            num_cpus=cpus, max_retries=_RETRIES, retry_exceptions=[StorageError], scheduling_strategy="SPREAD"
        )(_do)
        self._cpus = cpus
        self._begun: dict[Any, tuple[WorkItem, float]] = {}
        """Reference of a task -> its item, and when it was handed to Ray."""
        self._seconds: list[float] = []
        """How long the items took that are done."""
        self._last_begun: float | None = None
        """Since when no item waits for a place."""

    def all(self, items: Sequence[WorkItem], take: Callable[[bytes], None]) -> None:
        """Let all items be done."""
        for item in items:
            self._begin(item)
        done: set[int] = set()
        while len(done) < len(items):
            finished, _ = self._ray.wait(list(self._begun), num_returns=1, timeout=_TICK)
            for each in finished:
                item, _ = self._begun.pop(each)
                if item.number in done:
                    continue  # the other one was faster
                text = self._result(each)
                done.add(item.number)
                result = result_of(text)
                self._seconds.append(0.0 if result is None else result.seconds)
                take(text)
            self._again(done)

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
        self._begun[task.remote(self._work, item.number)] = item, time.monotonic()

    def _result(self, reference: Any) -> bytes:
        """Return the result of a task.

        Raises:
            TransaxleError: what the item raised; IO where Ray gave up.
        """
        from ray.exceptions import RayError, RayTaskError

        try:
            result: bytes = self._ray.get(reference)
        except RayTaskError as error:
            if isinstance(error.cause, TransaxleError):
                raise error.cause from None
            raise refuse("IO", f"a worker of the Ray cluster failed: {error.cause!r}") from error
        except RayError as error:
            raise refuse("IO", f"a worker of the Ray cluster was lost: {error}") from error
        return result

    def _again(self, done: set[int]) -> None:
        """Begin stragglers once more, if all others have begun: only then is there room that nobody else needs."""
        waiting: dict[int, list[float]] = {}
        items: dict[int, WorkItem] = {}
        for item, begun in self._begun.values():
            if item.number not in done:
                items[item.number] = item
                waiting.setdefault(item.number, []).append(begun)
        if not self._seconds or len(waiting) >= self._places():
            return
        now = time.monotonic()
        self._last_begun = self._last_begun or now
        limit = max(_GRACE, _SLOW * median(self._seconds))
        for number, begun_at in waiting.items():
            if len(begun_at) == 1 and now - max(begun_at[0], self._last_begun) > limit:
                self._begin(items[number])

    def _places(self) -> int:
        """Return how many items the cluster does at once."""
        return int(self._ray.cluster_resources().get("CPU", 1)) // self._cpus
