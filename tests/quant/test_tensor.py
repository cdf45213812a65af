"""Quantized matrices and stacks: buffers, identity, views, copies into and out of them, pickles."""

from __future__ import annotations

import copy
import io
import pickle
import pickletools
from unittest.mock import Mock

import pytest
import torch

from tests.quant.kinds import KINDS, MORE, raw, same, values
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
    kernels,
)

kinds = pytest.mark.parametrize("quantizer", MORE.values(), ids=MORE.keys())
five = pytest.mark.parametrize("quantizer", KINDS.values(), ids=KINDS.keys())
SHAPE = (70, 144)


@five
def test_components_are_plain_compact_and_in_order(quantizer: Quantizer) -> None:
    made = quantizer.quantize(values(*SHAPE))
    names = ["data", "scale_inv", "amax"] if isinstance(quantizer, NVFP4) else ["data", "scale_inv"]
    assert list(made.components) == names
    assert all(type(buffer) is torch.Tensor and buffer.is_contiguous() for buffer in made.components.values())
    assert made.shape == SHAPE
    assert made.dtype == torch.bfloat16
    assert made.quantizer == quantizer


@kinds
def test_from_components_gives_the_tensor_back(quantizer: Quantizer) -> None:
    made = quantizer.quantize(values(*SHAPE))
    again = from_components(quantizer, made.components, SHAPE, torch.bfloat16)
    assert same(made, again)
    assert torch.equal(made.dequantize(), again.dequantize())


def test_from_components_tells_all_that_is_wrong() -> None:
    parts = MXFP8().quantize(values(*SHAPE)).components
    parts["more"] = parts["data"]
    parts["data"] = parts["data"][1:]
    parts["scale_inv"] = parts["scale_inv"].float()
    with pytest.raises(TransaxleError) as refused:
        from_components(MXFP8(), parts, SHAPE, torch.bfloat16)
    assert [one.code for one in refused.value.refusals] == ["SHAPE_MISMATCH", "DTYPE_MISMATCH", "UNEXPECTED_TENSOR"]


@five
def test_there_is_no_memory_to_share(quantizer: Quantizer) -> None:
    made = quantizer.quantize(values(*SHAPE))
    assert made.data_ptr() == 0
    assert made.untyped_storage().nbytes() == 0
    assert made.untyped_storage().device == made.device


@kinds
def test_copies_share_nothing(quantizer: Quantizer) -> None:
    made = torch.nn.Parameter(quantizer.quantize(values(*SHAPE)), requires_grad=False)
    before = {name: buffer.clone() for name, buffer in made.components.items()}  # type: ignore[attr-defined]
    for twin in (made.clone(), copy.deepcopy(made), made.to("cpu", copy=True), made[3:9].clone()):
        assert isinstance(twin, QuantizedTensor)
        for buffer in twin.components.values():
            raw(buffer).bitwise_not_()
    assert all(torch.equal(raw(before[name]), raw(buffer)) for name, buffer in made.components.items())  # type: ignore[attr-defined]
    assert isinstance(copy.deepcopy(made), torch.nn.Parameter)


@kinds
def test_pickles_are_buffers_numbers_and_one_function(quantizer: Quantizer) -> None:
    made = torch.nn.Parameter(quantizer.quantize(values(*SHAPE)))
    data = pickle.dumps(made, protocol=2)
    ours = [word for code, word, _ in pickletools.genops(data) if code.name == "GLOBAL" and "transaxle" in str(word)]
    assert ours == ["transaxle.quant.tensor rebuilt"]
    assert b"getattr" not in data
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    for again in (pickle.loads(data), torch.load(file, weights_only=False)):  # noqa: S301 - made above
        assert same(made, again)
        assert again.quantizer == quantizer
        assert again.requires_grad
        assert isinstance(again, torch.nn.Parameter)


@kinds
def test_copying_is_raw_between_tensors_of_one_encoding(quantizer: Quantizer) -> None:
    source, target = quantizer.quantize(values(*SHAPE)), quantizer.quantize(values(*SHAPE, seed=1))
    assert not same(source, target)
    assert target.copy_(source) is target
    assert same(source, target)


@kinds
def test_copying_from_a_plain_tensor_quantizes(quantizer: Quantizer) -> None:
    if isinstance(quantizer, DelayedScaling):
        pytest.skip("its scale depends on what was there")
    target = quantizer.quantize(values(*SHAPE, seed=1))
    target.copy_(values(*SHAPE))
    assert same(target, quantizer.quantize(values(*SHAPE)))


@pytest.mark.parametrize(
    ("quantizer", "dim"), [(Float8CurrentScaling(), 0), (NVFP4(), 0), (Float8Block(), 0), (NVFP4(), 1)], ids=repr
)
def test_a_copy_leaves_no_element_under_another_scale(quantizer: Quantizer, dim: int) -> None:
    target, source = quantizer.quantize(values(256, 128) * 16), quantizer.quantize(values(256, 128))
    before = target.dequantize()
    with pytest.raises(TransaxleError) as refused:
        target.chunk(2, dim)[0].copy_(source.chunk(2, dim)[0])
    assert refused.value.code == "UNEQUAL_COPIES"
    assert torch.equal(before, target.dequantize())


@pytest.mark.parametrize("quantizer", [Float8CurrentScaling(), NVFP4()], ids=["float8", "nvfp4"])
def test_a_shard_takes_no_scale_that_is_of_its_rows_alone(quantizer: Quantizer) -> None:
    """The other rows, on other ranks, would be left under another one."""
    shard, other = (quantizer.quantize(values(200, 128, seed))[10:150].clone() for seed in (0, 1))
    before = shard.dequantize()
    with pytest.raises(TransaxleError) as refused:
        shard.copy_(quantizer.quantize(values(140, 128) * 3))
    assert refused.value.code == "UNEQUAL_COPIES"
    assert torch.equal(before, shard.dequantize())
    shard.copy_(other)
    assert same(shard, other)


def test_rows_that_are_no_whole_tiles_are_not_quantized_copied_or_stacked() -> None:
    made = Float8Block().quantize(values(200, 128))
    with pytest.raises(TransaxleError, match="their scales depend on the other rows"):
        made[10:150].clone().copy_(values(140, 128))
    with pytest.raises(TransaxleError) as refused:
        made[10:20].clone().copy_(made[30:40].clone())
    assert refused.value.code == "BLOCK_MISALIGNED"
    for rows in (slice(0, 100), slice(100, 200)):
        part = Float8Block().quantize(values(256, 128))[rows]
        with pytest.raises(TransaxleError, match="would cut tiles of 128 rows"):
            torch.stack([part, part])


def test_global_scales_that_differ_are_refused_at_merge() -> None:
    for quantizer in (Float8CurrentScaling(), NVFP4()):
        parts: list[torch.Tensor] = [quantizer.quantize(values(8, 32) * factor) for factor in (1, 3)]
        with pytest.raises(TransaxleError) as refused:
            torch.cat(parts)
        assert refused.value.code == "UNEQUAL_COPIES"


@kinds
def test_a_blank_tensor_is_filled_piece_by_piece(quantizer: Quantizer) -> None:
    made, other = quantizer.quantize(values(*SHAPE)), quantizer.quantize(values(*SHAPE) * 16)
    blank = torch.empty_like(made)
    blank[:33].copy_(made[:33])
    blank[33:].copy_(made[33:])
    assert isinstance(blank, QuantizedTensor)
    assert same(blank, made)
    if blank.frame.shared:
        with pytest.raises(TransaxleError):
            blank[:33].copy_(other[:33])
        assert same(blank, made)


def test_rows_outside_the_whole_are_refused() -> None:
    made = Float8Block().quantize(values(*SHAPE))
    with pytest.raises(TransaxleError) as refused:
        made.new_zeros(100, SHAPE[1])[30:].copy_(made)
    assert refused.value.code == "BLOCK_MISALIGNED"


@kinds
def test_reading_leaves_storage_that_can_be_resized(quantizer: Quantizer) -> None:
    """FSDP2 frees what it gathered by resizing its storage."""
    made = quantizer.quantize(values(*SHAPE))
    gathered = {name: buffer.clone() for name, buffer in made.components.items()}
    from_components(quantizer, gathered, SHAPE, torch.bfloat16).dequantize()
    for buffer in gathered.values():
        buffer.untyped_storage().resize_(0)
        assert buffer.untyped_storage().nbytes() == 0


# Stacks of matrices, [E, M, K]: as many matrices, each quantized for itself, alone and under FSDP2.

SHAPES = ((3, 70, 144), (2, 256, 128), (1, 33, 64))
"""Matrices that are no whole tiles, that are, and one alone."""


def stack(count: int, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Matrices of different sizes of numbers."""
    return torch.stack([values(rows, columns, seed=seed + place) * 2**place for place in range(count)])


def matrices(quantizer: Quantizer, x: torch.Tensor) -> list[QuantizedTensor]:
    """Each matrix quantized alone."""
    return [quantizer.quantize(matrix) for matrix in x]


@kinds
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_stack_is_its_matrices(quantizer: Quantizer, shape: tuple[int, int, int]) -> None:
    x = stack(*shape)
    made, alone = quantizer.quantize(x), matrices(quantizer, x)
    assert (made.shape, made.dtype) == (torch.Size(shape), torch.bfloat16)
    for name, buffer in made.components.items():
        assert type(buffer) is torch.Tensor
        assert torch.equal(raw(buffer), torch.stack([raw(one.components[name]) for one in alone]))
    assert torch.equal(made.dequantize(torch.float32), torch.stack([one.dequantize(torch.float32) for one in alone]))
    again = from_components(quantizer, made.components, shape, torch.bfloat16)
    twins = again, torch.stack(list(alone)), copy.deepcopy(made), pickle.loads(pickle.dumps(made))  # noqa: S301 - ours
    for twin in (*twins, torch.cat([made[:1], made[1:]])):
        assert same(made, twin)


@pytest.mark.parametrize("quantizer", [Float8CurrentScaling(), MXFP8()], ids=str)
def test_a_stack_is_dequantized_in_one_go(quantizer: Quantizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch on a GPU, not one for each expert."""
    made = quantizer.quantize(stack(5, 64, 96))
    wanted = torch.stack([one.dequantize() for one in made.unbind()])
    counted = Mock(wraps=kernels.dequantize)
    monkeypatch.setattr(kernels, "dequantize", counted)
    assert torch.equal(made.dequantize(), wanted)
    assert counted.call_count == 1


@kinds
def test_matrices_of_a_stack_are_views(quantizer: Quantizer) -> None:
    made, other = quantizer.quantize(stack(4, 70, 144)), quantizer.quantize(values(70, 144, seed=9))
    views = [*made, made[1], made[-1], made.chunk(2)[1][0], made.unbind(0)[0], made.narrow(0, 1, 2)[1]]
    for view, place in zip(views, (0, 1, 2, 3, 1, 3, 2, 0, 2), strict=True):
        assert same(view, quantizer.quantize(stack(4, 70, 144)[place]))
    for place in range(4):
        made[place].copy_(other)
        assert all(same(one, other) for one in made[: place + 1])
        assert not any(same(one, other) for one in made[place + 1 :])
    made[2:].copy_(values(70, 144, seed=3).expand(2, 70, 144))
    if not made.state:
        assert [same(one, other) for one in made] == [True, True, False, False]
        assert same([*made][3], quantizer.quantize(values(70, 144, seed=3)))


def test_columnwise_codes_that_a_matrix_lost_are_not_left_in_the_stack() -> None:
    made, other = MXFP8(columnwise=True).quantize(stack(2, 64, 64)), MXFP8().quantize(values(64, 64, seed=9))
    made[1].copy_(other)
    assert list(made.components) == ["data", "scale_inv"]
    made = MXFP8(columnwise=True).quantize(stack(2, 64, 64))
    made.copy_(MXFP8().quantize(stack(2, 64, 64, seed=5)))
    assert list(made.components) == ["data", "scale_inv"]


@kinds
def test_blank_stacks_are_filled_matrix_by_matrix(quantizer: Quantizer) -> None:
    made, x = quantizer.quantize(stack(3, 70, 144)), stack(3, 70, 144, seed=7)
    blank = torch.empty_like(made)
    for place in (1, 0, 2):
        blank[place].copy_(made[place])
    assert same(blank, made)
    assert isinstance(blank.zero_(), QuantizedTensor)
    assert not blank.dequantize().any()
    blank = torch.empty_like(made)
    for place in range(3):
        blank[place].copy_(x[place])
    assert same(blank, quantizer.quantize(x))


def test_histories_are_of_each_matrix() -> None:
    quantizer, steps = KINDS["float8 delayed"], [stack(2, 8, 32, seed=seed) * (1 + seed) for seed in range(3)]
    made, alone = quantizer.quantize(steps[0]), matrices(quantizer, steps[0])
    for x in steps[1:]:
        made.quantize_(x)
        for one, matrix in zip(alone, x, strict=True):
            one.quantize_(matrix)
    for one, view in zip(alone, made, strict=True):
        assert same(one, view)
        assert all(torch.equal(one.state[name], view.state[name]) for name in one.state)
