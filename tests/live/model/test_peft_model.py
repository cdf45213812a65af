"""Models of peft: a base reaches the weights below the adapters, an adapter's files its own; the oracle is peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.oracles.quiet import quiet
from transaxle.engine.checkpoint.checkpoint import Checkpoint
from transaxle.errors import TransaxleError
from transaxle.live.load import load
from transaxle.live.save import save
from transaxle.verbs import open as opened

with quiet():
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 32,
}  # fmt: skip
TARGETS = ["q_proj", "down_proj"]
CONFIGS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, modules_to_save=["lm_head"], use_dora=True),
    "embedding": lambda: peft.LoraConfig(r=2, target_modules=["embed_tokens", "v_proj"], bias="all"),
    "tokens": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, trainable_token_indices=[1, 3]),
    "ia3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]),
    "vera": lambda: peft.VeraConfig(r=2, target_modules=["q_proj", "o_proj"]),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, target_modules=TARGETS),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}
MADE = ("prompt",)
"""Those for whose files peft makes tensors that are none of the model's."""


def _base(seed: int) -> Any:
    torch.manual_seed(seed)
    with quiet():
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    return _scrambled(model)


def _scrambled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def _with(kind: str, seed: int) -> Any:
    with quiet():
        model = peft.get_peft_model(_base(seed), CONFIGS[kind]())
    return _scrambled(model)


def _held(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_base_is_loaded_below_the_adapters(tmp_path: Path, kind: str) -> None:
    base, model, other = _base(1), _with(kind, 2), _with(kind, 3)
    base.save_pretrained(tmp_path / "base")
    before = _held(model)
    report = load(model, tmp_path / "base")
    after = _held(model)
    other.load_state_dict(model.state_dict())
    peft.set_base_model_state_dict(other, base.state_dict())
    wanted = _held(other)
    copies = {name for name in after if ".modules_to_save." in name}
    assert after.keys() == wanted.keys()
    assert all(torch.equal(after[name], wanted[name]) for name in after)
    assert all(torch.equal(after[name], base.state_dict()["lm_head.weight"]) for name in copies)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed
    assert not changed & set(report.untouched)
    assert {name for name in model.state_dict() if name not in changed} == set(report.untouched)


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_adapter_is_loaded_as_peft_does(tmp_path: Path, kind: str) -> None:
    given, model = _with(kind, 1), _with(kind, 2)
    other = _with(kind, 3)
    other.load_state_dict(model.state_dict())
    with quiet():
        given.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
        other.load_adapter(tmp_path / "adapter", "default", is_trainable=True)
    if kind in MADE:
        with pytest.raises(TransaxleError) as found:
            load(model, tmp_path / "adapter")
        assert found.value.code == "UNSUPPORTED"
        assert "load_adapter" in found.value.hint
        return
    report = load(model, tmp_path / "adapter")
    after, wanted = _held(model), _held(other)
    assert all(torch.equal(after[name], wanted[name]) for name in wanted)
    assert after.keys() == wanted.keys()
    assert report.tensors
    assert any("base_layer" in name for name in report.untouched)


@pytest.mark.parametrize("rows", [0, 29])
@pytest.mark.parametrize(
    "chosen",
    [
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["embed_tokens", "lm_head"], "bias": "lora_only"},
        {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"]},
    ],
)
def test_weights_of_the_base_in_an_adapter_are_loaded_as_peft_does(
    tmp_path: Path, chosen: dict[str, Any], rows: int
) -> None:
    """peft stores them where an adapter changes embeddings or the head, or where the vocabulary was resized."""
    models: list[Any] = []
    for seed in (1, 2, 2):
        with quiet():
            _base(seed).save_pretrained(tmp_path / "base")
            base = LlamaForCausalLM.from_pretrained(tmp_path / "base")  # peft compares the vocabularies of both
            if rows:
                base.resize_token_embeddings(rows, mean_resizing=False)
            models.append(_scrambled(peft.get_peft_model(base, peft.LoraConfig(r=2, **chosen))))
    given, model, other = models
    other.load_state_dict(model.state_dict())
    with quiet():
        given.save_pretrained(tmp_path / "adapter")
        other.load_adapter(tmp_path / "adapter", "default", is_trainable=True)
    before = _held(model)
    report = load(model, tmp_path / "adapter")
    with opened(tmp_path / "adapter") as files:
        own = [name for name in files if name.endswith(("embed_tokens.weight", "base_layer.weight"))]
    assert own or not rows
    after, wanted = _held(model), _held(other)
    assert after.keys() == wanted.keys()
    assert all(torch.equal(after[name], wanted[name]) for name in wanted)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert not changed & set(report.untouched)
    assert rows or len(chosen) == 1 or any(place in name for name in changed for place in ("embed_tokens", "lm_head"))


def test_a_checkpoint_of_the_whole_is_loaded_under_its_own_names(tmp_path: Path) -> None:
    given, model = _with("lora", 1), _with("lora", 2)
    save(given, tmp_path / "whole", to="safetensors:identity")
    report = load(model, tmp_path / "whole")
    assert report.untouched == ()
    assert all(torch.equal(tensor, _held(given)[name]) for name, tensor in _held(model).items())


def test_a_dialect_has_no_names_for_adapters(tmp_path: Path) -> None:
    with pytest.raises(TransaxleError) as found:
        save(_with("lora", 1), tmp_path / "out", to="hf")
    assert "a model with adapters" in found.value.hint
    assert not (tmp_path / "out").exists()


def test_a_merged_adapter_is_refused(tmp_path: Path) -> None:
    _base(1).save_pretrained(tmp_path / "base")
    model = _with("embedding", 2)
    model.merge_adapter()
    before = _held(model)
    with pytest.raises(TransaxleError) as found:
        load(model, tmp_path / "base")
    assert {refusal.code for refusal in found.value.refusals} == {"UNSUPPORTED"}
    assert "unmerge_adapter" in found.value.hint
    assert all(torch.equal(tensor, before[name]) for name, tensor in _held(model).items())


def test_an_adapter_says_what_it_is_and_is_of_no_family(tmp_path: Path) -> None:
    given = _with("lora", 1)
    given.peft_config["default"].base_model_name_or_path = "meta/base"
    given.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    checkpoint: Checkpoint = opened(tmp_path / "adapter")
    with checkpoint, pytest.raises(TransaxleError) as found:
        _ = checkpoint.reading
    assert found.value.code == "UNKNOWN_FAMILY"
    assert "a LORA adapter of meta/base" in str(found.value)
    with opened(tmp_path / "adapter", family="llama", dialect="hf") as said, pytest.raises(TransaxleError):
        said.as_dialect("torchtitan")
