"""`--merge` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests import checkpoints
from tests.cli.running import USAGE, Transaxle

TARGET = "model.layers.0.self_attn.q_proj"
LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": [TARGET]}


def adapter(folder: Path, rows: int, columns: int) -> None:
    """Write an adapter of one weight."""
    folder.mkdir()
    factors = {"A": torch.ones(2, columns), "B": torch.full((rows, 2), 0.125)}
    named = {f"base_model.model.{TARGET}.lora_{which}.weight": value for which, value in factors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(LORA), "utf-8")


def test_a_merged_weight_is_listed_and_verified(here: Path, transaxle: Transaxle) -> None:
    checkpoints.tiny(Path("source"))
    adapter(Path("adapter"), *checkpoints.tensors()[f"{TARGET}.weight"].shape)
    planned = transaxle("plan", "source", "out", "--to", "automodel", "--merge", "adapter")
    assert "1 tensor will be merged, with the adapter" in planned.out
    outcome = transaxle("convert", "source", "out", "--to", "automodel", "--merge", "adapter", "--verify")
    assert outcome.code == 0
    assert "1 tensor merged, with the adapter" in outcome.out
    assert transaxle("verify", "out").code == 0
    compared = transaxle("diff", "source", "out", "--numeric", "--json").json
    assert [each["name"] for each in compared["differences"]] == [f"{TARGET}.weight"]


def test_what_it_excludes(here: Path, transaxle: Transaxle) -> None:
    checkpoints.tiny(Path("source"))
    for more in (["--decode", "bf16"], ["--encode", "mxfp8"], ["--dtype", "bf16"]):
        outcome = transaxle("convert", "source", "out", "--to", "hf", "--merge", "adapter", *more)
        assert outcome.code == USAGE
        assert "exclude each other" in outcome.err
