"""Restating the amax of an nvfp4 tensor as a divisor, against what compressed-tensors computes with it."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from transaxle.encodings.conventions.convention import (
    COMPRESSED_TENSORS,
    CONVENTIONS,
    DEEPSEEK,
    hub_convention,
    rescale,
)
from transaxle.encodings.encoding import FLOAT8, FLOAT8_BLOCK, MXFP8, NVFP4, Encoding

COMPRESSED = CONVENTIONS[COMPRESSED_TENSORS]
BLOCKS = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
CODES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BINADE = np.arange(0x3F80, 0x4000, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
"""Every bfloat16 from 1 to 2."""


def _unlike(amax: float, divisor: float, dtype: torch.dtype) -> bool:
    """Whether torch, an operation at a time, has another value somewhere."""
    ours = (BLOCKS.double() * (amax / 2688)).float()[:, None] * CODES
    theirs = (BLOCKS / torch.tensor([divisor]))[:, None] * CODES  # `_dequantize` of compressed-tensors 0.20
    return not torch.equal(ours.to(dtype), theirs.to(dtype))


@pytest.mark.parametrize(
    ("dtype", "kind", "found"), [("BF16", torch.bfloat16, 126), ("F16", torch.float16, 128), ("F32", torch.float32, 29)]
)
def test_an_amax_is_restated_where_no_value_changes(dtype: str, kind: torch.dtype, found: int) -> None:
    made, same = rescale(BINADE, NVFP4, COMPRESSED, dtype)
    assert np.array_equal(made, np.float32(2688) / BINADE)
    pairs = zip(BINADE.tolist(), made.tolist(), strict=True)
    assert same.tolist() == [not _unlike(amax, divisor, kind) for amax, divisor in pairs]
    assert same.sum() == found


def test_amaxes_of_master_weights_are_restated() -> None:
    """Ties, where a divisor that is a little off goes wrong, need an amax of few digits."""
    amax = np.exp(np.random.default_rng(0).uniform(-6, 3, 400)).astype(np.float32)
    assert rescale(amax, NVFP4, COMPRESSED, "BF16")[1].all()


def test_the_rest() -> None:
    amax = np.array([[0.0], [np.inf], [np.nan]], np.float32)
    made, same = rescale(amax, NVFP4, COMPRESSED, "BF16")
    assert (made.shape, same.tolist()) == ((3, 1), [[True], [False], [True]])
    halved = replace(NVFP4, scale_max=256)
    made, same = rescale(np.array([1.7], np.float32), halved, COMPRESSED, "BF16")
    assert (made.tolist(), same.tolist()) == ([float(np.float32(1536) / np.float32(1.7))], [True])


@pytest.mark.parametrize(
    ("encodings", "name"),
    [
        ([FLOAT8_BLOCK], DEEPSEEK),
        ([MXFP8], DEEPSEEK),
        ([FLOAT8_BLOCK, MXFP8], DEEPSEEK),
        ([FLOAT8], COMPRESSED_TENSORS),
        ([MXFP8, NVFP4], COMPRESSED_TENSORS),
        ([FLOAT8_BLOCK, FLOAT8], COMPRESSED_TENSORS),
    ],
)
def test_one_config_speaks_of_one_convention(encodings: list[Encoding], name: str) -> None:
    assert hub_convention(encodings).name == name
