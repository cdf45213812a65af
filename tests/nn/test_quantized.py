"""Grouped layers among those that recipes quantize, and the masters that train them."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import transaxle as tx
from tests.nn.layers import EXPERTS, FORMS, SPLITS, experts, forms, layer, looped, of_output, rows
from tests.quant.kinds import KINDS, raw, same
from transaxle.errors import TransaxleError
from transaxle.nn import GroupedLinear, optimizer_state_as
from transaxle.quant import DelayedScaling, MasterWeights, QuantizedTensor, Quantizer, quantize_, quantized_init

SIZES: dict[str, Any] = {"in_features": 64, "out_features": 32, "params_dtype": torch.bfloat16}
RATE = 0.5
kinds = pytest.mark.parametrize("quantizer", KINDS.values(), ids=KINDS.keys())
pairs = pytest.mark.parametrize(("source", "target"), [("experts", "packed"), ("packed", "experts")])


class Block(nn.Module):
    """Two grouped layers and a linear one."""

    def __init__(self, form: str, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.router = nn.Linear(64, EXPERTS, dtype=torch.bfloat16)
        self.up = layer(seed, **SIZES, **FORMS[form])
        self.down = layer(seed + 1, **{**SIZES, "in_features": 32, "out_features": 64}, **FORMS[form])

    def forward(self, x: torch.Tensor, splits: list[int]) -> torch.Tensor:
        """All three, one after the other."""
        x = self.down(self.up(x, splits), splits)
        made: torch.Tensor = self.router(x)
        return made

    def train_on(self, optimizer: torch.optim.Optimizer, seed: int) -> None:
        """Make a step."""
        self(rows(self.up, seed, dtype=torch.bfloat16), SPLITS[4]).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _names(form: str, layer: str) -> list[str]:
    return [f"{layer}.weight"] if form == "packed" else [f"{layer}.weight{place}" for place in range(EXPERTS)]


def _are_those_of(values: list[torch.Tensor], made: GroupedLinear, quantizer: Quantizer) -> None:
    """Each expert's codes are those of its matrix quantized alone."""
    for value, one in zip(values, experts(made, "weight"), strict=True):
        assert same(one, quantizer.quantize(value.detach()))


@kinds
@forms
def test_a_model_with_grouped_layers_is_quantized(form: str, quantizer: Quantizer) -> None:
    model, plain = Block(form), Block(form)
    assert quantize_(model, quantizer) == ["router.weight", *_names(form, "up"), *_names(form, "down")]
    for made, wide in ((model.up, plain.up), (model.down, plain.down)):
        _are_those_of(experts(wide, "weight"), made, quantizer)
        assert all(type(bias.data) is torch.Tensor for bias in experts(made, "bias"))
    assert quantize_(model, quantizer) == []
    other = Block(form)
    assert quantize_(other, quantizer, lambda name, _: name == "down") == _names(form, "down")
    assert type(experts(other.up, "weight")[0].data) is torch.Tensor


@kinds
@forms
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_is_built_quantized(form: str, quantizer: Quantizer, device: str) -> None:
    source = Block(form)
    with quantized_init(quantizer), torch.device(device):
        made = GroupedLinear(EXPERTS, 64, 32, params_dtype=torch.bfloat16, **FORMS[form])
        own = GroupedLinear(EXPERTS, 64, 32, bias=False, params_dtype=torch.bfloat16, recipe=KINDS["mxfp8"])
    assert all(isinstance(one, QuantizedTensor) for one in experts(made, "weight"))
    assert {one.device.type for one in made.parameters()} == {device}
    assert all(one.quantizer == KINDS["mxfp8"] for one in own.parameters() if isinstance(one, QuantizedTensor))
    if device == "meta":
        made.to_empty(device="cpu")
    quantize_(source.up, quantizer)
    made.load_state_dict(source.up.state_dict())
    x = rows(made, dtype=torch.bfloat16)
    assert torch.equal(made(x, SPLITS[0]), source.up(x, SPLITS[0]))
    after = GroupedLinear(EXPERTS, 64, 32)
    assert not any(isinstance(one, QuantizedTensor) for one in after.parameters())  # the block has ended


def test_a_filter_says_which_layers_of_a_block() -> None:
    with quantized_init(KINDS["mxfp8"], filter=lambda module: getattr(module, "in_features", 0) == 32):
        model = Block("experts")
    assert type(model.up.weight0.data) is torch.Tensor
    assert isinstance(model.down.weight0, QuantizedTensor)


@forms
def test_what_a_layer_cannot_compute_with_is_refused_before_anything_changes(form: str) -> None:
    model = nn.ModuleDict({"one": layer(**SIZES), "two": layer(save_original_input=True, **SIZES, **FORMS[form])})
    with pytest.raises(TransaxleError, match="save_original_input does not work with delayed scaling") as caught:
        quantize_(model, DelayedScaling())
    assert [each.where.tensor for each in caught.value.refusals] == _names(form, "two")
    assert not any(isinstance(one, QuantizedTensor) for one in model.parameters())
    with pytest.raises(TransaxleError, match="save_original_input"), quantized_init(DelayedScaling()):
        GroupedLinear(EXPERTS, 64, 32, save_original_input=True)
    made = layer(**SIZES, **FORMS[form]).quantize_(KINDS["mxfp8"])
    with pytest.raises(TransaxleError, match="quantized already"):
        made.quantize_(KINDS["mxfp8"])


@kinds
@forms
@pytest.mark.parametrize("way", ["quantize_", "quantized_init"])
def test_masters_start_from_what_was_there_and_are_quantized(form: str, quantizer: Quantizer, way: str) -> None:
    plain = layer(3, **SIZES, **FORMS[form])
    initial = [one.detach().clone() for one in experts(plain, "weight")]
    made = plain
    if way == "quantize_":
        quantize_(made, quantizer, preserve_high_precision_init=True)
    else:
        with quantized_init(quantizer, preserve_high_precision_init=True):
            made = layer(3, **SIZES, **FORMS[form])
    optimizer = MasterWeights(made.parameters(), partial(torch.optim.SGD, lr=RATE))
    masters = [one.detach() for one in optimizer.masters]
    masters = list(masters[0].unbind(0)) if form == "packed" else masters
    assert all(torch.equal(master, one.float()) for master, one in zip(masters, initial, strict=True))
    x = rows(made, dtype=torch.bfloat16)
    grad = of_output((len(x), 32), torch.bfloat16)
    made(x, SPLITS[0]).backward(grad)
    values = [one.dequantize().detach().requires_grad_() for one in experts(made, "weight")]
    twin = layer(3, **SIZES)
    for place, value in enumerate(values):
        twin.register_parameter(f"weight{place}", nn.Parameter(value))
    looped(twin, x.detach(), SPLITS[0]).backward(grad)
    optimizer.step()
    for place, (master, one) in enumerate(zip(masters, initial, strict=True)):
        of_loop = getattr(twin, f"weight{place}").grad
        wanted = one.float() - RATE * of_loop.float()
        torch.testing.assert_close(master, wanted, rtol=2e-2, atol=2e-2)
    if not quantizer.state_sizes:
        _are_those_of([master.bfloat16() for master in masters], made, quantizer)


def _trained(form: str, quantizer: Quantizer, seed: int) -> tuple[Block, MasterWeights]:
    model = Block(form, seed)
    quantize_(model, quantizer, preserve_high_precision_init=True)
    optimizer = MasterWeights(model.parameters(), partial(torch.optim.AdamW, lr=0.01 * seed))
    for step in range(2):
        model.train_on(optimizer, step)
    return model, optimizer


def _held(model: Block, optimizer: MasterWeights) -> dict[str, torch.Tensor]:
    """Codes, scales, masters and moments by expert."""
    found: dict[str, torch.Tensor] = {}
    states = optimizer.states
    for name, one in (("up", model.up), ("down", model.down)):
        packed = dict(one.named_parameters()).get("weight")
        for place, weight in enumerate(experts(one, "weight")):
            assert isinstance(weight, QuantizedTensor)
            buffers = {**weight.components, **weight.state}
            state = states[weight if packed is None else packed]
            buffers |= {
                slot: value if packed is None or not value.dim() else value[place] for slot, value in state.items()
            }
            found |= {f"{name}.{place}.{slot}": raw(value) for slot, value in buffers.items()}
    return found


def _equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    assert any(name.endswith("master") for name in one)
    assert [name for name, value in one.items() if not torch.equal(value, two[name])] == []


@pytest.mark.oracle
@kinds
@pairs
@pytest.mark.parametrize("way", ["transaxle", "torch"])
def test_masters_follow_their_parameters(
    source: str, target: str, quantizer: Quantizer, way: str, tmp_path: Path
) -> None:
    """From one form into the other, and the next step is the same one."""
    model, optimizer = _trained(source, quantizer, 1)
    other, fresh = _trained(target, quantizer, 5)
    if way == "transaxle":
        tx.save(model, tmp_path / "saved", to="safetensors:identity", optimizer=optimizer)
        report = tx.load(other, tmp_path / "saved", optimizer=fresh)
        assert report.bytes_written == report.bytes_needed
        assert not report.converted
    else:
        state: Any = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        set_optimizer_state_dict(other, fresh, optimizer_state_as(state, other))
        other.load_state_dict(model.state_dict())
    _equal(_held(other, fresh), _held(model, optimizer))
    for one, chosen in ((model, optimizer), (other, fresh)):
        one.train_on(chosen, 9)
    _equal(_held(other, fresh), _held(model, optimizer))
