"""What verl's own checkpoint manager saves: its weights, optimizer and merged model, bit for bit.

verl is in a folder of its own (`make` installs it there, `VERL_PACKAGES` names another), because its wheel has a
package `tests`. Without it these tests skip; with `CI` or `NEEDS_VERL` set they fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import transaxle as tx
from tests.formats.ranks.verl_job import ACTOR, NEEDED, PACKAGES, TRUTH, Job, launch
from tests.formats.refusals import refuses

pytestmark = [
    pytest.mark.peers,
    pytest.mark.slow,
    pytest.mark.oracle,  # a job takes twenty seconds of processor time, the merger ten
    pytest.mark.skipif(not PACKAGES.is_dir() and not NEEDED, reason=f"verl is not in {PACKAGES}"),
]
JOBS = {
    "fsdp2": Job("fsdp2", 2),
    "fsdp2 two groups": Job("fsdp2", 4, "qwen3", tied=True, groups=2),
    "fsdp2 frozen": Job("fsdp2", 2, frozen=True, groups=2),
    "hsdp": Job("hsdp", 4),
    "fsdp1": Job("fsdp1", 2, "qwen3"),
}
ADAPTER = "lora_adapter/adapter_model.safetensors"
EXAMPLES = Path(__file__).parents[3] / "examples"
MERGERS = """
import os, sys
sys.path += os.environ["PACKAGES"], os.environ["EXAMPLES"]
from verl.model_merger.__main__ import main
import verl_merger
command = ["", "merge", "--backend", "fsdp", "--local_dir", sys.argv[1] + "/actor"]
sys.argv = [*command, "--target_dir", sys.argv[2]]; main()
sys.argv = [*command, "--target_dir", sys.argv[-1] + "-ours"]; verl_merger.main()
if not os.path.exists(sys.argv[-1] + "/lora_adapter"):
    sys.argv = ["", "test", *command[2:], "--test_hf_dir", sys.argv[-1]]; verl_merger.main()
"""
"""Runs verl's merger, and the example's into another folder, and compares the files with that folder."""


@pytest.fixture(scope="module", params=list(JOBS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Path]:
    """A folder that verl saved, with the truth beside it."""
    job, folder = JOBS[request.param], tmp_path_factory.mktemp("verl")
    launch(job, folder)
    return job, folder


def truth(folder: Path) -> dict[str, torch.Tensor]:
    """The whole tensors, gathered by torch."""
    tensors: dict[str, torch.Tensor] = torch.load(folder / TRUTH)
    return tensors


def assert_same(checkpoint: tx.Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    """Check that a checkpoint has the same tensors, with the same bits and dtypes."""
    assert set(checkpoint) == set(expected)
    for name, tensor in expected.items():
        own = checkpoint[name].torch()
        assert own.dtype == tensor.dtype, name
        assert torch.equal(own, tensor), name


def test_weights_and_optimizer(saved: tuple[Job, Path], tmp_path: Path) -> None:
    job, folder = saved
    whole = truth(folder)
    weights = {name: tensor for name, tensor in whole.items() if not name.startswith("optim/")}
    tx.convert(folder / ACTOR, tmp_path / "hub", to="hf", optimizer=False, sync=False)
    stored = {name for name in weights if not (job.tied and name == "lm_head.weight")}
    with tx.open(tmp_path / "hub") as hub:
        assert_same(hub, {name: weights[name] for name in hub if name in weights})
        assert stored <= set(hub)
    if job.kind == "fsdp1":
        with refuses("UNSUPPORTED", "FSDP1's optimizer numbers flat parameters"):
            tx.convert(folder / ACTOR, tmp_path / "dcp", to="dcp", optimizer=True)
        return
    tx.convert(folder / ACTOR, tmp_path / "dcp", to="dcp", optimizer=True, sync=False)
    with tx.open(tmp_path / "dcp", optimizer=True) as copied:
        assert_same(copied, whole)
        assert len(copied.metadata["param_groups"]) == job.groups


def test_verl_s_own_merger_writes_the_same(saved: tuple[Job, Path], tmp_path: Path) -> None:
    """The merger rounds to bfloat16, always; the example, by verl's interface, does so too."""
    job, folder = saved
    theirs = merge(folder, tmp_path / "merged")
    assert all(tensor.dtype == torch.bfloat16 for tensor in theirs.values())
    tx.convert(folder / ACTOR, tmp_path / "ours", to="hf", optimizer=False, dtype="bf16", sync=False)
    for path in (tmp_path / "ours", tmp_path / "merged-ours"):
        with tx.open(path) as ours:
            assert set(ours) - set(theirs) <= ({"lm_head.weight"} if job.tied else set())
            assert_same(ours, theirs | {name: ours[name].torch() for name in set(ours) - set(theirs)})


def merge(folder: Path, target: Path) -> dict[str, torch.Tensor]:
    """Run both mergers; return the tensors that verl's writes."""
    environment = {**os.environ, "PACKAGES": str(PACKAGES), "EXAMPLES": str(EXAMPLES)}
    command = [sys.executable, "-c", MERGERS, str(folder), str(target)]
    completed = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert completed.returncode == 0, completed.stderr.decode()
    with tx.open(target) as theirs:
        return {name: theirs[name].torch() for name in theirs}


def test_both_mergers_write_the_same_adapter_and_base(tmp_path: Path) -> None:
    launch(Job("fsdp2", 2, lora=True, based=True), tmp_path)
    theirs = merge(tmp_path, tmp_path / "merged")
    with tx.open(tmp_path / "merged-ours") as ours:
        assert_same(ours, theirs)
    own, other = (load_file(tmp_path / name / ADAPTER) for name in ("merged-ours", "merged"))
    assert own.keys() == other.keys()
    assert own
    assert all(torch.equal(own[name], other[name]) for name in own)


def test_a_live_model_loads_it(saved: tuple[Job, Path]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    job, folder = saved
    config = AutoConfig.from_pretrained(folder / ACTOR / "huggingface")
    model: Any = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    with_state = job.kind == "fsdp2" and not job.frozen and job.groups == 1
    tx.load(model, folder / ACTOR, optimizer=optimizer if with_state else None)
    whole = truth(folder)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, whole[name]), name
        if with_state:
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(optimizer.state[parameter][key], whole[f"optim/{name}/{key}"]), name


def test_a_lora_save_keeps_its_names(tmp_path: Path) -> None:
    launch(Job("fsdp2", 2, lora=True), tmp_path)
    actor = tmp_path / ACTOR
    with refuses("UNKNOWN_FAMILY", "lora_A"):
        tx.convert(actor, tmp_path / "hub", to="hf")
    assert not (tmp_path / "hub").exists()
    whole = truth(tmp_path)
    tx.convert(actor, tmp_path / "kept", to="safetensors:identity", optimizer=False, sync=False)
    with tx.open(tmp_path / "kept") as kept:
        assert_same(kept, {name: whole[name] for name in whole if "lora_" in name and not name.startswith("optim/")})
