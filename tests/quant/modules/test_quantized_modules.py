"""Models with quantized weights: which layers, products, gradients, masters, and the entries of state dicts."""

from __future__ import annotations

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn

from tests.quant.kinds import KINDS, MORE, raw, same, same_state, values
from tests.some import a, some
from transaxle.errors import TransaxleError
from transaxle.quant import DelayedScaling, MasterWeights, QuantizedTensor, Quantizer, linear, quantize_, quantized_init

kinds = pytest.mark.parametrize("quantizer", MORE.values(), ids=MORE.keys())
of_values = [(name, quantizer) for name, quantizer in MORE.items() if not quantizer.multiplies_codes]
"""Those whose weights are multiplied by their values; of the others see `tests/quant/nvfp4`."""
five = pytest.mark.parametrize("quantizer", KINDS.values(), ids=KINDS.keys())


@pytest.mark.parametrize("quantizer", [each for _, each in of_values], ids=[name for name, _ in of_values])
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64)], ids=str)
def test_products_and_gradients_are_those_of_the_values(quantizer: Quantizer, shape: tuple[int, ...]) -> None:
    weight = nn.Parameter(quantizer.quantize(values(48, 64)))
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
    assert torch.equal(weight.grad, some(plain.grad))
    for quantized, usual in (x, bias):
        assert torch.equal(some(quantized.grad), some(usual.grad))


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
    torch.testing.assert_close(some(layers[0].weight.grad), layers[1].weight.grad, rtol=2e-2, atol=0.5)
    assert layers[0](values(3, 64)).dtype == torch.bfloat16
    x, plain = values(3, 64), values(48, 64)
    assert torch.equal(linear(x, plain), nn.functional.linear(x, plain)), "plain weights are multiplied as usual"


def test_copies_made_in_the_block_are_quantized() -> None:
    with quantized_init(KINDS["mxfp8"]):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2)
    found = [name for name, parameter in model.named_parameters() if isinstance(parameter, QuantizedTensor)]
    names = ["self_attn.out_proj.weight", "linear1.weight", "linear2.weight"]
    assert [name.removeprefix("layers.1.") for name in found[3:]] == names
    assert copy.deepcopy(nn.Linear(8, 8)).weight.__class__ is nn.Parameter
    assert model(torch.randn(1, 3, 32)).shape == (1, 3, 32)


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
    optimizer.step()
    wanted = initial.float() - 0.5 * some(grad).float()
    assert torch.equal(optimizer.masters[0], wanted)
    assert torch.equal(model.bias, bias - 0.5 * some(of_bias))
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
    there = a(QuantizedTensor, made.to("cuda", non_blocking=True))
    assert all(buffer.is_cuda for buffer in there.components.values())
    assert torch.equal(there.dequantize().cpu(), made.dequantize())
    back = a(QuantizedTensor, there.cpu())
    assert same(made, back)
    assert same(quantizer.quantize(values(200, 256).cuda()).cpu(), made)


# State dicts of quantized modules: plain tensors under stable names, that any file holds and any module takes back.

names_of_kinds = pytest.mark.parametrize("kind", MORE)


def _model(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 166), nn.ReLU(), nn.Linear(166, 48, bias=False)).bfloat16()
    quantize_(model, MORE[kind])
    return model


def test_names_are_those_of_components() -> None:
    names = {kind: [name for name in _model(kind).state_dict() if name.startswith("2.")] for kind in KINDS}
    assert names == {
        "float8": ["2.weight", "2.weight_scale_inv"],
        "float8 delayed": ["2.weight", "2.weight_scale_inv", "2.weight_amax_history", "2.weight_scaled_for"],
        "float8_block": ["2.weight", "2.weight_scale_inv"],
        "mxfp8": ["2.weight", "2.weight_scale_inv"],
        "nvfp4": ["2.weight", "2.weight_scale_inv", "2.weight_amax"],
    }


@names_of_kinds
def test_torch_files_need_no_allow_list(kind: str) -> None:
    model, other, file = _model(kind), _model(kind, seed=1), io.BytesIO()
    assert not any("transaxle" in str(kind) for kind in torch.serialization.get_safe_globals())
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(type(entry) is torch.Tensor for entry in state.values())
    assert not same_state(model, other)
    before = copy.copy(state)
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    assert same_state(model, other)
    assert state.keys() == before.keys()
    assert torch.equal(model(values(4, 64)), other(values(4, 64)))


@names_of_kinds
def test_loading_keeps_what_the_parameter_is(kind: str) -> None:
    model, state = _model(kind), _model(kind, seed=1).state_dict()
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    parameter = model[0].weight  # type: ignore[index]
    model.load_state_dict(state)
    assert model[0].weight is parameter  # type: ignore[index]
    assert parameter.quantizer == MORE[kind]
    assert not parameter.requires_grad


@names_of_kinds
def test_meta_models_are_filled_by_assigning(kind: str) -> None:
    with torch.device("meta"), quantized_init(MORE[kind]):
        empty = nn.Sequential(nn.Linear(64, 166), nn.ReLU(), nn.Linear(166, 48, bias=False)).bfloat16()
    model = _model(kind)
    with pytest.raises(TransaxleError, match="meta device"):
        empty.load_state_dict(model.state_dict())
    empty.load_state_dict(model.state_dict(), assign=True)
    assert same_state(model, empty)
    assert torch.equal(model(values(4, 64)), empty(values(4, 64)))


@names_of_kinds
def test_values_are_quantized_once_and_it_is_said(kind: str) -> None:
    if isinstance(MORE[kind], DelayedScaling):
        pytest.skip("a checkpoint without a history starts one: compared in the next test")
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(64, 166), nn.ReLU(), nn.Linear(166, 48, bias=False)).bfloat16()
    model = _model(kind, seed=1)
    with pytest.warns(UserWarning, match="quantized once"):
        model.load_state_dict(wide.state_dict())
    assert same_state(model, _model(kind))


def test_delayed_scaling_starts_anew_from_values() -> None:
    model, wide = _model("float8 delayed", seed=1), nn.Linear(166, 48, bias=False).bfloat16()
    with pytest.warns(UserWarning, match="quantized once"):
        model[2].load_state_dict(wide.state_dict())  # type: ignore[index]
    again = DelayedScaling(length=4).quantize(wide.weight)
    assert torch.equal(model[2].weight.dequantize(), again.dequantize())  # type: ignore[index]


def test_delayed_and_current_scaling_take_each_others_codes() -> None:
    """A history that is not needed is left aside, one that lacks begins anew: what was here is of other values."""
    delayed, current = _model("float8 delayed"), _model("float8", seed=1)
    current.load_state_dict(delayed.state_dict())
    for name, entry in current.state_dict().items():
        assert torch.equal(raw(entry.detach()), raw(delayed.state_dict()[name].detach()))
    again = _model("float8 delayed", seed=2)
    assert again.state_dict()["2.weight_amax_history"].any()
    again.load_state_dict(current.state_dict())
    found = again.state_dict()
    assert all(torch.equal(raw(found[name].detach()), raw(one.detach())) for name, one in current.state_dict().items())
    assert not found["2.weight_amax_history"].any()
    assert not found["2.weight_scaled_for"].any()
    values_ = torch.full((48, 166), 3.0, dtype=torch.bfloat16)
    with torch.no_grad():
        again[2].weight.copy_(values_)  # type: ignore[index]
    assert torch.equal(again[2].weight.dequantize(), values_)  # type: ignore[index]


def test_other_encodings_and_missing_scales_are_refused_and_nothing_is_written() -> None:
    blocks, kept = _model("float8_block"), _model("float8_block")
    for state, codes in (
        (_model("nvfp4").state_dict(), {"DTYPE_MISMATCH"}),
        (_model("float8").state_dict(), {"SHAPE_MISMATCH"}),
        ({"0.weight": blocks.state_dict()["0.weight"]}, {"MISSING_TENSOR"}),
    ):
        with pytest.raises(TransaxleError) as refused:
            blocks.load_state_dict(state, strict=False)
        assert {one.code for one in refused.value.refusals} <= codes | {"DTYPE_MISMATCH", "SHAPE_MISMATCH"}
        assert refused.value.code in codes | {"DTYPE_MISMATCH"}
        assert same_state(blocks, kept)
