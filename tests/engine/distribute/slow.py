"""A Ray cluster whose workers take their time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transaxle.engine.distribute.executors import RayCluster, Work
from transaxle.engine.distribute.work_plan import WorkItem


class Slow(RayCluster):
    """A cluster whose workers take their time; some never end the first time.

    Args:
        seconds: that each item takes.
        stuck: a folder: the worker that first begins item 0 leaves a file there, and sleeps.
    """

    def __init__(self, seconds: float, stuck: Path | None = None) -> None:
        super().__init__()
        self.seconds = seconds
        self.stuck = stuck

    def run(self, work: Any, items: Sequence[WorkItem], take: Any) -> None:
        super().run(Waiting(work, self.seconds, self.stuck), items, take)


class Waiting:
    """What such a worker does; its items are written in pieces, with pauses between them."""

    def __init__(self, work: Any, seconds: float, stuck: Path | None) -> None:
        self.work = work
        self.seconds = seconds
        self.stuck = stuck

    def __call__(self, number: int) -> bytes:
        time.sleep(self.seconds)
        if self.stuck is not None and number == 0:
            try:
                (self.stuck / "began").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                time.sleep(600)
        result: bytes = self.work(number)
        return result


def _there(environment: dict[str, str], work: Work, number: int) -> bytes:
    os.environ.update(environment)
    return work(number)


class There(RayCluster):
    """A cluster whose nodes have the credentials of this process."""

    def run(self, work: Work, items: Sequence[WorkItem], take: Callable[[bytes], None]) -> None:
        found = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        super().run(partial(_there, found, work), items, take)
