"""A cut model computes what the whole one does: logits, gradients, their norm, and five steps of training."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_ as torch_clips

import transaxle as tx
from tests.live.ranks import run
from tests.parallel.models import CONFIGS, beyond, build, gradients_off, off, shard, tokens
from transaxle.parallel.cutting import clip_grad_norm_, cut_parameters
from transaxle.parallel.tensor_parallel import tensor_parallel
from transaxle.torch_tensors import local_of

STEPS = 5
LOGITS, GRAD, CLIPPED = "logits", "grad", "clipped"
CLIP = 0.3
"""The norm to which the first gradients are scaled down, by a factor of several."""
ONCE, TRAINED = 2e-5, 1e-4
"""Largest differences, in units of the largest value of the tensor: some roundings of fp32, and what five steps of
AdamW make of them. What is cut wrongly is off by a tenth and more."""


def _compare(rank: int, world: int, config: dict[str, Any], dtensor: bool) -> dict[str, float]:
    whole = build(config)
    cut = tensor_parallel(deepcopy(whole), init_device_mesh("cpu", (world,)), dtensor=dtensor)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4) for model in (whole, cut)]
    found: dict[str, float] = {}
    named = dict(whole.named_parameters())
    for step in range(STEPS):
        ids = tokens(config, step)
        outputs = [model(input_ids=ids, labels=ids) for model in (whole, cut)]
        for output in outputs:
            output.loss.backward()
        if step == 0:
            found[LOGITS] = off(outputs[1].logits, outputs[0].logits)
            found |= {f"{name} {GRAD}": value for name, value in gradients_off(cut, whole).items()}
            norms = [torch_clips(whole.parameters(), CLIP), clip_grad_norm_(cut, CLIP)]
            assert norms[0] > 2 * CLIP
            found[f"norm {GRAD}"] = off(norms[1], norms[0])
            found |= {f"{name} {CLIPPED}": value for name, value in gradients_off(cut, whole).items()}
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter, kept in cut_parameters(cut):
        found[name] = off(local_of(parameter), kept.take(named[name].detach()))
        for state in ("exp_avg", "exp_avg_sq"):
            mine, wanted = (o.state[p][state] for o, p in zip(optimizers[::-1], (parameter, named[name]), strict=True))
            found[f"{name} {state}"] = off(local_of(mine), kept.take(wanted))
    return found


@pytest.mark.oracle
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_kind_of_model(kind: str, world: int) -> None:
    for found in run(world, _compare, CONFIGS[kind], world != 3):
        once = {name: off for name, off in found.items() if name.split()[-1] in (LOGITS, GRAD, CLIPPED)}
        trained = {name: off for name, off in found.items() if name not in once}
        assert beyond(once, ONCE) == beyond(trained, TRAINED) == {}
        assert 2 * len(trained) == 3 * (len(once) - 2)


# The norm of all gradients: every element of the model once, whoever holds it.


def _norms(rank: int, world: int) -> tuple[float, float]:
    """FSDP over two of tensor parallel over two: our norm, and that of the whole model."""
    config, ids = CONFIGS["phi3"], tokens(CONFIGS["phi3"])
    whole, model = build(config), build(config)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    tx.parallel.tensor_parallel(model, mesh["tp"])
    shard(model, mesh["dp"])
    for each in (whole, model):
        each(input_ids=ids, labels=ids).loss.backward()
    cut = tx.parallel.tensor_parallel(build(config), mesh["tp"])
    cut(input_ids=ids, labels=ids).loss.backward()
    for each, said in ((model, "same mesh"), (cut, "mixed")):
        with pytest.raises(RuntimeError, match=said):  # torch's own never takes a part beside DTensors for the whole
            torch_clips(each.parameters(), 1e9)
    wanted = torch_clips(whole.parameters(), 1e9)
    return float(tx.parallel.clip_grad_norm_(model, 1e9)), float(wanted)


def test_norm_under_fsdp() -> None:
    for mine, wanted in run(4, _norms):
        assert mine == pytest.approx(wanted, rel=1e-5)


def _shared(rank: int, world: int) -> list[tuple[float, float]]:
    """Ranks that share one head of keys and values, whose rows in a fused projection follow those of its queries."""
    found = []
    for kind, heads in (("phi3", 1), ("phi3", 2), ("llama", 1)):
        config = {**CONFIGS[kind], "num_key_value_heads": heads}
        whole, ids = build(config), tokens(config)
        cut = tx.parallel.tensor_parallel(build(config), init_device_mesh("cpu", (world,)))
        for each in (whole, cut):
            each(input_ids=ids, labels=ids).loss.backward()
        found.append((float(tx.parallel.clip_grad_norm_(cut, 1e9)), float(torch_clips(whole.parameters(), 1e9))))
    return found


def test_norm_of_heads_that_ranks_share() -> None:
    for found in run(4, _shared):
        for mine, wanted in found:
            assert mine == pytest.approx(wanted, rel=1e-5)
