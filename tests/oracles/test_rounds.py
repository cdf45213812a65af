"""Through every dialect of a family, one after the other, and back: transformers loads what comes out, and computes
the same logits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import transaxle as tx
from tests.oracles import wrappers
from tests.oracles.peer_bytes import differing, loaded, randomise
from tests.oracles.quiet import quiet
from transaxle.families import builtin

TYPES = (
    "llama", "qwen2", "qwen3", "phi3", "gemma3_text", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss",
)  # fmt: skip

MIXED = ("deepseek_v3", "glm4_moe")
"""Models of several kinds of layers."""
CHANGES = {each: {"head_dim": 4, "num_key_value_heads": 4} for each in ("deepseek_v3",)}
"""What the tiny config of a type says otherwise: here, the dims that are rotated, and heads that share nothing."""


@pytest.mark.peers
@pytest.mark.parametrize("model_type", TYPES)
def test_logits_are_equal_after_a_round_through_all_dialects(model_type: str, tmp_path: Path) -> None:
    model = wrappers.build(model_type, **CHANGES.get(model_type, {}))
    randomise(model)
    tokens = torch.arange(12).reshape(2, 6)
    with quiet(), torch.no_grad():
        expected = model(tokens).logits
        model.save_pretrained(tmp_path / "hub")
    (family,) = builtin().of_types([model_type])
    source = tmp_path / "hub"
    # Megatron keeps layers that differ apart, and others in one tensor.
    left_out = {"megatron_dist"} if model_type in MIXED else set()
    for number, label in enumerate([*(each for each in family.labels[1:] if each not in left_out), "hf"]):
        target = tmp_path / f"{number}"
        tx.convert(source, target, to=f"safetensors:{label}", family=family.name, sync=False)
        source = target
    assert differing(loaded(source), loaded(tmp_path / "hub")) == []
    with quiet(), torch.no_grad():
        again = type(model).from_pretrained(source).eval()
        found = again(tokens).logits
    assert torch.equal(found, expected)
