"""Scales in the order of a matrix-multiply kernel: put in order scale by scale, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import transaxle as tx
from tests import checkpoints
from transaxle.engine.views.encoded import compact_order

QDATA, SCALE, NAME = "layer._weight_qdata", "layer._weight_scale", "layer.weight"


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (129, 5), (33, 7), (300, 9)])
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
    with pytest.raises(tx.TransaxleError) as found:
        tx.convert(source, tmp_path / "out", to="safetensors", decode="fp32", sync=False)
    assert found.value.code == "UNSUPPORTED"
    assert NAME in str(found.value)
