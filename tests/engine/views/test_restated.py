"""`--restate`: peers' files in the buffers of another ecosystem, which decodes them to the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import transaxle as tx
from tests.engine import quantized
from tests.engine.quantized import E2M1, nibbles
from tests.oracles import MISSING
from tests.oracles.quantized_peers import Made, compressed, fp8
from transaxle.errors import Refused, UsageError

Tensors = dict[str, torch.Tensor]

HALF = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
CONFIG = {"dtype": "bfloat16"}
"""Of no known model, so that a single layer may be one."""
Q = "model.layers.0.self_attn.q_proj"

peers = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
pytestmark = pytest.mark.filterwarnings("ignore")


def section(weights: Mapping[str, Any], form: str, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "format": form, **more}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def save(folder: Path, tensors: Tensors, config: Mapping[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def read(folder: Path) -> Tensors:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def restate(source: Path, target: Path, to: str, **options: Any) -> Tensors:
    tx.convert(source, target, restate=to, **{"to": "safetensors:identity", "sync": False, "verify": True, **options})
    return read(target)


def unlike(first: Tensors, second: Tensors) -> set[str]:
    """Names of the tensors that are not in both, or not the same bytes."""
    shared = {
        name
        for name in first.keys() & second.keys()
        if first[name].dtype == second[name].dtype and first[name].shape == second[name].shape
        if torch.equal(first[name].reshape(-1).view(torch.uint8), second[name].reshape(-1).view(torch.uint8))
    }
    return (first.keys() | second.keys()) - shared


def config_section(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = quantized.config_of(folder)["quantization_config"]
    return found


def nvfp4(number: float, shape: tuple[int, int] = (32, 64), seed: int = 0) -> Tensors:
    rows, columns = shape
    maker = torch.Generator().manual_seed(seed)
    scales = torch.randint(1, 0x7F, (rows, columns // 16), dtype=torch.uint8, generator=maker)
    return {
        f"{Q}.weight_packed": torch.randint(256, (rows, columns // 2), dtype=torch.uint8, generator=maker),
        f"{Q}.weight_scale": scales.view(torch.float8_e4m3fn),
        f"{Q}.weight_global_scale": torch.tensor([number]),
    }


def mxfp4(shape: tuple[int, ...], low: int, high: int, seed: int = 0) -> Tensors:
    *outer, columns = shape
    maker = torch.Generator().manual_seed(seed)
    return {
        f"{Q}.weight_packed": torch.randint(256, (*outer, columns // 2), dtype=torch.uint8, generator=maker),
        f"{Q}.weight_scale": torch.randint(low, high + 1, (*outer, columns // 32), dtype=torch.uint8, generator=maker),
    }


def of_mxfp4(tensors: Tensors, name: str = Q) -> np.ndarray:
    """What codes with E8M0 scales stand for, in double precision."""
    codes = nibbles(tensors[f"{name}.weight_packed"].numpy()).astype(np.float64)
    scales = np.exp2(tensors[f"{name}.weight_scale"].numpy().astype(np.float64) - 127)
    values: np.ndarray = codes * scales.repeat(32, axis=-1)
    return values


MX = section(HALF | {"strategy": "group", "group_size": 32}, "mxfp4-pack-quantized")


def of_modelopt(packed: torch.Tensor, scales: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """ModelOpt's `NVFP4QTensor.dequantize` (0.33), from its source: the scales of blocks times the second scale, then
    the codes, the lower half of a byte first.
    """
    table = torch.tensor([*E2M1, *-E2M1])
    codes = torch.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    values = table[codes.long()].unflatten(-1, (-1, 16))
    product: torch.Tensor = values * (scales.float() * whole.float()).unsqueeze(-1)
    return product.flatten(-2)


def of_compressed_tensors(tensors: Tensors, preset: str, name: str) -> torch.Tensor:
    """What the compressor of compressed-tensors itself decompresses."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme

    form = {"NVFP4A16": "nvfp4-pack-quantized", "MXFP4": "mxfp4-pack-quantized", "MXFP8": "mxfp8-quantized"}
    scheme = preset_name_to_scheme(preset, ["Linear"])
    local = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
    compressor = BaseCompressor.get_value_from_registry(form.get(preset, "float-quantized"))
    weight: torch.Tensor = compressor.decompress(local, scheme)["weight"]
    return weight


@peers
def test_a_divisor_of_300_in_modelopt_and_back(tmp_path: Path) -> None:
    tensors = nvfp4(300.0)
    weights = HALF | {"scale_dtype": "torch.float8_e4m3fn"}
    source = save(tmp_path / "a", tensors, {**CONFIG, "quantization_config": section(weights, "nvfp4-pack-quantized")})
    there = restate(source, tmp_path / "b", "modelopt")
    assert there.keys() == {f"{Q}.weight", f"{Q}.weight_scale", f"{Q}.weight_scale_2"}
    assert there[f"{Q}.weight_scale_2"].shape == ()
    assert there[f"{Q}.weight_scale_2"] == torch.tensor(1.0) / 300
    assert config_section(tmp_path / "b") == {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16}
    expected = of_compressed_tensors(tensors, "NVFP4A16", Q)
    scales = tensors[f"{Q}.weight_scale"].float() / 300
    plain = nibbles(tensors[f"{Q}.weight_packed"].numpy())
    assert torch.equal(expected, (torch.from_numpy(plain) * scales.repeat_interleave(16, 1)).bfloat16())
    values = of_modelopt(there[f"{Q}.weight"], there[f"{Q}.weight_scale"], there[f"{Q}.weight_scale_2"])
    assert torch.equal(values.bfloat16(), expected)
    back = restate(tmp_path / "b", tmp_path / "c", "compressed_tensors")
    assert unlike(tensors, back) == set()
    assert config_section(tmp_path / "c")["config_groups"]["group_0"]["weights"]["strategy"] == "tensor_group"


def preset(name: str, folder: Path) -> tuple[Path, Made]:
    (folder / "work").mkdir()
    made = compressed({name: ["Linear"]}, ["lm_head"], 1, folder / "work")
    made.save(folder / "source")
    return folder / "source", made


WAYS = {
    "NVFP4A16": ("modelopt", "compressed_tensors"),
    "FP8": ("modelopt", "deepseek", "compressed_tensors"),
    "FP8_DYNAMIC": ("modelopt", "compressed_tensors"),
    "FP8_BLOCK": ("deepseek", "modelopt", "transformers_fp8", "compressed_tensors"),
    "MXFP4": ("gpt_oss", "compressed_tensors"),
    "MXFP8": ("deepseek", "modelopt", "compressed_tensors"),
}


@peers
@pytest.mark.parametrize("name", WAYS)
def test_files_of_compressed_tensors_go_round(name: str, tmp_path: Path) -> None:
    """Every way decodes to the same bits as the source, and the last has the names and types of the source."""
    source, made = preset(name, tmp_path)
    with tx.open(source, decode="bf16") as checkpoint:
        values = {each: checkpoint[each].tobytes() for each in made.values}
    folder = source
    for number, to in enumerate(WAYS[name]):
        restate(folder, tmp_path / str(number), to)
        folder = tmp_path / str(number)
        with tx.open(folder, decode="bf16") as checkpoint:
            assert {each: checkpoint[each].tobytes() for each in made.values} == values
            assert not checkpoint.catalog.refusals
    back = read(folder)
    changed = unlike(made.tensors, back)
    # Above the root of two, two divisors may have one inverse in float32.
    assert all(each.endswith("weight_global_scale") for each in changed)
    for each in made.values:
        module = each.removesuffix(".weight")
        first, last = (of_compressed_tensors(tensors, name, module) for tensors in (made.tensors, back))
        assert torch.equal(first, last), each
    for each in changed:
        mantissa = np.frexp(made.tensors[each].item())[0] * 2
        assert mantissa > np.sqrt(2)
        assert abs(back[each].view(torch.int32) - made.tensors[each].view(torch.int32)) == 1


@peers
def test_modelopt_reads_what_compressed_tensors_wrote(tmp_path: Path) -> None:
    source, made = preset("NVFP4A16", tmp_path)
    there = restate(source, tmp_path / "out", "modelopt")
    for name in made.values:
        module = name.removesuffix(".weight")
        values = of_modelopt(there[name], there[f"{module}.weight_scale"], there[f"{module}.weight_scale_2"])
        assert torch.equal(values.bfloat16(), of_compressed_tensors(made.tensors, "NVFP4A16", module))
    assert config_section(tmp_path / "out")["ignore"] == ["lm_head", "model.embed_tokens"]


@peers
@pytest.mark.parametrize("name", ["FP8_DYNAMIC", "NVFP4A16"])
def test_torchao_s_own_loader_reads_what_was_restated(name: str, tmp_path: Path) -> None:
    """`unflatten_tensor_state_dict` builds its tensors from our headers, and dequantizes them to the peer's values."""
    from safetensors import safe_open
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict
    from transformers import AutoModelForCausalLM, TorchAoConfig

    source, made = preset(name, tmp_path)
    there = restate(source, tmp_path / "out", "torchao")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    built, rest = unflatten_tensor_state_dict(there, metadata)
    assert rest == {}
    plain = {
        each for each in made.tensors if not any(each.startswith(head.removesuffix("weight")) for head in made.values)
    }
    assert built.keys() == plain | made.values.keys()
    with tx.open(source, decode="bf16") as checkpoint:
        for each in made.values:
            expected = torch.from_numpy(checkpoint[each].read().view(np.int16)).view(torch.bfloat16)
            assert torch.equal(built[each].dequantize(torch.bfloat16), expected), each
    written = TorchAoConfig.from_dict(config_section(tmp_path / "out"))
    assert type(written.quant_type).__name__ == ("NVFP4WeightOnlyConfig" if "NV" in name else "Float8WeightOnlyConfig")
    assert "lm_head" in written.modules_to_not_convert
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    with torch.no_grad():
        for each in made.values:
            loaded = model.state_dict()[each].dequantize(torch.bfloat16)
            assert torch.equal(loaded, built[each].dequantize(torch.bfloat16)), each
    back = restate(tmp_path / "out", tmp_path / "back", "compressed_tensors")
    assert all("global_scale" in each for each in unlike(made.tensors, back))
    (refusal,) = tx.plan(source, tmp_path / "x", to="dcp", restate="torchao").refusals
    assert "--to safetensors:identity" in refusal.hint


@peers
def test_what_torchao_has_no_config_for_is_refused(tmp_path: Path) -> None:
    source, _ = preset("MXFP8", tmp_path)
    with pytest.raises(Refused, match="mxfp8 cannot be stored in the convention torchao"):
        tx.open(source, restate="torchao")


@peers
def test_scales_of_inputs_change_with_their_meaning(tmp_path: Path) -> None:
    """ModelOpt stores a factor, compressed-tensors a divisor; for codes of eight bits both store a factor."""
    tensors = nvfp4(300.0) | {f"{Q}.input_global_scale": torch.tensor([20.0])}
    config = {**CONFIG, "quantization_config": section(HALF, "nvfp4-pack-quantized")}
    source = save(tmp_path / "a", tensors, config)
    plan = tx.plan(source, tmp_path / "x", to="safetensors:identity", restate="modelopt")
    assert any("scales of inputs" in note for note in plan.notes)
    there = restate(source, tmp_path / "b", "modelopt")
    assert config_section(tmp_path / "b")["quant_algo"] == "NVFP4"
    assert there[f"{Q}.input_scale"].item() == torch.tensor(0.05).item()
    back = restate(tmp_path / "b", tmp_path / "c", "compressed_tensors")
    assert unlike(tensors, back) == set()
    inputs = config_section(tmp_path / "c")["config_groups"]["group_0"]["input_activations"]
    assert (inputs["num_bits"], inputs["dynamic"]) == (4, "local")
    for to in ("te", "torchao"):
        with pytest.raises(Refused, match=f"{to} has no place for the scale of its inputs"):
            restate(source, tmp_path / "d", to)


@peers
def test_a_scale_per_row_has_no_place_in_deepseek_s_form(tmp_path: Path) -> None:
    source, made = preset("FP8_DYNAMIC", tmp_path)
    with pytest.raises(
        Refused, match="float8 with a scale per row cannot be stored in the convention deepseek"
    ) as error:
        tx.open(source, restate="deepseek")
    assert {refusal.where.tensor for refusal in error.value.refusals} == made.values.keys()
    assert "Conventions with float8: compressed_tensors, modelopt, torchao." in str(error.value)


def test_layers_without_scales_of_inputs_are_not_described_as_if_they_had_them(tmp_path: Path) -> None:
    """vLLM takes a missing scale for any number: ModelOpt's config says which layers have one, and one group of
    compressed-tensors cannot.
    """
    other = Q.replace("q_proj", "o_proj")
    tensors = nvfp4(300.0) | {name.replace(Q, other): tensor for name, tensor in nvfp4(300.0, seed=1).items()}
    tensors[f"{Q}.input_global_scale"] = torch.tensor([20.0])
    config = {**CONFIG, "quantization_config": section(HALF, "nvfp4-pack-quantized")}
    restate(save(tmp_path / "a", tensors, config), tmp_path / "b", "modelopt")
    written = config_section(tmp_path / "b")
    assert written["quant_algo"] == "MIXED_PRECISION"
    algorithms = {module: layer["quant_algo"] for module, layer in written["quantized_layers"].items()}
    assert algorithms == {Q: "NVFP4", other: "W4A16_NVFP4"}
    (refusal,) = tx.plan(
        tmp_path / "b", tmp_path / "c", to="safetensors:identity", restate="compressed_tensors"
    ).refusals
    assert (refusal.code, refusal.where.tensor) == ("UNSUPPORTED", f"{other}.weight")
    assert f"its inputs are not quantized, but those of {Q}.weight are" in refusal.message


def test_fp8_of_modelopt_needs_scales_of_inputs(tmp_path: Path) -> None:
    """vLLM's `ModelOptFp8LinearMethod` quantizes inputs with a stored scale only; a missing one stays the least float32
    number.
    """
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    config = {**CONFIG, "quantization_config": section(weights, "float-quantized")}
    codes = torch.randint(0, 0x7F, (32, 64), dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors = {f"{Q}.weight": codes, f"{Q}.weight_scale": torch.tensor([0.5])}
    with pytest.raises(Refused, match="float8 of modelopt has a scale of its inputs, and this layer has none"):
        tx.open(save(tmp_path / "a", tensors, config), restate="modelopt")
    whole = tensors | {f"{Q}.input_scale": torch.tensor([0.25])}
    there = restate(save(tmp_path / "b", whole, config), tmp_path / "c", "modelopt")
    assert (there[f"{Q}.input_scale"].item(), there[f"{Q}.input_scale"].shape) == (0.25, ())


@peers
def test_matrices_of_128_rows_are_no_blocks_in_torchao(tmp_path: Path) -> None:
    """Beside other shapes, too: the config says `PerTensor`, and torchao dequantizes to code times scale."""
    from safetensors import safe_open
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    config = {**CONFIG, "quantization_config": section(weights, "float-quantized")}
    tensors: Tensors = {}
    for number, (name, rows) in enumerate({Q: 128, Q.replace("q_proj", "o_proj"): 256}.items()):
        codes = torch.randint(0, 0x7F, (rows, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
        tensors[f"{name}.weight"] = codes.view(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale"] = torch.tensor([0.37 + number])
    there = restate(save(tmp_path / "a", tensors, config), tmp_path / "b", "torchao")
    written = config_section(tmp_path / "b")["quant_type"]["default"]
    assert written["_data"]["granularity"]["_type"] == "PerTensor"
    with safe_open(tmp_path / "b" / "model.safetensors", "pt") as file:
        built, _ = unflatten_tensor_state_dict(there, file.metadata())
    for name, value in built.items():
        expected = tensors[name].float() * tensors[f"{name}_scale"]
        assert torch.equal(value.dequantize(torch.bfloat16), expected.bfloat16())


@peers
@pytest.mark.parametrize(("block", "form"), [((32, 32), "float"), ((1, 32), "ue8m0"), (None, "float")])
def test_fp8_of_transformers_as_compressed_tensors(block: tuple[int, int] | None, form: str, tmp_path: Path) -> None:
    """Tied heads, routers and embeddings are listed as plain; inputs are quantized as before."""
    made = fp8(block, form, 3)
    made.save(tmp_path / "a")
    there = restate(tmp_path / "a", tmp_path / "b", "compressed_tensors")
    written = config_section(tmp_path / "b")
    assert {"lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"} <= set(written["ignore"])
    inputs = written["config_groups"]["group_0"]["input_activations"]
    assert (inputs["dynamic"], inputs["strategy"]) == (True, "token" if block is None else "group")
    for name, value in made.tensors.items():
        scale = name.removesuffix("_inv")
        assert torch.equal(there[scale].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name
    back = restate(tmp_path / "b", tmp_path / "c", "transformers_fp8")
    shaped = {name: back[name].reshape(value.shape) for name, value in made.tensors.items()}  # [1, 1] or []
    assert unlike(made.tensors, shaped) == set()
    assert back.keys() == made.tensors.keys()
    assert config_section(tmp_path / "c")["weight_block_size"] == (None if block is None else list(block))


@peers
def test_notes_say_what_transformers_misreads(tmp_path: Path) -> None:
    fp8((1, 32), "ue8m0", 3).save(tmp_path / "a")
    for to, words in (("compressed_tensors", "experts in mxfp8"), ("modelopt", "no reader for files of ModelOpt")):
        plan = tx.plan(tmp_path / "a", tmp_path / to, to="hf", restate=to)
        assert any("transformers 5.24" in note and words in note for note in plan.notes), plan.notes
    assert not any("transformers" in note for note in tx.plan(tmp_path / "a", tmp_path / "b", to="hf").notes)


@peers
@pytest.mark.peers
def test_transformers_loads_both_forms_of_fp8_blocks(tmp_path: Path) -> None:
    """A Llama in DeepSeek's form, and the same restated: both dequantized by transformers, to the same bits."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

    source = quantized.store(tmp_path / "a", quantized.llama(d=128, f=256, g=2, r=2, head=64))
    restate(source, tmp_path / "b", "compressed_tensors")
    methods = {"a": FineGrainedFP8Config(dequantize=True), "b": CompressedTensorsConfig(run_compressed=False)}
    first, second = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16, quantization_config=method)
        for name, method in methods.items()
    )
    with tx.open(source, decode="bf16") as checkpoint, torch.no_grad():
        states = [dict(model.state_dict()) for model in (first, second)]
        for name, tensor in checkpoint.items():
            expected = tensor.torch()
            for state in states:
                assert torch.equal(state[name].bfloat16(), expected), name


@pytest.mark.parametrize(("to", "kind"), [("mxfp8", "MXFP8"), ("nvfp4", "NVFP4A16"), ("float8_block", "FP8_BLOCK")])
@peers
def test_mxfp4_recoded_is_decompressed_by_compressed_tensors_to_the_same_values(
    to: str, kind: str, tmp_path: Path
) -> None:
    source, made = preset("MXFP4", tmp_path)
    there = restate(source, tmp_path / "out", to)
    for name in made.values:
        module = name.removesuffix(".weight")
        before = of_compressed_tensors(made.tensors, "MXFP4", module).float()
        assert torch.equal(of_compressed_tensors(there, kind, module).float(), before), name
        assert torch.equal(before, torch.from_numpy(of_mxfp4(made.tensors, module)).float())


CASES: dict[str, tuple[str, tuple[int, ...], int, int]] = {
    "mxfp8, all scales": ("mxfp8", (40, 96), 0, 255),
    "nvfp4, as far apart as E4M3 allows": ("nvfp4", (40, 96), 100, 117),
    "nvfp4, the smallest": ("nvfp4", (40, 96), 0, 17),
    "nvfp4, the largest": ("nvfp4", (40, 96), 237, 254),
    "nvfp4, a stack": ("nvfp4", (5, 40, 96), 120, 130),
    "tiles, as far apart as E4M3 allows": ("float8_block", (300, 416), 100, 114),
    "tiles, the smallest": ("float8_block", (129, 32), 0, 14),
    "tiles, the largest": ("float8_block", (129, 160), 240, 254),
    "tiles of a stack": ("float8_block", (3, 130, 288), 120, 130),
}


@pytest.mark.parametrize(("to", "shape", "low", "high"), CASES.values(), ids=CASES)
def test_recoded_values_are_those_of_the_definition(
    to: str, shape: tuple[int, ...], low: int, high: int, tmp_path: Path
) -> None:
    tensors = mxfp4(shape, low, high)
    if high == 255:
        tensors[f"{Q}.weight_scale"][0, 0] = 255
    source = save(tmp_path / "a", tensors, {**CONFIG, "quantization_config": MX})
    there = restate(source, tmp_path / "b", to, memory="1MB")
    expected = of_mxfp4(tensors)
    scale = there[f"{Q}.weight_scale"]
    if to == "nvfp4":
        codes = nibbles(there[f"{Q}.weight_packed"].numpy())
        whole = there[f"{Q}.weight_global_scale"].double().numpy().reshape(*shape[:-2], 1, 1)
        values = codes.astype(np.float64) * scale.double().numpy().repeat(16, axis=-1) / whole
    else:
        codes = there[f"{Q}.weight"].double().numpy()
        exponents = np.exp2(scale.numpy().astype(np.float64) - 127) if to == "mxfp8" else scale.double().numpy()
        down, along = (1, 32) if to == "mxfp8" else (128, 128)
        spread = exponents.repeat(down, axis=-2).repeat(along, axis=-1)
        values = codes * spread[..., : shape[-2], : shape[-1]]
    nan = np.repeat(tensors[f"{Q}.weight_scale"].numpy() == 255, 32, axis=-1)
    assert np.array_equal(values[~nan], expected[~nan])
    assert np.array_equal(np.signbit(values[~nan]), np.signbit(expected[~nan]))
    with tx.open(source, decode="fp32") as before, tx.open(tmp_path / "b", decode="fp32") as after:
        assert before[f"{Q}.weight"].tobytes() == after[f"{Q}.weight"].tobytes()
        assert nan.any() == np.isnan(after[f"{Q}.weight"].read()).any()


@pytest.mark.parametrize(("to", "span", "words"), [("nvfp4", 18, "2^18 apart"), ("float8_block", 15, "2^15 apart")])
def test_scales_too_far_apart_are_refused_unless_the_codes_are_0(
    to: str, span: int, words: str, tmp_path: Path
) -> None:
    tensors = mxfp4((130, 64), 120, 120)
    tensors[f"{Q}.weight_scale"][129, 1] = 120 - span
    tensors[f"{Q}.weight_scale"][128, 0] = 120
    source = save(tmp_path / "a", tensors, {**CONFIG, "quantization_config": MX})
    (refusal,) = tx.plan(source, tmp_path / "b", to="safetensors:identity", restate=to).refusals
    assert (refusal.code, refusal.where.tensor) == ("UNSUPPORTED", f"{Q}.weight")
    assert words in refusal.message
    assert "--decode bf16" in refusal.hint
    with pytest.raises(Refused, match="apart"), tx.open(source, restate=to) as checkpoint:
        checkpoint[f"{Q}.weight_scale"].read()
    tensors[f"{Q}.weight_packed"][129, 16:] = torch.tensor([0, 8, 128, 136] * 4, dtype=torch.uint8)
    source = save(tmp_path / "c", tensors, {**CONFIG, "quantization_config": MX})
    restate(source, tmp_path / "d", to)
    with tx.open(source, decode="bf16") as before, tx.open(tmp_path / "d", decode="bf16") as after:
        assert before[f"{Q}.weight"].tobytes() == after[f"{Q}.weight"].tobytes()


def test_values_of_bf16_are_written_only_if_all_are_exact(tmp_path: Path) -> None:
    """A scale of five significant bits is exact with E2M1 codes; one of 24 is not, and the refusal counts values."""
    exact = nvfp4(1.0)
    config = {**CONFIG, "quantization_config": section(HALF, "nvfp4-pack-quantized")}
    restate(save(tmp_path / "a", exact, config), tmp_path / "b", "bf16")
    assert "quantization_config" not in quantized.config_of(tmp_path / "b")
    codes = torch.from_numpy(nibbles(exact[f"{Q}.weight_packed"].numpy()))
    values = codes.double() * exact[f"{Q}.weight_scale"].double().repeat_interleave(16, 1)
    assert torch.equal(read(tmp_path / "b")[f"{Q}.weight"].double(), values)
    inexact = nvfp4(300.0)
    source = save(tmp_path / "c", inexact, config)
    (refusal,) = tx.plan(source, tmp_path / "d", to="safetensors:identity", restate="bf16").refusals
    products = values / 300
    rounded = (codes * (inexact[f"{Q}.weight_scale"].float() / 300).repeat_interleave(16, 1)).bfloat16().double()
    unequal = (rounded != products).nonzero()
    assert refusal.message.startswith(f"{len(unequal):,} values")
    assert refusal.message.endswith(str(unequal[0].tolist()))
    assert refusal.where.tensor == f"{Q}.weight"


@peers
def test_mxfp8_as_bf16_reads_scales_alone(tmp_path: Path) -> None:
    source, made = preset("MXFP8", tmp_path)
    there = restate(source, tmp_path / "out", "bf16")
    for name, value in made.values.items():
        assert torch.equal(there[name], value)


EXPONENTS = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}


def test_exponents_of_blocks_become_float32_where_readers_expect_numbers(tmp_path: Path) -> None:
    """compressed-tensors would take the bytes for numbers."""
    codes = torch.randint(0x7F, (130, 256), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.tensor([[0, 1], [127, 254]], dtype=torch.uint8)
    tensors = {f"{Q}.weight": codes, f"{Q}.weight_scale_inv": scales.view(torch.float8_e8m0fnu)}
    source = save(tmp_path / "a", tensors, {**CONFIG, "quantization_config": EXPONENTS})
    there = restate(source, tmp_path / "b", "compressed_tensors")
    assert there[f"{Q}.weight_scale"].dtype == torch.float32
    assert there[f"{Q}.weight_scale"].double().tolist() == np.exp2(scales.double().numpy() - 127).tolist()
    assert unlike({"w": codes}, {"w": there[f"{Q}.weight"]}) == set()


def test_training_engines_get_an_amax(tmp_path: Path) -> None:
    """TransformerEngine's nvfp4 has no config: the section goes, and the tensors are recognised by their names."""
    tensors = nvfp4(2688.0 / 1.75)
    config = {**CONFIG, "quantization_config": section(HALF, "nvfp4-pack-quantized")}
    source = save(tmp_path / "a", tensors, config)
    there = restate(source, tmp_path / "b", "te")
    assert there[f"{Q}.weight_amax"].tolist() == [1.75]
    assert "quantization_config" not in quantized.config_of(tmp_path / "b")
    with tx.open(source, decode="bf16") as before, tx.open(tmp_path / "b", decode="bf16") as after:
        assert before[f"{Q}.weight"].tobytes() == after[f"{Q}.weight"].tobytes()


@pytest.mark.parametrize(("dtype", "is_exact"), [("bfloat16", True), ("float32", False)])
def test_a_hub_gets_a_divisor_that_changes_no_value_of_the_models_type(
    dtype: str, is_exact: bool, tmp_path: Path
) -> None:
    """An amax of 1.7 has a divisor that gives the same values in bfloat16, and others in float32."""
    source = quantized.store(tmp_path / "a", quantized.plain_llama(d=64, f=64, g=1, r=1, head=64))
    tx.convert(source, tmp_path / "b", to="hf", encode="nvfp4", sync=False)
    tensors = {
        n: torch.full_like(t, 1.7) if "amax" in n else t
        for n, t in restate(tmp_path / "b", tmp_path / "c", "te").items()
    }
    trained = save(tmp_path / "d", tensors, {**quantized.config_of(source), "torch_dtype": dtype})
    assert (not tx.plan(trained, tmp_path / "x", to="hf").refusals) == is_exact


@peers
def test_hubs_have_no_files_for_training_engines(tmp_path: Path) -> None:
    """`--to hf` of TransformerEngine's tensors writes compressed-tensors' form, which is not what `te` asks for."""
    source, _ = preset("NVFP4A16", tmp_path)
    (refusal,) = tx.plan(source, tmp_path / "x", to="hf", restate="te").refusals
    assert "a hub's folder has such tensors in the convention compressed_tensors" in refusal.message
    assert "--to safetensors:identity" in refusal.hint
    assert any(name.endswith("weight_amax") for name in restate(source, tmp_path / "y", "te"))


def deepseek(folder: Path) -> Path:
    return quantized.store(folder, quantized.deepseek())


def test_a_restated_checkpoint_moves_to_another_dialect_and_format(tmp_path: Path) -> None:
    """The same as restating first and converting then, and the same in two steps."""
    source = deepseek(tmp_path / "a")
    tx.convert(source, tmp_path / "b", to="dcp:torchtitan", restate="compressed_tensors", sync=False, verify=True)
    restate(source, tmp_path / "c", "compressed_tensors")
    tx.convert(tmp_path / "c", tmp_path / "d", to="dcp:torchtitan", sync=False)
    assert tx.verify(tmp_path / "b", tmp_path / "d")
    assert tx.verify(source, tmp_path / "c", restate="compressed_tensors")
    with tx.open(tmp_path / "b") as checkpoint:
        assert {tensor.convention for tensor in checkpoint.encoded.values()} == {"compressed_tensors"}
        assert any(name.endswith(".weight_scale") for name in checkpoint)
    tx.convert(tmp_path / "b", tmp_path / "e", to="hf", restate="deepseek", sync=False)
    assert unlike(read(source), read(tmp_path / "e")) == set()


def test_several_workers_and_little_memory_write_the_same(tmp_path: Path) -> None:
    tensors = mxfp4((3, 300, 416), 120, 130)
    source = save(tmp_path / "a", tensors, {**CONFIG, "quantization_config": MX})
    for to in ("float8_block", "nvfp4", "mxfp8"):
        first = restate(source, tmp_path / to, to)
        second = restate(source, tmp_path / f"{to} small", to, memory="512KB", jobs=3, shard_size=50_000)
        assert unlike(first, second) == set()
        plan = tmp_path / f"{to}.plan"
        tx.plan(source, tmp_path / f"{to} parts", to="safetensors:identity", restate=to, write=plan, items=4)
        assert json.loads(plan.read_text())["order"]["reading"]["restate"] == to


REFUSED: dict[str, tuple[str, str]] = {
    "deepseek": ("nvfp4 cannot be stored in the convention deepseek", "compressed_tensors, modelopt, te"),
    "mxfp8": ("nvfp4 cannot be recoded as mxfp8 without rounding; only mxfp4 can", "--decode bf16"),
}


@pytest.mark.parametrize("to", REFUSED)
def test_what_cannot_be_restated_is_refused_by_tensor(to: str, tmp_path: Path) -> None:
    source = save(
        tmp_path / "a", nvfp4(300.0), {**CONFIG, "quantization_config": section(HALF, "nvfp4-pack-quantized")}
    )
    with pytest.raises(Refused) as caught:
        tx.convert(source, tmp_path / "b", to="safetensors:identity", restate=to)
    (refusal,) = caught.value.refusals
    assert refusal.where.tensor == f"{Q}.weight"
    assert REFUSED[to][0] in refusal.message
    assert REFUSED[to][1] in refusal.hint
    assert not (tmp_path / "b").exists()


def test_a_scale_that_no_number_expresses_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = {**CONFIG, "dtype": "float32", "quantization_config": section(HALF, "nvfp4-pack-quantized")}
    source = save(tmp_path / "a", nvfp4(3.0), config)
    (refusal,) = tx.plan(source, tmp_path / "b", to="safetensors:identity", restate="modelopt").refusals
    assert "its per-tensor scale is 3.0: values of F32 would change" in refusal.message
    with pytest.raises(Refused, match="no float32 number"):
        tx.convert(source, tmp_path / "b", to="safetensors:identity", restate="modelopt")
    with pytest.raises(Refused, match="no float32 number"), tx.open(source, restate="modelopt") as checkpoint:
        checkpoint[f"{Q}.weight_scale_2"].read()


def test_a_cache_in_fp8_is_described_as_the_target_does(tmp_path: Path) -> None:
    """Both read back as FP8 by vLLM; ModelOpt's own file has another key for it. compressed-tensors has the scales in
    the attention, ModelOpt in the projections.
    """
    config: dict[str, Any] = {**CONFIG, "quantization_config": section(HALF, "nvfp4-pack-quantized")}
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    config["quantization_config"]["kv_cache_scheme"] = {**scheme, "observer": "minmax"}
    attention = Q.removesuffix(".q_proj")
    plain = {f"{attention}.{name}_proj.bias": torch.ones(4) for name in "kv"}
    scales = {f"{attention}.{name}_scale": torch.tensor([0.25]) for name in "kv"}
    source = save(tmp_path / "a", nvfp4(300.0) | plain | scales, config)
    there = restate(source, tmp_path / "b", "modelopt")
    assert {each for each in there if each.endswith(("k_scale", "v_scale"))} == {
        f"{attention}.{name}_proj.{name}_scale" for name in "kv"
    }
    assert there[f"{attention}.k_proj.k_scale"].shape == ()
    assert config_section(tmp_path / "b")["kv_cache_scheme"] == {"num_bits": 8, "type": "float", "dynamic": False}
    assert unlike(restate(tmp_path / "b", tmp_path / "c", "compressed_tensors"), read(source)) == set()
    assert config_section(tmp_path / "c")["kv_cache_scheme"] == scheme
    (tmp_path / "b" / "transaxle.json").unlink()
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": []}
    (tmp_path / "b" / "config.json").write_text(json.dumps(CONFIG))
    exported = {"producer": {"name": "modelopt", "version": "0.33"}, "quantization": quantization}
    (tmp_path / "b" / "hf_quant_config.json").write_text(json.dumps(exported))
    restate(tmp_path / "b", tmp_path / "d", "compressed_tensors")
    assert config_section(tmp_path / "d")["kv_cache_scheme"] == scheme
    assert not (tmp_path / "d" / "hf_quant_config.json").exists()
    with pytest.raises(Refused, match="which te cannot express"):
        tx.open(source, restate="te")


def _with_cache(config: dict[str, Any]) -> None:
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 4, "type": "int"}


WRONG: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a quantized cache": (_with_cache, "kv_cache_scheme describes how keys and values are cached"),
}


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG)
def test_a_config_that_says_more_is_refused(
    change: Callable[[dict[str, Any]], None], words: str, tmp_path: Path
) -> None:
    config = {**CONFIG, "quantization_config": section(HALF, "nvfp4-pack-quantized")}
    change(config)
    source = save(tmp_path / "a", nvfp4(300.0), config)
    with pytest.raises(Refused, match=words):
        tx.open(source, restate="modelopt")


def test_codes_that_no_config_describes_are_refused(tmp_path: Path) -> None:
    codes = torch.zeros(32, 32, dtype=torch.float8_e5m2)
    tensors = {f"{Q}.weight": codes, f"{Q}.weight_scale_inv": torch.ones(1, 1)}
    source = save(tmp_path / "a", tensors, {**CONFIG, "quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(Refused, match="codes of F8_E5M2"):
        tx.open(source, restate="compressed_tensors")


def test_nothing_to_restate(tmp_path: Path) -> None:
    source = save(tmp_path / "a", {f"{Q}.weight": torch.ones(4, 4)}, CONFIG)
    with pytest.raises(UsageError, match="nothing to restate"):
        tx.open(source, restate="modelopt")
    with pytest.raises(UsageError, match="cannot restate as 'awq'"):
        tx.open(source, restate="awq")
    with pytest.raises(TypeError, match="decode and restate exclude each other"):
        tx.open(source, restate="modelopt", decode="bf16")


def test_what_is_so_already_stays(tmp_path: Path) -> None:
    source = deepseek(tmp_path / "a")
    assert unlike(read(source), restate(source, tmp_path / "b", "transformers_fp8")) == set()
    assert config_section(tmp_path / "b") == config_section(source)


def test_dims_whose_order_depends_on_the_encoding_are_not_taken_for_others(tmp_path: Path) -> None:
    """gpt-oss stores codes of mxfp4 as [out, in] and all other values as [in, out], under one name."""
    made, config = quantized.gpt_oss(d=64, f=64, e=2)
    source = quantized.store(tmp_path / "a", (made, config))
    plan = tx.plan(source, tmp_path / "b", to="safetensors:identity", restate="mxfp8")
    assert {refusal.code for refusal in plan.refusals} == {"UNSUPPORTED"}
    assert all("the order of the dims depends on the encoding" in refusal.message for refusal in plan.refusals)
    tx.convert(source, tmp_path / "c", to="torchtitan", restate="mxfp8", sync=False, verify=True)
    tx.convert(source, tmp_path / "d", to="torchtitan", sync=False)
    with tx.open(tmp_path / "c", decode="bf16") as first, tx.open(tmp_path / "d", decode="bf16") as second:
        assert first.keys() == second.keys()
        for name, tensor in first.items():
            assert tensor.tobytes() == second[name].tobytes(), name


def test_a_view_can_be_pickled(tmp_path: Path) -> None:
    import pickle

    config = {**CONFIG, "quantization_config": section(HALF, "nvfp4-pack-quantized")}
    with tx.open(save(tmp_path / "a", nvfp4(300.0), config), restate="modelopt") as checkpoint:
        again = pickle.loads(pickle.dumps(checkpoint))  # noqa: S301 - our own bytes
        assert {name: tensor.tobytes() for name, tensor in again.items()} == {
            name: tensor.tobytes() for name, tensor in checkpoint.items()
        }
        again.close()
