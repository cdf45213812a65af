"""Checkpoints that transformers saves without the layers that predict ahead, and models without their towers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import transaxle as tx
from tests.oracles import hub
from tests.oracles.peer_bytes import loaded
from tests.oracles.quiet import quiet
from tests.oracles.tiny_models import drawn
from transaxle.axes.layout.model_tensors import Model
from transaxle.engine.checkpoint.promised import find_lacks

pytestmark = pytest.mark.peers


def _missing(folder: Path) -> dict[str, set[str]]:
    with tx.open(folder) as checkpoint:
        return {lack.promise: set(lack.names) for lack in find_lacks(checkpoint)}


def _write(folder: Path, tensors: hub.Tensors, config: object) -> Path:
    folder.mkdir()
    save_file(tensors, folder / hub.WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("model_type", "back"), [("glm4_moe", "megatron"), ("deepseek_v3", "torchtitan")])
def test_numbered_layers_that_transformers_leaves_out_are_named(model_type: str, back: str, tmp_path: Path) -> None:
    """Their names are those under which transformers stores one more layer of its own."""
    config = drawn(model_type).config.to_dict()
    written, whole = hub.make(config, 3, ahead=1)
    saved = hub.model(config)
    with quiet():
        saved.save_pretrained(tmp_path / "saved")
    ahead = whole.keys() - loaded(tmp_path / "saved").keys()
    promise = "the config has num_nextn_predict_layers 1"
    assert _missing(tmp_path / "saved") == {promise: ahead}
    assert _missing(_write(tmp_path / "whole", whole, written)) == {}
    tx.convert(tmp_path / "saved", tmp_path / "trained", to=f"safetensors:{back}")
    tx.convert(tmp_path / "trained", tmp_path / "returned", to="hf")
    assert _missing(tmp_path / "returned") == {promise: ahead}
    assert any(promise in note for note in tx.plan(tmp_path / "trained", tmp_path / "out", to="hf").notes)


@pytest.mark.parametrize(("model_type", "key"), [("qwen3_next", "mtp_num_hidden_layers"), ("mellum", "num_mtp_layers")])
def test_layers_beside_the_others_are_named(model_type: str, key: str, tmp_path: Path) -> None:
    with quiet():
        drawn(model_type).save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved/config.json").read_text()) | {key: 1}
    (tmp_path / "saved/config.json").write_text(json.dumps(config))
    ((promise, names),) = _missing(tmp_path / "saved").items()
    assert promise == f"the config has {key} 1"
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} < names
    assert all(name.startswith("mtp.") for name in names)
    with tx.open(tmp_path / "saved") as checkpoint:
        model = Model(checkpoint.reading.family, checkpoint.sizes, ahead=True)
        shapes = dict(model.stored_shapes(checkpoint.reading.dialect))
    layers = {name: torch.full(shapes[name], 0.5) for name in names}
    assert _missing(_write(tmp_path / "whole", loaded(tmp_path / "saved") | layers, config)) == {}
    del layers["mtp.layers.0.self_attn.q_proj.weight"]
    part = _write(tmp_path / "part", loaded(tmp_path / "saved") | layers, config)
    assert list(_missing(part).values()) == [{"mtp.layers.0.self_attn.q_proj.weight"}]


@pytest.mark.parametrize(("model_type", "section", "part"), [
    ("qwen2_5_vl", "vision_config", "visual."),
    ("llava", "vision_config", "vision_tower."),
    ("qwen2_audio", "audio_config", "audio_tower."),
])  # fmt: skip
def test_a_tower_is_named_with_its_section(model_type: str, section: str, part: str, tmp_path: Path) -> None:
    with quiet():
        drawn(model_type).save_pretrained(tmp_path / "saved")
    assert _missing(tmp_path / "saved") == {}
    tensors = loaded(tmp_path / "saved")
    tower = {name for name in tensors if name.startswith(part)}
    assert len(tower) > 8
    text = {name: tensor for name, tensor in tensors.items() if name not in tower}
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert _missing(_write(tmp_path / "text", text, config)) == {f"the config has {section}": tower}
