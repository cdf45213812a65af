"""`GroupedTensor`, and `m_splits` in every form: what the host refuses, and what is never read from a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.nn.layers import EXPERTS, SPLITS, Unreadable, assert_close, expected, layer, readable, rows, run
from tests.quant.kinds import MORE, raw, same, values
from transaxle.errors import TransaxleError
from transaxle.nn import GroupedTensor
from transaxle.nn.grouped_tensor import splits
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
        assert torch.equal(raw(one.dequantize()), raw(made.weight.dequantize()[place].contiguous()))


# `m_splits` in every form that it is given in, what is refused on the host, and what never leaves the device.

FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "int32": lambda numbers: torch.tensor(numbers, dtype=torch.int32),
    "int64": lambda numbers: torch.tensor(numbers, dtype=torch.int64),
    "device, int32": lambda numbers: Unreadable(torch.tensor(numbers, dtype=torch.int32)),
    "device, int64": lambda numbers: Unreadable(torch.tensor(numbers, dtype=torch.int64)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("numbers", SPLITS, ids=str)
def test_all_forms_are_one(form: str, numbers: list[int]) -> None:
    made = layer()
    x = rows(made)
    assert_close(run(made, x, FORMS[form](numbers)), expected(made, x, numbers), 1e-6)


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("features", [(16, 24), (15, 23)])
def test_the_device_path_never_reads_back(single: bool, features: tuple[int, int]) -> None:
    """Forward and backward with numbers that raise when the host asks for them."""
    made = layer(
        in_features=features[0], out_features=features[1], single_grouped_weight=single, single_grouped_bias=single
    )
    given = Unreadable(torch.tensor([3, 0, 5, 2]))
    found = run(made, rows(made), given)
    assert all(isinstance(one, Unreadable) for one in found.values())  # so what came of the numbers was seen too


@pytest.mark.parametrize("read", ["item", "tolist", "cpu", "numpy", "__index__", "__int__", "__bool__"])
def test_the_detector_detects(read: str) -> None:
    given = Unreadable(torch.tensor([3, 0, 5, 2]))
    one = given.cumsum(0)[1]
    with pytest.raises(AssertionError, match="the host reads it"):
        getattr(one, read)()


def test_a_device_without_numbers_is_enough() -> None:
    """Fake tensors have shapes only: whatever asks for a number raises."""
    with FakeTensorMode():
        made = layer(params_dtype=torch.bfloat16)
        x = torch.randn(12, 16, dtype=torch.bfloat16, requires_grad=True)
        found = made(x, torch.zeros(EXPERTS, dtype=torch.int64))
        found.sum().backward()
        assert found.shape == (12, 24)
        assert x.grad is not None
        assert made.weight3.grad is not None


@pytest.mark.parametrize(
    ("given", "code", "why"),
    [
        ([3, 0, 5], "SHAPE_MISMATCH", "4 numbers, one per expert, not 3"),
        ([3, 0, -1, 2], "SHAPE_MISMATCH", "-1 rows for expert 2"),
        ([3, 0, 8, 2], "SHAPE_MISMATCH", "sums to 13, but the input has only 12"),
        (torch.tensor([3, 0, 5]), "SHAPE_MISMATCH", r"the shape \[4\], one number per expert, not \[3\]"),
        (torch.tensor([[3, 0, 5, 2]]), "SHAPE_MISMATCH", r"\[1, 4\]"),
        (torch.tensor([3, 0, -1, 2]), "SHAPE_MISMATCH", "-1 rows for expert 2"),
        (torch.tensor([3, 0, 8, 2]), "SHAPE_MISMATCH", "sums to 13"),
        (torch.tensor([3.0, 0, 5, 2]), "DTYPE_MISMATCH", "float32"),
        (Unreadable(torch.tensor([3, 0, 5])), "SHAPE_MISMATCH", r"the shape \[4\], one number per expert, not \[3\]"),
        ([3, 0, 5.5, 2], "DTYPE_MISMATCH", "whole numbers"),
        ([True, False, True, True], "DTYPE_MISMATCH", "whole numbers"),
        (list(torch.tensor([True, False, True, True])), "DTYPE_MISMATCH", "whole numbers"),
        ("3052", "DTYPE_MISMATCH", "whole numbers"),
        (None, "DTYPE_MISMATCH", "whole numbers"),
        ([float("nan"), 0, 5, 2], "DTYPE_MISMATCH", "whole numbers"),
    ],
    ids=range(15),
)
def test_what_the_host_sees_to_be_wrong_is_refused(given: Any, code: str, why: str) -> None:
    made = layer()
    with pytest.raises(TransaxleError, match=why) as caught:
        made(rows(made), given)
    assert caught.value.code == code


def test_numbers_of_the_host_are_refused_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for given in ([3, 0, 5, 2], torch.tensor([3, 0, 5, 2])):
        with pytest.raises(TransaxleError, match="m_splits is on the host while a CUDA graph is being capt") as caught:
            splits(given, EXPERTS, 12, torch.device("cuda"))
        assert caught.value.code == "UNSUPPORTED"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ([3, -2, 5, 2], [3, 0, 5, 2]),
        ([3, 0, 50, 2], [3, 0, 9, 0]),
        ([2**40, 1, 1, 1], [12, 0, 0, 0]),
        ([2**62, 2**62, 2**62, 2**62], [12, 0, 0, 0]),
        ([-1, -1, -1, -1], [0, 0, 0, 0]),
    ],
)
def test_wrong_numbers_on_the_device_lead_nowhere_outside(given: list[int], meant: list[int]) -> None:
    """They are not read, so they cannot be refused; rows that exist are all that they reach."""
    made = layer()
    x = rows(made)
    assert_close(run(made, x, Unreadable(torch.tensor(given))), expected(made, x, meant), 1e-6)
    split = splits(Unreadable(torch.tensor(given)), EXPERTS, 12, torch.device("cpu"))
    assert readable(split.offsets).tolist() == torch.tensor(meant).cumsum(0).tolist()
    assert split.counts is None
