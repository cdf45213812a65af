"""The examples run, a resumed run gives the same losses as one without a break, and all of them end with code 0."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

import transaxle as tx
from tests.live.jobs import free_port
from tests.live.ranks import run
from tests.oracles import hub
from tests.oracles.quiet import quiet
from tests.some import some

ROOT = Path(__file__).parent.parent
TRAIN = ROOT / "examples" / "train.py"
TENSOR_PARALLEL = ROOT / "examples" / "tensor_parallel.py"
STEPS = ["--steps", "4", "--every", "2"]
DROPOUT = ["--dropout", "0.2"]
HUB = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 6, "tie_word_embeddings": False,
}  # fmt: skip


def _example(path: Path = TRAIN) -> ModuleType:
    spec = some(spec_from_file_location(path.stem, path))
    module = module_from_spec(spec)
    some(spec.loader).exec_module(module)
    return module


def _train(rank: int, world: int, out: str, words: list[str]) -> list[float]:
    """Run the training loop to step 4; return the losses of the steps that it made."""
    example = _example()
    with quiet():
        losses: list[float] = example.train(example.options(["--out", out, *STEPS, *words]))
    return losses


def _resumed(first: Path, out: Path) -> str:
    out.mkdir()
    shutil.copytree(first / "step-2", out / "step-2")
    return str(out)


ELSEWHERE: dict[str, list[tuple[int, list[str]]]] = {
    "hf": [(2, []), (1, [])],
    "dcp:torchtitan": [(4, []), (4, ["--replicas", "2"])],
}
"""For each layout, on how many ranks a run of two goes on, and how these hold the model."""


@pytest.mark.oracle
@pytest.mark.parametrize("to", ELSEWHERE)
def test_training_resumes_on_the_same_and_on_other_ranks(tmp_path: Path, to: str) -> None:
    words = ["--to", to]
    losses, *_ = run(2, _train, str(tmp_path / "run"), words)
    assert len(losses) == 4
    for world, more in ELSEWHERE[to]:
        again = tmp_path / f"on-{world}{len(more)}"
        found, *_ = run(world, _train, _resumed(tmp_path / "run", again), [*words, *more])
        assert found == (losses[2:] if world == 2 else pytest.approx(losses[2:], rel=1e-5))
        if world == 2:
            assert tx.verify(tmp_path / "run" / "step-4", again / "step-4").equal


def test_each_rank_gets_its_random_numbers_back(tmp_path: Path) -> None:
    losses, *_ = run(2, _train, str(tmp_path / "run"), DROPOUT)
    found, *_ = run(2, _train, _resumed(tmp_path / "run", tmp_path / "again"), DROPOUT)
    assert found == losses[2:]
    other, *_ = run(1, _train, _resumed(tmp_path / "run", tmp_path / "other"), DROPOUT)
    assert len(other) == 2
    assert other != losses[2:]


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    run(2, _train, str(tmp_path / "run"), ["--every", "1", "--keep", "2"])
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"initial", "step-3", "step-4"}
    assert all(tx.verify(tmp_path / "run" / f"step-{step}").ok for step in (3, 4))


def _cut(rank: int, world: int, words: list[str]) -> list[float]:
    example = _example(TENSOR_PARALLEL)
    with quiet():
        losses: list[float] = example.train(example.options(words))
    return losses


def test_tensor_parallel_training_from_hub_to_hub(tmp_path: Path) -> None:
    """At one degree, at another with FSDP, and on from there: what one rank gets, up to the order of sums."""
    settings, tensors = hub.make(HUB, 0)
    source = tmp_path / "hub"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(settings))
    save_file(tensors, source / hub.WEIGHTS)
    words = ["--source", str(source), "--out"]
    (losses, *_), (alone,) = run(4, _cut, [*words, str(tmp_path / "a")]), run(1, _cut, [*words, str(tmp_path / "b")])
    assert losses == pytest.approx(alone, rel=1e-5)
    resumed = ["--resume", str(tmp_path / "a" / "state")]
    on, *_ = run(4, _cut, [*words, str(tmp_path / "c"), "--data", "2", *resumed])
    (beside,) = run(1, _cut, [*words, str(tmp_path / "d"), *resumed])
    assert on == pytest.approx(beside, rel=1e-5)
    with quiet():
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / "c" / "hub")
    with tx.open(tmp_path / "c" / "state") as state:
        for name, value in loaded.named_parameters():
            assert value.detach().numpy().tobytes() == state[name].tobytes(), name


# The examples end with exit code 0, run after run: torch may abort a process whose meshes outlive its process groups.

WORLD = 2
SECONDS = 600.0
"""Seconds after which a program hangs; nothing that works needs them."""
_TAIL = 2000
TIMES = 8


def _ends(program: Path, words: list[str], folder: Path) -> list[tuple[int, str]]:
    """Run a program on all ranks to its end; return exit codes, and the end of what was printed."""
    shared = {"WORLD_SIZE": str(WORLD), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    places = [folder / f"printed-{rank}" for rank in range(WORLD)]
    processes = []
    for rank, place in enumerate(places):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
        with place.open("wb") as printed:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(program), *words],
                    env={**os.environ, **shared, **own},
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(code, place.read_text("utf-8")[-_TAIL:]) for code, place in zip(codes, places, strict=True)]


def _failed(program: Path, words: list[str], folder: Path) -> dict[int, list[tuple[int, str]]]:
    """Return the runs in which a rank did not end with 0."""
    ends = {run: _ends(program, [*words, "--out", str(folder / f"out-{run}")], folder) for run in range(TIMES)}
    return {run: each for run, each in ends.items() if any(code for code, _ in each)}


@pytest.mark.oracle
def test_training_exits_with_0(tmp_path: Path) -> None:
    """FSDP2, with saves in the background up to the end."""
    assert _failed(TRAIN, ["--steps", "2", "--every", "1"], tmp_path) == {}


@pytest.mark.oracle
def test_tensor_parallel_training_exits_with_0(tmp_path: Path) -> None:
    settings, tensors = hub.make(HUB, 0)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file(tensors, tmp_path / hub.WEIGHTS)
    assert _failed(TENSOR_PARALLEL, ["--source", str(tmp_path)], tmp_path) == {}
