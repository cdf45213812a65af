"""One vocabulary: what the functions on files take beside a model's names, those on live models take too."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import transaxle as tx

RULES = """
family own
  axis l = num_layers
  axes d
  scale : l d
dialect mine
  layers.{l}.scale = scale[d]
dialect stacked
  scales = scale[(l d)]
"""
LAYERS = 3


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "own.rules"
    path.write_text(RULES, "utf-8")
    return path


def _mine() -> dict[str, torch.Tensor]:
    return {f"layers.{layer}.scale": torch.arange(4.0) + layer for layer in range(LAYERS)}


def test_live_functions_take_rules_and_axes(tmp_path: Path, rules: Path) -> None:
    said: dict[str, Any] = {"rules": rules, "axes": {"l": LAYERS}, "family": "own"}
    stacked = torch.cat(list(_mine().values()))
    for number, save in enumerate((tx.save, lambda *args, **given: tx.async_save(*args, **given).result())):
        out = tmp_path / f"out{number}"
        assert save(_mine(), out, to="safetensors:stacked", **said).dialect == "stacked"
        with tx.open(out) as checkpoint:
            assert checkpoint["scales"].read().tolist() == stacked.tolist()
        filled = {name: torch.zeros(4) for name in _mine()}
        tx.load(filled, out, dialect="mine", **said)
        assert all(torch.equal(filled[name], tensor) for name, tensor in _mine().items())
        with pytest.raises(tx.TransaxleError):
            tx.load(filled, out, dialect="mine", family="own")
        with tx.open(out, rules=rules) as opened, pytest.raises(TypeError, match=r"^axes, rules: pass this to open"):
            tx.load(filled, opened, axes={"l": LAYERS}, rules=rules)
        with tx.open(out, rules=rules) as opened, pytest.raises(TypeError, match=r"^config: pass this to open"):
            tx.load(filled, opened, config={"num_layers": LAYERS})
    target = {"scales": torch.zeros(4 * LAYERS)}
    tx.reshard(_mine(), target, dialect="stacked", **said)
    assert torch.equal(target["scales"], stacked)
    tx.TrainerCheckpoints(to="safetensors:stacked", **said)
    with pytest.raises(tx.TransaxleError, match="no family 'own'"):
        tx.TrainerCheckpoints(to="safetensors:stacked", family="own")


def test_all_functions_that_read_names_take_the_same_arguments() -> None:
    vocabulary = {"family", "dialect", "config", "axes", "rules"}
    names = "open info plan convert verify diff load save async_save reshard TrainerCheckpoints AccelerateHooks"
    for name in names.split():
        assert vocabulary <= inspect.signature(getattr(tx, name)).parameters.keys(), name
