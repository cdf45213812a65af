"""Integers as compressed-tensors packs them: decoded, moved raw, and written, against compressed-tensors itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import transaxle as tx
from tests.engine.compressed import Integers, quantize, store
from tests.oracles.quiet import quiet
from transaxle.errors import UsageError

SHAPES = {
    "pack-quantized, groups": Integers(),
    "pack-quantized, zero points": Integers(symmetric=False),
    "pack-quantized, groups of 16": Integers(group=16, symmetric=False),
    "pack-quantized, channels": Integers(strategy="channel", group=None),
    "pack-quantized, channels with zero points": Integers(strategy="channel", group=None, symmetric=False),
    "pack-quantized, bytes": Integers(bits=8),
    "pack-quantized, bytes with zero points": Integers(bits=8, symmetric=False),
    "int-quantized, channels": Integers(8, "channel", None, format="int-quantized"),
    "int-quantized, zero points": Integers(8, "channel", None, symmetric=False, format="int-quantized"),
    "int-quantized, tensors": Integers(8, "tensor", None, format="int-quantized"),
    "int-quantized, tensors with zero points": Integers(8, "tensor", None, symmetric=False, format="int-quantized"),
    "naive-quantized, tensors": Integers(8, "tensor", None, format="naive-quantized"),
    "int-quantized, four bits": Integers(4, "channel", None, format="int-quantized"),
}
each_shape = pytest.mark.parametrize("integers", SHAPES.values(), ids=SHAPES)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def weights(kind: str, dtype: torch.dtype = torch.bfloat16) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Random weights of a tiny Qwen3, or of a tiny Qwen3 with experts, and its config."""
    with quiet():
        from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

        sizes = {
            "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
            "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
        }  # fmt: skip
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
        torch.manual_seed(len(kind))
        if kind == "experts":
            config = Qwen3MoeConfig(**sizes, **experts)
            model = Qwen3MoeForCausalLM(config)
        else:
            config = Qwen3Config(**sizes)
            model = Qwen3ForCausalLM(config)
        said = {**json.loads(config.to_json_string()), "architectures": [type(model).__name__]}
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for number, both in enumerate(tensor):
                gate, up = both.chunk(2)
                path = f"{name.removesuffix('gate_up_proj')}{number}."
                state |= {f"{path}gate_proj.weight": gate, f"{path}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            path = name.removesuffix("down_proj")
            state |= {f"{path}{number}.down_proj.weight": down for number, down in enumerate(tensor)}
        else:
            state[name] = tensor
    return {name: tensor.to(dtype).contiguous() for name, tensor in state.items()}, {
        **said,
        "dtype": str(dtype).removeprefix("torch."),
    }


def same(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)


@pytest.mark.peers
@each_shape
@pytest.mark.parametrize("to", ["bf16", "fp16", "fp32"])
def test_decoded_values_are_those_of_compressed_tensors(integers: Integers, to: str, tmp_path: Path) -> None:
    truth = store(tmp_path / "source", *weights("dense", DTYPES[to]), integers)
    report = tx.convert(tmp_path / "source", tmp_path / "out", to="hf", decode=to, sync=False, verify=True)
    assert {measured.what.encoding for measured in report.recoded} == {f"int{integers.bits}"} or integers.bits == 4
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == truth.keys()
    assert [name for name in truth if not same(found[name], truth[name])] == []
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.peers
@each_shape
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_codes_move_raw_through_dialects_and_back(integers: Integers, kind: str, tmp_path: Path) -> None:
    """Fused, stacked and separate again: codes, scales, zero points and stated shapes are the same bytes."""
    source = tmp_path / "source"
    truth = store(source, *weights(kind), integers)
    stored = load_file(source / "model.safetensors")
    for dialect in ("vllm", "transformers", "torchtitan"):
        moved, back = tmp_path / dialect, tmp_path / f"{dialect} back"
        fused = dialect == "vllm" or (dialect == "transformers" and kind == "experts")
        if integers.strategy == "tensor" and fused:  # matrices with one scale each cannot be joined
            with pytest.raises(tx.TransaxleError, match=r"BLOCK_MISALIGNED|UNEQUAL_COPIES"):
                tx.convert(source, moved, to=f"safetensors:{dialect}", sync=False)
            continue
        tx.convert(source, moved, to=f"safetensors:{dialect}", sync=False)
        with tx.open(moved, decode="bf16") as checkpoint, tx.open(source, decode="bf16") as before:
            assert tx.diff(checkpoint, before).equal
        tx.convert(moved, back, to="hf", sync=False)
        found = load_file(back / "model.safetensors")
        assert found.keys() == stored.keys()
        assert [name for name in stored if not same(found[name], stored[name])] == []
    assert len(truth) < len(stored)


@pytest.mark.peers
def test_zero_points_may_be_stored_before_their_codes(tmp_path: Path) -> None:
    """Files list tensors in any order; a zero point has the dtype of codes of one byte."""
    source = tmp_path / "source"
    truth = store(source, *weights("dense"), SHAPES["int-quantized, zero points"])
    stored = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    zero_points = {name for name in stored if name.endswith("_zero_point")}
    shards = {"model-1.safetensors": zero_points, "model-2.safetensors": stored.keys() - zero_points}
    for file, names in shards.items():
        save_file({name: stored[name] for name in names}, source / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, names in shards.items() for name in names}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    tx.convert(source, tmp_path / "out", to="hf", decode="bf16", sync=False)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert [name for name in truth if not same(found[name], truth[name])] == []


@pytest.mark.peers
def test_stacked_codes_are_what_compressed_tensors_packs(tmp_path: Path) -> None:
    """A stack of experts is packed matrix by matrix, and its stated shape is that of the stack."""
    state, config = weights("experts")
    for symmetric in (True, False):
        integers = Integers(symmetric=symmetric)
        source, out = tmp_path / f"source{symmetric}", tmp_path / f"out{symmetric}"
        store(source, state, config, integers)
        tx.convert(source, out, to="safetensors:transformers", sync=False)
        found = load_file(out / "model.safetensors")
        path = "model.layers.1.mlp.experts."
        stack = torch.stack([state[f"{path}{number}.down_proj.weight"] for number in range(4)])
        expected, _ = quantize(stack, integers)
        for suffix, buffer in expected.items():
            assert same(found[f"{path}down_proj{suffix.removeprefix('weight')}"], buffer), suffix


@pytest.mark.peers
@pytest.mark.parametrize("group", [None, 16, 32])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_encoded_codes_are_those_of_compressed_tensors(group: int | None, dtype: torch.dtype, tmp_path: Path) -> None:
    state, config = weights("dense", dtype)
    row = state["model.layers.0.self_attn.q_proj.weight"]
    row[0] = 0
    row[1, 3], row[2, 5] = torch.finfo(dtype).max, -torch.finfo(dtype).tiny
    row[3] = torch.finfo(dtype).tiny
    plain, out = tmp_path / "plain", tmp_path / "out"
    plain.mkdir()
    save_file(state, plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(config))
    report = tx.convert(plain, out, to="hf", encode="int4", group_size=group, sync=False, verify=True)
    found = load_file(out / "model.safetensors")
    integers = Integers(group=group or 32)
    for name, weight in state.items():
        if "_proj" not in name:
            assert same(found.pop(name), weight)
            continue
        buffers, _ = quantize(weight, integers)
        for suffix, buffer in buffers.items():
            assert same(found.pop(name.removesuffix("weight") + suffix), buffer), (name, suffix)
    assert not found
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    with quiet():
        from compressed_tensors.quantization import QuantizationConfig

        weights_of = QuantizationConfig(**section).config_groups["group_0"].weights
    assert (weights_of.num_bits, weights_of.group_size, weights_of.symmetric) == (4, group or 32, True)
    assert len(report.recoded) == 14
    # what was decoded gets its codes back
    tx.convert(out, tmp_path / "decoded", to="hf", decode={v: k for k, v in DTYPES.items()}[dtype], sync=False)
    tx.convert(tmp_path / "decoded", tmp_path / "again", to="hf", encode="int4", group_size=group, sync=False)
    again = load_file(tmp_path / "again" / "model.safetensors")
    first = load_file(out / "model.safetensors")
    assert [name for name in first if not same(again[name], first[name])] == []


@pytest.mark.peers
def test_transformers_loads_what_is_written(tmp_path: Path) -> None:
    state, config = weights("dense")
    plain, out = tmp_path / "plain", tmp_path / "out"
    plain.mkdir()
    save_file(state, plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(config))
    tx.convert(plain, out, to="hf", encode="int4", sync=False)
    tx.convert(out, tmp_path / "decoded", to="hf", decode="bf16", sync=False)
    with quiet():
        from transformers import AutoModelForCausalLM

        ids = torch.arange(12).reshape(2, 6)
        logits = [
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)(ids).logits
            for folder in (out, tmp_path / "decoded")
        ]
    assert torch.equal(*logits)


def test_sizes_of_groups_are_checked(tmp_path: Path) -> None:
    plain = tmp_path / "plain.safetensors"
    save_file({"a.weight": torch.randn(4, 48)}, plain)
    said: dict[str, Any] = {"to": "safetensors", "only": "a.weight"}
    for size, encoding, words in ((24, "int4", "multiple of 16"), (32, "mxfp8", "fixed size")):
        with pytest.raises(UsageError, match=words):
            tx.convert(plain, tmp_path / "out", encode=encoding, group_size=size, **said)
    with pytest.raises(tx.TransaxleError, match="int4 has one scale for every 32 elements"):
        tx.convert(plain, tmp_path / "out", encode="int4", **said)
    assert not (tmp_path / "out").exists()


WRONG = {
    "weight_shape": ("SHAPE_MISMATCH", "states"),
    "weight_scale": ("SHAPE_MISMATCH", "scales of"),
    "weight_zero_point": ("SHAPE_MISMATCH", "the zero_point of"),
    "weight_scale missing": ("MISSING_TENSOR", "int4 needs its scale"),
    "weight_zero_point missing": ("MISSING_TENSOR", "int4 needs its zero_point"),
    "weight_packed dtype": ("DTYPE_MISMATCH", "codes of int4 must be I32; found U8"),
    "weight_zero_point dtype": ("DTYPE_MISMATCH", "the zero_point must be I32"),
    "weight_shape dtype": ("DTYPE_MISMATCH", "the shape must be I64 or I32"),
    "weight_g_idx": ("UNSUPPORTED", "more than code times scale"),
}


@pytest.mark.peers
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("said", [{"decode": "bf16", "to": "hf"}, {"to": "safetensors:vllm"}], ids=["decode", "move"])
def test_buffers_that_do_not_fit_are_refused(wrong: str, said: dict[str, Any], tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    store(source, *weights("dense"), Integers(symmetric=False))
    held = load_file(source / "model.safetensors")
    suffix, _, change = wrong.partition(" ")
    name = f"model.layers.1.mlp.up_proj.{suffix}"
    if change == "missing":
        del held[name]
    elif change == "dtype":
        held[name] = held[name].view(torch.uint8) if suffix == "weight_packed" else held[name].to(torch.int16)
    elif suffix == "weight_shape":
        held[name] = held[name] - torch.tensor([0, 4])
    else:
        held[name] = held[name][:, :1].contiguous() if name in held else torch.zeros(64, dtype=torch.int32)
    save_file(held, source / "model.safetensors")
    code, words = WRONG[wrong]
    with pytest.raises(tx.TransaxleError, match=words) as caught:
        tx.convert(source, out, sync=False, **said)
    assert code in {refusal.code for refusal in caught.value.refusals} or (wrong == "weight_shape" and "to" in said)
    assert any("layers.1.mlp.up_proj" in str(refusal) for refusal in caught.value.refusals)
    assert not out.exists()


@pytest.mark.parametrize("shape", [(0, 64), (8, 0)])
def test_tensors_without_elements_are_restated(shape: tuple[int, int], tmp_path: Path) -> None:
    rows, columns = shape
    buffers = {"packed": (torch.int32, (rows, columns // 8)), "scale": (torch.bfloat16, (rows, columns // 32))}
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    held = {f"a.weight_{suffix}": torch.zeros(size, dtype=dtype) for suffix, (dtype, size) in buffers.items()}
    save_file(held, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"quantization_config": Integers().section}))
    for said in ({"restate": "bf16"}, {"decode": "bf16"}):
        tx.convert(source, out, to="safetensors", overwrite=True, sync=False, **said)  # type: ignore[arg-type]
        found = load_file(out / "model.safetensors")
        assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == {
            "a.weight": (torch.bfloat16, shape)
        }


@pytest.mark.peers
def test_a_load_without_decode_names_the_option(tmp_path: Path) -> None:
    source = tmp_path / "source"
    truth = store(source, *weights("dense"), Integers())
    with quiet():
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = json.loads((source / "config.json").read_text())
        config.pop("quantization_config")
        model = Qwen3ForCausalLM(Qwen3Config(**config)).bfloat16()
    with pytest.raises(tx.TransaxleError, match=r"weight_packed(?s:.*)decode=\"bf16\"") as caught:
        tx.load(model, source)
    assert {refusal.code for refusal in caught.value.refusals} == {"DTYPE_MISMATCH"}
    tx.load(model, source, decode="bf16")
    assert [name for name, tensor in model.state_dict().items() if not same(tensor, truth[name])] == []


@pytest.mark.peers
@pytest.mark.parametrize("rows", [24, 20, 21, 11])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("stacked", [True, False])
def test_int4_as_int8_is_what_compressed_tensors_unpacks(
    rows: int, symmetric: bool, stacked: bool, tmp_path: Path
) -> None:
    """The same values as 8-bit integers, also where rows do not fill the words of zero points."""
    integers, source = Integers(symmetric=symmetric), tmp_path / "source"
    torch.manual_seed(rows)
    weight = torch.randn(3, rows, 64) if stacked else torch.randn(rows, 64)
    name = "experts.gate_up_proj" if stacked else "a_proj.weight"
    truth = store(source, {name: weight.bfloat16()}, {}, integers)[name]
    if stacked:
        held = load_file(source / "model.safetensors")
        save_file({key.replace("weight", ""): value for key, value in held.items()}, source / "model.safetensors")
    with quiet():
        from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
    before = {key.rpartition("_")[2]: value for key, value in load_file(source / "model.safetensors").items()}
    tx.convert(source, tmp_path / "out", to="safetensors:identity", restate="int8", sync=False)
    after = {key.rpartition("_")[2]: value for key, value in load_file(tmp_path / "out" / "model.safetensors").items()}
    codes = [
        unpack_from_int32(matrix, 4, torch.Size([rows, 64]))
        for matrix in before["packed"].reshape(-1, rows, 8).unbind()
    ]
    packed = torch.stack([pack_to_int32(each, 8) for each in codes]).reshape(after["packed"].shape)
    assert same(after["packed"], packed)
    assert same(after["scale"], before["scale"])
    assert same(after["shape"], before["shape"])
    with tx.open(tmp_path / "out", decode="bf16") as decoded:
        assert {tensor.name for tensor in tx.open(tmp_path / "out").encoded.values()} == {name}
        assert torch.equal(decoded[name].torch(), truth)
    if not symmetric:
        words = before["point"].reshape(-1, *before["point"].shape[-2:]).unbind()
        zeros = [unpack_from_int32(matrix, 4, torch.Size([rows, 2]), packed_dim=0) for matrix in words]
        expected = torch.stack([pack_to_int32(each.contiguous(), 8, packed_dim=0) for each in zeros])
        assert same(after["point"], expected.reshape(after["point"].shape))
