"""TRL's GRPO trains on two ranks with the example, and a real vLLM server computes with the trainer's weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from tests.live.jobs import free_port
from tests.live.topologies import LLAMA, source
from tests.refit.plugs.servers import PYTHON, ROOT, serving

WORLD = 2
SIZES = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 64, "max_position_embeddings": 128}
SHARP = {"initializer_range": 0.3}
JOB = Path(__file__).with_name("trl_job.py")
_VOCABULARY = 96
WORDS = ["<pad>", "<eos>", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SERVER = ("--no-skip-tokenizer-init", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.peers,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"vLLM has no environment at {PYTHON}: make vllm"),
]


def _model(folder: Path, seed: int) -> str:
    """Write a model with random weights, and a tokenizer of a few words."""
    path = source(folder, LLAMA | SIZES | SHARP | {"vocab_size": _VOCABULARY}, seed)
    words = WORDS + [f"word{number}" for number in range(len(WORDS), _VOCABULARY)]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(path)
    return path


def test_the_server_computes_with_the_trainer_s_weights(tmp_path: Path) -> None:
    """By what TRL measures: rounding to bf16 makes a difference of 0.01, other weights more than one of 1."""
    report = tmp_path / "report.json"
    trained = _model(tmp_path / "trained", 1)
    with serving(tmp_path, _model(tmp_path / "served", 0), (0,), *SERVER) as server:
        server.wait()
        before = server.answers()
        _train(trained, server.url, report)
        after = server.answers()
    measured = json.loads(report.read_text("utf-8"))
    assert measured["version"] == len(measured["pushed"]) == 3
    assert max(measured["pushed"]) < 0.02
    assert min(measured["without"]) > 1
    assert before != after


def _train(model: str, url: str, report: Path) -> None:
    """Run all ranks of the job, and wait for them."""
    job = {"WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "GLOO_SOCKET_IFNAME": "lo", **job}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(JOB), model, url, str(report)],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=report.parent,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    outputs = [rank.communicate()[0].decode(errors="replace") for rank in ranks]
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output[-4000:]
