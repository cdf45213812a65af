"""Real checkpoints for the tests of this folder, made once a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.oracles.deepspeed_peer.farm import Farm


@pytest.fixture(scope="session")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Farm:
    """One farm for all processes of a run: under xdist, their folders have a common parent."""
    pytest.importorskip("deepspeed")
    base: Path = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    folder = shared / "deepspeed-farm"
    folder.mkdir(exist_ok=True)
    return Farm(folder)
