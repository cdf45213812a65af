"""NeMo-RL's own classes send weights through Transaxle: its synchronizer, and the methods of its policy workers and its
vLLM workers, over Ray.

NeMo-RL has no package, so these tests skip unless NEMO_RL is the path of a checkout; `test_nemo_rl` makes its calls
without it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("nemo_rl_update.py")
CHECKOUT = os.environ.get("NEMO_RL", "")
WORKERS = (0, 1)
SECONDS = 600
Tensors = dict[str, torch.Tensor]

pytestmark = [
    pytest.mark.peers,
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="NEMO_RL is not the path of a checkout of NeMo-RL"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nemo_rl")
    completed = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{SCRIPT.parent}:{CHECKOUT}"},
        capture_output=True, timeout=SECONDS, check=False, cwd=folder,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr.decode(errors="replace")[-4000:]
    return folder


def _same(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(
        tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


@pytest.mark.parametrize("step", [0, 1, 3])
def test_every_rollout_has_the_policy_s_tensors(folder: Path, step: int) -> None:
    """In the first two updates, and in the one after a failure."""
    assert not (folder / str(step) / "error").read_text("utf-8")
    truth = load_file(folder / str(step) / "truth.safetensors")
    assert all(_same(load_file(folder / str(step) / f"{worker}.safetensors"), truth) for worker in WORKERS)


def test_a_failed_update_changes_no_rollout(folder: Path) -> None:
    assert "the policy's second rank has failed" in (folder / "2" / "error").read_text("utf-8")
    before = load_file(folder / "1" / "truth.safetensors")
    assert not _same(load_file(folder / "2" / "truth.safetensors"), before)
    assert all(_same(load_file(folder / "2" / f"{worker}.safetensors"), before) for worker in WORKERS)
