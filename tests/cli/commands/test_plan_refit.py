"""`transaxle plan` with meshes: the bytes that a refit would send, computed from a config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import USAGE, Transaxle
from transaxle.cli.convert import ranks_text

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4, "tie_word_embeddings": False,
    "num_experts": 8, "moe_intermediate_size": 16, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "attention_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip
WHOLE = (2 * 128 + 1) * 32 + 2 * (2 * 32 + 2 * 4 + (32 + 2 * 16 + 32) * 32 + 8 * 32 + 8 * 3 * 16 * 32)
MESHES = ("--mesh", "fsdp=2,ep=2", "--mesh", "replicas=2,tp=2")
ASKED = ("plan", "hf", "vllm", *MESHES, "--config", "model")


@pytest.fixture
def model(here: Path) -> Path:
    """A folder with nothing but a config."""
    (here / "model").mkdir()
    file = here / "model" / "config.json"
    file.write_text(json.dumps(CONFIG), "utf-8")
    return file


def test_it_prints_totals_spreads_and_pairs(model: Path, transaxle: Transaxle) -> None:
    done = transaxle(*ASKED, "--ranks-per-node", "8")
    assert done.code == 0, done.err
    shown = done.out.splitlines()
    assert shown[0] == "qwen3_moe · hf -> vllm"
    assert shown[1] == f"  {WHOLE:,} parameters, sent as bf16"
    assert shown[2:4] == ["  trainer: 4 ranks, fsdp=2,ep=2", "  engine: 4 ranks, replicas=2,tp=2"]
    assert "inside machines, 0 B between them" in shown[5]
    assert any(line.startswith("    0-1 -> 0, 2  ") and line.endswith("4 pairs") for line in shown)


def test_the_document_has_the_whole_matrix(model: Path, transaxle: Transaxle) -> None:
    found = transaxle(*ASKED, "--json", "--ranks-per-node", "4").json
    assert found["parameters"] == WHOLE
    matrix = found["matrix"]
    assert [len(row) for row in matrix] == [4] * 4
    assert [sum(row) for row in matrix] == found["sent"]
    assert [sum(column) for column in zip(*matrix, strict=True)] == found["received"]
    assert sum(found["sent"]) == found["bytes"] == found["bytes_between_nodes"] == sum(found["tensors"].values())
    assert found["bytes_inside_nodes"] == found["bytes_own"] == 0
    assert found["engine"] == {"dialect": "vllm", "mesh": "replicas=2,tp=2", "ranks": 4}
    assert found["stays"] == found["undecided"] == []


def test_types_and_ranks_follow_the_options(model: Path, transaxle: Transaxle) -> None:
    half, whole = (transaxle(*ASKED, "--json", *more).json for more in ((), ("--dtype", "fp32")))
    assert whole["bytes"] == 2 * half["bytes"]
    same = transaxle(*ASKED, "--json", "--same-ranks").json
    assert same["bytes"] + same["bytes_own"] == half["bytes"]
    assert [same["matrix"][rank][rank] for rank in range(4)] == [0] * 4
    model.write_text(json.dumps({**CONFIG, "torch_dtype": "float32"}), "utf-8")
    assert transaxle(*ASKED, "--json").json["bytes"] == whole["bytes"]


def test_assumptions_about_the_config_are_reported(model: Path, transaxle: Transaxle) -> None:
    model.write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "attention_bias"}), "utf-8")
    done = transaxle(*ASKED)
    assert "the config does not say whether the model has these; counted as absent" in done.out
    assert "q_bias" in done.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "hf", "vllm", "--mesh", "tp=2", "--config", "model"), "two meshes"),
        (("plan", "hf", "vllm", *MESHES), "--config FILE"),
        ((*ASKED, "--to", "hf", "--verify"), "--to, --verify: not with --mesh"),
        (("plan", "hf", "vllm", "--same-ranks"), "two meshes"),
        (("plan", "model", "out"), "Missing option '--to'"),
        ((*ASKED, "--family", "nobody"), "no family 'nobody'"),
        (("plan", "hf", "vllm", "--mesh", "what=2", "--mesh", "tp=2", "--config", "model"), "no dim of the mesh of hf"),
    ],
)  # fmt: skip
def test_what_is_refused_of_meshes(arguments: tuple[str, ...], said: str, model: Path, transaxle: Transaxle) -> None:
    transaxle(*arguments).expect(USAGE, err=said)


@pytest.mark.parametrize(("types", "code"), [({}, "UNKNOWN_FAMILY"), ({"model_type": "nobody"}, "UNKNOWN_FAMILY")])
def test_a_config_of_no_model_is_refused(types: dict[str, str], code: str, model: Path, transaxle: Transaxle) -> None:
    model.write_text(json.dumps({**{k: v for k, v in CONFIG.items() if k != "model_type"}, **types}), "utf-8")
    assert transaxle(*ASKED, "--json").codes == [code]
    assert transaxle(*ASKED, "--family", "qwen3_moe").code == 0


def test_ranks_are_abbreviated() -> None:
    assert ranks_text([0, 1, 2, 5]) == "0-2, 5"
    assert ranks_text(range(0, 256, 8)) == "0, 8, … 248 (32 ranks)"
