"""The examples run, and a resumed run gives the same losses as one without a break."""

from __future__ import annotations

import json
import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

import transaxle as tx
from tests.live.ranks import run
from tests.oracles import hub
from tests.oracles.quiet import quiet

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
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
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
