"""Ranks of plain torch, in processes that have imported it before."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from torch.multiprocessing.spawn import start_processes

from tests.forks import context

_SECONDS = 300.0


def start(run: Callable[[int, int, str], None], world: int, folder: Path) -> None:
    """Run a function on so many ranks, which it is told with the folder; the error of one that fails is raised.

    Raises:
        AssertionError: they have not ended within five minutes.
    """
    method = context().get_start_method()
    ranks = start_processes(run, (world, str(folder)), world, join=False, start_method=method)
    assert ranks is not None
    end = time.monotonic() + _SECONDS
    while not ranks.join(end - time.monotonic()):
        if time.monotonic() >= end:
            for process in ranks.processes:
                process.kill()
            raise AssertionError(f"{world} ranks hang")
