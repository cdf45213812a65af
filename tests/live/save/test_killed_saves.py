"""Saves that are killed at any point: what is there is what was or complete, and so is what a file names as newest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live.save.killed_saves import ROTATION

ROOT = Path(__file__).parents[3]
EVERY = {ROTATION: 11, "torch_dist": 97, "megatron_torch": 83, "deepspeed-universal": 199}
"""What is saved -> of how many points one is tried; of hundreds, there."""


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("what", "every"),
    [*EVERY.items(), *((what, every) for what, every in ((ROTATION, 1), ("safetensors:hf", 5), ("dcp", 5)))],
)
def test_a_save_killed_at_any_point_leaves_a_complete_checkpoint(tmp_path: Path, what: str, every: int) -> None:
    command = [sys.executable, "-m", "tests.live.save.killed_saves", str(tmp_path), what, str(every)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=6000, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= (3 if every > 5 else 10), "points where a child died"
