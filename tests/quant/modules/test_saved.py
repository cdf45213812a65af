"""Quantized models with `tx.save` and `tx.load`, from checkpoints of codes, of values, and of other encodings."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import transaxle as tx
from tests.live.ranks import run
from tests.quant.kinds import KINDS, MORE, raw, same, same_state
from tests.quant.training import SIX, Transformer, built, bytes_of, equal, mesh_of, quantized_of, train, trainer
from transaxle.errors import TransaxleError
from transaxle.move.mover import Movement
from transaxle.quant import NVFP4, MasterWeights, QuantizedTensor, quantize_


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
    assert not same_state(kept, other)
    tx.load(other, tmp_path / "saved", dialect="identity")
    assert same_state(kept, other)


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
    tx.save(model, tmp_path / "saved", to=f"{to}:identity")
    tx.convert(tmp_path / "saved", tmp_path / "decoded", to="safetensors:identity", decode="bf16")
    with tx.open(tmp_path / "decoded") as files:
        assert files["0.weight"].tobytes() == raw(weight.dequantize().detach()).numpy().tobytes()
    other = nn.Sequential(nn.Linear(64, 32, bias=False)).bfloat16()
    quantize_(other, NVFP4())
    with pytest.raises(tx.TransaxleError, match="scales up to 256"):
        tx.load(other, tmp_path / "saved")


# Checkpoints that are not of the model's encoding: values are quantized once, and it is told; codes are refused.

kinds = pytest.mark.parametrize("kind", SIX)
ENCODED = {"float8": "float8", "float8 delayed": "float8", "float8_block": "float8_block"}


def _plain(folder: Path, dtype: torch.dtype, seed: int = 7) -> dict[str, torch.Tensor]:
    """Write a checkpoint that is not quantized, by another library."""
    torch.manual_seed(seed)
    values = {name: tensor.detach().to(dtype) for name, tensor in Transformer().state_dict().items()}
    folder.mkdir(exist_ok=True)
    save_file(values, folder / "model.safetensors")
    return values


def _load_plain(rank: int, world: int, kind: str, folder: Path, decode: str | None, meta: bool) -> dict[str, Any]:
    model = built(kind, mesh_of(world) if world > 1 else None, meta=meta)
    report = tx.load(model, folder, dtype=decode)
    wanted = quantized_of(model)
    made = {each.name: each for each in report.converted if each.name in wanted}
    assert made.keys() == wanted.keys()
    assert {each.to for each in made.values()} == {next(iter(wanted.values())).quantizer.encoding.name}
    assert report.bytes_written == sum(
        getattr(entry, "_local_tensor", entry).nbytes for entry in model.state_dict().values()
    )
    return bytes_of(model)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.bfloat16) for kind in SIX if kind != "float8"), ("mxfp8", torch.float32)],
    ids=str,
)
def test_values_are_quantized_once_as_if_unsharded(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    values = _plain(tmp_path / "plain", dtype)
    decode = None if dtype == torch.bfloat16 else "bf16"  # the embedding and the norms are bfloat16
    alone = _load_plain(0, 1, kind, tmp_path / "plain", decode, False)
    for name, one in SIX[kind].quantize(values["blocks.0.up.weight"].bfloat16()).components.items():
        suffix = "" if name == "data" else f"_{name}"
        assert torch.equal(alone[f"blocks.0.up.weight{suffix}"], raw(one))
    if dtype == torch.bfloat16:
        for world, meta in ((3, False), (2, True)):
            for found in run(world, _load_plain, kind, tmp_path / "plain", decode, meta):
                assert equal(found, alone)


def test_what_is_missing_or_of_another_shape_is_still_told(tmp_path: Path) -> None:
    values = _plain(tmp_path / "plain", torch.bfloat16)
    del values["head.weight"]
    values["blocks.0.up.weight"] = values["blocks.0.up.weight"][:100].clone()
    save_file(values, tmp_path / "plain" / "model.safetensors")
    with pytest.raises(TransaxleError) as refused:
        tx.load(built("mxfp8", None), tmp_path / "plain", dialect="identity")
    assert {(one.code, one.where.tensor) for one in refused.value.refusals} == {
        ("SHAPE_MISMATCH", "blocks.0.up.weight"),
        ("MISSING_TENSOR", "head.weight"),
        ("MISSING_TENSOR", "head.weight_scale_inv"),
    }


@pytest.mark.parametrize(
    ("source", "kind"), [*pairwise(SIX), ("nvfp4 training", "mxfp8"), ("float8_block", "float8"), ("mxfp8", "mxfp8")]
)
def test_another_encoding_is_refused_unless_decoding_is_allowed(source: str, kind: str, tmp_path: Path) -> None:
    saved, model = _linear(source, 1), _linear(kind, 2)
    tx.save(saved, tmp_path / "saved", to="identity")
    before = bytes_of(model)
    if SIX[source].encoding == SIX[kind].encoding:
        tx.load(model, tmp_path / "saved", decode="bf16", strict=source == kind)
        for name, buffer in saved[0].weight.components.items():
            assert torch.equal(raw(model[0].weight.components[name]), raw(buffer))
        return
    with pytest.raises(TransaxleError) as refused:
        tx.load(model, tmp_path / "saved")
    problems = refused.value.refusals
    assert [(one.code, one.where.tensor) for one in problems] == [("DTYPE_MISMATCH", "0.weight")]
    assert 'decode="bf16"' in problems[0].hint
    assert SIX[source].encoding.name in problems[0].message
    assert equal(bytes_of(model), before)
    report = tx.load(model, tmp_path / "saved", decode="bf16")
    (told,) = [each for each in report.converted if each.name == "0.weight"]
    assert (told.stored, told.to) == (SIX[source].encoding.name, SIX[kind].encoding.name)
    assert same(model[0].weight, SIX[kind].quantize(saved[0].weight.dequantize()))


def _linear(kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 166)).bfloat16()
    quantize_(model, SIX[kind])
    return model


def test_decoding_leaves_what_fits_as_it_is(tmp_path: Path) -> None:
    """One layer of two has another encoding: only that is quantized again."""
    torch.manual_seed(0)
    pair = [nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16() for _ in range(2)]
    saved, model = cast(Any, pair)
    quantize_(saved, KINDS["mxfp8"], lambda name, _: name == "0")
    quantize_(saved, KINDS["float8_block"])
    quantize_(model, KINDS["mxfp8"])
    tx.save(saved, tmp_path / "saved", to="identity")
    report = tx.load(model, tmp_path / "saved", decode="bf16")
    assert [each.name for each in report.converted] == ["1.weight"]
    first, second = (layer.weight for layer in model)
    assert same(first, saved[0].weight)
    assert same(second, KINDS["mxfp8"].quantize(saved[1].weight.dequantize()))


def _masters_of_plain(rank: int, world: int, folder: Path) -> None:
    values = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    model = built("float8_block", mesh_of(world), meta=True)
    optimizer = trainer(model)
    tx.load(model, folder, optimizer=optimizer, strict=False)
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, state in optimizer.states.items():
        assert torch.equal(state["master"].full_tensor(), values[names[parameter]])
    train(model, optimizer, range(1))


def test_masters_start_from_the_values_that_were_loaded(tmp_path: Path) -> None:
    """Not from their codes, and not from what the model was made of."""
    _plain(tmp_path / "plain", torch.bfloat16)
    run(2, _masters_of_plain, tmp_path / "plain")
    model, codes = built("mxfp8", None), built("mxfp8", None, seed=9)
    tx.save(codes, tmp_path / "codes", to="identity")
    optimizer = MasterWeights(model.parameters(), partial(torch.optim.SGD, lr=0.0))
    tx.load(model, tmp_path / "codes", dialect="identity", optimizer=optimizer, strict=False)
    for master, weight in zip(optimizer.masters, quantized_of(codes).values(), strict=True):
        assert torch.equal(master, weight.dequantize(torch.float32))


def test_a_load_that_writes_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine's resharded MXFP8 loads copied into values that were thrown away, and reported success."""
    model = _linear("mxfp8", 1)
    tx.save(model, tmp_path / "saved", to="identity")
    monkeypatch.setattr(Movement, "move_local", lambda _: None)
    with pytest.raises(TransaxleError, match="0 bytes were written") as refused:
        tx.load(model, tmp_path / "saved", dialect="identity")
    assert refused.value.code == "INCOMPLETE"
