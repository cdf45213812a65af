"""Checkpoints of every model type, as transformers saves them: `check` is right about each that transformers loads.

A tiny config that a program changes after it has been read, such as one whose sizes do not belong together, saves files
that do not load again: then `check` must say so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

import transaxle as tx
from tests.oracles import wrappers
from tests.oracles.every_type import EXACT, recorded
from tests.oracles.peer_bytes import randomise
from tests.oracles.quiet import quiet

TYPES = sorted(model_type for model_type, (_, outcome) in recorded()["types"].items() if outcome == EXACT)


def loads_again(model: Any, folder: Path) -> bool:
    """Return whether transformers itself loads every saved tensor with its values."""
    try:
        loaded, info = type(model).from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    except (RuntimeError, TypeError, ValueError, StrictDataclassError):
        return False
    if info["missing_keys"] or info["unexpected_keys"]:
        return False
    values = loaded.state_dict()
    return all(torch.equal(values[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.oracle
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("model_type", TYPES)
def test_it_is_right_about_what_transformers_saves(model_type: str, tmp_path: Path) -> None:
    with quiet():
        try:
            model = wrappers.build(model_type)
            if model is not None:
                model = model.float()
                randomise(model)
                model.save_pretrained(tmp_path / "saved")
        except (ValueError, StrictDataclassError):
            model = None
        if model is None:
            pytest.skip(f"no tiny config of {model_type} builds, or is saved")
        loads = loads_again(model, tmp_path / "saved")
    verdict = tx.check(tmp_path / "saved", "transformers")
    assert verdict.ok == loads, str(verdict)
