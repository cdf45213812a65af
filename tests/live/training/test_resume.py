"""Real models from topology to topology: weights, moments, steps and settings stay the same bits, and so do losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from tests.live import topologies
from tests.live.ranks import run
from tests.live.topologies import ALONE, FSDP, FSDP_TP, HSDP, LLAMA, MOE, PP, TOKENS, TP, Tensors, build, gathered, same
from tests.oracles import hub
from transaxle.live.load import load
from transaxle.live.save import save

BEFORE, AFTER = 2, 3
"""Steps before the checkpoint, and after it."""
TRUTH = "truth.safetensors"
WAYS = [
    (FSDP, 4, "dcp"), (FSDP_TP, 4, "hf"), (TP, 4, "dcp:torchtitan"), (HSDP, 4, "dcp"),
    (FSDP, 2, "hf"), (PP, 2, "dcp"), (ALONE, 1, "dcp:torchtitan"),
]  # fmt: skip
"""How, on how many ranks, and what of."""


def _start(rank: int, world: int, config: dict[str, Any], folder: str) -> Any:
    """Train under FSDP, save in three ways, and go on."""
    model = build(config, FSDP, meta=True)
    load(model, f"{folder}/hub")
    optimizer = topologies.adamw(model)
    topologies.train(model, optimizer, BEFORE, FSDP)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    for to in sorted({to for _, _, to in WAYS}):
        save(model, f"{folder}/{to}", to=to, optimizer=optimizer)
    truth = gathered(model, optimizer)
    if not rank:
        save_file(truth, f"{folder}/{TRUTH}")
    said = topologies.settings(model, optimizer)
    return said, topologies.train(model, optimizer, AFTER, FSDP, begin=BEFORE)


def _swapped(model: Any, optimizer: torch.optim.Optimizer, truth: Tensors) -> bool | None:
    """Whether the state still passes for the true one when two ranks have each other's shard; None without shards."""
    cut = next((p for p in model.parameters() if isinstance(p, DTensor) and p.to_local().numel() < p.numel()), None)
    if cut is None:
        return None
    local, rank = cut.to_local(), dist.get_rank()
    kept = local.detach().clone()
    parts = [torch.empty_like(kept) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, kept.contiguous())
    other = next(n for n, part in enumerate(parts) if not torch.equal(part, parts[0]))
    with torch.no_grad():
        local.copy_(parts[{0: other, other: 0}.get(rank, rank)])
        found = same(truth, gathered(model, optimizer))
        local.copy_(kept)
    return found


def _resume(rank: int, world: int, config: dict[str, Any], folder: str, how: str, to: str) -> Any:
    """Resume, save for the hub, and go on; beside it the same from the gathered state, given by hand."""
    model = build(config, how, meta=True)
    optimizer = topologies.adamw(model)
    load(model, f"{folder}/{to}", optimizer=optimizer)
    save(model, f"{folder}/{how} {world}", to="hf", optimizer=optimizer)
    whole = load_file(f"{folder}/{TRUTH}")
    found = gathered(model, optimizer)
    assert all(name in whole for name in found)
    truth = {name: whole[name] for name in found}
    assert same(truth, found), how
    swapped = _swapped(model, optimizer, truth)
    assert same(truth, gathered(model, optimizer)), how
    said = topologies.settings(model, optimizer)
    losses = topologies.train(model, optimizer, AFTER, how, begin=BEFORE)
    by_hand = build(config, how, meta=False)
    other = topologies.adamw(by_hand)
    topologies.fill(by_hand, other, truth)
    for group in other.param_groups:
        group["lr"] *= 0.5
    again = topologies.train(by_hand, other, AFTER, how, begin=BEFORE)
    assert same(gathered(model, optimizer), gathered(by_hand, other)), how
    return sorted(found), swapped, said, losses, again


def _mean(losses: list[list[float]]) -> list[float]:
    """The loss of each step: the mean over the ranks that have one."""
    told = [each for each in losses if each]
    return [sum(step) / len(told) for step in zip(*told, strict=True)]


def _from_pretrained(folder: Path) -> tuple[Tensors, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model, told = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(told.values())  # the optimizer's state is in files that transformers does not look at
    with torch.no_grad():
        return model.state_dict(), model.eval()(torch.arange(TOKENS)[None]).logits


@pytest.mark.oracle
@pytest.mark.parametrize("config", [LLAMA, MOE], ids=["llama", "qwen3_moe"])
def test_training_resumes_under_any_parallelism(tmp_path: Path, config: dict[str, Any]) -> None:
    topologies.source(tmp_path / "hub", config)
    answers = run(4, _start, config, str(tmp_path))
    said, original = answers[0][0], [losses for _, losses in answers]
    whole = load_file(tmp_path / TRUTH)
    weights = {name: tensor for name, tensor in whole.items() if "/" not in name}
    reference = hub.model(config, torch.float32)
    reference.load_state_dict(weights)
    with torch.no_grad():
        logits = reference(torch.arange(TOKENS)[None]).logits
    for how, world, to in WAYS:
        said_to = config, str(tmp_path), how, to
        found = run(world, _resume, *said_to) if world > 1 else [_resume(0, 1, *said_to)]
        assert {name for names, *_ in found for name in names} == whole.keys()
        assert {name: each for _, _, own, *_ in found for name, each in own.items()} == said
        assert (False in [swapped for _, swapped, *_ in found]) is (how not in (PP, ALONE))
        losses, by_hand = [each[3] for each in found], [each[4] for each in found]
        assert losses == by_hand
        if (how, world) == WAYS[0][:2]:
            assert losses == original
        assert _mean(losses) == pytest.approx(_mean(original), rel=1e-5)
        held, answered = _from_pretrained(tmp_path / f"{how} {world}")
        assert same(weights, held)
        assert torch.equal(answered, logits)
