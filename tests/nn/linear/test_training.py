"""A language model of grouped mixtures: trained with packed experts on one topology, resumed per expert on another, and
the reverse; and what comes out is a Qwen3-MoE.

Everything but the mixtures is transformers' own model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import transaxle as tx
from tests.live.ranks import run
from tests.live.topologies import Tensors, adamw, fill, gathered, same, settings, source
from tests.oracles import hub
from transaxle.nn import MoE

WIDTH, INNER, EXPERTS, CHOSEN, LAYERS, WORDS = 16, 8, 4, 2, 4, 32
CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 24, "head_dim": 8,
    "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN, "moe_intermediate_size": INNER, "tie_word_embeddings": False,
    "norm_topk_prob": True, "decoder_sparse_step": 1,
}  # fmt: skip
PACKED, SINGLE = ("fsdp x ep, packed", 4), ("fsdp x ep, per expert", 2)
"""Topologies, and their worlds."""
ROWS, TOKENS = 4, 6
BEFORE, AFTER = 3, 5
"""Steps before the checkpoint, and after it."""
TRUTH, START, SAVED, HUB = "truth.safetensors", "start", "saved", "hub"


def batch(number: int) -> torch.Tensor:
    return torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) * (number + 3) % WORDS


def build(*, packed: bool, mesh: DeviceMesh | None = None, meta: bool = True) -> Any:
    """Transformers' model with grouped mixtures."""
    with torch.device("meta" if meta else "cpu"):
        model = hub.model(CONFIG, torch.float32).train()
        for layer in model.model.layers:
            layer.mlp = MoE(WIDTH, INNER, EXPERTS, CHOSEN, single_grouped_weight=packed, ep=mesh)
    return model


def sharded(how: tuple[str, int], *, meta: bool = True) -> Any:
    """The model of a topology, of all ranks there are."""
    world = how[1]
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("ep_shard", "ep"))
    model = build(packed=how == PACKED, mesh=mesh["ep"], meta=meta)
    whole = mesh._flatten("dp")
    for layer in model.model.layers:
        experts = layer.mlp.experts
        fully_shard(experts, mesh=mesh["ep_shard"], shard_placement_fn=lambda one: Shard(one.dim() - 2))
        experts.set_gradient_divide_factor(float(world))  # its tokens are those of all ranks
        many = mesh["ep_shard"].size() > 1  # gloo has no sum that multiplies; of one rank torch would divide it twice
        experts.set_force_sum_reduction_for_comms(enable=many)
        fully_shard(layer, mesh=whole)
    fully_shard(model, mesh=whole)
    return model


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train on this rank's rows of each batch; return the losses."""
    losses = []
    for number in steps:
        own = batch(number).chunk(dist.get_world_size())[dist.get_rank()]
        logits = model(input_ids=own, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def everything(model: Any, optimizer: torch.optim.Optimizer) -> Tensors:
    """All weights and all state in full, of experts that other ranks have too."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, gathered(model, optimizer))
    return {name: tensor for part in parts for name, tensor in part.items()}


def _start(rank: int, world: int, how: tuple[str, int], folder: str) -> Any:
    """Train, save, and go on."""
    model = sharded(how)
    report = tx.load(model, f"{folder}/{START}")
    assert report.dialect == ("stacked" if how == PACKED else "separate")
    if how == PACKED:
        weight = model.get_parameter("model.layers.0.mlp.experts.linear_fc1.weight")
        assert isinstance(weight, DTensor)
        assert weight.placements == (Shard(1), Shard(0))
        assert weight.to_local().shape == (EXPERTS // 2, INNER, WIDTH)
    optimizer = adamw(model)
    train(model, optimizer, range(BEFORE))
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    tx.save(model, f"{folder}/{SAVED}", to="dcp", optimizer=optimizer, config=CONFIG)
    truth = everything(model, optimizer)
    if not rank:
        save_file(truth, f"{folder}/{TRUTH}")
    return settings(model, optimizer), train(model, optimizer, range(BEFORE, BEFORE + AFTER))


def other_form(truth: Tensors) -> Tensors:
    """The same tensors stacked or taken apart, in torch operations."""
    found: Tensors = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in truth.items():
        head, linear, rest = name.partition(".experts.linear_fc")
        layer, _, tail = rest.partition(".weight")
        number, slash, slot = tail.partition("/")
        stem = f"{head}{linear}{layer}.weight"
        if not linear:
            found[name] = tensor
        elif number:
            stacks.setdefault(f"{stem}{slash}{slot}", {})[int(number)] = tensor
        else:
            for expert in range(EXPERTS):
                found[f"{stem}{expert}{slash}{slot}"] = tensor[expert].clone() if tensor.dim() else tensor
    for name, parts in stacks.items():
        members = [parts[expert] for expert in range(EXPERTS)]
        found[name] = torch.stack(members) if members[0].dim() else members[0]
    return found


def _resume(rank: int, world: int, how: tuple[str, int], folder: str) -> Any:
    """Resume, and go on; beside it the same from the gathered state, given by hand."""
    model = sharded(how)
    optimizer = adamw(model)
    tx.load(model, f"{folder}/{SAVED}", optimizer=optimizer)
    truth = other_form(load_file(f"{folder}/{TRUTH}"))
    assert same(truth, everything(model, optimizer))
    said = settings(model, optimizer)
    swapped = _swapped(model, optimizer, truth)
    losses = train(model, optimizer, range(BEFORE, BEFORE + AFTER))
    by_hand = sharded(how, meta=False)
    other = adamw(by_hand)
    fill(by_hand, other, truth)
    for group in other.param_groups:
        group["lr"] *= 0.5
    again = train(by_hand, other, range(BEFORE, BEFORE + AFTER))
    assert same(gathered(model, optimizer), gathered(by_hand, other))
    return said, swapped, losses, again


def _swapped(model: Any, optimizer: torch.optim.Optimizer, truth: Tensors) -> bool:
    """Whether the state still passes for the true one when two ranks have each other's shard of some experts."""
    cut = next(p for name, p in model.named_parameters() if "linear_fc1" in name)
    local, rank = cut.to_local(), dist.get_rank()
    kept = local.detach().clone()
    parts = [torch.empty_like(kept) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, kept.contiguous())
    with torch.no_grad():
        local.copy_(parts[{0: 1, 1: 0}.get(rank, rank)])
        found = same(truth, everything(model, optimizer))
        local.copy_(kept)
    assert same(truth, everything(model, optimizer))
    return found


def _as_hub(weights: Tensors) -> Tensors:
    """What transformers holds in memory for packed weights."""
    names = {"linear_fc1.weight": "gate_up_proj", "linear_fc2.weight": "down_proj"}
    found = dict(weights)
    for own, theirs in names.items():
        found = {name.replace(own, theirs): tensor for name, tensor in found.items()}
    return found


def _settings(said: dict[str, Any]) -> dict[str, Any]:
    """Settings by what is left of names when experts have no numbers."""
    return {name.rstrip("0123456789") if "linear_fc" in name else name: each for name, each in said.items()}


@pytest.mark.oracle
@pytest.mark.parametrize(("first", "second"), [(PACKED, SINGLE), (SINGLE, PACKED)], ids=["apart", "together"])
def test_training_goes_on_in_the_other_form_elsewhere(
    first: tuple[str, int], second: tuple[str, int], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    source(tmp_path / START, CONFIG)
    started = run(first[1], _start, first, str(tmp_path))
    original = _mean([losses for _, losses in started])
    resumed = run(second[1], _resume, second, str(tmp_path))
    for said, swapped, losses, by_hand in resumed:
        assert _settings(said) == _settings(started[0][0])
        assert not swapped
        assert losses == by_hand
    assert _mean([losses for _, _, losses, _ in resumed]) == pytest.approx(original, rel=1e-5)
    tx.convert(tmp_path / SAVED, tmp_path / HUB, to="hf", sync=False)
    assert json.loads((tmp_path / HUB / "config.json").read_text())["model_type"] == CONFIG["model_type"]
    weights = {name: one for name, one in load_file(tmp_path / TRUTH).items() if "/" not in name}
    stacked = _as_hub(weights if first == PACKED else other_form(weights))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / HUB, dtype=torch.float32).eval()
    assert same(stacked, theirs.state_dict())
    reference = hub.model(CONFIG, torch.float32)
    reference.load_state_dict(stacked)
    ours = build(packed=second == PACKED).eval()
    tx.load(ours, tmp_path / HUB)
    with torch.no_grad():
        found = theirs(batch(1)).logits
        assert torch.equal(found, reference(batch(1)).logits)
        torch.testing.assert_close(ours(batch(1)).logits, found, rtol=1e-5, atol=1e-6)


def _mean(losses: list[list[float]]) -> list[float]:
    """The loss of each step over all ranks."""
    return [sum(step) / len(losses) for step in zip(*losses, strict=True)]
