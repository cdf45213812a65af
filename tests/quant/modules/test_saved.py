"""Quantized models and Transaxle's own save and load, and what transformers makes of the folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import transaxle as tx
from tests.quant.kinds import MORE, raw
from transaxle.quant import NVFP4, QuantizedTensor, quantize_


def _equal(first: nn.Module, second: nn.Module) -> bool:
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(torch.equal(raw(one[n].detach()), raw(two[n].detach())) for n in one)


def _model(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 166), nn.Linear(166, 48)).bfloat16()
    quantize_(model, MORE[kind])
    return model


@pytest.mark.parametrize(
    ("kind", "asynchronous"), [*((kind, False) for kind in MORE), ("float8 delayed", True), ("nvfp4, both ways", True)]
)
def test_every_format_is_saved_and_loaded_bit_for_bit(kind: str, asynchronous: bool, tmp_path: Path) -> None:
    model, kept, other = _model(kind, 0), _model(kind, 0), _model(kind, 1)
    if asynchronous:
        job = tx.async_save(model, tmp_path / "saved", to="identity")
        for entry in model.state_dict().values():
            raw(entry.detach()).bitwise_not_()
        job.result()
    else:
        tx.save(model, tmp_path / "saved", to="identity")
    assert not _equal(kept, other)
    tx.load(other, tmp_path / "saved", dialect="identity")
    assert _equal(kept, other)


@pytest.mark.parametrize("kind", MORE)
def test_every_format_is_loaded_decoded(kind: str, tmp_path: Path) -> None:
    """What only training with codes needs (columnwise codes, histories) says nothing of the values."""
    model = _model(kind, 0)
    tx.save(model, tmp_path / "saved", to="dcp:identity")
    plain = nn.Sequential(nn.Linear(64, 166), nn.Linear(166, 48)).bfloat16()
    report = tx.load(plain, tmp_path / "saved", decode="bf16")
    assert (report.missing, report.unexpected) == ((), ())
    for name, weight in plain.named_parameters():
        source = model.get_parameter(name)
        values = source.dequantize() if isinstance(source, QuantizedTensor) else source
        assert torch.equal(weight, values.to(torch.bfloat16)), name


@pytest.mark.parametrize("kind", ["float8 delayed", "mxfp8", "nvfp4, both ways"])
def test_half_a_weight_fills_none(kind: str, tmp_path: Path) -> None:
    """Codes under the scales of others are other values: neither is taken alone, also where names may be missing."""
    full = {name: raw(entry.detach()).clone() for name, entry in _model(kind, 0).state_dict().items()}
    typed = {name: full[name].view(entry.dtype) for name, entry in _model(kind, 0).state_dict().items()}
    weight = "0.weight"
    model = _model(kind, 1)
    kept = {name: raw(entry.detach()).clone() for name, entry in model.state_dict().items()}
    for gone in (weight, f"{weight}_scale_inv"):
        place = tmp_path / gone
        tx.save({name: entry for name, entry in typed.items() if name != gone}, place, to="safetensors:identity")
        with pytest.raises(tx.TransaxleError) as found:
            tx.load(model, place, dialect="identity", strict=False)
        assert gone in {each.where.tensor for each in found.value.refusals}
        assert all(torch.equal(raw(entry.detach()), kept[name]) for name, entry in model.state_dict().items())
    tx.save({n: e for n, e in typed.items() if not n.startswith(weight)}, tmp_path / "none", to="safetensors:identity")
    tx.load(model, tmp_path / "none", dialect="identity", strict=False)
    for name, entry in model.state_dict().items():
        assert torch.equal(raw(entry.detach()), kept[name] if name.startswith(weight) else full[name])


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_scales_that_reach_elsewhere_say_so(to: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False)).bfloat16()
    quantize_(model, NVFP4(scale_max=256))
    (weight,) = model.parameters()
    assert isinstance(weight, QuantizedTensor)
    tx.save(model, tmp_path / "saved", to=f"{to}:identity")
    tx.convert(tmp_path / "saved", tmp_path / "decoded", to="safetensors:identity", decode="bf16")
    with tx.open(tmp_path / "decoded") as files:
        assert files["0.weight"].tobytes() == raw(weight.dequantize().detach()).numpy().tobytes()
    other = nn.Sequential(nn.Linear(64, 32, bias=False)).bfloat16()
    quantize_(other, NVFP4())
    with pytest.raises(tx.TransaxleError, match="scales up to 256"):
        tx.load(other, tmp_path / "saved")
