"""A model without a head of its own, and without a config that says so."""

from __future__ import annotations

from pathlib import Path

import transaxle as tx
from tests import checkpoints


def test_a_model_that_may_be_tied_needs_its_config(tmp_path: Path) -> None:
    """A head that is not stored is the embedding, or lost: only the config tells."""
    config = {**checkpoints.CONFIG, "tie_word_embeddings": True}
    values = {name: value for name, value in checkpoints.tensors().items() if name != "lm_head.weight"}
    source = checkpoints.write(tmp_path / "source", values)
    (refusal,) = tx.plan(source, tmp_path / "out", to="dcp:torchtitan").refusals
    assert (refusal.code, "lm_head.weight" in refusal.message) == ("MISSING_TENSOR", True)
    assert "tie_word_embeddings" in refusal.hint
    assert '--config FILE (config="FILE")' in refusal.hint
    assert tx.plan(source, tmp_path / "out", to="dcp:torchtitan", config=config).refusals == ()
    missing = checkpoints.write(tmp_path / "less", {n: v for n, v in values.items() if n != "model.norm.weight"})
    (refusal,) = tx.plan(missing, tmp_path / "out", to="dcp:torchtitan").refusals
    assert "tie_word_embeddings" not in refusal.hint
