"""The bias of Megatron's routers (`--moe-router-enable-expert-bias`) in a Qwen3-MoE, which has none on the hub."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import transaxle as tx
from tests.checkpoints import CONFIG, SIZES, tiny

NAME = "decoder.layers.1.mlp.router.expert_bias"


def megatron(folder: Path, value: float) -> Path:
    """A Qwen3-MoE under Megatron's names, with a bias of each router."""
    hub = tiny(folder / "hub")
    tx.convert(hub, folder / "megatron", to="safetensors:megatron", sync=False)
    tensors = load_file(folder / "megatron" / "model.safetensors")
    bias = {f"decoder.layers.{layer}.mlp.router.expert_bias": np.zeros(SIZES["num_experts"], "f4") for layer in (0, 1)}
    bias[NAME][3] = value
    (folder / "biased").mkdir()
    save_file({**tensors, **bias}, folder / "biased" / "model.safetensors")
    return folder / "biased"


def test_a_bias_that_moved_has_no_place_on_the_hub(tmp_path: Path) -> None:
    source = megatron(tmp_path, 1e-3)
    with pytest.raises(tx.TransaxleError, match="UNEXPECTED_TENSOR") as caught:
        tx.convert(source, tmp_path / "out", to="hf", config=CONFIG)
    assert NAME in str(caught.value)
    assert "--to safetensors:identity" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_one_of_zeros_is_left_out_and_said(tmp_path: Path) -> None:
    report = tx.convert(megatron(tmp_path, 0), tmp_path / "out", to="hf", config=CONFIG, verify=True)
    assert "expert_bias" in str([*report.notes, *report.ignored])
    assert tx.verify(tmp_path / "hub", tmp_path / "out")


def test_torchtitan_gets_it(tmp_path: Path) -> None:
    report = tx.convert(megatron(tmp_path, 1e-3), tmp_path / "out", to="dcp:torchtitan", config=CONFIG, strict=True)
    assert report.notes == ()
    bias = tx.open(tmp_path / "out")["layers.1.moe.expert_bias_E"]
    assert (bias.dtype, bias.read().tolist()) == ("F32", [0, 0, 0, np.float32(1e-3), 0, 0, 0, 0])
