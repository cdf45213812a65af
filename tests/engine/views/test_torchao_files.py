"""What torchao's files say of their tensors, where each shard has a list of its own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import transaxle as tx
from tests import checkpoints
from tests.engine import demand_refusal
from tests.oracles.quantized_peers import torchao
from tests.oracles.quiet import quiet
from transaxle.encodings.conventions.torchao_convention import NAMES
from transaxle.engine.views.decoded import join_notes, without_notes
from transaxle.engine.views.encoded import compact_order

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


# Scales in the order of a matrix-multiply kernel: put in order scale by scale, or refused.

QDATA, SCALE, NAME = "layer._weight_qdata", "layer._weight_scale", "layer.weight"


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (300, 9)])
def test_every_scale_is_where_the_kernel_has_it(shape: tuple[int, int]) -> None:
    tiles = -(-shape[0] // 128) * -(-shape[1] // 4)
    stored = np.random.default_rng(0).integers(0, 256, 512 * tiles, np.uint8)
    found = compact_order(stored, shape).reshape(shape)
    for row in range(shape[0]):
        for column in range(shape[1]):
            tile = row // 128 * -(-shape[1] // 4) + column // 4
            assert found[row, column] == stored[512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4]


def _source(folder: Path, scales: tuple[int, ...]) -> Path:
    """One tensor as torchao describes it, with 96 x 160 codes."""
    said = {
        "_type": "MXTensor",
        "_data": {
            "elem_dtype": {"_type": "torch.dtype", "_data": "float8_e4m3fn"},
            "block_size": 32,
            "is_swizzled_scales": True,
        },
        "_tensor_data_names": ["qdata", "scale"],
    }
    numbers = np.random.default_rng(1)
    held = {
        QDATA: torch.from_numpy(numbers.integers(0, 100, (96, 160), np.uint8)).view(torch.float8_e4m3fn),
        SCALE: torch.from_numpy(numbers.integers(110, 130, scales, np.uint8)).view(torch.float8_e8m0fnu),
    }
    folder.mkdir()
    notes = {"tensor_names": json.dumps([NAME]), NAME: json.dumps(said)}
    save_file(held, folder / checkpoints.WHOLE, notes)
    return folder


def test_under_its_own_name_it_stays_what_it_is(tmp_path: Path) -> None:
    source = _source(tmp_path / "source", (32, 32))
    tx.convert(source, tmp_path / "same", to="safetensors", sync=False)
    with tx.open(source) as before, tx.open(tmp_path / "same") as after:
        assert all(after[name].tobytes() == tensor.tobytes() for name, tensor in before.items())
    with tx.open(source) as raw, tx.open(source, decode="fp32") as plain:
        scale = np.frombuffer(raw[SCALE].tobytes(), np.uint8)
        assert raw[SCALE].shape == (32, 32)
        codes = raw[QDATA].read().astype(np.float32)
        exponents = compact_order(scale, (96, 5)).reshape(96, 5).astype(np.int32) - 127
        assert np.array_equal(plain[NAME].read(), codes * np.repeat(2.0**exponents, 32, axis=1).astype(np.float32))


def test_too_few_scales_are_refused(tmp_path: Path) -> None:
    source = _source(tmp_path / "source", (32, 16))
    with demand_refusal("UNSUPPORTED", NAME):
        tx.convert(source, tmp_path / "out", to="safetensors", decode="fp32", sync=False)
