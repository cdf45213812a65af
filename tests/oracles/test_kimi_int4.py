"""Kimi K2 and K2.5 with experts in int4, as published: what compressed-tensors unpacks is what every framework gets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from compressed_tensors.utils.match import match_name
from transformers import CompressedTensorsConfig

import transaxle as tx
from tests.oracles.kimi_int4 import K2, K25, QUANTIZATION, Made, make
from tests.oracles.peer_bytes import Tensors, differing, loaded, memory
from tests.oracles.quiet import quiet

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

TRAINERS = ("torchtitan", "automodel", "megatron", "te", "megatron_layers", "transformers", "vllm")
RAW = tuple(dialect for dialect in TRAINERS if dialect != "automodel")
"""Automodel has inputs in columns of a stack, where a group of 32 inputs has no scale of its own."""


@pytest.fixture(scope="module", params=[K2, K25])
def kimi(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(request.param, tmp_path_factory.mktemp(request.param))


def convert(source: Path, target: Path, to: str, decode: str | None = None) -> Tensors:
    tx.convert(source, target, to=to, decode=decode, sync=False)
    return loaded(target)


def model(kimi: Made, folder: Path, **settings: object) -> torch.nn.Module:
    """Let transformers load a folder; of Kimi K2, which it does not know, as the DeepSeek-V3 that it is."""
    path = folder / "config.json"
    path.write_text(path.read_text("utf-8").replace(f'"model_type": "{K2}"', '"model_type": "deepseek_v3"'), "utf-8")
    with quiet():
        made, said = kimi.model.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True, **settings)
    assert not any(said[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), said
    loads: torch.nn.Module = made.eval()
    return loads


def copied(folder: Path, target: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(folder, target))


def logits(made: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = made(input_ids=torch.arange(12)[None]).logits
    return out


def test_the_experts_are_found_in_either_config(kimi: Made) -> None:
    opened = tx.open(kimi.packed)
    assert opened.family == {"deepseek_v3": "deepseek_v3"}.get(opened.family or "", "kimi_k25")
    assert {tensor.encoding.name for tensor in opened.catalog.encoded.values()} == {"int4"}
    assert set(opened.catalog.encoded) == set(kimi.experts)


def test_a_hub_in_bf16_computes_what_compressed_tensors_unpacks(kimi: Made, tmp_path: Path) -> None:
    assert differing(convert(kimi.packed, tmp_path / "out", "hf", "bf16"), loaded(kimi.plain)) == []
    config = json.loads((tmp_path / "out/config.json").read_text("utf-8"))
    assert config == json.loads((kimi.plain / "config.json").read_text("utf-8"))
    computed = logits(model(kimi, tmp_path / "out"))
    assert torch.equal(computed, logits(model(kimi, copied(kimi.plain, tmp_path / "plain"))))
    decoded = CompressedTensorsConfig(dequantize=True)
    packed = copied(kimi.packed, tmp_path / "packed")
    assert torch.equal(computed, logits(model(kimi, packed, quantization_config=decoded)))
    assert computed.std() > 0


def test_the_memory_of_transformers_is_what_it_decodes_itself(kimi: Made, tmp_path: Path) -> None:
    packed = copied(kimi.packed, tmp_path / "packed")
    theirs = memory(model(kimi, packed, quantization_config=CompressedTensorsConfig(dequantize=True)))
    ours = convert(kimi.packed, tmp_path / "out", "safetensors:transformers", "bf16")
    assert differing(ours, theirs) == []


@pytest.mark.oracle
@pytest.mark.parametrize("dialect", TRAINERS)
def test_every_trainer_gets_what_compressed_tensors_unpacks(dialect: str, kimi: Made, tmp_path: Path) -> None:
    to = f"safetensors:{dialect}"
    decoded = convert(kimi.packed, tmp_path / "decoded", to, "bf16")
    assert differing(decoded, convert(kimi.plain, tmp_path / "plain", to)) == []
    assert differing(convert(tmp_path / "decoded", tmp_path / "back", "hf"), loaded(kimi.plain)) == []


@pytest.mark.oracle
@pytest.mark.parametrize("dialect", RAW)
def test_packs_go_through_a_dialect_and_back(dialect: str, kimi: Made, tmp_path: Path) -> None:
    through = convert(kimi.packed, tmp_path / "there", f"safetensors:{dialect}")
    assert any(value.dtype == torch.int32 and value.ndim > 1 for value in through.values())
    assert differing(convert(tmp_path / "there", tmp_path / "back", "hf"), loaded(kimi.packed)) == []
    config = json.loads((tmp_path / "back/config.json").read_text("utf-8"))
    section = config.get("text_config", config)["quantization_config"]
    ignored = section.pop("ignore")
    linear = {name.removesuffix(".weight") for name in kimi.linear}
    assert {module for module in linear if not any(match_name(module, entry) for entry in ignored)} == {
        name.removesuffix(".weight") for name in kimi.experts
    }
    assert section == {key: value for key, value in QUANTIZATION.items() if key != "ignore"}


def test_experts_are_packed_as_compressed_tensors_packs_them(kimi: Made, tmp_path: Path) -> None:
    report = tx.convert(
        kimi.packed.parent / "saved", tmp_path / "out", to="hf", encode="int4", only="*.mlp.experts.*", sync=False
    )
    assert [note for note in report.notes if "transformers" in note] == []
    assert differing(loaded(tmp_path / "out"), loaded(kimi.packed)) == []
    computed = logits(model(kimi, copied(kimi.plain, tmp_path / "plain")))
    assert torch.equal(logits(model(kimi, tmp_path / "out")), computed)
