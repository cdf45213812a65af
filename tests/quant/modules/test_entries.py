"""State dicts of quantized modules: plain tensors under stable names, that any file holds and any module takes back."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from tests.quant.kinds import KINDS, MORE, raw, values
from transaxle.errors import TransaxleError
from transaxle.quant import DelayedScaling, QuantizedTensor, quantize_, quantized_init

kinds = pytest.mark.parametrize("kind", MORE)


def _model(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 166), nn.ReLU(), nn.Linear(166, 48, bias=False)).bfloat16()
    quantize_(model, MORE[kind])
    return model


def _equal(first: nn.Module, second: nn.Module) -> bool:
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(
        torch.equal(raw(one[name].detach()), raw(two[name].detach())) for name in one
    )


def test_names_are_those_of_components() -> None:
    names = {kind: [name for name in _model(kind).state_dict() if name.startswith("2.")] for kind in KINDS}
    assert names == {
        "float8": ["2.weight", "2.weight_scale_inv"],
        "float8 delayed": ["2.weight", "2.weight_scale_inv", "2.weight_amax_history", "2.weight_scaled_for"],
        "float8_block": ["2.weight", "2.weight_scale_inv"],
        "mxfp8": ["2.weight", "2.weight_scale_inv"],
        "nvfp4": ["2.weight", "2.weight_scale_inv", "2.weight_amax"],
    }


@kinds
def test_torch_files_need_no_allow_list(kind: str) -> None:
    model, other, file = _model(kind), _model(kind, seed=1), io.BytesIO()
    assert not any("transaxle" in str(kind) for kind in torch.serialization.get_safe_globals())
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(type(entry) is torch.Tensor for entry in state.values())
    assert not _equal(model, other)
    before = copy.copy(state)
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    assert _equal(model, other)
    assert state.keys() == before.keys()
    assert torch.equal(model(values(4, 64)), other(values(4, 64)))


@kinds
def test_loading_keeps_what_the_parameter_is(kind: str) -> None:
    model, state = _model(kind), _model(kind, seed=1).state_dict()
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    parameter = model[0].weight  # type: ignore[index]
    model.load_state_dict(state)
    assert model[0].weight is parameter  # type: ignore[index]
    assert isinstance(parameter, QuantizedTensor)
    assert parameter.quantizer == MORE[kind]
    assert not parameter.requires_grad


@kinds
def test_meta_models_are_filled_by_assigning(kind: str) -> None:
    with torch.device("meta"), quantized_init(MORE[kind]):
        empty = nn.Sequential(nn.Linear(64, 166), nn.ReLU(), nn.Linear(166, 48, bias=False)).bfloat16()
    model = _model(kind)
    with pytest.raises(TransaxleError, match="meta device"):
        empty.load_state_dict(model.state_dict())
    empty.load_state_dict(model.state_dict(), assign=True)
    assert _equal(model, empty)
    assert torch.equal(model(values(4, 64)), empty(values(4, 64)))


@kinds
def test_values_are_quantized_once_and_it_is_said(kind: str) -> None:
    if isinstance(MORE[kind], DelayedScaling):
        pytest.skip("a checkpoint without a history starts one: compared in the next test")
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(64, 166), nn.ReLU(), nn.Linear(166, 48, bias=False)).bfloat16()
    model = _model(kind, seed=1)
    with pytest.warns(UserWarning, match="quantized once"):
        model.load_state_dict(wide.state_dict())
    assert _equal(model, _model(kind))


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
        assert _equal(blocks, kept)
