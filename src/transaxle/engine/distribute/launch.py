"""Starting a conversion by several workers: cleared, divided, and given to whoever hands items out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from transaxle.arguments import Overwrite, read_number_of_job, wrong_type
from transaxle.engine.distribute.conversion_order import ConversionOrder
from transaxle.engine.distribute.driver import carry_out
from transaxle.engine.distribute.executors.executor import Executor, Pool, Submitting
from transaxle.engine.distribute.watching import Watch, unseen
from transaxle.engine.distribute.work_plan import WorkPlan, work_plan
from transaxle.engine.execute.execute import Report, execute
from transaxle.engine.execute.preflight import Cleared, preflight
from transaxle.engine.plan.conversion import Prepared, ready
from transaxle.errors import refuse
from transaxle.move.workers import Limits, Progress, limits, unwatched

RAY, TORCHRUN = "ray", "torchrun"
On: TypeAlias = str | Executor | Submitting
"""Who carries a conversion out: `ray`, `ray://HOST:PORT` or `torchrun`; an executor; or a pool of workers with `submit`
(`concurrent.futures`, Dask, MPI).
"""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a conversion is carried out by several workers."""

    on: On
    """Who hands the items out."""
    items: int | None = None
    """How many there are; None: one for each GiB."""
    overwrite: Overwrite = False
    """Replace a checkpoint."""
    resume: bool = False
    """Continue an interrupted run."""
    sync: bool = True
    """Make everything durable before the target appears."""
    jobs: int | None = None
    """Threads of each worker."""
    memory: int | None = None
    """Bytes of the buffers of each worker."""
    progress: Progress = field(default=unwatched)
    """Told the bytes of each item that is done."""
    watch: Watch = field(default=unseen)
    """Told who has done it, and how much is left."""

    @property
    def limit(self) -> Limits:
        """Workers and memory of this process."""
        return limits(self.jobs, self.memory)

    def cleared(self, order: ConversionOrder, prepared: Prepared) -> Cleared:
        """Return a plan that can be carried out; raises every refusal, as `execute` does."""
        if isinstance(prepared, Cleared):
            ready(prepared)
            return prepared
        how = {
            "overwrite": self.overwrite,
            "resume": self.resume,
            "running": True,
            "several": True,
            "limit": self.limit,
        }
        found = preflight(prepared, order.target, **how)  # type: ignore[arg-type]  # each is of its own type
        ready(found)
        return found

    def finished(self, cleared: Cleared) -> Report:
        """Return the report of a target that an earlier run has finished."""
        target, overwrite, resume = cleared.asked
        return execute(cleared, target, overwrite=overwrite, resume=resume, sync=self.sync, limit=self.limit)

    def divided(self, order: ConversionOrder, cleared: Cleared, jobs: int | None = None) -> WorkPlan:
        """Return the items of a plan.

        Args:
            order: what it was made of.
            cleared: the plan.
            jobs: threads of each worker where nobody says so; None: each chooses for itself.
        """
        how = {"overwrite": self.overwrite, "sync": self.sync, "memory": self.memory}
        return work_plan(order, cleared, self.items, jobs=self.jobs or jobs, **how)


def convert_on(order: ConversionOrder, prepared: Prepared, launch: Launch) -> Report:
    """Carry a conversion out by the workers of an executor.

    Args:
        order: what is converted.
        prepared: the plan that was made of it.
        launch: by whom, and how.

    Raises:
        TypeError: nobody knows how to hand items to what it names.
        TransaxleError: as `execute`; UNSUPPORTED where what it needs is not installed.
    """
    executor, jobs = _executor(launch.on, launch.jobs)
    cleared = launch.cleared(order, prepared)
    if cleared.finished:
        return launch.finished(cleared)
    work = launch.divided(order, cleared, jobs)
    return carry_out(work, cleared, executor, resume=launch.resume, progress=launch.progress, watch=launch.watch)


def _executor(on: On, jobs: int | None) -> tuple[Executor, int | None]:
    """Return what hands items out, and the threads of each of its workers where nobody says so."""
    if isinstance(on, str):
        if on == RAY or on.startswith(f"{RAY}://"):
            from transaxle.engine.distribute.executors.ray_cluster import RayCluster

            return RayCluster(None if on == RAY else on, cpus=jobs or 1), 1
        hint = "Name one of: ray, ray://HOST:PORT, torchrun."
        raise refuse("AMBIGUOUS", f"cannot convert on {on!r}", hint=hint)
    if isinstance(on, Executor):
        return on, None
    if isinstance(on, Submitting):
        return Pool(on), 1
    raise wrong_type("on", '"ray", "torchrun", an executor or a pool with submit()', on)


def is_torchrun(on: object) -> bool:
    """Tell whether all ranks of a job carry a conversion out together."""
    return isinstance(on, str) and on == TORCHRUN


def is_lead() -> bool:
    """Tell whether this process is the rank of a job that speaks for all, or in no job."""
    return read_number_of_job("RANK", 0) == 0
