"""DeepSeek-V4 as it is published: float8 in blocks with exponents named `scale`, and experts in pairs of four bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import transaxle as tx
from tests.oracles import automodel_peer
from tests.oracles.peer_bytes import Tensors, differing, loaded, memory, published
from tests.oracles.quiet import quiet
from tests.oracles.tiny_models import drawn

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

SIZES = {
    "hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 64, "q_lora_rank": 256, "o_lora_rank": 128,
    "o_groups": 2, "head_dim": 64, "num_attention_heads": 4,
}  # fmt: skip
LINEAR = (".wq_a.", ".wq_b.", ".wkv.", ".wo_b.", ".shared_experts.")
"""Parts of the names of weights in float8."""
QUANTIZATION = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}  # fmt: skip
E8M0 = torch.float8_e8m0fnu


def exponents(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(118, 128, shape, generator=generator, dtype=torch.uint8).view(E8M0)


@pytest.fixture(scope="module", params=["beside the section", "in the section"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with random codes and scales, and transformers' class of the model.

    The format of the experts is beside the section in V4's config, and in it in that of V4.1.
    """
    folder = tmp_path_factory.mktemp("v4")
    with quiet():
        model = drawn("deepseek_v4", SIZES).to(torch.bfloat16)
        model.save_pretrained(folder / "saved")
    generator = torch.Generator().manual_seed(3)
    tensors: Tensors = {}
    for name, value in published("deepseek_v4", loaded(folder / "saved")).items():
        scale = name.removesuffix("weight") + "scale"
        if ".ffn.experts." in name:
            rows, columns = value.shape
            tensors[name] = torch.randint(-128, 128, (rows, columns // 2), generator=generator, dtype=torch.int8)
            tensors[scale] = exponents((rows, columns // 32), generator)
        elif any(part in name for part in LINEAR) and "compressor" not in name:
            tensors[name] = torch.randn(value.shape, generator=generator).to(torch.float8_e4m3fn)
            grid = tuple(-(-size // 128) for size in value.shape)
            tensors[scale] = exponents(grid, generator)
        else:
            tensors[name] = value
    config = json.loads((folder / "saved/config.json").read_text("utf-8"))
    experts = {"expert_dtype": "fp4"}
    inside = request.param == "in the section"
    config |= {"quantization_config": QUANTIZATION | (experts if inside else {})} | ({} if inside else experts)
    (folder / "hub").mkdir()
    save_file(tensors, folder / "hub/model.safetensors", metadata={"format": "pt"})
    (folder / "hub/config.json").write_text(json.dumps(config), "utf-8")
    return folder / "hub", type(model)


def decoded_by_transformers(source: tuple[Path, Any]) -> Tensors:
    folder, kind = source
    with quiet():
        model, said = kind.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(said[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), said
    return memory(model)


def convert(source: Path, target: Path, to: str, decode: str | None = None) -> Tensors:
    tx.convert(source, target, to=to, decode=decode, sync=False)
    return loaded(target)


def test_transformers_decodes_the_same_values(source: tuple[Path, Any], tmp_path: Path) -> None:
    theirs = decoded_by_transformers(source)
    ours = convert(source[0], tmp_path / "memory", "safetensors:transformers", "bf16")
    assert differing({name: ours[name].to(value.dtype) for name, value in theirs.items()}, theirs) == []
    hub = convert(source[0], tmp_path / "hub", "hf", "bf16")
    assert all(value.dtype not in (torch.int8, E8M0, torch.float8_e4m3fn) for value in hub.values())
    assert "quantization_config" not in json.loads((tmp_path / "hub/config.json").read_text("utf-8"))
    assert convert(tmp_path / "hub", tmp_path / "again", "safetensors:transformers").keys() == ours.keys()


def test_automodel_reads_the_same_values(source: tuple[Path, Any], tmp_path: Path) -> None:
    config = json.loads((source[0] / "config.json").read_text("utf-8"))
    config |= {"layer_types": None, "mlp_layer_types": None, "num_nextn_predict_layers": 0}
    trained = automodel_peer.own(config)
    assert trained is not None
    with quiet():
        theirs = trained.state_dict_adapter.from_hf(loaded(source[0]))
    ours = convert(source[0], tmp_path / "ours", "safetensors:automodel", "bf16")
    assert differing({name: value.float() for name, value in ours.items()},
                     {name: value.float() for name, value in theirs.items()}) == []  # fmt: skip


@pytest.mark.parametrize("dialect", ["transformers", "automodel", "vllm"])
def test_every_trainer_gets_these_values(dialect: str, source: tuple[Path, Any], tmp_path: Path) -> None:
    plain = convert(source[0], tmp_path / "plain", "hf", "bf16")
    ours = convert(source[0], tmp_path / "ours", f"safetensors:{dialect}", "bf16")
    assert differing(ours, convert(tmp_path / "plain", tmp_path / "theirs", f"safetensors:{dialect}")) == []
    assert differing(convert(tmp_path / "ours", tmp_path / "back", "hf"), plain) == []


def test_codes_go_through_a_dialect_and_back(source: tuple[Path, Any], tmp_path: Path) -> None:
    convert(source[0], tmp_path / "there", "safetensors:transformers")
    assert differing(convert(tmp_path / "there", tmp_path / "back", "hf"), loaded(source[0])) == []
    config = json.loads((tmp_path / "back/config.json").read_text("utf-8"))
    assert config["quantization_config"]["expert_dtype"] == "fp4"
