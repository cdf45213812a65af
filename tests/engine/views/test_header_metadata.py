"""What torchao's files say of their tensors, where each shard has a list of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import transaxle as tx
from tests.oracles.quantized_peers import torchao
from tests.oracles.quiet import quiet
from transaxle.encodings.conventions.torchao_convention import NAMES
from transaxle.engine.views.decoded import join_notes, without_notes

WEIGHT = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.filterwarnings("ignore")
def test_shards_that_list_their_own_tensors_become_one_file_that_torchao_reads(tmp_path: Path) -> None:
    made = torchao("mxfp8", 3)
    names = json.loads(made.metadata[NAMES])
    source = tmp_path / "source"
    source.mkdir()
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        heads = {f"{head}._{last}_": name for name in part for head, _, last in [name.rpartition(".")]}
        tensors = {
            key: tensor
            for key, tensor in made.tensors.items()
            if key in part or any(key.startswith(head) for head in heads)
        }
        save_file(tensors, source / file, {**{name: made.metadata[name] for name in part}, NAMES: json.dumps(part)})
        weight_map |= dict.fromkeys(tensors, file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (source / "config.json").write_text(json.dumps(made.config))
    with tx.open(source) as checkpoint:
        assert checkpoint.encoded.keys() == made.values.keys()
    tx.convert(source, tmp_path / "out", to="safetensors")
    with quiet():
        from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

        place = tmp_path / "out" / "model.safetensors"
        with safe_open(place, "pt") as file:
            metadata = file.metadata()
        state, left = unflatten_tensor_state_dict(load_file(place), metadata)
        assert (set(state), left) == (set(names), {})
        for name, values in made.values.items():
            assert torch.equal(state[name].dequantize(torch.float32), values)
    tx.convert(source, tmp_path / "plain", to="safetensors", decode="fp32")
    with tx.open(tmp_path / "plain") as plain:
        assert not any(name in str(plain.metadata) for name in made.values)
        assert torch.equal(torch.from_numpy(plain[WEIGHT].read()), made.values[WEIGHT])


def test_lists_are_joined_in_order() -> None:
    said = {"a.safetensors:tensor_names": '["x", "y"]', "b.safetensors:tensor_names": '["y", "z"]', "x": "{}"}
    assert join_notes(said) == {"x": "{}", NAMES: '["x", "y", "z"]'}
    assert join_notes({"x": 1}) == {"x": 1}
    malformed = {"a:tensor_names": "no JSON", "b:tensor_names": "[]"}
    assert join_notes(malformed) == malformed
    assert without_notes(join_notes(said)) == {}
