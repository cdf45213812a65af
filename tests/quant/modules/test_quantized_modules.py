"""Models with quantized weights: which layers, their products and gradients, training with masters."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from tests.quant.kinds import KINDS, MORE, same, values
from transaxle.quant import MasterWeights, QuantizedTensor, Quantizer, linear, quantize_, quantized_init

kinds = pytest.mark.parametrize("quantizer", MORE.values(), ids=MORE.keys())
of_values = [(name, quantizer) for name, quantizer in MORE.items() if not quantizer.multiplies_codes]
"""Those whose weights are multiplied by their values; of the others see `tests/quant/nvfp4`."""
five = pytest.mark.parametrize("quantizer", KINDS.values(), ids=KINDS.keys())


@pytest.mark.parametrize("quantizer", [each for _, each in of_values], ids=[name for name, _ in of_values])
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64)], ids=str)
def test_products_and_gradients_are_those_of_the_values(quantizer: Quantizer, shape: tuple[int, ...]) -> None:
    weight = nn.Parameter(quantizer.quantize(values(48, 64)))
    assert isinstance(weight, QuantizedTensor)
    plain = weight.dequantize().detach().requires_grad_()
    bias = [torch.arange(48).bfloat16().requires_grad_() for _ in range(2)]
    x = [torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_() for _ in range(2)]
    made = nn.functional.linear(x[0], weight, bias[0])
    wanted = x[1] @ plain.t() + bias[1]
    assert torch.equal(made, wanted)
    made.float().square().sum().backward()
    wanted.float().square().sum().backward()
    assert weight.grad is not None
    assert type(weight.grad) is torch.Tensor
    assert plain.grad is not None
    assert torch.equal(weight.grad, plain.grad)
    for quantized, usual in (x, bias):
        assert quantized.grad is not None
        assert usual.grad is not None
        assert torch.equal(quantized.grad, usual.grad)


def test_autocast_and_wider_weights_give_the_input_s_dtype() -> None:
    layers = [nn.Linear(64, 48) for _ in range(2)]
    quantize_(layers[0], KINDS["mxfp8"])
    assert isinstance(layers[0].weight, QuantizedTensor)
    layers[1].load_state_dict({"weight": layers[0].weight.dequantize(), "bias": layers[0].bias})
    made = []
    for layer in layers:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made.append(layer(values(3, 64, dtype=torch.float32)))
        made[-1].float().square().sum().backward()
    assert made[0].dtype == made[1].dtype == torch.bfloat16
    torch.testing.assert_close(made[0], made[1], rtol=2e-2, atol=1e-2)
    assert layers[0].weight.grad is not None
    torch.testing.assert_close(layers[0].weight.grad, layers[1].weight.grad, rtol=2e-2, atol=0.5)
    assert layers[0](values(3, 64)).dtype == torch.bfloat16


def test_copies_made_in_the_block_are_quantized() -> None:
    with quantized_init(KINDS["mxfp8"]):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2)
    found = [name for name, parameter in model.named_parameters() if isinstance(parameter, QuantizedTensor)]
    assert [name.removeprefix("layers.1.") for name in found[3:]] == [
        "self_attn.out_proj.weight",
        "linear1.weight",
        "linear2.weight",
    ]
    assert copy.deepcopy(nn.Linear(8, 8)).weight.__class__ is nn.Parameter
    assert model(torch.randn(1, 3, 32)).shape == (1, 3, 32)


def test_plain_weights_are_multiplied_as_usual() -> None:
    x, weight = values(3, 64), values(48, 64)
    assert torch.equal(linear(x, weight), nn.functional.linear(x, weight))


def test_a_filter_chooses_and_shared_weights_stay_shared() -> None:
    model = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("a", "b", "c", "head")})
    model["embedding"] = nn.Embedding(32, 32)
    model["head"].weight = model["embedding"].weight
    model["b"].weight = model["a"].weight
    assert quantize_(model, KINDS["mxfp8"], lambda name, _: name != "c") == ["a.weight", "b.weight"]
    assert model["a"].weight is model["b"].weight
    assert isinstance(model["a"].weight, QuantizedTensor)
    assert not isinstance(model["c"].weight, QuantizedTensor)
    assert model["head"].weight is model["embedding"].weight
    assert quantize_(model["a"], KINDS["mxfp8"]) == []


@kinds
def test_masters_are_updated_and_quantized(quantizer: Quantizer) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 48).bfloat16()
    initial, bias = model.weight.detach().clone(), model.bias.detach().clone()
    quantize_(model, quantizer, preserve_high_precision_init=True)
    optimizer = MasterWeights(model.parameters(), partial(torch.optim.SGD, lr=0.5))
    assert torch.equal(optimizer.masters[0], initial.float())
    model(values(5, 64)).float().sum().backward()
    grad, of_bias = model.weight.grad, model.bias.grad
    assert grad is not None
    assert of_bias is not None
    optimizer.step()
    wanted = initial.float() - 0.5 * grad.float()
    assert torch.equal(optimizer.masters[0], wanted)
    assert torch.equal(model.bias, bias - 0.5 * of_bias)
    assert isinstance(model.weight, QuantizedTensor)
    if not model.weight.state:
        assert same(model.weight, quantizer.quantize(wanted.bfloat16()))
    optimizer.zero_grad()
    assert model.weight.grad is None


@pytest.mark.gpu
def test_float8_products_on_a_gpu_are_near_those_of_values() -> None:
    torch.manual_seed(0)
    wide = torch.randn(512, 1024, device="cuda").bfloat16().requires_grad_()
    weight = nn.Parameter(KINDS["float8"].quantize(wide.detach()))
    x = torch.randn(4, 64, 1024, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn(4, 64, 512, device="cuda").bfloat16()
    made, wanted = linear(x, weight), nn.functional.linear(x, wide)
    found = torch.autograd.grad(made, (x, weight), grad)
    told = torch.autograd.grad(wanted, (x, wide), grad)
    for one, other in zip((made, *found), (wanted, *told), strict=True):
        assert one.dtype == torch.bfloat16
        assert ((one - other).norm() / other.norm()).item() < 0.06


@pytest.mark.gpu
@five
def test_a_move_to_a_gpu_and_back_keeps_every_byte(quantizer: Quantizer) -> None:
    made = quantizer.quantize(values(200, 256))
    there = made.to("cuda", non_blocking=True)
    assert isinstance(there, QuantizedTensor)
    assert all(buffer.is_cuda for buffer in there.components.values())
    assert torch.equal(there.dequantize().cpu(), made.dequantize())
    back = there.cpu()
    assert isinstance(back, QuantizedTensor)
    assert same(made, back)
    assert same(quantizer.quantize(values(200, 256).cuda()).cpu(), made)  # type: ignore[arg-type]
