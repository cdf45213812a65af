"""The examples run, and a run that is resumed goes on as if nothing had happened."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import transaxle as tx

ROOT = Path(__file__).parent.parent
TRAIN = ROOT / "examples" / "train.py"


def _train(ranks: int, out: Path) -> dict[int, float]:
    """Run the training loop to step 4; return the losses of the steps that it made."""
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
    command = [*launcher, str(TRAIN), "--out", str(out), "--steps", "4", "--every", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (.*)$", done.stdout, re.MULTILINE)}


@pytest.mark.slow
def test_training_resumes_on_the_same_and_on_other_ranks(tmp_path: Path) -> None:
    losses = _train(2, tmp_path / "run")
    assert sorted(losses) == [1, 2, 3, 4]
    for ranks in (2, 1):
        again = tmp_path / f"on-{ranks}"
        again.mkdir()
        shutil.copytree(tmp_path / "run" / "step-2", again / "step-2")
        found = _train(ranks, again)
        assert sorted(found) == [3, 4]
        exact = ranks == 2
        assert found == {step: losses[step] if exact else pytest.approx(losses[step], rel=1e-5) for step in (3, 4)}
        if exact:
            assert tx.verify(tmp_path / "run" / "step-4", again / "step-4").equal
