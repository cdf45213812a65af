"""Runs of DeepSpeed and FSDP2 that make the steps of `peer`: the same gradients, the same Adam, in single precision.

Each is a task of `tests.live.ranks`. The weights are a hub folder's; weight decay is for matrices, as in Megatron.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tests.formats.megatron.training.peer import GRADIENT
from tests.oracles.deepspeed_peer.uncompiled import gloo_alone
from tests.oracles.quiet import quiet

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-6, 0.1
BATCH = 4
"""Samples of a step on each rank."""


def _model(hub: str) -> Any:
    from transformers import AutoModelForCausalLM

    with quiet():
        return AutoModelForCausalLM.from_pretrained(hub, dtype=torch.float32)


def _groups(model: Any) -> list[dict[str, Any]]:
    weights = list(model.parameters())
    matrices, others = ([each for each in weights if (each.dim() > 1) is wide] for wide in (True, False))
    return [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]


def _loss(model: Any) -> torch.Tensor:
    """Its gradients are a hundredth of the weights."""
    return torch.stack([(each * each).sum() for each in model.parameters()]).sum() * (GRADIENT / 2)


def zero(rank: int, world: int, hub: str, stage: int, source: str, folder: str, saves: list[int]) -> None:
    """Train with DeepSpeed's ZeRO up to some numbers of steps, and save after each.

    Args:
        rank: of this process.
        world: number of ranks.
        hub: folder of the weights.
        stage: of ZeRO.
        source: a universal checkpoint to go on from; empty: the weights.
        folder: for what is saved, one folder for each number of steps.
        saves: after how many steps.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "DS_ACCELERATOR": "cpu"}
    import deepspeed

    gloo_alone()
    deepspeed.init_distributed(dist_backend="gloo", rank=rank, world_size=world)
    model = _model(hub)
    optimizer = torch.optim.AdamW(_groups(model), lr=LR, betas=BETAS, eps=EPS)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        **({"checkpoint": {"load_universal": True}} if source else {}),
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if source:
        path, _ = engine.load_checkpoint(source)
        assert path is not None
    while engine.global_steps < saves[-1]:
        engine.backward(_loss(engine.module))
        engine.step()
        if engine.global_steps in saves:
            engine.save_checkpoint(str(Path(folder, str(engine.global_steps))), tag="saved")
    engine.destroy()


def fsdp(rank: int, world: int, hub: str, folder: str, saves: list[int]) -> None:
    """Train with FSDP2, and save DCP folders."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    del rank
    model = _model(hub)
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(_groups(model), lr=LR, betas=BETAS, eps=EPS)
    for number in range(1, saves[-1] + 1):
        for each in model.parameters():
            each.grad = each.detach() * GRADIENT
        optimizer.step()
        if number in saves:
            weights, state = get_state_dict(model, optimizer)
            save({"model": weights, "optim": state}, checkpoint_id=Path(folder, str(number)))
