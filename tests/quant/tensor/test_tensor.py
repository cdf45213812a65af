"""What a quantized tensor is: its buffers, its identity, copies into and out of it, pickles."""

from __future__ import annotations

import copy
import io
import pickle
import pickletools

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
    assert isinstance(made, QuantizedTensor)
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
    assert isinstance(shard, QuantizedTensor)
    assert isinstance(other, QuantizedTensor)
    before = shard.dequantize()
    with pytest.raises(TransaxleError) as refused:
        shard.copy_(quantizer.quantize(values(140, 128) * 3))
    assert refused.value.code == "UNEQUAL_COPIES"
    assert torch.equal(before, shard.dequantize())
    shard.copy_(other)
    assert same(shard, other)


def test_a_shard_alone_is_not_quantized_again() -> None:
    shard = Float8Block().quantize(values(200, 128))[10:150].clone()
    with pytest.raises(TransaxleError, match="their scales depend on the other rows"):
        shard.copy_(values(140, 128))


def test_cuts_that_differ_are_not_copied() -> None:
    made = Float8Block().quantize(values(200, 128))
    with pytest.raises(TransaxleError) as refused:
        made[10:20].clone().copy_(made[30:40].clone())
    assert refused.value.code == "BLOCK_MISALIGNED"


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
