"""Models of peft: a base reaches the weights below the adapters, an adapter's files its own; the oracle is peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import transaxle as tx
from tests.live.ranks import run
from tests.live.refusals import refused
from tests.live.topologies import full
from tests.oracles.quiet import quiet
from transaxle.live.load import load
from transaxle.live.save import save
from transaxle.verbs import open as opened

with quiet():
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "hidden_size": 16, "intermediate_size": 25, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 33,
}  # fmt: skip
"""Sizes that two and three ranks do not cut evenly."""
TARGETS = ["q_proj", "down_proj"]
CONFIGS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, modules_to_save=["lm_head"], use_dora=True),
    "embedding": lambda: peft.LoraConfig(r=2, target_modules=["embed_tokens", "v_proj"], bias="all"),
    "tokens": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, trainable_token_indices=[1, 3]),
    "ia3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]),
    "vera": lambda: peft.VeraConfig(r=2, target_modules=["q_proj", "o_proj"]),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, target_modules=["q_proj", "o_proj"]),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}
MADE = ("prompt",)
"""Those for whose files peft makes tensors that are none of the model's."""


def _filled(model: nn.Module, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def _base(seed: int) -> Any:
    with quiet():
        return _filled(LlamaForCausalLM(LlamaConfig(**SIZES)), seed)


def _with(kind: str, seed: int) -> Any:
    with quiet():
        return _filled(peft.get_peft_model(_base(seed), CONFIGS[kind]()), seed)


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(tensor) for name, tensor in model.named_parameters(remove_duplicate=False)}


def _differing(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> list[str]:
    """Names of what only one has, or what is not equal."""
    return [
        name for name in sorted({*one, *two}) if name not in one or name not in two or not one[name].equal(two[name])
    ]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_base_is_loaded_below_the_adapters(tmp_path: Path, kind: str) -> None:
    base, model, other = _base(1), _with(kind, 2), _with(kind, 3)
    base.save_pretrained(tmp_path / "base")
    before = _whole(model)
    report = load(model, tmp_path / "base")
    after = _whole(model)
    other.load_state_dict(model.state_dict())
    peft.set_base_model_state_dict(other, base.state_dict())
    wanted = _whole(other)
    copies = {name for name in after if ".modules_to_save." in name}
    assert _differing(after, wanted) == []
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
        with refused("UNSUPPORTED", hint="load_adapter"):
            load(model, tmp_path / "adapter")
        return
    report = load(model, tmp_path / "adapter")
    after, wanted = _whole(model), _whole(other)
    assert _differing(after, wanted) == []
    assert report.tensors
    assert any("base_layer" in name for name in report.untouched)


@pytest.mark.parametrize("rows", [0, 29])
@pytest.mark.parametrize(
    "chosen",
    [
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
            models.append(_filled(peft.get_peft_model(base, peft.LoraConfig(r=2, **chosen)), len(models)))
    given, model, other = models
    other.load_state_dict(model.state_dict())
    with quiet():
        given.save_pretrained(tmp_path / "adapter")
        other.load_adapter(tmp_path / "adapter", "default", is_trainable=True)
    before = _whole(model)
    report = load(model, tmp_path / "adapter")
    with opened(tmp_path / "adapter") as files:
        own = [name for name in files if name.endswith(("embed_tokens.weight", "base_layer.weight"))]
    assert own or not rows
    after, wanted = _whole(model), _whole(other)
    assert _differing(after, wanted) == []
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert not changed & set(report.untouched)
    assert rows or len(chosen) == 1 or any(place in name for name in changed for place in ("embed_tokens", "lm_head"))


def test_a_checkpoint_with_base_and_adapters_is_loaded_under_its_own_names(tmp_path: Path) -> None:
    given, model = _with("lora", 1), _with("lora", 2)
    save(given, tmp_path / "whole", to="safetensors:identity")
    report = load(model, tmp_path / "whole")
    assert report.untouched == ()
    assert _differing(_whole(model), _whole(given)) == []


def test_a_merged_adapter_is_refused(tmp_path: Path) -> None:
    _base(1).save_pretrained(tmp_path / "base")
    model = _with("embedding", 2)
    model.merge_adapter()
    before = _whole(model)
    with refused("UNSUPPORTED", hint="unmerge_adapter"):
        load(model, tmp_path / "base")
    assert _differing(_whole(model), before) == []


# Models of peft under FSDP2: a base and adapters are loaded and saved as on one rank; the oracle is peft.

ADAPTERS: dict[str, Any] = {
    "plain": {},
    "heads": {"modules_to_save": ["lm_head"]},
    "rank of three": {"r": 3, "target_modules": ["v_proj", "gate_proj"]},
}


def _adapted(kind: str, seed: int, mesh: Any = None) -> Any:
    with quiet():
        config = peft.LoraConfig(**{"r": 2, "target_modules": TARGETS, **ADAPTERS[kind]})
        model = _filled(peft.get_peft_model(_base(seed), config), seed)
    if mesh is not None:
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def _loaded(rank: int, world: int, kind: str, folder: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    alone, made = _adapted(kind, 2), _adapted(kind, 2, mesh)
    assert _differing(_whole(made), _whole(alone)) == []
    # The base, into what is below the adapters.
    tx.load(made, Path(folder, "base"))
    peft.set_base_model_state_dict(alone, _base(1).state_dict())
    with torch.no_grad():  # and into a head that is trained beside them, which peft leaves
        for name, parameter in alone.named_parameters():
            if ".modules_to_save." in name:
                parameter.copy_(_base(1).lm_head.weight)
    assert _differing(_whole(made), _whole(alone)) == []
    # The files of an adapter, which peft wrote, into the one that is active.
    tx.load(made, Path(folder, "adapter"))
    with quiet():
        alone.load_adapter(Path(folder, "adapter"), "default", is_trainable=True)
    assert _differing(_whole(made), _whole(alone)) == []
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(made(tokens).logits, alone(tokens).logits)
    # The whole, which another number of ranks reads.
    tx.save(made, Path(folder, "whole"), to="dcp:identity")
    again = _adapted(kind, 5, mesh)
    tx.load(again, Path(folder, "whole"))
    assert _differing(_whole(again), _whole(alone)) == []
    # The adapter alone, by the names that peft's files have.
    state = peft.get_peft_model_state_dict(made, save_embedding_layers=False)
    tx.save(dict(state), Path(folder, "saved"), to="safetensors:identity")


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ADAPTERS)
def test_bases_and_adapters_reach_sharded_models(kind: str, tmp_path: Path) -> None:
    with quiet():
        _base(1).save_pretrained(tmp_path / "base")
        given = _adapted(kind, 3)
        given.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    run(2, _loaded, kind, str(tmp_path))
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    saved = tx.open(tmp_path / "saved")
    assert set(saved) == set(written)
    assert all(saved[name].tobytes() == tensor.numpy().tobytes() for name, tensor in written.items())
    alone = _adapted(kind, 7)
    tx.load(alone, tmp_path / "whole")
    given.load_state_dict(alone.state_dict())
    assert _differing(_whole(given), _whole(alone)) == []
    base = _base(1).state_dict()
    assert all(torch.equal(tensor, base[name]) for name, tensor in peft.get_base_model_state_dict(alone).items())


TP_PLAN = {"q_proj.base_layer": 0, "q_proj.lora_B": 0, "down_proj.base_layer": 1, "down_proj.lora_A": 1}
"""Column- and row-parallel layers: the dim along which a weight is cut; every other one is replicated."""


def _tensor_parallel(model: Any, mesh: Any) -> Any:
    for name, parameter in list(model.named_parameters()):
        dim = next((dim for path, dim in TP_PLAN.items() if path in name), None)
        placement = Replicate() if dim is None else Shard(dim)
        path, _, last = name.rpartition(".")
        made = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement]))
        model.get_submodule(path).register_parameter(last, made)
    return model


def _reexpressed(rank: int, world: int, how: str, folder: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    made = _adapted("plain", 5, mesh) if how == "fsdp" else _tensor_parallel(_adapted("plain", 5), mesh)
    before = {name: tensor for name, tensor in _whole(made).items() if "lora_" not in name}
    files = tx.open(Path(folder, "titan"), config=Path(folder, "base"))
    tx.load(made, files.as_dialect("hf"))
    assert _differing(before, {name: _whole(made)[name] for name in before}) == []
    state = peft.get_peft_model_state_dict(made, save_embedding_layers=False)
    tx.save(dict(state), Path(folder, "saved", "adapter_model.safetensors"), to="safetensors:identity")
    if rank == 0:
        made.peft_config["default"].save_pretrained(Path(folder, "saved"))


@pytest.mark.parametrize("how", ["fsdp", "tp"])
def test_adapters_of_another_dialect_reach_sharded_models(how: str, tmp_path: Path) -> None:
    """torchtitan's RoPE has the rows of q in another order; what the ranks save, peft opens."""
    with quiet():
        _base(1).save_pretrained(tmp_path / "base")
        given = _adapted("plain", 3)
        given.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    tx.convert(tmp_path / "adapter", tmp_path / "titan", to="torchtitan", config=tmp_path / "base")
    (tmp_path / "saved").mkdir()
    run(2, _reexpressed, how, str(tmp_path))
    moved = load_file(tmp_path / "titan" / "adapter_model.safetensors")
    wanted = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    ours = "base_model.model.layers.0.attention.qkv_linear.wq.lora_B.weight"
    theirs = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    assert moved[ours].shape == wanted[theirs].shape
    assert not torch.equal(moved[ours], wanted[theirs])
    with quiet():
        again = peft.PeftModel.from_pretrained(_base(3), tmp_path / "saved")
        alone = peft.PeftModel.from_pretrained(_base(3), tmp_path / "adapter")
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(again(tokens).logits, alone(tokens).logits)
    assert _differing(_whole(again), _whole(alone)) == []
