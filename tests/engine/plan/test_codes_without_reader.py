"""Codes and scales in the format of a program that takes codes for values: said in a line, with the way out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch.distributed.checkpoint.state_dict_loader import load

import transaxle as tx
from tests import checkpoints
from tests.oracles.quiet import quiet

SIZES = {
    **checkpoints.SIZES, "hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 64, "num_experts": 2,
    "num_hidden_layers": 1,
}  # fmt: skip
NAME = "layers.0.attention.wo.weight"


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("codes")
    generator = np.random.default_rng(0)
    values = {
        name: (1e-3 * generator.standard_normal(shape)).astype("float32")
        for name, shape in checkpoints.shapes(SIZES).items()
    }
    (folder / "plain").mkdir()
    save_file(values, folder / "plain" / "model.safetensors")
    (folder / "plain" / "config.json").write_text(json.dumps({**checkpoints.CONFIG, **SIZES}), "utf-8")
    tx.convert(folder / "plain", folder / "encoded", to="hf", encode="float8_block", sync=False)
    return folder / "encoded"


def loaded(folder: Path) -> torch.Tensor:
    """What torch's DCP, by which torchtitan loads, makes of a tensor that a model has in single precision."""
    state = {NAME: torch.zeros(128, 256)}
    with quiet():
        load(state, checkpoint_id=folder, no_dist=True)
    return state[NAME]


def test_torchtitan_takes_codes_for_values_unless_they_are_decoded(encoded: Path, tmp_path: Path) -> None:
    true = tx.open(encoded, decode="fp32")["model.layers.0.self_attn.o_proj.weight"].read()
    report = tx.convert(encoded, tmp_path / "codes", to="dcp:torchtitan", sync=False)
    (note,) = [note for note in report.notes if "codes" in note]
    assert 'with --decode bf16 (decode="bf16")' in note
    assert not np.allclose(loaded(tmp_path / "codes").numpy(), true, rtol=0.5)
    report = tx.convert(encoded, tmp_path / "values", to="dcp:torchtitan", decode="fp32", sync=False)
    assert [note for note in report.notes if "codes" in note] == []
    assert np.array_equal(loaded(tmp_path / "values").numpy(), true)


@pytest.mark.parametrize("to", ["dcp:automodel", "torch_dist", "megatron_torch"])
def test_other_trainers_read_no_scales_either(encoded: Path, to: str, tmp_path: Path) -> None:
    assert [note for note in tx.plan(encoded, tmp_path / "out", to=to).notes if "read no scales" in note]


@pytest.mark.parametrize("to", ["hf", "dcp:hf", "dcp", "safetensors:megatron", "safetensors:transformers"])
def test_nothing_is_said_where_scales_are_read_or_names_stay(encoded: Path, to: str, tmp_path: Path) -> None:
    assert [note for note in tx.plan(encoded, tmp_path / "out", to=to).notes if "codes" in note] == []
