"""verl's own classes send weights through Transaxle: its FSDP engine, its checkpoint engine manager, its workers, Ray.

One job runs for all tests here, see `verl_update`. Without verl's folder they skip; with `CI` or `NEEDS_VERL` set they
fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.formats.ranks.verl_job import NEEDED, PACKAGES
from tests.live.topologies import MOE, source

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("verl_update.py")
REPLICAS = (0, 1)
SECONDS = 600
Tensors = dict[str, torch.Tensor]

pytestmark = [
    pytest.mark.peers,
    pytest.mark.slow,
    pytest.mark.skipif(not PACKAGES.is_dir() and not NEEDED, reason=f"verl is not in {PACKAGES}"),
]


@dataclass
class Update:
    """What one update of the job has left."""

    truth: Tensors
    """The tensors that verl's own engine gathers from the trainer's ranks."""
    received: list[Tensors]
    """The tensors that the server of each replica has after the update."""
    error: str
    """The error that verl's manager raised; "" if there was none."""
    joined: list[str]
    """Name of the process group of each rank of the trainer."""


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> list[Update]:
    folder = tmp_path_factory.mktemp("verl")
    model = source(folder / "model", MOE | {"vocab_size": 9000, "tie_word_embeddings": False})
    path = f"{ROOT / 'src'}:{SCRIPT.parent}:{PACKAGES}"
    environment = {**os.environ, "PYTHONPATH": path, "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu"}
    completed = subprocess.run(
        [sys.executable, str(SCRIPT), model, str(folder)],
        env=environment, capture_output=True, timeout=SECONDS, check=False, cwd=folder,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr.decode(errors="replace")[-4000:]
    return [_read(folder / str(step)) for step in range(4)]


def _read(folder: Path) -> Update:
    report = json.loads((folder / "report.json").read_text("utf-8"))
    received = [load_file(folder / f"{replica}.safetensors") for replica in REPLICAS]
    return Update(load_file(folder / "truth.safetensors"), received, report["error"], report["joined"])


def _same(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(
        tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


def test_every_rollout_has_what_verl_s_engine_gathers(updates: list[Update]) -> None:
    """The shards of two ranks, and experts that transformers stacks, as the tensors of a hub."""
    for update in updates[:2]:
        assert not update.error
        assert all(_same(received, update.truth) for received in update.received)
    assert not _same(updates[0].truth, updates[1].truth)


def test_the_process_group_remains(updates: list[Update]) -> None:
    assert set(updates[0].joined) == set(updates[1].joined) != {""}


def test_a_refused_update_changes_no_rollout(updates: list[Update]) -> None:
    assert "model.layers.1.mlp.adaptor" in updates[2].error
    assert "UNEXPECTED_TENSOR" in updates[2].error
    assert set(updates[2].joined) == {""}
    assert all(
        _same(received, before) for received, before in zip(updates[2].received, updates[1].received, strict=True)
    )


def test_the_next_update_has_other_workers_and_gathered_weights(updates: list[Update]) -> None:
    """The second replica has left, and verl's own engine gathers the weights."""
    last = updates[3]
    assert not last.error
    assert _same(last.received[0], last.truth)
    assert _same(last.received[1], updates[1].truth)
    assert "" not in last.joined
    assert set(last.joined) != set(updates[1].joined)
