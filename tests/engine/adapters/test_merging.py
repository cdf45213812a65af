"""Adapters merged into a copy: the oracle is peft's own `merge_and_unload` in float32, and sums written out."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import transaxle as tx
from tests.engine.adapters.tiny import ADAPTER, EXPERTS, MOE, SIZES, WEIGHTS
from tests.oracles.quiet import quiet
from transaxle.errors import TransaxleError

with quiet():
    import peft
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        Phi3Config,
        Phi3ForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

Made = tuple[Callable[[], Any], dict[str, Any]]
MODELS: dict[str, Made] = {
    "patterns": (
        lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
        {
            "target_modules": ["q_proj", "down_proj", "embed_tokens"], "modules_to_save": ["lm_head"],
            "rank_pattern": {"layers.1.self_attn.q_proj": 3}, "alpha_pattern": {"down_proj": 5}, "use_rslora": True,
        },
    ),
    "biases": (
        lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)), {"target_modules": ["k_proj", "o_proj"], "bias": "all"}
    ),
    "transposed": (
        lambda: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=8)),
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    ),
    "mixed": (
        lambda: GPT2LMHeadModel(
            GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=8, tie_word_embeddings=False)
        ),
        {"target_modules": ["attn.c_proj", "lm_head"]},  # squares [in, out], and one that is [out, in]
    ),
    "fused": (lambda: Phi3ForCausalLM(Phi3Config(**SIZES)), {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "stacked": (
        lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE)), {"target_modules": ["v_proj"], "target_parameters": EXPERTS}
    ),
    "every": (
        lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**MOE, "mlp_only_layers": [0]})), {"target_modules": "all-linear"}
    ),
}  # fmt: skip


def made(folder: Path, kind: str, **options: Any) -> dict[str, torch.Tensor]:
    """Write `base` and `adapter`; return what peft makes of them in float32."""
    build, chosen = MODELS[kind]
    torch.manual_seed(3)
    with quiet():
        base = build()
        base.save_pretrained(folder / "base")
        model = peft.get_peft_model(base, peft.LoraConfig(**{"r": 2, "lora_alpha": 6, **chosen, **options}))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_()
        model.save_pretrained(folder / "adapter", save_embedding_layers=False)
        model.merge_and_unload().save_pretrained(folder / "wanted")
    return load_file(folder / "wanted" / "model.safetensors")


def edit(folder: Path, **values: Any) -> None:
    """Change the adapter's config."""
    file = folder / "adapter" / ADAPTER
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **values}), "utf-8")


def refused(folder: Path) -> TransaxleError:
    """Return why an adapter is not merged; nothing is written."""
    with pytest.raises(TransaxleError) as found:
        tx.convert(folder / "base", folder / "out", to="hf", merge=folder / "adapter")
    assert not (folder / "out").exists()
    return found.value


def changed(folder: Path, wanted: dict[str, torch.Tensor]) -> set[str]:
    """Return the tensors that differ from the base's."""
    base = load_file(folder / "base" / "model.safetensors")
    return {name for name in wanted if not torch.equal(wanted[name], base[name])}


@pytest.mark.parametrize("kind", MODELS)
def test_merged_as_peft_merges(tmp_path: Path, kind: str) -> None:
    wanted = made(tmp_path, kind)
    report = tx.convert(tmp_path / "base", tmp_path / "out", to="hf", merge=tmp_path / "adapter")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-6, atol=4e-6)
    merged = {each.what.name for each in report.recoded}
    assert merged == changed(tmp_path, found) == changed(tmp_path, wanted)
    assert {each.what.action for each in report.recoded} == {"merged"}


@pytest.mark.parametrize(
    ("kind", "stored"), [("patterns", "megatron"), ("stacked", "torchtitan"), ("fused", "automodel")]
)
def test_a_base_of_another_dialect_gets_each_part(tmp_path: Path, kind: str, stored: str) -> None:
    """An adapter of q alone reaches its rows of a fused tensor; the rows of k and v stay as they are."""
    wanted = made(tmp_path, kind)
    tx.convert(tmp_path / "base", tmp_path / "moved", to=f"dcp:{stored}")
    tx.convert(tmp_path / "moved", tmp_path / "out", to="hf", merge=tmp_path / "adapter")
    tx.convert(tmp_path / "base", tmp_path / "direct", to="hf", merge=tmp_path / "adapter")
    found, direct = (load_file(tmp_path / place / "model.safetensors") for place in ("out", "direct"))
    assert found.keys() == direct.keys() == wanted.keys()
    assert all(torch.equal(found[name], direct[name]) for name in direct)


def test_sums_are_exact_and_rounded_once(tmp_path: Path) -> None:
    made(tmp_path, "stacked", target_parameters=None)
    base = {name: value.bfloat16() for name, value in load_file(tmp_path / "base" / "model.safetensors").items()}
    save_file(base, tmp_path / "base" / "model.safetensors")
    low = load_file(tmp_path / "adapter" / WEIGHTS)
    report = tx.convert(tmp_path / "base", tmp_path / "out", to="hf", merge=tmp_path / "adapter")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert len(report.recoded) == 2
    for each in report.recoded:
        path = f"base_model.model.{each.what.name.removesuffix('.weight')}"
        product = low[f"{path}.lora_B.weight"].double() @ low[f"{path}.lora_A.weight"].double()
        exact = base[each.what.name].double() + 3 * product
        assert torch.equal(found[each.what.name], exact.float().bfloat16())
        distance = (found[each.what.name].double() - exact).abs()
        assert each.error.max == pytest.approx(distance.max().item(), rel=1e-9)
        assert each.error.rms == pytest.approx(distance.square().mean().sqrt().item(), rel=1e-9)


def test_any_piece_has_the_same_bits(tmp_path: Path) -> None:
    made(tmp_path, "stacked")
    with tx.open(tmp_path / "base", merge=tmp_path / "adapter") as files:
        for name in ("model.layers.0.mlp.experts.1.up_proj.weight", "model.layers.1.self_attn.v_proj.weight"):
            whole = files[name].read()
            assert np.array_equal(files[name].read((slice(2, 5), slice(3, 9))), whole[2:5, 3:9])
            assert all(np.array_equal(files[name][row], whole[row]) for row in range(5))


def test_several_workers_merge_the_same(tmp_path: Path) -> None:
    made(tmp_path, "stacked")
    how: dict[str, Any] = {"to": "hf", "merge": tmp_path / "adapter"}
    tx.convert(tmp_path / "base", tmp_path / "out", **how)
    with ThreadPoolExecutor(2) as pool:
        report = tx.convert(tmp_path / "base", tmp_path / "shared", on=pool, items=3, **how)
    assert len(report.recoded) == 2 * (1 + 3 * 3)
    assert all(not each.error.exact for each in report.recoded)
    one, two = ((tmp_path / place / "model.safetensors").read_bytes() for place in ("out", "shared"))
    assert one == two


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"something_new": 1}, "something_new"),
        ({"peft_type": "IA3"}, "type IA3"),
        ({"alpha_pattern": {"(a+)+": 3}}, "alpha_pattern"),
        ({"r": 3}, "at rank 3"),
        ({"r": float("inf")}, "positive numbers"),
        ({"target_parameters": ["gate_up_proj"]}, "target_parameters"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, said: dict[str, Any], words: str) -> None:
    made(tmp_path, "patterns", rank_pattern={})
    edit(tmp_path, **said)
    error = refused(tmp_path)
    assert words in str(error)
    assert "merge_and_unload" in error.hint


def test_another_model_is_refused(tmp_path: Path) -> None:
    made(tmp_path, "patterns")
    with quiet():
        LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 1})).save_pretrained(tmp_path / "base")
    error = refused(tmp_path)
    assert error.code == "MISSING_TENSOR"
    assert len(error.refusals) == 2
    with quiet():
        LlamaForCausalLM(LlamaConfig(**{**SIZES, "intermediate_size": 32})).save_pretrained(tmp_path / "base")
    assert refused(tmp_path).code == "SHAPE_MISMATCH"


def test_encoded_weights_are_refused(tmp_path: Path) -> None:
    made(tmp_path, "patterns")
    (tmp_path / "base").rename(tmp_path / "plain")
    tx.convert(
        tmp_path / "plain", tmp_path / "base", to="hf", encode="float8_block", only="*.q_proj.weight", skip="*.1.*"
    )
    error = refused(tmp_path)
    assert error.code == "UNSUPPORTED"
    assert "--decode" in error.hint


def test_squares_of_a_stack_are_refused(tmp_path: Path) -> None:
    """Where only shapes could tell the halves of a stack apart, and they do not, nothing is guessed."""
    made(tmp_path, "stacked", target_parameters=EXPERTS[1:])
    assert tx.convert(tmp_path / "base", tmp_path / "fits", to="hf", merge=tmp_path / "adapter").recoded
    square = tmp_path / "square"
    square.mkdir()
    MODELS["square"] = (lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**MOE, "moe_intermediate_size": 16})), {})
    try:
        made(square, "square", target_parameters=EXPERTS[1:])
    finally:
        del MODELS["square"]
    assert refused(square).code == "AMBIGUOUS"


def test_finite_values_stay_finite(tmp_path: Path) -> None:
    made(tmp_path, "patterns", modules_to_save=None)
    low = load_file(tmp_path / "adapter" / WEIGHTS)
    save_file({name: value * 1e20 for name, value in low.items()}, tmp_path / "adapter" / WEIGHTS)
    error = refused(tmp_path)
    assert error.code == "LOSSY"
    assert "--allow-lossy" in error.hint
    tx.convert(tmp_path / "base", tmp_path / "out", to="hf", merge=tmp_path / "adapter", allow_lossy=True)


def test_it_excludes_other_changes(tmp_path: Path) -> None:
    others: tuple[dict[str, Any], ...] = ({"dtype": "bf16"}, {"decode": "bf16"}, {"encode": "mxfp8"})
    for other in others:
        with pytest.raises(TypeError, match="exclude each other"):
            tx.convert(tmp_path, tmp_path / "out", to="hf", merge=tmp_path, **other)
    with pytest.raises(TypeError, match="only and skip need"):
        tx.convert(tmp_path, tmp_path / "out", to="hf", merge=tmp_path, only="*")


def test_an_adapter_that_changed_is_not_mixed_into_what_is_resumed(tmp_path: Path) -> None:
    """What was merged before would have the values of one adapter, and what is merged now those of another."""
    made(tmp_path, "patterns")
    how: dict[str, Any] = {"to": "hf", "merge": tmp_path / "adapter", "resume": True, "jobs": 1}
    blocks = iter(range(8))

    def stop(_: int) -> None:
        if next(blocks, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tx.convert(tmp_path / "base", tmp_path / "out", **how, progress=stop)
    file = tmp_path / "adapter" / ADAPTER
    text = file.read_text("utf-8")
    file.write_text(text.replace('"lora_alpha": 6', '"lora_alpha": 7'), "utf-8")
    with pytest.raises(TransaxleError, match="merges another adapter") as caught:
        tx.convert(tmp_path / "base", tmp_path / "out", **how)
    assert caught.value.code == "EXISTS"
    assert not (tmp_path / "out").exists()
    del how["resume"]
    wanted = tx.convert(tmp_path / "base", tmp_path / "out", **how)
    assert wanted.resumed == 0


def test_the_adapter_is_never_the_target(tmp_path: Path) -> None:
    """It is read, and nothing is left of it where a checkpoint replaces its folder."""
    made(tmp_path, "patterns")
    (tmp_path / "link").symlink_to(tmp_path / "adapter")
    for target in ("adapter", "link", "adapter/inside", "."):
        with pytest.raises(TransaxleError, match="the adapter") as caught:
            tx.convert(
                tmp_path / "base", tmp_path / target, to="hf", merge=tmp_path / "adapter", overwrite="everything"
            )
        assert caught.value.code == "EXISTS"
    assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {ADAPTER, WEIGHTS}


@pytest.mark.parametrize(
    "chosen",
    [
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
)
@pytest.mark.parametrize("both", [False, True])
def test_one_of_two_that_are_tied_is_not_changed_alone(tmp_path: Path, chosen: dict[str, Any], both: bool) -> None:
    """peft trains the embedding and leaves the head; a model that has one tensor for both cannot say so."""
    MODELS["tied"] = (lambda: LlamaForCausalLM(LlamaConfig(**{**SIZES, "tie_word_embeddings": True})), chosen)
    try:
        made(tmp_path, "tied")
    finally:
        del MODELS["tied"]
    file = tmp_path / "base" / "model.safetensors"
    base = load_file(file)
    if both:
        save_file({**base, "lm_head.weight": base["model.embed_tokens.weight"].clone()}, file)
    for target in ("hf", "safetensors"):
        with pytest.raises(TransaxleError, match="tied to") as caught:
            tx.convert(tmp_path / "base", tmp_path / "out", to=target, merge=tmp_path / "adapter")
        assert {each.code for each in caught.value.refusals} == {"UNSUPPORTED"}
        assert "Untie" in caught.value.hint


@pytest.mark.parametrize(
    "chosen",
    [
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    ],
)
def test_rows_that_pad_a_vocabulary_have_no_change(tmp_path: Path, chosen: dict[str, Any]) -> None:
    """What an adapter's file has after a tensor is not the rest of it."""
    MODELS["padded"] = (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), chosen)
    try:
        made(tmp_path, "padded")
    finally:
        del MODELS["padded"]
    how: dict[str, Any] = {"merge": tmp_path / "adapter"}
    tx.convert(tmp_path / "base", tmp_path / "moved", to="vllm")
    tx.convert(tmp_path / "base", tmp_path / "direct", to="hf", **how)
    tx.convert(tmp_path / "moved", tmp_path / "out", to="hf", **how)
    tx.convert(tmp_path / "moved", tmp_path / "same", to="safetensors", **how)
    tx.convert(tmp_path / "base", tmp_path / "ranks", to="megatron_torch", tp=2)  # 256 rows
    tx.convert(tmp_path / "ranks", tmp_path / "joined", to="hf", **how)
    places = ("out", "joined", "direct", "same")
    found, joined, direct, same = (load_file(tmp_path / place / "model.safetensors") for place in places)
    assert found.keys() == joined.keys() == direct.keys()
    assert all(torch.equal(each[name], direct[name]) for each in (found, joined) for name in direct)
    rows = SIZES["vocab_size"]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(same[name][:rows], direct[name])
        assert len(same[name]) > rows
        assert not same[name][rows:].any()


def test_what_an_adapter_leaves_keeps_its_bits(tmp_path: Path) -> None:
    """Zeros keep their sign in the rows of a fused weight that are not the adapter's."""
    made(tmp_path, "patterns")
    file = tmp_path / "base" / "model.safetensors"
    base = load_file(file)
    base["model.layers.0.self_attn.k_proj.weight"][0] = -0.0
    save_file(base, file)
    tx.convert(tmp_path / "base", tmp_path / "moved", to="megatron")
    tx.convert(tmp_path / "moved", tmp_path / "out", to="hf", merge=tmp_path / "adapter")
    found = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"]
    assert torch.equal(found.view(torch.int32), base["model.layers.0.self_attn.k_proj.weight"].view(torch.int32))
