"""What torch saved at each world size: made once a session, by processes of their own."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.formats.dcp.peers.processes import start
from tests.formats.dcp.peers.world import run

Saved = Callable[[int], Path]
"""World size -> folder with what was saved at it."""
_DONE = "done"


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # the workers share what one of them makes

    def make(world: int) -> Path:
        folder = base / f"dcp-world-{world}"
        with (base / f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / _DONE).exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                start(run, world, folder)
                (folder / _DONE).touch()
        return folder

    return make
