"""The dialect `vllm` and its cuts against vLLM 0.32.0: what its models hold after `load_weights`, rank by rank.

It runs in an environment of its own, once for all models (`make vllm`; see `tests/oracles/vllm_peer`).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import transaxle as tx
from tests.oracles.peer_bytes import Tensors, differing, loaded
from tests.oracles.vllm_peer.models import MODELS
from transaxle.engine.plan.rank_parts import config_for_ranks, engine_parts, state_table
from transaxle.families import builtin

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
SECONDS = 1200
MOST_JOBS = 4
VLLM, HF, SHARDED = "vllm", "hf", "vllm_sharded"
BUFFER = "buffer "
"""Stands before the names of stored buffers, of which the dialect has those that the hub has."""

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"vLLM has no environment at {PYTHON}: make vllm"),
]

COMPUTED = ".A"
"""Ends the names of what vLLM computes, in float32: ours is rounded once, so that they may differ by two roundings."""
DEGREES = [(name, tp, ep) for name, model in MODELS.items() for tp, ep in model.degrees]


@pytest.fixture(scope="session")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What vLLM made of the models of the tests that were chosen, in as many processes as there are cores here."""
    folder = tmp_path_factory.mktemp("vllm")
    cleared = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM"))}
    command = [str(PYTHON), "-m", "tests.oracles.vllm_peer.run", str(folder)]
    tests = [item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    names = [name for name in MODELS if any(item.callspec.params["name"] == name for item in tests)]
    jobs = min(len(os.sched_getaffinity(0)), MOST_JOBS, len(names))
    running = [
        subprocess.Popen([*command, *names[job::jobs]], cwd=ROOT, env=cleared, stdout=DEVNULL, stderr=PIPE, text=True)
        for job in range(jobs)
    ]
    for process in running:
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors[-4000:]
    return folder


def _whole(name: str, hub: Path, target: Path, tp: int) -> tuple[str, dict[str, object], Tensors]:
    """The family, the config, and the tensors of a hub folder in the dialect, for so many ranks.

    What vLLM has nothing for keeps its name in the folder, and is left out here.
    """
    config = config_for_ranks(json.loads((hub / "config.json").read_text("utf-8")), tp)
    path = target.with_suffix(".json")
    path.write_text(json.dumps(config), "utf-8")
    report = tx.convert(hub, target, to=f"safetensors:{VLLM}", config=path, sync=False, allow_lossy=True)
    unread = (*MODELS[name].unread, *MODELS[name].spared)
    assert sorted(report.kept) == sorted(key for key in loaded(hub) if any(part in key for part in unread))
    family = tx.open(target).family
    assert family is not None
    return family, config, {key: value for key, value in loaded(target).items() if key not in report.kept}


def _equal(ours: torch.Tensor, theirs: torch.Tensor, name: str) -> bool:
    """vLLM holds some parameters in a type of its own, whatever it is asked for."""
    if name.endswith(COMPUTED):
        return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=2**-22, atol=0)
    return ours.shape == theirs.shape and torch.equal(ours.to(theirs.dtype), theirs)


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "tp", "ep"), DEGREES)
def test_every_rank_holds_what_the_cuts_say(name: str, tp: int, ep: int, made: Path, tmp_path: Path) -> None:
    assert json.loads((made / name / "said.json").read_text("utf-8")) == {}
    label, config, whole = _whole(name, made / name / "hub", tmp_path / VLLM, 1 if ep > 1 else tp)
    parts = engine_parts(builtin()[label], VLLM, config, whole, tp=tp, ep=ep)
    assert parts.keys() == whole.keys()
    left = MODELS[name].left
    for rank in range(tp):
        held = load_file(made / name / f"{tp}-{ep}-{rank}.safetensors")
        theirs = {key.removeprefix(BUFFER): value for key, value in held.items() if key.removeprefix(BUFFER) in whole}
        theirs |= {key: value for key, value in held.items() if not key.startswith(BUFFER)}
        ours = {key: _part(value, parts[key], rank) for key, value in whole.items()}
        assert ours.keys() == theirs.keys()
        wrong = [key for key, value in theirs.items() if not _equal(ours[key], value, key)]
        assert wrong == [key for key in theirs if left and left in key], f"rank {rank}"


def _part(
    value: torch.Tensor, part: tuple[int, tuple[tuple[tuple[int, int], ...], ...]] | None, rank: int
) -> torch.Tensor:
    if part is None:
        return value
    dim, positions = part
    pieces = [value.narrow(dim, start, stop - start) for start, stop in positions[rank]]
    return torch.cat(pieces, dim) if pieces else value.narrow(dim, 0, 0)


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "tp", "ep"), DEGREES)
def test_our_files_have_what_vllm_saves_for_each_rank(name: str, tp: int, ep: int, made: Path, tmp_path: Path) -> None:
    hub, target = made / name / "hub", tmp_path / SHARDED
    options: dict[str, Any] = {"to": SHARDED, "tp": tp, "ep": ep, "sync": False, "allow_lossy": True}
    family = tx.open(hub).family
    if family in state_table().refused:
        with pytest.raises(tx.TransaxleError, match=f"names of family {family} in vLLM's files are not known"):
            tx.convert(hub, target, **options)
        return
    tx.convert(hub, target, **options)
    for rank in range(tp):
        theirs = load_file(made / name / f"{tp}-{ep}-state-{rank}.safetensors")
        ours = load_file(target / f"model-rank-{rank}-part-0.safetensors")
        assert ours.keys() == theirs.keys()
        assert [key for key, value in theirs.items() if not _equal(ours[key], value, key)] == [], f"rank {rank}"


@pytest.mark.oracle
@pytest.mark.parametrize("name", MODELS)
def test_the_hub_comes_back(name: str, made: Path, tmp_path: Path) -> None:
    hub = made / name / "hub"
    _, _, whole = _whole(name, hub, tmp_path / VLLM, 1)
    tx.convert(tmp_path / VLLM, tmp_path / "back", to=HF, sync=False, allow_lossy=True)
    wanted = loaded(hub)
    computed = {key for key in wanted if key.endswith("A_log")}
    assert set(differing(loaded(tmp_path / "back"), wanted)) <= computed
    assert bool(computed) >= any(key.endswith(COMPUTED) for key in whole)


def test_every_family_with_the_dialect_is_compared() -> None:
    types = {model.model_type for model in MODELS.values()}
    compared = {family.name for family in builtin().of_types(sorted(types))}
    assert {name for name, entry in builtin().entries.items() if VLLM in entry.dialects} == compared
