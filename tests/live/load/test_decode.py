"""`decode=` and `dtype=`: what is encoded, or of another type, becomes what the parameter is, if that is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.live.ranks import run
from transaxle.errors import TransaxleError
from transaxle.live.load import load
from transaxle.live.model.destination import Conversion


def _save(place: Path, **tensors: torch.Tensor) -> str:
    save_file(tensors, place / "model.safetensors")
    return str(place)


def test_a_different_dtype_needs_the_option_dtype(tmp_path: Path) -> None:
    source = _save(tmp_path, a=torch.arange(6.0) + 1 / 3, b=torch.arange(6.0), c=torch.arange(6.0).bfloat16())
    state = {"a": torch.ones(6, dtype=torch.bfloat16), "b": torch.ones(6, dtype=torch.bfloat16), "c": torch.ones(6)}
    with pytest.raises(TransaxleError) as found:
        load(state, source)
    assert [r.where.tensor for r in found.value.refusals] == ["a", "b", "c"]
    assert {r.code for r in found.value.refusals} == {"DTYPE_MISMATCH"}
    assert 'dtype="bf16"' in found.value.refusals[0].hint
    assert 'dtype="fp32"' in found.value.refusals[2].hint
    with pytest.raises(TransaxleError) as found:
        load(state, source, dtype="bf16")
    assert [r.where.tensor for r in found.value.refusals] == ["c"]
    assert all(bool((tensor == 1).all()) for tensor in state.values())
    state["c"] = state["c"].bfloat16()
    with pytest.raises(TransaxleError, match="DTYPE_MISMATCH"):
        load(state, source, decode="bf16")  # what is plain is not decoded
    report = load(state, source, dtype="bf16")
    assert torch.equal(state["a"], (torch.arange(6.0) + 1 / 3).bfloat16())
    assert torch.equal(state["b"], torch.arange(6.0).bfloat16())
    assert report.converted == (Conversion("a", "F32", "BF16", exact=False), Conversion("b", "F32", "BF16", exact=True))


def test_every_plain_dtype_is_cast_as_torch_casts_it(tmp_path: Path) -> None:
    values = torch.linspace(-3, 3, 40, dtype=torch.float64)
    values[7] = float("nan")
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    tensors = {str(kind): values.to(kind) for kind in kinds}
    save_file(tensors, tmp_path / "model.safetensors")
    state = {name: torch.zeros(40, dtype=torch.float16) for name in tensors}
    report = load(state, tmp_path, dtype="fp16")
    for name, tensor in tensors.items():
        assert torch.equal(state[name].nan_to_num(77), tensor.half().nan_to_num(77))
    for each in report.converted:
        back = tensors[each.name].half().to(tensors[each.name].dtype)
        assert each.exact == torch.equal(back.nan_to_num(77), tensors[each.name].nan_to_num(77))
    assert len(report.converted) == 3


def test_codes_without_scales_cannot_be_cast(tmp_path: Path) -> None:
    codes = torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    source = _save(tmp_path, w=codes, n=torch.arange(4))
    for decode in (None, "bf16"):
        with pytest.raises(TransaxleError) as found:
            load({"w": torch.ones(16, dtype=torch.bfloat16), "n": torch.ones(4)}, source, decode=decode)
        assert [r.code for r in found.value.refusals] == ["DTYPE_MISMATCH"] * 2
        hint = found.value.refusals[0].hint
        assert ("scales" in hint) == (decode is not None)


SCALE = torch.rand(8) + 0.5
BESIDE: dict[str, dict[str, torch.Tensor]] = {
    "gptq": {"l.qweight": torch.arange(32, dtype=torch.int32).reshape(4, 8), "l.scales": SCALE.half()},
    "w8a8": {"l.weight": torch.arange(64, dtype=torch.int8).reshape(8, 8), "l.weight_scale": SCALE},
    "nf4 in bf16": {
        "l.weight": (torch.arange(16) / 7).reshape(16, 1).bfloat16(),
        "l.weight.absmax": SCALE,
        "l.weight.quant_state.bitsandbytes__nf4": torch.arange(9, dtype=torch.uint8),
    },
    "blocks": {
        "l.weight": torch.randn(8, 8).to(torch.float8_e4m3fn),
        "l.weight_scale_inv": SCALE[:1].reshape(1, 1).clone(),
    },
}


@pytest.mark.parametrize("kind", BESIDE)
def test_neither_scales_nor_codes_are_cast_alone(tmp_path: Path, kind: str) -> None:
    source = _save(tmp_path, **BESIDE[kind])
    state = {name: torch.zeros_like(tensor) for name, tensor in BESIDE[kind].items()}
    load(state, source)
    assert all(torch.equal(state[n].view(torch.uint8), t.view(torch.uint8)) for n, t in BESIDE[kind].items())
    for name, tensor in BESIDE[kind].items():
        if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            kept = state[name]
            dtype, word = (torch.half, "fp16") if tensor.dtype != torch.half else (torch.bfloat16, "bf16")
            with pytest.raises(TransaxleError, match=r"UNSUPPORTED|CORRUPT"):
                load({**state, name: torch.zeros(tensor.shape, dtype=dtype)}, source, dtype=word)
            assert state[name] is kept


BLOCK = 128


def _fp8(place: Path) -> torch.Tensor:
    """A matrix of fp8 codes with a scale for each block, as DeepSeek writes them; return its values."""
    torch.manual_seed(0)
    codes = torch.randn(256, 384).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3) + 0.5
    quantization = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    (place / "config.json").write_text(json.dumps({"model_type": "none", "quantization_config": quantization}))
    tensors = {"layer.weight": codes, "layer.weight_scale_inv": scale, "layer.bias": torch.arange(256.0)}
    save_file(tensors, place / "model.safetensors")
    return codes.float() * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def test_codes_with_scales_are_decoded_with_the_option_decode(tmp_path: Path) -> None:
    values = _fp8(tmp_path)
    state = {"layer.weight": torch.ones(256, 384), "layer.bias": torch.zeros(256)}
    with pytest.raises(TransaxleError) as found:
        load(state, tmp_path)
    assert {r.code for r in found.value.refusals} == {"DTYPE_MISMATCH", "UNEXPECTED_TENSOR"}
    assert bool((state["layer.weight"] == 1).all())
    report = load(state, tmp_path, decode="fp32")
    assert torch.equal(state["layer.weight"], values)
    assert [(each.name, each.to, each.exact) for each in report.converted] == [("layer.weight", "F32", None)]
    assert report.bytes_read < 256 * 384 * 2 < report.bytes_written
    half = {"layer.weight": torch.ones(256, 384, dtype=torch.float16), "layer.bias": torch.zeros(256, dtype=torch.half)}
    load(half, tmp_path, decode="fp16", dtype="fp16")
    assert torch.equal(half["layer.weight"], values.half())


def _partly(place: Path) -> dict[str, torch.Tensor]:
    """A checkpoint of which some layers are codes of fp8 and some are bf16; return the values of all."""
    values = _fp8(place)
    held = load_file(place / "model.safetensors")
    held["layer.bias"] = held["layer.bias"].bfloat16()
    held["plain.weight"] = (torch.arange(24.0) / 7).reshape(4, 6).bfloat16()
    held["wide.weight"] = torch.arange(8.0) + 1 / 3
    save_file(held, place / "model.safetensors")
    return {"layer.weight": values, **{name: held[name] for name in ("layer.bias", "plain.weight", "wide.weight")}}


def test_a_checkpoint_that_is_partly_encoded_fills_a_plain_model(tmp_path: Path) -> None:
    values = _partly(tmp_path)
    for found, converted in run(2, _fill, str(tmp_path)):
        assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in values.items())
        assert converted == {"layer.weight": ("float8_block", "BF16", None), "wide.weight": ("F32", "BF16", False)}


def _fill(rank: int, world: int, source: str) -> Any:
    mesh = init_device_mesh("cpu", (world,))
    shapes: dict[str, tuple[int, ...]] = {"layer.weight": (256, 384), "layer.bias": (256,), "plain.weight": (4, 6)}
    shapes["wide.weight"] = (8,)
    state = {
        name: distribute_tensor(torch.full(shape, 9.0).bfloat16(), mesh, [Shard(0)], src_data_rank=None)
        for name, shape in shapes.items()
    }
    report = load(state, source, decode="bf16", dtype="bf16")
    converted = {each.name: (each.stored, each.to, each.exact) for each in report.converted}
    return {name: tensor.full_tensor() for name, tensor in state.items()}, converted


def test_parameters_of_codes_refuse_plain_values(tmp_path: Path) -> None:
    _partly(tmp_path)
    state = {
        "layer.weight": torch.ones(256, 384, dtype=torch.bfloat16),
        "layer.bias": torch.ones(256, dtype=torch.bfloat16),
        "plain.weight": torch.ones(4, 6).to(torch.float8_e4m3fn),
        "wide.weight": torch.ones(8).to(torch.float8_e5m2),
    }
    before = {name: tensor.clone() for name, tensor in state.items()}
    for decode, said in (
        (None, {"layer.weight", "plain.weight", "wide.weight"}),
        ("bf16", {"plain.weight", "wide.weight"}),
    ):
        with pytest.raises(TransaxleError) as found:
            load(state, tmp_path, decode=decode)
        hints = {r.where.tensor: r.hint for r in found.value.refusals if r.code == "DTYPE_MISMATCH"}
        assert set(hints) == said
        assert all("--encode" in hints[name] for name in ("plain.weight", "wide.weight"))
    assert all(torch.equal(state[name].float(), tensor.float()) for name, tensor in before.items())
