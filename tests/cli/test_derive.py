"""`transaxle derive` and `convert --derive`, as people type them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.cli.running import Transaxle
from transaxle.axes.notation import tables
from transaxle.families import builtin

MODEL = "model.safetensors"
UNSHIPPED = "ctrl"
"""A model type of transformers that no table ships for."""


def _source(folder: Path, layers: int, width: int) -> None:
    folder.mkdir()
    random = np.random.default_rng(layers)
    shapes = {"a": (width, 3), "b": (width, 3)}
    tensors = {
        f"layers.{at}.{name}": random.random(shape, np.float32)
        for at in range(layers)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / MODEL)
    (folder / "config.json").write_text(json.dumps({"model_type": "of_mine", "depth": layers, "width": width}))


def _fused(tensors: dict[str, Any]) -> dict[str, Any]:
    """The user's own converter: `a` and `b` of a layer, one after the other."""
    layers = {name.rpartition(".")[0] for name in tensors}
    return {f"{at}.ab": np.concatenate([tensors[f"{at}.a"], tensors[f"{at}.b"]]) for at in layers}


def _convert(source: Path, target: Path) -> None:
    target.mkdir()
    save_file(_fused(load_file(source / MODEL)), target / MODEL)
    (target / "config.json").write_text((source / "config.json").read_text())


def test_a_table_of_ones_own_converter(here: Path, transaxle: Transaxle) -> None:
    """Numbered copies go through the converter; what follows converts other weights just as it does."""
    folders = []
    for number, (layers, width) in enumerate([(2, 5), (3, 7), (4, 11)]):
        plain, numbered, converted = (here / f"{name}{number}" for name in ("plain", "numbered", "converted"))
        _source(plain, layers, width)
        assert transaxle("derive", "--number", plain, numbered).code == 0
        _convert(numbered, converted)
        folders += [numbered, converted]
    outcome = transaxle("derive", *folders, "--family", "of_mine", "--dialects", "hf:fused", "-o", "my.rules")
    assert outcome.code == 0, outcome.err
    assert "of other sizes" in outcome.out + outcome.err
    arguments = ("--rules", "my.rules", "--family", "of_mine")
    assert transaxle("convert", "plain2", "out", "--to", "fused", *arguments).code == 0
    found, expected = load_file(here / "out" / MODEL), _fused(load_file(here / "plain2" / MODEL))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_a_file_is_never_replaced(here: Path, transaxle: Transaxle) -> None:
    Path("my.rules").write_text("mine")
    outcome = transaxle("derive", UNSHIPPED, "-o", "my.rules", "--json")
    assert (outcome.code, outcome.codes) == (2, ["EXISTS"])
    assert Path("my.rules").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "code", "refused"),
    [
        (("no_such_type",), 2, ["UNKNOWN_FAMILY"]),
        (("config.json",), 3, ["CORRUPT"]),
        (("absent", "folders"), 4, ["IO"]),
    ],
)
def test_what_cannot_be_derived(
    words: tuple[str, ...], code: int, refused: list[str], here: Path, transaxle: Transaxle
) -> None:
    Path("config.json").write_text("{}")
    outcome = transaxle("derive", *words, "--json")
    assert (outcome.code, outcome.codes) == (code, refused)


def test_a_model_type_that_no_table_knows(here: Path, transaxle: Transaxle) -> None:
    """The refusal names the command; that table, and `--derive`, convert to what the peer has in memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    assert not any(UNSHIPPED in entry.model_types for entry in builtin().entries.values())
    torch.manual_seed(0)
    sizes = {"n_embd": 24, "n_layer": 3, "n_head": 4, "dff": 40, "vocab_size": 50, "n_positions": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(UNSHIPPED, **sizes))
    model.save_pretrained(here / "hub")
    refusal = transaxle("convert", "hub", "no", "--to", "transformers")
    assert refusal.code == 2
    assert f"transaxle derive {UNSHIPPED}" in " ".join(refusal.err.split())
    assert transaxle("convert", "hub", "out", "--to", "transformers", "--derive").code == 0
    assert transaxle("derive", UNSHIPPED, "-o", "its.rules").code == 0
    assert [family.name for family in tables.read(Path("its.rules").read_text(), file="its.rules")] == [UNSHIPPED]
    assert transaxle("convert", "hub", "again", "--to", "transformers", "--rules", "its.rules").code == 0
    memory = {name: each.numpy() for name, each in model.state_dict().items()}
    for folder in ("out", "again"):
        found = load_file(here / folder / MODEL)
        assert all(np.array_equal(found[name], memory[name]) for name in found)
        assert found.keys() >= load_file(here / "hub" / MODEL).keys()
