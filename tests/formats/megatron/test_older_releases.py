"""Older releases of megatron-core: what they save is read, the optimizer in every form, and they load what we write.

`make megatron` installs them, each into a folder of its own. All jobs of a release are one process, which forks ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import transaxle as tx
from tests.formats.megatron.conftest import Hubs
from tests.formats.megatron.older_job import FAILED, LOAD, SAVE
from tests.formats.megatron.test_torch_dist import MODELS
from tests.formats.megatron.trained_job import Job, after_a_step
from tests.oracles import hub

_ROOT = Path(__file__).parents[3]
_FOLDER = Path(_ROOT, os.environ.get("MEGATRON_RELEASES", ".venv-megatron/releases"))

_OLD = ("fully_sharded_model_space", "dp_zero_gather_scatter", None)
RELEASES: dict[str, tuple[str | None, ...]] = {
    "0.12.3": _OLD,
    "0.14.0": _OLD,
    "0.15.3": (*_OLD, "dp_reshardable", "fully_reshardable"),
}
"""Release -> the forms of the distributed optimizer that it writes; None: every rank has an optimizer of its own."""
SHAPES = {
    "all degrees": Job("llama", tp=2, pp=2, dp=2),
    "a tied embedding on two stages": Job("tied", pp=2, dp=2),
    "experts shared out": Job("qwen3_moe", ep=2, dp=4),
    "experts not cut": Job("qwen3_moe", tp=2, ep=2, etp=1, dp=2),
    "experts on some layers": Job("mixed", ep=2, dp=2),
    "biases": Job("qwen2", tp=2),
}
SAVED = [(release, form, shape) for release, forms in RELEASES.items() for form in forms for shape in SHAPES]
LOADED = [
    Job("llama"),
    Job("llama", tp=2, pp=2),
    Job("tied", pp=2),
    Job("qwen2", tp=2),
    Job("qwen3_moe", ep=2, dp=2),
    Job("mixed", pp=2),
]

pytestmark = pytest.mark.megatron
Release = Callable[[str], tuple[Path, dict[str, str]]]
"""Runs all jobs of a release, once; returns the folder of what it saved, and what went wrong with each job."""


def _saved(form: str | None, shape: str) -> str:
    return f"{form} {shape}".replace(" ", "-")


@pytest.fixture(scope="module")
def release(hubs: Hubs, tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Run the jobs of a release."""
    done: dict[str, tuple[Path, dict[str, str]]] = {}
    written = tmp_path_factory.mktemp("written")

    def run(version: str) -> tuple[Path, dict[str, str]]:
        if not (_FOLDER / version).exists():
            pytest.skip(f"megatron-core {version} is not in {_FOLDER}: make megatron")
        if version not in done:
            done[version] = _run(version, hubs, written, tmp_path_factory.mktemp(version))
        return done[version]

    return run


def _run(version: str, hubs: Hubs, written: Path, folder: Path) -> tuple[Path, dict[str, str]]:
    def told(do: str, job: Job, at: Path) -> dict[str, Any]:
        source = str(hubs[job.model])
        return {"do": do, "job": job, "config": MODELS[job.model], "source": source, "folder": str(at)}

    jobs: dict[str, dict[str, Any]] = {}
    for form in RELEASES[version]:
        for shape, job in SHAPES.items():
            name = _saved(form, shape)
            jobs[name] = told(SAVE, job._replace(form=form), folder / name / "iter_0000007")
    for job in LOADED:
        there = written / job.model
        if not there.exists():
            tx.convert(hubs[job.model], there, to="torch_dist", dtype="fp32", sync=False)
        jobs[str(job)] = told(LOAD, job, there / "release")
    listed = folder / "jobs.json"
    listed.write_text(json.dumps(list(jobs.values())))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_FOLDER / version), str(_ROOT)])}
    command = [sys.executable, "-W", "ignore", "-m", "tests.formats.megatron.older_job", str(listed)]
    done = subprocess.run(command, env=environment, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    imported, failed = json.loads(listed.with_suffix(FAILED).read_text())
    assert imported == version
    return folder, dict(zip(jobs, failed, strict=True))


@pytest.mark.oracle
@pytest.mark.parametrize(("version", "form", "shape"), SAVED, ids=str)
def test_moments_and_copies_are_those_of_the_step(
    version: str, form: str | None, shape: str, hubs: Hubs, release: Release, tmp_path: Path
) -> None:
    folder, failed = release(version)
    name, source = _saved(form, shape), hubs[SHAPES[shape].model]
    assert failed[name] == ""
    tx.convert(folder / name / "iter_0000007", tmp_path / "out", to="hf", config=source / "config.json", optimizer=True)
    weights = load_file(tmp_path / "out" / hub.WEIGHTS)
    state: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out" / "optimizer").glob("*.safetensors"):
        state |= load_file(file)
    expected = after_a_step(load_file(source / hub.WEIGHTS))
    assert {name for name in state if not name.endswith("/step")} == expected.keys()
    for key, value in expected.items():
        assert torch.equal(state[key], value), key
        if key.endswith("/fp32"):
            weight = key.removeprefix("optim/").removesuffix("/fp32")
            assert torch.equal(weights[weight], state[key].bfloat16())
            assert state[f"optim/{weight}/step"] == 1


@pytest.mark.oracle
@pytest.mark.parametrize("job", LOADED, ids=lambda job: f"{job.model} tp{job.tp} pp{job.pp} ep{job.ep}")
@pytest.mark.parametrize("version", RELEASES)
def test_what_we_write_is_loaded(version: str, job: Job, release: Release) -> None:
    assert release(version)[1][str(job)] == ""
