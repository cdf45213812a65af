"""Grafts between models that transformers saved: it loads the result whole, with the weights of both, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import transaxle as tx

TEXT: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 96, "tie_word_embeddings": False,
}  # fmt: skip
VISION = CLIPVisionConfig(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
)
LANGUAGE = "language_model."
"""Beginning of the names of the language model in files of LLaVA."""
Tensors = dict[str, torch.Tensor]


def _saved(model: torch.nn.Module, folder: Path) -> Tensors:
    model.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[operator]
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`llava` and `llama`, a text model of the same sizes with other values."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = LlavaConfig(text_config=LlamaConfig(**TEXT), vision_config=VISION, image_token_index=5)
    _saved(LlavaForConditionalGeneration(config), folder / "llava")
    _saved(LlamaForCausalLM(LlamaConfig(**TEXT)), folder / "llama")
    tx.convert(folder / "llama", folder / "trained", to="dcp:torchtitan", sync=False)
    return folder


def _without_tower(folders: Path, folder: Path, *absent: str) -> Path:
    """Write the language model of LLaVA under LLaVA's names, with LLaVA's config without some keys."""
    folder.mkdir()
    text = load_file(folders / "llama/model.safetensors")
    save_file({LANGUAGE + name: value for name, value in text.items()}, folder / "model.safetensors")
    config = json.loads((folders / "llava/config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in config.keys() - {*absent}}))
    return folder


def _loaded(model_type: Any, folder: Path) -> Tensors:
    """Load a folder as users do; nothing may be missing, left over or of another shape."""
    model, info = model_type.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    state: Tensors = model.state_dict()
    return state


@pytest.mark.parametrize("source", ["llama", "trained", "towerless", "towerless without its config", "llava"])
def test_a_llama_becomes_the_language_model_of_llava(source: str, folders: Path, tmp_path: Path) -> None:
    over: dict[str, Any] = {}
    if source.startswith("towerless"):
        absent = ("vision_config",) if source.endswith("config") else ()
        path, base = _without_tower(folders, tmp_path / "towerless", *absent), folders / "llava"
    elif source == "llava":  # the other way around: its language model is replaced
        path, base, over = folders / "llava", folders / "llama", {"graft_over": f"{LANGUAGE}*"}
    else:
        path, base = folders / source, folders / "llava"
    report = tx.convert(path, tmp_path / "out", to="hf", graft=base, verify=True, sync=False, **over)
    text, whole = (load_file(folders / name / "model.safetensors") for name in ("llama", "llava"))
    expected = whole | {LANGUAGE + name: value for name, value in text.items()}
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], value) for name, value in expected.items())
    of_text = {name for name in expected if name.startswith(LANGUAGE)}
    assert set(report.grafted) == (of_text if over else expected.keys() - of_text)
    model, info = LlavaForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    trained, tokens = LlamaForCausalLM.from_pretrained(folders / "llama"), torch.arange(10, 20)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, trained(input_ids=tokens).logits)
    original = LlavaForConditionalGeneration.from_pretrained(folders / "llava").state_dict()
    tower = [name for name in original if "language_model" not in name and not name.startswith("lm_head")]
    assert len(tower) > 30
    assert all(torch.equal(model.state_dict()[name], original[name]) for name in tower)


def test_experts_of_stacks_and_of_single_files_complete_each_other(tmp_path: Path) -> None:
    """Transformers' parameters are stacks, its files have single experts: either is completed by the other."""
    config = Qwen3MoeConfig(
        **TEXT, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, head_dim=8, decoder_sparse_step=1
    )
    single, stacked = [], []
    for seed, name in enumerate(("source", "base")):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config)
        single.append(_saved(model, tmp_path / name))
        stacked.append(model.state_dict())
        tx.convert(tmp_path / name, tmp_path / f"{name}-stacked", to="safetensors:transformers", sync=False)
    layer = "model.layers.1.mlp.experts"
    lost = {name for name in single[0] if name.startswith(f"{layer}.2.")}
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking/config.json").write_bytes((tmp_path / "source/config.json").read_bytes())
    for source, base in (("source", "base-stacked"), ("source-stacked", "base")):
        stored = load_file(tmp_path / source / "model.safetensors")
        absent = lost if source == "source" else {f"{layer}.down_proj"}
        kept = {name: value for name, value in stored.items() if name not in absent}
        save_file(kept, tmp_path / "lacking/model.safetensors")
        out = tmp_path / f"out-{source}"
        tx.convert(tmp_path / "lacking", out, to="hf", graft=tmp_path / base, verify=True, sync=False)
        state = _loaded(Qwen3MoeForCausalLM, out)
        expected = {name: value.clone() for name, value in stacked[0].items()}
        for name in ("gate_up_proj", "down_proj"):
            chosen: Any = 2 if source == "source" else slice(None) if name == "down_proj" else []
            expected[f"{layer}.{name}"][chosen] = stacked[1][f"{layer}.{name}"][chosen]
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())
