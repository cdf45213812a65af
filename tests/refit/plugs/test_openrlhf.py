"""OpenRLHF's own actors send weights with the trainer of the example: its policy under ZeRO-3 on two ranks, and the
methods of its vLLM workers, over Ray.

One job runs for all tests here, see `openrlhf_update`. Without OpenRLHF's folder they skip; with `CI` or
`NEEDS_OPENRLHF` set they fail.
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

from tests.live.topologies import MOE, source
from tests.oracles import hub

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("openrlhf_update.py")
PACKAGES = Path(os.environ.get("OPENRLHF_PACKAGES", f"{sys.prefix}/openrlhf"))
"""The folder into which `make` installs OpenRLHF without its dependencies."""
NEEDED = "CI" in os.environ or "NEEDS_OPENRLHF" in os.environ
ENGINES = (0, 1)
SECONDS = 600
Tensors = dict[str, torch.Tensor]

pytestmark = [
    pytest.mark.peers,
    pytest.mark.slow,
    pytest.mark.skipif(not PACKAGES.is_dir() and not NEEDED, reason=f"OpenRLHF is not in {PACKAGES}"),
]


@dataclass
class Update:
    """What one update of the job has left."""

    truth: Tensors
    """The policy's parameters, as DeepSpeed gathers them and transformers saves them."""
    loaded: list[Tensors]
    """The tensors that each engine has loaded, in this update or before."""
    errors: list[str]
    """The errors of the policy's ranks."""
    resets: list[int]
    """How often each engine has emptied its prefix cache."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the job has written."""
    folder = tmp_path_factory.mktemp("openrlhf")
    model = source(folder / "model", MOE)
    completed = subprocess.run(
        [sys.executable, str(SCRIPT), model, str(folder)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{SCRIPT.parent}:{ROOT / 'examples'}:{PACKAGES}"},
        capture_output=True, timeout=SECONDS, check=False, cwd=folder,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr.decode(errors="replace")[-4000:]
    return folder


@pytest.fixture(scope="module")
def updates(job: Path) -> list[Update]:
    return [_read(job / str(step)) for step in range(4)]


def _read(folder: Path) -> Update:
    report = json.loads((folder / "report.json").read_text("utf-8"))
    truth = hub.to_hf(MOE, load_file(folder / "truth.safetensors"))
    loaded = [load_file(folder / f"{engine}.safetensors") for engine in ENGINES]
    return Update(truth, loaded, report["errors"], report["resets"])


def _same(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(
        tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


def test_every_engine_loads_the_tensors_of_a_hub(updates: list[Update]) -> None:
    """The shards of two ranks, and experts that transformers stacks; also in the update after a failed one."""
    for number in (0, 1, 3):
        update = updates[number]
        assert not update.errors
        assert all(_same(loaded, update.truth) for loaded in update.loaded)
    assert not _same(updates[0].truth, updates[1].truth)
    assert updates[3].resets == [3, 3]


def test_the_error_of_an_engine_reaches_every_rank(updates: list[Update]) -> None:
    assert len(updates[2].errors) == 2
    for error in updates[2].errors:
        assert "vLLM did not get the weights" in error
        assert "layers.1" in error


def test_what_named_tensors_cannot_send_is_refused(job: Path) -> None:
    refusals = json.loads((job / "refusals.json").read_text("utf-8"))
    assert refusals == ["use OpenRLHF's own trainer for ds.tensor_parallel_size above 1, adapters (ds.lora.rank)"] * 2
