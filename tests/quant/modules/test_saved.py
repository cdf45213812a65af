"""Quantized models and Transaxle's own save and load, and what transformers makes of the folder."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import transaxle as tx
from tests.live.ranks import run
from tests.quant.kinds import MORE, raw
from transaxle.quant import NVFP4, Float8Block, MasterWeights, QuantizedTensor, quantize_

HEAD = "lm_head"
"""Engines leave it as it is."""


def _equal(first: nn.Module, second: nn.Module) -> bool:
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(torch.equal(raw(one[n].detach()), raw(two[n].detach())) for n in one)


def _model(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 166), nn.Linear(166, 48)).bfloat16()
    quantize_(model, MORE[kind])
    return model


@pytest.mark.parametrize("kind", MORE)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
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


@pytest.mark.parametrize("kind", MORE)
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


def _llama(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 128}
    torch.manual_seed(seed)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).bfloat16()
    quantize_(model, Float8Block(), lambda name, _: name != HEAD)
    return model


def _train_and_save(rank: int, world: int, folder: Path) -> dict[str, torch.Tensor]:
    model = _llama(0)
    config = json.loads(model.config.to_json_string(use_diff=False))
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = MasterWeights(model.parameters(), partial(torch.optim.AdamW, lr=1e-2))
    tokens = torch.arange(24).reshape(2, 12) + rank
    for _ in range(3):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tx.save(model, folder, to="hf", config=config)
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_what_was_trained_on_several_ranks(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    trained = run(2, _train_and_save, tmp_path / "saved")[0]
    method = FineGrainedFP8Config(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", quantization_config=method, dtype=torch.bfloat16)
    theirs = dict(loaded.named_parameters())
    assert theirs.keys() == trained.keys()
    assert all(torch.equal(theirs[name], values) for name, values in trained.items())


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_a_block_model_as_fp8(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    model, other = _llama(0), _llama(1)
    tx.save(model, tmp_path / "saved", to="hf", config=json.loads(model.config.to_json_string(use_diff=False)))
    told = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert (told["quant_method"], told["weight_block_size"]) == ("fp8", [128, 128])
    tx.load(other, tmp_path / "saved")
    assert _equal(model, other)
    method = FineGrainedFP8Config(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", quantization_config=method, dtype=torch.bfloat16)
    theirs = dict(loaded.named_parameters())
    for name, parameter in model.named_parameters():
        values = parameter.dequantize() if isinstance(parameter, QuantizedTensor) else parameter
        assert torch.equal(theirs[name], values)


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
