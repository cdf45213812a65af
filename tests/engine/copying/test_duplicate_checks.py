"""Copies that are a part of a stored tensor: the other parts of it are none of theirs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import transaxle as tx
from tests import checkpoints

RULES = """
family gated
  model_type gated
  axes g=groups r=heads c=width d=hidden
  q    : g r c d
  gate : g r d

dialect apart
  q    = q[(g r c) d]
  gate = gate[(g r) d]

dialect fused
  qg = [(g [q:(r c) | gate:(r c)]) d]
"""
CONFIG = {"model_type": "gated", "groups": 2, "heads": 3, "width": 4, "hidden": 5}


def test_a_part_is_stored_once_for_each_dim_of_another(tmp_path: Path) -> None:
    q = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    gate = -1 - np.arange(2 * 3 * 5, dtype=np.float32).reshape(2, 3, 5)
    copies = np.broadcast_to(gate[:, :, None], q.shape)
    fused = np.concatenate([q.reshape(2, 12, 5), copies.reshape(2, 12, 5)], axis=1).reshape(48, 5)
    rules = tmp_path / "gated.rules"
    rules.write_text(RULES)
    apart = checkpoints.write(
        tmp_path / "apart", {"q": q.reshape(24, 5), "gate": gate.reshape(6, 5)}, config={**CONFIG}
    )
    tx.convert(apart, tmp_path / "fused", to="fused", rules=rules, sync=False)
    assert np.array_equal(checkpoints.read(tmp_path / "fused")["qg"], fused)
    report = tx.convert(tmp_path / "fused", tmp_path / "back", to="apart", rules=rules, sync=False)
    assert report.checks == 1
    held = checkpoints.read(tmp_path / "back")
    assert np.array_equal(held["q"], q.reshape(24, 5))
    assert np.array_equal(held["gate"], gate.reshape(6, 5))
    fused[-1, -1] += 1
    other = checkpoints.write(tmp_path / "other", {"qg": fused}, config={**CONFIG})
    with pytest.raises(tx.TransaxleError, match="UNEQUAL_COPIES"):
        tx.convert(other, tmp_path / "out", to="apart", rules=rules, sync=False)
