"""TransformerEngine's pickles into quantized parameters: every release's bytes, without TransformerEngine or CUDA."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import transaxle as tx
from tests.oracles.te_pickles import (
    BLOCKWISE,
    FLOAT8,
    MXFP8,
    NVFP4,
    RELEASES,
    File,
    Release,
    Tensor,
    blockwise,
    float8,
    mxfp8,
    nvfp4,
)
from tests.quant.kinds import raw
from tests.some import a, some
from transaxle import quant
from transaxle.quant import QuantizedTensor, Quantizer
from transaxle.quant.entries import give_entries

NAME = "layer.weight"
EQUAL: dict[str, tuple[Tensor, Quantizer]] = {
    FLOAT8: (float8(1), quant.Float8CurrentScaling()),
    MXFP8: (mxfp8(2, (32, 64)), quant.MXFP8()),
    BLOCKWISE: (blockwise(3, (130, 140)), quant.Float8Block()),
    NVFP4: (nvfp4(4), quant.NVFP4()),
}
CODES = ("data", "rowwise_data")
SCALES = ("scale_inv", "rowwise_scale_inv")


def _loaded(folder: Path, tensor: Tensor, quantizer: Quantizer, release: Release | None) -> QuantizedTensor:
    file = File()
    file.items[NAME] = tensor.opcodes(file, release)
    place = folder / "model.pt"
    place.write_bytes(file.pickled())
    layer = nn.Module()
    layer.weight = nn.Parameter(quantizer.quantize(torch.ones(tensor.shape, dtype=torch.bfloat16)))
    give_entries(layer)
    some(tx.load(nn.ModuleDict({"layer": layer}), place, dialect="identity"))
    return a(QuantizedTensor, layer.weight)


def _octets(tensor: Tensor, names: tuple[str, ...]) -> bytes:
    return next(np.ascontiguousarray(tensor.buffers[name]).tobytes() for name in names if name in tensor.buffers)


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: f"{release.kind} {release.version}")
def test_every_release_is_loaded_raw(release: Release, tmp_path: Path) -> None:
    assert importlib.util.find_spec("transformer_engine") is None
    tensor, quantizer = EQUAL[release.kind]
    weight = _loaded(tmp_path, tensor, quantizer, release)
    assert raw(weight.components["data"]).numpy().tobytes() == _octets(tensor, CODES)
    made = weight.dequantize(torch.float32).detach().numpy()
    assert np.allclose(made, tensor.values, rtol=2**-22 if release.kind == NVFP4 else 0, atol=0)  # products of three
    stored = next(tensor.buffers[name] for name in SCALES if name in tensor.buffers)
    held = raw(weight.components["scale_inv"]).numpy()
    whole = np.ascontiguousarray(stored).view(np.uint8)
    whole = whole[tuple(slice(size) for size in held.shape)]  # memory is padded to what kernels need
    assert np.array_equal(held, whole.reshape(held.shape))


def test_stacks_are_loaded_raw(tmp_path: Path) -> None:
    tensor, quantizer = mxfp8(9, (2, 32, 64)), EQUAL[MXFP8][1]
    weight = _loaded(tmp_path, tensor, quantizer, None)
    assert raw(weight.components["data"]).numpy().tobytes() == _octets(tensor, CODES)
    assert np.array_equal(weight.dequantize(torch.float32).detach().numpy(), tensor.values)
