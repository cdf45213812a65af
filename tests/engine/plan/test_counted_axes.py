"""Issue 15, tables: that the last layer is missing is found where a config has a list of layers, and else told of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import transaxle as tx
from tests import checkpoints

RULES = """family hybrid
  model_type hybrid
  axes l{size} d=hidden_size
  norm : l d
  mix  : l d   when layers_block_type[l] == "mamba"
  q    : l d   when layers_block_type[l] == "attention"
dialect hf
  backbone.layers.{{l}}.norm.weight = norm[d]
  backbone.layers.{{l}}.mixer.A     = mix[d]
  backbone.layers.{{l}}.mixer.q     = q[d]
dialect other
  {{l}}.norm = norm[d]
  {{l}}.A    = mix[d]
  {{l}}.q    = q[d]
"""
KINDS = ["mamba", "attention", "mamba"]


def _made(folder: Path, layers: int, size: str) -> tuple[Path, Path]:
    rules = folder / "my.rules"
    rules.write_text(RULES.format(size=size))
    held = {}
    for layer, kind in enumerate(KINDS[:layers]):
        held[f"backbone.layers.{layer}.norm.weight"] = np.ones(4, np.float32)
        held[f"backbone.layers.{layer}.mixer.{'A' if kind == 'mamba' else 'q'}"] = np.ones(4, np.float32)
    config = {"model_type": "hybrid", "hidden_size": 4, "layers_block_type": KINDS}
    return checkpoints.write(folder / "source", held, config=config), rules


def test_a_missing_last_layer_is_found_by_the_length_of_a_list(tmp_path: Path) -> None:
    """As Nemotron-H's config has it: no number of layers, but a list of their kinds."""
    source, rules = _made(tmp_path, 2, "=len(layers_block_type)")
    (refusal,) = tx.plan(source, tmp_path / "out", to="other", rules=rules).refusals
    assert refusal.code == "MISSING_TENSOR"
    assert "backbone.layers.2.norm.weight" in refusal.message
    assert "backbone.layers.2.mixer.A" in refusal.message


def test_layers_that_only_names_count_are_told_of(tmp_path: Path) -> None:
    source, rules = _made(tmp_path, 2, "")
    assert tx.plan(source, tmp_path / "out", to="other", rules=rules).counted == {"l": 2}
    assert tx.convert(source, tmp_path / "out", to="other", rules=rules, sync=False).as_json()["counted"] == {"l": 2}
    (refusal,) = tx.plan(source, tmp_path / "x", to="other", rules=rules, axes={"l": 3}).refusals
    assert refusal.code == "MISSING_TENSOR"


def test_a_config_that_claims_too_many_experts_is_refused_at_once(tmp_path: Path) -> None:
    """What would be written is not laid out first: that would not end."""
    source = checkpoints.tiny(tmp_path / "source")
    config = json.loads((source / "config.json").read_text("utf-8"))
    (source / "config.json").write_text(json.dumps({**config, "num_experts": 10**30}), "utf-8")
    found = tx.plan(source, tmp_path / "out", to="dcp:torchtitan")
    assert {"MISSING_TENSOR", "CORRUPT"} <= {refusal.code for refusal in found.refusals}
    assert any("is not plausible" in refusal.message for refusal in found.refusals)
