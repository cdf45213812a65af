"""The memory that a session of these tests takes, and what it leaves on the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


LEAVING = """
import time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory


def test_that_removes_its_memory():
    held = SharedMemory(create=True, size=4096)
    time.sleep(5)
    held.close()
    held.unlink()


def test_that_leaves_its_memory():
    left = SharedMemory(create=True, size=4096, name={name!r})
    resource_tracker.unregister("/" + left.name, "shared_memory")
    time.sleep(5)
    left.close()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: that of a socket has a hundred characters."""
    with tempfile.TemporaryDirectory(prefix="s-") as name:
        yield Path(name)


def _session(folder: Path, cap: float, program: str) -> subprocess.CompletedProcess[str]:
    """Run these tests as `make test` runs its own, by two workers with the same conftest."""
    (folder / "test_program.py").write_text(program, "utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", "utf-8")
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--memory", str(cap)]
    command += ["--numprocesses", "2", "-p", "no:cacheprovider", "test_program.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_session_that_takes_too_much_or_leaves_shared_memory_fails(folder: Path) -> None:
    left = Path("/dev/shm", f"psm_{uuid.uuid4().hex}")
    try:
        done = _session(folder, 0.05, LEAVING.format(name=left.name))
        assert left.exists()
    finally:
        left.unlink(missing_ok=True)
    assert done.returncode == 1
    assert "2 passed" in done.stdout
    assert "FAILED: --memory allows 0.05 GB" in done.stdout
    assert f"FAILED: shared memory is left: {left}\n" in done.stdout


def test_make_test_has_a_cap() -> None:
    """At two workers."""
    told = subprocess.run(["make", "-n", "test", "JOBS=2"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--memory 10 --numprocesses 2 " in told
