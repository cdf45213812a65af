"""Workers of vLLM as the table cuts them, without vLLM: each gets its part of what a conversion writes, with padding.

That the table cuts as vLLM does is compared with vLLM itself, see `tests.oracles.test_vllm`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import transaxle as tx
from tests.live.jobs import SECRET, apart, free_port
from tests.live.ranks import run
from tests.live.topologies import FSDP, LLAMA, MOE, build
from transaxle.engine.plan.rank_parts import config_for_ranks, engine_parts
from transaxle.families import builtin
from transaxle.refit.vllm_engine import Staged
from transaxle.refit.vllm_worker import DIALECT, Ranks, worker_share
from transaxle.torch_tensors import mark

TP = 2
PADDED = 128


def _worker(path: str, config: dict[str, Any], ranks: Ranks) -> tuple[Staged, dict[str, torch.Tensor]]:
    """Return a worker's parameters, empty, and what is to come into them."""
    whole = load_file(f"{path}/model.safetensors")
    parts = engine_parts(builtin()[config["model_type"]], DIALECT, config, whole, tp=ranks.tp, ep=ranks.ep)
    empty, truth = Staged(config_for_ranks(config, 1 if ranks.ep > 1 else ranks.tp)), {}
    for name, part in parts.items():
        value = whole[name]
        if part is not None:
            dim, positions = part
            own = positions[ranks.tp_rank]
            value = torch.cat([value.narrow(dim, start, stop - start) for start, stop in own], dim)
        truth[name] = value
        empty[name] = mark(torch.full_like(value, -1), worker_share(tuple(value.shape), part, ranks))
    return empty, truth


def _pushed(rank: int, world: int, folder: str, port: int, config: dict[str, Any], ep: int) -> None:
    job, own = apart(rank, world, world - TP)
    group = tx.refit.meet(f"127.0.0.1:{port}", rank, world, secret=SECRET)
    model: Any = {}
    if job == 0:
        torch.manual_seed(0)
        model = build(config, FSDP, meta=False)
        tx.save(model, f"{folder}/hub", to="hf")
    dist.barrier(group)
    if rank == 0:
        tx.convert(f"{folder}/hub", f"{folder}/vllm", to=f"safetensors:{DIALECT}", sync=False)
    dist.barrier(group)
    ranks = Ranks(TP, own, ep, own if ep > 1 else 0)
    empty, truth = (
        _worker(f"{folder}/vllm", dict(model.config.to_dict()) if job == 0 else config, ranks) if job else ({}, {})
    )
    with tx.Refit(model, empty, group, dialect=DIALECT, in_place=True) as refit:
        report = refit.push()
        assert report.bytes_received == report.bytes_needed
    assert truth.keys() == empty.keys()
    assert all(torch.equal(tensor, truth[name]) for name, tensor in empty.items())
    if job:
        assert empty["lm_head.weight"].shape[0] == PADDED // TP
        assert not bool(empty["lm_head.weight"][config["vocab_size"] - PADDED :].any()) or own == 0


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("config", "ep"), [(LLAMA, 1), (MOE, 1), (MOE, TP)], ids=["llama", "experts cut", "experts dealt"]
)
def test_every_worker_gets_its_part(config: dict[str, Any], ep: int, tmp_path: Any) -> None:
    run(4, _pushed, str(tmp_path), free_port(), config, ep)
