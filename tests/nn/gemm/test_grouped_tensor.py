"""The grouped parameter: one buffer, N members that are views of it with scales of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.nn.layers import EXPERTS, layer
from tests.quant.kinds import MORE, raw, same, values
from transaxle.errors import TransaxleError
from transaxle.nn import GroupedTensor
from transaxle.quant import QuantizedTensor, kernels

SHAPE = (70, 64)
kinds = pytest.mark.parametrize("kind", MORE)


def _members(kind: str) -> list[QuantizedTensor]:
    """Matrices whose scales differ, each quantized by itself."""
    return [MORE[kind].quantize(values(*SHAPE, seed=place) * 2**place) for place in range(EXPERTS)]


@pytest.fixture
def dequantized(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls that made values of codes."""
    calls: list[Any] = []
    monkeypatch.setattr(kernels, "dequantize", lambda *a, **_: calls.append(a))
    monkeypatch.setattr(QuantizedTensor, "dequantize", lambda *a, **_: calls.append(a))
    return calls


@kinds
def test_members_have_codes_and_scales_of_their_own(kind: str, dequantized: list[Any]) -> None:
    """Stacked and split again without dequantizing; what is written into a member is in the buffer."""
    members = _members(kind)
    made = GroupedTensor.stack(members)
    assert made.num_tensors == EXPERTS
    assert made.quantizer == MORE[kind]
    for split in (made.quantized_tensors, made.split_into_quantized_tensors()):
        assert all(isinstance(one, QuantizedTensor) and same(one, two) for one, two in zip(split, members, strict=True))
    data, part = made.data, made.quantized_tensors[2]
    assert isinstance(data, QuantizedTensor)
    assert isinstance(part, QuantizedTensor)
    assert part.components["data"].untyped_storage().data_ptr() == data.components["data"].untyped_storage().data_ptr()
    other = MORE[kind].quantize(values(*SHAPE, seed=9))
    part.copy_(other)
    after = made.quantized_tensors
    for place, one in enumerate(after):
        assert isinstance(one, QuantizedTensor)
        assert same(one, other if place == 2 else members[place])
    assert dequantized == []


@kinds
def test_a_new_one_is_of_zeros_in_one_buffer(kind: str) -> None:
    made = GroupedTensor.make_grouped_tensor(EXPERTS, SHAPE, quantizer=MORE[kind], dtype=torch.bfloat16)
    assert not any(one.dequantize().any() for one in made.quantized_tensors if isinstance(one, QuantizedTensor))
    wanted = _members(kind)
    for one, two in zip(made.quantized_tensors, wanted, strict=True):
        one.copy_(two)
    for one, two in zip(made.quantized_tensors, wanted, strict=True):
        assert isinstance(one, QuantizedTensor)
        assert same(one, two)


def test_plain_ones_are_the_same_without_codes() -> None:
    made = GroupedTensor.make_grouped_tensor(3, (4, 5), dtype=torch.float64)
    assert made.quantizer is None
    made.quantized_tensors[1].fill_(7)
    assert made.data.dtype == torch.float64
    assert made.data.sum() == 7 * 20
    parts = [torch.arange(6.0).view(2, 3) + n for n in range(3)]
    stacked = GroupedTensor.stack(parts)
    assert torch.equal(stacked.data, torch.stack(parts))
    assert all(torch.equal(one, two) for one, two in zip(stacked.split_into_quantized_tensors(), parts, strict=True))
    with pytest.raises(TransaxleError, match=r"expected a tensor \[tensors, rows, columns\], got \[2, 3\]"):
        GroupedTensor(parts[0])


@kinds
def test_the_weight_of_a_layer_is_one(kind: str) -> None:
    made = layer(single_grouped_weight=True, in_features=64, params_dtype=torch.bfloat16, recipe=MORE[kind])
    grouped = made.grouped_weight
    assert grouped.data is made.weight
    assert grouped.quantizer == MORE[kind]
    for place, one in enumerate(grouped.quantized_tensors):
        assert isinstance(one, QuantizedTensor)
        assert torch.equal(raw(one.dequantize()), raw(made.weight.dequantize()[place].contiguous()))
