"""Adapters in other dialects: peft opens and merges both, and its changes are laid out by torch operations in between.

Bases are zeros and factors whole numbers, so that every sum is exact: a weight with its adapter merged is the change
itself, and must be the same bits however the ranks lie.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import transaxle as tx
from tests.engine.adapters.tiny import ADAPTER, EXPERTS, MOE, SIZES, WEIGHTS, Model, train
from tests.oracles.quiet import quiet
from transaxle.errors import TransaxleError

with quiet():
    import peft
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )
    from transformers.pytorch_utils import Conv1D

GROUPS, HEADS, WIDTH = 2, 2, 4
"""Groups of heads, query heads in each, and their size."""

Weights = dict[str, torch.Tensor]
MODELS: dict[str, Model] = {
    "patterns": (
        lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
        {
            "target_modules": ["q_proj", "down_proj", "embed_tokens"], "modules_to_save": ["lm_head"],
            "rank_pattern": {"layers.1.self_attn.q_proj": 4}, "alpha_pattern": {"down_proj": 4},
        },
    ),
    "every": (
        lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
        {
            "target_modules": "all-linear", "rank_pattern": {"k_proj": 4, "v_proj": 6},
            "alpha_pattern": {"k_proj": 16, "v_proj": 24},
        },
    ),
    "biases": (
        lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
        {"target_modules": ["k_proj", "o_proj"], "bias": "all", "lora_dropout": 0.5},
    ),
    "stacked": (
        lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE)), {"target_modules": ["v_proj"], "target_parameters": EXPERTS}
    ),
    "mixture": (lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE)), {"target_modules": "all-linear"}),
}  # fmt: skip


def emptied(model: Any) -> Any:
    """Set every weight of a base to zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def whole_numbers(parameter: torch.Tensor) -> None:
    parameter.copy_(torch.randint(-4, 5, parameter.shape))


def made(folder: Path, kind: str, **options: Any) -> Weights:
    """Write `base`, of zeros, and `adapter`; return the weights that peft makes of them: the changes."""
    build, chosen = MODELS[kind]
    torch.manual_seed(3)
    with quiet():
        base = emptied(build())
        base.save_pretrained(folder / "base")
        how = {"lora_alpha": 8, "save_embedding_layers": False, **chosen, **options}
        merged = train(base, folder, whole_numbers, **how).merge_and_unload()
    return {name: tensor.detach().clone() for name, tensor in merged.state_dict().items()}


class Held(nn.Module):
    """A module with parameters of its own, as mixtures have them."""

    is_transposed = False


def tree(weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """Build zeros in modules of the given names; what is two-dimensional is a linear layer or an embedding."""
    root = Held()
    for name in sorted(weights, key=lambda name: name.replace("down", "zzz")):  # models have their down matrices last
        path, _, last = name.rpartition(".")
        *outer, inner = path.split(".")
        parent: nn.Module = root
        for part in outer:
            if part not in dict(parent.named_children()):
                parent.add_module(part, Held())
            parent = getattr(parent, part)
        shape = weights[name].shape
        if len(shape) == 2 and last == "weight":
            rows, columns = shape
            kind: Any = nn.Embedding(rows, columns) if "embed" in inner else nn.Linear(columns, rows, bias=False)
            if f"{path}.bias" in weights:
                kind.bias = nn.Parameter(torch.zeros(rows))
            parent.add_module(inner, kind)
            continue
        if inner not in dict(parent.named_children()):
            parent.add_module(inner, Held())
        holder: Any = getattr(parent, inner)
        if last == "bias" and f"{path}.weight" in weights and len(weights[f"{path}.weight"].shape) == 2:
            continue
        holder.is_transposed = last in ("gate_and_up_projs", "down_projs")
        holder.register_parameter(last, nn.Parameter(torch.zeros(shape)))
    made_tree: nn.Module = emptied(root)
    return made_tree


def opened(model: Any, folder: Path) -> Weights:
    """Return a model's weights after peft has loaded and merged an adapter."""
    with quiet():
        found = peft.PeftModel.from_pretrained(model, folder).merge_and_unload()
    return {name: tensor.detach().clone() for name, tensor in found.state_dict().items()}


def shapes_in(folder: Path, dialect: str) -> Weights:
    """Return the base's weights in a dialect."""
    if not (folder / dialect).exists():
        tx.convert(folder / "base", folder / dialect, to=f"safetensors:{dialect}")
    return load_file(folder / dialect / "model.safetensors")


# What frameworks call the same weights, and how they lie there; sources as in the tables.


def megatron(hf: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Megatron-core: q, k and v group by group; gate above up."""
    for layer in range(2):
        own, other = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for end in ("weight", "bias"):
            if f"{own}self_attn.q_proj.{end}" in hf:
                q, k, v = (hf[f"{own}self_attn.{each}_proj.{end}"] for each in "qkv")
                heads = [each.unflatten(0, (GROUPS, -1)) for each in (q, k, v)]
                yield f"{other}self_attention.linear_qkv.{end}", torch.cat(heads, 1).flatten(0, 1)
        yield f"{other}self_attention.linear_proj.weight", hf[f"{own}self_attn.o_proj.weight"]
        if f"{own}mlp.down_proj.weight" in hf:
            gate_up = torch.cat([hf[f"{own}mlp.{each}_proj.weight"] for each in ("gate", "up")])
            yield f"{other}mlp.linear_fc1.weight", gate_up
            yield f"{other}mlp.linear_fc2.weight", hf[f"{own}mlp.down_proj.weight"]
    yield "embedding.word_embeddings.weight", hf["model.embed_tokens.weight"]
    yield "output_layer.weight", hf["lm_head.weight"]


def torchtitan(hf: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """torchtitan: the two halves of each head of q and k are interleaved."""
    for layer in range(2):
        own, other = f"model.layers.{layer}.", f"layers.{layer}."
        for each, name in (("q", "wq"), ("k", "wk"), ("v", "wv")):
            weight = hf[f"{own}self_attn.{each}_proj.weight"]
            halves = weight.view(-1, 2, WIDTH // 2, 16).transpose(1, 2).reshape(weight.shape)
            yield f"{other}attention.qkv_linear.{name}.weight", weight if each == "v" else halves
        yield f"{other}attention.wo.weight", hf[f"{own}self_attn.o_proj.weight"]
        for each, name in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
            yield f"{other}feed_forward.{name}.weight", hf[f"{own}mlp.{each}_proj.weight"]
    yield "tok_embeddings.weight", hf["model.embed_tokens.weight"]
    yield "lm_head.weight", hf["lm_head.weight"]


def automodel(hf: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """NeMo Automodel: stacks are [in, out]."""
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts."
        yield f"{experts}gate_and_up_projs", hf[f"{experts}gate_up_proj"].mT
        yield f"{experts}down_projs", hf[f"{experts}down_proj"].mT
        yield f"model.layers.{layer}.self_attn.v_proj.weight", hf[f"model.layers.{layer}.self_attn.v_proj.weight"]


def published(hf: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """The hub: every expert by itself."""
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts."
        for expert in range(3):
            gate, up = hf[f"{experts}gate_up_proj"][expert].chunk(2)
            for name, tensor in (("gate", gate), ("up", up), ("down", hf[f"{experts}down_proj"][expert])):
                yield f"{experts}{expert}.{name}_proj.weight", tensor
        yield f"model.layers.{layer}.self_attn.v_proj.weight", hf[f"model.layers.{layer}.self_attn.v_proj.weight"]


@pytest.mark.parametrize(
    ("kind", "dialect", "laid_out"),
    [
        ("patterns", "megatron", megatron),
        ("every", "torchtitan", torchtitan),
        ("biases", "megatron", megatron),
        ("stacked", "automodel", automodel),
        ("stacked", "hf", published),
    ],
)
def test_peft_makes_the_same_changes_of_it(
    tmp_path: Path, kind: str, dialect: str, laid_out: Callable[[Weights], Iterator[tuple[str, torch.Tensor]]]
) -> None:
    wanted = dict(laid_out(made(tmp_path, kind)))
    tx.convert(tmp_path / "adapter", tmp_path / "out", to=f"safetensors:{dialect}", config=tmp_path / "base")
    found = opened(tree(shapes_in(tmp_path, dialect)), tmp_path / "out")
    assert {name for name, tensor in wanted.items() if tensor.any()} == {n for n, each in found.items() if each.any()}
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    assert tx.verify(tmp_path / "out").ok


@pytest.mark.parametrize(("kind", "dialect"), [("every", "megatron"), ("mixture", "hf")])
def test_the_way_back_gives_the_same_changes(tmp_path: Path, kind: str, dialect: str) -> None:
    """Of what was joined, every part has all ranks; in the model that it was trained in, it changes the same."""
    wanted = made(tmp_path, kind)
    named: dict[str, Any] = {"config": tmp_path / "base"}
    tx.convert(tmp_path / "adapter", tmp_path / "out", to=f"safetensors:{dialect}", **named)
    tx.convert(tmp_path / "out", tmp_path / "back", to="transformers", **named)
    with quiet():
        found = opened(emptied(MODELS[kind][0]()), tmp_path / "back")
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_experts_are_joined_as_peft_joins_them(tmp_path: Path) -> None:
    """peft itself converts adapters of single experts when it loads them: an oracle for names, ranks and values."""
    sizes = {**SIZES, "num_local_experts": 3, "num_experts_per_tok": 2}
    config = MixtralConfig(**sizes)
    config.save_pretrained(tmp_path / "base")
    torch.manual_seed(5)
    shapes = {"w1": (24, 16), "w2": (16, 24), "w3": (24, 16)}
    single: Weights = {}
    for layer in range(2):
        for expert in range(3):
            for name, (rows, columns) in shapes.items():
                path = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
                single[f"{path}.lora_A.weight"] = torch.randn(2, columns)
                single[f"{path}.lora_B.weight"] = torch.randn(rows, 2)
    (tmp_path / "adapter").mkdir()
    save_file(single, tmp_path / "adapter" / WEIGHTS)
    said = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["w1", "w2", "w3"]).to_dict()
    said |= {"peft_type": "LORA", "target_modules": ["w1", "w2", "w3"]}
    (tmp_path / "adapter" / ADAPTER).write_text(json.dumps(said), "utf-8")
    tx.convert(tmp_path / "adapter", tmp_path / "out", to="transformers", config=tmp_path / "base")
    states = []
    for folder in ("adapter", "out"):
        torch.manual_seed(6)
        with quiet():
            model = peft.PeftModel.from_pretrained(MixtralForCausalLM(config), tmp_path / folder)
        states.append((model.eval()(torch.arange(12).view(2, 6)).logits, dict(model.named_parameters())))
    (ours, our_names), (theirs, their_names) = states[1], states[0]
    assert torch.equal(ours, theirs)
    assert our_names.keys() == their_names.keys()
    assert all(torch.equal(tensor, their_names[name]) for name, tensor in our_names.items())


def test_workers_views_and_formats_agree(tmp_path: Path) -> None:
    made(tmp_path, "stacked")
    how: dict[str, Any] = {"config": tmp_path / "base"}
    tx.convert(tmp_path / "adapter", tmp_path / "out", to="safetensors:te", **how)
    with ThreadPoolExecutor(2) as pool:
        tx.convert(tmp_path / "adapter", tmp_path / "shared", to="safetensors:te", on=pool, items=3, **how)
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (tmp_path / "shared" / WEIGHTS).read_bytes()
    tx.convert(tmp_path / "adapter", tmp_path / "torch", to="torch:te", **how)
    tx.convert(tmp_path / "adapter", tmp_path / "dcp", to="dcp:te", **how)
    assert (tmp_path / "torch" / "adapter_model.bin").exists()
    wanted = load_file(tmp_path / "out" / WEIGHTS)
    for files in (tx.open(tmp_path / "adapter", **how).as_dialect("te"), tx.open(tmp_path / "dcp")):
        assert set(files) == set(wanted)
        for name, tensor in wanted.items():
            assert files[name].tobytes() == tensor.numpy().tobytes()
            assert files[name].read((slice(1, 2), slice(None))).tobytes() == tensor[1:2].numpy().tobytes()


RULES = """
family toy
  axes l=layers a=width b=height
  up : l a b

dialect usual
  blocks.{l}.up.weight = up[a b]

dialect flipped
  blocks.{l}.up.weight = up[b a]

dialect joined
  up.weight = up[(l a) b]

dialect halved
  blocks.{l}.up.weight = up[(a b) 1]

dialect scaled
  blocks.{l}.up.weight = up[a b] lossy: norm - 1
"""


def toy(folder: Path, *, rank: int = 2) -> dict[str, Any]:
    """Write the adapter of a small model of no known family; return how it is read."""
    (folder / "toy.rules").write_text(RULES, "utf-8")
    (folder / "adapter").mkdir()
    torch.manual_seed(1)
    low = {}
    for layer in range(2):
        path = f"base_model.model.blocks.{layer}.up.lora_"
        low[f"{path}A.weight"] = torch.randint(-4, 5, (rank, 5)).float()
        low[f"{path}B.weight"] = torch.randint(-4, 5, (3, rank)).float()
    save_file(low, folder / "adapter" / WEIGHTS)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["up"]}
    (folder / "adapter" / ADAPTER).write_text(json.dumps(config), "utf-8")
    return {
        "rules": folder / "toy.rules", "config": {"layers": 2, "width": 3, "height": 5}, "family": "toy",
        "dialect": "usual",
    }  # fmt: skip


def test_weights_the_other_way_round(tmp_path: Path) -> None:
    """peft's own layer for such weights is GPT-2's."""
    how = toy(tmp_path)
    tx.convert(tmp_path / "adapter", tmp_path / "out", to="safetensors:flipped", **how)
    root = Held()
    root.add_module("blocks", nn.ModuleList([Held(), Held()]))
    for block in root.get_submodule("blocks").children():
        block.add_module("up", Conv1D(3, 5))
    found = opened(emptied(root), tmp_path / "out")
    low = load_file(tmp_path / "adapter" / WEIGHTS)
    for layer in range(2):
        a, b = (low[f"base_model.model.blocks.{layer}.up.lora_{each}.weight"] for each in "AB")
        assert torch.equal(found[f"blocks.{layer}.up.weight"], 2 * (b @ a).T)


@pytest.mark.parametrize(("dialect", "words"), [("halved", "no A and B give that"), ("scaled", "computes its values")])
def test_changes_without_factors_are_refused(tmp_path: Path, dialect: str, words: str) -> None:
    how = toy(tmp_path)
    with pytest.raises(TransaxleError, match=words) as found:
        tx.convert(tmp_path / "adapter", tmp_path / "out", to=f"safetensors:{dialect}", **how)
    assert found.value.code == "UNSUPPORTED"
    assert len(found.value.refusals) == 2
    assert "blocks.0.up.weight" in str(found.value)
    assert not (tmp_path / "out").exists()


def refused(folder: Path, dialect: str = "megatron", **how: Any) -> TransaxleError:
    """Return why an adapter is not converted; nothing is written."""
    with pytest.raises(TransaxleError) as found:
        tx.convert(folder / "adapter", folder / "out", to=dialect, **{"config": folder / "base", **how})
    assert not (folder / "out").exists()
    return found.value


def test_several_scalings_are_refused(tmp_path: Path) -> None:
    made(tmp_path, "every", rank_pattern={}, alpha_pattern={"k_proj": 3})
    error = refused(tmp_path)
    assert error.code == "UNSUPPORTED"
    assert "k_proj.weight 1.5" in str(error)
    assert "self_attention.linear_qkv" in str(error)


def test_parameters_that_no_file_tells_apart_are_refused(tmp_path: Path) -> None:
    """Stacks `w1` and `w3` of one module; merged they convert."""
    dialect = "torchtitan"
    made(tmp_path, "stacked")
    error = refused(tmp_path, dialect)
    assert error.code == "UNSUPPORTED"
    assert "no file of peft's says" in str(error)
    assert "--merge" in error.hint
    tx.convert(tmp_path / "base", tmp_path / "merged", to=f"safetensors:{dialect}", merge=tmp_path / "adapter")
    tx.convert(tmp_path / "base", tmp_path / "hub", to="transformers", merge=tmp_path / "adapter")
    tx.convert(tmp_path / "hub", tmp_path / "same", to=f"safetensors:{dialect}")
    assert tx.verify(tmp_path / "merged", tmp_path / "same").equal


def test_bases_that_are_not_known_are_refused(tmp_path: Path) -> None:
    made(tmp_path, "patterns")
    error = refused(tmp_path, config=None)
    assert error.code == "UNKNOWN_FAMILY"
    assert "--config" in str(error)
    smaller = {**json.loads((tmp_path / "base" / "config.json").read_text("utf-8")), "num_hidden_layers": 1}
    assert refused(tmp_path, config=smaller).code == "MISSING_TENSOR"
    narrower = {**smaller, "num_hidden_layers": 2, "intermediate_size": 20}
    assert refused(tmp_path, config=narrower).code == "SHAPE_MISMATCH"
    assert refused(tmp_path, "nothing").code == "AMBIGUOUS"


def test_peft_opens_what_keeps_its_names(tmp_path: Path) -> None:
    """Whatever converts the files of an adapter writes the one file in which peft looks."""
    wanted = made(tmp_path, "patterns")
    tx.convert(tmp_path / "adapter", tmp_path / "dcp", to="dcp:identity")
    tx.convert(tmp_path / "dcp", tmp_path / "back", to="safetensors:identity", shard_size=100)
    with quiet():
        found = opened(emptied(MODELS["patterns"][0]()), tmp_path / "back")
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_weights_of_the_base_go_with_what_changes_them(tmp_path: Path) -> None:
    """peft stores them beside an adapter of the embedding and the head, and loads them over the model's."""
    dialect = "megatron"
    torch.manual_seed(8)
    chosen = {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "bias": "lora_only"}
    with quiet():
        base = emptied(LlamaForCausalLM(LlamaConfig(**SIZES)))
        for module in (base.model.embed_tokens, base.lm_head):
            module.weight.data.copy_(torch.randint(-9, 9, module.weight.shape))
        base.save_pretrained(tmp_path / "base")
        model = train(base, tmp_path, whole_numbers, lora_alpha=8, **chosen)
        merged = {name: tensor.clone() for name, tensor in model.merge_and_unload().state_dict().items()}
    assert sum("base_layer" in name for name in load_file(tmp_path / "adapter" / WEIGHTS)) == 2
    tx.convert(tmp_path / "adapter", tmp_path / "out", to=f"safetensors:{dialect}", config=tmp_path / "base")
    empty = emptied(tree(shapes_in(tmp_path, dialect)))
    found = opened(empty, tmp_path / "out")
    for name, tensor in megatron(merged):
        assert torch.equal(found[name], tensor), name
