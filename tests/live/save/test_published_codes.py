"""Quantized models saved for a hub: the bytes that were trained, and the values that others read from them."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import transaxle as tx
from tests.live.ranks import run
from tests.live.refusals import refused
from tests.live.topologies import shard
from tests.quant.kinds import KINDS, MORE, raw
from transaxle.quant import MXFP8, Float8Block, Float8CurrentScaling, MasterWeights, QuantizedTensor, quantize_

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
HEAD, PLAIN = "lm_head", "plain"
NAMES = [name for name in MORE if "E5M2" not in name]
FAMILIES = "llama", "qwen3_moe"
PACKED, SCALE, GLOBAL = "weight_packed", "weight_scale", "weight_global_scale"
Positions = dict[str, dict[str, torch.Tensor]]


def model_of(family: str, kind: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model, in codes or plain."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 96}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, "head_dim": 32}
    torch.manual_seed(seed)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype)
    else:
        sizes |= {"moe_intermediate_size": 128, "num_experts": 3, "num_experts_per_tok": 2}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).to(dtype)
    if kind != PLAIN:
        quantize_(model, MORE[kind], lambda name, _: name != HEAD)
    return model


def _config(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return found


def _held(model: nn.Module) -> Positions:
    """Values and buffers of every parameter, as bytes."""
    return {
        name: {
            part: raw(buffer.detach())
            for part, buffer in (
                {"": one.dequantize(), **one.components} if isinstance(one, QuantizedTensor) else {"": one}
            ).items()
        }
        for name, one in model.named_parameters()
    }


def _save(rank: int, world: int, folder: Path) -> tuple[dict[str, Positions], dict[str, tuple[str, ...]]]:
    """Save models of all kinds under FSDP2, experts of three over two ranks; tell what they were, and what was left."""
    held, left = {}, {}
    mesh = init_device_mesh("cpu", (world,))
    for family in FAMILIES:
        for kind in NAMES:
            model = model_of(family, kind)
            held[f"{family} {kind}"] = _held(model)
            shard(model, mesh)
            report = tx.save(model, folder / f"{family} {kind}", to="hf", config=_config(model), sync=False)
            left[f"{family} {kind}"] = report.ignored
    return held, left


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Positions], dict[str, tuple[str, ...]]]:
    folder = tmp_path_factory.mktemp("published")
    return folder, *run(2, _save, folder)[0]


def _modules(held: Positions) -> dict[str, dict[str, torch.Tensor]]:
    """The quantized matrices by the names that files have, each expert for itself, and its gate and up."""
    found = {}
    for name, one in held.items():
        if "data" in one and name.endswith(".weight"):
            found[name.removesuffix(".weight")] = one
        elif "data" in one:
            head, _, last = name.rpartition(".")
            for number in range(3):
                mine = {part: buffer[number] for part, buffer in one.items()}
                if last == "down_proj":
                    found[f"{head}.{number}.{last}"] = mine
                    continue
                for half, new in enumerate(("gate_proj", "up_proj")):
                    cut = {p: b if b.dim() < 2 else b[half * len(b) // 2 :][: len(b) // 2] for p, b in mine.items()}
                    found[f"{head}.{number}.{new}"] = cut
    return found


@pytest.mark.oracle
@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hub_folder_has_the_trained_codes_and_values(family: str, kind: str, saved: Any) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

    folder, held, left = saved[0] / f"{family} {kind}", saved[1][f"{family} {kind}"], saved[2][f"{family} {kind}"]
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    compressed = said["quant_method"] == "compressed-tensors"
    assert compressed == (MORE[kind].encoding.name in ("float8", "nvfp4"))
    assert {HEAD, "model.embed_tokens"} <= set(said["ignore" if compressed else "modules_to_not_convert"])
    modules = _modules(held)
    assert len(modules) == (7 if family == "llama" else 4 + 3 * 3)
    with tx.open(folder) as files:
        parts = {name.rpartition(".")[2] for name in files}
        known = {"weight", SCALE} if compressed else {"weight", "weight_scale_inv"}
        assert parts == ({"weight", PACKED, SCALE, GLOBAL} if "nvfp4" in kind else known)
        for name, one in modules.items():
            codes, scale = (
                (PACKED, SCALE) if "nvfp4" in kind else ("weight", SCALE if compressed else "weight_scale_inv")
            )
            assert files[f"{name}.{codes}"].tobytes() == one["data"].numpy().tobytes(), name
            assert files[f"{name}.{scale}"].tobytes() == one["scale_inv"].numpy().tobytes(), name
            if "nvfp4" in kind:
                assert torch.equal(_decompressed(files, name, said), one[""]), name
        assert not any(name.startswith("weight_") for name in parts - {PACKED, SCALE, GLOBAL, "weight_scale_inv"})
    assert any("columnwise" in name for name in left) == ("both ways" in kind)
    assert any("amax_history" in name for name in left) == ("delayed" in kind)
    with tx.open(folder, decode="bf16") as plain:
        assert all(plain[f"{name}.weight"].tobytes() == one[""].numpy().tobytes() for name, one in modules.items())
    if "nvfp4" in kind and family != "llama":
        return  # transformers 5.24 leaves the scale of the whole out of experts' values
    method = CompressedTensorsConfig(run_compressed=False) if compressed else FineGrainedFP8Config(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=method, dtype=torch.bfloat16)
    theirs = dict(loaded.named_parameters())
    assert theirs.keys() == held.keys()
    assert all(torch.equal(raw(theirs[name].detach()), one[""]) for name, one in held.items())


def _decompressed(files: Any, name: str, said: dict[str, Any]) -> torch.Tensor:
    """What compressed-tensors makes of one module, as bytes."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme(**said["config_groups"]["group_0"])
    buffers = {
        part: torch.frombuffer(bytearray(files[full].tobytes()), dtype=dtype).reshape(files[full].shape)
        for part, dtype in ((PACKED, torch.uint8), (SCALE, torch.float8_e4m3fn), (GLOBAL, torch.float32))
        for full in [f"{name}.{part}"]
    }
    made = BaseCompressor.get_value_from_registry(scheme.format).decompress(buffers, scheme)["weight"]
    return raw(made.to(torch.bfloat16))


@pytest.mark.oracle
@pytest.mark.parametrize("kind", [*KINDS, "mxfp8, both ways", "nvfp4, 16x16, both ways"])
def test_a_state_dict_and_a_conversion_give_the_same_files(kind: str, tmp_path: Path) -> None:
    model = model_of("llama", kind)
    config = _config(model)
    tx.save(model, tmp_path / "model", to="hf", config=config, sync=False)
    tx.save(model.state_dict(), tmp_path / "state", to="hf", config=config, sync=False)
    tx.save(model, tmp_path / "dcp", to="dcp", config=config, sync=False)
    tx.convert(tmp_path / "dcp", tmp_path / "converted", to="hf", sync=False)
    for way in ("state", "converted"):
        for file in ("model.safetensors", "config.json"):
            assert (tmp_path / way / file).read_bytes() == (tmp_path / "model" / file).read_bytes(), (way, file)


def test_a_background_save_gives_the_same_codes_and_the_masters_beside_them(tmp_path: Path) -> None:
    config = _config(model := model_of("llama", list(KINDS)[-1]))
    masters = MasterWeights(model.parameters(), partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    tx.save(model, tmp_path / "model", to="hf", config=config, sync=False)
    tx.async_save(model, tmp_path / "later", to="hf", optimizer=masters, config=config, sync=False).result()
    with tx.open(tmp_path / "later") as files, tx.open(tmp_path / "model") as alone:
        assert {name for name in files if not name.startswith("optim/")} == set(alone)
        assert all(files[name].tobytes() == alone[name].tobytes() for name in alone)
        assert f"optim/{HEAD}.weight/master" not in files
        assert "optim/model.layers.0.mlp.down_proj.weight/master" in files


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_the_same_kind_loads_the_same_codes(family: str, tmp_path: Path) -> None:
    for kind in KINDS:
        model, other = model_of(family, kind), model_of(family, kind, seed=1)
        tx.save(model, tmp_path / kind, to="hf", config=_config(model), sync=False)
        if kind == "nvfp4":  # of its amax there is a quotient only
            with pytest.raises(tx.TransaxleError, match="in the names of compressed_tensors"):
                tx.load(other, tmp_path / kind)
            continue
        tx.load(other, tmp_path / kind)
        mine, theirs = _held(model), _held(other)
        assert all(torch.equal(theirs[name][part], b) for name, one in mine.items() for part, b in one.items())


def test_experts_with_different_scales_are_stacked_only_when_decoded(tmp_path: Path) -> None:
    """The stack of `gate_proj` and `up_proj` has one scale for both: codes of others mean something else under it."""
    model, other = (model_of("qwen3_moe", "float8", seed) for seed in range(2))
    tx.save(model, tmp_path / "saved", to="hf", config=_config(model), sync=False)
    tensors = load_file(tmp_path / "saved/model.safetensors")
    up = "model.layers.0.mlp.experts.1.up_proj."
    tensors[up + SCALE] *= 2
    (tmp_path / "given").mkdir()
    save_file(tensors, tmp_path / "given/model.safetensors")
    shutil.copy(tmp_path / "saved/config.json", tmp_path / "given")
    before = _held(other)
    with refused("UNEQUAL_COPIES"):
        tx.load(other, tmp_path / "given")
    assert all(torch.equal(before[name][part], b) for name, one in _held(other).items() for part, b in one.items())
    tx.load(other, tmp_path / "given", decode="bf16")
    experts = other.model.layers[0].mlp.experts
    gate, up_values = experts.gate_up_proj.dequantize()[1].chunk(2)
    wanted = tensors[up + "weight"].float() * tensors[up + SCALE]
    assert (up_values.float() - wanted).abs().max() <= wanted.abs().max() / 16
    assert not torch.equal(gate, up_values)
    assert torch.equal(experts.down_proj.dequantize(), model.model.layers[0].mlp.experts.down_proj.dequantize())


def test_encodings_of_two_conventions_are_all_written_as_compressed_tensors(tmp_path: Path) -> None:
    model = model_of("llama", "nvfp4")
    for name, quantizer in (("q_proj", MXFP8()), ("o_proj", Float8Block()), ("v_proj", Float8CurrentScaling())):
        module = getattr(model.model.layers[0].self_attn, name)
        module.weight = nn.Parameter(module.weight.dequantize())
        quantize_(module, quantizer)
    held = _modules(_held(model))
    stale = _config(model) | {"quantization_config": {"quant_method": "fp8"}}
    tx.save(model, tmp_path / "saved", to="hf", config=stale, sync=False)
    said = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert said["format"] == "mixed-precision"
    with tx.open(tmp_path / "saved") as files, tx.open(tmp_path / "saved", decode="bf16") as plain:
        assert files["model.layers.0.self_attn.q_proj.weight_scale"].dtype == "U8"
        assert all(plain[f"{name}.weight"].tobytes() == one[""].numpy().tobytes() for name, one in held.items())


def test_quantized_values_that_readers_would_change_are_refused(tmp_path: Path) -> None:
    config = _config(model := model_of("llama", "float8, E5M2"))
    with pytest.raises(tx.TransaxleError, match="F8_E5M2") as error:
        tx.save(model, tmp_path / "codes", to="hf", config=config)
    assert len(error.value.refusals) == 7
    model = model_of("llama", "nvfp4")
    weight = model.model.layers[0].mlp.up_proj.weight
    values = weight.dequantize()
    values[0, 0] = 1.1484375  # amax / 2688 is 7 x 2^-14, so that values lie half way between two of bfloat16's
    weight.data.copy_(values)
    with refused("UNSUPPORTED", "1.1484375", "--decode bf16"):
        tx.save(model, tmp_path / "ties", to="hf", config=config)
    with pytest.raises(tx.TransaxleError, match=r"model\.bfloat16\(\)"):
        tx.save(model_of("llama", "nvfp4").float(), tmp_path / "wide", to="hf", config=config)
    assert list(tmp_path.iterdir()) == []
