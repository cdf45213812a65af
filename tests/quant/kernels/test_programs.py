"""The kernels give the codec's bits: on a CPU, on a GPU, and in Triton's interpreter, where `test_interpreter` runs
this file. There tensors are on the CPU, and the kernels of the device are made to take them.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.cuda import nothing_waits
from tests.quant.kernels.cases import (
    CASES,
    CODES,
    DTYPES,
    GROUPS,
    TABLES,
    WEIGHTS,
    Case,
    alone,
    array,
    bits,
    blocked,
    encoded,
    nearest,
    ordinary,
    strange,
)
from tests.some import some
from transaxle.encodings.arithmetic import codec
from transaxle.encodings.arithmetic.minifloat import power_of_two
from transaxle.encodings.encoding import FLOAT8, FLOAT8_BLOCK, MXFP4, MXFP8, NVFP4, Encoding
from transaxle.quant import kernels
from transaxle.quant.kernels import Components
from transaxle.quant.kernels.components import columnwise_of, swizzle_groups

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HOST, CUDA, INTERPRETER = "host", "cuda", "interpreter"
ON_GPU = pytest.param(CUDA, marks=[pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="a GPU is not interpreted")])
DEVICE = "cpu"
"""Where tensors are; set for each side, as the shapes are."""
SMALL = [(1, 2), (37, 130)]
SHAPES = SMALL
WIDTHS = (0, 1, 512, 1030)
EVERY_TYPE = "TRANSAXLE_EVERY_TYPE"
"""Set where the interpreter, too, is to try every encoding with every type."""
_TYPED = {"float8_block", "mxfp8, columns", "nvfp4"} if INTERPRETED and EVERY_TYPE not in os.environ else {*CASES}
"""Encodings that are tried with every type, one of each way to scale; the others with one: loads know no encoding."""
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")] if INTERPRETED else []
typed = pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in CASES for dtype in DTYPES if name in _TYPED or dtype == DTYPES[0]],
    ids=str,
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test on the CPU's side and on a GPU, or in the interpreter; some only with the programs, or on a GPU."""
    name = metafunc.function.__name__
    sides: list[Any] = [INTERPRETER] if INTERPRETED else [HOST, ON_GPU]
    if name.endswith("_of_a_device") and not INTERPRETED:
        sides = [ON_GPU]
    metafunc.parametrize("_side", [ON_GPU] if name.endswith("_on_a_gpu") else sides, indirect=True)


@pytest.fixture(autouse=True)
def _side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    here = sys.modules[__name__]
    if request.param == CUDA:
        monkeypatch.setattr(here, "DEVICE", "cuda")
        monkeypatch.setattr(here, "SHAPES", [*SMALL, (1, 8192), (129, 34), (1000, 3330), (1024, 2048)])
    if request.param != HOST:
        from transaxle.quant.kernels import device

        monkeypatch.setattr(kernels, "_side", lambda _: device)


def same(got: torch.Tensor | None, expected: NDArray[Any]) -> None:
    """Equal bit for bit; the first difference is named."""
    found, wanted = bits(got), bits(expected)
    assert found.shape == wanted.shape
    wrong = np.argwhere(found != wanted)
    if len(wrong):
        at = tuple(wrong[0])
        pytest.fail(f"{len(wrong)} of {found.size} differ, first at {at}: {found[at]:#x}, expected {wanted[at]:#x}")


@typed
def test_codes_and_scales_are_the_codecs(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    for shape in SHAPES:
        for make in (ordinary, strange):
            x = make(shape, dtype)
            made = kernels.quantize(x.to(DEVICE), case.encoding, over=case.over)
            codes, scales = encoded(case, x)
            same(made.data, codes)
            same(made.scale_inv, scales.reshape(-1) if case.encoding.tile == (0, 0) else scales)
            if case.encoding.has_global:
                np.testing.assert_array_equal(array(some(made.amax))[0], codec.amax(array(x)))


@typed
def test_values_are_the_codecs(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    for shape in SHAPES:
        made = kernels.quantize(strange(shape, torch.float32).to(DEVICE), case.encoding, over=case.over, amax=None)
        factor = 1.0
        if made.amax is not None:
            made.amax.fill_(3.7)
            factor = float(np.float32(3.7)) / (6.0 * case.encoding.scale_max)
        scales = array(some(made.scale_inv))
        scales = scales.reshape(1, 1) if case.encoding.tile == (0, 0) else scales
        expected = codec.decode_box(
            case.encoding, bits(made.data), scales, factor=factor, dtype=CODES[dtype], path="numpy"
        )
        same(kernels.dequantize(made, case.encoding, dtype), expected)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "nvfp4, 16x16"])
def test_rowwise_and_columnwise_codes_come_from_one_pass(name: str) -> None:
    encoding, over = CASES[name].encoding, CASES[name].over
    turned = some(columnwise_of(encoding))
    for shape in SHAPES:
        x = strange(shape, torch.bfloat16)
        if encoding.has_global:
            x = torch.where(torch.isfinite(x), x, 1)  # of a NaN amax all codes are the same
        both = kernels.quantize(x.to(DEVICE), encoding, columnwise=True, over=over)
        alone = kernels.quantize(x.to(DEVICE), encoding, rowwise=False, columnwise=True, over=over)
        for made, codes, scales in (
            (both, both.data, both.scale_inv),
            (both, both.columnwise_data, both.columnwise_scale_inv),
            (alone, alone.columnwise_data, alone.columnwise_scale_inv),
        ):
            wanted = encoded(Case(encoding if codes is both.data else turned, over), x)
            same(codes, wanted[0])
            same(scales, wanted[1])
            assert (made.data is None) == (made is alone)
        factor = 1.0 if alone.amax is None else alone.amax.item() / (6.0 * 448.0)
        expected = codec.decode_box(turned, *encoded(Case(turned, over), x), factor=factor, dtype="F32")
        same(kernels.dequantize(alone, encoding, torch.float32), expected)


@pytest.mark.parametrize("code", ["F8_E4M3", "F8_E5M2"])
def test_every_bfloat16_by_scales(code: str) -> None:
    """All 65536 patterns; what is no NaN against a search of the table of codes."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).reshape(256, 256)
    encoding = replace(FLOAT8, code=code)
    for scale in (0.37, 2.0**127, 2.0**-126) if INTERPRETED else (1.0, 0.37, 2.0**-20, 3.0e5, 2.0**127, 2.0**-126):
        made = kernels.quantize(x.to(DEVICE), encoding, scale=scale)
        with np.errstate(all="ignore"):
            product = x.float().numpy() * np.float32(scale)
            np.testing.assert_array_equal(array(some(made.scale_inv)), [np.float32(1) / np.float32(scale)])
        wanted = nearest(product, code)
        sign = np.signbit(x.float().numpy()).astype(np.uint8) << 7
        same(made.data, np.where(np.isnan(product), 0x7F | sign, wanted).astype(np.uint8))


@pytest.mark.parametrize("encoding", [MXFP8, MXFP4], ids=lambda encoding: encoding.name)
def test_every_code_by_every_power_of_two(encoding: Encoding) -> None:
    table = TABLES[encoding.code].astype(np.float32)
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    elements = codes if encoding.code_bits == 8 else np.stack([codes & 15, codes >> 4], -1).reshape(256, 512)
    scales = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, elements.shape[1] // 32))
    parts = Components(
        data=torch.from_numpy(codes).view(torch.float8_e4m3fn if encoding is MXFP8 else torch.uint8).to(DEVICE),
        scale_inv=torch.from_numpy(scales).view(torch.float8_e8m0fnu).to(DEVICE),
    )
    with np.errstate(all="ignore"):
        product = table[elements] * power_of_two(np.arange(256, dtype=np.uint8))[:, None]
    for dtype in DTYPES[:1] if INTERPRETED else DTYPES:
        got = kernels.dequantize(parts, encoding, dtype)
        same(got, codec.decode_box(encoding, codes, scales, dtype=CODES[dtype]))
        plain = torch.from_numpy(product).to(dtype)
        sound = ~np.isnan(product)
        np.testing.assert_array_equal(bits(got)[sound], bits(plain)[sound])


def test_every_nibble_by_every_scale_of_nvfp4() -> None:
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, 32))
    for most in (3.7, 1e-38) if DEVICE == "cpu" else (1.0, 3.7, 0.0, 1e-38, 3e38, float("inf"), float("nan")):
        parts = Components(
            data=torch.from_numpy(codes).to(DEVICE),
            scale_inv=torch.from_numpy(scales).view(torch.float8_e4m3fn).to(DEVICE),
            amax=torch.tensor([most], device=DEVICE),
        )
        factor = float(np.float32(most)) / 2688
        for dtype in DTYPES[:1] if DEVICE == "cpu" else DTYPES:
            expected = codec.decode_box(NVFP4, codes, scales, factor=factor, dtype=CODES[dtype])
            same(kernels.dequantize(parts, NVFP4, dtype), expected)


@pytest.mark.parametrize("code", ["F8_E4M3", "F8_E5M2"])
def test_any_float32_as_scale(code: str) -> None:
    """Every code by bit patterns of float32, subnormals, infinities and NaN among them."""
    encoding = replace(FLOAT8_BLOCK, code=code, tile=(1, 128))
    rows = 64 if DEVICE == "cpu" else 65536
    scales = np.random.default_rng(3).integers(0, 2**32, (rows, 2), dtype=np.uint32)
    scales[:4, 0] = [0, 1, 0x7F800000, 0x80000000]
    codes = np.tile(np.arange(256, dtype=np.uint8), (rows, 1))
    parts = Components(
        data=torch.from_numpy(codes).view(torch.float8_e4m3fn if code == "F8_E4M3" else torch.float8_e5m2).to(DEVICE),
        scale_inv=torch.from_numpy(scales.view(np.float32)).to(DEVICE),
    )
    for dtype in DTYPES:
        expected = codec.decode_box(encoding, codes, scales.view(np.float32), dtype=CODES[dtype])
        same(kernels.dequantize(parts, encoding, dtype), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_exponent_boundary(dtype: torch.dtype) -> None:
    """Tiles whose amax is 448 and 6 times each power of two, and its neighbours on either side."""
    powers = np.arange(-149, 128, dtype=np.float64)
    edges = (np.array([[448.0], [6.0], [1.0], [1.75]]) * np.exp2(powers)).reshape(-1)
    edges = edges[edges < 3.3e38].astype(np.float32)
    around = np.concatenate([np.nextafter(edges, np.float32(0)), edges, np.nextafter(edges, np.float32(np.inf))])
    x = torch.from_numpy(around).to(dtype)[:, None] * torch.linspace(1, -1, 32)[None].to(dtype)
    for encoding in (MXFP8, MXFP4, NVFP4, replace(FLOAT8_BLOCK, tile=(1, 32), power_of_two=False)):
        x = x[:64] if DEVICE == "cpu" else x
        made = kernels.quantize(x.to(DEVICE), encoding)
        codes, scales = encoded(Case(encoding), x)
        same(made.scale_inv, scales)
        same(made.data, codes)


def test_views_with_strides_and_given_buffers() -> None:
    wide = ordinary((70, 300), torch.bfloat16).to(DEVICE)
    for x in (wide[3:50, 5:227], wide.t(), wide[::2, ::3][:, :98], wide[:, 7:8].expand(70, 64)):
        for encoding in (NVFP4,) if INTERPRETED else (FLOAT8, MXFP8, NVFP4):
            codes, scales = encoded(Case(encoding), x)
            made = kernels.quantize(x, encoding)
            same(made.data, codes)
            same(made.scale_inv, scales.reshape(-1) if encoding is FLOAT8 else scales)
    x = wide[:40, :64]
    codes, scales = encoded(Case(MXFP8), x)
    room = torch.full((40, 100), 0x55, dtype=torch.uint8, device=DEVICE)
    grid = torch.full((40, 8), 0x55, dtype=torch.uint8, device=DEVICE)
    given = Components(data=room.view(torch.float8_e4m3fn)[:, 16:80], scale_inv=grid.view(torch.float8_e8m0fnu)[:, 2:4])
    made = kernels.quantize(x, MXFP8, out=given)
    assert made.data is given.data
    same(made.data, codes)
    same(made.scale_inv, scales)
    for left in (room[:, :16], room[:, 80:], grid[:, :2], grid[:, 4:]):
        assert (array(left) == 0x55).all()
    place = torch.full((40, 80), 7.0, device=DEVICE)
    got = kernels.dequantize(made, MXFP8, torch.float32, out=place[:, 8:72])
    assert got.data_ptr() == place[:, 8:72].data_ptr()
    same(got, codec.decode_box(MXFP8, codes, scales, dtype="F32"))
    assert (array(torch.cat([place[:, :8], place[:, 72:]], 1)) == 7).all()


def test_an_amax_or_a_scale_can_be_given() -> None:
    x = ordinary((40, 64), torch.bfloat16)
    for most in (100.0, torch.tensor([100.0], device=DEVICE)):
        for case in (CASES["float8"], CASES["nvfp4"], CASES["float8, E5M2"]):
            made = kernels.quantize(x.to(DEVICE), case.encoding, amax=most)
            codes, scales = encoded(case, x, 100.0)
            same(made.data, codes)
            same(made.scale_inv, scales.reshape(-1) if case.encoding.tile == (0, 0) else scales)
    halves = [kernels.quantize(half.to(DEVICE), NVFP4, amax=kernels.amax(x.to(DEVICE))) for half in x.split(20)]
    together = np.concatenate([bits(half.data) for half in halves])
    np.testing.assert_array_equal(together, encoded(CASES["nvfp4"], x)[0])


def test_amax() -> None:
    for dtype in DTYPES:
        for shape in SHAPES[1:] if INTERPRETED else [*SHAPES, (300, 1)]:
            x = ordinary(shape, dtype)
            np.testing.assert_array_equal(array(kernels.amax(x.to(DEVICE))), [x.float().abs().max().item()])
            x[-1, -1] = float("-inf")
            assert kernels.amax(x.to(DEVICE)).item() == float("inf")
            x[0, 0] = float("nan")
            assert np.isnan(kernels.amax(x.to(DEVICE)).item())
    assert kernels.amax(torch.empty(0, 7, device=DEVICE)).item() == 0


def test_empty_matrices() -> None:
    for shape in ((0, 32), (3, 0), (0, 0)):
        x = torch.empty(shape, device=DEVICE)
        for case in CASES.values():
            made = kernels.quantize(x, case.encoding, over=case.over)
            assert tuple(kernels.dequantize(made, case.encoding, torch.bfloat16).shape) == shape
        shard = kernels.quantize(x, FLOAT8, amax=3.5)
        assert some(shard.scale_inv).item() == np.float32(1) / np.float32(128)


@pytest.mark.parametrize("groups", [0, 2])
def test_no_rows_and_no_groups(groups: int) -> None:
    ends = torch.zeros(groups, dtype=torch.int32, device=DEVICE)
    for rows in (0, 5):
        x = torch.ones((rows, 64), device=DEVICE)
        made = kernels.quantize_groups(x, ends, MXFP8, swizzled=True)
        assert not some(made.scale_inv).view(torch.uint8).any()
        assert not swizzle_groups(torch.ones((rows, 2), dtype=torch.uint8, device=DEVICE), ends).any()
        codes, scales = kernels.quantize_rows(x, ends, FLOAT8)
        assert (tuple(codes.shape), tuple(scales.shape)) == ((rows, 64), (rows,))


@pytest.mark.parametrize("name", CASES)
def test_groups_come_out_as_if_alone(name: str) -> None:
    case = CASES[name]
    for seed, ends in enumerate(GROUPS[:1] if INTERPRETED else GROUPS):
        x = ordinary((37, 130), DTYPES[seed % len(DTYPES)], seed)
        offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        made = kernels.quantize_groups(x.to(DEVICE), offsets, case.encoding, over=case.over)
        for group, (start, stop) in enumerate(pairwise([0, *ends])):
            found = alone(made, case.encoding, ends, group)
            if start == stop:
                wanted = kernels.quantize(x[start:stop].to(DEVICE), case.encoding, over=case.over).present()
                assert found.keys() == wanted.keys()
                assert all(found[buffer].shape == one.shape for buffer, one in wanted.items())
                same(found["scale_inv"], bits(wanted["scale_inv"]))
                continue
            codes, scales = encoded(case, x[start:stop])
            same(found["data"], codes)
            same(found["scale_inv"], scales.reshape(-1) if case.encoding.tile == (0, 0) else scales)
            if case.encoding.has_global:
                np.testing.assert_array_equal(array(found["amax"])[0], codec.amax(array(x[start:stop])))


@pytest.mark.parametrize("case", [Case(MXFP8), Case(NVFP4, WEIGHTS)], ids=str)
def test_groups_of_both_directions(case: Case) -> None:
    for ends in GROUPS[:1] if INTERPRETED else GROUPS:
        x = strange((37, 130), torch.bfloat16)
        offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        both = kernels.quantize_groups(x.to(DEVICE), offsets, case.encoding, over=case.over, columnwise=True)
        lone = kernels.quantize_groups(
            x.to(DEVICE), offsets, case.encoding, over=case.over, rowwise=False, columnwise=True
        )
        start = 0
        for group, stop in enumerate(ends):
            wanted = kernels.quantize(
                x[start:stop].to(DEVICE), case.encoding, over=case.over, columnwise=True
            ).present()
            found = alone(both, case.encoding, ends, group)
            found_lone = alone(lone, case.encoding, ends, group)
            assert found.keys() == wanted.keys()
            for buffer, one in wanted.items():
                same(found[buffer], bits(one))
                if buffer in found_lone:
                    same(found_lone[buffer], bits(one))
            assert len(found_lone) == 2 + case.encoding.has_global
            start = stop


@pytest.mark.parametrize("ends", GROUPS[:1] if INTERPRETED else GROUPS[::2], ids=str)
def test_rows_come_out_as_if_alone(ends: list[int]) -> None:
    """Of groups only; the width is of several blocks, of part of one, and (on a GPU) none."""
    for width, dtype in (
        ((1030, torch.bfloat16), (32, torch.float32)) if INTERPRETED else product(WIDTHS[DEVICE == "cpu" :], DTYPES)
    ):
        for case in (CASES["float8"], CASES["float8, E5M2"]):
            x = strange((37, width), dtype) if width else torch.empty((37, 0), dtype=dtype)
            offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
            codes, scales = kernels.quantize_rows(x.to(DEVICE), offsets, case.encoding)
            wanted = [encoded(case, row[None]) for row in x[: ends[-1]]]
            if wanted and width:
                same(codes[: ends[-1]], np.concatenate([one[0] for one in wanted]))
                same(scales[: ends[-1]], np.concatenate([one[1].reshape(-1) for one in wanted]))


@pytest.mark.parametrize("ends", [[5, 5, 37], [3, 132, 260, 260], [0, 0]], ids=str)
def test_swizzled_scales_are_those_of_each_group_padded_by_itself(ends: list[int]) -> None:
    """What is padded is zero, and nothing of a group is where the next one begins."""
    case, rows = CASES["mxfp8"], max(37, ends[-1] + 3)
    for columns in (160,) if INTERPRETED else (32, 64, 160, 384):
        x = strange((rows, columns), torch.bfloat16)
        offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        made = kernels.quantize_groups(x.to(DEVICE), offsets, case.encoding, swizzled=True)
        plain = kernels.quantize_groups(x.to(DEVICE), offsets, case.encoding)
        assert made.scale_inv is not None
        assert plain.scale_inv is not None
        same(some(made.data)[: ends[-1]], bits(some(plain.data)[: ends[-1]]))
        scales = plain.scale_inv.view(torch.uint8).cpu()
        parts = [blocked(scales[start:stop]) for start, stop in pairwise([0, *ends])]
        flat = made.scale_inv.view(torch.uint8).cpu().flatten()
        wanted = torch.cat(parts)
        assert torch.equal(flat[: len(wanted)], wanted)
        assert not flat[len(wanted) :].any()
        same(swizzle_groups(plain.scale_inv, offsets), bits(made.scale_inv))


@pytest.mark.parametrize("width", [1, 130, 512, 1030])
def test_values_of_rows_with_a_scale_each(width: int) -> None:
    x, ends = strange((37, width), torch.bfloat16), torch.tensor([37], dtype=torch.int32, device=DEVICE)
    for case in (CASES["float8"], CASES["float8, E5M2"]):
        codes, scales = kernels.quantize_rows(x.to(DEVICE), ends, case.encoding)
        by_row, grid = replace(case.encoding, tile=(1, 0)), scales.view(-1, 1)
        for dtype in DTYPES[:1] if INTERPRETED else DTYPES:
            made = kernels.dequantize(Components(codes, grid), by_row, dtype)
            same(made, codec.decode_box(by_row, array(codes), array(grid), dtype=CODES[dtype], path="numpy"))


def test_wrong_offsets_write_nothing_outside_of_a_device() -> None:
    x = ordinary((37, 64), torch.bfloat16).to(DEVICE)
    room = torch.full((64, 64), 0x55, dtype=torch.uint8, device=DEVICE)
    grid = torch.full((32, 1), 7.0, device=DEVICE)
    given = Components(data=room.view(torch.float8_e4m3fn)[8:45], scale_inv=grid[8:12])
    for ends in ([40, -3, 99, 12], [37, 0, 37, 0], [-1, -2, -3, -4]):
        offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        kernels.quantize_groups(x, offsets, FLOAT8_BLOCK, out=given)
        assert (array(torch.cat([room[:8], room[45:]])) == 0x55).all()
        assert (array(torch.cat([grid[:8], grid[12:]])) == 7).all()


@pytest.mark.parametrize("sizes", [(1, 1), (37, 130), (3, 129, 64), (2, 5, 300), (0, 4, 4), (2, 0, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_bytes_are_transposed(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    codes = torch.randint(0, 256, sizes, dtype=torch.uint8)
    strided = codes.mT.contiguous().mT
    for given in (codes, strided):
        made = kernels.transposed(given.to(DEVICE).view(dtype))
        assert made.dtype == dtype
        assert made.is_contiguous()
        assert torch.equal(made.view(torch.uint8).cpu(), codes.mT)


def test_one_graph_serves_all_groups_on_a_gpu() -> None:
    x = strange((256, 384), torch.bfloat16).to(DEVICE)
    for name, case in CASES.items():
        offsets = torch.tensor([64, 128, 192, 256], dtype=torch.int32, device=DEVICE)
        made = kernels.quantize_groups(x, offsets, case.encoding, over=case.over)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with nothing_waits(), torch.cuda.graph(graph):
            kernels.quantize_groups(x, offsets, case.encoding, over=case.over, out=made)
        for ends in ([0, 0, 256, 256], [1, 100, 101, 250]):
            offsets.copy_(torch.tensor(ends, dtype=torch.int32))
            graph.replay()
            fresh = kernels.quantize_groups(x, offsets, case.encoding, over=case.over)
            for group in range(len(ends)):
                wanted = alone(fresh, case.encoding, ends, group)
                for buffer, found in alone(made, case.encoding, ends, group).items():
                    assert torch.equal(found.view(torch.uint8), wanted[buffer].view(torch.uint8)), (name, buffer)


def test_the_chips_conversions_round_as_the_bits_do_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every float32 there is, through both: to E4M3, E5M2, and (as products with 1) to bfloat16."""
    from transaxle.quant.kernels import device

    if torch.cuda.get_device_capability() < device.HOPPER:
        pytest.skip("this chip's conversions are not used")
    narrow = replace(FLOAT8_BLOCK, tile=(1, 1))
    for part in range(16):
        patterns = torch.arange(part << 28, (part + 1) << 28, device=DEVICE).to(torch.int32).view(1 << 14, 1 << 14)
        x = patterns.view(torch.float32)
        ones = torch.full_like(patterns, 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
        seen = []
        for native in (True, False):
            monkeypatch.setattr(device, "_native", lambda _, native=native: native)
            made = [kernels.quantize(x, replace(FLOAT8, code=code), scale=1.0).data for code in ("F8_E4M3", "F8_E5M2")]
            made.append(kernels.dequantize(Components(ones, x), narrow, torch.bfloat16))
            seen.append(made)
        for chip, plain in zip(*seen, strict=True):
            assert chip is not None
            whole = torch.int16 if chip.dtype == torch.bfloat16 else torch.uint8
            assert torch.equal(chip.view(whole), some(plain).view(whole))


def test_nothing_waits_and_all_can_be_captured_on_a_gpu() -> None:
    first, second = (strange((256, 384), torch.bfloat16, seed).to(DEVICE) for seed in (1, 2))
    x = first.clone()
    for name, case in CASES.items():
        made = kernels.quantize(x, case.encoding, over=case.over)
        values = kernels.dequantize(made, case.encoding, torch.bfloat16)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with nothing_waits(), torch.cuda.graph(graph):
            kernels.quantize(x, case.encoding, over=case.over, out=made)
            kernels.dequantize(made, case.encoding, torch.bfloat16, out=values)
        x.copy_(second)
        graph.replay()
        codes, _ = encoded(case, second)
        same(made.data, codes)
        fresh = kernels.dequantize(made, case.encoding, torch.bfloat16)
        assert torch.equal(values.view(torch.int16), fresh.view(torch.int16)), name
        x.copy_(first)


def test_more_elements_than_an_int32_counts_on_a_gpu() -> None:
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free memory")
    x = torch.randn(70_016, 32_768, dtype=torch.bfloat16, device=DEVICE)
    tail = x[-128:]
    x[-1, -1] = 1000
    assert kernels.amax(x).item() == 1000
    for encoding in (FLOAT8_BLOCK, MXFP8, NVFP4):
        made = kernels.quantize(x, encoding, amax=1000.0 if encoding.has_global else None)
        codes, scales = encoded(Case(encoding), tail, 1000.0 if encoding.has_global else None)
        same(some(made.data)[-128:], codes)
        same(some(made.scale_inv)[-len(scales) :], scales)
        values = kernels.dequantize(made, encoding, torch.bfloat16)
        factor = 1000.0 / 2688 if encoding.has_global else 1.0
        same(values[-128:], codec.decode_box(encoding, codes, scales, factor=factor))
        del made, values
