"""A training script without `if __name__ == "__main__"` is not run again by our processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import transaxle as tx

SCRIPT = """
import sys
import torch
import transaxle as tx

print("the script runs", __file__ == sys.argv[0], flush=True)
tx.async_save(torch.nn.Linear(3, 2), sys.argv[1], to="safetensors").result()
print("still the script", __file__ == sys.argv[0], flush=True)
"""


def test_a_script_without_a_guard_saves_in_the_background(tmp_path: Path) -> None:
    script, target = tmp_path / "train.py", tmp_path / "out"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the script runs True", "still the script True"]
    assert tx.verify(target).ok
