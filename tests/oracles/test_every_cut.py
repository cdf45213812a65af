"""Models of transformers that are cut over ranks compute what the whole ones do; types that would not are not cut."""

from __future__ import annotations

import pytest

from tests.oracles.every_cut import EXACT, WORLDS, WRONG, outcome
from transaxle.parallel.tensor_parallel import proven_types

SAMPLE = {"stablelm": EXACT, "diffllama": f"{WRONG}: logits", "apertus": f"{WRONG}: gradient of model.layers.0.mlp.act"}
"""Heads in pairs, and parameters between layers that are cut: right by the table, and another model."""


@pytest.mark.peers
@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_type_is_as_recorded(model_type: str) -> None:
    assert outcome(model_type, 2).startswith(SAMPLE[model_type])
    assert (model_type in proven_types()) == (SAMPLE[model_type] == EXACT)


@pytest.mark.oracle
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("model_type", sorted(proven_types()))
def test_every_type_that_is_cut_is_exact(model_type: str, world: int) -> None:
    assert outcome(model_type, world) == EXACT
