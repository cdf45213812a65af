"""Quantizers against the codec on numpy and written-out formulas: rowwise and columnwise codes, delayed scaling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.live.ranks import run
from tests.quant.kernels.cases import DTYPES, TABLES, array, bits, nearest, strange
from tests.quant.kinds import MORE, raw, same, values
from tests.quant.training import mesh_of
from tests.some import a
from transaxle.encodings.arithmetic import codec
from transaxle.errors import TransaxleError
from transaxle.quant import (
    MXFP8,
    NVFP4,
    DelayedScaling,
    Float8Block,
    Float8CurrentScaling,
    QuantizedTensor,
    Quantizer,
    from_components,
    quantize_,
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
    part = a(QuantizedTensor, made[slice(*rows)])
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


# Usages: codes by columns against formulas written out in numpy, and where they follow from the codes by rows.

NAMES = ["data", "scale_inv", "amax", "columnwise_data", "columnwise_scale_inv"]
ONE = np.float32(1)
RULES = pytest.mark.parametrize("square", [False, True], ids=["1x16", "16x16"])
SHAPES = pytest.mark.parametrize("shape", [(48, 64), (70, 144), (18, 40)], ids=str)


def _written_out(x: torch.Tensor, *, square: bool) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float32]]:
    """Codes [M, K], not packed, scales [M, K / 16] and values of tiles that run along rows, number by number."""
    wide = x.float().numpy()
    (rows, columns), most = wide.shape, np.abs(wide).max()
    spread = min(np.float32(448 * 6) / most, np.finfo(np.float32).max)
    codes, scales = np.empty(wide.shape, np.uint8), np.empty((rows, -(-columns // 16)), np.uint8)
    told = np.empty(wide.shape, np.float32)
    for row in range(rows):
        above = slice(row // 16 * 16, row // 16 * 16 + 16) if square else slice(row, row + 1)
        for tile in range(scales.shape[1]):
            along = slice(16 * tile, 16 * tile + 16)
            wanted = np.abs(wide[above, along]).max() * (spread * (ONE / np.float32(6)))
            block = np.minimum(wanted, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
            with np.errstate(divide="ignore"):
                by = min(ONE / (np.float32(block) * (ONE / spread)), np.finfo(np.float32).max)
            codes[row, along] = nearest(wide[row, along] * by, "F4")
            scales[row, tile] = block.view(np.uint8)
            factor = np.float32(np.float64(block) * (np.float64(most) / (6 * 448)))
            told[row, along] = TABLES["F4"][codes[row, along]].astype(np.float32) * factor
    return codes, scales, told


def _nibbles(packed: torch.Tensor) -> NDArray[np.uint8]:
    data = packed.numpy()
    return np.stack([data & 15, data >> 4], -1).reshape(data.shape[0], -1)


@RULES
@SHAPES
def test_both_usages_by_formulas_written_out(shape: tuple[int, int], square: bool) -> None:
    x = values(*shape)
    made = NVFP4(square=square, columnwise=True).quantize(x)
    parts = made.components
    assert list(parts) == NAMES
    codes, scales, told = _written_out(x, square=square)
    assert np.array_equal(_nibbles(parts["data"]), codes)
    assert np.array_equal(raw(parts["scale_inv"]).numpy(), scales)
    assert np.array_equal(made.dequantize(torch.float32).numpy(), told)
    codes, scales, told = _written_out(x.t().contiguous(), square=square)
    assert np.array_equal(_nibbles(parts["columnwise_data"]), codes.T)
    assert np.array_equal(raw(parts["columnwise_scale_inv"]).numpy(), scales.T)
    assert np.array_equal(made.dequantize(torch.float32, columnwise=True).numpy(), told.T)
    assert torch.equal(made.dequantize(), made.dequantize(columnwise=True)) is square


@RULES
@SHAPES
def test_the_transpose_has_transformer_engines_bytes(shape: tuple[int, int], square: bool) -> None:
    """There columnwise codes are [K, M / 2], packed along the columns, and their scales [K, M / 16]."""
    x = values(*shape)
    made = NVFP4(square=square, columnwise=True).quantize(x)
    turned = made.transposed()
    codes, scales, told = _written_out(x.t().contiguous(), square=square)
    assert np.array_equal(turned.components["data"].numpy(), codes[:, ::2] | (codes[:, 1::2] << 4))
    assert np.array_equal(raw(turned.components["scale_inv"]).numpy(), scales)
    assert turned.components["amax"].item() == x.abs().max().item()
    assert np.array_equal(turned.dequantize(torch.float32).numpy(), told)
    assert same(turned, NVFP4(square=square, columnwise=True).quantize(x.t().contiguous()))
    assert same(turned.transposed(), made)
    if square:
        alone = NVFP4(square=True).quantize(x)
        assert same(alone.transposed(), NVFP4(square=True).quantize(x.t().contiguous()))


def test_stacks_and_mxfp8_are_transposed_too() -> None:
    x = torch.stack([values(64, 96), values(64, 96, seed=3) * 5])
    back = x.transpose(1, 2).contiguous()
    for rule in (MXFP8(columnwise=True), NVFP4(columnwise=True), NVFP4(square=True, columnwise=True)):
        made = rule.quantize(x)
        assert same(made.transposed(), rule.quantize(back))
        one, part = made[1], made[1:]
        assert same(a(QuantizedTensor, one).transposed(), rule.quantize(back[1]))
        assert same(a(QuantizedTensor, part).transposed(), rule.quantize(back[1:]))
        wanted = rule.quantize(back).dequantize().transpose(1, 2)
        assert torch.equal(made.dequantize(columnwise=True), wanted)


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (NVFP4().quantize(values(32, 64)), "UNSUPPORTED"),
        (MXFP8().quantize(values(32, 64)), "UNSUPPORTED"),
        (Float8Block().quantize(values(32, 64)), "UNSUPPORTED"),
        (NVFP4(columnwise=True).quantize(values(33, 64)), "SHAPE_MISMATCH"),
        (NVFP4(columnwise=True).quantize(values(32, 64))[:16], "BLOCK_MISALIGNED"),
        (NVFP4(columnwise=True).quantize(values(32, 64)).view(-1), "BLOCK_MISALIGNED"),
    ],
    ids=["nvfp4", "mxfp8", "blocks", "odd rows", "rows", "a view"],
)
def test_what_has_no_transpose_is_refused(made: QuantizedTensor, code: str) -> None:
    with pytest.raises(TransaxleError) as refused:
        made.transposed()
    assert refused.value.code == code


@RULES
def test_views_and_joins_keep_both_usages(square: bool) -> None:
    made = NVFP4(square=square, columnwise=True).quantize(values(96, 128))
    whole = made.dequantize(columnwise=True)
    rows, columns, box = made[3:77], made[:, 32:112], made[:, 32:112][18:19]
    joined = torch.cat([made[:, :48], made[:, 64:]], 1)
    apart = torch.cat([made, made])
    parts: list[tuple[Any, torch.Tensor]] = [
        (rows, whole[3:77]),
        (columns, whole[:, 32:112]),
        (box, whole[18:19, 32:112]),
        (torch.cat(made.chunk(5)), whole),
        (joined, torch.cat([whole[:, :48], whole[:, 64:]], 1)),
        (apart, torch.cat([whole, whole])),
    ]
    for part, expected in parts:
        assert torch.equal(part.dequantize(columnwise=True), expected)
        assert isinstance(twin := part.clone(), QuantizedTensor)
        assert torch.equal(twin.dequantize(columnwise=True), expected)
    with pytest.raises(TransaxleError, match="tiles of 16 rows"):
        torch.cat([made[:8], made[40:]])
    other = NVFP4(square=square, columnwise=True).quantize(values(96, 128) * 3)
    with pytest.raises(TransaxleError) as refused:
        torch.cat([made, other])
    assert refused.value.code == "UNEQUAL_COPIES"


def test_codes_of_a_stack_follow_matrix_by_matrix() -> None:
    rule, plain = NVFP4(square=True, columnwise=True), NVFP4(square=True)
    x, y = (torch.stack([values(50, 64, seed=seed), values(50, 64, seed=seed + 1) * 7]) for seed in (0, 5))
    made = rule.quantize(x)
    made.copy_(plain.quantize(y))
    assert same(made, rule.quantize(y))
    made = rule.quantize(x)
    one = made[1]
    one.copy_(plain.quantize(y[0]))
    assert same(made, rule.quantize(torch.stack([x[0], y[0]])))
    made.copy_(NVFP4().quantize(y))
    assert list(made.components) == NAMES[:3]


def test_what_does_not_follow_is_cleared() -> None:
    rule, plain = NVFP4(square=True, columnwise=True), NVFP4(square=True)
    x = values(96, 64)
    mixed = torch.cat([plain.quantize(x)[:8], plain.quantize(x)[40:]])  # its squares begin elsewhere
    target = rule.quantize(values(64, 64, seed=1))
    target.copy_(mixed)
    assert list(target.components) == NAMES[:3]
    assert torch.equal(target.dequantize(), mixed.dequantize())
    claimed = from_components(plain, NVFP4().quantize(x).components, (96, 64), torch.bfloat16)
    target = rule.quantize(values(96, 64, seed=1))
    target.copy_(claimed)
    assert list(target.components) == NAMES[:3]
    target = rule.quantize(x[:1])  # two ranks' shards are one row and none
    target.copy_(plain.quantize(x[1:2]))
    assert list(target.components) == NAMES[:3]
    target = rule.quantize(x).new_empty(96, 64)  # type: ignore[assignment]
    target.copy_(plain.quantize(x))
    assert same(target, rule.quantize(x))


def _shard(rank: int, world: int, square: bool) -> None:
    rule, plain = NVFP4(square=square, columnwise=True), NVFP4(square=square)
    x = values(70, 48)
    made = rule.quantize(x.chunk(world)[rank], group=dist.group.WORLD)  # cut at row 35, or at 24 and 48
    part = a(QuantizedTensor, rule.quantize(x).chunk(world)[rank])
    assert same(made, part)
    assert torch.equal(made.dequantize(columnwise=True), part.dequantize(columnwise=True))
    made.copy_(plain.quantize(values(70, 48, seed=1).chunk(world)[rank], group=dist.group.WORLD))
    assert list(made.components) == NAMES[:3]
    torch.manual_seed(0)
    model = nn.Linear(48, 70, bias=False).bfloat16()
    x = model.weight.detach().clone()
    quantize_(model, rule)
    names = [f"weight{suffix}" for suffix in ("", *(f"_{name}" for name in NAMES[1:]))]
    assert list(model.state_dict()) == names
    fully_shard(model, mesh=mesh_of(world))
    shapes = {name: tuple(entry.shape) for name, entry in model.state_dict().items()}
    assert list(shapes) == names
    assert list(shapes.values()) == [(70, 24), (70, 3), (1,), (70, 24), (5, 48)]
    weight: torch.Tensor = model.weight
    assert isinstance(weight, DTensor)
    assert isinstance(full := weight.full_tensor(), QuantizedTensor)
    assert same(full, rule.quantize(x))
    model.unshard()  # type: ignore[operator]
    gathered: Any = model.weight
    assert same(gathered, rule.quantize(x))
    assert same(gathered.transposed(), rule.quantize(x.t().contiguous()))


@RULES
@pytest.mark.parametrize("world", [2, 3])
def test_cuts_inside_a_tile_are_those_of_the_whole(world: int, square: bool) -> None:
    run(world, _shard, square)
