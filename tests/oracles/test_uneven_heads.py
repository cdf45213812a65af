"""Heads that differ by layer: a conversion's manifest says nothing of one layer that is not true of all."""

from __future__ import annotations

from pathlib import Path

import pytest

import transaxle as tx
from tests.oracles.quiet import quiet


@pytest.mark.peers
@pytest.mark.parametrize("gating", ["per-head", "per-element"])
def test_laguna_there_and_back(gating: str, tmp_path: Path) -> None:
    with quiet():
        from transformers import LagunaConfig, LagunaForCausalLM

        config = LagunaConfig(
            num_hidden_layers=3, vocab_size=11, hidden_size=12, num_attention_heads=6, num_key_value_heads=2,
            num_attention_heads_per_layer=[6, 4, 2], head_dim=4, intermediate_size=20, moe_intermediate_size=7,
            num_experts=3,
            shared_expert_intermediate_size=5, num_experts_per_tok=2, tie_word_embeddings=False, gating=gating,
        )  # fmt: skip
        model = LagunaForCausalLM(config)
        model.save_pretrained(tmp_path / "hf")
    for to in ("transformers", "automodel"):
        tx.convert(tmp_path / "hf", tmp_path / to, to=to, sync=False)
        tx.convert(tmp_path / to, tmp_path / f"{to} back", to="hf", sync=False)
        assert tx.diff(tmp_path / "hf", tmp_path / f"{to} back")
    with tx.open(tmp_path / "transformers") as checkpoint:
        assert {name: each.shape for name, each in checkpoint.items()} == {
            name: tuple(tensor.shape) for name, tensor in model.state_dict().items()
        }
