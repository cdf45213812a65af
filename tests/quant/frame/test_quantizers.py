"""Quantizers against the codec on numpy, and delayed scaling against its formula written out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.quant.kernels.cases import DTYPES, array, bits, nearest, strange
from tests.quant.kinds import MORE, raw, values
from transaxle.encodings.arithmetic import codec
from transaxle.errors import TransaxleError
from transaxle.quant import (
    MXFP8,
    DelayedScaling,
    Float8Block,
    Float8CurrentScaling,
    QuantizedTensor,
    Quantizer,
)

kinds = pytest.mark.parametrize("quantizer", MORE.values(), ids=MORE.keys())


@kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [strange, values], ids=["strange", "values"])
def test_codes_and_scales_are_the_codecs(quantizer: Quantizer, dtype: torch.dtype, make: object) -> None:
    x = strange((70, 144), dtype) if make is strange else values(70, 144, dtype=dtype)
    made = quantizer.quantize(x).components
    encoding = quantizer.encoding
    most = float(codec.amax(array(x), path="numpy")) if encoding.has_global or not encoding.tile[0] else None
    codes, scales = codec.encode_rows(encoding, array(x), amax=most, over=quantizer.over, path="numpy")
    assert np.array_equal(raw(made["data"]).numpy(), codes)
    assert np.array_equal(bits(made["scale_inv"]).reshape(scales.shape), scales.view(bits(made["scale_inv"]).dtype))
    if quantizer.columnwise:
        turned = replace(encoding, tile=encoding.tile[::-1])
        most = most if encoding.has_global else None
        codes, scales = codec.encode_rows(turned, array(x), amax=most, over=quantizer.over, path="numpy")
        assert np.array_equal(raw(made["columnwise_data"]).numpy(), codes)
        assert np.array_equal(bits(made["columnwise_scale_inv"]), scales)


@kinds
@pytest.mark.parametrize("rows", [(0, 33), (33, 70), (16, 17), (5, 5)], ids=str)
def test_values_of_rows_are_the_rows_of_the_values(quantizer: Quantizer, rows: tuple[int, int]) -> None:
    made = quantizer.quantize(values(70, 144))
    whole = made.dequantize(torch.float32)
    encoding, parts = quantizer.encoding, made.components
    grid = encoding.grid((70, 144))
    amax = float(parts["amax"]) / (6 * encoding.scale_max) if encoding.has_global else 1.0
    scales = array(parts["scale_inv"]).reshape(grid)
    told = codec.decode_box(encoding, array(parts["data"]), scales, factor=amax, dtype="F32", path="numpy")
    assert np.array_equal(bits(whole), bits(told))
    part = made[slice(*rows)]
    assert isinstance(part, QuantizedTensor)
    assert torch.equal(part.dequantize(torch.float32), whole[slice(*rows)])


def test_delayed_scaling_takes_the_largest_of_the_last_amaxes() -> None:
    quantizer = DelayedScaling(length=3)
    amaxes = [4.0, 8.0, 2.0, 1.0, 0.5, 0.25, float("inf"), 3.0, 3.0, 3.0, 3.0]
    made = quantizer.quantize(torch.tensor([[1.0, -amaxes[0]]]))
    history, scaled_for = [amaxes[0], 0.0, 0.0], amaxes[0]
    for amax in amaxes[1:]:
        made.quantize_(torch.tensor([[0.25, amax]]))
        scale = np.float32(448) / np.float32(scaled_for)
        assert made.components["scale_inv"].item() == np.float32(1) / scale
        wanted = torch.tensor([0.25 * float(scale), min(amax * float(scale), 448.0)]).to(torch.float8_e4m3fn)
        assert torch.equal(raw(made.components["data"])[0], raw(wanted))
        history = [amax, *history[:2]]
        assert made.state["amax_history"].tolist() == history
        scaled_for = max(history) if 0 < max(history) < float("inf") else scaled_for


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (torch.zeros(3), "SHAPE_MISMATCH"),
        (torch.zeros((3, 4), dtype=torch.int32), "DTYPE_MISMATCH"),
        (MXFP8().quantize(values(2, 32)), "UNSUPPORTED"),
    ],
    ids=["a vector", "integers", "codes"],
)
def test_what_is_no_matrix_of_numbers_is_refused(x: torch.Tensor, code: str) -> None:
    with pytest.raises(TransaxleError) as refused:
        Float8CurrentScaling().quantize(x)
    assert refused.value.code == code


def test_rows_outside_the_matrix_are_refused() -> None:
    with pytest.raises(TransaxleError, match="rows 8 to 12 lie outside a matrix of 10 rows"):
        MXFP8().quantize(values(4, 32), start=8, whole=10)


def _special(dtype: torch.dtype) -> torch.Tensor:
    """Blocks of 32: zeros, subnormals, equal numbers, ties between codes, one huge value, and each E8M0 boundary."""
    info = torch.finfo(dtype)
    rows = torch.zeros((8, 32), dtype=torch.float64)
    rows[1] = torch.arange(32) * info.smallest_normal / 32
    rows[2], rows[3] = 3.25, -info.smallest_normal
    rows[4] = torch.arange(32) * 4 + 226  # between 224 and 448 codes are 16 apart
    rows[4, 31] = 448
    rows[5], rows[5, 7] = 2.0**-9, info.max
    rows[6], rows[7, ::2] = -0.0, 1e-30
    exponents = torch.arange(-120, 110)
    near = [torch.nextafter(torch.tensor(448.0, dtype=dtype), torch.tensor(to, dtype=dtype)) for to in (0.0, 1e9)]
    tops = torch.cat([top.double() * torch.exp2(exponents.double()) for top in (torch.tensor(448.0), *near)])
    boundaries = torch.zeros((len(tops), 32), dtype=torch.float64)
    boundaries[:, 0], boundaries[:, 1] = tops, -tops / 3
    return torch.cat([rows, boundaries]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("quantizer", [MXFP8(), Float8Block(block=(1, 32))], ids=["mxfp8", "float8_block"])
def test_special_blocks_by_the_closed_form(quantizer: Quantizer, dtype: torch.dtype) -> None:
    """The smallest power of two under which the largest is at most 448, and the nearest codes, found by search."""
    x = _special(dtype)
    made = quantizer.quantize(x).components
    scale = made["scale_inv"].double().numpy()
    size = x.double().abs().amax(1, keepdim=True).numpy()
    inside = (size > 0) & (size / 448 > 2.0**-126) & (size < 2.0**127)  # beyond, exponents and quotients end
    assert inside.sum() > 680
    exponents = np.ceil(np.log2(np.where(inside, size, 448).astype(np.longdouble) / 448))
    assert np.array_equal(scale[inside], np.exp2(exponents.astype(np.float64))[inside])
    units = (x.double().numpy() / np.where(scale == 0, 1, scale)).astype(np.float32)
    rows = inside[:, 0]
    assert np.array_equal(raw(made["data"]).numpy()[rows], nearest(units[rows], "F8_E4M3"))
    assert not (raw(made["data"])[0] & 0x7F).any()


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_special_blocks_are_torchaos() -> None:
    """In bfloat16; float32 next to a boundary its logarithm rounds away."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    x = _special(torch.bfloat16)
    theirs = MXTensor.to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    made = MXFP8().quantize(x).components
    assert torch.equal(raw(made["scale_inv"]), raw(theirs.scale))
    assert torch.equal(raw(made["data"]), raw(theirs.qdata))
