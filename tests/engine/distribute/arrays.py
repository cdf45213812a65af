"""Conversions in parts, by plain processes: what a Slurm array does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from transaxle.arguments import read_degrees
from transaxle.engine.carry import Report
from transaxle.engine.distribute.driver import begin_work, commit_work
from transaxle.engine.distribute.item_work import close_plan, do_item
from transaxle.engine.distribute.work_plan import WorkPlan, order, work_plan
from transaxle.engine.execute import preflight
from transaxle.engine.plan.conversion import require_ready
from transaxle.options import SHAPING


def planned(
    source: Path, target: Path | str, to: str, items: int, reading: dict[str, Any] | None = None, **shaping: Any
) -> WorkPlan:
    """Plan a conversion in so many items."""
    shaped = {"shard_size": 8000, **{name: value for name, value in shaping.items() if name in SHAPING}}
    how: dict[str, Any] = {"encode": shaping.get("encode"), "degrees": read_degrees(shaping)}
    asked = order(str(source), str(target), to, reading or {}, shaped, **how)
    with asked.prepare() as prepared:
        cleared = preflight(prepared, str(target), resume=True, several=True)
        require_ready(cleared)
        return work_plan(asked, cleared, items, jobs=1)


def in_child(work: Callable[[], None]) -> int:
    """Do something in a forked process; return the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return ended(child)


def ended(child: int) -> int:
    """Wait for a forked process; return the signal that ended it, or 0."""
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return signal.SIGKILL
    assert os.WEXITSTATUS(status) == 0
    return 0


def do(plan: WorkPlan, numbers: Iterable[int] | None = None) -> None:
    """Do items in this process, all of them or some, and close what was opened for it."""
    try:
        for number in range(len(plan.items)) if numbers is None else numbers:
            do_item(plan.text, number)
    finally:
        close_plan()


def all_of(plan: WorkPlan) -> Report:
    """Do a plan from its beginning to its commit."""
    begin_work(plan)
    do(plan)
    return commit_work(plan)
