"""Through every dialect of a family, one after the other, and back: transformers loads what comes out, and computes
the same logits. And a model with each kind of head through every dialect and back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx
from tests.oracles import wrappers
from tests.oracles.peer_bytes import differing, loaded, memory, randomise
from tests.oracles.quiet import quiet
from tests.oracles.tiny_models import drawn
from transaxle.families import builtin

TYPES = (
    "llama", "qwen2", "qwen3", "phi3", "gemma3_text", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe",
    "qwen3_next", "qwen3_5_moe_text", "nemotron_h", "qwen3_5", "muse_glimmer", "minimax_m2", "laguna",
)  # fmt: skip

MIXED = frozenset({"deepseek_v3", "glm4_moe", "nemotron_h"})
"""Models of several kinds of layers, which Megatron keeps apart."""
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"head_dim": 4, "num_key_value_heads": 4},
    "laguna": {"gating": "per-head", "num_attention_heads_per_layer": [4, 8]},
    "nemotron_h": {"n_groups": 2},
    "qwen3_5": {"layer_types": ["linear_attention", "full_attention"]},
}
"""What the tiny config of a type says otherwise: dims that are rotated, heads that share nothing, kinds of layers."""


HEADS = (
    "BertForSequenceClassification", "BertForNextSentencePrediction", "RobertaModel", "RobertaForMaskedLM",
    "RobertaForSequenceClassification", "XLMRobertaForTokenClassification", "RobertaForQuestionAnswering",
    "ElectraForPreTraining", "ElectraForSequenceClassification", "DistilBertForMultipleChoice",
    "GteForSequenceClassification", "NomicBertForMaskedLM", "ModernBertForMaskedLM", "CLIPModel",
    "LlavaForConditionalGeneration", "LlamaForSequenceClassification", "Gemma3TextForSequenceClassification",
    "Qwen2ForTokenClassification", "Qwen3MoeForSequenceClassification", "PhiForSequenceClassification",
    "MixtralForQuestionAnswering", "ModernBertForSequenceClassification",
)  # fmt: skip
"""Classes of models with heads and parts that some dialect has no names for, and without."""


@pytest.mark.oracle
@pytest.mark.peers
@pytest.mark.parametrize("architecture", HEADS)
def test_every_head_comes_back_from_every_dialect_under_its_own_name(architecture: str, tmp_path: Path) -> None:
    import transformers

    made = getattr(transformers, architecture)
    with quiet():
        model = made(wrappers.shrunk(made.config_class())).float()
        randomise(model)
        model.save_pretrained(tmp_path / "hub")
    (family,) = builtin().of_types([model.config.model_type])
    stored = loaded(tmp_path / "hub")
    for label in family.labels[1:]:
        there, back = tmp_path / label, tmp_path / f"back-{label}"
        tx.convert(tmp_path / "hub", there, to=f"safetensors:{label}", sync=False)
        if label == "transformers":
            assert differing(loaded(there), memory(model)) == []
        tx.convert(there, back, to="safetensors:hf", sync=False)
        assert differing(loaded(back), stored) == []
        assert (back / "config.json").read_bytes() == (tmp_path / "hub/config.json").read_bytes()


@pytest.mark.peers
@pytest.mark.parametrize("architecture", ["NomicBertForMaskedLM", "RobertaForMaskedLM"])
def test_a_tied_bias_comes_back_by_way_of_two_dialects(architecture: str, tmp_path: Path) -> None:
    import transformers

    made = getattr(transformers, architecture)
    with quiet():
        model = made(wrappers.shrunk(made.config_class())).float()
        randomise(model)
        model.save_pretrained(tmp_path / "hub")
    source = tmp_path / "hub"
    for label in ("transformers", "vllm", "hf"):
        tx.convert(source, tmp_path / label, to=f"safetensors:{label}", sync=False)
        source = tmp_path / label
    assert differing(loaded(source), loaded(tmp_path / "hub")) == []


@pytest.mark.oracle
@pytest.mark.peers
@pytest.mark.parametrize("model_type", TYPES)
def test_logits_are_equal_after_a_round_through_all_dialects(model_type: str, tmp_path: Path) -> None:
    model = drawn(model_type, CHANGES.get(model_type, {}))
    tokens = torch.arange(12).reshape(2, 6)
    with quiet(), torch.no_grad():
        expected = model(tokens).logits
        model.save_pretrained(tmp_path / "hub")
    (family,) = builtin().of_types([model_type])
    source = tmp_path / "hub"
    lossy = {each.label for each in family.dialects if any(line.lossy for line in each.lines)}
    left_out = lossy | ({"megatron_dist"} if model_type in MIXED else set())
    for number, label in enumerate([*(each for each in family.labels[1:] if each not in left_out), "hf"]):
        target = tmp_path / f"{number}"
        tx.convert(source, target, to=f"safetensors:{label}", family=family.name, sync=False)
        source = target
    assert differing(loaded(source), loaded(tmp_path / "hub")) == []
    with quiet(), torch.no_grad():
        again = type(model).from_pretrained(source).eval()
        found = again(tokens).logits
    assert torch.equal(found, expected)
