"""Whole checkpoints of GPTQ, AWQ and bitsandbytes: decoded into dialects and into live models, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

import transaxle as tx
from tests import checkpoints
from tests.engine import demand_refusal
from tests.engine.packed import Made, awq, gptq
from transaxle.errors import TransaxleError

SIZES = checkpoints.SIZES | {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
CONFIG = {**checkpoints.CONFIG, **SIZES}
KINDS: dict[str, Callable[..., Made]] = {
    "gptq": gptq,
    "gptq_v2, 8 bits": lambda *shape, seed: gptq(*shape, bits=8, first=False, seed=seed),
    "gptq, desc_act": lambda *shape, seed: gptq(*shape, act=True, seed=seed),
    "awq": awq,
    "gptq, symmetric": lambda *shape, seed: gptq(*shape, sym=True, seed=seed),
    "gptq_v2, 8 bits, symmetric": lambda *shape, seed: gptq(*shape, bits=8, first=False, sym=True, seed=seed),
    "gptq, partly symmetric": lambda *shape, seed: gptq(*shape, sym=seed % 2 == 0, seed=seed),
}
KEPT = "model.layers.0.self_attn.q_proj.weight"


def write(folder: Path, kind: str, **changes: Any) -> dict[str, torch.Tensor]:
    """Write a tiny Qwen3-MoE, all whose linear layers but the router and the head are quantized; return all values."""
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    section: dict[str, Any] = {}
    for seed, (name, array) in enumerate(checkpoints.tensors(SIZES).items()):
        plain = torch.from_numpy(array.view("int16")).view(torch.bfloat16)
        if "_proj." in name:
            made = KINDS[kind](*array.shape, 16, seed=seed)
            tensors |= {
                name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in made.tensors.items()
            }
            values[name], section = made.values.contiguous(), made.section | {"sym": "symmetric" in kind}
        else:
            tensors[name] = values[name] = plain
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {**CONFIG, "quantization_config": section} | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_decoded_for_the_hub(kind: str, tmp_path: Path) -> None:
    """In float32 each value is the exact product, which the program rounds to F16."""
    values = write(tmp_path / "source", kind)
    for to, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        report = tx.convert(tmp_path / "source", tmp_path / to, to="hf", decode=to)
        decoded = load_file(tmp_path / to / "model.safetensors")
        assert decoded.keys() == values.keys()
        for name, expected in values.items():
            if "_proj." in name:
                assert decoded[name].dtype is dtype
                assert to == "bf16" or torch.equal(decoded[name].half(), expected)
            else:
                assert torch.equal(decoded[name], expected)
        assert "quantization_config" not in json.loads((tmp_path / to / "config.json").read_text())
        assert len(report.recoded) == sum("_proj." in name for name in values)
    exact, rounded = (load_file(tmp_path / to / "model.safetensors") for to in ("fp32", "bf16"))
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in values)
    with tx.open(tmp_path / "source") as stored, tx.open(tmp_path / "bf16") as decoded_files:
        assert stored.parameters == decoded_files.parameters


@pytest.mark.parametrize("kind", KINDS)
def test_dialects_get_decoded_values(kind: str, tmp_path: Path) -> None:
    """The same as decoding for the hub first."""
    write(tmp_path / "source", kind)
    tx.convert(tmp_path / "source", tmp_path / "hub", to="hf", decode="bf16")
    for to in ("safetensors:torchtitan", "safetensors:megatron", "safetensors:transformers"):
        one, two = tmp_path / f"one {to}", tmp_path / f"two {to}"
        tx.convert(tmp_path / "source", one, to=to, decode="bf16")
        tx.convert(tmp_path / "hub", two, to=to)
        assert checkpoints.same(one, two)


def test_files_move_as_they_are(tmp_path: Path) -> None:
    write(tmp_path / "source", "gptq")
    tx.convert(tmp_path / "source", tmp_path / "moved", to="safetensors")
    assert checkpoints.same(tmp_path / "source", tmp_path / "moved")
    sections = [
        json.loads((tmp_path / place / "config.json").read_text())["quantization_config"]
        for place in ("source", "moved")
    ]
    assert sections[0] == sections[1]
    assert not tx.diff(tmp_path / "source", tmp_path / "moved").differences
    with tx.open(tmp_path / "source") as checkpoint:
        assert KEPT.replace("weight", "qweight") in checkpoint
        assert checkpoint.decode("fp32")[KEPT].dtype == "F32"


def test_live_tensors_get_decoded_values(tmp_path: Path) -> None:
    values = write(tmp_path / "source", "gptq, desc_act")
    state = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in values.items() if "_proj." in name}
    tx.load(state, tmp_path / "source", decode="fp32", strict=False)
    assert all(torch.equal(state[name].half(), values[name]) for name in state)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "desc_act" not in kind])
def test_restated_files_are_decompressed_by_compressed_tensors(kind: str, tmp_path: Path) -> None:
    values = write(tmp_path / "source", kind)
    tx.convert(tmp_path / "source", tmp_path / "out", to="hf", restate="compressed_tensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["format"], "lm_head" in config["ignore"]) == ("pack-quantized", True)
    groups = [QuantizationScheme(**group) for group in config["config_groups"].values()]
    (of_classes,) = [group for group in groups if group.targets == ["Linear"]] or [None]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert len(groups) == (2 if "partly" in kind else 1)
    for name, expected in values.items():
        if "_proj." in name:
            module = name.removesuffix("weight")
            (scheme,) = [group for group in groups if module[:-1] in group.targets] or [of_classes]
            state = {key.removeprefix(module): tensor for key, tensor in stored.items() if key.startswith(module)}
            assert scheme is not None
            assert scheme.weights.symmetric is ("weight_zero_point" not in state)
            assert torch.equal(PackedQuantizationCompressor.decompress(state, scheme)["weight"], expected)
        else:
            assert torch.equal(stored[name], expected)
    for to in ("hf", "safetensors:torchtitan"):
        one, two = tmp_path / f"one {to}", tmp_path / f"two {to}"
        tx.convert(tmp_path / "source", one, to=to, decode="bf16")
        tx.convert(tmp_path / "out", two, to=to, decode="bf16")
        assert checkpoints.same(one, two)


def test_only_zero_points_that_are_all_in_the_middle_are_left_out(tmp_path: Path) -> None:
    """`sym` alone proves nothing: one other zero point, the last one of a module, keeps all of the module."""
    write(tmp_path / "source", "gptq, symmetric")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    name = KEPT.replace("weight", "qzeros")
    tensors[name][-1, -1] ^= 1 << 28
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    plan = tx.plan(tmp_path / "source", tmp_path / "out", to="hf", restate="compressed_tensors")
    zeros = [tensor.name for tensor in plan.tensors if tensor.name.endswith("zero_point")]
    assert zeros == [KEPT + "_zero_point"]
    count = sum(name.endswith("qweight") for name in tensors)
    assert f"{count - 1} tensors stored as symmetric, without zero points" in " ".join(plan.notes)


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_zero_points_are_read_only_where_the_config_calls_them_symmetric(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "source", kind)
    with tx.open(tmp_path / "source", restate="compressed_tensors") as restated:
        assert restated.undecoded is not None
        assert not restated.undecoded.catalog.middle_zeros
        assert KEPT + "_zero_point" in restated


def test_symmetric_integers_of_four_bits_as_eight(tmp_path: Path) -> None:
    write(tmp_path / "source", "gptq, symmetric")
    tx.convert(tmp_path / "source", tmp_path / "out", to="hf", restate="int8")
    assert not any("zero" in name for name in load_file(tmp_path / "out" / "model.safetensors"))
    for place in ("source", "out"):
        tx.convert(tmp_path / place, tmp_path / f"{place} decoded", to="hf", decode="fp32")
    assert checkpoints.same(tmp_path / "source decoded", tmp_path / "out decoded")
    assert not tx.diff(tmp_path / "source", tmp_path / "out", numeric=True).differences


def test_no_other_weights_are_encoded_beside_them(tmp_path: Path) -> None:
    write(tmp_path / "source", "gptq")
    with demand_refusal("UNSUPPORTED", "weights of GPTQ stay as they are, and no quantization_config describes others"):
        tx.convert(tmp_path / "source", tmp_path / "out", to="safetensors", encode="mxfp8", only="lm_head.weight")
    assert not (tmp_path / "out").exists()


def test_reordered_columns_are_not_restated(tmp_path: Path) -> None:
    write(tmp_path / "source", "gptq, desc_act")
    with demand_refusal("UNSUPPORTED", "GPTQ has its columns in another order (desc_act)"):
        tx.convert(tmp_path / "source", tmp_path / "out", to="hf", restate="compressed_tensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "hf"}, "which cannot be written with other names"),
        ({"to": "safetensors:torchtitan"}, "which cannot be written with other names"),
        ({"to": "hf", "decode": "bf16", "skip": "*.q_proj.*"}, "stores them; decode all of them"),
        ({"to": "safetensors", "dtype": "fp32"}, "other tensors beside them cannot be cast"),
    ],
)
def test_codes_are_not_written_in_other_forms_by_accident(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "source", "awq")
    with demand_refusal("UNSUPPORTED", "its weights are stored as AWQ stores them", message, "--restate compressed"):
        tx.convert(tmp_path / "source", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_without_a_config_codes_are_refused(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "source", kind, quantization_config=None)
    with demand_refusal("UNSUPPORTED", "it has codes of integers as GPTQ or AWQ stores them", "--config"):
        tx.convert(tmp_path / "source", tmp_path / "out", to="hf", decode="bf16")


def test_the_config_may_be_given(tmp_path: Path) -> None:
    write(tmp_path / "source", "gptq")
    given = tmp_path / "given.json"
    (tmp_path / "source" / "config.json").rename(given)
    tx.convert(tmp_path / "source", tmp_path / "out", to="hf", decode="fp32", config=given)
    (tmp_path / "source" / "config.json").write_text(given.read_text())
    tx.convert(tmp_path / "source", tmp_path / "same", to="hf", decode="fp32")
    assert checkpoints.same(tmp_path / "out", tmp_path / "same")


SIDECARS = {
    "AutoGPTQ": (
        "gptq",
        "quantize_config.json",
        {"damp_percent": 0.01, "static_groups": False, "model_file_base_name": "m"},
    ),
    "GPTQModel": ("gptq_v2, 8 bits", "quantize_config.json", {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}),
    "AutoAWQ": ("awq", "quant_config.json", {"modules_to_not_convert": None}),
    "GPTQModel, AWQ": ("awq", "quantize_config.json", {"quant_method": "awq", "lm_head": False}),
}


def beside(folder: Path, file: str, fields: dict[str, Any], *, moved: bool = True) -> None:
    """Write what config.json says of its codes to a file of its own; it stays in config.json too if not moved."""
    config = json.loads((folder / "config.json").read_text())
    section = config["quantization_config"]
    names = {"bits": "w_bit", "group_size": "q_group_size"} if file == "quant_config.json" else {}
    kept = ("bits", "group_size", "desc_act", "sym", "zero_point", "version")
    stated = {names.get(key, key): section[key] for key in kept if key in section} | fields
    (folder / file).write_text(json.dumps(stated))
    if moved:
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("kind", "file", "fields"), SIDECARS.values(), ids=SIDECARS)
def test_older_programs_describe_codes_in_a_file_of_their_own(
    kind: str, file: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """The result is that of a config.json with the same section; and no file is left that says there are codes."""
    values = write(tmp_path / "source", kind)
    shutil.copytree(tmp_path / "source", tmp_path / "older")
    shutil.copytree(tmp_path / "source", tmp_path / "both")
    beside(tmp_path / "older", file, fields)
    beside(tmp_path / "both", file, fields, moved=False)
    (tmp_path / "older" / "tokenizer.json").write_text("{}")
    ways: dict[str, dict[str, Any]] = {"decoded": {"decode": "fp32"}, "restated": {"restate": "compressed_tensors"}}
    for name, how in ways.items():
        for place in ("source", "older", "both"):
            tx.convert(tmp_path / place, tmp_path / f"{place} {name}", to="hf", **how)
        for place in ("older", "both"):
            assert checkpoints.same(tmp_path / f"source {name}", tmp_path / f"{place} {name}")
            assert not (tmp_path / f"{place} {name}" / file).exists()
            texts = [(tmp_path / f"{each} {name}" / "config.json").read_text() for each in ("source", place)]
            assert json.loads(texts[0]) == json.loads(texts[1])
        assert (tmp_path / f"older {name}" / "tokenizer.json").exists()
    decoded = load_file(tmp_path / "older decoded" / "model.safetensors")
    assert all(torch.equal(decoded[name].half(), value) for name, value in values.items() if "_proj." in name)
    tx.convert(tmp_path / "older", tmp_path / "moved", to="safetensors")
    assert (tmp_path / "moved" / file).read_bytes() == (tmp_path / "older" / file).read_bytes()


def test_files_that_contradict_each_other_are_refused_unless_the_user_decides(tmp_path: Path) -> None:
    """transformers and vLLM would read one of them, GPTQModel the other."""
    values = write(tmp_path / "source", "gptq")
    beside(tmp_path / "source", "quantize_config.json", {"checkpoint_format": "gptq_v2"}, moved=False)
    options: dict[str, Any] = {"to": "hf", "decode": "fp32"}
    with demand_refusal("CORRUPT", "quantize_config.json", "checkpoint_format differ from what config.json says"):
        tx.convert(tmp_path / "source", tmp_path / "out", **options)
    tx.convert(tmp_path / "source", tmp_path / "out", config=tmp_path / "source" / "config.json", **options)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[KEPT].half(), values[KEPT])
    assert not (tmp_path / "out" / "quantize_config.json").exists()


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"bits": 3}, "UNSUPPORTED", "bits is 3; known: 4, 8"),
        ({"bits": "four"}, "CORRUPT", "Expected `int`"),
        ({"rotation": "hadamard"}, "UNSUPPORTED", "rotation is not known here"),
        ({"quant_method": "hqq"}, "UNSUPPORTED", "quant_method is 'hqq'; known in this file: gptq, awq"),
    ],
)
def test_refusals_name_the_file(fields: dict[str, Any], code: str, message: str, tmp_path: Path) -> None:
    write(tmp_path / "source", "gptq")
    beside(tmp_path / "source", "quantize_config.json", fields)
    with pytest.raises(TransaxleError) as refused:
        tx.convert(tmp_path / "source", tmp_path / "out", to="hf", decode="bf16")
    assert (refused.value.code, refused.value.where.file) == (code, "quantize_config.json")
    assert message in str(refused.value)


def test_a_file_that_is_left_over_beside_plain_weights_has_no_effect(tmp_path: Path) -> None:
    write(tmp_path / "source", "gptq")
    tx.convert(tmp_path / "source", tmp_path / "plain", to="hf", decode="bf16")
    (tmp_path / "plain" / "quantize_config.json").write_text("no JSON")
    tx.convert(tmp_path / "plain", tmp_path / "out", to="hf")
    assert checkpoints.same(tmp_path / "plain", tmp_path / "out")


def test_models_of_conv1d_layers_are_refused(tmp_path: Path) -> None:
    """GPTQModel and transformers transpose their weights before they quantize them, gpt2's square ones too."""
    write(tmp_path / "source", "gptq", model_type="gpt2")
    with demand_refusal("UNSUPPORTED", "GPTQ transposes the weights of gpt2"):
        tx.convert(tmp_path / "source", tmp_path / "out", to="safetensors", decode="bf16")


def test_a_damaged_index_leaves_no_output(tmp_path: Path) -> None:
    write(tmp_path / "source", "gptq")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    name = KEPT.replace("weight", "g_idx")
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    with pytest.raises(TransaxleError) as refused:
        tx.convert(tmp_path / "source", tmp_path / "out", to="hf", decode="bf16")
    assert (refused.value.code, refused.value.where.tensor) == ("CORRUPT", name)
    assert not (tmp_path / "out").exists()


def test_numbers_are_those_of_the_array_that_a_user_reads(tmp_path: Path) -> None:
    values = write(tmp_path / "source", "awq")
    with tx.open(tmp_path / "source", decode="bf16") as checkpoint:
        rows = checkpoint[KEPT].read((slice(5, 9), slice(3, 50)))
        whole = checkpoint[KEPT].read()
    assert rows.dtype == ml_dtypes.bfloat16
    assert (rows == whole[5:9, 3:50]).all()
    exact = values[KEPT].float().numpy()
    assert abs(whole.astype("f4") - exact).max() <= abs(exact).max() * 2.0**-8
