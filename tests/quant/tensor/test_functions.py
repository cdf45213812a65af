"""Torch functions that look at storage, and what keeps tensors between forward and backward."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from tests.live.ranks import run
from tests.quant.kinds import MORE, raw, same, values
from transaxle.errors import TransaxleError
from transaxle.quant import NVFP4BlockScaling, QuantizedTensor, Quantizer, quantize_
from transaxle.quant.quantizers import ROUNDING

kinds = pytest.mark.parametrize("quantizer", MORE.values(), ids=MORE.keys())


def _flipped(rank: int, world: int, tensor: QuantizedTensor) -> bool:
    """In another process: flip each bit of the codes."""
    tensor.components["data"].view(torch.uint8).bitwise_not_()
    return bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def test_processes_share_codes() -> None:
    made = MORE["nvfp4"].quantize(values(64, 64))
    before = raw(made.components["data"]).clone()
    assert not made.is_shared()  # type: ignore[no-untyped-call]
    assert made.share_memory_() is made  # type: ignore[no-untyped-call]
    assert made.is_shared()
    assert run(1, _flipped, made) == [True]
    assert torch.equal(raw(made.components["data"]), ~before)


@kinds
def test_modules_change_dtype_and_keep_codes(quantizer: Quantizer) -> None:
    model = nn.Linear(64, 48).bfloat16()
    quantize_(model, quantizer)
    assert isinstance(model.weight, QuantizedTensor)
    before = model.weight.detach().clone()
    model.float()
    assert isinstance(model.weight, QuantizedTensor)
    assert isinstance(before, QuantizedTensor)
    assert same(model.weight, before)
    assert model.weight.dtype == model(torch.ones(2, 64)).dtype == torch.float32
    assert model.weight.untyped_storage().nbytes() == 0
    assert torch.equal(model.weight.dequantize(), before.dequantize(torch.float32))


@kinds
def test_data_that_is_set_is_there(quantizer: Quantizer) -> None:
    model = nn.Linear(64, 48).bfloat16()
    quantize_(model, quantizer)
    other = quantizer.quantize(values(48, 64, seed=4))
    model.weight.data = other
    assert isinstance(model.weight, QuantizedTensor)
    assert same(model.weight, other)
    if not model.weight.state:
        model.weight.data = values(48, 64, seed=5)
        assert same(model.weight, quantizer.quantize(values(48, 64, seed=5)))


@kinds
def test_what_is_kept_for_backward_are_codes(quantizer: Quantizer) -> None:
    """Activation offload copies what is kept, bit for bit; hooks that keep plain tensors only get the values."""
    weight = nn.Parameter(quantizer.quantize(values(48, 64)))
    x, kept = values(3, 64).requires_grad_(), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.to("cpu", copy=True))
        return kept[-1]

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu", copy=True)

    def gradient(*hooks: Any) -> torch.Tensor:
        with saved_tensors_hooks(*hooks) if hooks else save_on_cpu():
            made = nn.functional.linear(x, weight)
        found = torch.autograd.grad(made.float().square().sum(), (x,))[0]
        assert isinstance(weight, QuantizedTensor)
        rounding = weight.state.get(ROUNDING)
        if rounding is not None:
            assert rounding[1] == 1  # counted here, not in a copy
            rounding[1] = 0
        return found

    wanted = gradient(lambda tensor: tensor, lambda tensor: tensor)
    assert torch.equal(gradient(), wanted)
    assert torch.equal(gradient(pack, unpack), wanted)
    codes = [tensor for tensor in kept if isinstance(tensor, QuantizedTensor)]
    assert isinstance(weight, QuantizedTensor)
    assert len(codes) == 1
    assert same(codes[0], weight)
    with pytest.raises(TransaxleError) if quantizer.multiplies_codes else nullcontext():
        assert torch.equal(
            gradient(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor), unpack), wanted
        )


@pytest.mark.parametrize("quantizer", [*MORE.values(), NVFP4BlockScaling()])
@pytest.mark.parametrize("shape", [(32, 64), (2, 16, 64)])
def test_an_output_may_be_changed_in_place(quantizer: Quantizer, shape: tuple[int, ...]) -> None:
    """Models scale what a linear layer gives (`y *= …`), and autograd follows."""
    grads = []
    for in_place in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(64, 48, bias=False).bfloat16()
        quantize_(model, quantizer)
        output = model(values(32, 64).view(shape).requires_grad_())
        if in_place:
            output *= 3
        else:
            output = output * 3
        output.float().square().sum().backward()
        assert model.weight.grad is not None
        grads.append(model.weight.grad)
    assert torch.equal(*grads)
