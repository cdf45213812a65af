"""Adapters merged into a copy: the oracle is peft's own `merge_and_unload` in float32, and sums written out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import transaxle as tx
from tests.engine import demand_refusal
from tests.engine.adapters.tiny import ADAPTER, EXPERTS, MOE, SIZES, WEIGHTS, Model, train
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

GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 8}
MODELS: dict[str, Model] = {
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
        lambda: GPT2LMHeadModel(GPT2Config(**GPT2)), {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    ),
    "mixed": (
        lambda: GPT2LMHeadModel(GPT2Config(**GPT2, tie_word_embeddings=False)),
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


def made(folder: Path, kind: str | Model, **options: Any) -> dict[str, torch.Tensor]:
    """Write `base` and `adapter`; return what peft makes of them in float32."""
    build, chosen = MODELS[kind] if isinstance(kind, str) else kind
    torch.manual_seed(3)
    with quiet():
        base = build()
        base.save_pretrained(folder / "base")
        how = {"lora_alpha": 6, "save_embedding_layers": False, **chosen, **options}
        model = train(base, folder, torch.Tensor.normal_, **how)
        model.merge_and_unload().save_pretrained(folder / "wanted")
    return load_file(folder / "wanted" / "model.safetensors")


def compare(folder: Path, wanted: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Demand that a result is as good as what peft makes; return it."""
    found = load_file(folder / "out" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=2e-6, atol=4e-6)
    return found


def edit(folder: Path, **values: Any) -> None:
    """Change the adapter's config."""
    file = folder / "adapter" / ADAPTER
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **values}), "utf-8")


def refused(folder: Path, to: str = "hf") -> TransaxleError:
    """Return why an adapter is not merged; nothing is written."""
    with pytest.raises(TransaxleError) as found:
        tx.convert(folder / "base", folder / "out", to=to, merge=folder / "adapter")
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
    found = compare(tmp_path, wanted)
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


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"peft_type": "IA3"}, "type IA3"),
        ({"alpha_pattern": {"(a+)+": 3}}, "alpha_pattern"),
        ({"r": 3}, "at rank 3"),
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
    sizes, square = {**MOE, "moe_intermediate_size": 16}, tmp_path / "square"
    made(square, (lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)), {"target_parameters": EXPERTS[1:]}))
    assert refused(square).code == "AMBIGUOUS"


def test_finite_values_stay_finite(tmp_path: Path) -> None:
    made(tmp_path, "patterns", modules_to_save=None)
    low = load_file(tmp_path / "adapter" / WEIGHTS)
    save_file({name: value * 1e20 for name, value in low.items()}, tmp_path / "adapter" / WEIGHTS)
    error = refused(tmp_path)
    assert error.code == "LOSSY"
    assert "--allow-lossy" in error.hint
    tx.convert(tmp_path / "base", tmp_path / "out", to="hf", merge=tmp_path / "adapter", allow_lossy=True)


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
    edit(tmp_path, lora_alpha=7)
    with demand_refusal("EXISTS", "merges another adapter"):
        tx.convert(tmp_path / "base", tmp_path / "out", **how)
    assert not (tmp_path / "out").exists()
    del how["resume"]
    tx.clean(tmp_path / "out")
    assert tx.convert(tmp_path / "base", tmp_path / "out", **how).resumed == 0


def test_the_adapter_is_never_the_target(tmp_path: Path) -> None:
    """It is read, and nothing is left of it where a checkpoint replaces its folder."""
    made(tmp_path, "patterns")
    (tmp_path / "link").symlink_to(tmp_path / "adapter")
    how: dict[str, Any] = {"to": "hf", "merge": tmp_path / "adapter", "overwrite": "everything"}
    for target in ("adapter", "link", "adapter/inside", "."):
        with demand_refusal("EXISTS", "the adapter"):
            tx.convert(tmp_path / "base", tmp_path / target, **how)
    assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {ADAPTER, WEIGHTS}


@pytest.mark.parametrize(
    "chosen",
    [{"target_modules": ["q_proj", "embed_tokens"]}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}],
)
@pytest.mark.parametrize("both", [False, True])
def test_one_of_two_that_are_tied_is_not_changed_alone(tmp_path: Path, chosen: dict[str, Any], both: bool) -> None:
    """peft trains the embedding and leaves the head; a model that has one tensor for both cannot say so."""
    made(tmp_path, (_tied, chosen))
    file = tmp_path / "base" / "model.safetensors"
    base = load_file(file)
    if both:
        save_file({**base, "lm_head.weight": base["model.embed_tokens.weight"].clone()}, file)
    for target in ("hf", "safetensors"):
        with pytest.raises(TransaxleError, match="tied to") as caught:
            tx.convert(tmp_path / "base", tmp_path / "out", to=target, merge=tmp_path / "adapter")
        assert {each.code for each in caught.value.refusals} == {"UNSUPPORTED"}
        assert "Untie" in caught.value.hint


def test_rows_that_pad_a_vocabulary_have_no_change(tmp_path: Path) -> None:
    """What an adapter's file has after a tensor is not the rest of it."""
    made(tmp_path, (_untied, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}))
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
    base, name = load_file(file), "model.layers.0.self_attn.k_proj.weight"
    base[name][0] = -0.0
    save_file(base, file)
    tx.convert(tmp_path / "base", tmp_path / "moved", to="megatron")
    tx.convert(tmp_path / "moved", tmp_path / "out", to="hf", merge=tmp_path / "adapter")
    found = load_file(tmp_path / "out" / "model.safetensors")[name]
    assert torch.equal(found.view(torch.int32), base[name].view(torch.int32))


def _untied() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def _tied() -> Any:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "tie_word_embeddings": True}))


def saved(folder: Path, build: Callable[[], Any], chosen: dict[str, Any], *, rows: int = 0) -> None:
    """Write `base` and `adapter` as users of peft do, who do not say that embeddings are left out.

    With `rows` the vocabulary has as many when the adapter is trained, and so does the base that is written.
    """
    torch.manual_seed(3)
    with quiet():
        base = build()
        base.save_pretrained(folder / "original")
        base = type(base).from_pretrained(folder / "original")  # peft compares the vocabularies of both
        if rows:
            base.resize_token_embeddings(rows)
        base.save_pretrained(folder / "base")
        train(base.float(), folder, torch.Tensor.normal_, **{"lora_alpha": 6, **chosen})


def as_users_merge(folder: Path, base: str = "base") -> dict[str, torch.Tensor]:
    """Return what peft makes of a base and an adapter that it reads from files."""
    with quiet():
        model = LlamaForCausalLM.from_pretrained(folder / base, dtype=torch.float32)
        peft.PeftModel.from_pretrained(model, folder / "adapter").merge_and_unload().save_pretrained(folder / "wanted")
    return load_file(folder / "wanted" / "model.safetensors")


QKV = ["q_proj", "k_proj", "v_proj"]
OWN_BASE: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": [*QKV, "lm_head"], "modules_to_save": ["embed_tokens"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"], "use_rslora": True},
    "ranks": {"target_modules": ["embed_tokens", "lm_head"], "rank_pattern": {"lm_head": 5}, "bias": "lora_only"},
}
"""Adapters in which peft stores weights of the base too."""


@pytest.mark.parametrize(
    ("kind", "rows"), [("embedding", 0), ("head", 37), ("ranks", 0), ("neither", 37), ("replaced", 0)]
)
def test_one_tensor_in_two_roles(tmp_path: Path, kind: str, rows: int) -> None:
    """What a change is added to is in the adapter: the base's weight is not lost, nor taken for the result."""
    others = {"neither": {"target_modules": QKV}, "replaced": {"target_modules": QKV, "modules_to_save": ["lm_head"]}}
    saved(tmp_path, _untied, {**OWN_BASE, **others}[kind], rows=rows)
    low = load_file(tmp_path / "adapter" / WEIGHTS)
    own = [name for name in low if ".base_layer.weight" in name or (rows and name.endswith(("lm_head.weight",)))]
    assert own or (kind in others and not rows)
    wanted = as_users_merge(tmp_path)
    report = tx.convert(tmp_path / "base", tmp_path / "out", to="hf", merge=tmp_path / "adapter")
    found = compare(tmp_path, wanted)
    rebased = [name for name in found if f"base_model.model.{name.removesuffix('.weight')}.base_layer.weight" in low]
    assert all(name in " ".join(report.notes) for name in rebased)
    assert bool(rebased) == (kind in OWN_BASE)


@pytest.mark.parametrize("kind", ["head", "neither"])
def test_a_vocabulary_that_was_resized_needs_a_base_that_is(tmp_path: Path, kind: str) -> None:
    """As in peft, which says only that sizes differ."""
    saved(tmp_path, _untied, {**OWN_BASE, "neither": {"target_modules": QKV}}[kind], rows=37)
    with pytest.raises(RuntimeError, match="size mismatch"):
        as_users_merge(tmp_path, "original")
    with pytest.raises(TransaxleError, match=r"resize_token_embeddings\(37\)") as caught:
        tx.convert(tmp_path / "original", tmp_path / "out", to="hf", merge=tmp_path / "adapter")
    assert {each.code for each in caught.value.refusals} == {"SHAPE_MISMATCH"}


def test_two_values_for_one_tensor_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, _untied, {"target_modules": QKV, "modules_to_save": ["lm_head"]}, rows=37)
    file = tmp_path / "adapter" / WEIGHTS
    low = load_file(file)
    head = "base_model.model.lm_head"
    save_file({**low, f"{head}.modules_to_save.weight": low[f"{head}.weight"] + 1}, file)
    assert refused(tmp_path).code == "UNEQUAL_COPIES"
    save_file({**low, f"{head}.base_layer.weight": low[f"{head}.weight"] + 1}, file)
    assert refused(tmp_path).code == "NAME_COLLISION"
    save_file({name: tensor for name, tensor in low.items() if name != f"{head}.weight"}, file)
    assert refused(tmp_path).code == "CORRUPT"
    save_file({**low, f"{head}.weight": low[f"{head}.weight"].to(torch.uint8)}, file)
    assert "codes" in str(refused(tmp_path))


@pytest.mark.parametrize(
    ("chosen", "both"),
    [
        ({"target_modules": QKV, "modules_to_save": ["lm_head"]}, False),
        ({"target_modules": QKV, "modules_to_save": ["embed_tokens", "lm_head"]}, True),
        ({"target_modules": [*QKV, "embed_tokens", "lm_head"]}, False),
    ],
)
def test_tied_weights_are_changed_as_one(tmp_path: Path, chosen: dict[str, Any], both: bool) -> None:
    """The model computes what peft's does before it merges; merging, peft adds both changes to the one weight."""
    saved(tmp_path, _tied, {**chosen, "ensure_weight_tying": True})
    if both:
        file = tmp_path / "base" / "model.safetensors"
        stored = load_file(file)
        save_file({**stored, "lm_head.weight": stored["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    tx.convert(tmp_path / "base", tmp_path / "out", to="hf", merge=tmp_path / "adapter")
    tokens = torch.arange(12).view(2, 6)
    with quiet():
        base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
        model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
        found = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(found.eval()(tokens).logits, model.eval()(tokens).logits, rtol=1e-5, atol=2e-4)
    if "modules_to_save" in chosen:
        merged = as_users_merge(tmp_path)
        compare(tmp_path, {name: merged[name] for name in load_file(tmp_path / "out" / "model.safetensors")})


class Convolutions(nn.Module):
    """Convolutions of every number of dims, and what follows them."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(4, 6, 3, bias=False)
        self.two = nn.Conv2d(4, 6, (3, 2), stride=2)
        self.point = nn.Conv2d(6, 4, 1)
        self.three = nn.Conv3d(4, 6, (2, 3, 1))
        self.out = nn.Linear(6, 4)


def test_convolutions_are_merged(tmp_path: Path) -> None:
    torch.manual_seed(4)
    base = Convolutions()
    (tmp_path / "base").mkdir()
    save_file(base.state_dict(), tmp_path / "base" / "model.safetensors")
    chosen = {"target_modules": ["one", "two", "point", "three", "out"], "rank_pattern": {"three": 3}}
    with quiet():
        model = train(base, tmp_path, torch.Tensor.normal_, lora_alpha=6, **chosen)
        wanted = dict(model.merge_and_unload().state_dict())
    report = tx.convert(tmp_path / "base", tmp_path / "out", to="safetensors", merge=tmp_path / "adapter")
    found = compare(tmp_path, wanted)
    assert {each.what.name for each in report.recoded} == changed(tmp_path, found) == changed(tmp_path, wanted)


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("biases", "layers.0."), ("fused", "1.mlp.gate_up"), ("stacked", "layers.0.mlp.experts"), ("mixed", "lm_head"),
    ],
)  # fmt: skip
def test_an_adapter_without_what_its_config_names_is_refused(tmp_path: Path, kind: str, lost: str) -> None:
    """peft warns, and leaves these layers as they are."""
    made(tmp_path, kind)
    file = tmp_path / "adapter" / WEIGHTS
    low = load_file(file)
    kept = {name: tensor for name, tensor in low.items() if lost not in name}
    assert 0 < len(kept) < len(low)
    save_file(kept, file)
    error = refused(tmp_path)
    assert error.code == "INCOMPLETE"
    assert lost.strip(".") in str(error)
    assert "target_modules" in error.hint


def test_what_a_pattern_may_name_is_said(tmp_path: Path) -> None:
    """Patterns of strangers are not run."""
    made(tmp_path, "biases", target_modules=r".*\.(k_proj|o_proj)")
    file = tmp_path / "adapter" / WEIGHTS
    save_file({name: tensor for name, tensor in load_file(file).items() if "layers.0." not in name}, file)
    report = tx.convert(tmp_path / "base", tmp_path / "out", to="hf", merge=tmp_path / "adapter")
    (note,) = report.notes
    assert "2 modules" in note
    assert "model.layers.0.self_attn.k_proj" in note
