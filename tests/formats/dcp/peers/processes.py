"""Running a module of these tests as several processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
_SECONDS = 300


def start(module: str, world: int, folder: Path) -> None:
    """Run a module that starts its own ranks; what they print is shown if one of them fails."""
    command = [sys.executable, "-m", module, str(world), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
