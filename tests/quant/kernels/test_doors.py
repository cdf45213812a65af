"""The door to the kernels on a CPU: what it returns, where it writes, what it refuses, and that triton stays away."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.quant.kernels.cases import (
    CASES,
    CODES,
    DTYPES,
    GROUPS,
    TABLES,
    alone,
    array,
    bits,
    blocked,
    encoded,
    nearest,
    ordinary,
    strange,
)
from transaxle.encodings.arithmetic import codec
from transaxle.encodings.encoding import FLOAT8, FLOAT8_BLOCK, MXFP4, MXFP8, NVFP4
from transaxle.errors import TransaxleError
from transaxle.quant import kernels
from transaxle.quant.kernels import Components

E4M3, E8M0, F32, U8 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32, torch.uint8


@pytest.mark.parametrize("sizes", [(37, 130), (3, 5, 64), (0, 4, 4)], ids=str)
def test_codes_are_transposed(sizes: tuple[int, ...]) -> None:
    codes = torch.randint(0, 256, sizes, dtype=U8)
    for given in (codes, codes.mT.contiguous().mT):
        made = kernels.transposed(given.view(E4M3))
        assert made.dtype == E4M3
        assert made.is_contiguous()
        assert torch.equal(made.view(U8), codes.mT)


def test_the_buffers_of_each_format() -> None:
    """Shapes and dtypes of the tables in TransformerEngine, compact, for a matrix whose last tiles are cut short."""
    x = ordinary((300, 200), torch.bfloat16)
    expected: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {
        "float8": {"data": (E4M3, (300, 200)), "scale_inv": (F32, (1,))},
        "float8, E5M2": {"data": (torch.float8_e5m2, (300, 200)), "scale_inv": (F32, (1,))},
        "float8_block": {"data": (E4M3, (300, 200)), "scale_inv": (F32, (3, 2))},
        "float8_block, 1x128": {"data": (E4M3, (300, 200)), "scale_inv": (F32, (300, 2))},
        "mxfp8": {"data": (E4M3, (300, 200)), "scale_inv": (E8M0, (300, 7))},
        "mxfp4": {"data": (U8, (300, 100)), "scale_inv": (E8M0, (300, 7))},
        "nvfp4": {"data": (U8, (300, 100)), "scale_inv": (E4M3, (300, 13)), "amax": (F32, (1,))},
        "nvfp4, 16x16": {"data": (U8, (300, 100)), "scale_inv": (E4M3, (300, 13)), "amax": (F32, (1,))},
    }
    for name, buffers in expected.items():
        made = kernels.quantize(x, CASES[name].encoding, over=CASES[name].over).present()
        assert {key: (buffer.dtype, tuple(buffer.shape)) for key, buffer in made.items()} == buffers
    both = kernels.quantize(x, MXFP8, columnwise=True).present()
    assert list(both) == ["data", "scale_inv", "columnwise_data", "columnwise_scale_inv"]
    assert both["columnwise_scale_inv"].shape == (10, 200)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_cpu_tensor_goes_through_the_codec(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    for x in (ordinary((37, 130), dtype), strange((64, 96), dtype), ordinary((70, 60), dtype)[3:40, 2:58]):
        made = kernels.quantize(x, case.encoding, over=case.over)
        codes, scales = encoded(case, x)
        assert made.data is not None
        assert made.scale_inv is not None
        np.testing.assert_array_equal(array(made.data), codes)
        np.testing.assert_array_equal(array(made.scale_inv).reshape(scales.shape), scales)
        factor = 1.0 if made.amax is None else made.amax.item() / (6 * case.encoding.scale_max)
        for wide in DTYPES:
            values = kernels.dequantize(made, case.encoding, wide)
            expected = codec.decode_box(case.encoding, codes, scales, factor=factor, dtype=CODES[wide])
            np.testing.assert_array_equal(bits(values), bits(expected))


def test_columnwise_codes_are_those_of_the_transposed_matrix_laid_back() -> None:
    x = ordinary((70, 50), torch.bfloat16)
    made = kernels.quantize(x, MXFP8, columnwise=True)
    turned = kernels.quantize(x.t().contiguous(), MXFP8)
    assert made.columnwise_data is not None
    assert made.columnwise_scale_inv is not None
    assert turned.data is not None
    assert turned.scale_inv is not None
    np.testing.assert_array_equal(array(made.columnwise_data), array(turned.data).T)
    np.testing.assert_array_equal(array(made.columnwise_scale_inv), array(turned.scale_inv).T)
    alone = Components(columnwise_data=made.columnwise_data, columnwise_scale_inv=made.columnwise_scale_inv)
    expected = kernels.dequantize(turned, MXFP8, torch.float32).t()
    assert torch.equal(kernels.dequantize(alone, MXFP8, torch.float32), expected)


@pytest.mark.parametrize("code", ["F8_E4M3", "F8_E5M2"])
def test_a_given_scale_by_the_closed_form(code: str) -> None:
    x = ordinary((40, 64), torch.float32)
    encoding = replace(FLOAT8, code=code)
    for scale in (0.37, torch.tensor([1e5]), torch.tensor(2.0**-12)):
        made = kernels.quantize(x, encoding, scale=scale)
        single = np.float32(float(scale))
        assert made.data is not None
        assert made.scale_inv is not None
        np.testing.assert_array_equal(array(made.data), nearest(x.numpy() * single, code))
        assert made.scale_inv.item() == np.float32(1) / single
        values = TABLES[code][array(made.data)].astype(np.float32) * (np.float32(1) / single)
        np.testing.assert_array_equal(kernels.dequantize(made, encoding, torch.float32).numpy(), values)


def test_shards_scaled_for_one_amax_are_the_whole_cut() -> None:
    x = ordinary((64, 96), torch.bfloat16)
    for encoding in (FLOAT8, NVFP4):
        whole = kernels.quantize(x, encoding)
        parts = [kernels.quantize(part, encoding, amax=kernels.amax(x)) for part in (x[:10], x[10:], x[:0])]
        assert whole.data is not None
        codes = [array(part.data) for part in parts if part.data is not None]
        np.testing.assert_array_equal(np.concatenate(codes), array(whole.data))
        if encoding is FLOAT8:
            assert all(torch.equal(part.present()["scale_inv"], whole.present()["scale_inv"]) for part in parts)


def test_given_buffers_are_written_and_returned() -> None:
    x = ordinary((40, 64), torch.bfloat16)
    made = kernels.quantize(x, NVFP4)
    room = Components(**{name: torch.empty_like(buffer) for name, buffer in made.present().items()})
    again = kernels.quantize(x, NVFP4, out=room)
    for name, buffer in room.present().items():
        assert again.present()[name].data_ptr() == buffer.data_ptr()
        np.testing.assert_array_equal(array(buffer), array(made.present()[name]))
    out = torch.empty(40, 80, dtype=torch.float16)[:, 8:72]
    assert kernels.dequantize(made, NVFP4, torch.float16, out=out) is out
    assert torch.equal(out, kernels.dequantize(made, NVFP4, torch.float16))


@pytest.mark.parametrize("name", CASES)
def test_groups_of_rows_are_quantized_one_by_one(name: str) -> None:
    case = CASES[name]
    columnwise = case.encoding is MXFP8
    for ends in GROUPS:
        x = ordinary((37, 130), torch.bfloat16)
        offsets = torch.tensor(ends, dtype=torch.int32)
        made = kernels.quantize_groups(x, offsets, case.encoding, over=case.over, columnwise=columnwise)
        again = kernels.quantize_groups(x, offsets, case.encoding, over=case.over, columnwise=columnwise, out=made)
        assert all(again.present()[buffer].data_ptr() == one.data_ptr() for buffer, one in made.present().items())
        for group, (start, stop) in enumerate(itertools.pairwise([0, *ends])):
            wanted = kernels.quantize(x[start:stop], case.encoding, over=case.over, columnwise=columnwise).present()
            found = alone(made, case.encoding, ends, group)
            assert found.keys() == wanted.keys()
            for buffer, one in wanted.items():
                np.testing.assert_array_equal(bits(found[buffer]), bits(one))
    high = max(case.encoding.tile[0], 1)
    assert kernels.first_tiles(torch.tensor([5, 5, 37]), 37, high).tolist() == [0, -(-5 // high), -(-5 // high)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_quantized_one_by_one(dtype: torch.dtype) -> None:
    x = strange((37, 130), dtype)
    codes, scales = kernels.quantize_rows(x, _ends(5, 5, 37), FLOAT8)
    for row in range(37):
        alone = kernels.quantize(x[row : row + 1], FLOAT8)
        np.testing.assert_array_equal(bits(codes[row : row + 1]), bits(alone.data))
        np.testing.assert_array_equal(bits(scales[row : row + 1]), bits(alone.scale_inv))


@pytest.mark.parametrize("width", [1, 130, 512, 1030])
def test_values_of_rows_with_a_scale_each(width: int) -> None:
    for case in (CASES["float8"], CASES["float8, E5M2"]):
        x = strange((37, width), torch.bfloat16)
        codes, scales = kernels.quantize_rows(x, torch.tensor([37], dtype=torch.int32), case.encoding)
        by_row = replace(case.encoding, tile=(1, 0))
        for dtype in DTYPES:
            made = kernels.dequantize(Components(codes, scales.view(-1, 1)), by_row, dtype)
            for row in range(37):
                alone = Components(codes[row : row + 1], scales[row : row + 1])
                wanted = kernels.dequantize(alone, case.encoding, dtype)
                np.testing.assert_array_equal(bits(made[row : row + 1]), bits(wanted))


def test_swizzled_scales_are_padded_group_by_group() -> None:
    """The order is torchao's."""
    to_blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    x = strange((300, 160), torch.bfloat16)
    plain = kernels.quantize(x, MXFP8)
    for ends in ([130, 130, 290], [300, 300, 300], [0, 0, 0]):
        made = kernels.quantize_groups(x, _ends(*ends), MXFP8, swizzled=True)
        assert plain.scale_inv is not None
        assert made.scale_inv is not None
        np.testing.assert_array_equal(bits(made.data), bits(plain.data))
        grid = plain.scale_inv.view(torch.uint8)
        groups = [grid[start:stop] for start, stop in itertools.pairwise([0, *ends]) if start < stop]
        parts = [to_blocked(one) for one in groups]
        assert all(torch.equal(part, blocked(one)) for part, one in zip(parts, groups, strict=True))
        flat = made.scale_inv.view(torch.uint8).flatten()
        wanted = torch.cat([*parts, flat.new_zeros(len(flat) - sum(map(len, parts)))])
        assert torch.equal(flat, wanted)


def test_a_parameter_is_read_without_its_graph() -> None:
    weight = torch.nn.Parameter(ordinary((8, 32), torch.float32))
    made = kernels.quantize(weight, MXFP8)
    assert not any(buffer.requires_grad for buffer in made.present().values())
    assert kernels.amax(weight).item() == weight.abs().max().item()


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def _ends(*rows: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def _swapped(**buffers: Any) -> Components:
    return Components(**(kernels.quantize(_x(4, 64), MXFP8).present() | buffers))


REFUSED: dict[str, tuple[str, Callable[[], object]]] = {
    "integers": ("DTYPE_MISMATCH", lambda: kernels.quantize(_x(4, 4, dtype=torch.int32), MXFP8)),
    "double": ("DTYPE_MISMATCH", lambda: kernels.amax(_x(4, 4, dtype=torch.float64))),
    "a vector": ("SHAPE_MISMATCH", lambda: kernels.quantize(_x(64), MXFP8)),
    "a stack": ("SHAPE_MISMATCH", lambda: kernels.quantize(_x(2, 4, 64), MXFP8)),
    "no place": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 64).to("meta"), MXFP8)),
    "odd rows of nibbles": ("SHAPE_MISMATCH", lambda: kernels.quantize(_x(4, 63), NVFP4)),
    "columns of float8": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 64), FLOAT8, columnwise=True)),
    "columns of mxfp4": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 64), MXFP4, columnwise=True)),
    "nothing": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 64), MXFP8, rowwise=False)),
    "an amax for tiles": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 64), FLOAT8_BLOCK, amax=1.0)),
    "a scale for tiles": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 64), NVFP4, scale=1.0)),
    "amax and scale": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 64), FLOAT8, amax=1.0, scale=1.0)),
    "two amaxes": ("SHAPE_MISMATCH", lambda: kernels.quantize(_x(4, 64), FLOAT8, amax=torch.ones(2))),
    "a double amax": ("SHAPE_MISMATCH", lambda: kernels.quantize(_x(4, 64), FLOAT8, amax=torch.ones(1).double())),
    "tiles of 48": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 96), replace(MXFP8, tile=(1, 48)))),
    "tiles of 256": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 96), replace(FLOAT8_BLOCK, tile=(256, 256)))),
    "one level of E4M3": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 96), replace(NVFP4, has_global=False))),
    "scales of bfloat16": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 96), replace(FLOAT8, scale="BF16"))),
    "a scale per row": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 96), replace(FLOAT8, tile=(1, 0)))),
    "part of a tile": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 96), NVFP4, over=(16, 8))),
    "an amax over 16 x 32, both ways": (
        "UNSUPPORTED",
        lambda: kernels.quantize(_x(32, 96), NVFP4, columnwise=True, over=(16, 32)),
    ),
    "an amax over three rows": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 96), NVFP4, over=(3, 16))),
    "over the tensor": ("UNSUPPORTED", lambda: kernels.quantize(_x(4, 96), FLOAT8, over=(16, 16))),
    "offsets of int64": ("SHAPE_MISMATCH", lambda: kernels.quantize_groups(_x(4, 64), torch.tensor([4]), MXFP8)),
    "groups that go back": ("SHAPE_MISMATCH", lambda: kernels.quantize_groups(_x(4, 64), _ends(3, 2), FLOAT8)),
    "groups beyond the end": ("SHAPE_MISMATCH", lambda: kernels.quantize_groups(_x(4, 64), _ends(3, 5), MXFP8)),
    "rows with a scale for each tile": (
        "UNSUPPORTED",
        lambda: kernels.quantize_rows(_x(4, 64), _ends(3, 4), MXFP8),
    ),
    "swizzled scales of blocks": (
        "UNSUPPORTED",
        lambda: kernels.quantize_groups(_x(4, 64), _ends(3, 4), FLOAT8_BLOCK, swizzled=True),
    ),
    "swizzled, both ways": (
        "UNSUPPORTED",
        lambda: kernels.quantize_groups(_x(4, 64), _ends(3, 4), MXFP8, swizzled=True, columnwise=True),
    ),
    "swizzled, with gaps": (
        "UNSUPPORTED",
        lambda: kernels.quantize_groups(
            _x(4, 64),
            _ends(3, 4),
            MXFP8,
            swizzled=True,
            out=Components(_x(4, 64).to(E4M3), torch.zeros((256, 8), dtype=U8)[:, :4].view(E8M0)),
        ),
    ),
    "out for other groups": (
        "SHAPE_MISMATCH",
        lambda: kernels.quantize_groups(_x(4, 64), _ends(3, 4), FLOAT8, out=kernels.quantize(_x(4, 64), FLOAT8)),
    ),
    "out too small": ("SHAPE_MISMATCH", lambda: kernels.quantize(_x(8, 64), MXFP8, out=_swapped())),
    "out of bytes": ("DTYPE_MISMATCH", lambda: kernels.quantize(_x(4, 64), MXFP8, out=_swapped(data=_x(4, 64)))),
    "no codes": ("MISSING_TENSOR", lambda: kernels.dequantize(Components(), MXFP8, torch.float32)),
    "no scales": ("MISSING_TENSOR", lambda: kernels.dequantize(_swapped(scale_inv=None), MXFP8, torch.float32)),
    "no amax": (
        "MISSING_TENSOR",
        lambda: kernels.dequantize(replace(kernels.quantize(_x(4, 64), NVFP4), amax=None), NVFP4, torch.float32),
    ),
    "e5m2 as e4m3": (
        "DTYPE_MISMATCH",
        lambda: kernels.dequantize(_swapped(data=_x(4, 64).to(torch.float8_e5m2)), MXFP8, torch.float32),
    ),
    "scales of another matrix": (
        "SHAPE_MISMATCH",
        lambda: kernels.dequantize(_swapped(scale_inv=torch.ones(4, 3).to(E8M0)), MXFP8, torch.float32),
    ),
    "columns apart": (
        "UNSUPPORTED",
        lambda: kernels.dequantize(_swapped(data=_x(64, 4).to(E4M3).t()), MXFP8, torch.float32),
    ),
    "to integers": ("DTYPE_MISMATCH", lambda: kernels.dequantize(_swapped(), MXFP8, torch.int32)),
    "out of another dtype": (
        "SHAPE_MISMATCH",
        lambda: kernels.dequantize(_swapped(), MXFP8, torch.float32, out=_x(4, 64, dtype=torch.float16)),
    ),
    "out with columns apart": (
        "UNSUPPORTED",
        lambda: kernels.dequantize(_swapped(), MXFP8, torch.float32, out=_x(64, 4).t()),
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why: str) -> None:
    code, call = REFUSED[why]
    with pytest.raises(TransaxleError) as refused:
        call()
    assert refused.value.code == code


def test_all_that_is_wrong_with_buffers_is_said_at_once() -> None:
    wrong = _swapped(data=_x(4, 64), scale_inv=None)
    with pytest.raises(TransaxleError) as refused:
        kernels.quantize(_x(4, 64), MXFP8, out=wrong)
    assert sorted(refusal.code for refusal in refused.value.refusals) == ["DTYPE_MISMATCH", "MISSING_TENSOR"]


def test_the_cpu_needs_no_triton() -> None:
    script = """
        import sys

        sys.modules["triton"] = None  # importing it is an ImportError, and looking for it finds nothing
        import torch
        from transaxle.encodings.encoding import MXFP8
        from transaxle.quant import kernels

        made = kernels.quantize(torch.full((2, 64), 3.0), MXFP8, columnwise=True)
        assert kernels.dequantize(made, MXFP8, torch.float32).eq(3).all()
        assert sys.modules["triton"] is None
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
