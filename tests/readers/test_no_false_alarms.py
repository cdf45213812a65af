"""Checkpoints of every model type, as transformers saves them: `check` is right about each that its reader loads.

A tiny config that a program changes after it has been read, such as one whose sizes do not belong together, saves files
that do not load again: then `check` must say so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch.distributed.checkpoint.api import CheckpointException

import transaxle as tx
from tests.oracles import automodel_peer, wrappers
from tests.oracles.every_type import EXACT, recorded
from tests.oracles.peer_bytes import randomise
from tests.oracles.quiet import quiet
from tests.readers.planted import reconfigure, tensors

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
    absent = [finding.effect for finding in verdict.findings if finding.kind == "absent" and loads]
    assert all("no layer that predicts ahead is stored" in effect for effect in absent), absent


AUTOMODEL = (
    "deepseek_v3", "deepseek_v32", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "internlm3",
    "iquestcoder", "llama", "minimax_m2", "ministral3", "mistral4", "nemotron_h", "qwen2", "qwen2_5_omni_thinker",
    "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl",
    "qwen3_vl_moe",
)  # fmt: skip
"""Model types for which Automodel has models of its own, with tiny configs that both programs build."""


@pytest.mark.oracle
@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("model_type", AUTOMODEL)
def test_it_is_right_about_what_automodel_loads(model_type: str, tmp_path: Path) -> None:
    """Automodel's own loading fills the model, and its adapter writes the files' tensors again."""
    with quiet():
        model = wrappers.build(model_type)
        assert model is not None
        model = model.float()
        randomise(model)
        model.save_pretrained(tmp_path)
    reconfigure(tmp_path, _write_sizes)
    with automodel_peer.undisturbed():
        verdict = tx.check(tmp_path, "automodel")
    try:
        written = automodel_peer.load_from_hub(tmp_path) or {}
    except (RuntimeError, CheckpointException):
        written = {}
    stored = tensors(tmp_path)
    loads = all(name in written and torch.equal(written[name].float(), value) for name, value in stored.items())
    assert verdict.ok == loads, str(verdict)


def _write_sizes(config: dict[str, Any]) -> None:
    """Write the sizes that transformers derives from others, and Automodel reads."""
    if "qk_head_dim" in config:
        config["qk_head_dim"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    if "mlp_layer_types" in config:
        config["first_k_dense_replace"] = config["mlp_layer_types"].count("dense")
